"""What the tests of the planner share."""

from __future__ import annotations

from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files, make_plan
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.geometry import Dtypes, ModelGeometry

NANO: ModelGeometry = files.load_model("nano").geometry
SUPER: ModelGeometry = files.load_model("super").geometry
MODELS = {"nano": NANO, "super": SUPER}
BF16 = Dtypes("fp8", "bfloat16", "bfloat16")
PAIR_GIB = (119.7, 121.7)


def plan(
    profile: str,
    model: str | None = None,
    memory_gib: tuple[float, ...] = PAIR_GIB,
    settings: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    loaded = files.load_profile(profile, settings)
    return make_plan(loaded, files.load_model(model or loaded.model), files.nodes_from_gib(memory_gib), **options)


def refused(result: dict[str, Any]) -> set[str]:
    return {item["rule"] for item in result["errors"]}


def warned(result: dict[str, Any]) -> set[str]:
    return {item["rule"] for item in result["warnings"]}


def message(result: dict[str, Any], rule: str) -> str:
    """All text of the findings of one rule."""
    found = [item for item in result["errors"] + result["warnings"] if item["rule"] == rule]
    return " ".join(f"{item['found']} {item['required']} {item['remedy']}" for item in found)
