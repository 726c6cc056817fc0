"""Ends a build that is not what it should be: LMCache with its CUDA code, NIXL, UCX's program, the versions."""

import importlib
import importlib.metadata
import re
import shutil
import sys


def problems(wanted: "list[str]") -> "list[str]":
    found = []
    for name in ("lmcache.cuda_ops", "nixl"):
        try:
            importlib.import_module(name)
        except Exception as error:
            found.append(f"found no {name} ({error}); required: a wheel with it for this architecture")
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
