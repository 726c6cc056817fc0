# Apache-2.0 (see LICENSE)
"""Make, prove and remove the L2 filesystem that ``l2_disk.decide`` allowed.

The record (``/var/lib/goodput/nvme_l2.json``) is written before the first byte of a disk changes and names the UUID
that mkfs is then told to use: a run that stopped half-way goes on, and nothing but that UUID on that serial is ever
wiped.
"""

from __future__ import annotations

import json
import mmap
import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.l2_disk import (
    GIB,
    MIB,
    XFS_META,
    Decision,
    Facts,
    Problem,
    Runner,
    Wish,
    decide,
    filesystem_uuid,
    find_mount,
    full_problem,
    gather,
    gib,
    is_pending,
    parse_fstab,
    parse_wipefs,
    read_record,
)

ALIGNMENT = 4096


class L2Error(Exception):
    """A refusal or a failed step; the text names the value, the rule and the remedy."""


def must(run: Runner, argv: list[str]) -> str:
    code, out, err = run(argv)
    if code:
        raise L2Error(f"`{' '.join(argv)}` failed with exit {code}: {(err or out).strip()}")
    return out


def write_record(path: str, content: dict[str, Any]) -> None:
    """Write the record so that a reader sees the old or the new one, also after a power cut."""
    target = Path(path)
    target.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = target.with_name(target.name + ".goodput-tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        json.dump(content, stream, indent=2)
        stream.write("\n")
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(temporary, target)


def preallocate(path: str, size_bytes: int) -> None:
    """Reserve every block of the image, so that a write to L2 never fails because the root filesystem is full."""
    Path(path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make(run: Runner, wish: Wish, record_path: str, uuid: str, check: bool = False) -> tuple[bool, Decision]:
    """Look again, then do what is allowed; (changed, decision). L2Error where it is refused or a step fails.

    ``uuid`` is the one that an earlier look proposed, so that fstab and the record agree.
    """
    facts = gather(run, wish, record_path)
    decision = decide(wish, facts, lambda: uuid)
    if decision.action == "refuse":
        raise L2Error("\n\n".join(problem.text() for problem in decision.problems))
    if wish.backend == "directory":
        return False, decision
    content = {
        "backend": wish.backend,
        "uuid": decision.uuid,
        "serial": decision.serial,
        "device": decision.device,
        "label": wish.label,
        "made": True,
    }
    changed = is_pending(wish, facts.record, decision)
    if check or not changed:
        return changed, decision
    if decision.action == "allocate":
        preallocate(decision.device, decision.size_bytes)
    elif decision.action == "make":
        write_record(record_path, content | {"made": False})
        extra: list[str] = []
        if wish.backend == "image":
            preallocate(decision.device, decision.size_bytes)
            # The loop device has 4096-byte sectors, and a discard would give the reservation back.
            extra = ["-K", "-s", "size=4096"]
        elif wish.backend == "lv" and not (facts.volume and facts.volume.exists):
            create = ["lvcreate", "--yes", "--wipesignatures", "y", "--size", f"{decision.size_bytes}b"]
            must(run, [*create, "--name", wish.logical_volume, wish.volume_group])
        # Without -f: mkfs.xfs itself refuses what it recognises as a filesystem or a partition table.
        must(
            run, ["mkfs.xfs", "-q", "-L", wish.label, "-m", f"uuid={decision.uuid},{XFS_META}", *extra, decision.device]
        )
        if wish.backend != "image":
            must(run, ["udevadm", "settle", "--timeout=30"])
    write_record(record_path, content)
    return True, decision


def remove(run: Runner, mount_point: str, record_path: str, label: str, check: bool = False) -> tuple[bool, str]:
    """Remove the recorded filesystem: its signature, its logical volume or its image; (changed, what was done)."""
    record = read_record(record_path)
    if record is None:
        return False, "no L2 filesystem of this role is recorded on this node"
    if not check and find_mount(Path("/proc/self/mountinfo").read_text(), os.path.realpath(mount_point)):
        raise L2Error(
            f"found {mount_point} still mounted; required: unmounted; fix: stop goodput-lmcache and run the reset again"
        )
    if record.backend == "device":
        facts = gather(run, Wish("device", mount_point, 0, label=label), record_path)
        device = _recorded_disk(facts)
    else:
        device = record.device if os.path.exists(record.device) else ""
    if device:
        found = parse_wipefs(must(run, ["wipefs", "--no-act", "--json", device]))
        if found and not any(s.type == "xfs" and s.uuid == record.uuid for s in found):
            raise L2Error(
                f"found {device} with {', '.join(s.type + ' ' + s.uuid for s in found)}; required: xfs {record.uuid}, "
                f"which this role made; fix: nothing was removed, look at the device, then delete {record_path} by hand"
            )
        if not check:
            if record.backend == "image":
                os.unlink(device)
            else:
                must(run, ["wipefs", "--all", "--types", "xfs", device])
            if record.backend == "lv":
                must(run, ["lvremove", "--yes", device.removeprefix("/dev/")])
    if not check:
        os.unlink(record_path)
    return True, f"removed {record.backend} {device or '(already gone)'} UUID {record.uuid}"


def _recorded_disk(facts: Facts) -> str:
    record = facts.record
    assert record is not None
    disks = [d for d in facts.disks if any(s.type == "xfs" and s.uuid == record.uuid for s in d.signatures)]
    if not disks:
        return ""
    if len(disks) > 1 or disks[0].serial != record.serial:
        raise L2Error(
            f"found UUID {record.uuid} on {', '.join(d.describe() for d in disks)}; required: on serial "
            f"{record.serial} only; fix: nothing was removed, detach the copy and run the reset again"
        )
    return disks[0].path


# --- the proof -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """What the filesystem must be: sizes in bytes; ``uuid`` empty where the role made no filesystem."""

    mount_point: str
    store: str
    owner: str
    uuid: str
    required_bytes: int
    free_floor_percent: float
    test_bytes: int


def direct_round_trip(folder: str, test_bytes: int) -> Problem | None:
    """Write random bytes past the page cache and read them back past it.

    The file never has a name (O_TMPFILE), so nothing is left behind even if this process is killed.
    """
    size = max(ALIGNMENT, test_bytes // ALIGNMENT * ALIGNMENT)
    remedy = "see `dmesg` for errors of this disk; `nvme smart-log` says if it is worn or failing"
    try:
        descriptor = os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_DIRECT, 0o600)
    except OSError as error:
        return Problem(
            f"{folder} refuses a file opened with O_DIRECT: {error.strerror}",
            "a writable filesystem that supports direct I/O (XFS does)",
            "use nvme_l2_backend: device, lv or image, which make XFS; if it is read-only, see `dmesg`",
        )
    step = "writing"
    try:
        with mmap.mmap(-1, size) as sent, mmap.mmap(-1, size) as received:
            sent.write(os.urandom(size))
            _write_all(descriptor, sent)
            os.fsync(descriptor)
            step = "reading back"
            count = _read_all(descriptor, received)
            return difference(folder, sent[:], received[:count], remedy)
    except OSError as error:
        return Problem(f"{step} {gib(size)} GiB in {folder} failed: {error.strerror}", "no error", remedy)
    finally:
        os.close(descriptor)


def difference(folder: str, sent: bytes, received: bytes, remedy: str) -> Problem | None:
    if sent == received:
        return None
    at = next((i for i in range(0, len(sent), ALIGNMENT) if sent[i : i + ALIGNMENT] != received[i : i + ALIGNMENT]), 0)
    return Problem(
        f"{folder}: the {len(received)} bytes read back differ from byte {at} on",
        f"the {len(sent)} bytes that were written",
        remedy,
    )


def _write_all(descriptor: int, source: mmap.mmap) -> None:
    done = 0
    with memoryview(source) as view:
        while done < len(view):
            with view[done:] as rest:
                done += os.pwrite(descriptor, rest, done)


def _read_all(descriptor: int, into: mmap.mmap) -> int:
    done = 0
    with memoryview(into) as view:
        while done < len(view):
            with view[done:] as rest:
                count = os.preadv(descriptor, [rest], done)
            if count == 0:
                break
            done += count
    return done


def store_problem(expected: Expected) -> Problem | None:
    """The folder that LMCache writes to: there, owned by its account, writable by it."""
    remedy = "ansible-playbook site.yml --tags nvme_l2 makes it again"
    try:
        status = os.stat(expected.store)
        uid = pwd.getpwnam(expected.owner).pw_uid
    except FileNotFoundError:
        return Problem(f"no folder {expected.store}", f"a folder of {expected.owner}", remedy)
    except KeyError:
        return Problem(
            f"no account {expected.owner}", "the account that runs LMCache", "ansible-playbook site.yml --tags host"
        )
    if status.st_uid != uid or status.st_mode & 0o700 != 0o700:
        return Problem(
            f"{expected.store} has owner {status.st_uid} and mode {status.st_mode & 0o777:04o}",
            f"owner {expected.owner} ({uid}) and rwx for it",
            remedy,
        )
    return None


def mount_problems(
    expected: Expected, mount: tuple[str, str, tuple[str, ...]] | None, uuid: str, fstab: tuple[str, str]
) -> list[Problem]:
    """Is the filesystem this role made mounted with its options, and will it be after a reboot?"""
    remedy = "ansible-playbook site.yml --tags nvme_l2 mounts it as required"
    if mount is None:
        return [
            Problem(
                f"nothing is mounted at {expected.mount_point}", f"the L2 filesystem (UUID {expected.uuid})", remedy
            )
        ]
    problems = []
    source, fstype, options = mount
    if uuid != expected.uuid or fstype != "xfs":
        problems.append(
            Problem(
                f"{source} ({fstype}, UUID {uuid or 'unknown'}) at {expected.mount_point}",
                f"xfs with UUID {expected.uuid}",
                remedy,
            )
        )
    if "noatime" not in options or "rw" not in options:
        problems.append(
            Problem(
                f"mount options {','.join(options)}", "rw and noatime", remedy + "; if it went read-only, see `dmesg`"
            )
        )
    line_options = fstab[1].split(",")
    if fstab[0] != f"UUID={expected.uuid}" or not {"nofail", "noatime"} <= set(line_options):
        problems.append(
            Problem(
                f"/etc/fstab line for {expected.mount_point}: {' '.join(fstab).strip() or 'none'}",
                f"UUID={expected.uuid} with nofail and noatime, so that a reboot mounts it",
                remedy,
            )
        )
    return problems


def examine(run: Runner, expected: Expected) -> tuple[list[Problem], dict[str, Any]]:
    """All problems, and figures: source, fstype, options, total_gib, available_gib. Leaves nothing behind."""
    problems: list[Problem] = []
    real = os.path.realpath(expected.mount_point)
    mount = find_mount(Path("/proc/self/mountinfo").read_text(), real)
    figures: dict[str, Any] = {"source": "", "fstype": "", "options": "", "total_gib": 0.0, "available_gib": 0.0}
    if expected.uuid:
        uuid = filesystem_uuid(run, mount[0]) if mount else ""
        problems = mount_problems(
            expected, mount, uuid, parse_fstab(Path("/etc/fstab").read_text(), expected.mount_point)
        )
        if mount is None:
            return problems, figures
    if mount:
        figures |= {"source": mount[0], "fstype": mount[1], "options": ",".join(mount[2])}
    if not os.path.isdir(real):
        return [
            Problem(f"no folder {expected.mount_point}", "a folder for L2", "ansible-playbook site.yml --tags nvme_l2")
        ], figures
    space = os.statvfs(real)
    total, available = space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
    figures |= {"total_gib": gib(total), "available_gib": gib(available)}
    if total < expected.required_bytes:
        problems.append(
            Problem(
                f"{expected.mount_point} offers {gib(total)} GiB in all",
                f"{gib(expected.required_bytes)} GiB, the plan's L2 capacity and 5 %",
                "lower the plan's L2 capacity or give L2 a larger disk (docs/nvme_l2.md)",
            )
        )
    full = full_problem(expected.mount_point, total, available, expected.free_floor_percent)
    problems += [full] if full else []
    store = store_problem(expected)
    problems += [store] if store else []
    if available >= 2 * expected.test_bytes:
        round_trip = direct_round_trip(real, expected.test_bytes)
        problems += [round_trip] if round_trip else []
    elif not full:
        problems.append(
            Problem(
                f"{gib(available)} GiB free", f"room for a test file of {expected.test_bytes // MIB} MiB", "free space"
            )
        )
    return problems, figures


# --- the figure on request -----------------------------------------------------------------------------------------


def fio_command(folder: str, direction: str, seconds: int, size_bytes: int, jobs: int) -> list[str]:
    """fio as LMCache's fs_native works: a few threads, each reading or writing whole objects past the page cache."""
    return [
        "fio",
        "--name=goodput-l2",
        f"--directory={folder}",
        f"--rw={direction}",
        "--bs=1M",
        "--direct=1",
        "--ioengine=psync",
        f"--numjobs={jobs}",
        "--group_reporting",
        f"--size={size_bytes // jobs // MIB}M",
        f"--runtime={seconds}",
        "--time_based",
        "--end_fsync=1",
        "--output-format=json",
    ]


def fio_figure(text: str, direction: str) -> dict[str, float]:
    """Bytes a second and completion latency (milliseconds) from ``fio --output-format=json``."""
    job = json.loads(text[text.index("{") :])["jobs"][0]
    if job.get("error"):
        raise L2Error(f"fio reported error {job['error']} while doing {direction}")
    side = job["read" if direction == "read" else "write"]
    percentiles = side["clat_ns"].get("percentile", {})
    return {
        "gb_per_second": round(side["bw_bytes"] / 1e9, 3),
        "latency_p50_ms": round(percentiles.get("50.000000", 0) / 1e6, 3),
        "latency_p99_ms": round(percentiles.get("99.000000", 0) / 1e6, 3),
        "seconds": round(side["runtime"] / 1000, 1),
    }


def measure(run: Runner, mount_point: str, seconds: int, size_bytes: int, jobs: int) -> dict[str, Any]:
    """Write, then read; returns commands, conditions and figures. Its folder is removed whatever happens."""
    space = os.statvfs(mount_point)
    available = space.f_bavail * space.f_frsize
    if size_bytes * 2 > available:
        raise L2Error(
            f"found {gib(available)} GiB free in {mount_point}; required: {gib(2 * size_bytes)} GiB for a figure over "
            f"{gib(size_bytes)} GiB; fix: lower nvme_l2_fio_size_gib"
        )
    folder = Path(f"{mount_point}/.goodput-fio")
    folder.mkdir(mode=0o700, exist_ok=True)
    results: dict[str, Any] = {
        "commands": [],
        "conditions": {
            "size_gib": gib(size_bytes),
            "jobs": jobs,
            "block_kib": 1024,
            "kernel": os.uname().release,
            "load_1min": os.getloadavg()[0],
            "full_percent": round(100 - 100 * space.f_bavail / space.f_blocks, 1),
            "lmcache_running": run(["systemctl", "is-active", "--quiet", "goodput-lmcache.service"])[0] == 0,
        },
    }
    try:
        for direction in ("write", "read"):
            command = fio_command(str(folder), direction, seconds, size_bytes, jobs)
            results["commands"].append(" ".join(command))
            results[direction] = fio_figure(must(run, command), direction)
    finally:
        for entry in list(os.scandir(folder)):
            os.unlink(entry.path)
        folder.rmdir()
    return results


def gib_to_bytes(value: float) -> int:
    return int(value * GIB)


def texts(problems: Sequence[Problem]) -> str:
    return "\n\n".join(problem.text() for problem in problems)
