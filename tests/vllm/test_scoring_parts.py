"""The worker's side of scoring without an engine: sums over shards, chunks, passes that repeat, capped cache hits."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import steerlab as sl
from steerlab.engines.vllm._wire.request_spec import RequestSpec, ScoreSpec
from steerlab.engines.vllm._worker.row_sums import log_probs_of, row_sums
from steerlab.measures.quantities import LogDistribution, PolicyEntropy, PolicyLogQ, TokenLogProb
from tests.interpreted import run_interpreted

pytestmark = pytest.mark.vllm

D_MODEL, D_VOCAB = 8, 13
NUCLEUS = sl.SamplingPolicy(temperature=0.7, top_p=0.8)
SCALARS = (TokenLogProb(), PolicyEntropy(NUCLEUS), PolicyLogQ(NUCLEUS))


# --- sums over parts of the vocabulary ----------------------------------------------------------------------------


@given(
    st.integers(0, 2**31), st.integers(1, 5), st.lists(st.integers(0, 20), min_size=1, max_size=4), st.floats(-1e4, 1e4)
)
def test_ranks_that_exchange_sums_know_the_log_probability(seed, rows, widths, shift):
    generator = torch.Generator().manual_seed(seed)
    d_vocab = max(1, sum(widths))
    widths = widths if sum(widths) else [1]
    logits = 5 * torch.randn(rows, d_vocab, generator=generator) + shift
    tokens = torch.randint(d_vocab, (rows,), generator=generator)
    parts, offset = [], 0
    for width in widths:
        shard = torch.full((rows, width + 3), 1e9)  # padding that would win
        shard[:, :width] = logits[:, offset : offset + width]
        parts.append(row_sums(shard, tokens, width, offset))
        offset += width
    found = log_probs_of(torch.stack(parts))
    wanted = logits.double().log_softmax(dim=-1).gather(-1, tokens[:, None])[:, 0]
    assert (found <= 1e-6).all()
    torch.testing.assert_close(found.double(), wanted, atol=1e-5 + 2e-7 * abs(shift), rtol=1e-6)


def test_impossible_tokens_are_minus_infinity_and_nothing_is_nan():
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, -math.inf]])
    for token, wanted in ((0, -math.inf), (1, 0.0), (3, -math.inf)):
        halves = [
            row_sums(logits[:, :2], torch.tensor([token]), 2, 0),
            row_sums(logits[:, 2:], torch.tensor([token]), 2, 2),
        ]
        assert log_probs_of(torch.stack(halves)).tolist() == [wanted]


def test_the_gpu_kernel_equals_the_cpu():
    """In Triton's interpreter."""
    pytest.importorskip("triton", reason="Triton comes with torch on Linux only")
    run_interpreted(_KERNEL)


_KERNEL = """
import torch
from steerlab.engines.vllm._worker.row_sums import row_sums
from steerlab.engines.vllm._worker.row_sums_triton import launch

torch.manual_seed(0)
for width, n_valid, offset in ((10, 7, 0), (5000, 4990, 4990), (9000, 9000, 100), (6, 0, 12)):
    logits = 20 * torch.randn(4, width) - 50
    logits[3, :n_valid] = -float("inf")
    tokens = torch.tensor([offset, offset + max(0, n_valid - 1), offset + n_valid, 3])
    one, other = row_sums(logits, tokens, n_valid, offset), launch(logits, tokens, n_valid, offset)
    torch.testing.assert_close(one, other, rtol=1e-5, atol=0)
"""


# --- passes -------------------------------------------------------------------------------------------------------


@pytest.fixture
def weight():
    return torch.randn(D_VOCAB, D_MODEL, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def make(weight):
    """A worker's measuring with a plain head, logits for so many rows at once, and whole rows one by one."""
    from steerlab.engines.vllm._worker.head import Head
    from steerlab.engines.vllm._worker.measuring import SCRATCH_PER_LOGIT, Buffers, Measuring

    def fill(hidden, out):
        out[:, :D_VOCAB] = hidden @ weight.t()
        out[:, D_VOCAB:] = 1e9

    def measuring(rows):
        head = Head(D_VOCAB + 3, D_VOCAB, 0, D_VOCAB, 1, fill, "test")
        buffers = Buffers(torch.empty(rows, D_VOCAB + 3), SCRATCH_PER_LOGIT * D_VOCAB)
        return Measuring(head, buffers, 4)

    return measuring


def account(start, tokens, measures):
    from steerlab.engines.vllm._worker.request_record import RequestRecord

    return RequestRecord(RequestSpec("x", None, score=ScoreSpec(start, tuple(tokens), tuple(measures))))


def stream(seed, length):
    return torch.randn(length, D_MODEL, generator=torch.Generator().manual_seed(seed))


def passes(measuring, *rows):
    """Runs one pass of (slot, hidden states of the request, start, length), with padding behind it."""
    slots, starts, lengths = (np.array([row[i] for row in rows], dtype=np.int64) for i in (0, 2, 3))
    measuring.begin(slots, starts, lengths)
    parts = [hidden[start : start + length] for _, hidden, start, length in rows]
    measuring.score(torch.cat([*parts, torch.full((3, D_MODEL), torch.nan)]))


def wanted(weight, hidden, start, tokens, measures):
    logits = hidden[start : start + len(tokens)] @ weight.t()
    return np.stack([measure(logits, torch.tensor(tokens)).numpy() for measure in measures])


@pytest.mark.parametrize("rows", [1, 2, 3, 100])
@pytest.mark.parametrize("chunk", [1, 2, 4, 9])
def test_chunks_and_company_change_nothing(make, weight, rows, chunk):
    from steerlab.engines.vllm._worker.request_record import gathered, gathered_distribution

    measuring = make(rows)
    long, short = stream(1, 9), stream(2, 9)
    first, second = account(3, [1, 12, 5, 7], SCALARS), account(0, [4, 4], [LogDistribution(), *SCALARS[:2]])
    measuring.enter(2, first)
    measuring.enter(0, second)
    for start in range(0, 9, chunk):
        length = min(chunk, 9 - start)
        passes(measuring, (2, long, start, length), (1, long, start, length), (0, short, start, length))
    at, values = gathered(first)
    assert at.tolist() == [0, 1, 2, 3]
    np.testing.assert_allclose(values, wanted(weight, long, 3, [1, 12, 5, 7], SCALARS), atol=1e-5)
    at, values = gathered(second)
    assert at.tolist() == [0, 1]
    np.testing.assert_allclose(values, wanted(weight, short, 0, [4, 4], SCALARS[:2]), atol=1e-5)
    np.testing.assert_allclose(
        gathered_distribution(second), (short[:2] @ weight.t()).log_softmax(-1).numpy(), atol=1e-5
    )
    assert gathered_distribution(first) is None


@pytest.mark.parametrize("chunk", [1, 2, 9])
def test_the_first_position_serves_several_tokens(make, weight, chunk):
    from steerlab.engines.vllm._worker.request_record import RequestRecord, gathered

    measuring, hidden = make(2), stream(1, 9)
    spec = ScoreSpec(4, (1, 2, 3, 7, 8), SCALARS, n_first=3)
    assert [spec.position(i) for i in range(5)] == [4, 4, 4, 5, 6]
    one = RequestRecord(RequestSpec("x", None, score=spec))
    measuring.enter(0, one)
    for start in range(0, 9, chunk):
        passes(measuring, (0, hidden, start, min(chunk, 9 - start)))
    at, values = gathered(one)
    assert at.tolist() == [0, 1, 2, 3, 4]
    logits = hidden[[4, 4, 4, 5, 6]] @ weight.t()
    np.testing.assert_allclose(values, [m(logits, torch.tensor(spec.tokens)).numpy() for m in SCALARS], atol=1e-5)


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 4), st.integers(0, 12), st.integers(0, 12))
def test_tokens_between_positions_are_those_whose_position_lies_there(start, rest, n_first, first, last):
    spec = ScoreSpec(start, tuple(range(n_first + rest - 1)), (), n_first=n_first)
    inside = [i for i in range(len(spec.tokens)) if first <= spec.position(i) < last]
    assert list(spec.between(first, max(first, last))) == inside


def test_a_position_that_is_run_again_has_its_later_value(make, weight):
    from steerlab.engines.vllm._worker.request_record import gathered, gathered_distribution

    measuring, one = make(2), account(1, [3, 4, 5], [TokenLogProb(), LogDistribution()])
    early, late = stream(1, 5), stream(2, 5)
    measuring.enter(0, one)
    passes(measuring, (0, early, 0, 3))
    measuring.leave(0)
    passes(measuring, (1, early, 0, 2))
    measuring.enter(3, one)
    passes(measuring, (3, late, 0, 2))
    passes(measuring, (3, late, 2, 3))
    at, values = gathered(one)
    assert at.tolist() == [0, 1, 2]
    np.testing.assert_allclose(values, wanted(weight, late, 1, [3, 4, 5], [TokenLogProb()]), atol=1e-5)
    assert gathered_distribution(one).shape == (3, D_VOCAB)
    np.testing.assert_allclose(gathered_distribution(one)[[0, 1, 2], [3, 4, 5]], values[0], atol=1e-5)


def test_a_position_that_never_ran_is_missing(make):
    from steerlab.engines.vllm._worker.request_record import gathered

    measuring, one = make(2), account(1, [3, 4, 5], [TokenLogProb()])
    measuring.enter(0, one)
    assert gathered(one)[1].shape == (1, 0)
    passes(measuring, (0, stream(1, 5), 2, 3))
    assert gathered(one)[0].tolist() == [1, 2]


def test_draws_are_kept_by_position(make):
    from steerlab.engines.vllm._worker.request_record import RequestRecord, gathered

    measuring = make(2)
    accounts = {slot: RequestRecord(RequestSpec(f"{slot}", None, draw=True)) for slot in (0, 1, 3)}
    for slot, one in accounts.items():
        measuring.enter(slot, one)
    kept = {slot: [] for slot in accounts}
    for step in range(3):
        slots = np.array([3, 2, 0, 1]) if step else np.array([1, 0, 2, 3])
        measuring.begin(slots, np.full(4, 5 + step), np.ones(4, dtype=np.int64))
        assert measuring.is_drawing
        logits = torch.randn(4, D_VOCAB, generator=torch.Generator().manual_seed(step))
        logits[:, 4:7] = -math.inf
        tokens = logits.argmax(dim=-1).int()
        measuring.draw(slots, logits, tokens)
        assert not measuring.is_drawing
        for row, slot in enumerate(slots.tolist()):
            if slot in accounts:
                kept[slot].append(logits[row].log_softmax(-1).max().item())
    for slot, one in accounts.items():
        at, values = gathered(one)
        assert at.tolist() == [5, 6, 7]
        assert values[0].tolist() == pytest.approx(kept[slot], abs=1e-6)


def test_of_a_token_that_was_drawn_again_the_later_draw_counts():
    from steerlab.engines.vllm._worker.request_record import DRAWN, PassValues, RequestRecord, gathered

    one = RequestRecord(RequestSpec("x", None, draw=True))
    for position, value in ((6, -1.0), (7, -2.0), (5, -3.0), (6, -4.0)):
        one.draws.add(PassValues({DRAWN: torch.tensor([9.0, value])}), 1, position)
    at, values = gathered(one)
    assert at.tolist() == [5, 6, 7]
    assert values.tolist() == [[-3.0, -4.0, -2.0]]


@given(st.integers(1, 1 << 24), st.integers(1, 4096))
def test_the_buffers_keep_to_their_budget(budget, n_tokens):
    from steerlab.engines.vllm._worker.head import Head
    from steerlab.engines.vllm._worker.measuring import Buffers

    head = Head(512, 500, 0, 1000, 2, lambda hidden, out: None, "test")
    buffers = Buffers.make(head, budget, n_tokens, torch.device("cpu"))
    assert 1 <= len(buffers.logits) <= n_tokens
    assert buffers.n_bytes <= max(budget, 4 * 512 + budget // 2)
    assert buffers.rows_at_once(1000) >= 1


def test_half_precision_weights_are_widened_where_products_cannot_be():
    from steerlab.engines.vllm._worker.head import VOCABULARY_BLOCK, _widening

    generator = torch.Generator().manual_seed(0)
    n_rows = VOCABULARY_BLOCK + 70
    weight, bias, hidden = (torch.randn(*s, generator=generator).bfloat16() for s in ((n_rows, 6), (n_rows,), (3, 6)))
    out = torch.full((3, n_rows), torch.nan)
    _widening(weight, bias)(hidden, out)
    wanted = hidden.double() @ weight.double().t() + bias.double()
    torch.testing.assert_close(out.double(), wanted, atol=1e-5, rtol=1e-5)


# --- the way there ------------------------------------------------------------------------------------------------


@given(st.integers(0, 99), st.lists(st.integers(0, 500), min_size=1), st.sets(st.sampled_from(SCALARS)))
def test_what_is_scored_survives_the_way_to_the_workers(start, tokens, measures):
    spec = RequestSpec("7", None, score=ScoreSpec(start, tuple(tokens), tuple(measures)), draw=True)
    ((key, text),) = spec.to_args().items()
    body = json.loads(text)

    def read(changed):
        return RequestSpec.of(SimpleNamespace(extra_args={key: json.dumps(changed)}))

    assert read(body) == spec
    assert read({**body, "score": {**body["score"], "start": "0"}}) is None
    assert read({**body, "score": {**body["score"], "measures": [{"kind": "no such"}]}}) is None
    assert read({**body, "draw": {"temperature": 1}}) is None


def test_a_hit_ends_before_the_first_scored_position():
    from steerlab.engines.vllm._patches.cache_hits import _Shorter, longest_hit

    def request(num_tokens, spec):
        args = None if spec is None else spec.to_args()
        return SimpleNamespace(num_tokens=num_tokens, sampling_params=SimpleNamespace(extra_args=args), other=5)

    scored = RequestSpec("7", None, score=ScoreSpec(40, (1, 2, 3), (TokenLogProb(),)))
    assert longest_hit(request(43, scored)) == 40
    assert longest_hit(request(41, scored)) is None  # vLLM always runs the last token
    assert longest_hit(request(43, RequestSpec("7", None, read=((0, 1),)))) is None
    assert longest_hit(request(43, None)) is None
    shorter = _Shorter(request(43, scored), 40)
    assert (shorter.num_tokens, shorter.other) == (41, 5)
