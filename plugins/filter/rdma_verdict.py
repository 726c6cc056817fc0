# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Thin filter over the verdict of module_utils/rdma_proof.py."""

from __future__ import annotations

DOCUMENTATION = r"""
name: rdma_verdict
short_description: Judge an RDMA proof
version_added: 0.1.0
description:
  - Judges what M(goodput.spark.rdma_proof) returned on both nodes.
positional: _input, server, limits
options:
  _input:
    description: The client's part (V(measured)).
    type: dict
    required: true
  server:
    description: The server's two parts, V(serving) and V(collected), combined.
    type: dict
    required: true
  limits:
    description: min_rail_gbps, min_total_gbps, wire_ceiling_gbps and max_loss_events.
    type: dict
    required: true
author:
  - The goodput.spark authors
"""

EXAMPLES = r"""
verdict: "{{ measured.part | goodput.spark.rdma_verdict(serving.part | combine(collected.part), limits) }}"
"""

RETURN = r"""
_value:
  description: >-
    state (ok, slow, rail_idle, tcp_fallback_suspected, measurement_fault, failed), reason, remedy, client,
    server, rails,
    total_gbps, window_s and tcp.
  type: dict
"""

from collections.abc import Callable
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.rdma_proof import verdict


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"rdma_verdict": verdict}
