#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/model_manifest.py: place what the controller sent."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_place
short_description: Put the models of the controller on a node
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Copies the files that a node lacks, or whose checksum differs, from O(sources) on the controller, one batch after
    the other. Each file gets its name only after its sha256 was right, so a run that was broken off goes on with the
    next file.
  - Then removes files of a former revision that this module once wrote, and writes the manifest beside the files.
  - An action plugin of the same name does the copying.
extends_documentation_fragment: goodput.spark.models
options:
  sources:
    description: Folder on the controller for each model name.
    type: dict
    default: {}
  to_copy:
    description: Files to copy for each model name, as goodput.spark.model_check found them.
    type: dict
    default: {}
  incoming:
    description: Set by the action plugin. Temporary path on the node for each C(MODEL/PATH).
    type: dict
    default: {}
  last:
    description: Set by the action plugin. False keeps manifest and cache for the last batch.
    type: bool
    default: true
attributes:
  check_mode:
    description: Says whether something would be copied.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Put a model on the node
  goodput.spark.model_place:
    models: "{{ manifests }}"
    sources: {nano: /data/nano}
    to_copy: {nano: [config.json]}
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
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as logic
from ansible_collections.goodput.spark.plugins.module_utils import model_transfer


def argument_spec() -> dict[str, Any]:
    return {
        **logic.NODE_ARGUMENTS,
        "sources": {"type": "dict", "default": {}},
        "to_copy": {"type": "dict", "default": {}},
        "incoming": {"type": "dict", "default": {}},
        "last": {"type": "bool", "default": True},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    root: str = params["directory"]
    placed: list[str] = []
    removed: list[str] = []
    try:
        models = logic.models_of(params["models"])
        if module.check_mode:
            module.exit_json(changed=True, placed=[], removed=[])
        for model in models:
            for file in model.files:
                incoming = params["incoming"].get(f"{model.name}/{file.path}")
                if incoming:
                    model_transfer.take(incoming, f"{root}/{model.name}", file)
                    placed.append(f"{model.name}/{file.path}")
        if params["last"]:
            for one in logic.finish(models, root, params["cache"], logic.read_cache(params["cache"])):
                removed += [f"{one.name}/{path}" for path in one.stale]
    except (OSError, logic.ModelError) as error:
        module.fail_json(msg=f"model_place: {error}")
    module.exit_json(changed=True, placed=placed, removed=removed)


if __name__ == "__main__":
    main()
