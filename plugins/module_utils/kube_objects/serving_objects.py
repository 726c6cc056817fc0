# Apache-2.0 (see LICENSE)
"""The plan as a DynamoGraphDeployment: a frontend, and on each node one worker with LMCache's server beside it.

Facts: DynamoGraphDeployment v1beta1 and what the real operator made of such a graph (probes, labels, update).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .. import l2_residue, memory_gate, serving
from ..kv_plan.checks import PlanInputError
from . import start
from .charts import rail_resources
from .inputs import Choices, Node, Release, image
from .pods import (
    ADDRESS,
    FILES,
    LABELS,
    NODE,
    PYTHON_ENVIRONMENT,
    TOLERATIONS,
    Object,
    checksum,
    environment,
    escaped,
    host_path,
    memory,
    metadata,
    mount,
    probe,
    probes,
    words,
)

API_VERSION = "nvidia.com/v1beta1"
FRONTEND, WORKER = "frontend", "worker"
COORDINATOR = "lmcache-coordinator"
FILES_MAP = "goodput-files"
#: The owner's, if there is one: what a store on the network wants to know before it answers.
SECRET = "lmcache-secret"
HTTP_PORT = 8000
#: The operator's choice, which its own PodMonitor scrapes.
SYSTEM_PORT = 9090
LMCACHE_PORT_NAME = "lmcache-http"
FRONTEND_MEMORY = "512Mi"
COORDINATOR_MEMORY = "256Mi"
#: What a stop takes beyond the requests in flight.
STOP_SECONDS = 60
#: The kubelet would make LMCACHE_COORDINATOR_PORT and more of the Service; LMCache's own variables begin like that.
NO_SERVICE_VARIABLES = {"enableServiceLinks": False}
_SELECTOR = {"app.kubernetes.io/part-of": "goodput"}


class Serving:
    """Everything that one plan needs to serve on these nodes."""

    def __init__(
        self, plan: Mapping[str, Any], nodes: Sequence[Node], release: Release, choices: Choices, engine: str
    ) -> None:
        self.plan, self.nodes, self.release, self.choices, self.engine = plan, nodes, release, choices, engine
        self.ports: Mapping[str, Any] = plan["inputs"]["profile"]["ports"]
        self.image = image(release, choices, "runtime")
        self.budget: Mapping[str, Any] = next(iter(plan["budget"].values()))
        self.model_path = choices.model_path or f"/srv/goodput/models/{plan['model_name']}"
        self.real = engine == "vllm"
        server = " ".join(map(str, plan["lmcache_server_args"]))
        self.on_l2 = bool(server and plan["l2_path"])
        self.in_files = self.on_l2 and '"type":"fs_native"' in server
        self.reads_rail = start.RAIL_ADDRESS in server
        self.files = self._files()
        on_node = {"node": NODE, "management_address": ADDRESS}
        on_node["first_node_address"] = nodes[0].management_address
        self.dynamo = on_node | {"model_name": escaped(plan["model_name"]), "model_path": escaped(self.model_path)}
        self.lmcache = on_node | {
            "coordinator_address": f"{COORDINATOR}.{choices.namespace}.svc",
            "l2_path": escaped(plan["l2_path"]),
            "rail_address": start.RAIL_ADDRESS,
            "rail_devices": ",".join(f"{rail.rdma_device}:1" for rail in nodes[0].rails),
            "lmcache_port": self.ports["lmcache_request"],
            "lmcache_http_port": self.ports["lmcache_http"],
        }
        needs_rails = "{rail_" in server + " ".join(map(str, plan["lmcache_env"].values()))
        if needs_rails and not nodes[0].rails:
            raise PlanInputError(
                f"profile {plan['name']}",
                "no rails",
                "reads over the rails",
                "give the nodes' rails; run the role rdma",
            )

    # -- containers ------------------------------------------------------------------------------------------------

    def _container(self, name: str, command: list[str], arguments: list[str], env: list[Object]) -> Object:
        return {
            "name": name,
            "image": self.image,
            # On every node by digest already; 23 GB are not fetched by accident.
            "imagePullPolicy": "Never",
            "command": command,
            "args": arguments,
            "env": env,
        }

    def _dynamo_environment(self, more: Mapping[str, str]) -> list[Object]:
        """Environment of both of Dynamo's processes; ``more`` belongs to one of them."""
        plan = {**self.plan["env"], **serving.planes("kubernetes")["environment"], **PYTHON_ENVIRONMENT, **more}
        return environment(plan, self.dynamo)

    def frontend(self) -> Object:
        flags = {"--http-host": "0.0.0.0", "--http-port": HTTP_PORT, **serving.planes("kubernetes")["arguments"]}
        arguments = words(self.plan["dynamo_frontend_args"], self.dynamo, flags)
        drain = {"DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS": str(self.choices.drain_seconds)}
        main = self._container(
            "main", ["python3", "-m", "dynamo.frontend"], arguments, self._dynamo_environment(drain)
        ) | {
            "resources": {"requests": {"memory": FRONTEND_MEMORY}},
            # It reads tokenizer and configuration where the worker says they are; without them no model is listed.
            "volumeMounts": [mount("model", self.model_path, readOnly=True)],
            **probes("/live", "/health", HTTP_PORT, 300),
        }
        pod = {
            "terminationGracePeriodSeconds": self.choices.drain_seconds + 15,
            "nodeSelector": self._architecture(),
            "tolerations": TOLERATIONS,
            "containers": [main],
            "volumes": [host_path("model", self.model_path, "Directory")],
        }
        # The operator's default is 8 GiB, out of the memory that the GPU uses.
        return {"name": FRONTEND, "type": "frontend", "replicas": 1, "sharedMemorySize": "256Mi"} | self._template(
            FRONTEND, pod
        )

    def worker(self) -> Object:
        flags = serving.planes("kubernetes")["arguments"]
        arguments = words(self.plan["dynamo_worker_args"], self.dynamo, flags)
        home = {"HOME": self.choices.cache_path, "DYN_SYSTEM_PORT": str(SYSTEM_PORT)}
        command = [*self._gate(), "python3", "-m", f"dynamo.{self.engine}"]
        main = self._container("main", command, arguments, self._dynamo_environment(home))
        main |= {
            "securityContext": _root(),
            "resources": self._resources({"nvidia.com/gpu": "1"}, "weights", "device KV", "engine overhead", "shm"),
            "volumeMounts": [
                mount("shm", "/dev/shm"),
                mount("model", self.model_path, readOnly=True),
                mount("cache", self.choices.cache_path),
                *([mount("files", FILES, readOnly=True)] if self.real else []),
            ],
            **probes("/live", "/health", SYSTEM_PORT, self.choices.ready_timeout_seconds),
        }
        lmcache = bool(self.plan["lmcache_server_args"])
        pod: Object = {
            # LMCache and engine hand each other CUDA memory: one IPC namespace, one /dev/shm, both root. The rails'
            # addresses, of which RoCE makes its GIDs, exist on the host's network alone.
            "hostIPC": True,
            "hostNetwork": True,
            "dnsPolicy": "ClusterFirstWithHostNet",
            **({"runtimeClassName": "nvidia"} if self.real else {}),
            "terminationGracePeriodSeconds": self.choices.drain_seconds + STOP_SECONDS,
            "nodeSelector": self._architecture(),
            "tolerations": TOLERATIONS,
            "affinity": self._affinity(),
            # A native sidecar: up before the engine registers its memory, ended after it.
            **({"initContainers": [self.lmcache_server()]} if lmcache else {}),
            "containers": [main],
            "volumes": [
                host_path("shm", "/dev/shm", "Directory"),
                host_path("model", self.model_path, "Directory"),
                host_path("cache", self.choices.cache_path, "DirectoryOrCreate"),
                *([{"name": "files", "configMap": {"name": FILES_MAP}}] if self.files else []),
                *(self._lmcache_volumes() if lmcache else []),
            ],
        }
        worker: Object = {"name": WORKER, "type": "worker", "replicas": len(self.nodes), "sharedMemorySize": "0"}
        # There is no second GPU for a surge: from Dynamo 1.4 on the operator then ends the old workers first.
        annotations = {"nvidia.com/deployment-strategy": "Recreate"}
        annotations |= {"goodput.spark/files-sha256": checksum(self.files)} if self.files else {}
        return worker | self._template(WORKER, pod, annotations)

    def lmcache_server(self) -> Object:
        port = int(self.ports["lmcache_http"])
        command = ["lmcache", "server"]
        if self.in_files or self.reads_rail:
            options = ["--l2-state", self.choices.l2_state, "--l2-keep-percent", str(self.choices.l2_keep_percent)]
            command = ["python3", f"{FILES}/start.py", *(options if self.in_files else []), "--", *command]
        env = environment({**self.plan["lmcache_env"], **PYTHON_ENVIRONMENT, **self._gpu()}, self.lmcache)
        server = self._container(
            "lmcache",
            command,
            words(self.plan["lmcache_server_args"], self.lmcache),
            env,
        )
        mounts = [mount("shm", "/dev/shm")]
        mounts += [mount("l2", self.plan["l2_path"])] if self.on_l2 else []
        mounts += [mount("files", FILES, readOnly=True)] if self.in_files or self.reads_rail else []
        mounts += [mount("report", start.REPORT_DIRECTORY)] if self.in_files else []
        return server | {
            "envFrom": [{"secretRef": {"name": SECRET, "optional": True}}],
            "restartPolicy": "Always",
            "ports": [{"name": LMCACHE_PORT_NAME, "containerPort": port}],
            "securityContext": _root(),
            # The peers' memory is read in this process: the rails belong to its container.
            "resources": self._resources({}, "L1", "LMCache process", "Mooncake"),
            "volumeMounts": mounts,
            "startupProbe": probe(
                "/healthcheck", port, period=2, failures=-(-self.choices.lmcache_ready_timeout_seconds // 2)
            ),
            "livenessProbe": probe("/healthcheck", port, failures=6),
        }

    # -- parts of pods ---------------------------------------------------------------------------------------------

    def _gpu(self) -> dict[str, str]:
        """LMCache uses the engine's GPU without asking for one: the node has no second."""
        return {"NVIDIA_VISIBLE_DEVICES": "all"} if self.real else {}

    def _architecture(self) -> dict[str, str]:
        # The simulated engine runs on whatever the virtual pair is.
        return {"kubernetes.io/arch": self.release.architecture} if self.real else {}

    def _resources(self, limits: Mapping[str, str], *lines: str) -> Object:
        devices = {**limits, **rail_resources(self.nodes)} if self.real else {}
        return {"requests": {"memory": memory(self.budget, *lines)}} | ({"limits": devices} if devices else {})

    def _lmcache_volumes(self) -> list[Object]:
        # Not made where it is missing: then the L2 filesystem is not mounted, and the cache would fill the root.
        found = [host_path("l2", self.plan["l2_path"], "Directory")] if self.on_l2 else []
        # What was found in L2, where the systemd platform has it.
        return found + ([host_path("report", start.REPORT_DIRECTORY, "DirectoryOrCreate")] if self.in_files else [])

    def _affinity(self) -> Object:
        """One worker a node, on the nodes whose memory was planned."""
        names = [node.name for node in self.nodes]
        hostname = "kubernetes.io/hostname"
        return {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [{"key": hostname, "operator": "In", "values": names}]}]
                }
            },
            "podAntiAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": [
                    {"labelSelector": {"matchLabels": _pods(WORKER)}, "topologyKey": hostname}
                ]
            },
        }

    def _template(self, component: str, pod: Object, annotations: Mapping[str, str] | None = None) -> Object:
        about: Object = {"labels": LABELS | _pods(component)}
        revision = str(self.plan["inputs"]["profile"].get("model_revision", ""))
        # Other weights in the same directory make other pods: nothing else in the template tells them apart.
        if notes := dict(annotations or {}) | ({"goodput.spark/model-revision": revision} if revision else {}):
            about["annotations"] = notes
        found: Object = {"podTemplate": {"metadata": about, "spec": NO_SERVICE_VARIABLES | pod}}
        if self.release.runtime_version:
            found["runtimeVersionOverride"] = self.release.runtime_version
        return found

    # -- objects ---------------------------------------------------------------------------------------------------

    def namespace(self) -> Object:
        labels = {"pod-security.kubernetes.io/enforce": "privileged", **self.release.namespace_labels}
        return {
            "apiVersion": "v1",
            "kind": "Namespace",
            "metadata": {"name": self.choices.namespace, "labels": LABELS | labels},
        }

    def _gate(self) -> list[str]:
        """What a start of a real engine waits for, here as the worker's unit does before each start."""
        if not self.real:
            return []
        utilization = serving.argument(list(map(str, self.plan["dynamo_worker_args"])), "--gpu-memory-utilization")
        margin_bytes = self.plan["inputs"]["profile"]["memory"]["start_check_margin_bytes"]
        options = {
            "--utilization": utilization or "0.9",
            "--margin-bytes": margin_bytes,
            "--seconds": self.choices.memory_wait_seconds,
        }
        flags = [str(word) for option in options.items() for word in option]
        return ["python3", f"{FILES}/memory_gate.py", *flags, "--"]

    def _files(self) -> dict[str, str]:
        """What a worker's pod needs beside arguments, by file name; {} if nothing."""
        found = {}
        if self.in_files:
            found["l2_residue.py"] = Path(l2_residue.__file__).read_text(encoding="utf-8")
        if self.reads_rail:
            found["rails.json"] = json.dumps({node.name: node.rails[0].address for node in self.nodes if node.rails})
        if found:
            found["start.py"] = Path(start.__file__).read_text(encoding="utf-8")
        if self.real:
            found["memory_gate.py"] = Path(memory_gate.__file__).read_text(encoding="utf-8")
        return found

    def config_map(self) -> Object:
        about = metadata(FILES_MAP, self.choices.namespace)
        return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": about, "data": self.files}

    def coordinator(self) -> list[Object]:
        """By which peers find each other; never in the path of data."""
        port = int(self.ports["coordinator"])
        container = self._container(
            "coordinator",
            ["lmcache", "coordinator"],
            words(self.plan["lmcache_coordinator_args"], self.lmcache),
            environment({**self.plan["lmcache_env"], **PYTHON_ENVIRONMENT}, self.lmcache),
        ) | {
            "ports": [{"name": "coordinator", "containerPort": port}],
            "resources": {"requests": {"memory": COORDINATOR_MEMORY}},
            "startupProbe": {"tcpSocket": {"port": port}, "periodSeconds": 2, "failureThreshold": 90},
            "livenessProbe": {"tcpSocket": {"port": port}, "periodSeconds": 10, "failureThreshold": 6},
        }
        about = metadata(COORDINATOR, self.choices.namespace)
        pod = {"nodeSelector": self._architecture(), "tolerations": TOLERATIONS, "containers": [container]}
        template = {"metadata": {"labels": LABELS | _pods(COORDINATOR)}, "spec": NO_SERVICE_VARIABLES | pod}
        deployment: Object = {
            "apiVersion": "apps/v1",
            "kind": "Deployment",
            "metadata": about,
            "spec": {
                "replicas": 1,
                # Two of them would each know half of the peers.
                "strategy": {"type": "Recreate"},
                "selector": {"matchLabels": _pods(COORDINATOR)},
                "template": template,
            },
        }
        service: Object = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(COORDINATOR, self.choices.namespace),
            "spec": {"selector": _pods(COORDINATOR), "ports": [{"name": "http", "port": port, "targetPort": port}]},
        }
        return [deployment, service]

    def graph(self) -> Object:
        about = metadata(self.choices.graph, self.choices.namespace)
        about["annotations"] = {"goodput.spark/profile": self.plan["name"], "goodput.spark/release": self.release.name}
        spec: Object = {"backendFramework": "vllm"} if self.real else {}
        spec["components"] = [self.frontend(), self.worker()]
        return {"apiVersion": API_VERSION, "kind": "DynamoGraphDeployment", "metadata": about, "spec": spec}

    def endpoint(self) -> Object:
        """The endpoint on a port of every node. It asks for no key, as on the systemd platform."""
        port = {"name": "http", "port": HTTP_PORT, "targetPort": HTTP_PORT, "nodePort": self.choices.node_port}
        return {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(f"{self.choices.graph}-endpoint", self.choices.namespace),
            "spec": {"type": "NodePort", "selector": _pods(FRONTEND), "ports": [port]},
        }

    def objects(self) -> list[Object]:
        """In the order in which they are applied."""
        found = [self.namespace()]
        found += [self.config_map()] if self.files else []
        found += self.coordinator() if self.plan["lmcache_coordinator_args"] else []
        found.append(self.graph())
        return found + ([self.endpoint()] if self.choices.node_port else [])

    def monitors(self) -> list[Object]:
        """LMCache's metrics; the operator makes the PodMonitors of its own components."""
        if not self.plan["lmcache_server_args"]:
            return []
        # Series are joined by node, because instances differ by port.
        node = {"sourceLabels": ["__meta_kubernetes_pod_node_name"], "targetLabel": "node"}
        endpoint = {"port": LMCACHE_PORT_NAME, "path": "/metrics", "relabelings": [node]}
        return [
            {
                "apiVersion": "monitoring.coreos.com/v1",
                "kind": "PodMonitor",
                "metadata": metadata("lmcache", self.choices.namespace),
                "spec": {"selector": {"matchLabels": _pods(WORKER)}, "podMetricsEndpoints": [endpoint]},
            }
        ]


def _pods(component: str) -> dict[str, str]:
    """What our pods are found by; the operator's own labels are its business, and names carry a hash."""
    return {**_SELECTOR, "app.kubernetes.io/component": component}


def _root() -> Object:
    # IPC_LOCK counts for root alone; memory is registered with the GPU and the network card.
    return {"runAsUser": 0, "runAsNonRoot": False, "capabilities": {"add": ["IPC_LOCK"]}}
