"""Bad input: one error that names value, rule and remedy; never another exception."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import Node, PlanInputError, files, make_plan
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.geometry import geometry_from_config
from kv_plan.kv_helpers import plan

SMALL: dict[str, Any] = {
    "model_type": "nemotron_h",
    "num_hidden_layers": 5,
    "hybrid_override_pattern": "MEM*E",
    "num_key_value_heads": 2,
    "head_dim": 64,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 1,
    "conv_kernel": 4,
}
PLAIN: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lmcache.l1.size_gib", "8GB"),
        ("lmcache.l1.size_gib", -1),
        ("lmcache.l1.size_gib", float("nan")),
        ("lmcache.l1.size_gib", float("inf")),
        ("lmcache.l1.size_gib", 10**9),
        ("lmcache.l1.size_gib", True),
        ("lmcache.l1.size_gib", None),
        ("lmcache.l1.align_bytes", 5000),
        ("lmcache.l1.eviction_watermark", 80),
        ("lmcache.chunk_tokens", 0),
        ("serving.kv_cache_bytes", 0),
        ("serving.kv_cache_bytes", 12e9),
        ("serving.kv_cache_bytes", "12GB"),
        ("serving.kv_cache_bytes", 2**70),
        ("serving.max_num_seqs", -4),
        ("serving.mamba_cache_mode", "alien"),
        ("dtypes.kv", "fp4"),
        ("dtypes.ssm", "fp8"),
        ("versions.vllm", "latest"),
        ("versions.vllm", 0.23),
        ("ports.lmcache_http", 70000),
        ("ports.others", {"x": "y"}),
        ("ports.others", {"x": 0}),
        ("extra_args.vllm", "--seed 1"),
        ("load.longest_prompt_tokens", 200_000),
        ("load.typical_prompt_tokens", 131_073),
        ("lmcache", 5),
        ("lmcache.l1", None),
        ("", 1),
        ("a..b", 1),
    ],
)
def test_values(key: str, value: object) -> None:
    with pytest.raises(PlanInputError) as caught:
        plan("super-recommended", settings={key: value})
    error = caught.value
    assert error.rule and error.remedy
    assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("key", "close"),
    [
        ("lmcache.l1.size_gb", "size_gib"),
        ("lmcashe.enabled", "lmcache"),
        ("serving.max_num_seq", "max_num_seqs"),
        ("dtypes.kvv", "kv"),
    ],
)
def test_unknown_key_names_the_nearest(key: str, close: str) -> None:
    with pytest.raises(PlanInputError, match=f"unknown key; did you mean '{close}'"):
        plan("super-recommended", settings={key: 1})


def test_unknown_profile_and_model_name_the_nearest() -> None:
    with pytest.raises(PlanInputError, match="did you mean 'super-recommended'"):
        plan("super-recomended")
    with pytest.raises(PlanInputError, match="did you mean 'super'"):
        plan("super-recommended", model="supr")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: 1\na: 2\n", "stands twice"),
        ("serving: {max_num_seqs: 1, max_num_seqs: 2}\n", "stands twice"),
        ("- a\n", "must be a YAML mapping"),
        ("a: [\n", "no YAML"),
        ("", "must be a YAML mapping"),
        ("inherits: [a]\n", "must be the name of one profile"),
        ("inherits: nowhere\n", "must be a profile"),
        ("serving: {max_num_seqs: 2026-01-01}\n", "not JSON serializable"),
        ("? [a, b]\n: 1\n", "keys are text"),
        ("extra_env: {A: 1}\n", "string"),
        ("model: !!python/object:os.system x\n", "no YAML"),
    ],
)
def test_profile_files(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "mine.yml"
    path.write_text(text)
    with pytest.raises(PlanInputError, match=reason):
        files.load_profile(str(path))


def test_inheritance_is_no_circle(tmp_path: Path) -> None:
    for name, parent in (("a", "b"), ("b", "c"), ("c", "a")):
        (tmp_path / f"{name}.yml").write_text(f"inherits: {parent}\n")
    with pytest.raises(PlanInputError, match="a -> b -> c -> a"):
        files.load_profile("a", directory=tmp_path)
    (tmp_path / "self.yml").write_text("inherits: self\n")
    with pytest.raises(PlanInputError, match="self -> self"):
        files.load_profile("self", directory=tmp_path)


def test_inheritance_merges_sections(tmp_path: Path) -> None:
    (tmp_path / "base.yml").write_text("model: nano\nserving: {max_num_seqs: 7, moe_backend: cutlass}\n")
    (tmp_path / "child.yml").write_text("inherits: base\nserving: {max_num_seqs: 9}\n")
    profile = files.load_profile("child", directory=tmp_path)
    assert (profile.name, profile.model) == ("child", "nano")
    assert (profile.serving.max_num_seqs, profile.serving.moe_backend) == (9, "cutlass")


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    path = tmp_path / "x.yml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanInputError, match="readable text file"):
        files.load_profile(str(path))


@pytest.mark.parametrize("missing", [key for key in SMALL if key != "num_hidden_layers"])
def test_config_without_a_field_names_it(missing: str) -> None:
    config = {key: value for key, value in SMALL.items() if key != missing}
    with pytest.raises(PlanInputError) as caught:
        geometry_from_config(config, "x")
    named = {"head_dim": "hidden_size"}.get(missing, missing)
    assert named in str(caught.value)


@pytest.mark.parametrize("wrong", [-1, 0, "8", 1.5, True, [], {}])
@pytest.mark.parametrize("key", [key for key in SMALL if key != "hybrid_override_pattern"])
def test_config_with_a_wrong_type(key: str, wrong: object) -> None:
    with pytest.raises(PlanInputError, match="found"):
        geometry_from_config(SMALL | {key: wrong}, "x")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hybrid_override_pattern": "MEMXE"}, "layers are M"),
        ({"hybrid_override_pattern": ""}, "must be text"),
        ({"hybrid_override_pattern": 5}, "must be text"),
        ({"hybrid_override_pattern": "MEMME"}, "at least one is needed"),
        ({"num_hidden_layers": 6}, "has 5 layers"),
        ({"kv_lora_rank": 512}, "multi-head latent attention"),
        ({"linear_num_value_heads": 32}, "gated linear attention"),
        ({"sliding_window": 4096}, "full attention"),
    ],
)
def test_config_that_is_not_understood(change: dict[str, Any], reason: str) -> None:
    with pytest.raises(PlanInputError, match=reason):
        geometry_from_config(SMALL | change, "x")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        # What public models of these kinds have in their config.json; each was once counted as plain attention.
        ({"model_type": "nemotron-nas", "block_configs": [{}], "num_key_value_heads": None}, "block_configs"),
        ({"model_type": "nemotron-nas", "num_key_value_heads": None}, "nemotron-nas"),
        ({"model_type": "falcon", "multi_query": True, "num_key_value_heads": None}, "multi_query"),
        ({"model_type": "falcon", "num_kv_heads": 8, "new_decoder_architecture": True}, "falcon"),
        ({"model_type": "minimax_text_01", "attn_type_list": [0, 0, 1]}, "attn_type_list"),
        ({"model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]}, "block_types"),
        ({"text_config": {"model_type": "llama4_text", "attention_chunk_size": 8192}}, "attention_chunk_size"),
        ({"model_type": "gemma3n_text", "num_kv_shared_layers": 15}, "num_kv_shared_layers"),
        ({"full_attn_idxs": [3, 7]}, "full_attn_idxs"),
        ({"use_cla": True, "cla_share_factor": 2}, "use_cla"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"model_type": "some_new_model"}, "some_new_model"),
        ({"model_type": None}, "model_type"),
        ({"num_key_value_heads": None}, "num_key_value_heads"),
        ({"layer_types": ["sliding_attention"] * 32}, "sliding_attention"),
    ],
)
def test_an_unknown_architecture_is_named_and_not_guessed(change: dict[str, Any], named: str) -> None:
    with pytest.raises(PlanInputError) as caught:
        geometry_from_config(PLAIN | change, "x")
    assert named in str(caught.value)


def test_a_hybrid_without_its_layers_is_no_plain_model() -> None:
    with pytest.raises(PlanInputError, match="hybrid_override_pattern or layers_block_type"):
        geometry_from_config(PLAIN | {"model_type": "nemotron_h"}, "x")


def test_without_kv_heads_the_query_heads_are_not_taken() -> None:
    absent = {key: value for key, value in PLAIN.items() if key != "num_key_value_heads"}
    with pytest.raises(PlanInputError, match="num_key_value_heads.*every query head"):
        geometry_from_config(absent, "x")


@pytest.mark.parametrize(
    "change",
    [
        {"multi_query": False, "num_kv_shared_layers": 0, "attention_chunk_size": None, "is_encoder_decoder": False},
        {"model_type": "qwen2", "sliding_window": 4096, "use_sliding_window": False},
        {"model_type": "qwen3", "layer_types": ["full_attention"] * 32},
        {"model_type": "llava", "text_config": {"model_type": "mistral"}},
    ],
)
def test_a_plain_model_of_a_known_family_is_read(change: dict[str, Any]) -> None:
    shape = geometry_from_config(PLAIN | change, "x")
    assert (shape.attention_layers, shape.kv_heads, shape.head_dim, shape.hybrid) == (32, 8, 128, False)


def test_a_mamba_hybrid_of_another_family_is_read() -> None:
    granite = {
        "model_type": "granitemoehybrid",
        "num_hidden_layers": 4,
        "layer_types": ["mamba", "mamba", "mamba", "attention"],
        "hidden_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "mamba_n_heads": 8,
        "mamba_d_head": 128,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
    }
    shape = geometry_from_config(granite, "x")
    assert (shape.attention_layers, shape.mamba_layers, shape.kv_heads, shape.mamba_heads) == (1, 3, 4, 8)


@pytest.mark.parametrize("config", [None, [], "text", 5])
def test_config_that_is_no_object(config: object) -> None:
    with pytest.raises(PlanInputError, match="must be a JSON object"):
        geometry_from_config(config, "x")


def test_layer_lists_and_other_names_say_the_same() -> None:
    pattern = geometry_from_config(SMALL, "x")
    listed = {key: value for key, value in SMALL.items() if key != "hybrid_override_pattern"}
    listed["layers_block_type"] = ["mamba", "moe", "mamba", "attention", "moe"]
    assert geometry_from_config(listed, "x") == pattern
    renamed = dict(listed)
    for old, new in (
        ("mamba_num_heads", "mamba_n_heads"),
        ("mamba_head_dim", "mamba_d_head"),
        ("ssm_state_size", "mamba_d_state"),
        ("n_groups", "mamba_n_groups"),
        ("conv_kernel", "mamba_d_conv"),
    ):
        renamed[new] = renamed.pop(old)
    assert geometry_from_config(renamed, "x") == pattern
    with pytest.raises(PlanInputError, match="layers are attention"):
        geometry_from_config(listed | {"layers_block_type": ["mamba", "hyena", "mamba", "attention", "moe"]}, "x")
    with pytest.raises(PlanInputError, match="has Mamba layers, but not which ones"):
        geometry_from_config({key: value for key, value in SMALL.items() if key != "hybrid_override_pattern"}, "x")


def test_plain_attention_is_the_degenerate_case() -> None:
    shape = geometry_from_config(PLAIN, "x")
    assert (shape.attention_layers, shape.mamba_layers, shape.kv_heads, shape.head_dim) == (32, 0, 8, 128)
    with pytest.raises(PlanInputError, match="not divisible"):
        geometry_from_config(PLAIN | {"hidden_size": 4097}, "x")
    nested = geometry_from_config({"text_config": PLAIN}, "x")
    assert nested == shape


@pytest.mark.parametrize(
    "text", ["", "{", '{"num_hidden_layers": 5', "[1,2]", "null", '{"a": NaN}', "[" * 100_000, "not json"]
)
def test_model_directory_with_a_broken_config(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(PlanInputError):
        files.load_model(str(tmp_path))


def test_model_directory(tmp_path: Path) -> None:
    with pytest.raises(PlanInputError, match="readable text file"):
        files.load_model(str(tmp_path))
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    with pytest.raises(PlanInputError, match="size of the weights is needed"):
        plan("nano-recommended", model=str(tmp_path))
    (tmp_path / "model-1.safetensors").write_bytes(b"x" * 1000)
    (tmp_path / "model-2.safetensors").write_bytes(b"x" * 24)
    assert files.load_model(str(tmp_path)).weights_bytes == 1024
    assert plan("nano-recommended", model=str(tmp_path))["model"] == tmp_path.name


@pytest.mark.parametrize(
    ("facts", "reason"),
    [
        ({}, "MemTotal of the node is needed"),
        ({"total_bytes": 0}, "MemTotal of the node is needed"),
        ({"total_bytes": "128GB"}, "whole number of bytes"),
        ({"total_bytes": -5}, "whole number of bytes"),
        ({"total_bytes": 2**37, "available_bytes": 2**38}, "available_bytes"),
        ({"total_bytes": 2**37, "memtotal": 5}, "unknown fact"),
        ({"total_bytes": 2**37, "server": "yes"}, "true or false"),
        ({"total_bytes": 2**37, "l2_filesystem": {"size": 1}}, "must have mount"),
        ({"total_bytes": 2**37, "l2_filesystem": {"mount": "x", "size_bytes": 1}}, "absolute path"),
        ("text", "mapping of memory facts"),
        (None, "mapping of memory facts"),
    ],
)
def test_node_facts(facts: Any, reason: str) -> None:
    with pytest.raises(PlanInputError, match=reason):
        files.node_from(facts)


def test_node_facts_as_the_probe_returns_them() -> None:
    memory = {
        "total_bytes": 2**37,
        "available_bytes": 2**36,
        "swap_total_bytes": 2**34,
        "swap_free_bytes": 0,
        "cma_total_bytes": 0,
        "cma_free_bytes": 0,
        "free_2mib_blocks": 5,
        "swappiness": 60,
    }
    node = files.node_from({"name": "spark1", "server": True, **memory})
    assert node == Node("spark1", 2**37, 2**36, 2**34, True)


@pytest.mark.parametrize("gib", [0, -1, float("nan"), float("inf"), 1e9])
def test_memory_in_gib(gib: float) -> None:
    with pytest.raises(PlanInputError, match="memory of node 1"):
        files.nodes_from_gib([gib])


def test_nodes_are_there_and_distinct() -> None:
    profile, model = files.load_profile("super-recommended"), files.load_model("super")
    with pytest.raises(PlanInputError, match="at least one node"):
        make_plan(profile, model, [])
    with pytest.raises(PlanInputError, match="each node appears once"):
        make_plan(profile, model, [Node("a", 2**37), Node("a", 2**37)])
