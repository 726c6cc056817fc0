"""Which arrangement (arm) runs, found from the arguments of the running processes and never from a label.

Every profile is planned for the nodes' own memory; the arm is the profile whose argument lists the processes have. A
flag that no plan knows is a difference, too: it may be left over from another arm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import PlanInputError
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.planner import make_plan
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.site import overrides_of_site
from ansible_collections.goodput.spark.plugins.module_utils.serving import L2_CAPACITY, PLACEHOLDER

from goodput.node_questions import COORDINATOR, FRONTEND, LMCACHE, WORKER

PLANES = ("--discovery-backend", "--request-plane", "--event-plane")
#: unit: (key of its list in a plan, flags that the roles add).
LISTS = {
    LMCACHE: ("lmcache_server_args", ("--port", "--http-port")),
    COORDINATOR: ("lmcache_coordinator_args", ()),
    WORKER: ("dynamo_worker_args", PLANES),
    FRONTEND: ("dynamo_frontend_args", ("--http-host", "--http-port", *PLANES)),
}


@dataclass(frozen=True)
class Difference:
    """``planned`` or ``running`` is "" where the argument is missing."""

    node: str
    unit: str
    argument: str
    planned: str
    running: str


@dataclass(frozen=True)
class Arm:
    """The nearest profile. ``compared``: arguments looked at on all nodes; none differs if the arm is that profile."""

    name: str
    compared: int
    differences: tuple[Difference, ...]

    @property
    def exact(self) -> bool:
        return self.compared > 0 and not self.differences


def options(words: Sequence[str]) -> dict[str, list[str]]:
    """``--flag value --switch`` as ``{"--flag": ["value"], "--switch": [""]}``; what stands before them is left out."""
    found: dict[str, list[str]] = {}
    last = ""
    for word in words:
        if word.startswith("--"):
            last, equals, value = word.partition("=")
            found.setdefault(last, []).append(value if equals else "")
        elif last:
            found[last][-1] = f"{found[last][-1]} {word}".strip()
    return found


def module(words: Sequence[str]) -> str:
    """``vllm`` of ``python3 -m dynamo.vllm``."""
    names = [word.removeprefix("dynamo.") for before, word in pairwise(words) if before == "-m"]
    return names[0] if names else ""


def fits(planned: str, running: str) -> bool:
    """Equal, where a placeholder such as {management_address} stands for anything.

    The capacity of an L2 in files may be less than planned: what was there at the start comes off it (l2_residue).
    """
    want, have = L2_CAPACITY.search(planned), L2_CAPACITY.search(running)
    if '"type":"fs_native"' in planned and want and have and float(have[0]) <= float(want[0]):
        planned, running = L2_CAPACITY.sub("", planned), L2_CAPACITY.sub("", running)
    parts = PLACEHOLDER.split(planned)[::2]
    return re.fullmatch(".+".join(re.escape(part) for part in parts), running, re.DOTALL) is not None


def compare(
    planned: Sequence[str], running: Sequence[str], added: Iterable[str]
) -> tuple[int, list[tuple[str, str, str]]]:
    """(arguments compared, [(argument, planned, running)] of those that differ)."""
    want, have = options(planned), options(running)
    extra = [name for name in have if name not in want and name not in added]
    wrong = []
    for name in [*want, *extra]:
        left, right = want.get(name, []), have.get(name, [])
        if len(left) != len(right) or not all(fits(*pair) for pair in zip(left, right, strict=True)):
            wrong.append((name, _shown(left), _shown(right)))
    return len(want) + len(extra), wrong


def _shown(values: Sequence[str]) -> str:
    return " ".join(values) or ("(set)" if values else "")


def against(plan: Mapping[str, Any], running: Mapping[str, Mapping[str, Sequence[str]]]) -> Arm:
    """One plan against ``{node: {unit: words of its main process}}``.

    A unit that the plan needs and that does not run differs. Frontend and coordinator are needed on one node.
    """
    compared, found = 0, []
    everywhere = {unit for units in running.values() for unit in units}
    for node, units in running.items():
        for unit, (key, added) in LISTS.items():
            words, planned = units.get(unit), plan[key]
            if words is None:
                alone = unit in (FRONTEND, COORDINATOR)
                if planned and not (alone and (unit in everywhere or node != next(iter(running)))):
                    found.append(Difference(node, unit, "process", "runs", ""))
                continue
            if not planned:
                found.append(Difference(node, unit, "process", "", "runs"))
                continue
            count, wrong = compare(planned, words, added)
            compared += count
            found += [Difference(node, unit, *item) for item in wrong]
            engine = plan["inputs"]["profile"]["engine"]
            if unit == WORKER and module(words) != engine:
                found.append(Difference(node, unit, "engine", engine, module(words)))
    return Arm(str(plan["name"]), compared, tuple(found))


def site_plans(variables: Mapping[str, Any], memory: Sequence[Mapping[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
    """The name that the inventory chooses, and a plan of that choice (first) and of every other profile.

    ``memory``: one mapping a node, as ``node_from`` takes it. A profile that can not be planned for them is left out.
    """
    chosen = str(variables.get("goodput_profile") or "")
    nodes = [files.node_from(facts) for facts in memory]
    store = variables.get("model_store_models") or []
    release = str(variables.get("goodput_release") or "")
    plans = []
    for name in dict.fromkeys([chosen, *files.names_in(files.PROFILES)]):
        own = name == chosen
        model = str(variables.get("goodput_model") or "") if own else ""
        values = variables.get("goodput_profile_set") or {} if own else {}
        try:
            if release:
                # Revision and versions as the plays take them: the name of the L2 directory has both.
                values = overrides_of_site(values, name, model, store, release)
            profile = files.load_profile(name, values)
            accept = variables.get("goodput_plan_accept") or [] if own else []
            plans.append(make_plan(profile, files.load_model(model or profile.model), nodes, accept=accept))
        except PlanInputError:
            continue
    return chosen, plans


def find(plans: Iterable[Mapping[str, Any]], running: Mapping[str, Mapping[str, Sequence[str]]]) -> Arm | None:
    """The plan that differs least; the first of equals. None if nothing runs or nothing can be planned."""
    if not any(unit in LISTS for units in running.values() for unit in units):
        return None
    return min((against(plan, running) for plan in plans), key=distance, default=None)


def distance(arm: Arm) -> int:
    """A process more or less, or another engine, weighs more than an argument."""
    return sum(10 if item.argument in ("process", "engine") else 1 for item in arm.differences)
