"""Hugging Face folders, judged by transformers itself: what we write it opens, what it writes we open, with one answer.

All in fp32, where two implementations of one formula differ by rounding alone: 1e-4 on logits of size 1 and more is
an order of magnitude above what is seen, and three below what a wrong permutation, mask or frequency does (the
controls).
"""

import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from clockhand.config import ModelConfig
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.interop import hf
from clockhand.interop.hf import end_ids, load_model, read_config, save_model
from clockhand.model.transformer import Transformer, positions_of_padded

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

SIZES = dict(vocab_size=97, d_model=48, n_layers=2, n_heads=4, n_kv_heads=2, d_ff=64, max_seq_len=128)
FAMILIES = {
    "llama": dict(),
    "llama, all biases": dict(attention_bias="all", mlp_bias=True),
    "llama, head_dim of its own": dict(head_dim=20, tie_embeddings=False),
    "mistral, a window shorter than the text": dict(sliding_window=7),
    "mistral, heads that do not divide the width": dict(n_heads=5, n_kv_heads=5, head_dim=8),
    "qwen2": dict(attention_bias="qkv", rope_theta=1e6),
    "qwen2, windowed": dict(attention_bias="qkv", sliding_window=7),
    "qwen3": dict(qk_norm=True, head_dim=16),
    "qwen3, windowed": dict(qk_norm=True, sliding_window=7),
    "qwen3_moe": dict(qk_norm=True, n_experts=4, n_experts_per_token=2, renormalize_top_k=False),
    "qwen3_moe, one expert a token": dict(qk_norm=True, n_experts=4, sliding_window=7),
}
ORIGINAL = 32  # trained length; the texts have 90 tokens
SCALINGS = {
    "linear": dict(rope_scaling="linear", rope_factor=4.0),
    "ntk": dict(rope_scaling="ntk", rope_factor=4.0),
    "dynamic": dict(rope_scaling="dynamic", rope_factor=4.0, rope_original_max_seq_len=ORIGINAL),
    "yarn": dict(rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=ORIGINAL, rope_beta_fast=8.0),
    "yarn, given attention factor": dict(
        rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=ORIGINAL, rope_attention_factor=0.8
    ),
    "llama3": dict(rope_scaling="llama3", rope_factor=8.0, rope_original_max_seq_len=ORIGINAL, rope_theta=5e5),
}


def random_weights(model: torch.nn.Module) -> torch.nn.Module:
    """Weights large enough for logits of size 1 and sharp attention; norms and biases away from 1 and 0."""
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(std=0.3)
    return model.eval()


def our_model(**settings) -> Transformer:
    return random_weights(Transformer(ModelConfig(**{**SIZES, **settings})))


def texts(batch: int = 2, length: int = 90) -> torch.Tensor:
    return torch.randint(0, SIZES["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(2))


def opened_there(folder: Path) -> transformers.PreTrainedModel:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False).eval()


def distance(ours: Transformer, theirs: transformers.PreTrainedModel, ids: torch.Tensor | None = None) -> float:
    ids = texts() if ids is None else ids
    with torch.no_grad():
        return float((ours(ids).logits - theirs(ids).logits).abs().max())


def equal_weights(a: Transformer, b: Transformer) -> bool:
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# ---- ours, opened there ----


@pytest.mark.parametrize("settings", FAMILIES.values(), ids=FAMILIES)
def test_what_we_save_gives_the_same_logits_in_transformers(tmp_path, settings):
    model = our_model(**settings)
    theirs = opened_there(save_model(model, tmp_path / "m"))
    assert theirs.generation_config.eos_token_id is None
    assert distance(model, theirs) < 1e-4
    assert model(texts()).logits.std() > 0.5


@pytest.mark.parametrize("settings", SCALINGS.values(), ids=SCALINGS)
def test_every_rope_scaling_means_the_same_beyond_the_trained_length(tmp_path, settings):
    model = our_model(**settings)
    theirs = opened_there(save_model(model, tmp_path / "m"))
    assert distance(model, theirs) < 1e-4
    unscaled = our_model(rope_theta=model.config.rope_theta)
    assert distance(unscaled, theirs) > 0.1  # the control


def test_a_rope_that_pairs_neighbours_is_stored_in_their_order_and_put_back(tmp_path):
    model = our_model(rope_layout="interleaved", qk_norm=True, head_dim=16)
    save_model(model, tmp_path / "m")
    assert distance(model, opened_there(tmp_path / "m")) < 1e-4
    again = load_model(tmp_path / "m")
    assert again.config == model.config
    assert equal_weights(again, model)


@pytest.mark.parametrize("skipped", ["q_proj", "k_norm"])
def test_control_one_tensor_left_in_the_other_order_is_seen(tmp_path, monkeypatch, skipped):
    model = our_model(rope_layout="interleaved", qk_norm=True, head_dim=16)
    reorder = hf._to_half
    monkeypatch.setattr(hf, "_to_half", lambda config, name, t: t if skipped in name else reorder(config, name, t))
    assert distance(model, opened_there(save_model(model, tmp_path / "m"))) > 0.1


def test_control_a_window_that_is_dropped_is_seen(tmp_path):
    windowed, full = our_model(sliding_window=7), our_model()
    assert distance(full, opened_there(save_model(windowed, tmp_path / "m"))) > 0.1


def test_a_left_padded_batch_gives_the_logits_of_its_rows(tmp_path):
    model = our_model(qk_norm=True, n_experts=4, n_experts_per_token=2)
    theirs = opened_there(save_model(model, tmp_path / "m"))
    ids = texts(length=20)
    is_token = torch.ones_like(ids)
    is_token[0, :8] = 0
    with torch.no_grad():
        here = model(ids, positions=positions_of_padded(is_token)).logits
        there = theirs(ids, attention_mask=is_token, position_ids=(is_token.cumsum(-1) - 1).clamp(min=0)).logits
    assert (here - there)[is_token.bool()].abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_stored_in_half_the_space_and_read_as_such(tmp_path, dtype):
    model = our_model()
    full = save_model(model, tmp_path / "full") / "model.safetensors"
    half = save_model(model, tmp_path / "half", dtype=dtype)
    assert (half / "model.safetensors").stat().st_size < 0.6 * full.stat().st_size
    assert opened_there(half).dtype == dtype
    assert load_model(half).token_embedding.weight.dtype == dtype
    assert equal_weights(load_model(half, dtype=torch.float32), our_model().to(dtype).float())
    assert next(model.parameters()).dtype == torch.float32  # the model itself is as it was


def test_tied_weights_are_stored_once_and_stay_one_parameter(tmp_path):
    save_model(our_model(), tmp_path / "m")
    assert "lm_head.weight" not in load_file(tmp_path / "m" / "model.safetensors")
    model = load_model(tmp_path / "m")
    assert model.lm_head.weight is model.token_embedding.weight


def test_what_no_family_can_say_keeps_our_words_and_comes_back(tmp_path):
    model = our_model(norm="layer", mlp="gelu", norm_position="post", rope_layout="interleaved")
    save_model(model, tmp_path / "m")
    again = load_model(tmp_path / "m")
    assert again.config == model.config
    assert equal_weights(again, model)
    assert "Only clockhand opens it" in (tmp_path / "m" / "README.md").read_text()


def test_ids_templates_and_end_tokens_are_the_same_there(tmp_path):
    tokenizer = Tokenizer.train(["to be or not to be, 123 times"] * 9, vocab_size=300)
    model = our_model(vocab_size=tokenizer.vocab_size)
    save_model(model, tmp_path / "m", tokenizer=tokenizer, generation={"eos_token_id": [1, 4]}, card="About it.")
    theirs, there = opened_there(tmp_path / "m"), transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    assert end_ids(tmp_path / "m") == (1, 4)
    assert theirs.generation_config.eos_token_id == [1, 4]
    assert (there.bos_token_id, there.eos_token_id, there.pad_token_id) == (0, 1, 2)
    text = "to be, 42  times\n\tor not 你好"
    assert there(text, add_special_tokens=False)["input_ids"] == tokenizer.encode(text)
    assert there.chat_template == tokenizer.chat_template
    drawn = theirs.generate(torch.tensor([tokenizer.encode("to be", bos=True)]), max_new_tokens=5, do_sample=False)
    assert drawn.shape[1] > 3
    assert "About it." in (tmp_path / "m" / "README.md").read_text()


def test_a_foreign_tokenizer_travels_as_it_is_with_its_end_tokens(tmp_path):
    tokenizer = Tokenizer.train(["abc"], kind="byte")
    model = our_model(vocab_size=300)
    save_model(model, tmp_path / "a", tokenizer=tokenizer, generation={"eos_token_id": [1, 4], "top_k": 20})
    save_model(model, tmp_path / "b", tokenizer_files_from=tmp_path / "a")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_tokenizer_with_more_ids_than_the_model_is_refused(tmp_path):
    with pytest.raises(ClockhandError, match="261 ids, more than vocab_size = 97"):
        save_model(our_model(), tmp_path / "m", tokenizer=Tokenizer.train(["abc"], kind="byte"))
    assert not (tmp_path / "m").exists()


# ---- theirs, opened here ----

THEIR_SIZES = dict(
    vocab_size=97,
    hidden_size=48,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=128,
)
MOE = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, head_dim=12)
THEIRS = {
    "llama": ("Llama", dict(attention_bias=True, tie_word_embeddings=True)),
    "llama3 rope": (
        "Llama",
        dict(
            rope_parameters=dict(
                rope_type="llama3",
                rope_theta=5e5,
                factor=8.0,
                low_freq_factor=1.0,
                high_freq_factor=4.0,
                original_max_position_embeddings=32,
            )
        ),
    ),
    "mistral": ("Mistral", dict(sliding_window=7)),
    "mistral without a window": ("Mistral", dict(sliding_window=None)),
    "qwen2": ("Qwen2", dict(use_sliding_window=True, sliding_window=7, max_window_layers=0)),
    "qwen2, window switched off": ("Qwen2", dict(sliding_window=7)),
    "qwen3": ("Qwen3", dict(head_dim=16, rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=1e4))),
    "qwen3, yarn by mscale": (
        "Qwen3",
        dict(
            head_dim=16,
            rope_parameters=dict(
                rope_type="yarn",
                rope_theta=1e4,
                factor=4.0,
                original_max_position_embeddings=32,
                mscale=1.0,
                mscale_all_dim=0.5,
            ),
        ),
    ),
    "qwen3_moe": ("Qwen3Moe", dict(norm_topk_prob=True, **MOE)),
    "qwen3_moe, windowed": ("Qwen3Moe", dict(use_sliding_window=True, sliding_window=7, **MOE)),
    "dynamic rope": ("Llama", dict(rope_parameters=dict(rope_type="dynamic", factor=3.0, rope_theta=1e4))),
}


def their_model(family: str, settings: dict) -> transformers.PreTrainedModel:
    config = getattr(transformers, f"{family}Config")(**{**THEIR_SIZES, **settings})
    return random_weights(getattr(transformers, f"{family}ForCausalLM")(config))


@pytest.mark.parametrize(("family", "settings"), THEIRS.values(), ids=THEIRS)
def test_what_transformers_saves_gives_the_same_logits_and_gradients_here(tmp_path, family, settings):
    theirs = their_model(family, settings)
    theirs.save_pretrained(tmp_path)
    ours = load_model(tmp_path)
    ids = texts(length=150 if "rope_parameters" in settings else 90)
    losses = [model(ids).logits.square().mean() for model in (ours, theirs)]
    assert (ours(ids).logits - theirs(ids).logits).abs().max() < 1e-4
    for loss in losses:
        loss.backward()
    pairs = [(ours.token_embedding.weight, theirs.model.embed_tokens.weight)]
    for block, layer in zip(ours.blocks, theirs.model.layers):
        pairs += [
            (block.attention.q_proj.weight, layer.self_attn.q_proj.weight),
            (block.attention.o_proj.weight, layer.self_attn.o_proj.weight),
            (block.attention_norm.weight, layer.input_layernorm.weight),
        ]
    for here, there in pairs:
        assert (here.grad - there.grad).norm() < 1e-4 * there.grad.norm()


def test_a_folder_in_many_files_loads_like_one(tmp_path):
    theirs = their_model("Qwen3", dict(head_dim=16))
    theirs.save_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "many", max_shard_size="40KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    assert equal_weights(load_model(tmp_path / "many"), load_model(tmp_path / "one"))


def test_a_large_model_is_saved_in_many_files_that_open_here_and_there(tmp_path):
    ours = our_model(qk_norm=True)
    save_model(ours, tmp_path / "m", shard_bytes=40_000)
    files = sorted(path.name for path in (tmp_path / "m").glob("model-*.safetensors"))
    assert len(files) > 2
    assert all((tmp_path / "m" / name).stat().st_size < 60_000 for name in files)
    assert equal_weights(load_model(tmp_path / "m"), ours)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    ids = torch.arange(12)[None]
    assert (theirs(ids).logits - ours(ids).logits).abs().max() < 1e-4

    save_model(ours, tmp_path / "m")  # a model in one file takes the place of one in many
    assert not list((tmp_path / "m").glob("model-*"))
    assert not (tmp_path / "m" / "model.safetensors.index.json").exists()


def test_experts_in_one_tensor_load_like_experts_one_by_one(tmp_path):
    theirs = their_model("Qwen3Moe", MOE)
    theirs.save_pretrained(tmp_path)
    one_by_one = load_model(tmp_path)
    fused = {name: tensor.clone() for name, tensor in theirs.state_dict().items()}
    assert any(name.endswith("mlp.experts.gate_up_proj") for name in fused)
    save_file(fused, tmp_path / "model.safetensors")
    assert equal_weights(load_model(tmp_path), one_by_one)


def test_files_of_older_transformers_mean_the_same(tmp_path):
    """rope_theta at the top, rope_scaling with `type`, torch_dtype, and the frequencies stored as tensors."""
    theirs = their_model("Llama", dict(rope_parameters=dict(rope_type="linear", factor=4.0, rope_theta=5e5)))
    theirs.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}, "torch_dtype": config.pop("dtype")}
    (tmp_path / "config.json").write_text(json.dumps(config))
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(6)
    save_file(weights, tmp_path / "model.safetensors")
    assert distance(load_model(tmp_path), theirs) < 1e-4


# ---- strictness ----


@pytest.fixture
def untied(tmp_path) -> Path:
    return save_model(our_model(tie_embeddings=False), tmp_path / "m")


def rewrite(folder: Path, change) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def test_a_missing_tensor_is_named(untied):
    rewrite(untied, lambda weights: weights.pop("model.layers.1.self_attn.k_proj.weight"))
    with pytest.raises(ClockhandError, match=r"missing: model\.layers\.1\.self_attn\.k_proj\.weight"):
        load_model(untied)


def test_a_tensor_of_another_name_is_seen_on_both_sides(untied):
    """Only the missing one was named, which told nothing of where it had gone."""
    name = "model.layers.1.self_attn.k_proj.weight"
    rewrite(untied, lambda weights: weights.update({name.replace("k_proj", "key"): weights.pop(name)}))
    with pytest.raises(ClockhandError, match=r"missing: model.*k_proj\.weight; surplus: 'model.*key\.weight'"):
        load_model(untied)


def test_a_surplus_tensor_is_named(untied):
    rewrite(untied, lambda weights: weights.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}))
    with pytest.raises(ClockhandError, match=r"surplus: 'model\.layers\.0\.self_attn\.q_proj\.bias"):
        load_model(untied)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(untied):
    rewrite(untied, lambda weights: weights.update({"model.norm.weight": torch.zeros(47)}))
    with pytest.raises(ClockhandError, match=r"model\.norm\.weight \(47,\) instead of \(48,\)"):
        load_model(untied)


def test_numbers_of_another_type_are_named(untied):
    rewrite(untied, lambda weights: weights.update({"model.norm.weight": torch.zeros(48, dtype=torch.int8)}))
    with pytest.raises(ClockhandError, match=r"model\.norm\.weight' is of type I8, not F32, BF16, F16"):
        load_model(untied)


def test_a_second_head_beside_tied_weights_must_be_the_same(tmp_path):
    folder, model = tmp_path / "m", our_model()
    save_model(model, folder)
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    assert equal_weights(load_model(folder), model)
    rewrite(folder, lambda weights: weights["lm_head.weight"][5, 5].add_(1e-3))
    with pytest.raises(ClockhandError, match=r"lm_head\.weight is not the embedding"):
        load_model(folder)


def test_loading_does_not_touch_the_random_numbers(untied):
    torch.manual_seed(3)
    expected = torch.rand(3)
    torch.manual_seed(3)
    load_model(untied)
    assert torch.equal(torch.rand(3), expected)


# ---- writing whole ----


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_full_disk_leaves_the_older_model_whole(tmp_path):
    folder = save_model(our_model(), tmp_path / "m")
    before = contents(folder)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, limits[1]))  # a file may not grow beyond this
    try:
        with pytest.raises(ClockhandError, match=r"cannot write .*what was there before is whole"):
            save_model(our_model(n_layers=4), folder)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert contents(folder) == before
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_an_older_model_is_replaced_and_anything_else_is_refused(tmp_path):
    folder = save_model(our_model(), tmp_path / "m")
    save_model(our_model(n_layers=3), folder)
    assert read_config(folder).n_layers == 3
    (folder / "notes.txt").write_text("my only copy")
    with pytest.raises(ClockhandError, match=r"holds notes\.txt, which is no part of a model"):
        save_model(our_model(), folder)
    assert (folder / "notes.txt").read_text() == "my only copy"
    (tmp_path / "file").write_text("")
    with pytest.raises(ClockhandError, match="is a file"):
        save_model(our_model(), tmp_path / "file")
    (tmp_path / "empty").mkdir()
    save_model(our_model(), tmp_path / "empty")


# ---- what it costs ----


def run_python(code: str, *arguments: object) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def test_a_config_is_read_without_torch_and_a_model_without_transformers(untied):
    code = """if True:
        import sys
        from clockhand.interop.hf import end_ids, find_model_folder, load_model, read_config
        folder = find_model_folder(sys.argv[1])
        read_config(folder), end_ids(folder)
        assert "torch" not in sys.modules
        load_model(folder)
        assert "transformers" not in sys.modules
    """
    run_python(code, untied)


@pytest.mark.slow
def test_loading_needs_the_memory_of_the_weights_once(tmp_path):
    """200 MB of weights; what counts is memory that cannot be given back, so not the pages of the mapped file."""
    save_model(our_model(), tmp_path / "small")
    model = Transformer(ModelConfig(**{**SIZES, "d_model": 1024, "d_ff": 4096, "n_heads": 8, "n_layers": 3}))
    save_model(model, tmp_path / "m")
    size = (tmp_path / "m" / "model.safetensors").stat().st_size
    assert size > 180e6
    code = """if True:
        import sys, threading, time
        from clockhand.interop.hf import load_model

        load_model(sys.argv[2])  # whatever is imported and allocated once

        def held():
            lines = open("/proc/self/status").read().splitlines()
            return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])

        peak = before = held()
        done = False

        def watch():
            global peak
            while not done:
                peak = max(peak, held())
                time.sleep(0.001)

        watcher = threading.Thread(target=watch)
        watcher.start()
        load_model(sys.argv[1])
        done = True
        watcher.join()
        print(peak - before)
    """
    assert int(run_python(code, tmp_path / "m", tmp_path / "small")) < 1.25 * size
