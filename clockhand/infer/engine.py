"""Many streams at once: requests join and leave between steps, and no stream's tokens depend on the others.

A step reads downward: schedule, run, sample, hand back. Who runs is decided in `scheduler.py`, the model is run by a
`Runner`, and a token is drawn by `sampling.py`, each request with its own settings and its own seed. Ids come in and
ids go out; text is left to others.

    engine = Engine(model, slots=8)
    number = engine.submit(Request(ids=[1, 2, 3], max_new_tokens=20))
    while not engine.idle:
        for event in engine.step():
            print(event.request, event.id, event.finish_reason)

Memory is forecast and taken when the engine is made: `slots` texts of `max_seq_len` tokens each. A request that would
need more is refused when it is submitted, and so is one that finds the queue full; once admitted it is never short.

Threads: `submit` and `cancel` may be called from any thread, at any time; `step` from one thread at a time, and a
second one is refused. There is nothing to close: an engine that nobody holds is gone, with its memory.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from clockhand.errors import ClockhandError
from clockhand.infer.kernels.library import library
from clockhand.infer.kernels.runner import StepRunner, step_runner
from clockhand.infer.kernels.weights import fingerprint, packed_for, step_precision, versions
from clockhand.infer.logprobs import TokenLogprob, token_logprobs
from clockhand.infer.routes import route_of
from clockhand.infer.runner import ReferenceRunner, Runner
from clockhand.infer.sampling import best, next_token_probabilities, sample
from clockhand.infer.scheduler import Request, Running, Scheduler
from clockhand.infer.settings import Sampling
from clockhand.model.packed import packed
from clockhand.model.transformer import Transformer

__all__ = ["Engine", "Event", "Request", "engine_for"]

ROWS = 32
"""Texts that an engine of `engine_for` continues at a time."""
MEMORY = 2**31
"""Bytes of keys and values that it takes at most, unless a single text needs more."""
CHUNK = 512
"""Ids of prompts that it reads in one step."""


@dataclass(frozen=True)
class Event:
    """What one step adds to one request."""

    request: int
    """The number that `submit` gave."""
    id: int | None
    """The id drawn. None where the request ended without one, by an error."""
    finish_reason: str | None
    """None while it runs on; in its last event stop: it drew an end token; length: it has max_new_tokens; error."""
    error: str | None = None
    """What was wrong, where the reason is error."""
    logprob: TokenLogprob | None = None
    """Where the request asked for logprobs, and an id was drawn."""


MakeRunner = Callable[[Transformer, int, int, int], Runner]
"""Of a model, slots, tokens a slot and the most ids of a row."""
_Draw = tuple[int, Running, torch.Generator]
"""The row of logits of a request, itself, and where its random numbers come from."""


class Engine:
    """Continuous batching. See the top of the file."""

    def __init__(
        self,
        model: Transformer,
        *,
        slots: int = 8,
        max_seq_len: int | None = None,
        prefill_chunk: int = 256,
        queue_limit: int = 1024,
        memory_limit: int | None = None,
        known_ids: int | None = None,
        precision: str | None = None,
        make_runner: MakeRunner | None = None,
    ) -> None:
        """Takes the memory for `slots` texts of up to `max_seq_len` tokens (the model's), prompt and continuation.

        `prefill_chunk` is the most ids of prompts that are read in one step; `queue_limit` the most requests that may
        wait; `memory_limit` the most bytes of keys and values and of weights beside the model's own, beyond which no
        engine is made. Ids from `known_ids` on (the tokenizer's vocab_size) are never drawn. `precision` is what the
        matrices are kept in, fp32, bf16, int8 or int4 (default: as they are); tokens are then those of
        `packed(model, precision)`. The model is put into evaluation mode. `make_runner` puts a runner of one's own in
        the place of the one that `routes.py` chooses.

        Weights that were changed are seen by the next request: it is refused while others run, else it begins anew.

        Raises `ClockhandError` for numbers that make no engine, one beyond `memory_limit`, or a precision that the
        model cannot have.
        """
        config = model.config
        max_seq_len = config.max_seq_len if max_seq_len is None else max_seq_len
        known_ids = config.vocab_size if known_ids is None else known_ids
        sizes = dict(slots=slots, max_seq_len=max_seq_len, prefill_chunk=prefill_chunk, queue_limit=queue_limit)
        for name, value in (sizes | dict(known_ids=known_ids)).items():
            if type(value) is not int or value < 1:
                raise ClockhandError(f"{name} = {value!r} must be a whole number, at least 1, in an engine")
        if max_seq_len > config.max_seq_len:
            raise ClockhandError(f"max_seq_len = {max_seq_len} must be at most the model's {config.max_seq_len}")
        if known_ids > config.vocab_size:
            raise ClockhandError(f"known_ids = {known_ids} must be at most the model's vocab_size {config.vocab_size}")
        self.max_seq_len = max_seq_len
        self._given, self._precision, self._make_runner = model, precision, make_runner
        self._sizes = slots, prefill_chunk, queue_limit, memory_limit
        self._vocab_size = config.vocab_size
        self._known_ids = known_ids
        self._prepare()
        self._generators: dict[int, torch.Generator] = {}  # of every request that waits or runs
        self._submitted = 0
        self._lock = threading.Lock()
        self._stepping = threading.Lock()

    def _prepare(self) -> None:
        """Makes the runner and its memory for the weights as they are now."""
        slots, prefill_chunk, queue_limit, memory_limit = self._sizes
        self._weights = fingerprint(self._given)
        model = self._given if self._precision is None else packed(self._given, self._precision)
        by_step = self._make_runner is None and route_of(model).name == "step"
        if by_step:
            self.slot_bytes = StepRunner.slot_bytes(
                model.config, step_precision(model), self.max_seq_len, min(prefill_chunk, self.max_seq_len)
            )
        else:
            self.slot_bytes = ReferenceRunner.slot_bytes(model, self.max_seq_len, prefill_chunk)
        """Bytes of keys and values that a slot takes."""
        self.weight_bytes = packed_for(model, library()).nbytes if by_step else 0
        """Bytes of weights in the order of the step, beside those of the model; all its engines share them."""
        if memory_limit is not None and slots * self.slot_bytes + self.weight_bytes > memory_limit:
            beside = f" and {self.weight_bytes:,} of ordered weights" if self.weight_bytes else ""
            raise ClockhandError(
                f"slots = {slots} need {slots} × {self.slot_bytes:,} bytes of keys and values{beside}, more than "
                f"memory_limit = {memory_limit:,}, which has room for "
                f"{max(0, memory_limit - self.weight_bytes) // self.slot_bytes}"
            )
        make = self._make_runner or (step_runner if by_step else ReferenceRunner)
        self._runner = make(model, slots, self.max_seq_len, prefill_chunk)
        model.eval()
        self._given.eval()
        self._scheduler = Scheduler(slots, prefill_chunk, queue_limit, self._runner.shares)

    def _see_weights(self) -> None:
        """Begins anew where the weights have changed. Raises `ClockhandError` while requests are on their way."""
        if not self.idle:
            if versions(self._given) != self._weights[0]:
                raise ClockhandError(
                    "the model's weights have changed while requests run: submit when the engine is idle"
                )
        elif fingerprint(self._given) != self._weights:
            self._prepare()

    @property
    def kv_bytes(self) -> int:
        """Bytes of keys and values taken, for all slots; the same for as long as the engine lives."""
        return self._runner.nbytes

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return self._scheduler.idle

    @property
    def free_slots(self) -> int:
        return self._scheduler.free_slots

    @property
    def waiting(self) -> int:
        """Requests in the queue."""
        return self._scheduler.waiting

    @property
    def computed_tokens(self) -> int:
        """Tokens that the model was run on so far."""
        return self._scheduler.computed_tokens

    @property
    def reused_tokens(self) -> int:
        """Tokens of prompts that the model was not run on, because another text had begun alike."""
        return self._scheduler.reused_tokens

    def submit(self, request: Request) -> int:
        """Lines up a request; returns its number, by which events name it.

        Raises `ClockhandError`, and nothing has happened, for a parameter that cannot be honoured, a request longer
        than the memory planned for, or a full queue.
        """
        self._check(request)
        running = Running(number=0, request=request, ids=list(request.ids))
        generator = torch.Generator().manual_seed(request.seed)
        with self._lock:
            self._see_weights()
            running.number = self._submitted
            self._scheduler.submit(running)
            self._submitted += 1
            self._generators[running.number] = generator
            return running.number

    def cancel(self, number: int) -> bool:
        """Ends a request without another event, and frees its slot at once. False if it had ended already."""
        with self._lock:
            return self._end(number)

    def step(self) -> list[Event]:
        """One token for every request that draws, a chunk for those whose prompts are being read; what came of it.

        An exception of the runner ends the requests that this step ran, and leaves the others as they are. Raises
        `ClockhandError`, and nothing has happened, while another thread is in here.
        """
        if not self._stepping.acquire(blocking=False):
            raise ClockhandError("another thread is in step(); an engine is stepped by one thread at a time")
        try:
            return self._step()
        finally:
            self._stepping.release()

    def _step(self) -> list[Event]:
        with self._lock:
            plan = self._scheduler.plan()
            draws = [
                (index, running, self._generators[running.number])
                for index, running in enumerate(plan.drawing)
                if running is not None
            ]
        try:
            for opening in plan.openings:
                self._runner.open(*opening)
            logits = self._runner.run(plan.rows) if plan.rows else torch.empty(0, self._vocab_size)  # (rows, V)
            asked = {n: logits[n].clone() for n, running, _ in draws if running.request.logprobs is not None}
            drawn = self._draw(logits, draws)
        except BaseException:
            with self._lock:
                for row in plan.rows:
                    self._discard(row.slot)
            raise
        events = []
        with self._lock:
            for (index, running, _), outcome in zip(draws, drawn):
                ended = running.number not in self._generators  # cancelled while the model ran
                if isinstance(outcome, str):
                    self._discard(plan.rows[index].slot)
                if not ended:
                    events.append(self._hand_back(running, outcome, asked.get(index)))
        return events

    def _draw(self, logits: Tensor, draws: Sequence[_Draw]) -> list[int | str]:
        """For each an id, or what is wrong with its logits. Those with settings of one kind are drawn together."""
        logits[:, self._known_ids :] = -torch.inf  # a vocabulary may be padded with ids that stand for nothing
        alike: dict[tuple, list[_Draw]] = {}
        for draw in draws:
            index, running, _ = draw
            request = running.request
            if len(running.ids) - len(request.ids) < request.min_new_tokens:
                logits[index, list(request.stop_ids)] = -torch.inf
            alike.setdefault(request.sampling.kind, []).append(draw)
        outcomes: dict[int, int | str] = {}
        for group in alike.values():
            outcomes |= zip((index for index, _, _ in group), _draw_alike(logits, group))
        return [outcomes[index] for index, _, _ in draws]

    def _hand_back(self, running: Running, outcome: int | str, model_logits: Tensor | None) -> Event:
        """Takes in the id drawn, or the error, and settles whether it was the last.

        `model_logits` (V,) are those before any stage, where logprobs were asked for.
        """
        request, reason = running.request, None
        if isinstance(outcome, str):
            self._end(running.number)
            return Event(running.number, None, "error", outcome)
        running.ids.append(outcome)
        if outcome in request.stop_ids:
            reason = "stop"
        elif len(running.ids) == running.reach:
            reason = "length"
        if reason is not None:
            self._end(running.number)
        logprob = None
        if model_logits is not None:
            (logprob,) = token_logprobs(model_logits[None], [outcome], request.logprobs or 0, self._known_ids)
        return Event(running.number, outcome, reason, logprob=logprob)

    def _end(self, number: int) -> bool:
        self._scheduler.remove(number)
        return self._generators.pop(number, None) is not None

    def _discard(self, slot: int) -> None:
        """Ends whoever is in this slot, and lets nobody inherit what its cache holds."""
        running = self._scheduler.discard(slot)
        if running is not None:
            self._generators.pop(running.number, None)
        self._runner.wipe(slot)

    def _check(self, request: Request) -> None:
        if not isinstance(request, Request):
            raise ClockhandError(f"request = {request!r} must be of type Request")
        if not request.ids:
            raise ClockhandError("ids = [] must have at least 1 id to continue")
        for name, ids in (("ids", request.ids), ("stop_ids", request.stop_ids)):
            for id in ids:
                if type(id) is not int or not 0 <= id < self._vocab_size:
                    allowed = f"the vocabulary of {self._vocab_size} ids (0 to {self._vocab_size - 1})"
                    raise ClockhandError(f"{name} has {id!r}, which is outside {allowed}")
        if type(request.sampling) is not Sampling:
            raise ClockhandError(f"sampling = {request.sampling!r} must be of type Sampling")
        for id, _ in request.sampling.logit_bias:
            if id >= self._known_ids:
                raise ClockhandError(f"logit_bias of id {id} is outside the vocabulary of {self._known_ids} ids")
        for name, low, high in (
            ("max_new_tokens", 1, 2**63 - 1),
            ("min_new_tokens", 0, request.max_new_tokens),
            ("seed", 0, 2**64 - 1),
        ):
            value = getattr(request, name)
            if type(value) is not int or not low <= value <= high:
                raise ClockhandError(f"{name} = {value!r} must be a whole number between {low} and {high}")
        told = request.logprobs
        if told is not None and (type(told) is not int or not 0 <= told <= self._known_ids):
            raise ClockhandError(
                f"logprobs = {told!r} must be a whole number from 0 to the {self._known_ids} ids there are"
            )
        if (reach := len(request.ids) + request.max_new_tokens) > self.max_seq_len:
            raise ClockhandError(
                f"{len(request.ids)} ids and max_new_tokens = {request.max_new_tokens} make {reach} tokens, more than "
                f"the {self.max_seq_len} that each slot of this engine has memory for"
            )


def _draw_alike(logits: Tensor, group: Sequence[_Draw]) -> list[int | str]:
    """`Engine._draw` for requests with settings of one kind. A row that cannot be drawn from is refused alone."""
    indices, rows, generators = zip(*group)
    sampling, history = [running.request.sampling for running in rows], [running.ids for running in rows]
    prompt_lengths = [len(running.request.ids) for running in rows]
    own = logits if len(group) == len(logits) else logits[list(indices)]
    try:
        if sampling[0].temperature == 0:
            return best(own, history, sampling, prompt_lengths).tolist()
        return sample(next_token_probabilities(own, history, sampling, prompt_lengths), generators).tolist()
    except ClockhandError as error:
        return [str(error)] if len(group) == 1 else [_draw_alike(logits, [one])[0] for one in group]


def engine_for(model: Transformer, texts: int, reach: int, known_ids: int) -> Engine:
    """An engine for so many `texts` of up to `reach` tokens in all, each with a request.

    It has up to 32 slots, fewer where they took more than 2 GiB; texts beyond them wait.
    """
    room = MEMORY // StepRunner.slot_bytes(model.config, step_precision(model), reach, min(CHUNK, reach))
    return Engine(
        model,
        slots=max(1, min(texts, ROWS, room)),
        max_seq_len=reach,
        prefill_chunk=CHUNK,
        queue_limit=texts,
        known_ids=known_ids,
    )
