# Apache-2.0 (see LICENSE)
"""Who copies models from whom."""

from __future__ import annotations

DOCUMENTATION = r"""
name: model_transfer_plan
short_description: Who copies models from whom
version_added: 0.1.0
author: The goodput.spark authors
description:
  - A node that has everything, else the first that needs something and has a rail, shares; the others fetch from it.
    Nodes without a rail are filled from the model's source or repository.
positional: _input, nodes, register, sourceless
options:
  _input:
    description: C(hostvars).
    type: dict
    required: true
  nodes:
    description: Nodes of this run in order.
    type: list
    elements: str
    required: true
  register:
    description: Name of the registered result of goodput.spark.model_check.
    type: str
    required: true
  sourceless:
    description: Names of models with neither a source on the controller nor a repository.
    type: list
    elements: str
    default: []
"""

EXAMPLES = r"""
- name: Show the plan
  ansible.builtin.debug:
    msg: "{{ hostvars | goodput.spark.model_transfer_plan(ansible_play_hosts, '__models') }}"
"""

RETURN = r"""
_value:
  description: C(push) and C(fetch) are lists of nodes; C(share) is a node or empty.
  type: dict
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as logic


def model_transfer_plan(
    hostvars: Mapping[str, Any], nodes: Sequence[str], register: str, sourceless: Sequence[str] = ()
) -> dict[str, Any]:
    try:
        results = {node: hostvars[node][register] for node in nodes}
        return logic.transfer_plan(nodes, results, sourceless)
    except KeyError as error:
        raise AnsibleFilterError(f"model_transfer_plan: no result {error} for one of {', '.join(nodes)}") from error
    except logic.ModelError as error:
        raise AnsibleFilterError(f"model_store_models: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"model_transfer_plan": model_transfer_plan}
