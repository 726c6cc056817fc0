"""Models: every file of every node is the one of the manifest, and all nodes have the same."""

from __future__ import annotations

import json
from typing import Any

MODELS = "/srv/goodput/models"
MANIFEST = ".goodput-manifest.json"
AGAIN = "run `ansible-playbook site.yml --tags model_store`"
# Larger models are compared by size here; `-e model_store_full_verify=true --tags verify` hashes them.
HASHED_BYTES = 8 * 1024**3


def manifests(sh: Any, node: Any) -> dict[str, Any]:
    """Manifest of each model folder; None where there is none."""
    command = f'for d in {MODELS}/*/; do printf "%s " "$d"; tr -d "\\n" < "$d{MANIFEST}" || true; echo; done'
    found: dict[str, Any] = {}
    for line in sh({"manifests": command}, node=node)["manifests"].stdout.splitlines():
        folder, _, text = line.partition(" ")
        if "*" not in folder:
            found[folder.rstrip("/").rsplit("/", 1)[-1]] = json.loads(text) if text.strip() else None
    return found


def test_files(host: Any, sh: Any, check: Any) -> None:
    "Every model file has the size and sha256 of its manifest"
    models = manifests(sh, host)
    for name, manifest in models.items():
        if not check_manifest(check, name, manifest):
            continue
        required = {entry["path"]: entry for entry in manifest["files"]}
        small = sum(entry["size_bytes"] or 0 for entry in required.values()) <= HASHED_BYTES
        inside = f"cd {MODELS}/{name} && find . -type f -not -path '*/.*' "
        commands = {"sizes": inside + "-printf '%P %s\\n'"}
        if small:
            # Past the page cache: it is the memory that the GPU shares.
            hashed = 'for f; do dd if="$f" bs=4M iflag=direct status=none | sha256sum | tr -d "\\n"; echo "$f"; done'
            commands["sums"] = inside + f"-exec sh -c '{hashed}' - {{}} +"
        seen = sh(commands, node=host, fresh=True, timeout_s=1800)
        sizes = dict(line.rsplit(" ", 1) for line in seen["sizes"].stdout.splitlines())
        for path, entry in required.items():
            wanted = str(entry["size_bytes"]) if entry["size_bytes"] is not None else sizes.get(path, "a file")
            check(sizes.get(path, "missing"), wanted, AGAIN, what=f"{name}/{path} bytes")
        if small:
            sums = {line[67:].removeprefix("./"): line[:64] for line in seen["sums"].stdout.splitlines()}
            for path, entry in required.items():
                check(sums.get(path, "missing"), entry["sha256"], AGAIN, what=f"{name}/{path} sha256")


def check_manifest(check: Any, name: str, manifest: Any) -> bool:
    found = "a manifest" if manifest and manifest.get("files") else "none"
    check(found, "a manifest", AGAIN, what=f"{MODELS}/{name}/{MANIFEST}")
    return found == "a manifest"


def test_same(nodes: Any, sh: Any, check: Any) -> None:
    "All nodes have the same models in the same revision"
    found = {node.name: manifests(sh, node) for node in nodes}
    for node in nodes:
        check(found[node.name] == found[nodes[0].name], True, AGAIN, what=f"as on {nodes[0].name}", node=node)


def test_readable(host: Any, sh: Any, check: Any) -> None:
    "The serving account can read the models and not change them"
    reads = f"runuser -u goodput -- find {MODELS} -type f -not -path '*/.*' -not -readable"
    writes = f"runuser -u goodput -- find {MODELS} -writable -not -type l"
    seen = sh({"reads": reads, "writes": writes}, node=host)
    check(
        seen["reads"].stdout.split(), [], AGAIN, what="not readable", ok=seen["reads"].ok and not seen["reads"].stdout
    )
    check(seen["writes"].stdout.split(), [], AGAIN, what="writable", ok=seen["writes"].ok and not seen["writes"].stdout)


def test_nothing_shared(host: Any, sh: Any, check: Any) -> None:
    "No node still shares its models, and no copy is half done"
    seen = sh(
        {
            "unit": "systemctl is-active goodput-model-share.service",
            "parts": f"find {MODELS} -name '.goodput-part-*'",
        },
        node=host,
    )
    check(seen["unit"].stdout.strip(), "inactive", "systemctl stop goodput-model-share", what="goodput-model-share")
    check(seen["parts"].stdout.split(), [], AGAIN, what="parts")
