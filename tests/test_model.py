"""Acceptance of the course's Mini-LLaMA, as the chapter runs it:

    python tests/test_model.py

prints a report and exits with 1 when anything differs from what the chapter promises. pytest collects this file too,
and sees to it that the report can fail.
"""

import math
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the chapter's command, in a clone that is not installed

import pytest
import torch

from clockhand.course import MiniLLaMAConfig, MiniLLaMAForCausalLM, MiniMindModel, ModelArgs

IDS = torch.tensor([[1, 232, 58, 209, 2]])

LOSS_MARGIN = 0.3
"""A model that knows nothing has loss ln V. Ours starts with logits of variance D·0.02² = 0.2 instead of 0, which adds
half of that; the mean over 256 random tokens is off by about 0.03 more."""


class Item(NamedTuple):
    """One line of the report."""

    english: str
    chinese: str
    expected: Any
    tolerance: float = 0.0


ITEMS = {
    "sizes": Item("d_model, layers, vocabulary", "隐层维度、层数、词表", [512, 12, 4096]),
    "parameters": Item("parameters", "总参数量", 35_926_528),
    "tied": Item("head shares the embedding matrix", "输出头与词嵌入共享权重", True),
    "input": Item("input ids (batch, tokens)", "输入张量形状", [1, 5]),
    "logits": Item("logits (batch, tokens, vocabulary)", "输出 Logits 形状", [1, 5, 4096]),
    "causal": Item("the future cannot change the past", "看不到未来的词", True),
    "loss": Item("first loss, about ln 4096", "初始损失, 约为 ln 4096", round(math.log(4096), 4), LOSS_MARGIN),
}


def measure() -> dict[str, Any]:
    """What the model that is built here turns out to be, under the keys of `ITEMS`."""
    torch.manual_seed(0)
    config = MiniLLaMAConfig()
    model = MiniLLaMAForCausalLM(config)
    text = torch.randint(config.vocab_size, (4, 65))
    with torch.no_grad():
        logits, _, _ = model(IDS)
        other_end = torch.cat((IDS[:, :-1], torch.tensor([[3]])), dim=1)
        past = model(other_end).logits[:, :-1]
        _, loss, _ = model(text, labels=text)
    return {
        "sizes": [model.token_embeddings.embedding_dim, len(model.layers), model.lm_head.out_features],
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "tied": model.lm_head.weight is model.token_embeddings.weight,
        "input": list(IDS.shape),
        "logits": list(logits.shape),
        "causal": torch.equal(past, logits[:, :-1]),
        "loss": round(float(loss), 4),
    }


def is_met(item: Item, found: Any) -> bool:
    return abs(found - item.expected) <= item.tolerance if item.tolerance else found == item.expected


def report(found: dict[str, Any], items: dict[str, Item] = ITEMS) -> int:
    """Prints what was found beside what was expected; returns the exit status, 0 when all is as it should be."""
    print("=" * 72)
    print("Mini-LLaMA-0.04B: acceptance report · 架构出厂体检与前向验证")
    print("=" * 72)
    failures = 0
    for number, (key, item) in enumerate(items.items(), start=1):
        met = is_met(item, found[key])
        failures += not met
        wanted = "" if met else f", expected · 应为 {shown(item.expected)}"
        print(f"{'ok' if met else 'WRONG':5} {number}. {item.english} · {item.chinese}: {shown(found[key])}{wanted}")
    print("=" * 72)
    print("passed · 全部通过" if not failures else f"FAILED · 未通过: {failures} of {len(items)}")
    return 1 if failures else 0


def shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


# ── for pytest ─────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return measure()


@pytest.mark.parametrize("key", ITEMS)
def test_mini_llama_is_what_the_chapter_promises(found: dict[str, Any], key: str) -> None:
    assert is_met(ITEMS[key], found[key])


@pytest.mark.parametrize(
    ("key", "wrong"),
    [
        ("sizes", [512, 13, 4096]),
        ("parameters", 35_926_529),
        ("tied", False),
        ("input", [1, 6]),
        ("logits", [1, 5, 4095]),
        ("causal", False),
        ("loss", 9.3),
    ],
)
def test_the_report_fails_when_any_one_item_differs(found: dict[str, Any], key: str, wrong: Any, capsys) -> None:
    assert report(found) == 0
    assert "WRONG" not in capsys.readouterr().out

    assert report(found, {**ITEMS, key: ITEMS[key]._replace(expected=wrong)}) == 1
    printed = capsys.readouterr().out
    assert printed.count("WRONG") == 1
    assert "FAILED" in printed


def test_the_chapters_command_prints_the_report_and_exits_with_0() -> None:
    run = subprocess.run([sys.executable, __file__], capture_output=True, text=True, encoding="utf-8", timeout=120)
    assert run.returncode == 0, run.stderr
    for line in ("35,926,528", "[1, 5]", "[1, 5, 4096]", "passed"):
        assert line in run.stdout


def test_chapter_b_calls_unpack_alike() -> None:
    model = MiniMindModel(ModelArgs(n_layers=1))
    logits, loss, cache = model(IDS)
    assert logits.shape == (1, 5, 6400)
    assert loss is None
    assert cache is None


if __name__ == "__main__":
    sys.stdout.reconfigure(encoding="utf-8")  # for consoles whose own encoding has no Chinese
    sys.exit(report(measure()))
