# Apache-2.0 (see LICENSE)
"""Options of every module that looks at the models of a node; their types are ``model_manifest.NODE_ARGUMENTS``."""

from __future__ import annotations


class ModuleDocFragment:
    """``extends_documentation_fragment: goodput.spark.models``."""

    DOCUMENTATION = r"""
options:
  models:
    description: Manifests as the lookup goodput.spark.model_manifest returns them.
    type: list
    elements: dict
    required: true
  directory:
    description: Folder with one folder a model.
    type: path
    default: /srv/goodput/models
  cache:
    description: Where checksums of files that did not change since are kept on the node.
    type: path
    default: /var/lib/goodput/model_store.json
"""
