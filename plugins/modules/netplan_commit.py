#!/usr/bin/python
# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Thin module over module_utils/netplan.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: netplan_commit
short_description: Change netplan files so that an unconfirmed change undoes itself
description:
  - V(applied) saves what it will touch, starts a systemd timer that puts everything back after O(rollback_seconds),
    writes O(files), lets C(netplan generate) read them, and activates O(interfaces) in a unit of its own. It returns at
    once.
  - V(confirmed), in a later task, waits until the interfaces have their addresses and MTU and the peers answer, and
    only then stops the timer. Where they do not in time, the timer puts everything back and the task fails. If the
    controller can not reach the node any more, the timer does so by itself.
  - Only O(interfaces) are activated, through NetworkManager or systemd-networkd, whichever netplan generated files for.
    C(netplan apply) would disconnect and restart more, management included; it is kept for a rollback after which an
    address is still missing.
version_added: 0.1.0
options:
  state:
    description:
      - V(armed) only saves and starts the timer.
      - V(applied) and V(confirmed) as above.
      - V(rolled_back) goes back now.
      - V(released) brings the links back to the state before the very first change, for a reset; O(files) must
        have been put
        back before.
    type: str
    choices: [armed, applied, confirmed, rolled_back, released]
    default: applied
  files:
    description: Path and text of each file, null to remove it. Written with mode 0600.
    type: dict
    default: {}
  migrate:
    description:
      - Names of interfaces (name and MAC address) whose definitions in other files are taken out.
    type: dict
    default: {}
  interfaces:
    description: The interfaces of the change.
    type: list
    elements: dict
    default: []
    suboptions:
      netdev:
        description: Name of the interface.
        type: str
        required: true
      cidr:
        description: Address with prefix that it must have, and no other IPv4 address.
        type: str
        default: ""
      mtu_bytes:
        description: MTU that it must have; 0 means any.
        type: int
        default: 0
      peers:
        description: Addresses that must answer through this interface before V(confirmed) succeeds.
        type: list
        elements: str
        default: []
  consent:
    description: Whether the change may be made. Without it a needed change is refused.
    type: bool
    default: false
  rollback_seconds:
    description: Time until an unconfirmed change is undone, and so the time that V(confirmed) has.
    type: int
    default: 180
  root:
    description: Root of /etc and /var, for tests.
    type: path
    default: /
attributes:
  check_mode:
    description: Reports what would change and changes nothing.
    support: full
  diff_mode:
    description: Shows the files that are given by O(files).
    support: full
author:
  - The goodput.spark authors
"""

EXAMPLES = r"""
- name: Change the rails
  goodput.spark.netplan_commit:
    files:
      /etc/netplan/90-goodput-rails.yaml: "{{ lookup('ansible.builtin.template', '90-goodput-rails.yaml.j2') }}"
    interfaces:
      - {netdev: enp1s0f0np0, cidr: 192.168.100.1/24, mtu_bytes: 9000}
    consent: true
  register: __change

- name: Reconnect
  ansible.builtin.wait_for_connection:
  when: __change is changed

- name: Confirm the change
  goodput.spark.netplan_commit:
    state: confirmed
    interfaces:
      - {netdev: enp1s0f0np0, cidr: 192.168.100.1/24, mtu_bytes: 9000, peers: [192.168.100.2]}
  when: __change is changed
"""

RETURN = r"""
reasons:
  description: What differed, one sentence each.
  returned: always
  type: list
  elements: str
files:
  description: Files that were or would be written or removed.
  returned: always
  type: list
  elements: str
"""

import shutil
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import netplan


def silent_peers(run: netplan.Runner, interfaces: list[dict[str, Any]]) -> list[str]:
    """Peers that do not answer, one sentence each."""
    return [
        f"{peer} does not answer through {item['netdev']}"
        for item in interfaces
        for peer in item["peers"]
        if run(["ping", "-n", "-q", "-c", "1", "-W", "1", "-I", item["netdev"], peer])[0] != 0
    ]


def confirm(commit: netplan.Commit, run: netplan.Runner, interfaces: list[dict[str, Any]], seconds: float) -> list[str]:
    """Wait for the interfaces until the timer undoes the change, `seconds` at most; returns what was wrong at last."""
    end = time.monotonic() + seconds
    wrong = ["it was not confirmed in time"]
    while commit.state() == "armed" and time.monotonic() < end:
        wrong = [] if commit.applied() else ["the activation is still running"]
        wrong = wrong or netplan.drift(netplan.links(run), interfaces) or silent_peers(run, interfaces)
        if not wrong and commit.disarm():
            return []
        time.sleep(1)
    while commit.state() == "rolling back" and time.monotonic() < end + 120:
        time.sleep(1)
    return wrong or ["it was confirmed too late"]


def argument_spec() -> dict[str, Any]:
    interface = {
        "netdev": {"type": "str", "required": True},
        "cidr": {"type": "str", "default": ""},
        "mtu_bytes": {"type": "int", "default": 0},
        "peers": {"type": "list", "elements": "str", "default": []},
    }
    return {
        "state": {
            "type": "str",
            "choices": ["armed", "applied", "confirmed", "rolled_back", "released"],
            "default": "applied",
        },
        "files": {"type": "dict", "default": {}},
        "migrate": {"type": "dict", "default": {}},
        "interfaces": {"type": "list", "elements": "dict", "options": interface, "default": []},
        "consent": {"type": "bool", "default": False},
        "rollback_seconds": {"type": "int", "default": 180},
        "root": {"type": "path", "default": "/"},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        supports_check_mode=True,
    )
    params = module.params
    root = Path(params["root"])
    interfaces: list[dict[str, Any]] = params["interfaces"]
    netdevs = [item["netdev"] for item in interfaces]

    def run(argv: list[str]) -> tuple[int, str, str]:
        if not shutil.which(argv[0]):
            return 127, "", f"{argv[0]} is not installed"
        rc, out, err = module.run_command(argv, environ_update={"LC_ALL": "C"})
        return int(rc), str(out), str(err)

    commit = netplan.Commit(run, root)
    state = params["state"]
    result: dict[str, Any] = {"reasons": [], "files": []}

    if state == "released":
        recorded = (root / netplan.LINKS_FILE).exists()
        if recorded and not module.check_mode:
            commit.release()
        module.exit_json(changed=recorded, **result)
    if state == "rolled_back":
        pending = commit.state() == "armed"
        if pending and not module.check_mode:
            commit.rollback()
        module.exit_json(changed=pending, **result)
    if state == "confirmed":
        if module.check_mode:
            module.exit_json(changed=False, **result)
        wrong = confirm(commit, run, interfaces, params["rollback_seconds"])
        if wrong:
            if commit.state() == "armed":
                commit.rollback()
            module.fail_json(
                msg=f"The network change was undone, because {'; '.join(wrong)}. The node is as it was before. "
                f"See: journalctl -u {netplan.APPLY_UNIT} -u {netplan.ROLLBACK_UNIT}",
                **{**result, "reasons": wrong},
            )
        module.exit_json(changed=True, **result)

    files: dict[str, str | None] = dict(params["files"])
    if params["migrate"]:
        own = {Path(name).name for name in files}
        found = [item for item in netplan.foreign(root, params["migrate"], "") if Path(item.file).name not in own]
        try:
            files = {**netplan.migration(root, found), **files}
        except ValueError as error:
            module.fail_json(msg=f"{error}. Take it out of that file by hand.", **result)
    result["files"] = commit.differing(files)
    result["reasons"] = [f"{name} differs" for name in result["files"]] + netplan.drift(netplan.links(run), interfaces)
    if state == "applied" and not result["reasons"]:
        module.exit_json(changed=False, **result)
    if state == "applied" and not params["consent"]:
        module.fail_json(
            msg=f"A network change is needed ({'; '.join(result['reasons'])}) and consent is missing. Set "
            "rdma_netplan_apply: true to allow it; it undoes itself unless it is confirmed.",
            **result,
        )
    shown = [
        {
            "before_header": name,
            "after_header": name,
            "before": netplan._read(root / name.lstrip("/")) or "",
            "after": text or "",
        }
        for name, text in params["files"].items()
        if name in result["files"]
    ]
    if not module.check_mode:
        try:
            commit.arm(list(files), netdevs, params["rollback_seconds"])
            if state == "applied":
                commit.write(files)
                commit.launch(netdevs)
        except RuntimeError as error:
            module.fail_json(msg=str(error), **result)
    module.exit_json(changed=True, diff=shown, **result)


if __name__ == "__main__":
    main()
