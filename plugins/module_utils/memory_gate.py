# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Wait until an engine's memory is free, before it starts. Runs on a node; standard library only.

CPU and GPU share one memory, and what a former engine held is given back some time after its end. Weights that are
loaded into it fail, or freeze the node. MemAvailable alone does not tell: 74.8 GB of weights failed while it read
97 GB. So both must hold: MemAvailable is above what vLLM will check (MemTotal x utilization) by a margin, and no other
program computes on the GPU with more than 1 GiB. LMCache's server is no other program: its share is in the plan.

As ExecStartPre of a unit, or in a pod before the engine, ``memory_gate.py … -- COMMAND``. There MemAvailable alone is
asked: a pod knows neither the host's processes nor which of them is LMCache.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

GIB = 2**30
FOREIGN_MIB = 1024
POLL_SECONDS = 2.0
SMI_SECONDS = 10.0
OURS = "goodput-lmcache.service"
WARNING = "<4>"


@dataclass(frozen=True)
class Gpu:
    """Programs that hold the GPU's memory, in words; ``problem`` says why nothing is known."""

    programs: tuple[str, ...] = ()
    problem: str = ""


def meminfo(text: str) -> tuple[int, int]:
    """(MemTotal, MemAvailable) in bytes."""
    found = {name: int(kib) * 1024 for name, kib in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}
    return found["MemTotal"], found["MemAvailable"]


def unit_of(pid: str, proc: Path = Path("/proc")) -> str:
    """The service that a process belongs to; empty if none or if it has ended."""
    try:
        names = re.findall(r"/([^/\n]+\.service)(?=/|\n|$)", (proc / pid / "cgroup").read_text())
    except OSError:
        return ""
    return names[-1] if names else ""


def programs(text: str, unit: Callable[[str], str] = unit_of) -> tuple[str, ...]:
    """Those of nvidia-smi's lines ``pid, name, MiB`` that are in the way. A memory of [N/A] counts as none."""
    found = []
    for line in text.splitlines():
        pid, _, rest = line.strip().partition(", ")
        name, _, memory = rest.rpartition(", ")
        if not memory.strip().isdigit() or int(memory) <= FOREIGN_MIB:
            continue
        owner = unit(pid)
        if owner != OURS:
            found.append(f"pid {pid} ({name}{f' of {owner}' if owner else ''}) with {memory.strip()} MiB of the GPU")
    return tuple(found)


def look(program: str = "nvidia-smi") -> Gpu:
    command = [program, "--query-compute-apps=pid,process_name,used_memory", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SMI_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Gpu(problem=f"{program}: {error}")
    if done.returncode:
        return Gpu(problem=f"{program} ended with exit {done.returncode}: {(done.stdout + done.stderr).strip()[:200]}")
    return Gpu(programs(done.stdout))


def findings(memory: tuple[int, int], gpu: Gpu, utilization: float, margin_bytes: int) -> list[str]:
    """What is not free yet, with figures; empty when the engine may start."""
    total, available = memory
    wanted = int(total * utilization) + margin_bytes
    found = []
    if available <= wanted:
        found.append(
            f"found {available / GIB:.1f} GiB available; required: more than {wanted / GIB:.1f} GiB "
            f"({utilization:g} of {total / GIB:.1f} GiB, and {margin_bytes / 1e9:g} GB)"
        )
    if gpu.programs:
        found.append(f"found {'; '.join(gpu.programs)}; required: no other program with more than {FOREIGN_MIB} MiB")
    return found


def wait(
    judge: Callable[[], list[str]],
    limit_seconds: float,
    say: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[str], float]:
    """(what is in the way at the end, seconds waited); says once what it waits for."""
    began = clock()
    first = True
    while True:
        found = judge()
        waited = clock() - began
        if not found or waited >= limit_seconds:
            return found, waited
        if first:
            say(f"memory: waiting up to {limit_seconds:g} s: {'; '.join(found)}")
        first = False
        sleep(POLL_SECONDS)


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    cut = given.index("--") if "--" in given else len(given)
    command = given[cut + 1 :]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--utilization", type=float, required=True, help="the engine's --gpu-memory-utilization")
    parser.add_argument("--margin-bytes", type=int, required=True, help="what must be free beyond that")
    parser.add_argument("--seconds", type=float, required=True, help="how long to wait")
    parser.add_argument("--meminfo", type=Path, default=Path("/proc/meminfo"))
    parser.add_argument("--nvidia-smi", default="nvidia-smi")
    options = parser.parse_args(given[:cut])

    def judge() -> list[str]:
        gpu = Gpu() if command else look(options.nvidia_smi)
        problems.update(filter(None, [gpu.problem]))
        return findings(meminfo(options.meminfo.read_text()), gpu, options.utilization, options.margin_bytes)

    problems: set[str] = set()
    found, waited = wait(judge, options.seconds, lambda text: print(text, flush=True))
    for problem in sorted(problems):
        # The engine will say more about a broken driver; memory has been judged.
        print(f"{WARNING}memory: other programs on the GPU are not known: {problem}", flush=True)
    if found:
        print(
            f"memory after {waited:.0f} s: {'; '.join(found)}; fix: end what holds it (`nvidia-smi`, "
            "`ps -eo pid,rss,args --sort -rss | head`; in a pod LMCache may hold what a crashed engine left: delete "
            "the pod), or plan a smaller arrangement; the next start looks again",
            file=sys.stderr,
            flush=True,
        )
        return 1
    if waited >= 1:
        print(f"memory is free after {waited:.0f} s", flush=True)
    if command:
        os.execvp(command[0], command)
    return 0


if __name__ == "__main__":
    sys.exit(main())
