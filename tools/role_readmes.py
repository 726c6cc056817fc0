#!/usr/bin/env python3
"""Write the table of inputs of each role's README.md from its argument specification and defaults.

The table stands between `<!-- inputs -->` and `<!-- /inputs -->`; the rest of the file is written by hand. With --check
nothing is written and a stale table is reported.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from role_tree import ROOT, entry_points, load, roles

MARKERS = re.compile(r"(<!-- inputs -->\n)(.*?)(<!-- /inputs -->)", re.DOTALL)


def cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def shown(value: Any) -> str:
    """A default as it would be written in YAML, on one line."""
    text = value if isinstance(value, str) and value else json.dumps(value, ensure_ascii=False)
    return f"`{cell(text)}`"


def kind(option: dict[str, Any]) -> str:
    name = option.get("type", "str")
    if name == "list" and "elements" in option:
        name = f"list of {option['elements']}"
    if "choices" in option:
        name += ": " + ", ".join(f"`{choice}`" for choice in option["choices"])
    return cell(name)


def sentences(description: Any) -> str:
    return cell(" ".join(description) if isinstance(description, list) else str(description))


def rows(options: dict[str, Any], defaults: dict[str, Any], prefix: str = "") -> Iterator[str]:
    for name, option in options.items():
        if option.get("required"):
            value = "required"
        elif name in defaults and not prefix:
            value = shown(defaults[name])
        else:
            value = shown(option["default"]) if "default" in option else "–"
        yield f"| `{prefix}{name}` | {kind(option)} | {value} | {sentences(option.get('description', ''))} |"
        if "options" in option:
            inner = "[]." if option.get("type") == "list" else "."
            yield from rows(option["options"], {}, f"{prefix}{name}{inner}")


def table(role: Path) -> str:
    options = entry_points(role).get("main", {}).get("options", {}) or {}
    if not options:
        return "This role has no inputs.\n"
    head = ["| input | type | default | meaning |", "|---|---|---|---|"]
    return "\n".join([*head, *rows(options, load(role / "defaults/main.yml"))]) + "\n"


def updated(role: Path) -> tuple[str | None, str | None]:
    """(new text of README.md, None) or (None, problem); a role without `main` entry needs no table."""
    path = role / "README.md"
    if not path.is_file():
        return None, f"roles/{role.name}/README.md: missing"
    text = path.read_text(encoding="utf-8")
    if "main" not in entry_points(role) and MARKERS.search(text) is None:
        return text, None
    if len(MARKERS.findall(text)) != 1:
        return (
            None,
            f"roles/{role.name}/README.md: needs one pair <!-- inputs --> … <!-- /inputs -->, each on its own line",
        )
    return MARKERS.sub(lambda match: match.group(1) + table(role) + match.group(3), text), None


def check(root: Path, write: bool = False) -> list[str]:
    problems = []
    for role in roles(root):
        text, problem = updated(role)
        path = role / "README.md"
        if problem is not None:
            problems.append(problem)
        elif text is not None and text != path.read_text(encoding="utf-8"):
            if write:
                path.write_text(text, encoding="utf-8")
                print(f"{path.relative_to(root)}: written")
            else:
                problems.append(f"{path.relative_to(root)}: the table of inputs is stale: run `make docs`")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--check", action="store_true", help="report, do not write")
    arguments = parser.parse_args()
    problems = check(arguments.root.resolve(), write=not arguments.check)
    for problem in problems:
        print(problem)
    print(f"role READMEs: {len(problems)} problems", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
