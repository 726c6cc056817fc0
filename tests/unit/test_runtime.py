"""What role runtime says about an archive, a mount and a node. Trees and mountinfo are as a guest gave them."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from ansible.module_utils.testing import patch_module_args
from ansible_collections.goodput.spark.plugins.module_utils import runtime
from ansible_collections.goodput.spark.plugins.modules import runtime_archive as module

SUM = "a" * 64
OTHER = "b" * 64
PATH = "/media/goodput/runtime.squashfs"
OPTIONS = "ro,loop,nofail,nodev,nosuid"
MOUNTINFO = (
    "29 1 253:0 / / rw,noatime shared:1 - ext4 /dev/vda rw\n"
    "61 29 7:3 / /opt/goodput/runtime ro,nosuid,nodev,relatime shared:30 - squashfs /dev/loop3 ro,errors=continue\n"
)
REQUIRED = runtime.Required(SUM, "virtual", "1.6.1", "0.5.6", "3.11")
SYSTEM = runtime.System("x86_64", "3.11", frozenset({"avx2"}), ())
ARCHIVE = runtime.Archive(PATH, True, SUM)
VERSION = {"release": "virtual", "dynamo": "1.6.1", "lmcache": "0.5.6", "arch": "x86_64", "python": "3.11"}
MOUNT = runtime.Mount("/opt/goodput/runtime", True, "squashfs", PATH, True, True, 0, VERSION)


def texts(findings: Any) -> str:
    return "\n".join(str(finding) for finding in findings)


def test_a_runtime_as_asked_for_has_no_finding() -> None:
    assert runtime.preflight(ARCHIVE, MOUNT, SYSTEM, REQUIRED, False) == []
    assert runtime.verify(ARCHIVE, MOUNT, SYSTEM, REQUIRED, False) == []


def test_another_archive_names_both_sums_and_the_remedy() -> None:
    other = replace(ARCHIVE, sha256=OTHER)
    for judge in (runtime.preflight, runtime.verify):
        text = texts(judge(other, MOUNT, SYSTEM, REQUIRED, True))
        assert f"found {PATH} with sha256 {OTHER}" in text
        assert f"required: sha256 {SUM}" in text and f"rm -f {PATH}" in text
        text = texts(judge(other, MOUNT, SYSTEM, REQUIRED, False))
        assert "put the right archive there" in text and "rm -f" not in text


def test_a_missing_archive_is_a_finding_unless_it_is_still_to_be_copied() -> None:
    missing = runtime.Archive(PATH, False)
    bare = runtime.Mount("/opt/goodput/runtime", False)
    assert runtime.preflight(missing, bare, SYSTEM, REQUIRED, True) == []
    assert "no file " + PATH in texts(runtime.preflight(missing, bare, SYSTEM, REQUIRED, False))
    assert "nothing mounted" in texts(runtime.verify(missing, bare, SYSTEM, REQUIRED, True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"mounted": False}, "nothing mounted at /opt/goodput/runtime"),
        ({"source": "/old.squashfs"}, "/old.squashfs at /opt/goodput/runtime"),
        ({"source": PATH + " (deleted)"}, "(deleted)"),
        ({"read_only": False}, "writable"),
        ({"fstab": False}, "/etc/fstab"),
        ({"version": None}, "a readable VERSION.json"),
        ({"missing": ("site-packages/torch",)}, "without site-packages/torch"),
        ({"version": {**VERSION, "dynamo": "1.5.1"}}, "dynamo 1.5.1 in /opt/goodput/runtime/VERSION.json"),
        ({"version": {**VERSION, "lmcache": "0.5.2"}}, "required: lmcache 0.5.6"),
        ({"version": {**VERSION, "arch": "aarch64"}}, "required: arch x86_64"),
        ({"version": {**VERSION, "python": "3.12"}}, "required: python 3.11"),
        ({"version": {}}, "release not named in"),
    ],
)
def test_verify_names_what_is_wrong_with_the_mount(change: dict[str, Any], said: str) -> None:
    findings = runtime.verify(ARCHIVE, replace(MOUNT, **change), SYSTEM, REQUIRED, False)
    assert len({finding.check for finding in findings}) == 1
    assert said in texts(findings)


def test_a_bare_directory_with_files_in_it_is_not_mounted_over() -> None:
    bare = runtime.Mount("/opt/goodput/runtime", False, entries=2)
    assert "2 entries in /opt/goodput/runtime" in texts(runtime.preflight(ARCHIVE, bare, SYSTEM, REQUIRED, False))


@pytest.mark.parametrize(
    ("system", "said"),
    [
        (replace(SYSTEM, cpu_features=frozenset({"sse2"})), "x86_64 without avx2"),
        (replace(SYSTEM, python="3.12"), "found /usr/bin/python3 3.12; required: 3.11"),
        (replace(SYSTEM, python=""), "/usr/bin/python3 missing"),
        (replace(SYSTEM, missing_libraries=("libstdc++.so.6",)), "apt-get install libstdc++6"),
    ],
)
def test_an_unfit_node(system: runtime.System, said: str) -> None:
    assert said in texts(runtime.preflight(ARCHIVE, MOUNT, system, REQUIRED, False))


def test_arm_needs_no_cpu_feature() -> None:
    assert list(runtime.judge_system(replace(SYSTEM, machine="aarch64", cpu_features=frozenset()), REQUIRED)) == []


def test_cpu_features_of_both_architectures() -> None:
    assert "avx2" in runtime.cpu_features("processor\t: 0\nflags\t\t: fpu avx avx2 bmi1\nbugs\t: none\n")
    assert runtime.cpu_features("processor\t: 0\nFeatures\t: fp asimd sve\n") == {"fp", "asimd", "sve"}
    assert runtime.cpu_features("") == frozenset()


def test_the_mount_on_top_counts() -> None:
    assert runtime.mount_entry(MOUNTINFO, "/opt/goodput/runtime") == ("squashfs", "/dev/loop3", True)
    over = MOUNTINFO + "70 61 0:40 / /opt/goodput/runtime rw - tmpfs tmpfs rw\n"
    assert runtime.mount_entry(over, "/opt/goodput/runtime") == ("tmpfs", "tmpfs", False)
    assert runtime.mount_entry(MOUNTINFO, "/opt") is None
    spaced = r"1 1 7:0 / /a\040b ro - squashfs /dev/loop0 ro" + "\n"
    assert runtime.mount_entry(spaced, "/a b") == ("squashfs", "/dev/loop0", True)


def test_fstab_line() -> None:
    line = f"{PATH} /opt/goodput/runtime squashfs {OPTIONS} 0 0\n"
    ask = (PATH, "/opt/goodput/runtime", OPTIONS)
    assert runtime.fstab_has("# a comment\n/dev/vda / ext4 rw 0 1\n" + line, *ask)
    assert not runtime.fstab_has("", *ask)
    assert not runtime.fstab_has("#" + line, *ask)
    assert not runtime.fstab_has(line + line, *ask)
    assert not runtime.fstab_has(line.replace("nofail", "fail"), *ask)


def test_the_file_behind_the_loop_device(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "etc").mkdir()
    mounted = tmp_path / "runtime"
    for name in runtime.CONTENT:
        (mounted / name).mkdir(parents=True)
    (mounted / "VERSION.json").write_text(json.dumps(VERSION))
    (tmp_path / "self/mountinfo").write_text(MOUNTINFO.replace("/opt/goodput/runtime", str(mounted)))
    (tmp_path / "block/loop3/loop").mkdir(parents=True)
    (tmp_path / "block/loop3/loop/backing_file").write_text(PATH + "\n")
    (tmp_path / "etc/fstab").write_text(f"{PATH} {mounted} squashfs {OPTIONS} 0 0\n")
    seen = runtime.look_at_mount(str(mounted), PATH, OPTIONS, tmp_path, tmp_path, tmp_path / "etc")
    assert seen == runtime.Mount(str(mounted), True, "squashfs", PATH, True, True, 0, VERSION, ())
    (mounted / "bin/lmcache").rmdir()
    (mounted / "VERSION.json").write_text("{")
    seen = runtime.look_at_mount(str(mounted), PATH, OPTIONS, tmp_path, tmp_path, tmp_path / "etc")
    assert seen.missing == ("bin/lmcache",) and seen.version is None


def test_a_link_to_the_archive_is_the_archive(tmp_path: Path) -> None:
    (tmp_path / "real").write_text("x")
    (tmp_path / "link").symlink_to("real")
    mount = replace(MOUNT, source=str(tmp_path / "real"))
    assert runtime.is_current(mount, runtime.Archive(str(tmp_path / "link"), True))
    assert not runtime.is_current(replace(mount, mounted=False), runtime.Archive(str(tmp_path / "real"), True))


def test_the_hash_is_remembered_until_the_file_differs(tmp_path: Path) -> None:
    file = tmp_path / "archive"
    file.write_bytes(b"1" * 300_000)
    path, memory = str(file), runtime.Memory(tmp_path / "checked.json")
    first = runtime.look_at_archive(path, memory)
    assert first.hashed and first.sha256 == hashlib.sha256(b"1" * 300_000).hexdigest()
    memory.write(first)
    memory = runtime.Memory(tmp_path / "checked.json")
    assert not runtime.look_at_archive(path, memory).hashed
    assert runtime.look_at_archive(path, memory, full=True).hashed
    # Rebuilt in place with the same size, time and inode, as a medium made from the same recipe is.
    times = os.stat(file).st_mtime_ns
    with file.open("r+b") as stream:
        stream.seek(-10, os.SEEK_END)
        stream.write(b"2")
    os.utime(file, ns=(times, times))
    again = runtime.look_at_archive(path, memory)
    assert again.hashed and again.sha256 != first.sha256


def test_a_broken_memory_is_no_memory(tmp_path: Path) -> None:
    for content in ("", "[]", '{"/x": 1}', "{"):
        (tmp_path / "checked.json").write_text(content)
        assert runtime.Memory(tmp_path / "checked.json").recall("/x", {"size_bytes": 1}) == ""


def test_python_of_the_node(tmp_path: Path) -> None:
    fake = tmp_path / "python3.14"
    fake.write_text("")
    (tmp_path / "python3").symlink_to("python3.14")
    assert runtime.python_version(str(tmp_path / "python3")) == "3.14"
    other = tmp_path / "python"
    other.write_text("#!/bin/sh\necho 3.9\n")
    other.chmod(0o755)
    assert runtime.python_version(str(other)) == "3.9"
    assert runtime.python_version(str(tmp_path / "none")) == ""


def test_libraries_of_the_system() -> None:
    seen = runtime.look_at_system("x86_64", Path("/nonexistent"), lambda name: name.startswith("libgcc"))
    assert seen.missing_libraries == ("libstdc++.so.6",)
    assert runtime.loads("libc.so.6") and not runtime.loads("libno-such-thing.so.1")


def test_failing_imports_are_a_finding(tmp_path: Path) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages/torch.py").write_text("raise ImportError('libtorch: cannot open')\n")
    error = runtime.try_imports(str(tmp_path), 60)
    assert error == "ImportError: libtorch: cannot open"
    assert error in texts(runtime.verify(ARCHIVE, MOUNT, SYSTEM, REQUIRED, False, error))


# --------------------------------------------------------------------------------------------------------------------
# The module
# --------------------------------------------------------------------------------------------------------------------


def ask(capsys: pytest.CaptureFixture[str], check: bool = False, **arguments: Any) -> Any:
    with patch_module_args({**arguments, "_ansible_check_mode": check}), pytest.raises(SystemExit):
        module.main()
    return json.loads(capsys.readouterr().out)


def test_module_remembers_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runtime.squashfs"
    file.write_bytes(b"content")
    common: dict[str, Any] = {
        "archive": str(file),
        "sha256": hashlib.sha256(b"content").hexdigest(),
        "directory": str(tmp_path / "memory"),
        "mount": str(tmp_path / "mount"),
    }
    seen = ask(capsys, state="preflight", **common)
    assert seen["archive"]["hashed"] and not seen["changed"] and not (tmp_path / "memory").exists()
    said = ask(capsys, check=True, state="recorded", marks=seen["archive"], **common)
    assert said["changed"] and not (tmp_path / "memory").exists()
    written = ask(capsys, state="recorded", marks=seen["archive"], **common)
    assert written["changed"] and written["state"] == "ok" and not written["archive"]["hashed"]
    assert not ask(capsys, state="recorded", **common)["changed"]
    again = ask(capsys, state="preflight", **common)
    assert not again["archive"]["hashed"]
    wrong = ask(capsys, state="recorded", **{**common, "sha256": SUM})
    assert wrong["state"] == "wrong" and not wrong["changed"] and f"required: sha256 {SUM}" in wrong["reason"]


def test_module_refuses_what_is_no_sha256(capsys: pytest.CaptureFixture[str]) -> None:
    answer = ask(capsys, archive="/x", sha256="abc")
    assert answer["failed"] and "found sha256 'abc'; required: 64 hexadecimal digits" in answer["msg"]


def test_documentation_and_arguments_agree() -> None:
    import yaml

    documented = yaml.safe_load(module.DOCUMENTATION)["options"]
    spec = module.argument_spec()
    assert set(documented) == set(spec)
    for name, option in spec.items():
        for key in ("type", "elements", "default", "choices", "required"):
            assert documented[name].get(key) == option.get(key), (name, key)
