#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/k3s_release.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: k3s_cache
short_description: Have K3s's files on the controller, by sha256
version_added: 0.2.0
author: The goodput.spark authors
description:
  - Runs on the controller. Fills C(PATH/VERSION/) from an air-gap folder or from the internet, with the same result.
  - A file appears under its name only whole and with the right checksum, so a transfer that broke off is never taken.
  - The file names are those of K3s's releases, in the folder, too.
options:
  path:
    description: The cache.
    type: path
    required: true
  version:
    description: The release, such as C(v1.36.4+k3s1).
    type: str
    required: true
  machines:
    description: Machine types of the nodes, as C(uname -m) prints them.
    type: list
    elements: str
    required: true
  checksums:
    description: By Kubernetes' name of the architecture, the sha256 of C(binary) and C(images).
    type: dict
    required: true
  base_url:
    description: Where the releases are.
    type: str
    required: true
  folder:
    description: Air-gap folder with the release's files. Empty downloads.
    type: path
    default: ""
  offline:
    description: Never download.
    type: bool
    default: false
attributes:
  check_mode:
    description: Checks the cache and the folder, and says what would be fetched.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Have the files on the controller
  goodput.spark.k3s_cache:
    path: .cache/k3s
    version: v1.36.4+k3s1
    machines: [aarch64]
    checksums: "{{ k3s_checksums }}"
    base_url: https://github.com/k3s-io/k3s/releases/download
  delegate_to: localhost
"""

RETURN = r"""
files:
  description:
    - By machine type, C(binary) and C(images), each with C(path), C(name), C(sha256) and C(source) (C(cache), C(folder)
      or C(download)).
  type: dict
  returned: success
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import k3s_release as logic


def argument_spec() -> dict[str, Any]:
    return {
        "path": {"type": "path", "required": True},
        "version": {"type": "str", "required": True},
        "machines": {"type": "list", "elements": "str", "required": True},
        "checksums": {"type": "dict", "required": True},
        "base_url": {"type": "str", "required": True},
        "folder": {"type": "path", "default": ""},
        "offline": {"type": "bool", "default": False},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    files: dict[str, dict[str, Any]] = {}
    changed = False
    try:
        for machine in sorted(set(params["machines"])):
            assets = logic.assets(params["version"], [machine], params["checksums"], params["base_url"])
            files[machine] = {}
            for asset in assets:
                path, source = logic.fill(
                    Path(params["path"]),
                    params["version"],
                    asset,
                    params["checksums"],
                    params["folder"],
                    params["offline"],
                    bool(module.check_mode),
                )
                changed |= source != "cache"
                files[machine][asset.kind] = {
                    "path": str(path),
                    "name": asset.name,
                    "sha256": asset.sha256,
                    "source": source,
                }
    except logic.K3sError as error:
        module.fail_json(msg=str(error))
    except OSError as error:
        module.fail_json(
            msg=f"found {error.strerror}: {error.filename}; required: a readable file; fix: correct the path"
        )
    module.exit_json(changed=changed, files=files)


if __name__ == "__main__":
    main()
