"""Sparse autoencoders: what each of their features reads of the stream, and what it writes back.

With x the stream (less b_dec where the autoencoder subtracts it) and w_i a column of W_enc, the activation of feature i
of three kinds of encoders depends on one reading of the stream alone:

| kind | activation f_i | source |
| --- | --- | --- |
| relu | max(w_i·x + b_i, 0) | Bricken et al. 2023 |
| jumprelu | z if z > max(θ_i, 0) else 0, with z = w_i·x + b_i | Rajamanoharan et al. 2024 (arXiv:2407.14435) |
| gated | max(exp(r_i) w_i·x + b_mag_i, 0) if w_i·x + b_gate_i > 0 else 0 | the same authors (arXiv:2404.16014) |

All three are y if y > θ else 0, with y = r·h + b: a gated one has r = exp(r_i) w_i, and θ is the larger of 0 and
b_mag_i − exp(r_i) b_gate_i. With **topk** (Gao et al. 2024, arXiv:2406.04093), f_i is z if z is positive and among the
k largest of all features, so one feature's reading does not say whether it is active. SAELens's TopK may multiply every
z by the norm of the feature's decoder row first, which ranks features by what they write.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Integer, as_integer, as_list
from steerlab.core._text import PromptLike
from steerlab.core.engine import Engine
from steerlab.core.errors import InputError, PlanError, VectorFileError, VectorShapeError
from steerlab.display import Facts, Piece, Shown, figure
from steerlab.steering._sae_arrays import SaeArrays
from steerlab.steering.feature_activations import FeatureActivations
from steerlab.steering.files import usable_vector
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector, VectorCard


@dataclass(frozen=True)
class Encoding:
    """How an autoencoder makes activations of what it reads.

    Attributes:
        kind: `relu`, `jumprelu`, `gated` or `topk`; empty if it is another.
        subtracts: whether b_dec is subtracted from the stream first.
        k: of topk.
        by_norm: whether readings are multiplied by the norms of decoder rows, of topk too.
        obstacle: why activations cannot be computed here, in words; None if they can.
    """

    kind: str
    subtracts: bool = True
    k: int | None = None
    by_norm: bool = False
    obstacle: str | None = None


@dataclass(frozen=True)
class Readings:
    """What features read: f is y where y > θ, else 0, with y = r·h + b.

    Attributes:
        read: r of each feature, float32 [n_features, d_in].
        bias: b of each, [n_features].
        threshold: θ of each, [n_features].
    """

    read: Float[Tensor, "n_features d_in"]
    bias: Float[Tensor, " n_features"]
    threshold: Float[Tensor, " n_features"]

    def __call__(self, streams: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch n_features"]:
        """The activations, float32."""
        y = streams.float() @ self.read.T + self.bias
        return torch.where(y > self.threshold, y, 0.0)


@dataclass(frozen=True, eq=False, repr=False)
class SparseAutoencoder(Shown):
    """A sparse autoencoder in its files; weights are read when they are needed.

    `sl.feature(sae, index, …)` is an edit that sets or scales a feature.

    Attributes:
        path: its folder or file.
        hook_point: where it reads and writes.
        model: name of its model, if known.
        d_sae: number of features.
        d_in: width of the stream.
        encoding: its encoder.
        notes: what is known of its scale.
        arrays: its weights.
    """

    path: Path
    hook_point: HookPoint
    model: str | None
    d_sae: int
    d_in: int
    encoding: Encoding
    notes: str
    arrays: SaeArrays = field(repr=False)

    def _finding(self) -> str:
        kind = self.encoding.kind or "unknown encoder"
        of = f" of {self.model}" if self.model else ""
        return f"{figure(self.d_sae)} features ({kind}) at {self.hook_point.name}{of}"

    def _pieces(self) -> Sequence[Piece]:
        return [
            Facts(
                [
                    ("file", self.path.name),
                    ("model", self.model),
                    ("hook point", self.hook_point.name),
                    ("features", self.d_sae),
                    ("width of the stream", self.d_in),
                    ("encoder", self.encoding.kind or None),
                    ("k", self.encoding.k),
                    ("subtracts b_dec first", self.encoding.subtracts),
                    ("features cannot be set", self.encoding.obstacle),
                    ("scale", self.notes),
                ]
            )
        ]

    def vectors(self, features: Sequence[Integer]) -> list[SteeringVector]:
        """The decoder rows of features, with their own lengths, in the requested order.

        Raises:
            InputError: for what is no list of indices.
            VectorFileError: for a feature that is not there, or rows that are no vectors.
        """
        wanted = self._checked(features)
        rows = self.arrays.rows("W_dec", wanted)
        card = VectorCard(method="sae_decoder_row", model=self.model, extracted_at=self.hook_point.name)
        notes = f"{self.path.name}: {self.notes}"
        return [
            usable_vector(self.arrays.path, row, self.hook_point, replace(card, name=f"feature {i}", notes=notes))
            for i, row in zip(wanted, rows, strict=True)
        ]

    def readings(self, features: Sequence[Integer]) -> Readings:
        """What features read of the stream.

        Raises:
            PlanError: if a feature's activation is not a function of one reading; says why.
            VectorFileError: for a feature that is not there, or weights that do not fit.
        """
        wanted = self._checked(features)
        self._check_encoder()
        if self.encoding.kind == "topk":
            raise PlanError(
                f"{self.path.name} has a TopK encoder: whether a feature is active depends on whether {self.encoding.k}"
                " others read more, so no edit that reads one direction can set or scale it. Add its decoder row, "
                "sl.add(sae.vectors([index])[0], dose=…); sae.activations reads its activations."
            )
        return self._readings(wanted, self._encoder(wanted))

    def encode(
        self, streams: Float[Tensor, "*batch d_in"], features: Sequence[Integer]
    ) -> Float[Tensor, "*batch n_features"]:
        """Activations of features for streams at the hook point, float32; with topk the whole encoder is read.

        Raises:
            PlanError: for an encoder that is not known.
            VectorShapeError: for streams of another width.
        """
        if streams.shape[-1] != self.d_in:
            raise VectorShapeError(f"The autoencoder reads streams of width {self.d_in}, got {streams.shape[-1]}.")
        if self.encoding.kind != "topk" or self.encoding.obstacle is not None:
            return self.readings(features)(streams)
        wanted = self._checked(features)
        z = self._readings(None, self._encoder(None))
        y = streams.float() @ z.read.T + z.bias
        least = y.topk(min(int(self.encoding.k or 0), self.d_sae), dim=-1).values[..., -1:]
        return torch.where((y >= least) & (y > 0), y, 0.0)[..., wanted]

    def activations(
        self,
        engine: Engine,
        prompts: Sequence[PromptLike] | PromptLike,
        features: Sequence[Integer],
        *,
        where: WhereLike = None,
        plan: Any = None,
        chat: bool = False,
    ) -> FeatureActivations:
        """Activations of features at the tokens of prompts, read at the autoencoder's hook point.

        Args:
            engine: any engine that reads the hook point.
            prompts: strings, chat messages or token ids.
            features: indices of features, from 0.
            where: the positions; all by default.
            plan: as in `engine.capture`; activations are as they are after its edits.
            chat: take strings as user turns of a chat.

        Raises:
            PlanError: for an encoder that is not known.
            VectorShapeError: for a model of another width.
        """
        wanted, point = self._checked(features), self.hook_point
        found = engine.capture(prompts, layers=point.layer, site=point.site, where=where, plan=plan, chat=chat)
        values = self.encode(found[point.layer], wanted)
        return FeatureActivations(tuple(wanted), values, found.positions, found.prompt_token_ids, engine.tokenizer)

    def _encoder(self, wanted: Sequence[int] | None) -> Float[Tensor, "d_in n_features"]:
        if "W_enc" not in self.arrays.names():
            raise VectorFileError(f"{self.arrays.path} holds no encoder W_enc; its decoder rows can still be read.")
        found = self.arrays.columns("W_enc", wanted)
        if found.shape[0] != self.d_in:
            raise VectorFileError(
                f"{self.arrays.path} holds W_enc for width {found.shape[0]}; W_dec is for {self.d_in}."
            )
        return found

    def _readings(self, wanted: Sequence[int] | None, encoder: Float[Tensor, "d_in n_features"]) -> Readings:
        """r, b and θ from the weights, in float64."""
        columns = encoder.double()
        if self.encoding.kind == "gated":
            gain = self._of_features("r_mag", wanted).exp()
            bias, gate = self._of_features("b_mag", wanted), self._of_features("b_gate", wanted)
            threshold = (bias - gain * gate).clamp_min(0.0)
            columns = columns * gain
        else:
            bias = self._of_features("b_enc", wanted)
            threshold = torch.zeros_like(bias)
            if self.encoding.kind == "jumprelu":
                threshold = self._of_features("threshold", wanted).clamp_min(0.0)
        if self.encoding.by_norm:
            rows = self.arrays.columns("W_dec", None)
            norms = torch.linalg.vector_norm(rows, dim=1, dtype=torch.float64)
            columns, bias = columns * norms, bias * norms
        if self.encoding.subtracts:
            bias = bias - self._checked_size("b_dec", self.d_in) @ columns
        made = Readings(columns.T.float(), bias.float(), threshold.float())
        if not all(bool(torch.isfinite(part).all()) for part in (made.read, made.bias, made.threshold)):
            raise VectorFileError(f"The encoder in {self.arrays.path} holds NaN or infinite values.")
        return made

    def _of_features(self, name: str, wanted: Sequence[int] | None) -> Float[Tensor, " n_features"]:
        whole = self._checked_size(name, self.d_sae)
        return whole if wanted is None else whole[list(wanted)]

    def _checked_size(self, name: str, size: int) -> Float[Tensor, " n"]:
        if name not in self.arrays.names():
            raise VectorFileError(f"{self.arrays.path} holds no {name}, which a {self.encoding.kind} encoder needs.")
        found = self.arrays.vector(name).double()
        if len(found) != size:
            raise VectorFileError(f"{self.arrays.path} holds {name} [{len(found)}]; due is [{size}].")
        return found

    def _check_encoder(self) -> None:
        if self.encoding.obstacle is not None:
            raise PlanError(
                f"The activations of {self.path.name} cannot be computed here: {self.encoding.obstacle}. Its decoder "
                "rows are vectors all the same: sl.add(sae.vectors([index])[0], dose=…)."
            )

    def _checked(self, features: Sequence[Integer]) -> list[int]:
        found = [as_integer(i) for i in as_list(features) or []]
        if not found or any(i is None or i < 0 for i in found):
            raise InputError(f"features is a list of indices from 0, at least one; got {features!r:.60}.")
        wanted = [i for i in found if i is not None]
        if max(wanted) >= self.d_sae:
            raise VectorFileError(
                f"{self.arrays.path} has {self.d_sae} features, numbered from 0; there is no feature {max(wanted)}."
            )
        return wanted
