"""The virtual pair: two QEMU guests that stand in for two DGX Sparks.

Everything of a pair lives in one directory (``.virtual``): keys, disks, sockets, serial logs, ``state.json``. QEMU runs
with that directory as its working directory, so every path it gets is relative and short enough for a Unix socket.
Rails and management are pairs of UDP ports on loopback between the two QEMU processes: no start order matters, either
side may restart, and a full queue drops a packet instead of stopping the cable.
The only ports that anything else may use are two per guest: SSH, and the frontend's HTTP.

Runs on the controller only (standard library, ``qemu-system-*``, ``qemu-img``, ``debugfs``, ``mke2fs``, ``ssh``).
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 1 << 30
#: What the second NVMe namespace holds; its checksum must survive everything that a role does.
KEEP_FILE = "keep.bin"
KEEP_BYTES = 4 << 20


class VirtualPairError(Exception):
    """Something the user must act on; the text says what was found, required and how to fix it."""


@dataclass(frozen=True)
class Arch:
    """What differs between host architectures (a guest always has the host's)."""

    binary: str
    machine: str
    console: str
    emulated_cpu: str
    #: CPU flags without which KVM cannot work although /dev/kvm exists; empty: no such flag is published.
    kvm_flags: tuple[str, ...]


ARCHES = {
    "x86_64": Arch("qemu-system-x86_64", "q35", "ttyS0", "max", ("vmx", "svm")),
    "aarch64": Arch("qemu-system-aarch64", "virt", "ttyAMA0", "max", ()),
}


@dataclass(frozen=True)
class Nic:
    """One network device of a guest: its name in the guest and the suffix of its MAC address."""

    name: str
    suffix: int
    mtu: int


#: Named as DGX OS names them; the first is QEMU's user network, which carries only SSH and the HTTP forward.
USER_NIC = Nic("usr0", 0, 1500)
CABLES = {
    "mgmt": Nic("enP7s7", 1, 1500),
    "rail0": Nic("enp1s0f0np0", 2, 9000),
    "rail1": Nic("enP2p1s0f0np0", 3, 9000),
}
MANAGEMENT_PREFIX = "10.77.0"


@dataclass(frozen=True)
class Guest:
    """One guest; ``number`` counts from 1 and decides name, MAC and management address."""

    number: int

    @property
    def name(self) -> str:
        return f"spark{self.number}"

    @property
    def peer(self) -> Guest:
        return Guest(3 - self.number)

    @property
    def management_address(self) -> str:
        return f"{MANAGEMENT_PREFIX}.{self.number}"

    def mac(self, nic: Nic) -> str:
        return f"52:54:00:77:{self.number:02x}:{nic.suffix:02x}"


GUESTS = (Guest(1), Guest(2))


@dataclass(frozen=True)
class Settings:
    """How the guests are run. ``memory_mib`` and ``cpus`` are per guest, ``l2_gib`` the size of the empty namespace."""

    directory: Path
    image: Path
    media: Path
    memory_mib: int = 1792
    cpus: int = 1
    l2_gib: int = 8
    boot_timeout_seconds: int = 600


# --- what a guest's own copy of the image gets ---------------------------------------------------------------------


def identity_files(
    guest: Guest, public_key: str, host_key: str, host_key_public: str
) -> dict[str, tuple[str, int, int]]:
    """Files of one guest: path -> (content, mode, uid). A stock Spark has them after its first-boot wizard."""
    netplan = {
        "network": {
            "version": 2,
            "renderer": "NetworkManager",
            "ethernets": {
                USER_NIC.name: {
                    "addresses": ["10.0.2.15/24"],
                    "routes": [{"to": "default", "via": "10.0.2.2"}],
                    "link-local": [],
                },
                CABLES["mgmt"].name: {"addresses": [f"{guest.management_address}/24"], "link-local": []},
            },
        }
    }
    files = {
        "/etc/hostname": (f"{guest.name}\n", 0o644, 0),
        "/etc/hosts": (f"127.0.0.1 localhost\n127.0.1.1 {guest.name}\n::1 ip6-localhost ip6-loopback\n", 0o644, 0),
        "/etc/ssh/ssh_host_ed25519_key": (host_key, 0o600, 0),
        "/etc/ssh/ssh_host_ed25519_key.pub": (host_key_public, 0o644, 0),
        # JSON is YAML: no YAML writer is needed.
        "/etc/netplan/01-installer.yaml": (json.dumps(netplan, indent=1) + "\n", 0o600, 0),
        "/home/spark/.ssh/authorized_keys": (public_key, 0o600, 1000),
    }
    for nic in (USER_NIC, *CABLES.values()):
        files[f"/etc/systemd/network/10-{nic.name}.link"] = (
            f"[Match]\nMACAddress={guest.mac(nic)}\n[Link]\nName={nic.name}\n",
            0o644,
            0,
        )
    return files


def debugfs_commands(files: dict[str, tuple[str, int, int]], sources: dict[str, str]) -> str:
    """Commands for ``debugfs -w -f``: write ``files`` (path -> content, mode, uid) from ``sources`` (path -> file)."""
    lines = ["mkdir /home/spark/.ssh", "sif /home/spark/.ssh mode 040700"]
    lines += [f"sif /home/spark/.ssh {field} 1000" for field in ("uid", "gid")]
    for path, (_, mode, uid) in files.items():
        lines += [f"rm {path}", f"write {sources[path]} {path}", f"sif {path} mode 0100{mode:03o}"]
        lines += [f"sif {path} {field} {uid}" for field in ("uid", "gid")]
    return "\n".join(lines) + "\n"


def qemu_arguments(
    guest: Guest,
    settings: Settings,
    arch: Arch,
    accel: str,
    ports: dict[str, int],
    cables: dict[str, dict[str, int]],
    machine_id: str,
) -> list[str]:
    """The QEMU command line of one guest; every path is relative to ``settings.directory`` or inside the cache.

    ``ports`` maps ``ssh`` and ``http`` to loopback ports, ``cables`` guest and cable to its UDP port.
    """
    home = guest.name
    append = (
        f"root=/dev/vda rw console={arch.console} systemd.machine_id={machine_id} mitigations=off quiet"
        # Waits a minute for storage fabrics that no guest has.
        " systemd.mask=nvmf-autoconnect.service"
    )
    command = [arch.binary, "-name", f"goodput-{guest.name}", "-nodefaults", "-no-user-config", "-display", "none"]
    command += ["-machine", arch.machine, "-accel", accel]
    command += ["-cpu", "host" if accel == "kvm" else arch.emulated_cpu]
    # With one possible CPU the emulator leaves out memory barriers, and a device misses what the guest queued: a rail
    # that fell silent. The second CPU is never plugged.
    command += ["-smp", f"{settings.cpus},maxcpus={max(settings.cpus, 2)}", "-m", str(settings.memory_mib)]
    command += [
        "-kernel",
        str(settings.image / "vmlinuz"),
        "-initrd",
        str(settings.image / "initrd.img"),
        "-append",
        append,
    ]
    command += ["-serial", f"file:{home}/console.log", "-qmp", f"unix:{home}/qmp.sock,server=on,wait=off"]
    disks = [
        ("root", f"{home}/root.qcow2", "qcow2", "virtio-blk-pci", ""),
        ("media", str(settings.media), "raw,readonly=on", "virtio-blk-pci", ""),
        ("l2", f"{home}/nvme-l2.raw", "raw,discard=unmap", "nvme", f",serial=SPARK{guest.number}L2"),
        ("data", f"{home}/nvme-data.raw", "raw,discard=unmap", "nvme", f",serial=SPARK{guest.number}DATA"),
    ]
    for name, path, form, device, extra in disks:
        command += ["-drive", f"if=none,id={name},file={path},format={form},cache=unsafe"]
        command += ["-device", f"{device},drive={name}{extra}"]
    forwards = "".join(f",hostfwd=tcp:127.0.0.1:{ports[k]}-:{inside}" for k, inside in (("ssh", 22), ("http", 8000)))
    # restrict=on: a guest reaches nothing outside.
    command += ["-netdev", f"user,id=usr,restrict=on{forwards}"]
    command += ["-device", f"virtio-net-pci,netdev=usr,mac={guest.mac(USER_NIC)}"]
    for cable, nic in CABLES.items():
        here, there = (cables[g.name][cable] for g in (guest, guest.peer))
        command += [
            "-netdev",
            f"socket,id={cable},udp=127.0.0.1:{there},localaddr=127.0.0.1:{here}",
            "-device",
            f"virtio-net-pci,netdev={cable},mac={guest.mac(nic)},host_mtu={nic.mtu}",
        ]
    return [*command, "-device", "virtio-rng-pci"]


# --- acceleration --------------------------------------------------------------------------------------------------


def kvm_works(settings: Settings, arch: Arch, cpuinfo: str | None = None, seconds: float = 15.0) -> tuple[bool, str]:
    """Whether KVM boots a kernel here, and why (not). A present /dev/kvm proves nothing, so one is booted."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False, "/dev/kvm is absent or not writable"
    text = Path("/proc/cpuinfo").read_text() if cpuinfo is None else cpuinfo
    words = set(text.split())
    if arch.kvm_flags and not words.intersection(arch.kvm_flags):
        return False, f"the CPU offers none of {', '.join(arch.kvm_flags)}"
    log = settings.directory / "kvm-probe.log"
    command = [arch.binary, "-nodefaults", "-no-user-config", "-display", "none", "-machine", arch.machine]
    command += ["-accel", "kvm", "-cpu", "host", "-m", "256", "-no-reboot", "-kernel", str(settings.image / "vmlinuz")]
    command += ["-append", f"console={arch.console} panic=-1", "-serial", f"file:{log}"]
    log.unlink(missing_ok=True)
    with subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        deadline = time.monotonic() + seconds
        try:
            while time.monotonic() < deadline:
                if log.exists() and "Linux version" in log.read_text(errors="replace"):
                    return True, "a kernel booted under KVM"
                if process.poll() is not None:
                    break
                time.sleep(0.2)
            return False, f"no kernel booted under KVM within {seconds:.0f} s"
        finally:
            process.kill()


# --- life cycle ----------------------------------------------------------------------------------------------------


def free_port(kind: socket.SocketKind = socket.SOCK_STREAM) -> int:
    """A loopback TCP (or UDP) port that nothing listens on now."""
    with socket.socket(type=kind) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    """Whether another program has this loopback TCP port; connections that just ended do not count."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return True
        return False


def own_process(pid: int, guest: Guest, directory: Path) -> bool:
    """Whether ``pid`` is this pair's QEMU: same guest name on its command line, same working directory."""
    try:
        command = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return f"goodput-{guest.name}".encode() in command and Path(f"/proc/{pid}/cwd").resolve() == directory.resolve()
    except OSError:
        return False


class Pair:
    """The two guests of one directory."""

    def __init__(self, settings: Settings, log: Callable[[str], None] = lambda _: None) -> None:
        self.settings = settings
        self.directory = settings.directory
        self.log = log
        self.state_file = self.directory / "state.json"
        self.state: dict[str, Any] = json.loads(self.state_file.read_text()) if self.state_file.exists() else {}
        machine = platform.machine()
        if machine not in ARCHES:
            raise VirtualPairError(f"found architecture {machine}, required one of {', '.join(ARCHES)}")
        self.arch = ARCHES[machine]

    # -- reading

    def pid(self, guest: Guest) -> int | None:
        """The pid of a running guest, or None."""
        path = self.directory / guest.name / "pid"
        if not path.exists():
            return None
        pid = int(path.read_text())
        return pid if own_process(pid, guest, self.directory) else None

    def console_tail(self, guest: Guest, lines: int = 30) -> str:
        path = self.directory / guest.name / "console.log"
        return (
            "\n".join(path.read_text(errors="replace").splitlines()[-lines:]) if path.exists() else "(no serial output)"
        )

    def ssh_command(self, guest: Guest, *command: str) -> list[str]:
        port = self.state["ports"][guest.name]["ssh"]
        options = ["BatchMode=yes", "ConnectTimeout=20", f"UserKnownHostsFile={self.directory}/known_hosts"]
        options += ["StrictHostKeyChecking=yes", "ControlMaster=no", "ControlPath=none"]
        flags = [word for option in options for word in ("-o", option)]
        return ["ssh", *flags, "-i", str(self.directory / "key/id"), "-p", str(port), "spark@127.0.0.1", *command]

    def status(self) -> dict[str, Any]:
        """Per guest: running, pid, ports; and the acceleration and image in use."""
        guests = {}
        for guest in GUESTS:
            pid = self.pid(guest)
            guests[guest.name] = {
                "running": pid is not None,
                "pid": pid,
                "management_address": guest.management_address,
                **self.state.get("ports", {}).get(guest.name, {}),
            }
        keys = ("accel", "accel_reason", "image", "keep_sha256")
        return {"guests": guests, **{key: self.state.get(key, "") for key in keys}}

    # -- making

    def _save(self) -> None:
        temporary = self.state_file.with_suffix(".tmp")
        temporary.write_text(json.dumps(self.state, indent=1))
        temporary.replace(self.state_file)

    def _keygen(self, path: Path, comment: str) -> str:
        """Make an ed25519 key pair unless it exists; returns the public key line."""
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(path)], check=True)
        return path.with_suffix(path.suffix + ".pub").read_text()

    def _prepare(self) -> None:
        """Ports, machine-ids, keys and known_hosts: made once, kept for the life of the directory.

        A forwarded port that another program took while its guest was off is picked anew.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        self.state.setdefault("ports", {g.name: {"ssh": free_port(), "http": free_port()} for g in GUESTS})
        for guest in GUESTS:
            if self.pid(guest) is None:
                ports = self.state["ports"][guest.name]
                ports.update({purpose: free_port() for purpose, port in ports.items() if listening(port)})
        self.state.setdefault("cables", {g.name: {c: free_port(socket.SOCK_DGRAM) for c in CABLES} for g in GUESTS})
        self.state.setdefault("machine_ids", {g.name: uuid.uuid4().hex for g in GUESTS})
        if "accel" not in self.state:
            works, self.state["accel_reason"] = kvm_works(self.settings, self.arch)
            self.state["accel"] = "kvm" if works else "tcg,thread=multi,tb-size=256"
        self._keygen(self.directory / "key/id", "virtual-pair")
        known = []
        for guest in GUESTS:
            public = self._keygen(self.directory / guest.name / "hostkey", guest.name).split()
            known.append(f"[127.0.0.1]:{self.state['ports'][guest.name]['ssh']} {public[0]} {public[1]}\n")
        (self.directory / "known_hosts").write_text("".join(known))
        self._save()

    def _make_disks(self, guest: Guest) -> None:
        """A root disk over the base image with this guest's identity, an empty NVMe, and one with a file to keep."""
        home = self.directory / guest.name
        root, keep = home / "root.qcow2", home / "nvme-data.raw"
        base = self.settings.image / "base.ext4"
        if not root.exists():
            host_key = home / "hostkey"
            public_key = (self.directory / "key/id.pub").read_text()
            files = identity_files(guest, public_key, host_key.read_text(), host_key.with_suffix(".pub").read_text())
            staging = home / "identity"
            shutil.rmtree(staging, ignore_errors=True)
            staging.mkdir(mode=0o700)
            sources = {}
            for index, (path, (content, _, _)) in enumerate(files.items()):
                source = staging / str(index)
                source.write_text(content)
                sources[path] = str(source)
            script = staging / "commands"
            script.write_text(debugfs_commands(files, sources))
            # The overlay's own base carries the identity, so that the shared image stays as built.
            own = home / "base.ext4"
            subprocess.run(["cp", "--sparse=always", "--reflink=auto", str(base), str(own)], check=True)
            result = subprocess.run(
                ["debugfs", "-w", "-f", str(script), str(own)], capture_output=True, text=True, check=True
            )
            shutil.rmtree(staging)
            if "No space" in result.stderr or "Could not allocate" in result.stderr:
                raise VirtualPairError(f"writing the identity of {guest.name} failed: {result.stderr}")
            subprocess.run(
                ["qemu-img", "create", "-q", "-f", "qcow2", "-b", "base.ext4", "-F", "raw", "root.qcow2"],
                cwd=home,
                check=True,
            )
        l2 = home / "nvme-l2.raw"
        if not l2.exists():
            with l2.open("wb") as stream:
                stream.truncate(self.settings.l2_gib * GIB)
        if not keep.exists():
            folder = home / "data"
            folder.mkdir(exist_ok=True)
            data = (hashlib.sha256(b"goodput").digest() * (KEEP_BYTES // 32))[:KEEP_BYTES]
            (folder / KEEP_FILE).write_bytes(data)
            self.state["keep_sha256"] = hashlib.sha256(data).hexdigest()
            with keep.open("wb") as stream:
                stream.truncate(4 * GIB)
            subprocess.run(
                ["mke2fs", "-q", "-F", "-t", "ext4", "-L", "models", "-d", str(folder), str(keep)], check=True
            )
            shutil.rmtree(folder)
            self._save()

    def _start(self, guest: Guest) -> None:
        home = self.directory / guest.name
        (home / "qmp.sock").unlink(missing_ok=True)
        command = qemu_arguments(
            guest,
            self.settings,
            self.arch,
            self.state["accel"],
            self.state["ports"][guest.name],
            self.state["cables"],
            self.state["machine_ids"][guest.name],
        )
        with (home / "qemu.log").open("w") as log:
            process = subprocess.Popen(
                command, cwd=self.directory, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        (home / "pid").write_text(str(process.pid))
        # For a moment a process that has just begun shows no command line, and would be taken for one that ended.
        deadline = time.monotonic() + 10
        while self.pid(guest) is None and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.05)

    def _fail(self, guest: Guest, reason: str) -> VirtualPairError:
        log = self.directory / guest.name / "qemu.log"
        said = log.read_text(errors="replace").strip() if log.exists() else ""
        return VirtualPairError(
            f"{guest.name}: {reason}\nQEMU said: {said or '(nothing)'}\n"
            f"last lines of {self.directory / guest.name}/console.log:\n" + self.console_tail(guest)
        )

    def wait_ready(self, guest: Guest) -> float:
        """Wait until SSH answers and systemd has finished starting; returns seconds. Raises with the serial log."""
        start = time.monotonic()
        deadline = start + self.settings.boot_timeout_seconds
        answer = ""
        while time.monotonic() < deadline:
            if self.pid(guest) is None:
                raise self._fail(guest, "QEMU ended while the guest was booting")
            left = max(20.0, deadline - time.monotonic())
            try:
                result = subprocess.run(
                    self.ssh_command(guest, "systemctl is-system-running --wait"),
                    capture_output=True,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    timeout=left,
                )
            except subprocess.TimeoutExpired:
                break
            answer = (result.stdout + result.stderr).strip()
            if result.stdout.strip() in ("running", "degraded"):
                return time.monotonic() - start
            time.sleep(2)
        raise self._fail(
            guest, f"not ready within {self.settings.boot_timeout_seconds} s; last answer: {answer or 'none'}"
        )

    def up(self, wait: bool = True) -> bool:
        """Start what does not run and wait for it; True if anything was started. A running pair is left alone."""
        image, media = self.settings.image.name, str(self.settings.media)
        if self.state.get("media", media) != media and any(self.pid(g) for g in GUESTS):
            self.log("the medium changed: the guests are restarted on their disks to see it")
            self.down()
        running = {g.name: self.pid(g) is not None for g in GUESTS}
        if not any(running.values()) and self.state.get("image") not in (None, image):
            self.log("the image's recipe changed: the guests start from a fresh copy")
            self.destroy_disks()
        self._prepare()
        self.state["image"] = self.state.get("image") if any(running.values()) else image
        self.state["media"] = media
        for guest in GUESTS:
            if not running[guest.name]:
                self._make_disks(guest)
                self._start(guest)
        self._save()
        if wait:
            for guest in GUESTS:
                self.wait_ready(guest)
        return not all(running.values())

    def down(self, timeout_seconds: float = 40.0) -> bool:
        """Power the guests off, then end what is left by pid; True if anything ran."""
        pids = {guest: pid for guest in GUESTS if (pid := self.pid(guest)) is not None}
        for guest in pids:
            # A guest that does not answer is ended below.
            subprocess.Popen(
                self.ssh_command(guest, "sudo systemctl poweroff"),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        deadline = time.monotonic() + timeout_seconds
        for step in (None, signal.SIGTERM, signal.SIGKILL):
            for guest, pid in pids.items():
                if step is not None and own_process(pid, guest, self.directory):
                    os.kill(pid, step)
            limit = deadline if step is None else time.monotonic() + 5
            while time.monotonic() < limit and any(own_process(p, g, self.directory) for g, p in pids.items()):
                time.sleep(0.3)
        for guest in GUESTS:
            (self.directory / guest.name / "pid").unlink(missing_ok=True)
        return bool(pids)

    def destroy_disks(self) -> None:
        """Forget the guests' disks; the next ``up`` makes stock ones. Refused while a guest runs."""
        for guest in GUESTS:
            if self.pid(guest) is not None:
                raise VirtualPairError(
                    f"{guest.name} is running (pid {self.pid(guest)}): run `make virtual-down` first"
                )
            for name in ("root.qcow2", "base.ext4", "nvme-l2.raw", "nvme-data.raw"):
                (self.directory / guest.name / name).unlink(missing_ok=True)
        # What molecule remembers ("prepared") is about guests that are gone.
        shutil.rmtree(self.directory / "molecule", ignore_errors=True)
        self.state.pop("image", None)
        if self.state_file.exists():
            self._save()


def make_media(target: Path, mirror: Path, archives: list[Path]) -> bool:
    """Make the read-only medium: the offline package mirror and the given archives, as ext4; True if it was made.

    ``target`` carries the recipe in its name, so an existing file is right.
    """
    if target.exists():
        return False
    staging = target.with_suffix(".tree")
    shutil.rmtree(staging, ignore_errors=True)
    (staging / "mirror").mkdir(parents=True)
    for source, folder in [*((p, "mirror") for p in sorted(mirror.iterdir())), *((p, ".") for p in archives)]:
        try:
            os.link(source, staging / folder / source.name)
        except OSError:
            shutil.copy2(source, staging / folder / source.name)
    size = sum(p.stat().st_size for p in staging.rglob("*") if p.is_file())
    mib = int(size * 1.08 / (1 << 20)) + 32
    part = target.with_suffix(".part")
    command = ["mke2fs", "-q", "-F", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-L", "GOODPUT_MEDIA"]
    subprocess.run([*command, "-d", str(staging), str(part), f"{mib}M"], check=True)
    shutil.rmtree(staging)
    part.rename(target)
    return True
