"""A remote engine against a real server: one start for all of it, and one more for the server that is killed."""

import json
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np
import pandas as pd
import pytest
import torch
from transformers import AutoModelForCausalLM

import steerlab as sl
from steerlab.measures.quantities import LogDistribution, PolicyEntropy
from steerlab.sequences import SequenceProcessor
from steerlab.steering.operators import Edit
from tests.docs.pages import ROOT, blocks
from tests.engines.contract import EngineContract
from tests.vllm import own_operators
from tests.vllm.conftest import INF_TOKEN, NAN_TOKEN, started
from tests.vllm.served import BLOCK, KEY, PLAIN, Served

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = sl.SamplingPolicy.greedy()
SAMPLED = sl.SamplingPolicy(temperature=0.8, top_p=0.9)
SHORT = [5 + (3 * i) % 300 for i in range(9)]
PROMPTS = ["The ferry leaves", "Nobody knew why the old clock had stopped", "Two plus two"]
TARGETS = [[" the harbour", " at seven"], [" again"], [" equals four", " is", " three!"]]
LONG = [7 + (11 * i) % 300 for i in range(3 * BLOCK + 3)]


@pytest.fixture(scope="module")
def lens(overflowing_path):
    """The model that is served, on TransformerLens."""
    with sl.load(overflowing_path, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def server(overflowing_path, vector, tmp_path_factory):
    folder = tmp_path_factory.mktemp("offered")
    vector(1).save(folder / "north.safetensors")
    options = ["--layers", "1,2", "--sites", "attn_out,resid_post", "--allow-vectors", "--vectors", str(folder)]
    options += ["--call-mib", "8", "--import", own_operators.__name__]
    served = Served(overflowing_path, options, tmp_path_factory.mktemp("log") / "server.txt", ready=True)
    served.start()
    try:
        yield served
    finally:
        served.end()


@pytest.fixture(scope="module")
def engine(server, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STEERLAB_CACHE", str(tmp_path_factory.mktemp("cache")))
        with server.engine() as engine:
            assert engine.tokenizer is not None
            yield engine


class TestContract(EngineContract):
    pass


# --- what it gives ------------------------------------------------------------------------------------------------


def test_it_gives_what_the_lens_engine_gives(engine, lens, vector):
    """Scores, entropies, distributions, activations at each site, and receipts, steered with conditions and norms."""
    probe = vector(1, 5)
    plan = sl.Plan(
        sl.add(vector(1), dose=0.5, norm="keep"),
        sl.rotate(vector(2), toward=vector(2, 1), angle=0.3),
        sl.add(vector(2, 4, "attn_out"), coef=0.2, when=sl.when(probe, above=-1e6)),
    )
    for one in (None, plan, [plan, None, plan.scaled(0.5)]):
        mine, theirs = (each.score(PROMPTS, TARGETS, plan=one) for each in (engine, lens))
        assert mine.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)
        assert [(r.edited, r.expected, r.plan_hash) for r in mine.receipts] == [
            (r.edited, r.expected, r.plan_hash) for r in theirs.receipts
        ]
        measures = {"h": PolicyEntropy(SAMPLED), "all": LogDistribution()}
        for a, b in zip(*(each.measure(PROMPTS, TARGETS, measures, plan=one) for each in (engine, lens)), strict=True):
            assert a["h"] == pytest.approx(np.asarray(b["h"]), abs=1e-4)
            np.testing.assert_allclose(a["all"], np.asarray(b["all"]), atol=1e-3)
        for site in ("resid_post", "attn_out"):
            a, b = (each.capture(PROMPTS, layers=[1, 2], site=site, plan=one) for each in (engine, lens))
            assert a.positions == b.positions
            torch.testing.assert_close(a[2], b[2], atol=1e-4, rtol=1e-4)
        rows, reference = (each.generate(PROMPTS, plan=one, policy=GREEDY, max_new_tokens=6) for each in (engine, lens))
        assert [r.token_ids for r in rows] == [r.token_ids for r in reference]
        assert [r.text for r in rows] == [r.text for r in reference]


def test_operators_of_ones_own_are_those_that_the_server_imported(engine, lens, vector):
    reflecting, unknown = (
        sl.Plan(Edit(kind(), vector(1), sl.where.default()))
        for kind in (own_operators.Reflect, own_operators.Unregistered)
    )
    mine, theirs = (each.score(PROMPTS, TARGETS, plan=reflecting) for each in (engine, lens))
    assert mine.log_prob == pytest.approx(theirs.log_prob, abs=1e-4)
    assert [r.edits[0].operator for r in mine.receipts] == [r.edits[0].operator for r in theirs.receipts]
    assert np.abs(mine.log_prob - engine.score(PROMPTS, TARGETS).log_prob).max() > 1e-3
    with pytest.raises(sl.PlanError, match=r"Unknown operator 'unregistered'; known are .*reflect.* --import MODULE"):
        engine.score(PROMPTS, TARGETS, plan=unknown)


def test_doses_are_in_the_servers_median_norms(engine, lens):
    assert engine.median_norm(1) == pytest.approx(lens.median_norm(1), rel=1e-5)
    with pytest.raises(sl.InputError, match="wired"):
        engine.median_norm(3)


def test_supports_and_errors_travel(engine):
    made = engine.generate(PROMPTS, policy=SAMPLED, max_new_tokens=4, with_support=True, seed=5)
    for row in made:
        assert len(row.supports) == len(row.token_ids)
        assert all(token in kept for token, kept in zip(row.token_ids, row.supports, strict=True))
        assert np.isfinite(row.token_log_qs).all()
    found = engine.generate([[5, 6], [NAN_TOKEN], [7, 8]], policy=GREEDY, max_new_tokens=3, on_error="return")
    assert [row.finish_reason for row in found] == ["length", "error", "length"]
    assert list(found.errors) == list(engine.errors) == [1]
    assert isinstance(found.errors[1], sl.NonFiniteError)
    with pytest.raises(sl.NonFiniteError):
        engine.score([[NAN_TOKEN, 5]], [[[6]]])


def test_a_processor_draws_through_it(engine, overflowing_path, monkeypatch):
    """Its weights are compared once, log q is what the processor scores, and supports can be replayed."""
    model = AutoModelForCausalLM.from_pretrained(overflowing_path, dtype=torch.float32)
    generation = {"temperature": 0.8, "top_p": 0.9, "max_new_tokens": 8}
    processor = SequenceProcessor(model, engine.tokenizer, config={"generation": generation})
    score, asked = engine.score, []
    monkeypatch.setattr(engine, "score", lambda *args, **kwargs: asked.append(args) or score(*args, **kwargs))
    plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(torch.ones(model.config.hidden_size), layer=1), coef=0.2))
    for one in (None, plan):
        drawn, scored, _ = processor.generate_with_logprobs(
            PROMPTS, G=2, seed=0, stop=(), plan=one, engine=engine, support="replayed"
        )
        assert sum(map(sum, drawn.gen_lens)) > 30
        for found, sampled in zip(scored.token_logqs, drawn.sampler_logqs, strict=True):
            np.testing.assert_allclose(np.concatenate(found), np.concatenate(sampled), atol=1e-3)
        assert [receipt.edited for receipt in drawn.receipts] == [receipt.edited for receipt in scored.receipts]
        assert processor.ratio_health(drawn, plan=one).replayed.share_outside == 0
    assert len(asked) == 1
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(1.05)
    with pytest.raises(sl.InputError, match="its weights are not the model's"):
        processor.generate_batched(PROMPTS, 1, seed=0, engine=engine)
    with pytest.raises(sl.InputError, match=r"RemoteEngine are in another process.*draw through the engine"):
        SequenceProcessor(engine)


def test_many_conversations_and_variants(engine, lens):
    chat = [{"role": "user", "content": "Where did you put the keys?"}]
    mine, theirs = (
        each.score([chat, "Hi"], [["On"], ["the"]], variants=("", " "), chat=True) for each in (engine, lens)
    )
    pd.testing.assert_frame_equal(mine.to_frame(), theirs.to_frame(), atol=1e-4, rtol=1e-4)
    assert [s.num_bytes for s in mine] == [s.num_bytes for s in theirs]


def test_load_is_a_door_to_it(server):
    with sl.load(server.url, api_key=KEY) as engine:
        assert isinstance(engine, sl.RemoteEngine)
        assert "layers=[1, 2]" in repr(engine)
    with pytest.raises(sl.InputError, match="closed"):
        engine.score("a", ["b"])
    with pytest.raises(sl.InputError, match="dtype= belongs to the server"):
        sl.load(server.url, dtype="float32")


# --- over HTTP ----------------------------------------------------------------------------------------------------


def test_calls_take_plain_json_too(server, engine, vector):
    steering = {"edits": [{"vector": "north", "coef": 3.0}]}
    body = {"prompts": PROMPTS, "targets": TARGETS, "steering": steering}
    found = server.post("/steerlab/score", body).raise_for_status().json()["rows"]
    expected = engine.score(PROMPTS, TARGETS, plan=sl.Plan(sl.add(vector(1), coef=3.0)))
    assert [row["log_prob"] for row in found] == pytest.approx(list(expected.log_prob), abs=1e-5)
    assert [row["edits"][0]["edited"] for row in found] == [r.edited for r in expected.receipts]
    entropy = {"entropy": {"kind": "policy_entropy", "policy": {"temperature": 0.8}}}
    measured = server.post("/steerlab/measure", {**body, "measures": entropy}).raise_for_status().json()["rows"]
    assert [len(row["entropy"]) for row in measured] == [s.num_tokens for s in expected]
    read = {"prompts": PROMPTS, "layers": [1], "where": "last_prompt"}
    (row, *_) = server.post("/steerlab/capture", read).raise_for_status().json()["rows"]
    torch.testing.assert_close(
        torch.tensor(row["layers"]["1"]), engine.capture(PROMPTS[0], layers=1, where=sl.where.last_prompt())[1]
    )
    made = server.post("/steerlab/generate", {"prompts": "Two plus", "max_new_tokens": 3}).raise_for_status().json()
    assert len(made["rows"][0]["token_ids"]) == 3
    described = server.get("/steerlab/describe").json()
    assert described["model"]["weights_hash"] == engine.info.weights_hash
    assert (described["sites"], described["allows_vectors"]) == (["attn_out", "resid_post"], True)


REFUSED = {
    "key": ("score", {"prompts": ["a"], "targets": [["b"]], "tragets": 1}, "unknown key; did you mean 'targets'"),
    "missing": ("score", {"prompts": ["a"]}, "targets: the key is missing"),
    "no object": ("score", [1], "JSON object"),
    "policy": ("generate", {"prompts": ["a"], "policy": {"temprature": 1}}, "policy is an object"),
    "quantity": ("measure", {"prompts": ["a"], "targets": [["b"]], "measures": {"f": "lambda"}}, "is no quantity"),
    "positions": ("capture", {"prompts": ["a"], "layers": [1], "where": "everywhere"}, "names no positions"),
    "layer": ("capture", {"prompts": ["a"], "layers": [0]}, "layers="),
    "plan": ("score", {"prompts": ["a"], "targets": [["b"]], "plans": [{"format": 9}], "plan_of": 0}, "format"),
    "plan of": ("score", {"prompts": ["a"], "targets": [["b"]], "plan_of": 3}, "plan_of"),
    "vector": (
        "score",
        {"prompts": ["a"], "targets": [["b"]], "steering": {"edits": [{"vector": "../x", "coef": 1.0}]}},
        "never by a path",
    ),
    "rows": ("generate", {"prompts": ["a"], "n": 100_000}, "at most 65,536 rows"),
    "size": (
        "measure",
        {"prompts": [LONG], "targets": [[LONG] * 15], "measures": {"all": {"kind": "log_distribution"}}},
        "a larger --call-mib",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_call_cannot_be_is_one_sentence(server, case):
    what, body, fragment = REFUSED[case]
    answer = server.post(f"/steerlab/{what}", body)
    assert answer.status_code == 400, answer.text
    assert fragment in answer.json()["error"]["message"]


def test_messages_that_are_none_are_refused(server):
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/x-steerlab"}
    for body in (b"", b"{}\n", b'{"array_bytes": 9}\nabc', b'{"array_bytes": 3}\nabc', b"\x80\x04]q\x00.\n", b"[]\n"):
        answer = httpx.post(f"{server.url}/steerlab/score", content=body, headers=headers, **PLAIN)
        assert answer.status_code == 400, (body, answer.text)
    answer = httpx.post(f"{server.url}/steerlab/score", content=b"x" * (9 << 20), headers=headers, timeout=60, **PLAIN)
    assert answer.status_code == 413
    assert "8,388,608 bytes that this server reads" in answer.json()["error"]["message"]


def test_the_api_key_covers_all_of_it(server):
    for method, what in [("GET", "describe"), ("GET", "tokenizer"), ("POST", "score"), ("POST", "capture")]:
        assert httpx.request(method, f"{server.url}/steerlab/{what}").status_code == 401
    for key in (None, "wrong"):
        with pytest.raises(sl.InputError, match="API key"):
            sl.RemoteEngine(server.url, api_key=key)


def test_an_address_without_a_server_says_so(server):
    with pytest.raises(sl.EngineError, match="Nothing answers"):
        sl.RemoteEngine("http://127.0.0.1:9", patience=0)
    with pytest.raises(sl.InputError, match="no address"):
        sl.RemoteEngine("gpu-machine:8000")
    with sl.RemoteEngine(f"{server.url}/v1", api_key=KEY) as engine:
        assert engine.url == server.url


def test_a_call_for_another_model_is_refused(engine, monkeypatch):
    from dataclasses import replace

    monkeypatch.setattr(engine, "_info", replace(engine.info, weights_hash="another"))
    with pytest.raises(sl.InputError, match="another model is served"):
        engine.score("a", ["b"])


# --- sent again, and broken off -----------------------------------------------------------------------------------


def test_a_call_that_is_sent_twice_runs_once(server, engine):
    from steerlab.engines._http.frames import CONTENT_TYPE, Frame, frames_in

    content = {"prompts": PROMPTS, "max_new_tokens": 5, "seed": 3, "policy": {"temperature": 1.0}}
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": CONTENT_TYPE, "X-Request-Id": "twice"}

    def send(body):
        return httpx.post(f"{server.url}/steerlab/generate", content=body, headers=headers, timeout=60, **PLAIN)

    before = _requests_run(server)
    with ThreadPoolExecutor(4) as pool:
        answers = [list(frames_in([a.content], 1 << 20))[-1] for a in pool.map(send, [Frame(content).encoded()] * 4)]
    again = list(frames_in([send(Frame(content).encoded()).content], 1 << 20))
    assert len(again) == 1
    assert all(answer.content == again[0].content for answer in answers)
    assert _requests_run(server) - before == len(PROMPTS)
    assert "given to another call" in send(Frame({**content, "seed": 4}).encoded()).json()["error"]["message"]


def _requests_run(server):
    """Requests that vLLM has counted as run to their end."""
    lines = server.get("/metrics").text.splitlines()
    own = [line for line in lines if line.startswith("vllm:request_success_total") and "abort" not in line]
    return sum(float(line.split()[-1]) for line in own)


def _until(holds):
    """Waits until something is so; half a minute at most."""
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _running(server):
    """Requests inside the engine."""
    lines = server.get("/metrics").text.splitlines()
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting{")
    return sum(float(line.split()[-1]) for line in lines if line.startswith(names))


def test_closing_the_connection_ends_the_rows(server, engine):
    from steerlab.engines._http.frames import CONTENT_TYPE, Frame, frames_in

    content = {
        "prompts": [[5, 6, 7]] * 96,
        "max_new_tokens": 480,
        "policy": {"temperature": 1.0},
        "stop": ["never said"],
    }
    headers = {"Authorization": f"Bearer {KEY}", "Content-Type": CONTENT_TYPE}
    before = _requests_run(server)
    with httpx.stream(
        "POST", f"{server.url}/steerlab/generate", content=Frame(content).encoded(), headers=headers, timeout=60
    ) as answer:
        frames = frames_in(answer.iter_bytes(), 1 << 20)  # dropping it would close the connection
        progress = next(frame.content for frame in frames if frame.content.get("of"))
        assert (progress["of"], progress["done"] < 96) == (96, True)
    _until(lambda: _running(server) == 0)
    assert _requests_run(server) - before < 96  # they were ended, and did not run to their end
    assert len(engine.generate("Two plus two", policy=GREEDY, max_new_tokens=4)[0].token_ids) == 4


def _break_off(server, prompt):
    """Leaves before the answer, which may be there already where this thread has to wait for the processor."""
    body = {"prompts": [prompt] * 4, "max_new_tokens": 300, "policy": {"temperature": 1.0}}
    headers, timeout = {"Authorization": f"Bearer {KEY}"}, httpx.Timeout(30, read=0.3)
    for _ in range(20):
        try:
            httpx.post(f"{server.url}/steerlab/generate", json=body, headers=headers, timeout=timeout, **PLAIN)
        except httpx.ReadTimeout:
            return
    pytest.fail("The answer was there every time.")


def test_mixed_requests_of_many_clients_do_not_harm_each_other(server, engine, lens, vector):
    """Plain, steered, conditional, scored, captured, poisoned and broken-off calls at the same time."""
    plain = [SHORT, LONG, LONG[:40]]
    fresh = {len(p): lens.generate([p], policy=GREEDY, max_new_tokens=12)[0].token_ids for p in plain}
    steered = sl.Plan(sl.add(vector(1, 7), coef=3.0, where=sl.where.all()))
    never = sl.Plan(sl.add(vector(1), coef=9.0, when=sl.when(vector(1, 2), above=1e6)))
    expected = {len(p): lens.generate([p], plan=steered, policy=GREEDY, max_new_tokens=12)[0].token_ids for p in plain}
    scores = lens.score(PROMPTS, TARGETS, plan=steered).log_prob
    read = lens.capture([LONG], layers=2, plan=steered)[2]

    def is_right(client, index):
        prompt = plain[index % 3]
        kind = index % 8
        if kind in (0, 5):
            return client.generate([prompt], policy=GREEDY, max_new_tokens=12)[0].token_ids == fresh[len(prompt)]
        if kind == 1:
            made = client.generate([prompt], plan=steered, policy=GREEDY, max_new_tokens=12)
            return made[0].token_ids == expected[len(prompt)]
        if kind == 2:
            made = client.generate([prompt], plan=never, policy=GREEDY, max_new_tokens=12)
            return made[0].token_ids == fresh[len(prompt)] and made.receipts[0].edited == 0
        if kind == 3:
            return np.allclose(client.score(PROMPTS, TARGETS, plan=steered).log_prob, scores, atol=1e-3)
        if kind == 4:
            return torch.allclose(client.capture([LONG], layers=2, plan=steered)[2], read, atol=1e-3)
        if kind == 6:
            wrong = [*prompt[: index % 9], NAN_TOKEN if index % 16 == 6 else INF_TOKEN, *prompt[index % 9 :]]
            with pytest.raises(sl.NonFiniteError):
                client.score([wrong], [[[5]]], plan=steered)
            return True
        _break_off(server, prompt)
        return True

    def ask(first):
        with server.engine() as client:
            return [index for index in range(first, 96, 12) if not is_right(client, index)]

    with ThreadPoolExecutor(12) as pool:
        assert list(pool.map(ask, range(12))) == [[]] * 12
    assert server.process.poll() is None


# --- the page -----------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:About:UserWarning")
def test_the_page_runs(server, engine, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STEERLAB_SERVER", server.url)
    monkeypatch.setenv("STEERLAB_KEY", KEY)
    names = {"__name__": "__main__"}
    for block in blocks(ROOT / "docs/how-to/remote.md"):
        assert block.not_run is None
        exec(compile(block.source, "remote.md", "exec"), names)
    assert names["effect"].verdict in ("effect", "no effect", "inconclusive", "collapsed", "not tested")


# --- experiments --------------------------------------------------------------------------------------------------

DOSES = [-0.2, 0.0, 0.2]


def _effect(model, root, vector, items=None):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="4 random draws")  # no verdict is wanted
        options = {"controls": sl.Controls(random=4), "max_ppl_ratio": 50.0}
    with sl.Experiment("run", model, root=root) as experiment:
        plan = sl.Plan(sl.add(vector(1), dose=1.0))
        targets = sl.Targets.from_records(items or _items())
        effect = experiment.effect(plan, targets, doses=DOSES, neutral=["The ferry leaves at seven."], **options)
        return effect.rows


def _items():
    words = ["soup", "bread", "street", "window", "clock", "ferry"]
    return [
        {"prompt": f"The {word} was", "target": target, "label": label}
        for word in words
        for target, label in ((" good", 1), (" bad", -1))
    ]


def _same(one, other):
    pd.testing.assert_frame_equal(one, other, atol=1e-4, rtol=1e-4)


@pytest.fixture(scope="module")
def rows(engine, vector, tmp_path_factory):
    """Of an experiment on the server that nothing disturbs."""
    return _effect(engine, tmp_path_factory.mktemp("remote"), vector)


def test_an_experiment_gives_the_rows_of_the_lens_engine(rows, lens, vector, tmp_path):
    theirs = _effect(lens, tmp_path, vector)
    own = ["plan_hash", "engine_hash"]  # a resolved plan holds the median norm, which differs in the last bits
    _same(rows[theirs.columns].drop(columns=own), theirs.drop(columns=own))


def test_an_experiment_survives_a_server_that_is_killed(server, engine, rows, vector, tmp_path):
    """Killed and started again in the middle: the same frame as of an undisturbed run."""
    calls = []

    def watch(name):
        original = getattr(engine, name)

        def counted(*args, **options):
            calls.append(name)
            if len(calls) == 2:
                killer.start()
            return original(*args, **options)

        return counted

    def fail():
        server.kill()
        server.start()

    killer = threading.Thread(target=fail)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("score", "measure"):
            patch.setattr(engine, name, watch(name))
        disturbed = _effect(engine, tmp_path, vector)
    killer.join()
    assert len(calls) > 2
    _same(disturbed, rows)
    json.dumps(server.get("/steerlab/describe").json())


def test_an_experiment_gives_the_rows_of_the_engine_in_process(rows, overflowing_path, vector, tmp_path):
    """The last test: it imports vLLM into this process."""
    wired = {"layers": [1, 2], "sites": ["attn_out", "resid_post"], "max_num_batched_tokens": 256}
    with started(overflowing_path, **wired) as local:
        theirs = _effect(local, tmp_path, vector)
    pd.testing.assert_frame_equal(rows, theirs, atol=2e-5, rtol=0)  # requests meet in other batches over HTTP
