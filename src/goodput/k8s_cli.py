"""``goodput k8s render``: the objects of the Kubernetes platform, for review or GitOps.

Exit 0: rendered. 1: the plan is refused. 2: bad input, such as an image without a digest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import file_name, kube_objects
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import PlanInputError, nearest
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.site import overrides_of_site
from ansible_collections.goodput.spark.plugins.module_utils.rail_plan import rail_plan
from ansible_collections.goodput.spark.plugins.module_utils.serving import ServingError
from rich.console import Console
from rich.text import Text

from goodput import plan_cli, plan_view
from goodput.inventory import InventoryError, load
from goodput.runner import ROOT

k8s_app = typer.Typer(help="The Kubernetes platform.", no_args_is_help=True, add_completion=False)

RELEASES = ROOT / "vars/releases"
#: The upper port of a Spark; what a node really has is found by the role rdma.
RAILS = ("enp1s0f0np0:rocep1s0f0", "enP2p1s0f0np0:roceP2p1s0f0")
#: As roles/rdma has them.
SUBNETS = ("192.168.100.0/24", "192.168.101.0/24")
#: The first line of every file we write, by which a later run knows which ones it may replace or remove.
HEADER = "# Rendered by `goodput k8s render`"


@k8s_app.callback()
def k8s() -> None:
    """The Kubernetes platform."""


class _Dumper(yaml.SafeDumper):
    """Text of several lines as a block, and everything written out where it stands."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)


def document(item: Mapping[str, Any]) -> str:
    """One object as YAML."""
    return yaml.dump(dict(item), Dumper=_Dumper, sort_keys=False, width=120)


def release_set(name: str) -> dict[str, Any]:
    names = files.names_in(RELEASES)
    if name not in names:
        raise PlanInputError("--release", name, "must be a file in vars/releases", nearest(name, names))
    found: dict[str, Any] = files.read_yaml(RELEASES / f"{name}.yml")["goodput_release_set"]
    return found


def nodes(
    names: Sequence[str], rails: Sequence[str], variables: Mapping[str, Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Nodes with the addresses that the role rdma would give their rails; one node alone has none."""
    pairs = [dict(zip(("netdev", "rdma_device"), rail.split(":"), strict=False)) for rail in rails]
    if any(len(pair) != 2 for pair in pairs):
        raise PlanInputError("--rail", ", ".join(rails), "must be NETDEV:RDMA_DEVICE", f"such as --rail {RAILS[0]}")
    found = []
    for name in names:
        own = variables.get(name, {})
        node: dict[str, Any] = {"name": name, "management_address": own.get("goodput_management_address", "")}
        if len(names) > 1:
            numbers = {other: variables.get(other, {}).get("rdma_node_number", 0) for other in names}
            subnets = own.get("rdma_rail_subnets", list(SUBNETS))
            plan = rail_plan(names, subnets, name, {name: {"rails": pairs}}, numbers)
            if plan["errors"]:
                raise PlanInputError("rails", subnets, plan["errors"][0], "correct the inventory")
            node["rails"] = [rail | {"addresses": [rail["cidr"]]} for rail in plan["rails"]]
        found.append(node)
    return found


def write(folder: Path, objects: Sequence[Mapping[str, Any]], profile: str) -> list[str]:
    """One file an object, in order; files of a former run that are no more are removed, others are left alone."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        texts = {file_name(index, item): document(item) for index, item in enumerate(objects)}
        for path in folder.glob("*.yaml"):
            if path.name not in texts and path.read_text(errors="replace").startswith(HEADER):
                path.unlink()
        for name, text in texts.items():
            (folder / name).write_text(f"{HEADER}, profile {profile}.\n---\n{text}")
    except OSError as error:
        raise PlanInputError("--out", str(folder), f"can not be written ({error.strerror})", "choose another") from None
    return list(texts)


def _from_inventory(path: Path) -> tuple[list[str], dict[str, Mapping[str, Any]]]:
    try:
        found = load(path, basedir=ROOT)
    except InventoryError as error:
        raise PlanInputError("--inventory", str(path), str(error), "give an inventory with the group sparks") from None
    keys = ("rdma_node_number", "rdma_rail_subnets", "goodput_release", "model_store_models")
    variables: dict[str, Mapping[str, Any]] = {
        node.name: {"goodput_management_address": node.management_address}
        | {key: node.variables[key] for key in keys if key in node.variables}
        for node in found
    }
    return [node.name for node in found], variables


@k8s_app.command("render")
def render(
    profile: Annotated[str, typer.Argument(help="Name in profiles/ or a .yml file.")],
    count: Annotated[int, typer.Option("--nodes", min=1, max=16, help="So many nodes: spark1, spark2, …")] = 2,
    inventory: Annotated[Path | None, typer.Option("-i", "--inventory", help="The nodes of an inventory.")] = None,
    release: Annotated[str | None, typer.Option("--release", help="Release set; default the inventory's.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder; without it everything is printed.")] = None,
    digest: Annotated[
        list[str] | None, typer.Option("--digest", metavar="IMAGE=sha256:…", help="Of runtime, rdma_device_plugin.")
    ] = None,
    draft: Annotated[bool, typer.Option("--draft", help="Images by tag: to look at, not to apply.")] = False,
    choice: Annotated[
        list[str] | None,
        typer.Option("--choice", metavar="KEY=VALUE", help="Such as node_port=0 or pod_monitors=true."),
    ] = None,
    rail: Annotated[
        list[str] | None, typer.Option("--rail", metavar="NETDEV:DEVICE", help="Repeat: both rails of every node.")
    ] = None,
    model: plan_cli.ModelOption = None,
    memory: plan_cli.MemoryOption = None,
    settings: plan_cli.SetOption = None,
    accept: plan_cli.AcceptOption = None,
    accept_memory: Annotated[bool, typer.Option("--accept-memory", help="Also take a memory rule.")] = False,
    as_json: plan_cli.JsonOption = False,
) -> None:
    """All objects of a serving arrangement, in the order in which they are applied."""
    errors = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        names = [f"spark{number}" for number in range(1, count + 1)]
        variables: dict[str, Mapping[str, Any]] = {}
        of_site: dict[str, Any] = {}
        if inventory:
            names, variables = _from_inventory(inventory)
            first = variables[names[0]]
            release = release or str(first.get("goodput_release", "current"))
            # As vars/site.yml has it, so that the names of L2 directories are those of the plays.
            store = first.get("model_store_models") or []
            of_site = overrides_of_site(plan_cli.overrides(settings or ()), profile, model or "", store, release)
        sizes = list(memory or [plan_cli.DEFAULT_MEMORY_GIB[0]] * len(names))
        if len(sizes) != len(names):
            raise PlanInputError("--memory", sizes, f"there are {len(names)} nodes", "give it once for each node")
        chosen = plan_cli.overrides(choice or ())
        digests = {key: str(value) for key, value in plan_cli.overrides(digest or ()).items()}
        given = {**chosen, "draft": draft, **({"digests": digests} if digests else {})}
        plan = plan_cli.planned(profile, model, sizes, settings or (), accept or (), accept_memory, of_site)
        if not plan["ok"]:
            plan_view.findings(errors, plan)
            raise typer.Exit(1)
        site = nodes(names, rail or RAILS, variables)
        objects = kube_objects(plan, site, release_set(release or "current"), given)
        written = write(out, objects, plan["name"]) if out else []
    except (PlanInputError, ServingError) as error:
        errors.print(Text(f"goodput k8s render: {error}", style="red"))
        raise typer.Exit(2) from None
    assumed = [
        *([] if memory else [f"memory {sizes[0]} GiB a node (--memory)"]),
        *([] if rail or len(names) == 1 else [f"rails {', '.join(RAILS)} (--rail)"]),
        *(["images by tag (--draft)"] if draft else []),
    ]
    if assumed:
        errors.print(Text("assumed: " + "; ".join(assumed), style="yellow"))
    if as_json:
        print(json.dumps({"files": written, "objects": objects}, indent=2))
    elif out:
        Console(highlight=False, width=None if sys.stdout.isatty() else 120).print(
            Text("\n".join([*(f"{out / name}" for name in written), f"{len(written)} objects"])), soft_wrap=True
        )
    else:
        print("---\n" + "---\n".join(document(item) for item in objects), end="")
