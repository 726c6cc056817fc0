"""What the kubelet would start from rendered objects, and how that differs from what systemd starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import kube_objects
from serving_units import PROFILES, ROOT, SIZES, Rendered, environment, node, rails, words

RELEASES = ("current", "article")
DIGESTS = {"runtime": "sha256:" + "a" * 64, "rdma_device_plugin": "sha256:" + "b" * 64}
Object = dict[str, Any]

#: What each platform decides for itself, and nothing else may differ: argument or variable -> (systemd, Kubernetes).
ARGUMENTS = {
    "--discovery-backend": ("etcd", "kubernetes"),
    "--coordinator-url": ("http://10.77.0.1:9300", "http://lmcache-coordinator.goodput.svc:9300"),
}
#: They read over rails, which one node alone has not.
OVER_RAILS = ("super-c-p2p", "super-mooncake-dram", "virtual-p2p", "weka-c-p2p")
#: (profile, how many nodes) of every site that can be rendered.
SITES = [(profile, size) for profile in PROFILES for size in SIZES if size > 1 or profile not in OVER_RAILS]
ONLY_SYSTEMD = {"ETCD_ENDPOINTS", "ETCD_STARTUP_CONNECT_TIMEOUT_SECONDS", "PYTHONPATH"}
ONLY_KUBERNETES = {"GOODPUT_NODE", "GOODPUT_ADDRESS", "NVIDIA_VISIBLE_DEVICES"}
PLACES = {"HOME", "DYN_SYSTEM_PORT"}


def release(name: str) -> Object:
    found: Object = yaml.safe_load((ROOT / f"vars/releases/{name}.yml").read_text())["goodput_release_set"]
    return found


def site(size: int, prefix: str = "spark") -> list[Object]:
    """Nodes of a site; one alone has no rails."""
    return [
        {
            "name": f"{prefix}{number}",
            "rails": rails(number) if size > 1 else [],
            "management_address": f"10.77.0.{number}",
        }
        for number in range(1, size + 1)
    ]


def objects_of(rendered: Rendered, profile: str, size: int, name: str = "current", **choices: Any) -> list[Object]:
    """Objects of a profile on the very nodes that the units were rendered for."""
    plan = rendered[node(profile, size, 1)]["plan"]
    return kube_objects(plan, site(size, f"{profile}-{size}-"), release(name), {"digests": DIGESTS, **choices})


def one(objects: Sequence[Object], kind: str, name: str | None = None) -> Object:
    """The only object of a kind."""
    (found,) = [item for item in objects if item["kind"] == kind and name in (None, item["metadata"]["name"])]
    return found


def component(objects: Sequence[Object], name: str) -> Object:
    (found,) = [item for item in one(objects, "DynamoGraphDeployment")["spec"]["components"] if item["name"] == name]
    return dict(found)


@dataclass
class Process:
    words: list[str]
    env: dict[str, str]


def expanded(text: str, env: Mapping[str, str]) -> str:
    """As the kubelet does: ``$(NAME)`` is a variable, ``$$`` is ``$``, an unknown reference stays."""
    return re.sub(
        r"\$(\$|\((\w+)\))",
        lambda match: "$" if match[1] == "$" else env.get(match[2], match[0]),
        text,
    )


def started(container: Object, name: str, address: str, rail_address: str) -> Process:
    """The process of a container on a node."""
    fields = {"spec.nodeName": name, "status.podIP": address}
    env: dict[str, str] = {}
    for item in container["env"]:
        # A reference reaches only what stands before it.
        given = fields[item["valueFrom"]["fieldRef"]["fieldPath"]] if "valueFrom" in item else item["value"]
        env[item["name"]] = given if "valueFrom" in item else expanded(given, env)
    line = [expanded(word, env) for word in (*container["command"], *container["args"])]
    if line[1].endswith(("/start.py", "/memory_gate.py")):
        line = [word.replace("{rail_address}", rail_address) for word in line[line.index("--") + 1 :]]
    return Process(line, env)


def processes(objects: Sequence[Object], size: int, number: int) -> Iterator[tuple[str, Process]]:
    """(unit, process) of everything that runs on a node; frontend and coordinator on the first."""
    worker = component(objects, "worker")["podTemplate"]["spec"]
    names = worker["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    name = names["nodeSelectorTerms"][0]["matchExpressions"][0]["values"][number - 1]
    files = [item["data"] for item in objects if item["metadata"]["name"] == "goodput-files"]
    addresses = json.loads(files[0].get("rails.json", "{}")) if files else {}
    here = (name, f"10.77.0.{number}", addresses.get(name, ""))
    yield "worker", started(worker["containers"][0], *here)
    for container in worker.get("initContainers", []):
        yield "lmcache", started(container, *here)
    if number == 1:
        yield "frontend", started(component(objects, "frontend")["podTemplate"]["spec"]["containers"][0], *here)
        for item in objects:
            if item["kind"] == "Deployment":
                yield "coordinator", started(item["spec"]["template"]["spec"]["containers"][0], *here)


def program(line: Sequence[str]) -> tuple[str, list[str]]:
    """(what runs, its arguments): ``dynamo.vllm`` or ``lmcache server``, however it is started."""
    if line[1] == "-m":
        return line[2], list(line[3:])
    at = 1 if line[0].endswith("python3") else 0
    return f"{Path(line[at]).name} {line[at + 1]}", list(line[at + 2 :])


def differences(systemd: Process, kube: Process) -> list[str]:
    """What both platforms would run differently, apart from what each decides for itself."""
    found = []
    (one_program, ours), (other_program, theirs) = program(systemd.words), program(kube.words)
    if one_program != other_program:
        found.append(f"program {one_program} / {other_program}")
    allowed = [
        ARGUMENTS[ours[index - 1]][0] == have and ARGUMENTS[ours[index - 1]][1] == want
        if index and ours[index - 1] in ARGUMENTS
        else have == want
        for index, (have, want) in enumerate(zip(ours, theirs, strict=False))
    ]
    if len(ours) != len(theirs):
        found.append(f"{len(ours)} / {len(theirs)} arguments")
    found += [f"argument {ours[i]!r} / {theirs[i]!r}" for i, same in enumerate(allowed) if not same]
    for name in sorted(set(systemd.env) | set(kube.env)):
        have, want = systemd.env.get(name), kube.env.get(name)
        expected = (want is None and name in ONLY_SYSTEMD) or (have is None and name in ONLY_KUBERNETES)
        if have != want and not expected and name not in PLACES:
            found.append(f"variable {name} {have!r} / {want!r}")
    return found


def compared(rendered: Rendered, objects: Sequence[Object], profile: str, size: int) -> tuple[int, int, list[str]]:
    """(processes, arguments and variables compared, differences) of a profile on a site."""
    count, values, found = 0, 0, []
    for number in range(1, size + 1):
        name = node(profile, size, number)
        for unit, kube in processes(objects, size, number):
            systemd = Process(words(rendered, name, unit), environment(rendered, name, unit))
            found += [f"{name} {unit}: {text}" for text in differences(systemd, kube)]
            count, values = count + 1, values + len(program(systemd.words)[1]) + len(systemd.env)
    return count, values, found
