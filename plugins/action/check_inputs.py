# Copyright: (c) The goodput.spark authors
# SPDX-License-Identifier: Apache-2.0
"""Check a site's inputs on the controller, before any node is asked."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ansible.errors import AnsibleError
from ansible.plugins.action import ActionBase
from ansible.utils.vars import load_extra_vars
from ansible_collections.goodput.spark.plugins.module_utils import inputs
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan import files
from ansible_collections.goodput.spark.plugins.module_utils.kv_plan.checks import PlanInputError
from ansible_collections.goodput.spark.plugins.module_utils.preflight import ERROR, accept, render_table

PLAIN = (str, bool, int, float, list, tuple, Mapping, type(None))


class ActionModule(ActionBase):  # type: ignore[misc]
    _requires_connection = False
    _supports_check_mode = True
    _supports_async = False
    _VALID_ARGS = frozenset(("nodes", "release", "profile", "platform", "foreign_variables", "whole_site", "accept"))

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        result: dict[str, Any] = super().run(tmp, task_vars)
        variables = task_vars or {}
        # The collection's own directory, in a clone as in an installed collection.
        root = Path(__file__).resolve().parents[2]
        known = inputs.load_known(root)
        site = self._site(variables, known)
        findings = [finding.as_dict() for finding in inputs.validate(site, known)]
        errors = [finding for finding in findings if finding["severity"] == ERROR]
        result.update(changed=False, findings=findings, release_set={})
        if errors:
            result.update(failed=True, msg=render_table(findings, "inputs"))
            return result
        release = root / "vars/releases" / f"{site.choices['goodput_release']}.yml"
        release_set = result["release_set"] = inputs.read_yaml(release).get("goodput_release_set", {})
        # Shown with what is found on the nodes: an owner gets one list.
        whole = self._task.args.get("whole_site")
        lacking = inputs.missing(site, known, self._folder(site), release_set) if whole else []
        accepted = accept(lacking, self._task.args.get("accept") or [])
        result["findings"] += [finding.as_dict() for finding in accepted]
        result["msg"] = render_table(findings, "inputs")
        return result

    def _site(self, task_vars: Mapping[str, Any], known: inputs.Known) -> inputs.Site:
        arguments = self._task.args
        nodes = [str(node) for node in arguments.get("nodes") or []]
        hostvars = task_vars["hostvars"]
        per_node: dict[str, dict[str, Any]] = {}
        addresses, ports, management = {}, {}, {}
        for node in nodes:
            if node not in hostvars:
                raise AnsibleError(
                    f"{node} is named in nodes but is not in the inventory: add it, or correct preflight_nodes"
                )
            values = hostvars[node]
            addresses[node] = str(self._resolve(values, "ansible_host", node))
            ports[node] = int(self._resolve(values, "ansible_port", 22) or 22)
            management[node] = str(self._resolve(values, "goodput_management_address", addresses[node]))
            per_node[node] = {}
            # Play variables are in task_vars only; the host's own are in both.
            for name in {*values, *task_vars}:
                if not isinstance(name, str) or name.startswith(("ansible_", "__", "inventory_", "omit")):
                    continue
                value = self._resolve(values, name, None)
                per_node[node][name] = value if isinstance(value, PLAIN) else None
        choices = {
            f"goodput_{name}": str(arguments[name])
            for name in ("release", "profile", "platform")
            # A path of a profile is the planner's to judge.
            if arguments.get(name) not in (None, "") and "/" not in str(arguments[name])
        }
        return inputs.Site(
            nodes=nodes,
            addresses=addresses,
            ports=ports,
            management=management,
            variables=per_node,
            command_line=frozenset(load_extra_vars(self._loader)),
            foreign_variables=arguments.get("foreign_variables") or [],
            choices=choices,
        )

    @staticmethod
    def _folder(site: inputs.Site) -> str:
        """Folder of the planned model; empty where the planner will say why there is none."""
        values = site.variables[site.nodes[0]] if site.nodes else {}
        try:
            profile = files.load_profile_or_mapping(values.get("goodput_profile"), values.get("goodput_profile_set"))
            return str(files.load_model(values.get("goodput_model") or profile.model).folder)
        except PlanInputError:
            return ""

    @staticmethod
    def _resolve(values: Mapping[str, Any], name: str, default: Any) -> Any:
        """The variable's value, or the default if it is not set or can not be resolved outside its role."""
        try:
            return values.get(name, default)
        except AnsibleError:
            return default
