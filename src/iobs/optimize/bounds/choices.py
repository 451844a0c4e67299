"""The supports that a node of a search tree stands for.

Some features are used, some excluded, the others free. Free features may be in groups, of each of which at least one is
used. Where columns are correlated, a column that is excluded is replaced by its neighbours at hardly any cost, and a
search that decides about one column at a time has to go through all combinations of neighbours. One that first decides
whether any of a group is used leaves most of them out at once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from iobs.optimize.curvature import NO_INDICES
from iobs.optimize.objectives.design import Array, Booleans, Indices

_EXCLUDED, _USED, _FREE = -3, -2, -1


@dataclass(frozen=True)
class Choices:
    """The supports of a node.

    Attributes:
        roles: of every feature (p,) int16: -3 excluded, -2 used, -1 free, from 0 the number of the group of a free
            feature.
        most: largest number of used features.
    """

    roles: Indices
    most: int

    @classmethod
    def of(cls, used: Booleans, free: Booleans, most: int) -> Choices:
        """The supports of all used features and any of the free ones (p,), without groups."""
        return cls(np.where(used, _USED, np.where(free, _FREE, _EXCLUDED)).astype(np.int16), most)

    @cached_property
    def used(self) -> Booleans:
        """Features that are used (p,)."""
        return np.asarray(self.roles == _USED)

    @cached_property
    def free(self) -> Booleans:
        """Features that may be used (p,)."""
        return np.asarray(self.roles >= _FREE)

    @cached_property
    def plain(self) -> Booleans:
        """Free features without a group (p,)."""
        return np.asarray(self.roles == _FREE)

    @cached_property
    def groups(self) -> Indices:
        """The numbers of the groups, ascending."""
        grouped = self.roles[self.roles >= 0]
        return np.unique(grouped).astype(np.int64) if grouped.size else NO_INDICES

    @cached_property
    def room(self) -> int:
        """Number of features that may be used at most beside the used ones and one of each group."""
        return self.most - int(self.used.sum()) - self.groups.size

    @property
    def limited(self) -> bool:
        """Whether there are more free features than may be used."""
        return int(self.free.sum()) > self.room + self.groups.size

    def members(self, group: int) -> Indices:
        """The features of a group."""
        return np.flatnonzero(self.roles == group).astype(np.int64)

    def settled(self, used: Indices | Booleans, excluded: Indices | Booleans) -> Choices | None:
        """The supports that use some free features and exclude others; None if there are none.

        The last feature of a group is used. Without room all features without a group are excluded.
        """
        roles = self.roles.copy()
        roles[excluded] = _EXCLUDED
        met = self.roles[used]
        roles[used] = _USED
        for group in self.groups:
            members = np.flatnonzero(roles == group)
            if group in met:
                roles[members] = _FREE
            elif members.size == 1:
                roles[members] = _USED
            elif not members.size:
                return None
        choices = replace(self, roles=roles)
        if choices.room == 0 and choices.plain.any():
            roles[choices.plain] = _EXCLUDED
            choices = replace(self, roles=roles)
        return choices if choices.room >= 0 else None

    def with_group(self, features: Booleans) -> Choices | None:
        """The supports that use at least one of some features (p,): all without a group, or part of one.

        Other features of that group lose it.
        """
        roles = self.roles.copy()
        old = int(roles[features][0])
        if old >= 0:
            roles[(roles == old) & ~features] = _FREE
        else:
            old = int(np.setdiff1d(np.arange(self.groups.size + 1), self.groups)[0])
        roles[features] = old
        return replace(self, roles=roles).settled(NO_INDICES, NO_INDICES)

    def representatives(self, costs: Array) -> Indices:
        """The feature of the largest cost of each group, in the order of `groups`."""
        if not self.groups.size:
            return NO_INDICES
        places = np.flatnonzero(self.roles >= 0)
        order = places[np.lexsort((-costs[places], self.roles[places]))]
        return order[np.searchsorted(self.roles[order], self.groups)].astype(np.int64)

    def largest(self, costs: Array) -> float:
        """The largest sum of costs (p,), none negative, of one of the supports."""
        chosen = self.representatives(costs)
        rest = self.free.copy()
        rest[chosen] = False
        others = costs[rest]
        if self.room < others.size:
            first = others.size - self.room
            others = np.partition(others, first)[first:] if self.room else others[:0]
        return float(costs[self.used].sum()) + float(costs[chosen].sum()) + float(others.sum())

    def reduced(self, costs: Array) -> tuple[Array, Array]:
        """Differences of the largest sum of costs to that with each free feature, and to that without it (p,).

        0 where a feature can be used at no loss, and where no support is without it.
        """
        with_it, without = np.zeros((2, costs.size))
        chosen = self.representatives(costs)
        rest = self.free.copy()
        rest[chosen] = False
        order = np.flatnonzero(rest)
        order = order[np.argsort(-costs[order], kind="stable")]
        top, others = order[: self.room], order[self.room :]
        last = float(costs[top[-1]]) if self.room and others.size else np.inf
        following = float(costs[others[0]]) if others.size else 0.0
        ceiling = np.full(costs.size, last)  # what a feature that is used replaces
        grouped = self.roles >= 0
        place = np.searchsorted(self.groups, self.roles[grouped])
        ceiling[grouped] = np.minimum(last, costs[chosen][place])
        with_it[others] = ceiling[others] - costs[others]
        without[top] = costs[top] - following
        extra = np.zeros(costs.size, dtype=np.bool_)
        extra[top] = True
        for group, feature in zip(self.groups, chosen, strict=True):
            members = self.members(int(group))
            members = members[members != feature]
            if members.size:
                second = members[np.argmax(costs[members])]
                without[feature] = costs[feature] - (following if extra[second] else costs[second])
        return with_it, without
