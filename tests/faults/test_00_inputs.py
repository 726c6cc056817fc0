"""Wrong inputs: refused at once, before any node is reached."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import INVENTORY, Pair

DOCUMENTATION = "192.0.2."


def inventory(tmp_path: Path, hosts: dict[str, dict[str, Any]], **variables: Any) -> Path:
    """An inventory of addresses where nothing answers: a refusal that needed a node would time out."""
    folder = tmp_path / "inventory"
    folder.mkdir()
    content = {"sparks": {"hosts": hosts, "vars": {"ansible_user": "spark", **variables}}}
    (folder / "hosts.yml").write_text(json.dumps(content))
    return folder


TWO = {"spark1": {"ansible_host": f"{DOCUMENTATION}11"}, "spark2": {"ansible_host": f"{DOCUMENTATION}12"}}

REFUSED = {
    "duplicate address": ({"spark1": TWO["spark1"], "spark2": TWO["spark1"]}, {}, ["192.0.2.11", "spark1", "spark2"]),
    "misspelt variable": (TWO, {"rdma_rail_subnet": ["198.51.100.0/24"]}, ["rdma_rail_subnet", "rdma_rail_subnets"]),
    "string for an integer": (TWO, {"rdma_mtu_bytes": "jumbo"}, ["rdma_mtu_bytes", "jumbo", "int"]),
    "string for a boolean": (TWO, {"rdma_netplan_apply": "perhaps"}, ["rdma_netplan_apply", "perhaps", "true or"]),
    "unknown release set": (TWO, {"goodput_release": "newest"}, ["newest", "current", "virtual"]),
    "unknown profile": (TWO, {"goodput_profile": "virtuel"}, ["virtuel", "virtual"]),
}


@pytest.mark.fault("wrong input")
@pytest.mark.parametrize("name", REFUSED)
def test_refused_before_any_node_is_reached(pair: Pair, tmp_path: Path, name: str) -> None:
    hosts, variables, words = REFUSED[name]
    # As extra variables: what is in group_vars of the checkout would win over an inventory's own.
    outcome = pair.play("playbooks/preflight.yml", inventory=inventory(tmp_path, hosts), **variables)
    outcome.failed_with(*words)
    assert "unreachable" not in outcome.text.lower().replace("unreachable=0", "")


@pytest.mark.fault("one node")
def test_one_node_is_a_site(pair: Pair, tmp_path: Path) -> None:
    """An inventory that has no other, not a run that leaves one out."""
    alone = tmp_path / "inventory"
    shutil.copytree(INVENTORY, alone)
    nodes = yaml.safe_load((alone / "hosts.yml").read_text())
    del nodes["sparks"]["hosts"]["spark2"]
    (alone / "hosts.yml").write_text(yaml.safe_dump(nodes))
    outcome = pair.play("playbooks/preflight.yml", "playbooks/rdma.yml", inventory=alone)
    outcome.succeeded()
    assert "! nodes" in outcome.text and "one node works" in outcome.text, outcome.text[-3000:]
    assert "changed=0" in outcome.text, outcome.text[-1000:]


@pytest.mark.fault("three nodes")
def test_three_nodes_are_a_site_that_needs_a_switch(pair: Pair, tmp_path: Path) -> None:
    hosts = {**TWO, "spark3": {"ansible_host": f"{DOCUMENTATION}13"}}
    outcome = pair.play("playbooks/preflight.yml", inventory=inventory(tmp_path, hosts), ansible_timeout=3)
    assert "switch" in outcome.text, outcome.text[-3000:]
    assert INVENTORY.exists()
