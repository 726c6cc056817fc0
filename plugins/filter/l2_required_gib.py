# Apache-2.0 (see LICENSE)
"""Space that the L2 cap of a plan needs."""

from __future__ import annotations

DOCUMENTATION = r"""
name: l2_required_gib
short_description: Space in GiB that an L2 capacity needs
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Multiplies the cap by 1.05, because LMCache evicts once a second and may write above its cap for that long.
positional: _input
options:
  _input:
    description: The cap, C(max_capacity_gb) of LMCache's adapter, which counts GiB.
    type: float
    required: true
"""

EXAMPLES = r"""
- name: Show the space for 400 GiB
  ansible.builtin.debug:
    msg: "{{ 400 | goodput.spark.l2_required_gib }}"  # 420.0
"""

RETURN = r"""
_value:
  description: Required space in GiB.
  type: float
"""

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.module_utils import l2_disk


def l2_required_gib(capacity_gib: Any) -> float:
    try:
        return l2_disk.required_gib(float(capacity_gib))
    except (TypeError, ValueError) as error:
        raise AnsibleFilterError(f"l2_required_gib: {error}") from error


class FilterModule:
    """Filters of this file."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"l2_required_gib": l2_required_gib}
