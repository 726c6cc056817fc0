"""Runs inside the environment of the real Dynamo: its mocker, frontend and runtime parsers on our argument lists."""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from typing import Any


class Refused(Exception):
    pass


def refuse(self: argparse.ArgumentParser, message: str) -> Any:
    raise Refused(message)


def mocker(words: list[str]) -> dict[str, Any]:
    from dynamo.mocker.args import parse_args

    found = parse_args(words)
    return {"block_size": found.block_size, "num_gpu_blocks": found.num_gpu_blocks}


def worker(words: list[str]) -> dict[str, Any]:
    """The arguments that every Dynamo worker takes beside its engine's."""
    from dynamo.common.configuration.groups.runtime_args import DynamoRuntimeArgGroup

    parser = argparse.ArgumentParser(allow_abbrev=False)
    DynamoRuntimeArgGroup().add_arguments(parser)
    found = parser.parse_args(words)
    return {"planes": [found.discovery_backend, found.request_plane, found.event_plane]}


def frontend(words: list[str]) -> dict[str, Any]:
    from dynamo.frontend.frontend_args import FrontendArgGroup, FrontendConfig

    parser = argparse.ArgumentParser(allow_abbrev=False)
    FrontendArgGroup().add_arguments(parser)
    config = FrontendConfig.from_cli_args(parser.parse_args(words))
    config.validate()
    return {"router_mode": str(config.router_mode)}


def main() -> None:
    request = json.load(sys.stdin)
    argparse.ArgumentParser.error = refuse  # type: ignore[method-assign,assignment]
    real = argparse.ArgumentParser.__init__

    def exact(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        real(self, *args, **{**kwargs, "allow_abbrev": False})

    argparse.ArgumentParser.__init__ = exact  # type: ignore[method-assign]
    answer: dict[str, Any] = {name: [] for name in request}
    try:
        for name, function in (("mocker", mocker), ("worker", worker), ("frontend", frontend)):
            for words in request.get(name, []):
                try:
                    result = function(words)
                    answer[name].append(result | {"arguments": sum(word.startswith("--") for word in words)})
                except (Refused, ValueError, TypeError) as error:
                    answer[name].append({"error": f"{type(error).__name__}: {error}"})
    except Exception:
        answer = {"crash": traceback.format_exc()}
    print("\n" + json.dumps(answer), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
