"""Foreign netplan definitions, and a change that undoes itself: the scripts run under /bin/sh against stub tools."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import netplan
from ansible_collections.goodput.spark.plugins.modules import netplan_commit

RAILS = {"enp1s0f0np0": "4c:bb:47:00:42:30", "enP2p1s0f0np0": "4c:bb:47:00:42:34"}
OURS = "90-goodput-rails.yaml"

CX7 = """\
# NVIDIA's example
network:
  version: 2
  ethernets:
    enp1s0f0np0:
      addresses:
        - 192.168.100.10/24  # first rail
      dhcp4: no
    # the second rail
    enP2p1s0f0np0:
      addresses: [192.168.101.10/24]
    enP7s7:
      dhcp4: true
"""


def put(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def one(text: str, tmp_path: Path) -> list[tuple[str, str, bool]]:
    put(tmp_path, "etc/netplan/40-cx7.yaml", text)
    return [(item.id, item.netdev, bool(item.obstacle)) for item in netplan.foreign(tmp_path, RAILS, OURS)]


def test_definitions_by_name_are_found_and_taken_out(tmp_path: Path) -> None:
    put(tmp_path, f"etc/netplan/{OURS}", CX7)
    assert one(CX7, tmp_path) == [("enp1s0f0np0", "enp1s0f0np0", False), ("enP2p1s0f0np0", "enP2p1s0f0np0", False)]
    left = netplan.migration(tmp_path, netplan.foreign(tmp_path, RAILS, OURS))["/etc/netplan/40-cx7.yaml"]
    assert left is not None
    assert [stanza.id for stanza in netplan.stanzas(left)] == ["enP7s7"]
    assert left.startswith("# NVIDIA's example\nnetwork:\n  version: 2\n  ethernets:\n")


def test_a_file_with_nothing_else_is_removed_and_an_empty_section_goes(tmp_path: Path) -> None:
    alone = "network:\n  version: 2\n  ethernets:\n    enp1s0f0np0:\n      dhcp4: true\n"
    one(alone, tmp_path)
    assert netplan.migration(tmp_path, netplan.foreign(tmp_path, RAILS, OURS)) == {"/etc/netplan/40-cx7.yaml": None}
    left = netplan.without(alone + "  wifis:\n    wlP9s9:\n      dhcp4: true\n", [("ethernets", "enp1s0f0np0")])
    assert left == "network:\n  version: 2\n  wifis:\n    wlP9s9:\n      dhcp4: true\n"


@pytest.mark.parametrize(
    ("stanza", "found"),
    [
        (
            '    NM-14f5:\n      match:\n        name: "enp1s0f0np0"\n      dhcp4: true\n',
            [("NM-14f5", "enp1s0f0np0", False)],
        ),
        ("    rail:\n      match: {macaddress: 4C:BB:47:00:42:30}\n", [("rail", "enp1s0f0np0", False)]),
        (
            "    rail:\n      match: {macaddress: 4c:bb:47:00:42:30}\n      set-name: rail0\n",
            [("rail", "enp1s0f0np0", True)],
        ),
        (
            "    all:\n      match: {name: en*}\n      dhcp4: true\n",
            [("all", "enp1s0f0np0", True), ("all", "enP2p1s0f0np0", True)],
        ),
        (
            "    all:\n      match:\n        driver: mlx5_core\n",
            [("all", "enp1s0f0np0", True), ("all", "enP2p1s0f0np0", True)],
        ),
        ("    enp1s0f1np1:\n      dhcp4: true\n", []),
        ("    other:\n      match: {macaddress: 4c:bb:47:00:42:31}\n", []),
        ("    enp1s0f0np0: {dhcp4: true}\n", [("enp1s0f0np0", "enp1s0f0np0", False)]),
    ],
)
def test_matches(tmp_path: Path, stanza: str, found: list[tuple[str, str, bool]]) -> None:
    assert one(f"network:\n  version: 2\n  ethernets:\n{stanza}", tmp_path) == found


@pytest.mark.parametrize(
    "members", ["interfaces: [enp1s0f0np0, enP2p1s0f0np0]", "interfaces:\n        - enp1s0f0np0\n"]
)
def test_bonds_are_refused(tmp_path: Path, members: str) -> None:
    found = one(f"network:\n  version: 2\n  bonds:\n    bond0:\n      {members}\n", tmp_path)
    assert ("bond0", "enp1s0f0np0", True) in found
    with pytest.raises(
        ValueError, match=r"40-cx7.yaml: bond0 configures enp1s0f0np0, and .*belongs to bond0 \(bonds\)"
    ):
        netplan.migration(tmp_path, netplan.foreign(tmp_path, RAILS, OURS))


def test_vlan_on_a_rail_is_refused(tmp_path: Path) -> None:
    assert one("network:\n  vlans:\n    vlan7:\n      id: 7\n      link: enp1s0f0np0\n", tmp_path) == [
        ("vlan7", "enp1s0f0np0", True)
    ]


def test_json_as_installers_write_it(tmp_path: Path) -> None:
    text = json.dumps(
        {
            "network": {
                "version": 2,
                "ethernets": {"enp1s0f0np0": {"dhcp4": True}, "enP7s7": {"addresses": ["10.0.0.1/24"]}},
            }
        }
    )
    assert one(text, tmp_path) == [("enp1s0f0np0", "enp1s0f0np0", False)]
    left = netplan.without(text, [("ethernets", "enp1s0f0np0")])
    assert left == 'network:\n  version: 2\n  ethernets:\n    enP7s7:\n      addresses: ["10.0.0.1/24"]\n'


@pytest.mark.parametrize(
    "text",
    [
        "network: {ethernets: {enp1s0f0np0: {}}}\n",
        "network:\n  ethernets: {enp1s0f0np0: {}}\n",
        "network:\n\tethernets:\n\t\tenp1s0f0np0: {}\n",
    ],
)
def test_what_can_not_be_read_is_refused_if_it_names_a_rail(tmp_path: Path, text: str) -> None:
    assert one(text, tmp_path) == [("?", "enp1s0f0np0", True)]
    assert one(text.replace("enp1s0f0np0", "enP7s7"), tmp_path) == []


def test_packaged_files_and_keyfiles(tmp_path: Path) -> None:
    put(tmp_path, "usr/lib/netplan/10-x.yaml", "network:\n  ethernets:\n    enp1s0f0np0: {}\n")
    put(
        tmp_path,
        "etc/NetworkManager/system-connections/Wired.nmconnection",
        "[connection]\nid=Wired\ninterface-name=enP2p1s0f0np0\n",
    )
    found = netplan.foreign(tmp_path, RAILS, OURS)
    assert [(item.file, bool(item.obstacle)) for item in found] == [
        ("/usr/lib/netplan/10-x.yaml", True),
        ("/etc/NetworkManager/system-connections/Wired.nmconnection", False),
    ]
    assert netplan.migration(tmp_path, found[1:]) == {found[1].file: None}


# ---------------------------------------------------------------------------------------------------------------------


def test_drift_has_found_and_wanted() -> None:
    wanted = [{"netdev": "r0", "cidr": "192.168.100.1/24", "mtu_bytes": 9000}]
    good = {"r0": {"admin_up": True, "addresses": ["192.168.100.1/24", "fd00::1/64"], "mtu_bytes": 9000}}
    assert netplan.drift(good, wanted) == []
    bad = {"r0": {"admin_up": False, "addresses": ["192.168.100.7/24"], "mtu_bytes": 1500}}
    assert netplan.drift(bad, wanted) == [
        "r0 is administratively down",
        "r0 has 192.168.100.7/24, wanted 192.168.100.1/24",
        "r0 has MTU 1500, wanted 9000",
    ]
    assert netplan.drift({}, wanted) == ["r0 does not exist"]


STUB = """#!/bin/sh
echo "$(basename "$0") $*" >>"$LOG"
case "$(basename "$0") $*" in
    "systemctl -q is-active $RUNNING") exit 0 ;;
    "systemctl -q is-active "*) exit 3 ;;
    "systemd-run "*) for last; do :; done; [ -z "$RUN_NOW" ] || exec sh "$last" ;;
    "netplan generate") exit "${GENERATE:-0}" ;;
    "netplan apply") touch "$APPLIED" ;;
    "ip -j addr show") cat "$LINKS" ;;
    "ip -o address show") cat "$ADDRESSES" ;;
    "nmcli -g GENERAL.STATE,GENERAL.CON-UUID device show "*) printf '%s\\n%s\\n' "$NM_STATE" "$NM_UUID" ;;
    "nmcli -g GENERAL.STATE device show "*) echo "$NM_STATE" ;;
    "sleep "*) ;;
    "ping "*) [ -n "${PEERS:-}" ] || exit 1 ;;
esac
"""


class Guest:
    """A root folder, and stub tools that log what they are asked."""

    def __init__(self, root: Path) -> None:
        self.root, self.log = root / "root", root / "log"
        self.root.mkdir()
        self.log.touch()
        (root / "bin").mkdir()
        for name in ("systemctl", "systemd-run", "netplan", "ip", "nmcli", "networkctl", "sleep", "ping"):
            stub = put(root, f"bin/{name}", STUB)
            stub.chmod(0o755)
        links = [{"ifname": "r0", "mtu": 1500, "flags": ["BROADCAST", "UP"], "addr_info": []}]
        put(
            root,
            "links",
            json.dumps(
                [
                    *links,
                    {
                        "ifname": "m0",
                        "mtu": 1500,
                        "flags": ["UP"],
                        "addr_info": [{"local": "10.0.0.1", "prefixlen": 24, "scope": "global"}],
                    },
                ]
            ),
        )
        put(root, "addresses", "2: m0    inet 10.0.0.1/24 brd 10.0.0.255 scope global m0\n")
        self.env: dict[str, str] = {
            "PATH": f"{root / 'bin'}:{os.environ['PATH']}",
            "LOG": str(self.log),
            "LINKS": str(root / "links"),
            "ADDRESSES": str(root / "addresses"),
            "APPLIED": str(root / "applied"),
            "RUNNING": "NetworkManager",
            "NM_STATE": "30 (disconnected)",
            "NM_UUID": "",
            "RUN_NOW": "",
        }
        self.commit = netplan.Commit(self.run, self.root)

    def run(self, argv: list[str]) -> tuple[int, str, str]:
        done = subprocess.run(argv, env=self.env, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    def asked(self) -> list[str]:
        return self.log.read_text().splitlines()

    def script(self, name: str) -> str:
        done = subprocess.run(
            ["/bin/sh", str(self.commit.dir / name)], env=self.env, capture_output=True, text=True, check=False
        )
        return done.stdout + done.stderr

    def rendered_by(self, path: str) -> None:
        put(self.root, path, "")


@pytest.fixture
def guest(tmp_path: Path) -> Guest:
    return Guest(tmp_path)


FILES: dict[str, str | None] = {"/etc/netplan/90-goodput-rails.yaml": "new\n", "/etc/netplan/40-cx7.yaml": None}
NM_KEYFILE = "run/NetworkManager/system-connections/netplan-r0.nmconnection"


def armed(guest: Guest) -> None:
    put(guest.root, "etc/netplan/40-cx7.yaml", "old\n").chmod(0o640)
    guest.commit.arm(list(FILES), ["r0"], 120)


def test_arming_comes_before_writing_and_keeps_the_old_file(guest: Guest) -> None:
    armed(guest)
    assert guest.commit.state() == "armed"
    assert (guest.root / "etc/netplan/40-cx7.yaml").read_text() == "old\n"
    timer = next(line for line in guest.asked() if line.startswith("systemd-run"))
    assert "--on-active=120s" in timer and "--unit=goodput-netplan-rollback" in timer
    guest.commit.write(FILES)
    ours = guest.root / "etc/netplan/90-goodput-rails.yaml"
    assert stat.S_IMODE(ours.stat().st_mode) == 0o600
    assert not (guest.root / "etc/netplan/40-cx7.yaml").exists()
    assert guest.commit.differing(FILES) == []


def test_rollback_puts_files_and_links_back(guest: Guest) -> None:
    armed(guest)
    guest.commit.write(FILES)
    guest.script("rollback.sh")
    old = guest.root / "etc/netplan/40-cx7.yaml"
    assert (old.read_text(), stat.S_IMODE(old.stat().st_mode)) == ("old\n", 0o640)
    assert not (guest.root / "etc/netplan/90-goodput-rails.yaml").exists()
    asked = guest.asked()
    assert asked.index("nmcli connection reload") < asked.index("nmcli device disconnect r0")
    assert "ip address flush dev r0 scope global" in asked and "ip link set dev r0 mtu 1500" in asked
    assert "ip link set dev r0 down" not in asked
    assert not Path(guest.env["APPLIED"]).exists()
    assert guest.commit.state() == "rolled_back"


def test_rollback_brings_the_former_connection_up(guest: Guest) -> None:
    guest.env |= {"NM_STATE": "100 (connected)", "NM_UUID": "1234-5678"}
    armed(guest)
    guest.script("rollback.sh")
    assert "nmcli -w 60 connection up uuid 1234-5678 ifname r0" in guest.asked()
    assert "nmcli device disconnect r0" not in guest.asked()


def test_rollback_applies_everything_if_an_address_stays_away(guest: Guest) -> None:
    armed(guest)
    put(guest.root.parent, "addresses", "2: m0    inet 10.0.0.19/24 scope global m0\n")
    guest.script("rollback.sh")
    assert Path(guest.env["APPLIED"]).exists()


def test_a_change_that_is_still_open_is_undone_before_the_next(guest: Guest) -> None:
    armed(guest)
    guest.commit.write(FILES)
    guest.env["RUN_NOW"] = "1"
    guest.commit.rollback()
    assert (guest.root / "etc/netplan/40-cx7.yaml").read_text() == "old\n"


def test_netplan_refuses_the_file(guest: Guest) -> None:
    armed(guest)
    guest.env["GENERATE"] = "78"
    with pytest.raises(RuntimeError, match="they were put back"):
        guest.commit.write(FILES)
    assert (guest.root / "etc/netplan/40-cx7.yaml").read_text() == "old\n"
    assert not (guest.root / "etc/netplan/90-goodput-rails.yaml").exists()
    assert guest.commit.state() == ""


@pytest.mark.parametrize(
    ("path", "command"),
    [
        (NM_KEYFILE, "nmcli -w 60 connection up netplan-r0 ifname r0"),
        ("run/systemd/network/10-netplan-r0.network", "networkctl reconfigure r0"),
    ],
)
def test_only_the_interfaces_of_the_change_are_activated(guest: Guest, path: str, command: str) -> None:
    armed(guest)
    guest.rendered_by(path)
    guest.commit.launch(["r0"])
    assert not guest.commit.applied()
    guest.script("apply.sh")
    assert guest.commit.applied()
    asked = guest.asked()
    assert command in asked
    assert not [line for line in asked if "restart" in line or "m0" in line or line == "netplan apply"]


def test_an_unmanaged_device_is_managed_first_and_left_alone_again(guest: Guest) -> None:
    guest.env["NM_STATE"] = "10 (unmanaged)"
    armed(guest)
    guest.rendered_by(NM_KEYFILE)
    guest.commit.launch(["r0"])
    guest.script("apply.sh")
    asked = guest.asked()
    assert asked.index("nmcli device set r0 managed yes") < asked.index(
        "nmcli -w 60 connection up netplan-r0 ifname r0"
    )
    (guest.root / NM_KEYFILE).unlink()
    guest.script("rollback.sh")
    assert "nmcli device set r0 managed no" in guest.asked()


def test_confirming_stops_the_timer_and_keeps_only_the_first_state(guest: Guest) -> None:
    armed(guest)
    guest.commit.disarm()
    assert "systemctl stop goodput-netplan-rollback.timer" in guest.asked()
    assert not list(guest.commit.dir.parent.glob("netplan-commit*"))
    recorded: dict[str, Any] = json.loads((guest.root / netplan.LINKS_FILE).read_text())
    assert recorded["r0"]["mtu_bytes"] == 1500


def test_release_goes_back_to_the_state_before_the_first_change(guest: Guest) -> None:
    armed(guest)
    guest.commit.disarm()
    put(guest.root.parent, "links", json.dumps([{"ifname": "r0", "mtu": 9000, "flags": ["UP"], "addr_info": []}]))
    guest.commit.arm(list(FILES), ["r0"], 120)
    guest.commit.disarm()
    guest.env["RUN_NOW"] = "1"
    assert guest.commit.release()
    assert "ip link set dev r0 mtu 1500" in guest.asked()
    assert not (guest.root / "var/lib/goodput").exists()
    assert not guest.commit.release()


WANTED = [{"netdev": "r0", "cidr": "", "mtu_bytes": 1500, "peers": ["192.168.100.2"]}]


def test_confirmed_when_links_and_peers_are_right(guest: Guest) -> None:
    armed(guest)
    (guest.commit.dir / "applied").touch()
    guest.env["PEERS"] = "yes"
    assert netplan_commit.confirm(guest.commit, guest.run, WANTED, 5) == []
    assert guest.commit.state() == ""


@pytest.mark.parametrize(
    ("applied", "mtu", "said"),
    [
        (False, 1500, "the activation is still running"),
        (True, 9000, "r0 has MTU 1500, wanted 9000"),
        (True, 1500, "192.168.100.2 does not answer through r0"),
    ],
)
def test_not_confirmed_says_why_and_stays_armed(guest: Guest, applied: bool, mtu: int, said: str) -> None:
    armed(guest)
    if applied:
        (guest.commit.dir / "applied").touch()
    assert netplan_commit.confirm(guest.commit, guest.run, [{**WANTED[0], "mtu_bytes": mtu}], 0.1) == [said]
    assert guest.commit.state() == "armed"


def test_a_late_confirmation_does_not_pass(guest: Guest) -> None:
    armed(guest)
    (guest.commit.dir / "applied").touch()
    guest.script("rollback.sh")
    guest.env["PEERS"] = "yes"
    assert netplan_commit.confirm(guest.commit, guest.run, WANTED, 5) == ["it was not confirmed in time"]


def test_a_confirmation_while_the_timer_goes_off_keeps_the_way_back(guest: Guest) -> None:
    """The rollback's unit has started and its script has not said so yet."""
    armed(guest)
    guest.commit.write(FILES)
    guest.env["RUNNING"] = "goodput-netplan-rollback.service"
    assert not guest.commit.disarm()
    guest.script("rollback.sh")
    assert (guest.root / "etc/netplan/40-cx7.yaml").read_text() == "old\n"


def test_a_rollback_that_starts_after_the_confirmation_removes_nothing(guest: Guest) -> None:
    put(guest.root, "etc/netplan/10-own.yaml", "owner's\n")
    guest.commit.arm([*FILES, "/etc/netplan/10-own.yaml"], ["r0"], 120)
    guest.commit.write(FILES)
    # The shell has the script open already.
    script = (guest.commit.dir / "rollback.sh").read_text()
    assert guest.commit.disarm()
    subprocess.run(["/bin/sh", "-c", script], env=guest.env, check=False, capture_output=True)
    undone = ("nmcli -w", "nmcli device disconnect", "ip link set", "ip address flush")
    assert not [line for line in guest.asked() if line.startswith(undone)]
    assert (guest.root / "etc/netplan/10-own.yaml").exists()
    assert (guest.root / "etc/netplan/90-goodput-rails.yaml").read_text() == "new\n"
