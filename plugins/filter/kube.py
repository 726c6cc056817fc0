# Apache-2.0 (see LICENSE)
"""Filter of the Kubernetes platform; thin, over module_utils/kube_objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import kube_objects as logic


def kube_objects(
    plan: dict[str, Any],
    nodes: list[dict[str, Any]],
    release: dict[str, Any],
    choices: dict[str, Any] | None = None,
    parts: list[str] | None = None,
) -> list[dict[str, Any]]:
    """See kube_objects.yml."""
    try:
        return logic(plan, nodes, release, choices, parts or ())
    except ValueError as error:
        raise AnsibleFilterError(f"kube_objects: {error}") from None


class FilterModule:
    """goodput.spark.kube_objects"""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"kube_objects": kube_objects}
