# Apache-2.0 (see LICENSE)
"""A site's nodes as ``kube_objects`` takes them, from what playbooks/kube_nodes.yml registered in this run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..kv_plan.checks import PlanInputError
from ..rail_plan import rail_plan

RAILS = "goodput_rails"
OTHERS = "goodput_rails_others"


def nodes_of_site(
    hostvars: Mapping[str, Any],
    nodes: Sequence[str],
    addresses: Mapping[str, str],
    subnets: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """One mapping a node: ``name``, ``rails``, ``management_address``.

    One node alone has no rails, whatever it is cabled to: nobody is at the other end.

    :param addresses: management address by name.
    :param subnets: of the rails, for a dry run on nodes that have no addresses yet: they are planned as the role rdma
        does. Empty: what a node has is what counts.
    :raises PlanInputError: a node whose rails nobody looked at, or did not find.
    """
    if len(nodes) == 1:
        return [{"name": nodes[0], "rails": [], "management_address": addresses.get(nodes[0], "")}]
    found = []
    for name in nodes:
        answer = _answer(hostvars, nodes, name)
        if not answer.get("rails"):
            found_words = str(answer.get("state") or "no answer")
            remedy = str(answer.get("remedy") or "run playbooks/rdma.yml; without --limit every node must answer")
            raise PlanInputError(f"{name}: rails", found_words, "the rails of every node are needed", remedy)
        rails = [dict(rail) for rail in answer["rails"]]
        if subnets:
            planned = rail_plan(list(nodes), list(subnets), name, {name: answer})
            for rail, plan in zip(rails, planned["rails"], strict=False):
                rail["addresses"] = rail.get("addresses") or [plan["cidr"]]
        found.append({"name": name, "rails": rails, "management_address": addresses.get(name, "")})
    return found


def _answer(hostvars: Mapping[str, Any], nodes: Sequence[str], name: str) -> Mapping[str, Any]:
    """What a node said, as a host of the play or to one of them because --limit leaves it out."""
    own = hostvars[name].get(RAILS) if name in hostvars else None
    if isinstance(own, Mapping) and own.get("rails") is not None:
        return own
    for node in nodes:
        others = hostvars[node].get(OTHERS) if node in hostvars else None
        for result in (others or {}).get("results", []):
            if result.get("item") == name:
                return dict(result)
    return {}
