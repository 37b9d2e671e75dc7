"""TrainConfig: what is settled, and what is refused."""

import pytest

from clockhand.config import from_dict, parse_settings
from clockhand.errors import ClockhandError
from clockhand.train.config import TrainConfig


def test_what_is_left_open_follows_from_the_length_of_the_run():
    config = TrainConfig(steps=200)
    assert (config.warmup_steps, config.eval_every, config.save_every, config.sample_every) == (20, 20, 50, 50)


def test_the_shortest_run_is_settled_too():
    config = TrainConfig(steps=1)
    assert (config.warmup_steps, config.eval_every, config.save_every, config.sample_every) == (0, 1, 1, 1)


def test_0_stays_0():
    config = TrainConfig(steps=200, warmup_steps=0, eval_every=0, save_every=0, sample_every=0)
    assert (config.warmup_steps, config.eval_every, config.save_every, config.sample_every) == (0, 0, 0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("steps", 0), ("batch_size", -1), ("accumulate", 0), ("learning_rate", 0.0), ("min_lr_ratio", 1.5),
     ("warmup_steps", -2), ("beta2", 1.0), ("clip_norm", -1.0), ("dtype", "float16"), ("seed", -1)],
)  # fmt: skip
def test_what_cannot_be_is_refused_with_its_name_and_value(name, value):
    with pytest.raises(ClockhandError, match=f"^{name} = {value!r} must be"):
        TrainConfig(**{name: value})


def test_settings_are_read_and_an_unknown_one_is_refused_with_the_nearest():
    assert parse_settings(TrainConfig, ["learning_rate=3e-4", "steps=5"]) == {"learning_rate": 3e-4, "steps": 5}
    with pytest.raises(ClockhandError, match="did you mean 'learning_rate'"):
        from_dict(TrainConfig, {"learningrate": 1e-3}, "--set")


def test_fp16_is_refused_with_the_reason():
    with pytest.raises(ClockhandError, match=r"bfloat16; fp16 would need its loss scaled"):
        TrainConfig(dtype="float16")
