"""The two READMEs and the folder they describe say the same."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ENGLISH, CHINESE = ((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "README.zh-CN.md"))


def code(text: str) -> list[tuple[str, str]]:
    """Its blocks of code: the language and the lines, without what is said after a #."""
    blocks = re.findall(r"^```(\w+)\n(.*?)^```", text, re.S | re.M)
    return [(language, re.sub(r"[ ]*#.*", "", body)) for language, body in blocks]


def numbers(text: str) -> list[str]:
    """In their order, without the comma that ends a sentence or a part of it."""
    return [each.rstrip(".,") for each in re.findall(r"\d[\d.,]*", text)]


def sections(text: str) -> list[str]:
    return re.split(r"^## ", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M), flags=re.M)


def on_the_map(text: str) -> list[str]:
    """The modules that the map names: `model/rope`."""
    block = re.search(r"^```\nclockhand/\n(.*?)^```", text, re.S | re.M)
    assert block is not None
    names, folder = [], ""
    for line in block[1].splitlines():
        if line.startswith("    "):
            names += [folder + name for name in re.split(r"\s{2,}", line.strip())[0].split()]
        elif line.endswith("/"):
            folder = line.strip()
        else:
            names += re.split(r"\s{2,}", line.strip())[0].split()
    return names


@pytest.mark.parametrize("text", [ENGLISH, CHINESE], ids=["README.md", "README.zh-CN.md"])
def test_the_map_names_every_module_once_and_none_that_is_not_there(text):
    package = ROOT / "clockhand"
    modules = [file.relative_to(package).with_suffix("") for file in package.rglob("*.py") if file.stem != "__init__"]
    assert sorted(on_the_map(text)) == sorted(map(str, modules))


def test_both_languages_have_the_same_commands_and_the_same_python():
    assert code(CHINESE) == code(ENGLISH)
    assert len(code(ENGLISH)) > 10


def test_both_languages_have_the_same_numbers_in_every_row_of_their_tables():
    rows = [[numbers(line) for line in text.splitlines() if line.startswith("|")] for text in (ENGLISH, CHINESE)]
    assert rows[0] == rows[1]
    assert sum(map(len, rows[0])) > 60


def test_both_languages_have_the_same_sections_with_the_same_numbers_in_them():
    ours, theirs = sections(ENGLISH), sections(CHINESE)
    assert len(ours) == len(theirs) > 5
    for one, other in zip(ours, theirs):
        assert Counter(numbers(one)) == Counter(numbers(other)), other.splitlines()[0]
