# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""The runtime archive on a node: which file it is, whether it is mounted, whether it is the one that was asked for.

An archive is a squashfs with ``VERSION.json``, ``site-packages/`` and ``bin/``. Its sha256 is its identity. Hashing
300 MB costs an emulated guest a quarter of a minute, so a full hash is remembered in ``checked.json`` together with
what identifies the file cheaply (size, time, inode and a hash of both ends); ``full`` ignores the memory.

Nothing here changes a node except ``Memory.write``. Standard library only.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EDGE_BYTES = 65536
INTERPRETER = "/usr/bin/python3"
# What the units start or import; a mount that lacks one of them is not a runtime.
CONTENT = ("bin/lmcache", "site-packages/dynamo", "site-packages/lmcache", "site-packages/torch")
# Shared libraries of the system that the wheels link.
LIBRARIES = {"libstdc++.so.6": "libstdc++6", "libgcc_s.so.1": "libgcc-s1"}
# Dynamo's x86_64 wheels are compiled for it and die with SIGILL otherwise; aarch64 has no such condition.
CPU_FEATURES = {"x86_64": ("avx2",)}
IMPORTS = "import torch, dynamo.mocker, dynamo.frontend, lmcache.cli.main"


@dataclass(frozen=True)
class Finding:
    """One thing that is not as required, and how to get there."""

    check: str
    found: str
    required: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.check}: found {self.found}; required: {self.required}; fix: {self.remedy}"


@dataclass(frozen=True)
class Required:
    """What the site asks for. Empty strings are not checked."""

    sha256: str
    release: str = ""
    dynamo: str = ""
    lmcache: str = ""
    python: str = ""


@dataclass(frozen=True)
class Archive:
    """The archive file on the node. ``sha256`` is '' if there is no file; ``marks`` identify it cheaply."""

    path: str
    exists: bool
    sha256: str = ""
    hashed: bool = False
    marks: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Mount:
    """``source``: the file behind the loop device, or the device; ``entries``: files in it when nothing is mounted."""

    path: str
    mounted: bool
    fstype: str = ""
    source: str = ""
    read_only: bool = False
    fstab: bool = False
    entries: int = 0
    version: dict[str, Any] | None = None
    missing: tuple[str, ...] = ()


@dataclass(frozen=True)
class System:
    """What the node brings: ``machine`` as uname says it, Python as MAJOR.MINOR."""

    machine: str
    python: str
    cpu_features: frozenset[str]
    missing_libraries: tuple[str, ...]


# --------------------------------------------------------------------------------------------------------------------
# The archive
# --------------------------------------------------------------------------------------------------------------------


def sha256_of(path: Path) -> str:
    """The whole file's sha256. OSError if it can not be read."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def marks_of(path: Path) -> dict[str, Any]:
    """Size, time, inode, and the sha256 of the first and last 64 KiB.

    A medium is often rebuilt with the same times, inodes and sizes; the tables at the end of a squashfs then differ.
    """
    with path.open("rb") as file:
        status = os.fstat(file.fileno())
        edges = hashlib.sha256(file.read(EDGE_BYTES))
        file.seek(max(0, status.st_size - EDGE_BYTES))
        edges.update(file.read(EDGE_BYTES))
    return {
        "size_bytes": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "inode": status.st_ino,
        "edges_sha256": edges.hexdigest(),
    }


class Memory:
    """``checked.json``: the full hash of archives seen before, by path."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            content = json.loads(path.read_text())
        except (OSError, ValueError):
            content = {}
        self.entries: dict[str, dict[str, Any]] = content if isinstance(content, dict) else {}

    def recall(self, path: str, marks: dict[str, Any]) -> str:
        """The sha256 of ``path`` if the file still bears the same marks, else ''."""
        entry = self.entries.get(path)
        if isinstance(entry, dict) and {key: entry.get(key) for key in marks} == marks:
            return str(entry.get("sha256", ""))
        return ""

    def write(self, archive: Archive) -> None:
        """Remember ``archive`` and forget every other; the file appears whole or not at all."""
        self.entries = {archive.path: {**archive.marks, "sha256": archive.sha256}}
        partial = self.path.with_suffix(".new")
        partial.write_text(json.dumps(self.entries, indent=2, sort_keys=True) + "\n")
        partial.chmod(0o644)
        partial.replace(self.path)


def look_at_archive(path: str, memory: Memory, full: bool = False) -> Archive:
    """Identify the file at ``path``; the whole file is read unless ``memory`` knows it."""
    file = Path(path)
    if not path or not file.is_file():
        return Archive(path, False)
    marks = marks_of(file)
    known = "" if full else memory.recall(path, marks)
    return Archive(path, True, known or sha256_of(file), not known, marks)


# --------------------------------------------------------------------------------------------------------------------
# The mount
# --------------------------------------------------------------------------------------------------------------------


def unescape(text: str) -> str:
    """Undo the octal escapes of mountinfo and fstab."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def mount_entry(mountinfo: str, path: str) -> tuple[str, str, bool] | None:
    """(filesystem type, source, read-only) of what is visible at ``path``, or None."""
    found = None
    for line in mountinfo.splitlines():
        cells = line.split()
        if "-" not in cells or unescape(cells[4]) != path:
            continue
        rest = cells[cells.index("-") + 1 :]
        found = (rest[0], unescape(rest[1]), "ro" in cells[5].split(",") or "ro" in rest[2].split(","))
    return found


def fstab_has(fstab: str, source: str, path: str, options: str) -> bool:
    """True if exactly one line mounts something at ``path`` and it is the one that the role writes."""
    lines = [line.split() for line in fstab.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    here = [cells for cells in lines if len(cells) > 1 and unescape(cells[1]) == path]
    return [cells[:4] for cells in here] == [[source, path, "squashfs", options]]


def read_or_empty(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def look_at_mount(path: str, archive: str, options: str, proc: Path, sysfs: Path, etc: Path) -> Mount:
    """What is mounted at ``path``. VERSION.json is read only from a mount."""
    fstab = fstab_has(read_or_empty(etc / "fstab"), archive, path, options)
    entry = mount_entry(read_or_empty(proc / "self/mountinfo"), path)
    if entry is None:
        entries = len(os.listdir(path)) if os.path.isdir(path) else 0
        return Mount(path, False, fstab=fstab, entries=entries)
    fstype, source, read_only = entry
    device = re.fullmatch(r"/dev/(loop\d+)", source)
    if device:
        source = read_or_empty(sysfs / "block" / device[1] / "loop/backing_file").rstrip("\n") or source
    try:
        version = json.loads(read_or_empty(Path(path) / "VERSION.json"))
    except ValueError:
        version = None
    missing = tuple(name for name in CONTENT if not os.path.exists(os.path.join(path, name)))
    version = version if isinstance(version, dict) else None
    return Mount(path, True, fstype, source, read_only, fstab, 0, version, missing)


# --------------------------------------------------------------------------------------------------------------------
# The system
# --------------------------------------------------------------------------------------------------------------------


def cpu_features(cpuinfo: str) -> frozenset[str]:
    """Feature names of /proc/cpuinfo: ``flags`` on x86_64, ``Features`` on aarch64."""
    match = re.search(r"^(?:flags|Features)\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(match[1].split()) if match else frozenset()


def python_version(interpreter: str = INTERPRETER) -> str:
    """MAJOR.MINOR of the interpreter that the units start, '' if there is none."""
    name = re.fullmatch(r"python(\d+\.\d+)", os.path.basename(os.path.realpath(interpreter)))
    if name and os.path.exists(interpreter):
        return name[1]
    code = "import sys; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([interpreter, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def look_at_system(machine: str, proc: Path, can_load: Callable[[str], bool] = loads) -> System:
    features = cpu_features(read_or_empty(proc / "cpuinfo"))
    return System(machine, python_version(), features, tuple(name for name in LIBRARIES if not can_load(name)))


def try_imports(mount: str, timeout_seconds: float) -> str:
    """Import what the units start; '' or the last line of the error. Takes about a minute on an emulated guest."""
    environment = {**os.environ, "PYTHONPATH": f"{mount}/site-packages", "LMCACHE_TRACK_USAGE": "false"}
    try:
        done = subprocess.run(
            [INTERPRETER, "-B", "-c", IMPORTS], capture_output=True, text=True, env=environment, timeout=timeout_seconds
        )
    except subprocess.TimeoutExpired:
        return f"no end after {timeout_seconds:.0f} s"
    if done.returncode == 0:
        return ""
    return ([line for line in done.stderr.splitlines() if line.strip()] or [f"exit {done.returncode}"])[-1]


# --------------------------------------------------------------------------------------------------------------------
# The verdict
# --------------------------------------------------------------------------------------------------------------------


def judge_system(system: System, required: Required) -> Iterable[Finding]:
    absent = [name for name in CPU_FEATURES.get(system.machine, ()) if name not in system.cpu_features]
    if absent:
        yield Finding(
            "CPU",
            f"{system.machine} without {', '.join(absent)}",
            f"{', '.join(absent)} (Dynamo's wheels are compiled for it)",
            "use a CPU that has it; for an emulated guest start QEMU with -cpu max",
        )
    if required.python and system.python != required.python:
        yield Finding(
            "Python",
            f"{INTERPRETER} {system.python or 'missing'}",
            required.python,
            f"install python{required.python}, or use a runtime archive made for Python {system.python or '3.x'}",
        )
    for name in system.missing_libraries:
        yield Finding("library", f"no {name}", f"{name}", f"apt-get install {LIBRARIES[name]}")


def judge_archive(
    archive: Archive, required: Required, copied: bool, may_be_missing: bool = False
) -> Iterable[Finding]:
    """``copied``: the role makes this file, so the remedy is another run."""
    again = f"`rm -f {archive.path}` on this node and run the role runtime, which copies it again"
    if not archive.exists:
        if not may_be_missing:
            yield Finding(
                "runtime archive",
                f"no file {archive.path}",
                f"the archive with sha256 {required.sha256}",
                again
                if copied
                else "attach and mount the medium that holds it (runtime_node_archive), or set runtime_archive to a "
                "file on the controller instead",
            )
    elif archive.sha256 != required.sha256:
        yield Finding(
            "runtime archive",
            f"{archive.path} with sha256 {archive.sha256}",
            f"sha256 {required.sha256} (runtime_sha256)",
            again
            if copied
            else "put the right archive there (the medium may be old), or correct runtime_sha256 for all nodes",
        )


def is_current(mount: Mount, archive: Archive) -> bool:
    """True if ``archive`` is what is mounted. The kernel names the file behind a loop device without links."""
    return mount.mounted and mount.source == os.path.realpath(archive.path)


def judge_mount(mount: Mount, archive: Archive, required: Required, system: System) -> Iterable[Finding]:
    again = "run the role runtime again"
    if not mount.mounted:
        yield Finding("runtime mount", f"nothing mounted at {mount.path}", archive.path, again)
        return
    if not is_current(mount, archive):
        yield Finding("runtime mount", f"{mount.source} at {mount.path}", f"{archive.path}", again)
        return
    if not mount.read_only:
        yield Finding("runtime mount", f"{mount.path} writable", "read-only", again)
    if not mount.fstab:
        yield Finding("runtime mount", f"no or another line for {mount.path} in /etc/fstab", "the role's line", again)
    if mount.version is None or mount.missing:
        lost = ", ".join((*(() if mount.version else ("a readable VERSION.json",)), *mount.missing))
        yield Finding(
            "runtime content",
            f"{mount.path} without {lost}",
            "VERSION.json, " + ", ".join(CONTENT),
            "build the archive again (docs/runtime.md) and set its runtime_sha256",
        )
        return
    wanted = {
        "release": required.release,
        "dynamo": required.dynamo,
        "lmcache": required.lmcache,
        "arch": system.machine,
        "python": system.python,
    }
    for name, value in wanted.items():
        found = str(mount.version.get(name, ""))
        if value and found != value:
            yield Finding(
                "runtime version",
                f"{name} {found or 'not named'} in {mount.path}/VERSION.json",
                f"{name} {value}",
                "use an archive made for this release set and node, or choose the release set that fits it "
                "(goodput_release)",
            )


def preflight(archive: Archive, mount: Mount, system: System, required: Required, copied: bool) -> list[Finding]:
    """Findings before anything is changed. ``copied``: the role copies the archive, so it may still be missing."""
    findings = [*judge_system(system, required), *judge_archive(archive, required, copied, copied)]
    if not mount.mounted and mount.entries:
        findings.append(
            Finding(
                "runtime mount",
                f"{mount.entries} entries in {mount.path}",
                "an empty directory or none",
                f"move them away, or set runtime_mount to another directory than {mount.path}",
            )
        )
    return findings


def verify(
    archive: Archive, mount: Mount, system: System, required: Required, copied: bool, imports: str = ""
) -> list[Finding]:
    """Findings after the role has run. ``imports`` is what ``try_imports`` returned."""
    findings = [
        *judge_system(system, required),
        *judge_archive(archive, required, copied),
        *judge_mount(mount, archive, required, system),
    ]
    if imports:
        findings.append(
            Finding(
                "runtime imports",
                imports,
                f"`{IMPORTS}` succeeds",
                "build the archive again for this node's Python and architecture (docs/runtime.md)",
            )
        )
    return findings
