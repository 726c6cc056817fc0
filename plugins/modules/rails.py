#!/usr/bin/python
# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Thin module over module_utils/rails.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rails
short_description: Find the two rails of the cabled port, and check them
description:
  - Finds the two RDMA functions of the cabled ConnectX-7 port by facts (phys_port_name, sys_image_guid, PCI
    function pairs,
    carrier), never by name. Devices without a PCI parent (Soft-RoCE) are found through C(parent) or the GID table.
  - With O(plan), also checks each rail against its plan and pings the peers.
  - Never changes the node.
version_added: 0.1.0
options:
  port:
    description: Port to use (p0, p1) where both are cabled or all links are down. Empty means the cabled one.
    type: str
    default: ""
  plan:
    description: This node's plan, from the filter P(goodput.spark.rail_plan#filter). Empty means no checks.
    type: dict
    default: {}
  own_netplan_file:
    description: Name of the netplan file that belongs to the rdma role; all others are foreign.
    type: str
    default: 90-goodput-rails.yaml
  proof_file:
    description: Where the record of the last RDMA proof is.
    type: path
    default: /var/lib/goodput/rdma-proof.json
  sysfs_root:
    description: Where sysfs is, for recorded trees.
    type: path
    default: /sys
  proc_root:
    description: Where procfs is, for recorded trees.
    type: path
    default: /proc
  root:
    description: Root of /etc, /run, /dev and /var, for recorded trees.
    type: path
    default: /
attributes:
  check_mode:
    description: Only reads, so it runs in check mode too.
    support: full
author:
  - The goodput.spark authors
"""

EXAMPLES = r"""
- name: Find the rails
  goodput.spark.rails:
  register: __rails

- name: Show them
  ansible.builtin.debug:
    msg: "{{ __rails.state }}: {{ __rails.reason }}"
"""

RETURN = r"""
state:
  description: One of ok, no_nic, no_cable, one_rail, ambiguous, unknown.
  returned: always
  type: str
reason:
  description: What was found.
  returned: always
  type: str
remedy:
  description: What to do about it, empty if the state is ok.
  returned: always
  type: str
port:
  description: Name of the chosen port, empty for devices without one.
  returned: always
  type: str
rails:
  description:
    - The rails in the order of their PCI address, each with rail, netdev, rdma_device, port, phys_port_name, pci, mac,
      mtu_bytes, carrier (null where the link is down), operstate, admin_up, speed_mbps, pcie_width, pcie_speed,
      active_mtu_bytes, addresses and gids (index, type, gid, netdev).
  returned: always
  type: list
  elements: dict
routes:
  description: IPv4 routes of the main table, as C(ip -j) prints them.
  returned: always
  type: list
  elements: dict
foreign:
  description: Definitions outside the role's netplan file that configure a rail (file, section, id, netdev, obstacle).
  returned: always
  type: list
  elements: dict
programs:
  description: Paths of the programs that the role needs, empty for a missing one.
  returned: always
  type: dict
sysctls:
  description: Running values of the kernel parameters that the role sets for the rails.
  returned: always
  type: dict
proof_key:
  description: What a proof depends on, that is the boot, the kernel and the rails.
  returned: always
  type: dict
proof:
  description: Record of the last proof, empty where there is none.
  returned: always
  type: dict
proof_due:
  description: Why a proof is due, empty where the record is good.
  returned: always
  type: str
checks:
  description: With O(plan), one entry per check with check, node, rail, ok, found, required and remedy.
  returned: always
  type: list
  elements: dict
failures:
  description: The failed checks, one sentence each.
  returned: always
  type: list
  elements: str
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import netplan, rails
from ansible_collections.goodput.spark.plugins.module_utils.rail_plan import rail_sysctls

PROGRAMS = ("ib_write_bw", "ibv_devinfo", "netplan")


def proof_key(found: list[dict[str, Any]], proc_root: Path) -> dict[str, Any]:
    """What makes an old proof worthless when it changes."""
    return {
        "boot_id": rails._text(proc_root / "sys/kernel/random/boot_id"),
        "kernel": os.uname().release,
        "rails": [{key: rail[key] for key in ("netdev", "rdma_device", "mac", "mtu_bytes")} for rail in found],
    }


def proof_due(record: dict[str, Any], key: dict[str, Any]) -> str:
    """One clause that says why the record does not count, or ""."""
    if not record:
        return "no proof is recorded"
    if record.get("key") != key:
        changed = [name for name in key if record.get("key", {}).get(name) != key[name]]
        return f"{', '.join(changed)} changed since the last proof"
    if record.get("state") != "ok":
        return f"the last proof ended {record.get('state')}"
    return ""


def read_record(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def argument_spec() -> dict[str, Any]:
    return {
        "port": {"type": "str", "default": ""},
        "plan": {"type": "dict", "default": {}},
        "own_netplan_file": {"type": "str", "default": "90-goodput-rails.yaml"},
        "proof_file": {"type": "path", "default": "/var/lib/goodput/rdma-proof.json"},
        "sysfs_root": {"type": "path", "default": "/sys"},
        "proc_root": {"type": "path", "default": "/proc"},
        "root": {"type": "path", "default": "/"},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        supports_check_mode=True,
    )
    sysfs, proc, root = (Path(module.params[name]) for name in ("sysfs_root", "proc_root", "root"))

    def run(argv: list[str]) -> tuple[int, str, str]:
        """A missing program is an answer, not a crash."""
        if not shutil.which(argv[0]):
            return 127, "", f"{argv[0]} is not installed"
        rc, out, err = module.run_command(argv, environ_update={"LC_ALL": "C"})
        return int(rc), str(out), str(err)

    live = sysfs == Path("/sys")
    answer = rails.choose(sysfs, module.params["port"], root)
    rails.complete(
        answer,
        sysfs,
        rails.parse_addresses(run(["ip", "-j", "addr", "show"])[1]) if live else {},
        rails.parse_active_mtus(run(["ibv_devinfo"])[1]) if live else {},
    )
    found = answer["rails"]
    names = {rail["netdev"]: rail["mac"] for rail in found}
    key = proof_key(found, proc)
    record = read_record(root / module.params["proof_file"].lstrip("/"))
    plan = module.params["plan"]
    checks = rails.verify(plan, run, sysfs, proc, root / "dev", root) if plan else []
    module.exit_json(
        changed=False,
        **answer,
        routes=rails.parse_json_list(run(["ip", "-j", "-4", "route", "show"])[1]) if live else [],
        foreign=[item._asdict() for item in netplan.foreign(root, names, module.params["own_netplan_file"])],
        programs={name: shutil.which(name) or "" for name in PROGRAMS},
        sysctls={name: rails._text(proc / "sys" / name.replace(".", "/")) for name in rail_sysctls(list(names))},
        proof_key=key,
        proof=record,
        proof_due=proof_due(record, key),
        checks=checks,
        failures=[rails.sentence(check) for check in checks if not check["ok"]],
    )


if __name__ == "__main__":
    main()
