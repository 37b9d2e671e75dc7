"""Many rows attend as `model/attend.py` says, in C++ and in torch."""

import math

import pytest
import torch

from clockhand.infer.attend_rows import attend_in_torch, attend_rows, fastest_attend
from clockhand.infer.native import native
from clockhand.model.attend import Visibility, attend

WAYS = [attend_in_torch, attend_rows] if native() is not None else [attend_in_torch]


def inputs(lengths, places, heads=6, kv_heads=3, head_dim=16, dtype=torch.float32, slots=9, capacity=40):
    torch.manual_seed(0)
    q = torch.randn(len(lengths), heads, head_dim).to(dtype)
    keys, values = (torch.randn(slots, capacity, kv_heads, head_dim).to(dtype) for _ in range(2))
    seen = torch.zeros(len(lengths), places)
    seen.masked_fill_(torch.arange(places) >= torch.tensor(lengths)[:, None], -math.inf)
    return q, keys, values, torch.randperm(slots)[: len(lengths)], seen


def reference(q, keys, values, slots, seen):
    """One row at a time, over the keys that it sees, in fp64."""
    rows = []
    for query, slot, bias in zip(q, slots, seen):
        (places,) = (bias == 0).nonzero(as_tuple=True)
        own = [each[slot, places][None].double() for each in (keys, values)]
        sees = Visibility(torch.tensor([[len(places)]]), torch.arange(len(places))[None], 0)
        rows.append(attend(query[None, None].double(), *own, sees)[0, 0])
    return torch.stack(rows)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "sizes",
    [
        dict(),
        dict(heads=5, kv_heads=1),
        dict(heads=9, kv_heads=9),
        dict(heads=14, kv_heads=2),
        dict(head_dim=8),
        dict(head_dim=72),
        dict(head_dim=128),
    ],
    ids=str,
)
def test_rows_of_any_length_attend_to_what_they_see(way, sizes):
    for lengths, places in (([1, 2], 16), ([16, 17, 33, 5], 33), ([40, 1, 40], 40), ([3] * 8, 16)):
        given = inputs(lengths, places, **sizes)
        # fp32 sums of up to 40 terms of about 1.
        torch.testing.assert_close(way(*given).double(), reference(*given), atol=2e-6, rtol=2e-6)


@pytest.mark.parametrize("way", WAYS)
def test_in_bf16_only_the_result_is_rounded_or_little_more(way):
    given = inputs([40, 20, 9], 40, dtype=torch.bfloat16)
    error = (way(*given).double() - reference(*given)).abs().max()
    assert error < 2 * 2**-8  # of values of about 1, which torch rounds twice


@pytest.mark.parametrize("way", WAYS)
def test_places_between_those_that_are_seen_may_be_hidden_and_hold_anything(way):
    q, keys, values, slots, seen = inputs([30, 25], 30)
    seen[:, 3:9] = -math.inf
    expected = way(q, keys, values, slots, seen)
    torch.testing.assert_close(expected.double(), reference(q, keys, values, slots, seen), atol=2e-6, rtol=2e-6)
    for each in (keys, values):
        each[:, 3:9] = 7.0
    assert torch.equal(way(q, keys, values, slots, seen), expected)


@pytest.mark.parametrize("way", WAYS)
def test_scores_far_apart_neither_overflow_nor_leave_nothing(way):
    q, keys, values, slots, seen = inputs([20], 20)
    q = q * 1e4
    torch.testing.assert_close(
        way(q, keys, values, slots, seen).double(), reference(q, keys, values, slots, seen), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("broken", [math.nan, math.inf])
def test_a_key_that_is_no_number_reaches_its_own_row_and_no_other(way, broken):
    """In C++ it counted as a key that is far away: broken weights went on writing, where the plain model refuses."""
    q, keys, values, slots, seen = inputs([40, 40], 40)
    expected = way(q, keys, values, slots, seen)
    for place in (0, 20, 39):
        damaged = keys.clone()
        damaged[slots[0], place] = broken
        attended = way(q, damaged, values, slots, seen)
        assert attended[0].isnan().any()
        assert torch.equal(attended[1], expected[1])


def test_a_row_has_the_same_bits_beside_any_others():
    q, keys, values, slots, seen = inputs([7, 40, 21], 40)
    way = fastest_attend(torch.float32)
    whole = way(q, keys, values, slots, seen)
    if way is attend_in_torch:
        pytest.skip("torch promises no such thing")
    for row in range(3):
        assert torch.equal(way(q[row:][:1], keys, values, slots[row:][:1], seen[row:][:1, :40])[0], whole[row])
    assert torch.equal(way(q[:1], keys, values, slots[:1], seen[:1, :16])[0], whole[0])
