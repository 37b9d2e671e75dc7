"""How well a model predicts text it has not seen: nats per token, perplexity, bits per byte.

Nats per token depend on the tokenizer: longer tokens are harder to guess and there are fewer of them. Bits per byte do
not, so they compare models with different vocabularies:

    bits per byte = Σ nats / ln 2 / Σ bytes of text the targets stand for

Both sums run over the very same targets. A special token, such as the end of a document, stands for no text, but
guessing it costs what it costs.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from clockhand.config import ModelConfig
from clockhand.data.corpora import Report, read_documents
from clockhand.data.loader import Batch, ValidationWindows
from clockhand.data.shards import Corpus, is_corpus
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.model.transformer import Transformer, evaluating
from clockhand.train.loss import IGNORE_INDEX, batch_loss, count_targets

LONGEST_UNASKED = 1024  # tokens of a window, where nobody has said how long
TOKENS_AT_ONCE = 8192


@dataclass(frozen=True)
class Evaluation:
    nats: float
    """-Σ ln p over all targets."""
    tokens: int
    """Targets."""
    bytes: int
    """Bytes of text that the targets stand for."""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """e^loss: among how many equally likely tokens the model might as well have chosen."""
        return perplexity(self.loss)

    @property
    def bits_per_byte(self) -> float:
        return self.nats / math.log(2) / self.bytes


def perplexity(loss: float) -> float:
    """e^loss, and infinity where a float has no room for it."""
    return math.exp(loss) if loss < 700 else math.inf


@torch.no_grad()
def evaluate(
    model: Transformer,
    batches: Iterable[Batch],
    token_bytes: np.ndarray,
    dtype: str = "float32",
    nats_of: Callable[[Batch], float] | None = None,
) -> Evaluation:
    """The language-model loss of `model` on `batches`, without dropout; the model is left in the mode it was in.

    `token_bytes` (V,) says how many bytes of text each id stands for. `nats_of` replaces the way
    to the Σ -ln p of a batch, for those who share the work. Raises `ClockhandError` when there is no target
    with text in it.
    """
    nats, tokens, text_bytes = 0.0, 0, 0
    with evaluating(model):
        for batch in batches:
            nats += nats_of(batch) if nats_of else batch_loss(model, batch, dtype)[0].total.item()
            tokens += count_targets(batch.targets)
            text_bytes += int(token_bytes[batch.targets[batch.targets != IGNORE_INDEX].numpy()].sum())
    if text_bytes == 0:
        raise ClockhandError(f"nothing to evaluate: {tokens} target tokens with no text in them")
    return Evaluation(nats, tokens, text_bytes)


def reading_length(config: ModelConfig, wanted: int | None = None) -> int:
    """The window that texts are read through: `wanted`, or max_seq_len where that is no longer than a page or two.

    A config may declare 32,768 positions for a model trained on 2,048. Raises `ClockhandError` for a `wanted` that the
    model was not made for.
    """
    if wanted is None:
        return min(config.max_seq_len, LONGEST_UNASKED)
    if not 1 <= wanted <= config.max_seq_len:
        raise ClockhandError(f"--seq-len {wanted} must be between 1 and max_seq_len = {config.max_seq_len}")
    return wanted


def rows_at_once(seq_len: int) -> int:
    """Windows of `seq_len` tokens in a batch that memory is sure to hold."""
    return max(1, TOKENS_AT_ONCE // seq_len)


def evaluate_texts(
    model: Transformer,
    tokenizer: Tokenizer,
    texts: Iterable[str],
    seq_len: int | None = None,
    batch_size: int | None = None,
    dtype: str = "float32",
) -> Evaluation:
    """`evaluate` on texts of any length, each a document of its own.

    Each is read through a window of `reading_length` tokens that moves by half of itself. Every token counts once, and
    has at least half a window of context before it unless its text begins there.
    """
    seq_len = reading_length(model.config, seq_len)
    windows = _windows_of(tokenizer, texts, seq_len)
    return evaluate(model, _batches_of(windows, batch_size or rows_at_once(seq_len)), tokenizer.token_bytes, dtype)


def batches_of_sources(
    config: ModelConfig,
    tokenizer: Tokenizer,
    source: str,
    text_field: str = "text",
    max_windows: int | None = None,
    seq_len: int | None = None,
    report: Report | None = None,
) -> Iterable[Batch]:
    """Text in files, or the held-out windows of a corpus folder, at most `max_windows` of them, for `evaluate`.

    Windows have `reading_length` tokens. What was odd in the files is noted in `report`. Raises `ClockhandError` for a
    corpus of another tokenizer.
    """
    seq_len = reading_length(config, seq_len)
    if is_corpus(source):
        return ValidationWindows(corpus_of(source, tokenizer), rows_at_once(seq_len), seq_len, max_windows)
    windows = _windows_of(tokenizer, read_documents([source], text_field, report), seq_len)
    return _batches_of(windows, rows_at_once(seq_len))


def corpus_of(folder: str, tokenizer: Tokenizer) -> Corpus:
    """The corpus in `folder`. Raises `ClockhandError` unless `tokenizer` made it."""
    corpus = Corpus.open(folder)
    if corpus.tokenizer.fingerprint != tokenizer.fingerprint:
        raise ClockhandError(
            f"corpus '{folder}' was made with another tokenizer than the model's: give its text instead"
        )
    return corpus


Window = tuple[Tensor, Tensor]  # ids and targets, both (T,)


def _windows_of(tokenizer: Tokenizer, texts: Iterable[str], seq_len: int) -> Iterator[Window]:
    for text in texts:
        ids = torch.tensor(tokenizer.encode(text, bos=True))
        counted = 1  # how many ids have been targets; the first never is
        while counted < len(ids):
            end = min(max(counted + (seq_len + 1) // 2, seq_len + 1), len(ids))
            start = max(end - seq_len - 1, 0)
            targets = ids[start + 1 : end].clone()
            targets[: counted - start - 1] = IGNORE_INDEX  # those that an earlier window has counted
            yield ids[start : end - 1], targets
            counted = end


def _batches_of(windows: Iterator[Window], batch_size: int) -> Iterator[Batch]:
    """Shorter windows are padded at their end, where nothing that counts can see it."""
    while rows := list(islice(windows, batch_size)):
        ids = pad_sequence([ids for ids, _ in rows], batch_first=True)
        targets = pad_sequence([targets for _, targets in rows], batch_first=True, padding_value=IGNORE_INDEX)
        yield Batch(ids, targets, documents=None)
