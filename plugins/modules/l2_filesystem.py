#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/l2_filesystem.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: l2_filesystem
short_description: Make or remove the L2 filesystem of a node
version_added: 0.1.0
author: The goodput.spark authors
description:
  - V(present) looks at the node again as P(goodput.spark.l2_disk#module) does, and makes an XFS filesystem only where
    that look finds nothing at all. It writes the record before the first change, with the UUID that mkfs will use.
  - A filesystem that the record names is kept as it is. An image that lost part of its reservation gets it back.
  - V(absent) removes the filesystem that the record names and nothing else, found by serial and UUID. It must be
    unmounted.
options:
  state:
    description: V(absent) needs the consent of the caller; the role asks for C(goodput_reset_remove_data).
    type: str
    choices: [present, absent]
    default: present
  uuid:
    description: UUID for a new filesystem, as goodput.spark.l2_disk proposed it.
    type: str
    default: ""
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
  record:
    description: File in which goodput.spark.l2_filesystem writes down what it made.
    type: path
    default: /var/lib/goodput/nvme_l2.json
attributes:
  check_mode:
    description: Says whether something would be made or removed.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Make the L2 filesystem
  goodput.spark.l2_filesystem:
    backend: device
    serial: S6P7NS0W123456
    mount_point: /srv/goodput/l2
    required_gib: 420
    uuid: "{{ place.uuid }}"

- name: Remove it
  goodput.spark.l2_filesystem:
    state: absent
    backend: device
    mount_point: /srv/goodput/l2
    required_gib: 420
"""

RETURN = r"""
device:
  description: Disk, logical volume or image.
  type: str
  returned: when present
uuid:
  description: UUID of the filesystem.
  type: str
  returned: when present
done:
  description: What was removed, or why nothing was.
  type: str
  returned: when absent
"""

import uuid as uuids
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import l2_disk, l2_filesystem


def argument_spec() -> dict[str, Any]:
    return {
        **l2_disk.WISH_ARGUMENTS,
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "uuid": {"type": "str", "default": ""},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    check = bool(module.check_mode)
    try:
        if params["state"] == "absent":
            changed, done = l2_filesystem.remove(
                module.run_command, params["mount_point"], params["record"], params["label"], check
            )
            module.exit_json(changed=changed, done=done)
        changed, decision = l2_filesystem.make(
            module.run_command, l2_disk.wish_of(params), params["record"], params["uuid"] or str(uuids.uuid4()), check
        )
    except (OSError, ValueError, RuntimeError, l2_filesystem.L2Error) as error:
        module.fail_json(msg=f"l2_filesystem: {error}")
    module.exit_json(changed=changed, device=decision.device, uuid=decision.uuid)


if __name__ == "__main__":
    main()
