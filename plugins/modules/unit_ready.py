#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/unit_ready.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit_ready
short_description: Wait until a unit is up and answers, or fail with its journal
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Polls on the node, so that one task is enough. Only reads.
  - A unit that is failed, masked, not installed, or inactive with no start queued fails at once; one that systemd is
    still restarting is waited for until O(timeout_seconds).
  - The failure says what was found, what was required, and ends with the last lines of the unit's journal.
options:
  name:
    description: Name of the unit.
    type: str
    required: true
  url:
    description: Also GET this URL on the node, without proxies and redirects.
    type: str
  status:
    description: HTTP status that O(url) must answer.
    type: int
    default: 200
  contains:
    description: Text that the answer of O(url) must contain.
    type: str
  port:
    description: Also connect to this TCP port of 127.0.0.1.
    type: int
  stable_seconds:
    description: How long the unit must have been active without interruption; a crash loop is no success.
    type: float
    default: 3
  timeout_seconds:
    description: How long to wait.
    type: float
    default: 60
  journal_lines:
    description: How many journal lines to show on failure.
    type: int
    default: 40
attributes:
  check_mode:
    description: It only reads. On a node where the unit was not made yet it fails, so skip it there in check mode.
    support: full
"""

EXAMPLES = r"""
- name: Wait until the frontend answers
  goodput.spark.unit_ready:
    name: goodput-frontend.service
    url: http://127.0.0.1:8000/health
    timeout_seconds: 120
  when: not ansible_check_mode
"""

RETURN = r"""
state:
  description: V(active), V(failed) (it will not come up by itself) or V(timeout).
  type: str
  returned: always
reason:
  description: Why it is not ready; empty when it is.
  type: str
  returned: always
seconds:
  description: Seconds waited.
  type: float
  returned: always
journal:
  description: Last lines of the journal, empty when it is ready.
  type: list
  elements: str
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import unit_ready as logic


def argument_spec() -> dict[str, Any]:
    return {
        "name": {"type": "str", "required": True},
        "url": {"type": "str"},
        "status": {"type": "int", "default": 200},
        "contains": {"type": "str"},
        "port": {"type": "int"},
        "stable_seconds": {"type": "float", "default": 3},
        "timeout_seconds": {"type": "float", "default": 60},
        "journal_lines": {"type": "int", "default": 40},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    problem = logic.check_url(params["url"]) if params["url"] is not None else None
    if problem is not None:
        module.fail_json(msg=problem, state="failed", reason=problem, seconds=0.0, journal=[])
    probe = logic.Probe(params["url"], params["status"], params["contains"], params["port"], params["stable_seconds"])
    ready = logic.Waiter().wait(params["name"], probe, params["timeout_seconds"], params["journal_lines"])
    answer = {
        "changed": False,
        "state": ready.state,
        "reason": ready.reason,
        "seconds": round(ready.seconds, 1),
        "journal": ready.journal,
    }
    if ready.state != "active":
        module.fail_json(msg=logic.message(params["name"], ready, probe, params["timeout_seconds"]), **answer)
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
