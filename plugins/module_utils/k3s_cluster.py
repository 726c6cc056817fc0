# Apache-2.0 (see LICENSE)
"""What the cluster says of its nodes, compared with what was asked for. Runs on the server, through ``k3s kubectl``.

Every call of kubectl costs seconds on an emulated guest, so there is one wait, one list of nodes, one of pods where it
is needed, and one look at each kubelet's running configuration.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.k3s_node import BINARY, Run, run_command
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from ansible_collections.goodput.spark.plugins.module_utils.serving import Check, row

POLL_SECONDS = 5.0
# How long after a restart the API may still say what a node was before: the kubelet tells it every 10 s, and is taken
# for gone after 40 s.
SETTLE_SECONDS = 60.0
# On a node that the role itself cordoned, so that it can tell its own cordon from a person's.
DRAINED = "goodput.spark/drained"
# What must not be the case on a node that serves.
PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")
# What kubectl says while a kind's CRD is not there.
NO_KIND = "doesn't have a resource type"
AGAIN = "run playbooks/k3s.yml"


@dataclass
class Kubectl:
    run: Run = run_command
    program: Sequence[str] = (BINARY, "kubectl")
    timeout_seconds: float = 300

    def __call__(self, *words: str, timeout_seconds: float | None = None) -> str:
        argv = [*self.program, *words]
        status, out, err = self.run(argv, timeout_seconds=timeout_seconds or self.timeout_seconds)
        if status != 0:
            raise K3sError(f"`kubectl {' '.join(words)}` failed with exit {status}: {(err or out).strip()[-2000:]}")
        return out

    def json(self, *words: str) -> Any:
        return json.loads(self(*words))

    def wait_ready(self, names: Sequence[str], timeout_seconds: int) -> dict[str, dict[str, Any]]:
        """All nodes, once those of ``names`` are there and Ready; K3sError with what each says."""
        found = self.nodes_when_up(timeout_seconds)
        if all(name in found and condition(found[name], "Ready") == "True" for name in names):
            return found
        nodes = [f"node/{name}" for name in names]
        try:
            for event in ("create", "condition=Ready"):
                self(
                    "wait",
                    f"--for={event}",
                    f"--timeout={timeout_seconds}s",
                    *nodes,
                    timeout_seconds=timeout_seconds + 60,
                )
        except K3sError as error:
            said = "; ".join(f"{name} {ready_words(node)}" for name, node in self.nodes().items()) or "no node at all"
            raise K3sError(
                f"found {said}; required: {', '.join(names)} Ready within {timeout_seconds} s; fix: look at "
                f"journalctl -u k3s (server) and -u k3s-agent (agents)\n{error}"
            ) from error
        return self.nodes()

    def nodes_when_up(self, timeout_seconds: float) -> dict[str, dict[str, Any]]:
        """All nodes; an API that has just been started may refuse the first calls."""
        end = time.monotonic() + timeout_seconds
        while True:
            try:
                return self.nodes()
            except K3sError:
                if time.monotonic() >= end:
                    raise
                time.sleep(POLL_SECONDS)

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["metadata"]["name"]: node for node in self.json("get", "nodes", "-o", "json")["items"]}

    def kubelet(self, name: str) -> dict[str, Any]:
        """The configuration that a node's kubelet runs with."""
        answer = self.json("get", "--raw", f"/api/v1/nodes/{name}/proxy/configz")
        return dict(answer["kubeletconfig"])


def items(kubectl: Kubectl, *words: str) -> list[dict[str, Any]]:
    """Objects of a ``get``; none if there is no such kind yet. No answer is an error, not an empty list."""
    try:
        text = kubectl("get", *words, "--ignore-not-found", "-o", "json")
    except K3sError as error:
        if NO_KIND in str(error):
            return []
        raise
    found = json.loads(text) if text.strip() else {}
    return list(found["items"]) if "items" in found else [found] if found else []


def ready_words(node: Mapping[str, Any]) -> str:
    for condition in node.get("status", {}).get("conditions", []):
        if condition["type"] == "Ready":
            message = f" ({condition.get('message', '')})" if condition["status"] != "True" else ""
            return f"Ready={condition['status']}{message}"
    return "without a Ready condition"


def condition(node: Mapping[str, Any], kind: str) -> str:
    return next((c["status"] for c in node.get("status", {}).get("conditions", []) if c["type"] == kind), "Unknown")


def address(node: Mapping[str, Any]) -> str:
    found = [a["address"] for a in node.get("status", {}).get("addresses", []) if a["type"] == "InternalIP"]
    return ", ".join(found)


def same_quantity(found: Any, wanted: Any) -> bool:
    """Whether two Kubernetes quantities are the same amount: 1Gi and 1024Mi are."""
    return amount(str(found)) == amount(str(wanted))


def amount(text: str) -> float | str:
    units = {"": 1, "m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
    units |= {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", 1)}
    number = text.rstrip("kKMGTim%")
    unit = text[len(number) :]
    try:
        return float(number) * units[unit]
    except (ValueError, KeyError):
        return text


def label_changes(node: Mapping[str, Any], wanted: Mapping[str, str]) -> dict[str, str]:
    """Labels to set: K3s gives a node its labels only when it registers."""
    labels = node["metadata"].get("labels", {})
    return {key: value for key, value in wanted.items() if labels.get(key) != value}


def is_drained_by_us(node: Mapping[str, Any]) -> bool:
    return DRAINED in node["metadata"].get("annotations", {})


def taint_words(node: Mapping[str, Any]) -> list[str]:
    """Taints as in config.yaml: KEY=VALUE:EFFECT."""
    return [
        f"{taint['key']}={taint['value']}:{taint['effect']}"
        if taint.get("value")
        else f"{taint['key']}:{taint['effect']}"
        for taint in node.get("spec", {}).get("taints", [])
    ]


def subset(found: Any, wanted: Any, path: str = "") -> list[str]:
    """Where ``found`` does not have what ``wanted`` says; quantities are compared by amount, other keys ignored."""
    if isinstance(wanted, Mapping):
        inside = found if isinstance(found, Mapping) else {}
        return [
            line
            for key, value in wanted.items()
            for line in subset(inside.get(key), value, f"{path}.{key}".lstrip("."))
        ]
    if isinstance(wanted, str) and found is not None and same_quantity(found, wanted):
        return []
    return [] if found == wanted else [f"{path} is {found}, not {wanted}"]


def health_checks(name: str, node: Mapping[str, Any] | None) -> list[Check]:
    """Rows of a verdict for one node, whatever was asked for: it is there, Ready, and takes pods."""
    if node is None:
        remedy = f"journalctl -u k3s-agent; then {AGAIN}"
        return [row(f"{name} in the cluster", "missing", "a node of this name", remedy)]
    rows = [
        row(f"{name} Ready", condition(node, "Ready"), "True", "journalctl -u k3s or k3s-agent on it"),
        row(
            f"{name} takes pods",
            "cordoned" if node["spec"].get("unschedulable") else "yes",
            "yes",
            f"k3s kubectl uncordon {name}",
        ),
    ]
    for kind in PRESSURES:
        found = condition(node, kind)
        if found == "True":
            rows.append(row(f"{name} {kind}", found, "False", "free memory or disk on it, see docs/k3s.md"))
    return rows


def node_checks(
    name: str,
    wanted: Mapping[str, Any],
    node: Mapping[str, Any] | None,
    kubelet: Mapping[str, Any] | None,
) -> list[Check]:
    """Rows of a verdict for one node.

    :param wanted: ``address``, ``version``, ``labels``, ``taints``, ``kubelet`` (the drop-in's document), ``server``.
    """
    rows = health_checks(name, node)
    if node is None:
        return rows
    labels = node["metadata"].get("labels", {})
    info = node["status"]["nodeInfo"]
    rows += [
        row(f"{name} address", address(node), wanted["address"], f"{AGAIN}, or correct k3s_node_ip"),
        row(f"{name} kubelet", info["kubeletVersion"], wanted["version"], AGAIN),
        row(
            f"{name} is the server",
            "node-role.kubernetes.io/control-plane" in labels,
            wanted["server"],
            "k3s_server_node names another node than the one that runs the server",
        ),
    ]
    missing = label_changes(node, wanted["labels"])
    rows.append(row(f"{name} labels", ", ".join(f"{k}={v}" for k, v in missing.items()) or "all", "all", AGAIN))
    absent = [taint for taint in wanted["taints"] if taint not in taint_words(node)]
    rows.append(
        row(
            f"{name} taints",
            f"without {', '.join(absent)}" if absent else "all",
            "all",
            f"K3s sets taints only when a node registers: k3s kubectl taint node {name} {' '.join(absent)}",
        )
    )
    if kubelet is not None:
        differs = subset(kubelet, {k: v for k, v in wanted["kubelet"].items() if k not in ("apiVersion", "kind")})
        rows.append(row(f"{name} kubelet configuration", "; ".join(differs) or "as asked", "as asked", AGAIN))
    return rows


def wait_nodes(
    kubectl: Kubectl,
    wanted: Mapping[str, Mapping[str, Any]],
    timeout_seconds: int,
    settle_seconds: float = SETTLE_SECONDS,
    poll_seconds: float = POLL_SECONDS,
) -> list[Check]:
    """Rows of a verdict for all nodes, once all are Ready: as soon as every row is good, or as they are after a while.

    The first look may meet the Ready and the addresses of before a restart.
    """
    found = kubectl.wait_ready(list(wanted), timeout_seconds)
    end = time.monotonic() + settle_seconds
    while True:
        over = time.monotonic() >= end
        try:
            rows = [
                one
                for name, what in wanted.items()
                for one in node_checks(name, what, found.get(name), kubectl.kubelet(name))
            ]
            if over or all(one["ok"] for one in rows):
                return rows
        except K3sError:
            if over:
                raise
        time.sleep(poll_seconds)
        found = kubectl.nodes_when_up(timeout_seconds)


def pods_by_uid(pods: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {pod["metadata"]["uid"]: pod for pod in pods}


def stale_pods(pods: Sequence[Mapping[str, Any]], uids: Sequence[str]) -> tuple[list[str], list[str]]:
    """Pods (NAMESPACE/NAME) with limited memory for RDMA: those that a controller makes again, and the others."""
    again: list[str] = []
    alone: list[str] = []
    for uid, pod in pods_by_uid(pods).items():
        if uid in uids:
            name = f"{pod['metadata']['namespace']}/{pod['metadata']['name']}"
            (again if pod["metadata"].get("ownerReferences") else alone).append(name)
    return sorted(again), sorted(alone)


# --------------------------------------------------------------------------------------------------------------------
# Resources of device plugins
# --------------------------------------------------------------------------------------------------------------------

CAP_IPC_LOCK = 1 << 14
RESOURCE_REMEDY = {
    "nvidia.com": "the log of the NVIDIA device plugin on it; it needs the label nvidia.com/gpu.present=true, the "
    "runtime class nvidia, and version 0.17.4 or newer on a GB10",
    "rdma": "the log of the RDMA device plugin on it; the rail needs its cable, and the modules rdma_ucm and ib_umad",
}
# One line for each device that can be opened, then the limit, the user and the effective capabilities.
PROBE = (
    'for d in /dev/infiniband/uverbs*; do { : <>"$d"; } 2>/dev/null && echo "opened $d"; done; '
    'echo "memlock $(ulimit -l)"; echo "uid $(id -u)"; sed -n "s/^CapEff:/capabilities/p" /proc/self/status; '
    "exec sleep 600"
)


def fits(found: str, wanted: str) -> bool:
    """``wanted`` is a number, which must be exactly that, or ``>N``."""
    number = amount(found)
    if not isinstance(number, float):
        return False
    limit = amount(str(wanted).lstrip(">"))
    return isinstance(limit, float) and (number > limit if str(wanted).startswith(">") else number == limit)


def resource_checks(nodes: Mapping[str, Mapping[str, Any]], wanted: Mapping[str, Mapping[str, Any]]) -> list[Check]:
    """One row a node and resource: what the scheduler may give away there.

    :param wanted: ``{"spark1": {"nvidia.com/gpu": "1", "rdma/rail0": ">0"}}``.
    """
    rows = []
    for name, resources in wanted.items():
        offered = nodes.get(name, {}).get("status", {}).get("allocatable", {})
        for resource, rule in resources.items():
            found = str(offered.get(resource, "0"))
            remedy = RESOURCE_REMEDY.get(resource.partition("/")[0], "the log of its device plugin")
            rows.append(row(f"{name} {resource}", found, str(rule), remedy, fits(found, str(rule))))
    return rows


def wait_resources(
    kubectl: Kubectl,
    wanted: Mapping[str, Mapping[str, Any]],
    timeout_seconds: float,
    poll_seconds: float = 10,
    useless: Callable[[], bool] = lambda: False,
) -> list[Check]:
    """The rows once all are ok, or as they are when the time is over or waiting is useless."""
    end = time.monotonic() + timeout_seconds
    while True:
        rows = resource_checks(kubectl.nodes(), wanted)
        if all(one["ok"] for one in rows) or useless() or time.monotonic() >= end:
            return rows
        time.sleep(poll_seconds)


def troubles(kubectl: Kubectl, namespace: str = "kube-system") -> str:
    """What a person would look at next: pods that do not run with their reason, and the last warnings."""
    lines = []
    for pod in kubectl.json("get", "pods", "-n", namespace, "-o", "json")["items"]:
        states = pod["status"].get("containerStatuses", [])
        reasons = [s["state"]["waiting"].get("reason", "") for s in states if "waiting" in s.get("state", {})]
        reasons += [
            c.get("message", "") for c in pod["status"].get("conditions", []) if c.get("reason") == "Unschedulable"
        ]
        if pod["status"].get("phase") not in ("Running", "Succeeded") or reasons:
            lines.append(f"pod {pod['metadata']['name']}: {pod['status'].get('phase')} {'; '.join(reasons)}".rstrip())
    events = kubectl.json("get", "events", "-n", namespace, "--field-selector=type=Warning", "-o", "json")["items"]
    for event in events[-5:]:
        lines.append(f"event {event['involvedObject'].get('name', '')}: {event.get('message', '')}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Question:
    """What pods are asked: a command that goes on running, the word after which it has said all, and who judges it."""

    command: Sequence[str]
    last_word: str
    judge: Callable[[str, str, Sequence[str]], list[Check]]
    # With NVIDIA's runtime, which shows the GPU without asking for it.
    nvidia: bool = False


def rails(resources: Sequence[str]) -> list[str]:
    return [resource for resource in resources if resource.startswith("rdma/")]


def probe_pod(node: str, image: str, resources: Sequence[str], question: Question) -> dict[str, Any]:
    """A pod that asks for one of each rail on one node, in the network of the host as the engine's.

    Never for the GPU: while something serves, none is free.
    """
    environment = [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}] if question.nvidia else []
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"goodput-probe-{node}", "namespace": "kube-system"},
        "spec": {
            "nodeSelector": {"kubernetes.io/hostname": node},
            **({"runtimeClassName": "nvidia"} if question.nvidia else {}),
            "hostNetwork": True,
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "tolerations": [{"operator": "Exists"}],
            "containers": [
                {
                    "name": "probe",
                    "image": image,
                    "imagePullPolicy": "Never",
                    "command": list(question.command),
                    "env": environment,
                    "securityContext": {"runAsUser": 0, "capabilities": {"add": ["IPC_LOCK"]}},
                    "resources": {"limits": dict.fromkeys(rails(resources), "1")},
                }
            ],
        },
    }


def probe_checks(node: str, said: str, rails: int) -> list[Check]:
    """Rows from what a probe pod printed: every rail's device opens, and memory can be locked."""
    opened = re.findall(r"^opened (\S+)$", said, re.M)
    memlock = re.search(r"^memlock (\S+)$", said, re.M)
    capabilities = re.search(r"^capabilities\s+([0-9a-f]+)$", said, re.M)
    user = re.search(r"^uid (\d+)$", said, re.M)
    effective = bool(capabilities and int(capabilities[1], 16) & CAP_IPC_LOCK)
    return [
        row(
            f"{node} RDMA devices that open in a pod",
            ", ".join(opened) or "none",
            f"{rails} or more",
            "a device that is only bind-mounted is refused by the device cgroup: it must come from the device plugin",
            len(opened) >= rails,
        ),
        row(
            f"{node} locked memory in a pod",
            memlock[1] if memlock else "not said",
            "unlimited",
            "LimitMEMLOCK in the unit's drop-in, then make the pod again",
        ),
        row(
            f"{node} IPC_LOCK in a pod",
            f"uid {user[1] if user else '?'}, {'effective' if effective else 'not effective'}",
            "effective",
            "run as root: the capability does nothing for another user",
            effective,
        ),
    ]


DEVICES = Question(
    ["sh", "-c", PROBE],
    "capabilities",
    lambda node, said, resources: probe_checks(node, said, len(rails(resources))),
)


def printed(kubectl: Kubectl, pod: str, last_word: str, attempts: int = 24, wait_seconds: float = 5) -> str:
    """What a probe pod said, once it said all: a container counts as ready before its program has run."""
    said = ""
    for attempt in range(attempts):
        if attempt:
            time.sleep(wait_seconds)
        said = kubectl("logs", "-n", "kube-system", pod)
        if last_word in said:
            break
    return said


def probe(
    kubectl: Kubectl,
    image: str,
    wanted: Mapping[str, Mapping[str, Any]],
    folder: Path,
    timeout_seconds: int,
    question: Question = DEVICES,
) -> list[Check]:
    """Run a probe pod on each node and judge what it printed; the pods go in any case."""
    pods = [probe_pod(name, image, list(resources), question) for name, resources in wanted.items()]
    path = folder / "goodput-probe.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": pods}))
    names = [f"pod/{pod['metadata']['name']}" for pod in pods]
    rows: list[Check] = []
    try:
        kubectl("apply", "-f", str(path))
        try:
            kubectl(
                "wait", "-n", "kube-system", "--for=condition=Ready", f"--timeout={timeout_seconds}s", *names,
                timeout_seconds=timeout_seconds + 60,
            )  # fmt: skip
        except K3sError as error:
            raise K3sError(f"{troubles(kubectl)}\n{error}") from error
        for name, resources in wanted.items():
            said = printed(kubectl, f"goodput-probe-{name}", question.last_word)
            rows += question.judge(name, said, list(resources))
    finally:
        kubectl("delete", "--ignore-not-found", "--wait=true", "-f", str(path))
        path.unlink()
    return rows
