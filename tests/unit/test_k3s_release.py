"""Versions that may follow each other, and files that are taken only whole and with their sha256."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.module_utils import k3s_release as r

VERSION = "v1.36.4+k3s1"
ROOT = Path(__file__).resolve().parents[2]


def program(machine: int) -> bytes:
    return b"\x7fELF" + bytes(14) + struct.pack("<H", machine) + b"the rest"


ARM, X86 = program(183), program(62)
IMAGES = r.ZSTD_MAGIC + b"images"


def sums(binary: bytes = ARM, images: bytes = IMAGES) -> dict[str, Any]:
    digest = {"binary": hashlib.sha256(binary).hexdigest(), "images": hashlib.sha256(images).hexdigest()}
    return {"arm64": digest, "amd64": {"binary": hashlib.sha256(X86).hexdigest(), "images": "0" * 64}}


def asset(kind: str = "binary", **changes: Any) -> r.Asset:
    found = r.assets(VERSION, ["aarch64"], sums(**changes), "https://example.invalid/releases/")
    return next(one for one in found if one.kind == kind)


@pytest.mark.parametrize("text", ["1.36.4+k3s1", "v1.36.4", "v1.36+k3s1", "stable", "", "v1.36.4+k3s1 "])
def test_only_a_full_version_is_one(text: str) -> None:
    with pytest.raises(r.K3sError, match="full version such as v1.32.0"):
        r.parse(text)


def test_versions_are_ordered_by_number() -> None:
    assert r.parse("v1.9.9+k3s1") < r.parse("v1.36.4+k3s1") < r.parse("v1.36.10+k3s1")
    assert (
        r.version_of_output("k3s version v1.37.2+standin (upstream Kubernetes parts; not K3s)\n") == "v1.37.2+standin"
    )
    assert r.version_of_output("bash: k3s: not found") == ""


@pytest.mark.parametrize(
    ("installed", "wanted", "words"),
    [
        ("v1.36.4+k3s1", "v1.36.4+k3s1", ""),
        ("v1.36.4+k3s1", "v1.37.0+k3s1", ""),
        ("v1.36.4+k3s1", "v1.36.3+k3s1", "v1.36.4+k3s1 or newer"),
        ("v1.37.0+k3s1", "v1.36.4+k3s1", "v1.37.0+k3s1 or newer"),
        ("v1.34.1+k3s1", "v1.36.4+k3s1", "at most 1.35 after v1.34.1+k3s1"),
    ],
)
def test_no_way_back_and_no_minor_left_out(installed: str, wanted: str, words: str) -> None:
    problem = r.step_problem(r.parse(installed), r.parse(wanted))
    assert (words in problem) if words else problem == ""


@pytest.mark.parametrize(
    ("agent", "words"),
    [
        ("v1.36.9+k3s1", ""),
        ("v1.33.0+k3s1", ""),
        ("v1.37.0+k3s1", "1.36 at most"),
        ("v1.32.0+k3s1", "1.33 or newer: at most 3"),
    ],
)
def test_skew_between_agent_and_server(agent: str, words: str) -> None:
    problem = r.skew_problem(r.parse(agent), r.parse("v1.36.4+k3s1"))
    assert (words in problem) if words else problem == ""


def test_floor() -> None:
    assert "1.32 or newer" in r.floor_problem(r.parse("v1.31.9+k3s1"))
    assert r.floor_problem(r.parse("v1.32.0+k3s1")) == ""


def test_assets_are_named_as_in_the_release() -> None:
    found = r.assets(VERSION, ["x86_64", "aarch64", "x86_64"], sums(), "https://example.invalid/d")
    assert [one.name for one in found] == [
        "k3s-arm64",
        "k3s-airgap-images-arm64.tar.zst",
        "k3s",
        "k3s-airgap-images-amd64.tar.zst",
    ]
    assert found[0].url == "https://example.invalid/d/v1.36.4%2Bk3s1/k3s-arm64"


def test_a_checksum_that_nobody_gave_is_refused() -> None:
    with pytest.raises(r.K3sError, match=r"set k3s_checksums.arm64.images from the release's sha256sum-arm64.txt"):
        r.assets(VERSION, ["aarch64"], {"arm64": {"binary": "a" * 64}}, "https://example.invalid")
    with pytest.raises(r.K3sError, match="found machine type riscv64"):
        r.assets(VERSION, ["riscv64"], sums(), "https://example.invalid")


def test_every_release_set_names_a_version_and_checksums_for_a_spark() -> None:
    for path in sorted((ROOT / "vars/releases").glob("*.yml")):
        k3s = yaml.safe_load(path.read_text())["goodput_release_set"].get("k3s")
        if k3s is not None:
            assert r.floor_problem(r.parse(k3s["version"])) == ""
            assert len(r.assets(k3s["version"], ["aarch64"], k3s["checksums"], "https://example.invalid")) == 2


def test_folder_and_download_fill_the_same_cache(tmp_path: Path) -> None:
    folder, one, two = tmp_path / "folder", tmp_path / "one", tmp_path / "two"
    folder.mkdir()
    (folder / "k3s-arm64").write_bytes(ARM)
    asked: list[str] = []

    def fetch(url: str, target: Path) -> None:
        asked.append(url)
        target.write_bytes(ARM)

    path, source = r.fill(one, VERSION, asset(), sums(), folder=str(folder), fetch=fetch)
    assert (path.read_bytes(), source, asked) == (ARM, "folder", [])
    path, source = r.fill(two, VERSION, asset(), sums(), fetch=fetch)
    assert (path.read_bytes(), source) == (ARM, "download")
    assert [p.relative_to(one) for p in one.rglob("*")] == [p.relative_to(two) for p in two.rglob("*")]
    # A second run asks nobody.
    assert r.fill(two, VERSION, asset(), sums(), offline=True, fetch=fetch)[1] == "cache"
    assert len(asked) == 1


def test_a_wrong_checksum_is_named_with_both_numbers(tmp_path: Path) -> None:
    (tmp_path / "k3s-arm64").write_bytes(b"tampered")
    with pytest.raises(r.K3sError) as refused:
        r.fill(tmp_path / "cache", VERSION, asset(), sums(), folder=str(tmp_path))
    assert hashlib.sha256(b"tampered").hexdigest() in str(refused.value)
    assert f"required: sha256 {asset().sha256}" in str(refused.value)
    assert not list(tmp_path.glob("cache/*/*"))


def test_the_file_of_another_architecture_is_named_as_such(tmp_path: Path) -> None:
    (tmp_path / "k3s-arm64").write_bytes(X86)
    with pytest.raises(r.K3sError, match=r"\(the file for amd64\)"):
        r.fill(tmp_path / "cache", VERSION, asset(), sums(), folder=str(tmp_path))
    # The same with a checksum that somebody copied from the wrong line.
    with pytest.raises(r.K3sError, match=r"a program for arm64 \(it is one for amd64\)"):
        r.fill(tmp_path / "cache", VERSION, asset(binary=X86), sums(binary=X86), folder=str(tmp_path))
    assert not list(tmp_path.glob("cache/*/*"))


def test_images_must_be_an_archive(tmp_path: Path) -> None:
    page = b"<html>not found"
    (tmp_path / "k3s-airgap-images-arm64.tar.zst").write_bytes(page)
    with pytest.raises(r.K3sError, match="a zstd archive"):
        r.fill(tmp_path / "cache", VERSION, asset("images", images=page), sums(images=page), folder=str(tmp_path))


def test_a_transfer_that_breaks_off_leaves_nothing_and_is_repeated(tmp_path: Path) -> None:
    def half(url: str, target: Path) -> None:
        target.write_bytes(ARM[:10])
        raise OSError("connection reset")

    with pytest.raises(r.K3sError, match="connection reset; required: k3s-arm64 of v1.36.4"):
        r.fill(tmp_path, VERSION, asset(), sums(), fetch=half)
    assert list(tmp_path.rglob("*")) == [tmp_path / VERSION]
    # What an earlier tool left half-written under the right name is not believed either.
    (tmp_path / VERSION / "k3s-arm64").write_bytes(ARM[:10])

    def whole(url: str, target: Path) -> None:
        target.write_bytes(ARM)

    path, source = r.fill(tmp_path, VERSION, asset(), sums(), fetch=whole)
    assert (path.read_bytes(), source) == (ARM, "download")


def test_a_download_with_another_checksum_is_thrown_away(tmp_path: Path) -> None:
    def other(url: str, target: Path) -> None:
        target.write_bytes(ARM + b"more")

    with pytest.raises(r.K3sError, match=f"required: sha256 {asset().sha256}"):
        r.fill(tmp_path, VERSION, asset(), sums(), fetch=other)
    assert list(tmp_path.rglob("*")) == [tmp_path / VERSION]


def test_nowhere_to_get_it_from(tmp_path: Path) -> None:
    with pytest.raises(r.K3sError, match="GOODPUT_OFFLINE is set.*k3s_airgap_folder"):
        r.fill(tmp_path, VERSION, asset(), sums(), offline=True)
    with pytest.raises(r.K3sError, match="found no .*k3s-arm64; required: k3s-arm64 of v1.36.4"):
        r.fill(tmp_path, VERSION, asset(), sums(), folder=str(tmp_path / "empty"))


def test_check_mode_writes_nothing(tmp_path: Path) -> None:
    (tmp_path / "k3s-arm64").write_bytes(ARM)
    assert r.fill(tmp_path / "cache", VERSION, asset(), sums(), folder=str(tmp_path), check=True)[1] == "folder"
    assert r.fill(tmp_path / "cache", VERSION, asset(), sums(), check=True)[1] == "download"
    assert not (tmp_path / "cache").exists()
