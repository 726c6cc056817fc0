# Apache-2.0 (see LICENSE)
"""Dynamo's operator and a graph on a cluster: wait for them, say why they are not ready, compare what runs with what
was rendered. Runs on the server, through ``k3s kubectl``; standard library only.

Pods are found by our own labels: the operator's names carry a hash. What runs is judged by the arguments of the pods'
containers, never by a label or by the name of a profile.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl, condition, items
from ansible_collections.goodput.spark.plugins.module_utils.k3s_objects import Placer
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from ansible_collections.goodput.spark.plugins.module_utils.kube_charts import LOG_LINES, REMEDY, Chart
from ansible_collections.goodput.spark.plugins.module_utils.serving import Check, row

Object = Mapping[str, Any]

CHART, PLATFORM_NAMESPACE = "dynamo-platform", "dynamo-system"
GROUP = "nvidia.com"
GRAPHS = f"dynamographdeployments.{GROUP}"
#: Those that both release sets' charts bring and a graph needs.
CRDS = (GRAPHS, f"dynamocomponentdeployments.{GROUP}")
MONITORS = "podmonitors.monitoring.coreos.com"
WORKER, FRONTEND, COORDINATOR = "worker", "frontend", "lmcache-coordinator"
COMPONENT = "app.kubernetes.io/component"
LABEL = "app.kubernetes.io/part-of=goodput"
POLL_SECONDS = 10.0
#: States of a container that no waiting heals: nothing is ever pulled here.
HOPELESS = {"ErrImageNeverPull", "ErrImagePull", "ImagePullBackOff", "InvalidImageName"}
#: As for the units of systemd.
RESTARTS = 3
NO_DIRECTORY = "hostPath type check failed"


# --------------------------------------------------------------------------------------------------------------------
# The operator
# --------------------------------------------------------------------------------------------------------------------


def said(kubectl: Kubectl, *words: str) -> str:
    """An answer that only explains; one that can not be had is no failure of its own."""
    try:
        return kubectl(*words).strip()
    except K3sError:
        return ""


def platform_problem(kubectl: Kubectl, chart: Chart) -> tuple[str, bool]:
    """(what the platform still lacks, whether waiting is useless); "" with CRDs Established and the operator up."""
    problem, useless = chart.problem()
    if problem:
        return problem, useless
    there = {crd["metadata"]["name"]: condition(crd, "Established") for crd in items(kubectl, "crd", *CRDS)}
    for name in CRDS:
        if there.get(name) != "True":
            return f"CRD {name} {'not Established' if name in there else 'missing'}", False
    deployments = items(kubectl, "deployment", "-n", PLATFORM_NAMESPACE)
    if not deployments:
        return f"no Deployment in {PLATFORM_NAMESPACE}", False
    for one in deployments:
        if condition(one, "Available") != "True":
            return f"Deployment {one['metadata']['name']} not Available", False
    return "", False


def platform_words(kubectl: Kubectl, chart: Chart) -> str:
    """The last lines of the chart's job and of the operator, and what keeps pods from running."""
    try:
        pods = items(kubectl, "pods", "-n", PLATFORM_NAMESPACE)
    except K3sError as error:
        return f"{chart.words()}\n{error}"
    return "\n".join([chart.words(), *pod_words(kubectl, PLATFORM_NAMESPACE, pods, always=True)])


def wait_platform(kubectl: Kubectl, timeout_seconds: float, poll_seconds: float = POLL_SECONDS) -> None:
    """:raises K3sError: with what is missing, the numbers, and the operator's last log lines."""
    end, chart = time.monotonic() + timeout_seconds, Chart(kubectl, CHART)
    while True:
        try:
            problem, useless = platform_problem(kubectl, chart)
        except K3sError as error:
            # The API may be away for a moment; at the end of the time it is what was found.
            problem, useless = str(error), False
        if not problem:
            return
        if useless or time.monotonic() >= end:
            raise K3sError(
                f"found {problem}{'' if useless else f' after {timeout_seconds:g} s'}; required: "
                f"{', '.join(CRDS)} Established and the operator Available; fix: {REMEDY}\n"
                f"{platform_words(kubectl, chart)}"
            )
        time.sleep(poll_seconds)


# --------------------------------------------------------------------------------------------------------------------
# Pods
# --------------------------------------------------------------------------------------------------------------------


def name_of(pod: Object) -> str:
    return str(pod["metadata"]["name"])


def component_of(pod: Object) -> str:
    return str(pod["metadata"].get("labels", {}).get(COMPONENT, ""))


def states(pod: Object) -> Iterator[dict[str, Any]]:
    """Status of every container, sidecars first."""
    status = pod.get("status", {})
    yield from status.get("initContainerStatuses", [])
    yield from status.get("containerStatuses", [])


def is_ready(pod: Object) -> bool:
    return condition(pod, "Ready") == "True" and "deletionTimestamp" not in pod["metadata"]


def reasons(pod: Object) -> list[str]:
    """Why a pod is not ready: waiting and ended containers, and what the scheduler says."""
    found = []
    for state in states(pod):
        now = state.get("state", {})
        for kind in ("waiting", "terminated"):
            reason = now.get(kind, {}).get("reason")
            # An init container that has done its work.
            if reason and reason != "Completed":
                found.append(f"{state['name']} {reason}")
        if state.get("restartCount"):
            found.append(f"{state['name']} restarted {state['restartCount']} times")
    found += [
        str(one.get("message", ""))
        for one in pod.get("status", {}).get("conditions", [])
        if one.get("reason") == "Unschedulable"
    ]
    return found


Events = Mapping[str, Sequence[str]]


class Hopes:
    """Pods for which waiting is useless. What had happened before the first look may have been put right since."""

    def __init__(self) -> None:
        self.before: dict[tuple[str, str], int] = {}

    def since(self, pod: Object, what: str, count: int) -> int:
        return count - self.before.setdefault((name_of(pod), what), count)

    def gone(self, pod: Object, events: Sequence[str]) -> str:
        """Why this pod will not come up by waiting; "" if it may."""
        if is_ready(pod):
            return ""
        for state in states(pod):
            reason = state.get("state", {}).get("waiting", {}).get("reason", "")
            if reason in HOPELESS:
                return f"{state['name']}: {reason}"
            restarts = self.since(pod, state["name"], state.get("restartCount", 0))
            if restarts >= RESTARTS:
                return f"{state['name']} restarted {restarts} times"
        missing = [text for text in events if NO_DIRECTORY in text]
        return missing[-1] if self.since(pod, NO_DIRECTORY, len(missing)) else ""


def warnings(kubectl: Kubectl, namespace: str) -> dict[str, list[str]]:
    """By name of the object, its warnings, last one last; one that happened N times stands N times."""
    found: dict[str, list[str]] = {}
    for event in items(kubectl, "events", "-n", namespace, "--field-selector=type=Warning"):
        name = str(event.get("involvedObject", {}).get("name", ""))
        text = f"{event.get('reason', '')}: {event.get('message', '')}"
        found.setdefault(name, []).extend([text] * max(int(event.get("count") or 1), 1))
    return found


def pod_words(kubectl: Kubectl, namespace: str, pods: Sequence[Object], always: bool = False) -> list[str]:
    """Of each pod that is not ready (``always``: of every one): its node, reasons, last event, last log lines."""
    try:
        events = warnings(kubectl, namespace)
    except K3sError:
        events = {}
    found = []
    for pod in pods:
        if is_ready(pod) and not always:
            continue
        where = pod.get("spec", {}).get("nodeName", "no node")
        why = "; ".join(reasons(pod)) or str(pod.get("status", {}).get("phase", ""))
        found.append(f"--- pod {name_of(pod)} on {where}: {why}")
        found += [f"last event: {text}" for text in events.get(name_of(pod), [])[-1:]]
        for state in states(pod):
            if state.get("ready") and not always:
                continue
            words = ["logs", "-n", namespace, name_of(pod), "-c", state["name"], f"--tail={LOG_LINES}"]
            lines = said(kubectl, *words)
            # What has just been started again says nothing yet.
            lines = lines or (said(kubectl, *words, "--previous") if state.get("restartCount") else "")
            if lines:
                found.append(f"{state['name']}, last lines:\n{lines}")
    return found


# --------------------------------------------------------------------------------------------------------------------
# The graph
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Graph:
    """The graph among rendered objects."""

    item: Object

    @classmethod
    def among(cls, objects: Sequence[Object]) -> Graph:
        for item in objects:
            if item.get("kind") == "DynamoGraphDeployment":
                return cls(item)
        raise K3sError("found no DynamoGraphDeployment; required: one; fix: render the part serving")

    @property
    def name(self) -> str:
        return str(self.item["metadata"]["name"])

    @property
    def namespace(self) -> str:
        return str(self.item["metadata"]["namespace"])

    @property
    def components(self) -> dict[str, Object]:
        return {str(one["name"]): one for one in self.item["spec"]["components"]}

    @property
    def grace_seconds(self) -> int:
        """How long a worker may take to stop."""
        return int(self.components[WORKER]["podTemplate"]["spec"].get("terminationGracePeriodSeconds", 0))

    def live(self, kubectl: Kubectl) -> dict[str, Any]:
        """What the cluster has under this name; {} if nothing."""
        found = items(kubectl, GRAPHS, self.name, "-n", self.namespace)
        return found[0] if found else {}

    def pods(self, kubectl: Kubectl, component: str = "") -> list[dict[str, Any]]:
        """Those that may run. One that has ended (evicted, or rejected at boot before a device plugin was up) stays."""
        label = f"{LABEL},{COMPONENT}={component}" if component else LABEL
        found = items(kubectl, "pods", "-n", self.namespace, "-l", label)
        return [pod for pod in found if pod.get("status", {}).get("phase") not in ("Failed", "Succeeded")]


def template(component: Object) -> Any:
    """What makes other pods: everything but how many there are."""
    return {key: value for key, value in component.items() if key != "replicas"}


def workers_change(former: str, graph: Graph) -> bool:
    """Whether the workers of a former document (``k3s_objects`` keeps it) are others than those of this graph."""
    try:
        before = Graph.among(json.loads(former)["items"]).components[WORKER]
    except (ValueError, KeyError, TypeError):
        # Nothing known of it: then what runs is not what is asked for.
        return True
    return bool(template(before) != template(graph.components[WORKER]))


def scale_patch(graph: Object, replicas: int) -> list[dict[str, Any]]:
    """A JSON patch (RFC 6902) that changes only how many workers a graph has."""
    names = [component["name"] for component in graph["spec"]["components"]]
    if WORKER not in names:
        raise K3sError(
            f"found components {', '.join(names)}; required: {WORKER}; fix: delete this graph, it is not ours"
        )
    return [{"op": "replace", "path": f"/spec/components/{names.index(WORKER)}/replicas", "value": replicas}]


def with_replicas(former: str, graph: Graph, live: Object) -> str:
    """The document of what was placed, with as many workers as the cluster has now; the same text where it agrees.

    A run that was broken off after the workers were ended, or a person, changed only their number. The document then no
    longer is what is wanted, so that the next run applies it.
    """
    try:
        document = json.loads(former)
        component = Graph.among(document["items"]).components[WORKER]
        there = Graph(live).components[WORKER].get("replicas", 1)
        if component.get("replicas", 1) == there:
            return former
        component["replicas"] = there  # type: ignore[index]
    except (ValueError, KeyError, TypeError):
        return former
    return json.dumps(document, indent=1) + "\n"


def refuse_monitors(kubectl: Kubectl, objects: Sequence[Object]) -> None:
    """:raises K3sError: PodMonitors are among the objects, and the cluster does not know the kind."""
    if any(item["kind"] == "PodMonitor" for item in objects) and not items(kubectl, "crd", MONITORS):
        raise K3sError(
            f"found no CRD {MONITORS}; required: it, because goodput_kube_choices has pod_monitors: true; fix: install "
            "the Prometheus operator, which brings it, or leave pod_monitors out"
        )


def drain(
    kubectl: Kubectl,
    objects: Sequence[Object],
    placer: Placer,
    timeout_seconds: float,
    check: bool = False,
    poll_seconds: float = 5.0,
) -> bool:
    """End the workers before others come: there is no second GPU, and a pod beside the old one waits for ever.

    All that will be placed is accepted by the API before the old workers end. Replicas do not count as a change of a
    graph. Returns whether workers were, or would be, ended.

    :raises K3sError: objects that are refused, workers that do not end.
    """
    refuse_monitors(kubectl, objects)
    graph = Graph.among(objects)
    live, former = graph.live(kubectl), placer.former()
    if not live:
        return False
    noted = with_replicas(former, graph, live)
    if noted != former and not check:
        placer.remember(noted)
    if not workers_change(former, graph) or not graph.pods(kubectl, WORKER):
        return False
    placer.accepted([item for item in objects if item["kind"] != "Namespace"])
    if check:
        return True
    patch = json.dumps(scale_patch(live, 0))
    kubectl("patch", GRAPHS, graph.name, "-n", graph.namespace, "--type=json", "-p", patch)
    placer.remember(with_replicas(former, graph, graph.live(kubectl)))
    end = time.monotonic() + timeout_seconds
    while pods := graph.pods(kubectl, WORKER):
        if time.monotonic() >= end:
            names = ", ".join(f"{name_of(pod)} on {pod['spec'].get('nodeName', 'no node')}" for pod in pods)
            raise K3sError(
                f"found workers {names} {timeout_seconds:g} s after their number was set to 0; required: none, because "
                "new ones need their GPUs; fix: see what they wait for (kubectl describe), then run again"
            )
        time.sleep(poll_seconds)
    return True


def graph_problem(live: Object, pods: Sequence[Object], replicas: Mapping[str, int]) -> str:
    """What a graph still lacks, component by component; "" if it is ready.

    The condition alone may be of the former generation, and counts alone of a pod that is about to go.
    """
    if not live:
        return "no graph of this name"
    found = []
    for name, wanted in replicas.items():
        ready = sum(component_of(pod) == name and is_ready(pod) for pod in pods)
        if ready < wanted:
            found.append(f"component {name} {ready} of {wanted} ready")
    status = live.get("status", {})
    seen = status.get("observedGeneration")
    if seen is not None and seen < live["metadata"].get("generation", 0):
        found.append("the operator has not seen the last change")
    for one in status.get("conditions", []):
        if one["type"] == "Ready" and one["status"] != "True":
            found.append(f"Ready={one['status']} ({one.get('reason', '')}: {one.get('message', '')})")
    if not any(one["type"] == "Ready" for one in status.get("conditions", [])):
        found.append("without a Ready condition")
    return "; ".join(found)


def replicas_of(objects: Sequence[Object]) -> dict[str, int]:
    """How many pods each component must have: the graph's, and Deployments beside it."""
    found = {name: int(one.get("replicas", 1)) for name, one in Graph.among(objects).components.items()}
    deployments = [item for item in objects if item["kind"] == "Deployment"]
    return found | {name_of(item): int(item["spec"].get("replicas", 1)) for item in deployments}


def wait_graph(
    kubectl: Kubectl, objects: Sequence[Object], timeout_seconds: float, poll_seconds: float = POLL_SECONDS
) -> None:
    """:raises K3sError: which component, which event, which last log lines."""
    graph, replicas, hopes = Graph.among(objects), replicas_of(objects), Hopes()
    end = time.monotonic() + timeout_seconds
    while True:
        pods: list[dict[str, Any]] = []
        events: Events = {}
        try:
            pods = graph.pods(kubectl)
            problem = graph_problem(graph.live(kubectl), pods, replicas)
            events = warnings(kubectl, graph.namespace) if problem else {}
        except K3sError as error:
            problem = str(error)
        if not problem:
            return
        useless = [f"{name_of(pod)} {why}" for pod in pods if (why := hopes.gone(pod, events.get(name_of(pod), [])))]
        if useless or time.monotonic() >= end:
            after = f"; no use to wait: {'; '.join(useless)}" if useless else f" after {timeout_seconds:g} s"
            own = [f"last event of the graph: {text}" for text in events.get(graph.name, [])[-1:]]
            raise K3sError(
                f"found {graph.namespace}/{graph.name}: {problem}{after}; required: Ready with "
                f"{', '.join(f'{count} {name}' for name, count in replicas.items())}; fix: what the lines below say\n"
                + "\n".join([*own, *pod_words(kubectl, graph.namespace, pods)])
            )
        time.sleep(poll_seconds)


# --------------------------------------------------------------------------------------------------------------------
# What runs
# --------------------------------------------------------------------------------------------------------------------


def containers(spec: Object) -> dict[str, Object]:
    return {str(one["name"]): one for one in [*spec.get("initContainers", []), *spec.get("containers", [])]}


def templates(objects: Sequence[Object]) -> dict[str, Object]:
    """Pod specs by component: the graph's, and those of Deployments."""
    found = {name: one["podTemplate"]["spec"] for name, one in Graph.among(objects).components.items()}
    for item in objects:
        if item["kind"] == "Deployment":
            found[str(item["metadata"]["name"])] = item["spec"]["template"]["spec"]
    return found


def planned_nodes(objects: Sequence[Object]) -> list[str]:
    """The nodes that must have a worker each: those that the graph's workers may run on."""
    affinity = templates(objects)[WORKER]["affinity"]["nodeAffinity"]
    (term,) = affinity["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    return [str(name) for name in term["matchExpressions"][0]["values"]]


def devices(objects: Sequence[Object]) -> list[str]:
    """The devices that a worker asks for, over all its containers."""
    limits = [one.get("resources", {}).get("limits", {}) for one in containers(templates(objects)[WORKER]).values()]
    return sorted({str(name) for each in limits for name in each})


def endpoint_port(objects: Sequence[Object]) -> int:
    """The port on every node at which clients reach the frontend; 0 if there is none."""
    ports = [port for item in objects if item["kind"] == "Service" for port in item["spec"].get("ports", [])]
    return next((int(port["nodePort"]) for port in ports if port.get("nodePort")), 0)


def argument_words(found: Sequence[str], wanted: Sequence[str]) -> str:
    """The first place where two argument lists differ; "" where they are the same."""
    for index, (have, want) in enumerate(zip(found, wanted, strict=False)):
        if have != want:
            flag = next((word for word in reversed(wanted[:index]) if word.startswith("--")), "")
            return f"{have!r} instead of {want!r}{f' after {flag}' if flag and not want.startswith('--') else ''}"
    if len(found) != len(wanted):
        longer, word = (found, "more") if len(found) > len(wanted) else (wanted, "missing")
        return f"{word}: {' '.join(longer[min(len(found), len(wanted)) :])}"
    return ""


def differences(have: Object, want: Object) -> list[str]:
    """Where a running container is not what was rendered. The operator adds variables; ours must be as rendered."""
    found = []
    for key in ("image", "command", "args"):
        if key == "image":
            words = "" if have.get(key) == want.get(key) else f"{have.get(key)} instead of {want.get(key)}"
        else:
            words = argument_words(have.get(key, []), want.get(key, []))
        found += [f"{key}: {words}"] if words else []
    # The last one of a name counts.
    there = {one["name"]: one for one in have.get("env", [])}
    for one in want.get("env", []):
        other = there.get(one["name"])
        if other is None:
            found.append(f"variable {one['name']} missing")
        elif "value" in one and other.get("value", "") != one["value"]:
            found.append(f"variable {one['name']}={other.get('value', '')} instead of {one['value']}")
    return found


def running_checks(pods: Sequence[Object], objects: Sequence[Object], nodes: Sequence[str]) -> list[Check]:
    """Rows: one worker on each node, and every container of every component started as rendered."""
    pods = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
    where = sorted(str(pod["spec"].get("nodeName", "")) for pod in pods if component_of(pod) == WORKER)
    again = "run playbooks/kube_serving.yml"
    rows = [
        row(
            "nodes with a worker",
            ", ".join(where) or "none",
            ", ".join(sorted(nodes)),
            "one worker on each: see `kubectl get pods -o wide`, and cordoned nodes",
        )
    ]
    for component, spec in templates(objects).items():
        mine = [pod for pod in pods if component_of(pod) == component]
        if not mine:
            rows.append(row(f"pods of {component}", "none", "at least one", again))
        for pod in mine:
            have = containers(pod["spec"])
            for name, want in containers(spec).items():
                wrong = differences(have[name], want) if name in have else ["no such container"]
                place = f"{pod['spec'].get('nodeName', '')} {component} {name}"
                rows.append(
                    row(place, "; ".join(wrong) or "as rendered", "as rendered", f"delete this pod, or {again}")
                )
    return rows


def settled_checks(
    kubectl: Kubectl,
    objects: Sequence[Object],
    nodes: Sequence[str],
    timeout_seconds: float,
    poll_seconds: float = POLL_SECONDS,
) -> list[Check]:
    """``running_checks``, once all are good or the time is over: a pod of before may still be ready after a change."""
    graph, end = Graph.among(objects), time.monotonic() + timeout_seconds
    while True:
        checks = running_checks(graph.pods(kubectl), objects, nodes)
        if all(check["ok"] for check in checks) or time.monotonic() >= end:
            return checks
        time.sleep(poll_seconds)


# --------------------------------------------------------------------------------------------------------------------
# Away with it
# --------------------------------------------------------------------------------------------------------------------


def remove_crds(kubectl: Kubectl, check: bool = False) -> list[str]:
    """Delete the operator's CRDs, which its chart leaves behind; their names.

    :raises K3sError: graphs of somebody else's would go with them.
    """
    names = [
        name
        for crd in items(kubectl, "crd")
        if (name := str(crd["metadata"]["name"])).startswith("dynamo") and name.endswith(f".{GROUP}")
    ]
    if GRAPHS in names:
        left = [f"{one['metadata']['namespace']}/{name_of(one)}" for one in items(kubectl, GRAPHS, "--all-namespaces")]
        if left:
            raise K3sError(
                f"found graphs {', '.join(left)}; required: none, because they would go with the CRDs; "
                "fix: delete them, or leave the operator (--skip-tags kube_serving)"
            )
    if names and not check:
        kubectl("delete", "crd", "--ignore-not-found", *names)
    return names
