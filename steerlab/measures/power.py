"""What a design could have found: the power of the test behind a verdict, solved for the slope or for the groups."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import scipy.optimize
from jaxtyping import Float
from scipy import special

POWER = 0.8
_MOST_GROUPS = 100_000
_NORMAL = special.ndtri((np.arange(400) + 0.5) / 400)
_SPREADS = (np.arange(40) + 0.5) / 40


@dataclass(frozen=True)
class NullDraws:
    """The null family of one design: how many directions were drawn, and how far their slopes spread.

    Attributes:
        draws: how many.
        spread: root mean square of their slopes; their mean is 0 by symmetry, since −r is as likely as r.
    """

    draws: int
    spread: float

    @classmethod
    def of(cls, slopes: Float[np.ndarray, " draws"]) -> "NullDraws":
        """The family whose draws had these slopes."""
        return cls(len(slopes), float(np.sqrt(np.mean(np.square(slopes)))))

    def beaten(self, sizes: Float[np.ndarray, " *n"], level: float) -> Float[np.ndarray, " *n"]:
        """The chance that a slope of this size ranks within the level among fresh draws.

        Slopes of draws are taken as normal, which they are nearly where a direction has many coordinates: a rank of at
        most the level allows k = ⌊level·(1 + n)⌋ − 1 of n draws to be larger, so the chance is binomial.
        """
        allowed = math.floor(level * (1 + self.draws) + 1e-9) - 1
        if self.spread == 0:
            return np.where(sizes > 0, float(allowed >= 0), 0.0)
        if allowed < 0:
            return np.zeros_like(sizes)
        return special.bdtr(allowed, self.draws, 2 * special.ndtr(-sizes / self.spread))


@dataclass(frozen=True)
class Design:
    """What decides how large a slope must be to be found.

    Attributes:
        standard_error: of the mean slope, from the spread of the groups.
        groups: how many groups of items.
        families: the null families by name; every one must be beaten.
        level: of the two-sided test, and of every rank: 0.05 for a 95 % interval.
    """

    standard_error: float
    groups: int
    families: Mapping[str, NullDraws]
    level: float = 0.05

    def power(self, slope: float) -> float:
        """The chance of the verdict `effect` for a true slope: its interval excludes 0 and it beats every family.

        The estimated slope is taken as normal about the true one, its squared standard error as chi-squared with one
        degree of freedom less than there are groups, and the control directions as drawn anew.
        """
        if self.groups < 2:
            return 0.0
        freedom = self.groups - 1
        needed = special.stdtrit(freedom, 1 - self.level / 2) * self.standard_error
        spreads = np.sqrt(2 * special.gammaincinv(freedom / 2, _SPREADS) / freedom)
        found = slope + self.standard_error * _NORMAL
        beaten = np.prod([family.beaten(np.abs(found), self.level) for family in self.families.values()], axis=0)
        excludes = (np.abs(found)[:, None] > needed * spreads).mean(axis=1)
        return float(np.mean(excludes * beaten))

    def detectable(self, power: float = POWER) -> float:
        """The smallest size of a true slope that is found with this power; infinite if no slope is.

        Examples:
            >>> families = {"random": NullDraws(20, 2.0)}
            >>> round(Design(0.5, 9, families).detectable(), 1)
            5.2
        """
        spread = max([self.standard_error, *(family.spread for family in self.families.values())])
        if self.groups < 2 or math.isnan(self.standard_error):
            return math.inf
        if spread == 0:
            return 0.0 if self.power(1.0) >= power else math.inf
        most = 1e4 * spread
        if self.power(most) < power:
            return math.inf
        found: Any = scipy.optimize.brentq(lambda slope: self.power(slope) - power, 0.0, most, xtol=1e-4 * spread)
        return float(found)

    def with_groups(self, groups: int) -> "Design":
        """The same design with another number of groups like these."""
        return Design(self.standard_error * math.sqrt(self.groups / groups), groups, self.families, self.level)

    def groups_for(self, slope: float, power: float = POWER) -> float:
        """How many groups like these a true slope of this size needs to be found with this power.

        Infinite if no number is enough, because control directions alone have slopes of this size: then only more
        control draws where they are few, another metric or another strength help.
        """
        if self.groups < 2 or math.isnan(self.standard_error):
            return math.inf
        if self.with_groups(_MOST_GROUPS).power(slope) < power:
            return math.inf
        low, high = 1, 2
        while self.with_groups(high).power(slope) < power:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.with_groups(middle).power(slope) >= power else (middle, high)
        return float(high)
