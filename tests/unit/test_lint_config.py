"""The configuration of ansible-lint, yamllint, ruff and mypy, each on a bad tree: the rules that we rely on are on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

UTILS = "ansible_collections.goodput.spark.plugins.module_utils"
BIN = Path(sys.executable).parent
BAD_TASKS = """---
- name: Write a file
  copy: {src: a, dest: /b, mode: 0644}
  register: result
- name: part | Run
  ansible.builtin.command: ls
  loop: [1]
  loop_control:
    loop_var: thing
- name: part | Pipe
  ansible.builtin.shell: ls | wc
- name: part | ignore
  ansible.builtin.command: ls
  ignore_errors: true
- name: part | Password
  ansible.builtin.user: {name: x, password: "{{ item }}"}
  loop: [1]
- name: part | Empty
  ansible.builtin.debug: {msg: x}
  when: bad_x == ""
- name: part | Arguments
  ansible.builtin.file: {path: /x, nonsense: 1}
"""
# Rule ids that the tasks above, and a role without an argument specification, must raise.
RULES = {
    "args[module]",
    "empty-string-compare",
    "fqcn[action-core]",
    "ignore-errors",
    "loop-var-prefix[wrong]",
    "name[casing]",
    "name[prefix]",
    "no-changed-when",
    "no-log-password",
    "risky-shell-pipe",
    "role-argument-spec",
    "var-naming[no-role-prefix]",
    "yaml[octal-values]",
}


@pytest.fixture
def tree(tmp_path: Path, repository: Path) -> Path:
    for name in (".ansible-lint", ".yamllint", ".gitignore", "pyproject.toml"):
        shutil.copy(repository / name, tmp_path)
    for name in ("tasks", "defaults", "meta"):
        (tmp_path / "roles/bad" / name).mkdir(parents=True)
    return tmp_path


def run(tree: Path, command: Sequence[str]) -> tuple[int, str]:
    env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "NO_COLOR": "1"}
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False, env=env)
    return done.returncode, done.stdout + done.stderr


def test_ansible_lint(tree: Path) -> None:
    role = tree / "roles/bad"
    (role / "tasks/main.yml").write_text("---\n- name: Do it\n  ansible.builtin.import_tasks: part.yml\n")
    (role / "tasks/part.yml").write_text(BAD_TASKS)
    (role / "defaults/main.yml").write_text("---\nbad_x: 1\n")
    (role / "meta/main.yml").write_text("---\ndependencies: []\n")
    status, output = run(tree, ["ansible-lint", "-q", "--format", "pep8"])
    assert status == 2, output
    found = set(re.findall(r"[\w./]+:\d+(?::\d+)?: ([a-z-]+(?:\[[\w-]+\])?)", output))
    assert found >= RULES, output


@pytest.mark.parametrize("bad", ["a: yes\n", "a: 0644\n", "a: 1\na: 2\n", f"a: {'x ' * 90}\n", "a: [\n"])
def test_yamllint(tree: Path, bad: str) -> None:
    path = tree / "x.yml"
    path.write_text("---\na: true\nb: '0644'\n")
    assert run(tree, ["yamllint", "--strict", "x.yml"]) == (0, "")
    path.write_text("---\n" + bad)
    status, output = run(tree, ["yamllint", "--strict", "x.yml"])
    assert status in (1, 2)
    assert "x.yml\n  2:" in output or "x.yml\n  3:" in output


def test_ruff(tree: Path) -> None:
    (tree / "x.py").write_text("import os\nx = [1 for _ in  range(3)]\n")
    status, output = run(tree, ["ruff", "check", "x.py"])
    assert status == 1
    assert "F401" in output
    assert run(tree, ["ruff", "format", "--check", "x.py"])[0] == 1


def test_mypy_sees_plugins_by_their_installed_name(tree: Path) -> None:
    """A wrong type that crosses from a module into module_utils is found, and so is a missing annotation."""
    files = {
        "plugins/module_utils/logic.py": "def half(number: int) -> int:\n    return number // 2\n",
        "plugins/modules/x.py": f"from {UTILS} import logic\n\nlogic.half('4')\n",
        "src/goodput/__init__.py": "def untyped(x):\n    return x\n",
        "tools/x_tool.py": "",
        "tests/unit/test_x.py": "",
    }
    for name, text in files.items():
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    link = tree / "collections/ansible_collections/goodput/spark"
    link.parent.mkdir(parents=True)
    link.symlink_to("../../..")
    status, output = run(tree, ["mypy"])
    assert status == 1, output
    assert 'Argument 1 to "half" has incompatible type "str"' in output
    assert "src/goodput/__init__.py:1: error: Function is missing a type annotation" in output
