"""Ends a build that is not what it should be: LMCache that starts and has its CUDA code, NIXL, the versions."""

import importlib
import importlib.metadata
import re
import shutil
import subprocess
import sys

# What the pods start: their help needs no GPU, and every module that pip was told not to bring.
PROGRAMS = (("lmcache", "server", "--help"), ("lmcache", "coordinator", "--help"))


def problems(wanted: "list[str]") -> "list[str]":
    found = []
    for name in ("lmcache.cuda_ops", "nixl"):
        try:
            importlib.import_module(name)
        except Exception as error:
            found.append(f"found no {name} ({error}); required: a wheel with it for this architecture")
    for words in PROGRAMS:
        try:
            subprocess.run(words, check=True, capture_output=True, text=True, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            said = getattr(error, "stderr", None) or str(error)
            found.append(f"found `{' '.join(words)}`: {said.strip().splitlines()[-1]}; required: exit 0")
    for item in wanted:
        name, _, version = item.partition("==")
        try:
            have = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            have = "none"
        if not version or not re.fullmatch(rf"{re.escape(version)}(\.post\d+)?(\+.*)?", have):
            found.append(f"found {name} {have}; required: {version or 'a version'}")
    return found


def note() -> str:
    """What a look on the nodes will not be able to ask. Dynamo's CUDA image has no UCX but that in NIXL's wheel."""
    if shutil.which("ucx_info") or shutil.which("ucx_info", path="/usr/local/ucx/bin"):
        return ""
    return "no ucx_info in the image: which RDMA devices UCX has will not be asked; see docs/kubernetes.md, The image"


if __name__ == "__main__":
    if said := note():
        print(said)
    sys.exit("\n".join(problems(sys.argv[1:])) or 0)
