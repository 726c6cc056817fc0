"""The builder of the runtime archive: what it leaves out, what it compiles, and the CUDA stand-in, really linked."""

from __future__ import annotations

import ctypes
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

HERE = Path(__file__).resolve().parents[2] / "roles/virtual_pair/files/runtime"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"runtime_{name}", HERE / f"{name}.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def build() -> ModuleType:
    return load("build")


@pytest.fixture(scope="module")
def stub() -> ModuleType:
    return load("cuda_stub")


TRIMMED = [
    "numpy/lib/tests/test_io.py",
    "torch/include/ATen/ATen.h",
    "torch/bin/protoc",
    "lmcache/cuda_ops.cpython-311-x86_64-linux-gnu.so",
    "dynamo/vllm/main.py",
    "transformers/models/llama/modeling_llama.py",
    "rich-15.0.0.dist-info/RECORD",
    "bin/lmcache",
    "torch/nn/__pycache__/x.pyc",
    "torch/_C/__init__.pyi",
]
KEPT = [
    "torch/bin/torch_shm_manager",
    "torch/testing/_internal/test/x.py",
    "torch/distributed/tests/x.py",
    "lmcache/lmcache_fs.cpython-311-x86_64-linux-gnu.so",
    "dynamo/mocker/main.py",
    "transformers/models/__init__.py",
    "transformers/models/auto/configuration_auto.py",
    "rich-15.0.0.dist-info/METADATA",
    "rich-15.0.0.dist-info/entry_points.txt",
    "aiohttp/test_utils.py",
]


def test_trim_removes_and_keeps(build: ModuleType) -> None:
    rules = (HERE / "trim.txt").read_text().splitlines()
    assert build.select([*TRIMMED, *KEPT], rules) == TRIMMED


def test_the_last_rule_decides(build: ModuleType) -> None:
    assert build.select(["a/b", "a/c"], ["# no rule", "a/*", "!a/b"]) == ["a/c"]
    assert build.select(["a/b"], ["!a/b", "a/*"]) == ["a/b"]


def test_wheels_are_asked_for_by_architecture(build: ModuleType) -> None:
    names = build.wheel_platforms("aarch64")[1::2]
    assert "manylinux_2_28_aarch64" in names and "manylinux2014_aarch64" in names and names[-1] == "any"
    assert not [name for name in names if "x86_64" in name]


def test_requirements_are_complete_and_hashed(repository: Path) -> None:
    lines = (repository / "requirements/runtime-virtual.txt").read_text().splitlines()
    pinned = {line.split("==")[0]: line.split("==")[1].split()[0] for line in lines if "==" in line}
    wanted = [line.strip() for line in (repository / "requirements/runtime-virtual.in").read_text().splitlines()]
    assert sorted(f"{name}=={version}" for name, version in pinned.items()) == sorted(
        line for line in wanted if line and not line.startswith("#")
    )
    assert sum(line.strip().startswith("--hash=sha256:") for line in lines) >= len(pinned)
    assert not [name for name in pinned if name.startswith(("nvidia", "cuda", "cupy", "triton"))]


def test_requirements_are_the_release_set(repository: Path) -> None:
    import yaml

    release = yaml.safe_load((repository / "vars/releases/virtual.yml").read_text())["goodput_release_set"]
    text = (repository / "requirements/runtime-virtual.in").read_text()
    for name, package in {"dynamo": "ai-dynamo", "lmcache": "lmcache", "torch": "torch"}.items():
        assert f"\n{package}=={release[name]}\n" in text


def tree(root: Path) -> Path:
    site = root / "site-packages"
    info = site / "demo-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: Demo_Pack\nVersion: 1.2+cu1\n\nName: not this\n")
    (info / "entry_points.txt").write_text("[console_scripts]\ndemo = demo:Main.run\n[other]\nx = y:z\n")
    (site / "demo.py").write_text("class Main:\n    @staticmethod\n    def run() -> str:\n        return 'ran'\n")
    (site / "broken.py").write_text("def (:\n")
    return site


def test_console_scripts_find_their_packages(build: ModuleType, tmp_path: Path) -> None:
    site = tree(tmp_path)
    assert build.distributions(site) == {"demo-pack": ("1.2+cu1", site / "demo-1.2.dist-info")}
    build.write_scripts(site, tmp_path / "bin")
    assert [path.name for path in (tmp_path / "bin").iterdir()] == ["demo"]
    done = subprocess.run([sys.executable, "-I", str(tmp_path / "bin/demo")], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (1, "ran")


def test_compiled_files_are_used_unchecked_and_repeatable(build: ModuleType, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    for root in (first, second):
        tree(root)
        # broken.py gets no .pyc, and does not stop the others.
        assert build.compile_all([sys.executable], root) == 1
    name = f"site-packages/__pycache__/demo.cpython-{sys.version_info[0]}{sys.version_info[1]}.pyc"
    data = (first / name).read_bytes()
    assert data == (second / name).read_bytes()
    assert data[:4] == importlib.util.MAGIC_NUMBER
    assert int.from_bytes(data[4:8], "little") == 0b01  # hash-based, not checked
    assert f"{build.MOUNT}/site-packages/demo.py".encode() in data
    # A changed source on a read-only mount can not be; Python must not even look.
    (first / "site-packages/demo.py").write_text("raise SystemExit('read the source')\n")
    code = "import demo; print(demo.Main.run())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={"PYTHONPATH": str(first / "site-packages")}, capture_output=True, text=True
    )
    assert done.stdout.strip() == "ran", done.stderr


def test_no_interpreter_for_the_guest_is_refused(build: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        build.find_interpreter("3.2", "")
    assert stop.value.code == 2
    said = capsys.readouterr().err
    assert "found no Python 3.2" in said and "--rootfs-python" in said
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    assert build.find_interpreter(version, f"env {sys.executable}") == ["env", sys.executable]


def test_the_recipe_is_names_content_and_words(build: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1")
    once = build.recipe_hash([tmp_path / "a"], "3.11")
    assert once == build.recipe_hash([tmp_path / "a"], "3.11") != build.recipe_hash([tmp_path / "a"], "3.12")
    (tmp_path / "a").write_text("2")
    assert once != build.recipe_hash([tmp_path / "a"], "3.11")


def test_an_archive_is_kept_only_whole(build: ModuleType, tmp_path: Path) -> None:
    name = "runtime.squashfs"
    assert not build.up_to_date(tmp_path, name, "r")
    (tmp_path / name).write_bytes(b"12345")
    (tmp_path / f"{name}.sha256").write_text(f"s  {name}\n")
    (tmp_path / "VERSION.json").write_text(json.dumps({"recipe": "r", "archive_bytes": 5, "archive_sha256": "s"}))
    assert build.up_to_date(tmp_path, name, "r")
    assert not build.up_to_date(tmp_path, name, "other")
    (tmp_path / name).write_bytes(b"1234")
    assert not build.up_to_date(tmp_path, name, "r")


# --------------------------------------------------------------------------------------------------------------------
# The CUDA stand-in
# --------------------------------------------------------------------------------------------------------------------

READELF = """
Symbol table '.dynsym' contains 4 entries:
   Num:    Value          Size Type    Bind   Vis      Ndx Name
     1: 0000000000000000     0 FUNC    GLOBAL DEFAULT  UND cudaGetDeviceCount@libcudart.so.13 (3)
     2: 0000000000000000     0 NOTYPE  WEAK   DEFAULT  UND cudaWeak
     3: 000000000003f0a0  0x48 OBJECT  GLOBAL DEFAULT   14 _ZTVN2at4ThingE@@V1
"""


def test_symbols_are_read(stub: ModuleType) -> None:
    first, weak, thing = stub.parse_symbols(READELF)
    assert (first.name, first.defined, first.version, first.weak) == (
        "cudaGetDeviceCount",
        False,
        "libcudart.so.13",
        False,
    )
    assert weak.weak
    assert (thing.name, thing.defined, thing.kind, thing.size_bytes, thing.version) == (
        "_ZTVN2at4ThingE",
        True,
        "OBJECT",
        0x48,
        "V1",
    )


def test_only_what_nobody_defines_is_generated(stub: ModuleType) -> None:
    def symbol(name: str, defined: bool, kind: str = "FUNC", **more: Any) -> Any:
        return stub.Symbol(name, defined, kind, more.get("version", ""), more.get("size", 0), more.get("weak", False))

    users = [
        symbol("cudaMalloc", False, version="libcudart.so.13"),
        symbol("_ZN2at4cuda4initEv", False),
        symbol("_ZN2at5emptyEv", False),
        symbol("_ZN2at5emptyEv", True),
        symbol("malloc", False),
        symbol("cudaOptional", False, weak=True),
    ]
    replaced = [symbol("_ZN2at4cuda4initEv", True, "OBJECT", size=40), symbol("_ZN2at5emptyEv", True)]
    found = stub.missing(users, replaced)
    assert list(found) == ["_ZN2at4cuda4initEv", "cudaMalloc"]
    assert (found["_ZN2at4cuda4initEv"].kind, found["_ZN2at4cuda4initEv"].size_bytes) == ("OBJECT", 40)
    assert found["cudaMalloc"].version == "libcudart.so.13"


def test_a_symbol_that_c_can_not_define_is_refused(stub: ModuleType) -> None:
    for name, kind in (("odd.name", "FUNC"), ("cudaLocal", "TLS")):
        with pytest.raises(ValueError, match=name):
            stub.generate({name: stub.Symbol(name, False, kind, "", 0, False)})


@pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("readelf") is None, reason="needs gcc and readelf")
def test_the_stand_in_links_loads_and_answers(stub: ModuleType, tmp_path: Path) -> None:
    """A library that takes versioned C calls, C++ calls, a vtable and a typeinfo from libraries that are then gone."""
    lib = tmp_path / "torch/lib"
    lib.mkdir(parents=True)
    vtable, typeinfo, maker = "_ZTV5Thing", "_ZTI5Thing", "_ZN4c10d23ProcessGroupNCCL7OptionsC1Ev"
    (tmp_path / "cudart.c").write_text("int cudaGetDeviceCount(int *n) { *n = 3; return 0; }\n")
    (tmp_path / "cudart.map").write_text("libcudart.so.13 { global: *; };\n")
    (tmp_path / "cuda.c").write_text(
        f"void *{vtable}[5]; void *{typeinfo}[2]; char table[24];\n"
        f"void *_ZN2at4cuda4initEv(void) {{ return 0; }} void {maker}(void *self) {{}}\n"
    )
    (tmp_path / "user.c").write_text(
        f"int cudaGetDeviceCount(int *); void *_ZN2at4cuda4initEv(void); void {maker}(void *);\n"
        f"extern void *{vtable}[], *{typeinfo}[]; extern char table[24];\n"
        "int devices(void) { int n = 0; return cudaGetDeviceCount(&n) * 1000 + n; }\n"
        "int zeroed(void) { return *(int *)_ZN2at4cuda4initEv(); }\n"
        f"int filled(void) {{ return {vtable}[4] && {typeinfo}[0] && !table[23]; }}\n"
        f"int made(void) {{ void *self[2] = {{0, &self}}; {maker}(self); return self[0] && !self[1]; }}\n"
    )

    def link(output: str, source: str, *more: str) -> None:
        command = [
            "gcc",
            "-shared",
            "-fPIC",
            "-w",
            "-o",
            str(lib / output),
            str(tmp_path / source),
            f"-Wl,-soname,{output}",
            *more,
        ]
        subprocess.run(command, check=True)

    link("libcudart.so.13", "cudart.c", f"-Wl,--version-script={tmp_path / 'cudart.map'}")
    link("libtorch_cuda.so", "cuda.c")
    link("libtorch_cpu.so", "user.c", f"-L{lib}", "-l:libcudart.so.13", "-l:libtorch_cuda.so", "-Wl,-rpath,$ORIGIN")
    (lib / "libcudart.so.13").unlink()
    assert stub.install(tmp_path, tmp_path / "scratch") == 6
    assert (lib / "libcudart.so.13").readlink() == Path("libtorch_cuda.so")
    assert "Not CUDA" in (tmp_path / "scratch/stub.c").read_text()
    loaded = ctypes.CDLL(str(lib / "libtorch_cpu.so"))
    assert loaded.devices() == 100_000, "no device"
    assert loaded.zeroed() == 0 and loaded.filled() == 1 and loaded.made() == 1


def test_numba_stand_in_leaves_functions_alone() -> None:
    numba = load("stand_ins/numba")

    def double(value: int) -> int:
        return 2 * value

    assert numba.njit(double) is double and numba.jit(cache=True)(double) is double
    assert list(numba.prange(2)) == [0, 1]
