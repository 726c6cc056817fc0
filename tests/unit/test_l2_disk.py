"""Which disk may become L2: everything that could hold data is refused with what was found on it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import l2_disk as l2

GIB = l2.GIB
UUID = "8f5e307a-51bc-4581-95bb-7fd54504cb6d"
NEW = "00000000-0000-4000-8000-000000000001"


def signatures(*entries: tuple[str, str | None, str | None]) -> str:
    """What ``wipefs --no-act --json`` prints (util-linux 2.38)."""
    return json.dumps(
        {
            "signatures": [
                {"device": "loop0", "offset": "0x0", "type": t, "uuid": u, "label": lab} for t, u, lab in entries
            ]
        }
    )


# Recorded from wipefs 2.38.1 on loop devices that mkfs, parted, pvcreate, mkswap made.
EXT4 = signatures(("ext4", "0ecd8b05-0b64-4285-b76b-d167c20799e6", "models"))
GPT = signatures(("gpt", None, None), ("gpt", None, None), ("PMBR", None, None))
MBR = signatures(("dos", None, None))
LVM = signatures(("LVM2_member", "4ns9YB-XyyK-rRCa-ISoO-86Zz-DyLh-bqrpRh", None))
SWAP = signatures(("swap", "1d69ed18-55f6-4491-87ee-3d17e2c578dc", None))
MDRAID = signatures(("linux_raid_member", "1f4d0a3c-2f6b-7b58-0d0c-7e1b3c6e4f55", "any:0"))
LUKS = signatures(("crypto_LUKS", "c6a0b0a6-8a0b-4a55-9c7f-61c0d6a5a8a1", None))
XFS_OURS = signatures(("xfs", UUID, "goodput-l2"))
EMPTY = '{\n   "signatures": [\n\n   ]\n}\n'


def block(name: str, serial: str | None = None, size_gib: float = 8, **more: Any) -> dict[str, Any]:
    """One device as ``lsblk --json --bytes`` prints it."""
    entry: dict[str, Any] = {
        "name": name,
        "path": f"/dev/{name}",
        "type": "disk",
        "size": int(size_gib * GIB),
        "serial": serial,
        "model": "QEMU NVMe Ctrl" if name.startswith("nvme") else None,
        "tran": "nvme" if name.startswith("nvme") else None,
        "rm": False,
        "ro": False,
        "fstype": None,
        "pttype": None,
        "mountpoints": [None],
    }
    return entry | more


def disk(name: str, serial: str | None = None, wipefs: str = EMPTY, **more: Any) -> l2.Disk:
    (found,) = l2.parse_lsblk(json.dumps({"blockdevices": [block(name, serial, **more)]}))
    return replace(found, signatures=l2.parse_wipefs(wipefs))


ROOT = disk(
    "nvme0n1",
    "S6P7NS0W",
    GPT,
    size_gib=3726,
    pttype="gpt",
    children=[
        block("nvme0n1p1", type="part", fstype="vfat", mountpoints=["/boot/efi"]),
        block("nvme0n1p2", type="part", fstype="ext4", mountpoints=["/"]),
    ],
)
L2 = disk("nvme0n1", "SPARK1L2")
DATA = disk("nvme1n1", "SPARK1DATA", EXT4, size_gib=4)


def wish(**more: Any) -> l2.Wish:
    usual = l2.Wish("device", "/srv/goodput/l2", 2 * GIB, free_floor_percent=2.0)
    return replace(usual, **more)


def decide(wanted: l2.Wish, facts: l2.Facts) -> l2.Decision:
    return l2.decide(wanted, facts, lambda: NEW)


def only(decision: l2.Decision) -> l2.Problem:
    assert decision.action == "refuse", decision
    assert len(decision.problems) == 1, decision.problems
    return decision.problems[0]


@pytest.mark.parametrize(
    "disks", [(L2, DATA), (disk("nvme1n1", "SPARK1L2"), disk("nvme0n1", "SPARK1DATA", EXT4, size_gib=4))]
)
def test_the_named_empty_disk_is_made_in_either_probe_order(disks: tuple[l2.Disk, ...]) -> None:
    decision = decide(wish(serial="SPARK1L2"), l2.Facts(disks=disks))
    assert (decision.action, decision.serial, decision.uuid) == ("make", "SPARK1L2", NEW)
    assert decision.device == next(d.path for d in disks if d.serial == "SPARK1L2")


@pytest.mark.parametrize(
    ("name", "text", "more", "expected"),
    [
        ("ext4", EXT4, {}, "an ext4 filesystem labelled models"),
        ("gpt", GPT, {"pttype": "gpt"}, "a partition table (gpt)"),
        ("gpt seen by udev only", EMPTY, {"pttype": "gpt"}, "a partition table (gpt)"),
        ("mbr", MBR, {}, "a partition table (dos)"),
        ("lvm", LVM, {"fstype": "LVM2_member"}, "an LVM physical volume"),
        ("mdraid", MDRAID, {}, "a member of a RAID array (mdraid)"),
        ("luks", LUKS, {}, "an encrypted volume (LUKS)"),
        ("swap signature", SWAP, {}, "swap space"),
        ("swap in use", SWAP, {"mountpoints": ["[SWAP]"]}, "swap in use"),
        ("filesystem seen by udev only", EMPTY, {"fstype": "btrfs"}, "a btrfs filesystem"),
        ("mounted", EXT4, {"mountpoints": ["/data"]}, "mounted at /data"),
        (
            "mounted partition",
            EMPTY,
            {"children": [block("nvme0n1p1", type="part", mountpoints=["/data"])]},
            "mounted at /data",
        ),
        ("partition", EMPTY, {"children": [block("nvme0n1p1", type="part")]}, "partitions nvme0n1p1"),
        ("dm-crypt holder", EMPTY, {"children": [block("vault", type="crypt")]}, "held by vault (crypt)"),
        (
            "lvm holder",
            LVM,
            {"children": [block("vg-home", type="lvm", mountpoints=["/home"])]},
            "held by vg-home (lvm)",
        ),
        ("raid holder", MDRAID, {"children": [block("md0", type="raid1")]}, "held by md0 (raid1)"),
        ("removable", EMPTY, {"rm": True}, "removable"),
        ("usb", EMPTY, {"tran": "usb"}, "attached by USB"),
        ("read-only", EMPTY, {"ro": True}, "read-only"),
    ],
)
def test_a_disk_with_content_is_refused_with_what_was_found(
    name: str, text: str, more: dict[str, Any], expected: str
) -> None:
    full = disk("nvme0n1", "SPARK1L2", text, **more)
    problem = only(decide(wish(serial="SPARK1L2"), l2.Facts(disks=(full, DATA))))
    assert expected in problem.found
    assert "SPARK1L2" in problem.found
    assert "nothing was changed" in problem.remedy


def test_a_disk_in_exclusive_use_or_unreadable_is_refused() -> None:
    for change, text in (
        ({"busy": True}, "in use"),
        ({"probe_error": "Operation not permitted"}, "Operation not permitted"),
    ):
        problem = only(decide(wish(serial="SPARK1L2"), l2.Facts(disks=(replace(L2, **change),))))
        assert text in problem.found


@pytest.mark.parametrize("name", ["loop0", "zram0", "ram0", "nbd0", "md127", "dm-0"])
def test_devices_without_a_medium_of_their_own_are_never_candidates(name: str) -> None:
    assert l2.empty_disks([disk(name, "X")]) == ()


def test_optical_drives_and_disks_without_medium_are_never_candidates() -> None:
    assert l2.empty_disks([disk("sr0", "CD", type="rom"), disk("sda", "CARD", size_gib=0)]) == ()


def test_without_consent_the_candidates_are_named_with_serial_size_and_model() -> None:
    problem = only(decide(wish(), l2.Facts(disks=(L2, DATA))))
    assert "nvme_l2_format_serial: SPARK1L2" in problem.remedy
    assert "/dev/nvme0n1 (serial SPARK1L2, 8.0 GiB, QEMU NVMe Ctrl): empty" in problem.found
    assert (
        "/dev/nvme1n1 (serial SPARK1DATA, 4.0 GiB, QEMU NVMe Ctrl): an ext4 filesystem labelled models" in problem.found
    )


def test_two_empty_disks_are_both_named_and_none_is_chosen() -> None:
    decision = decide(wish(), l2.Facts(disks=(L2, disk("nvme2n1", "OTHER"))))
    problem = only(decision)
    assert "SPARK1L2" in problem.remedy and "OTHER" in problem.remedy
    assert [d.serial for d in decision.candidates] == ["SPARK1L2", "OTHER"]


def test_a_wrong_serial_is_refused_and_the_right_one_named() -> None:
    problem = only(decide(wish(serial="SPARK9L2"), l2.Facts(disks=(L2, DATA))))
    assert problem.found.startswith("0 disks with serial SPARK9L2")
    assert "serial SPARK1L2" in problem.remedy


def test_the_serial_of_the_data_disk_is_refused_and_the_empty_disk_named() -> None:
    problem = only(decide(wish(serial="SPARK1DATA", required_bytes=GIB), l2.Facts(disks=(L2, DATA))))
    assert "an ext4 filesystem labelled models" in problem.found
    assert "serial SPARK1L2" in problem.remedy


def test_two_namespaces_with_one_serial_are_refused() -> None:
    problem = only(decide(wish(serial="SAME"), l2.Facts(disks=(disk("nvme0n1", "SAME"), disk("nvme0n2", "SAME")))))
    assert problem.found.startswith("2 disks with serial SAME")


def test_the_one_disk_of_a_stock_spark_is_refused_and_image_is_named() -> None:
    problem = only(decide(wish(), l2.Facts(disks=(ROOT,))))
    assert "nvme_l2_backend: image" in problem.remedy
    named = only(decide(wish(serial="S6P7NS0W"), l2.Facts(disks=(ROOT,))))
    assert "mounted at /boot/efi, /" in named.found and "partitions nvme0n1p1, nvme0n1p2" in named.found


def test_a_disk_too_small_for_the_plan_is_refused_with_both_sizes() -> None:
    problem = only(decide(wish(serial="SPARK1L2", required_bytes=int(7.95 * GIB)), l2.Facts(disks=(L2,))))
    assert "8.0 GiB" in problem.found and "8.09 GiB" in problem.required


def test_all_problems_are_reported_at_once() -> None:
    full = disk("nvme0n1", "SPARK1L2", EXT4, size_gib=1)
    decision = decide(
        wish(serial="SPARK1L2", mount_point="/var/lib/rancher/k3s/l2"),
        l2.Facts(disks=(full,), owner_exists=False, fstab_source="/dev/sdb1"),
    )
    assert len(decision.problems) == 5


OURS = disk("nvme0n1", "SPARK1L2", XFS_OURS, mountpoints=["/srv/goodput/l2"])
RECORD = l2.Record("device", UUID, "SPARK1L2", "/dev/nvme0n1", made=True)
MOUNTED = l2.Facts(
    disks=(OURS, DATA),
    record=RECORD,
    mount=l2.Mount("/dev/nvme0n1", "xfs", ("rw", "noatime"), 8 * GIB, 7 * GIB),
    mount_uuid=UUID,
    fstab_source=f"UUID={UUID}",
)


@pytest.mark.parametrize("serial", ["SPARK1L2", ""])
def test_our_own_filesystem_is_kept_also_without_consent(serial: str) -> None:
    decision = decide(wish(serial=serial), MOUNTED)
    assert (decision.action, decision.device, decision.uuid) == ("keep", "/dev/nvme0n1", UUID)


def test_our_filesystem_is_kept_after_the_disks_swapped_names() -> None:
    swapped = disk("nvme1n1", "SPARK1L2", XFS_OURS)
    decision = decide(
        wish(serial="SPARK1L2"), l2.Facts(disks=(swapped, disk("nvme0n1", "SPARK1DATA", EXT4)), record=RECORD)
    )
    assert (decision.action, decision.device) == ("keep", "/dev/nvme1n1")


def test_our_label_without_our_record_is_refused_and_can_be_adopted_by_uuid() -> None:
    facts = l2.Facts(disks=(replace(OURS, mountpoints=()),))
    problem = only(decide(wish(serial="SPARK1L2"), facts))
    assert f"nvme_l2_adopt_uuid: {UUID}" in problem.remedy
    assert decide(wish(serial="SPARK1L2", adopt_uuid=UUID), facts).action == "keep"


def test_our_filesystem_on_another_serial_than_asked_is_refused() -> None:
    problem = only(decide(wish(serial="OTHER"), replace(MOUNTED, disks=(OURS, disk("nvme2n1", "OTHER")))))
    assert "SPARK1L2" in problem.found and "OTHER" in problem.required


def test_a_copy_of_our_filesystem_is_refused() -> None:
    problem = only(decide(wish(), replace(MOUNTED, disks=(OURS, disk("nvme2n1", "COPY", XFS_OURS)))))
    assert "one disk with that UUID" in problem.required


def test_a_run_that_stopped_before_mkfs_goes_on_with_the_same_uuid() -> None:
    half = replace(RECORD, made=False)
    decision = decide(wish(serial="SPARK1L2"), l2.Facts(disks=(L2,), record=half))
    assert (decision.action, decision.uuid) == ("make", UUID)


def test_another_backend_over_an_existing_l2_is_refused() -> None:
    problem = only(decide(wish(backend="image"), MOUNTED))
    assert "backend device" in problem.found


def test_a_foreign_mount_at_the_mount_point_is_refused() -> None:
    problem = only(
        decide(
            wish(serial="SPARK1L2"),
            l2.Facts(disks=(L2, DATA), mount=l2.Mount("/dev/sdb", "ext4", ("rw",), GIB, GIB), mount_uuid="x"),
        )
    )
    assert "/dev/sdb (ext4) is mounted at /srv/goodput/l2" in problem.found


def test_files_that_a_mount_would_hide_are_refused() -> None:
    assert (
        "holds 3 entries" in only(decide(wish(serial="SPARK1L2"), l2.Facts(disks=(L2,), mount_point_entries=3))).found
    )


@pytest.mark.parametrize("path", ["/var/lib/rancher/k3s", "/var/lib/rancher/k3s/storage/l2", "/var/lib/kubelet/l2"])
def test_never_below_the_folders_that_k3s_empties(path: str) -> None:
    assert "uninstalling K3s" in only(decide(wish(serial="SPARK1L2", mount_point=path), l2.Facts(disks=(L2,)))).required
    link = l2.Facts(disks=(L2,), mount_point_real=path)
    assert "uninstalling K3s" in only(decide(wish(serial="SPARK1L2"), link)).required


def test_a_missing_account_is_refused_unless_it_is_not_asked_for() -> None:
    facts = l2.Facts(disks=(L2,), owner_exists=False)
    assert "no account goodput" in only(decide(wish(serial="SPARK1L2"), facts)).found
    assert decide(wish(serial="SPARK1L2", owner=""), facts).action == "make"


def test_a_full_l2_says_how_full_and_what_to_do() -> None:
    full = replace(MOUNTED, mount=l2.Mount("/dev/nvme0n1", "xfs", ("rw",), 8 * GIB, int(0.1 * GIB)))
    problem = only(decide(wish(), full))
    assert "98.8 % full" in problem.found and "goodput-lmcache" in problem.remedy
    assert l2.full_problem("/x", 100, 2, 2.0) is None
    assert l2.full_problem("/x", 100, 1, 2.0) is not None


# image

IMAGE = l2.Image(False, real_path="/srv/goodput/l2.img", parent_fstype="ext4", parent_free_bytes=100 * GIB)
MADE = replace(IMAGE, exists=True, size_bytes=4 * GIB, allocated_bytes=4 * GIB, signatures=l2.parse_wipefs(XFS_OURS))
IMAGE_RECORD = l2.Record("image", UUID, device="/srv/goodput/l2.img", made=True)


def image_wish(**more: Any) -> l2.Wish:
    return wish(backend="image", root_reserve_bytes=50 * GIB, **more)


def test_an_image_is_made_where_space_is_left_for_the_system() -> None:
    decision = decide(image_wish(), l2.Facts(disks=(ROOT,), image=IMAGE))
    assert decision.action == "make" and not decision.warnings
    assert decision.size_bytes - l2.overhead_bytes(decision.size_bytes) >= 2 * GIB
    short = only(decide(image_wish(), l2.Facts(image=replace(IMAGE, parent_free_bytes=52 * GIB))))
    assert "52.0 GiB are free" in short.found and "nvme_l2_root_reserve_gib 50.0" in short.required


def test_an_empty_disk_beside_an_image_is_mentioned() -> None:
    (warning,) = decide(image_wish(), l2.Facts(disks=(ROOT, disk("nvme1n1", "SPARE")), image=IMAGE)).warnings
    assert "nvme_l2_format_serial: SPARE" in warning


@pytest.mark.parametrize("fstype", ["tmpfs", "overlay", "nfs4", ""])
def test_an_image_where_space_can_not_be_reserved_is_refused(fstype: str) -> None:
    assert "reserve space" in only(decide(image_wish(), l2.Facts(image=replace(IMAGE, parent_fstype=fstype)))).required


def test_a_foreign_file_at_the_image_path_is_refused() -> None:
    foreign = replace(MADE, signatures=l2.parse_wipefs(EXT4))
    assert "did not make it" in only(decide(image_wish(), l2.Facts(image=foreign))).found
    assert "no filesystem" in only(decide(image_wish(), l2.Facts(image=replace(MADE, signatures=())))).found


def test_our_image_is_kept_and_its_holes_are_filled_again() -> None:
    assert decide(image_wish(), l2.Facts(image=MADE, record=IMAGE_RECORD)).action == "keep"
    holes = replace(MADE, allocated_bytes=3 * GIB)
    assert decide(image_wish(), l2.Facts(image=holes, record=IMAGE_RECORD)).action == "allocate"
    full = replace(holes, parent_free_bytes=GIB)
    assert "lost 1.0 GiB" in only(decide(image_wish(), l2.Facts(image=full, record=IMAGE_RECORD))).found


def test_an_image_too_small_for_a_larger_plan_is_refused() -> None:
    assert (
        "4.0 GiB" in only(decide(image_wish(required_bytes=5 * GIB), l2.Facts(image=MADE, record=IMAGE_RECORD))).found
    )


def test_an_image_under_k3s_is_refused() -> None:
    inside = replace(IMAGE, real_path="/var/lib/rancher/k3s/l2.img")
    assert "/var/lib/rancher/k3s" in only(decide(image_wish(), l2.Facts(image=inside))).required


# lv

GROUPS = l2.Volume({"vg0": 100 * GIB})


def lv_wish(**more: Any) -> l2.Wish:
    return wish(backend="lv", volume_group="vg0", **more)


def test_a_logical_volume_is_made_in_free_space_only() -> None:
    assert decide(lv_wish(), l2.Facts(volume=GROUPS)).device == "/dev/vg0/goodput_l2"
    assert "vg0 (1.0 GiB free)" in only(decide(lv_wish(), l2.Facts(volume=l2.Volume({"vg0": GIB})))).found
    assert "volume groups of this node: none" in only(decide(lv_wish(), l2.Facts())).found


def test_an_existing_logical_volume_is_refused_unless_ours() -> None:
    there = replace(GROUPS, exists=True, size_bytes=10 * GIB, signatures=l2.parse_wipefs(EXT4))
    assert "did not make it" in only(decide(lv_wish(), l2.Facts(volume=there))).found
    blank = replace(there, signatures=())
    assert "no filesystem" in only(decide(lv_wish(), l2.Facts(volume=blank))).found
    ours = replace(there, signatures=l2.parse_wipefs(XFS_OURS))
    record = l2.Record("lv", UUID, device="/dev/vg0/goodput_l2", made=True)
    assert decide(lv_wish(), l2.Facts(volume=ours, record=record)).action == "keep"
    assert decide(lv_wish(), l2.Facts(volume=blank, record=replace(record, made=False))).action == "make"


# directory


def test_a_directory_on_the_root_filesystem_is_warned_about() -> None:
    facts = l2.Facts(directory_mount="/", directory_free_bytes=10 * GIB)
    (warning,) = decide(wish(backend="directory"), facts).warnings
    assert "nvme_l2_backend: image" in warning
    assert not decide(wish(backend="directory"), replace(facts, directory_mount="/data")).warnings
    assert "1.0 GiB are free" in only(decide(wish(backend="directory"), replace(facts, directory_free_bytes=GIB))).found
    assert (
        decide(wish(backend="directory"), replace(facts, directory_free_bytes=GIB, directory_used_bytes=GIB)).action
        == "keep"
    )


# numbers and parsers


def test_space_for_a_cap() -> None:
    assert l2.required_gib(400) == 420.0
    assert l2.required_gib(2) == 2.1
    assert l2.required_gib(0) == 0
    with pytest.raises(ValueError, match="must not be below 0"):
        l2.required_gib(-1)


# device MiB, MiB available to files, as mkfs.xfs 6.1 made them with XFS_META
@pytest.mark.parametrize(
    ("mib", "available"),
    [(300, 220), (1024, 926), (8192, 8087), (102400, 102201), (430080, 429409), (4096000, 4089890)],
)
def test_overhead_bounds_what_xfs_was_measured_to_keep(mib: int, available: int) -> None:
    assert (mib - available) * l2.MIB <= l2.overhead_bytes(mib * l2.MIB)


@pytest.mark.parametrize("usable_gib", [0.3, 2.1, 420, 4000])
def test_a_device_of_the_computed_size_is_never_too_small(usable_gib: float) -> None:
    size = l2.device_bytes_for(int(usable_gib * GIB))
    assert size - l2.overhead_bytes(size) >= int(usable_gib * GIB)
    assert size % l2.MIB == 0


MOUNTINFO = """\
22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw,discard
30 22 259:1 / /srv/goodput/l2 rw,noatime shared:7 - xfs /dev/nvme0n1 rw,attr2,inode64,logbufs=8,noquota
"""


def test_mountinfo_and_fstab() -> None:
    found = l2.find_mount(MOUNTINFO, "/srv/goodput/l2")
    assert found is not None and found[0] == "/dev/nvme0n1" and "noatime" in found[2]
    assert l2.find_mount(MOUNTINFO, "/srv") is None
    assert l2.containing_mount(MOUNTINFO, "/srv/goodput/l2/lmcache") == ("/srv/goodput/l2", "xfs")
    assert l2.containing_mount(MOUNTINFO, "/srv/goodput/l2x") == ("/", "ext4")
    fstab = f"# comment /srv/goodput/l2\nUUID={UUID} /srv/goodput/l2 xfs noatime,nofail 0 0\n"
    assert l2.parse_fstab(fstab, "/srv/goodput/l2") == (f"UUID={UUID}", "noatime,nofail")
    assert l2.parse_fstab(fstab, "/srv") == ("", "")


def test_an_unknown_backend_names_the_choices() -> None:
    with pytest.raises(ValueError, match="device, image, lv, directory"):
        decide(wish(backend="zfs"), l2.Facts())


def test_the_result_of_a_module_is_plain_json() -> None:
    result = decide(wish(), l2.Facts(disks=(L2, DATA))).as_result()
    assert json.loads(json.dumps(result)) == result
    assert result["state"] == "refused" and "remedy: set nvme_l2_format_serial" in result["reason"]
    assert result["candidates"] == [
        {"path": "/dev/nvme0n1", "serial": "SPARK1L2", "size_gib": 8.0, "model": "QEMU NVMe Ctrl"}
    ]


def test_our_filesystem_on_a_disk_with_another_serial_than_recorded_is_refused() -> None:
    problem = only(decide(wish(), replace(MOUNTED, record=replace(RECORD, serial="FORMER"))))
    assert "SPARK1L2" in problem.found
    assert "FORMER" in problem.required


def test_what_is_left_to_do() -> None:
    keep = decide(wish(), MOUNTED)
    assert not l2.is_pending(wish(), RECORD, keep)
    assert l2.is_pending(wish(), None, keep)
    assert l2.is_pending(wish(), replace(RECORD, made=False), keep)
    assert l2.is_pending(wish(), replace(RECORD, uuid="former"), keep)
    assert l2.is_pending(wish(), None, decide(wish(serial="SPARK1L2"), l2.Facts(disks=(L2,))))
    folder = wish(backend="directory")
    assert not l2.is_pending(folder, None, decide(folder, l2.Facts(directory_free_bytes=9 * GIB)))


def test_tools_that_a_backend_needs() -> None:
    assert l2.missing_packages("lv", True, lambda _: None) == ["xfsprogs", "lvm2", "fio"]
    assert l2.missing_packages("device", False, lambda _: "/sbin/x") == []
    assert l2.missing_packages("directory", False, lambda _: None) == []
