"""The state of nodes that preflight must refuse, all findings of all nodes in one table."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from conftest import Pair

PREFLIGHT = "playbooks/preflight.yml"


@pytest.fixture
def wrong_nodes(pair: Pair) -> Iterator[None]:
    """Four faults at once: one table must name them all. Undone whatever happens."""
    first_id = pair.sh("spark1", "cat /etc/machine-id").strip()
    pair.sh("spark2", f"echo {first_id} >/run/same-id; mount --bind /run/same-id /etc/machine-id")
    pair.sh("spark2", "systemctl stop chrony; date -s '+1 hour' >/dev/null")
    # Python's server keeps the port for as long as the unit runs.
    pair.sh(
        "spark1",
        "systemctl stop goodput-frontend;"
        " systemd-run --unit=port-thief -q python3 -m http.server 8000 --bind 127.0.0.1;"
        " for i in $(seq 60); do ss -Hltn sport = :8000 | grep -q . && break; sleep 0.5; done",
    )
    pair.sh("spark2", "ip addr add 192.168.100.77/24 dev enP2p1s0f0np0")
    yield
    pair.sh("spark1", "systemctl stop port-thief; systemctl start goodput-frontend")
    pair.sh("spark2", "ip addr del 192.168.100.77/24 dev enP2p1s0f0np0", check=False)
    pair.sh("spark2", "umount /etc/machine-id; date -s '-1 hour' >/dev/null; systemctl start chrony")


@pytest.mark.fault("equal machine-ids")
@pytest.mark.fault("time offset")
@pytest.mark.fault("port taken")
@pytest.mark.fault("twins in one subnet")
def test_all_findings_of_all_nodes_in_one_table(pair: Pair, wrong_nodes: None) -> None:
    outcome = pair.play(PREFLIGHT)
    outcome.failed_with("machine-id", "spark1", "spark2")
    # An hour, and what two emulated guests' clocks differ by without it.
    ahead = re.search(r"([\d.]+) s ahead of spark1", outcome.text)
    assert ahead and float(ahead[1]) == pytest.approx(3600, abs=10), outcome.text[-4000:]
    outcome.failed_with("8000", "python3")
    outcome.failed_with("192.168.100", "enP2p1s0f0np0")


def test_the_nodes_are_fit_again(pair: Pair) -> None:
    pair.play(PREFLIGHT).succeeded()
