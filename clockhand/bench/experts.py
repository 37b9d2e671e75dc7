"""What experts cost in training: steps of a mixture beside a dense model of as many active parameters, in one run.

The same model with twice as many experts takes part as well: of their number only the memory should be felt.
"""

from dataclasses import replace

from clockhand.bench.moe import dense_twin
from clockhand.bench.train import BATCH_SIZE, SEQ_LEN, TrainReport, Work, as_settled, measure, ours
from clockhand.presets import build


def run(
    preset: str, peers: list[str], rounds: int = 5, batch_size: int = BATCH_SIZE, seq_len: int = SEQ_LEN
) -> TrainReport:
    """In bf16, compiled where that is possible; there are no peers in this one.

    Raises `ClockhandError` for a `preset` without a dense twin.
    """
    dense, mixture = dense_twin(preset), build(preset)
    config = as_settled("bfloat16", batch_size, seq_len)
    twice = 2 * mixture.n_experts
    work: Work = {
        dense: (ours, build(dense), config),
        f"{preset}, {mixture.n_experts} experts": (ours, mixture, config),
        f"{preset}, {twice} experts": (ours, replace(mixture, n_experts=twice), config),
    }
    return measure(preset, work, rounds, first="dense")
