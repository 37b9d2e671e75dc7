"""Claims about mixture of experts: B15, B16, B20. (Its parameters are B14, in `counting.py`.)

A router sends each token to a few experts. The claims ask how its weights are made, what trains it, what it costs, and
what a look inside shows.
"""

import math
import time
from statistics import median
from typing import Any

import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.count import forward_flops
from clockhand.errors import ClockhandError
from clockhand.lab.claim import BY_DEFINITION, EXACT, FLOAT64, SIX_DIGITS, Claim, Expect, Measured, Text, Verdict
from clockhand.lab.experiment import BASE, Lab, blocks_of
from clockhand.lab.position import small_model
from clockhand.model.moe import MixtureOfExperts, route
from clockhand.model.transformer import Transformer
from clockhand.train.loss import cross_entropy, next_token_targets


def _router_gradient(loss: str, **settings: Any) -> float:
    """The largest gradient that reaches a router from the language-model loss, or from the balance loss."""
    model = small_model(n_experts=4, n_layers=2, balance_coef=1.0, **settings)
    ids = torch.randint(64, (4, 32), generator=torch.Generator().manual_seed(0))
    out = model(ids)
    (cross_entropy(out.logits, next_token_targets(ids)).mean if loss == "language" else out.balance_loss).backward()
    return max(float(block.mlp.router.weight.grad.abs().max()) for block in blocks_of(model))


def measure_routing(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    logits = torch.tensor([[2.0, 1.0, 0.0, -1.0]])
    renormalised, plain = (route(logits, 2, renormalize).weights[0].tolist() for renormalize in (True, False))
    return Measured(
        values={
            "first": renormalised[0],
            "second": renormalised[1],
            "plain_first": plain[0],
            "plain_second": plain[1],
            "single": route(logits, 1, True).weights.item(),
            "language_gradient": _router_gradient("language"),
            "balance_gradient": _router_gradient("balance"),
        },
        control={
            "first": plain[0],
            "single": route(logits, 1, False).weights.item(),
            "language_gradient": _router_gradient("language", renormalize_top_k=False),
        },
        shapes={"router logits": "(1, 4)", "weights": "(1, 2)"},
    )


B15 = Claim(
    id="B15",
    section="3.8.4",
    sentence=Text(
        "Softmax over the experts, the top k kept, their weights renormalised to sum 1.",
        "对专家做 softmax，取前 k 个，权重再归一化，使其和为 1。",
    ),
    measures=Text(
        "Our routing of the scores [2, 1, 0, −1] with k = 2 and k = 1; the gradient that reaches the router with k = 1.",
        "分数 [2, 1, 0, −1] 在 k = 2 与 k = 1 时的路由权重；以及 k = 1 时到达路由器的梯度。",
    ),
    formula="w_e = p_e / Σ_{top k} p    k = 1: w = p/p = 1",
    expects=(
        Expect("first", Text("first weight, renormalised", "第一权重，归一化"), 0.731059, FLOAT64, 1e-6, SIX_DIGITS),
        Expect("second", Text("second weight, renormalised", "第二权重，归一化"), 0.268941, FLOAT64, 1e-6, SIX_DIGITS),
        Expect("plain_first", Text("first weight, as it is", "第一权重，不归一化"), 0.643914, FLOAT64, 1e-6, SIX_DIGITS),
        Expect("plain_second", Text("second weight, as it is", "第二权重，不归一化"), 0.236883, FLOAT64, 1e-6, SIX_DIGITS),
        Expect("single", Text("weight with k = 1", "k = 1 时的权重"), 1.0),
        Expect("language_gradient", Text("router gradient from the language loss, k = 1", "k = 1 时语言损失给路由器的梯度"), 0.0,
               Text("w = p/p does not depend on p", "w = p/p 与 p 无关"), 1e-7,
               Text("the two terms that cancel are rounded in fp32", "相消的两项在 fp32 中舍入"), "<="),
        Expect("balance_gradient", Text("router gradient from the balance loss", "均衡损失给路由器的梯度"), 1e-6,
               Text("not 0", "不为 0"), 0, EXACT, ">="),
    ),
    control=Text("Without renormalisation the weights differ and the router does get a gradient.", "不做归一化时，权重不同，而且路由器确有梯度。"),
    why=Text(
        "The rule is as described: {first} and {second}. With k = 1, as in MiniMind-3, it has a consequence the chapter "
        "misses: p/p is {single} whatever p is, so the language loss sends the router a gradient of {language_gradient}. "
        "Only the balance loss trains it ({balance_gradient}): it learns to spread tokens, not to choose for them.",
        "规则如所述：{first} 与 {second}。但当 k = 1（MiniMind-3 正是如此）时，有一个章节没有提到的后果：无论 p 是多少，p/p 总是 {single}，所以语言损失给路由器的梯度是 {language_gradient}。只有均衡损失在训练它（{balance_gradient}）：它学会的是把 token 摊匀，而不是为 token 挑选专家。",
    ),
    read="clockhand/model/moe.py:route",
    measure=measure_routing,
)  # fmt: skip


# ── what it costs ──────────────────────────────────────────────────────────────────────────────────────────────────


def step_seconds(config: ModelConfig, batch: int, tokens: int, repeats: int) -> float:
    """Median seconds of a forward and backward pass."""
    torch.manual_seed(0)
    model = Transformer(config)
    ids = torch.randint(config.vocab_size, (batch, tokens))
    times = []
    for _ in range(repeats + 1):
        started = time.perf_counter()
        out = model(ids)
        (cross_entropy(out.logits, next_token_targets(ids)).mean + out.balance_loss).backward()
        times.append(time.perf_counter() - started)
    return median(times[1:])  # the first one warms up


def measure_expert_cost(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    full = lab.scale == 1
    batch, tokens, repeats = (8, 256, 5) if full else (1, 32, 2)
    dense = ModelConfig(vocab_size=1024, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=704)

    def experts(chosen: int) -> ModelConfig:
        return ModelConfig(
            vocab_size=1024, d_model=256, n_layers=4, n_heads=4, n_kv_heads=2, d_ff=704, n_experts=4,
            n_experts_per_token=chosen,
        )  # fmt: skip

    seconds = {
        name: step_seconds(config, batch, tokens, repeats)
        for name, config in {"dense": dense, "one": experts(1), "all": experts(4)}.items()
    }
    ratio, everyone = seconds["one"] / seconds["dense"], seconds["all"] / seconds["dense"]
    flops = forward_flops(experts(1), tokens) / forward_flops(dense, tokens)
    limit = 1.15
    verdict = Verdict.HOLDS if ratio <= limit else Verdict.CONDITION if ratio < everyone else Verdict.REFUTED
    return Measured(
        values={"time": ratio, "flops": flops, "all_experts": everyone, "about_equal": ratio <= limit},
        control={"about_equal": everyone <= limit},
        shapes={"ids": f"({batch}, {tokens})"},
        data={"seconds": seconds},
        verdict=verdict,
    )


B16 = Claim(
    id="B16",
    section="3.8.5",
    sentence=Text(
        "An MoE computes only the chosen experts, so it costs about what the dense model does.",
        "MoE 每次只计算被选中的专家，因此计算量与 Dense 相当。",
    ),
    measures=Text(
        "Time of a training step and counted FLOPs: 4 experts with 1 chosen, over a dense model of the same width.",
        "4 选 1 的 MoE 与同宽 Dense 模型之比：一步训练的时间，以及统计出的 FLOPs。",
    ),
    formula="cost per token = k experts + a router of D·E",
    expects=(
        Expect("time", Text("time, MoE over dense", "时间：MoE / Dense"), None),
        Expect("flops", Text("FLOPs, MoE over dense", "FLOPs：MoE / Dense"), 1.0, Text("the router's share", "路由器所占比例"), 0.01,
               Text("the router is 4 columns beside 2,112", "路由器只有 4 列，旁边是 2,112 列")),
        Expect("all_experts", Text("time with all 4 chosen, over dense", "4 个全选的时间 / Dense"), None),
        Expect("about_equal", Text("at most 1.15 times the time", "时间不超过 1.15 倍"), True, Text("our own target", "本项目自定的目标")),
    ),
    control=Text("With all four experts chosen the cost may not pass for equal.", "四个专家全选时，不得被判为相当。"),
    why={
        Verdict.HOLDS: Text(
            "In FLOPs the MoE costs {flops} of the dense model and in time {time}; with all four experts it would be "
            "{all_experts}.",
            "按 FLOPs 计，MoE 是 Dense 的 {flops} 倍，按时间计是 {time} 倍；若四个专家全选，则是 {all_experts} 倍。",
        ),
        Verdict.CONDITION: Text(
            "In FLOPs the MoE costs {flops} of the dense model, but in time {time}: sorting tokens, four smaller products in "
            "place of one, and three times the gradients to keep. All four experts would cost {all_experts}. The gap closes "
            "as the batch grows.",
            "按 FLOPs 计，MoE 是 Dense 的 {flops} 倍，但按时间是 {time} 倍：要给 token 排序，一次大乘法变成四次小乘法，还有更多的梯度要保存。四个专家全选则是 {all_experts} 倍。批越大，差距越小。",
        ),
        Verdict.REFUTED: Text(
            "On this machine one expert of four costs {time} of the dense model, no less than all four ({all_experts}).",
            "在这台机器上，四选一的时间是 Dense 的 {time} 倍，并不比四个全选（{all_experts} 倍）少。",
        ),
    },
    read="clockhand/model/moe.py:MixtureOfExperts.forward",
    measure=measure_expert_cost,
    cost="minutes",
)  # fmt: skip


# ── the microscope ─────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def look_at_router(model: Transformer, ids: Tensor) -> list[dict[str, Any]]:
    """For each layer: `load` per expert, `entropy` of the load in nats, and the first `choice` of every id.

    ids (B, T). An entropy of ln E is perfect balance, 0 is one expert doing everything.
    """
    if not model.config.is_moe:
        raise ClockhandError("n_experts = 0: this model has no router to look at")
    seen: list[dict[str, Any]] = []

    def watch(module: torch.nn.Module, inputs: tuple[Tensor, ...], _output: Any) -> None:
        assert isinstance(module, MixtureOfExperts)
        chosen = module.route(inputs[0].flatten(0, -2)).experts  # (B·T, k)
        load = chosen.flatten().bincount(minlength=model.config.n_experts).double() / chosen.numel()
        entropy = abs((load * load.clamp(min=1e-12).log()).sum().item())
        seen.append({"load": load.tolist(), "entropy": entropy, "choice": chosen[:, 0].tolist()})

    handles = [block.mlp.register_forward_hook(watch) for block in blocks_of(model)]
    model(ids)
    for handle in handles:
        handle.remove()
    return seen


def router_table(model: Transformer, ids: list[int]) -> tuple[list[str], list[list[str]]]:
    """Headings and one row a layer: the load of every expert, and the entropy as a share of perfect balance."""
    length = min(len(ids), model.config.max_seq_len, 4096)
    even = math.log(model.config.n_experts) if model.config.is_moe else 1.0
    rows = [
        [str(number), *(f"{share:.1%}" for share in layer["load"]), f"{layer['entropy'] / even:.3f}"]
        for number, layer in enumerate(look_at_router(model, torch.tensor([ids[:length]])))
    ]
    return ["layer", *(f"expert {e}" for e in range(model.config.n_experts)), "entropy / ln E"], rows


MOE = {**BASE, "n_experts": 4, "n_experts_per_token": 1, "d_ff": 176}


def _inside(lab: Lab, model: Transformer, ids: Tensor) -> dict[str, Any]:
    """What the microscope shows, with the text of the first 240 tokens."""
    layers = look_at_router(model, ids)
    pieces = [lab.corpus.tokenizer.decode([token]) for token in ids.flatten()[:240].tolist()]
    for layer in layers:
        layer["choice"] = layer["choice"][:240]
    return {"layers": layers, "pieces": pieces, "entropy": sum(layer["entropy"] for layer in layers) / len(layers)}


def measure_router(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    ids = lab.held_out(16 * 128).view(16, 128)
    kinds: dict[str, dict[str, Any]] = {
        "balanced": {**MOE, "balance_coef": 0.02},
        "free": {**MOE, "balance_coef": 0.0, "renormalize_top_k": False},
        "untrained router": {**MOE, "balance_coef": 0.0},
    }
    views = {
        name: [_inside(lab, lab.train(settings, seed).model(), ids) for seed in seeds]
        for name, settings in kinds.items()
    }
    torch.manual_seed(0)
    before = _inside(lab, Transformer(lab.config(MOE)).eval(), ids)

    def entropy(name: str) -> float:
        return sum(view["entropy"] for view in views[name]) / len(seeds)

    even = math.log(4)
    wins = all(a["entropy"] > b["entropy"] for a, b in zip(views["balanced"], views["untrained router"]))
    near = entropy("balanced") > 0.95 * even
    return Measured(
        values={
            "balanced": entropy("balanced"),
            "free": entropy("free"),
            "untrained": entropy("untrained router"),
            "before": before["entropy"],
            "even": even,
            "spreads": near and wins,
        },
        control={"spreads": entropy("untrained router") > 0.95 * even},
        shapes={"ids": "(16, 128)", "router logits": "(2048, 4) in each of 4 layers"},
        data={"before": before, **{name: found[0] for name, found in views.items()}},
        verdict=Verdict.HOLDS if near and wins else Verdict.UNDECIDED,
    )


B20 = Claim(
    id="B20",
    section="tasks",
    sentence=Text(
        "Exercise: look into the experts; the balance loss keeps them evenly loaded.",
        "练习：看看专家内部；均衡损失让各专家负载均匀。",
    ),
    measures=Text(
        "Load per expert and layer over 2048 held-out characters, and its entropy: before training, and after training with "
        "the balance loss, with no balance loss, and with a router that only the language loss trains.",
        "2048 个验证字符上每层每个专家的负载及其熵：训练之前；以及训练之后——有均衡损失、没有均衡损失、只由语言损失训练路由器三种情形。",
    ),
    formula="H = −Σ f_e ln f_e,  at most ln 4 = 1.386",
    expects=(
        Expect("balanced", Text("entropy with the balance loss", "有均衡损失时的熵"), None),
        Expect("untrained", Text("without it (k = 1, renormalised: nothing trains the router)", "没有时（k = 1 且归一化：路由器无人训练）"), None),
        Expect("free", Text("without it, weights kept (the language loss trains it)", "没有但保留权重（由语言损失训练）"), None),
        Expect("before", Text("before training", "训练之前"), None),
        Expect("even", Text("perfect balance, ln 4", "完全均衡，ln 4"), math.log(4), BY_DEFINITION),
        Expect("spreads", Text("above 95 % of ln 4, and above the run without", "超过 ln 4 的 95 %，且高于没有的情形"), True, Text("the claim itself", "命题本身")),
    ),
    control=Text("The router without the balance loss may not pass for balanced.", "没有均衡损失的路由器，不得被判为均衡。"),
    why={
        Verdict.HOLDS: Text(
            "With the balance loss the entropy of the load is {balanced} of at most {even}; without it {untrained}, and {free} "
            "when the language loss trains the router. Untrained it was {before}. Look at your own: `clockhand lab B20 --model FOLDER`.",
            "有均衡损失时，负载的熵是 {balanced}（上限 {even}）；没有时是 {untrained}；由语言损失训练路由器时是 {free}；训练之前是 {before}。也可以看自己的模型：`clockhand lab B20 --model FOLDER`。",
        ),
        Verdict.UNDECIDED: Text(
            "With the balance loss the entropy of the load is {balanced} of at most {even}, without it {untrained}, with the "
            "language loss alone {free}; before training it was {before}. The differences are not what the claim needs.",
            "有均衡损失时，负载的熵是 {balanced}（上限 {even}），没有时是 {untrained}，只有语言损失时是 {free}；训练之前是 {before}。差别还不足以支持这个命题。",
        ),
    },
    read="clockhand/model/moe.py:balance_loss",
    measure=measure_router,
    seeds=(0, 1),
    cost="training",
)  # fmt: skip

CLAIMS = (B15, B16, B20)
