"""A real Kubernetes API server on loopback, with etcd beside it and no cluster behind it: it proves that objects are
accepted, not that they run.

Places come from the environment: ``GOODPUT_KUBE_DATA`` is a folder with ``crds/<chart>/*.yaml.xz``, ``schemas/*.json``,
``values/*.yaml`` and, for some architecture, ``kube-apiserver-VERSION-linux-ARCH.xz`` with the sha256 of what is in it.
``KUBEBUILDER_ASSETS`` is a folder with ``kube-apiserver`` and ``etcd``, as in Kubernetes' own envtest. Debian's etcd is
taken out of its package without installing it. What is not to be had is a ``Missing`` with the reason.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import platform
import secrets
import shutil
import socket
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(os.environ.get("GOODPUT_CACHE", ROOT / ".cache")).resolve() / "conformity/kube"
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
#: Where no binary of this architecture is given: Kubernetes' own release, checked against the sha256 it publishes.
VERSION = "1.37.2"
RELEASE = "https://dl.k8s.io/release/v{version}/bin/linux/{arch}/kube-apiserver"
READY_SECONDS = 120
# A proxy of the environment must never see these requests.
NO_PROXY = urllib.request.ProxyHandler({})


class Missing(Exception):
    """Something is not to be had here; the text says what and how it would be."""


def data() -> Path:
    """The folder of CRDs, schemas and values."""
    given = os.environ.get("GOODPUT_KUBE_DATA", "")
    folder = Path(given)
    if not given or not (folder / "crds").is_dir():
        raise Missing(f"GOODPUT_KUBE_DATA is {given or 'not set'}; required a folder with crds/, schemas/ and values/")
    return folder


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _asset(name: str) -> Path | None:
    folder = os.environ.get("KUBEBUILDER_ASSETS", "")
    path = Path(folder) / name
    if folder and not path.is_file():
        raise Missing(f"KUBEBUILDER_ASSETS is {folder}, which has no {name}")
    return path if folder else None


def _keep(target: Path, wanted: str, write: Callable[[Path], object]) -> Path:
    """A checked file in the cache; one that is there with this sha256 is not made again."""
    if target.is_file() and _sha256(target) == wanted:
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    write(partial)
    found = _sha256(partial)
    if found != wanted:
        partial.unlink()
        raise AssertionError(f"{target.name}: found sha256 {found}, required {wanted}")
    partial.chmod(0o755)
    partial.rename(target)
    return target


def kube_apiserver(folder: Path) -> Path:
    """KUBEBUILDER_ASSETS, else the data folder's, else Kubernetes' release."""
    given = _asset("kube-apiserver")
    if given:
        return given
    for packed in sorted(folder.glob(f"kube-apiserver-*-linux-{ARCH}.xz"), reverse=True):
        wanted = packed.with_suffix(".sha256").read_text().split()[0]

        def unpack(partial: Path, source: Path = packed) -> None:
            with lzma.open(source) as stream, partial.open("wb") as out:
                shutil.copyfileobj(stream, out, 2**20)

        return _keep(HOME / packed.stem, wanted, unpack)
    url = RELEASE.format(version=VERSION, arch=ARCH)
    try:
        with urllib.request.urlopen(f"{url}.sha256", timeout=20) as answer:
            wanted = answer.read().decode().split()[0]
        target = HOME / f"kube-apiserver-{VERSION}-linux-{ARCH}"
        return _keep(target, wanted, lambda partial: urllib.request.urlretrieve(url, partial))
    except OSError as error:
        raise Missing(
            f"no kube-apiserver for linux/{ARCH}: none in {folder}, and {url} does not answer ({error}); set"
            " KUBEBUILDER_ASSETS to a folder with kube-apiserver and etcd"
        ) from None


def etcd() -> Path:
    """KUBEBUILDER_ASSETS, else the one on the PATH, else out of Debian's package, which apt has checked."""
    given = _asset("etcd") or shutil.which("etcd")
    if given:
        return Path(given)
    target = HOME / "etcd-server/usr/bin/etcd"
    if target.is_file():
        return target
    if os.environ.get("GOODPUT_OFFLINE", "") not in ("", "0"):
        raise Missing(f"no etcd: GOODPUT_OFFLINE is set and {target} is not there; install etcd-server")
    work = HOME / "etcd-package"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    done = None
    for before in ((), ("apt-get", "-qq", "update")):
        if before and subprocess.run(before, capture_output=True).returncode:
            break
        done = subprocess.run(
            ["apt-get", "-qq", "download", "etcd-server"], cwd=work, capture_output=True, text=True, check=False
        )
        if not done.returncode:
            break
    packages = list(work.glob("*.deb"))
    if not packages:
        said = done.stderr.strip().splitlines()[-1] if done and done.stderr.strip() else "no answer"
        raise Missing(f"no etcd: `apt-get download etcd-server` says {said!r}; install etcd-server")
    subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(HOME / "etcd-server")], check=True)
    return target


def crds(folder: Path, version: str) -> list[dict[str, Any]]:
    """Dynamo's CRDs as a server without its operator takes them: v1beta1 alone, and no conversion webhook."""
    found = []
    for path in sorted((folder / f"crds/dynamo-{version}").glob("*.yaml.xz")):
        item = yaml.safe_load(lzma.decompress(path.read_bytes()))
        item["spec"].pop("conversion", None)
        versions = item["spec"]["versions"]
        newest = [entry for entry in versions if entry["name"] == "v1beta1"] or versions
        item["spec"]["versions"] = [newest[0] | {"served": True, "storage": True}]
        found.append(item)
    assert found, f"{folder}/crds/dynamo-{version} is empty"
    return found


# What we apply, and where the API has it.
PATHS = {
    "Namespace": "/api/v1/namespaces",
    "ConfigMap": "/api/v1/namespaces/{namespace}/configmaps",
    "Service": "/api/v1/namespaces/{namespace}/services",
    "Deployment": "/apis/apps/v1/namespaces/{namespace}/deployments",
    "DaemonSet": "/apis/apps/v1/namespaces/{namespace}/daemonsets",
    "DynamoGraphDeployment": "/apis/nvidia.com/v1beta1/namespaces/{namespace}/dynamographdeployments",
    "CustomResourceDefinition": "/apis/apiextensions.k8s.io/v1/customresourcedefinitions",
}


@dataclass(frozen=True)
class Answer:
    status: int
    body: dict[str, Any]

    @property
    def message(self) -> str:
        return str(self.body.get("message", self.body))


def path_of(item: Mapping[str, Any]) -> str:
    about = item["metadata"]
    return PATHS[item["kind"]].format(namespace=about.get("namespace", "")) + f"/{about['name']}"


class KubeApi:
    """etcd and kube-apiserver on loopback; a context manager that ends them, etcd last (else it takes a minute)."""

    def __init__(self, folder: Path, work: Path) -> None:
        self.folder, self.work = folder, work
        self.binaries = etcd(), kube_apiserver(folder)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.token = secrets.token_hex(16)
        self.seconds_to_ready = 0.0
        self.crds = ""

    def __enter__(self) -> KubeApi:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _spawn(self, name: str, *command: str) -> None:
        with (self.work / f"{name}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen(
                    [*command], stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=self.work
                )
            )

    def _start(self) -> None:
        began = time.monotonic()
        client, peer, self.port = _free_ports(3)
        etcd_url, peer_url = f"http://127.0.0.1:{client}", f"http://127.0.0.1:{peer}"
        self._spawn(
            "etcd",
            str(self.binaries[0]),
            f"--data-dir={self.work / 'etcd'}",
            f"--listen-client-urls={etcd_url}",
            f"--advertise-client-urls={etcd_url}",
            f"--listen-peer-urls={peer_url}",
            f"--initial-advertise-peer-urls={peer_url}",
            f"--initial-cluster=default={peer_url}",
        )
        key = rsa.generate_private_key(public_exponent=65537, key_size=2048)
        tokens, account = self.work / "tokens.csv", self.work / "account.pem"
        for path in (tokens, account):
            path.touch(mode=0o600)
        tokens.write_text(f"{self.token},test,test,system:masters\n")
        account.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        self._spawn(
            "kube-apiserver",
            str(self.binaries[1]),
            f"--etcd-servers={etcd_url}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.work / 'certificates'}",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={account}",
            f"--service-account-signing-key-file={account}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-cluster-ip-range=10.43.0.0/16",
            "--disable-admission-plugins=ServiceAccount",
            # As K3s has it: device plugins are privileged.
            "--allow-privileged=true",
            "--endpoint-reconciler-type=none",
        )
        certificate = self.work / "certificates/apiserver.crt"
        while time.monotonic() < began + READY_SECONDS:
            for name, process in zip(("etcd", "kube-apiserver"), self.processes, strict=True):
                if process.poll() is not None:
                    log = (self.work / f"{name}.log").read_text(errors="replace")
                    raise AssertionError(f"{name} ended with {process.returncode}:\n{log[-2000:]}")
            if certificate.exists():
                try:
                    self.opener = urllib.request.build_opener(
                        NO_PROXY, urllib.request.HTTPSHandler(context=_context(certificate))
                    )
                    if self.ask("GET", "/readyz").status == 200:
                        break
                except OSError:
                    pass
            time.sleep(0.2)
        else:
            raise AssertionError(f"kube-apiserver is not ready after {READY_SECONDS} s: {self.work}")
        self.seconds_to_ready = time.monotonic() - began

    def ask(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Answer:
        request = urllib.request.Request(
            f"https://127.0.0.1:{self.port}{path}",
            method=method,
            data=None if body is None else json.dumps(body).encode(),
            headers={"Authorization": f"Bearer {self.token}", "Content-Type": content_type},
        )
        try:
            with self.opener.open(request, timeout=30) as response:
                status, text = response.status, response.read()
        except urllib.error.HTTPError as error:
            status, text = error.code, error.read()
        try:
            found = json.loads(text)
        except ValueError:
            found = {"message": text.decode(errors="replace")}
        return Answer(status, found if isinstance(found, dict) else {"message": str(found)})

    def apply(self, item: Mapping[str, Any]) -> Answer:
        """Server-side apply with strict validation: an unknown or doubled field is an error."""
        query = "?fieldManager=goodput&fieldValidation=Strict&force=true"
        return self.ask("PATCH", path_of(item) + query, item, "application/apply-patch+yaml")

    def delete(self, item: Mapping[str, Any]) -> Answer:
        return self.ask("DELETE", path_of(item))

    def install_crds(self, version: str) -> None:
        """These CRDs and no others of the same names; returns when the server answers for them."""
        if self.crds == version:
            return
        items = crds(self.folder, version)
        for item in items:
            if self.delete(item).status == 200:
                self._until(lambda item=item: self.ask("GET", path_of(item)).status == 404)
        for item in items:
            answer = self.apply(item)
            assert answer.status in (200, 201), f"{item['metadata']['name']}: {answer.message}"
        for item in items:
            group, names = item["spec"]["group"], item["spec"]["names"]["plural"]
            served = item["spec"]["versions"][0]["name"]
            self._until(
                lambda path=f"/apis/{group}/{served}/{names}": self.ask("GET", path).status == 200,
            )
        self.crds = version

    @staticmethod
    def _until(condition: Callable[[], bool], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, "the server did not follow within 30 s"
            time.sleep(0.1)


def _context(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(entry.getsockname()[1]) for entry in sockets]
    for entry in sockets:
        entry.close()
    return ports
