"""The router knows who is busy: a prefix does not bind requests to a worker that can not keep up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from test_70_dynamo import WORKER, Site, long_prompt

TOGETHER = 24


@pytest.mark.unit(WORKER)
def test_a_busy_worker_is_left(first: Any, nodes: list[Any], check: Callable[..., None]) -> None:
    "Requests with one prefix leave the worker that holds it when it is busy"
    if len(nodes) == 1:
        pytest.skip("only one node is in this run")
    site = Site(first, nodes)
    # About 600 tokens that all share, two blocks at least. In the crowd each adds 250 of its own, so that after a few
    # of them the prefix is worth less than what is queued where it lies.
    prefix = long_prompt(300, tokens=2 * site.block_tokens + 64)
    [warm] = site.ask(prefix)
    alone = site.ask(*(f"{prefix} {number}" for number in range(3)))
    homes = Counter(answer["worker"] for answer in alone)
    remedy = "the router does not see what the workers hold: are KV events and the block size right?"
    check(dict(homes), {warm["worker"]: 3}, remedy, what="one after the other")
    crowd = site.ask(*(f"{prefix} {long_prompt(120)}" for _each in range(TOGETHER)), tokens=64, together=TOGETHER)
    spread = Counter(answer["worker"] for answer in crowd)
    remedy = "the router looks at the prefix alone: compare its --router options with the plan"
    check(len(spread), f"{len(nodes)} workers", remedy, ok=len(spread) == len(nodes), what=f"{TOGETHER} at once")
