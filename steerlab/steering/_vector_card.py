"""A vector's card: where it comes from."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from steerlab.core._characters import check_whole
from steerlab.core._numbers import check_number
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import VectorValueError
from steerlab.display import figure, shortened


@dataclass(frozen=True)
class VectorCard:
    """Where a vector comes from. Unknown entries are None, never guessed.

    Attributes:
        name: what the vector is about.
        method: how it was made, e.g. `mean_diff`.
        model: name of the model it was made on.
        revision: hub revision of the model.
        weights_hash: content hash of the model's configuration and weights.
        weight_processing: what was done to the weights before (`none`, `compatibility_mode`).
        extracted_at: hook point it was read at; differs from the vector's own after `at`.
        read: the positions it was read at, as `Where.to_json` describes them.
        pool: how several positions of one prompt were pooled.
        data_hash: content hash of the contrast pairs.
        n_pairs: how many pairs.
        median_norm: median norm of the stream at `extracted_at` on the reference text, position 0 left out.
        versions: library versions it was made with.
        notes: further remarks.
        chat: whether strings were read as user turns of a chat.
        responses: how the model's own responses were drawn, where they were read.
        training: how a vector was trained, for methods that learn one by gradient: settings, losses on held-out items,
            steps, tokens and seconds, and what the method learned beside the vector.
    """

    name: str | None = None
    method: str | None = None
    model: str | None = None
    revision: str | None = None
    weights_hash: str | None = None
    weight_processing: str | None = None
    extracted_at: str | None = None
    read: Mapping[str, Any] | None = None
    pool: str | None = None
    data_hash: str | None = None
    n_pairs: int | None = None
    median_norm: float | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    notes: str | None = None
    chat: bool = False
    responses: Mapping[str, Any] | None = None
    training: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.median_norm is not None:
            median = check_number(self.median_norm, "A card's median_norm", least=0, error=VectorValueError)
            object.__setattr__(self, "median_norm", median)
        if not isinstance(self.versions, Mapping):
            raise VectorValueError(f"A card's versions map libraries to versions, got {self.versions!r:.80}.")
        if self.training is not None and not isinstance(self.training, Mapping):
            raise VectorValueError(f"A card's training maps names to what they were, got {self.training!r:.80}.")
        check_whole([self.name, self.method, self.model, self.notes], "A vector's card", VectorValueError)

    def to_json(self) -> dict[str, Any]:
        """A JSON-serialisable dictionary of all entries."""
        entries = asdict(self) | {"versions": dict(self.versions)}
        if not self.chat:
            del entries["chat"]  # absent means no
        if self.responses is None:
            del entries["responses"]
        if self.training is None:
            del entries["training"]
        return entries

    def shared_with(self, other: "VectorCard") -> "VectorCard":
        """The entries that both cards have; the others are unknown."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return VectorCard(**{name: value for name, value in own.items() if value == getattr(other, name)})

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "VectorCard":
        """The card of a dictionary; entries it does not know are ignored."""
        known = {f.name for f in fields(cls)}
        return cls(**{key: value for key, value in data.items() if key in known})


def card_facts(card: VectorCard) -> list[tuple[str, Any]]:
    """A card's known entries for a reader."""
    pairs = None if card.n_pairs is None else f"{figure(card.n_pairs)} ({card.data_hash or 'not hashed'})"
    read = None if card.read is None else ", ".join(v if k == "kind" else f"{k} {v}" for k, v in card.read.items())
    return [
        ("name", card.name),
        ("method", card.method),
        ("model", card.model),
        ("revision", card.revision),
        ("weights", card.weights_hash and shortened(card.weights_hash, 17)),
        ("weight processing", card.weight_processing if card.weight_processing != "none" else None),
        ("read at", card.extracted_at),
        ("positions", read),
        ("pooled", card.pool),
        ("pairs", pairs),
        ("as chat", "yes" if card.chat else None),
        ("notes", card.notes),
        ("training", _training_words(card.training)),
    ]


def _training_words(training: Mapping[str, Any] | None) -> str | None:
    """What a training came to, for a reader."""
    if training is None:
        return None
    told = [f"{name} {figure(training[name])}" for name in ("held_out_loss", "unsteered_loss") if name in training]
    told += [f"{figure(training[name])} {name}" for name in ("steps", "tokens", "seconds") if name in training]
    return ", ".join(told).replace("_", " ")


def model_entries(info: ModelInfo) -> dict[str, Any]:
    """The card entries that say which model a vector belongs to."""
    return {
        "model": info.name,
        "revision": info.revision,
        "weights_hash": info.weights_hash,
        "weight_processing": info.weight_processing,
    }
