"""The acceptance fixtures and the plugin end to end: small suites against this machine in place of nodes."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from goodput.verdict import Verdict, run

ROOT = Path(__file__).resolve().parents[2]
LOCAL = "ansible_connection: local, ansible_become: false"

GOOD = '''
def test_echo(host, sh, check):
    """Echo answers."""
    answers = sh({"word": "echo word", "err": "echo oops >&2; exit 3"})
    assert (answers["err"].rc, answers["err"].stderr) == (3, "oops\\n")
    check(answers["word"].stdout, "word\\n", "mend echo")
'''


def write_inventory(folder: Path, **nodes: str) -> Path:
    path = folder / "hosts.yml"
    hosts = "".join(f"        {name}: {{{variables}}}\n" for name, variables in nodes.items())
    path.write_text(f"all:\n  children:\n    sparks:\n      hosts:\n{hosts}")
    return path


def write_suite(folder: Path, **files: str) -> Path:
    suite = folder / "suite"
    suite.mkdir()
    conftest = (ROOT / "tests/acceptance/conftest.py").read_text()
    root = "Path(__file__).resolve().parents[2]"
    assert root in conftest
    (suite / "conftest.py").write_text(conftest.replace(root, f"Path({str(ROOT)!r})"))
    for name, text in files.items():
        (suite / f"test_{name}.py").write_text(text)
    return suite


def verdict_of(folder: Path, layers: tuple[str, ...] = (), limit: str | None = None, **files: str) -> Verdict:
    inventory = write_inventory(folder, spark2=LOCAL, spark1=LOCAL)
    return run(inventory, layers, suite=write_suite(folder, **files), limit=limit)


def test_each_node_is_checked_and_the_rows_say_what_was_found(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, n10_host=GOOD.replace("n10", ""))
    assert verdict.exit_code == 0, verdict
    nodes = verdict.to_dict()["nodes"]
    assert list(nodes) == ["spark2", "spark1"]
    assert nodes["spark1"]["n10_host"] == [
        {"check": "Echo answers", "ok": True, "found": "word\n", "required": "word\n", "remedy": "mend echo"}
    ]


def test_limit_narrows_the_nodes_and_a_check_of_a_peer_skips(tmp_path: Path) -> None:
    suite = GOOD + '\ndef test_peer(host, peer):\n    """Peer."""\n'
    data = verdict_of(tmp_path, limit="spark1", host=suite).to_dict()
    assert (data["ok"], list(data["nodes"])) == (True, ["spark1"])
    assert data["skipped"][0]["reason"].startswith("only one node")


def test_failures_carry_remedy_and_the_journal_of_the_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, says in (("journalctl", "journal of $2"), ("systemctl", "ActiveState=failed")):
        (tools / name).write_text(f'#!/bin/sh\necho "{says}"\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin")
    suite = '''
import pytest

@pytest.mark.unit("goodput-worker")
def test_worker(host, check):
    """Worker serves."""
    check(int(host.name != "spark1"), 1, "start it", what="Workers", unit="goodput-etcd")

@pytest.mark.remedy("read the log")
def test_plain(host):
    assert host.name != "spark1" or 1 + 1 == 3, "sum is off"

def test_bug(host):
    {"spark2": 0}[host.name]

def test_library(host):
    import json
    json.loads(host.name if host.name == "spark1" else "1")

def test_dicts(host, check):
    """Settings."""
    check({"a": 1, "b": 2, "c": 3}, {"a": 1, "b": 0 if host.name == "spark1" else 2}, "set b", ok=host.name != "spark1")

def test_site(nodes, check):
    """Nodes agree."""
    check(1, 2, "mend", node=nodes[1])
'''
    verdict = verdict_of(tmp_path, serving=suite)
    assert verdict.exit_code == 1
    worker, plain, bug, library, settings, site = verdict.to_dict()["failures"]
    assert (worker["check"], worker["found"], worker["remedy"]) == ("Worker serves: Workers", "0", "start it")
    assert worker["journal"] == {
        f"{unit} on spark1": ["ActiveState=failed", f"journal of {unit}"] for unit in ("goodput-worker", "goodput-etcd")
    }
    assert (plain["check"], plain["remedy"]) == ("plain", "read the log")
    assert plain["found"].startswith("sum is off")
    assert bug["found"].startswith("KeyError: 'spark1' (test_serving.py:")
    assert library["found"].startswith("JSONDecodeError: Expecting value")
    assert "(test_serving.py:" in library["found"]
    assert (settings["found"], settings["required"]) == ("{'b': 2}", "{'b': 0}")
    assert (site["node"], site["check"]) == ("spark1", "Nodes agree")


def test_an_empty_suite_and_an_empty_layer_fail(tmp_path: Path) -> None:
    empty = verdict_of(tmp_path, host="")
    assert (empty.exit_code, empty.reason) == (1, "no checks ran")
    shutil.rmtree(tmp_path / "suite")
    partly = verdict_of(tmp_path, host=GOOD, rdma="")
    assert partly.exit_code == 1
    assert [(f["layer"], f["found"]) for f in partly.to_dict()["failures"]] == [("rdma", "no checks were collected")]


def test_an_asked_layer_must_run_a_check(tmp_path: Path) -> None:
    skip = 'import pytest\n\ndef test_a(host):\n    pytest.skip("no cable")\n'
    verdict = verdict_of(tmp_path, layers=("rdma",), host=GOOD, rdma=skip)
    data = verdict.to_dict()
    assert verdict.exit_code == 1
    assert {entry["layer"] for entry in data["skipped"]} == {"rdma"}
    assert data["skipped"][0]["reason"] == "no cable"


def test_only_the_asked_layers_run(tmp_path: Path) -> None:
    data = verdict_of(tmp_path, layers=("host",), host=GOOD, rdma="def test_a(host):\n    assert False\n").to_dict()
    assert data["ok"]
    assert set(data["nodes"]["spark1"]) == {"host"}


def test_a_file_that_can_not_be_collected_is_exit_2(tmp_path: Path) -> None:
    verdict = verdict_of(tmp_path, host="import absent_module\n", rdma=GOOD)
    assert verdict.exit_code == 2
    assert "absent_module" in verdict.reason


def test_an_unreachable_node_is_exit_2_and_is_named(tmp_path: Path) -> None:
    # Port 1 of the loopback answers nobody.
    away = "ansible_host: 127.0.0.1, ansible_port: 1, ansible_timeout: 2"
    inventory = write_inventory(tmp_path, spark1=LOCAL, spark2=away)
    verdict = run(inventory, suite=write_suite(tmp_path, host=GOOD))
    assert verdict.exit_code == 2
    assert verdict.reason.startswith("spark2 (127.0.0.1): ")
    assert "ansible -m ping spark2" in verdict.reason


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "found no inventory at"), ("all: {hosts: {a: {}}}\n", "has no host in 'sparks'"), ("a: [", "--list")],
)
def test_an_unusable_inventory_is_exit_2(tmp_path: Path, text: str | None, says: str) -> None:
    inventory = tmp_path / "hosts.yml"
    if text is not None:
        inventory.write_text(text)
    verdict = run(inventory, suite=write_suite(tmp_path, host=GOOD))
    assert verdict.exit_code == 2
    assert says in verdict.reason


def test_the_command_prints_the_table_and_the_causes(tmp_path: Path) -> None:
    inventory = write_inventory(tmp_path, spark1=LOCAL)
    suite = write_suite(tmp_path, host='def test_a(host, check):\n    """A."""\n    check(1, 2, "mend it")\n')
    argv = [sys.executable, "-m", "goodput.verify", "--inventory", str(inventory), "--suite", str(suite)]
    done = subprocess.run([*argv, "--output", str(tmp_path / "v.json")], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "NOT OK: 1 of 1 checks failed" in done.stdout
    assert done.stderr.splitlines()[-2:] == ["spark1 host: A: found 1, required 2", "  remedy: mend it"]
    assert json.loads((tmp_path / "v.json").read_text())["exit"] == 1


def test_the_other_nodes_are_asked_ahead_unless_afresh(tmp_path: Path) -> None:
    marks = tmp_path / "marks"
    suite = f'''
import time

def test_ahead(nodes, sh):
    sh({{"mark": "echo $PPID >>{marks}"}}, node=nodes[0])
    sh({{"mark": "echo fresh >>{marks}"}}, node=nodes[0], fresh=True)
    deadline = time.monotonic() + 20
    while open("{marks}").read().count("\\n") < 3:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    time.sleep(0.3)

def test_remembered(host, sh):
    sh({{"mark": "echo $PPID >>{marks}"}})
'''
    verdict = verdict_of(tmp_path, host=suite)
    assert verdict.exit_code == 0, verdict
    lines = marks.read_text().split()
    # One from the shell of each node, one that was meant for the first alone.
    assert len(set(lines)) == len(lines) == 3


@pytest.mark.parametrize("deep", [False, True])
def test_deep_files_count_only_when_asked_for(tmp_path: Path, deep: bool) -> None:
    suite = write_suite(tmp_path, host=GOOD)
    (suite / "deep_80_tiers.py").write_text(GOOD)
    inventory, output = write_inventory(tmp_path, spark1=LOCAL), tmp_path / "verdict.json"
    command = [sys.executable, "-m", "goodput.verify", "--inventory", str(inventory), "--suite", str(suite)]
    subprocess.run([*command, "--output", str(output), *(["--deep"] if deep else [])], check=True, cwd=ROOT)
    assert sorted(json.loads(output.read_text())["nodes"]["spark1"]) == (["host", "tiers"] if deep else ["host"])
