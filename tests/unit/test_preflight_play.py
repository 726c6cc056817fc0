"""The preflight play itself, against nodes that do not answer."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from plays import run_playbook

ROOT = Path(__file__).resolve().parents[2]


def play(
    tmp_path: Path, hosts: dict[str, dict[str, object]], *arguments: str, playbook: str = "playbooks/preflight.yml"
) -> tuple[int, str]:
    """Exit status and output of preflight. Port 1 of the loopback address refuses every connection."""
    inventory = tmp_path / "hosts.yml"
    common = {"ansible_port": 1, "ansible_user": "nobody", "ansible_ssh_common_args": "-o BatchMode=yes"}
    inventory.write_text(yaml.safe_dump({"sparks": {"hosts": hosts, "vars": common}}))
    result = run_playbook(inventory, ROOT / playbook, *arguments)
    return result.returncode, result.stdout + result.stderr


def test_bad_inputs_are_all_refused_before_any_connection(tmp_path: Path) -> None:
    status, output = play(
        tmp_path,
        {
            "spark1": {"ansible_host": "127.0.0.1", "goodput_management_address": "10.0.0.1", "host_swapiness": 10},
            "spark_2": {"ansible_host": "127.0.0.2", "goodput_management_address": "10.0.0.1", "host_swappiness": "10"},
        },
        "-e",
        "goodput_release=curent",
    )
    assert status != 0
    assert "did you mean host_swappiness?" in output
    assert 'inventory name "spark_2"' in output
    assert 'host_swappiness: "10"' in output
    assert "set goodput_release to current" in output
    assert "equal management address" in " ".join(output.split())
    assert "Look at every node" not in output
    assert "Connection refused" not in output


@pytest.mark.parametrize("limit", ["", "spark2"])
def test_every_node_that_does_not_answer_is_in_the_table(tmp_path: Path, limit: str) -> None:
    status, output = play(
        tmp_path,
        {
            "spark1": {"ansible_host": "127.0.0.1", "goodput_management_address": "10.0.0.1"},
            "spark2": {"ansible_host": "127.0.0.2", "goodput_management_address": "10.0.0.2"},
        },
        "-e",
        '{"preflight_profile": ""}',
        *(["--limit", limit] if limit else []),
    )
    table = output[output.index("preflight: ") : output.index("Origin: ")]
    assert status != 0
    assert table.count("✗ ssh") == (1 if limit else 2)
    assert ("not-looked-at" in table) == bool(limit)


def test_an_untouched_pair_is_told_at_once_what_else_it_needs(tmp_path: Path) -> None:
    """Not layer by layer, with the layers before it changed already; a run of one layer needs none of it."""
    hosts: dict[str, dict[str, object]] = {
        "spark1": {"ansible_host": "127.0.0.1", "goodput_management_address": "10.0.0.1"}
    }
    _status, output = play(tmp_path, hosts, playbook="site.yml")
    for check in ("profile", "model", "runtime", "ssh"):
        assert f"✗ {check}" in output
    _status, output = play(tmp_path, hosts, "-e", '{"preflight_accept": ["runtime"]}', playbook="site.yml")
    assert "! runtime" in output
    # On Kubernetes the image takes the archive's place.
    _status, output = play(tmp_path, hosts, "-e", "goodput_platform=k3s", playbook="site.yml")
    assert "✗ digest" in output and "✗ runtime" not in output
    for arguments, playbook in (((), "playbooks/preflight.yml"), (("--tags", "preflight"), "site.yml")):
        _status, output = play(tmp_path, hosts, *arguments, playbook=playbook)
        assert "✗ ssh" in output and "✗ runtime" not in output
