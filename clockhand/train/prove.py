"""The resume certificate: a run that is killed again and again ends in the bits of the run that was not.

    straight   0 ──────────────────────────────────────► steps     the same weights, optimizer
    killed     0 ─────✗                                            and log (without its clock)
                   ↖ checkpoint ────────✗
                                    ↖ checkpoint ──────► steps

Both are runs of the user's own configuration, each in a process of its own and in a folder of its own. The kills are
SIGKILLs from outside, at moments drawn at random: after a step was logged, some part of the time that the straight run
took for what came next, be it a step, an evaluation, a checkpoint or a sample. Nothing in the run knows of them.
"""

import hashlib
import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from clockhand.config import ModelConfig
from clockhand.data.shards import Corpus
from clockhand.errors import ClockhandError
from clockhand.train import loop
from clockhand.train.checkpoint import TENSORS_FILE
from clockhand.train.config import TrainConfig
from clockhand.train.log import CLOCKED, read_log

SECONDS_BETWEEN_LOOKS = 0.001
MOST_KILLS = 10_000


@dataclass(frozen=True)
class Kill:
    logged: int
    """The last step that was in the log; -1 before the first."""
    kept: int
    """The step of the newest checkpoint, where the next process goes on; 0 where there is none."""
    writing: bool
    """Whether something half-written was lying there."""

    def __str__(self) -> str:
        if self.logged < 0:
            return "before the first step"
        what = " while writing to the disk" if self.writing else ""
        return f"after step {self.logged}{what}, on again from {self.kept}"


@dataclass
class Certificate:
    steps: int
    hashes: dict[str, str] = field(default_factory=dict)
    """SHA-256 of what the straight run ended with."""
    kills: list[Kill] = field(default_factory=list)
    difference: str = ""
    """The first thing that the killed run has otherwise; empty when it is the same to the bit."""
    seconds: float = 0.0


def prove_resume(
    model_config: ModelConfig,
    config: TrainConfig,
    corpus: Corpus,
    kills: int,
    folder: Path,
    say: Callable[[str], None],
) -> Certificate:
    """Makes the run straight and killed up to `kills` times, both under `folder`, and compares them.

    Raises `ClockhandError` when the run itself cannot be made.
    """
    began = time.perf_counter()
    straight, killed = folder / "straight", folder / "killed"
    run = _Run(model_config, config, corpus)
    say(
        f"proving: {config.steps:,} steps straight and again with {kills} kills, each of which repeats up to "
        f"{config.save_every or config.steps:,} steps (--steps makes it shorter)"
    )
    run.to_the_end(straight)
    taken = time.perf_counter() - began
    say(f"the straight run took {taken:.0f} s; the killed one will take {taken:.0f} to {taken * (1 + kills):.0f} s")

    # What was measured for `auto` is part of the run, and another moment might measure otherwise.
    settled = json.loads((straight / "config.json").read_text(encoding="utf-8"))["train"]
    run = _Run(model_config, TrainConfig(**settled), corpus)
    certificate = Certificate(config.steps, _hashes(straight))
    times = [row["time"] for row in read_log(straight / "log.jsonl")]
    for after in sorted(random.randrange(-1, config.steps) for _ in range(kills)):
        begins, ends = times[after + 1], times[min(after + 2, config.steps)]
        if (kill := run.killed(killed, after, random.random() * (ends - begins))) is None:
            break  # it had reached the end before
        say(f"killed {kill}")
        certificate.kills.append(kill)
    run.to_the_end(killed)
    certificate.difference = first_difference(straight, killed)
    certificate.seconds = time.perf_counter() - began
    return certificate


class _Run:
    """Starts processes of one run."""

    def __init__(self, model_config: ModelConfig, config: TrainConfig, corpus: Corpus) -> None:
        self._configs = asdict(model_config), asdict(config), str(corpus.folder), torch.get_num_threads()
        # A server that has imported torch forks each of them; where there is no such thing, each imports for itself.
        server = "forkserver" in multiprocessing.get_all_start_methods()
        self._context: Any = multiprocessing.get_context("forkserver" if server else "spawn")
        if server:
            self._context.set_forkserver_preload(["clockhand.train.loop"])

    def to_the_end(self, out: Path) -> None:
        process, errors = self._start(out)
        process.join()
        if process.exitcode:
            raise ClockhandError(f"the run to be proved does not reach its end: {_reason(process, errors)}")

    def killed(self, out: Path, after: int, seconds: float) -> Kill | None:
        """Kills a process some `seconds` after it logged the step `after`; None if it had ended by then."""
        log = out / "log.jsonl"
        process, errors = self._start(out)
        while process.is_alive() and _lines(log) <= after:
            time.sleep(SECONDS_BETWEEN_LOOKS)
        process.join(seconds)
        process.kill()
        process.join()
        if process.exitcode == 0:
            return None
        if process.exitcode != -signal.SIGKILL:
            raise ClockhandError(f"the run to be proved cannot go on: {_reason(process, errors)}")
        checkpoints = [int(path.name[5:]) for path in (out / "checkpoints").glob("step-*")]
        writing = any(out.glob("**/.*unfinished-*"))
        return Kill(_lines(log) - 1, max(checkpoints, default=0), writing)

    def _start(self, out: Path) -> tuple[Any, Any]:
        ours, theirs = self._context.Pipe(duplex=False)
        process = self._context.Process(target=_train, args=(*self._configs, str(out), theirs))
        process.start()
        theirs.close()
        return process, ours


def _train(model: dict[str, Any], train: dict[str, Any], corpus: str, threads: int, out: str, errors: Any) -> None:
    torch.set_num_threads(threads)  # another number may add in another order
    if "fork" in multiprocessing.get_all_start_methods():
        # torch's compiler makes a lock, that of a progress bar. In a process begun by a server it would have a name,
        # which a kill leaves behind in the system; where people start a run it has none.
        multiprocessing.set_start_method("fork", force=True)
    try:
        loop.train(ModelConfig(**model), TrainConfig(**train), Corpus.open(corpus), Path(out))
    except ClockhandError as error:
        errors.send(str(error))
        raise SystemExit(1) from None


def _reason(process: Any, errors: Any) -> str:
    try:
        return errors.recv()
    except EOFError:  # it had no time for a last word
        return f"it ended with exit code {process.exitcode}"


def _lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


# ── what two runs have ended with ──────────────────────────────────────────────────────────────────────────────────


def _newest(out: Path) -> Path:
    return max((out / "checkpoints").glob("step-*"))


def _rows(out: Path) -> list[dict[str, Any]]:
    """The log without what a clock has measured."""
    return [{k: v for k, v in row.items() if k not in CLOCKED} for row in read_log(out / "log.jsonl")]


def _parts(out: Path) -> dict[str, Path]:
    parts = {
        "weights": out / "final" / "model.safetensors",
        "optimizer": _newest(out) / TENSORS_FILE,
        "best": out / "best" / "model.safetensors",
    }
    return {name: path for name, path in parts.items() if path.exists()}


def _hashes(out: Path) -> dict[str, str]:
    hashes = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in _parts(out).items()}
    return {**hashes, "log": hashlib.sha256(json.dumps(_rows(out)).encode()).hexdigest()}


def first_difference(straight: Path, killed: Path) -> str:
    """What of two finished runs differs first, in words: the log has the order of time, so it is read first."""
    ours, theirs = _rows(straight), _rows(killed)
    for mine, other in zip(ours, theirs):
        for key in [*mine, *(key for key in other if key not in mine)]:
            if mine.get(key) != other.get(key):
                return f"log, step {mine['step']}: {key} is {mine.get(key)!r} straight and {other.get(key)!r} killed"
    if len(ours) != len(theirs):
        return f"log: {len(ours)} lines straight and {len(theirs)} killed"
    for part, path in _parts(straight).items():
        other_path = _parts(killed).get(part)
        if other_path is None:
            return f"{part}: the killed run has none"
        mine, other = load_file(path), load_file(other_path)
        for name in mine | other:
            if name not in mine or name not in other:
                return f"{part}: {name} is in one of them only"
            if not torch.equal(mine[name], other[name]):
                where = int((mine[name] != other[name]).flatten().int().argmax())
                a, b = (float(each[name].flatten()[where]) for each in (mine, other))
                return f"{part}: {name}, value {where}, is {a!r} straight and {b!r} killed"
    return ""


def lines_of(certificate: Certificate) -> list[str]:
    """A certificate in words, for people."""
    kills = len(certificate.kills)
    made = f"{certificate.steps:,} steps, {kills} kill{'' if kills == 1 else 's'}, {certificate.seconds:.0f} s"
    verdict = "resume is not exact" if certificate.difference else "resume is exact to the bit"
    lines = [f"{verdict}: {made} (torch {torch.__version__}, {torch.get_num_threads()} threads)"]
    lines += [f"  killed     {kill}" for kill in certificate.kills]
    if certificate.difference:
        return [*lines, f"  differs    {certificate.difference}"]
    return lines + [f"  {name:<10} sha256 {digest}" for name, digest in certificate.hashes.items()]
