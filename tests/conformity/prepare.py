#!/usr/bin/env python3
"""Make the environments of the real upstreams, once, under .cache/conformity. A second run finds them.

    prepare.py runtime    LMCache and Dynamo: the virtual pair's runtime archive, built if need be, unpacked
    prepare.py vllm       vLLM, from requirements/conformity-vllm.txt (pinned, hashed), in its own virtual environment

Prints the directory. Exit 2 if it cannot be made.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("GOODPUT_CACHE", ROOT / ".cache")).resolve()
HOME = CACHE / "conformity"
BUILDER = ROOT / "roles/virtual_pair/files/runtime/build.py"
#: Its wheels are for this Python.
PYTHON = "python3.11"


def fail(text: str) -> None:
    print(f"conformity: {text}", file=sys.stderr)
    sys.exit(2)


def say(text: str) -> None:
    print(f"conformity: {text}", file=sys.stderr, flush=True)


def runtime() -> Path:
    """Unpacked archive: ``site-packages`` with LMCache and Dynamo."""
    for tool in (PYTHON, "unsquashfs"):
        if shutil.which(tool) is None:
            fail(f"{tool} not found; install {'squashfs-tools' if tool == 'unsquashfs' else 'Python 3.11'}")
    output = CACHE / "virtual/runtime"
    command = [sys.executable, str(BUILDER), "--cache", str(CACHE), "--output", str(output)]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if result.returncode:
        fail("the runtime archive cannot be built, see above")
    built = json.loads(result.stdout.strip().splitlines()[-1])
    target = HOME / f"runtime-{built['sha256'][:12]}"
    if not (target / "site-packages").is_dir():
        say(f"unpacking {built['archive']}")
        for old in HOME.glob("runtime-*"):
            shutil.rmtree(old)
        HOME.mkdir(parents=True, exist_ok=True)
        partial = target.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run(["unsquashfs", "-q", "-n", "-d", str(partial), built["archive"]], check=True, stdout=sys.stderr)
        partial.rename(target)
    return target


def vllm() -> Path:
    """Virtual environment of vLLM, without what only a GPU needs."""
    requirements = ROOT / "requirements/conformity-vllm.txt"
    target, stamp = HOME / "vllm", HOME / "vllm.stamp"
    value = hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamp.is_file() and stamp.read_text() == value:
        return target
    started = time.monotonic()
    say("virtual environment of vLLM (several GiB; minutes)")
    shutil.rmtree(target, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(target)], check=True)
    pip = [str(target / "bin/python"), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", "--no-deps"]
    pip += ["--require-hashes", "--cache-dir", str(CACHE / "pip"), "-r", str(requirements)]
    if subprocess.run(pip, stdout=sys.stderr).returncode:
        fail("vLLM cannot be installed, see above")
    site = next((target / "lib").glob("python*/site-packages"))
    sys.path.insert(0, str(BUILDER.parent))
    import cuda_stub

    scratch = target / "stub"
    scratch.mkdir()
    cuda_stub.install(site, scratch)
    stamp.write_text(value)
    say(f"vLLM ready in {time.monotonic() - started:.0f} s")
    return target


if __name__ == "__main__":
    if sys.argv[1:] not in (["runtime"], ["vllm"]):
        fail("say runtime or vllm")
    print(runtime() if sys.argv[1] == "runtime" else vllm())
