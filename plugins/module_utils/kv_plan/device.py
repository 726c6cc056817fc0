# Apache-2.0 (see LICENSE)
"""vLLM's device arena: blocks, groups, capacity in tokens, what a repeated prompt hits.

Source: vLLM 0.23.0 ``kv_cache_utils`` (group builder, ``get_max_concurrency_for_kv_cache_config``); the token counts of
every case in tests/unit/kv_plan/test_measured.py were read from the engine's log.
"""

from __future__ import annotations

from dataclasses import dataclass

from .checks import ceil_div
from .geometry import Dtypes, ModelGeometry, page_bytes

#: Mamba blocks that one request pins in ``align`` mode: the running state and the last block boundary.
ALIGN_MAMBA_BLOCKS = 2


@dataclass(frozen=True)
class DeviceGroups:
    """How vLLM groups layers that share a block table: ``size`` layers a group."""

    size: int
    attention: int
    mamba: int

    @property
    def total(self) -> int:
        return self.attention + self.mamba


def device_groups(model: ModelGeometry) -> DeviceGroups:
    """Group size (formula 7) and number of groups (formula 8).

    The size is the smaller layer count, or the larger one if it is less than 1.25 times the smaller; groups are padded
    to that size (23 Mamba layers in groups of 6 waste one layer).
    """
    if not model.hybrid:
        return DeviceGroups(model.attention_layers, 1, 0)
    few, many = sorted((model.attention_layers, model.mamba_layers))
    size = many if many * 4 < few * 5 else few
    return DeviceGroups(size, ceil_div(model.attention_layers, size), ceil_div(model.mamba_layers, size))


def device_block_bytes(model: ModelGeometry, dtypes: Dtypes, block: int) -> int:
    """Bytes of one device block: group size x page (formula 10)."""
    return device_groups(model).size * page_bytes(model, dtypes, block)


def device_blocks(model: ModelGeometry, dtypes: Dtypes, block: int, kv_bytes: int) -> int:
    """Whole device blocks in ``kv_bytes``, the "GPU blocks" of vLLM's log."""
    return kv_bytes // device_block_bytes(model, dtypes, block)


def blocks_per_request(model: ModelGeometry, block: int, tokens: int, speculative_tokens: int = 0) -> int:
    """Device blocks of one request of ``tokens`` tokens (formula 9)."""
    groups = device_groups(model)
    return groups.attention * ceil_div(tokens, block) + groups.mamba * (ALIGN_MAMBA_BLOCKS + speculative_tokens)


def device_tokens(blocks: int, request_blocks: int, max_model_len_tokens: int) -> int:
    """ "GPU KV cache tokens" as vLLM logs it: ``floor(blocks / R x L)`` (formula 11), in exact integers."""
    return blocks * max_model_len_tokens // request_blocks


def cached_tokens_of_repeat(shared_tokens: int, prompt_tokens: int, block: int) -> int:
    """Tokens that a prompt finds in the device cache when its first ``shared_tokens`` were seen before.

    ``floor(min(shared, L - 1) / block) x block``: whole blocks only, and the last token is always computed.
    """
    return max(min(shared_tokens, prompt_tokens - 1), 0) // block * block
