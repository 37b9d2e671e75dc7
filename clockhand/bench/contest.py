"""What every bench of inference needs: one model as all contestants read it, and the table that comes out.

Weights are random: no speed depends on their values. The GGUF files are our own exports.
"""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from clockhand.bench.measure import Limits, Machine, Measured, machine
from clockhand.errors import ClockhandError
from clockhand.model.packed import packed
from clockhand.model.transformer import Transformer
from clockhand.presets import build

GGUF_DTYPES = {"fp32": "f32", "bf16": "bf16", "int8": "q8_0"}
"""Our precisions, and the nearest that llama.cpp has; int4's, q4_0, it makes itself of the first."""
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Report:
    """One bench."""

    work: str
    preset: str
    machine: Machine
    limits: Limits
    results: dict[str, Measured]
    bounds: dict[str, float] = field(default_factory=dict)
    """For some contestants, what the machine's limit would allow, in the same unit."""

    def as_json(self) -> dict[str, Any]:
        return {
            "work": self.work,
            "preset": self.preset,
            "machine": str(self.machine),
            "limits": self.limits.as_json(),
            "results": {name: each.as_json() for name, each in self.results.items()},
            "bounds": self.bounds,
        }

    def lines(self) -> Iterator[str]:
        yield f"{self.work} · {self.preset} · {self.machine}"
        walls = self.limits
        yield (
            f"memory read at {walls.read_gb_per_s:.0f} GB/s, matrices multiplied at {walls.fp32_gflops:.0f} (fp32) and "
            f"{walls.bf16_gflops:.0f} (bf16) GFLOP/s"
        )
        for name, each in self.results.items():
            bound = self.bounds.get(name)
            share = f"  {each.median / bound:4.0%} of the limit" if bound else ""
            yield f"  {name:<22} {each.median:8,.1f} {each.unit}  ±{each.spread / 2:.0%}{share}"


def report(work: str, preset: str, results: dict[str, Measured], bounds: dict[str, float], walls: Limits) -> Report:
    return Report(work, preset, machine(), walls, results, bounds)


class Contest:
    """One random model of a preset, in memory and on disk for the peers."""

    def __init__(self, preset: str, folder: Path, **changes: Any) -> None:
        torch.manual_seed(0)
        self.preset, self._folder = preset, folder
        self.model = Transformer(build(preset, **changes)).eval()
        self.config = self.model.config

    def packed(self, precision: str) -> Transformer:
        """The model with its matrices in `precision`."""
        return packed(self.model, precision)

    def hugging_face(self) -> Path:
        """The folder of the model, written when it is first asked for."""
        from clockhand.data.tokenizer import Tokenizer
        from clockhand.interop.hf import save_model

        folder = self._folder / "model"
        if not folder.exists():
            save_model(self.model, folder, Tokenizer.train(iter([]), "byte", None))
        return folder

    def gguf(self, precision: str) -> Path:
        from clockhand.interop.formats import export_model

        file = self._folder / f"{precision}.gguf"
        if not file.exists() and precision == "int4":
            from clockhand.bench.peers import quantize_in_llama_cpp

            quantize_in_llama_cpp(self.gguf("fp32"), file)
        elif not file.exists():
            export_model(self.hugging_face(), "gguf", file, GGUF_DTYPES[precision])
        return file


@contextmanager
def contest(preset: str, **changes: Any) -> Iterator[Contest]:
    with tempfile.TemporaryDirectory() as folder:
        yield Contest(preset, Path(folder), **changes)


def check_fits(contest: Contest, tokens: int) -> None:
    longest = contest.config.max_seq_len
    if tokens > longest:
        raise ClockhandError(f"the bench needs {tokens} tokens, but {contest.preset} has max_seq_len = {longest}")
