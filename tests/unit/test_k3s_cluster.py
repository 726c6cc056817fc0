"""What the cluster says of its nodes, against what was asked for."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.goodput.spark.plugins.module_utils import k3s_cluster as k
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from ansible_collections.goodput.spark.plugins.modules import k3s_cluster as module

NODE: dict[str, Any] = {
    "metadata": {
        "name": "spark1",
        "labels": {"nvidia.com/gpu.present": "true", "kubernetes.io/arch": "arm64"},
    },
    "spec": {"taints": [{"key": "dedicated", "value": "x", "effect": "NoSchedule"}]},
    "status": {
        "addresses": [{"type": "InternalIP", "address": "10.0.0.1"}, {"type": "Hostname", "address": "spark1"}],
        "conditions": [{"type": "Ready", "status": "True"}, {"type": "DiskPressure", "status": "False"}],
        "nodeInfo": {"kubeletVersion": "v1.36.4+k3s1"},
    },
}
WANTED: dict[str, Any] = {
    "address": "10.0.0.1",
    "version": "v1.36.4+k3s1",
    "labels": {"nvidia.com/gpu.present": "true"},
    "taints": ["dedicated=x:NoSchedule"],
    "kubelet": {
        "kind": "KubeletConfiguration",
        "evictionHard": {"memory.available": "2048Mi"},
        "systemReserved": {"memory": "4Gi"},
        "failSwapOn": False,
    },
    "server": False,
}
KUBELET = {
    "evictionHard": {"memory.available": "2Gi", "nodefs.available": "5%"},
    "systemReserved": {"memory": "4096Mi"},
    "failSwapOn": False,
}


def failed(**changes: Any) -> list[str]:
    node, wanted, kubelet = copy.deepcopy(NODE), copy.deepcopy(WANTED), copy.deepcopy(KUBELET)
    for key, value in changes.items():
        {"node": node, "wanted": wanted, "kubelet": kubelet}[key].update(value)
    return [
        f"{row['check']}: {row['found']}" for row in k.node_checks("spark1", wanted, node, kubelet) if not row["ok"]
    ]


def test_a_good_node_passes_and_quantities_are_compared_by_amount() -> None:
    assert failed() == []


def conditions(**states: str) -> dict[str, Any]:
    return {"status": {**NODE["status"], "conditions": [{"type": t, "status": s} for t, s in states.items()]}}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"node": conditions(Ready="False")}, "spark1 Ready: False"),
        ({"node": conditions(Ready="True", MemoryPressure="True")}, "spark1 MemoryPressure: True"),
        ({"wanted": {"address": "10.0.0.9"}}, "spark1 address: 10.0.0.1"),
        ({"wanted": {"version": "v1.37.0+k3s1"}}, "spark1 kubelet: v1.36.4+k3s1"),
        ({"wanted": {"server": True}}, "spark1 is the server: False"),
        ({"wanted": {"labels": {"tier": "gpu"}}}, "spark1 labels: tier=gpu"),
        ({"wanted": {"taints": ["a:NoExecute"]}}, "spark1 taints: without a:NoExecute"),
        ({"node": {"spec": {"unschedulable": True}}, "wanted": {"taints": []}}, "spark1 takes pods: cordoned"),
        (
            {"kubelet": {"evictionHard": {"nodefs.available": "5%"}}},
            "spark1 kubelet configuration: evictionHard.memory.available is None, not 2048Mi",
        ),
        (
            {"kubelet": {"systemReserved": {"memory": "1Gi"}}},
            "spark1 kubelet configuration: systemReserved.memory is 1Gi, not 4Gi",
        ),
        ({"kubelet": {"failSwapOn": True}}, "spark1 kubelet configuration: failSwapOn is True, not False"),
    ],
)
def test_each_difference_is_one_row(changes: dict[str, Any], words: str) -> None:
    assert failed(**changes) == [words]


def test_a_node_that_is_not_there() -> None:
    (row,) = k.node_checks("spark9", WANTED, None, None)
    assert not row["ok"] and row["found"] == "missing" and "k3s-agent" in row["remedy"]


@pytest.mark.parametrize(
    ("one", "two", "same"),
    [("1Gi", "1024Mi", True), ("1G", "1Gi", False), ("5%", "5%", True), ("5%", "10%", False), ("500m", "0.5", True)],
)
def test_quantities(one: str, two: str, same: bool) -> None:
    assert k.same_quantity(one, two) is same


class Answers:
    """kubectl with one answer by its first words; remembers every call."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[str] = []

    def __call__(
        self, argv: Sequence[str], stdin: str | None = None, timeout_seconds: float = 0
    ) -> tuple[int, str, str]:
        line = " ".join(argv[2:])
        self.asked.append(line)
        answer = self.answers.get(line.split()[0], "")
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        return (1, "", answer[1:]) if isinstance(answer, str) and answer.startswith("!") else (0, answer, "")


def listing(*nodes: dict[str, Any]) -> str:
    return json.dumps({"items": list(nodes)})


def test_ready_nodes_cost_one_call() -> None:
    kubectl = k.Kubectl(run=Answers(get=listing(NODE)))
    assert list(kubectl.wait_ready(["spark1"], 60)) == ["spark1"]
    assert kubectl.run.asked == ["get nodes -o json"]  # type: ignore[attr-defined]


def test_an_api_that_has_just_started_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k, "POLL_SECONDS", 0)
    refused = "!The connection to the server 127.0.0.1:6443 was refused"
    kubectl = k.Kubectl(run=Answers(get=[refused, refused, listing(NODE)]))
    assert list(kubectl.wait_ready(["spark1"], 60)) == ["spark1"]
    with pytest.raises(K3sError, match="was refused"):
        k.Kubectl(run=Answers(get=refused)).wait_ready(["spark1"], 0)


def test_a_node_that_comes_later_is_waited_for() -> None:
    kubectl = k.Kubectl(run=Answers(get=[listing(), listing(NODE)]))
    assert list(kubectl.wait_ready(["spark1"], 60)) == ["spark1"]
    assert [line.split()[1] for line in kubectl.run.asked if line.startswith("wait")] == [  # type: ignore[attr-defined]
        "--for=create",
        "--for=condition=Ready",
    ]


def test_a_node_that_never_gets_ready_is_named_with_its_message() -> None:
    late = copy.deepcopy(NODE)
    late["status"]["conditions"] = [{"type": "Ready", "status": "False", "message": "cni plugin not initialized"}]
    kubectl = k.Kubectl(run=Answers(get=listing(late), wait="!timed out waiting"))
    with pytest.raises(K3sError) as refused:
        kubectl.wait_ready(["spark1"], 60)
    for words in ("spark1 Ready=False (cni plugin not initialized)", "Ready within 60 s", "timed out waiting"):
        assert words in str(refused.value)


CONFIGZ = json.dumps({"kubeletconfig": KUBELET})


class Raw(Answers):
    """As ``Answers``, with the kubelet's configuration by itself."""

    def __call__(
        self, argv: Sequence[str], stdin: str | None = None, timeout_seconds: float = 0
    ) -> tuple[int, str, str]:
        if "--raw" not in argv:
            return super().__call__(argv, stdin, timeout_seconds)
        answer = self.answers["raw"]
        words = answer.pop(0) if len(answer) > 1 else answer[0]
        return (1, "", words[1:]) if words.startswith("!") else (0, words, "")


def test_what_the_api_says_of_before_a_restart_is_not_the_verdict() -> None:
    """Right after a restart a node still has its former Ready, version and address, and its kubelet may not answer."""
    former = copy.deepcopy(NODE)
    former["status"]["nodeInfo"]["kubeletVersion"] = "v1.35.8+k3s1"
    late = copy.deepcopy(NODE)
    late["status"]["conditions"][0]["status"] = "False"
    run = Raw(get=[listing(former), listing(late), listing(NODE)], raw=[CONFIGZ, "!502 Bad Gateway", CONFIGZ])
    rows = k.wait_nodes(k.Kubectl(run=run), {"spark1": WANTED}, 60, settle_seconds=30, poll_seconds=0)
    assert rows and all(row["ok"] for row in rows)


def test_a_node_that_stays_other_than_asked_is_a_failed_row_and_a_silent_kubelet_an_error() -> None:
    former = copy.deepcopy(NODE)
    former["status"]["nodeInfo"]["kubeletVersion"] = "v1.35.8+k3s1"
    run = Raw(get=listing(former), raw=[CONFIGZ])
    rows = k.wait_nodes(k.Kubectl(run=run), {"spark1": WANTED}, 60, settle_seconds=0, poll_seconds=0)
    assert [row["check"] for row in rows if not row["ok"]] == ["spark1 kubelet"]
    with pytest.raises(K3sError, match="502"):
        k.wait_nodes(
            k.Kubectl(run=Raw(get=listing(NODE), raw=["!502 Bad Gateway"])), {"spark1": WANTED}, 60, settle_seconds=0
        )


def test_stale_pods_are_named_and_those_without_a_controller_apart() -> None:
    def pod(uid: str, name: str, **more: Any) -> dict[str, Any]:
        return {"metadata": {"uid": uid, "namespace": "serving", "name": name, **more}}

    pods = [pod("1", "worker-0", ownerReferences=[{"kind": "ReplicaSet"}]), pod("2", "by-hand"), pod("3", "fine")]
    assert k.stale_pods(pods, ["1", "2", "9"]) == (["serving/worker-0"], ["serving/by-hand"])


def node(name: str, **spec: Any) -> dict[str, Any]:
    return {**copy.deepcopy(NODE), "metadata": {"name": name, "labels": {}}, "spec": spec}


def test_only_a_cordon_of_our_own_is_lifted() -> None:
    """A person's cordon has no mark of ours, so it gets none, and nothing is evicted that could not come back."""
    run = Answers(get=[listing(node("spark1"), node("spark2")), listing()])
    assert module.drained(k.Kubectl(run=run), ["spark1"], 60)
    assert [line.split()[0] for line in run.asked if not line.startswith("get")] == ["annotate", "drain"]
    run = Answers(get=[listing(node("spark1", unschedulable=True), node("spark2")), listing()])
    assert not module.drained(k.Kubectl(run=run), ["spark1"], 60)
    assert [line for line in run.asked if not line.startswith("get")] == []
    # Left over from a run that was broken off.
    former = node("spark1", unschedulable=True)
    former["metadata"]["annotations"] = {k.DRAINED: "true"}
    run = Answers(get=[listing(former, node("spark2")), listing()])
    assert module.drained(k.Kubectl(run=run), ["spark1"], 60)
    assert [line.split()[0] for line in run.asked if not line.startswith("get")] == ["annotate", "drain"]
    run = Answers(get=listing(node("spark1", unschedulable=True)))
    assert not module.settled(k.Kubectl(run=run), {"spark1": {"labels": {}}}, 60)


def run_module(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], run: Answers, **arguments: Any
) -> dict[str, Any]:
    """The module as Ansible runs it, up to what kubectl would be asked."""
    monkeypatch.setattr(k, "Kubectl", partial(k.Kubectl, run=run))
    with patch_module_args(arguments), pytest.raises(SystemExit):
        module.main()
    return dict(json.loads(capsys.readouterr().out))


def test_an_agent_that_leaves_is_deleted_and_one_that_is_not_known_is_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Answers(get=listing(node("spark1"), node("spark2"), node("spark3")))
    left = run_module(monkeypatch, capsys, run, state="removed", nodes={"spark1": {}, "spark3": {}, "spark9": {}})
    assert left["changed"] and run.asked == ["get nodes -o json", "delete node spark1 spark3"]
    run = Answers(get=listing(node("spark2")))
    again = run_module(monkeypatch, capsys, run, state="removed", nodes={"spark1": {}})
    assert not again["changed"] and run.asked == ["get nodes -o json"]


@pytest.mark.parametrize("state", ["removed", "alone"])
def test_a_server_that_does_not_answer_is_refused_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], state: str
) -> None:
    run = Answers(get="!The connection to the server 127.0.0.1:6443 was refused")
    said = run_module(monkeypatch, capsys, run, state=state, nodes={"spark1": {}})
    assert said["failed"] and not said["changed"]
    assert said["msg"].startswith("found no answer of the API; required: ") and "was refused" in said["msg"]
    assert "fix: journalctl -u k3s on the server" in said["msg"]
    assert "reset with goodput_reset_forget_objects=true" in said["msg"]


def test_a_server_leaves_no_agent_behind(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    run = Answers(get=listing(node("spark1"), node("spark2"), node("spark3")))
    said = run_module(monkeypatch, capsys, run, state="alone", nodes={"spark2": {}})
    assert said["failed"] and said["msg"].startswith(
        "found spark1, spark3 in the cluster and not in this run; required: "
    )
    assert "fix: run without --limit" in said["msg"] and "goodput_reset_forget_objects=true" in said["msg"]
    alone = run_module(monkeypatch, capsys, Answers(get=listing(node("spark2"))), state="alone", nodes={"spark2": {}})
    assert not alone.get("failed") and not alone["changed"]


@pytest.mark.parametrize(
    ("workers", "drains"),
    [
        ({"spark1": "True", "spark2": "True"}, True),
        # The node before this one has been restarted, and its worker loads its model.
        ({"spark1": "True", "spark2": "False"}, False),
        ({"spark1": "True"}, False),
        # Nobody serves, or nobody here: there is nothing to lose.
        ({"spark1": "False", "spark2": "False"}, True),
        ({"spark2": "True"}, True),
        ({}, True),
    ],
)
def test_the_last_worker_that_serves_is_not_evicted(workers: dict[str, str], drains: bool) -> None:
    pods = [
        {
            "metadata": {"name": f"worker-{name}"},
            "spec": {"nodeName": name},
            "status": {"conditions": [{"type": "Ready", "status": ready}]},
        }
        for name, ready in workers.items()
    ]
    run = Answers(get=[listing(node("spark1"), node("spark2")), listing(*pods)])
    assert module.drained(k.Kubectl(run=run), ["spark1"], 60) is drains
    assert any(line.startswith("drain") for line in run.asked) is drains


# ---- resources of device plugins


def offering(**allocatable: str) -> dict[str, Any]:
    return {
        "spark1": {"status": {"allocatable": {key.replace("__", "/"): value for key, value in allocatable.items()}}}
    }


RESOURCES = {"nvidia.com/gpu": "1", "rdma/rail0": ">0", "rdma/rail1": ">0"}


def lacking(**allocatable: str) -> list[str]:
    nodes = offering(**allocatable)
    nodes["spark1"]["status"]["allocatable"].setdefault("nvidia.com/gpu", "1")
    rows = k.resource_checks(nodes, {"spark1": RESOURCES})
    return [f"{row['check']}: {row['found']}, required {row['required']}" for row in rows if not row["ok"]]


def test_one_gpu_and_every_rail() -> None:
    assert lacking(rdma__rail0="8", rdma__rail1="1k") == []
    # A rail without its cable offers nothing, or is not there at all.
    assert lacking(rdma__rail0="8", rdma__rail1="0") == ["spark1 rdma/rail1: 0, required >0"]
    assert lacking(rdma__rail0="8") == ["spark1 rdma/rail1: 0, required >0"]
    many = k.resource_checks(
        {"spark1": {"status": {"allocatable": {"nvidia.com/gpu": "4"}}}}, {"spark1": {"nvidia.com/gpu": "1"}}
    )
    assert not many[0]["ok"], "time-slicing would put both workers on one GPU"


def test_resources_that_never_come_are_named() -> None:
    kubectl = k.Kubectl(run=Answers(get=listing(NODE)))
    rows = k.wait_resources(kubectl, {"spark1": RESOURCES}, timeout_seconds=0)
    assert [row["ok"] for row in rows] == [False, False, False]
    assert "rdma_ucm" in rows[1]["remedy"] and "0.17.4" in rows[0]["remedy"]


SAID = """opened /dev/infiniband/uverbs0
opened /dev/infiniband/uverbs1
memlock unlimited
uid 0
capabilities\t00000000a80465fb
"""


def test_a_probe_pod_opens_both_rails_and_locks_memory() -> None:
    assert all(row["ok"] for row in k.probe_checks("spark1", SAID, 2))


@pytest.mark.parametrize(
    ("old", "new", "check"),
    [
        ("opened /dev/infiniband/uverbs1\n", "", "RDMA devices that open"),
        ("memlock unlimited", "memlock 8192", "locked memory"),
        ("a80465fb", "a80425fb", "IPC_LOCK"),
        ("capabilities\t00000000a80465fb", "capabilities\t0000000000000000", "IPC_LOCK"),
    ],
)
def test_what_a_probe_pod_lacks_is_one_row(old: str, new: str, check: str) -> None:
    bad = [row for row in k.probe_checks("spark1", SAID.replace(old, new), 2) if not row["ok"]]
    assert len(bad) == 1 and check in bad[0]["check"]


def test_probe_pods_go_even_if_they_never_run(tmp_path: Path) -> None:
    pending = {
        "metadata": {"name": "goodput-probe-spark1"},
        "status": {
            "phase": "Pending",
            "conditions": [
                {"reason": "Unschedulable", "message": "0/2 nodes are available: 1 Insufficient rdma/rail1."}
            ],
        },
    }
    run = Answers(get=[listing(pending), json.dumps({"items": []})], wait="!timed out")
    with pytest.raises(K3sError, match="Insufficient rdma/rail1"):
        k.probe(k.Kubectl(run=run), "image", {"spark1": RESOURCES}, tmp_path, 1)
    assert run.asked[-1].startswith("delete") and not list(tmp_path.iterdir())


def test_the_probe_asks_for_one_of_each_rail_on_its_node_and_not_for_the_gpu_that_serves() -> None:
    spec = k.probe_pod("spark1", "busybox", list(RESOURCES), k.DEVICES)["spec"]
    assert spec["containers"][0]["resources"]["limits"] == {"rdma/rail0": "1", "rdma/rail1": "1"}
    assert spec["nodeSelector"] == {"kubernetes.io/hostname": "spark1"}
    assert spec["containers"][0]["imagePullPolicy"] == "Never"
