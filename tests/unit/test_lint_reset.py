"""playbooks/reset.yml: undoes every layer of site.yml in reverse, and does nothing without consent."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from plays import run_playbook

# These make nothing on a node.
READ_ONLY = {"drain", "kube_nodes", "plan", "power_gate", "preflight", "verify"}


def plays(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load(path.read_text()))


def test_every_layer_in_reverse_order(repository: Path) -> None:
    site = [Path(play["import_playbook"]).stem for play in plays(repository / "site.yml")]
    tasks = plays(repository / "playbooks/reset.yml")[0]["tasks"]
    roles = [task["ansible.builtin.import_role"] for task in tasks[1:]]
    # Every consent is asked for before the first thing is undone.
    for role in ("rdma", "k3s"):
        assert roles.pop(0) == {"name": f"goodput.spark.{role}", "tasks_from": "reset_consent"}
    undone = [role["name"].removeprefix("goodput.spark.") for role in roles]
    assert undone == [layer for layer in reversed(site) if layer not in READ_ONLY]
    assert {role["tasks_from"] for role in roles} == {"reset"}


@pytest.mark.parametrize(
    ("made", "consent", "passes"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_rails_need_consent_only_where_there_are_some(
    tmp_path: Path, repository: Path, made: bool, consent: bool, passes: bool
) -> None:
    """One node alone has none, and its reset must not end half-way for a consent that nothing asked for before."""
    tasks = yaml.safe_load((repository / "roles/rdma/tasks/reset_consent.yml").read_text())
    manifest = {"role": "rdma"} if made else None
    facts = {"__rdma_made": {"manifest": manifest}, "rdma_netplan_apply": consent}
    play = {"hosts": "localhost", "gather_facts": False, "vars": facts, "tasks": tasks[1:]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    assert (run_playbook("localhost,", tmp_path / "play.yml").returncode == 0) == passes


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
