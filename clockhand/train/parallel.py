"""Several processes, one run: each takes its rows of every batch, and all make the same update.

    torchrun --nproc-per-node 2 -m clockhand.cli train ...

    ddp    every rank holds the whole model; gradients are averaged
    fsdp   every rank holds a slice of each weight, its gradient and the optimizer's memory, and borrows the rest of a
           block while it works on it

`batch_size` counts the rows of all ranks together, so how many there are changes neither the data nor the mean: a run
begun on two goes on with one or with four. Every rank reads the whole batch (a few bytes a token), so all know the
number of targets without asking each other, and keeps its rows. Of a step they exchange: whether anybody was asked to
stop, the gradients (once, however many micro-batches there are), and the loss.

A checkpoint is the ordinary one: a whole model folder, gathered on rank 0 weight by weight. It reshards because it is
not sharded, opens everywhere and keeps its hashes; what it costs is memory for one whole copy on that machine. All
ranks see the run folder.

The loop in `loop.py` is the same for one process and for many: with one, nothing here does anything.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from clockhand.config import ModelConfig
from clockhand.data.loader import IGNORE_INDEX, Batch
from clockhand.errors import ClockhandError
from clockhand.model.transformer import Transformer, draw_parameter, without_weights
from clockhand.train.config import TrainConfig
from clockhand.train.loss import batch_loss

PATIENCE = timedelta(minutes=10)
"""How long a rank waits for the others within a step, an evaluation or a checkpoint, before it takes them for dead."""
HOW = "torchrun --nproc-per-node N -m clockhand.cli train ..."

Json = TypeVar("Json")


class LossOf(nn.Module):
    """`batch_loss` as a module: what wraps a module for several ranks sees only what passes through its forward."""

    def __init__(self, model: Transformer, dtype: str) -> None:
        super().__init__()
        self.model, self.dtype = model, dtype

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """-> Σ nats over the targets, and the balance loss. Two bare tensors: the hooks look for those."""
        loss, balance = batch_loss(self.model, batch, self.dtype)
        return loss.total, balance


class Ranks:
    """The processes of one run, seen from one of them. `Ranks()` is a run of one process."""

    def __init__(self, rank: int = 0, size: int = 1, mode: str = "none", store: Any = None) -> None:
        """`mode` none | ddp | fsdp; the process group is open, and `store` is where its ranks met."""
        self.rank, self.size, self.mode = rank, size, mode
        self._store, self._asked = store, 0

    @property
    def leads(self) -> bool:
        """Whether this one talks and writes."""
        return self.rank == 0

    def build(self, config: ModelConfig, seed: int, dtype: str, device: torch.device) -> tuple[Transformer, nn.Module]:
        """A model with the weights of `seed`, the same for any number of ranks, and its `LossOf`, wrapped for them.

        The model begins without storage and is drawn one parameter at a time, so that no rank ever holds more than its
        share and one whole matrix.
        """
        model = without_weights(config)
        loss_of: nn.Module = LossOf(model, dtype)
        if self.mode == "fsdp":
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.fsdp import fully_shard

            mesh = init_device_mesh(device.type, (self.size,))
            for block in model.blocks:
                fully_shard(block, mesh=mesh)
            fully_shard(loss_of, mesh=mesh)
        model.to_empty(device=device)
        model.tie()
        torch.manual_seed(seed)
        for name, parameter in model.named_parameters():
            whole = torch.empty(parameter.shape)  # on the CPU, whose draws are the same everywhere
            draw_parameter(config, name, whole)
            put(parameter, whole)
        if self.mode == "ddp":
            loss_of = nn.parallel.DistributedDataParallel(loss_of)
        return model, loss_of

    def share(self, batch: Batch) -> Batch:
        """This rank's rows. One that is left without any works on a row of which nothing is to be learned."""
        if self.size == 1:
            return batch
        rows = len(batch.ids)
        mine = slice(rows * self.rank // self.size, rows * (self.rank + 1) // self.size)
        documents = None if batch.documents is None else batch.documents[mine]
        part = Batch(batch.ids[mine], batch.targets[mine], documents)
        if len(part.ids):
            return part
        return Batch(batch.ids[:1], torch.full_like(batch.targets[:1], IGNORE_INDEX), documents=None)

    @contextmanager
    def synchronising(self, loss_of: nn.Module, now: bool) -> Iterator[None]:
        """Around forward and backward of a micro-batch: gradients are only added up, and exchanged `now` or later."""
        if self.mode == "fsdp":
            loss_of.set_requires_gradient_sync(now)  # type: ignore[operator]
        silent = self.mode == "ddp" and not now
        with loss_of.no_sync() if silent else nullcontext():  # type: ignore[operator]
            yield

    def sum(self, *numbers: float) -> list[float]:
        """Each number summed over all ranks; all get the same bits."""
        return self._reduced(numbers, dist.ReduceOp.SUM)

    def max(self, number: int) -> int:
        return int(self._reduced((number,), dist.ReduceOp.MAX)[0])

    def _reduced(self, numbers: tuple[float, ...], how: Any) -> list[float]:
        if self.size == 1:
            return list(numbers)
        together = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(together, how)
        return together.tolist()

    def once(self, work: Callable[[], Json]) -> Json:
        """Rank 0 does `work`, however long it takes; all get its answer, which JSON can hold. If it raises, all end."""
        if self.size == 1:
            return work()
        self._asked += 1
        key = f"clockhand/{self._asked}"
        if self.leads:
            self._store.set(key, json.dumps(answer := work()))
            return answer
        while not self._store.check([key]):
            time.sleep(0.05)
        return json.loads(self._store.get(key))

    def whole(self, model: Transformer) -> Transformer | None:
        """The model with whole weights: itself, or for fsdp a copy on the CPU of rank 0 (None elsewhere).

        All ranks must ask together.
        """
        if self.mode != "fsdp":
            return model
        copy = None
        if self.leads:
            copy = without_weights(model.config)
            copy.to_empty(device="cpu")
            copy.tie()
        places = dict(copy.named_parameters()) if copy is not None else {}
        for name, parameter in model.named_parameters():
            weight = gathered(parameter.detach())
            if copy is not None:
                put(places[name], weight)
        return copy


def gathered(tensor: Tensor) -> Tensor:
    """A tensor whole: one that is sliced over the ranks is put together, and all ranks must ask for it together."""
    return tensor.full_tensor() if _is_sliced(tensor) else tensor  # type: ignore[attr-defined]


def sliced_like(parameter: Tensor, whole: Tensor) -> Tensor:
    """`whole` on the parameter's device, and sliced over the ranks as the parameter is."""
    whole = whole.to(parameter.device)
    if not _is_sliced(parameter) or whole.shape != parameter.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    # Every rank has the whole and takes its slice; without this argument rank 0 would send it.
    return distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None)  # type: ignore[attr-defined]


@torch.no_grad()
def put(parameter: Tensor, whole: Tensor) -> None:
    """Fills a parameter, or this rank's slice of it, from the whole values."""
    parameter.copy_(sliced_like(parameter, whole))


def _is_sliced(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")  # a DTensor; importing its module costs half a second where there is none


def settle_mode(parallel: str, launched: bool, size: int) -> str:
    """none, ddp or fsdp, for a `parallel` of the config. Raises `ClockhandError` for what cannot be."""
    if parallel in ("ddp", "fsdp") and not launched:
        raise ClockhandError(f"parallel = {parallel!r} needs several processes: {HOW}")
    if parallel == "none" and size > 1:
        raise ClockhandError(f"parallel = 'none' but torchrun has started {size} processes; use auto, ddp or fsdp")
    if parallel == "auto":
        return "ddp" if launched else "none"
    return parallel


@contextmanager
def joined(config: TrainConfig) -> Iterator[Ranks]:
    """Meets the other ranks where torchrun has started us, for as long as the block runs.

    Raises `ClockhandError` when the others were lost.
    """
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    mode = settle_mode(config.parallel, launched, int(os.environ.get("WORLD_SIZE", 1)) if launched else 1)
    if mode == "none":
        yield Ranks()
        return
    store, rank, size = next(iter(dist.rendezvous("env://", timeout=PATIENCE)))
    with meeting(store, rank, size, mode, torch.cuda.is_available() and config.device != "cpu") as ranks:
        yield ranks


@contextmanager
def meeting(store: Any, rank: int, size: int, mode: str, cuda: bool = False) -> Iterator[Ranks]:
    """The process group over `store`, open while the block runs. Raises `ClockhandError` when the others were lost."""
    try:
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=PATIENCE)
        yield Ranks(rank, size, mode, store)
        dist.destroy_process_group()  # not after an error: it would wait for those who are gone
    except RuntimeError as error:
        if not _lost_the_others(error):
            raise
        reason = str(error).splitlines()[0]
        raise ClockhandError(
            f"rank {rank} of {size} has lost another one, which ended or does not answer ({reason}); "
            "the checkpoints are whole, and the same command goes on from the newest"
        ) from error


def _lost_the_others(error: RuntimeError) -> bool:
    # torch has a type for what NCCL and the store say; gloo throws bare RuntimeErrors that begin with its source file.
    return isinstance(error, dist.DistError) or "gloo" in str(error)
