"""The fast way for one text: for every kind of model, in every precision, the same numbers as the plain model."""

import mmap
from pathlib import Path
from zipfile import ZipFile

import pytest
import torch
from torch._dynamo.utils import counters

from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.infer import decode, graphs, prompt, step, weights
from clockhand.infer.decode import Decoder
from clockhand.infer.generate import generate
from clockhand.infer.quantize import rounded
from clockhand.infer.settings import Sampling
from clockhand.model.cache import KVCache
from clockhand.model.packed import PRECISIONS, pack, packed
from clockhand.model.transformer import Transformer

SMALL = dict(vocab_size=37, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, d_ff=64, max_seq_len=145)
KINDS = {
    "dense": dict(),
    "qk_norm": dict(qk_norm=True, attention_bias="qkv"),
    "multi_query": dict(n_kv_heads=1),
    "multi_head": dict(n_kv_heads=4),
    "moe": dict(n_experts=4, n_experts_per_token=2),
    "moe without renormalisation": dict(n_experts=4, n_experts_per_token=1, renormalize_top_k=False, mlp_bias=True),
    "sliding_window": dict(sliding_window=5),
    "learned": dict(position="learned"),
    "no_positions": dict(position="none"),
    "post_norm": dict(norm_position="post", norm="layer", mlp="gelu"),
    "biases": dict(norm="layer", mlp="relu", mlp_bias=True, attention_bias="all", tie_embeddings=False),
    "no_residual": dict(residual=False),
    "interleaved": dict(rope_layout="interleaved"),
    "linear": dict(rope_scaling="linear", rope_factor=3.0),
    "ntk": dict(rope_scaling="ntk", rope_factor=3.0),
    "yarn": dict(rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=8, rope_theta=100.0),
    "llama3": dict(rope_scaling="llama3", rope_factor=4.0, rope_original_max_seq_len=8),
    "dynamic": dict(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=4),
}
TOKENS = 135  # more than two blocks of the cache
# Sums in another order, over logits of size 1 to 10; a wrong position or head is off by whole units.
EXACT = dict(rtol=1e-4, atol=1e-4)


def make_model(**changes):
    torch.manual_seed(0)
    model = Transformer(ModelConfig(**{**SMALL, **changes}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = 0.3 * torch.randn(parameter.shape)
            parameter.copy_(1 + noise if parameter.dim() == 1 and name.endswith("weight") else noise)
    return model.eval()


def ids_of(model, tokens=TOKENS):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, model.config.vocab_size, (tokens,), generator=generator).tolist()


def plain_logits(model, ids, reach=TOKENS):
    with torch.no_grad():
        return model(torch.tensor([ids]), cache=KVCache(model.config, 1, reach)).logits[0]


def exact_decoder(model, precision, reach=TOKENS, **options):
    """A decoder whose activations and cache are fp32, so that only the weights are rounded."""
    return Decoder(model, precision, reach, exact=True, **{"compile_prompt": False, **options})


def fast_logits(decoder, ids, read):
    """Row i are the logits after ids[read - 1 + i]."""
    return torch.stack([decoder.read(ids[:read]), *(decoder.step(id) for id in ids[read:])])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_reading_in_chunks_and_stepping_equal_the_plain_model(kind, precision, monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", 5)
    model = make_model(**KINDS[kind])
    ids = ids_of(model)
    fast = fast_logits(exact_decoder(model, precision, compile=False), ids, read=13)
    torch.testing.assert_close(fast, plain_logits(rounded(model, precision), ids)[12:], **EXACT)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_precision_computes_what_its_rounded_weights_say(precision):
    model = make_model()
    ids = ids_of(model)
    fast = fast_logits(exact_decoder(model, precision, compile=False), ids, read=3)
    torch.testing.assert_close(fast, plain_logits(rounded(model, precision), ids)[2:], **EXACT)


def test_the_check_sees_a_cache_that_is_off_by_one_place():
    model = make_model()
    ids = ids_of(model)
    decoder = exact_decoder(model, "fp32", compile=False)
    decoder.read(ids[:10])
    decoder.length = 11  # the control: position and place 10 are left out
    assert not torch.allclose(decoder.step(ids[10]), plain_logits(model, ids)[10], **EXACT)


def test_a_bf16_cache_and_bf16_reading_stay_close():
    model = make_model()
    ids = ids_of(model)
    decoder = Decoder(model, "bf16", reach=TOKENS, compile=False)
    plain = plain_logits(rounded(model, "bf16"), ids)[12:]
    # bf16 rounds to 1 part in 256; through two layers of 0.3-weights that came to 2 % of the spread of the logits.
    assert (fast_logits(decoder, ids, read=13) - plain).std() < 0.06 * plain.std()


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="needs oneDNN")
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "int4"])
def test_what_onednn_does_within_a_product_is_what_is_done_after_it(biased, precision):
    torch.manual_seed(0)
    x, before = torch.randn(9, 64), torch.randn(9, 96)
    b, c = (torch.randn(96), torch.randn(96)) if biased else (None, None)
    one, two = ((pack(torch.randn(96, 64), precision), bias) for bias in (b, c))
    after, within = prompt.WithMany(), prompt.WithManyFused()
    torch.testing.assert_close(within.plain(x, *one), after.plain(x, *one), **EXACT)
    torch.testing.assert_close(within.added(x, *one, before), after.added(x, *one, before), **EXACT)
    torch.testing.assert_close(within.gated(x, *one, *two), after.gated(x, *one, *two), **EXACT)


LONG = dict(sliding_window=40, max_seq_len=600)


@pytest.mark.parametrize("read", [1, 90, 300, 590])
@pytest.mark.parametrize("chunk", [7, 50, 512])
def test_a_sliding_window_keeps_a_ring_of_the_past_and_nothing_else(read, chunk, monkeypatch):
    monkeypatch.setattr(decode, "CHUNK", chunk)
    model = make_model(**LONG, n_layers=2)
    ids = ids_of(model, 600)
    decoder = exact_decoder(model, "fp32", reach=600, compile=False)
    fast = fast_logits(decoder, ids, read)
    torch.testing.assert_close(fast, plain_logits(model, ids, 600)[read - 1 :], **EXACT)
    assert {each.shape[0] * step.PLACES for each in decoder._keys} == {128}  # 40 + 64, in whole blocks


def test_of_a_ring_only_what_it_still_holds_can_be_taken_back():
    model = make_model(**LONG)
    ids = ids_of(model, 400)
    decoder = exact_decoder(model, "fp32", reach=600, compile=False)
    decoder.read(ids[:300])
    with pytest.raises(ClockhandError, match=r"length = 200 is too far back: of 300 tokens .* has kept 128"):
        decoder.truncate(200)
    decoder.truncate(212)
    again = torch.stack([decoder.step(id) for id in ids[212:280]])
    torch.testing.assert_close(again, plain_logits(model, ids, 600)[212:280], **EXACT)
    decoder.truncate(0)
    torch.testing.assert_close(decoder.read(ids[:9]), plain_logits(model, ids, 600)[8], **EXACT)


def test_what_a_ring_has_written_over_stays_lost_after_a_text_was_cut_short():
    """The places of tokens 172 and before were taken by 300 and before; cutting to 212 does not bring them back."""
    model = make_model(**LONG)
    decoder = exact_decoder(model, "fp32", reach=600, compile=False)
    decoder.read(ids_of(model, 300))
    decoder.truncate(212)
    with pytest.raises(ClockhandError, match="length = 180 is too far back: of 300 tokens"):
        decoder.truncate(180)
    assert decoder.length == 212


def test_a_damaged_compiled_step_is_compiled_again(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    monkeypatch.setattr(graphs, "compiler", lambda: "g++")
    model = make_model(n_layers=1)
    package = step.step_file(model.config, "fp32", torch.float32)
    package.parent.mkdir(parents=True, exist_ok=True)
    compiled = []

    def write(name):
        with ZipFile(package, "w") as archive:
            archive.writestr(name, "")

    def load(path):
        if ZipFile(path).namelist() == ["no model"]:
            raise RuntimeError("Failed to find a generated cpp file or so file for model 'model' in the zip archive")
        return lambda inputs: [torch.zeros(37)]

    monkeypatch.setattr(graphs, "load", load)
    monkeypatch.setattr(graphs, "compile_into", lambda path, *rest: compiled.append(write("model")))
    write("no model")
    Decoder(model, compile_prompt=False)
    assert len(compiled) == 1
    Decoder(model, compile_prompt=False)
    assert len(compiled) == 1, "the control: a whole one is only loaded"


def test_where_the_compiled_step_cannot_be_kept_text_comes_the_plain_way(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path / "file" / "cache"))
    (tmp_path / "file").write_text("no folder")
    for module in (decode, graphs):
        monkeypatch.setattr(module, "compiler", lambda: "g++")
    monkeypatch.setattr(decode, "is_worth_compiling", lambda *ignored: True)
    assert decode.decoder_for(make_model(n_layers=1), 40, 30) is None
    assert "plain, slower way" in capsys.readouterr().err


def test_asked_for_the_plain_way_generate_takes_no_decoder(monkeypatch):
    model, asked = make_model(), []
    monkeypatch.setattr("clockhand.infer.generate.decoder_for", lambda *ignored: asked.append(1))
    generate(model, [[1, 2]], max_new_tokens=2, plain=True)
    assert not asked
    generate(model, [[1, 2]], max_new_tokens=2)
    assert asked, "the control"


def test_a_text_cut_short_goes_on_as_if_the_rest_had_never_been():
    model = make_model(sliding_window=6)
    ids = ids_of(model)
    decoder = exact_decoder(model, "fp32", compile=False)
    fast_logits(decoder, ids[:40], read=20)
    decoder.truncate(25)
    again = torch.stack([decoder.step(id) for id in ids[25:50]])
    torch.testing.assert_close(again, plain_logits(model, ids)[25:50], **EXACT)


@pytest.mark.parametrize("reach", [TOKENS, 33])
def test_what_does_not_fit_is_refused_and_changes_nothing(reach):
    model = make_model()
    decoder = Decoder(model, reach=reach, compile=False)
    decoder.read([1, 2, 3])
    with pytest.raises(ClockhandError, match=f"at most {reach} tokens: 3 held"):
        decoder.read([1] * reach)
    with pytest.raises(ClockhandError, match="id 37 is outside the vocabulary of 37 ids"):
        decoder.step(37)
    with pytest.raises(ClockhandError, match="nothing to read"):
        decoder.read([])
    assert decoder.length == 3


def test_decoders_of_a_kept_model_share_one_copy_and_others_see_every_change():
    kept, free = make_model(), make_model()
    weights.keep_weights(kept)
    assert Decoder(kept, compile=False).weights is Decoder(kept, compile=False).weights
    Decoder(free, compile=False)
    with torch.no_grad():
        free.final_norm.weight.mul_(2)
    assert torch.equal(Decoder(free, compile=False).weights["final_norm"][0], free.final_norm.weight)


def test_only_the_weights_of_the_chosen_experts_count_as_read():
    dense = Decoder(make_model(), compile=False).info.weight_bytes
    moe = Decoder(make_model(n_experts=4, n_experts_per_token=1), compile=False).info.weight_bytes
    assert moe - dense == 2 * 4 * 32 * 4  # the routers: layers · E · D · 4 bytes


def test_without_a_compiler_compiling_is_refused_in_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    monkeypatch.setattr(graphs, "compiler", lambda: None)
    with pytest.raises(ClockhandError, match=r"needs a C\+\+ compiler"):
        Decoder(make_model())


@pytest.mark.skipif(graphs.compiler() is None, reason="needs a C++ compiler")
def test_one_graph_is_compiled_for_all_lengths_and_the_next_decoder_loads_it(monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    model = make_model(n_layers=1)
    ids = ids_of(model)
    decoder = Decoder(model, reach=TOKENS, compile_prompt=False)
    assert decoder.info.compile_seconds > 0

    def never(*ignored):
        raise AssertionError("compiled again")

    monkeypatch.setattr(graphs, "compile_into", never)
    plain = plain_logits(model, ids)
    counters.clear()
    torch.testing.assert_close(fast_logits(decoder, ids, read=3), plain[2:], **EXACT)
    assert not counters["stats"], "torch compiled something as the text grew"
    torch.compile(torch.sin, backend="eager")(torch.ones(1))  # the control: they do count
    assert counters["stats"]["unique_graphs"] == 1
    second = Decoder(model, reach=TOKENS, compile_prompt=False)
    assert second.info.compile_seconds == 0
    torch.testing.assert_close(fast_logits(second, ids, read=40), plain[39:], **EXACT)


@pytest.mark.slow
@pytest.mark.skipif(graphs.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("kind", KINDS)
def test_the_compiled_step_equals_the_plain_model_for_every_kind(kind, monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    model = make_model(**KINDS[kind])
    ids = ids_of(model)
    for precision in PRECISIONS if kind == "dense" else ["int8"]:
        fast = fast_logits(exact_decoder(model, precision), ids, read=3)
        torch.testing.assert_close(fast, plain_logits(rounded(model, precision), ids)[2:], **EXACT)


@pytest.mark.slow
@pytest.mark.skipif(graphs.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4"])
def test_the_compiled_step_with_a_cache_in_bf16_equals_the_step_as_it_is_written(precision, monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    model = make_model()
    decoder, written = (
        Decoder(model, precision, TOKENS, compile=compile, compile_prompt=False) for compile in (True, False)
    )
    # Cache and activations are alike, so both differ by the order of sums, and by a rounding of the cache.
    difference = fast_logits(decoder, ids_of(model), read=3) - fast_logits(written, ids_of(model), read=3)
    assert difference.abs().max() < 0.05


@pytest.mark.skipif(graphs.compiler() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    "precision",
    # The step of fp32 is compiled by the test above; each takes seconds.
    [pytest.param(each, marks=pytest.mark.slow) if each == "fp32" else each for each in PRECISIONS],
)
def test_generate_takes_the_compiled_step_where_it_lies_ready_and_draws_the_same(precision, monkeypatch, tmp_path):
    monkeypatch.setenv("CLOCKHAND_CACHE", str(tmp_path))
    model = packed(make_model(n_layers=1), precision)
    lively = Sampling(temperature=1.2, top_p=0.95)
    plain = generate(model, [[1, 2, 3]], lively, max_new_tokens=50)
    assert decode.decoder_for(model, 53, 50) is None
    Decoder(model, exact=True, compile_prompt=False)
    assert decode.decoder_for(model, 53, 50) is not None
    assert generate(model, [[1, 2, 3]], lively, max_new_tokens=50) == plain


def test_compiling_is_repaid_by_long_requests_only():
    mini = ModelConfig(vocab_size=4096, d_model=512, n_layers=12, n_heads=8, n_kv_heads=2, d_ff=1408)
    assert not step.is_worth_compiling(mini, 143_706_112, 256)
    assert not step.is_worth_compiling(mini, 143_706_112, 2_000)
    assert step.is_worth_compiling(mini, 143_706_112, 2_000, "int8")
    assert step.is_worth_compiling(mini, 143_706_112, 10_000)


STATM = Path("/proc/self/statm")


@pytest.mark.skipif(not STATM.is_file(), reason="needs Linux to tell what memory is in use")
def test_large_pages_are_asked_for_before_anything_is_written_into_a_longer_cache(monkeypatch):
    def in_use():  # bytes; the kernel gives a page when it is first written
        return int(STATM.read_text().split()[1]) * mmap.PAGESIZE

    decoder = Decoder(make_model(n_kv_heads=4, max_seq_len=2**18), compile=False)
    asked = []
    monkeypatch.setattr(decode, "use_large_pages", lambda piece, now: asked.append((piece.nbytes, in_use())))
    before = in_use()
    decoder._reserve(2**18)
    (keys, then), (values, _) = asked
    assert keys > 2**25, "what is smaller may lie where something else has lain"
    assert then - before < keys / 10
    assert in_use() - before > 0.9 * (keys + values)  # the control
    assert sum(each.nbytes for each in decoder._keys) == keys, "all layers in one piece"
