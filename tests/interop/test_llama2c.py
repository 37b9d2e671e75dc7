"""llama2.c's files against what its own C program printed, and against damage."""

import json
import struct
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.interop import llama2c, sentencepiece
from clockhand.model.cache import KVCache
from clockhand.model.transformer import Transformer

SMALL = dict(
    vocab_size=300, d_model=16, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=24, max_seq_len=32, norm_eps=1e-5
)  # fmt: skip
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def model(**settings) -> Transformer:
    torch.manual_seed(0)
    return Transformer(ModelConfig(**{**SMALL, **settings})).eval()


def pieces(*more: str) -> sentencepiece.Pieces:
    """A vocabulary in llama2.c's order, in which earlier pieces have higher scores."""
    every = ["<unk>", "<s>", "</s>", *BYTES, *more]
    return sentencepiece.Pieces(every, [-float(id) for id in range(len(every))])


@pytest.fixture(scope="module")
def sample(shared_data: Path) -> Path:
    return shared_data / "llama2c"


@pytest.fixture(scope="module")
def words(sample: Path) -> Tokenizer:
    return llama2c.read_tokenizer(sample / "aidreams_tok512.bin", 512)


# ---- the C program ----


@pytest.mark.parametrize("run", [0, 1, 2])
def test_a_model_of_llama2c_writes_what_the_c_program_prints_to_the_last_id(sample, words, run):
    expected = json.loads((sample / "aidreams_greedy.json").read_text())["runs"][run]
    dreamer = llama2c.read(sample / "aidreams260K.bin")
    ids = words.encode(expected["prompt"] or "", bos=True)
    cache, fresh = KVCache(dreamer.config, 1), list(ids)
    while len(ids) <= expected["steps"]:
        fresh = [int(dreamer(torch.tensor([fresh]), cache=cache).logits[0, -1].argmax())]
        ids += fresh
    assert ids[1:] == expected["next_ids"]
    assert words.decode(ids) == expected["text"]


def as_llama2c_splits(text: str, vocabulary: sentencepiece.Pieces) -> list[int]:
    """The rule of the C program, by trying every pair each time: the highest score wins, the leftmost among equals."""
    spelled = [piece.replace("▁", " ") for piece in vocabulary.pieces]
    ids = {piece: id for id, piece in enumerate(spelled)}
    found: list[int] = []
    for character in " " + text if text else "":
        found += [ids[character]] if character in ids else [byte + 3 for byte in character.encode()]
    while True:
        joined = [ids.get(spelled[left] + spelled[right]) for left, right in pairwise(found)]
        better = [(vocabulary.scores[id], -place) for place, id in enumerate(joined) if id is not None]
        if not better:
            return found
        place = -max(better)[1]
        found[place : place + 2] = [joined[place]]


@settings(max_examples=300, deadline=None)
@given(st.text(st.sampled_from(" esintarolhcdgfup,m.wbyvkI\n漢"), max_size=30) | st.text(max_size=10))
def test_text_is_split_as_by_scores(words, text):
    vocabulary = sentencepiece.from_tokenizer(words)
    if "▁" not in text:  # which SentencePiece takes for a space, and the C program does not
        assert words.encode(text) == as_llama2c_splits(text, vocabulary)


def test_what_was_read_is_written_again_byte_for_byte(sample, words, tmp_path):
    dreamer = llama2c.read(sample / "aidreams260K.bin")
    assert llama2c.write(dreamer, words, tmp_path / "again.bin") == []
    assert (tmp_path / "tokenizer.bin").read_bytes() == (sample / "aidreams_tok512.bin").read_bytes()
    ours, theirs = (path.read_bytes() for path in (tmp_path / "again.bin", sample / "aidreams260K.bin"))
    tables = 4 * 128 * 16  # cos and sin at the end: the C program computes them anew, and rounds them otherwise
    assert ours[:-tables] == theirs[:-tables]
    angles = (torch.frombuffer(bytearray(each[-tables:]), dtype=torch.float32) for each in (ours, theirs))
    assert torch.allclose(*angles, atol=1e-5)


# ---- versions ----


@pytest.mark.parametrize("settings", [{}, {"tie_embeddings": False}, {"rope_layout": "interleaved"}])
@pytest.mark.parametrize("version", [0, 1])
def test_a_model_comes_back_with_the_same_logits(tmp_path, version, settings):
    ours = model(**settings)
    llama2c.write(ours, None, tmp_path / "m.bin", version)
    again = llama2c.read(tmp_path / "m.bin")
    ids = torch.arange(20)[None]
    assert torch.allclose(again(ids).logits, ours(ids).logits, atol=1e-6)  # rows of q and k are added in another order
    assert again.config.tie_embeddings == ours.config.tie_embeddings


def test_int8_comes_back_within_half_a_step(tmp_path):
    ours = model(tie_embeddings=False)
    llama2c.write(ours, None, tmp_path / "m.bin", version=2)
    again = dict(llama2c.read(tmp_path / "m.bin").named_parameters())
    for name, weight in ours.named_parameters():
        step = 0.0 if "norm" in name else float(weight.detach().abs().max()) / 127
        assert float((weight - again[name]).detach().abs().max()) <= step / 2 + 1e-6, name
    assert (tmp_path / "m.bin").stat().st_size < sum(weight.numel() for weight in again.values()) * 2


def test_an_untied_head_is_a_negative_vocabulary(tmp_path):
    llama2c.write(model(tie_embeddings=False), None, tmp_path / "m.bin")
    assert struct.unpack_from("<7i", (tmp_path / "m.bin").read_bytes())[5] == -300


# ---- what the header cannot say ----


@pytest.mark.parametrize(
    ("field", "settings"),
    [
        ("rope_theta", dict(rope_theta=1e6)),
        ("norm_eps", dict(norm_eps=1e-6)),
        ("head_dim", dict(head_dim=8)),
        ("qk_norm", dict(qk_norm=True)),
        ("n_experts", dict(n_experts=2)),
        ("rope_scaling", dict(rope_scaling="linear", rope_factor=2.0)),
        ("attention_bias", dict(attention_bias="qkv")),
        ("mlp_bias", dict(mlp_bias=True)),
        ("sliding_window", dict(sliding_window=8)),
        ("norm", dict(norm="layer")),
        ("norm_position", dict(norm_position="post")),
        ("mlp", dict(mlp="gelu")),
        ("position", dict(position="learned")),
        ("residual", dict(residual=False)),
    ],
)
def test_what_the_header_cannot_say_is_refused_by_name(tmp_path, field, settings):
    with pytest.raises(ClockhandError, match=rf"^{field} = "):
        llama2c.write(model(**settings), None, tmp_path / "m.bin")
    assert list(tmp_path.iterdir()) == []


def test_heads_that_are_narrower_together_than_the_model_are_refused(tmp_path):
    """68 // 8 is 8 too: it ended in a traceback when the matrices were written."""
    with pytest.raises(ClockhandError, match=r"head_dim = 8, but .* d_model = 68 together"):
        llama2c.write(model(d_model=68, n_heads=8, n_kv_heads=8, head_dim=8), None, tmp_path / "m.bin")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_that_the_program_would_split_otherwise_is_left_out_and_said(tmp_path):
    notes = llama2c.write(model(), Tokenizer.train(["some text"], "byte"), tmp_path / "m.bin")
    assert "no tokenizer.bin" in notes[0]
    assert [path.name for path in tmp_path.iterdir()] == ["m.bin"]


# ---- tokenizer.bin ----


def test_special_tokens_in_the_text_are_text(words):
    assert not set(words.encode("a <s> b </s> <unk>")) & words.special_ids


def test_a_saved_tokenizer_splits_alike(words, tmp_path):
    words.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.encode("I dream of 漢字", bos=True) == words.encode("I dream of 漢字", bos=True)
    assert again.decode(again.encode(" two  spaces")) == " two  spaces"


@pytest.mark.parametrize(
    ("vocabulary", "message"),
    [
        (sentencepiece.Pieces(["<unk>", "<s>", "</s>", "a"], [0.0] * 4), "must begin with"),
        (pieces("a", "a"), "twice"),
        (pieces("a" * 1001), "1001 characters"),
    ],
)
def test_a_vocabulary_that_is_none_is_refused(tmp_path, vocabulary, message):
    llama2c.write_tokenizer(vocabulary, tmp_path / "t.bin")
    with pytest.raises(ClockhandError, match=message):
        llama2c.read_tokenizer(tmp_path / "t.bin", len(vocabulary.pieces))


def test_a_tokenizer_of_another_size_than_the_model_is_refused(tmp_path):
    llama2c.write_tokenizer(pieces("a"), tmp_path / "t.bin")
    with pytest.raises(ClockhandError, match="260 pieces, but the model has a vocabulary of 512"):
        llama2c.read_tokenizer(tmp_path / "t.bin", 512)


# ---- strangers ----


def test_a_header_that_claims_more_than_the_file_holds_is_refused(tmp_path):
    (tmp_path / "m.bin").write_bytes(struct.pack("<7i", 2**30, 2**30, 2**30, 2, 2, 2**30, 2**30))
    with pytest.raises(ClockhandError, match="28 bytes, but its header asks for"):
        llama2c.read(tmp_path / "m.bin")


def fuzz(survives, tmp_path_factory, examples: int) -> None:
    folder = tmp_path_factory.mktemp("good")
    for version in (0, 2):
        llama2c.write(model(n_layers=1), None, folder / "m.bin", version)
        survives(llama2c.read, (folder / "m.bin").read_bytes(), "m.bin", examples)


def fuzz_tokenizer(survives, tmp_path_factory, examples: int) -> None:
    file = tmp_path_factory.mktemp("good") / "t.bin"
    llama2c.write_tokenizer(pieces("▁", "a", "b", "ab", "▁a"), file)
    survives(lambda path: llama2c.read_tokenizer(path, 264), file.read_bytes(), "t.bin", examples)


def test_a_damaged_model_is_one_clear_refusal(survives, tmp_path, tmp_path_factory):
    fuzz(survives, tmp_path_factory, 200)


def test_a_damaged_tokenizer_is_one_clear_refusal(survives, tmp_path_factory):
    fuzz_tokenizer(survives, tmp_path_factory, 200)


@pytest.mark.slow
def test_a_damaged_model_or_tokenizer_is_one_clear_refusal_2000_times(survives, tmp_path_factory, tmp_path):
    fuzz(survives, tmp_path_factory, 2000)
    for left in tmp_path.iterdir():
        left.unlink()
    fuzz_tokenizer(survives, tmp_path_factory, 2000)
