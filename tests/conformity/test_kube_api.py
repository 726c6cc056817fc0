"""Every object of every profile, both release sets, one to three nodes, before a real Kubernetes API server."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import kube_objects
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files, rules
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.planner import make_plan
from kube_pods import DIGESTS, RELEASES, SITES, Object, one, release, site
from kube_server import PATHS, KubeApi, Missing, data

#: The release set's chart, and the nearest one whose CRDs and values we have.
CRDS = {"current": "1.5.0", "article": "1.2.0"}
#: Kinds that the API server of a cluster without K3s and without the Prometheus operator does not know.
SCHEMAS = {
    "HelmChart": "helm.cattle.io_helmchart_v1.json",
    "PodMonitor": "monitoring.coreos.com_podmonitor_v1.json",
}


def rendered(profile: str, name: str, size: int) -> list[Object]:
    """All objects of a profile, refusals taken knowingly: what is refused by a plan may still be rendered."""
    loaded = files.load_profile(profile)
    memory_gib = 1.5 if loaded.engine == "mocker" else 121.7
    nodes = files.nodes_from_gib([memory_gib] * size)
    plan = make_plan(loaded, files.load_model(loaded.model), nodes, accept=sorted(rules.RULES), accept_memory=True)
    return kube_objects(plan, site(size), release(name), {"digests": DIGESTS, "pod_monitors": True})


def every(name: str) -> Iterator[tuple[str, list[Object]]]:
    for profile, size in SITES:
        yield f"{profile}, {name}, {size} nodes", rendered(profile, name, size)


@pytest.fixture(scope="module")
def folder() -> Path:
    try:
        return data()
    except Missing as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def api(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubeApi]:
    try:
        server = KubeApi(folder, tmp_path_factory.mktemp("kube"))
    except Missing as reason:
        pytest.skip(str(reason))
    with server:
        version = server.ask("GET", "/version").body["gitVersion"]
        print(f"\nkube-apiserver {version} ready in {server.seconds_to_ready:.1f} s")
        yield server


@pytest.mark.parametrize("name", RELEASES)
def test_every_object_is_accepted(api: KubeApi, name: str) -> None:
    api.install_crds(CRDS[name])
    began, count, sets = time.monotonic(), dict.fromkeys(PATHS, 0), 0
    for where, objects in every(name):
        applied = []
        for item in objects:
            if item["kind"] in SCHEMAS:
                continue
            answer = api.apply(item)
            assert answer.status == 201 or (answer.status == 200 and item["kind"] == "Namespace"), (
                f"{where}: {item['kind']} {item['metadata']['name']}: {answer.status} {answer.message}"
            )
            count[item["kind"]] += 1
            applied.append(item)
        sets += 1
        # Each set before a server that has none of it, so that nothing is only a change of what another one left.
        for item in applied:
            if item["kind"] != "Namespace":
                assert api.delete(item).status == 200, where
    total, seconds = sum(count.values()), time.monotonic() - began
    kinds = ", ".join(f"{number} {kind}" for kind, number in count.items() if number)
    print(f"\n{name}: {total} objects of {sets} sets accepted in {seconds:.1f} s ({kinds}); CRDs {CRDS[name]}")
    assert sets == len(SITES) and total >= 3 * sets


def plant_in_worker(graph: Object) -> None:
    graph["spec"]["components"][1]["podTemplate"]["spec"]["hostIpc"] = True


def plant_in_component(graph: Object) -> None:
    graph["spec"]["components"][0]["sharedMemory"] = {"size": "1Gi"}


def plant_in_sidecar(graph: Object) -> None:
    graph["spec"]["components"][1]["podTemplate"]["spec"]["initContainers"][0]["restartpolicy"] = "Always"


def plant_a_type(graph: Object) -> None:
    graph["spec"]["components"][1]["type"] = "engine"


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (plant_in_worker, '.spec.components[name="worker"].podTemplate.spec.hostIpc: field not declared in schema'),
        (plant_in_component, '.spec.components[name="frontend"].sharedMemory: field not declared in schema'),
        (plant_in_sidecar, "restartpolicy: field not declared in schema"),
        (plant_a_type, 'spec.components[1].type: Unsupported value: "engine"'),
    ],
)
@pytest.mark.parametrize("name", RELEASES)
def test_a_planted_field_is_refused(api: KubeApi, name: str, plant: Any, said: str) -> None:
    api.install_crds(CRDS[name])
    objects = rendered("super-recommended", name, 2)
    api.apply(one(objects, "Namespace", "goodput"))
    broken = copy.deepcopy(one(objects, "DynamoGraphDeployment"))
    plant(broken)
    answer = api.apply(broken)
    assert answer.status >= 400 and said in answer.message, answer.message
    assert api.apply(one(objects, "DynamoGraphDeployment")).status in (200, 201)


def test_a_planted_field_of_kubernetes_own_kinds_is_refused(api: KubeApi) -> None:
    objects = rendered("weka-c-p2p", "current", 2)
    api.apply(one(objects, "Namespace", "goodput"))
    broken = copy.deepcopy(one(objects, "Deployment"))
    broken["spec"]["template"]["spec"]["containers"][0]["command_"] = ["x"]
    answer = api.apply(broken)
    assert answer.status >= 400 and "command_: field not declared in schema" in answer.message, answer.message


@pytest.mark.parametrize("kind", SCHEMAS)
def test_charts_and_monitors_fit_their_schemas(folder: Path, kind: str) -> None:
    schema = json.loads((folder / "schemas" / SCHEMAS[kind]).read_text())
    validator = jsonschema.validators.validator_for(schema, jsonschema.Draft7Validator)(schema)
    count = 0
    for name in RELEASES:
        for where, objects in every(name):
            for item in objects:
                if item["kind"] == kind:
                    assert not [error.message for error in validator.iter_errors(item)], where
                    count, last = count + 1, item
    print(f"\n{count} {kind} objects fit {SCHEMAS[kind]}")
    assert count
    broken = copy.deepcopy(last)
    broken["spec"]["fieldNobodyKnows"] = 1
    (error,) = validator.iter_errors(broken)
    assert "'fieldNobodyKnows' was unexpected" in error.message


def unknown_keys(ours: Any, theirs: Any, where: str = "") -> list[str]:
    """Keys of our values that the chart's own do not have; below a list there is nothing to compare."""
    if not isinstance(ours, dict) or (isinstance(theirs, dict) and not theirs and where):
        return []
    if not isinstance(theirs, dict):
        return [f"{where} is {type(theirs).__name__} in the chart"]
    found = [f"{where}{key}" for key in ours if key not in theirs]
    for key in ours.keys() & theirs.keys():
        found += unknown_keys(ours[key], theirs[key], f"{where}{key}.")
    return sorted(found)


def keys(values: Any) -> int:
    return sum(1 + keys(value) for value in values.values()) if isinstance(values, dict) else 0


@pytest.mark.parametrize("name", RELEASES)
def test_every_value_exists_in_the_chart(folder: Path, name: str) -> None:
    objects = rendered("super-recommended", name, 2)
    charts = {
        "dynamo-platform": f"dynamo-platform-{CRDS[name]}.yaml",
        "nvidia-device-plugin": "nvidia-device-plugin-0.20.0.yaml",
    }
    for chart, file in charts.items():
        theirs = yaml.safe_load((folder / "values" / file).read_text())
        ours = yaml.safe_load(one(objects, "HelmChart", chart)["spec"]["valuesContent"])
        assert not unknown_keys(ours, theirs), chart
        print(f"\n{name}: {keys(ours)} values of {chart} exist in {file}")
        assert keys(ours) >= 3
    planted = ours | {"runtimeClas": "nvidia", "gfd": {"enable": False}}
    assert unknown_keys(planted, theirs) == ["gfd.enable", "runtimeClas"]
