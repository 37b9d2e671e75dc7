"""A corpus of a few kilobytes, a model of a few thousand weights, and runs that take a second."""

from pathlib import Path

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.data.shards import Corpus, CorpusSettings, prepare
from clockhand.train.config import TrainConfig
from clockhand.train.log import CLOCKED, read_log


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Corpus:
    folder = tmp_path_factory.mktemp("data")
    for number in range(40):
        lines = (f"{number} and {k} are {number + k}.\n" for k in range(number % 7 + 3))
        (folder / f"sums-{number}.txt").write_text("".join(lines))
    return prepare(CorpusSettings(sources=(str(folder),), kind="byte", val_fraction=0.2), folder / "corpus")


@pytest.fixture
def model_config(corpus) -> ModelConfig:
    size = dict(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=64)
    return ModelConfig(vocab_size=corpus.tokenizer.vocab_size, dropout=0.1, **size)


@pytest.fixture
def train_config() -> TrainConfig:
    cadence = dict(eval_every=3, eval_windows=4, save_every=4, sample_every=0)
    return TrainConfig(steps=10, batch_size=2, accumulate=2, seq_len=32, warmup_steps=2, seed=7, **cadence)


@pytest.fixture
def weights_of():
    """The final weights of a run folder, all in one vector."""

    def read(out: Path) -> torch.Tensor:
        from clockhand.interop.hf import load_model

        return torch.cat([p.detach().flatten() for p in load_model(out / "final").parameters()])

    return read


@pytest.fixture
def rows_of():
    """The log of a run folder, without what a clock has measured."""

    def read(out: Path) -> list[dict]:
        return [{k: v for k, v in row.items() if k not in CLOCKED} for row in read_log(out / "log.jsonl")]

    return read
