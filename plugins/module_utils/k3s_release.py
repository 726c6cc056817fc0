# Apache-2.0 (see LICENSE)
"""K3s releases: versions that may follow each other, and files that are taken only with their sha256.

``fill`` runs on the controller (standard library only): one cache that the internet and an air-gap folder both fill,
so that what comes after it is the same code for both.

Sources: asset names and ``sha256sum-ARCH.txt`` from k3s-io/k3s install.sh@0136cf2; the kubelet's drop-in folder from
1.32 on (k3s-io/docs cli/server); no minor version may be left out (k3s-io/docs upgrades/manual); a kubelet is never
newer than the API server and at most three minor versions older (Kubernetes' version skew policy).
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import struct
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FLOOR = "v1.32.0+k3s1"
AGENT_LAG_MINORS = 3
SHA256 = re.compile(r"[0-9a-f]{64}")
ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
DOWNLOAD_TIMEOUT_SECONDS = 60

# (url, target): write the file there; OSError when it can not be had.
Fetch = Callable[[str, Path], None]


class K3sError(ValueError):
    """A refusal; the text names the value, the rule and the remedy."""


@dataclass(frozen=True)
class Arch:
    """Names of one machine type: Kubernetes' word, the asset of the program, the ELF machine number."""

    name: str
    binary: str
    elf_machine: int


# By `uname -m`.
ARCHES = {"aarch64": Arch("arm64", "k3s-arm64", 183), "x86_64": Arch("amd64", "k3s", 62)}


def arch_of(machine: str) -> Arch:
    if machine not in ARCHES:
        raise K3sError(f"found machine type {machine}; required: one of {', '.join(ARCHES)}; fix: use another node")
    return ARCHES[machine]


# --------------------------------------------------------------------------------------------------------------------
# Versions
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, order=True)
class Version:
    """``v1.36.4+k3s1``; ``build`` is what follows the plus sign."""

    major: int
    minor: int
    patch: int
    build: str

    def __str__(self) -> str:
        return f"v{self.major}.{self.minor}.{self.patch}+{self.build}"


def parse(text: str) -> Version:
    """:raises K3sError: not a full version, for example a channel or a version without its build."""
    match = re.fullmatch(r"v(\d+)\.(\d+)\.(\d+)\+([0-9A-Za-z.-]+)", str(text))
    if not match:
        raise K3sError(
            f"found k3s_version {text!r}; required: a full version such as {FLOOR}; fix: take one from K3s's releases"
        )
    return Version(int(match[1]), int(match[2]), int(match[3]), match[4])


def version_of_output(text: str) -> str:
    """The version in the first line of ``k3s --version``; empty if there is none."""
    match = re.search(r"^k3s version (v\d+\.\d+\.\d+\+\S+)", text, re.M)
    return match[1] if match else ""


def same_minor_steps(old: Version, new: Version) -> int:
    """Minor versions from old to new; a new major version counts as many."""
    return (new.major - old.major) * 1000 + new.minor - old.minor


def floor_problem(wanted: Version) -> str:
    floor = parse(FLOOR)
    if wanted >= floor:
        return ""
    return f"{floor.major}.{floor.minor} or newer: older ones have no folder for the kubelet's drop-ins"


def step_problem(installed: Version, wanted: Version) -> str:
    """Why ``wanted`` may not follow ``installed`` on one node; empty if it may."""
    if wanted < installed:
        return f"{installed} or newer: K3s does not go back to an older version with the data of a newer one"
    if same_minor_steps(installed, wanted) > 1:
        return f"at most {installed.major}.{installed.minor + 1} after {installed}: no minor version may be left out"
    return ""


def skew_problem(agent: Version, server: Version) -> str:
    """Why an agent of this version may not join this server; empty if it may. Patch and build do not matter."""
    steps = same_minor_steps(agent, server)
    if steps < 0:
        return f"{server.major}.{server.minor} at most: an agent is never newer than its server ({server})"
    if steps > AGENT_LAG_MINORS:
        oldest = server.minor - AGENT_LAG_MINORS
        return f"{server.major}.{oldest} or newer: at most {AGENT_LAG_MINORS} minor versions behind {server}"
    return ""


# --------------------------------------------------------------------------------------------------------------------
# Files
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Asset:
    """One file of a release. ``kind`` is binary or images."""

    kind: str
    arch: str
    name: str
    sha256: str
    url: str


def assets(version: str, machines: Sequence[str], checksums: Mapping[str, Any], base_url: str) -> list[Asset]:
    """What the nodes' machine types need, each with its checksum.

    :param checksums: ``{"arm64": {"binary": sha256, "images": sha256}}``.
    :raises K3sError: an unknown machine type, or a checksum that nobody gave.
    """
    parse(version)
    found = []
    for machine in sorted(set(machines)):
        arch = arch_of(machine)
        names = {"binary": arch.binary, "images": f"k3s-airgap-images-{arch.name}.tar.zst"}
        for kind, name in names.items():
            digest = str((checksums.get(arch.name) or {}).get(kind) or "").lower()
            if not SHA256.fullmatch(digest):
                raise K3sError(
                    f"found sha256 {digest!r} for {name} of {version}; required: 64 hexadecimal digits; fix: set "
                    f"k3s_checksums.{arch.name}.{kind} from the release's sha256sum-{arch.name}.txt"
                )
            url = f"{base_url.rstrip('/')}/{version.replace('+', '%2B')}/{name}"
            found.append(Asset(kind, arch.name, name, digest, url))
    return found


def sha256_of(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def content_problem(path: Path, asset: Asset) -> str:
    """Why a file with the right checksum still can not be what its name says; empty if it can."""
    with path.open("rb") as stream:
        head = stream.read(20)
    if asset.kind == "images":
        return "" if head.startswith(ZSTD_MAGIC) else "a zstd archive (the file does not begin like one)"
    machine = struct.unpack("<H", head[18:20])[0] if len(head) == 20 and head.startswith(b"\x7fELF") else 0
    wanted = next(arch.elf_machine for arch in ARCHES.values() if arch.name == asset.arch)
    if machine == wanted:
        return ""
    other = next((arch.name for arch in ARCHES.values() if arch.elf_machine == machine), "")
    return f"a program for {asset.arch} (it is one for {other})" if other else f"a program for {asset.arch}"


def mismatch(path: Path, found: str, asset: Asset, checksums: Mapping[str, Any]) -> str:
    """The refusal of a file with another checksum; says so if it is the same file of another architecture."""
    other = next((arch for arch, sums in checksums.items() if found in dict(sums or {}).values()), "")
    hint = f" (the file for {other})" if other else ""
    return (
        f"found {path} with sha256 {found}{hint} and {path.stat().st_size} bytes; required: sha256 {asset.sha256}; "
        f"fix: put the {asset.name} of this release there again, a copy that was broken off is shorter"
    )


def download(url: str, target: Path) -> None:
    """One GET to a file; OSError with the address when it can not be had."""
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_SECONDS) as answer, target.open("wb") as stream:
            shutil.copyfileobj(answer, stream, 1 << 20)
    except urllib.error.HTTPError as error:
        raise OSError(f"{url}: HTTP {error.code}") from error
    except urllib.error.URLError as error:
        raise OSError(f"{url}: {error.reason}") from error


def fill(
    cache: Path,
    version: str,
    asset: Asset,
    checksums: Mapping[str, Any],
    folder: str = "",
    offline: bool = False,
    check: bool = False,
    fetch: Fetch = download,
) -> tuple[Path, str]:
    """Have one file in ``cache/VERSION/NAME``; returns its path and where it came from: cache, folder or download.

    A file appears under its name only whole and with the right checksum, so a transfer that breaks off leaves nothing
    that a later run would take. In check mode nothing is written.

    :raises K3sError: a wrong checksum, a file for another machine, or nowhere to get it from.
    """
    path = cache / version / asset.name
    if path.is_file() and sha256_of(path) == asset.sha256:
        problem = content_problem(path, asset)
        if problem:
            raise K3sError(f"found {path}; required: {problem}; fix: correct k3s_checksums.{asset.arch}.{asset.kind}")
        return path, "cache"
    source = Path(folder) / asset.name if folder else None
    if source is not None:
        if not source.is_file():
            raise K3sError(
                f"found no {source}; required: {asset.name} of {version}; fix: copy it there from the release, "
                f"or leave k3s_airgap_folder empty to download it"
            )
        found = sha256_of(source)
        if found != asset.sha256:
            raise K3sError(mismatch(source, found, asset, checksums))
    elif offline:
        raise K3sError(
            f"found no {path}, and GOODPUT_OFFLINE is set; required: {asset.name} of {version}; fix: name a folder "
            f"that has it in k3s_airgap_folder"
        )
    if check:
        return path, "folder" if source else "download"
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.part")
    try:
        if source is not None:
            shutil.copyfile(source, part)
        else:
            try:
                fetch(asset.url, part)
            except OSError as error:
                raise K3sError(
                    f"found no answer: {error}; required: {asset.name} of {version}; fix: give this controller the "
                    f"internet, or name a folder that has the file in k3s_airgap_folder"
                ) from error
        found = sha256_of(part)
        if found != asset.sha256:
            raise K3sError(mismatch(part, found, asset, checksums))
        problem = content_problem(part, asset)
        if problem:
            raise K3sError(
                f"found {source or asset.url}; required: {problem}; fix: correct "
                f"k3s_checksums.{asset.arch}.{asset.kind} and the file"
            )
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path, "folder" if source else "download"
