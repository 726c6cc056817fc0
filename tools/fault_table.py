#!/usr/bin/env python3
"""Write the figures of the last `make test STAGES=long` into the table of docs/serving.md.

The tests keep them in ``.goodput/test/serving-faults.json``: {fault: {requests, failed, silence_seconds, again_seconds,
objects_lost}}; ``objects_lost`` is null where the fault could not touch what is stored and the test did not compare.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / ".goodput/test/serving-faults.json"
PAGE = ROOT / "docs/serving.md"
TABLE = re.compile(r"(<!-- figures: tools/fault_table\.py -->\n).*?(<!-- end -->)", re.S)


def table(figures: dict[str, dict[str, Any]], date: str) -> str:
    """The figures of all faults as Markdown, in the order in which they were tried."""
    rows = [
        f"Measured {date}:\n\n"
        "| fault | requests | failed | silence, s | again, s | stored objects lost |\n|---|---|---|---|---|---|"
    ]
    for fault, seen in figures.items():
        lost = "not compared" if seen["objects_lost"] is None else seen["objects_lost"]
        numbers = (seen["requests"], seen["failed"], seen["silence_seconds"], seen["again_seconds"], lost)
        rows.append(f"| {fault} | {' | '.join(map(str, numbers))} |")
    return "\n".join(rows) + "\n"


def main() -> None:
    if not FIGURES.exists():
        sys.exit(f"found no {FIGURES}; required: a run of `make test STAGES=long`")
    date = datetime.fromtimestamp(FIGURES.stat().st_mtime, UTC).date().isoformat()
    text = table(json.loads(FIGURES.read_text()), date)
    page, count = TABLE.subn(lambda found: found[1] + text + found[2], PAGE.read_text())
    if count != 1:
        sys.exit(f"found {count} tables between the markers in {PAGE}; required: one")
    PAGE.write_text(page)


if __name__ == "__main__":
    main()
