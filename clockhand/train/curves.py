"""The loss curves of a run as a picture, `curves.png` in its folder. Needs matplotlib (extra `lab`)."""

from pathlib import Path

from clockhand.disk import new_file
from clockhand.errors import ClockhandError
from clockhand.train.log import read_log


def draw_curves(out: Path) -> Path:
    """Draws the losses of `out`/log.jsonl over the steps, with the learning rate below; returns the picture.

    Raises `ClockhandError` without matplotlib, or when the disk refuses.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise ClockhandError("no curves.png: it needs matplotlib, pip install 'clockhand[lab]'") from None
    rows = read_log(out / "log.jsonl")
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for key, label, style in (
        ("train/loss", "training", dict(linewidth=0.8, alpha=0.6)),
        ("val/loss", "validation", dict(marker="o", markersize=3)),
    ):
        points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
        if points:
            above.plot(*zip(*points), label=label, **style)
    for number, row in enumerate(row for row in rows if row.get("train/skipped")):
        above.axvline(row["step"], color="red", linewidth=0.5, label="not applied" if number == 0 else None)
    above.set_ylabel("loss, nats per token")
    above.set_title(out.name)
    above.grid(alpha=0.3)
    if above.lines:
        above.legend()
    rates = [(row["step"], row["train/lr"]) for row in rows if "train/lr" in row]
    if rates:
        below.plot(*zip(*rates), linewidth=0.8)
    below.set_ylabel("learning rate")
    below.set_xlabel("step")
    path = out / "curves.png"
    with new_file(path) as unfinished:
        FigureCanvasAgg(figure).print_png(unfinished)
    return path
