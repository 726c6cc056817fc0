"""Each check of preflight fails once, with its message, on the facts of a stock Spark with one thing wrong."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.filter.preflight import clock_findings
from ansible_collections.goodput.spark.plugins.module_utils import preflight as p

DATA = Path(__file__).parent / "data/node_facts"
ROOT = Path(__file__).resolve().parents[2]
RELEASE = {
    "name": "current",
    "os_release": "24.04",
    "driver_branch": "580",
    "driver_floor": "580.95.05",
    "kernel_denied": [
        {
            "release": "7.0.0-1019",
            "reason": "RDMA memory registration fails",
            "remedy": "boot a 6.17.0-10xx kernel, or add kho=off",
            "accepted_with": "kho=off",
        }
    ],
}
PORTS = (
    p.Port(8000, "the frontend", first_only=True),
    p.Port(5555, "LMCache requests", variable="ports.lmcache_request in goodput_profile_set"),
    p.Port(9090, "the worker's metrics"),
)
OWN_UNITS = yaml.safe_load((ROOT / "roles/preflight/defaults/main.yml").read_text())["preflight_own_units"]
ADDRESSES = {"spark1": "192.168.1.21", "spark2": "192.168.1.22"}
Facts = dict[str, Any]


def stock() -> Facts:
    facts: Facts = json.loads((DATA / "spark_constructed.json").read_text())["node"]
    return facts


def pair() -> list[p.Report]:
    """Two healthy Sparks that differ only in what must differ."""
    reports = []
    for number, name in enumerate(ADDRESSES, 1):
        facts = stock()
        facts["os"] |= {"hostname": f"spark-000{number}", "machine_id": f"{number}" * 32}
        facts["host_keys"] = {kind: f"{value}{number}" for kind, value in facts["host_keys"].items()}
        facts["network"]["netdevs"]["enP7s7"]["addresses"][0]["address"] = ADDRESSES[name]
        reports.append(p.Report(name, facts, sent=100.0, clock=100.1, received=100.2))
    return reports


def limits(**changes: Any) -> p.Limits:
    base: dict[str, Any] = {
        "memory_floor_gib": 110,
        "root_free_floor_gib": 100,
        "first_node": "spark1",
        "management_addresses": ADDRESSES,
        "ports": PORTS,
    }
    return p.Limits(**({"replaced_clock_units": ["mine.service"]} | base | changes))


def judge(change: Callable[[Facts], object] | None = None, **bounds: Any) -> list[p.Finding]:
    reports = pair()
    if change:
        change(reports[1].facts)  # type: ignore[arg-type]
    return p.evaluate(reports, limits(**bounds), RELEASE)


def test_two_healthy_sparks_have_no_finding() -> None:
    assert judge() == []


def rail(facts: Facts, name: str, address: str) -> None:
    facts["network"]["netdevs"][name]["addresses"] = [{"address": address, "prefix_length": 24, "scope": "global"}]


def put(part: str, **values: Any) -> Callable[[Facts], object]:
    def change(facts: Facts) -> None:
        facts[part].update(values)

    return change


def listen(port: int, process: str, unit: str) -> Callable[[Facts], object]:
    entry = {"address": "0.0.0.0", "port": port, "process": process, "unit": unit}
    return lambda facts: facts["listening"].append(entry)


def same_subnet(facts: Facts) -> None:
    rail(facts, "enp1s0f0np0", "192.168.100.3")
    rail(facts, "enP2p1s0f0np0", "192.168.100.4")


def wifi_management(facts: Facts) -> None:
    netdevs = facts["network"]["netdevs"]
    netdevs["wlP9s9"]["addresses"], netdevs["enP7s7"]["addresses"] = netdevs["enP7s7"]["addresses"], []


def rail_management(facts: Facts) -> None:
    rail(facts, "enp1s0f0np0", "192.168.1.22")
    facts["network"]["netdevs"]["enP7s7"]["addresses"][0]["address"] = "192.168.1.9"


CASES: list[tuple[str, Callable[[Facts], object], str, str, str, str]] = [
    # id, what is wrong, check, severity, part of found, part of fix
    ("not DGX OS", put("os", dgx_release=""), "os", "error", "no release in /etc/dgx-release", "recovery image"),
    ("old DGX OS", put("os", dgx_release="7.2.1"), "os", "error", "DGX OS 7.2.1", "DGX Dashboard"),
    (
        "Ubuntu 22.04",
        put("os", version_id="22.04", pretty_name="Ubuntu 22.04"),
        "os",
        "error",
        "22.04",
        "goodput_release",
    ),
    ("x86", put("os", architecture="x86_64"), "architecture", "error", "x86_64", "preflight_architecture"),
    ("no driver", lambda f: f.update(driver=""), "driver", "error", "no NVIDIA", "unplug the supply"),
    ("595", lambda f: f.update(driver="595.44"), "driver", "error", "595.44", "nvidia-driver-580-open"),
    ("old 580", lambda f: f.update(driver="580.82.07"), "driver", "error", "580.82.07", "full-upgrade"),
    ("less memory", put("memory", total_bytes=80 * p.GIB), "memory", "error", "80.0 GiB", "KHO"),
    ("fragmented", put("memory", free_2mib_blocks=0), "fragmentation", "warning", "no free contiguous", "reboot"),
    ("KHO", put("memory", cma_total_bytes=0, cma_free_bytes=7 * p.GIB), "kho", "error", "CmaTotal 0", "kho=off"),
    ("disk full", put("disk", root_free_bytes=9 * p.GIB), "disk", "error", "9.0 GiB free", "make room"),
    ("leftover", put("disk", factory_test_image_bytes=10 * p.GIB), "leftover", "warning", "/test.img, 10.0", "delete"),
    ("no NTP", put("ntp", synchronised=False, daemons=[]), "ntp", "warning", "no time daemon", "chrony"),
    (
        "no upstream",
        put("ntp", synchronised=False, daemons=["chronyd"]),
        "ntp",
        "warning",
        "chronyd running",
        "host_ntp_servers",
    ),
    (
        "port taken",
        listen(5555, "nginx", "nginx.service"),
        "port",
        "error",
        "5555 taken by nginx of nginx.service",
        "disable --now nginx.service",
    ),
    (
        "clock unit",
        lambda f: f["clock_units"].append({"name": "x.service", "path": "/etc/x", "reason": "calls nvidia-smi -lgc"}),
        "clock-unit",
        "error",
        "nvidia-smi -lgc",
        "disable --now x.service",
    ),
    (
        "clock unit that may be replaced",
        lambda f: f["clock_units"].append(
            {"name": "mine.service", "path": "/etc/x", "reason": "calls nvidia-smi -lgc"}
        ),
        "clock-unit",
        "warning",
        "nvidia-smi -lgc",
        "the role power stops",
    ),
    (
        "NVML",
        lambda f: f["foreign_nvml"].append(
            {"path": "/usr/local/lib/libnvidia-ml.so.1", "reason": "belongs to no package"}
        ),
        "nvml",
        "error",
        "belongs to no package",
        "remove it",
    ),
    (
        "NVML preload",
        lambda f: f["foreign_nvml"].append({"path": "/etc/ld.so.preload", "reason": "preloads /opt/shim.so"}),
        "nvml",
        "error",
        "preloads /opt/shim.so",
        "remove the line from /etc/ld.so.preload",
    ),
    (
        "running k3s",
        lambda f: f["kubernetes"].append({"kind": "k3s", "path": "/usr/local/bin/k3s", "active": True}),
        "kubernetes",
        "error",
        "k3s (/usr/local/bin/k3s, running)",
        "uninstall k3s",
    ),
    (
        "kubeadm lying about",
        lambda f: f["kubernetes"].append({"kind": "kubeadm", "path": "/usr/bin/kubeadm", "active": False}),
        "kubernetes",
        "warning",
        "kubeadm (/usr/bin/kubeadm)",
        "uninstall kubeadm",
    ),
    ("twins", same_subnet, "twins", "warning", "192.168.100.0/24", "each rail its own /24"),
    ("Wi-Fi", wifi_management, "wifi", "error", "Wi-Fi netdev wlP9s9", "connect the wired port"),
    ("rail", rail_management, "management", "error", "on the rail enp1s0f0np0", "192.168.1.9"),
    (
        "address elsewhere",
        lambda f: f["network"]["netdevs"]["enP7s7"].update(addresses=[]),
        "management",
        "error",
        "192.168.1.22 is on no netdev",
        "ansible_host",
    ),
    ("no route", put("network", default_netdev=""), "route", "warning", "no default route", "gateway"),
    ("route by rail", put("network", default_netdev="enp1s0f0np0"), "route", "error", "through the rail", "netplan"),
    ("route by Wi-Fi", put("network", default_netdev="wlP9s9"), "route", "warning", "Wi-Fi netdev", "wired port"),
    (
        "half-configured",
        lambda f: f["pending_packages"].append("linux-image (half-configured)"),
        "packages",
        "error",
        "linux-image (half-configured)",
        "dpkg --configure -a",
    ),
    ("updater", put("firmware_updater", installed=True), "firmware", "warning", "mlnx-fw-updater", "apt-mark hold"),
    ("no sudo", lambda f: f.update(as_root=False), "sudo", "error", "not root", "--ask-become-pass"),
]


@pytest.mark.parametrize(
    ("change", "check", "severity", "found", "fix"), [c[1:] for c in CASES], ids=[c[0] for c in CASES]
)
def test_one_thing_wrong_on_the_second_node(
    change: Callable[[Facts], object], check: str, severity: str, found: str, fix: str
) -> None:
    findings = [one for one in judge(change) if one.check != "alike"]
    assert [(one.node, one.check, one.severity) for one in findings] == [("spark2", check, severity)]
    assert found in findings[0].found
    assert fix in findings[0].fix
    assert findings[0].required


# --- kernel -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kernel", "denied"),
    [
        ("7.0.0-1019-nvidia", True),
        ("7.0.0-1019", True),
        ("7.0.0-1019.19-nvidia", True),
        ("7.0.0-10190-nvidia", False),
        ("7.0.0-1020-nvidia", False),
        ("17.0.0-1019-nvidia", False),
    ],
)
def test_kernel_deny_list(kernel: str, denied: bool) -> None:
    findings = [one for one in judge(put("os", kernel=kernel)) if one.check == "kernel"]
    assert bool(findings) == denied
    if denied:
        assert "6.17.0-1032-nvidia, choose it in GRUB" in findings[0].fix
        assert "kho=off" in findings[0].fix
        assert findings[0].severity == "error"


def test_kernel_with_the_accepted_option_is_a_warning() -> None:
    change = put("os", kernel="7.0.0-1019-nvidia", command_line=["ro", "kho=off"])
    assert [one.severity for one in judge(change) if one.check == "kernel"] == ["warning"]


def test_kernel_option_does_not_count_when_kdump_reserves_memory() -> None:
    change = put("os", kernel="7.0.0-1019-nvidia", command_line=["ro", "kho=off"], kdump_reserved_bytes=256 * 1024**2)
    (finding,) = [one for one in judge(change) if one.check == "kernel"]
    assert finding.severity == "error"
    assert "kdump reserves 256 MiB" in finding.fix


def test_the_denied_kernel_is_never_offered() -> None:
    change = put("os", kernel="7.0.0-1019-nvidia", installed_kernels=["7.0.0-1019-nvidia", "7.0.0-1019-nvidia-64k"])
    (finding,) = [one for one in judge(change) if one.check == "kernel"]
    assert "choose it in GRUB" not in finding.fix


def test_shipped_release_set_denies_the_kernel() -> None:
    shipped = yaml.safe_load((ROOT / "vars/releases/current.yml").read_text())["goodput_release_set"]
    reports = pair()
    for report in reports:
        report.facts["os"]["kernel"] = "7.0.0-1019-nvidia"  # type: ignore[index]
    assert {one.node for one in p.evaluate(reports, limits(), shipped) if one.check == "kernel"} == {"spark1", "spark2"}


# --- ports ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("port", "unit", "conflict"),
    [
        (5555, "goodput-lmcache.service", False),
        (5555, "", True),
        # A second site.yml on K3s: LMCache's pod is in the network of the host.
        (5555, "kubepods", False),
        (5555, "cri-containerd-0a1b.scope", True),
        # Only the first node serves the frontend.
        (8000, "other.service", False),
        (11000, "dgx-dashboard.service", False),
    ],
)
def test_ports_of_our_own_units_and_of_the_other_node_are_no_conflict(port: int, unit: str, conflict: bool) -> None:
    assert bool(judge(listen(port, "x", unit), own_units=OWN_UNITS)) == conflict


@pytest.mark.parametrize(
    ("process", "unit", "fix"),
    [
        ("docker-proxy", "docker.service", "`docker ps --filter publish=5555` names the container: docker stop it,"),
        ("python3", "user@1000.service/lab.service", "as the user of user@1000.service: systemctl --user disable"),
        ("python3", "user@1000.service/vte-spawn-1.scope", "end python3, or choose another port with ports.lmcache_"),
    ],
)
def test_the_remedy_ends_what_has_the_port_and_no_more(process: str, unit: str, fix: str) -> None:
    (finding,) = judge(listen(5555, process, unit))
    assert finding.fix.startswith(fix)


def test_no_variable_is_named_where_none_moves_a_port() -> None:
    (finding,) = judge(listen(9090, "prometheus", "prometheus.service"))
    assert finding.fix == "sudo systemctl disable --now prometheus.service"


def test_port_of_the_first_node() -> None:
    reports = pair()
    listen(8000, "python3", "session-4.scope")(reports[0].facts)  # type: ignore[arg-type]
    (finding,) = p.evaluate(reports, limits(), RELEASE)
    assert (finding.node, finding.check) == ("spark1", "port")
    assert "end python3" in finding.fix


def test_kubernetes_and_route_are_errors_on_k3s() -> None:
    def change(facts: Facts) -> None:
        facts["kubernetes"].append({"kind": "rke2", "path": "/usr/local/bin/rke2", "active": False})
        facts["network"]["default_netdev"] = ""

    assert {one.check: one.severity for one in judge(change, platform="k3s")} == {
        "kubernetes": "error",
        "route": "error",
    }


def test_separate_subnets_and_link_local_addresses_are_no_twins() -> None:
    def change(facts: Facts) -> None:
        rail(facts, "enp1s0f0np0", "192.168.100.2")
        rail(facts, "enP2p1s0f0np0", "192.168.101.2")
        for name in ("enp1s0f0np0", "enP2p1s0f0np0"):
            facts["network"]["netdevs"][name]["addresses"] += [
                {"address": "169.254.1.1", "prefix_length": 16, "scope": "link"},
                {"address": "fe80::1", "prefix_length": 64, "scope": "link"},
            ]

    assert judge(change) == []


# --- nodes together ---------------------------------------------------------------------------------------------------


def test_equal_machine_ids_host_keys_and_hostnames() -> None:
    reports = pair()
    first, second = reports[0].facts, reports[1].facts
    assert first is not None and second is not None
    second["os"].update(machine_id=first["os"]["machine_id"], hostname=first["os"]["hostname"])
    second["host_keys"].update({"ssh-ed25519": first["host_keys"]["ssh-ed25519"]})
    findings = p.evaluate(reports, limits(), RELEASE)
    assert [(one.node, one.check, one.severity) for one in findings] == [
        ("spark1, spark2", "machine-id", "error"),
        ("spark1, spark2", "host-key", "error"),
        ("spark1, spark2", "hostname", "error"),
    ]
    assert "CVE-2026-24218" in findings[0].required and "systemd-machine-id-setup" in findings[0].fix
    assert "on spark2" in findings[1].fix


def test_missing_ids_and_keys_are_not_equal_ones() -> None:
    reports = pair()
    for report in reports:
        report.facts["os"]["machine_id"] = ""  # type: ignore[index]
        report.facts["host_keys"].clear()  # type: ignore[index]
    assert p.evaluate(reports, limits(), RELEASE) == []


@pytest.mark.parametrize(
    ("offset", "round_trip", "finding"),
    [
        (0.4, 0.2, ""),
        (120.0, 0.2, "120.0 s ahead of spark1"),
        (-120.0, 0.2, "120.0 s ahead of spark2"),
        # Less than what the round trips leave open proves nothing.
        (2.0, 4.0, ""),
        (7.0, 4.0, "7.0 s ahead of spark1 (±4.0 s)"),
    ],
)
def test_clocks_are_compared_within_what_the_round_trip_allows(offset: float, round_trip: float, finding: str) -> None:
    facts = [report.facts for report in pair()]
    half = round_trip / 2
    reports = [
        p.Report("spark1", facts[0], sent=1000.0, clock=1000.0 + half, received=1000.0 + round_trip),
        p.Report("spark2", facts[1], sent=5000.0, clock=5000.0 + half + offset, received=5000.0 + round_trip),
    ]
    found = [one for one in p.evaluate(reports, limits(), RELEASE) if one.check == "clock"]
    assert ([one.found for one in found] or [""])[0].startswith(finding)
    assert bool(found) == bool(finding)


def test_both_clocks_off_from_the_controller_is_a_warning() -> None:
    reports = [
        p.Report(report.name, report.facts, sent=100.0, clock=4000.0, received=100.2, error=report.error)
        for report in pair()
    ]
    findings = p.evaluate(reports, limits(), RELEASE)
    assert [(one.check, one.severity) for one in findings] == [("clock-controller", "warning")] * 2


def test_no_clock_sample_is_no_offset() -> None:
    reports = [p.Report(report.name, report.facts, sent=100.0, received=100.2) for report in pair()]
    assert p.evaluate(reports, limits(), RELEASE) == []


def test_clock_filter_needs_no_facts() -> None:
    samples = {
        "spark1": {"clock": {"sent_seconds": 10.0, "node_seconds": 10.1, "received_seconds": 10.2}},
        "spark2": {"clock": {"sent_seconds": 10.0, "node_seconds": 15.1, "received_seconds": 10.2}},
    }
    hostvars = {name: {"__probe": sample} for name, sample in samples.items()} | {"spark3": {}}
    (finding,) = clock_findings(hostvars, list(hostvars), "__probe")
    assert finding["found"].startswith("5.0 s ahead of spark1")
    assert clock_findings(hostvars, list(hostvars), "__probe", limit_seconds=6) == []


def test_unlike_kernels_are_named() -> None:
    (finding,) = judge(put("os", kernel="6.17.0-1029-nvidia"))
    assert finding.found == "kernel: spark1 6.17.0-1032-nvidia, spark2 6.17.0-1029-nvidia"
    assert finding.severity == "warning"


def test_unreachable_failed_and_left_out_nodes_are_all_named() -> None:
    reports = [
        pair()[0],
        p.Report("spark2", error="Connection refused", unreachable=True),
        p.Report("spark3", error="python3: not found"),
        p.Report("spark4"),
    ]
    findings = p.evaluate(reports, limits(), RELEASE)
    assert [(one.node, one.check, one.severity) for one in findings] == [
        ("spark2", "ssh", "error"),
        ("spark3", "probe", "error"),
        ("spark4", "not-looked-at", "warning"),
    ]


def test_sudo_error_is_shown_with_the_facts_that_came_without_it() -> None:
    reports = pair()
    assert reports[0].facts is not None
    facts = copy.deepcopy(dict(reports[0].facts)) | {"as_root": False}
    findings = p.evaluate([p.Report("spark1", facts, error="Missing sudo password")], limits(), RELEASE)
    assert [(one.check, one.found) for one in findings] == [("sudo", "Missing sudo password")]


def test_all_findings_of_all_nodes_are_in_one_table() -> None:
    reports = pair()
    for report in reports:
        report.facts["driver"] = "595.44"  # type: ignore[index]
        report.facts["os"]["architecture"] = "x86_64"  # type: ignore[index]
    findings = p.evaluate(reports, limits(), RELEASE)
    assert len(findings) == 4
    table = p.render_table([one.as_dict() for one in findings])
    assert table.splitlines()[0] == "preflight: 4 errors, 0 warnings"
    assert table.count("✗ driver") == 2 and table.count("✗ architecture") == 2


def test_accepted_checks_become_warnings_that_say_so() -> None:
    (finding,) = judge(wifi_management, accept=["wifi"])
    assert finding.severity == "warning"
    assert finding.fix.startswith("accepted (preflight_accept)")


def test_limits_can_be_switched_off() -> None:
    def change(facts: Facts) -> None:
        facts["os"].update(architecture="x86_64", dgx_release="", version_id="12", kernel="6.1.0")
        facts["driver"] = ""

    reports = pair()
    for report in reports:
        change(report.facts)  # type: ignore[arg-type]
    bounds = limits(architecture="", dgx_os_floor="", clock_offset_limit_seconds=0)
    assert p.evaluate(reports, bounds, {"driver_branch": "", "os_release": "12", "kernel_denied": []}) == []


def test_recorded_debian_guest_passes_with_the_virtual_release_set() -> None:
    facts = json.loads((DATA / "debian_guest.json").read_text())["node"]
    release = yaml.safe_load((ROOT / "vars/releases/virtual.yml").read_text())["goodput_release_set"]
    bounds = limits(
        architecture="",
        dgx_os_floor="",
        memory_floor_gib=1,
        root_free_floor_gib=1,
        management_addresses={"spark1": "10.77.0.1"},
    )
    findings = p.evaluate([p.Report("spark1", facts)], bounds, release)
    assert [(one.check, one.severity) for one in findings] == [("ntp", "warning")]


# --- table ------------------------------------------------------------------------------------------------------------


def test_table_without_findings_is_one_line() -> None:
    assert p.render_table([]) == "preflight: 0 errors, 0 warnings"


def test_table_puts_errors_first_wraps_and_keeps_every_word() -> None:
    warning = p.Finding("spark1", "leftover", "/test.img", "nothing", "delete it", p.WARNING)
    error = p.Finding("spark2", "disk", "word " * 30, "more", "make room")
    table = p.render_table([warning.as_dict(), error.as_dict()], "inputs")
    assert table.startswith("inputs: 1 error, 1 warning\n")
    assert table.index("✗ disk") < table.index("! leftover")
    assert table.count("word") == 30
    assert max(len(line) for line in table.splitlines()) <= 140
