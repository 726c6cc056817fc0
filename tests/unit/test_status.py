"""goodput status: recorded answers of a node become rows and findings, and the arm is told from running processes."""

from __future__ import annotations

import io
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.serving import Answer

from goodput import arm, node_questions, status, status_view
from goodput.node_questions import COORDINATOR, FRONTEND, LMCACHE, WORKER
from goodput.session import Result

OPS = Path(__file__).parent / "data/ops"
SERVING = Path(__file__).parent / "data/serving"
HOST = "7384.20 9000.00\n1.25 0.50 0.40 2/120 4711\n" + "\n".join(
    (
        "MemTotal:        1495644 kB",
        "MemAvailable:     686080 kB",
        "SwapTotal:       1000 kB",
        "SwapFree:         400 kB",
    )
)
PLAN = "network:\n  version: 2\n  ethernets:\n    enp1s0f0np0:\n      mtu: 9000\n    enP2p1s0f0np0:\n      mtu: 9000\n"
CONNECTX = """mlx5_0/device/net/enp1s0f0np0
rocep1s0f1/device/net/enp1s0f1np1
roceP2p1s0f0/device/net/enP2p1s0f0np0
mlx5_0/ports/1/state:4: ACTIVE
roceP2p1s0f0/ports/1/state:4: ACTIVE
rocep1s0f1/ports/1/state:1: DOWN
mlx5_0/ports/1/counters/port_xmit_data:1000
mlx5_0/ports/1/counters/port_rcv_data:250
mlx5_0/ports/1/hw_counters/out_of_sequence:3
mlx5_0/ports/1/hw_counters/np_cnp_sent:4
"""
RXE = """rocep1s0f0/parent:enp1s0f0np0
roceP2p1s0f0/parent:enP2p1s0f0np0
rocep1s0f0/ports/1/state:4: ACTIVE
roceP2p1s0f0/ports/1/state:4: ACTIVE
rocep1s0f0/ports/1/hw_counters/sent_pkts:31200
rocep1s0f0/ports/1/hw_counters/rcvd_pkts:12
rocep1s0f0/ports/1/hw_counters/completer_retry_err:0
"""
NET = """enp1s0f0np0/operstate:up
enP2p1s0f0np0/operstate:up
enp1s0f1np1/operstate:down
enp1s0f0np0/carrier:1
enP2p1s0f0np0/carrier:1
enp1s0f0np0/speed:200000
enP2p1s0f0np0/speed:-1
enp1s0f0np0/mtu:9000
"""
ADDRESSES = """1: lo    inet 127.0.0.1/8 scope host lo\\       valid_lft forever preferred_lft forever
3: enp1s0f0np0    inet 192.168.100.1/24 brd 192.168.100.255 scope global enp1s0f0np0\\       valid_lft forever
4: enP2p1s0f0np0    inet 192.168.101.1/24 scope global enP2p1s0f0np0\\       valid_lft forever preferred_lft forever
"""
LMCACHE_WORDS = (
    *("/usr/bin/python3", "/opt/goodput/runtime/bin/lmcache", "server", "--host", "10.77.0.1", "--port", "5555"),
    *("--http-host", "10.77.0.1", "--http-port", "9500", "--chunk-size", "256", "--l1-size-gb", "0.25"),
    *("--l2-adapter", '{"type":"fs_native","base_path":"/srv/goodput/l2/lmcache","max_capacity_gb":2,"eviction":{}}'),
)


def unit(name: str, active: str = "active", sub: str = "running", **more: str) -> str:
    found = {
        "Type": "exec", "Id": f"{name}.service", "LoadState": "loaded", "ActiveState": active, "SubState": sub,
        "UnitFileState": "enabled", "MainPID": "100", "NRestarts": "0", "Result": "success",
        "ActiveEnterTimestampMonotonic": "7264200000",
    } | more  # fmt: skip
    return "\n".join(f"{key}={value}" for key, value in found.items())


def http(**bodies: str) -> str:
    """What HTTP prints: a body an address, each with its status."""
    text = ""
    for group, paths in (
        ("lmcache", ("healthcheck", "config", "status", "metrics")),
        ("worker", ("health", "metrics")),
    ):
        text += f"\x1dgoodput-{group}\x1d"
        for path in paths:
            body = bodies.get(f"{group}_{path}", "")
            text += f"{body}\n\x1e{200 if body else 0:03d} http://10.77.0.1:9500/{path}\x1e\n"
    return text


@pytest.fixture
def answers() -> dict[str, Result]:
    config = (SERVING / "lmcache_config.json").read_text()
    texts = {
        "host": HOST,
        "at_rest": "",
        "units": "\n\n".join((unit(WORKER), unit(LMCACHE, MainPID="200", NRestarts="2"))) + "\n",
        "rdma": RXE,
        "net": NET,
        "addresses": ADDRESSES,
        "rail_plan": PLAN,
        "processes": (
            "goodput-worker\x1f100\x1f98304\x1fpython3\x1f-m\x1fdynamo.mocker\x1f\x1e\n"
            "goodput-worker\x1f101\x1f1024\x1fhelper\x1f\x1e\n"
            "goodput-worker\x1f102\x1f\x1f\x1e\n" + "goodput-lmcache\x1f200\x1f500000\x1f" + "\x1f".join(LMCACHE_WORDS)
        )
        + "\x1f\x1e\n",
        "http": http(
            lmcache_healthcheck='{"status":"healthy"}',
            lmcache_config=config,
            lmcache_status=(OPS / "lmcache_status.json").read_text(),
            lmcache_metrics=(OPS / "lmcache_metrics.txt").read_text(),
            worker_health="{}",
            worker_metrics=(OPS / "worker_metrics.txt").read_text(),
        ),
        "l2": "/srv/goodput/l2/lmcache\x1f/srv/goodput/l2 8589934592 6442450944\x1f12582912\x1f24\n",
    }
    return {name: Result(0, text, "") for name, text in texts.items()}


def node(answers: dict[str, Result], **changed: str) -> status.Node:
    answers = answers | {name: Result(0, text, "") for name, text in changed.items()}
    return status.parse_node("spark1", "10.77.0.1", answers)


def test_the_questions_are_shell() -> None:
    for name, command in (node_questions.STATUS | {"endpoint": node_questions.ENDPOINT}).items():
        done = subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, (name, done.stderr)


def test_a_node_of_recorded_answers(answers: dict[str, Result]) -> None:
    found = node(answers)
    assert (found.uptime_seconds, found.load) == (7384.2, 1.25)
    assert found.memory_bytes["MemAvailable"] == 686080 * 1024
    assert [(each.name, each.state, round(each.age_seconds or 0), each.restarts) for each in found.units] == [
        (WORKER, "active", 120, 0),
        (LMCACHE, "active", 120, 2),
    ]
    # Memory is that of all processes of the unit; the one that ended while it was read is left out.
    assert found.units[0].rss_bytes == (98304 + 1024) * 1024
    assert found.running == {WORKER: ("python3", "-m", "dynamo.mocker"), LMCACHE: LMCACHE_WORDS}
    assert found.problems == []
    assert found.requests == 2
    assert found.figures["lookup_tokens"] == 8192
    assert found.figures["lookup_hit_rate"] == found.figures["lookup_hit_rate_l1"] == 0.5
    assert found.figures["lookup_hit_rate_l2"] == 0.0
    # No failure has been counted, which is not the same as none happened.
    assert found.figures["l2_prefetch_failures"] is None
    assert found.figures["prefix_cache_hit_rate"] is None


def test_tiers_by_lmcache_and_by_the_disk(answers: dict[str, Result]) -> None:
    l1, l2 = node(answers).tiers
    assert (l1.name, l1.used_bytes, l1.capacity_bytes) == ("L1", 8388608, 268435456)
    # The disk holds more than LMCache counts since its start.
    assert (l2.used_bytes, l2.disk_bytes, l2.capacity_bytes, l2.files) == (8388608, 12582912, 2 * 2**30, 24)
    assert l2.disk_free_bytes == 6442450944


def test_lmcache_with_other_settings_than_its_arguments(answers: dict[str, Result]) -> None:
    text = answers["processes"].stdout.replace("--chunk-size\x1f256", "--chunk-size\x1f512")
    assert any("--chunk-size: found 256, required 512" in problem for problem in node(answers, processes=text).problems)


def test_rails_of_connectx_in_the_order_of_the_plan() -> None:
    rails, problems = status.parse_rails(CONNECTX, NET, ADDRESSES, PLAN)
    assert [(rail.netdev, rail.device, rail.up) for rail in rails] == [
        ("enp1s0f0np0", "mlx5_0", True),
        ("enP2p1s0f0np0", "roceP2p1s0f0", True),
    ]
    first = rails[0]
    # port_xmit_data counts words of four bytes.
    assert (first.sent, first.received, first.unit, first.losses) == (4000, 1000, "bytes", 7)
    assert (first.speed_mbps, first.mtu_bytes, first.addresses) == (200000, 9000, ["192.168.100.1/24"])
    assert (rails[1].speed_mbps, rails[1].sent, rails[1].losses) == (None, None, None)
    assert problems == []


def test_soft_roce_counts_packets() -> None:
    rails, problems = status.parse_rails(RXE, NET, ADDRESSES, PLAN)
    assert (rails[0].sent, rails[0].unit, rails[0].losses) == (31200, "packets", 0)
    assert problems == []


@pytest.mark.parametrize(
    ("rdma", "net", "addresses", "words"),
    [
        (RXE.replace("/state:4: ACTIVE", "/state:1: DOWN", 1), NET, ADDRESSES, "link up, rocep1s0f0 1: DOWN"),
        (RXE, NET.replace("np0/operstate:up", "np0/operstate:down", 1), ADDRESSES, "link down"),
        (RXE, NET, ADDRESSES.replace("enP2p1s0f0np0    inet", "x    inet"), "rail enP2p1s0f0np0: no address"),
        ("", NET, ADDRESSES, "rail enp1s0f0np0: no RoCE device"),
    ],
)  # fmt: skip
def test_a_broken_rail_is_named(rdma: str, net: str, addresses: str, words: str) -> None:
    _rails, problems = status.parse_rails(rdma, net, addresses, PLAN)
    assert any(words in problem for problem in problems), problems


def test_without_the_roles_file_cabled_functions_are_shown() -> None:
    rails, problems = status.parse_rails(CONNECTX, NET, ADDRESSES, "")
    assert {rail.netdev for rail in rails} == {"enp1s0f0np0", "enP2p1s0f0np0"}
    assert problems == []


@pytest.mark.parametrize(
    ("block", "state", "down"),
    [
        (unit("goodput-x", "failed", "failed", Result="exit-code"), "failed", True),
        (unit("goodput-x", "inactive", "dead"), "inactive", True),
        (unit("goodput-x", "activating", "auto-restart"), "starting", True),
        (unit("goodput-x", "inactive", "dead", UnitFileState="disabled"), "inactive", False),
        (unit("goodput-x", "inactive", "dead", Type="oneshot"), "inactive", False),
        (unit("goodput-x", "inactive", "dead", Type="oneshot", RemainAfterExit="yes"), "inactive", True),
        (unit("goodput-x", "active", "exited", Type="oneshot"), "exited", False),
    ],
)
def test_what_should_run_and_does_not_is_down(block: str, state: str, down: bool) -> None:
    [found], problems = status.parse_units(block, 8000.0, [])
    assert (found.state, found.down) == (state, down)
    assert bool(problems) is down


def test_a_unit_that_is_only_mentioned_is_no_unit() -> None:
    assert status.parse_units(unit("goodput-etcd", "inactive", "dead", LoadState="not-found"), 1.0, []) == ([], [])


def test_nothing_is_installed(answers: dict[str, Result]) -> None:
    bare = node(answers, units="", processes="", http="", l2="", rail_plan="", rdma="")
    site = status.parse_site([bare], {"spark1": "10.77.0.1"}, [], "virtual", [])
    assert site.exit_code == 1
    assert site.problems == ["spark1: no goodput unit is installed; run `goodput site`"]


# --------------------------------------------------------------------------------------------------------------------
# The arm
# --------------------------------------------------------------------------------------------------------------------

NODES = [{"name": f"spark{n}", "server": n == 1, "total_bytes": 1531539456} for n in (1, 2)]
HERE = {
    "node": "spark1", "management_address": "10.77.0.1", "model_path": "/srv/goodput/models/tiny", "model_name": "tiny",
    "rail_address": "192.168.100.1", "l2_path": "/srv/goodput/l2/tiny-1", "first_node_address": "10.77.0.1",
    "coordinator_address": "10.77.0.1",
}  # fmt: skip


def running(plan: dict[str, Any]) -> dict[str, dict[str, list[str]]]:
    """The processes as the roles start them."""

    def words(key: str, before: list[str], after: list[str]) -> list[str]:
        final = []
        for word in plan[key]:
            for name, value in HERE.items():
                word = word.replace(f"{{{name}}}", value)
            final.append(word)
        return [*before, *final, *after]

    planes = ["--discovery-backend", "etcd", "--request-plane", "tcp", "--event-plane", "zmq"]
    python = ["/usr/bin/python3", "-m"]
    units = {
        WORKER: words("dynamo_worker_args", [*python, f"dynamo.{plan['inputs']['profile']['engine']}"], planes),
        FRONTEND: words("dynamo_frontend_args", [*python, "dynamo.frontend"], ["--http-port", "8000", *planes]),
    }
    if plan["lmcache_server_args"]:
        units[LMCACHE] = words("lmcache_server_args", ["/usr/bin/python3", "/x/lmcache", "server"], [])
    if plan["lmcache_coordinator_args"]:
        units[COORDINATOR] = words("lmcache_coordinator_args", ["/usr/bin/python3", "/x/lmcache", "coordinator"], [])
    both = {name: list(value) for name, value in units.items() if name not in (FRONTEND, COORDINATOR)}
    return {"spark1": units, "spark2": both}


@pytest.fixture(scope="module")
def plans() -> dict[str, dict[str, Any]]:
    spark = [{**facts, "total_bytes": 128 * 10**9} for facts in NODES]
    _chosen, large = arm.site_plans({"goodput_profile": "super-kv12-l18"}, spark)
    chosen, small = arm.site_plans({"goodput_profile": "virtual"}, NODES)
    assert chosen == small[0]["name"] == "virtual"
    return {plan["name"]: plan for plan in large} | {"virtual": small[0]}


def test_every_profile_is_recognised_from_its_own_processes(plans: dict[str, dict[str, Any]]) -> None:
    for name, plan in plans.items():
        found = arm.find(plans.values(), running(plan))
        assert found is not None
        assert found.exact, (name, found)
        # Two profiles may decide the same arguments; then either name is right.
        assert found.name == name or not arm.against(plan, running(plans[found.name])).differences


def test_the_arm_is_planned_as_the_plays_plan_it() -> None:
    """With the revision of the site's model and its release set: the L2 directory is named after both."""
    store = [{"name": "tiny", "revision": "50c565dcb69b"}]
    variables = {"goodput_profile": "virtual", "goodput_release": "virtual", "model_store_models": store}
    _chosen, plans = arm.site_plans(variables, NODES)
    assert "tiny@50c565dcb69b" in plans[0]["l2_identity"]


def test_a_changed_a_missing_and_a_leftover_argument(plans: dict[str, dict[str, Any]]) -> None:
    seen = running(plans["virtual"])
    at = seen["spark2"][LMCACHE].index("--l1-size-gb")
    seen["spark2"][LMCACHE][at + 1] = "0.5"
    del seen["spark2"][WORKER][seen["spark2"][WORKER].index("--speedup-ratio") :][:2]
    seen["spark1"][WORKER] += ["--kv-transfer-config", "{}"]
    at = seen["spark1"][WORKER].index("--block-size")
    del seen["spark1"][WORKER][at : at + 2]
    found = arm.find(plans.values(), seen)
    assert found is not None and found.name == "virtual"
    assert {(item.node, item.unit, item.argument, item.planned, item.running) for item in found.differences} == {
        ("spark2", LMCACHE, "--l1-size-gb", "0.25", "0.5"),
        ("spark1", WORKER, "--kv-transfer-config", "", "{}"),
        ("spark1", WORKER, "--block-size", "16", ""),
    }


def test_another_engine_and_a_process_too_many_differ(plans: dict[str, dict[str, Any]]) -> None:
    seen = running(plans["super-a-router"])
    seen["spark1"][LMCACHE] = ["lmcache", "server"]
    seen["spark2"][WORKER][2] = "dynamo.mocker"
    found = arm.against(plans["super-a-router"], seen)
    assert {(item.unit, item.argument, item.running) for item in found.differences} == {
        (LMCACHE, "process", "runs"),
        (WORKER, "engine", "mocker"),
    }


def test_a_coordinator_is_needed_once_and_left_over_without_peers(plans: dict[str, dict[str, Any]]) -> None:
    plan = plans["super-c-p2p"]
    seen = running(plan)
    assert arm.against(plan, seen).exact
    coordinator = seen["spark1"].pop(COORDINATOR)
    assert [(item.node, item.unit) for item in arm.against(plan, seen).differences] == [("spark1", COORDINATOR)]
    seen = running(plans["virtual"])
    seen["spark1"][COORDINATOR] = coordinator
    assert [item.unit for item in arm.against(plans["virtual"], seen).differences] == [COORDINATOR]


def test_a_placeholder_stands_for_something() -> None:
    assert arm.fits('{"base_path":"{l2_path}","n":4}', '{"base_path":"/srv/l2","n":4}')
    assert not arm.fits('{"base_path":"{l2_path}","n":4}', '{"base_path":"/srv/l2","n":5}')
    assert not arm.fits("http://{management_address}:1", "http://:1")
    assert not arm.fits("0.25", "0x25")
    # What was in L2 when the server started came off its cap; more than planned is another arrangement.
    files = '{"type":"fs_native","max_capacity_gb":%s,"n":4}'
    assert arm.fits(files % 2, files % 1.75)
    assert not arm.fits(files % 2, files % 3)
    assert not arm.fits('{"type":"resp","max_capacity_gb":2}', '{"type":"resp","max_capacity_gb":1}')


# --------------------------------------------------------------------------------------------------------------------
# The site
# --------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def frontend() -> dict[str, Answer]:
    return {
        "/health": Answer(200, (SERVING / "health.json").read_text()),
        "/v1/models": Answer(200, '{"object":"list","data":[{"id":"tiny","object":"model"}]}'),
        "/metrics": Answer(200, (OPS / "frontend_metrics.txt").read_text()),
    }


def site_of(
    answers: dict[str, Result], frontend: dict[str, Answer], plans: dict[str, dict[str, Any]], chosen: str = "virtual"
) -> status.Site:
    nodes = [node(answers), node(answers)]
    nodes[1].name = "spark2"
    for each, units in zip(nodes, running(plans["virtual"]).values(), strict=True):
        each.running, each.problems = {name: tuple(words) for name, words in units.items()}, []
    management = {"spark1": "10.77.0.1", "spark2": "10.77.0.2"}
    return status.parse_site(nodes, management, [frontend], chosen, list(plans.values()))


def test_all_well(answers: dict[str, Result], frontend: dict[str, Answer], plans: dict[str, dict[str, Any]]) -> None:
    site = site_of(answers, frontend, plans)
    assert site.problems == [] and site.exit_code == 0
    assert site.workers == {"spark1": "7d7ba228ef077809", "spark2": "7d7ba228ef077807"}
    assert site.model == "tiny" and site.arm is not None and site.arm.name == "virtual"
    assert site.figures["cached_share"] == pytest.approx(4496 / 9008)
    assert (site.figures["requests"], site.figures["failed_requests"]) == (3, 1)
    assert json.loads(json.dumps(site.to_dict()))["ok"] is True


def test_what_is_wrong_is_said(
    answers: dict[str, Result], frontend: dict[str, Answer], plans: dict[str, dict[str, Any]]
) -> None:
    health = json.loads(frontend["/health"].text)
    health["instances"] = [entry for entry in health["instances"] if "10.77.0.2" not in entry["transport"]["tcp"]]
    site = site_of(answers, frontend | {"/health": Answer(200, json.dumps(health))}, plans)
    assert ["spark2: its worker is not registered" in problem for problem in site.problems] == [True]
    site = site_of(answers, frontend, plans, chosen="super-a-router")
    assert site.problems == ["the inventory chooses profile super-a-router, virtual runs; run `goodput site`"]
    site = site_of(answers, {"/health": Answer(0, "no answer from http://127.0.0.1:8000/health")}, plans)
    assert any(problem.startswith("frontend: no answer") for problem in site.problems)
    site = site_of(answers, frontend | {"/v1/models": Answer(200, '{"data":[]}')}, plans)
    assert any("no model is listed" in problem for problem in site.problems)


def test_a_dead_node_is_a_row_and_all_dead_is_exit_2(answers: dict[str, Result], frontend: dict[str, Answer]) -> None:
    dead = status.Node("spark2", "10.77.0.2", "spark2 (10.77.0.2): no route")
    site = status.parse_site([node(answers), dead], {}, [frontend], "", [])
    assert site.exit_code == 1 and dead.error in site.problems
    assert status.parse_site([dead], {}, [], "", []).exit_code == 2


def test_the_screen_holds_it_all(
    answers: dict[str, Result], frontend: dict[str, Answer], plans: dict[str, dict[str, Any]]
) -> None:
    from rich.console import Console

    console = Console(width=120, record=True, file=io.StringIO())
    console.print(status_view.screen(site_of(answers, frontend, plans), "goodput status"))
    text = console.export_text()
    for words in ("ALL WELL", "arm: virtual", "0.77 of 1.43 GiB", "enP2p1s0f0np0", "31.2 k pkt / 12 pkt", "2:00 min",
                  "8 MiB of 2 GiB (0.4 %)", "12 MiB", "50.0 %", "7d7ba228ef077809"):  # fmt: skip
        assert words in text, text
    assert len(text.splitlines()) < 50


@pytest.mark.parametrize(
    ("seconds", "text"), [(None, "-"), (4.2, "0:04 min"), (125, "2:05 min"), (7384, "2:03 h"), (93784, "1 d 2:03 h")]
)
def test_durations(seconds: float | None, text: str) -> None:
    assert status_view.duration(seconds) == text


def test_memory_before_serving_is_what_is_planned_with(answers: dict[str, Result]) -> None:
    found, total = node(answers), 1495644 * 1024
    recorded = json.dumps({"total_bytes": total, "available_bytes": 5})
    assert status.memory_facts("spark1", True, found, recorded)["available_bytes"] == 5
    # Recorded with another kernel, or not at all.
    assert "available_bytes" not in status.memory_facts("spark1", True, found, recorded.replace(str(total), "1"))
    assert "available_bytes" not in status.memory_facts("spark1", True, found, "")
