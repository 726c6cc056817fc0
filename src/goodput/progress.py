"""What a run is doing and what it did: Ansible's events folded into layers, nodes, failures and seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

# Prefixes that Ansible puts before a module's own words, by version.
_PREFIXES = ("Task failed: ", "Module failed: ", "Action failed: ", "Action failed.", "Task failed.")
# Messages that say only that something failed: the end of what the command printed says more.
_GENERIC = ("non-zero return code", "MODULE FAILURE", "Module result deserialization failed")
_TAIL_LINES = 12


@dataclass
class NodeState:
    """One node within one layer."""

    status: str = "waiting"  # waiting, running, ok, stopped, failed, unreachable
    ok: int = 0
    changed: int = 0
    failed: int = 0
    skipped: int = 0


@dataclass
class Layer:
    """One role (or play without a role) of the run."""

    name: str
    seconds: float = 0.0
    nodes: dict[str, NodeState] = field(default_factory=dict)

    @property
    def status(self) -> str:
        states = [node.status for node in self.nodes.values()]
        order = ("failed", "unreachable", "stopped", "running")
        return next((status for status in order if status in states), "ok" if states else "waiting")


@dataclass
class Task:
    """One task: wall seconds from its start to the start of the next, and per host what came out."""

    layer: str
    name: str
    action: str
    path: str
    started: float
    seconds: float = 0.0
    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """A task that failed on a host; ``lines`` is the message without Ansible's wrapping."""

    host: str
    layer: str
    task: str
    path: str
    lines: tuple[str, ...]
    unreachable: bool = False

    def to_dict(self) -> dict[str, Any]:
        return {
            "host": self.host,
            "layer": self.layer,
            "task": self.task,
            "path": self.path,
            "message": "\n".join(self.lines),
            "unreachable": self.unreachable,
        }


def explain(result: Mapping[str, Any]) -> list[str]:
    """The lines a person needs from a failed task's result: its message, else the end of what the command said."""
    if "censored" in result:
        return ["the output is hidden because the task handles a secret (no_log)"]
    failed_items = [
        item
        for item in result.get("results") or []
        if isinstance(item, Mapping) and (item.get("failed") or item.get("unreachable"))
    ]
    if failed_items:
        lines = []
        for item in failed_items:
            label = item.get("_ansible_item_label", item.get("item"))
            told = explain(item)
            lines += [f"{label}: {told[0]}", *told[1:]] if label is not None else told
        return lines
    message = result.get("msg", "")
    if isinstance(message, list):
        message = "\n".join(map(str, message))
    text = message if isinstance(message, str) else json.dumps(message, indent=2, default=str)
    stripped = True
    while stripped:
        stripped = False
        for prefix in _PREFIXES:
            if text.startswith(prefix):
                text, stripped = text[len(prefix) :].lstrip(), True
    lines = [line.rstrip() for line in text.strip().splitlines()]
    generic = not lines or any(word in lines[0] for word in _GENERIC)
    if generic:
        if result.get("cmd"):
            command = result["cmd"]
            lines.append(f"command: {command if isinstance(command, str) else ' '.join(map(str, command))}")
        if "rc" in result:
            lines.append(f"exit: {result['rc']}")
        for stream in ("stderr", "module_stderr", "stdout", "module_stdout"):
            said = str(result.get(stream) or "").strip().splitlines()
            if said:
                lines += said[-_TAIL_LINES:]
                break
    return lines or ["the task failed without a message; the full log has its result"]


def _when(event: Mapping[str, Any]) -> float:
    created = datetime.fromisoformat(str(event["created"]))
    return (created if created.tzinfo else created.replace(tzinfo=UTC)).timestamp()


class Run:
    """Everything known about one run of a playbook. ``feed`` takes ansible-runner's events in order."""

    def __init__(self, *, stages: Mapping[str, str] | None = None, keep: tuple[str, ...] = ()) -> None:
        # A playbook of one role is shown by its task files instead: "configure | Boot ..." belongs to
        # stages["configure"].
        self.stages = stages
        # Keys of task results that the caller wants; the last value of each is in ``kept``.
        self.keep = keep
        self.kept: dict[str, Any] = {}
        self.layers: dict[str, Layer] = {}
        self.tasks: list[Task] = []
        self.shows: list[str] = []
        self.stats: dict[str, dict[str, int]] = {}
        self.play = ""
        self.pid: int | None = None
        self.ended = False
        self._failures: dict[str, list[Failure]] = {}
        self._last = 0.0

    @property
    def task(self) -> Task | None:
        return self.tasks[-1] if self.tasks and not self.ended else None

    @property
    def layer(self) -> Layer | None:
        return self.layers[self.tasks[-1].layer] if self.tasks else None

    @property
    def seconds(self) -> float:
        return sum(layer.seconds for layer in self.layers.values())

    def feed(self, event: Mapping[str, Any]) -> None:
        kind, data = str(event.get("event", "")), event.get("event_data") or {}
        if self.pid is None and event.get("pid"):
            self.pid = int(event["pid"])
        if kind == "playbook_on_play_start":
            self.play = str(data.get("play") or data.get("name") or "")
        elif kind in ("playbook_on_task_start", "playbook_on_handler_task_start"):
            self._task_start(event, data)
        elif kind == "playbook_on_stats":
            self._close(_when(event))
            self.ended = True
            self.stats = {
                key: dict(data.get(key) or {}) for key in ("ok", "changed", "failures", "dark", "skipped", "rescued")
            }
        elif kind == "runner_on_start":
            self._node(str(data.get("host"))).status = "running"
        elif kind.startswith("runner_on_") and self.tasks:
            self._result(kind.removeprefix("runner_on_"), data)

    def _task_start(self, event: Mapping[str, Any], data: Mapping[str, Any]) -> None:
        self._close(_when(event))
        name = str(data.get("task") or "")
        role = str(data.get("role") or "").rpartition(".")[2]
        stem, bar, _ = name.partition(" | ")
        if self.stages is not None:
            layer = self.stages.get(stem, stem) if bar else (self.layer.name if self.layer else role)
        elif role.startswith("_") and self.layer is not None:
            # A shared helper role works for the layer that called it.
            layer = self.layer.name
        else:
            layer = role or self.play or "play"
        self.layers.setdefault(layer, Layer(layer))
        path = str(data.get("task_path") or "")
        self.tasks.append(Task(layer, name, str(data.get("task_action") or ""), path, _when(event)))

    def _close(self, now: float) -> None:
        """End the current task at ``now``; each node that was running in it is done with it."""
        if not self.tasks:
            return
        task = self.tasks[-1]
        task.seconds = max(0.0, now - task.started)
        layer = self.layers[task.layer]
        layer.seconds += task.seconds
        for node in layer.nodes.values():
            if node.status == "running":
                node.status = "ok"

    def interrupted(self, now: float) -> None:
        """The run ended without statistics: what was running is not done."""
        if not self.ended:
            for layer in self.layers.values():
                for node in layer.nodes.values():
                    if node.status == "running":
                        node.status = "stopped"
            self._close(now)
            self.ended = True

    def _node(self, host: str) -> NodeState:
        assert self.layer is not None
        return self.layer.nodes.setdefault(host, NodeState())

    def _result(self, outcome: str, data: Mapping[str, Any]) -> None:
        host, result = str(data.get("host")), data.get("res") or {}
        task, node = self.tasks[-1], self._node(host)
        if outcome == "ok":
            changed = bool(result.get("changed"))
            node.ok += 1
            node.changed += changed
            self._show(result)
            status = "changed" if changed else "ok"
        elif outcome == "skipped":
            node.skipped += 1
            status = "skipped"
        elif outcome in ("failed", "unreachable", "async_failed"):
            status = "unreachable" if outcome == "unreachable" else "failed"
            if data.get("ignore_errors"):
                status = "ignored"
            else:
                node.failed += 1
                node.status = status
                lines = tuple(explain(result))
                failure = Failure(host, task.layer, task.name, task.path, lines, status == "unreachable")
                self._failures.setdefault(host, []).append(failure)
        else:
            return
        task.hosts[host] = {"status": status, "seconds": round(float(data.get("duration") or 0.0), 3)}

    def _show(self, result: Mapping[str, Any]) -> None:
        """Keep what a task wants shown (``goodput_show`` in its result, message or facts) and what the caller wants."""
        for place in (result, result.get("msg"), result.get("ansible_facts")):
            if not isinstance(place, Mapping):
                continue
            self.kept |= {key: place[key] for key in self.keep if key in place}
            if place.get("goodput_show"):
                text = place["goodput_show"]
                text = "\n".join(map(str, text)) if isinstance(text, list) else str(text)
                if text not in self.shows:
                    self.shows.append(text)

    @property
    def failures(self) -> list[Failure]:
        """The last failure of each host that ended failed: a rescue's own message comes after what it rescued."""
        if self.stats:
            hosts = [
                host for host in self._failures if self.stats["failures"].get(host) or self.stats["dark"].get(host)
            ]
        else:
            hosts = list(self._failures)
        return [self._failures[host][-1] for host in hosts]

    def earlier(self, host: str) -> list[Failure]:
        """Failures of ``host`` before its last one (rescued ones among them)."""
        return self._failures.get(host, [])[:-1]

    @property
    def changed(self) -> dict[str, int]:
        return {host: self.stats.get("changed", {}).get(host, 0) for host in self.hosts}

    @property
    def hosts(self) -> list[str]:
        names = dict.fromkeys(host for layer in self.layers.values() for host in layer.nodes)
        # The controller's own column comes last.
        return sorted(names, key=lambda name: name == "localhost")

    def figures(self) -> dict[str, float]:
        """Tasks that ran on a host, wall seconds, and seconds per task and host."""
        executed = [task for task in self.tasks if any(h["status"] != "skipped" for h in task.hosts.values())]
        pairs = sum(h["status"] != "skipped" for task in executed for h in task.hosts.values())
        return {
            "tasks": len(executed),
            "task_hosts": pairs,
            "seconds": round(self.seconds, 1),
            "seconds_per_task": round(self.seconds / len(executed), 3) if executed else 0.0,
            "seconds_per_task_and_host": round(self.seconds / pairs, 3) if pairs else 0.0,
        }

    def to_dict(self) -> dict[str, Any]:
        """The summary: layers with seconds and nodes, figures, changed per host, failures, shown texts."""
        return {
            "seconds": round(self.seconds, 1),
            "layers": [
                {
                    "layer": layer.name,
                    "status": layer.status,
                    "seconds": round(layer.seconds, 1),
                    "nodes": {name: vars(node) for name, node in layer.nodes.items()},
                }
                for layer in self.layers.values()
            ],
            "figures": self.figures(),
            "changed": self.changed,
            "failures": [failure.to_dict() for failure in self.failures],
            "show": self.shows,
            **self.kept,
        }

    def tasks_to_dict(self) -> list[dict[str, Any]]:
        return [
            {
                "layer": task.layer,
                "task": task.name,
                "action": task.action,
                "path": task.path,
                "seconds": round(task.seconds, 3),
                "hosts": task.hosts,
            }
            for task in self.tasks
        ]


class Timings:
    """Seconds per layer of the last successful full run, by playbook and kind of inventory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def _load(self) -> dict[str, Any]:
        try:
            data = json.loads(self.path.read_text())
        except (OSError, ValueError):
            # Only a comfort: a missing or damaged file means that nothing is expected.
            return {}
        return data if isinstance(data, dict) else {}

    def expected(self, key: str) -> dict[str, float]:
        """Layer -> seconds; empty if there was no such run."""
        layers = self._load().get(key, {}).get("layers", {})
        return {str(name): float(seconds) for name, seconds in layers.items()}

    def learn(self, key: str, run: Run) -> None:
        data = self._load()
        data[key] = {"layers": {layer.name: round(layer.seconds, 1) for layer in run.layers.values()}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_name(self.path.name + ".new")
        temporary.write_text(json.dumps(data, indent=2) + "\n")
        temporary.replace(self.path)
