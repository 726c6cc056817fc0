"""The RDMA proof is judged from counters and outputs of both ends, here recorded or made up."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import rdma_counters, rdma_proof

HARDWARE = {"min_rail_gbps": 80, "min_total_gbps": 175, "wire_ceiling_gbps": 196.0, "max_loss_events": 0}
PAIR = {"min_rail_gbps": 0.002, "min_total_gbps": 0.005, "wire_ceiling_gbps": 196.0, "max_loss_events": 100}
SECONDS = 10
MEASURED_S = SECONDS - 2 * rdma_proof.MARGIN_S

# perftest 4.5 over rdma_rxe, shortened.
OUTPUT = """
---------------------------------------------------------------------------------------
                    RDMA_Write BW Test
 Dual-port       : OFF\t\tDevice         : rocep1s0f0
 Number of qps   : 1\t\tTransport type : IB
 Mtu             : {mtu}[B]
 Link type       : Ethernet
 GID index       : 1
---------------------------------------------------------------------------------------
 GID: 00:00:00:00:00:00:00:00:00:00:255:255:192:168:100:02
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[Gb/sec]    BW average[Gb/sec]   MsgRate[Mpps]
 65536      {iterations}             0.00               {gbps}     \t\t   0.000149
---------------------------------------------------------------------------------------
"""


def output(gbps: float, mtu: int = 4096) -> str:
    return OUTPUT.format(iterations=int(gbps * 1e9 / 8 * MEASURED_S / 65536), gbps=f"{gbps:.6f}", mtu=mtu)


def end(sent: list[int], received: list[int], source: str, kernel: int = 10_000_000) -> dict[str, Any]:
    unit = {entry.name: entry.unit for entry in rdma_counters.SOURCES}.get(source, "")
    rails = [
        {
            "rail": i,
            "netdev": f"rail{i}",
            "source": source,
            "unit": unit,
            "sent": s,
            "received": r,
            "losses": {"out_of_sequence": 0},
        }
        for i, (s, r) in enumerate(zip(sent, received, strict=True))
    ]
    return {"rails": rails, "netdev_bytes": {"rail0": kernel, "enP7s7": kernel}, "tcp_segments": 100}


def proof(gbps: list[float], source: str = "port_xmit_data") -> tuple[dict[str, Any], dict[str, Any]]:
    """A healthy run with these payload rates: counters move for the whole duration, headers included."""
    size = 1.02 if source != "sent_pkts" else 1.02 / 4096
    moved = [int(rate * 1e9 / 8 * SECONDS * size) for rate in gbps]
    zero = [0] * len(gbps)
    client = {
        "node": "spark2",
        "seconds": SECONDS,
        "before": end(zero, zero, source),
        "after": end(moved, zero, source, 12_000_000),
        "outputs": [{"rc": 0, "text": output(rate)} for rate in gbps],
        "window": {"seconds": 9.5, "moved": moved},
    }
    server = {"node": "spark1", "before": end(zero, zero, source), "after": end(zero, moved, source)}
    return client, server


def judge(client: dict[str, Any], server: dict[str, Any], limits: dict[str, float] | None = None) -> dict[str, Any]:
    return rdma_proof.verdict(client, server, limits or HARDWARE)


@pytest.mark.parametrize(
    ("gbps", "state", "said"),
    [
        ([92.57, 97.28], "ok", "92.57 + 97.28 = 189.85 Gb/s in one window"),
        ([99.8, 99.8], "measurement_fault", "199.6 Gb/s is more than the wire carries (196.0 Gb/s)"),
        ([98.0, 98.0], "ok", "196.0 Gb/s"),
        ([13.1, 98.0], "slow", "rail 0 13.1 Gb/s"),
        ([85.0, 85.0], "slow", "together 170.0 Gb/s; required 80 per rail and 175 together"),
        ([1.0, 98.0], "rail_idle", "rail 0 (spark2 -> spark1) carried 1.0% of the traffic"),
    ],
)
def test_states_by_rate(gbps: list[float], state: str, said: str) -> None:
    found = judge(*proof(gbps))
    assert (found["state"], said in found["reason"]) == (state, True), found["reason"]
    assert bool(found["remedy"]) == (state != "ok")


def test_shares_and_units() -> None:
    found = judge(*proof([98.0, 98.0]))
    assert [rail["share"] for rail in found["rails"]] == [0.5, 0.5]
    assert [(rail["source"], rail["gid_index"], rail["mtu_bytes"]) for rail in found["rails"]] == [
        ("port_xmit_data", 1, 4096)
    ] * 2
    assert found["rails"][0]["sent"] == found["rails"][0]["received"] > found["rails"][0]["payload_bytes"]
    assert found["tcp"]["excluded"] == "yes"


def test_thirteen_gigabit_state_has_its_own_remedy() -> None:
    degraded, plain = judge(*proof([13.0, 13.1])), judge(*proof([79.0, 97.0]))
    assert "reboot both nodes with the cable in" in degraded["remedy"] and "60 s" in degraded["remedy"]
    assert plain["state"] == "slow" and "reboot" not in plain["remedy"]


def test_packets_only_says_what_it_can_not_tell() -> None:
    found = judge(*proof([0.078, 0.0795], "sent_pkts"), PAIR)
    assert (found["state"], found["tcp"]["excluded"]) == ("ok", "partly")
    assert "travels as UDP" in found["tcp"]["note"]


def test_a_rate_of_zero_is_computed_from_the_iterations() -> None:
    """Seen on a loaded guest: 471 iterations, and 0.000000 in both columns."""
    client, server = proof([0.08, 0.08], "sent_pkts")
    client["outputs"][0]["text"] = OUTPUT.format(iterations=601, gbps="0.000000", mtu=4096)
    found = judge(client, server, PAIR)
    assert [rail["rate_from"] for rail in found["rails"]] == ["iterations", "ib_write_bw"]
    assert found["rails"][0]["gbps"] == pytest.approx(601 * 65536 * 8 / 6 / 1e9, rel=1e-4)
    assert found["state"] == "ok"


def test_counters_of_one_rail_flat_is_idle_even_if_the_tool_is_content() -> None:
    client, server = proof([95.0, 95.0])
    client["after"]["rails"][1]["sent"] = 0
    found = judge(client, server)
    assert found["state"] == "rail_idle" and found["reason"].startswith("rail 1 (spark2 -> spark1)")
    client, server = proof([95.0, 95.0])
    server["after"]["rails"][1]["received"] = 0
    found = judge(client, server)
    assert found["state"] == "rail_idle" and "spark1 received 0" in found["reason"]


def test_payload_in_the_kernel_is_suspected_tcp() -> None:
    client, server = proof([90.0, 90.0])
    for rail in client["after"]["rails"]:
        rail["sent"] = 1000
    client["after"]["netdev_bytes"]["rail0"] = int(90e9 / 8 * SECONDS)
    found = judge(client, server)
    assert found["state"] == "tcp_fallback_suspected" and "through rail0" in found["reason"]


def test_other_kernel_traffic_is_reported() -> None:
    client, server = proof([95.0, 95.0])
    client["after"]["netdev_bytes"]["enP7s7"] = 10**12
    found = judge(client, server)
    assert (found["state"], found["tcp"]["excluded"]) == ("ok", "no")


def test_losses_name_counter_node_and_rail() -> None:
    client, server = proof([95.0, 95.0])
    server["after"]["rails"][1]["losses"]["out_of_sequence"] = 7
    found = judge(client, server)
    assert found["state"] == "failed" and "most on rail 1: spark1:out_of_sequence +7" in found["reason"]
    assert judge(client, server, {**HARDWARE, "max_loss_events": 7})["state"] == "ok"


def test_runs_without_a_common_window_are_a_measurement_fault() -> None:
    client, server = proof([95.0, 95.0])
    client["window"] = {"seconds": 4.9, "moved": [1, 1]}
    assert judge(client, server)["state"] == "measurement_fault"


def test_no_counters_is_a_measurement_fault() -> None:
    assert judge(*proof([95.0, 95.0], ""))["state"] == "measurement_fault"


@pytest.mark.parametrize(
    ("text", "remedy"),
    [
        (
            "Couldn't connect to 192.168.101.1:18516\n Unable to open file descriptor for socket connection\n",
            "ufw allow in",
        ),
        (" Failed to modify QP 17 to RTR\n Unable to Connect the HCA's through the link\n", "GID of rail 1 moved"),
        (" Completion with error at client\n Failed status 12: wr_id 0 syndrom 0x81\n", "compare MTU, cable"),
        ("", "verify part"),
    ],
)
def test_a_failed_run_names_rail_and_remedy(text: str, remedy: str) -> None:
    client, server = proof([95.0, 95.0])
    client["outputs"][1] = {"rc": 1, "text": text}
    found = judge(client, server)
    assert found["state"] == "failed" and found["reason"].startswith(
        "rail 1 (spark2 -> spark1): ib_write_bw ended with 1"
    )
    assert remedy in found["remedy"]


def test_output_is_parsed() -> None:
    assert rdma_proof.parse_output(OUTPUT.format(iterations=601, gbps="0.078006", mtu=4096)) == {
        "gbps": 0.078006,
        "iterations": 601,
        "message_bytes": 65536,
        "mtu_bytes": 4096,
        "gid_index": 1,
    }
    assert rdma_proof.parse_output("Couldn't connect") == {}


def test_window_is_where_both_move() -> None:
    both = [(float(t), [min(max(t - 1, 0), 8) * 100, min(max(t - 3, 0), 8) * 100]) for t in range(14)]
    assert rdma_proof.common_window(both) == {"seconds": 5.0, "moved": [500, 500]}
    after_each_other = [(float(t), [min(t, 5) * 100, max(t - 5, 0) * 100]) for t in range(11)]
    assert rdma_proof.common_window(after_each_other)["seconds"] == 0.0
    assert rdma_proof.common_window([(0.0, [1, 1]), (1.0, [2, 1])])["seconds"] == 0.0
    assert rdma_proof.common_window([])["seconds"] == 0.0


def port(tmp_path: Path, files: dict[str, object]) -> Path:
    for name, value in files.items():
        path = tmp_path / "class/infiniband/dev0/ports/1" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{value}\n")
    return tmp_path


PACKETS = {"hw_counters/sent_pkts": 7, "hw_counters/rcvd_pkts": 8}
BYTES = {"hw_counters/sent_bytes": 70, "hw_counters/rcvd_bytes": 80}
WORDS = {"counters/port_xmit_data": 700, "counters/port_rcv_data": 800}


@pytest.mark.parametrize(
    ("files", "source", "traffic"),
    [
        (PACKETS, "sent_pkts", (7, 8)),
        (PACKETS | BYTES, "sent_bytes", (70, 80)),
        (PACKETS | BYTES | WORDS, "port_xmit_data", (2800, 3200)),
        (PACKETS | {"counters/port_xmit_data": 1}, "sent_pkts", (7, 8)),
    ],
)
def test_the_best_counter_is_read(
    tmp_path: Path, files: dict[str, object], source: str, traffic: tuple[int, int]
) -> None:
    root = port(tmp_path, files)
    found = rdma_counters.source_of("dev0", root)
    assert found is not None and found.name == source
    assert rdma_counters.traffic("dev0", found, root) == traffic


def test_no_counter_at_all(tmp_path: Path) -> None:
    assert rdma_counters.source_of("dev0", port(tmp_path, {"state": "4: ACTIVE"})) is None


def test_loss_counters_of_both_kinds(tmp_path: Path) -> None:
    root = port(
        tmp_path, {"hw_counters/out_of_sequence": 1, "hw_counters/out_of_seq_request": 2, "hw_counters/lifespan": 10}
    )
    assert rdma_counters.losses("dev0", root) == {"out_of_sequence": 1, "out_of_seq_request": 2}


def test_a_counter_that_was_reset_counts_from_zero() -> None:
    assert rdma_counters.delta({"a": 5, "b": 9, "gone": 1}, {"a": 8, "b": 2, "new": 4}) == {"a": 3, "b": 2}


def test_netdev_bytes_and_segments(tmp_path: Path) -> None:
    for name, value in (("lo", 5), ("enP7s7", 7)):
        for way in ("tx_bytes", "rx_bytes"):
            path = tmp_path / "class/net" / name / "statistics" / way
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"{value}\n")
    (tmp_path / "net").mkdir()
    (tmp_path / "net/snmp").write_text("Ip: A B\nIp: 1 2\nTcp: RtoMin OutSegs X\nTcp: 1 42 3\n")
    assert rdma_counters.netdev_bytes(tmp_path) == {"enP7s7": 14}
    assert rdma_counters.tcp_segments(tmp_path) == 42
    assert rdma_counters.tcp_segments(tmp_path / "none") == 0


def test_command_finds_its_values_and_keeps_the_message_size() -> None:
    rail = {"rail": 1, "rdma_device": "mlx5_3"}
    argv = rdma_proof.command(rail, 5, 10, 4, "192.168.101.1")
    assert argv[argv.index("-x") + 1] == "5" and argv[argv.index("-p") + 1] == "18516"
    assert argv[argv.index("-s") + 1] == "65536" and argv[-1] == "192.168.101.1"
    assert rdma_proof.command(rail, 5, 10, 4)[-1] == "--report_gbits"


def test_listening_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "net").mkdir()
    line = "   0: 00000000:4853 00000000:0000 {} 00000000:00000000 00:00000000 00000000 0 0 1 1\n"
    (tmp_path / "net/tcp").write_text("  sl  local_address\n" + line.format("01"))
    assert not rdma_proof.listening(18515, tmp_path)
    (tmp_path / "net/tcp6").write_text("  sl  local_address\n" + line.format("0A"))
    assert rdma_proof.listening(18515, tmp_path)


def test_measured_input_is_not_changed() -> None:
    client, server = proof([95.0, 95.0])
    before = copy.deepcopy((client, server))
    judge(client, server)
    assert (client, server) == before
