"""chat_probe against a real HTTP server on loopback that sends what Dynamo 1.6.1 sends, and what it must not."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import chat_probe

WORKER = 9041998973569038345


def chunk(**fields: Any) -> str:
    return "data: " + json.dumps({"object": "chat.completion.chunk", "model": "tiny", **fields}) + "\n\n"


def text(content: str, finish: str | None = None, field: str = "content") -> str:
    return chunk(
        choices=[{"index": 0, "delta": {field: content} if content else {}, "finish_reason": finish}],
        nvext={"worker_id": {"decode_worker_id": WORKER, "prefill_worker_id": WORKER, "decode_dp_rank": 0}},
    )


USAGE = chunk(
    choices=[],
    usage={"prompt_tokens": 23, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 16}},
)
GOOD = [text(" w1"), text(" w2"), text("", "length"), USAGE, "data: [DONE]\n\n"]

Serve = Callable[..., str]


@pytest.fixture
def serve() -> Iterator[Serve]:
    """``serve(parts, status=200)`` -> url of a server that answers every POST so; requests are kept in ``seen``."""
    servers: list[HTTPServer] = []

    def start(parts: list[str], status: int = 200, seen: list[dict[str, Any]] | None = None) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                length = int(self.headers["Content-Length"])
                request = {"path": self.path, **json.loads(self.rfile.read(length))}
                if seen is not None:
                    seen.append(request)
                self.send_response(status)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                for part in parts:
                    self.wfile.write(part.encode())
                    self.wfile.flush()

            def log_message(self, *_arguments: object) -> None:
                pass

        server = HTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def test_a_good_stream_is_read_whole(serve: Serve) -> None:
    seen: list[dict[str, Any]] = []
    result = chat_probe.ask(serve(GOOD, seen=seen), "tiny", "Say hello.", 8, 10)
    assert (result.state, result.reason, result.text, result.finish_reason) == ("ok", "", " w1 w2", "length")
    assert (result.chunks, result.done, result.status) == (4, True, 200)
    assert (result.prompt_tokens, result.completion_tokens, result.cached_tokens) == (23, 2, 16)
    assert result.workers == ["7d7ba228ef077809"]
    assert result.first_chunk_seconds is not None and 0 <= result.first_chunk_seconds <= result.seconds
    (request,) = seen
    assert request["path"] == "/v1/chat/completions" and request["stream"] is True
    assert request["stream_options"] == {"include_usage": True} and request["max_tokens"] == 8
    assert request["nvext"] == {"extra_fields": ["worker_id"]}
    assert request["messages"] == [{"role": "user", "content": "Say hello."}]


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([text(" w1"), text("", "length"), USAGE], "no [DONE]"),
        ([text("", "length"), "data: [DONE]\n\n"], "no text"),
        ([text(" w1"), "data: [DONE]\n\n"], "no a finish_reason"),
        ([text(" w1"), "data: {broken\n\n", text("", "stop"), "data: [DONE]\n\n"], "a chunk that is no JSON"),
        ([text(" w1"), "event: error\n: worker went away\n\n", "data: [DONE]\n\n"], "error event: worker went away"),
        ([text(" w1"), 'data: {"message":"gone","code":500}\n\n', "data: [DONE]\n\n"], "gone"),
    ],
)
def test_an_incomplete_stream_is_told(serve: Serve, parts: list[str], reason: str) -> None:
    result = chat_probe.ask(serve(parts), "tiny", "x", timeout_seconds=10)
    assert result.state == "incomplete" and reason in result.reason


def test_reasoning_counts_as_an_answer(serve: Serve) -> None:
    parts = [text("hm", field="reasoning_content"), text("", "length"), "data: [DONE]\n\n"]
    result = chat_probe.ask(serve(parts), "tiny", "x", timeout_seconds=10)
    assert (result.state, result.text, result.reasoning, result.cached_tokens) == ("ok", "", "hm", None)


def test_an_error_status_and_a_closed_port_are_failures(serve: Serve) -> None:
    result = chat_probe.ask(serve(['{"message":"Model not found","code":404}'], status=404), "nope", "x")
    assert result.state == "failed" and result.status == 404 and "Model not found" in result.reason
    result = chat_probe.ask("http://127.0.0.1:1", "tiny", "x", timeout_seconds=5)
    assert result.state == "failed" and result.status == 0 and "no complete answer" in result.reason


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://a", "http://"])
def test_a_bad_url_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="must be http://HOST:PORT"):
        chat_probe.ask(url, "tiny", "x")


def test_prompts_differ_from_the_first_word_on() -> None:
    first, second = chat_probe.prompt(1900), chat_probe.prompt(1900)
    assert first.split()[0] != second.split()[0]
    assert len(first.split()) == 1901
    assert chat_probe.prompt(50, "same") == chat_probe.prompt(50, "same")


def test_words_fill_more_than_two_blocks() -> None:
    assert chat_probe.words_for(16) == 40 and chat_probe.words_for(2128) == 5320


def test_worker_ids_keep_all_64_bits() -> None:
    assert chat_probe.worker_ids({"worker_id": {"decode_worker_id": 2**63 + 1, "decode_dp_rank": 0}}) == [
        "8000000000000001"
    ]
    assert chat_probe.worker_ids(None) == [] and chat_probe.worker_ids({"worker_id": None}) == []
