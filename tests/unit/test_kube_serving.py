"""Waiting for the operator and the graph, ending old workers, and what runs against what was rendered.

Answers have the shape that a Kubernetes 1.37 API server with its controllers gave.
"""

from __future__ import annotations

import base64
import copy
import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import k3s_objects, serving
from ansible_collections.goodput.spark.plugins.module_utils import kube_serving as s
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError

Object = dict[str, Any]
NO_KIND = 'error: the server doesn\'t have a resource type "crd"'


class Cluster:
    """kubectl over a table of objects by kind; ``broken`` answers are errors of the API."""

    def __init__(self, **kinds: list[Object]) -> None:
        self.kinds: dict[str, list[Object]] = kinds
        self.logs: dict[str, str] = {}
        self.asked: list[str] = []
        self.unknown: set[str] = set()
        self.broken = 0
        self.ending = True

    def kubectl(self) -> Kubectl:
        return Kubectl(run=self)

    def __call__(self, argv: Sequence[str], timeout_seconds: float = 0) -> tuple[int, str, str]:
        words = list(argv[2:])
        self.asked.append(" ".join(words))
        if self.broken:
            self.broken -= 1
            return 1, "", "The connection to the server was refused"
        if words[0] == "logs":
            key = next((word for word in words if word in self.logs), "")
            return (0, self.logs[key], "") if key else (1, "", "container is waiting to start")
        kind = {s.GRAPHS: "graphs"}.get(words[1], words[1])
        if words[0] == "patch":
            (step,) = json.loads(words[words.index("-p") + 1])
            component = self.kinds["graphs"][0]["spec"]["components"][int(step["path"].split("/")[3])]
            component["replicas"] = step["value"]
            if self.ending:
                self.kinds["pods"] = [pod for pod in self.kinds["pods"] if s.component_of(pod) != component["name"]]
        if words[0] == "delete":
            self.kinds["crd"] = [one for one in self.kinds["crd"] if one["metadata"]["name"] not in words]
        if words[0] != "get":
            return 0, "", ""
        if kind in self.unknown:
            return 1, "", NO_KIND
        found = self.kinds.get(kind, [])
        label = next((word for word in words if s.COMPONENT in word), "")
        if label:
            found = [one for one in found if s.component_of(one) == label.rpartition("=")[2]]
        return 0, json.dumps({"kind": "List", "items": found}), ""


def named(name: str, namespace: str = "", **more: Any) -> Object:
    return {"metadata": {"name": name, "namespace": namespace}, **more}


def conditions(**states: str) -> Object:
    return {"conditions": [{"type": kind, "status": state} for kind, state in states.items()]}


def container(name: str, *arguments: str, **variables: str) -> Object:
    env = [{"name": key, "value": value} for key, value in variables.items()]
    return {
        "name": name,
        "image": f"goodput.local/x@sha256:{'a' * 64}",
        "command": ["run"],
        "args": [*arguments],
        "env": env,
    }


def objects(*arguments: str, replicas: int = 2) -> list[Object]:
    frontend = {"name": "frontend", "replicas": 1, "podTemplate": {"spec": {"containers": [container("main", "--kv")]}}}
    sidecar = container("lmcache", "--l1-size-gb", "4")
    pod = {"initContainers": [sidecar], "containers": [container("main", *(arguments or ("--model", "m")), SEED="0")]}
    worker = {"name": "worker", "replicas": replicas, "podTemplate": {"spec": pod}}
    graph = named("goodput", "goodput", kind="DynamoGraphDeployment", apiVersion="nvidia.com/v1beta1")
    return [graph | {"spec": {"components": [frontend, worker]}}]


def pod(component: str, node: str, *, ready: bool = True, **status: Any) -> Object:
    spec = copy.deepcopy(dict(s.templates(objects())[component])) | {"nodeName": node}
    # What the operator adds.
    spec["containers"][0]["env"].append({"name": "DYN_NAMESPACE", "value": "goodput-goodput"})
    about = {"name": f"{component}-{node}", "labels": {s.COMPONENT: component}}
    return {"metadata": about, "spec": spec, "status": conditions(Ready=str(ready)) | {"phase": "Running"} | status}


def pods() -> list[Object]:
    return [pod("frontend", "spark1"), pod("worker", "spark1"), pod("worker", "spark2")]


def live(**status: Any) -> Object:
    graph = copy.deepcopy(objects()[0])
    graph["metadata"]["generation"] = 3
    return graph | {"status": {"observedGeneration": 3, **conditions(Ready="True"), **status}}


# -- the operator --------------------------------------------------------------------------------------------------


def revision(number: int, status: str, description: str = "") -> Object:
    """A Secret as Helm writes it."""
    release = json.dumps({"info": {"description": description, "status": status}}).encode()
    data = base64.b64encode(base64.b64encode(gzip.compress(release))).decode()
    about = {"name": f"sh.helm.release.v1.x.v{number}", "labels": {"version": str(number), "status": status}}
    return {"metadata": about, "data": {"release": data}}


def platform() -> Cluster:
    crds = [named(name, status=conditions(Established="True")) for name in s.CRDS]
    operator = named("dynamo-operator", status=conditions(Available="True"))
    chart = named(s.CHART, spec={"targetNamespace": s.PLATFORM_NAMESPACE})
    chart["metadata"]["managedFields"] = [
        {"manager": "kubectl", "time": "2026-01-01T00:00:05Z", "fieldsV1": {"f:spec": {}}},
        {"manager": "k3s", "time": "2026-01-01T00:09:00Z", "fieldsV1": {"f:status": {}}},
    ]
    job = named("helm-install-dynamo-platform", status={"succeeded": 1})
    job["metadata"]["creationTimestamp"] = "2026-01-01T00:00:06Z"
    return Cluster(crd=crds, deployment=[operator], helmchart=[chart], job=[job])


def test_an_operator_that_serves_is_waited_for_no_longer() -> None:
    s.wait_platform(platform().kubectl(), 0)


def test_a_crd_that_is_never_established_ends_with_the_operators_last_lines() -> None:
    cluster = platform()
    cluster.kinds["crd"][1]["status"] = conditions(Established="False")
    cluster.kinds["pods"] = [pod("worker", "spark2", ready=False)]
    cluster.kinds["pods"][0]["metadata"]["name"] = "operator-1"
    waiting = {"name": "crd-apply", "ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    cluster.kinds["pods"][0]["status"]["containerStatuses"] = [waiting]
    cluster.logs = {"job/helm-install-dynamo-platform": "Error: timed out", "operator-1": "crd-apply: forbidden"}
    with pytest.raises(K3sError) as refusal:
        s.wait_platform(cluster.kubectl(), 0)
    said = str(refusal.value)
    assert f"found CRD {s.CRDS[1]} not Established after 0 s; required: {', '.join(s.CRDS)} Established" in said
    assert "job helm-install-dynamo-platform, last lines\nError: timed out" in said
    assert "pod operator-1 on spark2: crd-apply CrashLoopBackOff" in said
    assert "crd-apply, last lines:\ncrd-apply: forbidden" in said


@pytest.mark.parametrize(
    ("kind", "items", "words"),
    [
        ("crd", [], f"CRD {s.GRAPHS} missing after 0 s"),
        ("deployment", [], "no Deployment in dynamo-system"),
        ("deployment", [named("op", status={})], "Deployment op not Available"),
    ],
)
def test_each_thing_that_the_operator_lacks(kind: str, items: list[Object], words: str) -> None:
    cluster = platform()
    cluster.kinds[kind] = items
    with pytest.raises(K3sError, match=words):
        s.wait_platform(cluster.kubectl(), 0)


def test_a_failed_chart_is_not_waited_for() -> None:
    """The controller's condition Failed comes with the last of its attempts, or never; the release has it at once."""
    cluster = platform()
    words = 'Upgrade "dynamo-platform" failed: pre-upgrade hooks failed\ncontext deadline exceeded'
    cluster.kinds["secret"] = [revision(2, "failed", words), revision(1, "deployed")]
    # A job that meets another revision than it expected ends well.
    assert cluster.kinds["job"][0]["status"]["succeeded"]
    said = 'Upgrade "dynamo-platform" failed: pre-upgrade hooks failed; context deadline exceeded; .*run again'
    with pytest.raises(K3sError, match=f"found chart dynamo-platform failed: {said}"):
        s.wait_platform(cluster.kubectl(), 3600)
    # What failed before the one that is deployed matters no more.
    cluster.kinds["secret"].append(revision(10, "deployed"))
    s.wait_platform(cluster.kubectl(), 0)


def test_the_last_words_of_a_job_that_gave_up_are_kept() -> None:
    """Its pod, and with it the log, goes with the last attempt."""
    cluster = platform()
    job = cluster.kinds["job"][0]
    job["status"] = {"active": 1}
    cluster.logs = {"job/helm-install-dynamo-platform": "could not resolve host"}

    def run(argv: Sequence[str], timeout_seconds: float = 0) -> tuple[int, str, str]:
        answer = cluster(argv, timeout_seconds)
        if argv[2] == "logs":
            cluster.logs, job["status"] = {}, conditions(Failed="True")
        return answer

    with pytest.raises(K3sError, match="found chart dynamo-platform failed: job .* gave up") as refusal:
        s.wait_platform(Kubectl(run=run), 3600, poll_seconds=0)
    assert "last lines\ncould not resolve host" in str(refusal.value)


def test_an_operator_from_before_the_charts_last_change_is_not_the_one_asked_for() -> None:
    cluster = platform()
    job = cluster.kinds["job"][0]
    job["metadata"]["creationTimestamp"] = "2026-01-01T00:00:04Z"
    with pytest.raises(K3sError, match="from before the last change of chart dynamo-platform after"):
        s.wait_platform(cluster.kubectl(), 0)
    job["metadata"]["creationTimestamp"], job["status"] = "2026-01-01T00:00:05Z", {"active": 1}
    with pytest.raises(K3sError, match="job helm-install-dynamo-platform not done"):
        s.wait_platform(cluster.kubectl(), 0)
    cluster.kinds["job"] = []
    with pytest.raises(K3sError, match="chart dynamo-platform without a job"):
        s.wait_platform(cluster.kubectl(), 0)


def test_an_api_that_is_away_for_a_moment_ends_no_wait() -> None:
    cluster = platform()
    cluster.broken = 2
    s.wait_platform(cluster.kubectl(), 60, poll_seconds=0)
    cluster.broken = 99
    with pytest.raises(K3sError, match="connection to the server was refused.* after 0 s"):
        s.wait_platform(cluster.kubectl(), 0)


# -- the graph -----------------------------------------------------------------------------------------------------


def test_a_ready_graph() -> None:
    s.wait_graph(Cluster(graphs=[live()], pods=pods()).kubectl(), objects(), 0)


@pytest.mark.parametrize(
    ("graph", "there", "words"),
    [
        ([], [], "no graph of this name"),
        ([live()], pods()[:2], "component worker 1 of 2 ready"),
        ([live(observedGeneration=2)], pods(), "the operator has not seen the last change"),
        ([live(conditions=[])], pods(), "without a Ready condition"),
        (
            [live(conditions=[{"type": "Ready", "status": "False", "reason": "some_resources_are_not_ready"}])],
            pods(),
            "Ready=False .some_resources_are_not_ready",
        ),
    ],
)
def test_what_a_graph_lacks(graph: list[Object], there: list[Object], words: str) -> None:
    with pytest.raises(K3sError, match=f"{words}.* after 0 s; required: Ready with 1 frontend, 2 worker"):
        s.wait_graph(Cluster(graphs=graph, pods=there).kubectl(), objects(), 0)


def test_a_worker_that_does_not_come_up_is_named_with_its_event_and_its_log() -> None:
    there = pods()
    state = {"name": "main", "ready": False, "restartCount": 2, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    there[2] = pod("worker", "spark2", ready=False, containerStatuses=[state])
    event = {"involvedObject": {"name": "worker-spark2"}, "reason": "BackOff", "message": "back-off restarting"}
    cluster = Cluster(graphs=[live()], pods=there, events=[event])
    cluster.logs = {"worker-spark2": "NV_ERR_NO_MEMORY"}
    with pytest.raises(K3sError) as refusal:
        s.wait_graph(cluster.kubectl(), objects(), 0)
    said = str(refusal.value)
    assert "component worker 1 of 2 ready" in said and "worker-spark1" not in said
    assert "pod worker-spark2 on spark2: main CrashLoopBackOff; main restarted 2 times" in said
    assert "last event: BackOff: back-off restarting" in said and "main, last lines:\nNV_ERR_NO_MEMORY" in said


def unready(**state: Any) -> list[Object]:
    status = {"name": "main", "ready": False, "restartCount": 0, "state": {}, **state}
    return [*pods()[:2], pod("worker", "spark2", ready=False, containerStatuses=[status])]


def test_a_missing_rail_is_what_the_scheduler_says() -> None:
    unschedulable = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    unschedulable["message"] = "0/2 nodes are available: 1 Insufficient rdma/rail1."
    there = [*pods()[:2], pod("worker", "", ready=False, phase="Pending", conditions=[unschedulable])]
    with pytest.raises(K3sError, match="Insufficient rdma/rail1"):
        s.wait_graph(Cluster(graphs=[live()], pods=there).kubectl(), objects(), 0)


def test_what_no_waiting_heals_ends_at_once() -> None:
    there = unready(state={"waiting": {"reason": "ErrImageNeverPull"}})
    with pytest.raises(K3sError, match="no use to wait: worker-spark2 main: ErrImageNeverPull"):
        s.wait_graph(Cluster(graphs=[live()], pods=there).kubectl(), objects(), 3600)


def test_only_what_happens_during_the_wait_ends_it() -> None:
    hopes, old = s.Hopes(), unready(restartCount=7)[2]
    event = [f"FailedMount: {s.NO_DIRECTORY}: /srv/goodput/l2/x is not a directory"]
    assert hopes.gone(old, event) == ""
    assert hopes.gone(unready(restartCount=9)[2], event) == ""
    assert "restarted 3 times" in hopes.gone(unready(restartCount=10)[2], event)
    assert "/srv/goodput/l2/x is not a directory" in hopes.gone(old, event * 2)
    assert hopes.gone(pods()[2], event * 9) == ""


# -- an update -----------------------------------------------------------------------------------------------------


def placer(cluster: Cluster, folder: Path, before: list[Object]) -> k3s_objects.Placer:
    found = k3s_objects.Placer(cluster.kubectl(), folder / "serving.json")
    found.path.write_text(k3s_objects.document(before))
    return found


def test_other_workers_end_the_old_ones_first(tmp_path: Path) -> None:
    cluster = Cluster(graphs=[live()], pods=pods())
    record = placer(cluster, tmp_path, objects())
    new = objects("--model", "other")
    assert s.drain(cluster.kubectl(), new, record, 0, check=True) and len(cluster.kinds["pods"]) == 3
    assert s.drain(cluster.kubectl(), new, record, 0)
    assert [s.component_of(one) for one in cluster.kinds["pods"]] == ["frontend"]
    verbs = [line.split()[0] for line in cluster.asked if "--dry-run=server" in line or line.startswith("patch")]
    # Accepted by the API, in the check and in the run, before anything ends.
    assert verbs == ["apply", "apply", "patch"]
    assert list(tmp_path.iterdir()) == [record.path]


def test_everything_is_accepted_before_a_worker_ends(tmp_path: Path) -> None:
    """Not the graph alone: what the API would refuse after the workers are gone leaves nobody serving."""
    monitor = named("lmcache", "goodput", kind="PodMonitor", apiVersion="monitoring.coreos.com/v1")
    space = named("goodput", kind="Namespace", apiVersion="v1")
    new = [space, *objects("--model", "other"), monitor]
    cluster = Cluster(graphs=[live()], pods=pods())
    record = placer(cluster, tmp_path, objects())
    with pytest.raises(K3sError, match="found no CRD podmonitors.*fix: install the Prometheus operator"):
        s.drain(cluster.kubectl(), new, record, 0)
    assert len(cluster.kinds["pods"]) == 3
    # Also where nothing serves yet.
    with pytest.raises(K3sError, match="found no CRD podmonitors"):
        s.drain(Cluster().kubectl(), new, record, 0)
    cluster.kinds["crd"] = [named(s.MONITORS)]
    asked: list[str] = []

    class Watched(k3s_objects.Placer):
        def accepted(self, objects: Sequence[s.Object]) -> None:
            asked.extend(item["kind"] for item in objects)

    assert s.drain(cluster.kubectl(), new, Watched(cluster.kubectl(), record.path), 0)
    assert asked == ["DynamoGraphDeployment", "PodMonitor"]


def test_a_pod_of_before_has_time_to_go() -> None:
    old = pod("frontend", "spark1")
    old["spec"]["containers"][0]["args"] = ["--of-before"]
    cluster = Cluster(graphs=[live()], pods=[*pods()[1:], old])
    asked = iter([[*pods()[1:], old], pods()])

    def run(argv: Sequence[str], timeout_seconds: float = 0) -> tuple[int, str, str]:
        cluster.kinds["pods"] = next(asked)
        return cluster(argv, timeout_seconds)

    checks = s.settled_checks(Kubectl(run=run), objects(), ["spark1", "spark2"], 60, poll_seconds=0)
    assert all(check["ok"] for check in checks)


def test_a_pod_that_has_ended_is_no_worker(tmp_path: Path) -> None:
    """After a reboot a rejected pod stays beside the one that took its place; nothing deletes it at once."""
    rejected = pod("worker", "spark1", ready=False, phase="Failed", reason="UnexpectedAdmissionError")
    cluster = Cluster(graphs=[live()], pods=[*pods(), rejected])
    graph = s.Graph.among(objects())
    checks = s.running_checks(graph.pods(cluster.kubectl()), objects(), ["spark1", "spark2"])
    assert [check["check"] for check in checks if not check["ok"]] == []
    cluster.ending = False
    cluster.kinds["pods"] = [rejected, pod("worker", "spark2", ready=False, phase="Succeeded")]
    record = placer(cluster, tmp_path, objects())
    assert not s.drain(cluster.kubectl(), objects("--model", "other"), record, 0)


def test_a_run_that_was_broken_off_after_the_drain_is_repeated_by_the_next(tmp_path: Path) -> None:
    cluster = Cluster(graphs=[live()], pods=pods())
    record = placer(cluster, tmp_path, objects())
    s.drain(cluster.kubectl(), objects("--model", "other"), record, 0)
    # Also with the former objects again, which otherwise would be taken for what is there.
    assert json.loads(record.former())["items"] != objects()
    assert not s.drain(cluster.kubectl(), objects(), record, 0)
    assert record.present(objects(), check=True) == ["applied 1 objects"]


def test_workers_that_a_person_scaled_down_come_back(tmp_path: Path) -> None:
    graph = live()
    graph["spec"]["components"][1]["replicas"] = 0
    cluster = Cluster(graphs=[graph], pods=pods()[:1])
    record = placer(cluster, tmp_path, objects())
    assert not s.drain(cluster.kubectl(), objects(), record, 0)
    assert record.present(objects(), check=True)


def test_the_same_workers_and_more_of_them_end_nobody(tmp_path: Path) -> None:
    cluster = Cluster(graphs=[live()], pods=pods())
    record = placer(cluster, tmp_path, objects())
    for wanted in (objects(), objects(replicas=3)):
        assert not s.drain(cluster.kubectl(), wanted, record, 0)
    assert not s.drain(Cluster().kubectl(), objects(), record, 0)
    # What runs is not known: then it is ended.
    assert s.workers_change("", s.Graph.among(objects()))


def test_workers_that_do_not_end_are_named(tmp_path: Path) -> None:
    cluster = Cluster(graphs=[live()], pods=pods())
    cluster.ending = False
    with pytest.raises(K3sError, match="found workers worker-spark1 on spark1, worker-spark2 on spark2 0 s after"):
        s.drain(cluster.kubectl(), objects("x"), placer(cluster, tmp_path, objects()), 0)


def test_no_answer_is_not_no_workers(tmp_path: Path) -> None:
    cluster = Cluster(graphs=[live()], pods=pods())
    cluster.broken = 1
    with pytest.raises(K3sError, match="refused"):
        s.drain(cluster.kubectl(), objects("x"), placer(cluster, tmp_path, objects()), 0)


# -- what runs -----------------------------------------------------------------------------------------------------


def wrong(there: list[Object], nodes: Sequence[str] = ("spark1", "spark2")) -> str:
    return serving.reason(s.running_checks(there, objects(), nodes))


def test_pods_as_rendered() -> None:
    assert wrong(pods()) == ""
    leaving = pod("worker", "spark1")
    leaving["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    assert wrong([*pods(), leaving]) == ""


def test_the_arm_is_known_by_arguments_and_not_by_labels() -> None:
    there = pods()
    there[1]["spec"]["containers"][0]["args"] = ["--model", "m", "--kv-cache-memory-bytes", "9"]
    there[2]["spec"]["containers"][0]["args"] = ["--model", "other"]
    there[2]["spec"]["initContainers"][0]["args"][1] = "8"
    said = wrong(there)
    assert "spark1 worker main: found args: more: --kv-cache-memory-bytes 9; required as rendered" in said
    assert "spark2 worker main: found args: 'other' instead of 'm' after --model" in said
    assert "spark2 worker lmcache: found args: '8' instead of '4' after --l1-size-gb" in said
    there = pods()
    there[1]["spec"]["containers"][0]["env"][0]["value"] = "42"
    there[2]["spec"]["containers"][0]["image"] = "goodput.local/x:latest"
    del there[2]["spec"]["initContainers"]
    said = wrong(there)
    assert "variable SEED=42 instead of 0" in said and "image: goodput.local/x:latest instead of" in said
    assert "spark2 worker lmcache: found no such container" in said


def test_two_workers_on_one_node_and_none_at_all() -> None:
    there = [pods()[0], pods()[1], pods()[1]]
    assert "nodes with a worker: found spark1, spark1; required spark1, spark2" in wrong(there)
    assert "pods of worker: found none" in wrong(pods()[:1])


# -- away ----------------------------------------------------------------------------------------------------------


def test_crds_go_unless_a_graph_is_left() -> None:
    others = [named("helmcharts.helm.cattle.io"), named("clusterpolicies.nvidia.com")]
    cluster = Cluster(crd=[named(name) for name in s.CRDS] + others, graphs=[named("theirs", "team")])
    with pytest.raises(K3sError, match="found graphs team/theirs; required: none"):
        s.remove_crds(cluster.kubectl())
    cluster.kinds["graphs"] = []
    assert s.remove_crds(cluster.kubectl(), check=True) == list(s.CRDS)
    s.remove_crds(cluster.kubectl())
    assert cluster.kinds["crd"] == others and s.remove_crds(cluster.kubectl()) == []


def test_a_kind_that_the_cluster_does_not_know_has_no_objects() -> None:
    cluster = platform()
    cluster.unknown = {"helmchart", "graphs"}
    s.wait_platform(cluster.kubectl(), 0)
    assert s.Graph.among(objects()).live(cluster.kubectl()) == {}
