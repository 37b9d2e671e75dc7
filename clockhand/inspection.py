"""What `clockhand inspect` shows: one model's numbers, or two models side by side.

`inspect_json` gathers everything from the config alone (`count.py` does the counting); `render` draws exactly that
dict with rich, so that what a person reads and what a program reads cannot disagree. Nothing here imports torch, and
rich is imported only to draw.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clockhand import count
from clockhand.config import ModelConfig, from_dict
from clockhand.errors import unknown_name
from clockhand.presets import PRESETS, build

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


def resolve(name_or_path: str, changes: Mapping[str, Any] | None = None) -> tuple[str, ModelConfig]:
    """A label and the config of a preset, a model folder or a run folder. A preset goes before a folder of its name.

    `changes` (`{"n_layers": 6}`) replace fields of it. Raises `ClockhandError` when it is none of the three, with the
    nearest preset.
    """
    changes = changes or {}
    label = ", ".join([name_or_path, *(f"{field}={value}" for field, value in changes.items())])
    if name_or_path in PRESETS:
        return label, build(name_or_path, **changes)
    if Path(name_or_path).exists():
        from clockhand.interop.hf import find_model_folder, read_config

        folder = find_model_folder(name_or_path)
        stored = dataclasses.asdict(read_config(folder))
        return label, from_dict(ModelConfig, {**stored, **changes}, f"{folder} with {', '.join(changes)} changed")
    raise unknown_name("preset or folder", name_or_path, PRESETS)


# ── for programs ───────────────────────────────────────────────────────────────────────────────────────────────────


def inspect_json(config: ModelConfig, name: str, context: int | None = None) -> dict[str, Any]:
    """Everything that follows from `config`, ready for json. Keys are stable; sizes are in bytes, FLOPs per token.

    FLOPs are the mean over a sequence of `context` tokens, by default the model's max_seq_len. `kv_bytes_per_token` is
    for 2-byte values; `memory` has every precision, with the KV cache of one sequence.
    """
    context = config.max_seq_len if context is None else context
    total = count.total_parameters(config)
    matmul, forward = count.model_parts(config).matmul_flops, round(count.forward_flops(config, context) / context)
    return {
        "name": name,
        "description": describe(config),
        "total_parameters": total,
        "active_parameters": count.active_parameters(config),
        "non_embedding_parameters": count.non_embedding_parameters(config),
        "parameters": {
            module.path: {
                "parameters": module.parameters,
                "active_parameters": module.active_parameters,
                "share": module.parameters / total,
                "copies": module.part.copies,
                "each": module.part.parameters // module.part.copies,
            }
            for module in count.modules(config)
        },
        "context": context,
        "flops_per_token": forward,
        "matmul_flops_per_token": matmul,
        "attention_flops_per_token": forward - matmul,
        "training_flops_per_token": 3 * forward,
        "kv_bytes_per_token": count.kv_bytes_per_token(config, "bf16"),
        "memory": {
            precision: {
                "weights": count.weight_bytes(config, precision),
                "kv_per_token": count.kv_bytes_per_token(config, precision),
                "kv_at_context": count.kv_bytes(config, context, precision),
            }
            for precision in count.BYTES
        },
        "config": dataclasses.asdict(config),
    }


def short(number: float) -> str:
    """Two decimals and a letter.

    >>> short(35_926_528), short(30_532_122_624), short(512)
    ('35.93 M', '30.53 B', '512')
    """
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K")):
        if number >= size:
            return f"{number / size:.2f} {letter}"
    return f"{number:,}"


def in_bytes(number: int) -> str:
    """In the largest binary unit that leaves 1 or more.

    >>> in_bytes(6144), in_bytes(71_853_056)
    ('6.00 KiB', '68.52 MiB')
    """
    for size, unit in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if number >= size:
            return f"{number / size:,.2f} {unit}"
    return f"{number} B"


_COMPARED = (
    ("parameters", "total_parameters", "{:,}".format),
    ("active in each token", "active_parameters", "{:,}".format),
    ("without embeddings", "non_embedding_parameters", "{:,}".format),
    ("FLOPs per token", "flops_per_token", short),
    ("FLOPs per token, training", "training_flops_per_token", short),
    ("KV cache per token, bf16", "kv_bytes_per_token", in_bytes),
)
"""What is set side by side: the label, the key in `inspect_json`, and how it is written."""


def compare_json(first: tuple[str, ModelConfig], second: tuple[str, ModelConfig]) -> dict[str, Any]:
    """Two labelled models at the longest context both are meant for: each inspected, and the fields that differ."""
    context = min(config.max_seq_len for _, config in (first, second))
    one, two = (inspect_json(config, name, context) for name, config in (first, second))
    differences = {
        field: [value, two["config"][field]] for field, value in one["config"].items() if value != two["config"][field]
    }
    ratios = {key: two[key] / one[key] for _, key, _ in _COMPARED}
    return {"models": [one, two], "context": context, "differences": differences, "ratios": ratios}


def describe(config: ModelConfig) -> str:
    """The model in one line. What every preset has, RMSNorm before each part, goes without saying.

    >>> from clockhand.presets import build
    >>> describe(build("mini-llama"))
    '12 layers × 512 · GQA 8/2 heads × 64 · SwiGLU 1,408 · RoPE 10,000 · tied head · vocabulary 4,096'
    """
    sharing = {config.n_heads: "MHA", 1: "MQA"}.get(config.n_kv_heads, "GQA")
    mlp = f"{_WORDS[config.mlp]} {config.d_ff:,}"
    position = _WORDS[config.position]
    if config.position == "rope":
        scaling = f" {config.rope_scaling} × {config.rope_factor:g}" if config.rope_scaling != "none" else ""
        position = f"RoPE {config.rope_theta:,.0f}{scaling}"
    words = [
        f"{config.n_layers} layers × {config.d_model:,}",
        f"{sharing} {config.n_heads}/{config.n_kv_heads} heads × {config.head_dim}",
        "QK-norm" if config.qk_norm else "",
        f"window {config.sliding_window:,}" if config.sliding_window else "",
        f"{config.n_experts} experts of {mlp}, {config.n_experts_per_token} a token" if config.is_moe else mlp,
        "LayerNorm" if config.norm == "layer" else "",
        "norms after" if config.norm_position == "post" else "",
        "" if config.residual else "no residuals",
        position,
        "tied head" if config.tie_embeddings else "untied head",
        f"vocabulary {config.vocab_size:,}",
    ]
    return " · ".join(word for word in words if word)


_WORDS = {
    "swiglu": "SwiGLU",
    "gelu": "GELU",
    "relu": "ReLU",
    "rope": "RoPE",
    "learned": "learned positions",
    "none": "no positions",
}


# ── for people ─────────────────────────────────────────────────────────────────────────────────────────────────────


def render(config: ModelConfig, name: str) -> "RenderableType":
    """One model, to be printed by a rich Console: its parameters by module, FLOPs, and memory."""
    from rich.console import Group

    facts = inspect_json(config, name)
    return Group(
        _headline(facts),
        "",
        _parameter_table(facts, config),
        "",
        _flops_table(facts),
        "",
        _memory_table(facts),
    )


def render_comparison(first: tuple[str, ModelConfig], second: tuple[str, ModelConfig]) -> "RenderableType":
    """Two labelled models beside each other: what they amount to, the ratio, and the fields in which they differ."""
    from rich.console import Group
    from rich.text import Text

    facts = compare_json(first, second)
    one, two = facts["models"]
    sums = _table("", one["name"], two["name"], "ratio")
    for label, key, form in _COMPARED:
        sums.add_row(label, form(one[key]), form(two[key]), f"{facts['ratios'][key]:,.2f} ×")
    fields = _table("field", one["name"], two["name"])
    for field, (left, right) in facts["differences"].items():
        fields.add_row(field, str(left), str(right))
    return Group(
        _headline(one),
        _headline(two),
        "",
        sums,
        Text(f"FLOPs are the mean over a sequence of {facts['context']:,} tokens.", style="dim"),
        "",
        fields if facts["differences"] else "The two configs are equal.",
    )


def _headline(facts: dict[str, Any]) -> "Text":
    from rich.text import Text

    total, active = facts["total_parameters"], facts["active_parameters"]
    amount = f"{short(total)} parameters" + (f", of which a token uses {short(active)}" if active < total else "")
    return Text.assemble((facts["name"], "bold"), f"  {amount}\n", (facts["description"], "dim"))


def _parameter_table(facts: dict[str, Any], config: ModelConfig) -> "Table":
    from rich.bar import Bar

    # A dense model uses all of its parameters: its second column would repeat the first.
    sums = ["parameters", "active_parameters"] if config.is_moe else ["parameters"]
    table = _table("module", "each", *(key.split("_")[0] for key in sums), "share")
    table.add_column(max_width=24)
    for path, module in facts["parameters"].items():
        depth, name = path.count("."), path.rpartition(".")[2]
        copies = f" × {module['copies']}" if module["copies"] > 1 else ""
        tied = " (tied)" if path == "lm_head" and config.tie_embeddings else ""
        table.add_row(
            "  " * depth + name + copies + tied,
            f"{module['each']:,}",
            *(f"{module[key]:,}" for key in sums),
            f"{module['share']:.2%}",
            Bar(1, 0, module["share"], color="cyan"),
            style="dim" if depth > 1 else "",
        )
    table.add_section()
    totals = [facts["total_parameters"], facts["active_parameters"]][: len(sums)]
    table.add_row("total", "", *(f"{total:,}" for total in totals), style="bold")
    table.add_row("without embeddings", "", f"{facts['non_embedding_parameters']:,}", style="dim")
    return table


def _flops_table(facts: dict[str, Any]) -> "Table":
    table = _table(f"FLOPs per token, mean over {facts['context']:,} tokens", "forward", "training")
    rows = (
        ("products with weights", "matmul_flops_per_token", ""),
        ("attention to the tokens so far", "attention_flops_per_token", ""),
        ("together", "flops_per_token", "bold"),
    )
    for label, key, style in rows:
        table.add_row(label, short(facts[key]), short(3 * facts[key]), style=style)
    return table


def _memory_table(facts: dict[str, Any]) -> "Table":
    window = facts["config"]["sliding_window"]
    bound = f", window {window:,}" if 0 < window < facts["context"] else ""
    table = _table("memory", *facts["memory"])
    rows = (
        ("weights", "weights"),
        ("KV cache per token", "kv_per_token"),
        (f"KV cache of {facts['context']:,} tokens{bound}", "kv_at_context"),
    )
    for label, key in rows:
        table.add_row(label, *(in_bytes(sizes[key]) for sizes in facts["memory"].values()))
    return table


def _table(*columns: str) -> "Table":
    """A plain table: the first column is words, the others are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(Text(column), justify="right" if index else "left", no_wrap=True)
    return table
