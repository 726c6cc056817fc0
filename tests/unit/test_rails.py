"""Rails are found by facts: recorded adapters in, the cabled port's two functions or a reason out."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import rails
from ansible_collections.goodput.spark.plugins.module_utils.rail_plan import rail_plan
from rails_tree import build, gid, soft_roce, spark

DARK: dict[str, Any] = {"carrier": False}
DOWN: dict[str, Any] = {"carrier": None}
P0, P1 = ("enp1s0f0np0", "enP2p1s0f0np0"), ("enp1s0f1np1", "enP2p1s0f1np1")


def only(cabled: tuple[str, str], **facts: Any) -> list[dict[str, Any]]:
    """A Spark with one cable, in the port `cabled`."""
    return spark(**{name: {"carrier": name in cabled, **facts} for name in (*P0, *P1)})


def netdevs(answer: Mapping[str, Any]) -> list[str]:
    return [rail["netdev"] for rail in answer["rails"]]


@pytest.mark.parametrize(("cabled", "port"), [(P0, "p0"), (P1, "p1")])
def test_one_cable_is_the_twins_of_that_port(tmp_path: Path, cabled: tuple[str, str], port: str) -> None:
    answer = rails.choose(build(tmp_path, only(cabled)))
    assert (answer["state"], answer["port"], netdevs(answer)) == ("ok", port, list(cabled))
    assert [rail["pci"][:4] for rail in answer["rails"]] == ["0000", "0002"]


def test_names_do_not_matter(tmp_path: Path) -> None:
    functions = [
        {**function, "device": f"mlx5_{3 - index}", "netdev": f"eth{index}"} for index, function in enumerate(only(P1))
    ]
    answer = rails.choose(build(tmp_path, functions))
    assert [(rail["netdev"], rail["rdma_device"]) for rail in answer["rails"]] == [
        ("eth1", "mlx5_2"),
        ("eth3", "mlx5_0"),
    ]


def test_without_port_names_the_function_numbers_pair_up(tmp_path: Path) -> None:
    answer = rails.choose(build(tmp_path, only(P1, port="")))
    assert (answer["state"], answer["port"], netdevs(answer)) == ("ok", "f1", list(P1))


def test_four_functions_of_one_port_name_split_by_function_number(tmp_path: Path) -> None:
    answer = rails.choose(build(tmp_path, only(P0, port="p0")))
    assert (answer["state"], netdevs(answer)) == ("ok", list(P0))


def test_both_ports_cabled_asks_for_a_choice_and_takes_it(tmp_path: Path) -> None:
    tree = build(tmp_path, spark())
    answer = rails.choose(tree)
    assert answer["state"] == "ambiguous"
    assert "rdma_port" in answer["remedy"] and "p0 or p1" in answer["remedy"]
    assert netdevs(rails.choose(tree, port="p1")) == list(P1)
    assert rails.choose(tree, port="p7")["state"] == "ambiguous"


def test_no_cable(tmp_path: Path) -> None:
    answer = rails.choose(build(tmp_path, spark(every=DARK)))
    assert (answer["state"], answer["rails"]) == ("no_cable", [])


def test_links_down_is_unknown_and_nothing_is_guessed(tmp_path: Path) -> None:
    answer = rails.choose(build(tmp_path, spark(every=DOWN)))
    assert (answer["state"], answer["rails"]) == ("unknown", [])
    assert "sudo ip link set dev enp1s0f0np0 up" in answer["remedy"]


def test_one_rail_down_still_names_the_port(tmp_path: Path) -> None:
    answer = rails.choose(build(tmp_path, spark(every=DARK, enp1s0f0np0={"carrier": True}, enP2p1s0f0np0=DOWN)))
    assert (answer["state"], netdevs(answer), [rail["carrier"] for rail in answer["rails"]]) == (
        "ok",
        list(P0),
        [True, None],
    )


@pytest.mark.parametrize("marker", [True, False])
def test_adapter_gone(tmp_path: Path, marker: bool) -> None:
    if marker:
        (tmp_path / "etc/nvidia").mkdir(parents=True)
        (tmp_path / "etc/nvidia/cx7-hotplug-enabled").touch()
    answer = rails.choose(build(tmp_path, []), root=tmp_path)
    assert answer["state"] == "no_nic" and "plug the QSFP cable" in answer["remedy"]
    assert ("cx7-hotplug-enabled exists" in answer["reason"]) == marker


def test_netdevs_without_rdma_name_the_driver(tmp_path: Path) -> None:
    answer = rails.choose(build(tmp_path, spark(every={"no_rdma": True})))
    assert answer["state"] == "no_nic" and "modprobe mlx5_ib" in answer["remedy"]


def test_one_domain_only_is_one_rail(tmp_path: Path) -> None:
    answer = rails.choose(build(tmp_path, only(P0)[:2]))
    assert answer["state"] == "one_rail" and "enp1s0f0np0" in answer["reason"]


def test_virtual_functions_are_no_rails(tmp_path: Path) -> None:
    virtual = {
        "device": "mlx5_9",
        "netdev": "eth9",
        "pci": "0000:01:00.2",
        "mac": "4c:bb:47:00:42:99",
        "guid": "4cbb:0",
    }
    answer = rails.choose(build(tmp_path, [*only(P0), {**virtual, "port": "", "virtual_function": True}]))
    assert netdevs(answer) == list(P0)


@pytest.mark.parametrize("carrier", [True, None])
def test_soft_roce_is_found_through_parent(tmp_path: Path, carrier: bool | None) -> None:
    tree = build(tmp_path, soft_roce(enp1s0f0np0={"carrier": carrier}, enP2p1s0f0np0={"carrier": carrier}))
    answer = rails.choose(tree)
    assert (answer["state"], netdevs(answer)) == ("ok", ["enp1s0f0np0", "enP2p1s0f0np0"])
    assert [(rail["pci"], rail["pcie_width"]) for rail in answer["rails"]] == [("", None), ("", None)]


def test_three_soft_roce_devices_are_ambiguous(tmp_path: Path) -> None:
    third = {"device": "rxe0", "netdev": "enP7s7", "mac": "52:54:00:77:01:01", "guid": "0", "rxe": True}
    answer = rails.choose(build(tmp_path, [*soft_roce(), third]))
    assert answer["state"] == "ambiguous" and "enP7s7" in answer["reason"]


def test_soft_roce_without_parent_is_found_through_the_gid_table(tmp_path: Path) -> None:
    address = [(0, "RoCE v2", gid("192.168.100.1"))]
    tree = build(tmp_path, soft_roce(enp1s0f0np0={"gids": address}, enP2p1s0f0np0={"gids": address}))
    for path in tree.glob("class/infiniband/*/parent"):
        path.unlink()
    assert netdevs(rails.choose(tree)) == ["enp1s0f0np0", "enP2p1s0f0np0"]


def test_real_functions_come_before_soft_roce_on_another_netdev(tmp_path: Path) -> None:
    assert netdevs(
        rails.choose(build(tmp_path, [*only(P0), {**soft_roce()[0], "netdev": "enP7s7", "device": "rxe0"}]))
    ) == list(P0)


def test_the_gid_is_found_wherever_it_is(tmp_path: Path) -> None:
    table = [(0, "IB/RoCE v1", gid("192.168.100.1")), (1, "RoCE v2", "fe80::1"), (5, "RoCE v2", gid("192.168.100.1"))]
    tree = build(tmp_path, spark(enp1s0f0np0={"gids": table}))
    answer = rails.choose(tree, port="p0")
    rails.complete(answer, tree, {}, {})
    found = answer["rails"][0]["gids"]
    assert [entry["index"] for entry in found] == [0, 1, 5]
    assert rails.right_gid(found, "192.168.100.1", "enp1s0f0np0") == 5
    assert rails.right_gid(found, "192.168.100.1", "enP2p1s0f0np0") is None
    assert rails.right_gid(found, "192.168.100.2", "enp1s0f0np0") is None


@pytest.mark.parametrize(("mtu", "roce"), [(9000, 4096), (1500, 1024), (4200, 4096), (4100, 2048), (200, 0)])
def test_roce_mtu_follows_the_netdev(mtu: int, roce: int) -> None:
    assert rails.roce_mtu_bytes(mtu) == roce


def test_ibv_devinfo_is_read() -> None:
    text = "hca_id:\trocep1s0f0\n\tport:\t1\n\t\tmax_mtu:\t4096 (5)\n\t\tactive_mtu:\t1024 (3)\nhca_id:\troceP2p1s0f0\n"
    assert rails.parse_active_mtus(text + "\t\tactive_mtu:\t4096 (5)\n") == {"rocep1s0f0": 1024, "roceP2p1s0f0": 4096}


# ---------------------------------------------------------------------------------------------------------------------
# verify

SUBNETS = ["192.168.100.0/24", "192.168.101.0/24"]
PEER_MACS = ["52:54:00:77:02:02", "52:54:00:77:02:03"]


class Node:
    """spark1 of the virtual pair, all well; a test spoils one thing."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.facts: dict[str, dict[str, Any]] = {}
        self.addresses = {"enp1s0f0np0": ["192.168.100.1/24"], "enP2p1s0f0np0": ["192.168.101.1/24"]}
        self.mtus = {"rocep1s0f0": 4096, "roceP2p1s0f0": 4096}
        self.route: dict[str, str] = {"192.168.100.2": "enp1s0f0np0", "192.168.101.2": "enP2p1s0f0np0"}
        self.silent: set[tuple[str, int]] = set()  # (address, payload bytes) that get no answer
        self.neighbours = {"192.168.100.2": PEER_MACS[0], "192.168.101.2": PEER_MACS[1]}
        self.wire: dict[tuple[str, str], str] = {}  # (netdev, address) -> MAC that answers ARP
        self.sysctl = {"arp_ignore": 1, "arp_announce": 2}
        self.own_gids = True

    def run(self, argv: list[str]) -> tuple[int, str, str]:
        if argv[:3] == ["ip", "-j", "addr"]:
            return (
                0,
                json.dumps(
                    [
                        {
                            "ifname": name,
                            "addr_info": [
                                dict(zip(("local", "prefixlen"), entry.split("/"), strict=True)) for entry in held
                            ],
                        }
                        for name, held in self.addresses.items()
                    ]
                ),
                "",
            )
        if argv[0] == "ibv_devinfo":
            return 0, "".join(f"hca_id: {name}\n active_mtu: {size} (x)\n" for name, size in self.mtus.items()), ""
        if argv[:4] == ["ip", "-j", "route", "get"]:
            return 0, json.dumps([{"dst": argv[4], "dev": self.route[argv[4]]}]), ""
        if "neigh" in argv:
            mac = self.neighbours.get(argv[argv.index("to") + 1])
            return 0, json.dumps([{"lladdr": mac, "state": ["REACHABLE"]}] if mac else []), ""
        if argv[0] == "ping":
            size = int(argv[argv.index("-s") + 1])
            if (argv[-1], size) in self.silent:
                return 1, "3 packets transmitted, 0 received, 100% packet loss, time 404ms", ""
            return 0, "3 packets transmitted, 3 received, 0% packet loss, time 404ms", ""
        raise AssertionError(argv)

    def failed(self) -> dict[tuple[str, int | None], dict[str, Any]]:
        gids = {
            name: {
                "gids": [(1, "RoCE v2", gid(held[0].split("/")[0]))] if self.own_gids and held else [],
                **self.facts.get(name, {}),
            }
            for name, held in self.addresses.items()
        }
        tree = build(self.root, soft_roce(**gids))
        for name in self.addresses:
            for key, value in self.sysctl.items():
                path = self.root / f"proc/sys/net/ipv4/conf/{name}/{key}"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(f"{value}\n")
        probe = rails.choose(tree)
        peer = {"rails": [{"netdev": "x", "mac": mac} for mac in PEER_MACS]}
        plan = rail_plan(["spark1", "spark2"], SUBNETS, "spark1", probes={"spark1": probe, "spark2": peer})
        assert plan["errors"] == []
        checks = rails.verify(
            plan,
            self.run,
            tree,
            self.root / "proc",
            self.root / "dev",
            self.root,
            lambda netdev, _mac, address: self.wire.get((netdev, address), ""),
        )
        assert {check["node"] for check in checks} == {"spark1"}
        assert all(check["remedy"] for check in checks if not check["ok"])
        return {(check["check"], check["rail"]): check for check in checks if not check["ok"]}


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def test_all_is_well(node: Node) -> None:
    assert node.failed() == {}


def test_rail_down_is_named_and_its_peers_are_not_asked(node: Node) -> None:
    node.facts = {"enP2p1s0f0np0": {"carrier": None}}
    failed = node.failed()
    assert set(failed) == {("carrier", 1)}
    assert "administratively down" in failed["carrier", 1]["found"]
    assert "ip link set dev enP2p1s0f0np0 up" in failed["carrier", 1]["remedy"]
    assert rails.sentence(failed["carrier", 1]).startswith("carrier, spark1 rail 1: found enP2p1s0f0np0")


def test_no_carrier_points_at_the_cable(node: Node) -> None:
    node.facts = {"enp1s0f0np0": {"carrier": False}}
    assert "reseat the cable" in node.failed()["carrier", 0]["remedy"]


def test_own_mtu_1500(node: Node) -> None:
    node.facts, node.mtus["roceP2p1s0f0"] = {"enP2p1s0f0np0": {"mtu": 1500}}, 1024
    assert set(node.failed()) == {("mtu", 1), ("active_mtu", 1)}


def test_mtu_1500_at_the_peer_is_told_from_a_silent_peer(node: Node) -> None:
    node.silent, node.wire = {("192.168.101.2", 8972)}, {("enP2p1s0f0np0", "192.168.101.2"): PEER_MACS[1]}
    failed = node.failed()
    assert set(failed) == {("ping_jumbo", 1)}
    assert "set MTU 9000 on rail 1 of spark2" in failed["ping_jumbo", 1]["remedy"]


def test_wrong_peer_address(node: Node) -> None:
    node.silent, node.neighbours = {("192.168.101.2", 8972), ("192.168.101.2", 56)}, {"192.168.100.2": PEER_MACS[0]}
    failed = node.failed()
    assert set(failed) == {("ping_jumbo", 1), ("neighbour", 1)}
    assert "spark2 does not answer at 192.168.101.2" in failed["ping_jumbo", 1]["remedy"]


def test_crossed_rails_are_seen_on_the_wire(node: Node) -> None:
    node.silent = {(address, size) for address in node.neighbours for size in (8972, 56)}
    node.wire = {("enp1s0f0np0", "192.168.101.2"): PEER_MACS[1], ("enP2p1s0f0np0", "192.168.100.2"): PEER_MACS[0]}
    failed = node.failed()
    assert "the rails are crossed" in failed["ping_jumbo", 0]["remedy"]
    assert "rail 1 of spark2" in failed["rails_crossed", 0]["found"]
    assert "the rails are crossed" in failed["ping_jumbo", 1]["remedy"]


def test_a_peer_rail_that_is_down_is_not_called_crossed(node: Node) -> None:
    """On one cable the twin hears the question for its sister's wire too."""
    node.silent = {("192.168.101.2", 8972), ("192.168.101.2", 56)}
    node.wire = {("enP2p1s0f0np0", "192.168.100.2"): PEER_MACS[0], ("enp1s0f0np0", "192.168.100.2"): PEER_MACS[0]}
    failed = node.failed()
    assert ("rails_crossed", 1) not in failed
    assert "does not answer" in failed["ping_jumbo", 1]["remedy"]


def test_the_other_twin_answers(node: Node) -> None:
    node.neighbours["192.168.100.2"] = PEER_MACS[1]
    assert "rail 1 of spark2" in node.failed()["rails_crossed", 0]["found"]


def test_a_stranger_has_the_address(node: Node) -> None:
    node.neighbours["192.168.100.2"] = "02:00:00:00:00:01"
    assert "no rail of this site" in node.failed()["rails_crossed", 0]["found"]


def test_both_twins_in_one_subnet(node: Node) -> None:
    node.addresses["enP2p1s0f0np0"] = ["192.168.100.9/24"]
    failed = node.failed()
    assert set(failed) == {("twin_subnet", None), ("address", 1), ("gid", 1)}
    assert failed["address", 1]["required"] == "192.168.101.1/24"


def test_shadowed_route(node: Node) -> None:
    node.route["192.168.101.2"] = "enP7s7"
    assert node.failed()["route", 1]["found"] == "192.168.101.2 leaves by enP7s7"


def test_missing_gid_and_sysctl_and_ipv6(node: Node) -> None:
    node.own_gids, node.sysctl["arp_ignore"] = False, 0
    node.addresses["enp1s0f0np0"].append("fe80::1/64")
    assert set(node.failed()) == {("gid", 0), ("gid", 1), ("sysctl", 0), ("sysctl", 1), ("ipv6", 0)}


def test_ufw_without_a_rule_for_a_rail(node: Node) -> None:
    (node.root / "etc/ufw").mkdir(parents=True)
    (node.root / "etc/ufw/ufw.conf").write_text("# x\nENABLED=yes\n")
    (node.root / "etc/ufw/user.rules").write_text("-A ufw-user-input -i enp1s0f0np0 -j ACCEPT\n")
    assert node.failed()["firewall", None]["remedy"] == "sudo ufw allow in on enP2p1s0f0np0"


def test_exclusive_netns_mode(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rails, "netns_shared", lambda _root: False)
    assert node.failed()["netns_mode", None]["remedy"] == "sudo rdma system set netns shared"


def test_narrow_pcie_link(tmp_path: Path) -> None:
    tree = build(tmp_path, only(P0, width=2))
    probe = rails.choose(tree)
    plan = rail_plan(["spark1"], SUBNETS, "spark1", probes={"spark1": probe})
    checks = rails.verify(plan, lambda _argv: (1, "", ""), tree, tmp_path / "proc", tmp_path / "dev", tmp_path)
    assert [check["found"] for check in checks if check["check"] == "pcie"] == [
        "0000:01:00.0 x2 32.0 GT/s PCIe",
        "0002:01:00.0 x2 32.0 GT/s PCIe",
    ]


# ---------------------------------------------------------------------------------------------------------------------
# plan


def plan_errors(subnets: object = SUBNETS, **changes: Any) -> str:
    arguments = {"nodes": ["spark1", "spark2"], "node": "spark1", **changes}
    return " / ".join(rail_plan(subnets=subnets, **arguments)["errors"])


@pytest.mark.parametrize(
    ("subnets", "said"),
    [
        ("192.168.100.0/24", "must be a list of 2 IPv4 subnets"),
        (["192.168.100.0/24"], "has 1 entries"),
        ([100, "192.168.101.0/24"], "it is a int, not a string"),
        (["192.168.100.0/24", "192.168.100.0/24"], "192.168.100.0/24 and 192.168.100.0/24 overlap"),
        (["192.168.0.0/16", "192.168.101.0/24"], "192.168.0.0/16 and 192.168.101.0/24 overlap"),
        (["192.168.100.0/30", "192.168.100.4/30"], "share their first 24 bits"),
        (["192.168.100.1/24", "192.168.101.0/24"], "has host bits set"),
        (["192.168.100.0/31", "192.168.101.0/24"], "prefix length 31 is not between"),
        (["224.0.0.0/24", "192.168.101.0/24"], "multicast"),
        (["fe80::/64", "192.168.101.0/24"], "rdma_rail_subnets[0] = 'fe80::/64' is refused"),
    ],
)
def test_bad_subnets_are_refused_with_their_values(subnets: object, said: str) -> None:
    assert said in plan_errors(subnets)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"numbers": {"spark1": 2}}, "spark1 and spark2 both have host number 2"),
        ({"numbers": {"spark1": "1"}}, "rdma_node_number of spark1 is '1' (str)"),
        ({"numbers": {"spark1": -1}}, "it must be 1 or more"),
        ({"numbers": {"spark1": 255}}, "host number 255 of spark1 does not fit into 192.168.100.0/24"),
        ({"mtu_bytes": "9000"}, "rdma_mtu_bytes is '9000' (str)"),
        ({"mtu_bytes": 9999}, "from 1280 to 9978"),
        ({"nodes": ["spark2"]}, "spark1 is not in rdma_nodes"),
        ({"nodes": "spark1"}, "it must be a list"),
        ({"nodes": ["spark1", "spark1"]}, "names a node twice"),
    ],
)
def test_bad_nodes_are_refused_with_their_values(changes: dict[str, Any], said: str) -> None:
    assert said in plan_errors(**changes)


def test_a_subnet_that_another_route_has_is_refused() -> None:
    probe = {
        "rails": [{"netdev": "enp1s0f0np0", "rdma_device": "a", "mac": "m"}],
        "routes": [
            {"dst": "default", "dev": "enP7s7"},
            {"dst": "192.168.100.0/24", "dev": "enp1s0f0np0"},
            {"dst": "192.168.101.7", "dev": "docker0"},
        ],
    }
    said = plan_errors(probes={"spark1": probe})
    assert said.count("collides") == 1 and "192.168.101.7/32 through docker0 on spark1" in said


def test_plan_of_three_nodes() -> None:
    probe = {"port": "p0", "rails": [{"netdev": f"r{n}", "rdma_device": f"d{n}", "mac": f"mac{n}"} for n in (0, 1)]}
    peer = {**probe, "port": "p1", "rails": [{"netdev": "x", "mac": f"peer{n}"} for n in (0, 1)]}
    plan = rail_plan(["a", "b", "c"], SUBNETS, "b", probes={"b": probe, "c": peer}, numbers={"c": 9, "a": 0})
    assert plan["errors"] == []
    assert [rail["cidr"] for rail in plan["rails"]] == ["192.168.100.2/24", "192.168.101.2/24"]
    assert plan["rails"][1]["peers"] == [
        {"node": "a", "address": "192.168.101.1", "mac": "", "macs": [], "asked": False},
        {"node": "c", "address": "192.168.101.9", "mac": "peer1", "macs": ["peer0", "peer1"], "asked": True},
    ]
    assert plan["interfaces"][0] == {
        "netdev": "r0",
        "cidr": "192.168.100.2/24",
        "mtu_bytes": 9000,
        "peers": ["192.168.100.9"],
    }
    assert plan["sysctls"]["net.ipv4.conf.r1.arp_announce"] == "2"
    assert ["need a switch" in plan["warnings"][0], "b p0, c p1" in plan["warnings"][1]] == [True, True]
    assert plan["warnings"][2].startswith("a not in this run")
