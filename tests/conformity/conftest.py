"""Environments of the real upstreams, and a way to ask them. A missing environment is a failure, not a skip: these
tests have their own targets (``make conformity``, ``make conformity-vllm``)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
for entry in (ROOT / "src", ROOT / "collections", ROOT / "tests/unit"):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))

Ask = Callable[[str, dict[str, Any]], dict[str, Any]]
PLACEHOLDERS = {
    "{management_address}": "192.0.2.1",
    "{node}": "spark1",
    "{first_node_address}": "192.0.2.1",
    "{coordinator_address}": "192.0.2.1",
    "{rail_address}": "198.51.100.1",
    "{rail_devices}": "rocep1s0f0:1",
    "{l2_path}": "/srv/goodput/l2/x",
    "{model_path}": "/srv/goodput/models/m",
    "{model_name}": "m",
}


def filled(words: list[str]) -> list[str]:
    """Placeholders as a node would fill them in."""
    result = []
    for word in words:
        for name, value in PLACEHOLDERS.items():
            word = word.replace(name, value)
        result.append(word)
    return result


def _ask(python: list[str], env: dict[str, str], script: str, request: dict[str, Any]) -> dict[str, Any]:
    result = subprocess.run(
        [*python, str(HERE / script)],
        input=json.dumps(request),
        capture_output=True,
        text=True,
        timeout=900,
        env=os.environ | env,
        cwd="/",
    )
    lines = result.stdout.strip().splitlines()
    if not lines:
        pytest.fail(f"{script} said nothing (exit {result.returncode}):\n{result.stderr[-4000:]}")
    answer: dict[str, Any] = json.loads(lines[-1])
    if "crash" in answer:
        pytest.fail(f"{script}:\n{answer['crash']}")
    return answer


def prepared(what: str) -> Path:
    result = subprocess.run([sys.executable, str(HERE / "prepare.py"), what], stdout=subprocess.PIPE, text=True)
    if result.returncode:
        pytest.fail(f"prepare.py {what} failed, see above")
    return Path(result.stdout.strip().splitlines()[-1])


@pytest.fixture(scope="session")
def runtime() -> Ask:
    """Ask a child in the environment of LMCache and Dynamo."""
    target = prepared("runtime")
    env = {"PYTHONPATH": str(target / "site-packages"), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONSAFEPATH": "1"}
    return lambda script, request: _ask(["python3.11"], env, script, request)


@pytest.fixture(scope="session")
def vllm() -> Ask:
    """Ask a child in the environment of vLLM."""
    target = prepared("vllm")
    env = {
        "PYTHONDONTWRITEBYTECODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return lambda script, request: _ask([str(target / "bin/python")], env, script, request)
