# Apache-2.0 (see LICENSE)
"""From a site's measured nodes to the planner's, and from its plan to a few lines for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .checks import PlanInputError

MEASURED = "goodput_measured"
OTHERS = "goodput_measured_others"


def nodes_of_site(hostvars: Mapping[str, Any], nodes: Sequence[str], first: str) -> list[dict[str, Any]]:
    """What ``node_from`` takes, one mapping a node that was measured in this run.

    ``hostvars`` holds what playbooks/plan.yml registers: ``goodput_measured`` of a node in the play, and results of the
    nodes that ``--limit`` leaves out, of which one that did not answer is planned without.

    :raises PlanInputError: no node was measured.
    """
    found: dict[str, Any] = {}
    for name in nodes:
        for answer in _answers(hostvars, nodes, name):
            memory = answer.get("node", {}).get("memory_at_rest")
            if memory:
                found.setdefault(name, memory)
    if not found:
        raise PlanInputError(
            "nodes",
            ", ".join(nodes),
            "memory must be measured in the same run",
            "run site.yml, or playbooks/plan.yml before",
        )
    return [{"name": name, "server": name == first, **found[name]} for name in nodes if name in found]


def _answers(hostvars: Mapping[str, Any], nodes: Sequence[str], name: str) -> list[Mapping[str, Any]]:
    own = hostvars[name].get(MEASURED) if name in hostvars else None
    answers = [own] if isinstance(own, Mapping) else []
    for node in nodes:
        others = hostvars[node].get(OTHERS) if node in hostvars else None
        for result in (others or {}).get("results", []):
            if result.get("item") == name:
                answers.append(result)
    return answers


def summary(plan: Mapping[str, Any]) -> list[str]:
    """The plan as lines: sizes, nodes with what stays free, warnings."""
    sizes = plan["sizes"]
    nodes = ", ".join(
        f"{name} {budget['total_bytes'] / 2**30:.1f} GiB ({budget['free_bytes'] / 2**30:.1f} free)"
        for name, budget in plan["budget"].items()
    )
    return [
        f"profile {plan['name']}, model {plan['model']}: block {sizes['block_size_tokens']} tokens, device "
        f"{sizes['device_tokens']} tokens, L1 {sizes['l1_gib']} GiB, L2 {sizes['l2_capacity_gib']} GiB; {nodes}",
        *(f"{item['rule']} {item['title']}: found {item['found']}; {item['remedy']}" for item in plan["warnings"]),
    ]
