"""`goodput status` on Kubernetes: nodes, what they give away, pods, and the arm from what pods were started with."""

from __future__ import annotations

import copy
import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import k3s_node, kube_status
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import kube_objects
from ansible_collections.goodput.spark.plugins.module_utils.kube_serving import templates
from kube_pods import DIGESTS, Object, release, site
from rich.console import Console

from goodput import arm, node_questions, status, status_view
from goodput.node_questions import COORDINATOR, FRONTEND, LMCACHE, WORKER
from goodput.session import Result

MEMORY = [{"name": f"spark{n}", "server": n == 1, "total_bytes": 128 * 10**9} for n in (1, 2)]


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, Any]]:
    _chosen, found = arm.site_plans({"goodput_profile": "super-recommended"}, MEMORY)
    return {plan["name"]: plan for plan in found if plan["ok"] and plan["inputs"]["profile"]["engine"] == "vllm"}


def node(number: int, ready: str = "True", **gives: str) -> Object:
    offered = {"nvidia.com/gpu": "1", "rdma/rail0": "64", "rdma/rail1": "64", "memory": "118Gi", "cpu": "20", **gives}
    labels = {"node-role.kubernetes.io/control-plane": "true"} if number == 2 else {}
    return {
        "kind": "Node",
        "metadata": {"name": f"spark{number}", "labels": labels},
        "spec": {},
        "status": {
            "allocatable": offered,
            "conditions": [{"type": "Ready", "status": ready, "message": "container runtime is down"}],
            "nodeInfo": {"kubeletVersion": "v1.36.4+k3s1"},
        },
    }


def pod(component: str, number: int, spec: Object) -> Object:
    names = [one["name"] for one in [*spec.get("initContainers", []), *spec["containers"]]]
    up = [{"name": name, "ready": True, "restartCount": 0, "state": {"running": {}}} for name in names]
    labels = {"app.kubernetes.io/part-of": "goodput", "app.kubernetes.io/component": component}
    return {
        "kind": "Pod",
        "metadata": {"name": f"goodput-{component}-{number}", "namespace": "goodput", "labels": labels},
        "spec": {**copy.deepcopy(spec), "nodeName": f"spark{number}"},
        "status": {
            "phase": "Running",
            "podIP": f"10.77.0.{number}",
            "conditions": [{"type": "Ready", "status": "True"}],
            "containerStatuses": up,
        },
    }


def everything(plan: dict[str, Any]) -> list[Object]:
    specs = templates(kube_objects(plan, site(2), release("current"), {"digests": DIGESTS}, ["serving"]))
    pods = [pod("worker", number, dict(specs["worker"])) for number in (1, 2)]
    pods += [pod(name, 1, dict(spec)) for name, spec in specs.items() if name != "worker"]
    return [node(1), node(2), *pods]


def graphs(ready: str = "True") -> Object:
    said = {"type": "Ready", "status": ready, "reason": "some_resources_are_not_ready", "message": "worker"}
    return {"items": [{"metadata": {"name": "goodput", "namespace": "goodput"}, "status": {"conditions": [said]}}]}


def test_every_profile_is_recognised_from_its_own_pods(plans: dict[str, dict[str, Any]]) -> None:
    assert len(plans) >= 5
    for name, plan in plans.items():
        cluster = kube_status.parse({"items": everything(plan)}, graphs())
        assert cluster.problems == []
        found = arm.find(plans.values(), cluster.running)
        assert found is not None and found.exact, (name, found)
        same = arm.against(plans[found.name], cluster.running).differences == ()
        assert found.name == name or same, (name, found.name)


def test_the_arm_is_not_what_a_label_says(plans: dict[str, dict[str, Any]]) -> None:
    items = everything(plans["super-recommended"])
    for item in items[2:]:
        item["metadata"]["labels"]["goodput.spark/profile"] = "weka-a-router"
    cluster = kube_status.parse({"items": items}, graphs())
    found = arm.find(plans.values(), cluster.running)
    assert found is not None and found.name == "super-recommended" and found.exact
    arguments = items[2]["spec"]["containers"][0]["args"]
    arguments[arguments.index("--max-num-seqs") + 1] = "7"
    found = arm.find(plans.values(), kube_status.parse({"items": items}, graphs()).running)
    assert found is not None and [(item.argument, item.running) for item in found.differences] == [
        ("--max-num-seqs", "7")
    ]


def test_what_runs_is_as_the_kubelet_starts_it(plans: dict[str, dict[str, Any]]) -> None:
    running = kube_status.parse({"items": everything(plans["weka-c-p2p"])}, graphs()).running
    assert set(running["spark1"]) == {WORKER, LMCACHE, FRONTEND, COORDINATOR} and set(running["spark2"]) == {
        WORKER,
        LMCACHE,
    }
    lmcache = running["spark2"][LMCACHE]
    assert lmcache[:2] == ("lmcache", "server") and "10.77.0.2" in lmcache and "$(" not in " ".join(lmcache)
    container = {"command": ["a"], "args": ["$$(GOODPUT_NODE)", "$(NONE)"], "env": []}
    assert kube_status.words(node(1), container) == ("a", "$(GOODPUT_NODE)", "$(NONE)")


def changed(plan: dict[str, Any], what: str) -> list[Object]:
    items = everything(plan)
    worker = items[3]
    if what == "rail":
        items[0]["status"]["allocatable"]["rdma/rail1"] = "0"
    elif what == "node":
        items[0] = node(1, ready="False")
    elif what == "cordoned":
        items[1]["spec"]["unschedulable"] = True
    elif what == "pressure":
        items[1]["status"]["conditions"].append({"type": "MemoryPressure", "status": "True"})
    elif what == "crash":
        worker["status"]["conditions"][0]["status"] = "False"
        state = {"ready": False, "restartCount": 4, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
        worker["status"]["containerStatuses"][-1] |= state
    else:
        pending = {"reason": "Unschedulable", "message": "1 Insufficient nvidia.com/gpu", "type": "PodScheduled"}
        worker["status"] = {"phase": "Pending", "conditions": [{**pending, "status": "False"}]}
        del worker["spec"]["nodeName"]
    return items


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("rail", "spark1: offers no rdma/rail1; see that device plugin's log, the cable"),
        ("node", "spark1: Ready=False (container runtime is down); `journalctl -u k3s"),
        ("cordoned", "spark2: cordoned"),
        ("pressure", "spark2: MemoryPressure"),
        ("crash", "pod goodput/goodput-worker-2 on spark2: 1/2 ready, main CrashLoopBackOff; main restarted 4 times"),
        ("pending", "pod goodput/goodput-worker-2: 0/2 ready, 1 Insufficient nvidia.com/gpu; `kubectl describe pod"),
    ],
)
def test_what_is_not_well_is_said_once(plans: dict[str, dict[str, Any]], what: str, words: str) -> None:
    (problem,) = kube_status.parse({"items": changed(plans["super-recommended"], what)}, graphs()).problems
    assert problem.startswith(words)


def test_a_graph_that_is_not_ready_says_why() -> None:
    assert kube_status.parse({"items": []}, graphs("False")).problems == [
        "graph goodput/goodput: some_resources_are_not_ready: worker"
    ]
    assert kube_status.parse({"items": []}, {}).graphs == {}


def test_other_pods_are_shown_only_if_they_are_not_well(plans: dict[str, dict[str, Any]]) -> None:
    items = everything(plans["super-recommended"])
    for number, (phase, ready) in enumerate((("Running", "True"), ("Succeeded", "False"), ("Running", "False"))):
        other = copy.deepcopy(items[2])
        other["metadata"] = {"name": f"other-{number}", "namespace": "kube-system"}
        other["status"] |= {"phase": phase, "conditions": [{"type": "Ready", "status": ready}]}
        items.append(other)
    names = [one.name for one in kube_status.parse({"items": items}, graphs()).pods]
    assert [name for name in names if name.startswith("other")] == ["other-2"]


# -- the screen ----------------------------------------------------------------------------------------------------


def answer(items: list[Object]) -> Result:
    return Result(0, f"{json.dumps({'items': items})}\x1e{json.dumps(graphs())}\x1e", "")


def test_the_answer_of_a_server_of_a_dead_one_and_of_none(plans: dict[str, dict[str, Any]]) -> None:
    cluster = status.parse_cluster(answer(everything(plans["super-recommended"])))
    assert cluster is not None and cluster.graphs == {"goodput/goodput": "Ready"}
    dead = status.parse_cluster(Result(0, "\x1e\x1e\n", "The connection to the server 127.0.0.1:6443 was refused\n"))
    assert dead is not None and "6443 was refused; `journalctl -u k3s`" in dead.problems[0]
    assert status.parse_cluster(Result(0, "", "")) is None


def test_one_screen(plans: dict[str, dict[str, Any]]) -> None:
    cluster = status.parse_cluster(answer(everything(plans["super-recommended"])))
    nodes = [status.Node(f"spark{n}", f"10.77.0.{n}") for n in (1, 2)]
    found = status.parse_site(nodes, {}, [], "super-recommended", list(plans.values()), cluster)
    assert found.problems == [] and found.exit_code == 0 and json.loads(json.dumps(found.to_dict()))["ok"]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status_view.screen(found, "goodput status"))
    text = console.export_text()
    for words in ("ALL WELL", "arm: super-recommended (all", "nvidia.com/gpu", "rdma/rail1", "agent", "server",
                  "118 GiB", "goodput/goodput-worker-2", "2/2", "graph: goodput/goodput Ready"):  # fmt: skip
        assert words in text, text
    assert len(text.splitlines()) < 40


@pytest.mark.parametrize("question", [node_questions.KUBE, node_questions.KUBE_HTTP])
def test_where_no_server_is_nothing_is_asked(question: str) -> None:
    done = subprocess.run(["sh", "-c", question], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("question", [node_questions.KUBE, node_questions.KUBE_HTTP])
def test_kubectl_keeps_nothing_in_roots_home(question: str, tmp_path: Path) -> None:
    """A reset removes /run/goodput-kubectl; ~/.kube it does not touch."""
    program, said = tmp_path / "k3s", tmp_path / "said"
    program.write_text(f'#!/bin/sh\necho "$KUBECACHEDIR" >> {said}\n')
    program.chmod(0o755)
    (tmp_path / "k3s.yaml").write_text("")
    script = question.replace("/usr/local/bin/k3s", str(program)).replace("/etc/rancher/k3s", str(tmp_path))
    subprocess.run(["sh", "-c", script], capture_output=True, check=True)
    assert set(said.read_text().split()) == {k3s_node.KUBECTL_CACHE}
