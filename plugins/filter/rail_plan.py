# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Thin filter over module_utils/rail_plan.py."""

from __future__ import annotations

DOCUMENTATION = r"""
name: rail_plan
short_description: Plan the addresses of a node's rails
version_added: 0.1.0
description:
  - Gives each rail its subnet and each node its host number, and refuses what can not work (overlapping
    subnets, a subnet that collides with a route, equal host numbers, wrong types). Refusals are in C(errors), nothing
    is raised.
positional: _input, subnets, node
options:
  _input:
    description: Names of the nodes, in order.
    type: list
    elements: str
    required: true
  subnets:
    description: One IPv4 subnet per rail.
    type: list
    elements: str
    required: true
  node:
    description: The node to plan for.
    type: str
    required: true
  probes:
    description: Node name to result of M(goodput.spark.rails), for the nodes of this run.
    type: dict
  numbers:
    description: Node name to host number; 0 or missing means its position plus one.
    type: dict
  mtu_bytes:
    description: MTU of the rails.
    type: int
    default: 9000
author:
  - The goodput.spark authors
"""

EXAMPLES = r"""
plan: "{{ ['spark1', 'spark2'] | goodput.spark.rail_plan(['192.168.100.0/24', '192.168.101.0/24'], 'spark1') }}"
"""

RETURN = r"""
_value:
  description:
    - errors, warnings, node, number, interfaces, sysctls and rails (rail, netdev, rdma_device, subnet, prefix, address,
      cidr, mtu_bytes, peers).
  type: dict
"""

from collections.abc import Callable
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.rail_plan import rail_plan


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"rail_plan": rail_plan}
