"""Compiled, a prompt is read as the plain model reads it: compiled once, and wherever the graphs lie ready."""

import math

import pytest
import torch

from clockhand.config import ModelConfig
from clockhand.infer import chunk, decode, graphs, prompt
from clockhand.infer.decode import Decoder
from clockhand.infer.quantize import rounded
from clockhand.infer.weights import keep_weights
from clockhand.model.cache import KVCache
from clockhand.model.packed import PRECISIONS
from clockhand.model.transformer import Transformer

KINDS = {
    "llama": {},
    "qk_norm": dict(qk_norm=True, attention_bias="qkv"),
    "one kv head": dict(n_kv_heads=1),
    "sliding window": dict(sliding_window=5),
    "learned": dict(position="learned"),
    "no positions": dict(position="none"),
    "post norm": dict(norm_position="post", norm="layer", mlp="gelu"),
    "biases": dict(norm="layer", mlp="relu", mlp_bias=True, attention_bias="all", tie_embeddings=False),
    "swiglu with biases": dict(mlp_bias=True),
    "no residual": dict(residual=False),
    "interleaved": dict(rope_layout="interleaved"),
    "dynamic": dict(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=4),
}
TOKENS = 135
# Sums in another order, over logits of size 1 to 10; a wrong position or head is off by whole units.
EXACT = dict(rtol=1e-4, atol=1e-4)


def make_model(**changes):
    sizes = dict(
        vocab_size=37, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, max_seq_len=TOKENS
    )
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**sizes, **changes})).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape)
            parameter.copy_(1 + noise if parameter.dim() == 1 and name.endswith("weight") else noise)
    return model


def ids_of():
    return torch.randint(37, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()


def plain_logits(model, ids):
    with torch.no_grad():
        return model(torch.tensor([ids]), cache=KVCache(model.config, 1, TOKENS)).logits[0]


def exact_decoder(model, precision, **options):
    """A decoder whose activations and cache are fp32, so that only the weights are rounded."""
    return Decoder(model, precision, TOKENS, exact=True, **options)


needs_compiler = pytest.mark.skipif(graphs.compiler() is None, reason="needs a C++ compiler")


@pytest.mark.parametrize("window", [0, 3, 1000])
@pytest.mark.parametrize(("tokens", "length"), [(2, 2), (130, 130), (129, 300), (300, 301)])
def test_attending_block_by_block_with_masks_equals_attending_at_once(tokens, length, window, monkeypatch):
    monkeypatch.setattr(chunk, "load_or_compile", lambda *ignored: None)
    config = make_model().config
    written = chunk.ChunkGraphs(config, "fp32", torch.float32, {})
    written._attend = lambda inputs: [chunk.AttendSome()(*inputs)]
    q, k, v = torch.randn(tokens, 4, 8), torch.randn(length, 2, 8), torch.randn(length, 2, 8)
    seen = chunk.seen_by_block(tokens, length, window)
    assert all(2 <= len(each) <= prompt.QUERIES for each in seen), "the graph is for two queries and more"
    torch.testing.assert_close(written.attend(q, k, v, seen), prompt.attend_many(q, k, v, window), **EXACT)


def test_a_block_of_queries_under_a_window_reads_no_key_before_it():
    assert [each.shape for each in chunk.seen_by_block(256, 1000, 10)] == [(128, 137), (128, 137)]
    assert chunk.seen_by_block(2, 4, 2)[0].tolist() == [[0, 0, -math.inf], [-math.inf, 0, 0]]


def test_below_fp32_shares_of_attention_are_as_near_as_bf16_can_tell_and_what_is_unseen_has_none():
    x = torch.linspace(-20, 0, 10_001)
    near = chunk.exponential(x, torch.bfloat16)
    torch.testing.assert_close(near, x.exp(), rtol=0, atol=2**-14)  # bf16 has 8 digits below the largest share, 1
    assert near.diff().min() >= 0, "the larger the score, the larger the share"
    assert near[-1] == 1
    assert chunk.exponential(torch.tensor([-100.0, -1000.0, -math.inf]), torch.bfloat16).tolist() == [0, 0, 0]


def test_decoders_of_a_model_whose_weights_are_kept_share_them_in_order_too(monkeypatch):
    monkeypatch.setattr(chunk, "load_or_compile", lambda *ignored: None)
    given, model = [], make_model()
    monkeypatch.setattr(decode, "can_be_ordered", lambda *ignored: True)
    monkeypatch.setattr(decode, "ordered", lambda weights: given.append(weights) or weights)
    keep_weights(model)
    decoders = [Decoder(model, compile=False, compile_prompt=True) for _ in range(2)]
    assert not given, "made when the first long chunk comes"
    first, second = (decoder._graphs._in_order() for decoder in decoders)
    assert first is second
    assert len(given) == 1


@needs_compiler
def test_a_prompt_of_any_length_is_read_by_three_graphs_that_are_compiled_once(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    monkeypatch.setattr(decode, "CHUNK", 50)
    monkeypatch.setattr(prompt, "QUERIES", 20)
    monkeypatch.setattr(chunk, "QUERIES", 20)
    monkeypatch.setattr(chunk, "LONG", 50)
    model = make_model(n_layers=3)  # of which the last is read for two tokens only
    ids = ids_of()
    decoder = exact_decoder(model, "fp32", compile=False, compile_prompt=True)
    assert decoder.info.compile_seconds > 0
    assert sorted(file.name.split("-")[0] for file in tmp_path.glob("*.pt2")) == ["after", "attend", "before"]

    def never(*ignored):
        raise AssertionError("compiled again")

    monkeypatch.setattr(graphs, "compile_into", never)
    monkeypatch.setattr(decode, "attend_many", never)
    plain = plain_logits(model, ids)
    can_be_ordered = decode.can_be_ordered(decoder.weights, torch.float32)
    for length in (2, 3, 49, 52, 99, 135):
        assert (decoder._graphs._in_order is None) == (length > 52 or not can_be_ordered), "in order once one is long"
        decoder.truncate(0)
        torch.testing.assert_close(decoder.read(ids[:length]), plain[length - 1], **EXACT)
    second = exact_decoder(model, "fp32", compile=False, compile_prompt=True)
    assert second.info.compile_seconds == 0


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_through_compiled_graphs_equals_the_plain_model_for_every_kind(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    monkeypatch.setattr(decode, "CHUNK", 50)
    monkeypatch.setattr(chunk, "LONG", 50)
    model = make_model(**KINDS[kind])
    ids = ids_of()
    for precision in PRECISIONS if kind == "llama" else ["fp32"]:
        decoder = exact_decoder(model, precision, compile=False, compile_prompt=True)
        assert decoder._graphs is not None
        expected = plain_logits(rounded(model, precision), ids)
        torch.testing.assert_close(decoder.read(ids[:99]), expected[98], **EXACT)
        torch.testing.assert_close(decoder.step(ids[99]), expected[99], **EXACT)


@pytest.mark.slow
@needs_compiler
def test_a_prompt_in_bf16_through_compiled_graphs_stays_as_close_as_one_read_as_written(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    monkeypatch.setattr(chunk, "LONG", 100)
    model = make_model()
    ids = ids_of()
    plain = plain_logits(rounded(model, "bf16"), ids)[-1]
    decoder = Decoder(model, "bf16", len(ids), compile=False, compile_prompt=True)
    # The bound of the test of reading as written.
    assert (decoder.read(ids) - plain).std() < 0.06 * plain.std()


def test_graphs_of_a_prompt_are_taken_where_they_lie_and_made_where_the_step_is_made(monkeypatch):
    made = []
    monkeypatch.setattr(decode, "compiled", lambda *ignored: None)
    monkeypatch.setattr(decode, "ChunkGraphs", lambda *ignored: made.append(1))
    for step_known, prompt_known, options, expected in [
        (True, False, {}, 0),
        (True, True, {}, 1),
        (False, False, {}, 1),
        (False, False, dict(compile=False), 0),
        (False, True, dict(compile=False), 0),
        (False, False, dict(compile_prompt=False), 0),
        (True, False, dict(compile_prompt=True), 1),
    ]:
        made.clear()
        monkeypatch.setattr(decode, "is_compiled", lambda *ignored, known=step_known: known)
        monkeypatch.setattr(decode, "is_chunk_compiled", lambda *ignored, known=prompt_known: known)
        Decoder(make_model(n_layers=1), **options)
        assert len(made) == expected, (step_known, prompt_known, options)
    made.clear()
    Decoder(make_model(n_experts=2, n_experts_per_token=1), compile_prompt=True)
    assert not made, "experts are read as they are written"
