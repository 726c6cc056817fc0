# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of the role power; thin, over module_utils/power_clocks.py and power_verdict.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.module_utils import power_verdict
from ansible_collections.goodput.spark.plugins.module_utils.power_clocks import pair_problems


def clock_pair_problems(
    own: Any, hostvars: Mapping[str, Any], nodes: Sequence[str], name: str, may_differ: bool = False
) -> list[str]:
    """What is wrong with the nodes' clock pairs; ``own`` is the pair of this node and of nodes that set none."""
    pairs = {node: hostvars[node].get("power_clock_mhz", own) for node in nodes if node in hostvars}
    pairs[name] = own
    return pair_problems(pairs, may_differ)


def power_locks(locks: Sequence[Mapping[str, Any]], replace: Sequence[str]) -> dict[str, Any]:
    """Foreign clock locks against the consent to replace them."""
    return power_verdict.replacements(locks, replace)


def power_after_our_lock(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Which of two looks counts, one before and one after our lock was asserted again."""
    return power_verdict.after_our_lock(first, second)


def power_gate(result: Mapping[str, Any], accept: Sequence[str] = (), strict: bool = False) -> dict[str, Any]:
    """Whether a play may go on from a node."""
    unknown = sorted(set(accept) - set(power_verdict.STATES))
    if unknown:
        raise AnsibleFilterError(
            f"found power_accept {', '.join(unknown)}, required some of {', '.join(power_verdict.STATES)}"
        )
    return power_verdict.judge(result, accept, strict)


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "clock_pair_problems": clock_pair_problems,
            "power_locks": power_locks,
            "power_after_our_lock": power_after_our_lock,
            "power_gate": power_gate,
        }
