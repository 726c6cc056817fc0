"""One look at all nodes: parsed answers, what follows from them, and what is wrong.

``look`` asks (one batch a node, all nodes at once); everything else is pure. A value that nothing has counted yet is
None, never 0: Dynamo's and LMCache's series appear with the first event.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from typing import Any

import yaml
from ansible_collections.goodput.spark.plugins.module_utils import kube_status
from ansible_collections.goodput.spark.plugins.module_utils.rdma_counters import LOSS_COUNTERS, SOURCES
from ansible_collections.goodput.spark.plugins.module_utils.serving import (
    GIB_BYTES,
    Answer,
    Sample,
    instances,
    lmcache_checks,
    values,
)

from goodput import arm, node_questions
from goodput.node_questions import FRONTEND, LMCACHE, WORKER, Process
from goodput.session import CommandTimeout, Result, Session, Unreachable

SOFT_STATES = {"activating": "starting", "deactivating": "stopping", "reloading": "reloading"}


@dataclass
class Rail:
    """One RoCE function. ``sent``, ``received`` in ``unit`` (bytes or packets); None: it counts neither."""

    netdev: str
    device: str
    up: bool
    addresses: list[str]
    speed_mbps: int | None
    mtu_bytes: int | None
    sent: int | None = None
    received: int | None = None
    unit: str = ""
    losses: int | None = None


@dataclass
class Unit:
    """``down``: it should run and does not. ``age_seconds``: since it became active, None if it is not."""

    name: str
    state: str
    down: bool
    age_seconds: float | None
    restarts: int
    rss_bytes: int
    main_pid: int


@dataclass
class Tier:
    """L1 or one L2 directory of a node. ``files``: objects in the directory; ``disk_bytes``: what they take there."""

    name: str
    used_bytes: float | None
    capacity_bytes: float | None
    disk_bytes: int | None = None
    disk_free_bytes: int | None = None
    files: int | None = None


@dataclass
class Node:
    """One node. ``error`` says why it did not answer; the rest is then empty."""

    name: str
    address: str
    error: str = ""
    uptime_seconds: float | None = None
    load: float | None = None
    memory_bytes: dict[str, int] = field(default_factory=dict)
    rails: list[Rail] = field(default_factory=list)
    units: list[Unit] = field(default_factory=list)
    tiers: list[Tier] = field(default_factory=list)
    requests: float | None = None
    figures: dict[str, float | None] = field(default_factory=dict)
    running: dict[str, tuple[str, ...]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


@dataclass
class Site:
    """What ``goodput status`` shows. ``workers``: {node or address: worker id}; ``figures``: seen by the frontend.

    ``cluster``: what Kubernetes says, where a node runs its server.
    """

    nodes: list[Node]
    model: str = ""
    serves: bool = False
    workers: dict[str, str] = field(default_factory=dict)
    figures: dict[str, float | None] = field(default_factory=dict)
    chosen: str = ""
    arm: arm.Arm | None = None
    cluster: kube_status.Cluster | None = None
    problems: list[str] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 all well, 1 something is down, 2 nothing could be asked."""
        if all(node.error for node in self.nodes):
            return 2
        return 1 if self.problems else 0

    def to_dict(self) -> dict[str, Any]:
        found = asdict(self)
        return {"ok": self.exit_code == 0, "exit": self.exit_code, **found}


def ratio(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


def total(found: Sequence[Sample], name: str, **labels: str) -> float | None:
    """Sum over the series with these labels; None if there is none (yet)."""
    every = values(found, name, **labels)
    return sum(every) if every else None


# --------------------------------------------------------------------------------------------------------------------
# One node
# --------------------------------------------------------------------------------------------------------------------


def parse_host(text: str) -> tuple[float | None, float | None, dict[str, int]]:
    """(uptime in seconds, load, bytes by name of /proc/meminfo)."""
    lines = text.splitlines()
    memory = {}
    for line in lines[2:]:
        name, _, rest = line.partition(":")
        if rest.split()[:1]:
            memory[name] = int(rest.split()[0]) * 1024
    if len(lines) < 2:
        return None, None, memory
    return float(lines[0].split()[0]), float(lines[1].split()[0]), memory


def parse_paths(text: str) -> dict[str, str]:
    """``path:value`` lines of ``grep -H``; a line without a colon is a path that exists."""
    return dict(line.partition(":")[::2] for line in text.splitlines() if line)


def _number(text: str | None) -> int | None:
    try:
        return int(text or "")
    except ValueError:
        return None


def parse_rails(rdma: str, net: str, addresses: str, plan: str) -> tuple[list[Rail], list[str]]:
    """The rails, and what is wrong with them.

    The role's netplan file names them. Without it every RoCE function is shown whose link has a carrier.
    """
    try:
        ethernets = (yaml.safe_load(plan) or {}).get("network", {}).get("ethernets", {})
        planned = list(ethernets)
    except (yaml.YAMLError, AttributeError):
        planned = []
    known, links = parse_paths(rdma), parse_paths(net)
    inet: dict[str, list[str]] = {}
    for line in addresses.splitlines():
        words = line.split()
        if len(words) > 3 and words[2] == "inet":
            inet.setdefault(words[1], []).append(words[3])
    netdevs: dict[str, str] = {}
    for path, value in known.items():
        device, _, rest = path.partition("/")
        if rest.startswith("device/net/"):
            netdevs.setdefault(device, rest.rpartition("/")[2])
        elif rest in ("parent", "ports/1/gid_attrs/ndevs/0"):
            netdevs.setdefault(device, value.strip())
    rails = []
    for device, netdev in sorted(netdevs.items()):
        if netdev not in planned if planned else links.get(f"{netdev}/carrier") != "1":
            continue
        port = f"{device}/ports/1"
        speed = _number(links.get(f"{netdev}/speed"))
        rail = Rail(
            netdev,
            device,
            links.get(f"{netdev}/operstate") == "up" and known.get(f"{port}/state", "").strip().startswith("4"),
            inet.get(netdev, []),
            speed if speed and speed > 0 else None,
            _number(links.get(f"{netdev}/mtu")),
        )
        for source in SOURCES:
            sent, received = (_number(known.get(f"{port}/{path}")) for path in (source.sent, source.received))
            if sent is not None and received is not None:
                rail.sent, rail.received, rail.unit = sent * source.factor, received * source.factor, source.unit
                break
        lost = [_number(known.get(f"{port}/hw_counters/{name}")) for name in LOSS_COUNTERS]
        counted = [value for value in lost if value is not None]
        rail.losses = sum(counted) if counted else None
        rails.append(rail)
    rails.sort(key=lambda rail: (planned.index(rail.netdev) if rail.netdev in planned else 0, rail.netdev))
    missing = [name for name in planned if name not in netdevs.values()]
    problems = [f"rail {name}: no RoCE device; run `goodput verify`" for name in missing]
    for rail in rails:
        if not rail.up:
            link = links.get(f"{rail.netdev}/operstate", "missing")
            state = known.get(f"{rail.device}/ports/1/state", "unknown").strip()
            problems.append(f"rail {rail.netdev}: link {link}, {rail.device} {state}; check the cable")
        elif not rail.addresses:
            problems.append(f"rail {rail.netdev}: no address; run `goodput site --tags rdma`")
    return rails, problems


def parse_units(text: str, uptime_seconds: float | None, processes: Sequence[Process]) -> tuple[list[Unit], list[str]]:
    """The goodput units that are installed, and those that should run and do not.

    One that is enabled should be active; a oneshot that does not stay only must not have failed.
    """
    units, problems = [], []
    for block in text.strip().split("\n\n"):
        found = dict(line.partition("=")[::2] for line in block.splitlines())
        name = found.get("Id", "")
        if not name or found.get("LoadState") in ("not-found", "masked", None):
            continue
        active, short = found.get("ActiveState", ""), name.removesuffix(".service")
        enabled = found.get("UnitFileState") in ("enabled", "enabled-runtime")
        stays = found.get("Type") != "oneshot" or found.get("RemainAfterExit") == "yes"
        down = active == "failed" or (stays and enabled and active != "active")
        since = _number(found.get("ActiveEnterTimestampMonotonic"))
        age = None
        if active == "active" and since and uptime_seconds is not None:
            age = max(0.0, uptime_seconds - since / 1e6)
        state = SOFT_STATES.get(active, active)
        if active == "active" and found.get("SubState") not in ("running", "active", None):
            state = found["SubState"]
        rss = sum(process.rss_bytes for process in processes if process.unit == short)
        restarts = _number(found.get("NRestarts")) or 0
        units.append(Unit(short, state, down, age, restarts, rss, _number(found.get("MainPID")) or 0))
        if down:
            result = found.get("Result", "success")
            why = f" ({result})" if result != "success" else ""
            problems.append(f"{short} is {state}{why}; `goodput logs {short.removeprefix('goodput-')}`")
    return units, problems


def _in(data: Any, *path: str) -> Any:
    for key in path:
        data = data.get(key) if isinstance(data, Mapping) else None
    return data


def parse_tiers(answers: Mapping[str, Answer], l2: str) -> list[Tier]:
    """L1 and the L2 directories: fill by LMCache's own account, its limit, and what the disk says.

    LMCache counts L2 from zero at each start, so the files of former starts show only on the disk.
    """
    nothing = Answer(0, "")
    status, config = answers.get("/status", nothing).json(), answers.get("/config", nothing).json()
    counted = node_questions.counters(answers)
    tiers = []
    usage = _in(status, "storage_manager", "l1_usage")
    if isinstance(usage, list) and len(usage) == 2:
        tiers.append(Tier("L1", usage[0], usage[1]))
    adapters = _in(config, "storage_manager", "l2_adapter_config", "adapters")
    limits = {
        item.get("base_path"): item.get("max_capacity_gb")
        for item in (adapters if isinstance(adapters, list) else [])
        if isinstance(item, Mapping)
    }
    for line in l2.splitlines():
        place, _, rest = line.partition("\x1f")
        disk, _, rest = rest.partition("\x1f")
        taken, _, files = rest.partition("\x1f")
        free = disk.split()
        limit = limits.get(place)
        own = total(counted, "lmcache_mp_l2_usage_bytes", l2_name="fs_native") if len(limits) == 1 else None
        tiers.append(
            Tier(
                f"L2 {place}",
                own if limits else None,
                limit * GIB_BYTES if limit else None,
                _number(taken),
                _number(free[2]) if len(free) == 3 else None,
                _number(files),
            )
        )
    return tiers


def parse_figures(answers: Mapping[str, Mapping[str, Answer]]) -> dict[str, float | None]:
    """Hit rates and failures that this node counts: LMCache's lookups, the engine's prefix cache."""
    lmcache, worker = (node_questions.counters(answers.get(unit, {})) for unit in (LMCACHE, WORKER))
    asked = total(lmcache, "lmcache_mp_lookup_requested_tokens_total")
    return {
        "lookup_tokens": asked,
        "lookup_hit_rate": ratio(total(lmcache, "lmcache_mp_lookup_hit_tokens_total"), asked),
        "lookup_hit_rate_l1": ratio(total(lmcache, "lmcache_mp_lookup_hit_l1_tokens_total"), asked),
        "lookup_hit_rate_l2": ratio(total(lmcache, "lmcache_mp_lookup_hit_l2_tokens_total"), asked),
        "l1_allocation_failures": total(lmcache, "lmcache_mp_l1_allocation_failure_chunks_total"),
        "l2_prefetch_failures": total(lmcache, "lmcache_mp_l2_prefetch_failure_chunks_total"),
        "prefix_cache_hit_rate": ratio(
            total(worker, "vllm:prefix_cache_hits_total"), total(worker, "vllm:prefix_cache_queries_total")
        ),
    }


def parse_node(name: str, address: str, answers: Mapping[str, Result]) -> Node:
    """A node from its batch of answers (the keys of ``node_questions.STATUS``)."""
    text = {key: answer.stdout for key, answer in answers.items()}
    node = Node(name, address)
    node.uptime_seconds, node.load, node.memory_bytes = parse_host(text["host"])
    processes = node_questions.processes(text["processes"])
    node.rails, wrong = parse_rails(text["rdma"], text["net"], text["addresses"], text["rail_plan"])
    node.units, down = parse_units(text["units"], node.uptime_seconds, processes)
    node.problems = [*wrong, *down]
    mains = {unit.main_pid: unit.name for unit in node.units if unit.main_pid}
    node.running = {mains[process.pid]: process.words for process in processes if process.pid in mains}
    asked = node_questions.answers(text["http"])
    node.tiers = parse_tiers(asked.get(LMCACHE, {}), text["l2"])
    node.figures = parse_figures(asked)
    if LMCACHE in asked:
        health, config, state = (
            asked[LMCACHE].get(path, Answer(0, "no answer")) for path in ("/healthcheck", "/config", "/status")
        )
        node.problems += _failed(lmcache_checks(health, config, state, node.running.get(LMCACHE, ())))
    if WORKER in asked:
        counted = node_questions.counters(asked[WORKER])
        node.requests = total(counted, "dynamo_component_requests_total", dynamo_endpoint="generate")
    return node


def parse_cluster(answer: Result) -> kube_status.Cluster | None:
    """The answer to ``node_questions.KUBE``; None where no server is."""
    if not answer.stdout.strip("\n"):
        return None
    everything, _, rest = answer.stdout.partition("\x1e")
    if not everything.strip():
        why = (answer.stderr.strip().splitlines() or ["no answer"])[-1]
        return kube_status.Cluster(problems=[f"Kubernetes: {why}; `journalctl -u k3s` on the server"])
    graphs = rest.partition("\x1e")[0].strip()
    return kube_status.parse(json.loads(everything), json.loads(graphs) if graphs else {})


def _failed(checks: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        f"{check['check']}: found {check['found']}, required {check['required']}; {check['remedy']}"
        for check in checks
        if not check["ok"]
    ]


# --------------------------------------------------------------------------------------------------------------------
# The site
# --------------------------------------------------------------------------------------------------------------------


def parse_site(
    nodes: list[Node],
    addresses: Mapping[str, str],
    frontends: Sequence[Mapping[str, Answer]],
    chosen: str,
    plans: Sequence[Mapping[str, Any]],
    cluster: kube_status.Cluster | None = None,
) -> Site:
    """The whole screen.

    :param addresses: where each node's worker is, by its name.
    :param frontends: the answers of every running frontend.
    :param plans: what ``arm.site_plans`` made of the nodes' memory.
    :param cluster: of the node that runs the K3s server.
    """
    site = Site(nodes, chosen=chosen, cluster=cluster)
    site.problems += cluster.problems if cluster else []
    named = {address: name for name, address in addresses.items()}
    for node in nodes:
        # The error of a session names the node.
        site.problems += [node.error] if node.error else [f"{node.name}: {problem}" for problem in node.problems]
        if not node.error and not node.units and not cluster:
            site.problems.append(f"{node.name}: no goodput unit is installed; run `goodput site`")
    for answers in frontends:
        health, models = answers.get("/health"), answers.get("/v1/models")
        if health is None or health.status != 200 or not isinstance(health.json(), Mapping):
            site.problems.append(f"frontend: {health.words() if health else 'no answer'}; `goodput logs frontend`")
            continue
        site.serves = True
        for worker in instances(health.json()):
            site.workers[named.get(worker["address"], worker["address"])] = worker["id"]
        listed = _in(models.json() if models else None, "data") or []
        site.model = str(listed[0].get("id", "")) if listed else ""
        if not listed:
            site.problems.append("frontend: no model is listed; `goodput logs worker`")
        site.figures = frontend_figures(node_questions.counters(answers))
    if not frontends and any(node.units for node in nodes) and not cluster:
        site.problems.append("no frontend runs; `goodput logs frontend`")
    if site.serves:
        site.problems += [
            f"{node.name}: its worker is not registered with the frontend; "
            + ("see its pod's log" if cluster else f"`goodput logs worker --node {node.name}`")
            for node in nodes
            if not node.error and node.name not in site.workers
        ]
    in_pods = cluster.running if cluster else {}
    site.arm = arm.find(
        plans, {node.name: node.running | in_pods.get(node.name, {}) for node in nodes if not node.error}
    )
    # A process that is missing has been named above.
    differ = [item for item in (site.arm.differences if site.arm else ()) if item.argument != "process" or item.running]
    if site.arm is not None and differ:
        found = "; ".join(f"{item.unit} {item.argument} is {item.running or 'missing'}" for item in differ[:2])
        what = f"{site.arm.name} is nearest, {len(differ)} of {site.arm.compared} arguments differ ({found})"
        site.problems.append(f"no profile runs exactly: {what}; run `goodput site`")
    elif site.arm is not None and site.arm.exact and site.arm.name != chosen:
        site.problems.append(f"the inventory chooses profile {chosen}, {site.arm.name} runs; run `goodput site`")
    return site


def frontend_figures(found: Sequence[Sample]) -> dict[str, float | None]:
    """What the frontend has counted since its start. ``cached_share``: prompt tokens found in a device's cache."""
    prompt = total(found, "dynamo_frontend_input_sequence_tokens_sum")
    requests = total(found, "dynamo_frontend_requests_total")
    good = total(found, "dynamo_frontend_requests_total", status="success")
    return {
        "requests": requests,
        "failed_requests": None if requests is None else requests - (good or 0.0),
        "running_requests": total(found, "dynamo_frontend_inflight_requests"),
        "prompt_tokens": prompt,
        "cached_share": ratio(total(found, "dynamo_frontend_cached_tokens_sum"), prompt),
        "output_tokens": total(found, "dynamo_frontend_output_tokens_total"),
        "ttft_mean_seconds": ratio(
            total(found, "dynamo_frontend_time_to_first_token_seconds_sum"),
            total(found, "dynamo_frontend_time_to_first_token_seconds_count"),
        ),
        "router_hit_rate": ratio(
            total(found, "dynamo_component_router_kv_hit_rate_sum"),
            total(found, "dynamo_component_router_kv_hit_rate_count"),
        ),
        "locality_given_up": total(found, "dynamo_component_router_non_max_overlap_selections_total"),
    }


def memory_facts(name: str, first: bool, node: Node, recorded: str) -> dict[str, Any]:
    """What the planner takes of a node: the memory recorded before anything served, as playbooks/plan.yml does."""
    facts: dict[str, Any] = {"name": name, "server": first, "total_bytes": node.memory_bytes.get("MemTotal", 0)}
    facts["swap_total_bytes"] = node.memory_bytes.get("SwapTotal", 0)
    try:
        at_rest = json.loads(recorded)
        # Another kernel may reserve more or less.
        if at_rest["total_bytes"] == facts["total_bytes"]:
            facts["available_bytes"] = int(at_rest["available_bytes"])
    except (ValueError, TypeError, KeyError):
        pass
    return facts


def look(sessions: Sequence[Session], timeout_s: float) -> Site:
    """Ask every node at once. One that does not answer becomes a row with the reason."""

    def ask(session: Session) -> dict[str, Result] | str:
        try:
            answers = session.run_many(list(node_questions.STATUS.values()), timeout_s)
        except (Unreachable, CommandTimeout) as error:
            return str(error)
        return dict(zip(node_questions.STATUS, answers, strict=True))

    with ThreadPoolExecutor(len(sessions)) as pool:
        found = list(pool.map(ask, sessions))
    nodes, memory, frontends = [], [], []
    cluster = None
    for index, (session, answers) in enumerate(zip(sessions, found, strict=True)):
        name, address = session.node.name, session.node.management_address
        if isinstance(answers, str):
            nodes.append(Node(name, address, answers))
            continue
        node = parse_node(name, address, answers)
        nodes.append(node)
        if node.memory_bytes.get("MemTotal"):
            memory.append(memory_facts(name, index == 0, node, answers["at_rest"].stdout))
        for key in ("http", "kube_http"):
            asked = node_questions.answers(answers[key].stdout)
            frontends += [asked[FRONTEND]] if FRONTEND in asked else []
        cluster = cluster or parse_cluster(answers["kube"])
    chosen, plans = arm.site_plans(sessions[0].node.variables, memory) if memory else ("", [])
    addresses = {session.node.name: session.node.serving_address for session in sessions}
    return parse_site(nodes, addresses, frontends, chosen, plans, cluster)
