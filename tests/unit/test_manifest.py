"""The manifest on a real temporary tree; systemd, mount and the user database are small models of the real ones."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import manifest as m


class FakeNode:
    """Answers the commands that `Host` runs and keeps their effect; ``commands`` is the order in which they came."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.units: dict[str, dict[str, str]] = {}
        self.users: set[str] = set()
        self.packages: set[str] = set()
        self.mounted: list[tuple[str, str, str]] = []
        self.busy: set[str] = set()
        self.commands: list[str] = []

    def unit(self, name: str, enabled: str = "disabled", active: str = "inactive") -> None:
        self.units[name] = {"enabled": enabled, "active": active}

    def mount(self, point: str, source: str, fstype: str = "xfs") -> None:
        self.mounted.append((point, source, fstype))
        self.write_mountinfo()

    def write_mountinfo(self) -> None:
        lines = [f"30 1 0:1 / {p.replace(' ', chr(92) + '040')} rw - {t} {s} rw\n" for p, s, t in self.mounted]
        path = self.root / "proc/self/mountinfo"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(lines))

    def __call__(self, argv: Sequence[str]) -> tuple[int, str, str]:
        self.commands.append(" ".join(argv))
        names = list(argv[argv.index("--") + 1 :]) if "--" in argv else list(argv[2:])
        if argv[0] == "systemctl":
            return self.systemctl(argv[1], names)
        if argv[0] == "getent":
            return (0, "", "") if argv[2] in self.users else (2, "", "")
        if argv[0] == "userdel":
            self.users.remove(argv[1])
            return 0, "", ""
        if argv[0] == "dpkg-query":
            return 1, "".join(f"{name} installed\n" for name in names if name in self.packages), "no package found"
        if argv[0] == "umount":
            if names[0] in self.busy:
                return 32, "", f"umount: {names[0]}: target is busy."
            del self.mounted[max(i for i, entry in enumerate(self.mounted) if entry[0] == names[0])]
            self.write_mountinfo()
            return 0, "", ""
        raise AssertionError(f"unexpected command {argv}")

    def systemctl(self, verb: str, names: Sequence[str]) -> tuple[int, str, str]:
        if verb == "show":
            blocks = []
            for name in names:
                unit = self.units.get(name)
                load = "not-found" if unit is None else "masked" if unit["enabled"] == "masked" else "loaded"
                enabled, active = (unit["enabled"], unit["active"]) if unit else ("", "inactive")
                blocks.append(f"LoadState={load}\nActiveState={active}\nUnitFileState={enabled}\n")
            return 0, "\n".join(blocks), ""
        if verb == "daemon-reload":
            gone = [
                n for n in self.units if self.units[n].get("file") and not (self.root / self.units[n]["file"]).exists()
            ]
            for name in gone:
                del self.units[name]
            return 0, "", ""
        for name in names:
            if name not in self.units:
                return 5, "", f"Unit {name} not loaded."
            unit = self.units[name]
            if verb in ("start", "reload-or-restart"):
                unit["active"] = "active"
            elif verb == "stop" or verb == "reset-failed":
                unit["active"] = "inactive"
            elif verb == "mask":
                unit["hidden"], unit["enabled"] = unit["enabled"], "masked"
            elif verb == "unmask":
                unit["enabled"] = unit.pop("hidden", "disabled")
            elif verb in ("enable", "disable"):
                unit["enabled"] = f"{verb}d"
        return 0, "", ""


class Tree:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.node = FakeNode(root)
        self.host = m.Host(root=str(root), run=self.node)
        for directory in ("etc", "var/lib", "srv", "opt", "proc/sys/net/core"):
            (root / directory).mkdir(parents=True)
        self.write("/etc/fstab", "UUID=1 / ext4 defaults 0 1\n")
        self.node.write_mountinfo()

    def at(self, path: str) -> Path:
        return self.root / path.lstrip("/")

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        self.at(path).parent.mkdir(parents=True, exist_ok=True)
        self.at(path).write_text(text)
        self.at(path).chmod(mode)

    def claim(self, role: str = "demo", check: bool = False, **items: Any) -> m.Result:
        return m.claim(self.host, role, items, check)

    def stored(self, role: str = "demo") -> Any:
        return json.loads(self.at(m.manifest_path(role)).read_text())

    def picture(self) -> dict[str, tuple[str, int]]:
        """Every path outside /proc with its text or link target and its mode: what a person could see differ."""
        seen = {}
        for path in sorted(self.root.rglob("*")):
            name = str(path.relative_to(self.root))
            if name.startswith("proc"):
                continue
            content = f"-> {os.readlink(path)}" if path.is_symlink() else path.read_text() if path.is_file() else "/"
            seen[name] = (content, stat.S_IMODE(path.lstat().st_mode))
        return seen


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def reasons(result: m.Result) -> dict[str, str]:
    return {entry["item"]: entry["reason"] for entry in result.kept}


# claimed ------------------------------------------------------------------------------------------------------------


def test_claim_saves_the_former_file_before_the_role_writes(tree: Tree) -> None:
    tree.write("/etc/chrony.conf", "pool stock\n", 0o640)
    result = tree.claim(files=["/etc/chrony.conf", "/etc/new.conf"])
    assert result.changed
    assert result.claimed == ["file /etc/chrony.conf", "file /etc/new.conf"]
    files = tree.stored()["files"]
    assert files["/etc/chrony.conf"]["former"]["mode"] == "0640"
    assert tree.at(files["/etc/chrony.conf"]["former"]["backup"]).read_text() == "pool stock\n"
    assert files["/etc/new.conf"]["former"] == {"kind": "absent"}


def test_manifest_and_backup_are_private(tree: Tree) -> None:
    tree.write("/etc/secret", "x", 0o644)
    tree.claim(files=["/etc/secret"])
    backup = tree.at(f"{m.BACKUP_DIR}/demo/etc/secret")
    assert stat.S_IMODE(backup.stat().st_mode) == 0o600
    assert stat.S_IMODE(backup.parent.stat().st_mode) == 0o700
    assert stat.S_IMODE(tree.at(m.manifest_path("demo")).stat().st_mode) == 0o600
    assert stat.S_IMODE(tree.at(m.MANIFEST_DIR).stat().st_mode) == 0o700
    assert stat.S_IMODE(tree.at(m.STATE_DIR).stat().st_mode) == 0o755


def test_claim_again_changes_nothing_and_asks_nothing(tree: Tree) -> None:
    tree.node.unit("a.service", "enabled", "active")
    items: dict[str, Any] = {
        "files": ["/etc/x"],
        "units": ["a"],
        "packages": ["fio"],
        "users": ["u"],
        "sysctls": ["net.core.rmem_max"],
    }
    tree.claim(**items)
    tree.write("/etc/x", "ours")
    before = tree.at(m.manifest_path("demo")).read_bytes()
    tree.node.commands.clear()
    result = tree.claim(**items)
    assert not result.changed
    assert result.claimed == []
    assert tree.node.commands == []
    assert tree.at(m.manifest_path("demo")).read_bytes() == before


def test_first_former_value_is_kept_and_unclaimed_items_stay(tree: Tree) -> None:
    tree.write("/proc/sys/net/core/rmem_max", "212992\n")
    tree.claim(sysctls=["net.core.rmem_max"], files=["/etc/old"])
    tree.write("/proc/sys/net/core/rmem_max", "999\n")
    tree.claim(sysctls=["net.core.rmem_max"], files=["/etc/next"])
    stored = tree.stored()
    assert stored["sysctls"]["net.core.rmem_max"]["former"] == "212992"
    assert list(stored["files"]) == ["/etc/old", "/etc/next"]


def test_check_mode_claims_nothing(tree: Tree) -> None:
    before = tree.picture()
    result = tree.claim(check=True, files=["/etc/x/y"], directories=["/srv/d"])
    assert result.changed
    assert "directory /etc/x" in result.claimed
    assert tree.picture() == before


@pytest.mark.parametrize(
    ("section", "name", "rule"),
    [
        ("files", "etc/x", "an absolute path"),
        ("files", "/etc/../root/x", "without '..'"),
        ("files", "/etc/fstab", "list the mount point in `mounts`"),
        ("directories", "/", "a path below /"),
        ("data_paths", "/srv", "at least two levels deep"),
        ("data_paths", "/etc/goodput", "outside the system's"),
        ("data_paths", "/var/lib", "outside the system's"),
        ("units", "goodput@.service", "not a template"),
        ("units", "a b", "a unit name"),
        ("sysctls", "net..core", "a sysctl name"),
        ("users", "-r", "letters"),
        ("packages", "", "a non-empty name"),
    ],
)
def test_bad_items_are_refused_before_anything_is_written(tree: Tree, section: str, name: str, rule: str) -> None:
    before = tree.picture()
    with pytest.raises(m.ManifestError, match="found .* required: .* fix: ") as error:
        m.claim(tree.host, "demo", {"files": ["/etc/fine"], section: [name]})
    assert rule in str(error.value)
    assert repr(name) in str(error.value)
    assert tree.picture() == before


def test_a_directory_where_a_file_belongs_is_refused(tree: Tree) -> None:
    tree.at("/etc/x").mkdir()
    with pytest.raises(m.ManifestError, match="found /etc/x to be a directory"):
        tree.claim(files=["/etc/x"])


def test_role_name_must_not_leave_the_manifest_directory(tree: Tree) -> None:
    with pytest.raises(m.ManifestError, match="found role '../x'"):
        tree.claim("../x")


def test_damaged_and_foreign_manifests_are_refused(tree: Tree) -> None:
    tree.claim(files=["/etc/x"])
    path = tree.at(m.manifest_path("demo"))
    text = path.read_text()
    path.write_text(text[:40])
    with pytest.raises(m.ManifestError, match="damaged"):
        tree.claim(files=["/etc/x"])
    path.write_text(text.replace('"format": 1', '"format": 2'))
    with pytest.raises(m.ManifestError, match="format 2"):
        m.undo(tree.host, "demo")


def test_an_interrupted_write_leaves_the_former_manifest(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    tree.claim(files=["/etc/x"])
    before = tree.at(m.manifest_path("demo")).read_text()

    def no_space(*_arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", no_space)
    with pytest.raises(OSError, match="No space"):
        tree.claim(files=["/etc/y"])
    monkeypatch.undo()
    assert tree.at(m.manifest_path("demo")).read_text() == before
    assert [p.name for p in tree.at(m.MANIFEST_DIR).iterdir()] == ["demo.json"]


# recorded and read --------------------------------------------------------------------------------------------------


def test_record_then_read_reports_only_real_drift(tree: Tree) -> None:
    tree.claim(files=["/etc/a", "/etc/b", "/etc/c", "/etc/link", "/etc/optional"])
    for name in "abc":
        tree.write(f"/etc/{name}", name)
    tree.at("/etc/link").symlink_to("a")
    first = m.record(tree.host, "demo")
    assert first.recorded == ["/etc/a", "/etc/b", "/etc/c", "/etc/link"]
    again = m.record(tree.host, "demo")
    assert not again.changed
    os.utime(tree.at("/etc/a"), ns=(1, 1))
    assert m.read(tree.host, "demo").drift == []
    tree.write("/etc/a", "edited")
    tree.at("/etc/b").unlink()
    tree.at("/etc/c").chmod(0o600)
    tree.at("/etc/link").unlink()
    tree.at("/etc/link").symlink_to("b")
    before = tree.picture()
    drift = {entry["path"]: entry for entry in m.read(tree.host, "demo").drift}
    assert set(drift) == {"/etc/a", "/etc/b", "/etc/c", "/etc/link"}
    assert drift["/etc/b"]["found"] == "absent"
    assert "mode 0600" in drift["/etc/c"]["found"] and "mode 0644" in drift["/etc/c"]["required"]
    assert drift["/etc/link"]["found"] == "symlink to b"
    assert drift["/etc/a"]["found"] != drift["/etc/a"]["required"]
    assert tree.picture() == before


def test_large_files_are_hashed_again_only_when_they_changed(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(m, "LARGE_FILE_BYTES", 3)
    tree.claim(files=["/opt/archive"])
    tree.write("/opt/archive", "12345")
    m.record(tree.host, "demo")
    hashed: list[str] = []
    real = m.sha256_of
    monkeypatch.setattr(m, "sha256_of", lambda path: hashed.append(path) or real(path))  # type: ignore[func-returns-value]
    assert not m.record(tree.host, "demo").changed
    assert m.read(tree.host, "demo").drift == []
    assert hashed == []
    tree.write("/opt/archive", "123456")
    assert len(m.read(tree.host, "demo").drift) == 1
    assert m.record(tree.host, "demo").recorded == ["/opt/archive"]


def test_a_volatile_file_is_neither_recorded_nor_drift_and_goes_with_the_role(tree: Tree) -> None:
    m.claim(tree.host, "host", {"files": ["/var/lib/x/state.json"]})
    for content in ("one", "two"):
        tree.write("/var/lib/x/state.json", content)
        assert not m.record(tree.host, "host", volatile=["/var/lib/x/state.json"]).changed
    assert m.read(tree.host, "host").drift == []
    assert m.undo(tree.host, "host").saved == []
    assert not tree.at("/var/lib/x/state.json").exists()


def test_record_without_a_claim_says_what_to_do(tree: Tree) -> None:
    with pytest.raises(m.ManifestError, match="claims before it records"):
        m.record(tree.host, "demo")
    assert m.record(tree.host, "demo", check=True).changed


def test_read_without_a_manifest_is_empty(tree: Tree) -> None:
    result = m.read(tree.host, "demo")
    assert result.after is None and result.drift == [] and not result.changed


# absent -------------------------------------------------------------------------------------------------------------


def test_undo_returns_the_tree_to_what_it_was(tree: Tree) -> None:
    tree.write("/etc/chrony.conf", "pool stock\n", 0o640)
    tree.at("/etc/resolv").symlink_to("/run/stub")
    tree.at("/srv/kept").mkdir(mode=0o700)
    before = tree.picture()
    tree.claim(
        files=["/etc/chrony.conf", "/etc/resolv", "/etc/goodput/env", "/etc/systemd/system/g.service.d/x.conf"],
        directories=["/srv/kept", "/srv/goodput"],
    )
    for path in ("/etc/chrony.conf", "/etc/goodput/env", "/etc/systemd/system/g.service.d/x.conf"):
        tree.write(path, "ours", 0o600)
    tree.at("/etc/resolv").unlink()
    tree.write("/etc/resolv", "plain")
    tree.at("/srv/goodput").mkdir()
    tree.at("/srv/kept").chmod(0o755)
    m.record(tree.host, "demo")
    result = m.undo(tree.host, "demo")
    assert result.changed and result.kept == [] and result.saved == []
    assert tree.picture() == before
    assert not m.undo(tree.host, "demo").changed


def test_check_mode_says_the_same_and_does_nothing(tree: Tree) -> None:
    tree.write("/etc/a", "stock")
    tree.node.unit("ours.service", "enabled", "active")
    tree.node.units.clear()
    tree.claim(
        files=["/etc/a", "/etc/new/b"], units=["ours"], mounts=["/srv/l2"], users=["u"], data_paths=["/srv/m/data"]
    )
    tree.write("/etc/a", "ours")
    tree.write("/etc/new/b", "ours")
    tree.write("/srv/m/data/f", "ours")
    tree.node.unit("ours.service", "enabled", "active")
    tree.node.users.add("u")
    tree.at("/srv/l2").mkdir()
    tree.node.mount("/srv/l2", "/dev/nvme1n1")
    before = tree.picture()
    tree.node.commands.clear()
    said = m.undo(tree.host, "demo", remove_data=True, check=True)
    assert tree.picture() == before
    assert all(c.startswith(("systemctl show", "getent", "dpkg-query")) for c in tree.node.commands)
    done = m.undo(tree.host, "demo", remove_data=True)
    assert said.changed and done.changed
    assert (said.removed, said.restored, said.kept) == (done.removed, done.restored, done.kept)


def test_unlisted_things_are_never_touched(tree: Tree) -> None:
    tree.claim(files=["/srv/goodput/ours"])
    tree.write("/srv/goodput/ours", "ours")
    tree.write("/srv/goodput/theirs", "theirs")
    result = m.undo(tree.host, "demo")
    assert tree.at("/srv/goodput/theirs").read_text() == "theirs"
    assert not tree.at("/srv/goodput/ours").exists()
    assert reasons(result) == {"directory /srv/goodput": "not empty: theirs"}


def test_an_edited_file_is_set_aside_and_reported(tree: Tree) -> None:
    tree.write("/etc/a", "stock")
    tree.claim(files=["/etc/a", "/etc/new"])
    tree.write("/etc/a", "ours")
    tree.write("/etc/new", "ours")
    m.record(tree.host, "demo")
    tree.write("/etc/a", "edited a")
    tree.write("/etc/new", "edited new")
    tree.write("/etc/new.goodput-saved", "an older one")
    result = m.undo(tree.host, "demo")
    assert tree.at("/etc/a").read_text() == "stock"
    assert tree.at("/etc/a.goodput-saved").read_text() == "edited a"
    assert not tree.at("/etc/new").exists()
    assert tree.at("/etc/new.goodput-saved").read_text() == "an older one"
    assert tree.at("/etc/new.goodput-saved.1").read_text() == "edited new"
    assert result.saved == ["/etc/new.goodput-saved.1", "/etc/a.goodput-saved"]
    assert "/etc/a.goodput-saved" in reasons(result)["file /etc/a"]


def test_a_half_done_run_is_undone_without_setting_aside(tree: Tree) -> None:
    before = tree.picture()
    tree.claim(files=["/etc/new"])
    tree.write("/etc/new", "ours, never recorded")
    result = m.undo(tree.host, "demo")
    assert result.saved == []
    assert tree.picture() == before


def test_an_interrupted_undo_can_be_run_again(tree: Tree) -> None:
    tree.write("/etc/a", "stock")
    before = tree.picture()
    tree.claim(files=["/etc/a"], mounts=["/srv/l2"])
    tree.write("/etc/a", "ours")
    tree.at("/srv/l2").mkdir()
    tree.node.mount("/srv/l2", "/dev/nvme1n1")
    m.record(tree.host, "demo")
    tree.node.busy.add("/srv/l2")
    with pytest.raises(m.ManifestError, match=r"found /srv/l2 in use: .*target is busy.*fuser -vm /srv/l2"):
        m.undo(tree.host, "demo")
    tree.write("/etc/a", "stock")
    tree.node.busy.clear()
    result = m.undo(tree.host, "demo")
    assert result.saved == []
    assert tree.picture() == before


def test_former_content_that_somebody_put_back_is_not_set_aside(tree: Tree) -> None:
    tree.write("/etc/a", "stock", 0o640)
    before = tree.picture()
    tree.claim(files=["/etc/a"])
    tree.write("/etc/a", "ours")
    m.record(tree.host, "demo")
    tree.write("/etc/a", "stock", 0o600)
    assert m.undo(tree.host, "demo").saved == []
    assert tree.picture() == before


def test_a_changed_backup_is_not_put_back(tree: Tree) -> None:
    tree.write("/etc/a", "stock")
    tree.claim(files=["/etc/a"])
    tree.write("/etc/a", "ours")
    tree.at(f"{m.BACKUP_DIR}/demo/etc/a").write_text("tampered")
    with pytest.raises(m.ManifestError, match="backup .* changed"):
        m.undo(tree.host, "demo")
    assert tree.at("/etc/a").read_text() == "ours"


def test_units_of_ours_are_stopped_before_their_files_go(tree: Tree) -> None:
    tree.claim(files=["/etc/systemd/system/g.service"], units=["g"])
    tree.write("/etc/systemd/system/g.service", "[Service]")
    tree.node.unit("g.service", "enabled", "active")
    tree.node.units["g.service"]["file"] = "etc/systemd/system/g.service"
    result = m.undo(tree.host, "demo")
    assert tree.node.units == {}
    actions = [c for c in tree.node.commands if "show" not in c]
    assert actions == ["systemctl stop -- g.service", "systemctl disable -- g.service", "systemctl daemon-reload"]
    assert "unit g.service" in result.removed


STATES = [
    ("enabled", "active"),
    ("enabled", "inactive"),
    ("disabled", "active"),
    ("disabled", "inactive"),
    ("masked", "inactive"),
]


# A static unit can be masked only.
@pytest.mark.parametrize(
    ("former", "changed"),
    [*((a, b) for a in STATES for b in STATES if a != b), (("static", "inactive"), ("masked", "inactive"))],
)
def test_units_that_were_there_get_their_state_back(
    tree: Tree, former: tuple[str, str], changed: tuple[str, str]
) -> None:
    tree.node.unit("x.service", *former)
    tree.claim(units=["x.service"])
    unit = tree.node.units["x.service"]
    if changed[0] == "masked" and former[0] != "masked":
        unit["hidden"] = former[0]
    unit["enabled"], unit["active"] = changed
    m.undo(tree.host, "demo")
    assert (unit["enabled"], unit["active"]) == former


def test_enablement_under_a_mask_is_restored(tree: Tree) -> None:
    tree.node.unit("x.service", "enabled", "active")
    tree.claim(units=["x"])
    tree.node.units["x.service"] = {"enabled": "masked", "hidden": "disabled", "active": "inactive"}
    m.undo(tree.host, "demo")
    assert tree.node.units["x.service"] == {"enabled": "enabled", "active": "active"}


def test_a_running_unit_takes_its_former_file_up_again(tree: Tree) -> None:
    tree.write("/etc/chrony.conf", "stock")
    tree.node.unit("chrony.service", "enabled", "active")
    tree.claim(files=["/etc/chrony.conf"], units=["chrony"])
    tree.write("/etc/chrony.conf", "ours")
    result = m.undo(tree.host, "demo")
    assert "unit chrony.service: reload-or-restart" in result.restored
    tree.claim(units=["chrony"])
    assert m.undo(tree.host, "demo").restored == []


def test_a_unit_whose_package_is_gone_is_reported(tree: Tree) -> None:
    tree.node.unit("timesyncd.service", "enabled", "active")
    tree.claim(units=["timesyncd"])
    tree.node.units.clear()
    assert "no longer installed (was enabled, active)" in reasons(m.undo(tree.host, "demo"))["unit timesyncd.service"]


def test_mounts_lose_only_their_own_fstab_line(tree: Tree) -> None:
    stock = "# /srv/l2 is ours soon\nUUID=1 / ext4 defaults 0 1\nUUID=3 /srv/l2b xfs noatime 0 0\n"
    tree.write("/etc/fstab", stock, 0o664)
    tree.claim(mounts=["/srv/l2/"])
    tree.write("/etc/fstab", stock.replace("UUID=3", "UUID=2 /srv/l2 xfs nofail 0 0\nUUID=3"), 0o664)
    tree.at("/srv/l2").mkdir()
    tree.node.mount("/srv/l2", "systemd-1", "autofs")
    tree.node.mount("/srv/l2", "/dev/nvme1n1")
    result = m.undo(tree.host, "demo")
    assert tree.at("/etc/fstab").read_text() == stock
    assert stat.S_IMODE(tree.at("/etc/fstab").stat().st_mode) == 0o664
    assert tree.node.mounted == []
    assert not tree.at("/srv/l2").exists()
    assert result.removed == ["mount /srv/l2", "fstab line of /srv/l2", "directory /srv/l2"]
    assert tree.node.commands[-1] == "systemctl daemon-reload"


def test_a_former_mount_stays_and_its_line_comes_back(tree: Tree) -> None:
    stock = "UUID=2 /srv/l2 ext4 defaults 0 0\nUUID=1 / ext4 defaults 0 1\n"
    tree.write("/etc/fstab", stock)
    tree.at("/srv/l2").mkdir()
    tree.node.mount("/srv/l2", "/dev/nvme1n1")
    tree.claim(mounts=["/srv/l2"])
    tree.write("/etc/fstab", stock.replace("defaults 0 0", "noatime,nofail 0 0"))
    m.undo(tree.host, "demo")
    assert tree.at("/etc/fstab").read_text() == stock
    assert [entry[0] for entry in tree.node.mounted] == ["/srv/l2"]


@pytest.mark.parametrize(
    ("text", "former", "wanted"),
    [
        ("a /x t o\n", [], ""),
        ("a /x t o", [], ""),
        ("b /y t o", ["a /x t o"], "b /y t o\na /x t o\n"),
        ("a /x t o\na2 /x t o\nb /y t o\n", ["old /x t o"], "old /x t o\nb /y t o\n"),
        ("#a /x t o\nb /xx t o\n", [], "#a /x t o\nb /xx t o\n"),
    ],
)
def test_fstab_restored(text: str, former: list[str], wanted: str) -> None:
    assert m.fstab_restored(text, "/x", former) == wanted


def test_fstab_and_mountinfo_escapes(tree: Tree) -> None:
    assert m.fstab_lines("UUID=2 /srv/my\\040disk xfs o 0 0\n", "/srv/my disk") == ["UUID=2 /srv/my\\040disk xfs o 0 0"]
    tree.node.mount("/srv/my disk", "/dev/x")
    assert tree.host.mounted("/srv/my disk") == {"source": "/dev/x", "fstype": "xfs"}


def test_sysctls_get_their_former_value(tree: Tree) -> None:
    tree.write("/proc/sys/net/core/rmem_max", "212992\n")
    tree.write("/proc/sys/net/ipv4/conf/en0.7/arp_ignore", "0\n")
    tree.write("/proc/sys/net/gone", "1\n")
    tree.claim(sysctls=["net.core.rmem_max", "net.ipv4.conf.en0/7.arp_ignore", "net.gone", "net.never"])
    tree.write("/proc/sys/net/core/rmem_max", "1\n")
    tree.write("/proc/sys/net/ipv4/conf/en0.7/arp_ignore", "2\n")
    tree.at("/proc/sys/net/gone").unlink()
    tree.write("/proc/sys/net/never", "5\n")
    result = m.undo(tree.host, "demo")
    assert tree.at("/proc/sys/net/core/rmem_max").read_text() == "212992"
    assert tree.at("/proc/sys/net/ipv4/conf/en0.7/arp_ignore").read_text() == "0"
    assert "kernel does not have it" in reasons(result)["sysctl net.gone"]
    assert tree.at("/proc/sys/net/never").read_text() == "5\n"


def test_users_and_packages(tree: Tree) -> None:
    tree.node.users = {"old"}
    tree.node.packages = {"fio"}
    tree.claim(users=["old", "goodput"], packages=["fio", "chrony", "never-installed"])
    tree.node.users.add("goodput")
    tree.node.packages.add("chrony")
    result = m.undo(tree.host, "demo")
    assert tree.node.users == {"old"}
    assert tree.node.packages == {"fio", "chrony"}
    assert list(reasons(result)) == ["package chrony"]


# data ---------------------------------------------------------------------------------------------------------------


def test_data_is_kept_without_consent_and_can_be_removed_later(tree: Tree) -> None:
    before = tree.picture()
    tree.claim(data_paths=["/srv/goodput/models"], files=["/etc/x"])
    tree.write("/srv/goodput/models/tiny/weights", "w")
    tree.write("/etc/x", "ours")
    first = m.undo(tree.host, "demo")
    assert tree.at("/srv/goodput/models/tiny/weights").read_text() == "w"
    assert not tree.at("/etc/x").exists()
    assert "remove_data" in reasons(first)["data /srv/goodput/models"]
    assert [section for section in m.SECTIONS if tree.stored()[section]] == ["directories", "data_paths"]
    assert not m.undo(tree.host, "demo").changed
    m.undo(tree.host, "demo", remove_data=True)
    assert tree.picture() == before


def test_kept_data_is_still_ours_after_the_next_claim(tree: Tree) -> None:
    tree.claim(data_paths=["/srv/goodput/models"])
    tree.write("/srv/goodput/models/w", "w")
    m.undo(tree.host, "demo")
    tree.claim(data_paths=["/srv/goodput/models"], files=["/etc/x"])
    m.undo(tree.host, "demo", remove_data=True)
    assert not tree.at("/srv/goodput").exists()


def test_content_from_before_the_claim_is_never_removed(tree: Tree) -> None:
    tree.write("/srv/models/theirs", "two terabytes")
    tree.claim(data_paths=["/srv/models"])
    tree.write("/srv/models/ours", "w")
    result = m.undo(tree.host, "demo", remove_data=True)
    assert tree.at("/srv/models/theirs").read_text() == "two terabytes"
    assert "before this role claimed it" in reasons(result)["data /srv/models"]
    assert result.after is None


def test_data_behind_a_link_or_a_foreign_mount_is_not_followed(tree: Tree) -> None:
    tree.claim(data_paths=["/srv/a/data", "/srv/b/data"])
    tree.write("/srv/elsewhere/f", "theirs")
    tree.at("/srv/a").mkdir()
    tree.at("/srv/a/data").symlink_to(tree.at("/srv/elsewhere"))
    tree.write("/srv/b/data/nfs/f", "theirs")
    tree.node.mount("/srv/b/data/nfs", "server:/export", "nfs4")
    result = m.undo(tree.host, "demo", remove_data=True)
    assert tree.at("/srv/elsewhere/f").exists()
    assert tree.at("/srv/b/data/nfs/f").exists()
    assert "symlink" in reasons(result)["data /srv/a/data"]
    assert "/srv/b/data/nfs" in reasons(result)["data /srv/b/data"]


def test_links_inside_data_are_removed_as_links(tree: Tree) -> None:
    tree.claim(data_paths=["/srv/a/data"])
    tree.write("/srv/elsewhere/f", "theirs")
    tree.at("/srv/a/data/x").mkdir(parents=True)
    tree.at("/srv/a/data/link").symlink_to(tree.at("/srv/elsewhere"))
    tree.at("/srv/a/data/x/link").symlink_to(tree.at("/srv/elsewhere"))
    m.undo(tree.host, "demo", remove_data=True)
    assert not tree.at("/srv/a").exists()
    assert tree.at("/srv/elsewhere/f").exists()


def test_data_on_a_listed_mount_stays_on_its_disk(tree: Tree) -> None:
    tree.claim(mounts=["/srv/l2"], data_paths=["/srv/l2"])
    tree.write("/srv/l2/chunk", "kv")
    tree.node.mount("/srv/l2", "/dev/nvme1n1")
    result = m.undo(tree.host, "demo")
    assert reasons(result)["data /srv/l2"] == "data stays on /dev/nvme1n1"
    assert tree.node.mounted == []
    assert result.after is None


def test_kept_data_and_edited_files_are_warned_about_once(tree: Tree) -> None:
    tree.claim(files=["/etc/x"], data_paths=["/srv/goodput/models"], packages=["fio"])
    tree.write("/etc/x", "ours")
    m.record(tree.host, "demo")
    tree.write("/etc/x", "theirs")
    tree.write("/srv/goodput/models/w", "w")
    tree.node.packages.add("fio")
    assert m.warnings(m.undo(tree.host, "demo")) == [
        "data /srv/goodput/models kept: data stays unless remove_data is true",
        "file /etc/x kept: edited after this role wrote it: your version is now /etc/x.goodput-saved",
    ]
    assert m.warnings(m.undo(tree.host, "demo")) == []


# two roles ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listed", [["/srv/shared"], []])
def test_a_shared_folder_goes_though_its_first_role_was_reset_alone_and_came_back(
    tree: Tree, listed: list[str]
) -> None:
    """Also a folder that no role names: the first made it on its way to its own."""

    def claim(role: str) -> None:
        tree.claim(role, directories=[*listed, f"/srv/shared/{role}"])
        tree.at(f"/srv/shared/{role}").mkdir(parents=True)

    tree.at("/srv").mkdir(exist_ok=True)
    claim("one")
    claim("two")
    m.undo(tree.host, "one")
    claim("one")
    m.undo(tree.host, "two")
    m.undo(tree.host, "one")
    assert not tree.at("/srv/shared").exists()


def test_a_role_that_found_its_parents_lists_no_more_when_another_role_lists_them(tree: Tree) -> None:
    """Nothing new to claim: the second run of a role stays unchanged, whatever came between."""
    tree.at("/etc/app").mkdir(parents=True)
    tree.claim("one", files=["/etc/app/one"])
    tree.claim("two", directories=["/etc/app"])
    assert not tree.claim("one", files=["/etc/app/one"]).changed


def test_files_beside_the_manifests_go_without_a_word(tree: Tree) -> None:
    """Their folder holds the manifest while a role is undone: that is nothing to report."""
    for role in ("one", "two"):
        tree.claim(role, files=[f"/var/lib/goodput/{role}"])
        tree.write(f"/var/lib/goodput/{role}", "ours")
    assert [m.undo(tree.host, role).kept for role in ("one", "two")] == [[], []]
    assert not tree.at("/var/lib/goodput").exists()


@pytest.mark.parametrize("order", [("one", "two"), ("two", "one")])
def test_a_shared_item_is_undone_with_the_last_role(tree: Tree, order: tuple[str, str]) -> None:
    tree.write("/etc/shared", "stock")
    before = tree.picture()
    tree.claim("one", files=["/etc/shared"], directories=["/etc/goodput"])
    tree.write("/etc/shared", "ours")
    tree.at("/etc/goodput").mkdir()
    tree.claim("two", files=["/etc/shared"], directories=["/etc/goodput"])
    first = m.undo(tree.host, order[0])
    assert tree.at("/etc/shared").read_text() == "ours"
    assert tree.at("/etc/goodput").is_dir()
    assert f"role {order[1]}" in reasons(first)["file /etc/shared"]
    m.undo(tree.host, order[1])
    assert tree.picture() == before
