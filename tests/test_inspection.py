"""What `inspect` says: the numbers of count.py under stable keys, readable at any width, without torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from clockhand import count
from clockhand.config import ModelConfig
from clockhand.errors import ClockhandError
from clockhand.inspection import compare_json, describe, inspect_json, render, render_comparison, resolve
from clockhand.interop.hf import save_model
from clockhand.model.transformer import Transformer
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


def test_changes_reach_a_preset_before_its_derived_fields_are_settled_and_are_named() -> None:
    label, config = resolve("mini-llama", {"n_layers": 6, "d_model": 256})
    assert label == "mini-llama, n_layers=6, d_model=256"
    assert (config.n_layers, config.d_model, config.head_dim) == (6, 256, 32)
    with pytest.raises(ClockhandError, match="unknown field 'n_layer'"):
        resolve("mini-llama", {"n_layer": 6})


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder whose final/ is a small model."""
    folder = tmp_path_factory.mktemp("runs") / "small"
    folder.mkdir()
    save_model(Transformer(build("tiny", vocab_size=50, n_layers=2)), folder / "final")
    return folder


@pytest.mark.parametrize("inside", ["", "final"])
def test_a_run_folder_means_its_final_model_folder(run_folder: Path, inside: str) -> None:
    label, config = resolve(str(run_folder / inside))
    assert label == str(run_folder / inside)
    assert config == build("tiny", vocab_size=50, n_layers=2)
    assert resolve(str(run_folder), {"n_layers": 3})[1].n_layers == 3


def test_a_change_a_folder_cannot_take_is_refused_naming_the_folder(run_folder: Path) -> None:
    with pytest.raises(ClockhandError, match=r"n_kv_heads = 4 must be a divisor.*final with n_kv_heads changed"):
        resolve(str(run_folder), {"n_kv_heads": 4})


def test_a_folder_that_holds_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ClockhandError):
        resolve(str(tmp_path))


def test_what_is_neither_preset_nor_folder_is_refused_with_the_nearest_preset() -> None:
    with pytest.raises(ClockhandError, match="unknown preset or folder 'mini-lama'; did you mean 'mini-llama'"):
        resolve("mini-lama")


def test_inspecting_a_preset_or_a_folder_imports_no_torch_and_json_no_rich(run_folder: Path) -> None:
    script = (
        "import json, sys\n"
        "from clockhand.inspection import inspect_json, render, resolve\n"
        "models = [resolve(name) for name in ('mini-llama', sys.argv[1])]\n"
        "print(json.dumps([inspect_json(config, name) for name, config in models]))\n"
        "assert 'rich' not in sys.modules\n"
        "from rich.console import Console\n"
        "Console().print(*[render(config, name) for name, config in models])\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, run_folder], check=True, timeout=60, stdout=subprocess.DEVNULL)
