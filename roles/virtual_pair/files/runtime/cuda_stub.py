"""A stand-in for torch's CUDA libraries, so that torch's CPU half loads on a machine without a GPU or CUDA.

The torch wheels link libtorch_cuda.so, libcudart and friends (about 3 GB installed). This reads which symbols the CPU
half takes from them and generates one small C file that defines exactly those: C calls answer 100 (cudaErrorNoDevice),
C++ calls return a zeroed buffer, objects have their real size. ``torch.cuda.is_available()`` is then False.
It stands in for hardware on the virtual pair only; nothing here may reach a machine with a GPU.

The C is free of machine code, so it builds on every architecture (needs gcc and readelf).
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

SONAME = "libtorch_cuda.so"
# The libraries of torch/lib that are replaced, and those of NVIDIA's wheels that are never installed.
REPLACED = (SONAME, "libtorch_cuda_linalg.so", "libtorch_nvshmem.so", "libcaffe2_nvrtc.so")
NVIDIA_LIBRARY = re.compile(r"^lib(cu|nccl|nv)[A-Za-z_]*\.so")
# C entry points of CUDA's libraries; everything else that is missing is C++ out of libtorch_cuda.
NVIDIA_FUNCTION = re.compile(r"^(__)?(cu|cuda|cudnn|cufile|cuFile|nccl|cupti)[A-Z_]")
# Python bindings build this object as a default argument at import: it needs a vtable and a zero reference count.
CONSTRUCTED = "ProcessGroupNCCL7OptionsC"
MINIMUM_OBJECT_BYTES = 256
VTABLE_SLOTS = 32
POINTER_BYTES = 8

HEAD = """\
/* Generated stand-in for CUDA libraries on machines without a GPU. Not CUDA, computes nothing. */
extern char _ZTVN10__cxxabiv117__class_type_infoE[];
#define TYPEINFO_VTABLE ((void *)(_ZTVN10__cxxabiv117__class_type_infoE + 16))
#define ALIGNED __attribute__((aligned(64)))
static char stub_buffer[65536] ALIGNED;
static int stub_no_device(void) { return 100; }
static void *stub_zeroed(void) { return stub_buffer; }
static void *const stub_typeinfo[2] = {TYPEINFO_VTABLE, (void *)"4stub"};
static void *const stub_vtable[2 + 32] = {0, (void *)stub_typeinfo, [2 ... 33] = (void *)stub_zeroed};
static void *stub_construct(void **self) { self[0] = (void *)(stub_vtable + 2); self[1] = 0; return self; }
"""


@dataclass(frozen=True)
class Symbol:
    """One dynamic symbol: size in bytes, ``version`` the symbol version it is bound to or ''."""

    name: str
    defined: bool
    kind: str
    version: str
    size_bytes: int
    weak: bool


@dataclass
class Stub:
    """What to generate: the C source, the linker's version script and how many symbols they define."""

    source: str
    version_script: str
    symbols: int
    versions: dict[str, list[str]] = field(default_factory=dict)


def parse_symbols(text: str) -> Iterator[Symbol]:
    """Read the output of ``readelf --dyn-syms -W``."""
    for line in text.splitlines():
        cells = line.split()
        if len(cells) < 8 or not re.match(r"\d+:$", cells[0]):
            continue
        name, _, version = cells[7].partition("@")
        size = int(cells[2], 0)
        yield Symbol(name, cells[6] != "UND", cells[3], version.strip("@"), size, cells[4] == "WEAK")


def missing(users: Iterable[Symbol], replaced: Iterable[Symbol]) -> dict[str, Symbol]:
    """Symbols that ``users`` need and none of them defines, where ``replaced`` or an NVIDIA library defined them.

    The result carries the version the users ask for and, from ``replaced``, kind and size.
    """
    needed: dict[str, str] = {}
    defined: set[str] = set()
    for symbol in users:
        if symbol.defined:
            defined.add(symbol.name)
        elif not symbol.weak:
            needed[symbol.name] = symbol.version
    known = {symbol.name: symbol for symbol in replaced if symbol.defined}
    result = {}
    for name in sorted(set(needed) - defined):
        if name in known or NVIDIA_FUNCTION.match(name):
            found = known.get(name)
            kind, size = (found.kind, found.size_bytes) if found else ("FUNC", 0)
            result[name] = Symbol(name, False, kind, needed[name], size, False)
    return result


def generate(symbols: dict[str, Symbol]) -> Stub:
    """C source and version script that define ``symbols``. ValueError names a symbol that C can not define."""
    lines = [HEAD]
    versions: dict[str, list[str]] = {}
    for name, symbol in sorted(symbols.items()):
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name) or symbol.kind == "TLS":
            raise ValueError(f"found symbol {name} ({symbol.kind}), required a C identifier that is no thread-local")
        versions.setdefault(symbol.version, []).append(name)
        if symbol.kind != "OBJECT":
            if NVIDIA_FUNCTION.match(name):
                lines.append(f'int {name}(void) __attribute__((alias("stub_no_device")));')
            elif CONSTRUCTED in name:
                lines.append(f'void *{name}(void **) __attribute__((alias("stub_construct")));')
            else:
                lines.append(f'void *{name}(void) __attribute__((alias("stub_zeroed")));')
        elif name.startswith("_ZTI"):
            lines.append(f'void *{name}[2] = {{TYPEINFO_VTABLE, (void *)"{name[4:]}"}};')
        elif name.startswith("_ZTV"):
            slots = max(symbol.size_bytes // POINTER_BYTES, VTABLE_SLOTS)
            lines.append(f"void *{name}[{slots}] = {{0, 0, [2 ... {slots - 1}] = (void *)stub_zeroed}};")
        else:
            lines.append(f"char {name}[{max(symbol.size_bytes, MINIMUM_OBJECT_BYTES)}] ALIGNED;")
    script = [f"{version} {{ global: {'; '.join(names)}; }};" for version, names in sorted(versions.items()) if version]
    return Stub("\n".join(lines) + "\n", "\n".join(script) + "\n", len(symbols), versions)


def read_symbols(library: Path) -> list[Symbol]:
    output = subprocess.run(["readelf", "--dyn-syms", "-W", str(library)], capture_output=True, text=True, check=True)
    return list(parse_symbols(output.stdout))


def needed_libraries(library: Path) -> list[str]:
    output = subprocess.run(["readelf", "-d", "-W", str(library)], capture_output=True, text=True, check=True)
    return re.findall(r"\(NEEDED\).*\[(.*)\]", output.stdout)


def install(site_packages: Path, scratch: Path) -> int:
    """Replace torch's CUDA libraries under ``site_packages`` by the stub; the number of symbols it defines."""
    lib = site_packages / "torch/lib"
    replaced = [lib / name for name in REPLACED if (lib / name).exists()]
    users = [path for path in sorted(lib.glob("*.so*")) if path not in replaced]
    users += sorted((site_packages / "torch").glob("_C*.so")) + sorted((site_packages / "lmcache").glob("*.so"))
    stub = generate(
        missing([s for path in users for s in read_symbols(path)], [s for path in replaced for s in read_symbols(path)])
    )
    absent = {name for path in users for name in needed_libraries(path) if NVIDIA_LIBRARY.match(name)}
    absent -= {path.name for path in users}
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "stub.c").write_text(stub.source)
    (scratch / "stub.map").write_text(stub.version_script)
    for path in replaced:
        path.unlink()
    # -nostdlib: only libstdc++, for the typeinfo's vtable.
    subprocess.run(
        ["gcc", "-shared", "-fPIC", "-O1", "-w", "-fno-builtin", "-nostdlib",
         f"-Wl,-soname,{SONAME}", "-Wl,--build-id=none", f"-Wl,--version-script={scratch / 'stub.map'}",
         "-o", str(lib / SONAME), str(scratch / "stub.c"),
         "-Wl,--no-as-needed", "-l:libstdc++.so.6"],
        check=True,
    )  # fmt: skip
    for name in sorted(absent):
        (lib / name).symlink_to(SONAME)
    return stub.symbols
