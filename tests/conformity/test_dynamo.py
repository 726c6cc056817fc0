"""The real Dynamo 1.6.1: its mocker, worker and frontend parsers take what we render for them.

Of a vLLM worker only Dynamo's own arguments are checked here (the archive has no vLLM); vLLM's are in test_vllm.
"""

from __future__ import annotations

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import serving
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from conftest import Ask, filled
from kv_plan.kv_helpers import plan


@pytest.mark.parametrize("discovery", serving.DISCOVERIES)
def test_every_argument_is_accepted(runtime: Ask, discovery: str) -> None:
    # What each platform adds to our lists.
    planes = [word for pair in serving.planes(discovery)["arguments"].items() for word in pair]
    plans = {name: plan(name) for name in files.names_in(files.PROFILES)}
    plans["round-robin"] = plan("super-recommended", settings={"router.mode": "round-robin"})
    mockers = [item for item in plans.values() if item["inputs"]["profile"]["engine"] == "mocker"]
    engines = [item for item in plans.values() if item["inputs"]["profile"]["engine"] == "vllm"]
    own = [item["dynamo_worker_args"][: -len(item["vllm_args"])] for item in engines]
    answer = runtime(
        "dynamo_child.py",
        {
            "worker": [filled(words) + planes for words in own],
            "mocker": [filled(item["dynamo_worker_args"]) + planes for item in mockers],
            "frontend": [filled(item["dynamo_frontend_args"]) + planes for item in plans.values()],
        },
    )
    assert [found for name in answer for found in answer[name] if "error" in found] == []
    assert all(found["planes"] == [discovery, "tcp", "zmq"] for found in answer["worker"])
    for item, found in zip(mockers, answer["mocker"], strict=True):
        assert found["block_size"] == item["sizes"]["block_size_tokens"]
        assert found["num_gpu_blocks"] == item["sizes"]["kv_blocks"]
    for item, found in zip(plans.values(), answer["frontend"], strict=True):
        assert found["router_mode"] == item["inputs"]["profile"]["router"]["mode"]
    count = sum(found["arguments"] for name in answer for found in answer[name])
    what = ", ".join(f"{len(answer[name])} {name}s" for name in answer)
    print(f"\nDynamo 1.6.1 accepted {count} arguments with discovery {discovery} ({what})")
    assert mockers and engines and count > 120


@pytest.mark.parametrize(
    ("kind", "change"),
    [("mocker", ("--block-size", "--blocksize")), ("frontend", ("--migration-limit", "--migrations-limit"))],
)
def test_a_misspelt_argument_is_refused(runtime: Ask, kind: str, change: tuple[str, str]) -> None:
    words = plan("virtual")["dynamo_worker_args" if kind == "mocker" else "dynamo_frontend_args"]
    request: dict[str, list[list[str]]] = {"mocker": [], "frontend": []}
    request[kind] = [[word.replace(*change) for word in filled(words)]]
    answer = runtime("dynamo_child.py", request)
    assert "unrecognized arguments" in answer[kind][0]["error"]
