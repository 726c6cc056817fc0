"""K3s on a node, on small trees that look like one: the look, the token, and the removal."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Sequence
from pathlib import Path

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import k3s_node as n
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError

POD = "0b3cf1a0-9d2e-4c55-8f6a-1c2d3e4f5a6b"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


class Commands:
    """Answers by the first words of a command, and remembers what was asked."""

    def __init__(self, **answers: tuple[int, str, str]) -> None:
        self.answers = {key.replace("_", " "): value for key, value in answers.items()}
        self.asked: list[str] = []
        self.given: dict[str, str] = {}

    def __call__(
        self, argv: Sequence[str], stdin: str | None = None, timeout_seconds: float = 0
    ) -> tuple[int, str, str]:
        line = " ".join(argv)
        self.asked.append(line)
        if stdin is not None:
            self.given[line] = stdin
        return next(
            (self.answers[key] for key in sorted(self.answers, reverse=True) if line.startswith(key)), (0, "", "")
        )


@pytest.fixture
def commands() -> Commands:
    return Commands()


@pytest.fixture
def node(tmp_path: Path, commands: Commands) -> n.Node:
    (tmp_path / "root").mkdir()
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_text("")
    return n.Node(tmp_path / "root", tmp_path / "proc", commands)


def mounts(node: n.Node, *entries: tuple[str, str, str]) -> None:
    lines = [f"30 1 0:1 / {point} rw - {kind} {source} rw" for point, source, kind in entries]
    (node.proc / "self/mountinfo").write_text("\n".join(lines))


def process(node: n.Node, pid: int, comm: str, cgroup: str, locked: str = "unlimited", parent: int = 1) -> None:
    write(
        node.proc,
        {
            f"{pid}/comm": comm,
            f"{pid}/cgroup": f"0::{cgroup}\n",
            f"{pid}/limits": f"Limit  Soft Limit  Hard Limit  Units\nMax locked memory  {locked}  {locked}  bytes\n",
            f"{pid}/stat": f"{pid} ({comm} (x)) S {parent} 1 1",
        },
    )


def test_version_and_sha256_of_the_program(node: n.Node, commands: Commands) -> None:
    assert node.binary() == {"version": "", "sha256": ""}
    write(node.root, {"usr/local/bin/k3s": "program"})
    commands.answers[str(node.root / "usr/local/bin/k3s")] = (
        0,
        "k3s version v1.36.4+k3s1 (abc)\ngo version go1.25\n",
        "",
    )
    assert node.binary() == {"version": "v1.36.4+k3s1", "sha256": hashlib.sha256(b"program").hexdigest()}


def test_the_digest_is_that_of_the_running_process(node: n.Node, commands: Commands) -> None:
    commands.answers["systemctl show"] = (0, "LoadState=not-found\nActiveState=inactive\nMainPID=0\n", "")
    assert node.units()["server"] == {
        "loaded": False,
        "active": False,
        "running": False,
        "enabled": False,
        "digest": "",
    }
    write(node.proc, {"77/environ": "PATH=/bin\0GOODPUT_K3S_DIGEST=abc\0HOME=/\0"})
    commands.answers["systemctl show"] = (
        0,
        "LoadState=loaded\nActiveState=active\nUnitFileState=enabled\nMainPID=77\n",
        "",
    )
    assert node.units()["server"] == {
        "loaded": True,
        "active": True,
        "running": True,
        "enabled": True,
        "digest": "abc",
    }
    # An agent whose token is refused.
    commands.answers["systemctl show"] = (0, "LoadState=loaded\nActiveState=activating\nMainPID=77\n", "")
    assert node.units()["agent"] | {"enabled": True} == {
        "loaded": True,
        "active": False,
        "running": True,
        "enabled": True,
        "digest": "abc",
    }


def test_a_disk_below_the_data_directory_is_foreign_and_container_mounts_are_not(node: n.Node) -> None:
    mounts(
        node,
        ("/var/lib/rancher/k3s/l2\\040cache", "/dev/nvme1n1", "xfs"),
        ("/var/lib/rancher/k3s/agent/containerd/x", "overlay", "overlay"),
        ("/var/lib/rancher/k3s-other", "/dev/sdb", "ext4"),
        ("/srv/goodput/l2", "/dev/nvme2n1", "xfs"),
    )
    assert node.foreign_mounts() == ["/dev/nvme1n1 (xfs) at /var/lib/rancher/k3s/l2 cache"]


def test_a_kubelet_outside_our_units_is_foreign(node: n.Node) -> None:
    process(node, 10, "k3s-server", "/system.slice/k3s.service")
    process(node, 11, "kubelet", "/system.slice/k3s-agent.service")
    process(node, 12, "k3s-server", "/system.slice/docker-0123.scope")
    process(node, 13, "kubelite", "/system.slice/snap.microk8s.daemon-kubelite.service")
    process(node, 14, "bash", "/user.slice")
    assert node.foreign_kubelets() == ["k3s-server in a container (pid 12)", "kubelite on the host (pid 13)"]


def test_pods_with_limited_memory_are_found_by_their_processes(node: n.Node) -> None:
    group = (
        f"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{POD.replace('-', '_')}.slice/cri-1.scope"
    )
    process(node, 20, "python", group, locked="8388608")
    process(node, 21, "python", group.replace("0b3cf1a0", "ffffffff"))
    process(node, 22, "bash", "/user.slice", locked="8388608")
    assert node.limited_pods() == [POD]
    assert node.look()["limited_pod_names"] == [POD]
    (node.root / f"var/log/pods/serving_worker-0_{POD}").mkdir(parents=True)
    assert node.look()["limited_pod_names"] == ["serving/worker-0"]
    verify = (Path(__file__).resolve().parents[2] / "roles/k3s/tasks/verify.yml").read_text()
    assert "limited locked memory ' ~ __k3s_after.limited_pod_names" in verify


def test_the_runtime_is_configured_only_if_containerd_says_so(node: n.Node) -> None:
    assert node.nvidia() == {"program": "", "configured": None}
    write(node.root, {"usr/bin/nvidia-container-runtime": ""})
    table = "[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.'{}']\n"
    write(node.root, {n.CONTAINERD_CONFIG.lstrip("/"): table.format("runc") + table.format("nvidia-cdi")})
    assert node.nvidia() == {"program": "/usr/bin/nvidia-container-runtime", "configured": False}
    write(node.root, {n.CONTAINERD_CONFIG.lstrip("/"): table.format("runc") + table.format("nvidia")})
    assert node.nvidia()["configured"] is True


def test_modules_and_cgroup(node: n.Node, commands: Commands) -> None:
    commands.answers["modprobe"] = (1, "", "not found")
    (node.root / "sys/module/overlay").mkdir(parents=True)
    assert node.missing_modules() == ["br_netfilter", "vxlan", "nf_conntrack"]
    assert node.cgroup_memory() is False
    write(node.root, {"sys/fs/cgroup/cgroup.controllers": "cpu memory pids"})
    assert node.cgroup_memory() is True


# ---- the token


def mode_of(path: Path) -> str:
    return f"{stat.S_IMODE(path.stat().st_mode):04o}"


def test_a_token_is_made_once_and_its_mode_kept(tmp_path: Path) -> None:
    path = tmp_path / "etc/token"
    assert n.generate_token(path, installed=False, check=True) and not path.exists()
    assert n.generate_token(path, installed=False)
    token = path.read_text()
    assert len(token.strip()) == 64 and mode_of(path) == "0600"
    assert not n.generate_token(path, installed=True)
    path.chmod(0o644)
    assert n.generate_token(path, installed=True, check=True)
    assert n.generate_token(path, installed=True)
    assert mode_of(path) == "0600" and path.read_text() == token


def test_a_lost_token_of_a_server_with_data_is_not_made_anew(tmp_path: Path) -> None:
    with pytest.raises(K3sError, match="server/token into .*token, mode 0600"):
        n.generate_token(tmp_path / "token", installed=True)
    (tmp_path / "token").write_text("\n")
    with pytest.raises(K3sError, match="found no token"):
        n.generate_token(tmp_path / "token", installed=True)


def test_an_agent_compares_token_and_server_before_it_joins() -> None:
    ca = b"-----BEGIN CERTIFICATE-----"
    good = f"K10{hashlib.sha256(ca).hexdigest()}::server:secret\n"
    url = "https://10.0.0.2:6443"
    assert n.join_problem(good, url, fetch=lambda _url: ca) == ""
    other = n.join_problem(good, url, fetch=lambda _url: b"another CA")
    assert "the token is of another cluster" in other and "secret" not in other
    assert "not of the form K10HASH" in n.join_problem("secret", url, fetch=lambda _url: ca)

    def silent(_url: str) -> bytes:
        raise OSError("timed out")

    said = n.join_problem(good, url, fetch=silent, attempts=2, wait_seconds=0)
    assert f"{url} does not answer from this node (timed out)" in said and "secret" not in said


# ---- removal


RULES = """*filter
:INPUT ACCEPT [0:0]
:KUBE-FORWARD - [0:0]
-A INPUT -p tcp --dport 22 -j ACCEPT
-A FORWARD -m comment --comment "flanneld forward" -j FLANNEL-FWD
-A POSTROUTING -j CNI-HOSTPORT-MASQ
COMMIT
"""


def test_only_rules_of_kubernetes_go() -> None:
    kept = n.firewall_without_k3s(RULES)
    assert kept == "*filter\n:INPUT ACCEPT [0:0]\n-A INPUT -p tcp --dport 22 -j ACCEPT\nCOMMIT\n"


@pytest.fixture
def used(node: n.Node, commands: Commands) -> n.Node:
    """A node on which K3s ran: a container with a child, mounts, netdevs, folders."""
    commands.answers |= {
        "systemctl show": (0, "LoadState=loaded\nActiveState=active\nMainPID=5\n", ""),
        "iptables-save": (0, RULES, ""),
        "ip6tables-save": (127, "", "not found"),
    }
    process(node, 30, "containerd-shim", "/system.slice/k3s.service")
    process(node, 31, "pause", "/kubepods.slice", parent=30)
    process(node, 32, "python", "/kubepods.slice", parent=31)
    process(node, 40, "containerd-shim", "/system.slice/docker.service")
    write(node.proc, {"30/cmdline": "/var/lib/rancher/k3s/data/abc/bin/containerd-shim-runc-v2\0-namespace\0k8s.io\0"})
    write(node.proc, {"40/cmdline": "/usr/bin/containerd-shim-runc-v2\0-namespace\0moby\0"})
    write(node.root, {"var/lib/rancher/k3s/server/db/state.db": "", "var/lib/kubelet/pods/x/y": "", "run/k3s/s": ""})
    write(node.root, {"etc/rancher/k3s/k3s.yaml": "", "etc/rancher/k3s/config.yaml": "", "run/netns/cni-1": ""})
    (node.root / "sys/class/net/cni0").mkdir(parents=True)
    return node


def remover(node: n.Node, check: bool = False) -> tuple[n.Remover, list[int]]:
    killed: list[int] = []

    def kill(pid: int, _signal: int) -> None:
        killed.append(pid)
        (node.proc / str(pid) / "cmdline").unlink(missing_ok=True)

    return n.Remover(node, check, kill=kill, sleep=lambda _seconds: None), killed


def test_removal_ends_containers_and_takes_what_k3s_made(used: n.Node, commands: Commands) -> None:
    one, killed = remover(used)
    one.run({})
    # The parent first, so that it starts no new child; Docker's shim is not ours.
    assert killed == [30, 31, 32]
    assert "systemctl stop k3s.service" in commands.asked and "ip link delete cni0" in commands.asked
    assert commands.given == {"iptables-restore": n.firewall_without_k3s(RULES)}
    left = sorted(str(path.relative_to(used.root)) for path in used.root.rglob("*") if path.is_file())
    assert left == ["etc/rancher/k3s/config.yaml"]


def test_removal_in_check_mode_touches_nothing(used: n.Node, commands: Commands) -> None:
    one, killed = remover(used, check=True)
    one.run({})
    assert killed == [] and commands.given == {}
    assert not [line for line in commands.asked if line.startswith(("systemctl stop", "ip ", "umount"))]
    assert (used.root / "var/lib/rancher/k3s/server/db/state.db").exists()
    assert {"unit k3s.service stopped", "3 processes of containers", "netdev cni0", "iptables rules"} <= set(
        one.removed
    )


def test_what_was_there_before_the_role_stays(used: n.Node) -> None:
    one, _killed = remover(used)
    one.run({"/var/lib/kubelet": "directory", "/var/lib/rancher/k3s": "absent"})
    assert one.kept == ["/var/lib/kubelet: it was there before"]
    assert (used.root / "var/lib/kubelet/pods/x/y").exists()
    assert not (used.root / "var/lib/rancher/k3s").exists()


def test_a_mounted_disk_is_never_emptied(used: n.Node) -> None:
    mounts(used, ("/var/lib/rancher/k3s/l2", "/dev/nvme1n1", "xfs"))
    one, _killed = remover(used)
    with pytest.raises(K3sError, match="found /var/lib/rancher/k3s/l2 mounted; required: nothing mounted"):
        one.run({})
    assert (used.root / "var/lib/rancher/k3s/server/db/state.db").exists()


def test_mounts_of_pods_go_deepest_first_and_others_stay(used: n.Node, commands: Commands) -> None:
    mounts(
        used,
        ("/run/k3s/containerd/1", "overlay", "overlay"),
        ("/run/k3s/containerd/1/shm", "shm", "tmpfs"),
        ("/var/lib/kubelet/pods/u/volumes/v", "tmpfs", "tmpfs"),
        ("/run/netns/cni-1", "nsfs", "nsfs"),
        ("/srv/goodput/l2", "/dev/nvme2n1", "xfs"),
    )
    one, _killed = remover(used)
    one.unmount()
    asked = [line.split()[-1] for line in commands.asked if line.startswith("umount")]
    assert asked[-1] == "/run/netns/cni-1" and "/srv/goodput/l2" not in asked
    assert asked.index("/run/k3s/containerd/1/shm") < asked.index("/run/k3s/containerd/1")
    assert len(asked) == 4


def test_a_process_that_does_not_die_is_named(used: n.Node) -> None:
    one = n.Remover(used, kill=lambda _pid, _signal: None, sleep=lambda _seconds: None)
    with pytest.raises(K3sError, match="found processes 30, 31, 32 after SIGKILL"):
        one.kill_containers()


def test_the_role_claims_what_removal_may_wipe() -> None:
    import yaml

    tasks = yaml.safe_load((Path(__file__).resolve().parents[2] / "roles/k3s/tasks/main.yml").read_text())
    claim = next(
        task["goodput.spark.manifest"] for task in tasks if task.get("goodput.spark.manifest", {}).get("files")
    )
    assert sorted(claim["directories"]) == sorted(n.MADE_BY_K3S)
    assert n.former_kinds({"directories": {"/var/lib/kubelet": {"former": {"kind": "directory"}}}}) == {
        "/var/lib/kubelet": "directory"
    }
    assert n.former_kinds(None) == {}


def test_secrets_are_never_readable_by_others(tmp_path: Path) -> None:
    seen: list[str] = []
    real = os.replace

    def replace(source: str | Path, target: str | Path) -> None:
        seen.append(mode_of(Path(source)))
        real(source, target)

    os.replace = replace  # type: ignore[assignment]
    try:
        assert n.write_secret(tmp_path / "token", "x\n")
    finally:
        os.replace = real
    assert seen == ["0600"] and not list(tmp_path.glob(".*"))
