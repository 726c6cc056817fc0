"""A site's inputs: names, types, choices and the inventory, checked on the controller."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from ansible_collections.goodput.spark.plugins.module_utils import inputs as i

ROOT = Path(__file__).resolve().parents[2]
KNOWN = i.Known(
    options={
        "rdma_mtu_bytes": {"type": "int"},
        "rdma_subnets": {"type": "list", "elements": "str"},
        "host_set_hostname": {"type": "bool"},
        "nvme_l2_backend": {"type": "str", "choices": ["device", "image"]},
        "verify_limits": {"type": "dict", "options": {"rate_gbps": {"type": "float"}}},
        "goodput_platform": {"type": "str"},
        "host_token": {"type": "int", "no_log": True},
        "host_untyped": {},
    },
    prefixes=["goodput_", "rdma_", "host_", "nvme_l2_", "verify_"],
    choices={"goodput_release": ["current", "virtual"], "goodput_platform": ["systemd"]},
)


def site(**changes: Any) -> i.Site:
    base: dict[str, Any] = {
        "nodes": ["spark1", "spark2"],
        "addresses": {"spark1": "10.0.0.1", "spark2": "10.0.0.2"},
        "ports": {"spark1": 22, "spark2": 22},
        "management": {"spark1": "10.0.0.1", "spark2": "10.0.0.2"},
        "choices": {"goodput_release": "current"},
    }
    return i.Site(**(base | changes))


def with_variables(command_line: tuple[str, ...] = (), **variables: Any) -> i.Site:
    return site(variables={"spark1": variables, "spark2": variables}, command_line=frozenset(command_line))


def test_a_good_site_has_no_finding() -> None:
    assert i.validate(with_variables(rdma_mtu_bytes=9000, my_own="x", nvme_l2_backend="image"), KNOWN) == []


# --- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "guess"),
    [
        ("rdma_mtu_byte", "rdma_mtu_bytes"),
        ("host_set_hostnme", "host_set_hostname"),
        ("goodput_platfrm", "goodput_platform"),
    ],
)
def test_misspelt_variable_is_refused_with_the_nearest_name(name: str, guess: str) -> None:
    (finding,) = i.validate(site(variables={node: {name: 1} for node in ("spark1", "spark2")}), KNOWN)
    assert (finding.node, finding.check, finding.severity) == ("all", "variable", "error")
    assert name in finding.found and f"did you mean {guess}?" in finding.required


def test_a_name_that_continues_the_misspelt_one_is_nearest() -> None:
    assert i.nearest("preflight_arch", ["preflight_accept", "preflight_architecture"]) == "preflight_architecture"


def test_misspelt_on_one_host_names_that_host() -> None:
    (finding,) = i.validate(site(variables={"spark2": {"rdma_mtu": 1}}), KNOWN)
    assert finding.node == "spark2"


def test_misspelt_prefix_is_a_warning() -> None:
    (finding,) = i.validate(with_variables(rmda_mtu_bytes=9000), KNOWN)
    assert finding.severity == "warning" and "rdma_mtu_bytes" in finding.found


def test_own_variables_can_be_listed() -> None:
    one = site(variables={"spark1": {"host_rack": 3}}, foreign_variables=["host_rack"])
    assert i.validate(one, KNOWN) == []


# --- types ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "problem"),
    [
        ("rdma_mtu_bytes", "9000", "an integer, written without quotes"),
        ("rdma_mtu_bytes", "large", "an integer, written without quotes"),
        ("rdma_mtu_bytes", True, "an integer"),
        ("rdma_mtu_bytes", 1.5, "an integer"),
        ("host_set_hostname", "yes", "true or false, written without quotes"),
        ("host_set_hostname", 1, "true or false"),
        ("rdma_subnets", "10.0.0.0/24", "a list"),
        ("rdma_subnets", ["10.0.0.0/24", False], "text in quotes, as item 2"),
        ("nvme_l2_backend", "devise", "one of device, image"),
        ("nvme_l2_backend", False, "text in quotes"),
        ("nvme_l2_backend", 7.1, "text in quotes"),
        ("verify_limits", [], "a dictionary"),
        ("verify_limits", {"rate_gbs": 1}, "no key rate_gbs (did you mean rate_gbps?)"),
        ("verify_limits", {"rate_gbps": "fast"}, "a number, written without quotes, in rate_gbps"),
    ],
)
def test_wrong_type(name: str, value: Any, problem: str) -> None:
    (finding,) = i.validate(with_variables(**{name: value}), KNOWN)
    assert finding.check == "type" and finding.severity == "error"
    assert finding.found.startswith(f"{name}: ")
    assert problem in finding.required


def test_wrong_type_on_one_host_names_that_host() -> None:
    one = site(variables={"spark1": {"rdma_mtu_bytes": "9000"}, "spark2": {"rdma_mtu_bytes": 9000}})
    assert [finding.node for finding in i.validate(one, KNOWN)] == ["spark1"]


@pytest.mark.parametrize(
    ("name", "value", "good"),
    [
        ("rdma_mtu_bytes", "9000", True),
        ("rdma_mtu_bytes", "large", False),
        ("host_set_hostname", "yes", True),
        ("host_set_hostname", "maybe", False),
        ("rdma_subnets", "a,b", True),
    ],
)
def test_command_line_text_is_good_if_it_reads_as_the_type(name: str, value: str, good: bool) -> None:
    assert (i.validate(with_variables((name,), **{name: value}), KNOWN) == []) == good


@pytest.mark.parametrize("value", [None, "x", 5, [1]])
def test_a_variable_without_a_type_takes_anything(value: Any) -> None:
    assert i.validate(with_variables(host_untyped=value), KNOWN) == []


def test_secret_values_are_not_shown() -> None:
    (finding,) = i.validate(with_variables(host_token="hunter2"), KNOWN)
    assert "hunter2" not in " ".join(finding.as_dict().values())


def test_values_that_can_not_be_resolved_are_checked_for_spelling_only() -> None:
    one = site(variables={"spark1": {"rdma_mtu_bytes": None, "rdma_mtuu": None}})
    assert [finding.check for finding in i.validate(one, KNOWN)] == ["variable"]


# --- choices ----------------------------------------------------------------------------------------------------------


def test_unknown_choice_lists_the_known_ones() -> None:
    (finding,) = i.validate(site(choices={"goodput_release": "curent"}), KNOWN)
    assert finding.required == "one of current, virtual"
    assert finding.fix == "set goodput_release to current"


# --- inventory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "check", "severity", "part"),
    [
        ({"nodes": ["spark1"]}, "nodes", "warning", "one node works, without the RDMA proof"),
        ({"nodes": ["spark_1", "spark2"]}, "name", "error", 'inventory name "spark_1"'),
        ({"nodes": ["Spark1", "spark2"]}, "name", "error", "lower-case"),
        ({"nodes": ["10.0.0.1", "spark2"]}, "name", "error", "the address in ansible_host"),
        ({"nodes": ["-spark", "spark2"]}, "name", "error", "-spark"),
        ({"management": {"spark1": "spark1.local", "spark2": "10.0.0.2"}}, "address", "error", "spark1.local"),
        ({"management": {"spark1": "127.0.0.1", "spark2": "10.0.0.2"}}, "address", "error", "the other nodes reach"),
        ({"management": {"spark1": "192.0.2.11", "spark2": "10.0.0.2"}}, "address", "warning", "for documentation"),
        ({"management": {"spark1": "10.0.0.2", "spark2": "10.0.0.2"}}, "address", "error", "equal management address"),
        ({"addresses": {"spark1": "10.0.0.2", "spark2": "10.0.0.2"}}, "address", "error", "equal ansible_host"),
    ],
)
def test_inventory(changes: Mapping[str, Any], check: str, severity: str, part: str) -> None:
    changed = dict(changes)
    if "nodes" in changed:
        names = changed["nodes"]
        changed |= {
            "addresses": {name: f"10.0.0.{number}" for number, name in enumerate(names, 1)},
            "management": {name: f"10.0.0.{number}" for number, name in enumerate(names, 1)},
        }
    (finding,) = i.validate(site(**changed), KNOWN)
    assert (finding.check, finding.severity) == (check, severity)
    assert part in f"{finding.found} {finding.required}"


def test_one_address_with_different_ports_is_two_nodes() -> None:
    one = site(addresses={"spark1": "127.0.0.1", "spark2": "127.0.0.1"}, ports={"spark1": 2201, "spark2": 2202})
    assert i.validate(one, KNOWN) == []


def test_three_nodes_need_a_switch() -> None:
    names = ["spark1", "spark2", "spark3"]
    addresses = {name: f"10.0.0.{number}" for number, name in enumerate(names, 1)}
    (finding,) = i.validate(site(nodes=names, addresses=addresses, management=addresses), KNOWN)
    assert finding.severity == "warning" and "switch" in finding.required


def test_no_node_is_an_error() -> None:
    assert [finding.check for finding in i.validate(site(nodes=[]), KNOWN)] == ["nodes"]


def test_everything_is_listed_at_once() -> None:
    one = site(
        nodes=["spark_1", "spark2"],
        management={"spark_1": "x", "spark2": "10.0.0.2"},
        variables={"spark2": {"rdma_mtu": 1, "rdma_mtu_bytes": "9000"}},
        choices={"goodput_platform": "k8s"},
    )
    checks = {finding.check for finding in i.validate(one, KNOWN) if finding.severity == "error"}
    assert checks == {"name", "address", "variable", "type", "choice"}


# --- what the collection knows ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> i.Known:
    return i.load_known(ROOT)


def test_the_collection_knows_its_own_names(shipped: i.Known) -> None:
    assert shipped.options["host_swappiness"]["type"] == "int"
    assert shipped.options["goodput_virtual"]["type"] == "bool"
    assert {"goodput_", "host_", "preflight_"} <= set(shipped.prefixes)
    assert not any(prefix.startswith("_") for prefix in shipped.prefixes)
    assert {"current", "virtual"} <= set(shipped.choices["goodput_release"])
    assert "systemd" in shipped.choices["goodput_platform"]


def test_the_shipped_choices_are_good_inputs(shipped: i.Known) -> None:
    variables: dict[str, Any] = {}
    for path in sorted((ROOT / "group_vars/all").glob("*.yml")):
        variables |= i.read_yaml(path)
    plain = {name: value for name, value in variables.items() if "{{" not in str(value)}
    assert i.validate(with_variables(**plain), shipped) == []


def test_a_collection_without_group_vars_still_loads(tmp_path: Path) -> None:
    (tmp_path / "roles/rdma/meta").mkdir(parents=True)
    (tmp_path / "roles/rdma/meta/argument_specs.yml").write_text(
        "argument_specs: {main: {options: {rdma_mtu_bytes: {type: int}}}, reset: {}}\n"
    )
    known = i.load_known(tmp_path)
    assert known.options["rdma_mtu_bytes"] == {"type": "int"}
    assert known.choices["goodput_platform"] == ["systemd"]


# --- what a whole run needs -------------------------------------------------------------------------------------------

STOCK = {"model_store_models": [], "runtime_archive": "", "runtime_node_archive": "", "runtime_sha256": ""}
FULL = {
    "model_store_models": [{"name": "super"}],
    "runtime_archive": "/data/runtime.squashfs",
    "runtime_sha256": "ab",
    "rdma_netplan_apply": True,
}


def digests(**given: str) -> dict[str, Any]:
    return {"goodput_kube_choices": {"digests": given}}


DIGESTS = digests(runtime=f"sha256:{'1' * 64}", rdma_device_plugin=f"sha256:{'2' * 64}")


def release(name: str) -> dict[str, Any]:
    found: dict[str, Any] = i.read_yaml(ROOT / f"vars/releases/{name}.yml")["goodput_release_set"]
    return found


@pytest.mark.parametrize(
    ("values", "platform", "profile", "expected"),
    [
        (STOCK, "systemd", "virtual", ["profile", "model", "runtime", "rails"]),
        # Its engine stands in the profile that it inherits from.
        (FULL, "systemd", "virtual-router", ["profile"]),
        # Neither release set knows a digest; the RDMA plugin is for a real engine on several nodes.
        (STOCK, "k3s", "super-recommended", ["digest", "digest", "model", "rails"]),
        (FULL | DIGESTS, "k3s", "super-recommended", []),
        (FULL | digests(runtime=f"sha256:{'1' * 64}"), "k3s", "super-recommended", ["digest"]),
        (FULL | digests(runtime="latest", rdma_device_plugin="sha256:12"), "k3s", "super-recommended", ["digest"] * 2),
        (FULL | {"goodput_kube_choices": {"digest": {}}}, "k3s", "super-recommended", ["choices"]),
        (FULL | {"goodput_kube_choices": {"node_port": 80}}, "k3s", "super-recommended", ["choices"]),
        (STOCK | {"goodput_virtual": True}, "k3s", "virtual", ["digest"]),
        (FULL, "systemd", "super-recommended", []),
        (FULL | {"model_store_models": [{"name": "nano"}]}, "systemd", "super-recommended", ["model"]),
        (FULL | {"runtime_sha256": ""}, "systemd", "super-recommended", ["runtime"]),
        (STOCK | {"goodput_virtual": True}, "systemd", "virtual", []),
    ],
)
def test_what_a_run_to_the_first_token_will_miss_is_said_at_its_start(
    values: dict[str, Any], platform: str, profile: str, expected: list[str]
) -> None:
    known = i.load_known(ROOT)
    choices = {"goodput_platform": platform, "goodput_profile": profile}
    whole = site(variables={"spark1": values, "spark2": values}, choices=choices)
    found = list(i.missing(whole, known, "super", release("current")))
    assert [finding.check for finding in found] == expected
    # A consent is asked for again where it matters; rails that are right already need none.
    assert all((finding.severity == "warning") == (finding.check == "rails") for finding in found)


def test_one_node_on_kubernetes_needs_no_rdma_plugin() -> None:
    one = site(nodes=["spark1"], variables={"spark1": FULL}, choices={"goodput_platform": "k3s"})
    (finding,) = i.missing(one, i.load_known(ROOT), "super", release("article"))
    assert finding.check == "digest" and "digests.runtime" in finding.found and "goodput_kube_choices" in finding.fix


@pytest.mark.parametrize("virtual", [False, True])
def test_a_release_set_that_does_not_run_on_kubernetes_is_refused_with_it(virtual: bool) -> None:
    values = FULL | DIGESTS | {"goodput_virtual": virtual}
    known = i.load_known(ROOT)
    for platform, expected in (("k3s", ["release"]), ("systemd", [])):
        choices = {"goodput_platform": platform, "goodput_profile": "super-recommended"}
        whole = site(variables={"spark1": values, "spark2": values}, choices=choices)
        found = list(i.missing(whole, known, "super", release("virtual")))
        assert [finding.check for finding in found] == expected
