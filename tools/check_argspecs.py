#!/usr/bin/env python3
"""Compare each role's defaults/main.yml with meta/argument_specs.yml, in both directions.

Same keys; a stated default is the same value and of the stated type; every option has a type and a description and
begins with the role's name. An option without a sensible default is `required: true`, and then a comment in the
defaults names it instead of a value.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from role_tree import entry_points, load, report, roles

TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "path": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
}


def is_template(value: Any) -> bool:
    return isinstance(value, str) and ("{{" in value or "{%" in value)


def check_role(role: Path) -> list[str]:
    name = role.name
    defaults_file, spec_file = f"roles/{name}/defaults/main.yml", f"roles/{name}/meta/argument_specs.yml"
    defaults = load(role / "defaults/main.yml")
    entries = entry_points(role)
    options: dict[str, Any] = entries.get("main", {}).get("options", {}) or {}
    problems = []
    if not entries:
        problems.append(f"{spec_file}: missing or empty")
    commented = set()
    if (role / "defaults/main.yml").is_file():
        commented = set(re.findall(r"^# ?([a-z_0-9]+):", (role / "defaults/main.yml").read_text(), re.MULTILINE))
    for key in sorted(defaults.keys() - options.keys()):
        problems.append(f"{spec_file}: {key} is missing (it is in defaults/main.yml)")
    for key in sorted(options.keys() - defaults.keys()):
        if not options[key].get("required"):
            problems.append(f"{defaults_file}: {key} is missing (it is in argument_specs.yml and not required)")
        elif key not in commented:
            problems.append(f"{defaults_file}: {key} is required: name it in a comment, `# {key}: …`")
    for key, option in options.items():
        problems += [f"{spec_file}: {key} {text}" for text in check_option(name, key, option)]
        if key in defaults:
            problems += [f"{spec_file}: {key} {text}" for text in check_default(option, defaults[key])]
    return problems


def check_option(role: str, key: str, option: dict[str, Any]) -> list[str]:
    problems = [f"has no {field}" for field in ("type", "description") if not option.get(field)]
    if not key.startswith(f"{role}_"):
        problems.append(f"does not begin with {role}_")
    if option.get("type") == "list" and "elements" not in option:
        problems.append("is a list without elements")
    return problems


def check_default(option: dict[str, Any], value: Any) -> list[str]:
    problems = []
    if option.get("required"):
        problems.append("is required, but has a default")
    if "default" in option and option["default"] != value:
        problems.append(f"states default {option['default']!r}, but defaults/main.yml has {value!r}")
    if is_template(value) or value is None:
        return problems
    wanted = TYPES.get(option.get("type", ""))
    if wanted is not None and (not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted)):
        problems.append(f"is of type {option['type']}, but defaults/main.yml has {value!r}")
    if "choices" in option and value not in option["choices"]:
        problems.append(f"has choices {option['choices']}, but defaults/main.yml has {value!r}")
    return problems


def check(root: Path) -> list[str]:
    return [problem for role in roles(root) for problem in check_role(role)]


if __name__ == "__main__":
    report(check, "argument specs")
