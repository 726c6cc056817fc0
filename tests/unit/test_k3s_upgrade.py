"""playbooks/k3s_upgrade.yml: who is touched when, and by what agents are judged."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import yaml
from plays import run_playbook
from test_k3s_preflight import installed, judge

ROOT = Path(__file__).resolve().parents[2]
PLAYBOOK = ROOT / "playbooks/k3s_upgrade.yml"
OLD, NEW = "v1.36.4+k3s1", "v1.37.1+k3s1"


def plays() -> list[dict[str, Any]]:
    return list(yaml.safe_load(PLAYBOOK.read_text()))


def said(words: str) -> dict[str, Any]:
    return {"ansible.builtin.debug": {"msg": f"{{{{ inventory_hostname }}}} {words}"}}


def test_the_server_first_then_one_agent_at_a_time_with_a_gate_after_each(tmp_path: Path) -> None:
    """The playbook's own plays, with every task that reaches for a node replaced by one that says who it is."""
    changed = copy.deepcopy(plays()[1:])
    for play in changed:
        play["vars_files"] = [str(ROOT / "vars/site.yml")]
        for role in play.pop("roles", []):
            assert role["role"] == "goodput.spark.k3s"
            play.setdefault("tasks", []).append(said("UPGRADED"))
        for key in ("tasks", "post_tasks"):
            play[key] = [
                said(f"{task['ansible.builtin.import_role']['tasks_from'].upper()}")
                if "ansible.builtin.import_role" in task
                else task
                for task in play.get(key, [])
                if "goodput.spark.k3s_probe" not in task
            ]
    (tmp_path / "play.yml").write_text(yaml.safe_dump(changed))
    hosts = {f"spark{n}": {"__k3s_probe": {"state": "agent"}} for n in (1, 2, 3)}
    inventory = {"sparks": {"hosts": hosts, "vars": {"ansible_connection": "local", "ansible_become": False}}}
    (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
    done = run_playbook(tmp_path / "hosts.yml", tmp_path / "play.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    order = re.findall(r"(spark\d (?:PREFLIGHT|UPGRADED|GATE))", done.stdout)
    assert sorted(order[:3]) == [f"spark{n} PREFLIGHT" for n in (1, 2, 3)]
    assert order[3:] == [f"{name} {what}" for name in ("spark2", "spark1", "spark3") for what in ("UPGRADED", "GATE")]


def test_without_all_nodes_nothing_is_touched(tmp_path: Path) -> None:
    judging = copy.deepcopy(plays()[1])
    judging["tasks"] = [task for task in judging["tasks"] if "ansible.builtin.import_role" not in task]
    judging["vars_files"] = [str(ROOT / "vars/site.yml")]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([judging]))
    for probe, limit, words in (
        ("agent", "spark1", "found spark1 in this run"),
        ("absent", "all", "K3s on spark1: absent"),
    ):
        hosts = {f"spark{n}": {"__k3s_probe": {"state": probe}} for n in (1, 2)}
        inventory = {"sparks": {"hosts": hosts, "vars": {"ansible_connection": "local", "ansible_become": False}}}
        (tmp_path / "hosts.yml").write_text(yaml.safe_dump(inventory))
        done = run_playbook(tmp_path / "hosts.yml", tmp_path / "play.yml", "--limit", limit)
        text = " ".join(done.stdout.split())
        assert done.returncode == 2 and words in text and "required: spark1, spark2, each with K3s" in text


def test_agents_are_judged_by_what_the_server_is_now() -> None:
    """Why the server is looked at again: by its former version no agent could follow."""
    agent = (1, installed(OLD, "agent"))
    assert judge(agent, (2, installed(NEW, "server")), version=NEW, in_run=["spark1"]) == []
    (stale,) = judge(agent, (2, installed(OLD, "server")), version=NEW, in_run=["spark1"])
    assert "skew: found v1.37.1+k3s1; required 1.36 at most" in stale
    server = next(play for play in plays() if play.get("hosts") == "goodput_k3s_server")
    probe, gate = server["post_tasks"]
    assert probe["register"] == "__k3s_probe" and gate["ansible.builtin.import_role"]["tasks_from"] == "gate"


def test_the_role_asks_only_for_the_nodes_of_its_batch() -> None:
    """With serial the others of the play have not said yet what they must be."""
    text = (ROOT / "roles/k3s/tasks/verify.yml").read_text()
    assert "ansible_play_batch" in text and "ansible_play_hosts" not in text


def test_the_window_is_refused_with_its_numbers() -> None:
    agent, server = (1, installed(OLD, "agent")), (2, installed(OLD, "server"))
    assert all(
        "found v1.35.8+k3s1, with v1.36.4+k3s1 installed" in one for one in judge(agent, server, version="v1.35.8+k3s1")
    )
    left_out = judge(agent, server, version="v1.38.0+k3s1")
    assert left_out and all("at most 1.37 after v1.36.4+k3s1" in one for one in left_out)
