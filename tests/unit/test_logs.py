"""goodput logs: which unit is meant, and the journals of several nodes as one."""

from __future__ import annotations

import pytest

from goodput import logs

UNITS = ["goodput-worker.service", "goodput-lmcache.service", "goodput-clocks-reassert.timer", "goodput-etcd.service"]
SPARK1 = """-- Boot 1f2e --
2026-11-29T23:56:25.100000+0000 spark1 python3[11]: starting
2026-11-29T23:56:27.300000+0000 spark1 python3[11]: Traceback (most recent call last):
  File "x.py", line 1
ValueError: bad
-- cursor: s=abc;i=1
"""
SPARK2 = """2026-11-29T23:56:26.200000+0000 spark2 python3[12]: starting
2026-11-29T23:56:27.200000+0000 spark2 python3[12]: ready
"""


@pytest.mark.parametrize("name", ["worker", "goodput-worker", "goodput-worker.service", " worker "])
def test_a_unit_by_any_of_its_names(name: str) -> None:
    assert logs.resolve(name, UNITS) == "goodput-worker.service"


def test_other_kinds_of_units_keep_their_ending() -> None:
    assert logs.resolve("clocks-reassert.timer", UNITS) == "goodput-clocks-reassert.timer"


def test_a_typing_error_names_the_nearest() -> None:
    with pytest.raises(logs.UnknownUnit, match="found no unit 'wroker'; did you mean worker\\? units here: clocks-re"):
        logs.resolve("wroker", UNITS)
    with pytest.raises(logs.UnknownUnit, match="found no unit 'xyz'; units here"):
        logs.resolve("xyz", UNITS)
    with pytest.raises(logs.UnknownUnit, match="no goodput unit is installed"):
        logs.resolve("worker", [])


def test_entries_keep_their_lines_and_the_cursor_is_no_entry() -> None:
    entries, cursor = logs.split(SPARK1)
    assert cursor == "s=abc;i=1"
    assert [entry.splitlines()[-1] for entry in entries] == [
        "-- Boot 1f2e --",
        "2026-11-29T23:56:25.100000+0000 spark1 python3[11]: starting",
        "ValueError: bad",
    ]
    assert logs.split("") == ([], None)


def test_nodes_are_merged_by_time() -> None:
    rows = logs.merge({"spark1": logs.split(SPARK1)[0], "spark2": logs.split(SPARK2)[0]})
    assert [(node, entry.partition("]: ")[2].splitlines()[:1]) for node, entry in rows] == [
        # A boot mark stays before the first entry of that boot.
        ("spark1", []),
        ("spark1", ["starting"]),
        ("spark2", ["starting"]),
        ("spark2", ["ready"]),
        ("spark1", ["Traceback (most recent call last):"]),
    ]


def test_the_command_is_safe_and_goes_on_after_the_cursor() -> None:
    assert logs.command("u", lines=5, since="-10min; reboot").endswith("-n 5 --since '-10min; reboot'")
    assert "--after-cursor 's=abc;i=1'" in logs.command("u", lines=5, since="x", cursor="s=abc;i=1")
    assert "--since" not in logs.command("u", lines=5, since="x", cursor="s=abc;i=1")
