"""``goodput soak``: figures of a run, from its requests and from the memory of the processes. Pure but for the files.

A request is one line of ``soak_client``. A memory sample is the resident memory of one process of a goodput unit at one
time. The verdict compares memory at the end with memory after a warm-up, because caches and pools fill first.
"""

from __future__ import annotations

import base64
import csv
import json
import shlex
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils import chat_probe

from goodput import soak_client
from goodput.node_questions import Process
from goodput.status import Site

Request = Mapping[str, Any]
REQUEST_COLUMNS = (
    "number", "agent", "session", "turn", "start_seconds", "ttft_seconds", "seconds", "prompt_tokens", "cached_tokens",
    "completion_tokens", "worker", "node", "state", "reason",
)  # fmt: skip
MEMORY_COLUMNS = ("seconds", "node", "unit", "pid", "program", "rss_bytes")
MIB = 2**20


@dataclass(frozen=True)
class Sample:
    """Resident memory of one process, ``seconds`` after the first request."""

    seconds: float
    node: str
    unit: str
    pid: int
    program: str
    rss_bytes: int


@dataclass(frozen=True)
class Growth:
    """One process from first to last sample. ``warm_bytes``: after the warm-up; growth counts from there."""

    node: str
    unit: str
    pid: int
    program: str
    start_bytes: int
    warm_bytes: int
    end_bytes: int
    lasted: bool

    @property
    def growth_bytes(self) -> int:
        return self.end_bytes - self.warm_bytes


def command(options: Mapping[str, Any]) -> str:
    """The shell command that runs the client on a node: its two modules go with it, nothing is installed."""
    modules = []
    for name, module in ((chat_probe.__name__, chat_probe), ("__main__", soak_client)):
        source = Path(str(module.__file__)).read_bytes()
        modules.append((name, base64.b64encode(zlib.compress(source, 9)).decode()))
    loader = (
        "import base64, sys, types, zlib\n"
        f"for name, packed in {modules!r}:\n"
        "    module = sys.modules[name] if name == '__main__' else types.ModuleType(name)\n"
        "    sys.modules[name] = module\n"
        "    exec(compile(zlib.decompress(base64.b64decode(packed)), name, 'exec'), module.__dict__)\n"
    )
    return shlex.join(["exec", "python3", "-c", loader, json.dumps(dict(options))])


def program(words: Sequence[str]) -> str:
    """``dynamo.mocker``, ``lmcache``, ``etcd``: what a command line runs."""
    if "-m" in words[:-1]:
        return words[words.index("-m") + 1]
    names = [word.rpartition("/")[2] for word in words[:2]]
    return names[1] if names[0].startswith("python") and len(names) > 1 else names[0]


def sampled(seconds: float, node: str, processes: Iterable[Process]) -> list[Sample]:
    return [
        Sample(round(seconds, 1), node, each.unit, each.pid, program(each.words), each.rss_bytes) for each in processes
    ]


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between the two nearest ranks, as NumPy's default; None of nothing."""
    ranked = sorted(values)
    if not ranked:
        return None
    place = (len(ranked) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ranked) - 1)
    return ranked[low] + (ranked[high] - ranked[low]) * (place - low)


def spread(values: Sequence[float]) -> dict[str, float | None]:
    found = {f"p{percent}": percentile(values, percent) for percent in (50, 90, 99)}
    found["max"] = max(values) if values else None
    return {key: None if value is None else round(value, 4) for key, value in found.items()}


def _sum(requests: Iterable[Request], key: str) -> int:
    return sum(int(each[key] or 0) for each in requests)


def figures(requests: Sequence[Request], seconds: float, workers: Mapping[str, str]) -> dict[str, Any]:
    """What the requests say. ``seconds``: how long they were sent; ``workers``: node by worker id."""
    good = [each for each in requests if each["state"] == "ok"]
    prompt, cached, output = (_sum(good, key) for key in ("prompt_tokens", "cached_tokens", "completion_tokens"))
    by_worker: dict[str, int] = dict.fromkeys(workers.values(), 0)
    for each in good:
        name = workers.get(each["worker"], each["worker"] or "not named")
        by_worker[name] = by_worker.get(name, 0) + 1
    reasons: dict[str, int] = {}
    for each in requests:
        if each["state"] != "ok":
            reasons[each["reason"]] = reasons.get(each["reason"], 0) + 1
    span = max(seconds, 1e-9)
    return {
        "requests": len(requests),
        "errors": len(requests) - len(good),
        "error_reasons": reasons,
        "sessions": len({each["session"] for each in requests}),
        "seconds": round(seconds, 1),
        "requests_per_second": round(len(good) / span, 3),
        "prompt_tokens": prompt,
        "prompt_tokens_per_second": round(prompt / span, 1),
        "output_tokens": output,
        "output_tokens_per_second": round(output / span, 2),
        "longest_prompt_tokens": max((int(each["prompt_tokens"] or 0) for each in good), default=0),
        "cached_tokens": cached,
        "cached_share": round(cached / prompt, 4) if prompt else None,
        "ttft_seconds": spread([each["ttft_seconds"] for each in good if each["ttft_seconds"] is not None]),
        "request_seconds": spread([each["seconds"] for each in good]),
        "requests_by_worker": by_worker,
    }


def growth(samples: Sequence[Sample], warm_up_seconds: float) -> list[Growth]:
    """One row a process, in the order of nodes and units as sampled.

    ``lasted`` is False for a process that is missing from the first or the last sample of its node.
    """
    processes: dict[tuple[str, str, int], list[Sample]] = {}
    ends: dict[str, list[float]] = {}
    for each in samples:
        processes.setdefault((each.node, each.unit, each.pid), []).append(each)
        ends.setdefault(each.node, []).append(each.seconds)
    rows = []
    for (node, unit, pid), found in processes.items():
        found.sort(key=lambda each: each.seconds)
        warm = next((each for each in found if each.seconds >= warm_up_seconds), found[-1])
        lasted = found[0].seconds == min(ends[node]) and found[-1].seconds == max(ends[node])
        first, last = found[0], found[-1]
        rows.append(Growth(node, unit, pid, last.program, first.rss_bytes, warm.rss_bytes, last.rss_bytes, lasted))
    return rows


def findings(
    figures_: Mapping[str, Any],
    rows: Sequence[Growth],
    restarts: Sequence[str],
    max_growth_bytes: int,
    counted: Mapping[str, float | None],
) -> list[str]:
    """Why the run is not ok; empty if it is. ``counted``: requests that each node's worker counted meanwhile."""
    found = []
    if not figures_["requests"]:
        found.append("no request was answered")
    for reason, count in figures_["error_reasons"].items():
        found.append(f"{count} of {figures_['requests']} requests failed: {reason}")
    for name, count in counted.items():
        if figures_["requests"] and not count:
            found.append(f"the worker on {name} counted no request, required at least 1; raise --concurrency")
    if not rows:
        found.append("found no process of a goodput unit to watch; `goodput status`")
    found += restarts
    for row in rows:
        # A helper that came and went tells nothing; a unit's main process that did is among the restarts.
        if row.lasted and row.growth_bytes > max_growth_bytes:
            grown = f"{row.growth_bytes / MIB:.1f} MiB after the warm-up"
            found.append(
                f"{row.unit} on {row.node} ({row.program}) grew by {grown}, allowed {max_growth_bytes / MIB:g} MiB"
            )
    return found


def write(
    folder: Path,
    requests: Sequence[Request],
    samples: Sequence[Sample],
    summary: Mapping[str, Any],
    workers: Mapping[str, str],
) -> None:
    """requests.csv, memory.csv and summary.json."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "requests.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.DictWriter(stream, REQUEST_COLUMNS, extrasaction="ignore")
        rows.writeheader()
        rows.writerows({**each, "node": workers.get(each["worker"], "")} for each in requests)
    with (folder / "memory.csv").open("w", newline="", encoding="utf-8") as stream:
        rows = csv.DictWriter(stream, MEMORY_COLUMNS)
        rows.writeheader()
        rows.writerows(asdict(each) for each in samples)
    (folder / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def progress(requests: Sequence[Request], elapsed: float, window_seconds: float = 60.0) -> str:
    """One line about the last minute."""
    since = elapsed - window_seconds
    late = [each for each in requests if each["state"] == "ok" and each["start_seconds"] + each["seconds"] >= since]
    ttft = [each["ttft_seconds"] for each in late if each["ttft_seconds"] is not None]
    span = max(1e-9, min(window_seconds, elapsed))
    middle, high = percentile(ttft, 50), percentile(ttft, 90)
    prompt = _sum(late, "prompt_tokens")
    cached = f"{100 * _sum(late, 'cached_tokens') / prompt:.0f} %" if prompt else "-"
    errors = sum(each["state"] != "ok" for each in requests)
    return (
        f"{len(requests):>6} requests ({len(late) / span:.2f}/s)  {errors} errors"
        f"  TTFT p50 {'-' if middle is None else f'{middle:.2f}'} p90 {'-' if high is None else f'{high:.2f}'} s"
        f"  output {_sum(late, 'completion_tokens') / span:.1f} tokens/s"
        f"  cached {cached}"
    )


def shifted(sample: Sample, lag_seconds: float) -> Sample:
    """The same sample on the clock of the requests; what came before the first request counts as second 0."""
    return replace(sample, seconds=round(max(0.0, sample.seconds - lag_seconds), 1))


def as_object(row: Growth) -> dict[str, Any]:
    return {**asdict(row), "growth_bytes": row.growth_bytes}


def counted(before: Site, after: Site) -> dict[str, float | None]:
    """Requests that each node's worker counted between two looks; from zero where it was restarted."""
    earlier = {node.name: node.requests or 0.0 for node in before.nodes}
    found: dict[str, float | None] = {}
    for node in after.nodes:
        if node.name in after.workers or node.requests is not None:
            now = node.requests
            found[node.name] = None if now is None else now - earlier[node.name] if now >= earlier[node.name] else now
    return found


def restarts(before: Site, after: Site) -> list[str]:
    """Units that another process serves than before, and nodes that do not answer any more."""
    earlier = {(node.name, unit.name): unit for node in before.nodes for unit in node.units}
    found = []
    for node in after.nodes:
        if node.error:
            found.append(node.error)
        for unit in node.units:
            old = earlier.get((node.name, unit.name))
            if old is not None and old.main_pid and old.main_pid != unit.main_pid:
                look = f"`goodput logs {unit.name.removeprefix('goodput-')}`"
                found.append(f"{unit.name} on {node.name} was restarted or ended; {look}")
    return found
