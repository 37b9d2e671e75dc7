"""The training loop. There is one.

    while True:
        stop if asked to
        evaluate, save, sample    if due
        leave                     after the last step
        accumulate, clip, update
        log

A run is a function of (configs, data, seed): whatever is random in step s - the windows, the dropout - is drawn from
generators seeded by (seed, s) alone. So evaluating and sampling cannot disturb training, and a run that was killed and
resumes from a checkpoint at step s goes on bit for bit as if nothing had happened.

What a step optimises is in `loss.py` and `optim.py`, what it costs in `schedule.py`, what a person sees in
`progress.py`.
"""

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from clockhand.allocator import keep_freed_memory
from clockhand.config import ModelConfig
from clockhand.data.loader import Batch, TrainWindows, ValidationWindows
from clockhand.data.shards import Corpus
from clockhand.errors import ClockhandError, as_command
from clockhand.infer.generate import generate_text, prompt_ids
from clockhand.infer.settings import Sampling
from clockhand.interop.hf import save_model
from clockhand.memory import refuse_beyond_memory
from clockhand.model.transformer import evaluating, run_block
from clockhand.train import run_folder
from clockhand.train.bad_step import clipped_by, keep_bad_step, parameter_norms
from clockhand.train.checkpoint import (
    Checkpoint,
    best_loss,
    newest_checkpoint,
    remove_old,
    restore,
    save_best,
    save_checkpoint,
)
from clockhand.train.compiled import compile_blocks, running_blocks
from clockhand.train.config import TrainConfig
from clockhand.train.determinism import deterministic
from clockhand.train.evaluate import Evaluation, evaluate
from clockhand.train.interrupt import Interrupted, stop_on_signals
from clockhand.train.log import NoLog, RunLog, read_log
from clockhand.train.loss import count_targets
from clockhand.train.optim import clip_gradients, make_optimizer, optimizer_tensors, set_learning_rate
from clockhand.train.parallel import Ranks
from clockhand.train.progress import Reporter
from clockhand.train.reckoning import Reckoning, Result
from clockhand.train.recompute import recomputing
from clockhand.train.schedule import learning_rate
from clockhand.train.settle import SETTLED, settle
from clockhand.train.spikes import History

MAX_SKIPPED_IN_A_ROW = 5
SAMPLING = Sampling(temperature=0.8)


def train(
    model_config: ModelConfig,
    train_config: TrainConfig,
    corpus: Corpus,
    out: Path,
    reporter: Reporter | None = None,
    ranks: Ranks | None = None,
    resume: str = "auto",
    timed: bool = False,
) -> Evaluation:
    """Trains a model in the run folder `out` and writes `out/final`; goes on from the newest whole checkpoint there.

    `ranks` are the processes that share the work (`parallel.joined`). `resume` "never" refuses a folder with a run
    in it, "must" one without a checkpoint. `timed` forecasts the time too, for which a long run tries some steps before
    it begins. Returns the last evaluation. Raises `Interrupted` after SIGINT or SIGTERM, with everything saved, and
    `ClockhandError` for what cannot be honoured.
    """
    try:
        trainer = Trainer(model_config, train_config, corpus, Path(out), reporter or Reporter(), ranks, resume, timed)
    except BaseException:
        run_folder.let_go(Path(out))
        raise
    return trainer.run()


class Trainer:
    """One run: what it is made of, and the steps it takes."""

    def __init__(
        self,
        model_config: ModelConfig,
        config: TrainConfig,
        corpus: Corpus,
        out: Path,
        reporter: Reporter,
        ranks: Ranks | None = None,
        resume: str = "auto",
        timed: bool = False,
    ) -> None:
        """Stands at step 0, or where the newest whole checkpoint in `out` was."""
        _refuse_misfits(model_config, config, corpus)
        self.started = time.perf_counter()
        self.ranks = ranks or Ranks()
        _refuse_rank_misfits(config, self.ranks.mode)
        self.corpus, self.out, self.resume = corpus, out, resume
        self.reporter = reporter if self.ranks.leads else Reporter()
        device = _device(config)
        if device.type == "cpu":
            refuse_beyond_memory(model_config, -(-config.batch_size // self.ranks.size), config.seq_len)
        self.windows = TrainWindows(corpus, config.batch_size, config.seq_len, config.seed)
        _refuse_more_than_an_epoch(config, self.windows.windows_per_epoch)
        opened = self.ranks.once(lambda: self._open_folder(model_config, config, device))
        self.config = config = replace(config, **opened["settled"])
        at = opened["resume"]["state"]["step"] if opened["resume"] else 0
        foretold = self.ranks.size == 1 and device.type == "cpu"
        self.reckoning = Reckoning(model_config, config, at, timed) if foretold else None
        self.held_out = ValidationWindows(corpus, config.batch_size, config.seq_len, config.eval_windows)
        self.record = self._record(model_config, config)
        self.model, self.loss_of = self.ranks.build(model_config, config.seed, config.dtype, device)
        self.run_block = compile_blocks(self.model) if config.compile == "on" else run_block
        if config.checkpoint_activations:
            self.run_block = recomputing(self.run_block)
        self.optimizer = make_optimizer(self.model, config)
        self.step = self.saved_step = 0  # updates so far, and at the newest checkpoint
        self.earlier_seconds = 0.0  # that earlier processes of this run have spent
        self.best_loss = math.inf if opened["best"] is None else opened["best"]
        if opened["resume"] is not None:
            self._go_on_from(Checkpoint(Path(opened["resume"]["folder"]), opened["resume"]["state"]))
        path = self.out / "log.jsonl"
        self.history = History(row for row in read_log(path) if row["step"] < self.step)
        self.log = RunLog(path, self.step) if self.ranks.leads else NoLog()

    def _open_folder(self, model_config: ModelConfig, config: TrainConfig, device: torch.device) -> dict[str, Any]:
        """Makes the run folder, and says what `auto` is there, which checkpoint to go on from, and the best loss."""
        run_folder.check_resume(self.out, self.resume)
        run_folder.open_run_folder(self.out)
        checkpoint = newest_checkpoint(self.out / "checkpoints", self.reporter.note)
        # A run that died before its first checkpoint has settled too, and must not come out otherwise now.
        earlier = checkpoint.state["train"] if checkpoint else run_folder.started_train(self.out)
        config = settle(config, model_config, device, self.ranks.mode, earlier, self.reporter.note)
        _refuse_rank_misfits(config, self.ranks.mode)  # again: what an earlier process has settled may not go here
        record = self._record(model_config, config)
        if checkpoint is not None:
            run_folder.refuse_changes(self.out, checkpoint.state, record)
            if checkpoint.step > config.steps:
                reached = f"the run in {self.out} has already made {checkpoint.step}"
                raise ClockhandError(f"steps = {config.steps} but {reached}")
        elif self.resume == "must":
            raise ClockhandError(f"--resume must, but no checkpoint in {self.out} is whole")
        run_folder.write_run_config(self.out, record)
        best = best_loss(self.out / "best")
        return {
            "settled": {name: getattr(config, name) for name in SETTLED},
            "resume": checkpoint and {"folder": str(checkpoint.folder), "state": checkpoint.state},
            "best": best if math.isfinite(best) else None,
        }

    def _record(self, model_config: ModelConfig, config: TrainConfig) -> dict[str, Any]:
        """What the run is, as its folder and its checkpoints say it."""
        return {
            "model": asdict(model_config),
            "train": asdict(config),
            "data": run_folder.describe_data(self.corpus),
            "threads": torch.get_num_threads(),
        }

    def _go_on_from(self, checkpoint: Checkpoint) -> None:
        restore(checkpoint, self.model, self.optimizer)
        self.step = self.saved_step = checkpoint.step
        self.earlier_seconds = checkpoint.state["seconds"]
        self.reporter.note(f"resuming {self.out} at step {self.step}")

    def run(self) -> Evaluation:
        """Takes all steps that are left."""
        config = self.config
        keep_freed_memory()
        with self._reporting(), deterministic(config.deterministic), stop_on_signals() as request:
            while True:
                if signum := self.ranks.max(request.signum or 0):
                    self.save()
                    self.reporter.note(f"saved at step {self.step}")
                    self._report_forecast(finished=False)
                    raise Interrupted(signum)

                row: dict[str, Any] = {"step": self.step, "time": round(self.seconds, 3)}
                if self.is_due(config.eval_every):
                    evaluation = self._timing(self.evaluate)
                    row |= {"val/loss": evaluation.loss, "val/bpb": evaluation.bits_per_byte}
                    self.save_if_best(evaluation.loss)
                if self.is_due(config.save_every):
                    self.save()
                if config.sample_every and self.is_due(config.sample_every):
                    row["sample"] = self.sample()

                finished = self.step == config.steps
                if not finished:
                    row |= self._timing(self.update)
                self.log.write(row)
                self.reporter.row(row)
                if finished:
                    break
                self.step += 1
            whole = self.ranks.whole(self.model)
            if self.ranks.leads and whole is not None:
                save_model(whole, self.out / "final", self.corpus.tokenizer)
            self._report_forecast(finished=True)
            return evaluation

    def _timing(self, work: Callable[[], Result]) -> Result:
        return self.reckoning.timing(work) if self.reckoning else work()

    def _report_forecast(self, finished: bool) -> None:
        """The forecast of `clockhand plan` beside what happened, where that can be known."""
        for line in self.reckoning.lines(self.step, finished) if self.reckoning else ():
            self.reporter.note(line)

    def is_due(self, every: int) -> bool:
        """Something is due at multiples of `every`, if that is not 0, and at the end."""
        return self.step == self.config.steps or (every > 0 and self.step % every == 0)

    @property
    def seconds(self) -> float:
        return self.earlier_seconds + time.perf_counter() - self.started

    def update(self) -> dict[str, Any]:
        """One step of the optimizer, on the mean over all targets of all micro-batches. Returns its part of the row."""
        config, started = self.config, time.perf_counter()
        first = self.step * config.accumulate
        batches = [self.windows.batch(first + micro) for micro in range(config.accumulate)]
        targets = sum(count_targets(batch.targets) for batch in batches)
        rate = learning_rate(self.step, config)
        set_learning_rate(self.optimizer, rate)
        torch.manual_seed(step_seed(config.seed, self.step, self.ranks.rank))

        loss = balance_loss = 0.0
        for micro, batch in enumerate(batches, 1):
            mine = self.ranks.share(batch)
            share = count_targets(mine.targets) / max(targets, 1)  # of these rows in the step
            now = micro == config.accumulate
            with self.ranks.synchronising(self.loss_of, now), running_blocks(self.model, self.run_block):
                total, balance = self.loss_of(mine)
                # Wrapped for several ranks, gradients come out as their mean over the ranks; what is meant is the sum.
                (self.ranks.size * (total / max(targets, 1) + share * balance)).backward()
            loss += total.item() / max(targets, 1)
            balance_loss += share * balance.item()
        loss, balance_loss = self.ranks.sum(loss, balance_loss)
        norm = clip_gradients(self.model.parameters(), config.clip_norm)
        trouble = self.history.trouble(loss, norm)
        skipped = bool(trouble) and (config.skip_spikes or not (math.isfinite(loss) and math.isfinite(norm)))
        if trouble:
            self._report(trouble, skipped, batches, loss, norm)
        if targets and not skipped:  # with gradients of 0, AdamW would still decay the weights and follow its momentum
            self.optimizer.step()
        self.optimizer.zero_grad()

        row: dict[str, Any] = {
            "step": self.step,
            "train/loss": loss,
            "train/lr": rate,
            "train/grad_norm": norm,
            "train/tokens": (self.step + 1) * config.tokens_per_step,
            "train/tok_per_s": round(config.tokens_per_step / (time.perf_counter() - started), 1),
        }
        if self.model.config.is_moe:
            row["train/balance_loss"] = balance_loss
        if trouble:
            row |= {"train/trouble": trouble, "train/skipped": skipped}
        self.history.add(row)
        self._stop_if_hopeless()
        return row

    def _report(self, trouble: str, skipped: bool, batches: list[Batch], loss: float, norm: float) -> None:
        """Says what is wrong with this step and, of a stretch of such steps, keeps the first to be run again."""
        fate = "this step is not applied" if skipped else "this step is applied all the same"
        kept = ""
        if self.config.keep_bad_steps and self.history.is_first(self.step):
            record = {
                "step": self.step,
                "step_seed": step_seed(self.config.seed, self.step),
                "dtype": self.config.dtype,
                "compile": self.config.compile,
                "ranks": self.ranks.size,
                "trouble": trouble,
                "skipped": skipped,
                "finite": math.isfinite(loss) and math.isfinite(norm),
                "loss": loss,
                "norm": norm,
                "clip_norm": self.config.clip_norm,
                "parameters": parameter_norms(self.model, self.optimizer, clipped_by(norm, self.config.clip_norm)),
            }
            whole = self.ranks.whole(self.model)
            if self.ranks.leads and whole is not None:
                try:
                    file = keep_bad_step(self.out, whole, batches, record, self.config.keep_bad_steps)
                    kept = f"; look at it: {as_command('clockhand', 'train', '--replay', file)}"
                except ClockhandError as error:  # no reason to stop what may still be saved
                    kept = f"; {error}"
        self.reporter.note(f"step {self.step}: {trouble}: {fate}{kept}")

    def _stop_if_hopeless(self) -> None:
        if self.history.skipped_in_a_row == MAX_SKIPPED_IN_A_ROW:
            rate = self.config.learning_rate
            raise ClockhandError(
                f"no step applied from {self.step - MAX_SKIPPED_IN_A_ROW + 1} to {self.step}: loss or gradient not "
                f"finite{' or a spike' if self.config.skip_spikes else ''}; learning_rate = {rate} may be too high"
            )

    def evaluate(self) -> Evaluation:
        token_bytes = self.corpus.tokenizer.token_bytes
        return evaluate(self.model, self.held_out, token_bytes, self.config.dtype, self._nats)

    def _nats(self, batch: Batch) -> float:
        total, _ = self.loss_of(self.ranks.share(batch))
        return self.ranks.sum(total.item())[0]

    def sample(self) -> str:
        """The prompt and the model's continuation of it, at every step with the same luck; nothing but on rank 0."""
        tokenizer, config = self.corpus.tokenizer, self.config
        model = self.ranks.whole(self.model)
        if model is None or not self.ranks.leads:
            return ""
        # An empty text begins from bos, which not every foreign tokenizer has, or puts before the texts of a corpus.
        prompt = config.sample_prompt or ("" if tokenizer.puts_bos else "\n")
        with evaluating(model):
            completion = generate_text(
                model, tokenizer, prompt, SAMPLING, max_new_tokens=config.sample_tokens, seed=config.seed, plain=True
            )
        return prompt + completion.text

    def save(self) -> None:
        """Writes a checkpoint of this step, unless there is one (or nothing worth one)."""
        if self.step == self.saved_step:
            return
        self.log.sync()  # a checkpoint must not be newer than the log it continues
        root = self.out / "checkpoints"
        state = {"step": self.step, "seconds": self.seconds, **self.record}
        memory, whole = optimizer_tensors(self.model, self.optimizer), self.ranks.whole(self.model)
        if self.ranks.leads and whole is not None:
            save_checkpoint(root, whole, memory, self.corpus.tokenizer, state)
            remove_old(root, self.config.keep_last, self.step, self.reporter.note)
        self.saved_step = self.step

    def save_if_best(self, loss: float) -> None:
        """Writes `best/` if these weights are better than those there. Before the first step none are worth keeping."""
        if not self.config.keep_best or self.step == 0 or not loss < self.best_loss:
            return
        self.best_loss = loss
        whole = self.ranks.whole(self.model)
        if self.ranks.leads and whole is not None:
            state = {"step": self.step, "seconds": self.seconds, "val_loss": loss, **self.record}
            save_best(self.out / "best", whole, self.corpus.tokenizer, state)

    @contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            self.reporter.start(self.step, self.config.steps)
            yield
        finally:
            self.reporter.stop()
            self.log.close()
            run_folder.let_go(self.out)


def step_seed(seed: int, step: int, rank: int = 0) -> int:
    """The seed of torch's generator within one step: the numbers mixed into one of 32 bits. Ranks drop out apart."""
    return int(np.random.SeedSequence((seed, step, rank) if rank else (seed, step)).generate_state(1)[0])


def _device(config: TrainConfig) -> torch.device:
    found = torch.cuda.is_available()
    if config.device == "cuda" and not found:
        raise ClockhandError("device = 'cuda' but torch finds none here; use auto or cpu")
    if not found or config.device == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    return device


def _refuse_rank_misfits(config: TrainConfig, mode: str) -> None:
    if mode == "fsdp" and config.compile == "on":
        raise ClockhandError("compile = 'on' is not possible with parallel = 'fsdp', whose blocks borrow their weights")
    if mode == "fsdp" and config.optimizer == "muon":
        raise ClockhandError(
            "optimizer = 'muon' needs whole matrices, which parallel = 'fsdp' slices; use adamw or ddp"
        )


def _refuse_misfits(model_config: ModelConfig, config: TrainConfig, corpus: Corpus) -> None:
    if config.seq_len > model_config.max_seq_len:
        raise ClockhandError(f"seq_len = {config.seq_len} must be at most max_seq_len = {model_config.max_seq_len}")
    length, most = len(prompt_ids(corpus.tokenizer, config.sample_prompt)), model_config.max_seq_len
    if config.sample_every and length > most:
        raise ClockhandError(f"sample_prompt is of {length} tokens, and must be of at most max_seq_len = {most}")
    ids = corpus.tokenizer.vocab_size
    if model_config.vocab_size < ids:
        raise ClockhandError(
            f"vocab_size = {model_config.vocab_size} must be at least {ids}, the size of the corpus's tokenizer"
        )


def _refuse_more_than_an_epoch(config: TrainConfig, windows: int) -> None:
    """A step that reads a window twice knows nothing more for it, and might not end in days."""
    most = -(-windows // config.batch_size)
    if config.accumulate > most:
        raise ClockhandError(
            f"accumulate = {config.accumulate} must be at most {most}: with that many micro-batches of batch_size = "
            f"{config.batch_size}, a step reads each of the corpus's {windows:,} windows of seq_len = {config.seq_len}"
        )
