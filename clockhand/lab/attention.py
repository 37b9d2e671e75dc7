"""Claims about attention: A16 to A22, A27, B09 to B11.

Scores are sums of d products, so they grow with √d; a mask is a rule on positions; sharing KV heads saves memory and
changes nothing else in the arithmetic. What it does to quality and speed takes training and a clock (A27).
"""

import math
import time
from statistics import median

import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.count import kv_bytes_per_token
from clockhand.lab.claim import (
    ARITHMETIC,
    BY_DEFINITION,
    EXACT,
    FLOAT64,
    ROUNDING,
    Claim,
    Expect,
    Measured,
    Text,
    Verdict,
)
from clockhand.lab.experiment import BASE, Lab, compare
from clockhand.lab.position import small_model
from clockhand.model.attend import Visibility, attend, attend_reference
from clockhand.model.cache import KVCache
from clockhand.model.transformer import Transformer
from clockhand.presets import build


def causal(tokens: int, batch: int = 1) -> Visibility:
    """Every token sees itself and what came before."""
    positions = torch.arange(tokens).expand(batch, tokens)
    return Visibility(positions, positions)


def attention_weights(q: Tensor, k: Tensor, sees: Visibility, scale: float | None = None) -> Tensor:
    """The softmax weights inside our attention: q (1, T, H, Dh), k (1, S, K, Dh) -> (T, H, S).

    They are read off by attending to values that are the rows of an identity matrix, Dh columns at a time.
    """
    keys, head_dim = k.shape[1], k.shape[3]
    identity = torch.eye(keys, math.ceil(keys / head_dim) * head_dim, dtype=q.dtype)
    columns = [
        attend_reference(q, k, part[None, :, None, :].expand(1, -1, k.shape[2], -1), sees, scale)[0]
        for part in identity.split(head_dim, dim=1)
    ]
    return torch.cat(columns, dim=-1)[..., :keys]


# ── √d ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

PAIRS = 100_000


def _score_variance(head_dim: int, seed: int, size: float = 1.0) -> float:
    generator = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(PAIRS, head_dim, generator=generator) * size for _ in range(2))
    return (q * k).sum(-1).var().item()


def measure_variance(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    variance = sum(_score_variance(64, seed) for seed in seeds) / len(seeds)
    doubled = _score_variance(64, seeds[0], size=2.0)
    return Measured(
        values={"variance": variance, "deviation": math.sqrt(variance), "scaled": variance / 64},
        control={"variance": doubled, "deviation": math.sqrt(doubled), "scaled": doubled / 64},
        shapes={"q, k": f"({PAIRS:,}, 64) for each of {len(seeds)} seeds"},
    )


_SAMPLING = Text(
    "four standard errors of 500,000 sampled pairs: the variance of their variance is 2·64²·(1 + 3/64)/n",
    "50 万对样本的四个标准误：方差估计量的方差约为 2·64²·(1 + 3/64)/n",
)

A16 = Claim(
    id="A16",
    section="2.5.1",
    sentence=Text(
        "q·k of standard normal vectors has variance d and deviation √d, 8 for d = 64; dividing by √d brings it to 1.",
        "标准正态向量的 q·k 方差为 d、标准差为 √d，d = 64 时是 8；除以 √d 后回到 1。",
    ),
    measures=Text("The spread of 500,000 products of random vectors with 64 entries.", "50 万对 64 维随机向量内积的离散程度。"),
    formula="Var(Σ qᵢkᵢ) = Σ Var(qᵢ)·Var(kᵢ) = d",
    expects=(
        Expect("deviation", Text("standard deviation", "标准差"), 8.0, BY_DEFINITION, 0.034, _SAMPLING),
        Expect("variance", Text("variance", "方差"), 64.0, BY_DEFINITION, 0.53, _SAMPLING),
        Expect("scaled", Text("variance after dividing by √64", "除以 √64 之后的方差"), 1.0, BY_DEFINITION, 0.0083, _SAMPLING),
    ),
    control=Text("Vectors twice as large have sixteen times the variance.", "向量放大一倍，方差应变为十六倍。"),
    why=Text(
        "Sixty-four independent products add their variances: {variance} measured, deviation {deviation}, and {scaled} after "
        "division by √64. In a trained model q and k are neither independent nor normal; the scale then is a good start, "
        "not a law.",
        "六十四个相互独立的乘积，方差相加：实测 {variance}，标准差 {deviation}，除以 √64 之后为 {scaled}。训练好的模型里 q 与 k 既不独立也非正态，这个缩放是好的起点，而不是定律。",
    ),
    read="clockhand/model/attend.py:attend_reference",
    measure=measure_variance,
    seeds=(0, 1, 2, 3, 4),
)  # fmt: skip


ROWS = 128  # random queries in one measurement of the softmax


def saturation(head_dim: int, scaled: bool, seeds: tuple[int, ...], keys: int = 128) -> dict[str, float]:
    """How peaked our softmax is over random keys: mean largest weight, mean entropy, mean size of the gradient.

    The gradient is that of a random mix of the weights with respect to the raw scores q·k, before any scale.
    """
    peaks, entropies, slopes = [], [], []
    factor = 1 / math.sqrt(head_dim) if scaled else 1.0
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        q = torch.randn(1, ROWS, 1, head_dim, dtype=torch.float64, generator=generator)
        k = torch.randn(1, keys, 1, head_dim, dtype=torch.float64, generator=generator)
        everything = Visibility(torch.full((1, ROWS), keys), torch.arange(keys)[None])
        p = attention_weights(q, k, everything, factor)[:, 0]  # (ROWS, keys)
        peaks.append(p.max(-1).values.mean().item())
        entropies.append(-(p * p.clamp(min=1e-300).log()).sum(-1).mean().item())
        # The derivative of softmax by its input is diag(p) - p·pᵀ; its diagonal is the chapter's p(1-p).
        slopes.append((p * (1 - p)).sum(-1).mean().item())
    mean = 1 / len(seeds)
    return {"peak": sum(peaks) * mean, "entropy": sum(entropies) * mean, "slope": sum(slopes) * mean}


def measure_saturation(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    raw, scaled = saturation(64, False, seeds), saturation(64, True, seeds)
    tame = saturation(1, False, seeds)  # with one dimension √d is 1: nothing to tame
    return Measured(
        values={
            "raw_peak": raw["peak"],
            "scaled_peak": scaled["peak"],
            "raw_entropy": raw["entropy"],
            "scaled_entropy": scaled["entropy"],
            "slope_left": raw["slope"] / scaled["slope"],
        },
        control={"raw_peak": tame["peak"], "raw_entropy": tame["entropy"]},
        shapes={"q": "(1, 128, 1, 64)", "k": "(1, 128, 1, 64)", "weights": "(128, 128)"},
    )


_SOFTMAX_SAMPLING = Text("spread over seeds of a mean of 128 random rows", "128 个随机行均值在各种子间的波动")

A17 = Claim(
    id="A17",
    section="2.5.1",
    sentence=Text(
        "Without √d the softmax saturates and its gradient collapses to absolute zero.",
        "不除以 √d，softmax 会饱和，梯度塌缩为绝对的零。",
    ),
    measures=Text(
        "Largest weight, entropy and Σ p(1−p) of our softmax over 128 random keys with 64 dimensions, with and without √d.",
        "对 128 个 64 维随机 key，有无 √d 时 softmax 的最大权重、熵与 Σ p(1−p)。",
    ),
    formula="∂pᵢ/∂sᵢ = pᵢ(1 − pᵢ)",
    expects=(
        Expect("raw_peak", Text("largest weight, unscaled", "最大权重，不缩放"), 0.77, FLOAT64, 0.03, _SOFTMAX_SAMPLING,
               chapter=1.0, chapter_tolerance=0.05),
        Expect("scaled_peak", Text("largest weight, scaled", "最大权重，缩放后"), 0.069, FLOAT64, 0.004, _SOFTMAX_SAMPLING),
        Expect("raw_entropy", Text("entropy in nats, unscaled", "熵（奈特），不缩放"), 0.66, FLOAT64, 0.06, _SOFTMAX_SAMPLING),
        Expect("scaled_entropy", Text("entropy in nats, scaled", "熵（奈特），缩放后"), 4.37, FLOAT64, 0.03, _SOFTMAX_SAMPLING),
        Expect("slope_left", Text("Σ p(1−p), unscaled over scaled", "Σ p(1−p)：不缩放 / 缩放"), 0.05,
               Text("far from 0", "离 0 还很远"), 0, EXACT, ">=", chapter=0.0, chapter_tolerance=1e-3),
    ),
    control=Text("With one dimension √d is 1 and nothing may saturate.", "只有一维时 √d = 1，不得出现饱和。"),
    why=Text(
        "The direction is right: the largest of 128 weights averages {raw_peak} instead of {scaled_peak}, and the entropy "
        "falls from {scaled_entropy} to {raw_entropy} nats. But the gradient shrinks to {slope_left} of its size; it is not "
        "zero, let alone absolutely. Early Transformers without the scale train badly, not never.",
        "方向是对的：128 个权重中最大者平均为 {raw_peak}，而不是 {scaled_peak}；熵从 {scaled_entropy} 降到 {raw_entropy} 奈特。但梯度只是缩到原来的 {slope_left}，并不是零，更谈不上“绝对”。不缩放的模型是难训练，而不是不能训练。",
    ),
    read="clockhand/model/attend.py:attend_reference",
    measure=measure_saturation,
    seeds=(0, 1, 2, 3),
    if_false=Verdict.CONDITION,
)  # fmt: skip


# ── who sees whom ──────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def measure_causality(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    model = small_model(n_layers=2)
    ids = torch.arange(3, 19)[None]
    changed = ids.clone()
    changed[:, 10:] += 20
    q, k = torch.randn(2, 1, 16, 4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    future = torch.triu(torch.ones(16, 16, dtype=torch.bool), diagonal=1)

    def future_weight(sees: Visibility) -> float:
        return attention_weights(q, k, sees).transpose(0, 1)[:, future].max().item()

    def past_is_untouched(positions: Tensor | None = None) -> bool:
        before, after = (model(x, positions=positions).logits[:, :10] for x in (ids, changed))
        return torch.equal(before, after)

    same_place = torch.zeros_like(ids)  # all tokens at position 0 see one another
    return Measured(
        values={"bit_identical": past_is_untouched(), "future_weight": future_weight(causal(16))},
        control={
            "bit_identical": past_is_untouched(same_place),
            "future_weight": future_weight(Visibility(same_place, same_place)),
        },
        shapes={"ids": "(1, 16)", "weights": "(16, 4, 16)"},
    )


A18 = Claim(
    id="A18",
    section="2.5.2",
    sentence=Text(
        "A masked score of −∞ becomes weight 0 exactly, so the future cannot leak.",
        "被掩码为 −∞ 的分数，权重恰好是 0，未来信息不会泄漏。",
    ),
    measures=Text(
        "The largest weight on a future token, and whether logits before a changed token stay the same bit for bit.",
        "未来 token 上的最大权重；以及改动后面的 token 时，之前的 logits 是否逐位不变。",
    ),
    formula="lim_{s→−∞} eˢ = 0    weight = e^{−∞} / Σ = 0",
    expects=(
        Expect("bit_identical", Text("earlier logits bit for bit the same", "之前的 logits 逐位相同"), True),
        Expect("future_weight", Text("largest weight on the future", "未来位置上的最大权重"), 0.0),
    ),
    control=Text(
        "Tokens that all claim position 0 see one another: the change must leak.",
        "让所有 token 都声称自己在位置 0，彼此可见：改动必须泄漏。",
    ),
    why=Text(
        "exp(−∞) is 0 in IEEE arithmetic, not nearly 0. Largest future weight: {future_weight}; earlier logits unchanged: "
        "{bit_identical}.",
        "在 IEEE 浮点运算里 exp(−∞) 就是 0，而不是接近 0。未来位置的最大权重：{future_weight}；之前的 logits 不变：{bit_identical}。",
    ),
    read="clockhand/model/attend.py:Visibility",
    measure=measure_causality,
)


def chapter_rule(queries: int, positions: Tensor, key_positions: Tensor, cached: bool) -> Visibility:
    """What the chapter's `is_causal = mask is None and seq_len > 1 and kv_cache is None` lets a query see."""
    if queries > 1 and not cached:
        return Visibility(positions, key_positions)
    return Visibility(torch.full_like(positions, int(key_positions.max())), key_positions)


def _leak(rule: str, held: int) -> float:
    """How much attention's answer at the first of 6 new tokens moves when the last of them changes, `held` in cache."""
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, held + 6, 2, 16, dtype=torch.float64, generator=generator)
    positions, key_positions = torch.arange(held, held + 6)[None], torch.arange(held + 6)[None]
    sees = Visibility(positions, key_positions) if rule == "ours" else chapter_rule(6, positions, key_positions, True)
    other = v.clone()
    other[:, -1] += 1.0
    before, after = (attend(q[:, held:], k, values, sees)[:, 0] for values in (v, other))
    return (after - before).abs().max().item()


@torch.no_grad()
def measure_cache_trap(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    model = small_model(n_layers=2)
    ids = torch.arange(3, 19)[None]
    cache = KVCache(model.config, 1, dtype=torch.float64)
    pieces = [model(piece, cache=cache).logits for piece in ids.split([7, 4, 1, 4], dim=1)]
    distance = (torch.cat(pieces, 1) - model(ids).logits).abs().max().item()
    return Measured(
        values={
            "chapter_empty": _leak("chapter", 0),
            "chapter_warm": _leak("chapter", 5),
            "ours_empty": _leak("ours", 0),
            "ours_warm": _leak("ours", 5),
            "split": distance,
        },
        control={"ours_empty": _leak("chapter", 0), "ours_warm": _leak("chapter", 5)},
        shapes={"q": "(1, 6, 2, 16)", "k, v": "(1, 6, 2, 16), then (1, 11, 2, 16)"},
    )


A22 = Claim(
    id="A22",
    section="2.5.4",
    sentence=Text(
        "Fused attention may be called with is_causal only when there is no mask, more than one token and no cache.",
        "融合注意力只在“没有掩码、多于一个 token、没有缓存”时才用 is_causal。",
    ),
    measures=Text(
        "How much the first of six new tokens sees of the last: under the chapter's rule and ours, with an empty cache and "
        "with five tokens in it. And our model fed in pieces of 7, 4, 1, 4 tokens against all at once.",
        "六个新 token 中，第一个能看到最后一个多少：章节规则与本项目规则，空缓存与已有五个 token 的缓存。另外把 16 个 token 按 7、4、1、4 分段喂入，与一次喂入对比。",
    ),
    formula="query at p sees key at s  ⇔  0 ≤ s ≤ p",
    expects=(
        Expect("chapter_empty", Text("leak by the chapter's rule, empty cache", "章节规则，空缓存：泄漏"), 0.01,
               Text("far above rounding", "远大于舍入误差"), 0, EXACT, ">=", chapter=0.0, chapter_tolerance=1e-12),
        Expect("chapter_warm", Text("leak by the chapter's rule, warm cache", "章节规则，已有缓存：泄漏"), 0.01,
               Text("far above rounding", "远大于舍入误差"), 0, EXACT, ">=", chapter=0.0, chapter_tolerance=1e-12),
        Expect("ours_empty", Text("leak by ours, empty cache", "本项目规则，空缓存：泄漏"), 0.0),
        Expect("ours_warm", Text("leak by ours, warm cache", "本项目规则，已有缓存：泄漏"), 0.0),
        Expect("split", Text("in pieces against at once", "分段与一次喂入之差"), 0.0, BY_DEFINITION, 1e-10, ROUNDING, "<="),
    ),
    control=Text("The chapter's rule is the control: our check must catch it.", "章节的规则本身就是对照：我们的检查必须抓住它。"),
    why=Text(
        "The rule is right in training and for one token at a time. But a first call *with* an empty cache switches the "
        "mask off for the whole prompt (leak {chapter_empty}), and so do several tokens on a warm cache ({chapter_warm}). "
        "A mask is a rule on positions; ours leaks {ours_empty} and {ours_warm}, and any split of a text gives the same "
        "logits ({split}).",
        "训练时，以及逐个 token 生成时，这条规则没有问题。但带着空缓存的第一次调用，会让整段提示都不加掩码（泄漏 {chapter_empty}）；在已有缓存上一次送入多个 token 也一样（{chapter_warm}）。掩码应当是关于位置的规则：我们的泄漏为 {ours_empty} 与 {ours_warm}，文本怎样分段，logits 都相同（相差 {split}）。",
    ),
    read="clockhand/model/attend.py:Visibility.mask",
    measure=measure_cache_trap,
)  # fmt: skip


def _mask_of(sees: Visibility) -> str:
    """The additive mask as the chapter prints it: 0 where the query sees the key, - where it is −∞."""
    return "/".join("".join("0" if seen else "-" for seen in row) for row in sees.mask[0].tolist())


def measure_mask(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    positions = torch.arange(5)[None]
    peeking = Visibility(positions + 1, positions)
    return Measured(
        values={"mask": _mask_of(causal(5)), "seen": int(causal(5).mask.sum())},
        control={"mask": _mask_of(peeking), "seen": int(peeking.mask.sum())},
        shapes={"mask": "(1, 5, 5)"},
    )


B10 = Claim(
    id="B10",
    section="3.5.5",
    sentence=Text(
        "The causal mask of five tokens has 0 on and below the diagonal and −∞ above.",
        "五个 token 的因果掩码：对角线及以下为 0，以上为 −∞。",
    ),
    measures=Text("The mask our visibility rule makes for five tokens.", "本项目可见性规则为五个 token 生成的掩码。"),
    formula="mask[p, s] = 0 if s ≤ p else −∞",
    expects=(
        Expect("mask", Text("rows, − for −∞", "逐行，− 表示 −∞"), "0----/00---/000--/0000-/00000"),
        Expect("seen", Text("pairs seen", "可见的对数"), 15, ARITHMETIC),
    ),
    control=Text(
        "Queries one position too late see one token of the future.",
        "把 query 的位置推后一格，就会看到一个未来的 token。",
    ),
    why=Text(
        "Fifteen of 25 pairs are seen: {mask}. The chapter adds −∞ to the score, we replace the score by it; the softmax "
        "cannot tell.",
        "25 对中有 15 对可见：{mask}。章节把 −∞ 加到分数上，我们直接用它替换分数；softmax 分不出区别。",
    ),
    read="clockhand/model/attend.py:Visibility.mask",
    measure=measure_mask,
)


def bf16_running_sum(values: Tensor) -> Tensor:
    """Σ values added one by one in bf16, each partial sum rounded."""
    total = torch.zeros((), dtype=torch.bfloat16)
    for value in values:
        total = total + value
    return total


def measure_softmax_precision(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    keys = 1024
    q = torch.zeros(1, 1, 1, 64, dtype=torch.bfloat16)  # scores nothing: all keys get the same weight
    k = torch.randn(1, keys, 1, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    sees = Visibility(torch.full((1, 1), keys), torch.arange(keys)[None])
    ours = attention_weights(q, k, sees)[0, 0]  # (S,) bf16
    exponentials = torch.ones(keys, dtype=torch.bfloat16)  # exp(0)
    naive = exponentials / bf16_running_sum(exponentials)
    return Measured(
        values={"total": ours.double().sum().item(), "weight": ours[0].item()},
        control={"total": naive.double().sum().item(), "weight": naive[0].item()},
        shapes={"scores": "(1, 1, 1, 1, 1024) bf16"},
    )


B11 = Claim(
    id="B11",
    section="3.5.4",
    sentence=Text(
        "The softmax is taken in fp32 and its result cast back.",
        "softmax 在 fp32 中计算，再把结果转回原类型。",
    ),
    measures=Text(
        "1024 equal scores in bf16 through our attention: what the weights add up to.",
        "1024 个相等的 bf16 分数通过本项目的注意力，权重之和是多少。",
    ),
    formula="bf16 keeps 8 bits: 256 + 1 = 256",
    expects=(
        Expect("total", Text("sum of the 1024 weights", "1024 个权重之和"), 1.0, BY_DEFINITION, 0.004,
               Text("each weight is rounded to 8 bits once", "每个权重只舍入一次，保留 8 位")),
        Expect("weight", Text("one of them", "其中一个权重"), 1 / 1024, BY_DEFINITION, 2e-6,
               Text("half a bit of bf16 at 1/1024", "bf16 在 1/1024 处的半个间距")),
    ),
    control=Text(
        "With every sum kept in bf16 the denominator sticks at 256.", "若每一步求和都留在 bf16，分母会停在 256。"
    ),
    why=Text(
        "Adding ones in bf16 stops at 256, because 257 is not a bf16 number: the weights would then sum to 4. With the "
        "softmax in fp32 they sum to {total}, and only the finished weight {weight} is rounded.",
        "在 bf16 里逐个加 1，到 256 就停住了，因为 257 不是 bf16 能表示的数：那样权重之和会是 4。在 fp32 中做 softmax，权重之和为 {total}，只有最后的权重 {weight} 被舍入一次。",
    ),
    read="clockhand/model/attend.py:attend_reference",
    measure=measure_softmax_precision,
)  # fmt: skip


# ── sharing KV heads ───────────────────────────────────────────────────────────────────────────────────────────────


def cache_bytes_per_token(config: ModelConfig) -> float:
    """What a real cache of this model in bf16 takes for each token it has room for."""
    cache = KVCache(config, 1, max_seq_len=64, dtype=torch.bfloat16)
    cache.begin(cache.next_positions(64))
    return cache.nbytes / cache.capacity


def _twelve_heads(n_kv_heads: int) -> ModelConfig:
    return ModelConfig(vocab_size=8, d_model=768, n_layers=12, n_heads=12, n_kv_heads=n_kv_heads, d_ff=8)


def measure_sharing(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    full = cache_bytes_per_token(_twelve_heads(12))

    def left(n_kv_heads: int) -> float:
        return 100 * cache_bytes_per_token(_twelve_heads(n_kv_heads)) / full

    return Measured(
        values={"saved": 100 - left(4), "left": left(1)},
        control={"saved": 100 - left(6), "left": left(2)},
        shapes={"keys of one layer": "(1, 64, 12 | 4 | 1, 64)"},
    )


A19 = Claim(
    id="A19",
    section="2.5.3",
    sentence=Text(
        "Twelve query heads over 4 KV heads save 66.7 % of the cache; over 1 they leave 8.3 %.",
        "12 个 query 头共享 4 个 KV 头，缓存省 66.7 %；只用 1 个，则剩 8.3 %。",
    ),
    measures=Text("Bytes of real caches with 12, 4 and 1 KV heads.", "12、4、1 个 KV 头时真实缓存的字节数。"),
    formula="bytes per token = 2 · L · K · Dh · bytes per value",
    expects=(
        Expect("saved", Text("saved with 4 KV heads, %", "4 个 KV 头省下 %"), 200 / 3, ARITHMETIC, 1e-9, ROUNDING,
               chapter=66.7, chapter_tolerance=0.05),
        Expect("left", Text("left with 1 KV head, %", "1 个 KV 头剩余 %"), 100 / 12, ARITHMETIC, 1e-9, ROUNDING,
               chapter=8.3, chapter_tolerance=0.05),
    ),
    control=Text("6 and 2 KV heads must give other shares.", "6 个与 2 个 KV 头必须得到别的比例。"),
    why=Text(
        "Only keys and values are remembered, so memory goes with the number of KV heads: {saved} % saved with four, "
        "{left} % left with one.",
        "缓存里只有 key 和 value，所以内存与 KV 头数成正比：四个时省 {saved} %，一个时剩 {left} %。",
    ),
    read="clockhand/model/cache.py:KVCache",
    measure=measure_sharing,
)  # fmt: skip


def measure_mini_llama_cache(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    shared, full, half = (build("mini-llama", n_kv_heads=n) for n in (2, 8, 4))
    ours, everyone = cache_bytes_per_token(shared), cache_bytes_per_token(full)
    return Measured(
        values={
            "bytes": ours,
            "counted": kv_bytes_per_token(shared),
            "mha_bytes": everyone,
            "saved": 100 * (1 - ours / everyone),
        },
        control={"bytes": cache_bytes_per_token(half), "saved": 100 * (1 - cache_bytes_per_token(half) / everyone)},
        shapes={"keys of one layer": "(1, 64, 2, 64)"},
    )


A20 = Claim(
    id="A20",
    section="2.8",
    sentence=Text("This model, 8 heads over 2, saves 75 % of the cache.", "本模型 8 个头共享 2 个 KV 头，缓存省 75 %。"),
    measures=Text("Bytes a token in a real bf16 cache of Mini-LLaMA, with 2 and with 8 KV heads.", "Mini-LLaMA 的真实 bf16 缓存每个 token 的字节数，2 个与 8 个 KV 头。"),
    formula="2 · 12 · 2 · 64 · 2 bytes = 6,144",
    expects=(
        Expect("saved", Text("saved, %", "省下 %"), 75.0, ARITHMETIC),
        Expect("bytes", Text("bytes a token", "每 token 字节数"), 6144, ARITHMETIC),
        Expect("counted", Text("the same from the config alone", "仅由配置算出的同一值"), 6144, ARITHMETIC),
        Expect("mha_bytes", Text("with 8 KV heads", "8 个 KV 头时"), 24576, ARITHMETIC),
    ),
    control=Text("4 KV heads must miss.", "4 个 KV 头必须对不上。"),
    why=Text(
        "{bytes} bytes a token against {mha_bytes}: {saved} % saved. (The chapter also draws 12 heads over 4; those are two "
        "pictures of one idea, and this model is 8 over 2.)",
        "每个 token {bytes} 字节，对比 {mha_bytes}：省 {saved} %。（章节里还画了 12 比 4，那是同一思想的另一幅图；本模型是 8 比 2。）",
    ),
    read="clockhand/count.py:kv_bytes_per_token",
    measure=measure_mini_llama_cache,
)  # fmt: skip


def measure_repeat(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 9, 8, 16, dtype=torch.float64, generator=generator)
    k, v = torch.randn(2, 2, 9, 2, 16, dtype=torch.float64, generator=generator)
    sees = causal(9, batch=2)
    grouped = attend(q, k, v, sees)
    repeated = attend(q, k.repeat_interleave(4, 2), v.repeat_interleave(4, 2), sees)
    tiled = attend(q, k.repeat(1, 1, 4, 1), v.repeat(1, 1, 4, 1), sees)
    loop = torch.stack([attend(q[:, :, [h]], k[:, :, [h // 4]], v[:, :, [h // 4]], sees)[:, :, 0] for h in range(8)], 2)

    def distance(other: Tensor) -> float:
        return (grouped - other).abs().max().item()

    return Measured(
        values={"repeated": distance(repeated), "loop": distance(loop)},
        control={"repeated": distance(tiled)},
        shapes={"q": "(2, 9, 8, 16)", "k, v": "(2, 9, 2, 16)", "out": "(2, 9, 8, 16)"},
    )


A21 = Claim(
    id="A21",
    section="2.5.4",
    sentence=Text(
        "Repeating the KV heads equals grouping the query heads: head h reads KV head h // G.",
        "复制 KV 头等价于给 query 头分组：第 h 个头读第 h // G 个 KV 头。",
    ),
    measures=Text(
        "Our grouped attention against the same with repeated heads, and against a loop over heads.",
        "本项目的分组注意力，与复制头之后的注意力、以及逐头循环对比。",
    ),
    formula="out_h = softmax(q_h·k_{h//G}ᵀ/√Dh)·v_{h//G}",
    expects=(
        Expect("repeated", Text("distance from repeated heads", "与复制头的距离"), 0.0, BY_DEFINITION, 1e-12, ROUNDING, "<="),
        Expect("loop", Text("distance from a loop over heads", "与逐头循环的距离"), 0.0, BY_DEFINITION, 1e-12, ROUNDING, "<="),
    ),
    control=Text("Heads tiled in the other order (0,1,0,1,…) must differ.", "按另一种次序平铺（0,1,0,1,…）必须不同。"),
    why=Text(
        "Copying is one way to write it, grouping another; the results differ by {repeated}. Grouping reads each key once, "
        "which is where the speed comes from.",
        "复制是一种写法，分组是另一种；结果只差 {repeated}。分组时每个 key 只读一次，速度正由此而来。",
    ),
    read="clockhand/model/attend.py:attend",
    measure=measure_repeat,
)  # fmt: skip


def _heads_read(n_heads: int, n_kv_heads: int) -> str:
    """Which KV head each query head reads, found by giving every KV head its own number as value."""
    q, k = torch.zeros(1, 1, n_heads, 8), torch.zeros(1, 1, n_kv_heads, 8)
    v = torch.arange(n_kv_heads).float()[None, None, :, None].expand(1, 1, n_kv_heads, 8)
    return " ".join(str(int(head)) for head in attend(q, k, v, causal(1))[0, 0, :, 0])


def measure_minimind_heads(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    grouped, full, single = (build("minimind-3", n_kv_heads=n) for n in (4, 8, 1))
    return Measured(
        values={
            "heads": _heads_read(8, 4),
            "bytes": cache_bytes_per_token(grouped),
            "mha_bytes": cache_bytes_per_token(full),
        },
        control={"heads": _heads_read(8, 2), "bytes": cache_bytes_per_token(single)},
        shapes={"q": "(1, 1, 8, 8)", "v": "(1, 1, 4, 8)"},
    )


B09 = Claim(
    id="B09",
    section="3.5.3",
    sentence=Text(
        "8 query heads over 4: heads [0,1] read KV head 0, [2,3] read 1, …; the cache halves.",
        "8 个 query 头共享 4 个 KV 头：[0,1]→0，[2,3]→1，……；缓存减半。",
    ),
    measures=Text(
        "Values that carry the number of their KV head, read back at each query head; bytes of real caches.",
        "让每个 KV 头的 value 带上自己的编号，再看各 query 头读到什么；以及真实缓存的字节数。",
    ),
    formula="h → h // G,  G = 8 / 4 = 2",
    expects=(
        Expect("heads", Text("KV head read by heads 0 … 7", "0 … 7 号头读到的 KV 头"), "0 0 1 1 2 2 3 3"),
        Expect("bytes", Text("bytes a token, 4 KV heads", "4 个 KV 头，每 token 字节"), 12288, ARITHMETIC),
        Expect("mha_bytes", Text("with 8 KV heads", "8 个 KV 头时"), 24576, ARITHMETIC),
    ),
    control=Text("2 KV heads read otherwise, and 1 takes fewer bytes.", "2 个 KV 头的对应不同，1 个则字节更少。"),
    why=Text(
        "Heads read {heads}. MiniMind-3 remembers {bytes} bytes a token in two-byte precision instead of {mha_bytes}.",
        "各头读到 {heads}。MiniMind-3 在双字节精度下每个 token 占 {bytes} 字节，而不是 {mha_bytes}。",
    ),
    read="clockhand/model/attend.py:attend_reference",
    measure=measure_minimind_heads,
)


# ── what sharing costs and buys ────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def decode_seconds(config: ModelConfig, context: int, tokens: int, batch: int) -> float:
    """Median seconds of one step that adds a token to each of `batch` rows holding `context` tokens."""
    torch.manual_seed(0)
    model = Transformer(config).eval()
    cache = KVCache(config, batch, max_seq_len=context + tokens + 2)
    filler = torch.zeros(batch, context, dtype=torch.int64)
    for piece in filler.split(256, dim=1):
        model.hidden(piece, cache=cache)
    step = torch.zeros(batch, 1, dtype=torch.int64)
    model(step, cache=cache)
    times = []
    for _ in range(tokens):
        started = time.perf_counter()
        model(step, cache=cache)
        times.append(time.perf_counter() - started)
    return median(times)


QUALITY_MARGIN = 0.03  # nats a character: what three quarters of the attention's KV weights may cost to be "a match"


def measure_grouped_quality(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    kinds = {"MHA": 4, "GQA": 2, "MQA": 1}
    losses = {name: lab.losses({**BASE, "n_kv_heads": heads}, seeds) for name, heads in kinds.items()}
    context, tokens = (2048, 12) if lab.scale == 1 else (64, 3)
    speed = {
        name: decode_seconds(build("mini-llama", n_kv_heads=heads, n_layers=4, max_seq_len=4096), context, tokens, 8)
        for name, heads in {"MHA": 8, "GQA": 2, "MQA": 1}.items()
    }
    quality = compare(losses["GQA"], losses["MHA"])
    narrow = compare(lab.losses({**BASE, "d_ff": BASE["d_ff"] // 4}, seeds), losses["MHA"])
    matches, fast = quality.negligible(QUALITY_MARGIN), speed["GQA"] <= 1.25 * speed["MQA"]
    if matches and fast:
        verdict = Verdict.HOLDS
    elif quality.exceeds_noise and not matches:
        verdict = Verdict.REFUTED
    else:
        verdict = Verdict.CONDITION if matches else Verdict.UNDECIDED
    return Measured(
        values={
            "gqa_minus_mha": quality.mean,
            "low": quality.low,
            "high": quality.high,
            "mqa_minus_mha": compare(losses["MQA"], losses["MHA"]).mean,
            "gqa_speedup": speed["MHA"] / speed["GQA"],
            "mqa_speedup": speed["MHA"] / speed["MQA"],
            "matches": matches,
        },
        control={"matches": narrow.negligible(QUALITY_MARGIN)},
        shapes={"keys of one layer": f"(8, {context}, 8 | 2 | 1, 64)"},
        data={"losses": losses, "seconds": speed, "context": context},
        verdict=verdict,
    )


A27 = Claim(
    id="A27",
    section="2.5.3",
    sentence=Text("GQA matches MHA's quality with MQA's speed.", "GQA 兼有 MHA 的质量与 MQA 的速度。"),
    measures=Text(
        "Validation loss of small models with 4, 2 and 1 KV heads, same seeds and steps; time of a decode step at 2048 "
        "tokens of context, 8 rows, Mini-LLaMA's width, with 8, 2 and 1 KV heads.",
        "小模型分别用 4、2、1 个 KV 头，种子与步数相同，比较验证损失；再用 Mini-LLaMA 的宽度、8 行、2048 个 token 的上下文，比较 8、2、1 个 KV 头时一步解码的时间。",
    ),
    formula="Δ = loss(GQA) − loss(MHA)    speed-up = t(MHA) / t(GQA)",
    expects=(
        Expect("gqa_minus_mha", Text("loss of GQA minus MHA", "GQA 减 MHA 的损失"), None),
        Expect("low", Text("95 % interval from", "95 % 区间下限"), None),
        Expect("high", Text("to", "95 % 区间上限"), None),
        Expect("mqa_minus_mha", Text("loss of MQA minus MHA", "MQA 减 MHA 的损失"), None),
        Expect("gqa_speedup", Text("decode speed, GQA over MHA", "解码速度：GQA / MHA"), None),
        Expect("mqa_speedup", Text("decode speed, MQA over MHA", "解码速度：MQA / MHA"), None),
        Expect("matches", Text("GQA within ±0.03 nats of MHA", "GQA 与 MHA 相差在 ±0.03 奈特之内"), True,
               Text("the claim itself", "命题本身")),
    ),
    control=Text("A quarter of the MLP width must not pass for a match.", "MLP 宽度减到四分之一，不得被判为质量相当。"),
    why={
        Verdict.HOLDS: Text(
            "GQA is {gqa_minus_mha} nats from MHA ({low} to {high}), and decodes {gqa_speedup} times as fast where MQA "
            "reaches {mqa_speedup}.",
            "GQA 与 MHA 相差 {gqa_minus_mha} 奈特（{low} 到 {high}），解码速度是其 {gqa_speedup} 倍，而 MQA 是 {mqa_speedup} 倍。",
        ),
        Verdict.CONDITION: Text(
            "Quality matches ({gqa_minus_mha} nats, {low} to {high}), but speed lies between: GQA decodes {gqa_speedup} times "
            "as fast as MHA, MQA {mqa_speedup} times. How much the cache matters depends on context and batch.",
            "质量相当（{gqa_minus_mha} 奈特，{low} 到 {high}），速度则介于两者之间：GQA 的解码速度是 MHA 的 {gqa_speedup} 倍，MQA 是 {mqa_speedup} 倍。缓存的影响有多大，取决于上下文长度与批大小。",
        ),
        Verdict.REFUTED: Text(
            "At this size GQA costs {gqa_minus_mha} nats ({low} to {high}), more than noise and more than 0.03.",
            "在这个规模上，GQA 的代价是 {gqa_minus_mha} 奈特（{low} 到 {high}），超出噪声，也超出 0.03。",
        ),
        Verdict.UNDECIDED: Text(
            "GQA is {gqa_minus_mha} nats from MHA, but the interval from {low} to {high} is too wide to call it a match or a "
            "loss. It decodes {gqa_speedup} times as fast, MQA {mqa_speedup} times.",
            "GQA 与 MHA 相差 {gqa_minus_mha} 奈特，但区间 {low} 到 {high} 太宽，既不能说相当，也不能说更差。解码速度是 MHA 的 {gqa_speedup} 倍，MQA 是 {mqa_speedup} 倍。",
        ),
    },
    read="clockhand/model/attention.py:Attention",
    measure=measure_grouped_quality,
    seeds=(0, 1, 2, 3, 4),
    cost="training",
)  # fmt: skip

CLAIMS = (A16, A17, A18, A19, A20, A21, A22, A27, B09, B10, B11)
