#!/usr/bin/env python3
"""Time of the planner in one process: all profiles on all models from cold files, then random plans without a crash.

make bench-plan        exit 1 if the matrix takes longer than its limit or a random plan ends in an exception
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import Model, Node, PlanInputError, files, make_plan
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import GIB
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.geometry import (
    KV_DTYPES,
    STATE_DTYPES,
    ModelGeometry,
)

LIMIT_SECONDS = 0.2
RANDOM_PLANS = 10_000
SEED = 20261129


def schema() -> float:
    """Seconds to import pydantic and build the schema, once a process."""
    started = time.perf_counter()
    files.profile_from({"name": "warm"})
    return time.perf_counter() - started


def matrix() -> tuple[int, float]:
    """Plans made and seconds; reading and checking the files is included."""
    nodes = files.nodes_from_gib((119.7, 121.7))
    started = time.perf_counter()
    models = [files.load_model(name) for name in files.names_in(files.MODELS)]
    count = 0
    for name in files.names_in(files.PROFILES):
        profile = files.load_profile(name)
        for model in models:
            make_plan(profile, model, nodes)
            count += 1
    return count, time.perf_counter() - started


def random_case(dice: random.Random) -> tuple[dict[str, Any], Model, list[Node]]:
    """A random profile (bad values included), model and nodes."""
    hybrid = dice.random() < 0.7
    geometry = ModelGeometry(
        "random",
        dice.randint(1, 96),
        dice.choice((1, 2, 8)),
        dice.choice((64, 128, 256)),
        *((dice.randint(1, 96), dice.choice((8, 64, 128)), 64, dice.choice((16, 128)), 8, 4) if hybrid else ()),
    )
    data: dict[str, Any] = {
        "name": "random",
        "dtypes": {"kv": dice.choice(KV_DTYPES), "ssm": dice.choice(STATE_DTYPES), "conv": dice.choice(STATE_DTYPES)},
        "serving": {
            "max_model_len_tokens": dice.choice((16, 4096, 32768, 131072, 131072, 2**20)),
            "max_num_seqs": dice.choice((1, 8, 32, 32, 4096)),
            "kv_cache_bytes": dice.choice(("auto", "auto", "auto", 10**9, 2**40, 10**9 * dice.randint(1, 60), 1, -1)),
            "max_num_batched_tokens": dice.choice(("auto", "auto", "auto", "auto", 1, 8192)),
            "mtp_tokens": dice.choice((0, 0, 0, 3)),
        },
        "lmcache": {
            "enabled": dice.random() < 0.8,
            "chunk_tokens": dice.choice(("auto", "auto", "auto", "auto", "auto", 1, 256, 4224)),
            "store_policy": dice.choice(("default", "skip_l1")),
            "prefetch_policy": dice.choice(("default", "default", "retain")),
            "object_groups": dice.choice(("fused", "separate")),
            "l1": {
                "size_gib": dice.choice(("auto", "auto", "auto", "auto", "auto", 0, 0.001, 4, 100, "8GB")),
                "eviction_watermark": dice.choice((0.05, 0.8, 1)),
            },
            "l2": {
                "adapter": dice.choice(("none", "fs_native", "fs_native", "fs_native", "mooncake_store")),
                "capacity_gib": dice.choice((0, 0.5, 400, 400, 400)),
            },
            "p2p": {"enabled": dice.random() < 0.3},
        },
        "load": {"concurrency_per_node": dice.choice((1, 5, 5, 16, 4096))},
    }
    totals = (2**20, *(gib * GIB for gib in (8, 100, 104, 108, 112, 116, 119, 120, 121, 122, 124, 128)))
    nodes = [Node(f"n{index}", dice.choice(totals), server=index == 0) for index in range(dice.randint(1, 3))]
    return data, Model(geometry, dice.randint(0, 60 * GIB)), nodes


def random_plans() -> tuple[dict[str, int], float]:
    dice = random.Random(SEED)
    outcome = {"fits": 0, "refused": 0, "bad input": 0}
    started = time.perf_counter()
    for _number in range(RANDOM_PLANS):
        data, model, nodes = random_case(dice)
        try:
            plan = make_plan(files.profile_from(data), model, nodes)
        except PlanInputError:
            outcome["bad input"] += 1
            continue
        for node in plan["budget"].values():
            assert sum(line["bytes"] for line in node["lines"]) == node["total_bytes"]
        outcome["fits" if plan["ok"] else "refused"] += 1
    return outcome, time.perf_counter() - started


def main() -> int:
    started = time.perf_counter()
    print(f"schema: {schema():.3f} s, once")
    count, seconds = matrix()
    print(f"{count} plans (all profiles x models, files read and checked): {seconds:.3f} s, limit {LIMIT_SECONDS} s")
    outcome, taken = random_plans()
    print(
        f"{RANDOM_PLANS} random plans: {taken:.1f} s, no crash; "
        + ", ".join(f"{n} {what}" for what, n in outcome.items())
    )
    print(f"all: {time.perf_counter() - started:.1f} s")
    return 0 if seconds <= LIMIT_SECONDS else 1


if __name__ == "__main__":
    sys.exit(main())
