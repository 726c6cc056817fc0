# Apache-2.0 (see LICENSE)
"""Models as lists of files with sha256: make the list once, judge a node against it, decide who copies from whom.

A manifest is ``{"format": 1, "name", "revision", "files": [{"path", "size_bytes", "sha256"}]}``; ``path`` is relative
with forward slashes, ``size_bytes`` may be null where only checksums are known (a list in the format of sha256sum).
Names that begin with a dot are never part of a model: caches of download tools, and our own files.
"""

from __future__ import annotations

import hashlib
import ipaddress
import json
import mmap
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FORMAT = 1
GIB = 1024**3
MANIFEST_NAME = ".goodput-manifest.json"
PART_PREFIX = ".goodput-part-"
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
SHA256 = re.compile(r"[0-9a-f]{64}")
CHUNK_BYTES = 4 * 1024 * 1024
# Arguments of every module that works on a node's models.
NODE_ARGUMENTS: dict[str, dict[str, Any]] = {
    "models": {"type": "list", "elements": "dict", "required": True},
    "directory": {"type": "path", "default": "/srv/goodput/models"},
    "cache": {"type": "path", "default": "/var/lib/goodput/model_store.json"},
}


class ModelError(Exception):
    """A refusal: what was found, what is required, what to do."""

    def __init__(self, found: str, required: str, remedy: str) -> None:
        super().__init__(f"found {found}; required: {required}; fix: {remedy}")


@dataclass(frozen=True)
class ModelFile:
    path: str
    sha256: str
    size_bytes: int | None = None


@dataclass(frozen=True)
class Model:
    name: str
    revision: str
    files: tuple[ModelFile, ...]

    def as_dict(self) -> dict[str, Any]:
        files = [{"path": f.path, "size_bytes": f.size_bytes, "sha256": f.sha256} for f in self.files]
        return {"format": FORMAT, "name": self.name, "revision": self.revision, "files": files}

    @property
    def known_bytes(self) -> int:
        return sum(f.size_bytes or 0 for f in self.files)


def checked_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise ModelError(
            f"model name {name!r}",
            "letters, digits, dot, underscore and dash, beginning with a letter or digit",
            "the name is the folder below /srv/goodput/models, choose it without the organisation",
        )
    return name


def checked_path(path: str) -> str:
    parts = path.split("/")
    if (
        not path
        or path.startswith("/")
        or any(p in ("", ".", "..") or p.startswith(".") for p in parts)
        or "\0" in path
    ):
        raise ModelError(f"path {path!r} in a manifest", "a relative path without hidden parts", "remove it")
    return path


def parse_manifest(text: str, name: str, revision: str, where: str = "manifest") -> Model:
    """A manifest of ours (JSON), or lines of sha256sum. ModelError if it is another model's or revision's."""
    if not text.lstrip().startswith("{"):
        return Model(checked_name(name), revision, _from_sha256sum(text, where))
    try:
        data = json.loads(text)
        files = tuple(
            ModelFile(
                checked_path(str(f["path"])),
                str(f["sha256"]),
                None if f["size_bytes"] is None else int(f["size_bytes"]),
            )
            for f in data["files"]
        )
        found = (data["format"], data["name"], data["revision"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{where} damaged ({error!r})", f"a manifest of format {FORMAT}", "remove it") from error
    bad = [f.path for f in files if not SHA256.fullmatch(f.sha256)]
    if bad or not files or len({f.path for f in files}) != len(files):
        raise ModelError(
            f"{where} damaged ({', '.join(bad) or 'no files or one twice'})", "a sha256 for each file once", "remove it"
        )
    if found != (FORMAT, name, revision):
        raise ModelError(
            f"{where} of format {found[0]}, model {found[1]}, revision {found[2]}",
            f"format {FORMAT}, model {name}, revision {revision}",
            "correct model_store_models, or remove that file if the folder really holds this revision",
        )
    return Model(checked_name(name), revision, files)


def _from_sha256sum(text: str, where: str) -> tuple[ModelFile, ...]:
    files = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        found = re.fullmatch(r"([0-9a-fA-F]{64}) [ *](?:\./)?(.+)", line.strip())
        if not found:
            raise ModelError(
                f"{line[:80]!r} in line {number} of {where}", "lines of sha256sum", "make it with sha256sum"
            )
        if not any(part.startswith(".") for part in found[2].split("/")):
            files.append(ModelFile(checked_path(found[2]), found[1].lower()))
    if not files:
        raise ModelError(f"no files in {where}", "lines of sha256sum or a manifest", "make it with sha256sum")
    return tuple(files)


def list_files(folder: str) -> list[str]:
    """Relative paths of the regular files below a folder, links followed (download tools link into a cache)."""
    found = []
    for current, folders, names in os.walk(folder, followlinks=True):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith(".") and os.path.isfile(os.path.join(current, name)):
                found.append(os.path.relpath(os.path.join(current, name), folder))
    return sorted(found)


def sha256_of(path: str) -> str:
    """Checksum read past the page cache where the filesystem allows it.

    Hashing 100 GB through the page cache of a Spark fills the memory that the GPU shares, and has switched nodes off.
    """
    digest = hashlib.sha256()
    flags = os.O_RDONLY | os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags | os.O_DIRECT)
    except OSError:
        descriptor = os.open(path, flags)
    try:
        with mmap.mmap(-1, CHUNK_BYTES) as buffer, memoryview(buffer) as view:
            offset = 0
            while True:
                count = os.preadv(descriptor, [view], offset)
                digest.update(view[:count])
                offset += count
                # Only the last read of a file is short; another one could not go on at an unaligned offset.
                if count < CHUNK_BYTES:
                    break
            if offset != os.fstat(descriptor).st_size:
                raise OSError(f"{path} changed while it was read, or could not be read to its end")
            drop_cache(descriptor)
    finally:
        os.close(descriptor)
    return digest.hexdigest()


def drop_cache(descriptor: int) -> None:
    """Tell the kernel that what this descriptor read or wrote is not needed again."""
    with suppress(OSError):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def write_atomic(path: str, text: str, mode: int = 0o644) -> None:
    temporary = f"{path}.goodput-tmp-{os.getpid()}"
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(text)
        stream.flush()
        os.fchmod(stream.fileno(), mode)
        os.fsync(stream.fileno())
    os.replace(temporary, path)


# --- on the controller ---------------------------------------------------------------------------------------------


def of_source(name: str, revision: str, source: str, manifest_file: str = "") -> Model:
    """The manifest of a model: read from ``manifest_file``, else from the source folder, else made there once.

    Reads no file content unless it has to make the manifest. ModelError if source and manifest disagree.
    """
    checked_name(name)
    if not revision:
        raise ModelError(
            f"no revision for model {name}", "the commit it was downloaded from", "set it in model_store_models"
        )
    where = manifest_file or (os.path.join(source, MANIFEST_NAME) if source else "")
    if not where:
        raise ModelError(
            f"neither source nor manifest nor repository for model {name}",
            "one of them",
            "set it in model_store_models",
        )
    if source and not os.path.isdir(source):
        raise ModelError(
            f"no folder {source}", f"the files of model {name} on the controller", "download it there first"
        )
    try:
        model = parse_manifest(Path(where).read_text(), name, revision, where)
    except FileNotFoundError:
        if manifest_file:
            raise ModelError(
                f"no file {manifest_file}", f"the manifest of model {name}", "correct model_store_models"
            ) from None
        model = make(name, revision, source)
        try:
            write_atomic(where, json.dumps(model.as_dict(), indent=1) + "\n")
        except OSError as error:
            raise ModelError(
                f"{source} not writable ({error.strerror})",
                f"a place for the manifest of model {name}",
                "make one with `sha256sum` elsewhere and set manifest in model_store_models",
            ) from error
    if source:
        _compare_source(model, source, where)
    return model


def make(name: str, revision: str, source: str) -> Model:
    paths = list_files(source)
    if not paths:
        raise ModelError(f"no files in {source}", f"the files of model {name}", "download it there first")
    files = []
    for path in paths:
        full = os.path.realpath(os.path.join(source, path))
        files.append(ModelFile(checked_path(path), sha256_of(full), os.stat(full).st_size))
    return Model(name, revision, tuple(files))


def _compare_source(model: Model, source: str, where: str) -> None:
    there = set(list_files(source))
    differences = [f"{f.path} is missing" for f in model.files if f.path not in there]
    differences += [f"{path} is not listed" for path in sorted(there - {f.path for f in model.files})]
    for file in model.files:
        if file.path in there and file.size_bytes is not None:
            size = os.stat(os.path.join(source, file.path)).st_size
            if size != file.size_bytes:
                differences.append(f"{file.path} has {size} bytes, not {file.size_bytes}")
    if differences:
        raise ModelError(
            f"{source} changed since {where} was made: {'; '.join(differences[:5])}",
            f"the files of revision {model.revision}",
            f"restore them, or remove {where} and set the new revision in model_store_models",
        )


# --- on a node -----------------------------------------------------------------------------------------------------

# path -> size_bytes, mtime_ns, ctime_ns, inode, sha256
Cache = dict[str, list[Any]]


def read_cache(path: str) -> Cache:
    try:
        data = json.loads(Path(path).read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return dict(data) if isinstance(data, dict) else {}


def stamp(info: os.stat_result) -> list[Any]:
    """What changes when a file is written, even if size and modification time are put back: ctime can not be set."""
    return [info.st_size, info.st_mtime_ns, info.st_ctime_ns, info.st_ino]


@dataclass
class Judged:
    """One model on one node. ``wrong`` has file, found and required; ``get`` is what must be copied."""

    name: str
    revision: str
    folder: str
    missing: list[str] = field(default_factory=list)
    wrong: list[dict[str, str]] = field(default_factory=list)
    stale: list[str] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    unrecorded: list[str] = field(default_factory=list)
    manifest_differs: bool = False
    needed_bytes: int = 0
    hashed_bytes: int = 0
    entries: Cache = field(default_factory=dict)

    @property
    def get(self) -> list[str]:
        return sorted(self.missing + [item["path"] for item in self.wrong])

    @property
    def pending(self) -> bool:
        return bool(self.get or self.stale or self.unrecorded or self.manifest_differs)


def judge(model: Model, root: str, cache: Cache, full: bool) -> Judged:
    """Compare a model's folder with its manifest. Without ``full`` a file whose stamp is in ``cache`` is not read."""
    folder = f"{root}/{model.name}"
    judged = Judged(model.name, model.revision, folder)
    for file in model.files:
        path = f"{folder}/{file.path}"
        try:
            info = os.lstat(path)
        except (FileNotFoundError, NotADirectoryError):
            judged.missing.append(file.path)
            judged.needed_bytes += _lacking_bytes(folder, file)
            continue
        required = f"sha256 {file.sha256}"
        found = ""
        if not stat.S_ISREG(info.st_mode):
            found = "not a regular file"
        elif file.size_bytes is not None and info.st_size != file.size_bytes:
            found = f"{info.st_size} bytes"
            required = f"{file.size_bytes} bytes with {required}"
        else:
            known = cache.get(path)
            if full or not known or known[:4] != stamp(info):
                digest = sha256_of(path)
                judged.hashed_bytes += info.st_size
            else:
                digest = str(known[4])
            if not known or known[:4] != stamp(info):
                judged.unrecorded.append(file.path)
            if digest == file.sha256:
                judged.entries[path] = [*stamp(info), digest]
            else:
                found = f"sha256 {digest}"
        if found:
            judged.wrong.append({"file": path, "found": found, "required": required, "path": file.path})
            judged.needed_bytes += _lacking_bytes(folder, file)
    listed = {file.path for file in model.files}
    former = _former_files(folder)
    there = list_files(folder) if os.path.isdir(folder) else []
    judged.stale = [path for path in there if path in former and path not in listed]
    judged.unlisted = [path for path in there if path not in former and path not in listed]
    judged.manifest_differs = node_manifest(folder) != model.as_dict()
    return judged


def _lacking_bytes(folder: str, file: ModelFile) -> int:
    """What copying a file still writes: a part of an earlier run is there already, a longer one is thrown away."""
    size = file.size_bytes or 0
    try:
        there = os.lstat(part_path(folder, file)).st_size
    except (FileNotFoundError, NotADirectoryError):
        return size
    return size - there if there <= size else size


def node_manifest(folder: str) -> dict[str, Any]:
    try:
        data = json.loads(Path(folder, MANIFEST_NAME).read_text())
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return {}
    return dict(data) if isinstance(data, dict) else {}


def _former_files(folder: str) -> set[str]:
    return {str(f.get("path")) for f in node_manifest(folder).get("files", [])}


def models_of(entries: Iterable[Mapping[str, Any]]) -> list[Model]:
    """Models as ``as_dict`` wrote them, checked again: a node trusts nothing that could leave its folder."""
    return [parse_manifest(json.dumps(entry), str(entry["name"]), str(entry["revision"])) for entry in entries]


def problems(judged: Judged) -> list[dict[str, str]]:
    """found, required and remedy for each file that is not as the manifest says."""
    remedy = "`ansible-playbook site.yml --tags model_store` restores it"
    rule = f"(revision {judged.revision})"
    rows = [
        {
            "found": f"no file {judged.folder}/{path}",
            "required": f"every file of model {judged.name} {rule}",
            "remedy": remedy,
        }
        for path in judged.missing
    ]
    rows += [
        {"found": f"{item['file']}: {item['found']}", "required": f"{item['required']} {rule}", "remedy": remedy}
        for item in judged.wrong
    ]
    return rows


def space_problem(root: str, needed_bytes: int, free_bytes: int, reserve_bytes: int) -> dict[str, str] | None:
    if needed_bytes == 0 or free_bytes >= needed_bytes + reserve_bytes:
        return None
    return {
        "found": f"{free_bytes / GIB:.2f} GiB free for {root}",
        "required": f"{needed_bytes / GIB:.2f} GiB of models to copy and {reserve_bytes / GIB:.2f} GiB for the system",
        "remedy": "free space, or set model_store_directory to a larger filesystem",
    }


def place(part: str, file: ModelFile, folder: str) -> list[Any]:
    """Check a finished part and give it its name; its cache entry. ModelError, and no part, if the sha256 differs."""
    os.chmod(part, 0o644)
    digest = sha256_of(part)
    if digest != file.sha256:
        os.unlink(part)
        raise ModelError(
            f"sha256 {digest} for {folder}/{file.path} after copying",
            f"{file.sha256}",
            "run it again; if it stays, its source on the controller or the hub is damaged: compare with the manifest",
        )
    target = f"{folder}/{file.path}"
    if os.path.isdir(target) and not os.path.islink(target):
        raise ModelError(f"a folder at {target}", "a file", "move it away")
    os.makedirs(os.path.dirname(target), mode=0o755, exist_ok=True)
    os.replace(part, target)
    return [*stamp(os.stat(target)), digest]


def part_path(folder: str, file: ModelFile) -> str:
    """Where a file is while it is being copied; the same in the next run, which goes on there."""
    return f"{folder}/{PART_PREFIX}{file.sha256}"


def finish(models: Sequence[Model], root: str, cache_path: str, cache: Cache) -> list[Judged]:
    """Remove files of a former revision, write each complete model's manifest, and the cache."""
    results = []
    fresh: Cache = {}
    for model in models:
        judged = judge(model, root, cache, full=False)
        for path in judged.stale:
            os.unlink(f"{judged.folder}/{path}")
        if os.path.isdir(judged.folder) and not judged.get:
            for name in os.listdir(judged.folder):
                if name.startswith(PART_PREFIX):
                    os.unlink(f"{judged.folder}/{name}")
            write_atomic(f"{judged.folder}/{MANIFEST_NAME}", json.dumps(model.as_dict(), indent=1) + "\n")
        fresh |= judged.entries
        results.append(judged)
    Path(cache_path).parent.mkdir(mode=0o755, parents=True, exist_ok=True)
    write_atomic(cache_path, json.dumps(fresh, indent=1) + "\n", 0o600)
    return results


def addresses_in(ip_json: str, subnets: Iterable[str]) -> list[str]:
    """IPv4 addresses of ``ip -json -4 address`` in one of the subnets whose link is up, in subnet order."""
    networks = [ipaddress.ip_network(subnet) for subnet in subnets]
    own = [
        ipaddress.ip_address(info["local"])
        for link in json.loads(ip_json or "[]")
        if link.get("operstate") in ("UP", "UNKNOWN")
        for info in link.get("addr_info", [])
        if info.get("family") == "inet"
    ]
    return [str(address) for network in networks for address in own if address in network]


# --- who copies from whom ------------------------------------------------------------------------------------------


def transfer_plan(
    nodes: Sequence[str], results: Mapping[str, Mapping[str, Any]], sourceless: Sequence[str]
) -> dict[str, Any]:
    """Who is filled by the controller (push), which node then shares, and who fetches from it.

    ``results[node]`` has ``get_files`` (count), ``pending`` and ``rail_addresses``; ``sourceless`` names models with
    neither a source nor a repository. Without a common rail every node is filled from there.
    """
    pending = [node for node in nodes if results[node]["pending"]]
    copying = [node for node in nodes if results[node]["get_files"]]
    complete = [node for node in nodes if not results[node]["get_files"]]
    railed = [node for node in nodes if results[node].get("rail_addresses")]
    seeds = [node for node in complete if node in railed] or [node for node in copying if node in railed]
    seed = seeds[0] if seeds else ""
    fetch = [node for node in copying if node != seed and node in railed] if seed else []
    push = [node for node in pending if node not in fetch]
    if sourceless and any(node in copying for node in push):
        raise ModelError(
            (
                f"model {', '.join(sourceless)} incomplete on {', '.join(n for n in push if n in copying)}, "
                "no source for it and no complete node on the rails"
            ),
            "one of them",
            "set source or repository in model_store_models",
        )
    return {"push": push, "share": seed if fetch else "", "fetch": fetch}
