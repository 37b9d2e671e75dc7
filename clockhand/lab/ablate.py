"""Ablations: change one field, keep the budget equal, train several seeds of each, and ask whether the noise explains it.

    clockhand lab ablate mlp=swiglu,relu,gelu --budget 5m
    clockhand lab ablate n_kv_heads=4,2,1 --equal flops
    clockhand lab ablate norm=rms,rms                       an A/A pair: must come out as no difference

The first value is the one the others are held against. Every variant gets an MLP width that makes its parameters (or
its FLOPs a token) those of the first, as nearly as widths allow. Repetition r of every variant sees the same data in the
same order, but starts from initial weights of its own: otherwise an A/A pair would agree to the last bit and prove
nothing, and two variants would share a luck that neither owns.
"""

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from clockhand.config import ModelConfig, parse_settings
from clockhand.count import forward_flops, total_parameters
from clockhand.errors import ClockhandError, unknown_name
from clockhand.lab.claim import Text
from clockhand.lab.experiment import BASE, RECIPE, Difference, Lab, compare
from clockhand.lab.run import LAB_FOLDER

BUDGETS: dict[str, Callable[[ModelConfig], int]] = {
    "parameters": total_parameters,
    "flops": lambda config: forward_flops(config, int(RECIPE["seq_len"])),
}
"""What may be held equal."""

MOST_REPETITIONS = 5


@dataclass(frozen=True)
class Variant:
    """One value of the field, and what became of it."""

    value: str
    d_ff: int
    parameters: int
    flops: int
    losses: list[float]
    """Validation loss of each repetition."""
    difference: Difference | None
    """From the first variant; None for the first itself."""


def ablate(
    setting: str,
    lab: Lab,
    equal: str = "parameters",
    seconds: float = 300.0,
    repetitions: int | None = None,
    base: dict[str, Any] | None = None,
) -> list[Variant]:
    """Trains every value of `setting` ("mlp=swiglu,relu") and compares each with the first.

    The first run is timed, and as many steps and repetitions (at least 3, at most 5) are made as fit in `seconds`;
    `repetitions` fixes their number instead. Raises `ClockhandError` for a field or value that cannot be, and where no
    width makes the budgets equal.
    """
    field, values = _parse(setting)
    base = {**BASE, **(base or {})}
    settings = _equalised(field, values, equal, base, lab)
    plan = _plan(settings, lab, seconds, repetitions)
    losses = [
        [
            lab.train(each, seed, init_seed=1000 * (place + 1) + seed, steps=plan.steps).loss
            for seed in range(plan.repetitions)
        ]
        for place, each in enumerate(settings)
    ]
    configs = [lab.config(each) for each in settings]
    return [
        Variant(
            value=str(settings[place][field]),
            d_ff=config.d_ff,
            parameters=total_parameters(config),
            flops=BUDGETS["flops"](config) // int(RECIPE["seq_len"]),
            losses=found,
            difference=compare(found, losses[0]) if place else None,
        )
        for place, (config, found) in enumerate(zip(configs, losses))
    ]


def _parse(setting: str) -> tuple[str, list[Any]]:
    name, equals, text = setting.partition("=")
    words = [word for word in text.split(",") if word]
    if not equals or len(words) < 2:
        raise ClockhandError(f"'{setting}' must look like field=value,value with at least two values")
    parsed = [parse_settings(ModelConfig, [f"{name}={word}"], "ablate") for word in words]
    (field,) = parsed[0]
    if field in ("d_ff", "vocab_size"):
        reason = "is adjusted to keep the budget equal" if field == "d_ff" else "follows from the corpus"
        raise ClockhandError(f"{field} cannot be ablated: it {reason}")
    return field, [each[field] for each in parsed]


def _equalised(field: str, values: list[Any], equal: str, base: dict[str, Any], lab: Lab) -> list[dict[str, Any]]:
    """The settings of every variant, each with the MLP width that brings its budget nearest to the first one's."""
    if equal not in BUDGETS:
        raise unknown_name("budget", equal, BUDGETS)
    measure = BUDGETS[equal]
    first = {**base, field: values[0]}
    budget = measure(lab.config(first))
    settings = [first]
    for value in values[1:]:
        # The budget is linear in d_ff, so two widths tell the slope.
        at_1, at_2 = (measure(lab.config({**base, field: value, "d_ff": width})) for width in (1, 2))
        width = round(1 + (budget - at_1) / (at_2 - at_1))
        if width < 1:
            raise ClockhandError(
                f"{field} = {value} is larger than {field} = {values[0]} even with d_ff = 1: no equal {equal}"
            )
        settings.append({**base, field: value, "d_ff": width})
    return settings


@dataclass(frozen=True)
class _Plan:
    steps: int
    repetitions: int


def _plan(settings: list[dict[str, Any]], lab: Lab, seconds: float, repetitions: int | None) -> _Plan:
    """How many steps and repetitions the time allows, from timing a few steps of the first variant."""
    usual = int(RECIPE["steps"])
    if repetitions is not None:
        return _Plan(usual, repetitions)
    trial = 12
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as scratch:
        lab.train(settings[0], 0, steps=trial, folder=Path(scratch))
    a_step = (time.perf_counter() - started) / trial
    affordable = seconds / a_step / len(settings)  # steps of every variant, all repetitions together
    many = int(min(max(affordable // usual, 3), MOST_REPETITIONS))
    return _Plan(int(max(min(affordable / many, 4 * usual), 20)), many)


def parse_budget(text: str) -> float:
    """`5m`, `90s`, `1h` or plain seconds, in seconds."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smh]?)", text.strip())
    if not match or float(match[1]) == 0:
        raise ClockhandError(f"--budget {text} must be a time like 90s, 5m or 1h")
    return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[match[2]]


def verdict(variant: Variant) -> Text:
    """What the comparison says of one variant."""
    if variant.difference is None:
        return Text("the others are held against this", "其余以此为准")
    if not variant.difference.exceeds_noise:
        return Text("no difference beyond the noise", "没有超出噪声的差异")
    better = variant.difference.mean < 0
    return Text(
        "better, beyond the noise" if better else "worse, beyond the noise",
        "更好，超出噪声" if better else "更差，超出噪声",
    )


def run_ablation(
    setting: str,
    equal: str = "parameters",
    budget: str = "5m",
    lang: str = "en",
    folder: Path = LAB_FOLDER,
    as_json_text: bool = False,
) -> list[dict[str, Any]]:
    """The verb `clockhand lab ablate`: runs it and prints the table; returns the same as plain values."""
    console = Console(stderr=True)
    lab = Lab(folder, say=lambda line: console.print(line, style="dim"))
    found = ablate(setting, lab, equal, parse_budget(budget))
    if not as_json_text:
        Console().print(table(setting.partition("=")[0], found, equal, lang))
    return [{**dataclasses.asdict(variant), "verdict": verdict(variant).to(lang)} for variant in found]


def table(field: str, found: list[Variant], equal: str, lang: str) -> Table:
    note = Text(
        f"equal {equal}; same data order, own initial weights; difference with its 95 % interval",
        f"{'参数量' if equal == 'parameters' else 'FLOPs'}相等；数据顺序相同，各有初始权重；差异附 95 % 区间",
    )
    rows = Table(box=None, header_style="bold", caption=note.to(lang), caption_justify="left")
    names = (Text("parameters", "参数"), Text("FLOPs a token", "每 token FLOPs"), Text("loss", "损失"), Text("seeds", "种子数"),
             Text("difference", "差异"), Text("verdict", "结论"))  # fmt: skip
    for heading in (field, "d_ff", *(name.to(lang) for name in names)):
        rows.add_column(heading)
    for variant in found:
        gap = variant.difference
        rows.add_row(
            variant.value,
            f"{variant.d_ff:,}",
            f"{variant.parameters:,}",
            f"{variant.flops:,}",
            f"{sum(variant.losses) / len(variant.losses):.4f}",
            str(len(variant.losses)),
            "" if gap is None else f"{gap.mean:+.4f} [{gap.low:+.4f}, {gap.high:+.4f}]",
            verdict(variant).to(lang),
        )
    return rows
