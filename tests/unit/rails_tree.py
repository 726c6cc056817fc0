"""Builds sysfs trees of RoCE adapters from short descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parent / "fixtures/sysfs"
EMPTY_GID = ":".join(["0000"] * 8)


def spark(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """The four functions of a Spark; keyword arguments change one netdev each, or all with `every`."""
    data = json.loads((FIXTURES / "spark.json").read_text())
    every = changes.get("every", {})
    return [
        {"guid": data["sys_image_guid"], **function, **every, **changes.get(function["netdev"], {})}
        for function in data["functions"]
    ]


def soft_roce(**changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Two rdma_rxe devices on virtio netdevs: no PCI parent, no port name, a GUID each."""
    base = [
        {"device": "rocep1s0f0", "netdev": "enp1s0f0np0", "netdev_pci": "0000:00:05.0", "mac": "52:54:00:77:01:02"},
        {"device": "roceP2p1s0f0", "netdev": "enP2p1s0f0np0", "netdev_pci": "0000:00:06.0", "mac": "52:54:00:77:01:03"},
    ]
    return [
        {"guid": f"5054:00ff:fe77:010{index}", "rxe": True, **function, **changes.get(function["netdev"], {})}
        for index, function in enumerate(base)
    ]


def write(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{value}\n")


def gid(address: str) -> str:
    """192.168.100.1 -> 0000:0000:0000:0000:0000:ffff:c0a8:6401, as sysfs prints it."""
    octets = [int(part) for part in address.split(".")]
    return "0000:0000:0000:0000:0000:ffff:{:02x}{:02x}:{:02x}{:02x}".format(*octets)


def build(root: Path, functions: list[dict[str, Any]]) -> Path:
    """Write the tree below root/sys and return that folder.

    Keys of a function beside names: carrier (True, False, None = link down), mtu, gids [(index, type, gid)], width.
    """
    sys_root = root / "sys"
    (sys_root / "class/infiniband").mkdir(parents=True, exist_ok=True)
    (sys_root / "class/net").mkdir(parents=True, exist_ok=True)
    write(sys_root / "module/ib_core/parameters/netns_mode", "Y")
    for number, function in enumerate(functions):
        netdev, device = function["netdev"], function["device"]
        carrier = function.get("carrier", True)
        pci = function.get("pci") or function.get("netdev_pci")
        parent = sys_root / "devices" / f"pci{pci[:7]}" / pci if pci else sys_root / "devices/virtual"
        net, infiniband = parent / "net" / netdev, parent / "infiniband" / device
        write(net / "address", function["mac"])
        write(net / "mtu", function.get("mtu", 9000))
        write(net / "ifindex", number + 4)
        write(net / "flags", "0x1002" if carrier is None else "0x1003")
        write(net / "operstate", "up" if carrier else "down")
        if carrier is not None:
            write(net / "carrier", int(carrier))
        if not function.get("rxe"):
            write(net / "speed", 200000 if carrier else -1)
            write(net / "phys_port_name", function["port"]) if function.get("port") else None
            write(parent / "current_link_width", function.get("width", 4))
            write(parent / "current_link_speed", "32.0 GT/s PCIe")
            write(parent / "vendor", "0x15b3")
        if pci:
            (net / "device").symlink_to(parent)
        (sys_root / "class/net" / netdev).symlink_to(net)
        if function.get("no_rdma"):
            continue
        if function.get("rxe"):
            write(infiniband / "parent", netdev)
        else:
            (infiniband).mkdir(parents=True, exist_ok=True)
            (infiniband / "device").symlink_to(parent)
        if function.get("virtual_function"):
            (parent / "physfn").mkdir()
        write(infiniband / "sys_image_guid", function["guid"])
        port = infiniband / "ports/1"
        write(port / "link_layer", "Ethernet")
        table = {index: (kind, value) for index, kind, value in function.get("gids", [])}
        for index in range(8):
            kind, value = table.get(index, ("", EMPTY_GID))
            write(port / "gids" / str(index), value)
            if kind:
                write(port / "gid_attrs/types" / str(index), kind)
                write(port / "gid_attrs/ndevs" / str(index), netdev)
        (sys_root / "class/infiniband" / device).symlink_to(infiniband)
        verbs = sys_root / "class/infiniband_verbs" / f"uverbs{number}"
        write(verbs / "ibdev", device)
        write(root / "dev/infiniband" / f"uverbs{number}", "")
    return sys_root
