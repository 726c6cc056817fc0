#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/model_hub.py: fetch from a hub."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_download
short_description: Fetch models from a hub
version_added: 0.2.0
author: The goodput.spark authors
description:
  - Downloads the files that this node lacks, or whose checksum differs, from a hub that speaks the HTTP API of Hugging
    Face, several at once and without filling the page cache. A file that was broken off goes on where it stopped, and
    gets its name only after its sha256 was right.
  - While it runs, the node's journal says every ten seconds how much arrived.
  - An action plugin of the same name reads the token.
extends_documentation_fragment: goodput.spark.models
options:
  repositories:
    description: C(OWNER/NAME) on the hub for each model name. Other models are left as they are.
    type: dict
    required: true
  endpoint:
    description: The hub.
    type: str
    default: https://huggingface.co
  connections:
    description: Files at once, 1 to 16.
    type: int
    default: 4
  token_file:
    description: File on the controller with the hub's token, mode 0600; empty for repositories that everybody may read.
    type: path
    default: ""
  token:
    description: Set by the action plugin. Sent to the hub only, never to a host that it redirects to.
    type: str
    default: ""
attributes:
  check_mode:
    description: Says whether something would be fetched.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Fetch from the hub
  goodput.spark.model_download:
    models: "{{ manifests }}"
    repositories: {nano: owner/nano}
    token_file: ~/.config/goodput/hub-token
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
  description: What came over the network in this run.
  type: int
  returned: always
seconds:
  description: How long fetching and checking took.
  type: float
  returned: always
"""

import time
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import model_hub
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as logic


def argument_spec() -> dict[str, Any]:
    return {
        **logic.NODE_ARGUMENTS,
        "repositories": {"type": "dict", "required": True},
        "endpoint": {"type": "str", "default": model_hub.ENDPOINT},
        "connections": {"type": "int", "default": 4},
        "token_file": {"type": "path", "default": ""},
        "token": {"type": "str", "default": "", "no_log": True},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    root: str = params["directory"]
    started = time.monotonic()
    progress = model_hub.Progress(0, module.log)
    try:
        hub = model_hub.Hub(params["endpoint"], params["token"])
        models = logic.models_of(params["models"])
        cache = logic.read_cache(params["cache"])
        wanted = []
        for model in models:
            if model.name in params["repositories"]:
                judged = logic.judge(model, root, cache, full=False)
                progress.total_bytes += judged.needed_bytes
                repository = params["repositories"][model.name]
                files = [file for file in model.files if file.path in judged.get]
                wanted += [model_hub.Wanted(repository, model.revision, judged.folder, file) for file in files]
        placed = [f"{one.folder.removeprefix(root + '/')}/{one.file.path}" for one in wanted]
        removed = []
        if not module.check_mode and wanted:
            model_hub.fetch_files(hub, wanted, params["connections"], progress)
            for one in logic.finish(models, root, params["cache"], cache):
                removed += [f"{one.name}/{path}" for path in one.stale]
    except (OSError, logic.ModelError) as error:
        module.fail_json(msg=f"model_download: {error}; so far {progress.text()}", bytes=progress.bytes)
    module.exit_json(
        changed=bool(wanted),
        msg=progress.text(),
        placed=[] if module.check_mode else placed,
        removed=removed,
        bytes=progress.bytes,
        seconds=round(time.monotonic() - started, 2),
    )


if __name__ == "__main__":
    main()
