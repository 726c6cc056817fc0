# Apache-2.0 (see LICENSE)
"""From a site's measured nodes and choices to the planner's, and from its plan to a few lines for a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from . import files
from .checks import PlanInputError
from .profile import Ports

MEASURED = "goodput_measured"
OTHERS = "goodput_measured_others"


def nodes_of_site(hostvars: Mapping[str, Any], nodes: Sequence[str], first: str) -> list[dict[str, Any]]:
    """What ``node_from`` takes, one mapping a node that was measured in this run.

    ``hostvars`` holds what playbooks/plan.yml registers: ``goodput_measured`` of a node in the play, and results of the
    nodes that ``--limit`` leaves out, of which one that did not answer is planned without.

    :raises PlanInputError: no node was measured.
    """
    found: dict[str, Any] = {}
    for name in nodes:
        for answer in _answers(hostvars, nodes, name):
            memory = answer.get("node", {}).get("memory_at_rest")
            if memory:
                found.setdefault(name, memory)
    if not found:
        raise PlanInputError(
            "nodes",
            ", ".join(nodes),
            "memory must be measured in the same run",
            "run site.yml, or playbooks/plan.yml before",
        )
    return [{"name": name, "server": name == first, **found[name]} for name in nodes if name in found]


def _answers(hostvars: Mapping[str, Any], nodes: Sequence[str], name: str) -> list[Mapping[str, Any]]:
    own = hostvars[name].get(MEASURED) if name in hostvars else None
    answers = [own] if isinstance(own, Mapping) else []
    for node in nodes:
        others = hostvars[node].get(OTHERS) if node in hostvars else None
        for result in (others or {}).get("results", []):
            if result.get("item") == name:
                answers.append(result)
    return answers


def overrides_of_site(
    chosen: Mapping[str, Any], profile: Any, model: str, store: Sequence[Mapping[str, Any]], release: str
) -> dict[str, Any]:
    """What replaces the profile's values: the site's own, the revision of its model, the versions that it installs.

    ``chosen``, ``profile``, ``model`` and ``release`` are goodput_profile_set, goodput_profile, goodput_model and
    goodput_release, ``store`` is model_store_models. Rules and the name of the L2 directory depend on what really
    runs, so a profile that says otherwise is refused.

    :raises PlanInputError: profile or site state another revision or version than the nodes will have.
    """
    data = files.stated(profile, chosen)
    loaded = files.profile_from(data)
    found: dict[str, Any] = files.release_versions(release)
    # A simulated engine runs on every Dynamo, and without LMCache its version decides nothing.
    decisive = ["versions.vllm", "versions.dynamo"] if loaded.engine == "vllm" else []
    decisive += ["versions.lmcache"] if loaded.lmcache.enabled else []
    versions = {f"versions.{key}": str(value) for key, value in data.get("versions", {}).items()}
    said = {key: versions[key] for key in decisive if key in versions}
    wrong = [key for key in said if found.get(key, said[key]) != said[key]]
    if wrong:
        fitting = [
            name for name in files.names_in(files.RELEASES) if said.items() <= files.release_versions(name).items()
        ]
        raise PlanInputError(
            f"profile {loaded.name}",
            _words(said, wrong),
            f"must be what goodput_release {release} installs: {_words(found, wrong)}",
            f"set goodput_release: {fitting[0] if fitting else 'one in vars/releases that installs these'}; or, for the"
            " same arrangement on what is installed, goodput_profile_set: {"
            + ", ".join(f"{key}: {found[key]}" for key in wrong)
            + "}",
        )
    folder = files.load_model(model or loaded.model).folder
    revision = next((str(item.get("revision", "")) for item in store if item.get("name") == folder), "")
    if revision and loaded.model_revision not in ("", revision):
        raise PlanInputError(
            "model_revision",
            loaded.model_revision,
            f"must be that of {folder} in model_store_models, {revision}",
            "remove model_revision from goodput_profile_set and the profile, or correct model_store_models",
        )
    return {**chosen, **found, **({"model_revision": revision} if revision else {})}


def ports_of_site(profile: Any, chosen: Mapping[str, Any]) -> dict[str, int]:
    """Ports by their keys in a profile, for who asks before there is a plan; of a refused profile the usual ones.

    ``profile`` and ``chosen`` are goodput_profile and goodput_profile_set.
    """
    try:
        ports = files.profile_from(files.stated(profile, chosen)).ports
    except PlanInputError:
        ports = Ports()
    return {field.name: getattr(ports, field.name) for field in fields(ports) if field.name != "others"}


def _words(versions: Mapping[str, str], keys: Sequence[str]) -> str:
    return ", ".join(f"{key.removeprefix('versions.')} {versions[key]}" for key in keys)


def summary(plan: Mapping[str, Any]) -> list[str]:
    """The plan as lines: sizes, nodes with what stays free, warnings."""
    sizes = plan["sizes"]
    nodes = ", ".join(
        f"{name} {budget['total_bytes'] / 2**30:.1f} GiB ({budget['free_bytes'] / 2**30:.1f} free)"
        for name, budget in plan["budget"].items()
    )
    return [
        f"profile {plan['name']}, model {plan['model']}: block {sizes['block_size_tokens']} tokens, device "
        f"{sizes['device_tokens']} tokens, L1 {sizes['l1_gib']} GiB, L2 {sizes['l2_capacity_gib']} GiB; {nodes}",
        *(f"{item['rule']} {item['title']}: found {item['found']}; {item['remedy']}" for item in plan["warnings"]),
    ]
