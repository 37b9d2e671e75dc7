"""A batch depends on seed and step alone, and every token has its turn."""

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clockhand.data.loader import IGNORE_INDEX, Batch, TrainWindows, ValidationWindows
from clockhand.data.shards import Corpus, CorpusSettings, prepare
from clockhand.errors import ClockhandError


def make_corpus(folder: Path, texts: list[str], **about) -> Corpus:
    folder.mkdir(exist_ok=True)
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return prepare(CorpusSettings(sources=(str(folder / "a.jsonl"),), kind="byte", **about), folder / "corpus")


@pytest.fixture(scope="module")
def poems(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Sixty documents of 20 to 60 tokens, in several shards."""
    texts = [f"{number:02d}" + "abcdefgh" * (2 + number % 6) for number in range(60)]
    return make_corpus(tmp_path_factory.mktemp("poems"), texts, shard_tokens=101)


@pytest.fixture(scope="module")
def book(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """One document whose every five-letter place is different, so that text tells where it comes from."""
    return make_corpus(tmp_path_factory.mktemp("book"), ["".join(f"{number:05d}" for number in range(300))])


def tokens_of(corpus: Corpus, split: str) -> torch.Tensor:
    part = corpus.split(split)
    return torch.from_numpy(part.read(0, part.n_tokens).astype("int64"))


def equal(one: Batch, other: Batch) -> bool:
    same_documents = (one.documents is None) == (other.documents is None)
    if same_documents and one.documents is not None and other.documents is not None:
        same_documents = torch.equal(one.documents, other.documents)
    return torch.equal(one.ids, other.ids) and torch.equal(one.targets, other.targets) and same_documents


@given(step=st.integers(0, 10**7), seed=st.integers(0, 2**63), size=st.integers(1, 9), seq_len=st.integers(1, 200))
@settings(max_examples=80, deadline=None)
def test_every_window_is_a_stretch_of_the_corpus(book: Corpus, step: int, seed: int, size: int, seq_len: int):
    batch = TrainWindows(book, size, seq_len, seed).batch(step)
    assert batch.ids.shape == batch.targets.shape == (size, seq_len)
    assert batch.ids.dtype == batch.targets.dtype == torch.int64
    assert batch.documents is None
    row = tokens_of(book, "train")
    stretches = row.unfold(0, seq_len + 1, 1)
    for ids, targets in zip(batch.ids, batch.targets):
        whole = torch.cat([ids, targets[-1:]])
        assert (stretches == whole).all(1).any()
        assert torch.equal(ids[1:], targets[:-1])


def test_a_batch_is_a_function_of_seed_and_step(poems: Corpus):
    straight = TrainWindows(poems, 4, 32, seed=7)
    batches = [straight.batch(step) for step in range(60)]
    resumed = TrainWindows(poems, 4, 32, seed=7)
    assert all(equal(resumed.batch(step), batches[step]) for step in (59, 0, 31, 31, 58))
    other = TrainWindows(poems, 4, 32, seed=8)
    assert not any(torch.equal(other.batch(step).ids, batches[step].ids) for step in range(10))


def test_rows_of_a_batch_are_the_batch(poems: Corpus):
    windows = TrainWindows(poems, 8, 32)
    whole = windows.batch(5)
    for rows in (slice(0, 3), slice(3, 8), slice(None, None, 2), slice(7, 8)):
        part = windows.batch(5, rows)
        assert torch.equal(part.ids, whole.ids[rows])
        assert torch.equal(part.targets, whole.targets[rows])
    assert len(windows.batch(5, slice(0, 0)).ids) == 0


@pytest.mark.parametrize(("batch_size", "accumulate", "ranks"), [(8, 1, 3), (4, 2, 1), (4, 2, 2), (2, 4, 2), (1, 8, 1)])
def test_at_equal_global_batch_a_step_has_the_same_samples_in_the_same_order(
    poems: Corpus, batch_size: int, accumulate: int, ranks: int
):
    whole = TrainWindows(poems, 8, 32, seed=3)
    parts = TrainWindows(poems, batch_size, 32, seed=3)
    assert parts.windows_per_epoch < 60 * 8, "so that the steps cross the border of an epoch"
    for step in (0, 1, 59, 60):
        micro_batches = range(step * accumulate, (step + 1) * accumulate)
        shares = [slice(batch_size * r // ranks, batch_size * (r + 1) // ranks) for r in range(ranks)]
        rows = torch.cat([parts.batch(micro, share).ids for micro in micro_batches for share in shares])
        assert torch.equal(rows, whole.batch(step).ids)


@pytest.mark.parametrize("batch_size", [1, 4, 7, 50])
@pytest.mark.parametrize("seq_len", [10, 64])
def test_an_epoch_visits_every_window_once(book: Corpus, batch_size: int, seq_len: int):
    windows = TrainWindows(book, batch_size, seq_len)
    n = windows.windows_per_epoch
    ids = torch.cat([windows.batch(step).ids for step in range(3 * n // batch_size + 1)])
    epochs = ids[: 3 * n].split(n)
    for epoch in epochs:
        starts = sorted(
            tokens_of(book, "train").unfold(0, seq_len, 1).eq(row).all(1).nonzero()[0].item() for row in epoch
        )
        assert [start - starts[0] for start in starts] == [seq_len * window for window in range(n)]
    assert not torch.equal(epochs[0], epochs[1])


def test_windows_are_cut_elsewhere_in_each_epoch_so_every_token_is_a_target(book: Corpus):
    row = tokens_of(book, "train").tolist()
    place = {tuple(row[start : start + 10]): start for start in range(len(row) - 9)}
    assert len(place) == len(row) - 9  # ten tokens tell where they come from
    windows = TrainWindows(book, 1, 10)
    assert windows._n_offsets == 17
    epoch = TrainWindows(book, windows.windows_per_epoch, 10)
    seen: set[int] = set()
    for step in range(200):  # an offset is missed by all of them once in ten thousand runs
        for targets in epoch.batch(step).targets.tolist():
            start = place[tuple(targets)]
            seen.update(range(start, start + 10))
    assert seen == set(range(1, len(row)))


@given(seq_len=st.integers(1, 80), step=st.integers(0, 1000))
@settings(max_examples=60, deadline=None)
def test_nothing_is_learned_across_documents(poems: Corpus, seq_len: int, step: int):
    windows = TrainWindows(poems, 3, seq_len)
    batch = windows.batch(step)
    eos, bos = 1, 0
    # A document ends in eos and the next begins with bos, which nothing leads to.
    assert torch.equal(batch.targets == IGNORE_INDEX, batch.ids == eos)
    assert bos not in batch.targets
    if batch.documents is None:
        assert not (batch.ids[:, 1:] == bos).any()
    else:
        changes = batch.documents[:, 1:] != batch.documents[:, :-1]
        assert torch.equal(changes, batch.ids[:, 1:] == bos)
        assert batch.documents.dtype == torch.int64
        assert batch.documents.shape == batch.ids.shape


def test_a_corpus_shorter_than_a_window_is_refused_with_both_numbers(book: Corpus):
    n = book.split("train").n_tokens
    assert TrainWindows(book, 2, n - 1).batch(3).ids.shape == (2, n - 1)
    with pytest.raises(ClockhandError, match=rf"has {n:,} training tokens; one window needs {n + 1:,} \(seq_len = {n}"):
        TrainWindows(book, 2, n)


# Validation


@pytest.mark.parametrize("seq_len", [1, 7, 16, 1000])
def test_validation_learns_from_every_token_of_the_split_once(poems: Corpus, book: Corpus, seq_len: int):
    for corpus in (poems, book):
        windows = ValidationWindows(corpus, 2, seq_len)
        batches = list(windows)
        assert len(batches) == len(windows)
        targets = torch.cat([batch.targets.flatten() for batch in batches])
        expected = [token for token in tokens_of(corpus, "val").tolist() if token != 0]
        assert targets[targets != IGNORE_INDEX].tolist() == expected


def test_a_short_last_window_is_padded_and_nobody_learns_the_padding(book: Corpus):
    n = book.split("val").n_tokens
    (batch,) = ValidationWindows(book, 4, n + 10)
    assert batch.ids.shape == (1, n + 10)
    assert batch.ids[0, n:].tolist() == [book.tokenizer.pad_id] * 10
    assert batch.targets[0, n - 1 :].tolist() == [IGNORE_INDEX] * 11
    assert batch.targets[0, : n - 1].tolist() == tokens_of(book, "val")[1:].tolist()


def test_fewer_validation_windows_are_spread_evenly_and_always_the_same(book: Corpus):
    every = ValidationWindows(book, 1, 4)
    few = ValidationWindows(book, 1, 4, max_windows=5)
    assert len(few) == 5
    gaps = {later - earlier for earlier, later in zip(few.starts, few.starts[1:])}
    assert max(gaps) - min(gaps) <= 4
    assert set(few.starts) <= set(every.starts)
    assert all(equal(one, other) for one, other in zip(few, ValidationWindows(book, 1, 4, max_windows=5)))
    assert ValidationWindows(book, 1, 4, max_windows=10**6).starts == every.starts
