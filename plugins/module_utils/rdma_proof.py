# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Proof that both rails carry RDMA: ib_write_bw on both in one window, judged by the counters of both ends.

One node serves, the other measures. Each end returns a plain dict; `verdict` judges the two and nothing else, so that
every state can be tested from recorded figures.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils import rdma_counters
from ansible_collections.goodput.spark.plugins.module_utils.rails import complete, functions, right_gid

Runner = Callable[[list[str]], tuple[int, str, str]]

FIRST_PORT = 18515
# ib_write_bw on GB10 fails above this (linux-rdma/perftest#394), so it is not an input.
MESSAGE_BYTES = 65536
# ib_write_bw -D leaves 2 s out at either end.
MARGIN_S = 2
UNIT = "goodput-rdma-proof"
SAMPLE_S = 0.25

# A rail below this share of the traffic is idle; two balanced rails carry 0.5 each.
IDLE_SHARE = 0.1
# Counted traffic must be at least this part of what ib_write_bw says it moved.
COUNTED_PART = 0.9
# Kernel traffic below this part of the payload can not have carried it.
KERNEL_PART = 0.1
# The two runs must overlap for at least this part of the asked duration.
WINDOW_PART = 0.5
# Gb/s of one rail: a link that came up degraded shows 8 to 25 with clean counters.
DEGRADED_GBPS = 25.0

_ROW = re.compile(r"^\s*(\d+)\s+(\d+)\s+([\d.]+)\s+([\d.]+)\s+([\d.]+)\s*$", re.MULTILINE)


def parse_output(text: str) -> dict[str, Any]:
    """Text of ib_write_bw --report_gbits -> {gbps, iterations, message_bytes, mtu_bytes, gid_index}; {} without a row.

    The unit is 1e9 bit/s; the average is the fourth column, the peak is not measured with -D.
    """
    rows = list(_ROW.finditer(text))
    if not rows:
        return {}
    row = rows[-1]
    mtu, gid = re.search(r"\bMtu\s*:\s*(\d+)", text), re.search(r"GID index\s*:\s*(\d+)", text)
    return {
        "gbps": float(row[4]),
        "iterations": int(row[2]),
        "message_bytes": int(row[1]),
        "mtu_bytes": int(mtu[1]) if mtu else None,
        "gid_index": int(gid[1]) if gid else None,
    }


def last_words(text: str) -> str:
    """The lines of a failed run that say why."""
    lines = [line.strip() for line in text.splitlines() if line.strip(" -\t")]
    telling = [
        line
        for line in lines
        if re.search(r"fail|error|unable|could|cannot|can't|no such|refused|timed out", line, re.I)
    ]
    return " | ".join((telling or lines)[-3:]) or "no output"


def common_window(samples: Sequence[tuple[float, Sequence[int]]]) -> dict[str, Any]:
    """The interval in which all rails moved: {seconds, moved}, moved per rail in the counters' unit.

    samples: (time in s, sent count of each rail). A rail moves from its first to its last increase; the first and last
    hundredth of its total do not count, since handshakes also move the counters.
    """
    if len(samples) < 2:
        return {"seconds": 0.0, "moved": []}
    rails = range(len(samples[0][1]))
    starts, ends = [], []
    for rail in rails:
        series = [counts[rail] for _time, counts in samples]
        total = series[-1] - series[0]
        if total <= 0:
            return {"seconds": 0.0, "moved": [0 for _ in rails]}
        starts.append(next(i for i, value in enumerate(series) if value - series[0] > total / 100))
        ends.append(next(i for i, value in enumerate(series) if value - series[0] >= total * 0.99))
    start, end = max(starts), min(ends)
    if end <= start:
        return {"seconds": 0.0, "moved": [0 for _ in rails]}
    return {
        "seconds": round(samples[end][0] - samples[start][0], 3),
        "moved": [samples[end][1][rail] - samples[start][1][rail] for rail in rails],
    }


def _remedy_for(words: str, rail: int, client: str, server: str) -> str:
    if "timed out after" in words:
        return (
            f"rail {rail} fell silent while the other may go on: on {client} and {server} look at: dmesg | grep -i "
            "'tx timeout\\|watchdog', and reboot the node that shows one"
        )
    if re.search(r"couldn't connect|connection refused|timed out|no route", words, re.I):
        return (
            f"the TCP handshake on rail {rail} failed: on {server} look at: systemctl status {UNIT}-{rail}, "
            "and let the rails through its firewall (sudo ufw allow in on NETDEV)"
        )
    if re.search(r"modify QP|GID|ah_attr", words, re.I):
        return f"run the verify part of the rdma role on {client} and {server}: the GID of rail {rail} moved"
    if re.search(r"status 12|syndrom 0x81|retry|transport", words, re.I):
        return f"packets of rail {rail} got lost: compare MTU, cable and rdma link on {client} and {server}"
    if re.search(r"cannot allocate|reg_?mr|ENOMEM", words, re.I):
        return "memory could not be registered: see kernel and memlock in docs/rdma.md"
    return f"run the verify part of the rdma role on {client} and {server}, then the proof again"


def _rate_gbps(result: Mapping[str, Any], seconds: int) -> float:
    """Payload rate in Gb/s.

    On a loaded emulated CPU ib_write_bw can not measure the clock and prints 0 for the rate; then it is the iterations,
    which it counts between the margins, over that time.
    """
    if not result or result["gbps"]:
        return float(result.get("gbps", 0.0))
    return round(float(result["iterations"] * result["message_bytes"] * 8 / (seconds - 2 * MARGIN_S) / 1e9), 6)


def _counted(end: Mapping[str, Any], rail: int, key: str) -> int:
    return int(end["after"]["rails"][rail][key]) - int(end["before"]["rails"][rail][key])


def verdict(client: Mapping[str, Any], server: Mapping[str, Any], limits: Mapping[str, Any]) -> dict[str, Any]:
    """Judge one proof.

    client: {node, seconds, before, after, outputs: [{rc, text}], window}; server: {node, before, after}.
    before and after: {rails: [{rail, source, unit, sent, received, losses}], netdev_bytes, tcp_segments}.
    limits: {min_rail_gbps, min_total_gbps, wire_ceiling_gbps, max_loss_events}.

    Returns {state, reason, remedy, client, server, rails, total_gbps, window_s, tcp}. state is one of ok, slow,
    rail_idle, tcp_fallback_suspected, measurement_fault, failed. The ceiling is the payload that a 200 Gb/s Ethernet
    carries with 64 KiB RDMA writes in 4096-byte packets: 200 x 4096 / (4096 + 82) = 196.0 Gb/s.
    """
    here, there = str(client["node"]), str(server["node"])
    pair = f"{here} -> {there}"
    rails: list[dict[str, Any]] = []
    for index, output in enumerate(client["outputs"]):
        before, after = client["before"]["rails"][index], client["after"]["rails"][index]
        result = parse_output(output["text"]) if output["rc"] == 0 else {}
        rails.append(
            {
                "rail": index,
                "gbps": _rate_gbps(result, int(client["seconds"])),
                "rate_from": "ib_write_bw" if result.get("gbps") else "iterations",
                "payload_bytes": result.get("iterations", 0) * result.get("message_bytes", 0),
                "mtu_bytes": result.get("mtu_bytes"),
                "gid_index": result.get("gid_index"),
                "source": after["source"],
                "unit": after["unit"],
                "sent": _counted(client, index, "sent"),
                "received": _counted(server, index, "received"),
                "losses": {
                    name: value
                    for end, side in ((client, here), (server, there))
                    for key, value in rdma_counters.delta(
                        end["before"]["rails"][index]["losses"], end["after"]["rails"][index]["losses"]
                    ).items()
                    if value
                    for name in (f"{side}:{key}",)
                },
                "netdev": before["netdev"],
            }
        )
    sent = sum(rail["sent"] for rail in rails)
    for rail in rails:
        rail["share"] = round(rail["sent"] / sent, 3) if sent else 0.0
    total_gbps = round(sum(rail["gbps"] for rail in rails), 3)
    payload_bytes = sum(rail["payload_bytes"] for rail in rails)
    kernel = rdma_counters.delta(client["before"]["netdev_bytes"], client["after"]["netdev_bytes"])
    segments = int(client["after"]["tcp_segments"]) - int(client["before"]["tcp_segments"])
    window = client["window"]
    by_bytes = all(rail["unit"] == "bytes" for rail in rails)

    def answer(state: str, reason: str, remedy: str = "") -> dict[str, Any]:
        return {
            "state": state,
            "reason": reason,
            "remedy": remedy,
            "client": here,
            "server": there,
            "rails": rails,
            "total_gbps": total_gbps,
            "window_s": window["seconds"],
            "tcp": _tcp(by_bytes, kernel, segments, payload_bytes, sent),
        }

    for index, output in enumerate(client["outputs"]):
        if output["rc"] != 0 or not rails[index]["payload_bytes"]:
            words = last_words(output["text"])
            return answer(
                "failed",
                f"rail {index} ({pair}): ib_write_bw ended with {output['rc']}: {words}",
                _remedy_for(words, index, here, there),
            )
    unread = [rail["rail"] for rail in rails if not rail["source"]]
    if unread:
        return answer(
            "measurement_fault",
            f"rail {unread[0]} of {here} has none of the counters "
            f"{', '.join(source.name for source in rdma_counters.SOURCES)}",
            "without counters RDMA can not be told from TCP; look at: ls /sys/class/infiniband/*/ports/1/*counters",
        )
    for rail in rails:
        expected = rail["payload_bytes"]
        needed = expected if rail["unit"] == "bytes" else expected // (rail["mtu_bytes"] or 4096)
        flat = [
            f"{node} {way} {rail[key]}"
            for node, way, key in ((here, "sent", "sent"), (there, "received", "received"))
            if rail[key] < COUNTED_PART * needed
        ]
        if flat and by_bytes and max(kernel.values(), default=0) >= expected / 2:
            carrier = max(kernel, key=lambda name: kernel[name])
            return answer(
                "tcp_fallback_suspected",
                f"rail {rail['rail']} ({pair}): ib_write_bw reports {expected} bytes, the RDMA "
                f"counters say {', '.join(flat)}, "
                f"and the kernel moved {kernel[carrier]} bytes through {carrier}",
                "the payload went through the kernel's TCP: check /dev/infiniband and rdma link on both nodes",
            )
        if rail["share"] < IDLE_SHARE or flat:
            return answer(
                "rail_idle",
                f"rail {rail['rail']} ({pair}) carried {rail['share']:.1%} of the traffic: "
                f"{', '.join(flat) or here + ' sent ' + str(rail['sent'])} {rail['unit']} of {needed} expected",
                "run the verify part of the rdma role: it names what is wrong with rail "
                f"{rail['rail']} of {here} or {there}",
            )
    ceiling_gbps = float(limits["wire_ceiling_gbps"])
    if total_gbps > ceiling_gbps:
        return answer(
            "measurement_fault",
            f"{' + '.join(str(rail['gbps']) for rail in rails)} = {total_gbps} Gb/s is more than the wire carries "
            f"({ceiling_gbps} Gb/s), so the two runs did not share one window",
            "run the proof again with rdma_proof_always=true and a longer rdma_proof_seconds",
        )
    least_s = WINDOW_PART * float(client["seconds"])
    if window["seconds"] < least_s:
        return answer(
            "measurement_fault",
            f"both rails moved together for {window['seconds']} s of {client['seconds']} s; {least_s} s are required",
            "run the proof again with rdma_proof_always=true and a longer rdma_proof_seconds",
        )
    lost = sum(sum(rail["losses"].values()) for rail in rails)
    if lost > int(limits["max_loss_events"]):
        worst = max(rails, key=lambda rail: sum(rail["losses"].values()))
        return answer(
            "failed",
            f"{lost} loss events ({limits['max_loss_events']} allowed), most on rail {worst['rail']}: "
            + ", ".join(f"{name} +{value}" for name, value in worst["losses"].items()),
            "a direct cable loses nothing: compare the MTU of both ends, reseat the cable, then "
            "look for one degraded side",
        )
    slow = [rail for rail in rails if rail["gbps"] < float(limits["min_rail_gbps"])]
    if slow or total_gbps < float(limits["min_total_gbps"]):
        named = ", ".join(f"rail {rail['rail']} {rail['gbps']} Gb/s" for rail in slow or rails)
        degraded = (
            any(rail["gbps"] <= DEGRADED_GBPS for rail in slow) and float(limits["min_rail_gbps"]) > DEGRADED_GBPS
        )
        return answer(
            "slow",
            f"{pair}: {named}, together {total_gbps} Gb/s; required {limits['min_rail_gbps']} per rail and "
            f"{limits['min_total_gbps']} together",
            (
                "the link came up degraded (about 13 Gb/s with clean counters is typical): reboot "
                "both nodes with the cable "
                "in; if it stays, shut both down and remove AC power for 60 s"
            )
            if degraded
            else "look for other traffic on the rails, a RoCE MTU below 4096 and a PCIe width below x4 (see verify)",
        )
    return answer(
        "ok",
        f"{pair}: {' + '.join(str(rail['gbps']) for rail in rails)} = {total_gbps} Gb/s in one "
        f"window of {window['seconds']} s",
    )


def _tcp(by_bytes: bool, kernel: Mapping[str, int], segments: int, payload_bytes: int, sent: int) -> dict[str, Any]:
    """How far TCP can be excluded: {excluded: yes|no|partly, note, netdev_bytes, tcp_segments}."""
    moved = sum(kernel.values())
    if not by_bytes:
        excluded = "partly"
        note = (
            "Soft-RoCE travels as UDP through the netdev, so netdev bytes can not exclude TCP; the device counted "
            f"{sent} RDMA packets while the node sent {segments} TCP segments"
        )
    elif moved <= KERNEL_PART * payload_bytes:
        excluded, note = "yes", f"the kernel moved {moved} bytes on all netdevs, RDMA {sent} bytes"
    else:
        excluded, note = "no", f"other traffic ran: the kernel moved {moved} bytes on all netdevs, RDMA {sent} bytes"
    return {"excluded": excluded, "note": note, "netdev_bytes": dict(kernel), "tcp_segments": segments}


# ---------------------------------------------------------------------------------------------------------------------
# On the node


def snapshot(
    rails: Sequence[Mapping[str, Any]], sysfs_root: Path = Path("/sys"), proc_root: Path = Path("/proc")
) -> dict[str, Any]:
    """Counters of this node's rails now; sent and received in the unit of the source."""
    found = []
    for rail in rails:
        device = str(rail["rdma_device"])
        source = rdma_counters.source_of(device, sysfs_root)
        sent, received = rdma_counters.traffic(device, source, sysfs_root) if source else (0, 0)
        found.append(
            {
                "rail": rail["rail"],
                "netdev": rail["netdev"],
                "source": source.name if source else "",
                "unit": source.unit if source else "",
                "sent": sent,
                "received": received,
                "losses": rdma_counters.losses(device, sysfs_root),
            }
        )
    return {
        "rails": found,
        "netdev_bytes": rdma_counters.netdev_bytes(sysfs_root),
        "tcp_segments": rdma_counters.tcp_segments(proc_root),
    }


def gid_indices(rails: Sequence[Mapping[str, Any]], sysfs_root: Path = Path("/sys")) -> list[int]:
    """The GID index of each rail's address, found now since it moves. ValueError names a rail without one."""
    known = {facts["rdma_device"]: facts for facts in functions(sysfs_root)}
    indices: list[int] = []
    for rail in rails:
        facts = known.get(str(rail["rdma_device"]))
        answer = {"rails": [facts] if facts else []}
        complete(answer, sysfs_root, {}, {})
        index = right_gid(facts["gids"], str(rail["address"]), str(rail["netdev"])) if facts else None
        if index is None:
            raise ValueError(
                f"rail {rail['rail']}: {rail['rdma_device']} has no RoCE v2 GID for "
                f"{rail['address']} on {rail['netdev']}"
            )
        indices.append(index)
    return indices


def command(rail: Mapping[str, Any], gid_index: int, seconds: int, queue_pairs: int, server: str = "") -> list[str]:
    """ib_write_bw for one rail; with `server`, the client side."""
    return [
        "ib_write_bw",
        *("-d", str(rail["rdma_device"]), "-i", "1", "-x", str(gid_index), "-p", str(FIRST_PORT + int(rail["rail"]))),
        *("-s", str(MESSAGE_BYTES), "-q", str(queue_pairs), "-D", str(seconds), "-F", "--report_gbits"),
        *([server] if server else []),
    ]


def listening(port: int, proc_root: Path = Path("/proc")) -> bool:
    """True where a TCP socket of this node listens on the port."""
    wanted = f":{port:04X}"
    for name in ("net/tcp", "net/tcp6"):
        try:
            lines = (proc_root / name).read_text().splitlines()[1:]
        except OSError:
            continue
        if any(fields[1].endswith(wanted) and fields[3] == "0A" for fields in map(str.split, lines) if len(fields) > 3):
            return True
    return False


def serve(
    rails: Sequence[Mapping[str, Any]],
    seconds: int,
    queue_pairs: int,
    wait_s: int,
    run: Runner,
    sysfs_root: Path,
    proc_root: Path,
) -> dict[str, Any]:
    """Start one server a rail as transient units that end by themselves; returns {before, gid_indices}."""
    indices = gid_indices(rails, sysfs_root)
    before = snapshot(rails, sysfs_root, proc_root)
    for rail, index in zip(rails, indices, strict=True):
        unit = f"{UNIT}-{rail['rail']}"
        run(["systemctl", "stop", f"{unit}.service"])
        rc, _out, err = run(
            [
                *(
                    "systemd-run",
                    "--quiet",
                    "--collect",
                    f"--unit={unit}",
                    f"--property=RuntimeMaxSec={seconds + 2 * wait_s}",
                ),
                *command(rail, index, seconds, queue_pairs),
            ]
        )
        if rc != 0:
            raise ValueError(f"rail {rail['rail']}: the server did not start: {err.strip()}")
    end = time.monotonic() + wait_s
    missing = list(rails)
    while missing and time.monotonic() < end:
        time.sleep(0.3)
        missing = [rail for rail in missing if not listening(FIRST_PORT + int(rail["rail"]), proc_root)]
    if missing:
        rail = missing[0]
        _rc, out, _err = run(["journalctl", "-u", f"{UNIT}-{rail['rail']}", "-n", "8", "-o", "cat", "--no-pager"])
        raise ValueError(
            f"rail {rail['rail']}: ib_write_bw does not listen on port "
            f"{FIRST_PORT + int(rail['rail'])} after {wait_s} s: "
            f"{last_words(out)}"
        )
    return {"before": before, "gid_indices": indices}


def collect(
    rails: Sequence[Mapping[str, Any]], wait_s: int, run: Runner, sysfs_root: Path, proc_root: Path
) -> dict[str, Any]:
    """End the servers and read the counters; returns {after}."""
    units = [f"{UNIT}-{rail['rail']}.service" for rail in rails]
    end = time.monotonic() + min(wait_s, 15)
    while run(["systemctl", "-q", "is-active", *units])[0] == 0 and time.monotonic() < end:
        time.sleep(0.5)
    run(["systemctl", "stop", *units])
    return {"after": snapshot(rails, sysfs_root, proc_root)}


def measure(
    rails: Sequence[Mapping[str, Any]],
    server_addresses: Sequence[str],
    seconds: int,
    queue_pairs: int,
    wait_s: int,
    sysfs_root: Path,
    proc_root: Path,
) -> dict[str, Any]:
    """Run the clients of all rails at once; returns {before, after, outputs, window, seconds}.

    The counters of all rails are sampled together all the time, which shows whether the runs shared one window.
    """
    indices = gid_indices(rails, sysfs_root)
    before = snapshot(rails, sysfs_root, proc_root)
    sources = [rdma_counters.source_of(str(rail["rdma_device"]), sysfs_root) for rail in rails]
    samples: list[tuple[float, list[int]]] = []

    def sample() -> None:
        counts = [
            rdma_counters.traffic(str(rail["rdma_device"]), source, sysfs_root)[0] if source else 0
            for rail, source in zip(rails, sources, strict=True)
        ]
        samples.append((time.monotonic(), counts))

    runs = [
        subprocess.Popen(
            command(rail, index, seconds, queue_pairs, address),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        for rail, index, address in zip(rails, indices, server_addresses, strict=True)
    ]
    end = time.monotonic() + seconds + wait_s
    while any(run.poll() is None for run in runs) and time.monotonic() < end:
        sample()
        time.sleep(SAMPLE_S)
    sample()
    outputs = []
    for run in runs:
        late = run.poll() is None
        if late:
            run.kill()
        text = run.communicate()[0] or ""
        outputs.append(
            {
                "rc": -1 if late else run.returncode,
                "text": text + (f"\ntimed out after {seconds + wait_s} s" if late else ""),
            }
        )
    return {
        "before": before,
        "after": snapshot(rails, sysfs_root, proc_root),
        "outputs": outputs,
        "window": common_window(samples),
        "seconds": seconds,
        "gid_indices": indices,
    }
