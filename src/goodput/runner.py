"""Run a playbook through ansible-runner: events in, one Outcome out. Nothing here that plain ansible-playbook lacks."""

from __future__ import annotations

import configparser
import contextlib
import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from goodput.progress import Run

ROOT = Path(__file__).resolve().parents[2]
# After a polite interrupt Ansible gets this long to end its workers.
_GRACE_S = 15.0
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class CouldNotRun(Exception):
    """Nothing was started; the message says what to do."""


@dataclass(frozen=True)
class Request:
    """One playbook run. ``inventory`` is a path, or None for the controller alone."""

    playbook: str
    inventory: Path | None
    limit: str | None = None
    tags: str | None = None
    skip_tags: str | None = None
    check: bool = False
    extra_vars: tuple[str, ...] = ()
    verbosity: int = 0
    become_password: str | None = field(default=None, repr=False)
    remember: bool = True

    @property
    def full(self) -> bool:
        """True for a whole run, whose times are worth remembering."""
        return self.remember and not (self.limit or self.tags or self.skip_tags or self.check)

    @property
    def kind(self) -> str:
        """Playbook and kind of inventory: the key under which times are remembered."""
        return f"{Path(self.playbook).stem}@{self.inventory.name if self.inventory else 'localhost'}"

    def arguments(self) -> list[str]:
        """The command line of ansible-playbook, without the playbook."""
        argv = ["-i", str(self.inventory) if self.inventory else "localhost,"]
        for option, value in (("--limit", self.limit), ("--tags", self.tags), ("--skip-tags", self.skip_tags)):
            argv += [option, value] if value else []
        argv += ["--check"] if self.check else []
        for pair in self.extra_vars:
            argv += ["-e", pair]
        argv += ["-" + "v" * self.verbosity] if self.verbosity else []
        argv += ["--ask-become-pass"] if self.become_password is not None else []
        return argv


@dataclass
class Outcome:
    """``exit_code``: 0 ok, 1 a task failed, 2 could not run or unreachable, 130 interrupted."""

    run: Run
    exit_code: int
    folder: Path
    seconds: float
    reason: str = ""

    @property
    def ok(self) -> bool:
        return self.exit_code == 0

    @property
    def log(self) -> Path:
        return self.folder / "stdout.log"


def inventory_environment(inventory: Path | None) -> dict[str, str]:
    """The KEY=VALUE lines of ``ansible.env`` in an inventory folder, if it has one (only the virtual pair does)."""
    path = inventory / "ansible.env" if inventory is not None else None
    if path is None or not path.is_file():
        return {}
    values = {}
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = shlex.split(line, comments=True)
        if not words:
            continue
        key, equals, value = words[0].partition("=")
        if len(words) > 1 or not equals or not key.isidentifier():
            raise CouldNotRun(f"{path}:{number}: found {line!r}, required KEY=VALUE")
        values[key] = value
    return values


def environment(request: Request, state: Path) -> dict[str, str]:
    """What Ansible's environment gets on top of ours."""
    config = os.environ.get("ANSIBLE_CONFIG", str(ROOT / "ansible.cfg"))
    parsed = configparser.ConfigParser(interpolation=None)
    parsed.read(config)
    values = {
        "ANSIBLE_CONFIG": config,
        # ansible-runner switches host key checking off unless told otherwise.
        "ANSIBLE_HOST_KEY_CHECKING": os.environ.get(
            "ANSIBLE_HOST_KEY_CHECKING", parsed.get("defaults", "host_key_checking", fallback="True")
        ),
        "ANSIBLE_NOCOLOR": "1",
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath))),
        "GOODPUT_STATE": str(state),
    }
    if request.become_password is not None:
        # The acceptance suite opens its own shells.
        values["GOODPUT_BECOME_PASSWORD"] = request.become_password
    return values | inventory_environment(request.inventory)


def new_folder(state: Path) -> Path:
    """``runs/<time>/``, unique, with ``runs/latest`` pointing at it."""
    runs = state / "runs"
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    for suffix in ("", *(f"-{number}" for number in range(2, 100))):
        folder = runs / (stamp + suffix)
        try:
            folder.mkdir(parents=True, mode=0o700)
        except FileExistsError:
            continue
        latest = runs / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(folder.name)
        return folder
    raise CouldNotRun(f"found 99 runs that began in the same second under {runs}")


class _Interrupts:
    """Ctrl-C: first ask Ansible's process group to stop, then (again, or after a while) have the runner kill it."""

    def __init__(self, run: Run, on_interrupt: Callable[[], None]) -> None:
        self.run, self.on_interrupt = run, on_interrupt
        self.count = 0
        self.since = 0.0
        self._former: dict[int, Any] = {}

    def __enter__(self) -> _Interrupts:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._former[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
        if self.count > 1:
            return
        self.since = time.monotonic()
        self.on_interrupt()
        if self.run.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.run.pid, signal.SIGINT)

    def must_kill(self) -> bool:
        if not self.count:
            return False
        return self.count > 1 or self.run.pid is None or time.monotonic() - self.since > _GRACE_S


def execute(
    request: Request,
    state: Path,
    *,
    run: Run | None = None,
    on_event: Callable[[], None] = lambda: None,
    on_interrupt: Callable[[], None] = lambda: None,
) -> Outcome:
    """Run the playbook and keep its log, events and summary in a new folder under ``state/runs``."""
    playbook = Path(request.playbook) if Path(request.playbook).is_absolute() else ROOT / request.playbook
    if not playbook.is_file():
        raise CouldNotRun(f"found no playbook {playbook}")
    if request.inventory is not None and not request.inventory.exists():
        raise CouldNotRun(f"found no inventory at {request.inventory}")
    added = environment(request, state)
    # Imported late: it costs a second that `goodput --help` need not pay.
    import ansible_runner

    folder = new_folder(state)
    run = run if run is not None else Run()
    started = time.monotonic()
    with (folder / "events.jsonl").open("w") as events, _Interrupts(run, on_interrupt) as interrupts:

        def handle(event: dict[str, Any]) -> bool:
            _write_event(events, event)
            run.feed(event)
            on_event()
            return False  # ours is the only copy

        result = ansible_runner.run(
            private_data_dir=str(folder),
            artifact_dir=str(folder / "artifacts"),
            ident="ansible",
            project_dir=str(ROOT),
            playbook=str(playbook),
            cmdline=shlex.join(request.arguments()),
            envvars=added,
            passwords=None if request.become_password is None else {r"BECOME password.*:\s*$": request.become_password},
            # Nothing that may hold a secret is written down for the runner.
            suppress_env_files=True,
            settings={"pexpect_timeout": 1},
            fact_cache_type="memory",
            quiet=True,
            event_handler=handle,
            cancel_callback=interrupts.must_kill,
        )
    run.interrupted(time.time())
    artifacts = folder / "artifacts/ansible"
    text = _ANSI.sub("", (artifacts / "stdout").read_text(errors="replace").replace("\r\n", "\n"))
    (folder / "stdout.log").write_text(text)
    shutil.rmtree(folder / "artifacts")
    code, reason = _judge(run, int(result.rc or 0), bool(interrupts.count), text)
    outcome = Outcome(run, code, folder, time.monotonic() - started, reason)
    summary = {
        "playbook": request.playbook,
        "inventory": str(request.inventory) if request.inventory else None,
        "arguments": [item for item in request.arguments() if item not in request.extra_vars],
        "exit": code,
        "reason": reason,
        "wall_seconds": round(outcome.seconds, 1),
        **run.to_dict(),
        "tasks": run.tasks_to_dict(),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    return outcome


def _write_event(stream: TextIO, event: dict[str, Any]) -> None:
    stream.write(json.dumps(event, default=str) + "\n")


def _judge(run: Run, rc: int, interrupted: bool, log: str) -> tuple[int, str]:
    if interrupted:
        return 130, "interrupted"
    if any(not failure.unreachable for failure in run.failures):
        return 1, "a task failed"
    if run.failures:
        return 2, "unreachable: " + ", ".join(failure.host for failure in run.failures)
    if rc == 0 and not any(task.hosts for task in run.tasks):
        return 2, "no task ran: check --tags and --limit"
    if rc == 0:
        return 0, ""
    return (1 if any(task.hosts for task in run.tasks) else 2), _last_error(log) or f"ansible-playbook ended with {rc}"


def _last_error(log: str) -> str:
    """The paragraph of Ansible's first error in its output (a syntax error, a bad option, no host)."""
    lines = log.splitlines()
    for number, line in enumerate(lines):
        if line.startswith(("ERROR!", "[ERROR]:", "ansible-playbook: error:")):
            end = next((i for i in range(number, len(lines)) if not lines[i].strip()), len(lines))
            return "\n".join(lines[number : min(end, number + 12)])
    said = [line for line in lines if line.strip()]
    return said[-1] if said else ""
