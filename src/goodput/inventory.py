"""The nodes of an inventory and how to reach them, resolved by Ansible's own inventory code.

One reader for every tool that does not go through a play: templates in connection variables, group variables beside
the playbooks and vaulted values come out as a play would see them.
"""

from __future__ import annotations

import os
import shlex
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class InventoryError(Exception):
    """No usable inventory; the message says what to do."""


@dataclass(frozen=True)
class Node:
    """One host of the inventory.

    ``variables`` are its host variables, templated. ``command`` starts a POSIX shell as the inventory's user: the part
    of an argument vector before the remote command line (empty for ``ansible_connection: local``).
    """

    name: str
    variables: Mapping[str, Any]
    command: tuple[str, ...] = ()
    become: bool = True
    become_password: str | None = field(default=None, repr=False)
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def interactive(self) -> tuple[str, ...]:
        """The same for a person at a terminal."""
        at = len(self.command) - self.command[::-1].index("ControlMaster=no") if self.command else 0
        rest = self.command[at:]
        return ("ssh", *rest) if rest else ("sh",)

    @property
    def address(self) -> str:
        return str(self.variables.get("ansible_host", self.name))

    @property
    def management_address(self) -> str:
        """What the nodes call each other by."""
        return str(self.variables.get("goodput_management_address", self.address))

    @property
    def serving_address(self) -> str:
        """Where its worker is: on Kubernetes the node's address in the cluster, as filter ``k3s_addresses`` says."""
        on_cluster = self.variables.get("goodput_platform") == "k3s"
        return str((on_cluster and self.variables.get("k3s_node_ip")) or self.management_address)


def load(
    inventory: Path, pattern: str = "sparks", *, limit: str | None = None, basedir: Path | None = None
) -> list[Node]:
    """Return the nodes that ``pattern`` (a group or host pattern) selects, in inventory order.

    ``inventory`` may be several paths joined by ``:``. ``basedir`` is the folder whose ``group_vars`` count as playbook
    variables. Raises InventoryError.
    """
    sources = str(inventory).split(os.pathsep)
    for source in sources:
        if not Path(source).exists():
            raise InventoryError(f"found no inventory at {source}")
    # Imported late: the goodput command must answer --help without Ansible's start-up cost.
    from ansible import constants
    from ansible.cli import CLI
    from ansible.errors import AnsibleError
    from ansible.inventory.manager import InventoryManager
    from ansible.parsing.dataloader import DataLoader
    from ansible.plugins.loader import connection_loader, init_plugin_loader
    from ansible.plugins.vars import host_group_vars
    from ansible.template import Templar
    from ansible.vars.manager import VariableManager

    with warnings.catch_warnings():
        # It may have been called in this process before.
        warnings.simplefilter("ignore")
        init_plugin_loader()
    # Ansible remembers the names of files for the whole process, and this one may have written one since.
    host_group_vars.FOUND.clear()
    host_group_vars.NAK.clear()
    loader = DataLoader()
    if basedir is not None:
        loader.set_basedir(str(basedir))
    try:
        files = [constants.DEFAULT_VAULT_PASSWORD_FILE] if constants.DEFAULT_VAULT_PASSWORD_FILE else []
        identities = list(constants.DEFAULT_VAULT_IDENTITY_LIST or [])
        if files or identities:
            secrets = CLI.setup_vault_secrets(loader, identities, vault_password_files=files, auto_prompt=False)
            loader.set_vault_secrets(secrets)
        manager = InventoryManager(loader=loader, sources=sources)
        if limit:
            manager.subset(limit)
        hosts = manager.get_hosts(pattern)
        if not hosts:
            asked = f"{pattern!r}" + (f" limited to {limit!r}" if limit else "")
            groups = ", ".join(sorted(manager.groups))
            raise InventoryError(
                f"{inventory} has no host in {asked}; groups there: {groups}; "
                f"`ansible-inventory -i {inventory} --list` shows how Ansible reads it"
            )
        # Loading the plugin makes its options known to Ansible's configuration.
        connection_loader.get("ssh", class_only=True)
        variables = VariableManager(loader=loader, inventory=manager)
        nodes = []
        for host in hosts:
            raw = variables.get_vars(host=host)
            templar = Templar(loader, variables=raw)
            nodes.append(_node(str(host.name), _Resolved(raw, templar), constants))
        return nodes
    except AnsibleError as error:
        raise InventoryError(f"{inventory} can not be read: {error}") from error


class _Resolved(Mapping[str, Any]):
    """Host variables, each templated when it is read, so that one broken unrelated variable does no harm."""

    def __init__(self, raw: Mapping[str, Any], templar: Any) -> None:
        self._raw, self._templar = raw, templar

    def __getitem__(self, key: str) -> Any:
        return self._templar.template(self._raw[key])

    def __contains__(self, key: object) -> bool:
        return key in self._raw

    def __iter__(self) -> Any:
        return iter(self._raw)

    def __len__(self) -> int:
        return len(self._raw)


def _node(name: str, variables: Mapping[str, Any], constants: Any) -> Node:
    def first(*keys: str, default: Any = None) -> Any:
        return next((variables[key] for key in keys if variables.get(key) not in (None, "")), default)

    # The suite reads what only root may read, unless the inventory says otherwise.
    become = str(first("ansible_become", default=True)).lower() not in ("false", "no", "0")
    secret = first("ansible_become_password", "ansible_become_pass", default=os.environ.get("GOODPUT_BECOME_PASSWORD"))
    secret = None if secret is None else str(secret)
    connection = str(first("ansible_connection", default="ssh")).removeprefix("ansible.builtin.")
    if connection == "local":
        return Node(name, variables, (), become, secret)
    if connection not in ("ssh", "smart"):
        raise InventoryError(f"{name} has ansible_connection {connection!r}; the acceptance suite knows ssh and local")

    def option(key: str) -> Any:
        """The value that Ansible's own ssh connection would use: host variable, environment, ansible.cfg, default."""
        return constants.config.get_config_value(key, plugin_type="connection", plugin_name="ssh", variables=variables)

    password = option("password")
    command = [str(option("ssh_executable")), "-T", "-e", "none"]
    environment: dict[str, str] = {}
    if password is None:
        command += ["-o", "BatchMode=yes"]
    else:
        if shutil.which("sshpass") is None:
            raise InventoryError(f"{name} has ansible_password but sshpass is not installed: use an SSH key")
        command, environment = ["sshpass", "-e", *command], {"SSHPASS": str(password)}
    # Joins a connection that Ansible left open, but never becomes one that outlives this process.
    command += ["-o", "ControlMaster=no"]
    command += shlex.split(str(option("ssh_args") or ""))
    if not option("host_key_checking"):
        command += ["-o", "StrictHostKeyChecking=no"]
    for key, value in (
        ("Port", option("port")),
        ("User", option("remote_user")),
        ("IdentityFile", option("private_key_file")),
        ("ConnectTimeout", option("timeout")),
    ):
        if value is not None:
            command += ["-o", f'{key}="{value}"']
    for key in ("ssh_common_args", "ssh_extra_args"):
        command += shlex.split(str(option(key) or ""))
    return Node(name, variables, (*command, str(option("host") or name)), become, secret, environment)
