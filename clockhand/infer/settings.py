"""How text is drawn from a model, as numbers: one frozen value, checked when it is made. Knows nothing of tensors.

What the numbers do is in `sampling.py`.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

from clockhand.config import check_types, require
from clockhand.errors import ClockhandError

MAX_BIAS = 100.0
"""Of logits that spread over some tens this decides alone."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How to draw the next token. As it stands, from exactly what the model believes."""

    temperature: float = 1.0
    """Divides the logits: below 1 sharpens, above 1 flattens, 0 is greedy (always the best token)."""
    top_k: int = 0
    """Keep the k best tokens. 0 is off."""
    top_p: float = 1.0
    """Keep the fewest best tokens whose probabilities reach this sum. 1 is off."""
    min_p: float = 0.0
    """Keep the tokens at least this probable, relative to the best one. 0 is off."""
    typical_p: float = 1.0
    """Keep the tokens whose surprise is nearest to the expected one, up to this sum of probabilities. 1 is off."""
    repetition_penalty: float = 1.0
    """Above 1 makes every token of the prompt and of the text so far less likely. 1 is off."""
    presence_penalty: float = 0.0
    """Taken once off the logit of every token drawn so far. 0 is off."""
    frequency_penalty: float = 0.0
    """Taken off the logit of a token for every time it was drawn so far. 0 is off."""
    logit_bias: dict | tuple = ()
    """{id: bias}: added to the logit of that id; -inf forbids it. Kept as sorted (id, bias) pairs."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self, "temperature", self.temperature >= 0, "0 (greedy) or more")
        require(self, "top_k", self.top_k >= 0, "0 (off) or more")
        require(self, "top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)")
        require(self, "min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1")
        require(self, "typical_p", 0 < self.typical_p <= 1, "above 0 and at most 1 (off)")
        # The bounds are far beyond use, and keep every penalized logit a number.
        require(self, "repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100 (1 is off)")
        for name in ("presence_penalty", "frequency_penalty"):
            require(self, name, -100 <= getattr(self, name) <= 100, "between -100 and 100 (0 is off)")
        object.__setattr__(self, "logit_bias", _pairs(self.logit_bias))

    @property
    def counts_drawn(self) -> bool:
        """Whether it matters which tokens of the history were drawn, and which are the prompt's."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0

    @cached_property
    def kind(self) -> tuple:
        """Equal for those that differ only in numbers of the same stages: rows of one kind are drawn together."""
        on = (self.temperature == 0, self.temperature != 1, self.top_k > 0, self.top_p != 1, self.min_p > 0)
        penalties = (self.repetition_penalty != 1, self.presence_penalty != 0, self.frequency_penalty != 0)
        return (*on, self.typical_p != 1, *penalties, self.logit_bias)

    @cached_property
    def before_temperature(self) -> "Sampling":
        """The stages up to it. From there on they keep the best, whatever else they take out."""
        before = replace(self, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, typical_p=1.0)
        return PLAIN if before == PLAIN else before


def _pairs(bias: dict | tuple) -> tuple[tuple[int, float], ...]:
    """A logit bias as it is kept: a value that can be hashed and never changes."""
    pairs = []
    for pair in bias.items() if isinstance(bias, dict) else bias:
        if type(pair) is not tuple or len(pair) != 2 or type(pair[0]) is not int or pair[0] < 0:
            raise ClockhandError(f"logit_bias {pair!r} must be a pair of an id, 0 or more, and a number")
        id, value = pair
        if type(value) not in (int, float) or not (value == -math.inf or -MAX_BIAS <= value <= MAX_BIAS):
            raise ClockhandError(
                f"logit_bias of id {id} = {value!r} must be from -{MAX_BIAS:g} to {MAX_BIAS:g}, or -inf"
            )
        pairs.append((id, float(value)))
    if len({id for id, _ in pairs}) < len(pairs):
        raise ClockhandError(f"logit_bias = {bias!r} must name each id once")
    return tuple(sorted(pairs))


PLAIN = Sampling()
GREEDY = Sampling(temperature=0)
