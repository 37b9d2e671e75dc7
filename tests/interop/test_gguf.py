"""GGUF: what we write is what llama.cpp runs, what we read is what was written, and what is neither is refused.

The comparisons with llama.cpp are marked `peers`. They need sharp weights: with those a model starts from, attention
looks everywhere alike, and a wrong rotation would hardly show.
"""

import dataclasses
import json
import struct
from pathlib import Path

import gguf as package
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import BYTE_LETTERS, Tokenizer
from clockhand.errors import ClockhandError
from clockhand.interop import gguf, gguf_file, gguf_tokenizer, llama2c, parity
from clockhand.model.transformer import Transformer

SMALL = dict(vocab_size=336, d_model=32, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=512)
TEXT = "The clock struck 12, then 1234567 hands turned.\n    if x:\n\t\treturn 床前明月光 🙂👋🏽\n\n\n"

ROPES = {
    "plain": {},
    "linear": dict(rope_scaling="linear", rope_factor=4.0),
    "ntk": dict(rope_scaling="ntk", rope_factor=4.0),
    "yarn": dict(rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=64, head_dim=64),
    "yarn with a factor of attention": dict(
        rope_scaling="yarn", rope_factor=16.0, rope_original_max_seq_len=64, rope_theta=1e6, rope_attention_factor=1.0
    ),
    "llama3": dict(rope_scaling="llama3", rope_factor=8.0, rope_original_max_seq_len=128, rope_theta=5e5),
}
MODELS = {
    "llama": {},
    "llama, untied, MHA": dict(tie_embeddings=False, n_kv_heads=4),
    "llama, MQA, free head_dim": dict(n_kv_heads=1, head_dim=32),
    "llama, all biases": dict(attention_bias="all", mlp_bias=True),
    "llama, biases of qwen2, free head_dim": dict(attention_bias="qkv", head_dim=32),
    "llama, trained interleaved": dict(rope_layout="interleaved"),
    "qwen2": dict(attention_bias="qkv"),
    "qwen3": dict(qk_norm=True),
    "qwen3, untied, free head_dim": dict(qk_norm=True, tie_embeddings=False, head_dim=32),
    "qwen3, trained interleaved": dict(qk_norm=True, rope_layout="interleaved"),
    "qwen3 under yarn": dict(qk_norm=True, **ROPES["yarn with a factor of attention"]),
    "qwen3moe, top 1": dict(qk_norm=True, n_experts=4),
    "qwen3moe, top 2, untied": dict(qk_norm=True, n_experts=6, n_experts_per_token=2, tie_embeddings=False),
    **{f"llama, rope {name}": rope for name, rope in ROPES.items() if rope},
}


def model(**changed) -> Transformer:
    torch.manual_seed(0)
    ours = Transformer(ModelConfig(**{**SMALL, "init_std": 0.15, **changed})).eval()
    for name, parameter in ours.named_parameters():  # norms of 1 and biases of 0 would hide a mistake
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, -0.3, 0.3) if "bias" in name else torch.nn.init.uniform_(
                parameter, 0.5, 1.5
            )
    return ours


@pytest.fixture(scope="module")
def words() -> Tokenizer:
    return Tokenizer.train([TEXT] * 3, vocab_size=330)


@pytest.fixture(scope="module")
def llama_cpp():
    return pytest.importorskip("llama_cpp")


# ---- llama.cpp ----


@pytest.mark.peers
@pytest.mark.parametrize("name", MODELS)
def test_llama_cpp_computes_the_same_logits_and_writes_the_same_64_ids(llama_cpp, words, tmp_path, name):
    ours = model(**MODELS[name])
    gguf.write(ours, words, tmp_path / "m.gguf")
    found = parity.compare(ours, words, parity.InLlamaCpp(tmp_path / "m.gguf", "llama.cpp"))
    assert found.passed, found.verdict
    assert found.first_differing_token is None
    assert found.largest_difference < 1e-4 * found.spread  # rounding is at 1e-5


@pytest.mark.peers
@pytest.mark.parametrize("dtype", ["f16", "bf16", "q8_0"])
@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen3moe, top 2, untied"])
def test_rounded_weights_stay_within_a_thousandth_of_a_nat(llama_cpp, words, tmp_path, name, dtype):
    ours = model(**{**MODELS[name], "init_std": 0.08})  # as flat as a trained model's scores; sharper is harder
    gguf.write(ours, words, tmp_path / "m.gguf", dtype)
    found = parity.compare(ours, words, parity.InLlamaCpp(tmp_path / "m.gguf", "llama.cpp"))
    assert found.passed, found.verdict
    assert found.kl < 1e-3


@pytest.mark.peers
def test_a_trained_model_in_q8_0_stays_within_a_thousandth_of_a_nat(llama_cpp, shared_data, tmp_path):
    ours = llama2c.read(shared_data / "llama2c/aidreams260K.bin")
    words = llama2c.read_tokenizer(shared_data / "llama2c/aidreams_tok512.bin", 512)
    gguf.write(ours, words, tmp_path / "m.gguf", "q8_0")
    assert parity.compare(ours, words, parity.InLlamaCpp(tmp_path / "m.gguf", "llama.cpp")).kl < 1e-3


WRONG = {
    "no scaling": (ROPES["linear"], dict(rope_scaling="none", rope_factor=1.0)),
    "another base": (ROPES["ntk"], dict(rope_factor=5.0)),
    "another original length": (ROPES["yarn"], dict(rope_original_max_seq_len=200)),
    "YaRN's own factor of attention": (ROPES["yarn with a factor of attention"], dict(rope_attention_factor=None)),
    "Llama 3's scaling by another factor": (ROPES["llama3"], dict(rope_factor=7.0)),
}


@pytest.mark.peers
@pytest.mark.parametrize("name", WRONG)
def test_control_llama_cpp_shows_a_wrong_rotation(llama_cpp, words, tmp_path, name):
    rope, wrong = WRONG[name]
    ours = model(**rope)
    exported = Transformer(dataclasses.replace(ours.config, **wrong))
    exported.load_state_dict(ours.state_dict())
    gguf.write(exported, words, tmp_path / "m.gguf")
    assert not parity.compare(ours, words, parity.InLlamaCpp(tmp_path / "m.gguf", "llama.cpp")).passed


@pytest.mark.peers
@pytest.mark.parametrize("qk_norm", [False, True])
def test_control_llama_cpp_shows_a_wrong_order_of_rows(llama_cpp, words, tmp_path, monkeypatch, qk_norm):
    """Rows that are not moved for llama, and rows that are moved for qwen3."""
    monkeypatch.setattr(gguf, "_layout", lambda architecture: "interleaved" if qk_norm else "half")
    ours = model(qk_norm=qk_norm)
    gguf.write(ours, words, tmp_path / "m.gguf")
    found = parity.compare(ours, words, parity.InLlamaCpp(tmp_path / "m.gguf", "llama.cpp"))
    assert not found.passed
    assert found.largest_difference > 0.1 * found.spread  # a hundred times the allowance


# ---- llama.cpp's tokenizer ----

hard_parts = st.one_of(
    st.integers(0, 10**12).map(str),
    st.sampled_from(["    ", "\n    return x\n", "\t", "  ", "\n\n\n", " \n ", "\r\n", "def f(x):", "x += 1  # why\n"]),
    st.sampled_from([" don't", " I'LL", "'S", "don’t", "é", "é", "🙂", "👋🏽", "👨‍👩‍👧", "½", "١٢٣", "Ⅻ", "x²", "ß"]),
    st.sampled_from(
        ["漢字", "，。", "。\n", "\u3000", "\u00a0", "\u200b", "한국어", "ไทย", "हिन्दी", "__init__", "..."]
    ),
    st.sampled_from(["<|im_end|>", "<|begin_of_text|>", "</s>", "<s>", "<unk>", "<0x41>"]),
    st.text(" \n\tab1'", max_size=10),
    st.text(max_size=8),
)
hard_texts = st.lists(hard_parts, max_size=8).map("".join)


def split_first_by(name: str) -> Tokenizer:
    """A foreign byte-level BPE whose text is split first as `name` says, trained on a little of everything."""
    from tokenizers import Tokenizer as Backend
    from tokenizers import models, trainers

    spec = json.loads(Backend(models.BPE()).to_str())
    spec["pre_tokenizer"] = gguf_tokenizer.with_offsets(gguf_tokenizer.PRE_TOKENIZERS[name])
    spec["decoder"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    spec["model"]["ignore_merges"] = name == "llama-bpe"
    backend = Backend.from_str(json.dumps(spec))
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=BYTE_LETTERS, special_tokens=["<s>", "</s>"], show_progress=False
    )
    digits = " ".join(str(3**n) for n in range(60))
    backend.train_from_iterator([TEXT, Path(__file__).read_text("utf-8"), digits], trainer)
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.peers
@pytest.mark.parametrize("name", ["ours", "byte", "char", "llama2.c", *gguf_tokenizer.PRE_TOKENIZERS])
def test_llama_cpp_splits_every_text_into_the_same_ids(llama_cpp, words, shared_data, tmp_path, name):
    if name == "llama2.c":
        tokenizer = llama2c.read_tokenizer(shared_data / "llama2c/aidreams_tok512.bin", 512)
    elif name in gguf_tokenizer.PRE_TOKENIZERS:
        tokenizer = split_first_by(name)
    else:
        tokenizer = words if name == "ours" else Tokenizer.train([TEXT], name)
    tiny = Transformer(ModelConfig(vocab_size=tokenizer.vocab_size, d_model=8, n_layers=1, n_heads=1, d_ff=8))
    gguf.write(tiny, tokenizer, tmp_path / "m.gguf")
    there = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(hard_texts)
    def same(text: str) -> None:
        if name == "llama2.c":
            text = text.replace("▁", "")  # SentencePiece's own space
        ids = tokenizer.encode(text)
        assert there.tokenize(text.encode(), add_bos=False, special=False) == ids
        assert there.detokenize(ids).decode(errors="replace") == tokenizer.decode(ids) or name == "llama2.c"

    same()
    asked = tokenizer.encode("once", bos=name in ("ours", "byte", "char", "llama2.c"))
    assert there.tokenize(b"once", add_bos=True) == asked


@pytest.mark.peers
def test_control_a_wrong_name_for_the_pre_tokenizer_gives_other_ids(llama_cpp, words, tmp_path, monkeypatch):
    swapped = {"qwen2": gguf_tokenizer.PRE_TOKENIZERS["gpt-2"]}
    monkeypatch.setattr(gguf_tokenizer, "PRE_TOKENIZERS", swapped)
    gguf.write(model(), words, tmp_path / "m.gguf")
    there = llama_cpp.Llama(str(tmp_path / "m.gguf"), vocab_only=True, verbose=False)
    assert there.tokenize(b"then 1234567 hands", add_bos=False) != words.encode("then 1234567 hands")


# ---- there and back ----


@pytest.mark.parametrize("name", MODELS)
def test_a_model_comes_back_as_it_was(words, tmp_path, name):
    ours = model(**MODELS[name])
    gguf.write(ours, words, tmp_path / "m.gguf")
    again, tokenizer = gguf.read(tmp_path / "m.gguf")
    ids = torch.randint(300, (2, 60), generator=torch.Generator().manual_seed(0))
    assert torch.allclose(again(ids).logits, ours(ids).logits, atol=1e-4)
    assert tokenizer.fingerprint == words.fingerprint
    assert tokenizer.chat_template == words.chat_template
    said_otherwise = {"init_std", "rope_layout"}  # a start, and an order of rows
    if ours.config.rope_scaling == "ntk":
        said_otherwise |= {"rope_theta", "rope_scaling", "rope_factor"}  # a larger base, which it is
    same = dataclasses.replace(again.config, **{field: getattr(ours.config, field) for field in said_otherwise})
    assert same == ours.config


@pytest.mark.parametrize(
    ("dtype", "relative"), [("f32", 0), ("f16", 2**-11), ("bf16", 2**-8), ("q8_0", 1 / 254 + 2**-11)]
)
def test_numbers_come_back_within_the_rounding_of_their_type(words, tmp_path, dtype, relative):
    """Relative to the largest number. q8_0 rounds to 1/127 of the largest in its block, and that to f16."""
    ours = model(qk_norm=True, n_experts=2)
    gguf.write(ours, words, tmp_path / "m.gguf", dtype)
    again = dict(gguf.read(tmp_path / "m.gguf", dtype=torch.float32)[0].named_parameters())
    for name, weight in ours.named_parameters():
        exact = weight.dim() == 1 or "router" in name
        error = float((again[name] - weight).detach().abs().max())
        assert error <= (0 if exact else relative * float(weight.detach().abs().max())), name


@pytest.mark.parametrize("dtype", gguf.DTYPES)
def test_every_tensor_is_read_as_the_package_gguf_reads_it(words, tmp_path, dtype):
    gguf.write(model(qk_norm=True, n_experts=2), words, tmp_path / "m.gguf", dtype)
    ours, theirs = gguf_file.GGUFFile(tmp_path / "m.gguf"), package.GGUFReader(tmp_path / "m.gguf")
    assert [tensor.name for tensor in theirs.tensors] == list(ours.tensors)
    for tensor in theirs.tensors:
        assert np.array_equal(package.dequantize(tensor.data, tensor.tensor_type), ours.read(tensor.name).float())
    assert [name for name in theirs.fields if not name.startswith("GGUF.")] == list(ours.keys)


@pytest.mark.parametrize("kind", ["byte", "char", "bpe"])
def test_a_tokenizer_comes_back_with_every_id(tmp_path, kind):
    words = Tokenizer.train([TEXT], kind)
    keys, notes = gguf_tokenizer.to_keys(words, words.vocab_size + 7)
    again = gguf_tokenizer.from_keys(keys, "a test")
    assert notes == []
    assert len(keys["tokenizer.ggml.tokens"]) == words.vocab_size + 7
    assert again.fingerprint == words.fingerprint
    assert again.encode(TEXT, bos=True, eos=True) == words.encode(TEXT, bos=True, eos=True)


def test_minimind_and_its_tokenizer_come_back(shared_data, tmp_path):
    words = Tokenizer.load(shared_data / "minimind")
    gguf.write(model(vocab_size=6400, qk_norm=True), words, tmp_path / "m.gguf", "f16")
    again, tokenizer = gguf.read(tmp_path / "m.gguf")
    assert tokenizer.encode(TEXT) == words.encode(TEXT)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (words.bos_id, words.eos_id, words.pad_id)
    assert tokenizer.special_ids == words.special_ids
    assert again.token_embedding.weight.dtype == torch.float16


# ---- refusals ----


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("norm", dict(norm="layer")),
        ("norm_position", dict(norm_position="post")),
        ("mlp", dict(mlp="relu")),
        ("position", dict(position="none")),
        ("residual", dict(residual=False)),
        ("sliding_window", dict(sliding_window=64)),
        ("rope_scaling", dict(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=64)),
        ("rope_scaling", dict(qk_norm=True, **ROPES["llama3"])),
        ("rope_beta_fast", dict(rope_beta_fast=16.0, **ROPES["yarn"])),
        ("qk_norm", dict(n_experts=2)),
        ("renormalize_top_k", dict(qk_norm=True, n_experts=2, n_experts_per_token=2, renormalize_top_k=False)),
        ("attention_bias", dict(qk_norm=True, attention_bias="all")),
        ("mlp_bias", dict(qk_norm=True, mlp_bias=True)),
    ],
)
def test_what_llama_cpp_would_run_otherwise_is_refused_by_name(words, tmp_path, field, settings):
    with pytest.raises(ClockhandError, match=rf"^{field} = "):
        gguf.write(model(**settings), words, tmp_path / "m.gguf")
    assert list(tmp_path.iterdir()) == []


def test_a_weight_that_a_type_cannot_hold_is_refused_and_nothing_is_left(words, tmp_path):
    ours = model()
    with torch.no_grad():
        ours.blocks[1].mlp.up_proj.weight[0, 0] = 1e6
    with pytest.raises(ClockhandError, match=r"blk.1.ffn_up.weight has a weight of 1e\+06, which f16 cannot hold"):
        gguf.write(ours, words, tmp_path / "m.gguf", "f16")
    assert list(tmp_path.iterdir()) == []
    gguf.write(ours, words, tmp_path / "m.gguf", "bf16")


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(words, tmp_path):
    with pytest.raises(ClockhandError, match="330 ids, but the model only 300"):
        gguf.write(model(vocab_size=300), words, tmp_path / "m.gguf")


def test_a_tokenizer_that_splits_in_a_way_of_its_own_is_refused(words, tmp_path):
    words.save(tmp_path)
    spec = json.loads((tmp_path / "tokenizer.json").read_text())
    spec["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    with pytest.raises(ClockhandError, match="in a way that"):
        gguf_tokenizer.to_keys(Tokenizer.load(tmp_path), 400)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("llama.attention.sliding_window", 8, "attention.sliding_window = 8"),
        ("llama.attn_logit_softcapping", 30.0, "attn_logit_softcapping = 30.0"),
        ("llama.rope.scaling.type", "longrope", "rope scaling 'longrope'"),
        ("llama.rope.dimension_count", 4, "differ, but clockhand has one head_dim"),
        ("llama.block_count", 3, "blk.2.attn_norm.weight is missing"),
        ("llama.block_count", 1, "blk.1.attn_norm.weight is nothing that clockhand can honour"),
        ("llama.block_count", 10**9, "asks for 1000000000 layers"),
        ("llama.feed_forward_length", 2**31, "mlp.gate_proj.weight has shape"),
        ("tokenizer.ggml.pre", "nobody", "pre-tokenizer 'nobody'"),
        ("tokenizer.ggml.model", "bert", "'bert' is not gpt2 or llama"),
        ("tokenizer.ggml.bos_token_id", 5000, "bos_token_id = 5000"),
    ],
)
def test_a_key_that_we_could_not_honour_is_refused_by_name(words, tmp_path, monkeypatch, key, value, message):
    gguf.write(model(), words, tmp_path / "m.gguf")
    file = gguf_file.GGUFFile(tmp_path / "m.gguf")
    file.keys[key] = value
    monkeypatch.setattr(gguf, "GGUFFile", lambda path: file)
    with pytest.raises(ClockhandError, match=message):
        gguf.read(tmp_path / "m.gguf")


def test_an_architecture_that_we_do_not_know_is_refused_by_name(words, tmp_path):
    gguf.write(model(), words, tmp_path / "m.gguf")
    content = (tmp_path / "m.gguf").read_bytes().replace(b"llama", b"gemma")
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(ClockhandError, match="unknown architecture 'gemma'"):
        gguf.read(tmp_path / "m.gguf")


# ---- strangers ----


def header(n_tensors: int, n_keys: int, rest: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, n_tensors, n_keys) + rest


def text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"GGUF", "too short"),
        (b"PK" * 20, "is not GGUF"),
        (header(0, 2**63), "claims 9223372036854775808 keys"),
        (header(2**63, 0), "claims 9223372036854775808 tensors"),
        (header(0, 1, struct.pack("<Q", 2**62)), "but ends before"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 0, 2**60)), "entries in one list"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 8, 9_000_000)), "but ends before"),
        (header(0, 1, text(b"k") + struct.pack("<IIQ", 9, 9, 1)), "of type 9, which is not known"),
        (header(0, 1, text(b"\xff") + struct.pack("<I", 0)), "not UTF-8"),
        (header(1, 0, text(b"t") + struct.pack("<I", 10**9)), "dimensions of t"),
        (header(1, 0, text(b"t") + struct.pack("<IQQIQ", 2, 2**40, 2**40, 0, 0)), "outside the file"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 99, 0)), "type 99"),
        (header(1, 0, text(b"t") + struct.pack("<IQIQ", 1, 4, 0, 2**63)), "outside the file"),
    ],
)
def test_a_header_that_claims_too_much_is_refused(tmp_path, content, message):
    (tmp_path / "m.gguf").write_bytes(content.ljust(24, b"\0") if len(content) > 4 else content)
    with pytest.raises(ClockhandError, match=message):
        gguf_file.GGUFFile(tmp_path / "m.gguf")


def test_tensors_that_lie_on_each_other_are_refused(words, tmp_path):
    infos = b"".join(text(b"t%d" % n) + struct.pack("<IQIQ", 1, 1000, 0, 0) for n in range(9))
    (tmp_path / "m.gguf").write_bytes(header(9, 0, infos).ljust(9000, b"\0"))
    with pytest.raises(ClockhandError, match="more than the file"):
        gguf_file.GGUFFile(tmp_path / "m.gguf")


def fuzz(survives, tmp_path_factory, examples: int) -> None:
    file = tmp_path_factory.mktemp("good") / "m.gguf"
    tiny = Tokenizer.train([], "byte")
    gguf.write(model(d_model=16, n_layers=1, d_ff=16, vocab_size=262, **ROPES["llama3"]), tiny, file)
    survives(gguf.read, file.read_bytes(), "m.gguf", examples)


def test_a_damaged_file_is_one_clear_refusal(survives, tmp_path_factory):
    fuzz(survives, tmp_path_factory, 200)


@pytest.mark.slow
def test_a_damaged_file_is_one_clear_refusal_2000_times(survives, tmp_path_factory):
    fuzz(survives, tmp_path_factory, 2000)
