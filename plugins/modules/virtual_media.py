#!/usr/bin/python
"""Make the read-only medium of the virtual pair."""

from __future__ import annotations

DOCUMENTATION = r"""
module: virtual_media
short_description: Make the read-only medium of the virtual pair
version_added: 0.1.0
description:
  - An ext4 image with the offline package mirror and archives, the way an air-gapped site would carry them on a disk.
  - Kept under the hash of its content's names, sizes and times; older ones are removed.
options:
  directory:
    description: Folder that keeps the medium.
    type: path
    required: true
  mirror:
    description: Folder of packages with their index.
    type: path
    required: true
  archives:
    description: Files put beside the mirror.
    type: list
    elements: path
    default: []
attributes:
  check_mode:
    description: Nothing is made in check mode.
    support: full
  diff_mode:
    description: No diff.
    support: none
author:
  - The goodput.spark authors
"""

EXAMPLES = r"""
- name: Make the medium
  goodput.spark.virtual_media:
    directory: .cache/virtual/media
    mirror: .cache/virtual/image/0123456789ab/mirror
"""

RETURN = r"""
path:
  description: The medium.
  returned: always
  type: str
"""

import hashlib
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils.virtual_pair import make_media


def argument_spec() -> dict[str, Any]:
    """Options of the module."""
    return {
        "directory": {"type": "path", "required": True},
        "mirror": {"type": "path", "required": True},
        "archives": {"type": "list", "elements": "path", "default": []},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        supports_check_mode=True,
    )
    folder = Path(module.params["directory"]).absolute()
    mirror = Path(module.params["mirror"]).absolute()
    archives = [Path(p).absolute() for p in module.params["archives"]]
    digest = hashlib.sha256()
    for path in [*sorted(mirror.iterdir()), *archives]:
        stat = path.stat()
        digest.update(f"{path.name} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    target = folder / f"{digest.hexdigest()[:12]}.ext4"
    changed = not target.exists()
    if changed and not module.check_mode:
        folder.mkdir(parents=True, exist_ok=True)
        # A running guest keeps its old medium open, so removing the name is safe.
        for old in folder.glob("*.ext4"):
            old.unlink()
        make_media(target, mirror, archives)
    module.exit_json(changed=changed, path=str(target))


if __name__ == "__main__":
    main()
