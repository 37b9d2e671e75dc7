"""Text out of a model, one token after another: the reference, which every faster way must equal.

A step reads downward: run the model on what its cache has not seen (at first the whole prompt, then one token a row),
draw one token for each row that still runs, hand it out. Prompts of different lengths are padded on the left:

    prompts      positions            what the cache keeps
    a b c d e    0  1  2  3  4        a b c d e
    x y         -1 -1 -1  0  1        x y

A row gets the tokens that it would get alone: nothing it reads depends on its neighbours, row r draws with the seed
`seed + r`, and a row that has ended is padding until the last one ends.

`stream` yields as it goes, `generate` collects what `stream` yields, `generate_text` takes text instead of ids. How a
token is drawn is in `sampling.py`; being fast is left to others.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypedDict, Unpack, overload

import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import StreamDecoder, Tokenizer
from clockhand.errors import ClockhandError
from clockhand.infer.engine import Engine, Request, engine_for
from clockhand.infer.explain import Explanation, explain
from clockhand.infer.logprobs import TokenLogprob, token_logprobs
from clockhand.infer.routes import route_of
from clockhand.infer.sampling import draw_numbers, look_up, next_token_probabilities
from clockhand.infer.settings import PLAIN, Sampling
from clockhand.infer.static import StaticDecoder
from clockhand.model.cache import KVCache
from clockhand.model.transformer import Transformer, evaluating, modes_kept


class Options(TypedDict, total=False):
    """What `stream`, `generate` and `generate_text` take alike, beside the sampling."""

    max_new_tokens: int
    """Tokens to draw for each prompt at most."""
    min_new_tokens: int
    """Before so many are drawn no end token can be, and a stop string is text like any other. The context still ends
    a row."""
    stop_ids: Collection[int] | None
    """End tokens, any of which ends a row. None means the tokenizer's own, if it has one."""
    stop_strings: Collection[str]
    """Texts before which a row's text ends, wherever the borders of its tokens are."""
    n: int
    """Completions of each prompt. With n = 3 rows 0, 1, 2 continue the first prompt, rows 3, 4, 5 the second."""
    seed: int
    """Row r of the batch draws as if it were alone with the seed `seed + r`."""
    logprobs: int | None
    """Tell how probable the model itself found each token drawn, and so many of the best. None tells nothing."""
    explain: bool
    """Tell for each token drawn what every stage of the sampling did to the candidates."""
    plain: bool
    """Never a faster way than the reference (`routes.py`): the last bits of its logits are others."""


@dataclass(frozen=True)
class Piece:
    """What one step adds to one row. The texts of a row's pieces, joined, are its completion's text."""

    row: int
    """Which row it continues: the number of its prompt; with n completions of each, prompt · n + completion."""
    id: int | None
    """The id drawn. None where the row ended before its first one."""
    text: str
    """Whole characters that can no longer turn out to begin a stop string. Often empty."""
    finish_reason: str | None
    """None while the row runs on; in its last piece
    stop: it drew an end token; stop_string: its text came to a stop string;
    length: it has max_new_tokens; context: prompt and new tokens fill the model's max_seq_len."""
    logprob: TokenLogprob | None = None
    """Where `logprobs` were asked for, and an id was drawn."""
    explanation: Explanation | None = None
    """Where it was asked to `explain`, and an id was drawn."""


@dataclass(frozen=True)
class Completion:
    """What was generated for one prompt."""

    text: str
    """Without special tokens, and ending before the stop string if there was one. Empty without a tokenizer."""
    ids: list[int]
    """All that were drawn, with the end token, or with those that spell the stop string."""
    finish_reason: str
    """stop | stop_string | length | context, as in `Piece`."""
    logprobs: list[TokenLogprob] | None = None
    """One for each of `ids`, where they were asked for."""
    explanations: list[Explanation] | None = None
    """One for each of `ids`, where they were asked for."""


def stream(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = PLAIN,
    *,
    tokenizer: Tokenizer | None = None,
    max_new_tokens: int = 256,
    min_new_tokens: int = 0,
    stop_ids: Collection[int] | None = None,
    stop_strings: Collection[str] = (),
    n: int = 1,
    seed: int = 0,
    logprobs: int | None = None,
    explain: bool = False,
    plain: bool = False,
) -> Iterator[Piece]:
    """Continues every prompt (its ids), and yields a `Piece` for every token drawn. See `Options` for the settings.

    The way is chosen by `routes.route_of`. By the step in C++ at most 32 rows go on at a time, and a prompt is read
    once for all its completions.

    With a tokenizer pieces have text, no id is drawn that it does not know, and an empty prompt begins from its bos
    token. A setting or a prompt that cannot be honoured raises `ClockhandError` here, before the first piece is asked
    for; an id beyond the model's vocabulary does so with the first piece.
    """
    config = model.config
    for name, value in dict(max_new_tokens=max_new_tokens, min_new_tokens=min_new_tokens, n=n, seed=seed).items():
        if type(value) is not int:
            raise ClockhandError(f"{name} = {value!r} must be a whole number")
    if max_new_tokens < 0:
        raise ClockhandError(f"max_new_tokens = {max_new_tokens} must be 0 or more")
    if not 0 <= min_new_tokens <= max_new_tokens:
        raise ClockhandError(f"min_new_tokens = {min_new_tokens} must be from 0 to max_new_tokens = {max_new_tokens}")
    if n < 1:
        raise ClockhandError(f"n = {n} must be at least 1")
    if not 0 <= seed < 2**63:
        raise ClockhandError(f"seed = {seed} must be between 0 and 2**63 - 1")
    if stop_ids is None:
        stop_ids = [] if tokenizer is None or tokenizer.eos_id is None else [tokenizer.eos_id]
    for id in stop_ids:
        if not 0 <= id < config.vocab_size:
            raise ClockhandError(f"end token {id} is outside the vocabulary of {config.vocab_size} ids")
    if isinstance(stop_strings, str) or "" in stop_strings:
        raise ClockhandError(f"stop_strings = {stop_strings!r} must be a list of strings, none of them empty")
    if stop_strings and tokenizer is None:
        raise ClockhandError(f"stop_strings = {stop_strings!r} need a tokenizer: ids alone have no text to look in")

    known_ids = config.vocab_size if tokenizer is None else tokenizer.vocab_size
    if logprobs is not None and not 0 <= logprobs <= known_ids:
        raise ClockhandError(f"logprobs = {logprobs} must be from 0 to the {known_ids} ids there are")
    for id, _ in sampling.logit_bias:
        if id >= known_ids:
            raise ClockhandError(f"logit_bias of id {id} is outside the vocabulary of {known_ids} ids")
    forbidden = {id for id, bias in sampling.logit_bias if bias == -math.inf}
    if min_new_tokens:
        forbidden |= set(stop_ids)
    if len(forbidden) >= known_ids and forbidden.issuperset(range(known_ids)):
        raise ClockhandError(f"all of the {known_ids} ids are forbidden by logit_bias and min_new_tokens")

    rows = []
    for number in range(len(prompts) * n):
        ids = _checked_prompt(prompts[number // n], number // n, config, tokenizer)
        text = None if tokenizer is None else TextBeforeStop(tokenizer, stop_strings, after=ids[-1])
        room = min(max_new_tokens, config.max_seq_len - len(ids))
        limit = "length" if room == max_new_tokens else "context"
        rows.append(
            _Row(
                number=number,
                ids=ids,
                prompt_length=len(ids),
                min_new_tokens=min_new_tokens,
                reach=len(ids) + room,
                limit=limit,
                stop_ids=frozenset(stop_ids),
                text=text,
                generator=torch.Generator().manual_seed(seed + number),
                finish_reason=None if room else limit,
            )
        )
    return _pieces(model, rows, sampling, known_ids, logprobs, explain, plain)


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = PLAIN,
    *,
    tokenizer: Tokenizer | None = None,
    **options: Unpack[Options],
) -> list[Completion]:
    """The whole continuation of every prompt (its ids), in their order, the n of a prompt together.

    Everything else is as in `stream`.
    """
    rows: list[list[Piece]] = [[] for _ in range(len(prompts) * max(options.get("n", 1), 0))]
    for piece in stream(model, prompts, sampling, tokenizer=tokenizer, **options):
        rows[piece.row].append(piece)
    return [
        Completion(
            text="".join(piece.text for piece in pieces),
            ids=[piece.id for piece in pieces if piece.id is not None],
            finish_reason=str(pieces[-1].finish_reason),
            logprobs=None
            if options.get("logprobs") is None
            else [piece.logprob for piece in pieces if piece.logprob is not None],
            explanations=[piece.explanation for piece in pieces if piece.explanation is not None]
            if options.get("explain")
            else None,
        )
        for pieces in rows
    ]


@overload
def generate_text(
    model: Transformer, tokenizer: Tokenizer, prompts: str, sampling: Sampling = PLAIN, **options: Unpack[Options]
) -> Completion: ...
@overload
def generate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: list[str],
    sampling: Sampling = PLAIN,
    **options: Unpack[Options],
) -> list[Completion]: ...
def generate_text(
    model: Transformer,
    tokenizer: Tokenizer,
    prompts: str | list[str],
    sampling: Sampling = PLAIN,
    **options: Unpack[Options],
) -> Completion | list[Completion]:
    """Continues one text, or a list of them as one batch: a `Completion` for one, a list of them for a list.

    Several completions (`n`) of one text are those of a list with one text in it.

    >>> generate_text(model, tokenizer, "Once upon", Sampling(temperature=0.8), max_new_tokens=20).text
    ' a time there was ...'
    """
    if isinstance(prompts, str) and options.get("n", 1) != 1:
        raise ClockhandError(f"n = {options['n']} must be 1 for one text; give a list of texts")
    texts = [prompts] if isinstance(prompts, str) else prompts
    ids = [prompt_ids(tokenizer, text) for text in texts]
    completions = generate(model, ids, sampling, tokenizer=tokenizer, **options)
    return completions[0] if isinstance(prompts, str) else completions


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """The ids a model is given to continue `text` from, as documents begin: with bos where the tokenizer puts it."""
    return tokenizer.encode(text, bos=True)


class TextBeforeStop:
    """The text of ids as they come, ending before the first stop string.

    An end of the text that may yet become a stop string is held back until that is known, so none is ever shown in
    part. What counts is the stop string that is complete first (the longest, if several are at once), and hence never
    where the borders of the tokens are.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Iterable[str], after: int) -> None:
        """`after` is the id before the first: a space that follows text is part of the text."""
        self.stopped = False
        self._stop_strings = list(stop_strings)
        self._decoder = StreamDecoder(tokenizer, continues=after not in tokenizer.special_ids)
        self._held = ""

    def push(self, id: int, may_stop: bool = True) -> str:
        """The text that is certain with this id. `stopped` tells whether it was the last.

        Unless it `may_stop`, stop strings that are complete with this id are text like any other, and no part of a
        later one.
        """
        return self._advance(self._decoder.push(id), may_stop)

    def flush(self, may_stop: bool = True) -> str:
        """The text still held back, when no more ids come."""
        text = self._advance(self._decoder.flush(), may_stop) + self._held
        self._held = ""
        return text

    def _advance(self, more: str, may_stop: bool) -> str:
        if self.stopped:
            return ""
        text, stops = self._held + more, self._stop_strings
        found = [(start + len(stop), start) for stop in stops if (start := text.find(stop)) >= 0]
        if found and may_stop:
            self.stopped, self._held = True, ""
            _, start = min(found)
            return text[:start]
        # Here only those that come too early are in it.
        first = max((text.rfind(stop) + len(stop) for stop in stops if stop in text), default=0)
        beginnings = (i for i in range(first, len(text)) if any(stop.startswith(text[i:]) for stop in stops))
        certain = next(beginnings, len(text))
        self._held = text[certain:]
        return text[:certain]


@dataclass
class _Row:
    """One prompt on its way."""

    number: int
    ids: list[int]  # the prompt, and what was drawn since
    prompt_length: int
    min_new_tokens: int
    reach: int  # the most ids it may have
    limit: str  # what it means to reach that: length | context
    stop_ids: frozenset[int]
    text: TextBeforeStop | None
    generator: torch.Generator
    finish_reason: str | None

    @property
    def is_short(self) -> bool:
        """Whether it has fewer new tokens than it must."""
        return len(self.ids) - self.prompt_length < self.min_new_tokens

    def extend(self, drawn: int) -> tuple[str, str | None]:
        """Takes in the id drawn, and settles whether it was the last: a piece's text and finish_reason."""
        self.ids.append(drawn)
        ended, may_stop = drawn in self.stop_ids, not self.is_short
        text = "" if ended or self.text is None else self.text.push(drawn, may_stop)
        if ended:
            self.finish_reason = "stop"
        elif self.text is not None and self.text.stopped:
            self.finish_reason = "stop_string"
        elif len(self.ids) == self.reach:
            self.finish_reason = self.limit
        if self.finish_reason is not None and self.text is not None:
            text += self.text.flush(may_stop)
            if self.text.stopped and not ended:  # by the last of the text, half a character, say
                self.finish_reason = "stop_string"
        return text, self.finish_reason


def _pieces(
    model: Transformer,
    rows: list[_Row],
    sampling: Sampling,
    known_ids: int,
    logprobs: int | None,
    explaining: bool,
    plain: bool,
) -> Iterator[Piece]:
    """The way that `routes.py` chooses. The loop below is the reference, with the model's own blocks."""
    going = [row for row in rows if row.finish_reason is None]
    route = route_of(model, len(going), plain, explaining)
    if route.name == "step" and going:
        with modes_kept(model):
            engine = engine_for(model, len(going), max(row.reach for row in going), known_ids)
        yield from _pieces_of_engine(engine, rows, sampling, logprobs)
        return
    for batch in _batches(model.config, rows):
        for row in batch:
            if row.finish_reason is not None:  # no room for a first token
                yield Piece(row.number, None, "", row.finish_reason)
        cache = KVCache(model.config, len(batch), max(row.reach for row in batch), model.dtype, model.device)
        decoder = StaticDecoder(model, batch[0].reach) if route.name == "graph" and going else None
        while running := [number for number, row in enumerate(batch) if row.finish_reason is None]:
            # On the CPU from here on, so that a seed means the same draws on every device.
            if decoder is not None:  # the same logits, sooner
                model_logits = decoder.extend(batch[0].ids[decoder.length :])[None]
            else:
                model_logits = _next_logits(model, batch, cache)[running].float().cpu()
            going = [batch[number] for number in running]
            logits = _drawable(model_logits, going, known_ids)
            history, prompt_lengths = [row.ids for row in going], [row.prompt_length for row in going]
            probabilities = next_token_probabilities(logits, history, sampling, prompt_lengths)
            numbers = draw_numbers([row.generator for row in going])
            drawn = look_up(probabilities, numbers).tolist()

            told: list[TokenLogprob | None] = [None] * len(going)
            why: list[Explanation | None] = [None] * len(going)
            if logprobs is not None:
                told = [*token_logprobs(model_logits, drawn, logprobs, known_ids)]
            if explaining:
                why = [*explain(model_logits, logits, history, sampling, prompt_lengths, numbers, drawn)]
            for row, id, logprob, explanation in zip(going, drawn, told, why):
                text, finish_reason = row.extend(id)
                yield Piece(row.number, id, text, finish_reason, logprob, explanation)


def _pieces_of_engine(engine: Engine, rows: list[_Row], sampling: Sampling, logprobs: int | None) -> Iterator[Piece]:
    """The same pieces; those of a step in the order of its rows."""
    asked: dict[int, _Row] = {}
    for row in rows:
        if row.finish_reason is not None:  # no room for a first token
            yield Piece(row.number, None, "", row.finish_reason)
            continue
        room = row.reach - len(row.ids)
        request = Request(
            ids=row.ids,
            sampling=sampling,
            max_new_tokens=room,
            min_new_tokens=min(row.min_new_tokens, room),
            stop_ids=row.stop_ids,
            seed=row.generator.initial_seed(),
            logprobs=logprobs,
        )
        asked[engine.submit(request)] = row
    while not engine.idle:
        for event in engine.step():
            if event.id is None:
                raise ClockhandError(str(event.error))
            row = asked[event.request]
            text, finish_reason = row.extend(event.id)
            if finish_reason is not None and event.finish_reason is None:  # a stop string
                engine.cancel(event.request)
            yield Piece(row.number, event.id, text, finish_reason, event.logprob)


def _drawable(model_logits: Tensor, rows: list[_Row], known_ids: int) -> Tensor:
    """The logits (B, V) of the model, but -inf for what must not be drawn."""
    logits = model_logits.clone()
    logits[:, known_ids:] = -torch.inf  # a vocabulary may be padded with ids that stand for nothing
    for each, row in zip(logits, rows):
        if row.is_short:
            each[list(row.stop_ids)] = -torch.inf
    return logits


def _batches(config: ModelConfig, rows: list[_Row]) -> list[list[_Row]]:
    """Rows that may share a cache: all of them, except under `dynamic` RoPE scaling.

    There the rotation follows the length that the cache is made for, and rows of another reach would be turned
    otherwise than alone.
    """

    def reach(row: _Row) -> int:
        return row.reach if config.rope_scaling == "dynamic" else 0

    return [list(batch) for _, batch in groupby(sorted(rows, key=reach), reach)]


def _next_logits(model: Transformer, rows: list[_Row], cache: KVCache) -> Tensor:
    """The logits after the last id of each row, (B, V). Those of rows that have ended mean nothing."""
    held = cache.lengths.tolist()
    unseen = [[] if row.finish_reason else row.ids[length:] for row, length in zip(rows, held)]
    ids, positions = left_padded(unseen, held)
    device = cache.lengths.device
    with torch.no_grad(), evaluating(model):
        hidden = model.hidden(ids.to(device), positions.to(device), cache=cache).hidden[:, -1]  # (B, D)
        return model.lm_head(hidden)


def left_padded(rows: Sequence[Sequence[int]], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
    """ids and positions, each (B, T), of rows of any lengths; row b begins at position starts[b], padding is -1."""
    width = max(len(row) for row in rows)
    ids = torch.zeros(len(rows), width, dtype=torch.int64)
    positions = torch.full_like(ids, -1)
    for b, (row, start) in enumerate(zip(rows, starts)):
        ids[b, width - len(row) :] = torch.tensor(row, dtype=torch.int64)
        positions[b, width - len(row) :] = torch.arange(start, start + len(row))
    return ids, positions


def _checked_prompt(prompt: Sequence[int], number: int, config: ModelConfig, tokenizer: Tokenizer | None) -> list[int]:
    """The ids to begin from: a copy of the prompt, or bos where it is empty."""
    ids = [int(id) for id in prompt]
    if not ids:
        if tokenizer is None or tokenizer.bos_id is None:
            raise ClockhandError(f"prompt {number} is empty, and without a tokenizer's bos token nothing begins a text")
        ids = [tokenizer.bos_id]
    if len(ids) > config.max_seq_len:
        limit = f"the model's context of max_seq_len = {config.max_seq_len}"
        raise ClockhandError(f"prompt {number} has {len(ids)} tokens, more than {limit}")
    return ids
