"""``goodput status``, ``logs``, ``chat`` and ``soak``: look at what runs and use it. Nothing is changed on a node.

Exit 0: all well. 1: something is down, failed or grew. 2: could not run (arguments, inventory, no node).
130: interrupted.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.live import Live
from rich.text import Text

if TYPE_CHECKING:
    from goodput.session import Session
    from goodput.status import Site

# What a command imports, it imports when it runs: `goodput --help` must answer at once. The collection's own modules
# come before the inventory, which loads Ansible's finder of collections.

InventoryOption = Annotated[
    Path | None,
    typer.Option("-i", "--inventory", help="Inventory; default inventory/virtual if it exists, else inventory/pair."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
LimitOption = Annotated[str | None, typer.Option("--limit", help="Only these nodes.")]
TimeoutOption = Annotated[float, typer.Option("--timeout", min=1, help="Seconds a node may take to answer.")]
ModelOption = Annotated[str | None, typer.Option("--model", help="Model to ask; default the first that is listed.")]


@contextmanager
def _sessions(
    inventory: Path | None, *, as_json: bool, limit: str | None = None, timeout_s: float = 60.0
) -> Iterator[tuple[Path, list[Session]]]:
    """A session a node, not opened yet; exits 2 if the inventory can not be read."""
    from goodput.cli import could_not_run, find_inventory
    from goodput.inventory import InventoryError, load
    from goodput.runner import ROOT
    from goodput.session import Session

    path = find_inventory(inventory, as_json=as_json)
    try:
        nodes = load(path, limit=limit, basedir=ROOT)
    except InventoryError as error:
        could_not_run(str(error), as_json=as_json)
    sessions = [Session(node, open_timeout_s=timeout_s) for node in nodes]
    try:
        yield path, sessions
    finally:
        for session in sessions:
            session.close()


def status(
    inventory: InventoryOption = None,
    limit: LimitOption = None,
    watch: Annotated[float | None, typer.Option("--watch", metavar="S", min=1, help="Look again every S s.")] = None,
    timeout: TimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """One screen: nodes, rails, units, which profile runs, cache fill and hit rates, the router's share."""
    from goodput import status_view
    from goodput.cli import shown, terminal
    from goodput.status import look

    console = terminal(quiet=as_json)
    with _sessions(inventory, as_json=as_json, limit=limit, timeout_s=timeout) as (path, sessions):

        def once() -> tuple[Site, Any]:
            site = look(sessions, timeout)
            now = datetime.now().strftime("%H:%M:%S")
            return site, status_view.screen(site, f"goodput status   {shown(path)}   {now}")

        site, picture = once()
        live = watch is not None and console.is_terminal and not as_json
        if as_json:
            print(json.dumps(site.to_dict()))
        elif not live:
            console.print(picture, crop=False)
        try:
            with Live(picture, console=console, screen=True, auto_refresh=False) if live else nullcontext() as shows:
                while watch is not None:
                    time.sleep(watch)
                    site, picture = once()
                    if as_json:
                        print(json.dumps(site.to_dict()), flush=True)
                    elif shows is None:
                        console.print(picture, crop=False)
                    else:
                        shows.update(picture, refresh=True)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    raise typer.Exit(site.exit_code)


def logs(
    unit: Annotated[str, typer.Argument(help="worker, frontend, lmcache, etcd, ...")],
    inventory: InventoryOption = None,
    node: Annotated[str | None, typer.Option("--node", help="Only this node.")] = None,
    lines: Annotated[int, typer.Option("-n", "--lines", min=1, help="The last so many lines of each node.")] = 50,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on with what comes.")] = False,
    since: Annotated[str | None, typer.Option("--since", help='As for journalctl: "-10min", "08:00".')] = None,
    timeout: TimeoutOption = 60.0,
) -> None:
    """The journal of a goodput unit, all nodes merged by time."""
    from goodput import logs as journal
    from goodput.cli import could_not_run
    from goodput.session import CommandTimeout, Result, Unreachable

    with _sessions(inventory, as_json=False, limit=node, timeout_s=timeout) as (_path, sessions):
        errors: dict[str, str] = {}

        def each(commands: dict[str, str]) -> dict[str, Result]:
            """One command on each node that has one and answers."""

            def ask(session: Session) -> Result | None:
                try:
                    return session.run(commands[session.node.name], timeout)
                except (Unreachable, CommandTimeout) as error:
                    errors[session.node.name] = str(error)
                    return None

            asked = [session for session in sessions if session.node.name in commands]
            with ThreadPoolExecutor(len(asked)) as pool:
                found = zip(asked, pool.map(ask, asked), strict=True)
                return {session.node.name: result for session, result in found if result is not None}

        names = [session.node.name for session in sessions]
        known = {
            name: result.stdout.split() for name, result in each(dict.fromkeys(names, journal.KNOWN_UNITS)).items()
        }
        if not known:
            could_not_run("; ".join(errors.values()))
        try:
            full = journal.resolve(unit, [each_ for units in known.values() for each_ in units])
        except journal.UnknownUnit as error:
            could_not_run(str(error))
        having = [name for name in names if full in known.get(name, ())]
        cursors: dict[str, str | None] = dict.fromkeys(having)
        console = Console(highlight=False, soft_wrap=True)
        for text in errors.values():
            Console(stderr=True, highlight=False, soft_wrap=True).print(Text(text, style="bold red"))
        width = max(len(name) for name in having)

        def show() -> None:
            commands = {
                name: journal.command(full, lines=lines, since=since, cursor=cursor) for name, cursor in cursors.items()
            }
            found = {}
            for name, result in each(commands).items():
                if not result.ok:
                    could_not_run(f"{name}: {result.stderr.strip()}")
                found[name], cursor = journal.split(result.stdout)
                cursors[name] = cursor or cursors[name]
            for name, entry in journal.merge(found):
                style = "cyan" if names.index(name) % 2 == 0 else "magenta"
                prefix = Text(f"{name:<{width}} ", style=style) if len(having) > 1 else Text("")
                console.print(prefix, Text(entry), sep="")

        show()
        try:
            while follow:
                time.sleep(1.0)
                show()
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
    raise typer.Exit(1 if errors else 0)


def chat(
    prompt: Annotated[str | None, typer.Argument(help="What to ask; - reads it; without it a conversation.")] = None,
    inventory: InventoryOption = None,
    model: ModelOption = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="The longest answer, in tokens.")] = 512,
    timeout: TimeoutOption = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Ask the endpoint: streams the answer, says which worker served and how much of the prompt was cached."""
    from goodput import chat as talk
    from goodput.cli import could_not_run
    from goodput.session import CommandFailed, CommandTimeout, Unreachable

    if prompt == "-":
        prompt = sys.stdin.read()
    if prompt is None and (as_json or not sys.stdin.isatty()):
        could_not_run("found no PROMPT, required one where nobody types; `goodput chat -` reads it", as_json=as_json)
    if prompt is not None and not prompt.strip():
        could_not_run("the prompt is empty", as_json=as_json)
    console = Console(highlight=False, soft_wrap=True, quiet=as_json)

    def on_text(piece: str, reasoning: bool) -> None:
        console.print(Text(piece, style="dim" if reasoning else ""), end="")

    with _sessions(inventory, as_json=as_json, timeout_s=timeout) as (_path, sessions):
        addresses = {session.node.name: session.node.serving_address for session in sessions}
        first = sessions[0]

        def ask(messages: list[dict[str, str]]) -> Any:
            result = talk.ask(first, endpoint, messages, max_tokens, on_text)
            if as_json:
                print(json.dumps(talk.as_object(result, endpoint)))
            else:
                console.print(
                    Text("\n" + talk.summary(result, endpoint), style="dim" if result.state == "ok" else "red")
                )
            return result

        try:
            endpoint = talk.find_endpoint(first, addresses, model)
            if prompt is not None:
                raise typer.Exit(0 if ask([{"role": "user", "content": prompt}]).state == "ok" else 1)
            console.print(
                Text(f"{endpoint.model} through {endpoint.url} of {first.node.name}; Ctrl-D ends", style="dim")
            )
            messages: list[dict[str, str]] = []
            while True:
                words = console.input("[bold]> [/bold]").strip()
                if words:
                    result = ask([*messages, {"role": "user", "content": words}])
                    if result.state != "failed":
                        answer = {"role": "assistant", "content": result.text}
                        messages += [{"role": "user", "content": words}, answer]
        except EOFError:
            console.print()
            raise typer.Exit(0) from None
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except talk.NoEndpoint as error:
            could_not_run(str(error), as_json=as_json)
        except (Unreachable, CommandTimeout, CommandFailed) as error:
            could_not_run(str(error), as_json=as_json)


class _Sampler:
    """Resident memory of every goodput process on all nodes, at intervals, through sessions of its own."""

    def __init__(self, sessions: Sequence[Session], every_s: float) -> None:
        from goodput.session import Session

        self.sessions = [Session(session.node, open_timeout_s=session.open_timeout_s) for session in sessions]
        self.every_s, self.samples, self.errors = every_s, list[Any](), list[str]()
        self.began = time.monotonic()
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._run, args=(each,), daemon=True) for each in self.sessions]

    def _take(self, session: Session) -> None:
        from goodput import node_questions, soak
        from goodput.session import CommandTimeout, Unreachable

        try:
            text = session.run(node_questions.PROCESSES, 120).stdout
        except (Unreachable, CommandTimeout) as error:
            self.errors.append(str(error))
            return
        found = node_questions.processes(text)
        self.samples += soak.sampled(max(0.0, time.monotonic() - self.began), session.node.name, found)

    def _run(self, session: Session) -> None:
        while not self._stop.wait(self.every_s):
            self._take(session)

    def start(self) -> None:
        """The first sample of every node is taken before the first request."""
        with ThreadPoolExecutor(len(self.sessions)) as pool:
            list(pool.map(self._take, self.sessions))
        self.began = time.monotonic()
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout=150)
        with ThreadPoolExecutor(len(self.sessions)) as pool:
            list(pool.map(self._take, self.sessions))
        for session in self.sessions:
            session.close()


def soak(
    minutes: Annotated[float, typer.Option("--minutes", min=0.1, help="How long requests are sent.")] = 30.0,
    concurrency: Annotated[int, typer.Option("--concurrency", min=1, help="Agents at a time, one request each.")] = 8,
    inventory: InventoryOption = None,
    model: ModelOption = None,
    seed: Annotated[int, typer.Option("--seed", help="The same seed sends the same prompts.")] = 1,
    prompt_tokens: Annotated[
        int | None,
        typer.Option("--prompt-tokens", min=256, help="Longest prompt; default half the model's context, else 4096."),
    ] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Longest answer, in tokens.")] = 64,
    request_timeout: Annotated[float, typer.Option("--request-timeout", min=1, help="Seconds; then an error.")] = 300.0,
    max_growth_mib: Annotated[
        float, typer.Option("--max-growth-mib", min=0, help="How much each process may grow after the warm-up.")
    ] = 64.0,
    warm_up: Annotated[
        float | None, typer.Option("--warm-up", min=0, help="Seconds; default a fifth of the run, at most 300.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder; default .goodput/soak/TIME.")] = None,
    timeout: TimeoutOption = 120.0,
    as_json: JsonOption = False,
) -> None:
    """Load the endpoint like coding agents do: latency, throughput, cache share, and whether memory grows."""
    from goodput import chat as talk
    from goodput import soak as figures
    from goodput import soak_plot, soak_view
    from goodput.cli import STATE, could_not_run, shown, terminal
    from goodput.session import CommandFailed, CommandTimeout, Unreachable
    from goodput.status import look

    console = terminal(quiet=as_json)
    seconds = minutes * 60
    warm_up_s = min(300.0, seconds / 5) if warm_up is None else warm_up
    folder = out or STATE / "soak" / datetime.now().strftime("%Y-%m-%dT%H-%M-%S")
    if warm_up_s >= seconds:
        could_not_run(f"found --warm-up {warm_up_s:g} s, required less than the run's {seconds:g} s", as_json=as_json)
    with _sessions(inventory, as_json=as_json, timeout_s=timeout) as (path, sessions):
        before = look(sessions, timeout)
        addresses = {session.node.name: session.node.serving_address for session in sessions}
        try:
            endpoint = talk.find_endpoint(sessions[0], addresses, model)
        except (talk.NoEndpoint, Unreachable, CommandTimeout) as error:
            could_not_run(str(error), as_json=as_json)
        longest = prompt_tokens or (endpoint.context_tokens // 2 if endpoint.context_tokens else 4096)
        options = {
            "url": endpoint.url,
            "model": endpoint.model,
            "seconds": seconds,
            "concurrency": concurrency,
            "seed": seed,
            "prompt_tokens": longest,
            "max_tokens": max_tokens,
            "timeout_seconds": request_timeout,
        }
        title = (
            f"goodput soak: {endpoint.model}, {concurrency} agents, {minutes:g} min, prompts up to {longest:,} tokens"
        )
        arm = before.arm.name if before.arm is not None and before.arm.exact else "no known profile"
        console.print(Text(f"{title}; {arm} on {shown(path)}", style="bold"))
        sampler = _Sampler(sessions, max(5.0, min(30.0, seconds / 40)))
        sampler.start()
        requests: list[dict[str, Any]] = []
        state: dict[str, Any] = {"began": None, "took": 0.0, "stopped": ""}
        try:
            _drive(
                sessions[0].stream(figures.command(options), request_timeout + 60), requests, state, seconds, console
            )
        except KeyboardInterrupt:
            state["stopped"] = "interrupted"
        except (Unreachable, CommandTimeout, CommandFailed) as error:
            state["stopped"] = state["stopped"] or str(error)
        if state["began"] is not None:
            # Samples count from the sampler's start, requests from the first one.
            lag = state["began"] - sampler.began
            took = state["took"] or time.monotonic() - state["began"]
        else:
            lag, took = 0.0, 0.0
        sampler.stop()
        after = look(sessions, timeout)
    samples = [figures.shifted(each, lag) for each in sampler.samples]
    workers = endpoint.workers | {id_: name for name, id_ in after.workers.items()}
    rows = figures.growth(samples, warm_up_s)
    counted = figures.counted(before, after)
    summary: dict[str, Any] = figures.figures(requests, took, workers)
    wrong = [state["stopped"]] if state["stopped"] else []
    wrong += figures.findings(
        summary, rows, figures.restarts(before, after), int(max_growth_mib * figures.MIB), counted
    )
    wrong += [f"memory could not be read: {text}" for text in dict.fromkeys(sampler.errors)]
    code = 130 if state["stopped"] == "interrupted" else 1 if wrong else 0
    summary = {
        "ok": code == 0,
        "exit": code,
        "findings": wrong,
        "options": options | {"warm_up_seconds": warm_up_s, "max_growth_mib": max_growth_mib},
        "profile": arm,
        **summary,
        "requests_counted_by_worker": counted,
        "memory": [figures.as_object(row) for row in rows],
        "folder": str(folder),
    }
    figures.write(folder, requests, samples, summary, workers)
    try:
        soak_plot.draw(folder / "soak.png", title, requests, samples, workers, took, warm_up_s)
        summary["picture"] = str(folder / "soak.png")
    except soak_plot.NoMatplotlib as error:
        console.print(Text(str(error), style="yellow"))
    if as_json:
        print(json.dumps(summary))
    else:
        console.print(soak_view.report(summary, shown(folder)), crop=False)
    raise typer.Exit(code)


def _drive(
    lines: Iterator[str], requests: list[dict[str, Any]], state: dict[str, Any], seconds: float, console: Console
) -> None:
    """Read the client's lines to their end; show how it goes."""
    from goodput import soak as figures
    from goodput.display import clock

    told = 0.0

    def text() -> str:
        elapsed = time.monotonic() - state["began"]
        return f"{clock(elapsed)} of {clock(seconds)} {figures.progress(requests, elapsed)}"

    with Live(Text("starting"), console=console, auto_refresh=False, transient=True) as live:
        for line in lines:
            try:
                event = json.loads(line)
            except ValueError:
                continue
            now = time.monotonic()
            if event["event"] == "refused":
                state["stopped"] = f"the endpoint refused the first request: {event['reason']}"
            elif event["event"] == "start":
                state["began"] = now
            elif event["event"] == "request":
                requests.append(event)
            elif event["event"] == "end":
                state["took"] = event["seconds"]
            if event["event"] == "request" and now - told >= (0.5 if console.is_terminal else max(10.0, seconds / 40)):
                told = now
                if console.is_terminal:
                    live.update(Text(text()), refresh=True)
                else:
                    console.print(Text(text()), soft_wrap=True)


def register(app: typer.Typer) -> None:
    """Add the four commands."""
    for command in (status, logs, chat, soak):
        app.command(command.__name__)(command)
