#!/usr/bin/env python3
"""Kill a playbook in one task, start it again, kill it in the next: what a run leaves must not stop the one after it.

``interrupt.py PLAYBOOK TASK... -- ANSIBLE-PLAYBOOK ARGUMENTS``. A task is named by a part of its header. Exit 1 if a
run ended before its task.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path

#: So that the task is at work, not only announced.
SECONDS_INTO_THE_TASK = 3.0
MARK = "GOODPUT_INTERRUPTED_RUN"


def end(process: subprocess.Popen[str], mark: str) -> None:
    """The run and what it started: connections of a strategy plugin have sessions of their own, and outlive it."""
    os.killpg(process.pid, signal.SIGKILL)
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in environment.read_bytes().split(b"\0"):
                os.kill(int(environment.parent.name), signal.SIGKILL)


def run_until(command: list[str], task: str) -> tuple[bool, float, list[str]]:
    """Whether the run was killed in the task, after how many seconds, and its last lines."""
    start = time.monotonic()
    mark = uuid.uuid4().hex
    process = subprocess.Popen(
        command,
        env=os.environ | {MARK: mark},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    last: list[str] = []
    killed = False
    for line in process.stdout:
        last = [*last[-40:], line.rstrip()]
        if not killed and line.startswith("TASK [") and task in line:
            time.sleep(SECONDS_INTO_THE_TASK)
            end(process, mark)
            killed = True
    process.wait()
    return killed, time.monotonic() - start, last


def main() -> int:
    words = sys.argv[1:]
    cut = words.index("--") if "--" in words else len(words)
    playbook, *tasks = words[:cut]
    command = ["ansible-playbook", playbook, *words[cut + 1 :]]
    for task in tasks:
        killed, seconds, last = run_until(command, task)
        print(f"{'killed in' if killed else 'ended before'} {task!r} after {seconds:.0f} s", flush=True)
        if not killed:
            print("\n".join(last))
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
