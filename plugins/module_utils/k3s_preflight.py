# Apache-2.0 (see LICENSE)
"""Judge all nodes before K3s changes anything: what the nodes answered in, findings out.

A pure function of ``node_facts`` and ``k3s_probe`` results, in the same findings and the same table as the role
preflight, whose checks it shares.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils import k3s_config as config
from ansible_collections.goodput.spark.plugins.module_utils import k3s_release as release
from ansible_collections.goodput.spark.plugins.module_utils.preflight import (
    GIB,
    WARNING,
    Finding,
    Limits,
    Port,
    Report,
    check_clocks,
    check_identity,
    check_kubernetes,
    check_ports,
    check_route,
    gib,
)

OWN_UNITS = ("k3s.service", "k3s-agent.service")


@dataclass(frozen=True)
class Bounds:
    """``allow_rail`` is the consent to an address on a rail; ``in_run`` the nodes that this play changes;

    ``kubeconfig`` is where the admin's kubeconfig goes on the controller.
    """

    disk_required_gib: float = 0.0
    clock_offset_limit_seconds: float = 5.0
    allow_rail: bool = False
    in_run: Sequence[str] = ()
    kubeconfig: str = ""


@dataclass(frozen=True)
class Seen:
    """One node: its choice, what node_facts said (a Report with clock sample), and what k3s_probe said."""

    choice: config.NodeChoice
    report: Report
    probe: Mapping[str, Any] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return self.choice.name

    @property
    def installed(self) -> str:
        return str(self.probe.get("binary", {}).get("version", ""))


def carrier_of(address: str, network: Mapping[str, Any]) -> str:
    """The netdev that has this address; empty if none has."""
    for name, netdev in network["netdevs"].items():
        if any(entry["address"] == address for entry in netdev["addresses"]):
            return str(name)
    return ""


def check_address(seen: Seen, bounds: Bounds) -> Iterator[Finding]:
    """node-ip and flannel-iface are explicit, on this node, wired, and on a rail only if chosen."""
    assert seen.report.facts is not None
    network, choice = seen.report.facts["network"], seen.choice
    wired = sorted(
        entry["address"]
        for netdev in network["netdevs"].values()
        if netdev["physical"] and not netdev["wireless"] and not netdev["rdma"]
        for entry in netdev["addresses"]
        if entry["scope"] in ("", "global") and ":" not in entry["address"]
    )
    offer = f"set k3s_node_ip to a wired address: {', '.join(wired)}" if wired else "connect the wired port"
    if not config.is_address(choice.address):
        yield Finding(choice.name, "node-ip", choice.address or "nothing", "an IP address", offer)
        return
    carrier = carrier_of(choice.address, network)
    if not carrier:
        yield Finding(
            choice.name, "node-ip", f"{choice.address} is on no netdev of this node", "its own address", offer
        )
        return
    if choice.interface and choice.interface != carrier:
        yield Finding(
            choice.name,
            "flannel-iface",
            f"{choice.interface}, but {choice.address} is on {carrier}",
            "the netdev of node-ip: pods of other nodes are reached there",
            f"set k3s_flannel_interface to {carrier}, or leave it empty",
        )
    netdev = network["netdevs"][carrier]
    if netdev["wireless"]:
        yield Finding(
            choice.name,
            "node-ip",
            f"{choice.address} is on the Wi-Fi netdev {carrier}",
            "a wired netdev: Wi-Fi drops when it saves power, and the node with it",
            offer,
        )
    elif netdev["rdma"] and not bounds.allow_rail:
        yield Finding(
            choice.name,
            "node-ip",
            f"{choice.address} is on the rail {carrier}",
            "a management netdev: a rail vanishes without its cable, and no third node reaches it",
            f"{offer}, or choose the rail with k3s_allow_rail: true",
        )


def check_system(seen: Seen, bounds: Bounds) -> Iterator[Finding]:
    """Machine type, kernel, disk, and what is mounted where K3s keeps its data."""
    assert seen.report.facts is not None
    machine = seen.report.facts["os"]["architecture"]
    if machine not in release.ARCHES:
        yield Finding(seen.name, "architecture", machine, f"one of {', '.join(release.ARCHES)}", "use another node")
    if not seen.probe["cgroup_memory"]:
        yield Finding(
            seen.name,
            "cgroup",
            "no cgroup v2 with a memory controller",
            "cgroup v2: K3s has no other since 1.35",
            "boot without systemd.unified_cgroup_hierarchy=0 and without cgroup_disable=memory",
        )
    if seen.probe["missing_modules"]:
        yield Finding(
            seen.name,
            "kernel-module",
            f"no {', '.join(seen.probe['missing_modules'])}",
            "the modules of pod network and images",
            "boot the distribution's kernel with its modules",
        )
    # What is installed already has taken its space.
    needed = 0.0 if seen.installed else bounds.disk_required_gib
    if seen.probe["free_bytes"] < needed * GIB:
        yield Finding(
            seen.name,
            "disk",
            f"{gib(seen.probe['free_bytes'])} free at {config.DATA_DIR}",
            f"{needed:g} GiB or more: the runtime image alone has 23 GB, and unpacks beside itself",
            "make room, or set k3s_disk_required_gib for a smaller image",
        )
    for mount in seen.probe["foreign_mounts"]:
        yield Finding(
            seen.name,
            "mount",
            mount,
            f"no disk below {config.DATA_DIR}: K3s's own uninstall empties what is mounted there",
            "mount it elsewhere, for example at /srv/goodput/l2 (nvme_l2_mount_point)",
        )


def check_gpu(seen: Seen) -> Iterator[Finding]:
    """A node with the NVIDIA driver needs the runtime that K3s finds when it starts."""
    assert seen.report.facts is not None
    if seen.report.facts["driver"] and not seen.probe["nvidia"]["program"]:
        yield Finding(
            seen.name,
            "nvidia-runtime",
            f"driver {seen.report.facts['driver']} without nvidia-container-runtime",
            "it on the PATH: else no pod gets the GPU",
            "sudo apt install nvidia-container-toolkit (DGX OS brings it)",
        )


def check_foreign(seen: Seen) -> Iterator[Finding]:
    for words in seen.probe["foreign_kubelets"]:
        yield Finding(
            seen.name,
            "kubernetes",
            words,
            "no other Kubernetes: two kubelets share ports, cgroups and network rules",
            "end it (docker ps, docker stop), or use another node",
        )


def check_token(seen: Seen) -> Iterator[Finding]:
    """The token of an installed node. A missing one is found by the task that would make it."""
    token = seen.probe["token"]
    if token["exists"] and (token["mode"] != "0600" or token["uid"] != 0):
        yield Finding(
            seen.name,
            "token",
            f"{config.TOKEN_FILE} with mode {token['mode']} of uid {token['uid']}",
            "0600 of root: whoever reads it can join the cluster",
            "the role corrects the mode; if others had it, change it: k3s token rotate on the server",
            WARNING,
        )


def check_side(seen: Seen, choices: config.Choices) -> Iterator[Finding]:
    """A node does not change sides: its data is a server's or an agent's."""
    wanted = "server" if seen.name == choices.server else "agent"
    other = "agent" if wanted == "server" else "server"
    if seen.probe["units"][other]["loaded"]:
        yield Finding(
            seen.name,
            "server",
            f"this node is the {other}",
            f"the {wanted}, as k3s_server_node {choices.server} says",
            f"set k3s_server_node to the node that runs the server, or reset {seen.name} first",
        )


def check_versions(nodes: Sequence[Seen], choices: config.Choices, bounds: Bounds) -> Iterator[Finding]:
    """Floor, no way back, no minor left out; no agent newer than its server or too far behind it."""
    try:
        wanted = release.parse(choices.version)
    except release.K3sError:
        return
    floor = release.floor_problem(wanted)
    if floor:
        yield Finding("all", "version", f"k3s_version {wanted}", floor, "choose a newer K3s")
    after: dict[str, release.Version] = {}
    for seen in nodes:
        if seen.name in bounds.in_run:
            after[seen.name] = wanted
            if seen.installed:
                problem = release.step_problem(release.parse(seen.installed), wanted)
                if problem:
                    fix = (
                        "keep the newer version"
                        if wanted < release.parse(seen.installed)
                        else "take one step at a time"
                    )
                    yield Finding(seen.name, "version", f"{wanted}, with {seen.installed} installed", problem, fix)
        elif seen.installed:
            after[seen.name] = release.parse(seen.installed)
    server = after.get(choices.server)
    if server is None:
        yield Finding(
            choices.server,
            "server",
            "not in this run, and no K3s on it",
            "a server that agents can join",
            "run without --limit",
        )
        return
    for name, version in after.items():
        problem = release.skew_problem(version, server) if name != choices.server else ""
        if problem:
            yield Finding(name, "skew", str(version), problem, "run without --limit: the server goes first")


def evaluate(
    nodes: Sequence[Seen], choices: config.Choices, bounds: Bounds, former_kubeconfig: str = ""
) -> list[Finding]:
    """All findings of all nodes, in the order of the nodes.

    :param former_kubeconfig: what is in ``bounds.kubeconfig`` now.
    """
    refusals = config.choice_problems(choices)
    server = next((seen.choice.address for seen in nodes if seen.name == choices.server), "")
    refusals += config.kubeconfig_problems(
        former_kubeconfig, config.server_url(server, choices.api_port), bounds.kubeconfig
    )
    findings = [Finding("all", "input", *split_refusal(text)) for text in refusals]
    findings += [Finding("all", "input", *split_refusal(text), WARNING) for text in config.choice_warnings(choices)]
    ports = [
        Port(choices.api_port, "the Kubernetes API", first_only=True),
        Port(6444, "the agent's way to the API"),
        Port(10250, "the kubelet"),
    ]
    limits = Limits(
        clock_offset_limit_seconds=bounds.clock_offset_limit_seconds,
        platform="k3s",
        first_node=choices.server,
        ports=ports,
        own_units=OWN_UNITS,
    )
    for seen in nodes:
        facts = seen.report.facts
        if facts is None:
            if seen.name in bounds.in_run or seen.name == choices.server:
                error = seen.report.error or "no answer"
                findings.append(Finding(seen.name, "ssh", error, "an answer over SSH", "see the role preflight"))
            continue
        findings += check_address(seen, bounds)
        findings += check_route(seen.name, facts, limits, {})
        findings += check_ports(seen.name, facts, limits, {})
        findings += check_kubernetes(seen.name, facts, limits, {})
        findings += check_foreign(seen)
        findings += check_system(seen, bounds)
        findings += check_gpu(seen)
        findings += check_token(seen)
        findings += check_side(seen, choices)
    answered = [replace(seen.report, facts=seen.report.facts) for seen in nodes if seen.report.facts is not None]
    findings += check_identity(answered)
    findings += check_clocks(answered, limits)
    findings += check_versions([seen for seen in nodes if seen.report.facts is not None], choices, bounds)
    return findings


def split_refusal(text: str) -> tuple[str, str, str]:
    """``found A; required: B; fix: C`` as the three cells of a finding."""
    found, _, rest = text.partition("; required: ")
    required, _, fix = rest.partition("; fix: ")
    return found.removeprefix("found "), required, fix
