"""The ``goodput`` command: the same playbooks as ``ansible-playbook``, with progress, short failures and a verdict.

Exit 0: ok. 1: a task or a check failed. 2: could not run (arguments, inventory, unreachable). 130: interrupted.
"""

from __future__ import annotations

import getpass
import importlib
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from goodput import display
from goodput.progress import Run, Timings
from goodput.runner import ROOT, CouldNotRun, Outcome, Request, execute

STATE = Path(os.environ.get("GOODPUT_STATE", ROOT / ".goodput")).resolve()
VIRTUAL, PAIR = ROOT / "inventory/virtual", ROOT / "inventory/pair"

app = typer.Typer(
    name="goodput",
    help="From stock DGX Sparks to a verified endpoint. Runs the collection's playbooks and shows what they do.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
virtual_app = typer.Typer(help="The virtual pair: two QEMU guests in place of two Sparks.", no_args_is_help=True)
bench_app = typer.Typer(help="Measure.", no_args_is_help=True)
app.add_typer(virtual_app, name="virtual")
app.add_typer(bench_app, name="bench")
app.add_typer(importlib.import_module("goodput.plan_cli").plan_app, name="plan")
app.command("power")(importlib.import_module("goodput.power_cli").power)
app.add_typer(importlib.import_module("goodput.k8s_cli").k8s_app, name="k8s")
importlib.import_module("goodput.ops_cli").register(app)

InventoryOption = Annotated[
    Path | None,
    typer.Option("-i", "--inventory", help="Inventory; default inventory/virtual if it exists, else inventory/pair."),
]
LimitOption = Annotated[str | None, typer.Option("--limit", help="Only these nodes.")]
TagsOption = Annotated[str | None, typer.Option("--tags", help="Only these tags (a layer's name, preflight, verify).")]
SkipTagsOption = Annotated[str | None, typer.Option("--skip-tags", help="All but these tags.")]
CheckOption = Annotated[bool, typer.Option("--check", help="Change nothing, show what would change.")]
ExtraOption = Annotated[list[str] | None, typer.Option("-e", "--extra-vars", help="NAME=VALUE, JSON or @FILE.")]
VerboseOption = Annotated[int, typer.Option("-v", "--verbose", count=True, help="More detail in the log.")]
PasswordOption = Annotated[bool, typer.Option("-K", "--ask-become-pass", help="Ask for the sudo password.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
SvgOption = Annotated[Path | None, typer.Option("--svg", hidden=True, help="Save the final screen as SVG.")]


def terminal(*, quiet: bool) -> Console:
    """The console of a run; a file or a pipe gets lines of 120 columns."""
    return Console(highlight=False, quiet=quiet, width=None if sys.stdout.isatty() else 120)


def shown(path: Path) -> str:
    """A path as a person would type it."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)


def could_not_run(reason: str, *, as_json: bool = False) -> NoReturn:
    """Say why nothing was started and exit 2."""
    if as_json:
        print(json.dumps({"ok": False, "exit": 2, "reason": reason}))
    else:
        Console(stderr=True, highlight=False, soft_wrap=True).print(Text(f"could not run: {reason}", style="bold red"))
    raise typer.Exit(2)


def find_inventory(given: Path | None, *, as_json: bool) -> Path:
    """The inventory to use; exits 2 with the one line to run if it is not there."""
    path = given if given is not None else (VIRTUAL if VIRTUAL.exists() else PAIR)
    if not path.exists():
        name = path.resolve()
        if name == VIRTUAL:
            fix = "run `goodput virtual up`"
        elif name == PAIR:
            fix = "run `goodput virtual up`, or describe your Sparks in inventory/pair/hosts.yml"
        else:
            fix = "check -i"
        could_not_run(f"found no inventory at {shown(path)}; {fix}", as_json=as_json)
    return path.resolve()


def resume_line(command: str, request: Request, default_inventory: bool) -> str:
    """The command line that goes on where this run stopped."""
    words = ["goodput", command]
    if request.inventory is not None and not default_inventory:
        words += ["-i", shown(request.inventory)]
    for option, value in (("--limit", request.limit), ("--tags", request.tags), ("--skip-tags", request.skip_tags)):
        words += [option, value] if value else []
    words += ["--check"] if request.check else []
    for pair in request.extra_vars:
        words += ["-e", shlex.quote(pair)]
    return " ".join(words)


def load_verdict(since: float) -> dict[str, Any] | None:
    """The verdict that this run wrote, if any."""
    path = STATE / "verdict.json"
    try:
        if path.stat().st_mtime < since:
            return None
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def play(
    command: str,
    request: Request,
    *,
    resume: str,
    as_json: bool = False,
    svg: Path | None = None,
    run: Run | None = None,
    console: Console | None = None,
    every_check: bool = False,
) -> tuple[Outcome, dict[str, Any] | None]:
    """Run one playbook with progress and print its report; returns the outcome and the verdict it wrote."""
    console = console or terminal(quiet=as_json)
    timings = Timings(STATE / "timings.json")
    expected = timings.expected(request.kind) if request.full else {}
    run, since = run if run is not None else Run(), time.time()
    title = f"goodput {command}" + (f"   {shown(request.inventory)}" if request.inventory else "")
    with display.Progress(console, title, run, expected) as progress:
        try:
            outcome = execute(request, STATE, run=run, on_event=progress.event, on_interrupt=progress.interrupt)
        except CouldNotRun as error:
            reason = str(error)
            outcome = None
    if outcome is None:
        could_not_run(reason, as_json=as_json)
    verdict = load_verdict(since)
    if verdict is not None and verdict["exit"] == 2 and outcome.exit_code == 1:
        outcome.exit_code, outcome.reason = 2, str(verdict["reason"])
    if outcome.ok and request.full:
        timings.learn(request.kind, run)
    if as_json:
        print(json.dumps(as_object(command, request, outcome, verdict)))
    else:
        body = report(f"goodput {command}", outcome, verdict, expected, resume, every_check=every_check)
        console.print(body, crop=False)
        if svg is not None:
            save_svg(svg, Group(Text(title, style="bold"), body))
    return outcome, verdict


def report(
    title: str,
    outcome: Outcome,
    verdict: dict[str, Any] | None,
    expected: dict[str, float],
    resume: str,
    *,
    every_check: bool = False,
) -> RenderableType:
    """The final screen: layers, what tasks wanted shown, the verdict, failures, how to go on."""
    run, parts = outcome.run, list[RenderableType]()
    # One row would repeat the last line or the verdict.
    if len(run.layers) > 1 or (run.failures and verdict is None):
        parts.append(display.layer_table(run, expected))
    if "guests" in run.kept:
        parts.append(display.guest_table(run.kept["guests"]))
    for text in run.shows:
        parts += [Text(text), Text("")]
    # Why it could not run stands in the last lines.
    if verdict is not None and verdict["exit"] != 2:
        from goodput.verdict import Verdict, render

        parts.append(render(Verdict.from_dict(verdict), every_check=every_check))
    # A failed verdict has said everything that its task would repeat.
    if run.failures and (verdict is None or verdict["ok"] or any(f.layer != "verify" for f in run.failures)):
        parts.append(display.failures(run))
    parts.append(display.headline(title, outcome, resume))
    return Group(*parts)


def as_object(command: str, request: Request, outcome: Outcome, verdict: dict[str, Any] | None) -> dict[str, Any]:
    """The object of ``--json``."""
    return {
        "ok": outcome.ok,
        "exit": outcome.exit_code,
        "reason": outcome.reason,
        "command": command,
        "playbook": request.playbook,
        "inventory": None if request.inventory is None else str(request.inventory),
        **outcome.run.to_dict(),
        "wall_seconds": round(outcome.seconds, 1),
        "verdict": verdict,
        "folder": str(outcome.folder),
    }


def save_svg(path: Path, screen: RenderableType, width: int = 100) -> None:
    """Write what the terminal shows at the end as a picture."""
    with Path(os.devnull).open("w") as nowhere:
        recorder = Console(record=True, width=width, file=nowhere, force_terminal=True, highlight=False)
        recorder.print(screen)
    recorder.save_svg(str(path), title="goodput")


def playbook_command(command: str, playbook: str, summary: str, *, verdict_detail: bool = False) -> Callable[..., None]:
    """A command that runs one playbook on an inventory."""

    def run(
        inventory: InventoryOption = None,
        limit: LimitOption = None,
        tags: TagsOption = None,
        skip_tags: SkipTagsOption = None,
        check: CheckOption = False,
        extra_vars: ExtraOption = None,
        verbose: VerboseOption = 0,
        ask_become_pass: PasswordOption = False,
        as_json: JsonOption = False,
        every_check: Annotated[bool, typer.Option("--all", help="List every check of the verdict.")] = False,
        deep: Annotated[
            bool, typer.Option("--deep", help="Verdict with a proof of each cache tier: minutes; restarts LMCache.")
        ] = False,
        svg: SvgOption = None,
    ) -> None:
        path = find_inventory(inventory, as_json=as_json)
        extra_vars = [*(extra_vars or ()), *(["verify_deep=true"] if deep else [])]
        password = getpass.getpass("sudo password of the nodes: ") if ask_become_pass else None
        request = Request(
            playbook, path, limit, tags, skip_tags, check, tuple(extra_vars or ()), verbose, become_password=password
        )
        resume = resume_line(command, request, inventory is None)
        outcome, _ = play(command, request, resume=resume, as_json=as_json, svg=svg, every_check=every_check)
        raise typer.Exit(outcome.exit_code)

    app.command(command, help=summary)(run)
    return run


site = playbook_command(
    "site", "site.yml", "From stock to serving: every layer in order, each verified, then a verdict."
)
verify = playbook_command("verify", "playbooks/verify.yml", "Run the acceptance suite and print the verdict.")
reset = playbook_command("reset", "playbooks/reset.yml", "Undo what the roles made, as their manifests list it.")


def _guest_run() -> Run:
    """A run of the virtual pair's one role, shown by its stages."""
    return Run(stages={"install": "image", "configure": "boot"}, keep=("guests",))


def _virtual(
    state: str, *, as_json: bool, extra_vars: list[str] | None = None, verbose: int = 0, command: str | None = None
) -> Outcome:
    pairs = (f"virtual_pair_state={state}", *(extra_vars or ()))
    # Booting, stopping and asking take different times: only `up` is worth remembering.
    request = Request("playbooks/virtual_pair.yml", None, extra_vars=pairs, verbosity=verbose, remember=state == "up")
    name = f"virtual {command or state}"
    return play(name, request, resume=f"goodput {name}", as_json=as_json, run=_guest_run())[0]


@virtual_app.command("up")
def virtual_up(as_json: JsonOption = False, extra_vars: ExtraOption = None, verbose: VerboseOption = 0) -> None:
    """Build the image if needed, boot the pair and write inventory/virtual."""
    raise typer.Exit(_virtual("up", as_json=as_json, extra_vars=extra_vars, verbose=verbose).exit_code)


@virtual_app.command("down")
def virtual_down(as_json: JsonOption = False, extra_vars: ExtraOption = None, verbose: VerboseOption = 0) -> None:
    """End the pair."""
    raise typer.Exit(_virtual("down", as_json=as_json, extra_vars=extra_vars, verbose=verbose).exit_code)


@virtual_app.command("fresh")
def virtual_fresh(as_json: JsonOption = False, extra_vars: ExtraOption = None, verbose: VerboseOption = 0) -> None:
    """End the pair and forget its disks: the next boot is stock."""
    outcome = _virtual("absent", as_json=as_json, extra_vars=extra_vars, verbose=verbose, command="fresh")
    raise typer.Exit(outcome.exit_code)


@virtual_app.command("status")
def virtual_status(as_json: JsonOption = False, verbose: VerboseOption = 0) -> None:
    """Say which guests run."""
    raise typer.Exit(_virtual("status", as_json=as_json, verbose=verbose).exit_code)


@virtual_app.command("ssh", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def virtual_ssh(
    node: Annotated[str, typer.Argument(help="1, 2 or the node's name.")],
    command: Annotated[list[str] | None, typer.Argument(help="A command instead of a shell.")] = None,
    inventory: InventoryOption = None,
) -> None:
    """Open a shell on a guest."""
    from goodput.inventory import InventoryError, load

    path = find_inventory(inventory or VIRTUAL, as_json=False)
    try:
        nodes = load(path, basedir=ROOT)
    except InventoryError as error:
        could_not_run(str(error))
    names = [each.name for each in nodes]
    wanted = names[int(node) - 1] if node.isdigit() and 1 <= int(node) <= len(names) else node
    if wanted not in names:
        could_not_run(f"found node {node!r}, required one of 1 to {len(names)} or {', '.join(names)}")
    argv = [*nodes[names.index(wanted)].interactive, *(command or ())]
    os.execvp(argv[0], argv)


@bench_app.command("site")
def bench_site(
    inventory: InventoryOption = None,
    boot: Annotated[bool, typer.Option(help="Measure image and boot of the virtual pair first.")] = True,
    fresh: Annotated[bool, typer.Option("--fresh", help="Forget the pair's disks before: a stock boot.")] = False,
    as_json: JsonOption = False,
    svg: SvgOption = None,
) -> None:
    """Seconds per stage: image and boot of the virtual pair, each layer, a second run, and 20 trivial tasks."""
    console = terminal(quiet=as_json)
    pair = boot and (inventory is None or inventory.resolve() == VIRTUAL)
    results: dict[str, Outcome] = {}
    if pair:
        for name, state in (("fresh", "absent"), ("boot", "up")) if fresh else (("boot", "up"),):
            request = Request("playbooks/virtual_pair.yml", None, extra_vars=(f"virtual_pair_state={state}",))
            results[name] = _bench_step(name, request, console, _guest_run())
    path = VIRTUAL.resolve() if pair else find_inventory(inventory, as_json=as_json)
    for name, playbook in (
        ("first run", "site.yml"),
        ("second run", "site.yml"),
        ("20 trivial tasks", "playbooks/bench_baseline.yml"),
    ):
        results[name] = _bench_step(name, Request(playbook, path), console, Run())
    second = results["second run"].run
    idle = not any(second.changed.values())
    if as_json:
        runs = {
            name: {
                "wall_seconds": round(outcome.seconds, 1),
                "layers": {layer.name: round(layer.seconds, 1) for layer in outcome.run.layers.values()},
                "figures": outcome.run.figures(),
                "changed": outcome.run.changed,
            }
            for name, outcome in results.items()
        }
        print(json.dumps({"ok": idle, "exit": 0 if idle else 1, "runs": runs}))
    else:
        parts: list[RenderableType] = []
        for name, outcome in results.items():
            parts += [Text(f"{name}: {outcome.seconds:.0f} s in all", style="bold"), display.stage_table(outcome.run)]
        compared = ("first run", "second run", "20 trivial tasks")
        parts.append(display.comparison([(name, results[name].run.figures()) for name in compared]))
        if not idle:
            parts.append(Text(f"NOT OK: the second run changed {second.changed}, required 0", style="bold red"))
        console.print(Group(*parts), crop=False)
        if svg is not None:
            save_svg(svg, Group(*parts))
    raise typer.Exit(0 if idle else 1)


def _bench_step(name: str, request: Request, console: Console, run: Run) -> Outcome:
    outcome, _ = play(f"bench site: {name}", request, resume="goodput bench site", console=console, run=run)
    if not outcome.ok:
        raise typer.Exit(outcome.exit_code)
    return outcome


def main() -> None:
    """Entry point."""
    if not (ROOT / "site.yml").is_file() and not (ROOT / "playbooks").is_dir():
        sys.exit(f"goodput: found no playbooks at {ROOT}; run it from a checkout or an installed collection")
    app()


if __name__ == "__main__":
    # Run as a module this file would exist twice: here and as what the commands import.
    from goodput.cli import main as run

    run()
else:
    # At the end: it uses what is defined above.
    app.add_typer(importlib.import_module("goodput.profile_cli").profile_app, name="profile")
