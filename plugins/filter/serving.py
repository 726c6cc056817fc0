# Apache-2.0 (see LICENSE)
"""Filters of the serving roles; thin, over module_utils/serving.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.module_utils import serving as logic


def refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a refusal into the one line that Ansible prints."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except ValueError as error:
            raise AnsibleFilterError(str(error)) from None

    return call


class FilterModule:
    """Filters of the serving roles."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "serving_argument": refused(logic.argument),
            "serving_arguments": refused(logic.arguments),
            "serving_environment": refused(logic.environment),
            "serving_environment_values": refused(logic.environment_values),
            "serving_exec": refused(logic.exec_line),
            "serving_l2_exec": refused(logic.l2_exec_line),
            "serving_planes": refused(logic.planes),
        }
