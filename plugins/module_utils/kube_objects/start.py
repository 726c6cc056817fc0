# Apache-2.0 (see LICENSE)
"""Runs in a pod, before LMCache's server and instead of its unit's ExecStartPre. Standard library only.

    start.py [--l2-state keep] [--l2-keep-percent 80] -- lmcache server ARGUMENTS

Two things are known only where and when the server starts: the address of the node's first rail, which is in no field
of a pod and so lies beside this file in ``rails.json``, and what earlier runs left in an L2 in files, which
``l2_residue`` beside this file judges. The arguments are the plan's; this fills in the first and lowers the cap by the
second.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
#: As on the systemd platform, and the same for who asks later.
REPORT_DIRECTORY = "/run/goodput-lmcache"
RAIL_ADDRESS = "{rail_address}"


def with_rail(words: list[str], node: str, rails: Path) -> list[str]:
    """``words`` with the address of the node's first rail.

    :raises SystemExit: nobody wrote down an address for this node.
    """
    if not any(RAIL_ADDRESS in word for word in words):
        return words
    known = json.loads(rails.read_text())
    if node not in known:
        sys.exit(f"no rail address for node {node!r}; known: {', '.join(sorted(known))}; render the objects again")
    return [word.replace(RAIL_ADDRESS, known[node]) for word in words]


def with_capacity(words: list[str], options: argparse.Namespace, report_directory: Path) -> list[str]:
    """``words`` whose L2 in files has the cap less what is there.

    :raises SystemExit: the directory can not be read or written.
    """
    found = list(words)
    for index, word in enumerate(words):
        adapter = json.loads(word) if words[index - 1 : index] == ["--l2-adapter"] else {}
        if adapter.get("type") != "fs_native":
            continue
        # Beside this file in the pod.
        sys.path.insert(0, str(HERE))
        l2_residue = importlib.import_module("l2_residue")
        report_directory.mkdir(parents=True, exist_ok=True)
        status = l2_residue.main(
            [
                *("--path", adapter["base_path"], "--capacity-gib", str(adapter["max_capacity_gb"])),
                *("--state", options.l2_state, "--keep-percent", str(options.l2_keep_percent)),
                *("--output", str(report_directory)),
            ]
        )
        if status:
            sys.exit(status)
        capacity_gib = json.loads((report_directory / "l2.json").read_text())["capacity_gib"]
        if capacity_gib != adapter["max_capacity_gb"]:
            # As the plan writes it: JSON without blanks, keys in their order.
            found[index] = json.dumps(adapter | {"max_capacity_gb": capacity_gib}, separators=(",", ":"))
    return found


def main(argv: list[str]) -> None:
    at = argv.index("--")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--l2-state", choices=("keep", "purge"), default="keep")
    parser.add_argument("--l2-keep-percent", type=int, default=80)
    options = parser.parse_args(argv[:at])
    words = with_rail(argv[at + 1 :], os.environ.get("GOODPUT_NODE", ""), HERE / "rails.json")
    words = with_capacity(words, options, Path(os.environ.get("GOODPUT_REPORT_DIRECTORY", REPORT_DIRECTORY)))
    sys.stdout.flush()
    os.execvp(words[0], words)


if __name__ == "__main__":
    main(sys.argv[1:])
