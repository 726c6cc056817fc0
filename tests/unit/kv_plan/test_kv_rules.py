"""Every rule fires on its example, with numbers; refusals can be accepted, memory only twice."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import (
    Neighbour,
    Node,
    Observed,
    PlanInputError,
    files,
    make_plan,
)
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import GIB
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.profile import L2Filesystem
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.rules import RULES
from kv_plan.kv_helpers import message, plan, refused, warned

from goodput import plan_view
from goodput.plan_cli import example_plan


def test_ids_are_the_stable_ones() -> None:
    assert list(RULES) == [f"KV{number:03d}" for number in range(1, len(RULES) + 1)]
    assert len(RULES) >= 23


@pytest.mark.parametrize("rule_id", RULES)
def test_example_fires_its_rule_with_numbers(rule_id: str) -> None:
    rule = RULES[rule_id]
    result = example_plan(rule)
    found = [item for item in result["errors"] + result["warnings"] if item["rule"] == rule_id]
    assert found, f"{rule_id} does not fire"
    assert (found[0] in result["errors"]) == (rule.severity == "error")
    for key in ("found", "required", "remedy", "source", "title"):
        assert found[0][key].strip()
    assert not re.search(r"\bnan\b|None|inf\b", " ".join(found[0].values()))


@pytest.mark.parametrize("name", ["nano-recommended", "super-recommended"])
@pytest.mark.parametrize("memory", [(119.7, 121.7), (112.3, 121.7), (121.7,), (119.7, 119.7, 119.7)])
def test_ours_fit_without_a_warning(name: str, memory: tuple[float, ...]) -> None:
    result = plan(name, memory_gib=memory)
    assert (result["errors"], result["warnings"]) == ([], [])


def test_virtual_fits_the_guests() -> None:
    result = plan("virtual", memory_gib=(1.5, 1.5))
    assert (result["errors"], result["warnings"]) == ([], [])
    assert result["sizes"]["block_size_tokens"] == 16
    assert result["sizes"]["chunk_size_tokens"] == 256


def test_an_uneven_pair_gets_one_plan_or_a_refusal_that_names_the_node() -> None:
    one = plan("super-recommended", memory_gib=(112.3, 121.7))
    assert one["ok"]
    assert min(node["free_bytes"] for node in one["budget"].values()) >= 0
    fixed = plan("super-kv12-l18", memory_gib=(112.3, 121.7))
    assert {item.get("node") for item in fixed["errors"] if item["rule"] == "KV012"} == {"node1"}
    assert "112.30 GiB" in message(fixed, "KV012")


def test_accepting_a_refusal_renders_and_records_it() -> None:
    result = plan("super-kv16-l14", accept=["KV005", "kv006"])
    assert result["ok"]
    assert {item["rule"] for item in result["accepted"]} == {"KV005", "KV006"}
    assert result["inputs"]["accept"] == ["KV005", "KV006"]
    assert "--l1-size-gb" in result["lmcache_server_args"]
    assert not plan("super-kv16-l14", accept=["KV006"])["ok"]


def test_a_memory_rule_is_accepted_only_with_a_second_variable() -> None:
    settings = {"serving.kv_cache_bytes": 30_000_000_000}
    accept = ["KV012", "KV013", "KV032"]
    once = plan("super-kv12-l18", settings=settings, accept=accept)
    assert refused(once) == {"KV012"}
    text = message(once, "KV012")
    assert "goodput_plan_accept_memory: true" in text and "--accept-memory" in text
    # Both are there to be set.
    assert "\ngoodput_plan_accept_memory: " in (files.ROOT / "group_vars/all/00-site.yml").read_text()
    assert plan("super-kv12-l18", settings=settings, accept=accept, accept_memory=True)["ok"]


def test_an_unknown_rule_id_is_bad_input() -> None:
    with pytest.raises(PlanInputError, match=r"KV999.*must be an id"):
        plan("super-kv16-l14", accept=["KV999"])


def nodes(**facts: object) -> list[Node]:
    return [Node(name="spark1", total_bytes=int(119.7 * GIB), server=True, **facts)]  # type: ignore[arg-type]


def judged(settings: Mapping[str, object], observed: Observed | None = None, **facts: object) -> dict[str, Any]:
    loaded = files.load_profile("super-recommended", settings)
    return make_plan(loaded, files.load_model("super"), nodes(**facts), observed=observed)


def test_measured_cuda_memory_replaces_the_assumed_fraction() -> None:
    reachable = int(90 * GIB)
    settings = {"serving.gpu_memory_utilization": 0.8}
    assert "KV013" not in refused(judged(settings))
    result = judged(settings, cuda_free_bytes=reachable)
    assert "at most 90.00 GiB (measured)" in message(result, "KV013")
    solved = judged({}, cuda_free_bytes=reachable)
    assert solved["ok"]
    assert solved["sizes"]["device_bytes"] < judged({})["sizes"]["device_bytes"]


def test_disk_of_a_node_is_checked() -> None:
    small = L2Filesystem("/srv/goodput/l2", 300 * GIB, 10 * GIB)
    result = judged({}, l2_filesystem=small)
    assert "capacity_gib to at most 276" in message(result, "KV011")
    assert judged({"lmcache.l2.capacity_gib": 276}, l2_filesystem=small)["ok"]
    root = judged({}, l2_filesystem=L2Filesystem("/", 3000 * GIB))
    assert "filesystem mounted at /" in message(root, "KV011")
    sibling = judged({}, l2_filesystem=L2Filesystem("/srv/goodput/l", 3000 * GIB))
    assert refused(sibling) == {"KV011"}


@pytest.mark.parametrize(
    "path", ["/", "/lmcache", "relative/l2", "/var/lib/kubelet/l2", "/var/lib/rancher", "/tmp/l2", "/dev/shm/l2"]
)
def test_l2_path_off_the_root_and_the_kubelet(path: str) -> None:
    assert refused(judged({"lmcache.l2.path": path})) == {"KV011"}


def test_engine_with_another_block_is_refused() -> None:
    result = judged({}, observed=Observed(block_tokens=8320))
    assert "8,320" in message(result, "KV001") and "4,224" in message(result, "KV001")
    assert judged({}, observed=Observed(block_tokens=4224))["ok"]


def test_neighbours_share_neither_directory_nor_server() -> None:
    mine = judged({})
    same = Neighbour("other", l2_directory=str(mine["l2_identity"]), l2_identity=str(mine["l2_identity"]))
    assert judged({}, observed=Observed(neighbours=(same,)))["ok"]
    server = Neighbour("nano", lmcache_request_port=5555, block_tokens=2128)
    assert refused(judged({}, observed=Observed(neighbours=(server,)))) == {"KV019"}


def test_l2_directory_names_all_that_changes_the_bytes() -> None:
    paths = {
        str(judged(settings)["l2_path"])
        for settings in (
            {},
            {"dtypes.ssm": "float16"},
            {"dtypes.kv": "fp8_e4m3"},
            {"versions.vllm": "0.29.0"},
            {"versions.lmcache": "0.5.7"},
            {"lmcache.object_groups": "separate"},
            {"lmcache.chunk_tokens": 8448},
            {"model_revision": "abc"},
            {"serving.attention_backend": "FLASHINFER"},
        )
    }
    assert len(paths) == 9


#: A master runs somewhere; nothing else of Mooncake listens, because peers shake hands directly.
MOONCAKE: dict[str, object] = {
    "lmcache.l2.adapter": "mooncake_store",
    "lmcache.l2.mooncake_segment_gib": 1,
    "lmcache.l2.mooncake_master": "192.0.2.9:50051",
}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"ports.lmcache_http": 9090}, "KV027"),
        ({"ports.coordinator": 9400, "lmcache.p2p.enabled": True}, "KV027"),
        ({"ports.others": {"prometheus": 9090}}, "KV027"),
        ({"versions.vllm": "0.22.1"}, "KV017"),
        ({"versions.lmcache": "0.5.1"}, "KV017"),
        ({"lmcache.connector": "LMCacheConnectorV1"}, "KV017"),
        ({"serving.hybrid_kv_cache_manager": False}, "KV017"),
        ({"serving.prefix_caching": False}, "KV017"),
        ({"lmcache.l1.lazy": True, "lmcache.p2p.enabled": True}, "KV014"),
        ({"lmcache.p2p.enabled": True, "lmcache.p2p.coordinator_url": None}, "KV015"),
        ({"lmcache.engine_host": "{management_address}"}, "KV016"),
        ({"lmcache.engine_host": "tcp://localhost"}, "KV016"),
        ({"extra_env": {"DYN_ROUTER_KV_OVERLAP_SCORE_WEIGHT": "1"}}, "KV024"),
        ({"extra_args.lmcache_server": ["--l1-size-gb=4"]}, "KV033"),
        ({"extra_args.lmcache_server": ["--l1-use-lazy"]}, "KV033"),
        ({"serving.max_num_batched_tokens": 8448}, "KV003"),
        ({"serving.max_num_batched_tokens": 4223}, "KV003"),
        ({"lmcache.l2.capacity_gib": 0}, "KV009"),
        ({"lmcache.l2.adapter": "none"}, "KV007"),
        (MOONCAKE | {"lmcache.l2.mooncake_master": ""}, "KV034"),
        (MOONCAKE | {"lmcache.l2.mooncake_ssd_offload": True, "lmcache.l2.capacity_gib": 0}, "KV009"),
        (MOONCAKE | {"lmcache.l2.mooncake_ssd_offload": True, "lmcache.l2.path": "/var/lib/kubelet/l2"}, "KV011"),
        (
            MOONCAKE | {"lmcache.l2.adapter_extra": {"enable_client_http_server": "true"}, "ports.others": {"x": 9300}},
            "KV027",
        ),
        ({"lmcache.l2.adapter": "valkey"}, "KV034"),
        ({"lmcache.l2.adapter": "s3", "lmcache.l2.adapter_extra": {"s3_endpoint": "s3://kv.host"}}, "KV034"),
        (
            {
                "lmcache.l2.adapter": "resp",
                "lmcache.l2.adapter_extra": {"host": "store", "port": 6379, "password": "in the open"},
            },
            "KV034",
        ),
    ],
)
def test_refusals(settings: dict[str, object], rule: str) -> None:
    assert rule in refused(judged(settings))


@pytest.mark.parametrize(
    "settings",
    [
        {"serving.max_num_batched_tokens": 8447},
        {"serving.max_num_batched_tokens": 4224},
        {"versions.vllm": "0.23.0"},
        {"versions.lmcache": "0.5.2"},
        {"lmcache.chunk_tokens": 8448},
        {"lmcache.engine_host": "tcp://localhost", "lmcache.request_host": "0.0.0.0"},
        {"extra_args.vllm": ["--seed", "1"]},
        MOONCAKE,
        MOONCAKE | {"ports.others": {"x": 9300}},
    ],
)
def test_not_refused(settings: dict[str, object]) -> None:
    result = judged(settings)
    assert result["ok"], result["errors"]


def test_ttl_must_exceed_the_delay() -> None:
    at = {"load.queueing_delay_seconds": 7200}
    assert "KV022" in warned(judged(at))
    assert "KV022" not in warned(judged({"load.queueing_delay_seconds": 7199}))


def test_documents_are_generated_from_the_table() -> None:
    text = plan_view.rules_markdown(RULES.values(), {rule.id: example_plan(rule) for rule in RULES.values()})
    assert (files.ROOT / "docs/rules.md").read_text() == text, "run: goodput plan rules --markdown > docs/rules.md"


def test_remedies_are_right_at_their_word() -> None:
    """The number in a remedy is one that works."""
    small = plan("super-recommended", settings={"lmcache.l1.size_gib": 3})
    assert "size_gib to at least 4," in message(small, "KV004")
    assert plan("super-recommended", settings={"lmcache.l1.size_gib": 4})["ok"]
    shorter = {"lmcache.l1.size_gib": 3, "load.longest_prompt_tokens": 97152}
    assert "longest_prompt_tokens to 97152" in message(small, "KV004")
    assert plan("super-recommended", settings=shorter)["ok"]
    nothing = plan("super-recommended", settings={"lmcache.l1.size_gib": 0.5})
    assert "longest_prompt_tokens" not in message(nothing, "KV004")
    large = {"serving.kv_cache_bytes": 40_000_000_000}
    assert "kv_cache_bytes by 21,000,000,000" in message(plan("super-kv12-l18", settings=large), "KV012")
    assert plan("super-kv12-l18", settings={"serving.kv_cache_bytes": 19_000_000_000})["ok"]
    flight = plan("super-kv12-l18", settings={"lmcache.prefetch_max_in_flight": 4})
    assert "size_gib to 13" in message(flight, "KV005")
    room = {"lmcache.prefetch_max_in_flight": 4, "lmcache.l1.size_gib": 13}
    assert "KV005" not in refused(plan("super-kv12-l18", settings=room))
    wide = {"serving.max_model_len_tokens": 8192, "load.typical_prompt_tokens": 4096}
    assert "2-byte" not in message(plan("super-recommended", settings=wide), "KV002")
    assert "2-byte" in message(plan("super-recommended", settings=wide | {"dtypes.ssm": "float32"}), "KV002")


def test_mooncakes_remedy_is_right_at_its_word() -> None:
    """The disk behind Mooncake gets the limit that the plan counts; unset, Mooncake takes 90 % of the disk."""
    dram = plan("super-mooncake-dram")
    assert "mooncake_ssd_offload: true" in message(dram, "KV021") and "--enable_offload=true" in message(dram, "KV021")
    assert not any(name.startswith("MOONCAKE_") for name in dram["lmcache_env"])
    offload = {"lmcache.l2.mooncake_ssd_offload": True, "lmcache.l2.capacity_gib": 100.5}
    result = plan("super-mooncake-dram", settings=offload)
    assert (result["errors"], result["warnings"]) == ([], [])
    limit = str(int(100.5 * GIB))
    assert {name: value for name, value in result["lmcache_env"].items() if name.startswith("MOONCAKE_")} == {
        "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH": "{l2_path}",
        "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": limit,
        "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": limit,
        "MOONCAKE_OFFLOAD_BUCKET_MAX_PHYSICAL_BYTES": limit,
        "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru",
    }
    assert result["l2_path"] and not dram["l2_path"]
    missing = plan("super-mooncake-dram", settings={"lmcache.l2.mooncake_master": ""})
    assert "mooncake_master" in message(missing, "KV034") and ":50051" in message(missing, "KV034")


def test_a_top_level_mount_of_its_own_is_fine() -> None:
    own = L2Filesystem("/lmcache", 3000 * GIB)
    assert judged({"lmcache.l2.path": "/lmcache"}, l2_filesystem=own)["ok"]
