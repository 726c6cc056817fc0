#!/usr/bin/env python3
"""Check that `ansible-doc` can load the documentation of every module and filter, and that it tells the truth.

A module keeps its arguments in a function `argument_spec()`; names, types, defaults, choices and `required` must be the
documented ones. (A module that only documents an action plugin has no code to compare.) Examples must be valid YAML
that uses the plugin by its full name.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
COLLECTION = "goodput.spark"
DEFAULTS: dict[str, Any] = {"type": "str", "elements": None, "choices": None, "default": None, "required": False}


def names(root: Path, kind: str) -> list[str]:
    """Full names of the documented plugins of one kind: files for modules, what filters() answers for filters."""
    files = [path for path in sorted((root / "plugins" / kind).glob("*.py")) if not path.name.startswith("_")]
    if kind == "modules":
        return [f"{COLLECTION}.{path.stem}" for path in files]
    found: list[str] = []
    for path in files:
        module = importlib.import_module(f"ansible_collections.{COLLECTION}.plugins.filter.{path.stem}")
        found += [f"{COLLECTION}.{name}" for name in module.FilterModule().filters()]
    return found


def ansible_doc(root: Path, kind: str, plugins: list[str]) -> tuple[dict[str, Any], str]:
    """(answer by full name, error text) of one ansible-doc; one bad plugin leaves the answer empty."""
    command = [str(Path(sys.executable).parent / "ansible-doc"), "--json", "-t", kind, *plugins]
    env = {**os.environ, "ANSIBLE_COLLECTIONS_PATH": str(root / "collections"), "ANSIBLE_NOCOLOR": "1"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env.get('PATH', '')}"
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env, cwd=root)
    try:
        answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    except ValueError:
        answer = {}
    return answer, " ".join(done.stderr.split())


def documented(root: Path, kind: str, plugins: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """(documentation, error text), each by full name."""
    if not plugins:
        return {}, {}
    answer, error = ansible_doc(root, kind, plugins)
    if len(plugins) > 1 and any("doc" not in answer.get(name, {}) for name in plugins):
        single = {name: ansible_doc(root, kind, [name]) for name in plugins}
        answer = {name: found[name] for name, (found, _error) in single.items() if name in found}
        errors = {name: text for name, (_found, text) in single.items()}
    else:
        errors = dict.fromkeys(plugins, error)
    good = {name: entry for name, entry in answer.items() if "doc" in entry}
    return good, {name: text for name, text in errors.items() if name not in good}


def options_differ(doc: dict[str, Any], spec: dict[str, Any], prefix: str = "") -> list[str]:
    problems = []
    options: dict[str, Any] = doc or {}
    for name in sorted(options.keys() ^ spec.keys()):
        problems.append(
            f"option {prefix}{name} is {'not documented' if name in spec else 'documented, but no argument'}"
        )
    for name in sorted(options.keys() & spec.keys()):
        for field, fallback in DEFAULTS.items():
            said, real = options[name].get(field, fallback), spec[name].get(field, fallback)
            if isinstance(said, tuple | list):
                said, real = list(said), list(real or [])
            if said != real:
                problems.append(f"option {prefix}{name}: documented {field} {said!r}, real {real!r}")
        if "options" in spec[name] or "suboptions" in options[name]:
            inner = options[name].get("suboptions", {}), spec[name].get("options", {})
            problems += options_differ(*inner, prefix=f"{prefix}{name}.")
    return problems


def check_module(name: str, entry: dict[str, Any]) -> list[str]:
    module = importlib.import_module(f"ansible_collections.{COLLECTION}.plugins.modules.{name.rsplit('.', 1)[1]}")
    if not hasattr(module, "argument_spec"):
        return ["has no function argument_spec()"]
    return options_differ(entry["doc"].get("options", {}), module.argument_spec())


def check_entry(name: str, entry: dict[str, Any]) -> list[str]:
    problems = []
    try:
        examples = entry.get("examples") or ""
        yaml.safe_load(examples)
    except yaml.YAMLError as error:
        problems.append(f"EXAMPLES are no YAML: {' '.join(str(error).split())}")
        examples = name
    if name not in examples:
        problems.append("EXAMPLES do not use it by its full name")
    if not entry.get("return"):
        problems.append("has no RETURN")
    return problems


def check(root: Path) -> list[str]:
    problems = []
    for kind, folder in (("module", "modules"), ("filter", "filter")):
        plugins = names(root, folder)
        answers, errors = documented(root, kind, plugins)
        for name in plugins:
            if name not in answers:
                problems.append(f"{kind} {name}: `ansible-doc -t {kind} {name}` fails: {errors[name]}")
                continue
            found = check_entry(name, answers[name])
            if kind == "module" and not (root / "plugins/action" / f"{name.rsplit('.', 1)[1]}.py").exists():
                found += check_module(name, answers[name])
            problems += [f"{kind} {name}: {text}" for text in found]
    return problems


def main() -> None:
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else ROOT
    sys.path.insert(0, str(root / "collections"))
    problems = check(root)
    for problem in problems:
        print(problem)
    print(f"plugin documentation: {len(problems)} problems", file=sys.stderr)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
