"""L2: a filesystem of its own, mounted now and at every boot, that takes direct I/O and has room."""

from __future__ import annotations

import json
from typing import Any

import pytest

L2 = "/srv/goodput/l2"
STORE = f"{L2}/lmcache"
AGAIN = "run `ansible-playbook site.yml --tags nvme_l2`"
# Written, read back and compared past the page cache; the file is removed in any case.
ROUND_TRIP = (
    f'( f=$(mktemp -p {L2} .goodput-acceptance.XXXXXX) && trap \'rm -f "$f" "/run/goodput-acceptance"\' EXIT && '
    "dd if=/dev/urandom of=/run/goodput-acceptance bs=1M count=4 status=none && "
    'dd if=/run/goodput-acceptance of="$f" bs=1M oflag=direct status=none conv=fsync && '
    'dd if="$f" bs=1M iflag=direct status=none | cmp - /run/goodput-acceptance && stat -c %s "$f" )'
)


def look(sh: Any, host: Any) -> Any:
    """What the node says of L2; skips where the site has none, which the layer lmcache compares with the plan."""
    seen = sh(
        {
            "mount": f"findmnt --json --output TARGET,SOURCE,FSTYPE,OPTIONS,UUID --mountpoint {L2}",
            "fstab": f"findmnt --fstab --noheadings --output SOURCE,OPTIONS --target {L2}",
            "space": f"stat --file-system --format '%b %a %S' {L2}",
            "store": f"stat --format '%U %a %F' {STORE}",
            "trip": ROUND_TRIP,
            "disks": "lsblk --json --output NAME,PATH,TYPE,SERIAL,FSTYPE,LABEL,MOUNTPOINTS",
            "left": f"ls -A {L2}",
            "made": "cat /var/lib/goodput/manifest.d/nvme_l2.json",
        },
        node=host,
    )
    if seen["made"].rc:
        pytest.skip("the role nvme_l2 made nothing here: the plan has no L2")
    return seen


def own_filesystem(seen: Any) -> dict[str, Any]:
    """What findmnt shows at L2; skips where the site chose backend directory, which has no filesystem of its own."""
    if L2 in json.loads(seen["made"].stdout).get("data_paths", {}):
        pytest.skip("backend directory: L2 has no filesystem of its own")
    found: dict[str, Any] = json.loads(seen["mount"].stdout or '{"filesystems": [{}]}')["filesystems"][0]
    return found


def test_mount(host: Any, sh: Any, check: Any) -> None:
    "L2 is an XFS filesystem of its own, mounted with noatime"
    seen = look(sh, host)
    mount = own_filesystem(seen)
    check(mount.get("fstype", "not mounted"), "xfs", AGAIN, what=L2)
    options = mount.get("options", "").split(",")
    check(sorted({"rw", "noatime"} & set(options)), ["noatime", "rw"], AGAIN, what="options")
    check(L2.startswith(("/var/lib/rancher", "/var/lib/kubelet")), False, "choose another path", what="below K3s")


def test_boot(host: Any, sh: Any, check: Any) -> None:
    "The same filesystem is mounted at every boot, and a missing disk does not stop the boot"
    seen = look(sh, host)
    mount = own_filesystem(seen)
    source, _, options = seen["fstab"].stdout.strip().partition(" ")
    check(source, f"UUID={mount.get('uuid')}", AGAIN, what="/etc/fstab")
    check("nofail" in options.strip().split(","), True, AGAIN, what="nofail")


def test_round_trip(host: Any, sh: Any, check: Any) -> None:
    "What is written past the page cache is read back"
    seen = look(sh, host)
    found = seen["trip"].stdout.strip() or seen["trip"].stderr.strip()[-200:] or "different"
    check(found, str(4 * 1024 * 1024), "see `dmesg` on this node for errors of the disk", what="bytes read back")


def test_room(host: Any, sh: Any, check: Any) -> None:
    "L2 is not full"
    seen = look(sh, host)
    blocks, free, _size = (int(word) for word in seen["space"].stdout.split())
    full_percent = round(100 - 100 * free / blocks, 1)
    remedy = f"stop goodput-lmcache, delete what is under {STORE} (only a cache), start it again"
    check(full_percent, "less than 98 % full", remedy, ok=full_percent < 98, what=f"{L2} in per cent")


def test_store(host: Any, sh: Any, check: Any) -> None:
    "Only the serving account may use the folder of L2"
    check(look(sh, host)["store"].stdout.strip(), "goodput 750 directory", AGAIN, what=STORE)


def test_other_disks(host: Any, sh: Any, check: Any) -> None:
    "L2 is on a disk that holds nothing else"
    seen = look(sh, host)
    mount = own_filesystem(seen)
    source = mount.get("source", "")
    disks = json.loads(seen["disks"].stdout)["blockdevices"]
    same = next((disk for disk in disks if disk["path"] == source), None)
    found = [point for point in (same or {}).get("mountpoints", [L2]) if point]
    check(found, [L2], "see docs/nvme_l2.md", what=f"mounts of {source}")


def test_nothing_left(host: Any, sh: Any, check: Any) -> None:
    "The proofs left no file behind"
    found = [name for name in look(sh, host)["left"].stdout.split() if name.startswith(".goodput-")]
    check(found, [], f"delete them from {L2}", what=L2)
