"""A step that went wrong, kept so that it can be run again: `clockhand train --replay FILE`.

    bad-steps/step-00000123.safetensors
      weights/NAME           the model before the step
      batch/N/ids ...        what it was given, each micro-batch
      metadata "record"      step, seed of its randomness, config, what was wrong, and of every parameter the norm of
                             the weight, of the gradient, and of the gradient it usually has

One file that needs nothing beside it: checkpoints move on and corpora move away. The usual gradient is what AdamW
remembers, the root of its mean square.

The replay runs the plain model, layer by layer, and names the first activation or gradient that is no number; where all
are numbers, the layer whose gradient is the furthest above its usual one. What counts as wrong is in `spikes.py`.
"""

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from clockhand.config import ModelConfig, from_dict
from clockhand.data.loader import Batch
from clockhand.disk import new_file
from clockhand.errors import ClockhandError
from clockhand.model.transformer import Transformer
from clockhand.train.loss import batch_loss, count_targets
from clockhand.train.optim import Optimizer
from clockhand.train.parallel import gathered

FOLDER = "bad-steps"


# ── keeping ────────────────────────────────────────────────────────────────────────────────────────────────────────


def parameter_norms(
    model: nn.Module, optimizer: Optimizer, clipped_by: float = 1.0
) -> dict[str, dict[str, float | None]]:
    """Of every parameter: norm of the weight, the gradient and the usual gradient. All ranks must ask together.

    The gradient is what it was before all gradients were multiplied by `clipped_by`.
    """
    return {
        name: {
            "weight": _norm(parameter),
            "gradient": None if parameter.grad is None else _norm(parameter.grad) / clipped_by,
            "usual_gradient": _usual_gradient(optimizer, parameter),
        }
        for name, parameter in model.named_parameters()
    }


def clipped_by(norm: float, clip_norm: float) -> float:
    """What `clip_gradients` has multiplied gradients of that `norm` by: torch adds 1e-6, so that 0 divides too."""
    return min(clip_norm / (norm + 1e-6), 1.0) if clip_norm > 0 and math.isfinite(norm) else 1.0


def _norm(tensor: Tensor) -> float:
    return float(gathered(torch.linalg.vector_norm(tensor.detach(), dtype=torch.float32)))


def _usual_gradient(optimizer: Optimizer, parameter: Tensor) -> float | None:
    memory = optimizer.state.get(parameter, {})
    if "exp_avg_sq" not in memory or not float(memory["step"]):
        return None  # the first step, or an optimizer that keeps no squares
    beta2 = next(
        group["betas"][1] for group in optimizer.param_groups if any(each is parameter for each in group["params"])
    )
    squares = float(gathered(memory["exp_avg_sq"].sum()))
    return math.sqrt(squares / (1 - beta2 ** float(memory["step"])))


def keep_bad_step(out: Path, model: Transformer, batches: list[Batch], record: Mapping[str, Any], keep: int) -> Path:
    """Writes the file of the step that `record` tells of under the run folder `out`, where the last `keep` stay.

    `model` has whole weights. Raises `ClockhandError` when the disk refuses.
    """
    root = out / FOLDER
    tensors = {f"weights/{name}": each.detach().cpu().contiguous() for name, each in model.named_parameters()}
    for number, batch in enumerate(batches):
        parts = {"ids": batch.ids, "targets": batch.targets, "documents": batch.documents}
        tensors |= {f"batch/{number}/{name}": part.clone() for name, part in parts.items() if part is not None}
    path = root / f"step-{record['step']:08d}.safetensors"
    content = {**record, "model": asdict(model.config), "micro_batches": len(batches)}
    with new_file(path) as unfinished:
        save_file(tensors, unfinished, {"record": json.dumps(_without_nan(content))})
    # A later one is from before the run went back to a checkpoint: it will come again, or is worth keeping if not.
    kept = sorted(file for file in root.glob("step-*.safetensors") if file.name <= path.name)
    for file in kept[:-keep]:
        try:
            file.unlink()
        except OSError as error:
            raise ClockhandError(f"kept as {path}, but {file} cannot be removed: {error.strerror}") from error
    return path


def _without_nan(value: Any) -> Any:
    """JSON has no NaN and no infinity: their names stand for them."""
    if isinstance(value, Mapping):
        return {key: _without_nan(each) for key, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


# ── running it again ───────────────────────────────────────────────────────────────────────────────────────────────


@dataclass
class Layer:
    """What one module did in the step."""

    name: str
    largest: float = 0.0
    """The largest absolute value it put out; not finite if any was not."""
    gradient: float | None = None
    """Norm of the gradient of its own parameters and its parts'; None if it has none."""
    usual_gradient: float | None = None


@dataclass
class Replay:
    record: dict[str, Any]
    loss: float = 0.0
    norm: float = 0.0
    layers: list[Layer] = field(default_factory=list)
    first: str = ""
    """The first layer that went wrong; empty if the step is now as good as any."""
    how: str = ""
    """What went wrong there, in words."""


def replay(file: Path) -> Replay:
    """Runs the step of `file` again, forward and backward. Raises `ClockhandError` for a file that is none of ours."""
    record, model, batches = open_bad_step(file)
    found = Replay(record)
    watch = _Watch(model)
    model.train()
    torch.manual_seed(record["step_seed"])
    targets = max(sum(count_targets(batch.targets) for batch in batches), 1)
    with watch:
        for batch in batches:
            summed, balance = batch_loss(model, batch, record["dtype"])
            watch.loss_is(summed.total)
            (summed.total / targets + summed.count / targets * balance).backward()
            found.loss += summed.total.item() / targets
    found.norm = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    found.layers = list(_layers(model, watch, record["parameters"]))
    found.first, found.how = watch.wrong or _wrong_gradient(model, record["parameters"], found)
    return found


def lines_of(found: Replay) -> Iterator[str]:
    """A replay in words, for people."""
    record = found.record
    yield f"step {record['step']}: {record['trouble']}; it was {'not applied' if record['skipped'] else 'applied'}"
    yield f"then   loss {_number(record['loss'])}  gradient norm {_number(record['norm'])}"
    yield f"again  loss {_number(found.loss)}  gradient norm {_number(found.norm)}"
    if record["ranks"] > 1 and record["model"]["dropout"] > 0:
        yield f"       (it ran on {record['ranks']} ranks, each with dropout of its own; here all rows have one)"
    if record.get("compile") == "on" and record["model"]["dropout"] > 0:
        yield "       (it was compiled, with dropout from a generator of the compiler's own; here it is another)"
    yield f"first  {found.first}: {found.how}" if found.first else "first  nowhere: run again, all of it is finite"
    yield ""
    yield f"{'layer':<22} {'largest output':>16} {'gradient':>12} {'usually':>12}"
    for layer in found.layers:
        numbers = f"{_number(layer.largest):>16} {_number(layer.gradient):>12} {_number(layer.usual_gradient):>12}"
        yield f"{layer.name:<22} {numbers}"


def _number(value: Any) -> str:
    return "-" if value is None else f"{float(value):.4g}"


def open_bad_step(file: Path) -> tuple[dict[str, Any], Transformer, list[Batch]]:
    """The record, the model before the step and its micro-batches."""
    if file.is_dir():
        raise ClockhandError(f"'{file}' is a folder: give a file of a run folder's {FOLDER}/")
    try:
        with safe_open(file, "pt") as stored:
            tensors = dict(zip(names := list(stored.keys()), map(stored.get_tensor, names)))
            record = json.loads((stored.metadata() or {})["record"])
        model = Transformer(from_dict(ModelConfig, record["model"], str(file)))
        for name, parameter in model.named_parameters():
            parameter.data.copy_(tensors[f"weights/{name}"])
        batches = [
            Batch(tensors[f"batch/{n}/ids"], tensors[f"batch/{n}/targets"], tensors.get(f"batch/{n}/documents"))
            for n in range(record["micro_batches"])
        ]
        if not _is_whole(record, model, batches):
            raise ValueError
    except OSError as error:
        reason = error.strerror or ("no such file" if not file.exists() else error)  # safetensors' own has the path too
        raise ClockhandError(f"cannot read '{file}': {reason}") from None
    except (SafetensorError, LookupError, ValueError, TypeError, AttributeError, RuntimeError):
        raise ClockhandError(f"'{file}' is no bad step: give a file of a run folder's {FOLDER}/") from None
    return record, model, batches


def _is_whole(record: dict[str, Any], model: Transformer, batches: list[Batch]) -> bool:
    """Whether a replay finds all that it needs, of the right kind. What is missing raises as well."""
    usual = (record["parameters"][name]["usual_gradient"] for name, _ in model.named_parameters())
    for value in (record["loss"], record["norm"], *usual):
        float(value or 0)
    return (
        {"step", "trouble", "skipped", "finite"} <= record.keys()
        and record["dtype"] in ("float32", "bfloat16")
        and type(record["step_seed"]) is int
        and 0 <= record["step_seed"] < 2**63
        and type(record["ranks"]) is int
        and bool(batches)
        and all(batch.ids.shape == batch.targets.shape for batch in batches)
        and all(batch.ids.dtype == batch.targets.dtype == torch.int64 for batch in batches)
        and all(int(batch.ids.min()) >= 0 for batch in batches)
        and all(max(int(batch.ids.max()), int(batch.targets.max())) < model.config.vocab_size for batch in batches)
    )


class _Watch(contextlib.AbstractContextManager["_Watch"]):
    """Looks at what every module puts out and at the gradient that comes back to it, until something is no number."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.largest: dict[str, float] = {}
        self.wrong: tuple[str, str] | None = None
        self._hooks: list[Any] = []
        self._below = "the loss"  # the module whose gradient was seen last, and was fine

    def __enter__(self) -> "_Watch":
        for name, module in self.model.named_modules():
            if name:
                self._hooks.append(module.register_forward_hook(self._forward(name)))
        return self

    def __exit__(self, *_: object) -> None:
        for hook in self._hooks:
            hook.remove()

    def loss_is(self, loss: Tensor) -> None:
        if not torch.isfinite(loss):
            self._found("loss", f"forward: its value is {loss.item()}, while all activations are numbers")
        self._below = "the loss"

    def _found(self, name: str, how: str) -> None:
        self.wrong = self.wrong or (name, how)

    def _forward(self, name: str) -> Any:
        def look(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            tensors = [each for each in (output if isinstance(output, tuple) else (output,)) if _is_float(each)]
            for tensor in tensors:
                largest = float(tensor.detach().abs().max())  # NaN if any is
                self.largest[name] = max(self.largest.get(name, 0.0), largest) if math.isfinite(largest) else largest
                if not math.isfinite(largest):
                    given = [each for each in inputs if _is_float(each)]
                    if all(bool(torch.isfinite(each).all()) for each in given):
                        self._found(name, f"forward: it puts out {largest}{_of_its_weights(module)}")
                    else:
                        self._found(name, "forward: what it is given is no number, though every layer before is fine")
                if tensor.requires_grad:
                    tensor.register_hook(self._backward(name))

        return look

    def _backward(self, name: str) -> Any:
        def look(gradient: Tensor) -> None:
            if not bool(torch.isfinite(gradient).all()):
                self._found(name, f"backward: the gradient that reaches its output from {self._below} is no number")
            self._below = name

        return look


def _of_its_weights(module: nn.Module) -> str:
    bad = {name: int((~torch.isfinite(p)).sum()) for name, p in module.named_parameters(recurse=False)}
    return "".join(f"; its {name} holds {count} values that are no number" for name, count in bad.items() if count)


def _is_float(value: Any) -> bool:
    """Whether there is a number to look at: an expert without tokens puts out an empty tensor."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.numel() > 0


def _layers(model: Transformer, watch: _Watch, parameters: Mapping[str, Any]) -> Iterator[Layer]:
    """The embedding, both parts of every block, and the head, in the order of the forward pass."""
    parts = [f"blocks.{n}.{part}" for n in range(model.config.n_layers) for part in ("attention", "mlp")]
    for name in ("token_embedding", *parts, "final_norm", "lm_head"):
        own = [key for key, _ in model.named_parameters() if key.startswith(name + ".")]
        norms = [_norm(grad) for key in own if (grad := model.get_parameter(key).grad) is not None]
        usual = [parameters[key]["usual_gradient"] for key in own]
        yield Layer(
            name,
            watch.largest.get(name, 0.0),
            math.hypot(*norms) if norms else None,
            math.hypot(*map(float, usual)) if usual and None not in usual else None,
        )


def _wrong_gradient(model: Transformer, parameters: Mapping[str, Any], found: Replay) -> tuple[str, str]:
    """The last parameter of the forward pass whose gradient is no number, or the one furthest above its usual."""
    norms = {name: _norm(p.grad) for name, p in model.named_parameters() if p.grad is not None}
    for name in reversed(norms):
        if not math.isfinite(norms[name]):
            return name, f"backward: the norm of its gradient is {norms[name]}, while all activations are numbers"
    if not math.isfinite(found.norm):
        name = max(norms, key=lambda each: norms[each])
        return name, f"backward: all gradients are numbers but their norm together is {found.norm}; it has the largest"
    usual = {name: float(parameters[name]["usual_gradient"] or 0) for name in norms}
    ratios = {name: norms[name] / usual[name] for name in norms if usual[name] > 0}
    if found.record["finite"] and ratios:
        name = max(ratios, key=lambda each: ratios[each])
        return name, f"its gradient is {ratios[name]:.3g} times its usual one, more than that of any other"
    return "", ""
