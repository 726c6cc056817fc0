"""What a small L1 does: each row was measured on a real engine (LMCache 0.5.2) or on 0.5.6 without a GPU."""

from __future__ import annotations

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import l1
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.l1 import Restore
from kv_plan.kv_helpers import message, plan, refused, warned

# 0.6 GiB of L1 and Nano chunks: 20.39 chunks, so 20 slots and a usage of 0.785 with 16 in use.
SLOTS_MILLI = 644_245_094 * 1000 // 31_596_544
W, RATIO = 800, 200


def test_retaining_l1_stores_only_what_it_can_place() -> None:
    """A, B, C, D of 15 chunks each: 15, 9, 8, 7 were stored. The eviction loop fires once a second: at which fill it
    fired during C (full) and D (19 chunks) is timing, so it is an input; between two prompts it ran until idle."""
    resident, stored = 0, []
    for tick_at in (None, 20, 20, 19):
        count, resident = l1.store_into_retaining_l1(resident, 15, SLOTS_MILLI, W, RATIO, tick_at)
        stored.append(count)
        resident = l1.evict_until_idle(resident, SLOTS_MILLI, W, RATIO)
    assert stored == [15, 9, 8, 7]
    assert resident == 16
    assert f"{resident * 1000 / SLOTS_MILLI:.2f}" == "0.78"
    # Then the restore of A alone: 0 of 15, "short by 11 blocks", and the same for ever after.
    for _attempt in range(3):
        assert l1.predict_restores(SLOTS_MILLI // 1000, resident, [15]) == [Restore(0, 15, 11)]
        assert l1.evict_until_idle(resident, SLOTS_MILLI, W, RATIO) == resident


@pytest.mark.parametrize("tick_at", range(17, 21))
def test_one_eviction_tick_makes_room_for_three_or_four_chunks(tick_at: int) -> None:
    """Whenever the loop fires during a store into 16 of 20, 7 or 8 of 15 chunks get in: both were measured."""
    stored, _resident = l1.store_into_retaining_l1(16, 15, SLOTS_MILLI, W, RATIO, tick_at)
    assert stored == (8 if tick_at == 20 else 7)


def test_without_a_tick_only_the_free_slots_are_stored() -> None:
    assert l1.store_into_retaining_l1(16, 15, SLOTS_MILLI, W, RATIO, None) == (4, 20)


@pytest.mark.parametrize(
    ("arrivals", "served", "oom"),
    [([15], [15], 0), ([15, 15], [15, 0], 15), ([15] * 4, [15, 0, 0, 0], 45), ([21], [0], 21)],
)
def test_staging_l1_of_20_chunks(arrivals: list[int], served: list[int], oom: int) -> None:
    """The same with limits of 8, 2 and 1 in flight, which is why the prediction knows no limit."""
    outcome = l1.predict_restores(20, 0, arrivals)
    assert [item.hit_chunks for item in outcome] == served
    assert sum(item.oom_chunks for item in outcome) == oom


def test_staging_on_0_5_6_without_a_gpu() -> None:
    assert [item.hit_chunks for item in l1.predict_restores(40, 0, [31, 31])] == [31, 0]
    assert [item.hit_chunks for item in l1.predict_restores(40, 0, [31, 31], read_between=True)] == [31, 31]
    assert l1.predict_restores(40, 0, [45]) == [Restore(0, 45, 5)]


@pytest.mark.parametrize(("watermark", "hits"), [(800, 0), (500, 12)])
def test_retention_on_0_5_6_without_a_gpu(watermark: int, hits: int) -> None:
    """L1 of 40 with 30 resident, restore of 12."""
    resident = l1.evict_until_idle(30, 40_000, watermark, RATIO)
    assert l1.predict_restores(40, resident, [12])[0].hit_chunks == hits


def test_restores_at_once_of_the_articles_two_runs() -> None:
    chunk, gib = 103_809_024, 2**30
    assert [l1.restores_at_once(size * gib, 31 * chunk) for size in (4, 8)] == [1, 2]
    assert [l1.restores_at_once(size * gib, 14 * chunk) for size in (4, 8)] == [2, 5]
    room = l1.room_bytes(8 * gib, 8 * chunk, 0)
    assert [l1.restores_at_once(room, n * chunk) for n in (31, 14)] == [2, 5]
    assert l1.mean_chunks_at_once(room // chunk, 5) == 14
    assert l1.store_reserve_chunks(8447, 4224) == 8
    assert l1.guaranteed_bytes(4 * gib, 800) // chunk == 8


def test_edges_of_the_room() -> None:
    assert [l1.room_bytes(size, 4, 0) for size in (10, 9, 3)] == [6, 5, 0]
    assert l1.room_bytes(10_000, 4, 800) == 2_000  # retaining: what is guaranteed
    assert l1.room_bytes(10_000, 9_000, 800) == 1_000  # or what stores leave, if that is less
    assert l1.l1_bytes_for(2_000, 4, 800) == 10_000
    assert l1.l1_bytes_for(2_000, 4, 700) == 6_667
    assert l1.l1_bytes_for(1_000, 9_000, 800) == 10_000
    assert l1.l1_bytes_for(6, 4, 0) == 10
    assert l1.l1_bytes_for(7, 4, 999) == 7_000
    assert l1.l1_bytes_for(7, 4, 1_000) == 11
    assert l1.l1_bytes_for(0, 0, 1_000) == 0
    assert l1.restores_at_once(6, 3) == 2
    assert l1.restores_at_once(5, 3) == 1
    assert l1.restores_at_once(6, 0) == 0
    assert l1.restores_at_once(6, 1) == 6
    assert l1.mean_chunks_at_once(0, 1) == 0
    assert l1.guaranteed_bytes(1_000_000, 800) == 200_000
    assert l1.guaranteed_bytes(999, 500) == 499
    assert l1.guaranteed_bytes(10**12, 0) == 10**12
    assert [l1.prefetch_in_flight(5, waiting, 9) for waiting in (0, 2, 4, 5, 7)] == [5, 3, 1, 1, 1]
    assert l1.prefetch_in_flight(5, 0, 3) == 3


def test_edges_of_a_restore() -> None:
    """A restore that fits exactly is served and reported whole; one into an overfull L1 is short of all it needs."""
    assert l1.predict_restores(10, 4, [6]) == [Restore(6, 0, 0)]
    assert l1.predict_restores(10, 4, [6, 1]) == [Restore(6, 0, 0), Restore(0, 1, 1)]
    assert l1.predict_restores(10, 4, [6, 6], read_between=True) == [Restore(6, 0, 0)] * 2
    assert l1.predict_restores(10, 4, [6, 7], read_between=True) == [Restore(6, 0, 0), Restore(0, 7, 1)]
    assert l1.predict_restores(10, 12, [3]) == [Restore(0, 3, 3)]


def test_edges_of_the_eviction_loop() -> None:
    assert l1.evict_once(800, 1_000_000, 800, 200) == 640  # exactly at the watermark
    assert l1.evict_once(799, 1_000_000, 800, 200) == 799
    assert l1.evict_once(7995, 10_000_000, 800, 200) == 7995
    assert l1.evict_once(4, 4_000, 800, 200) == 3  # a fraction of a key is one key
    assert l1.evict_once(4995, 5_000_000, 800, 200) == 3996
    assert l1.evict_until_idle(1, 1_000, 500, 200) == 0
    assert l1.evict_until_idle(0, 1_000, 500, 200) == 0
    assert l1.store_into_retaining_l1(0, 5000, 1_000_999, 800, 200, None) == (1000, 1000)
    assert l1.store_into_retaining_l1(0, 3, 1_000, 800, 200, None) == (1, 1)


def test_kv16_l14_is_refused_with_what_would_work() -> None:
    result = plan("super-kv16-l14")
    assert refused(result) == {"KV005", "KV006"}
    text = message(result, "KV006")
    for part in (
        "retention and staging share 41 chunks",
        "(1 - 0.8) x 4.00 GiB = 859 MB",
        "8 chunks, are guaranteed free",
        "31 chunks (3,218 MB)",
        "store_policy: skip_l1",
        "size_gib to at least 15",
        "eviction_watermark to at most 0.25",
    ):
        assert part in text
    # Each remedy, taken at its word.
    auto = {"lmcache.prefetch_max_in_flight": "auto"}
    for settings in ({"lmcache.store_policy": "skip_l1"}, {"lmcache.l1.eviction_watermark": 0.25}):
        assert plan("super-kv16-l14", settings=settings | auto)["ok"]
    room = {"lmcache.l1.size_gib": 15, "serving.kv_cache_bytes": 10_000_000_000}
    assert plan("super-kv16-l14", settings=room | auto)["ok"]


def test_a_retaining_l1_stages_only_in_what_is_guaranteed() -> None:
    """15 GiB hold 155 chunks, but only 31 of them are sure to be free: one restore, not four."""
    settings = {"lmcache.store_policy": "default", "lmcache.l1.size_gib": 15}
    result = plan("super-recommended", settings=settings)
    sizes = result["sizes"]
    assert sizes["l1_room_chunks"] == sizes["l1_guaranteed_chunks"] == 31
    assert (sizes["restores_at_once_longest"], sizes["restores_at_once_typical"]) == (1, 2)
    assert sizes["prefetch_max_in_flight"] == 1
    assert sizes["mean_chunks_at_once"] == 31 // 5
    assert warned(result) == {"KV028"}
    text = message(result, "KV028")
    assert "the 31 of 155 chunks that are guaranteed free stage 1 restores" in text
    # Five at once need 31 + 4 x 14 = 87 chunks of guaranteed room: 435 chunks.
    assert "size_gib to 42.25" in text and "store_policy: skip_l1" in text
    two = plan("super-recommended", settings=settings | {"lmcache.prefetch_max_in_flight": 2})
    assert refused(two) == {"KV005"}
    assert "at most 1 (= floor(31 / 31) - 0, at least 1)" in message(two, "KV005")
    assert "size_gib to 30" in message(two, "KV005")
    enough = {"lmcache.l1.size_gib": 42.25, "serving.kv_cache_bytes": 2_000_000_000, "memory.weights_bytes": 0}
    assert plan("super-recommended", settings=settings | enough)["warnings"] == []
    staging = plan("super-recommended", settings={"lmcache.l1.size_gib": 15})["sizes"]
    assert (staging["restores_at_once_longest"], staging["prefetch_max_in_flight"]) == (4, 4)


def test_kv12_l18_fits_for_two_full_restores_with_its_two_warnings() -> None:
    result = plan("super-kv12-l18")
    assert result["ok"]
    assert warned(result) == {"KV008", "KV028"}
    assert result["sizes"]["restores_at_once_longest"] == 2
    assert "noop" in message(result, "KV008")
    text = message(result, "KV028")
    assert "2 restores of the longest prompt" in text
    assert "5 simultaneous requests restore only if they average <= 14 chunks (59,136 tokens)" in text


def test_super_c_p2p_is_refused_by_the_retention_rule_alone() -> None:
    result = plan("super-c-p2p")
    assert refused(result) == {"KV006"}
    text = message(result, "KV006")
    assert "size_gib to at least 15" in text
    assert "eviction_watermark to at most 0.70" in text
    assert "skip_l1" not in text  # no way out here: peers read what L1 retains
    assert plan("super-c-p2p", settings={"lmcache.l1.eviction_watermark": 0.7})["ok"]


def test_skip_l1_with_p2p_alone_is_refused() -> None:
    result = plan("super-c-p2p", settings={"lmcache.store_policy": "skip_l1"})
    assert "KV007" in refused(result)
    assert "P2P is the only adapter, and it stores nothing" in message(result, "KV007")


def test_separate_groups_count_only_where_they_were_seen_to_work() -> None:
    separate = {"lmcache.object_groups": "separate"}
    assert plan("super-recommended", settings=separate)["sizes"]["longest_prefix_bytes"] == 31 * 17_301_504 + 86_507_520
    assert plan("super-kv12-l18", settings=separate)["sizes"]["longest_prefix_bytes"] == 3_218_079_744
    before = separate | {"versions.lmcache": "0.5.5"}
    assert plan("super-recommended", settings=before)["sizes"]["longest_prefix_bytes"] == 3_218_079_744
    assert "KV029" in warned(plan("super-recommended", settings=separate))
