"""config.yaml as the role writes it, read by a program that refuses keys which the command line does not have.

K3s itself only warns about such keys. The program is the one that the scenario k3s installs on the pair. Nothing is
started: it is run as a user who may not, and says so only after it has read the whole file.
"""

from __future__ import annotations

import os
import platform
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.module_utils import k3s_config as c

ROOT = Path(__file__).resolve().parents[2]
KEYS = yaml.safe_load((ROOT / "roles/k3s/vars/config_keys.yml").read_text())["__k3s_config_keys"]
ACCEPTED = "must run as root"


def folder() -> str:
    beside = ROOT.parent / "shared/k3s-standin"
    return os.environ.get("GOODPUT_K3S_AIRGAP", "") or (str(beside) if beside.is_dir() else "")


@pytest.fixture(scope="module")
def program() -> Iterator[Path]:
    packed = Path(folder()) / "k3s-amd64.zst"
    if not folder() or not packed.is_file():
        pytest.skip("GOODPUT_K3S_AIRGAP names no folder with k3s-amd64.zst, and there is none beside the checkout")
    if platform.machine() != "x86_64":
        pytest.skip(f"the program is for amd64, and this machine is {platform.machine()}")
    # Not pytest's own folder, which other users may not enter.
    with tempfile.TemporaryDirectory() as home:
        Path(home).chmod(0o755)
        target = Path(home) / "k3s"
        subprocess.run(["zstd", "-d", "-q", str(packed), "-o", str(target)], check=True)
        target.chmod(0o755)
        yield target


def said(program: Path, side: str, config: dict[str, Any]) -> str:
    """What the program says to a file; the last line without its time."""
    path = program.parent / f"{side}.yaml"
    path.write_text(yaml.safe_dump(config))
    path.chmod(0o644)
    other = {} if os.geteuid() else {"user": "nobody", "group": "nogroup", "extra_groups": []}
    done = subprocess.run(
        [str(program), side, "--config", str(path)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd="/",
        env={},
        **other,
    )
    assert done.returncode != 0
    return (done.stdout + done.stderr).strip().splitlines()[-1]


def choices(**changes: Any) -> c.Choices:
    given: dict[str, Any] = {
        "nodes": ["spark1", "spark2"],
        "server": "spark2",
        "version": "v1.36.4+k3s1",
        "keys": KEYS,
        "disable": ["traefik", "servicelb"],
        "volumes_path": "/srv/goodput/volumes",
        "labels": {"site": "lab"},
        "taints": ["dedicated=serving:PreferNoSchedule"],
        "config": {"snapshotter": "overlayfs", "kubelet-arg": ["v=2"], "protect-kernel-defaults": False},
        "server_config": {
            "tls-san": ["k3s.example"],
            "cluster-domain": "cluster.local",
            "cluster-cidr": "10.42.0.0/16",
            "service-cidr": ["10.43.0.0/16"],
        },
    }
    return c.Choices(**{**given, **changes})


@pytest.mark.parametrize(("number", "side"), [(2, "server"), (1, "agent")])
def test_what_the_role_writes_is_accepted(program: Path, number: int, side: str) -> None:
    node = c.NodeChoice(f"spark{number}", f"10.0.0.{number}", "enP7s7", True)
    assert c.choice_problems(choices()) == []
    assert ACCEPTED in said(program, side, c.node_config(choices(), node, "10.0.0.2"))


def test_a_planted_key_is_refused_by_both(program: Path) -> None:
    node = c.NodeChoice("spark1", "10.0.0.1", "enP7s7")
    bad = choices(config={"kublet-arg": ["v=2"]})
    assert "kublet-arg" in said(program, "agent", c.node_config(bad, node, "10.0.0.2"))
    assert "correct it to kubelet-arg" in c.choice_problems(bad)[0]


def test_a_server_s_key_is_refused_for_an_agent_by_both(program: Path) -> None:
    node = c.NodeChoice("spark1", "10.0.0.1", "enP7s7")
    bad = choices(config={"tls-san": ["x"]})
    assert "tls-san" in said(program, "agent", c.node_config(bad, node, "10.0.0.2"))
    assert "move it to k3s_server_config" in c.choice_problems(bad)[0]


def test_both_know_the_same_keys(program: Path) -> None:
    """Each key of our list is one of the program's, or one that it does not have because it has no such part."""
    _minor, known = c.known_keys(KEYS, c.parse("v1.36.4+k3s1"))
    for side in ("server", "agent"):
        done = subprocess.run([str(program), side, "--help"], capture_output=True, text=True, check=True)
        theirs = {line.split()[0].removeprefix("--") for line in done.stdout.splitlines() if line.startswith("  --")}
        ours = {key for key, entry in known.items() if side == "server" or entry.startswith("both")}
        # It has options that K3s hides from its help, and lacks embedded etcd, external datastores, runtimes and Helm.
        assert theirs - ours <= {"disable-agent"}, side
        lacking = ours - theirs
        assert all(
            key.startswith(("etcd-", "datastore-", "vpn-", "image-service", "container-runtime", "cluster-reset"))
            or key in {"docker", "rootless", "advertise-port", "bind-address", "helm-controller-arg"}
            for key in lacking
        ), lacking
