"""The virtual pair's pure parts, and the ones that need only e2fsprogs."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import virtual_pair as vp

SETTINGS = vp.Settings(Path("pair"), Path("/cache/image"), Path("/cache/media.ext4"))
PORTS = {"ssh": 40001, "http": 40002}
UDP = {g.name: {c: 41000 + 10 * g.number + i for i, c in enumerate(vp.CABLES)} for g in vp.GUESTS}


def arguments(guest: vp.Guest, accel: str = "tcg") -> str:
    return " ".join(vp.qemu_arguments(guest, SETTINGS, vp.ARCHES["x86_64"], accel, PORTS, UDP, "0" * 31 + "1"))


def test_the_two_ends_of_a_cable_name_each_other() -> None:
    one, two = (arguments(guest) for guest in vp.GUESTS)
    for cable in vp.CABLES:
        pattern = rf"id={cable},udp=(127.0.0.1:\d+),localaddr=(127.0.0.1:\d+)"
        ends = [re.search(pattern, text) for text in (one, two)]
        assert ends[0] and ends[1]
        assert ends[0].groups() == ends[1].groups()[::-1]


def test_only_loopback_ports_are_opened_and_nothing_outside_is_reached() -> None:
    text = arguments(vp.GUESTS[0])
    assert "restrict=on" in text
    assert re.findall(r"hostfwd=tcp:([^:]+):(\d+)", text) == [("127.0.0.1", "40001"), ("127.0.0.1", "40002")]
    assert "listen=" not in text
    assert set(re.findall(r"(?:udp|localaddr)=([^:,]+)", text)) == {"127.0.0.1"}


def test_guests_differ_in_name_mac_serial_and_share_nothing_writable() -> None:
    one, two = (arguments(guest) for guest in vp.GUESTS)
    assert not set(re.findall(r"mac=(\S+?)[, ]", one)) & set(re.findall(r"mac=(\S+?)[, ]", two))
    writable = [
        {path for path, options in re.findall(r"file=([^,]+),(\S+)", text) if "readonly" not in options}
        for text in (one, two)
    ]
    assert not writable[0] & writable[1]
    assert "serial=SPARK1L2" in one and "serial=SPARK2DATA" in two


def test_kvm_is_not_believed_without_the_cpu_flag(tmp_path: Path) -> None:
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        pytest.skip("no /dev/kvm to disbelieve on this machine")
    works, reason = vp.kvm_works(
        vp.Settings(tmp_path, tmp_path, tmp_path), vp.ARCHES["x86_64"], cpuinfo="flags : fpu sse"
    )
    assert not works
    assert "vmx, svm" in reason


def test_a_foreign_process_is_never_ours(tmp_path: Path) -> None:
    assert not vp.own_process(os.getpid(), vp.GUESTS[0], tmp_path)
    assert not vp.own_process(2**22 - 1, vp.GUESTS[0], tmp_path)


def test_identity_reaches_the_filesystem_with_mode_and_owner(tmp_path: Path) -> None:
    if not shutil.which("debugfs") or not shutil.which("mke2fs"):
        pytest.skip("e2fsprogs is not installed")
    tree, disk = tmp_path / "tree", tmp_path / "disk"
    for folder in ("etc/ssh", "etc/netplan", "etc/systemd/network", "home/spark"):
        (tree / folder).mkdir(parents=True)
    (tree / "etc/hosts").write_text("old")
    subprocess.run(["mke2fs", "-q", "-F", "-t", "ext4", "-d", str(tree), str(disk), "8M"], check=True)
    files = vp.identity_files(vp.GUESTS[1], "ssh-ed25519 KEY\n", "PRIVATE\n", "PUBLIC\n")
    sources = {}
    for index, (path, (content, _, _)) in enumerate(files.items()):
        source = tmp_path / str(index)
        source.write_text(content)
        sources[path] = str(source)
    script = tmp_path / "commands"
    script.write_text(vp.debugfs_commands(files, sources))
    subprocess.run(["debugfs", "-w", "-f", str(script), str(disk)], check=True, capture_output=True)

    def ask(request: str) -> str:
        return subprocess.run(["debugfs", "-R", request, str(disk)], capture_output=True, text=True, check=True).stdout

    for path, (content, mode, uid) in files.items():
        assert ask(f"cat {path}") == content
        stat = ask(f"stat {path}")
        assert re.search(rf"Mode:\s+0{mode:03o}\b", stat), stat
        assert re.search(rf"User:\s+{uid}\b", stat), stat
    assert "spark2" in ask("cat /etc/hosts") and "127.0.0.1 localhost" in ask("cat /etc/hosts")


def test_disks_are_not_forgotten_under_a_running_guest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = vp.Pair(vp.Settings(tmp_path, tmp_path, tmp_path))
    monkeypatch.setattr(pair, "pid", lambda guest: 4711)
    with pytest.raises(vp.VirtualPairError, match="4711.*virtual-down"):
        pair.destroy_disks()


def test_media_holds_mirror_and_archives(tmp_path: Path) -> None:
    if not shutil.which("mke2fs"):
        pytest.skip("e2fsprogs is not installed")
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "Packages").write_text("index")
    archive = tmp_path / "runtime.squashfs"
    archive.write_bytes(b"x" * 5000)
    target = tmp_path / "media.ext4"
    assert vp.make_media(target, mirror, [archive])
    assert not vp.make_media(target, mirror, [archive])
    listing = subprocess.run(
        ["debugfs", "-R", "ls -p /", str(target)], capture_output=True, text=True, check=True
    ).stdout
    assert "/runtime.squashfs/5000/" in listing and "/mirror/" in listing


def test_an_emulated_guest_never_has_one_possible_cpu() -> None:
    """With one the emulator leaves memory barriers out and a network card stalls."""
    assert "-smp 1,maxcpus=2" in arguments(vp.GUESTS[0])


def test_fresh_guests_are_unknown_to_molecule(tmp_path: Path) -> None:
    (tmp_path / "molecule").mkdir()
    (tmp_path / "molecule/state.yml").write_text("prepared: true\n")
    vp.Pair(vp.Settings(tmp_path, tmp_path, tmp_path)).destroy_disks()
    assert not (tmp_path / "molecule").exists()


def test_a_port_that_was_taken_while_its_guest_was_off_is_picked_anew(tmp_path: Path) -> None:
    def ports() -> dict[str, dict[str, int]]:
        pair = vp.Pair(vp.Settings(tmp_path / "pair", Path("/cache/image"), Path("/cache/media.ext4")))
        pair.state |= {"accel": "tcg", "accel_reason": ""}
        pair._prepare()
        return dict(pair.state["ports"])

    before = ports()
    assert ports() == before
    with socket.socket() as other:
        other.bind(("127.0.0.1", before["spark1"]["ssh"]))
        other.listen()
        after = ports()
    assert after["spark1"]["ssh"] != before["spark1"]["ssh"]
    assert after["spark1"]["http"] == before["spark1"]["http"] and after["spark2"] == before["spark2"]
    assert f"[127.0.0.1]:{after['spark1']['ssh']} " in (tmp_path / "pair/known_hosts").read_text()
