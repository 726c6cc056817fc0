"""playbooks/reset.yml: undoes every layer of site.yml in reverse, and does nothing without consent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from plays import run_playbook

# These make nothing on a node.
READ_ONLY = {"kube_nodes", "plan", "power_gate", "preflight", "verify"}


def plays(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(path.read_text()))


def test_every_layer_in_reverse_order(repository: Path) -> None:
    site = [Path(play["import_playbook"]).stem for play in plays(repository / "site.yml")]
    tasks = plays(repository / "playbooks/reset.yml")[0]["tasks"]
    undone = [task["ansible.builtin.import_role"]["name"].removeprefix("goodput.spark.") for task in tasks[1:]]
    assert undone == [layer for layer in reversed(site) if layer not in READ_ONLY]
    assert {task["ansible.builtin.import_role"]["tasks_from"] for task in tasks[1:]} == {"reset"}


@pytest.mark.parametrize("consent", [None, False, "no"])
def test_nothing_happens_without_consent(tmp_path: Path, consent: object) -> None:
    """A real play; the node does not exist, so a task that reaches for it would fail in another way."""
    inventory = tmp_path / "hosts.yml"
    nodes = {"spark1": {"ansible_host": "127.0.0.1", "ansible_port": 1}}
    inventory.write_text(json.dumps({"sparks": {"hosts": nodes}}))
    extra = {} if consent is None else {"goodput_reset": consent}
    done = run_playbook(inventory, "playbooks/reset.yml", "-e", json.dumps(extra))
    assert done.returncode == 2, done.stdout + done.stderr
    assert "required: goodput_reset: true" in done.stdout
    assert "-e goodput_reset=true" in done.stdout
    assert "spark1" in done.stdout
    assert "unreachable=0    failed=1" in done.stdout
    assert "ok=0" in done.stdout
