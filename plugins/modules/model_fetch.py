#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/model_transfer.py: fetch from another node."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_fetch
short_description: Fetch models from another node
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Copies the files that this node lacks, or whose checksum differs, from a node that runs goodput.spark.model_share.
    A file that was broken off goes on where it stopped, and gets its name only after its sha256 was right.
extends_documentation_fragment: goodput.spark.models
options:
  address:
    description: Address of the sharing node.
    type: str
    required: true
  port:
    description: Port of the sharing node.
    type: int
    required: true
  token:
    description: What every request must bring.
    type: str
    required: true
attributes:
  check_mode:
    description: Says whether something would be copied.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Fetch over the rail
  goodput.spark.model_fetch:
    models: "{{ manifests }}"
    address: 192.168.100.1
    port: 18520
    token: "{{ share.token }}"
"""

RETURN = r"""
placed:
  description: Files that were put on the node.
  type: list
  elements: str
  returned: always
removed:
  description: Files of a former revision that were removed.
  type: list
  elements: str
  returned: always
bytes:
  description: What they hold.
  type: int
  returned: always
seconds:
  description: How long copying and checking took.
  type: float
  returned: always
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as logic
from ansible_collections.goodput.spark.plugins.module_utils import model_transfer


def argument_spec() -> dict[str, Any]:
    return {
        **logic.NODE_ARGUMENTS,
        "address": {"type": "str", "required": True},
        "port": {"type": "int", "required": True},
        "token": {"type": "str", "required": True, "no_log": True},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    root: str = params["directory"]
    placed: list[str] = []
    removed: list[str] = []
    copied = 0
    started = time.monotonic()
    try:
        models = logic.models_of(params["models"])
        cache = logic.read_cache(params["cache"])
        if module.check_mode:
            module.exit_json(changed=True, placed=[], removed=[], bytes=0, seconds=0.0)
        for model in models:
            judged = logic.judge(model, root, cache, full=False)
            for file in model.files:
                if file.path in judged.get:
                    folder = f"{root}/{model.name}"
                    model_transfer.fetch(params["address"], params["port"], params["token"], model.name, folder, file)
                    placed.append(f"{model.name}/{file.path}")
                    copied += file.size_bytes or 0
        for one in logic.finish(models, root, params["cache"], cache):
            removed += [f"{one.name}/{path}" for path in one.stale]
    except (OSError, logic.ModelError) as error:
        module.fail_json(msg=f"model_fetch: {error}")
    seconds = round(time.monotonic() - started, 2)
    module.exit_json(changed=True, placed=placed, removed=removed, bytes=copied, seconds=seconds)


if __name__ == "__main__":
    main()
