#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/l2_disk.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: l2_disk
short_description: Say where the L2 filesystem of a node is or may be made
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Reads C(lsblk), C(wipefs), C(/proc) and the recorded L2 filesystem of a node and decides; changes nothing.
  - A disk with a signature, partition table, holder, mount or swap is refused with what was found on it.
  - It does not fail on a refusal; assert on RV(state).
options:
  backend:
    description:
      - V(device) formats the whole disk whose serial is O(serial).
      - V(image) makes a preallocated loop file O(image) on an existing filesystem.
      - V(lv) makes a logical volume in free space of O(volume_group).
      - V(directory) uses the folder as it is.
    type: str
    choices: [device, image, lv, directory]
    required: true
  mount_point:
    description: Where L2 is.
    type: path
    required: true
  required_gib:
    description: Space that files must get, in GiB.
    type: float
    required: true
  serial:
    description: Consent to format the disk with exactly this serial.
    type: str
    default: ""
  adopt_uuid:
    description: Take over a former L2 filesystem with this UUID and keep its content.
    type: str
    default: ""
  label:
    description: Label of the filesystem, at most 12 characters.
    type: str
    default: goodput-l2
  image:
    description: Path of the loop file.
    type: path
    default: /srv/goodput/l2.img
  root_reserve_gib:
    description: Space that V(image) and V(directory) leave free on the filesystem they are on.
    type: float
    default: 0
  volume_group:
    description: Existing volume group for V(lv).
    type: str
    default: ""
  logical_volume:
    description: Name of the logical volume for V(lv).
    type: str
    default: goodput_l2
  owner:
    description: Account that must exist; empty asks for none.
    type: str
    default: ""
  free_floor_percent:
    description: A mounted L2 with less free space than this is a problem.
    type: float
    default: 0
  fio:
    description: Also look whether fio is installed.
    type: bool
    default: false
  record:
    description: File in which goodput.spark.l2_filesystem writes down what it made.
    type: path
    default: /var/lib/goodput/nvme_l2.json
attributes:
  check_mode:
    description: Never changes anything.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Look for a place for L2
  goodput.spark.l2_disk:
    backend: device
    serial: S6P7NS0W123456
    mount_point: /srv/goodput/l2
    required_gib: 420
  register: place

- name: Refuse what could hold data
  ansible.builtin.assert:
    that: place.state != 'refused'
    fail_msg: "{{ place.reason }}"
"""

RETURN = r"""
state:
  description: V(ready) it is there, V(empty) it may be made, V(refused).
  type: str
  returned: always
action:
  description: V(keep), V(allocate), V(make) or V(refuse).
  type: str
  returned: always
reason:
  description: Every problem as found, required and remedy.
  type: str
  returned: always
problems:
  description: The same as a list of C(found), C(required), C(remedy).
  type: list
  elements: dict
  returned: always
warnings_found:
  description: What works but should be known.
  type: list
  elements: str
  returned: always
device:
  description: Disk, logical volume, image or folder.
  type: str
  returned: always
serial:
  description: Serial of the disk.
  type: str
  returned: always
uuid:
  description: UUID of the filesystem that is there, or that it will get.
  type: str
  returned: always
size_bytes:
  description: Size of the device or image.
  type: int
  returned: always
pending:
  description: Whether goodput.spark.l2_filesystem has something to do.
  type: bool
  returned: always
packages_missing:
  description: Packages that bring the tools which are not on the node.
  type: list
  elements: str
  returned: always
candidates:
  description: Empty disks with C(path), C(serial), C(size_gib), C(model).
  type: list
  elements: dict
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import l2_disk


def argument_spec() -> dict[str, Any]:
    return {**l2_disk.WISH_ARGUMENTS, "fio": {"type": "bool", "default": False}}


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    wish = l2_disk.wish_of(module.params)
    try:
        facts = l2_disk.gather(module.run_command, wish, module.params["record"])
        decision = l2_disk.decide(wish, facts)
    except (OSError, ValueError, RuntimeError) as error:
        module.fail_json(msg=f"l2_disk: {error}")
    for warning in decision.warnings:
        module.warn(warning)
    module.exit_json(
        changed=False,
        pending=l2_disk.is_pending(wish, facts.record, decision),
        packages_missing=l2_disk.missing_packages(wish.backend, module.params["fio"], module.get_bin_path),
        **decision.as_result(),
    )


if __name__ == "__main__":
    main()
