"""A graph of the simulated engine with Dynamo's real operator, real Dynamo and real LMCache, which find each other
through Kubernetes as on a cluster: processes of this machine stand in for containers (``process_kubelet``)."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import dynamo_operator
import prepare
import process_kubelet
import pytest
from ansible_collections.goodput.spark.plugins.module_utils import chat_probe, k3s_objects, serving
from ansible_collections.goodput.spark.plugins.module_utils import kube_serving as s
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import kube_objects
from ansible_collections.goodput.spark.plugins.modules import serving_probe
from conftest import prepared
from kube_pods import DIGESTS, Object, expanded, release
from kube_server import Missing
from kv_plan.kv_helpers import plan
from standin import control_plane

NODES = ["spark1", "spark2"]
RESOURCES = {"cpu": "20", "memory": "16Gi", "pods": "110", "ephemeral-storage": "1Ti"}
READY_SECONDS = 180
VERSION = str(release("current")["kubernetes"]["charts"]["dynamo_platform"]["version"])


PLAN = plan("virtual", memory_gib=(1.5, 1.5))


def objects_of(**settings: Any) -> list[Object]:
    sites = [{"name": name, "rails": [], "management_address": ""} for name in NODES]
    made = plan("virtual", memory_gib=(1.5, 1.5), settings=settings)
    return kube_objects(made, sites, release("current"), {"digests": DIGESTS}, ["serving"])


@pytest.fixture(scope="module")
def machine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Kubectl, process_kubelet.ProcessKubelets]]:
    work = tmp_path_factory.mktemp("serves")
    try:
        dynamo_operator.folder()
        archive = prepared("runtime")
        model = prepare.CACHE / "virtual/model/tiny"
        with (
            process_kubelet.bridge(),
            control_plane(work, "--tls-san", process_kubelet.API_ADDRESS) as kubectl,
            dynamo_operator.operator(kubectl, work / "kubeconfig.yaml", work / "op", VERSION),
            process_kubelet.ProcessKubelets(
                kubectl, work / "kubeconfig.yaml", work / "kubelets", dict.fromkeys(NODES, RESOURCES), archive, model
            ) as kubelets,
        ):
            failed = request.session.testsfailed
            yield kubectl, kubelets
            if request.session.testsfailed > failed:
                kubelets.show()
    except Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def objects() -> list[Object]:
    return objects_of()


@pytest.fixture(scope="module")
def url(
    machine: tuple[Kubectl, process_kubelet.ProcessKubelets],
    objects: list[Object],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The frontend of a graph that is Ready."""
    kubectl, kubelets = machine
    placer = k3s_objects.Placer(kubectl, tmp_path_factory.mktemp("placed") / "serving.json")
    # As the role kube_serving does it on the node.
    for sandbox in kubelets.sandboxes.values():
        subprocess.run(sandbox.inside("mkdir", "-p", PLAN["l2_path"]), check=True)
    began = time.monotonic()
    try:
        placer.present(objects)
        s.wait_graph(kubectl, objects, READY_SECONDS, poll_seconds=1)
        print(f"\nReady after {time.monotonic() - began:.0f} s")
        yield f"http://{kubelets.address_of(s.FRONTEND)}:8000"
    finally:
        placer.absent(cluster=True)


def wanted(kubelets: process_kubelet.ProcessKubelets, url: str) -> dict[str, Any]:
    addresses = [sandbox.address for sandbox in kubelets.sandboxes.values()]
    return {
        "url": url,
        "model": PLAN["model_name"],
        "addresses": addresses,
        "block_size_tokens": PLAN["sizes"]["block_size_tokens"],
        "pods": True,
    }


def settled(kubelets: process_kubelet.ProcessKubelets, url: str) -> str:
    """What the role's verify finds at last."""
    for _second in range(60):
        found = serving.reason(serving_probe.frontend_rows(wanted(kubelets, url)))
        if not found:
            break
        time.sleep(1)
    return found


def test_what_runs_is_what_was_rendered(
    machine: tuple[Kubectl, process_kubelet.ProcessKubelets], objects: list[Object], url: str
) -> None:
    kubectl, kubelets = machine
    pods = s.Graph.among(objects).pods(kubectl)
    assert serving.reason(s.running_checks(pods, objects, NODES)) == ""
    assert settled(kubelets, url) == ""
    sidecar = s.containers(s.templates(objects)[s.WORKER])["lmcache"]
    for node, sandbox in kubelets.sandboxes.items():
        names = {"GOODPUT_NODE": node, "GOODPUT_ADDRESS": sandbox.address}
        words = [expanded(word, names) for word in sidecar["args"]]
        lmcache = [serving.get(f"http://{sandbox.address}:9500/{path}") for path in ("healthcheck", "config", "status")]
        assert serving.reason(serving.lmcache_checks(*lmcache, words)) == ""
        worker = serving.get(f"http://{sandbox.address}:9090/health")
        assert serving.reason(serving.worker_checks(worker)) == ""
        # start.py looked into L2 before LMCache started.
        command = sandbox.inside("cat", "/run/goodput-lmcache/l2.json")
        assert json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["capacity_gib"] == 2


def test_a_client_gets_an_answer_and_its_events_reach_the_router(
    machine: tuple[Kubectl, process_kubelet.ProcessKubelets], url: str
) -> None:
    rows, answer = serving_probe.completion_rows(wanted(machine[1], url))
    print(f"\n{answer}")
    assert serving.reason(rows) == ""
    assert answer["addresses"][0] in [sandbox.address for sandbox in machine[1].sandboxes.values()]


def test_a_prompt_returns_to_the_worker_that_has_it(
    machine: tuple[Kubectl, process_kubelet.ProcessKubelets], url: str
) -> None:
    words = chat_probe.words_for(PLAN["sizes"]["block_size_tokens"]) * 4
    prompts = [chat_probe.prompt(words) for _each in range(4)]
    for prompt in prompts:
        first, again = (chat_probe.ask(url, PLAN["model_name"], prompt) for _turn in range(2))
        assert first.workers and first.workers == again.workers


def test_a_worker_that_is_killed_comes_back(
    machine: tuple[Kubectl, process_kubelet.ProcessKubelets], objects: list[Object], url: str
) -> None:
    kubectl, kubelets = machine
    worker = next(one for one in kubelets.running.values() if one.component == s.WORKER)
    worker.processes["main"].kill()
    for _second in range(30):
        if worker.restarts["main"]:
            break
        time.sleep(1)
    assert worker.restarts["main"] == 1
    s.wait_graph(kubectl, objects, READY_SECONDS, poll_seconds=1)
    assert settled(kubelets, url) == ""


def test_an_update_under_requests(
    machine: tuple[Kubectl, process_kubelet.ProcessKubelets], objects: list[Object], url: str, tmp_path: Path
) -> None:
    """None that was taken in is lost; between the last old worker and the first new one clients are told 404 or 503."""
    kubectl, kubelets = machine
    changed = objects_of(**{"lmcache.l1.size_gib": 0.125})
    answers: list[tuple[float, chat_probe.Completion]] = []
    over = threading.Event()

    def client() -> None:
        while not over.is_set():
            began = time.monotonic()
            answers.append((began, chat_probe.ask(url, PLAN["model_name"], chat_probe.prompt(64), max_tokens=64)))
            time.sleep(0.1)

    placer = k3s_objects.Placer(kubectl, tmp_path / "serving.json")
    placer.remember(k3s_objects.document(objects))
    with ThreadPoolExecutor(3) as pool:
        clients = [pool.submit(client) for _each in range(3)]
        try:
            assert s.drain(kubectl, changed, placer, READY_SECONDS, poll_seconds=1)
            drained = time.monotonic()
            placer.present(changed)
            s.wait_graph(kubectl, changed, READY_SECONDS, poll_seconds=1)
            assert settled(kubelets, url) == ""
            ready = time.monotonic()
            time.sleep(5)
        finally:
            over.set()
    for each in clients:
        each.result()
    assert serving.reason(s.settled_checks(kubectl, changed, NODES, 60, poll_seconds=1)) == ""
    whole = [began for began, one in answers if one.state == "ok"]
    away = [one for _began, one in answers if one.state != "ok" and one.status in (404, 503)]
    lost = [
        f"{one.status} {one.reason}" for _began, one in answers if one.state != "ok" and one.status not in (404, 503)
    ]
    said = sorted({one.status for one in away})
    print(f"\n{len(whole)} answered, {len(away)} turned away ({said}), {len(lost)} lost")
    assert lost == [] and min(whole) < drained and max(whole) > ready
