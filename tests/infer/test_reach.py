"""A text goes as far as its model can, and takes only ids of its vocabulary."""

import pytest

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer.reach import check_ids, checked_reach

ROTATED, LEARNED = (
    ModelConfig(vocab_size=37, d_model=16, n_layers=1, n_heads=2, d_ff=16, max_seq_len=20, position=position)
    for position in ("rope", "learned")
)


def test_a_reach_is_the_models_unless_another_is_named_and_only_learned_positions_end():
    assert checked_reach(ROTATED, None) == checked_reach(LEARNED, None) == 20
    assert checked_reach(ROTATED, 1000) == 1000
    for config, reach, allowed in (
        (ROTATED, 0, "at least 1"),
        (LEARNED, 0, "between 1 and max_seq_len = 20"),
        (LEARNED, 21, "between 1 and max_seq_len = 20"),
    ):
        with pytest.raises(ClockhandError, match=f"^reach = {reach} must be {allowed}$"):
            checked_reach(config, reach)


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([], "nothing to read"),
        ([0, 37], "id 37 is outside the vocabulary of 37 ids"),
        ([3, -1, 4], "id -1 is outside"),
        ([1] * 6, "at most 20 tokens: 15 held and 6 more"),
    ],
)
def test_what_cannot_follow_is_refused_by_name_and_what_just_fits_is_not(ids, words):
    check_ids(ROTATED, [0, 36, 1, 1, 1], 15, 20)
    with pytest.raises(ClockhandError, match=words):
        check_ids(ROTATED, ids, 15, 20)
