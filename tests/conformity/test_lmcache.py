"""The real LMCache 0.5.6: its parsers take every argument that we render, its storage manager stages as we predict."""

from __future__ import annotations

from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files, l1
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.rules import ADAPTER_KEYS, ADAPTER_SECRETS
from conftest import Ask, filled
from kv_plan.kv_helpers import plan

PROFILES = files.names_in(files.PROFILES)
MODELS = ("nano", "super", "tiny")


# Stores on the network, and what says where they are.
NETWORK: dict[str, dict[str, Any]] = {
    "resp": {"host": "192.0.2.9", "port": 6379},
    "valkey": {"startup_nodes": "192.0.2.9:6379", "ttl_seconds": 3600},
    "s3": {"s3_endpoint": "s3://kv.192.0.2.9:9000", "s3_region": "local"},
}


def store(adapter: str) -> dict[str, Any]:
    return {"lmcache.l2.adapter": adapter, "lmcache.l2.adapter_extra": NETWORK[adapter]}


def rendered() -> list[tuple[str, dict[str, Any]]]:
    """Every plan with an LMCache server: each profile on each model, and ours with separate object groups."""
    plans = [(f"{name} on {model}", plan(name, model=model)) for name in PROFILES for model in MODELS]
    plans.append(("separate", plan("super-recommended", settings={"lmcache.object_groups": "separate"})))
    offload = {"lmcache.l2.mooncake_ssd_offload": True, "lmcache.l2.capacity_gib": 400}
    plans.append(("mooncake offload", plan("super-mooncake-dram", settings=offload)))
    plans += [(name, plan("super-recommended", settings=store(name))) for name in NETWORK]
    return [(title, item) for title, item in plans if item["lmcache_server_args"]]


def test_every_argument_is_accepted(runtime: Ask, record_property: Any) -> None:
    plans = rendered()
    coordinators = [item for _title, item in plans if item["lmcache_coordinator_args"]]
    answer = runtime(
        "lmcache_child.py",
        {
            "do": "parse",
            "server": [filled(item["lmcache_server_args"]) for _title, item in plans],
            "coordinator": [filled(item["lmcache_coordinator_args"]) for item in coordinators],
        },
    )
    errors = {
        title: found["error"] for (title, _item), found in zip(plans, answer["server"], strict=True) if "error" in found
    }
    assert errors == {}
    assert [found for found in answer["coordinator"] if "error" in found] == []
    for (title, item), found in zip(plans, answer["server"], strict=True):
        # LMCache understood what we meant: GiB for the L1, tokens for the chunk.
        assert found["l1_bytes"] == item["sizes"]["l1_bytes"], title
        assert found["chunk_tokens"] == item["sizes"]["chunk_size_tokens"], title
        assert found["p2p"] == item["inputs"]["profile"]["lmcache"]["p2p"]["enabled"], title
    count = sum(found["arguments"] for found in answer["server"] + answer["coordinator"])
    record_property("arguments", count)
    print(f"\nLMCache 0.5.6 accepted {count} arguments in {len(plans)} servers and {len(coordinators)} coordinators")
    assert coordinators and count > 500


def test_adapter_keys_are_those_that_the_adapter_reads(runtime: Ask) -> None:
    settings: dict[str, dict[str, Any]] = {"fs_native": {}, **{name: store(name) for name in NETWORK}}
    words = [filled(plan("super-recommended", settings=each)["lmcache_server_args"]) for each in settings.values()]
    answer = runtime("lmcache_child.py", {"do": "parse", "server": words, "coordinator": []})
    for adapter, found in zip(settings, answer["server"], strict=True):
        # affinity_tag is split off before the adapter sees the rest.
        read = set(found["adapter_keys"]) | {"affinity_tag"}
        assert read - set(ADAPTER_SECRETS) == ADAPTER_KEYS[adapter], adapter


MISSPELT = (
    ("--l1-size-gb", "--l1-size-gib"),
    ("--l2-prefetch-max-in-flight", "--l2-prefetch-max-inflight"),
    ("skip_l1", "skip-l1"),
    ("LRU", "lru"),
    ('"fs_native"', '"fs_nativ"'),
    ('"num_workers":32', '"num_workers":"32"'),
)


def test_a_misspelt_argument_is_refused(runtime: Ask) -> None:
    words = filled(plan("super-recommended")["lmcache_server_args"])
    changed = [[word.replace(*change) for word in words] for change in MISSPELT]
    answer = runtime("lmcache_child.py", {"do": "parse", "server": changed, "coordinator": []})
    assert [change for change, found in zip(MISSPELT, answer["server"], strict=True) if "error" not in found] == []


STAGING: list[tuple[str, dict[str, Any], list[list[int]]]] = [
    (
        "a second restore before the first is read gets nothing, after it everything",
        {
            "slots": 40,
            "prompts": {"A": 31, "B": 31},
            "steps": [{"together": ["A"]}, {"together": ["B"]}, {"read": "A"}, {"together": ["B"]}],
        },
        [[31], [0], [31]],
    ),
    (
        "a prefix larger than L1 gets nothing",
        {"slots": 40, "prompts": {"A": 45}, "steps": [{"together": ["A"]}]},
        [[0]],
    ),
    (
        "two at once with a limit of one in flight: one is served",
        {"slots": 20, "in_flight": 1, "prompts": {"A": 15, "B": 15}, "steps": [{"together": ["A", "B"]}]},
        [[15, 0]],
    ),
    (
        "four at once with a limit of eight: one is served",
        {"slots": 20, "in_flight": 8, "prompts": dict.fromkeys("ABCD", 15), "steps": [{"together": list("ABCD")}]},
        [[15, 0, 0, 0]],
    ),
    (
        "noop stages as LRU does",
        {
            "slots": 20,
            "policy": "noop",
            "prompts": {"A": 10, "B": 10, "C": 1},
            "steps": [{"together": ["A", "B"]}, {"together": ["C"]}],
        },
        [[10, 10], [0]],
    ),
    (
        "a retaining L1 below its watermark refuses",
        {
            "slots": 40,
            "store": "default",
            "watermark": 0.8,
            "resident": 30,
            "prompts": {"A": 12},
            "steps": [{"together": ["A"]}],
        },
        [[0]],
    ),
    (
        "a retaining L1 above its watermark makes room",
        {
            "slots": 40,
            "store": "default",
            "watermark": 0.5,
            "resident": 30,
            "prompts": {"A": 12},
            "steps": [{"together": ["A"]}],
        },
        [[12]],
    ),
]


def predicted(scenario: dict[str, Any]) -> list[list[int]]:
    """What the planner says about a scenario."""
    slots, prompts = scenario["slots"], scenario["prompts"]
    resident = 0
    if scenario.get("resident"):
        millis = round(scenario["watermark"] * 1000)
        resident = l1.evict_until_idle(scenario["resident"], slots * 1000, millis, 200)
    waiting: dict[str, int] = {}
    outcome = []
    for step in scenario["steps"]:
        if "read" in step:
            waiting.pop(step["read"], None)
            continue
        found = l1.predict_restores(
            slots, resident + sum(waiting.values()), [prompts[name] for name in step["together"]]
        )
        waiting |= {name: item.hit_chunks for name, item in zip(step["together"], found, strict=True)}
        outcome.append([item.hit_chunks for item in found])
    return outcome


@pytest.fixture(scope="module")
def staged(runtime: Ask) -> dict[str, list[list[int]]]:
    """What the real storage manager served in each scenario."""
    request = {"do": "staging", "scenarios": [scenario for _title, scenario, _measured in STAGING]}
    answer = runtime("lmcache_child.py", request)["scenarios"]
    return {title: found["hits"] for (title, _s, _m), found in zip(STAGING, answer, strict=True)}


@pytest.mark.parametrize(("title", "scenario", "expected"), STAGING, ids=[title for title, _s, _e in STAGING])
def test_staging_is_as_predicted(
    staged: dict[str, list[list[int]]], title: str, scenario: dict[str, Any], expected: list[list[int]]
) -> None:
    assert predicted(scenario) == expected
    # Of requests that arrive together, which one is served first is LMCache's choice.
    assert [sorted(step, reverse=True) for step in staged[title]] == expected
