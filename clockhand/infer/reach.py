"""How far one text may go, and which ids it may go on with: what the decoders of a single text refuse.

A decoder takes memory for `reach` tokens, and its compiled step checks nothing. So all that comes in is checked here.
"""

from collections.abc import Sequence

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError


def checked_reach(config: ModelConfig, reach: int | None) -> int:
    """`reach`, or for None the model's max_seq_len. Raises `ClockhandError` for one that the model cannot have."""
    reach = config.max_seq_len if reach is None else reach
    ends = config.position == "learned"  # a table has no row beyond max_seq_len
    if reach < 1 or (ends and reach > config.max_seq_len):
        allowed = f"between 1 and max_seq_len = {config.max_seq_len}" if ends else "at least 1"
        raise ClockhandError(f"reach = {reach} must be {allowed}")
    return reach


def check_ids(config: ModelConfig, ids: Sequence[int], held: int, reach: int) -> None:
    """Raises `ClockhandError` unless `ids` can follow the `held` tokens of a text: for none at all, for one beyond the
    vocabulary, and for more than `reach` in all."""
    if not len(ids):
        raise ClockhandError("nothing to read: at least one id is needed")
    size = config.vocab_size
    wrong = next((id for id in (min(ids), max(ids)) if not 0 <= id < size), None)
    if wrong is not None:
        raise ClockhandError(f"id {wrong} is outside the vocabulary of {size} ids (0 to {size - 1})")
    if held + len(ids) > reach:
        raise ClockhandError(f"the cache holds at most {reach} tokens: {held} held and {len(ids)} more")
