"""The whole model against transformers, an implementation that shares no line with ours: same weights, same numbers.

Weights are random with a standard deviation of 0.3 and norm weights around 1, so that a wrong permutation, a missing
eps or a forgotten bias is far outside the tolerance. 1e-4 is that of the issue: fp32 sums in another order differ by
about 1e-5 here, the smallest of the mistakes in `test_a_mistake_shows` by more than 1e-2.
"""

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from clockhand.config import ModelConfig
from clockhand.model.moe import balance_loss, route
from clockhand.model.transformer import Transformer, positions_of_padded

transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
OURS: dict[str, Any] = dict(
    vocab_size=61, d_model=32, n_layers=3, n_heads=4, n_kv_heads=2, d_ff=48, max_seq_len=32, norm_eps=1e-5
)
LENGTHS = (13, 10, 4)  # of the three rows of a batch

LLAMA_WORDS = {
    "model.embed_tokens.": "token_embedding.",
    "model.layers.": "blocks.",
    ".input_layernorm.": ".attention_norm.",
    ".post_attention_layernorm.": ".mlp_norm.",
    ".self_attn.": ".attention.",
    ".mlp.gate.": ".mlp.router.",
    "model.norm.": "final_norm.",
}
OPT_WORDS = {
    "model.decoder.embed_tokens.": "token_embedding.",
    "model.decoder.embed_positions.": "position_embedding.",
    "model.decoder.layers.": "blocks.",
    ".self_attn_layer_norm.": ".attention_norm.",
    ".self_attn.out_proj.": ".attention.o_proj.",
    ".self_attn.": ".attention.",
    ".final_layer_norm.": ".mlp_norm.",
    ".fc1.": ".mlp.up_proj.",
    ".fc2.": ".mlp.down_proj.",
}
GPT2_WORDS = {
    "transformer.wte.": "token_embedding.",
    "transformer.wpe.": "position_embedding.",
    "transformer.h.": "blocks.",
    ".ln_1.": ".attention_norm.",
    ".ln_2.": ".mlp_norm.",
    ".attn.c_proj.": ".attention.o_proj.",
    ".mlp.c_fc.": ".mlp.up_proj.",
    ".mlp.c_proj.": ".mlp.down_proj.",
    "transformer.ln_f.": "final_norm.",
}


def translated(theirs: dict[str, Tensor], words: dict[str, str]) -> dict[str, Tensor]:
    """Their tensors (weights, or gradients) under our names and in our shapes."""
    ours = {}
    for name, tensor in theirs.items():
        for word, our_word in words.items():
            name = name.replace(word, our_word)
        if name.endswith(".mlp.experts.gate_up_proj"):  # (E, 2F, D)
            for expert, (gate, up) in enumerate(matrix.chunk(2) for matrix in tensor):
                ours[name.replace("gate_up_proj", f"{expert}.gate_proj.weight")] = gate
                ours[name.replace("gate_up_proj", f"{expert}.up_proj.weight")] = up
        elif name.endswith(".mlp.experts.down_proj"):  # (E, D, F)
            for expert, matrix in enumerate(tensor):
                ours[name.replace("down_proj", f"{expert}.down_proj.weight")] = matrix
        elif words is GPT2_WORDS and re.search(r"\.(c_attn|o_proj|up_proj|down_proj)\.weight$", name):
            ours[name] = tensor.T  # GPT-2 stores (in, out)
        elif words is OPT_WORDS and name == "position_embedding.weight":
            ours[name] = tensor[2:]  # OPT counts positions from 2
        else:
            ours[name] = tensor
    for name in [name for name in ours if ".attn.c_attn." in name]:  # q, k and v in one
        for part, tensor in zip("qkv", ours.pop(name).chunk(3)):
            ours[name.replace(".attn.c_attn.", f".attention.{part}_proj.")] = tensor
    return ours


def twins(
    family: str, words: dict[str, str], ours: dict[str, Any], theirs: dict[str, Any], **mistake: Any
) -> tuple[Transformer, Any]:
    """Our model and theirs with the same random weights; a `mistake` is made in ours alone."""
    config = ModelConfig(**{**OURS, **ours})
    settings = dict(
        vocab_size=config.vocab_size,
        hidden_size=config.d_model,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.d_ff,
        max_position_embeddings=config.max_seq_len,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tie_embeddings,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        attn_implementation="eager",
    )
    settings.update(theirs)
    their_config = getattr(transformers, f"{family}Config")(**settings)
    their_model = transformers.AutoModelForCausalLM.from_config(their_config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in their_model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_weight = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1 + 0.3 * noise if is_norm_weight else 0.3 * noise)
    our_model = Transformer(dataclasses.replace(config, **mistake)).eval()
    weights = translated(dict(their_model.named_parameters()), words)
    missing, unexpected = our_model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if config.tie_embeddings else [])
    return our_model, their_model


def rows(lengths: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """ids (B, T) and their attention mask, every row padded on the left to the longest."""
    ids = torch.randint(0, OURS["vocab_size"], (len(lengths), max(lengths)), generator=torch.Generator().manual_seed(1))
    steps = torch.arange(max(lengths)).flip(0)
    return ids, (steps < torch.tensor(lengths)[:, None]).long()


def largest_differences(
    ours: Transformer, theirs: nn.Module, words: dict[str, str], lengths: tuple[int, ...]
) -> tuple[float, float]:
    """The largest |Δlogit| at a token, and the largest gradient error of any parameter over its largest entry.

    Some gradients are zero in theory and rounding noise in both models (the bias of k shifts all scores of a query
    alike; a lone renormalised expert has weight 1), so no entry counts as smaller than 1e-2 of the model's largest.
    """
    ids, mask = rows(lengths)
    positions, is_token = positions_of_padded(mask), mask.bool()
    our_logits = ours(ids, positions=positions).logits[is_token]
    their_logits = theirs(ids, attention_mask=mask, position_ids=positions.clamp(min=0)).logits[is_token]

    direction = torch.randn(our_logits.shape, generator=torch.Generator().manual_seed(2))
    for model, logits in ((ours, our_logits), (theirs, their_logits)):
        model.zero_grad()
        (logits * direction).mean().backward()
    gradients = translated({name: parameter.grad for name, parameter in theirs.named_parameters()}, words)
    assert set(gradients) == {name for name, _ in ours.named_parameters()}
    smallest = 1e-2 * max(gradient.abs().max() for gradient in gradients.values())
    worst = 0.0
    for name, parameter in ours.named_parameters():
        scale = gradients[name].abs().max().clamp(min=smallest)
        worst = max(worst, float((parameter.grad - gradients[name]).abs().max() / scale))
    return float((our_logits - their_logits).detach().abs().max()), worst


def rope(rope_type: str, theta: float = 10_000.0, **more: Any) -> dict[str, Any]:
    return dict(rope_parameters={"rope_type": rope_type, "rope_theta": theta, **more})


# name: (family, words, ours, theirs)
CASES: dict[str, tuple[str, dict[str, str], dict[str, Any], dict[str, Any]]] = {
    "llama": ("Llama", LLAMA_WORDS, {}, {}),
    "llama with MHA": ("Llama", LLAMA_WORDS, dict(n_kv_heads=4), {}),
    "llama with MQA": ("Llama", LLAMA_WORDS, dict(n_kv_heads=1), {}),
    "llama with a free head_dim": ("Llama", LLAMA_WORDS, dict(head_dim=14), {}),
    "llama with an odd width": ("Llama", LLAMA_WORDS, dict(d_model=33, n_heads=3, n_kv_heads=3, head_dim=6), {}),
    "llama untied": ("Llama", LLAMA_WORDS, dict(tie_embeddings=False), {}),
    "llama with a large eps": ("Llama", LLAMA_WORDS, dict(norm_eps=0.05), {}),
    "llama with a large base": ("Llama", LLAMA_WORDS, dict(rope_theta=1e6), {}),
    "llama with biases": (
        "Llama",
        LLAMA_WORDS,
        dict(attention_bias="all", mlp_bias=True),
        dict(attention_bias=True, mlp_bias=True),
    ),
    "llama linear": (
        "Llama",
        LLAMA_WORDS,
        dict(rope_scaling="linear", rope_factor=3.0),
        rope("linear", factor=3.0),
    ),
    "llama yarn": (
        "Llama",
        LLAMA_WORDS,
        dict(rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=8, rope_theta=100.0, head_dim=16),
        rope("yarn", 100.0, factor=4.0, original_max_position_embeddings=8),
    ),
    "llama yarn with its own attention factor": (
        "Llama",
        LLAMA_WORDS,
        dict(
            rope_scaling="yarn", rope_factor=4.0, rope_original_max_seq_len=8, rope_attention_factor=0.7, head_dim=16,
            rope_beta_fast=1.0, rope_beta_slow=0.1,
        ),
        rope(
            "yarn", factor=4.0, original_max_position_embeddings=8, attention_factor=0.7, beta_fast=1.0, beta_slow=0.1
        ),
    ),
    "llama llama3": (
        "Llama",
        LLAMA_WORDS,
        dict(rope_scaling="llama3", rope_factor=4.0, rope_original_max_seq_len=8),
        rope("llama3", factor=4.0, original_max_position_embeddings=8, low_freq_factor=1.0, high_freq_factor=4.0),
    ),
    "mistral with a window of 3": ("Mistral", LLAMA_WORDS, dict(sliding_window=3), dict(sliding_window=3)),
    "qwen2": ("Qwen2", LLAMA_WORDS, dict(attention_bias="qkv"), {}),
    "qwen3": ("Qwen3", LLAMA_WORDS, dict(qk_norm=True, rope_theta=1e6, head_dim=12), {}),
    "qwen3 untied with a large eps": (
        "Qwen3", LLAMA_WORDS, dict(qk_norm=True, tie_embeddings=False, norm_eps=0.05), {},
    ),
    "GPT-2: LayerNorm, learned positions, exact GELU, biases": (
        "GPT2",
        GPT2_WORDS,
        dict(
            position="learned", norm="layer", mlp="gelu", mlp_bias=True, attention_bias="all", n_kv_heads=4,
        ),
        dict(
            n_positions=32, n_embd=32, n_layer=3, n_head=4, n_inner=48, activation_function="gelu",
            layer_norm_epsilon=1e-5,
        ),
    ),
    "OPT: post-norm, ReLU": (
        "OPT",
        OPT_WORDS,
        dict(
            position="learned", norm="layer", norm_position="post", mlp="relu", mlp_bias=True, attention_bias="all",
            n_kv_heads=4,
        ),
        dict(
            ffn_dim=48, activation_function="relu", do_layer_norm_before=False, word_embed_proj_dim=32, dropout=0.0,
        ),
    ),
}  # fmt: skip
for k in (1, 2, 3):
    for renormalize in (True, False):
        CASES[f"qwen3-moe top {k}{' renormalised' if renormalize else ''}"] = (
            "Qwen3Moe",
            LLAMA_WORDS,
            dict(qk_norm=True, n_experts=4, n_experts_per_token=k, renormalize_top_k=renormalize, tie_embeddings=False),
            dict(
                num_experts=4, num_experts_per_tok=k, norm_topk_prob=renormalize, moe_intermediate_size=OURS["d_ff"],
                decoder_sparse_step=1, mlp_only_layers=[], output_router_logits=False,
            ),
        )  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_logits_and_every_gradient_equal_those_of_transformers_in_a_left_padded_batch(case):
    family, words, ours, theirs = case
    our_model, their_model = twins(family, words, ours, theirs)
    logits, gradient = largest_differences(our_model, their_model, words, LENGTHS)
    assert logits <= TOLERANCE
    assert gradient <= TOLERANCE


@pytest.mark.parametrize("tokens", [8, 9, 30])
def test_dynamic_scaling_equals_that_of_transformers_up_to_and_beyond_the_trained_length(tokens):
    # One row: transformers takes the longest row's length for all, we each row's own, so that a batch changes nothing.
    ours, theirs = twins(
        "Llama",
        LLAMA_WORDS,
        dict(rope_scaling="dynamic", rope_factor=2.0, rope_original_max_seq_len=8),
        dict(rope("dynamic", factor=2.0), max_position_embeddings=8),  # it reads the trained length from here
    )
    logits, gradient = largest_differences(ours, theirs, LLAMA_WORDS, (tokens,))
    assert logits <= TOLERANCE
    assert gradient <= TOLERANCE


MISTAKES: dict[str, tuple[str, dict[str, Any]]] = {
    "another eps": ("llama", dict(norm_eps=1e-3)),
    "the other layout": ("llama", dict(rope_layout="interleaved")),
    "another base": ("llama", dict(rope_theta=9_000.0)),
    "a window too wide by one": ("mistral with a window of 3", dict(sliding_window=4)),
    "ReLU for GELU": ("GPT-2: LayerNorm, learned positions, exact GELU, biases", dict(mlp="relu")),
    "weights not renormalised": ("qwen3-moe top 2 renormalised", dict(renormalize_top_k=False)),
    "one expert too few": ("qwen3-moe top 2 renormalised", dict(n_experts_per_token=1)),
    "another attention factor": ("llama yarn", dict(rope_attention_factor=1.0)),
    "ntk for linear": ("llama linear", dict(rope_scaling="ntk")),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_shows(mistake):
    name, wrong = mistake
    family, words, ours, theirs = CASES[name]
    our_model, their_model = twins(family, words, ours, theirs, **wrong)
    logits, _ = largest_differences(our_model, their_model, words, LENGTHS)
    assert logits > 50 * TOLERANCE


@pytest.mark.parametrize("k", [1, 2, 3])
def test_the_balance_loss_is_that_of_transformers_divided_by_k(k):
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    logits = torch.randn(24, 5, generator=torch.Generator().manual_seed(k))
    mask = rows((8, 5, 1))[1]
    ours = balance_loss(route(logits, k, renormalize=True), mask.flatten().bool())
    theirs = load_balancing_loss_func((logits,), 5, k, mask)
    torch.testing.assert_close(ours, theirs / k)
    assert not torch.isclose(ours, balance_loss(route(logits, k, renormalize=True)))  # padding would have counted
