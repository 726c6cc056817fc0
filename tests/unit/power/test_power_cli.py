"""``goodput power`` as a person runs it: on this machine, with the stand-ins in place of a GPU."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.module_utils.power_verdict import Sample

from goodput import power_cli, power_plot

ROOT = Path(__file__).resolve().parents[3]
STANDINS = ROOT / "roles/virtual_pair/files/standins/bin"
DRIVER = """
import typer
from goodput import power_cli
app = typer.Typer(pretty_exceptions_enable=False)
app.command("power")(power_cli.power)
app.command("other")(lambda: None)
app()
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An inventory whose one node is this machine."""
    monkeypatch.setenv("VIRTUAL_PAIR_GPU", str(tmp_path))
    variables = {
        "ansible_connection": "local",
        "ansible_become": False,
        "power_smi": str(STANDINS / "nvidia-smi"),
        "power_smi_timeout_seconds": 2,
        "power_load_command": [str(STANDINS / "virtual-pair-gpu-load")],
        "power_busy_samples_min": 3,
        "power_memory_floor_gb_s": 60,
    }
    path = tmp_path / "hosts.yml"
    path.write_text(yaml.safe_dump({"sparks": {"vars": variables, "hosts": {"spark1": {}}}}))
    return path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT / 'collections'}"}
    command = [sys.executable, "-c", DRIVER, "power", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=ROOT)


def scenario(site: Path, name: str) -> None:
    (site.parent / "gpu-scenario").write_text(name)


def test_a_healthy_node(site: Path) -> None:
    # The inventory's thresholds reach the node: 72 GB/s would else be the slow state.
    scenario(site, "slow-memory")
    done = run("-i", str(site), "--seconds", "10")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "spark1   ok" in done.stdout
    assert "72 GB/s" in done.stdout
    assert "stand-in" in done.stdout


def test_a_latched_node_with_the_steps_for_a_person(site: Path) -> None:
    scenario(site, "latched")
    done = run("-i", str(site), "--seconds", "10")
    text = " ".join(done.stdout.split())
    assert done.returncode == 1
    for words in ("latched", "513 MHz", "wall AND from the Spark", "wait 60 s"):
        assert words in text, text


@pytest.mark.parametrize(("name", "state", "code"), [("hang", "inconclusive", 2), ("no-driver", "no_gpu", 1)])
def test_json_is_one_object_and_nothing_else(site: Path, name: str, state: str, code: int) -> None:
    scenario(site, name)
    done = run("-i", str(site), "--json", "--seconds", "10")
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["exit"], answer["nodes"]["spark1"]["state"]) == (code, code, state)


def test_a_node_that_can_not_be_reached(tmp_path: Path) -> None:
    path = tmp_path / "hosts.yml"
    node = {"ansible_host": "127.0.0.1", "ansible_port": 1, "ansible_user": "nobody"}
    path.write_text(yaml.safe_dump({"sparks": {"hosts": {"spark1": node}}}))
    done = run("-i", str(path), "--seconds", "10")
    assert done.returncode == 2
    assert "unreachable" in done.stdout and "ansible -m ping spark1" in done.stdout
    assert "Traceback" not in done.stdout + done.stderr


def test_no_inventory_and_a_wrong_mode(site: Path) -> None:
    assert run("-i", str(site.parent / "none.yml")).returncode == 2
    done = run("-i", str(site), "--mode", "gentle")
    assert (done.returncode, "required auto, passive or load" in done.stderr) == (2, True)


def test_watching_writes_a_table_and_a_drawing(site: Path, tmp_path: Path) -> None:
    scenario(site, "engine-stuck")
    done = run("-i", str(site), "--watch", "10", "--output", str(tmp_path / "out"))
    assert done.returncode == 1, done.stdout + done.stderr
    rows = list(csv.DictReader((tmp_path / "out/samples.csv").open()))
    assert len(rows) >= 5
    assert {(row["node"], row["sm_mhz"]) for row in rows} == {("spark1", "2190.0")}
    page = (tmp_path / "out/plot.html").read_text()
    assert "engine_stuck" in page and "SM clock in MHz" in page and "spark1" in page


def test_the_program_that_is_sent_runs_from_its_zip_alone(tmp_path: Path) -> None:
    data = power_cli.bundle()
    path = tmp_path / "power.pyz"
    path.write_bytes(data)
    assert len(zipfile.ZipFile(io.BytesIO(data)).namelist()) == len(power_cli.MODULES) + 1 + 5
    # -I: nothing of this repository or of Ansible is in reach. The load's source comes out of the zip, too.
    command = [sys.executable, "-IS", str(path), "--mode", "load", "--smi", str(STANDINS / "nvidia-smi")]
    env = {**os.environ, "VIRTUAL_PAIR_GPU": str(tmp_path)}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/", env=env)
    answer = json.loads(done.stdout)
    assert answer["mode"] == "load", done.stderr
    assert "libcuda" in answer["reason"] or answer["load"]["state"] == "done"


@pytest.mark.parametrize(
    ("results", "code"),
    [
        ([{"state": "ok"}, {"state": "ok"}], 0),
        ([{"state": "ok"}, {"state": "latched"}], 1),
        ([{"state": "inconclusive"}, {"state": "latched"}], 1),
        ([{"state": "ok"}, {"state": "inconclusive"}], 2),
        ([{"state": "ok"}, {"state": "unreachable"}], 2),
        ([{"state": "ok", "lock": "exceeded"}], 1),
    ],
)
def test_exit_status(results: list[dict[str, Any]], code: int) -> None:
    assert power_cli.exit_code(results) == code


def test_the_password_is_for_sudo_only() -> None:
    script = power_cli.remote(["--mode", "auto"], 10, "python3", as_root=True, password=True)
    assert "sudo -S" in script and "head -c 10" in script
    assert "sudo" not in power_cli.remote([], 10, "python3", as_root=False, password=True)
    assert "sudo -S" not in power_cli.remote([], 10, "python3", as_root=True, password=False)


# --- the drawing ----------------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def drawn(samples: dict[str, list[Sample]], marks: dict[str, dict[str, float]]) -> ElementTree.Element:
    return ElementTree.fromstring(power_plot.drawing(samples, marks))


def test_every_reading_is_a_point_inside_its_panel() -> None:
    taken = [Sample(at / 2, 96.0, 513.0 + at, 13.0, soc_c=60.0) for at in range(20)]
    svg = drawn({"spark1": taken, "<spark2>": taken}, {"clock": {"lock": 2200.0}, "heat": {"too hot": 93.0}})
    lines = svg.findall(f"{SVG}polyline")
    assert len(lines) == 2 * 4
    for line in lines:
        points = [tuple(map(float, point.split(","))) for point in line.attrib["points"].split()]
        assert len(points) == 20
        assert all(power_plot.LEFT <= x <= power_plot.WIDTH - power_plot.RIGHT + 0.1 for x, _y in points)
        assert all(0 < y < float(svg.attrib["height"]) for _x, y in points)
    words = [text.text for text in svg.findall(f"{SVG}text")]
    assert {"lock 2200", "too hot 93", "<spark2>", "hottest thermal zone in °C"} <= set(words)


def test_no_reading_is_said_and_not_drawn_as_zero() -> None:
    svg = drawn({"spark1": [Sample(0.0, None, None, None)]}, {})
    assert svg.findall(f"{SVG}polyline") == []
    assert sum("no reading" in str(text.text) for text in svg.findall(f"{SVG}text")) == 4
    assert drawn({}, {}) is not None


@pytest.mark.parametrize(("low", "high"), [(0, 3003), (0, 0.3), (0, 96), (0, 600), (0, 7)])
def test_axis_values_are_round_few_and_cover_the_range(low: float, high: float) -> None:
    values = power_plot.steps(low, high)
    assert values[0] <= low and values[-1] >= high
    assert 3 <= len(values) <= 8
