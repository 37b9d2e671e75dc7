"""How a model is trained, as numbers: one frozen value, checked when it is made.

The defaults are for small models on a CPU. A field left at AUTO follows from the others and is settled here, once.
The architecture is in `clockhand/config.py`.
"""

from dataclasses import dataclass

from clockhand.config import check_types, require

AUTO = -1
DEVICES = ("auto", "cpu", "cuda")
PARALLEL = ("auto", "none", "ddp", "fsdp")
DTYPES = ("auto", "float32", "bfloat16")
COMPILE = ("auto", "on", "off")
OPTIMIZERS = ("adamw", "muon")

# fmt: off
MAY_CHANGE = frozenset({
    "steps", "warmup_steps", "device", "parallel", "checkpoint_activations",
    "eval_every", "eval_windows", "save_every", "keep_last", "sample_every", "sample_prompt", "sample_tokens",
    "keep_bad_steps", "keep_best",
})
# fmt: on
"""What a resumed run may change: how long it is, where it runs, and when it looks up from its work. The warm-up only
where it follows the steps."""


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """One training run. Raises `ClockhandError` when it cannot exist."""

    steps: int = 1000
    """Updates in the whole run."""
    batch_size: int = 8
    """B: rows in a micro-batch, those of all processes together."""
    accumulate: int = 1
    """Micro-batches whose gradients make one update: at most an epoch of them."""
    seq_len: int = 256
    """T: tokens in a row."""
    seed: int = 0
    """Initial weights, order of the data and dropout are functions of the seed and the step."""
    dtype: str = "auto"
    """auto | float32 | bfloat16: precision of the matrix products. Weights and the loss are always fp32. auto measures
    which is faster here for this model."""
    compile: str = "auto"
    """auto | on | off: run the blocks through torch's compiler. auto does if the run is long enough to repay it."""
    device: str = "auto"
    """auto | cpu | cuda. auto is cuda where there is one."""
    parallel: str = "auto"
    """auto | none | ddp | fsdp: how processes that torchrun has started share the work. auto is ddp then, else none."""
    checkpoint_activations: bool = False
    """Keep only the input of each block for the backward pass, and compute the rest again: less memory, more time."""

    deterministic: bool = False
    """Only kernels that add in a fixed order, and always as many threads. Free on the CPU; on CUDA it costs speed."""

    optimizer: str = "adamw"
    """adamw | muon: what updates the matrices of the blocks. Everything else is AdamW's."""
    learning_rate: float = 1e-3
    """The peak, reached after the warm-up."""
    min_lr_ratio: float = 0.1
    """The rate of the last step, as a part of the peak."""
    warmup_steps: int = AUTO
    """Steps of linear climb to the peak. -1 is a tenth of the run, at most 200."""
    weight_decay: float = 0.1
    """Of matrices only."""
    beta1: float = 0.9
    """AdamW: memory of the gradient."""
    beta2: float = 0.95
    """AdamW: memory of its square."""
    adam_eps: float = 1e-8
    """AdamW: keeps a division by a vanishing square finite."""
    clip_norm: float = 1.0
    """Longest gradient of all parameters together. 0 is off."""
    skip_spikes: bool = False
    """Leave out a step whose loss or gradient is far outside the last 64 steps'. One that is not finite always is."""
    keep_bad_steps: int = 3
    """Steps that went wrong kept in bad-steps/ for --replay, each with the weights before it. 0 keeps none."""

    eval_every: int = AUTO
    """Steps between evaluations. The end always has one; 0 is only there. -1 is a tenth of the run, at most 500."""
    eval_windows: int = 32
    """Held-out windows of seq_len tokens that an evaluation reads: always the same ones."""
    save_every: int = AUTO
    """Steps between checkpoints. The end always has one; 0 is only there. -1 is a quarter of the run, at most 500."""
    keep_last: int = 3
    """Checkpoints kept. 0 keeps all."""
    keep_best: bool = True
    """Keep the weights with the lowest validation loss in best/."""
    sample_every: int = AUTO
    """Steps between samples of the model's text; the end has one too. 0 is never. -1 is a quarter of the run."""
    sample_prompt: str = ""
    """What the model continues in a sample."""
    sample_tokens: int = 80
    """Longest sample, in tokens."""

    def __post_init__(self) -> None:
        check_types(self)
        for name in ("steps", "batch_size", "accumulate", "seq_len", "eval_windows", "sample_tokens"):
            require(self, name, getattr(self, name) >= 1, "at least 1")
        most = "so small that a step reads fewer than 2**31 tokens"
        require(self, "batch_size", self.batch_size * self.seq_len < 2**31, most)
        require(self, "accumulate", self.tokens_per_step < 2**31, most)
        require(self, "learning_rate", self.learning_rate > 0, "above 0")
        self._settle("warmup_steps", min(self.steps // 10, 200))
        self._settle("eval_every", min(max(self.steps // 10, 1), 500))
        self._settle("save_every", min(max(self.steps // 4, 1), 500))
        self._settle("sample_every", max(self.steps // 4, 1))

        for name in ("seed", "keep_last", "keep_bad_steps"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        for name in ("warmup_steps", "eval_every", "save_every", "sample_every"):
            require(self, name, getattr(self, name) >= 0, f"0 or more, or {AUTO} (as the length of the run has it)")
        for name in ("steps", "eval_windows", "sample_tokens", "seed", "keep_last", "keep_bad_steps"):
            require(self, name, getattr(self, name) < 2**63, "below 2**63")
        stored = self.sample_prompt.encode("utf-8", "ignore").decode()  # a terminal may give halves of characters
        require(self, "sample_prompt", stored == self.sample_prompt, "text that UTF-8 can hold")
        for name in ("weight_decay", "clip_norm"):
            require(self, name, getattr(self, name) >= 0, "0 or more")
        for name in ("beta1", "beta2"):
            require(self, name, 0 <= getattr(self, name) < 1, "in [0, 1)")
        require(self, "adam_eps", self.adam_eps > 0, "above 0")
        scaled = "auto | float32 | bfloat16; fp16 would need its loss scaled, by a factor no checkpoint holds yet"
        require(self, "dtype", self.dtype != "float16", scaled)
        for name, allowed in (
            ("dtype", DTYPES),
            ("compile", COMPILE),
            ("optimizer", OPTIMIZERS),
            ("device", DEVICES),
            ("parallel", PARALLEL),
        ):
            require(self, name, getattr(self, name) in allowed, " | ".join(allowed))
        require(self, "min_lr_ratio", 0 <= self.min_lr_ratio <= 1, "in [0, 1]")

    def _settle(self, name: str, value: int) -> None:
        if getattr(self, name) == AUTO:
            object.__setattr__(self, name, value)

    @property
    def min_learning_rate(self) -> float:
        return self.learning_rate * self.min_lr_ratio

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.accumulate * self.seq_len
