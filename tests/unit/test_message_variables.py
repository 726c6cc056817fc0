"""A variable that a message says to set exists: preflight refuses a misspelt one in the next run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path.parent.name for path in ROOT.glob("roles/*/tasks"))
#: Given on the command line or by an inventory, so no file of defaults has them.
GIVEN = {
    "goodput_management_address",
    "goodput_reset",
    "goodput_reset_forget_objects",
    "goodput_reset_remove_data",
}
NAME = re.compile(rf"(?<![\w./-])((?:goodput|{'|'.join(ROLES)})_[a-z0-9_]+)(?![\w./])")
SAYS = re.compile(r"\bset\b|\bfix:")
SOURCES = ("plugins/**/*.py", "src/**/*.py", "roles/*/tasks/*.yml", "playbooks/*.yml")


def known() -> set[str]:
    files = [path for glob in ("roles/*/defaults", "vars", "group_vars") for path in ROOT.glob(f"{glob}/**/*.yml")]
    names = {str(key) for path in files for key in yaml.safe_load(path.read_text()) or {}}
    for path in ROOT.glob("roles/*/meta/argument_specs.yml"):
        for entry in yaml.safe_load(path.read_text())["argument_specs"].values():
            names |= set(entry.get("options", {}))
    # Modules and filters are named in messages, too.
    return names | GIVEN | {path.stem for path in ROOT.glob("plugins/*/*")} | set(ROLES)


def texts(path: Path) -> Iterator[str]:
    if path.suffix == ".py":
        nodes = list(ast.walk(ast.parse(path.read_text())))
        docstrings = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                yield node.value
    else:
        # A task a text: its message is folded over lines.
        yield from re.split(r"\n(?=\s*- name:)", path.read_text())


def test_every_variable_that_a_message_says_to_set_exists() -> None:
    variables, read, wrong = known(), 0, []
    for path in (path for glob in SOURCES for path in ROOT.glob(glob)):
        for text in texts(path):
            said = SAYS.search(text)
            for name in NAME.findall(text, said.start()) if said else []:
                read += 1
                if name not in variables and not name.startswith("__"):
                    wrong.append(f"{path.relative_to(ROOT)}: {name}")
    assert wrong == []
    assert read > 60, "no message is found any more"
