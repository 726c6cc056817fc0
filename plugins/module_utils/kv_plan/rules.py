# Apache-2.0 (see LICENSE)
"""The rules: each one condition, with the numbers found, what is required, what to change and the report behind it.

``RULES`` is the only list of them; docs/rules.md and ``goodput plan explain`` are generated from it. Ids are stable:
a removed rule leaves a gap. KV001 to KV023 decide about sizes and policies, KV024 and up about their surroundings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from . import device, geometry, l1, memory
from .checks import GIB, PlanInputError, ceil_div, nearest
from .profile import AUTO, Profile, version_tuple
from .solve import L1_STEP_BYTES, Context, watermark_millis

Severity = Literal["error", "warning"]

MEASURED = "measured on vLLM 0.23.0 + LMCache 0.5.2, Nemotron geometry, one H200"
MEASURED_CPU = "measured on LMCache 0.5.6 without a GPU"
#: Rules about memory: accepting them needs a second variable, because the consequence is a frozen node.
MEMORY_RULES = frozenset({"KV012"})

VLLM_FLOOR = (0, 23)
LMCACHE_FLOOR = (0, 5, 2)
MIN_RDMA_ALIGN_BYTES = 65536
FORBIDDEN_L2_ROOTS = (
    "/var/lib/rancher",
    "/var/lib/kubelet",
    "/var/lib/containerd",
    "/tmp",
    "/run",
    "/dev/shm",
    "/boot",
)
#: Keys each adapter really reads (LMCache 0.5.6); it ignores all others without a word.
COMMON_ADAPTER_KEYS = ("type", "max_capacity_gb", "eviction", "persist_enabled", "shared", "serde", "affinity_tag")
ADAPTER_KEYS: dict[str, frozenset[str]] = {
    "fs_native": frozenset(
        (*COMMON_ADAPTER_KEYS, "base_path", "num_workers", "relative_tmp_dir", "use_odirect", "read_ahead_size")
    ),
    "mooncake_store": frozenset(
        [
            "type",
            "num_workers",
            "per_op_workers",
            "eviction",
            "local_hostname",
            "metadata_server",
            "global_segment_size",
            "local_buffer_size",
            "protocol",
            "rdma_devices",
            "master_server_addr",
            "ipc_socket_path",
            "tenant_id",
            "enable_ssd_offload",
            "ssd_offload_path",
            "enable_client_http_server",
            "client_http_port",
        ]
    ),
    "resp": frozenset((*COMMON_ADAPTER_KEYS, "host", "port", "num_workers")),
    "valkey": frozenset(
        [
            *COMMON_ADAPTER_KEYS,
            "startup_nodes",
            "cluster_mode",
            "key_prefix",
            "num_workers",
            "tls_enable",
            "database_id",
            "request_timeout",
            "connection_timeout",
            "ttl_seconds",
        ]
    ),
    "s3": frozenset(
        [
            *COMMON_ADAPTER_KEYS,
            "s3_endpoint",
            "s3_region",
            "s3_num_io_threads",
            "s3_prefer_http2",
            "s3_enable_s3express",
            "disable_tls",
        ]
    ),
}
#: What a store on the network can not do without.
ADAPTER_REQUIRED = {"resp": ("host", "port"), "valkey": ("startup_nodes",), "s3": ("s3_endpoint", "s3_region")}
#: Keys that LMCache reads too, but that would stand on a command line that every account can read.
ADAPTER_SECRETS = ("username", "password", "aws_access_key_id", "aws_secret_access_key")
DEPRECATED_ROUTER = (
    "--router-kv-overlap-score-weight",
    "--kv-overlap-score-weight",
    "DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT",
    "DYN_OVERLAP_SCORE_WEIGHT",
)
LOCAL_HOSTS = ("localhost", "127.0.0.1", "[::1]", "{management_address}", "{node}")


@dataclass(frozen=True)
class Finding:
    """One rule that fired: texts for a person, complete without the code."""

    rule: str
    severity: Severity
    title: str
    found: str
    required: str
    remedy: str
    source: str
    node: str = ""

    def as_dict(self) -> dict[str, str]:
        return {key: value for key, value in self.__dict__.items() if value != ""}


@dataclass(frozen=True)
class Hit:
    """What a check yields; the table adds id, title and source."""

    found: str
    required: str
    remedy: str
    severity: Severity | None = None
    node: str = ""


Check = Callable[[Context], Iterator[Hit]]


@dataclass(frozen=True)
class Rule:
    id: str
    severity: Severity
    title: str
    why: str
    source: str
    check: Check
    #: A profile and settings that fire the rule: ``explain`` shows it with worked numbers, a test proves it.
    example: tuple[str, dict[str, Any]] = ("", {})
    example_nodes: dict[str, Any] = field(default_factory=dict)


RULES: dict[str, Rule] = {}


def _rule(
    rule_id: str,
    severity: Severity,
    title: str,
    why: str,
    source: str,
    example: tuple[str, dict[str, Any]],
    example_nodes: dict[str, Any] | None = None,
) -> Callable[[Check], Check]:
    def register(check: Check) -> Check:
        if rule_id in RULES:
            raise AssertionError(f"rule {rule_id} is defined twice")
        RULES[rule_id] = Rule(rule_id, severity, title, why, source, check, example, example_nodes or {})
        return check

    return register


def _mb(size: int) -> str:
    return f"{size / 1e6:,.0f} MB"


def _gib(size: int) -> str:
    return f"{size / GIB:.2f} GiB"


def _gib_up(size: int) -> str:
    """GiB rounded up to a step that can be typed."""
    return f"{ceil_div(size, L1_STEP_BYTES) * L1_STEP_BYTES / GIB:g}"


def _room(ctx: Context) -> tuple[str, str]:
    """What restores can count on, in chunks: as a term of a formula and in words."""
    size = ctx.sizes
    if ctx.retains and size.l1_room_chunks == size.l1_guaranteed_chunks:
        words = f"the {size.l1_room_chunks} of {size.l1_chunks} chunks that are guaranteed free"
        return f"{size.l1_room_chunks}", words
    term = f"{size.l1_chunks} - {size.store_reserve_chunks}"
    return f"({term})", f"{term} chunks of L1"


_STAGE_ONLY = "set lmcache.store_policy: skip_l1 and prefetch_policy: default so that L1 only stages"


def _can_stage_only(ctx: Context) -> bool:
    """A tier below stores, and no peer reads what L1 retains."""
    return ctx.profile.lmcache.l2.adapter != "none" and not ctx.profile.lmcache.p2p.enabled


def _l1_for(ctx: Context, room: int) -> int:
    reserve = ctx.sizes.store_reserve_chunks * ctx.sizes.chunk_slot_bytes
    return l1.l1_bytes_for(room, reserve, ctx.held_millis)


def _prefix(ctx: Context) -> str:
    size = ctx.sizes
    return (
        f"{size.longest_prompt_chunks} chunks ({_mb(size.longest_prefix_bytes)}) of one"
        f" {size.longest_prompt_tokens:,}-token prompt"
    )


@_rule(
    "KV001",
    "error",
    "LMCache's chunk is a whole number of vLLM blocks",
    "LMCache reads whole blocks of the engine; a chunk that is no multiple of the block is refused when the engine"
    " starts, and a block that differs from the computed one means that every size below is wrong and the router drops"
    " all KV events.",
    "ai-dynamo/dynamo#13904, #9376; LMCache/LMCache#4782",
    ("super-recommended", {"lmcache.chunk_tokens": 4000}),
)
def _kv001(ctx: Context) -> Iterator[Hit]:
    size = ctx.sizes
    if ctx.profile.lmcache.enabled and not geometry.valid_chunk(size.chunk_size_tokens, size.block_size_tokens):
        yield Hit(
            f"chunk {size.chunk_size_tokens:,} tokens, block {size.block_size_tokens:,} tokens",
            f"a multiple of {size.block_size_tokens:,}",
            "set lmcache.chunk_tokens: auto",
        )
    seen = ctx.observed.block_tokens
    if seen is not None and seen != size.block_size_tokens:
        yield Hit(
            f"the engine runs with blocks of {seen:,} tokens",
            f"{size.block_size_tokens:,} tokens, as computed from config.json with kv {ctx.profile.dtypes.kv}, ssm"
            f" {ctx.profile.dtypes.ssm}",
            "compare the dtypes and the backend of the running engine with the profile",
        )


@_rule(
    "KV002",
    "error",
    "Prompts can be at least two blocks long",
    "Below one block prefix caching of a hybrid never hits, without any warning; below two it hits once at best.",
    "vllm-project/vllm#48401",
    ("super-recommended", {"serving.max_model_len_tokens": 8192, "load.typical_prompt_tokens": 4096}),
)
def _kv002(ctx: Context) -> Iterator[Hit]:
    size = ctx.sizes
    limit = ctx.profile.serving.max_model_len_tokens
    if ctx.profile.engine == "vllm" and limit < 2 * size.block_size_tokens:
        smaller = ", or use a 2-byte dtypes.ssm, which halves the block" if ctx.profile.dtypes.ssm == "float32" else ""
        yield Hit(
            f"max_model_len {limit:,} tokens",
            f"at least 2 x block = {2 * size.block_size_tokens:,} tokens",
            f"set serving.max_model_len_tokens to at least {2 * size.block_size_tokens}{smaller}",
        )


@_rule(
    "KV003",
    "error",
    "A prefill step advances exactly one block",
    "With fused objects a step over two blocks stores a chunk whose recurrent state is missing, and a later restore"
    " reads garbage. LMCache 0.5.2 refuses to start; 0.5.6 does not check.",
    f"{MEASURED}; LMCache 0.5.6 lmcache_driven_transfer.py",
    ("nano-recommended", {"serving.max_num_batched_tokens": 8192}),
)
def _kv003(ctx: Context) -> Iterator[Hit]:
    size = ctx.sizes
    if not ctx.model.geometry.hybrid or ctx.profile.engine != "vllm":
        return
    block, batched = size.block_size_tokens, size.max_num_batched_tokens
    fused = ctx.profile.lmcache.enabled and not ctx.separate
    if batched < block or (fused and batched >= 2 * block):
        upper = f" and below {2 * block:,}" if fused else ""
        yield Hit(
            f"max_num_batched_tokens {batched:,}",
            f"at least the block, {block:,}{upper}",
            f"set serving.max_num_batched_tokens: auto (2 x {block:,} - 1 = {2 * block - 1:,})",
        )


@_rule(
    "KV004",
    "error",
    "L1 can stage one longest prompt",
    "A restore reserves L1 for its whole prefix in one step, all or nothing: a prompt that does not fit is never"
    " restored, however much of it lies on the disk.",
    f"{MEASURED}; LMCache/LMCache#4529, #5290",
    ("super-recommended", {"lmcache.l1.size_gib": 3}),
)
def _kv004(ctx: Context) -> Iterator[Hit]:
    size = ctx.sizes
    needed = size.longest_prefix_bytes + size.store_reserve_chunks * size.chunk_slot_bytes
    if ctx.stages and 0 < size.l1_bytes < needed:
        longest = max(size.l1_chunks - size.store_reserve_chunks, 0) * size.chunk_size_tokens
        yield Hit(
            f"L1 {_gib(size.l1_bytes)} = {size.l1_chunks} chunks, {size.store_reserve_chunks} of them for stores on"
            " their way to disk",
            f"{_prefix(ctx)} + {size.store_reserve_chunks} = {_gib(needed)}",
            f"set lmcache.l1.size_gib to at least {_gib_up(needed)}"
            + (f", or load.longest_prompt_tokens to {longest} if longer prompts need no restore" if longest else ""),
        )


@_rule(
    "KV005",
    "error",
    "The in-flight limit is not above what L1 stages",
    "Each restore in flight holds its whole prefix. A limit above that only sends loads to the disk that find no room."
    " It does not protect: with a limit of 1 a second request still fails while the first one's chunks wait to be"
    " read.",
    f"{MEASURED}; LMCache/LMCache#4529",
    ("super-kv12-l18", {"lmcache.prefetch_max_in_flight": 8}),
)
def _kv005(ctx: Context) -> Iterator[Hit]:
    size = ctx.sizes
    waiting = ctx.profile.load.waiting_restores
    allowed = max(size.restores_at_once_longest - waiting, 1)
    if ctx.stages and size.longest_prompt_chunks > 0 and size.prefetch_max_in_flight > allowed:
        room, words = _room(ctx)
        needed = _l1_for(ctx, (size.prefetch_max_in_flight + waiting) * size.longest_prefix_bytes)
        yield Hit(
            f"{size.prefetch_max_in_flight} restores in flight, each of up to {size.longest_prompt_chunks} chunks, in"
            f" {words}",
            f"at most {allowed} (= floor({room} / {size.longest_prompt_chunks}) - {waiting}, at least 1)",
            f"set lmcache.prefetch_max_in_flight: auto, or lmcache.l1.size_gib to {_gib_up(needed)}",
        )


@_rule(
    "KV006",
    "error",
    "A retaining L1 always has room for one longest prompt",
    "Eviction runs once a second above the watermark and never because room is needed. A retaining L1 just below its"
    " watermark therefore refuses every restore that does not fit in the rest, for ever; only (1 - w) x L1 is"
    " guaranteed. What a store cannot place is never stored at all.",
    f"{MEASURED}; {MEASURED_CPU}; LMCache/LMCache#5290",
    ("super-kv16-l14", {}),
)
def _kv006(ctx: Context) -> Iterator[Hit]:
    size, part = ctx.sizes, ctx.profile.lmcache.l1
    if (
        not ctx.retains
        or size.longest_prompt_chunks == 0
        or size.l1_bytes == 0
        or size.l1_guaranteed_bytes >= size.longest_prefix_bytes
    ):
        return
    w = part.eviction_watermark
    remedies = []
    if _can_stage_only(ctx):
        staging = size.longest_prefix_bytes + size.store_reserve_chunks * size.chunk_slot_bytes
        remedies.append(
            f"{_STAGE_ONLY} (then"
            f" {_gib_up(staging)} GiB hold one such restore, and each further one at the same time takes"
            f" {_gib(size.longest_prefix_bytes)} more)"
        )
    if watermark_millis(ctx.profile) < 1000:
        remedies.append(f"set lmcache.l1.size_gib to at least {_gib_up(_l1_for(ctx, size.longest_prefix_bytes))}")
    if size.l1_bytes > size.longest_prefix_bytes:
        best = math.floor(100 * (1 - size.longest_prefix_bytes / size.l1_bytes)) / 100
        if best >= 0.05:
            remedies.append(f"set lmcache.l1.eviction_watermark to at most {best:.2f}")
    shared = "retention and staging share" if ctx.stages else "retained prompts share"
    yield Hit(
        f"{shared} {size.l1_chunks} chunks; (1 - {w:g}) x {_gib(size.l1_bytes)} = {_mb(size.l1_guaranteed_bytes)}, "
        f"that is {size.l1_guaranteed_chunks} chunks, are guaranteed free",
        _prefix(ctx),
        "; or ".join(remedies) or "raise lmcache.l1.size_gib",
    )


@_rule(
    "KV007",
    "error",
    "skip_l1 has somewhere to store",
    "skip_l1 deletes from L1 what was stored below. The P2P adapter reports every store as done without keeping"
    " anything: with P2P alone 20 of 20 chunks existed nowhere while the counters said 20 stored. Without any adapter"
    " L1 fills and stays full.",
    MEASURED_CPU,
    ("super-c-p2p", {"lmcache.store_policy": "skip_l1"}),
)
def _kv007(ctx: Context) -> Iterator[Hit]:
    lmcache = ctx.profile.lmcache
    if lmcache.enabled and lmcache.store_policy == "skip_l1" and lmcache.l2.adapter == "none":
        found = "P2P is the only adapter, and it stores nothing" if lmcache.p2p.enabled else "no adapter below L1"
        yield Hit(
            f"store_policy skip_l1; {found}",
            "an adapter that stores, such as fs_native",
            "set lmcache.l2.adapter: fs_native with a capacity, or lmcache.store_policy: default",
        )


@_rule(
    "KV008",
    "error",
    "What is retained can be evicted",
    "retain with noop fills L1 once and then fails every load (15, 15, then 0 hits). noop with skip_l1 works until the"
    " disk fails once: L1 stayed wedged at 39 of 40 chunks after the disk had recovered, where LRU healed by itself.",
    f"{MEASURED_CPU}; local-inference-lab/blackwell-llm-docker#24",
    ("super-recommended", {"lmcache.l1.eviction_policy": "noop", "lmcache.prefetch_policy": "retain"}),
)
def _kv008(ctx: Context) -> Iterator[Hit]:
    lmcache = ctx.profile.lmcache
    if not lmcache.enabled or lmcache.l1.eviction_policy != "noop":
        return
    if ctx.retains:
        why = "prefetch_policy retain" if lmcache.prefetch_policy == "retain" else "store_policy default"
        yield Hit(f"eviction_policy noop with {why}", "a policy that evicts", "set lmcache.l1.eviction_policy: LRU")
    else:
        yield Hit(
            "eviction_policy noop: after one failed write L1 stays full until the server is restarted",
            "a policy that evicts (LRU costs nothing here)",
            "set lmcache.l1.eviction_policy: LRU",
            severity="warning",
        )


@_rule(
    "KV009",
    "error",
    "A capacity on disk comes with eviction",
    "max_capacity_gb alone bounds nothing: 90 files with a cap of 20, 14 TB with 4 TB declared. Mooncake without a"
    " limit takes 90 % of the disk.",
    f"LMCache/LMCache#4725, #4787; {MEASURED_CPU}; kvcache-ai/Mooncake ssd-offload.md",
    ("super-recommended", {"lmcache.l2.eviction_policy": "none"}),
)
def _kv009(ctx: Context) -> Iterator[Hit]:
    l2 = ctx.profile.lmcache.l2
    if not ctx.profile.lmcache.enabled or not l2.on_disk:
        return
    if l2.capacity_gib <= 0:
        yield Hit(
            "capacity_gib 0 (unbounded)",
            "a capacity in GiB",
            "set lmcache.l2.capacity_gib to what the filesystem can hold",
        )
    elif l2.adapter == "fs_native" and l2.eviction_policy == "none":
        yield Hit(
            f"max_capacity_gb {l2.capacity_gib:g} without an eviction block",
            "both: without eviction the cap is only printed",
            "set lmcache.l2.eviction_policy: LRU",
        )


@_rule(
    "KV010",
    "error",
    "Every key of the adapter is one that the adapter reads",
    "LMCache ignores unknown keys of an --l2-adapter JSON without a word, so a misspelt capacity is no capacity.",
    "LMCache 0.5.6 distributed/l2_adapters, from_dict",
    ("super-recommended", {"lmcache.l2.adapter_extra": {"max_capacity": 400}}),
)
def _kv010(ctx: Context) -> Iterator[Hit]:
    l2 = ctx.profile.lmcache.l2
    known = ADAPTER_KEYS.get(l2.adapter, frozenset())
    for key in sorted(set(l2.adapter_extra) - known - set(ADAPTER_SECRETS)) if ctx.profile.lmcache.enabled else ():
        yield Hit(
            f"adapter_extra.{key} for {l2.adapter}",
            "a key that this adapter reads",
            nearest(key, known) if known else "remove it",
        )


@_rule(
    "KV011",
    "error",
    "L2 has a filesystem of its own that can hold it",
    "On the root or kubelet filesystem a full cache evicts the serving pods (DiskPressure). fs_native counts from zero"
    " at every start, so files left from earlier runs come on top, and it overshoots by about one second of writes.",
    f"LMCache/LMCache#4664, #4564; {MEASURED_CPU}",
    ("super-recommended", {"lmcache.l2.path": "/var/lib/rancher/lmcache"}),
)
def _kv011(ctx: Context) -> Iterator[Hit]:
    l2 = ctx.profile.lmcache.l2
    if not ctx.profile.lmcache.enabled or not l2.on_disk:
        return
    path = l2.path.rstrip("/")
    own = "a filesystem of its own, such as /srv/goodput/l2"
    if not path.startswith("/"):
        yield Hit(f"L2 path {l2.path!r}", "an absolute path on " + own, "set lmcache.l2.path")
        return
    for root in FORBIDDEN_L2_ROOTS:
        if path == root or path.startswith(root + "/"):
            yield Hit(
                f"L2 path {path} lies under {root}", own, "set lmcache.l2.path to the mount that the role nvme_l2 makes"
            )
    own_mount = all(node.l2_filesystem is not None and node.l2_filesystem.mount == path for node in ctx.nodes)
    if path.count("/") < 2 and path != "" and not own_mount:
        yield Hit(
            f"L2 path {path} is a top-level directory of the root filesystem", own, "set lmcache.l2.path to a mount"
        )
    if path == "":
        yield Hit("L2 path /", own, "set lmcache.l2.path to a mount")
    needed = int(l2.capacity_gib * GIB * 1.05)
    for node in ctx.nodes:
        disk = node.l2_filesystem
        if disk is None:
            continue
        if disk.mount == "/" or not (path + "/").startswith(disk.mount.rstrip("/") + "/"):
            yield Hit(
                f"{path} is on the filesystem mounted at {disk.mount}",
                own,
                "mount the L2 disk there first",
                node=node.name,
            )
        elif disk.size_bytes < needed + disk.residue_bytes:
            most = max(int((disk.size_bytes - disk.residue_bytes) / 1.05 / GIB), 0)
            yield Hit(
                f"filesystem of {_gib(disk.size_bytes)} with {_gib(disk.residue_bytes)} of old files",
                f"{l2.capacity_gib:g} GiB x 1.05 + old files = {_gib(needed + disk.residue_bytes)}",
                f"set lmcache.l2.capacity_gib to at most {most}, or purge the old files",
                node=node.name,
            )


@_rule(
    "KV012",
    "error",
    "The budget fits the memory of every node",
    "CPU and GPU share one memory, pod limits do not bound CUDA memory, and a GB10 that runs out freezes without an OOM"
    " kill: SSH dies and only a power cycle helps.",
    "vllm-project/vllm#56824; NVIDIA/dgx-spark-playbooks#97; AEON-7/vllm-ultimate-dgx-spark#9",
    ("super-kv12-l18", {"serving.kv_cache_bytes": 40_000_000_000}),
)
def _kv012(ctx: Context) -> Iterator[Hit]:
    size = ctx.sizes
    for node in ctx.nodes:
        lines = memory.budget(ctx.profile, node, ctx.need, size.device_bytes, size.l1_bytes)
        free = lines[-1].bytes
        if free < 0:
            parts = ", ".join(f"{line.name} {_gib(line.bytes)}" for line in lines[:-1] if line.bytes)
            remedy = (
                f"free {_gib(-free)}: lower serving.kv_cache_bytes by {ceil_div(-free, 100_000_000) * 100_000_000:,}"
            )
            if ctx.profile.lmcache.enabled:
                remedy += f" or lmcache.l1.size_gib by {_gib_up(-free)}"
            yield Hit(
                f"{parts}: together {_gib(node.total_bytes - free)}",
                f"at most {_gib(node.total_bytes)} (MemTotal), reserve included",
                remedy + ", or set one of them to auto",
                node=node.name,
            )


@_rule(
    "KV013",
    "error",
    "The engine's share is one that CUDA can reach",
    "CUDA sees less than MemTotal at boot (101 to 102 of 121.7 GiB on some units, even headless with empty caches), so"
    " a higher utilisation fails at start although the memory looks free.",
    "MiaAI-Lab/GLM-5.3-Flash-EXL3-2x-DGX-Sparks#47",
    ("super-recommended", {"serving.gpu_memory_utilization": 0.9}),
)
def _kv013(ctx: Context) -> Iterator[Hit]:
    if ctx.profile.engine != "vllm":
        return
    size = ctx.sizes
    for node in ctx.nodes:
        reachable = memory.reachable_bytes(ctx.profile, node)
        share = size.gpu_memory_utilization_percent
        basis = (
            "measured"
            if node.cuda_free_bytes is not None
            else f"{ctx.profile.memory.reachable_fraction:g} of MemTotal, assumed"
        )
        if node.total_bytes * share > reachable * 100:
            yield Hit(
                f"gpu_memory_utilization {share / 100:.2f} of {_gib(node.total_bytes)} ="
                f" {_gib(node.total_bytes * share // 100)}",
                f"at most {_gib(reachable)} ({basis})",
                f"set serving.gpu_memory_utilization to at most {reachable * 100 // node.total_bytes / 100:.2f} or"
                " auto",
                node=node.name,
            )
        used = ctx.need.engine_bytes + size.device_bytes
        if used > reachable:
            yield Hit(
                f"weights, KV and engine overhead: {_gib(used)}",
                f"at most {_gib(reachable)} ({basis})",
                f"lower serving.kv_cache_bytes by {ceil_div(used - reachable, 100_000_000) * 100_000_000:,} or set it"
                " to auto",
                node=node.name,
            )


@_rule(
    "KV014",
    "error",
    "RDMA reads an L1 that is there, in large pages",
    "NIXL makes one descriptor a page: 4 KiB pages left the second rail idle (4.3 GB/s against 23.8 with 64 KiB)."
    " Registering an L1 that grows lazily is untested upstream.",
    "LMCache/LMCache#4161",
    ("super-c-p2p", {"lmcache.l1.align_bytes": 4096}),
)
def _kv014(ctx: Context) -> Iterator[Hit]:
    lmcache = ctx.profile.lmcache
    if not lmcache.enabled or not (lmcache.p2p.enabled or lmcache.l2.adapter == "mooncake_store"):
        return
    if lmcache.l1.align_bytes < MIN_RDMA_ALIGN_BYTES:
        yield Hit(
            f"l1.align_bytes {lmcache.l1.align_bytes}",
            f"at least {MIN_RDMA_ALIGN_BYTES}",
            f"set lmcache.l1.align_bytes: {MIN_RDMA_ALIGN_BYTES}",
        )
    if lmcache.l1.lazy:
        yield Hit("L1 grows lazily", "an L1 allocated at start", "set lmcache.l1.lazy: false")


def _loopback(host: str) -> bool:
    return host in ("localhost", "127.0.0.1", "::1", "[::1]")


@_rule(
    "KV015",
    "error",
    "Peers can reach each other",
    "A peer is found through the coordinator and looked up on its request port. On localhost, or without a coordinator,"
    " there are no peers and no error.",
    "LMCache docs/source/mp/p2p.rst; MiaAI-Lab/DeepSeek-v4-Flash-DSpark-2x-DGX-Spark#236",
    ("super-c-p2p", {"lmcache.request_host": "localhost"}),
)
def _kv015(ctx: Context) -> Iterator[Hit]:
    lmcache = ctx.profile.lmcache
    if not lmcache.enabled or not lmcache.p2p.enabled:
        return
    if _loopback(lmcache.request_host):
        yield Hit(
            f"the request port listens on {lmcache.request_host}",
            "an address that peers reach",
            "set lmcache.request_host: '{management_address}'",
        )
    if not lmcache.p2p.coordinator_url:
        yield Hit(
            "no coordinator URL",
            "http://ADDRESS:PORT of the coordinator",
            "remove lmcache.p2p.coordinator_url so that the default is used",
        )


@_rule(
    "KV016",
    "error",
    "The engine talks to the LMCache server of its own node",
    "The server maps the engine's memory by CUDA IPC, which ends at the node: a remote server fails with a GPU UUID"
    " error.",
    "LMCache/LMCache#4049",
    ("super-recommended", {"lmcache.engine_host": "tcp://10.0.0.9"}),
)
def _kv016(ctx: Context) -> Iterator[Hit]:
    lmcache = ctx.profile.lmcache
    if not lmcache.enabled or ctx.profile.engine != "vllm":
        return
    scheme, separator, host = lmcache.engine_host.partition("://")
    if not separator or scheme != "tcp" or host not in LOCAL_HOSTS:
        yield Hit(
            f"lmcache.engine_host {lmcache.engine_host}",
            "tcp:// and this node: localhost or {management_address}",
            "set lmcache.engine_host: 'tcp://{management_address}'; share between nodes through P2P or L2",
        )
    elif lmcache.request_host not in ("0.0.0.0", "::") and _loopback(host) != _loopback(lmcache.request_host):
        yield Hit(
            f"the engine dials {lmcache.engine_host}, the server listens on {lmcache.request_host}",
            "the same address, or a server on 0.0.0.0",
            "set both to {management_address}",
        )


@_rule(
    "KV017",
    "error",
    "The engine can restore Mamba state",
    "Only the multi-process connector knows hybrids; up to 0.22.1 vLLM asserts against external KV in align mode;"
    " LMCache knows Mamba from 0.5.2; without the hybrid cache manager vLLM cannot unify the layers; without prefix"
    " caching nothing is kept.",
    "alibaba/tair-kvcache#257; LMCache/LMCache#2845; ai-dynamo/dynamo#13300; vllm-project/vllm#49537, #42620",
    ("super-recommended", {"serving.mamba_cache_mode": "all"}),
)
def _kv017(ctx: Context) -> Iterator[Hit]:
    profile = ctx.profile
    if profile.engine != "vllm" or not ctx.model.geometry.hybrid:
        return
    serving = profile.serving
    if serving.mamba_cache_mode != "align":
        yield Hit(
            f"mamba_cache_mode {serving.mamba_cache_mode}",
            "align, for which the block is computed",
            "set serving.mamba_cache_mode: align",
        )
    if not serving.prefix_caching:
        yield Hit(
            "prefix caching is off",
            "on: align mode and every cache below depend on it",
            "set serving.prefix_caching: true",
        )
    if not serving.hybrid_kv_cache_manager:
        yield Hit(
            "the hybrid KV cache manager is disabled",
            "enabled on a Mamba hybrid",
            "set serving.hybrid_kv_cache_manager: true",
        )
    if not profile.lmcache.enabled:
        return
    if profile.lmcache.connector != "LMCacheMPConnector":
        yield Hit(
            f"connector {profile.lmcache.connector}",
            "LMCacheMPConnector on a Mamba hybrid",
            "set lmcache.connector: LMCacheMPConnector",
        )
    for name, text, floor in (
        ("vllm", profile.versions.vllm, VLLM_FLOOR),
        ("lmcache", profile.versions.lmcache, LMCACHE_FLOOR),
    ):
        if version_tuple(f"versions.{name}", text) < floor:
            wanted = ".".join(str(part) for part in floor)
            yield Hit(
                f"{name} {text}", f"at least {wanted}", f"raise versions.{name} (and the release set that installs it)"
            )


@_rule(
    "KV018",
    "error",
    "No multi-token prediction beside prefix caching on a hybrid",
    "The pair corrupts output on vLLM 0.28.0, crashes at start on others, and makes the first repeat miss.",
    "vllm-project/vllm#53912, #39809, #53504",
    ("super-recommended", {"serving.mtp_tokens": 3}),
)
def _kv018(ctx: Context) -> Iterator[Hit]:
    serving = ctx.profile.serving
    if ctx.profile.engine == "vllm" and ctx.model.geometry.hybrid and serving.mtp_tokens > 0 and serving.prefix_caching:
        yield Hit(
            f"{serving.mtp_tokens} speculative tokens with prefix caching",
            "one of them off",
            "set serving.mtp_tokens: 0",
        )


@_rule(
    "KV019",
    "error",
    "One model per LMCache server, one identity per L2 directory",
    "A server knows one chunk size. The L2 key has model name and token hash, but neither dtype, block, layout nor"
    " version: another arrangement in the same directory reads wrong bytes as valid.",
    "LMCache/LMCache#4782, #4222; LMCache docs hybrid_models.rst",
    ("super-recommended", {"lmcache.l2.directory": "shared"}),
    {"neighbours": [{"name": "nano", "l2_directory": "shared", "l2_identity": "other"}]},
)
def _kv019(ctx: Context) -> Iterator[Hit]:
    if not ctx.profile.lmcache.enabled:
        return
    directory, identity = l2_directory(ctx), l2_identity(ctx)
    for other in ctx.observed.neighbours:
        if ctx.profile.lmcache.l2.on_disk and other.l2_directory == directory and other.l2_identity != identity:
            yield Hit(
                f"L2 directory {directory} is also used by {other.name} ({other.l2_identity})",
                f"one directory for {identity}",
                "set lmcache.l2.directory: auto",
            )
        if (
            other.lmcache_request_port == ctx.profile.ports.lmcache_request
            and other.block_tokens != ctx.sizes.block_size_tokens
        ):
            yield Hit(
                f"{other.name} uses the LMCache server on port {other.lmcache_request_port} with blocks of"
                f" {other.block_tokens:,} tokens",
                f"a server of its own for blocks of {ctx.sizes.block_size_tokens:,} tokens",
                "set ports.lmcache_request and ports.lmcache_http to free ports",
            )


@_rule(
    "KV020",
    "error",
    "Server and engine have the same LMCache",
    "Different versions do not speak the same protocol.",
    "Dynamo documentation, kv-cache-offloading/lmcache (server tag must equal the version in the worker image)",
    ("super-recommended", {"versions.lmcache_engine": "0.5.2"}),
)
def _kv020(ctx: Context) -> Iterator[Hit]:
    versions = ctx.profile.versions
    if ctx.profile.lmcache.enabled and versions.lmcache_engine not in (AUTO, versions.lmcache):
        yield Hit(
            f"server {versions.lmcache}, engine image {versions.lmcache_engine}",
            "the same version",
            f"install LMCache {versions.lmcache} in the engine image, or the other way round",
        )


@_rule(
    "KV021",
    "warning",
    "Mooncake in DRAM alone holds a working set",
    "A DRAM segment competes with KV and L1 for the same memory; two of 10 GiB hold 0.87 million Super tokens, where a"
    " 400 GiB disk holds 17.5 million.",
    "kvcache-ai/Mooncake ssd-offload.md; sizes computed here",
    ("super-mooncake-dram", {}),
)
def _kv021(ctx: Context) -> Iterator[Hit]:
    lmcache, size = ctx.profile.lmcache, ctx.sizes
    if not lmcache.enabled or lmcache.l2.adapter != "mooncake_store" or lmcache.l2.mooncake_ssd_offload:
        return
    sessions = ctx.profile.load.concurrency_per_node * len(ctx.nodes)
    prefixes = len(ctx.nodes) * size.l2_bytes // size.longest_prefix_bytes if size.longest_prefix_bytes else 0
    if prefixes < 2 * sessions:
        yield Hit(
            f"{len(ctx.nodes)} segments of {lmcache.l2.mooncake_segment_gib:g} GiB hold {prefixes} longest prompts at a"
            " watermark of 0.9",
            f"at least {2 * sessions}, twice the {sessions} sessions served",
            "set lmcache.l2.mooncake_ssd_offload: true with a lmcache.l2.capacity_gib and run mooncake_master with"
            " --enable_offload=true, or set lmcache.l2.adapter: fs_native",
        )


@_rule(
    "KV022",
    "warning",
    "Locks outlive the longest queue",
    "A request that waits longer than the read TTL loses the lock on its prefetched chunks, and they are gone when it"
    " is served.",
    "vllm-project/vllm#51208 (uses 7200 s)",
    ("super-recommended", {"lmcache.l1.read_ttl_seconds": 60}),
)
def _kv022(ctx: Context) -> Iterator[Hit]:
    part, delay = ctx.profile.lmcache.l1, ctx.profile.load.queueing_delay_seconds
    for name, value in (("read_ttl_seconds", part.read_ttl_seconds), ("session_ttl_seconds", part.session_ttl_seconds)):
        if ctx.profile.lmcache.enabled and value <= delay:
            yield Hit(
                f"l1.{name} {value} s",
                f"more than the longest queueing delay, {delay} s",
                f"set lmcache.l1.{name}: 7200",
            )


@_rule(
    "KV023",
    "error",
    "L1 is not zero",
    "Everything passes through L1; with none each restore and store fails, visible only in newer metrics.",
    "LMCache/LMCache#3985, #3112, #4840",
    ("super-recommended", {"lmcache.l1.size_gib": 0}),
)
def _kv023(ctx: Context) -> Iterator[Hit]:
    if ctx.profile.lmcache.enabled and ctx.sizes.l1_bytes == 0:
        yield Hit(
            "L1 size 0", "room for one longest prompt", "set lmcache.l1.size_gib: auto, or lmcache.enabled: false"
        )


@_rule(
    "KV024",
    "error",
    "No deprecated router weights",
    "The old overlap weights still win over the new fields and now mean the prefill load scale, so the router balances"
    " load where it should follow the cache.",
    "Dynamo documentation, kv-aware-routing/configuration-and-tuning",
    ("super-recommended", {"extra_args.frontend": ["--router-kv-overlap-score-weight", "1.0"]}),
)
def _kv024(ctx: Context) -> Iterator[Hit]:
    words = [word.split("=", 1)[0] for word in ctx.profile.extra_args.frontend + ctx.profile.extra_args.worker] + list(
        ctx.profile.extra_env
    )
    for word in words:
        if word in DEPRECATED_ROUTER:
            yield Hit(word, "the fields that replaced it", "use --router-kv-overlap-score-credit, or remove it")


@_rule(
    "KV025",
    "warning",
    "The L2 directory is named after what is in it",
    "A directory named by hand says nothing about model, dtypes, chunk and versions, so the next change of one of them"
    " reads old files as its own.",
    "LMCache docs hybrid_models.rst; LMCache/LMCache#4222",
    ("super-recommended", {"lmcache.l2.directory": "cache"}),
)
def _kv025(ctx: Context) -> Iterator[Hit]:
    lmcache = ctx.profile.lmcache
    if lmcache.enabled and lmcache.l2.on_disk and lmcache.l2.directory not in (AUTO, l2_identity(ctx)):
        yield Hit(
            f"directory {lmcache.l2.directory!r}",
            f"{l2_identity(ctx)}",
            "set lmcache.l2.directory: auto, or purge it at every change",
        )


@_rule(
    "KV026",
    "error",
    "The device arena has blocks for every sequence it may run",
    "Each running sequence of a hybrid pins its Mamba blocks. With fewer blocks than max_num_seqs needs the limit is"
    " never reached and requests are preempted; with fewer slots than sessions, requests queue although memory is"
    " free.",
    "vLLM 0.23.0 kv_cache_utils (blocks per request); sizes computed here",
    ("super-kv12-l18", {"serving.max_num_seqs": 256}),
)
def _kv026(ctx: Context) -> Iterator[Hit]:
    if ctx.profile.engine != "vllm":
        return
    size, serving, load = ctx.sizes, ctx.profile.serving, ctx.profile.load
    groups = device.device_groups(ctx.model.geometry)
    each = groups.attention + groups.mamba * (device.ALIGN_MAMBA_BLOCKS + serving.mtp_tokens)
    if serving.max_num_seqs * each > size.kv_blocks:
        yield Hit(
            f"max_num_seqs {serving.max_num_seqs} x {each} blocks = {serving.max_num_seqs * each}",
            f"at most {size.kv_blocks} device blocks",
            f"set serving.max_num_seqs to at most {max(size.kv_blocks // each, 1)}, or raise serving.kv_cache_bytes",
        )
    sessions = load.concurrency_per_node * len(ctx.nodes)
    if serving.max_num_seqs < sessions:
        yield Hit(
            f"max_num_seqs {serving.max_num_seqs}",
            f"{sessions}: a cache-aware router may send all sessions to one node",
            f"set serving.max_num_seqs to at least {sessions}",
            severity="warning",
        )


@_rule(
    "KV027",
    "error",
    "No two listeners share a port",
    "LMCache's HTTP default 8080 is cAdvisor's, its coordinator's 9300 is Mooncake's client, 9090 is Prometheus and"
    " Dynamo's system port; the second to start dies, or the wrong one answers.",
    "LMCache and Mooncake defaults; Dynamo runtime configuration",
    ("super-recommended", {"ports.lmcache_http": 8080}),
)
def _kv027(ctx: Context) -> Iterator[Hit]:
    taken: dict[int, str] = {}
    for name, port in listeners(ctx.profile):
        if port in taken:
            yield Hit(
                f"port {port} for {taken[port]} and {name}",
                "one listener a port",
                f"set ports.{name.split(' ')[0]} to a free port",
            )
        else:
            taken[port] = name


@_rule(
    "KV028",
    "warning",
    "L1 stages what arrives together",
    "Requests that arrive together each need their whole prefix in L1 at once. Those that find no room are not queued:"
    " they recompute, and write what they recomputed again.",
    MEASURED,
    ("super-kv12-l18", {}),
)
def _kv028(ctx: Context) -> Iterator[Hit]:
    size = ctx.sizes
    if not ctx.stages or size.longest_prompt_chunks == 0 or size.restores_at_once_longest < 1:
        return
    if size.simultaneous_restores_bytes > size.l1_room_bytes:
        needed = _l1_for(ctx, size.simultaneous_restores_bytes)
        stage = f"or {_STAGE_ONLY}, " if ctx.retains and _can_stage_only(ctx) else ""
        yield Hit(
            f"{_room(ctx)[1]} stage {size.restores_at_once_longest} restores of"
            f" the longest prompt; {size.simultaneous_restores} simultaneous requests restore only if they average <="
            f" {size.mean_chunks_at_once} chunks ({size.mean_tokens_at_once:,} tokens)",
            f"one of {size.longest_prompt_chunks} and {size.simultaneous_restores - 1} of {size.typical_prompt_chunks}"
            f" chunks at once, in an L1 of {_gib(needed)}",
            f"set lmcache.l1.size_gib to {_gib_up(needed)} or auto, {stage}or state fewer in"
            " load.simultaneous_restores",
        )


@_rule(
    "KV029",
    "warning",
    "Separate object groups are not yet proven",
    "They would make a restore 4.5 to 5.2 times smaller. On LMCache 0.5.2 the flag changed nothing that could be seen,"
    " so the plan counts fused sizes there; on 0.5.6 it was seen to work without a GPU only, and peer lookups may lose"
    " hits.",
    f"LMCache/LMCache#3869, #4179, #4222; {MEASURED}; {MEASURED_CPU}",
    ("super-recommended", {"lmcache.object_groups": "separate"}),
)
def _kv029(ctx: Context) -> Iterator[Hit]:
    if ctx.profile.lmcache.enabled and ctx.profile.lmcache.object_groups == "separate":
        counted = "counted as separate" if ctx.separate else "counted as fused"
        yield Hit(
            f"object_groups separate on LMCache {ctx.profile.versions.lmcache} ({counted})",
            "a store, restart and load of a long prompt that was seen to work",
            "set lmcache.object_groups: fused until that was tested",
        )


@_rule(
    "KV030",
    "warning",
    "Peers have something to read",
    "A peer sees only what is resident in the other's L1. With skip_l1 that is nothing: P2P then costs memory"
    " registration and lookups and never hits; store counters double.",
    f"LMCache 0.5.6 p2p_controller.py; {MEASURED_CPU}",
    ("super-recommended", {"lmcache.p2p.enabled": True}),
)
def _kv030(ctx: Context) -> Iterator[Hit]:
    lmcache = ctx.profile.lmcache
    if lmcache.enabled and lmcache.p2p.enabled and lmcache.store_policy == "skip_l1" and lmcache.l2.adapter != "none":
        yield Hit("P2P with store_policy skip_l1", "an L1 that retains, or no P2P", "set lmcache.p2p.enabled: false")


@_rule(
    "KV031",
    "error",
    "The device arena holds one request of the longest length",
    "vLLM refuses to start when its cache cannot hold one request of max_model_len.",
    "vLLM 0.23.0 check_enough_kv_cache_memory",
    (
        "super-kv12-l18",
        {"serving.kv_cache_bytes": 500_000_000, "serving.max_num_seqs": 1, "load.concurrency_per_node": 1},
    ),
)
def _kv031(ctx: Context) -> Iterator[Hit]:
    size = ctx.sizes
    if ctx.profile.engine == "vllm" and size.kv_blocks < size.kv_blocks_per_request:
        needed = size.kv_blocks_per_request * size.device_block_bytes
        yield Hit(
            f"{size.device_bytes:,} bytes = {size.kv_blocks} blocks",
            f"{size.kv_blocks_per_request} blocks for {ctx.profile.serving.max_model_len_tokens:,} tokens ="
            f" {needed:,} bytes",
            f"set serving.kv_cache_bytes to at least {needed:,}, or auto",
        )


@_rule(
    "KV032",
    "error",
    "vLLM's start check passes with L1 already pinned",
    "The engine starts last and compares MemTotal x utilisation with MemAvailable, when LMCache has pinned L1. The"
    " margin covers an earlier engine whose memory is not yet given back: 74.8 GB of weights failed while MemAvailable"
    " read 97 GB.",
    "NVIDIA/xr-ai#462; the article's start gate (total x utilisation + 6e9 bytes)",
    ("super-recommended", {"serving.gpu_memory_utilization": 0.83}),
    {"available_gib": 108},
)
def _kv032(ctx: Context) -> Iterator[Hit]:
    if ctx.profile.engine != "vllm":
        return
    size = ctx.sizes
    for node in ctx.nodes:
        wanted, available = memory.start_check(
            ctx.profile, node, ctx.need, size.l1_bytes, size.gpu_memory_utilization_percent
        )
        if wanted > available:
            yield Hit(
                f"{_gib(available)} available when the engine starts",
                f"{size.gpu_memory_utilization_percent / 100:.2f} x {_gib(node.total_bytes)} + margin = {_gib(wanted)}",
                "lower serving.gpu_memory_utilization (auto solves it) or the KV bytes, or free"
                f" {_gib(wanted - available)}",
                node=node.name,
            )


@_rule(
    "KV033",
    "error",
    "An extra argument is not one that the planner computes",
    "Given twice, the last one wins and the plan is no longer what runs.",
    "argparse: the last value of an option counts",
    ("super-recommended", {"extra_args.vllm": ["--max-num-batched-tokens", "8192"]}),
)
def _kv033(ctx: Context) -> Iterator[Hit]:
    from .render import computed_flags  # render needs this module's helpers

    computed = computed_flags(ctx)
    for process, words in ctx.profile.extra_args.__dict__.items():
        for word in words:
            flag = word.split("=", 1)[0].replace("_", "-") if word.startswith("--") else ""
            bare = flag.removeprefix("--no-").removeprefix("--")
            if flag and bare in computed[process]:
                yield Hit(
                    f"extra_args.{process} has {flag}",
                    "arguments that the planner does not compute",
                    "remove it and set the profile's own key",
                )


@_rule(
    "KV034",
    "error",
    "A store on the network has a place, and no password on a command line",
    "LMCache starts without the address of its store only to fail at the first use, and what stands in --l2-adapter can"
    " be read by every account of the node.",
    "LMCache 0.5.6 distributed/l2_adapters, from_dict",
    ("super-recommended", {"lmcache.l2.adapter": "resp", "lmcache.l2.adapter_extra": {"host": "192.0.2.9"}}),
)
def _kv034(ctx: Context) -> Iterator[Hit]:
    l2 = ctx.profile.lmcache.l2
    if not ctx.profile.lmcache.enabled:
        return
    for key in ADAPTER_REQUIRED.get(l2.adapter, ()):
        if not l2.adapter_extra.get(key):
            yield Hit(
                f"lmcache.l2.adapter {l2.adapter} without {key}",
                f"adapter_extra with {', '.join(ADAPTER_REQUIRED[l2.adapter])}",
                f"set lmcache.l2.adapter_extra.{key} in the profile",
            )
    if l2.adapter == "mooncake_store" and not l2.mooncake_master:
        yield Hit(
            "lmcache.l2.adapter mooncake_store without mooncake_master, which nothing here starts",
            "the address of a mooncake_master that you run",
            "run it (with --enable_offload=true for SSD offload) and set lmcache.l2.mooncake_master: HOST:50051, or"
            " lmcache.l2.adapter: fs_native",
        )
    for key in sorted(set(ADAPTER_SECRETS) & set(l2.adapter_extra)):
        yield Hit(
            f"lmcache.l2.adapter_extra.{key}",
            "no secret in a profile",
            "remove it and write LMCACHE_RESP_USERNAME and LMCACHE_RESP_PASSWORD, or AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY, to /etc/goodput/lmcache.secret on each node (mode 0600)",
        )


def _true(value: object) -> bool:
    """A switch as Mooncake reads it: true, or text that says so."""
    return str(value).lower() in ("true", "1")


def listeners(profile: Profile) -> list[tuple[str, int]]:
    """(name, port) of everything that listens on the first node, ours last."""
    ports, lmcache = profile.ports, profile.lmcache
    ours = [
        ("frontend_http", ports.frontend_http),
        ("frontend_system", ports.frontend_system),
        ("worker_system", ports.worker_system),
    ]
    if profile.engine == "vllm" and profile.router.mode == "kv":
        ours.append(("kv_events", ports.kv_events))
    if lmcache.enabled:
        ours += [("lmcache_request", ports.lmcache_request), ("lmcache_http", ports.lmcache_http)]
        if lmcache.p2p.enabled:
            ours += [("coordinator", ports.coordinator), ("p2p", ports.p2p)]
        # Peers of Mooncake shake hands directly (P2PHANDSHAKE), so no metadata server listens.
        if lmcache.l2.adapter == "mooncake_store" and _true(lmcache.l2.adapter_extra.get("enable_client_http_server")):
            ours.append(("others (Mooncake client HTTP)", 9300))
    ours += [("others (etcd)", 2379), ("others (etcd peers)", 2380)]
    theirs = [(f"others.{name}", port) for name, port in sorted(ports.others.items())]
    # The one who can move is named in the remedy: ours, so theirs come first.
    return theirs + ours


def l2_identity(ctx: Context) -> str:
    """Name of everything that LMCache's L2 key leaves out and that changes the bytes."""
    profile, size = ctx.profile, ctx.sizes
    groups = "sep" if ctx.separate else "fused"
    name = ctx.model.geometry.name + (f"@{profile.model_revision}" if profile.model_revision else "")
    parts = [name, f"kv-{profile.dtypes.kv}", f"ssm-{profile.dtypes.ssm}", f"conv-{profile.dtypes.conv}"]
    if not ctx.model.geometry.hybrid:
        parts = parts[:2]
    if profile.serving.attention_backend:
        parts.append(profile.serving.attention_backend)
    parts += [
        f"c{size.chunk_size_tokens}",
        groups,
        f"{profile.engine}-{profile.versions.vllm}",
        f"lmcache-{profile.versions.lmcache}",
    ]
    return re.sub(r"[^A-Za-z0-9@._+-]", "-", "_".join(parts))


def l2_directory(ctx: Context) -> str:
    directory = ctx.profile.lmcache.l2.directory
    return l2_identity(ctx) if directory == AUTO else directory


def l2_path(ctx: Context) -> str:
    """The directory of this arrangement's L2 files; "" without such a tier."""
    l2 = ctx.profile.lmcache.l2
    if not ctx.profile.lmcache.enabled or not l2.on_disk:
        return ""
    return f"{l2.path.rstrip('/')}/{l2_directory(ctx)}"


def evaluate(ctx: Context) -> list[Finding]:
    """All rules on one resolved profile, in id order."""
    findings = []
    for rule in RULES.values():
        for hit in rule.check(ctx):
            findings.append(
                Finding(
                    rule.id,
                    hit.severity or rule.severity,
                    rule.title,
                    hit.found,
                    hit.required,
                    hit.remedy,
                    rule.source,
                    hit.node,
                )
            )
    return findings


def known_rule(rule_id: object) -> Rule:
    """The rule with this id, or an error that names the nearest one."""
    text = str(rule_id).strip().upper()
    if text not in RULES:
        raise PlanInputError("rule id", rule_id, "must be an id such as KV004", nearest(text, RULES))
    return RULES[text]
