# Apache-2.0 (see LICENSE)
"""Argument lists and environment of every process. What stands here is what runs; roles fill in the placeholders.

Placeholders, filled in on each node: ``{management_address}``, ``{node}``, ``{first_node_address}``,
``{coordinator_address}`` (where LMCache's peers meet), ``{model_path}``, ``{model_name}``, ``{l2_path}`` (the plan
says which), ``{rail_address}`` (its first rail), ``{rail_devices}`` (its rails for UCX). Where a process
finds discovery and its peers is the platform's business, not the plan's.
"""

from __future__ import annotations

import json
from typing import Any

from .checks import ceil_div, gib_to_bytes
from .solve import Context


def compact(value: object) -> str:
    """JSON as it goes on a command line."""
    return json.dumps(value, separators=(",", ":"))


def decimal(value: float) -> str:
    """A number without exponent and trailing zeros: ``9.25``, ``400``."""
    text = f"{value:.6f}".rstrip("0").rstrip(".")
    return text or "0"


def flag(on: bool, name: str) -> str:
    return f"--{name}" if on else f"--no-{name}"


def kv_transfer_config(ctx: Context) -> dict[str, Any]:
    """Connector of the engine; {} without LMCache. A failed load recomputes instead of failing the request."""
    lmcache = ctx.profile.lmcache
    if not lmcache.enabled or ctx.profile.engine != "vllm":
        return {}
    extra: dict[str, Any] = {
        "lmcache.mp.host": lmcache.engine_host,
        "lmcache.mp.port": ctx.profile.ports.lmcache_request,
    }
    if lmcache.eager_prefetch:
        extra["lmcache.mp.eager_prefetch"] = True
    return {
        "kv_connector": lmcache.connector,
        "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def kv_events_config(ctx: Context) -> dict[str, Any]:
    """The router sees the cache only through these events; {} unless it routes by cache."""
    if ctx.profile.router.mode != "kv" or ctx.profile.engine != "vllm":
        return {}
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"tcp://*:{ctx.profile.ports.kv_events}",
        "topic": "kv-events",
    }


def l2_adapter(ctx: Context) -> dict[str, Any]:
    """The ``--l2-adapter`` object; {} without a storing tier. ``max_capacity_gb`` is GiB.

    A store on the network takes its place and options from ``adapter_extra``; what bounds it is the same for all.
    """
    lmcache = ctx.profile.lmcache
    l2 = lmcache.l2
    if not lmcache.enabled or l2.adapter == "none":
        return {}
    if l2.adapter == "mooncake_store":
        adapter: dict[str, Any] = {
            "type": "mooncake_store",
            "num_workers": l2.num_workers,
            "local_hostname": "{rail_address}",
            "metadata_server": "P2PHANDSHAKE",
            "master_server_addr": l2.mooncake_master,
            "protocol": "rdma",
            "global_segment_size": str(int(l2.mooncake_segment_gib * 2**30)),
        }
        if l2.mooncake_ssd_offload:
            adapter |= {"enable_ssd_offload": "true", "ssd_offload_path": "{l2_path}"}
    else:
        adapter = {"type": l2.adapter}
        if l2.adapter == "fs_native":
            adapter |= {"base_path": "{l2_path}", "num_workers": l2.num_workers, "use_odirect": l2.use_odirect}
        elif l2.adapter != "s3":
            adapter |= {"num_workers": l2.num_workers}
        whole = int(l2.capacity_gib)
        adapter["max_capacity_gb"] = whole if l2.capacity_gib == whole else l2.capacity_gib
        if l2.eviction_policy != "none":
            adapter["eviction"] = {
                "eviction_policy": l2.eviction_policy,
                "trigger_watermark": l2.eviction_watermark,
                "eviction_ratio": l2.eviction_ratio,
            }
    return adapter | l2.adapter_extra


def _vllm_args(ctx: Context) -> list[str]:
    if ctx.profile.engine != "vllm":
        return []
    serving, size, dtypes = ctx.profile.serving, ctx.sizes, ctx.profile.dtypes
    hybrid = ctx.model.geometry.hybrid
    args = ["--model", "{model_path}", "--served-model-name", serving.served_model_name]
    args += ["--trust-remote-code"] if serving.trust_remote_code else []
    args += ["--load-format", serving.load_format] if serving.load_format else []
    args += ["--moe-backend", serving.moe_backend] if serving.moe_backend else []
    args += ["--attention-backend", serving.attention_backend] if serving.attention_backend else []
    args += ["--kv-cache-dtype", dtypes.kv]
    if hybrid:
        args += ["--mamba-cache-mode", serving.mamba_cache_mode, "--mamba-ssm-cache-dtype", dtypes.ssm]
        args += ["--mamba-cache-dtype", dtypes.conv] if dtypes.conv == "float32" else []
    args += ["--enable-chunked-prefill", flag(serving.prefix_caching, "enable-prefix-caching")]
    args += [] if serving.hybrid_kv_cache_manager else ["--disable-hybrid-kv-cache-manager"]
    args += ["--max-model-len", str(serving.max_model_len_tokens)]
    args += ["--max-num-batched-tokens", str(size.max_num_batched_tokens)]
    args += ["--max-num-seqs", str(serving.max_num_seqs)]
    args += ["--kv-cache-memory-bytes", str(size.device_bytes)]
    args += ["--gpu-memory-utilization", decimal(size.gpu_memory_utilization_percent / 100)]
    if serving.mtp_tokens:
        args += ["--speculative-config", compact({"method": "mtp", "num_speculative_tokens": serving.mtp_tokens})]
    for name, value in (("kv-transfer-config", kv_transfer_config(ctx)), ("kv-events-config", kv_events_config(ctx))):
        args += [f"--{name}", compact(value)] if value else []
    return args


def _worker_args(ctx: Context) -> list[str]:
    """Dynamo's own arguments of the worker, beside vLLM's (engine vllm) or all of them (mocker)."""
    serving = ctx.profile.serving
    if ctx.profile.engine == "mocker":
        mocker = ctx.profile.mocker
        return [
            *("--model-path", "{model_path}", "--model-name", serving.served_model_name),
            *(
                "--block-size",
                str(ctx.sizes.block_size_tokens),
                "--num-gpu-blocks-override",
                str(mocker.num_gpu_blocks),
            ),
            *("--speedup-ratio", decimal(mocker.speedup_ratio)),
        ]
    args = ["--dyn-reasoning-parser", serving.reasoning_parser] if serving.reasoning_parser else []
    return args + (["--dyn-tool-call-parser", serving.tool_call_parser] if serving.tool_call_parser else [])


def _frontend_args(ctx: Context) -> list[str]:
    router = ctx.profile.router
    args = ["--router-mode", router.mode]
    workers = min(router.min_initial_workers, len(ctx.nodes))
    if router.mode == "kv" and workers:
        args += ["--router-min-initial-workers", str(workers)]
    return args + (["--migration-limit", str(router.migration_limit)] if router.migration_limit else [])


def _lmcache_server_args(ctx: Context) -> list[str]:
    lmcache, size, ports = ctx.profile.lmcache, ctx.sizes, ctx.profile.ports
    if not lmcache.enabled:
        return []
    part = lmcache.l1
    args = [
        *("--host", lmcache.request_host, "--port", str(ports.lmcache_request)),
        *("--http-host", "{management_address}", "--http-port", str(ports.lmcache_http)),
        *("--instance-id", "{node}", "--chunk-size", str(size.chunk_size_tokens)),
        *(
            "--l1-size-gb",
            decimal(size.l1_bytes / 2**30),
            flag(part.lazy, "l1-use-lazy"),
            "--l1-align-bytes",
            str(part.align_bytes),
        ),
        *("--eviction-policy", part.eviction_policy),
        *(
            "--eviction-trigger-watermark",
            decimal(part.eviction_watermark),
            "--eviction-ratio",
            decimal(part.eviction_ratio),
        ),
        *("--l1-read-ttl-seconds", str(part.read_ttl_seconds), "--l1-write-ttl-seconds", str(part.write_ttl_seconds)),
        *("--session-ttl-seconds", str(part.session_ttl_seconds)),
    ]
    args += ["--separate-object-groups"] if lmcache.object_groups == "separate" else []
    args += ["--supported-transfer-mode", lmcache.transfer_mode] if lmcache.transfer_mode else []
    if ctx.stages or lmcache.store_policy != "default":
        args += ["--l2-store-policy", lmcache.store_policy, "--l2-prefetch-policy", lmcache.prefetch_policy]
        args += ["--l2-prefetch-max-in-flight", str(size.prefetch_max_in_flight)]
    adapter = l2_adapter(ctx)
    args += ["--l2-adapter", compact(adapter)] if adapter else []
    if lmcache.p2p.enabled:
        args += [
            "--p2p-advertise-url",
            "{rail_address}:" + str(ports.p2p),
            "--p2p-transfer-engine",
            lmcache.p2p.transfer_engine,
        ]
        args += ["--coordinator-advertise-ip", "{management_address}"]
        if lmcache.p2p.coordinator_url:
            args += [
                "--coordinator-url",
                lmcache.p2p.coordinator_url.replace("{coordinator_port}", str(ports.coordinator)),
            ]
    return args


def _lmcache_coordinator_args(ctx: Context) -> list[str]:
    lmcache = ctx.profile.lmcache
    if not lmcache.enabled or not lmcache.p2p.enabled:
        return []
    return [
        *("--host", "{management_address}", "--port", str(ctx.profile.ports.coordinator)),
        *("--chunk-size", str(ctx.sizes.chunk_size_tokens)),
    ]


def body_limit_mb(max_model_len_tokens: int) -> int:
    """Largest request body that the frontend reads, in MB: 1, and 16 bytes for each token of the longest prompt.

    A token of text is about 4 bytes, and JSON may write one character in 6. Dynamo's default of 192 lets one request
    take the memory of a node: seen with 1.6.1, 10 MB of one word took 1 GB before it could be counted as too long.
    """
    return 1 + ceil_div(16 * max_model_len_tokens, 2**20)


def env(ctx: Context) -> dict[str, str]:
    """Environment of every serving process; what one of them does not know it ignores. LMCache's has more."""
    router, lmcache = ctx.profile.router, ctx.profile.lmcache
    values = {"HF_HUB_OFFLINE": "1", "PYTHONHASHSEED": "0"}
    values["DYN_HTTP_BODY_LIMIT_MB"] = str(body_limit_mb(ctx.profile.serving.max_model_len_tokens))
    if router.mode == "kv":
        values["DYN_ROUTER_ACTIVE_REQUEST_EXPIRY_SECS"] = str(router.active_request_expiry_seconds)
    if lmcache.enabled:
        # Usage reports go to an address on the internet by default.
        values |= {"LMCACHE_TRACK_USAGE": "false", "LMCACHE_DISABLE_BANNER": "1"}
    return values | ctx.profile.extra_env


def lmcache_env(ctx: Context) -> dict[str, str]:
    """Environment of LMCache's processes: that of all, and what they read each other's memory with."""
    lmcache, values = ctx.profile.lmcache, env(ctx)
    peers = lmcache.enabled and lmcache.p2p.enabled
    store = lmcache.enabled and lmcache.l2.adapter == "mooncake_store"
    if store:
        # Each rail has its own subnet. Without this Mooncake's engine also connects one rail to the other, which
        # failed on the pair; once a read brought wrong bytes at that time (docs/serving.md).
        values["MC_ENABLE_DEST_DEVICE_AFFINITY"] = "1"
    if store and lmcache.l2.mooncake_ssd_offload:
        # Mooncake knows no max_capacity_gb: without these it takes 90 % of the disk, and which default evicts is not
        # documented twice the same.
        values["MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"] = "{l2_path}"
        for limit in ("TOTAL_SIZE_LIMIT_BYTES", "BUCKET_MAX_TOTAL_SIZE", "BUCKET_MAX_PHYSICAL_BYTES"):
            values[f"MOONCAKE_OFFLOAD_{limit}"] = str(gib_to_bytes(lmcache.l2.capacity_gib))
        values["MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY"] = "lru"
    if peers and lmcache.p2p.transfer_engine == "mooncake_te":
        # Without a GPU there is no NIXL here. The protocol alone is not heeded where there is an RDMA device.
        values |= {"MC_TE_PROTOCOL": "tcp", "MC_FORCE_TCP": "1"}
    elif peers or store:
        # UCX uses one rail for one-sided reads unless told otherwise; the devices are the node's own rails.
        values |= {
            "UCX_NET_DEVICES": "{rail_devices}",
            "UCX_MAX_RMA_RAILS": "2",
            "UCX_MAX_RNDV_RAILS": "2",
            "UCX_CM_USE_ALL_DEVICES": "y",
        }
    return values | ctx.profile.extra_env


def render(ctx: Context) -> dict[str, Any]:
    """All argument lists of a plan, extra arguments appended."""
    extra = ctx.profile.extra_args
    vllm = _vllm_args(ctx)
    vllm += extra.vllm if vllm else []
    server, coordinator = _lmcache_server_args(ctx), _lmcache_coordinator_args(ctx)
    return {
        "vllm_args": vllm,
        "dynamo_worker_args": _worker_args(ctx) + vllm + extra.worker,
        "dynamo_frontend_args": _frontend_args(ctx) + extra.frontend,
        "lmcache_server_args": server + (extra.lmcache_server if server else []),
        "lmcache_coordinator_args": coordinator + (extra.lmcache_coordinator if coordinator else []),
        "kv_transfer_config": kv_transfer_config(ctx),
        "kv_events_config": kv_events_config(ctx),
        "env": env(ctx),
        "lmcache_env": lmcache_env(ctx),
    }


def computed_flags(ctx: Context) -> dict[str, set[str]]:
    """Flag names that the planner sets, per process, without ``--`` and ``no-``."""

    def names(args: list[str]) -> set[str]:
        return {word.removeprefix("--no-").removeprefix("--") for word in args if word.startswith("--")}

    vllm, worker = names(_vllm_args(ctx)), names(_worker_args(ctx))
    hidden = {"block-size", "kv-cache-memory", "tensor-parallel-size"} if vllm else set()
    return {
        "vllm": vllm | worker | hidden,
        "worker": vllm | worker | hidden,
        "frontend": names(_frontend_args(ctx)) | {"kv-cache-block-size"},
        "lmcache_server": names(_lmcache_server_args(ctx)) | {"l1-manager"},
        "lmcache_coordinator": names(_lmcache_coordinator_args(ctx)),
    }
