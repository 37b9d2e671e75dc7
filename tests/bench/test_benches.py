"""Every bench runs to its end on a tiny model, names its contestants and its limits."""

import json
import re

import pytest

from clockhand.bench import WORKS, batch, contest, context, decode, measure, prefill
from clockhand.cli import app
from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError

SMALL = dict(vocab_size=300, d_model=32, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=64, max_seq_len=600)
WALLS = measure.Limits(read_gb_per_s=10.0, fp32_gflops=100.0, bf16_gflops=200.0)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Any preset is a tiny model, and no time goes into measuring the limits."""
    monkeypatch.setattr(contest, "build", lambda preset, **changes: ModelConfig(**{**SMALL, **changes}))
    for module in (batch, context, decode, prefill):
        monkeypatch.setattr(module, "limits", lambda: WALLS)


@pytest.mark.parametrize(
    ("work", "contestants"),
    [
        (lambda: decode.run("any", [], 1, 3), ["clockhand fp32", "clockhand bf16", "clockhand int8", "clockhand int4"]),
        (lambda: prefill.run("any", ["transformers"], 1), ["clockhand fp32", "transformers fp32", "clockhand bf16"]),
        (lambda: batch.run("any", [], 1, 2), ["clockhand fp32", "clockhand bf16", "clockhand int8"]),
        (lambda: context.run("any", [], 1, 2), ["at 64", "at 1,024", "at 8,192"]),
    ],
    ids=["decode", "prefill", "batch", "context"],
)
def test_a_bench_measures_all_contestants_and_prints_as_text_and_as_json(work, contestants):
    report = work()
    assert set(contestants) <= set(report.results)
    assert all(each.median > 0 for name, each in report.results.items() if " to " not in name)  # growth is noise here
    text = "\n".join(report.lines())
    assert all(name in text for name in contestants)
    assert json.loads(json.dumps(report.as_json()))["limits"]["read_gb_per_s"] == 10.0


def test_growth_is_told_in_what_the_bytes_between_two_lengths_cost():
    times = {"at 64": [1.0, 2.0], "at 1,024": [1.5, 1.5], "at 8,192": [1.0 + 8128e-3, 2.0 + 2 * 8128e-3]}
    told = context.growth(times, ms_a_token=1e-3)
    assert told["64 to 8,192"].values == pytest.approx((1.0, 2.0))
    assert told["1,024 to 8,192"].values[0] == pytest.approx((1.0 + 8.128 - 1.5) / 7.168)


def test_the_cost_of_context_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    ms = [5.0, 6.0, 8.0]
    results = {f"at {length:,}": measure.Measured((each,), "ms") for length, each in zip((64, 1024, 8192), ms)}
    results["64 to 8,192"] = measure.Measured((1.2,), "× its bytes")  # which is no length
    bounds = {"at 1,024": 5.2, "at 8,192": 6.0}
    context.draw(contest.report("context", "any", results, bounds, WALLS), tmp_path / "cost.png")
    assert (tmp_path / "cost.png").read_bytes().startswith(b"\x89PNG")


def test_only_the_bench_of_context_draws():
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["bench", "decode", "--peer", "none", "--figure", "x.png"])
    assert "--figure x.png has no effect with decode" in str(result.exception)


def test_a_model_too_short_for_the_work_is_refused(monkeypatch):
    monkeypatch.setattr(contest, "build", lambda preset, **changes: ModelConfig(**{**SMALL, "max_seq_len": 100}))
    with pytest.raises(ClockhandError, match="needs 512 tokens, but any has max_seq_len = 100"):
        prefill.run("any", [])


def test_an_unknown_bench_is_refused_with_the_nearest_name():
    from typer.testing import CliRunner

    result = CliRunner().invoke(app, ["bench", "decoding"])
    assert "unknown bench 'decoding'; did you mean 'decode'?" in str(result.exception)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["train", "--peer", "llama.cpp"], "--peer llama.cpp has no effect with train"),
        (["context", "--peer", "llama.cpp"], "--peer llama.cpp has no effect with context"),
        (["moe", "--preset", "mini-llama"], "preset = mini-llama has no dense twin"),
    ],
)
def test_a_peer_or_a_model_that_would_not_be_measured_is_refused(monkeypatch, flags, message):
    from typer.testing import CliRunner

    monkeypatch.setattr(measure, "wanted_peers", lambda wanted: (wanted or "").split(","))
    assert message in str(CliRunner().invoke(app, ["bench", *flags]).exception)


def test_the_help_tells_what_each_bench_measures_and_every_one_is_there():
    from importlib.util import find_spec

    from typer.testing import CliRunner

    told = CliRunner().invoke(app, ["bench", "--help"]).output
    for work, what in WORKS.items():
        assert find_spec(f"clockhand.bench.{work}") is not None
        assert re.search(rf"^ +{work} +{re.escape(what)}$", told, re.M), f"{work} has no line of its own"
