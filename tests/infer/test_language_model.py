"""`clockhand.load` and what it gives: text for text, the same from every door and in every thread."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

import clockhand
from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.infer.generate import generate_text
from clockhand.infer.settings import Sampling
from clockhand.interop.hf import save_model
from clockhand.model import packed as packed_model
from clockhand.model.transformer import Transformer

LIVELY = dict(temperature=1.5, top_p=0.9, max_new_tokens=12)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    tokenizer = Tokenizer.train(["the clock and its hands turn and turn"] * 3, vocab_size=270)
    sizes = dict(d_model=32, n_layers=2, n_heads=2, d_ff=64, max_seq_len=64, init_std=0.3)
    config = ModelConfig(vocab_size=tokenizer.vocab_size, **sizes)
    return save_model(Transformer(config), tmp_path_factory.mktemp("models") / "model", tokenizer)


@pytest.fixture(scope="module")
def lm(folder):
    return clockhand.load(folder)


def test_importing_clockhand_does_not_import_torch():
    code = "import clockhand, sys; assert 'torch' not in sys.modules; clockhand.load; assert 'torch' in sys.modules"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_generate_stream_and_batch_give_the_text_of_generate_text(lm):
    sampling = Sampling(temperature=1.5, top_p=0.9)
    expected = generate_text(lm.model, lm.tokenizer, ["the", "hands"], sampling, max_new_tokens=12, seed=4)
    text = lm.generate("the", seed=4, **LIVELY)
    assert isinstance(text, str)
    assert (text, text.ids, text.finish_reason) == (expected[0].text, expected[0].ids, expected[0].finish_reason)
    pieces = list(lm.stream("the", seed=4, **LIVELY))
    assert "".join(pieces) == text
    assert [id for piece in pieces for id in piece.ids] == text.ids
    assert [piece.finish_reason for piece in pieces] == [None] * (len(pieces) - 1) + [text.finish_reason]
    assert lm.batch(["the", "hands"], seed=4, **LIVELY) == [each.text for each in expected]


def test_n_texts_have_the_seeds_that_follow_each_other(lm):
    texts = lm.generate("the", n=3, seed=7, **LIVELY)
    assert texts == [lm.generate("the", seed=7 + number, **LIVELY) for number in range(3)]
    assert lm.generate("the", n=1, seed=7, **LIVELY) == texts[:1]


def test_logprobs_of_a_text_are_those_of_the_full_forward(lm):
    text = "the clock"
    read = lm.logprobs(text, top=3)
    ids = lm.tokenizer.encode(text, bos=True)
    with torch.no_grad():
        expected = lm.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert "".join(token.piece for token in read) == text
    assert [token.id for token in read] == ids[1:]
    for place, token in enumerate(read):
        assert token.logprob == pytest.approx(float(expected[place, token.id]), abs=1e-5)
        assert [id for id, _ in token.top] == expected[place].topk(3).indices.tolist()
    assert lm.logprobs("") == []


def test_what_was_generated_greedily_is_read_with_the_logprobs_it_was_drawn_with(lm):
    text = lm.generate("the", temperature=0, max_new_tokens=10, logprobs=0)
    told = [each.logprob for each in text.logprobs]
    whole = lm.tokenizer.encode("the", bos=True) + text.ids
    with torch.no_grad():
        logprobs = lm.model(torch.tensor([whole])).logits[0].log_softmax(-1)
    places = range(len(whole) - len(text.ids) - 1, len(whole) - 1)
    assert told == pytest.approx([float(logprobs[place].max()) for place in places], abs=1e-4)


def test_threads_get_the_texts_they_would_get_alone(lm):
    calls = [("the", seed) for seed in range(6)] + [("hands turn and", seed) for seed in range(6)]

    def text(call):
        prompt, seed = call
        return "".join(lm.stream(prompt, seed=seed, **LIVELY)), [each.logprob for each in lm.logprobs(prompt)]

    alone = [text(call) for call in calls]
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(text, calls)) == alone
    assert len({each for each, _ in alone}) > 6


def test_weights_are_kept_as_they_are_asked_for(folder):
    assert clockhand.load(folder).model.lm_head.weight.dtype == torch.float32
    lm = clockhand.load(folder, precision="bf16")
    assert lm.model.lm_head.data.dtype == torch.bfloat16
    assert clockhand.load(folder, precision="int4").model.lm_head.data.dtype == torch.uint8
    assert lm.generate("the", max_new_tokens=3).finish_reason == "length"
    exact, rough = clockhand.load(folder).logprobs("the"), clockhand.load(folder, precision="int8").logprobs("the")
    assert [each.logprob for each in rough] == pytest.approx([each.logprob for each in exact], abs=0.5)
    assert rough != exact


def test_packed_matrices_are_unpacked_to_multiply_with_or_look_up_and_never_to_be_asked_for_their_type(
    folder, monkeypatch
):
    """A batch of two texts and 4 tokens unpacked the whole embedding 54 times, for its dtype."""
    packed_lm = clockhand.load(folder, precision="int8")
    whole = packed_lm.model.token_embedding.data.shape
    unpackings, calls = [], []
    unpack = packed_model.unpack
    counted = lambda matrix: unpackings.append(matrix.data.shape) or unpack(matrix)  # noqa: E731
    monkeypatch.setattr(packed_model, "unpack", counted)
    packed_lm.model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    for asked in (
        lambda lm: lm.batch(["the", "hands"], max_new_tokens=4, plain=True),
        lambda lm: lm.generate("the", plain=True),
        repr,
    ):
        asked(packed_lm)
    assert calls
    assert unpackings.count(whole) == len(calls), "the head is tied to the embedding"
    assert packed_lm.model.dtype == torch.float32
    assert packed_lm.model.device == torch.device("cpu")


def test_a_preset_is_untrained_and_repeats_with_its_seed():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    one, same, other = (clockhand.load("tiny", seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), before)
    assert one.config.vocab_size == one.tokenizer.vocab_size == 261
    assert one.generate("x", max_new_tokens=5) == same.generate("x", max_new_tokens=5)
    assert not torch.equal(one.model.lm_head.weight, other.model.lm_head.weight)


def test_a_preset_takes_the_tokenizer_it_is_given(folder):
    lm = clockhand.load("tiny", tokenizer=folder)
    assert lm.config.vocab_size == lm.tokenizer.vocab_size == Tokenizer.load(folder).vocab_size


def test_a_context_is_stretched_on_load(folder):
    lm = clockhand.load(folder, rope_scaling="yarn", rope_factor=2)
    assert lm.config.max_seq_len == 128
    assert len(lm.logprobs("a b " * 25)) > 64


def test_what_cannot_be_honoured_is_refused(folder, lm):
    for ask, words in [
        (lambda: clockhand.load("tinny"), "unknown preset or folder 'tinny'; did you mean 'tiny'"),
        (lambda: clockhand.load(folder, precision="int3"), "unknown precision 'int3'"),
        (lambda: clockhand.load(folder, device="gpu"), "unknown device 'gpu'"),
        (lambda: clockhand.load(folder, seed=1), "seed = 1 has no effect on a saved model"),
        (lambda: lm.generate("x", temprature=1.0), "unknown option 'temprature'; did you mean 'temperature'"),
        (lambda: lm.generate("x", explain=True), "unknown option 'explain'"),
        (lambda: lm.generate("x", n=0), "n = 0"),
        (lambda: lm.stream("x", n=2), "n = 2 must be 1 in a stream"),
        (lambda: lm.stream("x", top_p=2.0), "top_p = 2.0"),
        (lambda: lm.batch("x"), "must be a list of texts"),
        (lambda: lm.logprobs("clock " * 200), "more than max_seq_len = 64"),
        (lambda: lm.logprobs("x", top=-1), "top = -1"),
    ]:
        with pytest.raises(ClockhandError, match=words):
            ask()


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_gpu_that_is_not_there_is_refused(folder):
    with pytest.raises(ClockhandError, match="device = cuda, but torch finds no GPU here"):
        clockhand.load(folder, device="cuda")
