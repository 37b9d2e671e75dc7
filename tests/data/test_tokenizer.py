"""Text becomes ids and comes back unchanged, here and in Hugging Face's reader of the same files."""

import codecs
import json
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clockhand.data.tokenizer import KINDS, MIN_VOCAB_SIZE, SPECIAL_TOKENS, StreamDecoder, Tokenizer
from clockhand.errors import ClockhandError

TEXTS = [
    "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 3,
    "def f(x):\n    return x ** 2  # 1234567890\n\n\nfor i in range(10):\n\tprint(f'{i}')\r\n",
    "獨坐幽篁裏，彈琴復長嘯。深林人不知，明月來相照。Žluťoučký kůň 🙂🙂",
]
TRAINED = {kind: Tokenizer.train(TEXTS, kind, 400 if kind == "bpe" else None) for kind in KINDS}

HARD = [
    *("", " ", "   ", "\n", "\r\n\r\n", "\t \x00\x01\x7f", "    if x:\n        y", "a" * 1000),
    *(
        "1234567890 007 3.14",
        "don't I'LL we've",
        "深林人不知",
        "🙂👩‍👩‍👧‍👦🏳️‍🌈",
        "\U0010ffff\ue000",
        "\ufeff\u200b\ufffd",
    ),
    *("e\u0301 \u00e9 \ufb01 \u212b", "Ġ Ċ ▁ <0x0A>", "".join(SPECIAL_TOKENS), "<|im_<|im_end|>end|>"),
]
# Any string, and strings that come close to what a tokenizer might stumble on.
any_text = st.one_of(
    st.text(st.characters(exclude_categories=["Cs"])),
    st.lists(st.sampled_from([*HARD, "a", " ", "\n", "'s", "<|", "|>", "9", "明", "\r"])).map("".join),
)
every_kind = pytest.mark.parametrize("kind", KINDS)


@every_kind
@given(text=any_text)
@settings(max_examples=150, deadline=None)
def test_decode_undoes_encode_for_every_string(kind: str, text: str):
    tokenizer = TRAINED[kind]
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids, skip_special=False) == text
    assert sum(int(tokenizer.token_bytes[id]) for id in ids) == len(text.encode())


@every_kind
@pytest.mark.parametrize("text", HARD)
def test_hard_strings_survive(kind: str, text: str):
    assert TRAINED[kind].decode(TRAINED[kind].encode(text)) == text


@every_kind
@given(text=any_text)
@settings(max_examples=100, deadline=None)
def test_user_text_never_yields_a_control_token(kind: str, text: str):
    assert TRAINED[kind].special_ids.isdisjoint(TRAINED[kind].encode(text + "".join(SPECIAL_TOKENS)))


def test_the_same_text_does_yield_control_tokens_where_a_template_wrote_it():
    """The control of the test above: the spellings are really those of the special tokens."""
    tokenizer = TRAINED["bpe"]
    assert tokenizer.encode_control("".join(SPECIAL_TOKENS)) == [0, 1, 2, 3, 4]
    assert tokenizer.encode_control("a<|im_end|>b") == [*tokenizer.encode("a"), 4, *tokenizer.encode("b")]


@given(texts=st.lists(st.lists(any_text | st.sampled_from(["\n", "\n\n", " \n", "a\n", ".\r\n"])).map("".join)))
@settings(max_examples=150, deadline=None)
def test_long_texts_cut_for_many_cores_have_the_ids_of_the_whole(texts: list[str]):
    tokenizer = TRAINED["bpe"]
    whole = [tokenizer._backend.encode(text, add_special_tokens=False).ids for text in texts]
    with mock.patch("clockhand.data.tokenizer.PIECE_CHARACTERS", 3):
        assert tokenizer.encode_batch(texts) == whole


def test_cutting_long_texts_anywhere_would_change_ids():
    """The control of the test above: it does cut, and elsewhere that matters."""
    tokenizer = TRAINED["bpe"]
    with mock.patch("clockhand.data.tokenizer.PIECE_CHARACTERS", 3):
        assert tokenizer._pieces_of("speak.\n\nSpeak") == ["speak.", "\n\nSpeak"]
    assert tokenizer.encode("spe") + tokenizer.encode("ak") != tokenizer.encode("speak")


@every_kind
def test_special_tokens_and_bytes_have_the_first_ids(kind: str):
    tokenizer = TRAINED[kind]
    assert [tokenizer.special_tokens[name] for name in SPECIAL_TOKENS] == [0, 1, 2, 3, 4]
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (0, 1, 2)
    assert tokenizer.special_ids == {0, 1, 2, 3, 4}
    assert [tokenizer.piece(5 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes[:6].tolist() == [0, 0, 0, 0, 0, 1]
    assert tokenizer.kind == kind


def test_bos_and_eos_come_only_when_asked():
    tokenizer = TRAINED["bpe"]
    plain = tokenizer.encode("hear me")
    assert tokenizer.encode("hear me", bos=True, eos=True) == [0, *plain, 1]
    assert tokenizer.encode_batch(["hear me", ""], bos=True) == [[0, *plain], [0]]
    assert tokenizer.decode([0, *plain, 1]) == "hear me"
    assert tokenizer.decode([0, *plain, 1], skip_special=False) == "<|begin_of_text|>hear me<|end_of_text|>"


def test_a_bpe_vocabulary_has_the_size_asked_for():
    assert TRAINED["bpe"].vocab_size == 400
    assert Tokenizer.train(TEXTS, "bpe", MIN_VOCAB_SIZE).vocab_size == MIN_VOCAB_SIZE
    assert len(TRAINED["bpe"].encode(TEXTS[0])) < len(TEXTS[0]) / 3


def test_char_gives_one_id_to_each_character_of_its_corpus():
    tokenizer = TRAINED["char"]
    for text in TEXTS:
        assert len(tokenizer.encode(text)) == len(text)
    assert len(tokenizer.encode("鬱")) > 1  # never seen, so written in bytes


def test_a_char_limit_keeps_the_commonest_characters():
    text = "明" * 9 + "月" * 5 + "鬱"
    assert Tokenizer.train([text], "char").vocab_size > 265
    tokenizer = Tokenizer.train([text], "char", 265)  # two merges for each of two characters
    assert tokenizer.vocab_size == 265
    assert [len(tokenizer.encode(character)) for character in "明月"] == [1, 1]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_training_twice_gives_the_same_tokenizer():
    again = Tokenizer.train(iter(TEXTS), "bpe", 400)
    assert again.fingerprint == TRAINED["bpe"].fingerprint
    assert len({tokenizer.fingerprint for tokenizer in TRAINED.values()}) == 3


@every_kind
def test_saving_and_loading_changes_nothing(kind: str, tmp_path: Path):
    TRAINED[kind].save(tmp_path)
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        loaded = Tokenizer.load(path)
        assert loaded.fingerprint == TRAINED[kind].fingerprint
        assert (loaded.kind, loaded.bos_id, loaded.chat_template) == (kind, 0, TRAINED[kind].chat_template)
        assert all(loaded.encode(text) == TRAINED[kind].encode(text) for text in HARD)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["tokenizer.json", "tokenizer_config.json"]


# Against an independent reader


@pytest.fixture(scope="module", params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    """One of our tokenizers, and what Hugging Face makes of its folder."""
    from transformers import AutoTokenizer

    folder = tmp_path_factory.mktemp("tokenizer")
    TRAINED[request.param].save(folder)
    return TRAINED[request.param], AutoTokenizer.from_pretrained(folder)


@given(text=any_text)
@settings(max_examples=100, deadline=None)
def test_hugging_face_finds_the_same_ids(pair, text: str):
    ours, theirs = pair
    assert theirs.encode(text, add_special_tokens=False, split_special_tokens=True) == ours.encode(text)
    assert theirs.encode(text, add_special_tokens=False) == ours.encode_control(text)


def test_hugging_face_puts_bos_first_and_knows_the_roles(pair):
    ours, theirs = pair
    assert theirs.encode("hear me") == ours.encode("hear me", bos=True)
    assert (theirs.bos_token_id, theirs.eos_token_id, theirs.pad_token_id) == (0, 1, 2)
    assert set(theirs.all_special_ids) == ours.special_ids
    assert len(theirs) == ours.vocab_size


@given(numbers=st.lists(st.integers(0, 10**6), max_size=40))
@settings(max_examples=100, deadline=None)
def test_hugging_face_decodes_any_ids_to_the_same_text(pair, numbers: list[int]):
    ours, theirs = pair
    ids = [number % ours.vocab_size for number in numbers]
    assert theirs.decode(ids, skip_special_tokens=True) == ours.decode(ids)
    assert theirs.decode(ids) == ours.decode(ids, skip_special=False)


@pytest.fixture(scope="module")
def minimind(shared_data: Path) -> Tokenizer:
    return Tokenizer.load(shared_data / "minimind")


def test_a_foreign_tokenizer_keeps_its_roles(minimind: Tokenizer, shared_data: Path):
    assert (minimind.bos_id, minimind.eos_id, minimind.pad_id) == (1, 2, 0)
    assert (minimind.vocab_size, minimind.kind) == (6400, "bpe")
    assert len(minimind.special_ids) == 21
    assert Tokenizer.load(shared_data / "minimind" / "tokenizer.json").bos_id == 1


@given(text=any_text)
@settings(max_examples=100, deadline=None)
def test_a_foreign_tokenizer_finds_the_ids_hugging_face_finds(minimind: Tokenizer, theirs, text: str):
    assert minimind.encode(text) == theirs.encode(text, add_special_tokens=False, split_special_tokens=True)
    assert minimind.decode(minimind.encode(text)) == text


@pytest.fixture(scope="module")
def theirs(shared_data: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(shared_data / "minimind")


def test_a_foreign_tokenizer_saves_everything_it_came_with(minimind: Tokenizer, tmp_path: Path):
    minimind.save(tmp_path)
    again = Tokenizer.load(tmp_path)
    assert again.fingerprint == minimind.fingerprint
    assert again.config == minimind.config


def test_a_role_nobody_has_is_none_and_adds_nothing(minimind: Tokenizer, tmp_path: Path):
    minimind.save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": None, "eos_token": {"content": "<|im_end|>"}})
    )
    tokenizer = Tokenizer.load(tmp_path)
    assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.chat_template) == (None, 2, None, None)
    assert tokenizer.encode("hello", bos=True) == minimind.encode("hello")


def sentencepiece_tokenizer(folder: Path) -> Tokenizer:
    """A small one of Llama 2's kind, with a space before every text and unknown characters as bytes."""
    vocab = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "h", "i", "hi", "▁hi"]
    whole = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
    space, mark = {"String": " "}, {"String": "▁"}
    before = [{"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": space, "content": "▁"}]
    after = [
        {"type": "Replace", "pattern": mark, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    model = {"type": "BPE", "byte_fallback": True, "fuse_unk": True, "unk_token": "<unk>"}
    spec = {
        "version": "1.0",
        "added_tokens": [{"id": id, "content": vocab[id], **whole} for id in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": before},
        "decoder": {"type": "Sequence", "decoders": after},
        "model": {
            **model,
            "vocab": {token: id for id, token in enumerate(vocab)},
            "merges": [["h", "i"], ["▁", "hi"]],
        },
    }
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer.load(folder)


def test_a_sentencepiece_tokenizer_reads_and_writes_as_its_library_does(tmp_path: Path):
    tokenizer = sentencepiece_tokenizer(tmp_path)
    for text in ["hi hi", " hi", "明 hi\n", "", "  "]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == tokenizer._backend.decode(ids)
    assert tokenizer.decode(tokenizer.encode("明 hi")) == "明 hi"
    continuation = StreamDecoder(tokenizer, continues=True)
    assert continuation.push(*tokenizer.encode("hi")) == " hi"


# Streaming


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(id) for id in ids), decoder.flush()]


@given(numbers=st.lists(st.integers(0, 10**6), max_size=60), text=any_text)
@settings(max_examples=100, deadline=None)
def test_pushes_and_flush_together_are_decode(minimind: Tokenizer, numbers: list[int], text: str):
    for tokenizer in (*TRAINED.values(), minimind):
        ids = [number % tokenizer.vocab_size for number in numbers] + tokenizer.encode(text)
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


@given(text=any_text)
@settings(max_examples=100, deadline=None)
def test_a_stream_never_breaks_a_character(minimind: Tokenizer, text: str):
    """Every push is a prefix-complete piece of the text; U+FFFD appears only where the text has one."""
    for tokenizer in (*TRAINED.values(), minimind):
        so_far = ""
        for piece in stream(tokenizer, tokenizer.encode(text)):
            so_far += piece
            assert text.startswith(so_far)
        assert so_far == text


def test_decoding_each_id_by_itself_would_break_characters():
    """The control of the test above."""
    tokenizer = TRAINED["byte"]
    assert "".join(tokenizer.decode([id]) for id in tokenizer.encode("明")) == "\ufffd" * 3


def test_a_character_that_is_never_finished_ends_as_a_replacement():
    tokenizer = TRAINED["byte"]
    assert stream(tokenizer, tokenizer.encode("a明")[:3]) == ["a", "", "", "\ufffd"]


def test_a_push_does_not_keep_the_text_before_it():
    """Cost per push cannot grow with the text when what is kept does not: at most three bytes of a character."""
    tokenizer = TRAINED["byte"]
    decoder = StreamDecoder(tokenizer)
    for id in tokenizer.encode("明月🙂" * 50):
        decoder.push(id)
        assert isinstance(decoder._utf8, codecs.BufferedIncrementalDecoder)
        assert len(decoder._utf8.getstate()[0]) <= 3


# Refusals


@pytest.mark.parametrize(
    ("kind", "size", "said"),
    [
        ("bpe", 260, "vocab_size = 260 must be at least 261"),
        ("char", 5, "at least 261"),
        ("bpe", 10**13, "vocab_size = 10000000000000 must be at most 1048576"),
        ("byte", 4096, "must be 261 or left out"),
        ("bytes", None, "did you mean 'byte'"),
    ],
)
def test_an_impossible_vocabulary_is_refused(kind: str, size: int | None, said: str):
    with pytest.raises(ClockhandError, match=said):
        Tokenizer.train(TEXTS, kind, size)


@every_kind
def test_half_a_character_is_refused_with_its_place(kind: str):
    with pytest.raises(ClockhandError, match=r"character 1 of the text is U\+D800"):
        TRAINED[kind].encode("a\ud800")
    with pytest.raises(ClockhandError, match=r"U\+DFFF"):
        Tokenizer.train(["fine", "\udfff"], kind if kind != "byte" else "char")


@pytest.mark.parametrize("id", [-1, 261, 10**9])
def test_an_id_outside_the_vocabulary_is_refused(id: int):
    with pytest.raises(ClockhandError, match=f"token id {id} is outside the vocabulary of 261"):
        TRAINED["byte"].decode([5, id])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "does not exist"),
        ("{", "not a readable tokenizer.json"),
        ("[" * 100_000, "not a readable tokenizer.json"),
        ('{"version": "1.0", "model": {"type": "WordPiece"}}', "not a readable tokenizer.json"),
    ],
)
def test_what_is_no_tokenizer_is_refused(content: str | None, said: str, tmp_path: Path):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ClockhandError, match=said):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["{", "[" * 100_000, "[]"])
def test_a_broken_tokenizer_config_is_refused(content: str, tmp_path: Path):
    TRAINED["byte"].save(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(content)
    with pytest.raises(ClockhandError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a disk that is always full")
def test_a_full_disk_leaves_no_folder_without_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def refuse(path: Path, *_: object, **__: object) -> None:
        with open("/dev/full", "w") as file:
            file.write("x")

    tokenizer = Tokenizer.train([], "byte")
    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(ClockhandError, match="No space left on device"):
        tokenizer.save(tmp_path / "tok")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("processor", ["none", "bos", "add_bos_token"])
def test_bos_is_put_before_text_where_the_tokenizer_itself_puts_it_and_nowhere_else(processor, tmp_path):
    """GPT-2 and SmolLM2 name a bos token and never use it: with it before the prompt greedy texts were others."""
    transformers = pytest.importorskip("transformers")
    Tokenizer.train([], "byte").save(tmp_path)
    spec, config = (json.loads((tmp_path / name).read_text()) for name in ("tokenizer.json", "tokenizer_config.json"))
    if processor != "bos":
        spec["post_processor"] = None
    if processor == "add_bos_token":
        config["add_bos_token"] = True
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    ours = Tokenizer.load(tmp_path)
    plain = ours.encode("hi there")
    assert ours.encode("hi there", bos=True) == (plain if processor == "none" else [0, *plain])
    assert ours.puts_bos == (processor != "none")
    if processor != "add_bos_token":  # which the class of this folder does not obey, and those of Llama do
        assert transformers.AutoTokenizer.from_pretrained(tmp_path).encode("hi there") == ours.encode(
            "hi there", bos=True
        )
