"""The root shell that stays open: framing, time-outs, sudo."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from goodput.inventory import Node, load
from goodput.session import CommandTimeout, NodeHost, Session, Unreachable


@pytest.fixture
def session() -> Iterator[Session]:
    session = Session(Node("here", {}, become=False))
    yield session
    session.close()


def test_streams_and_status_are_kept_apart(session: Session) -> None:
    first, second, third = session.run_many(["printf a; printf b >&2; exit 7", "printf 'no newline'", "echo ü"])
    assert (first.rc, first.stdout, first.stderr) == (7, "a", "b")
    assert (second.rc, second.stdout, second.stderr) == (0, "no newline", "")
    assert third.stdout == "ü\n"


def test_output_larger_than_every_pipe_on_both_streams(session: Session) -> None:
    big = "head -c 300000 /dev/zero | tr '\\0' x; head -c 300000 /dev/zero | tr '\\0' y >&2"
    results = session.run_many([big, big, "echo end"])
    assert [len(result.stdout) for result in results] == [300000, 300000, 4]
    assert set(results[1].stderr) == {"y"}


def test_many_commands_at_once(session: Session) -> None:
    commands = [f"echo {'z' * 2000} {number}" for number in range(200)]
    assert [int(r.stdout.split()[1]) for r in session.run_many(commands)] == list(range(200))


def test_quotes_reach_the_command_as_written(session: Session) -> None:
    assert session.run("""printf '%s' "it's $((1 + 1))" """).stdout == "it's 2"


def test_a_command_can_not_read_the_shells_input(session: Session) -> None:
    assert [result.stdout for result in session.run_many(["cat", "echo next"])] == ["", "next\n"]


def test_a_command_that_hangs_ends_and_the_session_recovers(session: Session) -> None:
    with pytest.raises(CommandTimeout):
        session.run("sleep 60", timeout_s=0.3)
    assert session.run("echo again").stdout == "again\n"


def test_a_lost_shell_is_opened_again_once(session: Session) -> None:
    before = session.run("echo $PPID").stdout.strip()
    os.kill(int(before), 9)
    assert session.run("echo back").stdout == "back\n"


def test_a_shell_that_never_opens_names_node_and_cause() -> None:
    node = Node("spark9", {"ansible_host": "192.0.2.9"}, ("sh", "-c", "echo 'no route' >&2; exit 255"))
    with pytest.raises(Unreachable, match=r"spark9 \(192\.0\.2\.9\): no route"):
        Session(node).open()


SUDO = """#!/bin/sh
case "$1" in
  -n) exit 1;;
  -S) read -r given; [ "$given" = secret ] || { echo 'sudo: 1 incorrect password attempt' >&2; exit 1; }
      shift 3; exec "$@";;
esac
"""


@pytest.fixture
def asks_for_password(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("sudo", SUDO), ("id", "#!/bin/sh\necho 1000\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


@pytest.mark.usefixtures("asks_for_password")
def test_sudo_gets_its_password() -> None:
    session = Session(Node("here", {}, become_password="secret"))
    assert session.run("echo in").stdout == "in\n"
    session.close()


@pytest.mark.usefixtures("asks_for_password")
def test_a_missing_or_wrong_sudo_password_is_named() -> None:
    with pytest.raises(Unreachable, match="here: sudo asks for a password and none is set"):
        Session(Node("here", {})).open()
    with pytest.raises(Unreachable, match="incorrect password"):
        Session(Node("here", {}, become_password="wrong")).open()


def test_batch_remembers_answers_unless_asked_afresh(session: Session, tmp_path: Path) -> None:
    counter = f"echo x >>{tmp_path}/count; wc -l <{tmp_path}/count"
    host = NodeHost(session)
    assert [host.batch({"n": counter})["n"].stdout.strip() for _ in range(2)] == ["1", "1"]
    assert host.batch({"n": counter}, fresh=True)["n"].stdout.strip() == "2"


def test_testinfra_modules_work_on_the_session(session: Session, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    host = NodeHost(session)
    assert host.file(str(tmp_path / "file")).content_string == "text"
    assert host.run("exit %s", "4").rc == 4


def test_inventory_keeps_order_and_resolves_templates(tmp_path: Path) -> None:
    (tmp_path / "hosts.yml").write_text(
        """
sparks:
  vars:
    ansible_ssh_common_args: "-o UserKnownHostsFile={{ inventory_dir }}/known"
    ansible_user: spark
    broken: "{{ nowhere.at.all }}"
  hosts:
    spark2: {ansible_host: 192.0.2.12, ansible_port: 2202}
    spark1: {ansible_host: 192.0.2.11, ansible_ssh_private_key_file: /key, ansible_become_password: pw}
"""
    )
    second, first = load(tmp_path / "hosts.yml")
    assert (second.name, first.name) == ("spark2", "spark1")
    assert first.command[0] == "ssh"
    assert first.command[-1] == "192.0.2.11"
    for option in (f"UserKnownHostsFile={tmp_path}/known", 'User="spark"', 'IdentityFile="/key"', "BatchMode=yes"):
        assert option in first.command
    assert 'Port="2202"' in second.command
    assert (first.become_password, second.become_password) == ("pw", None)
    assert "pw" not in repr(first)
    assert first.interactive[0] == "ssh"
    assert "BatchMode=yes" not in first.interactive
    assert first.interactive[-1] == "192.0.2.11"


@pytest.mark.parametrize(
    ("platform", "chosen", "address"),
    [
        ("systemd", "192.0.2.7", "10.77.0.1"),
        ("k3s", "", "10.77.0.1"),
        ("k3s", "192.0.2.7", "192.0.2.7"),
    ],
)
def test_a_worker_is_where_its_platform_has_it(platform: str, chosen: str, address: str) -> None:
    own = {"goodput_platform": platform, "k3s_node_ip": chosen, "goodput_management_address": "10.77.0.1"}
    assert Node("spark1", own).serving_address == address
