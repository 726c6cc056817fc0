"""LMCache server on each node: asked over HTTP, compared with its own process and the filesystem below it."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils.serving import (
    L2_REPORT,
    environment_differences,
    running_words,
    variables,
)

pytestmark = pytest.mark.unit("goodput-lmcache")
UNIT = "goodput-lmcache"
LOG = f"read `journalctl -u {UNIT}`"
AGAIN = "run `ansible-playbook site.yml --tags lmcache`"
# What a unit must have, as `systemctl show` says it.
HARDENED = {
    "User": "goodput",
    "NoNewPrivileges": "yes",
    "ProtectSystem": "strict",
    "ProtectHome": "yes",
    "PrivateTmp": "yes",
    "CapabilityBoundingSet": "",
    "LimitMEMLOCK": "infinity",
    "StartLimitIntervalUSec": "0",
    "OOMScoreAdjust": "-500",
    "CPUWeight": "100",
    "IOWeight": "50",
}
UNITS = (UNIT, "goodput-coordinator")
COMMANDS = {
    "decided": "cat /etc/goodput/lmcache.json",
    "residue": f"cat {L2_REPORT}",
    **{unit: f"tr '\\0' '\\n' < /proc/$(systemctl show -P MainPID {unit})/cmdline" for unit in UNITS},
    **{f"{unit} environ": f"tr '\\0' '\\n' < /proc/$(systemctl show -P MainPID {unit})/environ" for unit in UNITS},
    "running": f"systemctl is-active {' '.join(UNITS)}",
    "show": f"systemctl show {UNIT} -p ActiveState,UnitFileState,MainPID,Restart,IPAddressDeny,{','.join(HARDENED)}",
    "sockets": f"ss -Hltnp | grep pid=$(systemctl show -P MainPID {UNIT}),",
}


def by_unit(decided: str) -> dict[str, dict[str, Any]]:
    """What the role wrote down: arguments and environment of each unit."""
    units = json.loads(decided or "[]")
    # Something else was written by another version of the role: then nothing is decided here yet.
    return {unit["name"]: unit for unit in units} if isinstance(units, list) else {}


def properties(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines())


def value(words: list[str], flag: str) -> str:
    return words[words.index(flag) + 1]


def needs_l2_files(state: dict[str, Any]) -> None:
    if not any('"base_path"' in word for word in state["decided"]):
        pytest.skip("this arrangement has no L2 in files")


@pytest.fixture
def state(host: Any, sh: Callable[..., Any]) -> dict[str, Any]:
    """systemd's properties, the words of the process, and the server's own /status and /healthcheck."""
    answers = sh(COMMANDS)
    decided = by_unit(answers["decided"].stdout)
    if UNIT not in decided and answers["decided"].ok:
        pytest.skip("this arrangement has no LMCache server; that none runs is checked")
    words = answers[UNIT].stdout.splitlines()
    found: dict[str, Any] = {
        "show": properties(answers["show"].stdout),
        "words": words,
        "status": {},
        "health": "",
        "decided": decided.get(UNIT, {}).get("arguments", []),
    }
    found["listen"] = [line.split()[3] for line in answers["sockets"].stdout.splitlines()]
    if "--http-host" in words:
        url = f"http://{value(words, '--http-host')}:{value(words, '--http-port')}"
        asked = sh({path: f"curl -sS -m 30 --noproxy '*' {url}/{path}" for path in ("healthcheck", "status")})
        found["health"] = asked["healthcheck"].stdout or asked["healthcheck"].stderr
        found["status"] = json.loads(asked["status"].stdout or "{}")
    return found


def test_what_runs_is_what_was_decided(host: Any, sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "Every unit runs the arguments and environment that the plan decided, and no unit of another arrangement runs"
    answers = sh(COMMANDS)
    decided = by_unit(answers["decided"].stdout)
    check(answers["decided"].rc, 0, AGAIN, what="/etc/goodput/lmcache.json")
    states = answers["running"].stdout.split()
    running = [unit for unit, state in zip(UNITS, states, strict=True) if state not in ("inactive", "unknown")]
    check(sorted(running), sorted(decided), AGAIN, what="units")
    residue = json.loads(answers["residue"].stdout or "{}")
    for unit, wanted in decided.items():
        # Before the arguments stand python3, the program and its subcommand.
        check(
            answers[unit].stdout.splitlines()[3:],
            running_words(wanted["arguments"], residue),
            f"`systemctl restart {unit}`; {AGAIN}",
            what=unit,
            unit=unit,
        )
        given = variables(answers[f"{unit} environ"].stdout, "\n")
        check(
            *environment_differences(given, wanted["environment"]),
            f"remove what `systemctl cat {unit}` shows beside its own file, then `systemctl restart {unit}`; {AGAIN}",
            what=f"{unit}, environment",
            unit=unit,
        )


def test_runs_and_is_healthy(host: Any, state: dict[str, Any], check: Callable[..., None]) -> None:
    "LMCache runs, starts at boot and is healthy"
    check(state["show"].get("ActiveState"), "active", LOG, what="state")
    check(state["show"].get("UnitFileState"), "enabled", AGAIN, what="at boot")
    check(state["health"].replace(" ", ""), '{"status":"healthy"}', LOG, what="/healthcheck")
    check(state["status"].get("is_healthy"), True, LOG, what="all parts")


def test_unit_is_hardened(host: Any, state: dict[str, Any], check: Callable[..., None]) -> None:
    "LMCache has no more rights than it needs"
    found = {name: state["show"].get(name) for name in HARDENED}
    check(found, HARDENED, AGAIN)
    check(state["show"].get("Restart"), "on-failure", AGAIN, what="restarts by itself")


def test_l2_lies_on_the_l2_filesystem(
    host: Any, state: dict[str, Any], sh: Callable[..., Any], check: Callable[..., None]
) -> None:
    "LMCache's L2 directory lies on the L2 filesystem and the server can write it"
    needs_l2_files(state)
    adapters = (state["status"].get("storage_manager") or {}).get("l2_adapters") or [{}]
    path = adapters[0].get("base_path", "/none")
    answers = sh(
        {
            "mount": f"findmnt -no TARGET,FSTYPE --target {path}",
            "root": "findmnt -no SOURCE /",
            "source": f"findmnt -no SOURCE --target {path}",
            "write": f'f=$(runuser -u goodput -- mktemp -p {path} .check.XXXXXX) && rm -f "$f"',
        },
        fresh=True,
    )
    check(answers["mount"].stdout.split()[:1], ["/srv/goodput/l2"], "mount it: `systemctl start srv-goodput-l2.mount`")
    source = answers["source"].stdout.strip()
    check(
        source, "not the root filesystem", AGAIN, ok=source not in ("", answers["root"].stdout.strip()), what="device"
    )
    check(answers["write"].rc, 0, f"`ls -ld {path}` must show the owner goodput; {AGAIN}", what="writable by goodput")


def test_l2_is_bounded(host: Any, state: dict[str, Any], sh: Callable[..., Any], check: Callable[..., None]) -> None:
    "LMCache evicts from L2 before the filesystem is full"
    needs_l2_files(state)
    manager = state["status"].get("storage_manager") or {}
    evictions = (manager.get("l2_eviction_controller") or {}).get("adapters") or []
    capacity_bytes = sum(int(entry.get("total_capacity_bytes", 0)) for entry in evictions)
    size_bytes = int(sh({"size": "df --output=size -B1 /srv/goodput/l2 | tail -n1"})["size"].stdout or 0)
    ok = 0 < capacity_bytes <= size_bytes
    check(f"{capacity_bytes} bytes", f"1 to {size_bytes} bytes", "lower l2_capacity_gib in the plan", ok=ok)


def test_server_runs_its_arguments(host: Any, state: dict[str, Any], check: Callable[..., None]) -> None:
    "LMCache works with the sizes of its command line"
    words, status = state["words"], state["status"]
    l1_bytes = int(float(value(words, "--l1-size-gb")) * 2**30)
    manager = status.get("storage_manager") or {}
    restart = f"`systemctl restart {UNIT}`"
    check(status.get("chunk_size"), int(value(words, "--chunk-size")), restart, what="chunk, tokens")
    check((manager.get("l1_usage") or [0, 0])[1], l1_bytes, restart, what="L1, bytes")


def test_listens_only_where_it_must(host: Any, state: dict[str, Any], check: Callable[..., None]) -> None:
    "LMCache listens where the plan says, and only nodes may connect"
    words = state["words"]
    # Peers read on the first rail; Mooncake's engine takes a port of its range on every address for it. The unit's
    # packet filter, below, is what keeps others out.
    peers = {value(words, "--p2p-advertise-url")} if "--p2p-advertise-url" in words else set()
    engine = range(15000, 17001) if "mooncake_te" in words else range(0)
    allowed = {str(host.vars.get("goodput_management_address", host.vars.get("ansible_host"))), "127.0.0.1", "[::1]"}
    foreign = sorted(
        {
            entry
            for entry in set(state["listen"]) - peers
            if entry.rpartition(":")[0] not in allowed and int(entry.rpartition(":")[2]) not in engine
        }
    )
    check(foreign, [], "its interface runs commands for anybody who reaches it: correct --host and --http-host")
    check(len(state["listen"]) >= 2, True, LOG, what="requests and HTTP")
    denied = state["show"].get("IPAddressDeny", "").split()
    check(denied, ["::/0", "0.0.0.0/0"], AGAIN, ok=set(denied) == {"::/0", "0.0.0.0/0"}, what="others are denied")
