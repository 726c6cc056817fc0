"""``goodput plan`` as a person runs it: exit codes, one-line errors, what is on the screen."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
import typer
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from typer.testing import CliRunner, Result

from goodput import plan_view
from goodput.plan_cli import plan_app

PAIR = ["--memory", "119.7", "--memory", "121.7"]
PAGE = (files.ROOT / "docs/planner.md").read_text()
#: Output pasted into the page; a line of three dots stands for what was left out.
PASTED = re.findall(r"^```\n\$ goodput plan ([^\n]*)\n(.*?)^```$", PAGE, re.M | re.S)


def run(*words: str) -> Result:
    app = typer.Typer()
    app.add_typer(plan_app, name="plan")
    app.command("other")(lambda: None)
    return CliRunner().invoke(app, ["plan", *words])


def test_a_plan_that_fits() -> None:
    result = run("super-recommended", *PAIR)
    assert result.exit_code == 0
    for text in (
        "fits",
        "K device KV",
        "--l1-size-gb 9.25",
        "130,674,379,980",
        "103,809,024",
        "--max-num-batched-tokens 8447",
    ):
        assert text in result.output
    assert run("show", "super-recommended", *PAIR).output == result.output


def test_a_refused_plan() -> None:
    result = run("super-kv16-l14", *PAIR)
    assert result.exit_code == 1
    assert "refused KV006" in result.output
    accepted = run("super-kv16-l14", *PAIR, "--accept", "KV005", "--accept", "KV006")
    assert accepted.exit_code == 0
    assert "accepted KV006" in accepted.output


@pytest.mark.parametrize(
    "words",
    [
        ["no-such-profile"],
        ["super-recommended", "--memory", "0"],
        ["super-recommended", "--memory", "nan"],
        ["super-recommended", "--memory", "8GB"],
        ["super-recommended", "--model", "/nowhere"],
        ["super-recommended", "--set", "lmcache.l1.size_gib=8GB"],
        ["super-recommended", "--set", "nonsense"],
        ["super-recommended", "--set", "a=[1"],
        ["super-recommended", "--accept", "KV999"],
        ["super-recommended", "--no-such-option"],
        ["explain", "KV999"],
        ["diff", "super-recommended", "nope"],
        ["search", "--model", "nope"],
        ["--json"],
    ],
)
def test_bad_input_exits_2_without_a_traceback(words: list[str]) -> None:
    result = run(*words)
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert isinstance(result.exception, SystemExit)


def test_set_and_json() -> None:
    result = run("super-kv12-l18", *PAIR, "--set", "lmcache.l1.size_gib=4", "--json")
    plan = json.loads(result.stdout)
    assert plan["sizes"]["l1_chunks"] == 41
    assert plan["sizes"]["restores_at_once_longest"] == 1


def test_matrix_of_all_profiles_and_models() -> None:
    result = run("--all", *PAIR, "--json")
    rows = json.loads(result.stdout)
    assert rows["super-c-p2p"]["super"] == "refused KV006"
    assert rows["super-c-p2p"]["nano"].startswith("fits")
    assert rows["super-recommended"]["super"] == "fits"
    assert set(rows["virtual"]) == {"nano", "super", "tiny"}
    assert "refused KV006" in run("--all", *PAIR).output


def test_diff_shows_what_changes() -> None:
    result = run("diff", "super-kv16-l14", "super-kv12-l18", *PAIR, "--json")
    changes = json.loads(result.stdout)
    assert ["--eviction-policy", "LRU", "noop"] in changes["lmcache server"]
    assert ["l1_chunks", "41", "82"] in changes["sizes"]
    assert ["--kv-cache-memory-bytes", "16000000000", "12000000000"] in changes["worker"]
    assert "16,000,000,000" in run("diff", "super-kv16-l14", "super-kv12-l18", *PAIR).output
    assert json.loads(run("diff", "super-a-router", "super-a-router", *PAIR, "--json").stdout) == {}


def test_explain_has_worked_numbers() -> None:
    result = run("explain", "kv004")
    assert result.exit_code == 0
    assert "31 chunks (3,218 MB)" in result.output
    assert "LMCache/LMCache#4529" in result.output


def test_search_ranks_by_prompts_and_states_the_objective() -> None:
    result = run("search", "--model", "super", *PAIR, "--top", "5", "--json")
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and len(found) == 5
    assert [item["prefixes"] for item in found] == sorted((item["prefixes"] for item in found), reverse=True)
    assert found[0]["policy"] == "L1 stages, L2"
    for item in found:
        assert item["prefixes"] == item["device_prefixes"] + item["lower_prefixes"]
        assert item["free_bytes"] >= 0
    text = run("search", "--model", "super", *PAIR).output
    assert "Speed is not predicted" in text
    assert run("search", "--model", "super", "--memory", "80").exit_code == 1


def test_model_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    assert run("super-recommended", "--model", str(tmp_path)).exit_code == 2


def test_bar_shows_each_part_in_proportion() -> None:
    lines = [{"name": "weights", "bytes": 50}, {"name": "L1", "bytes": 25}, {"name": "free", "bytes": 25}]
    assert plan_view.bar(lines, 100, 8).plain == "WWWW11.."
    over = [{"name": "weights", "bytes": 100}, {"name": "L1", "bytes": 100}, {"name": "free", "bytes": -100}]
    assert plan_view.bar(over, 100, 8).plain == "WWWW1111"


def lines(text: str) -> list[str]:
    return "\n".join(line.rstrip() for line in text.splitlines()).strip("\n").split("\n")


@pytest.mark.parametrize(("words", "pasted"), PASTED, ids=[words for words, _ in PASTED])
def test_the_page_shows_what_the_command_prints_now(words: str, pasted: str) -> None:
    printed, shown = lines(run(*shlex.split(words)).output), lines(pasted)
    if shown[0] != "...":
        assert printed == shown, f"paste `goodput plan {words}` into docs/planner.md anew"
        return
    part = shown[1:-1]
    assert shown[-1] == "..." and printed[printed.index(part[0]) :][: len(part)] == part, f"paste `{words}` anew"


def test_the_page_pastes_a_plan_a_refusal_a_matrix_and_a_search_and_names_every_profile() -> None:
    assert len(PASTED) == 4
    table = PAGE.partition("| profile | what |")[2].partition("\n\n")[0]
    assert sorted(re.findall(r"`([a-z0-9-]+)`", table)) == files.names_in(files.PROFILES)
