# Apache-2.0 (see LICENSE)
"""Decide where the L2 filesystem may live, and refuse everything that could hold data.

Pure functions over what ``lsblk``, ``wipefs``, ``/proc`` and the file system report (``decide``), plus ``gather`` which
asks a node for exactly that. Sizes are bytes unless a name says ``_gib`` (1024**3).
"""

from __future__ import annotations

import json
import math
import os
import pwd
import re
import uuid as uuids
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

GIB = 1024**3
MIB = 1024**2
# LMCache's fs_native evicts once a second above its watermark and may overshoot its cap by about one second of writes.
CAPACITY_MARGIN = 1.05
# Uninstalling K3s empties every filesystem mounted below its folders; kubelet evicts pods when its own one fills.
FORBIDDEN_PARENTS = ("/var/lib/rancher/k3s", "/var/lib/kubelet")
# What fallocate can reserve so that a write never fails for lack of space.
PREALLOCATING = ("ext4", "xfs", "btrfs")
# Block devices without a medium of their own, or with one that may be pulled out.
NOT_DISKS = re.compile(r"^(loop|zram|ram|nbd|sr|fd|md|dm-|drbd|mtdblock|rbd|zd)\d*")
# L2 objects are whole files, written once and unlinked: neither copy-on-write nor reverse maps pay for their space.
XFS_META = "reflink=0,rmapbt=0"

Runner = Callable[[list[str]], tuple[int, str, str]]


@dataclass(frozen=True)
class Signature:
    """One entry of ``wipefs --json``: type as blkid names it (ext4, gpt, dos, LVM2_member, ...)."""

    type: str
    label: str = ""
    uuid: str = ""


@dataclass(frozen=True)
class Disk:
    """A whole disk with everything below it. ``probe_error`` is set where wipefs could not read it."""

    path: str
    type: str
    size_bytes: int
    serial: str = ""
    model: str = ""
    transport: str = ""
    removable: bool = False
    read_only: bool = False
    fstype: str = ""
    pttype: str = ""
    mountpoints: tuple[str, ...] = ()
    children: tuple[Disk, ...] = ()
    signatures: tuple[Signature, ...] = ()
    busy: bool = False
    probe_error: str = ""

    @property
    def name(self) -> str:
        return self.path.rsplit("/", 1)[-1]

    def describe(self) -> str:
        model = f", {self.model}" if self.model else ""
        return f"{self.path} (serial {self.serial or 'none'}, {gib(self.size_bytes)} GiB{model})"


@dataclass(frozen=True)
class Mount:
    """A mounted filesystem: sizes as statvfs reports them, ``uuid`` where the source is known."""

    source: str
    fstype: str
    options: tuple[str, ...]
    total_bytes: int = 0
    available_bytes: int = 0


@dataclass(frozen=True)
class Record:
    """What this role wrote down on the node before it formatted: it may adopt or wipe nothing else."""

    backend: str
    uuid: str
    serial: str = ""
    device: str = ""
    made: bool = False


@dataclass(frozen=True)
class Image:
    """The loop file's path as found. ``allocated_bytes`` < ``size_bytes`` means that it has holes."""

    exists: bool
    size_bytes: int = 0
    allocated_bytes: int = 0
    signatures: tuple[Signature, ...] = ()
    real_path: str = ""
    parent_fstype: str = ""
    parent_free_bytes: int = 0


@dataclass(frozen=True)
class Volume:
    """LVM as found: volume groups with their free bytes, and the logical volume if it exists."""

    groups: Mapping[str, int] = field(default_factory=dict)
    exists: bool = False
    path: str = ""
    size_bytes: int = 0
    signatures: tuple[Signature, ...] = ()


@dataclass(frozen=True)
class Facts:
    disks: tuple[Disk, ...] = ()
    record: Record | None = None
    mount: Mount | None = None
    mount_uuid: str = ""
    fstab_source: str = ""
    fstab_options: str = ""
    mount_point_real: str = ""
    mount_point_entries: int = 0
    directory_mount: str = "/"
    directory_free_bytes: int = 0
    directory_used_bytes: int = 0
    image: Image | None = None
    volume: Volume | None = None
    owner_exists: bool = True


@dataclass(frozen=True)
class Wish:
    """The role's inputs. ``owner`` empty: the account is not asked for (check mode before it exists)."""

    backend: str
    mount_point: str
    required_bytes: int
    label: str = "goodput-l2"
    serial: str = ""
    adopt_uuid: str = ""
    image: str = "/srv/goodput/l2.img"
    root_reserve_bytes: int = 0
    volume_group: str = ""
    logical_volume: str = "goodput_l2"
    owner: str = "goodput"
    free_floor_percent: float = 0.0


# Arguments of the modules that look for the filesystem and make it.
WISH_ARGUMENTS: dict[str, dict[str, Any]] = {
    "backend": {"type": "str", "choices": ["device", "image", "lv", "directory"], "required": True},
    "mount_point": {"type": "path", "required": True},
    "required_gib": {"type": "float", "required": True},
    "serial": {"type": "str", "default": ""},
    "adopt_uuid": {"type": "str", "default": ""},
    "label": {"type": "str", "default": "goodput-l2"},
    "image": {"type": "path", "default": "/srv/goodput/l2.img"},
    "root_reserve_gib": {"type": "float", "default": 0.0},
    "volume_group": {"type": "str", "default": ""},
    "logical_volume": {"type": "str", "default": "goodput_l2"},
    "owner": {"type": "str", "default": ""},
    "free_floor_percent": {"type": "float", "default": 0.0},
    "record": {"type": "path", "default": "/var/lib/goodput/nvme_l2.json"},
}


def wish_of(params: Mapping[str, Any]) -> Wish:
    """The wish in a module's parameters, which WISH_ARGUMENTS describes."""
    return Wish(
        backend=params["backend"],
        mount_point=params["mount_point"],
        required_bytes=int(params["required_gib"] * GIB),
        label=params["label"],
        serial=params["serial"],
        adopt_uuid=params["adopt_uuid"],
        image=params["image"],
        root_reserve_bytes=int(params["root_reserve_gib"] * GIB),
        volume_group=params["volume_group"],
        logical_volume=params["logical_volume"],
        owner=params["owner"],
        free_floor_percent=params["free_floor_percent"],
    )


@dataclass(frozen=True)
class Problem:
    found: str
    required: str
    remedy: str

    def text(self) -> str:
        return f"found: {self.found}\nrequired: {self.required}\nremedy: {self.remedy}"


@dataclass(frozen=True)
class Decision:
    """``action``: keep (nothing to make), make, allocate (fill the image's holes again) or refuse."""

    action: str
    problems: tuple[Problem, ...] = ()
    warnings: tuple[str, ...] = ()
    device: str = ""
    serial: str = ""
    uuid: str = ""
    size_bytes: int = 0
    candidates: tuple[Disk, ...] = ()

    def as_result(self) -> dict[str, Any]:
        """For a module: state, reason and the decision's fields; disks as {path, serial, size_gib, model}."""
        return {
            "state": {"keep": "ready", "allocate": "ready", "make": "empty", "refuse": "refused"}[self.action],
            "action": self.action,
            "reason": "\n\n".join(problem.text() for problem in self.problems),
            "problems": [asdict(problem) for problem in self.problems],
            "warnings_found": list(self.warnings),
            "device": self.device,
            "serial": self.serial,
            "uuid": self.uuid,
            "size_bytes": self.size_bytes,
            "candidates": [
                {"path": d.path, "serial": d.serial, "size_gib": gib(d.size_bytes), "model": d.model}
                for d in self.candidates
            ],
        }


def is_pending(wish: Wish, record: Record | None, decision: Decision) -> bool:
    """Does l2_filesystem have something to do: make, reserve again, or write down an adopted or half-recorded one?"""
    if decision.action == "keep" and wish.backend != "directory":
        return record is None or not record.made or record.uuid != decision.uuid
    return decision.action in ("make", "allocate")


# Programs that a backend needs on the node, with the package that brings each.
TOOLS = {"image": {"mkfs.xfs": "xfsprogs"}, "device": {"mkfs.xfs": "xfsprogs"}, "directory": {}}
TOOLS["lv"] = {"mkfs.xfs": "xfsprogs", "lvcreate": "lvm2"}


def missing_packages(backend: str, fio: bool, which: Callable[[str], str | None]) -> list[str]:
    tools = TOOLS[backend] | ({"fio": "fio"} if fio else {})
    return [package for program, package in tools.items() if which(program) is None]


def gib(size_bytes: float) -> float:
    return round(size_bytes / GIB, 2)


def required_gib(capacity_gib: float) -> float:
    """Space that an L2 cap needs, in GiB: cap x CAPACITY_MARGIN; 0 without L2. Raises ValueError for a cap below 0."""
    if capacity_gib < 0:
        raise ValueError(f"the L2 capacity is {capacity_gib} GiB; it must not be below 0")
    return round(capacity_gib * CAPACITY_MARGIN, 3)


def overhead_bytes(device_bytes: int) -> int:
    """Upper bound of what XFS keeps for itself (log, group headers, reserved pool).

    Measured with xfsprogs 6.1 and XFS_META: 79 MiB of 300 MiB, 104 MiB of 8 GiB, 670 MiB of 420 GiB, 6.0 of 4000 GiB.
    """
    return 128 * MIB + device_bytes // 512


def device_bytes_for(usable_bytes: int) -> int:
    """Device size whose XFS offers ``usable_bytes``, in whole MiB."""
    return math.ceil((usable_bytes + 128 * MIB) * 512 / 511 / MIB + 1) * MIB


def parse_wipefs(text: str) -> tuple[Signature, ...]:
    """Signatures of ``wipefs --no-act --json``."""
    entries = (json.loads(text) if text.strip() else {}).get("signatures") or []
    return tuple(Signature(e.get("type") or "unknown", e.get("label") or "", e.get("uuid") or "") for e in entries)


def parse_lsblk(text: str) -> tuple[Disk, ...]:
    """Top-level devices of ``lsblk --json --bytes``, each with its children."""
    return tuple(_disk(entry) for entry in json.loads(text)["blockdevices"])


def _disk(entry: Mapping[str, Any]) -> Disk:
    def word(key: str) -> str:
        return str(entry.get(key) or "").strip()

    mountpoints = entry.get("mountpoints") or [entry.get("mountpoint")]
    return Disk(
        path=word("path") or f"/dev/{word('name')}",
        type=word("type"),
        size_bytes=int(entry.get("size") or 0),
        serial=word("serial"),
        model=word("model"),
        transport=word("tran"),
        removable=bool(entry.get("rm")),
        read_only=bool(entry.get("ro")),
        fstype=word("fstype"),
        pttype=word("pttype"),
        mountpoints=tuple(str(m) for m in mountpoints if m),
        children=tuple(_disk(child) for child in entry.get("children") or []),
    )


def _below(disk: Disk) -> Iterable[Disk]:
    for child in disk.children:
        yield child
        yield from _below(child)


KINDS = {
    "gpt": "a partition table (gpt)",
    "dos": "a partition table (dos)",
    "PMBR": "a protective MBR",
    "LVM2_member": "an LVM physical volume",
    "linux_raid_member": "a member of a RAID array (mdraid)",
    "crypto_LUKS": "an encrypted volume (LUKS)",
    "swap": "swap space",
    "zfs_member": "a member of a ZFS pool",
    "ceph_bluestore": "a Ceph store",
}


def _named(signature: Signature) -> str:
    article = "an" if signature.type[:1] in "aeio" else "a"
    text = KINDS.get(signature.type, f"{article} {signature.type} filesystem")
    return text + (f" labelled {signature.label}" if signature.label else "")


def obstacles(disk: Disk) -> list[str]:
    """What forbids formatting ``disk``, each in words; empty when nothing was found on it."""
    found: list[str] = []
    if disk.type != "disk" or NOT_DISKS.match(disk.name):
        found.append(f"not a disk of its own (type {disk.type})")
    if disk.size_bytes == 0:
        found.append("no medium")
    if disk.removable or disk.transport == "usb":
        found.append("removable" if disk.removable else "attached by USB")
    if disk.read_only:
        found.append("read-only")
    found += list(dict.fromkeys(_named(signature) for signature in disk.signatures))
    if disk.pttype and not any(s.type in (disk.pttype, "PMBR") for s in disk.signatures):
        found.append(f"a partition table ({disk.pttype})")
    if disk.fstype and not any(s.type == disk.fstype for s in disk.signatures):
        found.append(_named(Signature(disk.fstype)))
    below = list(_below(disk))
    partitions = [child.name for child in below if child.type == "part"]
    if partitions:
        found.append("partitions " + ", ".join(partitions))
    holders = [f"{child.name} ({child.type})" for child in below if child.type != "part"]
    if holders:
        found.append("held by " + ", ".join(dict.fromkeys(holders)))
    mounts = [m for d in (disk, *below) for m in d.mountpoints]
    if "[SWAP]" in mounts:
        found.append("swap in use")
    if [m for m in mounts if m != "[SWAP]"]:
        found.append("mounted at " + ", ".join(dict.fromkeys(m for m in mounts if m != "[SWAP]")))
    if disk.busy and not mounts and not holders:
        found.append("in use (the kernel refuses an exclusive open)")
    if disk.probe_error:
        found.append(f"not readable ({disk.probe_error})")
    return found


def empty_disks(disks: Iterable[Disk]) -> tuple[Disk, ...]:
    """Disks on which nothing was found, by path."""
    return tuple(sorted((d for d in disks if not obstacles(d)), key=lambda d: d.path))


def listing(disks: Iterable[Disk]) -> str:
    """Every real disk with what was found on it, one a line."""
    lines = []
    for disk in sorted(disks, key=lambda d: d.path):
        if disk.type == "disk" and not NOT_DISKS.match(disk.name):
            lines.append(f"  {disk.describe()}: {', '.join(obstacles(disk)) or 'empty'}")
    return "\n".join(lines) or "  none"


def is_below(path: str, parents: Iterable[str]) -> str:
    """The first of ``parents`` that holds ``path``, or an empty string."""
    for parent in parents:
        if path == parent or path.startswith(parent.rstrip("/") + "/"):
            return parent
    return ""


def full_problem(where: str, total_bytes: int, available_bytes: int, floor_percent: float) -> Problem | None:
    """The problem of a filesystem that is nearly full, or None."""
    floor = total_bytes * floor_percent / 100
    if not total_bytes or available_bytes >= floor:
        return None
    used_percent = 100 * (1 - available_bytes / total_bytes)
    return Problem(
        found=f"{where} is {used_percent:.1f} % full: {gib(available_bytes)} of {gib(total_bytes)} GiB free",
        required=f"at least {floor_percent:g} % free ({gib(floor)} GiB): LMCache stops storing when it cannot write",
        remedy=f"systemctl stop goodput-lmcache, delete what is under {where}/lmcache (only a cache), start it again; "
        "if it fills again, the plan's L2 capacity is larger than this filesystem",
    )


def _common_problems(wish: Wish, facts: Facts) -> list[Problem]:
    problems = []
    real = facts.mount_point_real or wish.mount_point
    parent = is_below(real, FORBIDDEN_PARENTS) or is_below(wish.mount_point, FORBIDDEN_PARENTS)
    if parent:
        problems.append(
            Problem(
                f"the L2 path is {real}",
                f"a path outside {parent}: uninstalling K3s empties every filesystem mounted below it",
                "set nvme_l2_mount_point, for example to /srv/goodput/l2",
            )
        )
    if wish.owner and not facts.owner_exists:
        problems.append(
            Problem(
                f"no account {wish.owner}",
                "the account that runs LMCache exists on the node",
                "run the role host first (ansible-playbook site.yml --tags host), or set nvme_l2_owner",
            )
        )
    return problems


def _mount_problems(wish: Wish, facts: Facts, uuid: str) -> list[Problem]:
    """Foreign things at the mount point, for backends that mount a filesystem of their own there."""
    problems = []
    if facts.mount is not None and facts.mount_uuid != uuid:
        problems.append(
            Problem(
                f"{facts.mount.source} ({facts.mount.fstype}) is mounted at {wish.mount_point}",
                "nothing, or the filesystem that this role made, is mounted there",
                "unmount it, or use it as it is with nvme_l2_backend: directory",
            )
        )
    if facts.fstab_source and facts.fstab_source != f"UUID={uuid}":
        problems.append(
            Problem(
                f"/etc/fstab mounts {facts.fstab_source} at {wish.mount_point}",
                "no line, or this role's own line, for that path",
                "remove the line, or choose another nvme_l2_mount_point",
            )
        )
    if facts.mount is None and facts.mount_point_entries:
        problems.append(
            Problem(
                f"{wish.mount_point} is not a mount point and holds {facts.mount_point_entries} entries",
                "an empty folder: the new filesystem would hide them",
                "move them away, or choose another nvme_l2_mount_point",
            )
        )
    return problems


def _full(wish: Wish, facts: Facts) -> list[Problem]:
    if facts.mount is None:
        return []
    problem = full_problem(
        wish.mount_point, facts.mount.total_bytes, facts.mount.available_bytes, wish.free_floor_percent
    )
    return [problem] if problem else []


def _finish(problems: list[Problem], decision: Decision) -> Decision:
    if not problems:
        return decision
    return Decision("refuse", tuple(problems), decision.warnings, candidates=decision.candidates)


def _too_small(what: str, size_bytes: int, wish: Wish, remedy: str) -> Problem | None:
    if size_bytes - overhead_bytes(size_bytes) >= wish.required_bytes:
        return None
    return Problem(
        f"{what} has {gib(size_bytes)} GiB",
        f"{gib(device_bytes_for(wish.required_bytes))} GiB: the plan's L2 capacity x {CAPACITY_MARGIN} and XFS itself",
        remedy,
    )


def decide(wish: Wish, facts: Facts, new_uuid: Callable[[], str] = lambda: str(uuids.uuid4())) -> Decision:
    """What to do on this node; ``refuse`` carries every problem found."""
    backends = {"device": _decide_device, "image": _decide_image, "lv": _decide_lv, "directory": _decide_directory}
    if wish.backend not in backends:
        raise ValueError(f"unknown L2 backend {wish.backend!r}; choose one of {', '.join(backends)}")
    problems = _common_problems(wish, facts)
    record = facts.record
    if record is not None and record.made and record.backend != wish.backend:
        problems.append(
            Problem(
                f"this node has an L2 filesystem of backend {record.backend} (UUID {record.uuid})",
                f"backend {wish.backend} as asked, or no L2 filesystem yet",
                f"set nvme_l2_backend: {record.backend}, or first reset the role with goodput_reset_remove_data: true",
            )
        )
        return Decision("refuse", tuple(problems))
    return backends[wish.backend](wish, facts, problems, new_uuid)


def _ours(signatures: Iterable[Signature], uuid: str) -> bool:
    return bool(uuid) and any(s.type == "xfs" and s.uuid == uuid for s in signatures)


def _decide_device(wish: Wish, facts: Facts, problems: list[Problem], new_uuid: Callable[[], str]) -> Decision:
    empty = empty_disks(facts.disks)
    disks = [d for d in facts.disks if d.type == "disk" and not NOT_DISKS.match(d.name)]
    known = wish.adopt_uuid or (facts.record.uuid if facts.record else "")
    ours = [d for d in disks if _ours(d.signatures, known)]
    refused = Decision("refuse", candidates=empty)
    full_list = f"disks of this node:\n{listing(disks)}"

    if len(ours) > 1:
        paths = ", ".join(d.describe() for d in ours)
        problems.append(Problem(f"UUID {known} on {paths}", "one disk with that UUID", "detach the copy"))
        return _finish(problems, refused)
    if ours:
        disk = ours[0]
        recorded = facts.record.serial if facts.record and not wish.adopt_uuid else disk.serial
        if disk.serial != recorded or wish.serial not in ("", disk.serial):
            problems.append(
                Problem(
                    f"this node's L2 filesystem (UUID {known}) is on {disk.describe()}",
                    f"serial {wish.serial or recorded}",
                    f"set nvme_l2_format_serial: {disk.serial}, or first reset the role with "
                    "goodput_reset_remove_data: true",
                )
            )
        small = _too_small(disk.path, disk.size_bytes, wish, "lower the plan's L2 capacity or use a larger disk")
        problems += [small] if small else []
        elsewhere = [m for m in disk.mountpoints if m != wish.mount_point]
        if elsewhere:
            problems.append(
                Problem(
                    f"{disk.path} is mounted at {', '.join(elsewhere)}",
                    f"mounted at {wish.mount_point} only",
                    f"umount {elsewhere[0]}",
                )
            )
        problems += _mount_problems(wish, facts, known) + _full(wish, facts)
        return _finish(
            problems, Decision("keep", device=disk.path, serial=disk.serial, uuid=known, size_bytes=disk.size_bytes)
        )

    if not wish.serial:
        problems.append(
            Problem(
                f"no consent to format a disk; {full_list}",
                "nvme_l2_format_serial names the serial of the one disk to format",
                f"set nvme_l2_format_serial: {empty[0].serial} for this host (this erases {empty[0].describe()}); "
                "other empty disks: " + (", ".join(d.describe() for d in empty[1:]) or "none")
                if empty
                else "no disk of this node is empty; a Spark with its one NVMe uses nvme_l2_backend: image",
            )
        )
        return _finish(problems, refused)
    named = [d for d in disks if d.serial == wish.serial]
    if len(named) != 1:
        problems.append(
            Problem(
                f"{len(named)} disks with serial {wish.serial}; {full_list}",
                f"exactly one disk with serial {wish.serial} (nvme_l2_format_serial)",
                "set nvme_l2_format_serial to the serial of an empty disk: "
                + (", ".join(d.describe() for d in empty) or "there is none"),
            )
        )
        return _finish(problems, refused)
    disk = named[0]
    found = obstacles(disk)
    if found:
        remedy = "nothing was changed. Choose an empty disk: " + (
            ", ".join(d.describe() for d in empty) or "there is none"
        )
        left = [s for s in disk.signatures if s.type == "xfs" and s.label == wish.label]
        if left:
            remedy += f"; or, if it is a former L2 filesystem, adopt it with nvme_l2_adopt_uuid: {left[0].uuid}"
        problems.append(Problem(f"{disk.describe()} holds {', '.join(found)}", "a disk without any content", remedy))
    small = _too_small(disk.describe(), disk.size_bytes, wish, "lower the plan's L2 capacity or name a larger disk")
    problems += [small] if small else []
    uuid = facts.record.uuid if facts.record and not facts.record.made else new_uuid()
    problems += _mount_problems(wish, facts, uuid)
    return _finish(
        problems,
        Decision("make", device=disk.path, serial=disk.serial, uuid=uuid, size_bytes=disk.size_bytes, candidates=empty),
    )


def _decide_image(wish: Wish, facts: Facts, problems: list[Problem], new_uuid: Callable[[], str]) -> Decision:
    image = facts.image or Image(False)
    wanted = device_bytes_for(wish.required_bytes)
    warnings = [
        f"{disk.describe()} is empty: nvme_l2_backend: device with nvme_l2_format_serial: {disk.serial} would use it "
        "instead of a file on the root filesystem"
        for disk in empty_disks(facts.disks)
        if disk.serial and not _too_small("", disk.size_bytes, wish, "")
    ]
    parent = is_below(image.real_path or wish.image, FORBIDDEN_PARENTS)
    if parent:
        problems.append(
            Problem(
                f"nvme_l2_image is {wish.image}", f"a path outside {parent}", "set nvme_l2_image: /srv/goodput/l2.img"
            )
        )
    if image.parent_fstype not in PREALLOCATING:
        problems.append(
            Problem(
                f"{wish.image} would be on {image.parent_fstype or 'an unknown filesystem'}",
                f"a filesystem that can reserve space: {', '.join(PREALLOCATING)}",
                "set nvme_l2_image to a path on such a filesystem",
            )
        )
    known = wish.adopt_uuid or (facts.record.uuid if facts.record else "")
    decision = Decision(
        "make", warnings=tuple(warnings), device=wish.image, uuid=known or new_uuid(), size_bytes=wanted
    )
    if not image.exists or (
        facts.record and not facts.record.made and facts.record.device == wish.image and not image.signatures
    ):
        needed = wanted - image.allocated_bytes + wish.root_reserve_bytes
        if image.parent_free_bytes < needed:
            problems.append(
                Problem(
                    f"{gib(image.parent_free_bytes)} GiB are free where {wish.image} would be",
                    f"{gib(needed)} GiB: the image {gib(wanted)} and "
                    f"nvme_l2_root_reserve_gib {gib(wish.root_reserve_bytes)}",
                    "lower the plan's L2 capacity, free space, or set nvme_l2_image to a larger filesystem",
                )
            )
    elif not _ours(image.signatures, known):
        held = ", ".join(_named(s) for s in image.signatures) or "no filesystem"
        problems.append(
            Problem(
                f"{wish.image} exists ({gib(image.size_bytes)} GiB, {held}) and this role did not make it",
                "no file at that path",
                "nothing was changed. Move the file away or set nvme_l2_image to another path"
                + "".join(
                    f"; a former L2 image: nvme_l2_adopt_uuid: {s.uuid}"
                    for s in image.signatures
                    if s.label == wish.label
                ),
            )
        )
    else:
        holes = image.size_bytes - image.allocated_bytes
        small = _too_small(
            wish.image,
            image.size_bytes,
            wish,
            "lower the plan's L2 capacity, or reset with goodput_reset_remove_data: true and run again",
        )
        problems += [small] if small else []
        if holes > 0 and image.parent_free_bytes < holes + wish.root_reserve_bytes:
            problems.append(
                Problem(
                    f"{wish.image} lost {gib(holes)} GiB of its reservation, "
                    f"{gib(image.parent_free_bytes)} GiB are free",
                    f"{gib(holes + wish.root_reserve_bytes)} GiB to reserve it again",
                    "free space on that filesystem",
                )
            )
        problems += _full(wish, facts)
        decision = Decision(
            "allocate" if holes > 0 else "keep",
            warnings=tuple(warnings),
            device=wish.image,
            uuid=known,
            size_bytes=image.size_bytes,
        )
    problems += _mount_problems(wish, facts, decision.uuid)
    return _finish(problems, decision)


def _decide_lv(wish: Wish, facts: Facts, problems: list[Problem], new_uuid: Callable[[], str]) -> Decision:
    volume = facts.volume or Volume()
    name = f"{wish.volume_group}/{wish.logical_volume}"
    groups = ", ".join(f"{group} ({gib(free)} GiB free)" for group, free in sorted(volume.groups.items())) or "none"
    wanted = device_bytes_for(wish.required_bytes)
    known = wish.adopt_uuid or (facts.record.uuid if facts.record else "")
    decision = Decision("make", device=f"/dev/{name}", uuid=known or new_uuid(), size_bytes=wanted)
    if wish.volume_group not in volume.groups:
        problems.append(
            Problem(
                f"volume groups of this node: {groups}",
                f"volume group {wish.volume_group or '(nvme_l2_volume_group is not set)'}",
                "set nvme_l2_volume_group to one of them; a stock Spark has no LVM and uses nvme_l2_backend: image",
            )
        )
        return _finish(problems, decision)
    half_done = (
        facts.record and not facts.record.made and facts.record.device == f"/dev/{name}" and not volume.signatures
    )
    if not volume.exists:
        if volume.groups[wish.volume_group] < wanted:
            problems.append(
                Problem(
                    f"volume groups of this node: {groups}",
                    f"{gib(wanted)} GiB free in {wish.volume_group}",
                    "lower the plan's L2 capacity or free space in the volume group",
                )
            )
    elif half_done:
        decision = Decision("make", device=f"/dev/{name}", uuid=known, size_bytes=volume.size_bytes)
    elif not _ours(volume.signatures, known):
        held = ", ".join(_named(s) for s in volume.signatures) or "no filesystem"
        problems.append(
            Problem(
                f"logical volume {name} exists ({gib(volume.size_bytes)} GiB, {held}) and this role did not make it",
                "no logical volume of that name",
                "nothing was changed. Set nvme_l2_logical_volume to another name",
            )
        )
    else:
        small = _too_small(
            name, volume.size_bytes, wish, "lower the plan's L2 capacity or grow the volume (lvextend -r)"
        )
        problems += [small] if small else []
        problems += _full(wish, facts)
        decision = Decision("keep", device=f"/dev/{name}", uuid=known, size_bytes=volume.size_bytes)
    problems += _mount_problems(wish, facts, decision.uuid)
    return _finish(problems, decision)


def _decide_directory(wish: Wish, facts: Facts, problems: list[Problem], new_uuid: Callable[[], str]) -> Decision:
    warnings = []
    if facts.directory_mount in ("/", "/var", "/var/lib"):
        warnings.append(
            f"{wish.mount_point} is on the filesystem of {facts.directory_mount}: if L2 fills it, the node stops too "
            "(DiskPressure under Kubernetes). nvme_l2_backend: image bounds it"
        )
    free = facts.directory_free_bytes + facts.directory_used_bytes
    if free < wish.required_bytes + wish.root_reserve_bytes:
        problems.append(
            Problem(
                f"{gib(free)} GiB are free for {wish.mount_point} on the filesystem of {facts.directory_mount}",
                f"{gib(wish.required_bytes + wish.root_reserve_bytes)} GiB: the plan's L2 capacity x {CAPACITY_MARGIN} "
                f"and nvme_l2_root_reserve_gib {gib(wish.root_reserve_bytes)}",
                "lower the plan's L2 capacity or free space",
            )
        )
    return _finish(problems, Decision("keep", warnings=tuple(warnings), device=wish.mount_point))


# --- asking a node -------------------------------------------------------------------------------------------------

LSBLK = [
    "lsblk",
    "--json",
    "--bytes",
    "--output",
    "NAME,PATH,TYPE,SIZE,SERIAL,MODEL,TRAN,RM,RO,FSTYPE,PTTYPE,MOUNTPOINTS",
]


def _exclusive_open_fails(path: str) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_EXCL))
    except OSError:
        return True
    return False


def _signatures(run: Runner, path: str) -> tuple[tuple[Signature, ...], str]:
    code, out, err = run(["wipefs", "--no-act", "--json", path])
    if code:
        return (), (err or out).strip() or f"wipefs exit {code}"
    return parse_wipefs(out), ""


def probe_disk(run: Runner, disk: Disk) -> Disk:
    """``disk`` with its signatures read from the medium (udev's view may be stale)."""
    if disk.type != "disk" or NOT_DISKS.match(disk.name) or disk.size_bytes == 0:
        return disk
    signatures, error = _signatures(run, disk.path)
    return replace(disk, signatures=signatures, probe_error=error, busy=_exclusive_open_fails(disk.path))


def filesystem_uuid(run: Runner, source: str) -> str:
    """UUID that the medium of a mounted filesystem has, or an empty string."""
    code, out, _err = run(["blkid", "-p", "-o", "value", "-s", "UUID", source])
    return out.strip() if code == 0 else ""


def read_record(path: str) -> Record | None:
    try:
        data = json.loads(Path(path).read_text())
    except FileNotFoundError:
        return None
    return Record(**{key: data[key] for key in Record.__dataclass_fields__ if key in data})


def find_mount(mountinfo: str, path: str) -> tuple[str, str, tuple[str, ...]] | None:
    """(source, fstype, options) of what mountinfo shows at ``path``; the last mount wins."""
    found = None
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 6 and len(tail) >= 3 and fields[4].replace("\\040", " ") == path:
            options = dict.fromkeys([*fields[5].split(","), *tail[2].split(",")])
            found = (tail[1], tail[0], tuple(options))
    return found


def containing_mount(mountinfo: str, path: str) -> tuple[str, str]:
    """(mount point, fstype) of the filesystem that holds ``path``."""
    best = ("/", "")
    for line in mountinfo.splitlines():
        left, _, right = line.partition(" - ")
        fields, tail = left.split(), right.split()
        if len(fields) >= 6 and tail and is_below(path, [fields[4]]) and len(fields[4]) >= len(best[0]):
            best = (fields[4], tail[0])
    return best


def parse_fstab(text: str, path: str) -> tuple[str, str]:
    """(source, options) of the fstab line for ``path``, else empty strings."""
    for line in text.splitlines():
        fields = line.split("#", 1)[0].split()
        if len(fields) >= 4 and fields[1] == path:
            return fields[0], fields[3]
    return "", ""


def existing_parent(path: str) -> str:
    current = Path(path)
    while not current.exists():
        current = current.parent
    return str(current)


def _read(path: str) -> str:
    try:
        return Path(path).read_text()
    except FileNotFoundError:
        return ""


def _image(run: Runner, path: str, mountinfo: str) -> Image:
    parent = existing_parent(str(Path(path).parent))
    space = os.statvfs(parent)
    real = os.path.realpath(path)
    image = Image(
        os.path.exists(path),
        real_path=real,
        parent_fstype=containing_mount(mountinfo, os.path.realpath(parent))[1],
        parent_free_bytes=space.f_bavail * space.f_frsize,
    )
    if not image.exists:
        return image
    status = os.stat(path)
    signatures, error = _signatures(run, path)
    if error:
        signatures = (Signature(f"unreadable ({error})"),)
    allocated = min(status.st_blocks * 512, status.st_size)
    return replace(image, size_bytes=status.st_size, allocated_bytes=allocated, signatures=signatures)


def _volume(run: Runner, group: str, name: str) -> Volume:
    try:
        code, out, _err = run(["vgs", "--reportformat", "json", "--units", "b", "--nosuffix", "-o", "vg_name,vg_free"])
    except OSError:
        return Volume()
    if code or not out.strip():
        return Volume()
    groups = {row["vg_name"]: int(row["vg_free"]) for row in json.loads(out)["report"][0]["vg"]}
    path = f"/dev/{group}/{name}"
    if group not in groups or not os.path.exists(path):
        return Volume(groups)
    code, out, _err = run(["blockdev", "--getsize64", path])
    return Volume(groups, True, path, int(out or 0), _signatures(run, path)[0])


def gather(run: Runner, wish: Wish, record_path: str, lvm: bool = True) -> Facts:
    """Everything ``decide`` needs from this node. Reads only."""
    mountinfo = _read("/proc/self/mountinfo")
    code, out, err = run(LSBLK)
    if code:
        raise RuntimeError(f"lsblk failed with exit {code}: {err.strip()}")
    disks = tuple(probe_disk(run, disk) for disk in parse_lsblk(out))
    real = os.path.realpath(wish.mount_point)
    found = find_mount(mountinfo, real)
    mount, mount_uuid = None, ""
    if found:
        space = os.statvfs(real)
        mount = Mount(*found, space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize)
        mount_uuid = filesystem_uuid(run, found[0])
    source, options = parse_fstab(_read("/etc/fstab"), wish.mount_point)
    directory = existing_parent(real)
    space = os.statvfs(directory)
    entries = list(os.scandir(real)) if os.path.isdir(real) else []
    used = 0
    if wish.backend == "directory":
        used = sum(f.stat().st_blocks * 512 for f in Path(real).rglob("*") if f.is_file()) if entries else 0
    try:
        owner_exists = bool(wish.owner and pwd.getpwnam(wish.owner))
    except KeyError:
        owner_exists = False
    return Facts(
        disks=disks,
        record=read_record(record_path),
        mount=mount,
        mount_uuid=mount_uuid,
        fstab_source=source,
        fstab_options=options,
        mount_point_real=real,
        mount_point_entries=len(entries),
        directory_mount=containing_mount(mountinfo, real)[0],
        directory_free_bytes=space.f_bavail * space.f_frsize,
        directory_used_bytes=used,
        image=_image(run, wish.image, mountinfo) if wish.backend == "image" else None,
        volume=_volume(run, wish.volume_group, wish.logical_volume) if wish.backend == "lv" and lvm else None,
        owner_exists=owner_exists,
    )
