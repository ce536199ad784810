"""Names of cache blocks: those of a shared prefix are taken over, and are the ones that vLLM would have given."""

import pytest

from steerlab.engines.vllm._wire.request_spec import RequestSpec

BLOCK = 16
PREFIX = list(range(100, 200))
pytestmark = pytest.mark.vllm


@pytest.fixture
def calls():
    return []


@pytest.fixture
def hasher(calls):
    """The wrapped hasher, over vLLM's own, which notes how many blocks it named."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash

    from steerlab.engines.vllm._patches.shared_prefixes import SharedPrefixHasher

    init_none_hash(sha256)
    own = plain()

    def counting(request):
        found = own(request)
        calls.append(len(found))
        return found

    return SharedPrefixHasher(counting, BLOCK)


def plain():
    """VLLM's own hasher, with the names of steered blocks."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    from steerlab.engines.vllm._patches import block_keys

    block_keys.install()
    hasher = kv_cache_utils.get_request_block_hasher(BLOCK, sha256)
    return getattr(hasher, "_original", hasher)


def request(token_ids, hasher, *, salt=None, **spec):
    from vllm import SamplingParams
    from vllm.v1.request import Request

    args = RequestSpec("row", **{"plan": None, **spec}).to_args()
    params = SamplingParams(max_tokens=1, extra_args=args)
    return Request(
        request_id="0",
        prompt_token_ids=list(token_ids),
        sampling_params=params,
        pooling_params=None,
        cache_salt=salt,
        block_hasher=hasher,
    )


def test_the_names_are_those_that_vllm_gives(hasher, calls):
    targets = [[7] * 40, [8] * 3, [9] * 200]
    for target in targets:
        found = request(PREFIX + target, hasher, prefix=("a", len(PREFIX)))
        assert found.block_hashes == request(PREFIX + target, plain()).block_hashes
    whole = len(PREFIX) // BLOCK
    assert calls == [(100 + 40) // BLOCK, 103 // BLOCK - whole, 300 // BLOCK - whole]


def test_tokens_that_come_later_are_named_as_ever(hasher):
    found, other = (request([*PREFIX, 7], h, prefix=("a", len(PREFIX))) for h in (hasher, plain()))
    for one in (found, other):
        one.append_output_token_ids(list(range(40)))
    assert found.block_hashes == other.block_hashes
    assert len(found.block_hashes) == 141 // BLOCK


def test_edits_are_part_of_the_names(hasher):
    edits = {"plan": "abc", "groups": (((20, 30), (90, 120)),)}
    for target in ([7] * 40, [8] * 40):
        found = request(PREFIX + target, hasher, prefix=("a", len(PREFIX)), **edits)
        assert found.block_hashes == request(PREFIX + target, plain(), **edits).block_hashes
        assert found.block_hashes[1] != request(PREFIX + target, plain()).block_hashes[1]


@pytest.mark.parametrize("change", ["another token", "another salt", "shorter"])
def test_a_prefix_that_is_not_shared_is_not_taken_over(hasher, change):
    request(PREFIX + [7] * 20, hasher, prefix=("a", len(PREFIX)))
    ids, salt = PREFIX + [7] * 20, None
    if change == "another token":
        ids = [5, *ids[1:]]
    elif change == "another salt":
        salt = "mine"
    else:
        ids = ids[:40]
    found = request(ids, hasher, salt=salt, prefix=("a", len(PREFIX)))
    assert found.block_hashes == request(ids, plain(), salt=salt).block_hashes


def test_few_prefixes_are_remembered(hasher, calls):
    from steerlab.engines.vllm._patches.shared_prefixes import REMEMBERED

    for number in range(REMEMBERED + 1):
        request(PREFIX, hasher, prefix=(f"{number}", len(PREFIX)))
    calls.clear()
    request(PREFIX, hasher, prefix=(f"{REMEMBERED}", len(PREFIX)))
    request(PREFIX, hasher, prefix=("0", len(PREFIX)))  # forgotten, so all its blocks are named again
    assert calls == [0, len(PREFIX) // BLOCK]


def test_the_scheduler_uses_it():
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.engine import core

    from steerlab.engines.vllm._patches.shared_prefixes import SharedPrefixHasher, install

    install()
    install()
    assert core.get_request_block_hasher is kv_cache_utils.get_request_block_hasher
    hasher = core.get_request_block_hasher(BLOCK, hash)
    assert isinstance(hasher, SharedPrefixHasher)
    assert not isinstance(hasher._original, SharedPrefixHasher)
