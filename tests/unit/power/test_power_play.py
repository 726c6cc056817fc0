"""The role's preflight and gate as real plays on this machine; the GPU is the stand-in, only one folder changes."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from plays import run_playbook

from ansible_collections.goodput.spark.plugins.module_utils.power_clocks import Clocks, Smi  # isort: skip

ROOT = Path(__file__).resolve().parents[3]
STANDINS = ROOT / "roles/virtual_pair/files/standins/bin"
PLAY = """
- hosts: sparks
  gather_facts: false
  any_errors_fatal: true
  vars_files: [{site}]
  tasks:
    - ansible.builtin.import_role: {{name: goodput.spark.power, tasks_from: "{tasks}"}}
    - ansible.builtin.debug: {{msg: the play went on}}
"""


# What systemd does with goodput-clocks-reassert.service.
SYSTEMCTL = """#!/bin/sh
case "$1" in
show) printf 'LoadState=loaded\\nActiveState=inactive\\n';;
start) exec {python} -I {program} reassert --min 300 --max 2200 --smi {smi} --state {state};;
esac
"""


class Site:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.nodes: dict[str, dict[str, Any]] = {"spark1": {}}
        self.systemctl = folder / "bin/systemctl"
        self.systemctl.parent.mkdir()
        self.systemctl.write_text(
            SYSTEMCTL.format(
                python=sys.executable,
                program=ROOT / "plugins/module_utils/power_clocks.py",
                smi=STANDINS / "nvidia-smi",
                state=folder / "state.json",
            )
        )
        self.systemctl.chmod(0o755)

    def lock(self) -> None:
        smi = Smi(str(STANDINS / "nvidia-smi"))
        Clocks(300, 2200, smi, state_file=self.folder / "state.json", log=lambda text: None).lock()

    def is_in(self, scenario: str) -> None:
        (self.folder / "gpu-scenario").write_text(scenario)

    def play(self, tasks: str, **extra: Any) -> tuple[int, str]:
        """Exit status, and what it said with line wrapping undone."""
        variables = {
            "ansible_connection": "local",
            "ansible_python_interpreter": sys.executable,
            "power_smi": str(STANDINS / "nvidia-smi"),
            "power_smi_timeout_seconds": 3,
            "power_sample_seconds": 10,
            "power_busy_samples_min": 3,
            "power_load_command": [str(STANDINS / "virtual-pair-gpu-load")],
        }
        inventory = self.folder / "hosts.yml"
        inventory.write_text(yaml.safe_dump({"sparks": {"vars": variables, "hosts": self.nodes}}))
        playbook = self.folder / "play.yml"
        playbook.write_text(PLAY.format(site=ROOT / "vars/site.yml", tasks=tasks))
        paths = {
            "__power_state_file": str(self.folder / "state.json"),
            "__power_verdict_file": str(self.folder / "v.json"),
        }
        path = f"{self.systemctl.parent}:{os.environ['PATH']}"
        extras = json.dumps(paths | extra)
        done = run_playbook(inventory, playbook, "-e", extras, PATH=path, ANSIBLE_LOCALHOST_WARNING="False")
        return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    monkeypatch.setenv("VIRTUAL_PAIR_GPU", str(tmp_path))
    return Site(tmp_path)


def test_the_gate_lets_an_ok_node_through_once_and_then_from_the_record(site: Site) -> None:
    site.lock()
    status, text = site.play("verify")
    assert (status, "power: ok: " in text, "the play went on" in text) == (0, True, True), text[-3000:]
    assert "changed=0" in text
    site.is_in("latched")
    status, text = site.play("verify")
    assert (status, "recorded earlier in this boot" in text) == (0, True), text[-3000:]
    status, text = site.play("verify", power_gate_reuse_seconds=0)
    assert (status, "the play went on" in text) == (2, False)
    assert "power: found latched" in text and "wall AND from the Spark" in text, text[-3000:]
    # Our lock over whatever there is does not lift it, so nobody is told to look for another lock first.
    assert "the same after our lock was asserted again" in text and "by hand" not in text, text[-3000:]
    assert json.loads((site.folder / "v.json").read_text())["state"] == "latched"
    status, text = site.play("verify", power_gate_reuse_seconds=0, power_accept=["latched"])
    assert (status, "accepted by power_accept" in text) == (0, True)


def test_a_lock_that_nobody_knows_is_lifted_and_named_not_called_a_latch(site: Site) -> None:
    site.lock()
    Smi(str(STANDINS / "nvidia-smi")).run("-lgc", "300,800")
    status, text = site.play("verify")
    assert (status, "the play went on" in text) == (2, False), text[-3000:]
    assert "found capped_by_lock: 800 MHz under load until our lock was asserted again" in text, text[-3000:]
    assert "found latched" not in text and "wall AND" not in text and "changed=0" in text
    assert json.loads((site.folder / "v.json").read_text())["state"] == "capped_by_lock"
    # It was lifted, and nobody sets it again.
    status, text = site.play("verify")
    assert (status, "power: ok: " in text) == (0, True), text[-3000:]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"power_clock_mhz": [2200, 300]}, ["power_clock_mhz [2200, 300]", "minimum not above the maximum"]),
        ({"power_clock_mhz": 2200}, ["power_clock_mhz 2200", "two integers"]),
        ({"power_clock_mhz": "fast"}, ['power_clock_mhz "fast"', "two integers"]),
        (
            {"power_smi": "/nonexistent/nvidia-smi"},
            ["found no /nonexistent/nvidia-smi", "required one GPU that answers"],
        ),
        ({"power_latch_cap_ratio": 60}, ["latch_cap_ratio 60", "0 to 1"]),
    ],
)
def test_bad_input_is_refused_in_words(site: Site, extra: dict[str, Any], words: list[str]) -> None:
    status, text = site.play("preflight", **extra)
    assert status == 2
    assert [word for word in words if word not in text] == [], text[-3000:]
    assert "Traceback" not in text and "the play went on" not in text


def test_two_nodes_with_different_pairs(site: Site) -> None:
    site.nodes = {"spark1": {"power_clock_mhz": [300, 2200]}, "spark2": {"power_clock_mhz": [300, 2000]}}
    status, text = site.play("preflight")
    assert (status, "spark2 [300, 2000]" in text, "power_pairs_may_differ" in text) == (2, True, True), text[-3000:]


@pytest.mark.parametrize(
    ("scenario", "words"), [("hang", "gave no answer in 3 s"), ("no-driver", "couldn't communicate")]
)
def test_preflight_names_a_driver_that_does_not_answer(site: Site, scenario: str, words: str) -> None:
    site.is_in(scenario)
    status, text = site.play("preflight")
    assert (status, words in text) == (2, True), text[-3000:]


def test_preflight_passes_a_healthy_node(site: Site) -> None:
    if os.geteuid() != 0:
        pytest.skip("preflight requires root")
    status, text = site.play("preflight")
    assert status == 0, text[-3000:]


# A systemd whose goodput-clocks.service is in one state, which writes down what it was asked to do.
UNIT_IS = """#!/bin/sh
case "$1" in
show) printf 'LoadState=loaded\\nActiveState={active}\\n';;
start|restart|reload) echo "$1 $2" >>{log}; exit {status};;
esac
"""


@pytest.mark.parametrize(
    ("active", "starts", "asked"),
    [
        # A second run changes nothing.
        ("active", True, []),
        ("inactive", True, ["start"]),
        ("failed", True, ["start"]),
        # It failed and waits to start again, which Ansible's "started" takes for running.
        ("activating", True, ["restart"]),
        ("activating", False, ["restart"]),
    ],
)
@pytest.mark.parametrize("changed", [False, True])
def test_a_lock_that_fails_ends_the_play_before_any_load(
    site: Site, active: str, starts: bool, asked: list[str], changed: bool
) -> None:
    """The last tasks of configure.yml, and the handler; nothing else can tell that the clocks are free."""
    log = site.folder / "asked"
    log.touch()
    site.systemctl.write_text(UNIT_IS.format(active=active, log=log, status=0 if starts else 1))
    tasks = yaml.safe_load((ROOT / "roles/power/tasks/configure.yml").read_text())
    last = next(n for n, task in enumerate(tasks) if task.get("ansible.builtin.meta") == "flush_handlers")

    units = [task for task in tasks[last + 1 :] if "timer" not in str(task["ansible.builtin.systemd_service"])]
    play: dict[str, Any] = {
        "hosts": "sparks",
        "gather_facts": False,
        "handlers": yaml.safe_load((ROOT / "roles/power/handlers/main.yml").read_text()),
        "tasks": [
            {"command": "true", "changed_when": changed, "notify": "Assert the lock that changed"},
            tasks[last],
            *([] if changed else units),
        ],
    }
    inventory, playbook = site.folder / "hosts.yml", site.folder / "play.yml"
    inventory.write_text(yaml.safe_dump({"sparks": {"hosts": {"spark1": {"ansible_connection": "local"}}}}))
    playbook.write_text(yaml.safe_dump([play]))
    done = run_playbook(inventory, playbook, PATH=f"{site.systemctl.parent}:{os.environ['PATH']}")
    assert done.returncode == (0 if starts else 2), done.stdout[-3000:]
    wanted = ["reload"] if changed and active == "active" else asked
    assert log.read_text().split("\n")[:-1] == [f"{word} goodput-clocks.service" for word in wanted]
    assert changed or asked or "changed=0" in done.stdout
