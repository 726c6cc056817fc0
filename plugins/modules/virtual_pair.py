#!/usr/bin/python
"""Start, stop and describe the two QEMU guests of the virtual pair."""

from __future__ import annotations

DOCUMENTATION = r"""
module: virtual_pair
short_description: Start, stop and describe the virtual pair
version_added: 0.1.0
description:
  - Two QEMU guests stand in for two DGX Sparks. Runs on the controller and touches nothing outside O(directory).
  - A running pair is left alone; only processes that this module started are ended, by pid.
options:
  state:
    description:
      - V(up) starts what does not run and waits until systemd has finished starting.
      - V(down) powers both guests off.
      - V(absent) does that and forgets their disks, so that the next V(up) starts stock guests.
      - V(status) only reports.
    type: str
    choices: [up, down, absent, status]
    default: up
  directory:
    description: Where keys, disks, sockets, logs and state are kept.
    type: path
    required: true
  image:
    description: Directory of the base image (C(base.ext4), C(vmlinuz), C(initrd.img)). Needed by V(up).
    type: path
  media:
    description: The read-only medium that the guests see. Needed by V(up).
    type: path
  memory_mib:
    description: Memory of each guest in MiB.
    type: int
    default: 1792
  cpus:
    description: Virtual CPUs of each guest.
    type: int
    default: 1
  l2_gib:
    description: Size of the empty NVMe namespace in GiB.
    type: int
    default: 8
  boot_timeout_seconds:
    description: How long a guest may take to finish starting.
    type: int
    default: 600
attributes:
  check_mode:
    description: Nothing is started or stopped in check mode.
    support: full
  diff_mode:
    description: No diff.
    support: none
author:
  - The goodput.spark authors
"""

EXAMPLES = r"""
- name: Boot the pair
  goodput.spark.virtual_pair:
    state: up
    directory: .virtual
    image: .cache/virtual/image/0123456789ab
    media: .cache/virtual/media.ext4
"""

RETURN = r"""
guests:
  description: For each guest whether it runs, its pid, its management address and its loopback ports.
  returned: always
  type: dict
  sample: {spark1: {running: true, pid: 4711, management_address: 10.77.0.1, ssh: 40001, http: 40002}}
accel:
  description: QEMU's accelerator in use.
  returned: always
  type: str
  sample: kvm
accel_reason:
  description: Why that accelerator.
  returned: always
  type: str
strategy_plugins:
  description: Where the in-process Ansible strategy of the controller's Python is, or empty without it.
  returned: always
  type: str
keep_sha256:
  description: Checksum of the file on the second NVMe namespace, which nothing may change.
  returned: always
  type: str
seconds:
  description: Seconds this call took.
  returned: always
  type: float
"""

import importlib.util
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils.virtual_pair import Pair, Settings, VirtualPairError


def strategy_plugins() -> str:
    """Folder of mitogen's strategy plugins in this interpreter, or an empty string."""
    spec = importlib.util.find_spec("ansible_mitogen")
    return str(Path(spec.origin).parent / "plugins/strategy") if spec and spec.origin else ""


def argument_spec() -> dict[str, Any]:
    """Options of the module."""
    return {
        "state": {"type": "str", "choices": ["up", "down", "absent", "status"], "default": "up"},
        "directory": {"type": "path", "required": True},
        "image": {"type": "path"},
        "media": {"type": "path"},
        "memory_mib": {"type": "int", "default": 1792},
        "cpus": {"type": "int", "default": 1},
        "l2_gib": {"type": "int", "default": 8},
        "boot_timeout_seconds": {"type": "int", "default": 600},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_if=[("state", "up", ("image", "media"))],
        supports_check_mode=True,
    )
    p = module.params
    settings = Settings(
        directory=Path(p["directory"]).absolute(),
        image=Path(p["image"] or "/nonexistent").absolute(),
        media=Path(p["media"] or "/nonexistent").absolute(),
        memory_mib=p["memory_mib"],
        cpus=p["cpus"],
        l2_gib=p["l2_gib"],
        boot_timeout_seconds=p["boot_timeout_seconds"],
    )
    start = time.monotonic()
    changed = False
    try:
        pair = Pair(settings, log=module.warn)
        if p["state"] == "up":
            if module.check_mode:
                changed = not all(g["running"] for g in pair.status()["guests"].values())
            else:
                changed = pair.up()
        elif p["state"] in ("down", "absent"):
            changed = any(g["running"] for g in pair.status()["guests"].values())
            if not module.check_mode:
                pair.down()
                if p["state"] == "absent":
                    pair.destroy_disks()
        seconds = round(time.monotonic() - start, 1)
        module.exit_json(changed=changed, seconds=seconds, strategy_plugins=strategy_plugins(), **pair.status())
    except VirtualPairError as error:
        module.fail_json(msg=str(error))


if __name__ == "__main__":
    main()
