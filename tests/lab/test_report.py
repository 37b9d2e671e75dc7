"""The table, the JSON and the page: complete, in both languages, and a page that needs nothing but itself."""

import dataclasses
import html
import io
import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from rich.console import Console

from clockhand.errors import ClockhandError
from clockhand.lab.chapters import SECTIONS
from clockhand.lab.figures import PALETTE, squarified
from clockhand.lab.report import inline, page, write_report
from clockhand.lab.run import Lab, Outcome, all_claims, choose, keep, kept_outcome, run, run_all
from clockhand.lab.show import in_full, run_claims, table
from clockhand.model.rope import frequencies
from clockhand.presets import build

SAMPLE = ("A02", "A10", "A13", "B06", "B10", "B13")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Outcome]:
    lab = Lab(tmp_path_factory.mktemp("lab"))
    return {claim.id: run(claim, lab) for claim in choose(SAMPLE)}


@pytest.fixture(scope="module")
def report(outcomes: dict[str, Outcome], tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, outcomes)
    return path


def printed(what: object) -> str:
    console = Console(file=io.StringIO(), width=160)
    console.print(what)
    return console.file.getvalue()  # type: ignore[attr-defined]


# ── on a terminal ──────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_claim_in_full_has_formula_shapes_numbers_and_pointer_in_both_languages(outcomes: dict[str, Outcome]):
    claim, outcome = all_claims()["A10"], outcomes["A10"]
    english, chinese = (printed(in_full(claim, outcome, lang)) for lang in ("en", "zh"))
    for text in (english, chinese):
        assert claim.formula in text
        assert "47117.2" in text
        assert "frequencies(config) (32,)" in text
        assert claim.read in text
    assert "holds with a condition" in english
    assert "有条件成立" in chinese


def test_the_table_has_a_row_for_every_claim(outcomes: dict[str, Outcome]):
    text = printed(table([(all_claims()[each], outcomes[each]) for each in SAMPLE], "en"))
    assert all(each in text for each in SAMPLE)
    assert "6 of 6 controls failed" in text


def test_the_json_lists_all_49_claims_with_the_measured_values_of_those_that_were_run(tmp_path: Path, capsys):
    run_claims(["B10"], as_json_text=True, folder=tmp_path)
    (one,) = json.loads(capsys.readouterr().out)
    assert one["measured"][0]["measured"] == "0----/00---/000--/0000-/00000"
    assert one["control"]["failed"] is True
    assert one["verdict"] == "holds"


def test_a_claim_that_needs_a_program_which_is_not_installed_is_no_failure(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert run_claims(["B18"], folder=tmp_path) == 0
    text = capsys.readouterr().out
    assert "[not tried]" in text
    assert "transformers is not installed here" in text
    failing = dataclasses.replace(run(all_claims()["B10"], Lab(tmp_path)), found=False)
    monkeypatch.setattr("clockhand.lab.show._run_with_bar", lambda *given: [failing])
    assert run_claims(["B10"], folder=tmp_path) == 1


def test_an_unknown_claim_or_language_is_refused():
    with pytest.raises(ClockhandError, match="unknown claim 'A99'; did you mean"):
        run_claims(["a99"])
    with pytest.raises(ClockhandError, match="language"):
        run_claims(["A10"], lang="fr")


def test_what_took_training_is_kept_and_what_is_instant_is_measured_again(tmp_path: Path):
    lab = Lab(tmp_path)
    instant = all_claims()["B10"]
    first = run(instant, lab)
    keep(first, lab)
    assert kept_outcome(instant, lab) == first
    assert kept_outcome(instant, Lab(tmp_path, scale=0.5)) is None, "a shortened run does not pass for a full one"
    (tmp_path / "outcomes" / "B10.json").write_text('{"half": ', encoding="utf-8")
    assert kept_outcome(instant, lab) is None
    told: list[str] = []
    run_all([instant], lab, before=lambda claim, left: told.append(f"{claim.id} {left}"))
    assert told == ["B10 0.5"]


# ── the page ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_contents_have_every_section_and_every_link_has_its_place(report: Path):
    text = report.read_text(encoding="utf-8")
    contents = text[text.index("<nav>") : text.index("</nav>")]
    for letter, sections in SECTIONS.items():
        for section in sections:
            assert f'href="#{letter}-{section.number}"' in contents
            assert html.escape(section.title.zh) in contents
    places = set(re.findall(r' id="([^"]+)"', text))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= places
    assert set(all_claims()) <= places


def test_the_page_loads_nothing_from_anywhere(report: Path):
    text = report.read_text(encoding="utf-8")
    assert not re.findall(r'(?:src|href)="(?!#|data:)[^"]*"', text)
    assert not re.findall(r"url\((?!#)|@import|fetch\(|XMLHttp", text)
    assert len(text) < 2_000_000


def test_figures_are_written_as_svg_and_png_and_change_colour_with_the_page(report: Path, outcomes: dict[str, Outcome]):
    folder = report.parent / "figures"
    assert {path.stem for path in folder.glob("*.svg")} == {path.stem for path in folder.glob("*.png")}
    assert (folder / "clock.png").read_bytes().startswith(b"\x89PNG")
    svg = (folder / "waterfall.svg").read_text(encoding="utf-8")
    assert any(colour in svg for colour in PALETTE)
    shown = inline("waterfall", svg)
    assert not any(colour in shown for colour in PALETTE)
    assert "var(--ink)" in shown
    assert 'class="zh">路由器' in shown
    ids = re.findall(
        r' id="([^"]+)"', "".join(re.findall(r"<figure.*?</figure>", report.read_text("utf-8"), re.DOTALL))
    )
    assert len(ids) == len(set(ids)), "figures on one page must not share ids"


def test_a_figure_that_needs_a_training_is_left_out_until_there_is_one(report: Path):
    drawn = {path.stem for path in (report.parent / "figures").glob("*.svg")}
    assert {"clock", "treemap", "waterfall", "mask", "yarn"} <= drawn
    assert not {"lengths", "router", "gqa"} & drawn


def test_a_treemap_tile_is_as_large_as_its_share():
    shares = [0.5, 0.3, 0.15, 0.05]
    areas = [width * height for _x, _y, width, height in squarified(shares)]
    assert areas == pytest.approx(shares)


def test_a_page_without_outcomes_says_how_to_get_them():
    text = page({}, {}, "zh")
    assert 'data-lang="zh"' in text
    assert text.count("clockhand lab A05") == 2


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

PROBE = """<body><pre id="found"></pre><iframe width="390" height="800" srcdoc="{page}"></iframe><script>
addEventListener('load', () => {{
  const frame = document.querySelector('iframe'), inside = frame.contentDocument, view = frame.contentWindow;
  const slider = inside.getElementById('position');
  slider.value = 100;
  slider.dispatchEvent(new view.Event('input'));
  document.getElementById('found').textContent = JSON.stringify({{
    errors: view.errors,
    requests: view.performance.getEntriesByType('resource').length,
    overflow: inside.documentElement.scrollWidth - 390,
    turns: [...inside.querySelectorAll('.query')].map(hand => hand.getAttribute('transform')),
  }});
}});
</script></body>"""


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_in_a_browser_the_page_is_quiet_the_slider_moves_the_hands_and_a_phone_needs_no_sideways_scroll(
    report: Path, tmp_path: Path
):
    watch = "<script>window.errors = []; addEventListener('error', e => window.errors.push(e.message));</script>"
    text = report.read_text(encoding="utf-8").replace("<head>", f"<head>{watch}", 1)
    probe = tmp_path / "probe.html"
    probe.write_text(PROBE.format(page=html.escape(text, quote=True)), encoding="utf-8")
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000", "--dump-dom"]
    seen = subprocess.run(
        [*command, f"--user-data-dir={tmp_path / 'profile'}", probe.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    match = re.search(r'<pre id="found">(.*?)</pre>', seen.stdout)
    assert match is not None
    found = json.loads(html.unescape(match[1]))
    assert found["errors"] == []
    assert found["requests"] == 0
    assert found["overflow"] <= 0
    theta = frequencies(build("mini-llama")).tolist()
    angles = [float(turn.removeprefix("rotate(").removesuffix(")")) for turn in found["turns"]]
    assert angles == pytest.approx([math.degrees(100 * turn) % 360 for turn in theta], abs=1e-6)


def test_the_report_in_docs_is_whole_and_the_readme_shows_two_of_its_figures():
    root = Path(__file__).parents[2]
    page = (root / "docs" / "lab.html").read_text(encoding="utf-8")
    for claim in all_claims():
        assert f'id="{claim}"' in page, f"{claim} is missing in docs/lab.html"
    assert "<script src" not in page
    assert not re.search(r'(src|href)="(?!#|data:)', page), "it needs nothing but itself"
    shown = re.findall(r'src="(docs/figures/[^"]+)"', (root / "README.md").read_text(encoding="utf-8"))
    assert len(shown) >= 2
    for figure in shown:
        assert (root / figure).is_file(), figure
    size = sum(file.stat().st_size for file in (root / "docs").rglob("*") if file.is_file())
    assert size < 5_000_000
