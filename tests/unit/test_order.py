"""The order of nodes means something (the first one is the frontend's), and Ansible's set filters lose it."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_no_set_filter_is_used_on_nodes() -> None:
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for folder in ("roles", "playbooks", "vars", "group_vars")
        for path in sorted((ROOT / folder).rglob("*.yml"))
        for line in path.read_text().splitlines()
        if re.search(r"\|\s*(intersect|difference|union|symmetric_difference)\(", line)
    ]
    assert found == [], "use select('in', ...) or reject('in', ...): set filters return any order"
