"""The rules by which rows become a verdict, and its table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from goodput.verdict import Row, Verdict, judge, layer_of, short_text, to_text

GOOD = Row("spark1", "rdma", "MTU is 9000", True, "9000", "9000", "set mtu")
BAD = Row("spark2", "rdma", "MTU is 9000", False, "1500", "9000", "set mtu", journal={"x on spark2": ["line"]})
SKIP = Row("spark1", "rdma", "Peer answers", True, skipped="only one node")


def test_all_ok_is_exit_0() -> None:
    verdict = judge([GOOD, SKIP], pytest_exit=0, present=["rdma"])
    assert (verdict.ok, verdict.exit_code) == (True, 0)


def test_one_failed_check_is_exit_1() -> None:
    verdict = judge([GOOD, BAD], pytest_exit=1, present=["rdma"])
    assert (verdict.ok, verdict.exit_code) == (False, 1)


def test_a_failed_row_counts_even_if_pytest_is_content() -> None:
    assert judge([GOOD, BAD], pytest_exit=0).exit_code == 1


def test_a_pytest_failure_without_a_row_is_not_ok() -> None:
    verdict = judge([GOOD], pytest_exit=1)
    assert verdict.exit_code == 1
    assert verdict.reason


def test_no_rows_is_exit_1_and_says_so() -> None:
    verdict = judge([], pytest_exit=5)
    assert (verdict.exit_code, verdict.reason) == (1, "no checks ran")


def test_only_skips_prove_nothing() -> None:
    assert judge([SKIP], pytest_exit=0).exit_code == 1


def test_a_layer_whose_file_has_no_check_fails() -> None:
    verdict = judge([GOOD], pytest_exit=0, present=["rdma", "nvme_l2"])
    assert verdict.exit_code == 1
    assert [(f["layer"], f["found"]) for f in verdict.to_dict()["failures"]] == [
        ("nvme_l2", "no checks were collected")
    ]


def test_an_asked_layer_that_only_skips_fails() -> None:
    other = Row("spark1", "host", "Swappiness", True)
    verdict = judge([SKIP, other], pytest_exit=0, present=["rdma", "host"], asked=["rdma"])
    assert verdict.exit_code == 1
    assert verdict.to_dict()["failures"][0]["found"] == "no checks ran"


def test_a_broken_run_is_exit_2_whatever_the_rows_say() -> None:
    verdict = judge([GOOD], pytest_exit=2, reason="spark2 unreachable")
    assert (verdict.exit_code, verdict.reason) == (2, "spark2 unreachable")


def test_contract_of_the_json() -> None:
    data = judge([GOOD, BAD, SKIP], pytest_exit=1, present=["rdma"]).to_dict()
    assert data["ok"] is False
    assert data["nodes"]["spark1"]["rdma"] == [
        {"check": "MTU is 9000", "ok": True, "found": "9000", "required": "9000", "remedy": "set mtu"}
    ]
    assert data["failures"] == [
        {
            "node": "spark2",
            "layer": "rdma",
            "check": "MTU is 9000",
            "found": "1500",
            "required": "9000",
            "remedy": "set mtu",
            "journal": {"x on spark2": ["line"]},
        }
    ]
    assert data["skipped"][0]["reason"] == "only one node"
    assert data["generated"].endswith("+00:00")


def test_json_round_trip_keeps_rows_and_journals(tmp_path: Path) -> None:
    verdict = judge([GOOD, BAD, SKIP], pytest_exit=1, present=["rdma"], seconds=3.0)
    verdict.write(tmp_path / "deep/verdict.json")
    again = Verdict.from_dict(json.loads((tmp_path / "deep/verdict.json").read_text()))
    assert set(map(repr, again.rows)) == set(map(repr, verdict.rows))
    assert again.to_dict() == verdict.to_dict()


def test_table_shows_cause_remedy_journal_and_skip_reason() -> None:
    text = to_text(judge([GOOD, BAD, SKIP], pytest_exit=1, present=["rdma"]))
    for part in ("1 of 1 FAILED", "found    1500", "required 9000", "remedy   set mtu", "line", "only one node"):
        assert part in text
    assert "NOT OK: 1 of 2 checks failed" in text


def test_short_text_is_two_lines_a_failure() -> None:
    text = short_text(judge([GOOD, BAD], pytest_exit=1, present=["rdma"]))
    assert text.splitlines() == [
        "spark2 rdma: MTU is 9000: found 1500, required 9000",
        "  remedy: set mtu",
    ]


def test_layer_comes_from_the_file_name() -> None:
    assert [layer_of(Path(name)) for name in ("test_30_nvme_l2.py", "test_host.py")] == ["nvme_l2", "host"]


def test_failures_that_are_alike_are_one_block_and_a_journal_is_shown_once() -> None:
    other = replace(BAD, check="DF ping", found="lost")
    twin = replace(BAD, node="spark1", journal={"x on spark1": ["other line"]})
    text = to_text(judge([BAD, twin, other], pytest_exit=1))
    assert "FAILED  spark2, spark1  rdma  MTU is 9000" in text
    assert (text.count("journal of x on spark2"), text.count("journal of x on spark1")) == (1, 1)
    assert text.count("found    1500") == 1


def test_a_long_value_is_cut_in_the_table_only() -> None:
    verdict = judge([replace(BAD, found="y" * 5000)], pytest_exit=1)
    assert to_text(verdict).count("y") < 500
    assert len(verdict.to_dict()["failures"][0]["found"]) == 5000
