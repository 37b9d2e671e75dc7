"""Packed models: the numbers of the rounded ones to the bit, in the bytes they should take."""

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer.quantize import rounded
from clockhand.model.packed import PRECISIONS, packed, precision_of
from clockhand.model.transformer import Transformer

SIZES = dict(vocab_size=37, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, init_std=0.3)
KINDS = {
    "tied": dict(),
    "untied, with biases": dict(tie_embeddings=False, attention_bias="all", mlp_bias=True, mlp="gelu", norm="layer"),
    "experts": dict(n_experts=4, n_experts_per_token=2),
    "learned positions": dict(position="learned"),
}
IDS = torch.arange(20)[None]


def make_model(**changes):
    torch.manual_seed(0)
    return Transformer(ModelConfig(**SIZES, **changes)).eval()


def nbytes(model):
    tensors = [*model.parameters(), *model.buffers()]
    return sum(storage.nbytes() for storage in {each.data_ptr(): each.untyped_storage() for each in tensors}.values())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_packed_model_computes_what_its_rounded_weights_say_to_the_bit(kind, precision):
    model = make_model(**KINDS[kind])
    before = {name: each.clone() for name, each in model.state_dict().items()}
    twin = packed(model, precision)
    with torch.no_grad():
        assert torch.equal(twin(IDS).logits, rounded(model, precision)(IDS).logits)
    assert precision_of(twin) == precision
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())


def test_memory_falls_with_the_bits():
    model = make_model()
    # Norms stay; a row of int8 has a scale of 4 bytes, a group of 32 in int4 too.
    share = {precision: nbytes(packed(model, precision)) / nbytes(model) for precision in PRECISIONS}
    assert share["fp32"] == 1
    assert share["bf16"] == pytest.approx(1 / 2, abs=0.02)
    assert 1 / 4 < share["int8"] < 1 / 4 + 1 / 20
    assert 1 / 8 < share["int4"] < 1 / 8 + 1 / 20


def test_what_is_packed_once_is_not_packed_again():
    twin = packed(make_model(), "int8")
    assert packed(twin, "int8") is twin
    with pytest.raises(ClockhandError, match="the weights are int8 already and cannot become fp32"):
        packed(twin, "fp32")
    with pytest.raises(ClockhandError, match="unknown precision 'int3'; "):
        packed(make_model(), "int3")
    with pytest.raises(ClockhandError, match="a multiple of 32 weights, not 48"):
        packed(Transformer(ModelConfig(**{**SIZES, "d_ff": 48})), "int4")
