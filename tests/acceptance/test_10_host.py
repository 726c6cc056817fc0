"""The operating system of a node: time, names, memory, no sleeping, and the account that serves."""

from __future__ import annotations

import fnmatch
import re
from typing import Any

AGAIN = "run `ansible-playbook site.yml --tags host`"
SLEEP = ("sleep.target", "suspend.target", "hibernate.target", "hybrid-sleep.target", "suspend-then-hibernate.target")
# What the nodes may differ by once they keep each other's time.
OFFSET_LIMIT_SECONDS = 0.5
# Ours, and what we build on. A desktop's other units may fail for reasons that are nobody's business here.
OURS = ("goodput-*", "srv-goodput*", "opt-goodput*", "k3s*", "chrony*", "nvidia-*", "containerd*", "docker*")
SYSTEM = ("NetworkManager*", "systemd-networkd*", "netplan*", "systemd-sysctl*", "systemd-modules-load*", "ssh*")


def look(sh: Any, host: Any) -> Any:
    return sh(
        {
            "chrony": "systemctl is-active chrony.service; systemctl is-enabled chrony.service",
            "daemons": "ps -e -o comm= | grep -E '^(chronyd|ntpd|systemd-timesyn)$' | sort -u",
            "sources": "chronyc -n -c sources",
            "tracking": "chronyc -n -c tracking",
            "targets": f"systemctl show --property LoadState --value {' '.join(SLEEP)}",
            "swappiness": "cat /proc/sys/vm/swappiness",
            "persisted": "cat /etc/sysctl.d/90-goodput-host.conf",
            "memlock": "sudo -u goodput sh -c 'ulimit -l'",
            "account": "getent passwd goodput",
            "home": "stat --format '%U %a' /var/lib/goodput /etc/goodput",
            "localhost": "getent ahostsv4 localhost | head -1",
            "swap": "cat /proc/swaps /etc/fstab | grep -w swap",
            "failed": "systemctl list-units --failed --plain --no-legend | cut -d' ' -f1",
        },
        node=host,
    )


def peers(host: Any, nodes: Any) -> dict[str, str]:
    """Name to management address of the other nodes, from the inventory."""
    return {
        node.name: str(node.vars.get("goodput_management_address", node.vars.get("ansible_host")))
        for node in nodes
        if node.name != host.name
    }


def test_time_daemon(host: Any, sh: Any, check: Any) -> None:
    "chrony runs now and at boot, and no second daemon sets the clock"
    seen = look(sh, host)
    check(seen["chrony"].stdout.split(), ["active", "enabled"], "journalctl -u chrony", unit="chrony")
    check(seen["daemons"].stdout.split(), ["chronyd"], "stop and disable the other one", what="time daemons")


def test_time_sources(host: Any, nodes: Any, sh: Any, check: Any) -> None:
    "Every other node is a time source that answers"
    seen = look(sh, host)
    # mode, state, address, stratum, poll, reach (octal register of the last eight polls), ...
    rows = {line.split(",")[2]: line.split(",") for line in seen["sources"].stdout.split()}
    for name, address in peers(host, nodes).items():
        reach = rows.get(address, [""] * 6)[5]
        check(
            reach or "no source",
            "a reach other than 0",
            f"is UDP 123 open on {name}? chronyc -n sources",
            ok=reach not in ("", "0"),
            what=name,
            unit="chrony",
        )


def test_clocks_agree(host: Any, nodes: Any, sh: Any, check: Any) -> None:
    "The node's clock is close to what it follows"
    seen = look(sh, host)
    fields = seen["tracking"].stdout.strip().split(",")
    offset = abs(float(fields[4])) if len(fields) > 13 else float("inf")
    followed = not peers(host, nodes) or (len(fields) > 13 and fields[13] == "Normal")
    check(
        f"{offset:.6f} s from {fields[1] if len(fields) > 1 else 'nothing'}, {fields[-1]}",
        f"less than {OFFSET_LIMIT_SECONDS} s, Normal",
        "chronyc makestep; chronyc -n sources",
        ok=followed and offset < OFFSET_LIMIT_SECONDS,
        unit="chrony",
    )


def test_names(host: Any, nodes: Any, sh: Any, check: Any) -> None:
    "The node finds localhost and every other node by name"
    seen = look(sh, host)
    check(seen["localhost"].stdout.split()[:1], ["127.0.0.1"], AGAIN, what="localhost")
    wanted = peers(host, nodes)
    answers = sh({name: f"getent ahostsv4 {name}" for name in wanted}, node=host)
    for name, address in wanted.items():
        found = sorted({line.split()[0] for line in answers[name].stdout.splitlines() if line})
        check(found, [address], AGAIN, what=name)


def test_sleep_is_masked(host: Any, sh: Any, check: Any) -> None:
    "No target can put the node to sleep"
    check(look(sh, host)["targets"].stdout.split(), ["masked"] * len(SLEEP), AGAIN)


def test_memory(host: Any, sh: Any, check: Any) -> None:
    "Swappiness is as the site chose it, now and after a reboot, and the serving account may pin memory"
    seen = look(sh, host)
    kept = re.search(r"^vm\.swappiness *= *(\d+)", seen["persisted"].stdout, re.M)
    check(seen["swappiness"].stdout.strip(), kept[1] if kept else "a value in sysctl.d", AGAIN, what="vm.swappiness")
    check(seen["memlock"].stdout.strip(), "unlimited", AGAIN, what="ulimit -l of goodput")


def test_account(host: Any, sh: Any, check: Any) -> None:
    "goodput is a system account without a login, and root owns what it must not change"
    seen = look(sh, host)
    fields = seen["account"].stdout.strip().split(":")
    check(fields[5:], ["/var/lib/goodput", "/usr/sbin/nologin"], AGAIN, what="home and shell")
    check(
        int(fields[2]) < 1000 if len(fields) > 2 else False, True, "userdel goodput, then " + AGAIN, what="system uid"
    )
    check(seen["home"].stdout.splitlines(), ["root 755", "root 755"], AGAIN, what="owner of its directories")


def test_swap_is_as_the_system_had_it(host: Any, sh: Any, check: Any) -> None:
    "Swap that fstab names is in use: nothing switched it off"
    lines = look(sh, host)["swap"].stdout.splitlines()
    named = [line for line in lines if len(line.split()) >= 4 and line.split()[2] == "swap"]
    used = [line for line in lines if line.startswith("/") and line not in named]
    check(len(used) >= len(named), True, "sudo swapon -a", what=f"{len(named)} in fstab, {len(used)} in use")


def test_no_failed_unit(host: Any, sh: Any, check: Any) -> None:
    "No unit of ours has failed, and none that we build on"
    failed = look(sh, host)["failed"].stdout.split()
    matter = [unit for unit in failed if any(fnmatch.fnmatch(unit, pattern) for pattern in (*OURS, *SYSTEM))]
    check(matter, [], "systemctl status UNIT; journalctl -u UNIT", what="failed units")
