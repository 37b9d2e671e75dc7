"""What a person sees of the lab on a terminal: the table, one claim in full, and the verbs the command line calls.

    run_claims([], ...)                    the table of all instant claims
    run_claims(["A10", "B06"], ...)        these two in full: formula, shapes, numbers, control, where to read
    look_inside("B20", folder)             the same question to a model of the reader's own

How claims are run is in `run.py`, the page in `report.py`.
"""

import json
import sys
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from rich.console import Console, Group, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text as Line

from clockhand.errors import ClockhandError, unknown_name
from clockhand.lab.claim import LANGUAGES, VERDICT_NAMES, Claim, Text, Verdict, show
from clockhand.lab.experiment import Lab
from clockhand.lab.moe import router_table
from clockhand.lab.position import length_table
from clockhand.lab.run import LAB_FOLDER, Outcome, all_claims, as_json, choose, kept_outcome, run_all
from clockhand.train.run_folder import trained_seq_len

COLOURS = {
    Verdict.HOLDS: "green",
    Verdict.CONDITION: "cyan",
    Verdict.REFUTED: "red",
    Verdict.EXPLAINED: "magenta",
    Verdict.UNDECIDED: "yellow",
}


def run_claims(
    ids: Sequence[str] = (),
    everything: bool = False,
    lang: str = "en",
    as_json_text: bool = False,
    html: Path | None = None,
    fresh: bool = False,
    folder: Path = LAB_FOLDER,
    scale: float = 1.0,
) -> int:
    """The verb `clockhand lab`: runs the claims, prints them, and writes the report when `html` names a file.

    With `ids` each of them is explained in full; without, the instant ones make a table, with `everything` all of them.
    The JSON always lists every claim; those not run now have their kept outcome, or none. Returns the exit status: 1
    when a control passed, or an instant claim did not find what a correct implementation finds. A claim that cannot be
    tried here, as another program is not installed, fails nothing.
    """
    if lang not in LANGUAGES:
        raise unknown_name("language", lang, LANGUAGES)
    lab = Lab(folder, scale)
    claims = choose(ids, everything)
    outcomes = _run_with_bar(claims, lab, fresh)
    if as_json_text:
        print(json.dumps(_everything_as_json(outcomes, lab, lang, only=bool(ids)), indent=2, ensure_ascii=False))
    else:
        console = Console()
        pairs = list(zip(claims, outcomes))
        if ids:
            for claim, outcome in pairs:
                console.print(in_full(claim, outcome, lang))
        else:
            console.print(table(pairs, lang))
    if html is not None:
        from clockhand.lab.report import write_report

        known = {outcome.id: outcome for outcome in _known(lab)} | {outcome.id: outcome for outcome in outcomes}
        write_report(html, known, lang)
        print(f"{html}", file=sys.stderr)
    sound = all(
        outcome.found and outcome.control_failed
        for claim, outcome in zip(claims, outcomes)
        if claim.cost == "instant" and outcome.could_be_tried
    )
    return 0 if sound else 1


def _run_with_bar(claims: list[Claim], lab: Lab, fresh: bool) -> list[Outcome]:
    console = Console(stderr=True)
    columns = [
        TextColumn("{task.completed}/{task.total}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    ]
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=len(claims))
        now: dict[str, str] = {"what": "", "left": ""}

        def describe() -> None:
            progress.update(task, description=f"{now['what']}  {now['left']}")

        def before(claim: Claim, seconds_left: float) -> None:
            now["what"], now["left"] = claim.id, f"about {timedelta(seconds=round(seconds_left))} left"
            if claim.cost != "instant" and not console.is_terminal:
                print(f"{claim.id}: {claim.sentence.en}  ({now['left']})", file=sys.stderr, flush=True)
            describe()

        def say(line: str) -> None:
            if console.is_terminal:
                now["what"] = f"{now['what'].split(':')[0]}: {line}"
                describe()
            else:
                print(f"  {line}", file=sys.stderr, flush=True)

        lab.say = say
        return run_all(claims, lab, fresh, before, after=lambda outcome: progress.advance(task))


def _known(lab: Lab) -> list[Outcome]:
    """Outcomes of earlier runs."""
    kept = (kept_outcome(claim, lab) for claim in all_claims().values())
    return [outcome for outcome in kept if outcome is not None]


def _everything_as_json(outcomes: list[Outcome], lab: Lab, lang: str, only: bool) -> list[dict[str, object]]:
    now = {outcome.id: outcome for outcome in outcomes}
    before = {} if only else {outcome.id: outcome for outcome in _known(lab)}
    rows = []
    for claim in all_claims().values():
        outcome = now.get(claim.id) or before.get(claim.id)
        if outcome is not None:
            rows.append(as_json(claim, outcome, lang))
        elif not only:
            rows.append({"id": claim.id, "claim": claim.sentence.to(lang), "cost": claim.cost, "verdict": None})
    return rows


# ── the table ──────────────────────────────────────────────────────────────────────────────────────────────────────


def table(pairs: Sequence[tuple[Claim, Outcome]], lang: str = "en") -> RenderableType:
    """One row a claim: what it says, the chapter's number, the measured one, the verdict."""
    rows = Table(box=None, padding=(0, 1), show_edge=False, header_style="bold")
    for name, style in (("", "dim"), (_CLAIM.to(lang), ""), (_CHAPTER.to(lang), ""), (_MEASURED.to(lang), "bold")):
        rows.add_column(name, style=style, overflow="fold")
    rows.add_column(_VERDICT.to(lang), no_wrap=True)
    rows.add_column("s", justify="right", style="dim")
    for claim, outcome in pairs:
        headline = claim.expects[0]
        said = headline.truth if headline.chapter is None else headline.chapter
        rows.add_row(
            claim.id,
            claim.sentence.to(lang),
            show(said, lang),
            show(outcome.values[headline.key], lang),
            verdict_line(outcome, lang),
            f"{outcome.seconds:.1f}",
        )
    return Group(rows, Line(""), Line(summary([outcome for _, outcome in pairs], lang), style="bold"))


def summary(outcomes: Sequence[Outcome], lang: str) -> str:
    counts = {verdict: sum(outcome.verdict == verdict for outcome in outcomes) for verdict in Verdict}
    said = ", ".join(f"{VERDICT_NAMES[verdict].to(lang)} {count}" for verdict, count in counts.items() if count)
    noticed, tried = (sum(getattr(each, what) for each in outcomes) for what in ("control_failed", "could_be_tried"))
    text = Text(
        f"{len(outcomes)} claims: {said}. {noticed} of {tried} controls failed, as they must.",
        f"共 {len(outcomes)} 条：{said}。{tried} 个对照中有 {noticed} 个按要求失败。",
    )
    return text.to(lang)


def verdict_line(outcome: Outcome, lang: str) -> Line:
    return Line(VERDICT_NAMES[outcome.verdict].to(lang), style=COLOURS[outcome.verdict])


_CLAIM, _CHAPTER = Text("claim", "命题"), Text("chapter says", "章节说法")
_MEASURED, _EXPECTED, _VERDICT = Text("measured", "实测"), Text("to find", "应得"), Text("verdict", "结论")


# ── one claim in full ──────────────────────────────────────────────────────────────────────────────────────────────


def in_full(claim: Claim, outcome: Outcome, lang: str = "en") -> RenderableType:
    """Everything about one claim."""

    def field(name: Text, value: str) -> Line:
        return Line.assemble((f"{name.to(lang)}  ", "dim"), value)

    numbers = Table(box=None, padding=(0, 1), show_edge=False, header_style="dim")
    for heading in (Text("", ""), _MEASURED, _EXPECTED, _CHAPTER, Text("tolerance, and why", "容差及理由")):
        numbers.add_column(heading.to(lang), overflow="fold")
    for expect in claim.expects:
        numbers.add_row(
            expect.name.to(lang),
            Line(show(outcome.values[expect.key], lang), style="bold"),
            expect.wanted(lang),
            show(expect.chapter, lang) if expect.chapter is not None else "",
            "" if expect.truth is None else f"{expect.tolerance:g}: {expect.because.to(lang)}",
        )
    noticed = Text("noticed", "已察觉") if outcome.control_failed else Text("NOT NOTICED", "未察觉")
    if not outcome.could_be_tried:
        noticed = Text("not tried", "未进行")
    parts: list[RenderableType] = [
        Line(""),
        Line.assemble((claim.id, "bold"), "  ", verdict_line(outcome, lang), (f"  § {claim.section}", "dim")),
        Line(claim.sentence.to(lang), style="bold"),
        field(Text("measured:", "测量："), claim.measures.to(lang)),
        Line(f"\n    {claim.formula}\n", style="cyan"),
        numbers,
    ]
    if outcome.shapes:
        shapes = "   ".join(f"{name} {shape}" for name, shape in outcome.shapes.items())
        parts.append(field(Text("shapes:", "形状："), shapes))
    parts += [
        field(Text("control:", "对照："), f"{claim.control.to(lang)} [{noticed.to(lang)}]"),
        Line("\n" + claim.paragraph(outcome.verdict, outcome.values, lang)),
        field(Text("\nread:", "\n阅读："), claim.read),
    ]
    if outcome.seeds:
        parts.append(field(Text("seeds:", "种子："), ", ".join(map(str, outcome.seeds))))
    parts.append(field(Text("time:", "用时："), f"{outcome.seconds:.2f} s, {outcome.machine}"))
    return Group(*parts)


# ── a model of one's own ───────────────────────────────────────────────────────────────────────────────────────────


def look_inside(claim_id: str, model: Path, text: str) -> None:
    """Prints what B20 (the router) or B21 (the length) asks, of the model folder `model` reading `text`."""
    from clockhand.data.tokenizer import Tokenizer
    from clockhand.interop.hf import find_model_folder, load_model

    if claim_id.upper() not in ("B20", "B21"):
        raise ClockhandError(f"claim {claim_id} takes no --model; those that do: B20, B21")
    folder = find_model_folder(model)
    network, ids = load_model(folder), Tokenizer.load(folder).encode(text, bos=True)
    if claim_id.upper() == "B20":
        headings, rows = router_table(network, ids)
    else:
        headings, rows = length_table(network, ids, trained_seq_len(model) or network.config.max_seq_len)
    printed = Table(*headings, box=None, header_style="bold")
    for row in rows:
        printed.add_row(*row)
    Console().print(printed)
