"""How text is drawn from a model, as numbers: one frozen value, checked when it is made. Knows nothing of tensors.

What the numbers do is in `sampling.py`.
"""

from dataclasses import dataclass

from clockhand.config import check_types, require


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
    repetition_penalty: float = 1.0
    """Above 1 makes every token of the prompt and of the text so far less likely. 1 is off."""

    def __post_init__(self) -> None:
        check_types(self)
        require(self, "temperature", self.temperature >= 0, "0 (greedy) or more")
        require(self, "top_k", self.top_k >= 0, "0 (off) or more")
        require(self, "top_p", 0 < self.top_p <= 1, "above 0 and at most 1 (off)")
        require(self, "min_p", 0 <= self.min_p <= 1, "between 0 (off) and 1")
        # The bounds are far beyond use, and keep every penalized logit a number.
        require(self, "repetition_penalty", 0.01 <= self.repetition_penalty <= 100, "between 0.01 and 100 (1 is off)")


PLAIN = Sampling()
GREEDY = Sampling(temperature=0)
