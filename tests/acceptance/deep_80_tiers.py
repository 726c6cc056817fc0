"""Each cache tier does its work: LMCache's own client stores and loads real chunks on every node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lmcache_client import UNIT, Tier, grown

pytestmark = pytest.mark.unit(UNIT)
LOG = f"read `journalctl -u {UNIT}`"


def test_chunks_go_down_to_l2_and_come_back(host: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "Stored chunks are read from L1, lie in L2 in the right size, and are read from L2 after a restart"
    tier = Tier(host, sh)
    if not tier.adapter:
        pytest.skip("this arrangement has no L2")
    try:
        before = tier.counters()
        stored = tier.drive()
        full = "L2 did not get every chunk: is the store policy skip or L2 full?"
        check(tier.stored(before), tier.expected_objects, full, what="objects stored")
        first = grown(before, tier.counters())
        check(stored.passed, f"{tier.requests} right, 0 wrong", LOG, what="checksums")
        check(first["lookup_hit_l1_tokens"], tier.expected_tokens, LOG, what="tokens read from L1")
        check(first["lookup_hit_l2_tokens"], 0, "the prompts are new; is another node writing here?", what="from L2")
        if tier.path:
            check(tier.files(), (tier.expected_objects, tier.expected_bytes), full, what="files, bytes")
            digest = tier.digest()
        tier.restart()
        before = tier.counters()
        loaded = tier.drive()
        second = grown(before, tier.counters())
        check(loaded.requests, tier.requests, LOG, what="requests answered after a restart")
        check(loaded.checksums, stored.checksums, "what was read is not what was stored", what="checksums after it")
        if tier.path:
            check(tier.digest(), digest, "an object in L2 changed under a restart", what="objects unchanged")
        remedy = "L1 was empty, so L2 was not read: compare the plan's L2 with the server's"
        # Every prompt is asked twice. What L2 gave once may stay in L1 or not.
        hits = second["lookup_hit_l1_tokens"] + second["lookup_hit_l2_tokens"]
        check(hits, 2 * tier.expected_tokens, remedy, what="tokens found after a restart")
        from_l2 = second["lookup_hit_l2_tokens"]
        least = f"at least {tier.expected_tokens}"
        check(from_l2, least, remedy, ok=from_l2 >= tier.expected_tokens, what="of them in L2")
        check(second["l2_store_completed_objects_chunks"], 0, "a chunk in L2 was stored again", what="stored again")
    finally:
        tier.remove()
