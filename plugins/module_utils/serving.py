# Apache-2.0 (see LICENSE)
"""From a plan's argument lists to units, and from what a running node answers to findings.

A plan names no address and no path of a site: it holds placeholders such as ``{management_address}``. ``arguments``
fills them in and refuses what it does not know, so that a typing error never reaches a command line.

A check is one row of a verdict: ``{"check": text, "ok": bool, "found": text, "required": text, "remedy": text}``.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import struct
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

PLACEHOLDER = re.compile(r"\{([a-z][a-z0-9_]*)\}")
ENVIRONMENT_NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
PLAIN_WORD = re.compile(r"^[A-Za-z0-9_@%+=:,./-]+$")
GIB_BYTES = 2**30
PODS = "kubepods"
UNPUBLISHED = "Block not published"

Check = dict[str, Any]


class ServingError(ValueError):
    """A refusal; the text names the value, the rule and the remedy."""


# --------------------------------------------------------------------------------------------------------------------
# Arguments and environment of a unit
# --------------------------------------------------------------------------------------------------------------------


def fill(text: str, values: Mapping[str, Any]) -> str:
    """``text`` with every ``{name}`` replaced. JSON braces are no placeholders: a name starts with a letter.

    :raises ServingError: a placeholder that ``values`` does not have, or whose value is empty.
    """

    def value(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in values:
            known = ", ".join(f"{{{key}}}" for key in sorted(values))
            raise ServingError(f"unknown placeholder {{{name}}} in {text!r}; known: {known}; correct the plan file")
        if values[name] is None or str(values[name]) == "":
            raise ServingError(
                f"placeholder {{{name}}} in {text!r} has no value on this node; set the variable behind it"
            )
        return str(values[name])

    return PLACEHOLDER.sub(value, text)


def arguments(words: Sequence[Any], values: Mapping[str, Any], ours: Mapping[str, Any] | None = None) -> list[str]:
    """The final argument list of one process.

    :param words: the plan's list; numbers become words.
    :param values: what the placeholders stand for on this node.
    :param ours: flags that the platform decides, ``{"--http-port": 8000}``. Appended unless the plan has them; a plan
        that has one with another value is refused, because two places would then decide.
    :raises ServingError: not a list of words and numbers, an unknown placeholder, a contradiction, a line break.
    """
    if isinstance(words, str) or not isinstance(words, Sequence):
        raise ServingError(f"arguments must be a list, got {type(words).__name__} {words!r}; write one word an item")
    final = []
    for word in words:
        if isinstance(word, bool) or not isinstance(word, (str, int, float)):
            raise ServingError(f"argument {word!r} is a {type(word).__name__}; put it in quotes in the plan file")
        final.append(fill(str(word), values))
    for flag, wanted in (ours or {}).items():
        found = argument(final, flag)
        if found is None:
            final += [flag, fill(str(wanted), values)]
        elif found != str(wanted):
            raise ServingError(f"the plan says {flag} {found}, the role says {flag} {wanted}; remove it from the plan")
    for word in final:
        if "\n" in word or "\0" in word:
            raise ServingError(f"argument {word!r} holds a line break, which a unit file can not carry")
    return final


def argument(words: Sequence[str], flag: str) -> str | None:
    """The value of ``flag`` in ``--flag value`` or ``--flag=value``; the last one counts, as for argparse."""
    found = None
    for index, word in enumerate(words):
        if word == flag and index + 1 < len(words):
            found = words[index + 1]
        elif word.startswith(f"{flag}="):
            found = word.partition("=")[2]
    return found


def argument_all(words: Sequence[str], flag: str) -> list[str]:
    """The values of a flag that may be repeated."""
    found = [words[index + 1] for index, word in enumerate(words[:-1]) if word == flag]
    return found + [word.partition("=")[2] for word in words if word.startswith(f"{flag}=")]


def exec_line(words: Iterable[str]) -> str:
    """Words as one ``ExecStart=`` value. systemd expands % and $ itself, so both are doubled."""
    line = []
    for word in words:
        doubled = word.replace("%", "%%").replace("$", "$$")
        if PLAIN_WORD.match(word):
            line.append(doubled)
        elif "'" not in word and "\\" not in word:
            line.append(f"'{doubled}'")
        else:
            escaped = doubled.replace("\\", "\\\\").replace('"', '\\"')
            line.append(f'"{escaped}"')
    return " ".join(line)


# The capacity in a --l2-adapter that LMCache is given; l2_residue lowers it at every start by what is there already.
L2_CAPACITY = re.compile(r'(?<="max_capacity_gb":)[0-9.]+')
L2_REPORT = "/run/goodput-lmcache/l2.json"


def _with_l2_capacity(words: Iterable[str], capacity: str) -> list[str]:
    found, before = [], ""
    for word in words:
        files = before == "--l2-adapter" and '"type":"fs_native"' in word
        found.append(L2_CAPACITY.sub(capacity, word) if files else word)
        before = word
    return found


def l2_exec_line(words: Iterable[str], variable: str) -> str:
    """``exec_line``, where the capacity of an L2 in files is taken from an environment variable at each start."""
    marker = "31415926.5"
    return exec_line(_with_l2_capacity(words, marker)).replace(marker, f"${{{variable}}}")


def l2_report(path: str = L2_REPORT) -> dict[str, Any]:
    """What ``l2_residue`` found at the server's last start; {} where there is no L2 in files."""
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError):
        return {}


def running_words(words: Sequence[str], report: Mapping[str, Any]) -> list[str]:
    """Planned words as the server got them at its last start: their L2 capacity less what was there then."""
    planned = [float(number) for word in words for number in L2_CAPACITY.findall(word)]
    if report.get("planned_gib") not in planned:
        return list(words)
    return _with_l2_capacity(words, json.dumps(report["capacity_gib"]))


def environment_values(variables: Mapping[str, Any], values: Mapping[str, Any]) -> dict[str, str]:
    """Variables sorted by name, placeholders filled in.

    :raises ServingError: a name that is no variable, or a value with a line break.
    """
    final = {}
    for name in sorted(variables):
        if not ENVIRONMENT_NAME.match(name):
            raise ServingError(f"environment variable {name!r} is no name; use letters, digits and _")
        raw = variables[name]
        text = fill({True: "true", False: "false"}[raw] if isinstance(raw, bool) else str(raw), values)
        if "\n" in text:
            raise ServingError(
                f"environment variable {name} holds a line break, which an EnvironmentFile can not carry"
            )
        final[name] = text
    return final


def environment(variables: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """``NAME="value"`` lines of an EnvironmentFile; see ``environment_values``."""
    return [
        '{}="{}"'.format(name, re.sub(r'(["$`\\])', r"\\\1", text))
        for name, text in environment_values(variables, values).items()
    ]


# Judged is what a plan has, and what begins like this: it changes what a process does with the cache, whoever gave it.
# Not judged are the owner's of /etc/goodput/lmcache.secret, which no plan knows and no verdict may show.
JUDGED_VARIABLES = ("UCX_", "MC_", "VLLM_", "LMCACHE_", "DYN_ROUTER_")
SECRET_VARIABLES = ("LMCACHE_RESP_",)


def environment_differences(
    running: Mapping[str, str], planned: Mapping[str, str]
) -> tuple[dict[str, str], dict[str, str]]:
    """(found, required) of the judged variables that differ; both are empty when the process has what was planned."""
    names = sorted(
        name
        for name in running.keys() | planned.keys()
        if (name in planned or name.startswith(JUDGED_VARIABLES))
        and not name.startswith(SECRET_VARIABLES)
        and running.get(name) != planned.get(name)
    )
    return {name: running.get(name, "not set") for name in names}, {
        name: planned.get(name, "not set") for name in names
    }


def variables(text: str, separator: str = "\0") -> dict[str, str]:
    """/proc/PID/environ by name."""
    return dict(line.partition("=")[::2] for line in text.split(separator) if "=" in line)


# What every process of Dynamo is told beside its plan. Addresses are always given: a node has a management network and
# two rails, and Dynamo would guess.
PLANE_ENVIRONMENT = {
    "DYN_TCP_RPC_HOST": "{management_address}",
    "DYN_TCP_RESPONSE_STREAM_HOST": "{management_address}",
    "DYN_EVENT_PLANE_HOST": "{management_address}",
    "DYN_SYSTEM_HOST": "{management_address}",
    # vLLM's own address, which it guesses too; its connection to itself over another network card would be dropped by
    # the units' packet filter. Only vLLM reads it.
    "VLLM_HOST_IP": "{management_address}",
    # Without it the worker's /health stays at 503 although its endpoint is ready.
    "DYN_SYSTEM_USE_ENDPOINT_HEALTH_STATUS": '["generate"]',
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
}
DISCOVERIES = ("etcd", "kubernetes")


def planes(discovery: str) -> dict[str, dict[str, str]]:
    """The three planes of Dynamo: ``arguments`` (flag: value) and ``environment``, with placeholders.

    Always explicit: with etcd the automatic choice for events is NATS, which nobody runs here.

    :param discovery: ``etcd`` (systemd) or ``kubernetes``.
    """
    if discovery not in DISCOVERIES:
        raise ServingError(f"discovery {discovery!r}; required one of {', '.join(DISCOVERIES)}; correct the role")
    flags = {"--discovery-backend": discovery, "--request-plane": "tcp", "--event-plane": "zmq"}
    return {"arguments": flags, "environment": dict(PLANE_ENVIRONMENT)}


# --------------------------------------------------------------------------------------------------------------------
# Checks
# --------------------------------------------------------------------------------------------------------------------


def row(check: str, found: Any, required: Any, remedy: str, ok: bool | None = None) -> Check:
    """One row of a verdict; ``ok`` defaults to equality."""
    return {
        "check": check,
        "ok": found == required if ok is None else ok,
        "found": str(found),
        "required": str(required),
        "remedy": remedy,
    }


def reason(checks: Iterable[Check]) -> str:
    """What a person reads when checks failed; empty when none did."""
    lines = [
        f"{check['check']}: found {check['found']}; required {check['required']}; fix: {check['remedy']}"
        for check in checks
        if not check["ok"]
    ]
    return "\n".join(lines)


# --------------------------------------------------------------------------------------------------------------------
# Before anything changes: ports, mounts, files
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Listener:
    """A listening TCP socket, its process as far as /proc tells it; ``unit`` is the systemd unit, "" if none."""

    address: str
    port: int
    pid: int | None
    command: str
    unit: str

    def words(self) -> str:
        who = f"pid {self.pid} ({self.command})" if self.pid else "a process that /proc does not show"
        return f"{self.address}:{self.port} held by {who}" + (f" of unit {self.unit}" if self.unit else "")


def address_of(text: str) -> str:
    """``0100007F`` of /proc/net/tcp (words in host order) as an address."""
    raw = bytes.fromhex(text)
    swapped = b"".join(
        struct.pack("=I", struct.unpack(">I", raw[start : start + 4])[0]) for start in range(0, len(raw), 4)
    )
    return socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, swapped)


def unit_of(cgroup: str) -> str:
    """The innermost service of a /proc/PID/cgroup text; ``kubepods`` for a process in a pod."""
    if "/kubepods" in cgroup:
        return PODS
    names = re.findall(r"/([^/\n]+\.service)(?=/|\n|$)", cgroup)
    return names[-1] if names else ""


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as stream:
            return stream.read()
    except OSError:
        return ""


def listeners(ports: Iterable[int], proc_root: str = "/proc") -> list[Listener]:
    """Who listens on these TCP ports, IPv4 and IPv6."""
    wanted = set(ports)
    sockets: dict[str, tuple[str, int]] = {}
    for name in ("tcp", "tcp6"):
        for line in _read(os.path.join(proc_root, "net", name)).splitlines()[1:]:
            fields = line.split()
            if len(fields) < 10 or fields[3] != "0A":
                continue
            address, _, port = fields[1].partition(":")
            if int(port, 16) in wanted:
                sockets[fields[9]] = (address_of(address), int(port, 16))
    if not sockets:
        return []
    owners: dict[str, int] = {}
    for pid in (entry for entry in os.listdir(proc_root) if entry.isdigit()):
        folder = os.path.join(proc_root, pid, "fd")
        try:
            entries = os.listdir(folder)
        except OSError:
            continue
        for entry in entries:
            try:
                target = os.readlink(os.path.join(folder, entry))
            except OSError:
                continue
            if target.startswith("socket:[") and target[8:-1] in sockets:
                owners.setdefault(target[8:-1], int(pid))
    found = []
    for inode, (address, number) in sorted(sockets.items(), key=lambda item: (item[1][1], item[1][0])):
        owner = owners.get(inode)
        home = os.path.join(proc_root, str(owner))
        command = _read(os.path.join(home, "comm")).strip() if owner else ""
        found.append(
            Listener(address, number, owner, command, unit_of(_read(os.path.join(home, "cgroup"))) if owner else "")
        )
    return found


def port_checks(wanted: Mapping[int, Mapping[str, str]], found: Sequence[Listener]) -> list[Check]:
    """One row a port: free, or held by its own unit.

    :param wanted: ``{8000: {"unit": "goodput-frontend", "variable": "dynamo_http_port"}}``.
    """
    rows = []
    for port, use in sorted(wanted.items()):
        unit = use["unit"]
        foreign = [entry for entry in found if entry.port == port and entry.unit not in (f"{unit}.service", unit)]
        rows.append(
            row(
                f"port {port}",
                "; ".join(entry.words() for entry in foreign) or "free or ours",
                f"port {port} free for {unit}",
                "stop that process" + (f", or choose another port with {use['variable']}" if use["variable"] else ""),
                not foreign,
            )
        )
    return rows


def mount_of(path: str, proc_root: str = "/proc") -> str:
    """The mount point that holds ``path``, from mountinfo; the last mount on a point wins."""
    best = ""
    for line in _read(os.path.join(proc_root, "self", "mountinfo")).splitlines():
        fields = line.split()
        if len(fields) < 5:
            continue
        point = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), fields[4])
        inside = path == point or path.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= len(best):
            best = point
    return best


def mount_checks(wanted: Mapping[str, str], proc_root: str = "/proc") -> list[Check]:
    """One row a mount point: ``{"/srv/goodput/l2": "run the role nvme_l2"}`` (path: remedy)."""
    rows = []
    for path, remedy in wanted.items():
        found = mount_of(path, proc_root)
        rows.append(
            row(
                f"mount {path}",
                f"{path} lies on {found or 'nothing'}",
                f"a filesystem of its own at {path}",
                remedy,
                found == path,
            )
        )
    return rows


def file_checks(wanted: Mapping[str, str]) -> list[Check]:
    """One row a file or directory that must be there: ``{path: remedy}``."""
    return [
        row(f"path {path}", "there" if os.path.exists(path) else "missing", "there", remedy)
        for path, remedy in wanted.items()
    ]


# How the planner names the L2 directory of an arrangement: model, data types, chunk, groups, engine, LMCache.
L2_DIRECTORY = re.compile(r"[A-Za-z0-9][^/\s]*_kv-[^/\s]+_c\d+_(?:sep|fused)_[^/\s]+_lmcache-[^/\s]+")
DROP_VARIABLE = "lmcache_l2_drop_others"


def _taken_bytes(folder: str) -> int:
    total = 0
    for base, _, names in os.walk(folder):
        for name in names:
            # A running server evicts meanwhile.
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(base, name)).st_blocks * 512
    return total


def other_l2_bytes(own: str) -> dict[str, int]:
    """What other arrangements left beside the directory ``own``: bytes by name, of real directories alone."""
    root, name = os.path.split(own.rstrip("/"))
    try:
        entries = sorted(os.scandir(root), key=lambda entry: entry.name)
    except OSError:
        return {}
    return {
        entry.name: _taken_bytes(entry.path)
        for entry in entries
        if entry.name != name and L2_DIRECTORY.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
    }


def drop_check(own: str, drop: Sequence[str]) -> Check:
    """Only directories of other arrangements may be dropped: by their name, beside the directory ``own``."""
    name = os.path.basename(own.rstrip("/"))
    bad = [each for each in drop if each == name or not L2_DIRECTORY.fullmatch(each)]
    return row(
        DROP_VARIABLE,
        f"{', '.join(bad)}, this arrangement's own directory or no name of one" if bad else "directories of others",
        "directories of others",
        f"remove it from {DROP_VARIABLE}",
        not bad,
    )


def space_check(path: str, own: str, required_bytes: int, remedy: str, drop: Sequence[str] = ()) -> Check:
    """Does the filesystem at ``path`` hold ``required_bytes``, counting what already lies in the directory ``own``?

    :param drop: directories of other arrangements that go with the restart, by consent; see ``drop_check``.
    """
    answer = os.statvfs(path)
    free_bytes, own_bytes = answer.f_bavail * answer.f_frsize, _taken_bytes(own)
    others = other_l2_bytes(own)
    dropped_bytes = sum(others.pop(name, 0) for name in drop)
    found = f"{free_bytes / GIB_BYTES:.2f} GiB free and {own_bytes / GIB_BYTES:.2f} GiB of our own files"
    if dropped_bytes:
        found += f", {dropped_bytes / GIB_BYTES:.2f} GiB that {DROP_VARIABLE} gives back"
    if others:
        listed = ", ".join(f"{name} {size / GIB_BYTES:.2f} GiB" for name, size in others.items())
        found += f"; other arrangements' directories: {listed}"
        remedy = (
            f"drop what another arrangement stored, {DROP_VARIABLE}: [{', '.join(others)}] (those that you no longer "
            f"need), or {remedy}"
        )
    return row(
        f"space on {path}",
        found,
        f"{required_bytes / GIB_BYTES:.2f} GiB",
        remedy,
        free_bytes + own_bytes + dropped_bytes >= required_bytes,
    )


def missing_packages(names: Sequence[str]) -> list[str]:
    """Those of the Debian packages that are not installed."""
    if not names:
        return []
    done = subprocess.run(
        ["dpkg-query", "-W", "-f", "${Package} ${db:Status-Status}\n", "--", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    return [name for name in names if f"{name} installed" not in done.stdout.splitlines()]


# --------------------------------------------------------------------------------------------------------------------
# Asking what runs
# --------------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """``status`` 0: no HTTP answer, ``text`` says why."""

    status: int
    text: str

    def json(self) -> Any:
        try:
            return json.loads(self.text)
        except ValueError:
            return None

    def words(self) -> str:
        return f"HTTP {self.status}: {self.text[:200].strip()}" if self.status else self.text


# A proxy of the environment must never see these requests.
OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def get(url: str, timeout_seconds: float = 20.0) -> Answer:
    """One GET; an HTTP error status is an answer, too."""
    try:
        with OPENER.open(url, timeout=timeout_seconds) as response:
            return Answer(response.status, response.read().decode("utf-8", "replace"))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.read().decode("utf-8", "replace"))
    except OSError as error:
        return Answer(0, f"no answer from {url}: {getattr(error, 'reason', error)}")


@dataclass(frozen=True)
class Sample:
    name: str
    labels: dict[str, str]
    value: float


def samples(text: str) -> list[Sample]:
    """Prometheus text format; comments, and what is no sample, such as the text of a failed answer, left out."""
    found = []
    for line in text.splitlines():
        match = re.match(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)", line)
        if not match:
            continue
        labels = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match.group(2) or ""))
        with contextlib.suppress(ValueError):
            found.append(Sample(match.group(1), labels, float(match.group(3))))
    return found


def values(found: Iterable[Sample], name: str, **labels: str) -> list[float]:
    """Values of one metric whose labels include the given ones; empty when the series does not exist (yet)."""
    return [
        sample.value
        for sample in found
        if sample.name == name and all(sample.labels.get(key) == wanted for key, wanted in labels.items())
    ]


def host_of(transport: str) -> str:
    """``10.77.0.1`` of ``10.77.0.1:45893/7d7b…/dynamo/backend/generate``."""
    return transport.partition("/")[0].rpartition(":")[0].strip("[]")


def instances(health: Any) -> list[dict[str, str]]:
    """``generate`` endpoints of the frontend's /health: ``{"id": hexadecimal, "address": management address}``.

    Worker ids have 64 bits; the hexadecimal text survives tools that read numbers as doubles.
    """
    found = []
    for entry in (health or {}).get("instances", []):
        if entry.get("endpoint") == "generate":
            transport = entry.get("transport")
            text = transport.get("tcp", "") if isinstance(transport, dict) else str(transport)
            found.append({"id": f"{int(entry['instance_id']):x}", "address": host_of(text)})
    return sorted(found, key=lambda item: (item["address"], item["id"]))


def log_of(unit: str, pods: bool) -> str:
    """Where a person reads what a program said."""
    return f"`kubectl logs` of the pods of {unit.removeprefix('goodput-')}" if pods else f"`journalctl -u {unit}`"


def frontend_checks(
    health: Answer,
    models: Answer,
    metrics: Answer,
    *,
    model: str,
    addresses: Sequence[str],
    allowed: Sequence[str],
    block_size_tokens: int,
    pods: bool = False,
) -> list[Check]:
    """Rows from the frontend's /health, /v1/models and /metrics.

    :param addresses: management addresses of the nodes that must have one worker each.
    :param allowed: those that may have one, which is more than ``addresses`` when a play is limited to some nodes.
    :param block_size_tokens: the plan's block; the router drops every event of another size.
    :param pods: whether they run in pods, which remedies then name instead of units.
    """
    frontend, worker = log_of("goodput-frontend", pods), log_of("goodput-worker", pods)
    if health.status != 200 or not isinstance(health.json(), dict):
        return [row("frontend answers", health.words(), "HTTP 200", f"read {frontend}", False)]
    found = [entry["address"] for entry in instances(health.json())]
    missing = sorted(set(addresses) - set(found))
    rows = [
        row(
            "one worker on each node",
            ", ".join(found) or "none",
            ", ".join(sorted(addresses)),
            f"read {worker} on {', '.join(missing)}"
            if missing
            else "more workers than nodes: wait until the lease of a dead one ends, or stop the foreign worker",
            not missing and set(found) <= set(allowed) and len(set(found)) == len(found),
        )
    ]
    body = models.json() if models.status == 200 else None
    listed = [entry.get("id") for entry in (body or {}).get("data") or []]
    rows.append(
        row(
            "model is listed",
            ", ".join(listed) or models.words(),
            model,
            f"worker and frontend must read the model directory; read {worker}"
            if pods
            else "the worker must read the model directory; see its journal",
            model in listed,
        )
    )
    known = samples(metrics.text) if metrics.status == 200 else []
    blocks = sorted(set(values(known, "dynamo_frontend_model_kv_cache_block_size", model=model)))
    rows.append(
        row(
            "block size of the router, tokens",
            ", ".join(f"{value:g}" for value in blocks) or "no such series",
            block_size_tokens,
            "the workers' --block-size and the plan's block_size_tokens must agree; restart "
            + ("the worker's pods" if pods else "goodput-worker"),
            blocks == [float(block_size_tokens)],
        )
    )
    sources = values(known, "dynamo_component_router_kv_zmq_ingress_sources", state="active")
    if sources or reports_ingress(metrics):
        rows.append(
            row(
                "workers whose KV events the router receives",
                f"{max(sources):g}" if sources else "none: it does not listen",
                len(found),
                "KV events on (no --no-router-kv-events, no DYN_ROUTER_USE_KV_EVENTS=false) and the event plane zmq "
                "everywhere; see DYN_EVENT_PLANE_HOST (/etc/goodput/dynamo.env, or the pod's env)",
                bool(sources) and max(sources) == len(found),
            )
        )
    return rows


def worker_checks(health: Answer) -> list[Check]:
    """The worker's own /health: it and its ``generate`` endpoint are ready."""
    body = health.json()
    ready = health.status == 200 and isinstance(body, dict) and (body.get("endpoints") or {}).get("generate") == "ready"
    return [
        row("worker is ready", health.words(), "HTTP 200, generate ready", "read `journalctl -u goodput-worker`", ready)
    ]


def applied_events(metrics: Answer) -> tuple[float, float]:
    """KV events of stored blocks that the router took into its index, and those it could not use."""
    known = [s for s in samples(metrics.text) if s.name == "dynamo_component_kv_cache_events_applied"]
    stored = [s for s in known if s.labels.get("event_type") == "stored"]
    good = sum(s.value for s in stored if s.labels.get("status") == "ok")
    return good, sum(s.value for s in stored) - good


def reports_ingress(metrics: Answer) -> bool:
    """Whether this Dynamo counts what reaches its router over zmq (1.6.1 does)."""
    return metrics.status == 200 and any("_zmq_ingress_" in s.name for s in samples(metrics.text))


def event_checks(before: Answer, after: Answer) -> list[Check]:
    """/metrics before and after a completion of a new prompt: its blocks must have reached the router's index.

    Only growth counts. After a restart of a worker some older events name blocks that the router does not know. With KV
    events switched off the router applies its own guesses and counts them as events (1.6.1: one a request), so where it
    counts batches from workers, too, those must grow.
    """
    (good_before, bad_before), (good, bad) = applied_events(before), applied_events(after)
    found, ok = f"{good - good_before:g} applied, {bad - bad_before:g} not usable", good > good_before
    if reports_ingress(after):
        then, now = (
            sum(values(samples(answer.text), "dynamo_component_router_kv_zmq_ingress_batches_total"))
            for answer in (before, after)
        )
        found, ok = f"{now - then:g} batches from workers, {found}", ok and now > then
    remedy = "without events the router guesses; read the frontend's journal for the endpoint it can not reach"
    return [row("KV events of the completion", found, "at least 1 applied, from a worker", remedy, ok)]


L1_MEMORY = ("storage_manager", "l1_manager_config", "memory_config")
# flag of `lmcache server`: (path in /config, how its text becomes the value there)
LMCACHE_CONFIG: dict[str, tuple[tuple[str, ...], Any]] = {
    "--instance-id": (("mp", "instance_id"), str),
    "--host": (("mp", "host"), str),
    "--port": (("mp", "port"), int),
    "--chunk-size": (("mp", "chunk_size"), int),
    "--hash-algorithm": (("mp", "hash_algorithm"), str),
    "--supported-transfer-mode": (("mp", "supported_transfer_mode"), str),
    "--session-ttl-seconds": (("mp", "session_ttl_seconds"), float),
    "--http-host": (("http", "http_host"), str),
    "--http-port": (("http", "http_port"), int),
    "--l1-size-gb": ((*L1_MEMORY, "size_in_bytes"), lambda text: int(float(text) * GIB_BYTES)),
    "--l1-align-bytes": ((*L1_MEMORY, "align_bytes"), int),
    "--l1-read-ttl-seconds": (("storage_manager", "l1_manager_config", "read_ttl_seconds"), int),
    "--l1-write-ttl-seconds": (("storage_manager", "l1_manager_config", "write_ttl_seconds"), int),
    "--eviction-policy": (("storage_manager", "eviction_config", "eviction_policy"), str),
    "--eviction-trigger-watermark": (("storage_manager", "eviction_config", "trigger_watermark"), float),
    "--eviction-ratio": (("storage_manager", "eviction_config", "eviction_ratio"), float),
    "--l2-store-policy": (("storage_manager", "store_policy"), str),
    "--l2-prefetch-policy": (("storage_manager", "prefetch_policy"), str),
    "--l2-prefetch-max-in-flight": (("storage_manager", "prefetch_max_in_flight"), int),
    "--coordinator-url": (("coordinator", "url"), str),
    "--p2p-advertise-url": (("mp", "p2p_config", "advertise_url"), str),
}
# Kept apart from the adapter's own keys by the server, so they can not be compared there.
ADAPTER_COMMON = ("type", "eviction", "persist_enabled", "serde", "affinity_tag", "shared")


def lmcache_checks(health: Answer, config: Answer, status: Answer, words: Sequence[str]) -> list[Check]:
    """Rows from LMCache's /healthcheck, /config and /status against its own arguments."""
    healthy = isinstance(health.json(), dict) and health.json().get("status") == "healthy"
    rows = [
        row("LMCache is healthy", health.words(), "status healthy", "read `journalctl -u goodput-lmcache`", healthy)
    ]
    settings, state = config.json(), status.json()
    if config.status != 200 or not isinstance(settings, dict):
        return [
            *rows,
            row("LMCache's configuration", config.words(), "HTTP 200", "read `journalctl -u goodput-lmcache`", False),
        ]
    restart = "the running server has other arguments than its unit: `systemctl restart goodput-lmcache`"
    for flag, (path, read) in LMCACHE_CONFIG.items():
        text = argument(words, flag)
        if text is not None:
            found: Any = settings
            for key in path:
                found = found.get(key) if isinstance(found, dict) else None
            rows.append(row(f"LMCache {flag}", found, read(text), restart))
    adapters = ((settings.get("storage_manager") or {}).get("l2_adapter_config") or {}).get("adapters") or []
    wanted = [json.loads(text) for text in argument_all(words, "--l2-adapter")]
    rows.append(row("LMCache L2 adapters", len(adapters), len(wanted), restart))
    for number, (have, want) in enumerate(zip(adapters, wanted, strict=False)):
        own = {key: value for key, value in want.items() if key not in ADAPTER_COMMON}
        different = {key: have.get(key) for key, value in own.items() if have.get(key) != value}
        # An unknown key is dropped by the server without a word, and a capacity without eviction bounds nothing.
        rows.append(row(f"LMCache L2 adapter {number}", different or "as planned", "as planned", restart))
        bounded = not want.get("max_capacity_gb") or str(have.get("eviction_config", "")) not in ("", "None")
        rows.append(
            row(f"LMCache L2 adapter {number} evicts", bounded, True, "give the adapter an eviction block in the plan")
        )
    if isinstance(state, dict):
        rows.append(
            row("LMCache's parts are healthy", state.get("is_healthy"), True, "read `journalctl -u goodput-lmcache`")
        )
    return rows


# --------------------------------------------------------------------------------------------------------------------
# Units
# --------------------------------------------------------------------------------------------------------------------


def show(units: Sequence[str]) -> dict[str, dict[str, str]]:
    """The few systemd properties that the checks need, of all units with one call."""
    if not units:
        return {}
    names = "ActiveState,MainPID,NRestarts,InvocationID,UnitFileState,Result"
    command = ["systemctl", "show", f"--property={names}", "--", *units]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    blocks = [block for block in done.stdout.strip().split("\n\n") if block.strip()]
    # systemctl answers in the order asked.
    return {
        unit: dict(line.partition("=")[::2] for line in block.splitlines())
        for unit, block in zip(units, [*blocks, *[""] * len(units)], strict=False)
    }


def runs(properties: Mapping[str, str]) -> bool:
    """Whether the unit runs or is about to."""
    return properties.get("ActiveState") in ("active", "activating", "reloading")


def journal(invocations: Sequence[str], wanted: str) -> list[str]:
    """Lines with ``wanted`` that these runs of units have logged, with the unit's name; one call for all."""
    known = [f"_SYSTEMD_INVOCATION_ID={invocation}" for invocation in invocations if invocation]
    if not known:
        return []
    command = ["journalctl", "--quiet", "--no-pager", "--output=short", f"--grep={re.escape(wanted)}", *known]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return [line for line in done.stdout.splitlines() if line]


def command_line(pid: str, proc_root: str = "/proc") -> list[str]:
    """The words of a running process."""
    return _read(os.path.join(proc_root, pid, "cmdline")).split("\0")[:-1]


def process_environment(pid: str, proc_root: str = "/proc") -> dict[str, str]:
    """What a running process was started with."""
    return variables(_read(os.path.join(proc_root, pid, "environ")))


# What a person does about a unit that does not run, beside reading its journal.
UNIT_REMEDIES = {
    "goodput-etcd": "if it can not read its data, delete /var/lib/goodput/etcd/member: registrations are made again",
}


def given_up(properties: Mapping[str, str]) -> bool:
    """Whether systemd will not start the unit again by itself.

    A unit that is tried again is ``activating`` meanwhile. ``Result`` does not tell: it stays what the last start ended
    with when the start limit is hit.
    """
    return properties.get("ActiveState") == "failed"


def unit_remedy(unit: str, properties: Mapping[str, str] | None = None) -> str:
    """What to do about a unit that does not run."""
    words = [f"read `journalctl -u {unit}`", UNIT_REMEDIES.get(unit, "")]
    if given_up(properties or {}):
        words += [f"it was given up after too many failed starts: `systemctl reset-failed {unit}`, then start it"]
    return "; ".join(filter(None, words))


def unit_checks(
    unit: str,
    properties: Mapping[str, str],
    running: Sequence[str],
    words: Sequence[str],
    given: Mapping[str, str] | None = None,
    planned: Mapping[str, str] | None = None,
) -> list[Check]:
    """Rows: the unit is active, starts at boot, and runs exactly the planned arguments and environment.

    :param given: what the process was started with; only judged variables are compared.
    :param planned: what it must have been started with; None where nobody says.
    """
    rows = [
        row(f"{unit} runs", properties.get("ActiveState", "unknown"), "active", unit_remedy(unit, properties)),
        row(
            f"{unit} starts at boot",
            properties.get("UnitFileState", "unknown"),
            "enabled",
            f"`systemctl enable {unit}`",
        ),
    ]
    if rows[0]["ok"] and words:
        same = list(running[-len(words) :]) == list(words)
        rows.append(
            row(
                f"{unit} runs the planned arguments",
                "as planned" if same else " ".join(running),
                "as planned" if same else " ".join(words),
                f"`systemctl restart {unit}`",
                same,
            )
        )
    if rows[0]["ok"] and planned is not None:
        found, required = environment_differences(given or {}, planned)
        rows.append(
            row(
                f"{unit} has the planned environment",
                found or "as planned",
                required or "as planned",
                f"remove the file that `systemctl cat {unit}` shows beside its own; `systemctl restart {unit}`",
                not found,
            )
        )
    return rows


def unpublished_checks(lines: Sequence[str]) -> list[Check]:
    """The router drops events of another block size with only this line in a log."""
    remedy = "block sizes of worker and router differ; set one --block-size in the plan and restart both"
    return [row(f"log lines with {UNPUBLISHED!r}", lines[-1] if lines else 0, 0, remedy, not lines)]
