"""Every claim is there, is measured on this project's own modules, and has a control that fails."""

import importlib
import re
from pathlib import Path

import pytest

from clockhand.lab.chapters import CHAPTERS, SECTIONS
from clockhand.lab.claim import COSTS, Claim, Expect, Measured, Text, Verdict, show
from clockhand.lab.experiment import Lab
from clockhand.lab.run import all_claims, run

CLAIMS = all_claims()
INSTANT = [claim for claim in CLAIMS.values() if claim.cost == "instant"]
ROOT = Path(__file__).resolve().parents[2]

every_claim = pytest.mark.parametrize("claim", CLAIMS.values(), ids=CLAIMS)


def test_all_49_claims_are_there():
    assert list(CLAIMS) == [f"A{n:02}" for n in range(1, 28)] + [f"B{n:02}" for n in range(1, 23)]


@pytest.mark.parametrize("claim", INSTANT, ids=[claim.id for claim in INSTANT])
def test_an_instant_claim_finds_what_a_correct_implementation_finds_and_its_control_fails(claim: Claim, tmp_path: Path):
    outcome = run(claim, Lab(tmp_path))
    assert outcome.found, {e.key: (outcome.values[e.key], e.truth) for e in claim.expects}
    assert outcome.control_failed, outcome.control
    assert outcome.verdict != Verdict.UNDECIDED
    for lang in ("en", "zh"):
        assert not re.search(r"{\w+}", claim.paragraph(outcome.verdict, outcome.values, lang))
    assert not list(tmp_path.iterdir()), "an instant claim leaves nothing behind"


EXPECTED = {
    Verdict.REFUTED: {"A13", "A22", "B06", "B14"},
    Verdict.EXPLAINED: {"B01", "B13"},
    Verdict.CONDITION: {"A03", "A06", "A10", "A17", "B03"},
}


def test_the_instant_verdicts_are_those_the_chapters_deserve(tmp_path: Path):
    cheap = [claim for claim in INSTANT if claim.id in set().union(*EXPECTED.values()) - {"A17", "B14"}]
    for claim in cheap:
        verdict = run(claim, Lab(tmp_path)).verdict
        assert claim.id in EXPECTED[verdict]


@every_claim
def test_a_pointer_leads_to_code(claim: Claim):
    path, _, name = claim.read.partition(":")
    assert (ROOT / path).is_file()
    found = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    for part in name.split("."):
        found = getattr(found, part)


def test_the_pointers_of_the_sections_lead_to_files():
    for sections in SECTIONS.values():
        for section in sections:
            path, _, name = section.read.partition(":")
            assert (ROOT / path).exists()
            if name:
                assert hasattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)


@every_claim
def test_a_claim_speaks_both_languages_and_gives_its_reasons(claim: Claim):
    whys = [claim.why] if isinstance(claim.why, Text) else list(claim.why.values())
    texts = [claim.sentence, claim.measures, claim.control, *whys, *(expect.name for expect in claim.expects)]
    for text in [*texts[:3], *whys]:
        assert text.en
        assert re.search(r"[\u4e00-\u9fff]", text.zh), text
    assert claim.cost in COSTS
    assert any(expect.truth is not None for expect in claim.expects)
    keys = {expect.key for expect in claim.expects}
    for text in whys:
        assert set(re.findall(r"(?<!{){(\w[\w-]*)}(?!})", text.en + text.zh)) <= keys
    for expect in claim.expects:
        assert expect.tolerance == 0 or expect.because.en != "exact", f"{expect.key} has a tolerance without a reason"
    if claim.cost == "training":
        assert len(claim.seeds) >= 2, "one run says nothing about noise"


@every_claim
def test_a_claim_has_its_place_in_a_chapter(claim: Claim):
    assert claim.chapter in CHAPTERS
    assert claim.section in {section.number for section in SECTIONS[claim.chapter]}


@pytest.mark.parametrize(("letter", "name"), [("A", "a-mini-llama.txt"), ("B", "b-minimind-3.txt")])
def test_every_section_of_a_chapter_is_in_the_report(letter: str, name: str, shared_data: Path):
    chapter = shared_data.parent / "chapters" / name
    if not chapter.exists():
        pytest.skip("needs the chapters in ../shared/chapters")
    numbers = re.findall(r"^([23]\.\d+(?:\.\d+)?) \S", chapter.read_text(encoding="utf-8"), flags=re.MULTILINE)
    ours = [section.number for section in SECTIONS[letter]]
    assert len(numbers) > 20
    assert [number for number in numbers if number not in ours] == []
    assert [number for number in ours if number[0].isdigit() and number not in numbers] == []


# ── judging ────────────────────────────────────────────────────────────────────────────────────────────────────────


def claim_of(*expects: Expect, if_false: Verdict = Verdict.REFUTED) -> Claim:
    words = Text("words", "文字")
    return Claim(
        id="A01",
        section="2.2",
        sentence=words,
        measures=words,
        formula="",
        expects=expects,
        control=words,
        why=words,
        read="clockhand/count.py:modules",
        measure=lambda lab, seeds: Measured({}),
        if_false=if_false,
    )


NAME = Text("x", "x")


def test_the_verdict_follows_from_what_was_measured():
    claim = claim_of(Expect("x", NAME, truth=47.0, tolerance=0.5, chapter=50.0, chapter_tolerance=0.5))
    assert claim.judge(Measured({"x": 47.2})) == Verdict.REFUTED
    assert claim.judge(Measured({"x": 50.1})) == Verdict.HOLDS
    assert claim.judge(Measured({"x": 60.0})) == Verdict.UNDECIDED, "neither the chapter's value nor ours"
    explained = claim_of(*claim.expects, if_false=Verdict.EXPLAINED)
    assert explained.judge(Measured({"x": 47.0})) == Verdict.EXPLAINED
    assert claim.judge(Measured({"x": 47.0}, verdict=Verdict.HOLDS)) == Verdict.HOLDS, "statistics speak for themselves"


def test_a_control_that_passes_is_noticed():
    claim = claim_of(Expect("x", NAME, truth=1.0, tolerance=0.1), Expect("y", NAME, truth=2.0))
    assert claim.control_failed(Measured({}, control={"x": 3.0}))
    assert not claim.control_failed(Measured({}, control={"x": 3.0, "y": 2.0})), "every value of a control must miss"
    assert not claim.control_failed(Measured({}, control={})), "no control is no control"


def test_bounds_and_words_are_compared_as_such():
    assert Expect("x", NAME, 0.0, tolerance=1e-6, relation="<=").found(5e-7)
    assert not Expect("x", NAME, 0.0, tolerance=1e-6, relation="<=").found(5e-6)
    assert Expect("x", NAME, 0.05, relation=">=").found(0.3)
    assert Expect("x", NAME, "0 0 1 1").found("0 0 1 1")
    assert not Expect("x", NAME, "0 0 1 1").found("0 1 0 1")
    assert not Expect("x", NAME, 1.0, tolerance=0.1).found(float("nan"))


def test_numbers_are_shown_for_people():
    assert show(35926528) == "35,926,528"
    assert show(True, "zh") == "是"
    assert show(0.0695815123) == "0.0695815"
    assert show(1.33352143e-4) == "1.33352e-04"
    assert show(5.329070518200751e-15) == "5.3e-15"
    assert show(float("inf")) == "inf"
