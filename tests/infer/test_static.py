"""The step for GPUs: on a CPU it is the same code without a recording, and equals the plain model."""

import pytest
import torch
from torch._dynamo.utils import counters

from clockhand.errors import ClockhandError
from clockhand.infer import static
from clockhand.infer.generate import generate
from clockhand.infer.settings import Sampling
from clockhand.infer.static import StaticDecoder
from clockhand.model.packed import PRECISIONS, packed
from tests.infer.test_decode import EXACT, KINDS, fast_logits, ids_of, make_model, plain_logits

TOKENS = 40
DENSE = [kind for kind in KINDS if "moe" not in kind]


@pytest.mark.parametrize("kind", DENSE)
def test_reading_in_chunks_and_stepping_equal_the_plain_model(kind, monkeypatch):
    monkeypatch.setattr(static, "CHUNK", 5)
    model = make_model(**KINDS[kind])
    ids = ids_of(model, TOKENS)
    fast = fast_logits(StaticDecoder(model, TOKENS, backend="eager"), ids, read=13)
    torch.testing.assert_close(fast, plain_logits(model, ids, TOKENS)[12:], **EXACT)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_computes_what_the_packed_model_does(precision):
    model = packed(make_model(), precision)
    ids = ids_of(model, 8)
    fast = fast_logits(StaticDecoder(model, 8, backend="eager"), ids, read=3)
    torch.testing.assert_close(fast, plain_logits(model, ids, 8)[2:], **EXACT)


def test_one_graph_serves_texts_of_any_reach():
    torch._dynamo.reset()
    counters.clear()
    model = make_model()
    for reach in (20, 33, 145):
        decoder = StaticDecoder(model, reach, backend="eager")
        decoder.read(ids_of(model, 9))
        for id in ids_of(model, 10):
            decoder.step(id)
    assert counters["stats"]["unique_graphs"] == 1


def test_the_check_sees_a_place_that_is_off_by_one():
    model = make_model()
    ids = ids_of(model, TOKENS)
    decoder = StaticDecoder(model, TOKENS, backend="eager")
    decoder.read(ids[:10])
    decoder.length = 11  # the control: position and place 10 are left out
    assert not torch.allclose(decoder.step(ids[10]), plain_logits(model, ids, TOKENS)[10], **EXACT)


@pytest.mark.slow
def test_compiled_by_inductor_it_equals_the_plain_model():
    model = make_model()
    ids = ids_of(model, TOKENS)
    fast = fast_logits(StaticDecoder(model, TOKENS), ids, read=13)
    torch.testing.assert_close(fast, plain_logits(model, ids, TOKENS)[12:], **EXACT)


@pytest.mark.parametrize(
    ("ids", "words"), [([], "nothing to read"), ([37], "outside the vocabulary"), ([1] * 9, "at most 8 tokens")]
)
def test_what_cannot_be_read_is_refused(ids, words):
    with pytest.raises(ClockhandError, match=words):
        StaticDecoder(make_model(), 8, backend="eager").read(ids)


def test_experts_are_refused():
    with pytest.raises(ClockhandError, match="n_experts = 4"):
        StaticDecoder(make_model(**KINDS["moe"]))


def test_on_a_cpu_it_is_not_taken():
    assert static.static_decoder_for(make_model(), 145, 10**9) is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_step_writes_the_text_of_the_plain_way(monkeypatch):
    monkeypatch.setattr(static, "is_worth_compiling", lambda config, new_tokens: True)
    model = make_model().cuda()
    ids = ids_of(model, 9)
    settings = dict(sampling=Sampling(temperature=0.8), max_new_tokens=60, seed=3)
    assert generate(model, [ids], **settings) == generate(model, [ids], plain=True, **settings)
