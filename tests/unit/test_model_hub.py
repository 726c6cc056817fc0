"""Models from a hub: a real server with the hub's API on one port and its large files on another, both on loopback."""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.goodput.spark.plugins.module_utils import model_hub as hub
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as mm
from ansible_collections.goodput.spark.plugins.module_utils import model_transfer as mt
from ansible_collections.goodput.spark.plugins.modules import model_check, model_download
from plays import run_playbook

REVISION = "4b7efb68d347" + "0" * 28
REPOSITORY = "maker/nano-30b"
TOKEN = "hf_testtoken"
LARGE = {
    "model-00001.safetensors": os.urandom(3_000_000),
    "sub/model-00002.safetensors": os.urandom(2_000_000),
    "tokenizer.json": b"t" * 700_000,
    "sub/tokenizer copy.json": b"t" * 700_000,
}
SMALL = {"config.json": b'{"a": 1}', "README.md": b"# nano\n", "empty": b"", "empty too": b"", ".gitattributes": b"x"}
VISIBLE = {path: content for path, content in (LARGE | SMALL).items() if not path.startswith(".")}


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def blob(content: bytes) -> str:
    """git's own answer where git is there; the formula otherwise would only be compared with itself."""
    done = subprocess.run(["git", "hash-object", "--stdin"], input=content, capture_output=True, check=True)
    return done.stdout.decode().strip()


@dataclass
class Request:
    path: str
    authorization: str | None
    start: int


@dataclass
class Site:
    """What both servers know and were asked. ``before`` may answer a request in another way: True if it did."""

    gated: bool = False
    small: dict[str, bytes] = field(default_factory=lambda: dict(SMALL))
    large: dict[str, bytes] = field(default_factory=lambda: dict(LARGE))
    asked: list[Request] = field(default_factory=list)
    asked_cdn: list[Request] = field(default_factory=list)
    before: Callable[[Any, Request], bool] = lambda handler, request: False
    before_cdn: Callable[[Any, Request], bool] = lambda handler, request: False
    endpoint: str = ""
    cdn: str = ""
    answer: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        siblings: list[dict[str, Any]] = [
            {"rfilename": path, "size": len(content), "blobId": blob(content)} for path, content in SMALL.items()
        ]
        for path, content in LARGE.items():
            lfs = {"sha256": sha(content), "size": len(content), "pointerSize": 134}
            siblings.append({"rfilename": path, "size": len(content), "blobId": "0" * 40, "lfs": lfs})
        self.answer = {"id": REPOSITORY, "sha": REVISION, "siblings": siblings}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    site: Site

    def log_message(self, *_: Any) -> None:
        pass

    def request_of(self) -> Request:
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        return Request(self.path, self.headers.get("Authorization"), int(asked[1]) if asked else 0)

    def send(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def send_content(self, content: bytes, start: int) -> None:
        if start:
            self.send(206, content[start:], Content_Range=f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send(200, content)

    def cut(self, content: bytes, start: int, count: int) -> bool:
        """Promise the rest, send ``count`` bytes of it, and hang up."""
        self.send_response(206 if start else 200)
        self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(content[start : start + count])
        self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)
        return True


class HubHandler(Handler):
    def do_GET(self) -> None:
        request, site = self.request_of(), self.site
        site.asked.append(request)
        if site.before(self, request):
            return
        if site.gated and request.authorization != f"Bearer {TOKEN}":
            self.send(401, X_Error_Code="GatedRepo", X_Error_Message="Access to model is restricted.")
            return
        path = urllib.parse.unquote(request.path)
        prefix = f"/{REPOSITORY}/resolve/{REVISION}/"
        name = path.removeprefix(prefix)
        if path == f"/api/models/{REPOSITORY}/revision/{REVISION}?blobs=true":
            self.send(200, json.dumps(site.answer).encode())
        elif path.startswith(prefix) and name in site.small:
            self.send_content(site.small[name], request.start)
        elif path.startswith(prefix) and name in site.large:
            self.send(302, Location=f"{site.cdn}/{urllib.parse.quote(name)}?Signature=secret")
        else:
            self.send(404, X_Error_Code="RepoNotFound", X_Error_Message="Repository not found")


class CdnHandler(Handler):
    def do_GET(self) -> None:
        request, site = self.request_of(), self.site
        site.asked_cdn.append(request)
        if not site.before_cdn(self, request):
            self.send_content(site.large[name_of(request)], request.start)


def name_of(request: Request) -> str:
    return urllib.parse.unquote(request.path.split("?")[0]).lstrip("/")


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    monkeypatch.setattr(hub, "PAUSE_S", 0.01)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    one = Site()
    servers, threads = [], []
    for handler in (HubHandler, CdnHandler):
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (handler,), {"site": one}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        servers.append(server)
        threads.append(thread)
    one.endpoint, one.cdn = (f"http://127.0.0.1:{server.server_address[1]}" for server in servers)
    yield one
    for server, thread in zip(servers, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


def listed(site: Site, token: str = "") -> mm.Model:
    return hub.list_revision(hub.Hub(site.endpoint, token), "nano", REVISION, REPOSITORY)


def fetch(site: Site, root: Path, model: mm.Model, token: str = "", connections: int = 4) -> hub.Progress:
    judged = mm.judge(model, str(root), {}, full=False)
    files = [file for file in model.files if file.path in judged.get]
    wanted = [hub.Wanted(REPOSITORY, REVISION, judged.folder, file) for file in files]
    progress = hub.Progress(judged.needed_bytes, lambda _text: None)
    hub.fetch_files(hub.Hub(site.endpoint, token), wanted, connections, progress)
    return progress


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def part_of(root: Path, model: mm.Model, path: str) -> Path:
    file = next(file for file in model.files if file.path == path)
    return Path(mm.part_path(str(root / "nano"), file))


# --- the manifest


def test_a_revision_becomes_a_manifest_with_a_sha256_for_every_visible_file(site: Site) -> None:
    model = listed(site)
    assert {f.path: (f.size_bytes, f.sha256) for f in model.files} == {p: (len(c), sha(c)) for p, c in VISIBLE.items()}
    # Large files are not read for it.
    assert site.asked_cdn == []


def test_the_manifest_is_kept_and_the_hub_asked_once(site: Site, tmp_path: Path) -> None:
    where = str(tmp_path / "state/nano.json")
    made = hub.of_repository(lambda: hub.Hub(site.endpoint), "nano", REVISION, REPOSITORY, where)
    asked = len(site.asked)

    def nobody() -> hub.Hub:
        raise AssertionError("a later run needs no hub and no token")

    assert hub.of_repository(nobody, "nano", REVISION, REPOSITORY, where) == made
    assert len(site.asked) == asked


def test_a_small_file_with_another_blob_id_is_named(site: Site, tmp_path: Path) -> None:
    other = site.small["config.json"] = b'{"a": 2}'
    where = tmp_path / "nano.json"
    with pytest.raises(mm.ModelError, match=f"git blob {blob(other)} for config.json"):
        hub.of_repository(lambda: hub.Hub(site.endpoint), "nano", REVISION, REPOSITORY, str(where))
    assert not where.exists()


def test_a_file_that_the_hub_does_not_serve_by_plain_http_is_refused_with_both_sizes(site: Site) -> None:
    site.answer["siblings"][-1]["lfs"]["size"] = 50_000_000_001
    with pytest.raises(mm.ModelError, match=r"copy.json with 50\.0 GB .* at most 50 GB"):
        listed(site)


def test_an_answer_that_is_no_listing_is_refused(site: Site) -> None:
    for answer, text in (
        ({"sha": "1" * 40, "siblings": site.answer["siblings"]}, "revision 1111"),
        ({"siblings": []}, "without 'sha'"),
        ({"sha": REVISION, "siblings": []}, "no files"),
        (
            {"sha": REVISION, "siblings": [{"rfilename": "../x", "size": 1, "blobId": ""}]},
            "damaged|relative path|no files",
        ),
        ({"sha": REVISION, "siblings": [{"rfilename": "a//x", "size": 1, "blobId": ""}]}, "relative path"),
        ({"sha": REVISION, "siblings": [{"rfilename": "x", "lfs": {"size": 1, "sha256": "0"}}]}, "64 hex digits"),
    ):
        site.answer = answer
        with pytest.raises(mm.ModelError, match=text):
            listed(site)


@pytest.mark.parametrize(
    ("name", "revision", "repository", "text"),
    [
        ("nano", "main", REPOSITORY, "branch or tag may move"),
        ("nano", REVISION[:12], REPOSITORY, "40 hex digits"),
        ("nano", REVISION, "nano", "OWNER/NAME"),
        ("nano", REVISION, "a/../b", "OWNER/NAME"),
        ("nano", REVISION, "a/b?x=", "OWNER/NAME"),
        ("../nano", REVISION, REPOSITORY, "model name"),
    ],
)
def test_bad_input_is_refused_before_the_hub_is_asked(name: str, revision: str, repository: str, text: str) -> None:
    with pytest.raises(mm.ModelError, match=text):
        hub.of_repository(hub.Hub, name, revision, repository, "/nonexistent")


@pytest.mark.parametrize("endpoint", ["huggingface.co", "ftp://hub", "https://", "https://me:pw@hub", "https://hub?x"])
def test_an_endpoint_that_is_none_is_refused(endpoint: str) -> None:
    with pytest.raises(mm.ModelError, match="model_store_hub_endpoint"):
        hub.Hub(endpoint)


def test_a_token_is_not_sent_in_the_clear() -> None:
    hub.Hub("http://mirror.example")
    with pytest.raises(mm.ModelError, match="everybody on the way could read"):
        hub.Hub("http://mirror.example", TOKEN)
    assert TOKEN not in repr(hub.Hub("https://mirror.example", TOKEN))


# --- the token


def test_the_token_file_is_read_only_if_nobody_else_may(tmp_path: Path) -> None:
    path = tmp_path / "token"
    assert hub.read_token("") == ""
    with pytest.raises(mm.ModelError, match="no readable token file"):
        hub.read_token(str(path))
    path.write_text(TOKEN + "\n")
    path.chmod(0o640)
    with pytest.raises(mm.ModelError, match="mode 0640 .* mode 0600"):
        hub.read_token(str(path))
    path.chmod(0o600)
    assert hub.read_token(str(path)) == TOKEN
    for bad in ("", "two words secret", "secret\nsecret"):
        path.write_text(bad)
        with pytest.raises(mm.ModelError, match="one line") as refused:
            hub.read_token(str(path))
        assert "secret" not in str(refused.value)


def test_the_token_goes_to_the_hub_and_never_to_the_host_it_redirects_to(site: Site, tmp_path: Path) -> None:
    site.gated = True
    fetch(site, tmp_path, listed(site, TOKEN), TOKEN)
    assert {request.authorization for request in site.asked} == {f"Bearer {TOKEN}"}
    assert len(site.asked_cdn) == len(LARGE)
    assert {request.authorization for request in site.asked_cdn} == {None}


def test_a_redirect_on_the_hub_keeps_the_token(site: Site) -> None:
    site.gated = True

    def moved(handler: Any, request: Request) -> bool:
        if "/former/" in request.path:
            handler.send(307, Location=request.path.replace("/former/", f"/{REPOSITORY}/").replace("//", "/"))
        return "/former/" in request.path

    site.before = moved
    with hub.Hub(site.endpoint, TOKEN).open(f"/former/resolve/{REVISION}/config.json", REPOSITORY) as answer:
        assert answer.read() == SMALL["config.json"]


def test_a_redirect_from_https_to_http_is_refused() -> None:
    request = urllib.request.Request("https://hub/x")
    with pytest.raises(mm.ModelError, match="from hub to http://hub/x; required: https"):
        hub._Redirect().redirect_request(request, None, 302, "", {}, "http://hub/x?Signature=secret")


def test_a_hub_that_does_not_prove_who_it_is_is_refused_at_once(tmp_path: Path) -> None:
    certificate = [str(tmp_path / name) for name in ("cert", "key")]
    words = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    try:
        subprocess.run([*words, "-out", certificate[0], "-keyout", certificate[1]], check=True, capture_output=True)
    except FileNotFoundError:
        pytest.skip("no openssl to make a certificate with")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with socket.create_server(("127.0.0.1", 0)) as listener, context.wrap_socket(listener, server_side=True) as server:

        def answer() -> None:
            with suppress(OSError):
                server.accept()

        thread = threading.Thread(target=answer)
        thread.start()
        one = hub.Hub(f"https://127.0.0.1:{server.getsockname()[1]}", TOKEN)
        with pytest.raises(mm.ModelError, match="a certificate that does not fit .*clock"):
            hub.list_revision(one, "nano", REVISION, REPOSITORY)
        thread.join()


# --- fetching


def test_a_model_comes_once_and_goes_on_from_node_to_node(
    site: Site, tmp_path: Path, repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(repository / "roles/model_store/files")
    model = listed(site)
    site.asked.clear()
    progress = fetch(site, tmp_path / "first", model)
    assert contents(tmp_path / "first/nano") == VISIBLE
    assert progress.bytes == sum(map(len, VISIBLE.values()))
    assert "MiB/s" in progress.text()
    # Once each; what is empty needs no question.
    assert len(site.asked) == sum(map(bool, VISIBLE.values()))
    assert {p.stat().st_mode & 0o777 for p in (tmp_path / "first/nano").iterdir() if p.is_file()} == {0o644}
    assert not mm.judge(model, str(tmp_path / "first"), {}, full=True).get
    share = importlib.import_module("serve").Share(("127.0.0.1", 0), str(tmp_path / "first"), "t")
    thread = threading.Thread(target=share.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    for file in model.files:
        mt.fetch("127.0.0.1", share.server_address[1], "t", "nano", str(tmp_path / "second/nano"), file)
    share.shutdown()
    share.server_close()
    thread.join()
    assert contents(tmp_path / "second/nano") == VISIBLE
    assert (len(site.asked), len(site.asked_cdn)) == (sum(map(bool, VISIBLE.values())), len(LARGE))


def test_nothing_of_it_stays_in_the_page_cache(site: Site, tmp_path: Path) -> None:
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True
    ).stdout.strip()
    if kind == "tmpfs" or not shutil.which("fincore"):
        pytest.skip(f"{tmp_path} is on {kind}; needs a disk and fincore")
    fetch(site, tmp_path, listed(site))
    words = ["fincore", "--bytes", "--noheadings", "--output", "RES"]
    words += [str(tmp_path / "nano" / path) for path in LARGE]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0"] * len(LARGE)


def test_files_come_in_parallel(site: Site, tmp_path: Path) -> None:
    model = listed(site)
    together = threading.Barrier(2, timeout=10)

    def meet(handler: Any, request: Request) -> bool:
        # Files with the same content come one after the other.
        if "tokenizer" not in request.path:
            together.wait()
        return False

    site.before_cdn = meet
    fetch(site, tmp_path, model, connections=2)
    assert contents(tmp_path / "nano") == VISIBLE
    with pytest.raises(mm.ModelError, match="1 to 16"):
        fetch(site, tmp_path / "other", model, connections=0)


def test_files_with_the_same_content_do_not_write_into_each_other(site: Site, tmp_path: Path) -> None:
    model = listed(site)

    def slow(handler: Any, request: Request) -> bool:
        time.sleep(0.1)
        return False

    site.before_cdn = slow
    fetch(site, tmp_path, model)
    assert contents(tmp_path / "nano") == VISIBLE


def test_a_cut_connection_goes_on_where_it_stopped_with_a_new_address(site: Site, tmp_path: Path) -> None:
    model, path = listed(site), "model-00001.safetensors"
    site.asked.clear()
    # More cuts than attempts: each brought something, so none of them counts twice.
    site.before_cdn = lambda handler, request: (
        name_of(request) == path and request.start < 2_400_000 and handler.cut(LARGE[path], request.start, 400_000)
    )
    progress = fetch(site, tmp_path, model)
    starts = [request.start for request in site.asked_cdn if name_of(request) == path]
    assert starts == [400_000 * n for n in range(7)]
    assert [request.start for request in site.asked if request.path.endswith(path)] == starts
    assert contents(tmp_path / "nano") == VISIBLE
    assert progress.bytes == sum(map(len, VISIBLE.values()))


def test_a_broken_run_is_finished_by_the_next_one(site: Site, tmp_path: Path) -> None:
    model, path = listed(site), "sub/model-00002.safetensors"
    dead = False

    def die(handler: Any, request: Request) -> bool:
        nonlocal dead
        if name_of(request) != path or request.start:
            return bool(dead and handler.cut(LARGE[name_of(request)], request.start, 0))
        dead = True
        return bool(handler.cut(LARGE[path], 0, 1_234_567))

    site.before_cdn = die
    with pytest.raises(mm.ModelError, match=r"model-00002.* goes on where it stopped"):
        fetch(site, tmp_path, model, connections=1)
    # Nothing has a name that was not checked.
    assert (
        contents(tmp_path / "nano").items()
        <= (VISIBLE | {part_of(tmp_path, model, path).name: LARGE[path][:1_234_567]}).items()
    )
    assert (
        mm.judge(model, str(tmp_path), {}, full=False).needed_bytes
        == sum(len(c) for p, c in VISIBLE.items() if not (tmp_path / "nano" / p).exists()) - 1_234_567
    )
    site.before_cdn = lambda handler, request: False
    site.asked_cdn.clear()
    fetch(site, tmp_path, model)
    assert [r.start for r in site.asked_cdn if name_of(r) == path] == [1_234_567]
    assert contents(tmp_path / "nano") == VISIBLE


def test_a_server_without_ranges_sends_the_whole_file_again(site: Site, tmp_path: Path) -> None:
    model, path = listed(site), "tokenizer.json"
    part = part_of(tmp_path, model, path)
    part.parent.mkdir()
    part.write_bytes(LARGE[path][:1000])
    site.before_cdn = lambda handler, request: handler.send(200, LARGE[name_of(request)]) or True
    fetch(site, tmp_path, model)
    assert contents(tmp_path / "nano") == VISIBLE


def test_a_complete_part_is_not_asked_for_again(site: Site, tmp_path: Path) -> None:
    model, path = listed(site), "model-00001.safetensors"
    part = part_of(tmp_path, model, path)
    part.parent.mkdir()
    part.write_bytes(LARGE[path])
    fetch(site, tmp_path, model)
    assert path not in {name_of(request) for request in site.asked_cdn}
    assert contents(tmp_path / "nano") == VISIBLE


@pytest.mark.parametrize("there", [0, 1000, len(LARGE["tokenizer.json"])])
def test_a_list_of_sha256sum_may_name_fewer_files(site: Site, tmp_path: Path, there: int) -> None:
    """Such a list has no sizes; a server answers 416 where nothing is left."""
    path, listing = "tokenizer.json", tmp_path / "SHA256SUMS"
    listing.write_text(f"{sha(LARGE[path])}  {path}\n{sha(SMALL['config.json'])}  config.json\n")
    model = hub.of_repository(lambda: hub.Hub("https://nobody"), "nano", REVISION, REPOSITORY, str(listing))
    part = part_of(tmp_path, model, path)
    part.parent.mkdir()
    part.write_bytes(LARGE[path][:there])
    site.before_cdn = lambda handler, request: request.start >= len(LARGE[path]) and (handler.send(416) or True)
    fetch(site, tmp_path, model)
    assert contents(tmp_path / "nano") == {path: LARGE[path], "config.json": SMALL["config.json"]}
    assert [request.start for request in site.asked_cdn] == [there]


def test_progress_is_told_now_and_then() -> None:
    said: list[str] = []
    progress = hub.Progress(4 * 1024**2, said.append, every_s=0)
    progress.seen(1024**2)
    assert re.fullmatch(r"1\.0 of 4\.0 MiB in 0 s, [\d.]+ MiB/s", said[0])
    quiet = hub.Progress(1, said.append, every_s=3600)
    quiet.seen(1)
    assert len(said) == 1


def test_a_wrong_checksum_names_the_file_and_gives_it_no_name(site: Site, tmp_path: Path) -> None:
    model, path = listed(site), "tokenizer.json"
    site.large[path] = b"u" * len(LARGE[path])
    with pytest.raises(mm.ModelError, match=f"sha256 {sha(site.large[path])} for .*nano/{path}"):
        fetch(site, tmp_path, model)
    assert not (tmp_path / "nano" / path).exists()
    assert not part_of(tmp_path, model, path).exists()


def test_a_page_in_place_of_a_file_is_refused_before_it_is_written(site: Site, tmp_path: Path) -> None:
    model = listed(site)
    site.before_cdn = lambda handler, request: handler.send(200, b"<html>log in</html>") or True
    with pytest.raises(mm.ModelError, match=r"found 19 bytes of .* required: \d+ bytes"):
        fetch(site, tmp_path, model)
    assert not any(b"html" in content for content in contents(tmp_path).values())


def test_a_full_disk_is_no_fault_of_the_network(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = listed(site)
    small = tmp_path / "full"
    small.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", small], capture_output=True, check=False)
    if done.returncode:
        pytest.skip(f"no right to mount a small filesystem: {done.stderr.decode().strip()}")
    try:
        with pytest.raises(OSError, match="No space left"):
            fetch(site, small, model, connections=1)
        assert len(site.asked_cdn) == 1
    finally:
        subprocess.run(["umount", small], check=True)


# --- answers of the hub


@pytest.mark.parametrize(
    ("status", "token", "texts"),
    [
        (401, "", ["without a token", "accept its licence there", "model_store_hub_token_file", f"/{REPOSITORY}"]),
        (401, TOKEN, ["a token whose account may read it", f"/{REPOSITORY}"]),
        (403, TOKEN, ["accept the licence", f"/{REPOSITORY}"]),
        (404, "", ["correct repository and revision in model_store_models"]),
    ],
)
def test_a_refusal_of_the_hub_is_one_message_with_its_remedy(
    site: Site, status: int, token: str, texts: list[str]
) -> None:
    site.before = lambda handler, request: handler.send(status, X_Error_Message="for a reason") or True
    with pytest.raises(mm.ModelError) as refused:
        listed(site, token)
    message = str(refused.value)
    for text in [f"answer {status} (for a reason)", "; required: ", "; fix: ", *texts]:
        assert text in message
    assert TOKEN not in message
    assert len(site.asked) == 1


@pytest.mark.parametrize(("status", "text"), [(429, "model_store_hub_token_file"), (503, "goes on where it stopped")])
def test_a_busy_hub_is_asked_again_a_few_times(site: Site, status: int, text: str) -> None:
    site.before = lambda handler, request: handler.send(status) or True
    with pytest.raises(mm.ModelError, match=f"answer {status} .*{text}"):
        listed(site)
    assert len(site.asked) == hub.ATTEMPTS
    site.before = lambda handler, request: len(site.asked) < hub.ATTEMPTS + 3 and (handler.send(status) or True)
    assert len(listed(site).files) == len(VISIBLE)


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [({}, 0.01), ({"Retry_After": "7"}, 7), ({"RateLimit": '"api";r=0;t=55'}, 56), ({"Retry_After": "86400"}, 300)],
)
def test_a_pause_that_the_hub_names_is_kept(site: Site, headers: dict[str, str], seconds: float) -> None:
    site.before = lambda handler, request: len(site.asked) == 1 and (handler.send(429, **headers) or True)
    waited: list[float] = []
    one = hub.Hub(site.endpoint)
    path = f"/{REPOSITORY}/resolve/{REVISION}/config.json"
    hub.patiently(lambda: one.open(path, REPOSITORY).close(), waited.append)
    assert waited == [seconds]


def test_an_address_that_ran_out_is_asked_for_again_without_showing_it(site: Site, tmp_path: Path) -> None:
    model = listed(site)
    site.before_cdn = lambda handler, request: len(site.asked_cdn) <= 3 and (handler.send(403) or True)
    fetch(site, tmp_path / "a", model)
    assert contents(tmp_path / "a/nano") == VISIBLE
    site.before_cdn = lambda handler, request: handler.send(403) or True
    with pytest.raises(mm.ModelError, match=r"answer 403 from 127\.0\.0\.1") as refused:
        fetch(site, tmp_path / "b", model)
    assert "Signature" not in str(refused.value)


def test_a_silent_hub_is_given_up(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "TIMEOUT_S", 0.05)
    ended = threading.Event()
    site.before = lambda handler, request: ended.wait(10)
    with pytest.raises(mm.ModelError, match="timed out"):
        listed(site)
    ended.set()
    assert len(site.asked) == hub.ATTEMPTS


def test_nobody_there_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "PAUSE_S", 0.01)
    with pytest.raises(mm.ModelError, match=r"127\.0\.0\.1:1/api.* broken off .*refused"):
        hub.list_revision(hub.Hub("http://127.0.0.1:1"), "nano", REVISION, REPOSITORY)


# --- through Ansible


def run(capsys: pytest.CaptureFixture[str], module: Any, check: bool = False, **arguments: Any) -> dict[str, Any]:
    with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
        module.main()
    return dict(json.loads(capsys.readouterr().out))


def test_the_module_fetches_once(site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = listed(site)
    common: dict[str, Any] = {
        "models": [model.as_dict()],
        "directory": str(tmp_path / "m"),
        "cache": str(tmp_path / "s/c.json"),
    }
    arguments = {**common, "repositories": {"nano": REPOSITORY}, "endpoint": site.endpoint}
    site.asked.clear()
    assert run(capsys, model_download, check=True, **arguments)["changed"]
    assert not (tmp_path / "m").exists()
    said = run(capsys, model_download, **arguments)
    assert said["changed"] and sorted(said["placed"]) == sorted(f"nano/{path}" for path in VISIBLE)
    assert said["bytes"] == sum(map(len, VISIBLE.values())) and "MiB/s" in said["msg"]
    assert not run(capsys, model_check, **common)["pending"]
    asked = len(site.asked)
    again = run(capsys, model_download, **arguments)
    assert (again["changed"], again["placed"], again["bytes"], len(site.asked)) == (False, [], 0, asked)
    # A model of another origin is left to others.
    (tmp_path / "m/nano/config.json").unlink()
    assert not run(capsys, model_download, **{**arguments, "repositories": {}})["changed"]


def test_the_disk_is_compared_first_with_both_figures(
    site: Site, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entry = listed(site).as_dict()
    entry["files"][0]["size_bytes"] = 10**18
    said = run(capsys, model_check, models=[entry], directory=str(tmp_path), cache=str(tmp_path / "c"), reserve_gib=20)
    assert re.search(r"found: [\d.]+ GiB free for .*\nrequired: 93132257\d\.\d\d GiB of models", said["space_problem"])


def playbook(tmp_path: Path, *more: str, **variables: Any) -> subprocess.CompletedProcess[str]:
    """The role's own files on this machine: compare, plan, fetch, check. Not its manifest of what it made."""
    tasks = [
        {"ansible.builtin.include_role": {"name": "goodput.spark.model_store", "tasks_from": name}}
        for name in ("preflight", "configure", "verify")
    ]
    play = tmp_path / "play.yml"
    play.write_text(json.dumps([{"hosts": "localhost", "gather_facts": False, "tasks": tasks}]))
    words = ["-vvv", "-c", "local", *more, "-e", json.dumps(variables)]
    return run_playbook("localhost,", play, *words, timeout_s=120, GOODPUT_STATE=str(tmp_path / "state"))


def test_the_role_takes_a_gated_model_once(site: Site, tmp_path: Path) -> None:
    site.gated = True
    token = tmp_path / "token"
    token.write_text(TOKEN)
    token.chmod(0o600)
    variables = {
        "model_store_models": [{"name": "nano", "revision": REVISION, "repository": REPOSITORY}],
        "model_store_directory": str(tmp_path / "models"),
        "model_store_reserve_gib": 0.1,
        "model_store_copy_subnets": [],
        "model_store_hub_endpoint": site.endpoint,
        "model_store_hub_token_file": str(token),
        "__model_store_cache": str(tmp_path / "cache/c.json"),
    }
    refused = playbook(tmp_path, **{**variables, "model_store_hub_token_file": ""})
    assert refused.returncode == 2
    assert "answer 401 (Access to model is restricted.)" in refused.stdout + refused.stderr
    assert not (tmp_path / "models").exists()
    foreseen = playbook(tmp_path, "--check", **variables)
    assert (foreseen.returncode, site.asked_cdn) == (0, []), foreseen.stdout + foreseen.stderr
    assert not (tmp_path / "models").exists()
    first = playbook(tmp_path, **variables)
    assert first.returncode == 0, first.stdout + first.stderr
    assert {p: c for p, c in contents(tmp_path / "models/nano").items() if p != mm.MANIFEST_NAME} == VISIBLE
    assert (tmp_path / f"state/models/nano-{REVISION}.json").is_file()
    assert TOKEN not in first.stdout + first.stderr
    asked, asked_cdn = len(site.asked), len(site.asked_cdn)
    token.unlink()
    second = playbook(tmp_path, **variables)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "changed=0" in second.stdout
    assert (len(site.asked), len(site.asked_cdn)) == (asked, asked_cdn)


def test_source_and_repository_together_are_refused(tmp_path: Path) -> None:
    entry = {"name": "nano", "revision": REVISION, "repository": REPOSITORY}
    for models, directory, text in (
        ([{**entry, "source": str(tmp_path)}], str(tmp_path), "either source or repository"),
        ([entry], "", "model_store_manifest_directory"),
    ):
        done = playbook(tmp_path, model_store_models=models, model_store_manifest_directory=directory)
        assert (done.returncode, text in done.stdout) == (2, True), done.stdout + done.stderr
