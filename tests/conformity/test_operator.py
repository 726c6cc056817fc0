"""Our graphs before Dynamo's real operator, its webhooks and the real scheduler: what they become, and an update."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import dynamo_operator
import pytest
from ansible_collections.goodput.spark.plugins.module_utils import k3s_objects, serving
from ansible_collections.goodput.spark.plugins.module_utils import kube_serving as s
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from kube_pods import Object, component, release
from kube_server import Missing
from standin import control_plane
from test_kube_api import rendered

NODES = ["spark1", "spark2"]
#: As a Spark offers them, and memory for the largest plan.
SPARK = {
    "cpu": "20",
    "memory": "120Gi",
    "pods": "110",
    "ephemeral-storage": "1Ti",
    "nvidia.com/gpu": "1",
    "rdma/rail0": "64",
    "rdma/rail1": "64",
}
READY_SECONDS = 90
PROFILES = [name for name in files.names_in(files.PROFILES) if files.load_profile(name).engine == "vllm"]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Kubectl, dynamo_operator.Kubelets]]:
    try:
        dynamo_operator.folder()
        work = tmp_path_factory.mktemp("operator")
        with control_plane(work) as kubectl:
            version = str(release("current")["kubernetes"]["charts"]["dynamo_platform"]["version"])
            runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
            dynamo_operator.apply(kubectl, work, runtime | {"handler": "nvidia"})
            with (
                dynamo_operator.operator(kubectl, work / "kubeconfig.yaml", work / "op", version),
                dynamo_operator.Kubelets(kubectl, work / "kubelets", dict.fromkeys(NODES, SPARK)) as kubelets,
            ):
                yield kubectl, kubelets
    except Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture
def kubectl(cluster: tuple[Kubectl, dynamo_operator.Kubelets]) -> Kubectl:
    return cluster[0]


@pytest.fixture
def placer(kubectl: Kubectl, tmp_path: Path) -> Iterator[k3s_objects.Placer]:
    found = k3s_objects.Placer(kubectl, tmp_path / "serving.json")
    yield found
    found.absent(cluster=True)
    assert s.items(kubectl, "pods", "-n", "goodput") == []


def objects_of(profile: str) -> list[Object]:
    found = [item for item in rendered(profile, "current", 2) if item["kind"] not in ("HelmChart", "PodMonitor")]
    return [item for item in found if item["metadata"].get("namespace", item["metadata"]["name"]).startswith("goodput")]


def other_workers(objects: list[Object]) -> list[Object]:
    """The same with another revision of the weights."""
    changed = copy.deepcopy(objects)
    about = s.Graph.among(changed).components[s.WORKER]["podTemplate"]["metadata"]
    about["annotations"] = {**about.get("annotations", {}), "goodput.spark/model-revision": "b" * 40}
    return changed


def within(asked: Any, found: Any) -> bool:
    """Whether everything that was asked for is there; the API server fills in what nobody said."""
    if isinstance(asked, dict):
        return isinstance(found, dict) and all(within(value, found.get(key)) for key, value in asked.items())
    return bool(asked == found)


def main_of(pod: Object) -> dict[str, Any]:
    return dict(s.containers(pod["spec"])["main"])


@pytest.mark.parametrize("profile", PROFILES)
def test_a_graph_becomes_pods_as_rendered(kubectl: Kubectl, placer: k3s_objects.Placer, profile: str) -> None:
    objects = objects_of(profile)
    began = time.monotonic()
    placer.present(objects)
    s.wait_graph(kubectl, objects, READY_SECONDS, poll_seconds=1)
    print(f"\n{profile}: Ready after {time.monotonic() - began:.0f} s")
    pods = s.Graph.among(objects).pods(kubectl)
    assert serving.reason(s.running_checks(pods, objects, NODES)) == ""
    for name in (s.FRONTEND, s.WORKER):
        wanted = component(objects, name)["podTemplate"]["spec"]
        for pod in (pod for pod in pods if s.component_of(pod) == name):
            spec, main = pod["spec"], main_of(pod)
            for kind in ("livenessProbe", "readinessProbe", "startupProbe"):
                asked = s.containers(wanted)["main"][kind]
                assert within(asked, main[kind]), (name, kind, main[kind])
            assert spec["terminationGracePeriodSeconds"] == wanted["terminationGracePeriodSeconds"]
            # Every variable once: the last one of a name counts, and ours is compared.
            names = [one["name"] for one in main["env"]]
            assert len(names) == len(set(names)), sorted(names)
            if name == s.WORKER:
                assert spec["hostIPC"] and spec["hostNetwork"]
                assert main["resources"]["limits"] == s.containers(wanted)["main"]["resources"]["limits"]
                shared = [one["name"] for one in main["volumeMounts"] if one["mountPath"] == "/dev/shm"]
                assert shared == ["shm"] and not [one for one in spec["volumes"] if "emptyDir" in one]
    assert not placer.present(objects)


def test_an_update_ends_the_old_workers_first(
    cluster: tuple[Kubectl, dynamo_operator.Kubelets], placer: k3s_objects.Placer
) -> None:
    kubectl, kubelets = cluster
    objects = objects_of("super-recommended")
    placer.present(objects)
    s.wait_graph(kubectl, objects, READY_SECONDS, poll_seconds=1)
    changed = other_workers(objects)
    kubelets.held.set()
    try:
        with pytest.raises(K3sError, match="found workers .* after their number was set to 0"):
            s.drain(kubectl, changed, placer, 5, poll_seconds=1)
    finally:
        kubelets.held.clear()
    kubelets.mixed = 0
    s.drain(kubectl, changed, placer, READY_SECONDS, poll_seconds=1)
    assert s.Graph.among(objects).pods(kubectl, s.WORKER) == []
    assert placer.present(changed)
    s.wait_graph(kubectl, changed, READY_SECONDS, poll_seconds=1)
    s.settled_checks(kubectl, changed, NODES, 60, poll_seconds=1)
    pods = s.Graph.among(changed).pods(kubectl)
    assert serving.reason(s.running_checks(pods, changed, NODES)) == ""
    workers = [pod for pod in pods if s.component_of(pod) == s.WORKER]
    assert {pod["metadata"]["annotations"]["goodput.spark/model-revision"] for pod in workers} == {"b" * 40}
    assert kubelets.mixed == 0


def test_who_applies_by_hand_is_served_too(
    cluster: tuple[Kubectl, dynamo_operator.Kubelets], placer: k3s_objects.Placer
) -> None:
    """Without our drain the annotation makes the operator end the old workers first."""
    kubectl, kubelets = cluster
    objects = objects_of("super-recommended")
    placer.present(objects)
    s.wait_graph(kubectl, objects, READY_SECONDS, poll_seconds=1)
    kubelets.mixed = 0
    changed = other_workers(objects)
    placer.present(changed)
    s.wait_graph(kubectl, changed, READY_SECONDS, poll_seconds=1)
    checks = s.settled_checks(kubectl, changed, NODES, 60, poll_seconds=1)
    assert serving.reason(checks) == ""
    print(f"\nlooks that met old and new workers side by side: {kubelets.mixed}")
    pods = s.Graph.among(changed).pods(kubectl, s.WORKER)
    assert {pod["metadata"]["annotations"]["goodput.spark/model-revision"] for pod in pods} == {"b" * 40}


def test_a_node_without_a_rail_gets_no_worker(
    cluster: tuple[Kubectl, dynamo_operator.Kubelets], placer: k3s_objects.Placer
) -> None:
    kubectl, kubelets = cluster
    kubelets.resources = {NODES[0]: SPARK, NODES[1]: SPARK | {"rdma/rail1": None}}
    kubelets.heartbeat()
    objects = objects_of("super-recommended")
    try:
        placer.present(objects)
        with pytest.raises(K3sError, match=r"component worker 1 of 2 ready(.|\n)*Insufficient rdma/rail1"):
            s.wait_graph(kubectl, objects, 20, poll_seconds=1)
    finally:
        kubelets.resources = dict.fromkeys(NODES, SPARK)
        kubelets.heartbeat()
    s.wait_graph(kubectl, objects, READY_SECONDS, poll_seconds=1)


def test_what_the_webhook_refuses_ends_nobody(kubectl: Kubectl, placer: k3s_objects.Placer) -> None:
    objects = objects_of("super-recommended")
    placer.present(objects)
    s.wait_graph(kubectl, objects, READY_SECONDS, poll_seconds=1)
    planted = other_workers(objects)
    # The CRD's own schema takes this; the rule is the webhook's alone.
    s.Graph.among(planted).item["spec"]["components"][1]["topologyConstraint"] = {"packDomain": "rack"}  # type: ignore[index]
    with pytest.raises(K3sError, match="spec.topologyConstraint: Required value"):
        s.drain(kubectl, planted, placer, 5, poll_seconds=1)
    assert len(s.Graph.among(objects).pods(kubectl, s.WORKER)) == 2


def test_last_of_all_the_crds_go(kubectl: Kubectl, tmp_path: Path) -> None:
    objects = objects_of("super-recommended")
    placed = k3s_objects.Placer(kubectl, tmp_path / "serving.json")
    placed.present(objects)
    with pytest.raises(K3sError, match="found graphs goodput/goodput"):
        s.remove_crds(kubectl)
    placed.absent(cluster=True)
    gone = s.remove_crds(kubectl)
    assert set(s.CRDS) <= set(gone)
    left = [name for name in kubectl("get", "crd", "-o", "name").split() if name.endswith(".nvidia.com")]
    assert left == []
