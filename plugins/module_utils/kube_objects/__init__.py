# Apache-2.0 (see LICENSE)
"""Plan, nodes, release set and choices as Kubernetes objects. Pure: nothing is read, nothing is asked.

What processes are told is what the systemd units tell them; a test compares the two for every profile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ..kv_plan.checks import PlanInputError, nearest
from . import charts
from .inputs import Choices, choices_from, nodes_from, release_from
from .serving_objects import Serving

__all__ = ["PARTS", "Choices", "PlanInputError", "file_name", "kube_objects"]

#: In the order in which they are applied.
PARTS = ("device_plugins", "platform", "serving", "monitors")


def kube_objects(
    plan: Mapping[str, Any],
    nodes: Sequence[Mapping[str, Any]],
    release: Mapping[str, Any],
    choices: Mapping[str, Any] | None = None,
    parts: Sequence[str] = (),
) -> list[dict[str, Any]]:
    """Objects in the order in which they are applied.

    :param plan: of ``kv_plan``; ``{}`` where ``parts`` names neither serving nor monitors.
    :param nodes: ``name`` and ``rails`` each (see ``inputs``); each gets one worker.
    :param release: ``goodput_release_set``.
    :param choices: see ``inputs.Choices``.
    :param parts: some of PARTS; all that the plan needs by default, monitors only if ``pod_monitors``.
    :raises PlanInputError, ServingError: what is missing or contradicts, before anything is returned.
    """
    for part in parts:
        if part not in PARTS:
            raise PlanInputError("parts", part, "unknown part", nearest(str(part), PARTS))
    checked, known, chosen = nodes_from(nodes), release_from(release), choices_from(choices)
    engine = str(plan["inputs"]["profile"]["engine"]) if plan else "vllm"
    if engine == "vllm" and len(checked) > 1 and not checked[0].rails:
        raise PlanInputError("nodes", "no rails", f"{len(checked)} nodes need them", "give rails; run the role rdma")
    wanted = list(parts) or [
        # The simulated engine needs no device.
        *(["device_plugins"] if engine == "vllm" else []),
        "platform",
        "serving",
        *(["monitors"] if chosen.pod_monitors else []),
    ]
    found: list[dict[str, Any]] = []
    if "device_plugins" in wanted:
        found += charts.device_plugins(checked, known, chosen)
    if "platform" in wanted:
        found += charts.platform(known, chosen)
    if "serving" in wanted or "monitors" in wanted:
        if not plan or not plan["ok"]:
            name = plan.get("name", "none")
            raise PlanInputError("plan", name, "must be a plan that may run", f"see `goodput plan {name}`")
        serving = Serving(plan, checked, known, chosen, engine)
        found += serving.objects() if "serving" in wanted else []
        found += serving.monitors() if "monitors" in wanted else []
    return found


def file_name(index: int, item: Mapping[str, Any]) -> str:
    """``03-daemonset-rdma-shared-device-plugin.yaml``: sorted by name, files are in order."""
    return f"{index:02d}-{item['kind'].lower()}-{item['metadata']['name']}.yaml"
