"""Why this token: what each stage of sampling did to the candidates, and where the random number fell.

    Explanation of one draw, as `clockhand generate --explain` prints it

                         model   temperature 0.8   top_k 40
    candidates           2,048             2,048         40
    entropy, nats         4.10              3.31       2.20
      2011 " thou"       8.1 %            14.2 %     19.0 %
       310 " the"        5.2 %             8.1 %     10.9 %
    > 1204 " my"         1.9 %             2.3 %      3.1 %
    drawn 0.8412: id 1204 " my", which has the numbers from 0.8391 to 0.8701

A column is the state after that stage, so a column and the one to its left are before and after. It looks on: the
stages are run once more (`sampling.stages`), and nothing here has a say in what is drawn.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unicodedata import east_asian_width

import torch
from torch import Tensor

from clockhand.infer.sampling import stages
from clockhand.infer.settings import Sampling

if TYPE_CHECKING:
    from clockhand.data.tokenizer import Tokenizer

CANDIDATES = 5


@dataclass(frozen=True)
class Stage:
    """The candidates after one stage."""

    name: str
    """model: the model's own distribution; allowed: without ids the tokenizer does not know, and without end tokens
    while there are too few new ones; then the fields of `Sampling` that are on, in their order."""
    value: float | int | None
    """What the field is set to. None for model, allowed and logit_bias."""
    candidates: int
    """Ids that can still be drawn."""
    entropy: float
    """In nats."""
    probabilities: tuple[float, ...]
    """Of each id in `Explanation.ids`."""


@dataclass(frozen=True)
class Explanation:
    """One draw."""

    ids: tuple[int, ...]
    """The candidates shown: the best of the model and the best at the end, and the one drawn. Best at the end first."""
    stages: tuple[Stage, ...]
    number: float
    """Drawn at random, from 0 up to 1."""
    id: int
    """What was drawn."""
    interval: tuple[float, float]
    """The numbers that would have drawn it: final probabilities are laid end to end in the order of ids."""


def explain(
    model_logits: Tensor,
    logits: Tensor,
    history: Sequence[Sequence[int]],
    sampling: Sampling,
    prompt_lengths: Sequence[int],
    numbers: Tensor,
    drawn: Sequence[int],
    shown: int = CANDIDATES,
) -> list[Explanation]:
    """An `Explanation` for each row: `numbers` (B,) pointed at the ids `drawn` in what `logits` (B, V) became.

    `model_logits` (B, V) are as the model gave them, `logits` what the stages were given, with -inf for what must not
    be drawn. The `shown` best at the start and at the end are followed through all stages.
    """
    columns = [("model", model_logits.float())]
    if not torch.equal(model_logits, logits):
        columns.append(("allowed", logits.float()))
    columns += list(stages(logits, history, sampling, prompt_lengths))[1:]
    names = [name for name, _ in columns]
    after = [each.softmax(-1).double() for _, each in columns]  # (B, V) each, as they are drawn from
    left = [each.isfinite().sum(-1).tolist() for _, each in columns]
    entropies = [torch.special.entr(each).sum(-1).tolist() for each in after]

    explanations = []
    for row, id in enumerate(drawn):
        first, last = after[0][row], after[-1][row]
        followed = {*_best(first, shown), *_best(last, shown), id}
        ids = sorted(followed, key=lambda each: (-float(last[each]), -float(first[each]), each))
        line = last.cumsum(-1) / last.sum()
        explanations.append(
            Explanation(
                ids=tuple(ids),
                stages=tuple(
                    Stage(
                        name=name,
                        value=getattr(sampling, name) if name not in ("model", "allowed", "logit_bias") else None,
                        candidates=left[number][row],
                        entropy=entropies[number][row],
                        probabilities=tuple(after[number][row][ids].tolist()),
                    )
                    for number, name in enumerate(names)
                ),
                number=float(numbers[row]),
                id=id,
                interval=(float(line[id - 1]) if id else 0.0, float(line[id])),
            )
        )
    return explanations


def _best(probabilities: Tensor, count: int) -> list[int]:
    order = probabilities.argsort(descending=True, stable=True)[:count].tolist()
    return [id for id in order if probabilities[id] > 0]


def render(explanation: Explanation, tokenizer: "Tokenizer") -> str:
    """The table at the head of this file, without its title."""
    labels = {id: f"{id:>6} {written(id, tokenizer)}" for id in explanation.ids}
    rows = [
        ["", *(f"{each.name} {each.value:g}" if each.value is not None else each.name for each in explanation.stages)],
        ["  candidates", *(f"{each.candidates:,}" for each in explanation.stages)],
        ["  entropy, nats", *(f"{each.entropy:.2f}" for each in explanation.stages)],
    ]
    for place, id in enumerate(explanation.ids):
        mark = ">" if id == explanation.id else " "
        rows.append([f"{mark} {labels[id]}", *(_percent(each.probabilities[place]) for each in explanation.stages)])
    first, *others = [max(map(_width, column)) for column in zip(*rows)]
    lines = [
        "   ".join(
            [row[0] + " " * (first - _width(row[0])), *(cell.rjust(width) for cell, width in zip(row[1:], others))]
        )
        for row in rows
    ]
    low, high = explanation.interval
    drawn = f"{explanation.id} {written(explanation.id, tokenizer)}"
    lines.append(f"  drawn {explanation.number:.4f}: id {drawn}, which has the numbers from {low:.4f} to {high:.4f}")
    return "\n".join(line.rstrip() for line in lines)


def as_json(explanation: Explanation, tokenizer: "Tokenizer") -> dict[str, Any]:
    """The same for programs; probabilities of a stage are in the order of `candidates`."""
    return {
        "candidates": [{"id": id, "piece": _text(id, tokenizer)} for id in explanation.ids],
        "stages": [
            {
                "stage": each.name,
                "value": each.value,
                "candidates": each.candidates,
                "entropy": each.entropy,
                "probabilities": list(each.probabilities),
            }
            for each in explanation.stages
        ],
        "number": explanation.number,
        "interval": list(explanation.interval),
        "id": explanation.id,
        "piece": _text(explanation.id, tokenizer),
    }


def written(id: int, tokenizer: "Tokenizer") -> str:
    """An id's text in quotes, so that spaces and line ends show."""
    return json.dumps(_text(id, tokenizer), ensure_ascii=False)


def _text(id: int, tokenizer: "Tokenizer") -> str:
    return tokenizer.piece(id).decode("utf-8", "backslashreplace") if id < tokenizer.vocab_size else ""


def _width(text: str) -> int:
    """Columns on a terminal, where Chinese characters take two."""
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def _percent(probability: float) -> str:
    if probability == 0:
        return "-"
    return f"{100 * probability:.1f} %" if probability >= 0.0005 else f"1e{math.floor(math.log10(probability))}"
