"""The units of every profile, rendered as on two nodes: what systemd would start is what the planner decided."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files, rules
from ansible_collections.goodput.spark.plugins.module_utils.serving import argument

ROOT = Path(__file__).resolve().parents[2]
PROFILES = files.names_in(files.PROFILES)
UNITS = ("lmcache/goodput-lmcache", "lmcache/goodput-coordinator", "dynamo/goodput-worker", "dynamo/goodput-frontend")
RULES = sorted(rules.RULES)


def rails(number: int) -> dict[str, Any]:
    devices = ("rocep1s0f0", "roceP2p1s0f0")
    return {"rails": [{"rdma_device": d, "addresses": [f"192.168.10{i}.{number}/24"]} for i, d in enumerate(devices)]}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Plan and units of both nodes of a pair per profile, by PROFILE-N; one run of Ansible for all."""
    folder = tmp_path_factory.mktemp("units")
    hosts: dict[str, Any] = {}
    for profile in PROFILES:
        pair = [f"{profile}-1", f"{profile}-2"]
        memory = 1.5 if files.load_profile(profile).engine == "mocker" else 121.7
        for number, name in enumerate(pair, 1):
            hosts[name] = {
                "goodput_profile": profile,
                "goodput_nodes": pair,
                "goodput_first_node": pair[0],
                "goodput_management_address": f"10.77.0.{number}",
                "goodput_measured": {"node": {"memory_at_rest": {"total_bytes": int(memory * 2**30)}}},
                "__lmcache_rail_probe": rails(number),
            }
    (folder / "hosts.yml").write_text(
        yaml.safe_dump({"all": {"hosts": hosts, "vars": {"ansible_connection": "local"}}})
    )
    loads = [
        str(ROOT / "roles" / role / part / "main.yml")
        for role in ("lmcache", "dynamo")
        for part in ("defaults", "vars")
    ]
    plan = (
        "goodput_profile | goodput.spark.kv_plan(none, hostvars | goodput.spark.plan_nodes(goodput_nodes,"
        " goodput_first_node), accept=accept, accept_memory=true)"
    )
    sources = {unit.split("/")[1]: f"{ROOT}/roles/{unit.replace('/', '/templates/')}.service.j2" for unit in UNITS}
    units = ", ".join(f"'{name}': lookup('ansible.builtin.template', '{path}')" for name, path in sources.items())
    everything = "dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'rendered')))"
    # Facts only, and one file at the end: a task that starts a module for each of the nodes takes minutes.
    tasks: list[dict[str, Any]] = [
        {"ansible.builtin.set_fact": {"goodput_plan": f"{{{{ {plan} }}}}"}},
        {"ansible.builtin.set_fact": {"rendered": f"{{{{ {{'plan': goodput_plan, {units}}} }}}}"}},
        {
            "ansible.builtin.copy": {
                "content": f"{{{{ {everything} | to_json }}}}",
                "dest": f"{folder}/all.json",
                "mode": "0644",
            },
            "run_once": True,
        },
    ]
    play = {
        "hosts": "all",
        "gather_facts": False,
        "vars_files": loads,
        "vars": {
            "accept": RULES,
            "goodput_engine": "{{ goodput_plan.inputs.profile.engine }}",
        },
        "tasks": tasks,
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    environment |= {
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_NOCOLOR": "1",
        "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
    }
    result = subprocess.run(
        [
            str(Path(sys.executable).with_name("ansible-playbook")),
            "-i",
            str(folder / "hosts.yml"),
            str(folder / "play.yml"),
        ],
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    said = result.stdout + result.stderr
    assert result.returncode == 0, said[max(said.find("[ERROR]"), 0) :][:3000]
    answer: dict[str, Any] = json.loads((folder / "all.json").read_text())
    return answer


def words(rendered: dict[str, Any], node: str, unit: str) -> list[str]:
    """What systemd starts on an empty L2: quotes and doubled % and $ undone, the variable of its capacity expanded."""
    text = rendered[node][f"goodput-{unit}"]
    match = re.search(r"^ExecStart=(.*)$", text, re.M)
    assert match and not re.search(r"[^$]\{[a-z_]+\}", match[1]), f"{node} {unit}: {match and match[1]}"
    before = re.search(r"^ExecStartPre=.*--capacity-gib (\S+)", text, re.M)
    line = match[1].replace("${GOODPUT_L2_CAPACITY_GIB}", f"{float(before[1]):g}" if before else "?")
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]


def filled(plan_words: list[str], given: list[str]) -> bool:
    """Whether ``given`` begins with the plan's words, a placeholder standing for anything."""
    patterns = [re.sub(r"\\\{[a-z0-9_]+\\\}", ".+", re.escape(word)) for word in plan_words]
    return len(given) >= len(patterns) and all(re.fullmatch(p, g) for p, g in zip(patterns, given, strict=False))


@pytest.mark.parametrize("profile", PROFILES)
def test_units_start_what_the_plan_says(rendered: dict[str, Any], profile: str) -> None:
    node = f"{profile}-2"
    plan = rendered[node]["plan"]
    engine = plan["inputs"]["profile"]["engine"]
    worker = words(rendered, node, "worker")
    assert worker[:3] == ["/usr/bin/python3", "-m", f"dynamo.{engine}"]
    assert filled(plan["dynamo_worker_args"], worker[3:])
    for plane in ("--discovery-backend etcd", "--request-plane tcp", "--event-plane zmq"):
        assert plane in " ".join(worker)
    assert filled(plan["dynamo_frontend_args"], words(rendered, node, "frontend")[3:])
    if plan["lmcache_server_args"]:
        server = words(rendered, node, "lmcache")
        assert server[2] == "server" and filled(plan["lmcache_server_args"], server[3:])
    if plan["lmcache_coordinator_args"]:
        server, first = words(rendered, node, "lmcache"), words(rendered, f"{profile}-1", "coordinator")
        assert first[2] == "coordinator" and filled(plan["lmcache_coordinator_args"], first[3:])
        # Peers meet at the first node and read over the first rail.
        assert argument(server, "--coordinator-url") == f"http://10.77.0.1:{argument(first, '--port')}"
        assert str(argument(server, "--p2p-advertise-url")).startswith("192.168.100.2:")


def test_the_workers_of_a_pair_start_with_the_same_words(rendered: dict[str, Any]) -> None:
    for profile in PROFILES:
        one, two = (words(rendered, f"{profile}-{number}", "worker") for number in (1, 2))
        here, there = " ".join(one).replace("10.77.0.1", "ADDRESS"), " ".join(two).replace("10.77.0.2", "ADDRESS")
        assert here.replace(f"{profile}-1", "NODE") == there.replace(f"{profile}-2", "NODE"), profile
