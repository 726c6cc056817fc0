# Apache-2.0 (see LICENSE)
"""Input checks shared by the planner: one error type, one way to say what was found, the rule and the remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable

MIB = 2**20
GIB = 2**30
# Above this an integer is a typing error, not a size: 1 EiB.
HUGE = 2**60


class PlanInputError(ValueError):
    """Bad input (not a refused plan): ``value`` was found, ``rule`` says what is allowed, ``remedy`` what to do."""

    def __init__(self, name: str, value: object, rule: str, remedy: str) -> None:
        shown = repr(value)
        self.name, self.value, self.rule, self.remedy = name, value, rule, remedy
        super().__init__(f"{name}: found {shown if len(shown) <= 120 else shown[:117] + '...'}; {rule}; {remedy}")


def nearest(name: str, known: Iterable[str]) -> str:
    """A phrase that names the closest known word, or all of them."""
    words = sorted(known)
    close = difflib.get_close_matches(name, words, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else "known: " + ", ".join(words)


def whole(name: str, value: object, low: int = 1, high: int = HUGE, unit: str = "") -> int:
    """``value`` as an int between ``low`` and ``high``; bool, float and text are refused."""
    what = f"must be a whole number{' of ' + unit if unit else ''} from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanInputError(name, value, what, "give a plain number; the unit is in the name")
    if not low <= value <= high:
        raise PlanInputError(name, value, what, "give a value inside the range")
    return int(value)


def number(name: str, value: object, low: float, high: float, unit: str = "") -> float:
    """``value`` as a finite float between ``low`` and ``high``; text such as ``8GB`` is refused."""
    what = f"must be a number{' of ' + unit if unit else ''} from {low:g} to {high:g}"
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise PlanInputError(name, value, what, "give a plain number; the unit is in the name")
    if not math.isfinite(value) or not low <= value <= high:
        raise PlanInputError(name, value, what, "give a finite value inside the range")
    return float(value)


def gib_to_bytes(gib: float) -> int:
    """GiB to bytes, rounded down as LMCache does (``int(size_gb * 2**30)``)."""
    return int(gib * GIB)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
