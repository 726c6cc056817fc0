# Apache-2.0 (see LICENSE)
"""What objects are rendered from, checked before the first one is made: nodes, a release set, a site's choices.

A node is a mapping: ``name`` (its name in Kubernetes, which must be its inventory name) and ``rails``, what
``goodput.spark.rails`` returns: ``netdev``, ``rdma_device`` and ``addresses`` (``192.168.100.1/24``) each. The first
one may need its ``management_address``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ..kv_plan.checks import PlanInputError, nearest

RAILS = 2
#: RFC 1123 label, as namespaces and ours must be; a node's name may have dots.
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
NODE_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,61}[a-z0-9])?\Z")
DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
#: The operator labels pods with ``<namespace>-<graph>-<8 of a hash>``, and a label's value has at most 63 characters.
WORKER_HASH_CHARACTERS = 9


@dataclass(frozen=True)
class Rail:
    netdev: str
    rdma_device: str
    address: str


@dataclass(frozen=True)
class Node:
    name: str
    rails: tuple[Rail, ...] = ()
    #: Needed of the first node, and only by a plan that names it.
    management_address: str = ""


@dataclass(frozen=True)
class Choices:
    """What a site decides. Times in seconds; paths are on the nodes."""

    namespace: str = "goodput"
    graph: str = "goodput"
    #: Empty: ``/srv/goodput/models/<the plan's model>``.
    model_path: str = ""
    #: Compiled kernels and what else a worker may write.
    cache_path: str = "/var/cache/goodput/kube"
    #: Where the endpoint is reached on every node; 0: only inside the cluster.
    node_port: int = 30800
    drain_seconds: int = 60
    #: Loading 75 GB takes half an hour on a Spark, an hour when cold.
    ready_timeout_seconds: int = 3600
    lmcache_ready_timeout_seconds: int = 300
    #: How long a start of a real engine waits for free memory, as ``dynamo_memory_wait_seconds`` on systemd.
    memory_wait_seconds: int = 300
    #: What a start of LMCache makes of files that earlier runs left in L2 (``keep``, ``purge``), and how much of the
    #: cap they may take, in per cent.
    l2_state: str = "keep"
    l2_keep_percent: int = 80
    #: How many pods may hold a rail at once.
    rail_shares: int = 64
    #: Only where the PodMonitor CRD exists.
    pod_monitors: bool = False
    #: ``{runtime: sha256:…}``
    digests: Mapping[str, str] = field(default_factory=dict)
    #: Charts as base64 of their archive, for nodes without the internet.
    chart_contents: Mapping[str, str] = field(default_factory=dict)
    #: Images by tag where no digest is known: to look at, not to apply.
    draft: bool = False


def choices_from(given: Mapping[str, Any] | None) -> Choices:
    """Checked choices; an unknown name or a wrong type is refused."""
    known = {item.name: type(item.default) for item in fields(Choices) if not callable(item.default_factory)}
    for name, value in (given or {}).items():
        wanted = known.get(name, Mapping if name in ("digests", "chart_contents") else None)
        if wanted is None:
            names = [item.name for item in fields(Choices)]
            raise PlanInputError(f"choices.{name}", value, "unknown key", nearest(name, names))
        if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
            raise PlanInputError(f"choices.{name}", value, f"must be of type {wanted.__name__}", "correct the value")
    choices = Choices(**(given or {}))
    for key in ("namespace", "graph"):
        if not LABEL.match(getattr(choices, key)):
            rule = "must be lower case letters, digits and -, at most 63, neither first nor last a -"
            raise PlanInputError(f"choices.{key}", getattr(choices, key), rule, "choose another name")
    longest = 63 - WORKER_HASH_CHARACTERS
    together = f"{choices.namespace}-{choices.graph}"
    if len(together) > longest:
        rule = f"namespace and graph together have {len(together)} characters, at most {longest}"
        raise PlanInputError("choices.graph", choices.graph, rule, "choose a shorter name")
    if choices.node_port and not 30000 <= choices.node_port <= 32767:
        raise PlanInputError("choices.node_port", choices.node_port, "must be 30000 to 32767, or 0", "choose another")
    for key in (
        "drain_seconds",
        "ready_timeout_seconds",
        "lmcache_ready_timeout_seconds",
        "memory_wait_seconds",
        "rail_shares",
    ):
        if getattr(choices, key) < 1:
            raise PlanInputError(f"choices.{key}", getattr(choices, key), "must be 1 or more", "correct the value")
    if choices.l2_state not in ("keep", "purge"):
        raise PlanInputError("choices.l2_state", choices.l2_state, "must be keep or purge", "correct the value")
    if not 0 <= choices.l2_keep_percent <= 95:
        rule = "must be 0 to 95, so that new objects have room"
        raise PlanInputError("choices.l2_keep_percent", choices.l2_keep_percent, rule, "correct the value")
    for key in ("model_path", "cache_path"):
        path = getattr(choices, key)
        if path and (not path.startswith("/") or ".." in path.split("/")):
            raise PlanInputError(f"choices.{key}", path, "must be an absolute path without ..", "correct the path")
    return choices


def _rail(node: str, index: int, given: Any) -> Rail:
    name = f"{node}: rails[{index}]"
    if not isinstance(given, Mapping):
        raise PlanInputError(name, given, "must be a mapping", "give what goodput.spark.rails returns")
    values = {}
    for key in ("netdev", "rdma_device"):
        if not given.get(key) or not isinstance(given[key], str):
            raise PlanInputError(f"{name}.{key}", given.get(key), "must be a name", "run the role rdma first")
        values[key] = given[key]
    addresses = [text.partition("/")[0] for text in given.get("addresses") or [] if ":" not in text]
    if not addresses:
        raise PlanInputError(f"{name}.addresses", given.get("addresses"), "must have an IPv4 address", "run role rdma")
    return Rail(address=addresses[0], **values)


def nodes_from(given: Any) -> list[Node]:
    """Checked nodes. All have the same rails, because one pod template and one plugin configuration serve them all."""
    if isinstance(given, (str, Mapping)) or not isinstance(given, Sequence) or not given:
        raise PlanInputError("nodes", given, "must be a list of at least one node", "give one mapping a node")
    nodes = []
    for index, item in enumerate(given, 1):
        name = str(item.get("name", "")) if isinstance(item, Mapping) else ""
        if not NODE_NAME.match(name):
            rule = "must have a name of lower case letters, digits, - and ., at most 63"
            raise PlanInputError(f"node {index}", name or item, rule, "rename the host in the inventory")
        rails = tuple(_rail(name, number, rail) for number, rail in enumerate(item.get("rails") or []))
        if len(rails) not in (0, RAILS):
            raise PlanInputError(
                f"{name}: rails", len(rails), f"must be {RAILS}, or none", "check the cable; role rdma"
            )
        nodes.append(Node(name, rails, str(item.get("management_address", ""))))
    for node in nodes:
        if [other.name for other in nodes].count(node.name) > 1:
            raise PlanInputError("nodes", node.name, "stands twice", "give every node its own name")
        for number, (first, other) in enumerate(zip(nodes[0].rails, node.rails, strict=False)):
            if (first.netdev, first.rdma_device) != (other.netdev, other.rdma_device):
                raise PlanInputError(
                    f"{node.name}: rail {number}",
                    f"{other.netdev} ({other.rdma_device})",
                    f"is {first.netdev} ({first.rdma_device}) on {nodes[0].name}, and one name serves all nodes",
                    "put the cable into the same port on every node",
                )
    bare = [node.name for node in nodes if len(node.rails) != len(nodes[0].rails)]
    if bare:
        raise PlanInputError(f"{bare[0]}: rails", 0, f"{nodes[0].name} has {len(nodes[0].rails)}", "run the role rdma")
    return nodes


@dataclass(frozen=True)
class Release:
    """The Kubernetes part of a release set."""

    name: str
    architecture: str
    charts: Mapping[str, Mapping[str, Any]]
    images: Mapping[str, Mapping[str, str]]
    #: Empty where the chart's CRDs have no field for it.
    runtime_version: str
    namespace_labels: Mapping[str, str]


def release_from(given: Mapping[str, Any]) -> Release:
    """The Kubernetes part of ``goodput_release_set``; a set without one is refused."""
    name, part = str(given.get("name", "?")), given.get("kubernetes")
    if not isinstance(part, Mapping):
        rule = "has no section kubernetes, so it can not run there"
        raise PlanInputError("release set", name, rule, "choose current or article (goodput_release)")
    return Release(
        name,
        part["architecture"],
        part["charts"],
        part["images"],
        part["graph"]["runtime_version"],
        part["namespace_labels"],
    )


def image(release: Release, choices: Choices, name: str) -> str:
    """A reference by digest. The site's digest wins; a tag only in a draft.

    :raises PlanInputError: neither the release set nor the site gives a digest, or it is none.
    """
    for key, given in choices.digests.items():
        if key not in release.images:
            raise PlanInputError(f"digests.{key}", given, "unknown", nearest(key, list(release.images)))
        if not DIGEST.match(given):
            rule = "must be sha256: and 64 hexadecimal digits"
            raise PlanInputError(f"digest of image {key}", given, rule, "copy it from the registry or the import")
    entry = release.images[name]
    digest = choices.digests.get(name) or entry["digest"]
    if digest:
        return f"{entry['name']}@{digest}"
    if choices.draft:
        return f"{entry['name']}:{entry['tag']}"
    raise PlanInputError(
        f"digest of image {name}",
        "",
        f"release set {release.name} knows none of {entry['name']}:{entry['tag']}, and a tag may change",
        f"give it (--digest {name}=sha256:…, choices.digests); --draft renders tags, to look at",
    )
