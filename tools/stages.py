#!/usr/bin/env python3
"""Run the stages of `make test` in order, stop at the first that fails, and say what ran and how long it took.

Each stage's output goes to ``.goodput/test/STAGE.log``; the end of a failed stage's log is printed, and its failures
again after the summary, so that they are at hand where only the end of the output is kept. The last line is
``N passed, N failed, N skipped`` over all test runners and stages, after the reasons of everything that was skipped.
Exit 0 all passed, 1 a stage failed.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".goodput/test"
NEXT_VENV = ".venv-core-next"


@dataclass
class Stage:
    """One command; ``env_file`` loads the virtual pair's environment first, once it exists."""

    name: str
    command: list[str]
    env_file: bool = False
    skip: str = ""
    #: Why it runs only when it is named.
    optional: str = ""
    extra_env: dict[str, str] = field(default_factory=dict)


def other_python() -> str | None:
    """An interpreter for the other supported end of ansible-core: 2.21 needs 3.12 or newer, 2.19 runs on 3.11."""
    wanted = ("3.13", "3.12", "3.14") if sys.version_info < (3, 12) else ("3.11",)
    names = [f"python{version}" for version in wanted]
    for name in names:
        for folder in [*os.environ.get("PATH", "").split(":"), *map(str, Path.home().glob(".pyenv/versions/*/bin"))]:
            path = shutil.which(name, path=folder)
            # A version manager's shim answers only for the version it selects.
            if path and subprocess.run([path, "-c", "import ensurepip"], capture_output=True).returncode == 0:
                return path
    return None


def kube_data() -> dict[str, str]:
    """What tests/conformity uses where it lies beside the checkout: an API server and CRDs, controllers, containerd."""
    shared = ROOT.parent / "shared"
    beside = {"GOODPUT_KUBE_DATA": shared / "kube", "GOODPUT_K3S_AIRGAP": shared / "k3s-standin"}
    return {name: str(path) for name, path in beside.items() if path.is_dir() and name not in os.environ}


def k3s_folder() -> tuple[str, str]:
    """(folder with a K3s release for the pair's guests, why there is none): as named in the environment."""
    folder = os.environ.get("GOODPUT_K3S_AIRGAP", "")
    if not folder:
        return "", "30 minutes, and GOODPUT_K3S_AIRGAP names no folder with a K3s release"
    if platform.machine() != "x86_64":
        return "", f"the release in {folder} is for amd64, and the guests are {platform.machine()}"
    return str(Path(folder).resolve()), ""


def stages() -> list[Stage]:
    play = ["ansible-playbook", "-i", "inventory/virtual"]
    python = other_python()
    why = "" if python else "no second Python (3.12 or newer, or 3.11 beside a newer one) on this machine"
    other = python or "python3"
    k3s, no_k3s = k3s_folder()
    # Kubernetes needs more than guests have otherwise. Fresh: molecule prepares guests once, whatever the scenario.
    larger = ["make", "virtual-fresh", "virtual-up", "ARGS=-e virtual_pair_memory_mib=3072"]
    molecule_k3s = ["molecule", "test", "-s", "k3s", "--destroy=never"]
    # Profiles switched, every serving process killed, L2 taken away.
    long = ["pytest", *sorted(map(str, (ROOT / "tests/faults").glob("long_*.py"))), "-q", "-rs"]
    pytest_next = [f"{NEXT_VENV}/bin/pytest", "tests/unit", "-n", "2", "-q", "-rs"]
    there_and_back = ["playbooks/host.yml", "playbooks/reset.yml", "-e", "goodput_reset=true"]
    return [
        Stage("lint", ["make", "lint"]),
        Stage("unit", ["pytest", "tests/unit", "-n", "2", "-q", "-rs"]),
        Stage("core-next-setup", [other, "tools/bootstrap.py", "--test", f"--venv={NEXT_VENV}"], skip=why),
        Stage("core-next-unit", pytest_next, skip=why),
        Stage("stock pair", ["make", "virtual-fresh", "virtual-up"]),
        Stage("check on stock nodes", [*play, "--check", "site.yml"], env_file=True),
        Stage("molecule default", ["molecule", "test", "-s", "default", "--destroy=never"], env_file=True),
        Stage("molecule power", ["molecule", "test", "-s", "power", "--destroy=never"], env_file=True),
        Stage("molecule serving", ["molecule", "test", "-s", "serving", "--destroy=never"], env_file=True),
        Stage("faults", ["pytest", "tests/faults", "-q", "-rs", "-x", "--durations=12"], env_file=True),
        Stage("long", long, True, optional="40 minutes: `make test STAGES=long` on a converged pair"),
        Stage("reset", ["molecule", "cleanup", "-s", "serving"], env_file=True),
        # There and back: on nodes that are converged already no task would change anything.
        Stage("core-next-converge", [f"{NEXT_VENV}/bin/ansible-playbook", *play[1:], *there_and_back], True, why),
        Stage("pair for K3s", larger, skip=no_k3s),
        Stage("molecule k3s", molecule_k3s, True, no_k3s, extra_env={"GOODPUT_K3S_AIRGAP": k3s}),
        Stage("pair off", ["make", "virtual-down"]),
        # Last: it uses the runtime archive that the pair's medium was made of.
        Stage("conformity", ["make", "conformity"], extra_env=kube_data()),
    ]


def environment(stage: Stage) -> dict[str, str]:
    env = {**os.environ, "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}", **stage.extra_env}
    env_file = ROOT / "inventory/virtual/ansible.env"
    if stage.env_file and env_file.exists():
        lines = [line for line in env_file.read_text().splitlines() if "=" in line and not line.startswith("#")]
        values = dict(line.split("=", 1) for line in lines)
        if stage.command[0].startswith(NEXT_VENV):
            values = {k: v.replace("/.venv/", f"/{NEXT_VENV}/") for k, v in values.items()}
            plugins = values.get("ANSIBLE_STRATEGY_PLUGINS", "")
            found = sorted(ROOT.glob(f"{NEXT_VENV}/lib/python3.*/site-packages/ansible_mitogen/plugins/strategy"))
            if plugins and found:
                values["ANSIBLE_STRATEGY_PLUGINS"] = str(found[0])
        env.update(values)
    return env


def counts(text: str) -> dict[str, int]:
    """Totals of the pytest summary lines in a log."""
    total = {"passed": 0, "failed": 0, "error": 0, "skipped": 0}
    for line in re.findall(r"^=* ?(\d+ (?:passed|failed|skipped|error).*) in [\d.]+s", text, re.M):
        for number, word in re.findall(r"(\d+) (passed|failed|skipped|error)", line):
            total[word] += int(number)
    return total


# What Ansible prints around a failure and explains nothing: its place, the source beside it, times, paths.
NOISE = re.compile(
    r"Origin:|/|\d+( |$)|\^ column|- \S+$|(changed|delta|end|start|stderr_lines|stdout_lines|cmd|rc)\b|E$"
)


def failures(text: str) -> list[str]:
    """The first failure that Ansible or pytest printed, with the task before it: at most 30 lines without colours."""
    task = ""
    found: list[str] = []
    for line in re.sub(r"\x1b\[[0-9;]*m|│", "", text).splitlines():
        line = line.strip()
        if line.startswith("TASK ["):
            task = line
        if not line or len(found) == 30 or (found and NOISE.match(line)):
            continue
        if found or re.match(r"fatal: \[|\[ERROR\]|E   |(FAILED|ERROR) tests/|.*: error: ", line):
            found += [line] if found or not task else [task, line]
    return [line[:200] for line in found]


def main() -> None:
    LOGS.mkdir(parents=True, exist_ok=True)
    rows: list[tuple[str, str, float]] = []
    reasons: list[str] = []
    why: list[str] = []
    total = {"passed": 0, "failed": 0, "skipped": 0}
    begin = time.monotonic()
    only, known = sys.argv[1:], [stage.name for stage in stages()]
    if unknown := [name for name in only if name not in known]:
        print(
            f"found stage {', '.join(unknown)}; required: of {', '.join(known)}; fix: quote names with spaces",
            file=sys.stderr,
        )
        sys.exit(2)
    for stage in stages():
        if only and stage.name not in only:
            continue
        why_not = stage.skip or (stage.optional if not only else "")
        if why_not:
            rows.append((stage.name, "skipped", 0.0))
            reasons.append(f"{stage.name}: {why_not}")
            total["skipped"] += 1
            continue
        log = LOGS / f"{stage.name.replace(' ', '-')}.log"
        print(f"== {stage.name}: {' '.join(stage.command)}", flush=True)
        start = time.monotonic()
        with log.open("w") as stream:
            result = subprocess.run(
                stage.command,
                cwd=ROOT,
                env=environment(stage),
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
            )
        seconds = time.monotonic() - start
        text = log.read_text(errors="replace")
        ran = counts(text)
        total["passed"] += ran["passed"] + (result.returncode == 0)
        total["failed"] += ran["failed"] + ran["error"] + (result.returncode != 0)
        total["skipped"] += ran["skipped"]
        reasons += [f"{stage.name}: {line}" for line in re.findall(r"^SKIPPED .*", text, re.M)]
        rows.append((stage.name, "ok" if result.returncode == 0 else f"exit {result.returncode}", seconds))
        tests = f", {ran['passed']} tests passed" if ran["passed"] else ""
        print(f"   {rows[-1][1]} in {seconds:.0f} s{tests}", flush=True)
        if result.returncode:
            print("\n".join(text.splitlines()[-120:]))
            print(f"stage {stage.name!r} failed; whole log: {log}", flush=True)
            why = failures(text)
            break
    print("\nstage                    result      seconds")
    for name, outcome, seconds in rows:
        print(f"{name:<24} {outcome:<10} {seconds:8.0f}")
    print(f"{'all':<24} {'':<10} {time.monotonic() - begin:8.0f}")
    for reason in reasons:
        print(f"skipped: {reason}")
    for line in why:
        print(f"failed: {line}")
    print(f"{total['passed']} passed, {total['failed']} failed, {total['skipped']} skipped")
    sys.exit(1 if total["failed"] else 0)


if __name__ == "__main__":
    main()
