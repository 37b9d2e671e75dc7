"""The exercises that are neither counting nor training: B17, a block from primitives, and B18, held against others.

B17 prints the shapes on the way through one block. B18 copies weights into transformers' own Qwen3 and Qwen3-MoE and
looks for the first layer that differs.
"""

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from clockhand.config import ModelConfig
from clockhand.interop.hf import save_model
from clockhand.lab.claim import ARITHMETIC, Claim, Expect, Measured, Text, Verdict
from clockhand.lab.counting import parameters_of
from clockhand.lab.experiment import Lab, blocks_of
from clockhand.model.transformer import Transformer


@contextmanager
def shapes_of(module: torch.nn.Module) -> Iterator[dict[str, str]]:
    """Inside the block, the output shape of every part of `module` that runs is noted: path -> shape."""
    seen: dict[str, str] = {}

    def note(path: str) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor):
                seen[path] = str(tuple(first.shape))

        return hook

    handles = [part.register_forward_hook(note(path)) for path, part in module.named_modules() if path]
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def exercise_model(**settings: Any) -> Transformer:
    """The exercise's sizes: width 256, 4 heads, inner width 1024, in a model of one block."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=32, d_model=256, n_layers=1, n_heads=4, d_ff=1024, max_seq_len=128)
    return Transformer(ModelConfig(**{**sizes, **settings})).eval()


@torch.no_grad()
def measure_block(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    model, grouped = exercise_model(), exercise_model(n_kv_heads=2)
    with shapes_of(blocks_of(model)[0]) as shapes:
        model(torch.zeros(2, 128, dtype=torch.int64))
    return Measured(
        values={
            "parameters": parameters_of(blocks_of(model)[0]),
            "output": shapes["mlp.down_proj"],
            "attention": parameters_of(blocks_of(model)[0].attention),
            "mlp": parameters_of(blocks_of(model)[0].mlp),
        },
        control={
            "parameters": parameters_of(blocks_of(grouped)[0]),
            "attention": parameters_of(blocks_of(grouped)[0].attention),
        },
        shapes={"x": "(2, 128, 256)", **{path: shape for path, shape in shapes.items() if path != "dropout"}},
    )


B17 = Claim(
    id="B17",
    section="tasks",
    sentence=Text(
        "Exercise: one block from primitives, width 256, 4 heads, inner width 1024, batch 2, length 128.",
        "练习：用基本算子搭一个 Block：宽 256，4 个头，中间宽 1024，批 2，长 128。",
    ),
    measures=Text("Our own block with these sizes: the shape after every part, and its parameters.", "用这些尺寸构建本项目的 Block：每个部件之后的形状，以及参数量。"),
    formula="4·256² + 3·256·1024 + 2·256 = 1,049,088",
    expects=(
        Expect("parameters", Text("parameters of the block", "Block 的参数"), 1_049_088, ARITHMETIC),
        Expect("output", Text("shape of the output", "输出形状"), "(2, 128, 256)"),
        Expect("attention", Text("in attention", "注意力"), 262_144, ARITHMETIC),
        Expect("mlp", Text("in the MLP", "MLP"), 786_432, ARITHMETIC),
    ),
    control=Text("With 2 KV heads it has fewer.", "改成 2 个 KV 头，参数会更少。"),
    why=Text(
        "{attention} parameters of attention, {mlp} of the MLP and two norms make {parameters}; what went in as (2, 128, 256) "
        "came out as {output}. Read the block, then write your own.",
        "注意力 {attention}，MLP {mlp}，加上两个归一化，共 {parameters}；输入 (2, 128, 256)，输出 {output}。先读这个 Block，再动手写自己的。",
    ),
    read="clockhand/model/transformer.py:Block",
    measure=measure_block,
)  # fmt: skip


SAME = 1e-4  # fp32, two programs that add in different orders; a wrong permutation of q is a thousand times beyond it


def _peer_size(moe: bool) -> ModelConfig:
    return ModelConfig(
        vocab_size=512, d_model=96, n_layers=3, n_heads=8, n_kv_heads=4, d_ff=160, max_seq_len=128, rope_theta=1e6,
        qk_norm=True, init_std=0.1, n_experts=4 if moe else 0,
    )  # fmt: skip


@torch.no_grad()
def differences_by_layer(ours: Transformer, folder: Path, ids: Tensor) -> dict[str, float]:
    """Largest difference after the embedding, after every block, and of the logits, from transformers' reading of `folder`."""
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    after: list[Tensor] = []
    handles = [ours.token_embedding.register_forward_hook(lambda _m, _i, output: after.append(output))]
    handles += [
        block.register_forward_hook(lambda _m, _i, output: after.append(output[0])) for block in blocks_of(ours)
    ]
    logits = ours(ids).logits
    for handle in handles:
        handle.remove()
    there = theirs(ids, output_hidden_states=True)
    after[-1] = ours.final_norm(after[-1])  # the last state they show has been through the final norm
    found = {
        ("embedding" if layer == 0 else f"block {layer - 1}"): (mine - other).abs().max().item()
        for layer, (mine, other) in enumerate(zip(after, there.hidden_states, strict=True))
    }
    return found | {"logits": (logits - there.logits).abs().max().item()}


def measure_peer(lab: Lab, seeds: tuple[int, ...]) -> Measured:
    if importlib.util.find_spec("transformers") is None:
        missing = {"qwen3": "–", "qwen3_moe": "–", "first_difference": "needs transformers"}
        return Measured(values=missing, verdict=Verdict.UNDECIDED)
    ids = torch.randint(512, (2, 48), generator=torch.Generator().manual_seed(0))
    tables: dict[str, dict[str, float]] = {}
    for name, moe in (("qwen3", False), ("qwen3_moe", True)):
        torch.manual_seed(0)
        ours = Transformer(_peer_size(moe)).eval()
        with tempfile.TemporaryDirectory() as scratch:
            save_model(ours, Path(scratch) / "model")
            tables[name] = differences_by_layer(ours, Path(scratch) / "model", ids)
            if not moe:  # the control: heads in the wrong order, as after a forgotten permutation
                query = blocks_of(ours)[1].attention.q_proj.weight.data
                query.copy_(query.unflatten(0, (8, 12)).flip(0).flatten(0, 1))
                wrong = differences_by_layer(ours, Path(scratch) / "model", ids)
    first = next((place for table in tables.values() for place, gap in table.items() if gap > SAME), "none")
    return Measured(
        values={
            "qwen3": tables["qwen3"]["logits"],
            "qwen3_moe": tables["qwen3_moe"]["logits"],
            "first_difference": first,
        },
        control={
            "qwen3": wrong["logits"],
            "first_difference": next((place for place, gap in wrong.items() if gap > SAME), "none"),
        },
        shapes={"ids": "(2, 48)", "logits": "(2, 48, 512)"},
        data={"tables": tables, "wrong": wrong},
    )


B18 = Claim(
    id="B18",
    section="tasks",
    sentence=Text(
        "Exercise: compare one's implementation with the published one and list the differences.",
        "练习：把自己的实现与已发布的实现对比，列出差异。",
    ),
    measures=Text(
        "Random weights saved by us and opened by transformers as Qwen3 and Qwen3-MoE: the largest difference after every "
        "layer and of the logits.",
        "由本项目保存随机权重，transformers 以 Qwen3 与 Qwen3-MoE 打开：每层之后以及 logits 的最大差异。",
    ),
    formula="max |logits(ours) − logits(transformers)|",
    expects=(
        Expect("qwen3", Text("Qwen3, logits", "Qwen3，logits"), 0.0, Text("the same function", "同一个函数"), SAME,
               Text("fp32 added in another order", "fp32 求和次序不同"), "<="),
        Expect("qwen3_moe", Text("Qwen3-MoE, logits", "Qwen3-MoE，logits"), 0.0, Text("the same function", "同一个函数"), SAME,
               Text("fp32 added in another order", "fp32 求和次序不同"), "<="),
        Expect("first_difference", Text("first place that differs", "最先出现差异的位置"), "none"),
    ),
    control=Text("With the query heads of one block in reverse order the check must name that block.", "把某个 Block 的 query 头倒序，检查必须指出那个 Block。"),
    why={
        Verdict.HOLDS: Text(
            "The logits agree to {qwen3} and {qwen3_moe}; first difference: {first_difference}. What differs is how it is "
            "written: MiniMind repeats KV heads where we group queries, splits each head in halves for RoPE (as we do by "
            "default, where chapter B pairs neighbours), and takes the norm's statistic in fp32 as we do.",
            "logits 相差 {qwen3} 与 {qwen3_moe}；最先出现差异的位置：{first_difference}。不同的只是写法：MiniMind 复制 KV 头，我们给 query 分组；MiniMind 的 RoPE 按前后两半拆分（我们默认也是，而 B 章取相邻成对）；归一化的统计量都在 fp32 中计算。",
        ),
        Verdict.UNDECIDED: Text(
            "transformers is not installed here: pip install 'clockhand[peers]', and run this again.",
            "这里没有安装 transformers：请先 pip install 'clockhand[peers]'，再运行一次。",
        ),
    },
    read="clockhand/interop/hf.py:save_model",
    measure=measure_peer,
)  # fmt: skip

CLAIMS = (B17, B18)
