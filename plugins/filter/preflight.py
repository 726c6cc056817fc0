# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Filters of the preflight and host roles; thin, over module_utils/preflight.py."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.module_utils.preflight import (
    ERROR,
    Limits,
    Port,
    Report,
    check_clocks,
    evaluate,
    render_table,
)


def report_of(name: str, values: Mapping[str, Any], register: str) -> Report:
    """The report of one node from its registered result."""
    result = values.get(register, {})
    clock = result.get("clock", {})
    return Report(
        name=name,
        facts=result.get("node"),
        error=str(result.get("reason", "")),
        unreachable=result.get("state") == "unreachable",
        clock=float(clock.get("node_seconds", 0.0)),
        sent=float(clock.get("sent_seconds", 0.0)),
        received=float(clock.get("received_seconds", 0.0)),
    )


def management_address(values: Mapping[str, Any], name: str) -> str:
    for key in ("goodput_management_address", "ansible_host"):
        if key in values:
            return str(values[key])
    return name


def management_addresses(hostvars: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, str]:
    """Inventory name to management address, in the order of the nodes."""
    return {name: management_address(hostvars[name], name) for name in nodes}


def is_address(value: Any) -> bool:
    """Whether the text is an IPv4 or IPv6 address."""
    try:
        ipaddress.ip_address(str(value))
    except ValueError:
        return False
    return True


def unresolved(wanted: Mapping[str, str], resolved: Mapping[str, Sequence[str]]) -> list[str]:
    """Names whose wanted address is not among those they resolve to."""
    return [name for name, address in wanted.items() if address not in resolved.get(name, [])]


def preflight(
    hostvars: Mapping[str, Any],
    nodes: Sequence[str],
    register: str = "__preflight_probe",
    limits: Mapping[str, Any] | None = None,
    release_set: Mapping[str, Any] | None = None,
) -> list[dict[str, str]]:
    """Findings of all nodes as dictionaries."""
    if not isinstance(hostvars, Mapping):
        raise AnsibleFilterError(f"preflight takes hostvars, found {type(hostvars).__name__}")
    given = dict(limits or {})
    given["ports"] = [
        Port(int(one["port"]), one["purpose"], bool(one.get("first_only")), one.get("variable", ""))
        for one in given.get("ports", [])
    ]
    given["management_addresses"] = management_addresses(hostvars, nodes)
    try:
        bounds = Limits(**given)
    except TypeError as problem:
        raise AnsibleFilterError(f"preflight limits: {problem}") from problem
    reports = [report_of(name, hostvars[name], register) for name in nodes]
    return [finding.as_dict() for finding in evaluate(reports, bounds, release_set or {})]


def clock_findings(
    hostvars: Mapping[str, Any], nodes: Sequence[str], register: str, limit_seconds: float = 1.0
) -> list[dict[str, str]]:
    """Findings on nodes whose clocks are further apart than the limit; needs only the sample, no facts."""
    reports = [report_of(name, hostvars[name], register) for name in nodes]
    findings = check_clocks(reports, Limits(clock_offset_limit_seconds=limit_seconds))
    return [finding.as_dict() for finding in findings if finding.severity == ERROR]


class FilterModule:
    """Filters of the preflight and host roles."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "preflight": preflight,
            "preflight_table": render_table,
            "clock_findings": clock_findings,
            "management_addresses": management_addresses,
            "is_address": is_address,
            "unresolved": unresolved,
        }
