"""Runs inside the environment of the real vLLM on a machine without a GPU.

``parse``: argument lists through vLLM's own parser and engine arguments. ``sizes``: a model's ``config.json`` through
vLLM's engine configuration, ``Platform._align_hybrid_block_size``, its KV cache groups and its capacity.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from typing import Any


class Refused(Exception):
    pass


def parser() -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    found = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    found.allow_abbrev = False

    def error(message: str) -> Any:
        raise Refused(message)

    found.error = error
    return found


def parse(request: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs

    command, answer = parser(), []
    # A model path that is there, or vLLM looks for a repository of that name.
    folder = tempfile.mkdtemp()
    for given in request["vllm"]:
        words = [folder if before == "--model" else word for before, word in zip(["", *given], given, strict=False)]
        try:
            engine = AsyncEngineArgs.from_cli_args(command.parse_args(words))
            transfer = engine.kv_transfer_config
            answer.append(
                {
                    "arguments": sum(word.startswith("--") for word in words),
                    "kv_cache_memory_bytes": engine.kv_cache_memory_bytes,
                    "max_num_batched_tokens": engine.max_num_batched_tokens,
                    "utilization": engine.gpu_memory_utilization,
                    "connector": transfer.kv_connector if transfer else None,
                    "events": bool(engine.kv_events_config and engine.kv_events_config.enable_kv_cache_events),
                }
            )
        except (Refused, ValueError, TypeError) as error:
            answer.append({"error": f"{type(error).__name__}: {error}"})
    return {"vllm": answer}


def sizes(request: dict[str, Any]) -> dict[str, Any]:
    return {"cases": [_sizes(case) for case in request["cases"]]}


def _sizes(case: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.model_executor.models import ModelRegistry
    from vllm.platforms.interface import Platform
    from vllm.utils.torch_utils import STR_DTYPE_TO_TORCH_DTYPE
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheSpec, MambaSpec

    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w") as out:
            json.dump(case["config"], out)
        words = [
            "--model",
            folder,
            "--skip-tokenizer-init",
            "--block-size",
            str(case.get("block_size", 16)),
            *case["args"],
        ]
        config = AsyncEngineArgs.from_cli_args(parser().parse_args(words)).create_engine_config()
        # The CPU platform does not align to the GPU's kernels; the function that does is the same one.
        cache, model, parallel = config.cache_config, config.model_config, config.parallel_config

        class Backend:
            """FlashAttention's kernel block sizes with a 2-byte state; the real class needs its GPU extension."""

            @staticmethod
            def get_supported_kernel_block_sizes() -> list[int]:
                return [16]

        Platform._align_hybrid_block_size(config, Backend)  # type: ignore[arg-type]
        found, _name = ModelRegistry.resolve_model_cls(model.architecture, model_config=model)
        specs: dict[str, KVCacheSpec] = {}
        for index, kind in enumerate(case["kinds"]):
            if kind == "attention":
                specs[f"layers.{index}"] = FullAttentionSpec(
                    block_size=cache.block_size,
                    num_kv_heads=model.get_num_kv_heads(parallel),
                    head_size=model.get_head_size(),
                    dtype=STR_DTYPE_TO_TORCH_DTYPE[cache.cache_dtype],
                )
            elif kind == "mamba":
                specs[f"layers.{index}"] = MambaSpec(
                    shapes=tuple(found.get_mamba_state_shape_from_config(config)),
                    dtypes=found.get_mamba_state_dtype_from_config(config),
                    block_size=cache.mamba_block_size,
                    page_size_padded=cache.mamba_page_size_padded,
                    mamba_cache_mode=cache.mamba_cache_mode,
                )
        result = kv_cache_utils.get_kv_cache_configs(config, [specs], [case["kv_bytes"]])[0]
        concurrency = kv_cache_utils.get_max_concurrency_for_kv_cache_config(config, result)
        return {
            "block_tokens": cache.block_size,
            "page_bytes": next(iter(specs.values())).page_size_bytes,
            "groups": len(result.kv_cache_groups),
            "blocks": result.num_blocks,
            "tokens": int(concurrency * model.max_model_len),
        }


def main() -> None:
    request = json.load(sys.stdin)
    real = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to stdout
    try:
        import vllm.platforms
        from vllm.platforms.cpu import CpuPlatform

        vllm.platforms._current_platform = CpuPlatform()
        answer = {"parse": parse, "sizes": sizes}[request["do"]](request)
    except Exception:
        answer = {"crash": traceback.format_exc()}
    os.write(real, ("\n" + json.dumps(answer) + "\n").encode())
    os._exit(0)


if __name__ == "__main__":
    main()
