#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/model_transfer.py: share with the other nodes."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_share
short_description: Let the other nodes fetch models for a short time
version_added: 0.1.0
author: The goodput.spark authors
description:
  - V(started) runs a transient unit without rights that answers only on O(address) and only with the token it returns,
    and that ends by itself after O(seconds). V(stopped) ends it.
options:
  state:
    description: What to do.
    type: str
    choices: [started, stopped]
    required: true
  address:
    description: Address on a rail.
    type: str
    default: ""
  port:
    description: TCP port.
    type: int
    default: 18520
  directory:
    description: Folder with one folder a model.
    type: path
    default: /srv/goodput/models
  seconds:
    description: The unit ends after this at the latest.
    type: int
    default: 14400
  script:
    description: Text of the program.
    type: str
    default: ""
attributes:
  check_mode:
    description: Says whether something would be started or stopped.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Share
  goodput.spark.model_share:
    state: started
    address: 192.168.100.1
    script: "{{ lookup('ansible.builtin.file', 'serve.py') }}"
  register: share
"""

RETURN = r"""
token:
  description: What every request must bring.
  type: str
  returned: when started
address:
  description: Where the node answers.
  type: str
  returned: when started
port:
  description: Where the node answers.
  type: int
  returned: when started
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import model_transfer
from ansible_collections.goodput.spark.plugins.module_utils.model_manifest import ModelError


def argument_spec() -> dict[str, Any]:
    return {
        "state": {"type": "str", "choices": ["started", "stopped"], "required": True},
        "address": {"type": "str", "default": ""},
        "port": {"type": "int", "default": 18520},
        "directory": {"type": "path", "default": "/srv/goodput/models"},
        "seconds": {"type": "int", "default": 14400},
        "script": {"type": "str", "default": ""},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        supports_check_mode=True,
        required_if=[("state", "started", ["address", "script"])],
    )
    params: dict[str, Any] = module.params
    if module.check_mode:
        module.exit_json(changed=True, token="", address=params["address"], port=params["port"])
    try:
        if params["state"] == "stopped":
            module.exit_json(changed=model_transfer.stop_share(module.run_command))
        token = model_transfer.start_share(
            module.run_command,
            params["address"],
            params["port"],
            params["directory"],
            params["seconds"],
            params["script"],
        )
    except (OSError, ModelError) as error:
        module.fail_json(msg=f"model_share: {error}")
    module.exit_json(changed=True, token=token, address=params["address"], port=params["port"])


if __name__ == "__main__":
    main()
