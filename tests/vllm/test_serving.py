"""The real server and the real openai client, against the TransformerLens engine, whose steering is the reference."""

import json
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
import pytest

import steerlab as sl
from tests.vllm.conftest import INF_TOKEN, NAN_TOKEN
from tests.vllm.served import BLOCK, KEY, PLAIN, Served

openai = pytest.importorskip("openai", reason="the openai client comes with vLLM")
httpx = pytest.importorskip("httpx", reason="httpx comes with the openai client")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

GREEDY = sl.SamplingPolicy.greedy()
NORM = 5.0
SHORT = [5 + (3 * i) % 300 for i in range(9)]
LONG = [7 + (11 * i) % 300 for i in range(4 * BLOCK + 3)]
CHAT = [{"role": "user", "content": "Where did you put the keys?"}]
EXAMPLE = Path(__file__).parents[2] / "examples" / "serving_client.py"


@dataclass
class Server(Served):
    """A server with OpenAI's own client."""

    def __post_init__(self):
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key=KEY, max_retries=0, timeout=60)

    def complete(self, prompt=SHORT, steering=None, *, raw=False, **options):
        """A completion's token ids; with `raw`, the whole response."""
        return self._create(self.client.completions, {"prompt": prompt}, steering, raw, options)

    def chat(self, steering=None, *, raw=False, **options):
        return self._create(self.client.chat.completions, {"messages": CHAT}, steering, raw, options)

    def _create(self, resource, body, steering, raw, options):
        extra = {"return_token_ids": True, **options.pop("extra_body", {})}
        if steering is not None:
            extra["steering"] = steering
        response = resource.with_raw_response.create(
            **{"model": "tiny", "temperature": 0.0, "max_tokens": 16, **body, **options}, extra_body=extra
        )
        return response if raw else response.parse().choices[0].token_ids

    def post(self, path, body):
        """Also what is no number in JSON."""
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"}
        return httpx.post(f"{self.url}{path}", content=json.dumps(body), headers=headers, timeout=60, **PLAIN)

    def receipt(self, response):
        return self.get(response.headers["x-steerlab-receipt"]).raise_for_status().json()


@pytest.fixture(scope="module")
def lens(overflowing_path):
    """The model that is served, on TransformerLens."""
    with sl.load(overflowing_path, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def vectors(vector, lens):
    """By name: one whose card says what a dose is, two whose cards do not, one at a layer that is not wired."""
    first = vector(1)
    card = replace(first.card, median_norm=NORM, model=lens.info.name, weights_hash=lens.info.weights_hash)
    return {
        "north": replace(first, card=card),
        "south": vector(2),
        "pre": vector(2, 3, "resid_pre"),
        "far": vector(3),
    }


@pytest.fixture(scope="module")
def folder(vectors, tmp_path_factory):
    directory = tmp_path_factory.mktemp("offered")
    for name, one in vectors.items():
        one.save(directory / f"{name}.safetensors")
    sl.VectorSet((vectors["north"], vectors["south"])).save(directory / "both.safetensors")
    (directory / "notes.txt").write_text("not a vector")
    return directory


@pytest.fixture(scope="module")
def server(overflowing_path, folder, tmp_path_factory):
    options = ["--layers", "1,2", "--max-directions", "2", "--max-runs", "3", "--vectors", str(folder)]
    served = Server(overflowing_path, options, tmp_path_factory.mktemp("log") / "server.txt", tokens_per_pass=64)
    served.start()
    try:
        yield served
    finally:
        served.end()


@pytest.fixture(scope="module")
def reference(lens):
    """Greedy token ids of the reference engine."""

    def run(prompt, plan=None, **options):
        (row,) = lens.generate([prompt], plan=plan, policy=GREEDY, **{"max_new_tokens": 16, **options})
        return row.token_ids

    return run


def edits(*given):
    return {"edits": list(given)}


NORTH = {"vector": "north", "coef": 3.0}


# --- answers ------------------------------------------------------------------------------------------------------


def test_every_operator_and_position_answers_as_the_reference_does(server, reference, vectors):
    w, north, south = sl.where, vectors["north"], vectors["south"]
    cases = [
        (edits(NORTH), sl.Plan(sl.add(north, coef=3.0))),
        (edits({"vector": "north", "dose": 0.8}), sl.Plan(sl.add(north, dose=0.8))),
        (edits({"vector": north.hash, "coef": 3, "scale": 0.5}), sl.Plan(sl.add(north, coef=3.0)).scaled(0.5)),
        (
            edits({"vector": "both", "layer": 2, "coef": 2.0, "where": "all"}),
            sl.Plan(sl.add(south, coef=2, where=w.all())),
        ),
        (edits({"vector": "south", "operator": "ablate", "where": "all"}), sl.Plan(sl.ablate(south, where=w.all()))),
        *(
            (edits({"vector": "south", "coef": 3.0, "where": at.to_json()}), sl.Plan(sl.add(south, coef=3.0, where=at)))
            for at in (
                (w.between({"e", *range(3, 384, 13)}, {"zz", 7}) & w.generated()) | w.last_prompt(),
                w.after({*range(0, 384, 12)}, 3) | w.last_prompt(),
            )
        ),
        (
            edits({"vector": "south", "operator": "clamp", "lo": -0.5, "hi": 0.5, "where": "prompt"}),
            sl.Plan(sl.clamp(south, -0.5, 0.5, where=w.prompt())),
        ),
        (
            edits({"vector": "north", "operator": "clamp", "lo": 1.0, "unit": "dose", "where": "generated"}),
            sl.Plan(sl.clamp(north, lo=1.0, unit="dose", where=w.generated())),
        ),
        (edits({"vector": "south", "operator": "set", "coef": 20.0}), sl.Plan(sl.set(south, coef=20.0))),
        (
            edits(NORTH, {"vector": "pre", "coef": -2.0, "where": (w.index(0) | w.generated(after=2)).to_json()}),
            sl.Plan(
                sl.add(north, coef=3.0), sl.add(vectors["pre"], coef=-2.0, where=w.index(0) | w.generated(after=2))
            ),
        ),
    ]
    plain = reference(SHORT)
    changed = 0
    for steering, plan in cases:
        expected = reference(SHORT, plan)
        changed += expected != plain
        assert server.complete(SHORT, steering) == expected
    assert changed >= 7
    assert server.complete(SHORT) == plain


def test_strength_zero_is_the_unsteered_model(server, reference):
    for strength in ({"dose": 0.0}, {"coef": 0.0}, {"coef": 3.0, "scale": 0.0}):
        assert server.complete(LONG, edits({"vector": "north", "where": "all", **strength})) == reference(LONG)


def test_chat_and_streams_steer_too(server, lens, vectors):
    plan = sl.Plan(sl.add(vectors["north"], coef=3.0))
    (row,) = lens.generate([CHAT], plan=plan, policy=GREEDY, max_new_tokens=16)
    (plain,) = lens.generate([CHAT], policy=GREEDY, max_new_tokens=16)
    assert row.token_ids != plain.token_ids
    assert server.chat(edits(NORTH)) == row.token_ids
    assert server.chat() == plain.token_ids
    streamed = server.chat(edits(NORTH), stream=True, raw=True)
    assert streamed.headers["x-steerlab-plan"] == plan.hash
    assert _joined(streamed) == row.token_ids
    (short,) = lens.generate([SHORT], plan=plan, policy=GREEDY, max_new_tokens=16)
    assert _joined(server.complete(SHORT, edits(NORTH), stream=True, raw=True)) == short.token_ids


def _joined(response):
    return [
        token
        for chunk in response.parse()
        for choice in chunk.choices
        for token in getattr(choice, "token_ids", None) or ()
    ]


def test_the_flat_form_says_the_same(server, reference, vectors):
    expected = reference(SHORT, sl.Plan(sl.add(vectors["north"], coef=3.0)))
    flat = {"vllm_xargs": {"steering": json.dumps(edits(NORTH))}}
    assert server.complete(SHORT, extra_body=flat) == expected
    assert server.chat(extra_body=flat) == server.chat(edits(NORTH))


def test_several_prompts_and_samples_have_a_receipt_each(server, reference, vectors):
    plan = sl.Plan(sl.add(vectors["north"], coef=3.0))
    response = server.complete([SHORT, SHORT[:5]], edits(NORTH), raw=True)
    assert [c.token_ids for c in response.parse().choices] == [reference(SHORT, plan), reference(SHORT[:5], plan)]
    found = server.receipt(response)
    assert found["plan"] == plan.hash == response.headers["x-steerlab-plan"]
    assert {(c["prompt"], c["index"]) for c in found["completions"]} == {(0, 0), (1, 0)}
    sampled = server.complete(SHORT, edits(NORTH), raw=True, n=3, temperature=1.0, seed=1)
    counts = {c["index"]: c["edits"][0]["edited"] for c in server.receipt(sampled)["completions"]}
    assert counts == {choice.index: len(choice.token_ids) for choice in sampled.parse().choices}
    assert len(counts) == 3


def test_a_receipt_is_found_by_the_answers_id(server):
    answer = server.complete(SHORT, edits(NORTH, {"vector": "south", "operator": "ablate", "where": "all"}), raw=True)
    body = answer.parse()
    (completion,) = server.get(f"/steerlab/receipts/{body.id}").json()["completions"]
    n = len(body.choices[0].token_ids)
    assert [(e["hook_point"], e["edited"], e["expected"]) for e in completion["edits"]] == [
        ("blocks.1.hook_resid_post", n, n),
        ("blocks.2.hook_resid_post", len(SHORT) + n - 1, len(SHORT) + n - 1),
    ]
    assert completion["edits"][0]["mean_relative_change"] > 0
    named = server.complete(SHORT, edits(NORTH), raw=True, extra_headers={"X-Request-Id": "mine/1"})
    assert server.receipt(named)["completions"][0]["edits"][0]["edited"] == len(named.parse().choices[0].token_ids)
    assert server.get("/steerlab/receipts/cmpl-unheard-of").status_code == 404


def test_a_stop_string_ends_a_steered_answer(server):
    whole = server.complete(SHORT, edits(NORTH), raw=True).parse().choices[0]
    stop = next(word for word in (whole.text[k : k + 2] for k in range(4, 12)) if word.isprintable())
    cut = server.complete(SHORT, edits(NORTH), raw=True, stop=[stop])
    assert cut.parse().choices[0].text == whole.text[: whole.text.index(stop)]
    assert cut.parse().choices[0].finish_reason == "stop"
    assert server.receipt(cut)["completions"][0]["edits"][0]["edited"] == len(cut.parse().choices[0].token_ids)


# --- isolation ----------------------------------------------------------------------------------------------------


def test_equal_plans_share_blocks_and_salts_part_them(server):
    prompt = [t + 1 for t in LONG]
    steering = edits({**NORTH, "where": "all"})

    def inherited(salt):
        response = server.complete(prompt, steering, raw=True, extra_body={"cache_salt": salt})
        return server.receipt(response)["completions"][0]["edits"][0]["inherited"]

    assert [inherited(salt) for salt in ("a", "a", "b", "a")] == [0, 4 * BLOCK, 0, 4 * BLOCK]


def test_a_client_that_leaves_early_disturbs_nobody(server, reference, vectors):
    options = {"stream": True, "raw": True, "max_tokens": 300, "extra_body": {"ignore_eos": True}}
    for _ in range(3):
        response = server.complete(SHORT, edits(NORTH), **options)
        stream = response.parse()
        next(iter(stream))
        stream.close()
    assert server.complete(SHORT, edits(NORTH)) == reference(SHORT, sl.Plan(sl.add(vectors["north"], coef=3.0)))
    assert server.complete(SHORT) == reference(SHORT)


# --- overflow -----------------------------------------------------------------------------------------------------


def test_many_requests_of_which_one_in_ten_overflow(server, reference, vectors):
    """Plain or steered, streamed or not: those that overflow get an error, all others the answer of a fresh engine."""
    kinds = [(None, None), (edits(NORTH), sl.Plan(sl.add(vectors["north"], coef=3.0)))]
    kinds.append((edits({**NORTH, "where": "all"}), sl.Plan(sl.add(vectors["north"], coef=3.0, where=sl.where.all()))))
    prompts = [SHORT, SHORT[:3], LONG, LONG[:40]]
    expected = {(p, k): reference(prompts[p], kinds[k][1]) for p in range(4) for k in range(3)}

    def ask(index):
        p, k = index % 4, index // 4 % 3
        prompt, steering = prompts[p], kinds[k][0]
        if index % 10 != 3:
            return server.complete(prompt, steering) == expected[p, k]
        token = NAN_TOKEN if index % 20 == 3 else INF_TOKEN
        wrong = [*prompt[: index % len(prompt)], token, *prompt[index % len(prompt) :]]
        with pytest.raises(openai.APIError) as caught:
            _answered(server, wrong, steering, stream=index % 30 == 13)
        return steering is None or "NaN or infinite" in str(caught.value)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, range(120)))  # each combination of the above twice
    assert [index for index, is_right in enumerate(answers) if not is_right] == []


def _answered(server, prompt, steering, *, stream):
    return (
        _joined(server.complete(prompt, steering, stream=True, raw=True))
        if stream
        else server.complete(prompt, steering)
    )


def test_a_strength_that_overflows_is_refused(server, reference):
    for strength in ({"coef": 1e38}, {"dose": 1e37}, {"coef": 1.0, "scale": 1e30}):
        answer = server.post("/v1/completions", {"prompt": SHORT, "steering": edits({"vector": "north", **strength})})
        assert answer.status_code == 400
        assert "leaves the finite range" in answer.json()["error"]["message"]
    assert server.complete(SHORT) == reference(SHORT)


def test_the_receipt_of_a_request_that_overflowed_is_json(server):
    name = {"X-Request-Id": "overflowed"}
    with pytest.raises(openai.BadRequestError, match="NaN or infinite"):
        server.complete([*SHORT, NAN_TOKEN], edits({**NORTH, "where": "all"}), extra_headers=name)
    (completion,) = server.get("/steerlab/receipts/overflowed").json()["completions"]
    (edit,) = completion["edits"]
    assert (edit["edited"], edit["expected"], edit["mean_relative_change"]) == (len(SHORT) + 1, len(SHORT) + 1, None)


# --- refusals -----------------------------------------------------------------------------------------------------

REFUSED = {
    "unknown vector": (edits({"vector": "nroth", "coef": 1.0}), "Did you mean 'north'"),
    "path": (edits({"vector": "../offered/north.safetensors", "coef": 1.0}), "never by a path"),
    "absolute path": (edits({"vector": "/etc/passwd", "coef": 1.0}), "never by a path"),
    "tensor": (edits({"vector": [0.1, 0.2], "coef": 1.0}), "values cannot be sent"),
    "tensor in an object": (edits({"vector": {"values": [0.1]}, "coef": 1.0}), "values cannot be sent"),
    "unknown key": (edits({**NORTH, "wheer": "all"}), "did you mean 'where'"),
    "code": (edits({**NORTH, "hook": "lambda h: h"}), "unknown key"),
    "unknown key outside": ({"edits": [NORTH], "layers": [1]}, "steering.layers: unknown key"),
    "unwired layer": (edits({"vector": "far", "coef": 1.0}), "layers=[1, 2, 3]"),
    "other layer of a name": (edits({"vector": "north", "layer": 2, "coef": 1.0}), "no vector for layer 2"),
    "several vectors": (edits({"vector": "both", "coef": 1.0}), "choose one with `layer`"),
    "dose unknown": (edits({"vector": "south", "dose": 1.0}), "send coef instead of dose"),
    "no strength": (edits({"vector": "north"}), "exactly one strength"),
    "two strengths": (edits({**NORTH, "dose": 1.0}), "exactly one strength"),
    "strength of ablate": (edits({**NORTH, "operator": "ablate"}), "ablate takes no strength"),
    "unknown operator": (edits({"vector": "north", "operator": "rotate"}), "steering.edits[0].operator"),
    "text for a number": (edits({"vector": "north", "coef": "3"}), "steering.edits[0].coef"),
    "unknown positions": (edits({**NORTH, "where": "everywhere"}), "names no positions"),
    "positions that are none": (edits({**NORTH, "where": {"kind": "nowhere"}}), "Not a description of positions"),
    "positions with more": (edits({**NORTH, "where": {"kind": "all", "but": 3}}), "Not a description of positions"),
    "positions far out": (edits({**NORTH, "where": {"kind": "mask", "rows": [[10**15]]}}), "beyond the context"),
    "too many edits": (edits(*[NORTH] * 5), "max_directions=3"),
    "no edits": (edits(), "leave `steering` out"),
    "a list": ([NORTH], "must be an object"),
    "text": ("north", "must be an object"),
    "positions unknown before": (
        edits({**NORTH, "where": {"kind": "ids", "token_ids": [*range(32), 40]}}),
        "at most 32",
    ),
    "text that is not there": (
        edits({**NORTH, "where": {"kind": "span", "text": "zebra", "occurrence": None, "missing": "error"}}),
        "zebra",
    ),
    "too many runs": (edits({**NORTH, "where": {"kind": "index", "indices": [0, 2, 4, 6]}}), "max_runs=4"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_done_is_refused_with_a_sentence(server, case):
    steering, fragment = REFUSED[case]
    body = {"model": "tiny", "max_tokens": 4}
    asked = [
        ("/v1/completions", {**body, "prompt": SHORT, "steering": steering}),
        ("/v1/completions", {**body, "prompt": SHORT, "steering": steering, "stream": True}),
        ("/v1/chat/completions", {**body, "messages": CHAT, "steering": steering}),
        ("/v1/chat/completions", {**body, "messages": CHAT, "vllm_xargs": {"steering": json.dumps(steering)}}),
    ]
    for path, request in asked:
        response = server.post(path, request)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("BadRequestError", "steering", 400)
        assert fragment in error["message"]


def test_the_openai_client_gets_its_own_error(server):
    with pytest.raises(openai.BadRequestError, match="never by a path"):
        server.complete(SHORT, edits({"vector": "../x", "coef": 1.0}))


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/responses", {"model": "tiny", "input": "Hello", "steering": edits(NORTH)}),
        ("/v1/embeddings", {"model": "tiny", "input": "Hello", "steering": edits(NORTH)}),
        ("/v1/messages", {"model": "tiny", "messages": CHAT, "max_tokens": 4, "steering": edits(NORTH)}),
        ("/v1/chat/completions/batch", {"model": "tiny", "messages": [CHAT], "steering": edits(NORTH)}),
        ("/tokenize", {"model": "tiny", "prompt": "Hello", "steering": edits(NORTH)}),
        ("/v1/completions/", {"model": "tiny", "prompt": "Hello", "steering": edits(NORTH)}),
        ("/invocations", {"model": "tiny", "prompt": "Hello", "steering": edits(NORTH)}),
        ("/v1/completions?steering=north", {"model": "tiny", "prompt": "Hello"}),
        ("/v1/completions", {"model": "tiny", "prompt": "Hello", "vllm_xargs": {"steering": edits(NORTH)}}),
        ("/v1/completions", {"model": "tiny", "prompt": "Hello", "vllm_xargs": {"steerlab": "1"}}),
        ("/v1/completions", {"model": "tiny", "prompt": "Hello", "steering": edits(NORTH), "use_beam_search": True}),
        (
            "/inference/v1/generate",
            {"token_ids": SHORT, "sampling_params": {"max_tokens": 2, "extra_args": {"steerlab": {"row": "x"}}}},
        ),
    ],
)
def test_steering_is_never_passed_over(server, path, body):
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    assert "steer" in response.json()["error"]["message"]


def test_vllms_own_refusals_stay_its_own(server):
    response = server.post("/v1/completions", {"model": "nobody", "prompt": "Hello", "steering": edits(NORTH)})
    assert response.status_code == 404
    long = {"model": "tiny", "prompt": LONG * 5, "steering": edits(NORTH)}
    response = server.post("/v1/completions", long)
    assert response.status_code == 400
    assert "context" in response.json()["error"]["message"]
    broken = httpx.post(
        f"{server.url}/v1/completions",
        content=b'{"steering": ',
        headers={"Authorization": f"Bearer {KEY}", "Content-Type": "application/json"},
    )
    assert broken.status_code in (400, 422)


DEEP = "[" * 5000 + "]" * 5000
BROKEN = {
    "no body": ("", ""),
    "NaN": ('{"prompt": "a", "temperature": NaN}', "NaN is no number"),
    "too deep": ('{"prompt": "a", "anything": ' + DEEP + "}", "nested too deep"),
    "a list for a number": ('{"prompt": "a", "temperature": []}', "temperature: input should be a valid number"),
    "text in the plan": ('{"prompt": "a", "steering": {"edits": [{"vector": "north", "coef": "2"}]}}', "coef: input"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_request_that_cannot_be_read_gets_one_sentence_and_the_server_goes_on(server, case):
    raw, fragment = BROKEN[case]
    for path, kind in (("/v1/completions", "application/json"), ("/v1/completions", "text/plain")):
        headers = {"Authorization": f"Bearer {KEY}", "Content-Type": kind}
        response = httpx.post(f"{server.url}{path}", content=raw, headers=headers, timeout=60, **PLAIN)
        assert response.status_code == 400, response.text
        error = response.json()["error"]
        wanted = fragment if kind == "application/json" else ""
        assert wanted in error["message"]
        assert error["code"] == 400
        assert "\n" not in error["message"]
    assert server.complete(SHORT, max_tokens=1)


# --- what it offers -----------------------------------------------------------------------------------------------


def test_it_lists_its_vectors_and_limits(server, vectors):
    listed = {entry["name"]: entry for entry in server.get("/steerlab/vectors").json()["vectors"]}
    assert set(listed) == {"north", "south", "pre", "far", "both"}
    north = listed["north"]
    assert (north["hash"], north["hook_point"]) == (vectors["north"].hash, "blocks.1.hook_resid_post")
    assert north["card"]["median_norm"] == NORM
    assert north["unusable_because"] is None
    assert "layers=[1, 2, 3]" in listed["far"]["unusable_because"]
    info = server.get("/steerlab/info").json()
    assert (info["layers"], info["max_directions"], info["max_runs"]) == ([1, 2], 2, 3)
    assert server.get("/steerlab/other").status_code == 404


def test_the_key_guards_all_of_it(server):
    assert httpx.get(f"{server.url}/steerlab/vectors").status_code == 401
    body = {"model": "tiny", "prompt": "Hello", "steering": edits({"vector": "nroth", "coef": 1})}
    assert httpx.post(f"{server.url}/v1/completions", json=body).status_code == 401


def test_the_example_runs(server):
    command = [sys.executable, str(EXAMPLE), "--url", server.url, "--key", KEY, "--coef", "--strength", "3"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    texts = [line.split("  ", 1)[1] for line in done.stdout.splitlines() if line.startswith("coef")]
    assert len(set(texts)) == 3
    assert done.stdout.count("24 tokens edited at blocks.1.hook_resid_post") == 2


# --- the end ------------------------------------------------------------------------------------------------------


def test_it_ends_cleanly(server):
    assert server.complete(SHORT, edits(NORTH))  # it has outlived all of the above
    family = psutil.Process(server.process.pid).children(recursive=True)
    assert family
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(60) == 0
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == []
    first, *others = server.log.read_text().splitlines()
    vllms = Path(first.removeprefix("vLLM starts; its log is in ")).read_text()
    assert "Application shutdown complete" in vllms
    assert "leaked s" not in vllms  # shared memory or semaphores
    assert "requests can steer at layers 1, 2 along 5 of 6 vectors" in others
    assert f"tiny in float32 is served on {server.url}" in others
    assert len(others) == 3  # and why one vector cannot be used
