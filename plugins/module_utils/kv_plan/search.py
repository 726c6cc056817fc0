# Apache-2.0 (see LICENSE)
"""Search for arrangements: enumerate, keep what the rules allow, rank by one stated objective.

Objective: the number of distinct longest prompts that a node can serve without computing them again, counted as those
in the device arena plus those that the tier below keeps and L1 can stage. It is an upper bound: a lower tier also holds
what the device holds. Constraint: the stated restores fit in L1 at once. Ties: memory left on the tightest node.
Speed is not predicted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from .checks import GIB
from .memory import budget
from .profile import AUTO, P2P, Auto, Model, Node, Profile
from .rules import evaluate
from .solve import Context, resolve

#: Device sizes tried between the least and the most that fits.
DEVICE_STEPS = 8
#: L1 sizes tried, GiB, beside the one that ``auto`` solves.
L1_GRID_GIB = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64)


@dataclass(frozen=True)
class Policy:
    """What L1 does and what is below it; ``store`` None: no LMCache at all."""

    name: str
    store: Literal["default", "skip_l1"] | None = None
    l2: Literal["none", "fs_native"] = "none"


POLICIES = (
    Policy("router only"),
    Policy("L1 retains", "default"),
    Policy("L1 retains, L2", "default", "fs_native"),
    Policy("L1 stages, L2", "skip_l1", "fs_native"),
)


@dataclass(frozen=True)
class Candidate:
    """One allowed arrangement. Bytes are per node; ``prefixes`` is the objective."""

    policy: str
    device_bytes: int
    l1_bytes: int
    l2_bytes: int
    device_prefixes: int
    lower_prefixes: int
    restores_at_once: int
    mean_tokens_at_once: int
    in_flight_max: int
    free_bytes: int

    @property
    def prefixes(self) -> int:
        return self.device_prefixes + self.lower_prefixes


def _variant(profile: Profile, policy: Policy, l1_gib: float | Auto, device: int | Auto) -> Profile:
    serving = replace(profile.serving, kv_cache_bytes=device, gpu_memory_utilization=AUTO, max_num_batched_tokens=AUTO)
    if policy.store is None:
        return replace(profile, serving=serving, lmcache=replace(profile.lmcache, enabled=False))
    lmcache = replace(
        profile.lmcache,
        enabled=True,
        store_policy=policy.store,
        prefetch_policy="default",
        prefetch_max_in_flight=AUTO,
        l1=replace(profile.lmcache.l1, size_gib=l1_gib, eviction_policy="LRU"),
        l2=replace(profile.lmcache.l2, adapter=policy.l2),
        p2p=P2P(),
    )
    return replace(profile, serving=serving, lmcache=lmcache)


def _lower_prefixes(ctx: Context) -> int:
    """Longest prompts that the tier below the device keeps, per node."""
    size = ctx.sizes
    if not ctx.profile.lmcache.enabled or size.longest_prompt_chunks == 0:
        return 0
    if size.l2_bytes:
        return size.l2_kept_tokens // size.chunk_size_tokens // size.longest_prompt_chunks
    watermark = round(ctx.profile.lmcache.l1.eviction_watermark * 1000)
    return size.l1_bytes * watermark // 1000 // size.chunk_slot_bytes // size.longest_prompt_chunks


def _stages_stated(ctx: Context) -> bool:
    """The stated simultaneous restores fit in L1 (in what eviction guarantees, if L1 also retains)."""
    return not ctx.stages or ctx.sizes.l1_room_bytes >= ctx.sizes.simultaneous_restores_bytes


def _judge(profile: Profile, policy: Policy, model: Model, nodes: Sequence[Node]) -> tuple[Context, Candidate | None]:
    ctx = resolve(profile, model, nodes)
    if any(finding.severity == "error" for finding in evaluate(ctx)) or not _stages_stated(ctx):
        return ctx, None
    size = ctx.sizes
    free = min(budget(profile, node, ctx.need, size.device_bytes, size.l1_bytes)[-1].bytes for node in nodes)
    return ctx, Candidate(
        policy=policy.name,
        device_bytes=size.device_bytes,
        l1_bytes=size.l1_bytes,
        l2_bytes=size.l2_bytes,
        device_prefixes=size.device_full_prefixes,
        lower_prefixes=_lower_prefixes(ctx),
        restores_at_once=size.restores_at_once_longest if ctx.stages else 0,
        mean_tokens_at_once=size.mean_tokens_at_once if ctx.stages else 0,
        in_flight_max=size.restores_at_once_longest if ctx.stages else 0,
        free_bytes=free,
    )


def _enumerate(profile: Profile, model: Model, nodes: Sequence[Node]) -> Iterator[Candidate]:
    for policy in POLICIES:
        grid: list[float | Auto] = [AUTO] if policy.store is None else [AUTO, *L1_GRID_GIB]
        for l1_gib in grid:
            best, candidate = _judge(_variant(profile, policy, l1_gib, AUTO), policy, model, nodes)
            if candidate is None:
                continue
            yield candidate
            most = best.sizes.device_bytes
            for part in range(1, DEVICE_STEPS):
                device = most * part // DEVICE_STEPS // 100_000_000 * 100_000_000
                host = best.sizes.l1_bytes / GIB
                if device > 0:
                    smaller = _judge(_variant(profile, policy, host, device), policy, model, nodes)[1]
                    if smaller is not None:
                        yield smaller


def search(profile: Profile, model: Model, nodes: Sequence[Node]) -> list[Candidate]:
    """All allowed arrangements, best first. ``profile`` gives dtypes, lengths, load, L2 capacity and memory figures."""
    unique = {(item.policy, item.device_bytes, item.l1_bytes): item for item in _enumerate(profile, model, nodes)}
    return sorted(unique.values(), key=lambda item: (-item.prefixes, -item.free_bytes, item.l1_bytes, item.policy))


__all__ = ["POLICIES", "Candidate", "search"]
