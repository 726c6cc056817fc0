"""What kube_serving and runtime_image do, before a real API server with its controllers and a real containerd."""

from __future__ import annotations

import copy
import json
import lzma
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import oci
import pytest
import yaml
from ansible_collections.goodput.spark.plugins.module_utils import (
    k3s_objects,
    kube_charts,
    kube_status,
    runtime_image,
    serving,
)
from ansible_collections.goodput.spark.plugins.module_utils import kube_serving as s
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import kube_objects
from kube_pods import DIGESTS, Object, release, site
from kube_server import Missing, data
from standin import containerd, control_plane
from test_kube_api import rendered

NODES = ["spark1", "spark2"]
NAME = "goodput.local/x"


def apply(kubectl: Kubectl, folder: Path, item: Object) -> None:
    path = folder / "item.json"
    path.write_text(json.dumps(item))
    kubectl("apply", "--server-side", "-f", str(path))


def status(kubectl: Kubectl, kind: str, name: str, namespace: str, **values: Any) -> None:
    patch = json.dumps({"status": values})
    kubectl("patch", kind, name, "-n", namespace, "--subresource=status", "--type=merge", "-p", patch)


@pytest.fixture(scope="module")
def kubectl(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kubectl]:
    try:
        crds = sorted((data() / "crds/dynamo-1.5.0").glob("*.yaml.xz"))
        folder = tmp_path_factory.mktemp("control-plane")
        with control_plane(folder) as found:
            for path in crds:
                for document in yaml.safe_load_all(lzma.decompress(path.read_bytes())):
                    document["spec"].pop("conversion", None)
                    document["spec"]["versions"] = [one for one in document["spec"]["versions"] if one["storage"]]
                    apply(found, folder, document)
            found("wait", "--for=condition=Established", "crd", *s.CRDS)
            yield found
    except Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture
def placer(kubectl: Kubectl, tmp_path: Path) -> Iterator[k3s_objects.Placer]:
    found = k3s_objects.Placer(kubectl, tmp_path / "serving.json")
    yield found
    kubectl("delete", "pods", "--all", "-n", "goodput", "--force", "--grace-period=0")
    found.absent(cluster=True)


@pytest.fixture
def objects() -> list[Object]:
    parts = ("Namespace", "ConfigMap", "Deployment", "Service", "DynamoGraphDeployment")
    found = [item for item in rendered("weka-c-p2p", "current", 2) if item["kind"] in parts]
    platform = (kube_charts.SYSTEM, s.PLATFORM_NAMESPACE)
    return [item for item in found if item["metadata"].get("namespace", item["metadata"]["name"]) not in platform]


def place_pod(kubectl: Kubectl, folder: Path, objects: list[Object], component: str, node: str) -> str:
    """A pod as the operator would make it, on a node that does not exist; what the kubelet would refuse is left out."""
    spec = copy.deepcopy(dict(s.templates(objects)[component])) | {"nodeName": node}
    for container in [*spec.get("initContainers", []), *spec["containers"]]:
        container["env"] = [*container.get("env", []), {"name": "DYN_NAMESPACE", "value": "goodput-goodput"}]
    spec.pop("runtimeClassName", None)
    spec.pop("nodeSelector", None)
    labels = {"app.kubernetes.io/part-of": "goodput", s.COMPONENT: component}
    about = {"name": f"{component}-{node}", "namespace": "goodput", "labels": labels}
    apply(kubectl, folder, {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec})
    return str(about["name"])


def everything_up(kubectl: Kubectl, folder: Path, objects: list[Object]) -> None:
    """Pods, and the graph as the operator would leave it. The Deployment's own pod, which no node takes, counts not."""
    for component, node in (
        ("worker", "spark1"),
        ("worker", "spark2"),
        ("frontend", "spark1"),
        (s.COORDINATOR, "spark2"),
    ):
        name = place_pod(kubectl, folder, objects, component, node)
        status(kubectl, "pod", name, "goodput", conditions=[{"type": "Ready", "status": "True"}])
    graph = s.Graph.among(objects)
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "x",
        "message": "x",
        "lastTransitionTime": "2026-01-01T00:00:00Z",
    }
    seen = graph.live(kubectl)["metadata"]["generation"]
    status(
        kubectl, s.GRAPHS, graph.name, graph.namespace, state="successful", observedGeneration=seen, conditions=[ready]
    )


def install_chart(kubectl: Kubectl) -> None:
    """What K3s's Helm controller leaves: a job that is done."""
    name = f"helm-install-{s.CHART}"
    kubectl("delete", "job", name, "-n", kube_charts.SYSTEM, "--ignore-not-found")
    kubectl("create", "job", name, "-n", kube_charts.SYSTEM, "--image=x")
    status(kubectl, "job", name, kube_charts.SYSTEM, succeeded=1)


def test_the_operator_is_waited_for_and_explained(kubectl: Kubectl, tmp_path: Path) -> None:
    chart = kube_objects({}, site(2), release("current"), {"digests": DIGESTS}, ["platform"])
    placed = k3s_objects.Placer(kubectl, tmp_path / "platform.json")
    placed.present(chart)
    with pytest.raises(K3sError, match="chart dynamo-platform without a job after 0 s"):
        s.wait_platform(kubectl, 0)
    install_chart(kubectl)
    with pytest.raises(K3sError, match="no Deployment in dynamo-system after 0 s"):
        s.wait_platform(kubectl, 0)
    kubectl("create", "deployment", "operator", "-n", s.PLATFORM_NAMESPACE, "--image=x")
    with pytest.raises(K3sError, match="Deployment operator not Available") as refusal:
        s.wait_platform(kubectl, 3, poll_seconds=1)
    assert "last event: FailedScheduling" in str(refusal.value)
    assert placed.absent(cluster=True) == [
        "deleted HelmChart kube-system dynamo-platform",
        "deleted Namespace dynamo-system",
    ]


def revision(kubectl: Kubectl, folder: Path, number: int, state: str) -> None:
    """What Helm keeps of an attempt."""
    labels = {"owner": "helm", "name": s.CHART, "version": str(number), "status": state}
    about = {"name": f"sh.helm.release.v1.{s.CHART}.v{number}", "namespace": s.PLATFORM_NAMESPACE, "labels": labels}
    secret = {"apiVersion": "v1", "kind": "Secret", "type": "helm.sh/release.v1", "metadata": about}
    apply(kubectl, folder, secret | {"stringData": {"release": "x"}})


def test_a_chart_that_failed_is_begun_again_by_the_next_run(kubectl: Kubectl, tmp_path: Path) -> None:
    chart = kube_objects({}, site(2), release("current"), {"digests": DIGESTS}, ["platform"])
    placed = k3s_objects.Placer(kubectl, tmp_path / "platform.json")
    placed.present(chart)
    uid = kubectl("get", "helmchart", s.CHART, "-n", kube_charts.SYSTEM, "-o", "jsonpath={.metadata.uid}")
    install_chart(kubectl)
    revision(kubectl, tmp_path, 1, "deployed")
    assert placed.present(chart) == []
    # The controller's job ends well, or tries for ever, and the operator of before is as it was.
    revision(kubectl, tmp_path, 2, "failed")
    started = time.monotonic()
    with pytest.raises(K3sError, match="chart dynamo-platform failed: .*run again"):
        s.wait_platform(kubectl, 600)
    assert time.monotonic() - started < 60
    assert placed.present(chart) == ["began again: chart dynamo-platform failed: Helm's release failed"]
    left = s.items(kubectl, "secret", "-n", s.PLATFORM_NAMESPACE, "-l", "owner=helm")
    assert [one["metadata"]["labels"]["version"] for one in left] == ["1"]
    # Now the controller makes another. Nothing was uninstalled: the chart is the one of before.
    assert not s.items(kubectl, "job", f"helm-install-{s.CHART}", "-n", kube_charts.SYSTEM)
    assert kubectl("get", "helmchart", s.CHART, "-n", kube_charts.SYSTEM, "-o", "jsonpath={.metadata.uid}") == uid
    assert placed.present(chart) == []
    placed.absent(cluster=True)


def test_a_graph_is_placed_updated_and_removed(
    kubectl: Kubectl, placer: k3s_objects.Placer, objects: list[Object], tmp_path: Path
) -> None:
    graph = s.Graph.among(objects)
    assert not s.drain(kubectl, objects, placer, 0)
    assert placer.present(objects) and not placer.present(objects)
    with pytest.raises(K3sError, match="component worker 0 of 2 ready; component lmcache-coordinator 0 of 1 ready"):
        s.wait_graph(kubectl, objects, 0)
    everything_up(kubectl, tmp_path, objects)
    s.wait_graph(kubectl, objects, 0)
    there = [pod for pod in graph.pods(kubectl) if pod["spec"].get("nodeName")]
    assert serving.reason(s.running_checks(there, objects, NODES)) == ""

    planted = copy.deepcopy(objects)
    dict(s.Graph.among(planted).components["worker"])["podTemplate"]["spec"]["containers"][0]["planted"] = 1
    with pytest.raises(K3sError, match="planted"):
        s.drain(kubectl, planted, placer, 0)
    assert len(graph.pods(kubectl, s.WORKER)) == 2, "a graph that is refused ends nobody"

    other = copy.deepcopy(objects)
    dict(s.Graph.among(other).components["worker"])["podTemplate"]["spec"]["containers"][0]["args"][-1] = "other"
    assert "instead of" in serving.reason(s.running_checks(there, other, NODES))
    with pytest.raises(K3sError, match="found workers worker-spark1 on spark1, worker-spark2 on spark2"):
        s.drain(kubectl, other, placer, 0)
    workers = [one for one in graph.live(kubectl)["spec"]["components"] if one["name"] == s.WORKER]
    assert workers[0]["replicas"] == 0
    kubectl("delete", "pods", "-n", "goodput", "-l", f"{s.COMPONENT}=worker", "--force", "--grace-period=0")
    assert not s.drain(kubectl, other, placer, 0)
    assert placer.present(other)
    workers = [one for one in graph.live(kubectl)["spec"]["components"] if one["name"] == s.WORKER]
    assert workers[0]["replicas"] == 2


class Killed(BaseException):
    """Nothing of the run happens after it, as after SIGKILL."""


def update(kubectl: Kubectl, placer: k3s_objects.Placer, wanted: list[Object], calls: int) -> None:
    """Drain and placement, killed after so many calls of kubectl; where workers are to end, they do."""
    left = calls

    def run(argv: Sequence[str], **more: Any) -> tuple[int, str, str]:
        nonlocal left
        answer = kubectl.run(argv, **more)
        if "patch" in argv:
            kubectl("delete", "pods", "-n", "goodput", "-l", f"{s.COMPONENT}=worker", "--force", "--grace-period=0")
        left -= 1
        if not left:
            raise Killed
        return answer

    dying = Kubectl(run=run, program=kubectl.program)
    mortal = k3s_objects.Placer(dying, placer.path)
    s.drain(dying, wanted, mortal, 60)
    mortal.present(wanted)


def test_an_update_killed_after_any_call_is_finished_by_the_next(
    kubectl: Kubectl, placer: k3s_objects.Placer, objects: list[Object], tmp_path: Path
) -> None:
    killed = 0
    for calls in range(1, 20):
        placer.present(objects)
        for node in NODES:
            place_pod(kubectl, tmp_path, objects, s.WORKER, node)
        other = copy.deepcopy(objects)
        # Other workers, and an object less.
        dict(s.Graph.among(other).components[s.WORKER])["podTemplate"]["spec"]["containers"][0]["args"][-1] = "other"
        dropped = next(item for item in other if item["kind"] == "Service")
        other.remove(dropped)
        try:
            update(kubectl, placer, other, calls)
        except Killed:
            killed += 1
            update(kubectl, placer, other, 0)
        graph = s.Graph.among(other)
        live = s.Graph(graph.live(kubectl)).components[s.WORKER]
        assert live["replicas"] == 2 and live["podTemplate"]["spec"]["containers"][0]["args"][-1] == "other", calls
        assert graph.pods(kubectl, s.WORKER) == [], f"after {calls} calls an old worker is left beside the new ones"
        assert not s.items(kubectl, "service", dropped["metadata"]["name"], "-n", "goodput"), calls
        assert json.loads(placer.former())["items"] == other and not placer.present(other), calls
        if killed < calls:
            break
    print(f"killed after each of {killed} calls of kubectl")
    assert killed >= 8


def test_a_placement_that_was_killed_is_taken_back(
    kubectl: Kubectl, placer: k3s_objects.Placer, objects: list[Object]
) -> None:
    # Which of them the API took is not known: here all.
    with pytest.raises(Killed):
        update(kubectl, placer, objects, 3)
    assert s.Graph.among(objects).live(kubectl)
    assert placer.absent(cluster=True)
    assert not s.Graph.among(objects).live(kubectl) and not s.items(kubectl, "namespace", "goodput")


def test_what_no_waiting_heals_is_not_waited_for(
    kubectl: Kubectl, placer: k3s_objects.Placer, objects: list[Object], tmp_path: Path
) -> None:
    placer.present(objects)
    everything_up(kubectl, tmp_path, objects)
    waiting = {"name": "main", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    waiting["state"] = {"waiting": {"reason": "ErrImageNeverPull", "message": "x"}}
    not_ready = [{"type": "Ready", "status": "False"}]
    status(kubectl, "pod", "worker-spark2", "goodput", conditions=not_ready, containerStatuses=[waiting])
    started = time.monotonic()
    with pytest.raises(K3sError, match="no use to wait: worker-spark2 main: ErrImageNeverPull"):
        s.wait_graph(kubectl, objects, 600)
    assert time.monotonic() - started < 60
    listed = kube_status.parse(kubectl.json("get", "nodes,pods", "--all-namespaces", "-o", "json"), {})
    assert any("worker-spark2 on spark2" in problem for problem in listed.problems)


def test_crds_go_last(kubectl: Kubectl, placer: k3s_objects.Placer, objects: list[Object]) -> None:
    placer.present(objects)
    with pytest.raises(K3sError, match="found graphs goodput/goodput; required: none"):
        s.remove_crds(kubectl)
    placer.absent(cluster=True)
    assert set(s.CRDS) <= set(s.remove_crds(kubectl))
    assert s.remove_crds(kubectl) == [] and s.Graph.among(objects).live(kubectl) == {}


@pytest.mark.parametrize(
    ("tag", "nested", "saved"),
    [
        ("", False, False),
        ("1.5.1", False, False),
        (f"{NAME}:9", False, False),
        ("", True, False),
        (f"{NAME}:9", True, True),
    ],
    ids=["plain", "tag", "name", "index", "docker save"],
)
def test_an_archive_becomes_the_reference_that_pods_name(tag: str, nested: bool, saved: bool) -> None:
    # A socket's path has at most 107 characters.
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            with containerd(folder) as ctr:
                node = runtime_image.Containerd(program=ctr)
                machines = ["amd64", "arm64"] if nested and not saved else ["amd64"]
                digests = oci.write(folder / "image.tar", *machines, tag=tag, nested=nested, saved=saved)
                archive = runtime_image.read_archive(str(folder / "image.tar"))
                assert runtime_image.archive_problem(archive, digests[0], "linux/amd64") == ""
                assert not runtime_image.present(node.images(), NAME, digests[0])
                # What is refused before 23 GB are copied could not be brought either.
                for inner in digests[1:]:
                    assert f"name {digests[0]}" in runtime_image.archive_problem(archive, inner, "linux/amd64")
                    with pytest.raises(runtime_image.ImageError, match=f"no image {inner} after the import"):
                        node.bring(str(folder / "image.tar"), NAME, inner)
                node.bring(str(folder / "image.tar"), NAME, digests[0])
                rows = runtime_image.image_checks("spark1", node.images(), NAME, digests[0], "linux/amd64")
                assert serving.reason(rows) == ""
                node.remove(NAME, keep=digests[0])
                assert runtime_image.present(node.images(), NAME, digests[0])
                node.remove(NAME)
                assert node.images() == []
        except Missing as reason:
            pytest.skip(str(reason))
