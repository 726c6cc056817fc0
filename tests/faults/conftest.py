"""Faults are put into the running virtual pair, must be named with cause and remedy, and heal by a re-run.

A test injects with ``pair.sh``, asks the product (a play, or the acceptance suite), repairs the way the remedy says,
and shows that the layer is ok again. ``docs/troubleshooting.md`` is checked against the ``fault`` markers: each row
names the test that proves its message.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
INVENTORY = ROOT / "inventory/virtual"
BIN = Path(sys.executable).parent


@dataclass(frozen=True)
class Outcome:
    """What a command said; ``text`` is stdout and stderr without colour and with line wrapping undone."""

    rc: int
    text: str

    def failed_with(self, *words: str) -> None:
        """The run failed and every word is in what it said."""
        assert self.rc != 0, f"expected a refusal, got success:\n{self.text[-3000:]}"
        missing = [word for word in words if word.lower() not in self.text.lower()]
        assert not missing, f"missing {missing} in:\n{self.text[-4000:]}"

    def succeeded(self) -> None:
        assert self.rc == 0, self.text[-4000:]


class Pair:
    """The virtual pair as an operator sees it: plays, the verdict, and a root shell on a node."""

    def __init__(self, scratch: Path) -> None:
        self.scratch = scratch
        hosts = yaml.safe_load((INVENTORY / "hosts.yml").read_text())["sparks"]
        self.common = hosts["vars"]
        self.hosts = hosts["hosts"]

    def command(self, *argv: str, timeout: float = 900) -> Outcome:
        env = {**os.environ, "ANSIBLE_NOCOLOR": "1", "NO_COLOR": "1", "PATH": f"{BIN}:{os.environ['PATH']}"}
        env["ANSIBLE_DIFF_ALWAYS"] = "False"
        result = subprocess.run(
            argv, cwd=ROOT, env=env, text=True, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout
        )
        text = re.sub(r"\x1b\[[0-9;]*m", "", result.stdout + result.stderr).replace("\\n", "\n")
        return Outcome(result.returncode, text)

    def play(self, playbook: str, *arguments: str, inventory: Path = INVENTORY, **extra: Any) -> Outcome:
        """``ansible-playbook playbook`` with extra variables given as keywords."""
        variables = ["-e", json.dumps(extra)] if extra else []
        # First, since a second playbook may be among them.
        return self.command("ansible-playbook", "-i", str(inventory), playbook, *arguments, *variables)

    def role(self, role: str, tasks: str = "main", *arguments: str, **extra: Any) -> Outcome:
        """One task file of one role."""
        return self.play("playbooks/role.yml", *arguments, role=role, tasks_from=tasks, **extra)

    def verify(self, *layers: str) -> tuple[Outcome, list[dict[str, Any]]]:
        """The acceptance suite on some layers: what it said, and the failures of its verdict."""
        path = self.scratch / "verdict.json"
        path.unlink(missing_ok=True)
        flags = [word for layer in layers for word in ("--layer", layer)]
        outcome = self.command(
            sys.executable, "-m", "goodput.verify", "--inventory", str(INVENTORY), *flags, "--output", str(path)
        )
        failures = json.loads(path.read_text())["failures"] if path.exists() else []
        return outcome, failures

    def sh(self, node: str, script: str, check: bool = True, timeout: float = 300) -> str:
        """Run a script as root on a node; returns stdout."""
        options = self.common["ansible_ssh_common_args"].split()
        target = ["-i", self.common["ansible_ssh_private_key_file"], "-p", str(self.hosts[node]["ansible_port"])]
        command = [
            "ssh",
            *options,
            "-o",
            "ConnectTimeout=60",
            *target,
            f"{self.common['ansible_user']}@127.0.0.1",
            "sudo sh -e",
        ]
        result = subprocess.run(command, input=script, capture_output=True, text=True, timeout=timeout)
        assert not check or result.returncode == 0, f"{node}: {script}\n{result.stdout}{result.stderr}"
        return result.stdout


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    if not (INVENTORY / "hosts.yml").exists():
        pytest.fail("no virtual pair: run `make virtual-up` and `make site` first")
    yield Pair(tmp_path_factory.mktemp("faults"))


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "fault(name): the row of docs/troubleshooting.md that the test proves")
