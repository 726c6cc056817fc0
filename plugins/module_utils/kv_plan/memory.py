# Apache-2.0 (see LICENSE)
"""The memory budget of a node: every byte of MemTotal has a name, and the lines sum to MemTotal.

A GB10 has one memory for CPU and GPU, so weights, KV, L1, page cache and the control plane compete. Pod limits do not
bound CUDA memory and a GB10 freezes rather than kills, so this budget is the guard.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .checks import MIB, ceil_div, gib_to_bytes
from .profile import Node, Profile

#: Mooncake's own buffer for SSD offload (MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES).
MOONCAKE_OFFLOAD_BUFFER_BYTES = 1280 * MIB


@dataclass(frozen=True)
class Line:
    name: str
    bytes: int
    why: str


@dataclass(frozen=True)
class Demand:
    """What the arrangement asks of every node, in bytes (L1 and KV excepted, which the solver varies)."""

    weights_bytes: int
    engine_overhead_bytes: int
    lmcache_process_bytes: int
    mooncake_bytes: int
    page_cache_bytes: int
    shm_bytes: int
    reserve_bytes: int

    @property
    def engine_bytes(self) -> int:
        return self.weights_bytes + self.engine_overhead_bytes


def demand(profile: Profile, weights_bytes: int, chunk_slot_bytes: int) -> Demand:
    """The fixed part of the budget from the profile's ``memory`` section."""
    memory, lmcache = profile.memory, profile.lmcache
    process = mooncake = 0
    if lmcache.enabled:
        process = int((memory.lmcache_context_mib + memory.lmcache_process_mib) * MIB)
        process += memory.lmcache_staging_chunks * chunk_slot_bytes
        if lmcache.l2.adapter == "mooncake_store":
            mooncake = gib_to_bytes(lmcache.l2.mooncake_segment_gib)
            mooncake += MOONCAKE_OFFLOAD_BUFFER_BYTES if lmcache.l2.mooncake_ssd_offload else 0
    return Demand(
        weights_bytes=weights_bytes,
        engine_overhead_bytes=gib_to_bytes(memory.engine_overhead_gib),
        lmcache_process_bytes=process,
        mooncake_bytes=mooncake,
        page_cache_bytes=gib_to_bytes(memory.page_cache_gib),
        shm_bytes=gib_to_bytes(memory.shm_gib),
        reserve_bytes=gib_to_bytes(memory.reserve_gib),
    )


def os_bytes(profile: Profile, node: Node) -> int:
    """What the running system holds at rest: MemTotal - MemAvailable, or the profile's figure if not measured."""
    if node.available_bytes is None:
        return gib_to_bytes(profile.memory.os_gib)
    return node.total_bytes - node.available_bytes


def control_plane_bytes(profile: Profile, node: Node) -> int:
    memory = profile.memory
    return gib_to_bytes(memory.control_plane_server_gib if node.server else memory.control_plane_agent_gib)


def budget(profile: Profile, node: Node, need: Demand, kv_bytes: int, l1_bytes: int) -> list[Line]:
    """The lines of one node; the last one, ``free``, is negative by what is missing. Sum = MemTotal, to the byte."""
    lines = [
        Line("weights", need.weights_bytes, "model"),
        Line("device KV", kv_bytes, "--kv-cache-memory-bytes"),
        Line("engine overhead", need.engine_overhead_bytes, "CUDA context, activations, graphs"),
        Line("L1", l1_bytes, "--l1-size-gb, pinned"),
        Line("LMCache process", need.lmcache_process_bytes, "CUDA context, process, transfer buffer"),
        Line("Mooncake", need.mooncake_bytes, "segment and offload buffer"),
        Line(
            "OS at rest",
            os_bytes(profile, node),
            "MemTotal - MemAvailable" if node.available_bytes is not None else "assumed",
        ),
        Line("control plane", control_plane_bytes(profile, node), "server, frontend" if node.server else "agent"),
        Line("page cache", need.page_cache_bytes, "weights and L2 files on their way"),
        Line("shm", need.shm_bytes, "/dev/shm"),
        Line("reserve", need.reserve_bytes, "kept free: crash residue, spikes"),
    ]
    lines.append(Line("free", node.total_bytes - sum(line.bytes for line in lines), "left over"))
    return lines


def reachable_bytes(profile: Profile, node: Node) -> int:
    """What CUDA can reach on this node: as measured at boot, else ``reachable_fraction`` of MemTotal."""
    if node.cuda_free_bytes is not None:
        return node.cuda_free_bytes
    return int(node.total_bytes * profile.memory.reachable_fraction)


def utilization_percent(nodes: Sequence[Node], need: Demand, kv_bytes: int) -> int:
    """``--gpu-memory-utilization`` in percent: the least that covers the engine on the smallest node.

    With explicit KV bytes vLLM uses it only for its start check, but still uses it.
    """
    smallest = min(node.total_bytes for node in nodes)
    return ceil_div(100 * (need.engine_bytes + kv_bytes), smallest)


def start_check(profile: Profile, node: Node, need: Demand, l1_bytes: int, percent: int) -> tuple[int, int]:
    """(wanted, available) bytes at vLLM's start, when L1 and the control plane are already up.

    wanted = MemTotal x utilization + margin; vLLM compares with MemAvailable, and the margin covers an engine whose
    device memory is not yet given back.
    """
    wanted = node.total_bytes * percent // 100 + profile.memory.start_check_margin_bytes
    before = l1_bytes + need.lmcache_process_bytes + need.mooncake_bytes + control_plane_bytes(profile, node)
    return wanted, node.total_bytes - os_bytes(profile, node) - before
