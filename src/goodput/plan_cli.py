"""``goodput plan``: every size and flag of a serving arrangement, and why one is refused.

Exit 0: it fits (or its refusal was accepted). 1: refused. 2: bad input.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from typing import Annotated, Any, NoReturn

import typer
import yaml
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import GIB, PlanInputError
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.planner import make_plan
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.profile import Neighbour, Node, Observed
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.rules import RULES, Rule, known_rule
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.search import search as search_plans
from rich.console import Console
from rich.text import Text
from typer.core import TyperGroup

from goodput import plan_view

#: Used without --memory: what a Spark typically reports.
DEFAULT_MEMORY_GIB = (119.7, 119.7)


class _ShowByDefault(TyperGroup):
    """``goodput plan PROFILE`` is ``goodput plan show PROFILE``."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("--help", "-h"):
            args = ["show", *args]
        return super().parse_args(ctx, args)


plan_app = typer.Typer(
    cls=_ShowByDefault,
    help="Sizes and flags of a serving arrangement, or why it can not work: `goodput plan PROFILE`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ModelOption = Annotated[str | None, typer.Option("--model", help="Name in models/ or directory of a model.")]
MemoryOption = Annotated[
    list[float] | None,
    typer.Option("--memory", metavar="GIB", help="MemTotal of each node, the server first. Repeat per node."),
]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one key: lmcache.l1.size_gib=12.")
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else.")]
AcceptOption = Annotated[
    list[str] | None, typer.Option("--accept", metavar="RULE", help="Take this refusal knowingly.")
]


def _console() -> Console:
    return Console(highlight=False, width=None if sys.stdout.isatty() else 140)


def _bad_input(error: PlanInputError) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"goodput plan: {error}", style="red"))
    raise typer.Exit(2)


def _checked(function: Callable[..., None]) -> Callable[..., None]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> None:
        try:
            function(*args, **kwargs)
        except PlanInputError as error:
            _bad_input(error)

    return call


def overrides(items: Iterable[str]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for item in items:
        key, separator, value = item.partition("=")
        if not separator or not key:
            raise PlanInputError("--set", item, "must be KEY=VALUE", "for example --set lmcache.l1.size_gib=12")
        try:
            result[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise PlanInputError(f"--set {key}", value, "must be a YAML value", "quote it for the shell") from None
    return result


def _nodes(memory: Iterable[float] | None) -> tuple[list[Node], bool]:
    given = list(memory or [])
    return files.nodes_from_gib(given or DEFAULT_MEMORY_GIB), not given


def planned(
    profile: str,
    model: str | None = None,
    memory: Iterable[float] | None = None,
    settings: Iterable[str] = (),
    accept: Iterable[str] = (),
    accept_memory: bool = False,
    of_site: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    loaded = files.load_profile(profile, {**overrides(settings), **(of_site or {})})
    nodes, _assumed = _nodes(memory)
    return make_plan(loaded, files.load_model(model or loaded.model), nodes, accept=accept, accept_memory=accept_memory)


@plan_app.command("show")
@_checked
def show(
    profile: Annotated[str | None, typer.Argument(help="Name in profiles/ or a .yml file.")] = None,
    model: ModelOption = None,
    memory: MemoryOption = None,
    settings: SetOption = None,
    accept: AcceptOption = None,
    accept_memory: Annotated[
        bool, typer.Option("--accept-memory", help="Also take a memory rule: the node may freeze.")
    ] = False,
    as_json: JsonOption = False,
    everything: Annotated[bool, typer.Option("--all", help="All profiles on all models: a table of verdicts.")] = False,
) -> None:
    """One plan: memory of each node, sizes of each tier, argument lists. The word `show` can be left out."""
    if everything:
        _matrix(memory, as_json)
        return
    if profile is None:
        raise PlanInputError("PROFILE", None, "name one", "known: " + ", ".join(files.names_in(files.PROFILES)))
    plan = planned(profile, model, memory, settings or (), accept or (), accept_memory)
    if as_json:
        print(json.dumps(plan, indent=2))
    else:
        console = _console()
        if not memory:
            console.print(Text("memory assumed: two nodes of 119.7 GiB; give --memory for yours", style="yellow"))
        plan_view.show(console, plan)
    raise typer.Exit(0 if plan["ok"] else 1)


def all_verdicts(nodes: list[Node]) -> tuple[dict[str, dict[str, str]], list[str]]:
    """Every profile on every model: {profile: {model: verdict}} and the models."""
    models = {name: files.load_model(name) for name in files.names_in(files.MODELS)}
    rows: dict[str, dict[str, str]] = {}
    for name in files.names_in(files.PROFILES):
        profile = files.load_profile(name)
        rows[name] = {}
        for model_name, model in models.items():
            try:
                rows[name][model_name] = plan_view.verdict(make_plan(profile, model, nodes))
            except PlanInputError as error:
                rows[name][model_name] = f"refused input: {error.name}"
    return rows, list(models)


def _matrix(memory: Iterable[float] | None, as_json: bool) -> None:
    rows, models = all_verdicts(_nodes(memory)[0])
    if as_json:
        print(json.dumps(rows, indent=2))
    else:
        plan_view.matrix(_console(), rows, models)


@plan_app.command("diff")
@_checked
def diff(
    a: Annotated[str, typer.Argument(help="Profile.")],
    b: Annotated[str, typer.Argument(help="Profile.")],
    model: ModelOption = None,
    memory: MemoryOption = None,
    as_json: JsonOption = False,
) -> None:
    """What changes between two profiles: choices, sizes, arguments."""
    left, right = (planned(name, model, memory) for name in (a, b))
    if as_json:
        print(json.dumps(plan_view.difference(left, right), indent=2))
    else:
        plan_view.diff(_console(), left, right)


def example_plan(rule: Rule) -> dict[str, Any]:
    """The plan that fires a rule, for worked numbers."""
    name, settings = rule.example
    extra = rule.example_nodes
    profile = files.load_profile(name, settings)
    available = extra.get("available_gib")
    nodes = [
        Node(
            name=f"node{index}",
            total_bytes=int(gib * GIB),
            available_bytes=None if available is None else int(available * GIB),
            server=index == 1,
        )
        for index, gib in enumerate((119.7, 121.7), 1)
    ]
    observed = Observed(neighbours=tuple(Neighbour(**item) for item in extra.get("neighbours", ())))
    return make_plan(profile, files.load_model(profile.model), nodes, observed=observed)


@plan_app.command("explain")
@_checked
def explain(rule_id: Annotated[str, typer.Argument(metavar="RULE", help="Such as KV004.")]) -> None:
    """A rule in words, with worked numbers."""
    rule = known_rule(rule_id)
    plan_view.explain(_console(), rule, example_plan(rule))


@plan_app.command("rules")
@_checked
def rules(markdown: Annotated[bool, typer.Option("--markdown", help="As docs/rules.md.")] = False) -> None:
    """All rules."""
    if markdown:
        print(
            plan_view.rules_markdown(RULES.values(), {rule.id: example_plan(rule) for rule in RULES.values()}), end=""
        )
        return
    console = _console()
    for rule in RULES.values():
        console.print(Text(f"{rule.id}  {'refuses' if rule.severity == 'error' else 'warns  '}  {rule.title}"))


@plan_app.command("search")
@_checked
def search(
    model: Annotated[str, typer.Option("--model", help="Name in models/ or directory of a model.")],
    memory: MemoryOption = None,
    profile: Annotated[str, typer.Option("--profile", help="Gives dtypes, lengths, load, L2 capacity.")] = "",
    settings: SetOption = None,
    top: Annotated[int, typer.Option("--top", min=1, max=1000, help="How many to show.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Feasible arrangements, ranked by distinct longest prompts reachable without computing them again."""
    base = files.load_profile(
        profile or ("super-recommended" if model == "super" else "nano-recommended"), overrides(settings or ())
    )
    nodes, assumed = _nodes(memory)
    loaded = files.load_model(model)
    found = search_plans(base, loaded, nodes)
    if as_json:
        print(json.dumps([item.__dict__ | {"prefixes": item.prefixes} for item in found[:top]], indent=2))
        raise typer.Exit(0 if found else 1)
    console = _console()
    if assumed:
        console.print(Text("memory assumed: two nodes of 119.7 GiB; give --memory for yours", style="yellow"))
    load = make_plan(base, loaded, nodes)["sizes"]
    console.print(
        Text(
            f"{len(found)} arrangements of {loaded.geometry.name} fit. Ranked by distinct prompts of"
            f" {load['longest_prompt_tokens']:,} tokens a node serves without computing them again\n(device + below; an"
            " upper bound, because what is below also holds what is on the device), ties by memory left.\nEach stages"
            f" at once {load['simultaneous_restores']} restores: one of the longest prompt, the others of"
            f" {load['typical_prompt_tokens']:,} tokens. Speed is not predicted."
        )
    )
    plan_view.candidates(console, found, top)
    raise typer.Exit(0 if found else 1)
