"""The L2 directory taken away, made read-only, deleted, and one object cut short: named, healed, nothing else lost."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from conftest import Pair
from watch import overridden, proof, restart, seed, stored

NODE = "spark2"
MOUNT = "/srv/goodput/l2"


@pytest.fixture(scope="module")
def objects(pair: Pair) -> Iterator[dict[str, str]]:
    """Stored before the faults."""
    names = seed(pair, NODE)
    yield stored(pair, NODE)
    pair.sh(NODE, f"rm -f {' '.join(names)}")


def named_then_healed(pair: Pair, words: str, heal: str) -> None:
    suite, failures = pair.verify("nvme_l2", "lmcache")
    mine = [failure for failure in failures if failure["node"] == NODE]
    assert suite.rc == 1 and words in str(mine) and all(failure["remedy"] for failure in mine), suite.text[-3000:]
    pair.sh(NODE, heal)
    suite, _ = pair.verify("nvme_l2", "lmcache")
    suite.succeeded()


@pytest.mark.fault("L2 unmounted")
def test_unmounted_l2_is_named(pair: Pair, objects: dict[str, str]) -> None:
    pair.sh(NODE, f"umount {MOUNT}")
    named_then_healed(pair, "not mounted", f"mount {MOUNT}")
    assert stored(pair, NODE) == objects


@pytest.mark.fault("L2 read-only")
def test_read_only_l2_is_named(pair: Pair, objects: dict[str, str]) -> None:
    pair.sh(NODE, f"mount -o remount,ro {MOUNT}")
    named_then_healed(pair, "rw", f"mount -o remount,rw {MOUNT}")
    assert stored(pair, NODE) == objects


@pytest.mark.fault("L2 object cut short")
def test_a_short_object_goes_at_the_next_start(pair: Pair, objects: dict[str, str]) -> None:
    short = sorted(objects)[0]
    pair.sh(NODE, f"truncate -s 4096 {short}")
    restart(pair, NODE)
    report = json.loads(pair.sh(NODE, "cat /run/goodput-lmcache/l2.json"))
    assert report["state"] == "warm" and [short.rpartition("/")[2]] == report["partial"], report
    assert stored(pair, NODE) == {name: digest for name, digest in objects.items() if name != short}


@pytest.mark.fault("L2 directory deleted")
def test_a_deleted_directory_is_named_and_made_again(pair: Pair, objects: dict[str, str]) -> None:
    directory = sorted(objects)[0].rpartition("/")[0]
    pair.sh(NODE, f"mv {directory} {MOUNT}/aside")
    suite, failures = pair.verify("lmcache")
    assert suite.rc == 1 and NODE in {failure["node"] for failure in failures}, suite.text[-3000:]
    restart(pair, NODE)
    pair.verify("lmcache")[0].succeeded()
    pair.sh(NODE, f"rm -rf {directory} && mv {MOUNT}/aside {directory}")


@pytest.mark.fault("L2 full of another arrangement")
def test_another_arrangements_cache_is_named_and_dropped_by_consent(pair: Pair, objects: dict[str, str]) -> None:
    before, former = stored(pair, NODE), "former_kv-auto_c256_sep_mocker-1_lmcache-1"
    free_bytes = int(pair.sh(NODE, f"df -B1 --output=avail {MOUNT} | tail -1"))
    pair.sh(NODE, f"mkdir {MOUNT}/{former}; fallocate -l {free_bytes - (64 << 20)} {MOUNT}/{former}/filler")
    try:
        pair.role("lmcache", "preflight", "--limit", NODE).failed_with(NODE, former, "lmcache_l2_drop_others", "GiB")
        assert "filler" in pair.sh(NODE, f"ls {MOUNT}/{former}")
        pair.role("lmcache", "main", "--limit", NODE, lmcache_l2_drop_others=[former]).succeeded()
        assert former not in pair.sh(NODE, f"ls {MOUNT}")
    finally:
        pair.sh(NODE, f"rm -rf {MOUNT}/{former}")
    assert before and stored(pair, NODE) == before


def test_the_proof_of_the_tiers_notices_an_empty_l2(pair: Pair) -> None:
    """What went down must come back after a restart: here every start loses it."""
    with overridden(pair, NODE, f"[Service]\nExecStartPre=/usr/bin/find {MOUNT} -name *.data -delete"):
        suite = proof(pair, "tiers")
    assert suite.rc == 1 and "tokens found after a restart" in suite.text, suite.text[-3000:]


@pytest.mark.fault("server of another arrangement")
def test_other_arguments_than_the_plan_are_named(pair: Pair) -> None:
    """Another chunk size and another hash on one node: its objects would be found by nobody else."""
    line = pair.sh(NODE, "systemctl cat goodput-lmcache | grep ^ExecStart=/usr/bin/python3").strip()
    changed = line.replace("--chunk-size 256", "--chunk-size 512 --hash-algorithm sha256_cbor")
    assert changed != line
    with overridden(pair, NODE, f"[Service]\nExecStart=\n{changed}"):
        suite, failures = pair.verify("lmcache")
        assert suite.rc == 1, suite.text[-3000:]
        assert any("sha256_cbor" in str(failure["found"]) for failure in failures if failure["node"] == NODE), failures
    pair.verify("lmcache")[0].succeeded()


@pytest.mark.fault("unit of another arrangement")
def test_a_stale_unit_is_named_and_removed(pair: Pair) -> None:
    unit = "/etc/systemd/system/goodput-coordinator.service"
    pair.sh(
        "spark1",
        f"printf '[Service]\\nExecStart=/bin/sleep infinity\\n' > {unit};"
        " systemctl daemon-reload; systemctl start goodput-coordinator",
    )
    suite, failures = pair.verify("lmcache")
    assert suite.rc == 1 and any("goodput-coordinator" in str(failure["found"]) for failure in failures), failures
    pair.play("playbooks/lmcache.yml").succeeded()
    left = pair.sh("spark1", f"ls {unit} 2>/dev/null || true; systemctl is-active goodput-coordinator || true")
    assert left.strip() == "inactive"
    pair.verify("lmcache")[0].succeeded()
