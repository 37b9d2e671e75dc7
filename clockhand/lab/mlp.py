"""Claims about the feed-forward part: A12 to A14, B12.

The gate of SwiGLU is SiLU(x) = x·σ(x). It is smooth and never quite dead, but it is no valve between 0 and 1. Whether the
extra projection is worth its parameters is a question for training at equal parameters.
"""

from typing import Any

import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.count import modules
from clockhand.lab.claim import ARITHMETIC, BY_DEFINITION, FLOAT64, SIX_DIGITS, Claim, Expect, Measured, Text, Verdict
from clockhand.lab.experiment import BASE, Lab, Trained, blocks_of, compare, verdict_lower
from clockhand.model.mlp import MLP, SwiGLU
from clockhand.presets import build


def activation(name: str, x: Tensor) -> Tensor:
    """The bend inside our own MLPs, read off a model of width 1 whose other projections are set to 1: x (N,) -> (N,)."""
    config = ModelConfig(vocab_size=1, d_model=1, n_layers=1, n_heads=1, head_dim=2, d_ff=1, mlp=name, mlp_bias=True)
    mlp = (SwiGLU if name == "swiglu" else MLP)(config).double()
    with torch.no_grad():
        for parameter_name, parameter in mlp.named_parameters():
            parameter.fill_(1.0 if parameter_name.endswith("weight") else 0.0)
        if isinstance(mlp, SwiGLU):  # the content pipe passes a constant 1
            mlp.up_proj.weight.fill_(0.0)
            mlp.up_proj.bias.fill_(1.0)
    return mlp(x[:, None])[:, 0]


def slope(name: str, x: Tensor) -> Tensor:
    """The derivative of `activation`, by autograd."""
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(activation(name, x).sum(), x)
    return gradient


def _peak(values: Tensor, x: Tensor) -> tuple[float, float]:
    """Where a smooth curve on an even grid is highest and how high, by a parabola through the top three points."""
    i = int(values.argmax())
    left, top, right = values[i - 1 : i + 2].tolist()
    shift = 0.5 * (left - right) / (left - 2 * top + right)
    return x[i].item() + shift * (x[1] - x[0]).item(), top - 0.25 * (left - right) * shift


def measure_silu(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    x = torch.linspace(-8, 8, 40_001, dtype=torch.float64)
    step = 1e-5

    def against(formula: Tensor) -> float:
        return (slope("swiglu", x) - formula).abs().max().item()

    def lowest(name: str) -> tuple[float, float]:
        where, height = _peak(-activation(name, x), x)
        return where, -height

    sigma = torch.sigmoid(x)
    differences = (activation("swiglu", x + step) - activation("swiglu", x - step)) / (2 * step)
    (low_at, low), (steep_at, steep) = lowest("swiglu"), _peak(slope("swiglu", x), x)
    gelu_at, gelu_low = lowest("gelu")
    return Measured(
        values={
            "formula": against(sigma * (1 + x * (1 - sigma))),
            "differences": against(differences),
            "minimum": low,
            "minimum_at": low_at,
            "steepest": steep,
            "steepest_at": steep_at,
            "at_zero": slope("swiglu", torch.zeros(1, dtype=torch.float64)).item(),
        },
        control={"formula": against(sigma), "minimum": gelu_low, "minimum_at": gelu_at},
        shapes={"x": "(40001,)"},
    )


A12 = Claim(
    id="A12",
    section="2.4.2",
    sentence=Text("SiLU'(x) = σ(x)(1 + x(1 − σ(x))), smooth everywhere.", "SiLU'(x) = σ(x)(1 + x(1 − σ(x)))，处处光滑。"),
    measures=Text(
        "The gate inside our SwiGLU: its derivative by autograd against the formula and against finite differences, its "
        "lowest point and its steepest.",
        "本项目 SwiGLU 内部的门：用 autograd 求导，与公式、与有限差分对比；并找出最低点与最陡处。",
    ),
    formula="SiLU(x) = x·σ(x)    SiLU'(x) = σ(x)·(1 + x·(1 − σ(x)))",
    expects=(
        Expect("formula", Text("autograd against the formula", "autograd 与公式之差"), 0.0, BY_DEFINITION, 1e-12,
               Text("rounding of float64", "float64 舍入"), "<="),
        Expect("differences", Text("autograd against finite differences", "autograd 与有限差分之差"), 0.0, BY_DEFINITION, 1e-9,
               Text("step² · third derivative, and rounding / step", "步长²·三阶导数，加上舍入/步长"), "<="),
        Expect("minimum", Text("lowest value", "最小值"), -0.278465, FLOAT64, 1e-6, SIX_DIGITS),
        Expect("minimum_at", Text("at x =", "位于 x ="), -1.278465, FLOAT64, 1e-5, SIX_DIGITS),
        Expect("steepest", Text("steepest slope", "最大斜率"), 1.099839, FLOAT64, 1e-6, SIX_DIGITS),
        Expect("steepest_at", Text("at x =", "位于 x ="), 2.399357, FLOAT64, 1e-5, SIX_DIGITS),
        Expect("at_zero", Text("slope at 0", "0 处的斜率"), 0.5, BY_DEFINITION),
    ),
    control=Text("The formula without its second part (σ alone), and GELU's minimum, must miss.", "公式去掉第二部分（只剩 σ），以及 GELU 的最小值，都必须对不上。"),
    why=Text(
        "Autograd through our own module and the formula differ by {formula}. The curve dips to {minimum} at {minimum_at}, "
        "and is steeper than the identity, up to {steepest} at {steepest_at}.",
        "本项目模块的 autograd 与公式只差 {formula}。曲线在 {minimum_at} 处降到 {minimum}，在 {steepest_at} 处斜率达 {steepest}，比恒等函数还陡。",
    ),
    read="clockhand/model/mlp.py:SwiGLU",
    measure=measure_silu,
)  # fmt: skip


def measure_gate_range(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    x = torch.linspace(-20, 20, 80_001, dtype=torch.float64)
    gate, valve = activation("swiglu", x), torch.sigmoid(x)
    random = activation("swiglu", torch.randn(100_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
    outside = ((random < 0) | (random > 1)).double().mean().item()
    return Measured(
        values={
            "lowest": gate.min().item(),
            "highest": gate.max().item(),
            "outside": outside,
            "valve_inside": bool(((valve >= 0) & (valve <= 1)).all()),
        },
        control={"lowest": valve.min().item(), "highest": valve.max().item()},
        shapes={"x": "(80001,)"},
    )


A13 = Claim(
    id="A13",
    section="2.4.2",
    sentence=Text("The gate is a valve that gives values between 0 and 1.", "门控像阀门，给出 0 到 1 之间的值。"),
    measures=Text(
        "Lowest and highest output of the gate for inputs between −20 and 20, and how often it leaves [0, 1] on normal inputs.",
        "输入在 −20 到 20 之间时门的最小与最大输出；以及正态输入下有多少比例超出 [0, 1]。",
    ),
    formula="SiLU(x) = x·σ(x) ∈ [−0.278, ∞)    σ(x) ∈ (0, 1)",
    expects=(
        Expect("lowest", Text("lowest", "最小"), -0.278465, FLOAT64, 1e-6, SIX_DIGITS, chapter=0.0, chapter_tolerance=1e-3),
        Expect("highest", Text("highest, at x = 20", "最大，x = 20 时"), 20.0, BY_DEFINITION, 1e-6,
               Text("1 − σ(20) = 2e-9, times 20", "1 − σ(20) = 2e-9，再乘 20"), chapter=1.0, chapter_tolerance=1e-3),
        Expect("outside", Text("share of normal inputs outside [0, 1]", "正态输入超出 [0, 1] 的比例"), 0.6, FLOAT64, 0.01,
               Text("six standard errors of 100,000 samples", "十万样本的六个标准误")),
        Expect("valve_inside", Text("σ stays between 0 and 1", "σ 在 0 与 1 之间"), True),
    ),
    control=Text("The sigmoid really is between 0 and 1 and must miss.", "sigmoid 确实在 0 与 1 之间，必须对不上。"),
    why=Text(
        "The part between 0 and 1 is the sigmoid inside. SiLU multiplies it by x once more, so the gate goes down to {lowest} "
        "and up without limit ({highest} at 20); of normally distributed inputs {outside} fall outside. The gate does not "
        "only open and close: it amplifies, and can turn a sign.",
        "在 0 到 1 之间的，是里面的 sigmoid。SiLU 又乘了一次 x，所以门最低到 {lowest}，向上没有上限（x = 20 时为 {highest}）；正态输入中有 {outside} 的比例落在外面。门不只是开和关：它会放大，也能翻转符号。",
    ),
    read="clockhand/model/mlp.py:SwiGLU.forward",
    measure=measure_gate_range,
)  # fmt: skip


# ── dead units ─────────────────────────────────────────────────────────────────────────────────────────────────────


def dead_share(run: Trained, ids: Tensor) -> float:
    """Share of MLP units that get no gradient from any of `ids` (B, T): nothing could ever revive them."""
    model = run.model()
    received: list[Tensor] = []

    def watch(module: torch.nn.Module, _inputs: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: received.append(gradient.flatten(0, -2).abs().amax(0)))

    name = "gate_proj" if model.config.mlp == "swiglu" else "up_proj"
    for block in blocks_of(model):
        getattr(block.mlp, name).register_forward_hook(watch)
    model(ids).logits.logsumexp(-1).sum().backward()
    return (torch.cat(received) == 0).double().mean().item()


def measure_dead_units(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    rate = 1e-2  # five times the base: high rates are what pushes units over the edge
    ids = lab.held_out(16 * 128).view(16, 128)

    def dead(mlp: str) -> list[float]:
        settings = {**BASE, "mlp": mlp, "d_ff": _equal_width(mlp)}
        return [dead_share(lab.train(settings, seed, learning_rate=rate), ids) for seed in seeds]

    relu, swiglu = dead("relu"), dead("swiglu")
    difference = compare(relu, swiglu)
    any_dead = min(relu) > 0
    verdict = Verdict.HOLDS if any_dead and max(swiglu) == 0 else Verdict.UNDECIDED
    if max(swiglu) > 0:
        verdict = Verdict.REFUTED
    return Measured(
        values={
            "relu": 100 * sum(relu) / len(relu),
            "swiglu": 100 * sum(swiglu) / len(swiglu),
            "relu_dies": any_dead,
            "swiglu_alive": max(swiglu) == 0,
            "difference": 100 * difference.mean,
        },
        control={"relu_dies": any(share > 0 for share in swiglu), "swiglu_alive": max(relu) == 0},
        shapes={"ids": "(16, 128)", "units": f"{BASE['n_layers']} layers × width"},
        data={"relu": relu, "swiglu": swiglu, "learning_rate": rate},
        verdict=verdict,
    )


A14 = Claim(
    id="A14",
    section="2.4.2",
    sentence=Text("ReLU units can die for good; SiLU units cannot.", "ReLU 单元会永久“死亡”，SiLU 单元不会。"),
    measures=Text(
        "Share of MLP units that receive no gradient at all from 2048 held-out characters, after training at a high "
        "learning rate (1e-2), ReLU against SwiGLU at equal parameters.",
        "在较高学习率（1e-2）下训练之后，2048 个验证字符对其完全没有梯度的 MLP 单元比例：参数量相等的 ReLU 与 SwiGLU。",
    ),
    formula="ReLU'(x) = 0 for x < 0      SiLU'(x) = 0 only at x = −1.278",
    expects=(
        Expect("relu", Text("dead ReLU units, %", "死亡的 ReLU 单元 %"), None),
        Expect("swiglu", Text("dead SwiGLU units, %", "死亡的 SwiGLU 单元 %"), None),
        Expect("relu_dies", Text("some ReLU units died, every seed", "每个种子都有 ReLU 单元死亡"), True, Text("the claim itself", "命题本身")),
        Expect("swiglu_alive", Text("no SwiGLU unit died, any seed", "任何种子都没有 SwiGLU 单元死亡"), True, Text("the claim itself", "命题本身")),
        Expect("difference", Text("difference, points", "相差（百分点）"), None),
    ),
    control=Text("The two roles exchanged must miss.", "两种激活的角色对调，必须对不上。"),
    why={
        Verdict.HOLDS: Text(
            "After training, {relu} % of the ReLU units received no gradient from any of 2048 characters, and {swiglu} % of "
            "the SwiGLU units. (Dead for these characters: a rarer one may still wake a unit.)",
            "训练之后，有 {relu} % 的 ReLU 单元从 2048 个字符中得不到任何梯度，SwiGLU 则为 {swiglu} %。（这里的“死”是对这些字符而言，更罕见的字符或许仍能唤醒它。）",
        ),
        Verdict.UNDECIDED: Text(
            "ReLU units can die in principle, but here {relu} % of them did, not in every seed: at this size and length of "
            "training the danger is small. SwiGLU: {swiglu} %.",
            "ReLU 单元原则上会死，但这里只有 {relu} %，并非每个种子都有：在这样的规模与训练长度下，危险不大。SwiGLU：{swiglu} %。",
        ),
        Verdict.REFUTED: Text(
            "Some SwiGLU units received no gradient either ({swiglu} %; ReLU {relu} %): far enough to the left SiLU's slope "
            "underflows to zero.",
            "也有 SwiGLU 单元没有收到梯度（{swiglu} %；ReLU 为 {relu} %）：输入足够负时，SiLU 的斜率会下溢为零。",
        ),
    },
    read="clockhand/model/mlp.py:MLP",
    measure=measure_dead_units,
    seeds=(0, 1, 2),
    cost="training",
)  # fmt: skip


# ── is the gate worth its parameters ───────────────────────────────────────────────────────────────────────────────


def mlp_parameters(config: ModelConfig) -> int:
    """Parameters of one layer's MLP."""
    return {module.path: module.parameters for module in modules(config)}["blocks.mlp"] // config.n_layers


def _equal_width(mlp: str) -> int:
    """The d_ff that gives `mlp` as many parameters as the base model's SwiGLU: 3·D·F = 2·D·(3F/2)."""
    return BASE["d_ff"] if mlp == "swiglu" else BASE["d_ff"] * 3 // 2


def measure_gate_value(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    textbook = build("minimind-3-textbook")
    gated, plain = mlp_parameters(textbook), mlp_parameters(build("minimind-3-textbook", mlp="relu"))
    swiglu = lab.losses(BASE, seeds)
    relu_same_width = lab.losses({**BASE, "mlp": "relu"}, seeds)
    relu_equal = lab.losses({**BASE, "mlp": "relu", "d_ff": _equal_width("relu")}, seeds)
    wide, equal = compare(swiglu, relu_same_width), compare(swiglu, relu_equal)
    return Measured(
        values={
            "relu_parameters": plain,
            "swiglu_parameters": gated,
            "more": 100 * (gated / plain - 1),
            "same_width": wide.mean,
            "equal_parameters": equal.mean,
            "low": equal.low,
            "high": equal.high,
            "pairs": equal.pairs,
        },
        control={"more": 100 * (gated / mlp_parameters(build("minimind-3-textbook", mlp="relu", d_ff=4608)) - 1)},
        data={"swiglu": swiglu, "relu_same_width": relu_same_width, "relu_equal": relu_equal},
        verdict=verdict_lower(equal),
    )


B12 = Claim(
    id="B12",
    section="3.6.5",
    sentence=Text(
        "A SwiGLU MLP has 50 % more parameters than a ReLU MLP of the same width, but works better.",
        "同样宽度下，SwiGLU 比 ReLU MLP 多 50 % 参数，但效果更好。",
    ),
    measures=Text(
        "Parameters at width 3072; then validation loss of SwiGLU minus ReLU, at the same width and at equal parameters.",
        "宽度 3072 时的参数量；再比较 SwiGLU 减 ReLU 的验证损失：同宽，以及同参数量。",
    ),
    formula="3·768·3072 = 7,077,888    2·768·3072 = 4,718,592",
    expects=(
        Expect("more", Text("more parameters, %", "多出的参数 %"), 50.0, ARITHMETIC),
        Expect("relu_parameters", Text("ReLU MLP, width 3072", "ReLU MLP，宽 3072"), 4_718_592, ARITHMETIC),
        Expect("swiglu_parameters", Text("SwiGLU MLP, width 3072", "SwiGLU MLP，宽 3072"), 7_077_888, ARITHMETIC),
        Expect("same_width", Text("loss of SwiGLU minus ReLU, same width", "SwiGLU 减 ReLU 的损失，同宽"), None),
        Expect("equal_parameters", Text("the same at equal parameters", "同参数量"), None),
        Expect("low", Text("95 % interval from", "95 % 区间下限"), None),
        Expect("high", Text("to", "95 % 区间上限"), None),
        Expect("pairs", Text("pairs of runs", "成对运行数"), None),
    ),
    control=Text("Against a ReLU MLP of one and a half times the width it has nothing more, and must miss.", "与宽度为 1.5 倍的 ReLU MLP 相比，参数并不更多，必须对不上。"),
    why={
        Verdict.HOLDS: Text(
            "The counts are exact. At the same width SwiGLU is {same_width} nats from ReLU, but that buys with parameters; at "
            "equal parameters it is still {equal_parameters} ({low} to {high}, {pairs} pairs): the gate is worth its place.",
            "参数量精确无误。同宽时 SwiGLU 与 ReLU 相差 {same_width} 奈特，但那多花了参数；参数量相等时仍相差 {equal_parameters}（{low} 到 {high}，{pairs} 对）：门控物有所值。",
        ),
        Verdict.UNDECIDED: Text(
            "The counts are exact. At equal parameters SwiGLU is {equal_parameters} nats from ReLU, anywhere between {low} and "
            "{high} with {pairs} pairs of runs: at this size the gate's advantage does not stand out of the noise. (Same "
            "width: {same_width}.)",
            "参数量精确无误。参数量相等时，SwiGLU 与 ReLU 相差 {equal_parameters} 奈特，{pairs} 对运行给出的区间是 {low} 到 {high}：在这个规模上，门控的优势没有超出噪声。（同宽：{same_width}。）",
        ),
        Verdict.REFUTED: Text(
            "The counts are exact, but at equal parameters ReLU does better here, by {equal_parameters} nats ({low} to {high}).",
            "参数量精确无误，但参数量相等时，这里 ReLU 更好，相差 {equal_parameters} 奈特（{low} 到 {high}）。",
        ),
    },
    read="clockhand/model/mlp.py:make_mlp",
    measure=measure_gate_value,
    seeds=(0, 1, 2, 3, 4),
    cost="training",
)  # fmt: skip

CLAIMS = (A12, A13, A14, B12)
