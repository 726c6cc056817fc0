"""Turn an acceptance run into one verdict: a pytest plugin (``-p goodput.verdict``), a runner and a table.

Verdict JSON: ``{"ok", "exit", "reason", "generated", "seconds", "nodes": {name: {layer: [{check, ok, found, required,
remedy}]}}, "failures": [...], "skipped": [...]}``. Exit 0: all ok. 1: a check failed, or none ran. 2: could not run.
Checks of no single node stand under the name ``site``.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

SITE = "site"
JOURNAL_LINES = 40
_JOURNAL_SHOWN = 10
_VALUE_SHOWN = 400
ROOT = Path(__file__).resolve().parents[2]
_LAYER_FILE = re.compile(r"(?:test|deep)_(?:\d+_)?(?P<layer>.+)\.py")


# --- the verdict ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One check on one node. ``skipped`` holds the reason of a skip, ``journal`` the lines of each unit concerned."""

    node: str
    layer: str
    check: str
    ok: bool
    found: str = ""
    required: str = ""
    remedy: str = ""
    skipped: str = ""
    journal: dict[str, list[str]] = field(default_factory=dict)

    def contract(self) -> dict[str, Any]:
        return {
            "check": self.check,
            "ok": self.ok,
            "found": self.found,
            "required": self.required,
            "remedy": self.remedy,
        }

    def failure(self) -> dict[str, Any]:
        entry = {"node": self.node, "layer": self.layer, **self.contract()}
        del entry["ok"]
        return entry | ({"journal": self.journal} if self.journal else {})


@dataclass(frozen=True)
class Verdict:
    """The outcome of one acceptance run; ``reason`` says why it could not run or why no check counts."""

    rows: tuple[Row, ...]
    exit_code: int
    reason: str = ""
    seconds: float = 0.0
    generated: str = ""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    def to_dict(self) -> dict[str, Any]:
        nodes: dict[str, dict[str, list[dict[str, Any]]]] = {}
        for row in self.rows:
            if not row.skipped:
                nodes.setdefault(row.node, {}).setdefault(row.layer, []).append(row.contract())
        return {
            "ok": self.ok,
            "exit": self.exit_code,
            "reason": self.reason,
            "generated": self.generated,
            "seconds": round(self.seconds, 1),
            "nodes": nodes,
            "failures": [row.failure() for row in self.rows if not row.ok and not row.skipped],
            "skipped": [
                {"node": row.node, "layer": row.layer, "check": row.check, "reason": row.skipped}
                for row in self.rows
                if row.skipped
            ],
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Verdict:
        journals = {(f["node"], f["layer"], f["check"]): f.get("journal", {}) for f in data["failures"]}
        rows = [
            Row(node, layer, journal={} if entry["ok"] else journals.get((node, layer, entry["check"]), {}), **entry)
            for node, layers in data["nodes"].items()
            for layer, entries in layers.items()
            for entry in entries
        ]
        rows += [Row(s["node"], s["layer"], s["check"], True, skipped=s["reason"]) for s in data["skipped"]]
        return cls(tuple(rows), data["exit"], data["reason"], data["seconds"], data["generated"])

    @classmethod
    def could_not_run(cls, reason: str) -> Verdict:
        return cls((), 2, reason, generated=_now())

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(path.name + ".new")
        temporary.write_text(json.dumps(self.to_dict(), indent=2) + "\n")
        temporary.replace(path)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def judge(
    rows: Sequence[Row],
    *,
    pytest_exit: int,
    reason: str = "",
    present: Sequence[str] = (),
    asked: Sequence[str] = (),
    seconds: float = 0.0,
) -> Verdict:
    """Decide. ``present``: layers that have a test file; ``asked``: layers that the caller named.

    A present layer must have collected a check, an asked one must have run one, and the whole run at least one:
    silence is not success.
    """
    executed = {row.layer for row in rows if not row.skipped}
    collected = {row.layer for row in rows}
    found = list(rows)
    silent: dict[str, str] = {layer: "no checks were collected" for layer in present if layer not in collected}
    silent |= {layer: "no checks ran" for layer in asked if layer not in executed}
    could_run = pytest_exit in (0, 1, 5)
    if could_run:
        for layer, text in silent.items():
            remedy = f"look for tests/acceptance/test_*_{layer}.py"
            found.append(Row(SITE, layer, "The layer has checks", False, text, "at least one", remedy))
    if could_run:
        if not executed:
            exit_code, reason = 1, reason or "no checks ran"
        else:
            exit_code = 1 if any(not row.ok and not row.skipped for row in found) else 0
            if pytest_exit == 1 and exit_code == 0:
                exit_code, reason = 1, reason or "pytest reports a failure outside any check"
    else:
        exit_code, reason = 2, reason or f"pytest ended with exit {pytest_exit}"
    return Verdict(tuple(found), exit_code, reason, seconds, _now())


# --- what tests use ---------------------------------------------------------------------------------------------------


class CheckFailed(AssertionError):
    """A recorded check whose found value is not the required one."""


class Check:
    """``check(found, required, remedy)``: record one row of the verdict and fail the test if it is not ok."""

    def __init__(self, item: pytest.Item) -> None:
        self._item = item

    def __call__(
        self,
        found: object,
        required: object,
        remedy: str,
        *,
        ok: bool | None = None,
        what: str | None = None,
        unit: str | None = None,
        node: object | None = None,
    ) -> None:
        """``ok`` defaults to ``found == required``; with it, ``required`` is a text such as "at least 9000".

        ``what`` tells apart several rows of one test, ``unit`` is the systemd unit whose journal helps,
        ``node`` the node (or its name) that a check without ``host`` found at fault.
        """
        __tracebackhide__ = True
        passed = found == required if ok is None else bool(ok)
        if not passed and isinstance(found, dict) and isinstance(required, dict):
            # Only what differs helps.
            keys = [key for key in required if found.get(key) != required[key]] or list(required)
            found, required = {key: found.get(key) for key in keys}, {key: required[key] for key in keys}
        row = {
            "what": what,
            "ok": passed,
            "found": str(found),
            "required": str(required),
            "remedy": remedy,
            "unit": unit,
            "node": None if node is None else str(getattr(node, "name", node)),
        }
        self._item.user_properties.append((_PROPERTY, row))
        if not passed:
            name = title(self._item) + (f": {what}" if what else "")
            raise CheckFailed(f"{name}: found {found}, required {required}. Remedy: {remedy}")


_PROPERTY = "goodput_check"
_REASON = pytest.StashKey[str]()
_HOSTS = pytest.StashKey[list[Any]]()


def could_not_run(config: pytest.Config, reason: str) -> NoReturn:
    """End the acceptance run with exit 2 and this reason in the verdict."""
    config.stash[_REASON] = reason
    pytest.exit(reason, returncode=2)


def set_nodes(config: pytest.Config, hosts: Sequence[Any]) -> None:
    """Tell the plugin the connected nodes (``.name``, ``.session``): the journals come from them."""
    config.stash[_HOSTS] = list(hosts)


def title(item: pytest.Item) -> str:
    """The name of a check: first line of the test's docstring, else the test's name in words; with its parameters."""
    function = getattr(item, "function", None)
    doc = (getattr(function, "__doc__", None) or "").strip()
    text = doc.splitlines()[0].strip().rstrip(".") if doc else getattr(item, "originalname", item.name)
    if not doc:
        text = text.removeprefix("test_").replace("_", " ")
    spec = getattr(item, "callspec", None)
    # The node is a column of its own.
    extra = [str(value) for name, value in spec.params.items() if name != "host"] if spec else []
    return f"{text} ({', '.join(extra)})" if extra else text


def layer_of(path: Path) -> str:
    """``test_30_rdma.py`` -> ``rdma``."""
    match = _LAYER_FILE.fullmatch(path.name)
    return match["layer"] if match else path.stem


# --- the plugin -------------------------------------------------------------------------------------------------------


class Recorder:
    """Collects rows during the run and judges at its end."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.asked = [name for name in (config.getoption("goodput_layers") or "").split(",") if name]
        self.rows: list[Row] = []
        self.present: list[str] = []
        self.errors: list[str] = []
        self.verdict: Verdict | None = None
        self.started = time.monotonic()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        if self.asked:
            away = [item for item in items if layer_of(item.path) not in self.asked]
            items[:] = [item for item in items if layer_of(item.path) in self.asked]
            config.hook.pytest_deselected(items=away)

    def pytest_collect_file(self, file_path: Path, parent: pytest.Collector) -> None:
        wanted = any(file_path.match(pattern) for pattern in parent.config.getini("python_files"))
        if wanted and _LAYER_FILE.fullmatch(file_path.name):
            layer = layer_of(file_path)
            if layer not in self.present and (not self.asked or layer in self.asked):
                self.present.append(layer)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            text = str(report.longrepr).strip().splitlines()
            self.errors.append(f"{report.nodeid}: {text[-1] if text else 'collection failed'}")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "call" or report.outcome != "passed":
            self._record(item, call, report)
        return report

    def _record(self, item: pytest.Item, call: pytest.CallInfo[None], report: pytest.TestReport) -> None:
        spec = getattr(item, "callspec", None)
        node = str(spec.params["host"]) if spec and "host" in spec.params else SITE
        layer, name = layer_of(item.path), title(item)
        units = [str(argument) for mark in item.iter_markers("unit") for argument in mark.args]
        error = call.excinfo.value if call.excinfo else None
        if report.skipped:
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(getattr(report, "wasxfail", ""))
            reason = reason.removeprefix("Skipped: ") or "no reason given"
            self.rows.append(Row(node, layer, name, True, skipped=reason))
            return
        recorded: list[Any] = [value for key, value in item.user_properties if key == _PROPERTY]
        for entry in recorded if report.when == "call" else []:
            where = entry["node"] or node
            wanted = units + ([entry["unit"]] if entry["unit"] else [])
            self.rows.append(
                Row(
                    where,
                    layer,
                    f"{name}: {entry['what']}" if entry["what"] else name,
                    entry["ok"],
                    entry["found"],
                    entry["required"],
                    entry["remedy"],
                    journal={} if entry["ok"] else self._journals(where, wanted),
                )
            )
        if report.passed and not recorded:
            self.rows.append(Row(node, layer, name, True))
        if report.failed and not isinstance(error, CheckFailed):
            remedy = " ".join(str(argument) for mark in item.iter_markers("remedy") for argument in mark.args)
            found = _describe(error, call)
            self.rows.append(Row(node, layer, name, False, found, name, remedy, journal=self._journals(node, units)))

    def _journals(self, node: str, units: Sequence[str]) -> dict[str, list[str]]:
        """The state and last lines of each unit on ``node`` (on every node for a site check)."""
        answers: dict[str, list[str]] = {}
        for host in self.config.stash.get(_HOSTS, []):
            if node not in (SITE, host.name):
                continue
            for unit in dict.fromkeys(units):
                try:
                    state, journal = host.session.run_many(
                        [
                            f"systemctl show -p ActiveState,SubState,Result,NRestarts {unit}",
                            f"journalctl -u {unit} -n {JOURNAL_LINES} --no-pager --no-hostname -o short-iso",
                        ],
                        60,
                    )
                except Exception as problem:  # the failure itself must be reported whatever happens here
                    answers[f"{unit} on {host.name}"] = [f"journal not readable: {problem}"]
                    continue
                lines = [" ".join(state.stdout.split()), *(journal.stdout or journal.stderr).splitlines()]
                answers[f"{unit} on {host.name}"] = [line for line in lines if line]
        return answers

    def pytest_sessionfinish(self, session: pytest.Session, exitstatus: int | pytest.ExitCode) -> None:
        reason = self.config.stash.get(_REASON, "")
        code = int(exitstatus)
        if self.errors:
            code, reason = 2, reason or "collection failed: " + "; ".join(self.errors)
        self.verdict = judge(
            self.rows,
            pytest_exit=2 if reason else code,
            reason=reason,
            present=self.present,
            asked=self.asked,
            seconds=time.monotonic() - self.started,
        )
        session.exitstatus = self.verdict.exit_code
        output = self.config.getoption("goodput_output")
        if output:
            self.verdict.write(Path(output))

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        if self.verdict is not None:
            terminalreporter.write(to_text(self.verdict))


_RECORDER = pytest.StashKey[Recorder]()


def _describe(error: BaseException | None, call: pytest.CallInfo[None]) -> str:
    """One line for an exception: the assertion's own words, else its type and place."""
    if error is None:
        return "the test failed without an exception"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if isinstance(error, AssertionError):
        return text
    # The test's own line says more than the library's.
    frames = list(call.excinfo.traceback) if call.excinfo else []
    frames = [frame for frame in frames if _LAYER_FILE.fullmatch(Path(frame.path).name)] or frames
    where = f" ({Path(frames[-1].path).name}:{frames[-1].lineno + 1})" if frames else ""
    return f"{type(error).__name__}: {text}{where}"


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("goodput")
    group.addoption("--goodput-output", default=None, help="write the verdict JSON to this file")
    group.addoption("--goodput-layers", default=None, help="comma-separated layers; each must run a check")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unit(name): systemd unit whose journal belongs to this check")
    config.addinivalue_line("markers", "remedy(text): what to do if a plain assertion of this test fails")
    if _RECORDER not in config.stash and not hasattr(config, "workerinput"):
        config.stash[_RECORDER] = Recorder(config)
        config.pluginmanager.register(config.stash[_RECORDER], "goodput-recorder")


# --- the table --------------------------------------------------------------------------------------------------------


def render(verdict: Verdict, *, every_check: bool = False) -> RenderableType:
    """A summary by layer and node, then every failure with cause, remedy and journal, then skips with their reason."""
    parts: list[RenderableType] = []
    counted = [row for row in verdict.rows if not row.skipped]
    names = list(dict.fromkeys(row.node for row in counted))
    # The site column comes last.
    names.sort(key=lambda name: name == SITE)
    layers = list(dict.fromkeys(row.layer for row in counted))
    if counted:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("layer", no_wrap=True)
        for name in names:
            table.add_column(name, no_wrap=True)
        for layer in layers:
            table.add_row(layer, *(_cell([r for r in counted if (r.layer, r.node) == (layer, name)]) for name in names))
        parts.append(table)
    if every_check and counted:
        detail = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for column in ("node", "layer", "check", "", "found", "required"):
            detail.add_column(column, no_wrap=column in ("node", "layer", ""), overflow="fold")
        order = sorted(counted, key=lambda row: (names.index(row.node), layers.index(row.layer)))
        for row in order:
            detail.add_row(row.node, row.layer, row.check, _mark(row.ok), row.found, row.required)
        parts.append(detail)
    alike: dict[tuple[str, ...], list[Row]] = {}
    for row in counted:
        if not row.ok:
            alike.setdefault((row.layer, row.check, row.found, row.required, row.remedy), []).append(row)
    seen: set[str] = set()
    parts += [_failure(rows, seen) for rows in alike.values()]
    skips: dict[tuple[str, str], list[str]] = {}
    for row in verdict.rows:
        if row.skipped:
            skips.setdefault((row.layer, row.skipped), []).append(row.node)
    for (layer, reason), where in skips.items():
        parts.append(Text(f"skipped  {layer}: {reason} ({_count(where)})", style="yellow"))
    parts.append(_headline(verdict, counted))
    return Group(*parts)


def _count(nodes: Sequence[str]) -> str:
    return ", ".join(
        f"{nodes.count(name)} on {name}" if nodes.count(name) > 1 else name for name in dict.fromkeys(nodes)
    )


def _mark(ok: bool) -> Text:
    return Text("ok", style="green") if ok else Text("FAILED", style="bold red")


def _cell(rows: Sequence[Row]) -> Text:
    if not rows:
        return Text("-", style="dim")
    bad = sum(not row.ok for row in rows)
    return Text(f"{bad} of {len(rows)} FAILED", style="bold red") if bad else Text(f"{len(rows)} ok", style="green")


def _failure(rows: Sequence[Row], seen: set[str]) -> RenderableType:
    """One failure that all ``rows`` share; a journal already ``seen`` is not repeated."""
    row, where = rows[0], ", ".join(dict.fromkeys(row.node for row in rows))
    body: list[RenderableType] = [
        Text.assemble(("FAILED", "bold red"), f"  {where}  {row.layer}  ", (row.check, "bold"))
    ]
    for label, value in (("found", row.found), ("required", row.required), ("remedy", row.remedy)):
        if value and not (label == "required" and value == row.check):
            text = value if len(value) <= _VALUE_SHOWN else f"{value[:_VALUE_SHOWN]} …"
            body.append(Text.assemble((f"  {label:<9}", "cyan"), text))
    for unit, journal in (pair for each in rows for pair in each.journal.items()):
        if unit in seen:
            continue
        seen.add(unit)
        # The state and the end; the JSON has all of it.
        body.append(Text(f"  journal of {unit}:", style="cyan"))
        for line in (*journal[:1], *journal[1:][-_JOURNAL_SHOWN:]):
            body.append(Text(f"    {line}", style="dim", no_wrap=True, overflow="ellipsis"))
    body.append(Text(""))
    return Group(*body)


def _headline(verdict: Verdict, rows: Sequence[Row]) -> Text:
    bad = sum(not row.ok for row in rows)
    took = f" in {verdict.seconds:.0f} s" if verdict.seconds else ""
    if verdict.exit_code == 2:
        return Text(f"COULD NOT RUN: {verdict.reason}", style="bold red")
    if verdict.ok:
        return Text(f"OK: {len(rows)} checks{took}", style="bold green")
    if bad:
        return Text(f"NOT OK: {bad} of {len(rows)} checks failed{took}", style="bold red")
    return Text(f"NOT OK: {verdict.reason}", style="bold red")


def to_text(verdict: Verdict, *, width: int = 120, every_check: bool = False) -> str:
    """The table as plain text, one trailing newline."""
    console = Console(width=width, no_color=True, color_system=None, highlight=False, force_terminal=False)
    with console.capture() as capture:
        console.print(render(verdict, every_check=every_check), soft_wrap=False)
    return "\n".join(line.rstrip() for line in capture.get().splitlines()) + "\n"


def short_text(verdict: Verdict) -> str:
    """Cause and remedy of each failure, two lines each: the message of a failed task."""
    if verdict.exit_code == 2:
        return f"could not run: {verdict.reason}"
    lines = []
    for failure in verdict.to_dict()["failures"]:
        lines.append(f"{failure['node']} {failure['layer']}: {failure['check']}: found {failure['found'] or 'nothing'}")
        needed = f", required {failure['required']}" if failure["required"] not in ("", failure["check"]) else ""
        lines[-1] += needed
        if failure["remedy"]:
            lines.append(f"  remedy: {failure['remedy']}")
    return "\n".join(lines) or verdict.reason


# --- the runner -------------------------------------------------------------------------------------------------------


def run(
    inventory: Path,
    layers: Sequence[str] = (),
    output: Path | None = None,
    *,
    limit: str | None = None,
    suite: Path | None = None,
    pattern: str = "sparks",
    python: str = sys.executable,
    on_output: Callable[[str], None] | None = None,
) -> Verdict:
    """Run the acceptance suite in a Python of its own and return its verdict (also written to ``output``)."""
    with tempfile.TemporaryDirectory() as folder:
        target = output or Path(folder) / "verdict.json"
        target.unlink(missing_ok=True)
        argv = [python, "-m", "goodput.verdict", "--inventory", str(inventory), "--output", str(target)]
        argv += ["--hosts", pattern]
        argv += [part for layer in layers for part in ("--layer", layer)]
        argv += ["--limit", limit] if limit else []
        argv += ["--suite", str(suite)] if suite else []
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=False)
        if on_output is not None:
            on_output(done.stdout)
        if target.exists():
            return Verdict.from_dict(json.loads(target.read_text()))
        said = (done.stderr or done.stdout).strip().splitlines()
        return Verdict.could_not_run(said[-1] if said else f"the suite ended with exit {done.returncode}")


def suite_arguments(options: argparse.Namespace) -> list[str]:
    """The pytest command line of one acceptance run: no project configuration, no plugin that is not needed."""
    arguments = ["-c", os.devnull, "--rootdir", str(options.suite), "--import-mode", "importlib"]
    arguments += ["-p", "no:cacheprovider"]
    arguments += ["-p", "testinfra.plugin", "-p", "goodput.verdict"]
    arguments += ["-q", "--no-header", "--tb=short", "--durations=20"] if options.verbose else ["-p", "no:terminal"]
    arguments += ["--hosts", f"ansible://{options.hosts}", "--ansible-inventory", str(options.inventory)]
    arguments += ["--goodput-output", str(options.output)]
    if options.layer:
        arguments += ["--goodput-layers", ",".join(options.layer)]
    if options.limit:
        arguments += ["--limit", options.limit]
    if options.deep:
        arguments += ["-o", "python_files=test_*.py deep_*.py"]
    return [*arguments, str(options.suite)]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the suite; the table goes to stdout, cause and remedy of failures to stderr."""
    parser = argparse.ArgumentParser(prog="goodput.verdict", description=__doc__)
    parser.add_argument("--inventory", type=Path, required=True)
    parser.add_argument("--hosts", default="sparks", help="group or pattern of nodes (default: sparks)")
    parser.add_argument("--limit", help="narrow the nodes further")
    parser.add_argument("--layer", action="append", default=[], help="only this layer; may be repeated")
    parser.add_argument("--deep", action="store_true", help="also prove each tier: minutes, restarts LMCache")
    parser.add_argument("--suite", type=Path, default=ROOT / "tests/acceptance", help="folder of the tests")
    parser.add_argument("--output", type=Path, default=Path(".goodput/verdict.json"))
    parser.add_argument("--json", action="store_true", help="print the verdict as JSON instead of the table")
    parser.add_argument("--all", action="store_true", help="list every check, not only failures")
    parser.add_argument("--verbose", action="store_true", help="pytest's own output too")
    parser.add_argument("--width", type=int, default=120)
    options = parser.parse_args(argv)
    options.suite, options.output = options.suite.resolve(), options.output.resolve()
    options.output.unlink(missing_ok=True)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    if not options.suite.is_dir():
        verdict = Verdict.could_not_run(f"found no acceptance suite at {options.suite}")
    else:
        try:
            code = int(pytest.main(suite_arguments(options)))
            verdict = (
                Verdict.from_dict(json.loads(options.output.read_text()))
                if options.output.exists()
                else Verdict.could_not_run(f"pytest ended with exit {code} before any check")
            )
        except ImportError as error:
            verdict = Verdict.could_not_run(f"a Python package is missing: {error}")
    verdict.write(options.output)
    if options.json:
        print(json.dumps(verdict.to_dict(), indent=2))
    else:
        print(to_text(verdict, width=options.width, every_check=options.all), end="")
    if not verdict.ok:
        print(short_text(verdict), file=sys.stderr)
    return verdict.exit_code


if __name__ == "__main__":
    # Run as a module this file would exist twice (here and as pytest's plugin), with two sets of stash keys.
    from goodput.verdict import main as plugin_main

    sys.exit(plugin_main())
