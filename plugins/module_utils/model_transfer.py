# Apache-2.0 (see LICENSE)
"""Share a node's models for a short time, and fetch them from another node, each file from where it stopped."""

from __future__ import annotations

import http.client
import os
import secrets
import shutil
import socket
import time
import urllib.parse
from collections.abc import Callable
from pathlib import Path
from typing import IO

from ansible_collections.goodput.spark.plugins.module_utils.model_manifest import (
    ModelError,
    ModelFile,
    drop_cache,
    part_path,
    place,
)

UNIT = "goodput-model-share.service"
RUN_DIRECTORY = "/run/goodput-model-share"
CHUNK_BYTES = 4 * 1024 * 1024
Runner = Callable[[list[str]], tuple[int, str, str]]


def share_command(address: str, port: int, root: str, seconds: int, run_directory: str = RUN_DIRECTORY) -> list[str]:
    """A transient unit that ends by itself, has no rights beyond reading, and is gone after a reboot."""
    properties = [
        "DynamicUser=yes",
        f"LoadCredential=token:{run_directory}/token",
        f"RuntimeMaxSec={seconds}",
        "ProtectSystem=strict",
        "ProtectHome=yes",
        "PrivateDevices=yes",
        "NoNewPrivileges=yes",
        "CapabilityBoundingSet=",
        "RestrictAddressFamilies=AF_INET AF_UNIX",
    ]
    program = ["/usr/bin/python3", "-I", f"{run_directory}/serve.py", address, str(port), root]
    return ["systemd-run", f"--unit={UNIT}", "--collect", *[f"--property={p}" for p in properties], *program]


def start_share(run: Runner, address: str, port: int, root: str, seconds: int, script: str) -> str:
    """Start sharing; the token that requests must bring. A share that was left behind is ended first."""
    stop_share(run)
    os.makedirs(RUN_DIRECTORY, mode=0o755)
    token = secrets.token_hex(32)
    Path(RUN_DIRECTORY, "serve.py").write_text(script)
    os.chmod(f"{RUN_DIRECTORY}/serve.py", 0o644)
    descriptor = os.open(f"{RUN_DIRECTORY}/token", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w") as stream:
        stream.write(token)
    code, _out, err = run(share_command(address, port, root, seconds))
    if code == 0 and wait_for_port(address, port, 60):
        return token
    _code, journal, _err = run(["journalctl", "--unit", UNIT, "--lines", "20", "--no-pager", "--output", "cat"])
    stop_share(run)
    raise ModelError(
        f"nobody listening on {address}:{port} ({err.strip()})\n{journal.strip()}",
        "the node can share its models there",
        "set model_store_share_port to a free port",
    )


def stop_share(run: Runner) -> bool:
    """End sharing; whether anything was there."""
    there = os.path.isdir(RUN_DIRECTORY)
    if there:
        run(["systemctl", "stop", UNIT])
        shutil.rmtree(RUN_DIRECTORY)
    return there


def wait_for_port(address: str, port: int, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            socket.create_connection((address, port), timeout=2).close()
        except OSError:
            time.sleep(0.2)
        else:
            return True
    return False


def fetch(address: str, port: int, token: str, model: str, folder: str, file: ModelFile) -> None:
    """Get one file from a sharing node."""
    path = f"{model}/{file.path}"
    fill(folder, file, lambda start, descriptor: _get(address, port, token, path, start, descriptor))


def fill(folder: str, file: ModelFile, get: Callable[[int, int], None]) -> None:
    """Get one file into its part, from where an earlier run stopped, then check and place it.

    ``get(start, descriptor)`` appends what follows the first ``start`` bytes.
    """
    part = part_path(folder, file)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    try:
        start = os.fstat(descriptor).st_size
        if file.size_bytes is not None and start > file.size_bytes:
            os.ftruncate(descriptor, 0)
            start = 0
        get(start, descriptor)
        os.fsync(descriptor)
        drop_cache(descriptor)
    finally:
        os.close(descriptor)
    place(part, file, folder)


def _get(address: str, port: int, token: str, path: str, start: int, descriptor: int) -> None:
    url = "/" + urllib.parse.quote(path)
    connection = http.client.HTTPConnection(address, port, timeout=120)
    try:
        connection.request("GET", url, headers={"Authorization": f"Bearer {token}", "Range": f"bytes={start}-"})
        answer = connection.getresponse()
        if answer.status != 206:
            raise ModelError(
                f"answer {answer.status} for {path} from {address}:{port}",
                "206 and the file",
                "run it again; if it stays, look at `journalctl -u goodput-model-share` on that node",
            )
        copy(answer, descriptor, int(answer.headers["Content-Length"]), path)
    except (OSError, http.client.HTTPException) as error:
        raise ModelError(
            f"{path} broken off while copying from {address}:{port} ({error})",
            "the whole file",
            "run it again: it goes on where it stopped",
        ) from error
    finally:
        connection.close()


def copy(
    source: IO[bytes] | http.client.HTTPResponse,
    descriptor: int,
    length: int,
    path: str,
    seen: Callable[[int], None] = lambda count: None,
) -> None:
    """Write ``length`` bytes, telling the kernel now and then that it need not keep them; ``seen`` counts them."""
    done = cached = 0
    while done < length:
        chunk = source.read(min(CHUNK_BYTES, length - done))
        if not chunk:
            raise ConnectionError(f"{done} of {length} bytes of {path}")
        view = memoryview(chunk)
        while view:
            view = view[os.write(descriptor, view) :]
        done += len(chunk)
        cached += len(chunk)
        seen(len(chunk))
        if cached >= 16 * CHUNK_BYTES:
            os.fdatasync(descriptor)
            drop_cache(descriptor)
            cached = 0


def take(incoming: str, folder: str, file: ModelFile) -> None:
    """Place a file that the controller put on the node; it is moved, or copied from another filesystem."""
    part = part_path(folder, file)
    os.makedirs(folder, mode=0o755, exist_ok=True)
    if os.stat(incoming).st_dev == os.stat(folder).st_dev:
        os.replace(incoming, part)
        os.chown(part, os.geteuid(), os.getegid())
    else:
        with open(incoming, "rb") as source:
            descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
            try:
                copy(source, descriptor, os.fstat(source.fileno()).st_size, file.path)
                os.fsync(descriptor)
                drop_cache(descriptor)
            finally:
                os.close(descriptor)
        os.unlink(incoming)
    place(part, file, folder)
