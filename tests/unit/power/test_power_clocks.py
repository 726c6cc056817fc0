"""nvidia-smi with a time limit and the lock that is asserted with it, against the stand-in of the virtual pair."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import power_clocks as pc
from ansible_collections.goodput.spark.plugins.module_utils.power_clocks import Clocks, Smi, SmiError

ROOT = Path(__file__).resolve().parents[3]
STANDIN = ROOT / "roles/virtual_pair/files/standins/bin/nvidia-smi"
PROGRAM = ROOT / "plugins/module_utils/power_clocks.py"


class Gpu:
    """The stand-in in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def is_in(self, scenario: str) -> None:
        (self.folder / "gpu-scenario").write_text(scenario)

    @property
    def lock(self) -> str:
        path = self.folder / "gpu-lock"
        return path.read_text() if path.exists() else ""

    @property
    def calls(self) -> list[str]:
        path = self.folder / "nvidia-smi.log"
        return [line.split(" ", 1)[1].strip() for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gpu:
    monkeypatch.setenv("VIRTUAL_PAIR_GPU", str(tmp_path))
    return Gpu(tmp_path)


@pytest.fixture
def clocks(tmp_path: Path, gpu: Gpu) -> Clocks:
    """300,2000 on a node with its own /proc and /sys."""
    (tmp_path / "proc/sys/kernel/random").mkdir(parents=True)
    (tmp_path / "proc/sys/kernel/random/boot_id").write_text("boot-1\n")
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    return Clocks(
        300,
        2000,
        Smi(str(STANDIN), 5.0),
        state_file=tmp_path / "power/state.json",
        verdict_file=tmp_path / "power/verdict.json",
        textfile=tmp_path / "textfile/goodput-power.prom",
        proc_root=tmp_path / "proc",
        sysfs_root=tmp_path / "sys",
        log=lambda text: None,
    )


def boot(clocks: Clocks, name: str) -> None:
    (clocks.proc_root / "sys/kernel/random/boot_id").write_text(f"{name}\n")


# --- nvidia-smi -----------------------------------------------------------------------------------------------------


def failing(smi: Smi) -> SmiError:
    with pytest.raises(SmiError) as caught:
        smi.rows(("name", "clocks.sm"))
    return caught.value


@pytest.mark.parametrize(
    ("scenario", "kind", "words"),
    [
        ("no-driver", "no_driver", "couldn't communicate with the NVIDIA driver"),
        ("garbage", "format", "required 2 (name, clocks.sm)"),
        ("hang", "hang", "gave no answer in 0.5 s"),
    ],
)
def test_an_answer_that_is_none_is_named(gpu: Gpu, scenario: str, kind: str, words: str) -> None:
    gpu.is_in(scenario)
    error = failing(Smi(str(STANDIN), 0.5))
    assert (error.kind, words in str(error)) == (kind, True), error


def test_a_hang_ends_with_all_its_processes(tmp_path: Path) -> None:
    """A child that keeps the pipe open must not keep us waiting, either."""
    pids = tmp_path / "pids"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nsleep 600 &\necho $! $$ >{pids}\nwait\n")
    program.chmod(0o755)
    begin = time.monotonic()
    assert failing(Smi(str(program), 0.5)).kind == "hang"
    assert time.monotonic() - begin < 5
    time.sleep(0.2)
    # A zombie waits for its parent to look; it runs no more.
    states = [Path(f"/proc/{pid}/stat") for pid in pids.read_text().split()]
    assert [path.read_text().split()[2] for path in states if path.exists() and " Z " not in path.read_text()] == []


def test_no_program_and_no_permission(tmp_path: Path) -> None:
    assert failing(Smi(str(tmp_path / "absent"))).kind == "missing"
    plain = tmp_path / "plain"
    plain.write_text("no program")
    assert failing(Smi(str(plain))).kind == "missing"


def test_an_unknown_field_is_a_failure_with_the_drivers_words(gpu: Gpu) -> None:
    with pytest.raises(SmiError, match='Field "clocks.future" is not a valid field') as caught:
        Smi(str(STANDIN)).rows(("clocks.future",))
    assert caught.value.kind == "failed"


def test_a_stream_gives_lines_until_the_time_is_over(gpu: Gpu) -> None:
    read = list(Smi(str(STANDIN), 10.0).stream(("clocks.sm", "memory.used"), 100, 1.5))
    assert len(read) >= 2
    assert {tuple(cells) for _at, cells in read} == {("208", "[N/A]")}
    assert [at for at, _cells in read] == sorted(at for at, _cells in read)


def test_a_stream_that_falls_silent_is_a_hang(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '513, 13.0'\nexec sleep 600\n")
    program.chmod(0o755)
    read = []
    with pytest.raises(SmiError) as caught:
        for row in Smi(str(program), 0.5).stream(("clocks.sm", "power.draw"), 100, 60):
            read.append(row)
    assert (caught.value.kind, len(read)) == ("hang", 1)


def test_a_stream_that_ends_early_says_why(tmp_path: Path) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho '513, 13.0'\necho '514, 13.1'\nexit 7\n")
    program.chmod(0o755)
    with pytest.raises(SmiError, match="exit 7"):
        list(Smi(str(program), 5).stream(("clocks.sm", "power.draw"), 100, 60))


@pytest.mark.parametrize("text", ["[N/A]", "N/A", "[Not Supported]", "[Unknown Error]", ""])
def test_no_reading_is_none(text: str) -> None:
    assert pc.number(text, "clocks.sm") is None
    assert pc.mask(text, "clocks_event_reasons.active") is None


@pytest.mark.parametrize("text", ["2190 MHz", "2,190", "fast", "ERR!"])
def test_a_future_format_is_named_with_its_field(text: str) -> None:
    with pytest.raises(SmiError, match="clocks.sm") as caught:
        pc.number(text, "clocks.sm")
    assert repr(text) in str(caught.value)
    with pytest.raises(SmiError, match="mask"):
        pc.mask(text, "reasons")


def test_masks_are_hexadecimal() -> None:
    assert pc.mask("0x0000000000000060", "reasons") == 0x60


# --- pairs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        [2200, 300], [300, 3004], [-1, 2200], [0, 0], ["300", "2200"], [300], 2200, "300,2200", "fast", None,
        [300, 2200, 1], [True, 2200], [300.0, 2200],
    ],
)  # fmt: skip
def test_bad_pairs_name_value_rule_and_remedy(value: Any) -> None:
    problem = pc.pair_problem(value)
    assert json.dumps(value) in problem
    assert "0 to 3003" in problem
    assert "power_clock_mhz: [300, 2200]" in problem


@pytest.mark.parametrize("value", [[300, 2200], [0, 3003], [2000, 2000]])
def test_good_pairs(value: list[int]) -> None:
    assert pc.pair_problem(value) == ""


def test_two_nodes_with_different_pairs_are_refused_unless_said() -> None:
    pairs = {"spark1": [300, 2200], "spark2": [300, 2000]}
    (problem,) = pc.pair_problems(pairs, may_differ=False)
    assert "spark2 [300, 2000]" in problem and "power_pairs_may_differ" in problem
    assert pc.pair_problems(pairs, may_differ=True) == []
    assert pc.pair_problems({"a": [300, 2200], "b": (300, 2200)}, may_differ=False) == []


# --- the lock -------------------------------------------------------------------------------------------------------


def test_what_the_driver_said_is_recorded_not_what_was_asked(clocks: Clocks, gpu: Gpu) -> None:
    state = clocks.lock()
    assert (state["requested_mhz"], state["applied_mhz"]) == ([300, 2000], [300, 1976])
    assert state["gpu"] == "0000000F:01:00.0"
    assert json.loads(clocks.state_file.read_text()) == state
    assert gpu.lock == "300,1976"


def test_a_latched_machine_confirms_and_is_not_called_pinned(clocks: Clocks, gpu: Gpu) -> None:
    gpu.is_in("latched")
    clocks.lock()
    # Nothing in state or metrics claims more than what the driver said.
    assert "goodput_clock_applied_mhz" in pc.metrics([300, 2000], clocks.load(), {}, {})
    assert not re.search("pinned|in force|ok", clocks.state_file.read_text())


def test_an_answer_without_confirmation_is_refused(clocks: Clocks, tmp_path: Path) -> None:
    program = tmp_path / "smi"
    program.write_text(f'#!/bin/sh\ncase "$1" in -lgc) echo "All done.";; *) exec {STANDIN} "$@";; esac\n')
    program.chmod(0o755)
    clocks.smi = Smi(str(program))
    with pytest.raises(SmiError, match="All done"):
        clocks.lock()
    assert not clocks.state_file.exists()


def test_another_gpu_is_left_alone(clocks: Clocks, gpu: Gpu, tmp_path: Path) -> None:
    program = tmp_path / "smi"
    program.write_text(
        f'#!/bin/sh\ncase "$1" in -*lgc*) exec {STANDIN} "$@";; *) echo "NVIDIA H200, 580.1, 345";; esac\n'
    )
    program.chmod(0o755)
    clocks.smi = Smi(str(program))
    with pytest.raises(SmiError, match="H200.*power_force"):
        clocks.lock()
    assert gpu.calls == []
    clocks.force = True
    clocks.lock()
    assert gpu.calls == ["-lgc 300,2000"]


def test_several_gpus_are_refused(clocks: Clocks, gpu: Gpu, tmp_path: Path) -> None:
    program = tmp_path / "smi"
    program.write_text('#!/bin/sh\necho "NVIDIA GB10, 580.1, 208"\necho "NVIDIA GB10, 580.1, 208"\n')
    program.chmod(0o755)
    clocks.smi = Smi(str(program))
    with pytest.raises(SmiError, match="2 GPUs"):
        clocks.lock()


def test_no_sign_of_a_loss_asserts_without_counting(clocks: Clocks, gpu: Gpu) -> None:
    clocks.lock()
    assert clocks.reassert() == ""
    state = clocks.load()
    assert (state["asserts_total"], state.get("reasserts_total", 0)) == (2, 0)
    assert gpu.calls == ["-lgc 300,2000"] * 2


def test_a_lock_lost_by_a_reload_is_seen_asserted_and_counted(clocks: Clocks, gpu: Gpu) -> None:
    said: list[str] = []
    clocks.log = said.append
    clocks.lock()
    time.sleep(0.01)
    gpu.is_in("lost-lock")
    reason = clocks.reassert()
    assert "2405 MHz observed, above the 1976 MHz" in reason
    state = clocks.load()
    assert (state["reasserts_total"], state["events"][0]["reason"]) == (1, reason)
    assert "lock was lost" in said[-1]
    # It holds again.
    assert clocks.reassert() == ""
    assert clocks.load()["reasserts_total"] == 1


def test_a_driver_that_was_loaded_again_lost_the_lock_even_if_idle(clocks: Clocks, gpu: Gpu) -> None:
    clocks.lock()
    module = clocks.sysfs_root / "module/nvidia"
    module.rename(module.with_name("before"))
    module.mkdir()
    assert clocks.reassert() == "the driver was loaded again"


def test_release_frees_the_clocks_and_stops_the_timer_from_locking(clocks: Clocks, gpu: Gpu) -> None:
    clocks.lock()
    clocks.release()
    assert (gpu.calls[-1], gpu.lock) == ("-rgc", "")
    assert clocks.reassert() == ""
    assert gpu.lock == ""


def test_a_lock_that_failed_at_boot_is_asserted_by_the_timer(clocks: Clocks, gpu: Gpu) -> None:
    """The shutdown before it released the lock, which is no wish of this boot."""
    clocks.lock()
    clocks.release()
    boot(clocks, "boot-2")
    gpu.is_in("no-driver")
    with pytest.raises(SmiError):
        clocks.lock()
    gpu.is_in("healthy")
    assert clocks.reassert() == "not asserted in this boot"
    assert (gpu.lock, clocks.load()["unclean_boot"]) == ("300,1976", False)


def test_the_timer_locks_where_nothing_is_written_down(clocks: Clocks, gpu: Gpu) -> None:
    assert clocks.reassert() == "not asserted in this boot"
    assert gpu.lock == "300,1976"


STARTS_BADLY = """#!/bin/sh
echo call >>{calls}
[ "$(wc -l <{calls})" -gt 2 ] && exec {standin} "$@"
{bad}
"""


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ("exec sleep 600", "hang"),
        ("echo Unknown Error; exit 255", "failed"),
        ("echo No devices were found; exit 6", "no_driver"),
    ],
)
def test_the_lock_at_boot_tries_again_until_its_time_is_over(
    clocks: Clocks, gpu: Gpu, tmp_path: Path, bad: str, kind: str
) -> None:
    calls, program = tmp_path / "calls", tmp_path / "smi"
    program.write_text(STARTS_BADLY.format(calls=calls, standin=STANDIN, bad=bad))
    program.chmod(0o755)
    clocks.smi = Smi(str(program), 2.0)
    with pytest.raises(SmiError) as caught:
        clocks.lock()
    assert caught.value.kind == kind
    clocks.lock(60.0)
    assert gpu.lock == "300,1976"


def test_a_confirmation_that_hangs_is_asked_for_again(clocks: Clocks, gpu: Gpu, tmp_path: Path) -> None:
    """The driver answers questions and hangs at -lgc, once."""
    once, program = tmp_path / "once", tmp_path / "smi"
    program.write_text(
        f'#!/bin/sh\n[ "$1" = -lgc ] && [ ! -e {once} ] && touch {once} && exec sleep 600\nexec {STANDIN} "$@"\n'
    )
    program.chmod(0o755)
    clocks.smi = Smi(str(program), 2.0)
    clocks.lock(60.0)
    assert gpu.lock == "300,1976"


@pytest.mark.parametrize(("answer", "words"), [("NVIDIA H200, 580.1, 345", "power_force"), ("?", "not the format")])
def test_what_can_not_become_right_is_not_tried_again(
    clocks: Clocks, gpu: Gpu, tmp_path: Path, answer: str, words: str
) -> None:
    program = tmp_path / "smi"
    program.write_text(f'#!/bin/sh\necho "{answer}"\n')
    program.chmod(0o755)
    clocks.smi = Smi(str(program))
    begin = time.monotonic()
    with pytest.raises(SmiError, match=words):
        clocks.lock(60.0)
    assert time.monotonic() - begin < 30


def test_nothing_is_freed_that_was_never_locked(clocks: Clocks, gpu: Gpu) -> None:
    clocks.release()
    assert gpu.calls == []


@pytest.mark.parametrize(("orderly", "unclean"), [(True, False), (False, True)])
def test_an_unclean_boot_is_known(clocks: Clocks, gpu: Gpu, orderly: bool, unclean: bool) -> None:
    assert clocks.lock().get("unclean_boot") is None
    if orderly:
        clocks.release()
    boot(clocks, "boot-2")
    assert clocks.lock()["unclean_boot"] is unclean
    # A reload of the unit in the same boot does not forget it.
    assert clocks.lock()["unclean_boot"] is unclean


def test_a_stop_and_start_earlier_in_a_boot_is_no_shutdown(clocks: Clocks, gpu: Gpu) -> None:
    clocks.lock()
    clocks.release()
    clocks.lock()
    # The power fails.
    boot(clocks, "boot-2")
    assert clocks.lock()["unclean_boot"] is True


def test_a_hang_at_shutdown_does_not_make_the_boot_unclean(clocks: Clocks, gpu: Gpu) -> None:
    clocks.lock()
    gpu.is_in("hang")
    clocks.smi = Smi(str(STANDIN), 0.3)
    with pytest.raises(SmiError):
        clocks.release()
    gpu.is_in("healthy")
    clocks.smi = Smi(str(STANDIN))
    boot(clocks, "boot-2")
    assert clocks.lock()["unclean_boot"] is False


def test_a_damaged_state_file_is_no_obstacle(clocks: Clocks, gpu: Gpu) -> None:
    clocks.state_file.parent.mkdir()
    clocks.state_file.write_text("{half")
    assert clocks.lock()["asserts_total"] == 1


# --- temperatures and metrics ---------------------------------------------------------------------------------------


def test_a_zone_that_reads_minus_one_is_named_and_not_counted(tmp_path: Path) -> None:
    for index, text in enumerate(["61500", "-1", "", "96000", "nonsense"]):
        zone = tmp_path / f"class/thermal/thermal_zone{index}"
        zone.mkdir(parents=True)
        (zone / "temp").write_text(text)
    (tmp_path / "class/thermal/thermal_zone10").mkdir()
    zones, silent = pc.thermal_zones(tmp_path)
    assert zones == {"thermal_zone0": 61.5, "thermal_zone3": 96.0}
    assert silent == ["thermal_zone1", "thermal_zone2", "thermal_zone4", "thermal_zone10"]


def test_metrics_say_what_is_known_and_nothing_else(clocks: Clocks, gpu: Gpu) -> None:
    clocks.lock()
    clocks.publish()
    assert clocks.textfile is not None
    text = clocks.textfile.read_text()
    assert 'goodput_clock_configured_mhz{bound="max"} 2000' in text
    assert 'goodput_clock_applied_mhz{bound="max"} 1976' in text
    assert "goodput_clock_reasserts_total 0" in text
    assert "verdict" not in text and "celsius" not in text
    clocks.verdict_file.write_text(json.dumps({"state": "latched", "at_seconds": 1795994409.2}))
    zone = clocks.sysfs_root / "class/thermal/thermal_zone0"
    zone.mkdir(parents=True)
    (zone / "temp").write_text("96000")
    clocks.release()
    clocks.publish()
    text = clocks.textfile.read_text()
    assert 'goodput_power_verdict_info{state="latched"} 1' in text
    assert "goodput_power_verdict_time_seconds 1795994409" in text
    assert "goodput_soc_temperature_max_celsius 96" in text
    # Free clocks have no applied pair.
    assert "applied" not in text
    assert clocks.textfile.stat().st_mode & 0o777 == 0o644
    # The collector rejects a file with a timestamp: two words a line.
    assert {len(line.rsplit("}", 1)[-1].split()) for line in text.splitlines() if line[0] != "#"} <= {1, 2}
    assert sorted(path.name for path in clocks.textfile.parent.iterdir()) == ["goodput-power.prom"]


# --- the program ----------------------------------------------------------------------------------------------------


def program(gpu: Gpu, *words: str) -> subprocess.CompletedProcess[str]:
    """As systemd starts it: isolated, from a copy, with nothing of this repository in reach."""
    copy = gpu.folder / "copy.py"
    copy.write_text(PROGRAM.read_text())
    command = [sys.executable, "-I", str(copy), *words, "--smi", str(STANDIN), "--smi-timeout", "5"]
    command += ["--state", str(gpu.folder / "s.json"), "--textfile", str(gpu.folder / "t.prom")]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=os.environ.copy())


def test_the_program_alone_locks_reasserts_and_releases(gpu: Gpu) -> None:
    done = program(gpu, "lock", "--min", "300", "--max", "2000")
    assert (done.returncode, done.stderr) == (0, ""), done
    assert "took 300,1976" in done.stdout
    assert program(gpu, "reassert", "--min", "300", "--max", "2000").returncode == 0
    assert program(gpu, "release").returncode == 0
    assert gpu.calls == ["-lgc 300,2000", "-lgc 300,2000", "-rgc"]
    assert "goodput_clock_asserts_total 2" in (gpu.folder / "t.prom").read_text()


@pytest.mark.parametrize(
    ("scenario", "words", "said"),
    [
        ("healthy", ["--min", "2200", "--max", "300"], "found power_clock_mhz [2200, 300]"),
        ("no-driver", [], "couldn't communicate"),
        ("garbage", [], "not the format"),
    ],
)
def test_the_program_fails_in_one_line(gpu: Gpu, scenario: str, words: list[str], said: str) -> None:
    gpu.is_in(scenario)
    done = program(gpu, "lock", *words)
    assert (done.returncode, len(done.stderr.splitlines())) == (1, 1), done
    assert said in done.stderr
    assert gpu.calls == []


def test_systemd_takes_the_unit_and_starts_it_again_when_it_failed(tmp_path: Path) -> None:
    text = (ROOT / "roles/power/templates/goodput-clocks.service.j2").read_text()
    unit = tmp_path / "goodput-clocks.service"
    unit.write_text(re.sub(r"\{\{.*?\}\}", "other.service", text.split("\n", 1)[1]))
    settings = dict(line.split("=", 1) for line in unit.read_text().splitlines() if "=" in line)
    assert (settings["Type"], settings["Restart"], settings["RestartSec"]) == ("oneshot", "on-failure", "10")
    if shutil.which("systemd-analyze") is None:
        pytest.skip("no systemd-analyze on this machine")
    done = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert "goodput-clocks.service" not in done.stderr, done.stderr


def test_the_stand_in_says_that_it_is_one() -> None:
    done = subprocess.run([STANDIN, "--version"], capture_output=True, text=True, check=True)
    assert "STAND-IN" in done.stdout
