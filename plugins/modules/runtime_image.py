#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/runtime_image.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: runtime_image
short_description: The serving image, in an archive and in K3s's containerd
version_added: 0.4.0
author: The goodput.spark authors
description:
  - An image is known by its digest; the reference that pods name is C(NAME@DIGEST).
  - V(archive) reads what an OCI archive holds, on the controller or on a node that has one. V(looked) asks containerd.
    V(imported) imports an archive if the image is not there, and removes the archive unless O(keep). V(removed) removes
    every reference of O(name), or of every name under which something was imported; with O(digest) only those of other
    images.
options:
  state:
    description: What to do, as above.
    type: str
    choices: [archive, looked, imported, removed]
    default: looked
  name:
    description: Name of the image, with a host and without a tag. Only V(archive) and V(removed) go without.
    type: str
    default: ""
  digest:
    description: Its digest, C(sha256:) and 64 hexadecimal digits. Not needed to remove.
    type: str
    default: ""
  platform:
    description: What it must be for, such as C(linux/arm64).
    type: str
    default: ""
  node:
    description: What checks call this node.
    type: str
    default: ""
  path:
    description: The archive.
    type: path
    default: ""
  keep:
    description: With V(imported), leave the archive.
    type: bool
    default: false
  hashed:
    description: With V(archive), also hash the file, as copying it needs.
    type: bool
    default: false
attributes:
  check_mode:
    description: Says whether an image would be imported or removed.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Look what this node has
  goodput.spark.runtime_image:
    name: goodput.local/dynamo-vllm-lmcache
    digest: "sha256:{{ '0' * 64 }}"
    platform: linux/arm64
"""

RETURN = r"""
present:
  description: Whether the image is in containerd under the reference that pods name.
  type: bool
  returned: always
installed:
  description: Whether K3s is on the node at all.
  type: bool
  returned: always
checks:
  description: With V(looked), every check with C(check), C(ok), C(found), C(required) and C(remedy).
  type: list
  elements: dict
  returned: always
reason:
  description: All findings, one a line, each with found, required and fix.
  type: str
  returned: always
free_bytes:
  description: Free space where containerd keeps images, and of how much in C(total_bytes).
  type: int
  returned: always
manifest:
  description: With V(archive), the list of files by which it is copied; empty if there is no archive.
  type: dict
  returned: always
images:
  description: With V(archive), the platforms of each digest that an import makes a reference of.
  type: dict
  returned: always
problem:
  description: With V(archive), why it can not bring the image; empty if it can.
  type: str
  returned: always
"""

import os
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import runtime_image as logic
from ansible_collections.goodput.spark.plugins.module_utils.k3s_node import BINARY, DATA_DIR
from ansible_collections.goodput.spark.plugins.module_utils.model_manifest import sha256_of
from ansible_collections.goodput.spark.plugins.module_utils.serving import reason

SOCKET = "/run/k3s/containerd/containerd.sock"


def argument_spec() -> dict[str, Any]:
    return {
        "state": {"type": "str", "choices": ["archive", "looked", "imported", "removed"], "default": "looked"},
        "name": {"type": "str", "default": ""},
        "digest": {"type": "str", "default": ""},
        "platform": {"type": "str", "default": ""},
        "node": {"type": "str", "default": ""},
        "path": {"type": "path", "default": ""},
        "keep": {"type": "bool", "default": False},
        "hashed": {"type": "bool", "default": False},
    }


def room() -> tuple[int, int]:
    """(free, total) bytes of the filesystem where containerd keeps images, or will."""
    parent = Path(DATA_DIR)
    while not parent.exists():
        parent = parent.parent
    space = os.statvfs(parent)
    return space.f_bavail * space.f_frsize, space.f_blocks * space.f_frsize


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    name, digest, state = params["name"], params["digest"], params["state"]
    containerd, check, record = logic.Containerd(), bool(module.check_mode), Path(logic.NAMES)
    free, total = room()
    result: dict[str, Any] = {
        "changed": False,
        "present": False,
        "checks": [],
        "reason": "",
        "manifest": {},
        "images": {},
        "problem": "",
    }
    result |= {"installed": Path(BINARY).exists(), "free_bytes": free, "total_bytes": total}
    try:
        if state == "archive":
            archive = logic.read_archive(params["path"])
            result["images"] = {one: list(platforms) for one, platforms in archive.images.items()}
            result["problem"] = logic.archive_problem(archive, digest, params["platform"])
            hashed = params["hashed"] and not result["problem"]
            sha256 = sha256_of(os.path.realpath(params["path"])) if hashed else "0" * 64
            result["manifest"] = archive.as_model(digest, sha256)
        elif state == "removed":
            # Without a running containerd there is nobody to ask; what K3s leaves is the role k3s's to remove.
            runs = result["installed"] and Path(SOCKET).exists()
            names = [name] if name else logic.brought(record)
            gone = [ref for one in names if runs for ref in containerd.remove(one, keep=digest, check=check)]
            if not name and not check:
                record.unlink(missing_ok=True)
            result["changed"] = bool(gone) or (not name and bool(names))
        elif result["installed"]:
            logic.checked(name, digest)
            there = containerd.images()
            result["present"] = logic.present(there, name, digest)
            if state == "imported" and not result["present"]:
                result["changed"] = True
                if not check:
                    logic.note(record, name)
                    containerd.bring(params["path"], name, digest)
                    if not params["keep"]:
                        os.unlink(params["path"])
                    result["present"] = True
            result["checks"] = logic.image_checks(params["node"], there, name, digest, params["platform"])
            result["reason"] = reason(result["checks"])
    except (OSError, logic.ImageError) as error:
        module.fail_json(msg=str(error), **result)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
