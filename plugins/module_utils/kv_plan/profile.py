# Apache-2.0 (see LICENSE)
"""A serving arrangement as data. The dataclasses are the schema: types, defaults and ranges, in the units of the name.

``files.load_profile`` fills them from YAML (pydantic checks types and unknown keys); ranges are checked here, so a
profile made in Python is checked too. ``auto`` means: the planner solves it.
"""

# ruff: noqa: RUF009  the functions called in defaults return dataclasses.field
from __future__ import annotations

from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal

from .checks import PlanInputError, number, whole
from .geometry import Dtypes, ModelGeometry

Auto = Literal["auto"]
AUTO: Auto = "auto"


def _int(default: int | str | None, low: int, high: int, unit: str = "") -> Any:
    return field(default=default, metadata={"check": whole, "low": low, "high": high, "unit": unit})


def _num(default: float | str | None, low: float, high: float, unit: str = "") -> Any:
    return field(default=default, metadata={"check": number, "low": low, "high": high, "unit": unit})


class _Checked:
    """Runs the range of every field; ``auto`` and None are left to the solver."""

    _section = ""

    def __post_init__(self) -> None:
        assert is_dataclass(self)
        for item in fields(self):
            value = getattr(self, item.name)
            if "check" in item.metadata and value is not None and value != AUTO:
                name = f"{self._section}.{item.name}" if self._section else item.name
                item.metadata["check"](name, value, item.metadata["low"], item.metadata["high"], item.metadata["unit"])


@dataclass(frozen=True)
class Serving(_Checked):
    """vLLM's own arguments."""

    _section = "serving"
    max_model_len_tokens: int = _int(131072, 16, 2**26, "tokens")
    max_num_seqs: int = _int(32, 1, 4096, "requests")
    max_num_batched_tokens: int | Auto = _int(AUTO, 1, 2**26, "tokens")
    kv_cache_bytes: int | Auto = _int(AUTO, 1, 2**42, "bytes")
    gpu_memory_utilization: float | Auto = _num(AUTO, 0.01, 1.0)
    mamba_cache_mode: Literal["align", "all", "none"] = "align"
    prefix_caching: bool = True
    hybrid_kv_cache_manager: bool = True
    mtp_tokens: int = _int(0, 0, 16, "tokens")
    attention_backend: str | None = None
    moe_backend: str | None = None
    load_format: str | None = None
    served_model_name: str = "{model_name}"
    trust_remote_code: bool = False
    reasoning_parser: str | None = None
    tool_call_parser: str | None = None


@dataclass(frozen=True)
class L1(_Checked):
    _section = "lmcache.l1"
    size_gib: float | Auto = _num(AUTO, 0, 4096, "GiB")
    eviction_policy: Literal["LRU", "ARC", "IsolatedLRU", "noop"] = "LRU"
    eviction_watermark: float = _num(0.8, 0.05, 1.0)
    eviction_ratio: float = _num(0.2, 0.01, 1.0)
    lazy: bool = False
    align_bytes: int = _int(65536, 512, 2**30, "bytes")
    read_ttl_seconds: int = _int(300, 1, 604800, "seconds")
    write_ttl_seconds: int = _int(600, 1, 604800, "seconds")
    session_ttl_seconds: int = _int(600, 1, 604800, "seconds")
    store_reserve_chunks: int | Auto = _int(AUTO, 0, 2**20, "chunks")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.align_bytes & (self.align_bytes - 1):
            raise PlanInputError(
                "lmcache.l1.align_bytes", self.align_bytes, "must be a power of two", "use 4096 or 65536"
            )


@dataclass(frozen=True)
class L2(_Checked):
    """The storing tier below L1. ``adapter`` none: there is no such tier.

    ``resp`` (Redis, Valkey), ``valkey`` and ``s3`` are stores that somebody else runs; ``adapter_extra`` says where.
    Mooncake's master is run by somebody else, too: ``mooncake_master`` says where (HOST:PORT).
    """

    _section = "lmcache.l2"
    adapter: Literal["none", "fs_native", "mooncake_store", "resp", "valkey", "s3"] = "none"
    path: str = "/srv/goodput/l2"
    directory: str = AUTO
    capacity_gib: float = _num(0, 0, 2**20, "GiB")
    num_workers: int = _int(8, 1, 256, "threads")
    use_odirect: bool = True
    eviction_policy: Literal["LRU", "none"] = "LRU"
    eviction_watermark: float = _num(0.8, 0.05, 1.0)
    eviction_ratio: float = _num(0.2, 0.01, 1.0)
    adapter_extra: dict[str, Any] = field(default_factory=dict)
    mooncake_segment_gib: float = _num(0, 0, 4096, "GiB")
    mooncake_ssd_offload: bool = False
    mooncake_master: str = ""

    @property
    def on_disk(self) -> bool:
        """Objects of this tier are files of ours below ``path``."""
        return self.adapter == "fs_native" or (self.adapter == "mooncake_store" and self.mooncake_ssd_offload)


@dataclass(frozen=True)
class P2P(_Checked):
    _section = "lmcache.p2p"
    enabled: bool = False
    transfer_engine: Literal["nixl", "mooncake_te"] = "nixl"
    coordinator_url: str | None = "http://{coordinator_address}:{coordinator_port}"


@dataclass(frozen=True)
class Lmcache(_Checked):
    _section = "lmcache"
    enabled: bool = False
    connector: Literal["LMCacheMPConnector", "LMCacheConnectorV1"] = "LMCacheMPConnector"
    chunk_tokens: int | Auto = _int(AUTO, 1, 2**24, "tokens")
    object_groups: Literal["fused", "separate"] = "fused"
    store_policy: Literal["default", "skip_l1"] = "default"
    prefetch_policy: Literal["default", "retain"] = "default"
    prefetch_max_in_flight: int | Auto = _int(AUTO, 1, 4096, "requests")
    eager_prefetch: bool = False
    transfer_mode: Literal["lmcache_driven", "engine_driven", "auto"] | None = None
    request_host: str = "{management_address}"
    engine_host: str = "tcp://{management_address}"
    l1: L1 = field(default_factory=L1)
    l2: L2 = field(default_factory=L2)
    p2p: P2P = field(default_factory=P2P)


@dataclass(frozen=True)
class Load(_Checked):
    """What will be asked of the arrangement. Staging is compared with this, not with the in-flight limit."""

    _section = "load"
    concurrency_per_node: int = _int(5, 1, 4096, "requests")
    simultaneous_restores: int | Auto = _int(AUTO, 1, 4096, "requests")
    longest_prompt_tokens: int | Auto = _int(AUTO, 1, 2**26, "tokens")
    typical_prompt_tokens: int | Auto = _int(AUTO, 1, 2**26, "tokens")
    waiting_restores: int = _int(0, 0, 4096, "requests")
    queueing_delay_seconds: int = _int(299, 0, 604800, "seconds")


@dataclass(frozen=True)
class Router(_Checked):
    _section = "router"
    mode: Literal["kv", "round-robin", "random"] = "kv"
    migration_limit: int = _int(1, 0, 64, "retries")
    # One is enough to serve: a frontend that starts again while a node is off must not wait for it. That all are there
    # is for verify to say.
    min_initial_workers: int = _int(1, 0, 64, "workers")
    active_request_expiry_seconds: int = _int(7200, 1, 604800, "seconds")


@dataclass(frozen=True)
class Memory(_Checked):
    """What else lives in the one memory of a node. Each default says where it comes from.

    * ``engine_overhead_gib``: CUDA context, activations and graphs beside weights and KV. Assumed, not yet measured on
      a GB10: replace it with MemAvailable before and after a start.
    * ``lmcache_context_mib``: 616 MiB at boot (LMCache/LMCache#4019); ``lmcache_process_mib``: resident size of the
      server beyond its L1, measured on a CPU; ``lmcache_staging_chunks``: its transfer buffer, sized by the chunk.
    * ``os_gib``: only where MemAvailable at rest was not measured; otherwise MemTotal - MemAvailable is used.
    * ``control_plane_*``: K3s server or agent, frontend, etcd, exporters.
    * ``reserve_gib``: LMCache keeps 5 to 10 GiB of each crashed engine (LMCache/LMCache#4980), and a GB10 freezes
      instead of killing when memory ends.
    """

    _section = "memory"
    weights_bytes: int | Auto = _int(AUTO, 0, 2**42, "bytes")
    engine_overhead_gib: float = _num(4.0, 0, 1024, "GiB")
    lmcache_context_mib: float = _num(616, 0, 65536, "MiB")
    lmcache_process_mib: float = _num(640, 0, 65536, "MiB")
    lmcache_staging_chunks: int = _int(1, 0, 64, "chunks")
    page_cache_gib: float = _num(2.0, 0, 1024, "GiB")
    shm_gib: float = _num(1.0, 0, 1024, "GiB")
    os_gib: float = _num(4.0, 0, 1024, "GiB")
    control_plane_server_gib: float = _num(2.0, 0, 1024, "GiB")
    control_plane_agent_gib: float = _num(0.75, 0, 1024, "GiB")
    reserve_gib: float = _num(10.0, 0, 1024, "GiB")
    reachable_fraction: float = _num(0.83, 0.05, 1.0)
    start_check_margin_bytes: int = _int(6_000_000_000, 0, 2**40, "bytes")


@dataclass(frozen=True)
class Ports(_Checked):
    """Everything that listens on a node. ``others`` are listeners of other software on the host."""

    _section = "ports"
    frontend_http: int = _int(8000, 1, 65535)
    frontend_system: int = _int(9090, 1, 65535)
    worker_system: int = _int(9091, 1, 65535)
    kv_events: int = _int(20080, 1, 65535)
    lmcache_request: int = _int(5555, 1, 65535)
    lmcache_http: int = _int(9500, 1, 65535)
    coordinator: int = _int(9300, 1, 65535)
    p2p: int = _int(9450, 1, 65535)
    others: dict[str, int] = field(
        default_factory=lambda: {"cadvisor": 8080, "node-exporter": 9100, "dcgm-exporter": 9400}
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, port in self.others.items():
            whole(f"ports.others.{name}", port, 1, 65535)


@dataclass(frozen=True)
class Versions(_Checked):
    """Versions that the arrangement will run with; ``lmcache_engine`` is the one inside the engine's image."""

    _section = "versions"
    vllm: str = "0.28.0"
    lmcache: str = "0.5.6"
    lmcache_engine: str = AUTO
    dynamo: str = "1.5.1"

    def __post_init__(self) -> None:
        for name in ("vllm", "lmcache", "dynamo", "lmcache_engine"):
            value = getattr(self, name)
            if value != AUTO:
                version_tuple(f"versions.{name}", value)


@dataclass(frozen=True)
class ExtraArgs:
    """Arguments of yours, appended as they are. One that the planner computes is refused."""

    vllm: list[str] = field(default_factory=list)
    worker: list[str] = field(default_factory=list)
    frontend: list[str] = field(default_factory=list)
    lmcache_server: list[str] = field(default_factory=list)
    lmcache_coordinator: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Mocker(_Checked):
    """Dynamo's simulated engine: it holds no KV, so its blocks cost no memory."""

    _section = "mocker"
    block_size_tokens: int = _int(16, 1, 65536, "tokens")
    num_gpu_blocks: int = _int(4096, 1, 2**30, "blocks")
    speedup_ratio: float = _num(1.0, 0, 1000)


@dataclass(frozen=True)
class Profile(_Checked):
    """One serving arrangement."""

    name: str
    description: str = ""
    source: str = ""
    engine: Literal["vllm", "mocker"] = "vllm"
    model: str = ""
    model_revision: str = ""
    block_alignment_tokens: int = _int(16, 1, 4096, "tokens")
    dtypes: Dtypes = field(default_factory=Dtypes)
    serving: Serving = field(default_factory=Serving)
    lmcache: Lmcache = field(default_factory=Lmcache)
    load: Load = field(default_factory=Load)
    router: Router = field(default_factory=Router)
    memory: Memory = field(default_factory=Memory)
    ports: Ports = field(default_factory=Ports)
    versions: Versions = field(default_factory=Versions)
    mocker: Mocker = field(default_factory=Mocker)
    extra_args: ExtraArgs = field(default_factory=ExtraArgs)
    extra_env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Model:
    """A model to plan for: its cache geometry, what its weights take, and the folder that holds it on the nodes."""

    geometry: ModelGeometry
    weights_bytes: int | None = None
    directory: str = ""
    source: str = ""

    def __post_init__(self) -> None:
        if self.weights_bytes is not None:
            whole(f"{self.geometry.name}: weights_bytes", self.weights_bytes, 0, 2**42, "bytes")

    @property
    def folder(self) -> str:
        return self.directory or self.geometry.name


@dataclass(frozen=True)
class L2Filesystem:
    """The filesystem under the L2 path as found on a node."""

    mount: str
    size_bytes: int
    residue_bytes: int = 0

    def __post_init__(self) -> None:
        whole("l2_filesystem.size_bytes", self.size_bytes, 0, 2**60, "bytes")
        whole("l2_filesystem.residue_bytes", self.residue_bytes, 0, 2**60, "bytes")
        if not isinstance(self.mount, str) or not self.mount.startswith("/"):
            raise PlanInputError("l2_filesystem.mount", self.mount, "must be an absolute path", "give the mount point")


@dataclass(frozen=True)
class Node:
    """Measured memory of a node, in bytes. ``available_bytes`` is MemAvailable at rest, before anything of ours runs.

    ``cuda_free_bytes`` is what CUDA could really reach at boot, if measured; ``server`` marks the node that also runs
    the control plane and the frontend.
    """

    name: str
    total_bytes: int
    available_bytes: int | None = None
    swap_bytes: int = 0
    server: bool = False
    cuda_free_bytes: int | None = None
    l2_filesystem: L2Filesystem | None = None

    def __post_init__(self) -> None:
        whole(f"{self.name}: total_bytes", self.total_bytes, 2**20, 2**44, "bytes")
        for name in ("available_bytes", "cuda_free_bytes"):
            if getattr(self, name) is not None:
                whole(f"{self.name}: {name}", getattr(self, name), 0, self.total_bytes, "bytes")
        whole(f"{self.name}: swap_bytes", self.swap_bytes, 0, 2**44, "bytes")


@dataclass(frozen=True)
class Neighbour:
    """Another arrangement on the same nodes, for rules about sharing."""

    name: str
    l2_directory: str = ""
    l2_identity: str = ""
    lmcache_request_port: int = 0
    block_tokens: int = 0


@dataclass(frozen=True)
class Observed:
    """What a running engine or image says, to be compared with the plan."""

    block_tokens: int | None = None
    neighbours: tuple[Neighbour, ...] = ()


def version_tuple(name: str, text: str) -> tuple[int, ...]:
    """``0.5.2`` or ``1.3.0.post1`` as a comparable tuple of its leading numbers."""
    parts: list[int] = []
    for piece in str(text).split("."):
        if not piece.isdigit():
            break
        parts.append(int(piece))
    if len(parts) < 2:
        raise PlanInputError(name, text, "must be a version such as 0.5.6", "quote it in YAML: '0.5.6'")
    return tuple(parts)
