"""L2 stays below its cap when more is stored than it may hold."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
from lmcache_client import UNIT, Shape, Tier

pytestmark = pytest.mark.unit(UNIT)
#: More than this would take minutes and wear the disk: lower the cap for the proof.
LARGEST_GIB = 0.25
OVER = 1.5


def test_eviction_holds_the_cap(host: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "Half as much again as the cap is stored; eviction keeps L2 below it"
    tier = Tier(host, sh, chunks=8)
    cap_gib = float(tier.adapter.get("max_capacity_gb", 0))
    if not tier.path or cap_gib <= 0:
        pytest.skip("this arrangement has no L2 in files")
    if cap_gib > LARGEST_GIB:
        pytest.skip(f"a cap of {cap_gib:g} GiB would take long to fill: prove it with one up to {LARGEST_GIB} GiB")
    # 2 MiB a chunk of 256 tokens, so that the cap is reached with few requests.
    tier.shape = Shape(layers=16, head=128)
    request_bytes = tier.chunks * tier.chunk_tokens * tier.shape.bytes_per_token
    cap_bytes = int(cap_gib * 2**30)
    tier.requests = int(cap_bytes * OVER / request_bytes) + 1
    log = f"read `journalctl -u {UNIT}`"
    try:
        before = tier.counters()
        drive = tier.drive()
        written = tier.stored(before) * tier.chunk_tokens * tier.shape.bytes_per_token
        check(drive.requests, tier.requests, log, what="requests answered")
        check(written, f"more than the cap, {cap_bytes}", log, ok=written > cap_bytes, what="bytes stored")
        # LMCache evicts once a second.
        time.sleep(5)
        used = int(tier.run(f"du -sB1 {tier.path}").stdout.split()[0])
        check(
            used, f"at most {cap_bytes}", f"eviction does not hold the cap; {log}", ok=used <= cap_bytes, what="bytes"
        )
    finally:
        tier.remove()
