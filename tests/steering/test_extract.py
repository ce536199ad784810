import pickle
import warnings

import pytest
import torch

import steerlab as sl
from steerlab.core.contrast_pairs import balanced_flips
from steerlab.core.errors import DataError, HookPointError, InputError, VectorValueError
from steerlab.steering.extraction._pair_activations import read_pairs
from steerlab.steering.extraction.estimators import METHODS, estimate

POSITIVES = [
    "What a wonderful day",
    "The soup was happy and warm",
    "She really liked it",
    "The ferry was quiet and wonderful!",
    "I liked the table this morning",
]
NEGATIVES = [
    "What a terrible day",
    "The soup was sad and stale",
    "She never knew it",
    "The ferry was slow and terrible!",
    "I stopped the table this evening",
]
PAIRED = [method for method in METHODS if method != "act_add"]


@pytest.fixture
def engine(tiny_llama_engine):
    return tiny_llama_engine


@pytest.fixture
def pairs():
    return sl.ContrastPairs.from_lists(POSITIVES, NEGATIVES, groups=["a", "a", "b", "b", "c"])


def quiet(*args, **kwargs):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*cosine.*", category=UserWarning)
        return sl.extract(*args, **kwargs)


def stacked(vectors):
    return torch.stack([vectors[layer].values for layer in vectors])


# --- what is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", PAIRED)
@pytest.mark.parametrize("size", [1, 2, 64])
def test_vectors_are_those_of_captured_rows_whatever_the_chunks(engine, pairs, method, size):
    prompts = [*POSITIVES, *NEGATIVES]
    rows = engine.capture(prompts, layers="all", where=sl.where.last_prompt(), pool="mean").stack()
    expected = estimate(method, rows[:, :5], rows[:, 5:], seed=3)
    found = quiet(engine, pairs, method, seed=3, pairs_per_chunk=size)
    assert list(found) == [0, 1, 2, 3]
    torch.testing.assert_close(stacked(found), expected, rtol=1e-3, atol=1e-4)


def test_positions_pooling_site_and_layers_are_those_asked_for(engine, pairs):
    read = sl.where.prompt() & ~sl.where.index(0)
    prompts = [*POSITIVES, *NEGATIVES]
    found = sl.extract(engine, pairs, site="mlp_out", layers=[-1, 1], read=read, pool="last", name="mood")
    rows = engine.capture(prompts, layers=[1, 3], site="mlp_out", where=read, pool="last").stack()
    torch.testing.assert_close(stacked(found), (rows[:, :5] - rows[:, 5:]).mean(dim=1), rtol=1e-4, atol=1e-5)
    card = found[3].card
    assert (card.name, card.method, card.pool, card.n_pairs) == ("mood", "mean_diff", "last", 5)
    assert card.read == read.to_json()
    assert card.data_hash == pairs.hash
    assert card.extracted_at == "blocks.3.hook_mlp_out"
    assert card.median_norm == engine.median_norm(3, "mlp_out")


def test_a_chat_is_read_as_a_chat(engine, pairs):
    as_chat = sl.extract(engine, pairs, layers=2, chat=True)[2]
    messages = [[[{"role": "user", "content": text}] for text in side] for side in (POSITIVES, NEGATIVES)]
    spelled = sl.extract(engine, sl.ContrastPairs.from_lists(*messages), layers=2)[2]
    torch.testing.assert_close(as_chat.values, spelled.values)
    assert as_chat.cosine(sl.extract(engine, pairs, layers=2)[2]) < 0.99


def test_all_layers_share_the_passes(engine, pairs):
    passes = []
    point = engine.model.blocks[0].hook_in
    point.add_hook(lambda value, hook: passes.append(tuple(value.shape[:1])))
    try:
        engine.median_norm(0)  # measured once, in passes of its own
        passes.clear()
        sl.extract(engine, pairs, pairs_per_chunk=3)
    finally:
        point.remove_hooks()
    assert passes == [(6,), (4,)]


def test_the_mean_difference_is_to_the_bit_that_of_all_rows(engine, pairs):
    acts = read_pairs(engine, pairs, site="resid_post", layers=[2], read=sl.where.last_prompt())
    expected = (acts.positive[2].double() - acts.negative[2].double()).mean(dim=0).float()
    assert torch.equal(sl.extract(engine, pairs, layers=2)[2].values, expected)


def test_flips_extract_again(engine, pairs):
    import numpy as np

    flipped = pairs.flipped(balanced_flips(pairs.groups, np.random.default_rng(0)))
    assert abs(sl.extract(engine, flipped, layers=2)[2].cosine(sl.extract(engine, pairs, layers=2)[2])) < 0.99


# --- one pair of token ids ----------------------------------------------------------------------------------------


def test_activation_addition_is_one_call(engine):
    ids = [engine.tokenizer(text)["input_ids"] for text in ("day", "sad")]
    bos = engine.tokenizer.bos_token_id
    width = min(map(len, ids))
    with_bos = [[bos, *row[:width]] for row in ids]
    one = sl.ContrastPairs.from_lists([with_bos[0]], [with_bos[1]])
    found = sl.extract(engine, one, "act_add", "resid_pre", layers=[1, 2], read=sl.where.index(1))
    rows = engine.capture(with_bos, layers=[1, 2], site="resid_pre", where=sl.where.index(1), pool="mean")
    for layer in (1, 2):
        torch.testing.assert_close(found[layer].values, rows[layer][0] - rows[layer][1])
    assert found[1].card.notes is None


def test_activation_addition_takes_one_pair(engine, pairs):
    with pytest.raises(DataError, match=r"exactly one pair, got 5; .*'mean_diff'"):
        sl.extract(engine, pairs, "act_add")


# --- doubts -------------------------------------------------------------------------------------------------------


def clustered(engine):
    """Pairs whose last tokens differ in one and the same way, and little else."""
    starts = ["What a", "The soup was", "She", "The ferry leaves, and it is", "I liked the", "Two plus two", "Nobody"]
    return sl.ContrastPairs.from_lists([f"{s} wonderful" for s in starts], [f"{s} quiet" for s in starts])


def test_a_centred_axis_that_misses_the_difference_says_so(engine):
    pairs = clustered(engine)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mean = sl.extract(engine, pairs, layers=0)[0]
        uncentred = sl.extract(engine, pairs, "pca_uncentred", layers=0)[0]
    assert uncentred.cosine(mean) > 0.98
    with pytest.warns(UserWarning, match=r"pca_centred: .* layers 0 \(.*leaves the mean difference out"):
        centred = sl.extract(engine, pairs, "pca_centred", layers=0)[0]
    assert abs(centred.cosine(mean)) < 0.2


def test_activations_that_are_the_same_name_their_layers(engine):
    pairs = sl.ContrastPairs.from_lists(["What a day", "So it goes"], ["That sad day", "How it goes"])
    with pytest.raises(VectorValueError, match=r"same at layers \[0\]"):
        sl.extract(engine, pairs, site="resid_pre")
    sl.extract(engine, pairs, site="resid_pre", layers=[1, 2, 3])


def test_directions_say_their_length(engine, pairs):
    assert quiet(engine, pairs, "lda", layers=2)[2].card.notes == "length 1"
    assert quiet(engine, pairs, "lat", layers=2, seed=4)[2].card.notes == "length 1; twos drawn with seed 4"


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"method": "magic"}, InputError, "known: mean_diff"),
        ({"pool": None}, InputError, "one row per prompt"),
        ({"layers": 9}, HookPointError, "Layer 9"),
        ({"site": "resid"}, HookPointError, "Unknown site"),
        ({"read": "last"}, InputError, "read takes positions"),
        ({"read": sl.where.index(50)}, InputError, "selects no token"),
        ({"pairs_per_chunk": 0}, InputError, "integer ≥ 1, got 0"),
        ({"steps": 3}, InputError, "steps: unknown to method 'mean_diff'"),
        ({"seed": -1}, InputError, "seed"),
        ({"read": sl.where.mask([[True, False]] * 10)}, InputError, "mask with one row per prompt"),
    ],
)
def test_arguments_that_cannot_be_used(engine, pairs, options, error, message):
    with pytest.raises(error, match=message):
        sl.extract(engine, pairs, **options)


@pytest.mark.usefixtures("unchecked_types")
def test_targets_are_not_pairs(engine):
    targets = sl.Targets.from_records(
        [{"prompt": "It was", "target": " good", "label": 1}, {"prompt": "It was", "target": " bad", "label": -1}]
    )
    with pytest.raises(DataError, match="takes ContrastPairs, got Targets; methods that learn take Targets"):
        sl.extract(engine, targets)


def test_a_set_remembers_its_making_only_while_it_lives(engine, pairs):
    found = sl.extract(engine, pairs, layers=[1, 2])
    assert found.origin.engine() is engine
    copy = pickle.loads(pickle.dumps(found))
    assert copy == found
    assert copy.origin is None


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("method", ["mean_diff", "bipo"])
def test_an_alias_is_no_engine(pairs, method):
    with pytest.raises(InputError, match=r"sl\.load.*got 'smollm2-135m'"):
        sl.extract("smollm2-135m", pairs, method)
