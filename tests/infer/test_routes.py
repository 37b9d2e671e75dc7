"""Which way is taken, and that its reason is told."""

import pytest
import torch
from torch import nn

import clockhand
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.infer.generate import generate
from clockhand.infer.kernels.library import find_library, library
from clockhand.infer.kernels.weights import drop_weights
from clockhand.infer.language_model import LanguageModel
from clockhand.infer.routes import route_of
from clockhand.infer.settings import GREEDY
from clockhand.model.packed import PRECISIONS, packed
from tests.infer.test_kernels import KINDS, make_ids, make_model

here = pytest.mark.skipif(find_library()[0] is None, reason="no library of the step: there was no C++ compiler")


@here
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_model_takes_the_step(kind):
    assert route_of(make_model(**KINDS[kind])).name == "step"


@here
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("rows", [1, 5])
def test_every_precision_takes_the_step_and_writes_what_the_reference_does(precision, rows):
    model, ids = packed(make_model(0.15), precision), make_ids(rows, 6)
    assert f", {precision} matrices" in str(route_of(model, rows))
    fast = generate(model, ids, GREEDY, max_new_tokens=4)
    same = [a.ids == b.ids for a, b in zip(fast, generate(model, ids, GREEDY, max_new_tokens=4, plain=True))]
    assert sum(same) >= rows - 1  # inputs are rounded too, to 8 bits: one near draw may fall otherwise


@here
@pytest.mark.parametrize(("dtype", "words"), [(torch.float16, "fp32 matrices"), (torch.bfloat16, "bf16 matrices")])
def test_weights_stored_in_16_bits_take_the_step_and_it_is_told_as_what(dtype, words):
    route = route_of(make_model().to(dtype))
    assert route.name == "step"
    assert words in route.reason
    assert ("from float16" in route.reason) == (dtype == torch.float16)


def test_what_takes_the_reference_says_why(monkeypatch):
    model = make_model()
    assert str(route_of(nn.Identity())) == "reference: Identity is not clockhand's own Transformer"
    assert route_of(model, plain=True).reason == "asked for (plain)"
    assert "explanations" in route_of(model, explain=True).reason
    monkeypatch.setenv("CLOCKHAND_STEP", "none")
    find_library.cache_clear()
    try:
        assert route_of(model).reason == "the step in C++ is not here: CLOCKHAND_STEP=none"
        (text,) = generate(model, [[1, 2]], GREEDY, max_new_tokens=3)
    finally:
        find_library.cache_clear()
    monkeypatch.undo()
    assert generate(model, [[1, 2]], GREEDY, max_new_tokens=3) == [text]


@here
def test_a_layer_of_another_kind_is_never_taken_for_a_plain_matrix():
    """An adapter has a `weight` too; the step would have read it without what is added to it."""

    class Adapted(nn.Linear):
        pass

    model = make_model()
    model.blocks[1].attention.q_proj = Adapted(32, 32, bias=False)
    assert str(route_of(model)) == "reference: blocks.1.attention.q_proj is a layer that the step does not know"


@here
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_model_for_generation_writes_the_same_and_holds_its_matrices_once(precision):
    model, ids = packed(make_model(0.15), precision), make_ids(3, 6)
    want = generate(model, ids, GREEDY, max_new_tokens=5)
    drop_weights(model, library())
    assert sum(each.numel() for each in model.parameters()) < 1000
    assert f", {precision} matrices" in str(route_of(model))
    assert generate(model, ids, GREEDY, max_new_tokens=5) == want
    with pytest.raises(ClockhandError, match="for_generation=True"):
        generate(model, ids, GREEDY, max_new_tokens=5, plain=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "int8"])
def test_text_is_written_with_the_weights_that_a_model_has_now(precision):
    """A batch wrote the old text after all matrices had been set to zero, and a single text the new one."""
    lm = clockhand.load("tiny", precision=precision)
    first = lm.generate("Once", max_new_tokens=8, temperature=0), lm.batch(["Once", "b"], max_new_tokens=8)
    with torch.no_grad():
        for tensor in (*lm.model.parameters(), *lm.model.buffers()):
            tensor.zero_()
    zeros = [0] * 8
    assert lm.generate("Once", max_new_tokens=8, temperature=0, stop_ids=[]).ids == zeros
    assert [each.ids for each in lm.batch(["Once", "b"], max_new_tokens=8, temperature=0, stop_ids=[])] == [zeros] * 2
    assert first[0].ids != zeros


def test_a_model_in_training_stays_so_and_keeps_no_copy():
    model = make_model().train()
    before = generate(model, [[1, 2]], GREEDY, max_new_tokens=6)
    assert model.training
    with torch.no_grad():
        model.token_embedding.weight.mul_(-1)
    assert generate(model, [[1, 2]], GREEDY, max_new_tokens=6) != before
    from clockhand.infer.kernels import weights

    assert model not in weights._kept


def test_load_for_generation_lets_go_of_the_model_s_own_matrices():
    lm = clockhand.load("tiny", precision="int8", for_generation=True)
    assert isinstance(lm, LanguageModel)
    assert lm.generate("Once", max_new_tokens=5, temperature=0) == clockhand.load("tiny", precision="int8").generate(
        "Once", max_new_tokens=5, temperature=0
    )
    if find_library()[0] is not None:
        assert "int8" in repr(lm)
        with pytest.raises(ClockhandError, match="for_generation=True"):
            lm.logprobs("Once")
    assert isinstance(lm.tokenizer, Tokenizer)
