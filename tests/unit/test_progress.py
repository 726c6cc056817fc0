"""Events folded into layers, failures and seconds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from goodput.progress import Run, Timings, explain


class Script:
    """Feeds a Run the way ansible-runner does; every event comes one second after the one before."""

    def __init__(self, **options: Any) -> None:
        self.run = Run(**options)
        self.second = 0

    def event(self, kind: str, **data: Any) -> Script:
        created = f"2026-01-01T00:{self.second // 60:02d}:{self.second % 60:02d}+00:00"
        self.run.feed({"event": kind, "created": created, "pid": 42, "event_data": data})
        self.second += 1
        return self

    def task(self, name: str, role: str = "goodput.spark.rdma", **hosts: str | dict[str, Any]) -> Script:
        self.event("playbook_on_task_start", task=name, role=role, task_path=f"/r/{name}.yml:1")
        for host in hosts:
            self.event("runner_on_start", host=host)
        for host, outcome in hosts.items():
            result = outcome if isinstance(outcome, dict) else {}
            kind = "ok" if not isinstance(outcome, str) else outcome
            self.event(f"runner_on_{kind}", host=host, res=result, duration=0.5)
        return self

    def fail(self, name: str, host: str, message: str, kind: str = "failed", **data: Any) -> Script:
        self.event("playbook_on_task_start", task=name, role="goodput.spark.rdma", task_path="/r/x.yml:7")
        return self.event(f"runner_on_{kind}", host=host, res={"msg": message}, **data)

    def stats(self, **numbers: dict[str, int]) -> Run:
        self.event("playbook_on_stats", **numbers)
        return self.run


def test_layers_are_roles_and_seconds_add_up() -> None:
    script = Script().task("a", "goodput.spark.host", spark1={}).task("b", "rdma", spark1={"changed": True}, spark2={})
    run = script.stats(changed={"spark1": 1})
    assert {name: layer.seconds for name, layer in run.layers.items()} == {"host": 3.0, "rdma": 5.0}
    assert run.seconds == 8.0
    assert run.layers["rdma"].nodes["spark1"].changed == 1
    assert run.changed == {"spark1": 1, "spark2": 0}
    assert run.figures() == {
        "tasks": 2,
        "task_hosts": 3,
        "seconds": 8.0,
        "seconds_per_task": 4.0,
        "seconds_per_task_and_host": 2.667,
    }


def test_a_helper_role_counts_for_its_caller() -> None:
    run = Script().task("a", "goodput.spark.lmcache", n={}).task("w", "goodput.spark._common", n={}).stats()
    assert list(run.layers) == ["lmcache"]


def test_a_play_without_roles_and_one_split_by_task_file() -> None:
    plain = Script()
    plain.event("playbook_on_play_start", play="Bench").task("x", "", n={})
    assert list(plain.stats().layers) == ["Bench"]
    split = Script(stages={"install": "image"}).task("Validate", "virtual_pair", localhost={})
    split.task("install | Build", "virtual_pair", localhost={}).task("boot | Start", "virtual_pair", localhost={})
    assert list(split.stats().layers) == ["virtual_pair", "image", "boot"]


def test_wanted_keys_of_results_are_kept() -> None:
    script = Script(keep=("guests",)).task("a", n={"guests": 1}).task("b", n={"msg": {"guests": 2}})
    assert script.stats().to_dict()["guests"] == 2


def test_status_of_nodes_while_running_and_after() -> None:
    script = Script()
    script.event("playbook_on_task_start", task="a", role="rdma").event("runner_on_start", host="spark1")
    assert script.run.layers["rdma"].status == "running"
    script.event("runner_on_ok", host="spark1", res={})
    script.event("playbook_on_task_start", task="b", role="host")
    assert script.run.layers["rdma"].status == "ok"


def test_an_interrupted_run_leaves_its_nodes_stopped() -> None:
    script = Script()
    script.event("playbook_on_task_start", task="a", role="rdma").event("runner_on_start", host="spark1")
    script.run.interrupted(script.run.tasks[0].started + 9)
    assert script.run.layers["rdma"].status == "stopped"
    assert script.run.seconds == 9
    assert script.run.pid == 42


def test_skipped_tasks_do_not_count_as_work() -> None:
    run = Script().task("a", spark1="skipped").stats()
    assert run.figures()["tasks"] == 0


def test_only_hosts_that_ended_failed_are_failures() -> None:
    run = Script().fail("a", "spark1", "rescued").task("b", spark1={}).stats(failures={})
    assert run.failures == []


def test_the_last_failure_of_a_host_is_its_cause() -> None:
    script = Script().fail("apply", "spark1", "lost connection", kind="unreachable")
    run = script.fail("say why", "spark1", "rail 1 lost; restored").stats(failures={"spark1": 1})
    assert [failure.lines for failure in run.failures] == [("rail 1 lost; restored",)]
    assert run.earlier("spark1")[0].task == "apply"
    assert run.failures[0].path == "/r/x.yml:7"


def test_an_ignored_error_is_no_failure() -> None:
    run = Script().fail("a", "spark1", "no", ignore_errors=True).stats()
    assert run.failures == []
    assert run.layers["rdma"].nodes["spark1"].failed == 0


def test_without_statistics_every_failure_counts() -> None:
    assert [f.host for f in Script().fail("a", "spark1", "no").run.failures] == ["spark1"]


@pytest.mark.parametrize(
    "result",
    [
        {"goodput_show": "text"},
        {"msg": {"goodput_show": ["text"]}},
        {"ansible_facts": {"goodput_show": "text"}},
    ],
)
def test_a_text_to_show_is_taken_from_result_message_or_facts(result: dict[str, Any]) -> None:
    run = Script().task("show", spark1=result, spark2=result).stats()
    assert run.shows == ["text"]


@pytest.mark.parametrize(
    ("result", "lines"),
    [
        ({"msg": "Task failed: Action failed: found: 1\nrequired: 2"}, ["found: 1", "required: 2"]),
        ({"msg": ["found 1", "required 2"]}, ["found 1", "required 2"]),
        ({"censored": "hidden", "msg": "secret"}, ["the output is hidden because the task handles a secret (no_log)"]),
        (
            {"msg": "non-zero return code", "cmd": ["mkfs", "-t"], "rc": 3, "stderr": "bad disk", "stdout": "x"},
            ["non-zero return code", "command: mkfs -t", "exit: 3", "bad disk"],
        ),
        (
            {
                "msg": "One or more items failed",
                "results": [{"item": "a"}, {"item": "b", "failed": True, "msg": "no\nfix it"}],
            },
            ["b: no", "fix it"],
        ),
        ({}, ["the task failed without a message; the full log has its result"]),
    ],
)
def test_explain_gives_the_words_a_person_needs(result: dict[str, Any], lines: list[str]) -> None:
    assert explain(result) == lines


def test_explain_keeps_only_the_end_of_a_long_output() -> None:
    lines = explain({"msg": "MODULE FAILURE", "module_stderr": "\n".join(map(str, range(100)))})
    assert lines[-1] == "99"
    assert len(lines) < 20


def test_timings_are_learnt_per_key_and_survive_damage(tmp_path: Path) -> None:
    timings = Timings(tmp_path / "deep/timings.json")
    assert timings.expected("site@pair") == {}
    timings.learn("site@pair", Script().task("a", "rdma", n={}).stats())
    timings.learn("site@virtual", Script().task("a", "host", n={}).stats())
    assert timings.expected("site@pair") == {"rdma": 3.0}
    timings.path.write_text("{broken")
    assert timings.expected("site@pair") == {}
