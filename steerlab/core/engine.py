"""The engine protocol: what every backend can do, in the same words."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from steerlab.core._seeds import SeedLike
from steerlab.core._text import Boundary, PromptLike, TargetLike
from steerlab.core.policy import SamplingPolicy
from steerlab.core.receipts import Receipt, receipts_fold
from steerlab.core.results import Activations, Generations, Measured, Scores
from steerlab.display import Facts, Piece, Shown, figure, shortened

if TYPE_CHECKING:
    from torch import Tensor

DEFAULT_POLICY = SamplingPolicy()


@dataclass(frozen=True, repr=False)
class ModelInfo(Shown):
    """Which model an engine runs, precisely enough to compare results by.

    Attributes:
        name: what the user asked for.
        revision: the hub revision, if there is one.
        weights_hash: content hash of configuration and weights; of samples where they take more than 4 GiB, see
            `steerlab.models.weights_hash`.
        weight_processing: `none`, or what was done to the weights (e.g. `compatibility_mode`).
        n_layers: number of layers.
        d_model: width of the residual stream.
        d_vocab: number of logits.
        context_length: the longest sequence, in tokens.
        dtype: of the weights, e.g. `float32`.
    """

    name: str
    revision: str | None
    weights_hash: str
    weight_processing: str
    n_layers: int
    d_model: int
    d_vocab: int
    context_length: int
    dtype: str

    def _finding(self) -> str:
        sizes = f"{figure(self.n_layers)} layers of width {figure(self.d_model)}"
        return f"{self.name!r}, {sizes}, {self.dtype}, weights {shortened(self.weights_hash, 13)}"

    def _pieces(self) -> Sequence[Piece]:
        return [
            Facts(
                [
                    ("model", self.name),
                    ("revision", self.revision),
                    ("weights", shortened(self.weights_hash, 17)),
                    ("weight processing", self.weight_processing),
                    ("layers", self.n_layers),
                    ("width of the stream", self.d_model),
                    ("logits", self.d_vocab),
                    ("context", f"{figure(self.context_length)} tokens"),
                    ("dtype", self.dtype),
                ]
            )
        ]


@dataclass(frozen=True)
class EngineTraits:
    """What differs between engines, for code that depends on it.

    Attributes:
        backend: `lens`, `vllm`, or a name of one's own; numbers of different backends are not mixed in a run.
        device: the kind of device that computes, e.g. `cpu` or `cuda`.
        layers: the layers that can be edited and read.
        takes_functions: whether `measure` takes any function of logits, or shipped quantities only, as when the logits
            are in another process.
        gives_supports: whether `generate` takes `with_support=True`, so that completions carry the set of tokens that
            each token was drawn from.
    """

    backend: str
    device: str
    layers: tuple[int, ...]
    takes_functions: bool
    gives_supports: bool = False


@runtime_checkable
class Engine(Protocol):
    """Generates, scores and captures, with or without a plan.

    Everywhere, a prompt is a string, a list of chat messages, or a list of token ids; `plan=None` is the unsteered
    arm, and a list of plans (or None) holds one per prompt. A result's `receipts` say what the plans really edited in
    each of its rows.
    """

    @property
    def receipts(self) -> Sequence[Any]:
        """The receipts of the last call's result."""
        ...

    @property
    def info(self) -> ModelInfo:
        """The model that runs."""
        ...

    @property
    def traits(self) -> EngineTraits:
        """How this engine differs from others."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        ...

    def generate(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        *,
        plan: Any = None,
        policy: SamplingPolicy = DEFAULT_POLICY,
        max_new_tokens: int = 64,
        n: int = 1,
        seed: SeedLike = 0,
        stop: Sequence[str] | str = (),
        chat: bool = False,
    ) -> Generations:
        """Samples n continuations of each prompt."""
        ...

    def score(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        targets: Sequence[Sequence[TargetLike]],
        *,
        plan: Any = None,
        boundary: Boundary = "joint",
        variants: Sequence[str] = ("",),
        score_eos: bool = False,
        chat: bool = False,
    ) -> Scores:
        """The exact log-probability of every target after its prompt; of each variant of it, if several are asked."""
        ...

    def measure(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        targets: Sequence[Sequence[TargetLike]],
        measures: Any,
        *,
        plan: Any = None,
        boundary: Boundary = "joint",
        chat: bool = False,
    ) -> Measured:
        """Named quantities of every target token's prediction, or functions of its logits where they can be run."""
        ...

    def capture(
        self,
        prompts: Sequence[PromptLike] | PromptLike,
        *,
        layers: Any,
        site: str = "resid_post",
        where: Any = None,
        pool: str | None = None,
        plan: Any = None,
        chat: bool = False,
    ) -> Activations:
        """Activations at chosen layers and positions."""
        ...

    def median_norm(self, layer: int, site: str = "resid_post") -> float:
        """Median norm of the stream at a hook point on the shipped reference text, position 0 left out."""
        ...

    def close(self) -> None:
        """Frees the model."""
        ...


@runtime_checkable
class UnembeddingEngine(Protocol):
    """An engine whose final norm and unembedding can be applied to any stream; not every engine has them at hand."""

    @property
    def info(self) -> ModelInfo:
        """The model that runs."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        ...

    def unembed(self, streams: "Tensor") -> "Tensor":
        """Logits of streams as they are after the last layer.

        Args:
            streams: shape [rows, d_model].

        Returns:
            float32 on the CPU, shape [rows, d_vocab].
        """
        ...


@runtime_checkable
class HeadsEngine(Protocol):
    """An engine that reads attention heads apart; not every engine has their weights at hand."""

    @property
    def info(self) -> ModelInfo:
        """The model that runs."""
        ...

    def capture(self, prompts: Sequence[PromptLike] | PromptLike, *, layers: Any, site: str) -> Activations:
        """Activations; with the site `z`, of each head."""
        ...

    def head_outputs(self, layer: int) -> "Tensor":
        """W_O of a layer by head, float32 on the CPU, shape [n_heads, d_head, d_model]."""
        ...


def engine_pieces(info: ModelInfo, traits: EngineTraits, receipts: Sequence[Receipt]) -> list[Piece]:
    """What a notebook shows of an engine: its model, where it runs, and what the last call edited."""
    where = Facts(
        [
            ("runs on", f"{traits.backend}, {traits.device}"),
            ("layers that can be edited", list(traits.layers) if len(traits.layers) < info.n_layers else "all"),
        ]
    )
    return [*info._pieces(), where, *receipts_fold(receipts, "last call")]
