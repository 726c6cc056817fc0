"""Power and clocks: locked before anything can load the GPU, asserted for ever, and judged under load in this boot."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest

AGAIN = "run `ansible-playbook site.yml --tags power`"
GATE = "run `ansible-playbook playbooks/power_gate.yml -e power_gate_reuse_seconds=0`"
UNIT, TIMER = "goodput-clocks.service", "goodput-clocks-reassert.timer"
# What loads a GPU. Those that are not on the node have nothing to be before.
LOADS = (
    "docker.service",
    "k3s.service",
    "goodput-lmcache.service",
    "goodput-worker.service",
    "goodput-frontend.service",
)
# The driver takes a pair a few MHz below the one that was asked for.
STEP_MHZ = 50
SLEEP = ("sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target", "suspend-then-hibernate.target")
# Files that call it; a unit that is disabled does not.
OTHERS = (
    "for f in $(grep -lrsE 'nvidia-smi.*(-lgc|--lock-gpu-clocks)' /etc/systemd/system /etc/rc.local /etc/cron.d); do "
    'case "$f" in *.service) systemctl -q is-enabled "${f##*/}" || continue;; esac; echo "$f"; done'
)
STARTED = "ActiveState,LoadState,ActiveEnterTimestampMonotonic,InactiveExitTimestampMonotonic"

pytestmark = pytest.mark.unit(UNIT)


def look(sh: Any, host: Any) -> Any:
    return sh(
        {
            "units": f"systemctl is-active {UNIT} {TIMER}; systemctl is-enabled {UNIT} {TIMER}",
            "before": f"systemctl show -P Before {UNIT}",
            "asked": f"systemctl show -P ExecStart {UNIT}",
            "times": f"systemctl show -p Id,{STARTED} {UNIT} {' '.join(LOADS)}",
            "booted": "systemctl show -P FinishTimestampMonotonic",
            "state": "cat /var/lib/goodput/power/state.json",
            "verdict": "cat /var/lib/goodput/power/verdict.json",
            "boot": "cat /proc/sys/kernel/random/boot_id",
            "clock": "nvidia-smi --query-gpu=clocks.sm --format=csv,noheader,nounits",
            "reassert": "systemctl show -P Result goodput-clocks-reassert.service",
            "others": OTHERS,
            "metrics": "cat /var/lib/node_exporter/textfile_collector/goodput-power.prom",
            "sleep": f"systemctl show --property LoadState --value {' '.join(SLEEP)}",
        },
        node=host,
    )


def test_units(host: Any, sh: Any, check: Any) -> None:
    "The clock lock and its timer run now and at boot"
    seen = look(sh, host)
    check(seen["units"].stdout.split(), ["active", "active", "enabled", "enabled"], AGAIN, what=f"{UNIT}, {TIMER}")
    check(seen["reassert"].stdout.strip(), "success", "journalctl -u goodput-clocks-reassert", what="last assertion")


def test_order(host: Any, sh: Any, check: Any) -> None:
    "systemd starts the lock before everything that loads the GPU, and did so when this node booted"
    seen = look(sh, host)
    ordered = set(seen["before"].stdout.split())
    check(sorted(set(LOADS) - ordered), [], AGAIN, what="not ordered after the lock")
    times = {}
    for block in seen["times"].stdout.split("\n\n"):
        values = dict(line.split("=", 1) for line in block.splitlines() if "=" in line)
        times[values.get("Id", "")] = values
    locked = int(times[UNIT]["ActiveEnterTimestampMonotonic"])
    if locked > int(seen["booted"].stdout or 0):
        # Made or changed later in this boot, when something may have been serving already.
        return
    for name in LOADS:
        unit = times.get(name, {})
        if unit.get("LoadState") == "loaded" and unit.get("ActiveState") == "active":
            begun = int(unit["InactiveExitTimestampMonotonic"])
            check(begun - locked, "0 or more microseconds after the lock", AGAIN, ok=begun >= locked, what=name)


def test_applied(host: Any, sh: Any, check: Any) -> None:
    "The driver confirmed the pair in this boot, and no clock is above it"
    seen = look(sh, host)
    asked = re.findall(r"--(?:min|max) (\d+)", seen["asked"].stdout)[:2]
    state = json.loads(seen["state"].stdout or "{}")
    applied = state.get("applied_mhz") or [0, 0]
    check(state.get("boot_id"), seen["boot"].stdout.strip(), AGAIN, what="boot of the confirmation")
    near = len(asked) == 2 and all(0 <= int(a) - b <= STEP_MHZ for a, b in zip(asked, applied, strict=True))
    check(applied, f"{asked}, or up to {STEP_MHZ} MHz below", AGAIN, ok=near, what="what the driver took")
    clock = float(seen["clock"].stdout.split()[0]) if seen["clock"].stdout.split() else -1.0
    limit = applied[1] + STEP_MHZ
    check(clock, f"0 to {limit}", "journalctl -u goodput-clocks-reassert", ok=0 <= clock <= limit, what="MHz now")


def test_one_owner(host: Any, sh: Any, check: Any) -> None:
    "No unit, boot script or cron table but ours calls nvidia-smi -lgc"
    seen = look(sh, host)
    foreign = [path for path in seen["others"].stdout.split() if "/goodput-" not in path]
    check(foreign, [], "power_replace_foreign, or take the call out by hand")


def test_verdict(host: Any, sh: Any, check: Any) -> None:
    "The node was judged in this boot and is ok"
    seen = look(sh, host)
    verdict = json.loads(seen["verdict"].stdout or "{}")
    remedy = verdict.get("remedy") or GATE
    check(verdict.get("boot_id"), seen["boot"].stdout.strip(), GATE, what="boot of the verdict")
    good = verdict.get("state") == "ok" or (verdict.get("state") == "inconclusive" and verdict.get("ok_in_this_boot"))
    check(f"{verdict.get('state')}: {verdict.get('reason')}", "ok in this boot", remedy, ok=bool(good), what="verdict")


def test_metrics(host: Any, sh: Any, check: Any) -> None:
    "node-exporter gets the lock and the verdict, in a file without timestamps"
    lines = [line for line in look(sh, host)["metrics"].stdout.splitlines() if not line.startswith("#")]
    bad = [line for line in lines if not re.fullmatch(r"\w+(\{[^}]*\})? [-+.0-9e]+", line)]
    check(bad, [], AGAIN, what="lines that are no sample")
    names = {re.split(r"[{ ]", line)[0] for line in lines}
    wanted = {"goodput_clock_configured_mhz", "goodput_clock_applied_mhz", "goodput_clock_reasserts_total"}
    check(sorted(wanted - names), [], AGAIN, what="missing series")


def test_sleep(host: Any, sh: Any, check: Any) -> None:
    "The node can not be put to sleep, which is a trigger of the power latch"
    states = look(sh, host)["sleep"].stdout.split()
    check(states, ["masked"] * len(SLEEP), AGAIN)
