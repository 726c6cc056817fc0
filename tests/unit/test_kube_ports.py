"""The ports that a worker's pod takes on the network of its host: one list for the site's preflight and the role's."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.filter.kube import kube_ports
from ansible_collections.goodput.spark.plugins.filter.kv_plan import kv_plan
from ansible_collections.goodput.spark.plugins.module_utils import serving
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from kube_pods import objects_of
from plays import run_playbook
from serving_units import PROFILES, node

ROOT = Path(__file__).resolve().parents[2]
#: Where an argument list or an environment names a port that its process listens on.
ARGUMENTS = {"--port": r"(\d+)", "--http-port": r"(\d+)", "--p2p-advertise-url": r".*:(\d+)"}
ENDPOINT = re.compile(r'"endpoint":"tcp://\*:(\d+)"')


def listening(objects: list[dict[str, Any]]) -> set[int]:
    """Ports that processes of pods on the network of the host were told to listen on."""
    (graph,) = [item for item in objects if item["kind"] == "DynamoGraphDeployment"]
    pods = [one["podTemplate"]["spec"] for one in graph["spec"]["components"]]
    pods += [item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Deployment"]
    found = set()
    for pod in pods:
        if not pod.get("hostNetwork"):
            continue
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            for flag, pattern in ARGUMENTS.items():
                value = serving.argument(container["args"], flag)
                if value:
                    found |= {int(number) for number in re.findall(f"{pattern}$", value)}
            found |= {int(port) for word in container["args"] for port in ENDPOINT.findall(word)}
            found |= {int(one["value"]) for one in container["env"] if one["name"] == "DYN_SYSTEM_PORT"}
    return found


@pytest.mark.parametrize("profile", PROFILES)
def test_they_are_those_that_the_pods_are_told(profile: str) -> None:
    moved = {"ports.lmcache_http": 9600, "ports.kv_events": 20180, "ports.frontend_http": 8100}
    memory_gib = 1.5 if files.load_profile(profile).engine == "mocker" else 121.7
    for chosen in ({}, moved):
        nodes = [{"name": f"n{n}", "total_bytes": int(memory_gib * 2**30), "server": n == 1} for n in (1, 2)]
        plan = kv_plan(profile, "", nodes, chosen, fail=False)
        rendered = {node(profile, 2, 1): {"plan": plan | {"ok": True}}}
        ports = [one["port"] for one in kube_ports(profile, chosen)]
        assert sorted(ports) == sorted(listening(objects_of(rendered, profile, 2)))


def test_one_that_nothing_moves_says_so() -> None:
    named = {one["port"]: one["variable"] for one in kube_ports("super-recommended")}
    assert named[9090] == "" and named[5555] == "ports.lmcache_request in goodput_profile_set"
    assert [one["port"] for one in kube_ports("no-such-profile")] == [20080, 5555, 9500, 9090]


def defaults(tmp_path: Path, role: str, **variables: Any) -> str:
    """What a role's list of ports is, as Ansible renders it."""
    paths = [str(ROOT / f"roles/{role}/{folder}/main.yml") for folder in ("defaults", "vars")]
    numbers = f"{role}_ports | map(attribute='port') | sort | list | to_json"
    shown = {"ansible.builtin.debug": {"msg": f"{{{{ {numbers} }}}}"}}
    play = {"hosts": "localhost", "gather_facts": False, "vars_files": paths, "tasks": [shown]}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    done = run_playbook("localhost,", tmp_path / "play.yml", "-e", json.dumps(variables))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_site_looks_at_the_ports_of_its_platform(tmp_path: Path) -> None:
    brief = [18515, 18516, 18520]
    site = {"preflight_profile": "super-recommended", "goodput_profile_set": {"ports.lmcache_http": 9600}}
    systemd = defaults(tmp_path, "preflight", preflight_platform="systemd", **site)
    assert str(sorted([8000, 9091, 5555, 9600, 2379, 2380, *brief])) in systemd
    kubernetes = defaults(tmp_path, "preflight", preflight_platform="k3s", **site)
    assert str(sorted([5555, 9600, 20080, 9090, *brief])) in kubernetes


def test_the_role_looks_at_the_same_ports_again(tmp_path: Path) -> None:
    profile = files.profile_from(files.stated("weka-c-p2p", {"ports.p2p": 9460}))
    plan = {"inputs": {"profile": asdict(profile)}}
    assert str([5555, 9090, 9460, 9500, 20080]) in defaults(tmp_path, "kube_serving", goodput_plan=plan)
