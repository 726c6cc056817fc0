"""node_facts on small trees that look like a Spark's /proc, /sys and /etc."""

from __future__ import annotations

import base64
import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import node_facts as n

DATA = Path(__file__).parent / "data/node_facts"
KEY = base64.b64encode(b"a public key").decode()


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def link(root: Path, name: str, target: str) -> None:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def no_command(command: list[str]) -> tuple[int, str]:
    return 127, ""


@pytest.fixture
def node(tmp_path: Path) -> n.Node:
    for name in ("root", "proc", "sys"):
        (tmp_path / name).mkdir()
    return n.Node(tmp_path / "root", tmp_path / "proc", tmp_path / "sys", no_command)


# --- parsers ----------------------------------------------------------------------------------------------------------


def test_last_assignment_wins_because_every_ota_appends() -> None:
    text = (
        'DGX_NAME="DGX Spark"\nDGX_OTA_VERSION="7.3.1"\nDGX_OTA_DATE="Wed"\nDGX_OTA_VERSION="7.5.0"\n# x\nnot a pair\n'
    )
    assert n.parse_assignments(text)["DGX_OTA_VERSION"] == "7.5.0"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for aarch64  580.173.02  Release Build\nGCC version: 13",
            "580.173.02",
        ),
        ("NVRM version: NVIDIA UNIX aarch64 Kernel Module  595.44  Wed", "595.44"),
        ("", ""),
    ],
)
def test_driver_version(text: str, expected: str) -> None:
    assert n.parse_driver_version(text) == expected


@pytest.mark.parametrize(
    ("page_bytes", "blocks"),
    # 4 KiB pages: order 9 is 2 MiB, order 10 counts twice. 64 KiB pages: order 5 is 2 MiB.
    [(4096, 3 + 2 * 4), (65536, 7 + 2 * 1 + 4 * 1 + 8 * 0 + 16 * 3 + 32 * 4)],
)
def test_free_blocks_of_2_mib(page_bytes: int, blocks: int) -> None:
    text = "Node 0, zone   Normal  900 800 5 6 9 7 1 1 0 3 4\n"
    assert n.parse_buddyinfo(text, page_bytes) == blocks


def test_dpkg_states() -> None:
    text = "\n\n".join(
        f"Package: {name}\nStatus: {status}\nVersion: 1.0"
        for name, status in {
            "done": "install ok installed",
            "gone": "deinstall ok config-files",
            "kept": "hold ok installed",
            "half": "install ok half-configured",
            "waits": "install ok triggers-pending",
            "broken": "install reinstreq installed",
        }.items()
    )
    installed, pending, held = n.parse_dpkg(text)
    assert sorted(installed) == ["broken", "done", "kept"]
    assert pending == ["broken (reinstreq)", "half (half-configured)", "waits (triggers-pending)"]
    assert held == ["kept"]


@pytest.mark.parametrize(
    ("field", "expected"),
    [
        ("0100007F:1F40", ("127.0.0.1", 8000)),
        ("00000000000000000000000000000000:0016", ("::", 22)),
        ("0000000000000000FFFF00000100007F:0050", ("::ffff:127.0.0.1", 80)),
    ],
)
def test_socket_address(field: str, expected: tuple[str, int]) -> None:
    assert n.socket_address(field) == expected


# --- one tree each ----------------------------------------------------------------------------------------------------


def test_operating_system_of_a_spark(node: n.Node) -> None:
    write(
        node.root,
        {
            "etc/os-release": 'ID=ubuntu\nVERSION_ID="24.04"\n',
            "etc/dgx-release": 'DGX_SWBUILD_VERSION="7.2.3"\nDGX_OTA_VERSION="7.5.0"\n',
            "etc/fastos-release": 'NAME="DGX SPARK FASTOS"\nVERSION="1.91.51"\n',
            "etc/machine-id": "abc\n",
            "boot/vmlinuz-6.17.0-1032-nvidia": "",
        },
    )
    write(node.proc, {"sys/kernel/osrelease": "7.0.0-1019-nvidia\n", "cmdline": "ro kho=off\n"})
    write(node.sysfs, {"kernel/kexec_crash_size": "1048576\n"})
    system = node.operating_system()
    assert (system["dgx_release"], system["fastos_release"], system["version_id"]) == ("7.5.0", "1.91.51", "24.04")
    assert (system["kernel"], system["installed_kernels"]) == ("7.0.0-1019-nvidia", ["6.17.0-1032-nvidia"])
    assert (system["command_line"], system["kdump_reserved_bytes"]) == (["ro", "kho=off"], 1048576)


def test_factory_image_has_only_the_build_version(node: n.Node) -> None:
    write(node.root, {"etc/dgx-release": 'DGX_SWBUILD_VERSION="7.2.3"\n'})
    assert node.operating_system()["dgx_release"] == "7.2.3"


def test_host_keys_are_printed_as_ssh_keygen_does(node: n.Node) -> None:
    write(
        node.root,
        {
            "etc/ssh/ssh_host_ed25519_key.pub": f"ssh-ed25519 {KEY} root@x\n",
            "etc/ssh/ssh_host_rsa_key.pub": "ssh-rsa not*base64\n",
        },
    )
    digest = base64.b64encode(hashlib.sha256(b"a public key").digest()).decode().rstrip("=")
    assert node.host_keys()["ssh-ed25519"] == f"SHA256:{digest}"


def listening_tree(node: n.Node) -> None:
    header = "  sl  local_address rem_address st tx rx tr tm retr uid timeout inode\n"
    line = "   {i}: {local} 00000000:0000 {state} 00000000:00000000 00:00000000 00000000 0 0 {inode} 1 0\n"
    write(
        node.proc,
        {
            "net/tcp": header
            + line.format(i=0, local="00000000:1F40", state="0A", inode=11)
            + line.format(i=1, local="0100007F:0050", state="0A", inode=12)
            + line.format(i=2, local="0100007F:0051", state="01", inode=13),
            "77/comm": "python3\n",
            "77/cgroup": "0::/system.slice/goodput-frontend.service\n",
            "88/comm": "nginx\n",
            "88/cgroup": "0::/user.slice/user-1000.slice/session-3.scope\n",
        },
    )
    link(node.proc, "77/fd/3", "socket:[11]")
    link(node.proc, "77/fd/4", "/dev/null")
    link(node.proc, "88/fd/9", "socket:[12]")


def test_listening_sockets_name_process_and_unit(node: n.Node) -> None:
    listening_tree(node)
    assert node.listening() == [
        {"address": "127.0.0.1", "port": 80, "process": "nginx", "unit": "session-3.scope"},
        {"address": "0.0.0.0", "port": 8000, "process": "python3", "unit": "goodput-frontend.service"},
    ]


@pytest.mark.parametrize(
    "group",
    [
        "0::/kubepods.slice/kubepods-podab.slice/cri-containerd-0a1b.scope\n",
        "0::/kubepods/besteffort/podab/0a1b\n",
        "0::/system.slice/k3s-agent.service/kubepods/podab/0a1b\n",
    ],
)
def test_a_process_in_a_pod_is_the_pods_whatever_the_cgroup_driver(node: n.Node, group: str) -> None:
    write(node.proc, {"99/cgroup": group})
    assert node.process_unit("99") == "kubepods"


def test_a_unit_of_a_users_own_manager_is_told_apart(node: n.Node) -> None:
    write(node.proc, {"99/cgroup": "0::/user.slice/user-1000.slice/user@1000.service/app.slice/lab.service\n"})
    assert node.process_unit("99") == "user@1000.service/lab.service"


def test_rails_are_found_by_pci_by_parent_and_by_gid(node: n.Node) -> None:
    write(
        node.sysfs,
        {
            "class/infiniband/rocep1s0f0/device/net/enp1s0f0np0/address": "x",
            "class/infiniband/rxe0/parent": "eth5\n",
            "class/infiniband/mlx5_1/ports/1/gid_attrs/ndevs/0": "enP2p1s0f0np0\n",
        },
    )
    assert node.rdma_netdevs() == {"enp1s0f0np0", "eth5", "enP2p1s0f0np0"}


def test_network(node: n.Node) -> None:
    write(
        node.sysfs,
        {
            "class/net/wlP9s9/phy80211/name": "phy0",
            "class/net/wlP9s9/device/vendor": "x",
            "class/net/wlP9s9/mtu": "1500",
            "class/net/enP7s7/mtu": "1500",
            "class/net/enP7s7/device/vendor": "x",
            "class/net/bonding_masters": "",
        },
    )
    write(
        node.proc,
        {
            "net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
            "wlP9s9\t00000000\t0101A8C0\t0003\t0\t0\t600\t00000000\t0\t0\t0\n"
            "enP7s7\t00000000\t0101A8C0\t0003\t0\t0\t100\t00000000\t0\t0\t0\n"
            "enP7s7\t0001A8C0\t00000000\t0001\t0\t0\t100\t00FFFFFF\t0\t0\t0\n"
        },
    )
    link_json = json.dumps(
        [
            {
                "ifname": "enP7s7",
                "addr_info": [{"family": "inet", "local": "192.168.1.21", "prefixlen": 24, "scope": "global"}],
            }
        ]
    )
    node.run = lambda command: (0, link_json)
    network = node.network()
    assert network["default_netdev"] == "enP7s7"
    assert sorted(network["netdevs"]) == ["enP7s7", "wlP9s9"]
    assert network["netdevs"]["wlP9s9"]["wireless"] and not network["netdevs"]["enP7s7"]["wireless"]
    assert network["netdevs"]["enP7s7"]["addresses"][0]["address"] == "192.168.1.21"
    assert network["routes"][2]["destination"] == "192.168.1.0/24"


def test_clock_units(node: n.Node) -> None:
    service = "[Service]\nExecStart={}\n"
    write(
        node.root,
        {
            "etc/systemd/system/my-gpu.service": service.format("/usr/bin/nvidia-smi -lgc 0,2200"),
            "etc/systemd/system/by-script.service": service.format("/bin/bash /usr/local/bin/cap.sh"),
            "usr/local/bin/cap.sh": "#!/bin/sh\nsleep 5\nnvidia-smi -i 0 --lock-gpu-clocks 300,2100\n",
            "etc/systemd/system/gb10-clock-cap.service": service.format("/opt/cap"),
            "etc/systemd/system/goodput-power.service": service.format("nvidia-smi -lgc 300,2200"),
            "etc/systemd/system/nvidia-persistenced.service.d/cap.conf": "[Service]\nExecStartPost=nvidia-smi -lgc 1\n",
            "usr/lib/systemd/system/nvidia-persistenced.service": service.format("/usr/bin/nvidia-persistenced"),
            "etc/systemd/system/query.service": service.format("nvidia-smi --query-gpu=clocks.sm --format=csv"),
            "etc/cron.d/gpu": "@reboot root nvidia-smi -lgc 0,2000\n",
        },
    )
    found = {unit["name"]: unit["reason"] for unit in node.clock_units()}
    assert found == {
        "my-gpu.service": "calls nvidia-smi -lgc",
        "by-script.service": "starts /usr/local/bin/cap.sh, which calls nvidia-smi -lgc",
        "gb10-clock-cap.service": "known clock-lock unit",
        "nvidia-persistenced.service": "calls nvidia-smi -lgc",
        "gpu": "calls nvidia-smi -lgc",
    }


def test_a_clock_unit_that_nothing_starts_is_not_enabled(node: n.Node) -> None:
    text = "[Service]\nExecStart=nvidia-smi -lgc 0,2200\n"
    names = ("off", "on", "timed")
    write(node.root, {f"etc/systemd/system/{name}.service": text for name in names})
    write(node.root, {"etc/systemd/system/timed.timer": "[Timer]\nOnBootSec=1\n", "etc/rc.local": text})
    wants = node.root / "etc/systemd/system/multi-user.target.wants"
    wants.mkdir(exist_ok=True)
    (wants / "on.service").symlink_to("../on.service")
    found = {unit["name"]: unit["enabled"] for unit in node.clock_units()}
    assert found == {"off.service": False, "on.service": True, "timed.service": True, "/etc/rc.local": True}


def nvml_tree(node: n.Node, content: str) -> None:
    directory = f"usr/lib/{os.uname().machine}-linux-gnu"
    digest = hashlib.md5(b"real", usedforsecurity=False).hexdigest()
    write(
        node.root,
        {
            f"{directory}/libnvidia-ml.so.580.173.02": content,
            "var/lib/dpkg/info/libnvidia-compute-580.list": f"/{directory}/libnvidia-ml.so.580.173.02\n",
            "var/lib/dpkg/info/libnvidia-compute-580.md5sums": f"{digest}  {directory}/libnvidia-ml.so.580.173.02\n",
        },
    )
    link(node.root, f"{directory}/libnvidia-ml.so.1", "libnvidia-ml.so.580.173.02")


def test_packaged_nvml_is_not_foreign(node: n.Node) -> None:
    nvml_tree(node, "real")
    assert node.foreign_nvml() == []


def test_foreign_nvml_in_all_its_forms(node: n.Node) -> None:
    nvml_tree(node, "overwritten")
    write(
        node.root,
        {
            "usr/local/lib/libnvidia-ml.so.1": "shim",
            "etc/ld.so.preload": "/opt/libnvml_shim.so\n",
            "etc/environment": "PATH=/bin\nLD_PRELOAD=/opt/nvml-unified-shim.so\n",
            "etc/profile.d/other.sh": "# LD_PRELOAD=/opt/nvml.so\nexport LD_PRELOAD=/usr/lib/libjemalloc.so\n",
        },
    )
    reasons = [entry["reason"] for entry in node.foreign_nvml()]
    assert reasons == [
        "preloads /opt/libnvml_shim.so",
        "sets LD_PRELOAD=/opt/nvml-unified-shim.so",
        "differs from the file its package installed",
        "belongs to no package",
    ]


def test_kubernetes_that_is_not_ours(node: n.Node) -> None:
    write(node.root, {"usr/local/bin/k3s": "", "etc/systemd/system/k3s.service": "", "usr/bin/kubeadm": ""})
    write(node.sysfs, {"fs/cgroup/system.slice/k3s.service/cgroup.procs": "42\n"})
    assert node.kubernetes() == [
        {"kind": "k3s", "path": "/usr/local/bin/k3s", "active": True},
        {"kind": "kubeadm", "path": "/usr/bin/kubeadm", "active": False},
    ]
    write(node.root, {"var/lib/goodput/manifest.d/k3s.json": "{}"})
    assert [entry["kind"] for entry in node.kubernetes()] == ["kubeadm"]


def test_unit_states_without_systemctl(node: n.Node) -> None:
    link(node.root, "etc/systemd/system/sleep.target", "/dev/null")
    write(node.root, {"usr/lib/systemd/system/chrony.service": "", "usr/lib/systemd/system/suspend.target": ""})
    link(
        node.root, "etc/systemd/system/multi-user.target.wants/chrony.service", "/usr/lib/systemd/system/chrony.service"
    )
    write(node.sysfs, {"fs/cgroup/system.slice/chrony.service/cgroup.procs": "7\n"})
    assert node.unit_state("chrony.service") == {"exists": True, "masked": False, "enabled": True, "active": True}
    assert node.unit_state("none.service") == {"exists": False, "masked": False, "enabled": False, "active": False}
    masked = node.sleep_targets()
    assert masked["sleep.target"] and not masked["suspend.target"]


def test_hosts_leaves_out_our_own_block(node: n.Node) -> None:
    write(
        node.root,
        {
            "etc/hosts": "127.0.1.1 spark-1a2b\n# BEGIN goodput.spark host\n127.0.0.1 localhost\n"
            "10.0.0.2 spark2\n# END goodput.spark host\n::1 ip6-localhost # loopback\n"
        },
    )
    assert node.hosts() == {"spark-1a2b": ["127.0.1.1"], "ip6-localhost": ["::1"]}


def test_account(node: n.Node) -> None:
    write(
        node.root, {"etc/passwd": "root:x:0:0::/root:/bin/sh\ngoodput:x:999:995::/var/lib/goodput:/usr/sbin/nologin\n"}
    )
    assert node.account("goodput") == {
        "uid": 999,
        "gid": 995,
        "home": "/var/lib/goodput",
        "shell": "/usr/sbin/nologin",
    }
    assert node.account("nobody") == {}


def test_memory_shows_the_kho_tell_tale(node: n.Node) -> None:
    write(
        node.proc,
        {
            "meminfo": "MemTotal: 1024 kB\nCmaTotal: 0 kB\nCmaFree: 512 kB\nHugePages_Total: 7\n",
            "sys/vm/swappiness": "60\n",
        },
    )
    memory = node.memory()
    assert (memory["total_bytes"], memory["cma_total_bytes"], memory["cma_free_bytes"]) == (1024**2, 0, 512 * 1024)


# --- the whole --------------------------------------------------------------------------------------------------------


def shape(value: Any) -> Any:
    return {key: shape(value[key]) for key in sorted(value)} if isinstance(value, dict) else type(value).__name__


@pytest.mark.parametrize("name", ["spark_constructed", "debian_guest"])
def test_recorded_facts_have_the_shape_of_live_ones(name: str) -> None:
    recorded = json.loads((DATA / f"{name}.json").read_text())["node"]
    live = n.Node().collect()
    assert sorted(recorded) == sorted(live)
    for part in ("os", "memory", "disk", "firmware_updater", "ntp", "sleep_targets_masked"):
        assert shape(recorded[part]) == shape(live[part]), part
    assert sorted(recorded["network"]) == sorted(live["network"])
    loopback = recorded["network"]["netdevs"]["lo"]
    assert sorted(loopback) == sorted(live["network"]["netdevs"]["lo"])


def test_an_empty_tree_gives_facts_and_no_error(node: n.Node) -> None:
    facts = node.collect(["chrony"], ["chrony.service"], "goodput", ["localhost"])
    assert facts["packages"] == {"chrony": ""}
    assert facts["os"]["kernel"] == "" and facts["listening"] == [] and facts["network"]["netdevs"] == {}
    assert "127.0.0.1" in facts["resolved"]["localhost"]


def test_only_the_asked_sections_are_read(node: n.Node) -> None:
    def fail(command: list[str]) -> tuple[int, str]:
        raise AssertionError(command)

    node.run = fail
    assert sorted(node.collect(sections=["memory", "user"])) == ["as_root", "memory", "user"]
    with pytest.raises(ValueError, match="found sections memroy, required some of os,"):
        node.collect(sections=["memroy"])


def test_collect_changes_nothing(node: n.Node, tmp_path: Path) -> None:
    listening_tree(node)
    nvml_tree(node, "real")

    def listing() -> dict[str, int]:
        return {str(path): path.lstat().st_mtime_ns for path in sorted(tmp_path.rglob("*"))}

    before = listing()
    node.collect()
    assert listing() == before


def resting(root: Path) -> dict[str, int]:
    for name in ("proc", "sys"):
        (root / name).mkdir(exist_ok=True)
    (root / "proc/meminfo").write_text("MemTotal: 1000 kB\nMemAvailable: 600 kB\nSwapTotal: 0 kB\n")
    return n.Node(root=root, proc=root / "proc", sysfs=root / "sys").memory_at_rest()


def test_memory_at_rest_is_measured_until_something_serves(tmp_path: Path) -> None:
    assert resting(tmp_path)["available_bytes"] == 600 << 10
    (tmp_path / "sys/fs/cgroup/system.slice/goodput-worker.service").mkdir(parents=True)
    assert "available_bytes" not in resting(tmp_path)


@pytest.mark.parametrize(("total_bytes", "expected_bytes"), [(1000 << 10, 700 << 10), (900 << 10, 600 << 10)])
def test_recorded_memory_counts_while_the_kernel_shows_the_same_total(
    tmp_path: Path, total_bytes: int, expected_bytes: int
) -> None:
    record = tmp_path / n.MEMORY_AT_REST
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps({"total_bytes": total_bytes, "available_bytes": 700 << 10}))
    assert resting(tmp_path)["available_bytes"] == expected_bytes
