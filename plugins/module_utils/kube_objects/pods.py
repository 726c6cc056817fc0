# Apache-2.0 (see LICENSE)
"""Parts of pods. Arguments and environment are those of the systemd units: the same functions of ``serving`` fill in
the same plan, only that here the kubelet knows the node.

The kubelet replaces ``$(NAME)`` in arguments by the container's variable NAME, and ``$$`` by ``$``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

from .. import serving
from ..kv_plan.checks import PlanInputError, ceil_div

Object = dict[str, Any]

#: What differs from node to node, and where the kubelet finds it. On the host's network a pod's address is the node's.
FIELDS = {"GOODPUT_NODE": "spec.nodeName", "GOODPUT_ADDRESS": "status.podIP"}
NODE, ADDRESS = (f"$({name})" for name in FIELDS)
PYTHON_ENVIRONMENT = {"PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONUNBUFFERED": "1"}

LABELS = {"app.kubernetes.io/managed-by": "goodput", "app.kubernetes.io/part-of": "goodput"}
TOLERATIONS = [{"key": "node-role.kubernetes.io/control-plane", "operator": "Exists", "effect": "NoSchedule"}]

#: Where pods have the files of our ConfigMap.
FILES = "/etc/goodput-files"


def escaped(value: Any) -> Any:
    """Text as the kubelet will leave it; ``$`` is its operator."""
    return value.replace("$", "$$") if isinstance(value, str) else value


def words(plan_words: Sequence[Any], values: Mapping[str, Any], ours: Mapping[str, Any] | None = None) -> list[str]:
    """The plan's argument list for a pod; see ``serving.arguments``. ``values`` are ready for the kubelet."""
    return serving.arguments([escaped(word) for word in plan_words], values, ours)


def environment(variables: Mapping[str, Any], values: Mapping[str, Any]) -> list[Object]:
    """The plan's variables for a container, after those of FIELDS.

    A variable that is one of FIELDS asks for the field itself: Dynamo's operator merges lists of variables, and a
    reference is replaced only if it stands after what it refers to.
    """
    found: list[Object] = [_field(name, path) for name, path in FIELDS.items()]
    filled = serving.environment_values({name: escaped(value) for name, value in variables.items()}, values)
    for name, text in filled.items():
        whole = [path for key, path in FIELDS.items() if text == f"$({key})"]
        if whole:
            found.append(_field(name, whole[0]))
        elif any(f"$({key})" in text for key in FIELDS):
            rule = "must be {node} or {management_address} alone, not within other text"
            raise PlanInputError(f"environment variable {name}", variables[name], rule, "change extra_env")
        else:
            found.append({"name": name, "value": text})
    return found


def _field(name: str, path: str) -> Object:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def memory(budget: Mapping[str, Any], *names: str) -> str:
    """Lines of a plan's budget as a quantity. A request, never a limit: limits do not see CUDA's memory."""
    return f"{ceil_div(sum(line['bytes'] for line in budget['lines'] if line['name'] in names), 2**20)}Mi"


def probe(path: str, port: int, *, period: int = 10, timeout: int = 10, failures: int) -> Object:
    return {
        "httpGet": {"path": path, "port": port},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def probes(live: str, ready: str, port: int, start_seconds: int) -> Object:
    """All three, so that no default of somebody else's holds: one slow answer must not end an engine of 75 GB."""
    return {
        "startupProbe": probe(live, port, failures=ceil_div(start_seconds, 10)),
        "livenessProbe": probe(live, port, failures=6),
        "readinessProbe": probe(ready, port, failures=3),
    }


def checksum(data: Mapping[str, str]) -> str:
    """Changes when a ConfigMap does; as an annotation of pods it makes other ones, which read the new content."""
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()


def host_path(name: str, path: str, kind: str) -> Object:
    return {"name": name, "hostPath": {"path": path, "type": kind}}


def mount(name: str, path: str, **more: Any) -> Object:
    return {"name": name, "mountPath": path, **more}


def metadata(name: str, namespace: str, **labels: str) -> Object:
    return {"name": name, "namespace": namespace, "labels": LABELS | labels}
