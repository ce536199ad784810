"""The provider for inspect_ai against the engine itself and in inspect's own runs, to be run by `make test-peers`."""

import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import anyio
import pytest
import torch

import steerlab as sl
from steerlab.core._spelling import token_text
from steerlab.engines.toy import ToyEngine
from tests.docs.pages import ROOT, blocks
from tests.tiny_models import SENTENCES

missing = [name for name in ("inspect_ai",) if importlib.util.find_spec(name) is None]
if missing and os.environ.get("STEERLAB_REQUIRE_PEERS"):
    raise ImportError(f"not installed: {', '.join(missing)}")

pytestmark = [
    pytest.mark.peers,
    pytest.mark.skipif(bool(missing), reason="inspect_ai is not in this environment; `make test-peers` makes one"),
]

ASKED = [f"What of this: {sentence}" for sentence in SENTENCES[:5]]
TASK = """
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate

@task
def words():
    asked = [Sample(input=f"Where is the {thing}?", target="the") for thing in ("ferry", "clock", "soup")]
    return Task(dataset=asked, solver=generate(), scorer=includes())
"""


@pytest.fixture(scope="module")
def plan():
    values = torch.randn(64, generator=torch.Generator().manual_seed(0))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1, name="north"), coef=1.0))


@pytest.fixture
def here(tmp_path, monkeypatch):
    """An empty directory with a task; inspect keeps its data there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


def answers(model, asked, **settings):
    """What a model gives to requests that are made at the same time; an exception where it gives none."""
    from inspect_ai.model import GenerateConfig

    found = [None] * len(asked)

    async def ask(index):
        try:
            found[index] = await model.generate(asked[index], config=GenerateConfig(**settings))
        except Exception as error:
            found[index] = error

    async def ask_all():
        async with anyio.create_task_group() as group:
            for index in range(len(asked)):
                group.start_soon(ask, index)

    anyio.run(ask_all)
    return found


@pytest.fixture
def calls(tiny_llama_engine, monkeypatch):
    """How many prompts each call to the engine had."""
    sizes, generate = [], tiny_llama_engine.generate

    def counted(prompts, **options):
        sizes.append(len(prompts))
        return generate(prompts, **options)

    monkeypatch.setattr(tiny_llama_engine, "generate", counted)
    return sizes


@pytest.mark.parametrize("steered", [False, True])
def test_requests_get_in_one_batch_what_the_engine_gives(tiny_llama_engine, plan, calls, steered):
    from steerlab.scoring.inspect_ai import inspect_model

    plan = plan if steered else None
    model = inspect_model(tiny_llama_engine, plan)
    settings = {"max_tokens": 12, "temperature": 0.8, "top_p": 0.9, "top_k": 50, "num_choices": 2, "seed": 7}
    settings |= {"stop_seqs": ["e"], "logprobs": True, "extra_body": {"min_p": 0.01, "repetition_penalty": 1.1}}
    found = answers(model, ASKED, **settings)
    assert calls == [len(ASKED)]
    policy = sl.SamplingPolicy(temperature=0.8, top_p=0.9, top_k=50, min_p=0.01, repetition_penalty=1.1)
    expected = tiny_llama_engine.generate(
        [[{"role": "user", "content": text}] for text in ASKED],
        plan=plan,
        policy=policy,
        max_new_tokens=12,
        n=2,
        seed=[7] * len(ASKED),
        stop=["e"],
    )
    reasons = {"eos": "stop", "stop": "stop", "length": "max_tokens"}
    for index, output in enumerate(found):
        rows = [row for row in expected if row.prompt_index == index]
        assert [choice.message.content for choice in output.choices] == [row.text for row in rows]
        assert [choice.stop_reason for choice in output.choices] == [reasons[row.finish_reason] for row in rows]
        for choice, row in zip(output.choices, rows, strict=True):
            assert [one.logprob for one in choice.logprobs.content] == pytest.approx(row.token_log_probs)
            spelled = [token_text(tiny_llama_engine.tokenizer, token) for token in row.token_ids]
            assert [one.token for one in choice.logprobs.content] == spelled
        n_new = sum(len(row.token_ids) for row in rows)
        assert output.usage.input_tokens == len(expected.prompt_token_ids[index])
        assert (output.usage.output_tokens, output.usage.total_tokens) == (n_new, output.usage.input_tokens + n_new)
        edited = [receipt.edited for receipt in expected.receipts if receipt.prompt_index == index]
        assert output.metadata == {
            "seed": 7,
            "plan_hash": plan.hash if steered else None,
            "edited": edited,
            "ran_on": expected.engine,
        }
        assert output.model == (
            f"{tiny_llama_engine.info.name}+{plan.hash}" if steered else tiny_llama_engine.info.name
        )
    assert {choice.stop_reason for output in found for choice in output.choices} == {"stop", "max_tokens"}


def test_models_of_one_engine_take_turns(tiny_llama_engine, plan, monkeypatch):
    """Inspect runs several models at once, and hooks of one plan must not act in another's pass."""
    from steerlab.scoring.inspect_ai import inspect_model

    generate, inside, most = tiny_llama_engine.generate, [], []

    def slow(prompts, **options):
        inside.append(None)
        most.append(len(inside))
        time.sleep(0.2)
        try:
            return generate(prompts, **options)
        finally:
            inside.pop()

    monkeypatch.setattr(tiny_llama_engine, "generate", slow)
    arms = [None, plan, plan.scaled(2.0)]
    found = {}

    async def ask(arm):
        from inspect_ai.model import GenerateConfig

        config = GenerateConfig(max_tokens=8, temperature=0.0)
        found[arm] = (await inspect_model(tiny_llama_engine, arm).generate(ASKED[0], config=config)).completion

    async def ask_all():
        async with anyio.create_task_group() as group:
            for arm in arms:
                group.start_soon(ask, arm)

    anyio.run(ask_all)
    assert most == [1, 1, 1]
    prompt, greedy = [{"role": "user", "content": ASKED[0]}], sl.SamplingPolicy.greedy()
    for arm in arms:
        assert found[arm] == generate([prompt], plan=arm, policy=greedy, max_new_tokens=8)[0].text


def test_draws_without_a_seed_are_new_ones_and_can_be_made_again(tiny_llama_engine):
    from steerlab.scoring.inspect_ai import inspect_model

    model = inspect_model(tiny_llama_engine)
    found = answers(model, ASKED[:1] * 4, max_tokens=8)
    assert len({output.completion for output in found}) > 1
    (again,) = answers(model, ASKED[:1], max_tokens=8, seed=found[2].metadata["seed"])
    assert again.completion == found[2].completion


def test_messages_of_a_whole_conversation(tiny_llama_engine):
    from inspect_ai.model import ChatMessageAssistant, ChatMessageSystem, ChatMessageUser, ContentText

    from steerlab.scoring.inspect_ai import inspect_model

    asked = [
        ChatMessageSystem(content="Be brief."),
        ChatMessageUser(content=[ContentText(text="Who"), ContentText(text="is it?")]),
        ChatMessageAssistant(content="It is"),
    ]
    (output,) = answers(inspect_model(tiny_llama_engine), [asked], max_tokens=6, temperature=0.0)
    messages = [{"role": one.role, "content": one.text} for one in asked]
    (row,) = tiny_llama_engine.generate([messages], policy=sl.SamplingPolicy.greedy(), max_new_tokens=6)
    assert output.completion == row.text


def test_without_a_chat_template(tiny_llama_engine):
    from steerlab.scoring.inspect_ai import inspect_model

    model = inspect_model(tiny_llama_engine, chat=False)
    (output,) = answers(model, ["The ferry leaves"], max_tokens=6, temperature=0.0)
    greedy = sl.SamplingPolicy.greedy()
    assert output.completion == tiny_llama_engine.generate("The ferry leaves", policy=greedy, max_new_tokens=6)[0].text
    (error,) = answers(model, ["a"], system_message="Be brief.")
    assert "one message of the user's; got system, user" in str(error)
    (error,) = answers(inspect_model(ToyEngine()), ["a"])
    assert "no chat template" in str(error)


def test_the_end_of_the_context_is_a_reason_to_stop(tiny_llama_engine):
    from steerlab.scoring.inspect_ai import inspect_model

    model, context = inspect_model(tiny_llama_engine, chat=False), tiny_llama_engine.info.context_length
    n_tokens = len(tiny_llama_engine.tokenizer.encode(" the" * 250))
    fits, too_long = answers(model, [" the" * 250, " the" * (context + 9)], max_tokens=100, temperature=0.0)
    assert fits.stop_reason == "model_length"
    assert (fits.usage.input_tokens, fits.usage.total_tokens) == (n_tokens, context)
    assert too_long.stop_reason == "model_length"
    assert "context" in too_long.error


REFUSED = {
    "penalty": ({"frequency_penalty": 0.5}, "frequency_penalty: an engine has no such setting"),
    "several": ({"presence_penalty": 1.0, "logit_bias": {5: 1.0}}, "logit_bias, presence_penalty: an engine"),
    "top": ({"logprobs": True, "top_logprobs": 5}, "top_logprobs"),
    "effort": ({"reasoning_effort": "low"}, "reasoning_effort"),
    "body": ({"extra_body": {"guided_json": {}}}, "extra_body takes min_p and repetition_penalty, got guided_json"),
    "range": ({"top_p": 1.5}, "top_p must be in"),
    "seed": ({"seed": -1}, "seed is an integer"),
    "tokens": ({"max_tokens": 0}, "max_tokens"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_settings_that_an_engine_does_not_have_are_refused(tiny_llama_engine, case):
    from steerlab.scoring.inspect_ai import inspect_model

    settings, words = REFUSED[case]
    (error,) = answers(inspect_model(tiny_llama_engine), ["a"], **settings)
    assert isinstance(error, sl.SteerlabError)
    assert words in str(error)


def test_settings_that_are_off_are_none(tiny_llama_engine):
    from steerlab.scoring.inspect_ai import inspect_model

    off = {"frequency_penalty": 0.0, "top_logprobs": 0, "logit_bias": {}, "batch": False}
    (output,) = answers(inspect_model(tiny_llama_engine), ["a"], max_tokens=2, **off, timeout=600)
    assert output.usage.output_tokens == 2


def test_what_is_no_text_is_refused(tiny_llama_engine):
    from inspect_ai.model import ChatMessageAssistant, ChatMessageTool, ChatMessageUser, ContentReasoning, ContentText
    from inspect_ai.tool import ToolCall, ToolInfo

    from steerlab.scoring.inspect_ai import inspect_model

    model = inspect_model(tiny_llama_engine)
    user, thought = ChatMessageUser(content="a"), [ContentReasoning(reasoning="hm"), ContentText(text="b")]
    call = ChatMessageAssistant(content="", tool_calls=[ToolCall(id="1", function="f", arguments={})])
    for messages in ([user, call, user], [user, call, ChatMessageTool(content="5", tool_call_id="1")]):
        (error,) = answers(model, [messages])
        assert "neither calls tools" in str(error)
    (error,) = answers(model, [[user, ChatMessageAssistant(content=thought), user]])
    assert "a message of the assistant's has reasoning; --reasoning-history none" in str(error)

    async def with_tools():
        await model.generate("a", tools=[ToolInfo(name="search", description="finds")])

    with pytest.raises(sl.InputError, match="the task offers search"):
        anyio.run(with_tools)


# --- inspect's own runs -------------------------------------------------------------------------------------------


def test_a_task_on_an_engine_with_and_without_a_plan(tiny_llama_engine, plan, here):
    """Also with inspect's cache, which knows a model by its name."""
    from inspect_ai import eval as run

    from steerlab.scoring.inspect_ai import inspect_model

    arms = [None, plan, plan.scaled(2.0)]
    models = [inspect_model(tiny_llama_engine, arm) for arm in arms]
    options = {"max_tokens": 8, "temperature": 0.0, "display": "none", "log_dir": "logs", "cache": True}
    logs = run("task.py", model=models, **options)
    for log, arm in zip(
        sorted(logs, key=lambda log: [str(m) for m in models].index(log.eval.model)), arms, strict=True
    ):
        assert log.status == "success", log.error
        prompts = [[{"role": "user", "content": sample.input}] for sample in log.samples]
        greedy = sl.SamplingPolicy.greedy()
        expected = tiny_llama_engine.generate(prompts, plan=arm, policy=greedy, max_new_tokens=8)
        assert [sample.output.completion for sample in log.samples] == expected.texts
        assert log.eval.model_args["weights_hash"] == tiny_llama_engine.info.weights_hash
        score = sum("the" in text for text in expected.texts) / 3
        assert log.results.scores[0].metrics["accuracy"].value == pytest.approx(score)
    assert len({tuple(sample.output.completion for sample in log.samples) for log in logs}) == 3


def test_from_the_command_line(tiny_llama_path, tiny_llama_engine, plan, here):
    (here / "plan.json").write_text(plan.to_json())
    command = [sys.executable, "-m", "inspect_ai", "eval", "task.py", "--model", f"steerlab/{tiny_llama_path}"]
    command += ["-M", "plan=plan.json", "-M", "scale=2", "-M", "device=cpu", "--max-tokens", "8", "--temperature", "0"]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "INSPECT_LOG_FORMAT": "json", "INSPECT_DISPLAY": "plain"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (written,) = (here / "logs").glob("*.json")
    log = json.loads(written.read_text())
    assert log["status"] == "success"
    twice = plan.scaled(2.0)
    assert log["eval"]["model"] == f"steerlab/{tiny_llama_path}+{twice.hash}"
    prompts = [[{"role": "user", "content": sample["input"]}] for sample in log["samples"]]
    expected = tiny_llama_engine.generate(prompts, plan=twice, policy=sl.SamplingPolicy.greedy(), max_new_tokens=8)
    assert [sample["output"]["completion"] for sample in log["samples"]] == expected.texts


def test_names_of_logs_are_names_of_models(tiny_llama_path, plan):
    from inspect_ai.model import get_model

    stated = {"plan": json.loads(plan.to_json()), "device": "cpu"}
    model = get_model(f"steerlab/{tiny_llama_path}+{plan.hash}", **stated)
    assert str(model) == f"steerlab/{tiny_llama_path}+{plan.hash}"
    engine = model.api.engine
    anyio.run(model.api.aclose)
    with pytest.raises(sl.InputError, match="closed"):
        engine.generate("a")


@pytest.mark.parametrize(
    ("name", "arguments", "wanted"),
    [
        ("PATH+0123456789abcdef", {}, "0123456789abcdef, and the plan here has None"),
        ("PATH", {"running": "LensEngine", "chat": True, "weights_hash": "x"}, "an engine in the process of that"),
        ("PATH", {"engine": "tpu"}, "engine is lens or vllm, got engine='tpu'"),
        ("PATH", {"plan": "nowhere.json"}, "cannot read 'nowhere.json'"),
        ("PATH", {"dose": 0.2}, "The argument dose needs vector=FILE"),
        ("PATH", {"plan": "p.json", "dose": 0.2}, "needs vector=FILE.*, and there is plan="),
        ("PATH", {"scale": 2}, "scale needs plan=FILE"),
        ("PATH", {"chat": "no"}, "chat is true or false"),
    ],
)
def test_arguments_that_do_not_go_together(tiny_llama_path, name, arguments, wanted):
    from inspect_ai.model import get_model

    with pytest.raises(sl.InputError, match=wanted):
        get_model(f"steerlab/{name.replace('PATH', str(tiny_llama_path))}", **arguments)


def test_the_documentation_runs(tiny_llama_engine, plan, here):
    names = {"engine": tiny_llama_engine, "plan": plan, "__name__": "__main__"}
    run = [block for block in blocks(ROOT / "docs/scoring.md") if "inspect_ai" in block.text]
    assert run
    for block in run:
        exec(compile(block.source, str(Path("scoring.md")), "exec"), names)
    assert [log.status for log in names["logs"]] == ["success", "success"]
