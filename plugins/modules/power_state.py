#!/usr/bin/python
# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Ansible's door to module_utils/power_sampling.py."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: power_state
short_description: What state power and clocks of a node are in, and why
version_added: 0.2.0
description:
  - Samples the GPU through C(nvidia-smi) and the thermal zones, looks for clock locks, programs on the GPU and a
    foreign NVML library, and gives exactly one RV(state) with its evidence.
  - Changes nothing and never fails for what it finds; the filter P(goodput.spark.power_gate#filter) judges.
  - Every call of C(nvidia-smi) has a time limit.
options:
  mode:
    description:
      - V(passive) samples what runs. V(load) makes its own load with cuBLAS, never beside a program that uses the GPU.
      - V(auto) is V(load) on a GPU that nobody uses, else V(passive). V(look) takes no samples.
    type: str
    choices: [auto, passive, load, look]
    default: auto
  seconds:
    description: How long to sample, at least 10.
    type: float
    default: 14
  warmup_seconds:
    description: How long the load runs before samples count.
    type: float
    default: 2
  interval_ms:
    description: Time between two samples in milliseconds.
    type: int
    default: 500
  gpu_index:
    description: Index of the GPU where there are several. A Spark has one.
    type: str
    default: ""
  smi:
    description: The program.
    type: str
    default: nvidia-smi
  smi_timeout_seconds:
    description: How long one answer of O(smi) may take.
    type: float
    default: 10
  load_command:
    description: A program that makes the load instead of the built-in one and prints the same JSON lines.
    type: list
    elements: str
    default: []
  library_directories:
    description: Where libcublas is, if neither in the loader's search nor under C(/usr/local/cuda).
    type: list
    elements: str
    default: []
  state_file:
    description: Where the role power keeps what the driver confirmed.
    type: path
    default: /var/lib/goodput/power/state.json
  verdict_file:
    description: The last recorded verdict.
    type: path
    default: /var/lib/goodput/power/verdict.json
  reuse_seconds:
    description: A recorded V(ok) of this boot, under the same lock and not older than this, is returned unmeasured.
    type: float
    default: 0
  thresholds:
    description:
      - Numbers that the verdict rests on, by name, such as C(latch_floor_mhz), C(latch_cap_ratio), C(latch_watts),
        C(busy_utilization_percent), C(busy_samples_min). RV(evidence) lists all of them.
    type: dict
    default: {}
  root:
    description: Where C(/etc), C(/usr) and C(/var) are read, for recorded trees.
    type: path
    default: /
  proc_root:
    description: Where C(/proc) is read.
    type: path
    default: /proc
  sysfs_root:
    description: Where C(/sys) is read.
    type: path
    default: /sys
attributes:
  check_mode:
    description: The module only reads. Its own load runs in check mode, too.
    support: full
  diff_mode:
    description: Nothing changes.
    support: none
author:
  - The goodput.spark authors (@goodput)
"""

EXAMPLES = r"""
- name: Judge power and clocks
  goodput.spark.power_state:
    mode: auto
  register: __power_state

- name: Sample a running model for a minute
  goodput.spark.power_state:
    mode: passive
    seconds: 60
"""

RETURN = r"""
state:
  description: >-
    One of V(ok), V(latched), V(thermal), V(power_brake), V(capped_by_lock), V(slow_memory), V(engine_stuck),
    V(inconclusive), V(no_gpu).
  returned: always
  type: str
reason:
  description: What was found, with numbers.
  returned: always
  type: str
remedy:
  description: What to do; empty if V(ok).
  returned: always
  type: str
lock:
  description: >-
    Whether our lock shows in the clocks: V(in_force) (under load at C(lock_held_ratio) of it or more), V(exceeded) (it
    is gone), V(not_reached) or V(unknown).
  returned: always
  type: str
evidence:
  description: Busy samples, their clocks and watts, reasons in words, temperatures, locks, bandwidth, thresholds.
  returned: always
  type: dict
measured:
  description: False if a recorded verdict was returned.
  returned: always
  type: bool
mode:
  description: What was done, V(passive), V(load) or V(look).
  returned: always
  type: str
samples:
  description: Every sample.
  returned: always
  type: list
  elements: dict
load:
  description: What the load computed, TFLOP/s and GB/s with median, min and max; C(stand_in) if nothing was computed.
  returned: always
  type: dict
gpu:
  description: Index, name, driver version, maximum clock in MHz.
  returned: always
  type: dict
gpus:
  description: How many GPUs there are.
  returned: always
  type: int
compute_apps:
  description: Programs that use the GPU.
  returned: always
  type: list
  elements: dict
foreign_locks:
  description: Units and scripts, not ours, that lock the clocks now or at boot, with the units that stop them.
  returned: always
  type: list
  elements: dict
foreign_nvml:
  description: What replaces the driver's libnvidia-ml.
  returned: always
  type: list
  elements: dict
own_lock:
  description: What the role power asked for, and what the driver said it took.
  returned: always
  type: dict
applied_mhz:
  description: Maximum of our lock as confirmed in this boot; null without one.
  returned: always
  type: float
unclean_boot:
  description: Whether the boot before this one ended without a shutdown; null if that is not known.
  returned: always
  type: bool
this_boot_ok:
  description: Whether the last conclusive verdict of this boot, now or earlier, was ok.
  returned: always
  type: bool
zones_c:
  description: Highest temperature of each thermal zone in °C.
  returned: always
  type: dict
silent_zones:
  description: Thermal zones that give no reading.
  returned: always
  type: list
  elements: str
governors:
  description: CPU frequency governors in use.
  returned: always
  type: list
  elements: str
sleep_targets_masked:
  description: Whether each sleep target is masked.
  returned: always
  type: dict
problem:
  description: Why there are no samples; empty if there are.
  returned: always
  type: str
problem_kind:
  description: V(missing), V(no_driver), V(hang), V(failed), V(format), V(load) or empty.
  returned: always
  type: str
as_root:
  description: Whether it ran as root.
  returned: always
  type: bool
boot_id:
  description: The boot.
  returned: always
  type: str
at_seconds:
  description: When it was measured, seconds since 1970.
  returned: always
  type: float
record:
  description: What belongs into O(verdict_file); empty if nothing was measured or its folder is not there.
  returned: always
  type: dict
"""

from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.goodput.spark.plugins.module_utils import power_sampling
from ansible_collections.goodput.spark.plugins.module_utils.power_clocks import STATE_FILE, VERDICT_FILE, Smi
from ansible_collections.goodput.spark.plugins.module_utils.power_verdict import ThresholdError, Thresholds

LEAST_SECONDS = 10.0


def argument_spec() -> dict[str, Any]:
    words: dict[str, Any] = {"type": "list", "elements": "str", "default": []}
    return {
        "mode": {"type": "str", "choices": ["auto", "passive", "load", "look"], "default": "auto"},
        "seconds": {"type": "float", "default": 14},
        "warmup_seconds": {"type": "float", "default": 2},
        "interval_ms": {"type": "int", "default": 500},
        "gpu_index": {"type": "str", "default": ""},
        "smi": {"type": "str", "default": "nvidia-smi"},
        "smi_timeout_seconds": {"type": "float", "default": 10},
        "load_command": words,
        "library_directories": words,
        "state_file": {"type": "path", "default": STATE_FILE},
        "verdict_file": {"type": "path", "default": VERDICT_FILE},
        "reuse_seconds": {"type": "float", "default": 0},
        "thresholds": {"type": "dict", "default": {}},
        "root": {"type": "path", "default": "/"},
        "proc_root": {"type": "path", "default": "/proc"},
        "sysfs_root": {"type": "path", "default": "/sys"},
    }


def main() -> None:
    module = AnsibleModule(argument_spec=argument_spec(), supports_check_mode=True)
    asked = module.params
    if asked["seconds"] < LEAST_SECONDS:
        module.fail_json(
            msg=f"found seconds {asked['seconds']:g}, required at least {LEAST_SECONDS:g}: less proves nothing"
        )
    if asked["interval_ms"] < 100 or asked["smi_timeout_seconds"] <= 0:
        module.fail_json(
            msg=f"found interval_ms {asked['interval_ms']}, smi_timeout_seconds {asked['smi_timeout_seconds']:g}; "
            "required at least 100 and more than 0"
        )
    try:
        limits = Thresholds.of(asked["thresholds"])
    except ThresholdError as problem:
        module.fail_json(msg=str(problem))
    options = power_sampling.Options(
        mode=asked["mode"],
        seconds=asked["seconds"],
        warmup_seconds=asked["warmup_seconds"],
        interval_ms=asked["interval_ms"],
        smi=Smi(asked["smi"], asked["smi_timeout_seconds"], asked["gpu_index"]),
        load_command=asked["load_command"],
        library_directories=asked["library_directories"],
        state_file=Path(asked["state_file"]),
        verdict_file=Path(asked["verdict_file"]),
        reuse_seconds=asked["reuse_seconds"],
        limits=limits,
        root=Path(asked["root"]),
        proc_root=Path(asked["proc_root"]),
        sysfs_root=Path(asked["sysfs_root"]),
    )
    module.exit_json(changed=False, **power_sampling.measure(options))


if __name__ == "__main__":
    main()
