"""Attention in blocks: the same values and gradients as the definition, wherever the blocks end."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from clockhand.model.attend import Visibility, attend_reference
from clockhand.model.attend_blocks import BLOCK, as_bias, attend_blocks


def in_order(batch: int, length: int, documents: torch.Tensor | None = None, window: int = 0) -> Visibility:
    positions = torch.arange(length).expand(batch, length)
    return Visibility(positions, positions, window, documents, documents, in_order=True)


def packed(length: int) -> torch.Tensor:
    """Two rows of documents; one ends on a block's edge, one just after."""
    documents = torch.zeros(2, length, dtype=torch.int64)
    documents[0, BLOCK:] = 1
    documents[1, BLOCK + 1 :] = 1
    documents[1, -1:] = 2
    return documents


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (3, 1)])
@pytest.mark.parametrize("length", [1, 5, BLOCK, BLOCK + 1, 2 * BLOCK + 17])
@pytest.mark.parametrize("rule", ["causal", "packed", "window"])
def test_blocks_equal_the_definition_in_values_and_gradients(heads, kv_heads, length, rule):
    torch.manual_seed(0)
    inputs = [
        torch.randn(2, length, n, 8, dtype=torch.float64, requires_grad=True) for n in (heads, kv_heads, kv_heads)
    ]
    sees = in_order(2, length, packed(length) if rule == "packed" else None, window=70 if rule == "window" else 0)
    answer, expected = attend_blocks(*inputs, sees.bias, sees.window), attend_reference(*inputs, sees)
    torch.testing.assert_close(answer, expected, rtol=1e-12, atol=1e-12)
    slope = torch.randn_like(answer)
    for found, wanted in zip(torch.autograd.grad(answer, inputs, slope), torch.autograd.grad(expected, inputs, slope)):
        torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


def test_a_bias_that_hides_less_than_the_rule_gives_another_answer():
    """The control: were documents ignored, the comparison above would fail."""
    torch.manual_seed(0)
    length = BLOCK + 9
    q, k, v = (torch.randn(2, length, 2, 8) for _ in range(3))
    documents = packed(length)
    blind = attend_blocks(q, k, v, in_order(2, length).bias)
    assert (blind - attend_reference(q, k, v, in_order(2, length, documents))).abs().max() > 0.1


def test_large_scores_overflow_neither_forward_nor_backward():
    q = torch.full((1, 4, 1, 4), 200.0, requires_grad=True)
    k, v = torch.full((1, 4, 1, 4), 200.0), torch.randn(1, 4, 1, 4)
    answer = attend_blocks(q, k, v, in_order(1, 4).bias)
    answer.sum().backward()
    assert answer.isfinite().all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("window", [0, 1, 70, 1000])
def test_a_strip_of_bias_is_worth_the_whole(window):
    torch.manual_seed(0)
    length = 3 * BLOCK + 5
    q, k, v = (torch.randn(2, length, 2, 8) for _ in range(3))
    sees = in_order(2, length, window=window)
    assert sees.bias.shape == (BLOCK, 4 * BLOCK)
    whole = as_bias(sees.mask).expand(2, -1, -1)
    assert torch.equal(attend_blocks(q, k, v, sees.bias, window), attend_blocks(q, k, v, whole, window))


def test_the_bias_of_rows_that_count_up_does_not_grow_with_their_number_or_the_square_of_their_length():
    for batch in (1, 8):
        assert in_order(batch, 8192).bias.shape == (BLOCK, 8192)
        assert in_order(batch, 256).mask.shape == (1, 256, 256)
    assert in_order(2, 256, packed(256)).bias.shape == (2, 256, 256), "documents end elsewhere in every row"


def multiplied(length: int, window: int) -> int:
    """FLOPs of the products of one forward and one backward pass."""
    q, k, v = (torch.randn(1, length, 1, 8, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        attend_blocks(q, k, v, in_order(1, length, window=window).bias, window).sum().backward()
    return counter.get_total_flops()


def test_blocks_before_a_window_are_not_multiplied():
    a_pair = 7 * 2 * 8  # scores and answer, then scores again and four gradients, of 8 values each
    long = 16 * BLOCK
    assert multiplied(long, 0) == a_pair * BLOCK * sum(BLOCK * n for n in range(1, 17))
    # A block and the window before its first query, from a multiple of 16: 112 keys and the block's own 128.
    assert multiplied(long, 100) == a_pair * BLOCK * (BLOCK + 15 * (112 + BLOCK))
