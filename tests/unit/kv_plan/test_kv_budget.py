"""The memory budget: it sums to the byte, takes what was measured, and solves what is auto."""

from __future__ import annotations

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import Node, files, make_plan, memory, search, solve
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import GIB
from kv_plan.kv_helpers import plan, refused


@pytest.mark.parametrize("name", files.names_in(files.PROFILES))
def test_lines_sum_to_memtotal(name: str) -> None:
    result = plan(name, memory_gib=(112.3, 121.7))
    for node in result["budget"].values():
        assert sum(line["bytes"] for line in node["lines"]) == node["total_bytes"]
        assert all(line["bytes"] >= 0 for line in node["lines"][:-1])


def lines(result: dict[str, object], node: str = "node1") -> dict[str, int]:
    return {line["name"]: line["bytes"] for line in result["budget"][node]["lines"]}  # type: ignore[index]


def test_each_line_is_what_the_profile_says() -> None:
    result = plan("super-kv12-l18")
    first, second = lines(result), lines(result, "node2")
    assert first == {
        "weights": 74_800_000_000,
        "device KV": 12_000_000_000,
        "engine overhead": 4 * GIB,
        "L1": 8 * GIB,
        "LMCache process": (616 + 640) * 2**20 + 103_809_024,
        "Mooncake": 0,
        "OS at rest": 4 * GIB,
        "control plane": 2 * GIB,
        "page cache": 2 * GIB,
        "shm": GIB,
        "reserve": 10 * GIB,
        "free": first["free"],
    }
    assert second["control plane"] == 3 * GIB // 4


def test_measured_memory_at_rest_replaces_the_assumption() -> None:
    total = 120 * GIB
    node = Node("spark1", total, available_bytes=total - 7 * GIB, swap_bytes=16 * GIB)
    result = make_plan(files.load_profile("super-kv12-l18"), files.load_model("super"), [node])
    assert lines(result, "spark1")["OS at rest"] == 7 * GIB
    # Swap is shown, but never counted as memory.
    assert result["budget"]["spark1"]["swap_bytes"] == 16 * GIB
    assert sum(lines(result, "spark1").values()) == total


def test_mooncake_costs_its_segment_and_its_buffer() -> None:
    dram = plan("super-mooncake-dram")
    assert lines(dram)["Mooncake"] == 6 * GIB
    settings = {"lmcache.l2.mooncake_ssd_offload": True, "lmcache.l2.capacity_gib": 400}
    assert lines(plan("super-mooncake-dram", settings=settings))["Mooncake"] == 6 * GIB + 5 * GIB // 4


def test_auto_takes_all_that_fits_and_no_more() -> None:
    solved = plan("super-recommended")
    kv, size = solved["sizes"]["device_bytes"], solved["sizes"]["l1_gib"]
    assert size == 9.25  # 8 + 31 + 4 x 14 = 95 chunks of 103,809,024 bytes
    assert solved["sizes"]["l1_chunks"] == 95
    fixed = {"lmcache.l1.size_gib": size}
    assert plan("super-recommended", settings=fixed | {"serving.kv_cache_bytes": kv})["ok"]
    more = plan("super-recommended", settings=fixed | {"serving.kv_cache_bytes": kv + 100_000_000})
    assert not more["ok"]


def test_auto_l1_shrinks_when_the_stated_restores_do_not_fit() -> None:
    tight = plan("super-recommended", memory_gib=(104.5,))
    assert tight["ok"]
    assert tight["sizes"]["l1_gib"] < 9.25
    assert tight["sizes"]["restores_at_once_longest"] >= 1
    assert [item["rule"] for item in tight["warnings"]] == ["KV028"]


def test_retaining_auto_leaves_the_guaranteed_room() -> None:
    retaining = {"lmcache.store_policy": "default", "load.simultaneous_restores": 1}
    result = plan("super-recommended", settings=retaining)
    assert result["ok"]
    assert result["sizes"]["l1_gib"] == 15.0
    assert result["sizes"]["l1_guaranteed_chunks"] == 31


def test_utilisation_covers_the_engine_on_the_smallest_node() -> None:
    result = plan("super-recommended", memory_gib=(112.3, 121.7))
    percent = result["sizes"]["gpu_memory_utilization_percent"]
    engine = 74_800_000_000 + 4 * GIB + result["sizes"]["device_bytes"]
    smallest = int(112.3 * GIB)
    assert percent * smallest >= engine * 100 > (percent - 1) * smallest
    assert f"{percent / 100:g}" in result["vllm_args"]


def test_start_check_counts_what_is_up_before_the_engine() -> None:
    profile = files.load_profile("super-kv12-l18")
    node = Node("a", 120 * GIB, available_bytes=116 * GIB, server=True)
    need = memory.demand(profile, 74_800_000_000, 103_809_024)
    wanted, available = memory.start_check(profile, node, need, 8 * GIB, 72)
    assert wanted == 120 * GIB * 72 // 100 + 6_000_000_000
    assert available == 116 * GIB - 8 * GIB - need.lmcache_process_bytes - 2 * GIB


def test_no_memory_is_a_refusal_with_the_numbers() -> None:
    result = plan("super-recommended", memory_gib=(64.0,))
    assert "KV012" in refused(result)


def test_the_solver_takes_the_last_step_that_fits() -> None:
    for limit in range(10, 70):
        found = solve._largest(10, 57, 5, lambda size, limit=limit: size <= limit)  # type: ignore[misc]
        assert found == max(size for size in range(10, 58, 5) if size <= limit)
    assert solve._largest(10, 57, 5, lambda size: size < 10) is None
    assert solve._largest(10, 10, 5, lambda _size: True) == 10


def test_solved_values_are_round_numbers() -> None:
    sizes = plan("super-recommended")["sizes"]
    assert sizes["device_bytes"] % 100_000_000 == 0
    assert sizes["l1_bytes"] % (GIB // 4) == 0


def test_a_typical_prompt_is_assumed_from_the_longest() -> None:
    sizes = plan("super-recommended", settings={"load.typical_prompt_tokens": "auto"})["sizes"]
    assert sizes["typical_prompt_tokens"] == 131072 * 48 // 100


def test_mooncake_keeps_its_segment_up_to_the_watermark() -> None:
    sizes = plan("super-mooncake-dram")["sizes"]
    assert sizes["l2_bytes"] == 6 * GIB * 90 // 100
    settings = {"lmcache.l2.mooncake_ssd_offload": True, "lmcache.l2.capacity_gib": 100}
    assert plan("super-mooncake-dram", settings=settings)["sizes"]["l2_bytes"] == 6 * GIB * 90 // 100 + 100 * GIB


def test_the_last_byte_is_used() -> None:
    """A node that has exactly what a plan needs, and not one byte more, gets that plan."""
    fixed = {"lmcache.l1.size_gib": 5.5}
    first = plan("nano-recommended", settings=fixed, memory_gib=(119.7,))
    total = first["budget"]["node1"]["total_bytes"] - first["budget"]["node1"]["free_bytes"]
    model = files.load_model("nano")
    exact = make_plan(files.load_profile("nano-recommended", fixed), model, [Node("node1", total, server=True)])
    assert exact["sizes"]["device_bytes"] == first["sizes"]["device_bytes"]
    assert exact["budget"]["node1"]["free_bytes"] == 0
    less = make_plan(files.load_profile("nano-recommended", fixed), model, [Node("node1", total - 1, server=True)])
    assert less["sizes"]["device_bytes"] == first["sizes"]["device_bytes"] - 100_000_000


def test_solved_utilisation_is_reachable_after_rounding() -> None:
    total = 120 * GIB
    for tenths in range(840, 960, 3):
        reachable = tenths * GIB // 10
        node = Node("a", total, server=True, cuda_free_bytes=reachable)
        result = make_plan(files.load_profile("super-recommended"), files.load_model("super"), [node])
        assert result["ok"], result["errors"]
        assert result["sizes"]["gpu_memory_utilization_percent"] * total <= reachable * 100


@pytest.mark.parametrize(
    ("profile", "model", "settings", "l1_gib"),
    [
        ("nano-recommended", "nano", {"lmcache.l1.eviction_watermark": 0.95, "load.simultaneous_restores": 1}, 36.0),
        ("virtual", "tiny", {"lmcache.l1.eviction_watermark": 0.999, "load.simultaneous_restores": 1}, 2.0),
        ("virtual", "tiny", {"lmcache.l1.eviction_watermark": 1.0}, 0.25),
        ("virtual", "tiny", {"load.longest_prompt_tokens": 1, "lmcache.l1.store_reserve_chunks": 0}, 0.25),
    ],
)
def test_auto_l1_of_a_retaining_tier(profile: str, model: str, settings: dict[str, object], l1_gib: float) -> None:
    settings = {"lmcache.l1.size_gib": "auto", "lmcache.store_policy": "default"} | settings
    settings |= {"load.typical_prompt_tokens": "auto"}
    assert plan(profile, model, settings=settings)["sizes"]["l1_gib"] == l1_gib


def test_what_is_absent_is_zero() -> None:
    router, virtual = plan("weka-a-router")["sizes"], plan("virtual", memory_gib=(1.5,))["sizes"]
    assert (router["l1_bytes"], router["prefetch_max_in_flight"]) == (0, 0)
    assert (virtual["device_bytes"], virtual["gpu_memory_utilization_percent"]) == (0, 0)
    assert plan("weka-b-l1only")["sizes"]["l2_bytes"] == 0


def test_full_prefixes_of_each_tier_are_whole() -> None:
    sizes = plan("super-kv12-l18")["sizes"]
    assert (sizes["device_full_prefixes"], sizes["l1_full_prefixes"], sizes["l2_full_prefixes"]) == (16, 2, 133)
    short = {"load.longest_prompt_tokens": 1000, "load.typical_prompt_tokens": "auto"}
    none = plan("super-kv12-l18", settings=short)["sizes"]
    assert (none["longest_prompt_chunks"], none["l1_full_prefixes"], none["l2_full_prefixes"]) == (0, 0, 0)


@pytest.mark.parametrize(("mtp_tokens", "blocks"), [(0, 15 + 5 * 2), (1, 15 + 5 * 3)])
def test_prompts_on_the_device_are_the_longest_and_not_the_limit(mtp_tokens: int, blocks: int) -> None:
    """A prompt of 63,000 tokens has 15 blocks of 4,224 and its Mamba blocks; 131,072 tokens have 32."""
    settings = {"load.longest_prompt_tokens": 63_000, "serving.mtp_tokens": mtp_tokens}
    sizes = plan("super-kv12-l18", settings=settings)["sizes"]
    assert sizes["kv_blocks"] == 693 and sizes["device_full_prefixes"] == 693 // blocks
    assert sizes["kv_blocks_per_request"] == 32 + 5 * (2 + mtp_tokens)


def test_search_counts_the_device_in_the_unit_of_the_tier_below() -> None:
    loaded, nodes = files.load_model("super"), files.nodes_from_gib((119.7,))
    profile = files.load_profile("super-recommended", {"load.longest_prompt_tokens": 63_000})
    best = search.search(profile, loaded, nodes)[0]
    assert best.device_prefixes == best.device_bytes // 17_301_504 // 25
    assert best.lower_prefixes == int(400 * 2**30 * 0.8) // 103_809_024 // 14


def test_a_small_l2_adds_nothing() -> None:
    assert plan("super-kv12-l18", settings={"lmcache.l2.capacity_gib": 1})["sizes"]["l2_adds_tokens"] == 0


def test_mean_length_with_separate_groups() -> None:
    """2.75 GiB less 8 chunks for stores; five restores with one Mamba object each: 19 attention objects a restore."""
    sizes = plan("super-recommended", settings={"lmcache.object_groups": "separate"})["sizes"]
    assert sizes["l1_gib"] == 2.75
    room = 2_952_790_016 - 8 * 103_809_024
    assert sizes["mean_chunks_at_once"] == (room - 5 * 86_507_520) // (5 * 17_301_504) == 19
    tiny = {"lmcache.object_groups": "separate", "lmcache.l1.size_gib": 0.25}
    assert plan("super-recommended", settings=tiny)["sizes"]["mean_chunks_at_once"] == 0


def test_a_prompt_of_one_token_is_still_a_prompt() -> None:
    one = {"load.longest_prompt_tokens": 1, "load.typical_prompt_tokens": "auto"}
    assert plan("super-kv12-l18", settings=one)["sizes"]["typical_prompt_tokens"] == 1


def test_the_reachable_share_is_used_up_to_a_hundredth() -> None:
    """On a node whose percent are whole bytes, utilisation ends exactly at what CUDA reaches."""
    total = 1250 * 10**8
    node = Node("a", total, server=True, cuda_free_bytes=total * 74 // 100)
    result = make_plan(files.load_profile("super-recommended"), files.load_model("super"), [node])
    assert result["sizes"]["gpu_memory_utilization_percent"] == 74
    # Engine and KV fill 74 % but for less than one step.
    used = 74_800_000_000 + 4 * GIB + result["sizes"]["device_bytes"]
    assert 0 <= total * 74 // 100 - used < 100_000_000


@pytest.mark.parametrize(("restores", "l1_gib"), [(1, 60.25), (2, 120.25)])
def test_retention_rounds_up_to_the_next_step(restores: int, l1_gib: float) -> None:
    """Exactly 12 GiB of prefix at a fifth guaranteed are 60 GiB; one page more takes the next step."""
    tokens = 12 * 2**30 // 256
    settings = {
        "serving.max_model_len_tokens": tokens + 256,
        "load.longest_prompt_tokens": tokens + 256,
        "load.typical_prompt_tokens": tokens + 256,
        "load.simultaneous_restores": restores,
        "lmcache.l1.size_gib": "auto",
        "lmcache.l1.store_reserve_chunks": 0,
    }
    model = files.load_model("tiny")
    node = Node("a", 1024 * GIB, server=True)
    exact = {key: tokens if str(key).endswith("_tokens") else value for key, value in settings.items()}
    assert make_plan(files.load_profile("virtual", exact), model, [node])["sizes"]["l1_gib"] == l1_gib - 0.25
    assert make_plan(files.load_profile("virtual", settings), model, [node])["sizes"]["l1_gib"] == l1_gib
    # Where nothing fits, the refused plan shows the least that would do: one prompt.
    small = make_plan(files.load_profile("virtual", settings), model, [Node("a", 8 * GIB, server=True)])
    assert refused(small) == {"KV012"}
    assert small["sizes"]["l1_gib"] == 60.25
