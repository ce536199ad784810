"""Every operator with every option, at every kind of position and site, against the TransformerLens engine."""

import itertools
import json

import pytest
import torch
from safetensors.torch import save_file

import steerlab as sl
from steerlab.steering.operators import Edit, Gate, Operator, Term

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = sl.SamplingPolicy.greedy()
LONG = "The ferry leaves the harbour at seven and comes back before noon. Nobody knew why the old clock had stopped. "
PROMPTS = [
    "Where did you put the keys?",
    LONG,
    "She opened the window, because the room was warm",
    "I really liked the soup; the bread was stale",
    "Two plus two equals four",
    "Nobody knew",
    "The street was quiet this morning",
]
TARGETS = [" and then", "."]
w = sl.where


@pytest.fixture(scope="module")
def engine(start, tiny_path):
    """A pass holds 16 tokens, so every prompt is cut; the cache has blocks of 32."""
    options = {"sites": ["attn_out", "resid_mid", "mlp_out", "resid_post"], "max_directions": 5}
    with start(tiny_path, layers=[1, 2], max_num_batched_tokens=16, **options) as engine:
        yield engine


class Feature(Operator):
    """Sets what is read along one direction by writing along another, where it is active."""

    unit = "coef"

    def terms(self, along):
        return (Term(along.unit, Gate(3.0, slope=-1.0, threshold=0.1), along.values / 10, bias=0.05),)

    def to_json(self):
        return {"kind": "feature"}

    def __str__(self):
        return "feature()"


def operators(vector, site="resid_post", layer=1):
    """One of each operator, given the options of an edit."""
    v, u = vector(layer, site=site), vector(layer, 1, site=site)
    return {
        "add": lambda **options: sl.add(v, coef=1.5, **options),
        "ablate": lambda **options: sl.ablate(v, **options),
        "clamp": lambda **options: sl.clamp(v, -0.4, 0.4, **options),
        "set": lambda **options: sl.set(v, 2.0, reference=u, **options),
        "rotate": lambda **options: sl.rotate(v, u, angle=0.8, **options),
        "feature": lambda where=w.default(), **options: Edit(Feature(), v, where, **options),  # noqa: B008
    }


WHERES = {
    "default": w.default(),
    "all": w.all(),
    "prompt": w.prompt() & ~w.index(0),
    "generated": w.generated(after=1, until=5),
    "span": w.span("e", occurrence=0) | w.generated(after=2),
    "mask": w.mask([True, False, True, True]),
}
OPTIONS = {
    "plain": {},
    "norm kept": {"norm": "keep"},
    "linear": {"schedule": sl.schedule.linear(1.0, -0.5, over=4)},
    "decay and norm kept": {"schedule": sl.schedule.decay(3.0), "norm": "keep"},
    "window": {"schedule": sl.schedule.window(1, 4)},
}


def compare(engine, lens, prompts, plans, n_tokens=8, *, cached=True, again=False):
    """Greedy tokens, log-probs, scores and receipts of both engines; the reference's scores.

    Args:
        cached: as of `same_receipts`, for what is generated.
        again: whether ours generates once more, from its cache and in another order.
    """
    options = {"policy": GREEDY, "max_new_tokens": n_tokens}
    ours, theirs = (one.generate(prompts, plan=plans, **options) for one in (engine, lens))
    same_rows(ours, theirs)
    same_receipts(ours.receipts, theirs.receipts, cached=cached)
    found, expected = (one.score(prompts, [TARGETS] * len(prompts), plan=plans) for one in (engine, lens))
    assert [s.log_prob for s in found] == pytest.approx([s.log_prob for s in expected], abs=1e-4)
    same_receipts(found.receipts, expected.receipts)
    if again:
        ours = engine.generate(prompts[::-1], plan=plans[::-1], **options)
        same_rows(ours, theirs[::-1])
        same_receipts(ours.receipts, theirs.receipts[::-1])
    return expected


def same_rows(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        assert a.token_ids == b.token_ids
        assert a.token_log_probs == pytest.approx(b.token_log_probs, abs=1e-4)


def share_changed(lens, prompts, scores):
    """The share of the scores of these prompts that plans changed."""
    distinct = list(dict.fromkeys(prompts))
    plain = lens.score(distinct, [TARGETS] * len(distinct))
    log_probs = {(distinct[s.prompt_index], s.target_index): s.log_prob for s in plain}
    changed = [abs(s.log_prob - log_probs[prompts[s.prompt_index], s.target_index]) > 1e-3 for s in scores]
    return sum(changed) / len(changed)


def same_receipts(ours, theirs, *, cached=True):
    """Also how much was changed, unless some of it was found in the cache and is not in the mean."""
    for a, b in zip(ours, theirs, strict=True):
        for x, y in zip(a.edits, b.edits, strict=True):
            assert (x.hook_point, x.operator, x.edited, x.expected, x.condition_passed) == (
                y.hook_point,
                y.operator,
                y.edited,
                y.expected,
                y.condition_passed,
            )
            assert cached or x.mean_relative_change == pytest.approx(y.mean_relative_change, rel=1e-3, nan_ok=True)


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.filterwarnings("ignore:.*selects no token")  # a window over generated positions, at prompt positions only
def test_every_operator_at_every_position_with_every_option(engine, lens, vector):
    """All pairs of an operator and positions, with options in turn: every pair of the three occurs."""
    pairs = itertools.product(enumerate(operators(vector).values()), enumerate(WHERES.values()))
    options = list(OPTIONS.values())
    plans = [sl.Plan(make(where=where, **options[(i + j) % len(options)])) for (i, make), (j, where) in pairs]
    engine.llm.reset_prefix_cache()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(plans))]
    scores = compare(engine, lens, prompts, plans, cached=False, again=True)
    assert share_changed(lens, prompts, scores) > 1 / 3


@pytest.mark.parametrize("method", ["reft_r1", "reps", "loreft"])
def test_learned_edits_run_on_both_engines(engine, lens, method, tmp_path):
    """Trained on one engine, saved, read back, and applied on both at all strengths and positions."""
    texts = [(" wonderful day", 1), (" sad evening", -1)]
    rows = [{"prompt": prompt, "target": text, "label": label} for prompt in PROMPTS for text, label in texts]
    options = {"steps": 6, "batch_size": 4, "evaluate_every": 3, "learning_rate": 0.3}
    options |= {"rank": 2} if method == "loreft" else {}
    sl.extract(lens, sl.Targets.from_records(rows), method, layers=1, **options).save(tmp_path / "v.safetensors")
    vector = sl.VectorSet.load(tmp_path / "v.safetensors")[1]
    make = sl.loreft if method == "loreft" else lambda v, **given: sl.add(v, coef=1.0, **given)
    plans = [sl.Plan(make(vector, where=where)).scaled(scale) for where in WHERES.values() for scale in (1.0, 0.5)]
    plans.append(sl.Plan(make(vector, norm="keep", schedule=sl.schedule.linear(1.0, 0.2, over=4))))
    engine.llm.reset_prefix_cache()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(plans))]
    assert share_changed(lens, prompts, compare(engine, lens, prompts, plans, cached=False)) > 1 / 3


SITES = ["attn_out", "resid_mid", "mlp_out", "resid_pre"]


@pytest.mark.usefixtures("unchecked_types")
def test_every_operator_at_every_site(engine, lens, vector):
    plans = [
        sl.Plan(make(where=w.all() if i % 2 else w.default()))
        for site in SITES
        for i, make in enumerate(operators(vector, site, layer=2 if site == "resid_pre" else 1).values())
    ]
    plans.append(sl.Plan(*(edit for plan in plans[::7] for edit in plan), sl.add(vector(2), coef=1.0)))
    engine.llm.reset_prefix_cache()
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(plans))]
    assert share_changed(lens, prompts, compare(engine, lens, prompts, plans, cached=False)) > 1 / 3


@pytest.mark.parametrize("site", [*SITES, "resid_post"])
def test_what_is_read_at_every_site_is_what_the_reference_reads(engine, lens, vector, site):
    plan = sl.Plan(sl.add(vector(1, site="mlp_out"), coef=1.0), sl.ablate(vector(2, site="attn_out"), where=w.all()))
    layers = [2] if site == "resid_pre" else [1, 2]
    for chosen in (None, plan):
        ours, theirs = (one.capture(PROMPTS[:3], layers=layers, site=site, plan=chosen) for one in (engine, lens))
        for layer in layers:
            torch.testing.assert_close(ours[layer], theirs[layer], atol=5e-4, rtol=1e-4)


def test_several_forms_at_one_hook_point_act_in_order(engine, lens, vector):
    make = operators(vector)
    plans = [
        sl.Plan(make["rotate"](norm="keep"), make["add"](), make["ablate"](where=w.generated())),
        sl.Plan(make["ablate"](), make["add"](schedule=sl.schedule.decay(2.0)), make["rotate"]()).scaled(0.5),
        sl.Plan(make["set"](norm="keep", where=w.all()), sl.rotate(vector(2), vector(2, 1), angle=2.0)),
        None,
    ]
    assert share_changed(lens, PROMPTS[:4], compare(engine, lens, PROMPTS[:4], plans)) >= 2 / 3


def test_blocks_of_a_schedule_are_shared_by_rows_with_one_prompt_only(engine, lens, vector):
    """Generated under a schedule, then asked for as a prompt, at whose positions the schedule has its first value."""
    plan = sl.Plan(sl.add(vector(1), coef=2.0, where=w.all(), schedule=sl.schedule.linear(1.0, 0.0, over=60)))
    engine.llm.reset_prefix_cache()
    (first,) = engine.generate([PROMPTS[0]], plan=plan, policy=GREEDY, max_new_tokens=72)
    ids = [*engine.tokenizer(PROMPTS[0])["input_ids"], *first.token_ids]
    found, expected = (one.score([ids], [[[5, 6, 7]]], plan=plan) for one in (engine, lens))
    assert found[0].log_prob == pytest.approx(expected[0].log_prob, abs=1e-4)
    (again,) = engine.generate([PROMPTS[0]], plan=plan, policy=GREEDY, max_new_tokens=72)
    assert again.token_ids == first.token_ids


def test_captures_show_the_stream_after_these_edits(engine, lens, vector):
    for make in operators(vector).values():
        plan = sl.Plan(make(where=w.all(), norm="keep"))
        ours, theirs = (one.capture(PROMPTS[:2], layers=[1, 2], plan=plan) for one in (engine, lens))
        for layer in (1, 2):
            torch.testing.assert_close(ours[layer], theirs[layer], atol=5e-4, rtol=1e-4)


def test_a_change_of_a_head_is_the_same_edit(engine, lens):
    """Of single heads, of several of one layer, and at several layers, with options of an edit."""
    rng = torch.Generator().manual_seed(5)
    head = {key: sl.head_vector(lens, *key, torch.randn(32, generator=rng)) for key in ((1, 0), (1, 3), (2, 2))}
    plans = [
        sl.Plan(sl.add(head[1, 3], coef=3.0)),
        sl.Plan(sl.add(head[1, 0] + head[1, 3], dose=2.0, where=w.all()), sl.add(head[2, 2], coef=-3.0)),
        sl.Plan(sl.ablate(head[2, 2], where=w.prompt() & ~w.index(0)), sl.add(head[1, 0], coef=4.0, norm="keep")),
    ]
    assert share_changed(lens, PROMPTS[:3], compare(engine, lens, PROMPTS[:3], plans)) >= 2 / 3
    with pytest.raises(sl.HookPointError, match="read only"):
        engine.capture(PROMPTS[:1], layers=1, site="z")
    with pytest.raises(sl.InputError, match=r"VLLMEngine\. The vectors then run on every engine"):
        sl.head_vector(engine, 1, 0, torch.ones(32))


@pytest.mark.usefixtures("unchecked_types")
def test_features_of_sparse_autoencoders(engine, lens, tmp_path):
    """Of each encoder, set and scaled, where active and always, several at one hook point and inside a layer."""
    rng = torch.Generator().manual_seed(7)
    names = ["W_enc", "b_enc", "threshold", "b_gate", "b_mag", "r_mag", "b_dec"]
    parts = {name: torch.randn(16, generator=rng) / 4 for name in names[1:6]} | {"b_dec": torch.zeros(128)}
    parts |= {"W_enc": torch.randn(128, 16, generator=rng) / 11, "W_dec": torch.randn(16, 128, generator=rng) / 3}
    plans = []
    for kind, site in [("standard", "resid_post"), ("jumprelu", "attn_out"), ("gated", "resid_post")]:
        folder = tmp_path / kind
        folder.mkdir()
        save_file(parts, folder / "sae_weights.safetensors")
        stated = {"architecture": kind, "hook_name": f"blocks.1.hook_{site}"}
        (folder / "cfg.json").write_text(json.dumps(stated))
        sae = sl.import_sae(folder)
        plans += [
            sl.Plan(sl.feature(sae, 3, set_to=4.0)),
            sl.Plan(sl.feature(sae, 5, set_to=-4.0, only_if_active=True, where=w.all())),
            sl.Plan(sl.feature(sae, 7, scale_by=6.0, where=w.all(), norm="keep"), sl.feature(sae, 9, set_to=0.0)),
        ]
        ours, theirs = (sae.activations(one, PROMPTS[:2], [3, 5]) for one in (engine, lens))
        torch.testing.assert_close(ours.values, theirs.values, atol=5e-4, rtol=1e-4)
        assert 0.05 < float((ours.values > 0).float().mean()) < 0.95
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(len(plans))]
    assert share_changed(lens, prompts, compare(engine, lens, prompts, plans)) > 1 / 3


def test_vectors_of_responses_are_those_of_the_reference(engine, lens):
    pairs = sl.ContrastPairs.from_lists(PROMPTS[:2], PROMPTS[2:4])
    options = {"read": w.generated(), "responses": sl.Responses(6, policy=GREEDY), "layers": [1, 2]}
    ours, theirs = (sl.extract(one, pairs, **options) for one in (engine, lens))
    for layer in (1, 2):
        torch.testing.assert_close(ours[layer].values, theirs[layer].values, atol=5e-4, rtol=1e-4)


# --- conditions ---------------------------------------------------------------------------------------------------


def conditions(lens, vector):
    """Conditions that pass in some rows only, by name: thresholds lie between what prompts read."""

    def between(layer, site, reading, where):
        read = lens.capture(PROMPTS, layers=layer, site=site, where=where, pool="mean")[layer]
        unit = vector(layer, 5, site=site).unit
        values = read @ unit if reading == "projection" else (read @ unit) / read.norm(dim=-1)
        low, high = values.sort().values[2:4].tolist()
        assert high - low > 1e-3
        return (low + high) / 2

    def made(layer, site="resid_post", reading="projection", read=w.last_prompt(), side="above"):  # noqa: B008
        limit = {side: between(layer, site, reading, read)}
        return sl.when(vector(layer, 5, site=site), reading=reading, read=read, **limit)

    same, inside = made(1), made(1, "attn_out", side="below")
    return {
        "same layer": same,
        "inside a layer": inside,
        "several positions": made(1, read=w.index(0, 1, -1)),
        "both": same & inside,
        "either": same | inside,
    }


@pytest.mark.usefixtures("unchecked_types")
def test_conditions_are_answered_row_by_row(engine, lens, vector):
    plans = [
        sl.Plan(
            sl.add(vector(1), coef=3.0, when=when), sl.ablate(vector(2), when=when, where=w.generated(), norm="keep")
        )
        for when in conditions(lens, vector).values()
    ]
    rows = [(prompt, plan) for plan in plans for prompt in PROMPTS] + [(prompt, None) for prompt in PROMPTS]
    prompts, given = zip(*rows, strict=True)
    engine.llm.reset_prefix_cache()
    scores = compare(engine, lens, prompts, list(given), cached=False, again=True)
    assert share_changed(lens, prompts, scores) > 1 / 18
    for plan in plans:
        passed = {r.edits[0].condition_passed for r in engine.receipts if r.plan_hash == plan.hash}
        assert passed == {True, False}


def test_edits_before_the_position_that_answers_them(engine, lens, vector):
    """Whether they act is known once that position has run: in the same pass, or too late."""
    always, never = sl.when(vector(1, 5), above=-1e3), sl.when(vector(1), below=-1e3)
    plan = sl.Plan(
        sl.add(vector(1), coef=3.0, where=w.all(), when=always),
        sl.ablate(vector(2), where=w.prompt(), when=never | always),
    )
    engine.llm.reset_prefix_cache()
    for _ in range(2):  # what was written too early is nobody's, not even of the same request once more
        with pytest.raises(sl.PlanError, match="before its condition was answered"):
            engine.score([LONG], [TARGETS], plan=plan)
        with pytest.raises(sl.PlanError, match="before its condition was answered"):
            engine.generate([PROMPTS[0], LONG], plan=plan, max_new_tokens=2)
    short = [prompt for prompt in PROMPTS if len(engine.tokenizer(prompt)["input_ids"]) <= 16]  # tokens of a pass
    assert 4 <= len(short) < len(PROMPTS)
    scores = compare(engine, lens, short * 2, plan)  # beside others, some of them are cut
    assert share_changed(lens, short * 2, scores) > 1 / 6


def test_a_probe_in_a_later_layer_steers_what_is_generated_after_it(engine, lens, vector):
    plan = sl.Plan(sl.add(vector(1), coef=3.0, where=w.generated(), when=sl.when(vector(2), above=-1e3)))
    ours, theirs = (one.generate(PROMPTS, plan=plan, policy=GREEDY, max_new_tokens=6) for one in (engine, lens))
    assert [row.token_ids for row in ours] == [row.token_ids for row in theirs]
    same_receipts(ours.receipts, theirs.receipts)
    with pytest.raises(sl.PlanError, match="before its condition was answered"):
        engine.generate(PROMPTS[:1], plan=sl.Plan(sl.add(vector(1), coef=1.0, when=sl.when(vector(2), above=0.0))))


def test_what_a_condition_cannot_be_is_refused_by_name(engine, vector):
    three = [sl.when(vector(1, seed), above=0.0) for seed in range(3)]
    cases = {
        "max_conditions=3": sl.Plan(*(sl.add(vector(2), coef=1.0, when=one) for one in three)),
        r"layers=\[1, 2, 3\]": sl.Plan(sl.add(vector(2), coef=1.0, when=sl.when(vector(3), above=0.0))),
        "selects no token": sl.Plan(sl.add(vector(2), coef=1.0, when=sl.when(vector(1), above=0.0, read=w.index(300)))),
        "both are one hook point": sl.Plan(
            sl.add(vector(1), coef=1.0), sl.add(vector(2), coef=1.0, when=sl.when(vector(2, site="resid_pre"), above=0))
        ),
    }
    for words, plan in cases.items():
        with pytest.raises(sl.PlanError, match=words):
            engine.generate(PROMPTS[:1], plan=plan, max_new_tokens=2)


# --- positions that depend on generated tokens --------------------------------------------------------------------


@pytest.fixture(scope="module")
def generated(lens):
    """What each prompt goes on with, unsteered: events that happen are taken from it."""
    rows = lens.generate(PROMPTS, policy=GREEDY, max_new_tokens=10)
    return dict(zip(PROMPTS, [row.token_ids for row in rows], strict=True))


UNSEEN = [383, 382, 381]


def by_tokens(lens, generated, vector):
    """Sets that look at tokens, by name: functions of a prompt, whose events happen while it goes on."""

    def closed(prompt):
        """Ends at what comes third in the span, under this very edit."""
        start = generated[prompt][1]
        opened = sl.Plan(sl.add(vector(1), coef=1.5, where=w.between(start, UNSEEN)))
        (row,) = lens.generate([prompt], plan=opened, policy=GREEDY, max_new_tokens=6)
        ends = [
            [token, last] for token, last in zip(row.token_ids[2:], row.token_ids[3:], strict=False) if last != start
        ]
        return w.between(start, ends[:2] or UNSEEN, inclusive=len(prompt) % 2 == 0)

    return {
        "ids": lambda p: w.ids(generated[p][1], generated[p][3]) & w.generated(),
        "ids, in the prompt too": lambda p: w.ids(*lens.tokenizer(p)["input_ids"][-4:], generated[p][0]),
        "closed": closed,
        "open": lambda p: w.between(generated[p][0], UNSEEN, inclusive=True) | w.last_prompt(),
        "after": lambda p: w.after(generated[p][1], 3),
        "after a sequence": lambda p: w.after(generated[p][:2], 2, inclusive=True) & w.generated(until=5),
        "all but": lambda p: w.default() & ~w.after({generated[p][0], (1, 2, 3)}, 2),
        "from the prompt on": lambda p: w.between("e", "zz"),
        "two": lambda p: (w.after(generated[p][1]) | w.index(3)) & ~w.ids(generated[p][4]),
    }


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.filterwarnings("ignore:.*selects no token")
def test_positions_by_generated_tokens_with_every_form(engine, lens, vector, generated):
    """Every set with operators and options in turn; each row has a plan of its own, cold and from the cache."""
    makers, options = list(operators(vector).values()), list(OPTIONS.values())
    rows = [
        (prompt, sl.Plan(makers[0 if i == 2 else (i + j) % len(makers)](where=make(prompt), **options[(i * j) % 5])))
        for i, make in enumerate(by_tokens(lens, generated, vector).values())
        for j, prompt in enumerate(PROMPTS[:3])
    ]
    rows += [(prompt, None) for prompt in PROMPTS[:3]]
    prompts, plans = zip(*rows, strict=True)
    engine.llm.reset_prefix_cache()
    scores = compare(engine, lens, prompts, list(plans), n_tokens=10, cached=False, again=True)
    assert share_changed(lens, prompts, scores) > 1 / 3


@pytest.mark.filterwarnings("ignore:.*selects no token")
def test_scoring_edits_what_generation_edited(engine, lens, vector, generated):
    pairs = itertools.product(by_tokens(lens, generated, vector).values(), PROMPTS[1:3])
    asked, plans = zip(*((p, sl.Plan(sl.add(vector(1), coef=1.5, where=make(p)))) for make, p in pairs), strict=True)
    for one in (engine, lens):
        rows = one.generate(asked, plan=list(plans), policy=GREEDY, max_new_tokens=10)
        prompts = [list(ids) for ids in rows.prompt_token_ids]
        scores = one.score(prompts, [[row.token_ids] for row in rows], plan=list(plans))
        assert [s.log_prob for s in scores] == pytest.approx([sum(row.token_log_probs) for row in rows], abs=1e-4)
        same_receipts(scores.receipts, rows.receipts)


def test_blocks_that_earlier_tokens_decided_about_are_shared_by_rows_with_these_tokens_only(engine, lens, vector):
    """A span that opens in the first block and is still open in the third: what is cached of it, and for whom."""
    ids = [5 + (7 * i) % 300 for i in range(90)]
    start, end, absent = ids[10], ids[70], next(token for token in range(5, 300) if token not in ids)
    others = [absent, *ids[1:]], [*ids[:10], absent, *ids[11:]], [token for token in ids if token != start]
    where = w.between(start, {end, absent})
    plan = sl.Plan(sl.add(vector(1), coef=2.0, where=where), sl.ablate(vector(2), where=w.after(end, 30)))
    engine.llm.reset_prefix_cache()
    for prompts in ([ids], [ids, *others], [*others, ids], [[*ids, 7, 8, 9]] * 2):
        compare(engine, lens, prompts, [plan] * len(prompts), n_tokens=12)
    (row,) = engine.generate([ids], plan=plan, policy=GREEDY, max_new_tokens=40)
    compare(engine, lens, [[*ids, *row.token_ids[:n]] for n in (6, 7, 38)], plan)  # goes on inside what was generated
    assert any(positions for one in engine.inherited for positions in one.positions)


@pytest.mark.filterwarnings("ignore:.*selects no token")
@pytest.mark.parametrize(
    ("words", "where"),
    [
        ("max_token_rules=3", w.ids(5) | w.after(6) | w.between(7, 8)),
        ("more than 32 alternatives", w.ids(*range(40))),
        ("more than 8 tokens", w.after(list(range(9)), 2)),
        ("names token 5000", w.after(5000, 2)),
    ],
)
def test_sets_of_tokens_that_cannot_be_followed_are_refused_by_name(engine, vector, words, where):
    with pytest.raises(sl.PlanError, match=words):
        engine.generate(PROMPTS[:1], plan=sl.Plan(sl.add(vector(2), coef=1.0, where=where)), max_new_tokens=2)
    if "names token" not in words:  # the same sets are fine where all their tokens are known
        inside = sl.Plan(sl.add(vector(2), coef=1.0, where=w.prompt() & where))
        engine.generate(PROMPTS[:1], plan=inside, max_new_tokens=2)
