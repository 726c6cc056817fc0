"""Runs inside the environment of the real LMCache; one JSON request on stdin, one JSON answer as the last stdout line.

``parse``: every argument list goes through LMCache's own parser and its conversion to configuration objects.
``staging``: the real storage manager stores and restores chunks with the L1 given, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import traceback
import types
from typing import Any, ClassVar
from unittest import mock

os.environ.setdefault("LMCACHE_TRACK_USAGE", "false")
os.environ.setdefault("LMCACHE_LOG_LEVEL", "ERROR")

MIB = 2**20


class Seen(dict):  # type: ignore[type-arg]
    """A dict that notes which keys are asked for."""

    asked: ClassVar[set[str]] = set()

    def get(self, key: str, default: Any = None) -> Any:
        Seen.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        Seen.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        Seen.asked.add(str(key))
        return super().__contains__(key)


class Refused(Exception):
    pass


def strict(command: Any) -> argparse.ArgumentParser:
    """The command's parser; no abbreviations, and an exception instead of an exit."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    command.add_arguments(parser)

    def error(message: str) -> Any:
        raise Refused(message)

    parser.error = error  # type: ignore[method-assign]
    return parser


def without_awscrt() -> None:
    """Let LMCache's S3 adapter be imported where Amazon's client library is not: its configuration does not use it."""
    for name in ("awscrt", "awscrt.http", "awscrt.io"):
        module = types.ModuleType(name)
        module.__getattr__ = lambda attribute: mock.MagicMock()  # type: ignore[method-assign]
        sys.modules.setdefault(name, module)


def parse(request: dict[str, Any]) -> dict[str, Any]:
    without_awscrt()
    from lmcache.cli.commands.coordinator import CoordinatorCommand
    from lmcache.cli.commands.server import ServerCommand
    from lmcache.v1.distributed import config as storage
    from lmcache.v1.distributed.l2_adapters import config as adapters
    from lmcache.v1.multiprocess import config as server

    answer: dict[str, Any] = {"server": [], "coordinator": []}
    real_loads = adapters.json.loads

    class Json:
        JSONDecodeError = json.JSONDecodeError

        @staticmethod
        def loads(text: str) -> Any:
            value = real_loads(text)
            return Seen(value) if isinstance(value, dict) else value

    adapters.json = Json  # type: ignore[assignment]
    wrapped: set[str] = set()
    for words in request["server"]:
        Seen.asked = set()
        try:
            arguments = strict(ServerCommand()).parse_args(words)
            for raw in arguments.l2_adapter or []:
                kind = real_loads(raw)["type"]
                adapters._ensure_config_loaded(kind)
                if kind not in wrapped:
                    wrapped.add(kind)
                    found = adapters.get_l2_adapter_config_class(kind)
                    original = found.from_dict.__func__  # type: ignore[attr-defined]
                    found.from_dict = classmethod(lambda cls, d, f=original: f(cls, Seen(d)))  # type: ignore[method-assign]
            manager = storage.parse_args_to_config(arguments)
            storage.normalize_storage_manager_config(manager)
            storage.validate_storage_manager_config(manager)
            mp_config = server.parse_args_to_mp_server_config(arguments)
            p2p = server.parse_args_to_p2p_config(arguments)
            server.parse_args_to_http_frontend_config(arguments)
            server.parse_args_to_coordinator_config(arguments)
            memory = manager.l1_manager_configs[0].memory_config
            answer["server"].append(
                {
                    "arguments": sum(word.startswith("--") for word in words),
                    "l1_bytes": memory.size_in_bytes,
                    "chunk_tokens": mp_config.chunk_size,
                    "p2p": bool(p2p.enabled),
                    "adapter_keys": sorted(Seen.asked),
                }
            )
        except (Refused, ValueError, KeyError, TypeError) as error:
            answer["server"].append({"error": f"{type(error).__name__}: {error}"})
    for words in request["coordinator"]:
        try:
            strict(CoordinatorCommand()).parse_args(words)
            answer["coordinator"].append({"arguments": sum(word.startswith("--") for word in words)})
        except Refused as error:
            answer["coordinator"].append({"error": str(error)})
    return answer


def staging(request: dict[str, Any]) -> dict[str, Any]:
    """Scenarios of restores; chunks are 1 MiB, L1 is ``slots`` of them, every prompt was stored before."""
    answer = []
    for scenario in request["scenarios"]:
        with tempfile.TemporaryDirectory() as folder:
            answer.append(_scenario(scenario, folder))
    return {"scenarios": answer}


def _scenario(scenario: dict[str, Any], folder: str) -> dict[str, Any]:
    import torch
    from lmcache.v1.distributed import config as storage
    from lmcache.v1.distributed.api import GroupedObjectKeys, MemoryLayoutDesc, ObjectKey, PrefetchTaskSpec
    from lmcache.v1.distributed.storage_manager import StorageManager

    adapter = {"type": "fs_native", "base_path": folder, "num_workers": 2}
    words = ["--l1-size-gb", str(scenario["slots"] / 1024), "--no-l1-use-lazy", "--l1-align-bytes", "4096"]
    words += ["--eviction-policy", scenario.get("policy", "LRU")]
    words += ["--eviction-trigger-watermark", str(scenario.get("watermark", 0.8))]
    words += ["--l2-store-policy", scenario.get("store", "skip_l1"), "--l2-prefetch-policy", "default"]
    words += ["--l2-prefetch-max-in-flight", str(scenario.get("in_flight", 8)), "--l2-adapter", json.dumps(adapter)]
    manager = StorageManager(storage.parse_args_to_config(storage.get_arg_parser().parse_args(words)))
    layout = MemoryLayoutDesc([torch.Size([MIB])], [torch.uint8])

    def prompt(name: str, chunks: int) -> list[Any]:
        return [ObjectKey(f"{name}{index:08d}".encode().ljust(32, b"0"), "model", 0) for index in range(chunks)]

    def wait(condition: Any, what: str) -> None:
        end = time.monotonic() + 60
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(what)
            time.sleep(0.02)

    def files() -> int:
        return sum(name.endswith(".data") for name in os.listdir(folder))

    def used() -> int:
        return manager.get_l1_usage()[0] // MIB

    def store(keys: list[Any], keep: bool) -> None:
        # In batches that L1 holds; each batch reaches the disk before the next one.
        for start in range(0, len(keys), 8):
            batch = keys[start : start + 8]
            before = files()
            if len(manager.reserve_write(batch, layout)) != len(batch):
                raise MemoryError("no room to store")
            manager.finish_write(batch)
            wait(lambda before=before, batch=batch: files() == before + len(batch), "store to L2")
            if not keep:
                wait(lambda: used() == 0, "L1 to empty")

    def restore(keys: list[Any]) -> Any:
        spec = PrefetchTaskSpec([GroupedObjectKeys(keys, 0, layout)])
        return manager.submit_prefetch_task(spec)

    def hits(handle: Any) -> int:
        if not manager.wait_prefetch_status(handle, 60):
            raise TimeoutError("prefetch")
        result = manager.query_prefetch_status(handle)
        return int(result.l1_hit_count + result.l2_hit_count)

    try:
        retained = scenario.get("resident", 0)
        prompts = {name: prompt(name, count) for name, count in scenario["prompts"].items()}
        for name, keys in prompts.items():
            store(keys, keep=retained > 0)
            if retained:
                manager.delete_l1_keys(keys, force=True)
            del name
        if retained:
            store(prompt("R", retained), keep=True)
            time.sleep(scenario.get("settle", 2.5))  # let the 1 Hz eviction loop do what it will
        outcome = []
        for step in scenario["steps"]:
            if "together" in step:
                handles = [(name, restore(prompts[name])) for name in step["together"]]
                outcome.append([hits(handle) for _name, handle in handles])
            elif "read" in step:
                manager.finish_read_prefetched(prompts[step["read"]])
        return {"hits": outcome, "used": used(), "files": files()}
    finally:
        manager.close()


def main() -> None:
    request = json.load(sys.stdin)
    try:
        answer = {"parse": parse, "staging": staging}[request["do"]](request)
    except Exception:
        answer = {"crash": traceback.format_exc()}
    print("\n" + json.dumps(answer), flush=True)
    # Threads of a half-built manager must not keep the process.
    os._exit(0)


if __name__ == "__main__":
    main()
