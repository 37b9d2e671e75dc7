"""What a model is, as numbers and names: one frozen value, checked when it is made.

A `ModelConfig` holds every switch of the architecture. It knows nothing of tensors, so counting and inspecting a model
never import torch. Values that follow from others (`n_kv_heads`, `head_dim`) are settled once, here; a combination that
cannot exist is refused here; a setting that would have no effect is refused too, because a switch that is accepted and
ignored is a lie.

How a model is trained is in `train/config.py`, how text is drawn from it in `infer/settings.py`.
"""

import ast
import dataclasses
import inspect
import math
import textwrap
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from clockhand.errors import ClockhandError, unknown_name

CHOICES: dict[str, tuple[str, ...]] = {
    "norm": ("rms", "layer"),
    "norm_position": ("pre", "post"),
    "mlp": ("swiglu", "gelu", "relu"),
    "position": ("rope", "learned", "none"),
    "attention_bias": ("none", "qkv", "all"),
    "rope_layout": ("half", "interleaved"),
    "rope_scaling": ("none", "linear", "ntk", "dynamic", "yarn", "llama3"),
}

# Which rope_scaling reads which further field. A value other than the default is refused where nobody would read it.
ROPE_SCALING_FIELDS: dict[str, tuple[str, ...]] = {
    "none": (),
    "linear": ("rope_factor",),
    "ntk": ("rope_factor",),
    "dynamic": ("rope_factor", "rope_original_max_seq_len"),
    "yarn": ("rope_factor", "rope_original_max_seq_len", "rope_beta_fast", "rope_beta_slow", "rope_attention_factor"),
    "llama3": ("rope_factor", "rope_original_max_seq_len", "rope_low_freq_factor", "rope_high_freq_factor"),
}


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The architecture of one decoder-only Transformer. Raises `ClockhandError` when it cannot exist."""

    vocab_size: int
    """V: number of token ids, and rows of the embedding."""
    d_model: int
    """D: width of the residual stream."""
    n_layers: int
    """L: number of blocks."""
    n_heads: int
    """H: query heads."""
    n_kv_heads: int = 0
    """K: key/value heads. Equal to n_heads is MHA, 1 is MQA, between is GQA. 0 means n_heads."""
    head_dim: int = 0
    """Dh: width of one head, free of d_model. 0 means d_model / n_heads."""
    d_ff: int
    """F: inner width of the MLP, or of each expert."""
    max_seq_len: int = 2048
    """Longest sequence the model is meant for: rows of a learned position table, limit of a cache."""

    norm: str = "rms"
    """rms | layer."""
    norm_position: str = "pre"
    """pre: x + f(norm(x)), and a final norm before the head. post: norm(x + f(x)), and no final norm."""
    norm_eps: float = 1e-6
    """Added to the mean square (rms) or to the variance (layer) before the root."""
    residual: bool = True
    """Whether a block adds its input to its output. Off only to show what residuals are for."""

    qk_norm: bool = False
    """Normalise each head's query and key over head_dim before rotation."""
    attention_bias: str = "none"
    """Which attention projections have a bias: none | qkv | all (qkv and the output)."""
    sliding_window: int = 0
    """W: a query sees only the last W positions, itself included. 0 is off."""

    mlp: str = "swiglu"
    """swiglu | gelu | relu."""
    mlp_bias: bool = False
    """Whether the projections of the MLP have a bias."""

    n_experts: int = 0
    """E: experts in each layer. 0 is a dense model."""
    n_experts_per_token: int = 1
    """k: experts each token is sent to."""
    renormalize_top_k: bool = True
    """Whether the k router weights are divided by their sum. With k = 1 the weight is then always 1."""
    balance_coef: float = 5e-4
    """Factor of the load-balance loss, whose value is 1 per layer at perfect balance (MiniMind-3 uses 5e-4)."""

    position: str = "rope"
    """rope | learned | none."""
    rope_theta: float = 10_000.0
    """Base of the rotation frequencies."""
    rope_layout: str = "half"
    """half: dimension i pairs with i + Dh/2 (rotate_half, Hugging Face). interleaved: 2i with 2i+1 (llama2.c)."""
    rope_scaling: str = "none"
    """none | linear | ntk | dynamic | yarn | llama3: how positions beyond the trained length are reached."""
    rope_factor: float = 1.0
    """By how much the context is stretched."""
    rope_original_max_seq_len: int = 0
    """The trained length that the scaling starts from (dynamic, yarn, llama3)."""
    rope_beta_fast: float = 32.0
    """yarn: dimensions that turn more often than this within the trained length keep their frequency."""
    rope_beta_slow: float = 1.0
    """yarn: dimensions that turn less often than this are divided by the factor."""
    rope_attention_factor: float | None = None
    """yarn: scale of the rotation tables. None computes 0.1·ln(factor) + 1."""
    rope_low_freq_factor: float = 1.0
    """llama3: wavelengths above original / this are divided by the factor."""
    rope_high_freq_factor: float = 4.0
    """llama3: wavelengths below original / this are kept."""

    tie_embeddings: bool = True
    """Whether the head is the embedding matrix itself."""
    dropout: float = 0.0
    """Probability of dropping an activation after the embedding, the attention and the MLP, while training."""
    init_std: float = 0.02
    """Standard deviation of the initial weights."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("vocab_size", "d_model", "n_layers", "n_heads", "d_ff", "max_seq_len"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        for name in ("n_kv_heads", "head_dim", "sliding_window", "n_experts", "rope_original_max_seq_len"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        for name, choices in CHOICES.items():
            require(self, name, getattr(self, name) in choices, " | ".join(choices))
        require(self, "norm_eps", self.norm_eps > 0, "above 0")
        require(self, "init_std", self.init_std > 0, "above 0")
        require(self, "balance_coef", self.balance_coef >= 0, "0 or more")
        require(self, "dropout", 0 <= self.dropout < 1, "in [0, 1)")

        if self.n_kv_heads == 0:
            object.__setattr__(self, "n_kv_heads", self.n_heads)
        require(self, "n_kv_heads", self.n_heads % self.n_kv_heads == 0, f"a divisor of n_heads = {self.n_heads}")
        if self.head_dim == 0:
            allowed = f"a multiple of n_heads = {self.n_heads} (or give head_dim)"
            require(self, "d_model", self.d_model % self.n_heads == 0, allowed)
            object.__setattr__(self, "head_dim", self.d_model // self.n_heads)
        if self.position == "rope":
            require(self, "head_dim", self.head_dim % 2 == 0, "even, because RoPE rotates pairs of dimensions")
            require(self, "rope_theta", self.rope_theta > 1, "above 1")
        if self.is_moe:
            allowed = f"between 1 and n_experts = {self.n_experts}"
            require(self, "n_experts_per_token", 1 <= self.n_experts_per_token <= self.n_experts, allowed)
        self._check_unread()
        self._check_rope_scaling()

    def _check_unread(self) -> None:
        """Refuses a value other than the default in a field that this model never reads."""
        unread = unread_fields(self.n_experts, self.position, self.rope_scaling)
        for field in dataclasses.fields(self):
            if field.name in unread:
                allowed = f"left at {field.default} where {unread[field.name]}, which does not read it"
                require(self, field.name, getattr(self, field.name) == field.default, allowed)

    def _check_rope_scaling(self) -> None:
        read = ROPE_SCALING_FIELDS[self.rope_scaling]
        if self.rope_scaling == "dynamic":  # with a factor of 1 it still stretches, by length / original
            require(self, "rope_factor", self.rope_factor >= 1, "1 or more")
        elif "rope_factor" in read:
            needed = f"above 1 where rope_scaling = {self.rope_scaling}, or it would change nothing"
            require(self, "rope_factor", self.rope_factor > 1, needed)
        if "rope_original_max_seq_len" in read:
            needed = f"at least 1 where rope_scaling = {self.rope_scaling}"
            require(self, "rope_original_max_seq_len", self.rope_original_max_seq_len >= 1, needed)
        if self.rope_scaling in ("ntk", "dynamic"):
            needed = f"above 2 where rope_scaling = {self.rope_scaling}"
            require(self, "head_dim", self.head_dim > 2, needed)
        if self.rope_scaling == "yarn":
            slow, factor = self.rope_beta_slow, self.rope_attention_factor
            require(self, "rope_beta_slow", slow > 0, "above 0")
            require(self, "rope_beta_fast", self.rope_beta_fast > slow, f"above rope_beta_slow = {slow}")
            require(self, "rope_attention_factor", factor is None or factor > 0, "above 0")
            # Otherwise no pair turns often enough to be kept, and the ramp between kept and divided has no place.
            needed = f"above 2π · rope_beta_slow = {2 * math.pi * slow:.4g} where rope_scaling = yarn"
            require(self, "rope_original_max_seq_len", self.rope_original_max_seq_len > 2 * math.pi * slow, needed)
        if self.rope_scaling == "llama3":
            low = self.rope_low_freq_factor
            require(self, "rope_low_freq_factor", low > 0, "above 0")
            require(self, "rope_high_freq_factor", self.rope_high_freq_factor > low, f"above {low}")

    @property
    def group_size(self) -> int:
        """G: query heads that read one KV head."""
        return self.n_heads // self.n_kv_heads

    @property
    def is_moe(self) -> bool:
        return self.n_experts > 0


def unread_fields(n_experts: int, position: str, rope_scaling: str) -> dict[str, str]:
    """The fields that a model with these three settings never reads, each with the setting that makes it idle."""
    unread: dict[str, str] = {}
    if n_experts == 0:
        unread |= dict.fromkeys(("n_experts_per_token", "renormalize_top_k", "balance_coef"), "n_experts = 0")
    read = ROPE_SCALING_FIELDS[rope_scaling] if position == "rope" else ()
    for names in ROPE_SCALING_FIELDS.values():
        unread |= {name: f"rope_scaling = {rope_scaling}" for name in names if name not in read}
    if position != "rope":
        unread |= dict.fromkeys(("rope_theta", "rope_layout", "rope_scaling"), f"position = {position}")
    return unread


Config = TypeVar("Config")  # any of our frozen dataclasses


def require(config: object, name: str, condition: bool, allowed: str) -> None:
    """Raises `ClockhandError` naming field, value and what is allowed, unless `condition` holds."""
    if not condition:
        raise ClockhandError(f"{name} = {getattr(config, name)!r} must be {allowed}")


def check_types(config: object) -> None:
    """Refuses a field whose value is not of its declared type; an int where a float is declared becomes one."""
    hints = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, kinds = getattr(config, field.name), _kinds(hints[field.name])
        if float in kinds and type(value) is int:
            value = float(value) if abs(value) < 2**1023 else math.inf  # beyond, float() raises
            object.__setattr__(config, field.name, value)
        elif type(value) not in kinds:
            names = " or ".join("nothing" if kind is type(None) else kind.__name__ for kind in kinds)
            raise ClockhandError(f"{field.name} = {value!r} must be of type {names}")
        if type(value) is float and not math.isfinite(value):
            raise ClockhandError(f"{field.name} = {value!r} must be a finite number")


def field_names(config_type: type) -> list[str]:
    return [field.name for field in dataclasses.fields(config_type)]


def field_docs(config_type: type) -> dict[str, str]:
    """The line of explanation under each field, by name. The command line's help is made of them."""
    (cls,) = ast.parse(textwrap.dedent(inspect.getsource(config_type))).body
    assert isinstance(cls, ast.ClassDef)
    return {
        field.target.id: " ".join(doc.value.value.split())
        for field, doc in zip(cls.body, cls.body[1:])
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(doc, ast.Expr)
        and isinstance(doc.value, ast.Constant)
        and isinstance(doc.value.value, str)
    }


def from_dict(config_type: type[Config], values: Mapping[str, Any], source: str) -> Config:
    """Builds a config from a mapping; an unknown key is refused with the nearest known one.

    `source` (a file, `--set`, ...) is named in every refusal.
    """
    known = field_names(config_type)
    for name in values:
        if name not in known:
            raise unknown_name("field", name, known, source)
    missing = [
        field.name
        for field in dataclasses.fields(config_type)  # type: ignore[arg-type]
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and field.name not in values
    ]
    if missing:
        raise ClockhandError(f"missing field {', '.join(missing)} (from {source})")
    try:
        return config_type(**values)
    except ClockhandError as error:
        raise ClockhandError(f"{error} (from {source})") from None


def parse_settings(config_type: type, settings: Iterable[str], source: str = "--set") -> dict[str, Any]:
    """`["n_layers=6", "qk_norm=true"]` → `{"n_layers": 6, "qk_norm": True}`, each value read as its field's type.

    Hyphens in names are read as underscores. Raises `ClockhandError` for a word without '=', an unknown field, or a
    value that is not of the field's type.
    """
    hints, parsed = typing.get_type_hints(config_type), {}
    for setting in settings:
        name, equals, text = setting.partition("=")
        name = name.strip().replace("-", "_")
        if not equals:
            raise ClockhandError(f"{setting!r} (from {source}) must look like name=value")
        if name not in field_names(config_type):
            raise unknown_name("field", name, field_names(config_type), source)
        try:
            parsed[name] = _parse(text.strip(), _kinds(hints[name]))
        except ValueError as error:
            raise ClockhandError(f"{name} = {text.strip()!r} (from {source}) must be {error}") from None
    return parsed


def _kinds(hint: Any) -> tuple[type, ...]:
    is_union = isinstance(hint, types.UnionType) or typing.get_origin(hint) is typing.Union
    return typing.get_args(hint) if is_union else (hint,)


def _parse(text: str, kinds: tuple[type, ...]) -> Any:
    if type(None) in kinds and text.lower() in ("none", "null", ""):
        return None
    if bool in kinds:
        if text.lower() in ("true", "yes", "on", "1"):
            return True
        if text.lower() in ("false", "no", "off", "0"):
            return False
        raise ValueError("true or false")
    if int in kinds:
        try:
            return int(text)
        except ValueError:
            raise ValueError("a whole number") from None
    if float in kinds:
        try:
            return float(text)
        except ValueError:
            raise ValueError("a number") from None
    return text
