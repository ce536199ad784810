"""Precision inside a call: global knobs set and put back, autocast as configured, dropout off for exact numbers."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from steerlab._runtime.autocast import without_autocast
from steerlab.sequences.config import ForcingPrecision, FunctionalPrecision, PrecisionConfig


@contextmanager
def precise(config: PrecisionConfig) -> Iterator[None]:
    """Runs the body with the configured global precision; what was set before comes back, also after an error."""
    matmul, convolution = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        torch.set_float32_matmul_precision(config.matmul_precision)
        torch.backends.cudnn.allow_tf32 = config.allow_tf32
        yield
    finally:
        torch.set_float32_matmul_precision(matmul)
        torch.backends.cudnn.allow_tf32 = convolution


@contextmanager
def autocasting(config: ForcingPrecision | FunctionalPrecision, device: torch.device) -> Iterator[None]:
    """Runs the body under autocast as configured: off unless the configuration turns it on."""
    if not config.autocast:
        with without_autocast(device.type):
            yield
        return
    assert isinstance(config.dtype, torch.dtype)
    with torch.autocast(device.type, dtype=config.dtype):
        yield


def active_dropout(modules: Iterable[nn.Module]) -> bool:
    """Whether one of these modules is in training mode and would drop something."""
    kinds = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.AlphaDropout)
    named = ("attention_dropout", "dropout")
    return any(
        module.training
        and (
            (isinstance(module, kinds) and module.p > 0)
            or any(isinstance(rate := getattr(module, name, None), float) and rate > 0 for name in named)
        )
        for module in modules
    )
