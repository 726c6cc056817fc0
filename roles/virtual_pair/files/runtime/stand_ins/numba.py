"""Stand-in for numba on the virtual pair: LMCache only decorates with it, and 190 MB of LLVM save nothing there."""

from collections.abc import Callable
from typing import Any


def njit(*arguments: Any, **_options: Any) -> Any:
    """Return the function as it is, with or without options: ``@njit`` and ``@njit(cache=True)``."""
    if arguments and callable(arguments[0]):
        return arguments[0]

    def same(function: Callable[..., Any]) -> Callable[..., Any]:
        return function

    return same


jit = njit
prange = range
