"""Claims about position: A06 to A11, B03 to B07, B21.

Without positions attention reads a bag of words; with RoPE every pair of dimensions is a clock hand, and two hands know
only the angle between them. Then the practical question: what happens past the trained length, and what the scalings do.
"""

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.lab.claim import (
    ARITHMETIC,
    BY_DEFINITION,
    EXACT,
    FLOAT64,
    ROUNDING,
    SIX_DIGITS,
    Claim,
    Expect,
    Measured,
    Text,
    Verdict,
)
from clockhand.lab.experiment import BASE, RECIPE, Difference, Lab, compare
from clockhand.model.rope import (
    attention_factor,
    frequencies,
    half_to_interleaved,
    rotate,
    rotate_complex,
    rotation,
    yarn_ramp,
)
from clockhand.model.transformer import Transformer
from clockhand.presets import build
from clockhand.train.lengths import SCALINGS, TARGETS, loss_against_length, losses_by_length

FLOAT64_SUM = Text("a few dozen roundings of float64", "float64 的几十次舍入")


def small_model(seed: int = 0, **settings: Any) -> Transformer:
    """An untrained model in float64, small and with weights large enough for every effect to show."""
    torch.manual_seed(seed)
    small = dict(vocab_size=64, d_model=64, n_layers=1, n_heads=4, n_kv_heads=2, d_ff=96, max_seq_len=256, init_std=0.2)
    return Transformer(ModelConfig(**{**small, **settings})).double().eval()


# ── why positions ──────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def reordering_change(model: Transformer, ids: Tensor, order: Tensor) -> float:
    """By how much the last logits move when `ids` (T,), all but the last, come in another `order` (T-1,)."""
    reordered = torch.cat((ids[:-1][order], ids[-1:]))
    return (model(ids[None]).logits[0, -1] - model(reordered[None]).logits[0, -1]).abs().max().item()


def measure_order(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    ids, order = torch.arange(3, 15), torch.arange(11).flip(0)
    one, two = (reordering_change(small_model(position="none", n_layers=n), ids, order) for n in (1, 2))
    rope = reordering_change(small_model(), ids, order)
    return Measured(
        values={"one_layer": one, "two_layers": two, "rope": rope},
        control={"one_layer": rope, "rope": one},
        shapes={"ids": "(1, 12)", "logits": "(1, 12, 64)"},
    )


_ORDER_EXPECTS = (
    Expect("two_layers", Text("2 causal layers, no positions", "2 层因果、无位置：变化"), 1e-3,
           Text("far above rounding", "远大于舍入误差"), 0, EXACT, ">=",
           chapter=0.0, chapter_tolerance=1e-12),
    Expect("one_layer", Text("1 layer, no positions: change", "1 层、无位置：变化"), 0.0, BY_DEFINITION, 1e-12,
           Text("the same sum in another order", "同一个和，换了求和顺序"), "<="),
    Expect("rope", Text("1 layer with RoPE: change", "1 层加 RoPE：变化"), 1e-3,
           Text("far above rounding", "远大于舍入误差"), 0, EXACT, ">="),
)  # fmt: skip


A06 = Claim(
    id="A06",
    section="2.3.1",
    sentence=Text(
        "Without position encoding, self-attention cannot tell word orders apart.",
        "没有位置编码，自注意力分辨不出词序。",
    ),
    measures=Text(
        "How far the last logits move when all earlier tokens are reversed: one layer without positions, two causal layers "
        "without, one layer with RoPE.",
        "把前面的 token 全部倒序，看最后一个位置的 logits 变化多少：一层无位置、两层因果无位置、一层加 RoPE。",
    ),
    formula="y_T = Σ_s softmax_s(q_T·k_s) v_s    a sum does not know the order of its terms",
    expects=_ORDER_EXPECTS,
    control=Text(
        "With RoPE the order must show; its change must not pass for 0.",
        "加上 RoPE 后词序必须体现出来，其变化不得被当作 0。",
    ),
    why=Text(
        "One layer sums over what it sees, and a sum has no order: reversing the context moves the logits by {one_layer}. "
        "But under a causal mask the second layer reads states that have each seen a different past, and notices by "
        "{two_layers} without any encoding. RoPE makes even one layer notice ({rope}).",
        "一层注意力是对所见内容求和，和没有次序：把上文倒过来，logits 只变 {one_layer}。但有了因果掩码，第二层读到的每个状态各自见过不同的“过去”，不用任何编码也能察觉（变化 {two_layers}）。RoPE 则让一层就能察觉（{rope}）。",
    ),
    read="clockhand/model/transformer.py:Transformer.hidden",
    measure=measure_order,
    if_false=Verdict.CONDITION,
)


def measure_love(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    tokenizer = Tokenizer.train(["我爱你，你爱我。"], "char")

    def change(**settings: Any) -> float:
        model = small_model(vocab_size=tokenizer.vocab_size, **settings)
        with torch.no_grad():
            one, other = (
                model(torch.tensor([tokenizer.encode(text)])).logits[0, -1] for text in ("我爱你。", "你爱我。")
            )
        return (one - other).abs().max().item()

    one, two, rope = change(position="none"), change(position="none", n_layers=2), change()
    return Measured(
        values={"one_layer": one, "two_layers": two, "rope": rope},
        control={"one_layer": rope, "rope": one},
        shapes={"ids": "(1, 4)"},
    )


B03 = Claim(
    id="B03",
    section="3.3.1",
    sentence=Text(
        "Without positions the model cannot tell 我爱你 (I love you) from 你爱我 (you love me).",
        "没有位置信息，模型无法区分“我爱你”和“你爱我”。",
    ),
    measures=Text(
        "The logits after 我爱你。 and after 你爱我。, read at the full stop that ends both.",
        "在共同的结尾“。”处，比较“我爱你。”与“你爱我。”之后的 logits。",
    ),
    formula="{我, 爱, 你} = {你, 爱, 我}    the same set of keys and values",
    expects=_ORDER_EXPECTS,
    control=Text("With RoPE the two sentences must differ.", "加上 RoPE，两句话必须不同。"),
    why=Text(
        "For one layer without positions the two sentences differ by {one_layer}: they are the same bag of characters. Two "
        "causal layers tell them apart by {two_layers}, because 爱 has seen 我 in one and 你 in the other. So the sentence "
        "is true of attention, not of a whole causal model; with RoPE ({rope}) the question does not arise.",
        "一层且无位置时，两句话只差 {one_layer}：它们是同一袋字。两层因果注意力却能以 {two_layers} 的差别分辨出来，因为“爱”在一句里见过“我”，在另一句里见过“你”。所以这句话说的是注意力本身，而不是整个因果模型；有了 RoPE（{rope}），问题就不存在了。",
    ),
    read="clockhand/model/attend.py:attend_reference",
    measure=measure_love,
    if_false=Verdict.CONDITION,
)


def measure_learned_table(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    sizes = dict(max_seq_len=1024, d_model=16, d_ff=16, n_heads=2, n_kv_heads=1)
    learned, rope = small_model(position="learned", **sizes), small_model(**sizes)
    long, fits = torch.zeros(1, 1025, dtype=torch.int64), torch.zeros(1, 1024, dtype=torch.int64)

    def bare_table_fails(position: int) -> bool:
        assert learned.position_embedding is not None
        try:
            learned.position_embedding(torch.tensor([position]))
        except IndexError:
            return True
        return False

    def model_refuses(ids: Tensor) -> bool:
        try:
            learned(ids)
        except ClockhandError:
            return True
        return False

    with torch.no_grad():
        computes = bool(rope(long).logits.isfinite().all())
    return Measured(
        values={"table_fails": bare_table_fails(1024), "model_refuses": model_refuses(long), "rope_computes": computes},
        control={"table_fails": bare_table_fails(1023), "model_refuses": model_refuses(fits)},
        shapes={"position_embedding.weight": "(1024, 16)", "ids": "(1, 1025)"},
    )


A07 = Claim(
    id="A07",
    section="2.3.2",
    sentence=Text(
        "A learned table of 1024 positions fails outright at token 1025.",
        "学习式位置表只有 1024 行，遇到第 1025 个 token 就彻底失效。",
    ),
    measures=Text(
        "1025 tokens through a model with a learned table of 1024 rows, and through one with RoPE.",
        "让 1025 个 token 通过 1024 行学习式位置表的模型，再通过 RoPE 模型。",
    ),
    formula="learned: x + P[m], m < 1024      RoPE: R(m·θ), any m",
    expects=(
        Expect("table_fails", Text("row 1025 of the table raises", "查表第 1025 行报错"), True),
        Expect("model_refuses", Text("our model refuses, naming the limit", "模型拒绝并指出上限"), True),
        Expect("rope_computes", Text("RoPE computes position 1025", "RoPE 能算第 1025 个位置"), True),
    ),
    control=Text("1024 tokens fit and must pass.", "1024 个 token 放得下，必须通过。"),
    why=Text(
        "A table has the rows it has. A rotation is computed for any position, so RoPE gives numbers at 1025; whether the "
        "model has learned to read them is another question, see A11.",
        "表有多少行就只有多少行。旋转则对任何位置都能计算，所以 RoPE 在第 1025 个位置也有数值；至于模型是否学会了读它，见 A11。",
    ),
    read="clockhand/model/transformer.py:Transformer._check",
    measure=measure_learned_table,
)


# ── what RoPE is ───────────────────────────────────────────────────────────────────────────────────────────────────


def _tables(config: ModelConfig, *positions: int) -> tuple[Tensor, Tensor]:
    return rotation(config, torch.tensor([positions]), dtype=torch.float64)  # each (1, T, Dh/2)


def scores_at(config: ModelConfig, q: Tensor, k: Tensor, m: int, n: int) -> Tensor:
    """q·k of every head after q was turned by position m and k by n. q and k (1, 1, H, Dh) -> (H,)."""
    turned_q = rotate(q, *_tables(config, m), config.rope_layout)
    turned_k = rotate(k, *_tables(config, n), config.rope_layout)
    return (turned_q * turned_k).sum(-1)[0, 0]


def _queries_and_keys(config: ModelConfig, heads: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    shape = (1, 1, heads, config.head_dim)
    return (
        torch.randn(shape, dtype=torch.float64, generator=generator),
        torch.randn(shape, dtype=torch.float64, generator=generator),
    )


def measure_relative(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    config = build("mini-llama")
    q, k = _queries_and_keys(config)
    here = scores_at(config, q, k, 4, 1)

    def moved(m: int, n: int) -> float:
        return (scores_at(config, q, k, m, n) - here).abs().max().item()

    return Measured(
        values={"shift_10": moved(14, 11), "shift_30000": moved(30_004, 30_001)},
        control={"shift_10": moved(14, 10), "shift_30000": moved(30_004, 30_000)},
        shapes={"q, k": "(1, 1, 8, 64)", "cos, sin": "(1, 1, 32)"},
    )


A08 = Claim(
    id="A08",
    section="2.3.3",
    sentence=Text(
        "The rotated product depends on the distance m − n only: shifting both positions by 10 changes nothing.",
        "旋转之后的内积只取决于距离 m − n：两个位置同时平移 10，结果不变。",
    ),
    measures=Text(
        "q·k of 8 random heads at positions 4 and 1, then at 14 and 11, and at 30,004 and 30,001.",
        "8 个随机头在位置 4 与 1 的 q·k，再看 14 与 11，以及 30,004 与 30,001。",
    ),
    formula="⟨R(mθ)q, R(nθ)k⟩ = ⟨R((m−n)θ)q, k⟩",
    expects=(
        Expect("shift_10", Text("change after a shift by 10", "平移 10 后的变化"), 0.0, BY_DEFINITION, 1e-10, FLOAT64_SUM, "<="),
        Expect("shift_30000", Text("change after a shift by 30,000", "平移 30,000 后的变化"), 0.0, BY_DEFINITION, 1e-10,
               Text("angles near 30,000 are rounded to 4e-12", "30,000 附近的角度舍入到 4e-12"), "<="),
    ),
    control=Text("Shifting only the key by one more token must change the product.", "只把 key 再移动一个位置，内积必须改变。"),
    why=Text(
        "Two rotations in one product leave only their difference. The measured change is {shift_10} after 10 tokens and "
        "{shift_30000} after 30,000: rounding, nothing else.",
        "同一个内积里的两次旋转只留下角度之差。平移 10 个 token 后变化为 {shift_10}，平移 30,000 后为 {shift_30000}：只有舍入误差。",
    ),
    read="clockhand/model/rope.py:rotate",
    measure=measure_relative,
)  # fmt: skip


def measure_complex(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    config = build("mini-llama")
    q, _ = _queries_and_keys(config)
    q = q.expand(1, 50, -1, -1)
    cos, sin = _tables(config, *range(50))

    def distance(layout: str, turn: float = 1.0) -> float:
        return (rotate(q, cos, turn * sin, layout) - rotate_complex(q, cos, sin, layout)).abs().max().item()

    return Measured(
        values={"half": distance("half"), "interleaved": distance("interleaved")},
        control={"half": distance("half", turn=-1.0), "interleaved": distance("interleaved", turn=-1.0)},
        shapes={"q": "(1, 50, 8, 64)", "as complex": "(1, 50, 8, 32)"},
    )


A09 = Claim(
    id="A09",
    section="2.3.4",
    sentence=Text(
        "Multiplying by e^{iθ} is the 2×2 rotation, and rotate_half computes it on split halves.",
        "乘以 e^{iθ} 就是 2×2 旋转，rotate_half 则在前后两半上算出同样的结果。",
    ),
    measures=Text(
        "Our rotate against true complex multiplication, 50 positions, both layouts.",
        "本项目的 rotate 与真正的复数乘法对比，50 个位置，两种布局。",
    ),
    formula="(x₁ + i·x₂)·e^{iφ} = (x₁cosφ − x₂sinφ) + i·(x₁sinφ + x₂cosφ)",
    expects=(
        Expect("half", Text("half layout: distance", "前后两半布局：距离"), 0.0, BY_DEFINITION, 1e-12, ROUNDING, "<="),
        Expect("interleaved", Text("interleaved layout: distance", "相邻成对布局：距离"), 0.0, BY_DEFINITION, 1e-12, ROUNDING, "<="),
    ),
    control=Text("Turned the other way (−sin) it must differ.", "反方向旋转（−sin）必须不同。"),
    why=Text(
        "The two components of a pair are the real and imaginary part of one number. Both layouts agree with complex "
        "multiplication to {half} and {interleaved}.",
        "一对分量就是一个复数的实部与虚部。两种布局与复数乘法的差别分别为 {half} 与 {interleaved}。",
    ),
    read="clockhand/model/rope.py:rotate_complex",
    measure=measure_complex,
)  # fmt: skip


def measure_wavelengths(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    theta = frequencies(build("mini-llama"))
    other = frequencies(build("mini-llama", rope_theta=1e6))
    return Measured(
        values={
            "last_wavelength": (2 * math.pi / theta[-1]).item(),
            "last_theta": theta[-1].item(),
            "first_theta": theta[0].item(),
            "first_wavelength": (2 * math.pi / theta[0]).item(),
            "planes": len(theta),
        },
        control={"last_theta": other[-1].item(), "last_wavelength": (2 * math.pi / other[-1]).item()},
        shapes={"frequencies(config)": "(32,)"},
        data={"theta": theta.tolist()},
    )


A10 = Claim(
    id="A10",
    section="2.3.3",
    sentence=Text(
        "Of 64 dimensions, plane 1 turns with θ = 1 (wavelength 6.28) and plane 32 with θ ≈ 1.25e-4 (wavelength ≈ 50,000).",
        "64 维中，第 1 个平面 θ = 1（波长 6.28），第 32 个平面 θ ≈ 1.25e-4（波长 ≈ 50,000）。",
    ),
    measures=Text("The frequencies of our Mini-LLaMA.", "本项目 Mini-LLaMA 的各频率。"),
    formula="θᵢ = 10000^(−2(i−1)/64)    λᵢ = 2π/θᵢ",
    expects=(
        Expect("last_wavelength", Text("wavelength of plane 32", "第 32 平面的波长"), 47117.2, FLOAT64, 0.1, SIX_DIGITS,
               chapter=50_000, chapter_tolerance=500),
        Expect("last_theta", Text("θ of plane 32", "第 32 平面的 θ"), 1.33352e-4, FLOAT64, 1e-9, SIX_DIGITS,
               chapter=1.25e-4, chapter_tolerance=0.005e-4),
        Expect("first_theta", Text("θ of plane 1", "第 1 平面的 θ"), 1.0, BY_DEFINITION),
        Expect("first_wavelength", Text("wavelength of plane 1", "第 1 平面的波长"), 2 * math.pi, BY_DEFINITION, 1e-12, ROUNDING,
               chapter=6.28, chapter_tolerance=0.005),
        Expect("planes", Text("planes", "平面数"), 32, ARITHMETIC),
    ),
    control=Text("Base 1e6 instead of 1e4 must miss both values of plane 32.", "底数换成 1e6，第 32 平面的两个值都必须对不上。"),
    why=Text(
        "The formula of the chapter is right and plane 1 is exact. Plane 32 by the same formula is {last_theta}, wavelength "
        "{last_wavelength} tokens; the printed pair 1.25e-4 and 50,000 belongs to 1/8000 and is off by six percent.",
        "章节的公式是对的，第 1 平面也精确无误。但按同一公式，第 32 平面是 {last_theta}，波长 {last_wavelength} 个 token；书中的 1.25e-4 与 50,000 对应的是 1/8000，偏差约百分之六。",
    ),
    read="clockhand/model/rope.py:frequencies",
    measure=measure_wavelengths,
    if_false=Verdict.CONDITION,
)  # fmt: skip


def measure_layouts(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    half = small_model(rope_theta=1e6, rope_layout="half")
    interleaved = small_model(rope_theta=1e6, rope_layout="interleaved")
    ids = torch.arange(3, 35)[None]

    @torch.no_grad()
    def distance(permuted: bool) -> float:
        weights = dict(half.state_dict())
        if permuted:
            for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight"))]:
                weights[name] = half_to_interleaved(weights[name], half.config.head_dim)
        interleaved.load_state_dict(weights)
        return (half(ids).logits - interleaved(ids).logits).abs().max().item()

    return Measured(
        values={"permuted": distance(permuted=True)},
        control={"permuted": distance(permuted=False)},
        shapes={"q_proj.weight": "(64, 64)", "k_proj.weight": "(32, 64)", "logits": "(1, 32, 64)"},
    )


B04 = Claim(
    id="B04",
    section="3.3.5",
    sentence=Text(
        "RoPE turns adjacent pairs (x₀,x₁), (x₂,x₃), … with base 1e6.",
        "RoPE 旋转相邻的两两分量 (x₀,x₁)、(x₂,x₃)……，底数为 1e6。",
    ),
    measures=Text(
        "A model in the interleaved layout against one in the half layout whose q and k rows were reordered once.",
        "相邻成对布局的模型，与把 q、k 的行重排一次的前后两半布局模型对比。",
    ),
    formula="row i, i + Dh/2  (half)   ⇄   row 2i, 2i + 1  (interleaved)",
    expects=(
        Expect("permuted", Text("distance of the logits after reordering", "重排之后 logits 的距离"), 0.0, BY_DEFINITION, 1e-10,
               FLOAT64_SUM, "<="),
    ),
    control=Text("Without the reordering the logits must differ.", "不重排，logits 必须不同。"),
    why=Text(
        "Chapter A splits in halves, chapter B pairs neighbours, and both are RoPE: the dimensions of a head have no order "
        "of their own, so one fixed permutation of the rows of q and k turns one into the other ({permuted}). Whoever "
        "loads weights without it gets fluent nonsense.",
        "A 章按前后两半拆分，B 章取相邻两个，两者都是 RoPE：一个头内部的维度本没有次序，把 q、k 的行按固定方式重排一次即可互换（相差 {permuted}）。加载权重时忘了重排，得到的就是通顺的胡话。",
    ),
    read="clockhand/model/rope.py:half_to_interleaved",
    measure=measure_layouts,
)  # fmt: skip


def measure_sign(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    config = build("minimind-3")
    q, k = _queries_and_keys(config)

    def distance(sign: int) -> float:
        """Of the product at (m, n) from q·k with only k turned, by sign · (n − m)."""
        return max(
            (scores_at(config, q, k, m, n) - scores_at(config, q, k, 0, sign * (n - m))).abs().max().item()
            for m, n in ((9, 2), (2, 9), (500, 100))
        )

    return Measured(
        values={"difference": distance(+1)},
        control={"difference": distance(-1)},
        shapes={"q, k": "(1, 1, 8, 96)"},
    )


B05 = Claim(
    id="B05",
    section="3.3.4",
    sentence=Text(
        "q'ₘ·k'ₙ is q·k with the key turned by the difference of the positions.",
        "q'ₘ·k'ₙ 等于把 k 按位置之差旋转之后的 q·k。",
    ),
    measures=Text(
        "The product at (m, n) against q·k with k alone turned by n − m, for keys before and after the query.",
        "位置 (m, n) 处的内积，与只把 k 旋转 n − m 的 q·k 对比；key 在 query 之前和之后都试。",
    ),
    formula="q'ₘ·k'ₙ = q·R((n−m)θ)k = Re(q* k e^{i(n−m)θ})",
    expects=(
        Expect("difference", Text("distance from q·R((n−m)θ)k", "与 q·R((n−m)θ)k 的距离"), 0.0, BY_DEFINITION, 1e-10, FLOAT64_SUM,
               "<="),
    ),
    control=Text("With the sign turned round (m − n) it must differ.", "符号反过来（m − n）必须不同。"),
    why=Text(
        "Our convention: positions turn counterclockwise, so seen from the query the key stands at n − m, which is "
        "negative for the past. The chapter's k_{{n−m}} is the same sign; its “m − n” names the distance. Measured "
        "distance: {difference}.",
        "我们的约定：位置使向量逆时针旋转，所以从 query 看去，key 位于 n − m，过去为负。章节写的 k_{{n−m}} 与此同号；它说的 “m − n” 指距离。实测相差 {difference}。",
    ),
    read="clockhand/model/rope.py:rotation",
    measure=measure_sign,
)  # fmt: skip


YARN_EXAMPLE = ModelConfig(
    vocab_size=8, d_model=96, n_layers=1, n_heads=1, head_dim=96, d_ff=8, rope_theta=1e6, rope_scaling="yarn",
    rope_factor=16.0, rope_original_max_seq_len=2048,
)  # fmt: skip


def measure_yarn(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    yarn = frequencies(YARN_EXAMPLE)
    crude = frequencies(
        ModelConfig(vocab_size=8, d_model=96, n_layers=1, n_heads=1, head_dim=96, d_ff=8, rope_theta=16e6)
    )
    ramp = yarn_ramp(YARN_EXAMPLE)
    return Measured(
        values={
            "pair_20": yarn[20].item(),
            "pair_47": yarn[47].item(),
            "pair_9": yarn[9].item(),
            "pair_0": yarn[0].item(),
            "last_kept": int((ramp == 0).nonzero().max()),
            "first_divided": int((ramp == 1).nonzero().min()),
            "attention": attention_factor(YARN_EXAMPLE),
            "crude_20": crude[20].item(),
        },
        control={"pair_9": crude[9].item(), "pair_20": crude[20].item(), "pair_47": crude[47].item()},
        shapes={"frequencies(config)": "(48,)", "yarn_ramp(config)": "(48,)"},
        data={"ramp": ramp.tolist(), "yarn": yarn.tolist(), "crude": crude.tolist()},
    )


B06 = Claim(
    id="B06",
    section="3.3.6",
    sentence=Text(
        "YaRN extends the context by replacing the base with base × factor.",
        "YaRN 的做法是把 base 换成 base × factor，从而扩展上下文。",
    ),
    measures=Text(
        "YaRN's frequencies for 96 dimensions, base 1e6, trained length 2048, factor 16, beside those of base × 16.",
        "96 维、底数 1e6、训练长度 2048、factor 16 时 YaRN 的各频率，与 base × 16 的频率并列。",
    ),
    formula="θ'ᵢ = (1−rᵢ)·θᵢ + rᵢ·θᵢ/factor,  r a ramp from 0 to 1;  cos, sin × (0.1·ln factor + 1)",
    expects=(
        Expect("pair_20", Text("θ of pair 20", "第 20 对的 θ"), 4.25691e-4, FLOAT64, 1e-9, SIX_DIGITS,
               chapter=(16e6) ** (-40 / 96), chapter_tolerance=1e-6),
        Expect("pair_47", Text("θ of pair 47", "第 47 对的 θ"), 8.33451e-8, FLOAT64, 1e-12, SIX_DIGITS,
               chapter=(16e6) ** (-94 / 96), chapter_tolerance=1e-10),
        Expect("pair_9", Text("θ of pair 9", "第 9 对的 θ"), 0.0695815, FLOAT64, 1e-7, SIX_DIGITS,
               chapter=(16e6) ** (-18 / 96), chapter_tolerance=1e-4),
        Expect("pair_0", Text("θ of pair 0", "第 0 对的 θ"), 1.0, FLOAT64),
        Expect("last_kept", Text("last pair kept as it is", "保持不变的最后一对"), 8, FLOAT64),
        Expect("first_divided", Text("first pair divided by 16", "除以 16 的第一对"), 21, FLOAT64),
        Expect("attention", Text("attention factor", "注意力缩放系数"), 1.27726, FLOAT64, 1e-5, SIX_DIGITS),
        Expect("crude_20", Text("pair 20 under base × 16", "base × 16 时第 20 对的 θ"), None),
    ),
    control=Text("The frequencies of base × factor must not pass for YaRN's.", "base × factor 的频率不得被当作 YaRN。"),
    why=Text(
        "Multiplying the base is the crude NTK rule, and slows every hand but the first. YaRN asks of each hand how often "
        "it turned in training: the fast ones, up to pair {last_kept}, are kept; the slow ones, from pair {first_divided}, "
        "are divided by the factor; between runs a ramp. It also sharpens attention by {attention}. At pair 20 YaRN has "
        "{pair_20} where base × 16 has {crude_20}. clockhand offers both under their own names.",
        "把底数乘大，是粗糙的 NTK 规则，除第一根外每根指针都变慢。YaRN 则逐根询问：训练时你转了几圈？转得快的（到第 {last_kept} 对为止）保持不变；转得慢的（从第 {first_divided} 对起）除以 factor；中间是一段斜坡；此外把注意力乘以 {attention} 加以锐化。第 20 对，YaRN 是 {pair_20}，而 base × 16 是 {crude_20}。clockhand 两种都有，各用其名。",
    ),
    read="clockhand/model/rope.py:yarn_ramp",
    measure=measure_yarn,
)  # fmt: skip


# ── past the trained length ────────────────────────────────────────────────────────────────────────────────────────


def length_table(model: Transformer, ids: list[int], trained: int) -> tuple[list[str], list[list[str]]]:
    """Headings and one row a scaling: nats per token at ½ to 4 times the `trained` length. Raises `ClockhandError`."""
    found = losses_by_length(model, torch.tensor(ids), trained)
    rows = [[scaling, *(f"{loss:.3f}" for loss in losses)] for scaling, losses in found.losses.items()]
    return ["rope_scaling", *(f"{length:,}" for length in found.lengths)], rows


def length_curves(lab: Lab, seeds: tuple[int, ...]) -> dict[str, Any]:
    """The `trained` length, the `lengths` tried, and as `curves` for each scaling the losses, one row a seed.

    Three claims read them; they are measured once.
    """
    if "lengths" not in lab.measured:
        models, ids = [lab.train(BASE, seed).model() for seed in seeds], lab.held_out(40_000)
        trained = int(RECIPE["seq_len"])
        lengths = [trained // 2, trained, trained * 2, trained * 4, trained * 8]
        windows = 48 if lab.scale == 1 else 4
        curves = {
            scaling: [loss_against_length(model, ids, trained, lengths, scaling, windows) for model in models]
            for scaling in SCALINGS
        }
        lab.measured["lengths"] = {"trained": trained, "lengths": lengths, "curves": curves}
    return lab.measured["lengths"]


SHARP, FLAT = 0.1, 0.05  # nats per token: a tenth is what a model of twice the size would gain; half of it is flat


def measure_lengths(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    data = length_curves(lab, seeds)
    trained, lengths, curves = data["trained"], data["lengths"], data["curves"]

    def rise(scaling: str, times: int) -> Difference:
        """The loss at times · trained length minus the plain one at the trained length."""
        there, here = lengths.index(trained * times), lengths.index(trained)
        return compare([row[there] for row in curves[scaling]], [row[here] for row in curves["none"]])

    plain_2, plain_4, yarn_2, yarn_4 = rise("none", 2), rise("none", 4), rise("yarn", 2), rise("yarn", 4)
    inside = compare([row[1] for row in curves["none"]], [row[0] for row in curves["none"]])
    return Measured(
        values={
            "plain_4": plain_4.mean,
            "plain_4_low": plain_4.low,
            "plain_2": plain_2.mean,
            "yarn_2": yarn_2.mean,
            "yarn_2_high": yarn_2.high,
            "yarn_4": yarn_4.mean,
            "degrades": plain_4.low > SHARP,
            "repaired": yarn_2.high < FLAT,
        },
        control={"degrades": inside.low > SHARP, "repaired": plain_4.high < FLAT},
        shapes={
            "window": f"(B, {lengths[0]} … {lengths[-1]})",
            "targets": f"the last {TARGETS} tokens, always the same",
        },
        data=data,
    )


_LENGTH_EXPECTS = (
    Expect("plain_4", Text("plain RoPE at 4× the trained length: loss rises by", "普通 RoPE 在 4 倍训练长度处，损失上升"), None),
    Expect("plain_4_low", Text("at least (95 %)", "至少（95 %）"), None),
    Expect("plain_2", Text("plain RoPE at 2×", "普通 RoPE 在 2 倍处"), None),
    Expect("yarn_2", Text("YaRN at 2×", "YaRN 在 2 倍处"), None),
    Expect("yarn_2_high", Text("at most (95 %)", "至多（95 %）"), None),
    Expect("yarn_4", Text("YaRN at 4×", "YaRN 在 4 倍处"), None),
    Expect("degrades", Text("plain RoPE rises by more than 0.1 nats", "普通 RoPE 上升超过 0.1 奈特"), True,
           Text("the claim itself", "命题本身")),
    Expect("repaired", Text("YaRN stays within 0.05 nats to 2×", "YaRN 到 2 倍仍在 0.05 奈特之内"), True,
           Text("the claim itself", "命题本身")),
)  # fmt: skip
_LENGTH_CONTROL = Text(
    "Inside the trained length nothing may count as degrading, and unscaled RoPE at 4× may not count as repaired.",
    "训练长度之内不得被判为退化；未缩放的 RoPE 在 4 倍处不得被判为已修复。",
)
_LENGTH_MEASURES = Text(
    "Loss on the same held-out tokens, read with contexts of ½ to 8 times the trained length, for every scaling.",
    "对同一批验证 token，分别以训练长度 ½ 到 8 倍的上下文去读，比较各种缩放的损失。",
)


def _judge_degrading(measured: Measured) -> Measured:
    degrades, repaired = measured.values["degrades"], measured.values["repaired"]
    if degrades and repaired:
        verdict = Verdict.HOLDS
    elif degrades:
        verdict = Verdict.CONDITION
    else:
        verdict = Verdict.UNDECIDED if float(measured.values["plain_4"]) > SHARP else Verdict.REFUTED
    return dataclasses.replace(measured, verdict=verdict)


B07 = Claim(
    id="B07",
    section="3.3.6",
    sentence=Text(
        "Past the trained length plain RoPE degrades sharply; scaling repairs it.",
        "超过训练长度后，普通 RoPE 的性能急剧下降；缩放可以修复。",
    ),
    measures=_LENGTH_MEASURES,
    formula="Δ(n) = loss(context n) − loss(context L), nats per character",
    expects=_LENGTH_EXPECTS,
    control=_LENGTH_CONTROL,
    why={
        Verdict.HOLDS: Text(
            "At four times the trained length the plain model loses {plain_4} nats per character: it meets angles of the "
            "slow hands that it never saw. YaRN at twice the length is {yarn_2} away from home, at four times {yarn_4}, "
            "without any further training.",
            "到训练长度的四倍，普通模型的损失上升 {plain_4} 奈特/字符：慢指针转到了它从未见过的角度。YaRN 在两倍处只偏离 {yarn_2}，四倍处 {yarn_4}，而且无需再训练。",
        ),
        Verdict.CONDITION: Text(
            "The plain model degrades: {plain_2} nats at twice the length, {plain_4} at four times. YaRN takes most of that "
            "away ({yarn_2} and {yarn_4}), but with these seeds it may still cost up to {yarn_2_high} at twice the length, "
            "more than the 0.05 we call flat: without fine-tuning the repair is good, not complete.",
            "普通模型确实退化：两倍处上升 {plain_2} 奈特，四倍处 {plain_4}。YaRN 消除了其中大部分（{yarn_2} 与 {yarn_4}），但就这几个种子而言，两倍处的代价仍可能高达 {yarn_2_high}，超过我们称为“平坦”的 0.05：不微调时，修复得不错，但不彻底。",
        ),
        Verdict.REFUTED: Text(
            "This small model loses only {plain_4} nats at four times its trained length: it reads mostly nearby "
            "characters and hardly looks at the slow hands. The claim speaks of models that do.",
            "这个小模型在四倍训练长度处只损失 {plain_4} 奈特：它主要看近处的字符，几乎不看慢指针。命题说的是会用到慢指针的模型。",
        ),
        Verdict.UNDECIDED: Text(
            "On average {plain_4} nats are lost at four times the length, but the seeds disagree too much to be sure.",
            "四倍长度处平均损失 {plain_4} 奈特，但各种子之间差别太大，不能确定。",
        ),
    },
    read="clockhand/model/rope.py:frequencies",
    measure=lambda lab, seeds: _judge_degrading(measure_lengths(lab, seeds)),
    seeds=(0, 1, 2),
    cost="training",
)


def measure_extrapolation(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    measured = measure_lengths(lab, seeds)
    if measured.values["degrades"]:
        verdict = Verdict.REFUTED
    else:
        verdict = Verdict.UNDECIDED if float(measured.values["plain_4"]) > FLAT else Verdict.HOLDS
    keys = ("plain_4", "plain_4_low", "plain_2", "degrades")
    return Measured(
        values={key: measured.values[key] for key in keys},
        control={"degrades": measured.control["degrades"]},
        shapes=measured.shapes,
        data=measured.data,
        verdict=verdict,
    )


A11 = Claim(
    id="A11",
    section="2.3.3",
    sentence=Text(
        "Because only distances matter, RoPE extrapolates naturally to longer texts.",
        "因为只看相对距离，RoPE 能自然外推到更长的文本。",
    ),
    measures=_LENGTH_MEASURES,
    formula="Δ(n) = loss(context n) − loss(context L), nats per character",
    expects=tuple(e for e in _LENGTH_EXPECTS if e.key in ("plain_4", "plain_4_low", "plain_2", "degrades")),
    control=Text("Inside the trained length nothing may count as degrading.", "训练长度之内不得被判为退化。"),
    why={
        Verdict.REFUTED: Text(
            "RoPE computes any position (A07), but a model has to have met the angles. At twice the trained length the loss "
            "is up by {plain_2} nats per character, at four times by {plain_4}. Distances it never saw are not free; B07 "
            "shows what repairs them.",
            "RoPE 可以计算任何位置（A07），但模型得见过那些角度才行。训练长度两倍处损失上升 {plain_2} 奈特/字符，四倍处上升 {plain_4}。没见过的距离并非免费；如何修复见 B07。",
        ),
        Verdict.HOLDS: Text(
            "At four times the trained length this small model loses {plain_4} nats: it looks at nearby characters only, so "
            "nothing is out of reach. Larger models do degrade.",
            "在四倍训练长度处，这个小模型只损失 {plain_4} 奈特：它只看近处的字符，所以没有够不着的东西。更大的模型则会退化。",
        ),
        Verdict.UNDECIDED: Text(
            "The loss at four times the trained length is up by {plain_4} nats, less than we would call sharp, or not the "
            "same for all seeds.",
            "四倍训练长度处损失上升 {plain_4} 奈特，还称不上急剧，或各种子并不一致。",
        ),
    },
    read="clockhand/model/rope.py:rotation",
    measure=measure_extrapolation,
    seeds=(0, 1, 2),
    cost="training",
)


def measure_yarn_exercise(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    measured = measure_lengths(lab, seeds)
    keys = ("yarn_2", "yarn_2_high", "plain_2", "repaired")
    verdict = Verdict.HOLDS if measured.values["repaired"] else Verdict.CONDITION
    if float(measured.values["yarn_2"]) > float(measured.values["plain_2"]):
        verdict = Verdict.REFUTED
    return Measured(
        values={key: measured.values[key] for key in keys},
        control={"repaired": measured.control["repaired"]},
        shapes=measured.shapes,
        data=measured.data,
        verdict=verdict,
    )


B21 = Claim(
    id="B21",
    section="tasks",
    sentence=Text(
        "Challenge: extend the context by YaRN to twice the trained length and test it.",
        "挑战：用 YaRN 把上下文扩展到训练长度的两倍，并测试效果。",
    ),
    measures=_LENGTH_MEASURES,
    formula="factor = 2    Δ(2L) = loss(context 2L) − loss(context L)",
    expects=tuple(e for e in _LENGTH_EXPECTS if e.key in ("yarn_2", "yarn_2_high", "plain_2", "repaired")),
    control=Text("Unscaled RoPE at 4× may not count as repaired.", "未缩放的 RoPE 在 4 倍处不得被判为已修复。"),
    why={
        Verdict.HOLDS: Text(
            "With factor 2 the loss at twice the length is {yarn_2} nats from that at the trained length; plain RoPE is "
            "{plain_2} away. Try it on your own model: `clockhand eval FOLDER --data TEXT --against-length`.",
            "factor 取 2 时，两倍长度处的损失与训练长度处相差 {yarn_2} 奈特；普通 RoPE 相差 {plain_2}。也可以用自己的模型试：`clockhand eval FOLDER --data TEXT --against-length`。",
        ),
        Verdict.CONDITION: Text(
            "YaRN at twice the length costs {yarn_2} nats where plain RoPE costs {plain_2}: better, but not free without a "
            "little fine-tuning. Try it on your own model: `clockhand eval FOLDER --data TEXT --against-length`.",
            "两倍长度处，YaRN 的代价是 {yarn_2} 奈特，普通 RoPE 是 {plain_2}：有改善，但不微调就并非毫无代价。也可以用自己的模型试：`clockhand eval FOLDER --data TEXT --against-length`。",
        ),
        Verdict.REFUTED: Text(
            "Here YaRN costs {yarn_2} nats at twice the length and plain RoPE only {plain_2}: this model did not need the "
            "stretch.",
            "这里两倍长度处 YaRN 的代价是 {yarn_2} 奈特，普通 RoPE 反而只有 {plain_2}：这个模型并不需要拉伸。",
        ),
    },
    read="clockhand/model/rope.py:attention_factor",
    measure=measure_yarn_exercise,
    seeds=(0, 1, 2),
    cost="training",
)

CLAIMS = (A06, A07, A08, A09, A10, A11, B03, B04, B05, B06, B07, B21)
