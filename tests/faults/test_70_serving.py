"""Killed processes and rebooted guests: verify names what is away, and serving comes back without a play."""

from __future__ import annotations

import subprocess
import time

import pytest
from conftest import Pair

#: An emulated guest that starts everything at once needs minutes.
PATIENCE_SECONDS = 600


def serves_again(pair: Pair) -> float:
    """Wait until the serving layers are ok; returns seconds."""
    start = time.monotonic()
    while True:
        outcome, failures = pair.verify("lmcache", "dynamo")
        if outcome.rc == 0:
            return time.monotonic() - start
        if time.monotonic() - start > PATIENCE_SECONDS:
            pytest.fail(f"not serving after {PATIENCE_SECONDS} s: {failures}\n{outcome.text[-3000:]}")
        time.sleep(10)


@pytest.mark.fault("process killed")
def test_killed_processes_are_named_and_heal(pair: Pair) -> None:
    # Stopped, they stay away for as long as the verdict looks; killed, systemd has some of them back before.
    pair.sh("spark2", "systemctl stop goodput-lmcache goodput-worker")
    pair.sh("spark1", "systemctl stop goodput-frontend")
    outcome, failures = pair.verify("lmcache", "dynamo")
    assert outcome.rc in (1, 2)
    text = str(failures) + outcome.text
    assert "spark2" in text and "goodput-lmcache" in text and "goodput-frontend" in text, text[-4000:]
    pair.sh(
        "spark2",
        "systemctl start goodput-lmcache goodput-worker; systemctl kill -s KILL goodput-lmcache goodput-worker",
    )
    pair.sh("spark1", "systemctl start goodput-frontend; systemctl kill -s KILL goodput-frontend")
    serves_again(pair)


# The first node has the frontend and discovery: the other must find them again.
@pytest.mark.fault("guest rebooted")
@pytest.mark.parametrize("nodes", [("spark1",), ("spark1", "spark2")], ids=["one", "both"])
def test_rebooted_nodes_serve_again_with_no_play(pair: Pair, nodes: tuple[str, ...]) -> None:
    before = {node: pair.sh(node, "cat /proc/sys/kernel/random/boot_id") for node in nodes}
    for node in nodes:
        pair.sh(node, "systemd-run --on-active=1 systemctl reboot >/dev/null 2>&1")
    time.sleep(20)
    deadline = time.monotonic() + PATIENCE_SECONDS
    for node in nodes:
        while True:
            try:
                if pair.sh(node, "cat /proc/sys/kernel/random/boot_id") != before[node]:
                    break
            except (AssertionError, subprocess.TimeoutExpired):
                assert time.monotonic() < deadline, f"{node} did not come back"
            time.sleep(5)
    serves_again(pair)
