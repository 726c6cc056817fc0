# Apache-2.0 (see LICENSE)
"""From a site's choices to K3s's own files: config.yaml of each node, the kubelet's drop-in, the admin's kubeconfig.

Pure functions of what the inventory says and the nodes answered; ``K3sError`` names the value, the rule and the remedy.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError, Version, parse
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects.inputs import NODE_NAME
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects.pods import TOLERATIONS

DATA_DIR = "/var/lib/rancher/k3s"
TOKEN_FILE = "/etc/rancher/k3s/token"
GPU_LABEL = "nvidia.com/gpu.present"
KUBECONFIG_NAME = "goodput"
MIB = 1 << 20
# Reservations are rounded up, so that a few MiB more at rest do not restart the node.
ROUND_MIB = 64
# What upstream's kubelet evicts at when nobody says otherwise.
EVICTION_FLOOR_MIB = 100
QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|Ki|Mi|Gi|Ti|M|G|T|%)?")
# A name may have a prefix that is a DNS name: example.com/role
LABEL_KEY = re.compile(r"([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
LABEL_VALUE = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")
TAINT_EFFECTS = ("NoSchedule", "PreferNoSchedule", "NoExecute")
# Key and effect of the hard taints that pods of ours tolerate.
TOLERATED = [(one["key"], one["effect"]) for one in TOLERATIONS]
# Keys that the role decides, and what to set instead.
OWNED = {
    "config": "nothing: the role writes the file that K3s reads",
    "data-dir": "nothing: L2, reset and verify count on its place",
    "token": "nothing: the first server makes the token and it never leaves its file",
    "token-file": "nothing: the first server makes the token",
    "agent-token": "nothing: the first server makes the token",
    "agent-token-file": "nothing: the first server makes the token",
    "server": "k3s_server_node",
    "cluster-init": "nothing: one server keeps its data in SQLite, and embedded etcd needs three",
    "node-name": "the inventory name",
    "node-ip": "k3s_node_ip",
    "flannel-iface": "k3s_flannel_interface",
    "flannel-backend": "k3s_flannel_backend",
    "node-label": "k3s_node_labels",
    "node-taint": "k3s_node_taints",
    "disable": "k3s_disable",
    "https-listen-port": "k3s_api_port",
    "write-kubeconfig": "k3s_kubeconfig",
    "write-kubeconfig-mode": "nothing: the admin's kubeconfig stays readable by root only",
    "default-local-storage-path": "k3s_volumes_path",
}


@dataclass(frozen=True)
class Choices:
    """The role's inputs, as far as they decide what is written. ``labels`` and ``taints`` are those of every node."""

    nodes: Sequence[str]
    server: str
    version: str
    keys: Mapping[str, Mapping[str, str]]
    api_port: int = 6443
    flannel_backend: str = "vxlan"
    disable: Sequence[str] = ()
    volumes_path: str = ""
    labels: Mapping[str, Any] = field(default_factory=dict)
    taints: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)
    server_config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class NodeChoice:
    """What differs between nodes. ``interface`` is empty until the node said what carries the address."""

    name: str
    address: str
    interface: str
    gpu: bool = False


# --------------------------------------------------------------------------------------------------------------------
# config.yaml
# --------------------------------------------------------------------------------------------------------------------


def known_keys(keys: Mapping[str, Mapping[str, str]], version: Version) -> tuple[str, Mapping[str, str]]:
    """The newest list that is not newer than the version: of which minor version it is, and ``key -> "WHERE KIND"``.

    :param keys: ``{"1.32": {"node-ip": "both list", "disable": "server list"}}``.
    """
    lists = {tuple(int(part) for part in str(since).split(".")): table for since, table in keys.items()}
    usable = [since for since in lists if since <= (version.major, version.minor)]
    if not usable:
        oldest = ".".join(map(str, min(lists)))
        raise K3sError(
            f"found k3s_version {version}; required: {oldest} or newer, whose keys are known; fix: a newer one"
        )
    return ".".join(map(str, max(usable))), lists[max(usable)]


def key_problems(
    config: Mapping[str, Any], known: Mapping[str, str], where: str, variable: str, minor: str
) -> list[str]:
    """Why K3s would not take these keys. K3s itself only warns about a misspelt key and goes on without it.

    :param minor: of which minor version ``known`` is.
    """
    problems = []
    for name, value in config.items():
        key = str(name).removesuffix("+")
        if key in OWNED:
            problems.append(
                f"found {name} in {variable}; required: no key that the role decides; fix: use {OWNED[key]}"
            )
            continue
        if key not in known:
            near = next(iter(difflib.get_close_matches(key, known, n=1, cutoff=0.6)), "")
            problems.append(
                f"found {name} in {variable}; required: a key of K3s's command line as of {minor}; fix: "
                + (f"correct it to {near}" if near else "remove it")
            )
            continue
        side, kind = known[key].split()
        if side == "server" and where == "agent":
            problems.append(
                f"found {name} in {variable}; required: keys that agents know; fix: move it to k3s_server_config"
            )
        elif not kind_fits(value, kind):
            problems.append(f"found {name}: {value!r} in {variable}; required: {WORDS[kind]}; fix: correct the value")
    return problems


WORDS = {
    "value": "one text or number",
    "values": "one text, or a list",
    "list": "a list",
    "flag": "true or false",
    "int": "an integer",
}


def kind_fits(value: Any, kind: str) -> bool:
    if kind == "flag":
        return isinstance(value, bool)
    if kind == "int":
        return isinstance(value, int) and not isinstance(value, bool)
    if kind == "list" or (kind == "values" and isinstance(value, list)):
        return isinstance(value, list) and all(isinstance(item, str | int) for item in value)
    return isinstance(value, str | int | float) and not isinstance(value, bool)


def choice_problems(choices: Choices) -> list[str]:
    """Everything in the inputs that can be judged without looking at a node."""
    problems = []
    if choices.server not in choices.nodes:
        problems.append(
            f"found k3s_server_node {choices.server!r}; required: one of {', '.join(choices.nodes)}; fix: name a node"
        )
    problems += [
        f"found node name {name} in k3s_nodes; required: lower case letters, digits, '-' and '.', at most 63, as "
        f"Kubernetes wants it; fix: rename the host in the inventory"
        for name in choices.nodes
        if not NODE_NAME.match(name)
    ]
    try:
        minor, known = known_keys(choices.keys, parse(choices.version))
    except K3sError as error:
        return [*problems, str(error)]
    problems += key_problems(choices.config, known, "agent", "k3s_config", minor)
    problems += key_problems(choices.server_config, known, "server", "k3s_server_config", minor)
    problems += [
        f"found {key} in k3s_config and k3s_server_config; required: one place; fix: remove one"
        for key in sorted(set(choices.config) & set(choices.server_config))
    ]
    for key, value in choices.labels.items():
        if not LABEL_KEY.fullmatch(str(key)) or not LABEL_VALUE.fullmatch(str(value)) or isinstance(value, bool):
            problems.append(
                f"found label {key}={value} in k3s_node_labels; required: letters, digits, '-', '_' and '.', true and "
                f"false in quotes; fix: correct it"
            )
    for taint in choices.taints:
        head, _, effect = str(taint).rpartition(":")
        key, _, value = head.partition("=")
        if effect not in TAINT_EFFECTS or not LABEL_KEY.fullmatch(key) or not LABEL_VALUE.fullmatch(value):
            problems.append(
                f"found taint {taint!r} in k3s_node_taints; required: KEY=VALUE:EFFECT with one of "
                f"{', '.join(TAINT_EFFECTS)}; fix: correct it"
            )
        elif effect != "PreferNoSchedule" and (key, effect) not in TOLERATED:
            # Nor does K3s's CoreDNS tolerate most others (k3s-io/k3s manifests/coredns.yaml@a3961a389).
            problems.append(
                f"found taint {taint} in k3s_node_taints; required: PreferNoSchedule or "
                f"{' or '.join(':'.join(pair) for pair in TOLERATED)}, because every node gets it and what serves "
                f"tolerates no other; fix: remove it, or taint one node: k3s kubectl taint node"
            )
    return problems


def choice_warnings(choices: Choices) -> list[str]:
    """What was judged with less than this version's own list."""
    try:
        version = parse(choices.version)
        minor, _known = known_keys(choices.keys, version)
    except K3sError:
        return []
    if not (choices.config or choices.server_config) or minor == f"{version.major}.{version.minor}":
        return []
    return [
        f"found no list of the keys of {version}; required: that of its minor version (k3s_config and "
        f"k3s_server_config were compared with that of {minor}); fix: look for their keys in `k3s server --help`"
    ]


def labels_of(choices: Choices, node: NodeChoice) -> dict[str, str]:
    """The labels a node must have; the device plugin's DaemonSet starts only where ``GPU_LABEL`` is."""
    gpu = {GPU_LABEL: "true"} if node.gpu else {}
    return gpu | {str(key): str(value) for key, value in choices.labels.items()}


def server_url(address: str, port: int) -> str:
    host = f"[{address}]" if ":" in address else address
    return f"https://{host}:{port}"


def node_config(choices: Choices, node: NodeChoice, server_address: str) -> dict[str, Any]:
    """config.yaml of one node, keys sorted. Addresses are explicit: left alone K3s follows the default route."""
    is_server = node.name == choices.server
    config: dict[str, Any] = {
        "node-name": node.name,
        "node-ip": node.address,
        "flannel-iface": node.interface,
        "node-label": [f"{key}={value}" for key, value in sorted(labels_of(choices, node).items())],
        "node-taint": list(choices.taints),
        "token-file": TOKEN_FILE,
    }
    if is_server:
        config |= {
            "write-kubeconfig-mode": "0600",
            "flannel-backend": choices.flannel_backend,
            "disable": list(choices.disable),
            "https-listen-port": choices.api_port,
            "default-local-storage-path": choices.volumes_path,
            **choices.server_config,
        }
    else:
        config["server"] = server_url(server_address, choices.api_port)
    config |= choices.config
    return {key: config[key] for key in sorted(config) if config[key] not in ([], "")}


# --------------------------------------------------------------------------------------------------------------------
# The kubelet
# --------------------------------------------------------------------------------------------------------------------


def rounded_mib(size_bytes: float) -> int:
    return -(-int(size_bytes) // (ROUND_MIB * MIB)) * ROUND_MIB


def reservations(plan: Mapping[str, Any], node: str) -> dict[str, str]:
    """What the kubelet keeps for others, from the plan's budget: ``system``, ``kube``, ``eviction`` as quantities.

    The kubelet evicts late, at a quarter of the plan's reserve: an arrangement that keeps to its plan leaves it free.
    That helps against ordinary processes alone. The kubelet counts ``anon`` and ``file`` of the root cgroup
    (opencontainers/cgroups fs2/memory.go), and CUDA memory is neither.

    :raises K3sError: the plan does not have this node.
    """
    lines = {line["name"]: int(line["bytes"]) for line in plan["budget"].get(node, {}).get("lines", [])}
    try:
        system, kube, reserve = (lines[name] for name in ("OS at rest", "control plane", "reserve"))
    except KeyError as error:
        raise K3sError(
            f"found no {error} for {node} in the plan; required: the budget of this node; fix: run playbooks/plan.yml "
            f"in the same run, or set k3s_system_reserved, k3s_kube_reserved and k3s_eviction_hard"
        ) from None
    return {
        "system": f"{rounded_mib(system)}Mi",
        "kube": f"{rounded_mib(kube)}Mi",
        "eviction": f"{max(EVICTION_FLOOR_MIB, reserve // 4 // MIB)}Mi",
    }


def kubelet_config(
    system: Mapping[str, Any],
    kube: Mapping[str, Any],
    eviction: Mapping[str, Any],
    image_gc_high_percent: int,
    image_gc_low_percent: int,
) -> dict[str, Any]:
    """The kubelet's drop-in.

    :raises K3sError: a value that is no quantity, no ``memory.available``, or thresholds in the wrong order.
    """
    for variable, values in (
        ("k3s_system_reserved", system),
        ("k3s_kube_reserved", kube),
        ("k3s_eviction_hard", eviction),
    ):
        for key, value in values.items():
            if not QUANTITY.fullmatch(str(value)):
                raise K3sError(
                    f"found {key}: {value!r} in {variable}; required: a quantity such as 2048Mi; fix: correct it"
                )
    if "memory.available" not in eviction:
        raise K3sError(
            "found k3s_eviction_hard without memory.available; required: it, against ordinary processes that take "
            "memory (CUDA's it does not see); K3s's own defaults watch only disks; fix: add it, for example 1024Mi"
        )
    if not 0 < image_gc_low_percent < image_gc_high_percent <= 100:
        raise K3sError(
            f"found k3s_image_gc_low_percent {image_gc_low_percent} and k3s_image_gc_high_percent "
            f"{image_gc_high_percent}; required: 0 < low < high <= 100; fix: correct them"
        )
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "systemReserved": {key: str(value) for key, value in system.items()},
        "kubeReserved": {key: str(value) for key, value in kube.items()},
        "evictionHard": {key: str(value) for key, value in eviction.items()},
        "imageGCHighThresholdPercent": image_gc_high_percent,
        "imageGCLowThresholdPercent": image_gc_low_percent,
        # Swap is left as found, and a model that is loaded must not make the kubelet refuse to start.
        "failSwapOn": False,
    }


# --------------------------------------------------------------------------------------------------------------------
# The admin's kubeconfig
# --------------------------------------------------------------------------------------------------------------------


def kubeconfig_problems(former: str, url: str, path: str) -> list[str]:
    """Why the file on the controller is not replaced: it names another cluster."""
    if not former.strip():
        return []
    try:
        clusters = {entry["name"]: entry["cluster"]["server"] for entry in yaml.safe_load(former)["clusters"]}
    except (yaml.YAMLError, KeyError, TypeError):
        clusters = {}
    if clusters == {KUBECONFIG_NAME: url}:
        return []
    shown = ", ".join(f"{name} at {server}" for name, server in clusters.items()) or "no cluster that can be read"
    return [
        f"found {path} with {shown}; required: no file, or the one of {KUBECONFIG_NAME} at {url}; fix: move it away, "
        f"or set k3s_kubeconfig to another path"
    ]


def kubeconfig(text: str, url: str) -> str:
    """K3s's kubeconfig with the address that other machines reach, under a name of our own."""
    document = yaml.safe_load(text)
    cluster, user = document["clusters"][0]["cluster"], document["users"][0]["user"]
    name = KUBECONFIG_NAME
    answer = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": name, "cluster": {**cluster, "server": url}}],
        "users": [{"name": name, "user": user}],
        "contexts": [{"name": name, "context": {"cluster": name, "user": name}}],
        "current-context": name,
    }
    return yaml.safe_dump(answer, sort_keys=False)


def is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True
