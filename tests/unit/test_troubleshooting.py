"""docs/troubleshooting.md and the fault tests name the same faults."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def documented() -> list[str]:
    rows = re.findall(r"^\|(.+)\|$", (ROOT / "docs/troubleshooting.md").read_text(), re.M)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return [row[3] for row in cells if len(row) == 4 and row[3] != "fault" and not set(row[3]) <= {"-"}]


def marked() -> set[str]:
    found = set()
    for path in (ROOT / "tests/faults").glob("*_*.py"):
        note = " (long)" if path.name.startswith("long_") else ""
        found |= {name + note for name in re.findall(r'mark\.fault\("([^"]+)"\)', path.read_text())}
    return found


def test_each_row_has_a_test_and_each_fault_a_row() -> None:
    rows = documented()
    assert len(rows) > 20
    assert len(rows) == len(set(rows))
    assert set(rows) == marked()
