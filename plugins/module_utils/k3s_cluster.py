# Apache-2.0 (see LICENSE)
"""What the cluster says of its nodes, compared with what was asked for. Runs on the server, through ``k3s kubectl``.

Every call of kubectl costs seconds on an emulated guest, so there is one wait, one list of nodes, one of pods where it
is needed, and one look at each kubelet's running configuration.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.k3s_node import BINARY, Run, run_command
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from ansible_collections.goodput.spark.plugins.module_utils.serving import Check, row

# On a node that the role itself cordoned, so that it can tell its own cordon from a person's.
DRAINED = "goodput.spark/drained"
# What must not be the case on a node that serves.
PRESSURES = ("MemoryPressure", "DiskPressure", "PIDPressure", "NetworkUnavailable")


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
        found = self.nodes()
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

    def nodes(self) -> dict[str, dict[str, Any]]:
        return {node["metadata"]["name"]: node for node in self.json("get", "nodes", "-o", "json")["items"]}

    def kubelet(self, name: str) -> dict[str, Any]:
        """The configuration that a node's kubelet runs with."""
        answer = self.json("get", "--raw", f"/api/v1/nodes/{name}/proxy/configz")
        return dict(answer["kubeletconfig"])


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


def node_checks(
    name: str,
    wanted: Mapping[str, Any],
    node: Mapping[str, Any] | None,
    kubelet: Mapping[str, Any] | None,
) -> list[Check]:
    """Rows of a verdict for one node.

    :param wanted: ``address``, ``version``, ``labels``, ``taints``, ``kubelet`` (the drop-in's document), ``server``.
    """
    again = "run playbooks/k3s.yml"
    if node is None:
        return [
            row(f"{name} in the cluster", "missing", "a node of this name", f"journalctl -u k3s-agent; then {again}")
        ]
    labels = node["metadata"].get("labels", {})
    info = node["status"]["nodeInfo"]
    rows = [
        row(f"{name} Ready", condition(node, "Ready"), "True", "journalctl -u k3s or k3s-agent on it"),
        row(f"{name} address", address(node), wanted["address"], f"{again}, or correct k3s_node_ip"),
        row(f"{name} kubelet", info["kubeletVersion"], wanted["version"], again),
        row(
            f"{name} is the server",
            "node-role.kubernetes.io/control-plane" in labels,
            wanted["server"],
            "k3s_server_node names another node than the one that runs the server",
        ),
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
    missing = label_changes(node, wanted["labels"])
    rows.append(row(f"{name} labels", ", ".join(f"{k}={v}" for k, v in missing.items()) or "all", "all", again))
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
        rows.append(row(f"{name} kubelet configuration", "; ".join(differs) or "as asked", "as asked", again))
    return rows


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
