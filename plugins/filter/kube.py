# Apache-2.0 (see LICENSE)
"""Filters of the Kubernetes platform; thin, over module_utils/kube_objects. Each is documented beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.filter.k3s import k3s_addresses
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import kube_objects as logic
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects.site import host_ports, nodes_of_site


def plain(value: Any) -> Any:
    """Ansible's values know where they come from; a chart's values are written as YAML, which takes plain ones only."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(inner) for inner in value]
    for kind in (str, int, float):
        if isinstance(value, kind) and not isinstance(value, bool):
            return kind(value)
    return value


def kube_objects(
    plan: dict[str, Any],
    nodes: list[dict[str, Any]],
    release: dict[str, Any],
    choices: dict[str, Any] | None = None,
    parts: list[str] | None = None,
) -> list[dict[str, Any]]:
    """See kube_objects.yml."""
    try:
        return logic(plain(plan), plain(nodes), plain(release), plain(choices or {}), parts or ())
    except ValueError as error:
        raise AnsibleFilterError(f"kube_objects: {error}") from None


def kube_nodes(hostvars: Mapping[str, Any], nodes: Sequence[str], subnets: Sequence[str] = ()) -> list[dict[str, Any]]:
    """See kube_nodes.yml."""
    try:
        return nodes_of_site(hostvars, nodes, k3s_addresses(hostvars, nodes), subnets)
    except ValueError as error:
        raise AnsibleFilterError(f"kube_nodes: {error}") from None


def kube_ports(profile: Any, chosen: Mapping[str, Any] | None = None) -> list[dict[str, Any]]:
    """See kube_ports.yml."""
    return host_ports(plain(profile), plain(chosen or {}))


class FilterModule:
    """Filters of the Kubernetes platform."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"kube_objects": kube_objects, "kube_nodes": kube_nodes, "kube_ports": kube_ports}
