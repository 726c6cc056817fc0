# Apache-2.0 (see LICENSE)
"""Resolve a profile for a model and nodes: every ``auto`` gets a value, every size is computed.

The solver only finds values; whether they are allowed is asked of the rules, so a value given by hand and a solved one
are judged alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from . import device, geometry, l1, memory
from .checks import GIB, MIB, PlanInputError, ceil_div, gib_to_bytes
from .profile import AUTO, Model, Node, Observed, Profile, version_tuple

#: Steps of solved values: readable numbers, small against every size here.
KV_STEP_BYTES = 100_000_000
L1_STEP_BYTES = 256 * MIB
#: Without ``typical_prompt_tokens`` a typical prompt is taken as this share of the longest.
TYPICAL_SHARE_PERCENT = 48
PLAIN_MAX_NUM_BATCHED_TOKENS = 8192
#: LMCache's default chunk where no hybrid block dictates one.
PLAIN_CHUNK_TOKENS = 256
#: First version on which separate object groups were seen to change what a restore takes.
SEPARATE_GROUPS_FLOOR = (0, 5, 6)
#: Share of Mooncake's DRAM segments in use before it evicts (--eviction_high_watermark_ratio).
MOONCAKE_WATERMARK_PERCENT = 90


@dataclass(frozen=True)
class Sizes:
    """Every size of a plan. Tokens, chunks and prefixes of a tier are per node; ``longest`` is the longest prompt."""

    block_size_tokens: int
    page_bytes: int
    mamba_state_bytes: int
    chunk_size_tokens: int
    chunk_bytes: int
    chunk_slot_bytes: int
    lmcache_bytes_per_token: int
    longest_prompt_tokens: int
    longest_prompt_chunks: int
    longest_prefix_bytes: int
    typical_prompt_tokens: int
    typical_prompt_chunks: int
    typical_prefix_bytes: int
    max_num_batched_tokens: int
    gpu_memory_utilization_percent: int
    device_group_layers: int
    device_groups: int
    device_block_bytes: int
    device_bytes: int
    kv_blocks: int
    kv_blocks_per_request: int
    device_tokens: int
    device_full_prefixes: int
    l1_gib: float
    l1_bytes: int
    l1_chunks: int
    l1_tokens: int
    l1_full_prefixes: int
    l1_guaranteed_bytes: int
    l1_guaranteed_chunks: int
    l1_room_bytes: int
    l1_room_chunks: int
    store_reserve_chunks: int
    restores_at_once_longest: int
    restores_at_once_typical: int
    simultaneous_restores: int
    simultaneous_restores_bytes: int
    mean_chunks_at_once: int
    mean_tokens_at_once: int
    prefetch_max_in_flight: int
    l2_capacity_gib: float
    l2_bytes: int
    l2_chunks: int
    l2_tokens: int
    l2_kept_tokens: int
    l2_full_prefixes: int
    l1_adds_tokens: int
    l2_adds_tokens: int

    def as_dict(self) -> dict[str, int | float]:
        return asdict(self)


@dataclass(frozen=True)
class Context:
    """Everything a rule may look at."""

    profile: Profile
    model: Model
    nodes: tuple[Node, ...]
    observed: Observed
    sizes: Sizes
    need: memory.Demand

    @property
    def stages(self) -> bool:
        """Something is loaded into L1 from below or from a peer."""
        lmcache = self.profile.lmcache
        return lmcache.enabled and (lmcache.l2.adapter != "none" or lmcache.p2p.enabled)

    @property
    def retains(self) -> bool:
        return retains(self.profile)

    @property
    def held_millis(self) -> int:
        return held_millis(self.profile)

    @property
    def separate(self) -> bool:
        return separate_effective(self.profile)


def separate_effective(profile: Profile) -> bool:
    """Separate object groups count only where they were seen to work."""
    return (
        profile.lmcache.object_groups == "separate"
        and version_tuple("versions.lmcache", profile.versions.lmcache) >= SEPARATE_GROUPS_FLOOR
    )


def retains(profile: Profile) -> bool:
    """L1 keeps what it stored (staging with ``skip_l1`` and the default prefetch policy keeps nothing)."""
    lmcache = profile.lmcache
    return lmcache.enabled and (lmcache.store_policy == "default" or lmcache.prefetch_policy == "retain")


def watermark_millis(profile: Profile) -> int:
    return round(profile.lmcache.l1.eviction_watermark * 1000)


def held_millis(profile: Profile) -> int:
    """The share of L1, in thousandths, that retained chunks hold for as long as they like."""
    return watermark_millis(profile) if retains(profile) else 0


def _largest(low: int, high: int, step: int, fits: Callable[[int], bool]) -> int | None:
    """Largest ``low + k x step <= high`` for which the (monotone) ``fits`` holds; None if not even ``low``."""
    if not fits(low):
        return None
    good, bad = 0, (high - low) // step + 1
    while bad - good > 1:
        middle = (good + bad) // 2
        if fits(low + middle * step):
            good = middle
        else:
            bad = middle
    return low + good * step


def _round_up(value: int, step: int) -> int:
    return ceil_div(value, step) * step


def resolve(profile: Profile, model: Model, nodes: Sequence[Node], observed: Observed | None = None) -> Context:
    """Solve ``auto`` and compute every size. Raises ``PlanInputError`` for input that no rule can judge."""
    if not nodes:
        raise PlanInputError(
            "nodes", [], "at least one node with its measured memory is needed", "give --memory or node facts"
        )
    names = [node.name for node in nodes]
    if len(set(names)) != len(names):
        raise PlanInputError("nodes", names, "each node appears once", "give every node its own name")
    shape, dtypes, serving, lmcache = model.geometry, profile.dtypes, profile.serving, profile.lmcache
    mocker = profile.engine == "mocker"

    alignment = profile.mocker.block_size_tokens if mocker else profile.block_alignment_tokens
    block = geometry.block_tokens(shape, dtypes, alignment)
    page = geometry.page_bytes(shape, dtypes, block)
    auto_chunk = block if shape.hybrid else _round_up(max(PLAIN_CHUNK_TOKENS, block), block)
    chunk = auto_chunk if lmcache.chunk_tokens == AUTO else int(lmcache.chunk_tokens)
    separate = separate_effective(profile)
    align = lmcache.l1.align_bytes
    chunk_size = geometry.chunk_bytes(shape, dtypes, chunk)
    slot = _round_up(chunk_size, align)

    max_len = serving.max_model_len_tokens
    longest = max_len if profile.load.longest_prompt_tokens == AUTO else int(profile.load.longest_prompt_tokens)
    if longest > max_len:
        raise PlanInputError(
            "load.longest_prompt_tokens",
            longest,
            f"cannot exceed serving.max_model_len_tokens {max_len}",
            "lower it or raise the other",
        )
    if profile.load.typical_prompt_tokens == AUTO:
        typical = max(longest * TYPICAL_SHARE_PERCENT // 100, 1)
    else:
        typical = int(profile.load.typical_prompt_tokens)
    if typical > longest:
        raise PlanInputError(
            "load.typical_prompt_tokens", typical, f"cannot exceed the longest prompt, {longest} tokens", "lower it"
        )
    n_longest, n_typical = geometry.full_chunks(longest, chunk), geometry.full_chunks(typical, chunk)
    longest_bytes = geometry.restore_bytes(shape, dtypes, n_longest, chunk, separate, align)
    typical_bytes = geometry.restore_bytes(shape, dtypes, n_typical, chunk, separate, align)

    if serving.max_num_batched_tokens == AUTO:
        batched = 2 * block - 1 if shape.hybrid else max(PLAIN_MAX_NUM_BATCHED_TOKENS, block)
    else:
        batched = int(serving.max_num_batched_tokens)
    reserve = (
        l1.store_reserve_chunks(batched, chunk)
        if lmcache.l1.store_reserve_chunks == AUTO
        else int(lmcache.l1.store_reserve_chunks)
    )
    arrivals = (
        profile.load.concurrency_per_node
        if profile.load.simultaneous_restores == AUTO
        else int(profile.load.simultaneous_restores)
    )

    weights = model.weights_bytes if profile.memory.weights_bytes == AUTO else int(profile.memory.weights_bytes)
    if weights is None:
        raise PlanInputError(
            f"{shape.name}: weights_bytes",
            None,
            "the size of the weights is needed",
            "set memory.weights_bytes or use a directory with weights",
        )
    need = memory.demand(profile, weights, slot)

    groups = device.device_groups(shape)
    block_bytes = device.device_block_bytes(shape, dtypes, block)
    per_request = device.blocks_per_request(shape, block, max_len, serving.mtp_tokens)
    per_longest = device.blocks_per_request(shape, block, longest, serving.mtp_tokens)
    slots_per_sequence = groups.attention + groups.mamba * (device.ALIGN_MAMBA_BLOCKS + serving.mtp_tokens)
    least_kv = max(per_request, serving.max_num_seqs * slots_per_sequence) * block_bytes

    def utilization(kv: int) -> int:
        if serving.gpu_memory_utilization == AUTO:
            return memory.utilization_percent(nodes, need, kv)
        return round(float(serving.gpu_memory_utilization) * 100)

    def fits(kv: int, l1_size: int) -> bool:
        percent = utilization(kv)
        for node in nodes:
            if memory.budget(profile, node, need, kv, l1_size)[-1].bytes < 0:
                return False
            if mocker:
                continue
            reachable = memory.reachable_bytes(profile, node)
            if need.engine_bytes + kv > reachable or node.total_bytes * percent > reachable * 100:
                return False
            wanted, available = memory.start_check(profile, node, need, l1_size, percent)
            if wanted > available:
                return False
        return True

    if mocker:
        kv_low = kv_high = 0
    elif serving.kv_cache_bytes == AUTO:
        kv_low = _round_up(least_kv, KV_STEP_BYTES)
        kv_high = max(node.total_bytes for node in nodes)
    else:
        kv_low = kv_high = int(serving.kv_cache_bytes)

    l1_bytes, reserve_bytes, held = 0, reserve * slot, held_millis(profile)
    stated = longest_bytes + (arrivals - 1) * typical_bytes
    if lmcache.enabled:
        if lmcache.l1.size_gib == AUTO:
            least, wish = (
                max(_round_up(l1.l1_bytes_for(room, reserve_bytes, held), L1_STEP_BYTES), L1_STEP_BYTES)
                for room in (longest_bytes, stated)
            )
            best = _largest(least, wish, L1_STEP_BYTES, lambda size: fits(kv_low, size))
            l1_bytes = least if best is None else best
        else:
            l1_bytes = gib_to_bytes(float(lmcache.l1.size_gib))

    kv = kv_low
    if kv_high > kv_low:
        kv = _largest(kv_low, kv_high, KV_STEP_BYTES, lambda size: fits(size, l1_bytes)) or kv_low

    # What L1 holds and stages.
    slots = l1.l1_slots(l1_bytes, slot)
    room = l1.room_bytes(l1_bytes, reserve_bytes, held)
    restores_longest = l1.restores_at_once(room, longest_bytes)
    restores_typical = l1.restores_at_once(room, typical_bytes)
    if separate:
        attention, mamba = (_round_up(size, align) for size in geometry.separate_object_bytes(shape, dtypes, chunk))
        states = arrivals * mamba
        mean_chunks = (max(room, states) - states) // (arrivals * attention)
    else:
        mean_chunks = l1.mean_chunks_at_once(room // slot, arrivals)
    guaranteed = l1.guaranteed_bytes(l1_bytes, watermark_millis(profile))
    if not lmcache.enabled:
        in_flight = 0
    elif lmcache.prefetch_max_in_flight == AUTO:
        in_flight = l1.prefetch_in_flight(restores_longest, profile.load.waiting_restores, arrivals)
    else:
        in_flight = int(lmcache.prefetch_max_in_flight)

    # The tier below. With O_DIRECT files have L1's padded length.
    if not lmcache.enabled or lmcache.l2.adapter == "none":
        l2_bytes = 0
    elif lmcache.l2.adapter == "mooncake_store":
        l2_bytes = gib_to_bytes(lmcache.l2.mooncake_segment_gib) * MOONCAKE_WATERMARK_PERCENT // 100
        if lmcache.l2.mooncake_ssd_offload:
            l2_bytes += gib_to_bytes(lmcache.l2.capacity_gib)
    else:
        l2_bytes = gib_to_bytes(lmcache.l2.capacity_gib)
    stored = slot if lmcache.l2.use_odirect else chunk_size
    l2_chunks = l2_bytes // stored
    kept = l2_bytes * round(lmcache.l2.eviction_watermark * 1000) // (1000 * stored)
    blocks = profile.mocker.num_gpu_blocks if mocker else kv // block_bytes
    tokens = blocks * block if mocker else device.device_tokens(blocks, per_request, max_len)
    l1_kept = l1_bytes * held // (1000 * slot) * chunk

    sizes = Sizes(
        block_size_tokens=block,
        page_bytes=page,
        mamba_state_bytes=geometry.mamba_state_bytes(shape, dtypes),
        chunk_size_tokens=chunk,
        chunk_bytes=chunk_size,
        chunk_slot_bytes=slot,
        lmcache_bytes_per_token=geometry.lmcache_bytes_per_token(shape, dtypes),
        longest_prompt_tokens=longest,
        longest_prompt_chunks=n_longest,
        longest_prefix_bytes=longest_bytes,
        typical_prompt_tokens=typical,
        typical_prompt_chunks=n_typical,
        typical_prefix_bytes=typical_bytes,
        max_num_batched_tokens=batched,
        gpu_memory_utilization_percent=0 if mocker else utilization(kv),
        device_group_layers=groups.size,
        device_groups=groups.total,
        device_block_bytes=block_bytes,
        device_bytes=kv,
        kv_blocks=blocks,
        kv_blocks_per_request=per_request,
        device_tokens=tokens,
        device_full_prefixes=blocks // per_longest,
        l1_gib=l1_bytes / GIB,
        l1_bytes=l1_bytes,
        l1_chunks=slots,
        l1_tokens=slots * chunk,
        l1_full_prefixes=slots // n_longest if n_longest else 0,
        l1_guaranteed_bytes=guaranteed,
        l1_guaranteed_chunks=guaranteed // slot,
        l1_room_bytes=room,
        l1_room_chunks=room // slot,
        store_reserve_chunks=reserve,
        restores_at_once_longest=restores_longest,
        restores_at_once_typical=restores_typical,
        simultaneous_restores=arrivals,
        simultaneous_restores_bytes=stated,
        mean_chunks_at_once=mean_chunks,
        mean_tokens_at_once=mean_chunks * chunk,
        prefetch_max_in_flight=in_flight,
        l2_capacity_gib=l2_bytes / GIB,
        l2_bytes=l2_bytes,
        l2_chunks=l2_chunks,
        l2_tokens=l2_chunks * chunk,
        l2_kept_tokens=kept * chunk,
        l2_full_prefixes=l2_chunks // n_longest if n_longest else 0,
        # Every tier is filled with what the engine just computed, so a lower tier repeats what is above it: it adds
        # only what it holds beyond that.
        l1_adds_tokens=max(l1_kept - tokens, 0),
        l2_adds_tokens=max(kept * chunk - max(tokens, l1_kept), 0),
    )
    return Context(profile, model, tuple(nodes), observed or Observed(), sizes, need)
