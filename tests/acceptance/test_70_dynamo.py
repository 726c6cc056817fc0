"""Serving as a client sees it: requests through the router, counted again on the workers."""

from __future__ import annotations

import functools
import json
import re
import shlex
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.serving import (
    environment_differences,
    unit_remedy,
    variables,
)

from goodput.session import Session

AGAIN = "run `ansible-playbook site.yml --tags dynamo`"
WORKER, FRONTEND, ETCD = "goodput-worker", "goodput-frontend", "goodput-etcd"
HARDENED = {
    "User": "goodput",
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "CapabilityBoundingSet": "",
    "StartLimitIntervalUSec": "0",
}
# Who is killed when memory ends, and who goes first when processor or disk are short.
SHARES = {
    WORKER: {"OOMScoreAdjust": "300", "CPUWeight": "100", "IOWeight": "100"},
    FRONTEND: {"OOMScoreAdjust": "-500", "CPUWeight": "200", "IOWeight": "100"},
    ETCD: {"OOMScoreAdjust": "-800", "CPUWeight": "200", "IOWeight": "500"},
}
PLANES = ["--discovery-backend etcd", "--request-plane tcp", "--event-plane zmq"]
# Runs on a node with nothing but Python: streamed completions, their results as one line of JSON. Starting Python costs
# seconds on an emulated node, so one process asks for all.
CLIENT = """
import concurrent.futures, json, sys, urllib.request
url, model, tokens, together, prompts = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), sys.argv[5:]
def ask(content):
    body = {"model": model, "stream": True, "stream_options": {"include_usage": True}, "max_tokens": tokens,
            "messages": [{"role": "user", "content": content}], "nvext": {"extra_fields": ["worker_id"]}}
    request = urllib.request.Request(url + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    out = {"chunks": 0, "text": "", "finish": None, "done": False, "usage": {}, "worker": None}
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=120) as stream:
        for line in stream:
            line = line.decode().strip()
            if line == "data: [DONE]":
                out["done"] = True
            elif line.startswith("data: "):
                part = json.loads(line[6:])
                out["chunks"] += 1
                out["usage"] = part.get("usage") or out["usage"]
                worker = (part.get("nvext") or {}).get("worker_id") or {}
                out["worker"] = worker.get("decode_worker_id", out["worker"])
                for choice in part["choices"]:
                    delta = choice.get("delta") or {}
                    out["text"] += delta.get("content") or delta.get("reasoning_content") or ""
                    out["finish"] = choice.get("finish_reason") or out["finish"]
    return out
with concurrent.futures.ThreadPoolExecutor(together) as pool:
    print(json.dumps(list(pool.map(ask, prompts))))
"""


def address(node: Any) -> str:
    """Management address from the inventory: what the nodes call each other by."""
    return str(node.vars.get("goodput_management_address", node.vars.get("ansible_host")))


def command_line(unit: str) -> str:
    return f"tr '\\0' ' ' < /proc/$(systemctl show -P MainPID {unit})/cmdline"


def flag(words: str, name: str, default: str = "") -> str:
    match = re.search(rf"(?:^| ){name}[ =](\S+)", words)
    return match.group(1) if match else default


def metric(text: str, name: str, **labels: str) -> float | None:
    """Sum over the series with these labels; None when there is none."""
    found = []
    for line in text.splitlines():
        match = re.match(rf"{name}(?:{{(.*)}})? (\S+)$", line)
        if match and all(f'{key}="{wanted}"' in (match.group(1) or "") for key, wanted in labels.items()):
            found.append(float(match.group(2)))
    return sum(found) if found else None


class Site:
    """The endpoint on the first node, found from the running process."""

    def __init__(self, first: Any, nodes: list[Any]) -> None:
        self.first, self.nodes = first, nodes
        words = first.batch({"frontend": command_line(FRONTEND)})["frontend"].stdout
        self.words = words
        self.url = f"http://127.0.0.1:{flag(words, '--http-port', '8000')}"
        if flag(words, "--http-host", "0.0.0.0") not in ("0.0.0.0", "127.0.0.1"):
            self.url = self.url.replace("127.0.0.1", flag(words, "--http-host"))

    def get(self, path: str, node: Any = None, url: str | None = None) -> str:
        command = f"curl -sS -m 60 --noproxy '*' {shlex.quote((url or self.url) + path)}"
        answer = (node or self.first).batch({path: command}, fresh=True)[path]
        return str(answer.stdout or answer.stderr)

    def json(self, path: str) -> Any:
        """The endpoint's answer; a failed check names the endpoint if it is no JSON."""
        text = self.get(path)
        try:
            return json.loads(text)
        except ValueError:
            pytest.fail(
                f"found {text[:200]!r} at {self.url}{path}, required JSON; is {FRONTEND} up and its port right?"
            )

    @functools.cached_property
    def model(self) -> str:
        models = [entry["id"] for entry in self.json("/v1/models")["data"]]
        assert models, f"found no model at {self.url}/v1/models, required one; read `journalctl -u {WORKER}`"
        return str(models[0])

    @functools.cached_property
    def block_tokens(self) -> int:
        """Tokens of one block as the router counts them: thousands where Mamba and attention share blocks."""
        name = "dynamo_frontend_model_kv_cache_block_size"
        found = metric(self.get("/metrics"), name, model=self.model)
        if found is None:
            # It is there from the first request on.
            self.ask("Say hello.")
            found = metric(self.get("/metrics"), name, model=self.model)
        return int(found or 0)

    def ask(self, *prompts: str, tokens: int = 8, together: int = 1) -> list[dict[str, Any]]:
        """One answer a prompt, ``together`` of them at a time."""
        words = ["python3", "-c", CLIENT, self.url, self.model, str(tokens), str(together), *prompts]
        answer = self.first.batch({"ask": shlex.join(words)}, fresh=True, timeout_s=180)["ask"]
        assert answer.ok, f"the request failed: {answer.stderr[-500:]}"
        return list(json.loads(answer.stdout))

    def served(self) -> dict[str, float]:
        """Requests that each node's worker has counted, by node name."""
        counts = {}
        for node in self.nodes:
            text = self.get("/metrics", node, f"http://{address(node)}:9091")
            counts[node.name] = metric(text, "dynamo_component_requests_total", dynamo_endpoint="generate") or 0.0
        return counts


@pytest.fixture(scope="module")
def site(first: Any, nodes: list[Any]) -> Site:
    return Site(first, nodes)


def asked_by_a_stranger(site: Site, nodes: list[Any]) -> tuple[str, dict[str, str]]:
    """(address, status of each answer, 000 for none): in a shell of its own, since silence lasts for its time-out."""
    if len(nodes) == 1:
        return "", {}
    session, server = Session(nodes[1].session.node), address(site.first)
    try:
        # A rail address of the second node is no management address: to the units it is a stranger.
        links = "rdma link show | sed -n 's/.* netdev \\([^ ]*\\).*/\\1/p'"
        rails = session.run(f"for d in $({links}); do ip -4 -o address show dev $d; done").stdout
        stranger = next((found for found in re.findall(r"inet ([\d.]+)", rails) if found != address(nodes[1])), "")
        if not stranger:
            return "", {}
        port = flag(site.words, "--http-port", "8000")
        urls = {"frontend": f"http://{server}:{port}/live", "LMCache": f"http://{server}:9500/healthcheck"}
        urls |= {"worker": f"http://{server}:9091/health", "discovery": f"http://{server}:2379/health"}
        ask = "curl -s -m 5 --noproxy '*' -o /dev/null"
        asked = [f"{ask} -w '{name} %{{http_code}}\\n' --interface {stranger} {url} &" for name, url in urls.items()]
        asked += [f"{ask} -w 'node %{{http_code}}\\n' {urls['LMCache']} &", "wait"]
        return stranger, dict(line.split() for line in session.run(" ".join(asked)).stdout.splitlines())
    finally:
        session.close()


@pytest.fixture(scope="module", autouse=True)
def silence(site: Site, nodes: list[Any]) -> Iterator[Future[tuple[str, dict[str, str]]]]:
    """What a stranger is told, asked while the other checks run."""
    with ThreadPoolExecutor(1) as pool:
        yield pool.submit(asked_by_a_stranger, site, nodes)


def long_prompt(words: int = 950, tokens: int = 0) -> str:
    """About 1900 tokens that this run alone knows: the first block already differs. Never less than ``tokens``."""
    key = uuid.uuid4().hex
    # A tokenizer makes one to three tokens of such a word.
    words = max(words, tokens)
    return " ".join([key, *(f"{key[number % 29 : number % 29 + 3]}" for number in range(words))])


@pytest.mark.unit(FRONTEND)
def test_completion_is_streamed(site: Site, check: Callable[..., None]) -> None:
    "A completion is streamed through the router"
    [answer] = site.ask("Say hello.")
    log = f"read `journalctl -u {FRONTEND}`"
    check(answer["text"], "some text", log, ok=bool(answer["text"].strip()), what="text")
    check(answer["finish"], "a finish_reason", log, ok=bool(answer["finish"]), what="finish_reason")
    check(answer["done"], True, log, what="[DONE]")
    check(answer["chunks"], "more than one chunk", log, ok=answer["chunks"] > 1, what="chunks")


@pytest.mark.unit(WORKER)
def test_each_node_registered_one_worker(site: Site, nodes: list[Any], check: Callable[..., None]) -> None:
    "Each node registered one worker, on its management address"
    instances = site.json("/health")["instances"]
    found = [entry["transport"]["tcp"].split(":")[0] for entry in instances if entry["endpoint"] == "generate"]
    check(sorted(found), sorted(address(node) for node in nodes), f"read `journalctl -u {WORKER}` on the missing node")


@pytest.mark.unit(WORKER)
def test_repeated_prompt_comes_from_the_cache(site: Site, check: Callable[..., None]) -> None:
    "A repeated long prompt is read from the cache, on the same worker"
    # Only whole blocks are found again, and a hybrid model's only after the second time.
    prompt = long_prompt(tokens=2 * site.block_tokens + 64)
    counter = "dynamo_frontend_cached_tokens_sum"
    first, *_again, last = site.ask(*[prompt] * (3 if site.block_tokens > 500 else 2))
    tokens = int(first["usage"]["prompt_tokens"])
    cached = [(one["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") for one in (first, last)]
    if cached[1] is None:
        # Some releases leave the field out; the frontend counts all the same.
        before = metric(site.get("/metrics"), counter) or 0.0
        site.ask(prompt)
        cached[1] = int((metric(site.get("/metrics"), counter) or 0.0) - before)
    check(tokens, "at least 900 tokens", "the prompt of this test is too short for the block", ok=tokens >= 900)
    check(cached[0] or 0, 0, "the prompt is new, so somebody else's blocks were matched", what="first request")
    remedy = "prefix caching or KV events are off: compare the workers' arguments with the plan"
    check(cached[1], f"most of {tokens} tokens", remedy, ok=cached[1] > tokens // 2, what="last request")
    check(last["worker"], first["worker"], "the router does not know who holds the prefix", what="worker")


@pytest.mark.unit(WORKER)
def test_every_worker_serves(site: Site, nodes: list[Any], check: Callable[..., None]) -> None:
    "Different prompts reach every worker"
    before = site.served()
    # Several at a time, so that a busy worker is left for another one.
    site.ask(*(long_prompt(60) for _request in range(6 * len(nodes))), tokens=4, together=2 * len(nodes))
    grown = {name: count - before[name] for name, count in site.served().items()}
    remedy = f"read `journalctl -u {WORKER}` on the node with 0, and the frontend's for its address"
    check(grown, "at least 1 on every node", remedy, ok=all(count >= 1 for count in grown.values()))


@pytest.mark.unit(WORKER)
def test_block_size_is_the_same_everywhere(site: Site, nodes: list[Any], sh: Callable[..., Any], check: Any) -> None:
    "Router and workers have one block size"
    # vLLM chooses its block while it starts, and says so.
    chosen = f"journalctl -q -o cat -u {WORKER} -b -g 'Setting attention block size to' | tail -n 1"
    remedy = f"restart {WORKER} and {FRONTEND}; events of another size are dropped"
    for node in nodes:
        given = flag(sh({"worker": command_line(WORKER)}, node=node)["worker"].stdout, "--block-size")
        if not given:
            said = re.search(r"block size to (\d+) tokens", sh({"chosen": chosen}, node=node)["chosen"].stdout)
            # Of a model without Mamba it says nothing, and has a block all the same.
            given = said[1] if said else str(site.block_tokens)
        check(site.block_tokens, int(given), remedy, ok=site.block_tokens == int(given) > 0, what=node.name)


@pytest.mark.unit(FRONTEND)
def test_router_gets_events(site: Site, nodes: list[Any], check: Callable[..., None]) -> None:
    "KV events reach the router"
    # The router counts its own guesses as applied events when KV events are off; batches come from workers alone.
    batches = "dynamo_component_router_kv_zmq_ingress_batches_total"
    applied = "dynamo_component_kv_cache_events_applied"
    ingress = "_zmq_ingress_" in site.get("/metrics")
    series: dict[str, Any] = {"name": batches} if ingress else {"name": applied, "event_type": "stored", "status": "ok"}
    before = metric(site.get("/metrics"), **series) or 0.0
    # One block at least, or there is nothing to tell.
    site.ask(long_prompt(60, tokens=site.block_tokens + 64))
    after = before
    for _try in range(10):
        after = metric(site.get("/metrics"), **series) or 0.0
        if after > before:
            break
    check(
        after - before,
        "at least 1 more",
        "KV events on, event plane zmq: DYN_EVENT_PLANE_HOST in /etc/goodput/dynamo.env",
        ok=after > before,
    )
    dropped = "journalctl -q --no-pager -b -u goodput-worker -u goodput-frontend -g 'Block not published' | tail -n 3"
    for node in nodes:
        lines = node.batch({"dropped": dropped}, fresh=True)["dropped"].stdout.splitlines()
        check(lines, [], "block sizes differ; see docs/serving.md", what=f"dropped events on {node.name}")


def test_units_are_hardened(host: Any, first: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "Serving units start at boot and have no more rights than they need"
    units = [WORKER, *([FRONTEND, ETCD] if host is first else [])]
    names = f"ActiveState,UnitFileState,Restart,Result,{','.join(HARDENED | SHARES[WORKER])}"
    answers = sh({"engine": command_line(WORKER)} | {unit: f"systemctl show {unit} -p {names}" for unit in units})
    for unit in units:
        found = dict(line.partition("=")[::2] for line in answers[unit].stdout.splitlines())
        required = (
            HARDENED
            | SHARES[unit]
            | {
                "ActiveState": "active",
                "UnitFileState": "enabled",
                "Restart": "on-failure" if unit == ETCD else "always",
            }
        )
        # Only a real engine, whose every load is dear, is given up some day.
        if unit == WORKER and "-m dynamo.vllm " in answers["engine"].stdout:
            required["StartLimitIntervalUSec"] = "8h"
        remedy = f"{unit_remedy(unit, found)}; {AGAIN}"
        check({name: found.get(name) for name in required}, required, remedy, what=unit, unit=unit)


def test_what_runs_is_what_was_decided(host: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "Worker, frontend and discovery run the arguments and environment that the plan decided"
    units = (WORKER, FRONTEND, ETCD)
    commands = {"decided": "cat /etc/goodput/dynamo.json"}
    for unit in units:
        process = f"/proc/$(systemctl show -P MainPID {unit})"
        commands[unit] = f"tr '\\0' '\\n' < {process}/cmdline"
        commands[f"{unit} environ"] = f"tr '\\0' '\\n' < {process}/environ"
    answers = sh(commands)
    check(answers["decided"].rc, 0, AGAIN, what="/etc/goodput/dynamo.json")
    for wanted in json.loads(answers["decided"].stdout or "[]"):
        unit, running = wanted["name"], answers[wanted["name"]].stdout.splitlines()
        # Before the arguments stands the program, or python3, -m and its module.
        running = running[1 if unit == ETCD else 3 :]
        check(running, wanted["arguments"], f"`systemctl restart {unit}`; {AGAIN}", what=unit, unit=unit)
        given = variables(answers[f"{unit} environ"].stdout, "\n")
        check(
            *environment_differences(given, wanted["environment"]),
            f"remove what `systemctl cat {unit}` shows beside its own file, then `systemctl restart {unit}`; {AGAIN}",
            what=f"{unit}, environment",
            unit=unit,
        )


def test_planes_are_explicit(host: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "Discovery, request and event plane are named on the command line"
    words = sh({"worker": command_line(WORKER)})["worker"].stdout
    check([plane for plane in PLANES if plane in words], PLANES, AGAIN, unit=WORKER)


def test_discovery_listens_for_the_nodes_only(first: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "Discovery listens on the management address and loopback, its peer port on loopback"
    answers = sh(
        {
            "listen": f"ss -Hltnp | grep pid=$(systemctl show -P MainPID {ETCD}),",
            "stock": "systemctl show etcd -p ActiveState,UnitFileState",
            "deny": f"systemctl show {ETCD} -P IPAddressDeny",
        },
        node=first,
    )
    found = sorted(line.split()[3] for line in answers["listen"].stdout.splitlines())
    required = sorted([f"{address(first)}:2379", "127.0.0.1:2379", "127.0.0.1:2380"])
    check(found, required, AGAIN, unit=ETCD, node=first)
    stock = dict(line.partition("=")[::2] for line in answers["stock"].stdout.splitlines())
    off = {"ActiveState": "inactive", "UnitFileState": "disabled"}
    check(stock, off, "`systemctl disable --now etcd`: it takes discovery's ports at boot", what="the package's etcd")
    denied = set(answers["deny"].stdout.split())
    check(
        sorted(denied), "everybody but the nodes", AGAIN, ok=denied == {"::/0", "0.0.0.0/0"}, what="others are denied"
    )


def test_worker_metrics_listen_on_management(host: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "The worker's system port listens on the management address only"
    lines = sh({"listen": "ss -Hltn 'sport = :9091'"})["listen"].stdout.splitlines()
    check([line.split()[3] for line in lines], [f"{address(host)}:9091"], AGAIN, unit=WORKER)


def test_a_stranger_reaches_only_the_frontend(site: Site, silence: Any, sh: Callable[..., Any], check: Any) -> None:
    "From another address than the nodes' management addresses only the frontend answers"
    stranger, answers = silence.result()
    if not stranger:
        pytest.skip("no second node with a rail address is in this run, so nobody can ask from outside")
    if answers["frontend"] != "200":
        pytest.skip(f"{stranger} does not reach the frontend either, so nothing follows from silence")
    strangers = ["worker", "discovery"]
    running = sh({"server": command_line("goodput-lmcache")}, node=site.first)["server"].stdout
    # Without a server nothing follows from silence; peers ask on the rail.
    if running and "--p2p-advertise-url" not in running:
        check(answers["node"], "200", "read `journalctl -u goodput-lmcache`", what="LMCache, asked by a node")
        strangers.append("LMCache")
    for name in strangers:
        check(
            answers[name],
            "000",
            f"IPAddressDeny of its unit does not hold; {AGAIN}",
            what=f"{name}, by a stranger",
        )
