"""Requests that are made at the same time, in batches: what inspect_ai's models are answered by."""

import anyio

import steerlab as sl
from steerlab.scoring.inspect_ai._batches import Batches


def test_a_bad_request_does_not_harm_those_beside_it():
    ran = []

    def run(settings, prompts):
        ran.append((settings, list(prompts)))
        if "bad" in prompts:
            raise sl.InputError("bad")
        return [sl.NonFiniteError("worse") if prompt == "worse" else prompt.upper() for prompt in prompts]

    batches, found = Batches(run), {}

    async def ask(settings, prompt):
        try:
            found[prompt] = await batches.answer(settings, prompt)
        except sl.SteerlabError as error:
            found[prompt] = str(error)

    async def ask_all():
        async with anyio.create_task_group() as group:
            for settings, prompt in [(1, "a"), (1, "bad"), (2, "b"), (1, "c"), (2, "worse")]:
                group.start_soon(ask, settings, prompt)

    anyio.run(ask_all)
    assert found == {"a": "A", "bad": "bad", "b": "B", "c": "C", "worse": "worse"}
    assert [(settings, sorted(prompts)) for settings, prompts in ran[:1]] == [(1, ["a", "bad", "c"])]
    assert (2, ["b", "worse"]) in [(settings, sorted(prompts)) for settings, prompts in ran]


def test_a_cancelled_request_leaves_the_others():
    ran = []
    batches, found = Batches(lambda settings, prompts: [ran.append(prompt) or prompt for prompt in prompts]), []

    async def ask(prompt):
        found.append(await batches.answer(None, prompt))

    async def ask_all():
        async with anyio.create_task_group() as group:
            with anyio.move_on_after(0.01):
                await ask("gone")
            group.start_soon(ask, "a")
            group.start_soon(ask, "b")

    anyio.run(ask_all)
    assert sorted(found) == sorted(ran) == ["a", "b"]
