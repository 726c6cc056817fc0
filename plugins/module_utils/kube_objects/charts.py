# Apache-2.0 (see LICENSE)
"""What a cluster needs before it serves: charts for K3s's Helm controller, and the RDMA device plugin.

Facts: k8s-rdma-shared-dev-plugin v1.5.3 (configuration, paths), K3s's HelmChart.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from ..kube_charts import GPU_PLUGIN, SYSTEM
from ..kube_serving import CHART, PLATFORM_NAMESPACE
from ..kv_plan.checks import PlanInputError, nearest
from .inputs import Choices, Node, Release, image
from .pods import LABELS, Object, checksum, host_path, metadata, mount

RDMA_PLUGIN = "rdma-shared-device-plugin"
#: ConnectX-7 of a Spark.
VENDOR, DEVICE = "15b3", "1021"
RDMA_PREFIX = "rdma"
#: Where the kubelet meets its plugins; K3s leaves the kubelet's folder where upstream has it.
KUBELET_FOLDERS = {
    "device-plugins": "/var/lib/kubelet/device-plugins",
    "plugins-registry": "/var/lib/kubelet/plugins_registry",
}


def rail_resources(nodes: Sequence[Node]) -> dict[str, str]:
    """One resource a rail: a pod that needs both does not start where one is missing."""
    return {f"{RDMA_PREFIX}/rail{index}": "1" for index in range(len(nodes[0].rails))}


def _chart(name: str, key: str, namespace: str, release: Release, choices: Choices) -> Object:
    for given in choices.chart_contents:
        if given not in release.charts:
            raise PlanInputError("chart_contents", given, "unknown", nearest(given, list(release.charts)))
    entry: Mapping[str, Any] = release.charts[key]
    spec: Object = {
        "targetNamespace": namespace,
        # The default would uninstall what serves.
        "failurePolicy": "abort",
        # Some five minutes: the kubelet doubles its pause from 10 s. With the default, 1000, it would try for days.
        "backOffLimit": 5,
        # As Go writes it: the controller would rewrite 10m, and the chart would count as changed after its job.
        "timeout": "10m0s",
        "valuesContent": yaml.safe_dump(entry["values"], sort_keys=True),
    }
    if key in choices.chart_contents:
        spec["chartContent"] = choices.chart_contents[key]
    elif "repo" in entry:
        spec |= {"repo": entry["repo"], "chart": entry["chart"], "version": entry["version"]}
    else:
        spec["chart"] = entry["chart"]
    return {
        "apiVersion": "helm.cattle.io/v1",
        "kind": "HelmChart",
        "metadata": metadata(name, SYSTEM),
        "spec": spec,
    }


def platform(release: Release, choices: Choices) -> list[Object]:
    """Dynamo's operator, in a namespace of its own, which goes with it: Helm would leave one that it made."""
    about = {"name": PLATFORM_NAMESPACE, "labels": LABELS}
    namespace: Object = {"apiVersion": "v1", "kind": "Namespace", "metadata": about}
    return [namespace, _chart(CHART, "dynamo_platform", PLATFORM_NAMESPACE, release, choices)]


def device_plugins(nodes: Sequence[Node], release: Release, choices: Choices) -> list[Object]:
    """The GPU's plugin, and where nodes have rails the RDMA plugin with one resource a rail."""
    found = [_chart(GPU_PLUGIN, "nvidia_device_plugin", SYSTEM, release, choices)]
    if not nodes[0].rails:
        return found
    configuration = {
        "periodicUpdateInterval": 60,
        "configList": [
            {
                "resourcePrefix": RDMA_PREFIX,
                "resourceName": f"rail{index}",
                "rdmaHcaMax": choices.rail_shares,
                "selectors": {"vendors": [VENDOR], "deviceIDs": [DEVICE], "ifNames": [rail.netdev]},
            }
            for index, rail in enumerate(nodes[0].rails)
        ],
    }
    data = {"config.json": json.dumps(configuration, indent=2)}
    labels = {**LABELS, "app.kubernetes.io/name": RDMA_PLUGIN}
    selector = {"app.kubernetes.io/name": RDMA_PLUGIN}
    pod: Object = {
        "hostNetwork": True,
        "priorityClassName": "system-node-critical",
        # A rail is no less there on a tainted server.
        "tolerations": [{"operator": "Exists"}],
        "nodeSelector": {"kubernetes.io/arch": release.architecture},
        "containers": [
            {
                "name": RDMA_PLUGIN,
                "image": image(release, choices, "rdma_device_plugin"),
                "imagePullPolicy": "IfNotPresent",
                "securityContext": {"privileged": True},
                "volumeMounts": [
                    *(mount(name, path) for name, path in KUBELET_FOLDERS.items()),
                    mount("configuration", "/k8s-rdma-shared-dev-plugin", readOnly=True),
                    mount("dev", "/dev"),
                ],
            }
        ],
        "volumes": [
            *(host_path(name, path, "Directory") for name, path in KUBELET_FOLDERS.items()),
            {"name": "configuration", "configMap": {"name": RDMA_PLUGIN}},
            host_path("dev", "/dev", "Directory"),
        ],
    }
    # The plugin reads its configuration only when it starts, so another one makes other pods.
    annotations = {"goodput.spark/files-sha256": checksum(data)}
    daemon_set: Object = {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": metadata(RDMA_PLUGIN, SYSTEM),
        "spec": {
            "selector": {"matchLabels": selector},
            "template": {"metadata": {"labels": labels, "annotations": annotations}, "spec": pod},
        },
    }
    config_map: Object = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(RDMA_PLUGIN, SYSTEM),
        "data": data,
    }
    return [*found, config_map, daemon_set]


def offered(plugins: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """What a node must offer where these objects of ``device_plugins`` were placed, as ``resource_checks`` takes it.

    One GPU: it is not shared. Of each rail as many as the site gives away.
    """
    found = {}
    for item in plugins:
        if (item["kind"], item["metadata"]["name"]) == ("HelmChart", GPU_PLUGIN):
            found["nvidia.com/gpu"] = "1"
        if (item["kind"], item["metadata"]["name"]) == ("ConfigMap", RDMA_PLUGIN):
            for entry in json.loads(item["data"]["config.json"])["configList"]:
                found[f"{entry['resourcePrefix']}/{entry['resourceName']}"] = ">0"
    return found
