# Apache-2.0 (see LICENSE)
"""From samples of one node to exactly one state of its power and clocks. Pure: nothing is read or run here.

The state that matters most is invisible to the driver: after a power event a DGX Spark can run at 481 to 858 MHz and
5 to 20 W with no throttle reason set (``latched``). Several healthy or differently ill states look like it, so the
order below is the order of proof: what the machine's own limits say, whether there was load at all, the driver's
reasons, a lock that explains the clock, the latch, and then what only bandwidth or watts show.

Rule for ``latched``: every busy sample below max(``latch_floor_mhz``, ``latch_cap_ratio`` x applied cap) and below
``latch_watts``, and no thermal or power-brake reason in any. Too few busy samples: ``inconclusive``, never ``ok``.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

OK = "ok"
LATCHED = "latched"
THERMAL = "thermal"
POWER_BRAKE = "power_brake"
CAPPED = "capped_by_lock"
SLOW_MEMORY = "slow_memory"
STUCK = "engine_stuck"
INCONCLUSIVE = "inconclusive"
NO_GPU = "no_gpu"
STATES = (OK, LATCHED, THERMAL, POWER_BRAKE, CAPPED, SLOW_MEMORY, STUCK, INCONCLUSIVE, NO_GPU)

# nvml.h, nvmlClocksEventReasons. 0x2 shows no -lgc lock on GB10 and is no fault: it decides nothing here.
REASONS = {
    0x1: "idle",
    0x2: "application clocks",
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "hardware power brake",
    0x100: "display clocks",
}
THERMAL_BITS = 0x20 | 0x40
BRAKE_BITS = 0x80

DRAIN = (
    "shut the node down (sudo poweroff), unplug the power supply from the wall AND from the Spark, wait 60 s, plug it "
    "in, boot, and run this check before any other load. If it comes back: 5 minutes, and hold the power button for "
    "5 to 10 s while unplugged. An ordinary reboot, -rgc or a new driver do not help. After several drains: NVIDIA "
    "field diagnostics and a replacement"
)
# {command} asserts a lock over whatever there is. Not -rgc: free clocks under load are a trigger of the latch.
ALIKE = (
    "first rule out a clock lock that somebody set by hand, in a script or in a container, which reads alike: "
    "{command}, then check again; if the clock stays low it is the latch: "
)
REMEDIES = {
    OK: "",
    LATCHED: DRAIN,
    THERMAL: "let the node cool; check that air reaches it, that the power supply lies free and nothing is stacked on "
    "it; lower power_clock_mhz (2000 is about 10 °C cooler). If it stays hot: field diagnostics",
    POWER_BRAKE: "the supply asked for less power: use the supply that came with the Spark, directly on the wall; "
    "check again",
    CAPPED: "remove the lock that the evidence names, or raise power_clock_mhz, then check again",
    SLOW_MEMORY: "the memory's slow state, seen with older BIOS, kernel and driver: update the firmware and DGX OS "
    "together, reboot, then check again",
    STUCK: "the engine holds the GPU without working: compare with its tokens per second, read its journal, restart it",
    INCONCLUSIVE: "",
    NO_GPU: "load the NVIDIA driver (DGX OS brings it; nvidia-smi must list one GPU), then run again",
}
AGAIN = "journalctl -u goodput-clocks -u goodput-clocks-reassert; run the role power"


class ThresholdError(ValueError):
    """A threshold has no usable value; the text names it."""


@dataclass(frozen=True)
class Thresholds:
    """Every number that a verdict rests on."""

    busy_utilization_percent: float = 50.0
    busy_samples_min: int = 10
    latch_floor_mhz: float = 1000.0
    latch_cap_ratio: float = 0.6
    latch_watts: float = 30.0
    # A GB10 sustains about 0.8 of its maximum (2418 of 3003 MHz), and 0.8 of that at its worst without a fault (1970).
    sustained_ratio: float = 0.8
    # A lock that the GPU sustains is held: 2164 to 2190 MHz of 2200 (0.98). At 0.95 even a 2400 lock asks no more than
    # the lowest healthy clock of a product of matrices without a lock (2281).
    lock_held_ratio: float = 0.95
    # Least share of busy samples that must reach the clock, and that must carry a reason to be called throttled.
    good_share: float = 0.8
    throttle_share: float = 0.2
    soc_stop_c: float = 93.0
    # One reading may be a slip of the sensor.
    hot_samples_min: int = 2
    # Fast state 224 to 233 GB/s, slow state 66 to 80 GB/s.
    memory_floor_gb_s: float = 150.0
    stuck_utilization_percent: float = 90.0
    stuck_watts: float = 25.0
    # Latched 20 W and 30 W, healthy about 140 W and 231 W.
    pl1_floor_watts: float = 60.0
    syspl1_floor_watts: float = 100.0
    lock_tolerance_mhz: float = 50.0

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Thresholds:
        """From a mapping; what is not named keeps its default. Raises ThresholdError."""
        known = {entry.name: entry.default for entry in dataclasses.fields(cls)}
        result: dict[str, Any] = {}
        for name, value in values.items():
            if name not in known:
                raise ThresholdError(f"found threshold {name}, required one of {', '.join(known)}")
            if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
                raise ThresholdError(f"found {name} {value!r}, required a number of at least 0")
            if name.endswith("_min") and value < 1:
                raise ThresholdError(f"found {name} {value!r}, required at least 1")
            if name.endswith(("_ratio", "_share")) and value > 1:
                raise ThresholdError(f"found {name} {value!r}, required 0 to 1")
            result[name] = int(value) if isinstance(known[name], int) else float(value)
        return cls(**result)


@dataclass(frozen=True)
class Sample:
    """One reading. None where the GPU or the node has none. ``soc_c`` is the hottest thermal zone at that moment."""

    seconds: float
    utilization_percent: float | None
    sm_mhz: float | None
    power_watts: float | None
    pstate: str = ""
    temperature_c: float | None = None
    reasons: int | None = None
    soc_c: float | None = None


@dataclass(frozen=True)
class Lock:
    """A clock lock: whose (unit, script, or ``ours``), and its maximum in MHz (None if that is not known)."""

    owner: str
    maximum_mhz: float | None


@dataclass(frozen=True)
class Facts:
    """What is known besides the samples.

    ``load``: True if our own load ran meanwhile, so that a busy GPU is no engine's doing. ``problem`` and
    ``problem_kind``: why there are no (more) samples, kind as in power_clocks.SmiError or ``load``.
    ``gb_s``: bandwidth of each GEMV summary (median, min, max). ``rails``: watts by label of spark_hwmon.
    """

    gpu: str = ""
    gpus: int = 1
    maximum_mhz: float | None = None
    applied_mhz: float | None = None
    foreign_locks: Sequence[Lock] = ()
    load: bool = False
    problem: str = ""
    problem_kind: str = ""
    compute_apps: int = 0
    tflops: float | None = None
    gb_s: Mapping[str, float] = field(default_factory=dict)
    rails: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """``state`` of STATES; ``reason`` in words with numbers; ``lock``: in_force, exceeded, not_reached or unknown."""

    state: str
    reason: str
    remedy: str
    lock: str
    evidence: dict[str, Any]

    def as_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def reason_names(bits: int) -> list[str]:
    """Words for a mask of active clock event reasons; a bit of the future is named by its number."""
    names = [name for bit, name in REASONS.items() if bits & bit]
    rest = bits & ~sum(REASONS)
    return [*names, f"0x{rest:x}"] if rest else names


def is_busy(sample: Sample, limits: Thresholds) -> bool:
    return (
        sample.utilization_percent is not None
        and sample.sm_mhz is not None
        and sample.power_watts is not None
        and sample.utilization_percent >= limits.busy_utilization_percent
    )


def spread(values: Sequence[float | None]) -> dict[str, float] | None:
    """min, median and max of what was read; None if nothing was."""
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"min": min(known), "median": round(statistics.median(known), 1), "max": max(known)}


def words(values: Mapping[str, float] | None, unit: str) -> str:
    if values is None:
        return f"no {unit}"
    low, high = values["min"], values["max"]
    return f"{low:g} {unit}" if low == high else f"{low:g} to {high:g} {unit}"


def under_load(result: Mapping[str, Any]) -> bool:
    evidence = result.get("evidence", {})
    return bool(evidence) and evidence["busy_samples"] >= evidence["thresholds"]["busy_samples_min"]


def judge(
    result: Mapping[str, Any], accept: Sequence[str] = (), strict: bool = False, lock_wanted: bool = True
) -> dict[str, Any]:
    """Whether a play may go on from a node with this result of ``power_sampling.measure``: ``passed`` and ``message``.

    ok passes. What ``accept`` names passes. An idle engine makes the result inconclusive; that passes if the node was
    ok under load earlier in this boot, unless ``strict``. What was seen under load and is unclear does not. A lock that
    was exceeded never passes: that a clock was set is worth nothing. With ``lock_wanted`` the lock must have been
    confirmed by the driver in this boot, too.
    """
    state, reason = str(result["state"]), str(result["reason"])
    found = f"found {state}: {reason}"
    if result.get("unclean_boot"):
        found += ". The boot before this one ended without a shutdown, after which this check is required"
    known_ok = state == INCONCLUSIVE and bool(result.get("this_boot_ok")) and not strict and not under_load(result)
    good = state == OK or state in accept or known_ok
    required, fixes = [], []
    if not good:
        required.append("ok before any load")
    # A lock that is missing, too, must not hide what ends a latch.
    if not good or state == LATCHED:
        accepted = "power_accept: [inconclusive] goes on without a check" if state == INCONCLUSIVE else ""
        fixes.append("; or ".join(text for text in (str(result.get("remedy", "")), accepted) if text))
    if lock_wanted and result.get("applied_mhz") is None and state != NO_GPU:
        required.append("a clock lock that the driver confirmed in this boot")
        fixes.append(AGAIN)
    elif result.get("lock") == "exceeded":
        found += f"; found a clock above the {result['applied_mhz']:g} MHz that the driver said it took"
        required.append("the lock in force")
        fixes.append(AGAIN)
    if required:
        return {"passed": False, "message": f"{found}; required {', and '.join(required)}; fix: {'; '.join(fixes)}"}
    if state == OK:
        measured = "" if result.get("measured") else " (recorded earlier in this boot)"
        return {"passed": True, "message": f"ok{measured}: {reason}"}
    why = "accepted by power_accept" if state in accept else "ok earlier in this boot"
    return {"passed": True, "message": f"{found}; {why}"}


def after_our_lock(first: Mapping[str, Any], second: Mapping[str, Any]) -> dict[str, Any]:
    """Which of two results of ``power_sampling.measure`` counts where the first says latched.

    ``second``: the look after our lock was asserted again, without a ``state`` if there was none. A lock that somebody
    set over ours, unknown to units and scripts, reads like a latch; ours lifts it, and no lock lifts a latch.
    """
    if first["state"] != LATCHED or "state" not in second:
        return dict(first)
    times = [result["own_lock"].get("asserted_at_seconds") for result in (first, second)]
    if times[1] is None or times[0] == times[1]:
        return dict(first)
    low, now = (result["evidence"].get("sm_mhz") for result in (first, second))
    changed: dict[str, Any] = {"this_boot_ok": False}
    slack = second["evidence"]["thresholds"]["lock_tolerance_mhz"]
    lifted = bool(low and now and now["median"] > low["max"] + slack)
    if second["state"] == LATCHED:
        changed.update(reason=f"{second['reason']}, and the same after our lock was asserted again", remedy=DRAIN)
    elif lifted:
        changed.update(
            state=CAPPED,
            reason=f"{words(low, 'MHz')} under load until our lock was asserted again, {words(now, 'MHz')} since: "
            "a lock that no unit or script here explains",
            remedy="ours is in force again; find what locked the clocks (nvidia-smi -lgc by hand, in a script or in a "
            "container), end it, then check again",
        )
    else:
        # Idle, or no answer: nothing was ruled out. Anything else, such as heat, is the newer word on a low clock.
        return dict(first if second["state"] in (OK, INCONCLUSIVE, NO_GPU) else second)
    kept = {"ok_in_this_boot" if key == "this_boot_ok" else key: value for key, value in changed.items()}
    return {**second, **changed, "record": {**second["record"], **kept} if second["record"] else {}}


def replacements(locks: Sequence[Mapping[str, Any]], replace: Sequence[str]) -> dict[str, Any]:
    """Foreign clock locks against the consent to replace them: ``problems`` in words, ``stop``: units to stop."""
    problems, stop = [], []
    for lock in locks:
        name, pair = str(lock["name"]), lock.get("clock_mhz")
        value = f", {pair[0]},{pair[1]} MHz" if pair else ""
        found = f"found {lock['path']} ({lock['reason']}{value})"
        if not lock["stop"]:
            problems.append(
                f"{found}; required one owner of the clocks; fix: take the call out of {lock['path']} by hand"
            )
        elif name in replace:
            stop += [unit for unit in lock["stop"] if unit not in stop]
        else:
            problems.append(
                f"{found}; required one owner of the clocks; fix: power_replace_foreign: [{name}] stops and disables "
                f"it ({', '.join(lock['stop'])}), reset puts it back; or disable it yourself"
            )
    return {"problems": problems, "stop": stop}


def classify(samples: Sequence[Sample], facts: Facts, limits: Thresholds | None = None) -> Verdict:
    """Exactly one state, with what it rests on."""
    return _Case(samples, facts, limits or Thresholds()).verdict()


class _Case:
    """The figures of one node, and the rules in the order of proof."""

    def __init__(self, samples: Sequence[Sample], facts: Facts, limits: Thresholds) -> None:
        self.samples, self.facts, self.limits = samples, facts, limits
        self.busy = [sample for sample in samples if is_busy(sample, limits)]
        self.mhz = spread([sample.sm_mhz for sample in self.busy])
        self.watts = spread([sample.power_watts for sample in self.busy])
        self.bits = 0
        for sample in self.busy:
            self.bits |= sample.reasons or 0
        self.soc = spread([sample.soc_c for sample in samples])
        ours = [] if facts.applied_mhz is None else [Lock("ours", facts.applied_mhz)]
        self.locks = [*facts.foreign_locks, *ours]
        self.cap = facts.applied_mhz if facts.applied_mhz is not None else facts.maximum_mhz
        self.floor = max(limits.latch_floor_mhz, limits.latch_cap_ratio * (self.cap or 0.0))
        # What a healthy GPU reaches: its lock, if it sustains that; else its worst without a fault.
        applied, sustained = facts.applied_mhz, limits.sustained_ratio * (facts.maximum_mhz or 0.0)
        if applied is not None and (facts.maximum_mhz is None or applied <= sustained):
            self.reached = max(self.floor, limits.lock_held_ratio * applied)
        else:
            self.reached = max(self.floor, limits.sustained_ratio * sustained)

    def share(self, bits: int) -> float:
        return sum(bool((sample.reasons or 0) & bits) for sample in self.busy) / max(1, len(self.busy))

    def all_below(self, mhz: float) -> bool:
        return all(sample.sm_mhz is not None and sample.sm_mhz < mhz for sample in self.busy)

    def follows(self, maximum_mhz: float | None) -> bool:
        """Whether the clock under load is that of a lock at this maximum."""
        if maximum_mhz is None or self.mhz is None:
            return False
        slack = self.limits.lock_tolerance_mhz
        return maximum_mhz - slack <= self.mhz["median"] and self.mhz["max"] <= maximum_mhz + slack

    def explaining_lock(self, slow: bool) -> Lock | None:
        """A lock that the clock follows: one below what a healthy GPU reaches, or another than ours."""
        applied = self.facts.applied_mhz
        for lock in sorted(self.locks, key=lambda lock: lock.maximum_mhz or 0.0):
            if lock.maximum_mhz is None or not self.follows(lock.maximum_mhz):
                continue
            instead = applied is not None and lock.maximum_mhz < applied and not self.follows(applied)
            if slow or instead or lock.maximum_mhz < self.reached:
                return lock
        return None

    def lock_state(self) -> str:
        """Whether our lock shows in the clocks: above it anywhere it is gone, near it under load it holds."""
        applied = self.facts.applied_mhz
        if applied is None:
            return "unknown"
        clocks = [sample.sm_mhz for sample in self.samples if sample.sm_mhz is not None]
        if any(clock > applied + self.limits.lock_tolerance_mhz for clock in clocks):
            return "exceeded"
        if len(self.busy) < self.limits.busy_samples_min or self.mhz is None:
            return "unknown"
        if self.mhz["median"] >= self.limits.lock_held_ratio * applied:
            return "in_force"
        # A healthy GPU need not reach a lock above what it sustains.
        return "unknown" if self.mhz["median"] >= self.reached else "not_reached"

    def low_rails(self) -> list[str]:
        """Platform limits of spark_hwmon below those of a healthy machine.

        Both are the one direct proof of a latch. One alone may be a cap that the owner wrote.
        """
        floors = {"pl1": self.limits.pl1_floor_watts, "syspl1": self.limits.syspl1_floor_watts}
        return [
            f"{label} {self.facts.rails[label]:g} W (healthy is at least {floor:g} W)"
            for label, floor in floors.items()
            if label in self.facts.rails and self.facts.rails[label] < floor
        ]

    def seen(self) -> str:
        names = ", ".join(reason_names(self.bits)) or "no reason"
        rails = "".join(f", {rail}" for rail in self.low_rails())
        return (
            f"{len(self.busy)} busy samples at {words(self.mhz, 'MHz')} and {words(self.watts, 'W')}, "
            f"clock event mask 0x{self.bits:x} ({names}){rails}"
        )

    def drain(self) -> str:
        """The remedy of a latch that only the clock shows."""
        ours = "sudo systemctl start goodput-clocks-reassert"
        command = ours if self.facts.applied_mhz is not None else "sudo nvidia-smi -lgc 300,2200"
        return ALIKE.format(command=command) + DRAIN

    def verdict(self) -> Verdict:
        state, reason, remedy = self.decide()
        evidence = {
            "samples": len(self.samples),
            "busy_samples": len(self.busy),
            "sm_mhz": self.mhz,
            "power_watts": self.watts,
            "utilization_percent": spread([sample.utilization_percent for sample in self.samples]),
            "gpu_c": spread([sample.temperature_c for sample in self.samples]),
            "soc_c": self.soc,
            "reasons_mask": f"0x{self.bits:x}",
            "reasons": reason_names(self.bits),
            "throttled_share": round(self.share(THERMAL_BITS | BRAKE_BITS), 2),
            "cap_mhz": self.cap,
            "latch_below_mhz": round(self.floor, 1),
            "ok_from_mhz": round(self.reached, 1),
            "locks": [dataclasses.asdict(lock) for lock in self.locks],
            "rails_watts": dict(self.facts.rails),
            "tflops": self.facts.tflops,
            "gb_s": dict(self.facts.gb_s),
            "thresholds": dataclasses.asdict(self.limits),
        }
        return Verdict(state, reason, remedy or REMEDIES[state], self.lock_state(), evidence)

    def decide(self) -> tuple[str, str, str]:
        facts, limits = self.facts, self.limits
        if facts.problem_kind in ("missing", "no_driver"):
            return NO_GPU, facts.problem, ""
        # A driver that hangs or answers in an unknown way says nothing about the clocks.
        if facts.problem and facts.problem_kind != "load":
            return INCONCLUSIVE, facts.problem, "put that right, then run again"
        if facts.gpus == 0:
            return NO_GPU, "found no GPU, required one", ""
        if facts.gpus > 1:
            return INCONCLUSIVE, f"found {facts.gpus} GPUs, required one", "name one of them with gpu_index"
        enough = len(self.busy) >= limits.busy_samples_min
        hot = [
            sample.soc_c for sample in self.samples if sample.soc_c is not None and sample.soc_c >= limits.soc_stop_c
        ]
        slow = bool(self.busy) and self.all_below(self.floor)
        rails = self.low_rails()
        if len(rails) == 2 and (not enough or slow):
            return LATCHED, f"the platform's own limits are those of a latched machine: {self.seen()}", ""
        if len(hot) >= limits.hot_samples_min:
            return (
                THERMAL,
                f"SoC at {max(hot):g} °C, at or above {limits.soc_stop_c:g} °C in {len(hot)} samples; {self.seen()}",
                "",
            )
        if facts.problem and not enough:
            return INCONCLUSIVE, facts.problem, "put that right, then run again"
        if not enough:
            return self.idle()
        if len(rails) == 2 and not slow:
            return (
                INCONCLUSIVE,
                f"the platform's limits are low and the clock is not: {self.seen()}",
                "check again; if it stays, believe the clock and report the readings of spark_hwmon",
            )
        for state, bits in ((POWER_BRAKE, BRAKE_BITS), (THERMAL, THERMAL_BITS)):
            share = self.share(bits)
            if share >= limits.throttle_share or (share > 0 and slow):
                named = ", ".join(reason_names(self.bits & bits))
                return state, f"{named} in {share:.0%} of {self.seen()}", ""
        lock = self.explaining_lock(slow)
        if lock is not None:
            return (
                CAPPED,
                f"the clock is what a lock allows: {lock.owner}, {lock.maximum_mhz:g} MHz; {self.seen()}",
                f"stop and disable {lock.owner} (power_replace_foreign), then check again"
                if lock.owner != "ours"
                else "",
            )
        if slow:
            return self.low_clock()
        return self.running()

    def idle(self) -> tuple[str, str, str]:
        used = "no model runs, so use mode load" if not self.facts.compute_apps else "send it requests meanwhile"
        why = "an idle GPU reads like a latched one" if not self.facts.load else "the load did not keep the GPU busy"
        return (
            INCONCLUSIVE,
            f"{len(self.busy)} of {len(self.samples)} samples busy "
            f"(utilisation at least {self.limits.busy_utilization_percent:g} %), "
            f"required {self.limits.busy_samples_min}: {why}" + "".join(f"; {rail}" for rail in self.low_rails()),
            f"check under load: {used}" if not self.facts.load else "run again with more seconds",
        )

    def low_clock(self) -> tuple[str, str, str]:
        """Every busy sample is below the floor and no lock with a known value explains it."""
        unknown = [lock.owner for lock in self.facts.foreign_locks if lock.maximum_mhz is None]
        if unknown:
            return (
                INCONCLUSIVE,
                f"{self.seen()}, below {self.floor:g} MHz, and {', '.join(unknown)} locks it to an unknown value",
                "stop and disable it (power_replace_foreign), then check again",
            )
        assert self.watts is not None
        if self.watts["max"] < self.limits.latch_watts:
            return (
                LATCHED,
                f"{self.seen()}: all below {self.floor:g} MHz and {self.limits.latch_watts:g} W, nothing explains it",
                self.drain(),
            )
        return (
            INCONCLUSIVE,
            f"{self.seen()}: below {self.floor:g} MHz, but not below the {self.limits.latch_watts:g} W of the latch",
            "check again with the GPU to itself; if it stays, treat it as latched: " + self.drain(),
        )

    def running(self) -> tuple[str, str, str]:
        """The clock is no latch's. Whether it is healthy, too."""
        facts, limits = self.facts, self.limits
        good = [sample for sample in self.busy if sample.sm_mhz is not None and sample.sm_mhz >= self.reached]
        if len(good) < limits.good_share * len(self.busy):
            return (
                INCONCLUSIVE,
                f"{len(good)} of {self.seen()} reach {self.reached:g} MHz: neither healthy nor latched",
                "check again with the GPU to itself, and look for what slows it (other programs, heat, a weak supply, "
                "a clock lock by hand)",
            )
        lowest = facts.gb_s.get("min")
        if lowest is not None and lowest < limits.memory_floor_gb_s:
            return (
                SLOW_MEMORY,
                f"memory reads at {lowest:g} GB/s (median {facts.gb_s.get('median', lowest):g}), required at least "
                f"{limits.memory_floor_gb_s:g} at all times; the clock is as it should be: {self.seen()}",
                "",
            )
        stuck = [
            sample
            for sample in self.busy
            if (sample.utilization_percent or 0) >= limits.stuck_utilization_percent
            and (sample.power_watts or 0) < limits.stuck_watts
        ]
        if not facts.load and len(stuck) == len(self.busy):
            return STUCK, f"busy without drawing power: {self.seen()}, all below {limits.stuck_watts:g} W", ""
        extra = f", {facts.tflops:g} TFLOP/s" if facts.tflops is not None else ""
        extra += f", {facts.gb_s['median']:g} GB/s" if "median" in facts.gb_s else ""
        return OK, f"{self.seen()}{extra}", ""
