"""Faults of the rails: each is named with node and rail, and the role heals what it owns."""

from __future__ import annotations

import pytest
from conftest import Pair

RAIL0, RAIL1 = "enp1s0f0np0", "enP2p1s0f0np0"


def refused_with(pair: Pair, *words: str) -> None:
    """The role's own verify names the fault; asked of both nodes."""
    pair.role("rdma", "verify").failed_with(*words, "Fix:")


def healed(pair: Pair) -> None:
    pair.role("rdma").succeeded()
    outcome, failures = pair.verify("rdma")
    assert outcome.rc == 0 and not failures, outcome.text[-3000:]


@pytest.mark.fault("rail down")
def test_rail_down(pair: Pair) -> None:
    pair.sh("spark2", f"ip link set {RAIL1} down")
    outcome, failures = pair.verify("rdma")
    assert outcome.rc == 1
    assert any(RAIL1 in str(f) and f["node"] == "spark2" and f["remedy"] for f in failures), failures
    refused_with(pair, "spark2 rail 1", "carrier")
    healed(pair)


@pytest.mark.fault("rail MTU")
@pytest.mark.fault("wrong peer address")
def test_mtu_of_one_rail_and_an_address_that_is_not_the_plans(pair: Pair) -> None:
    pair.sh("spark2", f"ip link set {RAIL1} mtu 1500")
    pair.sh("spark1", f"ip addr flush dev {RAIL0}; ip addr add 192.168.100.9/24 dev {RAIL0}")
    outcome = pair.role("rdma", "verify")
    outcome.failed_with("mtu, spark2 rail 1", "1500", "9000")
    outcome.failed_with("address, spark1 rail 0", "192.168.100.9", "192.168.100.1/24")
    healed(pair)


@pytest.mark.fault("rails crossed")
def test_rails_crossed(pair: Pair) -> None:
    pair.sh(
        "spark2",
        f"ip addr flush dev {RAIL0}; ip addr flush dev {RAIL1};"
        f"ip addr add 192.168.101.2/24 dev {RAIL0}; ip addr add 192.168.100.2/24 dev {RAIL1}",
    )
    outcome = pair.role("rdma", "verify")
    outcome.failed_with("spark2 rail 0", "192.168.101.2", "192.168.100.2/24", "Fix:")
    healed(pair)


@pytest.mark.fault("twins in one subnet")
def test_one_subnet_for_both_rails_is_refused(pair: Pair) -> None:
    outcome = pair.role("rdma", "preflight", rdma_rail_subnets=["192.168.100.0/24", "192.168.100.0/24"])
    outcome.failed_with("rdma_rail_subnets", "192.168.100.0/24")


@pytest.mark.fault("lost SSH")
def test_a_change_that_cuts_ssh_is_taken_back_by_the_node(pair: Pair) -> None:
    look = "sha256sum /etc/netplan/*; ip -4 -br addr show dev usr0"
    before = pair.sh("spark2", look)
    pair.play("tests/faults/lost_ssh.yml").failed_with("was undone")
    assert pair.sh("spark2", look) == before
