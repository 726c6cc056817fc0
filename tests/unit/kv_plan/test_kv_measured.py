"""Sizes, to the unit, against what vLLM 0.23.0 and LMCache 0.5.2 logged on a GPU and what was published."""

from __future__ import annotations

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import device, geometry, l1
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import gib_to_bytes
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.geometry import Dtypes, ModelGeometry
from kv_plan.kv_helpers import BF16, MODELS, NANO, SUPER, plan

LENGTH = 131072
F32 = Dtypes("fp8", "bfloat16", "float32")


def arena(model: ModelGeometry, dtypes: Dtypes, kv_bytes: int) -> tuple[int, int, int]:
    block = geometry.block_tokens(model, dtypes)
    blocks = device.device_blocks(model, dtypes, block, kv_bytes)
    request = device.blocks_per_request(model, block, LENGTH)
    return block, blocks, device.device_tokens(blocks, request, LENGTH)


@pytest.mark.parametrize(
    ("model", "dtypes", "kv_bytes", "block", "blocks", "tokens"),
    [
        ("nano", BF16, 10_000_000_000, 2128, 1529, 2_862_986),
        ("nano", BF16, 56_000_000_000, 2128, 8566, 16_039_467),
        ("super", BF16, 12_000_000_000, 4224, 693, 2_162_688),
        ("super", BF16, 20_000_000_000, 4224, 1155, 3_604_480),
        ("super", F32, 12_000_000_000, 8320, 352, 1_774_513),
    ],
)
def test_device_arena_is_what_the_engine_logged(
    model: str, dtypes: Dtypes, kv_bytes: int, block: int, blocks: int, tokens: int
) -> None:
    assert arena(MODELS[model], dtypes, kv_bytes) == (block, blocks, tokens)


@pytest.mark.parametrize(
    ("model", "kv_bytes", "per_token"),
    [("nano", 10_000_000_000, 3492.9), ("nano", 512 * 2**20, 3496.6), ("super", 12_000_000_000, 5548.65)]
    + [("super", size, 5548.65) for size in (16_000_000_000, 20_000_000_000)],
)
def test_device_bytes_per_token(model: str, kv_bytes: int, per_token: float) -> None:
    digits = 2 if model == "super" else 1
    assert round(kv_bytes / arena(MODELS[model], BF16, kv_bytes)[2], digits) == per_token


@pytest.mark.parametrize(
    ("kv_bytes", "nano", "super_"),
    [
        (10_000_000_000, "2.863", "1.801"),
        (12_000_000_000, "3.436", "2.163"),
        (16_000_000_000, "4.582", "2.884"),
        (20_000_000_000, "5.728", "3.604"),
    ],
)
def test_device_table(kv_bytes: int, nano: str, super_: str) -> None:
    assert f"{arena(NANO, BF16, kv_bytes)[2] / 1e6:.3f}" == nano
    assert f"{arena(SUPER, BF16, kv_bytes)[2] / 1e6:.3f}" == super_


@pytest.mark.parametrize(
    ("model", "state", "block", "page", "padding", "per_token", "chunk", "chunks", "batched"),
    [
        ("nano", 1_085_440, 2128, 1_089_536, "0.38", 14_848, 31_596_544, 61, 4255),
        ("super", 2_158_592, 4224, 2_162_688, "0.19", 24_576, 103_809_024, 31, 8447),
    ],
)
def test_constants(
    model: str, state: int, block: int, page: int, padding: str, per_token: int, chunk: int, chunks: int, batched: int
) -> None:
    shape = MODELS[model]
    assert geometry.mamba_state_bytes(shape, BF16) == state
    assert geometry.block_tokens(shape, BF16) == block
    assert geometry.page_bytes(shape, BF16, block) == page
    assert f"{geometry.mamba_padding_percent(shape, BF16, block):.2f}" == padding
    assert geometry.lmcache_bytes_per_token(shape, BF16) == per_token
    assert geometry.chunk_bytes(shape, BF16, block) == chunk
    assert geometry.full_chunks(LENGTH, block) == chunks
    assert plan(f"{model}-recommended")["sizes"]["max_num_batched_tokens"] == batched


def test_layers_and_groups() -> None:
    assert (NANO.attention_layers, NANO.mamba_layers, SUPER.attention_layers, SUPER.mamba_layers) == (6, 23, 8, 40)
    assert device.device_groups(NANO) == device.DeviceGroups(6, 1, 4)
    assert device.device_groups(SUPER) == device.DeviceGroups(8, 1, 5)
    assert device.blocks_per_request(NANO, 2128, LENGTH) == 70
    assert device.blocks_per_request(SUPER, 4224, LENGTH) == 42
    assert device.device_block_bytes(NANO, BF16, 2128) == 6_537_216
    assert device.device_block_bytes(SUPER, BF16, 4224) == 17_301_504


@pytest.mark.parametrize(
    ("attention", "mamba", "groups"),
    [
        (8, 9, (9, 1, 1)),  # 9 < 1.25 x 8: one padded size for both
        (8, 10, (8, 1, 2)),  # 10 = 1.25 x 8 is not less
        (10, 8, (8, 2, 1)),
        (4, 4, (4, 1, 1)),
        (1, 7, (1, 1, 7)),
    ],
)
def test_group_size_takes_the_larger_count_only_below_a_quarter_more(
    attention: int, mamba: int, groups: tuple[int, int, int]
) -> None:
    shape = ModelGeometry("x", attention, 2, 128, mamba, 8, 64, 128, 1, 4)
    found = device.device_groups(shape)
    assert (found.size, found.attention, found.mamba) == groups


@pytest.mark.parametrize(
    ("model", "kv", "ssm", "block", "per_token", "chunk_mb"),
    [
        ("nano", "fp8", "bfloat16", 2128, 14_848, 31.6),
        ("nano", "fp8", "float32", 4176, 14_848, 62.0),
        ("nano", "fp8_e4m3", "float16", 2128, 14_848, 31.6),
        ("nano", "fp8_e5m2", "float16", 2128, 14_848, 31.6),
        ("nano", "float16", "bfloat16", 1072, 29_696, 31.8),
        ("nano", "bfloat16", "float16", 1072, 29_696, 31.8),
        ("nano", "bfloat16", "float32", 2096, 29_696, 62.2),
        ("super", "fp8", "bfloat16", 4224, 24_576, 103.8),
        ("super", "fp8", "float32", 8320, 24_576, 204.5),
        ("super", "bfloat16", "bfloat16", 2112, 49_152, 103.8),
        ("super", "bfloat16", "float32", 4160, 49_152, 204.5),
    ],
)
def test_dtype_sensitivity(model: str, kv: str, ssm: str, block: int, per_token: int, chunk_mb: float) -> None:
    dtypes = Dtypes(kv, "bfloat16", ssm)
    assert geometry.block_tokens(MODELS[model], dtypes) == block
    assert geometry.lmcache_bytes_per_token(MODELS[model], dtypes) == per_token
    assert round(geometry.chunk_bytes(MODELS[model], dtypes, block) / 1e6, 1) == chunk_mb


def test_conv_state_dtype_counts() -> None:
    wide = Dtypes("fp8", "float32", "bfloat16")
    conv_elements = (64 * 64 + 2 * 8 * 128) * 3
    assert geometry.mamba_state_bytes(NANO, wide) - geometry.mamba_state_bytes(NANO, BF16) == 2 * conv_elements


def test_block_follows_the_kernel_alignment() -> None:
    """On a CPU vLLM aligns to 128 tokens, where it computes 2176 for Nano."""
    assert geometry.block_tokens(NANO, BF16, 128) == 2176
    assert geometry.block_tokens(NANO, BF16, 16) == 2128


@pytest.mark.parametrize(
    ("prompt", "cached"),
    [
        (2127, 0),
        (2128, 0),
        (2129, 2128),
        (4256, 2128),
        (4257, 4256),
        (6456, 6384),
        (32_000, 31_920),
        (131_071, 129_808),
    ],
)
def test_repeat_hits_what_the_engine_reported(prompt: int, cached: int) -> None:
    assert device.cached_tokens_of_repeat(prompt, prompt, 2128) == cached


@pytest.mark.parametrize(("shared", "cached"), [(6400, 6384), (6000, 4256)])
def test_shared_prefix_hits_whole_blocks(shared: int, cached: int) -> None:
    assert device.cached_tokens_of_repeat(shared, 6456, 2128) == cached


def test_serialised_prompt_and_l2_files() -> None:
    assert geometry.serialised_bytes(NANO, BF16, 32_000, 2128) == 505_544_704
    assert geometry.full_chunks(32_000, 2128) == 15
    assert geometry.full_chunks(45_000, 2128) == 21


@pytest.mark.parametrize(
    ("gib", "super_chunks", "super_tokens", "nano_chunks", "nano_tokens"),
    [
        (4, 41, 174_763, 135, 289_262),
        (8, 82, 349_525, 271, 578_525),
        (10, 103, 436_907, 339, 723_156),
        (12, 124, 524_288, 407, 867_787),
        (16, 165, 699_051, 543, 1_157_049),
        (20, 206, 873_813, 679, 1_446_312),
    ],
)
def test_l1_table(gib: int, super_chunks: int, super_tokens: int, nano_chunks: int, nano_tokens: int) -> None:
    size = gib_to_bytes(gib)
    assert l1.l1_slots(size, 103_809_024) == super_chunks
    assert l1.l1_slots(size, 31_596_544) == nano_chunks
    assert round(size / 24_576) == super_tokens
    assert round(size / 14_848) == nano_tokens


@pytest.mark.parametrize(
    ("model", "chunks", "fused", "separate"),
    [
        ("super", 31, 3_218_079_744, 31 * 17_301_504 + 86_507_520),
        ("nano", 61, 1_927_389_184, 61 * 6_537_216 + 25_059_328),
    ],
)
def test_full_prefix_fused_and_separate(model: str, chunks: int, fused: int, separate: int) -> None:
    shape = MODELS[model]
    block = geometry.block_tokens(shape, BF16)
    assert geometry.restore_bytes(shape, BF16, chunks, block, False, 1) == fused
    assert geometry.restore_bytes(shape, BF16, chunks, block, True, 1) == separate
    attention, mamba = geometry.separate_object_bytes(shape, BF16, block)
    assert attention + mamba == geometry.chunk_bytes(shape, BF16, block)
    assert geometry.restore_bytes(shape, BF16, 0, block, True, 1) == 0


def test_rdma_pages_pad_nano_but_not_super() -> None:
    assert geometry.restore_bytes(SUPER, BF16, 1, 4224, False, 65536) == 103_809_024
    padded = geometry.restore_bytes(NANO, BF16, 1, 2128, False, 65536)
    assert f"{100 * (padded / 31_596_544 - 1):.2f}" == "0.18"


def test_published_totals_of_the_articles_l1_arm() -> None:
    """10e9 bytes of device and 48 decimal GB of L1 at its watermark are the published 5.45 million tokens a node."""
    device_tokens = arena(NANO, BF16, 10_000_000_000)[2]
    assert round((device_tokens + 0.8 * 48e9 / 14_848) / 1e6, 2) == 5.45
    assert round(0.8 * gib_to_bytes(48) / 14_848 / 1e6, 3) == 2.777


@pytest.mark.parametrize(
    ("profile", "device_tokens", "l1_chunks"),
    [
        ("weka-a-router", 16_039_467, 0),
        ("weka-b-l1only", 2_862_986, 1628),
        ("weka-c-p2p", 2_862_986, 1628),
        ("super-a-router", 3_604_480, 0),
        ("super-c-p2p", 1_800_679, 103),
        ("super-kv16-l14", 2_883_584, 41),
        ("super-kv12-l18", 2_162_688, 82),
    ],
)
def test_seven_arms(profile: str, device_tokens: int, l1_chunks: int) -> None:
    sizes = plan(profile)["sizes"]
    assert (sizes["device_tokens"], sizes["l1_chunks"]) == (device_tokens, l1_chunks)


def test_l2_of_the_article() -> None:
    sizes = plan("super-kv12-l18")["sizes"]
    assert sizes["l2_chunks"] == 400 * 2**30 // 103_809_024 == 4137
    assert round(sizes["l2_tokens"] / 1e6, 1) == 17.5
    assert 400_000_000_000 // 103_809_024 == 3853


def test_a_tier_adds_only_what_the_tier_above_does_not_hold() -> None:
    """48 GiB of L1 at the watermark repeat what 10e9 bytes of device hold: the tier adds nothing."""
    sizes = plan("weka-b-l1only")["sizes"]
    assert sizes["l1_adds_tokens"] == 0
    larger = plan("weka-b-l1only", settings={"lmcache.l1.size_gib": 60})["sizes"]
    slots_kept = int(60 * 2**30 * 0.8) // larger["chunk_slot_bytes"]
    assert larger["l1_adds_tokens"] == slots_kept * 2128 - larger["device_tokens"] > 0
    staged = plan("super-kv12-l18")["sizes"]
    assert staged["l1_adds_tokens"] == 0
    kept_chunks = int(400 * 2**30 * 0.8) // 103_809_024
    assert staged["l2_adds_tokens"] == kept_chunks * 4224 - 2_162_688


def test_plain_attention_has_one_group_and_the_backends_block() -> None:
    plain = ModelGeometry("x", 32, 8, 128)
    assert not plain.hybrid
    assert (plain.mamba_layers, plain.mamba_heads, plain.mamba_head_dim, plain.state_size) == (0, 0, 0, 0)
    assert (plain.groups, plain.conv_kernel) == (0, 0)
    assert geometry.mamba_state_bytes(plain, BF16) == 0
    assert geometry.block_tokens(plain, BF16) == 16
    assert device.device_groups(plain) == device.DeviceGroups(32, 1, 0)
    assert device.blocks_per_request(plain, 16, LENGTH) == 8192
    assert device.device_block_bytes(plain, BF16, 16) == 32 * 16 * 2048
    assert ModelGeometry("x", 1, 2, 128, 1, 8, 64, 128, 1, 4).hybrid
    sizes = plan("nano-recommended", model="tiny")["sizes"]
    assert (sizes["chunk_size_tokens"], sizes["max_num_batched_tokens"]) == (256, 8192)
    single = plan("nano-recommended", model="tiny", settings={"block_alignment_tokens": 1})["sizes"]
    assert single["chunk_size_tokens"] == 256


def test_nothing_is_cached_of_an_empty_prompt() -> None:
    assert device.cached_tokens_of_repeat(0, 0, 1) == 0
    assert device.cached_tokens_of_repeat(5, 1, 1) == 0
    assert device.cached_tokens_of_repeat(5, 9, 1) == 5


def test_speculative_tokens_pin_blocks_in_every_mamba_group() -> None:
    assert device.blocks_per_request(NANO, 2128, LENGTH, 3) == 70 + 4 * 3


@pytest.mark.parametrize(
    ("chunk", "block", "valid"), [(4224, 4224, True), (8448, 4224, True), (4225, 4224, False), (2112, 4224, False)]
)
def test_chunk_is_a_whole_number_of_blocks(chunk: int, block: int, valid: bool) -> None:
    assert geometry.valid_chunk(chunk, block) is valid
