"""The results of `VectorSet.diagnostics`, layer by layer."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from steerlab.display import Piece, Shown, Table, count, figure

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class LayerDiagnostics:
    """How good one layer's vector looks on held-out pairs.

    Attributes:
        layer: the layer.
        norm: norm of the vector.
        relative_norm: the same in median norms of the stream there, hence the dose of coefficient 1.
        auc: share of (positive, negative) prompts of the held-out pairs whose projections on the vector are in the
            right order; 0.5 is chance.
        split_half_cosine: cosine between the vectors that the same method finds in two halves of the held-out pairs,
            mean over random splits by group; NaN where a half has no direction, or the method needs more than pairs.
        cosine_to_mean_diff: cosine with the mean difference of the held-out pairs.
    """

    layer: int
    norm: float
    relative_norm: float
    auc: float
    split_half_cosine: float
    cosine_to_mean_diff: float


@dataclass(frozen=True, repr=False)
class Diagnostics(Shown):
    """How good a set of vectors looks on held-out pairs, layer by layer.

    Attributes:
        site: the vectors' site.
        method: how they were made.
        n_pairs: how many held-out pairs.
        n_splits: splits behind the split-half cosine.
        layers: one entry per layer.
    """

    site: str
    method: str | None
    n_pairs: int
    n_splits: int
    layers: tuple[LayerDiagnostics, ...]

    def _finding(self) -> str:
        best = max(self.layers, key=lambda layer: layer.auc)
        data = f"{count(self.n_pairs, 'held-out pair')}, {self.site}, {self.method or 'method not known'}"
        return f"largest AUC {figure(best.auc)} at layer {best.layer} of {len(self.layers)}; {data}"

    def _pieces(self) -> Sequence[Piece]:
        names = {
            "layer": "layer",
            "auc": "AUC",
            "norm": "norm",
            "relative_norm": "in median norms of the stream",
            "split_half_cosine": "cosine of two halves",
            "cosine_to_mean_diff": "cosine with mean_diff",
        }
        rows = [tuple(getattr(layer, name) for name in names) for layer in self.layers]
        return [Table(list(names.values()), rows, limit=100)]

    def to_frame(self) -> "pd.DataFrame":
        """A row per layer."""
        import pandas as pd

        return pd.DataFrame([asdict(layer) for layer in self.layers])
