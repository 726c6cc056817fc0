"""Rails: addresses, MTU, GIDs and whole frames on both rails, and a proof by counters since this boot."""

from __future__ import annotations

import ipaddress
import json
import re
from typing import Any

import pytest
import yaml

AGAIN = "run `ansible-playbook site.yml --tags rdma`"
NETPLAN = "/etc/netplan/90-goodput-rails.yaml"
PROOF = "/var/lib/goodput/rdma-proof.json"
# IPv4 and ICMP headers.
HEADERS_BYTES = 28
GID = re.compile(r"(?P<port>/sys/\S+?/ports/1)/gids/(?P<index>\d+):(?P<gid>[0-9a-f:]+)$")


@pytest.fixture(autouse=True)
def needs_a_peer(nodes: Any) -> None:
    if len(nodes) == 1:
        pytest.skip("only one node is in this run: rails join two")


def look(sh: Any, host: Any) -> Any:
    return sh(
        {
            "mode": f"stat --format '%a %U' {NETPLAN}",
            "netplan": f"cat {NETPLAN}",
            "addresses": "ip -j addr show",
            # Used slots: an IPv4 GID reads ...:ffff:c0a8:6401, and empty ones are all zero.
            "gids": "grep -s ':ffff:' /sys/class/infiniband/*/ports/1/gids/*",
            "netns": "cat /sys/module/ib_core/parameters/netns_mode",
            "proof": f"cat {PROOF}",
            "boot": "cat /proc/sys/kernel/random/boot_id",
            "timer": "systemctl is-active goodput-netplan-rollback.timer",
        },
        node=host,
    )


def rails(sh: Any, host: Any) -> dict[str, dict[str, Any]]:
    """netdev -> its definition in the node's netplan file, in the order of the file."""
    text = look(sh, host)["netplan"].stdout
    found: dict[str, dict[str, Any]] = ((yaml.safe_load(text) or {}).get("network") or {}).get("ethernets") or {}
    return found


def test_netplan(host: Any, sh: Any, check: Any) -> None:
    "The netplan file is private, gives each rail its own subnet, and is confirmed"
    seen = look(sh, host)
    check(seen["mode"].stdout.strip(), "600 root", AGAIN, what=NETPLAN)
    defined = rails(sh, host)
    check(len(defined), 2, AGAIN, what="rails in the file")
    networks = [ipaddress.ip_interface(rail["addresses"][0]).network for rail in defined.values()]
    check(len(set(networks)), 2, "give each rail its own subnet in rdma_rail_subnets", what="subnets")
    check(seen["timer"].stdout.strip(), "inactive", "the change was not confirmed: " + AGAIN, what="way back")


def test_links(host: Any, sh: Any, check: Any) -> None:
    "Each rail is up with the address and MTU that netplan has for it, and has no IPv6"
    links = {link["ifname"]: link for link in json.loads(look(sh, host)["addresses"].stdout)}
    for netdev, rail in rails(sh, host).items():
        link = links.get(netdev, {})
        remedy = f"{AGAIN}; look at: ip addr show dev {netdev}"
        check(
            link.get("operstate", "missing"),
            "UP",
            f"see that the cable is in and the link up; {remedy}",
            what=f"{netdev} state",
        )
        check(link.get("mtu", 0), rail.get("mtu", "an MTU in netplan"), remedy, what=f"{netdev} MTU")
        held = [f"{entry['local']}/{entry['prefixlen']}" for entry in link.get("addr_info", [])]
        check(held, rail["addresses"], remedy, what=f"{netdev} addresses")


def test_gids(host: Any, sh: Any, check: Any) -> None:
    "Each rail's address is a RoCE v2 GID of the RDMA device on that rail"
    seen = look(sh, host)
    slots = [match for line in seen["gids"].stdout.split() if (match := GID.match(line))]
    details = sh(
        {
            slot[
                0
            ]: f"cat {slot['port']}/gid_attrs/ndevs/{slot['index']} {slot['port']}/gid_attrs/types/{slot['index']}"
            for slot in slots
        },
        node=host,
    )
    found: dict[str, set[str]] = {}
    for slot in slots:
        netdev, _, kind = details[slot[0]].stdout.strip().partition("\n")
        if kind == "RoCE v2":
            found.setdefault(netdev, set()).add(str(ipaddress.IPv6Address(slot["gid"]).ipv4_mapped))
    for netdev, rail in rails(sh, host).items():
        address = rail["addresses"][0].partition("/")[0]
        check(sorted(found.get(netdev, ())), [address], f"{AGAIN}; look at: rdma link", what=f"{netdev} RoCE v2 GIDs")
    check(seen["netns"].stdout.strip(), "Y", "sudo rdma system set netns shared", what="RDMA shared by namespaces")


def test_jumbo(host: Any, peer: Any, sh: Any, check: Any) -> None:
    "The peer answers unfragmented jumbo frames on each rail, from the right rail"
    theirs = [rail["addresses"][0].partition("/")[0] for rail in rails(sh, peer).values()]
    macs = {link["ifname"]: link["address"] for link in json.loads(look(sh, peer)["addresses"].stdout)}
    pairs = list(zip(rails(sh, host), theirs, rails(sh, peer), strict=True))
    payload = {netdev: int(rail.get("mtu", 1500)) - HEADERS_BYTES for netdev, rail in rails(sh, host).items()}
    commands = {
        netdev: f"ping -n -q -M do -s {payload[netdev]} -I {netdev} -c 3 -i 0.2 -W 2 {address} >/dev/null && "
        f"ip -4 neigh show to {address} dev {netdev} && ip route get {address}"
        for netdev, address, _ in pairs
    }
    answers = sh(commands, node=host, fresh=True)
    for index, (netdev, address, other) in enumerate(pairs):
        out = answers[netdev].stdout
        remedy = f"compare MTU, address and link of rail {index} on {host.name} and {peer.name}; {AGAIN}"
        check(answers[netdev].rc, 0, remedy, what=f"rail {index}: {payload[netdev]} bytes to {address}")
        check(
            macs[other] in out,
            True,
            f"the rails are crossed or {peer.name} answers ARP for the twin",
            what=f"rail {index}: MAC",
        )
        check(
            f"dev {netdev}" in out,
            True,
            f"another route shadows the rail: ip route get {address}",
            what=f"rail {index}: route",
        )


def test_sysctls(host: Any, sh: Any, check: Any) -> None:
    "Each rail answers ARP only for its own address"
    names = [f"net/ipv4/conf/{netdev}/{key}" for netdev in rails(sh, host) for key in ("arp_ignore", "arp_announce")]
    values = sh({name: f"cat /proc/sys/{name}" for name in names}, node=host)
    for name in names:
        check(values[name].stdout.strip(), "1" if name.endswith("arp_ignore") else "2", AGAIN, what=name)


def test_proof(host: Any, sh: Any, check: Any) -> None:
    "Both rails carried RDMA in one window since this boot, by the counters of both ends"
    seen = look(sh, host)
    remedy = "run `ansible-playbook site.yml --tags rdma` (rdma_proof must be true)"
    record = json.loads(seen["proof"].stdout or "{}")
    check(record.get("state", "no record"), "ok", remedy, what=PROOF)
    check(record["key"]["boot_id"], seen["boot"].stdout.strip(), remedy, what="proved in this boot")
    check(len(record["verdicts"]) > 0, True, remedy, what="proofs")
    for verdict in record["verdicts"]:
        check(verdict["window_s"] > 0, True, remedy, what="both rails in one window")
        for rail in verdict["rails"]:
            where = f"{verdict['client']} to {verdict['server']}, rail {rail['rail']}"
            moved = min(rail["sent"], rail["received"])
            check(moved, "more than 0 " + rail["unit"], remedy, ok=moved > 0, what=where)
            check(rail["share"], "more than 0.1 of the traffic", remedy, ok=rail["share"] > 0.1, what=where)
