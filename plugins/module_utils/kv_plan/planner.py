# Apache-2.0 (see LICENSE)
"""``profile + model + nodes -> plan``: the one function that decides sizes, flags and whether it may run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import Any

from . import memory, render
from .profile import Model, Node, Observed, Profile
from .rules import MEMORY_RULES, evaluate, known_rule, l2_identity, l2_path
from .solve import Context, resolve


def make_plan(
    profile: Profile,
    model: Model,
    nodes: Sequence[Node],
    *,
    accept: Iterable[str] = (),
    accept_memory: bool = False,
    observed: Observed | None = None,
) -> dict[str, Any]:
    """Plan an arrangement for all ``nodes`` alike.

    ``accept`` lists rule ids whose refusal is taken knowingly (to reproduce a negative result); they are recorded under
    ``accepted``. A memory rule needs ``accept_memory`` as well. The plan may run if ``ok``. Raises ``PlanInputError``.
    """
    accepted_ids = {known_rule(rule_id).id for rule_id in accept}
    return plan_context(resolve(profile, model, nodes, observed), accepted_ids, accept_memory)


def plan_context(ctx: Context, accepted_ids: set[str], accept_memory: bool) -> dict[str, Any]:
    """The plan of a resolved context."""
    errors, warnings, accepted = [], [], []
    for finding in evaluate(ctx):
        entry = finding.as_dict()
        if finding.severity == "warning":
            warnings.append(entry)
        elif finding.rule in accepted_ids and (accept_memory or finding.rule not in MEMORY_RULES):
            accepted.append(entry)
        elif finding.rule in accepted_ids:
            entry["remedy"] += (
                "; a memory rule is accepted only with goodput_plan_accept_memory: true as well (goodput plan:"
                " --accept-memory)"
            )
            errors.append(entry)
        else:
            errors.append(entry)
    plan: dict[str, Any] = {
        "ok": not errors,
        "name": ctx.profile.name,
        "model": ctx.model.geometry.name,
        "model_name": ctx.model.folder,
        "inputs": {
            "profile": asdict(ctx.profile),
            "geometry": asdict(ctx.model.geometry),
            "weights_bytes": ctx.need.weights_bytes,
            "nodes": [asdict(node) for node in ctx.nodes],
            "accept": sorted(accepted_ids),
            "accept_memory": accept_memory,
        },
        "sizes": ctx.sizes.as_dict(),
        **render.render(ctx),
        "l2_path": l2_path(ctx),
        "l2_identity": l2_identity(ctx) if ctx.profile.lmcache.enabled else "",
        "budget": {node.name: _budget(ctx, node) for node in ctx.nodes},
        "errors": errors,
        "warnings": warnings,
        "accepted": accepted,
    }
    return plan


def _budget(ctx: Context, node: Node) -> dict[str, Any]:
    lines = memory.budget(ctx.profile, node, ctx.need, ctx.sizes.device_bytes, ctx.sizes.l1_bytes)
    return {
        "total_bytes": node.total_bytes,
        "swap_bytes": node.swap_bytes,
        "free_bytes": lines[-1].bytes,
        "lines": [asdict(line) for line in lines],
    }
