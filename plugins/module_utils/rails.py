# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Rails: found by facts, never by name, and checked one by one.

A DGX Spark's ConnectX-7 shows each QSFP port as two PCIe functions in different PCI domains. The two functions of the
cabled port are the rails. They share a sys_image_guid and a phys_port_name (p0, p1). RDMA devices without a PCI
parent (Soft-RoCE) have neither; there every RDMA device counts, and its netdev comes from `parent` or gid_attrs.
"""

from __future__ import annotations

import ipaddress
import json
import re
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.rail_plan import rail_sysctls
from ansible_collections.goodput.spark.plugins.module_utils.rdma_counters import read_int

# argv -> (return code, stdout, stderr)
Runner = Callable[[list[str]], tuple[int, str, str]]
# (netdev, own MAC, IPv4 address) -> MAC that answers there, or ""
ArpProbe = Callable[[str, str, str], str]

RAILS = 2
PCIE_WIDTH_MIN = 4
ROCE_MTU_BYTES = (256, 512, 1024, 2048, 4096)
# RoCE packet headers that must fit into the netdev MTU beside the payload (linux include/rdma/ib_addr.h).
ROCE_HEADER_BYTES = 76
IP_ICMP_HEADER_BYTES = 28
# GIDs are put into the first free slot, so a long run of empty slots is the end of the table (rxe has 1024 slots).
GID_EMPTY_RUN = 64
HOTPLUG_MARKER = "etc/nvidia/cx7-hotplug-enabled"
CONNECTX_VENDOR = "0x15b3"

_BDF = re.compile(r"^[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")
_PORT = re.compile(r"^p\d+$")


def _text(path: Path) -> str:
    """Stripped text of a sysfs file, "" where it is missing or refuses to be read."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _bdf(link: Path) -> str:
    """The PCI address nearest to a device link, "" where there is none."""
    if not link.exists():
        return ""
    return next((part for part in reversed(link.resolve().parts) if _BDF.match(part)), "")


def roce_mtu_bytes(netdev_mtu_bytes: int) -> int:
    """The RoCE MTU that a netdev MTU gives: 9000 -> 4096, 1500 -> 1024 bytes."""
    return max((size for size in ROCE_MTU_BYTES if size + ROCE_HEADER_BYTES <= netdev_mtu_bytes), default=0)


def _gids(port: Path) -> list[dict[str, Any]]:
    """Used slots of a port's GID table: [{index, type, gid, netdev}]."""
    found: list[dict[str, Any]] = []
    index = empty = 0
    while empty < GID_EMPTY_RUN and (port / "gids" / str(index)).exists():
        gid = _text(port / "gids" / str(index))
        netdev = _text(port / "gid_attrs/ndevs" / str(index)) if gid.strip("0:") else ""
        if netdev:
            kind = _text(port / "gid_attrs/types" / str(index))
            found.append({"index": index, "type": kind, "gid": gid, "netdev": netdev})
            empty = 0
        else:
            empty += 1
        index += 1
    return found


def _netdev_of(device: Path) -> str:
    """The netdev of an RDMA device: device/net, else `parent` (rxe), else the first GID's ndev."""
    names = sorted(entry.name for entry in (device / "device/net").glob("*"))
    if names:
        # Beside the port's own netdev there may be representors, whose port name is like pf0vf0.
        uplinks = [name for name in names if _PORT.match(_text(device / "device/net" / name / "phys_port_name"))]
        return (uplinks or names)[0]
    gids = _gids(device / "ports/1")
    return _text(device / "parent") or (gids[0]["netdev"] if gids else "")


def link_facts(netdev: str, sysfs_root: Path) -> dict[str, Any]:
    """What sysfs knows of a netdev. carrier is None where the link is administratively down: then it cannot be read."""
    folder = sysfs_root / "class/net" / netdev
    flags = _text(folder / "flags")
    carrier, speed_mbps = read_int(folder / "carrier"), read_int(folder / "speed")
    return {
        "present": folder.exists(),
        "admin_up": bool(int(flags, 16) & 1) if flags else False,
        "carrier": None if carrier is None else bool(carrier),
        "operstate": _text(folder / "operstate"),
        "mac": _text(folder / "address"),
        "mtu_bytes": read_int(folder / "mtu") or 0,
        "speed_mbps": speed_mbps if speed_mbps and speed_mbps > 0 else None,
    }


def functions(sysfs_root: Path) -> list[dict[str, Any]]:
    """Every RoCE function of the node, ordered by PCI address (else by the netdev's ifindex)."""
    found: list[tuple[tuple[str, int], dict[str, Any]]] = []
    for device in sorted((sysfs_root / "class/infiniband").glob("*")):
        link_layer = _text(device / "ports/1/link_layer")
        netdev = _netdev_of(device)
        if link_layer not in ("", "Ethernet") or not netdev or (device / "device/physfn").exists():
            continue
        interface = sysfs_root / "class/net" / netdev
        pci = _bdf(device / "device")
        port_name = _text(interface / "phys_port_name")
        width, speed = read_int(device / "device/current_link_width"), _text(device / "device/current_link_speed")
        facts = {
            "netdev": netdev,
            "rdma_device": device.name,
            "pci": pci,
            "phys_port_name": port_name if _PORT.match(port_name) else "",
            "sys_image_guid": _text(device / "sys_image_guid"),
            "pcie_width": width if pci else None,
            "pcie_speed": (speed or None) if pci else None,
            **link_facts(netdev, sysfs_root),
        }
        found.append(((pci or _bdf(interface / "device"), read_int(interface / "ifindex") or 0), facts))
    return [facts for _order, facts in sorted(found, key=lambda item: item[0])]


def _ports(candidates: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Group functions by physical port: label -> functions."""
    hardware = [function for function in candidates if function["pci"]]
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for function in hardware or candidates:
        number = function["pci"].rpartition(".")[2]
        label = function["phys_port_name"] or (f"f{number}" if number else "")
        guid = function["sys_image_guid"] if number else ""
        groups.setdefault((guid, label), []).append(function)
    ports: dict[str, list[dict[str, Any]]] = {}
    several_adapters = len({guid for guid, _label in groups}) > 1
    for (guid, label), members in sorted(groups.items()):
        prefix = f"{guid}/" if several_adapters else ""
        numbers = sorted({member["pci"].rpartition(".")[2] for member in members})
        if len(members) > RAILS and len(numbers) > 1:
            # One port name on all functions: the twins are the functions with one number in different domains.
            for number in numbers:
                ports[f"{prefix}{label}.{number}"] = [m for m in members if m["pci"].endswith(f".{number}")]
        else:
            ports[prefix + label] = members
    return ports


def _say(members: Sequence[Mapping[str, Any]]) -> str:
    return " + ".join(f"{member['netdev']} ({member['pci'] or member['rdma_device']})" for member in members)


def _answer(
    state: str, reason: str, remedy: str, port: str = "", rails: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    return {
        "state": state,
        "reason": reason,
        "remedy": remedy,
        "port": port,
        "rails": [{"rail": index, "port": port, **facts} for index, facts in enumerate(rails)],
    }


def _missing(sysfs_root: Path, root: Path) -> dict[str, Any]:
    """No RoCE function at all: say why, as far as it can be seen."""
    orphans = [
        folder.name
        for folder in sorted((sysfs_root / "class/net").glob("*"))
        if _text(folder / "device/vendor") == CONNECTX_VENDOR
    ]
    if orphans:
        return _answer(
            "no_nic",
            f"the ConnectX netdevs {', '.join(orphans)} have no RDMA device",
            "load the driver: sudo modprobe mlx5_ib; then look at: journalctl -k -g mlx5",
        )
    hotplug = (
        f"/{HOTPLUG_MARKER} exists, so the platform removes the adapter 5 to 20 s after a boot without a cable"
        if (root / HOTPLUG_MARKER).exists()
        else "a DGX Spark removes the adapter from PCI while no cable is plugged"
    )
    return _answer(
        "no_nic",
        f"/sys/class/infiniband is empty: {hotplug}",
        "plug the QSFP cable into the same port of both nodes, wait 20 s (or reboot with the cable in), then look at: "
        "lspci -d 15b3:",
    )


def choose(sysfs_root: Path, port: str = "", root: Path = Path("/")) -> dict[str, Any]:
    """The two functions of the cabled port: {state, reason, remedy, port, rails}.

    state: ok; no_nic; no_cable; one_rail; ambiguous; unknown (links down, so several ports may be the cabled one).
    `port` names the port (p0, p1) where facts can not decide.
    """
    found = functions(sysfs_root)
    if not found:
        return _missing(sysfs_root, root)
    ports = _ports(found)
    listed = "; ".join(f"{label or 'no port name'}: {_say(members)}" for label, members in ports.items())
    if port:
        if port not in ports:
            return _answer(
                "ambiguous", f"rdma_port is {port!r}, but the ports are {listed}", "set rdma_port to one of them"
            )
        label, members = port, ports[port]
    else:
        live = {name: group for name, group in ports.items() if any(member["carrier"] for member in group)}
        dark = {name: group for name, group in ports.items() if any(member["carrier"] is None for member in group)}
        if len(live) > 1:
            return _answer(
                "ambiguous",
                f"{len(live)} ports have carrier ({listed}); one cable already carries the full 200 Gb/s",
                f"set rdma_port to the port to use, the same on both nodes ({' or '.join(live)}), or unplug one cable",
            )
        if not live and len(dark) > 1:
            netdevs = [member["netdev"] for group in dark.values() for member in group]
            return _answer(
                "unknown",
                f"the links are administratively down, so carrier can not be read, and {len(dark)} "
                f"ports are possible: {listed}",
                f"set rdma_port to the cabled port ({' or '.join(dark)}), or bring the links up once: "
                + "; ".join(f"sudo ip link set dev {netdev} up" for netdev in netdevs),
            )
        if not live and not dark:
            return _answer(
                "no_cable",
                f"no port has carrier: {listed}",
                "plug the QSFP cable into the same port of both nodes, switch the other node on, "
                "and look at: ip -br link",
                rails=[],
            )
        label, members = next(iter((live or dark).items()))
    if len(members) < RAILS:
        return _answer(
            "one_rail",
            f"port {label or '(unnamed)'} has one function, {_say(members)}; one cable carries {RAILS} rails "
            f"(all functions: {listed})",
            "reboot with the cable in; if the second PCI domain stays away, drain AC: shut down, unplug power for 60 s",
            label,
            members,
        )
    if len(members) > RAILS:
        return _answer(
            "ambiguous",
            f"{len(members)} functions belong to port {label or '(unnamed)'}: {_say(members)}; a port has {RAILS}",
            "remove the surplus RDMA devices (rdma link), or name the port with rdma_port",
            label,
        )
    return _answer("ok", f"port {label or '(unnamed)'}: {_say(members)}", "", label, members)


def parse_addresses(ip_json: str) -> dict[str, list[str]]:
    """`ip -j addr show` -> netdev -> ["192.168.100.1/24", ...]."""
    try:
        links = json.loads(ip_json or "[]")
    except json.JSONDecodeError:
        return {}
    return {
        link["ifname"]: [
            f"{entry['local']}/{entry['prefixlen']}" for entry in link.get("addr_info", []) if "local" in entry
        ]
        for link in links
        if "ifname" in link
    }


def parse_json_list(text: str) -> list[dict[str, Any]]:
    """Output of an `ip -j` command; an empty or broken answer is an empty list."""
    try:
        value = json.loads(text or "[]")
    except json.JSONDecodeError:
        return []
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def parse_active_mtus(devinfo: str) -> dict[str, int]:
    """`ibv_devinfo` -> RDMA device -> active RoCE MTU in bytes (sysfs does not have it)."""
    found: dict[str, int] = {}
    device = ""
    for line in devinfo.splitlines():
        key, _, value = line.strip().partition(":")
        if key == "hca_id":
            device = value.strip()
        elif key == "active_mtu" and device and value.split():
            found.setdefault(device, int(value.split()[0]) if value.split()[0].isdigit() else 0)
    return found


def complete(
    answer: dict[str, Any], sysfs_root: Path, addresses: Mapping[str, list[str]], mtus: Mapping[str, int]
) -> None:
    """Add what only tools or long tables know to the chosen rails: addresses, active_mtu_bytes and gids."""
    for rail in answer["rails"]:
        rail["addresses"] = addresses.get(rail["netdev"], [])
        rail["active_mtu_bytes"] = mtus.get(rail["rdma_device"])
        rail["gids"] = _gids(sysfs_root / "class/infiniband" / rail["rdma_device"] / "ports/1")


def right_gid(gids: Sequence[Mapping[str, Any]], address: str, netdev: str) -> int | None:
    """Index of the RoCE v2 GID that is the IPv4-mapped rail address on the rail's netdev, or None."""
    wanted = ipaddress.IPv6Address(f"::ffff:{address}")
    for gid in gids:
        try:
            same = ipaddress.IPv6Address(str(gid["gid"])) == wanted
        except ValueError:
            continue
        if same and gid["type"] == "RoCE v2" and gid["netdev"] == netdev:
            return int(gid["index"])
    return None


def netns_shared(sysfs_root: Path) -> bool | None:
    """True where RDMA devices are shared between network namespaces (`rdma system`), None where "
    "ib_core is not loaded."""
    return {"Y": True, "N": False}.get(_text(sysfs_root / "module/ib_core/parameters/netns_mode"))


def ufw_blocks(root: Path, netdevs: Sequence[str]) -> list[str]:
    """Netdevs that an enabled ufw does not let in as a whole."""
    if not re.search(r"^ENABLED=yes", _text(root / "etc/ufw/ufw.conf"), re.MULTILINE):
        return []
    rules = _text(root / "etc/ufw/user.rules")
    return [name for name in netdevs if not re.search(rf"-A ufw-user-input -i {re.escape(name)} -j ACCEPT", rules)]


def arp_probe(netdev: str, mac: str, address: str, tries: int = 2, timeout_s: float = 1.0) -> str:
    """Ask on the wire of one netdev who has an IPv4 address: its MAC, or "" for silence. Needs CAP_NET_RAW.

    The sender address is 0.0.0.0 (RFC 5227), so no neighbour table learns from it.
    """
    ethertype = 0x0806
    own = bytes.fromhex(mac.replace(":", ""))
    target = socket.inet_aton(address)
    header = struct.pack("!HHBBH", 1, 0x0800, 6, 4, 1)
    frame = b"\xff" * 6 + own + struct.pack("!H", ethertype) + header + own + bytes(4) + bytes(6) + target
    try:
        with socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ethertype)) as wire:
            wire.bind((netdev, ethertype))
            for _try in range(tries):
                wire.send(frame)
                end = time.monotonic() + timeout_s
                while (left := end - time.monotonic()) > 0:
                    wire.settimeout(left)
                    try:
                        answer = wire.recv(128)
                    except TimeoutError:
                        break
                    if len(answer) >= 42 and answer[20:22] == b"\x00\x02" and answer[28:32] == target:
                        return ":".join(f"{byte:02x}" for byte in answer[22:28])
    except (OSError, ValueError):
        return ""
    return ""


def sentence(check: Mapping[str, Any]) -> str:
    """A failed check as one line: check, node and rail, found, required, remedy."""
    where = check["node"] if check["rail"] is None else f"{check['node']} rail {check['rail']}"
    return f"{check['check']}, {where}: found {check['found']}; required {check['required']}. Fix: {check['remedy']}"


class Report:
    """Collects checks in the form of the verdict contract."""

    def __init__(self, node: str) -> None:
        self.node = node
        self.checks: list[dict[str, Any]] = []

    def add(self, check: str, ok: bool, found: object, required: object, remedy: str, rail: int | None = None) -> bool:
        self.checks.append(
            {
                "check": check,
                "node": self.node,
                "rail": rail,
                "ok": ok,
                "found": str(found),
                "required": str(required),
                "remedy": "" if ok else remedy,
            }
        )
        return ok


def _ping(run: Runner, netdev: str, address: str, payload_bytes: int) -> tuple[bool, str]:
    """(answered, last words of ping). Bound to the interface, fragmenting forbidden."""
    argv = [
        "ping",
        "-n",
        "-q",
        "-M",
        "do",
        "-s",
        str(payload_bytes),
        "-I",
        netdev,
        "-c",
        "3",
        "-i",
        "0.2",
        "-W",
        "2",
        address,
    ]
    rc, out, err = run(argv)
    lines = [line.strip() for line in (err + "\n" + out).splitlines() if line.strip()]
    words = next(
        (line for line in lines if "error" in line.lower() or "packet loss" in line), lines[-1] if lines else f"rc {rc}"
    )
    return rc == 0, words


def _check_link(report: Report, rail: Mapping[str, Any], link: Mapping[str, Any], port: str) -> bool:
    """Presence, carrier and MTU; True where traffic can be expected."""
    index, netdev = rail["rail"], rail["netdev"]
    if not report.add(
        "netdev",
        link["present"],
        netdev if link["present"] else f"no netdev {netdev}",
        f"netdev {netdev} exists",
        "the adapter left the PCI bus; plug the QSFP cable in and wait 20 s, then look at: lspci -d 15b3:",
        index,
    ):
        return False
    found = "up" if link["carrier"] else "administratively down" if not link["admin_up"] else "no carrier"
    remedy = (
        f"bring {netdev} up: sudo ip link set dev {netdev} up, or run the rdma role again"
        if not link["admin_up"]
        else f"{netdev} has no carrier: reseat the cable at port {port or '(unnamed)'} of both nodes and see that the "
        "peer's rail is up"
    )
    up = report.add("carrier", bool(link["carrier"]), f"{netdev} {found}", "carrier", remedy, index)
    mtu_bytes = rail["mtu_bytes"]
    report.add(
        "mtu",
        link["mtu_bytes"] == mtu_bytes,
        f"{netdev} {link['mtu_bytes']} bytes",
        f"{mtu_bytes} bytes",
        f"run the rdma role again, or: sudo ip link set dev {netdev} mtu {mtu_bytes}",
        index,
    )
    return up


def _check_rdma(
    report: Report, rail: Mapping[str, Any], facts: Mapping[str, Any] | None, sysfs_root: Path, dev_root: Path
) -> None:
    """The RDMA side of a rail: device, PCIe link, RoCE MTU, GID."""
    index, device, netdev, address = rail["rail"], rail["rdma_device"], rail["netdev"], rail["address"]
    nodes = [
        entry.name
        for entry in (sysfs_root / "class/infiniband_verbs").glob("uverbs*")
        if _text(entry / "ibdev") == device and (dev_root / "infiniband" / entry.name).exists()
    ]
    report.add(
        "rdma_device",
        facts is not None and bool(nodes),
        f"{device}: {'no RDMA device' if facts is None else ', '.join(nodes) or 'no /dev/infiniband/uverbs*'}",
        f"RDMA device {device} on {netdev} with a verbs node",
        "load the modules: sudo modprobe ib_uverbs rdma_ucm; then look at: rdma link",
        index,
    )
    if facts is None:
        return
    if facts["pcie_width"] is not None:
        report.add(
            "pcie",
            facts["pcie_width"] >= PCIE_WIDTH_MIN,
            f"{facts['pci']} x{facts['pcie_width']} {facts['pcie_speed'] or ''}".strip(),
            f"x{PCIE_WIDTH_MIN}",
            "reboot; if it stays, shut down and remove AC for 60 s; then update the firmware by the vendor's own path",
            index,
        )
    wanted = roce_mtu_bytes(rail["mtu_bytes"])
    report.add(
        "active_mtu",
        facts["active_mtu_bytes"] == wanted,
        f"{device} {facts['active_mtu_bytes']} bytes",
        f"{wanted} bytes (netdev MTU {rail['mtu_bytes']})",
        f"set the netdev MTU of {netdev} to {rail['mtu_bytes']} on both nodes; RoCE follows it",
        index,
    )
    gid = right_gid(facts["gids"], address, netdev)
    listed = ", ".join(f"{entry['index']}={entry['gid']} {entry['type']}" for entry in facts["gids"]) or "none"
    report.add(
        "gid",
        gid is not None,
        f"{device} index {gid}" if gid is not None else f"{device} GIDs: {listed}",
        f"a RoCE v2 GID ::ffff:{address} on {netdev}",
        f"the address {address} must be on {netdev}: ip -br addr show dev {netdev}; run the rdma role again",
        index,
    )


def _crossed_with(
    netdev: str, mac: str, peer: str, others: Sequence[Mapping[str, Any]], probe: ArpProbe
) -> dict[int, str]:
    """Rails of the peer that answer on this netdev and not on their own: rail -> MAC.

    Both rails of a real cable share one wire, so an answer counts only where the right netdev gets none.
    """
    found: dict[int, str] = {}
    for other in others:
        address = other["addresses"][peer]
        answer = probe(netdev, mac, address)
        if answer and not probe(other["netdev"], other["mac"], address):
            found[other["rail"]] = answer
    return found


def _check_peer(
    report: Report,
    rail: Mapping[str, Any],
    peer: Mapping[str, Any],
    link: Mapping[str, Any],
    others: Sequence[Mapping[str, Any]],
    run: Runner,
    probe: ArpProbe,
) -> None:
    """Everything about one peer on one rail."""
    index, netdev, name, address = rail["rail"], rail["netdev"], peer["node"], peer["address"]
    routes = parse_json_list(run(["ip", "-j", "route", "get", address])[1])
    through = str(routes[0].get("dev", "?")) if routes else "no route"
    report.add(
        "route",
        through == netdev,
        f"{address} leaves by {through}",
        netdev,
        f"another route shadows {rail['subnet']}: ip route get {address}; ip rule",
        index,
    )
    payload_bytes = rail["mtu_bytes"] - IP_ICMP_HEADER_BYTES
    answered, words = _ping(run, netdev, address, payload_bytes)
    mac = ""
    if answered:
        remedy = ""
        entries = parse_json_list(run(["ip", "-j", "-4", "neigh", "show", "to", address, "dev", netdev])[1])
        mac = next((str(entry["lladdr"]) for entry in entries if entry.get("lladdr")), "")
    elif _ping(run, netdev, address, 56)[0]:
        remedy = (
            f"{name} answers small packets but not {payload_bytes} bytes: set MTU "
            f"{rail['mtu_bytes']} on rail {index} of "
            f"{name} and of {report.node}, and on the switch if there is one"
        )
        mac = probe(netdev, link["mac"], address)
    else:
        mac = probe(netdev, link["mac"], address)
        crossed = {} if mac else _crossed_with(netdev, link["mac"], name, others, probe)
        if crossed:
            number, mac = next(iter(crossed.items()))
            remedy = f"rail {index} of {report.node} reaches rail {number} of {name}: the rails are crossed"
            words = f"no answer from {address}, but rail {number} of {name} ({mac}) is on this wire"
        else:
            remedy = (
                f"{name} does not answer at {address}: on {name}, rail {index} must be up and hold this address "
                f"(ip -br addr), and the cable must join the same ports"
            )
    report.add(
        "ping_jumbo",
        answered,
        f"{name} {address}: {words}",
        f"answers to {payload_bytes} bytes, unfragmented, through {netdev}",
        remedy,
        index,
    )
    report.add(
        "neighbour",
        bool(mac),
        f"{name} {address}: {mac or 'unresolved'}",
        f"resolved on {netdev}",
        f"nobody has {address} on this rail: on {name} look at: ip -br addr",
        index,
    )
    if mac and peer["mac"]:
        same = mac.lower() == peer["mac"].lower()
        macs = [str(entry).lower() for entry in peer["macs"]]
        whose = f"rail {macs.index(mac.lower())} of {name}" if mac.lower() in macs else "no rail of this site"
        report.add(
            "rails_crossed",
            same,
            f"{mac} ({whose})",
            f"{peer['mac']} (rail {index} of {name})",
            f"rail {index} of {report.node} ends at {whose}: join like with like (rail 0 is the "
            "function in the lower PCI "
            f"domain), or set arp_ignore=1 and arp_announce=2 on the rails of {name}, or remove the "
            "machine with this address",
            index,
        )


def verify(
    plan: Mapping[str, Any],
    run: Runner,
    sysfs_root: Path = Path("/sys"),
    proc_root: Path = Path("/proc"),
    dev_root: Path = Path("/dev"),
    root: Path = Path("/"),
    probe: ArpProbe = arp_probe,
) -> list[dict[str, Any]]:
    """Check one node's rails against its plan (rail_plan.rail_plan). Only reads, pings and asks.

    Returns [{check, node, rail, ok, found, required, remedy}]; rail is None for what concerns the node.
    """
    report = Report(str(plan["node"]))
    rails: Sequence[Mapping[str, Any]] = plan["rails"]
    addresses = parse_addresses(run(["ip", "-j", "addr", "show"])[1])
    known = {facts["rdma_device"]: facts for facts in functions(sysfs_root)}
    answer: dict[str, Any] = {"rails": [known[rail["rdma_device"]] for rail in rails if rail["rdma_device"] in known]}
    complete(answer, sysfs_root, addresses, parse_active_mtus(run(["ibv_devinfo"])[1]))

    shared = netns_shared(sysfs_root)
    report.add(
        "netns_mode",
        shared is True,
        {True: "shared", False: "exclusive", None: "unknown, ib_core is not loaded"}[shared],
        "shared",
        "sudo rdma system set netns shared",
    )
    blocked = ufw_blocks(root, [rail["netdev"] for rail in rails])
    report.add(
        "firewall",
        not blocked,
        f"ufw is on and has no rule for {', '.join(blocked)}" if blocked else "nothing blocks the rails",
        "the rails let in",
        "; ".join(f"sudo ufw allow in on {netdev}" for netdev in blocked),
    )
    holders = {
        rail["rail"]: [
            ipaddress.ip_interface(entry).network
            for entry in addresses.get(rail["netdev"], [])
            if ipaddress.ip_interface(entry).version == 4
        ]
        for rail in rails
    }
    twins = [
        f"{one} of rail {i} and {two} of rail {j}"
        for i, ones in holders.items()
        for j, twos in holders.items()
        if i < j
        for one in ones
        for two in twos
        if one.overlaps(two)
    ]
    report.add(
        "twin_subnet",
        not twins,
        "; ".join(twins) or "one subnet per rail",
        "no subnet on two rails",
        "only one of the twins would carry traffic: remove the address that the plan does not have "
        f"({', '.join(rail['cidr'] for rail in rails)}) and run the rdma role again",
    )
    for rail in rails:
        netdev = rail["netdev"]
        facts = next((entry for entry in answer["rails"] if entry["rdma_device"] == rail["rdma_device"]), None)
        link = link_facts(netdev, sysfs_root)
        live = _check_link(report, rail, link, str(facts.get("phys_port_name") if facts else ""))
        held = [entry for entry in addresses.get(netdev, []) if ":" not in entry]
        report.add(
            "address",
            held == [rail["cidr"]],
            f"{netdev} {', '.join(held) or 'no IPv4 address'}",
            rail["cidr"],
            f"run the rdma role again; look at: ip -br addr show dev {netdev}",
            rail["rail"],
        )
        extra = [entry for entry in addresses.get(netdev, []) if ":" in entry]
        report.add(
            "ipv6",
            not extra,
            f"{netdev} {', '.join(extra) or 'no IPv6 address'}",
            "no IPv6 address, which would only add GIDs",
            "run the rdma role again; look at: nmcli -f ipv6.method connection show netplan-" + netdev,
            rail["rail"],
        )
        wanted = rail_sysctls([netdev])
        running = {name: _text(proc_root / "sys" / name.replace(".", "/")) for name in wanted}
        wrong = {name: value for name, value in running.items() if value != wanted[name]}
        report.add(
            "sysctl",
            not wrong,
            ", ".join(f"{name}={value or 'missing'}" for name, value in wrong.items()) or "as required",
            ", ".join(f"{name}={wanted[name]}" for name in wrong or wanted),
            "run the rdma role again; both twins share one wire and would answer ARP for each other",
            rail["rail"],
        )
        _check_rdma(report, rail, facts, sysfs_root, dev_root)
        if not live:
            continue
        for peer in rail["peers"]:
            if not peer["asked"]:
                continue
            others = [
                {
                    "rail": other["rail"],
                    "netdev": other["netdev"],
                    "mac": link_facts(other["netdev"], sysfs_root)["mac"],
                    "addresses": {entry["node"]: entry["address"] for entry in other["peers"]},
                }
                for other in rails
                if other["rail"] != rail["rail"]
            ]
            _check_peer(report, rail, peer, link, others, run, probe)
    return report.checks
