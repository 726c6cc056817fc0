"""One look at a node, end to end: nvidia-smi and load are the virtual pair's stand-ins, /proc and /sys are trees."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import power_load, power_sampling
from ansible_collections.goodput.spark.plugins.module_utils.node_facts import Node
from ansible_collections.goodput.spark.plugins.module_utils.power_clocks import Clocks, Smi
from ansible_collections.goodput.spark.plugins.module_utils.power_sampling import (
    Load,
    Options,
    foreign_locks,
    lock_value,
    measure,
    rails,
)
from ansible_collections.goodput.spark.plugins.module_utils.power_verdict import Thresholds, judge, replacements

ROOT = Path(__file__).resolve().parents[3]
STANDINS = ROOT / "roles/virtual_pair/files/standins/bin"


class Spark:
    """A node made of trees and stand-ins."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "proc/sys/kernel/random").mkdir(parents=True)
        (root / "proc/sys/kernel/random/boot_id").write_text("boot-1")
        (root / "sys/module/nvidia").mkdir(parents=True)
        self.state, self.verdict = root / "state.json", root / "verdict.json"

    def is_in(self, scenario: str) -> None:
        (self.root / "gpu-scenario").write_text(scenario)

    def lock(self) -> None:
        smi = Smi(str(STANDINS / "nvidia-smi"))
        quiet: Any = lambda text: None  # noqa: E731
        Clocks(
            300, 2200, smi, state_file=self.state, proc_root=self.root / "proc", sysfs_root=self.root / "sys", log=quiet
        ).lock()

    def options(self, mode: str = "auto", **changed: Any) -> Options:
        values: dict[str, Any] = {
            "mode": mode,
            # A loaded machine gives few samples in that time.
            "limits": Thresholds(busy_samples_min=2),
            "seconds": 1.5,
            "warmup_seconds": 0.1,
            "interval_ms": 100,
            "smi": Smi(str(STANDINS / "nvidia-smi"), 10.0),
            "load_command": [str(STANDINS / "virtual-pair-gpu-load")],
            "state_file": self.state,
            "verdict_file": self.verdict,
            "root": self.root,
            "proc_root": self.root / "proc",
            "sysfs_root": self.root / "sys",
        }
        return Options(**(values | changed))

    def look(self, mode: str = "auto", **changed: Any) -> dict[str, Any]:
        return measure(self.options(mode, **changed))

    def unit(self, name: str, text: str) -> None:
        path = self.root / "etc/systemd/system" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def keep(self, result: dict[str, Any]) -> None:
        self.verdict.write_text(json.dumps(result["record"]))


@pytest.fixture
def spark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Spark:
    monkeypatch.setenv("VIRTUAL_PAIR_GPU", str(tmp_path))
    return Spark(tmp_path)


@pytest.mark.parametrize(
    ("scenario", "state", "words"),
    [
        ("healthy", "ok", "80 TFLOP/s, 228 GB/s"),
        ("latched", "latched", "513 MHz"),
        ("latched-799", "latched", "799 MHz and 19.5 W"),
        ("thermal", "thermal", "software thermal, hardware thermal"),
        ("power-brake", "power_brake", "hardware power brake"),
        ("slow-memory", "slow_memory", "72 GB/s"),
        ("model-resident", "inconclusive", "0 of"),
        ("engine-stuck", "engine_stuck", "busy without drawing power"),
        ("no-driver", "no_gpu", "couldn't communicate"),
        ("garbage", "inconclusive", "not the format"),
    ],
)
def test_each_scenario_gets_its_verdict(spark: Spark, scenario: str, state: str, words: str) -> None:
    spark.lock()
    spark.is_in(scenario)
    result = spark.look()
    assert result["state"] == state, result["reason"]
    assert words in result["reason"] + str(result["evidence"]["gb_s"])
    # Our own load is declared as what it is here.
    assert result["load"].get("stand_in") in (True, None)


def test_a_hung_driver_costs_one_time_out(spark: Spark) -> None:
    spark.is_in("hang")
    begin = time.monotonic()
    result = spark.look(smi=Smi(str(STANDINS / "nvidia-smi"), 0.5))
    assert time.monotonic() - begin < 5
    assert (result["state"], result["problem_kind"]) == ("inconclusive", "hang")
    assert "0.5 s" in result["reason"]


def test_a_foreign_lock_explains_a_low_clock_and_its_absence_does_not(spark: Spark) -> None:
    spark.lock()
    spark.is_in("foreign-lock")
    spark.unit("gpu-clock-lock.service", "[Service]\nExecStart=/usr/bin/nvidia-smi -lgc 300,800\n")
    result = spark.look()
    assert result["state"] == "capped_by_lock"
    assert "gpu-clock-lock.service, 800 MHz" in result["reason"]
    (spark.root / "etc/systemd/system/gpu-clock-lock.service").unlink()
    assert spark.look()["state"] == "latched"


def test_a_lost_lock_shows_in_the_clock_even_at_idle(spark: Spark) -> None:
    spark.lock()
    time.sleep(0.01)
    spark.is_in("lost-lock")
    result = spark.look()
    assert (result["state"], result["lock"]) == ("inconclusive", "exceeded")
    gate = judge(result | {"this_boot_ok": True})
    assert not gate["passed"] and "above the 2200 MHz" in gate["message"]


@pytest.mark.parametrize("mode", ["auto", "load"])
def test_never_a_load_beside_a_model(spark: Spark, mode: str) -> None:
    spark.is_in("model-resident")
    # A load would leave its mark for nvidia-smi.
    result = spark.look(mode, load_command=["/bin/sh", "-c", f"touch {spark.root}/loaded; sleep 5"])
    assert (result["mode"], result["load"]) == ("passive", {})
    assert not (spark.root / "loaded").exists()
    assert result["compute_apps"][0]["memory_mib"] == 65536


def test_a_busy_gpu_whose_programs_are_hidden_is_not_loaded_either(spark: Spark) -> None:
    spark.is_in("engine-stuck")
    program = spark.root / "smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in *compute-apps*) exit 0;; *) exec {STANDINS}/nvidia-smi "$@";; esac\n')
    program.chmod(0o755)
    assert spark.look(smi=Smi(str(program)))["mode"] == "passive"


def test_a_look_takes_no_sample_and_makes_no_load(spark: Spark) -> None:
    result = spark.look("look", load_command=["/bin/false"])
    assert (result["state"], result["reason"], result["samples"], result["record"]) == (
        "inconclusive",
        "not measured",
        [],
        {},
    )
    assert result["gpu"]["name"] == "NVIDIA GB10"


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["/nonexistent/load"], "can not be started"),
        (["/bin/sh", "-c", "echo no cuda; exit 1"], "no cuda"),
        (["/bin/sh", "-c", "exit 1"], "ended early"),
        (
            ["/bin/sh", "-c", """echo '{"state": "inconclusive", "reason": "found no libcublas.so.13"}'"""],
            "found no libcublas.so.13",
        ),
    ],
)
def test_no_load_is_inconclusive_and_says_why(spark: Spark, command: Sequence[str], words: str) -> None:
    result = spark.look(load_command=command)
    assert result["state"] == "inconclusive"
    assert words in result["reason"]


def test_the_built_in_load_says_what_is_missing_here(spark: Spark) -> None:
    """Runs as it does on a node; this machine has neither driver nor cuBLAS."""
    try:
        power_load.open_library(("libcuda.so.1",), (), "the NVIDIA driver")
        pytest.skip("this machine has an NVIDIA driver, so nothing is missing")
    except power_load.LoadError:
        pass
    load = Load(spark.options(load_command=[]))
    answer = load.answer(60)
    load.end()
    assert answer["state"] == "inconclusive"
    assert "libcuda.so.1" in answer["reason"] and "required the NVIDIA driver" in answer["reason"]


def test_a_load_that_hangs_is_ended(spark: Spark, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(power_sampling, "LOAD_START_SECONDS", 0.5)
    result = spark.look(load_command=["/bin/sh", "-c", "sleep 600"])
    assert "no answer in 0.5 s" in result["reason"]


def test_an_old_driver_names_the_mask_differently(spark: Spark) -> None:
    program = spark.root / "smi"
    program.write_text(
        f"#!{sys.executable}\nimport subprocess, sys\nwords = ' '.join(sys.argv[1:])\n"
        "if 'event_reasons' in words:\n"
        "    print('Field \"clocks_event_reasons.active\" is not a valid field to query.'); sys.exit(2)\n"
        "words = words.replace('throttle_reasons', 'event_reasons')\n"
        f"sys.exit(subprocess.call(['{STANDINS}/nvidia-smi', *words.split()]))\n"
    )
    program.chmod(0o755)
    assert spark.look(smi=Smi(str(program)))["state"] == "ok"


# --- what was recorded ----------------------------------------------------------------------------------------------


def test_a_node_without_the_role_is_judged_and_nothing_is_left_there(spark: Spark) -> None:
    found = spark.look(verdict_file=spark.root / "var/lib/goodput/power/verdict.json")
    assert found["state"] == "ok" and found["record"] == {}


def test_a_young_ok_of_this_boot_is_not_measured_again(spark: Spark) -> None:
    spark.lock()
    first = spark.look()
    spark.keep(first)
    spark.is_in("latched")
    again = spark.look(reuse_seconds=600)
    assert (again["state"], again["measured"], again["record"]) == ("ok", False, {})
    assert "recorded earlier" in judge(again)["message"]
    assert spark.look(reuse_seconds=0)["state"] == "latched"
    # Another boot: what was recorded says nothing.
    (spark.root / "proc/sys/kernel/random/boot_id").write_text("boot-2")
    assert spark.look(reuse_seconds=600)["state"] == "latched"


def test_an_idle_model_passes_where_the_node_was_ok_in_this_boot(spark: Spark) -> None:
    spark.lock()
    spark.keep(spark.look())
    spark.is_in("model-resident")
    idle = spark.look()
    assert (idle["state"], idle["this_boot_ok"], judge(idle)["passed"]) == ("inconclusive", True, True)
    assert not judge(idle, strict=True)["passed"]
    # Recording the idle look keeps what the boot knows.
    spark.keep(idle)
    assert spark.look()["this_boot_ok"]
    # A latch seen since is no ok.
    spark.is_in("latched")
    spark.keep(spark.look())
    assert not judge(spark.look())["passed"]
    # Not even once the model idles again.
    spark.is_in("model-resident")
    assert not judge(spark.look())["passed"]


def test_the_gate() -> None:
    base: dict[str, Any] = {
        "reason": "why",
        "remedy": "do this",
        "applied_mhz": 2200.0,
        "lock": "unknown",
        "measured": True,
    }
    for state in ("latched", "thermal", "power_brake", "capped_by_lock", "slow_memory", "engine_stuck", "no_gpu"):
        gate = judge(base | {"state": state, "this_boot_ok": True})
        assert not gate["passed"]
        assert f"found {state}: why" in gate["message"] and "fix: do this" in gate["message"]
        assert judge(base | {"state": state}, [state])["passed"]
    assert judge(base | {"state": "ok"})["passed"]
    assert not judge(base | {"state": "ok", "lock": "exceeded"}, ["ok"])["passed"]
    assert "confirmed in this boot" in judge(base | {"state": "ok", "applied_mhz": None})["message"]
    # A lock that is missing or gone, too, hides neither the remedy nor itself.
    for lost in ({"applied_mhz": None}, {"lock": "exceeded"}):
        for accept in ([], ["latched"]):
            message = judge(base | {"state": "latched"} | lost, accept)["message"]
            assert "fix: do this; " in message and "run the role power" in message
    unclear = judge(base | {"state": "inconclusive", "unclean_boot": True})
    assert not unclear["passed"]
    assert "power_accept: [inconclusive]" in unclear["message"] and "without a shutdown" in unclear["message"]


# --- locks, rails, programs -----------------------------------------------------------------------------------------


def node(root: Path, states: dict[str, dict[str, str]] | None = None) -> Node:
    def run(command: list[str]) -> tuple[int, str]:
        blocks = [
            "\n".join(f"{key}={value}" for key, value in ({"Id": name} | (states or {}).get(name, {})).items())
            for name in command[4:]
        ]
        return 0, "\n\n".join(blocks)

    return Node(root, root / "proc", root / "sys", run)


def test_foreign_locks_with_their_values_and_what_stops_them(spark: Spark) -> None:
    spark.unit("gb10-clock-cap.service", "[Service]\nExecStart=nvidia-smi --lock-gpu-clocks=0,2000\n")
    spark.unit("mine.service", "[Service]\nExecStart=/opt/clock.sh\n")
    (spark.root / "opt").mkdir()
    (spark.root / "opt/clock.sh").write_text('nvidia-smi -i 0 -lgc "1500"\n')
    spark.unit("computed.service", "[Service]\nExecStart=/usr/bin/nvidia-smi -lgc $MIN,$MAX\n")
    spark.unit("off.service", "[Service]\nExecStart=nvidia-smi -lgc 1,2\n")
    spark.unit("timed.service", "[Service]\nExecStart=nvidia-smi -lgc 300,900\n")
    spark.unit("goodput-clocks.service", "[Service]\nExecStart=nvidia-smi -lgc 300,2200\n")
    (spark.root / "etc/systemd/system/nvidia-persistenced.service.d").mkdir()
    spark.unit("nvidia-persistenced.service.d/x.conf", "[Service]\nExecStartPost=nvidia-smi -lgc 300,800\n")
    (spark.root / "etc/rc.local").write_text("nvidia-smi -lgc 300,700\n")
    running = {"ActiveState": "active", "UnitFileState": "enabled"}
    states = {
        "gb10-clock-cap.service": running,
        "mine.service": running,
        "computed.service": {"ActiveState": "inactive", "UnitFileState": "enabled"},
        "off.service": {"ActiveState": "inactive", "UnitFileState": "disabled"},
        "timed.service": {"ActiveState": "inactive", "UnitFileState": "static", "TriggeredBy": "timed.timer"},
        "nvidia-persistenced.service": running,
    }
    found = {lock["name"]: lock for lock in foreign_locks(node(spark.root, states))}
    assert {name: lock["clock_mhz"] for name, lock in found.items()} == {
        "gb10-clock-cap.service": [0, 2000],
        "mine.service": [1500, 1500],
        "computed.service": None,
        "timed.service": [300, 900],
        "nvidia-persistenced.service": [300, 800],
        "/etc/rc.local": [300, 700],
    }
    assert found["timed.service"]["stop"] == ["timed.timer", "timed.service"]
    # A drop-in of a unit that does other work, and a boot script: only a person can.
    assert found["nvidia-persistenced.service"]["stop"] == found["/etc/rc.local"]["stop"] == []


def test_consent_to_replace_names_units(spark: Spark) -> None:
    locks: list[dict[str, Any]] = [
        {"name": "a.service", "path": "/etc/a", "reason": "r", "clock_mhz": [1, 2], "stop": ["a.timer", "a.service"]},
        {"name": "b.service", "path": "/etc/b", "reason": "r", "clock_mhz": None, "stop": ["b.service"]},
        {"name": "/etc/rc.local", "path": "/etc/rc.local", "reason": "r", "clock_mhz": None, "stop": []},
    ]
    answer = replacements(locks, ["a.service", "/etc/rc.local"])
    assert answer["stop"] == ["a.timer", "a.service"]
    assert len(answer["problems"]) == 2
    assert "power_replace_foreign: [b.service]" in answer["problems"][0]
    assert "by hand" in answer["problems"][1]


@pytest.mark.parametrize(
    ("text", "pair"),
    [
        ("nvidia-smi -lgc 300,2200", [300, 2200]),
        ("nvidia-smi --lock-gpu-clocks=2000", [2000, 2000]),
        ("nvidia-smi -lgc '0, 2100'", [0, 2100]),
        ("nvidia-smi -lgc $MIN,$MAX", None),
        ("nvidia-smi -lgc 300,800\nnvidia-smi -lgc 300,900", [300, 900]),
    ],
)
def test_values_of_locks(text: str, pair: list[int] | None) -> None:
    assert lock_value(text) == pair


def test_rails_are_found_by_label_on_whatever_number(tmp_path: Path) -> None:
    for index, (name, values) in enumerate(
        [("acpitz", {}), ("spbm", {"power11": ("pl1", "input", "20000000"), "power13": ("syspl1", "cap", "30000000")})]
    ):
        directory = tmp_path / f"class/hwmon/hwmon{index}"
        directory.mkdir(parents=True)
        (directory / "name").write_text(f"{name}\n")
        for channel, (label, kind, value) in values.items():
            (directory / f"{channel}_label").write_text(label)
            (directory / f"{channel}_{kind}").write_text(value)
    assert rails(tmp_path) == {"pl1": 20.0, "syspl1": 30.0}


def test_zones_governors_and_sleep_are_reported(spark: Spark) -> None:
    for index, text in enumerate(["96500", "-1"]):
        zone = spark.root / f"sys/class/thermal/thermal_zone{index}"
        zone.mkdir(parents=True)
        (zone / "temp").write_text(text)
    policy = spark.root / "sys/devices/system/cpu/cpufreq/policy0"
    policy.mkdir(parents=True)
    (policy / "scaling_governor").write_text("performance\n")
    result = spark.look()
    assert (result["zones_c"], result["silent_zones"]) == ({"thermal_zone0": 96.5}, ["thermal_zone1"])
    assert (result["governors"], result["sleep_targets_masked"]["sleep.target"]) == (["performance"], False)
    assert (result["state"], result["as_root"]) == ("thermal", os.geteuid() == 0)


def test_a_program_name_may_hold_commas(spark: Spark) -> None:
    program = spark.root / "smi"
    program.write_text("#!/bin/sh\necho '7, python3 a, b, [N/A]'\n")
    program.chmod(0o755)
    assert power_sampling.compute_apps(Smi(str(program))) == [{"pid": "7", "name": "python3 a, b", "memory_mib": None}]


# --- the program ----------------------------------------------------------------------------------------------------


def test_the_program_streams_samples_and_ends_with_the_result(spark: Spark) -> None:
    command = [sys.executable, "-m", power_sampling.__name__, "--stream", "--mode", "passive", "--seconds", "1.5"]
    command += ["--interval-ms", "200", "--smi", str(STANDINS / "nvidia-smi")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "collections")}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=env)
    *lines, last = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(lines) >= 2 and all(line["sample"]["sm_mhz"] == 208 for line in lines)
    assert last["result"]["state"] == "inconclusive"
    assert len(last["result"]["samples"]) == len(lines)
