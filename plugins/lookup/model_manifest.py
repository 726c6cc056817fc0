# Apache-2.0 (see LICENSE)
"""The manifest of a model that the controller has."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as logic

DOCUMENTATION = r"""
name: model_manifest
short_description: Manifest of a model on the controller
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Returns name, revision and files with size and sha256 of each model. Read from C(manifest), else from
    C(.goodput-manifest.json) in C(source). If that file does not exist it is made once, which reads the whole model.
  - Fails if the files in C(source) are not those of the manifest.
options:
  _terms:
    description: >-
      Models, each a dictionary with C(name), C(revision), and C(source) (folder on the controller) or C(manifest) (a
      manifest of ours or the output of sha256sum) or both.
    type: list
    elements: dict
    required: true
"""

EXAMPLES = r"""
- name: Show a manifest
  ansible.builtin.debug:
    msg: "{{ lookup('goodput.spark.model_manifest', {'name': 'nano', 'revision': 'abc', 'source': '/data/nano'}) }}"
"""

RETURN = r"""
_list:
  description: One manifest a model, with C(format), C(name), C(revision), C(files).
  type: list
  elements: dict
"""


class LookupModule(LookupBase):  # type: ignore[misc]
    def run(self, terms: list[Any], variables: dict[str, Any] | None = None, **kwargs: Any) -> list[dict[str, Any]]:
        found = []
        for term in terms:
            try:
                model = logic.of_source(
                    str(term.get("name") or ""),
                    str(term.get("revision") or ""),
                    str(term.get("source") or ""),
                    str(term.get("manifest") or ""),
                )
            except logic.ModelError as error:
                raise AnsibleLookupError(f"model_store_models: {error}") from error
            except OSError as error:
                raise AnsibleLookupError(f"model_store_models: {term.get('name')}: {error}") from error
            found.append(model.as_dict())
        return found
