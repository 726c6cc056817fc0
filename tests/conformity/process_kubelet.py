"""Kubelets that really start what pods name, as processes of this machine: Dynamo and LMCache of the runtime archive.

A node, and each pod that is not on its node's network, is a set of namespaces on one bridge. Arguments, variables, the
pod's identity and token, host paths, ConfigMaps, readiness, the order of a native sidecar and the grace of a stop are
as a kubelet has them. There are no images, cgroups, limits or liveness probes; what ended is started again at once.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from dynamo_operator import COMPONENT, Kubelets, Object
from kube_pods import expanded
from kube_server import NO_PROXY, Missing
from standin import end


def command(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert not done.returncode, f"{' '.join(words)}: {done.stderr}"
    return done.stdout


BRIDGE, NETWORK = "goodput-test", "10.77.9"
API_ADDRESS = f"{NETWORK}.254"
FILES = "/etc/goodput-files"
IDENTITY = "/run/secrets/kubernetes.io/serviceaccount"
#: Of the image's user; a container always has one.
HOME = "/run/home"
#: A view of the file system of its own: a node's memory, its paths, and what a kubelet would mount.
SANDBOX = f"""
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$1/etc,workdir=$1/overlay" /etc
mount --bind "$1/shm" /dev/shm; mkdir {FILES}
for each in /run /srv /var/cache; do mount -t tmpfs none $each; done
mkdir -p {IDENTITY} {HOME} /srv/goodput/l2 "/srv/goodput/models/$3"
mount --bind "$1/l2" /srv/goodput/l2; mount --bind "$2" "/srv/goodput/models/$3"
ip link set lo up; echo ready; exec sleep infinity
"""


@contextlib.contextmanager
def bridge() -> Iterator[None]:
    """Where nodes and pods meet, and the control plane.

    :raises Missing: namespaces and devices need root.
    """
    if os.geteuid():
        raise Missing("found an ordinary user; required root, for namespaces and a bridge")
    # Of a run that was killed.
    subprocess.run(["ip", "link", "delete", BRIDGE], capture_output=True, check=False)
    command("ip", "link", "add", BRIDGE, "type", "bridge")
    try:
        command("ip", "address", "add", f"{API_ADDRESS}/24", "dev", BRIDGE)
        command("ip", "link", "set", BRIDGE, "up")
        yield
    finally:
        command("ip", "link", "delete", BRIDGE)


class Sandbox:
    """Namespaces of a node or of a pod, with one address."""

    def __init__(self, work: Path, address: str, model: Path) -> None:
        self.work, self.address = work, address
        for name in ("shm", "l2", "etc", "overlay"):
            (work / name).mkdir(parents=True)
        words = ["unshare", "--mount", "--net", "--ipc", "sh", "-euc", SANDBOX, "sandbox"]
        words += [str(work), str(model), model.name]
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            self.connect(address)
        except BaseException:
            self.end()
            raise

    def connect(self, address: str) -> None:
        assert self.process.stdout is not None and self.process.stdout.readline() == "ready\n"
        outside = f"gp{address.rpartition('.')[2]}"
        command("ip", "link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", str(self.process.pid))
        command("ip", "link", "set", outside, "master", BRIDGE, "up")
        command(*self.inside("ip", "address", "add", f"{address}/24", "dev", "eth0"))
        command(*self.inside("ip", "link", "set", "eth0", "up"))

    def inside(self, *words: str) -> list[str]:
        return ["nsenter", "-t", str(self.process.pid), "-m", "-n", "-i", *words]

    def write(self, path: str, text: str) -> None:
        words = self.inside("sh", "-c", 'umask 077; cat >"$1"', "write", path)
        subprocess.run(words, input=text, text=True, check=True)

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@dataclass
class Running:
    """A pod that has a node."""

    component: str
    sandbox: Sandbox
    own: bool
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    restarts: dict[str, int] = field(default_factory=dict)
    said: str = ""


class ProcessKubelets(Kubelets):
    """``image``: what is in the containers, ``bin`` and ``site-packages``; ``model``: a folder that every node has."""

    def __init__(
        self,
        kubectl: Kubectl,
        kubeconfig: Path,
        work: Path,
        resources: Mapping[str, Mapping[str, str]],
        image: Path,
        model: Path,
    ) -> None:
        super().__init__(kubectl, work, resources)
        self.image = image
        # The archive's packages are for this one.
        prefix = command("python3.11", "-c", "import sys; print(sys.base_prefix)").strip()
        self.python = f"{prefix}/bin"
        cluster = yaml.safe_load(kubeconfig.read_text())["clusters"][0]["cluster"]
        self.authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self.api_port = str(cluster["server"]).rpartition(":")[2]
        self.model, self.running, self.made = model, dict[str, Running](), 0
        self.sandboxes: dict[str, Sandbox] = {}
        self.opener = urllib.request.build_opener(NO_PROXY)

    def __enter__(self) -> ProcessKubelets:
        try:
            for node in self.nodes:
                self.sandboxes[node] = self.sandbox(node)
            super().__enter__()
        except BaseException:
            self.end()
            raise
        return self

    def __exit__(self, *words: object) -> None:
        self.stop.set()
        self.thread.join()
        # Before anything is asked of a control plane that may be gone.
        self.end()
        super().__exit__(*words)

    def end(self) -> None:
        for pod in self.running.values():
            self.kill(pod, 5)
        for sandbox in self.sandboxes.values():
            sandbox.end()

    def address_of(self, component: str) -> str:
        """Of the newest pod of a component."""
        return [one.sandbox.address for one in self.running.values() if one.component == component][-1]

    def show(self) -> None:
        """The end of every process's log, for who reads a failure."""
        for path in sorted(self.work.glob("*.log")):
            print(f"--- {path.name}\n{path.read_text(errors='replace')[-1500:]}")

    def sandbox(self, name: str) -> Sandbox:
        self.made += 1
        return Sandbox(self.work.parent / f"sandbox-{self.made}-{name}", f"{NETWORK}.{self.made}", self.model)

    # -- containers ------------------------------------------------------------------------------------------------

    def variables(self, pod: Object, container: Object, address: str) -> dict[str, str]:
        """In their order, so that a reference finds what stands before it."""
        about, spec = pod["metadata"], pod["spec"]
        fields = {
            "metadata.name": about["name"],
            "metadata.namespace": about["namespace"],
            "metadata.uid": about["uid"],
            "spec.nodeName": spec["nodeName"],
            "status.podIP": address,
            "status.hostIP": self.sandboxes[spec["nodeName"]].address,
        }
        found = {"KUBERNETES_SERVICE_HOST": API_ADDRESS, "KUBERNETES_SERVICE_PORT": self.api_port, "HOME": HOME}
        for one in container.get("env", []):
            path = one.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
            found[one["name"]] = fields[path] if path else expanded(one.get("value", ""), found)
        return found

    def start(self, pod: Object, running: Running, container: Object) -> None:
        name = container["name"]
        env = self.variables(pod, container, running.sandbox.address)
        argv = [expanded(word, env) for word in [*container["command"], *container.get("args", [])]]
        # The image's.
        env |= {"PATH": f"{self.image / 'bin'}:{self.python}:/usr/sbin:/usr/bin:/sbin:/bin"}
        env |= {"PYTHONPATH": str(self.image / "site-packages"), "PYTHONDONTWRITEBYTECODE": "1"}
        log = self.work / f"{pod['metadata']['name']}-{name}.log"
        with log.open("ab") as stream:
            words = running.sandbox.inside("env", "-i", *(f"{key}={value}" for key, value in env.items()), *argv)
            running.processes[name] = subprocess.Popen(words, stdout=stream, stderr=stream, start_new_session=True)
        running.restarts.setdefault(name, -1)
        running.restarts[name] += 1

    def probe(self, running: Running, asked: Object) -> bool:
        url = f"http://{running.sandbox.address}:{asked['httpGet']['port']}{asked['httpGet']['path']}"
        with contextlib.suppress(OSError, urllib.error.HTTPError):
            return bool(self.opener.open(url, timeout=2).status == 200)
        return False

    def kill(self, running: Running, grace_seconds: float) -> None:
        """Main first, then its sidecars, each with the time that it has."""
        for process in reversed(running.processes.values()):
            end(process, grace_seconds)
        if running.own:
            running.sandbox.end()

    # -- pods ------------------------------------------------------------------------------------------------------

    def admit(self, pod: Object) -> Running:
        about, spec = pod["metadata"], pod["spec"]
        own = not spec.get("hostNetwork")
        sandbox = self.sandbox(about["name"]) if own else self.sandboxes[spec["nodeName"]]
        for volume in spec.get("volumes", []):
            if "configMap" in volume:
                name = volume["configMap"]["name"]
                data = self.kubectl.json("get", "configmap", name, "-n", about["namespace"], "-o", "json")["data"]
                for file, text in data.items():
                    sandbox.write(f"{FILES}/{file}", text)
        account = spec.get("serviceAccountName", "default")
        token = self.kubectl("create", "token", account, "-n", about["namespace"]).strip()
        for name, text in {"token": token, "ca.crt": self.authority, "namespace": about["namespace"]}.items():
            sandbox.write(f"{IDENTITY}/{name}", text)
        return Running(about["labels"].get(COMPONENT, ""), sandbox, own)

    def pod(self, pod: Object) -> None:
        uid, name, space = pod["metadata"]["uid"], pod["metadata"]["name"], pod["metadata"]["namespace"]
        if "deletionTimestamp" in pod["metadata"]:
            if running := self.running.pop(uid, None):
                self.kill(running, pod["metadata"].get("deletionGracePeriodSeconds", 30))
            self.kubectl("delete", "pod", name, "-n", space, "--force", "--grace-period=0", "--ignore-not-found")
            return
        if uid not in self.running:
            self.running[uid] = self.admit(pod)
        running = self.running[uid]
        ready = True
        for container in [*pod["spec"].get("initContainers", []), *pod["spec"]["containers"]]:
            process = running.processes.get(container["name"])
            if process is None or process.poll() is not None:
                if process is not None:
                    end(process, 0)
                self.start(pod, running, container)
            asked = container.get("readinessProbe") or container["startupProbe"]
            if not self.probe(running, asked):
                ready = False
                # What stands after a sidecar waits for it.
                break
        self.say(pod, running, ready)

    def say(self, pod: Object, running: Running, ready: bool) -> None:
        answer = "True" if ready else "False"
        states: list[dict[str, Any]] = [
            {"name": name, "ready": ready, "started": True, "restartCount": count, "image": "x", "imageID": "x"}
            | {"state": {"running": {"startedAt": pod["metadata"]["creationTimestamp"]}}}
            for name, count in running.restarts.items()
        ]
        sidecars = {one["name"] for one in pod["spec"].get("initContainers", [])}
        status = {
            "phase": "Running",
            "podIP": running.sandbox.address,
            "podIPs": [{"ip": running.sandbox.address}],
            "hostIP": self.sandboxes[pod["spec"]["nodeName"]].address,
            "conditions": [{"type": kind, "status": answer} for kind in ("Initialized", "ContainersReady", "Ready")],
            "initContainerStatuses": [one for one in states if one["name"] in sidecars],
            "containerStatuses": [one for one in states if one["name"] not in sidecars],
        }
        text = json.dumps(status)
        if text != running.said:
            self.patch("pod", pod["metadata"]["name"], status, "-n", pod["metadata"]["namespace"])
            running.said = text
