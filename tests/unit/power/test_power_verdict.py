"""The classifier: every published reading of a latched Spark and of what looks like one, as a row with its source.

Sources: thread numbers are those of forums.developer.nvidia.com/t/<n>; docs/power.md lists the studies
and repositories that GATE, T124, SB, TW1, QSNAP, FR, WEDGE, TOX and SYS stand for.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.module_utils import power_verdict as pv
from ansible_collections.goodput.spark.plugins.module_utils.power_verdict import (
    Facts,
    Lock,
    Sample,
    ThresholdError,
    Thresholds,
    classify,
    reason_names,
)

DATA = Path(__file__).parent / "data"
# clocks.max.sm of a GB10.
MAXIMUM_MHZ = 3003.0
FOREIGN_800 = (Lock("gpu-clock-lock.service", 800.0),)


def samples(
    mhz: float | Sequence[float],
    watts: float | Sequence[float],
    utilization: float = 96.0,
    reasons: int | Sequence[int] = 0,
    soc: float | None = None,
    count: int = 20,
) -> list[Sample]:
    """``count`` samples, two a second; a sequence of values is repeated over them."""

    def nth(value: Any, index: int) -> Any:
        return value[index % len(value)] if isinstance(value, Sequence) else value

    return [
        Sample(i / 2, utilization, nth(mhz, i), nth(watts, i), "P0", 50.0, nth(reasons, i), soc) for i in range(count)
    ]


@dataclass
class Row:
    """One reading: where it was published, what was read, the state it must get."""

    source: str
    state: str
    mhz: float | Sequence[float]
    watts: float | Sequence[float]
    reading: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)


FAST = {"median": 228.0, "min": 224.0, "max": 233.0}
LOADED: dict[str, Any] = {"load": True, "tflops": 80.0, "gb_s": FAST}
CAPPED_2200: dict[str, Any] = {"applied_mhz": 2200.0}
ENGINE: dict[str, Any] = {"compute_apps": 1}

# --- 2.1: readings of the latch -------------------------------------------------------------------------------------
LATCHED = [
    Row("GATE 2.2: lower end of the fault band", "latched", 481, 5.0),
    Row("GATE 2.2: 507 MHz", "latched", 507, 9.0),
    Row("361296: the cap that gave the thread its name", "latched", 513, 13.0),
    Row("361296, under a 300,2200 lock that -lgc confirmed", "latched", 513, 13.0, facts=CAPPED_2200 | LOADED),
    Row("361296, watts as a range 13 to 14", "latched", 513, (13.0, 14.0)),
    Row("SB: head node of a pair under TP=2", "latched", 611, 12.0, facts=ENGINE),
    Row("sparkview: PROCHOT is said to drop to 611 MHz", "latched", 611, 10.0),
    Row("371537 via LEDG1: EdgeXpert's 600 MHz cap", "latched", 600, 15.0),
    Row("370304: 630 to 650 MHz at 15 W", "latched", (630, 650), 15.0),
    Row("eugr/spark-vllm-docker#334", "latched", 702, 15.5, facts=ENGINE),
    Row("376039", "latched", 721, 16.0, facts=CAPPED_2200),
    Row("GATE 2.2: 728 MHz", "latched", 728, 15.0),
    Row("T124 before AC removal", "latched", 799, 19.5, facts=LOADED | {"tflops": 36.5}),
    Row("T124: a 2418,2418 lock did not lift it", "latched", 799, 19.5, facts=LOADED | {"applied_mhz": 2418.0}),
    Row("GATE 2.2: 850 MHz", "latched", 850, 15.0),
    Row("GATE 2.2: upper end of the fault band", "latched", 858, 16.0, facts=CAPPED_2200),
    Row("hasso5703/dgx-spark-qwen38#8: 700 to 890 MHz under load", "latched", (700, 890, 810), 18.0, facts=ENGINE),
    Row("GATE 2: utilisation from 80 to 96 %", "latched", 513, 13.0, {"utilization": 80.0}),
    Row("TOX: at or below 850 MHz and 20 W; ours asks 50 % utilisation", "latched", 850, 20.0, {"utilization": 50.0}),
    Row("GATE 3.2: bit 0x2 is no excuse", "latched", 513, 13.0, {"reasons": 0x2}),
    Row("the reason idle in between is no excuse", "latched", 513, 13.0, {"reasons": (0, 0x1)}),
    Row("a latched machine beside a foreign lock at 2200", "latched", 513, 13.0,
        facts={"foreign_locks": (Lock("gb10-clock-cap.service", 2200.0),)}),
    Row("beside a foreign lock at 800, which 513 does not follow", "latched", 513, 13.0,
        facts={"foreign_locks": FOREIGN_800}),
    Row("vladtemian in 361296: pl1 20 W and syspl1 30 W, seen at idle", "latched", 208, 4.5, {"utilization": 0.0},
        {"rails": {"pl1": 20.0, "syspl1": 30.0}}),
    Row("vladtemian: the same under load", "latched", 513, 13.0, facts={"rails": {"pl1": 20.0, "syspl1": 30.0}}),
    Row("one low limit alone leaves it to clock and watts", "latched", 513, 13.0, facts={"rails": {"pl1": 20.0}}),
    Row("GATE 5: it can begin on an idle node; checked under load", "latched", 513, 13.0, facts=LOADED),
    # The published reading that the rule does not reach: never ok, and the remedy says to treat it as latched.
    Row("GATE 2.2: one report flat at 35 W while capped", "inconclusive", 850, 35.0),
]  # fmt: skip

# --- 2.1, 1.2: healthy readings -------------------------------------------------------------------------------------
HEALTHY = [
    Row("TW1: 2184 to 2190 MHz under a 2200 lock, 77 to 83 TFLOPS at about 18 W", "ok", (2184, 2190), 18.0,
        facts=CAPPED_2200 | LOADED),
    Row("TW1: unlocked, 85 to 86 TFLOPS at about 28 W", "ok", (2281, 2400), 28.0, facts=LOADED),
    Row("T124 after AC removal: 2281 MHz, 92.5 W, 91.6 TFLOP/s", "ok", 2281, 92.5, facts=LOADED | {"tflops": 91.6}),
    Row("GATE: healthy unlocked up to 2511 MHz", "ok", (2281, 2511), 60.0, facts=ENGINE),
    Row("FR 5: 300,2200, decode at 47 to 50 W", "ok", 2190, (47.0, 50.0), facts=CAPPED_2200 | ENGINE),
    Row("WEDGE 4.1: 300,2200, 33 W, SoC 67.7 °C", "ok", 2190, 33.0, {"soc": 67.7}, CAPPED_2200 | ENGINE),
    Row("a fleet that holds about 2171 under a 2200 lock", "ok", 2171, 35.0, facts=CAPPED_2200 | ENGINE),
    Row("unlocked DVFS dips to about 1970 in sustained prefill", "ok", (1970, 2281), 60.0, facts=ENGINE),
    Row("WEDGE 3.4: 2390 MHz mean at 92 °C, still below the stop", "ok", 2390, 65.0, {"soc": 92.0}, ENGINE),
    Row("SB: the healthy worker of a pair whose head is latched", "ok", 2431, 35.0, facts=ENGINE),
    Row("JRN: 2000 was asked for, the driver took 1976", "ok", 1970, 30.0, facts={"applied_mhz": 1976.0} | LOADED),
    Row("cap sweep: 1800 MHz at about 23 W", "ok", 1790, 23.0, facts={"applied_mhz": 1800.0} | LOADED),
    Row("a node whose owner caps at 2200 with a unit of their own", "ok", 2180, 40.0,
        facts={"foreign_locks": (Lock("gb10-clock-cap.service", 2200.0),)} | ENGINE),
    Row("a lock far above what GB10 sustains (2418,3003)", "ok", 2418, 80.0, facts={"applied_mhz": 3003.0} | LOADED),
    Row("vladtemian in 361296: healthy pl1 about 140 W, syspl1 about 231 W", "ok", 2190, 40.0,
        facts=CAPPED_2200 | ENGINE | {"rails": {"pl1": 140.0, "syspl1": 231.0}}),
    Row("2.5: an owner's own cap of pl1 at 50 W, under the lock", "ok", 2190, 40.0,
        facts=CAPPED_2200 | LOADED | {"rails": {"pl1": 50.0, "syspl1": 231.0}}),
]  # fmt: skip

# --- 2.2: look-alikes -----------------------------------------------------------------------------------------------
ALIKE = [
    Row("2.2-1 GATE 2.3: a foreign lock at 800", "capped_by_lock", 798, 12.0, facts={"foreign_locks": FOREIGN_800}),
    Row("2.2-1: the same beside our own lock", "capped_by_lock", 798, 12.0,
        facts=CAPPED_2200 | {"foreign_locks": FOREIGN_800}),
    Row("2.2-1: our own lock at 800, quantised to 793", "capped_by_lock", 793, 12.0, facts={"applied_mhz": 793.0}),
    Row("2.2-1: a foreign lock between the latch and health", "capped_by_lock", 1495, 25.0,
        facts={"foreign_locks": (Lock("spark-gpu-clock-lock.service", 1500.0),)}),
    Row("1.2, OGK1358: a foreign 0,2100 instead of our 2200", "capped_by_lock", (2080, 2092), 30.0,
        facts=CAPPED_2200 | LOADED | {"foreign_locks": (Lock("clock.service", 2100.0),)}),
    Row("1.2, cap sweep: a foreign lock at 1800 instead of our 2200", "capped_by_lock", 1790, 23.0,
        facts=CAPPED_2200 | LOADED | {"foreign_locks": (Lock("clock.service", 1800.0),)}),
    Row("1.2, guardkit: a foreign 200,2150 that our 2200 replaced", "ok", (2164, 2190), 30.0,
        facts=CAPPED_2200 | LOADED | {"foreign_locks": (Lock("clock.service", 2150.0),)}),
    Row("2.2-1: our own lock just above the latch's floor", "capped_by_lock", 990, 15.0,
        facts={"applied_mhz": 1024.0} | LOADED),
    Row("2.2-1: a foreign lock whose value is computed", "inconclusive", 798, 12.0,
        facts={"foreign_locks": (Lock("nvidia-clock-optimize.service", None),)}),
    Row("2.2-2: software thermal, slow", "thermal", 900, 25.0, {"reasons": 0x20, "soc": 96.0}),
    Row("2.2-2: hardware thermal, slow", "thermal", 611, 15.0, {"reasons": 0x48}),
    Row("2.2-2: both thermal bits at a clock that is not low", "thermal", 2100, 60.0, {"reasons": 0x60}),
    Row("2.2-2: thermal in one sample of ten, all slow: a latch has none", "thermal", 900, 25.0,
        {"reasons": (0, 0, 0, 0, 0, 0, 0, 0, 0, 0x20)}),
    Row("WEDGE 3.0: 94 to 98 °C SoC at 56 to 65 W, no reason set", "thermal", 2390, 60.0, {"soc": 95.0}, ENGINE),
    Row("WEDGE: the CPU alone heats the SoC", "thermal", 208, 5.0, {"utilization": 0.0, "soc": 94.0}),
    Row("2.2-2: hardware power brake", "power_brake", 700, 12.0, {"reasons": 0x88}),
    Row("2.2-2: power brake and heat at once", "power_brake", 700, 12.0, {"reasons": 0xE8}),
    Row("2.2-3 374791: the GX10's 60 W ceiling", "ok", 2200, 60.0, {"reasons": 0x4}, ENGINE),
    Row("2.2-4: memory-bound decode at 35 to 45 W", "ok", 2190, (35.0, 45.0), facts=CAPPED_2200 | ENGINE),
    Row("2.2-6 TW1: 66 to 80 GB/s at an unchanged clock", "slow_memory", (2164, 2190), 18.0,
        facts=CAPPED_2200 | LOADED | {"gb_s": {"median": 72.0, "min": 66.0, "max": 80.0}}),
    Row("2.2-6 TW1: it flips every 7 to 32 s, so one slow window counts", "slow_memory", 2190, 18.0,
        facts=CAPPED_2200 | LOADED | {"gb_s": {"median": 226.0, "min": 70.0, "max": 233.0}}),
    Row("2.2-8 eugr/spark-vllm-docker#260: 96 % at 22 W", "engine_stuck", 2190, 22.0, facts=CAPPED_2200 | ENGINE),
    Row("2.2-8: the same watts under our own load are no engine's", "ok", 2190, 22.0, facts=CAPPED_2200 | LOADED),
]  # fmt: skip

# --- 2.3, 2.4: what can not be judged ----------------------------------------------------------------------------
UNCLEAR = [
    Row("hoesing: idle, 4 to 5 W at 208 MHz, P8", "inconclusive", 208, 4.5, {"utilization": 0.0}),
    Row("GATE: a model resident, 13.8 to 17.2 W at 2405 MHz", "inconclusive", 2405, (13.8, 17.2),
        {"utilization": 0.0}, ENGINE),
    Row("QSNAP: 4.5 W at 1176 MHz", "inconclusive", 1176, 4.5, {"utilization": 3.0}),
    Row("T124: a short kernel is not enough", "inconclusive", 513, 13.0, {"count": 3}),
    Row("nine busy samples", "inconclusive", 2190, 40.0, {"count": 9}),
    Row("370304: 513 MHz while idle, after a drain", "inconclusive", 513, 6.0, {"utilization": 0.0}),
    Row("371201: the clock falls when load comes", "inconclusive", (2190, 800), 20.0, facts=ENGINE),
    Row("cap sweep: the clock of an 1800 lock is not that of our 2200", "inconclusive", 1790, 23.0,
        facts=CAPPED_2200 | LOADED),
    Row("2.5: an owner's own cap of pl1 at 50 W, idle", "inconclusive", 208, 4.5, {"utilization": 0.0},
        {"rails": {"pl1": 50.0, "syspl1": 231.0}}),
    Row("2.5: pl1 read alone, idle", "inconclusive", 208, 4.5, {"utilization": 0.0}, {"rails": {"pl1": 20.0}}),
    Row("between latch and health, unexplained", "inconclusive", 1500, 28.0, facts=CAPPED_2200 | LOADED),
    Row("spark_hwmon against the clock", "inconclusive", 2190, 40.0, facts={"rails": {"pl1": 20.0, "syspl1": 30.0}}),
]  # fmt: skip

ROWS = [*LATCHED, *HEALTHY, *ALIKE, *UNCLEAR]


def verdict_of(row: Row) -> pv.Verdict:
    known: dict[str, Any] = {"gpu": "NVIDIA GB10", "maximum_mhz": MAXIMUM_MHZ}
    return classify(samples(row.mhz, row.watts, **row.reading), Facts(**(known | row.facts)))


def test_enough_rows_with_sources_of_their_own() -> None:
    assert len(ROWS) >= 40
    assert len({row.source for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.source)
def test_published_readings(row: Row) -> None:
    verdict = verdict_of(row)
    assert verdict.state == row.state, verdict.reason
    assert verdict.state in pv.STATES
    # What is wrong comes with what to do.
    assert bool(verdict.remedy) == (verdict.state != "ok")
    assert verdict.evidence["thresholds"]["latch_watts"] == 30.0


def test_every_state_is_reached() -> None:
    reached = {verdict_of(row).state for row in ROWS} | {classify([], Facts(problem="x", problem_kind="missing")).state}
    assert reached == set(pv.STATES)


@pytest.mark.parametrize("row", LATCHED, ids=lambda row: row.source)
def test_latched_is_never_called_ok_whatever_the_clock_pair(row: Row) -> None:
    for applied in (None, 800.0, 1976.0, 2200.0, 3003.0):
        changed = Row(row.source, row.state, row.mhz, row.watts, row.reading, row.facts | {"applied_mhz": applied})
        assert verdict_of(changed).state != "ok"


@pytest.mark.parametrize("row", [*ALIKE, *UNCLEAR, *HEALTHY], ids=lambda row: row.source)
def test_look_alikes_are_never_called_latched(row: Row) -> None:
    assert verdict_of(row).state != "latched"


def test_the_reason_holds_the_figures() -> None:
    reason = verdict_of(LATCHED[2]).reason
    for words in ("20 busy samples", "513 MHz", "13 W", "mask 0x0", "1801.8 MHz", "30 W"):
        assert words in reason, reason


def test_remedy_of_the_latch_is_the_drain() -> None:
    remedy = verdict_of(LATCHED[0]).remedy
    for words in ("wall AND from the Spark", "60 s", "5 minutes", "before any other load", "reboot", "replacement"):
        assert words in remedy


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        ("missing", "no_gpu"), ("no_driver", "no_gpu"), ("hang", "inconclusive"), ("format", "inconclusive"),
        ("failed", "inconclusive"), ("load", "inconclusive"),
    ],
)  # fmt: skip
def test_problems_are_named_and_never_ok(kind: str, state: str) -> None:
    verdict = classify([], Facts(problem="what happened", problem_kind=kind))
    assert (verdict.state, verdict.reason) == (state, "what happened")


def test_a_driver_that_hangs_half_way_is_not_ok() -> None:
    facts = Facts(maximum_mhz=MAXIMUM_MHZ, problem="no answer in 10 s", problem_kind="hang")
    assert classify(samples(2190, 40.0), facts).state == "inconclusive"


@pytest.mark.parametrize(("gpus", "state"), [(0, "no_gpu"), (2, "inconclusive")])
def test_number_of_gpus(gpus: int, state: str) -> None:
    assert classify([], Facts(gpus=gpus)).state == state


def test_readings_that_the_gpu_does_not_have_are_not_busy() -> None:
    blank = [Sample(i / 2, 96.0, None, 13.0) for i in range(20)]
    assert classify(blank, Facts(maximum_mhz=MAXIMUM_MHZ)).state == "inconclusive"


def test_one_hot_reading_is_a_slip_of_the_sensor() -> None:
    row = samples(2190, 40.0)
    row[3] = Sample(1.5, 96.0, 2190.0, 40.0, soc_c=99.0)
    assert classify(row, Facts(maximum_mhz=MAXIMUM_MHZ, compute_apps=1)).state == "ok"


@pytest.mark.parametrize(
    ("mhz", "utilization", "lock"),
    [
        (2190.0, 96.0, "in_force"),
        (2240.0, 96.0, "in_force"),
        # 0.95 of the lock. Published are 2164 to 2190.
        (2091.0, 96.0, "in_force"),
        (2089.0, 96.0, "not_reached"),
        (1790.0, 96.0, "not_reached"),
        # A clock above the lock proves the loss, with or without load.
        (2405.0, 96.0, "exceeded"),
        (2405.0, 0.0, "exceeded"),
        # An idle clock below it proves nothing.
        (208.0, 0.0, "unknown"),
        (513.0, 96.0, "not_reached"),
    ],
)
def test_only_an_observed_clock_says_whether_the_lock_holds(mhz: float, utilization: float, lock: str) -> None:
    facts = Facts(maximum_mhz=MAXIMUM_MHZ, applied_mhz=2200.0, compute_apps=1)
    assert classify(samples(mhz, 40.0, utilization), facts).lock == lock


def test_a_lock_above_what_the_gpu_sustains_shows_nothing_in_a_healthy_clock() -> None:
    facts = Facts(maximum_mhz=MAXIMUM_MHZ, applied_mhz=3003.0, load=True)
    verdict = classify(samples((1970, 2281), 60.0), facts)
    assert (verdict.state, verdict.lock) == ("ok", "unknown")


def test_a_low_lock_of_our_own_is_in_force_and_explains_the_clock() -> None:
    verdict = classify(samples(793, 12.0), Facts(maximum_mhz=MAXIMUM_MHZ, applied_mhz=793.0, load=True))
    assert (verdict.state, verdict.lock) == ("capped_by_lock", "in_force")


@pytest.mark.parametrize(("applied", "command"), [(2200.0, "goodput-clocks-reassert"), (None, "nvidia-smi -lgc")])
def test_the_remedy_of_a_latch_begins_with_what_looks_like_one(applied: float | None, command: str) -> None:
    facts = Facts(maximum_mhz=MAXIMUM_MHZ, applied_mhz=applied, load=True)
    # A lock of 800 MHz that no unit or script names reads like this.
    remedy = classify(samples(800, 12.0), facts).remedy
    assert remedy.index("set by hand") < remedy.index(command) < remedy.index("wall AND from the Spark")
    # Limits that no lock makes are the latch for sure.
    both = Facts(maximum_mhz=MAXIMUM_MHZ, applied_mhz=applied, rails={"pl1": 20.0, "syspl1": 30.0})
    assert classify(samples(513, 13.0), both).remedy == pv.DRAIN


def looked(mhz: float, watts: float, asserted: float | None, utilization: float = 96.0, reasons: int = 0) -> Any:
    """A result of power_sampling.measure under our 2200 lock."""
    facts = Facts(maximum_mhz=MAXIMUM_MHZ, applied_mhz=2200.0, load=True)
    verdict = classify(samples(mhz, watts, utilization, reasons), facts).as_dict()
    own = {"asserted_at_seconds": asserted}
    kept = {"state": verdict["state"], "reason": verdict["reason"], "ok_in_this_boot": True}
    return verdict | {"own_lock": own, "applied_mhz": 2200.0, "this_boot_ok": True, "record": kept}


FIRST = looked(800, 12.0, 100.0)
SKIPPED = {"changed": False, "skipped": True}


@pytest.mark.parametrize(
    ("second", "state", "words"),
    [
        (looked(2190, 28.0, 200.0), "capped_by_lock", ["800 MHz under load until", "2190 MHz since"]),
        (looked(1500, 28.0, 200.0), "capped_by_lock", ["1500 MHz since"]),
        (looked(800, 12.0, 200.0), "latched", ["the same after our lock was asserted again"]),
        # Nothing was ruled out: no second look, a lock that the driver did not confirm, an engine that idles now.
        (SKIPPED, "latched", ["nothing explains it"]),
        (looked(2190, 28.0, 100.0), "latched", ["nothing explains it"]),
        (looked(2190, 28.0, None), "latched", ["nothing explains it"]),
        (looked(208, 4.5, 200.0, utilization=0.0), "latched", ["nothing explains it"]),
        (looked(800, 12.0, 200.0, reasons=0x20), "thermal", ["software thermal"]),
    ],
)
def test_only_what_our_own_lock_does_not_lift_is_latched(second: Any, state: str, words: list[str]) -> None:
    result = pv.after_our_lock(FIRST, second)
    assert result["state"] == state
    assert [word for word in words if word not in result["reason"]] == []
    gate = pv.judge(result)
    assert (gate["passed"], "wall AND" in gate["message"]) == (False, state == "latched")
    if state == "capped_by_lock":
        assert "by hand" in gate["message"]
    if second is not SKIPPED and state != "thermal" and second["own_lock"]["asserted_at_seconds"] == 200.0:
        assert result["record"]["state"] == state
    if result["reason"] not in (FIRST["reason"], second.get("reason")):
        # An idle look later must not fall back on an ok from before.
        assert (result["record"]["ok_in_this_boot"], result["record"]["reason"]) == (False, result["reason"])


def test_a_node_that_is_not_latched_is_looked_at_once() -> None:
    assert pv.after_our_lock(looked(2190, 28.0, 100.0), SKIPPED)["state"] == "ok"


def test_every_threshold_is_an_input_of_the_role() -> None:
    role = Path(__file__).resolve().parents[3] / "roles/power"
    passed = yaml.safe_load((role / "vars/main.yml").read_text())["__power_thresholds"]
    defaults = yaml.safe_load((role / "defaults/main.yml").read_text())
    known = dataclasses.asdict(Thresholds())
    assert set(passed) == set(known)
    for name, value in known.items():
        assert f"power_{name} |" in passed[name]
        assert defaults[f"power_{name}"] == value


def test_the_number_of_hot_samples_is_a_threshold() -> None:
    facts = Facts(maximum_mhz=MAXIMUM_MHZ, compute_apps=1)
    reading = samples(2190, 40.0, soc=95.0, count=20)
    assert classify(reading, facts).state == "thermal"
    assert classify(reading, facts, Thresholds(hot_samples_min=21)).state == "ok"


def test_thresholds_decide() -> None:
    facts = Facts(maximum_mhz=MAXIMUM_MHZ, load=True)
    reading = samples(858, 16.0)
    assert classify(reading, facts).state == "latched"
    assert classify(reading, facts, Thresholds(latch_watts=16.0)).state == "inconclusive"
    lower = Thresholds(latch_floor_mhz=800.0, latch_cap_ratio=0.2, sustained_ratio=0.5)
    assert classify(reading, facts, lower).state == "ok"


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"latch_wats": 30}, "latch_wats"),
        ({"latch_watts": "30"}, "latch_watts '30'"),
        ({"latch_watts": -1}, "at least 0"),
        ({"latch_cap_ratio": 60}, "0 to 1"),
        ({"busy_samples_min": True}, "True"),
        ({"busy_samples_min": 0}, "at least 1"),
        ({"hot_samples_min": 0}, "at least 1"),
    ],
)
def test_bad_thresholds_are_named(values: Mapping[str, Any], words: str) -> None:
    with pytest.raises(ThresholdError, match=words):
        Thresholds.of(values)


def test_masks_in_words() -> None:
    assert reason_names(0x0) == []
    assert reason_names(0x68) == ["hardware slowdown", "software thermal", "hardware thermal"]
    assert reason_names(0x1001) == ["idle", "0x1000"]


def test_a_real_gpu_is_judged_by_its_own_clock() -> None:
    """An H200 under the module's own load; data/README.md says how it was recorded."""
    read = json.loads((DATA / "h200_load.json").read_text())
    taken = [Sample(**sample) for sample in read["samples"]]
    facts = Facts(
        gpu=read["gpu"]["name"],
        maximum_mhz=read["gpu"]["maximum_mhz"],
        load=True,
        tflops=read["load"]["tflops"]["median"],
        gb_s={key: read["load"]["gb_s"][key] for key in ("median", "min", "max")},
    )
    verdict = classify(taken, facts)
    assert (verdict.state, read["state"]) == ("ok", "ok"), verdict.reason
    assert verdict.evidence["latch_below_mhz"] == pytest.approx(0.6 * 1980)
    assert verdict.evidence["busy_samples"] == len(taken) == 28
    # The same GPU held at its idle clock by a latch would not pass.
    low = [Sample(s.seconds, s.utilization_percent, 345.0, 20.0, s.pstate, s.temperature_c, 0) for s in taken]
    assert classify(low, facts).state == "latched"


def test_the_same_real_gpu_beside_another_program() -> None:
    read = json.loads((DATA / "h200_busy.json").read_text())
    assert (read["mode"], read["load"], len(read["compute_apps"])) == ("passive", {}, 1)
    facts = Facts(maximum_mhz=1980.0, compute_apps=1)
    assert classify([Sample(**sample) for sample in read["samples"]], facts).state == "ok"


def test_the_same_real_gpu_idle_is_inconclusive() -> None:
    read = json.loads((DATA / "h200_idle.json").read_text())
    verdict = classify([Sample(**sample) for sample in read["samples"]], Facts(maximum_mhz=1980.0))
    assert (verdict.state, read["state"]) == ("inconclusive", "inconclusive")


@pytest.mark.parametrize(
    ("reading", "passes"),
    [
        # It idled, or did too little to tell.
        ((208, 4.5, {"utilization": 0.0}), True),
        ((1790, 23.0, {"count": 9}), True),
        # Busy, and the clock of another lock than ours: seen in this boot, after what was ok.
        ((1790, 23.0, {}), False),
    ],
)
def test_an_ok_of_this_boot_covers_only_what_was_not_seen_under_load(
    reading: tuple[int, float, dict[str, Any]], passes: bool
) -> None:
    mhz, watts, more = reading
    verdict = verdict_of(Row("", "inconclusive", mhz, watts, more, CAPPED_2200 | LOADED)).as_dict()
    assert verdict["state"] == "inconclusive"
    gate = pv.judge(verdict | {"applied_mhz": 2200.0, "this_boot_ok": True})
    assert gate["passed"] is passes, gate["message"]
