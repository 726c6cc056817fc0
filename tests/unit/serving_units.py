"""Units and environment files of every profile as the roles render them for sites of one, two and three nodes."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files, rules
from plays import run_playbook

ROOT = Path(__file__).resolve().parents[2]
PROFILES = files.names_in(files.PROFILES)
SIZES = (1, 2, 3)
TEMPLATES = {
    "lmcache": "lmcache/templates/goodput-lmcache.service.j2",
    "coordinator": "lmcache/templates/goodput-coordinator.service.j2",
    "worker": "dynamo/templates/goodput-worker.service.j2",
    "frontend": "dynamo/templates/goodput-frontend.service.j2",
    "etcd": "dynamo/templates/goodput-etcd.service.j2",
    "lmcache.env": "lmcache/templates/environment.j2",
    "dynamo.env": "dynamo/templates/environment.j2",
}
UNITS = ("lmcache", "coordinator", "worker", "frontend", "etcd")
ENVIRONMENT_FILES = {
    "lmcache": "lmcache.env",
    "coordinator": "lmcache.env",
    "worker": "dynamo.env",
    "frontend": "dynamo.env",
}
Rendered = dict[str, dict[str, Any]]
#: A node whose profile chooses other ports.
MOVED = "moved-ports"
MOVED_PORTS = {"frontend_http": 8100, "worker_system": 9191, "lmcache_request": 5655, "lmcache_http": 9600}


def node(profile: str, size: int, number: int) -> str:
    """Inventory name of a node, by which a rendering is found."""
    return f"{profile}-{size}-{number}"


def rails(number: int) -> list[dict[str, Any]]:
    """Both rails of a node, as goodput.spark.rails finds them."""
    devices = (("enp1s0f0np0", "rocep1s0f0"), ("enP2p1s0f0np0", "roceP2p1s0f0"))
    return [
        {"netdev": netdev, "rdma_device": device, "addresses": [f"192.168.10{index}.{number}/24"]}
        for index, (netdev, device) in enumerate(devices)
    ]


def rendered_units(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    """Plan, units and environment files of every node; one run of Ansible for all tests, also of parallel ones."""
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
    result = shared / "serving-units.json"
    with (shared / "serving-units.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not result.exists():
            _render(tmp_path_factory.mktemp("units"), result)
    answer: Rendered = json.loads(result.read_text())
    return answer


def _hosts() -> dict[str, Any]:
    hosts: dict[str, Any] = {}
    for profile in PROFILES:
        memory_gib = 1.5 if files.load_profile(profile).engine == "mocker" else 121.7
        for size in SIZES:
            names = [node(profile, size, number) for number in range(1, size + 1)]
            for number, name in enumerate(names, 1):
                hosts[name] = {
                    "goodput_profile": profile,
                    "goodput_nodes": names,
                    "goodput_first_node": names[0],
                    "goodput_management_address": f"10.77.0.{number}",
                    "goodput_measured": {"node": {"memory_at_rest": {"total_bytes": int(memory_gib * 2**30)}}},
                    "__lmcache_rail_probe": {"rails": rails(number)},
                }
    moved = {"inherits": "virtual", "name": MOVED, "ports": MOVED_PORTS}
    own = {"goodput_profile": moved, "goodput_nodes": [MOVED], "goodput_first_node": MOVED}
    hosts[MOVED] = hosts[node("virtual", 1, 1)] | own
    return hosts


def _render(folder: Path, result: Path) -> None:
    inventory = {"all": {"hosts": _hosts(), "vars": {"ansible_connection": "local"}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    roles = ROOT / "roles"
    loads = [str(roles / role / part / "main.yml") for role in ("lmcache", "dynamo") for part in ("defaults", "vars")]
    plan = (
        "goodput_profile | goodput.spark.kv_plan(none, hostvars | goodput.spark.plan_nodes(goodput_nodes,"
        " goodput_first_node), accept=accept, accept_memory=true)"
    )
    texts = ", ".join(
        f"'{name}': lookup('ansible.builtin.template', '{roles}/{path}')" for name, path in TEMPLATES.items()
    )
    decided = "__lmcache_decided + __dynamo_decided"
    everything = "dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'rendered')))"
    partial = folder / "all.json"
    # Facts only, and one file at the end: a task that starts a module for each of the nodes takes minutes.
    tasks: list[dict[str, Any]] = [
        {"ansible.builtin.set_fact": {"goodput_plan": f"{{{{ {plan} }}}}"}},
        {
            "ansible.builtin.set_fact": {
                "rendered": f"{{{{ {{'plan': goodput_plan, 'decided': {decided}, {texts}}} }}}}"
            }
        },
        {
            "ansible.builtin.copy": {
                "content": f"{{{{ {everything} | to_json }}}}",
                "dest": str(partial),
                "mode": "0644",
            },
            "run_once": True,
        },
    ]
    variables = {"accept": sorted(rules.RULES), "goodput_engine": "{{ goodput_plan.inputs.profile.engine }}"}
    play = {"hosts": "all", "gather_facts": False, "vars_files": loads, "vars": variables, "tasks": tasks}
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    done = run_playbook(folder / "hosts.yml", folder / "play.yml")
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[max(said.find("[ERROR]"), 0) :][:3000]
    partial.rename(result)


def words(rendered: Rendered, name: str, unit: str) -> list[str]:
    """What systemd starts on an empty L2: quotes and doubled % and $ undone, the variable of its capacity expanded."""
    text = rendered[name][unit]
    match = re.search(r"^ExecStart=(.*)$", text, re.M)
    assert match and not re.search(r"[^$]\{[a-z_]+\}", match[1]), f"{name} {unit}: {match and match[1]}"
    before = re.search(r"^ExecStartPre=.*--capacity-gib (\S+)", text, re.M)
    line = match[1].replace("${GOODPUT_L2_CAPACITY_GIB}", f"{float(before[1]):g}" if before else "?")
    return [word.replace("%%", "%").replace("$$", "$") for word in shlex.split(line)]


def environment(rendered: Rendered, name: str, unit: str) -> dict[str, str]:
    """What systemd gives the process: its unit's Environment= lines, then its EnvironmentFile."""
    found: dict[str, str] = {}
    for line in re.findall(r"^Environment=(.*)$", rendered[name][unit], re.M):
        found |= dict(word.split("=", 1) for word in shlex.split(line))
    for line in rendered[name][ENVIRONMENT_FILES[unit]].splitlines():
        match = re.fullmatch(r'([A-Za-z_]\w*)="(.*)"', line)
        assert match or line.startswith("#"), line
        if match:
            found[match[1]] = re.sub(r'\\(["$`\\])', r"\1", match[2])
    return found
