# Apache-2.0 (see LICENSE)
"""A load for one GPU without any Python package: matrix products and memory reads through cuBLAS by ctypes.

Run as a program (``python3 power_load.py --seconds 12``) it prints JSON lines. It is a program of its own because
a hung CUDA call can not be interrupted from within. libcuda comes with the driver, libcublas with the CUDA toolkit that
DGX OS preinstalls.

Two kinds of work alternate for the whole time, each window timed by CUDA events:

* GEMM: bf16 with fp32 accumulation, 4096 x 4096 x 4096, random values (zeros draw less power and clock higher).
  TFLOP/s = 2 * n^3 * products / seconds / 1e12.
* GEMV: fp32, a matrix of 1 GiB read once for each product. GB/s = 4 * rows * columns * products / seconds / 1e9.
  The fast and the slow state of the memory flip every 7 to 32 s at unchanged clocks, so one look is not enough.

It ends after ``--seconds`` or at SIGTERM. First line: ``state`` started, once the GPU is busy. Last line: ``state``
done or inconclusive, ``reason``, and if done ``tflops`` and ``gb_s`` (each median, min, max and windows), ``seconds``,
``device``, ``cublas``, ``libraries``.
"""

from __future__ import annotations

import argparse
import ctypes
import glob
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

N = 4096
GEMV_ROWS, GEMV_COLUMNS = 8192, 32768
GEMM_WINDOW_SECONDS, GEMV_WINDOW_SECONDS = 0.8, 0.3
# cublas_api.h, library_types.h
CUDA_R_16BF = 14
CUBLAS_COMPUTE_32F = 68
CUBLAS_GEMM_DEFAULT = -1
CUBLAS_OP_N, CUBLAS_OP_T = 0, 1
CUBLAS_NAMES = ("libcublas.so.13", "libcublas.so.12", "libcublas.so")
TOOLKIT_DIRECTORIES = (
    "/usr/local/cuda/lib64",
    "/usr/local/cuda/targets/*/lib",
    "/usr/local/cuda-*/lib64",
    "/usr/lib/*-linux-gnu",
)
ONE = 0x3F800000


class LoadError(Exception):
    """No load can be made; the text says what was found and required."""


def library_paths(names: Sequence[str], directories: Sequence[str]) -> Iterator[str]:
    """Where a library may be: directories that were named, the loader's own search, the toolkit's directories."""
    for pattern in directories:
        for directory in sorted(glob.glob(pattern)):
            yield from (path for name in names if os.path.exists(path := os.path.join(directory, name)))
    yield from names
    for pattern in TOOLKIT_DIRECTORIES:
        for directory in sorted(glob.glob(pattern)):
            yield from (path for name in names if os.path.exists(path := os.path.join(directory, name)))


def open_library(names: Sequence[str], directories: Sequence[str], needs: str) -> tuple[ctypes.CDLL, str]:
    """The first library that loads, and its path. Raises LoadError."""
    said = ""
    for path in library_paths(names, directories):
        beside = os.path.join(os.path.dirname(path), os.path.basename(path).replace("cublas", "cublasLt"))
        try:
            # cuBLAS needs its other half, which a directory outside the loader's search does not give it.
            if beside != path and os.path.dirname(path) and os.path.exists(beside):
                ctypes.CDLL(beside, mode=ctypes.RTLD_GLOBAL)
            return ctypes.CDLL(path), path
        except OSError as error:
            said = str(error)
    raise LoadError(f"found no {' or '.join(names)} ({said}), required {needs}")


class Gpu:
    """One device: its primary context, memory and events through the driver API, and a cuBLAS handle."""

    def __init__(self, index: int, directories: Sequence[str]) -> None:
        self.cuda, cuda_path = open_library(("libcuda.so.1",), (), "the NVIDIA driver")
        self.blas, blas_path = open_library(
            CUBLAS_NAMES, directories, "cuBLAS of the CUDA toolkit (DGX OS preinstalls it)"
        )
        self.libraries = [cuda_path, blas_path]
        self.call("cuInit", 0)
        device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuDeviceGet", ctypes.byref(device), index)
        name = ctypes.create_string_buffer(128)
        self.call("cuDeviceGetName", name, 128, device)
        self.name = name.value.decode("utf-8", "replace")
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.handle = ctypes.c_void_p()
        self.blas_call("cublasCreate_v2", ctypes.byref(self.handle))
        version = ctypes.c_int()
        self.blas_call("cublasGetVersion_v2", self.handle, ctypes.byref(version))
        self.version = version.value
        self.events = [ctypes.c_void_p(), ctypes.c_void_p()]
        for event in self.events:
            self.call("cuEventCreate", ctypes.byref(event), 0)

    def call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self.cuda, name)(*arguments))
        if status != 0:
            text = ctypes.c_char_p()
            self.cuda.cuGetErrorName(status, ctypes.byref(text))
            raise LoadError(f"{name} failed with {status} ({(text.value or b'unknown').decode()})")

    def blas_call(self, name: str, *arguments: Any) -> None:
        status = int(getattr(self.blas, name)(*arguments))
        if status != 0:
            raise LoadError(f"{name} failed with cuBLAS status {status}")

    def allocate(self, size_bytes: int) -> ctypes.c_uint64:
        pointer = ctypes.c_uint64()
        self.call("cuMemAlloc_v2", ctypes.byref(pointer), ctypes.c_size_t(size_bytes))
        return pointer

    def random_bf16(self, count: int) -> ctypes.c_uint64:
        """``count`` values between 0.5 and 2 in size, either sign."""
        signs = bytes(0x3F | (value & 0x80) for value in range(256))
        data = bytearray(2 * count)
        data[0::2] = os.urandom(count)
        data[1::2] = os.urandom(count).translate(signs)
        pointer = self.allocate(2 * count)
        self.call("cuMemcpyHtoD_v2", pointer, bytes(data), ctypes.c_size_t(2 * count))
        return pointer

    def ones_fp32(self, count: int) -> ctypes.c_uint64:
        pointer = self.allocate(4 * count)
        self.call("cuMemsetD32_v2", pointer, ctypes.c_uint(ONE), ctypes.c_size_t(count))
        return pointer

    def seconds(self, work: Callable[[], None], count: int) -> float:
        """Device time of ``count`` calls of ``work``."""
        start, end = self.events
        self.call("cuEventRecord", start, None)
        for _ in range(count):
            work()
        self.call("cuEventRecord", end, None)
        self.call("cuEventSynchronize", end)
        milliseconds = ctypes.c_float()
        self.call("cuEventElapsedTime", ctypes.byref(milliseconds), start, end)
        return milliseconds.value / 1000


def summary(values: Sequence[float]) -> dict[str, float | int]:
    return {
        "median": round(statistics.median(values), 2),
        "min": round(min(values), 2),
        "max": round(max(values), 2),
        "windows": len(values),
    }


def run(
    seconds: float, warmup_seconds: float, index: int, directories: Sequence[str], stop: Callable[[], bool]
) -> dict[str, Any]:
    """Load the device until ``stop`` says so, at most for ``warmup_seconds + seconds``; only the latter count.

    Raises LoadError.
    """
    gpu = Gpu(index, directories)
    left, right, product = gpu.random_bf16(N * N), gpu.random_bf16(N * N), gpu.allocate(2 * N * N)
    matrix, vector, result = (
        gpu.ones_fp32(GEMV_ROWS * GEMV_COLUMNS),
        gpu.ones_fp32(GEMV_ROWS),
        gpu.ones_fp32(GEMV_COLUMNS),
    )
    one, zero = ctypes.c_float(1.0), ctypes.c_float(0.0)

    def gemm() -> None:
        gpu.blas_call(
            "cublasGemmEx", gpu.handle, CUBLAS_OP_N, CUBLAS_OP_N, N, N, N, ctypes.byref(one), left, CUDA_R_16BF, N,
            right, CUDA_R_16BF, N, ctypes.byref(zero), product, CUDA_R_16BF, N, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT,
        )  # fmt: skip

    def gemv() -> None:
        # Transposed: every output is a dot product of one contiguous column.
        gpu.blas_call(
            "cublasSgemv_v2", gpu.handle, CUBLAS_OP_T, GEMV_ROWS, GEMV_COLUMNS, ctypes.byref(one), matrix, GEMV_ROWS,
            vector, 1, ctypes.byref(zero), result, 1,
        )  # fmt: skip

    gpu.seconds(gemm, 1), gpu.seconds(gemv, 1)
    gemms = max(1, round(GEMM_WINDOW_SECONDS / gpu.seconds(gemm, 10) * 10))
    gemvs = max(1, round(GEMV_WINDOW_SECONDS / gpu.seconds(gemv, 5) * 5))
    tflops: list[float] = []
    gb_s: list[float] = []
    # Whoever samples begins now: starting CUDA and filling memory takes seconds.
    print(json.dumps({"state": "started"}), flush=True)
    begin = time.monotonic()
    while (spent := time.monotonic() - begin) < warmup_seconds + seconds and not (tflops and stop()):
        rate = 2 * N**3 * gemms / gpu.seconds(gemm, gemms) / 1e12
        bandwidth = 4 * GEMV_ROWS * GEMV_COLUMNS * gemvs / gpu.seconds(gemv, gemvs) / 1e9
        if spent >= warmup_seconds:
            tflops.append(rate)
            gb_s.append(bandwidth)
    if not tflops:
        raise LoadError(
            f"found no window in {seconds:g} s after the warm-up, required at least one: give it more seconds"
        )
    return {
        "state": "done",
        "reason": "",
        "seconds": round(time.monotonic() - begin - warmup_seconds, 2),
        "tflops": summary(tflops),
        "gb_s": summary(gb_s),
        "device": gpu.name,
        "cublas": gpu.version,
        "libraries": gpu.libraries,
        "stand_in": False,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10.0, help="at most; SIGTERM ends it before")
    parser.add_argument("--warmup-seconds", type=float, default=2.0)
    parser.add_argument("--index", type=int, default=0, help="CUDA's number of the GPU")
    parser.add_argument("--library-directory", action="append", default=[], help="where libcublas is; may be a pattern")
    asked = parser.parse_args(arguments)
    stopped: list[int] = []
    # Whoever samples says when it is done: then the window in work is the last one.
    signal.signal(signal.SIGTERM, lambda number, _frame: stopped.append(number))
    try:
        answer = run(asked.seconds, asked.warmup_seconds, asked.index, asked.library_directory, lambda: bool(stopped))
    except (LoadError, OSError, AttributeError) as error:
        answer = {"state": "inconclusive", "reason": str(error), "stand_in": False}
    print(json.dumps(answer), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
