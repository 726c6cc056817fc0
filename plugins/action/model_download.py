# Apache-2.0 (see LICENSE)
"""Read the hub's token on the controller, check who may read it, and hand it to the module of the same name."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase
from ansible_collections.goodput.spark.plugins.module_utils import model_hub
from ansible_collections.goodput.spark.plugins.module_utils.model_manifest import ModelError


class ActionModule(ActionBase):  # type: ignore[misc]
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        # Not in the arguments of the task, which callbacks may show.
        arguments = dict(self._task.args)
        try:
            arguments["token"] = model_hub.read_token(str(arguments.pop("token_file", "") or ""))
        except ModelError as error:
            raise AnsibleActionFail(f"model_download: {error}") from error
        result.update(self._execute_module(module_args=arguments, task_vars=task_vars))
        return result
