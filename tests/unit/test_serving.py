"""Argument lists and checks; the answers were recorded from LMCache 0.5.6 and Dynamo 1.6.1."""

from __future__ import annotations

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import serving
from ansible_collections.goodput.spark.plugins.module_utils.serving import Answer, ServingError
from ansible_collections.goodput.spark.plugins.modules import serving_probe

DATA = Path(__file__).parent / "data/serving"
VALUES = {"management_address": "10.77.0.1", "node": "spark1", "l2_path": "/srv/goodput/l2/lmcache"}
ADAPTER = '{"type":"fs_native","base_path":"{l2_path}","max_capacity_gb":2,"eviction":{"eviction_policy":"LRU"}}'


def failed(checks: list[dict[str, Any]]) -> list[str]:
    return [check["check"] for check in checks if not check["ok"]]


# Arguments


def test_placeholders_are_filled_and_json_is_left_alone() -> None:
    words = serving.arguments(["--host", "{management_address}", "--l2-adapter", ADAPTER, "--chunk-size", 256], VALUES)
    assert words[:2] == ["--host", "10.77.0.1"]
    assert json.loads(words[3]) == {
        "type": "fs_native",
        "base_path": "/srv/goodput/l2/lmcache",
        "max_capacity_gb": 2,
        "eviction": {"eviction_policy": "LRU"},
    }
    assert words[5] == "256"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{managment_address}"], r"unknown placeholder \{managment_address\}.*known: .*\{management_address\}"),
        (["--x", True], "argument True is a bool; put it in quotes"),
        (["--x", None], "argument None is a NoneType"),
        (["--x", {"a": 1}], "is a dict"),
        ("--host x", "must be a list, got str"),
        (["a\nb"], "line break"),
    ],
)
def test_arguments_that_are_refused(words: Any, message: str) -> None:
    with pytest.raises(ServingError, match=message):
        serving.arguments(words, VALUES)


def test_a_placeholder_without_value_is_refused() -> None:
    with pytest.raises(ServingError, match="has no value on this node"):
        serving.arguments(["{node}"], {"node": ""})


def test_flags_of_the_role_are_added_once_and_contradictions_refused() -> None:
    assert serving.arguments(["a"], {}, {"--port": 5555}) == ["a", "--port", "5555"]
    assert serving.arguments(["--port", 5555], {}, {"--port": 5555}) == ["--port", "5555"]
    assert serving.arguments(["--port=5555"], {}, {"--port": "5555"}) == ["--port=5555"]
    with pytest.raises(ServingError, match="the plan says --port 1, the role says --port 2"):
        serving.arguments(["--port", "1"], {}, {"--port": 2})


def test_argument_takes_the_last_one_as_argparse_does() -> None:
    words = ["--a", "1", "--b=x=y", "--a", "2", "--flag"]
    assert serving.argument(words, "--a") == "2"
    assert serving.argument(words, "--b") == "x=y"
    assert serving.argument(words, "--flag") is None
    assert serving.argument_all(words, "--a") == ["1", "2"]


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("--router-mode", "--router-mode"),
        ("http://10.77.0.1:2379,http://127.0.0.1:2379", "http://10.77.0.1:2379,http://127.0.0.1:2379"),
        ("", "''"),
        ("100%", "100%%"),
        ("$HOME x", "'$$HOME x'"),
        ('{"a":1}', "'{\"a\":1}'"),
        ('it\'s \\ "so"', '"it\'s \\\\ \\"so\\""'),
    ],
)
def test_exec_line_quotes_for_systemd(word: str, line: str) -> None:
    assert serving.exec_line([word]) == line
    # systemd's rules agree with the shell's once % and $ are undone.
    assert shlex.split(line.replace("%%", "%").replace("$$", "$")) == [word]


def test_environment_lines_are_sorted_filled_and_quoted() -> None:
    lines = serving.environment({"B": 'say "hi" $X \\', "A": "{node}", "C": False, "D": 0}, VALUES)
    assert lines == ['A="spark1"', 'B="say \\"hi\\" \\$X \\\\"', 'C="false"', 'D="0"']


def test_environment_means_the_same_to_a_shell(tmp_path: Path) -> None:
    value = 'a "b" `c` $d \\ e'
    file = tmp_path / "env"
    file.write_text("\n".join(serving.environment({"X": value}, {})))
    shown = subprocess.run(["sh", "-c", f'. {file}; printf %s "$X"'], capture_output=True, text=True, check=True)
    assert shown.stdout == value


def test_environment_refuses_bad_names_and_line_breaks() -> None:
    with pytest.raises(ServingError, match="'A-B' is no name"):
        serving.environment({"A-B": "1"}, {})
    with pytest.raises(ServingError, match="A holds a line break"):
        serving.environment({"A": "1\n2"}, {})


# Before a change


def proc_tree(root: Path, *, unit: str) -> Path:
    """A process 42 that holds 0.0.0.0:8000, and one of IPv6 on port 9500 whose owner is not visible."""
    (root / "net").mkdir(parents=True)
    header = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n"
    (root / "net/tcp").write_text(
        header
        + "   0: 00000000:1F40 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 777 1 0 100\n"
        + "   1: 0100007F:1F41 00000000:0000 01 00000000:00000000 00:00000000 00000000     0        0 778 1 0 100\n"
    )
    (root / "net/tcp6").write_text(
        header
        + "   0: 00000000000000000000000001000000:251C 00000000000000000000000000000000:0000 0A"
        + " 00000000:00000000 00:00000000 00000000     0        0 779 1 0 100\n"
    )
    (root / "42/fd").mkdir(parents=True)
    os.symlink("socket:[777]", root / "42/fd/3")
    (root / "42/comm").write_text("nginx\n")
    (root / "42/cgroup").write_text(f"0::/system.slice/{unit}\n")
    return root


def test_listeners_name_address_process_and_unit(tmp_path: Path) -> None:
    found = serving.listeners([8000, 8001, 9500], str(proc_tree(tmp_path, unit="nginx.service")))
    assert [(entry.address, entry.port, entry.pid, entry.command, entry.unit) for entry in found] == [
        ("0.0.0.0", 8000, 42, "nginx", "nginx.service"),
        ("::1", 9500, None, "", ""),
    ]


@pytest.mark.parametrize(
    ("unit", "bad"),
    [
        ("nginx.service", ["port 8000"]),
        ("goodput-worker.service", ["port 8000"]),
        ("system-getty.slice/goodput-frontend.service", []),
        ("goodput-frontend.service", []),
        ("user.slice/user-0.slice/session-1.scope", ["port 8000"]),
    ],
)
def test_a_port_may_only_be_held_by_its_own_unit(tmp_path: Path, unit: str, bad: list[str]) -> None:
    wanted = {8000: {"unit": "goodput-frontend", "variable": "dynamo_http_port"}}
    checks = serving.port_checks(wanted, serving.listeners(wanted, str(proc_tree(tmp_path, unit=unit))))
    assert failed(checks) == bad
    if bad:
        assert "pid 42 (nginx)" in checks[0]["found"] and "dynamo_http_port" in checks[0]["remedy"]


def test_a_port_of_a_pod_is_ours_on_kubernetes() -> None:
    in_pod = serving.unit_of(
        "0::/kubepods.slice/kubepods-besteffort.slice/kubepods-pod1.slice/cri-containerd-2.scope\n"
    )
    assert in_pod == "kubepods" == serving.unit_of("0::/kubepods/besteffort/pod1/2\n")
    wanted = {9090: {"unit": "kubepods", "variable": ""}}
    held = [serving.Listener("0.0.0.0", 9090, 42, "python3", in_pod)]
    assert failed(serving.port_checks(wanted, held)) == []
    foreign = [serving.Listener("0.0.0.0", 9090, 42, "prometheus", "prometheus.service")]
    (check,) = serving.port_checks(wanted, foreign)
    assert not check["ok"] and check["remedy"] == "stop that process"


def test_listeners_sees_a_real_socket() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        found = serving.listeners([port])
    assert [(entry.address, entry.port, entry.pid) for entry in found] == [("127.0.0.1", port, os.getpid())]


def test_mounts_are_found_by_longest_prefix(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self/mountinfo").write_text(
        "1 0 8:1 / / rw - ext4 /dev/vda rw\n"
        "2 1 8:2 / /srv/goodput/l2 rw - xfs /dev/nvme0n1 rw\n"
        "3 1 7:0 / /opt/with\\040space ro - squashfs /dev/loop0 ro\n"
    )
    root = str(tmp_path)
    assert serving.mount_of("/srv/goodput/l2/lmcache", root) == "/srv/goodput/l2"
    assert serving.mount_of("/srv/goodput/l2x", root) == "/"
    assert serving.mount_of("/opt/with space/a", root) == "/opt/with space"
    checks = serving.mount_checks({"/srv/goodput/l2": "a", "/opt/goodput/runtime": "run the role runtime"}, root)
    assert failed(checks) == ["mount /opt/goodput/runtime"]
    assert checks[1]["found"] == "/opt/goodput/runtime lies on /" and checks[1]["remedy"] == "run the role runtime"


def test_space_counts_own_files_as_free(tmp_path: Path) -> None:
    own = tmp_path / "lmcache"
    own.mkdir()
    (own / "x.data").write_bytes(os.urandom(3 * 2**20))
    answer = os.statvfs(tmp_path)
    free_bytes = answer.f_bavail * answer.f_frsize
    # A little room for what others write meanwhile.
    assert serving.space_check(str(tmp_path), str(own), free_bytes - 2**30, "x")["ok"]
    short = serving.space_check(str(tmp_path), str(own), free_bytes + 2**40, "a larger disk")
    assert not short["ok"] and "GiB free" in short["found"] and short["required"].endswith("GiB")


SUPER = "super_kv-fp8_e4m3_ssm-float32_conv-bfloat16_c2128_sep_vllm-0.28.0_lmcache-0.5.6"
NANO = "nano@a1b2_kv-auto_ssm-auto_conv-auto_c1064_fused_vllm-0.28.0_lmcache-0.5.6"


def test_another_arrangements_directory_is_named_and_dropped_only_by_consent(tmp_path: Path) -> None:
    for name in (SUPER, NANO, "aside", "lost+found"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.data").write_bytes(os.urandom(2**20))
    (tmp_path / NANO.replace("nano", "link")).symlink_to(tmp_path / "aside")
    own = str(tmp_path / SUPER)
    assert list(serving.other_l2_bytes(own)) == [NANO] and serving.other_l2_bytes(own)[NANO] >= 2**20
    answer = os.statvfs(tmp_path)
    short = serving.space_check(str(tmp_path), own, answer.f_bavail * answer.f_frsize + 2**40, "a larger disk")
    assert f"other arrangements' directories: {NANO} 0.00 GiB" in short["found"]
    assert f"lmcache_l2_drop_others: [{NANO}]" in short["remedy"] and "or a larger disk" in short["remedy"]
    taken = serving.other_l2_bytes(own)[NANO]
    with_consent = serving.space_check(str(tmp_path), own, 2**62, "a larger disk", [NANO, NANO])
    assert with_consent["remedy"] == "a larger disk" and "lmcache_l2_drop_others gives back" in with_consent["found"]
    assert f"{taken / 2**30:.2f} GiB that" in with_consent["found"]


@pytest.mark.parametrize(
    "name", [SUPER, "", ".", "..", "../etc", f"{NANO}/..", f"/srv/{NANO}", "aside", f"{NANO} x", "*"]
)
def test_consent_names_nothing_but_another_arrangement(name: str) -> None:
    own = f"/srv/goodput/l2/{SUPER}"
    assert failed([serving.drop_check(own, [NANO, name])]) == ["lmcache_l2_drop_others"]
    assert failed([serving.drop_check(own, [NANO])]) == [] == failed([serving.drop_check(own, [])])


def test_missing_packages_are_named() -> None:
    assert serving.missing_packages(["dpkg", "no-such-package-here"]) == ["no-such-package-here"]
    assert serving.missing_packages([]) == []


# What runs


def health() -> Answer:
    return Answer(200, (DATA / "health.json").read_text())


def metrics() -> Answer:
    return Answer(200, (DATA / "frontend_metrics.txt").read_text())


def models(*names: str) -> Answer:
    return Answer(200, json.dumps({"object": "list", "data": [{"id": name} for name in names]}))


def frontend(**changes: Any) -> list[dict[str, Any]]:
    given: dict[str, Any] = {
        "health": health(),
        "models": models("tiny"),
        "metrics": metrics(),
        "model": "tiny",
        "addresses": ["10.77.0.1", "10.77.0.2"],
        "allowed": ["10.77.0.1", "10.77.0.2"],
        "block_size_tokens": 16,
    }
    return serving.frontend_checks(**(given | changes))


def test_instances_are_workers_with_hexadecimal_ids() -> None:
    assert serving.instances(health().json()) == [
        {"id": "7d7ba228ef077809", "address": "10.77.0.1"},
        {"id": "7d7ba228ef077807", "address": "10.77.0.2"},
    ]


def test_a_good_frontend_passes_all_rows() -> None:
    checks = frontend()
    assert failed(checks) == []
    assert [check["check"] for check in checks] == [
        "one worker on each node",
        "model is listed",
        "block size of the router, tokens",
        "workers whose KV events the router receives",
    ]


def test_a_missing_worker_is_named_by_its_node() -> None:
    checks = frontend(
        addresses=["10.77.0.1", "10.77.0.2", "10.77.0.3"], allowed=["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    )
    assert failed(checks) == ["one worker on each node"]
    assert "on 10.77.0.3" in checks[0]["remedy"]


def test_healthy_without_workers_is_a_failure() -> None:
    empty = Answer(200, '{"status":"healthy","endpoints":[],"instances":[]}')
    assert "one worker on each node" in failed(frontend(health=empty))


def test_two_workers_of_one_address_or_a_foreign_one_fail() -> None:
    body = health().json()
    body["instances"].append(dict(body["instances"][0], instance_id=1))
    assert "one worker on each node" in failed(frontend(health=Answer(200, json.dumps(body))))
    assert "one worker on each node" in failed(frontend(addresses=["10.77.0.1"], allowed=["10.77.0.1"]))


def test_a_limited_play_accepts_the_other_nodes_worker() -> None:
    assert failed(frontend(addresses=["10.77.0.1"])) == []


def test_wrong_block_size_absent_series_and_unlisted_model_fail() -> None:
    assert failed(frontend(block_size_tokens=2128)) == ["block size of the router, tokens"]
    assert failed(frontend(metrics=Answer(200, ""))) == ["block size of the router, tokens"]
    assert failed(frontend(models=models("other"))) == ["model is listed"]


def test_a_frontend_that_does_not_answer_is_one_row() -> None:
    checks = frontend(health=Answer(0, "no answer from http://127.0.0.1:8000/health: refused"))
    assert failed(checks) == ["frontend answers"] and "refused" in checks[0]["found"]


def test_get_reports_a_closed_port_and_an_error_status() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    answer = serving.get(f"http://127.0.0.1:{port}/health", 5)
    assert answer.status == 0 and "no answer from" in answer.words()


def test_in_pods_remedies_name_pods() -> None:
    nobody = Answer(0, "no answer")
    asked: dict[str, Any] = {"model": "m", "addresses": ["10.0.0.1"], "allowed": ["10.0.0.1"], "block_size_tokens": 16}
    healthy = Answer(200, '{"instances":[]}')
    for pods, words in ((True, "`kubectl logs` of the pods of"), (False, "`journalctl -u goodput-")):
        for health in (nobody, healthy):
            first = serving.frontend_checks(health, nobody, nobody, **asked, pods=pods)[0]
            assert words in first["remedy"]


def test_worker_health_needs_status_and_endpoint() -> None:
    body = '{"status":"ready","endpoints":{"generate":"ready"}}'
    assert failed(serving.worker_checks(Answer(200, body))) == []
    assert failed(serving.worker_checks(Answer(503, body))) == ["worker is ready"]
    assert failed(serving.worker_checks(Answer(200, '{"endpoints":{"generate":"notready"}}'))) == ["worker is ready"]


def events(good: int, bad: int) -> Answer:
    name = "dynamo_component_kv_cache_events_applied"
    return Answer(
        200,
        f'{name}{{event_type="stored",status="ok",worker_id="a"}} {good}\n'
        f'{name}{{event_type="stored",status="parent_block_not_found",worker_id="a"}} {bad}\n'
        f'{name}{{event_type="removed",status="block_not_found",worker_id="a"}} 9\n',
    )


def test_events_must_grow() -> None:
    assert serving.applied_events(metrics()) == (1, 0)
    assert failed(serving.event_checks(events(1, 5), events(2, 5))) == []
    stuck = serving.event_checks(events(1, 0), events(1, 3))
    assert failed(stuck) == ["KV events of the completion"] and stuck[0]["found"] == "0 applied, 3 not usable"


# What else a router that counts its ingress shows, with KV events off too.
INGRESS = 'dynamo_component_router_active_sequence_zmq_ingress_sources{worker_id="a"} 2\n'


def ingress(good: int, batches: int | None) -> Answer:
    counted = "" if batches is None else f"dynamo_component_router_kv_zmq_ingress_batches_total {batches}\n"
    return Answer(200, events(good, 0).text + INGRESS + counted)


def test_a_guess_of_the_router_is_no_event() -> None:
    assert failed(serving.event_checks(ingress(1, 1), ingress(2, 2))) == []
    for before, after in ((ingress(1, None), ingress(2, None)), (ingress(1, 4), ingress(2, 4))):
        [guess] = serving.event_checks(before, after)
        assert (
            failed([guess]) == ["KV events of the completion"] and "0 batches from workers, 1 applied" in guess["found"]
        )


def test_a_router_that_does_not_listen_is_named() -> None:
    deaf = Answer(200, "\n".join(line for line in metrics().text.splitlines() if "kv_zmq_ingress" not in line) + "\n")
    assert failed(frontend(metrics=deaf)) == []
    [row] = [row for row in frontend(metrics=Answer(200, deaf.text + INGRESS)) if not row["ok"]]
    assert row["check"] == "workers whose KV events the router receives" and "does not listen" in row["found"]


def test_samples_read_labels_with_escapes_and_exponents() -> None:
    found = serving.samples('# HELP x y\na{l="q\\"u",m="2"} 1.5e3\nb 4\nc{} NaN\nbroken\nConnection refused by peer\n')
    assert [(sample.name, sample.labels) for sample in found] == [("a", {"l": 'q\\"u', "m": "2"}), ("b", {}), ("c", {})]
    assert serving.values(found, "a", m="2") == [1500.0] and serving.values(found, "a", m="3") == []


SERVER = [
    *("--instance-id", "spark1", "--host", "10.77.0.1", "--port", "5555", "--http-host", "10.77.0.1"),
    *("--http-port", "9500", "--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--chunk-size", "256"),
    *("--l2-adapter", ADAPTER.replace("{l2_path}", "/srv/goodput/l2/lmcache")),
]


def lmcache(words: list[str], config: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    text = (DATA / "lmcache_config.json").read_text() if config is None else json.dumps(config)
    status = Answer(200, (DATA / "lmcache_status.json").read_text())
    return serving.lmcache_checks(Answer(200, '{"status":"healthy"}'), Answer(200, text), status, words)


def test_lmcache_answers_as_planned() -> None:
    checks = lmcache(SERVER)
    assert failed(checks) == []
    assert "LMCache --l1-size-gb" in [check["check"] for check in checks]


@pytest.mark.parametrize(
    ("flag", "value", "row"),
    [
        ("--l1-size-gb", "0.5", "LMCache --l1-size-gb"),
        ("--chunk-size", "512", "LMCache --chunk-size"),
        ("--eviction-policy", "noop", "LMCache --eviction-policy"),
        ("--l2-adapter", ADAPTER.replace("{l2_path}", "/tmp/elsewhere"), "LMCache L2 adapter 0"),
        # An adapter key that the server does not know is dropped there without a word.
        (
            "--l2-adapter",
            '{"type":"fs_native","base_path":"/srv/goodput/l2/lmcache","capacity":2}',
            "LMCache L2 adapter 0",
        ),
    ],
)
def test_lmcache_that_differs_from_the_plan_is_found(flag: str, value: str, row: str) -> None:
    words = list(SERVER)
    words[words.index(flag) + 1] = value
    assert failed(lmcache(words)) == [row]


def test_a_capacity_without_eviction_is_found() -> None:
    config = json.loads((DATA / "lmcache_config.json").read_text())
    config["storage_manager"]["l2_adapter_config"]["adapters"][0]["eviction_config"] = None
    assert failed(lmcache(SERVER, config)) == ["LMCache L2 adapter 0 evicts"]


def test_lmcache_without_its_adapter_is_found() -> None:
    config = json.loads((DATA / "lmcache_config.json").read_text())
    config["storage_manager"]["l2_adapter_config"]["adapters"] = []
    assert failed(lmcache(SERVER, config)) == ["LMCache L2 adapters"]


def test_lmcache_that_is_not_up_is_said() -> None:
    down = Answer(0, "no answer from http://10.77.0.1:9500/config: refused")
    checks = serving.lmcache_checks(down, down, down, SERVER)
    assert failed(checks) == ["LMCache is healthy", "LMCache's configuration"]


def test_a_unit_runs_the_planned_arguments() -> None:
    good = {"ActiveState": "active", "UnitFileState": "enabled"}
    running = ["/usr/bin/python3", "-m", "dynamo.mocker", "--block-size", "16"]
    assert failed(serving.unit_checks("u", good, running, ["--block-size", "16"])) == []
    assert failed(serving.unit_checks("u", good, running, ["--block-size", "32"])) == ["u runs the planned arguments"]
    assert failed(serving.unit_checks("u", {"ActiveState": "failed", "UnitFileState": "disabled"}, [], ["x"])) == [
        "u runs",
        "u starts at boot",
    ]


def test_a_unit_that_was_given_up_is_named_as_such() -> None:
    # As systemd leaves it after a loop of crashes: the result is the last start's, not the limit's.
    gone = {"ActiveState": "failed", "Result": "exit-code", "UnitFileState": "enabled"}
    assert serving.given_up(gone) and not serving.given_up(gone | {"ActiveState": "activating"})
    [row] = [row for row in serving.unit_checks("goodput-worker", gone, [], []) if not row["ok"]]
    assert "given up" in row["remedy"] and "`systemctl reset-failed goodput-worker`" in row["remedy"]
    assert serving_probe.CrashLoops().seen({"goodput-worker": gone | {"NRestarts": "100"}})
    assert not serving_probe.CrashLoops().seen({"goodput-worker": gone | {"ActiveState": "activating"}})


def test_a_remedy_says_what_may_be_deleted() -> None:
    down = {"ActiveState": "activating", "UnitFileState": "enabled"}
    [etcd] = [row for row in serving.unit_checks("goodput-etcd", down, [], []) if not row["ok"]]
    assert etcd["remedy"].startswith("read `journalctl -u goodput-etcd`; if it can not read its data, delete /var/lib/")
    [other] = [row for row in serving.unit_checks("goodput-worker", down, [], []) if not row["ok"]]
    assert other["remedy"] == "read `journalctl -u goodput-worker`"


def test_a_variable_that_steers_the_cache_must_be_planned() -> None:
    good = {"ActiveState": "active", "UnitFileState": "enabled"}
    planned = {"UCX_NET_DEVICES": "rocep1s0f0:1", "LMCACHE_TRACK_USAGE": "false", "DYN_SYSTEM_HOST": "10.77.0.1"}
    # Neither what systemd adds nor the owner's password is judged.
    given = planned | {"HOME": "/", "LMCACHE_RESP_PASSWORD": "secret", "MCELOG": "1", "DYN_LOG": "info"}
    rows = serving.unit_checks("u", good, ["x"], ["x"], given, planned)
    assert failed(rows) == [] and rows[-1]["check"] == "u has the planned environment"
    for change in (
        {"MC_FORCE_TCP": "1"},
        {"UCX_NET_DEVICES": "all"},
        {"DYN_ROUTER_USE_KV_EVENTS": "false"},
        {"DYN_SYSTEM_HOST": "x"},
    ):
        rows = serving.unit_checks("u", good, ["x"], ["x"], given | change, planned)
        assert failed(rows) == ["u has the planned environment"]
        assert rows[-1]["found"] == str(change) and "systemctl cat u" in rows[-1]["remedy"]
    del given["LMCACHE_TRACK_USAGE"]
    [row] = [row for row in serving.unit_checks("u", good, ["x"], ["x"], given, planned) if not row["ok"]]
    assert row["found"] == "{'LMCACHE_TRACK_USAGE': 'not set'}" and "false" in row["required"]
    assert "secret" not in str(row)
    assert failed(serving.unit_checks("u", good, ["x"], ["x"], {"MC_FORCE_TCP": "1"})) == []


def test_environment_of_a_real_process() -> None:
    given = {"UCX_TLS": "rc=x", "A": ""}
    with subprocess.Popen(["/bin/cat"], env=given, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as child:
        assert child.stdin and child.stdout
        # Its answer: by then it runs.
        child.stdin.write(b"x")
        child.stdout.read(1)
        found = serving.process_environment(str(child.pid))
        child.stdin.close()
    assert found == given == serving.variables("UCX_TLS=rc=x\nA=\n", "\n")
    assert serving.process_environment("0") == {}


def test_command_line_of_a_real_process() -> None:
    assert serving.command_line(str(os.getpid()))[1:] == sys.orig_argv[1:]
    assert serving.command_line("0") == []


def test_dropped_events_in_a_log_fail() -> None:
    assert failed(serving.unpublished_checks([])) == []
    checks = serving.unpublished_checks(["spark1 python3: WARN Block not published. Block size must be 16"])
    assert failed(checks) == ["log lines with 'Block not published'"]
    assert serving.journal(["", ""], "x") == []


def test_show_keeps_the_order_of_systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "systemctl"
    tool.write_text("#!/bin/sh\nprintf 'ActiveState=active\\nMainPID=7\\n\\nActiveState=inactive\\nMainPID=0\\n'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    states = serving.show(["a", "b", "c"])
    assert states == {
        "a": {"ActiveState": "active", "MainPID": "7"},
        "b": {"ActiveState": "inactive", "MainPID": "0"},
        "c": {},
    }
    assert [serving.runs(state) for state in states.values()] == [True, False, False]
    assert serving.show([]) == {}


def test_reason_joins_only_failures() -> None:
    rows = [serving.row("a", 1, 1, "x"), serving.row("b", 1, 2, "do y")]
    assert serving.reason(rows) == "b: found 1; required 2; fix: do y"


L2_WORDS = ["--l1-size-gb", "2", "--l2-adapter", '{"type":"fs_native","max_capacity_gb":400,"num_workers":4}']


def test_the_capacity_of_l2_is_a_variable_of_the_unit_and_nothing_else_is() -> None:
    line = serving.l2_exec_line([*L2_WORDS, "cost $5"], "GIB")
    assert line.endswith("""'{"type":"fs_native","max_capacity_gb":${GIB},"num_workers":4}' 'cost $$5'""")
    elsewhere = ["--l2-adapter", '{"type":"resp","max_capacity_gb":400}']
    assert "$" not in serving.l2_exec_line(elsewhere, "GIB")


def test_what_runs_is_the_plan_less_what_was_there() -> None:
    running = serving.running_words(L2_WORDS, {"planned_gib": 400.0, "capacity_gib": 80.5})
    assert running == [*L2_WORDS[:3], L2_WORDS[3].replace("400", "80.5")]
    assert serving.running_words(L2_WORDS, {}) == L2_WORDS
    # A report of another plan says nothing about this one.
    assert serving.running_words(L2_WORDS, {"planned_gib": 100.0, "capacity_gib": 80.5}) == L2_WORDS
