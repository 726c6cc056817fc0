"""The files of a pair, rendered by the role's own variables and templates, and what its preflight refuses."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from plays import run_playbook
from test_k3s_preflight import facts, probe

ROOT = Path(__file__).resolve().parents[2]
ROLE = ROOT / "roles/k3s"
PLAN = {
    "budget": {
        f"spark{number}": {
            "lines": [
                {"name": "OS at rest", "bytes": 4 << 30},
                {"name": "control plane", "bytes": (3 - number) << 30},
                {"name": "reserve", "bytes": 10 << 30},
            ]
        }
        for number in (1, 2)
    }
}


WRITES = [f"__k3s_{name}" for name in ("placed_binary", "placed_images", "placed_archives")]
WRITES += [f"__k3s_wrote_{name}" for name in ("config", "kubelet", "unit", "dropin", "token")]


def render(folder: Path, seen: dict[str, Any] | None = None, wrote: str = "", **extra: Any) -> dict[str, Any]:
    """By node, what the role would write: one run of Ansible, facts only, no module on a node."""
    hosts: dict[str, Any] = {}
    for number in (1, 2):
        hosts[f"spark{number}"] = {
            "goodput_management_address": f"10.0.0.{number}",
            "__k3s_facts": {"node": facts(number)},
            "__k3s_probe": {**probe(number), **(seen or {})},
            # The server makes its token; the task that an agent gets it by is skipped there.
            **{name: {"changed": name == wrote and (number, name) != (2, "__k3s_wrote_token")} for name in WRITES},
        }
    inventory = {"all": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    templates = {name: f"{ROLE}/templates/{name}.j2" for name in ("k3s.service", "dropin.conf")}
    lookups = ", ".join(f"'{name}': lookup('ansible.builtin.template', '{path}')" for name, path in templates.items())
    rendered = (
        f"{{{{ {{'config': __k3s_node.config, 'kubelet': __k3s_kubelet, 'wanted': __k3s_wanted, "
        f"'digest': __k3s_digest, 'settled': __k3s_settled, 'restart': __k3s_restart, 'unit_file': __k3s_unit_file, "
        f"'images_file': __k3s_images_file, 'archive_files': __k3s_archive_files, {lookups}}} }}}}"
    )
    everything = "dict(ansible_play_hosts | zip(ansible_play_hosts | map('extract', hostvars, 'rendered')))"
    file = {"sha256": "0" * 64, "path": "/cache/k3s"}
    play = {
        "hosts": "all",
        "gather_facts": False,
        "vars_files": [str(ROLE / name) for name in ("defaults/main.yml", "vars/main.yml", "vars/config_keys.yml")],
        "vars": {
            "goodput_nodes": ["spark1", "spark2"],
            "goodput_plan": PLAN,
            "goodput_release_set": yaml.safe_load((ROOT / "vars/releases/current.yml").read_text())[
                "goodput_release_set"
            ],
            "role_path": str(ROLE),
            "__k3s_cached": {"files": {"aarch64": {"binary": file, "images": file}}},
        },
        "tasks": [
            {"ansible.builtin.set_fact": {"rendered": rendered}},
            {
                "ansible.builtin.copy": {
                    "content": f"{{{{ {everything} | to_json }}}}",
                    "dest": f"{folder}/all.json",
                    "mode": "0644",
                },
                "run_once": True,
            },
        ],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    done = run_playbook(folder / "hosts.yml", folder / "play.yml", "-e", json.dumps(extra))
    said = done.stdout + done.stderr
    assert done.returncode == 0, said[max(said.find("[ERROR]"), 0) :][:3000]
    answer: dict[str, Any] = json.loads((folder / "all.json").read_text())
    return answer


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return render(tmp_path_factory.mktemp("k3s"), k3s_node_labels={"site": "lab"}, k3s_config={"snapshotter": "native"})


def test_the_second_node_is_the_server(pair: dict[str, Any]) -> None:
    assert pair["spark2"]["config"]["https-listen-port"] == 6443
    assert pair["spark1"]["config"]["server"] == "https://10.0.0.2:6443"
    assert "ExecStart=/usr/local/bin/k3s server\n" in pair["spark2"]["k3s.service"]
    assert "ExecStart=/usr/local/bin/k3s agent\n" in pair["spark1"]["k3s.service"]
    assert pair["spark1"]["unit_file"] == "/etc/systemd/system/k3s-agent.service"
    assert pair["spark1"]["images_file"].endswith("/k3s-airgap-images-arm64.tar.zst")


def test_choices_reach_the_files_and_what_is_verified(pair: dict[str, Any]) -> None:
    for node in pair.values():
        assert node["config"]["snapshotter"] == "native"
        assert node["config"]["node-label"] == ["nvidia.com/gpu.present=true", "site=lab"]
        assert node["wanted"]["labels"] == {"nvidia.com/gpu.present": "true", "site": "lab"}
        assert node["wanted"]["kubelet"] == node["kubelet"]
    assert pair["spark1"]["kubelet"]["systemReserved"] == {"memory": "4096Mi"}
    assert pair["spark1"]["kubelet"]["kubeReserved"] == {"memory": "2048Mi"}
    assert pair["spark2"]["kubelet"]["kubeReserved"] == {"memory": "1024Mi"}
    assert pair["spark2"]["kubelet"]["evictionHard"]["memory.available"] == "2560Mi"


def test_no_secret_is_on_a_command_line_or_in_a_unit(pair: dict[str, Any]) -> None:
    for node in pair.values():
        text = node["k3s.service"] + node["dropin.conf"]
        assert "token" not in text.lower() and "K3S_" not in text.replace("GOODPUT_K3S_DIGEST", "")
        assert "token" not in node["config"] and node["config"]["token-file"] == "/etc/rancher/k3s/token"


def test_the_drop_in_lifts_the_limit_and_carries_the_digest(pair: dict[str, Any]) -> None:
    for node in pair.values():
        assert "\nLimitMEMLOCK=infinity\n" in node["dropin.conf"]
        assert f"\nEnvironment=GOODPUT_K3S_DIGEST={node['digest']}\n" in node["dropin.conf"]
        assert len(node["digest"]) == 64 and node["settled"] is False


def test_a_changed_setting_changes_the_digest(pair: dict[str, Any], tmp_path: Path) -> None:
    other = render(tmp_path, k3s_node_labels={"site": "lab"}, k3s_config={"snapshotter": "overlayfs"})
    assert all(other[name]["digest"] != pair[name]["digest"] for name in pair)
    # K3s imports archives when it starts.
    archive = {"path": "images/operator.tar", "sha256": "1" * 64}
    more = render(
        tmp_path, k3s_node_labels={"site": "lab"}, k3s_config={"snapshotter": "native"}, k3s_image_archives=[archive]
    )
    assert all(more[name]["digest"] != pair[name]["digest"] for name in pair)
    assert more["spark1"]["archive_files"] == ["/var/lib/rancher/k3s/agent/images/operator.tar"]
    assert pair["spark1"]["archive_files"] == []


def test_a_cluster_without_archives_keeps_the_digest_that_it_runs_with(pair: dict[str, Any], tmp_path: Path) -> None:
    """An input that is not used restarts no K3s, and neither does another order of the archives."""
    node, unit = pair["spark1"], (ROLE / "templates/k3s.service.j2").read_text().rstrip()
    said = [node["config"], node["kubelet"], "0" * 64, "0" * 64, probe(1)["nvidia"]["program"], unit]
    assert node["digest"] == hashlib.sha256(json.dumps(said).encode()).hexdigest()
    archives = [{"path": f"{name}.tar", "sha256": name * 64} for name in "12"]
    one, other = (render(tmp_path, k3s_image_archives=order) for order in (archives, archives[::-1]))
    assert one["spark1"]["digest"] == other["spark1"]["digest"]


def test_what_runs_with_other_settings_is_restarted_and_nothing_else(pair: dict[str, Any], tmp_path: Path) -> None:
    """Node 1 runs what was asked for; node 2 is the same, because the digest of node 1 is not its own."""
    unit = {"loaded": True, "active": True, "running": True, "enabled": True, "digest": pair["spark1"]["digest"]}
    same: dict[str, Any] = {"k3s_node_labels": {"site": "lab"}, "k3s_config": {"snapshotter": "native"}}
    off = {**unit, "enabled": False}
    units = {"agent": unit, "server": unit}
    found = render(tmp_path, seen={"units": units}, **same)
    assert {name: (node["settled"], node["restart"]) for name, node in found.items()} == {
        "spark1": (True, False),
        "spark2": (False, True),
    }
    # Somebody edited a file and restarted: the digest is right, and what it stands for was not.
    edited = render(tmp_path, seen={"units": units}, wrote="__k3s_wrote_config", **same)
    assert (edited["spark1"]["settled"], edited["spark1"]["restart"]) == (False, True)
    # A unit that only does not start at boot is enabled, not restarted.
    disabled = render(tmp_path, seen={"units": {"agent": off, "server": off}}, **same)
    assert (disabled["spark1"]["settled"], disabled["spark1"]["restart"]) == (False, False)


def test_an_agent_gets_the_token_of_a_server_that_was_made_anew_by_a_restart(
    pair: dict[str, Any], tmp_path: Path
) -> None:
    """It goes on running with the token of before, and waits for a server that is no more."""
    same: dict[str, Any] = {"k3s_node_labels": {"site": "lab"}, "k3s_config": {"snapshotter": "native"}}
    unit = {"loaded": True, "active": True, "running": True, "enabled": True}
    units = {
        "agent": {**unit, "digest": pair["spark1"]["digest"]},
        "server": {**unit, "digest": pair["spark2"]["digest"]},
    }
    found = render(tmp_path, seen={"units": units}, wrote="__k3s_wrote_token", **same)
    assert {name: (node["settled"], node["restart"]) for name, node in found.items()} == {
        "spark1": (False, True),
        "spark2": (True, False),
    }


def test_what_restarts_k3s_is_what_tasks_wrote() -> None:
    tasks = [task for path in (ROLE / "tasks").glob("*.yml") for task in yaml.safe_load(path.read_text())]
    tasks += [inner for task in tasks for inner in task.get("block", [])]
    registered = {task.get("register") for task in tasks}
    listed = re.findall(r"\w+", yaml.safe_load((ROLE / "vars/main.yml").read_text())["__k3s_wrote"])
    assert set(listed) == set(WRITES) <= registered
    # A token that the server makes is there before the server runs.
    assert [task["when"] for task in tasks if task.get("register") == "__k3s_wrote_token"] == [
        "not __k3s_is_server | bool"
    ]


def test_what_has_not_come_up_is_restarted_with_the_settings_of_now(pair: dict[str, Any], tmp_path: Path) -> None:
    """systemd starts nothing that is activating, and an agent with a refused token tries it for ever."""
    same: dict[str, Any] = {"k3s_node_labels": {"site": "lab"}, "k3s_config": {"snapshotter": "native"}}
    unit = {"loaded": True, "active": False, "running": True, "enabled": True, "digest": "old"}
    old = render(tmp_path, seen={"units": {"agent": unit, "server": unit}}, **same)
    assert [old[name]["restart"] for name in ("spark1", "spark2")] == [True, True]
    # With the right settings the server is only slow; whether an agent's token is that of now is not seen.
    units = {
        "agent": {**unit, "digest": pair["spark1"]["digest"]},
        "server": {**unit, "digest": pair["spark2"]["digest"]},
    }
    right = render(tmp_path, seen={"units": units}, **same)
    assert [right[name]["restart"] for name in ("spark1", "spark2")] == [True, False]
    # Nobody is asked to move pods where no API answers or no kubelet would end them.
    (drain,) = (
        task for task in yaml.safe_load((ROLE / "tasks/node.yml").read_text()) if "Move the pods" in task["name"]
    )
    assert drain["when"] == ["__k3s_restart | bool", "__k3s_runs.active"]
    # Between two starts there is no process, and the next one is made with what was written.
    ended = {side: {**one, "running": False, "digest": ""} for side, one in units.items()}
    between = render(tmp_path, seen={"units": ended}, **same)
    assert [between[name]["restart"] for name in ("spark1", "spark2")] == [False, False]


def test_an_image_archive_is_taken_whole_and_under_a_name_of_its_own(tmp_path: Path) -> None:
    good = tmp_path / "operator.tar"
    good.write_text("archive")
    right = {"path": str(good), "sha256": hashlib.sha256(b"archive").hexdigest()}
    odd = tmp_path / "operator.img"
    odd.write_text("archive")
    tasks = [
        task
        for task in yaml.safe_load((ROLE / "tasks/fetch.yml").read_text())
        if "archives" in task["name"] or "Require each" in task["name"]
    ]
    play = {
        "hosts": "localhost",
        "connection": "local",
        "gather_facts": False,
        "vars_files": [str(ROLE / "vars/main.yml")],
        "vars": {"__k3s_facts": {"node": facts(1)}},
        "tasks": tasks,
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))

    def run(*archives: dict[str, str]) -> str:
        extra = json.dumps({"k3s_image_archives": list(archives)})
        done = run_playbook("localhost,", tmp_path / "play.yml", "-e", extra)
        said = " ".join((done.stdout + done.stderr).split())
        assert (done.returncode == 0) == ("failed=0" in said), said
        return said[said.find("found ") :] if done.returncode else ""

    assert len(tasks) == 2 and run() == "" and run(right) == ""
    link = tmp_path / "link.tar"
    link.symlink_to(good)
    assert run({**right, "path": str(link)}) == ""
    refused = run({**right, "sha256": "2" * 64})
    assert f"operator.tar with sha256 {right['sha256']}; required: {'2' * 64}" in refused
    assert "with sha256 of no file; required" in run({**right, "path": str(tmp_path / "none.tar")})
    assert "and a name that ends in .tar" in run({**right, "path": str(odd)})
    assert "and that no other archive has; fix: copy the file again, or correct k3s_image_archives" in run(right, right)


def test_everything_after_preflight_passes_dry(tmp_path: Path) -> None:
    """Every task's arguments are filled in, with what two nodes would have answered; no node is touched."""
    hosts = {
        f"spark{number}": {
            "goodput_management_address": f"10.0.0.{number}",
            "__k3s_facts": {"node": facts(number)},
            "__k3s_probe": {**probe(number), "images_sha256": ""},
        }
        for number in (1, 2)
    }
    (tmp_path / "hosts.yml").write_text(
        yaml.safe_dump({"sparks": {"hosts": hosts, "vars": {"ansible_connection": "local"}}})
    )
    parts = ("install", "configure", "start", "kubeconfig", "verify")
    file = {"sha256": "0" * 64, "path": "/cache/k3s"}
    play = {
        "hosts": "all",
        "gather_facts": False,
        "vars_files": [str(ROOT / "vars/site.yml"), str(ROOT / "vars/releases/current.yml")],
        "vars": {"__k3s_cached": {"files": {"aarch64": {"binary": file, "images": file}}}},
        "tasks": [
            {"ansible.builtin.include_vars": {"file": str(ROLE / "vars/config_keys.yml")}},
            *({"ansible.builtin.import_role": {"name": "goodput.spark.k3s", "tasks_from": part}} for part in parts),
        ],
    }
    (tmp_path / "play.yml").write_text(yaml.safe_dump([play]))
    extra = {"goodput_plan": PLAN, "k3s_kubeconfig": str(tmp_path / "kubeconfig")}
    done = run_playbook(tmp_path / "hosts.yml", tmp_path / "play.yml", "--check", "-e", json.dumps(extra))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert done.stdout.count("failed=0") == 2 and "Write the kubelet's drop-in" in done.stdout


# ---- reset of some nodes


def refusals(folder: Path, tasks: list[dict[str, Any]], cases: list[dict[str, Any]]) -> list[str]:
    """What the tasks say on the ``hosts`` of each case; empty where they pass. No node here has a K3s that answers."""
    hosts: dict[str, Any] = {f"spark{number}": {"ansible_connection": "local"} for number in (1, 2, 3)}
    hosts["gone"] = {"ansible_connection": "ssh", "ansible_host": "127.0.0.1", "ansible_port": 1}
    (folder / "hosts.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    common = {
        "k3s_nodes": ["spark1", "spark2", "spark3"],
        "k3s_server_node": "spark2",
        "k3s_reset_forget_objects": False,
        "__k3s_made_here": {"manifest": {"role": "k3s"}},
    }
    plays = []
    for number, case in enumerate(cases):
        said = {"ansible.builtin.set_fact": {f"said_{number}": "{{ ansible_failed_result.msg }}"}}
        guarded = [{"block": tasks, "rescue": [said]}]
        given = {key: value for key, value in case.items() if key != "hosts"}
        plays.append({"hosts": case["hosts"], "gather_facts": False, "vars": common | given, "tasks": guarded})
    answers = [f"{{{{ hostvars.values() | map(attribute='said_{n}', default='') | join }}}}" for n in range(len(cases))]
    told = {"content": "{{ answers | to_json }}", "dest": f"{folder}/said.json", "mode": "0644"}
    plays.append(
        {
            "hosts": "spark1",
            "gather_facts": False,
            "vars": {"answers": answers},
            "tasks": [{"ansible.builtin.copy": told}],
        }
    )
    (folder / "play.yml").write_text(yaml.safe_dump(plays))
    done = run_playbook(folder / "hosts.yml", folder / "play.yml")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    found: list[str] = json.loads((folder / "said.json").read_text())
    return found


def test_a_server_s_reset_asks_who_would_lose_it_only_where_somebody_could(tmp_path: Path) -> None:
    (consent,) = yaml.safe_load((ROLE / "tasks/reset_consent.yml").read_text())
    consent["block"] = consent["block"][1:]
    alone, *others = refusals(
        tmp_path,
        [consent],
        [
            {"hosts": "spark2"},
            {"hosts": "spark2", "k3s_reset_forget_objects": True},
            {"hosts": "spark2", "__k3s_made_here": {"manifest": None}},
            {"hosts": "spark2", "k3s_nodes": ["spark2"]},
            {"hosts": "spark1,spark2,spark3"},
            {"hosts": "spark1"},
        ],
    )
    assert alone.startswith("found no answer of the API; required: ") and "goodput_reset_forget_objects=true" in alone
    assert others == [""] * 5


def test_an_agent_leaves_a_server_that_is_gone_only_when_told_to(tmp_path: Path) -> None:
    tasks = yaml.safe_load((ROLE / "tasks/reset.yml").read_text())
    steps = [task for task in tasks if "Take the agents out" in task["name"] or "could be reached" in task["name"]]
    silent, unreachable, *others = refusals(
        tmp_path,
        steps,
        [
            {"hosts": "spark1"},
            {"hosts": "spark1", "k3s_server_node": "gone"},
            {"hosts": "spark1", "k3s_reset_forget_objects": True},
            {"hosts": "spark1", "k3s_server_node": "gone", "k3s_reset_forget_objects": True},
            {"hosts": "spark1", "k3s_server_node": "gone", "__k3s_made_here": {"manifest": None}},
            {"hosts": "spark1,spark2"},
        ],
    )
    assert silent.startswith("found no answer of the API; required: ") and "goodput_reset_forget_objects=true" in silent
    assert unreachable.startswith("found no way to the server gone (") and "onnect" in unreachable
    assert "reset with goodput_reset_forget_objects=true" in unreachable
    assert others == [""] * 4
