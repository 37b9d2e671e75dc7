"""What counts as trouble, and that it is judged from the log alone."""

import json
import math

import pytest

from clockhand.train.spikes import FEWEST, WINDOW, History


def row(step: int, loss: float = 2.0, norm: float = 1.0, **more) -> dict:
    # A little noise, the same every time: a deviation of 0 would make anything a spike.
    return {"step": step, "train/loss": loss + step % 7 * 0.01, "train/grad_norm": norm + step % 5 * 0.02, **more}


def usual(steps: int = WINDOW) -> list[dict]:
    return [row(step) for step in range(steps)]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_trouble_from_the_first_step_on(value):
    assert History([]).trouble(value, 1.0) == f"loss {value}"
    assert History([]).trouble(2.0, value) == f"gradient norm {value}"


@pytest.mark.parametrize(
    ("loss", "norm", "words"), [(4.2, 1.0, "loss 4.2, usually 2.03"), (2.0, 9.0, "gradient norm 9")]
)
def test_far_above_the_recent_steps_is_a_spike(loss, norm, words):
    assert History(usual()).trouble(loss, norm).startswith(words)


def test_neither_a_usual_step_nor_a_far_better_one_is_trouble():
    history = History(usual())
    assert history.trouble(2.3, 1.5) == ""
    assert history.trouble(0.1, 0.01) == ""


def test_before_there_is_a_history_nothing_finite_is_a_spike():
    assert History(usual(FEWEST - 1)).trouble(100.0, 100.0) == ""
    assert History(usual(FEWEST)).trouble(100.0, 100.0) != ""


def test_in_a_noisy_stretch_twice_the_median_is_no_spike():
    noisy = [row(step, norm=1.0 + step % 4) for step in range(WINDOW)]
    assert History(noisy).trouble(2.0, 6.0) == ""


def test_one_spike_does_not_hide_the_next():
    assert History([*usual(), row(WINDOW, norm=50.0)]).trouble(2.0, 40.0) != ""


def test_a_history_out_of_the_log_judges_as_the_one_that_lived_through_it():
    lived, rows = History([]), []
    for step in range(3 * WINDOW):
        rows.append(row(step, norm=math.nan if step == 100 else 1.0 + step / 64))
        if step in (100, 190, 191):
            rows[-1] |= {"train/trouble": "gradient norm nan", "train/skipped": True}
        lived.add(rows[-1])
    logged = [json.loads(json.dumps({k: None if v != v else v for k, v in each.items()})) for each in rows]
    resumed = History(logged)
    assert resumed.skipped_in_a_row == lived.skipped_in_a_row == 2
    for value in (3.0, 5.9, 6.0, 6.1, 8.0, 20.0):
        assert resumed.trouble(2.0, value) == lived.trouble(2.0, value)
    assert [each.is_first(200) for each in (resumed, lived)] == [False, False]
    assert [each.is_first(300) for each in (resumed, lived)] == [True, True]


def test_a_row_of_an_evaluation_at_the_end_and_a_step_without_targets_say_nothing_of_what_is_usual():
    history = History([*usual(), {"step": 64, "val/loss": 1.0}, row(65, loss=0.0, norm=0.0) | {"train/grad_norm": 0}])
    assert history.trouble(4.2, 1.0).endswith("usually 2.03")
