#!/usr/bin/env python3
"""Install what a make target needs: system packages, a virtual environment in the clone, the Ansible collections.

Standard library only: this is the first thing that runs on a fresh machine. A second run finds its stamps and does
nothing. Exit 0 ready, 2 cannot install (the one line to run is printed).

Everything downloaded with pip is kept under ``$GOODPUT_CACHE`` (default ``.cache``). With ``GOODPUT_OFFLINE=1`` nothing
else is asked, so an air-gapped machine needs only a copy of that folder.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("GOODPUT_CACHE", ROOT / ".cache")).resolve()
OFFLINE = os.environ.get("GOODPUT_OFFLINE", "") not in ("", "0")
MIN_PYTHON = (3, 11)
DEBIAN_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
COLLECTIONS = ("ansible.posix", "community.general")


def say(text: str) -> None:
    print(f"bootstrap: {text}", flush=True)


def refuse(text: str) -> None:
    print(f"bootstrap: {text}", file=sys.stderr)
    sys.exit(2)


def run(command: list[str]) -> None:
    result = subprocess.run(command, cwd=ROOT)
    if result.returncode:
        refuse(f"failed with exit {result.returncode}: {' '.join(command)}")


def wanted_packages(uses: set[str]) -> list[str]:
    """Names from requirements/system.txt for these uses and this machine's architecture."""
    arch = DEBIAN_ARCH.get(platform.machine(), platform.machine())
    names = []
    for line in (ROOT / "requirements/system.txt").read_text().splitlines():
        fields = line.split("#")[0].split()
        if len(fields) >= 2 and fields[1] in uses and fields[2:] in ([], [arch]):
            names.append(fields[0])
    return names


def missing_packages(names: list[str]) -> list[str]:
    query = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", *names], capture_output=True, text=True
    )
    have = {line.split()[0] for line in query.stdout.splitlines() if line.endswith(" installed")}
    return [name for name in names if name not in have]


def install_system(uses: set[str]) -> bool:
    """Install missing packages as root or through passwordless sudo; True if anything was installed."""
    names = wanted_packages(uses)
    if shutil.which("dpkg-query") is None:
        refuse(f"found no dpkg: install these by hand and try again: {' '.join(names)}")
    missing = missing_packages(names)
    if not missing:
        return False
    if OFFLINE:
        refuse(
            f"GOODPUT_OFFLINE is set and {len(missing)} system packages are missing; install them: {' '.join(missing)}"
        )
    line = f"apt-get update && apt-get install -y --no-install-recommends {' '.join(missing)}"
    as_root = os.geteuid() == 0
    prefix: list[str] = []
    if not as_root:
        sudo = shutil.which("sudo")
        if sudo is None or subprocess.run([sudo, "-n", "true"], capture_output=True).returncode:
            refuse(
                f"{len(missing)} system packages are missing and this user may not install them. Run:\n"
                f"  sudo sh -c '{line}'"
            )
        prefix = ["sudo", "-n"]
    say(f"installing {' '.join(missing)}")
    log = CACHE / "apt.log"
    log.parent.mkdir(parents=True, exist_ok=True)
    env = [*prefix, "env", "DEBIAN_FRONTEND=noninteractive"]
    with log.open("w") as out:
        for command in (["apt-get", "update"], ["apt-get", "install", "-y", "--no-install-recommends", *missing]):
            if subprocess.run([*env, *command], stdout=out, stderr=out).returncode:
                refuse(f"{' '.join(command)} failed, see {log}. To do it by hand:\n  {line}")
    return True


def fingerprint(*files: Path) -> str:
    digest = hashlib.sha256(f"{sys.version_info[:3]} {sys.prefix}".encode())
    for path in files:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def stamped(stamp: Path, value: str) -> bool:
    return stamp.is_file() and stamp.read_text() == value


def pip(venv: Path, *arguments: str) -> None:
    env = ["--disable-pip-version-check", "--quiet", "--no-cache-dir"]
    if OFFLINE:
        env += ["--no-index"]
    run([str(venv / "bin/python"), "-m", "pip", arguments[0], *env, *arguments[1:]])


def make_venv(venv: Path, requirements: Path) -> bool:
    """Create or refresh the virtual environment from a hashed requirements file; True if it changed."""
    stamp, value = venv / ".stamp", fingerprint(requirements)
    if stamped(stamp, value):
        return False
    say(f"virtual environment {venv.name} from {requirements.name} (Python {platform.python_version()})")
    if not (venv / "bin/python").exists() or not stamp.exists():
        run([sys.executable, "-m", "venv", "--clear", str(venv)])
    # Through the folder, so that it is complete when it is copied to an air-gapped machine.
    wheels = ["--find-links", str(CACHE / "wheels")]
    if not OFFLINE:
        pip(venv, "download", "--require-hashes", "-r", str(requirements), "-d", str(CACHE / "wheels"), *wheels)
    pip(venv, "install", "--no-index", "--require-hashes", "-r", str(requirements), *wheels)
    # The package of this checkout itself, without resolving anything.
    ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = subprocess.check_output([str(venv / "bin/python"), "-c", ask], text=True)
    (Path(site.strip()) / "goodput-checkout.pth").write_text(f"{ROOT / 'src'}\n{ROOT / 'collections'}\n")
    entry = venv / "bin/goodput"
    entry.write_text(f"#!{venv / 'bin/python'}\nfrom goodput.cli import main\nmain()\n")
    entry.chmod(0o755)
    stamp.write_text(value)
    return True


def unpack_collections(venv: Path) -> bool:
    """Unpack the pinned collections into collections/ansible_collections; True if they changed."""
    requirements = ROOT / "requirements/collections.txt"
    target = ROOT / "collections/ansible_collections"
    stamp, value = target / ".stamp", hashlib.sha256(requirements.read_bytes()).hexdigest()
    if stamped(stamp, value):
        return False
    say(f"collections {' '.join(COLLECTIONS)}")
    store = CACHE / "wheels"
    flags = ["--no-deps", "--require-hashes", "--only-binary=:all:", "--find-links", str(store)]
    pip(venv, "download", *flags, "-d", str(store), "-r", str(requirements))
    wheels = sorted(store.glob("ansible-*.whl"))
    with zipfile.ZipFile(wheels[-1]) as wheel:
        for name in COLLECTIONS:
            prefix = f"ansible_collections/{name.replace('.', '/')}/"
            shutil.rmtree(target / name.replace(".", "/"), ignore_errors=True)
            wheel.extractall(target.parent, [m for m in wheel.namelist() if m.startswith(prefix)])
    stamp.write_text(value)
    return True


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--virtual", action="store_true", help="also what the virtual pair needs (QEMU, image tools)")
    parser.add_argument("--test", action="store_true", help="also what `make lint` and `make test` need")
    parser.add_argument("--venv", default=".venv", help="virtual environment to make (default %(default)s)")
    arguments = parser.parse_args()
    if sys.version_info < MIN_PYTHON:
        required = f"{MIN_PYTHON[0]}.{MIN_PYTHON[1]}"
        refuse(f"found Python {platform.python_version()}, required {required} or newer: run it with a newer python3")
    venv = ROOT / arguments.venv
    changed = install_system({"controller"} | ({"virtual"} if arguments.virtual else set()))
    # The test environment holds the controller's packages too, so it is never replaced by the smaller one.
    testing = arguments.test or (venv / ".with-test").exists()
    changed |= make_venv(venv, ROOT / "requirements" / ("test.txt" if testing else "controller.txt"))
    if testing:
        (venv / ".with-test").touch()
    changed |= unpack_collections(venv)
    say("ready" if changed else "nothing to install")


if __name__ == "__main__":
    main()
