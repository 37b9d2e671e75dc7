"""Training steps - forward, backward, clip, update - of one shape, ours and the peers'.

Every contestant is a process of its own, as it would be for its user: with its own memory to measure and its own way of
allocating. They take turns, so only one works at a time. The peer is transformers' model under AdamW (the fused one) in
a plain loop, in fp32 and under bf16 autocast, which is how its users train on a CPU.
"""

import multiprocessing
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch

from clockhand.bench.measure import Limits, Machine, Measured, alternate, limits, machine
from clockhand.config import ModelConfig
from clockhand.count import training_flops
from clockhand.errors import ClockhandError
from clockhand.interop.names import export_obstacle, to_hugging_face
from clockhand.presets import build
from clockhand.train.config import TrainConfig
from clockhand.train.settle import can_compile

BATCH_SIZE, SEQ_LEN = 8, 512

Work = dict[str, tuple[Callable[..., Callable[[], object]], ModelConfig, TrainConfig]]
"""The contestants by name: what makes a step, of which model, trained how."""


@dataclass(frozen=True)
class Contestant:
    tok_per_s: Measured
    first_step: float
    """Seconds of the first step, with whatever compiling it took."""
    peak_bytes: int | None
    """What the process grew by at most, from before its model was made; None where the platform does not say."""


@dataclass(frozen=True)
class TrainReport:
    preset: str
    batch_size: int
    seq_len: int
    machine: Machine
    limits: Limits
    flops_per_token: float
    """Of all products, forward and backward: 6 for each weight in one, and attention."""
    results: dict[str, Contestant]
    first: str = "ours"
    """The word for the first of them, which the others are compared with."""

    def share(self, name: str) -> float:
        """Of the matrix products this machine can do (in bf16, or fp32 for an fp32 contestant)."""
        wall = self.limits.fp32_gflops if name.endswith("fp32") else self.limits.bf16_gflops
        return self.results[name].tok_per_s.median * self.flops_per_token / wall / 1e9

    def as_json(self) -> dict[str, Any]:
        return {
            "work": "train",
            "preset": self.preset,
            "batch_size": self.batch_size,
            "seq_len": self.seq_len,
            "machine": str(self.machine),
            "limits": self.limits.as_json(),
            "flops_per_token": self.flops_per_token,
            "results": {
                name: {
                    "tok_per_s": each.tok_per_s.as_json(),
                    "ratio": self._first().tok_per_s.median / each.tok_per_s.median,
                    "matmul_share": self.share(name),
                    "first_step_seconds": each.first_step,
                    "peak_bytes": each.peak_bytes,
                }
                for name, each in self.results.items()
            },
        }

    def lines(self) -> Iterator[str]:
        yield f"train · {self.preset} · {self.batch_size} × {self.seq_len} tokens a step · {self.machine}"
        yield (
            f"matrices multiplied at {self.limits.fp32_gflops:.0f} (fp32) and {self.limits.bf16_gflops:.0f} (bf16) "
            f"GFLOP/s; {self.flops_per_token / 1e6:.0f} MFLOP a token"
        )
        width = max(18, *map(len, self.results))
        base = self._first().tok_per_s.median
        for name, each in self.results.items():
            speed = f"{each.tok_per_s.median:8,.0f} tok/s ±{each.tok_per_s.spread / 2:.0%}"
            memory = "" if each.peak_bytes is None else f"  {each.peak_bytes / 1e9:.2f} GB"
            share = f"{self.share(name):4.0%} of the products' limit"
            ratio = f"{self.first} is {base / each.tok_per_s.median:.2f} ×"
            yield f"  {name:<{width}} {speed}  {ratio}  {share}  first step {each.first_step:.1f} s{memory}"

    def _first(self) -> Contestant:
        return next(iter(self.results.values()))


def run(
    preset: str, peers: list[str], rounds: int = 5, batch_size: int = BATCH_SIZE, seq_len: int = SEQ_LEN, **changes: Any
) -> TrainReport:
    """Measures ours in bf16 and fp32 and, if it is among `peers`, transformers. Raises `ClockhandError`."""
    model = build(preset, **changes)
    if seq_len > model.max_seq_len:
        raise ClockhandError(f"the bench needs {seq_len} tokens, but {preset} has max_seq_len = {model.max_seq_len}")
    work: Work = {
        "clockhand bf16": (ours, model, as_settled("bfloat16", batch_size, seq_len)),
        "clockhand fp32": (ours, model, as_settled("float32", batch_size, seq_len)),
    }
    if "transformers" in peers:
        if (obstacle := export_obstacle(model)) is not None:
            raise ClockhandError(f"--peer transformers: {obstacle}")
        for label, dtype in (("bf16", "bfloat16"), ("fp32", "float32")):
            config = TrainConfig(dtype=dtype, compile="off", batch_size=batch_size, seq_len=seq_len, device="cpu")
            work[f"transformers {label}"] = (_transformers, model, config)
    return measure(preset, work, rounds)


def as_settled(dtype: str, batch_size: int, seq_len: int) -> TrainConfig:
    """Our run as `train` would settle it if it were long: compiled where that is possible."""
    compiling = "on" if can_compile(torch.device("cpu")) else "off"
    return TrainConfig(dtype=dtype, compile=compiling, batch_size=batch_size, seq_len=seq_len, device="cpu")


def measure(preset: str, work: Work, rounds: int, first: str = "ours") -> TrainReport:
    """The contestants of `work` in turn; all have the tokens a step and the products a token of the first, `first`."""
    _, model, config = next(iter(work.values()))
    walls = limits()
    with _processes(work) as running:
        begun = {name: each.step() for name, each in running.items()}
        tokens = config.batch_size * config.seq_len
        speeds = alternate({name: _speed(each, tokens) for name, each in running.items()}, rounds, warmup=1)
        results = {name: Contestant(speeds[name], begun[name], each.peak()) for name, each in running.items()}
    flops = training_flops(model, config.seq_len) / config.seq_len
    return TrainReport(preset, config.batch_size, config.seq_len, machine(), walls, flops, results, first)


def _speed(process: "_Process", tokens: int) -> Callable[[], float]:
    return lambda: tokens / process.step()


# ---- a contestant's process ----


class _Process:
    """Takes a step when told to."""

    def __init__(self, name: str, make: Callable[..., Callable[[], object]], model: ModelConfig, config: Any) -> None:
        self.name = name
        context = multiprocessing.get_context("spawn")  # a forked process would share what torch has already begun
        self._pipe, theirs = context.Pipe()
        self._child = context.Process(target=_serve, args=(theirs, make, asdict(model), config), daemon=True)
        self._child.start()
        theirs.close()

    def step(self) -> float:
        """Seconds of one step."""
        return self._ask("step")

    def peak(self) -> int | None:
        return self._ask("peak")

    def _ask(self, what: str) -> Any:
        try:
            self._pipe.send(what)
            answer = self._pipe.recv()
        except (EOFError, OSError):
            self._child.join(1)
            raise ClockhandError(
                f"the process of {self.name} ended with code {self._child.exitcode}; it may be out of memory"
            ) from None
        if isinstance(answer, str):
            raise ClockhandError(f"{self.name}: {answer}")
        return answer

    def end(self) -> None:
        self._child.kill()
        self._child.join()


@contextmanager
def _processes(work: Work) -> Iterator[dict[str, _Process]]:
    running: dict[str, _Process] = {}
    try:
        for name, (make, model, config) in work.items():
            running[name] = _Process(name, make, model, config)
        yield running
    finally:
        for process in running.values():
            process.end()


def _serve(pipe: Connection, make: Callable[..., Callable[[], object]], model: dict[str, Any], config: Any) -> None:
    """The life of a contestant: its model is made at the first step."""
    before = _peak_resident()
    step = None
    while True:
        try:
            asked = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            if asked == "peak":
                pipe.send(None if before is None else (_peak_resident() or 0) - before)
                continue
            step = step or make(ModelConfig(**model), config)
            started = time.perf_counter()
            step()
            pipe.send(time.perf_counter() - started)
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")


def _peak_resident() -> int | None:
    """The most memory this process ever held."""
    from clockhand.memory import peak_resident_bytes

    return peak_resident_bytes()


def ours(model: ModelConfig, config: TrainConfig) -> Callable[[], object]:
    from clockhand.allocator import keep_freed_memory
    from clockhand.train.trial import Trial

    keep_freed_memory()
    return Trial(model, config).step


def _transformers(model: ModelConfig, config: TrainConfig) -> Callable[[], object]:
    from transformers import AutoConfig, AutoModelForCausalLM

    words = to_hugging_face(model)
    theirs = AutoModelForCausalLM.from_config(AutoConfig.for_model(words.pop("model_type"), **words))
    theirs.float().train()
    optimizer = torch.optim.AdamW(theirs.parameters(), lr=config.learning_rate, fused=True)
    ids = torch.randint(model.vocab_size, (config.batch_size, config.seq_len))

    def step() -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=config.dtype == "bfloat16"):
            loss = theirs(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step
