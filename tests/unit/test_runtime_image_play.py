"""The role runtime_image on clean hosts: a dry run goes through with a good archive and is refused with another one."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import oci
import pytest
import yaml
from plays import run_playbook

ROLE = Path(__file__).resolve().parents[2] / "roles/runtime_image"
NAME = "goodput.local/dynamo-vllm-lmcache"
RAILS = ["rocep1s0f0", "roceP2p1s0f0"]


def dry(folder: Path, digest: str, archive: str, **extra: object) -> subprocess.CompletedProcess[str]:
    hosts = {f"spark{n}": {"goodput_rails": {"state": "ok", "rails": []}} for n in (1, 2)}
    variables = {
        "ansible_connection": "local",
        "ansible_become": False,
        "goodput_kube_choices": {"digests": {"runtime": digest}},
        "runtime_image_archive": archive,
        "runtime_image_devices": ["rocep1s0f0"],
        "runtime_image_unpacked_gib": 0,
        "runtime_image_gc_high_percent": 101,
        "runtime_image_directory": str(folder / "images"),
        **extra,
    }
    inventory = {"sparks": {"hosts": hosts, "vars": variables}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    play = {
        "hosts": "sparks",
        "gather_facts": False,
        "any_errors_fatal": True,
        "vars_files": ["{{ root }}/vars/site.yml", "{{ root }}/vars/releases/current.yml"],
        "roles": [{"role": "goodput.spark.runtime_image"}],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    root = Path(__file__).resolve().parents[2]
    return run_playbook(folder / "hosts.yml", folder / "play.yml", "--check", "-e", f"root={root}")


@pytest.fixture
def archive(tmp_path: Path) -> tuple[str, str]:
    path = tmp_path / "dynamo.tar"
    return str(path), oci.write(path, "arm64")[0]


def test_a_dry_run_on_clean_hosts_passes(tmp_path: Path, archive: tuple[str, str]) -> None:
    path, digest = archive
    done = dry(tmp_path, digest, path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    assert "Copy the archive from the controller" in done.stdout and done.stdout.count("failed=0") == 2
    assert not (tmp_path / "images").exists()


def test_a_second_node_fetches_over_the_rails(tmp_path: Path, archive: tuple[str, str]) -> None:
    """Both hosts are this machine, whose loopback stands for the rail."""
    path, digest = archive
    done = dry(tmp_path, digest, path, runtime_image_copy_subnets=["127.0.0.0/8"])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    tasks = dict(
        re.findall(r"TASK \[goodput.spark.runtime_image : install \| ([^\]]+)\].*\n((?:\w+: \[.*\n)*)", done.stdout)
    )
    assert "changed: [spark1]" in tasks["Copy the archive from the controller"]
    assert "skipping: [spark2]" in tasks["Copy the archive from the controller"]
    assert "skipping: [spark1]" in tasks["Fetch over the rail"] and "changed: [spark2]" in tasks["Fetch over the rail"]


def test_a_node_that_has_the_archive_shares_it(tmp_path: Path, archive: tuple[str, str]) -> None:
    """Built on the first node: it needs no copy, and the second one fetches; without a common rail there is no way."""
    path, digest = archive
    own = tmp_path / "own/runtime-image"
    own.mkdir(parents=True)
    Path(path).rename(own / "image.tar")
    directory = f"{{{{ (inventory_hostname == 'spark1') | ternary('{tmp_path}/own', '{tmp_path}/images') }}}}"
    done = dry(tmp_path, digest, "", runtime_image_directory=directory, runtime_image_copy_subnets=["127.0.0.0/8"])
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    fetch = done.stdout.partition("Fetch over the rail")[2].partition("TASK")[0]
    assert "skipping: [spark1]" in fetch and "changed: [spark2]" in fetch
    assert (own / "image.tar").exists()
    done = dry(tmp_path, digest, "", runtime_image_directory=directory)
    assert "found the archive on spark1 and no common rail with spark2" in " ".join(done.stdout.split())


def test_another_archive_and_none_are_refused_before_anything_is_copied(
    tmp_path: Path, archive: tuple[str, str]
) -> None:
    path, digest = archive
    other = f"sha256:{'1' * 64}"
    done = dry(tmp_path, other, path)
    assert done.returncode != 0 and f"with {digest} (linux/arm64); required: {other}" in " ".join(done.stdout.split())
    done = dry(tmp_path, digest, "")
    said = " ".join(done.stdout.split())
    assert f"found no archive of {digest}, and no such image on spark1, spark2" in said
    assert "Copy the archive" not in done.stdout


def verified(folder: Path, present: tuple[bool, bool] = (True, True), **extra: object) -> list[dict[str, Any]]:
    """What verify.yml asks the cluster, by which nodes had the image: its own tasks, which write it down instead."""
    folder.mkdir(exist_ok=True)
    tasks = yaml.safe_load((ROLE / "tasks/verify.yml").read_text())
    asking = [task for task in tasks if "goodput.spark.k3s_cluster" in task]
    for index, task in enumerate(asking):
        task["vars"] = {**task.get("vars", {}), "asked": task.pop("goodput.spark.k3s_cluster")}
        task["ansible.builtin.copy"] = {"content": "{{ asked | to_json }}", "dest": f"{folder}/asked{index}.json"}
        task.pop("delegate_to")
    hosts = {f"spark{n}": {"__runtime_image_look": {"present": present[n - 1]}} for n in (1, 2)}
    inventory = {"sparks": {"hosts": hosts, "vars": {"ansible_connection": "local"}}}
    (folder / "hosts.yml").write_text(yaml.safe_dump(inventory))
    root = ROLE.parents[1]
    play = {
        "hosts": "sparks",
        "gather_facts": False,
        "vars_files": [
            str(root / "vars/releases/current.yml"),
            str(ROLE / "defaults/main.yml"),
            str(ROLE / "vars/main.yml"),
        ],
        "vars": {
            "goodput_kube_choices": {"digests": {"runtime": f"sha256:{'1' * 64}"}},
        },
        "tasks": asking,
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    done = run_playbook(
        folder / "hosts.yml", folder / "play.yml", "-e", json.dumps({"runtime_image_devices": RAILS} | extra)
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(path.read_text()) for path in sorted(folder.glob("asked*.json"))]


def test_the_rails_are_opened_where_the_image_is_new_or_a_person_asks(tmp_path: Path) -> None:
    """What serves may hold every share of the rails, and a pod in each run would then wait until it fails."""
    both = {"rdma/rail0": ">0", "rdma/rail1": ">0"}
    assert verified(tmp_path / "second") == []
    inside, opened = verified(tmp_path / "new", (True, False))
    assert inside["nodes"] == opened["nodes"] == {"spark2": both} and inside["devices"] == RAILS
    assert opened["state"] == "probed" and "versions" not in opened and opened["image"] == f"{NAME}@sha256:{'1' * 64}"
    (again,) = verified(tmp_path / "again", runtime_image_probe_again=True)
    assert again["nodes"] == {"spark1": both, "spark2": both} and "versions" not in again
    # One node alone has none, and for the simulated engine no plugin offers any.
    none: list[dict[str, object]] = [{"runtime_image_devices": []}, {"goodput_engine": "mocker"}]
    for number, extra in enumerate(none):
        (inside,) = verified(tmp_path / str(number), (False, False), runtime_image_probe_again=True, **extra)
        assert inside["nodes"] == {"spark1": {}, "spark2": {}} and inside["devices"] == []


def test_a_disk_without_room_is_refused_with_its_numbers(tmp_path: Path, archive: tuple[str, str]) -> None:
    path, digest = archive
    done = dry(tmp_path, digest, path, runtime_image_unpacked_gib=10_000_000)
    said = " ".join(done.stdout.split())
    assert "spark1: found" in said and "spark2: found" in said and "unpacked 10000000.0" in said
