"""The learning rate as a function of the step: a linear warm-up, then half a cosine down to the minimum.

    rate
    peak       ╭──╮
             ╱      ╲
           ╱          ╲
    min  ╱              ╰──
         └─warmup─┴─ decay ─┘ steps

Because it is a pure function of the step, resuming needs nothing of it.
"""

import math

from clockhand.train.config import TrainConfig


def learning_rate(step: int, config: TrainConfig) -> float:
    """The rate of the update that takes the run from `step` updates to `step + 1`, for step in [0, steps).

    Warm-up climbs in equal parts, the first already above 0, and reaches the peak at step `warmup_steps`. The last
    step has exactly the minimum. A run no longer than its warm-up ends while still climbing.
    """
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / (config.warmup_steps + 1)
    last = config.steps - 1
    if step >= last:
        return config.min_learning_rate
    done = (step - config.warmup_steps) / (last - config.warmup_steps)  # 0 at the peak, 1 at the last step
    height = 0.5 * (1 + math.cos(math.pi * done))
    return config.min_learning_rate + height * (config.learning_rate - config.min_learning_rate)
