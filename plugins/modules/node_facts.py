#!/usr/bin/python
# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: node_facts
short_description: Look once at what a node is
version_added: 0.1.0
description:
  - Reads C(/proc), C(/sys), C(/etc) and the dpkg database of one node in one go and never changes anything.
  - It does not judge; the filter P(goodput.spark.preflight#filter) does, for all nodes together.
  - Without root, owners of sockets that belong to other users stay empty.
  - An action plugin of the same name reads the node's clock once more with a plain command and notes the controller's
    clock around it, which bounds the offset.
options:
  packages:
    description: Packages whose installed version is returned.
    type: list
    elements: str
    default: []
  units:
    description: Units whose state is returned.
    type: list
    elements: str
    default: []
  user:
    description: A user whose passwd entry is returned.
    type: str
    default: ""
  resolve:
    description: Names that are resolved on the node.
    type: list
    elements: str
    default: []
  sections:
    description: Only these parts of RV(node), for roles that ask little. All of them by default.
    type: list
    elements: str
    default: []
  tolerate_failure:
    description:
      - Return V(unreachable) or V(failed) as RV(state) instead of failing, so that one table can name every node.
      - If becoming root fails, the node is asked again without it.
      - The action plugin does this; the module itself never sees the option.
    type: bool
    default: false
  root:
    description: Where C(/etc), C(/usr) and C(/var) are read, for recorded trees.
    type: path
    default: /
  proc_root:
    description: Where C(/proc) is read.
    type: path
    default: /proc
  sysfs_root:
    description: Where C(/sys) is read.
    type: path
    default: /sys
attributes:
  check_mode:
    description: The module only reads.
    support: full
  diff_mode:
    description: Nothing changes.
    support: none
author:
  - The goodput.spark authors (@goodput)
"""

EXAMPLES = r"""
- name: Look at the node
  goodput.spark.node_facts:
    packages: [chrony]
  register: __preflight_probe
"""

RETURN = r"""
state:
  description: V(complete), or V(partial) without root; V(unreachable) or V(failed) with O(tolerate_failure).
  returned: always
  type: str
reason:
  description: Why the state is not V(complete).
  returned: always
  type: str
node:
  description: The facts. Sizes end in C(_bytes), times in C(_seconds).
  returned: always
  type: dict
  contains:
    as_root:
      description: Whether the probe ran as root.
      type: bool
    os:
      description: Releases, kernel, command line, architecture, firmware, hostname, machine-id, kdump reservation.
      type: dict
    driver:
      description: Version of the loaded NVIDIA driver, empty without one.
      type: str
    memory:
      description: Total, available, swap, CMA, and how many contiguous 2 MiB blocks are free.
      type: dict
    memory_at_rest:
      description:
        - Total, swap, and available as recorded by the host role before anything served.
        - Without a record, available is measured, or left out while something serves.
      type: dict
    disk:
      description: Size and free space of the root filesystem; size of the factory leftover C(/test.img).
      type: dict
    host_keys:
      description: SHA-256 fingerprint per SSH host key type.
      type: dict
    listening:
      description: Listening TCP sockets with address, port, process and unit.
      type: list
      elements: dict
    network:
      description: Netdevs (wireless, physical, rdma, addresses), IPv4 routes, netdev of the default route.
      type: dict
    clock_units:
      description: Units and boot scripts, not ours, that lock GPU clocks.
      type: list
      elements: dict
    foreign_nvml:
      description: Preloads and libraries that replace the driver's libnvidia-ml.
      type: list
      elements: dict
    kubernetes:
      description: Kubernetes installations this collection did not make.
      type: list
      elements: dict
    packages:
      description: Versions of the packages asked for, empty if not installed.
      type: dict
    pending_packages:
      description: Packages that dpkg has not finished configuring.
      type: list
      elements: str
    firmware_updater:
      description: Whether mlnx-fw-updater is installed and held.
      type: dict
    units:
      description: State of the units asked for.
      type: dict
    sleep_targets_masked:
      description: Whether each sleep target is masked.
      type: dict
    hosts:
      description: Names of C(/etc/hosts) outside our block, with their addresses.
      type: dict
    user:
      description: The passwd entry asked for.
      type: dict
    resolved:
      description: Addresses of the names asked for.
      type: dict
    ntp:
      description: Whether the clock is synchronised, and running time daemons.
      type: dict
    clock_seconds:
      description: The node's clock at the end of the look, in seconds since 1970 UTC.
      type: float
clock:
  description:
    - By the action plugin, a sample of the node's clock with the controller's clock before and after it.
      RV(clock.node_seconds) is 0 if there was no sample.
  returned: always
  type: dict
  sample: {sent_seconds: 1770000000.10, node_seconds: 1770000000.12, received_seconds: 1770000000.14}
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils.node_facts import Node


def argument_spec() -> dict[str, Any]:
    names: dict[str, Any] = {"type": "list", "elements": "str", "default": []}
    return {
        "packages": names,
        "units": names,
        "resolve": names,
        "sections": names,
        "user": {"type": "str", "default": ""},
        "tolerate_failure": {"type": "bool", "default": False},
        "root": {"type": "path", "default": "/"},
        "proc_root": {"type": "path", "default": "/proc"},
        "sysfs_root": {"type": "path", "default": "/sys"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    asked = module.params
    node = Node(Path(asked["root"]), Path(asked["proc_root"]), Path(asked["sysfs_root"]))
    try:
        facts = node.collect(asked["packages"], asked["units"], asked["user"], asked["resolve"], asked["sections"])
    except ValueError as problem:
        module.fail_json(msg=str(problem))
    module.exit_json(
        changed=False,
        state="complete" if facts["as_root"] else "partial",
        reason="" if facts["as_root"] else "not run as root: owners of sockets are unknown",
        node=facts,
    )


if __name__ == "__main__":
    main()
