"""Speculative decoding: a cheap guess of several tokens, checked by the model in one call.

A call on k + 1 tokens costs little more than a call on one, because the weights are read once. So a drafter proposes
k tokens, the model scores them all, and those it would have drawn itself stay (Leviathan et al. 2023):

    text     the cat sat on
    draft                    the mat and          from q
    model                    ✓   ✓   ✗ so         accepted with probability min(1, p/q), else drawn from max(p - q, 0)

What comes out has exactly the distribution p of the model alone, whatever q is; a poor drafter costs time, no more.
With temperature 0 p is one token, and the ids are those of plain decoding. With other temperatures a seed draws other
tokens than `generate` does with it, since numbers are spent on accepting too.

`NgramDrafter` looks the end of the text up in the text so far, `ModelDrafter` asks a smaller model. `Payoff` measures
whether it is worth the time, and switches it off where it is not.
"""

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.infer.generate import Piece, TextBeforeStop
from clockhand.infer.sampling import draw_numbers, look_up, next_token_probabilities
from clockhand.infer.scorer import Scorer, scorer_for
from clockhand.infer.settings import PLAIN, Sampling
from clockhand.model.cache import SLACK
from clockhand.model.transformer import Transformer

FIRST_REACH = 512
"""Tokens that a drafting model has room for at first."""


class Drafter(Protocol):
    """Guesses how a text goes on."""

    def propose(self, ids: Sequence[int], prompt_length: int, most: int) -> tuple[list[int], Tensor | None]:
        """Up to `most` ids to follow `ids`, and what each was drawn from, (n, V); None where none was drawn by chance.

        None counts as probability 1 for each id proposed.
        """


class NgramDrafter:
    """What followed the last time that the text had its present end: the longest of up to `longest` ids wins.

    Where the text ends before the draft is long enough, the draft goes on by following itself: after a b a b it is
    a b a b a. A text that repeats itself is where guessing pays most.
    """

    def __init__(self, longest: int = 4, shortest: int = 2) -> None:
        if not 1 <= shortest <= longest:
            raise ClockhandError(f"shortest = {shortest} must be between 1 and longest = {longest}")
        self._lengths = range(longest, shortest - 1, -1)
        self._looked_up: list[int] = []  # the text so far, as of the last call
        # For ids that follow each other in it, where it goes on after the last such place; its own end is left out.
        self._after: dict[tuple[int, ...], int] = {}

    def propose(self, ids: Sequence[int], prompt_length: int, most: int) -> tuple[list[int], Tensor | None]:
        text, known = list(ids), len(self._looked_up)
        if text[:known] != self._looked_up:
            self._after, known = {}, 0
        for end in range(max(known, 1), len(text)):
            self._after |= {tuple(text[end - n : end]): end for n in self._lengths if n <= end}
        self._looked_up = list(ids)
        for length in self._lengths:
            begin = self._after.get(tuple(text[-length:]))
            if begin is not None:
                for position in range(begin, begin + most):  # may run into what it has just added
                    text.append(text[position])
                return text[len(ids) :], None
        return [], None


class ModelDrafter:
    """A smaller model with the same vocabulary, which draws by the same settings."""

    def __init__(self, model: Transformer, sampling: Sampling = PLAIN, seed: int = 0) -> None:
        self.model = model.eval()
        self._sampling = sampling
        # Not the numbers that accept what is drawn here, where both have the same seed: a draft that knows them is
        # accepted more often than it should be, and what comes out has another distribution.
        own = int(np.random.SeedSequence((seed, 1)).generate_state(1)[0])
        self._generator = torch.Generator().manual_seed(own)
        self._scorer: Scorer | None = None
        self._reach = 0  # of the scorer
        self._scored: list[int] = []  # what the scorer holds

    @torch.no_grad()
    def propose(self, ids: Sequence[int], prompt_length: int, most: int) -> tuple[list[int], Tensor | None]:
        most = min(most, self.model.config.max_seq_len - len(ids))
        if most < 1:
            return [], None
        needed = len(ids) + most
        if self._scorer is None or needed > self._reach:
            # How many tokens will come is not known here: room doubles.
            self._reach, self._scored = min(max(2 * needed, FIRST_REACH), self.model.config.max_seq_len), []
            self._scorer = scorer_for(self.model, self._reach)
        scorer, scored = self._scorer, self._scored
        same = next((n for n, (a, b) in enumerate(zip(scored, ids)) if a != b), min(len(scored), len(ids)))
        same = min(same, len(ids) - 1)
        same = same if scorer.can_truncate(same) else 0
        scorer.truncate(same)
        text, drawn_from = list(ids), []
        for _ in range(most):
            logits = scorer.extend(text[same:])[None]
            probabilities = next_token_probabilities(logits, [text], self._sampling, [prompt_length])
            same = len(text)
            text.append(int(look_up(probabilities, draw_numbers([self._generator]))))
            drawn_from.append(probabilities[0])
        self._scored = text[:-1]
        return text[len(ids) :], torch.stack(drawn_from)


class Payoff:
    """Whether drafting pays, by the clock: seconds per token of rounds with a draft against those of plain steps.

    At first PLAIN_STEPS plain steps are measured. Then rounds are drafted, and every TRIAL of them are judged: where
    they took longer per token than plain steps do, drafting rests for `pause` tokens, at first FIRST_PAUSE, then twice
    as many each time, and is tried again. A trial that pays sets the pause back.
    """

    PLAIN_STEPS = 2
    TRIAL = 8
    FIRST_PAUSE = 32

    def __init__(self) -> None:
        self.switched_off = 0
        """How often drafting was put to rest."""
        self._plain: list[float] = []
        self._resting = 0
        self._pause = self.FIRST_PAUSE
        self._rounds, self._seconds, self._tokens = 0, 0.0, 0

    @property
    def wants_draft(self) -> bool:
        return len(self._plain) >= self.PLAIN_STEPS and self._resting == 0

    def plain(self, seconds: float) -> None:
        """A step without a draft."""
        self._plain = [*self._plain, seconds][-self.TRIAL :]
        self._resting = max(0, self._resting - 1)

    def drafted(self, seconds: float, tokens: int) -> None:
        """A round with a draft, that gave `tokens` tokens (at least the one that corrects it)."""
        self._rounds, self._seconds, self._tokens = self._rounds + 1, self._seconds + seconds, self._tokens + tokens
        if self._rounds < self.TRIAL:
            return
        if self._seconds / self._tokens > sum(self._plain) / len(self._plain):
            self.switched_off += 1
            self._resting, self._pause = self._pause, 2 * self._pause
        else:
            self._pause = self.FIRST_PAUSE
        self._rounds, self._seconds, self._tokens = 0, 0.0, 0


@dataclass
class Statistics:
    """What drafting came to."""

    drafted: int = 0
    """Ids proposed."""
    accepted: int = 0
    """Of them accepted."""
    rounds: int = 0
    """Calls of the model with a draft."""
    plain_steps: int = 0
    """Calls without one, the prompt's included."""
    switched_off: int = 0
    """How often drafting was put to rest because it did not pay."""


@dataclass(kw_only=True)
class Speculation:
    """One text: iterate over it once, and it yields the ids drawn. `statistics` follows."""

    model: Transformer
    prompt: Sequence[int]
    drafter: Drafter
    sampling: Sampling = PLAIN
    max_new_tokens: int = 256
    min_new_tokens: int = 0
    stop_ids: Collection[int] = ()
    seed: int = 0
    known_ids: int | None = None
    """Ids from here on are never drawn: the tokenizer's vocab_size."""
    draft_length: int = 5
    """k: ids drafted at a time at most."""
    prefill_chunk: int = 512
    """Ids of the prompt that one call of the plain model reads at most."""
    plain: bool = False
    """Never a faster way than the reference, as in `generate.Options`."""
    clock: Callable[[], float] = time.perf_counter
    statistics: Statistics = field(default_factory=Statistics)

    def __post_init__(self) -> None:
        config = self.model.config
        if not self.prompt or len(self.prompt) > config.max_seq_len:
            raise ClockhandError(f"a prompt of {len(self.prompt)} ids must have from 1 to {config.max_seq_len}")
        for name, low, high in (
            ("draft_length", 1, SLACK),  # as far as a sliding window's cache can be cut back
            ("max_new_tokens", 0, 2**63 - 1),
            ("min_new_tokens", 0, self.max_new_tokens),
            ("seed", 0, 2**63 - 1),
            ("prefill_chunk", 1, 2**63 - 1),
        ):
            if not low <= getattr(self, name) <= high:
                raise ClockhandError(f"{name} = {getattr(self, name)} must be from {low} to {high}")
        for id in self.stop_ids:
            if not 0 <= id < config.vocab_size:
                raise ClockhandError(f"end token {id} is outside the vocabulary of {config.vocab_size} ids")
        if isinstance(self.drafter, ModelDrafter):
            theirs = self.drafter.model.config.vocab_size
            if theirs != config.vocab_size:
                raise ClockhandError(f"the draft model has {theirs} ids, but must have the model's {config.vocab_size}")

    def __iter__(self) -> Iterator[int]:
        """Reads downward: draft, score, accept."""
        self.model.eval()
        ids, payoff, statistics = list(self.prompt), Payoff(), self.statistics
        room = min(self.max_new_tokens, self.model.config.max_seq_len - len(ids))
        reach = len(ids) + room
        if room == 0:
            return
        scorer = scorer_for(self.model, reach, self.prefill_chunk, self.plain)
        generator = torch.Generator().manual_seed(self.seed)
        while len(ids) < reach:
            started, first = self.clock(), len(ids) == len(self.prompt)
            most = min(self.draft_length, reach - len(ids) - 1)
            draft: list[int] = []
            drawn_from = None
            if most > 0 and not first and payoff.wants_draft:
                draft, drawn_from = self.drafter.propose(ids, len(self.prompt), most)
            probabilities = self._probabilities(ids, draft, scorer)  # (k + 1, V)
            new = _accept(draft, drawn_from, probabilities, generator)
            seconds = self.clock() - started
            if draft:
                payoff.drafted(seconds, len(new))
                statistics.rounds += 1
                statistics.drafted += len(draft)
                statistics.accepted += len(new) - 1
            else:
                statistics.plain_steps += 1
                if not first:  # which read the whole prompt
                    payoff.plain(seconds)
            statistics.switched_off = payoff.switched_off
            for id in new:
                ids.append(id)
                yield id
                if id in self.stop_ids:
                    return
            scorer.truncate(len(ids) - 1)

    def _probabilities(self, ids: list[int], draft: list[int], scorer: Scorer) -> Tensor:
        """What each id of the draft, and the one after it, is drawn from by the model: (k + 1, V)."""
        unseen = ids[scorer.length :] + draft
        logits = scorer.score(unseen) if draft else scorer.extend(unseen)[None]  # (k + 1, V)
        if self.known_ids is not None:
            logits[:, self.known_ids :] = -torch.inf
        short = max(0, self.min_new_tokens - (len(ids) - len(self.prompt)))
        logits[:short, list(self.stop_ids)] = -torch.inf
        history = [ids + draft[:n] for n in range(len(draft) + 1)]
        return next_token_probabilities(logits, history, self.sampling, [len(self.prompt)] * len(history))


def speculative_pieces(
    speculation: Speculation, tokenizer: Tokenizer, stop_strings: Collection[str] = ()
) -> Iterator[Piece]:
    """The text of a speculation as it comes, in the pieces that `generate.stream` yields for one prompt."""
    prompt, most = speculation.prompt, speculation.max_new_tokens
    room = min(most, speculation.model.config.max_seq_len - len(prompt))
    limit = "length" if room == most else "context"
    text = TextBeforeStop(tokenizer, stop_strings, after=prompt[-1])
    if room == 0:
        yield Piece(0, None, "", limit)
    for count, id in enumerate(speculation, start=1):
        ended, may_stop = id in speculation.stop_ids, count >= speculation.min_new_tokens
        said, reason = "" if ended else text.push(id, may_stop), None
        if ended:
            reason = "stop"
        elif text.stopped:
            reason = "stop_string"
        elif count == room:
            reason = limit
        if reason is not None:
            said += text.flush(may_stop)
            reason = "stop_string" if text.stopped and not ended else reason
        yield Piece(0, id, said, reason)
        if reason is not None:
            return


def _accept(
    draft: list[int], drawn_from: Tensor | None, probabilities: Tensor, generator: torch.Generator
) -> list[int]:
    """The ids of the draft that stay, and one more drawn by the model: at least 1, at most k + 1."""
    for n, id in enumerate(draft):
        p = probabilities[n].double()  # (V,)
        q = (
            drawn_from[n].double()
            if drawn_from is not None
            else torch.zeros_like(p).index_fill_(0, torch.tensor(id), 1)
        )
        if float(draw_numbers([generator])) * q[id] < p[id]:
            continue
        left = (p - q).clamp(min=0)  # of zeros only where p = q, and then nothing is rejected but for rounding
        return [*draft[:n], int(look_up((left if left.any() else p)[None], draw_numbers([generator])))]
    return [*draft, int(look_up(probabilities[-1:], draw_numbers([generator])))]
