"""A chart that failed once: begun again by the next run, and said where its GPUs are waited for."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import k3s_objects, kube_charts
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.modules import k3s_cluster

Object = dict[str, Any]
CHART: Object = {
    "apiVersion": "helm.cattle.io/v1",
    "kind": "HelmChart",
    "metadata": {"name": kube_charts.GPU_PLUGIN, "namespace": "kube-system"},
    "spec": {"targetNamespace": "kube-system"},
}
JOB = f"helm-install-{kube_charts.GPU_PLUGIN}"


class Cluster:
    """Keeps a chart, its job and Helm's revisions, by status; makes no other job: that is the controller's work."""

    def __init__(self, *revisions: str, **job: str) -> None:
        self.revisions = list(revisions)
        conditions = [{"type": kind, "status": status} for kind, status in job.items()]
        about = {"name": JOB, "creationTimestamp": "2026-01-01T00:00:06Z"}
        self.jobs: list[Object] = [{"metadata": about, "status": {"conditions": conditions}}]
        self.applied = 0

    def __call__(self, argv: Sequence[str], timeout_seconds: float = 0) -> tuple[int, str, str]:
        verb, what, *words = argv[2:]
        if verb == "apply":
            self.applied += 1
        elif verb == "delete" and what == "secret":
            assert "owner=helm,name=nvidia-device-plugin,status=failed" in words
            self.revisions = [status for status in self.revisions if status != "failed"]
        elif verb == "delete" and what == "job":
            assert words[0] == JOB
            self.jobs = []
        elif verb == "get" and "-f" in argv:
            return 0, "helmchart.helm.cattle.io/nvidia-device-plugin\n", ""
        elif verb == "get":
            labels = [{"version": str(at + 1), "status": status} for at, status in enumerate(self.revisions)]
            secrets = [{"metadata": {"labels": each}} for each in labels]
            node = {"metadata": {"name": "spark1"}, "status": {"allocatable": {}}}
            found = {"helmchart": [CHART], "secret": secrets, "job": self.jobs, "nodes": [node]}
            return 0, json.dumps({"items": found.get(what, [])}), ""
        return 0, "no such host" if verb == "logs" else "", ""


@pytest.fixture
def placer(tmp_path: Path) -> k3s_objects.Placer:
    found = k3s_objects.Placer(Kubectl(run=Cluster()), tmp_path / "plugins.json")
    found.path.write_text(k3s_objects.document([CHART]))
    return found


@pytest.mark.parametrize(
    ("revisions", "job", "left"),
    [
        # Under abort the job's attempts look at the status alone.
        (["failed"], {}, []),
        (["deployed", "failed", "failed"], {}, ["deployed"]),
        (["deployed", "failed"], {"Complete": "True"}, ["deployed"]),
        # The chart could not be fetched: there is no revision.
        ([], {"Failed": "True"}, []),
        (["deployed"], {"Failed": "True"}, ["deployed"]),
    ],
)
def test_a_failed_chart_is_begun_again_by_the_next_run(
    placer: k3s_objects.Placer, revisions: list[str], job: dict[str, str], left: list[str]
) -> None:
    cluster = Cluster(*revisions, **job)
    placer.kubectl = Kubectl(run=cluster)
    assert placer.present([CHART], check=True) == [] and cluster.jobs
    (done,) = placer.present([CHART])
    assert done.startswith("began again: chart nvidia-device-plugin failed: ")
    assert (cluster.jobs, cluster.revisions, cluster.applied) == ([], left, 0)
    assert placer.present([CHART]) == []


def test_a_chart_that_is_installed_or_being_installed_is_left_alone(placer: k3s_objects.Placer) -> None:
    for cluster in (Cluster("failed", "deployed", Complete="True"), Cluster("pending-install"), Cluster()):
        placer.kubectl = Kubectl(run=cluster)
        before = list(cluster.revisions)
        assert placer.present([CHART]) == []
        assert cluster.jobs and cluster.revisions == before


def test_a_chart_that_was_changed_because_it_failed_is_begun_again_too(placer: k3s_objects.Placer) -> None:
    cluster = Cluster("failed")
    placer.kubectl = Kubectl(run=cluster)
    changed = CHART | {"spec": CHART["spec"] | {"chartContent": "QUJD"}}
    done = placer.present([changed])
    assert done[0] == "applied 1 objects" and done[1].startswith("began again: ")
    assert (cluster.jobs, cluster.revisions, cluster.applied) == ([], [], 1)


def test_the_wait_for_gpus_ends_with_a_failed_chart() -> None:
    wanted = {"spark1": {"nvidia.com/gpu": "1"}}
    rows, problem = k3s_cluster.offered(Kubectl(run=Cluster(Failed="True")), wanted, 3600)
    assert [row["ok"] for row in rows] == [False] and "spark1 nvidia.com/gpu" in problem
    assert f"found chart nvidia-device-plugin failed: job {JOB} gave up after its last attempt" in problem
    assert f"then run again: a failed chart is then begun again\n--- job {JOB}, last lines\nno such host" in problem
    # One that Helm still tries to install is waited for, and named when the time is over.
    _, problem = k3s_cluster.offered(Kubectl(run=Cluster()), wanted, 0)
    assert f"found job {JOB} not done; required" in problem and "no such host" in problem
    # With nothing wrong with the chart, it is not spoken of.
    cluster = Cluster("deployed")
    cluster.jobs[0]["status"] = {"succeeded": 1}
    _, problem = k3s_cluster.offered(Kubectl(run=cluster), wanted, 0)
    assert "spark1 nvidia.com/gpu" in problem and "chart" not in problem
