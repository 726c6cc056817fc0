"""The goodput command end to end: real playbooks against this machine, as a user would see them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from goodput import cli
from goodput.progress import Run
from goodput.runner import CouldNotRun, Request, _last_error, inventory_environment

PLAYBOOK = """
- name: First play
  hosts: all
  gather_facts: false
  tasks:
    - name: Wait
      ansible.builtin.command: "sleep {{ seconds | default(0) }}"
      changed_when: false
    - name: Show the first completion
      ansible.builtin.debug:
        msg: {goodput_show: "Hello from\\na stream"}
    - name: Tell the environment
      ansible.builtin.debug:
        msg: "EXTRA={{ lookup('ansible.builtin.env', 'EXTRA') }}"
- name: Second play
  hosts: all
  gather_facts: false
  tasks:
    - name: Change
      ansible.builtin.command: "true"
    - name: Refuse
      ansible.builtin.fail:
        msg: |-
          rail 1 is down
          found: carrier 0
          required: carrier 1
          how to fix: plug the cable
      when: refuse | default(false) | bool
"""
# The command under test, with one more subcommand that runs the playbook above.
DRIVER = """
import sys
from goodput import cli
cli.playbook_command("try", sys.argv.pop(1), "Try.")
cli.app(prog_name="goodput")
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    (tmp_path / "play.yml").write_text(PLAYBOOK)
    (tmp_path / "driver.py").write_text(DRIVER)
    (tmp_path / "inventory").mkdir()
    local = f"{{ansible_connection: local, ansible_python_interpreter: {sys.executable}}}"
    (tmp_path / "inventory/hosts.yml").write_text(f"sparks:\n  hosts:\n    spark1: {local}\n    spark2: {local}\n")
    return tmp_path


def command(site: Path, *arguments: str) -> list[str]:
    return [sys.executable, str(site / "driver.py"), str(site / "play.yml"), *arguments]


def environment(site: Path) -> dict[str, str]:
    return {**os.environ, "GOODPUT_STATE": str(site / "state"), "COLUMNS": "120"}


def goodput(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    argv = command(site, "try", "-i", str(site / "inventory"), *arguments)
    return subprocess.run(argv, env=environment(site), capture_output=True, text=True, check=False, timeout=120)


def test_a_run_that_succeeds(site: Path) -> None:
    (site / "inventory/ansible.env").write_text("# comment\nEXTRA='a b'\nANSIBLE_INVENTORY_IGNORE=.env\n")
    done = goodput(site)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Hello from\na stream" in done.stdout
    assert re.search(r"Second play.*spark1 ✓ 1 changed  spark2 ✓ 1 changed", done.stdout)
    assert "changed: spark1 1, spark2 1" in done.stdout
    latest = site / "state/runs/latest"
    summary = json.loads((latest / "summary.json").read_text())
    assert [layer["layer"] for layer in summary["layers"]] == ["First play", "Second play"]
    assert [task["task"] for task in summary["tasks"]][-1] == "Refuse"
    assert set(summary["tasks"][0]["hosts"]) == {"spark1", "spark2"}
    log = (latest / "stdout.log").read_text()
    assert "EXTRA=a b" in log
    assert "\x1b" not in log
    kinds = [json.loads(line)["event"] for line in (latest / "events.jsonl").read_text().splitlines()]
    assert kinds[-1] == "playbook_on_stats"
    # Ansible's environment may hold secrets: no copy of it is kept.
    assert sorted(path.name for path in latest.iterdir()) == ["events.jsonl", "stdout.log", "summary.json"]
    # The next run knows how long this one took.
    assert "about" in goodput(site).stdout.splitlines()[0]


def test_a_run_that_fails_shows_cause_and_remedy_and_how_to_go_on(site: Path) -> None:
    done = goodput(site, "-e", "refuse=true")
    assert done.returncode == 1
    text = done.stdout
    assert re.search(r"FAILED  spark[12], spark[12]  Second play  Refuse\n  rail 1 is down\n  found: carrier 0\n", text)
    assert "how to fix: plug the cable" in text
    assert f"\n  goodput try -i {site}/inventory -e refuse=true\n" in text
    assert "fatal:" not in text
    assert "{" not in text


def test_json_is_one_object(site: Path) -> None:
    done = goodput(site, "--json", "-e", "refuse=true")
    data = json.loads(done.stdout)
    assert (done.returncode, data["exit"], data["ok"]) == (1, 1, False)
    assert data["failures"][0]["message"].splitlines()[0] == "rail 1 is down"
    assert data["show"] == ["Hello from\na stream"]
    assert data["verdict"] is None


def test_an_unreachable_node_is_exit_2(site: Path) -> None:
    away = "{ansible_host: 127.0.0.1, ansible_port: 1, ansible_timeout: 2}"
    (site / "inventory/hosts.yml").write_text(f"sparks:\n  hosts:\n    spark1: {away}\n")
    done = goodput(site)
    assert done.returncode == 2
    assert "UNREACHABLE  spark1" in done.stdout
    assert "Connection refused" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--limit", "nobody"), "no hosts to target"),
        (("--tags", "nothing"), "no task ran: check --tags and --limit"),
        (("-e", "{broken"), "could not run"),
    ],
)
def test_what_could_not_run_is_exit_2(site: Path, arguments: tuple[str, ...], says: str) -> None:
    done = goodput(site, *arguments)
    assert done.returncode == 2, done.stdout
    assert says.lower() in (done.stdout + done.stderr).lower()
    assert "Traceback" not in done.stdout + done.stderr


def test_a_broken_playbook_is_exit_2_with_its_error(site: Path) -> None:
    (site / "play.yml").write_text("- hosts: all\n  tusks: []\n")
    done = goodput(site)
    assert done.returncode == 2
    assert "'tusks' is not a valid attribute" in done.stdout


@pytest.mark.parametrize("as_json", [False, True])
def test_a_missing_inventory_is_exit_2_with_the_line_to_run(site: Path, as_json: bool) -> None:
    argv = command(site, "try", "-i", str(site / "absent"), *(["--json"] if as_json else []))
    done = subprocess.run(argv, env=environment(site), capture_output=True, text=True, check=False)
    assert done.returncode == 2
    reason = json.loads(done.stdout)["reason"] if as_json else done.stderr
    assert f"found no inventory at {site}/absent; check -i" in reason
    assert not (site / "state/runs").exists()


def test_a_bad_option_is_exit_2(site: Path) -> None:
    assert goodput(site, "--bogus").returncode == 2


# Unlike the nap of any other run of this test on the machine.
NAP = f"4711.{os.getpid()}"


def _ours(site: Path) -> list[str]:
    """Command lines of processes that this test's run started."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(site) in line or f"sleep {NAP}" in line:
            found.append(line)
    return found


def _wait_for(condition: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.1)


def test_ctrl_c_ends_the_children_and_says_how_to_go_on(site: Path) -> None:
    argv = command(site, "try", "-i", str(site / "inventory"), "-e", f"seconds={NAP}")
    process = subprocess.Popen(argv, env=environment(site), stdout=subprocess.PIPE, text=True)
    _wait_for(lambda: any(f"sleep {NAP}" in line for line in _ours(site)), 60)
    process.send_signal(signal.SIGINT)
    text, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert re.search(r"INTERRUPTED: goodput try after 0:\d\d in layer First play \(Wait\)", text)
    assert f"\n  goodput try -i {site}/inventory -e seconds={NAP}\n" in text
    assert json.loads((site / "state/runs/latest/summary.json").read_text())["reason"] == "interrupted"
    _wait_for(lambda: not _ours(site), 60)


def test_svg_is_written(site: Path) -> None:
    picture = site / "run.svg"
    goodput(site, "--svg", str(picture))
    text = picture.read_text()
    assert text.startswith("<svg")
    assert "Hello&#160;from" in text


def test_environment_file_of_an_inventory(tmp_path: Path) -> None:
    assert inventory_environment(tmp_path) == {}
    assert inventory_environment(None) == {}
    (tmp_path / "ansible.env").write_text("# why\n\nANSIBLE_STRATEGY=mitogen_linear\nEMPTY=\nQ='a # b'\n")
    assert inventory_environment(tmp_path) == {"ANSIBLE_STRATEGY": "mitogen_linear", "EMPTY": "", "Q": "a # b"}
    (tmp_path / "ansible.env").write_text("export A=1\n")
    with pytest.raises(CouldNotRun, match="ansible.env:1: found 'export A=1', required KEY=VALUE"):
        inventory_environment(tmp_path)


def test_request_renders_the_command_line() -> None:
    request = Request("site.yml", Path("/inv"), "spark1", "rdma", None, True, ("a=b c",), 2, "pw")
    assert request.arguments() == [
        *("-i", "/inv", "--limit", "spark1", "--tags", "rdma", "--check", "-e", "a=b c", "-vv", "--ask-become-pass")
    ]
    assert not request.full
    assert "pw" not in repr(request)
    assert Request("playbooks/x.yml", None).arguments() == ["-i", "localhost,"]
    assert Request("playbooks/x.yml", Path("/a/virtual")).kind == "x@virtual"


def test_a_verdict_older_than_the_run_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "STATE", tmp_path)
    assert cli.load_verdict(0) is None
    (tmp_path / "verdict.json").write_text('{"ok": true}')
    assert cli.load_verdict(time.time() - 60) == {"ok": True}
    assert cli.load_verdict(time.time() + 60) is None


def test_the_first_error_of_ansible_is_the_reason() -> None:
    assert _last_error("x\n[ERROR]: bad\nmore\n\nrest\n") == "[ERROR]: bad\nmore"
    assert _last_error("only this\n\n") == "only this"


def test_a_run_without_events_has_nothing_to_show() -> None:
    assert Run().to_dict()["layers"] == []
