"""Tiny OCI archives, as `docker save` and buildah write large ones."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import sys
import tarfile
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
INDEX = "application/vnd.oci.image.index.v1+json"


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    tar.addfile(info, io.BytesIO(data))


def _blob(tar: tarfile.TarFile, data: bytes, media_type: str) -> dict[str, Any]:
    digest = hashlib.sha256(data).hexdigest()
    _add(tar, f"blobs/sha256/{digest}", data)
    return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(data)}


def image(tar: tarfile.TarFile, architecture: str, text: bytes) -> dict[str, Any]:
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as inner:
        _add(inner, "hello.txt", text)
    packed = gzip.compress(layer.getvalue(), mtime=0)
    layers = [_blob(tar, packed, "application/vnd.oci.image.layer.v1.tar+gzip")]
    config = {
        "architecture": architecture,
        "os": "linux",
        "config": {},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer.getvalue()).hexdigest()}"]},
    }
    held = _blob(tar, json.dumps(config).encode(), "application/vnd.oci.image.config.v1+json")
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": held, "layers": layers}
    return _blob(tar, json.dumps(manifest).encode(), MANIFEST)


def attestations(tar: tarfile.TarFile) -> list[dict[str, Any]]:
    """What BuildKit puts into an index beside an image: of no platform, with a configuration or without."""
    empty = {"mediaType": "application/vnd.oci.empty.v1+json", "size": 2, "data": "e30="}
    empty["digest"] = f"sha256:{hashlib.sha256(b'{}').hexdigest()}"
    manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": empty, "layers": []}
    marked = _blob(tar, json.dumps(manifest).encode(), MANIFEST)
    marked["annotations"] = {"vnd.docker.reference.type": "attestation-manifest"}
    nothing = {"platform": {"architecture": "unknown", "os": "unknown"}}
    return [image(tar, "unknown", b"{}") | nothing, marked | nothing]


def write(
    path: Path, *architectures: str, tag: str = "", nested: bool = False, saved: bool = False, text: bytes = b"hi"
) -> list[str]:
    """The digests in the archive: of the index first if ``nested``, then of one image an architecture.

    :param saved: the index is as `docker save` writes it: with attestations, and one image that was not pulled.
    """
    with tarfile.open(path, "w") as tar:
        _add(tar, "oci-layout", b'{"imageLayoutVersion":"1.0.0"}')
        held = [image(tar, name, text) for name in architectures]
        digests = [item["digest"] for item in held]
        if saved:
            other = {"architecture": "s390x", "os": "linux"}
            absent = {"mediaType": MANIFEST, "digest": f"sha256:{'c' * 64}", "size": 500, "platform": other}
            held += [*attestations(tar), absent]
        if nested:
            held = [_blob(tar, json.dumps({"schemaVersion": 2, "mediaType": INDEX, "manifests": held}).encode(), INDEX)]
            digests.insert(0, held[0]["digest"])
        if tag:
            held[0]["annotations"] = {"org.opencontainers.image.ref.name": tag}
        _add(tar, "index.json", json.dumps({"schemaVersion": 2, "manifests": held}).encode())
    return digests


if __name__ == "__main__":
    # oci.py PATH NAME MIB: an archive of an image of this machine's architecture that nobody has; prints its digest.
    target, name, size_mib = sys.argv[1:]
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    print(write(Path(target), machine, tag=name, text=os.urandom(int(size_mib) * 2**20))[0])
