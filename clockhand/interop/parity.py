"""The parity passport: the same prompts through our model and through another program, and what came of it.

    validate("runs/demo")                          every other program that is installed
    validate("runs/demo", against="llama.cpp")     one of them: transformers or llama.cpp
    validate("runs/demo", against="demo.gguf")     one exported file, in the program that runs such files

Compared are the ids of the prompts, the logits at every position, and 64 greedy tokens. Two programs never add in the
same order, so logits differ by rounding; what is allowed, and how far beyond it a wrong export is, is written beside
`EXACT` and `ROUNDED_KL`.
"""

import ctypes
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from clockhand.data.tokenizer import Tokenizer
from clockhand.disk import new_file
from clockhand.errors import ClockhandError
from clockhand.interop import formats, gguf, hf, names
from clockhand.model.cache import KVCache
from clockhand.model.transformer import Transformer

PROMPTS = (
    "Once upon a time there was a small clock",
    "In 1984, 3.14159 times 12,345,678 made 38785093.4.",
    "def square(x):\n    if x > 0:\n        return x ** 2\n\n\nprint(square(10))",
    "床前明月光，疑是地上霜。",
    "👋🏽 café — naïve…",
    "  two  spaces,\ta tab\n\n\n   and  lines \n",
)
GREEDY_TOKENS = 64
LONGEST_PROMPT = 256  # tokens: RoPE's slow hands need some distance to show a mistake

EXACT = 1e-3
"""The same fp32 weights: logits may differ by this much of their own spread. Rounding makes 1e-6 to 1e-5 of it."""
ROUNDED_KL, ROUNDED_SHARE = 1e-3, 0.05
"""Weights or activations rounded on the way (f16, bf16, q8_0): nats of KL divergence that a token may have on average,
and how far its logits may be off, again as a share of their spread. A model of 260,000 parameters in q8_0 is at 5e-4
and 0.01, larger ones are lower. Rows of q in a wrong order make 0.1 of it in a flat model, and 0.6 in a sharp one."""


@dataclass(frozen=True)
class Parity:
    """What one comparison found."""

    against: str
    """The other program, or the file."""
    passed: bool
    verdict: str
    """One sentence for a person."""
    largest_difference: float
    """Between two logits, over all prompts and positions."""
    spread: float
    """Standard deviation of our logits, to hold the difference against."""
    typical_share: float
    """How far the logits of a token are off on average (root mean square), as a share of the spread."""
    kl: float
    """Mean KL divergence of a token, in nats."""
    token_ids_equal: bool | None
    """Whether the prompts have the same ids in both; None where the file has no tokenizer."""
    first_differing_token: int | None
    """Which greedy token is the first to differ; None when all are equal."""
    tie: bool
    """Whether our two best scores were so close there that the difference of the logits explains it."""
    greedy_text: str
    greedy_text_there: str
    versions: dict[str, str]


class Program(Protocol):
    """Another program with a model in it."""

    name: str
    exact: bool
    """Whether it computes with the same fp32 numbers as we do."""
    versions: dict[str, str]

    def encode(self, text: str) -> list[int] | None:
        """The ids it begins to continue `text` from, with bos where it puts that; None: it has no tokenizer."""

    def logits(self, ids: list[int]) -> Tensor: ...  # (T, V) fp32
    def greedy(self, ids: list[int], count: int) -> list[int]: ...


@dataclass(frozen=True)
class Passport:
    """What `validate` found, and what is written to parity.json."""

    passed: bool
    comparisons: list[Parity]
    refused: dict[str, str]
    """Programs that cannot run this model, and the field that stands in the way."""


def validate(model: str | Path, against: str | Path | None = None) -> Passport:
    """Compares a model folder (or run folder) with other programs, and writes parity.json into the folder.

    `against` is transformers, llama.cpp, or the path of an exported file or folder; None is every program that is
    installed. Raises `ClockhandError` when there is none, or when none of them can run the model.
    """
    folder = hf.find_model_folder(model)
    programs = [against] if against is not None else [name for name, module in MODULES.items() if _installed(module)]
    if not programs:
        raise ClockhandError("no other program is installed; install one with: pip install 'clockhand[peers]'")
    ours = hf.load_model(folder, dtype=torch.float32)
    tokenizer = Tokenizer.load(folder)
    comparisons, refused = [], {}
    with tempfile.TemporaryDirectory() as scratch:
        for each in programs:
            try:
                program = _program(each, folder, ours, tokenizer, Path(scratch))
            except ClockhandError as error:
                refused[str(each)] = str(error)
            else:
                comparisons.append(compare(ours, tokenizer, program))
    if not comparisons:
        raise ClockhandError("; ".join(refused.values()))
    passport = Passport(all(each.passed for each in comparisons), comparisons, refused)
    with new_file(folder / "parity.json") as beside:
        beside.write_text(json.dumps(dataclasses.asdict(passport), indent=2, ensure_ascii=False) + "\n", "utf-8")
    return passport


def compare(ours: Transformer, tokenizer: Tokenizer, program: Program) -> Parity:
    """What the prompts show of our model and of `program`."""
    limit = ours.config.max_seq_len
    prompts = [tokenizer.encode(prompt, bos=True)[:limit] for prompt in PROMPTS]
    prompts.append([id for prompt in prompts for id in prompt][: min(limit, LONGEST_PROMPT)])
    there = [program.encode(prompt) for prompt in PROMPTS]
    same_ids = None if None in there else there == [tokenizer.encode(prompt, bos=True) for prompt in PROMPTS]

    difference = 0.0
    spreads, errors, divergences = [], [], []
    for ids in prompts:
        mine, theirs = _logits(ours, ids), program.logits(ids)
        if mine.shape != theirs.shape:
            raise ClockhandError(f"{program.name} answers {tuple(theirs.shape)} logits to our {tuple(mine.shape)}")
        difference = max(difference, float((mine - theirs).abs().max()))
        spreads.append(float(mine.std()))
        errors.append((mine - theirs).square().mean(-1).sqrt())  # (T,)
        mine, theirs = mine.log_softmax(-1), theirs.log_softmax(-1)
        divergences.append((mine.exp() * (mine - theirs)).sum(-1))  # (T,)

    count = min(GREEDY_TOKENS, limit - len(prompts[0]))
    greedy, gaps = _greedy(ours, prompts[0], count)
    greedy_there = program.greedy(prompts[0], count)
    differing = next((place for place in range(count) if greedy[place] != greedy_there[place]), None)
    tie = differing is not None and gaps[differing] <= 2 * difference
    spread, kl = sum(spreads) / len(spreads), float(torch.cat(divergences).mean())
    share = float(torch.cat(errors).mean()) / spread
    problems = _differences(difference / spread) if program.exact else _rounded_differences(share, kl)
    problems += _different_words(same_ids, differing, tie)
    return Parity(
        against=program.name,
        passed=not problems,
        verdict="different: " + "; ".join(problems) if problems else "equal",
        largest_difference=difference,
        spread=spread,
        typical_share=share,
        kl=kl,
        token_ids_equal=same_ids,
        first_differing_token=differing,
        tie=tie,
        greedy_text=_text(tokenizer, greedy),
        greedy_text_there=_text(tokenizer, greedy_there),
        versions={"clockhand": _version("clockhand"), "torch": torch.__version__, **program.versions},
    )


# What stands against parity. All three are written so that NaN does.


def _differences(share: float) -> list[str]:
    if share <= EXACT:
        return []
    return [f"logits differ by {share:.3g} of their spread, more than {EXACT}"]


def _rounded_differences(share: float, kl: float) -> list[str]:
    if share <= ROUNDED_SHARE and kl <= ROUNDED_KL:
        return []
    return [
        f"logits differ by {share:.3g} of their spread and {kl:.3g} nats on average, "
        f"more than the {ROUNDED_SHARE} and {ROUNDED_KL} of rounding"
    ]


def _different_words(same_ids: bool | None, differing: int | None, tie: bool) -> list[str]:
    problems = []
    if same_ids is False:
        problems.append("a prompt has other token ids there")
    if differing is not None and not tie:
        problems.append(f"greedy token {differing} differs")
    return problems


@torch.inference_mode()
def _logits(model: Transformer, ids: Sequence[int]) -> Tensor:
    return model(torch.tensor([ids])).logits[0].float()  # (T, V)


@torch.inference_mode()
def _greedy(model: Transformer, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
    """The `count` most probable continuations of `ids`, and how far the second best was behind each."""
    cache = KVCache(model.config, 1, max_seq_len=len(ids) + count)
    chosen: list[int] = []
    gaps: list[float] = []
    fresh = list(ids)
    for _ in range(count):
        scores = model(torch.tensor([fresh]), cache=cache).logits[0, -1]  # (V,)
        best = scores.topk(2)
        chosen.append(int(best.indices[0]))
        gaps.append(float(best.values[0] - best.values[1]))
        fresh = chosen[-1:]
    return chosen, gaps


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """The text of `ids`; a model may have more of them than its tokenizer."""
    return tokenizer.decode([id for id in ids if id < tokenizer.vocab_size])


# ---- the other programs ----

MODULES = {"transformers": "transformers", "llama.cpp": "llama_cpp"}
"""The other programs, and the module by which each is known here."""


def _program(against: str | Path, folder: Path, model: Transformer, tokenizer: Tokenizer, scratch: Path) -> Program:
    if against == "transformers":
        obstacle = names.export_obstacle(model.config)
        if obstacle:
            raise ClockhandError(obstacle)
        return InTransformers(folder)
    if against == "llama.cpp":
        file = scratch / "model.gguf"
        gguf.write(model, tokenizer, file)
        return InLlamaCpp(file, "llama.cpp")
    path = Path(against)
    if not path.exists():
        raise ClockhandError(f"against = '{against}' must be {', '.join(MODULES)} or the path of an exported model")
    kind = formats.recognize(path)
    if kind == "hf":
        return InTransformers(hf.find_model_folder(path))
    if kind == "gguf":
        return InLlamaCpp(path, str(against))
    return ReadBack(path)


class InTransformers:
    """A Hugging Face folder in transformers."""

    def __init__(self, folder: Path) -> None:
        _need("transformers")
        import transformers

        self.name = "transformers"
        self.exact = True
        self.versions = {"transformers": transformers.__version__}
        transformers.utils.logging.set_verbosity_error()  # its bars and warnings are no part of the passport
        transformers.utils.logging.disable_progress_bar()
        with _opening("transformers", folder):
            self._tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()

    def encode(self, text: str) -> list[int]:
        ids = list(self._tokenizer.encode(text))
        return ids[:-1] if ids and ids[-1] == self._tokenizer.eos_token_id else ids

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> Tensor:
        return self._model(torch.tensor([ids])).logits[0].float()

    def greedy(self, ids: list[int], count: int) -> list[int]:
        # Each time the whole text again: the interface of its cache changes from version to version.
        chosen: list[int] = []
        for _ in range(count):
            chosen.append(int(self.logits(ids + chosen)[-1].argmax()))
        return chosen


class InLlamaCpp:
    """A GGUF file in llama.cpp."""

    def __init__(self, file: Path, name: str) -> None:
        _need("llama.cpp")
        import llama_cpp

        self.name = name
        # Even with f16 weights it rounds activations, so only f32 is the same arithmetic.
        self.exact = gguf.is_f32(file)
        self.versions = {"llama-cpp-python": llama_cpp.__version__}
        _silence_llama_cpp()
        with _opening("llama.cpp", file), _as_stored():
            self._llama = llama_cpp.Llama(
                str(file),
                n_ctx=LONGEST_PROMPT + GREEDY_TOKENS,
                logits_all=True,
                type_k=llama_cpp.GGML_TYPE_F32,  # its cache is f16 unless told otherwise
                type_v=llama_cpp.GGML_TYPE_F32,
                # Negative: what the file says, where this binding would put its own defaults.
                yarn_attn_factor=-1.0,
                yarn_beta_fast=-1.0,
                yarn_beta_slow=-1.0,
                n_threads=torch.get_num_threads(),
                n_threads_batch=torch.get_num_threads(),
                verbose=False,
            )

    def encode(self, text: str) -> list[int]:
        return list(self._llama.tokenize(text.encode(), add_bos=True, special=False))

    def logits(self, ids: list[int]) -> Tensor:
        self._llama.reset()
        self._llama.eval(ids)
        return torch.from_numpy(self._llama.scores[: len(ids)].copy()).float()

    def greedy(self, ids: list[int], count: int) -> list[int]:
        chosen: list[int] = []
        self._llama.reset()
        fresh = list(ids)
        for _ in range(count):
            self._llama.eval(fresh)
            fresh = [int(self._llama.scores[self._llama.n_tokens - 1].argmax())]
            chosen += fresh
        return chosen


class ReadBack:
    """A file of a format that no installed program runs, read back by ourselves. It proves the writing, no more."""

    def __init__(self, path: Path) -> None:
        found = formats.read(path)
        self.name = str(path)
        self.exact = False  # such files may be quantized
        self.versions: dict[str, str] = {}
        self._model, self._tokenizer = found.model.float(), found.tokenizer

    def encode(self, text: str) -> list[int] | None:
        return None if self._tokenizer is None else self._tokenizer.encode(text, bos=True)

    def logits(self, ids: list[int]) -> Tensor:
        return _logits(self._model, ids)

    def greedy(self, ids: list[int], count: int) -> list[int]:
        return _greedy(self._model, ids, count)[0]


@contextmanager
def _opening(program: str, path: Path) -> Iterator[None]:
    """What another program raises for a file that it cannot open, in one line; it may raise anything."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise ClockhandError(f"{program} cannot open '{path}': {reason}") from error


@functools.cache  # which keeps the callback alive: llama.cpp goes on calling it until the process ends
def _silence_llama_cpp() -> object:
    import llama_cpp

    callback = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(callback, ctypes.c_void_p(0))
    return callback


def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@contextmanager
def _as_stored() -> Iterator[None]:
    """llama.cpp leaves matrices as the file has them; its order for AMX's tiles ends in a crash with small ones."""
    import llama_cpp.llama_cpp as c

    defaults = c.llama_model_default_params

    def as_stored() -> Any:
        params = defaults()
        params.use_extra_bufts = False
        return params

    c.llama_model_default_params = as_stored
    try:
        yield
    finally:
        c.llama_model_default_params = defaults


def _need(program: str) -> None:
    if not _installed(MODULES[program]):
        raise ClockhandError(f"{program} is not installed; install it with: pip install 'clockhand[peers]'")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
