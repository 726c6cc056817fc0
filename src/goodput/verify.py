"""``python -m goodput.verify``: the acceptance run, or one plain line if a Python package for it is missing."""

from __future__ import annotations

import sys


def main() -> int:
    """Exit code of the verdict; 2 and the line to run if a package is missing."""
    try:
        from goodput.verdict import main as run
    except ModuleNotFoundError as error:
        fix = f"{sys.executable} -m pip install pytest pytest-testinfra rich"
        print(f"could not run: Python package {error.name} is missing; run: {fix}", file=sys.stderr)
        return 2
    return run()


if __name__ == "__main__":
    sys.exit(main())
