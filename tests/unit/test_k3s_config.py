"""What is written on each node, and what is refused before it would be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.module_utils import k3s_config as c
from ansible_collections.goodput.spark.plugins.module_utils import k3s_release as r

ROOT = Path(__file__).resolve().parents[2]
KEYS = yaml.safe_load((ROOT / "roles/k3s/vars/config_keys.yml").read_text())["__k3s_config_keys"]


def choices(**changes: Any) -> c.Choices:
    given: dict[str, Any] = {
        "nodes": ["spark1", "spark2", "spark3"],
        "server": "spark2",
        "version": "v1.36.4+k3s1",
        "keys": KEYS,
        "disable": ["traefik", "servicelb"],
        "volumes_path": "/srv/goodput/volumes",
    }
    return c.Choices(**{**given, **changes})


def node(number: int = 1, **changes: Any) -> c.NodeChoice:
    given: dict[str, Any] = {"name": f"spark{number}", "address": f"10.0.0.{number}", "interface": "enP7s7"}
    return c.NodeChoice(**{**given, **changes})


def test_server_and_agents_differ_only_where_they_must() -> None:
    server = c.node_config(choices(), node(2, gpu=True), "10.0.0.2")
    agent = c.node_config(choices(), node(3, gpu=True), "10.0.0.2")
    assert server == {
        "default-local-storage-path": "/srv/goodput/volumes",
        "disable": ["traefik", "servicelb"],
        "flannel-backend": "vxlan",
        "flannel-iface": "enP7s7",
        "https-listen-port": 6443,
        "node-ip": "10.0.0.2",
        "node-label": ["nvidia.com/gpu.present=true"],
        "node-name": "spark2",
        "token-file": "/etc/rancher/k3s/token",
        "write-kubeconfig-mode": "0600",
    }
    assert agent == {
        "flannel-iface": "enP7s7",
        "node-ip": "10.0.0.3",
        "node-label": ["nvidia.com/gpu.present=true"],
        "node-name": "spark3",
        "server": "https://10.0.0.2:6443",
        "token-file": "/etc/rancher/k3s/token",
    }


def test_every_key_that_the_role_writes_is_one_that_the_version_knows() -> None:
    _minor, known = c.known_keys(KEYS, r.parse("v1.36.4+k3s1"))
    for number in (1, 2):
        for key in c.node_config(choices(taints=["a=b:PreferNoSchedule"], labels={"x": "y"}), node(number), "10.0.0.2"):
            assert key in known and (number == 2 or known[key].startswith("both")), key
    assert set(c.OWNED) <= set(known)
    assert {entry.split()[1] for entry in known.values()} <= set(c.WORDS)


def test_more_keys_reach_the_nodes_they_are_for() -> None:
    chosen = choices(config={"snapshotter": "native"}, server_config={"tls-san": ["k3s.example"]})
    assert c.choice_problems(chosen) == c.choice_warnings(chosen) == []
    assert c.node_config(chosen, node(2), "10.0.0.2")["tls-san"] == ["k3s.example"]
    agent = c.node_config(chosen, node(1), "10.0.0.2")
    assert agent["snapshotter"] == "native" and "tls-san" not in agent


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"config": {"kublet-arg": ["v=2"]}}, "correct it to kubelet-arg"),
        (
            {"config": {"frobnicate": 1}},
            "found frobnicate in k3s_config; required: a key of K3s's command line as of 1.36",
        ),
        # Known from 1.37 and from 1.36 on.
        ({"server_config": {"write-kubeconfig-name": "x"}}, "command line as of 1.36"),
        ({"version": "v1.35.2+k3s1", "server_config": {"helm-controller-arg": ["v=2"]}}, "command line as of 1.32"),
        ({"server_config": {"service-cidr": {"v4": "10.43.0.0/16"}}}, "required: one text, or a list"),
        ({"config": {"tls-san": ["x"]}}, "keys that agents know; fix: move it to k3s_server_config"),
        ({"config": {"kubelet-arg": "v=2"}}, "found kubelet-arg: 'v=2' in k3s_config; required: a list"),
        ({"config": {"debug": "yes"}}, "required: true or false"),
        ({"config": {"node-ip": "10.0.0.9"}}, "fix: use k3s_node_ip"),
        ({"config": {"node-label+": ["a=b"]}}, "fix: use k3s_node_labels"),
        ({"server_config": {"token": "secret"}}, "the token and it never leaves its file"),
        ({"server_config": {"cluster-init": True}}, "embedded etcd needs three"),
        ({"config": {"debug": True}, "server_config": {"debug": True}}, "required: one place"),
        ({"server": "spark9"}, "found k3s_server_node 'spark9'; required: one of spark1, spark2, spark3"),
        ({"version": "stable"}, "found k3s_version 'stable'"),
        ({"version": "v1.31.9+k3s1"}, "1.32 or newer, whose keys are known"),
        ({"labels": {"a b": "c"}}, "found label a b=c"),
        ({"labels": {"gpu": True}}, "found label gpu=True"),
        ({"taints": ["dedicated"]}, "required: KEY=VALUE:EFFECT"),
        ({"taints": ["dedicated=x:Sometimes"]}, "NoSchedule, PreferNoSchedule, NoExecute"),
        (
            {"taints": ["dedicated=x:NoSchedule"]},
            "or node-role.kubernetes.io/control-plane:NoSchedule, because every node",
        ),
        (
            {"taints": ["node-role.kubernetes.io/control-plane:NoExecute"]},
            "what serves tolerates no other; fix: remove it",
        ),
        ({"nodes": ["Spark_1", "spark2"]}, "found node name Spark_1 in k3s_nodes; required: lower case letters"),
    ],
)
def test_bad_input_is_one_line_with_its_remedy(changes: dict[str, Any], words: str) -> None:
    problems = c.choice_problems(choices(**changes))
    assert len(problems) == 1 and words in problems[0], problems
    assert problems[0].startswith("found ") and "; required: " in problems[0] and "; fix: " in problems[0]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "server_config": {
                "helm-controller-arg": ["v=2"],
                "etcd-s3-retention": 3,
                "etcd-snapshot-reconcile-interval": "5m",
            }
        },
        {"server_config": {"cluster-cidr": "10.42.0.0/16", "service-cidr": ["10.43.0.0/16", "fd00:43::/112"]}},
        {"taints": ["a=b:PreferNoSchedule", "node-role.kubernetes.io/control-plane=true:NoSchedule"]},
        {"nodes": ["spark1.example", "spark2"]},
    ],
)
def test_what_k3s_takes_is_not_refused(changes: dict[str, Any]) -> None:
    assert c.choice_problems(choices(**changes)) == []


def test_the_newest_list_that_is_old_enough_counts() -> None:
    lists = {"1.32": {"old": "both value"}, "1.40": {"new": "both value"}}
    assert c.known_keys(lists, r.parse("v1.39.0+k3s1")) == ("1.32", lists["1.32"])
    assert c.known_keys(lists, r.parse("v1.41.0+k3s1")) == ("1.40", lists["1.40"])


def test_a_version_without_a_list_of_its_own_says_with_which_it_was_compared() -> None:
    (warning,) = c.choice_warnings(choices(version="v1.38.1+k3s1", config={"debug": True}))
    assert "found no list of the keys of v1.38.1+k3s1" in warning and "that of 1.36); fix: look" in warning
    # Nothing of a person's was compared.
    assert c.choice_warnings(choices(version="v1.38.1+k3s1")) == []


@pytest.mark.parametrize("path", sorted((ROOT / "vars/releases").glob("*.yml")), ids=lambda path: path.stem)
def test_the_version_of_every_release_set_has_a_list_of_its_own(path: Path) -> None:
    version = r.parse(yaml.safe_load(path.read_text())["goodput_release_set"]["k3s"]["version"])
    assert c.known_keys(KEYS, version)[0] == f"{version.major}.{version.minor}"


def plan(**lines: int) -> dict[str, Any]:
    given = {"OS at rest": 4 << 30, "control plane": 2 << 30, "reserve": 10 << 30, **lines}
    return {"budget": {"spark1": {"lines": [{"name": name, "bytes": size} for name, size in given.items()]}}}


def test_reservations_come_from_the_budget_of_the_node() -> None:
    assert c.reservations(plan(), "spark1") == {"system": "4096Mi", "kube": "2048Mi", "eviction": "2560Mi"}
    # Rounded, so that a page more at rest restarts nothing; never below what upstream evicts at.
    small = c.reservations(plan(**{"OS at rest": (192 << 20) + 4096, "reserve": 100 << 20}), "spark1")
    assert small["system"] == "256Mi" and small["eviction"] == "100Mi"
    with pytest.raises(r.K3sError, match="for spark9 in the plan.*playbooks/plan.yml"):
        c.reservations(plan(), "spark9")


def test_the_kubelet_evicts_before_memory_is_gone() -> None:
    document = c.kubelet_config({"memory": "4Gi"}, {"memory": "2Gi"}, {"memory.available": "2Gi"}, 92, 88)
    assert document["kind"] == "KubeletConfiguration"
    assert document["evictionHard"] == {"memory.available": "2Gi"}
    assert (document["imageGCHighThresholdPercent"], document["imageGCLowThresholdPercent"]) == (92, 88)
    with pytest.raises(r.K3sError, match="without memory.available.*ordinary processes.*CUDA's it does not see"):
        c.kubelet_config({}, {}, {"nodefs.available": "5%"}, 92, 88)
    with pytest.raises(r.K3sError, match="found memory: '4 GB' in k3s_system_reserved"):
        c.kubelet_config({"memory": "4 GB"}, {}, {"memory.available": "2Gi"}, 92, 88)
    with pytest.raises(r.K3sError, match="0 < low < high"):
        c.kubelet_config({}, {}, {"memory.available": "2Gi"}, 80, 90)


WRITTEN = yaml.safe_dump(
    {
        "clusters": [
            {"name": "default", "cluster": {"server": "https://127.0.0.1:6443", "certificate-authority-data": "Q0E="}}
        ],
        "users": [{"name": "default", "user": {"client-key-data": "S0VZ"}}],
        "contexts": [{"name": "default", "context": {"cluster": "default", "user": "default"}}],
    }
)


def test_the_kubeconfig_names_the_server_that_others_reach() -> None:
    made = yaml.safe_load(c.kubeconfig(WRITTEN, "https://10.0.0.2:6443"))
    assert made["clusters"] == [
        {"name": "goodput", "cluster": {"server": "https://10.0.0.2:6443", "certificate-authority-data": "Q0E="}}
    ]
    assert made["users"][0]["user"] == {"client-key-data": "S0VZ"}
    assert made["current-context"] == "goodput"


def test_the_kubeconfig_of_another_cluster_is_never_replaced() -> None:
    url = "https://10.0.0.2:6443"
    assert c.kubeconfig_problems("", url, "k") == []
    assert c.kubeconfig_problems(c.kubeconfig(WRITTEN, url), url, "k") == []
    (problem,) = c.kubeconfig_problems(WRITTEN, url, "/home/a/kubeconfig")
    assert "found /home/a/kubeconfig with default at https://127.0.0.1:6443" in problem and "move it away" in problem
    assert "no cluster that can be read" in c.kubeconfig_problems("garbage", url, "k")[0]
    assert c.kubeconfig_problems(c.kubeconfig(WRITTEN, "https://10.9.9.9:6443"), url, "k")


def test_an_ipv6_server_is_a_url() -> None:
    assert c.server_url("fd00::1", 6443) == "https://[fd00::1]:6443"
