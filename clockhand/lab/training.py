"""Claims about training: A23, A26, B08, B22.

What the loss is, what residual paths do to the gradient, where the norm belongs, and what becomes of a structure of
one's own.
"""

import math
from typing import Any

import torch

from clockhand.config import ModelConfig
from clockhand.count import total_parameters
from clockhand.lab.claim import BY_DEFINITION, ROUNDING, Claim, Expect, Measured, Text, Verdict
from clockhand.lab.experiment import BASE, Lab, Trained, blocks_of, compare
from clockhand.lab.position import small_model
from clockhand.model.transformer import Transformer
from clockhand.presets import build
from clockhand.train.loss import cross_entropy, next_token_targets

# ── the loss ───────────────────────────────────────────────────────────────────────────────────────────────────────


@torch.no_grad()
def measure_loss(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    model = small_model()
    ids = torch.arange(3, 15)[None]
    logits = model(ids).logits
    loss = cross_entropy(logits, next_token_targets(ids)).mean.item()
    probabilities = logits.softmax(-1)[0, :-1].gather(-1, ids[0, 1:, None])[:, 0]  # of each token that came, (T-1,)
    product = probabilities.prod().item()

    torch.manual_seed(0)
    fresh = Transformer(build("mini-llama")).eval()
    random_ids = torch.randint(4096, (2, 128))
    initial = cross_entropy(fresh(random_ids).logits, next_token_targets(random_ids)).mean.item()
    unshifted = cross_entropy(logits, ids).mean.item()
    return Measured(
        values={
            "distance": abs(loss + math.log(product) / len(probabilities)),
            "initial": initial,
            "loss": loss,
            "product": product,
        },
        control={"distance": abs(unshifted + math.log(product) / len(probabilities))},
        shapes={"ids": "(1, 12)", "logits": "(1, 12, 64)", "targets": "(1, 12), the last one ignored"},
    )


A26 = Claim(
    id="A26",
    section="2.7.2",
    sentence=Text(
        "Cross-entropy on shifted labels is the mean negative log-likelihood of the text.",
        "对错位标签求交叉熵，就是文本的平均负对数似然。",
    ),
    measures=Text(
        "Our loss on 12 tokens against the logarithm of the product of the 11 probabilities; and the loss of an untrained "
        "Mini-LLaMA on random tokens.",
        "12 个 token 上的损失，与 11 个概率之积的对数对比；以及未训练的 Mini-LLaMA 在随机 token 上的损失。",
    ),
    formula="L = −1/(T−1) · ln Π P(w_{t+1} | w_{≤t})    untrained: ln 4096 = 8.3178",
    expects=(
        Expect("distance", Text("loss against −ln Π P / 11", "损失与 −ln Π P / 11 之差"), 0.0, BY_DEFINITION, 1e-12, ROUNDING, "<="),
        Expect("initial", Text("untrained Mini-LLaMA", "未训练的 Mini-LLaMA"), math.log(4096), Text("uniform guessing", "均匀猜测"), 0.25,
               Text("logits of deviation 0.45 add 0.45²/2 = 0.10, and 254 tokens scatter by 0.03",
                    "标准差 0.45 的 logits 使其多出 0.45²/2 = 0.10，254 个 token 的波动约 0.03")),
        Expect("loss", Text("the loss", "损失"), None),
        Expect("product", Text("the product", "概率之积"), None),
    ),
    control=Text("Without the shift (each token predicts itself) it must miss.", "不错位（每个 token 预测自己）必须对不上。"),
    why=Text(
        "The product of the probabilities is {product}; minus its logarithm over 11 is the loss {loss}, to {distance}. An "
        "untrained model starts at {initial}, a little above ln 4096 because its guesses are not quite uniform.",
        "概率之积是 {product}；取负对数再除以 11，就是损失 {loss}，相差 {distance}。未训练的模型从 {initial} 开始，略高于 ln 4096，因为它的猜测并不完全均匀。",
    ),
    read="clockhand/train/loss.py:cross_entropy",
    measure=measure_loss,
)  # fmt: skip


# ── residual paths ─────────────────────────────────────────────────────────────────────────────────────────────────

DEPTH = 12


def gradient_by_layer(residual: bool, seed: int) -> list[float]:
    """The size of the gradient that arrives at each layer's output of an untrained model of 12 layers."""
    torch.manual_seed(seed)
    config = ModelConfig(
        vocab_size=64, d_model=128, n_layers=DEPTH, n_heads=4, n_kv_heads=2, d_ff=352, max_seq_len=64, residual=residual
    )
    model = Transformer(config)
    arrived: dict[int, float] = {}

    def watch(layer: int) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            output[0].register_hook(lambda gradient: arrived.__setitem__(layer, gradient.norm().item()))

        return hook

    for layer, block in enumerate(blocks_of(model)):
        block.register_forward_hook(watch(layer))
    ids = torch.randint(64, (8, 64), generator=torch.Generator().manual_seed(seed))
    cross_entropy(model(ids).logits, next_token_targets(ids)).mean.backward()
    return [arrived[layer] for layer in range(DEPTH)]


def measure_residuals(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    curves = {
        name: [gradient_by_layer(residual, seed) for seed in seeds]
        for name, residual in (("with", True), ("without", False))
    }

    def first_over_last(name: str) -> float:
        """Geometric mean over the seeds."""
        logs = [math.log(max(curve[0], 1e-45) / curve[-1]) for curve in curves[name]]
        return math.exp(sum(logs) / len(logs))

    def carried(name: str) -> bool:
        return 0.1 < first_over_last(name) < 10

    deep = {**BASE, "n_layers": DEPTH, "d_model": 64, "d_ff": 176}
    steps = 100
    losses = {
        name: lab.losses({**deep, "residual": residual}, seeds[:2], steps=steps)
        for name, residual in (("with", True), ("without", False))
    }
    learns = compare(losses["with"], losses["without"])
    holds = carried("with") and not carried("without") and learns.mean < 0
    return Measured(
        values={
            "with": first_over_last("with"),
            "without": first_over_last("without"),
            "carried": carried("with"),
            "loss_with": sum(losses["with"]) / len(losses["with"]),
            "loss_without": sum(losses["without"]) / len(losses["without"]),
        },
        control={"carried": carried("without")},
        shapes={"gradient at each layer": "(8, 64, 128)"},
        data={"curves": curves, "losses": losses, "steps": steps},
        verdict=Verdict.HOLDS if holds else Verdict.UNDECIDED,
    )


A23 = Claim(
    id="A23",
    section="2.6.1",
    sentence=Text(
        "Residual paths carry the gradient through the depth of the network.",
        "残差连接让梯度无损地穿过网络的深度。",
    ),
    measures=Text(
        "Size of the gradient arriving at layer 1 over that at layer 12, with and without residuals, in an untrained "
        "model; and the loss of both after 100 steps.",
        "未训练的模型中，到达第 1 层与第 12 层的梯度大小之比，有残差与没有残差；以及两者训练 100 步后的损失。",
    ),
    formula="x' = x + f(x)  ⇒  ∂L/∂x = ∂L/∂x' · (1 + f'(x))",
    expects=(
        Expect("with", Text("gradient at layer 1 over layer 12, with residuals", "第 1 层与第 12 层梯度之比，有残差"), None),
        Expect("without", Text("the same without", "同上，没有残差"), None),
        Expect("carried", Text("with residuals within a factor of ten", "有残差时相差不到十倍"), True, Text("the claim itself", "命题本身")),
        Expect("loss_with", Text("loss after training, with", "训练后的损失，有残差"), None),
        Expect("loss_without", Text("loss after training, without", "训练后的损失，没有残差"), None),
    ),
    control=Text("Without residuals the gradient may not pass for carried.", "没有残差时，不得被判为“传到了”。"),
    why={
        Verdict.HOLDS: Text(
            "With residuals the gradient at layer 1 is {with} times that at layer 12, without them {without} times. The 1 in "
            "1 + f' is the elevator. After the same short training the losses are {loss_with} and {loss_without}. (Lossless "
            "is a figure of speech: the blocks add to the gradient on its way.)",
            "有残差时，第 1 层的梯度是第 12 层的 {with} 倍；没有时是 {without} 倍。1 + f' 里的那个 1 就是直达电梯。同样短暂的训练之后，损失分别是 {loss_with} 与 {loss_without}。（“无损”是一种说法：途中各层还会往梯度里添东西。）",
        ),
        Verdict.UNDECIDED: Text(
            "With residuals the gradient at layer 1 is {with} times that at layer 12, without them {without} times; after short "
            "training the losses are {loss_with} and {loss_without}. That is not the clear picture the claim paints.",
            "有残差时，第 1 层的梯度是第 12 层的 {with} 倍，没有时是 {without} 倍；短暂训练之后损失为 {loss_with} 与 {loss_without}。这与命题描绘的清晰图景并不一致。",
        ),
    },
    read="clockhand/model/transformer.py:Block",
    measure=measure_residuals,
    seeds=(0, 1, 2),
    cost="training",
)  # fmt: skip


# ── where the norm belongs ─────────────────────────────────────────────────────────────────────────────────────────


LITTLE = 0.05  # nats a character: a warm-up that is worth less than this can be left out


def measure_norm_position(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    deep = {**BASE, "n_layers": DEPTH, "d_model": 64, "d_ff": 176}
    steps = 120

    def runs(position: str, warmup: int) -> list[Trained]:
        how: dict[str, Any] = dict(steps=steps, warmup_steps=warmup, learning_rate=3e-3)
        return [lab.train({**deep, "norm_position": position}, seed, **how) for seed in seeds]

    kinds = {
        "pre": runs("pre", 0),
        "post": runs("post", 0),
        "post, warm-up": runs("post", 40),
        "pre, warm-up": runs("pre", 40),
    }
    losses = {name: [run.loss for run in found] for name, found in kinds.items()}
    stable = compare(losses["pre"], losses["post"])
    need = compare(losses["pre"], losses["pre, warm-up"])
    helped = compare(losses["post, warm-up"], losses["post"])
    peak = {
        name: max(max(run.column("train/grad_norm")[5:], default=0.0) for run in found) for name, found in kinds.items()
    }
    better = stable.exceeds_noise and stable.mean < 0
    little = need.mean < LITTLE
    if better:
        verdict = Verdict.HOLDS if little else Verdict.CONDITION
    else:
        verdict = Verdict.REFUTED if stable.exceeds_noise else Verdict.UNDECIDED
    return Measured(
        values={
            "pre_minus_post": stable.mean,
            "low": stable.low,
            "high": stable.high,
            "pre_better": better,
            "little_warmup": little,
            "pre_without_warmup": need.mean,
            "post_gain_by_warmup": helped.mean,
            "pre_peak": peak["pre"],
            "post_peak": peak["post"],
        },
        control={"pre_better": (same := compare(losses["pre"], losses["pre"])).exceeds_noise and same.mean < 0},
        data={
            "losses": losses,
            "curves": {name: found[0].column("train/loss") for name, found in kinds.items()},
            "gradients": {name: found[0].column("train/grad_norm") for name, found in kinds.items()},
        },
        verdict=verdict,
    )


B08 = Claim(
    id="B08",
    section="3.4.4",
    sentence=Text(
        "Pre-norm trains more stably than post-norm and needs little warm-up.",
        "Pre-Norm 比 Post-Norm 训练更稳定，几乎不需要预热。",
    ),
    measures=Text(
        "Twelve thin layers, the same learning rate, no warm-up: validation loss and largest gradient of both; and what a "
        "warm-up changes for either.",
        "十二个窄层，学习率相同，不预热：两者的验证损失与最大梯度；以及预热对各自有何改变。",
    ),
    formula="pre: x + f(norm(x))      post: norm(x + f(x))",
    expects=(
        Expect("pre_minus_post", Text("loss of pre-norm minus post-norm, no warm-up", "不预热：Pre-Norm 减 Post-Norm 的损失"), None),
        Expect("low", Text("95 % interval from", "95 % 区间下限"), None),
        Expect("high", Text("to", "95 % 区间上限"), None),
        Expect("pre_better", Text("pre-norm lower, beyond the noise", "Pre-Norm 更低，且超出噪声"), True, Text("the claim itself", "命题本身")),
        Expect("little_warmup", Text("pre-norm loses less than 0.05 nats without a warm-up", "Pre-Norm 不预热，损失不超过 0.05 奈特"), True, Text("the claim itself", "命题本身")),
        Expect("pre_without_warmup", Text("pre-norm: what leaving out the warm-up costs", "Pre-Norm 不预热的代价"), None),
        Expect("post_gain_by_warmup", Text("post-norm: change by a warm-up", "Post-Norm 加预热后的变化"), None),
        Expect("pre_peak", Text("largest gradient after step 5, pre-norm", "第 5 步之后的最大梯度，Pre-Norm"), None),
        Expect("post_peak", Text("the same, post-norm", "同上，Post-Norm"), None),
    ),
    control=Text("Pre-norm against itself may not come out as better.", "Pre-Norm 与自己相比，不得被判为更好。"),
    why={
        Verdict.HOLDS: Text(
            "Without warm-up pre-norm ends {pre_minus_post} nats from post-norm ({low} to {high}). Leaving out the warm-up "
            "costs pre-norm {pre_without_warmup}; giving post-norm one changes it by {post_gain_by_warmup}. Largest gradients: "
            "{pre_peak} and {post_peak}.",
            "不预热时，Pre-Norm 的最终损失与 Post-Norm 相差 {pre_minus_post} 奈特（{low} 到 {high}）。省去预热，Pre-Norm 的代价是 {pre_without_warmup}；给 Post-Norm 加上预热，变化为 {post_gain_by_warmup}。最大梯度：{pre_peak} 与 {post_peak}。",
        ),
        Verdict.CONDITION: Text(
            "Without warm-up pre-norm ends {pre_minus_post} nats from post-norm ({low} to {high}): it learns where post-norm "
            "hardly does. But it is not indifferent: leaving out the warm-up costs it {pre_without_warmup} nats at this rate, "
            "with gradients up to {pre_peak}. A warm-up changes post-norm by {post_gain_by_warmup}.",
            "不预热时，Pre-Norm 的最终损失与 Post-Norm 相差 {pre_minus_post} 奈特（{low} 到 {high}）：Post-Norm 几乎学不动，它却能学。但它并非毫不在意：在这个学习率下省去预热，代价是 {pre_without_warmup} 奈特，梯度最大达 {pre_peak}。给 Post-Norm 加上预热，变化为 {post_gain_by_warmup}。",
        ),
        Verdict.REFUTED: Text(
            "At this depth and rate post-norm is the better one: pre-norm ends {pre_minus_post} nats from it ({low} to "
            "{high}). Stability shows at greater depth.",
            "在这样的深度与学习率下，反而是 Post-Norm 更好：Pre-Norm 与它相差 {pre_minus_post} 奈特（{low} 到 {high}）。稳定性的优势要在更深的网络中才显现。",
        ),
        Verdict.UNDECIDED: Text(
            "Pre-norm ends {pre_minus_post} nats from post-norm, somewhere between {low} and {high}: not beyond the noise of "
            "so few seeds. A warm-up changes post-norm by {post_gain_by_warmup}.",
            "Pre-Norm 与 Post-Norm 相差 {pre_minus_post} 奈特，区间 {low} 到 {high}：没有超出这几个种子的噪声。预热使 Post-Norm 变化 {post_gain_by_warmup}。",
        ),
    },
    read="clockhand/model/transformer.py:Block.forward",
    measure=measure_norm_position,
    seeds=(0, 1, 2),
    cost="training",
)  # fmt: skip


# ── a structure of one's own ───────────────────────────────────────────────────────────────────────────────────────

SHAPES: dict[str, dict[str, Any]] = {
    "2 layers": {**BASE, "n_layers": 2, "d_model": 176, "d_ff": 512},
    "4 layers": BASE,
    "8 layers": {**BASE, "n_layers": 8, "d_model": 88, "d_ff": 256},
}


def measure_own_structure(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    losses = {name: lab.losses(settings, seeds) for name, settings in SHAPES.items()}
    sizes = {name: total_parameters(lab.config(settings)) for name, settings in SHAPES.items()}
    untrained = math.log(lab.corpus.tokenizer.vocab_size)
    learnt = all(loss < 0.75 * untrained for found in losses.values() for loss in found)
    return Measured(
        values={
            "shallow": compare(losses["2 layers"], losses["4 layers"]).mean,
            "deep": compare(losses["8 layers"], losses["4 layers"]).mean,
            "base": sum(losses["4 layers"]) / len(seeds),
            "size_spread": max(sizes.values()) / min(sizes.values()),
            "all_learn": learnt,
        },
        control={"all_learn": untrained < 0.75 * untrained},
        data={"losses": losses, "parameters": sizes},
        verdict=Verdict.HOLDS if learnt else Verdict.UNDECIDED,
    )


B22 = Claim(
    id="B22",
    section="tasks",
    sentence=Text(
        "Challenge: change the structure (more layers, other heads) and train one's own configuration.",
        "挑战：修改模型结构（增加层数、调整头数），训练自己的配置。",
    ),
    measures=Text(
        "2, 4 and 8 layers at about equal parameters, trained alike; every field of every preset can be changed so.",
        "参数量大致相等的 2、4、8 层模型，同样训练；任何预设的任何字段都可以这样修改。",
    ),
    formula="clockhand train --preset mini-llama --set n_layers=6 --set n_kv_heads=4 …",
    expects=(
        Expect("base", Text("loss with 4 layers", "4 层的损失"), None),
        Expect("shallow", Text("2 wide layers instead", "换成 2 个宽层"), None),
        Expect("deep", Text("8 narrow layers instead", "换成 8 个窄层"), None),
        Expect("size_spread", Text("largest over smallest model", "最大与最小模型之比"), 1.0, Text("equal by design", "按设计相等"), 0.08,
               Text("widths are whole numbers of heads", "宽度须是头数的整数倍")),
        Expect("all_learn", Text("all learn (a quarter below guessing)", "都学到了东西（比瞎猜低四分之一）"), True, Text("the claim itself", "命题本身")),
    ),
    control=Text("Guessing uniformly may not pass for learning.", "均匀瞎猜不得被判为学到了。"),
    why={
        Verdict.HOLDS: Text(
            "All three structures learn. Against 4 layers ({base} nats), 2 wide layers end {shallow} nats away and 8 narrow ones "
            "{deep}, after the same steps. `clockhand lab ablate` does this for any field.",
            "三种结构都能学会。与 4 层（{base} 奈特）相比，训练同样步数后，2 个宽层相差 {shallow}，8 个窄层相差 {deep}。`clockhand lab ablate` 可以对任何字段做同样的比较。",
        ),
        Verdict.UNDECIDED: Text(
            "Not every structure got a quarter below guessing in so few steps (4 layers: {base} nats).",
            "步数太少，并非每种结构都能比瞎猜低四分之一（4 层：{base} 奈特）。",
        ),
    },
    read="clockhand/config.py:ModelConfig",
    measure=measure_own_structure,
    seeds=(0, 1),
    cost="training",
)  # fmt: skip

CLAIMS = (A23, A26, B08, B22)
