#!/usr/bin/python
# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Thin module over module_utils/rdma_proof.py."""

from __future__ import annotations

DOCUMENTATION = r"""
module: rdma_proof
short_description: Run ib_write_bw over both rails at once and read the counters
description:
  - One part of a proof on one node. V(serving) starts a server a rail and returns, V(measured) on the other
    node runs the
    clients of all rails at once, V(collected) on the first node ends the servers.
  - Each part returns counters; the filter P(goodput.spark.rdma_verdict#filter) judges them.
  - The GID index is found at the moment of use, never pinned. Messages are 64 KiB, because ib_write_bw on GB10
    fails above.
  - The servers are transient units on ports 18515 and 18516 and end by themselves.
version_added: 0.1.0
options:
  state:
    description: The part to run.
    type: str
    choices: [serving, measured, collected]
    required: true
  plan:
    description: This node's plan, from the filter P(goodput.spark.rail_plan#filter).
    type: dict
    required: true
  server:
    description: Name of the serving node, one of the peers in O(plan). Needed for V(measured).
    type: str
    default: ""
  seconds:
    description: Duration of the run; the first and last two seconds do not count.
    type: int
    default: 10
  queue_pairs:
    description: Queue pairs per rail.
    type: int
    default: 4
  wait_seconds:
    description: How long to wait for a server to listen, and beyond O(seconds) for a client to end.
    type: int
    default: 30
  sysfs_root:
    description: Where sysfs is.
    type: path
    default: /sys
  proc_root:
    description: Where procfs is.
    type: path
    default: /proc
attributes:
  check_mode:
    description: Does nothing in check mode, since there is nothing to prove yet.
    support: full
author:
  - The goodput.spark authors
"""

EXAMPLES = r"""
- name: Start the servers
  goodput.spark.rdma_proof:
    state: serving
    plan: "{{ __rdma_plan }}"
  register: __serving
"""

RETURN = r"""
part:
  description:
    - For V(serving) before; for V(measured) before, after, outputs, window and seconds; for V(collected)
      after. All with node.
  returned: always
  type: dict
state:
  description: V(ok), or V(failed) if this part could not run; then RV(reason) names the rail.
  returned: always
  type: str
reason:
  description: Why it failed.
  returned: always
  type: str
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import rdma_proof


def argument_spec() -> dict[str, Any]:
    return {
        "state": {"type": "str", "choices": ["serving", "measured", "collected"], "required": True},
        "plan": {"type": "dict", "required": True},
        "server": {"type": "str", "default": ""},
        "seconds": {"type": "int", "default": 10},
        "queue_pairs": {"type": "int", "default": 4},
        "wait_seconds": {"type": "int", "default": 30},
        "sysfs_root": {"type": "path", "default": "/sys"},
        "proc_root": {"type": "path", "default": "/proc"},
    }


def main() -> None:
    module = AnsibleModule(
        argument_spec=argument_spec(),
        required_if=[("state", "measured", ("server",))],
        supports_check_mode=True,
    )
    params = module.params
    if module.check_mode:
        module.exit_json(changed=False, skipped=True, state="ok", reason="", part={})
    sysfs, proc = Path(params["sysfs_root"]), Path(params["proc_root"])
    rails: list[dict[str, Any]] = params["plan"]["rails"]
    node, seconds, pairs, wait_s = (
        params["plan"]["node"],
        params["seconds"],
        params["queue_pairs"],
        params["wait_seconds"],
    )
    if seconds <= 2 * rdma_proof.MARGIN_S:
        module.fail_json(
            msg=f"rdma_proof_seconds is {seconds}; it must be more than {2 * rdma_proof.MARGIN_S}, since ib_write_bw "
            f"leaves {rdma_proof.MARGIN_S} s out at either end"
        )

    def run(argv: list[str]) -> tuple[int, str, str]:
        rc, out, err = module.run_command(argv, environ_update={"LC_ALL": "C"})
        return int(rc), str(out), str(err)

    try:
        if params["state"] == "serving":
            part = rdma_proof.serve(rails, seconds, pairs, wait_s, run, sysfs, proc)
        elif params["state"] == "collected":
            part = rdma_proof.collect(rails, wait_s, run, sysfs, proc)
        else:
            addresses = [
                peer["address"] for rail in rails for peer in rail["peers"] if peer["node"] == params["server"]
            ]
            part = rdma_proof.measure(rails, addresses, seconds, pairs, wait_s, sysfs, proc)
    except (ValueError, OSError) as error:
        module.fail_json(
            msg=f"{node}: {error}. Run the verify part of the rdma role, it names the cause.",
            state="failed",
            reason=str(error),
            part={},
        )
    module.exit_json(changed=False, state="ok", reason="", part={"node": node, **part})


if __name__ == "__main__":
    main()
