#!/usr/bin/env python3
"""Find variables that nobody uses.

Looked at: every key of roles/*/defaults, roles/*/vars, vars/ and group_vars/, and every `__` name that a task gives a
value to (register, set_fact, loop_var, vars). A variable is used when its name stands anywhere else than where a value
is given to it; a comment, an argument specification and a README are no use.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from role_tree import load, report, roles

# Where a use may stand. Tests are none: what only a test reads is not needed.
USERS = ("roles", "playbooks", "vars", "group_vars", "plugins", "src", "inventory", "extensions")
SUFFIXES = (".yml", ".yaml", ".j2", ".py", ".sh", ".toml")
SKIPPED = ("argument_specs.yml", "README.md")
# `register: x`, `loop_var: x` and the key of `x: value` give a value; the rest of the line is a use.
GIVES = re.compile(
    r"^\s*(?:-\s+)?(?:(?:register|loop_var|index_var|fact_path):\s*[\"']?(\w+)[\"']?\s*$|(\w+)\s*:(?=\s|$))"
)
WORD = re.compile(r"[A-Za-z_]\w*")


def sources(root: Path) -> Iterator[Path]:
    files = [*root.glob("*.yml"), *(path for folder in USERS for path in (root / folder).rglob("*"))]
    for path in files:
        hidden = any(part.startswith(".") for part in path.relative_to(root).parts)
        if path.is_file() and not hidden and path.suffix in SUFFIXES and path.name not in SKIPPED:
            yield path


def without_comment(line: str, path: Path) -> str:
    if path.suffix == ".j2":
        return re.sub(r"\{#.*?#\}", "", line)
    return re.sub(r"(^|\s)#.*$", "", line)


def words_used(path: Path) -> set[str]:
    """Names that stand in a file other than where they get a value."""
    used: set[str] = set()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        text = without_comment(line, path)
        if path.suffix in (".yml", ".yaml"):
            given = GIVES.match(text)
            if given:
                text = text[given.end() :]
        used.update(WORD.findall(text))
    return used


def tasks_of(document: Any) -> Iterator[dict[str, Any]]:
    """Every mapping of a task file or playbook that may be a task, blocks included."""
    if isinstance(document, list):
        for entry in document:
            yield from tasks_of(entry)
    elif isinstance(document, dict):
        yield document
        for key in ("block", "rescue", "always", "tasks", "pre_tasks", "post_tasks", "handlers"):
            yield from tasks_of(document.get(key))


def given_by_task(task: dict[str, Any]) -> Iterator[str]:
    if isinstance(task.get("register"), str):
        yield task["register"]
    control = task.get("loop_control")
    if isinstance(control, dict):
        yield from (str(control[key]) for key in ("loop_var", "index_var") if key in control)
    for action in ("ansible.builtin.set_fact", "set_fact"):
        if isinstance(task.get(action), dict):
            yield from (str(key) for key in task[action] if key != "cacheable")
    # Handed to a role, a block or an include: the receiver must read it.
    if isinstance(task.get("vars"), dict):
        yield from (str(key) for key in task["vars"])


def definitions(root: Path) -> Iterator[tuple[str, Path]]:
    """(name, file) of everything that must be used somewhere."""
    files = [path for folder in ("vars", "group_vars") for path in sorted((root / folder).rglob("*.yml"))]
    for role in roles(root):
        files += [*sorted((role / "defaults").glob("*.yml")), *sorted((role / "vars").glob("*.yml"))]
    for path in files:
        document = load(path)
        if isinstance(document, dict):
            yield from ((str(key), path) for key in document if not str(key).startswith("ansible_"))
    for path in sources(root):
        if path.suffix == ".yml" and ({"tasks", "handlers"} & set(path.parts) or "playbooks" in path.parts):
            for task in tasks_of(load(path)):
                yield from ((name, path) for name in given_by_task(task) if name.startswith("__"))


def check(root: Path) -> list[str]:
    used: set[str] = set()
    for path in sources(root):
        used |= words_used(path)
    found = {(path.relative_to(root), name) for name, path in definitions(root) if name not in used}
    return [f"{path}: {name} is used nowhere" for path, name in sorted(found)]


if __name__ == "__main__":
    report(check, "variables")
