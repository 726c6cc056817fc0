#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/k3s_node.py: look."""

from __future__ import annotations

DOCUMENTATION = r"""
module: k3s_probe
short_description: Look at K3s on a node, and at what it needs
version_added: 0.2.0
author: The goodput.spark authors
description:
  - Only reads. It does not judge; the filter P(goodput.spark.k3s_findings#filter) does, for all nodes together.
options:
  images:
    description: Path of the images archive, whose sha256 is returned.
    type: path
    default: ""
  root:
    description: Directory that stands for C(/). For tests.
    type: path
    default: /
  proc_root:
    description: Where C(/proc) is read. For tests.
    type: path
    default: /proc
attributes:
  check_mode:
    description: The module only reads.
    support: full
"""

EXAMPLES = r"""
- name: Look at K3s
  goodput.spark.k3s_probe:
  register: __k3s_probe
"""

RETURN = r"""
state:
  description: C(server), C(agent) or C(absent), by the units that are there.
  type: str
  returned: always
reason:
  description: Why the state is what it is.
  type: str
  returned: always
binary:
  description: C(version) and C(sha256) of the program; both empty without one.
  type: dict
  returned: always
images_sha256:
  description: The sha256 of O(images), empty without it.
  type: str
  returned: always
units:
  description:
    - By C(server) and C(agent), whether the unit is C(loaded), C(active) and C(enabled), whether its process is
      C(running), and the C(digest) of what it was started with.
  type: dict
  returned: always
token:
  description: Whether the token file C(exists), its C(mode), C(uid) and size; never its content.
  type: dict
  returned: always
foreign_mounts:
  description: Disks below K3s's data directory.
  type: list
  elements: str
  returned: always
foreign_kubelets:
  description: Running kubelets of another Kubernetes.
  type: list
  elements: str
  returned: always
free_bytes:
  description: Free space where K3s keeps its data.
  type: int
  returned: always
missing_modules:
  description: Kernel modules that K3s needs and this kernel does not have.
  type: list
  elements: str
  returned: always
nvidia:
  description: The C(program) of the NVIDIA runtime, and whether containerd's configuration has it (C(configured)).
  type: dict
  returned: always
cgroup_memory:
  description: Whether cgroup v2 has its memory controller.
  type: bool
  returned: always
limited_pods:
  description: Uids of pods with a limit on locked memory.
  type: list
  elements: str
  returned: always
limited_pod_names:
  description: The same pods as NAMESPACE/NAME.
  type: list
  elements: str
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils.k3s_node import Node


def argument_spec() -> dict[str, Any]:
    return {
        "images": {"type": "path", "default": ""},
        "root": {"type": "path", "default": "/"},
        "proc_root": {"type": "path", "default": "/proc"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    node = Node(Path(module.params["root"]), Path(module.params["proc_root"]))
    answer = node.look()
    sides = [side for side, unit in answer["units"].items() if unit["loaded"]]
    module.exit_json(
        changed=False,
        state=sides[0] if sides else "absent",
        reason=f"units there: {', '.join(sides) or 'none'}",
        images_sha256=node.file_sha256(module.params["images"]) if module.params["images"] else "",
        **answer,
    )


if __name__ == "__main__":
    main()
