"""Steering vectors, and sets of them: values, hook point, and a card that records where they come from."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from steerlab.core._hashing import bytes_hash
from steerlab.core._hook_points import HookPoint
from steerlab.core._numbers import Integer, Number, as_integer, as_number, plain, shown
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine, ModelInfo
from steerlab.core.errors import HookPointError, InputError, VectorMismatchError, VectorShapeError, VectorValueError
from steerlab.display import Facts, Fold, Piece, Shown, Table
from steerlab.steering._row_values import row_of, shape_of
from steerlab.steering._vector_card import VectorCard, card_facts, model_entries
from steerlab.steering.low_rank import LowRank
from steerlab.steering.vector_diagnostics import Diagnostics

_LOADERS: dict[str, Callable[[], Any]] = {}


def connect(**loaders: Callable[[], Any]) -> None:
    """States how the modules above this one are loaded that the methods of vectors call; see `_vector_methods`."""
    _LOADERS.update(loaders)


def _above(module: str) -> Any:
    return _LOADERS[module]()


@dataclass(frozen=True, eq=False, repr=False)
class SteeringVector(Shown):
    """A direction in the residual stream, with its length, at a hook point.

    Two are equal if their values, places and low-rank edits are.

    Attributes:
        values: float32 on the CPU, shape [d_model].
        hook_point: where it belongs.
        card: where it comes from.
        low_rank: a low-rank edit that was learned or read with it, which `sl.loreft` applies. The values are then what
            the edit adds on average (or the direction that it writes first); vectors made from this one have none.

    Raises:
        VectorShapeError: if the values are not one row, or a low-rank edit has another width.
        VectorValueError: if they hold NaN or infinities.

    Examples:
        >>> v = SteeringVector.from_tensor(torch.tensor([3.0, 4.0]), layer=1)
        >>> v.norm
        5.0
    """

    values: Tensor
    hook_point: HookPoint
    card: VectorCard = field(default_factory=VectorCard)
    low_rank: LowRank | None = None

    def __post_init__(self) -> None:
        row = row_of(self.values)
        dtype = getattr(self.values, "dtype", None)
        if row is None and (dtype == torch.bool or getattr(dtype, "is_complex", False)):
            raise VectorShapeError(f"A steering vector holds real numbers [d_model], got {dtype}; convert them first.")
        if row is None:
            several = len(getattr(self.values, "shape", ())) > 1
            hint = (
                "Choose one row of it, such as tensor[0]."
                if several
                else "(Indexing a [d_model] tensor with [-1] gives one number; did you mean to index the positions?)"
            )
            raise VectorShapeError(f"A steering vector has shape [d_model], got {shape_of(self.values)}. {hint}")
        values = row.detach().to("cpu", torch.float32).clone().contiguous()
        if not torch.isfinite(values).all():
            raise VectorValueError(
                f"The vector at {self.hook_point.name} holds {int((~torch.isfinite(values)).sum())} NaN or infinite "
                "values; check the data it was made from."
            )
        object.__setattr__(self, "values", values)
        if self.low_rank is not None and self.low_rank.d_model != values.numel():
            raise VectorShapeError(
                f"The low-rank edit of a vector has its width, [{values.numel()}]; got [{self.low_rank.d_model}]."
            )

    @classmethod
    def from_tensor(
        cls,
        tensor: Any,
        *,
        layer: Integer,
        site: str = "resid_post",
        model: "str | ModelInfo | None" = None,
        name: str | None = None,
    ) -> "SteeringVector":
        """A vector from given values.

        Args:
            tensor: shape [d_model]; a tensor of any dtype on any device, an array or a list of numbers.
            layer: layer index from 0.
            site: `resid_pre`, `resid_mid`, `resid_post`, `attn_out` or `mlp_out`.
            model: the name of the model it belongs to, or an engine's `info`; then its use elsewhere is noticed.
            name: what it is about.
        """
        point = HookPoint(plain(layer), site)
        card = VectorCard(name=name, method="given", extracted_at=point.name)
        if isinstance(model, ModelInfo):
            card = replace(card, **model_entries(model))
        elif model is not None:
            card = replace(card, model=str(model))
        row = row_of(tensor)
        return cls(tensor if row is None else row, point, card)

    @property
    def name(self) -> str | None:
        """What it is about, as its card says; no part of its identity."""
        return self.card.name

    @property
    def layer(self) -> int:
        """Layer index."""
        return self.hook_point.layer

    @property
    def site(self) -> str:
        """Site within the layer."""
        return self.hook_point.site

    @property
    def d_model(self) -> int:
        """Number of values."""
        return self.values.numel()

    @property
    def norm(self) -> float:
        """Euclidean norm."""
        return float(self.values.double().norm())

    @property
    def unit(self) -> Tensor:
        """The direction with norm 1, shape [d_model].

        Raises:
            VectorValueError: if the vector is zero and so has no direction.
        """
        norm = self.values.double().norm()
        if norm == 0:
            raise VectorValueError(f"The vector at {self.hook_point.name} is zero and has no direction.")
        return (self.values.double() / norm).float()

    @property
    def hash(self) -> str:
        """Content hash of hook point and values; a low-rank edit has a hash of its own."""
        return bytes_hash(self.hook_point.name.encode() + self.values.numpy().astype("<f4").tobytes())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SteeringVector) and (self.hash, self.low_rank) == (other.hash, other.low_rank)

    def __hash__(self) -> int:
        return hash(self.hash)

    def _finding(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        more = "" if self.low_rank is None else f", with an edit of rank {self.low_rank.rank}"
        return f"{name}{self.hook_point.name}, d_model={self.d_model}, norm={self.norm:.4g}{more}"

    def _pieces(self) -> Sequence[Piece]:
        median = self.card.median_norm
        sizes: list[tuple[str, Any]] = [("norm", self.norm)]
        sizes += [("in median norms of the stream", self.norm / median)] if median else []
        largest = self.values.abs().topk(min(8, self.d_model)).indices.tolist()
        parts = Table(["component", "value"], [(k, float(self.values[k])) for k in largest], caption="largest parts")
        return [Facts([*sizes, ("hash", self.hash), *card_facts(self.card)]), Fold("largest components", [parts])]

    def scaled(self, factor: Number) -> "SteeringVector":
        """The same direction, `factor` times as long."""
        number = as_number(factor)
        if number is None:
            raise VectorValueError(f"A vector is scaled by a finite number, got {shown(factor)}.")
        return self._remade(self.values * number, self.card)

    def with_values(self, values: Tensor, *, method: str) -> "SteeringVector":
        """Other values at the same place; the card keeps the model's entries; it and the name state the method."""
        name = None if self.name is None else f"{self.name}: {method}"
        return self._remade(values, replace(self.card, name=name, method=method))

    def at(self, layer: Integer, site: str | None = None) -> "SteeringVector":
        """The same values at another hook point; the card still says where they were read."""
        point = HookPoint(plain(layer), site or self.site)
        return replace(self, hook_point=point, card=replace(self.card, median_norm=None))

    __array_ufunc__ = None  # so that a NumPy number times a vector is a vector

    def __add__(self, other: "SteeringVector") -> "SteeringVector":
        return self._with(other, "+", lambda a, b: a + b)

    def __sub__(self, other: "SteeringVector") -> "SteeringVector":
        return self._with(other, "−", lambda a, b: a - b)

    def __neg__(self) -> "SteeringVector":
        return self._named(f"−{_term(self)}", -self.values, "negative")

    def __mul__(self, factor: Number) -> "SteeringVector":
        scaled = self.scaled(factor)
        return scaled._named(f"{float(factor):g} × {_term(self)}", scaled.values, "multiple")

    __rmul__ = __mul__

    def project_out(self, *others: "SteeringVector") -> "SteeringVector":
        """What is left of the vector without its components along others, which need not be orthogonal.

        Raises:
            HookPointError, VectorMismatchError: for a vector of another place, width or model.
            VectorValueError: if nothing is left.

        Examples:
            >>> v, w = (SteeringVector.from_tensor(t, layer=1) for t in ([3.0, 4.0], [2.0, 0.0]))
            >>> v.project_out(w).values
            tensor([0., 4.])
        """
        left, card = self.values.double(), self.card
        for other in others:
            card = self._shared_card(other, card)
        basis, _ = torch.linalg.qr(torch.stack([other.unit.double() for other in others], dim=1))
        left = left - basis @ (basis.T @ left)
        if left.norm() <= 1e-6 * self.norm:
            raise VectorValueError(f"{self!r} lies in the span of the others; without them nothing is left of it.")
        name = f"{_term(self)} without {', '.join(map(_term, others))}"
        return self._remade(left.float(), replace(card, name=name, method="project_out"))

    def _with(
        self, other: "SteeringVector", sign: str, combine: Callable[[Tensor, Tensor], Tensor]
    ) -> "SteeringVector":
        if not isinstance(other, SteeringVector):
            return NotImplemented
        card = replace(self._shared_card(other, self.card), name=f"{_term(self)} {sign} {_term(other)}")
        return self._remade(combine(self.values, other.values), replace(card, method="sum"))

    def _named(self, name: str, values: Tensor, method: str) -> "SteeringVector":
        return self._remade(values, replace(self.card, name=name, method=method))

    def _remade(self, values: Tensor, card: VectorCard) -> "SteeringVector":
        """Other values at this place; a low-rank edit was learned with the old ones and is left out."""
        return SteeringVector(values, self.hook_point, card)

    def _shared_card(self, other: "SteeringVector", card: VectorCard) -> VectorCard:
        """The entries of a card that another vector's has too; the others are unknown of what both make.

        Raises:
            HookPointError: if the vectors belong to different hook points.
            VectorMismatchError: if they have different widths, or are of different models.
        """
        if other.hook_point != self.hook_point:
            raise HookPointError(
                f"Vectors are combined at one hook point, got {self.hook_point.name} and {other.hook_point.name}; move "
                "one with .at(layer) if that is meant."
            )
        if other.d_model != self.d_model:
            raise VectorMismatchError(f"Vectors of widths {self.d_model} and {other.d_model} cannot be combined.")
        hashes = {self.card.weights_hash, other.card.weights_hash} - {None}
        if len(hashes) > 1:
            raise VectorMismatchError(f"{self!r} is of {self.card.model} and {other!r} of {other.card.model}.")
        return card.shared_with(other.card)

    @classmethod
    def mean(cls, vectors: Iterable["SteeringVector"]) -> "SteeringVector":
        """The mean of vectors of one hook point; its name says of which.

        Raises:
            InputError: without vectors.
            HookPointError, VectorMismatchError: for vectors of different places, widths or models.

        Examples:
            >>> v = SteeringVector.from_tensor([3.0, 4.0], layer=1, name="v")
            >>> found = SteeringVector.mean([v, SteeringVector.from_tensor([1.0, 0.0], layer=1, name="w")])
            >>> found.values, found.name
            (tensor([2., 2.]), 'mean of v, w')
        """
        found = list(vectors)
        if not found:
            raise InputError("A mean is taken of vectors; there are none.")
        card = found[0].card
        for other in found[1:]:
            card = found[0]._shared_card(other, card)
        name = f"mean of {', '.join(map(_term, found))}"
        values = torch.stack([vector.values.double() for vector in found]).mean(dim=0).float()
        return found[0]._remade(values, replace(card, name=name, method="mean"))

    def cosine(self, other: "SteeringVector") -> float:
        """Cosine between two vectors.

        Raises:
            VectorMismatchError: if they have different widths.
        """
        if other.d_model != self.d_model:
            raise VectorMismatchError(f"Vectors of widths {self.d_model} and {other.d_model} have no cosine.")
        return float(self.unit @ other.unit)

    def top_tokens(self, engine: Engine, k: Integer = 10) -> Any:
        """The tokens that the direction raises most, through the model's final norm and unembedding.

        The vector is read as if it were the stream after the last layer; the norm sets its length, so that only its
        direction counts. What later layers would make of it is left out.

        Args:
            engine: the engine of the model that the vector belongs to.
            k: how many tokens.

        Returns:
            A sequence of tokens with ids and logits, the highest first; `.opposite` has those of the opposite
            direction, and `.to_frame()` both.

        Raises:
            InputError: for an engine that cannot apply its unembedding.
            VectorShapeError: for a model of another width.

        Source:
            nostalgebraist 2020, interpreting GPT: the logit lens.
        """
        return _above("top_tokens").top_tokens(self, engine, k)

    def save(self, path: str | Path) -> Path:
        """Writes a safetensors file with the card inside, atomically; see `steerlab.steering.files`."""
        return _above("files").save_vectors(path, [self])

    @classmethod
    def load(cls, path: str | Path) -> "SteeringVector":
        """Reads a file written by `save`.

        Raises:
            VectorFileError: if it is not such a file, is damaged, or holds several vectors.
        """
        return _above("files").load_one_vector(path)


def check_width(vector: SteeringVector, info: ModelInfo) -> None:
    """Checks that a vector is as wide as a model's stream.

    Raises:
        VectorMismatchError: if it is not.
    """
    if vector.d_model != info.d_model:
        raise VectorMismatchError(
            f"The vector for {vector.hook_point.name} has shape [{vector.d_model}], the residual stream of {info.name} "
            f"has [{info.d_model}]; extract it on this model."
        )


def _term(vector: SteeringVector) -> str:
    """A vector's name as part of another's."""
    name = vector.name or "a vector"
    return f"({name})" if any(sign in name for sign in (" + ", " − ", " without ")) else name


@dataclass(frozen=True, repr=False)
class VectorSet(Shown, Mapping[int, SteeringVector]):
    """One vector per layer, all of one site.

    `vectors[14]` is the vector of layer 14; negative indices count from the last layer that is there.

    Attributes:
        by_layer: the vectors, in order of layer.
        origin: the engine and positions that a set was just extracted with, for `diagnostics`; not saved.
    """

    by_layer: tuple[SteeringVector, ...]
    origin: Any = field(default=None, repr=False, compare=False)

    def __post_init__(self) -> None:
        if isinstance(self.by_layer, SteeringVector):
            raise VectorShapeError("A vector set is made of several vectors, (v,) for one; got a SteeringVector.")
        ordered = tuple(sorted(self.by_layer, key=lambda v: v.layer))
        if len({v.layer for v in ordered}) < len(ordered):
            raise HookPointError("A vector set holds one vector per layer; a layer appears twice.")
        if len({v.site for v in ordered}) > 1:
            raise HookPointError(f"A vector set holds vectors of one site, got {sorted({v.site for v in ordered})}.")
        object.__setattr__(self, "by_layer", ordered)

    def _finding(self) -> str:
        if not self.by_layer:
            return "no vector"
        card, layers = self.by_layer[0].card, ", ".join(str(v.layer) for v in self.by_layer)
        made = [repr(card.name) if card.name else "", card.method or "", f"of {card.model}" if card.model else ""]
        told = " ".join(filter(None, made))
        return f"{f'{told}, ' if told else ''}{self.by_layer[0].site} of layer{'s'[: len(self) != 1]} {layers}"

    def _pieces(self) -> Sequence[Piece]:
        rows = []
        for before, vector in zip([None, *self.by_layer], self.by_layer, strict=False):
            median = vector.card.median_norm
            turned = None if before is None or not (before.norm and vector.norm) else vector.cosine(before)
            rows.append((vector.layer, vector.norm, vector.norm / median if median else None, turned))
        columns = ["layer", "norm", "in median norms of the stream", "cosine with the layer before"]
        facts = Facts(card_facts(self.by_layer[0].card)) if self.by_layer else Facts([])
        return [Table(columns, rows, limit=100), Fold("how they were made", [facts])]

    def __getitem__(self, layer: Integer) -> SteeringVector:
        index = as_integer(layer)
        if index is None:
            raise HookPointError(f"A vector set is indexed by a layer, an integer; got {shown(layer)}.")
        if -len(self.by_layer) <= index < 0:
            return self.by_layer[index]
        for vector in self.by_layer:
            if vector.layer == index:
                return vector
        raise HookPointError(f"There is no vector for layer {layer}; layers here: {[v.layer for v in self.by_layer]}.")

    def __contains__(self, layer: object) -> bool:
        return layer in [v.layer for v in self.by_layer]

    def get(self, layer: Integer, default: Any = None) -> Any:
        """As `vectors[layer]`, but `default` if there is no such layer."""
        try:
            return self[layer]
        except HookPointError:
            return default

    def __iter__(self) -> Iterator[int]:
        return iter([v.layer for v in self.by_layer])

    def __len__(self) -> int:
        return len(self.by_layer)

    def __reduce__(self) -> tuple[Any, ...]:
        return (VectorSet, (self.by_layer,))

    def diagnostics(
        self, dev: ContrastPairs, engine: Engine | None = None, *, chat: bool | None = None, n_splits: int = 5
    ) -> Diagnostics:
        """How good each layer's vector looks on held-out pairs, before anything is steered with it.

        Args:
            dev: held-out contrast pairs.
            engine: the engine to read with; by default the one that the set was extracted with.
            chat: take strings as user turns; as in the extraction by default.
            n_splits: random splits of `dev` into halves, for the split-half cosine.

        Returns:
            A `Diagnostics`, with `.to_frame()`; `steerlab.plot_diagnostics` draws it.

        Raises:
            InputError: without an engine.
        """
        return _above("diagnostics").diagnose(self, dev, engine, chat=chat, n_splits=n_splits)

    def top_tokens(self, engine: Engine, k: Integer = 10) -> Any:
        """The tokens that each layer's vector raises most; see `SteeringVector.top_tokens`."""
        return _above("top_tokens").layer_top_tokens(self.by_layer, engine, k)

    def cosines(self, others: "VectorSet | None" = None) -> Any:
        """Cosines between the vectors of every two layers, or between this set's and another's."""
        return _above("cosines").cosine_matrix(self.by_layer, None if others is None else others.by_layer)

    def save(self, path: str | Path) -> Path:
        """Writes all vectors to one safetensors file, atomically."""
        return _above("files").save_vectors(path, list(self.by_layer))

    @classmethod
    def load(cls, path: str | Path) -> "VectorSet":
        """Reads a file written by `save`.

        Raises:
            VectorFileError: if it is not such a file, is damaged, or holds several sites.
        """
        return _above("files").load_vector_set(path)

    def to_gguf(self, path: str | Path, *, model_hint: str) -> Path:
        """Writes a llama.cpp control vector, atomically; see `steerlab.steering.formats.gguf`.

        Raises:
            VectorFileError: for vectors at another site than `resid_post`, or at layer 0.
        """
        return _above("gguf").export_gguf(path, self, model_hint=model_hint)

    @classmethod
    def from_gguf(cls, path: str | Path) -> "VectorSet":
        """Reads a control vector of llama.cpp or repeng.

        Raises:
            VectorFileError: if it is no such file, or is damaged.
        """
        return _above("gguf").import_gguf(path)

    def to_torch(self, path: str | Path) -> Path:
        """Writes a `.pt` dictionary keyed by hook point, atomically; see `steerlab.steering.formats.torch_files`."""
        return _above("torch_files").export_torch(path, self)

    @classmethod
    def from_torch(cls, path: str | Path, *, site: str = "resid_post", layer: Integer | None = None) -> "VectorSet":
        """Reads a `.pt` dictionary keyed by hook point or layer number, or one tensor of `layer`; nothing in it is run.

        Raises:
            VectorFileError: if it is no such file, is damaged, or refers to anything but tensors.
        """
        return _above("torch_files").import_torch(path, site=site, layer=layer)

    def to_steering_vectors(self) -> dict[str, Any]:
        """The arguments of a `steering_vectors.SteeringVector`; see `steerlab.steering.formats.steering_vectors`.

        Raises:
            VectorFileError: for vectors at a site that has no layer type there.
        """
        return _above("steering_vectors").export_steering_vectors(self)

    @classmethod
    def from_steering_vectors(cls, steering_vector: Any) -> "VectorSet":
        """Takes the vectors of a `steering_vectors.SteeringVector`.

        Raises:
            VectorFileError: if it is no such object, or its layer type has no hook point here.
        """
        return _above("steering_vectors").import_steering_vectors(steering_vector)
