# Apache-2.0 (see LICENSE)
"""Filters of the role k3s; thin, over module_utils/k3s_*.py. Each is documented beside this file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.goodput.spark.plugins.filter.preflight import management_address, report_of
from ansible_collections.goodput.spark.plugins.module_utils import k3s_config as config
from ansible_collections.goodput.spark.plugins.module_utils.k3s_preflight import Bounds, Seen, carrier_of, evaluate
from ansible_collections.goodput.spark.plugins.module_utils.k3s_release import K3sError, version_of_output

FACTS, PROBE = "__k3s_facts", "__k3s_probe"
OTHERS = {FACTS: "__k3s_other_facts", PROBE: "__k3s_other_probes"}


def refused(function: Callable[..., Any]) -> Callable[..., Any]:
    """Turn a refusal into the one line that Ansible prints."""

    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except K3sError as error:
            raise AnsibleFilterError(str(error)) from None

    return call


def choices_of(given: Mapping[str, Any]) -> config.Choices:
    try:
        return config.Choices(**{**given, "api_port": int(given.get("api_port", 6443))})
    except TypeError as problem:
        raise AnsibleFilterError(f"k3s choices: {problem}") from problem


def k3s_addresses(hostvars: Mapping[str, Any], nodes: Sequence[str]) -> dict[str, str]:
    """See k3s_addresses.yml."""
    return {name: str(hostvars[name].get("k3s_node_ip") or management_address(hostvars[name], name)) for name in nodes}


def answer_of(hostvars: Mapping[str, Any], nodes: Sequence[str], name: str, register: str) -> Mapping[str, Any]:
    """What a node answered: as a host of this play, or to one of them because --limit leaves it out."""
    own = hostvars[name].get(register)
    if own is not None:
        return dict(own)
    for node in nodes:
        for result in hostvars[node].get(OTHERS[register], {}).get("results", []):
            if result.get("__k3s_other") == name:
                return dict(result)
    return {}


def seen_of(hostvars: Mapping[str, Any], choices: config.Choices) -> list[Seen]:
    found = []
    for name in choices.nodes:
        values = hostvars[name]
        report = report_of(name, {FACTS: answer_of(hostvars, choices.nodes, name, FACTS)}, FACTS)
        probe = answer_of(hostvars, choices.nodes, name, PROBE)
        address = k3s_addresses(hostvars, [name])[name]
        interface = str(values.get("k3s_flannel_interface") or "")
        choice = config.NodeChoice(name, address, interface, bool((report.facts or {}).get("driver")))
        found.append(Seen(choice, report, probe))
    return found


def k3s_findings(
    hostvars: Mapping[str, Any], choices: Mapping[str, Any], bounds: Mapping[str, Any]
) -> list[dict[str, str]]:
    """See k3s_findings.yml."""
    chosen, given = choices_of(choices), Bounds(**bounds)
    path = Path(given.kubeconfig)
    former = path.read_text(encoding="utf-8", errors="replace") if given.kubeconfig and path.is_file() else ""
    return [finding.as_dict() for finding in evaluate(seen_of(hostvars, chosen), chosen, given, former)]


def k3s_node(hostvars: Mapping[str, Any], choices: Mapping[str, Any], name: str) -> dict[str, Any]:
    """See k3s_node.yml."""
    chosen = choices_of(choices)
    nodes = {seen.name: seen for seen in seen_of(hostvars, chosen)}
    seen = nodes[name]
    network = (seen.report.facts or {}).get("network", {"netdevs": {}})
    interface = seen.choice.interface or carrier_of(seen.choice.address, network)
    node = config.NodeChoice(name, seen.choice.address, interface, seen.choice.gpu)
    server_address = nodes[chosen.server].choice.address
    return {
        "server": name == chosen.server,
        "unit": "k3s" if name == chosen.server else "k3s-agent",
        "address": node.address,
        "url": config.server_url(server_address, chosen.api_port),
        "labels": config.labels_of(chosen, node),
        "config": config.node_config(chosen, node, server_address),
    }


class FilterModule:
    """Filters of the role k3s."""

    def filters(self) -> dict[str, Callable[..., Any]]:
        return {
            "k3s_addresses": k3s_addresses,
            "k3s_findings": refused(k3s_findings),
            "k3s_node": refused(k3s_node),
            "k3s_kubelet": refused(config.kubelet_config),
            "k3s_reservations": refused(config.reservations),
            "k3s_kubeconfig": refused(config.kubeconfig),
            "k3s_version": version_of_output,
        }
