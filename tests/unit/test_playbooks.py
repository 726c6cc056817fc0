"""Every playbook of a layer also works alone."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import yaml
from plays import run_playbook

ROOT = Path(__file__).resolve().parents[2]


def away(folder: Path, *words: str) -> str:
    """A program that came with the Ansible of this interpreter, where nothing of this checkout is configured."""
    program = Path(sys.executable).with_name(words[0])
    clean = {name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")}
    clean["ANSIBLE_COLLECTIONS_PATH"] = str(folder / "collections")
    done = subprocess.run(
        [str(program), *words[1:]], cwd=folder, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_site_is_read_by_this_ansible_and_lists_every_layer() -> None:
    for how, words in (("--syntax-check", "playbook: "), ("--list-tasks", "dynamo : configure | Start the units")):
        done = run_playbook("inventory/pair", "site.yml", how)
        assert done.returncode == 0 and words in done.stdout, done.stdout + done.stderr


def test_the_collection_is_built_installed_and_documented(tmp_path: Path) -> None:
    """What another lab installs, without this checkout."""
    away(tmp_path, "ansible-galaxy", "collection", "build", "--output-path", str(tmp_path), str(ROOT))
    [archive] = tmp_path.glob("goodput-spark-*.tar.gz")
    away(tmp_path, "ansible-galaxy", "collection", "install", archive.name, "--no-deps", "--offline", "--force")
    installed = tmp_path / "collections/ansible_collections/goodput/spark"
    modules = [f"goodput.spark.{path.stem}" for path in sorted((installed / "plugins/modules").glob("*.py"))]
    assert len(modules) > 20
    assert set(json.loads(away(tmp_path, "ansible-doc", "-t", "module", "--json", *modules))) == set(modules)


def test_a_playbook_whose_role_reads_the_plan_makes_it() -> None:
    site = yaml.safe_load((ROOT / "vars/site.yml").read_text())
    of_plan = {"goodput_plan"} | {name for name, value in site.items() if "goodput_plan" in value}
    readers = {
        path.parts[-3]
        for path in ROOT.glob("roles/*/defaults/main.yml")
        if any(name in path.read_text() for name in of_plan)
    }
    assert {"lmcache", "dynamo", "nvme_l2", "runtime_image"} <= readers
    for path in sorted((ROOT / "playbooks").glob("*.yml")):
        plays = yaml.safe_load(path.read_text())
        roles = {role["role"].rpartition(".")[2] for play in plays for role in play.get("roles", [])}
        if roles & readers:
            assert plays[0].get("import_playbook") == "plan.yml", (
                f"{path.name} runs {', '.join(sorted(roles & readers))}"
            )


def test_imported_playbooks_exist() -> None:
    for path in [ROOT / "site.yml", *ROOT.glob("playbooks/*.yml"), *ROOT.glob("extensions/molecule/*/*.yml")]:
        for target in re.findall(r"import_playbook: (\S+)", path.read_text()):
            assert (path.parent / target).is_file(), f"{path.relative_to(ROOT)}: {target}"


def test_ansible_managed_stands_in_templates_only() -> None:
    """Ansible gives it a value there alone; in the content of a task it ends the play."""
    tasks = [path for path in sorted((ROOT / "roles").rglob("*.yml")) if "ansible_managed" in path.read_text()]
    assert [str(path.relative_to(ROOT)) for path in tasks] == []
