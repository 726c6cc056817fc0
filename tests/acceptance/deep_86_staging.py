"""Restores that arrive together: what L1 has room for is served whole, and one more gets nothing and is counted."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import l1
from lmcache_client import BLOCK_TOKENS, RUNTIME, UNIT, Shape, Tier

pytestmark = pytest.mark.unit(UNIT)
CHUNKS, TOGETHER = 2, 6
# L1 holds five prompts and a bit, so five restores and not six.
PROMPTS_IN_L1 = 5.3
LAYERS = 24
# The client beside its prompt, which it has twice: 507 MiB were seen with a prompt of 48 MiB.
CLIENT_MIB = 450
# Every prompt is stored with an empty L1 and reaches L2; then all are looked up before the first is read.
CLIENT = """
import json, sys, time, urllib.request
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig
rpc, url, tokens, blocks, layout, start, count = sys.argv[1:4] + [int(sys.argv[4])] + sys.argv[5:]
tokens, start, count = int(tokens), int(start), int(count)
client = ServerBenchClient(BenchConfig(rpc_url=rpc, http_url=url, mode="cpu", transfer_mode="engine_driven", tp_size=1,
    use_mla=False, num_tokens=tokens, kvcache_shape_spec=layout, num_blocks=blocks, block_size=16), lambda _: None)
web = urllib.request.build_opener(urllib.request.ProxyHandler({}))
def clear():
    web.open(urllib.request.Request(url + "/cache/clear", b'{"tier": "l1"}', {"Content-Type": "application/json"}))
def in_l2():
    lines = web.open(url + "/metrics").read().decode().splitlines()
    name = "lmcache_mp_l2_store_completed_objects_chunks_total"
    return sum(float(line.split()[-1]) for line in lines if line.startswith(name))
def request(number, kind):
    return client.create_request(start + number, "staging-%d-%s" % (start + number, kind), kind)
out = {"stored": 0, "together": [], "right": 0, "again": 0}
client.start()
try:
    sums = {}
    for number in range(count):
        one, before = request(number, "cold"), in_l2()
        client.lookup(one)
        sums[number] = client.compute_checksums(one, 0, one.num_full_tokens)
        client.store(one, 0, one.num_full_tokens)
        client.end_session(one)
        for _try in range(60):
            if in_l2() - before >= one.total_chunks:
                break
            time.sleep(1)
        out["stored"] += int(in_l2() - before)
        clear()
    waiting = [request(number, "warm") for number in range(count)]
    out["together"] = [client.lookup(one).hit_chunks for one in waiting]
    for number, (one, hits) in enumerate(zip(waiting, out["together"])):
        if hits:
            found = hits * one.chunk_size
            client.zero_destination(one, 0, found)
            client.retrieve(one, 0, found)
            out["right"] += client.compute_checksums(one, 0, found) == sums[number][:hits]
        client.end_session(one)
    clear()
    last = request(count - 1, "again")
    out["again"] = client.lookup(last).hit_chunks
    client.retrieve(last, 0, out["again"] * last.chunk_size)
    client.end_session(last)
finally:
    client.close()
    print(json.dumps(out))
"""


def test_restores_together(host: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "As many restores at once as L1 has room for are served whole; one more gets nothing, and the counters say why"
    tier = Tier(host, sh, requests=TOGETHER, chunks=CHUNKS)
    if not tier.adapter:
        pytest.skip("this arrangement has no L2 to restore from")
    l1_bytes = int(float(tier.flags["--l1-size-gb"]) * 2**30)
    prompt_tokens = CHUNKS * tier.chunk_tokens
    tier.shape = Shape(LAYERS, int(l1_bytes / PROMPTS_IN_L1 / prompt_tokens / (4 * LAYERS)))
    slots = l1_bytes // (tier.chunk_tokens * tier.shape.bytes_per_token)
    predicted = [one.hit_chunks for one in l1.predict_restores(slots, 0, [CHUNKS] * TOGETHER)]
    # A node without swap that runs out of memory does not come back by itself.
    needed_mib = CLIENT_MIB + 2 * prompt_tokens * tier.shape.bytes_per_token // 2**20
    available_mib = int(tier.run("awk '/^MemAvailable/ {print $2}' /proc/meminfo").stdout) // 1024
    if available_mib < needed_mib:
        pytest.skip(f"{available_mib} MiB available for a client of {needed_mib} MiB")
    blocks = prompt_tokens // BLOCK_TOKENS
    layout = f"(2,{blocks},{BLOCK_TOKENS},1,{tier.shape.head}):float16:{LAYERS}"
    words = ["runuser", "-u", "goodput", "--", "env", "HOME=/tmp", "LMCACHE_TRACK_USAGE=false"]
    words += [f"PYTHONPATH={RUNTIME}/site-packages", "python3", "-c", CLIENT, tier.rpc, tier.url]
    words += [str(prompt_tokens), str(blocks), layout, str(tier.start), str(TOGETHER)]
    log = f"read `journalctl -u {UNIT}`"
    try:
        before = tier.metrics()
        answer = tier.run(shlex.join(words), timeout_s=600)
        assert answer.ok, f"the client ended with {answer.rc}: {answer.stderr[-600:]}"
        seen = json.loads(answer.stdout[answer.stdout.rfind('{"stored"') :])
        after = tier.metrics()
        short = tier.counter("l2_prefetch_failure_chunks", 'reason="l1_oom"', after)
        short -= tier.counter("l2_prefetch_failure_chunks", 'reason="l1_oom"', before)
        check(seen["stored"], TOGETHER * CHUNKS, log, what="objects in L2")
        check(sorted(seen["together"], reverse=True), predicted, log, what=f"chunks restored of {slots} in L1")
        served = sum(hits > 0 for hits in predicted)
        check(seen["right"], served, "what was restored is not what was stored", what="restored whole and right")
        check(short, CHUNKS * (TOGETHER - served), log, what="chunks without room, as the server counts them")
        said = tier.run(
            f"journalctl -q -o cat -u {UNIT} --since @{tier.began} -g 'Failed to batched allocate' | tail -n1"
        )
        check("short by" in said.stdout, served < TOGETHER, log, what="and its journal names the blocks that lack")
        check(seen["again"], CHUNKS, "a failed restore must work when there is room", what="the failed one, alone")
    finally:
        tier.remove()
