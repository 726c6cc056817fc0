"""Each cache tier does its work: LMCache's own client stores and loads real chunks on every node, checksums compared.

`lmcache bench server` drives the running server over its request port without a GPU. That needs a server that lets the
client move the data (`--supported-transfer-mode engine_driven`), as on the virtual pair; an engine's server is skipped.
"""

from __future__ import annotations

import itertools
import json
import re
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.unit("goodput-lmcache")
UNIT = "goodput-lmcache"
RUNTIME = "/opt/goodput/runtime"
REQUESTS, CHUNKS = 4, 4
# One shape whose chunk is easy to count: 2 layers, 1 head of 32 float16 values, keys and values: 256 bytes a token.
BYTES_PER_TOKEN = 2 * 2 * 32 * 2
BLOCK_TOKENS = 16
COUNTERS = ("lookup_hit_l1_tokens", "lookup_hit_l2_tokens", "l2_store_completed_objects_chunks")


class Tier:
    """LMCache's server on one node, found from the running process."""

    def __init__(self, host: Any, sh: Callable[..., Any]) -> None:
        self.host, self.sh = host, sh
        shown = sh({"words": f"tr '\\0' '\\n' < /proc/$(systemctl show -P MainPID {UNIT})/cmdline"}, fresh=True)
        words = shown["words"].stdout.splitlines()
        flags = dict(itertools.pairwise(words))
        if flags.get("--supported-transfer-mode") != "engine_driven":
            pytest.skip("the server serves an engine: only that engine can move data through it")
        self.chunk_tokens = int(flags["--chunk-size"])
        self.path = str(json.loads(flags["--l2-adapter"])["base_path"])
        self.rpc = f"tcp://{flags['--host']}:{flags['--port']}"
        self.url = f"http://{flags['--http-host']}:{flags['--http-port']}"
        # Prompts that no earlier run knows.
        self.start = int(time.time()) % 10_000_000 * 10

    @property
    def expected_tokens(self) -> int:
        return REQUESTS * CHUNKS * self.chunk_tokens

    @property
    def expected_bytes(self) -> int:
        return self.expected_tokens * BYTES_PER_TOKEN

    def counters(self) -> dict[str, float]:
        text = self.sh({"m": f"curl -sS -m 30 --noproxy '*' {self.url}/metrics"}, fresh=True)["m"].stdout
        return {
            name: sum(float(v) for v in re.findall(rf"^lmcache_mp_{name}_total(?:{{.*}})? (\S+)$", text, re.M))
            for name in COUNTERS
        }

    def files(self) -> tuple[int, int]:
        """Objects of the client in L2: how many, and their bytes."""
        found = self.sh(
            {"f": f"find {self.path} -name 'test-model@*' -newermt @{self.began} -printf '%s\\n'"}, fresh=True
        )
        sizes = [int(line) for line in found["f"].stdout.split()]
        return len(sizes), sum(sizes)

    def digest(self) -> str:
        """One sha256 over names and contents of those objects."""
        find = f"find {self.path} -name 'test-model@*' -newermt @{self.began} -print0"
        command = f"{find} | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1"
        return str(self.sh({"d": command}, fresh=True)["d"].stdout.strip())

    def drive(self) -> dict[str, Any]:
        """Every request twice with checksums; the client's own summary."""
        blocks = max(REQUESTS * CHUNKS * self.chunk_tokens // BLOCK_TOKENS, 256)
        words = [
            *("runuser -u goodput -- env HOME=/tmp LMCACHE_TRACK_USAGE=false LMCACHE_DISABLE_BANNER=1", "python3"),
            *(f"{RUNTIME}/bin/lmcache bench server --mode cpu --transfer-mode engine_driven", f"--rpc-url {self.rpc}"),
            *(f"--url {self.url} --num-tokens {CHUNKS * self.chunk_tokens} --num-blocks {blocks}", "--interval 0.2"),
            *(f"--kvcache-shape-spec '(2,{blocks},{BLOCK_TOKENS},1,32):float16:2'", "--flamegraph off --format json"),
            f"--start {self.start} --end {self.start + REQUESTS}",
        ]
        answer = self.sh({"bench": " ".join(words)}, fresh=True, timeout_s=600)["bench"]
        text = answer.stdout[answer.stdout.find("\n{") :]
        try:
            return dict(json.JSONDecoder().raw_decode(text.strip())[0])
        except ValueError:
            pytest.fail(f"lmcache bench server ended with {answer.rc}: {(answer.stdout + answer.stderr)[-600:]}")

    def settle(self, wanted: int) -> tuple[int, int]:
        """Objects and bytes in L2 once ``wanted`` are there, or after 60 s: storing goes on after the answer."""
        for _try in range(30):
            found = self.files()
            if found[0] >= wanted:
                break
            time.sleep(2)
        return found

    def restart(self) -> None:
        wait = f"until curl -sf -m 5 --noproxy '*' {self.url}/healthcheck; do sleep 2; done"
        answer = self.sh({"up": f'systemctl restart {UNIT} && timeout 600 sh -c "{wait}"'}, fresh=True, timeout_s=660)
        assert answer["up"].ok, f"{UNIT} did not come back: read `journalctl -u {UNIT}`"

    began = 0


def passed(summary: dict[str, Any]) -> str:
    found = re.search(r'"checksum_ok": (\d+), "checksum_fail": (\d+)', json.dumps(summary))
    return f"{found[1]} right, {found[2]} wrong" if found else "no checksums"


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, int]:
    return {name: int(after[name] - before[name]) for name in COUNTERS}


def test_chunks_go_down_to_l2_and_come_back(host: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "Stored chunks are read from L1, lie in L2 in the right size, and are read from L2 after a restart"
    tier = Tier(host, sh)
    tier.began = int(sh({"now": "date +%s"}, fresh=True)["now"].stdout)
    log = f"read `journalctl -u {UNIT}`"
    try:
        before = tier.counters()
        stored = tier.drive()
        found = tier.settle(REQUESTS * CHUNKS)
        first = grown(before, tier.counters())
        check(passed(stored), f"{REQUESTS} right, 0 wrong", log, what="checksums")
        check(first["lookup_hit_l1_tokens"], tier.expected_tokens, log, what="tokens read from L1")
        check(first["lookup_hit_l2_tokens"], 0, "the prompts are new; is another node writing here?", what="from L2")
        wanted = (REQUESTS * CHUNKS, tier.expected_bytes)
        check(
            found,
            wanted,
            "L2 did not get every chunk: is the store policy skip or the disk full?",
            what="objects, bytes",
        )
        digest = tier.digest()
        tier.restart()
        before = tier.counters()
        loaded = tier.drive()
        second = grown(before, tier.counters())
        # The client compares only what it stored itself, so the objects are compared on disk.
        answered = re.search(r'"total_requests": (\d+)', json.dumps(loaded))
        check(answered and int(answered[1]), REQUESTS, log, what="requests answered after a restart")
        check(tier.digest(), digest, "an object in L2 changed under a restart", what="objects unchanged")
        remedy = "L1 was empty, so L2 was not read: compare the plan's L2 directory with the server's"
        # Every prompt is asked twice. What L2 gave once may stay in L1 or not.
        hits = second["lookup_hit_l1_tokens"] + second["lookup_hit_l2_tokens"]
        check(hits, 2 * tier.expected_tokens, remedy, what="tokens found after a restart")
        from_l2 = second["lookup_hit_l2_tokens"]
        least = f"at least {tier.expected_tokens}"
        check(from_l2, least, remedy, ok=from_l2 >= tier.expected_tokens, what="of them in L2")
        check(second["l2_store_completed_objects_chunks"], 0, "a chunk in L2 was stored again", what="stored again")
    finally:
        sh({"clean": f"find {tier.path} -name 'test-model@*' -newermt @{tier.began} -delete"}, fresh=True)
