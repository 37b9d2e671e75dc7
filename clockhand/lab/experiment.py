"""What claims that need training share: a small model, a corpus, runs that are kept, and a way to compare them.

A training here is an ordinary one, through the one training loop, into an ordinary run folder. It is found again by its
settings, so claims share runs, an interrupted report goes on where it was, and a second report trains nothing.

Two variants are compared on pairs: the same seed gives both the same order of the data. The mean of the differences
comes with its 95 % interval (Student's t), and only an interval that leaves out 0 is called a difference.
"""

import dataclasses
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clockhand.config import ModelConfig, from_dict
from clockhand.data.shards import Corpus, CorpusSettings, difference, prepare
from clockhand.lab.claim import Verdict
from clockhand.model.transformer import Transformer, initialise
from clockhand.train.config import TrainConfig
from clockhand.train.log import read_log
from clockhand.train.loop import Trainer
from clockhand.train.progress import Reporter

BASE: dict[str, Any] = dict(d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=352, max_seq_len=1024)
"""The model most trainings start from: 0.75M parameters. vocab_size comes from the tokenizer."""

RECIPE: dict[str, Any] = dict(
    steps=300, batch_size=12, seq_len=128, learning_rate=2e-3, warmup_steps=30, eval_windows=128,
    eval_every=0, save_every=0, sample_every=0, keep_last=1,
    dtype="float32", compile="off",  # in every run of a comparison alike, and on every machine
)  # fmt: skip
"""How it is trained: 0.46M characters of Shakespeare, about half a minute on two cores."""

SOURCE = "builtin:shakespeare"


@dataclass(frozen=True)
class Trained:
    """A finished run."""

    folder: Path
    loss: float
    """Nats per token on the held-out windows, at the end."""
    rows: list[dict[str, Any]]
    """The lines of log.jsonl."""

    def model(self) -> Transformer:
        from clockhand.interop.hf import load_model

        return load_model(self.folder / "final").eval()

    def column(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if key in row]


@dataclass
class Lab:
    """Where claims are tried. `scale` below 1 shortens every training, for tests; the numbers then mean little."""

    folder: Path
    scale: float = 1.0
    say: Callable[[str], None] = field(default=lambda line: None)
    """Told what is being done, a line at a time."""
    measured: dict[str, Any] = field(default_factory=dict)
    """What several claims read and one of them measured."""

    @cached_property
    def corpus(self) -> Corpus:
        """Shakespeare's plays by the character, made on first use."""
        settings = CorpusSettings(sources=(SOURCE,), kind="char")
        folder = self.folder / "corpus"
        if difference(folder, settings) is None:
            return Corpus.open(folder)
        self.say("preparing the corpus")
        return prepare(settings, folder)

    def config(self, settings: dict[str, Any]) -> ModelConfig:
        """`settings` with the vocabulary of the corpus."""
        return from_dict(ModelConfig, {"vocab_size": self.corpus.tokenizer.vocab_size, **settings}, "the lab")

    def train(
        self,
        settings: dict[str, Any],
        seed: int,
        init_seed: int | None = None,
        folder: Path | None = None,
        **recipe: Any,
    ) -> Trained:
        """A run of the model `settings` under `RECIPE` with `recipe` in its place; found again if it was made before.

        `seed` decides the order of the data, and the initial weights too unless `init_seed` is given. It is kept in
        `folder`, by default among the trainings of this lab.
        """
        config = self.config(settings)
        plan = {**RECIPE, **recipe, "seed": seed}
        plan["steps"] = max(round(plan["steps"] * self.scale), 2)
        plan["warmup_steps"] = round(plan["warmup_steps"] * self.scale)
        how = TrainConfig(**plan)
        identity = [dataclasses.asdict(config), dataclasses.asdict(how), init_seed, self.corpus.index["seal"]]
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        folder = (folder or self.folder / "trainings") / key
        if not (folder / "final").is_dir():
            self.say(f"training {_describe(settings)}, seed {seed}")
            trainer = Trainer(config, how, self.corpus, folder, Reporter())
            if init_seed is not None and trainer.step == 0:
                torch.manual_seed(init_seed)
                initialise(trainer.model)
            trainer.run()
            shutil.rmtree(folder / "checkpoints")  # what an interrupted run needs, a finished one does not
        rows = read_log(folder / "log.jsonl")
        return Trained(folder, [row["val/loss"] for row in rows if "val/loss" in row][-1], rows)

    def losses(self, settings: dict[str, Any], seeds: Sequence[int], **recipe: Any) -> list[float]:
        """The final validation loss of each seed."""
        return [self.train(settings, seed, **recipe).loss for seed in seeds]

    def held_out(self, tokens: int) -> Tensor:
        """The first `tokens` ids of the held-out plays, or all there are, (tokens,)."""
        split = self.corpus.split("val")
        return torch.from_numpy(split.read(0, min(tokens, split.n_tokens)).astype("int64"))


def blocks_of(model: Transformer) -> list[Any]:
    """The blocks, for a type checker that takes what is in a ModuleList for a Tensor."""
    return list(model.blocks)


def _describe(settings: dict[str, Any]) -> str:
    changed = [f"{name}={value}" for name, value in settings.items() if BASE.get(name) != value]
    return ", ".join(changed) or "the base model"


# ── comparing ──────────────────────────────────────────────────────────────────────────────────────────────────────

# Student's t: the 97.5 % point by degrees of freedom, from the printed tables.
T_975 = (
    math.inf,
    12.706,
    4.303,
    3.182,
    2.776,
    2.571,
    2.447,
    2.365,
    2.306,
    2.262,
    2.228,
    2.201,
    2.179,
    2.160,
    2.145,
    2.131,
)


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, and the interval it lies in with 95 % confidence."""

    mean: float
    low: float
    high: float
    pairs: int

    @property
    def exceeds_noise(self) -> bool:
        return self.low > 0 or self.high < 0

    def negligible(self, margin: float) -> bool:
        """Whether even the ends of the interval are within ±margin: no difference worth the name."""
        return -margin <= self.low and self.high <= margin


def compare(these: Sequence[float], those: Sequence[float]) -> Difference:
    """these − those, pair by pair. One pair alone says nothing: its interval is infinite."""
    differences = [a - b for a, b in zip(these, those, strict=True)]
    n = len(differences)
    mean = sum(differences) / n
    if n == 1:
        return Difference(mean, -math.inf, math.inf, n)
    deviation = math.sqrt(sum((d - mean) ** 2 for d in differences) / (n - 1))
    half = T_975[min(n - 1, len(T_975) - 1)] * deviation / math.sqrt(n)
    return Difference(mean, mean - half, mean + half, n)


def verdict_same(difference: Difference, margin: float) -> Verdict:
    """Of the claim that two things are equal but for a negligible `margin`."""
    if difference.negligible(margin):
        return Verdict.HOLDS
    return Verdict.REFUTED if difference.exceeds_noise else Verdict.UNDECIDED


def verdict_lower(difference: Difference) -> Verdict:
    """Of the claim that the first of two is lower."""
    if not difference.exceeds_noise:
        return Verdict.UNDECIDED
    return Verdict.HOLDS if difference.mean < 0 else Verdict.REFUTED
