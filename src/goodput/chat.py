"""``goodput chat``: one streamed answer through the frontend, asked on the first node.

The endpoint is found from the running frontend; nothing needs to be reachable from this machine but SSH.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.chat_probe import Completion, body, read_stream, verdict
from ansible_collections.goodput.spark.plugins.module_utils.serving import Answer, instances, values

from goodput import node_questions
from goodput.session import Session

Message = dict[str, str]


class NoEndpoint(Exception):
    """Nothing to ask; the message says what to do."""


@dataclass(frozen=True)
class Endpoint:
    """``url`` as the first node sees it; ``workers``: node (or management address) by worker id."""

    url: str
    model: str
    workers: dict[str, str]
    context_tokens: int | None

    def names(self, ids: Iterable[str]) -> str:
        return ", ".join(self.workers.get(each, f"unknown worker {each}") for each in ids)


def parse_endpoint(text: str, addresses: Mapping[str, str], model: str | None = None) -> Endpoint:
    """The answer to ``node_questions.ENDPOINT``. ``addresses``: address by node. Raises NoEndpoint."""
    found = node_questions.answers(text)
    if not found:
        raise NoEndpoint("no frontend runs on the first node; `goodput status`, then `goodput logs frontend`")
    url, answers = next(iter(found.items()))
    nothing = Answer(0, "no answer")
    health, models = (answers.get(path, nothing) for path in ("/health", "/v1/models"))
    listed = [str(entry.get("id")) for entry in ((models.json() or {}).get("data") or [])]
    if models.status != 200 or not listed:
        raise NoEndpoint(f"{url} lists no model ({models.words()}); it may still start: `goodput logs worker`")
    if model is not None and model not in listed:
        raise NoEndpoint(f"found no model {model!r}, the endpoint serves {', '.join(listed)}")
    named = {address: node for node, address in addresses.items()}
    body_ = health.json()
    alive = instances(body_) if isinstance(body_, dict) else []
    workers = {each["id"]: named.get(each["address"], each["address"]) for each in alive}
    # 0 where the engine does not say.
    context = max(
        values(node_questions.counters(answers), "dynamo_frontend_model_context_length", model=model or listed[0]),
        default=0,
    )
    return Endpoint(url, model or listed[0], workers, int(context) or None)


def find_endpoint(session: Session, addresses: Mapping[str, str], model: str | None = None) -> Endpoint:
    """Ask the first node. Raises NoEndpoint, Unreachable, CommandTimeout."""
    return parse_endpoint(session.run(node_questions.ENDPOINT).stdout, addresses, model)


def read(lines: Iterable[str], on_text: Callable[[str, bool], None]) -> Completion:
    """The completion in the lines of ``node_questions.post``.

    ``on_text(piece, is_reasoning)`` is called as text comes. Seconds are those of this machine, SSH included.
    """
    result, start = Completion(), time.monotonic()
    text = reasoning = 0
    other = []
    for line in lines:
        if line.startswith("\x1e"):
            result.status = int(line[1:]) if line[1:].isdigit() else 0
            continue
        if line.strip() and not line.startswith(("data:", "event:", ":")):
            other.append(line)
        read_stream([line.encode()], result, lambda: time.monotonic() - start)
        if len(result.reasoning) > reasoning:
            on_text(result.reasoning[reasoning:], True)
            reasoning = len(result.reasoning)
        if len(result.text) > text:
            on_text(result.text[text:], False)
            text = len(result.text)
    result.seconds = round(time.monotonic() - start, 3)
    if result.status != 200:
        code = f"HTTP {result.status}: " if result.status else ""
        result.reason = code + (" ".join(other)[:1000] or "the connection closed without an answer")
    verdict(result)
    return result


def ask(
    session: Session, endpoint: Endpoint, messages: list[Message], max_tokens: int, on_text: Callable[[str, bool], None]
) -> Completion:
    """One answer. Raises Unreachable, CommandTimeout, CommandFailed."""
    request = json.dumps(body(endpoint.model, messages, max_tokens))
    url = f"{endpoint.url}/v1/chat/completions"
    return read(session.stream(node_questions.post(url, request), timeout_s=600), on_text)


def summary(result: Completion, endpoint: Endpoint) -> str:
    """One line: who served, how much came from the cache, how long it took."""
    if result.state == "failed":
        return f"no answer: {result.reason}"
    parts = [f"worker {endpoint.names(result.workers) or 'not named'}"]
    if result.prompt_tokens is not None:
        parts.append(f"prompt {result.prompt_tokens:,} tokens")
        if result.cached_tokens is None:
            parts.append("cached tokens not reported")
        else:
            share = result.cached_tokens / max(1, result.prompt_tokens)
            parts.append(f"{result.cached_tokens:,} of them cached ({100 * share:.1f} %)")
    if result.completion_tokens is not None:
        parts.append(f"answer {result.completion_tokens:,} tokens")
    if result.first_chunk_seconds is not None:
        parts.append(f"first text after {result.first_chunk_seconds:.2f} s, all after {result.seconds:.2f} s")
    if result.state != "ok":
        parts.append(f"incomplete: {result.reason}")
    return "; ".join(parts)


def as_object(result: Completion, endpoint: Endpoint) -> dict[str, Any]:
    return {
        "ok": result.state == "ok",
        "exit": 0 if result.state == "ok" else 1,
        "model": endpoint.model,
        **result.facts(),
        "served_by": [endpoint.workers.get(each, each) for each in result.workers],
    }
