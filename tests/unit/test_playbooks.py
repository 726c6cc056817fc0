"""Every playbook of a layer also works alone."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def test_a_playbook_whose_role_reads_the_plan_makes_it() -> None:
    readers = {path.parts[-3] for path in ROOT.glob("roles/*/defaults/main.yml") if "goodput_plan" in path.read_text()}
    assert {"lmcache", "dynamo", "nvme_l2"} <= readers
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
