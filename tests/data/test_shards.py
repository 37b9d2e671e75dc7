"""Shards hold the documents exactly, hold some out, and notice when a byte changes."""

import hashlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clockhand.data.shards import Corpus, CorpusSettings, difference, prepare, show, verify
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError


def write_jsonl(path: Path, texts: list[str]) -> str:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return str(path)


def documents(corpus: Corpus, split: str) -> list[str]:
    part = corpus.split(split)
    return [corpus.tokenizer.decode(part.document(number)) for number in range(part.n_documents)]


POEMS = [f"Poem {number}\n" + "line upon line\n" * (number % 7 + 1) for number in range(200)]


@pytest.fixture
def source(tmp_path: Path) -> str:
    return write_jsonl(tmp_path / "poems.jsonl", POEMS)


@pytest.mark.parametrize("shard_tokens", [37, 2**27])
@pytest.mark.parametrize("kind", ["bpe", "char", "byte"])
def test_every_document_is_on_one_side_whole_and_in_order(kind: str, shard_tokens: int, source: str, tmp_path: Path):
    vocab_size = 300 if kind == "bpe" else None
    about = CorpusSettings(sources=(source,), kind=kind, vocab_size=vocab_size, shard_tokens=shard_tokens)
    corpus = prepare(about, tmp_path / "corpus")
    train, val = documents(corpus, "train"), documents(corpus, "val")
    assert train == [poem for poem in POEMS if poem in set(train)]
    assert val == [poem for poem in POEMS if poem in set(val)]
    assert sorted(train + val) == sorted(POEMS)
    val_bytes = corpus.split("val").text_bytes
    assert 0.02 * sum(map(len, POEMS)) < val_bytes <= 0.05 * sum(map(len, POEMS))
    assert "whole documents" in corpus.index["held_out"]
    assert len(verify(tmp_path / "corpus")) == len(list((tmp_path / "corpus").iterdir()))


def is_same(folder, settings) -> bool:
    return difference(folder, settings) is None


def test_a_document_is_bos_text_eos(source: str, tmp_path: Path):
    corpus = prepare(CorpusSettings(sources=(source,), kind="byte"), tmp_path / "corpus")
    train = corpus.split("train")
    first = train.document(0)
    assert first.tolist() == [0, *corpus.tokenizer.encode(documents(corpus, "train")[0]), 1]
    assert train.document_of(np.array([0, len(first) - 1, len(first), train.n_tokens - 1])).tolist() == [
        *(0, 0, 1, train.n_documents - 1)
    ]
    assert train.n_tokens == train.text_bytes + 2 * train.n_documents


@given(texts=st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=2), min_size=1, max_size=30))
@settings(max_examples=25, deadline=None)
def test_any_texts_come_back_and_validation_is_never_empty(texts: list[str], tmp_path_factory: pytest.TempPathFactory):
    texts = [*texts, "at least this"]
    folder = tmp_path_factory.mktemp("any")
    corpus = prepare(CorpusSettings(sources=(write_jsonl(folder / "a.jsonl", texts),), kind="byte"), folder / "corpus")
    train, val = documents(corpus, "train"), documents(corpus, "val")
    assert train
    assert val
    kept = [text for text in texts if text.strip()]
    assert sorted("".join(train + val)) == sorted("".join(kept))


def test_copies_of_a_document_are_on_the_same_side(tmp_path: Path):
    copied = [f"{number:03d} the same words again" for number in range(100)] * 3
    for seed in range(5):
        source = write_jsonl(tmp_path / "copies.jsonl", copied)
        corpus = prepare(CorpusSettings(sources=(source,), kind="byte", seed=seed), tmp_path / "corpus")
        assert set(documents(corpus, "train")).isdisjoint(documents(corpus, "val"))


def test_holding_out_by_place_would_part_copies():
    """The control of the test above: every twentieth document, say, has copies in the rest."""
    copied = [f"{number:03d}" for number in range(99)] * 3
    assert not set(copied[::20]).isdisjoint([text for place, text in enumerate(copied) if place % 20])


def test_what_is_held_out_depends_on_text_and_seed_alone(tmp_path: Path):
    def held_out(texts: list[str], seed: int) -> set[str]:
        about = CorpusSettings(sources=(write_jsonl(tmp_path / "a.jsonl", texts),), kind="byte", seed=seed)
        return set(documents(prepare(about, tmp_path / "corpus"), "val"))

    assert held_out(POEMS, 0) == held_out(POEMS[::-1], 0)
    assert held_out(POEMS, 0) != held_out(POEMS, 1)
    assert held_out(POEMS, 0) & held_out([*POEMS, *(f"new {number}" for number in range(20))], 0)


def test_of_one_document_the_tail_is_held_out_at_a_line_end(tmp_path: Path):
    lines = [f"line {number} of one file\n" for number in range(400)]
    (tmp_path / "a.txt").write_text("".join(lines))
    corpus = prepare(
        CorpusSettings(sources=(str(tmp_path / "a.txt"),), kind="byte", val_fraction=0.1), tmp_path / "corpus"
    )
    train, val = documents(corpus, "train"), documents(corpus, "val")
    assert (len(train), len(val)) == (1, 1)
    assert train[0] + val[0] == "".join(lines)
    assert 38 <= val[0].count("\n") <= 42
    assert val[0].startswith("line ")
    assert (
        corpus.index["held_out"] == "the last 10.0% of the longest document: too few documents to hold out whole ones"
    )


def test_of_a_few_large_documents_the_tail_of_the_longest_is_held_out(tmp_path: Path):
    texts = [f"{number}\n" * 1000 for number in range(4)] + ["long\n" * 1000, "short"]
    corpus = prepare(
        CorpusSettings(sources=(write_jsonl(tmp_path / "a.jsonl", texts),), kind="byte"), tmp_path / "corpus"
    )
    (val,) = documents(corpus, "val")
    assert set(val.splitlines()) == {"long"}
    assert len(val) == pytest.approx(0.05 * sum(map(len, texts)), abs=10)


def test_ids_above_65535_take_four_bytes_and_do_not_wrap(tmp_path: Path):
    text = "".join(map(chr, range(0x4E00, 0x9FFF))) + "".join(map(chr, range(0x20000, 0x2A6D0)))
    text += "".join(map(chr, range(0x3400, 0x4DBF)))
    (tmp_path / "a.txt").write_text(text)
    corpus = prepare(CorpusSettings(sources=(str(tmp_path / "a.txt"),), kind="char"), tmp_path / "corpus")
    assert corpus.index["dtype"] == "<u4"
    assert corpus.split("train").read(0, corpus.split("train").n_tokens).max() > 65535
    assert documents(corpus, "train")[0] + documents(corpus, "val")[0] == text


def test_reading_across_shards_equals_reading_one_file(source: str, tmp_path: Path):
    whole, cut = (
        prepare(CorpusSettings(sources=(source,), kind="byte", shard_tokens=size), tmp_path / str(size)).split("train")
        for size in (2**27, 50)
    )
    everything = whole.read(0, whole.n_tokens)
    assert np.array_equal(everything, cut.read(0, cut.n_tokens))
    for start, stop in [(0, 0), (0, 1), (49, 51), (50, 100), (120, 380), (cut.n_tokens - 1, cut.n_tokens)]:
        assert np.array_equal(cut.read(start, stop), everything[start:stop])
    with pytest.raises(IndexError):
        cut.read(0, cut.n_tokens + 1)


def test_preparing_twice_writes_the_same_bytes(source: str, tmp_path: Path):
    about = CorpusSettings(sources=(source,), vocab_size=300)
    folders = [prepare(about, tmp_path / name).folder for name in ("one", "two")]
    for path in folders[0].iterdir():
        assert path.read_bytes() == (folders[1] / path.name).read_bytes()


def test_a_given_tokenizer_is_used_and_kept(source: str, tmp_path: Path):
    tokenizer = Tokenizer.train(["other text"], "bpe", 265)
    tokenizer.save(tmp_path / "tokenizer")
    corpus = prepare(CorpusSettings(sources=(source,), tokenizer=str(tmp_path / "tokenizer")), tmp_path / "corpus")
    assert corpus.tokenizer.fingerprint == corpus.index["tokenizer"]["fingerprint"] == tokenizer.fingerprint


def test_odd_things_are_in_the_report(tmp_path: Path):
    source = write_jsonl(tmp_path / "a.jsonl", ["good text", "", "more text"])
    corpus = prepare(CorpusSettings(sources=(source,), kind="byte"), tmp_path / "corpus")
    assert corpus.index["report"]["documents"] == 2
    assert corpus.index["report"]["oddities"] == {"empty document": {"count": 1, "examples": [f"{source}:2"]}}


def test_progress_goes_up_to_the_whole(source: str, tmp_path: Path):
    seen: list[tuple[str, int, int]] = []
    prepare(CorpusSettings(sources=(source,), kind="byte"), tmp_path / "corpus", lambda *each: seen.append(each))
    size = sum(map(len, POEMS))
    assert seen[-1] == ("tokenize", size, size)


def test_show_says_what_the_index_counted(source: str, tmp_path: Path):
    prepare(CorpusSettings(sources=(source,), kind="byte"), tmp_path / "corpus")
    about = show(tmp_path / "corpus")
    assert about["tokenizer"]["vocab_size"] == 261
    assert about["splits"]["train"]["documents"] + about["splits"]["val"]["documents"] == 200
    assert 0.9 < about["bytes_per_token"]["train"] < 1


# The same corpus again


def test_a_corpus_matches_the_settings_and_sources_it_was_made_of(source: str, tmp_path: Path):
    about = CorpusSettings(sources=(source,), kind="byte")
    folder = tmp_path / "corpus"
    assert not is_same(folder, about)
    prepare(about, folder)
    assert is_same(folder, about)
    for other in [{"seed": 1}, {"kind": "char"}, {"val_fraction": 0.1}, {"text_field": "body"}]:
        assert not is_same(folder, CorpusSettings(**{"sources": (source,), "kind": "byte", **other}))
    write_jsonl(Path(source), [*POEMS, "one more"])
    assert not is_same(folder, about)


def test_a_corpus_matches_only_the_tokenizer_it_was_made_with(source: str, tmp_path: Path):
    about = CorpusSettings(sources=(source,), tokenizer=str(tmp_path / "tokenizer"))
    Tokenizer.train([], "byte").save(tmp_path / "tokenizer")
    prepare(about, tmp_path / "corpus")
    assert is_same(tmp_path / "corpus", about)
    Tokenizer.train(["é"], "char").save(tmp_path / "tokenizer")
    assert not is_same(tmp_path / "corpus", about)


def test_a_corpus_is_replaced_and_nothing_else_is(source: str, tmp_path: Path):
    folder = tmp_path / "corpus"
    prepare(CorpusSettings(sources=(source,), kind="byte", shard_tokens=100), folder)
    prepare(CorpusSettings(sources=(source,), kind="byte"), folder)
    assert not (folder / "train-00001.bin").exists()
    mine = tmp_path / "mine"
    mine.mkdir()
    prepare(CorpusSettings(sources=(source,), kind="byte"), mine)  # an empty folder is nobody's
    for name, content in {"novel": "notes.txt", "model": "index.json"}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / content).write_text("{}")
        with pytest.raises(ClockhandError, match="exists and is no corpus"):
            prepare(CorpusSettings(sources=(source,)), tmp_path / name)
        assert [path.name for path in (tmp_path / name).iterdir()] == [content]


# Damage


@pytest.fixture
def corpus(source: str, tmp_path: Path) -> Path:
    return prepare(CorpusSettings(sources=(source,), kind="byte", shard_tokens=1000), tmp_path / "corpus").folder


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def test_verify_finds_a_flipped_bit_in_any_file(corpus: Path):
    names = verify(corpus)
    assert {"index.json", "tokenizer.json", "train-documents.bin", "train-00001.bin", "val-00000.bin"} <= set(names)
    for name in names:
        flip_a_bit(corpus / name)
        with pytest.raises(ClockhandError, match=f"{name}.* is (damaged|not what was written)"):
            verify(corpus)
        flip_a_bit(corpus / name)
    verify(corpus)


def test_a_truncated_shard_is_refused_when_opened(corpus: Path):
    path = corpus / "train-00001.bin"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(
        ClockhandError, match=r"train-00001\.bin is truncated: it has 1,998 bytes, its index says 2,000"
    ):
        Corpus.open(corpus)
    path.unlink()
    with pytest.raises(ClockhandError, match="truncated"):
        Corpus.open(corpus)


def test_what_is_no_corpus_is_refused(corpus: Path, tmp_path: Path):
    for path in (tmp_path, tmp_path / "nowhere", tmp_path / "poems.jsonl"):
        with pytest.raises(ClockhandError, match="is no corpus"):
            Corpus.open(path)
    index = json.loads((corpus / "index.json").read_text())
    del index["seal"]
    index["version"] = 3
    index["seal"] = hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
    (corpus / "index.json").write_text(json.dumps(index))
    with pytest.raises(ClockhandError, match="has version 3; this program reads 2"):
        Corpus.open(corpus)
    with pytest.raises(ClockhandError, match="unknown split 'test'"):
        Corpus(corpus, index).split("test")


FULL_DISK = """
import resource, sys
from clockhand.data.shards import CorpusSettings, prepare
resource.setrlimit(resource.RLIMIT_FSIZE, (3000, 3000))
try:
    prepare(CorpusSettings(sources=(sys.argv[1],), kind="byte"), sys.argv[2])
except Exception as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="limits the size of files as Unix does")
def test_a_disk_that_takes_no_more_leaves_the_old_corpus_whole(source: str, corpus: Path, tmp_path: Path):
    before = sorted(tmp_path.iterdir())
    ran = subprocess.run([sys.executable, "-c", FULL_DISK, source, str(corpus)], capture_output=True, text=True)
    assert "ClockhandError cannot write" in ran.stdout, ran.stderr
    assert "what was there before is whole" in ran.stdout
    assert sorted(tmp_path.iterdir()) == before
    verify(corpus)


def test_stopping_in_the_middle_leaves_nothing(source: str, tmp_path: Path):
    def stop(phase: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = sorted(tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        prepare(CorpusSettings(sources=(source,), kind="byte"), tmp_path / "corpus", stop)
    assert sorted(tmp_path.iterdir()) == before


# Refusals


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ([], "no text in .*a.jsonl: file without documents: 1"),
        (["", " "], "no text in .*a.jsonl: empty document: 2 .*a.jsonl:1"),
        (["a"], "has 1 character: too little to hold any out"),
    ],
)
def test_a_corpus_without_text_is_refused(texts: list[str], said: str, tmp_path: Path):
    with pytest.raises(ClockhandError, match=said):
        prepare(CorpusSettings(sources=(write_jsonl(tmp_path / "a.jsonl", texts),)), tmp_path / "corpus")
    assert not (tmp_path / "corpus").exists()


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"val_fraction": 0.0}, "val_fraction = 0.0 must be above 0 and at most 0.5"),
        ({"val_fraction": 0.6}, "val_fraction"),
        ({"shard_tokens": 0}, "shard_tokens = 0 must be at least 1"),
        ({"tokenizer": "x", "vocab_size": 300}, "vocab_size = 300 must be left out where a tokenizer is given"),
    ],
)
def test_impossible_settings_are_refused(wrong: dict, said: str):
    with pytest.raises(ClockhandError, match=said):
        CorpusSettings(sources=("a.txt",), **wrong)


def test_importing_the_data_package_does_not_import_torch():
    code = "import sys, clockhand.data.shards, clockhand.data.chat; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


# Real text


@pytest.mark.parametrize(
    ("name", "train_bytes", "said"),
    [("tang_poems.jsonl", 1_335_522, "382 whole documents"), ("tinyshakespeare.txt", 1_059_636, "the last 5.0%")],
)
def test_real_text_survives(name: str, train_bytes: int, said: str, shared_data: Path, tmp_path: Path):
    corpus = prepare(CorpusSettings(sources=(str(shared_data / name),)), tmp_path / "corpus")
    assert corpus.split("train").text_bytes == train_bytes
    assert corpus.index["held_out"].startswith(said)
    together = "".join(sorted(documents(corpus, "train") + documents(corpus, "val")))
    raw = (shared_data / name).read_text("utf-8")
    texts = [json.loads(line)["text"] for line in raw.splitlines()] if name.endswith("jsonl") else [raw]
    assert sorted(together) == sorted("".join(texts))
    assert corpus.index["report"]["oddities"] == {}


def test_text_that_moves_is_the_same_text_and_what_differs_is_said(tmp_path):
    """The identity was the path and the time of change: a run copied to another machine could not be resumed."""
    (tmp_path / "a.txt").write_text("one two three\n" * 20)
    settings = CorpusSettings(sources=(str(tmp_path / "a.txt"),), kind="byte")
    folder = prepare(settings, tmp_path / "corpus").folder
    (tmp_path / "elsewhere").mkdir()
    moved = tmp_path / "elsewhere" / "b.txt"
    moved.write_bytes((tmp_path / "a.txt").read_bytes())
    os.utime(moved, (1, 1))
    assert difference(folder, replace(settings, sources=(str(moved),))) is None
    moved.write_text("one two threE\n" * 20)
    assert difference(folder, replace(settings, sources=(str(moved),))) == f"other text than {moved} has now"
    assert difference(folder, replace(settings, seed=3)) == "seed = 0, not 3"
    assert difference(folder, replace(settings, sources=(str(moved), str(tmp_path / "a.txt")))) == (
        "other text: 1 files, not 2"
    )


TEXT = "\u8fd9\u662f\u4e00\u4e2a\u5173\u4e8e\u65f6\u949f\u7684\u6545\u4e8b\uff0c\u6307\u9488\u8f6c\u52a8\u3002\n" * 30


def test_a_text_in_five_encodings_gives_the_same_ids(tmp_path):
    """GB18030, Big5 and UTF-16 were trained on as U+FFFD."""
    ids = {}
    for encoding in ("utf-8", "gb18030", "utf-16", "utf-16-le", "utf-8-sig"):
        (tmp_path / f"{encoding}.txt").write_bytes(TEXT.encode(encoding))
        corpus = prepare(
            CorpusSettings(sources=(str(tmp_path / f"{encoding}.txt"),), kind="byte"), tmp_path / f"{encoding}-corpus"
        )
        train = corpus.split("train")
        ids[encoding] = train.read(0, train.n_tokens).tolist()
        assert ("read as GB18030" in " ".join(corpus.report.lines())) == (encoding == "gb18030")
    assert all(each == ids["utf-8"] for each in ids.values())
