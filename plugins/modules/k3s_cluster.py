#!/usr/bin/python
# Apache-2.0 (see LICENSE)
"""Ansible's door to module_utils/k3s_cluster.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: k3s_cluster
short_description: Ask the server of a K3s cluster about its nodes
version_added: 0.2.0
author: The goodput.spark authors
description:
  - Runs on the server as root.
  - V(verified) waits until the nodes are Ready and compares them with what was asked for, until all agrees or a minute
    has passed, because the API still says what was true before a restart; it changes nothing.
  - V(settled) waits, sets labels, which K3s itself does only when a node registers (other labels stay), and lets pods
    onto a node again that V(drained) closed, now or in a run that was broken off.
  - V(drained) moves the pods of O(nodes) away and lets no new ones in, if another node can take them and, where a graph
    serves, has a worker that is ready. A node that somebody else has cordoned stays so afterwards.
  - V(removed) takes O(nodes) out of the cluster, with the password that K3s keeps of them: they can join again.
  - V(alone) refuses a cluster that has other nodes than O(nodes), which would lose their server; it changes nothing.
  - V(offered) waits until the nodes offer resources of device plugins; for this O(nodes) has, by name, a dictionary of
    resource and amount (a number, or C(>0)).
  - V(probed) runs a pod on each of these nodes that asks for one of each rail, but not for the GPU, which may serve. It
    looks what it can open and lock, and takes it away. With O(versions) it asks what is in O(image) instead,
    C(lmcache.cuda_ops), C(nixl), versions, and the O(devices) that UCX lists; an image without C(ucx_info) can not be
    asked for those, which is a warning.
  - V(recreated) deletes the pods of O(pod_uids) whose controller makes them again, and names the others.
options:
  state:
    description: What to do, as above.
    type: str
    choices: [verified, settled, drained, removed, alone, recreated, offered, probed]
    default: verified
  nodes:
    description: By name, what a node must be (C(address), C(version), C(labels), C(taints), C(kubelet), C(server)).
    type: dict
    default: {}
  pod_uids:
    description: Pods to make again.
    type: list
    elements: str
    default: []
  image:
    description: Image of the pods of V(probed); it must be on the nodes.
    type: str
    default: ""
  versions:
    description: With V(probed), the version that the image must have of each Python package.
    type: dict
    default: {}
  devices:
    description: With O(versions), RDMA devices that C(ucx_info) must list in the image, if it is there.
    type: list
    elements: str
    default: []
  timeout_seconds:
    description: How long to wait for nodes to be Ready, or for pods to leave.
    type: int
    default: 300
attributes:
  check_mode:
    description: V(verified) and V(alone) change nothing anyway; skip the others.
    support: none
"""

EXAMPLES = r"""
- name: Verify the nodes
  goodput.spark.k3s_cluster:
    nodes:
      spark1: {address: 10.0.0.1, version: v1.36.4+k3s1, labels: {}, taints: [], kubelet: {}, server: false}
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
  description: Every check with C(check), C(ok), C(found), C(required) and C(remedy).
  type: list
  elements: dict
  returned: always
pods:
  description: Pods that were deleted to be made again.
  type: list
  elements: str
  returned: always
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import k3s_cluster as logic
from ansible_collections.goodput.spark.plugins.module_utils import kube_serving as serving_logic
from ansible_collections.goodput.spark.plugins.module_utils import runtime_image, serving
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from ansible_collections.goodput.spark.plugins.module_utils.kube_charts import GPU_PLUGIN, Chart


def argument_spec() -> dict[str, Any]:
    return {
        "state": {
            "type": "str",
            "choices": ["verified", "settled", "drained", "removed", "alone", "recreated", "offered", "probed"],
            "default": "verified",
        },
        "nodes": {"type": "dict", "default": {}},
        "pod_uids": {"type": "list", "elements": "str", "default": []},
        "image": {"type": "str", "default": ""},
        "versions": {"type": "dict", "default": {}},
        "devices": {"type": "list", "elements": "str", "default": []},
        "timeout_seconds": {"type": "int", "default": 300},
    }


def settled(kubectl: logic.Kubectl, wanted: dict[str, Any], timeout_seconds: int) -> bool:
    found = kubectl.wait_ready(list(wanted), timeout_seconds)
    changed = False
    for name, what in wanted.items():
        new = logic.label_changes(found[name], what["labels"])
        if new:
            kubectl("label", "--overwrite", "node", name, *(f"{key}={value}" for key, value in sorted(new.items())))
            changed = True
        if logic.is_drained_by_us(found[name]):
            kubectl("uncordon", name)
            kubectl("annotate", "node", name, f"{logic.DRAINED}-")
            changed = True
    return changed


def serves_elsewhere(kubectl: logic.Kubectl, names: list[str]) -> bool:
    """Whether clients can go to another node while the workers of these are away, or have none here to lose."""
    worker = f"{serving_logic.LABEL},{serving_logic.COMPONENT}={serving_logic.WORKER}"
    pods = logic.items(kubectl, "pods", "--all-namespaces", "-l", worker)
    ready = {pod["spec"].get("nodeName", "") for pod in pods if serving_logic.is_ready(pod)}
    return not ready or bool(ready - set(names))


def drained(kubectl: logic.Kubectl, names: list[str], timeout_seconds: int) -> bool:
    """Drain where another node can take the pods; alone, a node restarts with its pods on it.

    So does the last one that serves, for example while the worker of the node before it still loads its model: a worker
    fits on no other node, evicted it would be away for as long, and containers outlive a restart of K3s.
    """
    found = kubectl.nodes()
    others = [
        name
        for name, node in found.items()
        if name not in names and logic.condition(node, "Ready") == "True" and not node["spec"].get("unschedulable")
    ]
    # A node that is cordoned without our mark was cordoned by a person: whatever runs there is theirs to evict.
    names = [
        name
        for name in names
        if name in found and (not found[name]["spec"].get("unschedulable") or logic.is_drained_by_us(found[name]))
    ]
    if not others or not names or not serves_elsewhere(kubectl, names):
        return False
    kubectl("annotate", "--overwrite", "node", *names, f"{logic.DRAINED}=true")
    kubectl(
        "drain",
        "--ignore-daemonsets",
        "--delete-emptydir-data",
        f"--timeout={timeout_seconds}s",
        *names,
        timeout_seconds=timeout_seconds + 60,
    )
    return True


def members(kubectl: logic.Kubectl) -> list[str]:
    """Names of all nodes, for a reset, which has another way where nobody answers."""
    try:
        return list(kubectl.nodes())
    except K3sError as error:
        raise K3sError(
            "found no answer of the API; required: one, because the server knows its agents and a password of each; "
            "fix: journalctl -u k3s on the server; where the whole cluster is to go, reset with "
            f"goodput_reset_forget_objects=true\n{error}"
        ) from error


def removed(kubectl: logic.Kubectl, names: list[str]) -> bool:
    there = [name for name in members(kubectl) if name in names]
    if there:
        kubectl("delete", "node", *there)
    return bool(there)


def require_alone(kubectl: logic.Kubectl, names: list[str]) -> None:
    others = [name for name in members(kubectl) if name not in names]
    if others:
        raise K3sError(
            f"found {', '.join(others)} in the cluster and not in this run; required: no agent that loses its server; "
            "fix: run without --limit, or reset them first; k3s kubectl delete node NAME for one that is no more; "
            "where the whole cluster is to go, reset with goodput_reset_forget_objects=true"
        )


def offered(kubectl: logic.Kubectl, wanted: dict[str, Any], timeout_seconds: float) -> tuple[list[serving.Check], str]:
    """Rows, and what to say if they are not all ok. No GPU comes without its chart, so a failed one ends the wait."""
    chart = Chart(kubectl, GPU_PLUGIN)
    rows = logic.wait_resources(kubectl, wanted, timeout_seconds, useless=lambda: chart.problem()[1])
    lacking = serving.reason(rows)
    return rows, "\n".join([lacking, *chart.explained(), logic.troubles(kubectl)]) if lacking else ""


def question(versions: dict[str, str], devices: list[str]) -> logic.Question:
    """Asks what is in the runtime image."""
    return logic.Question(
        ["sh", "-c", 'python3 -c "$0"; exec sleep 600', runtime_image.PROBE],
        "\nend\n",
        lambda node, said, _resources: runtime_image.probe_checks(node, said, versions, devices),
        nvidia=True,
    )


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=False)
    params: dict[str, Any] = module.params
    state, wanted, timeout = params["state"], params["nodes"], params["timeout_seconds"]
    kubectl = logic.Kubectl()
    result: dict[str, Any] = {"changed": False, "checks": [], "pods": []}
    try:
        if state == "verified":
            result["checks"] = logic.wait_nodes(kubectl, wanted, timeout)
        elif state == "settled":
            result["changed"] = settled(kubectl, wanted, timeout)
        elif state == "drained":
            result["changed"] = drained(kubectl, list(wanted), timeout)
        elif state == "removed":
            result["changed"] = removed(kubectl, list(wanted))
        elif state == "alone":
            require_alone(kubectl, list(wanted))
        elif state == "offered":
            result["checks"], problem = offered(kubectl, wanted, timeout)
            if problem:
                raise K3sError(problem)
        elif state == "probed":
            asked = question(params["versions"], params["devices"]) if params["versions"] else logic.DEVICES
            result["checks"] = logic.probe(kubectl, params["image"], wanted, Path(module.tmpdir), timeout, asked)
        else:
            pods = kubectl.json("get", "pods", "--all-namespaces", "-o", "json")["items"]
            again, alone = logic.stale_pods(pods, params["pod_uids"])
            for name in again:
                namespace, _, pod = name.partition("/")
                kubectl("delete", "pod", "--namespace", namespace, pod)
            result |= {"changed": bool(again), "pods": again}
            if alone:
                result["checks"] = [
                    serving.row(
                        "pods with limited locked memory", ", ".join(alone), "none", "delete and make them again"
                    )
                ]
    except K3sError as error:
        module.fail_json(msg=str(error), state="failed", reason=str(error), **result)
    for text in runtime_image.not_asked(result["checks"]):
        module.warn(text)
    reason = serving.reason(result["checks"])
    if reason:
        module.fail_json(msg=reason, state="failed", reason=reason, **result)
    module.exit_json(state="ok", reason="", **result)


if __name__ == "__main__":
    main()
