#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to the checks of module_utils/serving.py that come before a change."""

from __future__ import annotations

DOCUMENTATION = r"""
module: serving_preflight
short_description: Check ports, mounts, files and space before serving units are set up
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Answers all questions of a serving role's preflight at once and changes nothing.
  - Returns every finding; with O(fail_on_state) it fails with all of them, not only with the first.
options:
  ports:
    description:
      - TCP ports that must be free or held by their own unit. Each entry has C(port), C(unit) and C(variable), the
        variable that chooses another port, empty if nothing does.
    type: list
    elements: dict
    default: []
  mounts:
    description: Paths that must be mount points, each with what to do if not.
    type: dict
    default: {}
  paths:
    description: Files and directories that must exist, each with what to do if not.
    type: dict
    default: {}
  space:
    description:
      - Space that must be there, as C(path), C(own) and C(required_gib). Files in the directory C(own) count as free.
      - So do those in the directories C(drop) beside it, which must bear the name of another arrangement.
    type: dict
  packages:
    description: Packages to look for. RV(missing_packages) names those that are not installed, which is no failure.
    type: list
    elements: str
    default: []
  units:
    description: Units to look at. RV(idle_units) names those that do not both run and start at boot.
    type: list
    elements: str
    default: []
  built:
    description:
      - Whether the layers below have really been built. Without it only the ports are checked, which is all that a dry
        run on a bare node can know.
    type: bool
    default: true
  fail_on_state:
    description: Fail when a check is not ok.
    type: bool
    default: true
  proc_root:
    description: Directory that stands for C(/proc). For tests.
    type: path
    default: /proc
attributes:
  check_mode:
    description: Changes nothing anyway.
    support: full
"""

EXAMPLES = r"""
- name: Check what LMCache needs
  goodput.spark.serving_preflight:
    ports:
      - {port: 9500, unit: goodput-lmcache, variable: lmcache_http_port}
    mounts:
      /srv/goodput/l2: run the role nvme_l2 first
    space: {path: /srv/goodput/l2, own: /srv/goodput/l2/lmcache, required_gib: 2.1}
"""

RETURN = r"""
state:
  description: C(ok) or C(failed).
  type: str
  returned: always
reason:
  description: All findings, one a line, each with found, required and fix.
  type: str
  returned: always
missing_packages:
  description: Those of O(packages) that are not installed.
  type: list
  elements: str
  returned: always
idle_units:
  description: Those of O(units) that do not run or do not start at boot.
  type: list
  elements: str
  returned: always
running_units:
  description: Those of O(units) that run or start at boot.
  type: list
  elements: str
  returned: always
checks:
  description: Every check with C(check), C(ok), C(found), C(required) and C(remedy).
  type: list
  elements: dict
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import serving as logic


def argument_spec() -> dict[str, Any]:
    return {
        "ports": {"type": "list", "elements": "dict", "default": []},
        "mounts": {"type": "dict", "default": {}},
        "paths": {"type": "dict", "default": {}},
        "space": {"type": "dict"},
        "packages": {"type": "list", "elements": "str", "default": []},
        "units": {"type": "list", "elements": "str", "default": []},
        "built": {"type": "bool", "default": True},
        "fail_on_state": {"type": "bool", "default": True},
        "proc_root": {"type": "path", "default": "/proc"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    wanted: dict[int, dict[str, str]] = {}
    names: dict[int, str] = {}
    for entry in params["ports"]:
        number, unit = int(entry["port"]), str(entry["unit"])
        variable = str(entry.get("variable", ""))
        named = variable or f"a port of {unit} that nothing moves"
        if not 0 < number < 65536:
            module.fail_json(msg=f"{named} is {number}, required: a port from 1 to 65535")
        if number in names:
            module.fail_json(msg=f"{named} and {names[number]} are both {number}; choose two ports")
        wanted[number], names[number] = {"unit": unit, "variable": variable}, named
    checks = logic.port_checks(wanted, logic.listeners(wanted, params["proc_root"]))
    if params["built"]:
        checks += logic.mount_checks(params["mounts"], params["proc_root"]) + logic.file_checks(params["paths"])
        space = params["space"]
        if space and all(check["ok"] for check in checks):
            drop = [str(name) for name in space.get("drop") or []]
            checks += [
                logic.drop_check(space["own"], drop),
                logic.space_check(
                    space["path"],
                    space["own"],
                    int(float(space["required_gib"]) * logic.GIB_BYTES),
                    "a larger L2 filesystem, or a smaller l2_capacity_gib in the plan",
                    drop,
                ),
            ]
    reason = logic.reason(checks)
    result: dict[str, Any] = {"state": "failed" if reason else "ok", "reason": reason, "checks": checks}
    result["missing_packages"] = logic.missing_packages(params["packages"])
    states = logic.show(params["units"])
    runs = {name: (logic.runs(state), state.get("UnitFileState") == "enabled") for name, state in states.items()}
    result["idle_units"] = [name for name, both in runs.items() if not all(both)]
    result["running_units"] = [name for name, both in runs.items() if any(both)]
    if reason and params["fail_on_state"]:
        module.fail_json(msg=reason, **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
