"""Other projects' words, and ours for the same things. They appear in this file and nowhere else.

Hugging Face has no single "modern Transformer". It has families, each of which can say some of what a `ModelConfig`
says: which ones, and in which words, is data here, and `to_hugging_face` and `from_hugging_face` read it. A config that
no family can say keeps our own words (`model_type: clockhand`).

Some fields do not change what a trained model computes, or change it in a way that a family can say differently
(dropout; the pairing of RoPE, which is an order of rows; static NTK scaling, which is a larger base). They must survive
on our side all the same, so whatever a family's words lose is kept beside them under the key `clockhand`, which others
do not read.

Nothing is ignored on the way in: a key of a config.json is translated, or known to be harmless, or refused by name.

This file knows no tensors; `hf.py` reads and writes the folders.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from clockhand.config import ROPE_SCALING_FIELDS, ModelConfig, field_names, from_dict
from clockhand.errors import ClockhandError, unknown_name

OWN_KEY = "clockhand"
"""The model_type of what only we can say, and the key of what a family's words would lose."""
WEIGHTS_KEY = "weights"
"""Beside it: the precision of weights that are stored packed, which only we can read."""
OWN_ARCHITECTURE = "ClockhandForCausalLM"


# ---- Hugging Face: tensors ----

TENSOR_WORDS = {
    "token_embedding.": "model.embed_tokens.",
    "final_norm.": "model.norm.",
    "blocks.": "model.layers.",
    ".attention_norm.": ".input_layernorm.",
    ".attention.": ".self_attn.",
    ".mlp_norm.": ".post_attention_layernorm.",
    ".mlp.router.": ".mlp.gate.",
}
"""Parts of a tensor's name. Every other part is called the same on both sides."""

FUSED_EXPERTS = {
    ".mlp.experts.gate_up_proj": ("gate_proj", "up_proj"),  # (E, 2F, D): the rows of the gate, then those of up
    ".mlp.experts.down_proj": ("down_proj",),  # (E, D, F)
}
"""How newer files may hold all experts of a layer in one tensor, and what it is split into."""

COMPUTED_TENSORS = (".rotary_emb.inv_freq",)
"""Ends of names that old files hold although they follow from the config."""


def hugging_face_tensor(name: str) -> str:
    """`blocks.0.attention.q_proj.weight` -> `model.layers.0.self_attn.q_proj.weight`"""
    for ours, theirs in TENSOR_WORDS.items():
        name = name.replace(ours, theirs)
    return name


# ---- Hugging Face: families ----

ALWAYS = dict(norm=("rms",), norm_position=("pre",), residual=(True,), mlp=("swiglu",), position=("rope",))
"""Values that every family takes for granted."""


@dataclass(frozen=True)
class Family:
    """One architecture of Hugging Face: which values of our fields it can say, and what it assumes when silent."""

    model_type: str
    architecture: str
    can_say: dict[str, tuple[Any, ...]]
    moe: bool = False
    windowed: bool = False
    """Whether it has sliding windows."""
    window_switch: bool = False
    """Whether `sliding_window` counts only where `use_sliding_window` is true."""
    whole_heads: bool = False
    """Whether it insists that n_heads divides d_model, even with a head_dim of its own."""
    when_absent: dict[str, Any] = field(default_factory=dict)
    """Its own defaults for absent keys, where `WHEN_ABSENT` is not the answer."""


# The first one that can say a config is used, so those that stand for a feature come before the plain ones.
FAMILIES = (
    Family(
        "qwen3_moe",
        "Qwen3MoeForCausalLM",
        dict(qk_norm=(True,), attention_bias=("none", "all"), mlp_bias=(False,)),
        moe=True,
        windowed=True,
        window_switch=True,
    ),
    Family(
        "qwen3",
        "Qwen3ForCausalLM",
        dict(qk_norm=(True,), attention_bias=("none", "all"), mlp_bias=(False,)),
        windowed=True,
        window_switch=True,
        when_absent=dict(head_dim=128),
    ),
    Family(
        "qwen2",
        "Qwen2ForCausalLM",
        dict(qk_norm=(False,), attention_bias=("qkv",), mlp_bias=(False,)),
        windowed=True,
        window_switch=True,
    ),
    Family(
        "llama",
        "LlamaForCausalLM",
        dict(qk_norm=(False,), attention_bias=("none", "all"), mlp_bias=(False, True)),
        whole_heads=True,
        when_absent=dict(max_position_embeddings=2048),
    ),
    Family(
        "mistral",
        "MistralForCausalLM",
        dict(qk_norm=(False,), attention_bias=("none",), mlp_bias=(False,)),
        windowed=True,
        when_absent=dict(max_position_embeddings=131072),
    ),
)


def family_for(config: ModelConfig) -> Family | None:
    """The family that says all of `config`; None when none does."""
    return next((family for family in FAMILIES if not list(_obstacles(config, family))), None)


def export_obstacle(config: ModelConfig) -> str | None:
    """Why no family of Hugging Face can say `config`, naming the fields; None when one can.

    >>> export_obstacle(build("mini-llama", norm="layer"))
    "norm = 'layer' has no counterpart in Hugging Face's llama or mistral"
    """
    obstacles = {family.model_type: list(_obstacles(config, family)) for family in FAMILIES}
    fewest = min(len(found) for found in obstacles.values())
    nearest: dict[str, list[str]] = {}  # obstacle -> families that have no more of them than any other
    for model_type, found in obstacles.items():
        if len(found) == fewest:
            for obstacle in found:
                nearest.setdefault(obstacle, []).append(model_type)
    reasons = [
        f"{obstacle} has no counterpart in Hugging Face's {' or '.join(them)}" for obstacle, them in nearest.items()
    ]
    return "; ".join(reasons) or None


def _obstacles(config: ModelConfig, family: Family) -> Iterator[str]:
    for name, values in {**ALWAYS, **family.can_say}.items():
        if getattr(config, name) not in values:
            yield f"{name} = {getattr(config, name)!r}"
    if config.is_moe != family.moe:
        yield f"n_experts = {config.n_experts}"
    if config.sliding_window and not family.windowed:
        yield f"sliding_window = {config.sliding_window}"
    if family.whole_heads and config.d_model % config.n_heads:
        yield f"head_dim = {config.head_dim} with d_model = {config.d_model} and n_heads = {config.n_heads}"


# ---- Hugging Face: config.json ----

KEYS = {
    "vocab_size": "vocab_size",
    "d_model": "hidden_size",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "d_ff": "intermediate_size",
    "max_seq_len": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "init_std": "initializer_range",
}
MOE_KEYS = {
    "d_ff": "moe_intermediate_size",
    "n_experts": "num_experts",
    "n_experts_per_token": "num_experts_per_tok",
    "renormalize_top_k": "norm_topk_prob",
    "balance_coef": "router_aux_loss_coef",
}
"""In a family with experts, beside KEYS: there `intermediate_size` is of dense layers, which we never mix in."""
ROPE_KEYS = {
    "rope_factor": "factor",
    "rope_original_max_seq_len": "original_max_position_embeddings",
    "rope_beta_fast": "beta_fast",
    "rope_beta_slow": "beta_slow",
    "rope_attention_factor": "attention_factor",
    "rope_low_freq_factor": "low_freq_factor",
    "rope_high_freq_factor": "high_freq_factor",
}
ROPE_TYPES = ("default", "linear", "dynamic", "yarn", "llama3")
"""Called as ours, but for default, which is none. There is no word for our ntk."""

WHEN_ABSENT = {
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "num_experts_per_tok": 8,
    "norm_topk_prob": False,
    "router_aux_loss_coef": 0.001,
    "rope_theta": 10_000.0,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
"""What transformers assumes for a key that a file does not state. Sizes are not here: a file must state them."""

# Head counts and widths that a file leaves out are guessed as we would; a wrong guess cannot pass, since every tensor's
# shape is checked.
MAY_BE_ABSENT = {"num_key_value_heads", "head_dim"}

SAME_AS: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (1,),
    "truncate": (True,),  # of YaRN's ramp
    "rope_interleaved": (False,),
    "decoder_sparse_step": (1,),
    "mlp_only_layers": ([],),
    "num_nextn_predict_layers": (0,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),  # where the family has no windows
    "is_encoder_decoder": (False,),
    "tie_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "pruned_heads": ({},),
    "mlp_bias": (False,),  # where the family does not read it
    "attention_bias": (False,),
}
"""Keys of a config.json that we honour at these values only."""

_HARMLESS = (
    # who wrote the file, and where its parts are
    "model_type architectures transformers_version transformers.js_config _name_or_path dtype torch_dtype",
    "is_llama_config unsloth_version unsloth_fixed",
    # ids, which generation_config.json states too
    "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id forced_bos_token_id",
    "forced_eos_token_id bad_words_ids suppress_tokens begin_suppress_tokens",
    # how it is run or trained, not what it computes
    "use_cache attention_dropout pretraining_tp output_router_logits output_attentions output_hidden_states",
    "return_dict return_dict_in_generate torchscript use_bfloat16 tf_legacy_loss chunk_size_feed_forward",
    "gradient_checkpointing attn_implementation _attn_implementation _attn_implementation_autoset",
    # defaults for drawing text, as older files kept them here
    "temperature top_k top_p typical_p do_sample num_beams num_beam_groups num_return_sequences max_length min_length",
    "length_penalty repetition_penalty diversity_penalty no_repeat_ngram_size encoder_no_repeat_ngram_size",
    "early_stopping exponential_decay_length_penalty remove_invalid_values output_scores",
    # other tasks
    "id2label label2id problem_type finetuning_task task_specific_params prefix tokenizer_class is_decoder",
    "cross_attention_hidden_size",
)
HARMLESS = {key for line in _HARMLESS for key in line.split()}
"""Keys that change nothing about the logits."""


def to_hugging_face(config: ModelConfig) -> dict[str, Any]:
    """The architecture as config.json says it, in the words of the family, or in ours where there is none.

    The RoPE is said twice, as transformers 5 reads it (`rope_parameters`) and as its predecessors and others do.
    """
    family = family_for(config)
    if family is None:
        return own_words(config)
    said = _family_words(config, family)
    # The plain reading of these words shows what they lose.
    heard = _read_family(said, family, "what clockhand wrote")
    lost = {name: getattr(config, name) for name in field_names(ModelConfig) if heard[name] != getattr(config, name)}
    return {**said, OWN_KEY: lost} if lost else said


def own_words(config: ModelConfig) -> dict[str, Any]:
    """The architecture as only we say and read it."""
    return {"architectures": [OWN_ARCHITECTURE], "model_type": OWN_KEY, OWN_KEY: dataclasses.asdict(config)}


def _family_words(config: ModelConfig, family: Family) -> dict[str, Any]:
    said: dict[str, Any] = {"architectures": [family.architecture], "model_type": family.model_type}
    said |= {theirs: getattr(config, ours) for ours, theirs in KEYS.items()}
    said["hidden_act"] = "silu"
    if family.moe:
        said |= {theirs: getattr(config, ours) for ours, theirs in MOE_KEYS.items()}
        said |= {"decoder_sparse_step": 1, "mlp_only_layers": []}
    if "all" in family.can_say["attention_bias"]:
        said["attention_bias"] = config.attention_bias == "all"
    if True in family.can_say["mlp_bias"]:
        said["mlp_bias"] = config.mlp_bias
    if family.windowed:
        said["sliding_window"] = config.sliding_window or None
    if family.window_switch:  # layers from max_window_layers on are windowed: 0 is all of them
        said |= {"use_sliding_window": config.sliding_window > 0, "max_window_layers": 0}

    scaling: dict[str, Any] = {"rope_type": "default" if config.rope_scaling == "none" else config.rope_scaling}
    theta = config.rope_theta
    for ours in ROPE_SCALING_FIELDS[config.rope_scaling]:
        if getattr(config, ours) is not None:
            scaling[ROPE_KEYS[ours]] = getattr(config, ours)
    if config.rope_scaling == "ntk":
        # Static NTK scaling is this larger base, exactly; Hugging Face has no other word for it.
        theta *= config.rope_factor ** (config.head_dim / (config.head_dim - 2))
        scaling = {"rope_type": "default"}
    if config.rope_scaling == "dynamic":
        # Hugging Face stretches from max_position_embeddings on, wherever else a length is stated.
        said["max_position_embeddings"] = scaling.pop("original_max_position_embeddings")
    said["rope_theta"] = theta
    said["rope_scaling"] = None if scaling["rope_type"] == "default" else scaling
    said["rope_parameters"] = {**scaling, "rope_theta": theta}
    return said


def from_hugging_face(raw: Mapping[str, Any], source: str) -> ModelConfig:
    """The config that the content of a config.json says. `source` is named in refusals.

    Raises `ClockhandError` for a family we do not know, a size that is missing, and any key that we could not honour.
    """
    own = raw.get(OWN_KEY, {})
    if not isinstance(own, dict):
        raise ClockhandError(f"'{OWN_KEY}' in {source} must be an object, not {own!r}")
    model_type = raw.get("model_type")
    if model_type == OWN_KEY:
        _refuse_unread(raw, {OWN_KEY, WEIGHTS_KEY}, source)
        return from_dict(ModelConfig, own, source)
    family = next((family for family in FAMILIES if family.model_type == model_type), None)
    if family is None:
        known = [family.model_type for family in FAMILIES] + [OWN_KEY]
        raise unknown_name("model_type", str(model_type), known, source)
    config = from_dict(ModelConfig, {**_read_family(raw, family, source), **own}, source)
    if own:
        _refuse_contradiction(raw, config, source)
    return config


def _refuse_contradiction(raw: Mapping[str, Any], config: ModelConfig, source: str) -> None:
    """What stands under `clockhand` and what stands beside it are one config, unless somebody changed one of them."""
    for key, value in to_hugging_face(config).items():
        if key in raw and raw[key] != value:
            raise ClockhandError(
                f"{key} = {raw[key]!r} in {source} contradicts what stands under '{OWN_KEY}' ({value!r}); "
                f"change both, or remove '{OWN_KEY}'"
            )


def _read_family(raw: Mapping[str, Any], family: Family, source: str) -> dict[str, Any]:
    """Every field of a ModelConfig as `raw` says it in the family's words."""
    absent = {**WHEN_ABSENT, **family.when_absent}
    raw = {key: value for key, value in raw.items() if value is not None or key == "sliding_window"}
    if family.moe and "num_experts" not in raw and "num_local_experts" in raw:  # transformers 5 writes it so
        raw["num_experts"] = raw.pop("num_local_experts")
    keys = {**KEYS, **MOE_KEYS} if family.moe else KEYS
    values: dict[str, Any] = {"qk_norm": family.can_say["qk_norm"][0]}
    for ours, theirs in keys.items():
        if theirs in raw or theirs in absent:
            values[ours] = raw.get(theirs, absent.get(theirs))
        elif theirs not in MAY_BE_ABSENT:
            raise ClockhandError(f"{source} does not state '{theirs}'")
    read = {*keys.values(), "intermediate_size", "layer_types", OWN_KEY}

    values["attention_bias"] = family.can_say["attention_bias"][0]
    if "all" in family.can_say["attention_bias"]:
        read.add("attention_bias")
        values["attention_bias"] = "all" if _flag(raw, "attention_bias", source) else "none"
    if True in family.can_say["mlp_bias"]:
        read.add("mlp_bias")
        values["mlp_bias"] = raw.get("mlp_bias", False)
    if family.windowed:
        read.add("sliding_window")
    if family.window_switch:
        read |= {"use_sliding_window", "max_window_layers"}
    read |= {"rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings"}
    _refuse_unread(raw, read, source)
    values["sliding_window"] = _read_window(raw, family, source)
    values |= _read_rope(raw, values["max_seq_len"], source)
    return dataclasses.asdict(from_dict(ModelConfig, values, source))


def _refuse_unread(raw: Mapping[str, Any], read: set[str], source: str) -> None:
    for key, value in raw.items():
        if value is None or key in read or key in HARMLESS:
            continue
        if key not in SAME_AS:
            raise ClockhandError(f"{key!r} in {source} is a key that clockhand does not know, and will not ignore")
        if value not in SAME_AS[key]:
            allowed = " or ".join(repr(value) for value in SAME_AS[key])
            raise ClockhandError(f"{key} = {value!r} in {source} must be {allowed}: clockhand has no such model")


def _read_window(raw: Mapping[str, Any], family: Family, source: str) -> int:
    """The sliding window of all layers. A model that mixes layers with one and without is refused."""
    window = 0
    if family.windowed and (not family.window_switch or _flag(raw, "use_sliding_window", source)):
        window = raw.get("sliding_window", WHEN_ABSENT["sliding_window"]) or 0
    layer_types = raw.get("layer_types", [])
    is_full = isinstance(layer_types, list) and {*map(str, layer_types)} == {"full_attention"}
    if family.window_switch and is_full:
        window = 0  # which goes before the switch: max_window_layers is above the number of layers, say
    if window and family.window_switch and not family.moe and "layer_types" not in raw:
        n_layers = _number(raw["num_hidden_layers"], "num_hidden_layers", source)
        first = raw.get("max_window_layers", WHEN_ABSENT["max_window_layers"])
        full_layers = _number(first, "max_window_layers", source)
        if 0 < full_layers < n_layers:
            raise ClockhandError(
                f"max_window_layers = {full_layers} in {source} must be 0 or num_hidden_layers = {n_layers}: "
                "clockhand has the same window in every layer"
            )
        window = 0 if full_layers else window
    kind = "sliding_attention" if window else "full_attention"
    if not isinstance(layer_types, list) or any(layer_type != kind for layer_type in layer_types):
        raise ClockhandError(f"layer_types in {source} must all be '{kind}', as sliding_window = {window} says")
    return window


def _read_rope(raw: Mapping[str, Any], max_seq_len: Any, source: str) -> dict[str, Any]:
    """The fields of RoPE, from the old place for them, the new one, or both if they agree."""
    places = {}
    for key in ("rope_scaling", "rope_parameters"):
        place = raw.get(key) or {}
        if not isinstance(place, dict):
            raise ClockhandError(f"{key} in {source} must be an object, not {place!r}")
        places[key] = {key: value for key, value in place.items() if value is not None}
    thetas = [place["rope_theta"] for place in (raw, *places.values()) if "rope_theta" in place]
    scalings = []
    for place in places.values():
        scaling = {"rope_type": place.get("type", "default"), **place}
        scaling.pop("type", None)
        scaling.pop("rope_theta", None)
        if place:
            scalings.append(scaling)
    for key, said in (("rope_theta", thetas), ("the scaling of RoPE", scalings)):
        if any(each != said[0] for each in said):
            raise ClockhandError(f"{key} is stated twice in {source}: {said[0]!r} and {said[-1]!r}")

    values: dict[str, Any] = {"rope_theta": thetas[0] if thetas else WHEN_ABSENT["rope_theta"]}
    scaling = dict(scalings[0]) if scalings else {"rope_type": "default"}
    rope_type = scaling.pop("rope_type")
    if rope_type not in ROPE_TYPES:
        raise unknown_name("rope_type", str(rope_type), ROPE_TYPES, source)
    if rope_type == "default" and "factor" in scaling:
        raise ClockhandError(
            f"factor = {scaling['factor']} in {source} needs a rope_type, which says how to stretch by it"
        )
    by_nothing = rope_type in ("linear", "llama3", "yarn") and scaling.get("factor") == 1
    if by_nothing and not scaling.get("attention_factor"):
        rope_type, scaling = "default", {}
    values["rope_scaling"] = "none" if rope_type == "default" else rope_type
    original = "original_max_position_embeddings"
    if rope_type == "dynamic":
        scaling.pop(original, None)  # transformers begins to stretch at max_position_embeddings, whatever stands here
    if original in raw and not by_nothing and rope_type != "dynamic":  # beside the object it wins over inside it
        scaling[original] = raw[original]
    elif rope_type in ("yarn", "llama3"):
        scaling.setdefault(original, max_seq_len)
    if rope_type == "yarn":
        _settle_yarn(scaling, max_seq_len, source)

    for ours in ROPE_SCALING_FIELDS[values["rope_scaling"]]:
        theirs = ROPE_KEYS[ours]
        if rope_type == "dynamic" and ours == "rope_original_max_seq_len":
            values[ours] = max_seq_len  # wherever else a length is stated
        elif theirs in scaling:
            values[ours] = scaling.pop(theirs)
        elif rope_type != "yarn":
            raise ClockhandError(f"rope_type = '{rope_type}' in {source} needs '{theirs}'")
    _refuse_unread(scaling, set(), source)
    return values


def _settle_yarn(scaling: dict[str, Any], max_seq_len: Any, source: str) -> None:
    """Replaces the other ways to state YaRN's numbers by the numbers."""
    if "factor" not in scaling:
        trained = _number(scaling["original_max_position_embeddings"], "original_max_position_embeddings", source)
        scaling["factor"] = _number(max_seq_len, "max_position_embeddings", source) / (trained or 1)
    for key in ("beta_fast", "beta_slow"):
        if not scaling.get(key, True):  # 0 asks for the default
            del scaling[key]
    over, under = scaling.pop("mscale", 0), scaling.pop("mscale_all_dim", 0)
    if "attention_factor" not in scaling and over and under:
        growth = 0.1 * math.log(max(_number(scaling["factor"], "factor", source), 1))
        over, under = _number(over, "mscale", source), _number(under, "mscale_all_dim", source)
        scaling["attention_factor"] = (over * growth + 1) / (under * growth + 1)


def _flag(raw: Mapping[str, Any], key: str, source: str) -> bool:
    value = raw.get(key, False)
    if type(value) is not bool:
        raise ClockhandError(f"{key} = {value!r} in {source} must be true or false")
    return value


def _number(value: Any, key: str, source: str) -> float:
    if type(value) not in (int, float) or not 0 <= value < 1e18:
        raise ClockhandError(f"{key} = {value!r} in {source} must be a number, 0 or more")
    return value


# ---- GGUF: tensors ----

GGUF_WORDS = {
    "token_embedding.": "token_embd.",
    "final_norm.": "output_norm.",
    "lm_head.": "output.",
    "blocks.": "blk.",
    ".attention_norm.": ".attn_norm.",
    ".attention.q_proj.": ".attn_q.",
    ".attention.k_proj.": ".attn_k.",
    ".attention.v_proj.": ".attn_v.",
    ".attention.o_proj.": ".attn_output.",
    ".attention.q_norm.": ".attn_q_norm.",
    ".attention.k_norm.": ".attn_k_norm.",
    ".mlp_norm.": ".ffn_norm.",
    ".mlp.router.": ".ffn_gate_inp.",
    ".mlp.gate_proj.": ".ffn_gate.",
    ".mlp.up_proj.": ".ffn_up.",
    ".mlp.down_proj.": ".ffn_down.",
}
"""Parts of a tensor's name in GGUF."""
GGUF_ROPE_DIVISORS = "rope_freqs.weight"
"""(Dh/2,): what each frequency is divided by. How `llama` files say Llama 3's scaling."""


def gguf_tensor(name: str) -> tuple[str, int | None]:
    """GGUF's name of a tensor, and which expert of it ours is: it holds all experts of a layer in one, (E, rows, D).

    `blocks.0.mlp.experts.3.up_proj.weight` -> (`blk.0.ffn_up_exps.weight`, 3)
    """
    expert = None
    if ".mlp.experts." in name:
        before, _, after = name.partition(".mlp.experts.")
        number, _, projection = after.partition(".")
        name, expert = f"{before}.mlp.{projection}", int(number)
    for ours, theirs in GGUF_WORDS.items():
        name = name.replace(ours, theirs)
    return (name if expert is None else name.replace(".weight", "_exps.weight")), expert


# ---- GGUF: keys, after the architecture's name and a dot ----

GGUF_KEYS = {
    "max_seq_len": "context_length",
    "d_model": "embedding_length",
    "n_layers": "block_count",
    "n_heads": "attention.head_count",
    "n_kv_heads": "attention.head_count_kv",
    "d_ff": "feed_forward_length",
    "norm_eps": "attention.layer_norm_rms_epsilon",
    "rope_theta": "rope.freq_base",
}
"""In every file."""
GGUF_MOE_KEYS = {
    "d_ff": "expert_feed_forward_length",
    "n_experts": "expert_count",
    "n_experts_per_token": "expert_used_count",
}
"""In a file with experts, beside GGUF_KEYS."""
GGUF_HEAD_DIM = ("attention.key_length", "attention.value_length", "rope.dimension_count")
"""Three names for one number."""
GGUF_ROPE_KEYS = {
    "rope_scaling": "rope.scaling.type",
    "rope_factor": "rope.scaling.factor",
    "rope_original_max_seq_len": "rope.scaling.original_context_length",
    "rope_attention_factor": "rope.scaling.attn_factor",
}
"""Where RoPE is scaled."""
GGUF_SAME_AS: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.sliding_window": (0,),
    "expert_gating_func": (1,),  # softmax
    "expert_shared_count": (0,),
    "expert_weights_norm": (True,),
    "expert_weights_scale": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (1.0, -1.0),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),  # llama.cpp reads neither in these architectures
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}
"""Keys of an architecture that we honour at these values only."""
GGUF_HARMLESS = frozenset({"rope.scaling.finetuned", "tensor_data_layout", "vocab_size"})
