# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Run the module of the same name, sample the node's clock, and turn a missing answer into an answer."""

from __future__ import annotations

import re
import time
from typing import Any

from ansible.errors import AnsibleConnectionFailure, AnsibleError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible.plugins.action import ActionBase


def reason_of(result: dict[str, Any]) -> str:
    """The first useful line of a failed module result."""
    text = str(result.get("msg") or result.get("module_stderr") or result.get("module_stdout") or "no message")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines and lines[0].startswith("Traceback") else (lines or ["no message"])[0]


class ActionModule(ActionBase):  # type: ignore[misc]
    _supports_check_mode = True
    _supports_async = False

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        arguments = dict(self._task.args)
        tolerate = boolean(arguments.pop("tolerate_failure", False))
        answer = self._ask(arguments, task_vars, tolerate)
        if tolerate and answer.get("failed") and not answer.get("unreachable") and self._connection.become:
            refusal = reason_of(answer)
            self._connection.set_become_plugin(None)
            answer = self._ask(arguments, task_vars, tolerate)
            if not answer.get("failed"):
                answer["reason"] = refusal
        if tolerate and (answer.get("failed") or answer.get("unreachable")):
            answer = {
                "changed": False,
                "state": "unreachable" if answer.get("unreachable") else "failed",
                "reason": reason_of(answer),
            }
        elif not answer.get("failed"):
            answer["clock"] = self._clock()
        result.update(answer)
        return result

    def _clock(self) -> dict[str, float]:
        """One sample of the node's clock; no module in between, so the bracket is a round trip wide."""
        sent = time.time()
        answer = self._low_level_execute_command("date +%s.%N")
        received = time.time()
        text = str(answer.get("stdout", "")).strip()
        node = float(text) if re.fullmatch(r"\d+\.\d+", text) else 0.0
        return {"sent_seconds": sent, "node_seconds": node, "received_seconds": received}

    def _ask(self, arguments: dict[str, Any], task_vars: dict[str, Any] | None, tolerate: bool) -> dict[str, Any]:
        try:
            answer: dict[str, Any] = self._execute_module(module_args=arguments, task_vars=task_vars)
        except AnsibleConnectionFailure as problem:
            if not tolerate:
                raise
            answer = {"unreachable": True, "msg": str(problem)}
        except AnsibleError as problem:
            if not tolerate:
                raise
            answer = {"failed": True, "msg": str(problem)}
        return answer
