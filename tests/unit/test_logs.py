"""goodput logs: which unit is meant, and the journals of several nodes as one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from goodput import logs

ROOT = Path(__file__).resolve().parents[2]

UNITS = ["goodput-worker.service", "goodput-lmcache.service", "goodput-clocks-reassert.timer", "goodput-etcd.service"]
SPARK1 = """-- Boot 1f2e --
2026-11-29T23:56:25.100000+0000 spark1 python3[11]: starting
2026-11-29T23:56:27.300000+0000 spark1 python3[11]: Traceback (most recent call last):
  File "x.py", line 1
ValueError: bad
-- cursor: s=abc;i=1
"""
SPARK2 = """2026-11-29T23:56:26.200000+0000 spark2 python3[12]: starting
2026-11-29T23:56:27.200000+0000 spark2 python3[12]: ready
"""


@pytest.mark.parametrize("name", ["worker", "goodput-worker", "goodput-worker.service", " worker "])
def test_a_unit_by_any_of_its_names(name: str) -> None:
    assert logs.resolve(name, UNITS) == "goodput-worker.service"


def test_other_kinds_of_units_keep_their_ending() -> None:
    assert logs.resolve("clocks-reassert.timer", UNITS) == "goodput-clocks-reassert.timer"


def test_a_typing_error_names_the_nearest() -> None:
    with pytest.raises(logs.UnknownUnit, match="found no unit 'wroker'; did you mean worker\\? units here: clocks-re"):
        logs.resolve("wroker", UNITS)
    with pytest.raises(logs.UnknownUnit, match="found no unit 'xyz'; units here"):
        logs.resolve("xyz", UNITS)
    with pytest.raises(logs.UnknownUnit, match="no goodput unit is installed"):
        logs.resolve("worker", [])


def test_entries_keep_their_lines_and_the_cursor_is_no_entry() -> None:
    entries, cursor = logs.split(SPARK1)
    assert cursor == "s=abc;i=1"
    assert [entry.splitlines()[-1] for entry in entries] == [
        "-- Boot 1f2e --",
        "2026-11-29T23:56:25.100000+0000 spark1 python3[11]: starting",
        "ValueError: bad",
    ]
    assert logs.split("") == ([], None)


def test_nodes_are_merged_by_time() -> None:
    rows = logs.merge({"spark1": logs.split(SPARK1)[0], "spark2": logs.split(SPARK2)[0]})
    assert [(node, entry.partition("]: ")[2].splitlines()[:1]) for node, entry in rows] == [
        # A boot mark stays before the first entry of that boot.
        ("spark1", []),
        ("spark1", ["starting"]),
        ("spark2", ["starting"]),
        ("spark2", ["ready"]),
        ("spark1", ["Traceback (most recent call last):"]),
    ]


def test_the_command_is_safe_and_goes_on_after_the_cursor() -> None:
    assert logs.command("u", lines=5, since="-10min; reboot").endswith("-n 5 --since '-10min; reboot'")
    assert "--after-cursor 's=abc;i=1'" in logs.command("u", lines=5, since="x", cursor="s=abc;i=1")
    assert "--since" not in logs.command("u", lines=5, since="x", cursor="s=abc;i=1")


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, dict[str, str]]:
    """(inventory, environment): this machine under two names, with a journal of its own, and a node that is off."""
    systemctl = "printf 'goodput-worker.service enabled enabled\\ngoodput-etcd.service enabled enabled\\n'"
    journal = f"""
case "$*" in
*--after-cursor*) ;;
*since*tomorrow*) echo "Failed to parse timestamp" >&2; exit 1;;
*) cat {tmp_path}/journal;;
esac"""
    (tmp_path / "bin").mkdir()
    for name, body in (("systemctl", systemctl), ("journalctl", journal)):
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    (tmp_path / "journal").write_text(SPARK1)
    here = {"ansible_connection": "local", "ansible_become": False}
    # Nothing listens on the discard port.
    off = {"ansible_host": "127.0.0.1", "ansible_port": 9, "ansible_user": "x"}
    hosts = {"spark1": here, "spark2": here, "spark3": off}
    (tmp_path / "hosts.yml").write_text(json.dumps({"sparks": {"hosts": hosts}}))
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    return tmp_path / "hosts.yml", {**os.environ, "PATH": path, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'collections'}"}


def goodput(pair: tuple[Path, dict[str, str]], *words: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "goodput.cli", words[0], "-i", str(pair[0]), *words[1:]]
    return subprocess.run(argv, env=pair[1], capture_output=True, text=True, check=False, timeout=120)


def test_two_nodes_and_one_that_is_off(pair: tuple[Path, dict[str, str]]) -> None:
    done = goodput(pair, "logs", "worker")
    assert done.returncode == 1
    assert "spark3 (127.0.0.1)" in done.stderr and "check that `ansible -m ping spark3` answers" in done.stderr
    lines = [line for line in done.stdout.splitlines() if "starting" in line]
    assert [line.split()[0] for line in lines] == ["spark1", "spark2"]


def test_one_node(pair: tuple[Path, dict[str, str]]) -> None:
    done = goodput(pair, "logs", "goodput-worker", "--node", "spark2")
    assert done.returncode == 0, done.stderr
    assert done.stdout == SPARK1.replace("-- cursor: s=abc;i=1\n", "")


def test_what_can_not_be_shown(pair: tuple[Path, dict[str, str]]) -> None:
    done = goodput(pair, "logs", "ectd", "--node", "spark1")
    assert (done.returncode, done.stderr) == (
        2,
        "could not run: found no unit 'ectd'; did you mean etcd? units here: etcd, worker\n",
    )
    done = goodput(pair, "logs", "worker", "--node", "spark1", "--since", "tomorrow-ish")
    assert done.returncode == 2 and "spark1: Failed to parse timestamp" in done.stderr
    done = goodput(pair, "logs", "worker", "--node", "spark3")
    assert done.returncode == 2 and "spark3 (127.0.0.1)" in done.stderr
    done = goodput(pair, "logs", "worker", "--node", "spark9")
    assert done.returncode == 2 and "no host" in done.stderr


def test_status_of_a_node_that_is_off_is_a_row(pair: tuple[Path, dict[str, str]]) -> None:
    done = goodput(pair, "status", "--limit", "spark3")
    assert done.returncode == 2
    # A long name of the inventory wraps the line.
    said = " ".join(done.stdout.split())
    assert "COULD NOT LOOK" in said and "no answer" in said
    found = json.loads(goodput(pair, "status", "--json", "--limit", "spark1,spark3").stdout)
    assert found["exit"] == 1
    assert [bool(node["error"]) for node in found["nodes"]] == [False, True]
