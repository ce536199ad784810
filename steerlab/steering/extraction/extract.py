"""Extracting steering vectors: from contrast pairs by reading activations, or from completions by gradient."""

import importlib.metadata
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from steerlab.core._arguments import explains_arguments
from steerlab.core._hook_points import HookPoint, check_site, resolve_layers
from steerlab.core._numbers import Integer, check_integer
from steerlab.core._seeds import check_single_seed
from steerlab.core._warning import warn
from steerlab.core.contrast_pairs import ContrastPairs
from steerlab.core.engine import Engine
from steerlab.core.errors import DataError, InputError
from steerlab.core.targets import Targets
from steerlab.steering.extraction._axes import Chunk, labels_of
from steerlab.steering.extraction._making import made_vector
from steerlab.steering.extraction._pair_activations import (
    PAIRS_PER_CHUNK,
    Origin,
    PairActivations,
    Reading,
    check_engine,
    read_pairs,
)
from steerlab.steering.extraction.bipo import LearningSettings, learn
from steerlab.steering.extraction.estimators import KEEPS_LENGTH, Estimate, check_method, random_pairs
from steerlab.steering.extraction.learned._examples import Examples
from steerlab.steering.extraction.learned._learn import LEARNED, learn_edit
from steerlab.steering.extraction.responses import Responses
from steerlab.steering.positions.where import WhereLike
from steerlab.steering.vectors import SteeringVector, VectorSet

__all__ = ["PairActivations", "extract", "library_versions", "read_pairs"]

LOW_COSINE = 0.2
_LIBRARIES = ("steerlab", "torch", "transformers", "transformer-lens")


@explains_arguments
def extract(
    engine: Engine,
    data: ContrastPairs | Targets | Sequence[Mapping[str, Any]],
    method: str = "mean_diff",
    site: str = "resid_post",
    layers: Any = "all",
    read: WhereLike = None,
    *,
    pool: str = "mean",
    name: str | None = None,
    chat: bool = False,
    seed: Integer = 0,
    pairs_per_chunk: Integer = PAIRS_PER_CHUNK,
    responses: Responses | None = None,
    **learning: Any,
) -> VectorSet:
    """One steering vector per layer, along the direction that separates positive from negative.

    Every prompt runs once, whatever the number of layers. Rows are folded into running moments chunk by chunk, so
    memory does not grow with the number of pairs; only `logistic` keeps all rows (8·pairs·layers·d_model bytes). Each
    vector's card records the model, the data, the method, the positions, and the median norm of the stream there, to
    which a dose refers. With d = h⁺ − h⁻ of a pair:

    - `mean_diff`: mean(d), with its length;
    - `act_add`: d of exactly one pair, with its length;
    - `pca_uncentred`: the top eigenvector of mean(d dᵀ); `pca_centred`: of cov(d); `lat`: of the covariance of
      differences between random pairs of all prompts, drawn from `seed`;
    - `lda`: Σ⁻¹ mean(d) with a shrunk covariance; `logistic`: weights of a logistic regression, fitted on standardised
      coordinates and turned back. These five are directions and get length 1, so give their strength as a dose;
    - `bipo`: a vector optimised by gradient on `Targets`, at one layer; see `steerlab.steering.extraction.bipo`;
    - `reft_r1`, `reps`, `loreft`: an edit learned by gradient from prompts with wanted completions (for `reps` with
      unwanted ones too), at one layer, and watched on items that are held out; see
      `steerlab.steering.extraction.learned`. `loreft` gives a vector with a low-rank edit, for `sl.loreft`. The card's
      `training` has the losses and the cost.

    Args:
        engine: the engine to read activations with; methods that learn need `sl.load(…)` on TransformerLens.
        data: contrast pairs; targets for methods that learn, or for the last three also records of `prompt`, `target`
            and optionally `label` (+1 unless given) and `group`.
        method: the estimator.
        site: `resid_pre`, `resid_mid`, `resid_post`, `attn_out` or `mlp_out`.
        layers: "all", an index, or several; negative ones count from the end.
        read: positions to read in each prompt; its last token by default.
            With `sl.where.generated()` the model continues each prompt, and what it writes is read.
        pool: how several positions of one prompt become one row: `mean` or `last`.
        name: what the vectors are about.
        chat: take strings as user turns of a chat.
        seed: of the random pairs of `lat`; of start, held-out items and batches of methods that learn.
        pairs_per_chunk: pairs that are read before they are folded; changes memory, not the result.
        responses: how the model's own responses are drawn, if they are read.
        learning: for `bipo`: exactly one of `max_dose` and `max_norm`, and `steps`, `learning_rate`, `batch_size`,
            `beta`, `where`; see `LearningSettings`. For the others that learn: the fields of `TrainingSettings`, and
            `top_k` and `sparsity` of `reft_r1`, `factors` and `start` of `reps`, `rank` of `loreft`.

    Returns:
        A VectorSet: `vectors[layer]`.

    Raises:
        InputError: for an unknown method, positions that a prompt lacks, or arguments of another method.
        DataError: for data that the method cannot use.
        HookPointError: for an unknown layer or site.
        VectorValueError: if positive and negative activations do not differ, or nothing was learned.

    Examples:
        The vector of Activation Addition, from one pair of token ids::

            one = sl.ContrastPairs.from_lists([[bos, wedding]], [[bos, space]])
            v = sl.extract(engine, one, "act_add", "resid_pre", layers=6, read=sl.where.index(1))[6]
    """
    seed = check_single_seed(seed)
    check_engine(engine)
    about = {"name": name, "method": method, "versions": library_versions(), "chat": chat}
    if method == "bipo" or method in LEARNED:
        learn_it = _learned if method == "bipo" else _trained
        return VectorSet((learn_it(engine, data, (site, layers, read), seed, learning, about),))
    if learning:
        raise InputError(f"{', '.join(sorted(learning))}: unknown to method {method!r} of extract.")
    pairs = _checked_pairs(data, check_method(method, ["bipo", *LEARNED]))
    reading = Reading.on(engine, site, layers, read, pool, chat, responses)
    pairs_per_chunk = check_integer(pairs_per_chunk, "pairs_per_chunk", least=1)
    values = _estimated(engine, pairs, method, reading, seed, pairs_per_chunk)
    about |= {"read": reading.where.to_json(), "pool": pool, "data_hash": pairs.hash, "n_pairs": len(pairs)}
    about |= {"notes": _notes(method, seed)}
    about |= {"responses": None if reading.responses is None else reading.responses.to_json()}
    points = [HookPoint(layer, site) for layer in reading.layers]
    made = tuple(made_vector(engine, point, row, **about) for point, row in zip(points, values, strict=True))
    return VectorSet(made, Origin(weakref.ref(engine), reading, seed))


def library_versions() -> dict[str, str]:
    """Versions of the libraries that numbers depend on."""
    found = {}
    for library in _LIBRARIES:
        try:
            found[library] = importlib.metadata.version(library)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _estimated(
    engine: Engine, pairs: ContrastPairs, method: str, reading: Reading, seed: int, size: int
) -> Float[Tensor, "n_layers d_model"]:
    """Streams the pairs through the method; checks that directions exist, and warns where they are doubtful."""
    prompts, n_pairs = [*pairs.positives, *pairs.negatives], len(pairs)
    order = (range(n_pairs), range(n_pairs, 2 * n_pairs)) if method != "lat" else random_pairs(n_pairs, seed)
    firsts, seconds = ([prompts[i] for i in side] for side in order)
    labels = labels_of(torch.tensor([list(side) for side in order]), n_pairs)
    found, start = Estimate(method), 0
    for first, second in reading.chunks(engine, firsts, seconds, size):
        stop = start + first.shape[1]
        found.add(Chunk(first, second, labels[:, start:stop]))
        start = stop
    found.check(reading.layers)
    vectors = found.vectors()
    found.check_axes(vectors, reading.layers)
    _warn_of_angle(method, found.cosines(vectors).tolist(), reading.layers)
    return vectors


def _warn_of_angle(method: str, cosines: Sequence[float], layers: Sequence[int]) -> None:
    """Warns of layers whose direction has a low cosine with the mean difference."""
    low = {layer: cosine for layer, cosine in zip(layers, cosines, strict=True) if abs(cosine) < LOW_COSINE}
    if not low:
        return
    reasons = {
        "pca_centred": "It leaves the mean difference out and finds what varies between the pairs; where all "
        "differences point one way, that is something else than the property. Use pca_uncentred or mean_diff.",
        "lat": "The largest variation among the prompts is then something else than the property; use mean_diff, or "
        "prompts that differ in nothing else.",
    }
    why = reasons.get(method, "It may separate the pairs by something that moves the model little; compare an effect.")
    shown = ", ".join(f"{layer} ({cosine:.2f})" for layer, cosine in list(low.items())[:8])
    more = f" and {len(low) - 8} more" if len(low) > 8 else ""
    warn(f"{method}: |cosine| with the mean difference is below {LOW_COSINE} at layers {shown}{more}. {why}")


def _checked_pairs(data: object, method: str) -> ContrastPairs:
    if not isinstance(data, ContrastPairs):
        raise DataError(
            f"Method {method!r} takes ContrastPairs, got {type(data).__name__}; methods that learn take Targets. "
            "Make pairs with sl.ContrastPairs.from_lists(positives, negatives), from_frame or from_jsonl."
        )
    if method == "act_add" and len(data) != 1:
        raise DataError(f"act_add takes exactly one pair, got {len(data)}; for the mean of several use 'mean_diff'.")
    return data


_Place: TypeAlias = tuple[str, Any, WhereLike]
"""Site, layers and positions, as `extract` is given them."""


def _learned(
    engine: Engine, data: object, place: _Place, seed: int, options: Mapping[str, Any], about: Mapping[str, Any]
) -> SteeringVector:
    """A vector by `bipo`."""
    settings = LearningSettings.of(options)
    if not isinstance(data, Targets):
        raise DataError(f"bipo takes Targets, whose log-probabilities it optimises, got {type(data).__name__}.")
    point = _one_point(engine, "bipo", *place)
    found = learn(engine, data, point, settings, seed=seed, chat=about["chat"])
    return made_vector(engine, point, found.values, data_hash=data.hash, notes=found.notes, **about)


def _trained(
    engine: Engine, data: object, place: _Place, seed: int, options: Mapping[str, Any], about: Mapping[str, Any]
) -> SteeringVector:
    """An edit by one of the methods that learn one."""
    method = about["method"]
    examples = Examples.of(data, method)
    point = _one_point(engine, method, *place)
    found = learn_edit(engine, examples, point, method, options, seed=seed, chat=about["chat"])
    values, low_rank = found.learned.values, found.learned.low_rank
    return made_vector(engine, point, values, low_rank, data_hash=examples.hash, training=found.report, **about)


def _one_point(engine: Engine, method: str, site: str, layers: Any, read: WhereLike) -> HookPoint:
    """Where a method that learns acts.

    Raises:
        InputError: for positions to read, or several layers.
    """
    if read is not None:
        raise InputError(f"{method} reads no activations; say where the vector is added with where=, not read=.")
    resolved = resolve_layers(layers, engine.info.n_layers)
    if len(resolved) != 1:
        raise InputError(
            f"{method} learns a vector for one layer at a time; layers names {len(resolved)}: layers=14, say."
        )
    return HookPoint(resolved[0], check_site(site))


def _notes(method: str, seed: int) -> str | None:
    """The card's note on the method: length and seed."""
    if method in KEEPS_LENGTH:
        return None
    return f"length 1; twos drawn with seed {seed}" if method == "lat" else "length 1"
