#!/usr/bin/env python3
"""Build the runtime archive and the tiny model of the virtual pair. Standard library only.

The archive is one squashfs that a guest mounts read-only at /opt/goodput/runtime:

    VERSION.json     what is inside (also written beside the archive)
    site-packages/   Dynamo, LMCache and what they import, with .pyc files, without CUDA
    bin/             console scripts: /usr/bin/python3 /opt/goodput/runtime/bin/lmcache ...

The same recipe (requirements, these scripts, Python version, architecture) gives the same sha256, and a second run
finds the recipe's hash in VERSION.json and does nothing. The controller's Python may differ from the guest's: wheels
are chosen for --python, and .pyc files are compiled by an interpreter of that version (python3.11 on this machine, or
the one that --rootfs-python starts, for example "chroot ROOTFS /usr/bin/python3"; it needs no file of ours).

Wheels are kept under CACHE/wheels. With GOODPUT_OFFLINE=1 nothing else is asked, so an air-gapped machine needs only a
copy of that folder. Progress with seconds goes to stderr; the one line on stdout is JSON: changed, archive, sha256,
version, and model with --model. Exit 0 built or found, 2 cannot build (found, required and remedy are printed).
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import fnmatch
import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import stat
import struct
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO, NoReturn

HERE = Path(__file__).resolve().parent
REQUIREMENTS = HERE.parents[3] / "requirements/runtime-virtual.txt"
MOUNT = "/opt/goodput/runtime"
OFFLINE = os.environ.get("GOODPUT_OFFLINE", "") not in ("", "0")
# Newest glibc of the wheels' names that Debian 12 runs.
GLIBC_MINOR = 36
STRIP_FROM_BYTES = 1 << 20
# Each tool and the Debian package that has it.
TOOLS = {"gcc": "gcc", "readelf": "binutils", "strip": "binutils", "mksquashfs": "squashfs-tools"}

SCRIPT = """\
#!/usr/bin/python3
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "site-packages"))
from {module} import {name}

sys.exit({call}())
"""

# Runs on the interpreter that compiles: sources come in on stdin, code goes out on stdout, no file is touched.
# unchecked-hash: the mount is read-only and its times are 0, so Python must neither check nor rewrite.
COMPILER = """\
import importlib._bootstrap_external as external, importlib.util as util, struct, sys, warnings
warnings.simplefilter("ignore")
source, out = sys.stdin.buffer, sys.stdout.buffer
out.write(b"%d.%d" % sys.version_info[:2] + b"\\n")
out.flush()
while head := source.read(8):
    name, text = (source.read(size) for size in struct.unpack("!II", head))
    try:
        code = compile(text, name.decode(), "exec", dont_inherit=True)
        data = external._code_to_hash_pyc(code, util.source_hash(text), False)
    except (SyntaxError, ValueError):
        data = b""
    out.write(struct.pack("!I", len(data)) + data)
    out.flush()
"""


def say(text: str) -> None:
    print(f"runtime: {text}", file=sys.stderr, flush=True)


def refuse(text: str) -> NoReturn:
    say(text)
    sys.exit(2)


@contextlib.contextmanager
def step(title: str) -> Iterator[None]:
    """Print one line with the seconds that a step took."""
    start = time.monotonic()
    yield
    say(f"{time.monotonic() - start:6.1f} s  {title}")


def run(command: Sequence[str], **environment: str) -> str:
    result = subprocess.run(command, check=False, env={**os.environ, **environment}, capture_output=True, text=True)
    if result.returncode:
        refuse(f"failed with exit {result.returncode}: {shlex.join(command)}\n{result.stdout}{result.stderr}"[-4000:])
    return result.stdout


def recipe_hash(files: Iterable[Path], *words: str) -> str:
    """sha256 over the words and over names and content of the files."""
    digest = hashlib.sha256("\0".join(words).encode())
    for path in sorted(files):
        digest.update(f"\0{path.name}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def pip_command(scratch: Path) -> list[str]:
    """pip of this Python, else of a virtual environment made for it (Debian's Python has none)."""
    if subprocess.run([sys.executable, "-m", "pip", "--version"], check=False, capture_output=True).returncode == 0:
        return [sys.executable, "-m", "pip"]
    venv = scratch / "pip"
    run([sys.executable, "-m", "venv", "--clear", str(venv)])
    return [str(venv / "bin/python"), "-m", "pip"]


def wheel_platforms(arch: str) -> list[str]:
    """pip's --platform arguments for glibc 2.5 to 2.GLIBC_MINOR on ``arch``; pip widens none of them itself."""
    names = [f"manylinux_2_{minor}_{arch}" for minor in range(GLIBC_MINOR, 4, -1)]
    names += [f"manylinux{year}_{arch}" for year in ("2014", "2010", "1")] + [f"linux_{arch}", "any"]
    return [argument for name in names for argument in ("--platform", name)]


def select(paths: Iterable[str], rules: Iterable[str]) -> list[str]:
    """Those of ``paths`` that the rules of trim.txt remove. The last rule that matches a path decides."""
    lines = [line.strip() for line in rules if line.strip() and not line.startswith("#")]
    matchers = [
        (not line.startswith("!"), re.compile(fnmatch.translate(line.lstrip("!"))).match) for line in reversed(lines)
    ]
    return [path for path in paths if next((remove for remove, match in matchers if match(path)), False)]


def trim(site: Path) -> None:
    """Remove what trim.txt lists, then empty directories."""
    paths = [path.relative_to(site).as_posix() for path in site.rglob("*") if not path.is_dir()]
    for name in select(paths, (HERE / "trim.txt").read_text().splitlines()):
        (site / name).unlink()
    for folder, _, _ in os.walk(site, topdown=False):
        if not os.listdir(folder):
            os.rmdir(folder)


def strip_libraries(site: Path) -> None:
    """Drop symbol tables of large libraries. numpy's are left: its own build aligns them in a way strip breaks."""
    large = [
        path
        for path in sorted(site.rglob("*.so*"))
        if not path.is_symlink()
        and path.stat().st_size > STRIP_FROM_BYTES
        and not path.parts[len(site.parts)].startswith("numpy")
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(lambda path: run(["strip", "--strip-unneeded", str(path)]), large))


def distributions(site: Path) -> dict[str, tuple[str, Path]]:
    """Version and dist-info directory by normalised name."""
    found = {}
    for metadata in sorted(site.glob("*.dist-info/METADATA")):
        head = metadata.read_text(errors="replace").split("\n\n")[0]
        fields = dict(line.split(": ", 1) for line in head.splitlines() if line.startswith(("Name: ", "Version: ")))
        found[re.sub(r"[-_.]+", "-", fields["Name"]).lower()] = (fields["Version"], metadata.parent)
    return found


def write_scripts(site: Path, target: Path) -> None:
    """Console scripts that find site-packages beside themselves."""
    target.mkdir()
    for _, folder in distributions(site).values():
        entries = folder / "entry_points.txt"
        section = ""
        for line in entries.read_text().splitlines() if entries.exists() else []:
            if line.startswith("["):
                section = line.strip("[] ")
            elif section == "console_scripts" and "=" in line:
                name, _, where = line.partition("=")
                module, _, call = where.split("[")[0].strip().partition(":")
                script = target / name.strip()
                script.write_text(SCRIPT.format(module=module, name=call.split(".")[0], call=call))
                script.chmod(0o755)


def find_interpreter(version: str, rootfs_python: str) -> list[str]:
    """The command of an interpreter whose .pyc files the guest can read."""
    for command in (
        [*shlex.split(rootfs_python)],
        [f"/usr/bin/python{version}"],
        [f"python{version}"],
        [sys.executable],
    ):
        if command and shutil.which(command[0]):
            code = "import sys; print('%d.%d' % sys.version_info[:2])"
            probe = subprocess.run([*command, "-c", code], check=False, capture_output=True, text=True)
            if probe.stdout.strip() == version:
                return command
    refuse(
        f"found no Python {version} to compile with, required because the guest runs it. Install python{version} or "
        "name the guest image's own: --rootfs-python 'chroot ROOTFS /usr/bin/python3'"
    )


def read_exactly(stream: IO[bytes], size: int) -> bytes:
    data = stream.read(size)
    if len(data) != size:
        refuse("the compiling interpreter ended early")
    return data


def compile_share(command: list[str], sources: list[Path], root: Path) -> int:
    """Compile the sources, in order, in one process of ``command``; the number of .pyc files written."""
    process = subprocess.Popen(
        [*command, "-I", "-S", "-c", COMPILER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env={**os.environ, "PYTHONHASHSEED": "0"},
    )  # fmt: skip
    assert process.stdin and process.stdout
    to_child, from_child = process.stdin, process.stdout

    def feed() -> None:
        # A child that ends early breaks the pipe; read_exactly then says so.
        with contextlib.suppress(BrokenPipeError):
            for path in sources:
                name = f"{MOUNT}/{path.relative_to(root).as_posix()}".encode()
                text = path.read_bytes()
                to_child.write(struct.pack("!II", len(name), len(text)) + name + text)
            to_child.close()

    feeder = threading.Thread(target=feed)
    feeder.start()
    tag = "cpython-" + from_child.readline().decode().strip().replace(".", "")
    written = 0
    for path in sources:
        data = read_exactly(from_child, struct.unpack("!I", read_exactly(from_child, 4))[0])
        if data:
            folder = path.parent / "__pycache__"
            folder.mkdir(exist_ok=True)
            (folder / f"{path.stem}.{tag}.pyc").write_bytes(data)
            written += 1
    feeder.join()
    process.wait()
    return written


def compile_all(command: list[str], root: Path) -> int:
    """.pyc files for every source, as if they lay at MOUNT.

    Two processes with fixed shares in a fixed order: marshal's output depends on what a process compiled before.
    """
    sources = sorted(root.rglob("*.py"))
    with ThreadPoolExecutor(2) as pool:
        return sum(pool.map(lambda part: compile_share(command, sources[part::2], root), range(2)))


def check(python: list[str], root: Path) -> None:
    """Import and start what the roles start; refuse if anything is missing.

    -S: this machine's own packages neither fill a gap nor, through a .pth file, touch what is being packed.
    """
    code = "import torch; assert float(torch.ones(3) @ torch.ones(3)) == 3 and not torch.cuda.is_available()"
    commands = [
        ["-c", code],
        ["-m", "dynamo.mocker", "--help"],
        ["-m", "dynamo.frontend", "--help"],
        [str(root / "bin/lmcache"), "server", "--help"],
    ]
    for command in commands:
        run([*python, "-S", "-B", *command], PYTHONPATH=str(root / "site-packages"), LMCACHE_TRACK_USAGE="false")


def make_readable(root: Path) -> None:
    """Modes that do not depend on the umask of whoever builds."""
    for path in [root, *root.rglob("*")]:
        if not path.is_symlink():
            executable = path.is_dir() or bool(path.stat().st_mode & stat.S_IXUSR)
            path.chmod(0o755 if executable else 0o644)


def up_to_date(output: Path, name: str, recipe: str) -> bool:
    """True if ``output`` holds the archive of this recipe, whole."""
    try:
        known = json.loads((output / "VERSION.json").read_text())
        return bool(
            known["recipe"] == recipe
            and (output / name).stat().st_size == known["archive_bytes"]
            and (output / f"{name}.sha256").read_text().split() == [known["archive_sha256"], name]
        )
    except (OSError, ValueError, KeyError):
        return False


def download(pip: list[str], requirements: Path, wheels: Path, python: str, arch: str) -> None:
    if OFFLINE:
        return
    run(
        [*pip, "download", "--disable-pip-version-check", "--quiet", "--no-cache-dir", "--no-deps", "--require-hashes",
         "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *wheel_platforms(arch),
         "-d", str(wheels), "-r", str(requirements)]
    )  # fmt: skip


def install(pip: list[str], requirements: Path, wheels: Path, python: str, arch: str, target: Path) -> None:
    run(
        [*pip, "install", "--disable-pip-version-check", "--quiet", "--no-compile", "--no-deps", "--require-hashes",
         "--only-binary=:all:", "--implementation", "cp", "--python-version", python, *wheel_platforms(arch),
         "--no-index", "--find-links", str(wheels), "--target", str(target), "-r", str(requirements)],
        PIP_ROOT_USER_ACTION="ignore",
    )  # fmt: skip


def build_runtime(arguments: argparse.Namespace, wheels: Path, scratch: Path) -> tuple[Path, bool]:
    """Make the archive, its .sha256 and VERSION.json in --output; the archive and whether it had to be built."""
    arch, output = platform.machine(), Path(arguments.output).resolve()
    requirements = Path(arguments.requirements)
    name = f"runtime-{arguments.release}-{arch}.squashfs"
    parts = [
        requirements,
        *(p for p in HERE.rglob("*") if p.is_file() and p.suffix in (".py", ".txt") and p.stem != "tiny_model"),
    ]
    recipe = recipe_hash(parts, arguments.release, arch, arguments.python)
    if up_to_date(output, name, recipe):
        say(f"{name} is up to date ({recipe[:12]})")
        return output / name, False
    missing = sorted({package for tool, package in TOOLS.items() if shutil.which(tool) is None})
    if missing:
        refuse(f"missing tools, install them with: apt-get install -y {' '.join(missing)}")
    python = find_interpreter(arguments.python, arguments.rootfs_python)
    pip = pip_command(scratch)
    root, site = scratch / "root", scratch / "root/site-packages"
    shutil.rmtree(root, ignore_errors=True)
    with step("download wheels" if not OFFLINE else f"offline: wheels from {wheels}"):
        download(pip, requirements, wheels, arguments.python, arch)
    with step("install wheels"):
        install(pip, requirements, wheels, arguments.python, arch, site)
    with step("trim"):
        trim(site)
        for path in sorted((HERE / "stand_ins").glob("*.py")):
            shutil.copyfile(path, site / path.name)
    with step("build the CUDA stand-in"):
        sys.path.insert(0, str(HERE))
        import cuda_stub

        cuda_stub.install(site, scratch / "stub")
    with step("strip libraries"):
        strip_libraries(site)
    write_scripts(site, root / "bin")
    found = distributions(site)
    version = {
        "release": arguments.release,
        "arch": arch,
        "python": arguments.python,
        "dynamo": found["ai-dynamo"][0],
        "lmcache": found["lmcache"][0],
        "torch": found["torch"][0].split("+")[0],
        "recipe": recipe,
        "stand_ins": ["CUDA libraries of torch", "numba"],
    }
    (root / "VERSION.json").write_text(json.dumps(version, indent=2, sort_keys=True) + "\n")
    with step("compile"):
        compile_all(python, root / "site-packages")
    if not arguments.rootfs_python:
        with step("check that everything imports"):
            check(python, root)
    make_readable(root)
    output.mkdir(parents=True, exist_ok=True)
    partial = scratch / name
    with step("mksquashfs"):
        run(
            ["mksquashfs", str(root), str(partial), "-noappend", "-all-root", "-comp", "zstd",
             "-Xcompression-level", "1", "-mkfs-time", "0", "-all-time", "0", "-no-xattrs", "-quiet", "-no-progress"]
        )  # fmt: skip
    digest = file_sha256(partial)
    size = partial.stat().st_size
    os.replace(partial, output / name)
    (output / f"{name}.sha256").write_text(f"{digest}  {name}\n")
    # Last: it vouches for the two others.
    beside = {**version, "archive_sha256": digest, "archive_bytes": size}
    (output / "VERSION.json").write_text(json.dumps(beside, indent=2, sort_keys=True) + "\n")
    say(f"{name} {size / 1e6:.0f} MB sha256 {digest}")
    return output / name, True


def build_model(target: Path, requirements: Path, wheels: Path, scratch: Path) -> bool:
    """Make the tiny model; whether it had to be made. The runtime's own tokenizers wheel trains its tokenizer."""
    script = HERE / "tiny_model.py"
    version = re.search(r"^tokenizers==(\S+)", requirements.read_text(), re.MULTILINE)
    if version is None:
        refuse(f"{requirements} pins no tokenizers, required to train the tiny model's tokenizer")
    recipe = recipe_hash([script], version[1])
    stamp = target / ".recipe"
    if stamp.is_file() and stamp.read_text() == recipe:
        say(f"model {target.name} is up to date ({recipe[:12]})")
        return False
    with step(f"train the tokenizer of {target.name}"):
        # abi3 wheels: one file serves every Python from 3.10 on.
        pattern = f"tokenizers-{version[1]}-*abi3*{platform.machine()}.whl"
        wheel = next(iter(sorted(wheels.glob(pattern))), None)
        if wheel is None:
            refuse(f"found no {pattern} in {wheels}, required to train the tokenizer. Build the runtime archive first")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(scratch / "tokenizers")
        fresh = scratch / "model"
        shutil.rmtree(fresh, ignore_errors=True)
        # One thread: the order in which threads count pairs must not matter.
        run(
            [sys.executable, str(script), str(fresh)],
            PYTHONPATH=str(scratch / "tokenizers"),
            RAYON_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", PYTHONHASHSEED="0",
        )  # fmt: skip
        (fresh / ".recipe").write_text(recipe)
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(fresh, target)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", required=True, help="where wheels are kept")
    parser.add_argument("--output", required=True, help="where the archive, its .sha256 and VERSION.json go")
    parser.add_argument("--model", help="also build the tiny model into this directory")
    parser.add_argument(
        "--release", default="virtual", help="name of the release set in vars/releases (default %(default)s)"
    )
    parser.add_argument("--python", default="3.11", help="the guest's Python (default %(default)s)")
    parser.add_argument("--rootfs-python", default="", help="command that starts the guest's Python, to compile with")
    parser.add_argument(
        "--requirements", default=str(REQUIREMENTS), help="pinned wheels with hashes (default %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep the unpacked tree under CACHE/runtime-build")
    arguments = parser.parse_args()
    cache = Path(arguments.cache).resolve()
    wheels, scratch = cache / "wheels", cache / "runtime-build"
    for folder in (wheels, scratch):
        folder.mkdir(parents=True, exist_ok=True)
    with (cache / "runtime-build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        archive, changed = build_runtime(arguments, wheels, scratch)
        version = json.loads((archive.parent / "VERSION.json").read_text())
        report = {"archive": str(archive), "sha256": version["archive_sha256"], "version": version}
        if arguments.model:
            model = Path(arguments.model).resolve()
            scratch.mkdir(exist_ok=True)
            changed |= build_model(model, Path(arguments.requirements), wheels, scratch)
            report["model"] = str(model)
        if not arguments.keep:
            shutil.rmtree(scratch, ignore_errors=True)
    print(json.dumps({"changed": changed, **report}))


if __name__ == "__main__":
    main()
