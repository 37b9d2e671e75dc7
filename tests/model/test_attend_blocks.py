"""Attention in blocks: the same values and gradients as the definition, wherever the blocks end."""

import pytest
import torch

from clockhand.model.attend import Visibility, attend_reference
from clockhand.model.attend_blocks import BLOCK, attend_blocks


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
    answer, expected = attend_blocks(*inputs, sees.bias), attend_reference(*inputs, sees)
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
