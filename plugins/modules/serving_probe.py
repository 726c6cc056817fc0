#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to the checks of module_utils/serving.py on what runs."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_probe
short_description: Check that the serving units of a node run as planned
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Asks systemd, /proc, the journal and the HTTP ports of LMCache and of Dynamo's frontend, and compares with the plan.
  - Tries again until all checks are ok or O(timeout_seconds) are over, because workers register one after the other.
  - Changes nothing. Completions that O(frontend) asks for go through the router like those of any client.
options:
  units:
    description:
      - Units that must run, each with C(name), C(arguments), the last words of its command line, and C(environment).
      - Of the environment those variables are compared that steer the cache (C(UCX_), C(MC_), C(VLLM_), C(LMCACHE_),
        C(DYN_ROUTER_)); one that is not planned is a finding, too. Without C(environment) nothing is compared.
    type: list
    elements: dict
    default: []
  quiet_units:
    description: Those of O(units) whose log must not say that KV events were dropped.
    type: list
    elements: str
    default: []
  lmcache:
    description: LMCache's HTTP address C(url) and its C(arguments), compared with what the server says about itself.
    type: dict
  worker:
    description: Address C(url) of the worker's system port, whose C(/health) must be ready.
    type: dict
  frontend:
    description:
      - The frontend's C(url), the C(model) it must list, the C(addresses) of the nodes that must have one worker each,
        C(allowed), the addresses of all nodes, and C(block_size_tokens).
      - With C(ask) one completion of a new prompt that fills two blocks is asked for, and its KV events must have
        reached the router.
      - With C(pods) remedies name pods instead of units.
    type: dict
  timeout_seconds:
    description: How long to wait for all checks.
    type: int
    default: 60
  fail_on_state:
    description: Fail when a check is not ok.
    type: bool
    default: true
attributes:
  check_mode:
    description: Asks nothing in check mode and returns RV(state) C(skipped).
    support: partial
"""

EXAMPLES = r"""
- name: Check the frontend
  goodput.spark.serving_probe:
    units:
      - {name: goodput-frontend, arguments: [--router-mode, kv]}
    frontend:
      url: http://192.0.2.11:8000
      model: nemotron
      addresses: [192.0.2.11, 192.0.2.12]
      allowed: [192.0.2.11, 192.0.2.12]
      block_size_tokens: 2128
      ask: true
"""

RETURN = r"""
state:
  description: C(ok) or C(failed); C(skipped) in check mode.
  type: str
  returned: always
reason:
  description: All findings, one a line, each with found, required and fix.
  type: str
  returned: always
checks:
  description: Every check with C(check), C(ok), C(found), C(required) and C(remedy).
  type: list
  elements: dict
  returned: when not skipped
answer:
  description: The completion that was asked for, as from M(goodput.spark.chat_probe), with C(addresses) of its workers.
  type: dict
  returned: when O(frontend) has C(ask)
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import chat_probe, unit_ready
from ansible_collections.goodput.spark.plugins.module_utils import serving as logic


class CrashLoops:
    """A unit that systemd restarted three times while we looked, or gave up, will not come up by waiting longer."""

    def __init__(self) -> None:
        self.before: dict[str, int] = {}

    def seen(self, states: dict[str, dict[str, str]]) -> bool:
        now = {name: int(state.get("NRestarts") or 0) for name, state in states.items()}
        self.before = self.before or now
        return any(count - self.before[name] >= 3 or logic.given_up(states[name]) for name, count in now.items())


def journals(units: list[dict[str, Any]], lines: int = 25) -> str:
    """The end of every unit's journal, for the failure message."""
    waiter = unit_ready.Waiter()
    parts = [(unit["name"], waiter.journal(unit["name"], lines)) for unit in units]
    return "".join("\n".join(["", f"--- journal of {name}, last {len(text)} lines", *text]) for name, text in parts)


def unit_rows(units: list[dict[str, Any]], states: dict[str, dict[str, str]]) -> list[logic.Check]:
    rows: list[logic.Check] = []
    report = logic.l2_report()
    for unit in units:
        state = states[unit["name"]]
        running = logic.command_line(state.get("MainPID", "0"))
        words = logic.running_words([str(word) for word in unit.get("arguments") or []], report)
        planned = unit.get("environment")
        rows += logic.unit_checks(
            unit["name"],
            state,
            running,
            words,
            logic.process_environment(state.get("MainPID", "0")),
            None if planned is None else {name: str(value) for name, value in planned.items()},
        )
    return rows


def lmcache_rows(wanted: dict[str, Any]) -> list[logic.Check]:
    url = str(wanted["url"])
    words = logic.running_words([str(word) for word in wanted["arguments"]], logic.l2_report())
    answers = [logic.get(f"{url}/{path}") for path in ("healthcheck", "config", "status")]
    return logic.lmcache_checks(answers[0], answers[1], answers[2], words)


def frontend_rows(wanted: dict[str, Any]) -> list[logic.Check]:
    url = str(wanted["url"])
    return logic.frontend_checks(
        logic.get(f"{url}/health"),
        logic.get(f"{url}/v1/models"),
        logic.get(f"{url}/metrics"),
        model=str(wanted["model"]),
        addresses=[str(address) for address in wanted["addresses"]],
        allowed=[str(address) for address in wanted.get("allowed") or wanted["addresses"]],
        block_size_tokens=int(wanted["block_size_tokens"]),
        pods=bool(wanted.get("pods")),
    )


def completion_rows(wanted: dict[str, Any]) -> tuple[list[logic.Check], dict[str, Any]]:
    """One completion, then the events that it must have caused. Events travel beside the answer, so they get 10 s."""
    url = str(wanted["url"])
    before = logic.get(f"{url}/metrics")
    words = chat_probe.words_for(int(wanted["block_size_tokens"]))
    answer = chat_probe.ask(url, str(wanted["model"]), chat_probe.prompt(words))
    pods = bool(wanted.get("pods"))
    remedy = (
        f"read {logic.log_of('goodput-frontend', pods)} here and {logic.log_of('goodput-worker', pods)} on every node"
    )
    rows = [logic.row("streamed completion", answer.reason or answer.state, "ok", remedy, answer.state == "ok")]
    events: list[logic.Check] = []
    for _second in range(10):
        events = logic.event_checks(before, logic.get(f"{url}/metrics"))
        if events[0]["ok"]:
            break
        time.sleep(1)
    known = {entry["id"]: entry["address"] for entry in logic.instances(logic.get(f"{url}/health").json())}
    return rows + events, answer.facts() | {"addresses": [known.get(worker, "unknown") for worker in answer.workers]}


def argument_spec() -> dict[str, Any]:
    return {
        "units": {"type": "list", "elements": "dict", "default": []},
        "quiet_units": {"type": "list", "elements": "str", "default": []},
        "lmcache": {"type": "dict"},
        "worker": {"type": "dict"},
        "frontend": {"type": "dict"},
        "timeout_seconds": {"type": "int", "default": 60},
        "fail_on_state": {"type": "bool", "default": True},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    if module.check_mode:
        module.exit_json(changed=False, state="skipped", reason="check mode")
    end = time.monotonic() + params["timeout_seconds"]
    loops = CrashLoops()
    while True:
        states = logic.show([unit["name"] for unit in params["units"]])
        checks = unit_rows(params["units"], states)
        if params["lmcache"]:
            checks += lmcache_rows(params["lmcache"])
        if params["worker"]:
            checks += logic.worker_checks(logic.get(f"{params['worker']['url']}/health"))
        if params["frontend"]:
            checks += frontend_rows(params["frontend"])
        looping = loops.seen(states)
        if all(check["ok"] for check in checks) or looping or time.monotonic() > end:
            break
        time.sleep(2)
    result: dict[str, Any] = {}
    if params["frontend"] and params["frontend"].get("ask") and all(check["ok"] for check in checks):
        rows, result["answer"] = completion_rows(params["frontend"])
        checks += rows
    if params["quiet_units"]:
        runs = [states.get(name, {}).get("InvocationID", "") for name in params["quiet_units"]]
        checks += logic.unpublished_checks(logic.journal(runs, logic.UNPUBLISHED))
    reason = logic.reason(checks)
    result |= {"state": "failed" if reason else "ok", "reason": reason, "checks": checks}
    if reason and params["fail_on_state"]:
        module.fail_json(msg=reason + journals(params["units"]), **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
