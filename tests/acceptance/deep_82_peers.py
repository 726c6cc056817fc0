"""A chunk that only the other node holds is found and read from there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lmcache_client import UNIT, Tier, grown

# What the transfer engines write of connections and reads that failed.
TROUBLE = "Rail paused|Handshake rejected|Transfer failed|Transfer timed out"

pytestmark = pytest.mark.unit(UNIT)


def test_a_chunk_of_the_peer_is_read(host: Any, peer: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "A chunk stored on the other node alone is read from its L1"
    here, there = Tier(host, sh), Tier(peer, sh)
    if "--p2p-advertise-url" not in here.flags:
        pytest.skip("this arrangement has no peers")
    here.start = there.start
    log = f"read `journalctl -u {UNIT} -u goodput-coordinator`"
    try:
        found = here.status()
        check(found.get("p2p_state"), "registered", log, what="state at the coordinator")
        check(found.get("p2p_peers"), [there.flags["--instance-id"]], log, what="peers")
        stored = there.drive()
        before, loads = here.counters(), here.counter("l2_load_completed_requests", 'l2_name="p2p"')
        loaded = here.drive()
        got = grown(before, here.counters())
        loads = here.counter("l2_load_completed_requests", 'l2_name="p2p"') - loads
        check(stored.passed, f"{there.requests} right, 0 wrong", log, what=f"stored on {peer.name}")
        check(loads, f"at least {here.requests}", log, ok=loads >= here.requests, what="loads from the peer")
        hits = got["lookup_hit_l1_tokens"] + got["lookup_hit_l2_tokens"]
        check(hits, 2 * here.expected_tokens, log, what="tokens found")
        check(loaded.checksums, stored.checksums, "what was read is not what was stored", what="checksums")
        # A read that is repeated over another way may be answered by the first one, too late and at the wrong place.
        trouble = f"journalctl -q --no-pager -u {UNIT} --since @{here.began} -g '{TROUBLE}' -o cat | tail -n 3"
        check(
            here.run(trouble).stdout.splitlines(), [], "look at the rails; see docs/serving.md", what="failed transfers"
        )
    finally:
        here.remove()
        there.remove()
