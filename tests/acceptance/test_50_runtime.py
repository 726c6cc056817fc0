"""The runtime archive: the same file on every node, mounted read-only, and it runs on the node's own Python."""

from __future__ import annotations

import json
from typing import Any

import pytest

MOUNT = "/opt/goodput/runtime"
AGAIN = "run `ansible-playbook site.yml --tags runtime`"
# The file behind the loop device, as the kernel names it.
BACKING = f"cat /sys/block/$(basename $(findmnt -no SOURCE {MOUNT}))/loop/backing_file"

pytestmark = pytest.mark.unit("opt-goodput-runtime.mount")


def look(sh: Any, node: Any) -> Any:
    """One round trip a node, remembered: the whole archive is hashed, on the node."""
    return sh(
        {
            "sum": f'sha256sum < "$({BACKING})"',
            "mount": f"findmnt -no FSTYPE,OPTIONS {MOUNT}",
            "write": f"touch {MOUNT}/probe",
            "fstab": f"findmnt -s -no OPTIONS {MOUNT}",
            "version": f"cat {MOUNT}/VERSION.json",
            "python": "/usr/bin/python3 -c 'import sys; print(\"%d.%d\" % sys.version_info[:2])'",
            "machine": "uname -m",
        },
        node=node,
        timeout_s=600,
    )


def test_same_archive(nodes: Any, sh: Any, check: Any) -> None:
    "The runtime archive is the same file on every node"
    sums = {node.name: look(sh, node)["sum"].stdout.split(" ")[0] for node in nodes}
    for node in nodes:
        wanted = node.vars.get("runtime_sha256") or sums[nodes[0].name]
        check(
            sums[node.name],
            wanted,
            f"put the archive with this sha256 on {node.name} and {AGAIN}",
            ok=len(wanted) == 64 and sums[node.name] == wanted,
            what=f"sha256 on {node.name}",
            node=node,
        )


def test_read_only(host: Any, sh: Any, check: Any) -> None:
    "The runtime is mounted read-only, now and at boot"
    seen = look(sh, host)
    kind, _, options = seen["mount"].stdout.strip().partition(" ")
    check(kind, "squashfs", AGAIN, what=MOUNT)
    check(options.split(",")[0].strip(), "ro", AGAIN, what="option")
    check("refused" if not seen["write"].ok else "written", "refused", AGAIN, what="writing to it")
    boot = set(seen["fstab"].stdout.strip().split(","))
    check(sorted(boot & {"ro", "nofail"}), ["nofail", "ro"], AGAIN, what="/etc/fstab")


def test_versions(host: Any, first: Any, sh: Any, check: Any) -> None:
    "VERSION.json fits the node and equals the first node's"
    seen = look(sh, host)
    version = json.loads(seen["version"].stdout or "{}")
    remedy = "use an archive made for this node's Python and architecture (docs/runtime.md)"
    check(version.get("python"), seen["python"].stdout.strip(), remedy, what="Python")
    check(version.get("arch"), seen["machine"].stdout.strip(), remedy, what="architecture")
    check(version, json.loads(look(sh, first)["version"].stdout or "{}"), AGAIN, what="VERSION.json")


def test_runs(host: Any, sh: Any, check: Any) -> None:
    "The runtime's Dynamo loads and its packages are those that VERSION.json names"
    code = (
        "import dynamo._core; from importlib.metadata import version as v; "
        "print(*(v(n).split(chr(43))[0] for n in ('ai-dynamo', 'lmcache', 'torch')))"
    )
    seen = sh({"run": f'PYTHONPATH={MOUNT}/site-packages /usr/bin/python3 -c "{code}"'}, node=host, timeout_s=600)[
        "run"
    ]
    version = json.loads(look(sh, host)["version"].stdout or "{}")
    wanted = " ".join(str(version.get(name)) for name in ("dynamo", "lmcache", "torch"))
    check(seen.stdout.strip() or seen.stderr.strip().splitlines()[-1:], wanted, AGAIN, what="versions")
