# Apache-2.0 (see LICENSE)
"""What a model needs per token: attention and Mamba bytes, vLLM's unified block, LMCache's chunk.

A hybrid Mamba-2 model keeps a growing KV cache for its attention layers and a fixed recurrent state for its Mamba
layers. vLLM gives both one page size, so the block (in tokens) follows from the state's bytes. Nothing here is a
constant of one model: the shapes come from ``config.json`` and the dtypes from the profile.

Sources: vLLM 0.23.0 ``Platform._align_hybrid_block_size``, ``MambaSpec``; the figures for Nemotron 3 Nano and Super
were compared with vLLM 0.23.0's log lines on an H200 (tests/unit/kv_plan/test_measured.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .checks import PlanInputError, ceil_div, nearest, whole

#: Bytes of one element. ``auto`` is never a dtype: the profile says which one it means.
DTYPE_BYTES: dict[str, int] = {
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
}
KV_DTYPES = ("fp8", "fp8_e4m3", "fp8_e5m2", "float16", "bfloat16")
STATE_DTYPES = ("float16", "bfloat16", "float32")

_PATTERN = {"M": "mamba", "*": "attention", "E": "other", "-": "other"}
_LAYER_NAMES = {
    "mamba": "mamba",
    "mamba2": "mamba",
    "attention": "attention",
    "full_attention": "attention",
    "moe": "other",
    "mlp": "other",
}
# The same fact under the names of different Mamba-2 families.
_MAMBA_FIELDS = {
    "mamba_heads": ("mamba_num_heads", "mamba_n_heads"),
    "mamba_head_dim": ("mamba_head_dim", "mamba_d_head"),
    "state_size": ("ssm_state_size", "mamba_d_state"),
    "groups": ("n_groups", "mamba_n_groups"),
    "conv_kernel": ("conv_kernel", "mamba_d_conv"),
}
#: Families (model_type) of which it is known that what is read below is all that decides the cache: every layer that is
#: not named otherwise is full attention with K and V of its own. Another one would be a guess, so it is refused.
_HYBRID_FAMILIES = frozenset({"granitemoehybrid", "nemotron_h"})
_PLAIN_FAMILIES = frozenset(
    {
        *("cohere", "gemma", "glm", "glm4", "glm4_moe", "granite", "granitemoe", "internlm2", "llama", "mistral"),
        *("mixtral", "nemotron", "olmo", "olmo2", "olmoe", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
        *("seed_oss", "smollm3", "stablelm"),
    }
)
# Caches that are not plain KV or Mamba-2 state, or layers that differ, whatever the family says it is: a guess would be
# wrong by a factor, so these are refused.
_UNSUPPORTED = {
    "kv_lora_rank": "multi-head latent attention",
    "linear_num_value_heads": "gated linear attention",
    "linear_attn_config": "linear attention in some layers",
    "sliding_window_pattern": "mixed sliding-window attention",
    "attention_chunk_size": "attention in chunks",
    "block_configs": "layers that differ from each other",
    "block_types": "recurrent layers of another kind",
    "attn_type_list": "attention of different kinds",
    "full_attn_idxs": "full attention in some layers only",
    "full_attention_interval": "full attention in some layers only",
    "num_kv_shared_layers": "layers that share a cache",
    "use_cla": "layers that share a cache",
    "cross_attention_layers": "cross-attention",
    "is_encoder_decoder": "an encoder beside the decoder",
    "multi_query": "one KV head for all query heads",
}


@dataclass(frozen=True)
class Dtypes:
    """Dtypes of the three caches: ``kv`` attention, ``conv`` and ``ssm`` Mamba state."""

    kv: str = "fp8"
    conv: str = "bfloat16"
    ssm: str = "bfloat16"

    def __post_init__(self) -> None:
        for name, value, allowed in (
            ("dtypes.kv", self.kv, KV_DTYPES),
            ("dtypes.conv", self.conv, STATE_DTYPES),
            ("dtypes.ssm", self.ssm, STATE_DTYPES),
        ):
            if value not in allowed:
                raise PlanInputError(name, value, "must be one of " + ", ".join(allowed), nearest(str(value), allowed))


@dataclass(frozen=True)
class ModelGeometry:
    """Cache-relevant shape of a model; layer counts and head counts, no dtype. ``mamba_layers`` 0 is a plain one."""

    name: str
    attention_layers: int
    kv_heads: int
    head_dim: int
    mamba_layers: int = 0
    mamba_heads: int = 0
    mamba_head_dim: int = 0
    state_size: int = 0
    groups: int = 0
    conv_kernel: int = 0
    max_position_tokens: int | None = None

    def __post_init__(self) -> None:
        for field in ("attention_layers", "kv_heads", "head_dim"):
            whole(f"{self.name}: {field}", getattr(self, field), 1, 2**20)
        low = 1 if self.mamba_layers else 0
        whole(f"{self.name}: mamba_layers", self.mamba_layers, 0, 2**20)
        for field in ("mamba_heads", "mamba_head_dim", "state_size", "groups"):
            whole(f"{self.name}: {field}", getattr(self, field), low, 2**20)
        whole(f"{self.name}: conv_kernel", self.conv_kernel, 2 * low, 2**10)

    @property
    def hybrid(self) -> bool:
        return self.mamba_layers > 0


def _config_int(config: Mapping[str, object], name: str, keys: Sequence[str], source: str) -> int:
    for key in keys:
        if config.get(key) is not None:
            return whole(f"{source}: {key}", config[key], 1, 2**30)
    raise PlanInputError(
        f"{source}: {' or '.join(keys)}",
        None,
        f"{name} is needed to size the cache",
        "use the complete config.json of the model",
    )


def _layer_kinds(config: Mapping[str, object], source: str) -> list[str] | None:
    pattern = config.get("hybrid_override_pattern")
    if pattern is not None:
        if not isinstance(pattern, str) or not pattern:
            raise PlanInputError(
                f"{source}: hybrid_override_pattern",
                pattern,
                "must be text such as 'MEM*E'",
                "use the model's own config.json",
            )
        unknown = sorted(set(pattern) - set(_PATTERN))
        if unknown:
            raise PlanInputError(
                f"{source}: hybrid_override_pattern",
                "".join(unknown),
                "layers are M (Mamba-2), * (attention), E (MoE) and - (MLP)",
                "this kind of layer is not known to the planner; its cache would be a guess",
            )
        return [_PATTERN[letter] for letter in pattern]
    for key in ("layers_block_type", "layer_types"):
        names = config.get(key)
        if names is None:
            continue
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise PlanInputError(
                f"{source}: {key}", names, "must be a list of layer names", "use the model's own config.json"
            )
        kinds = []
        for layer in names:
            if not isinstance(layer, str) or layer not in _LAYER_NAMES:
                raise PlanInputError(
                    f"{source}: {key}",
                    layer,
                    "layers are " + ", ".join(sorted(_LAYER_NAMES)),
                    "this kind of layer is not known to the planner; its cache would be a guess",
                )
            kinds.append(_LAYER_NAMES[layer])
        return kinds
    return None


def _family(config: Mapping[str, object], source: str) -> str:
    family = config.get("model_type")
    known = _PLAIN_FAMILIES | _HYBRID_FAMILIES
    if not isinstance(family, str) or family not in known:
        raise PlanInputError(
            f"{source}: model_type",
            family,
            "must be a family whose cache is known: " + ", ".join(sorted(known)),
            "if all layers of this model cache as those of one of them, describe it in a models/NAME.yml with that"
            " model_type and the numbers of its config.json",
        )
    return family


def geometry_from_config(config: object, name: str, source: str = "config.json") -> ModelGeometry:
    """Read a Hugging Face ``config.json`` (already parsed).

    Understood: Nemotron-H (``hybrid_override_pattern`` or ``layers_block_type``), Mamba-2 hybrids with the same facts
    under ``mamba_*`` names, and plain attention, of the families above. Anything else raises ``PlanInputError`` naming
    what is missing or not known.
    """
    if not isinstance(config, Mapping):
        raise PlanInputError(
            source, config, "must be a JSON object", "point at the directory of a model with a config.json"
        )
    inner = config.get("text_config")
    if isinstance(inner, Mapping):
        config = {**config, **inner}
    for key, what in _UNSUPPORTED.items():
        if config.get(key):
            raise PlanInputError(
                f"{source}: {key}",
                config[key],
                f"{what} is not supported",
                "use a plain-attention or Mamba-2 hybrid model",
            )
    family = _family(config, source)
    if config.get("sliding_window") is not None and config.get("use_sliding_window", True):
        raise PlanInputError(
            f"{source}: sliding_window",
            config["sliding_window"],
            "window layers drop blocks, so sizes differ",
            "use a model with full attention",
        )
    kinds = _layer_kinds(config, source)
    mamba_fields = [
        key for keys in _MAMBA_FIELDS.values() for key in keys if key.startswith(("mamba_", "ssm_")) and key in config
    ]
    if kinds is None:
        if mamba_fields or family in _HYBRID_FAMILIES:
            says = mamba_fields[0] if mamba_fields else f"model_type {family}"
            raise PlanInputError(
                f"{source}: hybrid_override_pattern or layers_block_type",
                None,
                f"{says} says the model has Mamba layers, but not which ones",
                "use the complete config.json of the model",
            )
        kinds = ["attention"] * _config_int(config, "the number of layers", ("num_hidden_layers", "n_layer"), source)
    if "num_hidden_layers" in config:
        layers = whole(f"{source}: num_hidden_layers", config["num_hidden_layers"], 1, 2**20)
        if layers != len(kinds):
            raise PlanInputError(
                f"{source}: num_hidden_layers",
                layers,
                f"the layer pattern has {len(kinds)} layers",
                "the file is inconsistent",
            )
    n_attn, n_mamba = kinds.count("attention"), kinds.count("mamba")
    if n_attn == 0:
        raise PlanInputError(
            f"{source}: layers",
            "no attention layer",
            "at least one is needed",
            "a model without attention has no KV cache to plan",
        )
    if config.get("num_key_value_heads") is None:
        raise PlanInputError(
            f"{source}: num_key_value_heads",
            None,
            "the number of KV heads is needed, the same in every layer",
            "use the complete config.json of the model; if every query head has K and V of its own, say so with that"
            " number in a models/NAME.yml",
        )
    heads = whole(f"{source}: num_key_value_heads", config["num_key_value_heads"], 1, 2**30)
    if config.get("head_dim") is not None:
        head_dim = whole(f"{source}: head_dim", config["head_dim"], 1, 2**16)
    else:
        hidden = _config_int(config, "the head size", ("hidden_size", "head_dim"), source)
        queries = _config_int(config, "the head size", ("num_attention_heads",), source)
        if hidden % queries:
            raise PlanInputError(
                f"{source}: hidden_size",
                hidden,
                f"not divisible by num_attention_heads {queries}",
                "give head_dim in the config",
            )
        head_dim = hidden // queries
    mamba = {}
    if n_mamba:
        for field, keys in _MAMBA_FIELDS.items():
            mamba[field] = _config_int(config, f"Mamba-2 {field}", keys, source)
    positions = config.get("max_position_embeddings")
    return ModelGeometry(
        name=name,
        attention_layers=n_attn,
        kv_heads=heads,
        head_dim=head_dim,
        mamba_layers=n_mamba,
        max_position_tokens=(
            whole(f"{source}: max_position_embeddings", positions, 1) if positions is not None else None
        ),
        **mamba,
    )


def attention_bytes_per_token_layer(model: ModelGeometry, dtypes: Dtypes) -> int:
    """Bytes of K and V of one token in one attention layer: ``2 x kv_heads x head_dim x kv_bytes`` (formula 1)."""
    return 2 * model.kv_heads * model.head_dim * DTYPE_BYTES[dtypes.kv]


def mamba_state_bytes(model: ModelGeometry, dtypes: Dtypes) -> int:
    """Bytes of one Mamba layer's state before padding (formula 2); 0 without Mamba layers.

    ``(H x P + 2 x groups x N) x (conv_kernel - 1) x conv_bytes + H x P x N x ssm_bytes`` with H heads of size P and
    state size N. Source: vLLM ``MambaStateShapeCalculator.mamba2_state_shape``.
    """
    inner = model.mamba_heads * model.mamba_head_dim
    conv = (inner + 2 * model.groups * model.state_size) * (model.conv_kernel - 1) * DTYPE_BYTES[dtypes.conv]
    return conv + inner * model.state_size * DTYPE_BYTES[dtypes.ssm]


def block_tokens(model: ModelGeometry, dtypes: Dtypes, alignment_tokens: int = 16) -> int:
    """vLLM's unified KV block in tokens (formula 3).

    Hybrid: ``alignment x ceil(mamba_state / (alignment x attention_bytes))``, the smallest attention page that holds
    the state. Plain attention: the backend's block, i.e. the alignment. ``alignment_tokens`` is the larger of the
    backend's kernel alignment and the requested block size; 16 on CUDA. Source: ``_align_hybrid_block_size``.
    """
    alignment = whole("block_alignment_tokens", alignment_tokens, 1, 2**16)
    if not model.hybrid:
        return alignment
    per_token = attention_bytes_per_token_layer(model, dtypes)
    return alignment * ceil_div(mamba_state_bytes(model, dtypes), alignment * per_token)


def page_bytes(model: ModelGeometry, dtypes: Dtypes, block: int) -> int:
    """Bytes of one layer's block; Mamba state is padded to it (formula 4)."""
    return block * attention_bytes_per_token_layer(model, dtypes)


def mamba_padding_percent(model: ModelGeometry, dtypes: Dtypes, block: int) -> float:
    """Padding of the Mamba page as a share of the state, in percent, as vLLM logs it."""
    state = mamba_state_bytes(model, dtypes)
    return 100.0 * (page_bytes(model, dtypes, block) - state) / state if state else 0.0


def lmcache_bytes_per_token(model: ModelGeometry, dtypes: Dtypes) -> int:
    """Serialised bytes per token, fused (formula 5): every layer stores one page per block."""
    return (model.attention_layers + model.mamba_layers) * attention_bytes_per_token_layer(model, dtypes)


def chunk_bytes(model: ModelGeometry, dtypes: Dtypes, chunk_tokens: int) -> int:
    """Serialised bytes of one full chunk (formula 6); ``chunk_tokens`` must be a multiple of the block."""
    return chunk_tokens * lmcache_bytes_per_token(model, dtypes)


def full_chunks(prompt_tokens: int, chunk_tokens: int) -> int:
    """Chunks that are stored and can be restored: ``floor(L / chunk)`` (formula 13)."""
    return prompt_tokens // chunk_tokens


def serialised_bytes(model: ModelGeometry, dtypes: Dtypes, prompt_tokens: int, chunk_tokens: int) -> int:
    """Bytes of a prompt when the last chunk is padded: ``ceil(L / chunk) x chunk bytes``."""
    return ceil_div(prompt_tokens, chunk_tokens) * chunk_bytes(model, dtypes, chunk_tokens)


def separate_object_bytes(model: ModelGeometry, dtypes: Dtypes, chunk_tokens: int) -> tuple[int, int]:
    """Bytes of the (attention, Mamba) object of one chunk with separate object groups."""
    per_token = attention_bytes_per_token_layer(model, dtypes)
    return model.attention_layers * per_token * chunk_tokens, model.mamba_layers * per_token * chunk_tokens


def restore_bytes(
    model: ModelGeometry, dtypes: Dtypes, chunks: int, chunk_tokens: int, separate: bool, align_bytes: int
) -> int:
    """L1 bytes that restoring ``chunks`` chunks takes at once.

    Fused: every chunk with its Mamba state. Separate object groups: every attention object and the **last** Mamba
    object only. Each object is padded to ``align_bytes``, L1's page.
    """

    def padded(size: int) -> int:
        return ceil_div(size, align_bytes) * align_bytes

    if chunks <= 0:
        return 0
    if not separate:
        return chunks * padded(chunk_bytes(model, dtypes, chunk_tokens))
    attention, mamba = separate_object_bytes(model, dtypes, chunk_tokens)
    return chunks * padded(attention) + padded(mamba)


def valid_chunk(chunk_tokens: int, block: int) -> bool:
    """LMCache's chunk must be a whole number of vLLM blocks."""
    return chunk_tokens % block == 0
