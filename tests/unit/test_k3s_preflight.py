"""Every fault that is known before K3s changes anything, with its numbers and its remedy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.filter import k3s as filters
from ansible_collections.goodput.spark.plugins.module_utils import k3s_config as c
from ansible_collections.goodput.spark.plugins.module_utils import k3s_preflight as p
from ansible_collections.goodput.spark.plugins.module_utils.preflight import ERROR, WARNING, Report

ROOT = Path(__file__).resolve().parents[2]
KEYS = yaml.safe_load((ROOT / "roles/k3s/vars/config_keys.yml").read_text())["__k3s_config_keys"]
Change = Callable[[dict[str, Any], dict[str, Any]], None]


def netdev(address: str, **changes: Any) -> dict[str, Any]:
    entry = {"address": address, "prefix_length": 24, "scope": "global"}
    return {"physical": True, "wireless": False, "rdma": False, "addresses": [entry], **changes}


def facts(number: int) -> dict[str, Any]:
    return {
        "os": {"architecture": "aarch64", "machine_id": f"{number}" * 32, "hostname": f"host{number}"},
        "driver": "580.126.09",
        "listening": [],
        "host_keys": {"ssh-ed25519": f"SHA256:{number}"},
        "kubernetes": [],
        "network": {
            "netdevs": {
                "enP7s7": netdev(f"10.0.0.{number}"),
                "wlP9s9": netdev(f"10.1.0.{number}", wireless=True),
                "enp1s0f0np0": netdev(f"192.168.100.{number}", rdma=True),
            },
            "routes": [],
            "default_netdev": "enP7s7",
        },
    }


def probe(number: int) -> dict[str, Any]:
    unit = {"loaded": False, "active": False, "running": False, "enabled": False, "digest": ""}
    return {
        "binary": {"version": "", "sha256": ""},
        "units": {"server": dict(unit), "agent": dict(unit)},
        "token": {"exists": False, "mode": "", "uid": -1, "bytes": 0},
        "foreign_mounts": [],
        "foreign_kubelets": [],
        "free_bytes": 500 << 30,
        "missing_modules": [],
        "nvidia": {"program": "/usr/bin/nvidia-container-runtime", "configured": None},
        "cgroup_memory": True,
        "limited_pods": [],
    }


def installed(version: str, side: str) -> Change:
    def change(_facts: dict[str, Any], seen: dict[str, Any]) -> None:
        seen["binary"]["version"] = version
        seen["units"][side] |= {"loaded": True, "active": True, "running": True, "enabled": True}
        seen["token"] = {"exists": True, "mode": "0600", "uid": 0, "bytes": 65}

    return change


def judge(
    *changes: tuple[int, Change], addresses: dict[int, str] | None = None, former: str = "", **more: Any
) -> list[str]:
    """Findings as text of a pair whose nodes were changed: (number of the node, change)."""
    bounds: dict[str, Any] = {
        key: more.pop(key) for key in ("allow_rail", "in_run", "disk_required_gib") if key in more
    }
    given: dict[str, Any] = {"nodes": ["spark1", "spark2"], "server": "spark2", "version": "v1.36.4+k3s1", "keys": KEYS}
    chosen = c.Choices(**{**given, **more})
    seen = []
    for number in (1, 2):
        fact, look = facts(number), probe(number)
        for whom, change in changes:
            if whom == number:
                change(fact, look)
        clock = 1000.0 + look.pop("late", 0.0)
        report = Report(f"spark{number}", fact, sent=999.9, clock=clock, received=1000.1)
        address = (addresses or {}).get(number, f"10.0.0.{number}")
        seen.append(p.Seen(c.NodeChoice(f"spark{number}", address, "", True), report, look))
    limit: dict[str, Any] = {"disk_required_gib": 60, "in_run": ["spark1", "spark2"], "kubeconfig": "/here/kubeconfig"}
    limit.update(bounds)
    limits = p.Bounds(**limit)
    found = p.evaluate(seen, chosen, limits, former)
    return [
        f"{one.node}: {one.check}: found {one.found}; required {one.required}; fix {one.fix}"
        for one in found
        if one.severity == ERROR
    ]


def setter(where: str, *path: str, value: Any) -> Change:
    def change(fact: dict[str, Any], look: dict[str, Any]) -> None:
        place = {"facts": fact, "probe": look}[where]
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = copy.deepcopy(value)

    return change


def test_a_good_pair_has_no_findings() -> None:
    assert judge() == []
    both = judge((1, installed("v1.36.4+k3s1", "agent")), (2, installed("v1.36.4+k3s1", "server")))
    assert both == []


@pytest.mark.parametrize(
    ("where", "path", "value", "words"),
    [
        (
            "facts",
            ("network", "default_netdev"),
            "",
            ["spark1: route: found no default route", "required one, even a dummy"],
        ),
        (
            "facts",
            ("listening",),
            [{"address": "0.0.0.0", "port": 10250, "process": "kubelet", "unit": "kubelet.service"}],
            [
                "spark1: port: found 10250 taken by kubelet of kubelet.service",
                "systemctl disable --now kubelet.service",
            ],
        ),
        (
            "facts",
            ("kubernetes",),
            [{"kind": "microk8s", "path": "/snap/bin/microk8s", "active": False}],
            ["spark1: kubernetes: found microk8s (/snap/bin/microk8s)", "uninstall microk8s"],
        ),
        (
            "facts",
            ("kubernetes",),
            [{"kind": "kubeadm", "path": "/usr/bin/kubeadm", "active": True}],
            ["found kubeadm (/usr/bin/kubeadm, running)"],
        ),
        (
            "probe",
            ("foreign_kubelets",),
            ["k3s-server in a container (pid 77)"],
            ["found k3s-server in a container (pid 77)", "docker stop"],
        ),
        ("probe", ("free_bytes",), 21 << 30, ["spark1: disk: found 21.0 GiB free", "required 60 GiB or more"]),
        (
            "probe",
            ("foreign_mounts",),
            ["/dev/nvme1n1 (xfs) at /var/lib/rancher/k3s/l2"],
            ["spark1: mount: found /dev/nvme1n1 (xfs) at /var/lib/rancher/k3s/l2", "nvme_l2_mount_point"],
        ),
        ("probe", ("missing_modules",), ["vxlan"], ["spark1: kernel-module: found no vxlan"]),
        ("probe", ("cgroup_memory",), False, ["spark1: cgroup: found no cgroup v2"]),
        (
            "probe",
            ("nvidia", "program"),
            "",
            ["found driver 580.126.09 without nvidia-container-runtime", "apt install nvidia-container-toolkit"],
        ),
        ("facts", ("os", "architecture"), "riscv64", ["spark1: architecture: found riscv64"]),
        ("facts", ("os", "machine_id"), "2" * 32, ["machine-id: found equal machine-id 22222222"]),
        ("facts", ("os", "hostname"), "host2", ["hostname: found equal hostname host2"]),
    ],
)
def test_one_fault_on_one_node_is_one_finding(where: str, path: tuple[str, ...], value: Any, words: list[str]) -> None:
    found = judge((1, setter(where, *path, value=value)))
    assert len(found) == 1, found
    assert all(word in found[0] for word in words), found


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("10.0.0.77", "10.0.0.77 is on no netdev of this node; required its own address; fix set k3s_node_ip"),
        ("10.1.0.1", "10.1.0.1 is on the Wi-Fi netdev wlP9s9"),
        ("192.168.100.1", "192.168.100.1 is on the rail enp1s0f0np0"),
        ("spark1.local", "node-ip: found spark1.local; required an IP address"),
    ],
)
def test_the_address_is_wired_and_the_node_s_own(address: str, words: str) -> None:
    found = judge(addresses={1: address})
    assert len(found) == 1 and words in found[0] and "10.0.0.1" in found[0], found


def test_clocks_that_are_too_far_apart() -> None:
    (found,) = judge((1, setter("probe", "late", value=9.0)))
    assert "spark1: clock: found 9.0 s ahead of spark2" in found and "required within 5 s" in found
    assert judge((1, setter("probe", "late", value=5.1))) == [], "the samples themselves are 0.2 s wide"


def test_a_rail_may_be_chosen() -> None:
    assert judge(addresses={1: "192.168.100.1", 2: "192.168.100.2"}, allow_rail=True) == []
    assert len(judge(addresses={1: "192.168.100.1", 2: "192.168.100.2"})) == 2


def test_port_6443_matters_on_the_server_and_ours_is_no_fault() -> None:
    taken = [{"address": "::", "port": 6443, "process": "nginx", "unit": "nginx.service"}]
    ours = [{"address": "::", "port": 6443, "process": "k3s-server", "unit": "k3s.service"}]
    assert judge((1, setter("facts", "listening", value=taken))) == []
    assert "6443 taken by nginx" in judge((2, setter("facts", "listening", value=taken)))[0]
    assert judge((2, setter("facts", "listening", value=ours))) == []


def test_no_way_back_no_minor_left_out_and_no_agent_before_its_server() -> None:
    agent, server = (1, installed("v1.36.4+k3s1", "agent")), (2, installed("v1.36.4+k3s1", "server"))
    down = judge(agent, server, version="v1.35.8+k3s1")
    assert len(down) == 2 and "v1.35.8+k3s1, with v1.36.4+k3s1 installed" in down[0]
    assert "fix keep the newer version" in down[0]
    far = judge((1, installed("v1.34.1+k3s1", "agent")), (2, installed("v1.34.1+k3s1", "server")))
    assert len(far) == 2 and "at most 1.35 after v1.34.1+k3s1" in far[0]
    # Only the agent is in this run: it would be newer than its server.
    alone = judge(agent, server, version="v1.37.1+k3s1", in_run=["spark1"])
    assert len(alone) == 1 and "skew: found v1.37.1+k3s1; required 1.36 at most" in alone[0]
    assert judge(agent, server, version="v1.37.1+k3s1") == []
    # Only the server is, and the agent is far behind.
    behind = judge((1, installed("v1.32.5+k3s1", "agent")), server, in_run=["spark2"])
    assert len(behind) == 1 and "spark1: skew: found v1.32.5+k3s1; required 1.33 or newer" in behind[0]
    assert "not in this run, and no K3s on it" in judge(in_run=["spark1"])[0]
    assert "1.32 or newer" in " ".join(judge(version="v1.31.1+k3s1"))


def test_a_node_does_not_change_sides() -> None:
    found = judge((1, installed("v1.36.4+k3s1", "server")))
    assert len(found) == 1
    assert (
        "spark1: server: found this node is the server; required the agent, as k3s_server_node spark2 says" in found[0]
    )


def test_a_token_that_others_can_read_is_a_warning_that_says_what_to_do() -> None:
    fact, look = facts(1), probe(1)
    installed("v1.36.4+k3s1", "agent")(fact, look)
    look["token"]["mode"] = "0644"
    seen = p.Seen(c.NodeChoice("spark1", "10.0.0.1", "", True), Report("spark1", fact), look)
    (finding,) = p.check_token(seen)
    assert finding.severity != ERROR and "mode 0644" in finding.found and "token rotate" in finding.fix


def test_what_is_installed_needs_no_more_space() -> None:
    low = setter("probe", "free_bytes", value=21 << 30)
    assert judge((1, low), (1, installed("v1.36.4+k3s1", "agent"))) == []


def test_inputs_and_a_foreign_kubeconfig_are_in_the_same_table() -> None:
    foreign = yaml.safe_dump({"clusters": [{"name": "work", "cluster": {"server": "https://k.example:6443"}}]})
    found = judge(former=foreign, config={"kublet-arg": []})
    assert len(found) == 2
    assert "all: input: found kublet-arg in k3s_config" in found[0]
    assert "found /here/kubeconfig with work at https://k.example:6443" in found[1]


def test_keys_compared_with_an_older_list_are_a_warning_in_the_table() -> None:
    given = {"nodes": [], "server": "spark2", "version": "v1.38.1+k3s1", "keys": KEYS, "config": {"debug": True}}
    found = [one for one in p.evaluate([], c.Choices(**given), p.Bounds()) if "list of the keys" in one.found]
    assert [(one.check, one.severity) for one in found] == [("input", WARNING)] and "that of 1.36" in found[0].required


# ---- through the filters, as the role calls them


def hostvars(**changes: Any) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    for number in (1, 2):
        found[f"spark{number}"] = {
            "goodput_management_address": f"10.0.0.{number}",
            "__k3s_facts": {"node": facts(number), "clock": {}},
            "__k3s_probe": probe(number),
        }
    for name, values in changes.items():
        found[name] = values
    return found


GIVEN = {
    "nodes": ["spark1", "spark2"],
    "server": "spark2",
    "version": "v1.36.4+k3s1",
    "keys": KEYS,
    "api_port": "6443",
    "volumes_path": "/srv/goodput/volumes",
}


def test_the_filter_gives_each_node_its_own_file() -> None:
    one, two = (filters.k3s_node(hostvars(), GIVEN, name) for name in ("spark1", "spark2"))
    assert (one["unit"], two["unit"], one["server"], two["server"]) == ("k3s-agent", "k3s", False, True)
    assert one["config"]["server"] == one["url"] == two["url"] == "https://10.0.0.2:6443"
    assert one["config"]["flannel-iface"] == "enP7s7"
    assert one["labels"] == {"nvidia.com/gpu.present": "true"}


def test_a_host_may_choose_its_address() -> None:
    given = hostvars()
    given["spark2"]["k3s_node_ip"] = "192.168.100.2"
    assert filters.k3s_node(given, GIVEN, "spark1")["url"] == "https://192.168.100.2:6443"
    assert filters.k3s_node(given, GIVEN, "spark2")["config"]["flannel-iface"] == "enp1s0f0np0"


def test_a_node_that_limit_leaves_out_was_asked_by_another(tmp_path: Path) -> None:
    given = hostvars()
    other = given["spark2"]
    facts_of, probe_of = other.pop("__k3s_facts"), other.pop("__k3s_probe")
    given["spark1"]["__k3s_other_facts"] = {"results": [{"__k3s_other": "spark2", **facts_of}]}
    given["spark1"]["__k3s_other_probes"] = {"results": [{"__k3s_other": "spark2", **probe_of}]}
    installed("v1.36.4+k3s1", "server")({}, probe_of)
    given["spark1"]["__k3s_other_probes"] = {"results": [{"__k3s_other": "spark2", **probe_of}]}
    bounds = {"in_run": ["spark1"], "kubeconfig": str(tmp_path / "none")}
    assert filters.k3s_findings(given, GIVEN, bounds) == []
    # One that did not answer is a finding if agents need it.
    given["spark1"]["__k3s_other_facts"] = {
        "results": [{"__k3s_other": "spark2", "state": "unreachable", "reason": "timed out"}]
    }
    assert next(f["found"] for f in filters.k3s_findings(given, GIVEN, bounds)) == "timed out"
