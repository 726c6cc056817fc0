"""Manifests of models: made once, judged on a node, copied by whom, and nothing believed that leaves its folder."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as mm

FILES = {
    "config.json": b'{"a": 1}',
    "tokenizer.json": b"t" * 5000,
    "sub/model-1.safetensors": os.urandom(70000),
    "empty": b"",
}


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    folder = tmp_path / "source"
    for name, content in FILES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    (folder / ".cache/huggingface").mkdir(parents=True)
    (folder / ".cache/huggingface/x").write_text("not part of the model")
    (folder / ".gitattributes").write_text("nor this")
    (folder / ".bare").mkdir()
    return folder


@pytest.fixture
def model(source: Path) -> mm.Model:
    return mm.of_source("nano", "abc", str(source))


@pytest.fixture
def store(tmp_path: Path, model: mm.Model) -> Path:
    """A node that has the model, recorded."""
    root = tmp_path / "models"
    for name, content in FILES.items():
        path = root / "nano" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    mm.finish([model], str(root), str(tmp_path / "state/cache.json"), {})
    return root


def cache_of(store: Path) -> mm.Cache:
    return mm.read_cache(str(store.parent / "state/cache.json"))


# --- the manifest


def test_a_manifest_is_made_once_and_lists_every_visible_file(source: Path, model: mm.Model) -> None:
    assert {f.path: (f.size_bytes, f.sha256) for f in model.files} == {n: (len(c), sha(c)) for n, c in FILES.items()}
    made = source / mm.MANIFEST_NAME
    before = made.stat().st_mtime_ns
    # Content is not read again: only names and sizes are compared.
    (source / "tokenizer.json").write_bytes(b"u" * 5000)
    assert mm.of_source("nano", "abc", str(source)) == model
    assert made.stat().st_mtime_ns == before


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda s: (s / "config.json").unlink(), "config.json is missing"),
        (lambda s: (s / "new.bin").write_text("x"), "new.bin is not listed"),
        (lambda s: (s / "config.json").write_text("longer than before"), "config.json has 18 bytes, not 8"),
    ],
)
def test_a_changed_source_is_refused(source: Path, model: mm.Model, change: Any, text: str) -> None:
    change(source)
    with pytest.raises(mm.ModelError, match=text):
        mm.of_source("nano", "abc", str(source))


def test_another_revision_or_model_is_refused(source: Path, model: mm.Model) -> None:
    with pytest.raises(mm.ModelError, match="model nano, revision other"):
        mm.of_source("nano", "other", str(source))
    with pytest.raises(mm.ModelError, match="model super, revision abc"):
        mm.of_source("super", "abc", str(source))


@pytest.mark.parametrize(
    ("name", "revision", "where", "manifest", "text"),
    [
        ("nvidia/nano", "abc", "{}", "", "without the organisation"),
        ("..", "abc", "{}", "", "model name"),
        ("nano", "", "{}", "", "no revision"),
        ("nano", "abc", "", "", "neither source nor manifest"),
        ("nano", "abc", "{}/nowhere", "", "no folder"),
        ("nano", "abc", "{}", "{}/no-manifest", "no file"),
        ("nano", "abc", "{}/.bare", "", "no files in"),
    ],
)
def test_bad_input_is_refused(source: Path, name: str, revision: str, where: str, manifest: str, text: str) -> None:
    with pytest.raises(mm.ModelError, match=text) as refused:
        mm.of_source(name, revision, where.format(source), manifest.format(source))
    assert "; required: " in str(refused.value)
    assert "; fix: " in str(refused.value)


def test_a_list_of_sha256sum_is_a_manifest_without_sizes(source: Path, tmp_path: Path) -> None:
    lines = [f"{sha(content)} {'*' if name == 'empty' else ' '}./{name}" for name, content in FILES.items()]
    listing = tmp_path / "SHA256SUMS"
    listing.write_text("\n".join([*lines, f"{'0' * 64}  ./.cache/x"]) + "\n")
    model = mm.of_source("nano", "abc", str(source), str(listing))
    assert {f.path: f.sha256 for f in model.files} == {n: sha(c) for n, c in FILES.items()}
    assert {f.size_bytes for f in model.files} == {None}
    listing.write_text("hello\n")
    with pytest.raises(mm.ModelError, match="'hello' in line 1"):
        mm.of_source("nano", "abc", str(source), str(listing))


@pytest.mark.parametrize("path", ["/etc/passwd", "../x", "a/../../x", "a//b", ".ssh/x", "a/.b", ""])
def test_a_path_that_leaves_the_folder_is_refused(path: str) -> None:
    entry = {"format": 1, "name": "n", "revision": "r", "files": [{"path": path, "size_bytes": 1, "sha256": "0" * 64}]}
    with pytest.raises(mm.ModelError, match="relative path"):
        mm.models_of([entry])


@pytest.mark.parametrize("text", ["{", '{"format": 1}', '{"format":1,"name":"n","revision":"r","files":[]}'])
def test_a_damaged_manifest_is_refused(text: str) -> None:
    with pytest.raises(mm.ModelError, match="damaged"):
        mm.parse_manifest(text, "n", "r")


def test_a_short_checksum_is_refused() -> None:
    entry = {"format": 1, "name": "n", "revision": "r", "files": [{"path": "a", "size_bytes": 1, "sha256": "0" * 63}]}
    with pytest.raises(mm.ModelError, match="damaged"):
        mm.models_of([entry])


@pytest.mark.parametrize(
    "size", [0, 1, 4096, mm.CHUNK_BYTES - 1, mm.CHUNK_BYTES, mm.CHUNK_BYTES + 1, 2 * mm.CHUNK_BYTES + 17]
)
def test_checksums_past_the_page_cache_are_right(tmp_path: Path, size: int) -> None:
    content = os.urandom(size)
    (tmp_path / "x").write_bytes(content)
    assert mm.sha256_of(str(tmp_path / "x")) == sha(content)


def test_a_link_is_never_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc/passwd")
    with pytest.raises(OSError, match="symbolic links"):
        mm.sha256_of(str(tmp_path / "link"))


# --- a node


def test_a_complete_node_has_nothing_to_do_and_reads_nothing(store: Path, model: mm.Model) -> None:
    judged = mm.judge(model, str(store), cache_of(store), full=False)
    assert (judged.pending, judged.hashed_bytes) == (False, 0)
    full = mm.judge(model, str(store), cache_of(store), full=True)
    assert (full.pending, full.hashed_bytes) == (False, sum(map(len, FILES.values())))


@pytest.mark.parametrize("full", [True, False])
def test_a_corrupted_file_of_the_same_size_is_found_even_with_its_old_times(
    store: Path, model: mm.Model, full: bool
) -> None:
    path = store / "nano/tokenizer.json"
    times = path.stat()
    with path.open("r+b") as stream:
        stream.seek(100)
        stream.write(b"X")
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    judged = mm.judge(model, str(store), cache_of(store), full)
    assert judged.get == ["tokenizer.json"]
    (problem,) = mm.problems(judged)
    assert f"{path}: sha256 {sha(path.read_bytes())}" in problem["found"]
    assert sha(FILES["tokenizer.json"]) in problem["required"]
    assert "--tags model_store` restores it" in problem["remedy"]


def test_missing_short_and_odd_files(store: Path, model: mm.Model) -> None:
    (store / "nano/config.json").unlink()
    (store / "nano/tokenizer.json").write_bytes(b"t")
    (store / "nano/empty").unlink()
    (store / "nano/empty").symlink_to("/etc/passwd")
    judged = mm.judge(model, str(store), cache_of(store), full=False)
    assert judged.missing == ["config.json"]
    assert {i["path"]: i["found"] for i in judged.wrong} == {"tokenizer.json": "1 bytes", "empty": "not a regular file"}
    assert judged.needed_bytes == 8 + 5000
    assert len(mm.problems(judged)) == 3


def test_a_bare_node_needs_everything(tmp_path: Path, model: mm.Model) -> None:
    judged = mm.judge(model, str(tmp_path / "nothing"), {}, full=False)
    assert judged.get == sorted(FILES)
    assert judged.pending


def test_files_of_a_former_revision_are_removed_and_foreign_ones_left(store: Path, model: mm.Model) -> None:
    (store / "nano/mine.txt").write_text("foreign")
    cache = str(store.parent / "state/cache.json")
    newer = mm.Model("nano", "def", tuple(f for f in model.files if f.path != "tokenizer.json"))
    judged = mm.judge(newer, str(store), cache_of(store), full=False)
    assert (judged.stale, judged.unlisted, judged.pending) == (["tokenizer.json"], ["mine.txt"], True)
    mm.finish([newer], str(store), cache, cache_of(store))
    assert not (store / "nano/tokenizer.json").exists()
    assert (store / "nano/mine.txt").exists()
    assert not mm.judge(newer, str(store), cache_of(store), full=False).pending


def test_a_model_that_somebody_put_there_is_only_written_down(store: Path, model: mm.Model) -> None:
    judged = mm.judge(model, str(store), {}, full=False)
    assert (judged.get, judged.unrecorded, judged.pending) == ([], [f.path for f in model.files], True)


def test_a_damaged_cache_only_costs_time(store: Path, model: mm.Model) -> None:
    (store.parent / "state/cache.json").write_text("{")
    judged = mm.judge(model, str(store), cache_of(store), full=False)
    assert judged.hashed_bytes == sum(map(len, FILES.values()))


def test_a_part_with_another_checksum_is_removed_and_never_named(store: Path, model: mm.Model) -> None:
    file = next(f for f in model.files if f.path == "tokenizer.json")
    part = Path(mm.part_path(str(store / "nano"), file))
    part.write_bytes(b"broken")
    with pytest.raises(mm.ModelError, match="after copying"):
        mm.place(str(part), file, str(store / "nano"))
    assert not part.exists()
    assert (store / "nano/tokenizer.json").read_bytes() == FILES["tokenizer.json"]


def test_space() -> None:
    assert mm.space_problem("/m", 0, 0, mm.GIB) is None
    assert mm.space_problem("/m", mm.GIB, 3 * mm.GIB, 2 * mm.GIB) is None
    problem = mm.space_problem("/m", 2 * mm.GIB, 3 * mm.GIB, 2 * mm.GIB)
    assert problem is not None
    assert problem["found"] == "3.00 GiB free for /m"


# --- who copies from whom


def node(get: int = 0, pending: bool | None = None, rail: bool = True) -> dict[str, Any]:
    return {
        "get_files": get,
        "pending": bool(get) if pending is None else pending,
        "rail_addresses": ["192.168.100.1"] if rail else [],
    }


@pytest.mark.parametrize(
    ("nodes", "push", "share", "fetch"),
    [
        ({"a": node(), "b": node()}, [], "", []),
        ({"a": node(4), "b": node(4)}, ["a"], "a", ["b"]),
        ({"a": node(4), "b": node()}, [], "b", ["a"]),
        ({"a": node(), "b": node(1)}, [], "a", ["b"]),
        ({"a": node(4, rail=False), "b": node(4, rail=False)}, ["a", "b"], "", []),
        ({"a": node(4, rail=False), "b": node(4), "c": node(4)}, ["a", "b"], "b", ["c"]),
        ({"a": node(4)}, ["a"], "", []),
        ({"a": node(0, pending=True), "b": node()}, ["a"], "", []),
        ({"a": node(0, pending=True), "b": node(2)}, ["a"], "a", ["b"]),
    ],
)
def test_a_model_is_sent_once_and_copied_over_the_rails(
    nodes: dict[str, dict[str, Any]], push: list[str], share: str, fetch: list[str]
) -> None:
    assert mm.transfer_plan(list(nodes), nodes, []) == {"push": push, "share": share, "fetch": fetch}


def test_a_model_that_nobody_has_is_refused() -> None:
    with pytest.raises(mm.ModelError, match="nano incomplete on a"):
        mm.transfer_plan(["a", "b"], {"a": node(4), "b": node(4)}, ["nano"])
    assert mm.transfer_plan(["a", "b"], {"a": node(), "b": node(4)}, ["nano"])["fetch"] == ["b"]


IP = json.dumps(
    [
        {
            "ifname": "lo",
            "operstate": "UNKNOWN",
            "addr_info": [{"family": "inet", "local": "127.0.0.1", "prefixlen": 8}],
        },
        {"ifname": "enp1s0f0np0", "operstate": "UP", "addr_info": [{"family": "inet", "local": "192.168.100.2"}]},
        {"ifname": "enP2p1s0f0np0", "operstate": "DOWN", "addr_info": [{"family": "inet", "local": "192.168.101.2"}]},
        {},
    ]
)


def test_only_rails_that_are_up_count() -> None:
    assert mm.addresses_in(IP, ["192.168.101.0/24", "192.168.100.0/24"]) == ["192.168.100.2"]
    assert mm.addresses_in("", ["192.168.100.0/24"]) == []
