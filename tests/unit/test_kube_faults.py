"""The fault table of docs/kubernetes.md: every row names a test that exists, and no fault is missing."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: What must be refused or said, by a word of its row.
FAULTS = (
    "with sha256", "(the file for amd64)", "broke off", "found no token", "mode 0644", "ahead of", "equal",
    "no netdev", "Wi-Fi", "on the rail", "no default route", "6443", "microk8s", "GiB free", "frobnicate",
    "not Established", "component worker", "sha256:b", "rdma/rail1", "another cluster's", "broken off",
)  # fmt: skip


def rows() -> list[list[str]]:
    text = (ROOT / "docs/kubernetes.md").read_text().partition("\n## Faults\n")[2]
    found = [[cell.strip() for cell in row.split(" | ")] for row in re.findall(r"^\| (.+) \|$", text, re.M)]
    return [row for row in found[1:] if len(row) == 4 and row[3]]


def test_each_row_names_a_test_that_exists() -> None:
    assert len(rows()) > 30
    for symptom, cause, remedy, shown in rows():
        assert symptom and cause and remedy, symptom
        file, _, name = shown.strip("`").partition("::")
        path = ROOT / "tests/unit" / file
        assert path.is_file() and f"\ndef {name}(" in path.read_text(), shown


def test_no_fault_is_missing() -> None:
    text = "\n".join(f"{row[0]} {row[1]}" for row in rows())
    assert [fault for fault in FAULTS if fault not in text] == []
