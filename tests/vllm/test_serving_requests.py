"""What a server makes of requests before vLLM sees them; no engine runs here."""

import asyncio
import json
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

import steerlab as sl
from steerlab.core.engine import ModelInfo
from steerlab.core.errors import InputError, PlanError, VectorFileError
from steerlab.engines.vllm._client.compiled_plan import compile_plan
from steerlab.engines.vllm._server.arguments import ServeOptions, stated_names, vllm_namespace
from steerlab.engines.vllm._server.field_errors import explain
from steerlab.engines.vllm._server.fields import asked_of
from steerlab.engines.vllm._server.gateway import Gateway
from steerlab.engines.vllm._server.middleware import SteeringMiddleware
from steerlab.engines.vllm._server.plans import PlanMaker
from steerlab.engines.vllm._server.positions_json import where_of
from steerlab.engines.vllm._server.registry import VectorRegistry
from steerlab.engines.vllm._server.strict_json import read_json
from steerlab.engines.vllm._server.tickets import ReceiptBook, Ticket
from steerlab.engines.vllm._server.workers import ReplyCollector, SharedPlans, Workers
from steerlab.engines.vllm._wire.config import SteeringConfig
from steerlab.engines.vllm._wire.packets import pack, unpack
from steerlab.engines.vllm._wire.plan_tables import AMOUNT
from steerlab.models import resolve

INFO = ModelInfo("tiny", None, "0123", "none", 4, 128, 384, 512, "float32")
CONFIG = SteeringConfig((1, 2), max_directions=2)
STEERING = {"edits": [{"vector": "north", "coef": 2.0}]}
JSON = "application/json"


@pytest.fixture
def folder(tmp_path, vector):
    vector(1).save(tmp_path / "north.safetensors")
    return tmp_path


@pytest.fixture
def maker(folder):
    return PlanMaker(VectorRegistry.read([folder]), CONFIG, INFO)


def asked(body, path="/v1/completions", query=b"", kind=JSON):
    return asked_of(path, query, kind, body if isinstance(body, bytes) else json.dumps(body).encode())


@pytest.mark.parametrize("body", [{"prompt": "cut \ud83d"}, {"prompt": "a", "stop": ["\ude00"], "steering": STEERING}])
def test_a_request_with_half_a_character_is_refused(body):
    with pytest.raises(InputError, match="The request's body holds half a character"):
        asked(body)
    assert asked({"prompt": "🙂"}) is None


# --- registry -----------------------------------------------------------------------------------------------------


def test_only_vector_files_of_the_folder_itself_are_read(folder, vector):
    (folder / "inside").mkdir()
    vector(2).save(folder / "inside" / "south.safetensors")
    (folder / "readme.md").write_text("text")
    torch.save({"x": torch.ones(3)}, folder / "other.pt")
    registry = VectorRegistry.read([folder])
    assert list(registry.names) == ["north"]
    assert registry.find("north", None) == registry.find(vector(1).hash, 1) == vector(1)


def test_a_model_file_among_the_vectors_is_not_passed_over(folder):
    from safetensors.torch import save_file

    save_file({"weight": torch.ones(3)}, folder / "model.safetensors")
    with pytest.raises(VectorFileError, match="not a steerlab vector file"):
        VectorRegistry.read([folder])


def test_a_name_or_hash_stands_for_one_thing(folder, tmp_path_factory, vector):
    other = tmp_path_factory.mktemp("other")
    vector(2).save(other / "north.safetensors")
    with pytest.raises(InputError, match="Two vector files are named 'north'"):
        VectorRegistry.read([folder, other])
    (other / "north.safetensors").rename(other / f"{vector(1).hash}.safetensors")
    with pytest.raises(InputError, match="content hash of a vector"):
        VectorRegistry.read([folder, other])
    (other / f"{vector(1).hash}.safetensors").unlink()
    twin = vector(1)
    replace(twin, card=replace(twin.card, median_norm=2.0)).save(other / "twin.safetensors")
    with pytest.raises(InputError, match="different median norms"):
        VectorRegistry.read([folder, other])


def test_a_folder_without_vectors_is_an_error(tmp_path):
    with pytest.raises(InputError, match="holds no vector file"):
        VectorRegistry.read([tmp_path])
    with pytest.raises(InputError, match="is none"):
        VectorRegistry.read([tmp_path / "missing"])


def test_vectors_need_layers(tmp_path):
    assert ServeOptions("tiny", layers=[1]).vectors == ()
    with pytest.raises(InputError, match="--vectors needs --layers"):
        ServeOptions("tiny", vectors=(tmp_path,))
    with pytest.raises(InputError, match="--allow-vectors needs --layers"):
        ServeOptions("tiny", allow_vectors=True)


@pytest.mark.parametrize(("name", "value"), [("score_mib", -1), ("capture_tokens", -1), ("call_mib", 0)])
def test_sizes_are_bounded_below(name, value):
    with pytest.raises(InputError, match=f"--{name.replace('_', '-')}"):
        ServeOptions("tiny", layers=[1], **{name: value})


@pytest.mark.vllm
@pytest.mark.slow
def test_options_of_vllm_go_through_once(tiny_path):
    def made(*arguments, config=None, **options):
        return vllm_namespace(ServeOptions(str(tiny_path), vllm_arguments=arguments, **options), found, config)

    found = resolve(tiny_path)
    assert (made().dtype, made(dtype="float32").dtype, made("--dtype=float32").dtype) == ("auto", "float32", "float32")
    assert (made().shutdown_timeout, made("--shutdown-timeout", "3").shutdown_timeout) == (10, 3)
    assert made().additional_config == {"steerlab": None}  # started by steerlab, not to steer
    assert made(config=CONFIG).additional_config == {"steerlab": CONFIG.to_json()}
    with pytest.raises(InputError, match="'stray' is none"):
        made("stray")
    assert stated_names(["--log-level", "INFO", "--logging-config.formatter=json", "--dtype=x"]) == [
        "log_level",
        "logging_config",
        "dtype",
    ]


# --- plans --------------------------------------------------------------------------------------------------------


def test_a_field_becomes_the_plan_it_describes(maker, vector):
    edits = [
        {"vector": "north", "coef": 2, "where": {"kind": "generated", "after": 1, "until": None}, "scale": 0.5},
        {"vector": "north", "operator": "clamp", "hi": 1.5, "where": "prompt"},
    ]
    w = sl.where
    first = sl.Plan(sl.add(vector(1), coef=2.0, where=w.generated(after=1))).scaled(0.5)
    expected = first + sl.Plan(sl.clamp(vector(1), hi=1.5, where=w.prompt()))
    assert maker.make({"edits": edits}).assigned.given_hash == expected.hash


def test_a_dose_needs_the_median_norm_of_this_model(folder, vector):
    known = vector(1)
    card = replace(known.card, median_norm=3.0, model="other", weights_hash="4567")
    replace(known, card=replace(card, name="foreign")).save(folder / "north.safetensors")
    nameless = replace(vector(2), card=replace(vector(2).card, median_norm=3.0))
    nameless.save(folder / "nameless.safetensors")
    replace(nameless, card=replace(nameless.card, weights_hash=INFO.weights_hash)).save(folder / "south.safetensors")
    maker = PlanMaker(VectorRegistry.read([folder]), CONFIG, INFO)
    with pytest.warns(UserWarning, match="made on other"), pytest.raises(InputError, match="send coef instead of dose"):
        maker.make({"edits": [{"vector": "north", "dose": 1.0}]})
    with pytest.raises(InputError, match="send coef instead of dose"):
        maker.make({"edits": [{"vector": "nameless", "dose": 1.0}]})
    ready = maker.make({"edits": [{"vector": "south", "dose": 2.0}]})
    assert ready.compiled.tables.terms[0, AMOUNT] == pytest.approx(6.0)


def test_a_field_that_comes_again_is_not_made_again(maker):
    assert maker.make(STEERING) is maker.make(json.loads(json.dumps(STEERING)))


# --- positions ----------------------------------------------------------------------------------------------------

w = sl.where
SETS = st.recursive(
    st.sampled_from(
        [w.all(), w.prompt(), w.last_prompt(), w.generated(2, 5), w.index(0, -1), w.ids(3, 4), w.span("a")]
    ),
    lambda inner: st.builds(lambda a, b: a | b, inner, inner) | st.builds(lambda a: ~a, inner),
    max_leaves=6,
)


@given(SETS)
def test_positions_survive_the_way(where):
    assert where_of(json.loads(json.dumps(where.to_json())), INFO) == where


def test_a_word_means_the_function_of_that_name():
    assert where_of("default", INFO) == w.default()
    assert where_of("last_prompt", INFO) == w.last_prompt()


def deep(n):
    return {"kind": "all"} if n == 0 else {"kind": "not", "of": [deep(n - 1)]}


@pytest.mark.parametrize(
    ("given", "fragment"),
    [
        (deep(100), "at most 64 parts"),
        ({"kind": "index", "indices": [10**30]}, "beyond the context"),
        ({"kind": "generated", "after": 0, "until": float("nan")}, "beyond the context"),
        ({"kind": "mask", "rows": [["x"]]}, "integers ≥ 0"),
        ({"kind": "mask", "rows": [[1.5]]}, "integers ≥ 0"),
        ({"kind": "mask", "rows": [list(range(300)) * 2]}, "600 entries"),
        ({"kind": "ids", "token_ids": list(range(33))}, "at most 32 token ids"),
        ({"kind": ["all"]}, "Not a description"),
        ({}, "Not a description"),
    ],
)
def test_positions_that_are_none_or_without_bound_are_refused(given, fragment):
    with pytest.raises(PlanError, match=fragment):
        where_of(given, INFO)


# --- fields -------------------------------------------------------------------------------------------------------


def test_a_request_without_steering_is_left_alone():
    assert asked({"prompt": "a steering wheel", "vllm_xargs": {"a": 1}}) is None
    assert asked([STEERING]) is None
    assert asked(b"") is None
    for foreign in (b"not json", b"[" * 100_000, b"\xff"):
        assert asked(foreign, kind="text/plain") is None
    assert asked(b'--x\r\nContent-Disposition: form-data; name="file"', kind="multipart/form-data; boundary=x") is None


def test_the_rest_of_a_request_stays_what_it_is():
    body = {"prompt": "a", "steering": STEERING, "vllm_xargs": {"a": 1}, "request_id": "mine"}
    sent = json.loads(asked(body).with_ticket("t"))
    assert sent == {"prompt": "a", "vllm_xargs": {"a": 1, "steerlab": "t"}, "request_id": "mine"}
    flat = {"prompt": "a", "vllm_xargs": {"a": 1, "steering": json.dumps(STEERING)}}
    found = asked(flat)
    assert found.steering == STEERING
    assert json.loads(found.with_ticket("t")) == {
        "prompt": "a",
        "vllm_xargs": {"a": 1, "steerlab": "t"},
        "request_id": "t",
    }


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/embeddings"])
@pytest.mark.parametrize(
    "nothing",
    [
        {"steering": None},
        {"vllm_xargs": {"steering": None}},
        {"vllm_xargs": {"steering": "null"}},
        {"steering": None, "vllm_xargs": {"steering": None}},
    ],
)
def test_a_field_that_is_null_is_absent(maker, nothing, path):
    body = {"prompt": "a", **nothing}
    rest = {"prompt": "a"} | ({"vllm_xargs": {}} if "vllm_xargs" in nothing else {})
    status, headers, content = call(Gateway(engine(), maker), echo, body, path)
    assert (status, json.loads(content)) == (200, rest)
    assert headers == {b"x-length": str(len(content)).encode()}


def test_nulls_leave_room_for_the_other_way_to_ask():
    flat = asked({"steering": None, "vllm_xargs": {"steering": json.dumps(STEERING)}})
    plain = asked({"steering": STEERING, "vllm_xargs": {"steering": None}})
    assert flat.steering == plain.steering == STEERING
    assert flat.rest == plain.rest == {"vllm_xargs": {}}
    assert asked({"prompt": "a", "extra_body": {"steering": None}}) is None


OPTIONAL = ["layer", "operator", "dose", "coef", "lo", "hi", "unit", "where", "scale"]


@pytest.mark.parametrize(
    "edit",
    [
        {"vector": "north", "coef": 2.0},
        {"vector": "north", "operator": "ablate"},
        {"vector": "north", "operator": "clamp", "hi": 1.0},
    ],
)
def test_a_key_that_is_null_is_absent(maker, edit):
    nulls = {key: None for key in OPTIONAL if key not in edit}
    with_nulls, without = maker.make({"edits": [{**edit, **nulls}]}), maker.make({"edits": [edit]})
    assert with_nulls.assigned.given_hash == without.assigned.given_hash


def test_what_is_needed_cannot_be_null(maker):
    with pytest.raises(InputError, match=r"steering\.edits\[0\]\.vector: the key is missing"):
        maker.make({"edits": [{"vector": None, "coef": 1.0}]})
    with pytest.raises(InputError, match=r"steering\.edits: the key is missing"):
        maker.make({"edits": None})
    with pytest.raises(InputError, match="unknown key"):
        maker.make({"edits": [{"vector": "north", "coef": 1.0, "sclae": None}]})


@pytest.mark.parametrize(
    "body",
    [
        {"steering": STEERING, "vllm_xargs": {"steering": "{}"}},
        {"steering": STEERING, "vllm_xargs": [1]},
        {"STEERING": STEERING},
        {"sterring": STEERING},
        {"steerings": STEERING},
        {"extra_body": {"extra_body": {"steering": STEERING}}},
        {"sampling_params": {"extra_args": {"steering": STEERING}}},
        b'{"\\u0073teering": {}, "vllm_xargs": {"steerlab": "1"}}',
    ],
)
def test_what_cannot_be_taken_up_is_refused(body):
    with pytest.raises(InputError):
        asked(body)


def test_a_form_cannot_steer():
    with pytest.raises(InputError, match="cannot steer"):
        asked(b'--x\r\nContent-Disposition: form-data; name="steering"', "/v1/audio/transcriptions", kind="multipart/x")


# --- bodies -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steering", [b"", b', "steering": {"edits": [{"vector": "north", "coef": 1}]}'])
@pytest.mark.parametrize(
    ("value", "fragment"),
    [
        (b"NaN", "NaN is no number of JSON"),
        (b"[-Infinity]", "-Infinity is no number of JSON"),
        (b"1e400", "1e400 is beyond the range"),
        (b"-" + b"9" * 400 + b".5", "beyond the range"),
        (b"1" + b"0" * 30, "beyond 64 bits"),
        (b"9223372036854775808", "beyond 64 bits"),
        (b"1" * 5000, "beyond 64 bits"),
        (b"[" * 300 + b"]" * 300, "nested too deep"),
        (b'{"a": ' * 300 + b"1" + b"}" * 300, "nested too deep"),
        (b"[" * 100_000, "nested too deep"),
        (b'"cut \\ud83d"', r"half a character, '.ud83d' at position 4"),
        (b'{"\\ud83d": 1}', "half a character"),
        (b'"\xff"', "not UTF-8"),
        (b"", "not JSON: Expecting value"),
    ],
)
def test_a_body_that_is_not_plain_json_is_refused_whoever_asks(maker, steering, value, fragment):
    raw = b'{"prompt": "a"' + steering + b', "temperature": ' + value + b"}"
    status, _, content = call(Gateway(engine(), maker), echo, raw)
    error = json.loads(content)["error"]
    assert (status, error["param"], error["code"]) == (400, None, 400)
    assert re.search(fragment, error["message"])
    assert len(error["message"]) < 250


def test_what_json_can_say_is_read():
    for value in (2**63 - 1, -(2**63), 1.7976931348623157e308, "🙂 ünï", [[[1]]], 10**18, None):
        assert read_json(json.dumps({"a": value}), "it") == {"a": value}
    assert read_json('"\\ud83d\\ude42"', "it") == "🙂"
    with pytest.raises(InputError, match=r"vllm_xargs\.steering is not JSON"):
        asked({"vllm_xargs": {"steering": "{"}})
    with pytest.raises(InputError, match=r"vllm_xargs\.steering: NaN"):
        asked({"vllm_xargs": {"steering": '{"edits": NaN}'}})


def test_what_vllm_does_not_accept_is_one_sentence():
    class Body(BaseModel):
        stop: str | list[str] | None = None
        size: int

    def explained(**given):
        with pytest.raises(ValidationError) as caught:
            Body(**given)
        return explain([{**problem, "loc": ("body", *problem["loc"])} for problem in caught.value.errors()])

    assert explained() == ("size", "size: the field is missing.")
    assert explained(size="x", stop=5) == (
        "stop",
        "stop: input should be a valid string, or input should be a valid list; got 5.",
    )
    assert explained(size=float("inf")) == ("size", "size: input should be a finite number; got inf.")
    assert explain([{"type": "missing", "loc": ("body",), "msg": "Field required", "input": None}])[0] is None
    assert explain(["Unsupported Media Type"]) == (None, "Unsupported Media Type.")


# --- middleware ---------------------------------------------------------------------------------------------------


def call(gateway, app, body, path="/v1/completions"):
    """What a client gets: status, headers, body."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    incoming = [
        {"type": "http.request", "body": raw[:9], "more_body": True},
        {"type": "http.request", "body": raw[9:], "more_body": False},
    ]
    sent = []

    async def receive():
        return incoming.pop(0) if incoming else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-type", JSON.encode()), (b"content-length", str(len(raw)).encode())]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": headers}
    asyncio.run(SteeringMiddleware(app, gateway)(scope, receive, send))
    return sent[0]["status"], dict(sent[0]["headers"]), b"".join(message.get("body", b"") for message in sent)


async def echo(scope, receive, send):
    """An application that answers with what it was sent."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    length = dict(scope["headers"])[b"content-length"]
    await send({"type": "http.response.start", "status": 200, "headers": [(b"x-length", length)]})
    await send({"type": "http.response.body", "body": body[:5], "more_body": True})
    await send({"type": "http.response.body", "body": body[5:]})


def engine():
    return SimpleNamespace(generate=None, engine_core=SimpleNamespace(add_request_async=None))


def test_an_unsteered_request_passes_as_it_came(maker):
    body = {"prompt": "a", "n": 1}
    status, headers, content = call(Gateway(engine(), maker), echo, body)
    assert (status, content) == (200, json.dumps(body).encode())
    assert headers == {b"x-length": str(len(content)).encode()}


def test_an_answer_that_was_made_without_its_steering_is_withheld(maker):
    gateway = Gateway(engine(), maker)
    status, _, content = call(gateway, echo, {"prompt": "a", "steering": STEERING})
    assert status == 500
    assert "without the steering" in json.loads(content)["error"]["message"]
    assert not gateway._tickets


def test_an_answer_whose_steering_reached_the_engine_carries_the_plan(maker):
    gateway = Gateway(engine(), maker)

    async def reaching(scope, receive, send):
        (ticket,) = gateway._tickets.values()
        ticket.reached = True
        await echo(scope, receive, send)

    status, headers, content = call(gateway, reaching, {"prompt": "a", "steering": STEERING})
    assert status == 200
    assert headers[b"x-length"] == str(len(content)).encode()
    assert headers[b"x-steerlab-plan"].decode() == maker.make(STEERING).assigned.given_hash
    ticket = json.loads(content)["vllm_xargs"]["steerlab"]
    assert headers[b"x-steerlab-receipt"].decode() == f"/steerlab/receipts/{ticket}"


def test_a_server_without_layers_refuses_every_steering_field():
    gateway = Gateway(engine(), None)
    for body in ({"steering": STEERING}, {"vllm_xargs": {"steering": "{}"}}):
        status, _, content = call(gateway, echo, {"prompt": "a", **body})
        assert status == 400
        assert "--layers" in json.loads(content)["error"]["message"]
    for body in ({}, {"steering": None}):
        assert call(gateway, echo, {"prompt": "a", **body})[0] == 200


def test_a_websocket_session_that_asks_for_steering_is_closed():
    incoming = [{"type": "websocket.receive", "text": text} for text in ('{"model": "a"}', '{"steering": {}}')]
    sent, seen = [], []

    async def session(scope, receive, send):
        seen.extend([await receive(), await receive()])

    async def receive():
        return incoming.pop(0)

    async def send(message):
        sent.append(message)

    asyncio.run(SteeringMiddleware(session, Gateway(engine(), None))({"type": "websocket"}, receive, send))
    assert [message["type"] for message in seen] == ["websocket.receive", "websocket.disconnect"]
    assert [(message["type"], message["code"]) for message in sent] == [("websocket.close", 1008)]


def test_a_forged_ticket_does_not_reach_the_engine(maker):
    exceptions = pytest.importorskip("vllm.exceptions", reason="the error is vLLM's own")
    fake = engine()
    Gateway(fake, maker)
    for arguments in ({"steerlab": "guess"}, {"steerlab": {"row": "x"}}, {"steering": "{}"}):
        with pytest.raises(exceptions.VLLMValidationError, match="/v1/completions"):
            fake.generate({"prompt_token_ids": [1]}, SimpleNamespace(extra_args=arguments), "id")


# --- workers ------------------------------------------------------------------------------------------------------


class Listening:
    """An engine whose one worker notes what it is told, and answers `settle` with an account of each row."""

    def __init__(self):
        self.told = []

    async def collective_rpc(self, method, args):
        command, payload = args
        header, _ = unpack(payload)
        self.told.append((command, sorted(header)))
        await asyncio.sleep(0.01)
        if command != "settle":
            return [b""]
        problems = {"bad": "lost"} if "bad" in header else {}
        ones = np.ones(len(header), dtype=np.int64)
        arrays = {
            "ran": np.array([[0, 3]] * len(header)),
            "edits": 0 * ones,
            "tally": np.array([[2.0, 0.5, 0.0]] * len(header)),
            **{name: ones[:0] for name in ("answers", "read", "at", "measured")},
            **{f"n_{name}": ones for name in ("ran", "edits", "tally")},
            **{f"n_{name}": 0 * ones for name in ("answers", "read", "at", "measured")},
        }
        return [pack({"rows": list(header), "problems": problems, "points": [7], "tp": 0, "pp": 0}, arrays)]


def test_a_plan_is_sent_once_and_dropped_when_others_need_the_room(vector):
    plans = [compile_plan(sl.Plan(sl.add(vector(1), coef=float(c))), CONFIG) for c in (1, 2, 3)]
    names = [plan.fingerprint for plan in plans]

    async def run():
        engine = Listening()
        held = SharedPlans(Workers(engine), idle=1)
        await asyncio.gather(*(held.hold(plans[0]) for _ in range(5)))
        await held.hold(plans[1])
        for _ in range(5):
            await held.release(plans[0])
        assert engine.told == [("hold", [names[0]]), ("hold", [names[1]])]
        await held.hold(plans[2])
        await held.release(plans[1])
        assert engine.told[2:] == [("hold", [names[2]]), ("drop", [names[0]])]
        await held.hold(plans[0])
        assert engine.told[4:] == [("hold", [names[0]])]

    asyncio.run(run())


def test_requests_that_end_together_are_settled_together_and_fail_alone():
    async def run():
        engine = Listening()
        settler = ReplyCollector(Workers(engine))
        rows = [["a"], ["b", "c"], ["bad"], ["d"]]
        found = await asyncio.gather(*(settler.settle(row) for row in rows), return_exceptions=True)
        assert [command for command, _ in engine.told] == ["settle"]
        assert isinstance(found[2], sl.ReceiptError)
        assert [sorted(one) for one in (found[0], found[1], found[3])] == [["a"], ["b", "c"], ["d"]]
        assert found[1]["c"].tally[0][:2] == (2.0, 0.5)

    asyncio.run(run())


def test_the_oldest_receipts_go_first(maker):
    book = ReceiptBook(room=2)
    ready = maker.make(STEERING)
    for name in ("a", "b", "a", "c"):
        book.enter(Ticket(ready, name))
    assert [book.find(name) is not None for name in ("a", "b", "c")] == [True, False, True]
    assert book.find("chatcmpl-a") == book.find("cmpl-a") == book.find("a")
