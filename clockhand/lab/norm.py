"""Claims about normalisation: A01 to A05.

RMSNorm is a volume control: whatever comes in leaves at the same energy. The claims ask how exactly (A03: until eps
counts), in which precision (A04), and whether the mean that LayerNorm also removes was worth removing (A05).
"""

import torch
from torch import Tensor

from clockhand.lab.claim import BY_DEFINITION, EXACT, FLOAT64, ROUNDING, Claim, Expect, Measured, Text, Verdict
from clockhand.lab.experiment import BASE, Lab, compare, verdict_same
from clockhand.model.norm import LayerNorm, RMSNorm, rms_norm

STAGES = 12


def _through_stages(gain: float, norm: RMSNorm | None = None) -> float:
    """By how much a signal of energy 1 has grown after 12 stages of `gain`, each followed by `norm`."""
    x = torch.ones(8, dtype=torch.float64)
    for _ in range(STAGES):
        x = x * gain
        if norm is not None:
            x = norm(x)
    return x.square().mean().sqrt().item()


def measure_gain(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    norm = RMSNorm(8, eps=1e-6).double()
    return Measured(
        values={
            "growth": _through_stages(1.2),
            "decay": _through_stages(0.8),
            "normed": _through_stages(1.2, norm),
        },
        control={"growth": _through_stages(1.2, norm), "normed": _through_stages(1.2)},
    )


A01 = Claim(
    id="A01",
    section="2.2.1",
    sentence=Text(
        "Twelve stages that each amplify by 1.2 multiply the signal about ninefold; at 0.8 it all but vanishes.",
        "十二级放大，每级 1.2 倍，信号会涨到约九倍；每级 0.8 倍，信号几乎消失。",
    ),
    measures=Text(
        "The size of a signal after 12 stages, and again with our RMSNorm after every stage.",
        "信号经过 12 级之后的大小；再在每级之后加上本项目的 RMSNorm 重测一次。",
    ),
    formula="1.2¹² = 8.9161    0.8¹² = 0.0687    with a norm after each stage: 1",
    expects=(
        Expect("growth", Text("12 × gain 1.2", "12 级 × 1.2"), 8.916100, FLOAT64, 1e-5, ROUNDING, chapter=8.91,
               chapter_tolerance=0.01),
        Expect("decay", Text("12 × gain 0.8", "12 级 × 0.8"), 0.0687195, FLOAT64, 1e-6, ROUNDING, chapter=0.068,
               chapter_tolerance=0.001),
        Expect("normed", Text("gain 1.2, RMSNorm after each", "1.2 倍，每级后 RMSNorm"), 1.0, BY_DEFINITION, 1e-5,
               Text("eps = 1e-6 shrinks each output by about 5e-7", "eps = 1e-6 让每级输出缩小约 5e-7")),
    ),
    control=Text(
        "With the norm the growth must disappear; without it the norm's 1 must be missed.",
        "加上归一化后放大必须消失；去掉归一化则必须偏离 1。",
    ),
    why=Text(
        "Gains multiply along the depth, so a small excess per layer becomes {growth} after twelve, and a small loss "
        "{decay}. A norm after each stage sets the energy back every time, and {normed} comes out.",
        "增益沿深度相乘，所以每层多一点，十二层后就是 {growth} 倍；每层少一点，就只剩 {decay}。每级之后的归一化把能量拉回原处，最后得到 {normed}。",
    ),
    read="clockhand/model/norm.py:rms_norm",
    measure=measure_gain,
)  # fmt: skip


def measure_definition(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    norm, layer_norm = RMSNorm(4, eps=1e-6).double(), LayerNorm(4, eps=1e-6).double()
    x = torch.tensor([2.0, -2.0, 2.0, -2.0], dtype=torch.float64)
    shifted = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)
    y = norm(x)

    def mean_left(module: torch.nn.Module) -> float:
        return module(shifted).mean().item()

    return Measured(
        values={
            "error": (y - x / 2).abs().max().item(),
            "rms": (x[0] / y[0]).item(),
            "mean_left": mean_left(norm),
            "weights": sum(p.numel() for p in norm.parameters()),
        },
        control={"mean_left": mean_left(layer_norm), "weights": sum(p.numel() for p in layer_norm.parameters())},
        shapes={"x": "(4,)", "weight": "(4,)"},
    )


A02 = Claim(
    id="A02",
    section="2.2.3",
    sentence=Text(
        "RMSNorm divides by the root mean square, subtracts no mean and has no bias: [2, −2, 2, −2] becomes [1, −1, 1, −1].",
        "RMSNorm 只除以均方根，不减均值，也没有偏置：[2, −2, 2, −2] 变成 [1, −1, 1, −1]。",
    ),
    measures=Text(
        "Our RMSNorm on the chapter's vector, and on [1, 2, 3, 4], whose mean it must leave in place.",
        "用本项目的 RMSNorm 计算章节中的向量，以及 [1, 2, 3, 4]——后者的均值必须保留。",
    ),
    formula="y = x / √(mean(x²) + ε) · γ",
    expects=(
        Expect("rms", Text("root mean square it divided by", "所除的均方根"), 2.0, BY_DEFINITION, 1e-6,
               Text("eps enters under the root", "eps 在根号之内")),
        Expect("error", Text("distance from [1, −1, 1, −1]", "与 [1, −1, 1, −1] 的距离"), 0.0, BY_DEFINITION, 1e-6,
               Text("eps / (2·mean square) = 1.25e-7", "eps / (2·均方) = 1.25e-7"), "<="),
        Expect("mean_left", Text("mean left in [1, 2, 3, 4]", "[1, 2, 3, 4] 归一化后的均值"), 0.912871, FLOAT64, 1e-6,
               ROUNDING),
        Expect("weights", Text("parameters for width 4", "宽度 4 的参数个数"), 4, BY_DEFINITION),
    ),
    control=Text("LayerNorm removes the mean and has a bias.", "LayerNorm 会去掉均值，而且带偏置。"),
    why=Text(
        "The vector of twos has root mean square {rms}, and after division by it every entry is ±1. A vector with a mean "
        "keeps it ({mean_left} of what was 2.5), because nothing is subtracted.",
        "这个向量的均方根是 {rms}，相除后每个数都是 ±1。带有均值的向量会保留均值（原来的 2.5 变成 {mean_left}），因为什么也没有减去。",
    ),
    read="clockhand/model/norm.py:RMSNorm",
    measure=measure_definition,
)  # fmt: skip


def scale_response(root_mean_square: float, alpha: float, eps: float) -> float:
    """|norm(αx)| / |norm(x)| for an x of the given size, in float64: 1 where the norm is scale invariant."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(512, dtype=torch.float64, generator=generator)
    x = x / x.square().mean().sqrt() * root_mean_square
    one = torch.ones(512, dtype=torch.float64)
    return (rms_norm(alpha * x, one, eps).norm() / rms_norm(x, one, eps).norm()).item()


def measure_scale_invariance(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    eps = 1e-6
    return Measured(
        values={
            "change": scale_response(1.0, 1000.0, eps) - 1,
            "tiny": scale_response(1e-3, 2.0, eps),
            "without_eps": scale_response(1e-3, 2.0, 1e-300),
        },
        control={"tiny": scale_response(1e-3, 2.0, 1e-300), "without_eps": scale_response(1e-3, 2.0, eps)},
        shapes={"x": "(512,)"},
    )


A03 = Claim(
    id="A03",
    section="2.2.2",
    sentence=Text(
        "RMSNorm is scale invariant: norm(αx) = norm(x), however loud the input.",
        "RMSNorm 具有尺度不变性：无论输入放大多少，norm(αx) = norm(x)。",
    ),
    measures=Text(
        "How much the output changes when the input grows: ×1000 at ordinary size, ×2 at the size of √eps, and with eps "
        "taken away.",
        "输入变大时输出变化多少：普通大小时放大 1000 倍，约 √eps 大小时放大 2 倍，以及去掉 eps 后的情形。",
    ),
    formula="|norm(αx)| / |norm(x)| = √((m + ε) / (m + ε/α²)),  m = mean(x²)      ≈ 1 + ε/2m",
    expects=(
        Expect("tiny", Text("|norm(2x)| / |norm(x)| at rms 1e-3", "均方根 1e-3 时 |norm(2x)| / |norm(x)|"), 1.264911,
               FLOAT64, 1e-6, ROUNDING, chapter=1.0, chapter_tolerance=1e-3),
        Expect("change", Text("change at mean square 1, α = 1000", "均方为 1、α = 1000 时的变化"), 5e-7, FLOAT64, 1e-9,
               Text("the next term of the series is 1e-12", "级数的下一项约为 1e-12"), chapter=0.0,
               chapter_tolerance=1e-6),
        Expect("without_eps", Text("the same without eps", "同上，去掉 eps"), 1.0, BY_DEFINITION, 1e-12, ROUNDING),
    ),
    control=Text("The two tiny cases with their eps exchanged.", "把两种微小输入的 eps 对调。"),
    why=Text(
        "The proof cancels α and forgets ε. At ordinary size the error is {change} and nobody will ever see it. But where "
        "the mean square falls to ε itself, doubling the input still changes the output by the factor {tiny}: the norm "
        "fades to silence instead of amplifying noise, which is what ε is for.",
        "证明里 α 约掉了，却忘了 ε。普通大小时误差只有 {change}，根本看不出来。但当均方小到与 ε 相当时，输入加倍，输出仍会变成 {tiny} 倍：归一化会逐渐归于沉寂，而不是把噪声放大——这正是 ε 的用处。",
    ),
    read="clockhand/model/norm.py:rms_norm",
    measure=measure_scale_invariance,
    if_false=Verdict.CONDITION,
)  # fmt: skip


def measure_half_precision(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    small, large = torch.full((64,), 1e-4, dtype=torch.float16), torch.full((64,), 300.0, dtype=torch.float16)
    weight = torch.ones(64, dtype=torch.float16)

    def naive(x: Tensor) -> float:
        """The norm with its statistic in the type of x."""
        return (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).mean().item()

    def ours(x: Tensor) -> float:
        return rms_norm(x, weight, 1e-6).float().mean().item()

    return Measured(
        values={
            "small_square": small.square().mean().item(),
            "large_overflows": bool(large.square().mean().isinf()),
            "norm_of_large": ours(large),
        },
        control={
            "small_square": small.float().square().mean().item(),
            "large_overflows": bool(large.float().square().mean().isinf()),
            "norm_of_large": naive(large),
        },
        shapes={"x": "(64,) fp16"},
    )


A04 = Claim(
    id="A04",
    section="2.2.4",
    sentence=Text(
        "In half precision the squares of small values underflow, so the statistic is taken in fp32 and cast back.",
        "半精度下，小数的平方会下溢，所以统计量要在 fp32 中计算，再转回原类型。",
    ),
    measures=Text(
        "The mean square of 1e-4 and of 300 in fp16, and what our RMSNorm makes of a vector of 300s.",
        "fp16 中 1e-4 与 300 的均方，以及本项目的 RMSNorm 对全 300 向量的输出。",
    ),
    formula="fp16: smallest positive 6.0e-8, largest 65,504    (1e-4)² = 1e-8    300² = 90,000",
    expects=(
        Expect("small_square", Text("mean square of 1e-4 in fp16", "fp16 中 1e-4 的均方"), 0.0, BY_DEFINITION),
        Expect("large_overflows", Text("mean square of 300 overflows", "300 的均方溢出"), True, BY_DEFINITION),
        Expect("norm_of_large", Text("our RMSNorm of 300s", "本项目 RMSNorm 对 300 的输出"), 1.0, BY_DEFINITION, 5e-4,
               Text("half the spacing of fp16 below 1", "fp16 在 1 附近的半个间距")),
    ),
    control=Text(
        "The squares in fp32 neither vanish nor overflow; a norm whose statistic stays in fp16 gives 0 for the 300s.",
        "改用 fp32，平方既不消失也不溢出；而统计量留在 fp16 的归一化会把 300 变成 0。",
    ),
    why=Text(
        "fp16 has no number between 0 and 6e-8, and none above 65,504: the mean square of 1e-4 is {small_square}, that of "
        "300 is infinite. With the statistic in fp32 the vector of 300s comes out as {norm_of_large}.",
        "fp16 在 0 与 6e-8 之间没有数，超过 65,504 也没有：1e-4 的均方是 {small_square}，300 的均方是无穷大。统计量改用 fp32 之后，全 300 的向量归一化为 {norm_of_large}。",
    ),
    read="clockhand/model/norm.py:rms_norm",
    measure=measure_half_precision,
)  # fmt: skip


A05_MARGIN = 0.02  # nats a character, about 1 % of the loss: less than this no one would choose a norm for


def measure_mean_subtraction(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    rms = lab.losses(BASE, seeds)
    layer = lab.losses({**BASE, "norm": "layer"}, seeds)
    narrow = lab.losses({**BASE, "d_ff": BASE["d_ff"] // 4}, seeds)  # a change that must show
    difference = compare(layer, rms)
    return Measured(
        values={
            "difference": difference.mean,
            "low": difference.low,
            "high": difference.high,
            "negligible": difference.negligible(A05_MARGIN),
        },
        control={"negligible": compare(narrow, rms).negligible(A05_MARGIN)},
        data={"rms": rms, "layer": layer, "narrow": narrow},
        verdict=verdict_same(difference, A05_MARGIN),
    )


A05 = Claim(
    id="A05",
    section="2.2.2",
    sentence=Text(
        "Subtracting the mean, as LayerNorm does, adds almost nothing.",
        "LayerNorm 减去均值这一步，几乎没有额外价值。",
    ),
    measures=Text(
        "Validation loss of a small character model with LayerNorm minus the same with RMSNorm, same seeds and data order.",
        "小型字符模型的验证损失：用 LayerNorm 减去用 RMSNorm，种子与数据顺序相同。",
    ),
    formula="Δ = loss(LayerNorm) − loss(RMSNorm), nats per character",
    expects=(
        Expect("difference", Text("loss with LayerNorm minus RMSNorm", "LayerNorm 减 RMSNorm 的损失差"), None),
        Expect("low", Text("95 % interval from", "95 % 区间下限"), None),
        Expect("high", Text("to", "95 % 区间上限"), None),
        Expect("negligible", Text("whole interval within ±0.02 nats", "整个区间在 ±0.02 奈特之内"), True,
               Text("the claim itself", "命题本身"), 0, EXACT),
    ),
    control=Text(
        "A model with a quarter of the MLP width must not pass for equal.", "MLP 宽度减到四分之一的模型，不得被判为相同。"
    ),
    why={
        Verdict.HOLDS: Text(
            "Over all seeds LayerNorm differs by {difference} nats per character, between {low} and {high} with 95 % "
            "confidence: less than anyone would choose a norm for. RMSNorm has half the parameters and one pass less.",
            "各种子平均，LayerNorm 的损失相差 {difference} 奈特/字符，95 % 区间为 {low} 到 {high}：小到不足以影响选择。而 RMSNorm 参数减半，少扫一遍数据。",
        ),
        Verdict.REFUTED: Text(
            "At this size LayerNorm differs by {difference} nats per character ({low} to {high}), more than the noise and "
            "more than the 0.02 we call negligible.",
            "在这个规模上，LayerNorm 相差 {difference} 奈特/字符（{low} 到 {high}），超出噪声，也超出我们视为可忽略的 0.02。",
        ),
        Verdict.UNDECIDED: Text(
            "The difference is {difference} nats per character, but with so few seeds it may lie anywhere between {low} and "
            "{high}: too wide to call it nothing, too close to zero to call it something.",
            "差异为 {difference} 奈特/字符，但种子太少，真值可能在 {low} 到 {high} 之间的任何地方：说它为零太宽，说它不为零又太近。",
        ),
    },
    read="clockhand/model/norm.py:LayerNorm",
    measure=measure_mean_subtraction,
    seeds=(0, 1, 2, 3, 4),
    cost="training",
)  # fmt: skip


CLAIMS = (A01, A02, A03, A04, A05)
