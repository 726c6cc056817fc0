"""Kubernetes objects of every profile: the processes of the systemd units, and none of the article's traps."""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import serving_units
import yaml
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import (
    PlanInputError,
    file_name,
    kube_objects,
)
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects.pods import environment
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects.serving_objects import FRONTEND, WORKER
from ansible_collections.goodput.spark.plugins.module_utils.kube_serving import scale_patch
from kube_pods import DIGESTS, OVER_RAILS, RELEASES, SITES, Object, compared, component, objects_of, one, release, site
from serving_units import PROFILES, Rendered, node

RAILS = ("rdma/rail0", "rdma/rail1")


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return serving_units.rendered_units(tmp_path_factory)


@pytest.fixture
def pair(rendered: Rendered) -> list[Object]:
    return objects_of(rendered, "super-recommended", 2)


def worker_pod(objects: list[Object]) -> Object:
    found: Object = component(objects, WORKER)["podTemplate"]["spec"]
    return found


# --- One renderer contract --------------------------------------------------------------------------------------------


def test_pods_start_what_units_start(rendered: Rendered, capsys: pytest.CaptureFixture[str]) -> None:
    count = values = 0
    for profile, size in SITES:
        for name in RELEASES:
            objects = objects_of(rendered, profile, size, name)
            started, checked, found = compared(rendered, objects, profile, size)
            assert not found
            # A worker on each node and the frontend; LMCache and its coordinator where the plan has them.
            plan = rendered[node(profile, size, 1)]["plan"]
            servers = size * bool(plan["lmcache_server_args"])
            assert started == size + 1 + servers + bool(plan["lmcache_coordinator_args"])
            count, values = count + started, values + checked
    with capsys.disabled():
        print(
            f"\n{count} processes of {len(PROFILES)} profiles: {values} arguments and variables equal on both platforms"
        )


def changed_argument(objects: list[Object]) -> None:
    arguments = worker_pod(objects)["containers"][0]["args"]
    at = arguments.index("--max-num-seqs") + 1
    arguments[at] = str(int(arguments[at]) + 1)


def dropped_argument(objects: list[Object]) -> None:
    worker_pod(objects)["initContainers"][0]["args"].remove("--no-l1-use-lazy")


def changed_variable(objects: list[Object]) -> None:
    (seed,) = [item for item in worker_pod(objects)["containers"][0]["env"] if item["name"] == "PYTHONHASHSEED"]
    seed["value"] = "1"


def other_program(objects: list[Object]) -> None:
    worker_pod(objects)["containers"][0]["command"][-1] = "dynamo.mocker"


@pytest.mark.parametrize(
    ("sabotage", "said"),
    [
        (changed_argument, "argument '32' / '33'"),
        (dropped_argument, "arguments"),
        (changed_variable, "variable PYTHONHASHSEED '0' / '1'"),
        (other_program, "program dynamo.vllm / dynamo.mocker"),
    ],
)
def test_one_difference_is_reported(rendered: Rendered, pair: list[Object], sabotage: Any, said: str) -> None:
    broken = copy.deepcopy(pair)
    sabotage(broken)
    found = compared(rendered, broken, "super-recommended", 2)[2]
    assert len(found) >= 2 and all("super-recommended-2-" in text for text in found)
    assert any(said in text for text in found)


def started_in_pod(folder: Path, node_name: str, *words: str) -> subprocess.CompletedProcess[str]:
    """start.py as a pod runs it: beside what else the ConfigMap holds."""
    env = {"GOODPUT_NODE": node_name, "GOODPUT_REPORT_DIRECTORY": str(folder / "report")}
    return subprocess.run(
        [sys.executable, str(folder / "start.py"), *words], capture_output=True, text=True, check=False, env=env
    )


def unpacked(objects: list[Object], folder: Path) -> None:
    for name, text in one(objects, "ConfigMap", "goodput-files")["data"].items():
        (folder / name).write_text(text)


def test_a_pod_fills_in_its_rail(rendered: Rendered, tmp_path: Path) -> None:
    unpacked(objects_of(rendered, "weka-c-p2p", 2), tmp_path)
    words = ["--", "/usr/bin/printf", "%s|", "{rail_address}:9450", "x{rail_address}", "$(A) {node}", "--"]
    done = started_in_pod(tmp_path, "weka-c-p2p-2-2", *words)
    assert done.stdout == "192.168.100.2:9450|x192.168.100.2|$(A) {node}|--|", done.stderr
    done = started_in_pod(tmp_path, "spark9", *words)
    assert done.returncode == 1 and "no rail address for node 'spark9'; known: weka-c-p2p-2-1" in done.stderr


def test_a_pod_counts_what_is_in_l2(rendered: Rendered, tmp_path: Path) -> None:
    objects = objects_of(rendered, "super-recommended", 2)
    unpacked(objects, tmp_path)
    l2 = tmp_path / "l2"
    l2.mkdir()
    container = worker_pod(objects)["initContainers"][0]
    path = rendered[node("super-recommended", 2, 1)]["plan"]["l2_path"]
    words = [word.replace(path, str(l2)) for word in container["args"]]
    options = container["command"][2 : container["command"].index("--") + 1]
    start = [*options, "/usr/bin/printf", "%s\n", *words]

    def adapter(done: subprocess.CompletedProcess[str]) -> str:
        lines = done.stdout.splitlines()
        return lines[lines.index("--l2-adapter") + 1]

    empty = started_in_pod(tmp_path, "a", *start)
    assert adapter(empty) == words[words.index("--l2-adapter") + 1], empty.stderr
    # A sparse file takes no room here, and counts as what it says.
    with (l2 / "m@1@0@x.data").open("wb") as file:
        file.truncate(2**30)
    (l2 / "m@1@0@y.data.tmp").touch()
    warm = started_in_pod(tmp_path, "a", *start)
    assert json.loads(adapter(warm))["max_capacity_gb"] == 399 and adapter(warm).startswith('{"type":"fs_native",')
    assert not (l2 / "m@1@0@y.data.tmp").exists() and json.loads((tmp_path / "report/l2.json").read_text())
    purged = [*(word.replace("keep", "purge") if word == "keep" else word for word in options), *start[len(options) :]]
    assert json.loads(adapter(started_in_pod(tmp_path, "a", *purged)))["max_capacity_gb"] == 400
    assert not list(l2.iterdir())
    l2.rmdir()
    gone = started_in_pod(tmp_path, "a", *start)
    assert gone.returncode == 1 and "L2 directory" in gone.stderr


def test_what_is_left_in_l2_is_judged_as_by_the_unit(rendered: Rendered) -> None:
    for profile in PROFILES:
        unit = rendered[node(profile, 2, 1)]["lmcache"]
        before = re.search(
            r"^ExecStartPre=.*--path (\S+) --capacity-gib (\S+) --state (\S+) --keep-percent (\S+)", unit, re.M
        )
        pod = worker_pod(objects_of(rendered, profile, 2))
        for container in pod.get("initContainers", []):
            options = container["command"][2:-3]
            assert options == (["--l2-state", before[3], "--l2-keep-percent", before[4]] if before else []), profile
            if before:
                arguments = container["args"]
                adapter = json.loads(arguments[arguments.index("--l2-adapter") + 1])
                assert (adapter["base_path"], adapter["max_capacity_gb"]) == (before[1], float(before[2]))
                mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
                assert {before[1], "/run/goodput-lmcache", "/etc/goodput-files"} <= set(mounts)


def test_a_real_engine_waits_for_memory_as_its_unit_does(rendered: Rendered) -> None:
    for profile in PROFILES:
        unit = rendered[node(profile, 2, 1)]["worker"]
        before = re.search(r"^ExecStartPre=\S+ \S+ (--utilization .*)$", unit, re.M)
        objects = objects_of(rendered, profile, 2)
        (container,) = worker_pod(objects)["containers"]
        command = container["command"]
        assert command[: command.index("-m") - 1] == (
            ["python3", "/etc/goodput-files/memory_gate.py", *before[1].split(), "--"] if before else []
        ), profile
        if before:
            assert "/etc/goodput-files" in [mount["mountPath"] for mount in container["volumeMounts"]]
            assert "memory_gate.py" in one(objects, "ConfigMap", "goodput-files")["data"]


def test_other_files_make_other_pods(rendered: Rendered) -> None:
    nodes = site(2, "weka-c-p2p-2-")
    plan = rendered[node("weka-c-p2p", 2, 1)]["plan"]
    moved = copy.deepcopy(nodes)
    moved[1]["rails"][0]["addresses"] = ["192.168.100.9/24"]
    found = [
        component(kube_objects(plan, each, release("current"), {"digests": DIGESTS}), WORKER)["podTemplate"]["metadata"]
        for each in (nodes, moved)
    ]
    sums = [each["annotations"]["goodput.spark/files-sha256"] for each in found]
    assert sums[0] != sums[1] and all(len(each) == 64 for each in sums)


def test_other_weights_in_the_same_directory_make_other_pods(rendered: Rendered) -> None:
    plan = copy.deepcopy(rendered[node("weka-c-p2p", 2, 1)]["plan"])
    found = []
    for revision in ("", "a" * 40, "b" * 40):
        plan["inputs"]["profile"]["model_revision"] = revision
        objects = kube_objects(plan, site(2, "weka-c-p2p-2-"), release("current"), {"digests": DIGESTS})
        # The frontend reads tokenizer and configuration there.
        for name in (WORKER, FRONTEND):
            notes = component(objects, name)["podTemplate"]["metadata"].get("annotations", {})
            found.append(notes.get("goodput.spark/model-revision"))
    assert found == [None, None, "a" * 40, "a" * 40, "b" * 40, "b" * 40]


def test_the_operators_namespace_goes_with_it() -> None:
    space, chart = kube_objects({}, site(2), release("current"), {"digests": DIGESTS}, ["platform"])
    assert space["kind"] == "Namespace" and space["metadata"]["name"] == chart["spec"]["targetNamespace"]
    assert "createNamespace" not in chart["spec"]
    assert space["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "goodput"


def test_a_reference_within_a_variable_is_refused() -> None:
    values = {"management_address": "$(GOODPUT_ADDRESS)"}
    with pytest.raises(PlanInputError, match="environment variable A: found 'http://{management_address}'"):
        environment({"A": "http://{management_address}"}, values)
    whole, dollar = environment({"A": "{management_address}", "B": "$(HOME) $HOME"}, values)[2:]
    assert whole["valueFrom"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert dollar["value"] == "$$(HOME) $$HOME"


# --- The article's traps (its repository, pitfalls 1 to 9, 13 and 14) and the operator's ------------------------------


def every_set(rendered: Rendered) -> Iterator[tuple[str, list[Object]]]:
    for profile, size in SITES:
        for name in RELEASES:
            yield f"{profile} {name} {size}", objects_of(rendered, profile, size, name)


def containers(item: Object) -> list[Object]:
    if item["kind"] == "DynamoGraphDeployment":
        pods = [entry["podTemplate"]["spec"] for entry in item["spec"]["components"]]
    else:
        pods = [item["spec"]["template"]["spec"]] if item["kind"] in ("Deployment", "DaemonSet") else []
    return [container for pod in pods for key in ("initContainers", "containers") for container in pod.get(key, [])]


def test_01_images_are_by_digest_and_ours_are_never_pulled(rendered: Rendered) -> None:
    for where, objects in every_set(rendered):
        for item in objects:
            for container in containers(item):
                assert "@sha256:" in container["image"], where
                assert item["kind"] == "DaemonSet" or container["imagePullPolicy"] == "Never", where


def test_every_release_set_has_a_gpu_plugin_that_takes_a_gb10() -> None:
    versions = []
    for path in (serving_units.ROOT / "vars/releases").glob("*.yml"):
        kubernetes = yaml.safe_load(path.read_text())["goodput_release_set"].get("kubernetes")
        if kubernetes:
            versions.append(kubernetes["charts"]["nvidia_device_plugin"]["version"])
    # Before, it takes the missing memory figure of a GB10 for an error and restarts for ever.
    assert len(versions) >= 2 and all(tuple(map(int, text.split("."))) >= (0, 17, 4) for text in versions), versions


def test_02_the_namespace_has_kais_label_where_kai_is_installed(rendered: Rendered) -> None:
    for name in RELEASES:
        objects = objects_of(rendered, "super-recommended", 2, name)
        values = yaml.safe_load(one(objects, "HelmChart", "dynamo-platform")["spec"]["valuesContent"])
        labels = one(objects, "Namespace", "goodput")["metadata"]["labels"]
        assert values["global"]["kai-scheduler"]["install"] == (name == "article")
        assert (labels.get("kai.scheduler/enabled") == "true") == (name == "article")


def test_03_nodes_differ_without_spread_constraints(rendered: Rendered) -> None:
    for where, objects in every_set(rendered):
        assert "topologySpreadConstraints" not in json.dumps(objects), where
        worker = component(objects, WORKER)
        affinity = worker["podTemplate"]["spec"]["affinity"]
        (rule,) = affinity["podAntiAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
        assert rule["topologyKey"] == "kubernetes.io/hostname"
        assert rule["labelSelector"]["matchLabels"].items() <= worker["podTemplate"]["metadata"]["labels"].items()
        (term,) = affinity["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
        assert worker["replicas"] == len(term["matchExpressions"][0]["values"])


def test_04_the_frontend_has_the_model_where_the_worker_has_it(rendered: Rendered) -> None:
    for where, objects in every_set(rendered):
        mounts = []
        for name in (FRONTEND, WORKER):
            pod = component(objects, name)["podTemplate"]["spec"]
            (found,) = [item for item in pod["containers"][0]["volumeMounts"] if item["name"] == "model"]
            mounts.append(found)
        arguments = worker_pod(objects)["containers"][0]["args"]
        flag = "--model" if "--model" in arguments else "--model-path"
        assert mounts[0] == mounts[1] and mounts[0]["readOnly"], where
        assert arguments[arguments.index(flag) + 1] == mounts[0]["mountPath"], where


def test_05_peers_find_each_other(rendered: Rendered) -> None:
    objects = objects_of(rendered, "weka-c-p2p", 2)
    service, deployment = one(objects, "Service", "lmcache-coordinator"), one(objects, "Deployment")
    template = deployment["spec"]["template"]
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert service["spec"]["ports"][0]["targetPort"] == template["spec"]["containers"][0]["ports"][0]["containerPort"]
    rails = json.loads(one(objects, "ConfigMap", "goodput-files")["data"]["rails.json"])
    assert rails == {"weka-c-p2p-2-1": "192.168.100.1", "weka-c-p2p-2-2": "192.168.100.2"}
    assert not [item for item in objects_of(rendered, "super-recommended", 2) if item["kind"] == "Deployment"]


def test_a_service_puts_no_variables_into_pods(rendered: Rendered) -> None:
    for where, objects in every_set(rendered):
        pods = [part["podTemplate"]["spec"] for part in one(objects, "DynamoGraphDeployment")["spec"]["components"]]
        pods += [item["spec"]["template"]["spec"] for item in objects if item["kind"] == "Deployment"]
        assert len(pods) >= 2 and all(pod["enableServiceLinks"] is False for pod in pods), where


def test_06_to_09_both_rails_belong_to_the_process_that_reads_over_them(rendered: Rendered) -> None:
    for where, objects in every_set(rendered):
        pod = worker_pod(objects)
        if "runtimeClassName" not in pod:
            assert "virtual" in where
            continue
        if where.endswith(" 1"):
            # One node alone has no rails: a pod that asked for them would wait for ever.
            assert "rdma/" not in json.dumps(objects), where
            continue
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert all(container["resources"]["limits"][rail] == "1" for rail in RAILS), where
            assert not [mount for mount in container["volumeMounts"] if "infiniband" in mount["mountPath"]], where
        # RoCE finds its GIDs on the host's network only.
        assert pod["hostNetwork"] and pod["dnsPolicy"] == "ClusterFirstWithHostNet", where
        config = json.loads(one(objects, "ConfigMap", "rdma-shared-device-plugin")["data"]["config.json"])
        assert [item["resourceName"] for item in config["configList"]] == ["rail0", "rail1"]
        assert [item["selectors"]["ifNames"] for item in config["configList"]] == [["enp1s0f0np0"], ["enP2p1s0f0np0"]]
    pod = worker_pod(objects_of(rendered, "weka-c-p2p", 2))
    variables = {item["name"]: item.get("value") for item in pod["initContainers"][0]["env"]}
    assert variables["UCX_NET_DEVICES"] == "rocep1s0f0:1,roceP2p1s0f0:1" and "UCX_TLS" not in variables
    assert variables["UCX_MAX_RMA_RAILS"] == variables["UCX_MAX_RNDV_RAILS"] == "2"


def test_13_a_worker_is_ready_only_when_it_says_so(rendered: Rendered) -> None:
    for where, objects in every_set(rendered):
        for name in (FRONTEND, WORKER):
            main = component(objects, name)["podTemplate"]["spec"]["containers"][0]
            assert main["readinessProbe"]["httpGet"]["path"] == "/health", where
            # The operator's own liveness probe ends a worker after one slow answer.
            live = main["livenessProbe"]
            assert live["failureThreshold"] * live["periodSeconds"] >= 60 and live["timeoutSeconds"] >= 10, where
            assert "startupProbe" in main, where


def test_14_the_graph_names_its_arm_and_a_leftover_flag_is_refused(pair: list[Object], rendered: Rendered) -> None:
    annotations = one(pair, "DynamoGraphDeployment")["metadata"]["annotations"]
    assert annotations == {"goodput.spark/profile": "super-recommended", "goodput.spark/release": "current"}
    with pytest.raises(PlanInputError, match="choices.drain_second: found 60; unknown key; did you mean 'drain_seco"):
        objects_of(rendered, "super-recommended", 2, drain_second=60)


def test_the_worker_shares_memory_with_lmcache(rendered: Rendered) -> None:
    for where, objects in every_set(rendered):
        worker = component(objects, WORKER)
        pod = worker["podTemplate"]["spec"]
        # The operator would put a memory volume over the host's /dev/shm.
        assert worker["sharedMemorySize"] == "0" and pod["hostIPC"], where
        assert {"name": "shm", "hostPath": {"path": "/dev/shm", "type": "Directory"}} in pod["volumes"], where
        for container in [*pod.get("initContainers", []), *pod["containers"]]:
            assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"], where
            assert container["securityContext"]["runAsUser"] == 0, where
            assert "memory" not in container["resources"].get("limits", {}), where
            assert container["resources"]["requests"]["memory"].endswith("Mi"), where
        for container in pod.get("initContainers", []):
            # `runtime` would switch the operator's sidecar mode on.
            assert container["name"] == "lmcache" and container["restartPolicy"] == "Always", where


def test_requests_leave_room_for_the_node(rendered: Rendered) -> None:
    for profile in PROFILES:
        name = node(profile, 2, 1)
        pod = worker_pod(objects_of(rendered, profile, 2))
        asked = sum(
            int(container["resources"]["requests"]["memory"].removesuffix("Mi")) * 2**20
            for container in [*pod.get("initContainers", []), *pod["containers"]]
        )
        (budget,) = [entry for key, entry in rendered[name]["plan"]["budget"].items() if key == name]
        kept = ("OS at rest", "control plane", "page cache", "reserve", "free")
        left = sum(line["bytes"] for line in budget["lines"] if line["name"] in kept)
        # Exactly the budget's own lines, rounded up to MiB for each of the two containers.
        assert 0 <= asked - (budget["total_bytes"] - left) <= 2 * 2**20, profile
        # Beside what the kubelet keeps (system, control plane, a quarter of the reserve) is room for the frontend,
        # the coordinator and 1 GiB of the cluster's own pods. The virtual pair's guests are too small to ask that.
        lines = {line["name"]: line["bytes"] for line in budget["lines"]}
        room = lines["page cache"] + lines["free"] + lines["reserve"] * 3 // 4
        assert room >= 1792 * 2**20 or profile.startswith("virtual"), profile


def test_the_cache_on_disk_is_mounted_only_if_it_is_there(rendered: Rendered) -> None:
    pod = worker_pod(objects_of(rendered, "super-kv12-l18", 2))
    (volume,) = [item for item in pod["volumes"] if item["name"] == "l2"]
    path = rendered[node("super-kv12-l18", 2, 1)]["plan"]["l2_path"]
    # DirectoryOrCreate would fill the root filesystem where nothing is mounted.
    assert volume["hostPath"] == {"path": path, "type": "Directory"}
    assert f'"base_path":"{path}"' in " ".join(pod["initContainers"][0]["args"])
    assert not [
        item for item in worker_pod(objects_of(rendered, "weka-b-l1only", 2))["volumes"] if item["name"] == "l2"
    ]


def test_an_update_ends_the_old_workers_first(pair: list[Object]) -> None:
    template = component(pair, WORKER)["podTemplate"]
    assert template["metadata"]["annotations"]["nvidia.com/deployment-strategy"] == "Recreate"
    assert template["spec"]["terminationGracePeriodSeconds"] > 60
    graph = one(pair, "DynamoGraphDeployment")
    (step,) = scale_patch(graph, 0)
    assert graph["spec"]["components"][int(step["path"].split("/")[3])]["name"] == WORKER
    assert step == {"op": "replace", "path": "/spec/components/1/replicas", "value": 0}


def test_the_runtime_version_is_given_only_where_the_operator_knows_it(rendered: Rendered) -> None:
    for name, wanted in (("current", "1.5.1"), ("article", None)):
        objects = objects_of(rendered, "super-recommended", 2, name)
        assert {component(objects, part).get("runtimeVersionOverride") for part in (FRONTEND, WORKER)} == {wanted}


def test_monitors_only_when_asked(rendered: Rendered) -> None:
    assert not [item for item in objects_of(rendered, "super-recommended", 2) if item["kind"] == "PodMonitor"]
    objects = objects_of(rendered, "super-recommended", 2, pod_monitors=True)
    (endpoint,) = one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [port["name"] for port in worker_pod(objects)["initContainers"][0]["ports"]]


def test_a_chart_that_fails_stops_soon_and_uninstalls_nothing(rendered: Rendered) -> None:
    for where, objects in every_set(rendered):
        charts = [item["spec"] for item in objects if item["kind"] == "HelmChart"]
        # The operator's, and the plugin's where there is a GPU.
        assert len(charts) == (1 if "virtual" in where else 2)
        assert all(chart["failurePolicy"] == "abort" and 1 <= chart["backOffLimit"] < 10 for chart in charts), where


def test_charts_by_content_need_no_internet(rendered: Rendered) -> None:
    objects = objects_of(rendered, "super-recommended", 2, chart_contents={"dynamo_platform": "QUJD"})
    spec = one(objects, "HelmChart", "dynamo-platform")["spec"]
    # The controller stores a duration as Go writes it; another form would be its change of the chart, after the job.
    assert re.fullmatch(r"\d+m\d+s", spec["timeout"])
    assert spec["chartContent"] == "QUJD" and "chart" not in spec and spec["failurePolicy"] == "abort"


def test_parts_and_order(rendered: Rendered, pair: list[Object]) -> None:
    plugins = kube_objects({}, site(2), release("current"), {"digests": DIGESTS}, ["device_plugins"])
    assert [item["kind"] for item in plugins] == ["HelmChart", "ConfigMap", "DaemonSet"]
    assert [item["kind"] for item in pair] == [
        *("HelmChart", "ConfigMap", "DaemonSet", "Namespace", "HelmChart"),
        *("Namespace", "ConfigMap", "DynamoGraphDeployment", "Service"),
    ]
    names = [file_name(index, item) for index, item in enumerate(pair)]
    assert names == sorted(names) and names[7] == "07-dynamographdeployment-goodput.yaml"
    alone = kube_objects({}, [{"name": "spark1"}], release("current"), {"digests": DIGESTS}, ["device_plugins"])
    assert [item["kind"] for item in alone] == ["HelmChart"]


# --- Bad input --------------------------------------------------------------------------------------------------------


def without_rail() -> list[Object]:
    nodes = site(2)
    del nodes[1]["rails"][1]
    return nodes


def other_port() -> list[Object]:
    nodes = site(2)
    nodes[1]["rails"][0] = nodes[1]["rails"][0] | {"netdev": "enp1s0f1np1", "rdma_device": "rocep1s0f1"}
    return nodes


@pytest.mark.parametrize(
    ("nodes", "name", "choices", "message"),
    [
        ([], "current", {}, "nodes: found []; must be a list of at least one node"),
        ([{"name": "Spark_1"}], "current", {}, "node 1: found 'Spark_1'; must have a name of lower case"),
        (site(1) * 2, "current", {}, "nodes: found 'spark1'; stands twice"),
        (without_rail(), "current", {}, "spark2: rails: found 1; must be 2, or none; check the cable"),
        ([*site(2)[:1], {"name": "spark2"}], "current", {}, "spark2: rails: found 0; spark1 has 2"),
        ([{"name": "a"}, {"name": "b"}], "current", {}, "nodes: found 'no rails'; 2 nodes need them"),
        (other_port(), "current", {}, "enp1s0f1np1 (rocep1s0f1)'; is enp1s0f0np0 (rocep1s0f0) on spark1"),
        (site(2), "virtual", {}, "release set: found 'virtual'; has no section kubernetes"),
        (site(2), "current", {"digests": {}}, "release set current knows none of"),
        (site(2), "current", {"digests": {**DIGESTS, "runtime": "latest"}}, "digest of image runtime: found 'latest'"),
        (site(2), "current", {"digests": {"runtim": DIGESTS["runtime"]}}, "did you mean 'runtime'?"),
        (site(2), "current", {"namespace": "Goodput"}, "choices.namespace: found 'Goodput'; must be lower case"),
        (site(2), "current", {"graph": "g" * 60}, "namespace and graph together have 68 characters, at most 54"),
        (site(2), "current", {"node_port": 8000}, "choices.node_port: found 8000; must be 30000 to 32767"),
        (site(2), "current", {"drain_seconds": "60"}, "choices.drain_seconds: found '60'; must be of type int"),
        (site(2), "current", {"ready_timeout_seconds": 0}, "must be 1 or more"),
        (site(2), "current", {"model_path": "models"}, "must be an absolute path"),
        (site(2), "current", {"l2_state": "warm"}, "must be keep or purge"),
        (site(2), "current", {"l2_keep_percent": 96}, "must be 0 to 95, so that new objects have room"),
        (site(2), "current", {"chart_contents": {"dynamo": "QUJD"}}, "did you mean 'dynamo_platform'?"),
    ],
)
def test_bad_input_is_refused(
    rendered: Rendered, nodes: list[Object], name: str, choices: Object, message: str
) -> None:
    plan = rendered[node("super-recommended", 2, 1)]["plan"]
    with pytest.raises(PlanInputError) as caught:
        kube_objects(plan, nodes, release(name), {"digests": DIGESTS, **choices})
    assert message in str(caught.value)


def test_refused_plans_unknown_parts_and_missing_rails_are_refused(rendered: Rendered) -> None:
    for profile in OVER_RAILS:
        with pytest.raises(PlanInputError, match=f"profile {profile}: found 'no rails'; reads over the rails"):
            objects_of(rendered, profile, 1)
    plan = rendered[node("super-recommended", 1, 1)]["plan"]
    chosen = {"digests": DIGESTS}
    with pytest.raises(PlanInputError, match="plan: found 'super-recommended'; must be a plan that may run"):
        kube_objects(plan | {"ok": False}, site(1), release("current"), chosen)
    with pytest.raises(PlanInputError, match="parts: found 'servin'; unknown part; did you mean 'serving'"):
        kube_objects(plan, site(1), release("current"), chosen, ["servin"])
    assert "runtime:" not in str(kube_objects(plan, site(1), release("current"), {"draft": True}))
