#!/usr/bin/env python3
"""What a node looks like, and what differs between two looks: proves that reset returns a node to where it was.

``node_state.py collect`` prints one JSON object (run on the node, as root, standard library only).
``node_state.py compare BEFORE AFTER`` prints the differences that no package explains; exit 1 if there are any.

Packages stay installed after a reset, so what a package brought (its files, its users, its enabled units) is told from
what a role made by asking dpkg.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

TREES = ("/etc", "/usr/local", "/opt", "/srv", "/var/lib/goodput", "/home", "/root")
SYSCTLS = re.compile(
    r"^(vm\.(swappiness|min_free_kbytes|overcommit_memory|dirty_ratio|watermark_boost_factor)"
    r"|net\.ipv4\.(conf\..*\.(arp_ignore|arp_announce|arp_filter|rp_filter|forwarding)|ip_forward)"
    r"|net\.ipv6\.conf\..*\.(disable_ipv6|addr_gen_mode)|net\.core\.[rw]mem_(max|default)"
    r"|kernel\.(panic|sysrq|numa_balancing)) "
)
#: Rewritten by package scripts whenever a package is installed, or by the system at any time: pattern -> reason.
VOLATILE = {
    r"^/etc/(passwd|group|shadow|gshadow|subuid|subgid)-?$": "compared line by line below",
    r"^/etc/ld\.so\.cache$": "rebuilt by ldconfig",
    r"^/etc/rc[0-9S]\.d/": "init links of packages",
    r"^/etc/mtab$": "the kernel's mounts",
    r"^/etc/\.updated$": "systemd's stamp",
    r"^/etc/lvm/(archive|backup)/": "LVM's own history",
    r"^/home/[^/]+/\.ansible": "Ansible's own scratch",
    r"^/root/\.(ansible|cache)": "scratch",
    r"^/home/[^/]+/\.(cache|bash_history)": "scratch",
    r"^/etc/systemd/system/[^/]+\.(wants|requires)(/|$)": "compared as enabled units below",
    r"^/etc/adjtime$": "the clock's drift",
    r"^/etc/(resolv\.conf)$": "written by NetworkManager",
}
#: Pulled in by the units of packages, or started once because a unit of ours wanted the network; nothing stops them.
BY_PACKAGE = {"time-sync.target", "network-online.target", "NetworkManager-wait-online.service"}


def run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True).stdout


def describe(path: Path) -> str:
    """Kind, mode, owner and content of a path as one string."""
    stat = path.lstat()
    owner = f"{stat.st_mode & 0o7777:04o} {stat.st_uid}:{stat.st_gid}"
    if path.is_symlink():
        return f"link {os.readlink(path)}"
    if path.is_dir():
        return f"dir {owner}"
    if path.is_file():
        return f"file {owner} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}"
    return f"other {owner}"


def other_disk() -> dict[str, str]:
    """Files of the disk that is nobody's business (label ``models``): path -> description. Nothing may touch it."""
    device = Path("/dev/disk/by-label/models")
    if not device.exists():
        return {}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["mount", "-o", "ro", str(device), folder], check=True)
        try:
            return {path.name: describe(path) for path in sorted(Path(folder).iterdir()) if path.is_file()}
        finally:
            subprocess.run(["umount", folder], check=True)


def collect() -> dict[str, Any]:
    files = {}
    for tree in TREES:
        for folder, names, members in os.walk(tree):
            if os.path.ismount(folder) and folder != tree:
                names.clear()
                continue
            for name in [*names, *members]:
                path = Path(folder, name)
                files[str(path)] = describe(path)
    known = run("dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n").splitlines()
    packages = {line.split()[0] for line in known if line.endswith(" installed")}
    owned = {}
    for listing in Path("/var/lib/dpkg/info").glob("*.list"):
        package = listing.name.removesuffix(".list").split(":")[0]
        for line in listing.read_text().splitlines():
            if line.startswith(tuple(f"{tree}/" for tree in TREES)) or "/systemd/system/" in line:
                owned[line.replace("/usr/lib/", "/lib/")] = package
    units = [line.split()[:2] for line in run("systemctl", "list-unit-files", "--no-legend", "--no-pager").splitlines()]
    active = [
        line.split()[0]
        for line in run(
            "systemctl", "list-units", "--state=active", "--plain", "--no-legend", "--no-pager"
        ).splitlines()
        if line.split()[0].endswith((".service", ".timer", ".mount", ".socket", ".target", ".swap"))
    ]
    mounts = json.loads(run("findmnt", "-J", "-l", "-o", "TARGET,SOURCE,FSTYPE") or '{"filesystems": []}')[
        "filesystems"
    ]
    addresses = {
        link["ifname"]: {
            "mtu": link["mtu"],
            "addresses": sorted(f"{a['local']}/{a['prefixlen']}" for a in link["addr_info"] if a["family"] == "inet"),
        }
        for link in json.loads(run("ip", "-j", "address") or "[]")
    }
    return {
        "files": files,
        "packages": sorted(packages),
        "owned": owned,
        "users": Path("/etc/passwd").read_text().splitlines(),
        "groups": Path("/etc/group").read_text().splitlines(),
        "units": {name: state for name, state in units if state not in ("generated", "transient")},
        "active": sorted(
            name
            for name in active
            if not re.match(r"(session-|user@|user-runtime|run-|systemd-hostnamed|systemd-timedated)", name)
        ),
        "mounts": {
            m["target"]: f"{m['source']} {m['fstype']}"
            for m in mounts
            if not m["target"].startswith(("/run/", "/proc/", "/sys/"))
        },
        "sysctls": dict(line.split(" = ", 1) for line in run("sysctl", "-a").splitlines() if SYSCTLS.match(line)),
        "addresses": addresses,
        "other_disk": other_disk(),
        "blkid": sorted(run("lsblk", "-rno", "SERIAL,FSTYPE,LABEL").splitlines()),
    }


def changes(before: dict[str, str], after: dict[str, str]) -> dict[str, tuple[str | None, str | None]]:
    return {
        key: (before.get(key), after.get(key)) for key in sorted({*before, *after}) if before.get(key) != after.get(key)
    }


def compare(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Differences that no newly installed package explains, one line each."""
    new_packages = set(after["packages"]) - set(before["packages"])
    # apt removes what a new package conflicts with: chrony takes the place of systemd-timesyncd.
    gone_packages = set(before["packages"]) - set(after["packages"])

    def from_package(path: str) -> bool:
        return after["owned"].get(path, "") in new_packages or before["owned"].get(path, "") in gone_packages

    def unit_from_package(unit: str) -> bool:
        """The unit's file, or what its link in /etc points to, came or went with a package."""
        link = f"/etc/systemd/system/{unit}"
        targets = [state["files"].get(link, "").removeprefix("link ") for state in (before, after)]
        paths = [link, f"/lib/systemd/system/{unit}", *(target.replace("/usr/lib/", "/lib/") for target in targets)]
        return unit in BY_PACKAGE or any(from_package(path) for path in paths)

    def below_package(path: str) -> bool:
        """A file that a package's script put into a folder of that package."""
        return any(from_package(str(parent)) for parent in Path(path).parents if str(parent) not in before["files"])

    found = []
    for path, (was, now) in changes(before["files"], after["files"]).items():
        if any(re.match(pattern, path) for pattern in VOLATILE):
            continue
        if was is None and (from_package(path) or below_package(path)):
            continue
        if path.startswith("/etc/systemd/system/") and unit_from_package(Path(path).name):
            continue
        found.append(f"file {path}: {was} -> {now}")
    for kind in ("users", "groups"):
        accounts = {line.split(":")[0] for line in after[kind]} - {line.split(":")[0] for line in before[kind]}
        for name in sorted(accounts):
            if not any(name.strip("_") in package or package in name for package in new_packages):
                found.append(f"{kind[:-1]} {name}: None -> present")
        found += [f"{kind[:-1]} line lost: {line}" for line in before[kind] if line not in after[kind]]
    for unit, (was, now) in changes(before["units"], after["units"]).items():
        if not unit_from_package(unit):
            found.append(f"unit {unit}: {was} -> {now}")
    for unit in sorted(set(before["active"]) ^ set(after["active"])):
        if not unit_from_package(unit):
            found.append(f"unit {unit}: {'active' if unit in before['active'] else 'inactive'} -> changed")
    for kind in ("mounts", "sysctls", "addresses"):
        found += [
            f"{kind[:-1]} {key}: {was} -> {now}" for key, (was, now) in changes(before[kind], after[kind]).items()
        ]
    for name, (was, now) in changes(before["other_disk"], after["other_disk"]).items():
        found.append(f"the owner's other disk, {name}: {was} -> {now}")
    found += [f"block device: {line}" for line in sorted(set(before["blkid"]) ^ set(after["blkid"]))]
    return found


def main() -> None:
    if sys.argv[1:2] == ["collect"]:
        print(json.dumps(collect()))
        return
    if len(sys.argv) == 4 and sys.argv[1] == "compare":
        before, after = (json.loads(Path(p).read_text()) for p in sys.argv[2:])
        found = compare(before, after)
        new = sorted(set(after["packages"]) - set(before["packages"]))
        # Differences first: where a failure is shortened, its end is what goes.
        print("\n".join(found) if found else "no difference")
        print(
            f"{len(before['files'])} files, {len(before['units'])} units, {len(before['mounts'])} mounts, "
            f"{len(before['sysctls'])} sysctls compared; packages added: {' '.join(new) or 'none'}"
        )
        sys.exit(1 if found else 0)
    sys.exit(f"usage: {sys.argv[0]} collect | compare BEFORE AFTER")


if __name__ == "__main__":
    main()
