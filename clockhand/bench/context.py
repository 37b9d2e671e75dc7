"""What a token costs as the text behind it grows, up to 8,192 tokens: the bytes of the cache at the memory's speed?"""

import statistics
from pathlib import Path

import torch

from clockhand.bench.contest import Report, contest, report
from clockhand.bench.measure import Measured, limits, seconds
from clockhand.disk import new_file
from clockhand.errors import ClockhandError
from clockhand.infer.generate import stream
from clockhand.infer.settings import GREEDY
from clockhand.model.transformer import Transformer

LENGTHS = (64, 1024, 2048, 4096, 8192)
BEGINNINGS = (64, 1024)
"""From where the growth to the longest is told: a step of the first is so short that its spread is large."""


def run(preset: str, peers: list[str], rounds: int = 3, steps: int = 8) -> Report:
    """Milliseconds a token in fp32; the bounds are the shortest length's and the bytes of the cache beyond it.

    The last results are how often what a token costs more at the longest contains what the bytes in between cost.
    """
    with contest(preset, max_seq_len=LENGTHS[-1] + 64) as work:
        walls, config = limits(), work.config
        times: dict[str, list[float]] = {f"at {length:,}": [] for length in LENGTHS}
        for _ in range(rounds):
            for length in LENGTHS:
                times[f"at {length:,}"].append(ms_a_token(work.model, length, steps))
        results = {name: Measured(tuple(each), "ms") for name, each in times.items()}
        bytes_a_token = 2 * config.n_layers * config.n_kv_heads * config.head_dim * torch.float32.itemsize
        shortest = min(each.median for each in results.values())
        bounds = {
            f"at {length:,}": shortest + 1000 * bytes_a_token * (length - LENGTHS[0]) / (walls.read_gb_per_s * 1e9)
            for length in LENGTHS[1:]
        }
        results |= growth(times, bytes_a_token / walls.read_gb_per_s / 1e6)
        return report("a decode step against context length", preset, results, bounds, walls)


def ms_a_token(model: Transformer, behind: int, steps: int) -> float:
    """Of the tokens of `stream` after the first one, which reads the prompt; their median."""
    pieces = stream(model, [[1] * (behind - 1)], GREEDY, max_new_tokens=steps + 1)
    next(pieces)
    return 1000 * statistics.median(seconds(lambda: next(pieces)) for _ in range(steps))


def growth(times: dict[str, list[float]], ms_a_token: float) -> dict[str, Measured]:
    """From every beginning to the longest: milliseconds more over those that reading the tokens between takes."""
    longest, results = LENGTHS[-1], {}
    for begin in BEGINNINGS:
        more = [late - early for early, late in zip(times[f"at {begin:,}"], times[f"at {longest:,}"])]
        bytes_cost = ms_a_token * (longest - begin)
        results[f"{begin:,} to {longest:,}"] = Measured(tuple(each / bytes_cost for each in more), "× its bytes")
    return results


def draw(report: Report, path: Path) -> None:
    """The report as a picture, a PNG. Raises `ClockhandError` without matplotlib, or when the disk refuses."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ClockhandError(f"no {path}: it needs matplotlib, pip install 'clockhand[lab]'") from None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for label, values in (
        ("measured", {name: each.median for name, each in report.results.items()}),
        ("what the bytes of the cache allow", report.bounds),
    ):
        points = [
            (int(name.removeprefix("at ").replace(",", "")), value)
            for name, value in values.items()
            if name.startswith("at ")
        ]
        axes.plot(*zip(*points), marker="o", label=label)
    axes.set_title(f"{report.work} · {report.preset}")
    axes.set_xlabel("tokens behind")
    axes.set_ylabel("ms a token")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    with new_file(path) as unfinished:
        FigureCanvasAgg(figure).print_png(unfinished)
