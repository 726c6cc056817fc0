# Apache-2.0 (see LICENSE)
"""Ansible's door to the cache planner (module_utils/kv_plan)."""

from __future__ import annotations

DOCUMENTATION = r"""
name: kv_plan
short_description: Plan sizes and arguments of a serving arrangement
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Computes every size and every argument from a profile, a model and the measured memory of the nodes.
  - An arrangement that cannot work is refused with the rule, the numbers and what to change. A rule is explained by
    C(goodput plan explain KV004).
  - Needs pydantic on the controller.
positional: _input, model, nodes
options:
  _input:
    description: A profile, by its name in C(profiles/), by the path of a YAML file, or as a mapping.
    type: raw
    required: true
  model:
    description: Name in C(models/) or directory with a C(config.json). Default is the profile's.
    type: str
  nodes:
    description:
      - One mapping a node with C(name), C(server) (true on the node of frontend and control plane) and what
        M(goodput.spark.node_facts) returns under C(memory).
      - C(l2_filesystem) with C(mount), C(size_bytes) and C(residue_bytes) lets the disk be checked too.
      - C(cuda_free_bytes), what CUDA could reach at boot, replaces the assumed fraction.
    type: list
    elements: dict
    required: true
  overrides:
    description: Values for dotted keys of the profile, such as C(lmcache.l1.size_gib).
    type: dict
    default: {}
  accept:
    description: Rule ids whose refusal is taken knowingly. Recorded in the plan.
    type: list
    elements: str
    default: []
  accept_memory:
    description: Also take the refusal of a memory rule. The node may freeze.
    type: bool
    default: false
  observed_block_tokens:
    description: Block size of the running engine, to be compared with the computed one.
    type: int
  neighbours:
    description:
      - Other arrangements on the same nodes, C(name), C(l2_directory), C(l2_identity), C(lmcache_request_port),
        C(block_tokens) each.
    type: list
    elements: dict
    default: []
  fail:
    description: Raise an error if the plan is refused; else return it with C(ok) false.
    type: bool
    default: true
"""

EXAMPLES = r"""
goodput_plan: "{{ 'super-recommended' | goodput.spark.kv_plan('super', [
    {'name': 'spark1', 'server': true} | combine(memory1),
    {'name': 'spark2'} | combine(memory2)]) }}"

reproduced: "{{ 'super-kv16-l14' | goodput.spark.kv_plan('super', nodes, accept=['KV005', 'KV006']) }}"
"""

RETURN = r"""
_value:
  description:
    - The plan, with C(ok), C(errors), C(warnings), C(accepted), C(inputs), C(sizes), C(budget), C(env), C(lmcache_env)
      and C(l2_path).
    - Argument lists are C(vllm_args), C(dynamo_worker_args), C(dynamo_frontend_args), C(lmcache_server_args) and
      C(lmcache_coordinator_args), with placeholders that each node fills in.
  type: dict
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import PlanInputError, nearest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.planner import make_plan
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.profile import Neighbour, Observed


def _neighbour(item: Any) -> Neighbour:
    known = tuple(Neighbour.__dataclass_fields__)
    if not isinstance(item, Mapping) or "name" not in item:
        raise PlanInputError("neighbours", item, "each is a mapping with a name", "give name and l2_directory")
    for key in item:
        if key not in known:
            raise PlanInputError(f"neighbours.{key}", item[key], "unknown key", nearest(str(key), known))
    return Neighbour(**item)


def kv_plan(
    profile: str | Mapping[str, Any],
    model: str | None = None,
    nodes: Sequence[Mapping[str, Any]] | None = None,
    overrides: Mapping[str, Any] | None = None,
    accept: Sequence[str] = (),
    accept_memory: bool = False,
    observed_block_tokens: int | None = None,
    neighbours: Sequence[Mapping[str, Any]] = (),
    fail: bool = True,
) -> dict[str, Any]:
    """See DOCUMENTATION."""
    try:
        if isinstance(accept, str):
            raise PlanInputError("accept", accept, "must be a list of rule ids", f"write [{accept}]")
        loaded = files.load_profile_or_mapping(profile, overrides)
        facts = nodes if nodes is not None else []
        if isinstance(facts, (str, Mapping)):
            raise PlanInputError("nodes", facts, "must be a list, one mapping a node", "give one mapping a node")
        plan = make_plan(
            loaded,
            files.load_model(str(model or loaded.model)),
            [files.node_from(item, f"node{index}") for index, item in enumerate(facts, 1)],
            accept=accept,
            accept_memory=accept_memory,
            observed=Observed(observed_block_tokens, tuple(_neighbour(item) for item in neighbours)),
        )
    except PlanInputError as error:
        raise AnsibleFilterError(f"kv_plan: {error}") from None
    if fail and not plan["ok"]:
        raise AnsibleFilterError("kv_plan: " + refusal(plan))
    return plan


def refusal(plan: Mapping[str, Any]) -> str:
    """All errors of a plan as one message."""
    lines = [f"profile {plan['name']} on model {plan['model']} is refused"]
    for item in plan["errors"]:
        node = f" on {item['node']}" if "node" in item else ""
        lines.append(
            f"{item['rule']} {item['title']}{node}: found {item['found']}; required {item['required']};"
            f" {item['remedy']}"
        )
    return "\n".join(lines)


class FilterModule:
    """goodput.spark.kv_plan"""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"kv_plan": kv_plan}
