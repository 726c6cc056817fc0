"""goodput chat and the soak's client as a person runs them: on this machine, against a small endpoint."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.chat_probe import Completion

from goodput import chat, node_questions

ROOT = Path(__file__).resolve().parents[2]
STREAM = (Path(__file__).parent / "data/ops/chat_stream.txt").read_text()
HEALTH = (Path(__file__).parent / "data/serving/health.json").read_text()
# What Dynamo's frontend answers, as far as a client looks: 4 characters are a token, 16 of them come from the cache.
ENDPOINT = """
import http.server, json, sys
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *words): pass
    def answer(self, code, text, kind="application/json"):
        self.send_response(code); self.send_header("Content-Type", kind); self.end_headers()
        self.wfile.write(text.encode())
    def do_GET(self):
        pages = {"/health": %r, "/v1/models": '{"data":[{"id":"tiny"}]}', "/metrics": "# HELP x\\n"}
        self.answer(200 if self.path in pages else 404, pages.get(self.path, ""))
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        words = " ".join(message["content"] for message in body["messages"])
        if "refuse" in words:
            return self.answer(503, '{"message":"no worker"}')
        tokens = len(words) // 4
        usage = {"prompt_tokens": tokens, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}}
        worker = {"worker_id": {"decode_worker_id": 9041998973569038345}}
        parts = [{"choices": [{"delta": {"content": text}}], "nvext": worker} for text in ("got ", str(len(words)))]
        parts += [{"choices": [{"delta": {}, "finish_reason": "stop"}]}, {"choices": [], "usage": usage}]
        text = "".join(f"data: {json.dumps(part)}\\n\\n" for part in parts) + "data: [DONE]\\n\\n"
        self.answer(200, text, "text/event-stream")
server = http.server.ThreadingHTTPServer((sys.argv[2], int(sys.argv[4])), Handler)
print(server.server_address[1], flush=True)
server.serve_forever()
"""


@pytest.fixture
def site(tmp_path: Path) -> Iterator[tuple[Path, dict[str, str]]]:
    """(inventory, environment): this machine as the one node, with an endpoint whose process systemctl names."""
    (tmp_path / "endpoint.py").write_text(ENDPOINT % HEALTH)
    # The port is chosen by trying, because the command must be able to read it from the arguments.
    for port in range(18100 + os.getpid() % 500 * 3, 65000, 7):
        words = [sys.executable, str(tmp_path / "endpoint.py"), "--http-host", "127.0.0.1", "--http-port", str(port)]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert process.stdout is not None
        if process.stdout.readline().strip():
            break
        process.wait()
    systemctl = tmp_path / "bin/systemctl"
    systemctl.parent.mkdir()
    systemctl.write_text(f'#!/bin/sh\ncase "$*" in *goodput-frontend*) echo {process.pid};; *) echo 0;; esac\n')
    systemctl.chmod(0o755)
    variables = "{ansible_connection: local, ansible_become: false, goodput_management_address: 10.77.0.1}"
    (tmp_path / "hosts.yml").write_text(f"sparks:\n  hosts:\n    spark1: {variables}\n")
    environment = {
        **os.environ,
        "PATH": f"{systemctl.parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'collections'}",
        "GOODPUT_STATE": str(tmp_path / "state"),
    }
    yield tmp_path / "hosts.yml", environment
    process.kill()
    process.communicate()


def goodput(site: tuple[Path, dict[str, str]], command: str, *words: str, stdin: str = "") -> Any:
    argv = [sys.executable, "-m", "goodput.cli", command, "-i", str(site[0]), *words]
    return subprocess.run(argv, env=site[1], capture_output=True, text=True, check=False, timeout=120, input=stdin)


def test_an_answer_with_worker_and_cache(site: tuple[Path, dict[str, str]]) -> None:
    prompt = 'it\'s 100 % "quoted" $HOME `id` \\n ' + "x" * 60
    done = goodput(site, "chat", prompt)
    assert done.returncode == 0, done.stdout + done.stderr
    first, last = done.stdout.splitlines()
    # The prompt arrived as it was typed.
    assert first == f"got {len(prompt)}"
    tokens = len(prompt) // 4
    assert last.startswith(
        f"worker spark1; prompt {tokens} tokens; 16 of them cached ({1600 / tokens:.1f} %); answer 2"
    )


def test_as_json_from_standard_input(site: tuple[Path, dict[str, str]]) -> None:
    # Longer than one argument of a command may be.
    done = goodput(site, "chat", "-", "--json", stdin="y" * 300_000)
    found = json.loads(done.stdout)
    assert (found["ok"], found["text"], found["served_by"]) == (True, "got 300000", ["spark1"])
    assert done.returncode == 0


def test_refusals(site: tuple[Path, dict[str, str]]) -> None:
    done = goodput(site, "chat", "refuse")
    assert done.returncode == 1
    assert 'no answer: HTTP 503: {"message":"no worker"}' in done.stdout
    assert goodput(site, "chat").returncode == goodput(site, "chat", " ").returncode == 2
    done = goodput(site, "chat", "x", "--model", "other")
    assert (done.returncode, "found no model 'other', the endpoint serves tiny" in done.stderr) == (2, True)
    site[1]["PATH"] = f"/nowhere:{os.environ['PATH']}"
    done = goodput(site, "chat", "x")
    assert done.returncode == 2 and "no frontend runs on the first node" in done.stderr


def test_a_short_soak(site: tuple[Path, dict[str, str]], tmp_path: Path) -> None:
    words = (
        "--minutes",
        "0.1",
        "--concurrency",
        "2",
        "--prompt-tokens",
        "2000",
        "--out",
        str(tmp_path / "out"),
        "--json",
    )
    done = goodput(site, "soak", *words)
    found = json.loads(done.stdout)
    assert found["errors"] == 0 and found["requests"] > 10 and found["sessions"] > 1
    assert found["requests_by_worker"]["spark1"] == found["requests"]
    assert 0 < found["longest_prompt_tokens"] <= 2100
    # This machine has no unit whose memory could be watched, and that is said.
    assert done.returncode == 1
    assert "found no process of a goodput unit to watch; `goodput status`" in found["findings"]
    assert len((tmp_path / "out/requests.csv").read_text().splitlines()) == found["requests"] + 1


def test_a_soak_of_nothing(site: tuple[Path, dict[str, str]]) -> None:
    site[1]["PATH"] = f"/nowhere:{os.environ['PATH']}"
    done = goodput(site, "soak", "--minutes", "1")
    assert done.returncode == 2 and "no frontend runs" in done.stderr
    assert goodput(site, "soak", "--minutes", "1", "--warm-up", "60").returncode == 2


def test_the_recorded_stream() -> None:
    pieces: list[str] = []
    result = chat.read(STREAM.split("\n"), lambda piece, reasoning: pieces.append(piece))
    assert result.state == "ok", result.reason
    assert "".join(pieces) == result.text == " w731 w788 w640 w1068 w1037"
    assert (result.prompt_tokens, result.cached_tokens, result.completion_tokens) == (4504, 4496, 5)
    assert result.workers == [f"{5049125777616451320:x}"]


def test_reasoning_is_told_apart_and_nothing_twice() -> None:
    deltas = [{"reasoning_content": "hm"}, {"reasoning_content": " so"}, {"content": "a"}, {"content": "b"}]
    lines = [f"data: {json.dumps({'choices': [{'delta': delta}]})}" for delta in deltas]
    pieces: list[tuple[str, bool]] = []
    chat.read([*lines, "data: [DONE]", "\x1e200"], lambda piece, reasoning: pieces.append((piece, reasoning)))
    assert pieces == [("hm", True), (" so", True), ("a", False), ("b", False)]


def test_a_stream_that_breaks_off() -> None:
    lines = STREAM.split("\n")
    result = chat.read([*lines[:4], "curl: (18) transfer closed", "\x1e200"], lambda piece, reasoning: None)
    assert result.state == "incomplete" and "no [DONE]" in result.reason
    result = chat.read(["curl: (7) Failed to connect", "\x1e000"], lambda piece, reasoning: None)
    assert (result.state, result.reason) == ("failed", "curl: (7) Failed to connect")


def test_the_summary_says_what_is_not_known() -> None:
    endpoint = chat.Endpoint("http://x", "tiny", {"aa": "spark1"}, None)
    text = chat.summary(Completion("ok", workers=["bb"], prompt_tokens=10), endpoint)
    assert text == "worker unknown worker bb; prompt 10 tokens; cached tokens not reported"


def test_an_endpoint_without_a_model_may_still_start() -> None:
    text = '\x1dhttp://1.2.3.4:8000\x1d{"data":[]}\n\x1e200 http://1.2.3.4:8000/v1/models\x1e\n'
    with pytest.raises(chat.NoEndpoint, match="lists no model"):
        chat.parse_endpoint(text, {})


def test_answers_that_did_not_come() -> None:
    text = "\x1dgoodput-worker\x1d\n\x1e000 http://10.77.0.1:9091/health\x1e\n"
    answer = node_questions.answers(text)["goodput-worker"]["/health"]
    assert (answer.status, answer.text) == (0, "no answer from http://10.77.0.1:9091/health")
