"""Share model files with the other nodes for a short time. Standard library only; run by the module model_share.

serve.py ADDRESS PORT ROOT: the token that every request must bring is read from $CREDENTIALS_DIRECTORY/token. Answers
``GET /MODEL/PATH`` with regular files below ROOT, from an offset where a Range header asks for one. Nothing is listed,
nothing is written. Integrity is not its task: the receiver checks each file against the controller's manifest.
"""

from __future__ import annotations

import hmac
import os
import re
import stat
import sys
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

CHUNK_BYTES = 64 * 1024 * 1024


class Share(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, address: tuple[str, int], root: str, token: str) -> None:
        super().__init__(address, Handler)
        self.root = os.path.realpath(root)
        self.token = token


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Share

    def do_GET(self) -> None:
        # As bytes: a header may hold any character.
        given = self.headers.get("Authorization", "").encode("latin-1", "replace")
        if not hmac.compare_digest(given, f"Bearer {self.server.token}".encode()):
            self.refuse(401)
            return
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).lstrip("/")
        if any(part.startswith(".") or not part for part in path.split("/")) or "\0" in path:
            self.refuse(404)
            return
        full = os.path.join(self.server.root, path)
        if os.path.realpath(full) != full:
            self.refuse(404)
            return
        try:
            descriptor = os.open(full, os.O_RDONLY | os.O_NOFOLLOW)
        except OSError:
            self.refuse(404)
            return
        try:
            self.send(descriptor)
        finally:
            os.close(descriptor)

    def send(self, descriptor: int) -> None:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            self.refuse(404)
            return
        asked = re.fullmatch(r"bytes=(\d{1,18})-", self.headers.get("Range", ""))
        start = int(asked[1]) if asked else 0
        if start > info.st_size:
            self.refuse(416)
            return
        self.send_response(206 if asked else 200)
        self.send_header("Content-Length", str(info.st_size - start))
        self.end_headers()
        self.wfile.flush()
        offset = start
        while offset < info.st_size:
            sent = os.sendfile(self.connection.fileno(), descriptor, offset, min(CHUNK_BYTES, info.st_size - offset))
            if sent == 0:
                break
            # The page cache of a Spark is the memory that its GPU uses.
            os.posix_fadvise(descriptor, offset, sent, os.POSIX_FADV_DONTNEED)
            offset += sent

    def refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


def main() -> None:
    address, port, root = sys.argv[1:4]
    token = Path(os.environ["CREDENTIALS_DIRECTORY"], "token").read_text().strip()
    with Share((address, int(port)), root, token) as server:
        server.serve_forever()


if __name__ == "__main__":
    main()
