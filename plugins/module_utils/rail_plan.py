# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""The address plan of the rails: one subnet per rail, one host number per node.

Pure: no node is asked. Refusals are returned as text, so that a role can show all of them at once.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

RAILS_PER_PORT = 2
# NCCL compares this many leading bits to tell subnets apart (NCCL_IB_SUBNET_PREFIX_LEN, default 24).
NCCL_SUBNET_BITS = 24
RDMA_MTU_MIN_BYTES = 1280
# Both twins sit on one wire, so each must answer ARP only for its own address.
RAIL_SYSCTLS = {
    "net.ipv4.conf.{}.arp_ignore": "1",
    "net.ipv4.conf.{}.arp_announce": "2",
}


def rail_sysctls(netdevs: Sequence[str]) -> dict[str, str]:
    """Kernel parameters of the rails: name -> value."""
    return {name.format(netdev): value for netdev in netdevs for name, value in RAIL_SYSCTLS.items()}


def _subnets(value: object, errors: list[str]) -> list[ipaddress.IPv4Network]:
    """Parse `rdma_rail_subnets`; append one sentence per fault to errors."""
    if not isinstance(value, (list, tuple)):
        errors.append(
            f"rdma_rail_subnets is {value!r} ({type(value).__name__}); it must be a list of "
            f"{RAILS_PER_PORT} IPv4 subnets, "
            'for example ["192.168.100.0/24", "192.168.101.0/24"]'
        )
        return []
    if len(value) != RAILS_PER_PORT:
        errors.append(
            f"rdma_rail_subnets has {len(value)} entries ({', '.join(map(str, value)) or 'none'}); one cable carries "
            f"{RAILS_PER_PORT} rails, so it needs {RAILS_PER_PORT}, one subnet for each rail"
        )
    networks: list[ipaddress.IPv4Network] = []
    for index, entry in enumerate(value):
        try:
            if not isinstance(entry, str):
                raise ValueError(f"it is a {type(entry).__name__}, not a string")
            network = ipaddress.IPv4Network(entry, strict=True)
            if not 16 <= network.prefixlen <= 30:
                raise ValueError(f"prefix length {network.prefixlen} is not between 16 and 30")
            if network.is_multicast or network.is_loopback or network.is_link_local or network.is_unspecified:
                raise ValueError("it is a multicast, loopback, link-local or unspecified range")
        except ValueError as error:
            errors.append(
                f"rdma_rail_subnets[{index}] = {entry!r} is refused: {error}; write a network such as 192.168.100.0/24"
            )
        else:
            networks.append(network)
    for index, network in enumerate(networks):
        for other in networks[:index]:
            if network.overlaps(other):
                errors.append(
                    f"rdma_rail_subnets {other} and {network} overlap; both rails in one subnet "
                    "give only one of them the "
                    "route, and the other stays idle: give each rail its own /24"
                )
            elif network.prefixlen > NCCL_SUBNET_BITS and network.supernet(
                new_prefix=NCCL_SUBNET_BITS
            ) == other.supernet(new_prefix=min(NCCL_SUBNET_BITS, other.prefixlen)):
                errors.append(
                    f"rdma_rail_subnets {other} and {network} share their first {NCCL_SUBNET_BITS} "
                    "bits, by which NCCL tells "
                    "subnets apart: put each rail in a /24 of its own"
                )
    return networks


def _numbers(nodes: Sequence[str], overrides: Mapping[str, Any], errors: list[str]) -> dict[str, int]:
    """Host number of each node: its override, else its position + 1."""
    numbers: dict[str, int] = {}
    for position, node in enumerate(nodes):
        given = overrides.get(node) or 0
        if isinstance(given, bool) or not isinstance(given, int):
            errors.append(
                f"rdma_node_number of {node} is {given!r} ({type(given).__name__}); it must be an integer, 1 or more"
            )
            continue
        if given < 0:
            errors.append(
                f"rdma_node_number of {node} is {given}; it must be 1 or more, or 0 for the position in rdma_nodes"
            )
            continue
        numbers[node] = given or position + 1
    for node, number in numbers.items():
        twins = [name for name, value in numbers.items() if value == number]
        if len(twins) > 1 and twins[0] == node:
            errors.append(
                f"{' and '.join(twins)} both have host number {number}, so they would get equal rail addresses: set "
                "rdma_node_number to a different value for one of them"
            )
    return numbers


def _collisions(
    networks: Sequence[ipaddress.IPv4Network],
    routes: Sequence[Mapping[str, Any]],
    rail_netdevs: Sequence[str],
    node: str,
) -> list[str]:
    """Routes that a rail subnet would fight with. Rails' own routes are ours to replace."""
    found: list[str] = []
    for network in networks:
        for route in routes:
            destination, netdev = str(route.get("dst", "default")), str(route.get("dev", "?"))
            if destination == "default" or netdev in rail_netdevs:
                continue
            try:
                other = ipaddress.ip_network(destination, strict=False)
            except ValueError:
                continue
            if isinstance(other, ipaddress.IPv4Network) and other.prefixlen and network.overlaps(other):
                found.append(
                    f"rail subnet {network} collides with the route {other} through {netdev} on "
                    f"{node}: choose another subnet "
                    "in rdma_rail_subnets, or remove that route"
                )
    return found


def rail_plan(
    nodes: Sequence[str],
    subnets: object,
    node: str,
    probes: Mapping[str, Mapping[str, Any]] | None = None,
    numbers: Mapping[str, Any] | None = None,
    mtu_bytes: object = 9000,
) -> dict[str, Any]:
    """Plan the rails of one node.

    `nodes`: names in order. `subnets`: one IPv4 network per rail. `node`: the node to plan for.
    `probes`: node -> result of goodput.spark.rails, for the nodes that are known in this run; the own
    probe names the netdevs and routes, the peers' probes their MAC addresses. `numbers`: node -> host number.

    Returns errors (sentences, empty when the plan is good), warnings, number, sysctls and rails: a list of
    {rail, netdev, rdma_device, subnet, prefix, address, cidr, mtu_bytes, peers: [{node, address, mac, macs, asked}]},
    where mac is the peer's MAC on that rail and macs its MACs on all rails, both empty if not known, and asked
    is false for a peer that is not in this run. interfaces
    says the same for goodput.spark.netplan_commit, with the peers of this run only.
    """
    errors: list[str] = []
    warnings: list[str] = []
    probes = probes or {}
    if isinstance(nodes, str) or not nodes:
        errors.append(f"rdma_nodes is {nodes!r}; it must be a list with at least one node name")
        nodes = []
    if len(set(nodes)) != len(nodes):
        errors.append(f"rdma_nodes names a node twice: {', '.join(nodes)}")
    if nodes and node not in nodes:
        errors.append(f"{node} is not in rdma_nodes ({', '.join(nodes)}): add it there, or leave it out of this play")
    if isinstance(mtu_bytes, bool) or not isinstance(mtu_bytes, int) or not RDMA_MTU_MIN_BYTES <= mtu_bytes <= 9978:
        errors.append(
            f"rdma_mtu_bytes is {mtu_bytes!r} ({type(mtu_bytes).__name__}); it must be an integer "
            f"from {RDMA_MTU_MIN_BYTES} "
            "to 9978, and 9000 gives RoCE its 4096-byte packets"
        )
    networks = _subnets(subnets, errors)
    host_numbers = _numbers(nodes, numbers or {}, errors)
    for network in networks:
        for name, number in host_numbers.items():
            if number > network.num_addresses - 2:
                errors.append(
                    f"host number {number} of {name} does not fit into {network}, which has "
                    f"{network.num_addresses - 2} "
                    "host addresses: use a larger subnet or a smaller rdma_node_number"
                )
    own = probes.get(node, {})
    own_rails: Sequence[Mapping[str, Any]] = own.get("rails") or []
    netdevs = [str(rail["netdev"]) for rail in own_rails]
    errors += _collisions(networks, own.get("routes") or [], netdevs, node)
    if len(nodes) > RAILS_PER_PORT:
        warnings.append(
            f"{len(nodes)} nodes in rdma_nodes: a direct cable joins two, so more of them need a switch on the rails"
        )
    ports = {name: probe["port"] for name, probe in probes.items() if probe.get("port")}
    if len(set(ports.values())) > 1:
        listed = ", ".join(f"{name} {port}" for name, port in sorted(ports.items()))
        warnings.append(f"the nodes use different ports ({listed}); NVIDIA advises the same port on both boxes")

    absent = [name for name in nodes if probes and name not in probes]
    if absent:
        warnings.append(f"{', '.join(absent)} not in this run, so nothing is asked of it and no proof is made")

    rails: list[dict[str, Any]] = []
    if not errors:
        for index, (network, facts) in enumerate(zip(networks, own_rails, strict=False)):
            peers = []
            for peer in nodes:
                if peer == node:
                    continue
                macs = [str(rail.get("mac", "")) for rail in probes.get(peer, {}).get("rails") or []]
                peers.append(
                    {
                        "node": peer,
                        "address": str(network[host_numbers[peer]]),
                        "mac": macs[index] if index < len(macs) else "",
                        "macs": macs,
                        "asked": peer in probes,
                    }
                )
            address = str(network[host_numbers[node]])
            rails.append(
                {
                    "rail": index,
                    "netdev": facts["netdev"],
                    "rdma_device": facts["rdma_device"],
                    "subnet": str(network),
                    "prefix": network.prefixlen,
                    "address": address,
                    "cidr": f"{address}/{network.prefixlen}",
                    "mtu_bytes": mtu_bytes,
                    "peers": peers,
                }
            )
    return {
        "errors": errors,
        "warnings": warnings,
        "node": node,
        "number": host_numbers.get(node, 0),
        "rails": rails,
        "interfaces": [
            {
                "netdev": rail["netdev"],
                "cidr": rail["cidr"],
                "mtu_bytes": rail["mtu_bytes"],
                "peers": [peer["address"] for peer in rail["peers"] if peer["node"] in probes],
            }
            for rail in rails
        ],
        "sysctls": rail_sysctls([rail["netdev"] for rail in rails]),
    }
