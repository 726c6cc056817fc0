#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/k3s_objects.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: k3s_objects
short_description: Place objects in a K3s cluster, and take them away again
version_added: 0.2.0
author: The goodput.spark authors
description:
  - Runs on the server as root. Applies the objects on the server's side with strict validation, so an unknown field is
    refused.
  - The objects are kept in C(/etc/goodput/kubernetes/NAME.json), mode 0600. One that is no longer among O(objects) is
    deleted; a second run with the same objects changes nothing.
  - A HelmChart that failed before is begun again, with what Helm remembers of failed attempts deleted; nothing is
    uninstalled.
options:
  name:
    description: Name under which the objects are remembered.
    type: str
    required: true
  objects:
    description: The objects, in the order in which they are applied.
    type: list
    elements: dict
    default: []
  state:
    description: V(absent) deletes what was placed under this name, last first.
    type: str
    choices: [present, absent]
    default: present
  forget:
    description: With V(absent), delete only what this node remembers; for a cluster that no longer answers and goes.
    type: bool
    default: false
  timeout_seconds:
    description: How long one call of kubectl may take.
    type: int
    default: 300
  folder:
    description: Where the objects are remembered.
    type: path
    default: /etc/goodput/kubernetes
attributes:
  check_mode:
    description: Compares with what was placed the last time; failed charts are not looked for.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Place the objects
  goodput.spark.k3s_objects:
    name: device-plugins
    objects: "{{ device_plugins_objects }}"
"""

RETURN = r"""
done:
  description: What was done, in words.
  type: list
  elements: str
  returned: success
"""

import re
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.k3s_node import BINARY
from ansible_collections.goodput.spark.plugins.module_utils.k3s_objects import Placer
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError


def argument_spec() -> dict[str, Any]:
    return {
        "name": {"type": "str", "required": True},
        "objects": {"type": "list", "elements": "dict", "default": []},
        "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        "forget": {"type": "bool", "default": False},
        "timeout_seconds": {"type": "int", "default": 300},
        "folder": {"type": "path", "default": "/etc/goodput/kubernetes"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    if not re.fullmatch(r"[a-z][a-z0-9-]*", params["name"]):
        module.fail_json(msg=f"found name {params['name']!r}; required: letters, digits and '-'; fix: correct it")
    placer = Placer(
        Kubectl(timeout_seconds=params["timeout_seconds"]), Path(params["folder"]) / f"{params['name']}.json"
    )
    try:
        if params["state"] == "present":
            done = placer.present(params["objects"], bool(module.check_mode))
        else:
            done = placer.absent(Path(BINARY).exists() and not params["forget"], bool(module.check_mode))
    except K3sError as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=bool(done), done=done)


if __name__ == "__main__":
    main()
