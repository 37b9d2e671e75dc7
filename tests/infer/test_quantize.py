"""Rounded weights: as close as their type allows, and the price in nats is told truly."""

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.data.loader import Batch
from clockhand.errors import ClockhandError
from clockhand.infer.quantize import compare, rounded
from clockhand.model.packed import pack, packed, unpack
from clockhand.model.transformer import Transformer

WEIGHT = torch.randn(6, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("precision", "levels"), [("int8", 127), ("int4", 7)])
def test_no_weight_is_off_by_more_than_half_a_level_of_its_row_or_group(precision, levels):
    groups = WEIGHT.view(6, -1, 64 if precision == "int8" else 32)
    level = groups.abs().amax(-1, keepdim=True) / levels
    off = (unpack(pack(WEIGHT, precision)).view_as(groups) - groups).abs()
    assert bool(
        (off <= (0.5001 if precision == "int8" else 0.502) * level).all()
    )  # int4's scale is rounded itself, to 8 bits


def test_fp32_is_kept_and_bf16_is_torchs_own():
    assert torch.equal(unpack(pack(WEIGHT, "fp32")), WEIGHT)
    assert torch.equal(unpack(pack(WEIGHT, "bf16")), WEIGHT.bfloat16())


@pytest.mark.parametrize(
    ("precision", "bits"), [("fp32", 32), ("bf16", 16), ("int8", 8 + 32 / 64), ("int4", 4 + 32 / 32)]
)
def test_a_weight_costs_the_bits_it_should(precision, bits):
    assert pack(WEIGHT, precision).nbytes * 8 / WEIGHT.numel() == bits


def test_a_row_of_zeros_stays_zero():
    assert torch.equal(unpack(pack(torch.zeros(2, 32), "int4")), torch.zeros(2, 32))
    assert torch.equal(unpack(pack(torch.zeros(2, 32), "int8")), torch.zeros(2, 32))


def test_groups_that_do_not_fit_and_unknown_precisions_are_refused():
    with pytest.raises(ClockhandError, match="int4 needs rows of a multiple of 32 weights, not 48"):
        pack(torch.zeros(2, 48), "int4")
    with pytest.raises(ClockhandError, match="unknown precision 'int9'"):
        pack(WEIGHT, "int9")


def small_model():
    torch.manual_seed(0)
    return Transformer(
        ModelConfig(vocab_size=64, d_model=64, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=96, init_std=0.1)
    ).eval()


def test_the_price_is_nothing_for_fp32_and_rises_as_bits_fall():
    ids = torch.randint(0, 64, (1, 40), generator=torch.Generator().manual_seed(1))
    targets = ids.roll(-1)
    targets[0, -1] = -100
    batch, model = Batch(ids, targets, documents=None), small_model()
    prices = [compare(packed(model, precision), model, [batch]) for precision in ("fp32", "bf16", "int8", "int4")]
    assert prices[0].kl == 0
    assert prices[0].perplexity == prices[0].perplexity_against
    assert 0 < prices[1].kl < prices[2].kl < prices[3].kl
    assert prices[0].tokens == 39
    with torch.no_grad():
        whole = torch.nn.functional.cross_entropy(model(ids).logits[0], targets[0])
    assert prices[3].perplexity_against == pytest.approx(float(whole.exp()), rel=1e-5)


def test_rounding_leaves_the_model_it_was_given_alone_and_keeps_weights_tied():
    model = small_model()
    before = model.token_embedding.weight.clone()
    twin = rounded(model, "int4")
    assert torch.equal(model.token_embedding.weight, before)
    assert twin.lm_head.weight is twin.token_embedding.weight
