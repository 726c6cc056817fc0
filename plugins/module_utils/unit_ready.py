# Apache-2.0 (see LICENSE)
"""Wait until a systemd unit is up and, if asked, answers; otherwise say why not, with its journal.

Only reads. ``wait`` polls on the node, so that a play needs one task for it. Durations are seconds.
"""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

# argv -> (exit status, stdout, stderr)
Run = Callable[[Sequence[str]], tuple[int, str, str]]
PROPERTIES = (
    "LoadState",
    "ActiveState",
    "SubState",
    "Result",
    "ExecMainStatus",
    "NRestarts",
    "Job",
    "ConditionResult",
    "ActiveEnterTimestampMonotonic",
)
STARTING = ("activating", "reloading", "refreshing")
POLL_SECONDS = 1.0
# One request may take this long; a service that answers later than this is not ready.
REQUEST_SECONDS = 10.0
# An inactive unit without a queued job may just be between a stop and a start.
INACTIVE_POLLS = 3


def run_command(argv: Sequence[str]) -> tuple[int, str, str]:
    try:
        done = subprocess.run(list(argv), capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        return 127, "", str(error)
    return done.returncode, done.stdout, done.stderr


def uptime_seconds() -> float:
    # The clock of systemd's *Monotonic properties.
    return time.clock_gettime(time.CLOCK_MONOTONIC)


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    def redirect_request(self, *_arguments: object, **_keywords: object) -> None:
        return None


def fetch(url: str) -> tuple[int, str]:
    """(status, body) of one GET, without proxies or redirects; OSError when nothing answers."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    try:
        with opener.open(url, timeout=REQUEST_SECONDS) as answer:
            return answer.status, answer.read(1024 * 1024).decode(errors="replace")
    except urllib.error.HTTPError as error:
        return error.code, error.read(4096).decode(errors="replace")
    except urllib.error.URLError as error:
        raise OSError(str(error.reason)) from error


def connect(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=REQUEST_SECONDS):
        pass


@dataclass(frozen=True)
class Probe:
    """What must hold besides an active unit. ``stable_seconds``: active without interruption for so long."""

    url: str | None = None
    status: int = 200
    contains: str | None = None
    port: int | None = None
    stable_seconds: float = 3.0

    def required(self) -> str:
        words = [f"active for {self.stable_seconds:g} s"]
        if self.port is not None:
            words.append(f"port {self.port} accepts connections")
        if self.url is not None:
            words.append(
                f"GET {self.url} answers {self.status}" + (f" with {self.contains!r}" if self.contains else "")
            )
        return ", ".join(words)


@dataclass
class Ready:
    """``state``: active, failed (it will not come up by itself) or timeout; ``reason`` is empty when active."""

    state: str
    reason: str = ""
    seconds: float = 0.0
    journal: list[str] = field(default_factory=list)


@dataclass
class Waiter:
    run: Run = run_command
    fetch: Callable[[str], tuple[int, str]] = fetch
    connect: Callable[[int], None] = connect
    # Seconds since boot; also what systemd's timestamps count.
    clock: Callable[[], float] = uptime_seconds
    sleep: Callable[[float], None] = time.sleep

    def properties(self, name: str) -> dict[str, str]:
        status, out, err = self.run(("systemctl", "show", f"--property={','.join(PROPERTIES)}", "--", name))
        if status != 0:
            return {"LoadState": "unreadable", "error": (err or out).strip()}
        return dict(line.partition("=")[::2] for line in out.splitlines())

    def journal(self, name: str, lines: int) -> list[str]:
        """Last lines of the unit's journal; what went wrong when it can not be read."""
        if lines <= 0:
            return []
        status, out, err = self.run(
            ("journalctl", f"--unit={name}", f"--lines={lines}", "--no-pager", "--output=short-iso", "--quiet")
        )
        return (out if status == 0 else f"journalctl failed: {(err or out).strip()}").splitlines()

    def answer(self, probe: Probe) -> str:
        """Why the probe is not satisfied yet; empty when it is."""
        if probe.port is not None:
            try:
                self.connect(probe.port)
            except OSError as error:
                return f"port {probe.port}: {error}"
        if probe.url is None:
            return ""
        try:
            status, body = self.fetch(probe.url)
        # http.client's own errors (a peer that speaks no HTTP) are no OSError.
        except Exception as error:
            return f"{probe.url}: {error or type(error).__name__}"
        if status != probe.status:
            return f"{probe.url} answered {status}: {' '.join(body.split())[:200]}"
        if probe.contains is not None and probe.contains not in body:
            return f"{probe.url} answered {status} without {probe.contains!r}: {' '.join(body.split())[:200]}"
        return ""

    def wait(self, name: str, probe: Probe, timeout_seconds: float, journal_lines: int = 40) -> Ready:
        began = self.clock()
        inactive = 0
        while True:
            found = self.properties(name)
            state, reason = self.judge(name, found, probe)
            inactive = inactive + 1 if state == "inactive" else 0
            if state == "inactive" and inactive >= INACTIVE_POLLS:
                state = "failed"
            seconds = self.clock() - began
            if state == "active":
                return Ready("active", seconds=seconds)
            if state == "failed" or seconds >= timeout_seconds:
                final = "failed" if state == "failed" else "timeout"
                return Ready(final, reason, seconds, self.journal(name, journal_lines))
            self.sleep(POLL_SECONDS)

    def judge(self, name: str, found: dict[str, str], probe: Probe) -> tuple[str, str]:
        """(active, waiting, inactive or failed; reason) from one look at the unit."""
        load, active = found.get("LoadState", ""), found.get("ActiveState", "")
        result = (
            f"state {active} ({found.get('SubState', '')}), result {found.get('Result', '')}, "
            f"exit status {found.get('ExecMainStatus') or '0'}, {found.get('NRestarts') or '0'} restarts"
        )
        if load != "loaded":
            return "failed", f"unit is {load}" + (f": {found['error']}" if "error" in found else "")
        if active == "failed":
            return "failed", result
        if active in STARTING or found.get("Job", "") not in ("", "0"):
            return "waiting", f"still starting: {result}"
        if active != "active":
            condition = ", a Condition of the unit is not met" if found.get("ConditionResult") == "no" else ""
            return "inactive", f"{result}{condition}, and no start is queued"
        missing = self.answer(probe)
        if missing:
            return "waiting", f"unit is active, but {missing}"
        since = int(found.get("ActiveEnterTimestampMonotonic") or 0) / 1e6
        stable = self.clock() - since
        if stable < probe.stable_seconds:
            return "waiting", f"active for {max(stable, 0):.1f} s only, {found.get('NRestarts') or '0'} restarts"
        return "active", ""


def message(name: str, ready: Ready, probe: Probe, timeout_seconds: float) -> str:
    """The text of a failure: found, required, how to fix, and the journal."""
    waited = f"after {ready.seconds:.0f} s" + (f" (limit {timeout_seconds:g} s)" if ready.state == "timeout" else "")
    lines = [
        f"{name}: found {ready.reason} {waited}; required: {probe.required()}; "
        f"fix: read the journal below (all of it: journalctl -u {name}), correct the cause, then run this again"
    ]
    if ready.journal:
        lines += [f"--- journal of {name}, last {len(ready.journal)} lines", *ready.journal]
    else:
        lines.append(f"--- the journal of {name} is empty")
    return "\n".join(lines)


def check_url(url: str) -> str | None:
    """Why the URL can not be probed; None when it can."""
    try:
        parts = urllib.parse.urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        good = False
    return (
        None
        if good
        else f"found url {url!r}; required: http:// or https:// with a host; fix: correct `url` of this task"
    )
