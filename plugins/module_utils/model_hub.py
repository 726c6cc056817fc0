# Apache-2.0 (see LICENSE)
"""Models from a hub that speaks Hugging Face's HTTP API: list a revision, fetch its files, each from where it stopped.

Names as huggingface_hub 1.29 reads them (hf_api.py ``model_info``, ``RepoSibling``, ``BlobLfsInfo``; file_download.py):
``GET ENDPOINT/api/models/REPO/revision/REV?blobs=true`` answers ``sha`` and ``siblings`` with ``rfilename``, ``size``,
``blobId`` and, for large files, ``lfs`` with ``sha256`` and ``size``. ``GET ENDPOINT/REPO/resolve/REV/PATH`` is a file;
a large one answers with a redirect to another host, which must never see the token.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import json
import os
import re
import ssl
import stat
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from ansible_collections.goodput.spark.plugins.module_utils.model_manifest import (
    CHUNK_BYTES,
    SHA256,
    Model,
    ModelError,
    ModelFile,
    checked_name,
    checked_path,
    parse_manifest,
    write_atomic,
)
from ansible_collections.goodput.spark.plugins.module_utils.model_transfer import copy, fill

ENDPOINT = "https://huggingface.co"
# huggingface_hub constants.py MAX_HTTP_DOWNLOAD_SIZE: the hub does not serve larger files by plain HTTP.
LARGEST_FILE_BYTES = 50 * 1000**3
CONNECTIONS_MAX = 16
COMMIT = re.compile(r"[0-9a-f]{40}")
REPOSITORY = re.compile(r"[A-Za-z0-9_][\w.-]*/[A-Za-z0-9_][\w.-]*", re.ASCII)
# Seconds left of a rate limit's window (huggingface_hub utils/_http.py): "api";r=0;t=55
RATE_LIMIT = re.compile(r";\s*r\s*=\s*0\s*;\s*t\s*=\s*(\d+)")
TIMEOUT_S = 60.0
# Failures without one new byte in between; the pause doubles, and a server that names one is believed up to a limit.
ATTEMPTS = 5
PAUSE_S = 2.0
PAUSE_MAX_S = 300.0
DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EIO})
AGAIN = "run it again: it goes on where it stopped"
T = TypeVar("T")
Wait = Callable[[float], Any]


class Again(ModelError):
    """A refusal that another try may cure, after ``seconds`` if the server said so."""

    seconds = 0.0


class Stopped(Exception):
    """Another file failed."""


class NothingMore(Exception):
    """The part is as long as the file, or longer; its checksum will tell."""


def origin(url: str) -> tuple[str, str, int]:
    parts = urllib.parse.urlsplit(url)
    return parts.scheme, parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)


class _Redirect(urllib.request.HTTPRedirectHandler):
    """Follow, and bring the token only to the host that it is for."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        if req.type == "https" and not newurl.startswith("https:"):
            raise ModelError(f"a redirect from {req.host} to {newurl.split('?')[0]}", "https", "ask the hub's owner")
        new = super().redirect_request(req, fp, code, msg, headers, newurl)
        # An unredirected header is not in the new request.
        token = req.unredirected_hdrs.get("Authorization")
        if new and token and origin(newurl) == origin(req.full_url):
            new.add_unredirected_header("Authorization", token)
        return new


@dataclass(frozen=True)
class Hub:
    """Where models come from. ModelError for an endpoint that is none, or would show the token to everybody."""

    endpoint: str = ENDPOINT
    token: str = field(default="", repr=False)

    def __post_init__(self) -> None:
        parts = urllib.parse.urlsplit(self.endpoint)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
            raise ModelError(f"hub {self.endpoint!r}", "https://HOST", "correct model_store_hub_endpoint")
        if self.token and parts.scheme == "http" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
            raise ModelError(
                f"hub {self.endpoint} and a token",
                "https, because everybody on the way could read the token",
                "correct model_store_hub_endpoint, or leave model_store_hub_token_file empty",
            )

    def open(self, path: str, repository: str, start: int = 0) -> http.client.HTTPResponse:
        """The answer to one GET. Again or ModelError, with found, required and remedy, if it is not the content."""
        request = urllib.request.Request(self.endpoint.rstrip("/") + path, headers={"User-Agent": "goodput.spark"})
        if self.token:
            request.add_unredirected_header("Authorization", f"Bearer {self.token}")
        if start:
            request.add_header("Range", f"bytes={start}-")
        what = f"{request.host}{urllib.parse.urlsplit(path).path}"
        with _network(what):
            try:
                answer: http.client.HTTPResponse = urllib.request.build_opener(_Redirect).open(
                    request, timeout=TIMEOUT_S
                )
            except urllib.error.HTTPError as error:
                with error:
                    if start and error.code == 416:
                        raise NothingMore from None
                    raise self._refusal(error, what, repository) from None
        encoding = answer.headers.get("Content-Encoding", "identity")
        if encoding != "identity":
            answer.close()
            raise ModelError(f"{what} encoded as {encoding}", "the file as it is", "set another hub or no proxy")
        return answer

    def _refusal(self, error: urllib.error.HTTPError, what: str, repository: str) -> ModelError:
        said = error.headers.get("X-Error-Message") or error.headers.get("X-Error-Code") or error.reason
        found = f"answer {error.code} ({str(said)[:200]}) for {what}"
        page = f"{self.endpoint.rstrip('/')}/{repository}"
        elsewhere = origin(error.url) != origin(self.endpoint)
        if elsewhere or error.code in (408, 429) or error.code >= 500:
            remedy = AGAIN
            if elsewhere:
                # Signed addresses end after a while; the next try asks the hub for a new one.
                found = f"answer {error.code} from {origin(error.url)[1]} for {what}"
            elif error.code == 429:
                remedy += (
                    ", later" if self.token else ", later, or set model_store_hub_token_file: more is allowed then"
                )
            again = Again(found, "the file", remedy)
            named = error.headers.get("Retry-After", "")
            window = RATE_LIMIT.search(error.headers.get("RateLimit", ""))
            again.seconds = float(named) if named.isdigit() else float(window[1]) + 1 if window else 0.0
            return again
        if error.code == 401 and not self.token:
            return ModelError(
                f"{found}, without a token",
                "a repository that everybody may read, or a token",
                f"correct repository in model_store_models; if {page} is gated or private, accept its licence there "
                "and set model_store_hub_token_file",
            )
        if error.code in (401, 403):
            return ModelError(
                found,
                "a token whose account may read it",
                f"accept the licence on {page}, or put a token with read access into model_store_hub_token_file",
            )
        remedy = (
            "correct repository and revision in model_store_models" if error.code == 404 else "see the hub's answer"
        )
        return ModelError(found, "an answer with the content", remedy)


@contextmanager
def _network(what: str) -> Iterator[None]:
    """What goes wrong on the way is worth another try, except a certificate that does not fit, and our own disk."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        if isinstance(error, OSError) and error.errno in DISK_ERRORS:
            raise
        if isinstance(getattr(error, "reason", error), ssl.SSLCertVerificationError):
            raise ModelError(
                f"a certificate that does not fit for {what} ({error})",
                "a hub that proves who it is",
                "look at the node's clock, and whether a proxy is in between",
            ) from error
        raise Again(f"{what} broken off ({error})", "the whole answer", AGAIN) from error


def patiently(action: Callable[[], T], wait: Wait = time.sleep, position: Callable[[], int] = lambda: 0) -> T:
    """Try again with growing pauses. ``position`` says how far it came: whoever gets on is not counted as failing."""
    failures, before = 0, position()
    while True:
        try:
            return action()
        except Again as again:
            failures = 1 if position() > before else failures + 1
            before = position()
            if failures == ATTEMPTS:
                raise
            wait(min(again.seconds or PAUSE_S * 2 ** (failures - 1), PAUSE_MAX_S))


def read_token(path: str) -> str:
    """The token in a file that only its owner may read, or "" without a path. No message shows its content."""
    if not path:
        return ""
    full = os.path.expanduser(path)
    remedy = "correct model_store_hub_token_file"
    try:
        info = os.stat(full)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o077:
            raise ModelError(
                f"mode {stat.S_IMODE(info.st_mode):04o} of the token file {path}",
                "a file with mode 0600",
                f"`chmod 600 {path}`",
            )
        token = Path(full).read_text(encoding="utf-8", errors="replace").strip()
    except OSError as error:
        raise ModelError(f"no readable token file {path} ({error.strerror})", "the hub's token", remedy) from error
    if not re.fullmatch(r"[!-~]+", token):
        raise ModelError(f"the content of {path}", "one line with the token and nothing else", remedy)
    return token


# --- on the controller ---------------------------------------------------------------------------------------------


def of_repository(hub: Callable[[], Hub], name: str, revision: str, repository: str, where: str) -> Model:
    """The manifest of a revision: read from ``where``, else asked of the hub and written there once."""
    checked_name(name)
    if not COMMIT.fullmatch(revision):
        raise ModelError(
            f"revision {revision!r} of model {name}",
            "the 40 hex digits of a commit, because a branch or tag may move",
            "copy them from the history of the repository's files",
        )
    if not REPOSITORY.fullmatch(repository) or ".." in repository:
        raise ModelError(f"repository {repository!r} of model {name}", "OWNER/NAME", "correct model_store_models")
    try:
        return parse_manifest(Path(where).read_text(), name, revision, where)
    except FileNotFoundError:
        model = list_revision(hub(), name, revision, repository)
    Path(where).parent.mkdir(parents=True, exist_ok=True)
    write_atomic(where, json.dumps(model.as_dict(), indent=1) + "\n")
    return model


def list_revision(hub: Hub, name: str, revision: str, repository: str) -> Model:
    """Ask the hub for names, sizes and checksums. Small files have no sha256 there: they are read once to make it."""
    path = f"/api/models/{repository}/revision/{revision}?blobs=true"

    def ask() -> bytes:
        with hub.open(path, repository) as answer, _network(path):
            return answer.read()

    try:
        data = json.loads(patiently(ask))
        sha, siblings = str(data["sha"]), list(data["siblings"])
        files = [_file_of(hub, repository, revision, s) for s in siblings if not _hidden(str(s["rfilename"]))]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"an answer without {error} for {path}", "sha and siblings", "correct model_store_hub_endpoint"
        ) from error
    if sha != revision:
        raise ModelError(f"revision {sha} for {path}", revision, "set the full commit in model_store_models")
    model = Model(name, revision, tuple(sorted(files, key=lambda file: file.path)))
    # The same checks as for a manifest that is read again.
    return parse_manifest(json.dumps(model.as_dict()), name, revision, f"{repository} on {hub.endpoint}")


def _hidden(path: str) -> bool:
    return any(part.startswith(".") for part in path.split("/"))


def _file_of(hub: Hub, repository: str, revision: str, sibling: dict[str, Any]) -> ModelFile:
    path = checked_path(str(sibling["rfilename"]))
    lfs = sibling.get("lfs")
    if lfs:
        size, sha256 = int(lfs["size"]), str(lfs["sha256"])
        if not SHA256.fullmatch(sha256):
            raise ModelError(f"sha256 {sha256!r} for {path}", "64 hex digits", "correct model_store_hub_endpoint")
        if size > LARGEST_FILE_BYTES:
            raise ModelError(
                f"{path} with {size / 1000**3:.1f} GB in {repository}",
                f"at most {LARGEST_FILE_BYTES / 1000**3:.0f} GB a file, the hub's limit for plain HTTP",
                "download it on the controller with the hub's own tool and set source instead of repository",
            )
        return ModelFile(path, sha256, size)
    size, blob_id = int(sibling["size"]), str(sibling["blobId"])
    found, sha256 = patiently(lambda: _digests(hub, repository, revision, path, size))
    if found != blob_id:
        raise ModelError(
            f"git blob {found} for {path} of {repository}",
            blob_id,
            "run it again; if it stays, something between hub and controller changes files",
        )
    return ModelFile(path, sha256, size)


def _digests(hub: Hub, repository: str, revision: str, path: str, size: int) -> tuple[str, str]:
    """git's blob id (sha1 of "blob SIZE", a zero byte and the content) and sha256 of a file, read once."""
    blob = hashlib.sha1(b"blob %d\0" % size, usedforsecurity=False)
    digest = hashlib.sha256()
    with hub.open(file_url(repository, revision, path), repository) as answer, _network(path):
        done = 0
        while chunk := answer.read(CHUNK_BYTES):
            blob.update(chunk)
            digest.update(chunk)
            done += len(chunk)
        if done < size:
            raise ConnectionError(f"{done} of {size} bytes of {path}")
    return blob.hexdigest(), digest.hexdigest()


def file_url(repository: str, revision: str, path: str) -> str:
    return f"/{repository}/resolve/{revision}/{urllib.parse.quote(path)}"


# --- on a node -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Wanted:
    """One file for one node: ``folder`` is the model's."""

    repository: str
    revision: str
    folder: str
    file: ModelFile


class Progress:
    """Counts the bytes that arrived, says so now and then, and ends every connection once one has failed."""

    def __init__(self, total_bytes: int, say: Callable[[str], Any], every_s: float = 10.0) -> None:
        self.total_bytes, self.say, self.every_s = total_bytes, say, every_s
        self.bytes = 0
        self.stopped = threading.Event()
        self.started = self.said = time.monotonic()
        self._lock = threading.Lock()

    def seen(self, count: int) -> None:
        self.check()
        with self._lock:
            self.bytes += count
            now = time.monotonic()
            due = now - self.said >= self.every_s
            if due:
                self.said = now
        if due:
            self.say(self.text())

    def wait(self, seconds: float) -> None:
        self.stopped.wait(seconds)
        self.check()

    def check(self) -> None:
        if self.stopped.is_set():
            raise Stopped

    def text(self) -> str:
        """For a person: how much of how much, in what time, how fast."""
        seconds = max(time.monotonic() - self.started, 1e-3)
        mib = 1024**2
        return (
            f"{self.bytes / mib:.1f} of {self.total_bytes / mib:.1f} MiB in {seconds:.0f} s, "
            f"{self.bytes / mib / seconds:.1f} MiB/s"
        )


def fetch_files(hub: Hub, wanted: Sequence[Wanted], connections: int, progress: Progress) -> None:
    """Fetch, check and name the files, several at once. The first refusal ends all; parts stay for the next run."""
    if not 1 <= connections <= CONNECTIONS_MAX:
        raise ModelError(f"{connections} connections", f"1 to {CONNECTIONS_MAX}", "set model_store_hub_connections")
    # Files with the same content share one part, so they come one after the other. Large ones first.
    groups: dict[tuple[str, str], list[Wanted]] = {}
    for one in sorted(wanted, key=lambda one: -(one.file.size_bytes or 0)):
        groups.setdefault((one.folder, one.file.sha256), []).append(one)
    with ThreadPoolExecutor(connections) as pool:
        jobs = [pool.submit(_fetch_group, hub, group, progress) for group in groups.values()]
    for job in jobs:
        with suppress(Stopped):
            job.result()


def _fetch_group(hub: Hub, group: Sequence[Wanted], progress: Progress) -> None:
    try:
        for one in group:
            progress.check()
            fill(one.folder, one.file, partial(_rest, hub, one, progress))
    except BaseException:
        progress.stopped.set()
        raise


def _rest(hub: Hub, one: Wanted, progress: Progress, _start: int, descriptor: int) -> None:
    """Append what the part lacks, through as many broken connections as it takes while each brings something."""

    def position() -> int:
        return os.fstat(descriptor).st_size

    def receive() -> None:
        start, size = position(), one.file.size_bytes
        if size is not None and start == size:
            return
        path = file_url(one.repository, one.revision, one.file.path)
        with suppress(NothingMore), hub.open(path, one.repository, start) as answer:
            if start and answer.status == 200:
                # Not every server knows ranges: this is the whole file.
                os.ftruncate(descriptor, start := 0)
            elif start and not answer.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
                raise ModelError(f"another range of {path}", f"from byte {start}", "set another hub or no proxy")
            offered = answer.headers.get("Content-Length")
            length = int(offered or 0) if size is None else size - start
            if offered is not None and int(offered) != length:
                raise ModelError(
                    f"{offered} bytes of {path} from byte {start}",
                    f"{length} bytes",
                    "is it another hub, or a proxy's page?",
                )
            with _network(path):
                copy(answer, descriptor, length, one.file.path, progress.seen)

    patiently(receive, progress.wait, position)
