"""LMCache's own client, driven on a node: stores and loads real chunks without a GPU, checksums compared.

`lmcache bench server` talks to the running server over its request port. That needs a server that lets the client move
the data (`--supported-transfer-mode engine_driven`), as on the virtual pair; an engine's server is skipped.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

UNIT = "goodput-lmcache"
RUNTIME = "/opt/goodput/runtime"
BLOCK_TOKENS = 16
COUNTERS = ("lookup_hit_l1_tokens", "lookup_hit_l2_tokens", "l2_store_completed_objects_chunks")


@dataclass(frozen=True)
class Shape:
    """Keys and values of ``layers`` layers with one head of ``head`` float16 values."""

    layers: int = 2
    head: int = 32

    @property
    def bytes_per_token(self) -> int:
        return 2 * self.layers * self.head * 2


@dataclass(frozen=True)
class Drive:
    """What the client said: its summary, and the checksum of each request that it loaded."""

    summary: dict[str, Any]
    checksums: tuple[str, ...]

    @property
    def requests(self) -> int:
        found = re.search(r'"total_requests": (\d+)', json.dumps(self.summary))
        return int(found[1]) if found else 0

    @property
    def passed(self) -> str:
        found = re.search(r'"checksum_ok": (\d+), "checksum_fail": (\d+)', json.dumps(self.summary))
        return f"{found[1]} right, {found[2]} wrong" if found else "no checksums"


class Tier:
    """LMCache's server on one node, found from the running process.

    ``adapter`` is its L2 adapter, {} without one; ``path`` the directory of its files, "" where L2 is no filesystem.
    """

    def __init__(self, host: Any, sh: Callable[..., Any], requests: int = 4, chunks: int = 4) -> None:
        self.host, self.sh, self.requests, self.chunks = host, sh, requests, chunks
        shown = self.run(f"tr '\\0' '\\n' < /proc/$(systemctl show -P MainPID {UNIT})/cmdline")
        words = shown.stdout.splitlines()
        self.flags = dict(itertools.pairwise(words))
        if not words:
            pytest.skip("no LMCache server runs here; the layer lmcache says whether one should")
        if self.flags.get("--supported-transfer-mode") != "engine_driven":
            pytest.skip("the server serves an engine: only that engine can move data through it")
        self.chunk_tokens = int(self.flags["--chunk-size"])
        self.adapter: dict[str, Any] = json.loads(self.flags.get("--l2-adapter", "{}"))
        self.path = str(self.adapter.get("base_path", ""))
        self.rpc = f"tcp://{self.flags['--host']}:{self.flags['--port']}"
        self.url = f"http://{self.flags['--http-host']}:{self.flags['--http-port']}"
        # Prompts that no earlier run knows.
        self.start = int(time.time()) % 10_000_000 * 10
        self.shape = Shape()
        self.began = int(self.run("date +%s").stdout)

    def run(self, command: str, timeout_s: float = 120) -> Any:
        return self.sh({"answer": command}, node=self.host, fresh=True, timeout_s=timeout_s)["answer"]

    @property
    def expected_objects(self) -> int:
        return self.requests * self.chunks

    @property
    def expected_tokens(self) -> int:
        return self.expected_objects * self.chunk_tokens

    @property
    def expected_bytes(self) -> int:
        return self.expected_tokens * self.shape.bytes_per_token

    def metrics(self) -> str:
        return str(self.run(f"curl -sS -m 30 --noproxy '*' {self.url}/metrics").stdout)

    def counter(self, name: str, label: str = "", text: str | None = None) -> int:
        """Sum of ``lmcache_mp_NAME_total`` over the series that carry ``label``."""
        series = re.findall(
            rf"^lmcache_mp_{name}_total({{.*}})? (\S+)$", self.metrics() if text is None else text, re.M
        )
        return int(sum(float(value) for labels, value in series if label in labels))

    def counters(self) -> dict[str, int]:
        text = self.metrics()
        return {name: self.counter(name, text=text) for name in COUNTERS}

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.run(f"curl -sS -m 30 --noproxy '*' {self.url}/status").stdout))

    @property
    def _find(self) -> str:
        return f"find {self.path} -name 'test-model@*' -newermt @{self.began}"

    def files(self) -> tuple[int, int]:
        """Objects of the client in L2: how many, and their bytes."""
        sizes = [int(line) for line in self.run(f"{self._find} -printf '%s\\n'").stdout.split()]
        return len(sizes), sum(sizes)

    def digest(self) -> str:
        """One sha256 over names and contents of those objects."""
        command = f"{self._find} -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1"
        return str(self.run(command).stdout.strip())

    def remove(self) -> None:
        if self.path:
            self.run(f"{self._find} -delete")

    def drive(self) -> Drive:
        """Every request twice with checksums."""
        blocks = max(self.expected_tokens // BLOCK_TOKENS, 256)
        layout = f"(2,{blocks},{BLOCK_TOKENS},1,{self.shape.head}):float16:{self.shape.layers}"
        words = [
            *("runuser -u goodput -- env HOME=/tmp LMCACHE_TRACK_USAGE=false LMCACHE_DISABLE_BANNER=1", "python3"),
            *(f"{RUNTIME}/bin/lmcache bench server --mode cpu --transfer-mode engine_driven", f"--rpc-url {self.rpc}"),
            *(f"--url {self.url} --num-tokens {self.chunks * self.chunk_tokens} --num-blocks {blocks}",),
            *("--interval 0.2", f"--kvcache-shape-spec '{layout}'", "--flamegraph off --format json"),
            f"--start {self.start} --end {self.start + self.requests}",
        ]
        answer = self.run(" ".join(words), timeout_s=600)
        text = answer.stdout[answer.stdout.find("\n{") :]
        try:
            summary = dict(json.JSONDecoder().raw_decode(text.strip())[0])
        except ValueError:
            pytest.fail(f"lmcache bench server ended with {answer.rc}: {(answer.stdout + answer.stderr)[-600:]}")
        return Drive(summary, tuple(re.findall(r"/warm\] CHECKSUM: (\w+)", answer.stdout)))

    def stored(self, before: dict[str, int]) -> int:
        """Objects that L2 took since ``before``, waiting up to 60 s for all: storing goes on after the answer."""
        name = "l2_store_completed_objects_chunks"
        for _try in range(30):
            count = self.counter(name) - before[name]
            if count >= self.expected_objects:
                break
            time.sleep(2)
        return count

    def restart(self) -> None:
        wait = f"until curl -sf -m 5 --noproxy '*' {self.url}/healthcheck; do sleep 2; done"
        answer = self.run(f'systemctl restart {UNIT} && timeout 600 sh -c "{wait}"', timeout_s=660)
        assert answer.ok, f"{UNIT} did not come back: read `journalctl -u {UNIT}`"


def grown(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    return {name: after[name] - before[name] for name in COUNTERS}
