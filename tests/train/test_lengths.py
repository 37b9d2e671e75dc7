"""Loss against length: only the context changes, and what cannot be stretched is refused."""

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer.quantize import rounded
from clockhand.model.packed import packed
from clockhand.model.transformer import Transformer
from clockhand.train.lengths import TARGETS, loss_against_length, losses_by_length, with_scaling

IDS = torch.randint(64, (600,), generator=torch.Generator().manual_seed(0))


def small(**settings) -> Transformer:
    torch.manual_seed(0)
    sizes = dict(vocab_size=64, d_model=32, n_layers=2, n_heads=2, d_ff=64, max_seq_len=64, init_std=0.1)
    return Transformer(ModelConfig(**{**sizes, **settings})).eval()


def test_the_length_curve_is_flat_where_nothing_depends_on_length_and_scalings_leave_short_texts_alone():
    """A model that reads only the last token predicts the same whatever the context: the curve must be level."""
    model = small(sliding_window=1)
    for scaling in ("none", "linear", "yarn", "llama3"):
        losses = loss_against_length(model, IDS, 64, [32, 64, 128], scaling, windows=4)
        assert max(losses) - min(losses) < 1e-4, "the same sums in fp32"
    assert with_scaling(model, "yarn", trained=64, length=64).config.rope_scaling == "none"
    assert with_scaling(model, "yarn", trained=64, length=128).config.rope_factor == 2.0


def test_the_scalings_differ_beyond_the_trained_length_and_nowhere_else():
    found = losses_by_length(small(), IDS, 64, ["none", "ntk", "llama3"], windows=4)
    assert found.lengths == [32, 64, 128, 256]
    columns = list(zip(*found.losses.values()))
    assert [len(set(column)) for column in columns] == [1, 1, 3, 3]


@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
@pytest.mark.parametrize("tied", [True, False])
def test_a_packed_model_has_the_curve_of_its_rounded_weights(precision, tied):
    """It ended in a traceback of load_state_dict: the stretched twin was made without regard to how weights lie."""
    model = small(tie_embeddings=tied)
    found = losses_by_length(packed(model, precision), IDS, 64, ["none", "yarn"], windows=4)
    expected = losses_by_length(rounded(model, precision), IDS, 64, ["none", "yarn"], windows=4)
    assert found == expected
    assert found != losses_by_length(model, IDS, 64, ["none", "yarn"], windows=4), "rounding is seen"


def test_lengths_go_as_far_as_the_text_does():
    assert losses_by_length(small(), IDS[:200], 64, ["none"], windows=2).lengths == [32, 64, 128]
    with pytest.raises(ClockhandError, match=r"the text has 162 tokens; more than 162 are needed"):
        losses_by_length(small(), IDS[:162], 64)


@pytest.mark.parametrize(
    ("settings", "trained", "scalings", "message"),
    [
        ({"position": "learned"}, 64, ["none"], "position = learned"),
        ({"rope_scaling": "linear", "rope_factor": 2.0}, 64, ["none"], "rope_scaling = linear"),
        ({}, TARGETS - 1, ["none"], f"trained length of {TARGETS - 1}"),
        ({}, 64, ["none", "yarm"], "unknown rope_scaling 'yarm'; did you mean 'yarn'"),
    ],
)
def test_what_cannot_be_stretched_is_refused(settings, trained, scalings, message):
    with pytest.raises(ClockhandError, match=message):
        losses_by_length(small(**settings), IDS, trained, scalings)
