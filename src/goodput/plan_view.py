"""What a person sees of a plan: memory bars, sizes, argument lists, rules."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.rules import Rule
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.search import Candidate
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

GIB = 2**30
BAR_COLUMNS = 96
#: Letter and colour of each line of the budget; the letter keeps the bar readable without colour.
SEGMENTS = {
    "weights": ("W", "blue"),
    "device KV": ("K", "green"),
    "engine overhead": ("e", "cyan"),
    "L1": ("1", "magenta"),
    "LMCache process": ("l", "bright_magenta"),
    "Mooncake": ("m", "bright_magenta"),
    "OS at rest": ("o", "yellow"),
    "control plane": ("c", "bright_yellow"),
    "page cache": ("p", "white"),
    "shm": ("s", "white"),
    "reserve": ("r", "red"),
    "free": (".", "dim"),
}
PROCESSES = (
    ("lmcache server", "lmcache_server_args"),
    ("lmcache coordinator", "lmcache_coordinator_args"),
    ("worker", "dynamo_worker_args"),
    ("frontend", "dynamo_frontend_args"),
)


def gib(size: int) -> str:
    return f"{size / GIB:,.2f}"


def bar(lines: Sequence[Mapping[str, Any]], total: int, columns: int = BAR_COLUMNS) -> Text:
    """One node's memory as a bar; each column belongs to the line in whose bytes its middle lies."""
    edges, end = [], 0
    for line in lines:
        if line["bytes"] > 0:
            end += line["bytes"]
            edges.append((end, line["name"]))
    scale = max(total, end)
    text = Text()
    for column in range(columns):
        middle = (2 * column + 1) * scale // (2 * columns)
        name = next(name for edge, name in edges if middle < edge or edge == edges[-1][0])
        letter, style = SEGMENTS[name]
        text.append(letter, style=style)
    return text


def _memory(console: Console, plan: Mapping[str, Any]) -> None:
    for name, node in plan["budget"].items():
        console.print(Text(f"{name:<8}{gib(node['total_bytes'])} GiB", style="bold"))
        console.print(bar(node["lines"], node["total_bytes"]))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("memory")
    for name in plan["budget"]:
        table.add_column(f"{name} GiB", justify="right")
        table.add_column("bytes", justify="right")
    table.add_column("")
    nodes = list(plan["budget"].values())
    for row, line in enumerate(nodes[0]["lines"]):
        cells = [f"{SEGMENTS[line['name']][0]} {line['name']}"]
        for node in nodes:
            size = node["lines"][row]["bytes"]
            cells += [gib(size), f"{size:,}"]
        if any(node["lines"][row]["bytes"] for node in nodes):
            table.add_row(*cells, line["why"])
    totals = ["= MemTotal"]
    for node in nodes:
        totals += [gib(node["total_bytes"]), f"{sum(line['bytes'] for line in node['lines']):,}"]
    table.add_row(*totals, "", style="bold")
    console.print(table)


def _sizes(console: Console, plan: Mapping[str, Any]) -> None:
    size, enabled = plan["sizes"], plan["inputs"]["profile"]["lmcache"]["enabled"]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "tier, per node",
        "GiB",
        "blocks/chunks",
        "tokens",
        f"{size['longest_prompt_tokens']:,}-token prompts",
        "adds to the device",
    ):
        table.add_column(name, justify="left" if name.startswith("tier") else "right")
    table.add_row(
        "device KV",
        gib(size["device_bytes"]),
        f"{size['kv_blocks']:,}",
        f"{size['device_tokens']:,}",
        f"{size['device_full_prefixes']:,}",
        "",
    )
    lmcache = plan["inputs"]["profile"]["lmcache"]
    retains = lmcache["store_policy"] == "default" or lmcache["prefetch_policy"] == "retain"
    if enabled:
        table.add_row(
            "L1, retains" if retains else "L1, stages only",
            gib(size["l1_bytes"]),
            f"{size['l1_chunks']:,}",
            f"{size['l1_tokens']:,}",
            f"{size['l1_full_prefixes']:,}",
            f"{size['l1_adds_tokens']:,} tokens" if retains else "nothing kept",
        )
        if size["l2_bytes"]:
            table.add_row(
                f"L2, {lmcache['l2']['adapter']}",
                gib(size["l2_bytes"]),
                f"{size['l2_chunks']:,}",
                f"{size['l2_tokens']:,}",
                f"{size['l2_full_prefixes']:,}",
                f"{size['l2_adds_tokens']:,} tokens",
            )
    console.print(table)
    facts = [f"block {size['block_size_tokens']:,} tokens, {size['device_block_bytes']:,} bytes a device block"]
    facts.append(f"max_num_batched_tokens {size['max_num_batched_tokens']:,}")
    if enabled:
        facts.append(
            f"chunk {size['chunk_size_tokens']:,} tokens = {size['chunk_bytes']:,} bytes"
            f" ({size['lmcache_bytes_per_token']:,} a token)"
        )
        facts.append(
            f"longest prompt {size['longest_prompt_tokens']:,} tokens = {size['longest_prompt_chunks']} chunks ="
            f" {size['longest_prefix_bytes']:,} bytes, typical {size['typical_prompt_tokens']:,} ="
            f" {size['typical_prompt_chunks']} chunks"
        )
        room = (
            f"{size['l1_guaranteed_chunks']} of {size['l1_chunks']} chunks are guaranteed free"
            if retains
            else f"{size['store_reserve_chunks']} chunks kept for stores"
        )
        facts.append(
            f"restores in L1 at once: {size['restores_at_once_longest']} of the longest or"
            f" {size['restores_at_once_typical']} typical; {size['simultaneous_restores']} may arrive together and fit"
            f" if they average <= {size['mean_chunks_at_once']} chunks ({size['mean_tokens_at_once']:,} tokens); {room}"
        )
        facts.append(
            f"restores in flight (F) {size['prefetch_max_in_flight']}; it limits loads, it does not protect L1"
        )
    for fact in facts:
        console.print(Text(f"  {fact}"))


def findings(console: Console, plan: Mapping[str, Any]) -> None:
    """Errors first; each with what was found, what is required and what to do."""
    for kind, style in (("errors", "bold red"), ("accepted", "yellow"), ("warnings", "yellow")):
        for item in plan[kind]:
            node = f" [{item['node']}]" if "node" in item else ""
            label = {"errors": "refused", "accepted": "accepted", "warnings": "warning"}[kind]
            console.print(Text(f"{label} {item['rule']}{node} {item['title']}", style=style))
            for key in ("found", "required", "remedy", "source"):
                console.print(Text(f"  {key:<9} {item[key]}"))


def command_line(words: Iterable[str]) -> Text:
    """Arguments, one option a line, quoted for a shell."""
    lines: list[str] = []
    for word in words:
        if word.startswith("--") or not lines:
            lines.append(shlex.quote(word))
        else:
            lines[-1] += " " + shlex.quote(word)
    return Text("\n".join("    " + line for line in lines))


def show(console: Console, plan: Mapping[str, Any]) -> None:
    """A whole plan."""
    verdict = (
        "fits" if plan["ok"] and not plan["accepted"] else "accepted in spite of the rules" if plan["ok"] else "refused"
    )
    style = "bold green" if verdict == "fits" else "bold yellow" if plan["ok"] else "bold red"
    console.print(Text.assemble((f"{plan['name']}", "bold"), f" on model {plan['model']}: ", (verdict, style)))
    console.print()
    _memory(console, plan)
    _sizes(console, plan)
    console.print()
    findings(console, plan)
    for title, key in PROCESSES:
        if plan[key]:
            console.print(Text(title, style="bold"))
            console.print(command_line(plan[key]), soft_wrap=True)
    console.print(Text("environment", style="bold"))
    variables = plan["env"] | plan["lmcache_env"]
    console.print(
        Text("\n".join(f"    {name}={shlex.quote(value)}" for name, value in variables.items())), soft_wrap=True
    )


def verdict(plan: Mapping[str, Any]) -> str:
    """``fits``, or the ids that refuse."""
    if not plan["ok"]:
        return "refused " + " ".join(sorted({item["rule"] for item in plan["errors"]}))
    warned = sorted({item["rule"] for item in plan["warnings"]})
    return "fits" + (f" ({' '.join(warned)})" if warned else "")


def matrix(console: Console, rows: Mapping[str, Mapping[str, str]], models: Sequence[str]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("profile")
    for model in models:
        table.add_column(f"on {model}")
    for profile, cells in rows.items():
        table.add_row(
            profile,
            *(Text(cells[model], style="red" if cells[model].startswith("refused") else "green") for model in models),
        )
    console.print(table)


def flattened(value: Any, prefix: str = "") -> dict[str, str]:
    """Nested data as dotted keys."""
    if isinstance(value, Mapping):
        result: dict[str, str] = {}
        for key, item in value.items():
            result |= flattened(item, f"{prefix}.{key}" if prefix else str(key))
        return result
    return {prefix: str(value)}


def _options(words: Sequence[str]) -> dict[str, str]:
    result: dict[str, str] = {}
    for word in words:
        if word.startswith("--"):
            result[word] = ""
        elif result:
            last = list(result)[-1]
            result[last] = (result[last] + " " + word).strip()
    return result


def difference(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, list[tuple[str, str, str]]]:
    """Per section (choices, sizes, each process): (key, value in a, value in b) of what differs; "" where absent."""
    sections = {
        "choices": tuple(flattened(plan["inputs"]["profile"]) for plan in (a, b)),
        "sizes": tuple(flattened(plan["sizes"]) for plan in (a, b)),
        **{title: tuple(_options(plan[key]) for plan in (a, b)) for title, key in PROCESSES},
    }
    result = {}
    for title, (left, right) in sections.items():
        rows = []
        for key in [*left, *(key for key in right if key not in left)]:
            if key in ("name", "description", "source"):
                continue
            old = left[key] or "(set)" if key in left else ""
            new = right[key] or "(set)" if key in right else ""
            if old != new:
                rows.append((key, old, new))
        if rows:
            result[title] = rows
    return result


def diff(console: Console, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
    for title, rows in difference(a, b).items():
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
        for name in ("", a["name"], b["name"]):
            table.add_column(name, overflow="fold")
        for key, old, new in rows:
            table.add_row(key, _number(old), _number(new))
        console.print(table)
    console.print(Text(f"{a['name']}: {verdict(a)}    {b['name']}: {verdict(b)}"))


def _number(text: str) -> str:
    return f"{int(text):,}" if text.lstrip("-").isdigit() and len(text) > 4 else text


def explain(console: Console, rule: Rule, example: Mapping[str, Any]) -> None:
    console.print(
        Text(f"{rule.id}  {rule.title}  ({'refuses' if rule.severity == 'error' else 'warns'})", style="bold")
    )
    console.print(Text(rule.why))
    console.print(Text(f"Source: {rule.source}"))
    settings = ", ".join(f"{key} {value}" for key, value in rule.example[1].items())
    console.print(Text(f"\nWorked example: profile {rule.example[0]}{' with ' + settings if settings else ''}"))
    for item in example["errors"] + example["warnings"]:
        if item["rule"] == rule.id:
            console.print(
                Text(f"  found     {item['found']}\n  required  {item['required']}\n  remedy    {item['remedy']}")
            )


def candidates(console: Console, found: Sequence[Candidate], top: int) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in (
        "#",
        "policy",
        "KV bytes",
        "L1 GiB",
        "F",
        "prompts",
        "device",
        "below",
        "restores",
        "mean tokens",
        "free GiB",
    ):
        table.add_column(name, justify="left" if name == "policy" else "right")
    for index, item in enumerate(found[:top], 1):
        table.add_row(
            str(index),
            item.policy,
            f"{item.device_bytes:,}",
            f"{item.l1_bytes / GIB:g}" if item.l1_bytes else "-",
            f"1..{item.in_flight_max}" if item.in_flight_max > 1 else "1" if item.in_flight_max else "-",
            str(item.prefixes),
            str(item.device_prefixes),
            str(item.lower_prefixes),
            str(item.restores_at_once) if item.restores_at_once else "-",
            f"{item.mean_tokens_at_once:,}" if item.mean_tokens_at_once else "-",
            gib(item.free_bytes),
        )
    console.print(table)


def rules_markdown(rules: Iterable[Rule], examples: Mapping[str, Mapping[str, Any]]) -> str:
    """docs/rules.md."""
    lines = [
        "# Rules of the cache planner",
        "",
        (
            "Generated by `goodput plan rules --markdown > docs/rules.md`; do not edit. Each example is a plan that was"
            " made to"
        ),
        "fire the rule. `goodput plan explain KV004` prints one of these. To run a refused arrangement anyway see",
        "[planner.md](planner.md#accepting-a-refusal).",
        "",
        "| id | effect | rule |",
        "|---|---|---|",
    ]
    rules = list(rules)
    lines += [
        f"| [{rule.id}](#{rule.id.lower()}) | {'refuses' if rule.severity == 'error' else 'warns'} | {rule.title} |"
        for rule in rules
    ]
    for rule in rules:
        settings = ", ".join(f"`{key}: {value}`" for key, value in rule.example[1].items())
        lines += ["", f"## {rule.id}", "", f"**{rule.title}.** {rule.why}", "", f"Source: {rule.source}.", ""]
        lines += [f"Example: `{rule.example[0]}`{' with ' + settings if settings else ''}.", ""]
        for item in examples[rule.id]["errors"] + examples[rule.id]["warnings"]:
            if item["rule"] == rule.id:
                lines += [f"- found: {item['found']}", f"- required: {item['required']}", f"- remedy: {item['remedy']}"]
                break
    return "\n".join(lines) + "\n"
