"""Makes the checkout importable as ``ansible_collections.goodput.spark``, whatever started pytest.

The virtual environment has a .pth file for this; here it also works in another one, and when Ansible's own collection
finder is loaded later (it searches ``sys.path`` and ``ANSIBLE_COLLECTIONS_PATH``).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COLLECTIONS = ROOT / "collections"

for entry in (ROOT / "src", ROOT / "tools", COLLECTIONS):
    if str(entry) not in sys.path:
        sys.path.insert(0, str(entry))
os.environ["ANSIBLE_COLLECTIONS_PATH"] = str(COLLECTIONS)
# A finder that was loaded before this file only knows the folders of its own configuration.
_package = sys.modules.get("ansible_collections")
if _package is not None and str(COLLECTIONS / "ansible_collections") not in list(_package.__path__):
    _package.__path__ = [*_package.__path__, str(COLLECTIONS / "ansible_collections")]


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return ROOT
