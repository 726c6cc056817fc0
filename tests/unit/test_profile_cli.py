"""goodput profile: the list, and where a choice is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from plays import ROOT, run_playbook
from typer.testing import CliRunner

from goodput import cli, profile_cli
from goodput.progress import Run
from goodput.runner import Outcome, Request

HOSTS = {"sparks": {"hosts": {"a": {"ansible_connection": "local"}}}}


@pytest.fixture
def inventory(tmp_path: Path) -> Path:
    folder = tmp_path / "lab"
    folder.mkdir()
    (folder / "hosts.yml").write_text(yaml.safe_dump(HOSTS))
    return folder


def test_the_list_marks_what_the_inventory_names(inventory: Path) -> None:
    choice = profile_cli.choice_file(inventory)
    choice.parent.mkdir(parents=True)
    choice.write_text("goodput_profile: super-recommended\n")
    answer = CliRunner().invoke(cli.app, ["profile", "list", "-i", str(inventory)])
    assert answer.exit_code == 0
    [marked] = [line for line in answer.stdout.splitlines() if line.startswith("*")]
    assert marked.split()[1:4] == ["super-recommended", "vllm", "super"]


def test_the_choice_lies_beside_an_inventory_file_as_beside_its_folder(inventory: Path) -> None:
    assert profile_cli.choice_file(inventory) == profile_cli.choice_file(inventory / "hosts.yml")


def test_the_choice_wins_over_the_other_files_of_the_group(inventory: Path) -> None:
    choice = profile_cli.choice_file(inventory)
    choice.parent.mkdir(parents=True)
    (choice.parent / "main.yml").write_text("goodput_profile: virtual\n")
    # Seen by the process that writes it, too.
    assert profile_cli.configured(inventory) == "virtual"
    choice.write_text("goodput_profile: super-recommended\n")
    assert profile_cli.configured(inventory) == "super-recommended"


def test_a_file_that_the_choice_would_hide_is_refused(inventory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ansible reads group_vars/sparks/ or group_vars/sparks.yml, never both."""
    monkeypatch.setattr(cli, "execute", lambda *_, **__: pytest.fail("a play was started"))
    folder = profile_cli.choice_file(inventory).parent
    folder.parent.mkdir()
    hidden = folder.with_suffix(".yml")
    hidden.write_text("goodput_profile: virtual\n")
    answer = CliRunner().invoke(cli.app, ["profile", "use", "virtual", "-i", str(inventory)])
    assert answer.exit_code == 2 and str(hidden.name) in answer.stderr and "mkdir" in answer.stderr
    assert not folder.exists() and hidden.read_text() == "goodput_profile: virtual\n"


def test_an_unknown_profile_is_refused_with_the_nearest_name(inventory: Path) -> None:
    answer = CliRunner().invoke(cli.app, ["profile", "use", "super-recomended", "-i", str(inventory)])
    assert answer.exit_code == 2 and "super-recommended" in answer.stderr


@pytest.mark.parametrize(("exit_code", "kept"), [(0, True), (1, False)])
def test_a_choice_is_kept_only_after_a_good_switch(
    inventory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exit_code: int, kept: bool
) -> None:
    asked: list[Request] = []

    def execute(request: Request, *_: object, **__: object) -> Outcome:
        asked.append(request)
        return Outcome(Run(), exit_code, tmp_path, 1.0)

    monkeypatch.setattr(cli, "execute", execute)
    answer = CliRunner().invoke(cli.app, ["profile", "use", "virtual", "-i", str(inventory), "--json"])
    assert answer.exit_code == exit_code
    assert json.loads(asked[0].extra_vars[-1]) == {"goodput_profile": "virtual"}
    assert profile_cli.choice_file(inventory).exists() == kept


def test_a_switch_passes_the_power_gate_and_drains_before_serving_is_touched() -> None:
    """After a reboot the verdict would refuse a node that nobody judged, with the new profile running already."""
    site = ROOT / "site.yml"
    listed = run_playbook(ROOT / "inventory/pair", site, "--list-tasks", "--tags", profile_cli.TAGS).stdout
    gate, drain, cache_server = (
        listed.find(words) for words in ("Judge power and", "Stop admitting", "lmcache : Claim")
    )
    assert -1 < listed.find("rdma : proof") < gate
    # The former worker is gone before LMCache gets another layout, or more memory.
    # What LMCache refuses is refused while the site still serves.
    assert -1 < gate < listed.find("lmcache : preflight") < drain
    assert drain < listed.find("Stop a worker that changes") < cache_server
    assert cache_server < listed.find("verify | Run the acceptance suite")
