# Apache-2.0 (see LICENSE)
"""A site's nodes as ``kube_objects`` takes them, from what playbooks/kube_nodes.yml registered in this run, and the
ports that a worker takes on them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..kv_plan import files
from ..kv_plan.checks import PlanInputError
from ..kv_plan.profile import Lmcache, Profile
from ..kv_plan.rules import listeners
from ..rail_plan import rail_plan
from .serving_objects import SYSTEM_PORT

RAILS = "goodput_rails"
OTHERS = "goodput_rails_others"
#: Those of the planner's listeners that are in the worker's pod. Frontend and coordinator have networks of their own.
ON_HOST = {
    "kv_events": "the engine's KV events",
    "lmcache_request": "LMCache requests",
    "lmcache_http": "LMCache HTTP",
    "p2p": "LMCache's peers",
    "others (Mooncake client HTTP)": "Mooncake's client",
}


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


def host_ports(profile: Any, chosen: Mapping[str, Any]) -> list[dict[str, Any]]:
    """TCP ports that a node's worker takes on the network of the host: ``port``, ``purpose``, and the ``variable`` that
    chooses it, empty if nothing does.

    ``profile`` and ``chosen`` are goodput_profile and goodput_profile_set. Of a refused profile the usual ones. Not
    among them: ``node_port``, on which kube-proxy opens no socket, and 19090, which the operator declares for NIXL's
    telemetry and leaves off (NIXL_TELEMETRY_ENABLE=n).
    """
    try:
        known = files.profile_from(files.stated(profile, chosen))
    except PlanInputError:
        known = Profile("", lmcache=Lmcache(enabled=True))
    found = [
        {
            "port": port,
            "purpose": ON_HOST[name],
            "variable": f"ports.{name} in goodput_profile_set" if " " not in name else "",
        }
        for name, port in listeners(known)
        if name in ON_HOST
    ]
    return [*found, {"port": SYSTEM_PORT, "purpose": "the worker's metrics", "variable": ""}]
