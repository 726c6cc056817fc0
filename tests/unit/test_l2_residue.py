"""What is kept of an L2 directory when the server starts again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import l2_residue as l2

MIB = 2**20


def files(*sizes: int, kind: str = "m@0x1@0") -> list[l2.File]:
    """Objects of these sizes; the last is the newest."""
    return [l2.File(f"{kind}@{number:04x}.data", size, number) for number, size in enumerate(sizes)]


def test_an_empty_directory_is_cold_and_has_the_whole_cap() -> None:
    plan = l2.decide([], 2, "keep", 80)
    assert (plan.state, plan.capacity_gib, plan.kept_bytes) == ("cold", 2, 0)


def test_what_is_kept_comes_off_the_cap() -> None:
    plan = l2.decide(files(*[MIB] * 256), 2, "keep", 80)
    assert (plan.state, plan.kept_objects, plan.capacity_gib) == ("warm", 256, 1.75)


def test_together_they_never_pass_the_cap() -> None:
    for count in (1, 7, 500, 900, 3000):
        plan = l2.decide(files(*[MIB + 4096] * count), 1, "keep", 80)
        assert plan.kept_bytes + plan.capacity_gib * 2**30 <= 2**30
        assert plan.capacity_gib >= 0.199


def test_the_oldest_go_first() -> None:
    plan = l2.decide(files(*[MIB] * 1000), 1, "keep", 80)
    assert plan.kept_objects == 819
    assert plan.dropped == tuple(f"m@0x1@0@{number:04x}.data" for number in range(181))


def test_purge_keeps_nothing() -> None:
    plan = l2.decide(files(MIB, MIB), 1, "purge", 80)
    assert (plan.state, plan.capacity_gib, len(plan.dropped)) == ("cold", 1, 2)


def test_short_empty_and_temporary_files_go() -> None:
    left = [
        *files(MIB, MIB, MIB - 4096, 0),
        *files(4096, 4096, kind="m@0x1@1"),
        # As LMCache 0.5.6 names what it has not finished, and as another version might.
        l2.File("m@0x1@0@eeee.tmp", MIB, 9),
        l2.File("m@0x1@0@ffff.data.tmp", MIB, 9),
    ]
    names = ("m@0x1@0@0002.data", "m@0x1@0@0003.data", "m@0x1@0@eeee.tmp", "m@0x1@0@ffff.data.tmp")
    plan = l2.decide(left, 1, "keep", 80)
    assert plan.partial == names and plan.kept_objects == 4


def test_of_two_the_shorter_goes() -> None:
    assert l2.decide(files(MIB, MIB - 4096), 1, "keep", 80).partial == ("m@0x1@0@0001.data",)


def test_it_removes_reports_and_leaves_what_is_not_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    store.mkdir()
    out.mkdir()
    (store / "m@0x1@0@aa.data").write_bytes(b"x" * 8192)
    (store / "m@0x1@0@bb.data").write_bytes(b"x" * 4096)
    (store / "note.txt").write_text("somebody's")
    (store / "folder").mkdir()
    arguments = ["--path", str(store), "--capacity-gib", "1", "--output", str(out)]
    assert l2.main(arguments) == 0
    assert sorted(path.name for path in store.iterdir()) == ["folder", "m@0x1@0@aa.data", "note.txt"]
    assert (out / "l2.env").read_text() == "GOODPUT_L2_CAPACITY_GIB=0.999\n"
    assert json.loads((out / "l2.json").read_text())["partial"] == ["m@0x1@0@bb.data"]
    assert "removed unfinished m@0x1@0@bb.data" in capsys.readouterr().out
    assert l2.main(["--path", str(tmp_path / "none"), "--capacity-gib", "1", "--output", str(out)]) == 1
    assert "is it mounted" in capsys.readouterr().err
