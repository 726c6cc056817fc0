# Apache-2.0 (see LICENSE)
"""K3s on one node: a read-only look at it, its token, and its removal.

Standard library only. Paths are read below ``Node.root`` and ``Node.proc``, so that recorded trees can be tested.
"""

from __future__ import annotations

import hashlib
import os
import re
import secrets
import shutil
import signal
import ssl
import stat
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError, version_of_output

BINARY = "/usr/local/bin/k3s"
DATA_DIR = "/var/lib/rancher/k3s"
TOKEN_FILE = "/etc/rancher/k3s/token"
SERVER_TOKEN_FILE = f"{DATA_DIR}/server/node-token"
UNITS = {"server": "k3s.service", "agent": "k3s-agent.service"}
CONTAINERD_CONFIG = f"{DATA_DIR}/agent/etc/containerd/config.toml"
# Where K3s looks for container runtimes when it starts (k3s-io/docs advanced.md; its own order).
RUNTIME_FOLDERS = ("usr/local/nvidia/toolkit", "usr/local/sbin", "usr/local/bin", "usr/sbin", "usr/bin", "sbin", "bin")
NVIDIA_RUNTIME = "nvidia-container-runtime"
KERNEL_MODULES = ("overlay", "br_netfilter", "vxlan", "nf_conntrack")
# What K3s and the kubelet mount themselves; everything else below the data directory is somebody's disk.
OWN_FILESYSTEMS = {"overlay", "tmpfs", "proc", "sysfs", "nsfs", "shm", "mqueue", "fuse.fuse-overlayfs"}
# A kubelet under these names that is not below our units belongs to another Kubernetes.
KUBELET_NAMES = {"k3s-server", "k3s-agent", "kubelet", "kubelite", "rke2"}
UNLIMITED = "unlimited"
DIGEST_NAME = "GOODPUT_K3S_DIGEST"
MOUNT_TREES = ("/run/k3s", f"{DATA_DIR}/agent/containerd", "/var/lib/kubelet/pods", "/var/lib/kubelet/plugins")
NETDEVS = ("cni0", "flannel.1", "flannel-v6.1", "flannel-wg", "flannel-wg-v6")
# Files and folders that K3s and the kubelet make outside what the role writes. Wiped on removal, but only those that
# were not there before the role came.
MADE_BY_K3S = (
    DATA_DIR,
    "/var/lib/kubelet",
    "/var/lib/cni",
    "/etc/rancher/node",
    "/var/log/pods",
    "/var/log/containers",
    "/usr/libexec/kubernetes",
)
FILES_BY_K3S = ("/etc/rancher/k3s/k3s.yaml",)
# kubectl would keep what the API can do in root's home, where a reset must not look for it.
KUBECTL_CACHE = "/run/goodput-kubectl"
RUN_FOLDERS = ("/run/k3s", "/run/flannel", KUBECTL_CACHE)
SECONDS_TO_DIE = 10.0

# argv, standard input -> (exit status, stdout, stderr)
Run = Callable[..., tuple[int, str, str]]


def run_command(argv: Sequence[str], stdin: str | None = None, timeout_seconds: float = 120) -> tuple[int, str, str]:
    try:
        done = subprocess.run(
            list(argv),
            input=stdin,
            capture_output=True,
            text=True,
            check=False,
            timeout=timeout_seconds,
            env={**os.environ, "KUBECACHEDIR": KUBECTL_CACHE},
        )
    except FileNotFoundError as error:
        return 127, "", str(error)
    except subprocess.TimeoutExpired:
        return 124, "", f"no end after {timeout_seconds:g} s"
    return done.returncode, done.stdout, done.stderr


def text_of(path: Path, limit: int = 4 << 20) -> str:
    try:
        with path.open("rb") as stream:
            return stream.read(limit).decode("utf-8", "replace")
    except OSError:
        return ""


@dataclass
class Node:
    """The roots everything is read from, and the only way to run a program."""

    root: Path = Path("/")
    proc: Path = Path("/proc")
    run: Run = run_command

    def path(self, absolute: str) -> Path:
        return self.root / absolute.lstrip("/")

    # ---- what is installed

    def binary(self) -> dict[str, str]:
        """Version and sha256 of the program; both empty without one."""
        path = self.path(BINARY)
        if not path.is_file():
            return {"version": "", "sha256": ""}
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        _status, out, _err = self.run([str(path), "--version"])
        return {"version": version_of_output(out), "sha256": digest}

    def units(self) -> dict[str, dict[str, Any]]:
        """Of each unit: loaded, active, running, enabled, and the digest of the settings that it was started with.

        One that runs and is not active has not come up yet: an agent whose token is refused tries again for ever.
        The digest is in the environment of the process, so it tells what runs, whatever the files say by now.
        """
        found = {}
        for side, unit in UNITS.items():
            properties = "LoadState,ActiveState,UnitFileState,MainPID"
            _status, out, _err = self.run(["systemctl", "show", f"--property={properties}", "--", unit])
            values = dict(line.partition("=")[::2] for line in out.splitlines())
            pid = values.get("MainPID", "0")
            environment = text_of(self.proc / pid / "environ").split("\0")
            digest = next((entry for entry in environment if entry.startswith(f"{DIGEST_NAME}=")), "")
            found[side] = {
                "loaded": values.get("LoadState") == "loaded",
                "active": values.get("ActiveState") == "active",
                "running": pid != "0",
                "enabled": values.get("UnitFileState") == "enabled",
                "digest": digest.removeprefix(f"{DIGEST_NAME}="),
            }
        return found

    def token(self) -> dict[str, Any]:
        """Whether the token file is there, its mode and owner. Never its content."""
        try:
            info = self.path(TOKEN_FILE).stat()
        except OSError:
            return {"exists": False, "mode": "", "uid": -1, "bytes": 0}
        return {
            "exists": True,
            "mode": f"{stat.S_IMODE(info.st_mode):04o}",
            "uid": info.st_uid,
            "bytes": info.st_size,
        }

    def file_sha256(self, absolute: str) -> str:
        path = self.path(absolute)
        if not path.is_file():
            return ""
        with path.open("rb") as stream:
            return hashlib.file_digest(stream, "sha256").hexdigest()

    # ---- the node

    def mounts(self) -> Iterator[tuple[str, str, str]]:
        """(mount point, source, filesystem type) of everything mounted, in mounting order."""
        for line in text_of(self.proc / "self/mountinfo").splitlines():
            left, _, right = line.partition(" - ")
            fields, tail = left.split(), right.split()
            if len(fields) >= 5 and len(tail) >= 2:
                point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
                yield point, tail[1], tail[0]

    def foreign_mounts(self) -> list[str]:
        """Mounts below the data directory that K3s did not make: an uninstall would delete what is in them."""
        return [
            f"{source} ({kind}) at {point}"
            for point, source, kind in self.mounts()
            if point.startswith(f"{DATA_DIR}/") and kind not in OWN_FILESYSTEMS
        ]

    def foreign_kubelets(self) -> list[str]:
        """Running kubelets that are not below our units, such as K3s in a Docker container."""
        found = []
        for pid in self.pids():
            name = text_of(self.proc / pid / "comm", 64).strip()
            if name not in KUBELET_NAMES:
                continue
            group = text_of(self.proc / pid / "cgroup", 4096)
            if any(f"/{unit}" in group for unit in UNITS.values()):
                continue
            place = "in a container" if re.search(r"docker|libpod|containerd|kubepods|crio", group) else "on the host"
            found.append(f"{name} {place} (pid {pid})")
        return found

    def pids(self) -> list[str]:
        try:
            return sorted((entry for entry in os.listdir(self.proc) if entry.isdigit()), key=int)
        except OSError:
            return []

    def free_bytes(self) -> int:
        """Free space where the data directory is or would be."""
        path = self.path(DATA_DIR)
        while not path.is_dir():
            path = path.parent
        return shutil.disk_usage(path).free

    def missing_modules(self) -> list[str]:
        """Kernel modules that are neither loaded, nor built in, nor to be had."""
        return [
            name
            for name in KERNEL_MODULES
            if not (self.root / "sys/module" / name).exists() and self.run(["modprobe", "-n", "-q", name])[0] != 0
        ]

    def nvidia(self) -> dict[str, Any]:
        """The program that K3s would find, and whether the running containerd knows it.

        ``configured`` is None before K3s has written its configuration for the first time.
        """
        programs = [self.root / folder / NVIDIA_RUNTIME for folder in RUNTIME_FOLDERS]
        program = next((f"/{path.relative_to(self.root)}" for path in programs if path.is_file()), "")
        text = text_of(self.path(CONTAINERD_CONFIG))
        runtimes = re.findall(r"\.runtimes\.['\"]?([A-Za-z0-9_-]+)['\"]?\]", text)
        return {"program": program, "configured": "nvidia" in runtimes if text else None}

    def cgroup_memory(self) -> bool:
        """Whether cgroup v2 is mounted and its memory controller on; K3s left version 1 with 1.35."""
        return "memory" in text_of(self.root / "sys/fs/cgroup/cgroup.controllers", 4096).split()

    def limited_pods(self) -> list[str]:
        """Uids of pods with a process whose locked memory is limited: RDMA cannot register memory there.

        Containers outlive a restart of K3s (KillMode=process) and keep the limit they were started with.
        """
        found = set()
        for pid in self.pids():
            group = text_of(self.proc / pid / "cgroup", 4096)
            match = re.search(r"kubepods[^\n]*?pod([0-9a-f]{8}[-_][0-9a-f_-]{27})", group)
            if not match:
                continue
            limit = re.search(r"^Max locked memory\s+(\S+)", text_of(self.proc / pid / "limits", 4096), re.M)
            if limit and limit[1] != UNLIMITED:
                found.add(match[1].replace("_", "-"))
        return sorted(found)

    def pod_name(self, uid: str) -> str:
        """NAMESPACE/NAME of a pod of this node, from the folder of its logs; its uid where there is none."""
        folder = next(self.path("/var/log/pods").glob(f"*_{uid}"), None)
        return "/".join(folder.name.split("_")[:2]) if folder else uid

    def look(self) -> dict[str, Any]:
        """All of the above, for the probe."""
        limited = self.limited_pods()
        return {
            "binary": self.binary(),
            "units": self.units(),
            "token": self.token(),
            "foreign_mounts": self.foreign_mounts(),
            "foreign_kubelets": self.foreign_kubelets(),
            "free_bytes": self.free_bytes(),
            "missing_modules": self.missing_modules(),
            "nvidia": self.nvidia(),
            "cgroup_memory": self.cgroup_memory(),
            "limited_pods": limited,
            "limited_pod_names": [self.pod_name(uid) for uid in limited],
        }


# --------------------------------------------------------------------------------------------------------------------
# The token
# --------------------------------------------------------------------------------------------------------------------

# What a server writes: the hash of its CA, and who may join with it.
FULL_TOKEN = re.compile(r"K10([0-9a-f]{64})::[^:\s]+:\S+")


def write_secret(path: Path, text: str) -> bool:
    """Write a file of mode 0600 unless it has this content and mode; whether it did. Never readable in between."""
    try:
        info = path.stat()
        if path.read_text() == text and stat.S_IMODE(info.st_mode) == 0o600 and info.st_uid == os.geteuid():
            return False
    except OSError:
        pass
    path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.goodput-tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    try:
        with os.fdopen(descriptor, "w") as stream:
            os.fchmod(stream.fileno(), 0o600)
            stream.write(text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    return True


def generate_token(path: Path, installed: bool, check: bool = False) -> bool:
    """Have a token file on the first server; whether it changed. An existing one keeps its content.

    :param installed: the server has data already, made with a token that can not be made again.
    """
    try:
        present = path.read_text().strip()
    except FileNotFoundError:
        present = ""
    if present:
        return write_secret(path, f"{present}\n") if not check else stat.S_IMODE(path.stat().st_mode) != 0o600
    if installed:
        raise K3sError(
            f"found no token in {path}, but a server that was made with one; required: that token; fix: put the part "
            f"after the last ':' of {DATA_DIR}/server/token into {path}, mode 0600"
        )
    if not check:
        write_secret(path, f"{secrets.token_hex(32)}\n")
    return True


def fetch_ca(url: str, timeout_seconds: float = 15) -> bytes:
    """The CA of a server, unverified: it is compared with the token's hash."""
    blind = ssl.create_default_context()
    blind.check_hostname = False
    blind.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=blind))
    with opener.open(f"{url}/cacerts", timeout=timeout_seconds) as answer:
        return bytes(answer.read(1 << 20))


def join_problem(
    token: str, url: str, fetch: Callable[[str], bytes] = fetch_ca, attempts: int = 5, wait_seconds: float = 3
) -> str:
    """Why an agent can not join this server with this token; empty if it can. Needs no secret to leave the node.

    K3s would try for ever and say so only in its journal.
    """
    match = FULL_TOKEN.fullmatch(token.strip())
    if not match:
        return "the server's token is not of the form K10HASH::USER:PASSWORD; look at its node-token file"
    error: Exception | None = None
    for attempt in range(attempts):
        try:
            ca = fetch(url)
            break
        except (OSError, urllib.error.URLError) as problem:
            error = problem
            if attempt + 1 < attempts:
                time.sleep(wait_seconds)
    else:
        return f"{url} does not answer from this node ({error}); open TCP port 6443 between the nodes"
    if hashlib.sha256(ca).hexdigest() != match[1]:
        return (
            f"the token is of another cluster: {url} has another CA; reset this node, or the token file of the server"
        )
    return ""


# --------------------------------------------------------------------------------------------------------------------
# Removal
# --------------------------------------------------------------------------------------------------------------------


@dataclass
class Remover:
    """Stops K3s with its containers and removes what they made. Every step looks first, so it can be run again."""

    node: Node
    check: bool = False
    kill: Callable[[int, int], None] = os.kill
    sleep: Callable[[float], None] = time.sleep

    def __post_init__(self) -> None:
        self.removed: list[str] = []
        self.kept: list[str] = []

    def run(self, former: dict[str, str]) -> None:
        """:param former: kind of each of ``MADE_BY_K3S`` before the role came (absent, directory)."""
        self.stop_units()
        self.kill_containers()
        self.unmount()
        self.network()
        self.firewall()
        self.wipe(former)

    def must(self, *argv: str) -> None:
        status, out, err = self.node.run(list(argv))
        if status != 0:
            raise K3sError(f"`{' '.join(argv)}` failed with exit {status}: {(err or out).strip()}")

    def stop_units(self) -> None:
        for side, unit in self.node.units().items():
            if unit["loaded"] and not self.check:
                self.must("systemctl", "stop", UNITS[side])
            if unit["active"]:
                self.removed.append(f"unit {UNITS[side]} stopped")

    def container_pids(self) -> list[int]:
        """The shims of K3s's containerd and everything below them, deepest last."""
        children: dict[str, list[str]] = {}
        shims = []
        for pid in self.node.pids():
            fields = text_of(self.node.proc / pid / "stat", 4096).rpartition(")")[2].split()
            if len(fields) > 1:
                children.setdefault(fields[1], []).append(pid)
            # As it was called: the program may be a link to one that is many.
            program = text_of(self.node.proc / pid / "cmdline", 4096).partition("\0")[0]
            if program.startswith(f"{DATA_DIR}/data/") and Path(program).name.startswith("containerd-shim"):
                shims.append(pid)
        found, todo = [], shims
        while todo:
            found += todo
            todo = [child for pid in todo for child in children.get(pid, [])]
        return [int(pid) for pid in dict.fromkeys(found)]

    def kill_containers(self) -> None:
        """The unit stops alone (KillMode=process), so that a restart keeps serving; here containers must go, too."""
        pids = self.container_pids()
        if pids:
            self.removed.append(f"{len(pids)} processes of containers")
        if self.check:
            return
        for pid in pids:
            try:
                self.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        waited = 0.0
        while pids and self.container_pids():
            if waited >= SECONDS_TO_DIE:
                left = ", ".join(str(pid) for pid in self.container_pids())
                raise K3sError(
                    f"found processes {left} after SIGKILL; required: none; fix: reboot the node, then reset"
                )
            self.sleep(0.5)
            waited += 0.5

    def unmount(self) -> None:
        points = [
            point
            for point, _source, _kind in self.node.mounts()
            if any(point == tree or point.startswith(f"{tree}/") for tree in MOUNT_TREES)
            or point.startswith("/run/netns/cni-")
        ]
        # Deepest first; a busy one is detached, since no process of K3s is left that could write to it.
        for point in sorted(points, key=lambda entry: entry.count("/"), reverse=True):
            if not self.check and self.node.run(["umount", "--", point])[0] != 0:
                self.must("umount", "--lazy", "--", point)
            self.removed.append(f"mount {point}")

    def network(self) -> None:
        for name in NETDEVS:
            if (self.node.root / "sys/class/net" / name).exists():
                self.removed.append(f"netdev {name}")
                if not self.check:
                    self.must("ip", "link", "delete", name)
        folder = self.node.root / "run/netns"
        for entry in sorted(folder.glob("cni-*")) if folder.is_dir() else []:
            self.removed.append(f"netns {entry.name}")
            if not self.check:
                entry.unlink(missing_ok=True)

    def programs(self, name: str) -> list[str]:
        """The host's program, else the one that K3s brings."""
        bundled = self.node.path(f"{DATA_DIR}/data/current/bin/aux/{name}")
        return [name, *([str(bundled)] if bundled.exists() else [])]

    def firewall(self) -> None:
        """Rules and chains of kube-proxy, of the pod network and of flannel; every other rule stays as it is."""
        for family in ("iptables", "ip6tables"):
            for program in self.programs(f"{family}-save"):
                status, out, _err = self.node.run([program])
                if status == 0:
                    break
            else:
                continue
            kept = firewall_without_k3s(out)
            if kept == out:
                continue
            self.removed.append(f"{family} rules")
            if not self.check:
                restore = program.removesuffix("-save") + "-restore"
                status, answer, err = self.node.run([restore], stdin=kept)
                if status != 0:
                    raise K3sError(f"`{restore}` failed with exit {status}: {(err or answer).strip()}")

    def wipe(self, former: dict[str, str]) -> None:
        """Folders of K3s that were not there before. One with somebody's disk below it is left, with its reason."""
        for name in (*MADE_BY_K3S, *RUN_FOLDERS, *FILES_BY_K3S):
            path = self.node.path(name)
            if not os.path.lexists(path):
                continue
            mounted = [point for point, _s, _k in self.node.mounts() if f"{point}/".startswith(f"{name}/")]
            if former.get(name, "absent") != "absent":
                self.kept.append(f"{name}: it was there before")
            elif mounted and not self.check:
                raise K3sError(
                    f"found {', '.join(mounted)} mounted; required: nothing mounted at or below {name}, which would be "
                    f"emptied; fix: unmount it, then run the reset again"
                )
            else:
                self.removed.append(name)
                if not self.check:
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path)
                    else:
                        path.unlink()
        if not self.check:
            # Empty by now; they would stay until the next boot.
            self.node.run(["systemctl", "stop", "kubepods.slice"])


def firewall_without_k3s(rules: str) -> str:
    """``iptables-save`` output without the lines of Kubernetes, CNI and flannel (as K3s's own clean-up does it)."""
    return "".join(
        line
        for line in rules.splitlines(keepends=True)
        if not ("KUBE-" in line or "CNI-" in line or "flannel" in line.lower())
    )


def former_kinds(manifest: dict[str, Any] | None) -> dict[str, str]:
    """What the role's manifest says was at each path of ``MADE_BY_K3S`` before it came."""
    directories = (manifest or {}).get("directories", {})
    return {name: str(directories[name]["former"]["kind"]) for name in MADE_BY_K3S if name in directories}
