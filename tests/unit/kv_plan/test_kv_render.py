"""Argument lists: what each choice renders, the same shape as vars/plans, and the filter in front of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.filter.kv_plan import kv_plan
from ansible_collections.goodput.spark.plugins.module_utils import serving
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from kv_plan.kv_helpers import plan

NODES: list[dict[str, Any]] = [
    {"name": "spark1", "server": True, "total_bytes": 128_526_896_332},
    {"name": "spark2", "total_bytes": 130_674_379_980},
]
PLACEHOLDERS = {
    "management_address": "192.0.2.1",
    "node": "spark1",
    "first_node_address": "192.0.2.1",
    "coordinator_address": "192.0.2.1",
    "model_path": "/srv/goodput/models/m",
    "model_name": "m",
    "l2_path": "/srv/goodput/l2/x",
    "rail_address": "198.51.100.1",
    "rail_devices": "rocep1s0f0:1,roceP2p1s0f0:1",
}


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def test_staging_arm_of_the_article() -> None:
    result = plan("super-kv12-l18")
    server = result["lmcache_server_args"]
    assert value(server, "--l1-size-gb") == "8"
    assert value(server, "--chunk-size") == "4224"
    assert value(server, "--eviction-policy") == "noop"
    assert value(server, "--l2-store-policy") == "skip_l1"
    assert value(server, "--l2-prefetch-max-in-flight") == "2"
    adapter = json.loads(value(server, "--l2-adapter"))
    assert adapter == {
        "type": "fs_native",
        "base_path": "{l2_path}",
        "num_workers": 32,
        "use_odirect": True,
        "max_capacity_gb": 400,
        "eviction": {"eviction_policy": "LRU", "trigger_watermark": 0.8, "eviction_ratio": 0.2},
    }
    assert result["l2_path"].startswith("/srv/goodput/l2/super_kv-fp8_ssm-bfloat16")
    vllm = result["vllm_args"]
    assert value(vllm, "--kv-cache-memory-bytes") == "12000000000"
    assert value(vllm, "--gpu-memory-utilization") == "0.72"
    assert value(vllm, "--mamba-ssm-cache-dtype") == "bfloat16"
    assert json.loads(value(vllm, "--kv-transfer-config")) == result["kv_transfer_config"]
    assert result["kv_transfer_config"]["kv_load_failure_policy"] == "recompute"
    assert json.loads(value(vllm, "--kv-events-config"))["enable_kv_cache_events"] is True
    assert result["lmcache_coordinator_args"] == []
    assert result["env"]["VLLM_OMNI_USE_QUACK_FP8"] == "0"


def test_router_arm_has_no_lmcache_at_all() -> None:
    result = plan("super-a-router")
    assert result["lmcache_server_args"] == []
    assert result["kv_transfer_config"] == {}
    assert "--kv-transfer-config" not in result["vllm_args"]
    assert not any("LMCACHE" in name for name in result["env"])
    assert result["l2_path"] == ""


def test_p2p_arm() -> None:
    result = plan("weka-c-p2p")
    server = result["lmcache_server_args"]
    assert value(server, "--p2p-advertise-url") == "{rail_address}:9450"
    assert value(server, "--coordinator-url") == "http://{coordinator_address}:9300"
    assert value(server, "--l1-align-bytes") == "65536" and "--no-l1-use-lazy" in server
    assert "--l2-adapter" not in server
    assert value(result["lmcache_coordinator_args"], "--chunk-size") == "2128"
    assert result["lmcache_env"]["UCX_MAX_RMA_RAILS"] == "2"


def test_mooncakes_engine_is_told_what_it_would_not_do_by_itself() -> None:
    # Over TCP also where an RDMA device is; over RDMA never from one rail to the other.
    peers, store = plan("virtual-p2p")["lmcache_env"], plan("super-mooncake-dram")["lmcache_env"]
    assert peers["MC_TE_PROTOCOL"] == "tcp" and peers["MC_FORCE_TCP"] == "1"
    assert store["MC_ENABLE_DEST_DEVICE_AFFINITY"] == "1" and "MC_FORCE_TCP" not in store
    assert not any(name.startswith("MC_") for name in plan("weka-c-p2p")["lmcache_env"])


def test_choices_render() -> None:
    settings: dict[str, Any] = {
        "lmcache.object_groups": "separate",
        "lmcache.eager_prefetch": True,
        "lmcache.transfer_mode": "engine_driven",
        "serving.hybrid_kv_cache_manager": False,
        "serving.mtp_tokens": 2,
        "serving.attention_backend": "FLASHINFER",
        "dtypes.conv": "float32",
        "router.mode": "round-robin",
        "extra_args.vllm": ["--seed", "7"],
        "extra_args.lmcache_server": ["--max-workers", "2"],
    }
    result = plan("super-recommended", settings=settings)
    server, vllm = result["lmcache_server_args"], result["vllm_args"]
    assert "--separate-object-groups" in server and value(server, "--supported-transfer-mode") == "engine_driven"
    assert server[-2:] == ["--max-workers", "2"] and vllm[-2:] == ["--seed", "7"]
    assert result["kv_transfer_config"]["kv_connector_extra_config"]["lmcache.mp.eager_prefetch"] is True
    assert "--disable-hybrid-kv-cache-manager" in vllm
    assert json.loads(value(vllm, "--speculative-config"))["num_speculative_tokens"] == 2
    assert value(vllm, "--attention-backend") == "FLASHINFER" and value(vllm, "--mamba-cache-dtype") == "float32"
    assert "--kv-events-config" not in vllm
    assert result["dynamo_worker_args"][: -len(vllm)] == [
        "--dyn-reasoning-parser",
        "nemotron_nano",
        "--dyn-tool-call-parser",
        "nemotron_nano",
    ]


@pytest.mark.parametrize("name", files.names_in(files.PROFILES))
def test_every_word_is_text_and_every_placeholder_is_known(name: str) -> None:
    result = plan(name)
    for key in ("lmcache_server_args", "lmcache_coordinator_args", "dynamo_worker_args", "dynamo_frontend_args"):
        assert all(isinstance(word, str) for word in result[key])
        filled = serving.arguments(result[key], PLACEHOLDERS)
        assert not any(serving.PLACEHOLDER.search(word) for word in filled)
    serving.environment(result["env"], PLACEHOLDERS)
    serving.environment(result["lmcache_env"], PLACEHOLDERS)
    json.dumps(result)


@pytest.mark.parametrize("name", files.names_in(files.PROFILES))
def test_every_profile_keeps_its_files_where_the_roles_allow_them(name: str) -> None:
    defaults = yaml.safe_load((files.ROOT / "roles/lmcache/defaults/main.yml").read_text())
    path = plan(name)["l2_path"]
    assert path == "" or path.startswith(defaults["lmcache_l2_mount"] + "/")


def test_sizes_and_words_of_the_virtual_plan_agree() -> None:
    result = plan("virtual", memory_gib=(1.5, 1.5))
    server, worker, sizes = result["lmcache_server_args"], result["dynamo_worker_args"], result["sizes"]
    adapter = json.loads(value(server, "--l2-adapter"))
    assert float(value(server, "--l1-size-gb")) == sizes["l1_gib"] == 0.25
    assert value(server, "--chunk-size") == str(sizes["chunk_size_tokens"]) == "256"
    assert adapter["max_capacity_gb"] == sizes["l2_capacity_gib"] == 2
    assert adapter["eviction"]["eviction_policy"] == "LRU"
    assert value(worker, "--block-size") == str(sizes["block_size_tokens"]) == "16"
    assert value(worker, "--num-gpu-blocks-override") == str(sizes["kv_blocks"]) == "4096"
    assert result["model_name"] == "tiny" and result["inputs"]["profile"]["engine"] == "mocker"


def test_filter_returns_a_plan() -> None:
    result = kv_plan("super-recommended", "super", NODES)
    assert result["ok"] and result["sizes"]["chunk_size_tokens"] == 4224
    inline = kv_plan({"inherits": "super-recommended", "load": {"concurrency_per_node": 2}}, nodes=NODES)
    assert inline["sizes"]["simultaneous_restores"] == 2 and inline["name"] == "inline"
    accepted = kv_plan("super-kv16-l14", "super", NODES, accept=["KV005", "KV006"])
    assert accepted["accepted"]
    assert not kv_plan("super-kv16-l14", "super", NODES, fail=False)["ok"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("super-kv16-l14", "super", NODES), r"refused\nKV005.*\nKV006"),
        (("nope", "super", NODES), "must be a profile"),
        ((5, "super", NODES), "must be a name, a path or a mapping"),
        (("super-recommended", "super", None), "at least one node"),
        (("super-recommended", "super", "text"), "must be a list"),
        (("super-recommended", "super", [{"name": "a"}]), "MemTotal"),
        (("super-recommended", "super", NODES, {}, "KV004"), "list of rule ids"),
    ],
)
def test_filter_refuses_in_one_message(arguments: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(AnsibleFilterError, match=reason):
        kv_plan(*arguments)


def test_filter_compares_with_the_running_engine() -> None:
    with pytest.raises(AnsibleFilterError, match="KV001"):
        kv_plan("super-recommended", "super", NODES, observed_block_tokens=8320)
    with pytest.raises(AnsibleFilterError, match="unknown key"):
        kv_plan("super-recommended", "super", NODES, neighbours=[{"name": "x", "l2_dir": "y"}])


@pytest.mark.parametrize("name", files.names_in(files.PROFILES))
def test_what_the_platform_adds_does_not_contradict_the_plan(name: str) -> None:
    """The roles add ports, hosts and planes of the node; a flag that both give must have the same value."""
    result = plan(name)
    planes = {"--discovery-backend": "etcd", "--request-plane": "tcp", "--event-plane": "zmq"}
    http = {"--http-host": "0.0.0.0", "--http-port": 8000}
    serving.arguments(result["dynamo_worker_args"], PLACEHOLDERS, ours=planes)
    serving.arguments(result["dynamo_frontend_args"], PLACEHOLDERS, ours=planes | http)
    if result["lmcache_server_args"]:
        serving.arguments(result["lmcache_server_args"], PLACEHOLDERS, ours={"--port": 5555, "--http-port": 9500})


def test_a_request_can_be_as_large_as_the_longest_prompt_and_not_as_the_node() -> None:
    small, large = plan("virtual", model="tiny"), plan("super-recommended")
    assert small["env"]["DYN_HTTP_BODY_LIMIT_MB"] == "2"
    longest = large["inputs"]["profile"]["serving"]["max_model_len_tokens"]
    assert 16 * longest <= (int(large["env"]["DYN_HTTP_BODY_LIMIT_MB"]) - 1) * 2**20 < 64 * 2**20
