"""What a site measured, and what the planner gets of it."""

from __future__ import annotations

from typing import Any

import pytest
from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.filter.site_plan import plan_nodes
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files, planner, site

GIB = 2**30


def measured(total_gib: int) -> dict[str, Any]:
    return {"node": {"memory_at_rest": {"total_bytes": total_gib * GIB, "swap_total_bytes": 0}}}


def test_every_measured_node_is_planned_for_and_the_first_is_the_server() -> None:
    hostvars = {"a": {"goodput_measured": measured(119)}, "b": {"goodput_measured": measured(121)}}
    assert plan_nodes(hostvars, ["a", "b"], "b") == [
        {"name": "a", "server": False, "total_bytes": 119 * GIB, "swap_total_bytes": 0},
        {"name": "b", "server": True, "total_bytes": 121 * GIB, "swap_total_bytes": 0},
    ]


def test_a_node_outside_the_play_counts_if_it_answered() -> None:
    others = {"results": [{"item": "b", **measured(112)}, {"item": "c", "state": "unreachable"}]}
    hostvars: dict[str, Any] = {"a": {"goodput_measured": measured(119), "goodput_measured_others": others}, "b": {}}
    assert [node["name"] for node in plan_nodes(hostvars, ["a", "b", "c"], "a")] == ["a", "b"]


def test_without_a_measurement_the_way_to_get_one_is_named() -> None:
    with pytest.raises(AnsibleFilterError, match=r"playbooks/plan\.yml"):
        plan_nodes({"a": {}}, ["a"], "a")


def test_the_summary_names_sizes_nodes_and_warnings() -> None:
    nodes = [files.node_from(item) for item in plan_nodes({"a": {"goodput_measured": measured(120)}}, ["a"], "a")]
    plan = planner.make_plan(files.load_profile("super-kv12-l18"), files.load_model("super"), nodes)
    first, *rest = site.summary(plan)
    assert "a 120.0 GiB" in first and "block 4224 tokens" in first and "L1 8.0 GiB" in first
    assert [line.split()[0] for line in rest] == [item["rule"] for item in plan["warnings"]] != []
