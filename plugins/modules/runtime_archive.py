#!/usr/bin/python
# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0

from __future__ import annotations

DOCUMENTATION = r"""
---
module: runtime_archive
short_description: Identify the runtime archive of a node and judge its mount
version_added: 0.1.0
description:
  - Looks at the archive, at the mount, and at what the node brings (Python, CPU features, libraries), and says what is
    not as required, with the remedy.
  - The sha256 of the whole file is remembered in C(checked.json) by O(state=recorded), together with size, time, inode
    and the hash of both ends of the file. While these agree, the file is not read again.
options:
  state:
    description:
      - V(preflight) judges a node before the role runs, V(verified) after it. Neither changes anything.
      - V(recorded) hashes the archive unless O(marks) are still right, and remembers the hash.
    type: str
    choices: [preflight, verified, recorded]
    default: verified
  archive:
    description: The archive on the node.
    type: path
    required: true
  sha256:
    description: The sha256 that it must have.
    type: str
    required: true
  copied:
    description: Whether the role makes the archive by copying. Then it may be missing with O(state=preflight).
    type: bool
    default: false
  marks:
    description: Return value RV(archive) of an earlier run on this node, so that V(recorded) need not hash again.
    type: dict
    default: {}
  directory:
    description: Where C(checked.json) is kept.
    type: path
    default: /var/lib/goodput/runtime
  mount:
    description: Where the archive is mounted.
    type: path
    default: /opt/goodput/runtime
  mount_options:
    description: The options of its line in C(/etc/fstab).
    type: str
    default: ""
  release:
    description: Name of the release set that C(VERSION.json) must have. Empty is not checked, here and below.
    type: str
    default: ""
  dynamo:
    description: Version of Dynamo that it must have.
    type: str
    default: ""
  lmcache:
    description: Version of LMCache that it must have.
    type: str
    default: ""
  python:
    description: Version (MAJOR.MINOR) that C(/usr/bin/python3) must have.
    type: str
    default: ""
  full:
    description: Hash the whole archive even if it is known.
    type: bool
    default: false
  deep:
    description: Also import what the units start. Takes about a minute on an emulated guest.
    type: bool
    default: false
  timeout_seconds:
    description: How long the imports of O(deep) may take.
    type: int
    default: 600
  proc_root:
    description: Where C(/proc) is read.
    type: path
    default: /proc
  sysfs_root:
    description: Where C(/sys) is read.
    type: path
    default: /sys
  etc_root:
    description: Where C(/etc) is read.
    type: path
    default: /etc
attributes:
  check_mode:
    description: V(recorded) writes nothing.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
author:
  - The goodput.spark authors (@goodput)
"""

EXAMPLES = r"""
- name: Judge the runtime
  goodput.spark.runtime_archive:
    archive: /media/goodput/runtime-virtual-x86_64.squashfs
    sha256: "{{ runtime_sha256 }}"
  register: __runtime_probe

- name: Refuse another runtime
  ansible.builtin.assert:
    that: __runtime_probe.state == 'ok'
    fail_msg: "{{ inventory_hostname }}: {{ __runtime_probe.reason }}"
"""

RETURN = r"""
state:
  description: V(ok), or V(wrong) with at least one finding.
  type: str
  returned: always
reason:
  description: All findings as text, one a line.
  type: str
  returned: always
findings:
  description: Each with C(check), C(found), C(required), C(remedy).
  type: list
  elements: dict
  returned: always
archive:
  description: C(path), C(exists), C(sha256), C(hashed) (whether the whole file was read now) and C(marks).
  type: dict
  returned: always
mount:
  description: C(mounted), C(source), C(fstype), C(read_only), C(fstab), C(version) and more.
  type: dict
  returned: always
mount_current:
  description: Whether the archive asked for is what is mounted.
  type: bool
  returned: always
system:
  description: C(machine), C(python) and missing libraries.
  type: dict
  returned: always
free_bytes:
  description: Free space where O(directory) is or would be made.
  type: int
  returned: always
"""

import os
import platform
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import runtime as logic


def argument_spec() -> dict[str, Any]:
    text: dict[str, Any] = {"type": "str", "default": ""}
    flag: dict[str, Any] = {"type": "bool", "default": False}
    return {
        "state": {"type": "str", "choices": ["preflight", "verified", "recorded"], "default": "verified"},
        "archive": {"type": "path", "required": True},
        "sha256": {"type": "str", "required": True},
        "copied": flag,
        "marks": {"type": "dict", "default": {}},
        "directory": {"type": "path", "default": "/var/lib/goodput/runtime"},
        "mount": {"type": "path", "default": "/opt/goodput/runtime"},
        "mount_options": text,
        "release": text,
        "dynamo": text,
        "lmcache": text,
        "python": text,
        "full": flag,
        "deep": flag,
        "timeout_seconds": {"type": "int", "default": 600},
        "proc_root": {"type": "path", "default": "/proc"},
        "sysfs_root": {"type": "path", "default": "/sys"},
        "etc_root": {"type": "path", "default": "/etc"},
    }


def free_bytes(directory: str) -> int:
    """Free bytes of the filesystem that holds ``directory`` or the nearest existing directory above it."""
    while not os.path.isdir(directory) and directory != "/":
        directory = os.path.dirname(directory)
    return shutil.disk_usage(directory).free


def record(params: dict[str, Any], memory: logic.Memory, check: bool) -> tuple[logic.Archive, bool]:
    """Remember the archive; it and whether something was written."""
    known = params["marks"] or {}
    trusted = logic.Memory(Path("/nonexistent"))
    if known.get("exists") and known.get("path") == params["archive"]:
        trusted.entries = {params["archive"]: {**known["marks"], "sha256": known["sha256"]}}
    archive = logic.look_at_archive(params["archive"], trusted)
    if not archive.exists or archive.sha256 != params["sha256"]:
        return archive, False
    if memory.recall(archive.path, archive.marks) == archive.sha256:
        return archive, False
    if not check:
        memory.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        memory.write(archive)
    return archive, True


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    if not re.fullmatch(r"[0-9a-f]{64}", params["sha256"]):
        module.fail_json(
            msg=f"found sha256 {params['sha256']!r}; required: 64 hexadecimal digits in lower case; fix: set "
            "runtime_sha256 to the first word of the archive's .sha256 file"
        )
    required = logic.Required(*(params[name] for name in ("sha256", "release", "dynamo", "lmcache", "python")))
    memory = logic.Memory(Path(params["directory"]) / "checked.json")
    changed, imports = False, ""
    try:
        if params["state"] == "recorded":
            archive, changed = record(params, memory, bool(module.check_mode))
        else:
            archive = logic.look_at_archive(params["archive"], memory, params["full"])
        proc, sysfs, etc = (Path(params[name]) for name in ("proc_root", "sysfs_root", "etc_root"))
        mount = logic.look_at_mount(params["mount"], params["archive"], params["mount_options"], proc, sysfs, etc)
        system = logic.look_at_system(platform.machine(), proc)
        if params["deep"] and mount.mounted:
            imports = logic.try_imports(params["mount"], params["timeout_seconds"])
        if params["state"] == "preflight":
            findings = logic.preflight(archive, mount, system, required, params["copied"])
        elif params["state"] == "recorded":
            findings = list(logic.judge_archive(archive, required, params["copied"]))
        else:
            findings = logic.verify(archive, mount, system, required, params["copied"], imports)
        module.exit_json(
            changed=changed,
            state="wrong" if findings else "ok",
            reason="\n".join(str(finding) for finding in findings),
            findings=[asdict(finding) for finding in findings],
            archive=asdict(archive),
            mount=asdict(mount),
            mount_current=logic.is_current(mount, archive) and mount.read_only,
            system={
                "machine": system.machine,
                "python": system.python,
                "missing_libraries": list(system.missing_libraries),
            },
            free_bytes=free_bytes(params["directory"]),
        )
    except OSError as error:
        module.fail_json(msg=f"runtime: {error.strerror}: {error.filename}. The task needs `become: true`.")


if __name__ == "__main__":
    main()
