"""Trainings are kept and found again, and a difference is only called one when the noise cannot explain it."""

import random
from pathlib import Path

import pytest
import torch

from clockhand.data.shards import CorpusSettings, prepare
from clockhand.errors import ClockhandError
from clockhand.lab.ablate import ablate, parse_budget, run_ablation, verdict
from clockhand.lab.claim import Verdict
from clockhand.lab.experiment import Lab, compare, verdict_lower, verdict_same
from clockhand.lab.moe import look_at_router
from clockhand.lab.position import small_model
from clockhand.lab.run import all_claims, run
from clockhand.lab.training import gradient_by_layer

TINY = dict(d_model=16, n_layers=1, n_heads=2, n_kv_heads=1, d_ff=24, max_seq_len=128)


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """A lab whose corpus is a page of nonsense, so that nothing has to be read or tokenized for long."""
    folder = tmp_path_factory.mktemp("lab")
    luck = random.Random(0)
    words = ["".join(luck.choices("abcdefghij", k=luck.randint(2, 7))) for _ in range(60)]
    (folder / "text.txt").write_text("\n".join(" ".join(luck.choices(words, k=9)) for _ in range(1500)))
    lab = Lab(folder, scale=0.02)
    settings = CorpusSettings(sources=(str(folder / "text.txt"),), kind="char", val_fraction=0.3)
    lab.corpus = prepare(settings, folder / "corpus")
    return lab


def test_two_samples_of_one_thing_differ_about_as_often_as_promised():
    """The 95 % interval misses 0 in 5 % of A/A comparisons; in 2000 of them within 4 standard errors, 0.5 % each."""
    luck = random.Random(0)
    alarms = sum(
        compare([luck.gauss(2, 0.01) for _ in range(3)], [luck.gauss(2, 0.01) for _ in range(3)]).exceeds_noise
        for _ in range(2000)
    )
    assert 60 <= alarms <= 140


def test_a_real_difference_is_found_and_its_sign_is_right():
    luck = random.Random(0)
    low, high = [luck.gauss(1.9, 0.005) for _ in range(4)], [luck.gauss(2.0, 0.005) for _ in range(4)]
    assert verdict_lower(compare(low, high)) == Verdict.HOLDS
    assert verdict_lower(compare(high, low)) == Verdict.REFUTED


def test_one_pair_says_nothing():
    assert verdict_lower(compare([1.0], [2.0])) == Verdict.UNDECIDED
    assert verdict_same(compare([1.0], [1.0]), margin=0.1) == Verdict.UNDECIDED


def test_equal_means_the_whole_interval_is_within_the_margin():
    assert verdict_same(compare([1.0, 1.001, 0.999], [1.0, 1.0, 1.0]), margin=0.02) == Verdict.HOLDS
    assert verdict_same(compare([1.0, 1.1, 0.9], [1.0, 1.0, 1.0]), margin=0.02) == Verdict.UNDECIDED
    assert verdict_same(compare([1.1, 1.101, 1.099], [1.0, 1.0, 1.0]), margin=0.02) == Verdict.REFUTED


def test_a_training_is_found_again_and_the_same_seed_gives_the_same_loss(lab: Lab, tmp_path: Path):
    said: list[str] = []
    lab.say = said.append
    first = lab.train(TINY, seed=0)
    again = lab.train(TINY, seed=0)
    assert first == again
    assert sum("training" in line for line in said) == 1
    elsewhere = lab.train(TINY, seed=0, folder=tmp_path)
    assert elsewhere.loss == first.loss
    assert lab.train(TINY, seed=1).loss != first.loss
    assert first.model().config.d_model == 16


def test_an_a_a_pair_is_no_difference_though_its_runs_differ(lab: Lab):
    one, other = ablate("norm=rms,rms", lab, repetitions=3, base=TINY)
    assert one.losses != other.losses, "each variant starts from weights of its own"
    assert other.difference is not None
    assert not other.difference.exceeds_noise
    assert verdict(other).en == "no difference beyond the noise"


@pytest.mark.parametrize("equal", ["parameters", "flops"])
def test_the_budget_is_equal_to_one_column_of_the_mlp(lab: Lab, equal: str):
    swiglu, relu = ablate("mlp=swiglu,relu", lab, equal, repetitions=2, base=TINY)
    assert relu.d_ff == 36, "two matrices of one and a half times the width of three"
    column = 2 * TINY["d_model"]
    assert abs(swiglu.parameters - relu.parameters) <= column
    assert abs(swiglu.flops - relu.flops) <= 2 * column


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("mlp", "field=value,value"),
        ("mlp=swiglu", "at least two values"),
        ("mpl=swiglu,relu", "did you mean 'mlp'"),
        ("d_ff=10,20", "adjusted to keep the budget equal"),
        ("n_layers=1,90", "no equal parameters"),
    ],
)
def test_an_ablation_that_cannot_be_is_refused_in_one_line(lab: Lab, setting: str, message: str):
    with pytest.raises(ClockhandError, match=message):
        ablate(setting, lab, repetitions=2, base=TINY)


def test_budgets_are_times():
    assert parse_budget("5m") == 300
    assert parse_budget("90s") == parse_budget("90") == 90
    for wrong in ("", "0", "five", "-1m"):
        with pytest.raises(ClockhandError, match="--budget"):
            parse_budget(wrong)
    with pytest.raises(ClockhandError, match="--budget"):
        run_ablation("mlp=swiglu,relu", budget="soon")


# ── what training claims measure with ──────────────────────────────────────────────────────────────────────────────


def test_the_router_microscope_counts_every_token_once():
    model = small_model(n_experts=4, n_layers=2)
    layers = look_at_router(model, torch.randint(64, (2, 30), generator=torch.Generator().manual_seed(0)))
    assert len(layers) == 2
    for layer in layers:
        assert sum(layer["load"]) == pytest.approx(1)
        assert len(layer["choice"]) == 60
        assert 0 <= layer["entropy"] <= 1.3863
    with pytest.raises(ClockhandError, match="no router"):
        look_at_router(small_model(), torch.zeros(1, 4, dtype=torch.int64))


def test_residuals_carry_the_gradient_and_without_them_it_changes_size():
    carried, lost = gradient_by_layer(True, 0), gradient_by_layer(False, 0)
    assert 0.1 < carried[0] / carried[-1] < 10
    assert not 0.1 < lost[0] / lost[-1] < 10


@pytest.mark.slow
@pytest.mark.parametrize("claim_id", [claim.id for claim in all_claims().values() if claim.cost != "instant"])
def test_a_training_claim_runs_from_end_to_end_at_a_small_scale(lab: Lab, claim_id: str):
    claim = all_claims()[claim_id]
    outcome = run(claim, lab)
    for lang in ("en", "zh"):
        assert claim.paragraph(outcome.verdict, outcome.values, lang)
    assert set(outcome.values) == {expect.key for expect in claim.expects}
    assert outcome.control
