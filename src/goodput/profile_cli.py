"""``goodput profile``: which serving arrangements there are, what one is, and switch to another one.

A switch is the same plays as ``goodput site`` from the plan on: the frontend drains, what changed is restarted, and the
verdict compares the running processes with the new plan. The choice is kept beside the inventory, in a file of its own.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import PlanInputError, nearest
from rich.table import Table
from rich.text import Text

from goodput import cli, plan_cli, plan_view
from goodput.inventory import InventoryError, load
from goodput.runner import ROOT, Request

profile_app = typer.Typer(help="Serving arrangements: list, show, switch.", no_args_is_help=True)

# Ansible reads a group's folder in alphabetical order and the last file wins.
CHOICE = "group_vars/sparks/zz-goodput-profile.yml"
HEADER = "# Written by `goodput profile use`; remove the file to go back to group_vars/all.\n"
# The layers that a profile decides, behind what must be proved in this boot: the verdict asks for rails and power, and
# after a reboot nobody has proved them yet. What stays the same is only verified.
TAGS = "rdma,model_store,power_gate,lmcache,dynamo,kube_serving,verdict"


def choice_file(inventory: Path) -> Path:
    """Where the choice of this inventory is kept: beside a file, inside a directory."""
    return (inventory if inventory.is_dir() else inventory.parent) / CHOICE


def _refuse_hidden(target: Path) -> None:
    """Ansible reads a group's folder or its file, never both: a new folder would hide every choice in the file."""
    folder = target.parent
    for name in (folder, *(folder.with_suffix(suffix) for suffix in (".yml", ".yaml", ".json"))):
        if name.is_file():
            file, aside = cli.shown(name), cli.shown(name.with_name("main.yml"))
            cli.could_not_run(
                f"found {file}; required: the group's variables in a folder, because Ansible would no longer read this "
                f"file beside {cli.shown(target)}; fix: mv {file} {aside} && mkdir {cli.shown(folder)} && "
                f"mv {aside} {cli.shown(folder)}/"
            )


def configured(inventory: Path) -> str:
    """The profile that the inventory names now, empty if none or if the inventory can not be read."""
    try:
        return str(load(inventory, basedir=ROOT)[0].variables["goodput_profile"])
    except (InventoryError, KeyError):
        return ""


def rows() -> list[dict[str, Any]]:
    """Name, engine, model and description of every profile."""
    found = []
    for name in files.names_in(files.PROFILES):
        profile = files.load_profile(name)
        found.append(
            {"name": name, "engine": profile.engine, "model": str(profile.model), "description": profile.description}
        )
    return found


@profile_app.command("list")
def list_profiles(inventory: cli.InventoryOption = None, as_json: cli.JsonOption = False) -> None:
    """Every profile; * marks the one that the inventory names."""
    path = inventory or (cli.VIRTUAL if cli.VIRTUAL.exists() else cli.PAIR)
    now, known = configured(path), rows()
    if as_json:
        print(json.dumps({"configured": now, "profiles": known}))
        return
    table = Table(box=None, pad_edge=False)
    for title in ("", "profile", "engine", "model", "what it is"):
        table.add_column(title)
    for row in known:
        mark = "*" if row["name"] == now else ""
        table.add_row(mark, row["name"], row["engine"], row["model"], row["description"])
    cli.terminal(quiet=False).print(table)


@profile_app.command("show")
def show(profile: Annotated[str, typer.Argument(help="Name in profiles/ or a .yml file.")]) -> None:
    """What one profile needs and starts: the same as `goodput plan PROFILE`."""
    plan_cli.show(profile)


def _refuse_unknown(name: str) -> None:
    known = files.names_in(files.PROFILES)
    if name not in known and "/" not in name:
        cli.could_not_run(f"found profile {name!r}, required one of {', '.join(known)}; {nearest(name, known)}")


@profile_app.command("use")
def use(
    profile: Annotated[str, typer.Argument(help="Name in profiles/ or a .yml file.")],
    inventory: cli.InventoryOption = None,
    extra_vars: cli.ExtraOption = None,
    verbose: cli.VerboseOption = 0,
    as_json: cli.JsonOption = False,
) -> None:
    """Plan, show what changes, drain, restart, and verify from the running processes that this profile serves."""
    path = cli.find_inventory(inventory, as_json=as_json)
    _refuse_unknown(profile)
    target = choice_file(path)
    _refuse_hidden(target)
    former = configured(path)
    if former and former != profile and not as_json:
        console = cli.terminal(quiet=False)
        assumed = "for two nodes of 119.7 GiB; the run plans with the memory that it measures"
        console.print(Text(assumed, style="yellow"))
        try:
            plan_view.diff(console, *(plan_cli.planned(name) for name in (former, profile)))
        except PlanInputError as error:
            cli.could_not_run(str(error))
    pairs = (*(extra_vars or ()), json.dumps({"goodput_profile": profile}))
    request = Request("site.yml", path, tags=TAGS, extra_vars=pairs, verbosity=verbose)
    command = f"profile use {profile}"
    outcome, _ = cli.play(command, request, resume=f"goodput {command}", as_json=as_json)
    if outcome.ok:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(HEADER + yaml.safe_dump({"goodput_profile": profile}))
        if configured(path) != profile:
            print(f"something else names {configured(path)} and wins over {cli.shown(target)}", file=sys.stderr)
        if not as_json:
            cli.terminal(quiet=False).print(Text(f"kept in {cli.shown(target)}"))
    elif not as_json and former and former != profile:
        print(
            f"{former} is still what the inventory names, whatever the nodes run by now; fix the cause and repeat "
            f"`goodput {command}`, or go back with `goodput profile use {former}`",
            file=sys.stderr,
        )
    raise typer.Exit(outcome.exit_code)
