"""Forecast of a run: the work it will do, and the time that is left, corrected by the work done so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

_TRUST = 0.05  # share of a part after which its own speed counts as much as the speed of the run
_FIRST_ENTRIES, _FIRST = 3, 1.5  # first entries of a part, which may compile kernels; most that they count, relatively
_TRUST_ALL = 0.03  # share of the run after which its speed counts as much as the forecast


@dataclass(frozen=True)
class Part:
    """Work of one kind.

    Args:
        name: the task of `Callback.on_measure` begins with it; or "layers", "steps" or "fine-tuning".
        units: number of units in the whole run, such as layers or gradient steps.
        seconds: expected time of one unit; only ratios matter once the run has begun.
        once: the part is over as soon as a later part begins.
        phases: expected seconds of one unit by kind of work, such as "solves"; empty: the part is one kind.
    """

    name: str
    units: int
    seconds: float
    once: bool = False
    phases: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Forecast:
    """The expected work of a run.

    Args:
        parts: in the order in which they begin.
        weights: relative time of each layer in the part "layers", by name, with the mean 1; empty: all alike.
    """

    parts: tuple[Part, ...]
    weights: Mapping[str, float] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Expected time of the whole run."""
        return sum(part.units * part.seconds for part in self.parts)

    @property
    def phases(self) -> dict[str, float]:
        """Expected time of every kind of work."""
        times: dict[str, float] = {}
        for part in self.parts:
            for name, seconds in (part.phases or {part.name: part.seconds}).items():
                times[name] = times.get(name, 0.0) + part.units * seconds
        return times


class Remaining:
    """The time that is left of a run.

    The speed of a part is relative to its forecast. It is the speed of the part's own units as far as they are done,
    and otherwise the speed of the run so far. The first units of a part count little more than the later ones. Work
    that was not forecast is expected to go on as it began.

    Args:
        clock: () -> seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._parts: dict[str, Part] = {}
        self._done: dict[str, float] = {}  # units by part
        self._first: dict[str, list[tuple[float, float, float]]] = {}  # units, seconds, and most seconds as forecast
        self._later: dict[str, float] = {}  # seconds by part, after its first entries
        self._over: set[str] = set()
        self._order: list[str] = []  # of the parts that were forecast
        self._weights: Mapping[str, float] = {}
        self._last = clock()

    def expect(self, forecast: Forecast) -> None:
        """Replace the expected work; work that is done stays done."""
        if not self._done:
            self._last = self._clock()  # the preparations before the first unit belong to no part
        self._parts = {part.name: part for part in forecast.parts}
        self._order = [*self._parts]
        self._weights = forecast.weights

    def expect_part(self, name: str, units: int) -> None:
        """Expect a part that was not forecast; its first unit will show the time of each."""
        if name not in self._parts:
            self._parts[name] = Part(name, units, 0.0)
        elif not self._parts[name].seconds:
            self._parts[name] = replace(self._parts[name], units=units)

    def part_of(self, task: str) -> str:
        """The part that a task belongs to; a part of its own if it was not expected."""
        return next((name for name in self._parts if task.startswith(name)), task)

    def weight(self, layer: str) -> float:
        """Units that a layer counts for in the part "layers"."""
        return self._weights.get(layer, 1.0)

    def skip(self, name: str, units: int) -> None:
        """Some units of a part were done by an earlier run."""
        part = self._parts[name]
        self._parts[name] = replace(part, units=max(0, part.units - units))

    def advance(self, name: str, units: float = 1.0) -> None:
        """Some units of a part are done; the time since the last call was spent on them."""
        now = self._clock()
        taken, self._last = now - self._last, now
        part = self._parts[name]
        if not part.seconds:
            self._parts[name] = replace(part, seconds=taken / units / self._speed)
        first = self._first.setdefault(name, [])
        if len(first) < _FIRST_ENTRIES:
            first.append((units, taken, _FIRST * units * self._parts[name].seconds * self._speed))
        else:
            self._later[name] = self._later.get(name, 0.0) + taken
        self._done[name] = self._done.get(name, 0.0) + units
        earlier = self._order[: self._order.index(name)] if name in self._order else []
        self._over |= {other for other in earlier if self._parts[other].once}

    @property
    def seconds_left(self) -> float | None:
        """Seconds that are left; None if nothing was forecast and no work is done."""
        parts = [part for part in self._parts.values() if part.name not in self._over]
        if not any(part.seconds for part in parts) and not self._done:
            return None
        speed = self._speed
        left, longest = 0.0, 0.0
        for part in parts:
            units = max(0.0, part.units - self._done.get(part.name, 0.0))
            seconds = part.seconds * self._speed_of(part, speed)
            left += units * seconds
            longest = max(longest, min(units, self._most(part)) * seconds)
        # The present unit has been running for a while. If that is longer than any unit takes, it is preparation, or
        # the unit is slow; the units behind it are still to come.
        return left - min(longest, self._clock() - self._last)

    def _most(self, part: Part) -> float:
        """The most units of a part that are done at once: those of the largest layer, otherwise 1."""
        return max(self._weights.values(), default=1.0) if part.name == "layers" else 1.0

    @property
    def share(self) -> float:
        """Share of the time of the run that is over, in [0, 1]."""
        done, ahead = sum(map(self._spent, self._parts)), self.seconds_left
        return 0.0 if ahead is None or done == 0 else done / (done + ahead)

    def _spent(self, name: str) -> float:
        """Seconds of the units of a part that are done; the first ones count at most a multiple of the later ones."""
        first, later = self._first.get(name, []), self._later.get(name, 0.0)
        units = self._done.get(name, 0.0) - sum(units for units, _, _ in first)
        mean = later / units if units > 0 else None
        return later + sum(min(taken, most if mean is None else _FIRST * own * mean) for own, taken, most in first)

    @property
    def _speed(self) -> float:
        """Time of all work so far relative to its forecast."""
        parts = self._parts.values()
        expected = sum(self._done.get(part.name, 0.0) * part.seconds for part in parts)
        spent = sum(self._spent(part.name) for part in parts)
        trust = _TRUST_ALL * sum(part.units * part.seconds for part in parts)
        return (spent + trust) / (expected + trust) if expected + trust > 0 else 1.0

    def _speed_of(self, part: Part, speed: float) -> float:
        """Time of a part relative to its forecast: its own as far as it is done, otherwise that of the run."""
        trust = _TRUST * part.units * part.seconds
        expected = self._done.get(part.name, 0.0) * part.seconds
        return (self._spent(part.name) + trust * speed) / (expected + trust) if trust else speed
