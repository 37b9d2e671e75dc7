"""MiniMind's checkpoints: dicts with its published names and shapes, and pickles that are something else."""

import dataclasses
import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from clockhand import presets
from clockhand.data.chat import encode_chat
from clockhand.data.tokenizer import Tokenizer
from clockhand.errors import ClockhandError
from clockhand.interop import minimind
from clockhand.model.transformer import Transformer

SMALL = dict(d_model=32, d_ff=48, n_layers=2, vocab_size=64)
KINDS = ("minimind-3", "minimind-3-moe", "minimind-3-textbook")


def published(preset: str = "minimind-3", **changed) -> tuple[Transformer, dict[str, torch.Tensor]]:
    """A model of ours in fp16 and the same weights under the names that MiniMind publishes."""
    torch.manual_seed(0)
    ours = Transformer(presets.build(preset, **{**SMALL, **changed})).half().eval()
    weights = {
        "model.embed_tokens.weight": ours.token_embedding.weight,
        "model.norm.weight": ours.final_norm.weight,
        "lm_head.weight": ours.lm_head.weight,
    }
    for n, block in enumerate(ours.blocks):
        layer = f"model.layers.{n}"
        weights[f"{layer}.input_layernorm.weight"] = block.attention_norm.weight
        weights[f"{layer}.post_attention_layernorm.weight"] = block.mlp_norm.weight
        for name, weight in block.attention.named_parameters():  # q_proj.weight ... k_norm.weight
            weights[f"{layer}.self_attn.{name}"] = weight
        for name, weight in block.mlp.named_parameters():  # gate_proj.weight, or experts.0.gate_proj.weight
            weights[f"{layer}.mlp.{name.replace('router', 'gate')}"] = weight
    return ours, {name: weight.detach().clone() for name, weight in weights.items()}


def saved(folder: Path, weights: object) -> Path:
    torch.save(weights, folder / "m.pth")
    return folder / "m.pth"


@pytest.mark.parametrize("preset", KINDS)
def test_a_checkpoint_becomes_the_model_it_was(tmp_path, preset):
    ours, weights = published(preset)
    again = minimind.read(saved(tmp_path, weights))
    assert again.config == ours.config
    assert again.token_embedding.weight.dtype == torch.float16
    ids = torch.arange(20)[None]
    assert torch.equal(again.float()(ids).logits, ours.float()(ids).logits)


def test_the_real_sizes_are_read_off_the_shapes(tmp_path):
    real = presets.build("minimind-3-moe")
    with torch.device("meta"):
        shapes = dict(Transformer(real).state_dict())
    # Every size but the number of layers, which costs most: one expert's matrices are 11 MB.
    small = dataclasses.replace(real, n_layers=1, vocab_size=100)
    weights = {
        name: torch.zeros(weight.shape, dtype=torch.float16) for name, weight in shapes.items() if "blocks.0" in name
    }
    weights |= {"token_embedding.weight": torch.zeros(100, 768).half(), "final_norm.weight": torch.zeros(768).half()}
    theirs = {minimind.names.hugging_face_tensor(name): weight for name, weight in weights.items()}
    assert minimind.read(saved(tmp_path, theirs)).config == small


def test_a_head_of_its_own_is_kept(tmp_path):
    _, weights = published()
    weights["lm_head.weight"] += 1
    again = minimind.read(saved(tmp_path, weights))
    assert not again.config.tie_embeddings
    assert torch.equal(again.lm_head.weight, weights["lm_head.weight"])


def test_a_tied_head_may_be_left_out(tmp_path):
    _, weights = published()
    del weights["lm_head.weight"]
    assert minimind.read(saved(tmp_path, weights)).config.tie_embeddings


def test_the_projects_own_switch_is_yarn_by_16_from_2048(tmp_path):
    _, weights = published()
    plain = minimind.read(saved(tmp_path, weights))
    scaled = minimind.with_inference_rope_scaling(plain)
    assert scaled.config == presets.build(
        "minimind-3", **SMALL, rope_scaling="yarn", rope_factor=16.0, rope_original_max_seq_len=2048,
        rope_attention_factor=1.0,
    )  # fmt: skip
    assert torch.equal(scaled.blocks[1].mlp.up_proj.weight, plain.blocks[1].mlp.up_proj.weight)
    with pytest.raises(ClockhandError, match="rope_scaling = yarn"):
        minimind.with_inference_rope_scaling(scaled)


def test_its_tokenizer_loads_and_its_template_renders(shared_data):
    words = Tokenizer.load(shared_data / "minimind")
    assert words.vocab_size == 6400
    assert words.decode(words.encode("床前明月光 1234")) == "床前明月光 1234"
    ids = encode_chat(words, [{"role": "user", "content": "你好"}], add_generation_prompt=True)
    assert words.decode(ids, skip_special=False).startswith("<|im_start|>user\n你好<|im_end|>")


# ---- refusals ----


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model.layers.1.mlp.up_proj.weight": None}, "model.layers.1.mlp.up_proj.weight is missing"),
        ({"model.embed_tokens.weight": None}, "has no model.embed_tokens.weight"),
        ({"model.layers.0.mlp.shared.weight": torch.zeros(3)}, "model.layers.0.mlp.shared.weight is not one of"),
        ({"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 3)}, r"up_proj.weight has shape \(3, 3\)"),
        ({"model.layers.0.self_attn.q_norm.weight": torch.zeros(5)}, "no whole heads of 5"),
        ({"model.norm.weight": torch.zeros(32, dtype=torch.int64)}, "not a plain tensor"),
        ({"model.norm.weight": torch.zeros(1).expand(10**9, 10**6)}, "not a plain tensor"),
        ({"optimizer": {"step": 3}}, "optimizer is not a tensor; is this a whole training state"),
    ],
)
def test_tensors_that_do_not_make_a_minimind_are_refused_by_name(tmp_path, change, message):
    _, weights = published()
    weights = {name: weight for name, weight in {**weights, **change}.items() if weight is not None}
    with pytest.raises(ClockhandError, match=message):
        minimind.read(saved(tmp_path, weights))


class Runs:
    """An object whose pickle calls a function when it is loaded."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self):
        return Path.touch, (self.target,)


@pytest.mark.parametrize("zipped", [True, False])
def test_a_pickle_that_runs_code_is_refused_and_does_not_run(tmp_path, zipped):
    if zipped:
        file = saved(tmp_path, {"model.norm.weight": Runs(tmp_path / "ran")})
    else:
        file = tmp_path / "m.pth"
        file.write_bytes(pickle.dumps(Runs(tmp_path / "ran")))
    with pytest.raises(ClockhandError, match="holds more than tensors, and is not loaded"):
        minimind.read(file)
    assert not (tmp_path / "ran").exists()


def test_a_zip_that_would_unfold_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "m.pth", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\0" * 10**8)
    with pytest.raises(ClockhandError, match="is compressed, or claims more than it holds"):
        minimind.read(tmp_path / "m.pth")


def repacked(archive: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """The pickle inside a .pth, and a function that puts another one in its place with a right checksum."""
    with zipfile.ZipFile(io.BytesIO(archive)) as source:
        records = {entry.filename: source.read(entry) for entry in source.infolist()}
    inside = next(name for name in records if name.endswith("data.pkl"))

    def whole(content: bytes) -> bytes:
        target = io.BytesIO()
        with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as again:
            for name, record in records.items():
                again.writestr(name, content if name == inside else record)
        return target.getvalue()

    return records[inside], whole


def fuzz(survives, tmp_path_factory, examples: int) -> None:
    _, weights = published("minimind-3-moe", n_layers=1, d_model=16, d_ff=8, vocab_size=8)
    good = saved(tmp_path_factory.mktemp("good"), weights).read_bytes()
    survives(minimind.read, good, "m.pth", examples)
    content, whole = repacked(good)
    survives(minimind.read, content, "m.pth", examples, whole)


def test_a_damaged_checkpoint_is_one_clear_refusal(survives, tmp_path_factory):
    fuzz(survives, tmp_path_factory, 200)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_one_clear_refusal_2000_times(survives, tmp_path_factory):
    fuzz(survives, tmp_path_factory, 2000)
