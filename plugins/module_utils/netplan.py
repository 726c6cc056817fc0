# Copyright (c) the goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Netplan files: who else configures an interface, and a change that undoes itself unless it is confirmed.

Only the interfaces of the change are activated. `netplan apply` would disconnect every interface that netplan gives to
NetworkManager and restart NetworkManager, management included, so it is kept for a rollback that did not help.

Netplan files are read as block-style YAML, because a node has no YAML library that a module may rely on. What can not
be read that way and names an interface of the change is refused, never rewritten.
"""

from __future__ import annotations

import contextlib
import fnmatch
import json
import re
import shlex
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Runner = Callable[[list[str]], tuple[int, str, str]]

STATE_DIR = "var/lib/goodput/netplan-commit"
LINKS_FILE = "var/lib/goodput/rdma-links.json"
ROLLBACK_UNIT = "goodput-netplan-rollback"
APPLY_UNIT = "goodput-netplan-apply"
NETPLAN_DIRS = ("etc/netplan", "run/netplan", "usr/lib/netplan", "lib/netplan")
KEYFILE_DIR = "etc/NetworkManager/system-connections"

_KEY = re.compile(
    r"""^(?P<indent> *)(?P<id>"[^"]+"|'[^']+'|[^\s'"#:{}\[\],&*!|>-][^:#]*?)\s*:(?:\s+(?P<value>.*?))?\s*$"""
)
_SCALARS = ("version", "renderer")


class Stanza(NamedTuple):
    """One definition in a netplan file: lines[start:end] of section `section`."""

    section: str
    id: str
    start: int
    end: int
    text: str


class Foreign(NamedTuple):
    """Something outside our file that configures an interface of ours."""

    file: str
    section: str
    id: str
    netdev: str
    obstacle: str  # why it can not be migrated, "" where it can


def _content(line: str) -> bool:
    return bool(line.strip()) and not line.lstrip().startswith("#")


def _as_block(value: object, indent: int = 0) -> list[str]:
    """JSON as block-style YAML lines; lists stay in one line."""
    lines: list[str] = []
    for key, inner in value.items() if isinstance(value, dict) else ():
        if isinstance(inner, dict) and inner:
            lines += [f"{' ' * indent}{key}:", *_as_block(inner, indent + 2)]
        else:
            lines.append(f"{' ' * indent}{key}: {json.dumps(inner)}")
    return lines


def block_style(text: str) -> str:
    """The text itself, or, where it is JSON (which YAML allows and installers write), the same in block style."""
    try:
        value = json.loads("\n".join(line for line in text.splitlines() if _content(line)))
    except json.JSONDecodeError:
        return text
    return "\n".join(_as_block(value)) + "\n" if isinstance(value, dict) else text


def stanzas(text: str) -> list[Stanza]:
    """Definitions of a netplan file in block style. ValueError where it can not be read that way."""
    lines = text.splitlines()
    found: list[Stanza] = []
    levels: list[int] = []
    section = ""
    opened: tuple[str, int] | None = None

    def close(end: int) -> None:
        nonlocal opened
        if opened:
            found.append(Stanza(section, opened[0], opened[1], end, "\n".join(lines[opened[1] : end])))
            opened = None

    for number, line in enumerate(lines):
        if not _content(line) or line.strip() == "---":
            continue
        indent = len(line) - len(line.lstrip(" "))
        if line.lstrip(" ").startswith("\t"):
            raise ValueError(f"line {number + 1} is indented by a tab")
        if opened and indent > levels[2]:
            continue
        key = _KEY.match(line)
        if not key:
            raise ValueError(f"line {number + 1} is not a plain 'key: value' line")
        name = key["id"].strip("\"'")
        value = (key["value"] or "").split(" #")[0].strip()
        close(number)
        levels = [level for level in levels if level < indent]
        if len(levels) == 0:
            if name != "network" or value:
                raise ValueError(f"line {number + 1} is not 'network:'")
        elif len(levels) == 1:
            section = name
            if value not in ("", "{}") and name not in _SCALARS:
                raise ValueError(f"line {number + 1} gives {name} in one line")
        else:
            opened = (name, number)
        levels.append(indent)
    close(len(lines))
    return found


def _match(text: str) -> dict[str, str] | None:
    """The `match` of a definition as {name, macaddress, driver}, None where there is none."""
    flow = re.search(r"^\s*match:\s*\{(.*?)\}", text, re.MULTILINE | re.DOTALL)
    block = re.search(r"^( *)match:\s*\n((?:\1 +.*\n?)+)", text, re.MULTILINE)
    inside = flow[1] if flow else block[2] if block else None
    if inside is None:
        return None
    pairs = re.findall(r"""\b(name|macaddress|driver):\s*["']?([^"'\s,}]+)""", inside)
    return {key: value.lower() if key == "macaddress" else value for key, value in pairs}


def _applies(stanza: Stanza, netdev: str, mac: str) -> tuple[bool, str]:
    """(it configures this netdev, obstacle to migrating it)."""
    if stanza.section not in ("ethernets", "nm-devices", "wifis", "modems", "dummy-devices"):
        member = re.search(rf"(?<![\w.-]){re.escape(netdev)}(?![\w.-])", stanza.text)
        return bool(member), f"{netdev} belongs to {stanza.id} ({stanza.section}); dissolve that first"
    match = _match(stanza.text)
    passthrough = re.search(r"""interface-name["']?:\s*["']?([^"'\s]+)""", stanza.text)
    named = match.get("name", "") if match else ""
    wild = bool(re.search(r"[*?\[]", named)) or bool(match and "driver" in match)
    if match is None or not match:
        hit = stanza.id == netdev or bool(passthrough and passthrough[1] == netdev)
    else:
        hit = all(
            (
                fnmatch.fnmatch(netdev, named or "*"),
                match.get("macaddress", mac.lower()) == mac.lower(),
                "driver" not in match or "mlx5" in match["driver"] or "*" in match["driver"],
            )
        )
    if not hit:
        return False, ""
    if re.search(r"^\s*set-name:", stanza.text, re.MULTILINE):
        return True, "it renames the interface (set-name)"
    if wild and "macaddress" not in (match or {}):
        return True, f"it matches by pattern ({named or 'driver'}) and may configure other interfaces too"
    return True, ""


def _netplan_files(root: Path) -> list[Path]:
    """Netplan's files; one folder's file hides that of the same name in the folders after it."""
    seen: dict[str, Path] = {}
    for folder in NETPLAN_DIRS:
        for path in sorted((root / folder).glob("*.yaml")):
            seen.setdefault(path.name, path)
    return sorted(seen.values(), key=lambda path: path.name)


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError):
        return None


def foreign(root: Path, netdevs: Mapping[str, str], own: str) -> list[Foreign]:
    """Everything outside /etc/netplan/`own` that configures one of netdevs (name -> MAC)."""
    found: list[Foreign] = []
    for path in _netplan_files(root):
        text = _read(path)
        if path.name == own or text is None:
            continue
        shown = f"/{path.relative_to(root)}"
        system = "" if shown.startswith("/etc/") else "it is not in /etc, so another package owns it"
        try:
            parsed = stanzas(block_style(text))
        except ValueError as error:
            for netdev, mac in netdevs.items():
                if netdev in text or (mac and mac.lower() in text.lower()):
                    found.append(Foreign(shown, "?", "?", netdev, f"the file can not be taken apart: {error}"))
            continue
        for stanza in parsed:
            for netdev, mac in netdevs.items():
                hit, obstacle = _applies(stanza, netdev, mac)
                if hit:
                    found.append(Foreign(shown, stanza.section, stanza.id, netdev, system or obstacle))
    for path in sorted((root / KEYFILE_DIR).glob("*.nmconnection")):
        text = _read(path) or ""
        for netdev, mac in netdevs.items():
            by_mac = mac and re.search(rf"^mac-address={re.escape(mac)}$", text, re.MULTILINE | re.IGNORECASE)
            if by_mac or re.search(rf"^interface-name={re.escape(netdev)}$", text, re.MULTILINE):
                found.append(Foreign(f"/{path.relative_to(root)}", "keyfile", path.stem, netdev, ""))
    return found


def without(text: str, ids: Sequence[tuple[str, str]]) -> str | None:
    """The file without the definitions (section, id), comments kept; None where no definition is left."""
    text = block_style(text)
    lines = text.splitlines()
    parsed = stanzas(text)
    kept = [stanza for stanza in parsed if (stanza.section, stanza.id) not in ids]
    if not kept:
        return None
    dropped: set[int] = set()
    for stanza in parsed:
        if stanza not in kept:
            dropped.update(range(stanza.start, stanza.end))
    for section in {stanza.section for stanza in parsed} - {stanza.section for stanza in kept}:
        # netplan refuses a section without definitions
        dropped.update(n for n, line in enumerate(lines) if re.match(rf"^ +{re.escape(section)}:\s*(#.*)?$", line))
    return "\n".join(line for number, line in enumerate(lines) if number not in dropped) + "\n"


def migration(root: Path, found: Sequence[Foreign]) -> dict[str, str | None]:
    """What the foreign files become: path -> new text, None = removed. ValueError names the first obstacle."""
    stuck = next((item for item in found if item.obstacle), None)
    if stuck:
        raise ValueError(f"{stuck.file}: {stuck.id} configures {stuck.netdev}, and {stuck.obstacle}")
    files: dict[str, str | None] = {}
    for name in sorted({item.file for item in found}):
        mine = [(item.section, item.id) for item in found if item.file == name]
        text = _read(root / name.lstrip("/"))
        files[name] = None if mine[0][0] == "keyfile" or text is None else without(text, mine)
    return files


# ---------------------------------------------------------------------------------------------------------------------
# Links as they are, and the two scripts that run without a controller.


def links(run: Runner) -> dict[str, dict[str, Any]]:
    """`ip -j addr show` -> netdev -> {mtu_bytes, admin_up, addresses}; addresses are global ones with their prefix."""
    rc, out, _err = run(["ip", "-j", "addr", "show"])
    found: dict[str, dict[str, Any]] = {}
    for entry in json.loads(out or "[]") if rc == 0 else []:
        if "ifname" in entry:
            found[entry["ifname"]] = {
                "mtu_bytes": entry.get("mtu", 0),
                "admin_up": "UP" in entry.get("flags", []),
                "addresses": [
                    f"{address['local']}/{address['prefixlen']}"
                    for address in entry.get("addr_info", [])
                    if address.get("scope") == "global"
                ],
            }
    return found


def drift(live: Mapping[str, Mapping[str, Any]], wanted: Sequence[Mapping[str, Any]]) -> list[str]:
    """How live links differ from [{netdev, cidr, mtu_bytes}], one sentence per difference."""
    found: list[str] = []
    for item in wanted:
        link = live.get(item["netdev"])
        if link is None:
            found.append(f"{item['netdev']} does not exist")
            continue
        if not link["admin_up"]:
            found.append(f"{item['netdev']} is administratively down")
        if item.get("cidr") and [entry for entry in link["addresses"] if ":" not in entry] != [item["cidr"]]:
            found.append(f"{item['netdev']} has {', '.join(link['addresses']) or 'no address'}, wanted {item['cidr']}")
        if item.get("mtu_bytes") and link["mtu_bytes"] != item["mtu_bytes"]:
            found.append(f"{item['netdev']} has MTU {link['mtu_bytes']}, wanted {item['mtu_bytes']}")
    return found


def nm_devices(run: Runner, netdevs: Sequence[str]) -> dict[str, dict[str, str]]:
    """netdev -> {state, connection}: NetworkManager's state number and active profile (UUID); "" without NM."""
    found: dict[str, dict[str, str]] = {}
    for netdev in netdevs:
        rc, out, _err = run(["nmcli", "-g", "GENERAL.STATE,GENERAL.CON-UUID", "device", "show", netdev])
        lines = out.splitlines() if rc == 0 else []
        state = lines[0].split()[0] if lines and lines[0].split() else ""
        found[netdev] = {"state": state, "connection": lines[1].strip() if len(lines) > 1 else ""}
    return found


_PRELUDE = """\
#!/bin/sh
# Written by goodput.spark.netplan_commit. Runs as a unit of its own, so it outlives the connection to the controller.
set -u
ROOT={root}
STATE="$ROOT/{state}"
running() {{ systemctl -q is-active "$1"; }}
reload() {{
    netplan generate || return 1
    if running NetworkManager; then
        nmcli general reload conf
        nmcli connection reload
    fi
    if running systemd-networkd; then networkctl reload; fi
}}
# Without the folder the change was confirmed a moment ago, and nothing may be undone.
put_back() {{
    [ -d "$STATE/backup" ] || exit 0
    if [ -e "$STATE/backup/$1" ]; then cp -a "$STATE/backup/$1" "$ROOT/$1"; else rm -f "$ROOT/$1"; fi
}}
# Who renders an interface is read from what netplan generated for it.
activate() {{
    if [ -e "$ROOT/run/NetworkManager/system-connections/netplan-$1.nmconnection" ]; then
        case $(nmcli -g GENERAL.STATE device show "$1") in 10*) nmcli device set "$1" managed yes ;; esac
        nmcli -w 60 connection up "netplan-$1" ifname "$1"
    elif [ -e "$ROOT/run/systemd/network/10-netplan-$1.network" ]; then
        ip link set dev "$1" up
        networkctl reconfigure "$1"
    else
        return 1
    fi
}}
# NETDEV STATE-OF-NM FORMER-CONNECTION ADMIN-UP MTU: as it was before the change
restore() {{
    if [ -n "$3" ] && nmcli -w 60 connection up uuid "$3" ifname "$1"; then return; fi
    if activate "$1"; then return; fi
    if [ -n "$2" ] && running NetworkManager; then nmcli device disconnect "$1"; fi
    if [ "$2" = 10 ]; then nmcli device set "$1" managed no; fi
    ip address flush dev "$1" scope global
    ip link set dev "$1" mtu "$5"
    if running systemd-networkd; then networkctl reconfigure "$1"; fi
    if [ "$4" = no ]; then ip link set dev "$1" down; fi
}}
"""


def _prelude(root: Path) -> str:
    return _PRELUDE.format(root=shlex.quote("" if str(root) == "/" else str(root)), state=STATE_DIR)


def _restore_lines(before: Mapping[str, Mapping[str, Any]]) -> list[str]:
    return [
        shlex.join(
            [
                "restore",
                netdev,
                was["state"],
                was["connection"],
                "yes" if was["admin_up"] else "no",
                str(was["mtu_bytes"]),
            ]
        )
        for netdev, was in before.items()
    ]


def apply_script(root: Path, netdevs: Sequence[str]) -> str:
    """Activate netdevs, and nothing else, from the netplan tree as it is now."""
    return _prelude(root) + "\n".join(
        [
            "sleep 2  # lets the answer of the module reach the controller first",
            "reload",
            *(f"activate {shlex.quote(netdev)}" for netdev in netdevs),
            'echo applied >"$STATE/applied"',
            "",
        ]
    )


def rollback_script(
    root: Path, files: Sequence[str], before: Mapping[str, Mapping[str, Any]], addresses: Sequence[str]
) -> str:
    """Put the saved files back, bring the interfaces of the change to their former state.

    `files`: those that the change wrote or removed. `before`: netdev -> {state, connection, admin_up, mtu_bytes}.
    `addresses`: every address the node had; if one of them stays away, `netplan apply` brings up everything.
    """
    # The word comes first: from here on nobody may confirm.
    lines = ['echo "rolling back" >"$STATE/state"', f'systemctl stop "{APPLY_UNIT}.service"']
    for name in files:
        path = shlex.quote(name.lstrip("/"))
        lines.append(f"put_back {path}")
    lines += ["reload", *_restore_lines(before)]
    if addresses:
        lines += [
            "missing() {",
            "    have=$(ip -o address show)",
            "    for want in " + shlex.join(addresses) + "; do",
            '        case $have in *" $want "*) ;; *) return 0 ;; esac',
            "    done",
            "    return 1",
            "}",
            "tries=0",
            'while missing && [ "$tries" -lt 20 ]; do tries=$((tries + 1)); sleep 1; done',
            'if missing; then echo "an address is still missing: netplan apply"; netplan apply; fi',
        ]
    lines += ['echo rolled_back >"$STATE/state"', ""]
    return _prelude(root) + "\n".join(lines)


def release_script(root: Path, before: Mapping[str, Mapping[str, Any]]) -> str:
    """Bring interfaces back to the state they had before the first change, from the netplan tree as it is now."""
    return _prelude(root) + "\n".join(["reload", *_restore_lines(before), ""])


class Commit:
    """A network change with an armed way back, all of its state below var/lib/goodput/netplan-commit."""

    def __init__(self, run: Runner, root: Path = Path("/")) -> None:
        self.run = run
        self.root = root
        self.dir = root / STATE_DIR

    def state(self) -> str:
        """armed, rolling back, rolled_back, or "" where no change is open."""
        return (_read(self.dir / "state") or "").strip()

    def _write(self, path: Path, text: str, mode: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_name(f".{path.name}.goodput-new")
        new.write_text(text)
        new.chmod(mode)
        new.replace(path)

    def differing(self, files: Mapping[str, str | None]) -> list[str]:
        """The paths whose text (None = absent) or mode (0600) is not as wanted."""
        found = []
        for name, text in files.items():
            path = self.root / name.lstrip("/")
            if _read(path) != text or (text is not None and path.stat().st_mode & 0o777 != 0o600):
                found.append(name)
        return found

    def arm(self, files: Sequence[str], netdevs: Sequence[str], seconds: int) -> None:
        """Save what the change will touch and start the timer of the way back. RuntimeError where systemd refuses.

        A change that is still open is undone first, so the backup is always the last state that somebody confirmed.
        """
        if self.state() == "armed":
            self.rollback()
        shutil.rmtree(self.dir, ignore_errors=True)
        self.dir.mkdir(parents=True, mode=0o700)
        live, devices = links(self.run), nm_devices(self.run, netdevs)
        before = {name: {**devices[name], **live[name]} for name in netdevs if name in live}
        for name in files:
            source, copy = self.root / name.lstrip("/"), self.dir / "backup" / name.lstrip("/")
            copy.parent.mkdir(parents=True, exist_ok=True)
            if source.exists():
                shutil.copy2(source, copy)
        addresses = sorted({entry for name, link in live.items() if name != "lo" for entry in link["addresses"]})
        self._write(self.dir / "rollback.sh", rollback_script(self.root, files, before, addresses), 0o700)
        first = self.root / LINKS_FILE
        if not first.exists():
            self._write(first, json.dumps(before, indent=1) + "\n", 0o600)
        self._write(self.dir / "state", "armed\n", 0o600)
        self.run(["systemctl", "stop", f"{ROLLBACK_UNIT}.timer"])
        self.run(["systemctl", "reset-failed", f"{ROLLBACK_UNIT}.service"])
        rc, _out, err = self.run(
            [
                "systemd-run",
                "--quiet",
                f"--unit={ROLLBACK_UNIT}",
                f"--on-active={seconds}s",
                "--timer-property=AccuracySec=1s",
                "/bin/sh",
                str(self.dir / "rollback.sh"),
            ]
        )
        if rc != 0:
            raise RuntimeError(
                f"systemd-run could not start {ROLLBACK_UNIT}.timer, so nothing was changed: {err.strip()}"
            )

    def write(self, files: Mapping[str, str | None]) -> None:
        """Write the files and let netplan read them; where it refuses, put all back and raise RuntimeError."""
        for name, text in files.items():
            path = self.root / name.lstrip("/")
            if text is None:
                path.unlink(missing_ok=True)
            else:
                self._write(path, text, 0o600)
        rc, out, err = self.run(["netplan", "generate"])
        if rc != 0:
            for name in files:
                path, copy = self.root / name.lstrip("/"), self.dir / "backup" / name.lstrip("/")
                if copy.exists():
                    shutil.copy2(copy, path)
                else:
                    path.unlink(missing_ok=True)
            self.run(["netplan", "generate"])
            self.disarm()
            raise RuntimeError(f"netplan generate refused the files, so they were put back: {(err or out).strip()}")

    def launch(self, netdevs: Sequence[str]) -> None:
        """Activate netdevs in a unit of its own and return at once."""
        (self.dir / "applied").unlink(missing_ok=True)
        self._write(self.dir / "apply.sh", apply_script(self.root, netdevs), 0o700)
        self.run(["systemctl", "reset-failed", f"{APPLY_UNIT}.service"])
        rc, _out, err = self.run(
            ["systemd-run", "--quiet", "--collect", f"--unit={APPLY_UNIT}", "/bin/sh", str(self.dir / "apply.sh")]
        )
        if rc != 0:
            self.rollback()
            raise RuntimeError(f"systemd-run could not start {APPLY_UNIT}.service, so all was put back: {err.strip()}")

    def applied(self) -> bool:
        """True once the activation has run to its end."""
        return (self.dir / "applied").exists()

    def disarm(self) -> bool:
        """Confirm the change: stop the timer and drop the backup; False where the timer was faster."""
        self.run(["systemctl", "stop", f"{ROLLBACK_UNIT}.timer"])
        # It may have gone off a moment ago, before its script could say so.
        going = self.run(["systemctl", "-q", "is-active", f"{ROLLBACK_UNIT}.service"])[0] == 0
        if going or self.state() != "armed":
            return False
        # All backups at once: a script that starts now must not take a half-removed folder for a node without files.
        confirmed = self.dir.with_name(f"{self.dir.name}.confirmed")
        shutil.rmtree(confirmed, ignore_errors=True)
        self.dir.rename(confirmed)
        shutil.rmtree(confirmed, ignore_errors=True)
        return True

    def rollback(self) -> None:
        """Go back now and wait for it. Runs in a unit of its own, since the connection may break on the way."""
        self.run(["systemctl", "stop", f"{ROLLBACK_UNIT}.timer"])
        self.run(
            [
                "systemd-run",
                "--quiet",
                "--collect",
                "--wait",
                f"--unit={ROLLBACK_UNIT}-now",
                "/bin/sh",
                str(self.dir / "rollback.sh"),
            ]
        )

    def release(self) -> bool:
        """Former state of the links, recorded before the first change; False where nothing was recorded."""
        recorded = self.root / LINKS_FILE
        text = _read(recorded)
        if text is None:
            return False
        self.dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._write(self.dir / "release.sh", release_script(self.root, json.loads(text)), 0o700)
        self.run(
            [
                "systemd-run",
                "--quiet",
                "--collect",
                "--wait",
                f"--unit={APPLY_UNIT}",
                "/bin/sh",
                str(self.dir / "release.sh"),
            ]
        )
        shutil.rmtree(self.dir, ignore_errors=True)
        recorded.unlink()
        with contextlib.suppress(OSError):  # other roles may still keep something there
            recorded.parent.rmdir()
        return True
