# Apache-2.0 (see LICENSE)
"""What goes into a site's plan, and what a person sees of it. Each filter is documented beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import PlanInputError
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.site import (
    nodes_of_site,
    overrides_of_site,
    ports_of_site,
    summary,
)


def plan_nodes(hostvars: Mapping[str, Any], nodes: Sequence[str], first: str) -> list[dict[str, Any]]:
    """See plan_nodes.yml."""
    try:
        return nodes_of_site(hostvars, nodes, first)
    except PlanInputError as error:
        raise AnsibleFilterError(f"plan_nodes: {error}") from None


def plan_overrides(
    chosen: Mapping[str, Any], profile: Any, model: str, store: Sequence[Mapping[str, Any]], release: str
) -> dict[str, Any]:
    """See plan_overrides.yml."""
    try:
        return overrides_of_site(chosen, profile, model, store, release)
    except PlanInputError as error:
        raise AnsibleFilterError(f"plan_overrides: {error}") from None


class FilterModule:
    """Filters of playbooks/plan.yml and vars/site.yml."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "plan_nodes": plan_nodes,
            "plan_overrides": plan_overrides,
            "plan_ports": ports_of_site,
            "plan_summary": summary,
        }
