"""Dynamo's real operator before the control plane of ``standin``, on loopback, and what stands in for kubelets.

GOODPUT_DYNAMO_OPERATOR names a folder with two things of the operator's image: the program ``manager`` and ``crds/``.
Nodes are objects that nobody is behind: the real scheduler places pods on them, and this file says what their kubelets
would say, that a pod is up, and takes away what is to go.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import ipaddress
import json
import os
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from kube_server import NO_PROXY, Missing
from standin import free_port, running

Object = dict[str, Any]
#: Of the graph's webhooks alone: where the operator answers (its chart 1.5.0, webhook-configuration.yaml).
WEBHOOKS = {
    "ValidatingWebhookConfiguration": "/validate/nvidia.com/v1beta1/dynamographdeployments",
    "MutatingWebhookConfiguration": "/mutate/nvidia.com/v1beta1/dynamographdeployments",
}
#: Its chart makes them; it ends each reconciliation where they are missing.
CLUSTER_ROLES = {
    "planner": "plannerClusterRoleName",
    "profiling": "dgdrProfilingClusterRoleName",
    "epp": "eppClusterRoleName",
}
SYSTEM = "dynamo-system"
HEARTBEAT_SECONDS = 10.0
COMPONENT = "app.kubernetes.io/component"
#: Kubernetes' own, of a Deployment's pods.
TEMPLATE_HASH = "pod-template-hash"
#: It reads its namespace from a file that a pod has. Only its own view of /run has that file.
IN_A_POD = (
    *("unshare", "--mount", "sh", "-euc"),
    "mount -t tmpfs none /run; d=/run/secrets/kubernetes.io/serviceaccount; mkdir -p $d; "
    f'echo -n {SYSTEM} >$d/namespace; exec "$@"',
    "operator",
)


def folder() -> Path:
    found = Path(os.environ.get("GOODPUT_DYNAMO_OPERATOR", ""))
    if not os.environ.get("GOODPUT_DYNAMO_OPERATOR") or not (found / "manager").is_file():
        raise Missing(
            f"GOODPUT_DYNAMO_OPERATOR is {os.environ.get('GOODPUT_DYNAMO_OPERATOR') or 'not set'}; "
            "required a folder with manager and crds/ of Dynamo's operator"
        )
    return found


def apply(kubectl: Kubectl, work: Path, *items: Object) -> None:
    path = work / "item.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": items}))
    kubectl("apply", "--server-side", "--force-conflicts", "-f", str(path))


def certificate(work: Path) -> bytes:
    """A certificate for 127.0.0.1, which is its own authority, in the names that the operator reads."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem = made.public_bytes(serialization.Encoding.PEM)
    form = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    for file, content in (("tls.crt", pem), ("tls.key", key.private_bytes(*form)), ("ca.crt", pem)):
        (work / file).write_bytes(content)
        (work / file).chmod(0o600)
    return pem


def webhook(kind: str, path: str, port: int, authority: bytes) -> Object:
    client = {"url": f"https://127.0.0.1:{port}{path}", "caBundle": base64.b64encode(authority).decode()}
    rule = {"apiGroups": ["nvidia.com"], "apiVersions": ["v1beta1"], "operations": ["CREATE", "UPDATE"]}
    hook = {
        "name": "graphs.goodput.test",
        "admissionReviewVersions": ["v1"],
        "clientConfig": client,
        "failurePolicy": "Fail",
        "rules": [rule | {"resources": ["dynamographdeployments"]}],
        "sideEffects": "None",
    }
    about = {"name": "graphs.goodput.test"}
    return {"apiVersion": "admissionregistration.k8s.io/v1", "kind": kind, "metadata": about, "webhooks": [hook]}


@contextmanager
def operator(kubectl: Kubectl, kubeconfig: Path, work: Path, version: str) -> Iterator[None]:
    """The operator, with its webhooks for graphs; Grove, KAI and the like are off, as in release set ``current``."""
    given = folder()
    if os.geteuid():
        raise Missing("found an ordinary user; required root, for a view of /run of the operator's own")
    work.mkdir(mode=0o700)
    documents = [yaml.safe_load(path.read_text()) for path in sorted((given / "crds").glob("*.yaml"))]
    apply(kubectl, work, *documents)
    kubectl(
        "wait", "--for=condition=Established", "--timeout=60s", "crd", *(one["metadata"]["name"] for one in documents)
    )
    space = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": SYSTEM}}
    roles = [
        {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRole", "metadata": {"name": name}, "rules": []}
        for name in CLUSTER_ROLES
    ]
    apply(kubectl, work, space, *roles)
    ports = {name: free_port() for name in ("metrics", "healthProbe", "webhook")}
    authority = certificate(work)
    # It waits for the one that its chart would mount.
    pem = {name: base64.b64encode((work / name).read_bytes()).decode() for name in ("tls.crt", "tls.key", "ca.crt")}
    about = {"name": "webhook-server-cert", "namespace": SYSTEM}
    apply(kubectl, work, {"apiVersion": "v1", "kind": "Secret", "metadata": about, "data": pem})
    configuration = {
        "apiVersion": "operator.config.dynamo.nvidia.com/v1alpha1",
        "kind": "OperatorConfiguration",
        "server": {
            "metrics": {"bindAddress": "127.0.0.1", "port": ports["metrics"], "secure": False},
            "healthProbe": {"bindAddress": "127.0.0.1", "port": ports["healthProbe"]},
            "webhook": {
                "host": "127.0.0.1",
                "port": ports["webhook"],
                "certDir": str(work),
                "certProvisionMode": "manual",
            },
        },
        "leaderElection": {"enabled": False},
        "orchestrators": {name: {"enabled": False} for name in ("grove", "lws", "kaiScheduler", "volcanoScheduler")},
        "mpi": {"sshSecretName": "unused", "sshSecretNamespace": SYSTEM},
        "rbac": {key: name for name, key in CLUSTER_ROLES.items()},
    }
    (work / "config.yaml").write_text(yaml.safe_dump(configuration))
    argv = [*IN_A_POD, str(given / "manager"), f"--config={work / 'config.yaml'}", f"--operator-version={version}"]
    env = {
        "KUBECONFIG": str(kubeconfig),
        "POD_NAMESPACE": SYSTEM,
        "POD_SERVICE_ACCOUNT": "default",
        "PATH": os.environ["PATH"],
    }

    def ready() -> bool:
        with contextlib.suppress(OSError):
            urllib.request.build_opener(NO_PROXY).open(f"http://127.0.0.1:{ports['healthProbe']}/readyz", timeout=5)
            return True
        return False

    with running(argv, work / "operator.log", ready, env):
        # When it starts it insists on a Service, which nobody here leads anywhere.
        client = {
            "url": f"https://127.0.0.1:{ports['webhook']}/convert",
            "caBundle": base64.b64encode(authority).decode(),
        }
        patch = json.dumps([{"op": "replace", "path": "/spec/conversion/webhook/clientConfig", "value": client}])
        for one in documents:
            if "conversion" in one["spec"]:
                kubectl("patch", "crd", one["metadata"]["name"], "--type=json", "-p", patch)
        apply(kubectl, work, *(webhook(kind, path, ports["webhook"], authority) for kind, path in WEBHOOKS.items()))
        yield


class Kubelets:
    """What kubelets without a machine say: a pod that has a node is up; one that is to go is gone.

    ``resources``: what each node offers, by its name; None takes a resource away.
    """

    def __init__(self, kubectl: Kubectl, work: Path, resources: Mapping[str, Mapping[str, str | None]]) -> None:
        self.kubectl, self.work, self.resources = kubectl, work, resources
        self.nodes = list(resources)
        self.stop, self.held = threading.Event(), threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.error: BaseException | None = None
        #: Looks that met workers of two templates of which none was about to go.
        self.mixed = 0

    def __enter__(self) -> Kubelets:
        self.work.mkdir()
        labels = {"kubernetes.io/arch": "arm64", "kubernetes.io/os": "linux"}
        for name in self.nodes:
            about = {"name": name, "labels": labels | {"kubernetes.io/hostname": name}}
            apply(self.kubectl, self.work, {"apiVersion": "v1", "kind": "Node", "metadata": about})
        self.heartbeat()
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        if self.thread.is_alive():
            self.thread.join()
        self.kubectl("delete", "node", "--ignore-not-found", *self.nodes)
        if self.error:
            raise self.error

    def patch(self, kind: str, name: str, status: Object, *words: str) -> None:
        patch = json.dumps({"status": status})
        # An object may have gone in between.
        with contextlib.suppress(K3sError):
            self.kubectl("patch", kind, name, *words, "--subresource=status", "--type=merge", "-p", patch)

    def heartbeat(self) -> None:
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "x", "message": "x", "lastHeartbeatTime": now}
        for name, offered in self.resources.items():
            self.patch("node", name, {"capacity": offered, "allocatable": offered, "conditions": [ready]})

    def run(self) -> None:
        last = time.monotonic()
        try:
            while not self.stop.wait(1):
                if time.monotonic() - last > HEARTBEAT_SECONDS:
                    self.heartbeat()
                    last = time.monotonic()
                # The API may be away, and a pod gone in between.
                with contextlib.suppress(K3sError):
                    self.look()
        except BaseException as error:
            self.error = error

    def look(self) -> None:
        pods = self.kubectl.json("get", "pods", "--all-namespaces", "-o", "json")["items"]
        stay = [pod["metadata"]["labels"] for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        self.mixed += len({one.get(TEMPLATE_HASH) for one in stay if one.get(COMPONENT) == "worker"}) > 1
        for pod in pods:
            if pod["spec"].get("nodeName") in self.nodes:
                self.pod(pod)

    def pod(self, pod: Object) -> None:
        name, space = pod["metadata"]["name"], pod["metadata"]["namespace"]
        if "deletionTimestamp" in pod["metadata"]:
            if not self.held.is_set():
                self.kubectl("delete", "pod", name, "-n", space, "--force", "--grace-period=0", "--ignore-not-found")
        elif pod.get("status", {}).get("phase") != "Running":
            up = [{"type": kind, "status": "True"} for kind in ("Initialized", "ContainersReady", "Ready")]
            common = {"ready": True, "started": True, "restartCount": 0, "image": "x", "imageID": "x"}
            common["state"] = {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}
            states = [{"name": one["name"]} | common for one in pod["spec"]["containers"]]
            self.patch("pod", name, {"phase": "Running", "conditions": up, "containerStatuses": states}, "-n", space)
