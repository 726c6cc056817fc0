"""Ansible on this machine, as an operator starts it: this checkout's configuration and nothing of the caller's."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_playbook(
    inventory: Path | str, playbook: Path | str, *arguments: str, timeout_s: float | None = None, **environment: str
) -> subprocess.CompletedProcess[str]:
    """``ansible-playbook`` from the root of the checkout, without colours and without an ``ANSIBLE_`` of the caller."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    clean |= {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_FORCE_COLOR": "0",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
    }
    program = Path(sys.executable).with_name("ansible-playbook")
    return subprocess.run(
        [str(program), "-i", str(inventory), str(playbook), *arguments],
        cwd=ROOT,
        env=clean | environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )
