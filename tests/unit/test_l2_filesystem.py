"""Making, proving and removing L2, also on real loop devices where the machine allows it (root, losetup, xfs)."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import l2_disk as l2
from ansible_collections.goodput.spark.plugins.module_utils import l2_filesystem as fs

UUID = "8f5e307a-51bc-4581-95bb-7fd54504cb6d"
OTHER = "11111111-2222-4333-8444-555555555555"
MIB = l2.MIB
ME = pwd.getpwuid(os.getuid()).pw_name


def run(argv: list[str]) -> tuple[int, str, str]:
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def expected(folder: Path, uuid: str = "") -> fs.Expected:
    return fs.Expected(str(folder), str(folder / "lmcache"), ME, uuid, 16 * MIB, 1.0, MIB)


# --- without special rights


def test_bytes_are_written_and_read_back_and_nothing_stays(tmp_path: Path) -> None:
    assert fs.direct_round_trip(str(tmp_path), 3 * MIB) is None
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_direct_io_is_a_problem_not_a_traceback() -> None:
    problem = fs.direct_round_trip("/proc", MIB)
    assert problem is not None
    assert "O_DIRECT" in problem.found


def test_a_difference_names_its_first_block() -> None:
    sent = bytes(4 * 4096)
    wrong = bytearray(sent)
    wrong[2 * 4096 + 7] = 1
    problem = fs.difference("/x", sent, bytes(wrong), "r")
    assert problem is not None
    assert "from byte 8192 on" in problem.found
    assert fs.difference("/x", sent, sent, "r") is None
    short = fs.difference("/x", sent, sent[:4096], "r")
    assert short is not None
    assert "4096 bytes read back" in short.found


GOOD = ("/dev/nvme0n1", "xfs", ("rw", "noatime", "attr2"))
LINE = (f"UUID={UUID}", "noatime,nofail")


@pytest.mark.parametrize(
    ("mount", "uuid", "fstab", "text"),
    [
        (None, "", LINE, "nothing is mounted"),
        (GOOD, OTHER, LINE, OTHER),
        (("/dev/vda", "ext4", ("rw", "noatime")), UUID, LINE, "ext4"),
        (("/dev/nvme0n1", "xfs", ("rw", "relatime")), UUID, LINE, "rw,relatime"),
        (("/dev/nvme0n1", "xfs", ("ro", "noatime")), UUID, LINE, "ro,noatime"),
        (GOOD, UUID, ("", ""), "none"),
        (GOOD, UUID, (f"UUID={UUID}", "noatime"), "noatime"),
        (GOOD, UUID, (f"UUID={OTHER}", "noatime,nofail"), OTHER),
    ],
)
def test_a_mount_that_is_not_as_required(
    mount: tuple[str, str, tuple[str, ...]] | None, uuid: str, fstab: tuple[str, str], text: str
) -> None:
    (problem,) = fs.mount_problems(expected(Path("/srv/goodput/l2"), UUID), mount, uuid, fstab)
    assert text in problem.found
    assert "--tags nvme_l2" in problem.remedy


def test_a_mount_as_required() -> None:
    assert fs.mount_problems(expected(Path("/srv/goodput/l2"), UUID), GOOD, UUID, LINE) == []


def test_the_store_must_be_there_and_writable_by_its_account(tmp_path: Path) -> None:
    wanted = expected(tmp_path)
    missing = fs.store_problem(wanted)
    assert missing is not None
    assert f"no folder {tmp_path}/lmcache" in missing.found
    (tmp_path / "lmcache").mkdir(mode=0o750)
    assert fs.store_problem(wanted) is None
    (tmp_path / "lmcache").chmod(0o550)
    locked = fs.store_problem(wanted)
    assert locked is not None
    assert "mode 0550" in locked.found
    nobody = fs.store_problem(replace(wanted, owner="no-such-account"))
    assert nobody is not None
    assert "no account" in nobody.found


def test_a_folder_that_is_too_small_or_too_full(tmp_path: Path) -> None:
    (tmp_path / "lmcache").mkdir(mode=0o750)
    problems, figures = fs.examine(run, expected(tmp_path))
    assert problems == []
    assert figures["total_gib"] > 0
    huge, _ = fs.examine(run, replace(expected(tmp_path), required_bytes=1 << 60))
    assert "offers" in huge[0].found
    full, _ = fs.examine(run, replace(expected(tmp_path), free_floor_percent=100.0))
    assert "% full" in full[0].found


def test_the_record_is_private_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "var/nvme_l2.json"
    fs.write_record(
        str(path), {"backend": "device", "uuid": UUID, "serial": "S", "device": "/dev/x", "label": "l", "made": True}
    )
    assert path.stat().st_mode & 0o777 == 0o600
    assert l2.read_record(str(path)) == l2.Record("device", UUID, "S", "/dev/x", True)
    assert l2.read_record(str(tmp_path / "none")) is None


# Shortened output of fio 3.33 --output-format=json.
FIO_JOB = {
    "jobname": "goodput-l2",
    "error": 0,
    "read": {"bw_bytes": 0, "runtime": 0, "clat_ns": {"min": 0, "max": 0}},
    "write": {
        "bw_bytes": 3707055251,
        "runtime": 1005,
        "clat_ns": {"percentile": {"50.000000": 1073152, "99.000000": 2736128}},
    },
}


def test_the_figure_of_fio() -> None:
    text = "note: both iodepth >= 1 and synchronous I/O engine are selected\n" + json.dumps(
        {"fio version": "fio-3.33", "jobs": [FIO_JOB]}
    )
    figure = fs.fio_figure(text, "write")
    assert figure == {"gb_per_second": 3.707, "latency_p50_ms": 1.073, "latency_p99_ms": 2.736, "seconds": 1.0}
    failed = json.dumps({"jobs": [{**FIO_JOB, "error": 28}]})
    with pytest.raises(fs.L2Error, match="error 28"):
        fs.fio_figure(failed, "write")


def test_fio_never_takes_more_than_half_of_the_free_space(tmp_path: Path) -> None:
    with pytest.raises(fs.L2Error, match="lower nvme_l2_fio_size_gib"):
        fs.measure(run, str(tmp_path), 1, 1 << 60, 4)
    assert list(tmp_path.iterdir()) == []


def test_a_fio_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def failing(argv: list[str]) -> tuple[int, str, str]:
        (tmp_path / ".goodput-fio/goodput-l2.0.0").write_bytes(b"x") if argv[0] == "fio" else None
        return 1, "", "no space"

    with pytest.raises(fs.L2Error, match="no space"):
        fs.measure(failing, str(tmp_path), 1, MIB, 4)
    assert list(tmp_path.iterdir()) == []


# --- with real loop devices


def _no_loops() -> str:
    """Why this machine can not run these tests, or an empty string."""
    tools = [
        t for t in ("losetup", "mkfs.xfs", "mkfs.ext4", "parted", "wipefs", "fallocate") if shutil.which(t) is None
    ]
    if os.geteuid() != 0:
        return "real loop devices need root"
    if tools:
        return f"not installed: {', '.join(tools)}"
    if not Path("/dev/loop-control").exists() or run(["losetup", "--find"])[0]:
        return "this machine has no free loop device"
    return ""


NO_LOOPS = _no_loops()
loops = pytest.mark.skipif(bool(NO_LOOPS), reason=NO_LOOPS or "-")


@pytest.fixture
def wish(tmp_path: Path) -> l2.Wish:
    """An image of 300 MiB usable in a folder of its own; its mount point is only asked about."""
    return l2.Wish("image", str(tmp_path / "mnt"), 300 * MIB, image=str(tmp_path / "l2.img"), owner="")


@pytest.fixture
def record(tmp_path: Path) -> str:
    return str(tmp_path / "nvme_l2.json")


@pytest.fixture
def mounted(wish: l2.Wish) -> Iterator[Path]:
    """Mounts the image where ``wish`` says, as the role does, and takes it down again."""
    folder = Path(wish.mount_point)
    folder.mkdir()
    loop = subprocess.check_output(
        ["losetup", "--find", "--nooverlap", "--show", "--direct-io=on", "--sector-size", "4096", wish.image], text=True
    ).strip()
    try:
        subprocess.run(["mount", "-t", "xfs", "-o", "noatime", loop, str(folder)], check=True)
        yield folder
    finally:
        run(["umount", str(folder)])
        run(["losetup", "--detach", loop])


@pytest.fixture
def image(wish: l2.Wish, record: str) -> str:
    assert fs.make(run, wish, record, UUID)[0] is True
    return wish.image


def kind(path: str) -> list[tuple[str, str]]:
    return [
        (s.type, s.uuid) for s in l2.parse_wipefs(subprocess.check_output(["wipefs", "-n", "--json", path], text=True))
    ]


@loops
def test_an_image_is_made_once_and_then_kept(wish: l2.Wish, record: str) -> None:
    assert fs.make(run, wish, record, UUID, check=True)[0] is True
    assert not os.path.exists(wish.image)
    changed, decision = fs.make(run, wish, record, UUID)
    assert (changed, decision.uuid) == (True, UUID)
    assert kind(wish.image) == [("xfs", UUID)]
    status = os.stat(wish.image)
    assert status.st_blocks * 512 >= status.st_size, "the image must not have holes"
    assert status.st_mode & 0o777 == 0o600
    before = status.st_mtime_ns
    changed, decision = fs.make(run, wish, record, OTHER)
    assert (changed, decision.action, decision.uuid) == (False, "keep", UUID)
    assert os.stat(wish.image).st_mtime_ns == before


@loops
def test_a_mounted_image_offers_what_was_asked_and_proves_itself(
    wish: l2.Wish, image: str, mounted: Path, record: str
) -> None:
    space = os.statvfs(mounted)
    assert space.f_bavail * space.f_frsize >= wish.required_bytes
    (mounted / "lmcache").mkdir(mode=0o750)
    assert fs.direct_round_trip(str(mounted), 4 * MIB) is None
    problems, figures = fs.examine(run, replace(expected(mounted, UUID), required_bytes=wish.required_bytes))
    # Only the fstab line is missing: this test does not write /etc/fstab.
    assert [p.found for p in problems] == [f"/etc/fstab line for {mounted}: none"]
    assert (figures["fstype"], "noatime" in figures["options"]) == ("xfs", True)
    facts = l2.gather(run, wish, record)
    assert (facts.mount_uuid, l2.decide(wish, facts).action) == (UUID, "keep")


@loops
def test_a_full_l2_is_found_by_preflight_and_verify(wish: l2.Wish, image: str, mounted: Path, record: str) -> None:
    (mounted / "lmcache").mkdir(mode=0o750)
    space = os.statvfs(mounted)
    subprocess.run(
        ["fallocate", "-l", str(space.f_bavail * space.f_frsize - MIB), str(mounted / "lmcache/x.data")], check=True
    )
    wanted = replace(wish, free_floor_percent=2.0)
    decision = l2.decide(wanted, l2.gather(run, wanted, record))
    assert "% full" in decision.problems[0].found
    problems, _ = fs.examine(run, replace(expected(mounted, UUID), free_floor_percent=2.0, required_bytes=MIB))
    assert any("% full" in p.found and "goodput-lmcache" in p.remedy for p in problems)


@loops
def test_a_lost_reservation_is_restored_with_the_content(wish: l2.Wish, image: str, record: str) -> None:
    size = os.stat(image).st_size
    subprocess.run(
        ["fallocate", "--punch-hole", "--offset", str(size - 64 * MIB), "--length", str(32 * MIB), image], check=True
    )
    assert l2.decide(wish, l2.gather(run, wish, record)).action == "allocate"
    assert fs.make(run, wish, record, UUID)[0] is True
    assert kind(image) == [("xfs", UUID)]
    assert fs.make(run, wish, record, UUID)[0] is False


@loops
def test_a_run_that_stopped_before_mkfs_goes_on(wish: l2.Wish, record: str) -> None:
    content = {"backend": "image", "uuid": UUID, "serial": "", "device": wish.image, "label": wish.label, "made": False}
    fs.write_record(record, content)
    fs.preallocate(wish.image, 16 * MIB)
    changed, decision = fs.make(run, wish, record, OTHER)
    assert (changed, decision.uuid, kind(wish.image)) == (True, UUID, [("xfs", UUID)])


@loops
def test_the_record_names_the_uuid_before_mkfs_runs(wish: l2.Wish, record: str) -> None:
    def failing(argv: list[str]) -> tuple[int, str, str]:
        if argv[0] == "mkfs.xfs":
            assert l2.read_record(record) == l2.Record("image", UUID, device=wish.image, made=False)
            return 1, "", "killed"
        return run(argv)

    with pytest.raises(fs.L2Error, match="killed"):
        fs.make(failing, wish, record, UUID)
    assert fs.make(run, wish, record, OTHER)[1].uuid == UUID


@loops
def test_a_foreign_file_is_refused_and_left_as_it_is(wish: l2.Wish, record: str) -> None:
    Path(wish.image).write_bytes(b"precious" * 1000)
    with pytest.raises(fs.L2Error, match="did not make it"):
        fs.make(run, wish, record, UUID)
    assert Path(wish.image).read_bytes() == b"precious" * 1000
    assert not os.path.exists(record)


@loops
def test_a_reset_removes_only_the_recorded_filesystem(wish: l2.Wish, image: str, record: str) -> None:
    assert fs.remove(run, wish.mount_point, record, wish.label, check=True)[0] is True
    assert os.path.exists(image)
    subprocess.run(["mkfs.xfs", "-q", "-f", "-K", image], check=True)
    with pytest.raises(fs.L2Error, match="nothing was removed"):
        fs.remove(run, wish.mount_point, record, wish.label)
    subprocess.run(["mkfs.xfs", "-q", "-f", "-K", "-m", f"uuid={UUID}", image], check=True)
    assert fs.remove(run, wish.mount_point, record, wish.label)[0] is True
    assert not os.path.exists(image)
    assert not os.path.exists(record)
    assert fs.remove(run, wish.mount_point, record, wish.label)[0] is False


@loops
def test_a_mounted_filesystem_is_never_removed(wish: l2.Wish, image: str, mounted: Path, record: str) -> None:
    with pytest.raises(fs.L2Error, match="still mounted"):
        fs.remove(run, wish.mount_point, record, wish.label)
    assert kind(image) == [("xfs", UUID)]


class Node:
    """A node whose only disk, /…/nvme9n1, is a loop device. lsblk is answered; everything else really runs."""

    def __init__(self, folder: Path) -> None:
        backing = folder / "disk.raw"
        with backing.open("wb") as stream:
            stream.truncate(600 * MIB)
        self.loop = subprocess.check_output(["losetup", "--find", "--show", str(backing)], text=True).strip()
        self.path = folder / "nvme9n1"
        self.path.symlink_to(self.loop)
        self.serial = "REAL1"

    def run(self, argv: list[str]) -> tuple[int, str, str]:
        if argv[0] == "lsblk":
            size = int(subprocess.check_output(["blockdev", "--getsize64", self.loop], text=True))
            entry = {
                "name": "nvme9n1",
                "path": str(self.path),
                "type": "disk",
                "size": size,
                "serial": self.serial,
                "tran": "nvme",
            }
            return 0, json.dumps({"blockdevices": [entry]}), ""
        if argv[0] == "udevadm":
            return 0, "", ""
        return run(argv)


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    made = Node(tmp_path)
    yield made
    run(["losetup", "--detach", made.loop])


@pytest.fixture
def disk_wish(tmp_path: Path) -> l2.Wish:
    return l2.Wish("device", str(tmp_path / "mnt"), 300 * MIB, serial="REAL1", owner="")


@loops
def test_an_empty_disk_is_made_kept_and_wiped(node: Node, disk_wish: l2.Wish, record: str) -> None:
    with pytest.raises(fs.L2Error, match="nvme_l2_format_serial: REAL1"):
        fs.make(node.run, replace(disk_wish, serial=""), record, UUID)
    assert kind(str(node.path)) == []
    assert fs.make(node.run, disk_wish, record, UUID)[0] is True
    assert kind(str(node.path)) == [("xfs", UUID)]
    assert fs.make(node.run, replace(disk_wish, serial=""), record, OTHER)[0] is False
    node.serial = "OTHER"
    with pytest.raises(fs.L2Error, match="REAL1 only"):
        fs.remove(node.run, disk_wish.mount_point, record, disk_wish.label)
    node.serial = "REAL1"
    assert fs.remove(node.run, disk_wish.mount_point, record, disk_wish.label)[0] is True
    assert kind(str(node.path)) == []


@loops
def test_a_former_filesystem_is_adopted_with_its_content(node: Node, disk_wish: l2.Wish, record: str) -> None:
    fs.make(node.run, disk_wish, record, UUID)
    os.unlink(record)
    with pytest.raises(fs.L2Error, match=f"nvme_l2_adopt_uuid: {UUID}"):
        fs.make(node.run, disk_wish, record, OTHER)
    assert fs.make(node.run, replace(disk_wish, adopt_uuid=UUID), record, OTHER)[0] is True
    assert l2.read_record(record) == l2.Record("device", UUID, "REAL1", str(node.path), True)
    assert kind(str(node.path)) == [("xfs", UUID)]


MAKERS = {
    "ext4": (["mkfs.ext4", "-q", "-F"], "an ext4 filesystem"),
    "gpt": (["parted", "-s", "{}", "mklabel", "gpt"], "a partition table (gpt)"),
    "mbr": (["parted", "-s", "{}", "mklabel", "msdos"], "a partition table (dos)"),
    "swap": (["mkswap", "-q"], "swap space"),
    "lvm": (["pvcreate", "-q"], "an LVM physical volume"),
}


@loops
@pytest.mark.parametrize("name", MAKERS)
def test_a_real_disk_with_content_is_refused_and_unchanged(
    name: str, node: Node, disk_wish: l2.Wish, record: str
) -> None:
    command, text = MAKERS[name]
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    argv = [node.loop if a == "{}" else a for a in command]
    subprocess.run(argv if "{}" in command else [*argv, node.loop], check=True, capture_output=True, close_fds=True)
    before = kind(str(node.path))
    with pytest.raises(fs.L2Error) as refused:
        fs.make(node.run, disk_wish, record, UUID)
    assert text in str(refused.value)
    assert kind(str(node.path)) == before
    assert not os.path.exists(record)


@loops
def test_a_mounted_disk_is_refused(node: Node, disk_wish: l2.Wish, record: str, tmp_path: Path) -> None:
    subprocess.run(["mkfs.ext4", "-q", "-F", str(node.path)], check=True)
    (tmp_path / "other").mkdir()
    subprocess.run(["mount", node.loop, str(tmp_path / "other")], check=True)
    try:
        # Even with its signature gone, the kernel's exclusive use of the device is seen.
        (tmp_path / "other/file").write_text("precious")
        disk = l2.probe_disk(node.run, l2.parse_lsblk(node.run(["lsblk"])[1])[0])
        assert l2.obstacles(replace(disk, signatures=())) == ["in use (the kernel refuses an exclusive open)"]
        with pytest.raises(fs.L2Error, match="an ext4 filesystem"):
            fs.make(node.run, disk_wish, record, UUID)
        assert (tmp_path / "other/file").read_text() == "precious"
    finally:
        run(["umount", str(tmp_path / "other")])
