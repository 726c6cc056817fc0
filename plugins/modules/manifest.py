#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/manifest.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: manifest
short_description: Record what a role made on a node, and undo it
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Keeps one JSON document a role, C(/var/lib/goodput/manifest.d/ROLE.json), mode 0600.
  - V(claimed) goes before the first change of a role and saves the former state of every item that was not listed yet,
    with a backup of each former file under C(/var/lib/goodput/backup/ROLE/). The first former state is kept for ever,
    and an item that is no longer claimed stays listed.
  - V(recorded) goes last and writes down checksum, mode and owner of the listed files.
  - V(absent) puts the former state back, in reverse, and removes the manifest. Nothing unlisted is touched, and an item
    that another role lists, too, is left to that role.
  - Directories above a claimed path that are missing, or that another role lists, are listed by themselves.
options:
  role:
    description: Name of the role.
    type: str
    required: true
  state:
    description:
      - V(claimed), V(recorded) and V(absent) as above.
      - V(read) returns the manifest and the drift of its files, and never changes anything.
    type: str
    choices: [claimed, recorded, absent, read]
    default: claimed
  files:
    description: Files and symbolic links that the role writes. C(/etc/fstab) is refused, see O(mounts).
    type: list
    elements: path
    default: []
  directories:
    description: Directories that the role makes; removed only when empty.
    type: list
    elements: path
    default: []
  units:
    description:
      - systemd units that the role makes, starts, stops, enables or masks. A name without suffix means a service.
      - On V(absent) a unit that did not exist before is stopped and disabled; another one gets its former mask,
        enablement and activity back, and is reloaded or restarted if a file of this role changed under it.
    type: list
    elements: str
    default: []
  mounts:
    description: Mount points. On V(absent) they are unmounted, and only their C(/etc/fstab) lines put back or removed.
    type: list
    elements: path
    default: []
  sysctls:
    description: Kernel parameters whose running value is saved and put back.
    type: list
    elements: str
    default: []
  packages:
    description: Packages that the role installs. Only recorded, never removed.
    type: list
    elements: str
    default: []
  users:
    description: Users that the role makes. Removed on V(absent) if they did not exist before; home directories stay.
    type: list
    elements: str
    default: []
  data_paths:
    description:
      - Directories with data of the user. Their content is removed on V(absent) only with O(remove_data), and never if
        there was content before the role claimed them.
    type: list
    elements: path
    default: []
  volatile:
    description:
      - Listed files that a program of the role rewrites. With V(recorded) their content is not written down, so it is
        neither drift nor an edit of the user.
    type: list
    elements: path
    default: []
  remove_data:
    description:
      - Consent to remove the content of O(data_paths) on V(absent).
      - Without it a manifest stays that lists only the kept data, so that a later run can remove it.
    type: bool
    default: false
  root:
    description: Directory that stands for C(/). For tests.
    type: path
    default: /
attributes:
  check_mode:
    description: Says what would be done and changes nothing.
    support: full
  diff_mode:
    description: Shows the manifest before and after.
    support: full
"""

EXAMPLES = r"""
- name: Claim what this role makes
  goodput.spark.manifest:
    role: nvme_l2
    state: claimed
    mounts: [/srv/goodput/l2]
    data_paths: [/srv/goodput/l2]

- name: Record what is there now
  goodput.spark.manifest:
    role: nvme_l2
    state: recorded

- name: Undo what this role made
  goodput.spark.manifest:
    role: nvme_l2
    state: absent
    remove_data: "{{ nvme_l2_reset_remove_data }}"
"""

RETURN = r"""
path:
  description: Where the manifest is.
  type: str
  returned: always
manifest:
  description: The manifest after the task; null when there is none.
  type: dict
  returned: always
claimed:
  description: Items newly listed by V(claimed), for example C(file /etc/chrony/chrony.conf).
  type: list
  elements: str
  returned: always
recorded:
  description: Files whose recorded state was written by V(recorded).
  type: list
  elements: str
  returned: always
removed:
  description: Items that V(absent) removed.
  type: list
  elements: str
  returned: always
restored:
  description: Items that V(absent) put back.
  type: list
  elements: str
  returned: always
kept:
  description: Items that V(absent) left, each with C(item) and C(reason).
  type: list
  elements: dict
  returned: always
saved:
  description: Copies of files that somebody edited after the role wrote them.
  type: list
  elements: str
  returned: always
drift:
  description: With V(read), files that differ from what was recorded, each with C(path), C(found) and C(required).
  type: list
  elements: dict
  returned: always
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import manifest as logic


def argument_spec() -> dict[str, Any]:
    paths: dict[str, Any] = {"type": "list", "elements": "path", "default": []}
    names: dict[str, Any] = {"type": "list", "elements": "str", "default": []}
    return {
        "role": {"type": "str", "required": True},
        "state": {"type": "str", "choices": ["claimed", "recorded", "absent", "read"], "default": "claimed"},
        **{section: paths if section in logic.PATH_SECTIONS else names for section in logic.SECTIONS},
        "volatile": paths,
        "remove_data": {"type": "bool", "default": False},
        "root": {"type": "path", "default": "/"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    role, check = params["role"], bool(module.check_mode)
    host = logic.Host(root=params["root"])
    try:
        if params["state"] == "claimed":
            result = logic.claim(host, role, {section: params[section] for section in logic.SECTIONS}, check)
        elif params["state"] == "recorded":
            result = logic.record(host, role, check, params["volatile"])
        elif params["state"] == "absent":
            result = logic.undo(host, role, params["remove_data"], check)
        else:
            result = logic.read(host, role)
    except logic.ManifestError as error:
        module.fail_json(msg=f"manifest of role {role}: {error}")
    except OSError as error:
        module.fail_json(
            msg=f"manifest of role {role}: {error.strerror}: {error.filename}. The task needs `become: true`."
        )
    for text in logic.warnings(result):
        module.warn(text)
    path = logic.manifest_path(role)
    answer: dict[str, Any] = {
        "changed": result.changed,
        "path": path,
        "manifest": result.after,
        "claimed": result.claimed,
        "recorded": result.recorded,
        "removed": result.removed,
        "restored": result.restored,
        "kept": result.kept,
        "saved": result.saved,
        "drift": result.drift,
    }
    if result.changed:
        answer["diff"] = {
            "before_header": path,
            "after_header": path,
            "before": logic.dump(result.before),
            "after": logic.dump(result.after),
        }
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
