"""Both adapters on vLLM, at a `steerlab serve` and in this process, against TransformerLens: one server for all."""

import importlib.util
import json
import os

import anyio
import pytest
import torch

import steerlab as sl
from tests.tiny_models import SENTENCES, build_tiny_llama
from tests.vllm.conftest import OPTIONS, WIDTH, needs_vllm, set_up_vllm
from tests.vllm.served import KEY, Served

missing = [name for name in ("lm_eval", "inspect_ai") if importlib.util.find_spec(name) is None]
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError(f"not installed: {', '.join(missing)}")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.slow,
    pytest.mark.skipif(bool(missing), reason="lm_eval and inspect_ai are not here; `make test-peers` makes a place"),
    needs_vllm,
]

ASKED = [f"What of this: {sentence}" for sentence in SENTENCES[:4]]


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """A tiny Llama with heads that vLLM's CPU attention takes."""
    folder = tmp_path_factory.mktemp("served") / "llama"
    return build_tiny_llama(folder, context=512, hidden_size=WIDTH, intermediate_size=256)


@pytest.fixture(scope="module")
def lens(path):
    with sl.load(path, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def plan():
    values = torch.randn(WIDTH, generator=torch.Generator().manual_seed(0))
    vector = sl.SteeringVector.from_tensor(values, layer=1)
    inner = sl.SteeringVector.from_tensor(values.flip(0), layer=2, site="attn_out")
    return sl.Plan(sl.add(vector, dose=0.7), sl.add(inner, coef=0.1))


@pytest.fixture(scope="module")
def server(path, tmp_path_factory):
    options = ["--layers", "1,2", "--sites", "attn_out,resid_post", "--allow-vectors"]
    served = Served(path, options, tmp_path_factory.mktemp("log") / "server.txt")
    served.start()
    yield served
    served.end()


@pytest.fixture(scope="module")
def remote(server, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEERLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        with server.engine() as engine:
            assert engine.tokenizer is not None
            yield engine


def requests(kind, arguments):
    from lm_eval.api.instance import Instance

    return [Instance(kind, {}, one, index) for index, one in enumerate(arguments)]


def test_the_harness_gives_the_numbers_of_the_local_engine(server, remote, lens, plan, tmp_path):
    from steerlab.scoring.harness import HarnessModel

    (tmp_path / "plan.json").write_text(plan.to_json())
    stated = f"pretrained={server.url},api_key={KEY},plan={tmp_path / 'plan.json'}"
    named = HarnessModel.create_from_arg_string(stated)
    pairs = requests("loglikelihood", [("The ferry leaves", " at seven"), ("The ferry leaves", " again"), ("", "Two")])
    rolling = requests("loglikelihood_rolling", [(SENTENCES[0],), (" ".join(SENTENCES * 4),)])
    words = requests("generate_until", [(text, {"until": ["."], "max_gen_toks": 8}) for text in SENTENCES[:4]])
    for far, near in ((HarnessModel(remote), None), (HarnessModel(remote, plan), plan), (named, plan)):
        local = HarnessModel(lens, near)
        found, expected = (one.loglikelihood(pairs, disable_tqdm=True) for one in (far, local))
        assert [p for p, _ in found] == pytest.approx([p for p, _ in expected], abs=1e-4)
        assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
        sums = [one.loglikelihood_rolling(rolling, disable_tqdm=True) for one in (far, local)]
        assert sums[0] == pytest.approx(sums[1], abs=2e-3)
        assert far.generate_until(words, disable_tqdm=True) == local.generate_until(words, disable_tqdm=True)
        assert far.get_model_info()["plan_hash"] == local.get_model_info()["plan_hash"]
    plain, steered = (HarnessModel(remote, one).loglikelihood(pairs, disable_tqdm=True) for one in (None, plan))
    assert all(abs(a - b) > 1e-3 for (a, _), (b, _) in zip(plain, steered, strict=True))
    named.engine.close()


def completions(model, engine, plan):
    """What a model answers to requests at the same time, and what an engine does."""
    from inspect_ai.model import GenerateConfig

    found = {}

    async def ask(text):
        found[text] = await model.generate(text, config=GenerateConfig(max_tokens=10, temperature=0.0))

    async def ask_all():
        async with anyio.create_task_group() as group:
            for text in ASKED:
                group.start_soon(ask, text)
        await model.api.aclose()

    anyio.run(ask_all)
    prompts = [[{"role": "user", "content": text}] for text in ASKED]
    greedy = sl.SamplingPolicy.greedy()
    made = engine.generate(prompts, plan=plan, policy=greedy, max_new_tokens=10)
    outputs = [found[text] for text in ASKED]
    return (
        [(one.completion, one.usage.total_tokens, one.metadata["edited"]) for one in outputs],
        [
            (row.text, len(ids) + len(row.token_ids), [receipt.edited])
            for row, ids, receipt in zip(made, made.prompt_token_ids, made.receipts, strict=True)
        ],
    )


def test_inspect_on_a_server(server, remote, lens, plan):
    from inspect_ai.model import get_model

    from steerlab.scoring.inspect_ai import inspect_model

    stated = {"base_url": server.url, "api_key": KEY, "plan": json.loads(plan.to_json())}
    for model in (inspect_model(remote, plan), get_model("steerlab/tiny", **stated)):
        found, expected = completions(model, lens, plan)
        assert found == expected


def test_inspect_on_vllm_in_process(path, lens, plan):
    """The layers and sites that the plan needs are wired."""
    from inspect_ai.model import get_model

    with set_up_vllm(in_process=True):
        model = get_model(f"steerlab/{path}", engine="vllm", plan=json.loads(plan.to_json()), **OPTIONS)
        assert (model.api.engine.config.layers, model.api.engine.config.sites) == ((1, 2), ("attn_out", "resid_post"))
        found, expected = completions(model, lens, plan)
    assert found == expected
