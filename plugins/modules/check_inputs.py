#!/usr/bin/python
# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
# The work is done by the action plugin of the same name, on the controller.

from __future__ import annotations

DOCUMENTATION = r"""
---
module: check_inputs
short_description: Check a site's inputs before any node is asked
version_added: 0.1.0
description:
  - Runs on the controller only and connects to no node.
  - Refuses misspelt variables with the nearest known name, values of the wrong type, unknown releases, profiles and
    platforms, names that can not be hostnames, and addresses used twice. All problems are listed at once.
  - A variable is looked at if it begins with C(goodput_) or with the name of a role of this collection. Known are the
    options and defaults of all roles and the variables of C(group_vars) and C(vars).
  - Text where an integer or a boolean belongs is refused, except from C(-e key=value), where everything is text.
options:
  nodes:
    description: Inventory names of the nodes, in order.
    type: list
    elements: str
    required: true
  release:
    description: Name of the release set.
    type: str
    required: true
  profile:
    description: Name of the profile; a path of a YAML file is left to the planner.
    type: str
  platform:
    description: Name of the platform.
    type: str
  whole_site:
    description:
      - Also look for what a run from stock to the first token needs on hardware and what is not set.
      - These findings are returned and do not fail the task, so that they can be shown with those of the nodes.
    type: bool
    default: false
  accept:
    description: Checks of O(whole_site) whose errors become warnings.
    type: list
    elements: str
    default: []
  foreign_variables:
    description: Variables that look like ours and are not.
    type: list
    elements: str
    default: []
attributes:
  action:
    description: Runs on the controller.
    support: full
  check_mode:
    description: Nothing changes.
    support: full
  diff_mode:
    description: Nothing changes.
    support: none
author:
  - The goodput.spark authors (@goodput)
"""

EXAMPLES = r"""
- name: Check the inputs
  goodput.spark.check_inputs:
    nodes: "{{ goodput_nodes }}"
    release: "{{ goodput_release }}"
    profile: "{{ goodput_profile }}"
    platform: "{{ goodput_platform }}"
  run_once: true
"""

RETURN = r"""
findings:
  description: Errors and warnings, each with node, check, found, required, fix and severity.
  returned: always
  type: list
  elements: dict
release_set:
  description: The release set's content, if the inputs are good.
  returned: always
  type: dict
msg:
  description: The findings as a table.
  returned: always
  type: str
"""
