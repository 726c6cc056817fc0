# Apache-2.0 (see LICENSE)
"""Objects of Kubernetes that a role places, and takes away again. Runs on the server, through ``k3s kubectl``.

What was placed is kept in a file, so that an object which is no longer wanted is deleted, and a reset deletes exactly
what a role placed. While objects are placed the file names them and the former ones, and says that it is unfinished: a
run that was broken off is repeated by the next one, or taken back by a reset.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError
from ansible_collections.goodput.spark.plugins.module_utils.kube_charts import begin_failed_again

APPLY = ("apply", "--server-side", "--force-conflicts", "--field-manager=goodput", "--validate=strict")
MANAGED_BY = "app.kubernetes.io/managed-by"

Object = Mapping[str, Any]


def key(item: Object) -> tuple[str, str, str, str]:
    """What makes an object the same one: group, kind, namespace, name. Another version of a group is the same object.

    :raises K3sError: no object, or one without kind or name.
    """
    try:
        version, kind, metadata = str(item["apiVersion"]), str(item["kind"]), item["metadata"]
        group = version.rpartition("/")[0]
        return group, kind, str(metadata.get("namespace", "")), str(metadata["name"])
    except (KeyError, TypeError, AttributeError) as error:
        text = json.dumps(item, default=str)[:200]
        raise K3sError(
            f"found object {text}; required: apiVersion, kind and metadata.name; fix: correct the list of objects"
        ) from error


def document(objects: Sequence[Object], **marks: bool) -> str:
    """The objects as one document, in their order: JSON, which is YAML, too.

    :raises K3sError: an object twice, or one that is none.
    """
    keys = [key(item) for item in objects]
    twice = next((one for one in keys if keys.count(one) > 1), None)
    if twice:
        raise K3sError(f"found {' '.join(filter(None, twice))} twice; required: each object once; fix: remove one")
    return json.dumps({"apiVersion": "v1", "kind": "List", **marks, "items": list(objects)}, indent=1) + "\n"


@contextmanager
def given(objects: Sequence[Object]) -> Iterator[str]:
    """A file with these objects, for one call of kubectl."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        path = Path(folder) / "objects.json"
        path.write_text(document(objects))
        yield str(path)


def gone(former: str, objects: Sequence[Object]) -> list[Object]:
    """Objects of the former document that are no longer wanted, last first."""
    try:
        items: list[Object] = json.loads(former)["items"]
    except (ValueError, KeyError, TypeError):
        return []
    wanted = {key(item) for item in objects}
    return [item for item in reversed(items) if key(item) not in wanted]


@dataclass
class Placer:
    """The objects of one name, with the file that remembers them."""

    kubectl: Kubectl
    path: Path

    def former(self) -> str:
        try:
            return self.path.read_text()
        except FileNotFoundError:
            return ""

    @property
    def half(self) -> Path:
        return self.path.with_name(f".{self.path.name}.new")

    def remember(self, text: str) -> None:
        """Write the record as a whole: half of one would lose what a reset has to delete."""
        self.path.parent.mkdir(mode=0o755, parents=True, exist_ok=True)
        descriptor = os.open(self.half, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "w") as stream:
            os.fchmod(stream.fileno(), 0o600)
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(self.half, self.path)

    def all_there(self, count: int) -> bool:
        try:
            found = self.kubectl("get", "--ignore-not-found", "-o", "name", "-f", str(self.path))
        except K3sError:
            # A kind that the cluster does not know: applying says so.
            return False
        return len(found.split()) == count

    def present(self, objects: Sequence[Object], check: bool = False) -> list[str]:
        """Apply what differs from the last time, delete what is unwanted, begin failed charts again; what was done."""
        text, former = document(objects), self.former()
        if text == former and (check or self.all_there(len(objects))):
            return [] if check else begin_failed_again(self.kubectl, objects)
        leftover = gone(former, objects)
        done = [f"applied {len(objects)} objects"] + [f"deleted {' '.join(key(item)[1:])}" for item in leftover]
        if check:
            return done
        # One that Helm made for a chart of ours has no label yet.
        made = {item.get("spec", {}).get("targetNamespace") for item in gone(former, [])}
        spaces = [item for item in objects if item["kind"] == "Namespace" and item["metadata"]["name"] not in made]
        self.refuse_foreign(spaces)
        self.remember(document([*objects, *reversed(leftover)], unfinished=True))
        with given(objects) as path:
            self.kubectl(*APPLY, "-f", path)
        for item in leftover:
            self.delete(item)
        self.remember(text)
        return done + begin_failed_again(self.kubectl, objects)

    def refuse_foreign(self, namespaces: Sequence[Object]) -> None:
        """A namespace is deleted with all that is in it, so none is taken over.

        :raises K3sError: one that is there without our label.
        """
        for item in namespaces:
            name, wanted = item["metadata"]["name"], item["metadata"].get("labels", {}).get(MANAGED_BY)
            text = self.kubectl("get", "namespace", name, "--ignore-not-found", "-o", "json")
            there = json.loads(text) if text.strip() else {}
            if there and there["metadata"].get("labels", {}).get(MANAGED_BY) != wanted:
                raise K3sError(
                    f"found namespace {name}, which somebody else made; required: one of its own, because it is "
                    "deleted with everything in it; fix: empty it by its own uninstaller and delete it; for the "
                    "graph another name will do (goodput_kube_choices.namespace)"
                )

    def accepted(self, objects: Sequence[Object]) -> None:
        """Ask the API, with its webhooks, whether it would take these objects; nothing is kept.

        :raises K3sError: what it says against them.
        """
        with given(objects) as path:
            self.kubectl(*APPLY, "--dry-run=server", "-f", path)

    def delete(self, item: Object) -> None:
        with given([item]) as path:
            try:
                self.kubectl("delete", "--ignore-not-found", "--wait=true", "-f", path)
            except K3sError as error:
                raise K3sError(
                    f"found {self.left(path)} after the deletion; required: nothing; fix: journalctl -u k3s; what "
                    "has a finalizer waits for its operator (kubectl describe); where the whole cluster is to go, "
                    f"reset with goodput_reset_forget_objects=true\n{error}"
                ) from error

    def left(self, path: str) -> str:
        """Names of the objects in this file that the cluster still has, in words."""
        try:
            names = self.kubectl("get", "--ignore-not-found", "-o", "name", "-f", path).split()
        except K3sError:
            return "no answer of the API"
        return ", ".join(names) or "nothing"

    def absent(self, cluster: bool, check: bool = False) -> list[str]:
        """Delete what was placed, last first. Without a cluster only the file goes."""
        former = self.former()
        if not former:
            return []
        objects = gone(former, [])
        if not check:
            # One after the other: a namespace that goes beside its chart takes away what Helm needs to uninstall it.
            for item in objects if cluster else []:
                self.delete(item)
            self.half.unlink(missing_ok=True)
            self.path.unlink()
        return [f"deleted {' '.join(filter(None, key(item)[1:]))}" for item in objects]
