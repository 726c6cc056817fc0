# Apache-2.0 (see LICENSE)
"""Send files of the controller in batches, and let the module of the same name check and place them."""

from __future__ import annotations

import os
from typing import Any

from ansible.errors import AnsibleActionFail
from ansible.plugins.action import ActionBase

# Bytes that may lie in the node's temporary folder at once; a larger file is a batch of its own.
BATCH_BYTES = 256 * 1024 * 1024


def batches(files: list[tuple[str, str]]) -> list[list[tuple[str, str]]]:
    """(model/path, path on the controller) in batches of at most BATCH_BYTES; at least one, which may be empty."""
    result: list[list[tuple[str, str]]] = [[]]
    size = 0
    for key, source in files:
        own = os.stat(source).st_size
        if result[-1] and size + own > BATCH_BYTES:
            result.append([])
            size = 0
        result[-1].append((key, source))
        size += own
    return result


class ActionModule(ActionBase):  # type: ignore[misc]
    TRANSFERS_FILES = True
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        sources = arguments.get("sources") or {}
        files = []
        for model, paths in (arguments.get("to_copy") or {}).items():
            for path in paths:
                source = os.path.realpath(os.path.join(sources.get(model) or "/nonexistent", path))
                if not os.path.isfile(source):
                    raise AnsibleActionFail(
                        f"found no {path} of model {model} on the controller; required: one to copy; fix: set source "
                        "in model_store_models"
                    )
                files.append((f"{model}/{path}", source))
        if self._task.check_mode:
            result.update(self._execute_module(module_args=arguments, task_vars=task_vars))
            return result
        placed: list[str] = []
        rounds = batches(files)
        # Made before run() and removed after it, because of TRANSFERS_FILES.
        folder = self._connection._shell.tmpdir
        for number, batch in enumerate(rounds, 1):
            incoming = {}
            for index, (key, source) in enumerate(batch):
                target = self._connection._shell.join_path(folder, f"{number}-{index}")
                self._connection.put_file(source, target)
                incoming[key] = target
            last = number == len(rounds)
            answer = self._execute_module(
                module_args={**arguments, "incoming": incoming, "last": last}, task_vars=task_vars
            )
            placed += answer.get("placed") or []
            result.update(answer)
            if answer.get("failed"):
                break
        result["placed"] = placed
        return result
