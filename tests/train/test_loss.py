"""The loss: what counts as a target, and that every target counts the same."""

import math

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings

from clockhand.train import loss as losses
from clockhand.train.loss import IGNORE_INDEX, cross_entropy, linear_cross_entropy, next_token_targets


def test_the_loss_is_minus_the_mean_log_of_the_products_of_the_softmax():
    """Against the definition written out in float64, one position at a time."""
    torch.manual_seed(0)
    logits, targets = torch.randn(2, 5, 7, dtype=torch.float64) * 3, torch.randint(7, (2, 5))
    targets[0, 3] = IGNORE_INDEX
    logs = [
        math.log(math.exp(logits[b, t, targets[b, t]]) / sum(math.exp(x) for x in logits[b, t].tolist()))
        for b in range(2)
        for t in range(5)
        if targets[b, t] != IGNORE_INDEX
    ]
    loss = cross_entropy(logits, targets)
    assert loss.count == len(logs) == 9
    assert float(loss.mean) == pytest.approx(-sum(logs) / len(logs), rel=1e-12)


def test_half_precision_logits_are_summed_in_fp32():
    logits = torch.randn(1, 64, 100).bfloat16()
    targets = torch.randint(100, (1, 64))
    loss = cross_entropy(logits, targets)
    assert loss.total.dtype == torch.float32
    assert float(loss.total) == pytest.approx(float(cross_entropy(logits.double(), targets).total), rel=1e-6)


def test_without_a_target_the_loss_is_0_and_so_is_every_gradient():
    logits = torch.randn(2, 3, 5, requires_grad=True)
    loss = cross_entropy(logits, torch.full((2, 3), IGNORE_INDEX))
    loss.mean.backward()
    assert (loss.mean.item(), loss.count) == (0.0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()


def test_control_a_plain_mean_over_no_target_is_nan():
    logits = torch.randn(3, 5)
    assert torch.nn.functional.cross_entropy(logits, torch.full((3,), IGNORE_INDEX)).isnan()


def test_targets_are_the_next_ids_and_the_last_position_has_none():
    assert next_token_targets(torch.tensor([[5, 6, 7]])).tolist() == [[6, 7, IGNORE_INDEX]]


def test_no_position_predicts_the_first_token_of_another_document():
    ids, documents = torch.tensor([[5, 6, 7, 8, 9]]), torch.tensor([[0, 0, 1, 1, 2]])
    expected = [[6, IGNORE_INDEX, 8, IGNORE_INDEX, IGNORE_INDEX]]
    assert next_token_targets(ids, documents).tolist() == expected
    assert next_token_targets(ids).tolist() != expected  # control: without documents the boundaries are learned


def test_padding_is_neither_predicted_nor_predicted_from():
    ids, is_token = torch.tensor([[0, 0, 5, 6], [5, 6, 0, 0]]), torch.tensor([[0, 0, 1, 1], [1, 1, 0, 0]])
    ignored = IGNORE_INDEX
    expected = [[ignored, ignored, 6, ignored], [6, ignored, ignored, ignored]]
    assert next_token_targets(ids, is_token=is_token).tolist() == expected


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=20), st.lists(st.integers(0, 2), min_size=20, max_size=20))
def test_a_target_is_the_next_id_or_is_ignored(ids, documents):
    documents = documents[: len(ids)]
    targets = next_token_targets(torch.tensor([ids]), torch.tensor([documents]))[0].tolist()
    for t, target in enumerate(targets):
        learned = t + 1 < len(ids) and documents[t] == documents[t + 1]
        assert target == (ids[t + 1] if learned else IGNORE_INDEX)


@pytest.mark.parametrize("rows_at_once", [1, 3, 100])
@pytest.mark.parametrize("learned", ["all", "some", "none"])
def test_the_loss_without_all_logits_is_the_loss_in_value_and_gradients(monkeypatch, rows_at_once, learned):
    torch.manual_seed(0)
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", rows_at_once * 11)
    hidden = torch.randn(2, 5, 6, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(11, 6, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(11, (2, 5))
    if learned != "all":
        targets[0, 2:] = IGNORE_INDEX
    if learned == "none":
        targets[:] = IGNORE_INDEX
    found, expected = linear_cross_entropy(hidden, weight, targets), cross_entropy(F.linear(hidden, weight), targets)
    assert found.count == expected.count
    torch.testing.assert_close(found.mean, expected.mean, rtol=1e-12, atol=0)
    for ours, theirs in zip(
        torch.autograd.grad(3 * found.mean, (hidden, weight)), torch.autograd.grad(3 * expected.mean, (hidden, weight))
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-14)


def test_the_loss_never_holds_all_logits(monkeypatch):
    """Of 64 rows of logits, at most the 8 allowed exist at any time: counted in the largest tensor softmax is given."""
    monkeypatch.setattr(losses, "LOGITS_AT_ONCE", 8 * 50)
    seen = []
    log_softmax = torch.log_softmax
    monkeypatch.setattr(torch, "log_softmax", lambda x, *a, **k: seen.append(x.numel()) or log_softmax(x, *a, **k))
    hidden, weight = torch.randn(64, 4, requires_grad=True), torch.randn(50, 4, requires_grad=True)
    linear_cross_entropy(hidden, weight, torch.randint(50, (64,))).total.backward()
    assert len(seen) == 8
    assert max(seen) == 8 * 50


def test_under_autocast_the_loss_multiplies_in_bf16_and_sums_in_fp32():
    torch.manual_seed(0)
    hidden, weight = torch.randn(40, 16, requires_grad=True), torch.randn(30, 16, requires_grad=True)
    targets = torch.randint(30, (40,))
    with torch.autocast("cpu", torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    assert loss.total.dtype == torch.float32
    rounded = cross_entropy(F.linear(hidden.bfloat16(), weight.bfloat16()), targets)
    assert float(loss.total) == pytest.approx(float(rounded.total), rel=1e-5)
    loss.total.backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


def test_at_a_hundred_thousand_ids_a_loss_keeps_no_logits_for_later():
    """What backward needs is a gradient of the hidden states and one of the weight, not (N, V) of anything."""
    hidden, weight = torch.randn(128, 4, requires_grad=True), torch.randn(100_000, 4, requires_grad=True)
    held = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t.numel()) or t, lambda t: t):
        linear_cross_entropy(hidden, weight, torch.randint(100_000, (128,)))
    assert sorted(held) == [128 * 4, 100_000 * 4]


@pytest.mark.parametrize("reading", [True, False])
def test_no_gradient_is_computed_where_a_text_is_only_read(monkeypatch, reading):
    """An evaluation would otherwise make three products for one. The control is a step that learns."""
    made = []
    scatter_add = torch.Tensor.scatter_add_
    monkeypatch.setattr(torch.Tensor, "scatter_add_", lambda *given: made.append(given) or scatter_add(*given))
    weight = torch.nn.Parameter(torch.randn(11, 4))
    with torch.set_grad_enabled(not reading):
        linear_cross_entropy(torch.randn(2, 3, 4), weight, torch.randint(11, (2, 3)))
    assert bool(made) is not reading
