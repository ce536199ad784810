"""The direction between two sets of texts that are not paired: the difference of their means."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._arguments import explains_arguments
from steerlab.core._hashing import content_hash
from steerlab.core._hook_points import HookPoint, check_site, resolve_layers
from steerlab.core._numbers import as_list
from steerlab.core._progress import progress
from steerlab.core._text import PromptLike, is_prompt
from steerlab.core.engine import Engine
from steerlab.core.errors import DataError, InputError, VectorValueError
from steerlab.core.results import Activations
from steerlab.steering.extraction._making import made_vector
from steerlab.steering.extraction._moments import NOISE
from steerlab.steering.extraction._pair_activations import PAIRS_PER_CHUNK, check_engine
from steerlab.steering.extraction.responses import Responses, check_readable, read_responses, reads_responses
from steerlab.steering.positions._sets import Mask, Where
from steerlab.steering.positions.where import WhereLike, as_where, index
from steerlab.steering.vectors import VectorSet

Pooling: TypeAlias = Literal["tokens", "texts"]


@explains_arguments
def extract_unpaired(
    engine: Engine,
    positives: Sequence[PromptLike],
    negatives: Sequence[PromptLike],
    *,
    site: str = "resid_post",
    layers: Any = "all",
    read: WhereLike = None,
    pool: Pooling = "tokens",
    responses: Responses | None = None,
    name: str | None = None,
    chat: bool = False,
) -> VectorSet:
    """One steering vector per layer, from two sets of texts of any sizes: the mean of one less the mean of the other.

    The sets need no counterparts: descriptions of a trait against neutral text, harmful requests against harmless ones.
    What else differs between the sets (length, topic, style) is in the vector too; with pairs that differ in one thing
    only, `sl.extract` is better.

    Args:
        engine: any engine.
        positives: texts (or chats, or token ids) that show the property.
        negatives: texts that do not.
        site: `resid_pre`, `resid_mid`, `resid_post`, `attn_out` or `mlp_out`.
        layers: "all", an index, or several; negative ones count from the end.
        read: positions to read in each text; all but the first by default, whose norm is often hundreds of times
            larger. With `sl.where.generated()` the model continues each text, and what it writes is read.
        pool: `tokens`: every token read counts alike, so that long texts count more; `texts`: every text counts alike.
        responses: how the model's own responses are drawn, if they are read.
        name: what the vectors are about.
        chat: take strings as user turns of a chat.

    Returns:
        A VectorSet: `vectors[layer]`.

    Raises:
        DataError: for an empty set, or something that is no text.
        InputError: for positions that a text lacks, or another pooling.
        VectorValueError: if the means do not differ.

    Examples:
        >>> vectors = extract_unpaired(engine, poems, articles, layers=[14])  # doctest: +SKIP

    Source:
        Jorgensen et al. 2023, Improving Activation Steering in Language Models with Mean-Centring (arXiv:2312.03813);
        Arditi et al. 2024 (arXiv:2406.11717), section 2.3, for unpaired sets.
    """
    check_engine(engine)
    sides = [_texts(side, what) for side, what in ((positives, "positives"), (negatives, "negatives"))]
    if pool not in ("tokens", "texts"):
        raise InputError(f"pool is 'tokens' or 'texts', got {pool!r:.40}.")
    where = as_where(read, ~index(0), argument="read")
    _check_positions(where, responses)
    resolved = resolve_layers(layers, engine.info.n_layers)
    options = {"layers": resolved, "site": check_site(site), "pool": None}
    means = [_mean(engine, side, options, where, pool, responses or Responses(), chat) for side in sides]
    difference = means[0] - means[1]
    noise = NOISE * 1e-2 * torch.stack(means).square().sum(dim=(0, 2))
    alike = [layer for layer, same in zip(resolved, difference.square().sum(dim=1) <= noise, strict=True) if same]
    if alike:
        raise VectorValueError(
            f"The means of the two sets are the same at layers {alike}; there is no direction there."
        )
    drawn = f"; {responses or Responses()}" if reads_responses(where) else ""
    about = {
        "name": name,
        "method": "mean_diff_unpaired",
        "read": where.to_json(),
        "pool": pool,
        "data_hash": content_hash(sides),
        "notes": f"{len(sides[0])} texts against {len(sides[1])}{drawn}",
        "chat": chat,
    }
    rows = zip(resolved, difference.float(), strict=True)
    return VectorSet(tuple(made_vector(engine, HookPoint(layer, site), row, **about) for layer, row in rows))


def _texts(side: object, what: str) -> list[PromptLike]:
    found = None if isinstance(side, str) else as_list(side, ordered=True)
    if not found:
        raise DataError(f"{what} is a list of texts, at least one; got {side!r:.60}.")
    for place, text in enumerate(found):
        if not is_prompt(text) or len(text) == 0:
            raise DataError(f"Text {place} of {what} is neither text, nor chat messages, nor token ids: {text!r:.60}.")
    return list(found)


def _check_positions(where: Where, responses: Responses | None) -> None:
    if any(isinstance(leaf, Mask) and len(leaf.rows) > 1 for leaf in where.leaves()):
        raise InputError("A mask with one row per prompt belongs to a single call, and texts are read in several.")
    if reads_responses(where):
        check_readable(where)
    elif responses is not None:
        raise InputError(f"{where} reads no response; read=sl.where.generated() does.")


def _mean(
    engine: Engine,
    texts: Sequence[PromptLike],
    options: dict[str, Any],
    where: Where,
    pool: Pooling,
    responses: Responses,
    chat: bool,
) -> Float[Tensor, "n_layers d_model"]:
    """The mean over a set's tokens or texts, in float64."""
    total, count = torch.zeros(1, dtype=torch.float64), 0
    with progress(len(texts), "extract", "text") as bar:
        for start in range(0, len(texts), PAIRS_PER_CHUNK):
            part = texts[start : start + PAIRS_PER_CHUNK]
            if reads_responses(where):
                found, _ = read_responses(engine, part, options, where, chat, responses)
            else:
                found = engine.capture(part, where=where, chat=chat, **options)
            for rows in _of_texts(found):
                total = total + (rows.sum(dim=1) if pool == "tokens" else rows.mean(dim=1))
                count += rows.shape[1] if pool == "tokens" else 1
            bar.update(len(part))
    return total / count


def _of_texts(found: Activations) -> Iterator[Float[Tensor, "n_layers positions d_model"]]:
    """What was read of each text, float64."""
    for place in range(len(found.positions)):
        yield torch.stack([found.of(place, layer) for layer in found.layers]).double()
