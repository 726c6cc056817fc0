"""``goodput logs``: the journal of a goodput unit, all nodes merged by time."""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence

KNOWN_UNITS = "systemctl list-unit-files 'goodput-*' --no-legend --plain | cut -d' ' -f1"
_STAMP = re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+[+-]\d{2}:?\d{2} ")
_CURSOR = "-- cursor: "


class UnknownUnit(Exception):
    """No node has such a unit; the message names the nearest."""


def short(unit: str) -> str:
    return unit.removeprefix("goodput-").removesuffix(".service")


def resolve(name: str, known: Iterable[str]) -> str:
    """``worker``, ``goodput-worker`` or ``goodput-worker.service`` -> the unit's full name.

    Raises UnknownUnit.
    """
    units = {short(unit): unit for unit in sorted(set(known))}
    wanted = short(name.strip())
    if wanted in units:
        return units[wanted]
    if not units:
        raise UnknownUnit(f"found no unit {name!r}: no goodput unit is installed; run `goodput site`")
    nearest = difflib.get_close_matches(wanted, units, 1, 0.4)
    hint = f"did you mean {nearest[0]}? " if nearest else ""
    raise UnknownUnit(f"found no unit {name!r}; {hint}units here: {', '.join(units)}")


def command(unit: str, *, lines: int, since: str | None = None, cursor: str | None = None) -> str:
    """The last ``lines`` lines; with ``cursor`` (of an earlier answer) everything after it."""
    words = ["journalctl", "-q", "--no-pager", "-u", unit, "-o", "short-iso-precise", "--show-cursor"]
    if cursor:
        words += ["--after-cursor", cursor]
    else:
        words += ["-n", str(lines)]
        words += ["--since", since] if since else []
    return shlex.join(words)


def split(text: str) -> tuple[list[str], str | None]:
    """(entries, cursor). An entry that spans lines stays one."""
    entries: list[str] = []
    cursor = None
    for line in text.removesuffix("\n").split("\n") if text else []:
        if line.startswith(_CURSOR):
            cursor = line[len(_CURSOR) :].strip()
        elif entries and not _STAMP.match(line) and not line.startswith("-- "):
            entries[-1] += "\n" + line
        else:
            entries.append(line)
    return entries, cursor


def merge(found: Mapping[str, Sequence[str]]) -> list[tuple[str, str]]:
    """[(node, entry)] of all nodes by time. The nodes' clocks agree to milliseconds (role host), so the order holds.

    A mark such as ``-- Boot ... --`` goes with the entry after it.
    """
    rows = []
    for node, entries in found.items():
        stamp = ""
        stamps = []
        for entry in reversed(entries):
            match = _STAMP.match(entry)
            stamp = match.group(0) if match else stamp
            stamps.append(stamp)
        rows += [
            (stamp, index, node, entry)
            for index, (stamp, entry) in enumerate(zip(reversed(stamps), entries, strict=True))
        ]
    return [(node, entry) for _stamp, _index, node, entry in sorted(rows, key=lambda row: (row[0], row[1]))]
