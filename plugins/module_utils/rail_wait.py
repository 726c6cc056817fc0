# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Wait for the rails before LMCache's server starts. Runs on a node; standard library only.

UCX looks at the rails once, when the server starts: one without a link or an address then is left out until the next
start. Nothing else waits for them, because a boot must not hang on a cable. So this does, for a stated time, and the
server starts in any case: with one rail, or with no peer, it still has its own cache, and no server at all has none.
"""

from __future__ import annotations

import argparse
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path

SYSFS = Path("/sys/class/infiniband")
ACTIVE = "4: ACTIVE"
POLL_SECONDS = 1.0
#: How the journal is told that a line is a warning.
WARNING = "<4>"


def has_address(address: str) -> bool:
    """Whether an interface of this node has ``address``."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def missing(rail: str, sysfs: Path = SYSFS, bound: Callable[[str], bool] = has_address) -> str:
    """What ``DEVICE=ADDRESS`` lacks; empty when it is ready. Without an address only the link is judged."""
    device, _, address = rail.partition("=")
    try:
        state = (sysfs / device / "ports/1/state").read_text().strip()
    except OSError:
        return f"{device}: no such RDMA device"
    if state != ACTIVE:
        return f"{device}: port {state}"
    return f"{device}: no address {address}" if address and not bound(address) else ""


def wait(
    rails: list[str],
    limit_seconds: float,
    lacks: Callable[[str], str] = missing,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> tuple[list[str], float]:
    """(what is missing at the end, seconds waited)."""
    began = clock()
    while True:
        found = [text for text in map(lacks, rails) if text]
        waited = clock() - began
        if not found or waited >= limit_seconds:
            return found, waited
        sleep(POLL_SECONDS)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rail", action="append", default=[], metavar="DEVICE=ADDRESS")
    parser.add_argument("--seconds", type=float, required=True, help="how long to wait")
    options = parser.parse_args(argv)
    found, waited = wait(options.rail, options.seconds)
    if found:
        print(
            f"{WARNING}rails: found {'; '.join(found)} after {waited:.0f} s; required: link and address on each of "
            f"{len(options.rail)}; LMCache starts without; fix: plug the cable in or run the role rdma, then "
            "`systemctl restart goodput-lmcache`, which does not look again by itself",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
