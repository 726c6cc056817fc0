"""Requests that can not be served get an answer that says why, and nobody falls over."""

from __future__ import annotations

import json

import pytest
from conftest import Pair
from watch import URL

CLIENT = """
import concurrent.futures, json, subprocess, urllib.error, urllib.request
opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
model = json.load(opener.open("URL/v1/models"))["data"][0]["id"]
def body(content, **more):
    message = {"role": "user", "content": content}
    return json.dumps({"model": model, "max_tokens": 4, "messages": [message], **more}).encode()
def post(data):
    request = urllib.request.Request("URL/v1/chat/completions", data, {"Content-Type": "application/json"})
    try:
        with opener.open(request, timeout=300) as answer:
            return [answer.status, answer.read().decode()[:400]]
    except urllib.error.HTTPError as error:
        return [error.code, error.read().decode(errors="replace")[:400]]
    except OSError as error:
        return [0, repr(error)]
def large(data):
    # The refusal comes before all was sent, which only some clients read.
    words = ["curl", "-s", "-m", "60", "--noproxy", "*", "-H", "Content-Type: application/json", "-w", " %{http_code}"]
    # What the server had not read yet makes the system reset the connection, now and then before the client has read.
    for _try in range(6):
        answer = subprocess.run(
            [*words, "--data-binary", "@-", "URL/v1/chat/completions"], input=data, capture_output=True
        )
        text, _, status = answer.stdout.decode().rpartition(" ")
        if int(status) >= 200:
            break
    return [int(status), text]
bad = {
    "empty body": b"",
    "no JSON": b"{",
    "no messages": json.dumps({"model": model, "messages": []}).encode(),
    "unknown model": body("hello", model="no-such-model"),
    "invalid UTF-8": body("hello").replace(b"hello", b"\\xff\\xfe"),
    "too long": body("word " * 20000),
    "negative max_tokens": body("hello", max_tokens=-1),
}
answers = {name: post(data) for name, data in bad.items()}
answers["10 MB"] = large(body("x" * 10_000_000))
answers["empty prompt"] = post(body(""))
with concurrent.futures.ThreadPoolExecutor(200) as pool:
    crowd = list(pool.map(post, [body(f"number {n}") for n in range(200)]))
answers["crowd"] = [sum(status == 200 for status, _ in crowd), sorted({str(a)[:120] for a in crowd if a[0] != 200})]
print(json.dumps(answers))
"""
PIDS = "systemctl show -P MainPID goodput-frontend goodput-worker goodput-lmcache goodput-etcd"


@pytest.mark.fault("bad request")
def test_bad_requests_are_refused_with_a_reason(pair: Pair) -> None:
    before = {node: pair.sh(node, PIDS) for node in ("spark1", "spark2")}
    script = f"python3 - <<'CLIENT'\n{CLIENT.replace('URL', URL)}\nCLIENT"
    answers = json.loads(pair.sh("spark1", script, timeout=600))
    print(json.dumps(answers, indent=2))
    crowd = answers.pop("crowd")
    assert crowd == [200, []]
    # Dynamo repairs the encoding; an empty prompt is one; and the simulated engine has no longest prompt.
    for name in ("empty prompt", "invalid UTF-8", "too long"):
        status, text = answers.pop(name)
        assert status == 200 or (400 <= status < 500 and len(text) > 10), (name, status, text)
    assert answers["10 MB"][0] == 413
    wrong = {name: answer for name, answer in answers.items() if not (400 <= answer[0] < 500 and len(answer[1]) > 10)}
    assert not wrong
    assert {node: pair.sh(node, PIDS) for node in before} == before, "a process fell over"
