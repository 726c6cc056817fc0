#!/usr/bin/env python3
"""Build the guests' base image once and keep it under the hash of its recipe.

Prints one JSON object: {"directory", "changed", "seconds"}. The directory holds ``base.ext4`` (root filesystem without
a partition table), ``vmlinuz``, ``initrd.img`` and ``mirror/`` (an offline package archive with what roles install).
Standard library only.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
STANDINS = HERE.parent / "standins"
ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
SUITE = "bookworm"
SIZE = "6G"


def names(path: Path, arch: str) -> list[str]:
    """Package names of a list file, comments dropped, ARCH replaced."""
    text = "\n".join(line.split("#")[0] for line in path.read_text().splitlines())
    return text.replace("ARCH", arch).split()


def recipe_hash(arch: str) -> str:
    digest = hashlib.sha256(f"{SUITE} {SIZE} {arch}".encode())
    for path in sorted([*HERE.glob("*"), *STANDINS.glob("*"), *STANDINS.glob("bin/*")]):
        if path.is_file():
            digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def build(target: Path, arch: str) -> None:
    """Run mmdebstrap into a scratch directory; raises CalledProcessError with the log named."""
    scratch = target.with_suffix(".part")
    shutil.rmtree(scratch, ignore_errors=True)
    (scratch / "mirror").mkdir(parents=True)
    (scratch / "mnt").mkdir()
    out = str(scratch)
    mirror = " ".join(names(HERE / "mirror.txt", arch))
    apt = 'APT_CONFIG="$MMDEBSTRAP_APT_CONFIG" apt-get -qq --yes --no-install-recommends'
    mke2fs = f"mke2fs -q -F -t ext4 -L root -E lazy_itable_init=0 -d $OUT/mnt $OUT/base.ext4 {SIZE}"
    hooks = [
        # With mmdebstrap's own apt configuration the archive is asked for exactly what the tree still lacks.
        'rm -f "$1"/var/cache/apt/archives/*.deb',
        f"{apt} --download-only install {mirror}",
        'mv "$1"/var/cache/apt/archives/*.deb "$OUT/mirror/"',
        f'"{HERE}/customize.sh" "$1"',
        'rm -rf "$1"/var/lib/apt/lists/* "$1"/var/cache/apt/*.bin "$1"/var/log/*.log "$1"/var/log/apt',
        # mke2fs can not read a tree with /proc mounted in it: a bind mount shows it without.
        f'mount --bind "$1" "$OUT/mnt" && {mke2fs} && umount "$OUT/mnt"',
    ]
    command = ["mmdebstrap", "--variant=minbase", "--format=null", "--quiet"]
    command += [f"--include={','.join(names(HERE / 'packages.txt', arch))}"]
    command += [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale", "info")]
    command += [f"--customize-hook={hook}" for hook in hooks]
    env = {**os.environ, "OUT": out, "STANDINS": str(STANDINS)}
    log = target.parent / "build.log"
    with log.open("w") as stream:
        subprocess.run([*command, SUITE, "-"], env=env, stdout=stream, stderr=stream, check=True)
        with (scratch / "mirror/Packages").open("w") as index:
            subprocess.run(
                ["apt-ftparchive", "packages", "."], cwd=scratch / "mirror", stdout=index, stderr=stream, check=True
            )
    (scratch / "mnt").rmdir()
    scratch.rename(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True, help="folder that keeps built images")
    cache: Path = parser.parse_args().cache.resolve()
    arch = ARCH.get(platform.machine())
    if arch is None:
        sys.exit(f"found architecture {platform.machine()}, required one of {', '.join(ARCH)}")
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / recipe_hash(arch)
    start = time.monotonic()
    changed = not target.is_dir()
    if changed:
        try:
            build(target, arch)
        except (subprocess.CalledProcessError, OSError) as error:
            tail = (cache / "build.log").read_text(errors="replace").splitlines()[-25:]
            sys.exit("\n".join([*tail, f"building the image failed: {error}", f"full log: {cache / 'build.log'}"]))
        for old in cache.iterdir():
            if old.is_dir() and old != target:
                shutil.rmtree(old)
    print(json.dumps({"directory": str(target), "changed": changed, "seconds": round(time.monotonic() - start, 1)}))


if __name__ == "__main__":
    main()
