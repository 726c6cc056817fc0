# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""What earlier runs left in an L2 directory, before LMCache's server starts. Runs on a node; standard library only.

fs_native counts from zero at every start: files of earlier runs are read, but neither counted nor evicted, so a
directory grows by its cap with every start (LMCache/LMCache#4564). It writes without fsync, so a power cut can leave
short files, which are a miss for ever: the prefix is cut there, and storing it again is skipped because the name
exists. So before each start: temporary and short files go, the rest is kept up to a share of the cap, newest first, and
the server gets what is left of the cap. ``purge`` keeps nothing.

Writes ``l2.env`` (the capacity for the unit's command line) and ``l2.json`` (what was found and done) to ``--output``.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "GOODPUT_L2_CAPACITY_GIB"
GIB = 2**30
BLOCK_BYTES = 4096
#: How LMCache's fs_native names an object, and the end of what it has not finished.
OBJECT, TEMPORARY = ".data", ".tmp"


@dataclass(frozen=True)
class File:
    """One file of the directory; ``taken_bytes`` is what it takes on the disk."""

    name: str
    size_bytes: int
    modified_ns: int

    @property
    def taken_bytes(self) -> int:
        return -(-self.size_bytes // BLOCK_BYTES) * BLOCK_BYTES

    @property
    def kind(self) -> str:
        """Model, rank and group: LMCache's objects of one kind have one size."""
        return "@".join(self.name.split("@")[:3])


@dataclass(frozen=True)
class Plan:
    """What goes and what stays. ``capacity_gib`` is what the server may add to ``kept_bytes``."""

    state: str
    planned_gib: float
    capacity_gib: float
    kept_objects: int
    kept_bytes: int
    partial: tuple[str, ...]
    dropped: tuple[str, ...]


def partial(files: Iterable[File]) -> list[File]:
    """Temporary files, empty ones, and objects shorter than most of their kind."""
    found = list(files)
    sizes: dict[str, Counter[int]] = defaultdict(Counter)
    for file in found:
        if file.name.endswith(OBJECT):
            sizes[file.kind][file.size_bytes] += 1
    # The larger of two equally frequent sizes: a short file is the likelier fault.
    usual = {kind: max((count, size) for size, count in counts.items())[1] for kind, counts in sizes.items()}
    return [
        file
        for file in found
        if file.name.endswith(TEMPORARY)
        or (file.name.endswith(OBJECT) and (file.size_bytes == 0 or file.size_bytes < usual[file.kind]))
    ]


def decide(files: Iterable[File], planned_gib: float, state: str, keep_percent: int) -> Plan:
    """What to do with ``files`` so that they and what the server adds stay within ``planned_gib``.

    :param state: ``keep`` or ``purge``.
    :param keep_percent: share of the cap that old objects may take, 0 to 95; the rest is for new ones.
    """
    found = list(files)
    broken = partial(found)
    objects = [file for file in found if file.name.endswith(OBJECT) and file not in broken]
    room = int(planned_gib * GIB) * keep_percent // 100 if state == "keep" else 0
    kept_bytes, kept = 0, 0
    dropped: list[str] = []
    for file in sorted(objects, key=lambda each: (-each.modified_ns, each.name)):
        if kept_bytes + file.taken_bytes <= room and not dropped:
            kept_bytes, kept = kept_bytes + file.taken_bytes, kept + 1
        else:
            dropped.append(file.name)
    # Rounded down: the sum must not pass the cap.
    capacity_gib = int((planned_gib * GIB - kept_bytes) * 1000 // GIB) / 1000
    return Plan(
        "warm" if kept else "cold",
        planned_gib,
        planned_gib if not kept_bytes else capacity_gib,
        kept,
        kept_bytes,
        tuple(sorted(file.name for file in broken)),
        tuple(sorted(dropped)),
    )


def look(path: Path) -> list[File]:
    """The regular files of the directory, none of its folders. OSError if it can not be read."""
    found = []
    for entry in path.iterdir():
        if entry.is_file() and not entry.is_symlink():
            status = entry.stat()
            found.append(File(entry.name, status.st_size, status.st_mtime_ns))
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", type=Path, required=True, help="L2 directory")
    parser.add_argument("--capacity-gib", type=float, required=True, help="cap of the plan, GiB")
    parser.add_argument("--state", choices=("keep", "purge"), default="keep")
    parser.add_argument("--keep-percent", type=int, default=80, help="share of the cap that old objects may take")
    parser.add_argument("--output", type=Path, required=True, help="directory for l2.env and l2.json")
    options = parser.parse_args(argv)
    try:
        plan = decide(look(options.path), options.capacity_gib, options.state, options.keep_percent)
        for name in (*plan.partial, *plan.dropped):
            (options.path / name).unlink(missing_ok=True)
        report = {**asdict(plan), "dropped": len(plan.dropped)}
        (options.output / "l2.json").write_text(json.dumps(report, indent=2) + "\n")
        (options.output / "l2.env").write_text(f"{VARIABLE}={json.dumps(plan.capacity_gib)}\n")
    except OSError as error:
        print(f"L2 directory {options.path}: {error}; is it mounted and owned by goodput?", file=sys.stderr)
        return 1
    print(
        f"L2 {plan.state}: {plan.kept_objects} objects, {plan.kept_bytes} bytes kept; {len(plan.partial)} unfinished"
        f" and {len(plan.dropped)} old removed; {plan.capacity_gib:g} of {plan.planned_gib:g} GiB for new objects"
    )
    for name in plan.partial:
        print(f"removed unfinished {name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
