"""Copying models from node to node: the real server on loopback, the real client."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.action import model_place
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as mm
from ansible_collections.goodput.spark.plugins.module_utils import model_transfer as mt

SERVE = Path(__file__).parents[2] / "roles/model_store/files/serve.py"
TOKEN = "t" * 64
CONTENT = os.urandom(300_000)
FILE = mm.ModelFile("sub/model.bin", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT))


@pytest.fixture
def port(tmp_path: Path) -> Iterator[int]:
    """Port of a share of tmp_path/models on loopback."""
    spec = importlib.util.spec_from_file_location("serve", SERVE)
    assert spec is not None
    assert spec.loader is not None
    serve: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(serve)
    serve.Handler.log_message = lambda *_: None
    target = tmp_path / "models/nano/sub"
    target.mkdir(parents=True)
    (target / "model.bin").write_bytes(CONTENT)
    (tmp_path / "models/nano/.hidden").write_text("secret")
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "models/nano/link").symlink_to(tmp_path / "secret")
    (tmp_path / "models/linked").symlink_to(tmp_path)
    server = serve.Share(("127.0.0.1", 0), str(tmp_path / "models"), TOKEN)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    server.server_close()
    thread.join()


def get(port: int, path: str, token: str = TOKEN, **headers: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("GET", path, headers={"Authorization": f"Bearer {token}", **headers})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_a_file_is_fetched_checked_and_named(port: int, tmp_path: Path) -> None:
    folder = tmp_path / "here/nano"
    mt.fetch("127.0.0.1", port, TOKEN, "nano", str(folder), FILE)
    assert (folder / "sub/model.bin").read_bytes() == CONTENT
    assert (folder / "sub/model.bin").stat().st_mode & 0o777 == 0o644
    assert [p.name for p in folder.iterdir()] == ["sub"]


def test_a_file_that_was_broken_off_goes_on_where_it_stopped(port: int, tmp_path: Path) -> None:
    folder = tmp_path / "here/nano"
    folder.mkdir(parents=True)
    part = Path(mm.part_path(str(folder), FILE))
    part.write_bytes(CONTENT[:100_000])
    asked = []
    original = http.client.HTTPConnection.request

    def watched(self: Any, method: str, url: str, body: Any = None, headers: Any = None, **more: Any) -> None:
        asked.append(headers["Range"])
        original(self, method, url, body, headers, **more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(http.client.HTTPConnection, "request", watched)
        mt.fetch("127.0.0.1", port, TOKEN, "nano", str(folder), FILE)
    assert asked == ["bytes=100000-"]
    assert (folder / "sub/model.bin").read_bytes() == CONTENT


def test_a_wrong_beginning_is_found_and_the_next_run_starts_again(port: int, tmp_path: Path) -> None:
    folder = tmp_path / "here/nano"
    folder.mkdir(parents=True)
    Path(mm.part_path(str(folder), FILE)).write_bytes(b"x" * 1000)
    with pytest.raises(mm.ModelError, match="after copying"):
        mt.fetch("127.0.0.1", port, TOKEN, "nano", str(folder), FILE)
    mt.fetch("127.0.0.1", port, TOKEN, "nano", str(folder), FILE)
    assert (folder / "sub/model.bin").read_bytes() == CONTENT


def test_a_complete_part_needs_no_byte_and_a_longer_one_starts_again(port: int, tmp_path: Path) -> None:
    folder = tmp_path / "here/nano"
    folder.mkdir(parents=True)
    for content in (CONTENT, CONTENT + b"more"):
        Path(mm.part_path(str(folder), FILE)).write_bytes(content)
        mt.fetch("127.0.0.1", port, TOKEN, "nano", str(folder), FILE)
        assert (folder / "sub/model.bin").read_bytes() == CONTENT


def test_without_the_token_nothing_is_answered(port: int, tmp_path: Path) -> None:
    assert get(port, "/nano/sub/model.bin", "wrong") == (401, b"")
    assert get(port, "/nano/sub/model.bin", "\xe9") == (401, b"")
    with pytest.raises(mm.ModelError, match="answer 401"):
        mt.fetch("127.0.0.1", port, "wrong", "nano", str(tmp_path / "here"), FILE)


@pytest.mark.parametrize(
    "path",
    [
        "/nano/.hidden",
        "/nano/link",
        "/linked/secret",
        "/../secret",
        "/nano/../../secret",
        "/nano/%2e%2e/%2e%2e/secret",
        "/nano/sub",
        "/nano/",
        "/",
        "/nano/none",
        "//etc/passwd",
        "/nano/%00",
    ],
)
def test_only_regular_files_below_the_root_are_shared(port: int, path: str) -> None:
    assert get(port, path) == (404, b"")


def test_offsets(port: int) -> None:
    assert get(port, "/nano/sub/model.bin") == (200, CONTENT)
    assert get(port, "/nano/sub/model.bin", Range="bytes=299999-") == (206, CONTENT[-1:])
    assert get(port, "/nano/sub/model.bin", Range="bytes=300000-") == (206, b"")
    assert get(port, "/nano/sub/model.bin", Range="bytes=300001-")[0] == 416


def test_nobody_there_is_a_message_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(mm.ModelError, match="goes on where it stopped"):
        mt.fetch("127.0.0.1", 1, TOKEN, "nano", str(tmp_path / "here"), FILE)


def test_a_file_of_the_controller_is_taken_and_checked(tmp_path: Path) -> None:
    incoming, folder = tmp_path / "incoming", tmp_path / "nano"
    incoming.write_bytes(CONTENT)
    mt.take(str(incoming), str(folder), FILE)
    assert (folder / "sub/model.bin").read_bytes() == CONTENT
    assert not incoming.exists()
    incoming.write_bytes(b"damaged on the way")
    with pytest.raises(mm.ModelError, match="after copying"):
        mt.take(str(incoming), str(folder), FILE)
    assert (folder / "sub/model.bin").read_bytes() == CONTENT


@pytest.mark.skipif(
    not os.path.isdir("/dev/shm") or os.stat("/dev/shm").st_dev == os.stat("/tmp").st_dev, reason="no second filesystem"
)
def test_a_file_of_the_controller_is_taken_from_another_filesystem(tmp_path: Path) -> None:
    incoming = Path(f"/dev/shm/goodput-test-{os.getpid()}")
    incoming.write_bytes(CONTENT)
    mt.take(str(incoming), str(tmp_path / "nano"), FILE)
    assert (tmp_path / "nano/sub/model.bin").read_bytes() == CONTENT
    assert not incoming.exists()


def test_the_share_has_no_rights_and_ends_by_itself() -> None:
    command = mt.share_command("192.168.100.1", 18520, "/srv/goodput/models", 600)
    for text in ("DynamicUser=yes", "RuntimeMaxSec=600", "ProtectSystem=strict", "CapabilityBoundingSet="):
        assert f"--property={text}" in command
    assert not any(TOKEN in word for word in command)
    assert command[-3:] == ["192.168.100.1", "18520", "/srv/goodput/models"]


def test_batches_keep_the_nodes_temporary_folder_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_place, "BATCH_BYTES", 10)
    files = []
    for index, size in enumerate([4, 6, 1, 50, 1]):
        path = tmp_path / str(index)
        path.write_bytes(b"x" * size)
        files.append((f"m/{index}", str(path)))
    assert [[key for key, _ in batch] for batch in model_place.batches(files)] == [
        ["m/0", "m/1"],
        ["m/2"],
        ["m/3"],
        ["m/4"],
    ]
    assert model_place.batches([]) == [[]]
