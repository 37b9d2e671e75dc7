"""Evaluation: the numbers by hand, and that each target counts once."""

import math

import numpy as np
import pytest
import torch

from clockhand.data.loader import Batch
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.model.transformer import Transformer
from clockhand.train.evaluate import (
    Evaluation,
    _batches_of,
    _windows_of,
    batches_of_sources,
    evaluate,
    evaluate_texts,
)
from clockhand.train.loss import IGNORE_INDEX


@pytest.fixture
def model(model_config) -> Transformer:
    torch.manual_seed(0)
    return Transformer(model_config)


def test_the_numbers_follow_from_the_sums():
    evaluation = Evaluation(nats=20.0, tokens=10, bytes=25)
    assert evaluation.loss == 2.0
    assert evaluation.perplexity == pytest.approx(math.e**2)
    assert evaluation.bits_per_byte == pytest.approx(20 / math.log(2) / 25)


def test_a_model_that_knows_nothing_needs_8_bits_per_byte(model_config):
    """All 256 byte tokens equally likely, all else impossible: log2(256) bits for each byte."""
    model = Transformer(model_config)
    model.final_norm.forward = torch.ones_like  # the hidden state is all ones, so a row of the head sums to its logit
    impossible = torch.full((model_config.vocab_size, model_config.d_model), -1e9)
    impossible[5:261] = 0.0
    model.lm_head.weight = torch.nn.Parameter(impossible)
    token_bytes = np.array([0] * 5 + [1] * 256)
    ids = torch.randint(5, 261, (2, 9))
    evaluation = evaluate(model, [Batch(ids[:, :-1], ids[:, 1:], None)], token_bytes)
    assert evaluation.bits_per_byte == pytest.approx(8)
    assert (evaluation.tokens, evaluation.bytes) == (16, 16)


def test_bytes_are_those_of_the_targets_that_count_and_of_no_others(model):
    token_bytes = np.arange(model.config.vocab_size)
    targets = torch.tensor([[7, IGNORE_INDEX, 11], [IGNORE_INDEX, 2, 2]])
    evaluation = evaluate(model, [Batch(torch.zeros(2, 3, dtype=torch.long), targets, None)], token_bytes)
    assert (evaluation.tokens, evaluation.bytes) == (4, 7 + 11 + 2 + 2)


def test_dropout_is_off_and_the_mode_is_left_as_it_was(model, corpus):
    assert model.config.dropout > 0
    for mode in (True, False):
        model.train(mode)
        evaluations = [evaluate_texts(model, corpus.tokenizer, ["1 and 2 are 3."]) for _ in range(2)]
        assert evaluations[0] == evaluations[1]
        assert model.training == mode


def test_nothing_to_evaluate_is_refused(model):
    ignored = torch.full((1, 3), IGNORE_INDEX)
    with pytest.raises(ClockhandError, match="nothing to evaluate: 0 target tokens"):
        evaluate(model, [Batch(torch.zeros_like(ignored), ignored, None)], np.ones(model.config.vocab_size))
    with pytest.raises(ClockhandError, match="nothing to evaluate"):
        evaluate(model, [], np.ones(model.config.vocab_size))


@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 12, 13, 40])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 8])
def test_every_token_of_a_text_counts_once_whatever_the_window(model, corpus, length, seq_len):
    text = "the quick brown fox jumps over the lazy dog"[:length]
    evaluation = evaluate_texts(model, corpus.tokenizer, [text], seq_len=seq_len, batch_size=3)
    assert (evaluation.tokens, evaluation.bytes) == (length, length)


def test_a_text_within_one_window_costs_what_one_forward_says(model, corpus):
    ids = torch.tensor([corpus.tokenizer.encode("1 and 2 are 3.", bos=True)])
    logs = model.eval()(ids).logits[0].log_softmax(-1)
    nats = -sum(logs[t, ids[0, t + 1]].item() for t in range(ids.shape[1] - 1))
    assert evaluate_texts(model, corpus.tokenizer, ["1 and 2 are 3."]).nats == pytest.approx(nats, rel=1e-5)


def test_in_a_longer_text_every_token_has_half_a_window_before_it(corpus):
    """Window of 4: the first counts 4 targets, each later one the last 2 of its own."""
    (batch,) = _batches_of(_windows_of(corpus.tokenizer, ["abcdefgh"], seq_len=4), batch_size=8)
    ids = [0, *corpus.tokenizer.encode("abcdefgh")]
    counted = [[t for t in row if t != IGNORE_INDEX] for row in batch.targets.tolist()]
    assert counted == [ids[1:5], ids[5:7], ids[7:9]]
    assert batch.ids.tolist() == [ids[0:4], ids[2:6], ids[4:8]]


def test_texts_of_unequal_length_in_one_batch_cost_what_they_cost_alone(model, corpus):
    texts = ["1 and 2 are 3.", "4", "", "0 and 11 are 11.\n12 and 30 are 42.\n" * 3]
    together = evaluate_texts(model, corpus.tokenizer, texts)
    alone = [evaluate_texts(model, corpus.tokenizer, [text]) for text in texts if text]
    assert together.nats == pytest.approx(sum(each.nats for each in alone), rel=1e-5)
    assert together.tokens == sum(each.tokens for each in alone)


def test_a_source_is_text_or_the_held_out_part_of_a_corpus(model, corpus, tmp_path):
    def evaluation_of(source, **more) -> Evaluation:
        batches = batches_of_sources(model.config, corpus.tokenizer, str(source), **more)
        return evaluate(model, batches, corpus.tokenizer.token_bytes)

    (tmp_path / "text.txt").write_text("1 and 2 are 3.")
    of_text = evaluation_of(tmp_path / "text.txt")
    assert of_text == evaluate_texts(model, corpus.tokenizer, ["1 and 2 are 3."])

    of_corpus = evaluation_of(corpus.folder)
    assert of_corpus.bytes == corpus.split("val").text_bytes
    assert evaluation_of(corpus.folder, max_windows=1).tokens <= 64


def test_a_corpus_of_another_tokenizer_is_refused(model, corpus):
    other = Tokenizer.train(["äöü"], "char")
    with pytest.raises(ClockhandError, match="was made with another tokenizer"):
        batches_of_sources(model.config, other, str(corpus.folder))


def test_an_evaluation_that_is_interrupted_leaves_the_model_in_training(model):
    """Ctrl-C among the batches left it in evaluation mode."""

    def batches():
        ids = torch.randint(5, 200, (1, 9))
        yield Batch(ids[:, :-1], ids[:, 1:], None)
        raise KeyboardInterrupt

    model.train()
    model.blocks[0].eval()  # frozen, say
    with pytest.raises(KeyboardInterrupt):
        evaluate(model, batches(), np.ones(300))
    assert model.training
    assert not model.blocks[0].training
