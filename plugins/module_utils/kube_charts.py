# Apache-2.0 (see LICENSE)
"""Charts that K3s's Helm controller installs: what one still lacks, and how one that failed is begun again.

Under ``failurePolicy: abort`` a release that failed once stays so: the controller's job looks at its status and does
nothing until a person has been there. Nothing is uninstalled here, because an operator may look after what serves: what
Helm wrote down of failed attempts is deleted, and it installs anew over what they left, or upgrades what was deployed
before them.

Facts: K3s 1.36.4 has k3s-io/helm-controller v0.17.7 (pkg/controllers/chart/chart.go: the job, its name, how often it
tries) and k3s-io/klipper-helm v0.13.3 (entry: what it makes of a release's status), that one Helm 4.1.4
(pkg/storage/driver: a Secret for each revision; pkg/action/upgrade.go: one that failed leaves the former deployed).
"""

from __future__ import annotations

import base64
import contextlib
import gzip
import json
from collections.abc import Mapping, Sequence
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl, condition, items
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError

Object = Mapping[str, Any]

#: Where K3s's controller looks for charts, and makes their jobs.
SYSTEM = "kube-system"
GPU_PLUGIN = "nvidia-device-plugin"
LOG_LINES = 15
REMEDY = (
    "what the lines below say (without the internet, chart_contents and k3s_image_archives), then run again: a failed "
    "chart is then begun again"
)


def failure(release: Object) -> str:
    """What Helm wrote down of a failed attempt; it only explains."""
    try:
        text = gzip.decompress(base64.b64decode(base64.b64decode(release["data"]["release"])))
        return "; ".join(str(json.loads(text)["info"]["description"]).splitlines())
    except (ValueError, KeyError, TypeError, OSError, EOFError):
        return "Helm's release failed"


class Chart:
    """One chart while it is waited for."""

    def __init__(self, kubectl: Kubectl, name: str) -> None:
        self.kubectl, self.name = kubectl, name
        self.job = f"helm-install-{name}"
        #: The last ones of the job's log. Its pod goes with the last attempt, so they are kept.
        self.lines = ""

    def releases(self, namespace: str) -> list[dict[str, Any]]:
        """Helm's revisions, oldest first."""
        found = items(self.kubectl, "secret", "-n", namespace, "-l", f"owner=helm,name={self.name}")
        return sorted(found, key=lambda one: int(one["metadata"]["labels"]["version"]))

    def problem(self) -> tuple[str, bool]:
        """(what the chart still lacks, whether waiting is useless); "" if it is installed, or not in the cluster."""
        for chart in items(self.kubectl, "helmchart", self.name, "-n", SYSTEM, "--show-managed-fields"):
            found, useless = self._problem(chart)
            if found:
                self.listen()
                return found, useless
        return "", False

    def _problem(self, chart: Object) -> tuple[str, bool]:
        """Until Helm has installed what the chart now is, that of before looks ready.

        The controller makes another job for a chart that changed; the API server notes when each field was changed
        last. A job also ends well where it meets another revision than it expected; then the controller makes the next.
        """
        fields = chart["metadata"].get("managedFields", [])
        changed = max((str(one["time"]) for one in fields if "f:spec" in one["fieldsV1"]), default="")
        releases = self.releases(chart["spec"]["targetNamespace"])
        if releases and releases[-1]["metadata"]["labels"]["status"] == "failed":
            return f"chart {self.name} failed: {failure(releases[-1])}", True
        jobs = items(self.kubectl, "job", self.job, "-n", SYSTEM)
        if not jobs:
            return f"chart {self.name} without a job", False
        job = jobs[0]
        if job["metadata"]["creationTimestamp"] < changed:
            return f"job {self.job} from before the last change of chart {self.name}", False
        if condition(job, "Failed") == "True":
            return f"chart {self.name} failed: job {self.job} gave up after its last attempt", True
        return ("", False) if job.get("status", {}).get("succeeded") else (f"job {self.job} not done", False)

    def listen(self) -> None:
        with contextlib.suppress(K3sError):
            said = self.kubectl("logs", "-n", SYSTEM, f"job/{self.job}", f"--tail={LOG_LINES}")
            self.lines = said.strip() or self.lines

    def words(self) -> str:
        self.listen()
        return f"--- job {self.job}, last lines\n{self.lines or '(no log)'}"

    def explained(self) -> list[str]:
        """What is wrong with the chart and what to do, for somebody who waits for what it brings; [] if nothing."""
        problem, _ = self.problem()
        return [f"found {problem}; required: it installed; fix: {REMEDY}\n{self.words()}"] if problem else []

    def begin_again(self, namespace: str) -> None:
        """Nothing on record that keeps Helm from its work, and then another job, which the controller makes at once.

        In this order: a job is told which revision to expect, and leaves another one alone.
        """
        self.kubectl("delete", "secret", "-n", namespace, "-l", f"owner=helm,name={self.name},status=failed")
        self.kubectl("delete", "job", self.job, "-n", SYSTEM, "--ignore-not-found", "--cascade=foreground")


def begin_failed_again(kubectl: Kubectl, objects: Sequence[Object]) -> list[str]:
    """Begin those charts among the objects again that failed; what was done, in words."""
    done = []
    for item in objects:
        if item["kind"] == "HelmChart":
            chart = Chart(kubectl, item["metadata"]["name"])
            problem, useless = chart.problem()
            if useless:
                chart.begin_again(item["spec"]["targetNamespace"])
                done.append(f"began again: {problem}")
    return done
