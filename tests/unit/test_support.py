"""The tools that judge whole runs: node states before and after, and the totals of the test stages."""

from __future__ import annotations

import copy
import importlib.util
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    import sys

    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


STATE: dict[str, Any] = {
    "files": {"/etc/hosts": "file 0644 0:0 aa", "/etc/netplan": "dir 0755 0:0"},
    "packages": ["bash"],
    "owned": {
        "/etc/chrony": "chrony",
        "/etc/chrony/chrony.conf": "chrony",
        "/lib/systemd/system/chrony.service": "chrony",
    },
    "users": ["root:x:0:0::/root:/bin/bash"],
    "groups": ["root:x:0:"],
    "units": {"ssh.service": "enabled"},
    "active": ["ssh.service"],
    "mounts": {"/": "/dev/vda ext4"},
    "sysctls": {"vm.swappiness": "60"},
    "addresses": {"enP7s7": {"mtu": 1500, "addresses": ["192.0.2.1/24"]}},
    "blkid": ["SPARK1L2  "],
    "other_disk": {"keep.bin": "file 0644 0:0 abc"},
}


def changed(**parts: Any) -> dict[str, Any]:
    state = copy.deepcopy(STATE)
    for key, value in parts.items():
        state[key] = {**state[key], **value} if isinstance(value, dict) else state[key] + value
    return state


@pytest.mark.parametrize(
    ("after", "word"),
    [
        (changed(files={"/etc/hosts": "file 0644 0:0 bb"}), "file /etc/hosts"),
        (changed(files={"/etc/netplan/90-goodput-rails.yaml": "file 0600 0:0 cc"}), "90-goodput-rails"),
        (changed(units={"goodput-lmcache.service": "enabled"}), "unit goodput-lmcache.service"),
        (changed(active=["sleep.target"]), "unit sleep.target"),
        (changed(mounts={"/srv/goodput/l2": "/dev/nvme0n1 xfs"}), "mount /srv/goodput/l2"),
        (changed(sysctls={"vm.swappiness": "1"}), "sysctl vm.swappiness: 60 -> 1"),
        (changed(addresses={"enP7s7": {"mtu": 9000, "addresses": []}}), "addresse enP7s7"),
        (changed(users=["goodput:x:999:999::/:/usr/sbin/nologin"]), "user goodput"),
        (changed(blkid=["SPARK1L2 xfs goodput-l2"]), "block device"),
        (changed(other_disk={"keep.bin": "file 0644 0:0 def"}), "the owner's other disk, keep.bin"),
    ],
)
def test_what_a_role_leaves_behind_is_found(after: dict[str, Any], word: str) -> None:
    found = load("tests/support/node_state.py").compare(STATE, after)
    assert len(found) == 1
    assert word in found[0]


def test_what_a_package_brought_is_not_a_difference() -> None:
    after = changed(
        packages=["chrony"],
        files={
            "/etc/chrony": "dir 0755 0:0",
            "/etc/chrony/chrony.conf": "file 0644 0:0 dd",
            "/etc/chrony/keys": "file 0640 0:0 ee",
            # systemctl makes the folder for the first link that a package's unit needs there.
            "/etc/systemd/system/sockets.target.wants": "dir 0755 0:0",
        },
        units={"chrony.service": "enabled"},
        active=["chrony.service"],
        users=["_chrony:x:998:998::/:/usr/sbin/nologin"],
    )
    assert load("tests/support/node_state.py").compare(STATE, after) == []


def test_stage_totals_come_from_the_summary_lines() -> None:
    stages = load("tools/stages.py")
    text = (
        "noise 9 passed\n3 passed, 1 skipped in 0.53s\n===== 2 failed, 40 passed, 1 error in 61.20s (0:01:01) =====\n"
    )
    assert stages.counts(text) == {"passed": 43, "failed": 2, "error": 1, "skipped": 1}


def test_the_reason_of_a_failure_is_found_in_molecules_box_and_in_pytests_report() -> None:
    failures = load("tools/stages.py").failures
    molecule = (
        "  \x1b[32m│\x1b[0m TASK [first]\n  │ ok: [a]\n  │ TASK [second]\n  │\n  │ [ERROR]: no such disk\n"
        "  │ Origin: x.yml:3\n  │ 3 - name: second\n  │ fatal: [a]: FAILED! =>\n"
        "  │   changed: false\n  │   msg: no such disk\n"
    )
    assert failures(molecule) == [
        "TASK [second]",
        "[ERROR]: no such disk",
        "fatal: [a]: FAILED! =>",
        "msg: no such disk",
    ]
    pytest_report = "....\nE   assert 1 == 2\nE\nFAILED tests/x.py::y\n"
    assert failures(pytest_report) == [
        "E   assert 1 == 2",
        "FAILED tests/x.py::y",
    ]
    assert failures("ok: [a]\n") == []


def test_a_killed_run_leaves_no_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even one that has a session of its own, as a strategy plugin's connections have."""
    interrupt = load("tests/support/interrupt.py")
    monkeypatch.setattr(interrupt, "SECONDS_INTO_THE_TASK", 0.3)
    script = tmp_path / "run"
    left_behind = f"setsid sh -c 'echo $$ >{tmp_path}/pid; exec sleep 60' >/dev/null 2>&1 &"
    script.write_text(f"#!/bin/sh\n{left_behind}\necho 'TASK [x : y]'\nsleep 60\n")
    script.chmod(0o755)
    killed, _seconds, _last = interrupt.run_until([str(script)], "x : y")
    left = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/cmdline")
    end = time.monotonic() + 10
    # A zombie has none.
    while left.exists() and left.read_bytes() and time.monotonic() < end:
        time.sleep(0.05)
    assert killed and (not left.exists() or not left.read_bytes())
