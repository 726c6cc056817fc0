# Apache-2.0 (see LICENSE)
"""The manifest of a model that the controller has, or a hub."""

from __future__ import annotations

import os
from typing import Any

from ansible.errors import AnsibleLookupError
from ansible.plugins.lookup import LookupBase
from ansible_collections.goodput.spark.plugins.module_utils import model_hub
from ansible_collections.goodput.spark.plugins.module_utils import model_manifest as logic

DOCUMENTATION = r"""
name: model_manifest
short_description: Manifest of a model
version_added: 0.1.0
author: The goodput.spark authors
description:
  - Returns name, revision and files with size and sha256 of each model. Read from C(manifest), else from
    C(.goodput-manifest.json) in C(source). If that file does not exist it is made once, which reads the whole model.
  - Fails if the files in C(source) are not those of the manifest.
  - With C(repository) it is asked of the hub once and kept in C(manifest), or in O(directory) as C(NAME-REVISION.json);
    later runs need no hub.
options:
  _terms:
    description: >-
      Models, each a dictionary with C(name), C(revision), and C(source) (folder on the controller) or C(manifest) (a
      manifest of ours or the output of sha256sum) or both, or with C(repository) (C(OWNER/NAME) on the hub).
    type: list
    elements: dict
    required: true
  endpoint:
    description: The hub.
    type: str
    default: https://huggingface.co
  token_file:
    description: File with the hub's token, mode 0600. Read only when the hub is asked.
    type: str
    default: ""
  directory:
    description: Where manifests of repositories are kept on the controller.
    type: str
    default: ""
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
        self.set_options(var_options=variables, direct=kwargs)
        found = []
        for term in terms:
            entry = {key: str(term.get(key) or "") for key in ("name", "revision", "source", "manifest", "repository")}
            try:
                found.append((self._of_hub(**entry) if entry["repository"] else _of_source(**entry)).as_dict())
            except logic.ModelError as error:
                raise AnsibleLookupError(f"model_store_models: {error}") from error
            except OSError as error:
                raise AnsibleLookupError(f"model_store_models: {entry['name']}: {error}") from error
        return found

    def _of_hub(self, name: str, revision: str, source: str, manifest: str, repository: str) -> logic.Model:
        directory = os.path.expanduser(self.get_option("directory"))
        if source or not (manifest or directory):
            raise logic.ModelError(
                f"{'source and' if source else 'no place for the manifest of'} repository of model {name}",
                "either source or repository, and a manifest or the folder for it",
                "correct model_store_models or model_store_manifest_directory",
            )

        def hub() -> model_hub.Hub:
            return model_hub.Hub(self.get_option("endpoint"), model_hub.read_token(self.get_option("token_file")))

        where = manifest or os.path.join(directory, f"{logic.checked_name(name)}-{revision}.json")
        return model_hub.of_repository(hub, name, revision, repository, where)


def _of_source(name: str, revision: str, source: str, manifest: str, repository: str) -> logic.Model:
    return logic.of_source(name, revision, source, manifest)
