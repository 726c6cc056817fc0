#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/model_manifest.py: compare."""

from __future__ import annotations

DOCUMENTATION = r"""
module: model_check
short_description: Compare the models of a node with their manifests
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Reads only, and past the page cache. A file whose size, times and inode did not change since its checksum was
    written down is not read again; models up to O(full_gib) are read in full.
  - It does not fail on a difference; assert on RV(problems).
extends_documentation_fragment: goodput.spark.models
options:
  full_gib:
    description: Models up to this size are hashed in full whatever the cache says. V(-1) hashes every model.
    type: float
    default: 0
  reserve_gib:
    description: Space that must stay free after copying.
    type: float
    default: 0
  subnets:
    description: Subnets over which nodes may copy from each other.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Never changes anything.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Compare
  goodput.spark.model_check:
    models: "{{ q('goodput.spark.model_manifest', {'name': 'nano', 'revision': 'abc', 'source': '/data/nano'}) }}"
    full_gib: -1
  register: models
"""

RETURN = r"""
pending:
  description: Whether there is anything to copy, remove or write down.
  type: bool
  returned: always
get_files:
  description: How many files must be copied.
  type: int
  returned: always
needed_bytes:
  description: Their size where it is known.
  type: int
  returned: always
hashed_bytes:
  description: What was read to compare checksums.
  type: int
  returned: always
models:
  description: For each model C(name), C(missing), C(wrong), C(stale), C(unlisted), C(to_copy).
  type: list
  elements: dict
  returned: always
problems:
  description: C(found), C(required), C(remedy) for each file that is not as it must be.
  type: list
  elements: dict
  returned: always
reason:
  description: The same as text.
  type: str
  returned: always
space_problem:
  description: Why the files to copy do not fit, or empty.
  type: str
  returned: always
rail_addresses:
  description: Addresses of the node in O(subnets).
  type: list
  elements: str
  returned: always
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as logic


def argument_spec() -> dict[str, Any]:
    return {
        **logic.NODE_ARGUMENTS,
        "full_gib": {"type": "float", "default": 0.0},
        "reserve_gib": {"type": "float", "default": 0.0},
        "subnets": {"type": "list", "elements": "str", "default": []},
    }


def text(problem: dict[str, str]) -> str:
    return f"found: {problem['found']}\nrequired: {problem['required']}\nremedy: {problem['remedy']}"


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    root: str = params["directory"]
    try:
        cache = logic.read_cache(params["cache"])
        judged = []
        for model in logic.models_of(params["models"]):
            full = params["full_gib"] < 0 or model.known_bytes <= params["full_gib"] * logic.GIB
            judged.append(logic.judge(model, root, cache, full))
        parent = Path(root)
        while not parent.exists():
            parent = parent.parent
        space = os.statvfs(parent)
        needed = sum(one.needed_bytes for one in judged)
        reserve = int(params["reserve_gib"] * logic.GIB)
        tight = logic.space_problem(root, needed, space.f_bavail * space.f_frsize, reserve)
        addresses: list[str] = []
        if params["subnets"]:
            _code, out, _err = module.run_command(["ip", "-json", "-4", "address"])
            addresses = logic.addresses_in(out, params["subnets"])
    except (OSError, ValueError, logic.ModelError) as error:
        module.fail_json(msg=f"model_check: {error}")
    problems = [problem for one in judged for problem in logic.problems(one)]
    module.exit_json(
        changed=False,
        pending=any(one.pending for one in judged),
        get_files=sum(len(one.get) for one in judged),
        needed_bytes=needed,
        hashed_bytes=sum(one.hashed_bytes for one in judged),
        models=[
            {
                "name": one.name,
                "missing": one.missing,
                "wrong": one.wrong,
                "stale": one.stale,
                "unlisted": one.unlisted,
                "to_copy": one.get,
            }
            for one in judged
        ],
        problems=problems,
        reason="\n\n".join(text(problem) for problem in problems),
        space_problem=text(tight) if tight else "",
        rail_addresses=addresses,
    )


if __name__ == "__main__":
    main()
