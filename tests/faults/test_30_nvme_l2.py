"""Disks that must not be formatted, and a full L2."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from conftest import Pair

NODE = "spark2"
DISK = "/dev/disk/by-id/nvme-QEMU_NVMe_Ctrl_SPARK2L2"


def refusal(pair: Pair, *words: str, **extra: object) -> None:
    pair.role("nvme_l2", "preflight", "--limit", NODE, **extra).failed_with(*words)


def keep_checksum(pair: Pair) -> str:
    """Of the file on the second NVMe namespace, which nothing may touch."""
    script = "m=$(mktemp -d); mount -o ro /dev/disk/by-label/models $m; sha256sum $m/keep.bin; umount $m; rmdir $m"
    return pair.sh(NODE, script).split()[0]


# First: the tests below take the filesystem away.
@pytest.mark.fault("L2 full")
def test_full_l2_is_named_with_its_remedy(pair: Pair) -> None:
    free_bytes = int(pair.sh(NODE, "df -B1 --output=avail /srv/goodput/l2 | tail -1"))
    pair.sh(NODE, f"fallocate -l {free_bytes - (4 << 20)} /srv/goodput/l2/filler")
    try:
        outcome = pair.role("nvme_l2", "verify", "--limit", NODE)
        outcome.failed_with("free", "goodput-lmcache", "spark2")
        suite, failures = pair.verify("nvme_l2")
        assert suite.rc == 1 and any(f["node"] == NODE and f["remedy"] for f in failures), suite.text[-3000:]
    finally:
        pair.sh(NODE, "rm -f /srv/goodput/l2/filler")
    suite, _ = pair.verify("nvme_l2")
    suite.succeeded()


@pytest.fixture(scope="module")
def empty_disk(pair: Pair) -> Iterator[str]:
    """The node without its L2: serving stopped, the filesystem removed with consent, the disk empty."""
    before = keep_checksum(pair)
    pair.sh(NODE, "systemctl stop goodput-worker goodput-lmcache")
    pair.role("nvme_l2", "reset", "--limit", NODE, goodput_reset=True, goodput_reset_remove_data=True).succeeded()
    yield DISK
    pair.role("nvme_l2", "main", "--limit", NODE).succeeded()
    pair.role("lmcache", "main", "--limit", NODE).succeeded()
    pair.sh(NODE, "systemctl start goodput-worker")
    assert keep_checksum(pair) == before


@pytest.mark.fault("no consent")
def test_empty_disk_without_consent(pair: Pair, empty_disk: str) -> None:
    refusal(pair, "SPARK2L2", "empty", "nvme_l2_format_serial", nvme_l2_format_serial="")


@pytest.mark.fault("wrong serial")
def test_wrong_serial(pair: Pair, empty_disk: str) -> None:
    refusal(pair, "NOSUCH", "SPARK2L2", nvme_l2_format_serial="NOSUCH")


@pytest.mark.fault("disk with data")
def test_the_disk_with_a_filesystem_of_somebody_else(pair: Pair, empty_disk: str) -> None:
    refusal(pair, "SPARK2DATA", "ext4", "models", nvme_l2_format_serial="SPARK2DATA")


@pytest.mark.fault("partition table")
@pytest.mark.fault("LVM label")
@pytest.mark.fault("mounted disk")
@pytest.mark.parametrize(
    ("make", "undo", "word"),
    [
        ("apt-get -qq install parted >/dev/null; parted -s {d} mklabel gpt", "wipefs -qa {d}", "partition table"),
        ("mkfs.ext4 -qF {d}; mkdir -p /run/m; mount {d} /run/m", "umount /run/m; wipefs -qa {d}", "mount"),
        (
            "apt-get -qq install lvm2 >/dev/null; pvcreate -q {d} >/dev/null",
            "pvremove -q {d} >/dev/null; wipefs -qa {d}",
            "LVM",
        ),
    ],
    ids=["partition table", "mounted", "LVM"],
)
def test_a_disk_that_holds_something(pair: Pair, empty_disk: str, make: str, undo: str, word: str) -> None:
    pair.sh(NODE, make.format(d=empty_disk))
    try:
        refusal(pair, word, "SPARK2L2")
    finally:
        pair.sh(NODE, undo.format(d=empty_disk) + "; udevadm settle")
