"""Running claims: which ones, in which order, what is kept, and how long it will take.

Every outcome is kept as JSON under `runs/lab/outcomes`. A claim that takes training is not run again while its outcome
and its code stand; one that was interrupted goes on where its trainings were, because those are runs of their own.
Instant claims are always run.
"""

import dataclasses
import hashlib
import json
import platform
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from clockhand.disk import write_text
from clockhand.errors import unknown_name
from clockhand.lab import attention, counting, exercises, experiment, mlp, moe, norm, position, training
from clockhand.lab.claim import Claim, Measured, Value, Verdict
from clockhand.lab.experiment import Lab

LAB_FOLDER = Path("runs/lab")
SUBJECTS = (norm, position, attention, mlp, moe, counting, training, exercises)

COST_ORDER = ("instant", "minutes", "training")

# Seconds on two cores; only the forecast uses them. Claims that share trainings pay for them in this order.
FORECAST = {
    "A05": 465, "A11": 50, "A14": 190, "A23": 40, "A27": 320, "B07": 1, "B08": 240, "B12": 310, "B16": 10, "B20": 200,
    "B21": 1, "B22": 130,
}  # fmt: skip


@dataclass(frozen=True)
class Outcome:
    """What running one claim brought."""

    id: str
    verdict: Verdict
    found: bool
    """Whether every value is what a correct implementation finds."""
    control_failed: bool
    """Whether the check noticed what was made wrong on purpose."""
    values: dict[str, Value]
    control: dict[str, Value]
    shapes: dict[str, str]
    data: dict[str, Any]
    seeds: list[int]
    scale: float
    seconds: float
    machine: str
    code: str
    """Fingerprint of the code that measured it."""

    @property
    def could_be_tried(self) -> bool:
        """False where that takes a program which is not installed: then the control was not tried either."""
        return bool(self.control)


@cache
def all_claims() -> dict[str, Claim]:
    """Every claim by its id, A01 to B22."""
    claims = [claim for subject in SUBJECTS for claim in subject.CLAIMS]
    return {claim.id: claim for claim in sorted(claims, key=lambda claim: claim.id)}


def choose(ids: Iterable[str], everything: bool = False) -> list[Claim]:
    """The named claims; without names the instant ones, or all. Raises `ClockhandError` for an id nobody knows."""
    claims, ids = all_claims(), [each.upper() for each in ids]
    for each in ids:
        if each not in claims:
            raise unknown_name("claim", each, claims)
    if ids:
        return [claims[each] for each in ids]
    return [claim for claim in claims.values() if everything or claim.cost == "instant"]


def run(claim: Claim, lab: Lab) -> Outcome:
    """Measures the claim now."""
    seeds = claim.seeds if lab.scale == 1 or claim.cost == "instant" else claim.seeds[:2]
    started = time.perf_counter()
    measured = claim.measure(lab, seeds)
    return _outcome(claim, measured, seeds, lab, time.perf_counter() - started)


def _outcome(claim: Claim, measured: Measured, seeds: tuple[int, ...], lab: Lab, seconds: float) -> Outcome:
    return Outcome(
        id=claim.id,
        verdict=claim.judge(measured),
        found=claim.found(measured),
        control_failed=claim.control_failed(measured),
        values=dict(measured.values),
        control=dict(measured.control),
        shapes=dict(measured.shapes),
        data=dict(measured.data),
        seeds=list(seeds),
        scale=lab.scale,
        seconds=seconds,
        machine=machine(),
        code=code_of(claim),
    )


def code_of(claim: Claim) -> str:
    """Changes when the file with the claim's measurement does, or the way the lab trains."""
    files = [sys.modules[claim.measure.__module__].__file__, experiment.__file__]
    return hashlib.sha256(b"".join(Path(str(file)).read_bytes() for file in files)).hexdigest()[:16]


def machine() -> str:
    return f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"


def run_all(
    claims: list[Claim],
    lab: Lab,
    fresh: bool = False,
    before: Callable[[Claim, float], None] = lambda claim, left: None,
    after: Callable[[Outcome], None] = lambda outcome: None,
) -> list[Outcome]:
    """Runs the claims, cheap ones first, and keeps the outcomes; returned in the order of `claims`.

    What was trained before is taken from the outcomes kept, unless `fresh`. `before` is told the claim and the forecast
    of the seconds still to go, `after` the outcome.
    """
    outcomes: dict[str, Outcome] = {}
    order = sorted(claims, key=lambda claim: COST_ORDER.index(claim.cost))
    kept = {claim.id: kept_outcome(claim, lab) for claim in order if claim.cost != "instant" and not fresh}
    for number, claim in enumerate(order):
        waiting = [other.id for other in order[number:] if not kept.get(other.id)]
        before(claim, lab.scale * sum(FORECAST.get(each, 0.5) for each in waiting))
        outcome = kept.get(claim.id)
        if outcome is None:
            outcome = run(claim, lab)
            keep(outcome, lab)
        outcomes[claim.id] = outcome
        after(outcome)
    return [outcomes[claim.id] for claim in claims]


def keep(outcome: Outcome, lab: Lab) -> None:
    path = _path(outcome.id, lab)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(dataclasses.asdict(outcome), ensure_ascii=False) + "\n")


def kept_outcome(claim: Claim, lab: Lab) -> Outcome | None:
    """The outcome of an earlier run at the same scale by the same code."""
    path = _path(claim.id, lab)
    if not path.exists():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        outcome = Outcome(**{**found, "verdict": Verdict(found["verdict"])})
    except (ValueError, TypeError, KeyError):
        return None  # written by another version, or cut short: it will be measured again
    return outcome if (outcome.scale, outcome.code) == (lab.scale, code_of(claim)) else None


def _path(claim_id: str, lab: Lab) -> Path:
    return lab.folder / "outcomes" / f"{claim_id}.json"


def as_json(claim: Claim, outcome: Outcome, lang: str = "en") -> dict[str, Any]:
    """One claim and what became of it, for programs."""
    return {
        "id": claim.id,
        "chapter": claim.chapter,
        "section": claim.section,
        "claim": claim.sentence.to(lang),
        "measures": claim.measures.to(lang),
        "formula": claim.formula,
        "cost": claim.cost,
        "verdict": str(outcome.verdict),
        "why": claim.paragraph(outcome.verdict, outcome.values, lang),
        "measured": [
            {
                "key": expect.key,
                "name": expect.name.to(lang),
                "measured": outcome.values[expect.key],
                "expected": expect.truth,
                "relation": expect.relation,
                "chapter": expect.truth if expect.chapter is None else expect.chapter,
                "source": expect.source.to(lang),
                "tolerance": expect.tolerance,
                "because": expect.because.to(lang),
                "found": expect.found(outcome.values[expect.key]),
            }
            for expect in claim.expects
        ],
        "control": {
            "what": claim.control.to(lang),
            "measured": outcome.control,
            "failed": outcome.control_failed,
        },
        "read": claim.read,
        "seeds": outcome.seeds,
        "scale": outcome.scale,
        "seconds": round(outcome.seconds, 3),
        "machine": outcome.machine,
    }
