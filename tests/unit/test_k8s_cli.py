"""goodput k8s render: files for review or GitOps, refusals, and the filter beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.filter.kube import FilterModule
from kube_pods import DIGESTS, one, release, site
from typer.testing import CliRunner, Result

from goodput import cli

DIGEST = [word for name, value in DIGESTS.items() for word in ("--digest", f"{name}={value}")]
GRAPH = "07-dynamographdeployment-goodput.yaml"


def run(*words: str) -> Result:
    return CliRunner().invoke(cli.app, ["k8s", "render", *words])


def test_files_are_the_objects_in_order(tmp_path: Path) -> None:
    answer = run("super-recommended", *DIGEST, "--out", str(tmp_path), "--json")
    assert answer.exit_code == 0, answer.stderr
    said = json.loads(answer.stdout)
    assert said["files"] == sorted(path.name for path in tmp_path.iterdir()) and len(said["files"]) == 9
    assert [yaml.safe_load((tmp_path / name).read_text()) for name in said["files"]] == said["objects"]
    # What a person reviews is no escaped text, and nothing hides behind an anchor.
    assert "valuesContent: |\n" in (tmp_path / said["files"][0]).read_text()
    assert "*id" not in (tmp_path / GRAPH).read_text()


def test_without_a_folder_it_is_one_stream() -> None:
    answer = run("weka-a-router", *DIGEST, "--nodes", "3")
    kinds = [item["kind"] for item in yaml.safe_load_all(answer.stdout)]
    assert answer.exit_code == 0 and kinds.count("DynamoGraphDeployment") == 1 and None not in kinds


def test_a_later_run_removes_only_its_own_leftovers(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("kind: Kustomization\n")
    assert run("weka-c-p2p", *DIGEST, "--out", str(tmp_path)).exit_code == 0
    assert len(list(tmp_path.iterdir())) == 12
    assert run("super-recommended", *DIGEST, "--out", str(tmp_path)).exit_code == 0
    assert len(list(tmp_path.iterdir())) == 10 and (tmp_path / "kustomization.yaml").exists()


def test_nodes_and_release_come_from_the_inventory(tmp_path: Path) -> None:
    hosts: dict[str, dict[str, Any]] = {
        "left": {"ansible_host": "192.0.2.1"},
        "right": {"ansible_host": "192.0.2.2", "rdma_node_number": 7},
    }
    chosen = {"goodput_release": "article", "rdma_rail_subnets": ["10.1.0.0/24", "10.2.0.0/24"]}
    own = {name: values | chosen | {"ansible_connection": "local"} for name, values in hosts.items()}
    inventory = tmp_path / "hosts.yml"
    inventory.write_text(yaml.safe_dump({"sparks": {"hosts": own}}))
    answer = run("weka-c-p2p", "-i", str(inventory), "--draft", "--json")
    assert answer.exit_code == 0, answer.stderr
    objects = json.loads(answer.stdout)["objects"]
    rails = json.loads(one(objects, "ConfigMap", "goodput-files")["data"]["rails.json"])
    assert rails == {"left": "10.1.0.1", "right": "10.1.0.7"}
    assert one(objects, "DynamoGraphDeployment")["metadata"]["annotations"]["goodput.spark/release"] == "article"
    # A draft says so, and what else was not known.
    assert "images by tag" in answer.stderr and "rails enp1s0f0np0" in answer.stderr and ":1.3.0-" in answer.stdout


def test_a_refused_plan_ends_with_1_and_is_taken_knowingly(tmp_path: Path) -> None:
    answer = run("super-c-p2p", *DIGEST, "--out", str(tmp_path / "new"))
    assert answer.exit_code == 1 and "KV006" in answer.stderr and not (tmp_path / "new").exists()
    assert run("super-c-p2p", *DIGEST, "--accept", "KV006", "--accept-memory").exit_code == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["super-recomended"], "super-recommended"),
        (["super-recommended"], "digest of image rdma_device_plugin: found ''"),
        (["super-recommended", "--digest", "runtime=sha256:1"], "64 hexadecimal digits"),
        (["super-recommended", "--release", "curent"], "did you mean 'current'?"),
        (["super-recommended", "--release", "virtual"], "has no section kubernetes"),
        (["super-recommended", "--choice", "node_port=80"], "must be 30000 to 32767"),
        (["super-recommended", "--rail", "enp1s0f0np0"], "must be NETDEV:RDMA_DEVICE"),
        (["super-recommended", "--memory", "119"], "there are 2 nodes"),
        (["super-recommended", "-i", "/nonexistent"], "found no inventory at /nonexistent"),
        (["super-recommended", "--draft", "--out", "/dev/null"], "can not be written"),
    ],
)
def test_bad_input_ends_with_2(words: list[str], said: str) -> None:
    answer = run(*words)
    assert answer.exit_code == 2 and said in answer.stderr and answer.stdout == "", (answer.stdout, answer.stderr)


def test_the_filter_refuses_with_one_line() -> None:
    kube_objects = FilterModule().filters()["kube_objects"]
    found = kube_objects({}, site(2), release("current"), {"digests": DIGESTS}, ["device_plugins"])
    assert [item["kind"] for item in found] == ["HelmChart", "ConfigMap", "DaemonSet"]
    with pytest.raises(AnsibleFilterError, match=r"^kube_objects: choices.graf: found 'x'; unknown key; did you mean"):
        kube_objects({}, site(2), release("current"), {"graf": "x"}, ["platform"])
