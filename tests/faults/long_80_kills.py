"""Serving processes killed and cut off with requests on their way: what a user notices; nothing stored is lost."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from conftest import Pair
from watch import Traffic, record, seed, stored, until, workers_listed

NODES = ("spark1", "spark2")
RAIL1 = "enP2p1s0f0np0"
READY = {
    "goodput-frontend": "curl -sf -m 5 --noproxy '*' http://127.0.0.1:8000/v1/models | grep -q owned_by",
    "goodput-etcd": "curl -sf -m 5 --noproxy '*' http://127.0.0.1:2379/health | grep -q true",
    "goodput-worker": "systemctl is-active -q goodput-worker",
    "goodput-lmcache": "curl -sf -m 5 --noproxy '*' http://ADDRESS:9500/healthcheck",
}
# The one frontend is the only way in, so its clients notice; the others have somebody who steps in.
KILLS = [
    ("spark1", "goodput-frontend"),
    ("spark1", "goodput-worker"),
    ("spark2", "goodput-worker"),
    ("spark1", "goodput-lmcache"),
    ("spark2", "goodput-lmcache"),
    ("spark1", "goodput-etcd"),
]


@pytest.fixture(scope="module", autouse=True)
def objects(pair: Pair) -> Iterator[None]:
    """Something in L2 on both nodes that a fault could lose."""
    names = {node: seed(pair, node) for node in NODES}
    yield
    for node in NODES:
        pair.sh(node, f"rm -f {' '.join(names[node])}")


@pytest.mark.fault("process killed under load")
@pytest.mark.parametrize(("node", "unit"), KILLS, ids=[f"{unit}-{node}" for node, unit in KILLS])
def test_a_killed_process_is_started_again(pair: Pair, node: str, unit: str) -> None:
    traffic, restarts = Traffic(pair), f"systemctl show -P NRestarts {unit}"
    before = {each: stored(pair, each) for each in NODES}
    known = int(pair.sh(node, restarts))
    traffic.start()
    pair.sh(node, f"systemctl kill -s KILL {unit}")
    ready = READY[unit].replace("ADDRESS", pair.hosts[node]["goodput_management_address"])
    seconds = until(pair, node, f"[ $({restarts}) -gt {known} ] && {ready}")
    traffic.wait(lambda rows: workers_listed(pair) == len(NODES), "both workers in /health")
    seen = traffic.stop()
    after = {each: stored(pair, each) for each in NODES}
    lost = sum(after[each].get(name) != digest for each in NODES for name, digest in before[each].items())
    record(f"kill -9 {unit} on {node}", seen, seconds, lost)
    assert lost == 0 and all(before.values())
    if unit != "goodput-frontend":
        assert seen.failed == 0, seen


@pytest.mark.fault("discovery away")
def test_serving_outlives_a_minute_without_discovery(pair: Pair) -> None:
    traffic = Traffic(pair)
    traffic.start()
    pair.sh("spark1", "systemctl stop goodput-etcd && sleep 60 && systemctl start goodput-etcd")
    seconds = until(pair, "spark1", READY["goodput-etcd"])
    traffic.wait(lambda rows: workers_listed(pair) == len(NODES), "both workers in /health", seconds=600)
    seen = traffic.stop()
    record("etcd stopped for a minute", seen, seconds, None)
    # Workers leave when their lease is over and come back by themselves: never much longer than the minute.
    assert seen.silence_seconds < 180, seen


@pytest.mark.fault("discovery's data damaged")
def test_discovery_starts_without_data_that_it_can_not_read(pair: Pair) -> None:
    data = "/var/lib/goodput/etcd"
    traffic = Traffic(pair)
    traffic.start()
    try:
        pair.sh(
            "spark1",
            f"systemctl stop goodput-etcd; rm -rf {data}/damaged; truncate -s 100 {data}/member/snap/db;"
            " systemctl start --no-block goodput-etcd",
        )
        seconds = until(pair, "spark1", f"[ -d {data}/damaged ] && {READY['goodput-etcd']}")
        # By then the leases of before are over, and who is listed has registered again.
        time.sleep(30)
        traffic.wait(lambda rows: workers_listed(pair) == len(NODES), "both workers in /health", seconds=600)
        seen = traffic.stop()
        assert "put aside" in pair.sh("spark1", "journalctl -q --no-pager -b -u goodput-etcd -g 'put aside'")
    finally:
        pair.sh("spark1", f"rm -rf {data}/damaged")
    record("etcd's data damaged", seen, seconds, None)


@pytest.mark.fault("management network cut")
def test_a_cut_management_network_heals(pair: Pair) -> None:
    traffic = Traffic(pair)
    traffic.start()
    # Packets of the other node are dropped on its management interface; SSH comes in from elsewhere.
    pair.sh(
        "spark2",
        "systemd-run -q --collect --unit fault-cut sh -c 'iptables -I INPUT -s 10.77.0.1 -j DROP;"
        " iptables -I OUTPUT -d 10.77.0.1 -j DROP; sleep 30; iptables -D INPUT -s 10.77.0.1 -j DROP;"
        " iptables -D OUTPUT -d 10.77.0.1 -j DROP'",
    )
    until(pair, "spark2", "! systemctl is-active -q fault-cut")
    traffic.wait(lambda rows: workers_listed(pair) == len(NODES), "both workers in /health", seconds=600)
    seen = traffic.stop()
    record("management network of spark2 cut for 30 s", seen, 30, None)
    assert seen.failed == 0, seen


@pytest.mark.fault("rail cut under load")
def test_a_cut_rail_disturbs_no_request_and_heals(pair: Pair) -> None:
    before = stored(pair, "spark2")
    traffic = Traffic(pair)
    traffic.start()
    pair.sh("spark2", f"ip link set {RAIL1} down")
    outcome, failures = pair.verify("rdma")
    assert outcome.rc == 1 and any(RAIL1 in str(each) and each["node"] == "spark2" for each in failures), failures
    pair.sh("spark2", f"sleep 15; ip link set {RAIL1} up")
    begin = time.monotonic()
    while pair.verify("rdma")[0].rc:
        assert time.monotonic() - begin < 120, pair.verify("rdma")[0].text[-3000:]
    seconds, seen = time.monotonic() - begin, traffic.stop()
    after = stored(pair, "spark2")
    lost = sum(after.get(name) != digest for name, digest in before.items())
    record("rail 1 of spark2 down", seen, seconds, lost)
    # Without peers no request and no stored byte crosses the rails, and none may depend on them.
    assert before and seen.failed == 0 and lost == 0, seen


@pytest.mark.fault("clock jump")
def test_a_clock_that_jumps_an_hour_disturbs_nobody(pair: Pair) -> None:
    traffic = Traffic(pair)
    traffic.start()
    pair.sh("spark2", "systemctl stop chrony; date -s '+1 hour' >/dev/null; sleep 20")
    pair.sh("spark2", "date -s '-1 hour' >/dev/null; systemctl start chrony")
    seen = traffic.stop()
    record("clock of spark2 an hour ahead for 20 s", seen, 0, None)
    assert seen.failed == 0 and workers_listed(pair) == len(NODES), seen


@pytest.mark.fault("power cut")
def test_a_power_cut_leaves_the_other_node_serving(pair: Pair) -> None:
    """At once and without a sync, as when the plug is pulled; the node then boots by itself."""
    before = stored(pair, "spark2")
    boot = pair.sh("spark2", "cat /proc/sys/kernel/random/boot_id")
    traffic = Traffic(pair)
    traffic.start()
    pair.sh("spark2", "echo 1 > /proc/sys/kernel/sysrq; (sleep 1; echo b > /proc/sysrq-trigger) >/dev/null 2>&1 &")
    begin = time.monotonic()
    traffic.wait(lambda rows: workers_listed(pair) == 1, "the router to leave the dead worker", seconds=120)
    until(pair, "spark2", f"[ $(cat /proc/sys/kernel/random/boot_id) != {boot.strip()} ]")
    traffic.wait(lambda rows: workers_listed(pair) == len(NODES), "both workers in /health", seconds=600)
    seconds = time.monotonic() - begin
    seen = traffic.stop()
    address = pair.hosts["spark2"]["goodput_management_address"]
    until(pair, "spark2", READY["goodput-lmcache"].replace("ADDRESS", address))
    after = stored(pair, "spark2")
    lost = [name for name, digest in before.items() if after.get(name) != digest]
    record("power cut of spark2", seen, seconds, len(lost))
    # Requests on the dead node are sent to the other one.
    assert before and not lost and seen.silence_seconds < 60, (lost, seen)
