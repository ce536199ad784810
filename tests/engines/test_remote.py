"""A remote engine and a server that fails in every way there is, over real connections; a toy engine computes."""

import base64
import json
import threading
from collections import Counter
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch

import steerlab as sl
from steerlab.core.policy import SamplingPolicy
from steerlab.engines._http.failures import failure_json
from steerlab.engines._http.frames import Frame, read_frame
from steerlab.engines._http.plans import plans_in
from steerlab.engines._http.results import result_frame
from steerlab.engines.remote._connection import RemoteConnection
from steerlab.engines.toy import ToyEngine

PROMPTS, TARGETS = ["one two", "three"], [["four", "five"], ["six"]]
DIGEST = "0" * 32


class Handler(BaseHTTPRequestHandler):
    """Answers calls; what `server.faults` lists happens first, one a call."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        server = self.server
        content = server.described if self.path.endswith("describe") else server.tokenizer
        server.seen["GET", self.path] += 1
        self._send(200, json.dumps(content).encode())

    def do_POST(self):
        server, what = self.server, self.path.rpartition("/")[2]
        frame = read_frame(self.rfile.read(int(self.headers["content-length"])))
        server.ids.append(self.headers["x-request-id"])
        fault = server.faults.pop(0) if server.faults else None
        if fault == "drop":
            self.close_connection = True
            return
        if isinstance(fault, int):
            self._send(fault, b"{}")
            return
        server.seen["POST", what] += 1
        answer = self._answer(what, frame)
        progress = Frame({"done": 1, "of": 3}).encoded()
        if fault == "cut":  # as a server that is killed while it answers
            self._send(200, progress + answer[: len(answer) // 2], length=len(progress + answer))
            self.close_connection = True
        elif fault == "no result":
            self._send(200, progress)
        elif fault is not None:
            status = 503 if isinstance(fault, sl.EngineError) else 400
            self._send(200, progress + Frame({"error": failure_json(fault), "status": status}).encoded())
        else:
            self._send(200, progress + progress + answer)

    def _answer(self, what, frame):
        content = dict(frame.content)
        assert content.pop("weights_hash") == self.server.engine.info.weights_hash
        if what == "median_norm":
            return Frame({"median_norm": self.server.engine.median_norm(**content)}).encoded()
        plan = plans_in({key: content.pop(key) for key in ("plans", "plan_of")}, frame.arrays)
        if "policy" in content:
            content["policy"] = SamplingPolicy(**content["policy"])
        for name in ("log_probs", "on_error", "cache_salt", "with_support"):
            content.pop(name, None)
        return result_frame(getattr(self.server.engine, what)(plan=plan, **content)).encoded()

    def _send(self, status, body, length=None):
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)
        self.wfile.flush()


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    engine, folder = ToyEngine(), tmp_path_factory.mktemp("tokenizer")
    engine.tokenizer.save_pretrained(folder)
    served = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    served.engine, served.faults, served.ids, served.seen = engine, [], [], Counter()
    served.described = {"model": asdict(engine.info), "traits": asdict(engine.traits), "tokenizer": DIGEST}
    served.described |= {"max_bytes": 100_000, "sites": ["resid_post"]}
    files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in folder.iterdir()}
    served.tokenizer = {"hash": DIGEST, "files": files}
    thread = threading.Thread(target=served.serve_forever, daemon=True)
    thread.start()
    yield served
    served.shutdown()
    served.server_close()
    thread.join()


@pytest.fixture
def address(server):
    server.faults.clear()
    server.ids.clear()
    server.seen.clear()
    return f"http://127.0.0.1:{server.server_port}"


@pytest.fixture
def engine(address, monkeypatch, tmp_path):
    monkeypatch.setattr("steerlab.engines.remote._connection._FIRST_WAIT", 0.01)
    monkeypatch.setenv("STEERLAB_CACHE", str(tmp_path))
    with sl.RemoteEngine(address, patience=20) as engine:
        yield engine


def plan(strength=2.0):
    values = torch.randn(32, generator=torch.Generator().manual_seed(1))
    return sl.Plan(sl.add(sl.SteeringVector.from_tensor(values, layer=1, name="north"), dose=strength))


def test_it_returns_what_the_engine_behind_it_returns(server, engine):
    toy = server.engine
    assert engine.score(PROMPTS, TARGETS, plan=[plan(), None]) == toy.score(PROMPTS, TARGETS, plan=[plan(), None])
    assert list(engine.receipts) == list(toy.receipts)
    made = engine.generate(PROMPTS, plan=plan(), n=2, max_new_tokens=4, seed=5)
    assert made == toy.generate(PROMPTS, plan=plan(), n=2, max_new_tokens=4, seed=5)
    assert engine.median_norm(-1) == engine.median_norm(2) == toy.median_norm(2)
    assert server.seen["POST", "median_norm"] == 1
    assert engine.info == toy.info
    assert "layers=[0, 1, 2]" in repr(engine)


def test_the_tokenizer_is_fetched_once(server, engine, address):
    assert engine.tokenizer("one two")["input_ids"] == server.engine.tokenizer("one two")["input_ids"]
    with sl.RemoteEngine(address) as other:
        assert len(other.tokenizer) == len(engine.tokenizer)
    assert server.seen["GET", "/steerlab/tokenizer"] == 1


@pytest.mark.parametrize("name", ["../escape.json", "run.py", "a/b.json", "weights.safetensors"])
def test_a_tokenizer_has_no_other_files(server, engine, name, monkeypatch):
    monkeypatch.setattr(server, "tokenizer", {"files": {name: ""}})
    with pytest.raises(sl.EngineError, match="names that a tokenizer's have not"):
        _ = engine.tokenizer


@pytest.mark.parametrize(
    "faults",
    [["drop"], ["drop", "drop", 503, 502], ["cut"], ["cut", "drop", "no result"], [sl.EngineError("dead"), 429]],
    ids=str,
)
def test_a_call_without_an_answer_is_sent_again_under_its_id(server, engine, faults):
    expected = server.engine.score(PROMPTS, TARGETS, plan=plan())
    server.faults[:] = faults
    found = engine.score(PROMPTS, TARGETS, plan=plan())
    assert found == expected
    assert found.receipts == expected.receipts
    assert len(server.ids) == len(faults) + 1
    assert len(set(server.ids)) == 1
    engine.score(PROMPTS, TARGETS)
    assert len(set(server.ids)) == 2


@pytest.mark.parametrize("error", [sl.PlanError("no"), sl.ReceiptError("no"), sl.NonFiniteError("no")], ids=str)
def test_what_the_server_says_is_wrong_is_raised_at_once(server, engine, error):
    server.faults[:] = [error]
    with pytest.raises(type(error), match="no"):
        engine.score(PROMPTS, TARGETS)
    assert len(server.ids) == 1


def test_patience_ends(server, address):
    server.faults[:] = ["drop"] * 100
    with sl.RemoteEngine(address, patience=0.5) as engine:
        with pytest.raises(sl.EngineError, match="has not answered a call to score for"):
            engine.score(PROMPTS, TARGETS)
    assert len(server.ids) > 1
    server.faults.clear()


def test_bad_input_is_refused_before_anything_is_sent(server, engine):
    with pytest.raises(sl.InputError, match="cannot be sent to a server"):
        engine.measure(PROMPTS, TARGETS, {"f": lambda logits, tokens: logits.sum()})
    with pytest.raises(sl.HookPointError):
        engine.capture(PROMPTS, layers=99)
    with pytest.raises(sl.VectorShapeError):
        engine.score(PROMPTS, TARGETS, plan=sl.Plan(sl.add(sl.SteeringVector.from_tensor([1.0] * 31, layer=1), coef=1)))
    with pytest.raises(sl.InputError, match="100,000; send "):
        engine.score(["a" * 100_000], [["b"]])
    messages = {
        ("resid_pre", 0): "blocks.0.hook_resid_pre cannot be reached inside vLLM",
        ("mlp_out", 1): rf"the server at {engine.url} was started with --sites resid_post\. Start it with "
        "--sites resid_post,mlp_out",
        ("attn_out", 3): "--layers 0,1,2 and --sites resid_post. Start it with --layers 0,1,2,3, --sites resid_post,",
    }
    for (site, layer), message in messages.items():
        with pytest.raises(sl.PlanError, match=message):
            engine.check_wired(
                sl.Plan(sl.add(sl.SteeringVector.from_tensor([1.0] * 32, layer=layer, site=site), coef=1))
            )
    before = sl.SteeringVector.from_tensor([1.0] * 32, layer=3, site="resid_pre")
    engine.check_wired(sl.Plan(sl.add(before, coef=1)))  # resid_post of layer 2
    engine.check_wired(plan())
    with pytest.raises(TypeError, match="temperature"):
        engine.generate(PROMPTS, temperature=1.0)
    assert server.ids == []


def test_a_server_that_is_another_is_recognised(server, address, monkeypatch):
    monkeypatch.setattr(server, "described", {"hello": "world"})
    with pytest.raises(sl.InputError, match="is no `steerlab serve`"):
        sl.RemoteEngine(address)
    with pytest.raises(sl.InputError, match="patience"):
        sl.RemoteEngine(address, patience=-1)


def test_the_key_travels_as_openais_does():
    connection = RemoteConnection("http://127.0.0.1:1/v1/", "open-sesame", 0)
    assert (connection.url, connection._client.headers["authorization"]) == ("http://127.0.0.1:1", "Bearer open-sesame")
    connection.close()
