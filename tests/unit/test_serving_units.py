"""The units of every profile, rendered as on two nodes: what systemd would start is what the planner decided."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import serving_units
from ansible_collections.goodput.spark.plugins.module_utils.serving import (
    L2_DIRECTORY,
    argument,
    environment_differences,
)
from serving_units import MOVED, MOVED_PORTS, PROFILES, ROOT, Rendered, environment, node, words


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return serving_units.rendered_units(tmp_path_factory)


def filled(plan_words: list[str], given: list[str]) -> bool:
    """Whether ``given`` begins with the plan's words, a placeholder standing for anything."""
    patterns = [re.sub(r"\\\{[a-z0-9_]+\\\}", ".+", re.escape(word)) for word in plan_words]
    return len(given) >= len(patterns) and all(re.fullmatch(p, g) for p, g in zip(patterns, given, strict=False))


@pytest.mark.parametrize("profile", PROFILES)
def test_units_start_what_the_plan_says(rendered: Rendered, profile: str) -> None:
    second = node(profile, 2, 2)
    plan = rendered[second]["plan"]
    engine = plan["inputs"]["profile"]["engine"]
    worker = words(rendered, second, "worker")
    assert worker[:3] == ["/usr/bin/python3", "-m", f"dynamo.{engine}"]
    assert filled(plan["dynamo_worker_args"], worker[3:])
    for plane in ("--discovery-backend etcd", "--request-plane tcp", "--event-plane zmq"):
        assert plane in " ".join(worker)
    assert filled(plan["dynamo_frontend_args"], words(rendered, second, "frontend")[3:])
    if plan["lmcache_server_args"]:
        server = words(rendered, second, "lmcache")
        assert server[2] == "server" and filled(plan["lmcache_server_args"], server[3:])
    if plan["lmcache_coordinator_args"]:
        server, first = words(rendered, second, "lmcache"), words(rendered, node(profile, 2, 1), "coordinator")
        assert first[2] == "coordinator" and filled(plan["lmcache_coordinator_args"], first[3:])
        # Peers meet at the first node and read over the first rail.
        assert argument(server, "--coordinator-url") == f"http://10.77.0.1:{argument(first, '--port')}"
        assert str(argument(server, "--p2p-advertise-url")).startswith("192.168.100.2:")


def test_what_verify_compares_is_what_units_start(rendered: Rendered) -> None:
    for profile in PROFILES:
        name = node(profile, 2, 1)
        plan, decided = rendered[name]["plan"], rendered[name]["decided"]
        units = ["worker", "etcd", "frontend"] + ["lmcache"] * bool(plan["lmcache_server_args"])
        units += ["coordinator"] * bool(plan["lmcache_coordinator_args"])
        assert sorted(each["name"] for each in decided) == sorted(f"goodput-{unit}" for unit in units), profile
        for each in decided:
            unit = each["name"].removeprefix("goodput-")
            line = words(rendered, name, unit)
            assert line[len(line) - len(each["arguments"]) :] == each["arguments"]
            given = environment(rendered, name, unit) if unit != "etcd" else {}
            assert environment_differences(given, each["environment"]) == ({}, {}), (profile, unit)
            assert each["environment"].items() <= given.items()


def test_the_workers_of_a_pair_start_with_the_same_words(rendered: Rendered) -> None:
    for profile in PROFILES:
        names = [node(profile, 2, number) for number in (1, 2)]
        one, two = (" ".join(words(rendered, name, "worker")) for name in names)
        here, there = one.replace("10.77.0.1", "ADDRESS"), two.replace("10.77.0.2", "ADDRESS")
        assert here.replace(names[0], "NODE") == there.replace(names[1], "NODE"), profile


def test_only_lmcache_is_told_of_the_rails(rendered: Rendered) -> None:
    second = node("weka-c-p2p", 2, 2)
    assert environment(rendered, second, "lmcache")["UCX_NET_DEVICES"] == "rocep1s0f0:1,roceP2p1s0f0:1"
    worker = environment(rendered, second, "worker")
    assert not any(name.startswith("UCX_") for name in worker)
    assert worker["DYN_EVENT_PLANE_HOST"] == "10.77.0.2" and worker["ETCD_ENDPOINTS"] == "http://10.77.0.1:2379"


def test_lmcache_waits_for_rails_only_where_peers_read_over_them(rendered: Rendered) -> None:
    for profile in PROFILES:
        unit = rendered[node(profile, 2, 2)]["lmcache"]
        waits = re.findall(r"^ExecStartPre=.*rail_wait.py (.*)$", unit, re.M)
        if "{rail_" not in str(rendered[node(profile, 2, 2)]["plan"]):
            assert not waits and "TimeoutStartSec" not in unit, profile
            continue
        devices = "--rail rocep1s0f0=192.168.100.2 --rail roceP2p1s0f0=192.168.101.2"
        assert waits == [f"--seconds 60 {devices}"] and setting(unit, "TimeoutStartSec") == "60s 90s", profile


def test_only_a_real_engine_is_given_up_some_day(rendered: Rendered) -> None:
    for profile in PROFILES:
        units = rendered[node(profile, 2, 1)]
        real = units["plan"]["inputs"]["profile"]["engine"] == "vllm"
        for unit in serving_units.UNITS:
            # On hardware the wait grows to a minute: 100 starts in 8 h are no flapping, they are an endless failure.
            assert setting(units[unit], "RestartMaxDelaySec") == "60"
            limited = real and unit == "worker"
            assert setting(units[unit], "StartLimitIntervalSec") == ("8h" if limited else "0"), (profile, unit)
            assert ("StartLimitBurst=100\n" in units[unit]) == limited, (profile, unit)
            if limited:
                # Waiting for memory alone, with the shortest pause there is, never gets there.
                wait_s = int(re.search(r"--seconds (\d+)", units[unit])[1])  # type: ignore[index]
                assert 100 * (wait_s + 2) > 8 * 3600, profile


def test_only_a_real_engine_waits_for_memory(rendered: Rendered) -> None:
    for profile in PROFILES:
        plan, unit = rendered[node(profile, 2, 2)]["plan"], rendered[node(profile, 2, 2)]["worker"]
        gates = re.findall(r"^ExecStartPre=.*memory_gate.py (.*)$", unit, re.M)
        if plan["inputs"]["profile"]["engine"] == "mocker":
            assert not gates and "TimeoutStartSec" not in unit, profile
            continue
        share = argument(plan["dynamo_worker_args"], "--gpu-memory-utilization")
        assert gates == [f"--utilization {share} --margin-bytes 6000000000 --seconds 300"], profile
        assert setting(unit, "TimeoutStartSec") == "300s 90s"


def test_the_directory_of_an_arrangement_is_known_by_its_name(rendered: Rendered) -> None:
    for profile in PROFILES:
        plan = rendered[node(profile, 2, 1)]["plan"]
        if plan["l2_path"]:
            assert L2_DIRECTORY.fullmatch(plan["l2_path"].rpartition("/")[2]), profile


@pytest.mark.parametrize(
    ("result", "said", "aside"),
    [
        ("exit-code", "C | etcdmain: walpb: crc mismatch", True),
        ("exit-code", "panic: freepages: failed to get all reachable pages", True),
        # Neither a port nor an address that is not there yet, nor a killed process, costs the registrations.
        ("exit-code", "C | etcdmain: listen tcp 10.77.0.1:2379: bind: cannot assign requested address", False),
        ("signal", "panic: freepages", False),
        ("success", "", False),
    ],
)
def test_discovery_puts_aside_only_data_that_it_can_not_read(
    rendered: Rendered, tmp_path: Path, result: str, said: str, aside: bool
) -> None:
    line = setting(rendered[node("weka-c-p2p", 2, 1)]["etcd"], "ExecStopPost")
    program, flag, script = shlex.split(line.removeprefix("+").replace("$$", "$"))
    data, tools = tmp_path / "etcd", tmp_path / "bin"
    for folder in (data / "member", data / "damaged/older", tools):
        folder.mkdir(parents=True)
    journal = tools / "journalctl"
    journal.write_text(f'#!/bin/sh\n[ "$1" = --sync ] || echo "$*: {said}" | sed "s/.*INVOCATION_ID=7: //"\n')
    journal.chmod(0o755)
    environ = {"PATH": f"{tools}:/usr/bin:/bin", "SERVICE_RESULT": result, "INVOCATION_ID": "7"}
    command = [program, flag, script.replace("/var/lib/goodput/etcd", str(data))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert ("put aside" in done.stdout) == aside == (not (data / "member").exists())
    assert (data / "damaged/older").exists() != aside


def test_units_start_after_what_they_ask(rendered: Rendered) -> None:
    units = rendered[node("weka-c-p2p", 2, 1)]
    order = ("etcd", "coordinator", "lmcache", "worker", "frontend")
    after = {unit: set(setting(units[unit], "After").split()) for unit in order}
    for unit, names in after.items():
        later = {f"goodput-{name}.service" for name in order[order.index(unit) :]}
        assert not names & later, unit
    for unit in order[1:]:
        assert "goodput-etcd.service" in after[unit], unit
    assert "goodput-coordinator.service" in after["lmcache"] and "goodput-lmcache.service" in after["worker"]


def test_no_process_of_dynamo_guesses_its_address(rendered: Rendered) -> None:
    for profile in PROFILES:
        worker = environment(rendered, node(profile, 2, 2), "worker")
        hosts = {name: value for name, value in worker.items() if name.endswith(("_HOST", "_HOST_IP"))}
        assert "VLLM_HOST_IP" in hosts and set(hosts.values()) == {"10.77.0.2"}, profile


def demanded(name: str) -> dict[str, Any]:
    """What a file of the acceptance suite demands of its units. The file itself needs the suite's plugin."""
    tree = ast.parse((ROOT / f"tests/acceptance/{name}.py").read_text())
    lines: list[ast.stmt] = [
        each
        for each in tree.body
        if isinstance(each, ast.Assign) and re.search(r"'(WORKER|HARDENED|SHARES)'", ast.dump(each.targets[0]))
    ]
    found: dict[str, Any] = {}
    exec(compile(ast.Module(lines, []), name, "exec"), found)
    return found


def setting(text: str, name: str) -> str:
    """The value of a line that a unit has once."""
    (found,) = re.findall(rf"^{name}=(.*)$", text, re.M)
    return str(found)


def test_memory_and_shares_are_what_the_suite_demands(rendered: Rendered) -> None:
    units = rendered[node("weka-c-p2p", 2, 1)]
    wanted = {"lmcache": demanded("test_60_lmcache")["HARDENED"]}
    wanted |= {name.removeprefix("goodput-"): shares for name, shares in demanded("test_70_dynamo")["SHARES"].items()}
    for unit, shares in wanted.items():
        for name in ("OOMScoreAdjust", "CPUWeight", "IOWeight"):
            assert setting(units[unit], name) == shares[name], (unit, name)
    # The engine goes before whatever it would wait for without end.
    adjusted = {unit: int(setting(units[unit], "OOMScoreAdjust")) for unit in serving_units.UNITS}
    assert adjusted.pop("worker") > 0 > max(adjusted.values())


def test_the_ports_of_a_profile_reach_every_unit(rendered: Rendered) -> None:
    def after(unit: str, flag: str) -> str:
        found = words(rendered, MOVED, unit)
        return found[found.index(flag) + 1]

    assert after("frontend", "--http-port") == str(MOVED_PORTS["frontend_http"])
    assert environment(rendered, MOVED, "worker")["DYN_SYSTEM_PORT"] == str(MOVED_PORTS["worker_system"])
    assert after("lmcache", "--port") == str(MOVED_PORTS["lmcache_request"])
    assert after("lmcache", "--http-port") == str(MOVED_PORTS["lmcache_http"])
