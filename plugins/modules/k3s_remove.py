#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/k3s_node.py: removal."""

from __future__ import annotations

DOCUMENTATION = r"""
module: k3s_remove
short_description: Stop K3s with its containers and remove what they made
version_added: 0.2.0
author: The goodput.spark authors
description:
  - Does nothing where the role k3s has no manifest.
  - Stops the unit, ends the containers (they would outlive it), unmounts what they had mounted, takes away network
    devices and firewall rules, and removes the folders of K3s and the kubelet that were not there before the role came.
  - A folder with something else mounted below it is never emptied.
  - The files that the role wrote are left to M(goodput.spark.manifest).
attributes:
  check_mode:
    description: Says what would be removed.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Stop K3s and remove what it made
  goodput.spark.k3s_remove:
"""

RETURN = r"""
removed:
  description: What was ended or removed.
  type: list
  elements: str
  returned: always
kept:
  description: What was left, with the reason.
  type: list
  elements: str
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import k3s_node as logic
from ansible_collections.goodput.spark.plugins.module_utils import manifest
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError


def argument_spec() -> dict[str, Any]:
    return {}


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    try:
        ours = manifest.load(manifest.Host(), "k3s")
        if ours is None:
            module.exit_json(changed=False, removed=[], kept=[])
        remover = logic.Remover(logic.Node(), bool(module.check_mode))
        remover.run(logic.former_kinds(ours))
    except (K3sError, manifest.ManifestError) as error:
        module.fail_json(msg=f"K3s: {error}")
    except OSError as error:
        module.fail_json(msg=f"K3s: {error.strerror}: {error.filename}. The task needs `become: true`.")
    for text in remover.kept:
        module.warn(f"kept {text}")
    module.exit_json(changed=bool(remover.removed), removed=remover.removed, kept=remover.kept)


if __name__ == "__main__":
    main()
