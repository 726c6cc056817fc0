"""goodput soak: prompts that grow, figures, memory, the verdict and the files."""

from __future__ import annotations

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest

from goodput import soak, soak_client, soak_plot, status
from goodput.soak import Growth, Sample

WORKERS = {"aa": "spark1", "bb": "spark2"}


def request(number: int, **more: Any) -> dict[str, Any]:
    return {
        "number": number, "agent": 0, "session": number // 3, "turn": number % 3, "start_seconds": float(number),
        "ttft_seconds": 0.1 * (number + 1), "seconds": 0.5, "prompt_tokens": 100, "cached_tokens": 60,
        "completion_tokens": 4, "worker": "aa" if number % 4 else "bb", "state": "ok", "reason": "",
    } | more  # fmt: skip


def test_a_session_repeats_its_prompt_and_adds_to_it() -> None:
    first = soak_client.opening(1, 0, 1000)
    more = soak_client.tool_output(1, 0, 1, 1000)
    second = soak_client.longer(first, "done", more, 500, 1.3, 4000)
    assert second is not None
    assert second[:2] == first and second[2:] == [{"role": "assistant", "content": "done"}, more]
    # All sessions share the instructions; those of one project its files too.
    others = [soak_client.opening(1, session, 1000) for session in range(1, 12)]
    assert {messages[0]["content"] for messages in others} == {first[0]["content"]}
    projects = {messages[1]["content"].split("\n# task")[0] for messages in others}
    assert len(projects) == soak_client.PROJECTS
    assert len({messages[1]["content"] for messages in others}) == len(others)


def test_the_seed_decides_the_prompts() -> None:
    assert soak_client.opening(7, 3, 500) == soak_client.opening(7, 3, 500)
    assert soak_client.opening(7, 3, 500)[0] != soak_client.opening(8, 3, 500)[0]
    assert soak_client.tool_output(7, 3, 1, 500) != soak_client.tool_output(7, 3, 2, 500)


@pytest.mark.parametrize("seed", range(5))
def test_no_prompt_passes_the_limit(seed: int) -> None:
    limit, tokens_per_word = 2000, 2.0

    def tokens(messages: list[dict[str, str]]) -> int:
        return int(sum(len(message["content"].split()) for message in messages) * tokens_per_word)

    for session in range(10):
        messages: list[dict[str, str]] | None = soak_client.opening(seed, session, limit / tokens_per_word)
        turns = 0
        while messages is not None:
            assert tokens(messages) <= limit
            turns += 1
            answer = " ".join(["word"] * random.Random(turns).randint(0, 60))
            more = soak_client.tool_output(seed, session, turns, limit / tokens_per_word)
            messages = soak_client.longer(messages, answer, more, tokens(messages), tokens_per_word, limit)
        assert turns > 2


def test_percentiles_lie_between_the_ranks() -> None:
    values = [float(value) for value in range(1, 102)]
    assert [soak.percentile(values, percent) for percent in (0, 50, 90, 99, 100)] == [1, 51, 91, 100, 101]
    assert soak.percentile([1.0, 2.0], 50) == 1.5
    assert soak.percentile([], 50) is None


def test_figures_count_only_good_requests() -> None:
    failed = {"state": "failed", "reason": "HTTP 503: no worker", "prompt_tokens": None, "ttft_seconds": None}
    found = soak.figures([*(request(n) for n in range(8)), request(8, **failed)], 10.0, WORKERS)
    assert (found["requests"], found["errors"], found["sessions"]) == (9, 1, 3)
    assert found["error_reasons"] == {"HTTP 503: no worker": 1}
    assert (found["requests_per_second"], found["output_tokens_per_second"], found["cached_share"]) == (0.8, 3.2, 0.6)
    assert found["ttft_seconds"]["p50"] == pytest.approx(0.45)
    assert found["requests_by_worker"] == {"spark1": 6, "spark2": 2}


def test_nothing_answered_is_no_division_by_zero() -> None:
    found = soak.figures([], 0.0, {})
    assert found["cached_share"] is None and found["ttft_seconds"]["p50"] is None
    assert "no request was answered" in soak.findings(found, [], [], 1, {})


def series(node: str, pid: int, sizes: list[int], start: float = 0.0) -> list[Sample]:
    return [
        Sample(start + 10.0 * index, node, "goodput-worker", pid, "w", mib * soak.MIB)
        for index, mib in enumerate(sizes)
    ]


def test_growth_counts_from_the_warm_up() -> None:
    [row] = soak.growth(series("spark1", 1, [100, 150, 152, 155]), 15.0)
    assert (row.start_bytes, row.warm_bytes, row.end_bytes) == tuple(mib * soak.MIB for mib in (100, 152, 155))
    assert row.growth_bytes == 3 * soak.MIB and row.lasted


def test_a_helper_that_comes_and_goes_does_not_grow() -> None:
    samples = [*series("spark1", 1, [100, 100, 100, 100]), *series("spark1", 2, [10, 90], 10.0)]
    rows = soak.growth(samples, 5.0)
    assert [(row.pid, row.lasted) for row in rows] == [(1, True), (2, False)]
    assert soak.findings(soak.figures([request(0)], 1, {}), rows, [], soak.MIB, {}) == []


@pytest.mark.parametrize(("allowed_mib", "bad"), [(6, False), (4, True)])
def test_too_much_growth_is_a_finding(allowed_mib: int, bad: bool) -> None:
    rows = soak.growth(series("spark1", 1, [100, 105]), 0.0)
    found = soak.findings(soak.figures([request(0)], 1, {}), rows, [], allowed_mib * soak.MIB, {"spark1": 1.0})
    assert found == (["goodput-worker on spark1 (w) grew by 5.0 MiB after the warm-up, allowed 4 MiB"] if bad else [])


def test_an_idle_worker_a_restart_and_no_processes_are_findings() -> None:
    row = Growth("spark1", "goodput-worker", 1, "w", 1, 1, 1, True)
    figures = soak.figures([request(0)], 1, {})
    assert "the worker on spark2 counted no request" in soak.findings(figures, [row], [], 1, {"spark2": 0.0})[0]
    assert soak.findings(figures, [row], ["x was restarted"], 1, {}) == ["x was restarted"]
    assert "no process of a goodput unit" in soak.findings(figures, [], [], 1, {})[0]


def look(pid: int, requests: float | None) -> status.Site:
    unit = status.Unit("goodput-worker", "active", False, 1.0, 0, 1, pid)
    return status.Site([status.Node("spark1", "a", units=[unit], requests=requests)], workers={"spark1": "aa"})


def test_requests_counted_by_the_workers_between_two_looks() -> None:
    assert soak.counted(look(1, 5.0), look(1, 12.0)) == {"spark1": 7.0}
    assert soak.counted(look(1, None), look(1, 12.0)) == {"spark1": 12.0}
    # Restarted meanwhile: it counts from zero.
    assert soak.counted(look(1, 50.0), look(2, 12.0)) == {"spark1": 12.0}
    assert soak.restarts(look(1, 1.0), look(1, 1.0)) == []
    assert "goodput-worker on spark1 was restarted" in soak.restarts(look(1, 1.0), look(2, 1.0))[0]


def test_samples_move_to_the_clock_of_the_requests() -> None:
    sample = Sample(3.0, "a", "u", 1, "p", 1)
    assert soak.shifted(sample, 2.0).seconds == 1.0
    assert soak.shifted(sample, 5.0).seconds == 0.0


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/usr/bin/python3", "-m", "dynamo.mocker", "--model-path", "x"], "dynamo.mocker"),
        (["/usr/bin/python3", "/opt/goodput/runtime/bin/lmcache", "server"], "lmcache"),
        (["/usr/bin/etcd", "--name", "x"], "etcd"),
        (["VLLM::EngineCore"], "VLLM::EngineCore"),
    ],
)
def test_programs_by_their_command_line(words: list[str], name: str) -> None:
    assert soak.program(words) == name


def test_files(tmp_path: Path) -> None:
    requests = [request(0), request(1, state="failed", reason='said "no"', ttft_seconds=None)]
    samples = series("spark1", 1, [100, 101])
    soak.write(tmp_path / "a/b", requests, samples, {"ok": True}, WORKERS)
    with (tmp_path / "a/b/requests.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert [(row["number"], row["node"], row["ttft_seconds"], row["reason"]) for row in rows] == [
        ("0", "spark2", "0.1", ""),
        ("1", "spark1", "", 'said "no"'),
    ]
    assert (tmp_path / "a/b/memory.csv").read_text().splitlines()[1] == "0.0,spark1,goodput-worker,1,w,104857600"
    assert json.loads((tmp_path / "a/b/summary.json").read_text()) == {"ok": True}


def test_progress_tells_the_last_minute() -> None:
    line = soak.progress([request(n, start_seconds=float(n * 10)) for n in range(20)], 200.0)
    assert "20 requests (0.10/s)  0 errors" in line and "cached 60 %" in line
    assert "TTFT p50 - p90 - s" in soak.progress([], 1.0)


def test_every_good_request_is_in_one_bin() -> None:
    requests = [request(n, start_seconds=n * 1.7, seconds=30.0) for n in range(50)]
    width, found = soak_plot.bins(requests, 90.4)
    assert len(found) == 60 and width * 60 == pytest.approx(90.4)
    assert sum(len(part) for part in found) == 50
    assert len(soak_plot.bins(requests, 0.0)[1]) == 1


def test_the_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the picture is optional")
    samples = [*series("spark1", 1, [100, 150, 152]), *series("spark2", 2, [90, 91, 92])]
    soak_plot.draw(tmp_path / "a.png", "t", [request(n) for n in range(30)], samples, WORKERS, 30.0, 6.0)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    # Nothing answered: still a picture.
    soak_plot.draw(tmp_path / "b.png", "t", [request(0, state="failed")], [], WORKERS, 0.0, 0.0)
