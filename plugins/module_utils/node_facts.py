"""What one node is: a single read-only look at /proc, /sys, /etc and /var/lib/dpkg.

Runs on the node, so standard library only, one subprocess (``ip -json``) and no shell. Every reader takes the roots it
reads from, so that a recorded tree can be tested. Nothing here judges: ``preflight.evaluate`` does.
"""

from __future__ import annotations

import base64
import ctypes
import fnmatch
import functools
import hashlib
import json
import os
import platform
import re
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Returns exit status and standard output; 127 when the program is missing.
Runner = Callable[[list[str]], tuple[int, str]]

OWN_UNIT_PREFIX = "goodput-"
# Written once by the host role.
MEMORY_AT_REST = "var/lib/goodput/memory-at-rest.json"
SERVING_UNITS = ("goodput-worker", "goodput-lmcache", "goodput-frontend", "goodput-etcd", "k3s", "k3s-agent")
MANIFESTS = "var/lib/goodput/manifest.d"
# Names under which clock locks were published for this machine, besides any unit that calls `nvidia-smi -lgc`.
KNOWN_CLOCK_UNITS = (
    "gpu-clock-lock.service",
    "gb10-clock-cap.service",
    "spark-gpu-clock-lock.service",
    "nvidia-clock-optimize.service",
)
CALLS = "calls nvidia-smi -lgc"
CLOCK_CALL = re.compile(r"nvidia-smi\b[^\n;|&]*\s(-lgc|--lock-gpu-clocks)\b")
KUBERNETES = {
    "k3s": ("usr/local/bin/k3s", "usr/bin/k3s"),
    "kubeadm": ("usr/bin/kubeadm", "usr/local/bin/kubeadm", "usr/bin/kubelet", "usr/local/bin/kubelet"),
    "microk8s": ("snap/bin/microk8s", "var/snap/microk8s"),
    "rke2": ("usr/local/bin/rke2", "opt/rke2/bin/rke2", "usr/bin/rke2"),
}
KUBERNETES_UNITS = {
    "k3s": ("k3s.service", "k3s-agent.service"),
    "kubeadm": ("kubelet.service",),
    "microk8s": ("snap.microk8s.daemon-kubelite.service",),
    "rke2": ("rke2-server.service", "rke2-agent.service"),
}
# Process name (the kernel keeps 15 characters) to the daemon's own.
NTP_DAEMONS = {
    "chronyd": "chronyd",
    "ntpd": "ntpd",
    "ntpsec": "ntpsec",
    "systemd-timesyn": "systemd-timesyncd",
    "ptp4l": "ptp4l",
}
# dpkg states in which a package is finished; every other one waits for `dpkg --configure -a`.
SETTLED_STATES = {"installed", "config-files", "not-installed"}
UNIT_DIRECTORIES = tuple(f"{top}/systemd/system" for top in ("etc", "run", "usr/local/lib", "usr/lib"))
MIB = 1024 * 1024


def run_command(command: list[str]) -> tuple[int, str]:
    """Run a program with a time limit; 127 if it is missing, 124 if it hangs."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except FileNotFoundError:
        return 127, ""
    except subprocess.TimeoutExpired:
        return 124, ""
    return result.returncode, result.stdout


def read_text(path: Path, limit: int = 1 << 20) -> str:
    """The file's text, or an empty string if it can not be read."""
    try:
        with path.open("rb") as stream:
            return stream.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


def read_line(path: Path) -> str:
    return read_text(path, 4096).strip()


def parse_assignments(text: str) -> dict[str, str]:
    """``KEY="value"`` lines as in os-release; the last assignment wins, because every OTA appends to dgx-release."""
    values: dict[str, str] = {}
    for line in text.splitlines():
        key, separator, value = line.strip().partition("=")
        if separator and re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            values[key] = value.strip().strip("\"'")
    return values


def parse_meminfo(text: str) -> dict[str, int]:
    """``/proc/meminfo`` in bytes."""
    values: dict[str, int] = {}
    for line in text.splitlines():
        match = re.match(r"(\S+):\s+(\d+)( kB)?", line)
        if match:
            values[match[1]] = int(match[2]) * (1024 if match[3] else 1)
    return values


def parse_buddyinfo(text: str, page_bytes: int) -> int:
    """Free memory in contiguous pieces of at least 2 MiB, counted in 2 MiB blocks."""
    order = max(0, (2 * MIB // page_bytes).bit_length() - 1)
    total = 0
    for line in text.splitlines():
        match = re.match(r"Node\s+\d+,\s+zone\s+\S+\s+(.*)", line)
        if match:
            counts = [int(field) for field in match[1].split()]
            total += sum(count << (index - order) for index, count in enumerate(counts) if index >= order)
    return total


def parse_driver_version(text: str) -> str:
    """Version from ``/proc/driver/nvidia/version`` (first line, "NVRM version: ...")."""
    match = re.search(r"NVRM version:.*?\b(\d{3}\.\d+(?:\.\d+)?)\b", text)
    return match[1] if match else ""


def parse_dpkg(text: str) -> tuple[dict[str, str], list[str], list[str]]:
    """``/var/lib/dpkg/status``: installed versions, "name (state)" of unfinished packages, names on hold."""
    installed: dict[str, str] = {}
    pending: list[str] = []
    held: list[str] = []
    for stanza in text.split("\n\n"):
        name = status = version = ""
        for line in stanza.splitlines():
            if line.startswith("Package: "):
                name = line[9:].strip()
            elif line.startswith("Status: "):
                status = line[8:].strip()
            elif line.startswith("Version: "):
                version = line[9:].strip()
                break
        fields = status.split()
        if not name or len(fields) != 3:
            continue
        want, error, state = fields
        if state == "installed":
            installed[name] = version
        if want == "hold":
            held.append(name)
        if state not in SETTLED_STATES or error != "ok":
            pending.append(f"{name} ({state if state not in SETTLED_STATES else error})")
    return installed, sorted(pending), sorted(held)


def socket_address(field: str) -> tuple[str, int]:
    """Address and port from the hexadecimal form of ``/proc/net/tcp`` (each 32-bit word in host byte order)."""
    address, _, port = field.partition(":")
    words = [bytes.fromhex(address[index : index + 8])[::-1] for index in range(0, len(address), 8)]
    packed = b"".join(words)
    family = socket.AF_INET if len(packed) == 4 else socket.AF_INET6
    return socket.inet_ntop(family, packed), int(port, 16)


@dataclass
class Node:
    """The three roots everything is read from, and the only way to run a program."""

    root: Path = Path("/")
    proc: Path = Path("/proc")
    sysfs: Path = Path("/sys")
    run: Runner = run_command

    def operating_system(self) -> dict[str, Any]:
        release = parse_assignments(read_text(self.root / "etc/os-release"))
        dgx = parse_assignments(read_text(self.root / "etc/dgx-release"))
        fastos = parse_assignments(read_text(self.root / "etc/fastos-release"))
        dmi = self.sysfs / "class/dmi/id"
        return {
            "id": release.get("ID", ""),
            "version_id": release.get("VERSION_ID", ""),
            "pretty_name": release.get("PRETTY_NAME", ""),
            # The factory image carries only the build version; the first OTA adds DGX_OTA_VERSION.
            "dgx_name": dgx.get("DGX_NAME", ""),
            "dgx_release": dgx.get("DGX_OTA_VERSION") or dgx.get("DGX_SWBUILD_VERSION", ""),
            "fastos_release": fastos.get("VERSION", ""),
            "kernel": read_line(self.proc / "sys/kernel/osrelease"),
            "installed_kernels": sorted(path.name[8:] for path in (self.root / "boot").glob("vmlinuz-*")),
            "command_line": read_line(self.proc / "cmdline").split(),
            "architecture": platform.machine(),
            "product": read_line(dmi / "product_name"),
            "bios": read_line(dmi / "bios_version"),
            "cpus": os.cpu_count() or 0,
            "hostname": read_line(self.proc / "sys/kernel/hostname"),
            "machine_id": read_line(self.root / "etc/machine-id"),
            "kdump_reserved_bytes": int(read_line(self.sysfs / "kernel/kexec_crash_size") or 0),
        }

    def driver_version(self) -> str:
        return parse_driver_version(read_text(self.proc / "driver/nvidia/version")) or read_line(
            self.sysfs / "module/nvidia/version"
        )

    def memory(self) -> dict[str, int]:
        values = parse_meminfo(read_text(self.proc / "meminfo"))
        free_blocks = parse_buddyinfo(read_text(self.proc / "buddyinfo"), os.sysconf("SC_PAGE_SIZE"))
        return {
            "total_bytes": values.get("MemTotal", 0),
            "available_bytes": values.get("MemAvailable", 0),
            "swap_total_bytes": values.get("SwapTotal", 0),
            "swap_free_bytes": values.get("SwapFree", 0),
            "cma_total_bytes": values.get("CmaTotal", 0),
            "cma_free_bytes": values.get("CmaFree", 0),
            "free_2mib_blocks": free_blocks,
            "swappiness": int(read_line(self.proc / "sys/vm/swappiness") or 0),
        }

    def memory_at_rest(self) -> dict[str, int]:
        """What a planner may count on: the same in every run, so MemAvailable is the one recorded before serving.

        Without a record it is measured while nothing serves; else it is left out.
        """
        now = self.memory()
        answer = {key: now[key] for key in ("total_bytes", "swap_total_bytes")}
        try:
            recorded = json.loads(read_text(self.root / MEMORY_AT_REST))
        except ValueError:
            recorded = {}
        # Another kernel may reserve more or less.
        if isinstance(recorded, dict) and recorded.get("total_bytes") == now["total_bytes"]:
            return {**answer, "available_bytes": int(recorded["available_bytes"])}
        slices = [self.sysfs / "fs/cgroup/system.slice" / f"{unit}.service" for unit in SERVING_UNITS]
        if any(path.is_dir() for path in slices):
            return answer
        return {**answer, "available_bytes": now["available_bytes"]}

    def disk(self) -> dict[str, int]:
        usage = shutil.disk_usage(self.root)
        leftover = self.root / "test.img"
        return {
            "root_total_bytes": usage.total,
            "root_free_bytes": usage.free,
            "factory_test_image_bytes": leftover.stat().st_size if leftover.is_file() else 0,
        }

    def host_keys(self) -> dict[str, str]:
        """Fingerprint (as ``ssh-keygen -l`` prints it) per key type."""
        keys: dict[str, str] = {}
        for path in sorted((self.root / "etc/ssh").glob("ssh_host_*_key.pub")):
            fields = read_text(path).split()
            if len(fields) >= 2:
                try:
                    digest = hashlib.sha256(base64.b64decode(fields[1])).digest()
                except ValueError:
                    continue
                keys[fields[0]] = "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
        return keys

    def ntp_synchronised(self) -> bool:
        """systemd's rule (time-util.c, ntp_synced): the kernel's maximum error is below 16 s."""
        # struct timex of 64-bit Linux: int modes, pad, long offset, freq, maxerror, esterror, int status, ...
        buffer = ctypes.create_string_buffer(256)
        try:
            state = ctypes.CDLL(None, use_errno=True).adjtimex(buffer)
        except (OSError, AttributeError):
            return False
        maximum_error_us = int.from_bytes(buffer.raw[24:32], "little", signed=True)
        return state >= 0 and maximum_error_us < 16_000_000

    def process_name(self, pid: str) -> str:
        return read_line(self.proc / pid / "comm")

    def process_unit(self, pid: str) -> str:
        """The systemd unit from the process's control group, empty if it has none.

        ``kubepods`` in a pod; a unit of a user's own manager comes with it: ``user@1000.service/NAME``.
        """
        group = read_text(self.proc / pid / "cgroup")
        # With systemd's cgroup driver the innermost one is containerd's scope of that container, else there is none.
        if "/kubepods" in group:
            return "kubepods"
        for line in group.splitlines():
            parts = [part for part in line.split(":", 2)[-1].split("/") if part.endswith((".service", ".scope"))]
            if parts:
                return "/".join(([parts[0]] if parts[0].startswith("user@") else []) + parts[-1:])
        return ""

    def pids(self) -> list[str]:
        try:
            return sorted((entry for entry in os.listdir(self.proc) if entry.isdigit()), key=int)
        except OSError:
            return []

    def listening(self) -> list[dict[str, Any]]:
        """Listening TCP sockets with the process and unit that own them (empty where the owner can not be read)."""
        sockets: dict[str, tuple[str, int]] = {}
        for table in ("net/tcp", "net/tcp6"):
            for line in read_text(self.proc / table, 4 << 20).splitlines()[1:]:
                fields = line.split()
                if len(fields) > 9 and fields[3] == "0A":
                    sockets[fields[9]] = socket_address(fields[1])
        owners: dict[str, str] = {}
        for pid in self.pids():
            if len(owners) == len(sockets):
                break
            directory = self.proc / pid / "fd"
            try:
                descriptors = os.listdir(directory)
            except OSError:
                continue
            for descriptor in descriptors:
                try:
                    target = os.readlink(directory / descriptor)
                except OSError:
                    continue
                if target.startswith("socket:["):
                    inode = target[8:-1]
                    if inode in sockets:
                        owners.setdefault(inode, pid)
        found = {}
        for inode, (address, port) in sockets.items():
            pid = owners.get(inode, "")
            found[port, address] = {
                "address": address,
                "port": port,
                "process": self.process_name(pid) if pid else "",
                "unit": self.process_unit(pid) if pid else "",
            }
        return [found[key] for key in sorted(found)]

    def rdma_netdevs(self) -> set[str]:
        """Netdevs behind an RDMA device: by PCI parent, by rxe's ``parent``, by the GID table."""
        names: set[str] = set()
        for device in self._entries(self.sysfs / "class/infiniband"):
            names.update(entry.name for entry in self._entries(device / "device/net"))
            names.add(read_line(device / "parent"))
            for port in self._entries(device / "ports"):
                for entry in self._entries(port / "gid_attrs/ndevs"):
                    names.add(read_line(entry))
        return names - {""}

    def network(self) -> dict[str, Any]:
        """Netdevs with their addresses, and the IPv4 routes."""
        status, output = self.run(["ip", "-json", "address", "show"])
        addresses: dict[str, list[dict[str, Any]]] = {}
        if status == 0 and output.strip():
            for link in json.loads(output):
                addresses[link.get("ifname", "")] = [
                    {"address": entry["local"], "prefix_length": entry["prefixlen"], "scope": entry.get("scope", "")}
                    for entry in link.get("addr_info", [])
                    if "local" in entry
                ]
        rdma = self.rdma_netdevs()
        netdevs = {}
        for entry in self._entries(self.sysfs / "class/net"):
            name = entry.name
            if not entry.is_dir():  # bonding_masters is a file
                continue
            netdevs[name] = {
                "mac": read_line(entry / "address"),
                "mtu_bytes": int(read_line(entry / "mtu") or 0),
                "state": read_line(entry / "operstate"),
                "carrier": read_line(entry / "carrier") == "1",
                "wireless": (entry / "wireless").exists() or (entry / "phy80211").exists(),
                "physical": (entry / "device").exists(),
                "rdma": name in rdma,
                "addresses": addresses.get(name, []),
            }
        routes = self.routes()
        defaults = [route for route in routes if route["destination"] == "0.0.0.0/0"]
        return {
            "netdevs": netdevs,
            "routes": routes,
            "default_netdev": min(defaults, key=lambda route: route["metric"])["netdev"] if defaults else "",
        }

    def routes(self) -> list[dict[str, Any]]:
        """``/proc/net/route`` (IPv4, main table)."""
        routes = []
        for line in read_text(self.proc / "net/route").splitlines()[1:]:
            fields = line.split()
            if len(fields) < 8 or not int(fields[3], 16) & 1:
                continue

            def dotted(text: str) -> str:
                return socket.inet_ntoa(bytes.fromhex(text)[::-1])

            prefix_length = int(fields[7], 16).bit_count()
            routes.append(
                {
                    "destination": f"{dotted(fields[1])}/{prefix_length}",
                    "gateway": dotted(fields[2]),
                    "netdev": fields[0],
                    "metric": int(fields[6]),
                }
            )
        return routes

    @staticmethod
    def _entries(directory: Path) -> list[Path]:
        try:
            return sorted(directory.iterdir())
        except OSError:
            return []

    def unit_files(self) -> Iterator[Path]:
        """Service and timer files by systemd's precedence, drop-ins included; symlinks (aliases, masks) are skipped."""
        for name in UNIT_DIRECTORIES:
            directory = self.root / name
            for entry in self._entries(directory):
                if entry.is_symlink():
                    continue
                if entry.name.endswith((".service", ".timer")):
                    yield entry
                elif entry.name.endswith(".service.d"):
                    yield from (path for path in self._entries(entry) if path.name.endswith(".conf"))

    def clock_units(self) -> list[dict[str, Any]]:
        """Units and boot scripts, not ours, that lock GPU clocks: ``{name, path, reason, enabled}``.

        ``enabled``: something wants the unit at boot, or it can not be told (timers, scripts).
        """
        found: dict[str, dict[str, Any]] = {}
        for path in self.unit_files():
            unit = path.parent.name[:-2] if path.parent.name.endswith(".service.d") else path.name
            if unit.startswith(OWN_UNIT_PREFIX) or unit in found:
                continue
            text = read_text(path, 65536)
            reason = ""
            if CLOCK_CALL.search(text):
                reason = CALLS
            elif unit in KNOWN_CLOCK_UNITS:
                reason = "known clock-lock unit"
            elif not str(path).startswith(str(self.root / "usr/lib")):
                # A unit an owner wrote often starts a script that does the work.
                for program in re.findall(r"^Exec\w+=[-@:+!|]*(?:/\S*/)?(?:ba|da)?(?:sh\s+)?(/\S+)", text, re.M):
                    script = read_text(self.root / program.lstrip("/"), 65536)
                    if CLOCK_CALL.search(script):
                        reason = f"starts {program}, which calls nvidia-smi -lgc"
            if reason:
                enabled = unit.endswith(".timer") or self.unit_state(unit)["enabled"] or self._has_timer(unit)
                found[unit] = {"name": unit, "path": self._absolute(path), "reason": reason, "enabled": enabled}
        for name in ("etc/rc.local", "etc/crontab", "var/spool/cron/crontabs/root"):
            if CLOCK_CALL.search(read_text(self.root / name, 65536)):
                found[name] = {"name": f"/{name}", "path": f"/{name}", "reason": CALLS, "enabled": True}
        for path in self._entries(self.root / "etc/cron.d"):
            if CLOCK_CALL.search(read_text(path, 65536)):
                found[path.name] = {
                    "name": path.name,
                    "path": self._absolute(path),
                    "reason": CALLS,
                    "enabled": True,
                }
        return [found[key] for key in sorted(found)]

    def _has_timer(self, unit: str) -> bool:
        return self._unit_path(unit.removesuffix(".service") + ".timer") is not None

    def _absolute(self, path: Path) -> str:
        return "/" + str(path.relative_to(self.root))

    def foreign_nvml(self) -> list[dict[str, str]]:
        """What makes programs see another libnvidia-ml than the driver package's: ``{path, reason}``."""
        found = []
        preload = read_line(self.root / "etc/ld.so.preload")
        if preload:
            found.append({"path": "/etc/ld.so.preload", "reason": f"preloads {preload}"})
        sources = [self.root / "etc/environment", self.root / "etc/systemd/system.conf"]
        sources += self._entries(self.root / "etc/profile.d")
        sources += self._entries(self.root / "etc/environment.d")
        sources += self._entries(self.root / "etc/systemd/system.conf.d")
        for path in sources:
            match = re.search(r"^[^#\n]*\bLD_PRELOAD=(\S*(?:nvml|nvidia-ml)\S*)", read_text(path, 65536), re.M)
            if match:
                found.append({"path": self._absolute(path), "reason": f"sets LD_PRELOAD={match[1]}"})
        checksums = self.packaged_nvml()
        for directory in self._library_directories():
            for path in self._entries(directory):
                if not path.name.startswith("libnvidia-ml.so") or path.is_symlink() or not path.is_file():
                    continue
                name = self._absolute(path)
                expected = checksums.get(path.name) if "usr/local" not in name else None
                if expected is None:
                    found.append({"path": name, "reason": "belongs to no package"})
                elif expected and hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest() != expected:
                    found.append({"path": name, "reason": "differs from the file its package installed"})
        return found

    def _library_directories(self) -> Iterator[Path]:
        triplet = f"{platform.machine()}-linux-gnu"
        for name in (f"usr/lib/{triplet}", "usr/lib", "usr/local/lib", f"usr/local/lib/{triplet}", "usr/lib64"):
            directory = self.root / name
            if directory.is_dir() and not directory.is_symlink():
                yield directory

    def packaged_nvml(self) -> dict[str, str]:
        """File name of every packaged libnvidia-ml with its md5 (empty if the package lists none)."""
        sums: dict[str, str] = {}
        info = self.root / "var/lib/dpkg/info"
        # Only packages whose name says so: reading every list of a desktop installation takes seconds.
        for path in self._entries(info):
            if not fnmatch.fnmatch(path.name, "*nvidia*") or path.suffix not in (".list", ".md5sums"):
                continue
            for line in read_text(path, 4 << 20).splitlines():
                digest, _, name = line.partition("  ") if path.suffix == ".md5sums" else ("", "", line)
                base = os.path.basename(name)
                if base.startswith("libnvidia-ml.so"):
                    sums[base] = digest or sums.get(base, "")
        return sums

    def kubernetes(self) -> list[dict[str, Any]]:
        """Kubernetes installations the collection did not make: ``{kind, path, active}``."""
        found = []
        for kind, paths in KUBERNETES.items():
            if (self.root / MANIFESTS / f"{kind}.json").exists():
                continue
            present = [f"/{name}" for name in paths if (self.root / name).exists()]
            units = [unit for unit in KUBERNETES_UNITS[kind] if self._unit_path(unit)]
            active = any(self.unit_state(unit)["active"] for unit in units)
            if present or units:
                found.append({"kind": kind, "path": (present or [f"unit {units[0]}"])[0], "active": active})
        return found

    def _unit_path(self, unit: str) -> Path | None:
        for name in UNIT_DIRECTORIES:
            path = self.root / name / unit
            if path.exists() or path.is_symlink():
                return path
        return None

    def unit_state(self, unit: str) -> dict[str, bool]:
        """Whether a unit exists, is masked, is wanted by something, and (services only) has processes."""
        path = self._unit_path(unit)
        masked = path is not None and path.is_symlink() and os.readlink(path) == "/dev/null"
        etc = self.root / "etc/systemd/system"
        wanted = any(
            (directory / unit).is_symlink()
            for directory in self._entries(etc)
            if directory.name.endswith((".wants", ".requires"))
        )
        processes = self.sysfs / "fs/cgroup/system.slice" / unit / "cgroup.procs"
        return {
            "exists": path is not None,
            "masked": masked,
            "enabled": wanted,
            "active": bool(read_line(processes)),
        }

    def sleep_targets(self) -> dict[str, bool]:
        """Whether each target that puts the machine to sleep is masked."""
        names = ("sleep", "suspend", "hibernate", "hybrid-sleep", "suspend-then-hibernate")
        return {f"{name}.target": self.unit_state(f"{name}.target")["masked"] for name in names}

    def hosts(self) -> dict[str, list[str]]:
        """``/etc/hosts`` as name to addresses, without the block that the host role manages."""
        names: dict[str, list[str]] = {}
        managed = False
        for line in read_text(self.root / "etc/hosts").splitlines():
            if "goodput.spark host" in line:
                managed = line.startswith("# BEGIN")
            fields = line.split("#")[0].split()
            if managed or len(fields) < 2:
                continue
            for name in fields[1:]:
                names.setdefault(name, []).append(fields[0])
        return names

    def account(self, name: str) -> dict[str, Any]:
        """The passwd entry of a user, or an empty dictionary."""
        for line in read_text(self.root / "etc/passwd").splitlines():
            fields = line.split(":")
            if len(fields) == 7 and fields[0] == name:
                return {"uid": int(fields[2]), "gid": int(fields[3]), "home": fields[5], "shell": fields[6]}
        return {}

    def ntp(self) -> dict[str, Any]:
        """Whether the clock is synchronised, and which time daemons run."""
        daemons = {NTP_DAEMONS[name] for pid in self.pids() if (name := self.process_name(pid)) in NTP_DAEMONS}
        return {"synchronised": self.ntp_synchronised(), "daemons": sorted(daemons)}

    @staticmethod
    def resolve(name: str) -> list[str]:
        """Addresses a name resolves to on this node, empty if it does not."""
        try:
            return sorted({str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
        except OSError:
            return []

    def collect(
        self,
        packages: Iterable[str] = (),
        units: Iterable[str] = (),
        user: str = "",
        names: Iterable[str] = (),
        sections: Iterable[str] = (),
    ) -> dict[str, Any]:
        """Everything above, or only the named sections (and whether the probe is root).

        ``packages`` adds their versions ("" if not installed), ``units`` their states, ``user`` a passwd entry and
        ``names`` what they resolve to.
        """
        status = functools.cache(lambda: parse_dpkg(read_text(self.root / "var/lib/dpkg/status", 64 << 20)))
        readers: dict[str, Callable[[], Any]] = {
            "os": self.operating_system,
            "driver": self.driver_version,
            "memory": self.memory,
            "memory_at_rest": self.memory_at_rest,
            "disk": self.disk,
            "host_keys": self.host_keys,
            "listening": self.listening,
            "network": self.network,
            "clock_units": self.clock_units,
            "foreign_nvml": self.foreign_nvml,
            "kubernetes": self.kubernetes,
            "packages": lambda: {name: status()[0].get(name, "") for name in packages},
            "pending_packages": lambda: status()[1],
            "firmware_updater": lambda: {
                "installed": "mlnx-fw-updater" in status()[0],
                "held": "mlnx-fw-updater" in status()[2],
            },
            "units": lambda: {name: self.unit_state(name) for name in units},
            "sleep_targets_masked": self.sleep_targets,
            "hosts": self.hosts,
            "user": lambda: self.account(user) if user else {},
            "resolved": lambda: {name: self.resolve(name) for name in names},
            "ntp": self.ntp,
            "clock_seconds": time.time,
        }
        wanted = set(sections)
        unknown = sorted(wanted - set(readers))
        if unknown:
            raise ValueError(f"found sections {', '.join(unknown)}, required some of {', '.join(readers)}")
        facts = {name: read() for name, read in readers.items() if not wanted or name in wanted}
        return {"as_root": os.geteuid() == 0, **facts}
