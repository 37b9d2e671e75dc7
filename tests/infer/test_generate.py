"""Text out of a model: every row as if alone, every ending for its reason, no text broken or leaked."""

import math

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import clockhand.infer.generate as generate_module
from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.infer.generate import TextBeforeStop, generate, generate_text, stream
from clockhand.infer.settings import GREEDY, PLAIN, Sampling
from clockhand.model.transformer import HiddenOutput, Transformer

LIVELY = Sampling(temperature=1.2, top_p=0.95, repetition_penalty=1.3)
ARCHITECTURES = {
    "llama": {},
    "moe": dict(n_experts=4, n_experts_per_token=2),
    "learned positions": dict(position="learned"),
    "dynamic rope": dict(rope_scaling="dynamic", rope_factor=4.0, rope_original_max_seq_len=4),
    "sliding window": dict(sliding_window=5),
}


def small_model(vocab_size=64, **changes):
    """Random weights, large enough that the text is not one token over and over."""
    defaults = dict(d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=48, tie_embeddings=False)
    torch.manual_seed(0)
    config = ModelConfig(vocab_size=vocab_size, init_std=0.3, **{**defaults, **changes})
    return Transformer(config).eval()


class ScriptedModel(nn.Module):
    """Says `script`, whatever it is told: after position p comes script[p]. For prompts of one token."""

    def __init__(self, script, vocab_size, max_seq_len=1000):
        super().__init__()
        self.script = list(script)
        self.config = ModelConfig(
            vocab_size=vocab_size, d_model=2, n_layers=1, n_heads=1, d_ff=1, max_seq_len=max_seq_len
        )
        self.dtype, self.device = torch.float32, torch.device("cpu")

    def hidden(self, ids, positions, cache):
        cache.begin(positions)
        return HiddenOutput(positions[..., None].float(), torch.zeros(()))

    def lm_head(self, hidden):
        logits = torch.zeros(len(hidden), self.config.vocab_size)
        for row, position in enumerate(hidden[:, 0].long().tolist()):
            logits[row, self.script[position]] = 100.0
        return logits


@pytest.fixture(scope="module")
def byte_tokenizer():
    return Tokenizer.train([], kind="byte")


@pytest.fixture(scope="module")
def abc_tokenizer():
    """Tokens of one to several of the letters a, b, c, so that the same text has many splits."""
    texts = ["abc abcabc aab bca cab ccab abab"] * 3
    return Tokenizer.train(texts, kind="bpe", vocab_size=281)


# Greedy is the argmax


@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES)
def test_greedy_is_the_argmax_of_the_full_forward_at_each_step(changes):
    model = small_model(**changes)
    prompt, steps = [3, 1, 4, 1, 5], 20
    ids = list(prompt)
    for _ in range(steps):
        if model.config.rope_scaling == "dynamic":
            # The rotation is made for the length to come, so the sequence is given that length.
            padded = torch.tensor([ids + [0] * (len(prompt) + steps - len(ids))])
            ids.append(int(model(padded).logits[0, len(ids) - 1].argmax()))
        else:
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    [completion] = generate(model, [prompt], GREEDY, max_new_tokens=steps)
    assert completion.ids == ids[len(prompt) :]
    assert completion.finish_reason == "length"
    assert len(set(completion.ids)) > 5  # or the test would be passed by a model that repeats itself


def as_transformers(model):
    """The same weights in LlamaForCausalLM."""
    config = model.config
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.d_model,
            intermediate_size=config.d_ff,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            num_key_value_heads=config.n_kv_heads,
            max_position_embeddings=config.max_seq_len,
            rms_norm_eps=config.norm_eps,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    renamed = {}
    for name, tensor in model.state_dict().items():
        for ours, others in {
            "token_embedding": "model.embed_tokens",
            "blocks.": "model.layers.",
            "attention_norm": "input_layernorm",
            "mlp_norm": "post_attention_layernorm",
            "attention.": "self_attn.",
            "final_norm": "model.norm",
        }.items():
            name = name.replace(ours, others)
        renamed[name] = tensor
    theirs.load_state_dict(renamed)
    return theirs.eval()


@pytest.mark.parametrize("penalty", [1.0, 1.5])
def test_a_greedy_batch_equals_transformers_generate_on_each_prompt(penalty):
    model, sampling = small_model(), Sampling(temperature=0, repetition_penalty=penalty)
    prompts = [[9, 8, 7, 6, 5, 4], [1, 2], [33]]
    free = generate(model, prompts, sampling, max_new_tokens=24)
    ends = [free[0].ids[7], free[1].ids[12]]
    ours = generate(model, prompts, sampling, max_new_tokens=24, stop_ids=ends)
    assert ours[0].finish_reason == ours[1].finish_reason == "stop"
    theirs = as_transformers(model)
    for prompt, completion in zip(prompts, ours):
        ids = torch.tensor([prompt])
        settings = dict(do_sample=False, max_new_tokens=24, repetition_penalty=penalty, eos_token_id=ends)
        whole = theirs.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **settings)
        assert whole[0].tolist() == prompt + completion.ids


# A row is what it would be alone

prompt_lists = st.lists(st.lists(st.integers(0, 63), min_size=1, max_size=12), min_size=1, max_size=4)


@pytest.mark.parametrize("changes", ARCHITECTURES.values(), ids=ARCHITECTURES)
@pytest.mark.parametrize("sampling", [GREEDY, LIVELY], ids=["greedy", "sampled"])
@given(prompts=prompt_lists, stop_ids=st.sets(st.integers(0, 63), max_size=4))
@settings(max_examples=6, deadline=None)
def test_a_row_of_a_batch_gets_the_tokens_it_gets_alone(changes, sampling, prompts, stop_ids):
    model = small_model(**changes)
    together = generate(model, prompts, sampling, max_new_tokens=9, stop_ids=stop_ids, seed=5)
    assert together == generate(model, prompts, sampling, max_new_tokens=9, stop_ids=stop_ids, seed=5, plain=True)
    for row, prompt in enumerate(prompts):
        [alone] = generate(model, [prompt], sampling, max_new_tokens=9, stop_ids=stop_ids, seed=5 + row)
        assert together[row] == alone


@pytest.mark.parametrize(
    "options",
    [
        dict(n=3, seed=7),
        dict(stop_strings=["a", "bc"], min_new_tokens=4),
        dict(logprobs=2, stop_ids=[65, 66]),
        dict(max_new_tokens=60),  # which fills the context
    ],
    ids=["n", "stop strings", "logprobs", "context"],
)
def test_several_rows_of_an_engine_are_those_of_the_plain_way(options, abc_tokenizer, monkeypatch):
    made, real = [], generate_module.engine_for
    monkeypatch.setattr(generate_module, "engine_for", lambda *inputs: made.append(real(*inputs)) or made[-1])
    model = small_model(abc_tokenizer.vocab_size, max_seq_len=64)
    prompts, options = [[1, 2, 3], [65] * 40, [5] * 64], dict(max_new_tokens=20) | options
    fast = generate(model, prompts, LIVELY, tokenizer=abc_tokenizer, **options)
    assert len(made) == 1
    assert made[0].idle
    plain = generate(model, prompts, LIVELY, tokenizer=abc_tokenizer, plain=True, **options)
    assert len(made) == 1
    for ours, theirs in zip(fast, plain, strict=True):
        assert (ours.text, ours.ids, ours.finish_reason) == (theirs.text, theirs.ids, theirs.finish_reason)
        for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [id for id, _ in one.top] == [id for id, _ in other.top]
    assert len({each.finish_reason for each in fast}) > 1


def test_making_several_rows_leaves_the_model_in_the_mode_it_was_in():
    model = small_model().train()
    generate(model, [[1], [2]], max_new_tokens=2)
    assert all(module.training for module in model.modules())


def test_rows_would_differ_if_padding_were_seen(monkeypatch):
    def padding_as_tokens(rows, starts):
        ids, _ = left_padded(rows, starts)
        return ids, torch.arange(ids.shape[1]) + torch.tensor(starts)[:, None]

    left_padded = generate_module.left_padded
    model, prompts = small_model(), [[1, 2, 3, 4, 5, 6], [7, 8]]
    right = generate(model, prompts, GREEDY, max_new_tokens=1, plain=True)
    monkeypatch.setattr(generate_module, "left_padded", padding_as_tokens)
    wrong = generate(model, prompts, GREEDY, max_new_tokens=1, plain=True)
    assert wrong[0] == right[0]
    assert wrong[1] != right[1]


def test_rows_under_dynamic_rope_would_differ_if_they_shared_a_cache(monkeypatch):
    model, prompts = small_model(**ARCHITECTURES["dynamic rope"]), [list(range(30)), [7, 8]]
    right = generate(model, prompts, GREEDY, max_new_tokens=10, plain=True)
    monkeypatch.setattr(generate_module, "_batches", lambda config, rows: [rows])
    assert generate(model, prompts, GREEDY, max_new_tokens=10, plain=True)[1] != right[1]


def test_a_row_that_has_ended_is_not_extended_while_others_run():
    model, prompts = small_model(), [[1, 2, 3], [4, 5]]
    first, second = generate(model, prompts, GREEDY, max_new_tokens=20)
    end = next(id for id in first.ids if id not in second.ids)
    ended, ran_on = generate(model, prompts, GREEDY, max_new_tokens=20, stop_ids=[end])
    assert ended.ids == first.ids[: first.ids.index(end) + 1]
    assert ended.finish_reason == "stop"
    assert ran_on == second


def test_a_seed_repeats_its_text_and_another_seed_gives_another():
    model, prompts = small_model(), [[1, 2, 3]] * 3
    one = generate(model, prompts, PLAIN, max_new_tokens=16, seed=1)
    assert generate(model, prompts, PLAIN, max_new_tokens=16, seed=1) == one
    assert generate(model, prompts, PLAIN, max_new_tokens=16, seed=10) != one
    assert one[0] != one[1] != one[2]  # equal prompts in a batch are not equal texts


def test_torch_s_own_generator_is_neither_read_nor_moved():
    model = small_model()
    torch.manual_seed(1)
    before = torch.get_rng_state()
    one = generate(model, [[1]], PLAIN, max_new_tokens=8)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    assert generate(model, [[1]], PLAIN, max_new_tokens=8) == one


# Every ending for its reason


def test_every_declared_end_token_ends_the_text_and_is_not_in_it(byte_tokenizer):
    h, i, dot = byte_tokenizer.encode("hi.")
    model = ScriptedModel([h, i, dot, h, byte_tokenizer.eos_id], byte_tokenizer.vocab_size)
    for stop_ids, ids, text in [
        ([dot, 200], [h, i, dot], "hi"),
        ([200, i, dot], [h, i], "h"),
        (None, [h, i, dot, h, byte_tokenizer.eos_id], "hi.h"),  # the tokenizer's own
    ]:
        [completion] = generate(model, [[0]], tokenizer=byte_tokenizer, stop_ids=stop_ids)
        assert (completion.ids, completion.text, completion.finish_reason) == (ids, text, "stop")


def test_the_context_limit_is_a_clean_stop():
    model = small_model(max_seq_len=16)
    prompts = [[1] * 10, [2] * 16, [3]]
    full, no_room, short = generate(model, prompts, GREEDY, max_new_tokens=7)
    assert (len(full.ids), full.finish_reason) == (6, "context")
    assert (no_room.ids, no_room.finish_reason) == ([], "context")
    assert (len(short.ids), short.finish_reason) == (7, "length")
    [just_fits] = generate(model, [[1] * 10], GREEDY, max_new_tokens=6)
    assert (just_fits.ids, just_fits.finish_reason) == (full.ids, "length")


def test_no_new_tokens_is_an_empty_completion():
    [completion] = generate(small_model(), [[1]], max_new_tokens=0)
    assert (completion.text, completion.ids, completion.finish_reason) == ("", [], "length")


def test_no_prompts_is_no_completions():
    assert generate(small_model(), []) == []


def test_an_empty_prompt_begins_from_bos_or_is_refused(byte_tokenizer):
    model, options = small_model(byte_tokenizer.vocab_size), dict(tokenizer=byte_tokenizer, max_new_tokens=5)
    from_bos = generate(model, [[byte_tokenizer.bos_id]], GREEDY, **options)
    assert generate(model, [[]], GREEDY, **options) == from_bos
    with pytest.raises(ClockhandError, match="prompt 1 is empty"):
        generate(model, [[1], []])


def test_what_cannot_be_honoured_is_refused_before_the_first_piece(byte_tokenizer):
    model = small_model(max_seq_len=16)
    for prompts, options, message in [
        ([[1], [1] * 17], {}, "prompt 1 has 17 tokens, .* max_seq_len = 16"),
        ([[1]], dict(max_new_tokens=-1), "max_new_tokens = -1"),
        ([[1]], dict(seed=-1), "seed = -1"),
        ([[1]], dict(min_new_tokens=-1), "min_new_tokens = -1"),
        ([[1]], dict(min_new_tokens=9, max_new_tokens=8), "min_new_tokens = 9 must be from 0 to max_new_tokens = 8"),
        ([[1]], dict(min_new_tokens=1, stop_ids=range(64)), "all of the 64 ids are forbidden"),
        ([[1]], dict(n=0), "n = 0"),
        ([[1]], dict(logprobs=-1), "logprobs = -1"),
        ([[1]], dict(logprobs=65), "logprobs = 65 must be from 0 to the 64 ids"),
        ([[1]], dict(sampling=Sampling(logit_bias={64: 1.0})), "logit_bias of id 64 is outside .* 64 ids"),
        ([[1]], dict(stop_ids=[5, 64]), "end token 64 .* 64 ids"),
        ([[1]], dict(stop_strings=["x"]), "need a tokenizer"),
        ([[1]], dict(stop_strings=["x", ""], tokenizer=byte_tokenizer, stop_ids=[]), "none of them empty"),
        ([[1]], dict(stop_strings="xy", tokenizer=byte_tokenizer, stop_ids=[]), "list of strings"),
    ]:
        with pytest.raises(ClockhandError, match=message):
            stream(model, prompts, **options)


def test_an_id_beyond_the_models_vocabulary_is_refused():
    with pytest.raises(ClockhandError, match=r"64.* is outside the vocabulary of 64 ids"):
        generate(small_model(), [[1, 64]])


def test_a_bf16_model_generates():
    [completion] = generate(small_model().bfloat16(), [[1, 2]], LIVELY, max_new_tokens=8)
    assert len(completion.ids) == 8


def test_a_model_with_broken_weights_is_refused():
    model = small_model()
    with torch.no_grad():
        model.lm_head.weight[3] = math.nan
    with pytest.raises(ClockhandError, match="NaN"):
        generate(model, [[1]])


def test_ids_that_the_tokenizer_does_not_know_are_never_drawn(byte_tokenizer):
    model, hot = small_model(vocab_size=400), Sampling(temperature=20)  # a vocabulary padded far beyond the 261
    prompts = [[1], [2], [3]]
    ids = generate(model, prompts, hot, tokenizer=byte_tokenizer, max_new_tokens=40, stop_ids=[])
    assert max(id for row in ids for id in row.ids) < byte_tokenizer.vocab_size
    without = generate(model, prompts, hot, max_new_tokens=40)
    assert max(id for row in without for id in row.ids) >= byte_tokenizer.vocab_size  # the model would draw them


# A least length, several completions, and what the model thought


def test_no_end_token_is_drawn_before_the_least_length_and_one_may_be_after_it():
    model = small_model()
    [free] = generate(model, [[1, 2, 3]], GREEDY, max_new_tokens=20)
    ends = [free.ids[2], free.ids[9]]
    for least in (0, 5, 20):
        [completion] = generate(model, [[1, 2, 3]], GREEDY, max_new_tokens=20, min_new_tokens=least, stop_ids=ends)
        assert not set(completion.ids[:least]) & set(ends)
        assert len(completion.ids) > least or least == 20
        if completion.finish_reason == "stop":
            assert completion.ids[-1] in ends
    assert completion.finish_reason == "length"
    wordy = ScriptedModel([7] * 30, 64)  # would end at once; from then on it says the next best thing
    [completion] = generate(wordy, [[0]], GREEDY, max_new_tokens=20, min_new_tokens=6, stop_ids=[7, 0])
    assert completion.ids == [1] * 6 + [7]


def test_a_stop_string_before_the_least_length_is_text_and_one_that_ends_later_counts(byte_tokenizer):
    script = byte_tokenizer.encode("ab, ab, abab")
    model = ScriptedModel(script, byte_tokenizer.vocab_size)

    def text(least, *stops):
        [completion] = generate(
            model, [[0]], GREEDY, tokenizer=byte_tokenizer, min_new_tokens=least, max_new_tokens=12, stop_strings=stops
        )
        return completion.text, completion.finish_reason

    assert text(0, "ab") == ("", "stop_string")
    assert text(2, "ab") == ("", "stop_string")  # it is complete with the second token
    assert text(3, "ab") == ("ab, ", "stop_string")
    assert text(7, "ab, ab") == ("ab, ab, abab", "length")  # no part of the early one belongs to a later one
    assert text(7, "b,") == ("ab, a", "stop_string")
    assert text(12, "ab") == ("ab, ab, ab", "stop_string")
    [whole] = generate(model, [[0]], GREEDY, tokenizer=byte_tokenizer, max_new_tokens=3, stop_strings=[", abc"])
    assert whole.text == "ab,"


def test_n_completions_of_a_prompt_are_rows_of_their_own_seeds():
    model, prompts = small_model(), [[1, 2, 3], [4, 5]]
    six = generate(model, prompts, PLAIN, max_new_tokens=8, n=3, seed=10)
    for row, completion in enumerate(six):
        assert [completion] == generate(model, [prompts[row // 3]], PLAIN, max_new_tokens=8, seed=10 + row)
    assert len({tuple(completion.ids) for completion in six}) == 6


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(temperature=3.0, top_k=9, logit_bias={3: 5.0})])
def test_logprobs_are_the_models_own_whatever_is_drawn_from(sampling):
    model, prompt = small_model(), [1, 2, 3]
    [completion] = generate(model, [prompt], sampling, max_new_tokens=6, logprobs=4)
    whole = torch.tensor([prompt + completion.ids])
    expected = model(whole).logits[0, len(prompt) - 1 : -1].detach().log_softmax(-1)  # (6, V)
    for id, told, row in zip(completion.ids, completion.logprobs, expected):
        assert told.id == id
        assert told.logprob == pytest.approx(float(row[id]), abs=1e-4)
        best = row.topk(4)
        assert [pair[0] for pair in told.top] == best.indices.tolist()
        assert [pair[1] for pair in told.top] == pytest.approx(best.values.tolist(), abs=1e-4)
    assert generate(model, [prompt], sampling, max_new_tokens=6)[0].logprobs is None
    assert generate(model, [prompt], sampling, max_new_tokens=6)[0].ids == completion.ids


def test_ids_the_tokenizer_does_not_know_are_not_among_the_best(byte_tokenizer):
    model = small_model(vocab_size=400)
    [completion] = generate(model, [[1]], tokenizer=byte_tokenizer, max_new_tokens=5, logprobs=261, stop_ids=[])
    for told in completion.logprobs:
        assert sorted(id for id, _ in told.top) == list(range(261))
        assert sum(math.exp(logprob) for _, logprob in told.top) < 0.99  # the others have their share


def test_penalties_on_what_was_drawn_leave_the_prompt_alone():
    model = ScriptedModel([5] * 30, 16)  # says 5 with logit 100 for ever
    penalized = Sampling(temperature=0, frequency_penalty=40.0)
    [completion] = generate(model, [[5]], penalized, max_new_tokens=4)
    assert completion.ids == [5, 5, 5, 0]  # 100, 60 and 20 are above 0, -20 is not


# The model is left as it was


def test_the_model_keeps_its_modes_and_generates_without_dropout_or_gradients():
    model = small_model(dropout=0.5)
    expected = generate(model, [[1, 2]], GREEDY, max_new_tokens=6)
    model.train()
    model.blocks[1].eval()
    modes = [module.training for module in model.modules()]
    ids = []
    for piece in stream(model, [[1, 2]], GREEDY, max_new_tokens=6):
        ids.append(piece.id)
        assert [module.training for module in model.modules()] == modes  # between two pieces too
        assert torch.is_grad_enabled()
    assert ids == expected[0].ids
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_model_keeps_its_modes_when_a_step_fails():
    model = small_model().train()
    with pytest.raises(ClockhandError):
        generate(model, [[64]])
    assert model.training


# No text broken or leaked


@pytest.mark.parametrize("text", ["plain", "é漢😀", "👩‍👩‍👧 x", "a\u0301"])
def test_characters_come_out_whole(byte_tokenizer, text):
    script = [*byte_tokenizer.encode(text), byte_tokenizer.eos_id]
    model = ScriptedModel(script, byte_tokenizer.vocab_size)
    pieces = [piece.text for piece in stream(model, [[0]], tokenizer=byte_tokenizer)]
    assert "".join(pieces) == text
    assert "\ufffd" not in "".join(pieces)
    assert len([piece for piece in pieces if piece]) == len(text)  # one character a piece, as soon as it is whole
    if not text.isascii():
        assert "\ufffd" in "".join(byte_tokenizer.decode([id]) for id in script)  # what token by token would show


def test_a_text_that_ends_within_a_character_says_so_at_the_end(byte_tokenizer):
    model = ScriptedModel(byte_tokenizer.encode("a😀"), byte_tokenizer.vocab_size)
    pieces = [piece.text for piece in stream(model, [[0]], tokenizer=byte_tokenizer, max_new_tokens=3)]
    assert pieces == ["a", "", "\ufffd"]


def test_a_stop_string_that_the_very_end_completes_is_why_the_text_ended(byte_tokenizer):
    """It cut the text, and the reason was "length"."""
    model = ScriptedModel(byte_tokenizer.encode("a😀"), byte_tokenizer.vocab_size)
    options = dict(tokenizer=byte_tokenizer, max_new_tokens=3, stop_strings=["\ufffd"])
    [stopped] = generate(model, [[0]], **options)
    assert (stopped.text, stopped.finish_reason) == ("a", "stop_string")


def test_special_tokens_are_not_shown(byte_tokenizer):
    a, b = byte_tokenizer.encode("ab")
    script = [a, byte_tokenizer.bos_id, b, byte_tokenizer.eos_id]
    [completion] = generate(ScriptedModel(script, byte_tokenizer.vocab_size), [[0]], tokenizer=byte_tokenizer)
    assert (completion.text, completion.ids) == ("ab", script)


def before_stop(text, stop_strings):
    """Brute force: the text before the stop string that is complete first, the longest of those."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stop_strings if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))]
    return text


def check_pieces(pieces, tokens, stop_strings):
    """Everything promised about the `pieces` that came out as the texts of `tokens` went in."""

    def may_become_one(text):
        return any(stop.startswith(text) and stop != text for stop in stop_strings)

    expected = before_stop("".join(tokens), stop_strings)
    assert "".join(pieces) == expected
    for n in range(1, len(pieces)):
        shown, so_far = "".join(pieces[:n]), "".join(tokens[:n])
        assert expected.startswith(shown)  # nothing is taken back
        endings = [so_far[i:] for i in range(len(so_far))]
        assert so_far[len(shown) :] == next(filter(may_become_one, endings), "")  # and no more held back than needed


some_stops = st.lists(st.text("abc", min_size=1, max_size=5), max_size=3)


@given(data=st.data(), stop_strings=some_stops)
@settings(max_examples=150, deadline=None)
def test_stop_strings_never_leak_however_the_text_is_split(abc_tokenizer, data, stop_strings):
    spelled = {id: abc_tokenizer.decode([id]) for id in range(5, abc_tokenizer.vocab_size)}
    letters = [id for id, text in spelled.items() if text and set(text) <= set("abc")]
    assert len(letters) > 8  # among them tokens of several letters
    ids = data.draw(st.lists(st.sampled_from(letters), max_size=12))
    model = ScriptedModel([*ids, abc_tokenizer.eos_id], abc_tokenizer.vocab_size)
    options = dict(tokenizer=abc_tokenizer, stop_strings=stop_strings)
    pieces = list(stream(model, [[0]], **options))
    check_pieces([piece.text for piece in pieces], [*(spelled[id] for id in ids), ""], stop_strings)

    text = "".join(spelled[id] for id in ids)
    stopped = any(stop in text for stop in stop_strings)
    assert pieces[-1].finish_reason == ("stop_string" if stopped else "stop")
    [completion] = generate(model, [[0]], **options)
    assert completion.text == "".join(piece.text for piece in pieces)
    assert completion.ids == [piece.id for piece in pieces]


@pytest.mark.parametrize(
    ("stop_strings", "text"),
    [(["abc", "b"], "cca"), (["b", "ab"], "cc"), (["abc"], "cc"), (["c", "ccab"], ""), (["bca"], "ccabc")],
)
@pytest.mark.parametrize("split", [["ccabc"], ["cca", "bc"], ["c", "ca", "bc"], ["c", "c", "a", "b", "c"]])
def test_the_stop_string_complete_first_counts_wherever_the_tokens_end(byte_tokenizer, stop_strings, text, split):
    class Spelled:  # a decoder whose ids are their own text
        push, flush = staticmethod(str), staticmethod(str)

    before = TextBeforeStop(byte_tokenizer, stop_strings, after=0)
    before._decoder = Spelled()
    assert "".join(map(before.push, split)) + before.flush() == text


def test_the_check_for_leaks_notices_a_leak():
    tokens, stop_strings = ["c", "a", "b", "a"], ["ab"]
    check_pieces(["c", "", ""], tokens, stop_strings)
    for wrong in (["c", "a", ""], ["c", "", "ab"], ["", "", "c"]):  # shown too early, not stopped, shown too late
        with pytest.raises(AssertionError):
            check_pieces(wrong, tokens, stop_strings)


def test_text_held_back_comes_out_when_the_row_ends_at_a_limit(byte_tokenizer):
    model = ScriptedModel(byte_tokenizer.encode("one END two"), byte_tokenizer.vocab_size)
    options = dict(tokenizer=byte_tokenizer, stop_strings=["END"])
    [cut_short] = generate(model, [[0]], max_new_tokens=6, **options)
    assert (cut_short.text, cut_short.finish_reason) == ("one EN", "length")
    [stopped] = generate(model, [[0]], max_new_tokens=7, **options)
    assert (stopped.text, stopped.finish_reason) == ("one ", "stop_string")
    assert byte_tokenizer.decode(stopped.ids) == "one END"


@pytest.mark.parametrize(("prompt", "text"), [([0], "hi"), ([0, 1], " hi")], ids=["after bos", "after text"])
def test_a_space_between_prompt_and_continuation_belongs_to_the_text(prompt, text):
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"<s>": 0, "▁hi": 1}, []))
    backend.add_special_tokens(["<s>"])
    steps = tokenizers.decoders
    backend.decoder = steps.Sequence(
        [steps.Replace("▁", " "), steps.ByteFallback(), steps.Fuse(), steps.Strip(" ", 1, 0)]
    )
    sentencepiece = Tokenizer(backend, {"bos_token": "<s>"})
    [completion] = generate(ScriptedModel([1, 1], 2), [prompt], tokenizer=sentencepiece, max_new_tokens=1)
    assert completion.text == text


# Text in, text out


def test_generate_text_takes_one_text_or_a_list(byte_tokenizer):
    model = small_model(byte_tokenizer.vocab_size)
    options = dict(max_new_tokens=12, seed=3)
    one = generate_text(model, byte_tokenizer, "To be", LIVELY, **options)
    several = generate_text(model, byte_tokenizer, ["To be", "or"], LIVELY, **options)
    assert several[0] == one
    assert len(several) == 2
    prompt = [byte_tokenizer.bos_id, *byte_tokenizer.encode("To be")]
    assert generate(model, [prompt], LIVELY, tokenizer=byte_tokenizer, **options) == [one]
    assert one.text == byte_tokenizer.decode(one.ids)


def test_a_prompt_that_spells_a_special_token_is_plain_text(byte_tokenizer):
    spelled = generate_module.prompt_ids(byte_tokenizer, "<|end_of_text|>")
    assert byte_tokenizer.eos_id not in spelled


@pytest.mark.parametrize(
    ("name", "value"), [("max_new_tokens", 1.5), ("max_new_tokens", "3"), ("n", True), ("seed", None)]
)
def test_what_is_no_whole_number_is_refused_by_name(name, value):
    with pytest.raises(ClockhandError, match=f"{name} = {value!r} must be a whole number"):
        generate(small_model(), [[1]], **{name: value})
