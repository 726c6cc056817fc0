"""Waiting for the rails before LMCache starts: until they are there, or until the limit with a stated warning."""

from __future__ import annotations

from pathlib import Path

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import rail_wait


def port(root: Path, device: str, state: str) -> None:
    (root / device / "ports/1").mkdir(parents=True, exist_ok=True)
    (root / device / "ports/1/state").write_text(f"{state}\n")


@pytest.mark.parametrize(
    ("state", "bound", "text"),
    [
        ("4: ACTIVE", True, ""),
        ("1: DOWN", True, "rail0: port 1: DOWN"),
        ("4: ACTIVE", False, "rail0: no address 192.168.100.2"),
        (None, True, "rail0: no such RDMA device"),
    ],
)
def test_a_rail_needs_link_and_address(tmp_path: Path, state: str | None, bound: bool, text: str) -> None:
    if state:
        port(tmp_path, "rail0", state)
    assert rail_wait.missing("rail0=192.168.100.2", tmp_path, lambda address: bound) == text


def test_an_address_is_asked_of_the_kernel() -> None:
    assert rail_wait.has_address("127.0.0.1") and not rail_wait.has_address("192.0.2.1")


def test_it_waits_for_a_late_rail_and_not_longer() -> None:
    now = [0.0]

    def lacks(rail: str) -> str:
        return "b: port 1: DOWN" if rail == "b=" and now[0] < 7 else ""

    def sleep(seconds: float) -> None:
        now[0] += seconds

    assert rail_wait.wait(["a=", "b="], 60, lacks, lambda: now[0], sleep) == ([], 7.0)
    now[0] = 0.0
    assert rail_wait.wait(["a=", "b="], 5, lacks, lambda: now[0], sleep) == (["b: port 1: DOWN"], 5.0)


def test_a_missing_rail_is_a_warning_and_the_server_starts(capsys: pytest.CaptureFixture[str]) -> None:
    assert rail_wait.main(["--rail", "no-such-device=192.0.2.1", "--seconds", "0"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("<4>rails: found no-such-device: no such RDMA device after 0 s; required:")
    assert "fix:" in said and "systemctl restart goodput-lmcache" in said
