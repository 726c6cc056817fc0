"""Kubernetes' own control plane and containerd on loopback, out of the program that GOODPUT_K3S_AIRGAP names.

API server, controllers, kubectl and containerd are upstream's; there is no node, so nothing runs, and what pods would
say of themselves is written by the tests. Everything lives in one folder and ends with the test.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from kube_server import HOME, Missing

START_SECONDS = 120


def program() -> Path:
    """The unpacked program, compared with the sha256 beside it."""
    folder = os.environ.get("GOODPUT_K3S_AIRGAP", "")
    packed = Path(folder) / "k3s-amd64.zst"
    if not folder or not packed.is_file():
        raise Missing(f"GOODPUT_K3S_AIRGAP is {folder or 'not set'}; required a folder with k3s-amd64.zst")
    if platform.machine() != "x86_64" or not shutil.which("zstd"):
        raise Missing("the program is for x86_64 and packed with zstd; required both here")
    wanted = (Path(folder) / "k3s-amd64.sha256").read_text().split()[0]
    target = HOME / f"k3s-{wanted[:12]}"
    if not target.is_file():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        subprocess.run(["zstd", "-d", "-q", "-f", str(packed), "-o", str(partial)], check=True)
        with partial.open("rb") as stream:
            assert hashlib.file_digest(stream, "sha256").hexdigest() == wanted
        partial.chmod(0o755)
        partial.rename(target)
    return target


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


@contextmanager
def running(
    argv: list[str], log: Path, ready: Callable[[], bool], env: Mapping[str, str] | None = None
) -> Iterator[None]:
    with log.open("w") as stream:
        process = subprocess.Popen(argv, stdout=stream, stderr=stream, start_new_session=True, env=env)
    try:
        latest = time.monotonic() + START_SECONDS
        while not ready():
            if process.poll() is not None or time.monotonic() > latest:
                raise AssertionError(f"{argv[0]} did not start:\n{log.read_text()[-2000:]}")
            time.sleep(1)
        yield
    finally:
        end(process, 30)


def end(process: subprocess.Popen[Any], grace_seconds: float) -> None:
    """A process that leads a session, and what it leaves behind there."""
    process.send_signal(signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@contextmanager
def control_plane(folder: Path, *options: str) -> Iterator[Kubectl]:
    """kubectl of a control plane without nodes."""
    binary, kubeconfig = program(), folder / "kubeconfig.yaml"
    argv = [str(binary), "server", "--disable-agent", "--https-listen-port", str(free_port())]
    argv += ["--data-dir", str(folder / "data"), "--write-kubeconfig", str(kubeconfig), "--node-ip", "127.0.0.1"]
    argv += ["--token", "test", "--kube-apiserver-arg", "endpoint-reconciler-type=none", *options]
    kubectl = Kubectl(program=(str(binary), "kubectl", f"--kubeconfig={kubeconfig}"))

    def ready() -> bool:
        try:
            return kubeconfig.is_file() and "kube-system" in kubectl("get", "namespaces", "-o", "name")
        except K3sError:
            return False

    with running(argv, folder / "server.log", ready):
        yield kubectl


@contextmanager
def containerd(folder: Path) -> Iterator[tuple[str, ...]]:
    """The command line of ``ctr`` for a containerd without the kubelet's interface."""
    binary = program()
    # The program is what it is called.
    for name in ("containerd", "ctr"):
        (folder / name).symlink_to(binary)
    address = folder / "containerd.sock"
    cri = [f"io.containerd.{name}" for name in ("grpc.v1.cri", "cri.v1.runtime", "cri.v1.images")]
    (folder / "config.toml").write_text(
        f"version = 3\nroot = {json.dumps(str(folder / 'root'))}\nstate = {json.dumps(str(folder / 'state'))}\n"
        f"disabled_plugins = {json.dumps(cri)}\n[grpc]\n  address = {json.dumps(str(address))}\n"
    )
    argv = [str(folder / "containerd"), "--config", str(folder / "config.toml")]
    with running(argv, folder / "containerd.log", address.exists):
        yield (str(folder / "ctr"), "--address", str(address), "--namespace", "k8s.io")
