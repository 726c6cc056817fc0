"""One arrangement replaced by another: what runs is the new one alone, and the way back gives the same bytes."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest
from conftest import INVENTORY, Outcome, Pair
from watch import Traffic, overridden, proof, record, until, workers_listed

NODES = ("spark1", "spark2")
# What an arrangement leaves on a node, but for when it was written.
OURS = "cd / && find etc/systemd/system/goodput-* etc/goodput -type f | sort | xargs sha256sum"
PIDS = "for u in etcd frontend worker lmcache; do echo $u $(systemctl show -P MainPID goodput-$u); done"


def use(pair: Pair, profile: str, *arguments: str) -> Outcome:
    return pair.command("goodput", "profile", "use", profile, "-i", str(INVENTORY), *arguments)


def units(pair: Pair, node: str) -> set[str]:
    return set(pair.sh(node, "systemctl list-units --plain --no-legend 'goodput-*.service' | cut -d' ' -f1").split())


def deep(pair: Pair, layer: str) -> None:
    proof(pair, layer).succeeded()


def restart_frontend(pair: Pair) -> None:
    pair.sh("spark1", "systemctl restart goodput-frontend")
    until(pair, "spark1", "curl -sf -m 5 --noproxy '*' http://127.0.0.1:8000/v1/models | grep -q owned_by")
    begin = time.monotonic()
    while workers_listed(pair) < len(NODES):
        assert time.monotonic() - begin < 120, "both workers in /health"
        time.sleep(1)


@pytest.fixture(scope="module", autouse=True)
def former(pair: Pair) -> Iterator[dict[str, str]]:
    """sha256 of everything of ours on each node before the first switch."""
    yield {node: pair.sh(node, OURS) for node in NODES}
    choice = INVENTORY / "group_vars/sparks/zz-goodput-profile.yml"
    if choice.exists():
        use(pair, "virtual").succeeded()
        choice.unlink()


def test_peers_read_from_each_other_and_outlive_the_coordinator(pair: Pair, former: dict[str, str]) -> None:
    use(pair, "virtual-p2p").succeeded()
    assert "goodput-coordinator.service" in units(pair, "spark1")
    deep(pair, "peers")
    # While the coordinator is away each server goes on alone; both find each other again when it is back.
    address = pair.hosts["spark1"]["goodput_management_address"]
    state = f"curl -sf -m 5 --noproxy '*' http://{address}:9500/status | grep -q"
    pair.sh("spark1", "systemctl stop goodput-coordinator")
    until(pair, "spark1", f'{state} \'"p2p_state": *"unregistered"\'')
    alone = proof(pair, "peers")
    assert alone.rc == 1 and "unregistered" in alone.text, alone.text[-3000:]
    pair.sh("spark1", "systemctl start goodput-coordinator; systemctl kill -s KILL goodput-coordinator")
    until(pair, "spark1", f'{state} \'"p2p_state": *"registered"\'')
    deep(pair, "peers")


def test_the_router_alone_and_back_gives_the_same_bytes(pair: Pair, former: dict[str, str]) -> None:
    traffic = Traffic(pair)
    traffic.start()
    use(pair, "virtual-router").succeeded()
    seen = traffic.stop()
    record("profile use virtual-router", seen, 0, None)
    # The frontend's own restart turns clients away at the door (404: before it has heard of the model again); nothing
    # that it took in is lost.
    assert all(any(word in problem for word in ("refused", "404", "503")) for problem in seen.problems), seen
    for node in NODES:
        assert not units(pair, node) & {"goodput-lmcache.service", "goodput-coordinator.service"}
    use(pair, "virtual").succeeded()
    assert {node: pair.sh(node, OURS) for node in NODES} == former


@pytest.mark.fault("router without KV events")
@pytest.mark.parametrize("mode", ["events off", "load alone"], ids=["events off", "round robin"])
def test_a_router_that_does_not_look_at_caches_is_named(pair: Pair, mode: str) -> None:
    folder = "/etc/systemd/system/goodput-frontend.service.d"
    text = "[Service]\nEnvironment=DYN_ROUTER_USE_KV_EVENTS=false"
    if mode == "load alone":
        line = pair.sh("spark1", "systemctl cat goodput-frontend | grep ^ExecStart=").strip()
        text = f"[Service]\nExecStart=\n{line.replace('--router-mode kv', '--router-mode round-robin')}"
    pair.sh(
        "spark1", f"mkdir -p {folder}; cat > {folder}/somebody.conf <<'UNIT'\n{text}\nUNIT\nsystemctl daemon-reload"
    )
    try:
        restart_frontend(pair)
        # The processes alone are healthy: it takes requests to see the difference.
        layer = pair.verify("dynamo")[0] if mode == "events off" else proof(pair, "router")
        assert layer.rc == 1, layer.text[-3000:]
        print(layer.text[-1500:])
    finally:
        pair.sh("spark1", f"rm -r {folder}; systemctl daemon-reload")
        restart_frontend(pair)
    deep(pair, "router")


def test_a_smaller_cache_restarts_lmcache_alone_and_its_cap_holds(pair: Pair) -> None:
    def pids(node: str) -> dict[str, str]:
        return dict(line.split() for line in pair.sh(node, PIDS).splitlines())

    before = {node: pids(node) for node in NODES}
    smaller = '{"goodput_profile_set": {"lmcache.l1.size_gib": 0.1875, "lmcache.l2.capacity_gib": 0.0625}}'
    play = ("goodput", "site", "-i", str(INVENTORY), "--tags", "lmcache,dynamo,verdict")
    pair.command(*play, "-e", smaller).succeeded()
    for node in NODES:
        after = pids(node)
        assert after.pop("lmcache") != before[node]["lmcache"]
        assert after == {name: pid for name, pid in before[node].items() if name != "lmcache"}
    deep(pair, "capacity")
    # Without its eviction block the same server goes on beyond its cap, and the proof says so.
    line = pair.sh("spark1", "systemctl cat goodput-lmcache | grep ^ExecStart=/usr/bin/python3").strip()
    unbounded = re.sub(r',\\*"eviction\\*":{[^}]*}', "", line)
    assert unbounded != line
    with overridden(pair, "spark1", f"[Service]\nExecStart=\n{unbounded}"):
        suite = proof(pair, "capacity")
    assert suite.rc == 1 and "bytes" in suite.text, suite.text[-3000:]
    pair.command(*play).succeeded()


def test_l2_in_a_store_of_the_site(pair: Pair) -> None:
    """What LMCache stores in a Redis on loopback is there after its restart; the profile brings no files of its own."""
    install = "DEBIAN_FRONTEND=noninteractive apt-get install -yq redis-server"
    for node in NODES:
        pair.sh(node, f"{install} >/dev/null && systemctl start redis-server")
    try:
        use(pair, "virtual-resp").succeeded()
        deep(pair, "tiers")
        keys = int(pair.sh("spark1", "redis-cli dbsize").split()[-1])
        assert keys > 0, "the store is empty"
    finally:
        use(pair, "virtual").succeeded()
        for node in NODES:
            pair.sh(node, "DEBIAN_FRONTEND=noninteractive apt-get purge -yq --autoremove redis-server >/dev/null")
