"""What a protocol file may say: `protocol` names a published protocol, the other keys are its arguments."""

from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from steerlab._cli.options import DEFAULT_MODEL
from steerlab._cli.spec import FilePath, Number, Section


class ProtocolSpec(Section):
    """What all protocols have.

    Attributes:
        protocol: its name.
        name: names the run directory.
        model: alias, directory or hub id.
        backend: `lens` or `vllm`.
        dtype: of weights and activations.
        engine: further options of `steerlab.load` or `steerlab.VLLMEngine`.
        seed: of splits and intervals.
        root: folder of run directories.
        chat: ask in a turn of a chat.
        report: write `report.html` into the run directory; or a path that ends in .html or .md.
    """

    protocol: str
    name: str
    model: str = DEFAULT_MODEL
    backend: Literal["lens", "vllm"] = "lens"
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    engine: dict[str, Any] = Field(default_factory=dict)
    seed: int = 0
    root: FilePath = Path("runs")
    chat: bool = False
    report: bool | FilePath = True

    def wired(self) -> dict[str, Any]:
        """What vLLM is started with, unless the file says so itself."""
        return {"layers": "all"}


class ChoicesSpec(ProtocolSpec):
    """What protocols on questions with two answers have.

    Attributes:
        behaviours: a file of questions by the name of the behaviour; see `steerlab.protocols.ChoiceItems`.
        layers: the layers.
    """

    behaviours: dict[str, FilePath]
    layers: list[int]

    def wired(self) -> dict[str, Any]:
        """The layers that are steered."""
        return {"layers": self.layers}


class SteerabilitySpec(ChoicesSpec):
    """Steerability; see `steerlab.protocols.steerability`.

    Attributes:
        multipliers: what the vector is multiplied by.
        prompts: changes of the prompt by name: text before the question, or `system` with the system's message.
    """

    multipliers: list[Number] | None = None
    prompts: dict[str, str | dict[str, str]] = Field(default_factory=dict)


class CaaSpec(ChoicesSpec):
    """Contrastive activation addition; see `steerlab.protocols.caa`.

    Attributes:
        multipliers: what the vector is multiplied by.
        held_out: share of the questions that is measured.
    """

    multipliers: list[Number] | None = None
    held_out: Number = 0.2


class RefusalSpec(ProtocolSpec):
    """The refusal direction; see `steerlab.protocols.refusal`.

    Attributes:
        harmful: a text file with an instruction a line.
        harmless: another one, with as many.
        refusal_tokens: how refusals begin.
        positions: how many of a prompt's last tokens are tried.
        layers: layers whose output is tried; all by default.
        max_kl: candidates that move harmless instructions further are left out (nats).
        least_induced: candidates that induce less refusal are left out.
        late: share of the last layers that is left out.
        sites: where in each layer the direction is ablated.
        chat: ask in a turn of a chat; true by default.
    """

    harmful: FilePath
    harmless: FilePath
    refusal_tokens: list[str] = Field(default_factory=lambda: ["I", "As"])
    positions: int = 5
    layers: list[int] | Literal["all"] = "all"
    max_kl: Number = 0.1
    least_induced: Number = 0.0
    late: Number = 0.2
    sites: list[str] = Field(default_factory=lambda: ["resid_mid", "resid_post"])
    chat: bool = True

    def wired(self) -> dict[str, Any]:
        """Ablation acts everywhere."""
        return {"layers": "all", "sites": self.sites}


class AxbenchSpec(ProtocolSpec):
    """AxBench's steering task; see `steerlab.protocols.axbench`.

    Attributes:
        concepts: a training file of the benchmark, `train_data.parquet`.
        layer: the layer.
        limit: only the first concepts of the file.
        texts: only the first texts of each side.
        instructions: a text file with one a line; by default `n_instructions` of the file of concepts.
        n_instructions: how many of those.
        judge: the model that rates, on TransformerLens; the one that is steered by default.
        methods: arms; all by default.
        factors: what a vector is multiplied by.
        max_new_tokens: tokens of an answer.
        training: options of ReFT-r1; with `backend: vllm` it is trained on the same model on TransformerLens.
    """

    concepts: FilePath
    layer: int
    limit: int | None = None
    texts: int | None = None
    instructions: FilePath | None = None
    n_instructions: int = 10
    judge: str | None = None
    methods: list[str] | None = None
    factors: list[Number] | None = None
    max_new_tokens: int = 64
    training: dict[str, Any] = Field(default_factory=dict)

    def wired(self) -> dict[str, Any]:
        """The layer that is steered."""
        return {"layers": [self.layer]}


class CastSpec(ProtocolSpec):
    """Conditional activation steering; see `steerlab.protocols.cast`.

    Attributes:
        target: a text file with a prompt a line that is to be refused.
        other: another one, with as many that are not.
        behaviour: JSON lines of `positive` and `negative`, chats or texts that end in a begun refusal and answer.
        layers: layers after which the behaviour vector is added.
        condition_layers: layers of which the best is read.
        strength: of the behaviour vector, as a share of the median norm of the stream.
        refusal_tokens: how refusals begin.
        method: how both vectors are extracted.
        chat: ask in a turn of a chat; true by default.
    """

    target: FilePath
    other: FilePath
    behaviour: FilePath
    layers: list[int]
    condition_layers: list[int]
    strength: Number = 0.2
    refusal_tokens: list[str] = Field(default_factory=lambda: ["I", "As"])
    method: str = "pca_uncentred"
    chat: bool = True

    def wired(self) -> dict[str, Any]:
        """The layers that are steered and those that are read."""
        return {"layers": sorted({*self.layers, *self.condition_layers})}


class ItiSpec(ProtocolSpec):
    """Inference-time intervention; see `steerlab.protocols.iti`.

    Attributes:
        questions: questions with true and false answers, in the form of TruthfulQA's `mc_task.json`.
        heads: numbers of heads that are shifted.
        alphas: strengths, in standard deviations.
        layers: layers whose heads are ranked; all by default.
        folds: parts of a half's questions that are held out in turn.
        texts: a text file for the cost, a text a line; shipped neutral prose by default.
        before: text before each question.
    """

    questions: FilePath
    heads: list[int] | None = None
    alphas: list[Number] | None = None
    layers: list[int] | Literal["all"] = "all"
    folds: int = 5
    texts: FilePath | None = None
    before: str = ""

    def wired(self) -> dict[str, Any]:
        """Any layer may hold a head that is shifted."""
        return {"layers": self.layers, "sites": ["attn_out"]}


PROTOCOLS: Final[dict[str, type[ProtocolSpec]]] = {
    "axbench": AxbenchSpec,
    "caa": CaaSpec,
    "cast": CastSpec,
    "iti": ItiSpec,
    "refusal": RefusalSpec,
    "steerability": SteerabilitySpec,
}


def is_protocol(data: dict[Any, Any]) -> bool:
    """Whether keys and values describe a protocol rather than an experiment or a sweep."""
    return "protocol" in data
