#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/k3s_node.py: the token."""

from __future__ import annotations

DOCUMENTATION = r"""
module: k3s_token
short_description: The file with the token of a K3s cluster
version_added: 0.2.0
author: The goodput.spark authors
description:
  - Without O(token) a token is made on the node, unless the file has one. Its mode is always 0600.
  - With O(token), the one that the server wrote, the node first compares it with the server at O(url). K3s itself would
    try for ever.
options:
  token:
    description: Content of the server's C(node-token).
    type: str
    default: ""
  url:
    description: The server. Asked when O(token) is given.
    type: str
    default: ""
  installed:
    description: Whether the server has data that was made with a token. Then none is made.
    type: bool
    default: false
  path:
    description: The file.
    type: path
    default: /etc/rancher/k3s/token
attributes:
  check_mode:
    description: Says whether the file would change.
    support: full
  diff_mode:
    description: A secret is not shown.
    support: none
"""

EXAMPLES = r"""
- name: Make the token
  goodput.spark.k3s_token:
  no_log: true
"""

RETURN = r"""
path:
  description: The file.
  type: str
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import k3s_node as logic
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError


def argument_spec() -> dict[str, Any]:
    return {
        "token": {"type": "str", "default": "", "no_log": True},
        "url": {"type": "str", "default": ""},
        "installed": {"type": "bool", "default": False},
        "path": {"type": "path", "default": "/etc/rancher/k3s/token"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    path = Path(params["path"])
    try:
        if params["token"]:
            problem = logic.join_problem(params["token"], params["url"])
            if problem:
                module.fail_json(msg=f"this node can not join: {problem}")
            if module.check_mode:
                changed = not path.is_file()
            else:
                changed = logic.write_secret(path, f"{params['token'].strip()}\n")
        else:
            changed = logic.generate_token(path, params["installed"], bool(module.check_mode))
    except K3sError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(msg=f"{error.strerror}: {error.filename}. The task needs `become: true`.")
    module.exit_json(changed=changed, path=str(path))


if __name__ == "__main__":
    main()
