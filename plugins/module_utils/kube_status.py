# Apache-2.0 (see LICENSE)
"""What a cluster says of itself, for one screen: nodes with what they may give away, pods, and what our pods run.

Pure: from the JSON of ``kubectl get nodes,pods`` and ``kubectl get dynamographdeployments``. Which arm runs is not said
here; ``words`` gives the command lines from which it is found.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import PRESSURES, amount, condition, ready_words
from ansible_collections.goodput.spark.plugins.module_utils.kube_serving import (
    COORDINATOR,
    FRONTEND,
    PLATFORM_NAMESPACE,
    WORKER,
    component_of,
    containers,
    is_ready,
    reasons,
    states,
)

Object = Mapping[str, Any]
GPU, RAIL = "nvidia.com/gpu", "rdma/rail"
OURS = "app.kubernetes.io/part-of"
#: (component, container): the unit that runs the same program on the other platform.
UNITS = {
    (WORKER, "main"): "goodput-worker",
    (WORKER, "lmcache"): "goodput-lmcache",
    (FRONTEND, "main"): "goodput-frontend",
    (COORDINATOR, "coordinator"): "goodput-coordinator",
}


@dataclass
class KubeNode:
    """``gives``: allocatable by resource, as the scheduler knows it; ``memory_bytes``: the same of memory."""

    name: str
    ready: bool
    server: bool
    version: str
    takes_pods: bool
    memory_bytes: int | None
    gives: dict[str, str] = field(default_factory=dict)


@dataclass
class KubePod:
    """``ready``: containers that are, of how many; ``why``: what keeps it from being Ready."""

    namespace: str
    name: str
    node: str
    component: str
    ready: str
    well: bool
    restarts: int
    why: str = ""


@dataclass
class Cluster:
    """``graphs``: by NAMESPACE/NAME, Ready or what the operator says instead."""

    nodes: list[KubeNode] = field(default_factory=list)
    pods: list[KubePod] = field(default_factory=list)
    graphs: dict[str, str] = field(default_factory=dict)
    running: dict[str, dict[str, tuple[str, ...]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def parse_node(item: Object) -> KubeNode:
    labels, status = item["metadata"].get("labels", {}), item.get("status", {})
    offered = status.get("allocatable", {})
    memory = amount(str(offered.get("memory", "")))
    return KubeNode(
        str(item["metadata"]["name"]),
        condition(item, "Ready") == "True",
        "node-role.kubernetes.io/control-plane" in labels,
        str(status.get("nodeInfo", {}).get("kubeletVersion", "")),
        not item.get("spec", {}).get("unschedulable"),
        int(memory) if isinstance(memory, float) else None,
        {name: str(value) for name, value in sorted(offered.items()) if name == GPU or name.startswith(RAIL)},
    )


def node_problems(item: Object, node: KubeNode) -> Iterator[str]:
    if not node.ready:
        yield f"{node.name}: {ready_words(item)}; `journalctl -u k3s -u k3s-agent` on it"
    if not node.takes_pods:
        yield f"{node.name}: cordoned; repeat a run of k3s.yml that was broken off, or `kubectl uncordon {node.name}`"
    for kind in PRESSURES:
        if condition(item, kind) == "True":
            yield f"{node.name}: {kind}; the kubelet ends pods until it is over"


def uneven(nodes: Sequence[KubeNode]) -> Iterator[str]:
    """A resource that one node offers and another does not: a pod that asks for it can not be placed there."""
    every = sorted({name for node in nodes for name in node.gives})
    for node in nodes:
        missing = [name for name in every if node.gives.get(name, "0") == "0"]
        if missing:
            yield f"{node.name}: offers no {', '.join(missing)}; see that device plugin's log, the cable, the label"


def parse_pod(item: Object) -> KubePod:
    status = item.get("status", {})
    every = list(states(item))
    whole = len(containers(item["spec"]))
    phase = str(status.get("phase", ""))
    leaving = "deletionTimestamp" in item["metadata"]
    well = is_ready(item) or phase == "Succeeded"
    return KubePod(
        str(item["metadata"].get("namespace", "")),
        str(item["metadata"]["name"]),
        str(item["spec"].get("nodeName", "")),
        component_of(item),
        f"{sum(bool(state.get('ready')) for state in every)}/{whole}",
        well,
        sum(int(state.get("restartCount", 0)) for state in every),
        "" if well else "ending" if leaving else "; ".join(reasons(item)) or phase,
    )


def is_ours(item: Object) -> bool:
    return bool(item["metadata"].get("labels", {}).get(OURS) == "goodput")


def words(pod: Object, container: Object) -> tuple[str, ...]:
    """The command line that the kubelet makes of a container: ``$(NAME)`` replaced by its variable, ``$$`` by ``$``."""
    fields = {"spec.nodeName": pod["spec"].get("nodeName", ""), "status.podIP": pod.get("status", {}).get("podIP", "")}
    values: dict[str, str] = {}
    for one in container.get("env", []):
        path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath", "")
        values[one["name"]] = str(one.get("value", fields.get(path, "")))

    def replaced(match: re.Match[str]) -> str:
        return "$" if match[0] == "$$" else values.get(match[1], match[0])

    line = [
        re.sub(r"\$\$|\$\(([A-Za-z_][A-Za-z0-9_]*)\)", replaced, str(word))
        for word in [*container.get("command", []), *container.get("args", [])]
    ]
    # LMCache's starter and the engine's gate end where their program begins.
    if any(word.endswith(("/start.py", "/memory_gate.py")) for word in line[:2]) and "--" in line:
        line = line[line.index("--") + 1 :]
    return tuple(line)


def running(pods: Sequence[Object]) -> dict[str, dict[str, tuple[str, ...]]]:
    """By node and by the unit of the other platform, what containers of ours that run were started with."""
    found: dict[str, dict[str, tuple[str, ...]]] = {}
    for pod in pods:
        if not is_ours(pod) or "deletionTimestamp" in pod["metadata"]:
            continue
        up = {state["name"] for state in states(pod) if "running" in state.get("state", {})}
        for name, container in containers(pod["spec"]).items():
            unit = UNITS.get((component_of(pod), name))
            if unit and name in up:
                found.setdefault(str(pod["spec"].get("nodeName", "")), {})[unit] = words(pod, container)
    return found


def graph_words(item: Object) -> str:
    for one in item.get("status", {}).get("conditions", []):
        if one["type"] == "Ready":
            return (
                "Ready" if one["status"] == "True" else f"{one.get('reason', '')}: {one.get('message', '')}".strip(": ")
            )
    return "the operator has said nothing yet"


def parse(everything: Object, graphs: Object) -> Cluster:
    """A cluster from both lists; ``graphs`` is {} where the operator was never installed.

    Shown are our pods, those of the operator, and whatever else is not well.
    """
    items = everything.get("items", [])
    found = Cluster(running=running([item for item in items if item["kind"] == "Pod"]))
    for item in items:
        if item["kind"] == "Node":
            node = parse_node(item)
            found.nodes.append(node)
            found.problems += node_problems(item, node)
        else:
            pod = parse_pod(item)
            if is_ours(item) or pod.namespace == PLATFORM_NAMESPACE or not pod.well:
                found.pods.append(pod)
    found.problems += uneven(found.nodes)
    found.pods.sort(key=lambda pod: (pod.namespace, pod.component, pod.node, pod.name))
    for pod in found.pods:
        if not pod.well:
            where = f" on {pod.node}" if pod.node else ""
            found.problems.append(
                f"pod {pod.namespace}/{pod.name}{where}: {pod.ready} ready, {pod.why}; "
                f"`kubectl describe pod -n {pod.namespace} {pod.name}`"
            )
    for item in graphs.get("items", []):
        name = f"{item['metadata']['namespace']}/{item['metadata']['name']}"
        found.graphs[name] = graph_words(item)
        if found.graphs[name] != "Ready":
            found.problems.append(f"graph {name}: {found.graphs[name]}")
    return found
