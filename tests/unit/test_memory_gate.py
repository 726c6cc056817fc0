"""The gate before an engine: what is not free yet is named with figures, what is given back late is waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import memory_gate as gate

TOTAL_KIB = 127_611_904  # 121.7 GiB
APPS = "4242, /usr/bin/python3, a, 76800\n77, /usr/bin/python3, 5000\n88, Xorg, [N/A]\n99, small, 200\n"


def meminfo(available_kib: int) -> str:
    return f"MemTotal:  {TOTAL_KIB} kB\nMemFree:  1 kB\nMemAvailable:  {available_kib} kB\nHugePages_Total:  0\n"


def test_memory_must_be_above_the_engines_own_check_by_the_margin() -> None:
    wanted_kib = (int(TOTAL_KIB * 1024 * 0.72) + 6_000_000_000) // 1024
    assert gate.findings(gate.meminfo(meminfo(wanted_kib + 1)), gate.Gpu(), 0.72, 6_000_000_000) == []
    [text] = gate.findings(gate.meminfo(meminfo(wanted_kib)), gate.Gpu(), 0.72, 6_000_000_000)
    assert text == "found 93.2 GiB available; required: more than 93.2 GiB (0.72 of 121.7 GiB, and 6 GB)"


def test_another_program_on_the_gpu_is_in_the_way_and_lmcache_is_not() -> None:
    units = {"4242": "goodput-worker.service", "77": "goodput-lmcache.service"}
    found = gate.programs(APPS, lambda pid: units.get(pid, ""))
    assert found == ("pid 4242 (/usr/bin/python3, a of goodput-worker.service) with 76800 MiB of the GPU",)
    plenty = gate.meminfo(meminfo(TOTAL_KIB))
    assert "76800 MiB" in gate.findings(plenty, gate.Gpu(found), 0.72, 0)[0]
    assert gate.programs(APPS, lambda pid: "")[1] == "pid 77 (/usr/bin/python3) with 5000 MiB of the GPU"


def test_the_unit_of_a_process_is_its_innermost_service(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7/cgroup").write_text("0::/system.slice/goodput-lmcache.service\n")
    assert gate.unit_of("7", tmp_path) == "goodput-lmcache.service" and gate.unit_of("8", tmp_path) == ""


def test_it_waits_for_memory_that_comes_back_and_not_longer() -> None:
    now, said = [0.0], list[str]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    def judge() -> list[str]:
        return ["full"] if now[0] < 9 else []

    assert gate.wait(judge, 300, said.append, lambda: now[0], sleep) == ([], 10.0)
    assert said == ["memory: waiting up to 300 s: full"]
    now[0] = 0.0
    assert gate.wait(judge, 5, said.append, lambda: now[0], sleep) == (["full"], 6.0)


def smi(folder: Path, script: str) -> str:
    program = folder / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize(
    ("available_kib", "script", "status", "said"),
    [
        (TOTAL_KIB, "exit 0", 0, ""),
        (TOTAL_KIB, "echo '4242, engine, 76800'", 1, "pid 4242 (engine) with 76800 MiB of the GPU; required:"),
        (1000, "exit 0", 1, "found 0.0 GiB available; required: more than 93.2 GiB"),
        # A broken driver is the engine's to report.
        (TOTAL_KIB, "echo broken; exit 9", 0, "not known: "),
    ],
)
def test_it_ends_with_found_required_and_fix(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], available_kib: int, script: str, status: int, said: str
) -> None:
    (tmp_path / "meminfo").write_text(meminfo(available_kib))
    words = ["--utilization", "0.72", "--margin-bytes", "6000000000", "--seconds", "0"]
    words += ["--meminfo", str(tmp_path / "meminfo"), "--nvidia-smi", smi(tmp_path, script)]
    assert gate.main(words) == status
    text = "".join(capsys.readouterr())
    assert said in text and ("fix:" in text) == bool(status)


@pytest.mark.parametrize(("available_kib", "said"), [(TOTAL_KIB, "engine 7"), (1000, "delete the pod")])
def test_in_a_pod_the_engine_starts_once_memory_is_free(tmp_path: Path, available_kib: int, said: str) -> None:
    (tmp_path / "meminfo").write_text(meminfo(available_kib))
    words = ["--utilization", "0.72", "--margin-bytes", "6000000000", "--seconds", "0"]
    words += ["--meminfo", str(tmp_path / "meminfo")]
    # Another container's processes have no name here, so LMCache would be taken for a stranger: nobody is asked.
    words += ["--nvidia-smi", smi(tmp_path, "echo '4242, lmcache, 76800'")]
    program = [sys.executable, gate.__file__, *words, "--", "sh", "-c", 'echo engine "$1"', "--", "7"]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) == ("engine" in said) == ("engine" in done.stdout), done
    assert said in done.stdout + done.stderr
