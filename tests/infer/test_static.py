"""The step for GPUs: on a CPU it is the same code without a recording, and equals the plain model."""

import pytest
import torch

from clockhand.errors import ClockhandError
from clockhand.infer import static
from clockhand.infer.generate import generate
from clockhand.infer.settings import Sampling
from clockhand.infer.static import StaticDecoder
from clockhand.model.cache import KVCache
from clockhand.model.packed import PRECISIONS, packed
from tests.infer.test_kernels import KINDS, make_ids, make_model

TOKENS = 40
DENSE = [kind for kind in KINDS if "moe" not in kind]
# Sums in another order, over logits of size 1 to 10; a wrong position or head is off by whole units.
EXACT = dict(rtol=1e-4, atol=1e-4)


def ids_of(tokens):
    return make_ids(1, tokens)[0]


def plain_logits(model, ids, reach):
    with torch.no_grad():
        return model(torch.tensor([ids]), cache=KVCache(model.config, 1, reach)).logits[0]


def fast_logits(decoder, ids, read):
    """Row i are the logits after ids[read - 1 + i]."""
    return torch.stack([decoder.read(ids[:read]), *(decoder.step(id) for id in ids[read:])])


@pytest.mark.parametrize("kind", DENSE)
def test_reading_in_chunks_and_stepping_equal_the_plain_model(kind, monkeypatch):
    monkeypatch.setattr(static, "CHUNK", 5)
    model = make_model(**KINDS[kind])
    ids = ids_of(TOKENS)
    fast = fast_logits(StaticDecoder(model, TOKENS), ids, read=13)
    torch.testing.assert_close(fast, plain_logits(model, ids, TOKENS)[12:], **EXACT)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_computes_what_the_packed_model_does(precision):
    model = packed(make_model(), precision)
    ids = ids_of(8)
    fast = fast_logits(StaticDecoder(model, 8), ids, read=3)
    torch.testing.assert_close(fast, plain_logits(model, ids, 8)[2:], **EXACT)


def test_the_check_sees_a_place_that_is_off_by_one():
    model = make_model()
    ids = ids_of(TOKENS)
    decoder = StaticDecoder(model, TOKENS)
    decoder.read(ids[:10])
    decoder.length = 11  # the control: position and place 10 are left out
    assert not torch.allclose(decoder.step(ids[10]), plain_logits(model, ids, TOKENS)[10], **EXACT)


@pytest.mark.parametrize(
    ("ids", "words"), [([], "nothing to read"), ([37], "outside the vocabulary"), ([1] * 9, "at most 8 tokens")]
)
def test_what_cannot_be_read_is_refused(ids, words):
    with pytest.raises(ClockhandError, match=words):
        StaticDecoder(make_model(), 8).read(ids)


def test_experts_are_refused():
    with pytest.raises(ClockhandError, match="n_experts = 4"):
        StaticDecoder(make_model(**KINDS["moe"]))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_recorded_step_writes_the_text_of_the_plain_way():
    model = make_model().cuda()
    ids = ids_of(9)
    settings = dict(sampling=Sampling(temperature=0.8), max_new_tokens=60, seed=3)
    assert generate(model, [ids], **settings) == generate(model, [ids], plain=True, **settings)
