#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to the proof in module_utils/l2_filesystem.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: l2_check
short_description: Prove that the L2 filesystem of a node can be used
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Looks at mount, options, fstab line, size, free space and the store folder, then writes random bytes past the page
    cache (O_DIRECT) into a file without a name and reads them back. The kernel removes that file in any case.
  - With O(fio) it measures once with fio as LMCache's C(fs_native) works, and says under which conditions.
  - It does not fail on a problem; assert on RV(state).
options:
  mount_point:
    description: Where L2 is.
    type: path
    required: true
  store:
    description: Folder that LMCache writes to.
    type: path
    required: true
  owner:
    description: Account that owns O(store).
    type: str
    required: true
  required_gib:
    description: Space that files must get, in GiB.
    type: float
    required: true
  backend:
    description: Of the L2 filesystem; V(directory) has none of its own.
    type: str
    choices: [device, image, lv, directory]
    required: true
  free_floor_percent:
    description: Least free space in per cent.
    type: float
    default: 2
  test_mib:
    description: Size of the test file in MiB.
    type: int
    default: 8
  fio:
    description: Also measure with fio.
    type: bool
    default: false
  fio_seconds:
    description: Time for each direction.
    type: int
    default: 20
  fio_size_gib:
    description: Data in all; half of the free space at most.
    type: float
    default: 8
  fio_jobs:
    description: Threads; LMCache's C(fs_native) has 4 by default.
    type: int
    default: 4
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
- name: Prove L2
  goodput.spark.l2_check:
    backend: device
    mount_point: /srv/goodput/l2
    store: /srv/goodput/l2/lmcache
    owner: goodput
    required_gib: 420
  register: proof
"""

RETURN = r"""
state:
  description: V(ok) or V(failed).
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
figures:
  description: C(source), C(fstype), C(options), C(total_gib), C(available_gib).
  type: dict
  returned: always
fio:
  description:
    - C(commands), C(conditions), and for C(write) and C(read) C(gb_per_second) (decimal), C(latency_p50_ms),
      C(latency_p99_ms) and C(seconds).
  type: dict
  returned: with O(fio)
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import l2_disk, l2_filesystem


def argument_spec() -> dict[str, Any]:
    return {
        "mount_point": {"type": "path", "required": True},
        "store": {"type": "path", "required": True},
        "owner": {"type": "str", "required": True},
        "required_gib": {"type": "float", "required": True},
        "backend": {"type": "str", "choices": ["device", "image", "lv", "directory"], "required": True},
        "free_floor_percent": {"type": "float", "default": 2.0},
        "test_mib": {"type": "int", "default": 8},
        "fio": {"type": "bool", "default": False},
        "fio_seconds": {"type": "int", "default": 20},
        "fio_size_gib": {"type": "float", "default": 8.0},
        "fio_jobs": {"type": "int", "default": 4},
        "record": {"type": "path", "default": "/var/lib/goodput/nvme_l2.json"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    record = l2_disk.read_record(params["record"])
    problems: list[l2_disk.Problem] = []
    uuid = "" if params["backend"] == "directory" else (record.uuid if record else "")
    if params["backend"] != "directory" and record is None:
        problems.append(
            l2_disk.Problem(
                "no L2 filesystem is recorded on this node",
                "one that this role made",
                "ansible-playbook site.yml --tags nvme_l2",
            )
        )
    expected = l2_filesystem.Expected(
        mount_point=params["mount_point"],
        store=params["store"],
        owner=params["owner"],
        uuid=uuid,
        required_bytes=int(params["required_gib"] * l2_disk.GIB),
        free_floor_percent=params["free_floor_percent"],
        test_bytes=params["test_mib"] * l2_disk.MIB,
    )
    answer: dict[str, Any] = {}
    try:
        found, answer["figures"] = l2_filesystem.examine(module.run_command, expected)
        problems += found
        if params["fio"] and not problems:
            size = int(params["fio_size_gib"] * l2_disk.GIB)
            answer["fio"] = l2_filesystem.measure(
                module.run_command, params["mount_point"], params["fio_seconds"], size, params["fio_jobs"]
            )
    except (OSError, l2_filesystem.L2Error) as error:
        module.fail_json(msg=f"l2_check: {error}")
    module.exit_json(
        changed=False,
        state="failed" if problems else "ok",
        reason=l2_filesystem.texts(problems),
        problems=[asdict(problem) for problem in problems],
        **answer,
    )


if __name__ == "__main__":
    main()
