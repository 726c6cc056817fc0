"""Check a site's inputs on the controller: names, types, choices and the inventory, all problems at once.

What is known is read from the collection itself (argument specs, defaults, group_vars, vars), so nothing is listed
twice. Controller only: uses PyYAML, which Ansible brings.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects.inputs import DIGEST, choices_from
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import PlanInputError
from ansible_collections.goodput.spark.plugins.module_utils.preflight import WARNING, Finding

# Names every role shares. Their types are not in any role's argument spec.
SHARED: dict[str, dict[str, Any]] = {
    "goodput_nodes": {"type": "list", "elements": "str"},
    "goodput_first_node": {"type": "str"},
    "goodput_management_address": {"type": "str"},
    "goodput_release": {"type": "str"},
    "goodput_release_set": {"type": "dict"},
    "goodput_profile": {"type": "str"},
    "goodput_model": {"type": "str"},
    "goodput_profile_set": {"type": "dict"},
    "goodput_plan_accept": {"type": "list", "elements": "str"},
    "goodput_plan_accept_memory": {"type": "bool"},
    "goodput_plan": {"type": "dict"},
    "goodput_platform": {"type": "str"},
    "goodput_kube_choices": {"type": "dict"},
    "goodput_kube_server": {"type": "str"},
    "goodput_kube_nodes": {"type": "list", "elements": "dict"},
    "goodput_virtual": {"type": "bool"},
}
BOOLEAN_WORDS = {"true", "false", "yes", "no", "on", "off"}
LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\Z")
# RFC 5737: addresses for documentation, as in the inventory that an owner edits.
EXAMPLES = tuple(ipaddress.ip_network(net) for net in ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24"))
DIRECT_CABLE_NODES = 2


@dataclass(frozen=True)
class Known:
    """What the collection knows: option specs and choices by variable name, name prefixes, mocker profiles."""

    options: Mapping[str, Mapping[str, Any]]
    prefixes: Sequence[str]
    choices: Mapping[str, Sequence[str]]
    # Profiles whose engine computes nothing.
    mockers: Sequence[str] = ()


@dataclass(frozen=True)
class Site:
    """What an owner wrote.

    ``variables`` holds resolved values per node; ``None`` where a value can not be resolved outside its role.
    ``command_line`` names come from ``-e``, where every ``key=value`` is text.
    """

    nodes: Sequence[str]
    addresses: Mapping[str, str] = field(default_factory=dict)
    ports: Mapping[str, int] = field(default_factory=dict)
    management: Mapping[str, str] = field(default_factory=dict)
    variables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    command_line: frozenset[str] = frozenset()
    foreign_variables: Sequence[str] = ()
    choices: Mapping[str, str] = field(default_factory=dict)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; empty if there is none."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    return content if isinstance(content, dict) else {}


def stems(directory: Path) -> list[str]:
    return sorted(path.stem for path in directory.glob("*.yml"))


def load_known(root: Path) -> Known:
    """Read the known names from a collection's directory (a clone or an installed one)."""
    options: dict[str, Mapping[str, Any]] = {}
    roles = sorted(path.name for path in (root / "roles").iterdir() if path.is_dir() and path.name[0] != "_")
    for role in roles:
        defaults, specs = root / "roles" / role / "defaults/main.yml", root / "roles" / role / "meta/argument_specs.yml"
        if defaults.is_file():
            options.update({name: {} for name in read_yaml(defaults)})
        if specs.is_file():
            for entry in read_yaml(specs).get("argument_specs", {}).values():
                options.update(entry.get("options") or {})
    for path in [*sorted((root / "group_vars").rglob("*.yml")), *sorted((root / "vars").rglob("*.yml"))]:
        for name in read_yaml(path):
            options.setdefault(name, {})
    options.update(SHARED)
    return Known(
        options=options,
        prefixes=["goodput_", *(f"{role}_" for role in roles)],
        choices={
            "goodput_release": stems(root / "vars/releases"),
            # Names with an underscore are only inherited from.
            "goodput_profile": [name for name in stems(root / "profiles") if name[0] != "_"],
            "goodput_platform": ["systemd", *(["k3s"] if "k3s" in roles else [])],
        },
        mockers=[
            name
            for name in files.names_in(root / "profiles")
            if files.profile_data(name, root / "profiles").get("engine") == "mocker"
        ],
    )


def nearest(name: str, known: Iterable[str]) -> str:
    """The known name most like this one, or an empty string. One that continues it is closer than any other."""
    names = list(known)
    longer = [other for other in names if len(name) > 3 and other.startswith(name)]
    if longer:
        return min(longer, key=len)
    return next(iter(difflib.get_close_matches(name, names, n=1, cutoff=0.6)), "")


def shown(value: Any) -> str:
    text = f'"{value}"' if isinstance(value, str) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def type_problem(value: Any, spec: Mapping[str, Any], command_line: bool = False) -> str:
    """Why a value does not fit an option of an argument spec; empty if it does.

    Stricter than Ansible, which turns "300" into 300 and 1.10 into "1.1" without a word.
    """
    kind = spec.get("type", "str" if spec else "")
    if value is None or not kind:
        return ""
    # Only the command line turns numbers and booleans into text.
    text = value if isinstance(value, str) and command_line else ""
    if kind == "int" and (isinstance(value, bool) or not isinstance(value, int)):
        if not re.fullmatch(r"[+-]?\d+", text):
            return "an integer, written without quotes"
    elif kind == "float" and (isinstance(value, bool) or not isinstance(value, int | float)):
        if not re.fullmatch(r"[+-]?\d+(\.\d*)?", text):
            return "a number, written without quotes"
    elif kind == "bool" and not isinstance(value, bool):
        if text.lower() not in BOOLEAN_WORDS:
            return "true or false, written without quotes"
    elif kind in ("str", "path") and not isinstance(value, str):
        # An unquoted 7.10 has already lost its zero, an unquoted no is false.
        if isinstance(value, bool | float):
            return "text in quotes"
        if not isinstance(value, int):
            return "text"
    elif kind == "list":
        if not isinstance(value, list | tuple):
            return "" if text else "a list"
        item = {"type": spec.get("elements", ""), "options": spec.get("options")}
        for index, element in enumerate(value):
            problem = type_problem(element, item, command_line)
            if problem:
                return f"{problem}, as item {index + 1}"
    elif kind == "dict":
        if not isinstance(value, Mapping):
            return "a dictionary"
        parts = spec.get("options") or {}
        for name, element in value.items():
            if parts and name not in parts:
                guess = nearest(str(name), parts)
                return f"no key {name}" + (f" (did you mean {guess}?)" if guess else "")
            problem = type_problem(element, parts.get(name, {}), command_line)
            if problem:
                return f"{problem}, in {name}"
    choices = spec.get("choices")
    if choices and not isinstance(value, list | tuple | Mapping) and value not in choices:
        return f"one of {', '.join(str(choice) for choice in choices)}"
    return ""


def where(names: Sequence[str], nodes: Sequence[str]) -> str:
    return "all" if len(nodes) > 1 and set(names) == set(nodes) else ", ".join(names)


def check_variables(site: Site, known: Known) -> Iterator[Finding]:
    """Misspelt names and wrong types."""
    holders: dict[str, list[str]] = {}
    for node in site.nodes:
        for name in site.variables.get(node, {}):
            holders.setdefault(name, []).append(node)
    for name in sorted(holders):
        nodes = where(holders[name], site.nodes)
        if name in site.foreign_variables:
            continue
        ours = name.startswith(tuple(known.prefixes))
        if name not in known.options:
            guess = nearest(name, known.options)
            if ours:
                yield Finding(
                    nodes,
                    "variable",
                    f"{name} is not an input of any role",
                    "a known name" + (f": did you mean {guess}?" if guess else ""),
                    f"correct it to {guess}" if guess else "remove it, or list it in preflight_foreign_variables",
                )
            elif guess and difflib.SequenceMatcher(None, name, guess).ratio() > 0.85:
                yield Finding(
                    nodes,
                    "variable",
                    f"{name} has none of our prefixes but looks like {guess}",
                    f"{guess}, if that is meant",
                    f"correct it to {guess}, or list it in preflight_foreign_variables",
                    WARNING,
                )
            continue
        spec = known.options[name]
        wrong: dict[tuple[str, str], list[str]] = {}
        for node in holders[name]:
            value = site.variables[node][name]
            problem = type_problem(value, spec, name in site.command_line)
            if problem:
                wrong.setdefault((problem, shown(value)), []).append(node)
        for (problem, value), bad in wrong.items():
            found = "a value of another kind" if spec.get("no_log") else f"{name}: {value}"
            yield Finding(
                where(bad, site.nodes), "type", found, f"{name}: {problem}", f"correct {name} where it is set"
            )


def check_choices(site: Site, known: Known) -> Iterator[Finding]:
    for name, value in site.choices.items():
        offered = known.choices.get(name, [])
        if value not in offered:
            guess = nearest(value, offered)
            yield Finding(
                "all",
                "choice",
                f"{name}: {shown(value)}",
                f"one of {', '.join(offered) or 'none: nothing is there'}",
                f"set {name} to {guess}" if guess else f"set {name} to one of them",
            )


def name_problem(name: str) -> str:
    """Why an inventory name can not be a hostname; empty if it can."""
    try:
        ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        return "a name, with the address in ansible_host"
    if len(name) > 253 or not all(LABEL.match(label) for label in name.split(".")):
        return "lower-case letters, digits and hyphens (RFC 1123; it becomes a name in /etc/hosts and in Kubernetes)"
    return ""


def duplicates(values: Mapping[str, str]) -> Iterator[tuple[str, list[str]]]:
    groups: dict[str, list[str]] = {}
    for node, value in values.items():
        groups.setdefault(value, []).append(node)
    return ((value, nodes) for value, nodes in groups.items() if len(nodes) > 1)


def check_inventory(site: Site) -> Iterator[Finding]:
    """Names, addresses and the number of nodes."""
    for node in site.nodes:
        problem = name_problem(node)
        if problem:
            yield Finding(node, "name", f'inventory name "{node}"', problem, "rename the host in the inventory")
        address = site.management.get(node, "")
        try:
            parsed = ipaddress.ip_address(address)
        except ValueError:
            yield Finding(
                node,
                "address",
                f'management address "{address}"',
                "an IP address: it goes into /etc/hosts and into what services bind to",
                "set goodput_management_address for this host",
            )
            continue
        if parsed.is_loopback or parsed.is_unspecified or parsed.is_multicast:
            yield Finding(
                node,
                "address",
                f"management address {address}",
                "an address that the other nodes reach",
                "set goodput_management_address for this host",
            )
        elif any(parsed in network for network in EXAMPLES):
            yield Finding(
                node,
                "address",
                f"{address}, an address for documentation",
                "the node's own address",
                "edit the inventory: the example's addresses are placeholders",
                WARNING,
            )
    endpoints = {node: f"{site.addresses.get(node, node)} port {site.ports.get(node, 22)}" for node in site.nodes}
    for what, values in (("ansible_host", endpoints), ("management address", dict(site.management))):
        for value, nodes in duplicates(values):
            yield Finding(
                ", ".join(nodes),
                "address",
                f"equal {what} {value}",
                "a different one for each node",
                f"correct it for {nodes[-1]}",
            )
    if len(site.nodes) == 1:
        yield Finding(
            site.nodes[0],
            "nodes",
            "one node",
            "nothing: one node works, without the RDMA proof and without peer-to-peer cache reads",
            "add the second node when it is there",
            WARNING,
        )
    elif len(site.nodes) > DIRECT_CABLE_NODES:
        yield Finding(
            "all",
            "nodes",
            f"{len(site.nodes)} nodes",
            "a switch between them: one direct cable joins only two",
            "connect every node's same port to the switch",
            WARNING,
        )
    elif not site.nodes:
        yield Finding("all", "nodes", "no node", "at least one host in the group sparks", "edit the inventory")


def missing_on_k3s(
    site: Site, known: Known, values: Mapping[str, Any], release_set: Mapping[str, Any]
) -> Iterator[Finding]:
    """What Kubernetes needs beside it, on a virtual pair, too."""
    part = release_set.get("kubernetes")
    if not part:
        yield Finding(
            "all",
            "release",
            f"goodput_release: {release_set.get('name', '')}, which has no section kubernetes",
            "a release set that runs on Kubernetes",
            "set goodput_release to current or article, or goodput_platform to systemd",
        )
        return
    given = values.get("goodput_kube_choices") or {}
    try:
        choices_from(given)
    except PlanInputError as error:
        name = f"goodput_kube_{error.name}"
        yield Finding("all", "choices", f"{name}: {shown(error.value)}", f"{name} {error.rule}", error.remedy)
        return
    # Only a real engine asks for devices, and one node alone has no rails.
    devices = len(site.nodes) > 1 and site.choices.get("goodput_profile") not in known.mockers
    for name in ("runtime", *(["rdma_device_plugin"] if devices else [])):
        image = part["images"][name]
        digest = (given.get("digests") or {}).get(name) or image["digest"]
        if not DIGEST.match(str(digest)):
            yield Finding(
                "all",
                "digest",
                f"goodput_kube_choices: digests.{name}: {shown(digest)}",
                f"the digest of {image['name']} ({image['tag']}), sha256: and 64 hexadecimal digits: a tag may change",
                f'set goodput_kube_choices: {{digests: {{{name}: "sha256:…"}}}} (docs/kubernetes.md, The image)',
            )


def missing(site: Site, known: Known, folder: str, release_set: Mapping[str, Any]) -> Iterator[Finding]:
    """What a run to the first token will miss on hardware; each layer refuses it, too, but only when it is reached.

    ``folder`` is that of the planned model, empty if the planner will refuse it.
    """
    values = site.variables.get(site.nodes[0], {}) if site.nodes else {}
    on_k3s = site.choices.get("goodput_platform") == "k3s"
    if on_k3s:
        yield from missing_on_k3s(site, known, values, release_set)
    if values.get("goodput_virtual"):
        return
    if site.choices.get("goodput_profile") in known.mockers:
        yield Finding(
            "all",
            "profile",
            f"goodput_profile: {site.choices['goodput_profile']}, whose engine computes nothing",
            "a profile with a real engine",
            "set goodput_profile (`goodput profile list`)",
        )
    stored = [str(model.get("name")) for model in values.get("model_store_models") or []]
    if not stored or (folder and folder not in stored):
        yield Finding(
            "all",
            "model",
            f"model_store_models: {', '.join(stored) or '[]'}",
            f"{folder or 'the model of the profile'}, at a pinned revision",
            "name it in model_store_models (docs/model_store.md)",
        )
    archive = values.get("runtime_archive") or values.get("runtime_node_archive")
    if not on_k3s and not (archive and values.get("runtime_sha256")):
        yield Finding(
            "all",
            "runtime",
            "no runtime archive",
            "runtime_sha256, and runtime_archive or runtime_node_archive",
            "build one on a Spark and name it (docs/runtime.md)",
        )
    if len(site.nodes) > 1 and not values.get("rdma_netplan_apply"):
        yield Finding(
            "all",
            "rails",
            "rdma_netplan_apply: false",
            "your consent, unless the rails are as they should be already",
            "set rdma_netplan_apply: true; a node that is lost by it undoes it by itself",
            WARNING,
        )


def validate(site: Site, known: Known) -> list[Finding]:
    """All problems of a site's inputs."""
    return [*check_inventory(site), *check_choices(site, known), *check_variables(site, known)]
