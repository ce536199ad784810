"""A plan on a model of one's own edits what the engine's calls edit, and leaves the model as it was."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import steerlab as sl

PROMPTS = ["the cat sat on the mat", "a dog"]
GREEDY = sl.SamplingPolicy.greedy()


@pytest.fixture(scope="module", params=["tiny_llama", "tiny_gpt2"])
def pair(request):
    """An engine, and a Hugging Face model of the same weights with its tokenizer."""
    path = request.getfixturevalue(f"{request.param}_path")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return request.getfixturevalue(f"{request.param}_engine"), model, AutoTokenizer.from_pretrained(path)


def plan_for(engine, **options):
    v = sl.SteeringVector.from_tensor(torch.linspace(-1, 2, engine.info.d_model), layer=1, name="slope")
    w = sl.SteeringVector.from_tensor(torch.linspace(1, 0, engine.info.d_model), layer=2, site="resid_pre")
    return sl.Plan(sl.add(v, coef=2.0, **options), sl.ablate(w, **options))


def padded(tokenizer, prompts, side="left"):
    ids = [tokenizer(prompt)["input_ids"] for prompt in prompts]
    width = max(map(len, ids))
    rows = [([0] * (width - len(row)), [1] * len(row)) for row in ids]
    left = side == "left"
    return {
        "input_ids": torch.tensor([gap + row if left else row + gap for (gap, _), row in zip(rows, ids, strict=True)]),
        "attention_mask": torch.tensor([gap + one if left else one + gap for gap, one in rows]),
    }


def generated(model, batch, n=6, **options):
    options = {"do_sample": False, "max_new_tokens": n, "pad_token_id": 0, "eos_token_id": None} | options
    return model.generate(**batch, **options)[:, batch["input_ids"].shape[1] :].tolist()


@pytest.mark.parametrize("where", [None, sl.where.all(), sl.where.generated(after=1), sl.where.prompt()])
@pytest.mark.parametrize("use_cache", [True, False])
def test_generate_gives_what_the_engine_gives(pair, where, use_cache):
    engine, model, tokenizer = pair
    plan = plan_for(engine, where=where)
    wanted = engine.generate(PROMPTS, plan=plan, policy=GREEDY, max_new_tokens=6)
    ids = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    assert [list(row) for row in wanted.prompt_token_ids] == ids
    batch = padded(tokenizer, PROMPTS)
    plain = generated(model, batch)
    with plan.applied(model) as applied:
        found = generated(model, batch, use_cache=use_cache)
    for row, completion in zip(found, wanted, strict=True):
        assert row[: len(completion.token_ids)] == completion.token_ids
    assert generated(model, batch) == plain != found
    complete = all(c.finish_reason == "length" for c in wanted)
    if complete:
        assert [r.edited for r in applied.receipts] == [r.edited for r in wanted.receipts]
    assert "edited tokens" in applied._repr_html_()


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_forward_pass_is_a_prompt(pair, side):
    engine, model, tokenizer = pair
    plan = plan_for(engine)
    batch = padded(tokenizer, PROMPTS, side)
    positions = {"position_ids": (batch["attention_mask"].cumsum(1) - 1).clamp_min(0)}
    with plan.applied(model) as applied, torch.no_grad():
        logits = model(**batch, **positions).logits
    for row, prompt in enumerate(PROMPTS):
        wanted = engine.logits(prompt, plan=plan)
        own = logits[row][batch["attention_mask"][row].bool()]
        torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-4)
    assert [r.edited for r in applied.receipts] == [2, 2]


def test_beams_and_samples_are_followed(pair):
    engine, model, tokenizer = pair
    with plan_for(engine, where=sl.where.all()).applied(model) as applied:
        found = generated(model, padded(tokenizer, PROMPTS), num_beams=3, num_return_sequences=3)
    assert len(found) == 6
    n_tokens = [len(tokenizer(prompt)["input_ids"]) + 5 for prompt in PROMPTS for _ in range(3)]
    assert [r.edited for r in applied.receipts] == [2 * n for n in n_tokens]


def test_the_model_is_as_it_was_after_an_error(pair):
    engine, model, tokenizer = pair
    batch = padded(tokenizer, PROMPTS[:1])
    before = model(**batch).logits
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()]
    with pytest.raises(ZeroDivisionError), plan_for(engine).applied(model):
        model(**batch).logits / (1 // 0)
    assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()] == hooks
    assert torch.equal(model(**batch).logits, before)


def test_a_bridge_takes_every_site(tiny_llama_engine):
    engine = tiny_llama_engine
    v = sl.SteeringVector.from_tensor(torch.ones(engine.info.d_model), layer=1, site="mlp_out")
    middle = sl.SteeringVector.from_tensor(torch.linspace(-1, 1, engine.info.d_model), layer=2, site="resid_mid")
    plan = sl.Plan(sl.add(v, coef=1.0), sl.add(middle, coef=1.0))
    ids = torch.tensor([engine.tokenizer(PROMPTS[0])["input_ids"]])
    before = engine.model(ids)
    with plan.applied(engine.model) as applied, torch.no_grad():
        found = engine.model(ids)
    torch.testing.assert_close(found[0], engine.logits(PROMPTS[0], plan=plan), atol=1e-4, rtol=1e-4)
    assert applied.receipts[0].edited == 2
    assert torch.equal(engine.model(ids), before)
    with pytest.raises(ZeroDivisionError), plan.applied(engine.model):
        raise ZeroDivisionError
    assert torch.equal(engine.model(ids), before)


def test_a_bridge_generates_as_its_engine_does(tiny_llama_engine):
    engine = tiny_llama_engine
    plan = plan_for(engine, where=sl.where.generated())
    wanted = engine.generate(PROMPTS[0], plan=plan, policy=GREEDY, max_new_tokens=5)[0].token_ids
    ids = torch.tensor([engine.tokenizer(PROMPTS[0])["input_ids"]])
    with plan.applied(engine.model) as applied:
        found = engine.model.generate(ids, max_new_tokens=5, do_sample=False, stop_at_eos=False, verbose=False)
    assert found[0, ids.shape[1] :].tolist()[: len(wanted)] == wanted
    assert applied.receipts[0].edited == 2 * 4


def test_a_dose_has_the_engines_size(tiny_llama_engine, tiny_llama_path):
    engine = tiny_llama_engine
    model = AutoModelForCausalLM.from_pretrained(tiny_llama_path, dtype=torch.float32).eval()
    v = sl.SteeringVector.from_tensor(torch.linspace(-1, 2, engine.info.d_model), layer=1)
    plan = sl.Plan(sl.add(v, dose=0.5))
    ids = torch.tensor([engine.tokenizer(PROMPTS[0])["input_ids"]])
    with plan.applied(model), torch.no_grad():
        found = model(ids).logits[0]
    torch.testing.assert_close(found, engine.logits(PROMPTS[0], plan=plan), atol=1e-4, rtol=1e-4)
    model.config._name_or_path = model.name_or_path = "nowhere"
    with pytest.raises(sl.PlanError, match=r"applied\(model, tokenizer\)"), plan.applied(model):
        pass
    with plan.applied(model, engine.tokenizer), torch.no_grad():
        torch.testing.assert_close(model(ids).logits[0], found)


def test_two_plans_nest(pair):
    engine, model, tokenizer = pair
    (first, second) = plan_for(engine)
    batch = padded(tokenizer, PROMPTS[:1])
    with torch.no_grad():
        with sl.Plan(first, second).applied(model):
            together = model(**batch).logits
        with sl.Plan(first).applied(model), sl.Plan(second).applied(model):
            nested = model(**batch).logits
    torch.testing.assert_close(nested, together)


def test_a_condition_decides_row_by_row(pair):
    engine, model, tokenizer = pair
    probe = sl.SteeringVector.from_tensor(torch.linspace(-1, 2, engine.info.d_model), layer=0)
    values = engine.capture(PROMPTS, layers=0, where=sl.where.last_prompt())[0] @ probe.unit
    v = sl.SteeringVector.from_tensor(torch.ones(engine.info.d_model), layer=1)
    plan = sl.Plan(sl.add(v, coef=1.0, when=sl.when(probe, above=float(values.mean()))))
    with plan.applied(model) as applied:
        generated(model, padded(tokenizer, PROMPTS), n=3)
    assert [r.edited > 0 for r in applied.receipts] == (values > values.mean()).tolist()


@pytest.mark.parametrize(
    ("site", "layer", "where", "sentence"),
    [
        ("mlp_out", 1, None, "mlp_out"),
        ("resid_post", 40, None, "layer"),
        ("resid_post", 1, sl.where.span("cat"), "prompt's text"),
    ],
)
def test_what_cannot_be_applied_is_refused(pair, site, layer, where, sentence):
    engine, model, _ = pair
    v = sl.SteeringVector.from_tensor(torch.ones(engine.info.d_model), layer=layer, site=site)
    with pytest.raises(sl.SteerlabError, match=sentence), sl.Plan(sl.add(v, coef=1.0, where=where)).applied(model):
        pass


@pytest.mark.parametrize("what", ["engine", 3])
def test_what_is_no_model_is_refused(tiny_llama_engine, what):
    model = tiny_llama_engine if what == "engine" else what
    with pytest.raises(sl.PlanError, match=r"engine\.generate\(prompts, plan=plan\)"), sl.Plan().applied(model):
        pass


def test_what_cannot_be_followed_is_refused(pair):
    engine, model, tokenizer = pair
    batch = padded(tokenizer, PROMPTS[:1])
    cache = model(**batch, use_cache=True).past_key_values
    with plan_for(engine).applied(model):
        with pytest.raises(sl.PlanError, match="cache that was filled elsewhere"):
            model(torch.tensor([[5]]), past_key_values=cache)
        with pytest.raises(sl.PlanError, match="another form"):
            model(batch["input_ids"], attention_mask=torch.ones(1, 1, 6, 6))
        with pytest.raises(sl.PlanError, match="without input_ids"):
            model()
        model(**batch)  # so that nothing counts as never run
    assert model(**batch).logits.isfinite().all()
