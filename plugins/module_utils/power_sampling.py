# Apache-2.0 (see LICENSE)
"""Look at one node's power and clocks: samples, temperatures, limits, locks, programs, and the verdict on them.

Read-only: no clock is set, nothing is written. Standard library only; as a program it prints JSON:

    python3 -m ansible_collections.goodput.spark.plugins.module_utils.power_sampling --mode load
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils import power_load
from ansible_collections.goodput.spark.plugins.module_utils.node_facts import Node, read_line, read_text
from ansible_collections.goodput.spark.plugins.module_utils.power_clocks import (
    STATE_FILE,
    VERDICT_FILE,
    Smi,
    SmiError,
    boot_id,
    first_line,
    mask,
    number,
    read_json,
    thermal_zones,
)
from ansible_collections.goodput.spark.plugins.module_utils.power_verdict import (
    INCONCLUSIVE,
    OK,
    Facts,
    Lock,
    Sample,
    Thresholds,
    Verdict,
    classify,
)

GPU_FIELDS = ("index", "name", "driver_version", "clocks.max.sm", "utilization.gpu")
REASONS_FIELD = "clocks_event_reasons.active"
# Before driver 535 the same mask had this name.
OLD_REASONS_FIELD = "clocks_throttle_reasons.active"
SAMPLE_FIELDS = ("utilization.gpu", "clocks.sm", "power.draw", "pstate", "temperature.gpu")
APP_FIELDS = ("pid", "process_name", "used_memory")
LOCK_VALUE = re.compile(r"(?:-lgc|--lock-gpu-clocks)[ =]+[\"']?(\d+)(?:\s*,\s*(\d+))?")
MODES = ("auto", "passive", "load", "look")
# CUDA's start and 1.1 GiB of memory to fill.
LOAD_START_SECONDS = 90.0
# The load outlives the sampling, which ends it; if that can not, it ends by itself after this long.
LOAD_SPARE_SECONDS = 60.0


@dataclass(frozen=True)
class Options:
    """What to do. ``load_command`` replaces the built-in load and prints the same JSON lines."""

    mode: str = "auto"
    seconds: float = 14.0
    warmup_seconds: float = 2.0
    interval_ms: int = 500
    smi: Smi = field(default_factory=Smi)
    load_command: Sequence[str] = ()
    library_directories: Sequence[str] = ()
    state_file: Path = Path(STATE_FILE)
    verdict_file: Path = Path(VERDICT_FILE)
    reuse_seconds: float = 0.0
    limits: Thresholds = field(default_factory=Thresholds)
    root: Path = Path("/")
    proc_root: Path = Path("/proc")
    sysfs_root: Path = Path("/sys")
    on_sample: Callable[[Sample], None] | None = None

    def node(self) -> Node:
        return Node(self.root, self.proc_root, self.sysfs_root)


# --------------------------------------------------------------------------------------------------------------------
# What a node says besides nvidia-smi
# --------------------------------------------------------------------------------------------------------------------


def rails(sysfs_root: Path) -> dict[str, float]:
    """Watts by label of spark_hwmon's power channels (hwmon name spbm), empty where the module is not loaded.

    Matched by label, as numbers differ between versions: ``powerN_input``, where a channel has none ``powerN_cap``; µW.
    """
    found: dict[str, float] = {}
    for directory in sorted((sysfs_root / "class/hwmon").glob("hwmon*")):
        if read_line(directory / "name") != "spbm":
            continue
        for path in sorted(directory.glob("power*_label")):
            for kind in ("input", "cap"):
                text = read_line(directory / path.name.replace("_label", f"_{kind}"))
                if text.isdigit():
                    found[read_line(path)] = int(text) / 1e6
                    break
    return found


def governors(sysfs_root: Path) -> list[str]:
    """The CPU frequency governors in use. Reported, never changed."""
    paths = (sysfs_root / "devices/system/cpu/cpufreq").glob("policy*/scaling_governor")
    return sorted({read_line(path) for path in paths} - {""})


def lock_value(text: str) -> list[int] | None:
    """[minimum, maximum] MHz of the last literal ``-lgc`` of a unit or script; None where it is computed."""
    found = LOCK_VALUE.findall(text)
    if not found:
        return None
    low, high = found[-1]
    return [int(low), int(high or low)]


def foreign_locks(node: Node) -> list[dict[str, Any]]:
    """Clock locks that are not ours and that are in effect or will be at boot.

    Each: name, path, reason, ``clock_mhz`` (pair or None), ``stop``: the units whose stopping and disabling ends it,
    empty where only a person can (a drop-in of a unit that does other work, cron, rc.local).
    """
    found = []
    entries = node.clock_units()
    names = [entry["name"] for entry in entries if entry["name"].endswith((".service", ".timer"))]
    states = unit_states(node, names)
    for entry in entries:
        text = read_text(node.root / entry["path"].lstrip("/"), 65536)
        script = re.search(r"starts (/\S+),", entry["reason"])
        if script:
            text += read_text(node.root / script[1].lstrip("/"), 65536)
        state = states.get(entry["name"], {})
        triggers = state.get("TriggeredBy", "").split()
        resting = state.get("ActiveState") in ("inactive", "failed")
        if resting and state.get("UnitFileState") in ("disabled", "masked", "masked-runtime"):
            continue
        if resting and state.get("UnitFileState") == "static" and not triggers:
            continue
        by_hand = entry["name"] not in names or entry["path"].endswith(".conf")
        found.append(
            {
                **entry,
                "clock_mhz": lock_value(text),
                "stop": [] if by_hand else [*triggers, entry["name"]],
            }
        )
    return found


def unit_states(node: Node, names: Sequence[str]) -> dict[str, dict[str, str]]:
    """UnitFileState, ActiveState and TriggeredBy by unit; empty where systemd does not answer."""
    if not names:
        return {}
    _status, output = node.run(
        ["systemctl", "show", "--property=Id,UnitFileState,ActiveState,TriggeredBy", "--", *names]
    )
    states = {}
    for block in output.split("\n\n"):
        values = dict(line.partition("=")[::2] for line in block.splitlines() if "=" in line)
        if "Id" in values:
            states[values["Id"]] = values
    return states


def applied_mhz(state: Mapping[str, Any], current_boot: str) -> float | None:
    """Maximum of our lock as the driver confirmed it in this boot, else None."""
    pair = state.get("applied_mhz")
    if state.get("released") or state.get("boot_id") != current_boot or not isinstance(pair, list) or len(pair) != 2:
        return None
    return float(pair[1])


# --------------------------------------------------------------------------------------------------------------------
# Load
# --------------------------------------------------------------------------------------------------------------------


class Load:
    """The load as a program of its own, so that a hung CUDA call ends with it."""

    def __init__(self, options: Options) -> None:
        most = options.seconds + LOAD_SPARE_SECONDS
        seconds = ["--seconds", f"{most:g}", "--warmup-seconds", f"{options.warmup_seconds:g}"]
        libraries = [word for name in options.library_directories for word in ("--library-directory", name)]
        source = b""
        if options.load_command:
            command = [*options.load_command, *seconds]
        else:
            command = [sys.executable, "-", *seconds, *libraries]
            command += ["--index", options.smi.gpu] if options.smi.gpu.isdigit() else []
            source = inspect.getsource(power_load).encode()
        self.name = command[0] if options.load_command else "the built-in load"
        # nvidia-smi numbers GPUs by their PCI address, CUDA by their speed.
        environment = {**os.environ, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=environment,
        )
        assert self.process.stdin is not None and self.process.stdout is not None
        self.output = self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(source)
            self.process.stdin.close()
        self.buffer = b""

    def answer(self, timeout_seconds: float) -> dict[str, Any]:
        """The next JSON line; an inconclusive answer if there is none in time."""
        deadline = time.monotonic() + timeout_seconds
        while b"\n" not in self.buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.output], [], [], left)[0]:
                return self.failed(f"{self.name} gave no answer in {timeout_seconds:g} s")
            chunk = os.read(self.output.fileno(), 65536)
            if not chunk:
                return self.failed(f"{self.name} ended early: {first_line(self.buffer.decode('utf-8', 'replace'))}")
            self.buffer += chunk
        line, _, self.buffer = self.buffer.partition(b"\n")
        try:
            data = json.loads(line)
        except ValueError:
            data = None
        if not isinstance(data, dict) or "state" not in data:
            return self.failed(
                f"{self.name} said {first_line(line.decode('utf-8', 'replace'))!r}, required a JSON object"
            )
        return data

    def finish(self) -> dict[str, Any]:
        """Ask it to end, and its result."""
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        return self.answer(LOAD_SPARE_SECONDS)

    @staticmethod
    def failed(reason: str) -> dict[str, Any]:
        return {"state": "inconclusive", "reason": reason}

    def end(self) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(timeout=2)
        self.output.close()


# --------------------------------------------------------------------------------------------------------------------
# The look
# --------------------------------------------------------------------------------------------------------------------


def compute_apps(smi: Smi) -> list[dict[str, Any]]:
    """pid, name and memory of every program that computes on the GPU; a name may hold commas. Raises SmiError."""
    text = smi.run(f"--query-compute-apps={','.join(APP_FIELDS)}", "--format=csv,noheader,nounits", *smi.selected)
    found = []
    for line in text.splitlines():
        pid, separator, rest = line.strip().partition(", ")
        name, second, memory = rest.rpartition(", ")
        if separator and second:
            found.append({"pid": pid, "name": name, "memory_mib": number(memory, "used_memory")})
        elif pid:
            raise SmiError(
                "format", f"found {first_line(line)!r} in nvidia-smi's programs, required {', '.join(APP_FIELDS)}"
            )
    return found


def to_sample(seconds: float, row: Sequence[str], soc_c: float | None) -> Sample:
    """One line of the sample fields and the reasons. Raises SmiError."""
    values = dict(zip((*SAMPLE_FIELDS, REASONS_FIELD), row, strict=True))
    return Sample(
        seconds=round(seconds, 2),
        utilization_percent=number(values["utilization.gpu"], "utilization.gpu"),
        sm_mhz=number(values["clocks.sm"], "clocks.sm"),
        power_watts=number(values["power.draw"], "power.draw"),
        pstate=values["pstate"],
        temperature_c=number(values["temperature.gpu"], "temperature.gpu"),
        reasons=mask(values[REASONS_FIELD], REASONS_FIELD),
        soc_c=soc_c,
    )


@dataclass
class Look:
    """One look at one node, filled step by step; ``problem`` says why it is not whole."""

    options: Options
    gpu: dict[str, Any] = field(default_factory=dict)
    gpus: int = 0
    apps: list[dict[str, Any]] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    load: dict[str, Any] = field(default_factory=dict)
    mode: str = ""
    problem: str = ""
    problem_kind: str = ""
    reasons_field: str = REASONS_FIELD
    silent_zones: list[str] = field(default_factory=list)
    hottest: dict[str, float] = field(default_factory=dict)

    def ask(self) -> None:
        """The GPU and the programs on it. Raises SmiError."""
        smi = self.options.smi
        rows = smi.rows(GPU_FIELDS)
        self.gpus = len(rows)
        if rows:
            index, name, driver, maximum, utilization = rows[0]
            self.gpu = {
                "index": index,
                "name": name,
                "driver_version": driver,
                "maximum_mhz": number(maximum, "clocks.max.sm"),
                "utilization_percent": number(utilization, "utilization.gpu"),
            }
        self.apps = compute_apps(smi)
        try:
            smi.rows((REASONS_FIELD,))
        except SmiError as error:
            if error.kind != "failed" or "not a valid field" not in str(error):
                raise
            self.reasons_field = OLD_REASONS_FIELD

    def decide_mode(self) -> None:
        """Never a load beside a program that uses the GPU, whatever was asked for."""
        asked = self.options.mode
        busy = (self.gpu.get("utilization_percent") or 0) >= self.options.limits.busy_utilization_percent
        if asked == "auto":
            self.mode = "passive" if self.apps or busy else "load"
        elif asked == "load" and (self.apps or busy):
            names = ", ".join(str(app["name"]) for app in self.apps) or "a program that the driver does not name"
            self.mode = "passive"
            self.problem, self.problem_kind = f"no load beside {names}: it would disturb it and be disturbed", "load"
        else:
            self.mode = asked

    def zones(self) -> float | None:
        readings, self.silent_zones = thermal_zones(self.options.sysfs_root)
        for name, value in readings.items():
            self.hottest[name] = max(value, self.hottest.get(name, value))
        return max(readings.values(), default=None)

    def sample(self, seconds: float) -> None:
        """Samples for that long. Raises SmiError."""
        stream = self.options.smi.stream((*SAMPLE_FIELDS, self.reasons_field), self.options.interval_ms, seconds)
        with contextlib.closing(stream):
            for at, row in stream:
                sample = to_sample(at, row, self.zones())
                self.samples.append(sample)
                if self.options.on_sample is not None:
                    self.options.on_sample(sample)

    def under_load(self) -> None:
        """Samples while our own load runs; a load that can not run leaves a problem. Raises SmiError."""
        options = self.options
        try:
            load = Load(options)
        except OSError as error:
            self.problem, self.problem_kind = f"the load can not be started: {error}", "load"
            return
        try:
            first = load.answer(LOAD_START_SECONDS)
            if first["state"] == "started":
                time.sleep(options.warmup_seconds)
                self.sample(options.seconds)
                first = load.finish()
            self.load = first
        finally:
            load.end()
        if self.load["state"] != "done":
            self.problem, self.problem_kind = f"no load: {self.load.get('reason', '')}", "load"

    def run(self) -> None:
        try:
            self.ask()
            if self.gpus != 1:
                return
            self.decide_mode()
            if self.mode == "load":
                self.under_load()
            elif self.mode == "passive":
                self.sample(self.options.seconds)
            else:
                self.zones()
        except SmiError as error:
            self.problem, self.problem_kind = str(error), error.kind

    def facts(self, state: Mapping[str, Any], locks: Sequence[Mapping[str, Any]]) -> Facts:
        bandwidth = self.load.get("gb_s", {})
        return Facts(
            gpu=str(self.gpu.get("name", "")),
            gpus=self.gpus,
            maximum_mhz=self.gpu.get("maximum_mhz"),
            applied_mhz=applied_mhz(state, boot_id(self.options.proc_root)),
            foreign_locks=[
                Lock(str(lock["name"]), float(lock["clock_mhz"][1]) if lock["clock_mhz"] else None) for lock in locks
            ],
            load=self.mode == "load" and self.load.get("state") == "done",
            problem=self.problem,
            problem_kind=self.problem_kind,
            compute_apps=len(self.apps),
            tflops=self.load.get("tflops", {}).get("median"),
            gb_s={key: float(bandwidth[key]) for key in ("median", "min", "max") if key in bandwidth},
            rails=rails(self.options.sysfs_root),
        )


def recorded(options: Options, state: Mapping[str, Any], at_seconds: float) -> dict[str, Any] | None:
    """The last verdict, if it was ok, measured in this boot under the same lock, and is young enough."""
    verdict = read_json(options.verdict_file)
    age = at_seconds - float(verdict.get("at_seconds", 0) or 0)
    current = boot_id(options.proc_root)
    same = verdict.get("boot_id") == current and verdict.get("applied_mhz") == applied_mhz(state, current)
    # The record's time is rounded; a clock that was set back further than that makes it worthless.
    young = options.reuse_seconds > 0 and -1 <= age <= options.reuse_seconds
    if verdict.get("state") == OK and same and young:
        return verdict
    return None


def measure(options: Options, now: Callable[[], float] = time.time) -> dict[str, Any]:
    """Everything about one node's power, with the verdict. Never raises for what the node does wrong.

    ``record`` is what belongs into the verdict file; empty when the recorded verdict was good enough and nothing was
    measured. ``this_boot_ok``: whether the last conclusive verdict of this boot was ok.
    """
    state = read_json(options.state_file)
    node = options.node()
    locks = foreign_locks(node)
    current = boot_id(options.proc_root)
    former = read_json(options.verdict_file)
    old = recorded(options, state, now()) if options.mode != "look" else None
    look = Look(options)
    if old is None:
        look.run()
        facts = look.facts(state, locks)
        verdict = classify(look.samples, facts, options.limits)
        if options.mode == "look" and verdict.state == INCONCLUSIVE and not look.problem:
            verdict = Verdict(INCONCLUSIVE, "not measured", "", verdict.lock, verdict.evidence)
        result: dict[str, Any] = verdict.as_dict()
    else:
        keys = ("state", "reason", "remedy", "lock", "evidence")
        result = {key: old.get(key) for key in keys}
    result.update(
        measured=old is None and options.mode != "look",
        mode=look.mode,
        at_seconds=round(now(), 1) if old is None else old["at_seconds"],
        problem=look.problem,
        problem_kind=look.problem_kind,
        gpu=look.gpu if old is None else old.get("gpu", {}),
        gpus=look.gpus if old is None else 1,
        load=look.load,
        samples=[dataclasses.asdict(sample) for sample in look.samples],
        compute_apps=look.apps,
        foreign_locks=locks,
        foreign_nvml=node.foreign_nvml(),
        own_lock={
            key: state.get(key)
            for key in ("requested_mhz", "applied_mhz", "driver_version", "asserted_at_seconds", "reasserts_total")
        },
        applied_mhz=applied_mhz(state, current),
        boot_id=current,
        unclean_boot=state.get("unclean_boot"),
        this_boot_ok=former.get("boot_id") == current and bool(former.get("ok_in_this_boot")),
        zones_c=look.hottest,
        silent_zones=look.silent_zones,
        governors=governors(options.sysfs_root),
        sleep_targets_masked=node.sleep_targets(),
        as_root=os.geteuid() == 0,
    )
    if result["measured"] and result["state"] != INCONCLUSIVE:
        # The last verdict that was one: an idle look after a latch must not fall back on an earlier ok.
        result["this_boot_ok"] = result["state"] == OK
    # A gate on a node that the role has not prepared judges and leaves nothing behind.
    kept = result["measured"] and options.verdict_file.parent.is_dir()
    result["record"] = record(result) if kept else {}
    return result


def record(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a verdict on the node."""
    keys = ("state", "reason", "remedy", "lock", "evidence", "at_seconds", "boot_id", "applied_mhz", "gpu", "mode")
    return {**{key: result[key] for key in keys}, "ok_in_this_boot": result["this_boot_ok"]}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="auto")
    parser.add_argument("--seconds", type=float, default=14.0)
    parser.add_argument("--warmup-seconds", type=float, default=2.0)
    parser.add_argument("--interval-ms", type=int, default=500)
    parser.add_argument("--gpu", default="", help="index of one of several GPUs")
    parser.add_argument("--smi", default="nvidia-smi")
    parser.add_argument("--smi-timeout", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument(
        "--load-command", action="append", default=[], metavar="WORD", help="program that makes the load"
    )
    parser.add_argument("--library-directory", action="append", default=[], help="where libcublas is; may be a pattern")
    parser.add_argument("--thresholds", default="{}", metavar="JSON")
    parser.add_argument(
        "--stream", action="store_true", help="a line for each sample, then the result as the last line"
    )
    asked = parser.parse_args(arguments)

    def say(sample: Sample) -> None:
        print(json.dumps({"sample": dataclasses.asdict(sample)}), flush=True)

    options = Options(
        mode=asked.mode,
        seconds=asked.seconds,
        warmup_seconds=asked.warmup_seconds,
        interval_ms=asked.interval_ms,
        smi=Smi(asked.smi, asked.smi_timeout, asked.gpu),
        load_command=asked.load_command,
        library_directories=asked.library_directory,
        limits=Thresholds.of(json.loads(asked.thresholds)),
        on_sample=say if asked.stream else None,
    )
    result = measure(options)
    print(json.dumps({"result": result} if asked.stream else result, indent=None if asked.stream else 2), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
