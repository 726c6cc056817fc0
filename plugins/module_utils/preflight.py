"""Judge all nodes before anything changes: facts in, findings out, one table.

``evaluate`` is a pure function of what ``node_facts`` returned, the limits the role was given and the release set. A
finding names what was found, what is required and how to fix it; every finding of every node is returned.
"""

from __future__ import annotations

import fnmatch
import ipaddress
import itertools
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

GIB = 1024**3
ERROR = "error"
WARNING = "warning"


@dataclass(frozen=True)
class Finding:
    """One line of the table. ``check`` is the id that ``preflight_accept`` takes."""

    node: str
    check: str
    found: str
    required: str
    fix: str
    severity: str = ERROR

    def as_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True)
class Report:
    """What one node answered.

    ``facts`` is ``None`` if it did not answer; ``error`` says why, or why it answered only without sudo. ``clock`` is a
    sample of the node's clock between ``sent`` and ``received`` of the controller's, in seconds; 0 if there is none.
    """

    name: str
    facts: Mapping[str, Any] | None = None
    error: str = ""
    unreachable: bool = False
    sent: float = 0.0
    clock: float = 0.0
    received: float = 0.0


@dataclass(frozen=True)
class Port:
    """A TCP port this collection will listen on; ``first_only`` if only the first node does.

    ``variable`` is what gives it another number, empty if nothing does.
    """

    port: int
    purpose: str
    first_only: bool = False
    variable: str = ""


@dataclass(frozen=True)
class Limits:
    """What is required, from the role's inputs. An empty string or zero switches a check off."""

    architecture: str = "aarch64"
    dgx_os_floor: str = "7.2.3"
    memory_floor_gib: float = 0.0
    root_free_floor_gib: float = 0.0
    clock_offset_limit_seconds: float = 1.0
    platform: str = "systemd"
    first_node: str = ""
    # Node name to management address, for all nodes that were judged.
    management_addresses: Mapping[str, str] = field(default_factory=dict)
    ports: Sequence[Port] = ()
    own_units: Sequence[str] = ("goodput-*",)
    # Clock-lock units that the role power may stop.
    replaced_clock_units: Sequence[str] = ()
    # Checks whose errors the owner turned into warnings.
    accept: Sequence[str] = ()


def gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:.1f} GiB"


def version_key(version: str) -> tuple[int, ...]:
    """Numbers of a version, so that 580.95.05 < 580.126.09."""
    return tuple(int(number) for number in re.findall(r"\d+", version))


def matches_release(kernel: str, release: str) -> bool:
    """Whether ``7.0.0-1019-nvidia`` is a build of ``7.0.0-1019`` (and ``7.0.0-10190`` is not)."""
    return kernel == release or kernel.startswith((release + "-", release + "."))


def network_of(address: str, prefix_length: int) -> str:
    return str(ipaddress.ip_interface(f"{address}/{prefix_length}").network)


def list_names(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))


# --- checks of one node -----------------------------------------------------------------------------------------------

NodeCheck = Callable[[str, Mapping[str, Any], Limits, Mapping[str, Any]], Iterator[Finding]]


def check_os(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    system = facts["os"]
    wanted = str(release.get("os_release", ""))
    if wanted and system["version_id"] != wanted:
        yield Finding(
            node,
            "os",
            system["pretty_name"] or "no /etc/os-release",
            f"release {wanted} (release set {release.get('name', '')})",
            "reinstall the node from the DGX OS recovery image, or choose a goodput_release for this system",
        )
    floor = limits.dgx_os_floor
    if not floor:
        return
    found = system["dgx_release"]
    if not found:
        yield Finding(
            node,
            "os",
            "no release in /etc/dgx-release",
            f"DGX OS {floor} or newer",
            "reinstall the node from the DGX OS recovery image: driver, firmware tools and network set-up come with it",
        )
    elif version_key(found) < version_key(floor):
        yield Finding(
            node,
            "os",
            f"DGX OS {found}",
            f"DGX OS {floor} or newer",
            "update it in the DGX Dashboard, or: sudo apt update && sudo apt full-upgrade; then reboot",
        )


def check_architecture(
    node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]
) -> Iterator[Finding]:
    found = facts["os"]["architecture"]
    if limits.architecture and found != limits.architecture:
        yield Finding(
            node,
            "architecture",
            found,
            limits.architecture,
            "a DGX Spark is aarch64: check ansible_host, or set preflight_architecture for another machine",
        )


def check_kernel(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    system = facts["os"]
    kernel = system["kernel"]
    denied = release.get("kernel_denied") or []
    reserved = int(system["kdump_reserved_bytes"])
    for entry in denied:
        if not matches_release(kernel, str(entry["release"])):
            continue
        option = str(entry.get("accepted_with", ""))
        if option and option in system["command_line"] and reserved == 0:
            yield Finding(
                node,
                "kernel",
                f"{kernel} with {option}",
                f"not {entry['release']} ({entry['reason']})",
                "works with this option; boot another kernel when one is offered",
                WARNING,
            )
            continue
        others = [
            name
            for name in system["installed_kernels"]
            if name != kernel and not any(matches_release(name, str(other["release"])) for other in denied)
        ]
        newest = max(others, key=version_key, default="")
        steps = [str(entry.get("remedy", ""))]
        if newest:
            steps.insert(0, f"installed and allowed: {newest}, choose it in GRUB's advanced options")
        if "kho=off" in f"{option} {steps[-1]}" and reserved:
            steps.append(f"kho=off is no way out here: kdump reserves {reserved // 1024**2} MiB")
        yield Finding(
            node, "kernel", kernel, f"not {entry['release']} ({entry['reason']})", "; ".join(filter(None, steps))
        )
    memory = facts["memory"]
    if memory["cma_total_bytes"] == 0 and memory["cma_free_bytes"] > 0:
        yield Finding(
            node,
            "kho",
            f"CmaTotal 0 with CmaFree {gib(memory['cma_free_bytes'])} on {kernel}",
            "CmaFree no larger than CmaTotal: otherwise RDMA memory registration fails with ENOMEM",
            "boot a 6.17.0-10xx kernel, or add kho=off to the kernel command line if kdump reserves nothing "
            f"(it reserves {reserved // 1024**2} MiB)",
        )


def check_driver(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    branch, floor = str(release.get("driver_branch", "")), str(release.get("driver_floor", ""))
    if not branch:
        return
    found = facts["driver"]
    required = f"branch {branch}" + (f", {floor} or newer" if floor else "")
    if not found:
        yield Finding(
            node,
            "driver",
            "no NVIDIA driver is loaded",
            required,
            "reboot; if it stays away, power off, unplug the supply for 60 s and boot; do not reinstall the driver",
        )
    elif found.split(".")[0] != branch:
        yield Finding(
            node,
            "driver",
            found,
            required,
            f"NVIDIA does not support other branches on a Spark (590 and 595 are known bad): "
            f"sudo apt install nvidia-driver-{branch}-open, then reboot",
        )
    elif floor and version_key(found) < version_key(floor):
        yield Finding(
            node, "driver", found, required, "update it in the DGX Dashboard, or: sudo apt full-upgrade; then reboot"
        )


def check_memory(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    memory = facts["memory"]
    if memory["total_bytes"] < limits.memory_floor_gib * GIB:
        yield Finding(
            node,
            "memory",
            gib(memory["total_bytes"]),
            f"{limits.memory_floor_gib:g} GiB or more",
            "a Spark shows 112 to 122 GiB: look for a crash-kernel or KHO reservation, "
            "or set preflight_memory_floor_gib",
        )
    if memory["free_2mib_blocks"] == 0:
        yield Finding(
            node,
            "fragmentation",
            "no free contiguous block of 2 MiB",
            "some: an engine allocates its memory in large pieces",
            "reboot the node before a model is loaded (compaction recovers little)",
            WARNING,
        )


def check_disk(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    disk = facts["disk"]
    leftover = int(disk["factory_test_image_bytes"])
    note = f" (/test.img of {gib(leftover)} is a factory leftover you may delete)" if leftover else ""
    if disk["root_free_bytes"] < limits.root_free_floor_gib * GIB:
        yield Finding(
            node,
            "disk",
            f"{gib(disk['root_free_bytes'])} free on /",
            f"{limits.root_free_floor_gib:g} GiB or more",
            f"make room, or set preflight_root_free_floor_gib{note}",
        )
    elif leftover:
        yield Finding(
            node,
            "leftover",
            f"/test.img, {gib(leftover)}",
            "nothing: it is a factory leftover on some machines",
            "delete it if it is not yours; nothing here deletes it",
            WARNING,
        )


def check_ntp(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    ntp = facts["ntp"]
    if not ntp["synchronised"]:
        running = list_names(ntp["daemons"]) or "no time daemon"
        chrony = "chronyd" in ntp["daemons"]
        yield Finding(
            node,
            "ntp",
            f"clock not synchronised ({running} running)",
            "an upstream that answers" if chrony else "a synchronised clock",
            "name reachable servers in host_ntp_servers; without one the nodes keep only each other's time"
            if chrony
            else "the host role installs chrony, which keeps the nodes together even without an upstream",
            WARNING,
        )


def how_to_free(port: int, owner: str, unit: str) -> str:
    """What ends the owner of a port and nothing else: a container's port belongs to docker.service, which stays."""
    if owner == "docker-proxy":
        return f"`docker ps --filter publish={port}` names the container: docker stop it"
    user, slash, name = unit.partition("/")
    if slash and name.endswith(".service"):
        return f"as the user of {user}: systemctl --user disable --now {name}"
    return f"sudo systemctl disable --now {unit}" if unit.endswith(".service") else f"end {owner}"


def check_ports(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    wanted = {port.port: port for port in limits.ports if not port.first_only or node == limits.first_node}
    seen: set[int] = set()
    for entry in facts["listening"]:
        port = wanted.get(entry["port"])
        if port is None or port.port in seen:
            continue
        if any(fnmatch.fnmatch(entry["unit"], pattern) for pattern in limits.own_units):
            continue
        seen.add(port.port)
        owner = entry["process"] or "an unknown process"
        unit = f" of {entry['unit']}" if entry["unit"] else ""
        yield Finding(
            node,
            "port",
            f"{port.port} taken by {owner}{unit} on {entry['address']}",
            f"{port.port} free for {port.purpose}",
            how_to_free(port.port, owner, entry["unit"])
            + (f", or choose another port with {port.variable}" if port.variable else ""),
        )


def check_clock_units(
    node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]
) -> Iterator[Finding]:
    for unit in facts["clock_units"]:
        if not unit.get("enabled", True):
            continue
        replaced = unit["name"] in limits.replaced_clock_units
        remove = (
            f"sudo systemctl disable --now {unit['name']}"
            if unit["name"].endswith((".service", ".timer"))
            else f"remove the call from {unit['path']}"
        )
        yield Finding(
            node,
            "clock-unit",
            f"{unit['path']} ({unit['reason']})",
            "no clock lock but ours: two would fight, and a low clock would be taken for a power latch",
            "nothing: the role power stops and disables it" if replaced else f"{remove}, or power_replace_foreign",
            WARNING if replaced else ERROR,
        )


def check_nvml(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    for entry in facts["foreign_nvml"]:
        preload = "LD_PRELOAD" in entry["reason"] or "preload" in entry["path"]
        yield Finding(
            node,
            "nvml",
            f"{entry['path']} {entry['reason']}",
            "only the libnvidia-ml of the driver package: every power and clock reading comes from it",
            f"remove the line from {entry['path']}"
            if preload
            else f"remove it, then reinstall its package (dpkg -S {entry['path']})",
        )


def check_kubernetes(
    node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]
) -> Iterator[Finding]:
    for entry in facts["kubernetes"]:
        blocking = entry["active"] or limits.platform == "k3s"
        yield Finding(
            node,
            "kubernetes",
            f"{entry['kind']} ({entry['path']}{', running' if entry['active'] else ''})",
            "no Kubernetes that this collection did not install: it takes ports, memory and network rules",
            f"uninstall {entry['kind']} with its own uninstaller, or use another node",
            ERROR if blocking else WARNING,
        )


def check_twins(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    subnets: dict[str, list[str]] = {}
    for name, netdev in facts["network"]["netdevs"].items():
        if not netdev["rdma"]:
            continue
        for entry in netdev["addresses"]:
            address = ipaddress.ip_address(entry["address"])
            if address.version == 4 and not address.is_link_local:
                subnets.setdefault(network_of(entry["address"], entry["prefix_length"]), []).append(
                    f"{name} {entry['address']}"
                )
    for subnet, members in sorted(subnets.items()):
        if len({member.split()[0] for member in members}) > 1:
            yield Finding(
                node,
                "twins",
                f"{' and '.join(sorted(members))} in {subnet}",
                "one subnet per rail: in a shared one only one rail carries traffic",
                "the rdma role moves such stanzas out of the other netplan files, with a backup; "
                "or give each rail its own /24 by hand",
                WARNING,
            )


def check_management(
    node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]
) -> Iterator[Finding]:
    address = limits.management_addresses.get(node, "")
    netdevs = facts["network"]["netdevs"]
    owner = next(
        (name for name, netdev in netdevs.items() if address in [entry["address"] for entry in netdev["addresses"]]), ""
    )
    wired = sorted(
        entry["address"]
        for netdev in netdevs.values()
        if netdev["physical"] and not netdev["wireless"] and not netdev["rdma"]
        for entry in netdev["addresses"]
        if entry["scope"] in ("", "global")
    )
    offer = f"set goodput_management_address to a wired one: {', '.join(wired)}" if wired else "connect the wired port"
    if not address:
        return
    if not owner:
        yield Finding(
            node,
            "management",
            f"{address} is on no netdev of this node",
            "the node's own address",
            f"{offer} (or correct ansible_host)",
        )
    elif netdevs[owner]["wireless"]:
        yield Finding(node, "wifi", f"{address} is on the Wi-Fi netdev {owner}", "a wired management netdev", offer)
    elif netdevs[owner]["rdma"]:
        yield Finding(
            node,
            "management",
            f"{address} is on the rail {owner}",
            "a management netdev that is not a rail: a rail loses its address when it is configured",
            offer,
        )


def check_route(node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]) -> Iterator[Finding]:
    network = facts["network"]
    name = network["default_netdev"]
    if not name:
        yield Finding(
            node,
            "route",
            "no default route",
            "one, even a dummy: K3s needs it and packages come through it",
            "set a gateway on the wired netdev",
            ERROR if limits.platform == "k3s" else WARNING,
        )
    elif network["netdevs"].get(name, {}).get("rdma"):
        yield Finding(
            node,
            "route",
            f"default route through the rail {name}",
            "a default route outside the rails",
            f"remove the gateway from {name} in netplan",
        )
    elif network["netdevs"].get(name, {}).get("wireless"):
        yield Finding(
            node,
            "route",
            f"default route through the Wi-Fi netdev {name}",
            "a wired default route: Wi-Fi drops when it saves power",
            "connect the wired port; its route has the lower metric",
            WARNING,
        )


def check_packages(
    node: str, facts: Mapping[str, Any], limits: Limits, release: Mapping[str, Any]
) -> Iterator[Finding]:
    pending = list(facts["pending_packages"])
    if pending:
        shown = ", ".join(pending[:5]) + (f" and {len(pending) - 5} more" if len(pending) > 5 else "")
        yield Finding(
            node,
            "packages",
            shown,
            "no half-configured packages: the next apt run would finish them at a time of its choosing",
            "sudo dpkg --configure -a && sudo apt -f install; check that the running kernel has its initrd",
        )
    updater = facts["firmware_updater"]
    if updater["installed"] and not updater["held"]:
        yield Finding(
            node,
            "firmware",
            "mlnx-fw-updater is installed and not held",
            "on hold: an apt run with it has bricked ConnectX-7 cards",
            "sudo apt-mark hold mlnx-fw-updater",
            WARNING,
        )


NODE_CHECKS: tuple[NodeCheck, ...] = (
    check_os,
    check_architecture,
    check_kernel,
    check_driver,
    check_memory,
    check_disk,
    check_ntp,
    check_ports,
    check_clock_units,
    check_nvml,
    check_kubernetes,
    check_twins,
    check_management,
    check_route,
    check_packages,
)


def check_answer(report: Report) -> Iterator[Finding]:
    """Whether the node was asked, answered, and answered as root."""
    if report.facts is not None:
        if report.error or not report.facts["as_root"]:
            yield Finding(
                report.name,
                "sudo",
                report.error or "the login user is not root",
                "sudo for the login user",
                "run with --ask-become-pass, or give the user a NOPASSWD line in /etc/sudoers.d (visudo -f)",
            )
    elif report.unreachable:
        yield Finding(
            report.name,
            "ssh",
            report.error,
            "an answer over SSH",
            "check address, user, key and known_hosts: ssh USER@ADDRESS true",
        )
    elif report.error:
        yield Finding(
            report.name,
            "probe",
            report.error,
            "an answer of the probe",
            "log in and see whether python3 runs there",
        )
    else:
        yield Finding(
            report.name,
            "not-looked-at",
            "not in this run (--limit)",
            "only the nodes of this run are judged",
            "run without --limit to compare all nodes",
            WARNING,
        )


# --- checks of all nodes together -------------------------------------------------------------------------------------


def clock_offset(report: Report) -> tuple[float, float]:
    """Offset of a node's clock from the controller's and its uncertainty (half the round trip), in seconds."""
    return report.clock - (report.sent + report.received) / 2, (report.received - report.sent) / 2


def check_clocks(reports: Sequence[Report], limits: Limits) -> Iterator[Finding]:
    limit = limits.clock_offset_limit_seconds
    if not limit:
        return
    fix = "sudo timedatectl set-ntp true, or with chrony: sudo chronyc makestep; compare with: date +%s"
    required = f"within {limit:g} s"
    offsets = [(report.name, *clock_offset(report)) for report in reports if report.clock]
    for (one, first, first_error), (two, second, second_error) in itertools.combinations(offsets, 2):
        if abs(first - second) - first_error - second_error > limit:
            ahead, behind = (one, two) if first > second else (two, one)
            yield Finding(
                ahead,
                "clock",
                f"{abs(first - second):.1f} s ahead of {behind} (±{first_error + second_error:.1f} s)",
                f"{required} of each other",
                fix,
            )
    for name, offset, error in offsets:
        if abs(offset) - error > max(limit, 5.0):
            yield Finding(
                name,
                "clock-controller",
                f"{abs(offset):.1f} s {'ahead of' if offset > 0 else 'behind'} the controller (±{error:.1f} s)",
                "the controller's time: certificates and logs are compared with it",
                fix,
                WARNING,
            )


def equal_pairs(values: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    """Values that more than one node has, with those nodes."""
    groups: dict[str, list[str]] = {}
    for name, value in values.items():
        if value:
            groups.setdefault(value, []).append(name)
    return ((value, names) for value, names in groups.items() if len(names) > 1)


def check_identity(reports: Sequence[Report]) -> Iterator[Finding]:
    facts = {report.name: report.facts for report in reports if report.facts is not None}
    for value, names in equal_pairs({name: fact["os"]["machine_id"] for name, fact in facts.items()}):
        yield Finding(
            ", ".join(names),
            "machine-id",
            f"equal machine-id {value[:8]}…",
            "a different one on every node (CVE-2026-24218: some OEM images clone it)",
            f"on {names[-1]}: sudo rm -f /etc/machine-id /var/lib/dbus/machine-id && sudo systemd-machine-id-setup, "
            "then reboot it",
        )
    for kind in sorted({kind for fact in facts.values() for kind in fact["host_keys"]}):
        for _value, names in equal_pairs({name: fact["host_keys"].get(kind, "") for name, fact in facts.items()}):
            yield Finding(
                ", ".join(names),
                "host-key",
                f"equal SSH host key ({kind})",
                "a different one on every node (CVE-2026-24218: some OEM images clone it)",
                f"on {names[-1]}: sudo rm /etc/ssh/ssh_host_* && sudo ssh-keygen -A && sudo systemctl restart ssh, "
                "then ssh-keygen -R for it on the controller",
            )
    for value, names in equal_pairs({name: fact["os"]["hostname"] for name, fact in facts.items()}):
        yield Finding(
            ", ".join(names),
            "hostname",
            f"equal hostname {value}",
            "a different one on every node",
            "sudo hostnamectl hostname NAME on one, or set host_set_hostname",
        )


def check_alike(reports: Sequence[Report]) -> Iterator[Finding]:
    """Nodes that differ are served by the slower one, and their figures do not compare."""
    readers: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "kernel": lambda fact: str(fact["os"]["kernel"]),
        "driver": lambda fact: str(fact["driver"]),
        "DGX OS": lambda fact: str(fact["os"]["dgx_release"]),
        "BIOS": lambda fact: str(fact["os"]["bios"]),
    }
    for what, read in readers.items():
        values = {report.name: read(report.facts) for report in reports if report.facts is not None}
        if len(set(values.values())) > 1:
            yield Finding(
                list_names(values),
                "alike",
                f"{what}: " + ", ".join(f"{name} {value or 'none'}" for name, value in values.items()),
                f"the same {what} on every node",
                "update the older node; figures from unlike nodes do not compare",
                WARNING,
            )


def evaluate(reports: Sequence[Report], limits: Limits, release_set: Mapping[str, Any]) -> list[Finding]:
    """All findings of all nodes, in the order of the nodes. An empty list means that nothing was found."""
    findings: list[Finding] = []
    answered = [report for report in reports if report.facts is not None]
    for report in reports:
        findings.extend(check_answer(report))
        if report.facts is None:
            continue
        for check in NODE_CHECKS:
            findings.extend(check(report.name, report.facts, limits, release_set))
    findings.extend(check_identity(answered))
    findings.extend(check_clocks(answered, limits))
    findings.extend(check_alike(answered))
    return accept(findings, limits.accept)


def accept(findings: Iterable[Finding], checks: Sequence[str]) -> list[Finding]:
    """Turn errors of accepted checks into warnings that say so."""
    return [
        Finding(one.node, one.check, one.found, one.required, f"accepted (preflight_accept); {one.fix}", WARNING)
        if one.severity == ERROR and one.check in checks
        else one
        for one in findings
    ]


# --- table ------------------------------------------------------------------------------------------------------------

COLUMNS = (("node", 10), ("check", 12), ("found", 32), ("required", 32), ("fix", 44))


def render_table(findings: Sequence[Mapping[str, str]], title: str = "preflight") -> str:
    """The findings as text, errors first, long cells wrapped."""
    errors = sum(1 for one in findings if one["severity"] == ERROR)
    warnings = len(findings) - errors
    lines = [f"{title}: {errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"]
    if not findings:
        return lines[0]
    widths = {
        name: min(width, max(len(name), *(len(one[name]) + 2 * (name == "check") for one in findings)))
        for name, width in COLUMNS
    }
    # A node column that would break names is worse than a wide one.
    widths["node"] = max(widths["node"], *(len(part) for one in findings for part in one["node"].split()))
    widths["check"] = max(widths["check"], *(len(one["check"]) + 2 for one in findings))

    def row(cells: Mapping[str, str]) -> Iterator[str]:
        wrapped = {
            name: textwrap.wrap(cells[name], widths[name], break_long_words=True, break_on_hyphens=False) or [""]
            for name, _width in COLUMNS
        }
        for index in range(max(len(part) for part in wrapped.values())):
            yield "  ".join(
                (wrapped[name][index] if index < len(wrapped[name]) else "").ljust(widths[name])
                for name, _width in COLUMNS
            ).rstrip()

    lines.extend(row({name: name for name, _width in COLUMNS}))
    lines.append("  ".join("-" * widths[name] for name, _width in COLUMNS))
    for severity, mark in ((ERROR, "✗"), (WARNING, "!")):
        for one in findings:
            if one["severity"] == severity:
                lines.extend(row({**one, "check": f"{mark} {one['check']}"}))
    return "\n".join(lines)
