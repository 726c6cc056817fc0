"""Kubernetes: nodes, what they offer to pods, and what serves there against what was placed. Only on that platform."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import chat_probe, k3s_cluster, kube_serving, serving
from ansible_collections.goodput.spark.plugins.module_utils.k3s_node import BINARY, FILES_BY_K3S, KUBECTL_CACHE
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import charts

from goodput.verdict import CheckFailed

# Where the roles keep what they placed, on the node that runs the server.
RECORDS = "/etc/goodput/kubernetes"
UNITS = ("k3s", "k3s-agent")
AGAIN = "run `ansible-playbook site.yml --tags kube_serving`"

pytestmark = pytest.mark.remedy("read `journalctl -u k3s` on the server")
Objects = list[dict[str, Any]]


def judge(check: Any, rows: Iterable[serving.Check]) -> None:
    """Every row goes into the verdict, also those after one that is not ok."""
    failed = None
    for row in rows:
        try:
            check(row["found"], row["required"], row["remedy"], ok=row["ok"], what=row["check"])
        except CheckFailed as error:
            failed = error
    if failed:
        raise failed


def kubectl(server: Any) -> k3s_cluster.Kubectl:
    """kubectl as root on the server. What it is asked twice it answers once."""

    def run(argv: list[str], timeout_seconds: float) -> tuple[int, str, str]:
        answer = server.batch({"kubectl": shlex.join(argv)}, timeout_s=timeout_seconds)["kubectl"]
        return answer.rc, answer.stdout, answer.stderr

    return k3s_cluster.Kubectl(run, ("env", f"KUBECACHEDIR={KUBECTL_CACHE}", BINARY, "kubectl"))


@pytest.fixture(scope="module")
def server(nodes: list[Any]) -> Any:
    """The node with the administrator's kubeconfig; skips where --limit leaves it out."""
    for node in nodes:
        if node.batch({"server": f"test -r {FILES_BY_K3S[0]}"})["server"].ok:
            return node
    pytest.skip("the K3s server is on no node of this run")


def placed(server: Any, name: str) -> dict[str, Any]:
    """What a role placed the last time."""
    answer = server.batch({name: f"cat {RECORDS}/{name}.json"})[name]
    found: dict[str, Any] = json.loads(answer.stdout or "{}")
    return found


def record_check(document: dict[str, Any], what: str, playbook: str) -> serving.Check:
    found = "a run that was broken off" if document.get("unfinished") else "placed" if document else "nothing placed"
    return serving.row(what, found, "placed", f"run `ansible-playbook playbooks/{playbook}.yml`")


@pytest.fixture(scope="module")
def objects(server: Any) -> Objects:
    """The objects that serve, as they were placed."""
    found: Objects = placed(server, "serving").get("items", [])
    if not found:
        pytest.skip("nothing that serves was placed, which is a failure of its own")
    return found


def test_k3s_runs(host: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "K3s runs and starts at boot"
    answers = sh({unit: f"systemctl show {unit} -p ActiveState,UnitFileState" for unit in UNITS})
    states = {unit: dict(line.partition("=")[::2] for line in answers[unit].stdout.splitlines()) for unit in UNITS}
    unit = next((name for name in UNITS if states[name].get("UnitFileState") == "enabled"), "")
    found = f"{unit} {states[unit].get('ActiveState')}" if unit else "neither k3s nor k3s-agent starts at boot"
    check(found, f"{unit or 'one of them'} active", "run `ansible-playbook playbooks/k3s.yml`", unit=unit or None)


def test_node_is_healthy(host: Any, server: Any, check: Any) -> None:
    "The node is Ready and takes pods"
    judge(check, k3s_cluster.health_checks(host.name, kubectl(server).nodes().get(host.name)))


def test_node_offers_its_devices(host: Any, server: Any, check: Any) -> None:
    "The node offers the devices for which plugins were placed, and those that the worker asks for"
    plugins, items = placed(server, "device-plugins"), placed(server, "serving").get("items", [])
    asked = kube_serving.devices(items) if items else []
    if not plugins and not asked:
        pytest.skip("no device plugin was placed, and nothing that was placed asks for a device")
    wanted = dict.fromkeys(asked, ">0") | charts.offered(plugins.get("items", []))
    rows = k3s_cluster.resource_checks(kubectl(server).nodes(), {host.name: wanted})
    judge(check, [record_check(plugins, "device plugins", "device_plugins"), *rows])


def test_serving_was_placed(server: Any, check: Any) -> None:
    "What serves was placed, as a whole"
    judge(check, [record_check(placed(server, "serving"), "graph", "kube_serving")])


def test_operator_runs(server: Any, objects: Objects, check: Any) -> None:
    "Dynamo's operator is installed and available"
    found = "available"
    try:
        kube_serving.wait_platform(kubectl(server), 0)
    except K3sError as error:
        found = str(error)
    check(found, "available", f"`k3s kubectl get pods -n {kube_serving.PLATFORM_NAMESPACE}`; {AGAIN}")


def test_graph_is_ready(server: Any, objects: Objects, check: Any) -> None:
    "The graph is Ready, with as many pods as were placed"
    ask, graph = kubectl(server), kube_serving.Graph.among(objects)
    pods = graph.pods(ask)
    found = [kube_serving.graph_problem(graph.live(ask), pods, kube_serving.replicas_of(objects))]
    # Each pod's own reasons say more than the count.
    found += [
        f"{kube_serving.name_of(pod)} on {pod['spec'].get('nodeName', 'no node')}: {', '.join(why)}"
        for pod in pods
        if not kube_serving.is_ready(pod) and (why := kube_serving.reasons(pod))
    ]
    remedy = f"`k3s kubectl describe pod -n {graph.namespace}` and the logs of the pod that is not ready"
    check("; ".join(found) if found[0] else "Ready", "Ready", remedy)


def test_what_runs_is_what_was_placed(server: Any, objects: Objects, check: Any) -> None:
    "One worker on each planned node, and every container with the arguments, variables and image that were placed"
    pods = kube_serving.Graph.among(objects).pods(kubectl(server))
    judge(check, kube_serving.running_checks(pods, objects, kube_serving.planned_nodes(objects)))


def get(node: Any, url: str) -> serving.Answer:
    """One GET of a node's, past any proxy."""
    command = f"curl -sS -m 60 --noproxy '*' -w '\\n%{{http_code}}' {shlex.quote(url)}"
    said = node.batch({"get": command}, fresh=True)["get"]
    text, _, status = said.stdout.rpartition("\n")
    return serving.Answer(int(status or 0), text) if said.ok else serving.Answer(0, said.stderr.strip())


def metrics(node: Any, url: str) -> serving.Answer:
    """What the frontend counted; no series where it does not say."""
    answer = get(node, f"{url}/metrics")
    return answer if answer.status == 200 else serving.Answer(answer.status, "")


def completion(node: Any, url: str, model: str, prompt: str) -> chat_probe.Completion:
    """One streamed completion, asked on a node and judged here."""
    body = json.dumps(chat_probe.body(model, prompt, 16))
    command = ["curl", "-sS", "-N", "-m", "180", "--noproxy", "*", "-H", "Content-Type: application/json"]
    command += ["-w", "\n%{http_code}", "-d", body, f"{url}/v1/chat/completions"]
    said = node.batch({"ask": shlex.join(command)}, fresh=True, timeout_s=240)["ask"]
    text, _, status = said.stdout.rpartition("\n")
    found = chat_probe.Completion(status=int(status or 0), reason=said.stderr.strip())
    chat_probe.read_stream(text.encode().splitlines(), found, lambda: 0.0)
    if found.status != 200:
        found.reason = found.reason or f"HTTP {found.status}: {text[:300]}"
    chat_probe.verdict(found)
    return found


def endpoint(server: Any, objects: Objects, name: str) -> str:
    """The endpoint on one node; skips where there is none outside the cluster."""
    port = kube_serving.endpoint_port(objects)
    if not port:
        pytest.skip("the endpoint is reached only inside the cluster (node_port: 0)")
    node = kubectl(server).nodes().get(name)
    if node is None:
        pytest.skip("this node is not in the cluster, which is a failure of its own")
    return f"http://{k3s_cluster.address(node)}:{port}"


def test_endpoint_answers(host: Any, server: Any, objects: Objects, check: Any) -> None:
    "The endpoint answers on this node"
    url = endpoint(server, objects, host.name)
    answer = get(host, f"{url}/live")
    remedy = f"`k3s kubectl get service,pods -n {kube_serving.Graph.among(objects).namespace}`; {AGAIN}"
    check(answer.words() if answer.status != 200 else "HTTP 200", "HTTP 200", remedy, what=url)


def test_completion_goes_through_the_router(server: Any, objects: Objects, check: Any) -> None:
    "A completion is streamed through the router, which knows every worker and gets its KV events"
    url, nodes = endpoint(server, objects, server.name), kubectl(server).nodes()
    log = "`k3s kubectl logs` of the frontend's pod, and of the workers'"
    live = get(server, f"{url}/live")
    check(live.words() if live.status != 200 else "HTTP 200", "HTTP 200", log, what="frontend answers")
    pods = kube_serving.templates(objects)
    worker, frontend = (kube_serving.containers(pods[name])["main"]["args"] for name in ("worker", "frontend"))
    model = serving.argument(worker, "--served-model-name") or serving.argument(worker, "--model-name") or ""
    series = "dynamo_frontend_model_kv_cache_block_size"
    before = metrics(server, url)
    if not serving.values(serving.samples(before.text), series, model=model):
        # It is there from the first request on.
        completion(server, url, model, "Say hello.")
        before = metrics(server, url)
    routed = max(serving.values(serving.samples(before.text), series, model=model), default=0.0)
    # A hybrid model's block is vLLM's to choose, and in no argument.
    block = int(serving.argument(worker, "--block-size") or routed)
    answer = completion(server, url, model, chat_probe.prompt(chat_probe.words_for(max(block, 16), 1.5)))
    rows = [serving.row("streamed completion", answer.reason or answer.state, "ok", log, answer.state == "ok")]
    after = metrics(server, url)
    if serving.argument(frontend, "--router-mode") == "kv":
        # Events travel beside the answer.
        for _try in range(10):
            events = serving.event_checks(before, after)
            if events[0]["ok"]:
                break
            time.sleep(1)
            after = metrics(server, url)
        rows += events
    addresses = [k3s_cluster.address(nodes[name]) for name in kube_serving.planned_nodes(objects) if name in nodes]
    rows += serving.frontend_checks(
        get(server, f"{url}/health"),
        get(server, f"{url}/v1/models"),
        after,
        model=model,
        addresses=addresses,
        allowed=addresses,
        block_size_tokens=block,
        pods=True,
    )
    judge(check, rows)
