"""Objects that a role places: applied when they differ, deleted when they are no longer wanted."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import k3s_objects as o
from ansible_collections.goodput.spark.plugins.module_utils.k3s_cluster import Kubectl
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError


def thing(name: str, version: str = "v1", kind: str = "ConfigMap", **more: Any) -> dict[str, Any]:
    return {"apiVersion": version, "kind": kind, "metadata": {"name": name, "namespace": "kube-system"}, **more}


class Cluster:
    """Keeps what is applied by kind and name; refuses a planted field."""

    def __init__(self) -> None:
        self.there: list[str] = []
        self.asked: list[str] = []

    def __call__(
        self, argv: Sequence[str], stdin: str | None = None, timeout_seconds: float = 0
    ) -> tuple[int, str, str]:
        verb, path = argv[2], Path(argv[-1])
        self.asked.append(verb)
        items = json.loads(path.read_text())["items"]
        names = [f"{item['kind']}/{item['metadata']['name']}" for item in items]
        if verb == "apply":
            assert "--validate=strict" in argv
            if any("planted" in item for item in items):
                return 1, "", "unknown field"
            self.there += [name for name in names if name not in self.there]
        elif verb == "delete":
            self.there = [name for name in self.there if name not in names]
        return 0, "\n".join(name for name in names if name in self.there), ""


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


@pytest.fixture
def placer(cluster: Cluster, tmp_path: Path) -> o.Placer:
    return o.Placer(Kubectl(run=cluster), tmp_path / "kubernetes/plugins.json")


def test_a_second_run_changes_nothing(placer: o.Placer, cluster: Cluster) -> None:
    assert placer.present([thing("a"), thing("b")]) == ["applied 2 objects"]
    assert f"{placer.path.stat().st_mode & 0o777:04o}" == "0600"
    assert placer.present([thing("a"), thing("b")]) == []
    assert cluster.asked == ["apply", "get"]


def test_a_namespace_of_somebody_else_is_not_taken_over(tmp_path: Path) -> None:
    asked: list[str] = []
    there: dict[str, Any] = {"metadata": {"name": "x", "labels": {"kubernetes.io/metadata.name": "x"}}}

    def run(argv: Sequence[str], **_: object) -> tuple[int, str, str]:
        asked.append(argv[2])
        return (0, json.dumps(there), "") if argv[2:4] == ["get", "namespace"] else (0, "", "")

    ours = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x", "labels": {o.MANAGED_BY: "goodput"}}}
    placer = o.Placer(Kubectl(run=run), tmp_path / "serving.json")
    with pytest.raises(K3sError, match="found namespace x, which somebody else made"):
        placer.present([ours])
    assert asked == ["get"] and not placer.path.exists()
    # One that a broken-off run of ours made.
    there["metadata"]["labels"][o.MANAGED_BY] = "goodput"
    assert placer.present([ours]) == ["applied 1 objects"]


def test_a_namespace_that_helm_made_for_our_chart_is_ours(tmp_path: Path) -> None:
    there = {"metadata": {"name": "x", "labels": {}}}

    def run(argv: Sequence[str], **_: object) -> tuple[int, str, str]:
        return (0, json.dumps(there), "") if argv[2:4] == ["get", "namespace"] else (0, "", "")

    chart = thing("a", kind="HelmChart", spec={"targetNamespace": "x"})
    ours = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "x", "labels": {o.MANAGED_BY: "goodput"}}}
    placer = o.Placer(Kubectl(run=run), tmp_path / "platform.json")
    with pytest.raises(K3sError, match="somebody else made"):
        placer.present([ours, chart])
    placer.present([chart])
    assert placer.present([ours, chart]) == ["applied 2 objects"]


def test_an_object_that_somebody_deleted_comes_back(placer: o.Placer, cluster: Cluster) -> None:
    placer.present([thing("a"), thing("b")])
    cluster.there.remove("ConfigMap/b")
    assert placer.present([thing("a"), thing("b")]) == ["applied 2 objects"]
    assert cluster.there == ["ConfigMap/a", "ConfigMap/b"]


def test_what_is_no_longer_wanted_goes(placer: o.Placer, cluster: Cluster) -> None:
    placer.present([thing("a"), thing("b")])
    assert placer.present([thing("a", data={"x": "y"})]) == ["applied 1 objects", "deleted ConfigMap kube-system b"]
    assert cluster.there == ["ConfigMap/a"]
    # Another version of the same group is the same object.
    placer.present([thing("a", version="apps/v1", kind="DaemonSet")])
    assert o.gone(placer.former(), [thing("a", version="apps/v2", kind="DaemonSet")]) == []


def test_a_refused_object_is_on_record_beside_the_former_ones(placer: o.Placer, cluster: Cluster) -> None:
    placer.present([thing("a"), thing("b")])
    with pytest.raises(K3sError, match="unknown field"):
        placer.present([thing("c"), thing("a", planted=1)])
    assert list(placer.path.parent.iterdir()) == [placer.path]
    # Whatever the API had taken of them by then goes with a reset, and with a run for which they are not wanted.
    assert [item["metadata"]["name"] for item in o.gone(placer.former(), [])] == ["b", "a", "c"]
    assert set(placer.present([thing("d")])[1:]) == {f"deleted ConfigMap kube-system {name}" for name in "abc"}
    assert cluster.there == ["ConfigMap/d"] and "unfinished" not in placer.former()


class Killed(BaseException):
    """Nothing of the run happens after it, as after SIGKILL."""


@pytest.mark.parametrize("took", [False, True], ids=["before the call", "after it"])
@pytest.mark.parametrize("reset", [False, True], ids=["again", "reset"])
def test_a_run_killed_at_any_call_is_repeated_or_taken_back(
    placer: o.Placer, cluster: Cluster, took: bool, reset: bool
) -> None:
    former, wanted = [thing("a"), thing("b"), thing("c")], [thing("a", data={"x": "y"}), thing("d")]
    alive, calls = placer.kubectl, 0
    for at in range(1, 4):
        calls = 0

        def dying(argv: Sequence[str], at: int = at, **more: Any) -> tuple[int, str, str]:
            nonlocal calls
            calls += 1
            answer = cluster(argv, **more) if calls < at or took else (0, "", "")
            if calls == at:
                raise Killed
            return answer

        placer.present(former)
        placer.kubectl = Kubectl(run=dying)
        with pytest.raises(Killed):
            placer.present(wanted)
        placer.kubectl = alive
        if reset:
            placer.absent(cluster=True)
            assert cluster.there == [] and not list(placer.path.parent.iterdir())
        else:
            assert placer.present(wanted) and not placer.present(wanted)
            assert sorted(cluster.there) == ["ConfigMap/a", "ConfigMap/d"]
    # One to apply, two to delete: each was the last one once.
    assert calls == 3


def test_absent_takes_away_what_was_placed_last_first(placer: o.Placer, cluster: Cluster) -> None:
    placer.present([thing("a"), thing("b")])
    assert placer.absent(cluster=True, check=True) == [
        "deleted ConfigMap kube-system b",
        "deleted ConfigMap kube-system a",
    ]
    assert cluster.there
    cluster.asked.clear()
    placer.absent(cluster=True)
    assert cluster.there == [] and not list(placer.path.parent.iterdir())
    # Each alone: what the first needs to go is in the second.
    assert cluster.asked == ["delete", "delete"]
    assert placer.absent(cluster=True) == []


def test_what_does_not_go_is_named_with_the_way_out(placer: o.Placer, cluster: Cluster) -> None:
    placer.present([thing("a")])
    answer = cluster.__call__

    def stuck(argv: Sequence[str], **more: Any) -> tuple[int, str, str]:
        return (1, "", "timed out waiting") if argv[2] == "delete" else answer(argv, **more)

    placer.kubectl = Kubectl(run=stuck)
    with pytest.raises(
        K3sError, match=r"found ConfigMap/a after the deletion.*goodput_reset_forget_objects=true\n.*timed out"
    ):
        placer.absent(cluster=True)
    placer.kubectl = Kubectl(run=lambda *_, **__: (1, "", "refused"))
    with pytest.raises(K3sError, match="found no answer of the API after the deletion"):
        placer.absent(cluster=True)
    # Still known: nothing is lost.
    assert placer.path.exists()


def test_without_a_cluster_only_the_record_goes(placer: o.Placer, cluster: Cluster) -> None:
    placer.present([thing("a")])
    cluster.asked.clear()
    assert placer.absent(cluster=False)
    assert cluster.asked == [] and not placer.path.exists()


def test_what_is_no_object_is_refused() -> None:
    with pytest.raises(K3sError, match="metadata.name"):
        o.document([{"kind": "ConfigMap"}])
    with pytest.raises(K3sError, match="found ConfigMap kube-system a twice"):
        o.document([thing("a"), thing("a")])


def test_check_mode_asks_nobody(placer: o.Placer, cluster: Cluster) -> None:
    assert placer.present([thing("a")], check=True) == ["applied 1 objects"]
    assert cluster.asked == [] and not placer.path.exists()
