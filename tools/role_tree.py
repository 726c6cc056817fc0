"""What the checks of this folder share: reading the roles of a tree (an argument, so that tests bring bad ones)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent


class _Loader(yaml.SafeLoader):
    """Reads Ansible's own tags (!vault, !unsafe) as plain values."""


def _plain(loader: yaml.SafeLoader, _suffix: str, node: yaml.Node) -> Any:
    return node.value if isinstance(node, yaml.ScalarNode) else None


_Loader.add_multi_constructor("!", _plain)


def load(path: Path) -> Any:
    """The document in a YAML file; {} for an empty or missing one."""
    if not path.is_file():
        return {}
    return yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader) or {}


def roles(root: Path) -> Iterator[Path]:
    """Folders of the roles, in alphabetical order."""
    for path in sorted((root / "roles").glob("*")):
        if path.is_dir() and (path / "tasks").is_dir():
            yield path


def entry_points(role: Path) -> dict[str, Any]:
    """The entry points of a role's argument specification."""
    specs = load(role / "meta/argument_specs.yml").get("argument_specs", {})
    return dict(specs)


def report(check: Callable[[Path], list[str]], title: str) -> None:
    """Run a check on the checkout, or on the tree given as the only argument, and exit 0 clean or 1."""
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    problems = check(root)
    for problem in problems:
        print(problem)
    print(f"{title}: {len(problems)} problem{'' if len(problems) == 1 else 's'}", file=sys.stderr)
    sys.exit(1 if problems else 0)
