"""What a run will need, before it is started: memory term by term, time, tokens.

Memory is a sum of terms, and here is where each is written down. B rows in a micro-batch, N = B·T tokens, L blocks:

    weights       4 bytes each
    gradients     4 bytes each; there from the first backward pass of a step to its end
    optimizer     what it remembers: 8 bytes for each weight (AdamW; Muon needs half of that for its matrices)
    activations   what autograd keeps of a block, L times; with checkpoint_activations the inputs of L and one whole.
                  One block of this model is run on one row and on two, compiled where it will be, so this term
                  cannot fall behind the code
    logits        a chunk of them, as the loss holds no more at once, and the gradients it has ready: N·D and V·D values
    overhead      what no tensor asked for: buffers of the matrix libraries, the compiler, and holes, which are much:
                  glibc cannot put a tensor where one of the same size has been, as it wants room to align it. The
                  constants are fitted to measurements (LOG.md), like nothing else here

They are not all there at once. When the loss is computed there are no gradients yet (unless micro-batches are being
accumulated), when the gradients are complete there are no activations any more, and when Muon works there is nothing
else. The peak is the largest of the moments. It is what a run needs beyond the interpreter with torch in it, which are
about 0.4 GB more.

Time is measured: some steps of the model with one block and with a few, and a straight line through both.
"""

import dataclasses
import functools
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from clockhand.allocator import keep_freed_memory
from clockhand.config import ModelConfig
from clockhand.count import total_parameters
from clockhand.errors import ClockhandError
from clockhand.memory import refuse_beyond_memory
from clockhand.model.transformer import Transformer, without_weights
from clockhand.train.compiled import compile_blocks
from clockhand.train.config import TrainConfig
from clockhand.train.loss import LOGITS_AT_ONCE
from clockhand.train.muon import STACKED
from clockhand.train.optim import is_muons
from clockhand.train.trial import Trial

FP32 = 4
ADAMW_BYTES = 2 * FP32
"""Mean of the gradient and of its square, for each weight."""
LOGIT_BYTES = {"float32": 8, "bfloat16": 10}
"""Of each logit in a chunk: itself and its log-probability, where its slope will be; of bf16 a copy in fp32 too."""
STACK_BYTES = {"float32": 16, "bfloat16": 10}
"""Of each value that Muon stacks: its update in fp32 and in the stack, and the stack before and after a product."""
LIBRARY_BYTES, COMPILER_BYTES, HOLES = 15_000_000, 60_000_000, 0.24
"""Buffers of the matrix libraries; what torch's compiler leaves behind; holes, as a share of what comes and goes."""
TRIAL_BLOCKS, TRIAL_STEPS = 3, 3


@dataclass(frozen=True)
class Memory:
    """Bytes, term by term."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    block: int
    """Activations of the one block whose gradient is being taken."""
    head: int
    """The gradients that the loss hands over: of the hidden states and of the head."""
    stacks: int
    """What Muon has in hand at once."""
    compiling: bool
    recomputing: bool
    """Whether a block is run again when its gradient is due, with the inputs of all blocks before it still there."""
    accumulating: bool
    """Whether gradients of earlier micro-batches are there during the loss."""

    @property
    def tensors(self) -> int:
        """The largest sum of tensors that are there at one moment."""
        return self.weights + self.optimizer + self.passing

    @property
    def passing(self) -> int:
        """The part of them that comes and goes with every step."""
        earlier = self.gradients if self.accumulating else 0
        inputs = self.activations - self.block if self.recomputing else self.activations
        loss = earlier + inputs + self.logits
        last_block = earlier + self.activations + 2 * self.head
        first_block = self.gradients + self.block
        return max(loss, last_block, first_block, self.gradients + self.stacks)

    @property
    def overhead(self) -> int:
        holes = round(HOLES * self.passing)
        if self.recomputing:
            # Blocks run again one after the other, each with gradients laid down between its tensors that stay: the
            # next finds no room where the last one was, nor the one after it.
            spread = self.activations + 2 * self.head + 2 * self.block + self.gradients
            holes = max(spread - self.passing, 0)
        return LIBRARY_BYTES + holes + (COMPILER_BYTES if self.compiling else 0)

    @property
    def peak(self) -> int:
        """What the process grows by."""
        return self.tensors + self.overhead


@dataclass(frozen=True)
class Speed:
    """Seconds of one trained step, and of one micro-batch that is only read."""

    step: float
    read: float


def forecast_memory(model: ModelConfig, config: TrainConfig, batch_size: int | None = None) -> Memory:
    """The memory of a run on one process, for `batch_size` rows in a micro-batch (default: the config's)."""
    rows = batch_size or config.batch_size
    weights = total_parameters(model) * FP32
    dtype = "bfloat16" if config.dtype == "bfloat16" else "float32"
    once, per_row = _kept_by_a_block(model, config.seq_len, dtype, config.compile == "on")
    tokens, stream = rows * config.seq_len, rows * config.seq_len * model.d_model * FP32
    block = once + rows * per_row
    whole = model.n_layers * stream + block if config.checkpoint_activations else model.n_layers * block
    return Memory(
        weights=weights,
        gradients=weights,
        optimizer=total_parameters(model) * ADAMW_BYTES - _spared_by_muon(model, config),
        activations=whole + 2 * stream,  # and what the final norm reads and gives
        logits=_loss_bytes(model, tokens, dtype),
        block=block,
        head=(tokens + model.vocab_size) * model.d_model * FP32,
        stacks=_stacked_by_muon(model, config) * STACK_BYTES[dtype],
        compiling=config.compile == "on",
        recomputing=config.checkpoint_activations,
        accumulating=config.accumulate > 1,
    )


def fit_micro_batch(model: ModelConfig, config: TrainConfig, budget: int) -> TrainConfig:
    """The config with the largest micro-batch whose peak is at most `budget` bytes, and as many tokens a step.

    Raises `ClockhandError` when not even one row fits.
    """
    total = config.batch_size * config.accumulate
    for rows in sorted((rows for rows in range(1, config.batch_size + 1) if total % rows == 0), reverse=True):
        fitting = dataclasses.replace(config, batch_size=rows, accumulate=total // rows)
        if (peak := forecast_memory(model, fitting).peak) <= budget:
            return fitting
    raise ClockhandError(
        f"one row of seq_len = {config.seq_len} needs {peak / 1e9:.2f} GB and there are {budget / 1e9:.2f} GB; "
        "try a shorter seq_len, a smaller model or --checkpoint-activations"
    )


def measure_speed(model: ModelConfig, config: TrainConfig) -> Speed:
    """Trains a few steps on random ids, with one block and with a few, and draws the line to all of them."""
    keep_freed_memory()  # as the run will
    few = min(model.n_layers, TRIAL_BLOCKS)
    refuse_beyond_memory(dataclasses.replace(model, n_layers=few), config.batch_size, config.seq_len)
    one, some = _trial(model, config, 1), _trial(model, config, few)
    more = (model.n_layers - few) / max(few - 1, 1)
    micro, update, read = (b + more * max(b - a, 0) for a, b in zip(one, some))
    return Speed(config.accumulate * micro + update, read)


def forecast_seconds(
    config: TrainConfig, speed: Speed, first: int = 0, last: int | None = None, finished: bool = True
) -> float:
    """Of the steps from `first` to before `last` (the whole run), with the evaluations before them and at its end."""
    last = config.steps if last is None else last
    evaluations = int(finished)
    if every := config.eval_every:
        evaluations += len(range(-(-first // every) * every, last, every))
    return (last - first) * speed.step + evaluations * config.eval_windows / config.batch_size * speed.read


def plan_json(model: ModelConfig, config: TrainConfig, speed: Speed) -> dict[str, Any]:
    """Everything that is forecast, ready for json: bytes, seconds, tokens."""
    memory = forecast_memory(model, config)
    return {
        "parameters": total_parameters(model),
        "memory": {name: value for name, value in asdict(memory).items() if type(value) is int}
        | {"overhead": memory.overhead, "peak": memory.peak},
        "tokens": config.steps * config.tokens_per_step,
        "tokens_per_step": config.tokens_per_step,
        "seconds_per_step": speed.step,
        "tok_per_s": config.tokens_per_step / speed.step,
        "seconds": forecast_seconds(config, speed),
    }


def _spared_by_muon(model: ModelConfig, config: TrainConfig) -> int:
    """Bytes: Muon remembers one value for each weight of its matrices, where AdamW remembers two."""
    if config.optimizer != "muon":
        return 0
    return sum(each.numel() * FP32 for name, each in without_weights(model).named_parameters() if is_muons(name, each))


def _stacked_by_muon(model: ModelConfig, config: TrainConfig) -> int:
    """Values in the largest of Muon's stacks: matrices of one shape, as many as it takes at once."""
    if config.optimizer != "muon":
        return 0
    values: Counter[tuple[int, ...]] = Counter()
    for name, each in without_weights(model).named_parameters():
        if is_muons(name, each):
            values[tuple(sorted(each.shape))] += each.numel()
    return max((min(total, max(STACKED, math.prod(shape))) for shape, total in values.items()), default=0)


def _loss_bytes(model: ModelConfig, tokens: int, dtype: str) -> int:
    """What `linear_cross_entropy` holds: a chunk, the gradients of hidden states and head, and one more of the head."""
    chunk = min(tokens, max(LOGITS_AT_ONCE // model.vocab_size, 1)) * model.vocab_size
    gradients = (tokens + model.vocab_size) * model.d_model * FP32
    if dtype == "float32":
        return chunk * LOGIT_BYTES[dtype] + gradients + model.vocab_size * model.d_model * FP32
    return chunk * LOGIT_BYTES[dtype] + 2 * gradients  # hidden states, head and their gradients in bf16 as well


@functools.cache
def _kept_by_a_block(model: ModelConfig, seq_len: int, dtype: str, compiled: bool) -> tuple[int, int]:
    """Bytes that autograd keeps of one block: those that do not depend on the rows, and those of each row."""
    network = Transformer(dataclasses.replace(model, n_layers=1, vocab_size=2))
    one, two = (_kept(network, rows, seq_len, dtype) for rows in (1, 2))
    stream = 2 * seq_len * model.d_model * FP32  # what the final norm reads and gives, which is not the block's
    once = max(2 * one - two, 0)  # weights in bf16, and compiling changes nothing about them
    if compiled:  # divided into what is kept and what is made again as the compiler does it, but no code is written
        network.run_block = compile_blocks(network, backend="aot_eager_decomp_partition")
        one = _kept(network, 1, seq_len, dtype)
    return once, max(one - once - stream, 0)


def _kept(network: Transformer, rows: int, seq_len: int, dtype: str) -> int:
    weights = {p.untyped_storage().data_ptr() for p in network.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}  # by address; the tensor is held, or its address would be used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    ids = torch.arange(rows * seq_len).view(rows, seq_len) % 2
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"):
        network.hidden(ids)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=dtype == "bfloat16"),
    ):
        network.hidden(ids)  # compiled by now, or the hooks would be compiled with it
    return sum(size for size, _ in kept.values())


def _trial(model: ModelConfig, config: TrainConfig, blocks: int) -> tuple[float, float, float]:
    """Median seconds of forward and backward of a micro-batch, of the update, and of a forward alone."""
    trial = Trial(dataclasses.replace(model, n_layers=blocks), config)
    times = [[_seconds(trial.micro), _seconds(trial.update), _seconds(trial.read)] for _ in range(TRIAL_STEPS + 1)]
    first, second, third = (statistics.median(each) for each in zip(*times[1:]))  # the first has warmed up
    return first, second, third


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
