# Apache-2.0 (see LICENSE)
"""The serving image: what an archive holds, what containerd of a node has, and whether both are what was asked for.

An image is known by its digest alone. Pods name it NAME@DIGEST and never pull, so exactly that reference must be on
each node; a tag would be somebody's promise. Standard library only.

Measured with containerd 2.4: ``import --base-name NAME --digests`` makes NAME@DIGEST of what the archive's own index
names, unless that has a tag, which then is the only reference to it. No command makes one of an image inside an index.
"""

from __future__ import annotations

import json
import os
import re
import tarfile
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.k3s_node import BINARY, DATA_DIR, Run, run_command
from ansible_collections.goodput.spark.plugins.module_utils.model_manifest import write_atomic
from ansible_collections.goodput.spark.plugins.module_utils.serving import Check, row

GIB = 2**30
#: Names of the images that came here from an archive, so that a reset finds them whatever the release is by then.
NAMES = "/var/lib/goodput/runtime_image_names.json"
DIGEST = re.compile(r"sha256:[0-9a-f]{64}\Z")
NAME = re.compile(r"[a-z0-9][a-z0-9.-]*\.[a-z0-9.-]+(/[a-z0-9][a-z0-9._-]*)+\Z")
INDEX = "index.json"
#: BuildKit's mark of a manifest that says how an image was made (its docs/attestations/attestation-storage.md).
ATTESTATION = ("vnd.docker.reference.type", "attestation-manifest")
MODEL = "runtime-image"
# A look, then 23 GB that are read, hashed and unpacked.
LOOK_SECONDS, IMPORT_SECONDS = 120.0, 3600.0


class ImageError(ValueError):
    """A refusal; the text names what was found, what is required, and the remedy."""

    def __init__(self, found: str, required: str, fix: str) -> None:
        super().__init__(f"found {found}; required: {required}; fix: {fix}")


def checked(name: str, digest: str) -> str:
    """NAME@DIGEST.

    :raises ImageError: no digest, or a name without a registry's, which containerd would take for docker.io's.
    """
    if not NAME.match(name):
        raise ImageError(f"runtime_image_name {name!r}", "HOST/NAME without a tag, HOST with a dot", "correct the name")
    if not DIGEST.match(digest):
        raise ImageError(
            f"runtime_image_digest {digest!r}",
            "sha256: and 64 hexadecimal digits; a tag such as latest is no identity",
            "set goodput_kube_choices: {digests: {runtime: sha256:…}}, the digest of your image archive",
        )
    return f"{name}@{digest}"


# --------------------------------------------------------------------------------------------------------------------
# An archive
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Archive:
    """An OCI archive: of each digest that an import makes a reference of, the platforms (``linux/arm64``); of each
    image inside an index, that index; the size of the file."""

    path: str
    size_bytes: int
    images: Mapping[str, tuple[str, ...]]
    inside: Mapping[str, str]

    def as_model(self, digest: str, sha256: str) -> dict[str, Any]:
        """The manifest by which model_place, model_share and model_fetch copy it."""
        file = {"path": Path(self.path).name, "size_bytes": self.size_bytes, "sha256": sha256}
        return {"format": 1, "name": MODEL, "revision": digest, "files": [file]}


def read_archive(path: str) -> Archive:
    """What an OCI archive holds. Only small files in it are read; layers are passed over.

    :raises ImageError: no such file, not a plain tar, cut off, or without OCI's index.
    """
    make = "write one: `docker save -o image.tar NAME`, or `buildah push NAME oci-archive:image.tar`"
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise ImageError(f"no {path} ({error.strerror})", "an image archive", make) from error
    try:
        # Uncompressed only ("r:"): a compressed one could not be read in places, and layers are compressed anyway.
        with tarfile.open(path, "r:") as tar:
            members = {member.name.removeprefix("./"): member for member in tar}
            if INDEX not in members:
                raise ImageError(f"no {INDEX} in {path}", "an OCI archive", make)
            end = max(member.offset_data + member.size for member in members.values())
            if end > size:
                raise ImageError(f"{path} with {size} bytes, its files end at {end}", "the whole archive", "copy again")

            def blob(name: str) -> Any:
                stream = tar.extractfile(members[name])
                assert stream is not None
                return json.loads(stream.read())

            images: dict[str, tuple[str, ...]] = {}
            inside: dict[str, str] = {}
            for descriptor in blob(INDEX)["manifests"]:
                digest, found = str(descriptor["digest"]), dict(_images(blob, descriptor, members))
                platforms = tuple(dict.fromkeys(found.values()))
                if platforms:
                    images[digest] = platforms
                inside |= {one: digest for one in found if one != digest}
    except tarfile.TarError as error:
        raise ImageError(f"{path} ({error})", "a whole, uncompressed tar", make) from error
    except (KeyError, TypeError, ValueError) as error:
        if isinstance(error, ImageError):
            raise
        raise ImageError(f"{path} with a broken index ({error!r})", "an OCI archive", make) from error
    return Archive(path, size, images, inside)


def _file(descriptor: Mapping[str, Any]) -> str:
    return f"blobs/sha256/{str(descriptor['digest']).removeprefix('sha256:')}"


def _images(blob: Any, descriptor: Mapping[str, Any], members: Container[str]) -> Iterator[tuple[str, str]]:
    """(digest, platform) of an image, or of those inside an index."""
    key, value = ATTESTATION
    if (descriptor.get("annotations") or {}).get(key) == value:
        return
    content = blob(_file(descriptor))
    for one in content.get("manifests", []):
        # `docker save` leaves out what was not pulled of an index, which an import does not ask for either.
        if _file(one) in members:
            yield from _images(blob, one, members)
    if "config" in content:
        config = blob(_file(content["config"]))
        # An attestation without the mark has a configuration, too, of no platform.
        if config.get("architecture", "unknown") != "unknown":
            yield str(descriptor["digest"]), f"{config.get('os', 'linux')}/{config['architecture']}"


def archive_problem(archive: Archive, digest: str, platform: str) -> str:
    """Why this archive can not bring the image; empty if it can."""
    platforms = archive.images.get(digest)
    held = ", ".join(f"{found} ({'/'.join(names)})" for found, names in archive.images.items()) or "no image"
    if digest in archive.inside and platforms is None:
        top = archive.inside[digest]
        return (
            f"found {digest} in {archive.path} only inside the index {top}; required: a digest that the import makes a "
            f"reference of; fix: name {top} in goodput_kube_choices.digests.runtime"
        )
    if platforms is None:
        fix = "name the right archive in runtime_image_archive, or its digest in goodput_kube_choices.digests.runtime"
        return f"found {archive.path} with {held}; required: {digest}; fix: {fix}"
    if platform not in platforms:
        return (
            f"found {archive.path} for {', '.join(platforms)}; required: {platform}; "
            f"fix: build it for the nodes (--platform {platform})"
        )
    return ""


# --------------------------------------------------------------------------------------------------------------------
# Room
# --------------------------------------------------------------------------------------------------------------------


def space_problem(
    node: str, free_bytes: int, total_bytes: int, archive_bytes: int, unpacked_bytes: int, gc_percent: int
) -> str:
    """Why the import would not fit; empty if it does.

    The archive lies there while it is read, containerd keeps its layers, and unpacks them. Afterwards the disk must not
    be so full that the kubelet deletes images which no pod uses at that moment, and this one can not be pulled again.
    """
    needed = 2 * archive_bytes + unpacked_bytes
    numbers = (
        f"{needed / GIB:.1f} GiB (archive {archive_bytes / GIB:.1f}, its layers {archive_bytes / GIB:.1f}, "
        f"unpacked {unpacked_bytes / GIB:.1f})"
    )
    fix = "make room, or correct runtime_image_unpacked_gib"
    if free_bytes < needed:
        return f"{node}: found {free_bytes / GIB:.1f} GiB free at {DATA_DIR}; required: {numbers}; fix: {fix}"
    used_after = total_bytes - free_bytes + archive_bytes + unpacked_bytes
    if used_after * 100 >= gc_percent * total_bytes:
        return (
            f"{node}: found {free_bytes / GIB:.1f} of {total_bytes / GIB:.1f} GiB free, "
            f"{100 * used_after // total_bytes} % in use after the import; required: less than {gc_percent} %, where "
            f"the kubelet deletes unused images; fix: {fix}, or raise k3s_image_gc_high_percent"
        )
    return ""


# --------------------------------------------------------------------------------------------------------------------
# A node
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Image:
    ref: str
    digest: str
    platforms: tuple[str, ...]


def named(image: Image) -> str:
    """The name in a reference, without tag and digest."""
    return re.split("[:@]", image.ref)[0]


def parse_images(text: str) -> list[Image]:
    """The table of ``ctr images list``: REF TYPE DIGEST SIZE(number, unit) PLATFORMS LABELS."""
    found = []
    for line in text.splitlines():
        words = line.split()
        if len(words) > 5 and DIGEST.match(words[2]):
            found.append(Image(words[0], words[2], tuple(words[5].split(","))))
    return found


@dataclass
class Containerd:
    """K3s's own containerd, through ``k3s ctr``, whose namespace is that of Kubernetes."""

    run: Run = run_command
    program: Sequence[str] = (BINARY, "ctr")

    def __call__(self, *words: str, timeout_seconds: float = LOOK_SECONDS) -> str:
        status, out, err = self.run([*self.program, *words], timeout_seconds=timeout_seconds)
        if status != 0:
            last = " ".join((err or out).strip().splitlines()[-3:])
            raise ImageError(f"`k3s ctr {' '.join(words)}` ended with {status}: {last}", "exit 0", "journalctl -u k3s*")
        return out

    def images(self) -> list[Image]:
        return parse_images(self("images", "list"))

    def bring(self, path: str, name: str, digest: str) -> None:
        """Import an archive, so that NAME@DIGEST is there.

        :raises ImageError: the archive turned out to hold another image.
        """
        reference = checked(name, digest)
        self("images", "import", "--base-name", name, "--digests", path, timeout_seconds=IMPORT_SECONDS)
        there = self.images()
        if any(image.ref == reference for image in there):
            return
        same = next((image.ref for image in there if image.digest == digest), "")
        if not same:
            raise ImageError(f"no image {digest} after the import of {path}", "it", "compare the digest of the archive")
        self("images", "tag", "--force", same, reference)

    def remove(self, name: str, keep: str = "", check: bool = False) -> list[str]:
        """Take every reference of this name away, but not those of the digest ``keep``; what went, or would.

        The kubelet's side of containerd keeps a reference of its own (``sha256:`` and the configuration's digest). It
        would hold the layers; it goes where no other name holds the same image.
        """
        there = self.images()
        mine = [i for i in there if named(i) == name and not (keep and i.digest == keep)]
        ids = [i for i in there if DIGEST.match(i.ref)]
        others = {i.digest for i in there if i not in mine and i not in ids}
        free = {i.digest for i in mine} - others
        refs = [i.ref for i in mine] + [i.ref for i in ids if i.digest in free]
        if refs and not check:
            self("images", "remove", "--sync", *refs, timeout_seconds=IMPORT_SECONDS)
        return refs


def brought(path: Path) -> list[str]:
    """Names of the images that were imported here."""
    return [str(name) for name in json.loads(path.read_text())] if path.exists() else []


def note(path: Path, name: str) -> None:
    """Add a name to those of :func:`brought`."""
    names = brought(path)
    if name not in names:
        path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        write_atomic(str(path), json.dumps([*names, name]) + "\n")


def image_checks(node: str, images: Sequence[Image], name: str, digest: str, platform: str) -> list[Check]:
    """Rows for one node: the reference that pods name is there, is this digest, and fits the machine."""
    reference = f"{name}@{digest}"
    mine = [image for image in images if image.ref == reference]
    others = sorted({image.digest for image in images if named(image) == name})
    found = mine[0].digest if mine else ", ".join(others) or "none"
    again = "name its archive in runtime_image_archive and run playbooks/runtime_image.yml"
    rows = [row(f"{node} image {name}", found, digest, again, bool(mine) and mine[0].digest == digest)]
    if mine:
        fits = platform in mine[0].platforms
        rows.append(row(f"{node} image's platform", ", ".join(mine[0].platforms), platform, again, fits))
    return rows


def present(images: Sequence[Image], name: str, digest: str) -> bool:
    return any(image.ref == f"{name}@{digest}" and image.digest == digest for image in images)


# --------------------------------------------------------------------------------------------------------------------
# What is in it, asked in a pod
# --------------------------------------------------------------------------------------------------------------------

#: Written by the probe's program, one fact a line; "end" last. Dynamo's CUDA image has no UCX but that in NIXL's wheel,
#: without ucx_info; others have it in /usr/local/ucx (ai-dynamo/dynamo container/templates/vllm_runtime.Dockerfile).
PROBE = r"""
import importlib, importlib.metadata, shutil, subprocess
for name in ("lmcache.cuda_ops", "nixl"):
    try:
        importlib.import_module(name); print("import", name, "ok")
    except BaseException as error:
        print("import", name, type(error).__name__, " ".join(str(error).split())[:300])
for name in ("ai-dynamo", "lmcache"):
    try:
        print("version", name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        print("version", name, "none")
said, program = "", shutil.which("ucx_info") or shutil.which("ucx_info", path="/usr/local/ucx/bin")
try:
    if program:
        said = subprocess.run([program, "-d"], capture_output=True, text=True, timeout=60).stdout
    else:
        print("no ucx_info")
except (OSError, subprocess.SubprocessError) as error:
    print("ucx_info", " ".join(str(error).split())[:300])
for line in said.splitlines():
    if "Device:" in line:
        print("device", line.split("Device:")[1].split()[0])
print("end")
"""
NOT_ASKED = "no ucx_info in the image, not asked"
#: What is and is not known where UCX was not asked.
UNPROVEN = (
    "that the rails' devices open in a pod is looked at next; that NIXL's own UCX uses them is not proven before both "
    "rails' port_xmit_data grow while a peer is read (docs/kubernetes.md, The image)"
)


def same_release(found: str, wanted: str) -> bool:
    """A wheel may be a post release or carry a build: 1.3.0.post1 and 1.5.1+cu13 are 1.3.0 and 1.5.1."""
    return re.fullmatch(rf"{re.escape(wanted)}(\.post\d+)?(\+.*)?", found) is not None


def probe_checks(node: str, said: str, versions: Mapping[str, str], devices: Sequence[str]) -> list[Check]:
    """Rows from what PROBE printed in a pod of one node.

    :param versions: by package (``ai-dynamo``, ``lmcache``).
    :param devices: RDMA devices that UCX must list.
    """
    imports = dict(re.findall(r"^import (\S+) (.+)$", said, re.M))
    found = dict(re.findall(r"^version (\S+) (\S+)$", said, re.M))
    # A port follows a colon.
    listed = {device.partition(":")[0] for device in re.findall(r"^device (\S+)$", said, re.M)}
    other = "use an image with it: docs/kubernetes.md, The image"
    rows = [
        row(f"{node} import {name}", imports.get(name, "not said"), "ok", other)
        for name in ("lmcache.cuda_ops", "nixl")
    ]
    for name, wanted in versions.items():
        have = found.get(name, "not said")
        rows.append(row(f"{node} {name}", have, wanted, f"{other}; or another release set", same_release(have, wanted)))
    missing = [device for device in devices if device not in listed]
    asked = not re.search(r"^no ucx_info$", said, re.M)
    if devices:
        rows.append(
            row(
                f"{node} RDMA devices of UCX",
                (", ".join(sorted(listed)) or "none") if asked else NOT_ASKED,
                ", ".join(devices),
                "UCX without RDMA takes TCP in silence: use an image whose UCX has it; check the rails (role rdma)",
                not (asked and missing),
            )
        )
    return rows


def not_asked(checks: Sequence[Check]) -> list[str]:
    """What a person is told of rows that are well because nobody could be asked."""
    return [f"{check['check']}: {check['found']}; {UNPROVEN}" for check in checks if check["found"] == NOT_ASKED]
