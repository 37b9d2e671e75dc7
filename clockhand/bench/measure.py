"""How speed is measured: contestants take turns, medians are told with their spread, the machine's limits beside.

    round 1   ours  peer  other
    round 2   other peer  ours       whatever drifts (a warm CPU, a neighbour on the host) meets everybody alike
    round 3   ours  peer  other

    machine()    what ran it, in words
    limits()     the two walls: how fast memory can be read, how fast matrices can be multiplied
    alternate()  the rounds

A contestant is a function that does its work once and returns its own speed, such as tokens per second, so that what it
need not count (loading, resetting) stays out. What the work is, is left to the files beside this one.
"""

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from clockhand.allocator import use_large_pages
from clockhand.errors import ClockhandError, unknown_name
from clockhand.probe import matmul_flops

PEERS = {"transformers": "transformers", "llama.cpp": "llama_cpp"}
"""Programs we measure ourselves against, and the package each is imported from."""


@dataclass(frozen=True)
class Measured:
    """What a contestant reached in every round."""

    values: tuple[float, ...]
    unit: str

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def spread(self) -> float:
        """(largest - smallest) / median."""
        return (max(self.values) - min(self.values)) / self.median

    def as_json(self) -> dict[str, Any]:
        return {"median": self.median, "spread": self.spread, "unit": self.unit, "values": list(self.values)}


def alternate(
    contestants: Mapping[str, Callable[[], float]], rounds: int = 5, unit: str = "tok/s", warmup: int = 1
) -> dict[str, Measured]:
    """Runs every contestant `rounds` times in turn, after `warmup` rounds that do not count."""
    for setting, given, least in (("rounds", rounds, 1), ("warmup", warmup, 0)):
        if given < least:
            raise ClockhandError(f"{setting} = {given} must be {least} or more")
    values: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(-warmup, rounds):
        order = list(contestants)
        for name in order if number % 2 == 0 else reversed(order):
            value = contestants[name]()
            if number >= 0:
                values[name].append(value)
    return {name: Measured(tuple(each), unit) for name, each in values.items()}


def seconds(work: Callable[[], object]) -> float:
    """How long `work` takes once."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


# ---- the machine ----


@dataclass(frozen=True)
class Machine:
    """What the numbers were measured on."""

    cpu: str
    cores: int
    features: tuple[str, ...]
    """Instruction sets that decide the speed of matrix products."""
    memory_gib: float
    threads: int
    """torch's own, and what the peers are given."""
    python: str
    torch: str

    def __str__(self) -> str:
        features = f" ({', '.join(self.features)})" if self.features else ""
        cores = f"{self.cores} core{'s' if self.cores > 1 else ''}"
        return (
            f"{cores} of {self.cpu}{features}, {self.memory_gib:.0f} GiB, {self.threads} threads, "
            f"Python {self.python}, torch {self.torch}"
        )


_FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve")


def machine() -> Machine:
    """The machine this runs on."""
    facts = _cpu_facts()
    cpu = facts.get("model name") or platform.processor() or platform.machine()
    flags = set((facts.get("flags") or facts.get("Features") or "").split())
    try:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # Windows
        memory = 0
    return Machine(
        cpu=cpu,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        features=tuple(name for name in _FEATURES if name in flags),
        memory_gib=memory / 2**30,
        threads=torch.get_num_threads(),
        python=platform.python_version(),
        torch=torch.__version__,
    )


def _cpu_facts() -> dict[str, str]:
    """The first processor's part of /proc/cpuinfo; empty where there is none."""
    try:
        lines = Path("/proc/cpuinfo").read_text().partition("\n\n")[0].splitlines()
    except OSError:
        return {}
    return {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}


# ---- the limits ----


@dataclass(frozen=True)
class Limits:
    """The fastest that memory and matrix units were seen to go, by torch on all its threads."""

    read_gb_per_s: float
    """10⁹ bytes a second, read once in order from far more memory than any cache holds."""
    fp32_gflops: float
    """10⁹ floating-point operations a second of a square matrix product, a multiplication and an addition being two."""
    bf16_gflops: float

    def decode_tok_per_s(self, weight_bytes: int) -> float:
        """No decode step can be faster for one stream: it reads every weight once."""
        return self.read_gb_per_s * 1e9 / weight_bytes

    def prefill_tok_per_s(self, flops_per_token: float, dtype: torch.dtype = torch.bfloat16) -> float:
        # Without bf16 instructions the products of bf16 weights are best made in fp32.
        gflops = self.fp32_gflops if dtype == torch.float32 else max(self.fp32_gflops, self.bf16_gflops)
        return gflops * 1e9 / flops_per_token

    def as_json(self) -> dict[str, float]:
        return asdict(self)


def limits(buffer_bytes: int = 2**29, size: int = 1536, repeats: int = 5) -> Limits:
    """Measures both walls, each the best of `repeats` (what disturbs can only slow).

    Matrices are of `size` rows, but smaller where products of a type are so slow that it would be waited for.
    """
    return Limits(
        read_gb_per_s(buffer_bytes, repeats),
        matmul_gflops(torch.float32, size, repeats),
        matmul_gflops(torch.bfloat16, size, repeats),
    )


def read_gb_per_s(buffer_bytes: int = 2**29, repeats: int = 5) -> float:
    """10⁹ bytes a second of reading a buffer of `buffer_bytes` (MKL's dot product with itself: it was the fastest).

    It lies in large pages where the system has them, as weights and caches do: a tenth faster.
    """
    numbers = torch.empty(buffer_bytes // 4)
    use_large_pages(numbers, now=False)
    numbers.fill_(1)
    return numbers.nbytes / min(seconds(lambda: torch.dot(numbers, numbers)) for _ in range(repeats)) / 1e9


def matmul_gflops(dtype: torch.dtype, size: int = 1536, repeats: int = 5) -> float:
    """10⁹ floating-point operations a second of a product of two square matrices of up to `size` rows."""
    return max(matmul_flops(dtype, largest=size) for _ in range(repeats)) / 1e9


# ---- peers ----


def wanted_peers(wanted: str | None) -> list[str]:
    """The peers in a comma-separated list, or, for None, all that are installed.

    Raises `ClockhandError` for a name that is no peer, or a peer that is not installed.
    """
    from importlib.util import find_spec

    installed = [name for name, package in PEERS.items() if find_spec(package) is not None]
    if wanted is None:
        return installed
    names = [name.strip() for name in wanted.split(",") if name.strip() and name.strip() != "none"]
    for name in names:
        if name not in PEERS:
            raise unknown_name("peer", name, PEERS, "--peer")
        if name not in installed:
            raise ClockhandError(f"--peer {name} is not installed: pip install 'clockhand[peers]'")
    return names
