"""The fused step of many streams computes what the plain one does, and is used only where it can."""

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.infer.fused import FusedRunner, best_runner, is_fusible
from clockhand.infer.runner import ReferenceRunner
from clockhand.infer.scheduler import Row
from clockhand.model.transformer import Transformer

SWITCHES = {
    "llama": {},
    "one kv head": dict(n_kv_heads=1),
    "all kv heads": dict(n_kv_heads=4),
    "normed queries and keys": dict(qk_norm=True),
    "biases": dict(attention_bias="all", mlp_bias=True),
    "biases of q, k and v alone": dict(attention_bias="qkv"),
    "layer norm after": dict(norm="layer", norm_position="post"),
    "gelu": dict(mlp="gelu"),
    "relu": dict(mlp="relu"),
    "no residual": dict(residual=False),
    "interleaved": dict(rope_layout="interleaved"),
    "learned positions": dict(position="learned"),
    "no positions": dict(position="none"),
    "a window": dict(sliding_window=3),
    "an untied head": dict(tie_embeddings=False),
}
NOT_FUSED = {
    "experts": dict(n_experts=2),
    "dynamic rope": dict(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=8),
}


def model(**changes):
    sizes = dict(vocab_size=50, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=32)
    torch.manual_seed(0)
    made = Transformer(ModelConfig(**{**sizes, "init_std": 0.3, **changes})).eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if name.endswith("bias"):  # which begin at 0, where a forgotten one would not be noticed
                parameter.normal_()
    return made


def logits(runner):
    """Of steps in which slots of different lengths take one id each, and slot 1 takes none."""
    runner.run([Row(0, [1, 2, 3, 4, 5], 0), Row(2, [6], 0)])
    return [runner.run([Row(0, [7], 5 + step), Row(2, [8 + step], 1 + step)]) for step in range(6)]


@pytest.mark.parametrize("changes", SWITCHES.values(), ids=SWITCHES)
def test_the_fused_step_equals_the_plain_one(changes):
    whole = model(**changes)
    fused = best_runner(whole, 3, 32, 8)
    assert isinstance(fused, FusedRunner)
    for got, expected in zip(logits(fused), logits(ReferenceRunner(whole, 3, 32, 8))):
        # Sums in another order, in fp32, of logits of about 10.
        torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("changes", NOT_FUSED.values(), ids=NOT_FUSED)
def test_what_cannot_be_fused_runs_the_plain_way(changes):
    whole = model(**changes)
    assert not is_fusible(whole)
    assert type(best_runner(whole, 3, 32, 8)) is ReferenceRunner


def test_in_bf16_it_is_as_near_to_fp32_as_the_plain_one():
    exact = logits(ReferenceRunner(model(), 3, 32, 8))
    low = model().to(torch.bfloat16)
    errors = [
        max(float((got - want).abs().max()) for got, want in zip(logits(kind(low, 3, 32, 8)), exact))
        for kind in (FusedRunner, ReferenceRunner)
    ]
    assert errors[0] < 2 * errors[1]
