"""What `inspect` says: the numbers of count.py under stable keys, readable at any width, without torch."""

import json
import subprocess
import sys

import pytest
from rich.console import Console

from clockhand import count
from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.inspection import compare_json, describe, inspect_json, render, render_comparison, resolve
from clockhand.presets import PRESETS, build


def written(renderable: object, width: int = 80) -> str:
    console = Console(width=width, file=None, color_system=None)
    with console.capture() as capture:
        console.print(renderable)
    return capture.get()


@pytest.mark.parametrize(
    ("name", "total", "active"),
    [
        ("mini-llama", 35_926_528, 35_926_528),
        ("minimind-3", 63_912_192, 63_912_192),
        ("minimind-3-moe", 198_416_640, 63_936_768),
        ("minimind-3-textbook", 75_707_136, 75_707_136),
    ],
)
def test_the_courses_models_have_their_exact_parameters(name: str, total: int, active: int) -> None:
    facts = inspect_json(build(name), name)
    assert (facts["total_parameters"], facts["active_parameters"]) == (total, active)
    assert f"{total:,}" in written(render(build(name), name))


def test_the_json_of_mini_llama_holds_the_chapters_numbers() -> None:
    facts = json.loads(json.dumps(inspect_json(build("mini-llama"), "mini-llama")))
    assert facts["kv_bytes_per_token"] == facts["memory"]["bf16"]["kv_per_token"] == 6_144
    assert facts["memory"]["bf16"]["kv_at_context"] == 6_144 * 1_024
    assert facts["memory"]["fp32"]["weights"] == 4 * 35_926_528
    assert facts["parameters"]["blocks"]["each"] == 2_819_072
    assert facts["parameters"]["blocks.mlp"]["parameters"] == 25_952_256
    assert round(facts["parameters"]["blocks.mlp"]["share"], 4) == 0.7224
    assert facts["flops_per_token"] * 1_024 == count.forward_flops(build("mini-llama"), 1_024)
    assert ModelConfig(**facts["config"]) == build("mini-llama")


@pytest.mark.parametrize("name", PRESETS)
def test_the_top_modules_share_the_whole_model(name: str) -> None:
    facts = inspect_json(build(name), name)
    top = [module for path, module in facts["parameters"].items() if "." not in path]
    assert sum(module["parameters"] for module in top) == facts["total_parameters"]
    assert sum(module["share"] for module in top) == pytest.approx(1, abs=1e-12)


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("width", [80, 120])
def test_what_is_written_fits_its_width_and_loses_no_digit(name: str, width: int) -> None:
    text = written(render(build(name), name), width)
    assert max(len(line) for line in text.splitlines()) <= width
    assert "…" not in text
    for module in inspect_json(build(name), name)["parameters"].values():
        assert f"{module['parameters']:,}" in text


def test_only_a_mixture_of_experts_speaks_of_active_parameters() -> None:
    assert "63,936,768" in written(render(build("minimind-3-moe"), "minimind-3-moe"))
    assert "active" not in written(render(build("minimind-3"), "minimind-3"))


def test_a_tied_head_is_shown_as_such() -> None:
    assert "lm_head (tied)" in written(render(build("mini-llama"), "mini-llama"))
    untied = build("mini-llama", tie_embeddings=False)
    assert "(tied)" not in written(render(untied, "untied"))


def test_a_window_that_bounds_the_cache_is_named() -> None:
    mistral = build("mistral-7b-v0.1")
    assert "KV cache of 32,768 tokens, window 4,096" in written(render(mistral, "mistral"))


def test_two_models_are_compared_over_the_same_context_with_the_fields_that_differ() -> None:
    pair = [(name, build(name)) for name in ("mini-llama", "minimind-3")]
    facts = compare_json(*pair)
    assert facts["context"] == 1_024  # the shorter of the two: attention would otherwise cost more for its own reasons
    assert [model["context"] for model in facts["models"]] == [1_024, 1_024]
    assert facts["differences"]["d_model"] == [512, 768]
    assert "norm" not in facts["differences"]
    assert facts["ratios"]["kv_bytes_per_token"] == 2
    text = written(render_comparison(*pair))
    assert "35,926,528" in text
    assert "63,912,192" in text
    assert "rope_theta" in text


def test_a_model_equals_itself() -> None:
    pair = ("mini-llama", build("mini-llama"))
    assert compare_json(pair, pair)["differences"] == {}
    assert set(compare_json(pair, pair)["ratios"].values()) == {1}
    assert "equal" in written(render_comparison(pair, pair))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(n_kv_heads=8), "MHA 8/8"),
        (dict(n_kv_heads=1), "MQA 8/1"),
        (dict(norm="layer", norm_position="post"), "LayerNorm · norms after"),
        (dict(position="learned"), "learned positions"),
        (dict(mlp="relu"), "ReLU 1,408"),
        (dict(n_experts=4, n_experts_per_token=2), "4 experts of SwiGLU 1,408, 2 a token"),
        (dict(rope_scaling="linear", rope_factor=2), "RoPE 10,000 linear × 2"),
        (dict(residual=False), "no residuals"),
    ],
)
def test_what_is_unusual_about_a_model_is_in_its_description(settings: dict[str, object], words: str) -> None:
    assert words in describe(build("mini-llama", **settings))
    assert words not in describe(build("mini-llama"))


def test_a_name_in_brackets_is_printed_as_it_is() -> None:
    text = written(render_comparison(("runs/[bold]", build("tiny")), ("b", build("tiny"))))
    assert text.count("runs/[bold]") == 2


def test_a_preset_is_found_by_name() -> None:
    assert resolve("mini-llama") == ("mini-llama", build("mini-llama"))


def test_what_is_neither_preset_nor_folder_is_refused_with_the_nearest_preset() -> None:
    with pytest.raises(ClockhandError, match="unknown preset or folder 'mini-lama'; did you mean 'mini-llama'"):
        resolve("mini-lama")


def test_inspecting_imports_no_torch_and_json_no_rich() -> None:
    script = (
        "import json, sys\n"
        "from clockhand import inspection\n"
        "json.dumps(inspection.inspect_json(*reversed(inspection.resolve('mini-llama'))))\n"
        "assert 'rich' not in sys.modules\n"
        "from rich.console import Console\n"
        "Console().print(inspection.render(inspection.resolve('tiny')[1], 'tiny'))\n"
        "assert 'torch' not in sys.modules and 'numpy' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, timeout=60)
