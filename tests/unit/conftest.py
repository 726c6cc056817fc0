"""Makes the checkout importable as ``ansible_collections.goodput.spark``, whatever started pytest.

The virtual environment has a .pth file for this; here it also works in another one, and when Ansible's own collection
finder is loaded, before or later (it searches ``sys.path`` and ``ANSIBLE_COLLECTIONS_PATH``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from ansible.utils.collection_loader import AnsibleCollectionConfig

ROOT = Path(__file__).resolve().parents[2]
COLLECTIONS = ROOT / "collections"

for entry in (ROOT / "src", ROOT / "tools", COLLECTIONS):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))
os.environ["ANSIBLE_COLLECTIONS_PATH"] = str(COLLECTIONS)
# A finder that is loaded already knows only the folders of its own configuration; it also looks beside a playbook.
if AnsibleCollectionConfig.collection_finder is not None:
    AnsibleCollectionConfig.playbook_paths = [str(ROOT)]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT
