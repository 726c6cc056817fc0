"""The serving image: archives, room, containerd's answers, what a pod found in it.

``ctr``'s answers are as containerd 2.4.2 gave them for archives of ``oci.py``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import oci
import pytest
import yaml
from ansible.module_utils.basic import AnsibleModule
from ansible.module_utils.testing import patch_module_args
from ansible_collections.goodput.spark.plugins.filter.runtime_image import (
    runtime_image_holders,
    runtime_image_lacking,
    runtime_image_space,
)
from ansible_collections.goodput.spark.plugins.module_utils import k3s_cluster, model_manifest, serving
from ansible_collections.goodput.spark.plugins.module_utils import runtime_image as r
from ansible_collections.goodput.spark.plugins.modules import k3s_cluster as cluster_module
from ansible_collections.goodput.spark.plugins.modules import runtime_image as module

ROOT = Path(__file__).resolve().parents[2]
FILES = ROOT / "roles/runtime_image/files"
NAME = "goodput.local/x"
CONTAINERD, KUBECTL = r.Containerd, k3s_cluster.Kubectl
A, B = (f"sha256:{letter * 64}" for letter in "ab")
HEAD = "REF TYPE DIGEST SIZE PLATFORMS LABELS \n"


def table(*images: tuple[str, str, str]) -> str:
    lines = [f"{ref}  {oci.MANIFEST}  {digest} 695.0 B  {platforms} -" for ref, digest, platforms in images]
    return HEAD + "\n".join(lines) + "\n"


class Ctr:
    """A containerd that knows a table of references; importing adds what ``brings`` says."""

    def __init__(self, *images: tuple[str, str, str], brings: Sequence[tuple[str, str, str]] = ()) -> None:
        self.images, self.brings, self.asked = list(images), list(brings), list[str]()

    def __call__(self, argv: Sequence[str], timeout_seconds: float = 0) -> tuple[int, str, str]:
        words = list(argv[2:])
        self.asked.append(" ".join(words[:2]))
        if words[1] == "import":
            self.images += self.brings
        elif words[1] == "tag":
            source = next(image for image in self.images if image[0] == words[-2])
            self.images.append((words[-1], *source[1:]))
        elif words[1] == "remove":
            self.images = [image for image in self.images if image[0] not in words]
        return 0, table(*self.images), ""


# -- archives ------------------------------------------------------------------------------------------------------


def test_an_archive_says_which_images_it_holds_and_for_what(tmp_path: Path) -> None:
    (digest,) = oci.write(tmp_path / "image.tar", "arm64")
    archive = r.read_archive(str(tmp_path / "image.tar"))
    assert archive.images == {digest: ("linux/arm64",)}
    assert r.archive_problem(archive, digest, "linux/arm64") == ""
    index, first, second = oci.write(tmp_path / "both.tar", "arm64", "amd64", nested=True)
    both = r.read_archive(str(tmp_path / "both.tar"))
    assert both.images == {index: ("linux/arm64", "linux/amd64")} and both.inside == {first: index, second: index}


def test_a_digest_that_no_import_makes_a_reference_of_is_refused_with_the_one_to_name(tmp_path: Path) -> None:
    index, inner = oci.write(tmp_path / "image.tar", "arm64", nested=True, saved=True)
    archive = r.read_archive(str(tmp_path / "image.tar"))
    assert archive.images == {index: ("linux/arm64",)} and archive.inside == {inner: index}
    assert r.archive_problem(archive, index, "linux/arm64") == ""
    said = r.archive_problem(archive, inner, "linux/arm64")
    assert f"found {inner} in" in said and f"inside the index {index}; required" in said and f"name {index} in" in said
    # Listed in the index, and not there.
    assert "for linux/arm64; required: linux/s390x" in r.archive_problem(archive, index, "linux/s390x")


def test_another_image_and_another_architecture_are_refused_with_both_named(tmp_path: Path) -> None:
    (digest,) = oci.write(tmp_path / "image.tar", "amd64")
    archive = r.read_archive(str(tmp_path / "image.tar"))
    wrong = r.archive_problem(archive, A, "linux/arm64")
    assert digest in wrong and f"required: {A}" in wrong and "runtime_image_archive" in wrong
    assert "for linux/amd64; required: linux/arm64" in r.archive_problem(archive, digest, "linux/arm64")


def test_half_an_archive_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "image.tar"
    oci.write(path, "arm64", text=b"x" * 100000)
    whole = path.read_bytes()
    for length in (3000, 700, 10):
        path.write_bytes(whole[:length])
        with pytest.raises(r.ImageError, match="required: (an OCI|a whole|the whole)"):
            r.read_archive(str(path))
    path.write_bytes(b"\x28\xb5\x2f\xfd" + whole)
    with pytest.raises(r.ImageError, match="uncompressed tar"):
        r.read_archive(str(path))
    with pytest.raises(r.ImageError, match=r"no .*none.tar.*docker save"):
        r.read_archive(str(tmp_path / "none.tar"))


@pytest.mark.parametrize(
    ("name", "digest", "words"),
    [
        (f"{NAME}:latest", A, "without a tag"),
        ("x", A, "HOST with a dot"),
        (NAME, "latest", "64 hexadecimal digits"),
        (NAME, "", "goodput_kube_choices"),
    ],
)
def test_a_tag_is_no_identity(name: str, digest: str, words: str) -> None:
    with pytest.raises(r.ImageError, match=words):
        r.checked(name, digest)


def test_the_archive_travels_as_a_model_does(tmp_path: Path) -> None:
    (digest,) = oci.write(tmp_path / "image.tar", "arm64")
    given = r.read_archive(str(tmp_path / "image.tar")).as_model(
        digest, model_manifest.sha256_of(str(tmp_path / "image.tar"))
    )
    (model,) = model_manifest.models_of([given])
    folder = tmp_path / model.name
    folder.mkdir()
    (tmp_path / "image.tar").rename(folder / "image.tar")
    assert model_manifest.judge(model, str(tmp_path), {}, full=True).get == []


# -- room ----------------------------------------------------------------------------------------------------------

GIB = 2**30


@pytest.mark.parametrize(
    ("free", "total", "words"),
    [
        (48, 900, "spark1: found 48.0 GiB free"),
        # 2 × 12 + 25 fit, but then the kubelet would delete what no pod uses.
        (117, 1000, "92 % in use after the import; required: less than 92 %"),
        (118, 1000, ""),
    ],
)
def test_room(free: int, total: int, words: str) -> None:
    found = r.space_problem("spark1", free * GIB, total * GIB, 12 * GIB, 25 * GIB, 92)
    assert words in found and bool(found) == bool(words)


def test_holders_are_those_whose_archive_is_the_right_one() -> None:
    answers = {"a": {"manifest": {"x": 1}, "problem": ""}, "b": {"manifest": {}, "problem": ""}, "d": None}
    answers["c"] = {"manifest": {"x": 1}, "problem": "another image"}
    hostvars: dict[str, Any] = {name: {"there": answer} for name, answer in answers.items()} | {"e": {}}
    assert runtime_image_holders(hostvars, list(hostvars), "there") == ["a"]


def test_only_nodes_that_lack_the_image_need_room() -> None:
    full = {"present": False, "free_bytes": GIB, "total_bytes": 100 * GIB}
    hostvars = {"spark1": {"look": {**full, "present": True}}, "spark2": {"look": full}}
    assert runtime_image_lacking(hostvars, ["spark1", "spark2"], "look") == ["spark2"]
    (problem,) = runtime_image_space(hostvars, ["spark2"], "look", 12 * GIB, 25.0, 92)
    assert "spark2: found 1.0 GiB free" in problem and "49.0 GiB (archive 12.0" in problem


# -- containerd ----------------------------------------------------------------------------------------------------


def test_what_is_there_is_read_from_the_table() -> None:
    found = r.parse_images(table((f"{NAME}@{A}", A, "linux/arm64,linux/amd64"), ("k8s.gcr/p:1", B, "linux/arm64")))
    assert [(image.ref, image.digest, image.platforms) for image in found] == [
        (f"{NAME}@{A}", A, ("linux/arm64", "linux/amd64")),
        ("k8s.gcr/p:1", B, ("linux/arm64",)),
    ]


def rows(*images: tuple[str, str, str]) -> str:
    return serving.reason(r.image_checks("spark2", r.parse_images(table(*images)), NAME, A, "linux/arm64"))


def test_one_differing_digest_names_node_found_and_required() -> None:
    assert rows((f"{NAME}@{A}", A, "linux/arm64")) == ""
    said = rows((f"{NAME}@{B}", B, "linux/arm64"))
    assert f"spark2 image {NAME}: found {B}; required {A}; fix: name its archive" in said
    assert "found none" in rows(("goodput.local/other:1", A, "linux/arm64"))
    # The right image under a tag alone is not what pods ask for.
    assert f"found {A}; required {A}" in rows((f"{NAME}:1", A, "linux/arm64"))
    assert "found linux/amd64; required linux/arm64" in rows((f"{NAME}@{A}", A, "linux/amd64"))


def test_an_import_makes_the_reference_that_pods_name() -> None:
    plain = Ctr(brings=[(f"{NAME}@{A}", A, "linux/arm64")])
    r.Containerd(plain).bring("/image.tar", NAME, A)
    assert plain.asked == ["images import", "images list"]
    tagged = Ctr(brings=[(f"{NAME}:1.5.1", A, "linux/arm64")])
    r.Containerd(tagged).bring("/image.tar", NAME, A)
    assert (f"{NAME}@{A}", A, "linux/arm64") in tagged.images
    with pytest.raises(r.ImageError, match=f"no image {A} after the import"):
        r.Containerd(Ctr(brings=[(f"{NAME}@{B}", B, "linux/arm64")])).bring("/image.tar", NAME, A)


def test_removal_touches_only_this_name() -> None:
    there = [(f"{NAME}@{A}", A, "x"), (f"{NAME}:1", B, "x"), ("goodput.local/xy:1", B, "x")]
    assert r.Containerd(Ctr(*there)).remove(NAME, keep=A) == [f"{NAME}:1"]
    ctr = Ctr(*there)
    assert r.Containerd(ctr).remove(NAME, check=True) == [f"{NAME}@{A}", f"{NAME}:1"] and len(ctr.images) == 3
    r.Containerd(ctr).remove(NAME)
    assert ctr.images == there[2:]


def test_names_of_what_was_imported_are_kept_once(tmp_path: Path) -> None:
    path = tmp_path / "goodput/names.json"
    assert r.brought(path) == []
    for name in (NAME, "ghcr.io/plugin", NAME):
        r.note(path, name)
    assert r.brought(path) == [NAME, "ghcr.io/plugin"] and list(path.parent.iterdir()) == [path]


def test_the_kubelets_own_reference_goes_with_the_last_name_of_an_image() -> None:
    kept = [("goodput.local/xy:1", B, "x"), (f"sha256:{'2' * 64}", B, "x")]
    ctr = Ctr((f"{NAME}@{A}", A, "x"), (f"{NAME}:1", B, "x"), (f"sha256:{'1' * 64}", A, "x"), *kept)
    r.Containerd(ctr).remove(NAME)
    assert ctr.images == kept


def test_a_failed_call_says_what_was_called_and_why() -> None:
    with pytest.raises(r.ImageError, match="`k3s ctr images list` ended with 1: no such socket"):
        r.Containerd(lambda argv, timeout_seconds: (1, "", "no such socket")).images()


def run_module(monkeypatch: pytest.MonkeyPatch, ctr: Ctr, capsys: Any, **params: Any) -> dict[str, Any]:
    monkeypatch.setattr(r, "Containerd", lambda: CONTAINERD(ctr))
    monkeypatch.setattr(module, "BINARY", "/bin/sh")
    monkeypatch.setattr(module, "SOCKET", "/dev/null")
    with (
        patch_module_args({"name": NAME, "platform": "linux/arm64", "node": "spark1", **params}),
        pytest.raises(SystemExit),
    ):
        module.main()
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    return answer


def test_the_module_imports_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "image.tar"
    path.write_text("x")
    ctr = Ctr(brings=[(f"{NAME}@{A}", A, "linux/arm64")])
    given = {"state": "imported", "digest": A, "path": str(path)}
    dry = run_module(monkeypatch, ctr, capsys, _ansible_check_mode=True, **given)
    assert dry["changed"] and not dry["present"] and path.exists()
    first = run_module(monkeypatch, ctr, capsys, **given)
    assert first["changed"] and first["present"] and not path.exists()
    path.write_text("x")
    kept = run_module(monkeypatch, Ctr(brings=ctr.brings), capsys, keep=True, **given)
    assert kept["changed"] and path.exists()
    second = run_module(monkeypatch, ctr, capsys, **given)
    assert not second["changed"] and second["reason"] == ""


# -- what is in it -------------------------------------------------------------------------------------------------

SAID = """import lmcache.cuda_ops ok
import nixl ok
version ai-dynamo 1.5.1.post1
version lmcache 0.5.6
device lo
device rocep1s0f0:1
device roceP2p1s0f0:1
end
"""
VERSIONS = {"ai-dynamo": "1.5.1", "lmcache": "0.5.6"}
RAILS = ["rocep1s0f0", "roceP2p1s0f0"]


def test_an_image_as_asked_for_has_no_finding() -> None:
    assert serving.reason(r.probe_checks("spark1", SAID, VERSIONS, RAILS)) == ""
    # One node alone has no rails.
    assert "RDMA" not in str(r.probe_checks("spark1", SAID, VERSIONS, []))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("cuda_ops ok", "cuda_ops ImportError no kernel", "import lmcache.cuda_ops: found ImportError no kernel"),
        ("import nixl ok\n", "", "import nixl: found not said"),
        ("1.5.1.post1", "1.5.10", "ai-dynamo: found 1.5.10; required 1.5.1"),
        ("lmcache 0.5.6", "lmcache none", "lmcache: found none; required 0.5.6"),
        ("device roceP2p1s0f0:1\n", "", "required rocep1s0f0, roceP2p1s0f0; fix: UCX without RDMA takes TCP"),
    ],
)
def test_what_an_image_lacks_is_one_row(old: str, new: str, words: str) -> None:
    said = serving.reason(r.probe_checks("spark1", SAID.replace(old, new), VERSIONS, RAILS))
    assert words in said and said.count("\n") == 0


TCP = "#      Transport: tcp\n#         Device: lo"
RDMA = "".join(f"\n#      Transport: rc_mlx5\n#         Device: {device}:1" for device in RAILS)


def asked(folder: Path, program: str, path: Path) -> serving.Check:
    """The row about UCX, of what the probe says in an "image" whose only programs are in ``folder``."""
    if program:
        (folder / "ucx_info").write_text(f"#!/bin/sh\n{program}\n")
        (folder / "ucx_info").chmod(0o755)
    probe = [sys.executable, "-c", r.PROBE.replace("/usr/local/ucx/bin", str(folder))]
    said = subprocess.run(probe, capture_output=True, text=True, env={"PATH": str(path)}, check=True).stdout
    assert said.endswith("\nend\n")
    (found,) = [row for row in r.probe_checks("spark1", said, {}, RAILS) if "UCX" in row["check"]]
    return found


@pytest.mark.parametrize("beside", [False, True], ids=["on PATH", "in /usr/local/ucx"])
@pytest.mark.parametrize(
    ("program", "ok", "found"),
    [
        (f"[ $1 = -d ] && echo '{TCP}{RDMA}'", True, "lo, roceP2p1s0f0, rocep1s0f0"),
        (f"[ $1 = -d ] && echo '{TCP}'", False, "lo"),
        # A program that can not run is not one that is absent.
        ("exit 1", False, "none"),
    ],
)
def test_a_ucx_that_can_be_asked_must_list_the_rails(
    tmp_path: Path, beside: bool, program: str, ok: bool, found: str
) -> None:
    said = asked(tmp_path, program, tmp_path / "empty" if beside else tmp_path)
    assert (said["ok"], said["found"]) == (ok, found)
    assert ok or "UCX without RDMA takes TCP in silence" in serving.reason([said])


def probed(said: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What the module warns of when a pod printed this; it ends well."""
    told: list[str] = []
    # Where they come out depends on who imported Ansible first.
    monkeypatch.setattr(AnsibleModule, "warn", lambda _module, text: told.append(text))
    monkeypatch.setattr(
        k3s_cluster, "Kubectl", lambda: KUBECTL(run=lambda argv, **_: (0, said if "logs" in argv else "", ""))
    )
    given = {"nodes": {"spark1": {}}, "image": f"{NAME}@{A}", "versions": VERSIONS, "devices": RAILS}
    with patch_module_args({"state": "probed", **given}), pytest.raises(SystemExit) as ended:
        cluster_module.main()
    assert ended.value.code == 0
    return "\n".join(told)


def test_a_ucx_that_can_not_be_asked_is_no_fault_and_a_person_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = asked(tmp_path, "", tmp_path)
    assert said["ok"] and said["found"] == "no ucx_info in the image, not asked"
    unproven = "NIXL's own UCX uses them is not proven"
    assert probed(SAID, monkeypatch) == ""
    assert unproven in probed(re.sub("^device .*", "no ucx_info", SAID, flags=re.M), monkeypatch)


def test_the_question_needs_no_free_gpu() -> None:
    question = cluster_module.question(VERSIONS, RAILS)
    spec = k3s_cluster.probe_pod("spark1", f"{NAME}@{A}", ["rdma/rail0", "rdma/rail1"], question)["spec"]
    assert spec["runtimeClassName"] == "nvidia" and "nvidia.com/gpu" not in str(spec)
    assert spec["containers"][0]["command"][-1] == r.PROBE
    compile(r.PROBE, "probe", "exec")
    assert question.last_word in SAID


def test_the_recipe_takes_nothing_as_the_newest_and_asserts() -> None:
    text = (FILES / "Dockerfile").read_text()
    assert "latest" not in text and "FROM ${BASE}\n" in text and '"lmcache==${LMCACHE}"' in text
    assert "--only-binary :all:" in text and "--no-deps" in text
    assert re.search(r"RUN python3 /tmp/assert_image.py .*ai-dynamo==\$\{DYNAMO\}", text)
    tasks = {task["name"]: task for task in yaml.safe_load((FILES.parent / "tasks/build.yml").read_text())}
    assert tasks["build | Build"]["environment"] == {"BUILDX_NO_DEFAULT_ATTESTATIONS": "1"}


def test_the_recipes_assertions_end_a_build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A dependency that --no-deps left out.
    (tmp_path / "lmcache").write_text("#!/bin/sh\n[ $1 = server ] || { echo no module aiofile >&2; exit 1; }\n")
    (tmp_path / "lmcache").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    spec = importlib.util.spec_from_file_location("assert_image", FILES / "assert_image.py")
    assert spec and spec.loader
    built = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(built)
    said = "\n".join(built.problems([f"pyyaml=={yaml.__version__}", "pytest==0.1", "nothing==1"]))
    assert "lmcache server" not in said and "found `lmcache coordinator --help`: no module aiofile; required" in said
    assert "no lmcache.cuda_ops" in said and "no nixl" in said and "ucx_info" not in said
    # Dynamo's CUDA image has none: that ends no build, but is said.
    assert "no ucx_info in the image" in built.note()
    (tmp_path / "lmcache").rename(tmp_path / "ucx_info")
    assert built.note() == ""
    assert "found pytest" in said and "required: 0.1" in said and "found nothing none" in said and "pyyaml" not in said
