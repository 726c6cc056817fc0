"""Ends a build that is not what it should be: LMCache that starts and has its CUDA code, NIXL, UCX, the versions."""

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
    if not shutil.which("ucx_info"):
        found.append("found no ucx_info; required: UCX with its program, which verify asks for the rails")
    return found


if __name__ == "__main__":
    sys.exit("\n".join(problems(sys.argv[1:])) or 0)
