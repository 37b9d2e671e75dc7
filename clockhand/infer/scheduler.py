"""Who runs in the next step: the queue, the slots, and what each slot's cache holds. Lists of ids, and no tensors.

A request waits in the queue until a slot is free, has its prompt read in chunks, then draws one token a step until it
ends and its slot is free again:

    queue   r7 r6 r5
    slot 0  r2  prompt ████████░░░░        reads a chunk in this step
    slot 1  r3  prompt ████████████ a b c  takes the one id it has drawn last
    slot 2  r4  prompt ░░░░                waits: the chunk of this step is spent
    slot 3  -   kept   ████████            free; what its cache holds may begin another request

In every step all that draw take their one id, and all that still read share `prefill_chunk` ids, the eldest first: so
whoever draws waits for one chunk at most, however long the prompts that arrive.

Prefixes are shared: when a request begins, the slot whose cache begins like its prompt for longest hands over that
beginning, and only the rest is computed. The last id of a prompt is always computed, since logits come of it. Who would
be handed most of its prompt by a text that is just being read waits for that: many continuations of one prompt read
it once.
"""

from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

from clockhand.errors import ClockhandError
from clockhand.infer.settings import PLAIN, Sampling


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is asked for: to continue `ids`."""

    ids: Sequence[int]
    """The prompt (kept as a tuple), at least one id."""
    sampling: Sampling = PLAIN
    """How to draw."""
    max_new_tokens: int = 256
    """Tokens to draw at most, at least 1."""
    min_new_tokens: int = 0
    """Before so many are drawn, no end token is."""
    stop_ids: Collection[int] = frozenset()
    """End tokens, any of which ends it."""
    seed: int = 0
    """It draws what `generate` draws with this seed."""
    logprobs: int | None = None
    """Tell how probable the model itself found each token drawn, and so many of the best. None tells nothing."""

    def __post_init__(self) -> None:
        for name, kind in (("ids", tuple), ("stop_ids", frozenset)):
            value = getattr(self, name)
            try:
                object.__setattr__(self, name, kind(value))
            except TypeError:  # it cannot be iterated, or holds what cannot be in a set
                raise ClockhandError(f"{name} = {value!r} must be a list of ids") from None


class Opening(NamedTuple):
    """A request begins in `slot`, whose cache is to hold the first `length` ids of `source`'s and nothing else."""

    slot: int
    source: int
    length: int
    reach: int
    """The most tokens the slot will ever hold for this request."""


class Row(NamedTuple):
    """Ids for the cache of one slot, which holds `start` before them."""

    slot: int
    ids: list[int]
    start: int


@dataclass
class Running:
    """A request on its way."""

    number: int
    request: Request
    ids: list[int]
    """Its prompt, and what was drawn since."""
    begun: bool = False

    @property
    def reach(self) -> int:
        return len(self.request.ids) + self.request.max_new_tokens


@dataclass
class _Slot:
    running: Running | None = None
    cached: list[int] = field(default_factory=list)  # what the cache of this slot holds
    last_used: int = 0


@dataclass(frozen=True)
class Plan:
    """One step: first the openings in their order, then the rows all at once."""

    openings: list[Opening]
    rows: list[Row]
    drawing: list[Running | None]
    """For each row who draws a token from its logits; None where a prompt is not yet read to its end."""


class Scheduler:
    """Decides, and remembers; whoever asks does the work. Not thread-safe: the engine holds a lock around each call."""

    def __init__(
        self,
        slots: int,
        prefill_chunk: int,
        queue_limit: int,
        shares: Callable[[int, int], bool],
    ) -> None:
        """`shares(slot, length)` says whether the cache of a slot can still hand over its first `length` ids."""
        self.prefill_chunk = prefill_chunk
        self.queue_limit = queue_limit
        self.reused_tokens = 0
        self.computed_tokens = 0
        self._shares = shares
        self._queue: deque[Running] = deque()
        self._slots = [_Slot() for _ in range(slots)]
        self._steps = 0

    @property
    def waiting(self) -> int:
        return len(self._queue)

    @property
    def free_slots(self) -> int:
        return sum(slot.running is None for slot in self._slots)

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not self._queue and self.free_slots == len(self._slots)

    def submit(self, running: Running) -> None:
        """Lines up a request. Raises `ClockhandError` when the queue is full."""
        if len(self._queue) >= self.queue_limit:
            raise ClockhandError(f"the queue is full: queue_limit = {self.queue_limit} requests wait; try again later")
        self._queue.append(running)

    def remove(self, number: int) -> Running | None:
        """Takes a request out, wherever it is; its slot is free at once, and keeps its beginning for others."""
        for waiting in self._queue:
            if waiting.number == number:
                self._queue.remove(waiting)
                return waiting
        for slot in self._slots:
            if slot.running is not None and slot.running.number == number:
                running, slot.running = slot.running, None
                return running
        return None

    def discard(self, slot: int) -> Running | None:
        """Takes out whoever is in a slot; what its cache holds begins no other request."""
        running = self._slots[slot].running
        self._slots[slot] = _Slot(last_used=self._steps)
        return running

    def plan(self) -> Plan:
        """The next step. What it lists counts as done from here on."""
        self._steps += 1
        self._admit()
        plan, budget = Plan([], [], []), self.prefill_chunk
        taken = [(slot.running, number) for number, slot in enumerate(self._slots) if slot.running is not None]
        for running, number in sorted(taken, key=lambda pair: pair[0].number):
            slot = self._slots[number]
            if not running.begun:
                if budget == 0 or self._is_read_soon(running):
                    continue
                plan.openings.append(self._open(running, number))
            unseen = len(running.ids) - len(slot.cached)
            reading = len(slot.cached) < len(running.request.ids)
            width = min(unseen, budget) if reading else unseen
            if width == 0:
                continue
            if reading:
                budget -= width
            row = Row(number, running.ids[len(slot.cached) :][:width], len(slot.cached))
            plan.rows.append(row)
            plan.drawing.append(running if width == unseen else None)
        for row in plan.rows:  # only now: the openings come before the rows, and find what the caches held until then
            self._slots[row.slot].cached += row.ids
            self._slots[row.slot].last_used = self._steps
            self.computed_tokens += len(row.ids)
        return plan

    def _admit(self) -> None:
        """Free slots go to those who wait longest."""
        while self._queue and self.free_slots:
            running = self._queue.popleft()
            free = [number for number, slot in enumerate(self._slots) if slot.running is None]
            # The one that begins alike for longest, or else the one that nobody has used for longest.
            best = max(free, key=lambda number: (self._shared(running, number), -self._slots[number].last_used))
            self._slots[best].running = running

    def _open(self, running: Running, number: int) -> Opening:
        """The request begins in its slot, with the longest beginning that any slot can hand over (its own first)."""
        slots = sorted(range(len(self._slots)), key=lambda other: other != number)
        source = max(slots, key=lambda other: self._shared(running, other))
        length = self._shared(running, source)
        running.begun = True
        self._slots[number].cached = running.ids[:length]
        self.reused_tokens += length
        return Opening(number, source if length else number, length, running.reach)

    def _shared(self, running: Running, number: int) -> int:
        """How many ids at the beginning of the prompt the cache of slot `number` can hand over."""
        length = _common(running.request.ids[:-1], self._slots[number].cached)
        return length if length and self._shares(number, length) else 0

    def _is_read_soon(self, running: Running) -> bool:
        """Whether another text is just reading what spares more than half of this prompt, if one waits for it."""
        prompt, now = running.request.ids, None
        for number, slot in enumerate(self._slots):
            other = slot.running
            if other is None or not other.begun or len(slot.cached) >= len(other.request.ids):
                continue
            soon = _common(prompt[:-1], other.request.ids)
            if 2 * soon <= len(prompt) or soon <= len(slot.cached) or not self._shares(number, soon):
                continue
            now = max(self._shared(running, each) for each in range(len(self._slots))) if now is None else now
            if 2 * (soon - now) > len(prompt):
                return True
        return False


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """How many ids both begin with."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other)))
