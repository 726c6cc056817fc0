"""The real vLLM 0.23.0 without a GPU: its parser takes every argument, its own code gives our block, groups and tokens.

Not covered, because it needs a GPU: profiling (with explicit KV bytes vLLM skips it) and the FlashAttention class's own
list of kernel block sizes (16, or 32 rounded up by it, with a 4-byte state; the block is the same).
"""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import device, files, geometry
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.geometry import Dtypes
from conftest import Ask, filled
from kv_plan.kv_helpers import plan

PROFILES = [name for name in files.names_in(files.PROFILES) if files.load_profile(name).engine == "vllm"]
#: Of a Nemotron-H config beyond what the planner reads; any values that vLLM takes.
COMPLETE: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "vocab_size": 131072,
    "intermediate_size": 1856,
    "chunk_size": 128,
    "expand": 2,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
    "mlp_hidden_act": "relu2",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "layer_norm_epsilon": 1e-5,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "mamba_ssm_cache_dtype": "float32",
}
KINDS = {"M": "mamba", "*": "attention", "E": "other"}


def test_every_argument_is_accepted(vllm: Ask) -> None:
    plans = [plan(name, model=model) for name in PROFILES for model in ("nano", "super", "tiny")]
    for settings in (
        {"serving.attention_backend": "FLASHINFER", "dtypes.conv": "float32"},
        {"dtypes.ssm": "float16", "dtypes.kv": "fp8_e4m3"},
        {"serving.hybrid_kv_cache_manager": False},
        {"serving.prefix_caching": False, "dtypes.kv": "bfloat16"},
    ):
        plans.append(plan("super-recommended", settings=settings))
    answer = vllm("vllm_child.py", {"do": "parse", "vllm": [filled(item["vllm_args"]) for item in plans]})["vllm"]
    assert [found for found in answer if "error" in found] == []
    for item, found in zip(plans, answer, strict=True):
        assert found["kv_cache_memory_bytes"] == item["sizes"]["device_bytes"]
        assert found["max_num_batched_tokens"] == item["sizes"]["max_num_batched_tokens"]
        assert found["utilization"] == item["sizes"]["gpu_memory_utilization_percent"] / 100
        assert found["connector"] == item["kv_transfer_config"].get("kv_connector")
        assert found["events"]
    count = sum(found["arguments"] for found in answer)
    print(f"\nvLLM 0.23.0 accepted {count} arguments in {len(plans)} engines")
    assert count > 500


MISSPELT = (
    ("--kv-cache-memory-bytes", "--kv-cache-memory-byte"),
    ("--mamba-ssm-cache-dtype", "--mamba-ssm-dtype"),
    ("align", "aligned"),
    ('"kv_role"', '"kv_rol"'),
    ("bfloat16", "bf16"),
)


def test_a_misspelt_argument_is_refused(vllm: Ask) -> None:
    words = filled(plan("super-recommended")["vllm_args"])
    changed = [[word.replace(*change) for word in words] for change in MISSPELT]
    answer = vllm("vllm_child.py", {"do": "parse", "vllm": changed})["vllm"]
    assert [change for change, found in zip(MISSPELT, answer, strict=True) if "error" not in found] == []


CASES = [
    ("nano", "fp8", "bfloat16", 10_000_000_000),
    ("nano", "fp8", "bfloat16", 56_000_000_000),
    ("nano", "fp8", "float32", 10_000_000_000),
    ("nano", "bfloat16", "float16", 10_000_000_000),
    ("super", "fp8", "bfloat16", 12_000_000_000),
    ("super", "fp8", "bfloat16", 20_000_000_000),
    ("super", "fp8", "float32", 12_000_000_000),
    ("super", "bfloat16", "float32", 12_000_000_000),
]


@pytest.fixture(scope="module")
def engine(vllm: Ask) -> list[dict[str, int]]:
    """What vLLM itself computes for each case."""
    cases = []
    for name, kv, ssm, kv_bytes in CASES:
        facts = files.read_yaml(files.MODELS / f"{name}.yml")["config"]
        words = ["--kv-cache-dtype", kv, "--mamba-ssm-cache-dtype", ssm, "--mamba-cache-mode", "align"]
        words += ["--enable-prefix-caching", "--enable-chunked-prefill", "--max-model-len", "131072"]
        # Any value that covers a block; the layout does not depend on it.
        words += ["--max-num-seqs", "32", "--max-num-batched-tokens", "16384", "--kv-cache-memory-bytes", str(kv_bytes)]
        kinds = [KINDS[letter] for letter in facts["hybrid_override_pattern"]]
        cases.append({"config": facts | COMPLETE, "args": words, "kinds": kinds, "kv_bytes": kv_bytes})
    answer: list[dict[str, int]] = vllm("vllm_child.py", {"do": "sizes", "cases": cases})["cases"]
    return answer


@pytest.mark.parametrize("index", range(len(CASES)), ids=["-".join(str(part) for part in case) for case in CASES])
def test_sizes_are_vllms_own(engine: list[dict[str, int]], index: int) -> None:
    name, kv, ssm, kv_bytes = CASES[index]
    shape, dtypes = files.load_model(name).geometry, Dtypes(kv, "bfloat16", ssm)
    block = geometry.block_tokens(shape, dtypes)
    blocks = device.device_blocks(shape, dtypes, block, kv_bytes)
    request = device.blocks_per_request(shape, block, 131072)
    assert engine[index] == {
        "block_tokens": block,
        "page_bytes": geometry.page_bytes(shape, dtypes, block),
        "groups": device.device_groups(shape).total,
        "blocks": blocks,
        "tokens": device.device_tokens(blocks, request, 131072),
    }
