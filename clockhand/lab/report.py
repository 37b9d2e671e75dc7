"""The report: both chapters, section by section, with every claim, its numbers and its figures, on one page.

It reads outcomes and draws; it measures nothing. What has not been run is said to be so, with the command that runs it.
"""

import html
import re
from collections.abc import Mapping
from pathlib import Path

from clockhand.disk import write_text
from clockhand.errors import ClockhandError
from clockhand.lab.chapters import CHAPTERS, SECTIONS, Section
from clockhand.lab.claim import VERDICT_NAMES, Claim, Text, Value, Verdict, show
from clockhand.lab.figures import FIGURES, PALETTE, TRANSLATIONS, write_figures
from clockhand.lab.page import SCRIPT, STYLE, clock_faces
from clockhand.lab.run import Outcome, all_claims
from clockhand.model.rope import frequencies
from clockhand.presets import build

CLASSES = {
    Verdict.HOLDS: "holds",
    Verdict.CONDITION: "condition",
    Verdict.REFUTED: "refuted",
    Verdict.EXPLAINED: "explained",
    Verdict.UNDECIDED: "undecided",
}
Outcomes = Mapping[str, Outcome]


def write_report(path: Path, outcomes: Outcomes, lang: str = "en") -> None:
    """Writes the page, and its figures as SVG and PNG into `figures/` beside it."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        drawn = write_figures(path.parent / "figures", outcomes)
    except OSError as error:
        where = error.filename or path.parent / "figures"
        raise ClockhandError(f"cannot write {where}: {error.strerror}") from None
    write_text(path, page(outcomes, {name: inline(name, svg) for name, svg in drawn.items()}, lang))


def page(outcomes: Outcomes, figures: Mapping[str, str], lang: str = "en") -> str:
    """The whole page as HTML. `figures` are SVG elements by name; those that are missing are left out."""
    theta = frequencies(build("mini-llama")).tolist()
    body = "\n".join(
        [
            f'<button class="lang" type="button">{both(Text("中文", "English"))}</button>',
            f'<main><h1>{both(_TITLE)}</h1><p class="lead">{both(_LEAD)}</p>',
            _counts(outcomes),
            f'<p class="meta">{_made(outcomes)}</p>',
            _contents(),
            _clock(theta),
            _overview(outcomes),
            *(_chapter(letter, outcomes, figures) for letter in CHAPTERS),
            f"<footer><p>{both(_FOOTER)}</p></footer></main>",
        ]
    )
    return (
        f'<!doctype html>\n<html lang="{"zh-CN" if lang == "zh" else "en"}" data-lang="{lang}">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n<link rel="icon" href="data:,">\n'
        f"<title>{_TITLE.to(lang)}</title>\n<style>{STYLE}</style></head>\n<body>\n{body}\n<script>{SCRIPT}</script>\n"
        "</body></html>\n"
    )


_TITLE = Text("Two chapters that check themselves", "自己检验自己的两章")
_LEAD = Text(
    "Two course chapters explain how a modern Transformer is built. They make 49 statements that can be computed, measured "
    "or refuted. Here each one is, on the modules of clockhand: what the chapter says, what was found, and why.",
    "两章课程讲解了现代 Transformer 如何从零搭建，其中有 49 个可以计算、测量或证伪的说法。这里用 clockhand 自己的模块逐一检验：章节怎么说，实际测得多少，为什么。",
)
_FOOTER = Text(
    "Every number on this page was measured, none was typed in. To make it on your own machine: "
    "clockhand lab --all --html report.html",
    "本页上的每个数字都是测出来的，没有一个是手填的。在自己的机器上重做一遍：clockhand lab --all --html report.html",
)


def both(text: Text) -> str:
    """The text in both languages, one of which the page shows."""
    en, zh = html.escape(text.en), html.escape(text.zh)
    if en == zh:
        return en
    return f'<span class="en" lang="en">{en}</span><span class="zh" lang="zh-CN">{zh}</span>'


def value(measured: Value | None) -> str:
    """A number that stays on its line, or a word that may wrap."""
    shown = both(Text(show(measured, "en"), show(measured, "zh")))
    return shown if isinstance(measured, str) else f'<span class="n">{shown}</span>'


# ── the top ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _anchor(letter: str, section: Section) -> str:
    return f"{letter}-{section.number}"


def _contents() -> str:
    """Every section of both chapters."""
    lists = []
    for letter, title in CHAPTERS.items():
        items = "".join(
            f'<li style="--depth:{max(section.depth - 1, 0)}"><a href="#{_anchor(letter, section)}">'
            f"{_number(section)}{both(section.title)}</a></li>"
            for section in SECTIONS[letter]
        )
        lists.append(f"<b>{letter} · {both(title)}</b><ol>{items}</ol>")
    return f"<nav><details><summary>{both(Text('Contents', '目录'))}</summary>{''.join(lists)}</details></nav>"


def _number(section: Section) -> str:
    return f'<span class="number">{section.number}</span> ' if section.number[0].isdigit() else ""


def _counts(outcomes: Outcomes) -> str:
    counts = {verdict: sum(outcome.verdict == verdict for outcome in outcomes.values()) for verdict in Verdict}
    items = "".join(
        f'<li class="badge {CLASSES[verdict]}">{count} {both(VERDICT_NAMES[verdict])}</li>'
        for verdict, count in counts.items()
        if count
    )
    return f'<ul class="counts">{items}</ul>'


def _made(outcomes: Outcomes) -> str:
    minutes = sum(outcome.seconds for outcome in outcomes.values()) / 60
    machines = ", ".join(sorted({outcome.machine for outcome in outcomes.values()}))
    failed = sum(outcome.control_failed for outcome in outcomes.values())
    shortened = any(outcome.scale < 1 for outcome in outcomes.values())
    text = Text(
        f"{len(outcomes)} of {len(all_claims())} claims measured in {minutes:.1f} minutes on {machines}. Every claim has a control "
        f"that must fail: {failed} did."
        + (" Trainings were shortened: their numbers mean little." if shortened else ""),
        f"{len(all_claims())} 条中测量了 {len(outcomes)} 条，共 {minutes:.1f} 分钟，环境：{machines}。每条都有一个必须失败的对照：{failed} 个失败了。"
        + ("训练被缩短，相关数字意义不大。" if shortened else ""),
    )
    return both(text)


def _clock(theta: list[float]) -> str:
    lead = Text(
        "Mini-LLaMA's 32 clocks, one for each pair of dimensions of a head. Blue is the query at position m, red the key at n. "
        "Move m: all hands turn, but the angle between blue and red stays, and with it the score. Only the distance changes it.",
        "Mini-LLaMA 的 32 个时钟，每对维度一个。蓝针是位置 m 的 query，红针是位置 n 的 key。拖动 m：所有指针都在转，但蓝针与红针的夹角不变，得分也不变。只有距离能改变它。",
    )
    return (
        f'<section class="clock" aria-label="RoPE">{clock_faces(theta)}'
        f'<label><span class="swatch holds" style="--hue:var(--c1)"></span>{both(Text("position m", "位置 m"))} = '
        '<output id="m">0</output><input id="position" type="range" min="0" max="1023" value="40"></label>'
        f'<label>{both(Text("distance m − n", "距离 m − n"))} = <output id="d">0</output> '
        f'(<span class="swatch" style="--hue:var(--c2)"></span>n = <output id="n">0</output>)'
        '<input id="distance" type="range" min="0" max="200" value="3"></label>'
        f'<p class="caption">{both(Text("score of two equal vectors, 1 at distance 0", "两个相同向量的得分，距离为 0 时为 1"))}: '
        f'<output id="score">0</output></p><p class="caption">{both(lead)}</p></section>'
    )


def _overview(outcomes: Outcomes) -> str:
    rows = []
    for claim in all_claims().values():
        outcome = outcomes.get(claim.id)
        headline = claim.expects[0]
        found = f"{value(outcome.values[headline.key])}<small>{both(headline.name)}</small>" if outcome else "–"
        rows.append(
            f'<tr class="{_css(outcome)}"><td class="key"><a href="#{claim.id}">{claim.id}</a></td><td>{both(claim.sentence)}</td>'
            f'<td class="value">{found}</td><td class="badge">{_verdict(outcome)}</td></tr>'
        )
    heads = "".join(
        f"<th>{both(name)}</th>"
        for name in (Text("", ""), Text("claim", "命题"), Text("measured", "实测"), Text("verdict", "结论"))
    )
    title = Text("All claims", "全部命题")
    return f'<h2 id="all">{both(title)}</h2><div class="scroll"><table><tr>{heads}</tr>{"".join(rows)}</table></div>'


def _css(outcome: Outcome | None) -> str:
    return CLASSES[outcome.verdict] if outcome else "unrun"


def _verdict(outcome: Outcome | None) -> str:
    return both(VERDICT_NAMES[outcome.verdict] if outcome else Text("not run", "尚未运行"))


# ── the chapters ───────────────────────────────────────────────────────────────────────────────────────────────────


def _chapter(letter: str, outcomes: Outcomes, figures: Mapping[str, str]) -> str:
    sections = "\n".join(_section(letter, section, outcomes, figures) for section in SECTIONS[letter])
    return f'<h2 id="{letter}">{letter} · {both(CHAPTERS[letter])}</h2>\n{sections}'


def _section(letter: str, section: Section, outcomes: Outcomes, figures: Mapping[str, str]) -> str:
    level = "h3" if section.depth <= 1 else "h4"
    parts = [f'<{level} id="{_anchor(letter, section)}">{_number(section)}{both(section.title)}</{level}>']
    if section.note.en:
        parts.append(f"<p>{both(section.note)}</p>")
    for name in section.figures:
        if name in figures:
            parts.append(
                f'<figure id="figure-{name}">{figures[name]}<div class="caption">{both(FIGURES[name][1])}</div></figure>'
            )
    claims = [claim for claim in all_claims().values() if (claim.chapter, claim.section) == (letter, section.number)]
    parts += [_card(claim, outcomes.get(claim.id)) for claim in claims]
    if section.read:
        parts.append(f'<p class="meta">{both(Text("in the code:", "代码："))} <code>{section.read}</code></p>')
    return "\n".join(parts)


def _card(claim: Claim, outcome: Outcome | None) -> str:
    head = (
        f'<header><a class="id" href="#{claim.id}">{claim.id}</a><span class="badge">{_verdict(outcome)}</span></header>'
        f'<p class="sentence">{both(claim.sentence)}</p>'
    )
    if outcome is None:
        left = Text(f"Not run yet: clockhand lab {claim.id}", f"尚未运行：clockhand lab {claim.id}")
        return f'<article id="{claim.id}" class="unrun">{head}<p class="meta">{both(left)}</p></article>'
    why = Text(*(claim.paragraph(outcome.verdict, outcome.values, lang) for lang in ("en", "zh")))
    return (
        f'<article id="{claim.id}" class="{_css(outcome)}">{head}'
        f'<p class="formula">{html.escape(claim.formula)}</p>{_numbers(claim, outcome)}<p>{both(why)}</p>'
        f"{_small_print(claim, outcome)}</article>"
    )


def _numbers(claim: Claim, outcome: Outcome) -> str:
    """A row for every number; the chapter's column only where it says something else."""
    differs = any(expect.chapter is not None for expect in claim.expects)
    rows = []
    for expect in claim.expects:
        measured = outcome.values[expect.key]
        wanted = both(Text(expect.wanted("en"), expect.wanted("zh")))
        if not isinstance(expect.truth, str):
            wanted = f'<span class="n">{wanted}</span>'
        row = f'<td>{both(expect.name)}</td><td class="value">{value(measured)}</td><td>{wanted}</td>'
        if differs:
            kind = "" if expect.as_chapter_says(measured) else "odd"
            row += f'<td class="{kind}">{"" if expect.chapter is None else value(expect.chapter)}</td>'
        rows.append(f"<tr>{row}</tr>")
    heads = [Text("", ""), Text("measured", "实测"), Text("to find", "应得"), Text("chapter", "章节")][
        : 4 if differs else 3
    ]
    head = "".join(f"<th>{both(name)}</th>" for name in heads)
    return f'<div class="scroll"><table><tr>{head}</tr>{"".join(rows)}</table></div>'


def _small_print(claim: Claim, outcome: Outcome) -> str:
    """How it was measured, for whoever doubts it."""
    items = [
        (Text("measured", "测量"), both(claim.measures)),
        (Text("control, must fail", "对照（必须失败）"), both(claim.control) + _control_values(claim, outcome)),
    ]
    for expect in claim.expects:
        if expect.truth is not None and expect.tolerance:
            reason = Text(*(f"±{expect.tolerance:g}: {expect.because.to(lang)}" for lang in ("en", "zh")))
            items.append((Text(f"tolerance, {expect.name.en}", f"容差，{expect.name.zh}"), both(reason)))
    if outcome.shapes:
        shapes = ", ".join(f"{name} {shape}" for name, shape in outcome.shapes.items())
        items.append((Text("shapes", "形状"), f"<code>{html.escape(shapes)}</code>"))
    if outcome.seeds:
        items.append((Text("seeds", "种子"), ", ".join(map(str, outcome.seeds))))
    items.append((Text("read", "阅读"), f"<code>{claim.read}</code>"))
    items.append((Text("time", "用时"), f"{outcome.seconds:.2f} s"))
    rows = "".join(f"<tr><th>{both(name)}</th><td>{text}</td></tr>" for name, text in items)
    return f"<details><summary>{both(Text('how it was measured', '如何测量'))}</summary><table>{rows}</table></details>"


def _control_values(claim: Claim, outcome: Outcome) -> str:
    names = {expect.key: expect.name for expect in claim.expects}
    found = "; ".join(f"{both(names[key])} {value(measured)}" for key, measured in outcome.control.items())
    said = Text("noticed", "已察觉") if outcome.control_failed else Text("NOT NOTICED", "未察觉")
    return f" [{found}: {both(said)}]"


# ── figures in the page ────────────────────────────────────────────────────────────────────────────────────────────


def inline(name: str, svg: str) -> str:
    """A matplotlib SVG made part of the page: its colours are the page's, its words in both languages, its ids its own."""
    svg = re.sub(r"\s*<metadata>.*?</metadata>|\s*<defs>\s*<style.*?</defs>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' (width|height)="[\d.]+pt"', "", svg, count=2)
    svg = re.sub(
        r' id="(?:figure|axes|patch|text|line2d|matplotlib\.axis|xtick|ytick|legend|LineCollection|FillBetween\w*)_\d+"',
        "",
        svg,
    )
    svg = re.sub(r'(id="|url\(#|href="#)(?=[\w.])', rf"\1{name}-", svg)
    svg = re.sub(r"font-family: [^;\"]*; ?|font: [\d.]+px '[^\"]*?sans-serif; ?", "", svg)
    svg = re.sub(r"\n\s*", "\n", svg)
    for colour, variable in PALETTE.items():
        svg = svg.replace(colour, f"var({variable})")
    svg = re.sub(r"(<text[^>]*)>([^<]*)(</text>)", _in_both_languages, svg)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(FIGURES[name][1].en, quote=True)}" ', 1)


def _in_both_languages(match: re.Match[str]) -> str:
    start, words, end = match.groups()
    zh = TRANSLATIONS.get(html.unescape(words))
    if zh is None or zh == html.unescape(words):
        return match.group()
    return f'{start} class="en">{words}{end}{start} class="zh">{html.escape(zh)}{end}'
