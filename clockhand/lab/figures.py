"""The figures of the report, drawn with matplotlib from our own modules and from what the claims measured.

Each figure is a function of the outcomes at hand; one that needs a training that has not been run is left out. Colours
are a small fixed palette, which the page replaces by variables, so that the same drawing serves light and dark; labels
are words registered with `say`, so that the page can show them in both languages.
"""

import io
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from clockhand.config import ModelConfig
from clockhand.count import kv_bytes, modules, total_parameters
from clockhand.errors import ClockhandError
from clockhand.lab.attention import causal, saturation
from clockhand.lab.claim import Text
from clockhand.lab.counting import built, dense_steps, parameters_of
from clockhand.lab.mlp import activation, slope
from clockhand.lab.norm import scale_response
from clockhand.lab.position import SCALINGS, YARN_EXAMPLE
from clockhand.lab.run import Outcome
from clockhand.model.rope import frequencies, rotate, rotation, yarn_ramp
from clockhand.presets import PRESETS, build

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, FAINT, PAPER = "#1f2328", "#c9ced6", "#fdfdfc"
SERIES = ("#2f6fab", "#c8553d", "#3a8f5c", "#8a5fb0", "#b5852a")
PALETTE = {INK: "--ink", FAINT: "--faint", PAPER: "--paper", **{hue: f"--c{n}" for n, hue in enumerate(SERIES, 1)}}
"""Colour -> the variable that stands for it on the page."""

TRANSLATIONS: dict[str, str] = {}
"""English label -> Chinese, for every label that has been drawn."""

Outcomes = Mapping[str, Outcome]
Draw = Callable[[Outcomes], "Figure | None"]


def say(en: str, zh: str) -> str:
    """The label, remembered in both languages."""
    lines = list(zip(en.split("\n"), zh.split("\n"))) if en.count("\n") == zh.count("\n") else []
    TRANSLATIONS.update([(en, zh), *lines])  # matplotlib writes each line as a text of its own
    return en


def canvas(rows: int = 1, columns: int = 1, height: float = 3.0, **kwargs: Any) -> tuple["Figure", Any]:
    """A figure as wide as a phone is, so that its letters stay readable there. Raises `ClockhandError` without matplotlib."""
    try:
        import matplotlib
        from cycler import cycler
    except ImportError:
        raise ClockhandError("figures need matplotlib: pip install 'clockhand[lab]'") from None
    from matplotlib.figure import Figure

    style: Any = {
        "svg.fonttype": "none", "svg.hashsalt": "clockhand", "font.size": 9, "axes.titlesize": 9, "axes.edgecolor": INK,
        "axes.labelcolor": INK, "text.color": INK, "xtick.color": INK, "ytick.color": INK, "axes.linewidth": 0.7,
        "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.color": FAINT,
        "grid.linewidth": 0.5, "lines.linewidth": 1.6, "legend.frameon": False, "legend.fontsize": 8,
        "axes.prop_cycle": cycler(color=SERIES), "figure.facecolor": "none", "axes.facecolor": "none",
        "axes.unicode_minus": True, "axes.axisbelow": True,
    }  # fmt: skip
    matplotlib.rcParams.update(style)
    figure = Figure(figsize=(5.2, height), layout="constrained")
    return figure, figure.subplots(rows, columns, **kwargs)


# ── chapter A ──────────────────────────────────────────────────────────────────────────────────────────────────────


def scale_invariance(_: Outcomes) -> "Figure":
    figure, axes = canvas()
    sizes = [10 ** (exponent / 8) for exponent in range(-40, 17)]
    for eps, name in ((1e-6, "ε = 1e-6"), (1e-5, "ε = 1e-5")):
        axes.semilogx(sizes, [scale_response(size, 2.0, eps) for size in sizes], label=name)
    axes.axhline(1, color=INK, linewidth=0.7, linestyle=":")
    axes.set_xlabel(say("size of x (root mean square)", "x 的大小（均方根）"))
    axes.set_ylabel(say("|norm(2x)| / |norm(x)|", "|norm(2x)| / |norm(x)|"))
    axes.annotate(say("ε rules: twice in, twice out", "ε 主导：输入加倍，输出也加倍"), (1e-5, 2.03), fontsize=8)
    axes.annotate(say("scale invariant", "尺度不变"), (0.5, 1.04), fontsize=8)
    axes.set_ylim(0.95, 2.14)
    axes.legend(loc="center right")
    return figure


def clock(_: Outcomes) -> "Figure":
    """Eight of the 32 hands of Mini-LLaMA at four positions."""
    theta = frequencies(build("mini-llama"))
    pairs, positions = (0, 4, 8, 12, 16, 20, 26, 31), (0, 1, 10, 100)
    figure, axes = canvas(2, 4, height=3.1)
    for axis, pair in zip(axes.flat, pairs):
        axis.add_patch(_circle())
        for position, hue in zip(positions, SERIES):
            angle = position * float(theta[pair])
            axis.plot([0, 0.9 * math.sin(angle)], [0, 0.9 * math.cos(angle)], color=hue, label=f"{position}")
        axis.set_title(f"{pair + 1}: λ = {_short(2 * math.pi / float(theta[pair]))}")
        axis.set(xlim=(-1.08, 1.08), ylim=(-1.08, 1.08), aspect="equal")
        axis.axis("off")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, title=say("position", "位置"))
    return figure


def _circle() -> Any:
    from matplotlib.patches import Circle

    return Circle((0, 0), 1, fill=False, edgecolor=FAINT, linewidth=1)


def _short(number: float) -> str:
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}"


def wavelengths(_: Outcomes) -> "Figure":
    figure, axes = canvas()
    for name, mark, hue in (("minimind-3", ".", SERIES[1]), ("mini-llama", "o", SERIES[0])):
        theta = frequencies(build(name))
        turns = (2 * math.pi / theta).tolist()
        axes.semilogy(range(1, len(theta) + 1), turns, mark, label=name, markersize=4, color=hue)
    axes.axhline(1024, color=INK, linestyle=":", linewidth=0.8)
    axes.annotate(say("1024 tokens", "1024 个 token"), (1, 1300), fontsize=8)
    axes.plot([32], [50_000], "x", color=INK, markersize=7, label=say("the chapter's 50,000", "章节给出的 50,000"))
    axes.set_xlabel(say("plane", "平面"))
    axes.set_ylabel(say("wavelength in tokens", "波长（token 数）"))
    axes.legend()
    return figure


def score_distance(_: Outcomes) -> "Figure":
    """q·k for equal q and k of ones: the sum of the cosines, the envelope of what distance does."""
    figure, axes = canvas()
    for name in ("mini-llama", "minimind-3"):
        config = build(name)
        distances = torch.arange(0, 1025)
        ones = torch.ones(1, len(distances), 1, config.head_dim, dtype=torch.float64)
        cos, sin = rotation(config, distances[None], dtype=torch.float64)
        scores = (rotate(ones, cos, sin, config.rope_layout) * ones).mean(-1)[0, :, 0]
        axes.plot(distances.tolist(), scores.tolist(), label=f"{name}, θ = {config.rope_theta:.0e}", linewidth=0.9)
    axes.set_xlabel(say("distance m − n in tokens", "距离 m − n（token 数）"))
    axes.set_ylabel(say("score, 1 at distance 0", "得分，距离 0 时为 1"))
    axes.legend()
    return figure


GROUPS = (
    (say("embedding", "词嵌入"), ("token_embedding", "position_embedding")),
    (say("attention", "注意力"), ("blocks.attention",)),
    (say("MLP or experts", "MLP 或专家"), ("blocks.mlp",)),
    (say("untied head", "独立输出头"), ("lm_head",)),
)


def treemap(_: Outcomes) -> "Figure":
    figure, axes = canvas(5, 3, height=6.6)
    for axis, name in zip(axes.flat, PRESETS):
        config = build(name)
        sizes = {module.path: module.parameters for module in modules(config)}
        parts = [sum(sizes.get(path, 0) for path in paths) for _, paths in GROUPS]
        total = total_parameters(config)
        for (x, y, width, height), size, hue in zip(squarified([part / total for part in parts]), parts, SERIES):
            axis.add_patch(_tile(x, y, width, height, hue))
            if width > 0.25 and height > 0.16:
                share = f"{100 * size / total:.0f} %"
                axis.text(x + width / 2, y + height / 2, share, ha="center", va="center", fontsize=7.5, color=PAPER)
        axis.set_title(f"{name}\n{_millions(total)}", fontsize=8)
        axis.set(xlim=(0, 1), ylim=(0, 1))
        axis.axis("off")
    for axis in axes.flat[len(PRESETS) :]:
        axis.axis("off")
    handles = [_tile(0, 0, 1, 1, hue) for hue in SERIES[: len(GROUPS)]]
    figure.legend(handles, [name for name, _paths in GROUPS], loc="outside lower center", ncols=4)
    return figure


def _tile(x: float, y: float, width: float, height: float, hue: str) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x, y), width, height, facecolor=hue, edgecolor=PAPER, linewidth=1)


def squarified(shares: list[float]) -> list[tuple[float, float, float, float]]:
    """Tiles (x, y, width, height) in the unit square with these areas, the largest share cut off first each time."""
    tiles: list[tuple[float, float, float, float]] = [(0.0, 0.0, 0.0, 0.0)] * len(shares)
    x, y, width, height = 0.0, 0.0, 1.0, 1.0
    for index in sorted(range(len(shares)), key=lambda i: -shares[i]):
        area = width * height
        cut = min(shares[index] / area, 1.0) if area > 1e-9 else 0.0
        if width >= height:
            tiles[index] = (x, y, width * cut, height)
            x, width = x + width * cut, width * (1 - cut)
        else:
            tiles[index] = (x, y, width, height * cut)
            y, height = y + height * cut, height * (1 - cut)
    return tiles


def _millions(count: float) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.1f} M"


def activations(_: Outcomes) -> "Figure":
    figure, (left, right) = canvas(1, 2, height=2.7)
    x = torch.linspace(-5, 3, 801, dtype=torch.float64)
    for name, label in (("swiglu", "SiLU"), ("gelu", "GELU"), ("relu", "ReLU")):
        left.plot(x.tolist(), activation(name, x).detach().tolist(), label=label)
        right.plot(x.tolist(), slope(name, x).tolist(), label=label)
    left.set_title(say("the bend", "激活函数"))
    right.set_title(say("its slope", "导数"))
    left.set_ylim(-0.5, 3)
    left.legend()
    return figure


def saturation_curves(_: Outcomes) -> "Figure":
    figure, (left, right) = canvas(1, 2, height=2.7)
    sizes = (1, 2, 4, 8, 16, 32, 64, 128)
    for scaled, label in ((False, say("without √d", "不除以 √d")), (True, say("with √d", "除以 √d"))):
        found = [saturation(size, scaled, (0,)) for size in sizes]
        left.semilogx(sizes, [each["peak"] for each in found], ".-", label=label, base=2)
        right.semilogx(sizes, [each["slope"] for each in found], ".-", label=label, base=2)
    for axis in (left, right):
        axis.set_xticks(sizes, [str(size) for size in sizes])
        axis.set_xlabel(say("head_dim d", "每头维度 d"))
        axis.set_ylim(0, 1.02)
    left.set_title(say("largest of 128 weights", "128 个权重中的最大者"))
    right.set_title(say("gradient: Σ p(1 − p)", "梯度：Σ p(1 − p)"))
    left.legend()
    return figure


def mask(_: Outcomes) -> "Figure":
    figure, axes = canvas(height=2.6)
    seen = causal(5).mask[0].tolist()
    for row, line in enumerate(seen):
        for column, visible in enumerate(line):
            axes.add_patch(_tile(column, 4 - row, 1, 1, SERIES[0] if visible else FAINT))
            axes.text(column + 0.5, 4.5 - row, "0" if visible else "−∞", ha="center", va="center",
                      color=PAPER if visible else INK)  # fmt: skip
    axes.set(xlim=(0, 5), ylim=(0, 5), aspect="equal")
    axes.set_xticks([n + 0.5 for n in range(5)], [str(n) for n in range(5)])
    axes.set_yticks([4.5 - n for n in range(5)], [str(n) for n in range(5)])
    axes.set_xlabel(say("key at position s", "key 的位置 s"))
    axes.set_ylabel(say("query at position p", "query 的位置 p"))
    axes.grid(False)
    return figure


def kv_memory(_: Outcomes) -> "Figure":
    figure, (left, right) = canvas(1, 2, height=2.8)
    for axis, name, heads in ((left, "mini-llama", (8, 2, 1)), (right, "minimind-3", (8, 4, 1))):
        contexts = [2**n for n in range(8, 16)]
        for count, kind in zip(heads, ("MHA", "GQA", "MQA")):
            config = build(name, n_kv_heads=count)
            axis.loglog(contexts, [kv_bytes(config, n) / 2**20 for n in contexts], label=f"{kind}: {count}", base=2)
        weights = 2 * total_parameters(build(name)) / 2**20
        axis.axhline(weights, color=INK, linestyle=":", linewidth=0.8)
        axis.text(contexts[0], weights * 1.15, say("its weights", "模型权重"), fontsize=8)
        axis.set_title(name)
        axis.set_xticks(contexts[::2], [f"{n // 1024}k" if n >= 1024 else str(n) for n in contexts[::2]])
        axis.set_yticks([1, 8, 64, 512], ["1", "8", "64", "512"])
        axis.set_xlabel(say("tokens of context", "上下文 token 数"))
        axis.legend(title=say("KV heads", "KV 头数"), title_fontsize=8)
    left.set_ylabel(say("MiB of cache in bf16", "bf16 缓存（MiB）"))
    return figure


def gqa(outcomes: Outcomes) -> "Figure | None":
    if "A27" not in outcomes:
        return None
    data = outcomes["A27"].data
    figure, (left, right) = canvas(1, 2, height=2.7)
    names = list(data["losses"])
    _dots(left, data["losses"], names)
    left.set_title(say("validation loss, each seed", "验证损失，每个种子"))
    seconds = [1000 * data["seconds"][name] for name in names]
    right.bar(names, seconds, color=SERIES[: len(names)], width=0.6)
    right.set_title(say("decode step in ms", "一步解码（毫秒）"))
    return figure


def _dots(axes: "Axes", groups: Mapping[str, list[float]], names: list[str]) -> None:
    """Every value a dot, every mean a bar: what small samples deserve."""
    for place, name in enumerate(names):
        values = groups[name]
        axes.plot([place] * len(values), values, "o", color=SERIES[place % len(SERIES)], markersize=5, alpha=0.9)
        axes.plot([place - 0.22, place + 0.22], [sum(values) / len(values)] * 2, color=INK, linewidth=1.4)
    axes.set_xticks(range(len(names)), names)
    axes.set_xlim(-0.5, len(names) - 0.5)


def gradients(outcomes: Outcomes) -> "Figure | None":
    if "A23" not in outcomes:
        return None
    figure, axes = canvas()
    labels = {"with": say("with residuals", "有残差"), "without": say("without", "没有残差")}
    for hue, (name, curves) in zip(SERIES, outcomes["A23"].data["curves"].items()):
        for number, curve in enumerate(curves):
            axes.semilogy(range(1, len(curve) + 1), curve, color=hue, label=labels[name] if number == 0 else None)
    axes.set_xlabel(say("layer", "层"))
    axes.set_ylabel(say("gradient arriving there", "到达该层的梯度"))
    axes.legend()
    return figure


# ── chapter B ──────────────────────────────────────────────────────────────────────────────────────────────────────


def yarn(_: Outcomes) -> "Figure":
    figure, (left, right) = canvas(1, 2, height=2.8)
    sizes: dict[str, Any] = dict(vocab_size=8, d_model=96, n_layers=1, n_heads=1, head_dim=96, d_ff=8)
    plain = frequencies(ModelConfig(**sizes, rope_theta=1e6))
    pairs = range(len(plain))
    stretched = {
        "YaRN": frequencies(YARN_EXAMPLE),
        "linear": frequencies(ModelConfig(**sizes, rope_theta=1e6, rope_scaling="linear", rope_factor=16.0)),
        "NTK": frequencies(ModelConfig(**sizes, rope_theta=1e6, rope_scaling="ntk", rope_factor=16.0)),
        say("base × 16", "底数 × 16"): frequencies(ModelConfig(**sizes, rope_theta=16e6)),
    }
    for name, theta in stretched.items():
        left.semilogy(pairs, (plain / theta).tolist(), label=name, base=2)
    left.set_yticks([1, 2, 4, 8, 16], ["1", "2", "4", "8", "16"])
    left.set_title(say("times slower", "慢了多少倍"))
    left.legend()
    right.plot(pairs, yarn_ramp(YARN_EXAMPLE).tolist())
    right.set_title(say("YaRN's ramp", "YaRN 的斜坡"))
    right.text(0, 0.04, say("kept", "保持"), fontsize=8)
    right.text(25, 0.93, say("divided by 16", "除以 16"), fontsize=8)
    for axis in (left, right):
        axis.set_xlabel(say("pair", "分量对"))
    return figure


def lengths(outcomes: Outcomes) -> "Figure | None":
    if "B07" not in outcomes:
        return None
    data = outcomes["B07"].data
    figure, axes = canvas(height=3.2)
    for name, hue in zip(SCALINGS, (INK, *SERIES)):
        rows = data["curves"][name]
        mean = [math.exp(sum(column) / len(column)) for column in zip(*rows)]
        low = [math.exp(min(column)) for column in zip(*rows)]
        high = [math.exp(max(column)) for column in zip(*rows)]
        axes.plot(data["lengths"], mean, ".-", color=hue, label=name)
        axes.fill_between(data["lengths"], low, high, color=hue, alpha=0.12, linewidth=0)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xticks(data["lengths"], [str(length) for length in data["lengths"]])
    low_end, high_end = axes.get_ylim()
    ticks = [tick for tick in (2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128) if low_end <= tick <= high_end]
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.axvline(data["trained"], color=INK, linestyle=":", linewidth=0.8)
    axes.annotate(say("trained length", "训练长度"), (data["trained"] * 1.05, high_end * 0.9), fontsize=8)
    axes.set_xlabel(say("context in characters", "上下文（字符数）"))
    axes.set_ylabel(say("perplexity", "困惑度"))
    axes.legend()
    return figure


def norm_position(outcomes: Outcomes) -> "Figure | None":
    if "B08" not in outcomes:
        return None
    data = outcomes["B08"].data
    figure, (left, right) = canvas(1, 2, height=2.9)
    labels = {
        "pre": say("pre", "Pre"),
        "post": say("post", "Post"),
        "pre, warm-up": say("pre, warm-up", "Pre，预热"),
        "post, warm-up": say("post, warm-up", "Post，预热"),
    }
    for name, curve in data["curves"].items():
        dashed = "--" if "warm-up" in name else "-"
        hue = SERIES[0] if name.startswith("pre") else SERIES[1]
        left.plot(curve, dashed, color=hue, label=labels[name], linewidth=1.1)
        right.semilogy(data["gradients"][name], dashed, color=hue, linewidth=0.9)
    left.set_title(say("training loss", "训练损失"))
    right.set_title(say("gradient norm", "梯度范数"))
    for axis in (left, right):
        axis.set_xlabel(say("step", "步"))
    left.legend()
    return figure


def gate_value(outcomes: Outcomes) -> "Figure | None":
    if "B12" not in outcomes:
        return None
    data = outcomes["B12"].data
    figure, axes = canvas(height=2.6)
    names = {
        "relu_same_width": say("ReLU, same width", "ReLU，同宽"),
        "relu_equal": say("ReLU, equal parameters", "ReLU，同参数量"),
        "swiglu": "SwiGLU",
    }
    _dots(axes, {label: data[name] for name, label in names.items()}, list(names.values()))
    axes.set_ylabel(say("validation loss", "验证损失"))
    return figure


def waterfall(_: Outcomes) -> "Figure":
    """75.7M to 63.9M to 198.4M, and the 226.5M beside it."""
    figure, axes = canvas(height=3.4)
    textbook, narrower, dense = (total for _what, total in dense_steps())
    moe = built(build("minimind-3-moe"))
    total = parameters_of(moe)
    one_mlp = total_of_mlps = dense_mlps()
    routers = sum(
        module.parameters for module in modules(build("minimind-3-moe")) if module.path == "blocks.mlp.router"
    )
    steps = [
        (say("ModelArgs", "ModelArgs"), 0, textbook),
        (say("width\n2432", "宽\n2432"), textbook, narrower),
        (say("q, k\nnorms", "q、k\n归一化"), narrower, dense),
        ("MiniMind-3", 0, dense),
        (say("3 more\nexperts", "多 3 个\n专家"), dense, dense + 3 * one_mlp),
        (say("routers", "路由器"), total - routers, total),
        ("MoE", 0, total),
        (say("experts\nat 3072", "专家\n宽 3072"), 0, 4 * total_of_mlps * 3072 // 2432),
    ]
    for place, (_name, start, end) in enumerate(steps):
        whole, hue = start == 0, SERIES[0]
        if not whole:
            hue = SERIES[1] if end < start else SERIES[2]
        if place == len(steps) - 1:
            hue = FAINT
        axes.bar(place, (end - start) / 1e6, bottom=start / 1e6, color=hue, width=0.7)
        change = f"{end / 1e6:.1f}" if whole else _signed(end - start)
        axes.text(place, max(start, end) / 1e6 + 3, change, ha="center", fontsize=8)
    axes.set_xticks(range(len(steps)), [name for name, _start, _end in steps], fontsize=7.5)
    axes.set_ylabel(say("million parameters", "百万参数"))
    axes.set_ylim(0, 250)
    axes.grid(axis="x", visible=False)
    return figure


def dense_mlps() -> int:
    """Parameters of all MLPs of MiniMind-3."""
    return next(module.parameters for module in modules(build("minimind-3")) if module.path == "blocks.mlp")


def _signed(change: int) -> str:
    size = f"{abs(change) / 1e6:.1f}" if abs(change) >= 1e5 else f"{abs(change):,}"
    return ("+" if change > 0 else "−") + size


ROUTER_KINDS = {
    "before": say("before training", "训练之前"),
    "balanced": say("balance loss", "有均衡损失"),
    "untrained router": say("none, k = 1", "无，k = 1"),
    "free": say("none, weights kept", "无，保留权重"),
}


def router(outcomes: Outcomes) -> "Figure | None":
    if "B20" not in outcomes:
        return None
    data = outcomes["B20"].data
    figure, axes = canvas(1, 4, height=2.6, sharey=True)
    for axis, (name, label) in zip(axes.flat, ROUTER_KINDS.items()):
        layers = data[name]["layers"]
        for expert, hue in zip(range(len(layers[0]["load"])), SERIES):
            below = [sum(layer["load"][:expert]) for layer in layers]
            axis.bar(
                range(len(layers)), [layer["load"][expert] for layer in layers], bottom=below, color=hue, width=0.8
            )
        axis.set_title(label, fontsize=7.5)
        axis.set_xticks(range(len(layers)), [f"{layer['entropy']:.2f}" for layer in layers], fontsize=6)
        axis.grid(visible=False)
    axes.flat[0].set_ylabel(say("share of tokens per expert", "各专家的 token 比例"))
    figure.supxlabel(
        say("four layers, with the entropy of each (even: 1.39)", "四层，下标为各层的熵（均匀时 1.39）"), fontsize=8
    )
    return figure


def experts_text(outcomes: Outcomes) -> "Figure | None":
    """The same characters in two models, coloured by the expert they go to in the layer that spreads them most."""
    if "B20" not in outcomes:
        return None
    views = {
        say("a router trained by the balance loss", "由均衡损失训练的路由器"): outcomes["B20"].data["balanced"],
        say("a router trained by the language loss", "由语言损失训练的路由器"): outcomes["B20"].data["free"],
    }
    figure, axes = canvas(2, 1, height=3.6)
    for axis, (title, view) in zip(axes.flat, views.items()):
        layer = max(view["layers"], key=lambda layer: layer["entropy"])
        for place, (piece, expert) in enumerate(zip(view["pieces"][:200], layer["choice"])):
            row, column = divmod(place, 40)
            axis.add_patch(_tile(column, -row, 1, 1, SERIES[expert]))
            letter = {"\n": "↵", " ": "·"}.get(piece, piece)
            axis.text(
                column + 0.5, 0.45 - row, letter, ha="center", va="center", fontsize=7, color=PAPER, family="monospace"
            )
        axis.set(xlim=(0, 40), ylim=(-4, 1))
        axis.set_title(title)
        axis.axis("off")
    return figure


FIGURES: dict[str, tuple[Draw, Text]] = {
    "clock": (clock, Text("Eight of Mini-LLaMA's 32 hands at positions 0, 1, 10 and 100; λ is how many tokens one turn takes.", "Mini-LLaMA 的 32 根指针中的八根，位置 0、1、10、100；λ 是转一圈需要的 token 数。")),
    "scale_invariance": (scale_invariance, Text("Scale invariance and where it ends: for tiny inputs ε is most of the mean square, and the norm lets the scale through.", "尺度不变性及其终点：输入极小时，均方里主要是 ε，归一化便不再抹去尺度。")),
    "wavelengths": (wavelengths, Text("How many tokens each hand takes for one turn. MiniMind-3's larger base and wider heads cancel out: its hands are Mini-LLaMA's and sixteen slower ones. The cross is the chapter's value for plane 32.", "每根指针转一圈要多少 token。MiniMind-3 的底数更大、头更宽，两者恰好抵消：它的指针就是 Mini-LLaMA 的那些，再加十六根更慢的。叉号是章节给第 32 平面的值。")),
    "score_distance": (score_distance, Text("What distance alone does to the score of two equal vectors: all hands agree at 0 and drift apart.", "仅由距离引起的得分变化（两个相同的向量）：距离为 0 时所有指针一致，随后逐渐散开。")),
    "treemap": (treemap, Text("Where the parameters are, in every preset. Each square is a whole model.", "每个预设的参数分布。每个方块是一个完整的模型。")),
    "activations": (activations, Text("The three bends inside our MLPs, and their slopes by autograd.", "本项目 MLP 中的三种激活函数，以及 autograd 求得的导数。")),
    "saturation": (saturation_curves, Text("Without √d the largest weight grows with the width of a head and the gradient shrinks, but not to zero.", "不除以 √d，最大权重随每头维度增大，梯度随之缩小，但不为零。")),
    "mask": (mask, Text("The causal mask of five tokens, from the rule s ≤ p.", "五个 token 的因果掩码，由规则 s ≤ p 得到。")),
    "kv_memory": (kv_memory, Text("Memory of the cache against context; the dotted line is the model itself.", "缓存占用随上下文增长；虚线是模型本身的大小。")),
    "gqa": (gqa, Text("What sharing KV heads costs and buys: loss of small models (bars are means), and time of a decode step.", "共享 KV 头的得失：小模型的损失（横线为均值）与一步解码的时间。")),
    "gradients": (gradients, Text("The gradient that arrives at each layer of an untrained model of twelve; one line a seed.", "十二层未训练模型中到达每一层的梯度；每条线一个种子。")),
    "yarn": (yarn, Text("How much slower each hand turns under four rules that all stretch 2048 to 32,768 tokens, and the ramp YaRN blends by.", "把 2048 扩展到 32,768 的四种规则下，每根指针慢了多少倍；右为 YaRN 混合用的斜坡。")),
    "lengths": (lengths, Text("Perplexity on the same characters, read with more and more context. The band spans the seeds.", "在同一批字符上，随上下文变长的困惑度。色带为各种子的范围。")),
    "norm_position": (norm_position, Text("Pre- and post-norm, twelve layers, the same learning rate; dashed with a warm-up.", "Pre-Norm 与 Post-Norm，十二层，学习率相同；虚线为加了预热。")),
    "gate_value": (gate_value, Text("Is the gate worth its parameters? One dot a seed, bars are means.", "门控值不值它的参数？每点一个种子，横线为均值。")),
    "router": (router, Text("Where the tokens go, layer by layer.", "各层的 token 去向。")),
    "experts_text": (experts_text, Text("Characters coloured by the expert they go to, each model in the layer that spreads them most. The balance loss makes the router even, the language loss makes it choose.", "按所去专家着色的字符，各取负载最分散的一层。均衡损失让路由器摊得均匀，语言损失让它学会挑选。")),
    "waterfall": (waterfall, Text("The two riddles: from the chapter's sizes (75.7M) to MiniMind-3 (63.9M) to its MoE (198.4M). The 226.5M are experts of another width.", "两个谜题：从章节的尺寸（75.7M）到 MiniMind-3（63.9M），再到 MoE（198.4M）。226.5M 是另一种宽度的专家。")),
}  # fmt: skip
"""Every figure by name: how it is drawn, and its caption."""


def draw(name: str, outcomes: Outcomes) -> "Figure | None":
    """The named figure, or None where the outcomes it needs are not there."""
    return FIGURES[name][0](outcomes)


def as_svg(figure: "Figure") -> str:
    """The figure as an SVG element, with no date in it: the same drawing is the same text."""
    target = io.StringIO()
    figure.savefig(target, format="svg", metadata={"Date": None})
    svg = target.getvalue()
    return svg[svg.index("<svg") :]


def write_figures(folder: Path, outcomes: Outcomes) -> dict[str, str]:
    """Writes every figure that can be drawn as SVG and PNG into `folder`; returns the SVG texts by name."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {}
    for name in FIGURES:
        figure = draw(name, outcomes)
        if figure is not None:
            drawn[name] = as_svg(figure)
            (folder / f"{name}.svg").write_text(drawn[name], encoding="utf-8")
            figure.savefig(folder / f"{name}.png", dpi=150, facecolor=PAPER)
    return drawn
