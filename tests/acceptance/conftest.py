"""Fixtures of the acceptance suite.

A file ``test_NN_<layer>.py`` holds the checks of one layer. A check is a test; the first line of its docstring is its
name in the verdict. Everything runs as root in one shell per node that stays open.

    def test_swappiness(host, sh, check):
        "Swappiness is low"
        answer = sh({"value": "sysctl -n vm.swappiness", "file": "cat /etc/sysctl.d/60-goodput.conf"})
        check(int(answer["value"].stdout), 10, "run `ansible-playbook site.yml --tags host`")

    @pytest.mark.unit("goodput-worker")         # its journal is attached when the check fails
    def test_two_workers(nodes, check):          # no host: one check for the whole site
        "Each node registered a worker"

host    testinfra host (``host.run``, ``host.file`` ...), root, once per node; ``host.name``, ``host.vars`` (inventory)
nodes   all of them in inventory order; ``first`` the first; ``peer`` the next node after ``host`` (skips if alone)
sh      ``sh({name: command}, node=None, fresh=False)`` -> {name: Result(rc, stdout, stderr, ok)}: one round trip
        for all commands. Answers are remembered for the session, and the other nodes are asked the same in the
        background, so use ``fresh=True`` for whatever changes something, waits, or is meant for one node
check   ``check(found, required, remedy, ok=None, what=None, unit=None, node=None)``: ok defaults to found == required;
        records a row of the verdict and fails the test if not ok. Call it several times with ``what`` for several rows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
# The package, and what the files of this folder share.
for folder in (Path(__file__).parent, ROOT / "src"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Before an inventory is read: from then on Ansible imports collections in its own way, which does not know one that
# began to be imported without it.
from ansible_collections.goodput.spark.plugins.module_utils import chat_probe, k3s_cluster, serving  # noqa: E402, F401
from ansible_collections.goodput.spark.plugins.module_utils.kube_objects import charts  # noqa: E402, F401
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import l1  # noqa: E402, F401

from goodput import verdict  # noqa: E402
from goodput.inventory import InventoryError, Node, load  # noqa: E402
from goodput.session import CommandTimeout, NodeHost, Result, Session, Unreachable  # noqa: E402

NODES = pytest.StashKey[list[Node]]()
HOSTS = pytest.StashKey[list[NodeHost]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("goodput")
    group.addoption("--limit", default=None, help="host pattern that narrows --hosts")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "unit(name): systemd unit whose journal belongs to this check")
    if not config.pluginmanager.has_plugin("goodput.verdict"):
        config.pluginmanager.import_plugin("goodput.verdict")


def inventory_nodes(config: pytest.Config) -> list[Node]:
    """The nodes named by --hosts (default ansible://sparks) in --ansible-inventory; ends the run if there are none."""
    if NODES not in config.stash:
        path = config.getoption("ansible_inventory") or os.environ.get("GOODPUT_INVENTORY")
        pattern = (config.getoption("hosts") or "sparks").replace("ansible://", "")
        if not path:
            verdict.could_not_run(config, "no inventory given: --ansible-inventory PATH")
        try:
            config.stash[NODES] = load(Path(path), pattern, limit=config.getoption("limit"), basedir=ROOT)
        except InventoryError as error:
            verdict.could_not_run(config, str(error))
    return config.stash[NODES]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The layer kubernetes is of one platform alone: where the inventory names it, or somebody asks for the layer."""
    if not collection_path.name.endswith("_kubernetes.py"):
        return None
    asked = (config.getoption("goodput_layers") or "").split(",")
    named = {node.variables.get("goodput_platform") for node in inventory_nodes(config)}
    return None if "kubernetes" in asked or "k3s" in named else True


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "host" in metafunc.fixturenames:
        names = [node.name for node in inventory_nodes(metafunc.config)]
        metafunc.parametrize("host", names, ids=names, indirect=True, scope="module")


@pytest.fixture(scope="session")
def nodes(request: pytest.FixtureRequest) -> Iterator[list[NodeHost]]:
    """Every node with an open root shell, in inventory order."""
    config = request.config
    hosts = [NodeHost(Session(node)) for node in inventory_nodes(config)]
    with ThreadPoolExecutor(len(hosts)) as pool:
        outcomes = list(pool.map(_open, hosts))
    problems = [text for text in outcomes if text]
    if problems:
        verdict.could_not_run(config, "\n".join(problems))
    verdict.set_nodes(config, hosts)
    yield hosts
    for host in hosts:
        host.session.close()


def _open(host: NodeHost) -> str:
    try:
        host.session.open()
    except (Unreachable, CommandTimeout) as error:
        host.session.close()
        return str(error)
    return ""


@pytest.fixture(scope="module")
def host(request: pytest.FixtureRequest, nodes: list[NodeHost]) -> NodeHost:
    """One node; the test runs once for each."""
    return next(node for node in nodes if node.name == request.param)


@pytest.fixture(scope="session")
def first(nodes: list[NodeHost]) -> NodeHost:
    """The node of the frontend and of discovery."""
    return nodes[0]


@pytest.fixture
def peer(host: NodeHost, nodes: list[NodeHost]) -> NodeHost:
    """The next node after ``host`` in inventory order."""
    if len(nodes) == 1:
        pytest.skip("only one node is in this run, so there is no peer")
    return nodes[(nodes.index(host) + 1) % len(nodes)]


@pytest.fixture(scope="session")
def ahead(nodes: list[NodeHost]) -> Iterator[Callable[..., None]]:
    """Ask the other nodes in the background what one node is asked now: their tests come next."""
    pool = ThreadPoolExecutor(len(nodes))

    def ask(commands: dict[str, str], asked: NodeHost, timeout_s: float) -> None:
        for node in nodes:
            if node is not asked and not node.knows(commands):
                # A failure is not remembered: the test of that node asks again and reports it.
                pool.submit(node.batch, commands, timeout_s=timeout_s)

    yield ask
    pool.shutdown(wait=True, cancel_futures=True)


@pytest.fixture
def sh(request: pytest.FixtureRequest, ahead: Callable[..., None]) -> Callable[..., dict[str, Result]]:
    """Run several commands in one round trip on ``host`` (or on ``node=``)."""

    def run(
        commands: dict[str, str], *, node: NodeHost | None = None, fresh: bool = False, timeout_s: float = 120.0
    ) -> dict[str, Result]:
        target = node if node is not None else request.getfixturevalue("host")
        if not fresh:
            ahead(commands, target, timeout_s)
        answers: dict[str, Result] = target.batch(commands, fresh=fresh, timeout_s=timeout_s)
        return answers

    return run


@pytest.fixture
def check(request: pytest.FixtureRequest) -> verdict.Check:
    """Record found, required and remedy; fail the test if they do not agree."""
    item: Any = request.node
    return verdict.Check(item)
