"""A claim is a value: a sentence of a chapter, how it is measured, what should be found, and what must go wrong.

    expect      one number: what a correct implementation finds, what the chapter says, how close is close and why
    measure     a function that finds the numbers on the project's own modules
    control     the same check on something deliberately wrong; if that passed too, the check would prove nothing

The verdict is not written down anywhere: it follows from comparing what was measured with what the chapter says. Where
that takes statistics, `measure` brings the verdict along.

This file knows no torch and no particular claim.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from clockhand.lab.experiment import Lab

Value = bool | int | float | str
LANGUAGES = ("en", "zh")


class Text(NamedTuple):
    """A sentence in both languages of the course."""

    en: str
    zh: str

    def to(self, lang: str) -> str:
        return self.zh if lang == "zh" else self.en


class Verdict(StrEnum):
    HOLDS = "holds"
    CONDITION = "holds with a condition"
    REFUTED = "refuted"
    EXPLAINED = "explained"
    UNDECIDED = "undecided"


VERDICT_NAMES: dict[Verdict, Text] = {
    Verdict.HOLDS: Text("holds", "成立"),
    Verdict.CONDITION: Text("holds with a condition", "有条件成立"),
    Verdict.REFUTED: Text("refuted", "不成立"),
    Verdict.EXPLAINED: Text("explained", "已查明原因"),
    Verdict.UNDECIDED: Text("undecided", "尚无定论"),
}

COSTS: dict[str, Text] = {
    "instant": Text("instant", "即时"),
    "minutes": Text("minutes", "数分钟"),
    "training": Text("training", "需训练"),
}

# Sources and reasons that many claims share.
BY_DEFINITION = Text("the definition", "定义")
ARITHMETIC = Text("arithmetic on the sizes", "由各尺寸直接算出")
FLOAT64 = Text("computed independently in float64", "用 float64 独立算出")
EXACT = Text("exact", "精确相等")
ROUNDING = Text("rounding of the arithmetic", "浮点舍入误差")
SIX_DIGITS = Text("the value is given to about six digits", "给出的数值约有六位有效数字")


@dataclass(frozen=True)
class Expect:
    """One number of a claim."""

    key: str
    name: Text
    truth: Value | None
    """What a correct implementation finds. None: only reported, because no value was known beforehand."""
    source: Text = BY_DEFINITION
    """Where `truth` comes from."""
    tolerance: float = 0.0
    """Largest absolute distance that still counts as equal."""
    because: Text = EXACT
    """The reason for the tolerance."""
    relation: str = "="
    """= | <= | >=: how the measured value must stand to `truth`."""
    chapter: Value | None = None
    """What the chapter says, where that is not `truth` itself."""
    chapter_tolerance: float = 0.0
    """How far off the chapter's rounded number may be before it counts as wrong."""
    chapter_relation: str = "="

    def found(self, measured: Value) -> bool:
        """Whether the measured value is what a correct implementation finds."""
        return self.truth is None or _stands(measured, self.truth, self.tolerance, self.relation)

    def wanted(self, lang: str = "en") -> str:
        """What is to be found, for people: `35,926,528`, `≤ 1e-12`, or nothing where it is only reported."""
        if self.truth is None:
            return ""
        if self.relation == "=":
            return show(self.truth, lang)
        assert isinstance(self.truth, int | float)
        below = self.relation == "<="
        return ("≤ " if below else "≥ ") + f"{self.truth + self.tolerance if below else self.truth - self.tolerance:g}"

    def as_chapter_says(self, measured: Value) -> bool:
        if self.chapter is None:
            return self.found(measured)
        return _stands(measured, self.chapter, self.chapter_tolerance, self.chapter_relation)


def _stands(measured: Value, wanted: Value, tolerance: float, relation: str) -> bool:
    if isinstance(measured, str) or isinstance(wanted, str):
        return measured == wanted
    if relation == "<=":
        return measured <= wanted + tolerance
    if relation == ">=":
        return measured >= wanted - tolerance
    return measured == wanted or abs(measured - wanted) <= tolerance


@dataclass(frozen=True)
class Measured:
    """What a claim's `measure` brings back."""

    values: Mapping[str, Value]
    """By the keys of the claim's expects."""
    control: Mapping[str, Value] = field(default_factory=dict)
    """Some of the same keys, measured where things were made wrong on purpose."""
    shapes: Mapping[str, str] = field(default_factory=dict)
    """Tensors met on the way, for the reader: name -> shape."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """Curves and tables for the figures, as plain JSON values."""
    verdict: Verdict | None = None
    """Where judging takes statistics, the judgement; else it follows from the values."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """One statement of a chapter and how to try it."""

    id: str
    """A01 ... A27 of the chapter on Mini-LLaMA, B01 ... B22 of the chapter on MiniMind-3."""
    section: str
    """Where the chapter says it: `2.3.3`."""
    sentence: Text
    """What the chapter says, in our words."""
    measures: Text
    """What we measure."""
    formula: str
    """The formula behind it, as plain text."""
    expects: tuple[Expect, ...]
    """The first is the headline of the table."""
    control: Text
    """What is made wrong on purpose, and must be noticed."""
    why: Text | Mapping[Verdict, Text]
    """One paragraph on the verdict, with {key} for live numbers; by verdict where several are possible."""
    read: str
    """The place in the code: `clockhand/model/rope.py:rotate`."""
    measure: Callable[["Lab", tuple[int, ...]], Measured]
    """Called with the laboratory and the seeds."""
    seeds: tuple[int, ...] = ()
    cost: str = "instant"
    if_true: Verdict = Verdict.HOLDS
    """The verdict when everything measured is as the chapter says."""
    if_false: Verdict = Verdict.REFUTED
    """The verdict when something is not, but is what we expected instead."""

    @property
    def chapter(self) -> str:
        return self.id[0]

    def judge(self, measured: Measured) -> Verdict:
        if measured.verdict is not None:
            return measured.verdict
        agrees = all(expect.as_chapter_says(measured.values[expect.key]) for expect in self.expects)
        if agrees:
            return self.if_true
        return self.if_false if self.found(measured) else Verdict.UNDECIDED

    def found(self, measured: Measured) -> bool:
        """Whether every measured value is what a correct implementation finds."""
        return all(expect.found(measured.values[expect.key]) for expect in self.expects)

    def control_failed(self, measured: Measured) -> bool:
        """Whether the check noticed the control: each of its values must miss."""
        by_key = {expect.key: expect for expect in self.expects}
        return bool(measured.control) and not any(by_key[key].found(value) for key, value in measured.control.items())

    def paragraph(self, verdict: Verdict, values: Mapping[str, Value], lang: str) -> str:
        text = self.why if isinstance(self.why, Text) else self.why.get(verdict, _NO_PARAGRAPH)
        return text.to(lang).format_map({key: show(value, lang) for key, value in values.items()})


_NO_PARAGRAPH = Text(
    "The numbers above are neither what the chapter says nor what we expected; read them before believing either.",
    "以上数值既不同于章节所述，也不同于我们的预期；在相信任何一方之前，请先细看这些数字。",
)


def show(value: Value | None, lang: str = "en") -> str:
    """A number for people: 35,926,528 and 0.0695815 and 1.33352e-04 and yes; of mere rounding two digits are enough."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return Text("yes", "是").to(lang) if value else Text("no", "否").to(lang)
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        if 1000 <= abs(value) < 1e15 and value == int(value):
            return f"{int(value):,}"
        if 0 < abs(value) < 1e-8:
            return f"{value:.1e}"
        return f"{value:.6g}" if value == 0 or 1e-3 <= abs(value) < 1e7 else f"{value:.5e}"
    return value
