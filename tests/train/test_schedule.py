"""The learning rate over a run, with its edges."""

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from clockhand.train.config import TrainConfig
from clockhand.train.schedule import learning_rate


def rates(**settings) -> list[float]:
    config = TrainConfig(learning_rate=1.0, min_lr_ratio=0.1, **settings)
    return [learning_rate(step, config) for step in range(config.steps)]


def test_the_warm_up_is_a_straight_line_that_starts_above_0_and_reaches_the_peak():
    assert rates(steps=10, warmup_steps=4)[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])


def test_the_decay_is_half_a_cosine():
    assert rates(steps=5, warmup_steps=0)[2] == pytest.approx(0.55)


def test_without_warm_up_the_first_step_has_the_peak():
    assert rates(steps=10, warmup_steps=0)[0] == 1.0


def test_a_run_shorter_than_its_warm_up_ends_while_climbing():
    assert rates(steps=3, warmup_steps=9) == pytest.approx([0.1, 0.2, 0.3])


def test_a_run_of_one_step_has_the_minimum():
    assert rates(steps=1, warmup_steps=0) == [0.1]


@settings(max_examples=100, deadline=None)
@given(steps=st.integers(1, 60), warmup=st.integers(0, 70))
def test_every_rate_is_above_0_climbs_then_falls_and_the_last_is_exactly_the_minimum(steps, warmup):
    rate = rates(steps=steps, warmup_steps=warmup)
    assert all(0 < r <= 1 for r in rate)
    climb, decay = rate[:warmup], rate[warmup:]
    assert climb == sorted(climb)
    assert decay == sorted(decay, reverse=True)
    if warmup < steps:
        assert rate[-1] == 0.1
