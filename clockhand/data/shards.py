"""A corpus on disk: documents as one long row of token ids, cut into plain files, with an index that vouches for them.

    corpus/
      index.json             settings, counts, the reading report, size and SHA-256 of every other file
      train-00000.bin ...    token ids, little-endian uint16 (uint32 above 65,536 ids), documents end to end
      train-documents.bin    int64: where each document starts in that row, and last where the row ends
      val-00000.bin ...      the same for the held-out documents
      tokenizer.json ...     the tokenizer that made them

A document is bos + text + eos. Held out is by document, chosen by a hash of its text, so that the choice depends
neither on the order of the sources nor on what else they hold, and a document given twice cannot be on both sides.

Files are memory-mapped: opening costs no memory. `prepare` reads the sources twice, first to learn their size, the
vocabulary and what to hold out, then to write. Batches are made in `loader.py`.
"""

import dataclasses
import hashlib
import json
import os
from array import array
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from clockhand.config import require
from clockhand.data.corpora import Oddity, Report, Stamp, read_documents, stamps_of
from clockhand.data.encodings import known_encoding
from clockhand.data.tokenizer import Tokenizer
from clockhand.disk import new_folder
from clockhand.errors import ClockhandError, unknown_name

FORMAT, VERSION = "clockhand corpus", 2
SPLITS = ("train", "val")
BATCH_BYTES = 2 * 2**20  # text tokenized at once: work for all cores, and the library takes 200 bytes a token

Progress = Callable[[str, int, int], None]
"""Called with what is being done ("read" or "tokenize"), bytes done, and bytes in all (0 while nobody knows)."""


@dataclass(frozen=True, kw_only=True)
class CorpusSettings:
    """Everything that decides what a corpus holds."""

    sources: tuple[str, ...]
    """Files, folders and builtin:NAME."""
    text_field: str = "text"
    """The field or column that has the text, in jsonl, csv and parquet."""
    encoding: str | None = None
    """How the characters of the files are written. None finds it out, for each file."""
    tokenizer: str = ""
    """Folder or tokenizer.json of the tokenizer to use. Empty trains one on the text."""
    kind: str = "bpe"
    """bpe | char | byte: what to train."""
    vocab_size: int | None = None
    """Ids of a trained tokenizer, special tokens and bytes included. None is 4096 for bpe and all for char."""
    val_fraction: float = 0.05
    """Share of the text that is held out for validation."""
    seed: int = 0
    """Which documents are held out."""
    shard_tokens: int = 2**27
    """Longest shard file, in tokens."""

    def __post_init__(self) -> None:
        require(self, "val_fraction", 0 < self.val_fraction <= 0.5, "above 0 and at most 0.5")
        if self.encoding is not None:
            known_encoding(self.encoding)
        require(self, "shard_tokens", self.shard_tokens >= 1, "at least 1")
        require(self, "seed", 0 <= self.seed < 2**63, "0 or more and below 2**63")
        if self.tokenizer:
            unread = "left out where a tokenizer is given"
            require(self, "kind", self.kind == "bpe", unread)
            require(self, "vocab_size", self.vocab_size is None, unread)


def prepare(settings: CorpusSettings, out: str | Path, progress: Progress | None = None) -> "Corpus":
    """Reads, tokenizes and writes the corpus, and opens it. A corpus that was at `out` is replaced at the very end.

    Raises `ClockhandError` for sources that hold no text, for an `out` that is something else than a corpus, and when
    the disk is full. Nothing half made is left behind.
    """
    out = Path(out).absolute()
    empty = out.is_dir() and not any(out.iterdir())
    if out.exists() and not empty and not is_corpus(out):
        raise ClockhandError(f"'{out}' exists and is no corpus: give another folder")
    progress = progress or (lambda phase, done, total: None)
    with new_folder(out) as building:
        _build(settings, building, progress)
    return Corpus.open(out)


def difference(folder: str | Path, settings: CorpusSettings) -> str | None:
    """Why `folder` is not the corpus that `prepare` with these settings would make, in some words; None: it is.

    Text counts as the same when the bytes of its files are, wherever they lie.
    """
    try:
        index = Corpus.open(folder).index
    except ClockhandError:
        return "no whole corpus"
    if settings.tokenizer and Tokenizer.load(settings.tokenizer).fingerprint != index["tokenizer"]["fingerprint"]:
        return f"another tokenizer than {settings.tokenizer}"
    made, wanted = index["settings"], _as_json(settings)
    for name in sorted(made.keys() | wanted.keys()):
        if made.get(name) != wanted.get(name):
            return f"{name} = {made.get(name)}, not {wanted.get(name)}"
    known = [Stamp(**each) for each in index.get("sources", [])]
    files = stamps_of(settings.sources, known)
    if index["version"] == 1:  # knew places and times only
        places = json.dumps([[each.path, each.format, each.bytes, each.changed] for each in files])
        same = index["sources_fingerprint"] == hashlib.sha256(places.encode()).hexdigest()
        return None if same else "text at another place, or of another time"
    if len(files) != len(known):
        return f"other text: {len(known):,} files, not {len(files):,}"
    for then, now in zip(known, files):
        if (then.sha256, then.format) != (now.sha256, now.format):
            return f"other text than {now.path} has now"
    return None


def verify(folder: str | Path) -> list[str]:
    """Reads everything again and returns the names of the files, all of them whole.

    Raises `ClockhandError` naming each file that is not what was written.
    """
    corpus = Corpus.open(folder)
    files = corpus.index["files"]
    damaged = [name for name in files if _sha256(corpus.folder / name) != files[name]["sha256"]]
    if damaged:
        raise ClockhandError(f"corpus '{folder}' is damaged: {', '.join(damaged)} is not what was written")
    return [*files, "index.json"]


def show(folder: str | Path) -> dict[str, Any]:
    """What a person wants to know of a corpus: the index without hashes, and how much text a token stands for."""
    index = Corpus.open(folder).index
    kept = ("settings", "tokenizer", "dtype", "splits", "held_out", "report")
    per_token = {name: split["text_bytes"] / split["tokens"] for name, split in index["splits"].items()}
    return {**{key: index[key] for key in kept}, "bytes_per_token": per_token}


class Corpus:
    """A folder made by `prepare`. `index` is the content of its index.json."""

    def __init__(self, folder: Path, index: dict[str, Any]) -> None:
        self.folder, self.index = folder, index

    @classmethod
    def open(cls, folder: str | Path) -> "Corpus":
        """Reads the index and checks that every file has its size. Raises `ClockhandError` if it is no whole corpus."""
        folder = Path(folder)
        if not is_corpus(folder):
            raise ClockhandError(f"'{folder}' is no corpus: it has no index.json made by 'clockhand data prepare'")
        try:
            index = json.loads((folder / "index.json").read_text("utf-8"))
            whole = index["seal"] == _seal(index)
        except (ValueError, LookupError, TypeError, RecursionError):
            whole = False
        if not whole:
            raise ClockhandError(f"{folder / 'index.json'} is damaged: it is not what was written")
        if index["version"] not in (1, VERSION):
            raise ClockhandError(f"corpus '{folder}' has version {index['version']}; this program reads {VERSION}")
        for name, file in index["files"].items():
            path = folder / name
            found = path.stat().st_size if path.is_file() else 0
            if found != file["bytes"]:
                what = "truncated" if found < file["bytes"] else "too long"
                raise ClockhandError(f"{path} is {what}: it has {found:,} bytes, its index says {file['bytes']:,}")
        return cls(folder, index)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.load(self.folder)

    @property
    def report(self) -> Report:
        """What was found when the sources were read."""
        kept = self.index["report"]
        oddities = {kind: Oddity(**oddity) for kind, oddity in kept["oddities"].items()}
        return Report(**{**kept, "oddities": oddities})

    def split(self, name: str) -> "Split":
        """The part called "train" or "val"."""
        if name not in SPLITS:
            raise unknown_name("split", name, SPLITS)
        return Split(self.folder, self.index["splits"][name], np.dtype(self.index["dtype"]))


class Split:
    """The tokens of one split as one row, whichever shards they lie in."""

    def __init__(self, folder: Path, about: dict[str, Any], dtype: np.dtype) -> None:
        self.n_tokens: int = about["tokens"]
        self.n_documents: int = about["documents"]
        self.text_bytes: int = about["text_bytes"]
        self._shards = [np.memmap(folder / shard["name"], dtype, "r") for shard in about["shards"]]
        # Where each shard starts in the row, and last where the row ends.
        self._starts = np.cumsum([0, *(shard["tokens"] for shard in about["shards"])])
        self._documents = np.memmap(folder / about["boundaries"], "<i8", "r")

    def read(self, start: int, stop: int) -> np.ndarray:
        """(stop - start,) the tokens from offset `start` up to `stop`, as they are stored."""
        if not 0 <= start <= stop <= self.n_tokens:
            raise IndexError(f"tokens {start} to {stop} of a split that has {self.n_tokens}")
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        pieces = []
        for shard, begin in zip(self._shards[first:], self._starts[first:].tolist()):
            if begin >= stop:
                break
            pieces.append(shard[max(start - begin, 0) : stop - begin])
        return np.concatenate(pieces) if pieces else np.empty(0, np.int64)

    def document_of(self, offsets: np.ndarray) -> np.ndarray:
        """The number of the document that each token offset lies in, same shape."""
        return np.searchsorted(self._documents, offsets, side="right") - 1

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document, bos and eos included."""
        return self.read(int(self._documents[number]), int(self._documents[number + 1]))


# Building


def _build(settings: CorpusSettings, folder: Path, progress: Progress) -> None:
    """Writes the whole corpus into the empty `folder`."""
    stamps = stamps_of(settings.sources)
    hashes, sizes = array("Q"), array("Q")
    texts = _survey(settings, hashes, sizes, progress)
    if settings.tokenizer:
        tokenizer = Tokenizer.load(settings.tokenizer)
        if tokenizer.eos_id is None:
            raise ClockhandError(f"tokenizer '{settings.tokenizer}' has no eos token to end documents with")
    else:
        tokenizer = Tokenizer.train(texts, settings.kind, settings.vocab_size)
    for _ in texts:  # what the training, if any, did not need to read
        pass
    held_out = _hold_out(np.array(hashes), np.array(sizes), settings.val_fraction)

    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    writers = {name: _SplitWriter(folder, name, dtype, settings.shard_tokens) for name in SPLITS}
    report, done, total = Report(), 0, sum(sizes)
    documents = read_documents(settings.sources, settings.text_field, report, settings.encoding)
    parts = (part for text in documents for part in held_out.divide(text, settings.seed))
    for batch in _batches(parts):
        encoded = tokenizer.encode_batch([text for _, text in batch], bos=True, eos=True)
        for name, writer in writers.items():
            ids = [each for each, (split, _) in zip(encoded, batch) if split == name]
            writer.write(ids, sum(len(text.encode()) for split, text in batch if split == name))
        done = sum(writer.text_bytes for writer in writers.values())
        progress("tokenize", done, total)
    if done != total:
        raise ClockhandError(f"the sources changed while they were read ({total:,} bytes of text, then {done:,})")

    tokenizer.save(folder)
    index: dict[str, Any] = {
        "format": FORMAT,
        "version": VERSION,
        "settings": _as_json(settings),
        "sources": [dataclasses.asdict(each) for each in stamps],
        "tokenizer": {
            "kind": tokenizer.kind,
            "vocab_size": tokenizer.vocab_size,
            "fingerprint": tokenizer.fingerprint,
        },
        "dtype": dtype.str,
        "splits": {name: writer.about() for name, writer in writers.items()},
        "held_out": held_out.description,
        "report": dataclasses.asdict(report),
        "files": {path.name: _stamp(path) for path in sorted(folder.iterdir())},
    }
    index["seal"] = _seal(index)
    with open(folder / "index.json", "w", encoding="utf-8") as file:
        json.dump(index, file, indent=2, ensure_ascii=False)
        file.flush()
        os.fsync(file.fileno())


def _survey(settings: CorpusSettings, hashes: array, sizes: array, progress: Progress) -> Iterator[str]:
    """Passes the documents on, and leaves hash and size of each in the two arrays."""
    done = 0
    report = Report()
    for text in read_documents(settings.sources, settings.text_field, report, settings.encoding):
        hashes.append(_text_hash(text, settings.seed))
        sizes.append(len(text.encode()))
        if (report.text_bytes - done) >= BATCH_BYTES:
            done = report.text_bytes
            progress("read", done, 0)
        yield text
    if not hashes:
        found = "; ".join(report.lines()) or "the files are empty"
        raise ClockhandError(f"no text in {', '.join(settings.sources)}: {found}")


def _text_hash(text: str, seed: int) -> int:
    """64 bits that depend on nothing but the text and the seed."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8, salt=(seed % 2**64).to_bytes(8)).digest())


@dataclass(frozen=True)
class _HeldOut:
    """Which text is validation: whole documents, or else the last part of one."""

    documents: frozenset[int]
    divided: int | None
    share: float
    description: str

    def divide(self, text: str, seed: int) -> Iterator[tuple[str, str]]:
        """The document as (split, text): one such part, or two when it is the one that is divided."""
        hash = _text_hash(text, seed)
        if hash == self.divided:
            cut = _line_end_near(text, 1 - self.share)
            yield "train", text[:cut]
            yield "val", text[cut:]
        else:
            yield ("val" if hash in self.documents else "train"), text


def _hold_out(hashes: np.ndarray, sizes: np.ndarray, fraction: float) -> _HeldOut:
    """Documents in the order of their hashes, as long as they fit into `fraction` of the text.

    Where hardly any fits, since there is one document or a few large ones, the tail of the longest is held out instead.
    """
    distinct, which = np.unique(hashes, return_inverse=True)  # sorted, which is as good as shuffled
    distinct_sizes = np.bincount(which, weights=sizes)  # copies of one text go together
    target = fraction * float(sizes.sum())
    room, chosen = target, []
    for hash, size in zip(distinct.tolist(), distinct_sizes.tolist()):
        if size <= room:
            chosen.append(hash)
            room -= size
        elif room < target / 2:
            break
    if room < target / 2:
        return _HeldOut(frozenset(chosen), None, 0.0, f"{len(chosen):,} whole documents, chosen by hash")
    longest = int(which[sizes.argmax()])
    share = min(0.5, target / float(distinct_sizes[longest]))
    description = f"the last {share:.1%} of the longest document: too few documents to hold out whole ones"
    return _HeldOut(frozenset(), int(distinct[longest]), share, description)


def _line_end_near(text: str, share: float) -> int:
    """Where to cut off about the last 1 - `share` of `text`: at a line end in its second half if there is one."""
    if len(text) < 2:
        raise ClockhandError("the longest document has 1 character: too little to hold any out for validation")
    aim = min(max(round(share * len(text)), 1), len(text) - 1)
    ends = (text.rfind("\n", 0, aim) + 1, text.find("\n", aim) + 1)
    return min((end for end in ends if len(text) / 2 <= end < len(text)), key=lambda end: abs(end - aim), default=aim)


def _batches(parts: Iterable[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    batch, size = [], 0
    for part in parts:
        batch.append(part)
        size += len(part[1])
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _SplitWriter:
    """Appends documents to the shards of one split, and the offset where each ends to its boundaries."""

    def __init__(self, folder: Path, name: str, dtype: np.dtype, shard_tokens: int) -> None:
        self.folder, self.name, self.dtype, self.shard_tokens = folder, name, dtype, shard_tokens
        self.boundaries = f"{name}-documents.bin"
        self.shards: list[dict[str, Any]] = []
        self.tokens = self.documents = self.text_bytes = 0
        _append(folder / self.boundaries, np.zeros(1, "<i8"))

    def write(self, documents: list[list[int]], text_bytes: int) -> None:
        if not documents:
            return
        ends = self.tokens + np.cumsum([len(ids) for ids in documents])
        _append(self.folder / self.boundaries, ends.astype("<i8"))
        rest = np.concatenate([np.array(ids, self.dtype) for ids in documents])
        self.tokens += len(rest)
        self.documents += len(documents)
        self.text_bytes += text_bytes
        while len(rest):
            if not self.shards or self.shards[-1]["tokens"] == self.shard_tokens:
                self.shards.append({"name": f"{self.name}-{len(self.shards):05d}.bin", "tokens": 0})
            shard = self.shards[-1]
            fitting, rest = np.split(rest, [self.shard_tokens - shard["tokens"]])
            _append(self.folder / shard["name"], fitting)
            shard["tokens"] += len(fitting)

    def about(self) -> dict[str, Any]:
        """What the index says of this split."""
        return {
            "documents": self.documents,
            "tokens": self.tokens,
            "text_bytes": self.text_bytes,
            "boundaries": self.boundaries,
            "shards": self.shards,
        }


# Files


def _append(path: Path, values: np.ndarray) -> None:
    with open(path, "ab") as file:
        file.write(values.tobytes())


def _stamp(path: Path) -> dict[str, Any]:
    """Size and hash of a finished file, once it is safely on the disk."""
    with open(path, "r+b") as file:
        os.fsync(file.fileno())
    return {"bytes": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_json(settings: CorpusSettings) -> dict[str, Any]:
    """The settings that a corpus must share to be the same. Sources and tokenizer have fingerprints of their own."""
    values = dataclasses.asdict(settings)
    del values["sources"], values["tokenizer"]
    return values


def _seal(index: dict[str, Any]) -> str:
    """SHA-256 of everything else in the index."""
    rest = {key: value for key, value in index.items() if key != "seal"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def is_corpus(folder: str | Path) -> bool:
    """Whether it was once written as a corpus, whole or not."""
    file = Path(folder) / "index.json"
    if folder == "":  # which Path takes for the current folder
        return False
    return file.is_file() and FORMAT.encode() in file.read_bytes()
