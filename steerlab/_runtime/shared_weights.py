"""Two objects on one set of weights: what an engine and a SequenceProcessor give each other."""

from typing import Any, Protocol, runtime_checkable

from torch import nn


@runtime_checkable
class HoldsModel(Protocol):
    """Something that runs a Hugging Face model and can hand it to another, such as an engine or a SequenceProcessor."""

    @property
    def tokenizer(self) -> Any:
        """The model's own tokenizer."""
        ...

    def plain_model(self) -> nn.Module:
        """The Hugging Face causal language model, whose parameters are the holder's own tensors."""
        ...
