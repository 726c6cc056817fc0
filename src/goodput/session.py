"""A root shell on a node that stays open, and a testinfra backend on top of it.

A new SSH channel costs 0.3 to 1 s on an emulated guest, a command in an open shell some tens of milliseconds.
Commands are framed by a random token on both streams, so their output is kept apart byte by byte.
"""

from __future__ import annotations

import os
import secrets
import selectors
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from testinfra.backend.base import BaseBackend
from testinfra.host import Host

from goodput.inventory import Node

# Ubuntu's sudo sets a secure_path; a local or root login may lack the administrators' folders.
_PROLOGUE = "export LC_ALL=C.UTF-8 PATH=$PATH:/usr/local/sbin:/usr/sbin:/sbin"


class Unreachable(Exception):
    """The node gives no root shell; the message holds cause and remedy."""


class CommandTimeout(Exception):
    """A command ran longer than allowed."""


class CommandFailed(Exception):
    """A streamed command ended with another status than 0; the message is what it said."""


@dataclass(frozen=True)
class Result:
    """Exit status and output of one command."""

    rc: int
    stdout: str
    stderr: str

    @property
    def ok(self) -> bool:
        return self.rc == 0


class Session:
    """One root shell on ``node``. Opened on first use, opened again once if the connection is lost."""

    def __init__(self, node: Node, *, open_timeout_s: float = 150.0) -> None:
        self.node = node
        self.open_timeout_s = open_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        # Held for a whole exchange: another thread may ask ahead on the same node.
        self.lock = threading.RLock()
        self._token = ""
        self._pending: dict[int, bytearray] = {}

    def open(self) -> None:
        """Start the shell; raises Unreachable."""
        self.close()
        self._token = secrets.token_hex(16)
        # sudo asks for a password only where it must, and says so before it reads one.
        start = (
            'if [ "$(id -u)" = 0 ]; then echo OPEN; exec sh; '
            "elif sudo -n true 2>/dev/null; then echo OPEN; exec sudo -n sh; "
            "else echo PASSWORD; exec sudo -S -p '' sh; fi"
        )
        start = start if self.node.become else "echo OPEN; exec sh"
        local = ["sh", "-c", start]
        argv = [*self.node.command, start] if self.node.command else local
        self._process = subprocess.Popen(
            argv,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **self.node.environment},
            # Ctrl-C is for the program that holds the session.
            start_new_session=True,
        )
        for stream in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(stream.fileno(), False)
        self._pending = {self._stdout.fileno(): bytearray(), self._stderr.fileno(): bytearray()}
        deadline = time.monotonic() + self.open_timeout_s
        greeting = self._read_until(self._stdout, b"\n", deadline)
        if greeting.strip() == b"PASSWORD":
            if self.node.become_password is None:
                self.close()
                raise Unreachable(
                    f"{self.node.name}: sudo asks for a password and none is set; put ansible_become_password into "
                    "a vaulted variable, set GOODPUT_BECOME_PASSWORD, or allow sudo without a password"
                )
            self._write((self.node.become_password + "\n").encode(), deadline)
        self._run_raw([_PROLOGUE], deadline, prologue=True)

    def run(self, command: str, timeout_s: float = 120.0) -> Result:
        """Run one shell command as root."""
        return self.run_many([command], timeout_s)[0]

    def run_many(self, commands: Sequence[str], timeout_s: float = 120.0) -> list[Result]:
        """Run shell commands one after another as root in one round trip; ``timeout_s`` bounds all of them."""
        with self.lock:
            if self._process is None:
                self.open()
            try:
                return self._run_raw(commands, time.monotonic() + timeout_s)
            except Unreachable:
                # A node that has just rebooted: one more try, then the cause is reported.
                self.open()
                return self._run_raw(commands, time.monotonic() + timeout_s)

    def stream(self, command: str, timeout_s: float = 120.0) -> Iterator[str]:
        """Lines of a command's output as they come; ``timeout_s`` bounds the wait for each.

        Whoever stops reading early loses the shell (the next use opens another one); the command ends when it writes.
        Raises CommandFailed after the last line, Unreachable, CommandTimeout.
        """
        with self.lock:
            if self._process is None:
                self.open()
            frame = f"\x1e{self._token}".encode()
            whole = False
            try:
                ends = f"printf '\\036{self._token} %d\\036' $?; printf '\\036{self._token}\\036' >&2\n"
                self._write(f"( {command}\n) </dev/null; {ends}".encode(), time.monotonic() + timeout_s)
                buffer = self._pending[self._stdout.fileno()]
                while not whole:
                    at = buffer.find(frame)
                    whole = at >= 0
                    end = at if whole else buffer.rfind(b"\n") + 1
                    lines = bytes(buffer[:end]).decode(errors="replace").split("\n")
                    del buffer[:end]
                    yield from lines if whole and lines[-1] else lines[:-1]
                    if not whole:
                        self._pump(time.monotonic() + timeout_s)
                deadline = time.monotonic() + timeout_s
                self._read_until(self._stdout, frame, deadline)
                status = int(self._read_until(self._stdout, b"\x1e", deadline))
                said = self._read_until(self._stderr, frame + b"\x1e", deadline).decode(errors="replace").strip()
            finally:
                if not whole:
                    self.close()
            if status != 0:
                raise CommandFailed(f"{self.node.name}: {said or f'exit status {status}'}")

    def close(self) -> None:
        if self._process is None:
            return
        process, self._process = self._process, None
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()
        try:
            process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()

    @property
    def _stdin(self) -> IO[bytes]:
        assert self._process is not None and self._process.stdin is not None
        return self._process.stdin

    @property
    def _stdout(self) -> IO[bytes]:
        assert self._process is not None and self._process.stdout is not None
        return self._process.stdout

    @property
    def _stderr(self) -> IO[bytes]:
        assert self._process is not None and self._process.stderr is not None
        return self._process.stderr

    def _run_raw(self, commands: Sequence[str], deadline: float, *, prologue: bool = False) -> list[Result]:
        frame = f"\x1e{self._token}".encode()
        script = []
        for command in commands:
            body = command if prologue else f"/bin/sh -c {shlex.quote(command)} </dev/null"
            script.append(f"{body}; printf '\\036{self._token} %d\\036' $?; printf '\\036{self._token}\\036' >&2\n")
        # Nothing is lost if a command fills its pipe meanwhile: _write reads while it waits.
        self._write("".join(script).encode(), deadline)
        results = []
        for _ in commands:
            stdout = self._read_until(self._stdout, frame, deadline)
            status = self._read_until(self._stdout, b"\x1e", deadline)
            stderr = self._read_until(self._stderr, frame + b"\x1e", deadline)
            results.append(Result(int(status), stdout.decode(errors="replace"), stderr.decode(errors="replace")))
        return results

    def _write(self, data: bytes, deadline: float) -> None:
        view = memoryview(data)
        while view:
            try:
                written = os.write(self._stdin.fileno(), view)
                view = view[written:]
            except BlockingIOError:
                self._pump(deadline, want_write=True)
            except (BrokenPipeError, ValueError):
                raise self._lost() from None

    def _read_until(self, stream: IO[bytes], mark: bytes, deadline: float) -> bytes:
        """Bytes of ``stream`` before ``mark``; the mark is consumed."""
        buffer = self._pending[stream.fileno()]
        searched = 0
        while (at := buffer.find(mark, searched)) < 0:
            searched = max(0, len(buffer) - len(mark))
            self._pump(deadline)
        data = bytes(buffer[:at])
        del buffer[: at + len(mark)]
        return data

    def _pump(self, deadline: float, *, want_write: bool = False) -> None:
        """Wait until something can be read (or written) and take what is there."""
        with selectors.DefaultSelector() as selector:
            for stream in (self._stdout, self._stderr):
                selector.register(stream, selectors.EVENT_READ)
            if want_write:
                selector.register(self._stdin, selectors.EVENT_WRITE)
            ready = selector.select(max(0.0, deadline - time.monotonic()))
        if not ready:
            self.close()
            raise CommandTimeout(f"{self.node.name}: no answer in the time allowed")
        ended = False
        for key, _ in ready:
            if key.fileobj is self._process.stdin:  # type: ignore[union-attr]
                continue
            chunk = os.read(key.fd, 1 << 16)
            self._pending[key.fd] += chunk
            ended = ended or not chunk
        if ended:
            raise self._lost()

    def _lost(self) -> Unreachable:
        said = ""
        if self._process is not None:
            os.set_blocking(self._stderr.fileno(), False)
            try:
                rest = os.read(self._stderr.fileno(), 1 << 16)
            except BlockingIOError:
                rest = b""
            said = bytes(self._pending[self._stderr.fileno()] + rest).decode(errors="replace").strip()
        self.close()
        where = f"{self.node.name} ({self.node.address})"
        cause = said.splitlines()[-1] if said else "the connection closed"
        return Unreachable(f"{where}: {cause}; check that `ansible -m ping {self.node.name}` answers")


class SessionBackend(BaseBackend):  # type: ignore[misc]
    """testinfra's backend over a Session, so that host.file, host.service and the rest run in the open shell."""

    NAME = "goodput"

    def __init__(self, session: Session) -> None:
        super().__init__(session.node.name)
        self.session = session
        # Asking the node for its encoding would cost a Python start there; the session sets a UTF-8 locale.
        self._encoding = "utf-8"

    def run(self, command: str, *args: str, **kwargs: Any) -> Any:
        line = self.get_command(command, *args)
        result = self.session.run(line, float(kwargs.get("timeout_s", 120.0)))
        return self.result(result.rc, self.encode(line), result.stdout.encode(), result.stderr.encode())


class NodeHost(Host):  # type: ignore[misc]
    """A testinfra host with its inventory name, its host variables and a batch helper."""

    def __init__(self, session: Session) -> None:
        super().__init__(SessionBackend(session))
        self.backend.set_host(self)
        self.session = session
        self.name = session.node.name
        self.vars = session.node.variables
        self._answers: dict[str, Result] = {}

    def __repr__(self) -> str:
        return f"<node {self.name}>"

    def batch(self, commands: dict[str, str], *, fresh: bool = False, timeout_s: float = 120.0) -> dict[str, Result]:
        """Run named shell commands as root in one round trip.

        An answer is kept for the whole session, so two tests that ask the same share one command. ``fresh`` asks again:
        for anything that a request or another test may change.
        """
        with self.session.lock:
            missing = [line for line in dict.fromkeys(commands.values()) if fresh or line not in self._answers]
            if missing:
                self._answers.update(zip(missing, self.session.run_many(missing, timeout_s), strict=True))
            return {name: self._answers[line] for name, line in commands.items()}

    def knows(self, commands: dict[str, str]) -> bool:
        """True if every answer is remembered."""
        return all(line in self._answers for line in commands.values())
