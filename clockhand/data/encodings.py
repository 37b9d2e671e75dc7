"""How the characters of a text file are written: its mark, else UTF-8, else what charset-normalizer finds.

    FF FE ...            a mark: UTF-16 or UTF-32, in the order of bytes that it says
    UTF-8                also with a few broken bytes in it, which are counted and read as U+FFFD
    every other byte 0   UTF-16 without its mark, as some editors save it
    anything else        GB18030, Big5, Shift JIS, Latin-1, ... by the frequency of characters

A file that is none of these is no text.
"""

import codecs
import io
import unicodedata
from typing import BinaryIO

from clockhand.errors import ClockhandError

MARKS = {
    codecs.BOM_UTF8: "utf-8",
    codecs.BOM_UTF32_LE: "utf-32-le",  # before UTF-16's, with which it begins
    codecs.BOM_UTF32_BE: "utf-32-be",
    codecs.BOM_UTF16_LE: "utf-16-le",
    codecs.BOM_UTF16_BE: "utf-16-be",
}
SAMPLE_BYTES = 2**18
"""Of a file's beginning, looked at to find its encoding."""
DETECTED_BYTES = 2**15
"""Of the sample, what charset-normalizer reads: more takes long and finds nothing else."""
CONTROLS = 0.01
"""The largest share of control characters in a text."""
CANDIDATES = (
    *("gb18030", "big5", "shift_jis", "euc_jp", "euc_kr"),
    *("cp1252", "cp1250", "cp1251", "koi8_r", "cp1253", "cp1254", "cp1255", "cp1256"),
)


def known_encoding(name: str) -> str:
    """The encoding's own name. Raises `ClockhandError` for one that Python does not have, or that is not for text."""
    try:
        "a".encode(name)
        return codecs.lookup(name).name
    except (LookupError, UnicodeError):
        raise ClockhandError(
            f"--encoding {name} is no encoding of text that Python knows: gb18030, big5, utf-16, latin-1, ..."
        ) from None


def encoding_of(sample: bytes) -> str | None:
    """The encoding of a file that begins with `sample`, "utf-8" with a few broken bytes too; None: it is no text."""
    if not sample:
        return "utf-8"
    for mark, name in MARKS.items():
        if sample.startswith(mark):
            return name
    if sample.count(0) > len(sample) * CONTROLS:
        return _utf16_without_mark(sample)
    text = codecs.getincrementaldecoder("utf-8")("replace").decode(sample)
    broken = text.count("\ufffd") - sample.count("\ufffd".encode())
    written_in_many = sum(char > "\x7f" for char in text) - text.count("\ufffd")
    # Those in another encoding have hardly a character beyond ASCII that happens to be UTF-8.
    if broken == 0 or 4 * broken <= written_in_many or (broken <= 3 and 1000 * broken <= len(sample)):
        return "utf-8" if _controls(text) <= max(2, len(text) // 2) else None
    return _detected(sample[:DETECTED_BYTES])


def _detected(sample: bytes) -> str | None:
    from charset_normalizer import from_bytes

    sample = sample[: sample.rfind(b"\n") + 1] or sample  # no half character at the end
    # What is written in two bytes a character is not decoded by chance: those go first.
    for candidates in (CANDIDATES[:5], CANDIDATES[5:]):
        found = [
            each for each in from_bytes(sample, cp_isolation=list(candidates)) if _is_text(sample.decode(each.encoding))
        ]
        if found:
            return max(
                found,
                key=lambda each: (
                    *(_common(sample.decode(each.encoding)), -each.chaos, each.coherence),
                    -candidates.index(each.encoding),
                ),
            ).encoding
    return None


def _common(text: str) -> float:
    """The share of characters that the first levels of the national tables have: what another's bytes rarely hit."""
    beyond = [char for char in text if char > "\x7f"]
    return round(sum(_is_common(char) for char in beyond) / max(1, len(beyond)), 2)


def _is_common(char: str) -> bool:
    for table in ("gb2312", "big5", "shift_jis", "euc_kr"):
        try:
            lead = char.encode(table)[0]
        except UnicodeError:
            continue
        # The characters in daily use come first in each table.
        if lead <= {"gb2312": 0xD7, "big5": 0xC6, "shift_jis": 0x97, "euc_kr": 0xC8}[table]:
            return True
    return char.isalpha() and ord(char) < 0x600


def _utf16_without_mark(sample: bytes) -> str | None:
    """Of the two orders of bytes the one in which the text has more characters of ASCII, a line end or a space, say."""
    sample = sample[: len(sample) // 2 * 2]
    found = []
    for name in ("utf-16-le", "utf-16-be"):
        text = codecs.getincrementaldecoder(name)("replace").decode(sample)
        if _is_text(text):
            found.append((sum(char < "\x80" for char in text), name))
    return max(found)[1] if found else None


def _controls(text: str) -> int:
    return sum(char < " " and char not in "\t\n\r\f" for char in text)


def _is_text(text: str) -> bool:
    """Whether it has hardly any control characters, or characters that nobody has defined."""
    odd = sum(unicodedata.category(char) in ("Cc", "Cn", "Co", "Cs") and char not in "\t\n\r\f\x1a" for char in text)
    return odd <= max(2, len(text) * CONTROLS) and odd < len(text)


class AsUtf8(io.RawIOBase):
    """A stream in another encoding, read as the bytes it would have in UTF-8."""

    def __init__(self, stream: BinaryIO, encoding: str) -> None:
        self._stream, self._left = stream, b""
        self._decoder = codecs.getincrementaldecoder(encoding)("replace")
        self.broken = 0
        """Bytes so far that are no character, read as U+FFFD."""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "bytearray | memoryview") -> int:  # type: ignore[override]
        while not self._left:
            block = self._stream.read(2**16)
            text = self._decoder.decode(block, final=not block)
            self.broken += text.count("\ufffd")
            self._left = text.encode("utf-8", "replace")
            if not block:
                break
        count = min(len(buffer), len(self._left))
        buffer[:count] = self._left[:count]
        self._left = self._left[count:]
        return count

    def close(self) -> None:
        self._stream.close()
        super().close()
