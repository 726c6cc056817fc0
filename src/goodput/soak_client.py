"""What ``goodput soak`` runs on the first node: agents that talk to the endpoint. Only the standard library.

Every agent holds one session after the other. A session begins with what all share (the instructions) and what its
project shares (a repository's files), then grows turn by turn: a tool's output is appended, the answer too. So each
prompt repeats the former one and adds to it, as a coding agent's does. When the next turn would pass the limit, a new
session begins. The prompts follow from the seed; answers are the engine's.

One JSON object a line on stdout: ``{"event": "start"}``, ``{"event": "request"}`` an answer, ``{"event": "end"}``.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.chat_probe import Completion, ask

NOUNS = (
    *("def", "return", "class", "test", "path", "index", "value", "error", "queue", "cache", "token", "block", "node"),
    *("retry", "parse", "config", "import", "self", "None", "True", "assert", "open", "read", "write", "log", "list"),
)
PROJECTS = 3
#: Shares of the longest prompt: instructions, a project's files, the shortest and longest tool output.
SHARES = (0.12, 0.18, 0.02, 0.12)


def text(key: str, words: int) -> str:
    """``words`` words that only this key gives."""
    source = random.Random(key)
    lines, left = [f"# {key}"], words
    while left > 0:
        count = min(left, source.randint(6, 12))
        lines.append(" ".join(source.choices(NOUNS, k=count)) + f" {source.randrange(1000)}")
        left -= count + 1
    return "\n".join(lines)


def opening(seed: int, session: int, words_limit: float) -> list[dict[str, str]]:
    """The first messages of a session; ``words_limit`` is the longest prompt in words."""
    project = random.Random(f"{seed}/{session}").randrange(PROJECTS)
    files = text(f"project {seed}/{project}", int(SHARES[1] * words_limit))
    task = text(f"task {seed}/{session}", int(SHARES[2] * words_limit))
    return [
        {"role": "system", "content": text(f"instructions {seed}", int(SHARES[0] * words_limit))},
        {"role": "user", "content": f"{files}\n{task}"},
    ]


def tool_output(seed: int, session: int, turn: int, words_limit: float) -> dict[str, str]:
    """What the agent's tool said; long and short ones in turn."""
    key = f"tool {seed}/{session}/{turn}"
    low, high = (int(share * words_limit) for share in SHARES[2:])
    return {"role": "user", "content": text(key, random.Random(key).randint(low, max(low, high)))}


def longer(
    messages: list[dict[str, str]],
    answer: str,
    more: dict[str, str],
    used_tokens: int,
    tokens_per_word: float,
    limit: int,
) -> list[dict[str, str]] | None:
    """The next turn's messages, or None if their prompt would pass ``limit`` tokens. The last had ``used_tokens``."""
    if used_tokens + len(f"{answer} {more['content']}".split()) * tokens_per_word > limit:
        return None
    return [*messages, {"role": "assistant", "content": answer}, more]


def record(number: int, agent: int, session: int, turn: int, start: float, done: Completion) -> dict[str, Any]:
    return {
        "event": "request",
        "number": number,
        "agent": agent,
        "session": session,
        "turn": turn,
        "start_seconds": round(start, 3),
        "ttft_seconds": done.first_chunk_seconds,
        "seconds": done.seconds,
        "prompt_tokens": done.prompt_tokens,
        "cached_tokens": done.cached_tokens,
        "completion_tokens": done.completion_tokens,
        "worker": done.workers[0] if done.workers else "",
        "state": done.state,
        "reason": done.reason,
    }


class Soak:
    """The agents and what they share."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.options = options
        self.lock = threading.Lock()
        self.sessions = self.requests = 0
        self.began = 0.0

    def say(self, line: dict[str, Any]) -> None:
        try:
            with self.lock:
                print(json.dumps(line), flush=True)
        except OSError:
            # Nobody listens any more: end with all threads.
            os._exit(1)

    def calibrate(self) -> float:
        """Tokens a word, by one short request; an endpoint that does not answer ends the soak here."""
        words = text("calibration", 120)
        done = ask(self.options["url"], self.options["model"], words, 1, self.options["timeout_seconds"])
        if done.state == "failed" or not done.prompt_tokens:
            self.say({"event": "refused", "reason": done.reason or "the endpoint reports no prompt_tokens"})
            raise SystemExit(1)
        return done.prompt_tokens / len(words.split())

    def agent(self, number: int, tokens_per_word: float) -> None:
        limit = int(self.options["prompt_tokens"])
        words_limit = limit / tokens_per_word
        while time.monotonic() < self.ends:
            with self.lock:
                session, self.sessions = self.sessions, self.sessions + 1
            turn = 0
            messages: list[dict[str, str]] | None = opening(self.options["seed"], session, words_limit)
            while messages is not None and time.monotonic() < self.ends:
                with self.lock:
                    self.requests += 1
                    request = self.requests
                start = time.monotonic() - self.began
                done = ask(
                    self.options["url"],
                    self.options["model"],
                    messages,
                    self.options["max_tokens"],
                    self.options["timeout_seconds"],
                )
                self.say(record(request, number, session, turn, start, done))
                if done.state == "failed":
                    # A dead endpoint must not be asked a thousand times a second.
                    time.sleep(1.0)
                    break
                turn += 1
                more = tool_output(self.options["seed"], session, turn, words_limit)
                used = done.prompt_tokens or limit
                messages = longer(messages, done.text or done.reasoning, more, used, tokens_per_word, limit)

    def run(self) -> None:
        tokens_per_word = self.calibrate()
        self.began = time.monotonic()
        self.ends = self.began + self.options["seconds"]
        self.say({"event": "start", "tokens_per_word": round(tokens_per_word, 3)})
        agents = [
            threading.Thread(target=self.agent, args=(number, tokens_per_word), daemon=True)
            for number in range(self.options["concurrency"])
        ]
        for thread in agents:
            thread.start()
        for thread in agents:
            thread.join()
        self.say({"event": "end", "seconds": round(time.monotonic() - self.began, 3), "sessions": self.sessions})


def main() -> None:
    Soak(json.loads(sys.argv[1])).run()


if __name__ == "__main__":
    main()
