# Apache-2.0 (see LICENSE)
"""Filters of the role runtime_image; thin, over module_utils/runtime_image.py. Each is documented beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils import runtime_image as logic


def runtime_image_lacking(hostvars: Mapping[str, Any], nodes: Sequence[str], register: str) -> list[str]:
    """See runtime_image_lacking.yml."""
    return [name for name in nodes if not hostvars[name][register]["present"]]


def runtime_image_holders(hostvars: Mapping[str, Any], nodes: Sequence[str], register: str) -> list[str]:
    """See runtime_image_holders.yml."""
    answers = {name: hostvars[name].get(register) or {} for name in nodes}
    return [name for name, answer in answers.items() if answer.get("manifest") and not answer.get("problem")]


def runtime_image_space(
    hostvars: Mapping[str, Any],
    nodes: Sequence[str],
    register: str,
    archive_bytes: int,
    unpacked_gib: float,
    gc_percent: int,
) -> list[str]:
    """See runtime_image_space.yml."""
    answers = {name: hostvars[name][register] for name in nodes}
    found = [
        logic.space_problem(
            name,
            int(answer["free_bytes"]),
            int(answer["total_bytes"]),
            int(archive_bytes),
            int(unpacked_gib * logic.GIB),
            int(gc_percent),
        )
        for name, answer in answers.items()
    ]
    return [problem for problem in found if problem]


class FilterModule:
    """Filters of the role runtime_image."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "runtime_image_holders": runtime_image_holders,
            "runtime_image_lacking": runtime_image_lacking,
            "runtime_image_space": runtime_image_space,
        }
