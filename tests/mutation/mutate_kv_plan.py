#!/usr/bin/env python3
"""Change each integer of the planner's formulae by one unit and see whether a unit test notices.

Every integer literal and every floor or ceiling division in the formula modules is one mutant: ``n`` becomes ``n + 1``
(and ``n - 1`` with --both), ``//`` becomes a division rounded up, ``ceil_div`` one rounded down. Mutants run in
child processes of one warm interpreter: the module is compiled from the changed tree and put in place before the tests
are imported. Exit 0: every mutant was noticed (or is listed in EQUIVALENT with its reason). 1: some survived.

    .venv/bin/python tests/mutation/mutate_kv_plan.py [--module geometry] [--both]
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.util
import io
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "ansible_collections.goodput.spark.plugins.module_utils.kv_plan"
SOURCE = ROOT / "plugins/module_utils/kv_plan"
#: Modules with formulae, in import order.
MODULES = ("checks", "geometry", "device", "l1", "memory", "solve")
#: Functions that only check or describe input: their numbers are limits, not formulae.
SKIPPED_FUNCTIONS = {
    "__init__",
    "__post_init__",
    "whole",
    "number",
    "nearest",
    "_config_int",
    "_layer_kinds",
    "geometry_from_config",
    "mamba_padding_percent",
}
SKIPPED_NAMES = {"HUGE"}
TESTS = ("test_kv_measured.py", "test_kv_l1.py", "test_kv_budget.py", "test_kv_render.py", "test_kv_rules.py")
TIMEOUT_SECONDS = 120
#: Mutants that change nothing that can be observed, by (module, source line, mutation), and why.
EQUIVALENT: dict[tuple[str, str, str], str] = {
    ("solve", "middle = (good + bad) // 2", "// -> rounded up"): "either middle ends the search at the same place",
    (
        "solve",
        "good, bad = 0, (high - low) // step + 1",
        "0 -> -1",
    ): "the search tries the first step again, which is known to fit",
}


class Mutator(ast.NodeTransformer):
    """Applies mutation number ``wanted``; counts all of them."""

    def __init__(self, wanted: int, both: bool) -> None:
        self.wanted, self.both, self.seen = wanted, both, 0
        self.done: tuple[int, str] | None = None

    def _turn(self, line: int, what: str) -> bool:
        self.seen += 1
        if self.seen - 1 == self.wanted:
            self.done = (line, what)
            return True
        return False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        return node if node.name in SKIPPED_FUNCTIONS else self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        names = {target.id for target in node.targets if isinstance(target, ast.Name)}
        return node if names & SKIPPED_NAMES else self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> ast.AST:
        if isinstance(node.value, bool) or not isinstance(node.value, int):
            return node
        for step in (1, -1) if self.both else (1,):
            if self._turn(node.lineno, f"{node.value} -> {node.value + step}"):
                return ast.copy_location(ast.Constant(node.value + step), node)
        return node

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.op, ast.FloorDiv) and self._turn(node.lineno, "// -> rounded up"):
            negative = ast.UnaryOp(
                ast.USub(), ast.BinOp(ast.UnaryOp(ast.USub(), node.left), ast.FloorDiv(), node.right)
            )
            return ast.copy_location(negative, node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        if isinstance(node.func, ast.Name) and node.func.id in ("whole", "number"):
            return node
        self.generic_visit(node)
        if isinstance(node.func, ast.Name) and node.func.id == "ceil_div" and self._turn(node.lineno, "ceil_div -> //"):
            return ast.copy_location(ast.BinOp(node.args[0], ast.FloorDiv(), node.args[1]), node)
        return node


def mutants(module: str, both: bool) -> Iterator[tuple[int, int, str]]:
    """(number, line, mutation) of every mutant of a module."""
    text = (SOURCE / f"{module}.py").read_text()
    number = 0
    while True:
        mutator = Mutator(number, both)
        mutator.visit(ast.parse(text))
        if mutator.done is None:
            return
        yield number, *mutator.done
        number += 1


def install(module: str, number: int, both: bool) -> None:
    """Put the mutant in ``sys.modules`` before anything imports the original."""
    path = SOURCE / f"{module}.py"
    tree = ast.fix_missing_locations(Mutator(number, both).visit(ast.parse(path.read_text())))
    code = compile(tree, str(path), "exec")

    class Finder:
        """Loads the mutant under the module's name; everything else is imported as usual."""

        def find_spec(self, name: str, _path: object, _target: object = None) -> object:
            if name == f"{PACKAGE}.{module}":
                return importlib.util.spec_from_loader(name, self, origin=str(path))  # type: ignore[arg-type]
            return None

        def create_module(self, _spec: object) -> None:
            return None

        def exec_module(self, loaded: ModuleType) -> None:
            loaded.__file__ = str(path)
            exec(code, loaded.__dict__)

    sys.meta_path.insert(0, Finder())  # type: ignore[arg-type]


def survives(module: str, number: int, both: bool) -> bool:
    """Run the tests against one mutant in a child; True if all passed."""
    child = os.fork()
    if child == 0:
        status = 1
        # A mutant may loop for ever; the signal ends the child, which counts as noticed.
        signal.alarm(TIMEOUT_SECONDS)
        try:
            sink = io.StringIO()
            with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
                install(module, number, both)
                import pytest

                folder = ROOT / "tests/unit/kv_plan"
                quiet = ["-x", "-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:hypothesispytest"]
                status = int(pytest.main([*quiet, *(str(folder / name) for name in TESTS)]))
        except BaseException:
            status = 1
        os._exit(0 if status == 0 else 1)
    _pid, code = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(code) == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--module", choices=MODULES, action="append", help="only this module; repeat for more")
    parser.add_argument("--both", action="store_true", help="also one unit less")
    options = parser.parse_args()
    os.chdir(ROOT)
    sys.path[:0] = [
        str(ROOT / "src"),
        str(ROOT / "collections"),
        str(ROOT / "tests/unit"),
        str(ROOT / "tests/unit/kv_plan"),
    ]
    # Everything slow is imported once; children inherit it. The planner itself must not be imported here.
    import ansible.errors  # noqa: F401
    import hypothesis  # noqa: F401
    import pydantic  # noqa: F401
    import pytest  # noqa: F401
    import rich.table  # noqa: F401
    import typer.testing  # noqa: F401
    import yaml  # noqa: F401

    started, total, survivors = time.monotonic(), 0, []
    for module in options.module or MODULES:
        lines = (SOURCE / f"{module}.py").read_text().splitlines()
        count = 0
        for number, line, what in mutants(module, options.both):
            count += 1
            if survives(module, number, options.both):
                text = lines[line - 1].strip()
                reason = EQUIVALENT.get((module, text, what))
                print(f"{'equivalent' if reason else 'SURVIVED'} {module}.py:{line} {what}: {text}", flush=True)
                if not reason:
                    survivors.append((module, line, what))
        total += count
        print(f"{module}: {count} mutants", flush=True)
    print(f"{total} mutants, {len(survivors)} survived, {time.monotonic() - started:.0f} s")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
