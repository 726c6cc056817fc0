#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/kube_serving.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kube_serving
short_description: Wait for Dynamo's operator and its graph, and compare what runs with what was rendered
version_added: 0.4.0
author: The goodput.spark authors
description:
  - Runs on the server as root, through C(k3s kubectl).
  - V(platform_ready) waits for the operator's CRDs to be Established and its Deployments to be Available. If the time
    is over or the chart failed, the last log lines are in the failure.
  - V(drained) ends the workers of the graph if those of O(objects) are others than those placed before and the API
    takes all of O(objects), and waits until they are gone, at least their grace period. It changes nothing where no
    worker runs, and refuses PodMonitors where their CRD is missing.
  - V(ready) waits until the graph is Ready with all pods; else it says which component, which event, which log lines.
  - V(verified) compares arguments, variables and image of every container with O(objects), and the workers' nodes with
    O(nodes), until all agree or the time is over.
  - V(crds_absent) deletes the operator's CRDs, unless somebody else's graphs would go with them.
options:
  state:
    description: What to do, as above.
    type: str
    choices: [platform_ready, drained, ready, verified, crds_absent]
    required: true
  objects:
    description:
      - The objects of the part serving, of the filter P(goodput.spark.kube_objects#filter).
      - Without them V(ready) and V(verified) take those that were placed the last time.
    type: list
    elements: dict
    default: []
  nodes:
    description: Nodes that must have one worker each.
    type: list
    elements: str
    default: []
  placed:
    description: Where M(goodput.spark.k3s_objects) keeps the objects that it placed the last time.
    type: path
    default: /etc/goodput/kubernetes/serving.json
  timeout_seconds:
    description: How long to wait.
    type: int
    default: 600
attributes:
  check_mode:
    description: V(drained) and V(crds_absent) say what they would do; the others wait and read.
    support: full
  diff_mode:
    description: Nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Wait for the graph
  goodput.spark.kube_serving:
    state: ready
    objects: "{{ kube_serving_objects }}"
    timeout_seconds: 3600
"""

RETURN = r"""
state:
  description: C(ok) or C(failed).
  type: str
  returned: always
reason:
  description: All findings, one a line, each with found, required and fix.
  type: str
  returned: always
checks:
  description: With V(verified), every check with C(check), C(ok), C(found), C(required) and C(remedy).
  type: list
  elements: dict
  returned: always
done:
  description: What was done, in words.
  type: list
  elements: str
  returned: always
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import kube_serving as logic
from ansible_collections.goodput.spark.plugins.module_utils import serving
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.k3s_node import BINARY
from ansible_collections.goodput.spark.plugins.module_utils.k3s_objects import Placer
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError

STATES = ["platform_ready", "drained", "ready", "verified", "crds_absent"]


def argument_spec() -> dict[str, Any]:
    return {
        "state": {"type": "str", "choices": STATES, "required": True},
        "objects": {"type": "list", "elements": "dict", "default": []},
        "nodes": {"type": "list", "elements": "str", "default": []},
        "placed": {"type": "path", "default": "/etc/goodput/kubernetes/serving.json"},
        "timeout_seconds": {"type": "int", "default": 600},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    params: dict[str, Any] = module.params
    state, objects, timeout, check = params["state"], params["objects"], params["timeout_seconds"], module.check_mode
    kubectl = Kubectl()
    placer = Placer(kubectl, Path(params["placed"]))
    result: dict[str, Any] = {"changed": False, "checks": [], "done": []}
    try:
        if state in ("ready", "verified") and not objects:
            objects = json.loads(placer.former() or '{"items": []}')["items"]
        if state == "platform_ready":
            logic.wait_platform(kubectl, timeout)
        elif state == "drained":
            patience = max(timeout, logic.Graph.among(objects).grace_seconds + 60)
            if Path(BINARY).exists() and logic.drain(kubectl, objects, placer, patience, bool(check)):
                result |= {"changed": True, "done": ["ended the workers"]}
        elif state == "ready":
            logic.wait_graph(kubectl, objects, timeout)
        elif state == "verified":
            result["checks"] = logic.settled_checks(kubectl, objects, params["nodes"], timeout)
        elif Path(BINARY).exists():
            names = logic.remove_crds(kubectl, bool(check))
            result |= {"changed": bool(names), "done": [f"deleted CRD {name}" for name in names]}
    except (K3sError, OSError) as error:
        module.fail_json(msg=str(error), state="failed", reason=str(error), **result)
    reason = serving.reason(result["checks"])
    if reason:
        module.fail_json(msg=reason, state="failed", reason=reason, **result)
    module.exit_json(state="ok", reason="", **result)


if __name__ == "__main__":
    main()
