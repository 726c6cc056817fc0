"""Properties over random geometries, dtypes, memories and choices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import Model, Node, Profile, make_plan
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import GIB
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.geometry import (
    KV_DTYPES,
    STATE_DTYPES,
    Dtypes,
    ModelGeometry,
    attention_bytes_per_token_layer,
    block_tokens,
    mamba_state_bytes,
    page_bytes,
)
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.profile import L1, L2, Lmcache, Load, Serving
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.render import decimal
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.solve import KV_STEP_BYTES, L1_STEP_BYTES, resolve
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

settings.register_profile("planner", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("planner")

dtypes = st.builds(Dtypes, st.sampled_from(KV_DTYPES), st.sampled_from(STATE_DTYPES), st.sampled_from(STATE_DTYPES))
hybrids = st.builds(
    ModelGeometry,
    name=st.just("random"),
    attention_layers=st.integers(1, 96),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([64, 96, 128, 256]),
    mamba_layers=st.integers(1, 96),
    mamba_heads=st.sampled_from([8, 24, 64, 128]),
    mamba_head_dim=st.sampled_from([32, 64, 80]),
    state_size=st.sampled_from([16, 64, 128, 256]),
    groups=st.integers(1, 8),
    conv_kernel=st.integers(2, 8),
)
plains = st.builds(
    ModelGeometry,
    name=st.just("random"),
    attention_layers=st.integers(1, 96),
    kv_heads=st.sampled_from([1, 2, 4, 8]),
    head_dim=st.sampled_from([64, 96, 128, 256]),
)
models = st.builds(Model, st.one_of(hybrids, plains), weights_bytes=st.integers(0, 90 * GIB))
nodes = st.lists(st.integers(16 * GIB, 128 * GIB), min_size=1, max_size=3).map(
    lambda totals: [
        Node(f"n{index}", total, available_bytes=total - total // 40, server=index == 0)
        for index, total in enumerate(totals)
    ]
)
lmcaches = st.builds(
    Lmcache,
    enabled=st.booleans(),
    object_groups=st.sampled_from(["fused", "separate"]),
    store_policy=st.sampled_from(["default", "skip_l1"]),
    prefetch_policy=st.sampled_from(["default", "retain"]),
    l1=st.builds(
        L1,
        size_gib=st.one_of(st.just("auto"), st.floats(0.25, 40)),
        eviction_policy=st.sampled_from(["LRU", "noop"]),
        eviction_watermark=st.sampled_from([0.5, 0.7, 0.8, 0.95, 1.0]),
        align_bytes=st.sampled_from([4096, 65536]),
    ),
    l2=st.builds(L2, adapter=st.sampled_from(["none", "fs_native"]), capacity_gib=st.sampled_from([0, 100, 400.5])),
)
profiles = st.builds(
    Profile,
    name=st.just("random"),
    dtypes=dtypes,
    lmcache=lmcaches,
    serving=st.builds(
        Serving,
        max_model_len_tokens=st.sampled_from([4096, 32768, 131072]),
        max_num_seqs=st.integers(1, 64),
        kv_cache_bytes=st.one_of(st.just("auto"), st.integers(10**8, 60 * 10**9)),
    ),
    load=st.builds(Load, concurrency_per_node=st.integers(1, 16)),
)


@given(profiles, models, nodes)
@settings(max_examples=400)
def test_budget_sums_and_the_plan_is_consistent(profile: Profile, model: Model, pair: list[Node]) -> None:
    plan = make_plan(profile, model, pair)
    for node in plan["budget"].values():
        assert sum(line["bytes"] for line in node["lines"]) == node["total_bytes"]
    assert plan["ok"] == (not plan["errors"])
    sizes = plan["sizes"]
    assert sizes["chunk_size_tokens"] % sizes["block_size_tokens"] == 0
    words = plan["vllm_args"]
    assert int(words[words.index("--kv-cache-memory-bytes") + 1]) == sizes["device_bytes"]
    assert int(words[words.index("--max-num-batched-tokens") + 1]) == sizes["max_num_batched_tokens"]
    server = plan["lmcache_server_args"]
    if profile.lmcache.enabled:
        # What LMCache makes of the flag is the L1 that the plan counted.
        assert abs(int(float(server[server.index("--l1-size-gb") + 1]) * GIB) - sizes["l1_bytes"]) <= 2**10
        assert int(server[server.index("--chunk-size") + 1]) == sizes["chunk_size_tokens"]
    else:
        assert server == []


@given(profiles, models, nodes)
@settings(max_examples=300)
def test_a_rendered_plan_passes_its_own_rules(profile: Profile, model: Model, pair: list[Node]) -> None:
    """The solved values, given by hand, are judged as the solved plan was."""
    ctx = resolve(profile, model, pair)
    size = ctx.sizes
    fixed = replace(
        profile,
        serving=replace(
            profile.serving,
            kv_cache_bytes=max(size.device_bytes, 1),
            max_num_batched_tokens=size.max_num_batched_tokens,
            gpu_memory_utilization=min(size.gpu_memory_utilization_percent, 100) / 100,
        ),
        lmcache=replace(
            profile.lmcache,
            chunk_tokens=size.chunk_size_tokens,
            prefetch_max_in_flight=max(size.prefetch_max_in_flight, 1),
            l1=replace(profile.lmcache.l1, size_gib=size.l1_gib, store_reserve_chunks=size.store_reserve_chunks),
        ),
    )
    solved, given_by_hand = make_plan(profile, model, pair), make_plan(fixed, model, pair)
    if solved["ok"]:
        assert given_by_hand["ok"], given_by_hand["errors"]
        assert given_by_hand["sizes"] == solved["sizes"]


@given(profiles, models, nodes, st.floats(0.25, 30), st.floats(0, 30))
@settings(max_examples=300)
def test_more_l1_never_stages_worse(
    profile: Profile, model: Model, pair: list[Node], small: float, more: float
) -> None:
    def staged(gib: float) -> dict[str, Any]:
        lmcache = replace(profile.lmcache, enabled=True, l1=replace(profile.lmcache.l1, size_gib=gib))
        plan = make_plan(replace(profile, lmcache=lmcache), model, pair)
        staging_rules = {"KV004", "KV005", "KV006", "KV023"}
        return dict(plan["sizes"]) | {"refused": sum(item["rule"] in staging_rules for item in plan["errors"])}

    less, larger = staged(small), staged(small + more)
    for key in (
        "l1_chunks",
        "restores_at_once_longest",
        "restores_at_once_typical",
        "mean_chunks_at_once",
        "l1_guaranteed_bytes",
    ):
        assert larger[key] >= less[key]
    assert larger["refused"] <= less["refused"]


@given(models, nodes, dtypes, st.sampled_from(["default", "skip_l1"]), st.integers(1, 16))
@settings(max_examples=100)
def test_auto_is_not_refused_when_something_feasible_exists(
    model: Model, pair: list[Node], kinds: Dtypes, store: Any, concurrency: int
) -> None:
    """Against a brute-force grid of KV bytes and L1 sizes."""
    profile = Profile(
        name="random",
        dtypes=kinds,
        load=Load(concurrency_per_node=concurrency),
        lmcache=Lmcache(enabled=True, store_policy=store, l2=L2(adapter="fs_native", capacity_gib=400)),
    )
    if make_plan(profile, model, pair)["ok"]:
        return
    least = resolve(profile, model, pair).sizes
    for l1_steps in (0, 1, 3, 5, 6, 10, 40, 120):
        for kv_steps in (0, 10, 19, 20, 21, 60, 200):
            size = least.l1_gib + l1_steps * L1_STEP_BYTES / GIB - 5 * L1_STEP_BYTES / GIB
            if size <= 0:
                continue
            kv = max(least.device_bytes - 20 * KV_STEP_BYTES, KV_STEP_BYTES) + kv_steps * KV_STEP_BYTES
            lmcache = replace(profile.lmcache, l1=replace(profile.lmcache.l1, size_gib=size))
            candidate = replace(profile, lmcache=lmcache, serving=replace(profile.serving, kv_cache_bytes=kv))
            assert not make_plan(candidate, model, pair)["ok"], (size, kv)


@given(hybrids, dtypes, st.sampled_from([1, 8, 16, 32, 128]))
def test_block_is_the_smallest_aligned_one_that_holds_the_state(
    model: ModelGeometry, kinds: Dtypes, alignment: int
) -> None:
    block = block_tokens(model, kinds, alignment)
    assert block % alignment == 0
    assert page_bytes(model, kinds, block) >= mamba_state_bytes(model, kinds)
    smaller = (block - alignment) * attention_bytes_per_token_layer(model, kinds)
    assert smaller < mamba_state_bytes(model, kinds)


@given(st.floats(0, 10**7, allow_nan=False))
def test_decimal_has_no_exponent(value: float) -> None:
    text = decimal(value)
    assert "e" not in text and abs(float(text) - value) <= 1e-6
