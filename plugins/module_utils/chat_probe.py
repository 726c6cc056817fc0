# Apache-2.0 (see LICENSE)
"""One streamed chat completion, asked as a client asks it, with everything a check wants to know about it."""

from __future__ import annotations

import http.client
import json
import math
import random
import time
import urllib.parse
import uuid
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

WORDS = ("node", "rail", "link", "cache", "block", "token", "page", "disk", "engine", "worker", "reads", "keeps")


@dataclass
class Completion:
    """What came back. ``state``: ok, incomplete (answered, but not as a completion should be), failed (no answer)."""

    state: str = "failed"
    reason: str = ""
    status: int = 0
    text: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    done: bool = False
    chunks: int = 0
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    workers: list[str] = field(default_factory=list)
    seconds: float = 0.0
    first_chunk_seconds: float | None = None

    def facts(self) -> dict[str, Any]:
        return asdict(self)


def prompt(words: int, seed: str | None = None) -> str:
    """A prompt of at least ``words`` tokens that shares no block with another seed's: the seed stands first.

    :param seed: None for one that nobody has used.
    """
    key = seed or uuid.uuid4().hex
    source = random.Random(key)
    return " ".join([key, *source.choices(WORDS, k=max(words, 1))])


def words_for(block_size_tokens: int, blocks: float = 2.5) -> int:
    """Words for a prompt that fills ``blocks`` blocks; every word is at least one token."""
    return math.ceil(block_size_tokens * blocks)


def body(model: str, content: str | list[dict[str, str]], max_tokens: int) -> dict[str, Any]:
    """The request for one user message or for a whole conversation (``role`` and ``content`` each).

    ``nvext`` is Dynamo's extension: it names the worker that answered.
    """
    return {
        "model": model,
        "messages": content if isinstance(content, list) else [{"role": "user", "content": content}],
        "max_tokens": max_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
        "nvext": {"extra_fields": ["worker_id"]},
    }


def worker_ids(nvext: Any) -> list[str]:
    """Hexadecimal ids, as in Dynamo's metrics: 64-bit numbers do not survive a double."""
    ids = (nvext or {}).get("worker_id") if isinstance(nvext, dict) else None
    if not isinstance(ids, dict):
        return []
    return sorted({f"{value:x}" for key, value in ids.items() if key.endswith("_worker_id") and isinstance(value, int)})


def read_stream(lines: Iterable[bytes], result: Completion, elapsed: Callable[[], float]) -> None:
    """Fill ``result`` from server-sent events; ``elapsed`` returns seconds since the request was sent."""
    for raw in lines:
        line = raw.decode("utf-8", "replace").strip()
        if line.startswith("event:") and line[6:].strip() == "error":
            result.reason = "the stream carried an error event"
            continue
        if not line.startswith("data:"):
            if line.startswith(":") and result.reason:
                result.reason += f": {line[1:].strip()}"
            continue
        data = line[5:].strip()
        if data == "[DONE]":
            result.done = True
            return
        try:
            chunk = json.loads(data)
        except ValueError:
            result.reason = f"a chunk that is no JSON: {data[:200]}"
            continue
        if chunk.get("error") or (chunk.get("message") and chunk.get("code")):
            result.reason = f"the stream carried an error: {data[:300]}"
            continue
        result.chunks += 1
        for choice in chunk.get("choices") or []:
            delta = choice.get("delta") or {}
            if delta.get("content") or delta.get("reasoning_content"):
                if result.first_chunk_seconds is None:
                    result.first_chunk_seconds = round(elapsed(), 3)
                result.text += delta.get("content") or ""
                result.reasoning += delta.get("reasoning_content") or ""
            result.finish_reason = choice.get("finish_reason") or result.finish_reason
        usage = chunk.get("usage") or {}
        if usage:
            result.prompt_tokens = usage.get("prompt_tokens")
            result.completion_tokens = usage.get("completion_tokens")
            result.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        result.workers = sorted({*result.workers, *worker_ids(chunk.get("nvext"))})


def verdict(result: Completion) -> None:
    """Set ``state`` and ``reason`` from what the stream held."""
    lacks = [
        words
        for words, there in (
            ("text", bool(result.text or result.reasoning)),
            ("a finish_reason", bool(result.finish_reason)),
            ("[DONE]", result.done),
        )
        if not there
    ]
    if result.status != 200:
        result.state = "failed"
    elif lacks or result.reason:
        result.state = "incomplete"
        result.reason = "; ".join([*([result.reason] if result.reason else []), *(f"no {word}" for word in lacks)])
    else:
        result.state = "ok"


def ask(
    url: str, model: str, content: str | list[dict[str, str]], max_tokens: int = 16, timeout_seconds: float = 120.0
) -> Completion:
    """One POST to ``url`` (``http://host:port``) and the chat path, read to its end. A bad server does not raise."""
    result = Completion()
    place = urllib.parse.urlsplit(url)
    if place.scheme not in ("http", "https") or not place.hostname:
        raise ValueError(f"url {url!r} must be http://HOST:PORT or https://HOST:PORT")
    kind = http.client.HTTPSConnection if place.scheme == "https" else http.client.HTTPConnection
    connection = kind(place.hostname, place.port, timeout=timeout_seconds)
    start = time.monotonic()
    try:
        connection.request(
            "POST",
            f"{place.path.rstrip('/')}/v1/chat/completions",
            json.dumps(body(model, content, max_tokens)),
            {"Content-Type": "application/json", "Accept": "text/event-stream"},
        )
        response = connection.getresponse()
        result.status = response.status
        if response.status == 200:
            read_stream(response, result, lambda: time.monotonic() - start)
        else:
            result.reason = f"HTTP {response.status}: {response.read(2000).decode('utf-8', 'replace').strip()}"
    except (OSError, http.client.HTTPException) as error:
        result.reason = f"no complete answer from {url}: {type(error).__name__}: {error}"
    finally:
        connection.close()
    result.seconds = round(time.monotonic() - start, 3)
    verdict(result)
    return result
