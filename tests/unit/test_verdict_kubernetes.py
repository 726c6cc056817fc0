"""The layer kubernetes of the verdict: the real file of the suite, with a kubectl that answers from files, and with a
frontend that answers what a real one said.
"""

from __future__ import annotations

import copy
import json
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import kube_serving
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import charts, kube_objects
from kube_pods import DIGESTS, Object, release, site
from plays import run_playbook
from test_kube_serving import platform
from test_kube_status import MEMORY, node, pod
from test_verdict_run import LOCAL, ROOT, write_inventory, write_suite

from goodput import arm
from goodput.verdict import Verdict, run

DATA = Path(__file__).parent / "data"
PLAYBOOK = "run `ansible-playbook playbooks/"


@pytest.fixture(scope="module")
def plan() -> dict[str, Any]:
    _chosen, found = arm.site_plans({"goodput_profile": "super-recommended"}, MEMORY)
    return next(plan for plan in found if plan["name"] == "super-recommended")


@dataclass
class Frontend:
    """What Dynamo 1.6.1 answered, with the model's name, the nodes' addresses and counters that grow with requests."""

    port: int
    model: str
    events: bool = True
    asked: int = 0

    def answer(self, path: str) -> str:
        if path == "/v1/models":
            return json.dumps({"data": [{"id": self.model}]})
        if path == "/health":
            return (DATA / "serving/health.json").read_text().replace("10.77.0.", "127.0.0.")
        if path == "/metrics":
            text = (DATA / "serving/frontend_metrics.txt").read_text().replace('"tiny"', f'"{self.model}"')
            lines = []
            for line in text.splitlines():
                counts = "ingress_batches_total{" in line or 'event_type="stored",status="ok"' in line
                name, _, value = line.rpartition(" ")
                lines.append(f"{name} {float(value) + self.asked * self.events}" if counts else line)
            return "\n".join(lines) + "\n"
        return "live"

    def serve(self) -> ThreadingHTTPServer:
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.say(outer.answer(self.path))

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"]))
                outer.asked += 1
                self.say((DATA / "ops/chat_stream.txt").read_text().rpartition("\n")[0])

            def say(self, text: str) -> None:
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_arguments: object) -> None:
                pass

        server = ThreadingHTTPServer(("0.0.0.0", self.port), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return server


def free_port() -> int:
    """One that a Service may have."""
    for port in range(30000, 32768):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)):
                return port
    raise AssertionError("every port is taken")


@dataclass
class Site:
    """A pair on K3s as its server sees it: what was placed, and what the API answers to ``get KIND``."""

    folder: Path
    placed: dict[str, Object]
    api: dict[str, list[Object]]
    frontend: Frontend
    units: dict[str, str] = field(default_factory=lambda: {"k3s": "active", "k3s-agent": ""})
    api_answers: bool = True

    def verdict(self, variables: str = "goodput_platform: k3s", layers: tuple[str, ...] = ("kubernetes",)) -> Verdict:
        records, answers, tools = (self.folder / name for name in ("records", "api", "bin"))
        for folder in (records, answers, tools):
            folder.mkdir()
        for name, document in self.placed.items():
            (records / f"{name}.json").write_text(json.dumps(document))
        for kind, items in self.api.items():
            (answers / f"{kind}.json").write_text(json.dumps({"kind": "List", "items": items}))
        states = {
            unit: f"ActiveState={state or 'inactive'} UnitFileState={'enabled' if state else ''}"
            for unit, state in self.units.items()
        }
        programs = {
            "k3s": f'cat {answers}/"$3".json 2>/dev/null' if self.api_answers else "echo refused >&2; exit 1",
            "journalctl": "echo from the journal",
            "systemctl": "\n".join(f'[ "$2" = {unit} ] && printf "%s\\n" {text}' for unit, text in states.items()),
        }
        for name, text in programs.items():
            (tools / name).write_text(f"#!/bin/sh\n{text}\nexit 0\n")
            (tools / name).chmod(0o755)
        suite = write_suite(self.folder)
        text = (ROOT / "tests/acceptance/test_80_kubernetes.py").read_text()
        places = f'RECORDS, BINARY, FILES_BY_K3S = "{records}", "{tools}/k3s", ["{tools}/k3s"]'
        assert 'RECORDS = "/etc/goodput/kubernetes"' in text
        (suite / "test_80_kubernetes.py").write_text(text.replace('RECORDS = "/etc/goodput/kubernetes"', places))
        inventory = write_inventory(self.folder, **{f"spark{n}": f"{LOCAL}, {variables}" for n in (1, 2)})
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PATH", f"{tools}:{Path(sys.executable).parent}:/usr/bin:/bin")
            return run(inventory, layers, suite=suite)


@pytest.fixture
def pair(tmp_path: Path, plan: dict[str, Any]) -> Iterator[Site]:
    port = free_port()
    choices = {"digests": DIGESTS, "node_port": port}
    placed: dict[str, Object] = {
        name: {"kind": "List", "items": kube_objects(plan, site(2), release("current"), choices, [part])}
        for name, part in (("serving", "serving"), ("device-plugins", "device_plugins"))
    }
    specs = kube_serving.templates(placed["serving"]["items"])
    nodes = [node(number) for number in (1, 2)]
    for number, item in enumerate(nodes, 1):
        item["status"]["addresses"] = [{"type": "InternalIP", "address": f"127.0.0.{number}"}]
    graph = copy.deepcopy(kube_serving.Graph.among(placed["serving"]["items"]).item)
    graph = {**graph, "status": {"conditions": [{"type": "Ready", "status": "True"}]}}
    api = platform().kinds | {
        "nodes": nodes,
        "pods": [
            pod("frontend", 1, dict(specs["frontend"])),
            *(pod("worker", n, dict(specs["worker"])) for n in (1, 2)),
        ],
        kube_serving.GRAPHS: [graph],
    }
    yield Site(tmp_path, placed, api, Frontend(port, plan["model_name"]))


@contextmanager
def serving(pair: Site) -> Iterator[None]:
    """With the frontend's stand-in answering."""
    server = pair.frontend.serve()
    try:
        yield
    finally:
        server.shutdown()
        server.server_close()


def failures(verdict: Verdict) -> dict[tuple[str, str], str]:
    """What was found, by node and check."""
    return {(each["node"], each["check"]): each["found"] for each in verdict.to_dict()["failures"]}


def test_a_pair_that_serves_as_placed_is_ok(pair: Site) -> None:
    with serving(pair):
        verdict = pair.verdict()
    assert verdict.exit_code == 0, failures(verdict)
    data = verdict.to_dict()
    assert not data["skipped"]
    rows = {name: {row["check"] for row in layers["kubernetes"]} for name, layers in data["nodes"].items()}
    assert set(rows) == {"spark1", "spark2", "site"}
    title = "The node offers the devices for which plugins were placed, and those that the worker asks for"
    for name in ("spark1", "spark2"):
        assert {f"{title}: {name} {device}" for device in ("nvidia.com/gpu", "rdma/rail0", "rdma/rail1")} < rows[name]
    assert any(row.endswith("spark2 worker lmcache") for row in rows["site"])
    # One for the first look, if the router had counted nothing yet, and one that is judged.
    assert pair.frontend.asked == 1


def test_what_is_wrong_is_named_where_it_is(pair: Site) -> None:
    pair.units["k3s"] = "failed"
    pair.api["nodes"][0]["status"]["conditions"][0]["status"] = "Unknown"
    pair.api["nodes"][1]["spec"]["unschedulable"] = True
    pair.api["nodes"][1]["status"]["allocatable"]["rdma/rail1"] = "0"
    pair.api["deployment"][0]["status"]["conditions"][0]["status"] = "False"
    arguments = pair.api["pods"][2]["spec"]["containers"][0]["args"]
    arguments[arguments.index("--max-num-seqs") + 1] = "7"
    pair.frontend.events = False
    with serving(pair):
        found = failures(pair.verdict())
    short = {(name, check.rpartition(": ")[2]): text for (name, check), text in found.items()}
    events = short.pop(("site", "KV events of the completion"))
    operator = short.pop(("site", "Dynamo's operator is installed and available"))
    drift = short.pop(("site", "spark2 worker main"))
    assert short == {
        ("spark1", "K3s runs and starts at boot"): "k3s failed",
        ("spark2", "K3s runs and starts at boot"): "k3s failed",
        ("spark1", "spark1 Ready"): "Unknown",
        ("spark2", "spark2 takes pods"): "cordoned",
        ("spark2", "spark2 rdma/rail1"): "0",
    }
    assert operator.startswith("found Deployment dynamo-operator not Available")
    assert events.startswith("0 batches from workers") and "'7' instead of" in drift


def test_a_graph_that_is_not_ready_and_an_endpoint_that_is_silent(pair: Site) -> None:
    """The verdict was green with both."""
    status = pair.api["pods"][2]["status"]
    status["conditions"][0]["status"] = "False"
    status["containerStatuses"][0] |= {"ready": False, "state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    verdict = pair.verdict()
    assert verdict.exit_code == 1
    found = failures(verdict)
    (graph,) = [text for (name, check), text in found.items() if check.startswith("The graph is Ready")]
    assert "component worker 1 of 2 ready" in graph and "goodput-worker-2 on spark2" in graph
    assert "CrashLoopBackOff" in graph
    silent = {name for name, check in found if check.startswith("The endpoint answers")}
    assert silent == {"spark1", "spark2"}
    assert any(check.endswith("frontend answers") for _name, check in found)


def nothing(pair: Site) -> None:
    pair.placed.clear()


def broken_off(pair: Site) -> None:
    for document in pair.placed.values():
        document["unfinished"] = True


@pytest.mark.parametrize(
    ("change", "found", "broken"),
    [
        (nothing, "nothing placed", [("site", "kube_serving")]),
        (
            broken_off,
            "a run that was broken off",
            [("spark1", "device_plugins"), ("spark2", "device_plugins"), ("site", "kube_serving")],
        ),
        (
            lambda pair: pair.placed.pop("device-plugins"),
            "nothing placed",
            [("spark1", "device_plugins"), ("spark2", "device_plugins")],
        ),
    ],
)
def test_nothing_placed_is_a_failure(
    pair: Site, change: Callable[[Site], None], found: str, broken: list[tuple[str, str]]
) -> None:
    change(pair)
    with serving(pair):
        verdict = pair.verdict()
    assert verdict.exit_code == 1
    rows = [(each["node"], each["found"], each["remedy"]) for each in verdict.to_dict()["failures"]]
    assert rows == [(name, found, f"{PLAYBOOK}{playbook}.yml`") for name, playbook in broken]


def test_an_api_that_does_not_answer_is_a_failure(pair: Site) -> None:
    pair.api_answers = False
    verdict = pair.verdict()
    assert verdict.exit_code == 1
    data = verdict.to_dict()["failures"]
    assert {each["node"] for each in data} == {"spark1", "spark2", "site"}
    assert all("failed with exit 1: refused" in each["found"] for each in data)
    assert all("journalctl -u k3s" in each["remedy"] or "operator" in each["check"] for each in data)


@pytest.mark.parametrize(
    ("platform", "layers", "runs"),
    [("systemd", (), False), ("systemd", ("kubernetes",), True), ("k3s", (), True)],
)
def test_the_layer_is_of_its_platform_unless_it_is_asked_for(
    pair: Site, platform: str, layers: tuple[str, ...], runs: bool
) -> None:
    """On systemd the list of layers is empty, which means all."""
    pair.placed.clear()
    verdict = pair.verdict(f"goodput_platform: {platform}", layers)
    assert bool(verdict.rows) == runs
    assert verdict.reason == ("" if runs else "no checks ran")


def test_a_site_on_kubernetes_asks_for_it(tmp_path: Path) -> None:
    show = {"ansible.builtin.debug": {"msg": "layers {{ verify_layers | to_json }}"}}
    files = [str(ROOT / f"group_vars/all/{name}.yml") for name in ("00-site", "90-verify")]
    play = {"hosts": "localhost", "gather_facts": False, "vars_files": files, "tasks": [show]}
    (tmp_path / "play.yml").write_text(json.dumps([play]))
    said = {
        platform: run_playbook("localhost,", tmp_path / "play.yml", "-e", f"goodput_platform={platform}").stdout
        for platform in ("systemd", "k3s")
    }
    assert "layers []" in said["systemd"]
    asked = json.loads(said["k3s"].partition("layers ")[2].partition("]")[0] + "]")
    there = {path.stem.partition("_")[2].partition("_")[2] for path in (ROOT / "tests/acceptance").glob("test_*.py")}
    assert "kubernetes" in asked and set(asked) == there - {"runtime", "lmcache", "dynamo"}


def test_what_nodes_must_offer_is_what_the_plugins_were_placed_for() -> None:
    def plugins(size: int) -> dict[str, str]:
        choices = {"digests": DIGESTS}
        return charts.offered(kube_objects({}, site(size), release("current"), choices, ["device_plugins"]))

    assert plugins(2) == {"nvidia.com/gpu": "1", "rdma/rail0": ">0", "rdma/rail1": ">0"}
    assert charts.offered([]) == {}
