# Apache-2.0 (see LICENSE)
"""nvidia-smi with a time limit, and the clock lock that is asserted with it, for ever.

The role ``power`` copies this file to the node as it is and runs it from systemd, so it needs nothing but Python 3.11:

    power_clocks.py lock --min 300 --max 2200     # goodput-clocks.service, before any load
    power_clocks.py reassert ...                  # the timer: the lock is lost on reload, reboot and after hangs
    power_clocks.py release                       # the unit's stop: -rgc

The driver has no read-back of a lock. What it answers to ``-lgc`` (the pair it really took: it quantises, 2000 becomes
1976) is kept in the state file; only a clock observed above it proves that a lock is gone. Exit 0 done, 1 refused.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GB10 = "GB10"
# What a GB10 knows: 0 to 3003 MHz (clocks.max.sm).
CLOCK_LIMITS_MHZ = (0, 3003)
STATE_FILE = "/var/lib/goodput/power/state.json"
VERDICT_FILE = "/var/lib/goodput/power/verdict.json"
FORMAT = 1
# Observed clocks of a lock stay at or a few MHz below it; the driver's steps are about 13 to 24 MHz.
LOCK_TOLERANCE_MHZ = 50
EVENTS_KEPT = 20
NOTHING = ("", "[N/A]", "N/A", "[Not Supported]", "Not Supported", "[Unknown Error]", "[Insufficient Permissions]")
CONFIRMED = re.compile(
    r'GPU clocks set to "\(gpuClkMin (?P<min>\d+), gpuClkMax (?P<max>\d+)\)" for GPU (?P<gpu>[0-9A-Fa-f:.]+)'
)
# What a driver that is still coming up, or hangs for a moment, answers; a wrong GPU or format stays wrong.
PASSING = ("missing", "no_driver", "hang", "failed")
NO_DRIVER = ("couldn't communicate with the NVIDIA driver", "No devices were found", "Failed to initialize NVML")


class SmiError(Exception):
    """nvidia-smi gave no usable answer. ``kind``: missing, no_driver, hang, failed or format; refused: not this GPU."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


# --------------------------------------------------------------------------------------------------------------------
# nvidia-smi
# --------------------------------------------------------------------------------------------------------------------


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a program and its children; one that hangs inside the driver can not be killed and is left behind."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(timeout=2)


def first_line(text: str) -> str:
    line = next((line.strip() for line in text.splitlines() if line.strip()), "nothing")
    return line if len(line) <= 120 else f"{line[:117]}..."


@dataclass(frozen=True)
class Smi:
    """One nvidia-smi; every call ends within ``timeout_seconds``."""

    program: str = "nvidia-smi"
    timeout_seconds: float = 10.0
    # Index or UUID of one GPU; empty asks for all of them.
    gpu: str = ""

    @property
    def selected(self) -> list[str]:
        return [f"--id={self.gpu}"] if self.gpu else []

    def start(self, arguments: Sequence[str]) -> subprocess.Popen[bytes]:
        try:
            return subprocess.Popen(
                [self.program, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            raise SmiError(
                "missing", f"found no {self.program} ({error.strerror}), required the NVIDIA driver"
            ) from None

    def run(self, *arguments: str) -> str:
        """Standard output of one call. Raises SmiError."""
        process = self.start(arguments)
        try:
            output, _ = process.communicate(timeout=self.timeout_seconds)
        except subprocess.TimeoutExpired:
            _end(process)
            raise self.hang(arguments) from None
        text = output.decode("utf-8", "replace")
        if process.returncode != 0 or any(words in text for words in NO_DRIVER):
            raise self.refusal(arguments, process.returncode, text)
        return text

    def hang(self, arguments: Sequence[str]) -> SmiError:
        return SmiError(
            "hang",
            f"`{self.program} {' '.join(arguments)}` gave no answer in {self.timeout_seconds:g} s "
            "(a hung driver: dmesg, then reboot)",
        )

    def refusal(self, arguments: Sequence[str], status: int | None, text: str) -> SmiError:
        kind = "no_driver" if any(words in text for words in NO_DRIVER) else "failed"
        return SmiError(kind, f"`{self.program} {' '.join(arguments)}` ended with exit {status}: {first_line(text)}")

    def rows(self, fields: Sequence[str]) -> list[list[str]]:
        """One call of ``--query-gpu``: the cells of each line, as many as ``fields``. Raises SmiError."""
        text = self.run(f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", *self.selected)
        return [cells(line, fields) for line in text.splitlines() if line.strip()]

    def stream(
        self, fields: Sequence[str], interval_ms: int, seconds: float
    ) -> Generator[tuple[float, list[str]], None, None]:
        """Lines of one looping nvidia-smi with the time since the start in seconds, until ``seconds`` are over.

        One program for the whole time: starting one for each sample disturbs what is measured. Raises SmiError.
        """
        arguments = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits", f"--loop-ms={interval_ms}"]
        arguments += self.selected
        process = self.start(arguments)
        assert process.stdout is not None
        begin = last = time.monotonic()
        buffer = b""
        said = ""
        try:
            with selectors.DefaultSelector() as selector:
                selector.register(process.stdout, selectors.EVENT_READ)
                while (now := time.monotonic()) - begin < seconds:
                    patience = last + self.timeout_seconds + interval_ms / 1000 - now
                    if patience <= 0:
                        raise self.hang(arguments)
                    if not selector.select(max(0.0, min(patience, begin + seconds - now))):
                        continue
                    chunk = os.read(process.stdout.fileno(), 65536)
                    if not chunk:
                        raise self.refusal(arguments, process.wait(timeout=2), said)
                    buffer += chunk
                    *lines, buffer = buffer.split(b"\n")
                    for line in lines:
                        text = line.decode("utf-8", "replace").strip()
                        if text:
                            last = time.monotonic()
                            said = text
                            if any(words in text for words in NO_DRIVER):
                                raise self.refusal(arguments, None, text)
                            yield last - begin, cells(text, fields)
        finally:
            _end(process)
            process.stdout.close()


def cells(line: str, fields: Sequence[str]) -> list[str]:
    """The cells of a CSV line of nvidia-smi. Raises SmiError with the line if their number is wrong."""
    found = [cell.strip() for cell in line.split(", ")]
    if len(found) != len(fields):
        raise SmiError(
            "format",
            f"found {len(found)} columns in nvidia-smi's answer {first_line(line)!r}, "
            f"required {len(fields)} ({', '.join(fields)}): not the format this version knows",
        )
    return found


def number(cell: str, name: str) -> float | None:
    """A cell as number, None where this GPU has no such reading. Raises SmiError naming field and text."""
    if cell in NOTHING:
        return None
    try:
        return float(cell)
    except ValueError:
        raise SmiError("format", f"found {cell!r} in nvidia-smi's field {name}, required a number or [N/A]") from None


def mask(cell: str, name: str) -> int | None:
    """A cell as bit mask (``0x0000000000000020``), None where there is none. Raises SmiError."""
    if cell in NOTHING:
        return None
    if not re.fullmatch(r"0x[0-9A-Fa-f]+", cell):
        raise SmiError("format", f"found {cell!r} in nvidia-smi's field {name}, required a mask such as 0x0 or [N/A]")
    return int(cell, 16)


def confirmed(text: str) -> tuple[int, int, str]:
    """(minimum MHz, maximum MHz, GPU) from what ``-lgc`` printed: the only confirmation there is. Raises SmiError."""
    found = CONFIRMED.search(text)
    if found is None:
        raise SmiError(
            "format", f'found {first_line(text)!r} from -lgc, required GPU clocks set to "(gpuClkMin N, gpuClkMax N)"'
        )
    return int(found["min"]), int(found["max"]), found["gpu"]


# --------------------------------------------------------------------------------------------------------------------
# Clock pairs
# --------------------------------------------------------------------------------------------------------------------


def pair_problem(value: Any) -> str:
    """Why a value is no clock pair [minimum, maximum] in MHz; empty if it is one."""
    low, high = CLOCK_LIMITS_MHZ
    rule = f"two integers [minimum, maximum] in MHz, {low} to {high}, the minimum not above the maximum"
    remedy = "for example power_clock_mhz: [300, 2200]"
    shown = json.dumps(value, default=str)
    if not isinstance(value, list | tuple) or len(value) != 2:
        return f"found power_clock_mhz {shown}; required {rule}; fix: {remedy}"
    if any(isinstance(item, bool) or not isinstance(item, int) for item in value):
        return f"found power_clock_mhz {shown}; required {rule}, written without quotes; fix: {remedy}"
    if not low <= value[0] <= value[1] <= high or value[1] == 0:
        return f"found power_clock_mhz {shown}; required {rule}; fix: {remedy}"
    return ""


def pair_problems(pairs: Mapping[str, Any], may_differ: bool) -> list[str]:
    """What is wrong with the pairs of the nodes, by inventory name; empty if nothing is."""
    problems = [f"{node}: {problem}" for node, value in pairs.items() if (problem := pair_problem(value))]
    if not problems and not may_differ and len({tuple(value) for value in pairs.values()}) > 1:
        shown = ", ".join(f"{node} {list(value)}" for node, value in pairs.items())
        problems.append(
            f"found different power_clock_mhz: {shown}; required the same on all nodes, because the slower one "
            "sets the pace of both; fix: one pair for all, or power_pairs_may_differ: true"
        )
    return problems


# --------------------------------------------------------------------------------------------------------------------
# State
# --------------------------------------------------------------------------------------------------------------------


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file, empty if there is none or it is damaged."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def write_text(path: Path, text: str) -> None:
    """Write beside the file, then rename: a reader sees the old or the new text."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
            os.fchmod(stream.fileno(), 0o644)
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def boot_id(proc_root: Path) -> str:
    try:
        return (proc_root / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def driver_load(sysfs_root: Path) -> int:
    """Changes when the kernel module is loaded again: the inode number of its directory; 0 without the module."""
    try:
        return (sysfs_root / "module/nvidia").stat().st_ino
    except OSError:
        return 0


def thermal_zones(sysfs_root: Path) -> tuple[dict[str, float], list[str]]:
    """(°C by zone, zones that give none). A zone that is off or broken reads -1 or fails."""
    readings: dict[str, float] = {}
    silent = []
    base = sysfs_root / "class/thermal"
    for path in sorted(base.glob("thermal_zone*"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0)):
        try:
            millidegrees = int((path / "temp").read_text())
        except (OSError, ValueError):
            millidegrees = -1
        if 0 <= millidegrees < 200_000:
            readings[path.name] = millidegrees / 1000
        else:
            silent.append(path.name)
    return readings, silent


@dataclass
class Clocks:
    """The lock of one node: what is wanted, how it is asserted, and where that is written down."""

    minimum_mhz: int
    maximum_mhz: int
    smi: Smi = field(default_factory=Smi)
    force: bool = False
    state_file: Path = Path(STATE_FILE)
    verdict_file: Path = Path(VERDICT_FILE)
    textfile: Path | None = None
    proc_root: Path = Path("/proc")
    sysfs_root: Path = Path("/sys")
    tolerance_mhz: float = LOCK_TOLERANCE_MHZ
    now: Callable[[], float] = time.time
    log: Callable[[str], None] = print

    def look(self) -> tuple[str, str, float | None]:
        """(name, driver version, SM clock in MHz) of the only GPU. Raises SmiError."""
        rows = self.smi.rows(("name", "driver_version", "clocks.sm"))
        if len(rows) != 1:
            raise SmiError("refused", f"found {len(rows)} GPUs, required one: this is no DGX Spark")
        name, driver, clock = rows[0]
        return name, driver, number(clock, "clocks.sm")

    def assert_lock(self, state: dict[str, Any], name: str, driver: str) -> None:
        """Call -lgc and write down what the driver took. Raises SmiError."""
        if GB10 not in name and not self.force:
            raise SmiError(
                "refused",
                f"found GPU {name!r}, required a {GB10}: its clocks are left alone; power_force: true overrides",
            )
        minimum, maximum, gpu = confirmed(self.smi.run("-lgc", f"{self.minimum_mhz},{self.maximum_mhz}"))
        state.update(
            requested_mhz=[self.minimum_mhz, self.maximum_mhz],
            applied_mhz=[minimum, maximum],
            gpu=gpu,
            name=name,
            driver_version=driver,
            boot_id=boot_id(self.proc_root),
            driver_load=driver_load(self.sysfs_root),
            asserted_at_seconds=round(self.now(), 1),
            asserts_total=int(state.get("asserts_total", 0)) + 1,
            released=False,
            # A stop earlier in this boot is no shutdown.
            released_boot_id="",
        )

    def lock(self, wait_seconds: float = 0.0) -> dict[str, Any]:
        """Assert the lock at boot or by hand; tries that long with a driver that is not ready. Raises SmiError."""
        deadline = time.monotonic() + wait_seconds
        state = self.load()
        self.notice_boot(state)
        while True:
            try:
                name, driver, _clock = self.look()
                self.assert_lock(state, name, driver)
                break
            except SmiError as error:
                if error.kind not in PASSING or time.monotonic() >= deadline:
                    raise
                time.sleep(1)
        self.save(state)
        applied = state["applied_mhz"]
        self.log(
            f"asked for {self.minimum_mhz},{self.maximum_mhz} MHz; the driver says it took {applied[0]},{applied[1]}"
        )
        return state

    def notice_boot(self, state: dict[str, Any]) -> None:
        """On the first call of a boot: whether the boot before it ended with our unit being stopped."""
        current, former = boot_id(self.proc_root), str(state.get("boot_id", ""))
        if former and former != current:
            state["unclean_boot"] = state.get("released_boot_id") != former
            if state["unclean_boot"]:
                self.log(
                    "the boot before this one ended without a shutdown: check the power state again before any load"
                )

    def why_lost(self, state: Mapping[str, Any], clock_mhz: float | None) -> str:
        """What shows that the lock was lost since it was asserted; empty if nothing does."""
        if state.get("boot_id") != boot_id(self.proc_root):
            return "not asserted in this boot"
        if state.get("driver_load") != driver_load(self.sysfs_root):
            return "the driver was loaded again"
        maximum = state["applied_mhz"][1]
        if clock_mhz is not None and clock_mhz > maximum + self.tolerance_mhz:
            return f"clock {clock_mhz:g} MHz observed, above the {maximum} MHz that were applied"
        return ""

    def reassert(self) -> str:
        """Assert again; returns and counts why it had to, empty if nothing showed a loss. Raises SmiError.

        Asserted in any case: an idle GPU shows no clock above the lock, so no sign is no proof.
        """
        state = self.load()
        # Only a stop in this boot counts: the last shutdown released, too, and the lock at boot may have failed since.
        if state.get("released") and state.get("released_boot_id") == boot_id(self.proc_root):
            self.log("no lock is wanted now: goodput-clocks.service was stopped in this boot")
            return ""
        name, driver, clock = self.look()
        reason = self.why_lost(state, clock)
        self.notice_boot(state)
        self.assert_lock(state, name, driver)
        if reason:
            state["reasserts_total"] = int(state.get("reasserts_total", 0)) + 1
            event = {"at_seconds": round(self.now(), 1), "reason": reason}
            state["events"] = [*state.get("events", []), event][-EVENTS_KEPT:]
            self.log(f"lock was lost ({reason}); asserted again, {state['reasserts_total']} times so far")
        self.save(state)
        return reason

    def release(self) -> None:
        """-rgc, and note that this boot is ending (or the unit was stopped) in order. Raises SmiError."""
        state = self.load()
        # First: a driver that hangs at shutdown must not make the boot look unclean.
        state.update(released=True, released_boot_id=boot_id(self.proc_root))
        self.save(state)
        if state.get("applied_mhz"):
            self.smi.run("-rgc")
            self.log("clocks are free again (-rgc)")

    def load(self) -> dict[str, Any]:
        state = read_json(self.state_file)
        return state if state.get("format") == FORMAT else {"format": FORMAT}

    def save(self, state: Mapping[str, Any]) -> None:
        write_text(self.state_file, json.dumps(state, indent=2) + "\n")

    def publish(self) -> None:
        """Write node-exporter's text file, if one is wanted. No timestamps: the collector rejects files with any."""
        if self.textfile is not None:
            verdict = read_json(self.verdict_file)
            zones, _silent = thermal_zones(self.sysfs_root)
            write_text(self.textfile, metrics((self.minimum_mhz, self.maximum_mhz), self.load(), verdict, zones))


def metrics(
    configured_mhz: Sequence[int], state: Mapping[str, Any], verdict: Mapping[str, Any], zones: Mapping[str, float]
) -> str:
    """The text file. What is not known has no series: absent is not zero."""
    lines: list[str] = []

    def family(name: str, kind: str, text: str, values: Sequence[tuple[str, float]]) -> None:
        if values:
            lines.extend((f"# HELP {name} {text}", f"# TYPE {name} {kind}"))
            lines.extend(
                f"{name}{labels} {value:g}" if value < 1e6 else f"{name}{labels} {value:.0f}"
                for labels, value in values
            )

    def pair(values: Sequence[int] | None) -> list[tuple[str, float]]:
        return list(zip(('{bound="min"}', '{bound="max"}'), map(float, values or ()), strict=False))

    applied = None if state.get("released") else state.get("applied_mhz")
    family("goodput_clock_configured_mhz", "gauge", "Clock pair asked for.", pair(configured_mhz))
    family("goodput_clock_applied_mhz", "gauge", "Clock pair the driver said it took.", pair(applied))
    family("goodput_clock_asserts_total", "counter", "Locks asserted.", [("", float(state.get("asserts_total", 0)))])
    family(
        "goodput_clock_reasserts_total",
        "counter",
        "Locks that were found lost and asserted again.",
        [("", float(state.get("reasserts_total", 0)))],
    )
    if verdict.get("state"):
        label = f'{{state="{verdict["state"]}"}}'
        family("goodput_power_verdict_info", "gauge", "Last verdict of the power gate.", [(label, 1.0)])
        family(
            "goodput_power_verdict_time_seconds",
            "gauge",
            "When it was given, seconds since 1970.",
            [("", float(verdict.get("at_seconds", 0)))],
        )
    hottest = [("", max(zones.values()))] if zones else []
    family("goodput_soc_temperature_max_celsius", "gauge", "Hottest thermal zone.", hottest)
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("act", choices=["lock", "reassert", "release"])
    parser.add_argument("--min", type=int, default=300, metavar="MHZ")
    parser.add_argument("--max", type=int, default=2200, metavar="MHZ")
    parser.add_argument("--force", action="store_true", help="also on a GPU that is no GB10")
    parser.add_argument("--smi", default="nvidia-smi", help="the program")
    parser.add_argument("--smi-timeout", type=float, default=10.0, metavar="SECONDS")
    parser.add_argument("--wait", type=float, default=0.0, metavar="SECONDS", help="try that long, with lock")
    parser.add_argument("--state", type=Path, default=Path(STATE_FILE))
    parser.add_argument("--verdict", type=Path, default=Path(VERDICT_FILE))
    parser.add_argument("--textfile", type=Path, help="node-exporter text file to write")
    parser.add_argument("--tolerance", type=float, default=LOCK_TOLERANCE_MHZ, metavar="MHZ")
    asked = parser.parse_args(arguments)
    clocks = Clocks(
        asked.min,
        asked.max,
        Smi(asked.smi, asked.smi_timeout),
        asked.force,
        asked.state,
        asked.verdict,
        asked.textfile,
        tolerance_mhz=asked.tolerance,
    )
    if (problem := pair_problem([asked.min, asked.max])) and asked.act != "release":
        print(problem, file=sys.stderr)
        return 1
    try:
        if asked.act == "lock":
            clocks.lock(asked.wait)
        elif asked.act == "reassert":
            clocks.reassert()
        else:
            clocks.release()
    except (SmiError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        with contextlib.suppress(OSError):
            clocks.publish()
    return 0


if __name__ == "__main__":
    sys.exit(main())
