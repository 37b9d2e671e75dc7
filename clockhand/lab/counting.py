"""Claims about sizes: A15, A24, A25, B01, B02, B13, B14, B19.

Everything is counted twice, from the config alone (`clockhand/count.py`) and on the built model, and the two chapters'
riddles (64M or 75.7M? 198M or 226M?) are solved by changing one field at a time.
"""

import torch

from clockhand.config import ModelConfig
from clockhand.count import active_parameters, model_parts, modules, total_parameters
from clockhand.lab.claim import ARITHMETIC, BY_DEFINITION, ROUNDING, Claim, Expect, Measured, Text, Value, Verdict
from clockhand.lab.experiment import Lab, blocks_of
from clockhand.lab.position import small_model
from clockhand.model.transformer import Transformer
from clockhand.presets import build
from clockhand.train.loss import cross_entropy, next_token_targets


def by_path(config: ModelConfig) -> dict[str, int]:
    """Counted parameters of every module: `{"blocks.mlp": 25952256, ...}`."""
    return {module.path: module.parameters for module in modules(config)}


def built(config: ModelConfig) -> Transformer:
    """The model itself, with its sizes but no memory for its weights."""
    with torch.device("meta"):
        return Transformer(config)


def parameters_of(model: torch.nn.Module) -> int:
    """Parameters of a built model; a tied one counts once."""
    return sum(p.numel() for p in model.parameters())


def measure_mlp_share(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    config = build("mini-llama")
    model = built(config)
    mlp = sum(parameters_of(block.mlp) for block in blocks_of(model))
    attention = sum(parameters_of(block.attention) for block in blocks_of(model))
    total = parameters_of(model)
    return Measured(
        values={"share": 100 * mlp / total, "mlp": mlp, "counted": by_path(config)["blocks.mlp"], "total": total},
        control={"share": 100 * attention / total, "mlp": attention},
        data={"modules": by_path(config)},
    )


A15 = Claim(
    id="A15",
    section="2.4.1",
    sentence=Text("More than 60 % of the parameters sit in the feed-forward layers.", "超过 60 % 的参数在前馈层里。"),
    measures=Text("Parameters of the 12 MLPs of Mini-LLaMA over all of them.", "Mini-LLaMA 12 个 MLP 的参数占全部的比例。"),
    formula="12 · 3 · 512 · 1408 / 35,926,528",
    expects=(
        Expect("share", Text("share of the MLPs, %", "MLP 占比 %"), 72.2370, ARITHMETIC, 1e-3,
               Text("given to six digits", "给出六位"), chapter=60.0, chapter_relation=">="),
        Expect("mlp", Text("in the MLPs", "MLP 参数"), 25_952_256, ARITHMETIC),
        Expect("counted", Text("the same from the config", "仅由配置算出"), 25_952_256, ARITHMETIC),
        Expect("total", Text("in all", "总计"), 35_926_528, ARITHMETIC),
    ),
    control=Text("Attention's share must miss.", "注意力的占比必须对不上。"),
    why=Text(
        "{mlp} of {total} parameters are in the MLPs: {share} %. A small vocabulary and few KV heads make the share larger "
        "than usual.",
        "{total} 个参数中有 {mlp} 个在 MLP：{share} %。词表小、KV 头少，使这个比例比一般模型更大。",
    ),
    read="clockhand/count.py:modules",
    measure=measure_mlp_share,
)  # fmt: skip


def measure_tying(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    tied = parameters_of(built(build("mini-llama")))
    untied = parameters_of(built(build("mini-llama", tie_embeddings=False)))
    saved = untied - tied
    half = parameters_of(built(build("mini-llama", vocab_size=2048, tie_embeddings=False)))
    half_saved = half - parameters_of(built(build("mini-llama", vocab_size=2048)))
    return Measured(
        values={
            "saved": saved,
            "untied": untied,
            "share": 100 * 2 * saved / untied,
            "share_of_tied": 100 * saved / tied,
        },
        control={"saved": half_saved, "share": 100 * 2 * half_saved / half},
        shapes={"token_embedding.weight": "(4096, 512)", "lm_head.weight": "the same tensor"},
    )


A24 = Claim(
    id="A24",
    section="2.6.2",
    sentence=Text(
        "Tying saves 2,097,152 parameters; the two matrices are 11.0 % of the model.",
        "权重绑定节省 2,097,152 个参数；两个矩阵占模型的 11.0 %。",
    ),
    measures=Text("Mini-LLaMA built tied and untied.", "分别以绑定与不绑定方式构建 Mini-LLaMA。"),
    formula="4096 · 512 = 2,097,152    2 · 2,097,152 / 38,023,680 = 11.03 %",
    expects=(
        Expect("saved", Text("parameters saved", "节省的参数"), 2_097_152, ARITHMETIC),
        Expect("share", Text("both matrices, % of the untied model", "两个矩阵占不绑定模型的 %"), 11.0308, ARITHMETIC, 1e-3,
               Text("given to six digits", "给出六位"), chapter=11.0, chapter_tolerance=0.05),
        Expect("untied", Text("untied total", "不绑定的总参数"), 38_023_680, ARITHMETIC),
        Expect("share_of_tied", Text("one matrix, % of the tied model", "一个矩阵占绑定模型的 %"), None),
    ),
    control=Text("Half the vocabulary must miss.", "词表减半必须对不上。"),
    why=Text(
        "The 11.0 % are of the untied model of {untied}: {share} %. Tied, one matrix of {saved} remains, {share_of_tied} % of "
        "the model.",
        "11.0 % 是对不绑定的模型（{untied}）而言：{share} %。绑定后只剩一个 {saved} 的矩阵，占模型的 {share_of_tied} %。",
    ),
    read="clockhand/model/transformer.py:Transformer",
    measure=measure_tying,
)  # fmt: skip


@torch.no_grad()
def measure_total(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    torch.manual_seed(0)
    config = build("mini-llama")
    model = Transformer(config).eval()
    logits = model(torch.tensor([[1, 232, 58, 209, 2]])).logits
    untied = built(build("mini-llama", tie_embeddings=False))
    return Measured(
        values={
            "total": parameters_of(model),
            "counted": total_parameters(config),
            "layer": parameters_of(blocks_of(model)[0]),
            "logits": "×".join(map(str, logits.shape)),
            "finite": bool(logits.isfinite().all()),
        },
        control={"total": parameters_of(untied), "counted": total_parameters(untied.config)},
        shapes={"ids": "(1, 5)", "hidden": "(1, 5, 512)", "logits": "(1, 5, 4096)"},
        data={"modules": by_path(config)},
    )


A25 = Claim(
    id="A25",
    section="2.7.2",
    sentence=Text(
        "The model has 35,926,528 parameters, and 5 tokens give logits of shape [1, 5, 4096].",
        "模型共有 35,926,528 个参数；5 个 token 得到形状为 [1, 5, 4096] 的 logits。",
    ),
    measures=Text("The built Mini-LLaMA, and the chapter's own five tokens through it.", "构建好的 Mini-LLaMA，并让章节中的五个 token 通过它。"),
    formula="4096·512 + 12·2,819,072 + 512 = 35,926,528",
    expects=(
        Expect("total", Text("parameters", "参数"), 35_926_528, ARITHMETIC),
        Expect("counted", Text("from the config alone", "仅由配置算出"), 35_926_528, ARITHMETIC),
        Expect("layer", Text("in one layer", "每层"), 2_819_072, ARITHMETIC),
        Expect("logits", Text("shape of the logits", "logits 的形状"), "1×5×4096"),
        Expect("finite", Text("all finite", "全部有限"), True),
    ),
    control=Text("The untied model has more.", "不绑定的模型参数更多。"),
    why=Text(
        "An embedding, twelve layers of {layer} and one last norm make {total}; the head is the embedding.",
        "一个词嵌入、十二层各 {layer}、末尾一个归一化，合计 {total}；输出头就是词嵌入。",
    ),
    read="clockhand/presets.py:PRESETS",
    measure=measure_total,
)  # fmt: skip


def measure_embedding_share(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    published, textbook = build("minimind-3"), build("minimind-3-textbook")
    embedding = by_path(published)["token_embedding"]
    return Measured(
        values={
            "own": 100 * embedding / parameters_of(built(textbook)),
            "published": 100 * embedding / parameters_of(built(published)),
            "embedding": built(published).token_embedding.weight.numel(),
        },
        control={"embedding": built(build("mini-llama")).token_embedding.weight.numel()},
        shapes={"token_embedding.weight": "(6400, 768)"},
    )


B01 = Claim(
    id="B01",
    section="3.2.2",
    sentence=Text(
        "The embedding has 6400 × 768 = 4,915,200 parameters, 7.7 % of the total.",
        "词嵌入有 6400 × 768 = 4,915,200 个参数，占总量的 7.7 %。",
    ),
    measures=Text(
        "The embedding over the model with the chapter's own layer sizes, and over the published one.",
        "词嵌入占比：分别除以按章节自身层尺寸构建的模型，以及已发布的模型。",
    ),
    formula="4,915,200 / 75,707,136 = 6.49 %    4,915,200 / 63,912,192 = 7.69 %",
    expects=(
        Expect("own", Text("% of the model the chapter describes", "占章节所述模型的 %"), 6.49239, ARITHMETIC, 1e-4,
               Text("given to six digits", "给出六位"), chapter=7.7, chapter_tolerance=0.05),
        Expect("published", Text("% of the published model", "占已发布模型的 %"), 7.69055, ARITHMETIC, 1e-4,
               Text("given to six digits", "给出六位"), chapter=7.7, chapter_tolerance=0.05),
        Expect("embedding", Text("parameters of the embedding", "词嵌入参数"), 4_915_200, ARITHMETIC),
    ),
    control=Text("Mini-LLaMA's embedding must miss.", "Mini-LLaMA 的词嵌入必须对不上。"),
    why=Text(
        "{embedding} is exact. But 7.7 % is the share in the published model ({published} %), not in the one the chapter's "
        "own sizes make ({own} %). The two are different models; B13 finds the difference.",
        "{embedding} 精确无误。但 7.7 % 是它在已发布模型中的占比（{published} %），而不是在章节自己的尺寸所构成的模型中的占比（{own} %）。这是两个不同的模型；差别何在，见 B13。",
    ),
    read="clockhand/count.py:model_parts",
    measure=measure_embedding_share,
    if_false=Verdict.EXPLAINED,
)  # fmt: skip


def measure_tied_head(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    ids = torch.arange(3, 19)[None]

    def gradients(tied: bool) -> tuple[Transformer, torch.Tensor]:
        model = small_model(tie_embeddings=tied)
        model.lm_head.load_state_dict({"weight": model.token_embedding.weight})  # equal values, tied or not
        cross_entropy(model(ids).logits, next_token_targets(ids)).mean.backward()
        assert model.token_embedding.weight.grad is not None
        return model, model.token_embedding.weight.grad

    one, gradient = gradients(tied=True)
    two, embedding_gradient = gradients(tied=False)
    assert two.lm_head.weight.grad is not None
    hidden = one.hidden(ids).hidden

    def distance(model: Transformer) -> float:
        return (model.lm_head(hidden) - hidden @ one.token_embedding.weight.T).abs().max().item()

    return Measured(
        values={
            "shared": one.lm_head.weight.data_ptr() == one.token_embedding.weight.data_ptr(),
            "product": distance(one),
            "gradient": (gradient - embedding_gradient - two.lm_head.weight.grad).abs().max().item(),
        },
        control={
            "shared": two.lm_head.weight.data_ptr() == two.token_embedding.weight.data_ptr(),
            "gradient": (gradient - embedding_gradient).abs().max().item(),
        },
        shapes={"hidden": "(1, 16, 64)", "E": "(64, 64)", "logits": "(1, 16, 64)"},
    )


B02 = Claim(
    id="B02",
    section="3.2.3",
    sentence=Text("With a tied head, logits = x·Eᵀ.", "权重共享时，logits = x·Eᵀ。"),
    measures=Text(
        "Whether head and embedding are one storage, the logits against x·Eᵀ, and the one gradient against the sum of the two "
        "that an untied copy gets.",
        "输出头与词嵌入是否同一块存储；logits 与 x·Eᵀ 之差；以及它的一个梯度，与不共享时两个梯度之和的差。",
    ),
    formula="∂L/∂E = ∂L/∂E_in + ∂L/∂E_out",
    expects=(
        Expect("shared", Text("one storage", "同一块存储"), True),
        Expect("product", Text("distance from x·Eᵀ", "与 x·Eᵀ 的距离"), 0.0, BY_DEFINITION, 1e-12, ROUNDING, "<="),
        Expect("gradient", Text("its gradient against the sum of the two", "其梯度与两者之和的差"), 0.0, BY_DEFINITION, 1e-12, ROUNDING, "<="),
    ),
    control=Text("The untied copy shares nothing, and one of its gradients alone must miss.", "不共享的副本没有共用存储；单独一个梯度必须对不上。"),
    why=Text(
        "One matrix, one storage, one gradient, which is the sum of what reading and writing ask of it (to {gradient}).",
        "一个矩阵、一块存储、一个梯度；这个梯度正是“读”与“写”两方面要求之和（相差 {gradient}）。",
    ),
    read="clockhand/model/transformer.py:Transformer",
    measure=measure_tied_head,
)  # fmt: skip


# ── the two riddles ────────────────────────────────────────────────────────────────────────────────────────────────


def dense_steps() -> list[tuple[Text, int]]:
    """From the chapter's sizes to the published model, one change at a time: (what changed, parameters then)."""
    textbook = build("minimind-3-textbook")
    narrower = build("minimind-3-textbook", d_ff=build("minimind-3").d_ff)
    return [
        (Text("the chapter's sizes, width 3072", "章节的尺寸，宽 3072"), parameters_of(built(textbook))),
        (Text("width 2432 = ceil(768π/64)·64", "宽 2432 = ceil(768π/64)·64"), parameters_of(built(narrower))),
        (Text("q and k norms, 192 a layer", "q、k 归一化，每层 192"), parameters_of(built(build("minimind-3")))),
    ]


def measure_dense_riddle(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    (_, textbook), (_, narrower), (_, published) = dense_steps()
    return Measured(
        values={
            "textbook": textbook,
            "published": published,
            "width": narrower - textbook,
            "qk_norms": published - narrower,
            "counted": total_parameters(build("minimind-3")),
        },
        control={"published": textbook, "textbook": narrower},
        data={"steps": [[what.en, what.zh, total] for what, total in dense_steps()]},
    )


B13 = Claim(
    id="B13",
    section="3.10",
    sentence=Text(
        "The model has about 64M parameters; hidden_dim and “other optimisation details” explain the difference.",
        "模型约 64M 参数；与理论值的差异来自 hidden_dim 和“其他优化细节”。",
    ),
    measures=Text(
        "The model of the chapter's ModelArgs, then one change after another up to the published one.",
        "先构建章节 ModelArgs 的模型，再逐项修改，直到与已发布的模型一致。",
    ),
    formula="75,707,136 − 8·3·768·640 + 8·2·96 = 63,912,192",
    expects=(
        Expect("textbook", Text("width 3072, as in ModelArgs", "宽 3072，即 ModelArgs"), 75_707_136, ARITHMETIC,
               chapter=64_000_000, chapter_tolerance=500_000),
        Expect("published", Text("the published model", "已发布的模型"), 63_912_192, ARITHMETIC,
               chapter=64_000_000, chapter_tolerance=500_000),
        Expect("width", Text("change by width 2432", "宽改为 2432 的变化"), -11_796_480, ARITHMETIC),
        Expect("qk_norms", Text("change by the q and k norms", "q、k 归一化带来的变化"), 1_536, ARITHMETIC),
        Expect("counted", Text("published, from the config alone", "已发布模型，仅由配置算出"), 63_912_192, ARITHMETIC),
    ),
    control=Text("Each model must miss the other's total.", "两个模型互换，总数必须对不上。"),
    why=Text(
        "There are no details left over. The chapter's ModelArgs make {textbook}. The published model is narrower inside, "
        "2432 = ceil(768π/64)·64 instead of 3072 ({width}), and normalises the queries and keys of every head ({qk_norms} "
        "more): {published}, exactly.",
        "没有剩下什么“细节”。章节的 ModelArgs 得到 {textbook}。已发布模型的中间层更窄，是 2432 = ceil(768π/64)·64 而不是 3072（{width}），并对每个头的 q、k 做归一化（多 {qk_norms}）：恰好 {published}。",
    ),
    read="clockhand/presets.py:PRESETS",
    measure=measure_dense_riddle,
    if_false=Verdict.EXPLAINED,
)  # fmt: skip


def measure_moe_riddle(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    config = build("minimind-3-moe")
    model = built(config)
    wide = built(build("minimind-3-moe", d_ff=3072))
    storages = [id(parameter) for block in blocks_of(model) for parameter in block.parameters()]
    experts_of = sum(parameters_of(expert) for block in blocks_of(wide) for expert in block.mlp.experts)
    routers = sum(parameters_of(block.mlp.router) for block in blocks_of(model))
    return Measured(
        values={
            "total": parameters_of(model),
            "active": active_parameters(config),
            "shared_layers": len(storages) - len(set(storages)),
            "experts_3072": experts_of,
            "experts_2432": sum(parameters_of(e) for block in blocks_of(model) for e in block.mlp.experts),
            "routers": routers,
        },
        control={"total": parameters_of(wide), "active": total_parameters(config)},
        shapes={"router.weight": "(4, 768)", "gate_proj.weight": "(2432, 768), 4 a layer"},
        data={"wide_total": parameters_of(wide)},
    )


B14 = Claim(
    id="B14",
    section="3.8.5",
    sentence=Text(
        "The MoE model has about 198M parameters, less than 226.5M “because some layers are shared”.",
        "MoE 模型实际约 198M，少于 226.5M，“因部分层共享”。",
    ),
    measures=Text(
        "The built MiniMind-3-MoE: parameters, those active for one token, and how many tensors of its layers are shared.",
        "构建 MiniMind-3-MoE：总参数、单个 token 的活跃参数，以及各层之间共享的张量个数。",
    ),
    formula="63,912,192 − 8·5,603,328 + 8·(4·5,603,328 + 3,072) = 198,416,640",
    expects=(
        Expect("shared_layers", Text("tensors shared between layers", "层间共享的张量"), 0, ARITHMETIC, chapter=1,
               chapter_relation=">="),
        Expect("total", Text("parameters", "总参数"), 198_416_640, ARITHMETIC, chapter=198_000_000, chapter_tolerance=500_000),
        Expect("active", Text("active for one token", "单个 token 的活跃参数"), 63_936_768, ARITHMETIC),
        Expect("experts_3072", Text("experts alone, width 3072", "仅专家，宽 3072"), 226_492_416, ARITHMETIC,
               chapter=226_500_000, chapter_tolerance=50_000),
        Expect("experts_2432", Text("experts alone, width 2432", "仅专家，宽 2432"), 179_306_496, ARITHMETIC),
        Expect("routers", Text("routers", "路由器"), 24_576, ARITHMETIC),
    ),
    control=Text("Experts of width 3072 must miss the total, and the total must miss the active count.", "专家宽 3072 时总数必须对不上；总参数也不得等于活跃参数。"),
    why=Text(
        "Nothing is shared ({shared_layers} tensors). The 226.5M are experts of width 3072; the published ones have 2432 and "
        "come to {experts_2432}. With attention, embedding, norms and {routers} parameters of routers that makes {total}, of "
        "which {active} work on any one token.",
        "什么都没有共享（{shared_layers} 个张量）。226.5M 是宽 3072 的专家；已发布的专家宽 2432，合计 {experts_2432}。加上注意力、词嵌入、归一化，以及 {routers} 个路由器参数，共 {total}，其中每个 token 用到 {active}。",
    ),
    read="clockhand/model/moe.py:MixtureOfExperts",
    measure=measure_moe_riddle,
)  # fmt: skip


def _largest_gap(config: ModelConfig) -> int:
    """The largest difference, over all modules, between counted parameters and those of the built model."""
    model = built(config)
    found = {part.name: parameters_of(getattr(model, part.name)) for part in model_parts(config).parts}
    if config.tie_embeddings:
        found["lm_head"] = 0  # counted with the embedding
    counted = {part.name: part.parameters for part in model_parts(config).parts}
    for name in ("attention_norm", "attention", "mlp_norm", "mlp"):
        found[f"blocks.{name}"] = sum(parameters_of(getattr(block, name)) for block in blocks_of(model))
        counted[f"blocks.{name}"] = by_path(config)[f"blocks.{name}"]
    return max(abs(found[name] - counted[name]) for name in found)


_COUNTED = ("mini-llama", "minimind-3", "minimind-3-moe", "minimind-3-textbook")


def measure_table(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    totals: dict[str, Value] = {name: parameters_of(built(build(name))) for name in _COUNTED}
    wrong = by_path(build("minimind-3-textbook"))["blocks.mlp"] - by_path(build("minimind-3"))["blocks.mlp"]
    return Measured(
        values={"gap": max(_largest_gap(build(name)) for name in _COUNTED), **totals},
        control={"gap": wrong, "minimind-3": totals["minimind-3-textbook"]},
        data={"tables": {name: by_path(build(name)) for name in _COUNTED}},
    )


B19 = Claim(
    id="B19",
    section="tasks",
    sentence=Text(
        "Exercise: count the parameters module by module, compare with theory, explain the difference.",
        "练习：逐模块统计参数量，与理论对比，分析差异。",
    ),
    measures=Text(
        "Every module of four models, counted from the config and on the built model.", "四个模型的每个模块，分别由配置算出与在构建好的模型上统计。"
    ),
    formula="Σ modules = total",
    expects=(
        Expect("gap", Text("largest gap, counted against built", "算出与构建之间的最大差距"), 0, ARITHMETIC),
        Expect("mini-llama", Text("mini-llama", "mini-llama"), 35_926_528, ARITHMETIC),
        Expect("minimind-3", Text("minimind-3", "minimind-3"), 63_912_192, ARITHMETIC),
        Expect("minimind-3-moe", Text("minimind-3-moe", "minimind-3-moe"), 198_416_640, ARITHMETIC),
        Expect("minimind-3-textbook", Text("minimind-3-textbook", "minimind-3-textbook"), 75_707_136, ARITHMETIC),
    ),
    control=Text("The textbook's width in place of the published one must show a gap.", "用教材宽度代替已发布宽度，必须出现差距。"),
    why=Text(
        "Module by module the gap between theory and the built model is {gap}. This is the table behind B13 and B14; the "
        "treemap in the report draws it, and `clockhand inspect minimind-3 minimind-3-textbook` prints it.",
        "逐模块比较，理论与构建之间的差距是 {gap}。这就是 B13 与 B14 背后的那张表；报告中的矩形树图把它画了出来，`clockhand inspect minimind-3 minimind-3-textbook` 可以打印它。",
    ),
    read="clockhand/count.py:total_parameters",
    measure=measure_table,
)  # fmt: skip

CLAIMS = (A15, A24, A25, B01, B02, B13, B14, B19)
