"""What the plots of a dose-response take: an effect has all of it."""

from collections.abc import Mapping, Sequence
from typing import Protocol

import pandas as pd


class DoseSettings(Protocol):
    """What a dose-response was computed with; see `EffectSettings`."""

    @property
    def metric(self) -> str: ...

    @property
    def axis(self) -> str:
        """`dose` or `scale`."""
        ...

    @property
    def max_ppl_ratio(self) -> float:
        """Doses that cost more enter no fit."""
        ...

    @property
    def level(self) -> float:
        """Coverage of the interval."""
        ...


class DoseFigures(Protocol):
    """Rows and figures of a dose-response; see `Effect`, whose attributes of the same names these are."""

    @property
    def rows(self) -> pd.DataFrame:
        """A row per arm, dose and item: `family`, `draw`, `dose`, `item`, `group`, `value`."""
        ...

    @property
    def cost(self) -> pd.DataFrame:
        """A row per dose: `dose`, `ppl_ratio`."""
        ...

    @property
    def settings(self) -> DoseSettings: ...

    @property
    def fitted_doses(self) -> Sequence[float]:
        """Doses within the bound on the cost."""
        ...

    @property
    def item_slopes(self) -> pd.DataFrame:
        """A row per item: `slope`."""
        ...

    @property
    def slope(self) -> float:
        """Mean item slope."""
        ...

    @property
    def ci(self) -> tuple[float, float]:
        """Interval of the slope."""
        ...

    @property
    def equivalence_ci(self) -> tuple[float, float]:
        """Interval that must lie inside the margin for the slope to be shown to be small."""
        ...

    @property
    def margin(self) -> float:
        """Size below which a slope counts as small; NaN for none."""
        ...

    @property
    def anti_steerable(self) -> float:
        """Share of items whose slope is below 0."""
        ...

    @property
    def null_slopes(self) -> pd.DataFrame:
        """A row per control draw: `family`, `draw`, `slope`."""
        ...

    @property
    def rank_slope(self) -> float: ...

    @property
    def null_ranks(self) -> Mapping[str, float]:
        """Rank per null family."""
        ...

    @property
    def null_rank(self) -> float:
        """The worst of them."""
        ...
