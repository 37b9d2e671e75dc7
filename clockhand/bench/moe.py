"""A mixture of experts beside a dense model of as many active parameters: what the choosing costs."""

from clockhand.bench.contest import Report, contest, report
from clockhand.bench.decode import PROMPT, bytes_a_token, ours
from clockhand.bench.measure import alternate, limits
from clockhand.errors import ClockhandError

DENSE = {"minimind-3-moe": "minimind-3"}
"""63,936,768 active parameters beside 63,912,192."""


def dense_twin(preset: str) -> str:
    """The dense preset with as many active parameters. Raises `ClockhandError` where there is none."""
    if preset not in DENSE:
        raise ClockhandError(f"preset = {preset} has no dense twin of as many active parameters: {', '.join(DENSE)}")
    return DENSE[preset]


def run(preset: str, peers: list[str], rounds: int = 5, new_tokens: int = 48) -> Report:
    """There are no peers in this one. Raises `ClockhandError` for a `preset` without a dense twin."""
    twin = dense_twin(preset)
    with contest(preset, max_seq_len=1024) as moe, contest(twin, max_seq_len=1024) as dense:
        walls, contestants, bounds = limits(), {}, {}
        for label, model in ((preset, moe.packed("bf16")), (twin, dense.packed("bf16"))):
            contestants[label] = lambda model=model: ours(model, PROMPT, new_tokens)
            bounds[label] = walls.decode_tok_per_s(bytes_a_token(model))
        return report("decode, experts and dense, bf16", preset, alternate(contestants, rounds), bounds, walls)
