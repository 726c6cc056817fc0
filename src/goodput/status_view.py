"""``goodput status`` as one screen."""

from __future__ import annotations

from collections.abc import Iterable

from ansible_collections.goodput.spark.plugins.module_utils.kube_status import Cluster, KubeNode
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from goodput.status import Node, Site, Tier

GIB = 2**30


def duration(seconds: float | None) -> str:
    """``93784`` -> ``1 d 2:03 h``, ``7380`` -> ``2:03 h``, ``123`` -> ``2:03 min``."""
    if seconds is None:
        return "-"
    whole = int(seconds)
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{days} d {hours}:{minutes:02d} h"
    return f"{hours}:{minutes:02d} h" if hours else f"{minutes}:{whole % 60:02d} min"


def size(value: float | None, unit: str = "bytes") -> str:
    """``1536`` -> ``1.5 KiB``; packets get decimal steps: ``31200`` -> ``31.2 k pkt``."""
    if value is None:
        return "-"
    step, names = (1024.0, ("B", "KiB", "MiB", "GiB", "TiB")) if unit == "bytes" else (1000.0, ("", "k", "M", "G", "T"))
    at = 0
    while abs(value) >= step and at < len(names) - 1:
        value, at = value / step, at + 1
    number = f"{value:.0f}" if at == 0 else f"{value:.3g}" if value < 100 else f"{value:.0f}"
    return " ".join(part for part in (number, names[at], "" if unit == "bytes" else "pkt") if part)


def percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"


def count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _table(*columns: str, right: Iterable[str] = ()) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=name != "why")
    return table


def _state(text: str, good: bool) -> Text:
    return Text(text, style="green" if good else "bold red")


def nodes_table(site: Site) -> Table:
    table = _table("node", "state", "uptime", "load", "memory used", "available", "swap used", right=("load",))
    for node in site.nodes:
        if node.error:
            table.add_row(node.name, _state("no answer", False))
            continue
        memory = node.memory_bytes
        total, available = memory.get("MemTotal", 0), memory.get("MemAvailable", 0)
        table.add_row(
            node.name,
            _state("up", True),
            duration(node.uptime_seconds),
            "-" if node.load is None else f"{node.load:.2f}",
            f"{(total - available) / GIB:.2f} of {total / GIB:.2f} GiB",
            f"{available / GIB:.2f} GiB",
            size(memory.get("SwapTotal", 0) - memory.get("SwapFree", 0)),
        )
    return table


def rails_table(nodes: list[Node]) -> Table:
    columns = ("node", "rail", "state", "address", "link", "RoCE device", "sent / received", "losses")
    table = _table(*columns, right=columns[6:])
    for node in nodes:
        for rail in node.rails:
            link = [f"{rail.speed_mbps / 1000:g} Gb/s"] if rail.speed_mbps else []
            link += [f"MTU {rail.mtu_bytes}"] if rail.mtu_bytes else []
            table.add_row(
                node.name,
                rail.netdev,
                _state("up" if rail.up else "down", rail.up),
                ", ".join(rail.addresses) or "-",
                ", ".join(link),
                rail.device,
                f"{size(rail.sent, rail.unit)} / {size(rail.received, rail.unit)}" if rail.unit else "not counted",
                count(rail.losses),
            )
    return table


def units_table(nodes: list[Node]) -> Table:
    table = _table("unit", "node", "state", "for", "restarts", "memory", right=("for", "restarts", "memory"))
    names = dict.fromkeys(unit.name for node in nodes for unit in node.units)
    for name in names:
        for node in nodes:
            for unit in node.units:
                if unit.name == name:
                    restarts = Text(str(unit.restarts), style="yellow" if unit.restarts else "")
                    memory = size(unit.rss_bytes) if unit.rss_bytes else "-"
                    state = Text(unit.state, style="bold red" if unit.down else "green" if unit.age_seconds else "dim")
                    table.add_row(name, node.name, state, duration(unit.age_seconds), restarts, memory)
    return table


def cluster_nodes_table(cluster: Cluster) -> Table:
    """Kubernetes' nodes, and what the scheduler may give away on each."""
    resources = sorted({name for node in cluster.nodes for name in node.gives})
    columns = ("Kubernetes", "state", "role", "version", "memory for pods", *resources)
    table = _table(*columns, right=columns[4:])
    for node in cluster.nodes:
        table.add_row(
            node.name,
            _state(*_node_state(node)),
            "server" if node.server else "agent",
            node.version,
            size(node.memory_bytes),
            *(_state(node.gives.get(name, "0"), node.gives.get(name, "0") != "0") for name in resources),
        )
    return table


def _node_state(node: KubeNode) -> tuple[str, bool]:
    if not node.ready:
        return "not Ready", False
    return ("Ready", True) if node.takes_pods else ("cordoned", False)


def pods_table(cluster: Cluster) -> Table:
    table = _table("pod", "node", "ready", "state", "restarts", right=("restarts",))
    for pod in cluster.pods:
        table.add_row(
            f"{pod.namespace}/{pod.name}",
            pod.node or "-",
            pod.ready,
            _state("well" if pod.well else "not well", pod.well),
            Text(str(pod.restarts), style="yellow" if pod.restarts else ""),
        )
    return table


def graphs_line(cluster: Cluster) -> Text:
    if not cluster.graphs:
        return Text("graph: none is placed")
    return Text("graph: " + "; ".join(f"{name} {words}" for name, words in cluster.graphs.items()))


def _fill(tier: Tier) -> str:
    if tier.capacity_bytes:
        share = "" if tier.used_bytes is None else f" ({percent(tier.used_bytes / tier.capacity_bytes)})"
        return f"{size(tier.used_bytes)} of {size(tier.capacity_bytes)}{share}"
    return size(tier.used_bytes)


def tiers_table(nodes: list[Node]) -> Table:
    columns = ("tier", "node", "LMCache counts", "on disk", "objects", "disk free")
    table = _table(*columns, right=columns[2:])
    for node in nodes:
        for tier in node.tiers:
            table.add_row(
                tier.name, node.name, _fill(tier), size(tier.disk_bytes), count(tier.files), size(tier.disk_free_bytes)
            )
    return table


def serving_table(site: Site) -> Table:
    columns = ("worker", "id", "requests", "share", "engine prefix hits", "LMCache hits", "from L1", "from L2")
    table = _table(*columns, right=columns[2:])
    nodes = {node.name: node for node in site.nodes}
    served = sum(node.requests or 0.0 for node in site.nodes)
    for name in dict.fromkeys([*nodes, *site.workers]):
        node = nodes.get(name, Node(name, ""))
        figures = node.figures
        table.add_row(
            name,
            site.workers.get(name) or Text("not registered", style="bold red"),
            count(node.requests),
            percent(node.requests / served if node.requests is not None and served else None),
            *(
                percent(figures.get(key))
                for key in ("prefix_cache_hit_rate", "lookup_hit_rate", "lookup_hit_rate_l1", "lookup_hit_rate_l2")
            ),
        )
    return table


def frontend_lines(site: Site) -> Text:
    figures = site.figures
    mean = figures.get("ttft_mean_seconds")
    return Text(
        f"frontend: model {site.model or '-'}; requests {count(figures.get('requests'))}, failed"
        f" {count(figures.get('failed_requests'))}, running {count(figures.get('running_requests'))};"
        f" TTFT mean {'-' if mean is None else f'{mean:.3f} s'}\n"
        f"  prompt tokens {count(figures.get('prompt_tokens'))}, cached {percent(figures.get('cached_share'))};"
        f" router expected {percent(figures.get('router_hit_rate'))}, gave up locality"
        f" {count(figures.get('locality_given_up'))} times\n"
        "  counted since each process started; - means nothing counted yet"
    )


def headline(site: Site) -> Text:
    if site.exit_code == 2:
        return Text("COULD NOT LOOK: no node answers", style="bold red")
    if site.problems:
        return Text(f"NOT WELL: {len(site.problems)} findings", style="bold red")
    return Text("ALL WELL", style="bold green")


def arm_line(site: Site) -> Text:
    if site.arm is None:
        return Text("arm: nothing serves")
    wrong = len(site.arm.differences)
    if site.arm.exact:
        return Text(f"arm: {site.arm.name} (all {site.arm.compared} arguments of the running processes as planned)")
    return Text(f"arm: nearest {site.arm.name}; {wrong} differences, {site.arm.compared} arguments compared")


def screen(site: Site, title: str) -> RenderableType:
    parts: list[RenderableType] = [Text.assemble((title, "bold"), "   ", headline(site)), arm_line(site)]
    parts.append(nodes_table(site))
    if site.cluster and site.cluster.nodes:
        parts += [cluster_nodes_table(site.cluster), pods_table(site.cluster), graphs_line(site.cluster)]
    if any(node.rails for node in site.nodes):
        parts.append(rails_table(site.nodes))
    if any(node.units for node in site.nodes):
        parts.append(units_table(site.nodes))
    if any(node.tiers for node in site.nodes):
        parts.append(tiers_table(site.nodes))
    if site.serves or any(node.requests is not None for node in site.nodes):
        parts.append(serving_table(site))
    if site.serves:
        parts.append(frontend_lines(site))
    if site.problems:
        parts += [Text(""), *(Text(f"  {problem}", style="red") for problem in site.problems)]
    return Group(*parts)
