"""unit_ready with a scripted unit, a clock that moves only in sleep, and a real HTTP server on loopback."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.module_utils.testing import patch_module_args
from ansible_collections.goodput.spark.plugins.module_utils import unit_ready as u
from ansible_collections.goodput.spark.plugins.modules import unit_ready as module


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status = {"/health": 200, "/moved": 302}.get(self.path, 503)
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "/health")
        self.end_headers()
        self.wfile.write(b'{"status":\n "healthy"}' if status == 200 else b"no workers")

    def log_message(self, *_arguments: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), Handler) as instance:
        thread = threading.Thread(target=instance.serve_forever)
        thread.start()
        yield instance
        instance.shutdown()
        thread.join()


class Node:
    """A unit whose properties are a script: one entry a look, the last one repeats."""

    def __init__(self, *looks: dict[str, str], journal: str = "boom\n") -> None:
        self.looks = list(looks)
        self.now = 100.0
        self.text = journal
        self.waiter = u.Waiter(run=self.run, clock=lambda: self.now, sleep=self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, argv: Sequence[str]) -> tuple[int, str, str]:
        if argv[0] == "journalctl":
            return 0, self.text, ""
        look = self.looks.pop(0) if len(self.looks) > 1 else self.looks[0]
        base = {
            "LoadState": "loaded",
            "ActiveState": "active",
            "SubState": "running",
            "Result": "success",
            "NRestarts": "0",
            "Job": "0",
        }
        return (
            0,
            "".join(
                f"{key}={value}\n"
                for key, value in {**base, "ActiveEnterTimestampMonotonic": "1000000", **look}.items()
            ),
            "",
        )


STARTING = {"ActiveState": "activating", "SubState": "auto-restart", "NRestarts": "4"}


def test_active_long_enough_needs_no_wait() -> None:
    assert Node({}).waiter.wait("x", u.Probe(), 60) == u.Ready("active")


def test_it_waits_for_a_slow_start_and_for_stability() -> None:
    ready = Node(STARTING, STARTING, {"ActiveEnterTimestampMonotonic": "102000000"}).waiter.wait(
        "x", u.Probe(stable_seconds=3), 60
    )
    assert (ready.state, ready.seconds) == ("active", 5.0)


def test_a_crash_loop_is_no_success() -> None:
    node = Node(STARTING)
    ready = node.waiter.wait("x", u.Probe(), 10)
    assert ready.state == "timeout"
    assert ready.seconds == 10
    assert "auto-restart" in ready.reason and "4 restarts" in ready.reason
    text = u.message("x", ready, u.Probe(), 10)
    assert text.startswith("x: found still starting") and "required: active for 3 s" in text and "fix:" in text
    assert text.endswith("boom")


@pytest.mark.parametrize(
    ("look", "reason", "seconds"),
    [
        (
            {"ActiveState": "failed", "SubState": "failed", "Result": "exit-code", "ExecMainStatus": "3"},
            "exit status 3",
            0,
        ),
        ({"LoadState": "not-found", "ActiveState": "inactive"}, "unit is not-found", 0),
        ({"LoadState": "masked", "ActiveState": "inactive"}, "unit is masked", 0),
        ({"ActiveState": "inactive", "SubState": "dead"}, "no start is queued", 2),
        (
            {"ActiveState": "inactive", "SubState": "dead", "ConditionResult": "no"},
            "a Condition of the unit is not met",
            2,
        ),
    ],
)
def test_what_will_not_come_up_fails_early(look: dict[str, str], reason: str, seconds: float) -> None:
    ready = Node(look).waiter.wait("x", u.Probe(), 600)
    assert (ready.state, ready.seconds) == ("failed", seconds)
    assert reason in ready.reason
    assert ready.journal == ["boom"]


def test_a_queued_start_is_waited_for() -> None:
    queued = {"ActiveState": "inactive", "SubState": "dead", "Job": "71"}
    assert Node(*[queued] * 8, {}).waiter.wait("x", u.Probe(), 60).state == "active"


@pytest.mark.parametrize(
    ("path", "contains", "reason"),
    [
        ("/health", "healthy", ""),
        ("/health", "ready", 'answered 200 without \'ready\': {"status": "healthy"}'),
        ("/none", None, "answered 503: no workers"),
        ("/moved", None, "answered 302"),
    ],
)
def test_http(server: HTTPServer, path: str, contains: str | None, reason: str) -> None:
    probe = u.Probe(url=f"http://127.0.0.1:{server.server_port}{path}", contains=contains)
    ready = Node({}).waiter.wait("x", probe, 2)
    assert ready.state == ("timeout" if reason else "active")
    assert reason in ready.reason


def test_nothing_listens(server: HTTPServer) -> None:
    node = Node({})
    assert node.waiter.wait("x", u.Probe(port=server.server_port), 2).state == "active"
    for probe in (u.Probe(port=1), u.Probe(url="http://127.0.0.1:1/")):
        ready = node.waiter.wait("x", probe, 2)
        assert ready.state == "timeout" and "refused" in ready.reason


def test_a_proxy_of_the_environment_is_not_used(server: HTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert u.fetch(f"http://127.0.0.1:{server.server_port}/health")[0] == 200


@pytest.mark.parametrize("url", ["file:///etc/passwd", "127.0.0.1:8000", "http://", "http://h:x/"])
def test_only_http_urls(url: str) -> None:
    assert repr(url) in (u.check_url(url) or "")
    assert u.check_url("http://127.0.0.1:8000/health") is None


def test_module_fails_with_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tools = {
        "systemctl": "printf 'LoadState=loaded\\nActiveState=failed\\nResult=exit-code\\n'",
        "journalctl": "echo the cause",
    }
    for name, script in tools.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    with patch_module_args({"name": "goodput-x"}), pytest.raises(SystemExit):
        module.main()
    answer: Any = json.loads(capsys.readouterr().out)
    assert answer["failed"] and answer["state"] == "failed"
    assert "result exit-code" in answer["msg"] and answer["msg"].endswith("the cause")


def test_documentation_and_arguments_agree() -> None:
    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    spec = module.argument_spec()
    assert set(documented) == set(spec)
    for name, option in spec.items():
        for key in ("type", "default", "required"):
            assert documented[name].get(key) == option.get(key), (name, key)
