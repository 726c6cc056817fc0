# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Counters of an RDMA port, read through whichever of three sources the device has.

| source | unit | who has it |
|---|---|---|
| counters/port_xmit_data, port_rcv_data | value x 4 = bytes, headers included | ConnectX, and the newest rdma_rxe |
| hw_counters/sent_bytes, rcvd_bytes | bytes | newer rdma_rxe |
| hw_counters/sent_pkts, rcvd_pkts | packets | rdma_rxe |

On ConnectX these count RoCE only, for each function; kernel TCP on the same netdev does not move them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple


class Source(NamedTuple):
    """Where a port's traffic is counted; `factor` turns the value into `unit`."""

    name: str
    sent: str
    received: str
    factor: int
    unit: str


SOURCES = (
    Source("port_xmit_data", "counters/port_xmit_data", "counters/port_rcv_data", 4, "bytes"),
    Source("sent_bytes", "hw_counters/sent_bytes", "hw_counters/rcvd_bytes", 1, "bytes"),
    Source("sent_pkts", "hw_counters/sent_pkts", "hw_counters/rcvd_pkts", 1, "packets"),
)

# Events that mean loss, resending or congestion. ConnectX: linux mlx5 counters.c; rxe: rxe_hw_counters.c.
LOSS_COUNTERS = (
    # ConnectX
    "roce_adp_retrans",
    "roce_adp_retrans_to",
    "packet_seq_err",
    "implied_nak_seq_err",
    "out_of_sequence",
    "out_of_buffer",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "req_transport_retries_exceeded",
    "req_rnr_retries_exceeded",
    "np_cnp_sent",
    "np_ecn_marked_roce_packets",
    "rp_cnp_handled",
    # Soft-RoCE
    "out_of_seq_request",
    "rcvd_seq_err",
    "rcvd_rnr_err",
    "send_rnr_err",
    "retry_exceeded_err",
    "retry_rnr_exceeded_err",
    "completer_retry_err",
    "send_err",
    # both
    "duplicate_request",
)


def read_int(path: Path) -> int | None:
    """The integer in a sysfs file, or None where the file is missing, empty or refuses to be read."""
    try:
        return int(path.read_text().strip())
    except (OSError, ValueError):
        return None


def port_dir(device: str, sysfs_root: Path = Path("/sys")) -> Path:
    """Folder of port 1, the only port of a RoCE function."""
    return sysfs_root / "class/infiniband" / device / "ports/1"


def source_of(device: str, sysfs_root: Path = Path("/sys")) -> Source | None:
    """The best source that this device has, or None."""
    port = port_dir(device, sysfs_root)
    for source in SOURCES:
        if read_int(port / source.sent) is not None and read_int(port / source.received) is not None:
            return source
    return None


def traffic(device: str, source: Source, sysfs_root: Path = Path("/sys")) -> tuple[int, int]:
    """(sent, received) in the source's unit."""
    port = port_dir(device, sysfs_root)
    return (
        (read_int(port / source.sent) or 0) * source.factor,
        (read_int(port / source.received) or 0) * source.factor,
    )


def losses(device: str, sysfs_root: Path = Path("/sys")) -> dict[str, int]:
    """Every loss counter that the device has."""
    folder = port_dir(device, sysfs_root) / "hw_counters"
    values = {name: read_int(folder / name) for name in LOSS_COUNTERS}
    return {name: value for name, value in values.items() if value is not None}


def netdev_bytes(sysfs_root: Path = Path("/sys")) -> dict[str, int]:
    """Bytes sent and received by the kernel's network stack, for each netdev but lo."""
    found: dict[str, int] = {}
    for folder in sorted((sysfs_root / "class/net").glob("*")):
        sent, received = (read_int(folder / "statistics" / name) for name in ("tx_bytes", "rx_bytes"))
        if folder.name != "lo" and sent is not None and received is not None:
            found[folder.name] = sent + received
    return found


def tcp_segments(proc_root: Path = Path("/proc")) -> int:
    """Segments sent by TCP on this machine (OutSegs of /proc/net/snmp); 0 where it cannot be read."""
    try:
        lines = [line.split() for line in (proc_root / "net/snmp").read_text().splitlines() if line.startswith("Tcp:")]
        return int(lines[1][lines[0].index("OutSegs")])
    except (OSError, ValueError, IndexError):
        return 0


def delta(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, int]:
    """after - before for the names in both; a counter that went backwards was reset and counts from zero."""
    return {
        name: after[name] - before[name] if after[name] >= before[name] else after[name]
        for name in before
        if name in after
    }
