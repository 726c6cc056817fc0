# Apache-2.0 (see LICENSE)
"""What a role made on a node, and how to undo it.

A manifest is one JSON document a role, ``/var/lib/goodput/manifest.d/ROLE.json``. ``claim`` writes down the former
state of everything a role is about to touch, *before* it does, and keeps the first answer for ever; ``record`` adds the
checksums of what the role wrote; ``undo`` puts the former state back, in reverse; ``drift`` compares. Nothing that is
not listed is ever touched.

An item that two roles list keeps the former state of the role that claimed it first, and is undone with the last of
them, so that one role can be reset alone. A directory above a claimed path is listed, too, if it is missing or if
another role lists it.

All paths in a manifest are absolute paths of the node. ``Host.root`` is put before them to work on a tree elsewhere
(tests); commands go through ``Host.run``.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import re
import shutil
import stat
import subprocess
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

FORMAT = 1
STATE_DIR = "/var/lib/goodput"
MANIFEST_DIR = f"{STATE_DIR}/manifest.d"
BACKUP_DIR = f"{STATE_DIR}/backup"
SAVED_SUFFIX = ".goodput-saved"
# Larger files are hashed again only when their size or modification time differs from the recorded one.
LARGE_FILE_BYTES = 64 * 1024 * 1024

SECTIONS = ("files", "directories", "units", "mounts", "sysctls", "packages", "users", "data_paths")
PATH_SECTIONS = ("files", "directories", "mounts", "data_paths")
SINGULAR = {
    "files": "file",
    "directories": "directory",
    "units": "unit",
    "mounts": "mount",
    "sysctls": "sysctl",
    "packages": "package",
    "users": "user",
    "data_paths": "data",
}
UNIT_SUFFIXES = (".service", ".socket", ".target", ".timer", ".mount", ".automount", ".path", ".slice", ".swap")
RUNNING = ("active", "activating", "reloading", "refreshing")
# Never the root of something that is removed with all its content.
SYSTEM_TREES = ("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc", "/run", "/sbin", "/sys", "/usr")
SYSTEM_DIRECTORIES = ("/var/lib", "/var/log", "/var/cache", "/var/spool", STATE_DIR)

Item = dict[str, Any]
Manifest = dict[str, Any]
# argv -> (exit status, stdout, stderr)
Run = Callable[[Sequence[str]], tuple[int, str, str]]


class ManifestError(Exception):
    """A refusal or a failed step; the text names the value, the rule and the remedy."""


def run_command(argv: Sequence[str]) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            list(argv), capture_output=True, text=True, check=False, env={**os.environ, "LC_ALL": "C"}
        )
    except OSError as error:
        return 127, "", str(error)
    return done.returncode, done.stdout, done.stderr


# --------------------------------------------------------------------------------------------------------------------
# The node
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class UnitState:
    """``load``: loaded, not-found, masked…; ``enabled``: UnitFileState; ``active``: ActiveState."""

    load: str
    enabled: str
    active: str

    @property
    def known(self) -> bool:
        return self.load != "not-found"

    @property
    def masked(self) -> bool:
        return self.load == "masked" or self.enabled.startswith("masked")

    @property
    def starts_at_boot(self) -> bool:
        return self.enabled in ("enabled", "enabled-runtime", "linked", "linked-runtime")

    @property
    def running(self) -> bool:
        return self.active in RUNNING

    def words(self) -> str:
        if not self.known:
            return "not there"
        return f"{self.enabled or self.load}, {self.active}"


@dataclass
class Host:
    """The one place that reads and changes the node outside plain files."""

    root: str = "/"
    run: Run = run_command

    def path(self, absolute: str) -> str:
        return absolute if self.root == "/" else os.path.join(self.root, absolute.lstrip("/"))

    def must(self, *argv: str) -> str:
        status, out, err = self.run(argv)
        if status != 0:
            raise ManifestError(f"`{' '.join(argv)}` failed with exit {status}: {(err or out).strip()}")
        return out

    def read(self, absolute: str) -> str | None:
        try:
            with open(self.path(absolute), encoding="utf-8", errors="surrogateescape") as stream:
                return stream.read()
        except OSError:
            return None

    # systemd

    def units(self, names: Sequence[str]) -> dict[str, UnitState]:
        """States of all units with one call; `systemctl show` answers in the order asked, parted by blank lines."""
        if not names:
            return {}
        out = self.must("systemctl", "show", "--property=LoadState,UnitFileState,ActiveState", "--", *names)
        blocks = [block for block in out.strip().split("\n\n") if block.strip()]
        if len(blocks) != len(names):
            raise ManifestError(
                f"`systemctl show` answered for {len(blocks)} units, asked for {len(names)}: {', '.join(names)}"
            )
        states = {}
        for name, block in zip(names, blocks, strict=True):
            values = dict(line.partition("=")[::2] for line in block.splitlines())
            states[name] = UnitState(
                values.get("LoadState", ""), values.get("UnitFileState", ""), values.get("ActiveState", "")
            )
        return states

    def systemctl(self, verb: str, names: Sequence[str] = ()) -> None:
        if verb == "daemon-reload" or names:
            self.must("systemctl", verb, *(["--", *names] if names else []))

    # sysctl: the files under /proc/sys are the interface that sysctl(8) uses itself

    def sysctl_path(self, name: str) -> str:
        """Where sysctl(8) looks: the first separator decides whether "." or "/" parts the words."""
        first = next((char for char in name if char in "./"), ".")
        words = name if first == "/" else name.translate(str.maketrans("./", "/."))
        return f"/proc/sys/{words}"

    def sysctl(self, name: str) -> str | None:
        value = self.read(self.sysctl_path(name))
        return None if value is None else " ".join(value.split())

    def set_sysctl(self, name: str, value: str) -> str | None:
        """None, or why the kernel did not take the value."""
        try:
            with open(self.path(self.sysctl_path(name)), "w", encoding="utf-8") as stream:
                stream.write(value)
        except OSError as error:
            return str(error.strerror or error)
        return None

    # mounts

    def mounts(self) -> list[tuple[str, str, str]]:
        """(mount point, source, filesystem type) of everything mounted, in mounting order."""
        found = []
        for line in (self.read("/proc/self/mountinfo") or "").splitlines():
            left, _, right = line.partition(" - ")
            fields, tail = left.split(), right.split()
            if len(fields) >= 5 and len(tail) >= 2:
                found.append((unescape(fields[4]), unescape(tail[1]), tail[0]))
        return found

    def mounted(self, mount_point: str) -> Item | None:
        layers = [entry for entry in self.mounts() if entry[0] == mount_point]
        return {"source": layers[-1][1], "fstype": layers[-1][2]} if layers else None

    def unmount(self, mount_point: str) -> None:
        # An automount and the filesystem above it are two layers.
        for _layer in [entry for entry in self.mounts() if entry[0] == mount_point]:
            status, out, err = self.run(("umount", "--", mount_point))
            if status != 0:
                raise ManifestError(
                    f"found {mount_point} in use: {(err or out).strip()}; required: nothing uses it; "
                    f"fix: stop what `fuser -vm {mount_point}` lists, then run the reset again"
                )

    # packages and users

    def installed(self, names: Sequence[str]) -> set[str]:
        if not names:
            return set()
        # Exit 1 only says that one of them is unknown.
        _status, out, _err = self.run(("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", "--", *names))
        return {line.split()[0] for line in out.splitlines() if line.endswith(" installed")}

    def user_exists(self, name: str) -> bool:
        status, out, err = self.run(("getent", "passwd", name))
        if status not in (0, 2):
            raise ManifestError(f"`getent passwd {name}` failed with exit {status}: {(err or out).strip()}")
        return status == 0


def unescape(text: str) -> str:
    r"""Undo the octal escapes (``\040``) of fstab and mountinfo."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), text)


def fstab_lines(text: str, mount_point: str) -> list[str]:
    """The lines whose second field is exactly this mount point."""
    return [line for line in text.splitlines() if fstab_mount_point(line) == mount_point]


def fstab_mount_point(line: str) -> str | None:
    fields = line.split()
    if len(fields) < 2 or fields[0].startswith("#"):
        return None
    point = unescape(fields[1])
    return point.rstrip("/") or point


def fstab_restored(text: str, mount_point: str, former: Sequence[str]) -> str:
    """The text with the lines of this mount point replaced by the former ones, every other line as it is."""
    result: list[str] = []
    placed = False
    for line in text.splitlines(keepends=True):
        if fstab_mount_point(line) != mount_point:
            result.append(line)
        elif not placed:
            result += [f"{old}\n" for old in former]
            placed = True
    if not placed:
        if former and result and not result[-1].endswith("\n"):
            result[-1] += "\n"
        result += [f"{old}\n" for old in former]
    return "".join(result)


# --------------------------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------------------------


def sha256_of(path: str) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def look(path: str) -> Item:
    """Kind of a path without following links, with mode, uid and gid; for a link its target."""
    try:
        info = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return {"kind": "absent"}
    if stat.S_ISLNK(info.st_mode):
        return {"kind": "symlink", "target": os.readlink(path), "uid": info.st_uid, "gid": info.st_gid}
    kind = "file" if stat.S_ISREG(info.st_mode) else "directory" if stat.S_ISDIR(info.st_mode) else "special"
    return {"kind": kind, "mode": f"{stat.S_IMODE(info.st_mode):04o}", "uid": info.st_uid, "gid": info.st_gid}


def look_recorded(path: str, before: Item | None) -> Item | None:
    """What ``record`` writes down for a path; None when nothing is there."""
    seen = look(path)
    if seen["kind"] == "absent":
        return None
    if seen["kind"] != "file":
        return seen
    info = os.stat(path)
    large = info.st_size > LARGE_FILE_BYTES
    if large:
        seen |= {"size_bytes": info.st_size, "mtime_ns": info.st_mtime_ns}
    same = large and before is not None and all(before.get(key) == seen[key] for key in ("size_bytes", "mtime_ns"))
    seen["sha256"] = before["sha256"] if same and before else sha256_of(path)
    return seen


def describe(item: Item | None) -> str:
    """One line for a person: kind, checksum or target, mode and owner."""
    if item is None or item["kind"] == "absent":
        return "absent"
    if item["kind"] == "symlink":
        return f"symlink to {item['target']}"
    words = [item["kind"]]
    if "sha256" in item:
        words.append(f"sha256 {item['sha256'][:12]}")
    words.append(f"mode {item['mode']} owner {item['uid']}:{item['gid']}")
    return " ".join(words)


def write_atomic(path: str, content: bytes, mode: int) -> None:
    """Write next to the path, then rename: a reader sees the old or the new text, also after a power cut."""
    temporary = f"{path}.goodput-tmp"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fchmod(stream.fileno(), mode)
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        if os.path.lexists(temporary):
            os.unlink(temporary)
        raise
    directory = os.open(os.path.dirname(path), os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def make_private_directory(host: Host, absolute: str) -> None:
    """A directory under /var/lib/goodput that only root reads; STATE_DIR itself is open to look into."""
    os.makedirs(host.path(STATE_DIR), mode=0o755, exist_ok=True)
    missing = []
    current = absolute
    while current != STATE_DIR and not os.path.isdir(host.path(current)):
        missing.append(current)
        current = os.path.dirname(current)
    for directory in reversed(missing):
        os.mkdir(host.path(directory), mode=0o700)


# --------------------------------------------------------------------------------------------------------------------
# Manifests
# --------------------------------------------------------------------------------------------------------------------


def manifest_path(role: str) -> str:
    return f"{MANIFEST_DIR}/{role}.json"


def empty(role: str) -> Manifest:
    return {"format": FORMAT, "role": role, **{section: {} for section in SECTIONS}}


def dump(manifest: Manifest | None) -> str:
    return "" if manifest is None else json.dumps(manifest, indent=2) + "\n"


def load(host: Host, role: str) -> Manifest | None:
    """The manifest of a role, None where there is none; ManifestError when it can not be trusted."""
    path = manifest_path(role)
    try:
        with open(host.path(path), encoding="utf-8") as stream:
            text = stream.read()
    except FileNotFoundError:
        return None
    try:
        data = json.loads(text)
        version = data["format"]
        whole = data["role"] == role and all(isinstance(data[section], dict) for section in SECTIONS)
    except (ValueError, KeyError, TypeError) as error:
        raise ManifestError(
            f"found {path} damaged ({error}); required: a manifest of format {FORMAT}; "
            f"fix: put the file back from a backup, or undo the role by hand and remove the file"
        ) from error
    if version != FORMAT or not whole:
        raise ManifestError(
            f"found {path} with format {version!r} and role {data['role']!r}; "
            f"required: format {FORMAT} and role {role!r}; fix: use the goodput.spark version that wrote it"
        )
    return dict(data)


def save(host: Host, role: str, manifest: Manifest) -> None:
    make_private_directory(host, MANIFEST_DIR)
    write_atomic(host.path(manifest_path(role)), dump(manifest).encode(), 0o600)


def others(host: Host, role: str) -> dict[str, Manifest]:
    """Manifests of the other roles, by role."""
    try:
        names = sorted(os.listdir(host.path(MANIFEST_DIR)))
    except FileNotFoundError:
        return {}
    found = {}
    for name in names:
        if name.endswith(".json") and name != f"{role}.json":
            manifest = load(host, name.removesuffix(".json"))
            if manifest is not None:
                found[manifest["role"]] = manifest
    return found


def check_name(section: str, name: str) -> str:
    """The canonical name of an item; ManifestError names the rule it breaks."""

    def refuse(rule: str) -> ManifestError:
        return ManifestError(
            f"found {SINGULAR[section]} {name!r}; required: {rule}; fix: correct `{section}` of this task"
        )

    if not isinstance(name, str) or not name or "\n" in name:
        raise refuse("a non-empty name in one line")
    if section in PATH_SECTIONS:
        if not name.startswith("/") or ".." in PurePosixPath(name).parts:
            raise refuse("an absolute path without '..'")
        name = str(PurePosixPath("/" + name.lstrip("/")))
        if name == "/":
            raise refuse("a path below /")
        if section == "files" and name == "/etc/fstab":
            raise refuse("not /etc/fstab, which others edit too: list the mount point in `mounts`")
        if section == "data_paths" and (
            name.count("/") < 2
            or name in SYSTEM_DIRECTORIES
            or any((name + "/").startswith(f"{tree}/") for tree in SYSTEM_TREES)
        ):
            raise refuse("a directory of its own at least two levels deep and outside the system's")
    elif section == "units":
        if re.fullmatch(r"[A-Za-z0-9:_.\\@-]+", name) is None or name.startswith("-"):
            raise refuse("a unit name")
        if not name.endswith(UNIT_SUFFIXES):
            name += ".service"
        if re.search(r"@\.[a-z]+$", name):
            raise refuse("a unit that can run, not a template (list the template under `files`)")
    elif re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_./:+-]*", name) is None:
        raise refuse("letters, digits and . _ / : + - only")
    elif section == "sysctls" and ".." in name:
        raise refuse("a sysctl name such as net.ipv4.conf.all.arp_ignore")
    return name


def check_role(role: str) -> None:
    if re.fullmatch(r"[a-z][a-z0-9_]*", role) is None:
        raise ManifestError(
            f"found role {role!r}; required: lower-case letters, digits and _; fix: give the name of the role"
        )


def checked(items: dict[str, Iterable[str]]) -> dict[str, list[str]]:
    """Canonical names a section, without doubles, in the given order."""
    return {
        section: list(dict.fromkeys(check_name(section, name) for name in items.get(section) or ()))
        for section in SECTIONS
    }


# --------------------------------------------------------------------------------------------------------------------
# claimed
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Result:
    """``before`` and ``after`` are the manifests (None: no file). Lists are for people and for tests."""

    changed: bool = False
    before: Manifest | None = None
    after: Manifest | None = None
    claimed: list[str] = field(default_factory=list)
    recorded: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    restored: list[str] = field(default_factory=list)
    kept: list[dict[str, str]] = field(default_factory=list)
    saved: list[str] = field(default_factory=list)
    drift: list[dict[str, str]] = field(default_factory=list)


def missing_parents(host: Host, path: str) -> list[str]:
    """Directories above a path that are not there, outermost first; the manifests' own goes with the last of them."""
    missing = []
    parent = os.path.dirname(path)
    while parent not in ("/", STATE_DIR) and not os.path.lexists(host.path(parent)):
        missing.append(parent)
        parent = os.path.dirname(parent)
    return missing[::-1]


def former_file(host: Host, role: str, path: str) -> Item:
    seen = look(host.path(path))
    if seen["kind"] in ("directory", "special"):
        raise ManifestError(
            f"found {path} to be a {seen['kind']}; required: a file, a link or nothing; "
            f"fix: move it away or list another path"
        )
    if seen["kind"] == "file":
        seen["sha256"] = sha256_of(host.path(path))
        seen["backup"] = f"{BACKUP_DIR}/{role}{path}"
    return seen


def former_data(host: Host, path: str) -> Item:
    seen = look(host.path(path))
    # Only what was there *with content* belongs to somebody else.
    empty_directory = seen["kind"] == "directory" and not os.listdir(host.path(path))
    return {"kind": seen["kind"], "ours": seen["kind"] == "absent" or empty_directory}


def former_states(host: Host, role: str, section: str, names: Sequence[str]) -> dict[str, Any]:
    """The state of each item now; one question for all units and all packages."""
    if section == "files":
        return {name: former_file(host, role, name) for name in names}
    if section == "directories":
        seen = {name: look(host.path(name)) for name in names}
        for name, item in seen.items():
            if item["kind"] in ("file", "special"):
                raise ManifestError(
                    f"found {name} to be a {item['kind']}; required: a directory or nothing; fix: move it away"
                )
        return seen
    if section == "units":
        states = host.units(names)
        return {name: {"load": s.load, "enabled": s.enabled, "active": s.active} for name, s in states.items()}
    if section == "mounts":
        fstab = host.read("/etc/fstab") or ""
        return {name: {"mounted": host.mounted(name), "fstab": fstab_lines(fstab, name)} for name in names}
    if section == "sysctls":
        return {name: host.sysctl(name) for name in names}
    if section == "packages":
        installed = host.installed(names)
        return {name: "installed" if name in installed else "absent" for name in names}
    if section == "users":
        return {name: "present" if host.user_exists(name) else "absent" for name in names}
    return {name: former_data(host, name) for name in names}


def claim(host: Host, role: str, items: dict[str, Iterable[str]], check: bool = False) -> Result:
    """Write the former state of every item that is not listed yet, backups first, then the manifest."""
    check_role(role)
    wanted = checked(items)
    before = load(host, role)
    manifest = empty(role) if before is None else copy.deepcopy(before)
    implied = [path for section in PATH_SECTIONS for name in wanted[section] for path in missing_parents(host, name)]
    # A mount point or data directory that is not there is made by the role, too.
    implied += [name for name in (*wanted["mounts"], *wanted["data_paths"]) if not os.path.lexists(host.path(name))]
    wanted["directories"] = list(dict.fromkeys([*implied, *wanted["directories"]]))
    elsewhere = others(host, role)
    # A parent that another role made is needed by this one from now on: whichever is reset last removes it.
    made = {name for other in elsewhere.values() for name in other["directories"]}
    for section in PATH_SECTIONS:
        for name in wanted[section]:
            if name not in manifest[section]:
                parents = [str(parent) for parent in PurePosixPath(name).parents if str(parent) in made]
                wanted["directories"] += [parent for parent in parents if parent not in wanted["directories"]]
    new = {section: [name for name in names if name not in manifest[section]] for section, names in wanted.items()}
    result = Result(before=before, after=manifest)
    if not any(new.values()):
        result.changed = before is None
        if result.changed and not check:
            save(host, role, manifest)
        return result
    copies: list[tuple[str, str]] = []
    for section, names in new.items():
        shared = {
            name: other[section][name] for other in elsewhere.values() for name in names if name in other[section]
        }
        fresh = former_states(host, role, section, [name for name in names if name not in shared])
        for name in names:
            former = copy.deepcopy(shared[name]["former"]) if name in shared else fresh[name]
            if section == "files" and former["kind"] == "file":
                source = former["backup"] if name in shared else name
                former["backup"] = f"{BACKUP_DIR}/{role}{name}"
                copies.append((source, former["backup"]))
            manifest[section][name] = {"former": former}
            result.claimed.append(f"{SINGULAR[section]} {name}")
    result.changed = True
    if not check:
        for source, target in copies:
            make_private_directory(host, os.path.dirname(target))
            with open(host.path(source), "rb") as stream:
                write_atomic(host.path(target), stream.read(), 0o600)
        save(host, role, manifest)
    return result


# --------------------------------------------------------------------------------------------------------------------
# recorded, read
# --------------------------------------------------------------------------------------------------------------------


def record(host: Host, role: str, check: bool = False, volatile: Iterable[str] = ()) -> Result:
    """Write down checksum, mode and owner of the listed files as they are now.

    ``volatile`` files are rewritten by a program of the role: they are listed, and removed by undo, but not recorded.
    """
    check_role(role)
    before = load(host, role)
    if before is None:
        if check:
            return Result(changed=True)
        raise ManifestError(
            f"found no {manifest_path(role)}; required: the role claims before it records; fix: run the whole role"
        )
    manifest = copy.deepcopy(before)
    result = Result(before=before, after=manifest)
    skipped = set(volatile)
    for path, item in manifest["files"].items():
        if path in skipped:
            # An earlier version may have recorded it.
            if item.pop("recorded", None) is not None:
                result.recorded.append(path)
            continue
        recorded = look_recorded(host.path(path), item.get("recorded"))
        if recorded != item.get("recorded"):
            item["recorded"] = recorded
            result.recorded.append(path)
    result.changed = bool(result.recorded)
    if result.changed and not check:
        save(host, role, manifest)
    return result


def read(host: Host, role: str) -> Result:
    """The manifest and what differs from it; changes nothing."""
    check_role(role)
    manifest = load(host, role)
    result = Result(before=manifest, after=manifest)
    for path, item in (manifest or empty(role))["files"].items():
        required = item.get("recorded")
        if required is None:
            continue
        found = look_recorded(host.path(path), required)
        if not alike(found, required):
            result.drift.append({"path": path, "found": describe(found), "required": describe(required)})
    return result


def alike(found: Item | None, required: Item | None) -> bool:
    """Same kind, content, mode and owner; a new modification time alone is no difference."""
    ignored = ("size_bytes", "mtime_ns")
    return {k: v for k, v in (found or {}).items() if k not in ignored} == {
        k: v for k, v in (required or {}).items() if k not in ignored
    }


# --------------------------------------------------------------------------------------------------------------------
# absent
# --------------------------------------------------------------------------------------------------------------------


class Undo:
    """Puts the former state back. Every step looks first, so that an interrupted undo can be run again."""

    def __init__(
        self, host: Host, manifest: Manifest, elsewhere: dict[str, Manifest], remove_data: bool, check: bool
    ) -> None:
        self.host = host
        self.manifest = manifest
        self.elsewhere = elsewhere
        self.remove_data = remove_data
        self.check = check
        self.result = Result(before=manifest)
        self.reload = False
        self.files_changed = False
        self.gone: set[str] = set()

    def keep(self, what: str, reason: str) -> None:
        self.result.kept.append({"item": what, "reason": reason})

    def mine(self, section: str) -> list[str]:
        """Items of a section in reverse order, without those that another role lists, too."""
        names = []
        for name in reversed(self.manifest[section]):
            role = next((role for role, other in self.elsewhere.items() if name in other[section]), None)
            if role is None:
                names.append(name)
            elif section != "directories":
                self.keep(f"{SINGULAR[section]} {name}", f"role {role} lists it, too, and undoes it when it is reset")
        return names

    def former(self, section: str, name: str) -> Any:
        return self.manifest[section][name]["former"]

    def unit_former(self, name: str) -> UnitState:
        former = self.former("units", name)
        return UnitState(former["load"], former["enabled"], former["active"])

    # steps, in the order of run()

    def stop_units(self, names: list[str]) -> None:
        now = self.host.units(names)
        stop, disable, clear = [], [], []
        for name in names:
            former, state = self.unit_former(name), now[name]
            if state.running and not former.running:
                stop.append(name)
            if not former.known and state.known:
                if state.starts_at_boot:
                    disable.append(name)
                if state.active == "failed":
                    clear.append(name)
                if state.running or state.starts_at_boot:
                    self.result.removed.append(f"unit {name}")
            elif former.known and state.running and not former.running:
                self.result.restored.append(f"unit {name}: stopped")
        if not self.check:
            self.host.systemctl("stop", stop)
            self.host.systemctl("disable", disable)
            self.host.systemctl("reset-failed", clear)
        self.reload |= bool(stop or disable)

    def data(self) -> None:
        mounts = list(self.manifest["mounts"])
        for name in self.mine("data_paths"):
            path, what = self.host.path(name), f"data {name}"
            seen = look(path)
            on_mount = next((m for m in mounts if name == m or name.startswith(f"{m}/")), None)
            if seen["kind"] == "absent":
                continue
            below = [
                point
                for point, _source, _type in self.host.mounts()
                if point.startswith(f"{name}/") and point not in mounts
            ]
            if not self.former("data_paths", name)["ours"]:
                self.keep(what, "it had content before this role claimed it")
            elif seen["kind"] != "directory":
                self.keep(what, f"it is a {seen['kind']}, not a directory")
            elif not os.listdir(path):
                continue
            elif not self.remove_data:
                source = (self.host.mounted(on_mount) or {}).get("source") if on_mount else None
                self.keep(what, f"data stays on {source}" if source else "data stays unless remove_data is true")
                if on_mount is None:
                    self.result.after = self.result.after or empty(self.manifest["role"])
                    self.result.after["data_paths"][name] = self.manifest["data_paths"][name]
            elif below:
                self.keep(what, f"something else is mounted below it: {', '.join(below)}")
            else:
                self.result.removed.append(what)
                self.gone.add(name)
                if not self.check:
                    for entry in list(os.scandir(path)):
                        if entry.is_dir(follow_symlinks=False):
                            shutil.rmtree(entry.path)
                        else:
                            os.unlink(entry.path)

    def mounts(self) -> None:
        for name in self.mine("mounts"):
            former = self.former("mounts", name)
            if former["mounted"] is None and self.host.mounted(name) is not None:
                if not self.check:
                    self.host.unmount(name)
                self.result.removed.append(f"mount {name}")
                self.reload = True
            text = self.host.read("/etc/fstab") or ""
            wanted = fstab_restored(text, name, former["fstab"])
            if fstab_lines(text, name) != former["fstab"]:
                if not self.check:
                    fstab = self.host.path("/etc/fstab")
                    write_atomic(fstab, wanted.encode("utf-8", "surrogateescape"), stat.S_IMODE(os.stat(fstab).st_mode))
                (self.result.restored if former["fstab"] else self.result.removed).append(f"fstab line of {name}")
                self.reload = True

    def set_aside(self, name: str, what: str) -> None:
        """Keep a file that somebody edited; never over an earlier copy."""
        saved = name + SAVED_SUFFIX
        number = 0
        while os.path.lexists(self.host.path(saved)):
            number += 1
            saved = f"{name}{SAVED_SUFFIX}.{number}"
        self.result.saved.append(saved)
        self.keep(what, f"edited after this role wrote it: your version is now {saved}")
        if not self.check:
            os.rename(self.host.path(name), self.host.path(saved))

    def files(self) -> None:
        for name in self.mine("files"):
            item, path, what = self.manifest["files"][name], self.host.path(name), f"file {name}"
            former, recorded = item["former"], item.get("recorded")
            now = look(path)
            if now["kind"] in ("directory", "special"):
                self.keep(what, f"it is a {now['kind']} now")
                continue
            if now["kind"] == "file":
                now["sha256"] = sha256_of(path)
            if now == {key: value for key, value in former.items() if key != "backup"}:
                continue
            same_content = now.get("sha256") == former.get("sha256") and now["kind"] == former["kind"] == "file"
            edited = (
                recorded is not None
                and now["kind"] != "absent"
                and not same_content
                and (now["kind"], now.get("sha256"), now.get("target"))
                != (recorded["kind"], recorded.get("sha256"), recorded.get("target"))
            )
            if edited:
                self.set_aside(name, what)
            self.files_changed = True
            self.reload |= name.startswith(("/etc/systemd/", "/lib/systemd/", "/usr/lib/systemd/"))
            if former["kind"] == "absent":
                self.result.removed.append(what)
                if not self.check and os.path.lexists(path):
                    os.unlink(path)
            else:
                self.result.restored.append(what)
                if not self.check:
                    self.restore_file(path, former)

    def restore_file(self, path: str, former: Item) -> None:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        if former["kind"] == "symlink":
            if os.path.lexists(path):
                os.unlink(path)
            os.symlink(former["target"], path)
            os.lchown(path, former["uid"], former["gid"])
            return
        with open(self.host.path(former["backup"]), "rb") as stream:
            content = stream.read()
        if hashlib.sha256(content).hexdigest() != former["sha256"]:
            raise ManifestError(
                f"found the backup {former['backup']} changed; required: sha256 {former['sha256']}; "
                f"fix: put {path} back by hand, remove its entry from {manifest_path(self.manifest['role'])}, "
                f"then run the reset again"
            )
        write_atomic(path, content, 0o600)
        os.chown(path, former["uid"], former["gid"])
        os.chmod(path, int(former["mode"], 8))

    def sysctls(self) -> None:
        for name in self.mine("sysctls"):
            former, now = self.former("sysctls", name), self.host.sysctl(name)
            if former is None or now == former:
                continue
            if now is None:
                self.keep(f"sysctl {name}", "the kernel does not have it now")
                continue
            problem = None if self.check else self.host.set_sysctl(name, former)
            if problem is None:
                self.result.restored.append(f"sysctl {name} = {former}")
            else:
                self.keep(f"sysctl {name}", f"is {now}, was {former}: {problem}")

    def restore_units(self, names: list[str]) -> None:
        """Mask, enablement and activity of units that were there before."""
        names = [name for name in reversed(names) if self.unit_former(name).known]
        now = self.host.units(names)
        todo: dict[str, list[str]] = {
            verb: [] for verb in ("unmask", "enable", "disable", "mask", "start", "reload-or-restart")
        }
        for name in names:
            former, state = self.unit_former(name), now[name]
            if not state.known:
                self.keep(f"unit {name}", f"it is no longer installed (was {former.words()})")
                continue
            if state.masked and not former.masked:
                todo["unmask"].append(name)
            elif former.masked and not state.masked:
                todo["mask"].append(name)
        if not self.check:
            self.host.systemctl("unmask", todo["unmask"])
            # What a mask hid is known only now.
            now |= self.host.units(todo["unmask"])
        for name in names:
            former, state = self.unit_former(name), now[name]
            if not state.known or former.masked:
                continue
            if former.starts_at_boot and state.enabled == "disabled":
                todo["enable"].append(name)
            elif former.enabled == "disabled" and state.starts_at_boot:
                todo["disable"].append(name)
            if former.running and not state.running:
                todo["start"].append(name)
            elif former.running and self.files_changed and name.endswith(".service"):
                # It still runs with our version of its files.
                todo["reload-or-restart"].append(name)
        for verb, chosen in todo.items():
            if verb != "unmask" and not self.check:
                self.host.systemctl(verb, chosen)
            self.result.restored += [f"unit {name}: {verb}" for name in chosen]

    def users(self) -> None:
        for name in self.mine("users"):
            if self.former("users", name) == "absent" and self.host.user_exists(name):
                self.result.removed.append(f"user {name}")
                if not self.check:
                    self.host.must("userdel", name)

    def directories(self) -> None:
        names = self.mine("directories")
        for name in sorted(names, key=lambda path: path.count("/"), reverse=True):
            path, former, now = self.host.path(name), self.former("directories", name), look(self.host.path(name))
            covered = name in self.manifest["mounts"] and self.host.mounted(name) is not None
            if now["kind"] != "directory" or (covered and not self.check):
                continue
            if former["kind"] == "absent":
                # In check mode what lies under a mount can not be seen; it was empty when this role mounted over it.
                left = [] if covered else [entry for entry in os.listdir(path) if not self.goes(f"{name}/{entry}")]
                if left:
                    self.keep(
                        f"directory {name}", f"not empty: {', '.join(sorted(left)[:5])}{' …' if len(left) > 5 else ''}"
                    )
                    if self.result.after is not None and any(
                        f"{data}/".startswith(f"{name}/") for data in self.result.after["data_paths"]
                    ):
                        self.result.after["directories"][name] = self.manifest["directories"][name]
                    continue
                self.result.removed.append(f"directory {name}")
                self.gone.add(name)
                if not self.check:
                    os.rmdir(path)
            elif former["kind"] == "directory" and now != former:
                self.result.restored.append(
                    f"directory {name}: mode {former['mode']} owner {former['uid']}:{former['gid']}"
                )
                if not self.check:
                    os.chown(path, former["uid"], former["gid"])
                    os.chmod(path, int(former["mode"], 8))

    def goes(self, path: str) -> bool:
        """In check mode: would this path have been removed by an earlier step?"""
        if not self.check:
            return False
        parents = [str(parent) for parent in PurePosixPath(path).parents]
        return (
            f"file {path}" in self.result.removed or path in self.gone or any(parent in self.gone for parent in parents)
        )

    def packages(self) -> None:
        names = [name for name in self.mine("packages") if self.former("packages", name) == "absent"]
        installed = self.host.installed(names)
        for name in names:
            if name in installed:
                self.keep(f"package {name}", "installed by this role; packages are never removed")

    def bookkeeping(self) -> None:
        role, after = self.manifest["role"], self.result.after
        if self.check:
            return
        backup = self.host.path(f"{BACKUP_DIR}/{role}")
        if os.path.isdir(backup):
            shutil.rmtree(backup)
        if after is not None:
            if after != self.manifest:
                save(self.host, role, after)
            return
        os.unlink(self.host.path(manifest_path(role)))
        for directory in (BACKUP_DIR, MANIFEST_DIR, STATE_DIR):
            path = self.host.path(directory)
            if os.path.isdir(path) and not os.listdir(path):
                os.rmdir(path)

    def run(self) -> Result:
        units = self.mine("units")
        self.stop_units(units)
        self.data()
        self.mounts()
        self.files()
        self.sysctls()
        if self.reload and not self.check:
            self.host.systemctl("daemon-reload")
        self.restore_units(units)
        self.users()
        self.directories()
        self.packages()
        self.bookkeeping()
        self.result.changed = self.result.after != self.manifest
        return self.result


def undo(host: Host, role: str, remove_data: bool = False, check: bool = False) -> Result:
    """Put everything that the manifest lists back, in reverse, then remove the manifest.

    Where data of ours is kept, the manifest stays and lists only that, so that a later call may still remove it.
    """
    check_role(role)
    manifest = load(host, role)
    if manifest is None:
        return Result()
    return Undo(host, manifest, others(host, role), remove_data, check).run()


def warnings(result: Result) -> list[str]:
    """What a person may miss or want back: kept data and edited files. The rest of ``kept`` is for those who ask."""
    if not result.changed:
        return []
    saved = {path: entry for entry in result.kept for path in result.saved if entry["reason"].endswith(f" {path}")}
    told = [entry for entry in result.kept if entry["item"].startswith("data ") or entry in saved.values()]
    return [f"{entry['item']} kept: {entry['reason']}" for entry in told]
