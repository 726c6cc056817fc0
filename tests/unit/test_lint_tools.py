"""Each tool of `make lint` on a good tree and on trees with one fault each: the fault is named, nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import check_argspecs
import check_plugin_docs
import check_variables
import pytest
import role_readmes

DEFAULTS = "---\n# Size.\nrole_a_size_gib: 8\n# role_a_serial: serial of the disk\nrole_a_names: [x]\n"
SPECS = """---
argument_specs:
  main:
    options:
      role_a_size_gib: {type: int, description: Size in GiB., default: 8}
      role_a_serial: {type: str, description: Serial., required: true}
      role_a_names: {type: list, elements: str, description: [Names., More | less.]}
"""
TASKS = """---
- name: Do it
  ansible.builtin.command: "{{ role_a_size_gib }} {{ role_a_serial }}"
  register: __role_a_done
  loop: "{{ role_a_names }}"
  loop_control:
    loop_var: __role_a_name
- name: Show it
  ansible.builtin.debug:
    msg: "{{ __role_a_done }} {{ __role_a_name }}"
"""
README = "# role_a\n\n<!-- inputs -->\n<!-- /inputs -->\n\nUndo: reset.\n"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small collection that every check passes."""
    files = {
        "roles/role_a/defaults/main.yml": DEFAULTS,
        "roles/role_a/meta/argument_specs.yml": SPECS,
        "roles/role_a/tasks/main.yml": TASKS,
        "roles/role_a/README.md": README,
        "group_vars/all/a.yml": "---\nrole_a_size_gib: 9\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    role_readmes.check(tmp_path, write=True)
    return tmp_path


def edit(tree: Path, name: str, old: str, new: str) -> None:
    path = tree / name
    text = path.read_text() if path.exists() else ""
    assert old in text
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.replace(old, new) if old else new)


@pytest.mark.parametrize("check", [check_argspecs.check, check_variables.check, role_readmes.check])
def test_a_good_tree_is_clean(tree: Path, check: Callable[[Path], list[str]]) -> None:
    assert check(tree) == []


DEFAULTS_FILE = "roles/role_a/defaults/main.yml"
SPECS_FILE = "roles/role_a/meta/argument_specs.yml"
TASKS_FILE = "roles/role_a/tasks/main.yml"


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        (DEFAULTS_FILE, "role_a_names: [x]", "", f"{DEFAULTS_FILE}: role_a_names is missing"),
        (
            DEFAULTS_FILE,
            "role_a_names: [x]",
            "role_a_names: [x]\nrole_a_new: 1",
            f"{SPECS_FILE}: role_a_new is missing",
        ),
        (DEFAULTS_FILE, "gib: 8", "gib: 7", "states default 8, but defaults/main.yml has 7"),
        (DEFAULTS_FILE, "# role_a_serial: serial", "# serial", "role_a_serial is required: name it in a comment"),
        (DEFAULTS_FILE, "# role_a_serial: serial of the disk", "role_a_serial: x", "is required, but has a default"),
        (DEFAULTS_FILE, "names: [x]", "names: x", "is of type list, but defaults/main.yml has 'x'"),
        (SPECS_FILE, "default: 8", "choices: [1, 2]", "has choices [1, 2], but defaults/main.yml has 8"),
        (SPECS_FILE, "{type: int, description: Size in GiB., ", "{type: int, ", "role_a_size_gib has no description"),
        (SPECS_FILE, "elements: str, ", "", "role_a_names is a list without elements"),
    ],
)
def test_argspecs(tree: Path, file: str, old: str, new: str, problem: str) -> None:
    edit(tree, file, old, new)
    problems = check_argspecs.check(tree)
    assert len(problems) == 1
    assert problem in problems[0]


def test_argspecs_of_a_role_without_any(tree: Path) -> None:
    (tree / SPECS_FILE).unlink()
    assert f"{SPECS_FILE}: missing or empty" in check_argspecs.check(tree)


def test_argspecs_accept_a_template_as_default(tree: Path) -> None:
    edit(tree, DEFAULTS_FILE, "gib: 8", 'gib: "{{ plan.size }}"')
    edit(tree, SPECS_FILE, ", default: 8", "")
    assert check_argspecs.check(tree) == []


def test_argspecs_want_the_prefix_of_the_role(tree: Path) -> None:
    for file in (DEFAULTS_FILE, SPECS_FILE):
        edit(tree, file, "role_a_names", "names")
    assert check_argspecs.check(tree) == [f"{SPECS_FILE}: names does not begin with role_a_"]


@pytest.mark.parametrize(
    ("file", "old", "new", "problem"),
    [
        ("group_vars/all/a.yml", "role_a_size_gib", "role_a_size_gb", "group_vars/all/a.yml: role_a_size_gb"),
        (TASKS_FILE, " {{ __role_a_name }}", "", f"{TASKS_FILE}: __role_a_name"),
        (TASKS_FILE, "{{ __role_a_done }} ", "", f"{TASKS_FILE}: __role_a_done"),
        (TASKS_FILE, '"{{ role_a_names }}"', "[1]  # role_a_names", f"{DEFAULTS_FILE}: role_a_names"),
        ("vars/site.yml", "", "goodput_typo: 1\n", "vars/site.yml: goodput_typo"),
        ("roles/role_a/vars/main.yml", "", "__role_a_old: 1\n", "roles/role_a/vars/main.yml: __role_a_old"),
        (
            "roles/role_a/tasks/more.yml",
            "",
            "- name: x\n  block:\n    - name: y\n      ansible.builtin.set_fact:\n        __role_a_fact: 1\n",
            "roles/role_a/tasks/more.yml: __role_a_fact",
        ),
        (
            "roles/role_a/tasks/more.yml",
            "",
            "- name: x\n  ansible.builtin.include_tasks: y.yml\n  vars:\n    __role_a_given: 1\n",
            "roles/role_a/tasks/more.yml: __role_a_given",
        ),
    ],
)
def test_variables(tree: Path, file: str, old: str, new: str, problem: str) -> None:
    edit(tree, file, old, new)
    assert check_variables.check(tree) == [f"{problem} is used nowhere"]


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("roles/role_a/templates/x.j2", "{{ goodput_new }}\n"),
        ("playbooks/x.yml", '- hosts: all\n  vars:\n    x: "{{ goodput_new }}"\n'),
        ("plugins/action/x.py", 'task_vars["goodput_new"]\n'),
    ],
)
def test_variables_used_elsewhere_count(tree: Path, file: str, text: str) -> None:
    edit(tree, "vars/site.yml", "", "goodput_new: 1\n")
    assert check_variables.check(tree) == ["vars/site.yml: goodput_new is used nowhere"]
    edit(tree, file, "", text)
    assert check_variables.check(tree) == []


def test_a_comment_in_a_template_is_no_use(tree: Path) -> None:
    edit(tree, "vars/site.yml", "", "goodput_new: 1\n")
    edit(tree, "roles/role_a/templates/x.j2", "", "{# goodput_new #}\n")
    assert check_variables.check(tree) == ["vars/site.yml: goodput_new is used nowhere"]


def test_readme_table(tree: Path) -> None:
    text = (tree / "roles/role_a/README.md").read_text()
    assert "| `role_a_size_gib` | int | `8` | Size in GiB. |" in text
    assert "| `role_a_serial` | str | required | Serial. |" in text
    assert '| `role_a_names` | list of str | `["x"]` | Names. More \\| less. |' in text
    assert text.endswith("Undo: reset.\n")


def test_a_stale_or_missing_readme(tree: Path) -> None:
    edit(tree, DEFAULTS_FILE, "gib: 8", "gib: 7")
    assert role_readmes.check(tree) == ["roles/role_a/README.md: the table of inputs is stale: run `make docs`"]
    role_readmes.check(tree, write=True)
    assert role_readmes.check(tree) == []
    (tree / "roles/role_a/README.md").write_text("# role_a\n")
    assert "needs one pair" in role_readmes.check(tree)[0]
    (tree / "roles/role_a/README.md").unlink()
    assert role_readmes.check(tree) == ["roles/role_a/README.md: missing"]


def test_readme_shows_nested_options() -> None:
    options = {"x": {"type": "list", "elements": "dict", "options": {"y": {"type": "int", "default": 1}}}}
    assert list(role_readmes.rows(options, {"x": []})) == [
        "| `x` | list of dict | `[]` |  |",
        "| `x[].y` | int | `1` |  |",
    ]


SPEC = {"name": {"type": "str", "required": True}, "size": {"type": "int", "default": 3}}


@pytest.mark.parametrize(
    ("doc", "problem"),
    [
        ({"name": {"required": True}, "size": {"type": "int", "default": 3}}, None),
        ({"name": {"required": True}}, "option size is not documented"),
        (
            {"name": {"required": True}, "size": {"type": "int", "default": 4}},
            "option size: documented default 4, real 3",
        ),
        ({"name": {}, "size": {"type": "int", "default": 3}}, "option name: documented required False, real True"),
        ({**SPEC, "gone": {}}, "option gone is documented, but no argument"),
    ],
)
def test_documented_options(doc: dict[str, Any], problem: str | None) -> None:
    assert check_plugin_docs.options_differ(doc, SPEC) == ([problem] if problem else [])


def test_a_module_whose_documentation_does_not_load(tmp_path: Path) -> None:
    """A real ansible-doc on a collection with one good and one broken module."""
    modules = tmp_path / "plugins/modules"
    modules.mkdir(parents=True)
    good = "DOCUMENTATION = '''\nmodule: good\nshort_description: x\ndescription: x\nauthor: x\noptions: {}\n'''\n"
    (modules / "good.py").write_text(good + "EXAMPLES = '''\n- goodput.spark.good:\n'''\nRETURN = '''\n{}\n'''\n")
    (modules / "broken.py").write_text("DOCUMENTATION = '''\nmodule: broken\noptions: [\n'''\n")
    link = tmp_path / "collections/ansible_collections/goodput/spark"
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path)
    (tmp_path / "galaxy.yml").write_text("namespace: goodput\nname: spark\nversion: 0.0.1\n")
    plugins = check_plugin_docs.names(tmp_path, "modules")
    assert plugins == ["goodput.spark.broken", "goodput.spark.good"]
    answers, errors = check_plugin_docs.documented(tmp_path, "module", plugins)
    assert list(answers) == ["goodput.spark.good"]
    assert list(errors) == ["goodput.spark.broken"]
    assert "parse documentation" in errors["goodput.spark.broken"]


def test_examples_must_be_yaml_with_the_full_name() -> None:
    entry = {"examples": "- spark.x: [", "return": None}
    problems = check_plugin_docs.check_entry("goodput.spark.x", entry)
    assert [text.split(":")[0] for text in problems] == ["EXAMPLES are no YAML", "has no RETURN"]
    assert check_plugin_docs.check_entry("goodput.spark.x", {"examples": "- x:", "return": {"a": 1}}) == [
        "EXAMPLES do not use it by its full name"
    ]
