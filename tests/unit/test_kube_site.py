"""A site's nodes for the objects of Kubernetes, and the play that places the device plugins."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.filter import kube as filters
from ansible_collections.goodput.spark.plugins.filter.k3s import k3s_addresses
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import PlanInputError, kube_objects
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects.site import nodes_of_site
from plays import run_playbook

ROOT = Path(__file__).resolve().parents[2]
SUBNETS = ["192.168.100.0/24", "192.168.101.0/24"]
ADDRESSES = {"spark1": "10.0.0.1", "spark2": "10.0.0.2"}
NETDEVS = (("enp1s0f0np0", "rocep1s0f0"), ("enP2p1s0f0np0", "roceP2p1s0f0"))


def answer(number: int, addressed: bool = True) -> dict[str, Any]:
    rails = [
        {
            "rail": index,
            "netdev": netdev,
            "rdma_device": device,
            "mac": f"02:00:00:00:0{number}:0{index}",
            "addresses": [f"192.168.{100 + index}.{number}/24"] if addressed else [],
        }
        for index, (netdev, device) in enumerate(NETDEVS)
    ]
    return {"state": "ok", "remedy": "", "rails": rails, "routes": []}


def test_two_nodes_of_the_play() -> None:
    hostvars = {"spark1": {"goodput_rails": answer(1)}, "spark2": {"goodput_rails": answer(2)}}
    nodes = nodes_of_site(hostvars, ["spark1", "spark2"], ADDRESSES)
    assert [node["name"] for node in nodes] == ["spark1", "spark2"]
    assert nodes[1]["rails"][1]["addresses"] == ["192.168.101.2/24"]
    assert nodes[0]["management_address"] == "10.0.0.1"


def test_a_node_has_the_address_that_was_chosen_for_the_cluster() -> None:
    """K3s registers it, so the workers' pods have it, and what is asked for must name the same."""
    hostvars: dict[str, Any] = {
        f"spark{n}": {"goodput_rails": answer(n), "goodput_management_address": f"10.0.0.{n}"} for n in (1, 2)
    }
    hostvars["spark1"]["k3s_node_ip"] = "10.9.0.1"
    hostvars["spark2"]["k3s_node_ip"] = ""
    nodes = filters.kube_nodes(hostvars, ["spark1", "spark2"])
    assert [node["management_address"] for node in nodes] == ["10.9.0.1", "10.0.0.2"]
    assert k3s_addresses(hostvars, ["spark2", "spark1"]) == {"spark2": "10.0.0.2", "spark1": "10.9.0.1"}
    asked = yaml.safe_load((ROOT / "roles/kube_serving/vars/main.yml").read_text())["__kube_serving_addresses"]
    assert "k3s_addresses(" in asked


def test_a_node_that_limit_leaves_out_still_counts() -> None:
    others = {"results": [{"item": "spark2", **answer(2)}]}
    hostvars = {"spark1": {"goodput_rails": answer(1), "goodput_rails_others": others}, "spark2": {}}
    assert len(nodes_of_site(hostvars, ["spark1", "spark2"], ADDRESSES)) == 2


def test_a_node_without_rails_is_named_with_its_remedy() -> None:
    bare = {"state": "no_cable", "remedy": "plug the cable in", "rails": []}
    hostvars = {"spark1": {"goodput_rails": answer(1)}, "spark2": {"goodput_rails": bare}}
    with pytest.raises(PlanInputError, match="spark2: rails.*no_cable.*plug the cable in"):
        nodes_of_site(hostvars, ["spark1", "spark2"], ADDRESSES)
    with pytest.raises(PlanInputError, match="spark2: rails.*no answer.*rdma"):
        nodes_of_site({"spark1": {"goodput_rails": answer(1)}, "spark2": {}}, ["spark1", "spark2"], ADDRESSES)


def test_one_node_alone_has_no_rails() -> None:
    assert nodes_of_site({"spark1": {}}, ["spark1"], ADDRESSES) == [
        {"name": "spark1", "rails": [], "management_address": "10.0.0.1"}
    ]


def test_only_a_dry_run_takes_addresses_that_are_not_there_yet() -> None:
    hostvars = {f"spark{n}": {"goodput_rails": answer(n, addressed=False)} for n in (1, 2)}
    planned = nodes_of_site(hostvars, ["spark1", "spark2"], ADDRESSES, SUBNETS)
    assert [rail["addresses"] for rail in planned[1]["rails"]] == [["192.168.100.2/24"], ["192.168.101.2/24"]]
    release = yaml.safe_load((ROOT / "vars/releases/current.yml").read_text())["goodput_release_set"]
    digests = {"rdma_device_plugin": f"sha256:{'1' * 64}"}
    found = kube_objects({}, planned, release, {"digests": digests}, ["device_plugins"])
    assert [item["kind"] for item in found] == ["HelmChart", "ConfigMap", "DaemonSet"]
    bare = nodes_of_site(hostvars, ["spark1", "spark2"], ADDRESSES)
    with pytest.raises(PlanInputError, match="must have an IPv4 address"):
        kube_objects({}, bare, release, {"digests": digests}, ["device_plugins"])


def test_playbooks_hand_the_objects_to_the_role(tmp_path: Path) -> None:
    """The variables of vars/site.yml and of playbooks/device_plugins.yml, with a chosen server."""
    play = yaml.safe_load((ROOT / "playbooks/device_plugins.yml").read_text())[-1]
    hosts = {f"spark{n}": {"goodput_rails": answer(n), "goodput_management_address": f"10.0.0.{n}"} for n in (1, 2)}
    inventory = {"sparks": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    digests = {"digests": {"rdma_device_plugin": f"sha256:{'1' * 64}"}}
    shown = {
        "hosts": "sparks[0]",
        "gather_facts": False,
        "vars_files": [str(ROOT / "vars/site.yml"), str(ROOT / "vars/releases/current.yml")],
        "vars": play["roles"][0]["vars"] | {"goodput_kube_choices": digests},
        "tasks": [
            {
                "ansible.builtin.debug": {
                    "msg": "{{ goodput_kube_server }}: {{ device_plugins_objects | map(attribute='kind') | join(' ') }}"
                }
            }
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([shown]))
    done = run_playbook(tmp_path / "hosts.yml", tmp_path / "play.yml", "-e", "k3s_server_node=spark1")
    assert "spark1: HelmChart ConfigMap DaemonSet" in done.stdout, done.stdout + done.stderr
    assert "spark2: HelmChart" in run_playbook(tmp_path / "hosts.yml", tmp_path / "play.yml").stdout


def test_a_dry_run_of_the_device_plugins_passes_on_clean_hosts(tmp_path: Path) -> None:
    play = yaml.safe_load((ROOT / "playbooks/device_plugins.yml").read_text())[-1] | {"become": False}
    play["vars_files"] = [str(ROOT / "vars/site.yml"), str(ROOT / "vars/releases/current.yml")]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    hosts = {f"spark{n}": {"goodput_rails": answer(n)} for n in (1, 2)}
    digests = {"digests": {"rdma_device_plugin": f"sha256:{'1' * 64}"}}
    variables = {"ansible_connection": "local", "goodput_kube_choices": digests}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump({"sparks": {"hosts": hosts, "vars": variables}}))
    done = run_playbook(tmp_path / "hosts.yml", tmp_path / "play.yml", "--check", "-e", "goodput_engine=vllm")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "configure | Place the objects" in done.stdout
    # The simulated engine needs no device.
    done = run_playbook(tmp_path / "hosts.yml", tmp_path / "play.yml", "--check", "-e", "goodput_engine=mocker")
    assert done.returncode == 0 and "changed=0" in done.stdout and "ok=0" in done.stdout
