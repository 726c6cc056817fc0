"""What a user of the endpoint notices of a fault, and what it leaves of the stored cache.

``Traffic`` sends short requests from the first node while a fault happens and says how many failed and how long nothing
was answered. ``stored`` digests what LMCache keeps in L2 on a node.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from conftest import INVENTORY, ROOT, Outcome, Pair

FIGURES = ROOT / ".goodput/test/serving-faults.json"
URL = "http://127.0.0.1:8000"
UNIT = "fault-traffic"
OUTPUT = f"/run/{UNIT}.jsonl"
L2 = "/srv/goodput/l2"
CLIENT = """
import json, sys, time, urllib.request, uuid
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
body = {"model": "MODEL", "max_tokens": 4, "messages": [{"role": "user", "content": ""}]}
while True:
    body["messages"][0]["content"] = uuid.uuid4().hex
    asked, problem = time.time(), ""
    try:
        request = urllib.request.Request("URL/v1/chat/completions", json.dumps(body).encode(),
                                         {"Content-Type": "application/json"})
        with opener.open(request, timeout=60) as answer:
            problem = "" if json.load(answer)["choices"] else "no choices"
    except OSError as error:
        problem = f"{type(error).__name__}: {error}"
    print(json.dumps({"asked": asked, "answered": time.time(), "problem": problem}), flush=True)
    time.sleep(0.3)
"""


@dataclass(frozen=True)
class Seen:
    """``silence_seconds``: the longest time from one good answer to the next, less what is usual."""

    requests: int
    failed: int
    silence_seconds: float
    problems: tuple[str, ...]


class Traffic:
    """Requests one after the other from the first node until ``stop``."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair

    def start(self) -> None:
        models = json.loads(self.pair.sh("spark1", f"curl -sS --noproxy '*' {URL}/v1/models"))
        client = CLIENT.replace("MODEL", models["data"][0]["id"]).replace("URL", URL)
        self.pair.sh(
            "spark1",
            f"systemctl stop {UNIT} 2>/dev/null || true; cat > /run/{UNIT}.py <<'CLIENT'\n{client}\nCLIENT\n"
            f"rm -f {OUTPUT}; systemd-run -q --collect --unit {UNIT} -p StandardOutput=file:{OUTPUT} "
            f"python3 /run/{UNIT}.py",
        )
        self.wait(lambda rows: len(rows) >= 3, "the first answers")

    def rows(self) -> list[dict[str, Any]]:
        text = self.pair.sh("spark1", f"cat {OUTPUT} 2>/dev/null || true")
        return [json.loads(line) for line in text.splitlines() if line.endswith("}")]

    def wait(self, wanted: Callable[[list[dict[str, Any]]], bool], what: str, seconds: float = 300) -> None:
        deadline = time.monotonic() + seconds
        while not wanted(self.rows()):
            assert time.monotonic() < deadline, f"waited {seconds:.0f} s for {what}: {self.rows()[-3:]}"
            time.sleep(1)

    def stop(self) -> Seen:
        """After two more good answers, so that a fault that still lasts is not taken for its end."""
        known = len(self.rows())
        self.wait(lambda rows: sum(not row["problem"] for row in rows[known:]) >= 2, "answers after the fault")
        rows = self.rows()
        self.pair.sh("spark1", f"systemctl stop {UNIT}; rm -f {OUTPUT} /run/{UNIT}.py")
        good = [row["answered"] for row in rows if not row["problem"]]
        gaps = sorted(later - earlier for earlier, later in itertools.pairwise(good))
        problems = [row["problem"] for row in rows if row["problem"]]
        return Seen(len(rows), len(problems), round(gaps[-1] - gaps[len(gaps) // 2], 1), tuple(sorted(set(problems))))


def until(pair: Pair, node: str, command: str, seconds: float = 600) -> float:
    """Seconds until ``command`` succeeds on the node."""
    begin = time.monotonic()
    while pair.sh(node, f"{{ {command}; }} >/dev/null && echo yes", check=False).strip() != "yes":
        assert time.monotonic() - begin < seconds, f"{node}: not within {seconds:.0f} s: {command}"
        time.sleep(1)
    return time.monotonic() - begin


def proof(pair: Pair, layer: str) -> Outcome:
    """`goodput verify --deep` of one tier."""
    return pair.command("python", "-m", "goodput.verify", "--inventory", str(INVENTORY), "--deep", "--layer", layer)


def restart(pair: Pair, node: str) -> None:
    """LMCache's server, until it answers."""
    pair.sh(node, "systemctl restart goodput-lmcache")
    address = pair.hosts[node]["goodput_management_address"]
    until(pair, node, f"curl -sf -m 5 --noproxy '*' http://{address}:9500/healthcheck")


@contextmanager
def overridden(pair: Pair, node: str, text: str) -> Iterator[None]:
    """LMCache on one node with these lines after its unit's own, and without them again."""
    folder = "/etc/systemd/system/goodput-lmcache.service.d"
    pair.sh(node, f"mkdir -p {folder}; cat > {folder}/somebody.conf <<'UNIT'\n{text}\nUNIT\nsystemctl daemon-reload")
    try:
        restart(pair, node)
        yield
    finally:
        pair.sh(node, f"rm -r {folder}; systemctl daemon-reload")
        restart(pair, node)


def workers_listed(pair: Pair) -> int:
    """Workers that the frontend can send requests to."""
    text = pair.sh("spark1", f"curl -sS -m 10 --noproxy '*' {URL}/health", check=False)
    try:
        return sum(entry["endpoint"] == "generate" for entry in json.loads(text)["instances"])
    except (ValueError, KeyError):
        return 0


def stored(pair: Pair, node: str) -> dict[str, str]:
    """sha256 by name of every object in L2 on a node."""
    lines = pair.sh(node, f"find {L2} -type f -name '*.data' -exec sha256sum {{}} +").splitlines()
    return {line.split()[1]: line.split()[0] for line in lines}


def seed(pair: Pair, node: str, count: int = 4) -> list[str]:
    """Objects as LMCache names them, of one kind, so that a fault has something to lose; returns their paths."""
    flag = "tr '\\0' '\\n' < /proc/$(systemctl show -P MainPID goodput-lmcache)/cmdline | grep -A1 -x -- --l2-adapter"
    directory = json.loads(pair.sh(node, flag).splitlines()[1])["base_path"]
    names = [f"{directory}/fault@0x01000100@0@{number:064x}.data" for number in range(count)]
    for name in names:
        pair.sh(node, f"head -c 65536 /dev/urandom > {name}; chown goodput: {name}; sync {name}")
    return names


def record(fault: str, seen: Seen, again_seconds: float, lost: int | None) -> None:
    """Keep the figures of one fault, for the table in docs/serving.md (tools/fault_table.py writes it)."""
    rows = json.loads(FIGURES.read_text()) if FIGURES.exists() else {}
    rows.pop(fault, None)
    rows[fault] = {**asdict(seen), "again_seconds": round(again_seconds, 1), "objects_lost": lost}
    Path(FIGURES).parent.mkdir(parents=True, exist_ok=True)
    FIGURES.write_text(json.dumps(rows, indent=2) + "\n")
    print(f"{fault}: {rows[fault]}")
