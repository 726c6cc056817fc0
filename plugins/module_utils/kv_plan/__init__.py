# Apache-2.0 (see LICENSE)
"""The cache planner: ``profile + model geometry + node memory -> plan``.

Pure: only ``files`` reads files. Used by the filter ``goodput.spark.kv_plan``, the command ``goodput plan`` and tests.
"""

from __future__ import annotations

from .checks import PlanInputError
from .planner import make_plan
from .profile import Model, Neighbour, Node, Observed, Profile

__all__ = ["Model", "Neighbour", "Node", "Observed", "PlanInputError", "Profile", "make_plan"]
