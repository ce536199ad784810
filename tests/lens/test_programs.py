"""Programs: the same tokens and receipts as the fast engine, and plans that change without another program."""

import gc
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import pytest
import torch
import torch._inductor.config
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import DeepseekV4Config, FalconH1Config, Lfm2Config, LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel, LlamaRotaryEmbedding

import steerlab as sl
from steerlab._runtime.model_state import state_of
from steerlab._runtime.modules import unwrapped
from steerlab.core._warning import SteerlabWarning
from steerlab.core.errors import InputError
from steerlab.engines.lens import _program, _recording
from steerlab.engines.lens import _program_rows as program_rows
from steerlab.engines.lens._edit_buffers import EditBuffers
from steerlab.engines.lens._fixed_cache import FixedLayer, fits
from steerlab.engines.lens._fusing import fuse_between
from steerlab.engines.lens._generating import GenerationTask
from steerlab.engines.lens._placement import balanced
from steerlab.engines.lens._recording import NoReadback, Recording
from steerlab.measures._rounding import Rounding
from tests.lens.helpers import PROMPTS, random_vector
from tests.tiny_families import build_family
from tests.tiny_models import build_tiny_family, build_tiny_llama

GREEDY = sl.SamplingPolicy.greedy()
NEW = 9


@pytest.fixture
def fresh_engine(tiny_llama_path):
    """A model of which nothing is known yet."""
    with sl.load(tiny_llama_path, device="cpu") as engine:
        yield engine


def programs(engine):
    """The programs made for an engine's model."""
    return dict(state_of(engine.model).known["programs"])


def plan_of(engine, kind, scale=1.0, seed=0, layer=1):
    """Two edits at a layer and one at the next, if there is one, whatever the kind."""
    following = min(layer + 1, engine.info.n_layers - 1)
    v, u = random_vector(engine, layer=layer, seed=seed), random_vector(engine, layer=following, seed=seed + 1)
    first, second, third = {
        "add": (
            sl.add(v, coef=3.0),
            sl.add(v, coef=-1.0, where=sl.where.generated(after=1, until=4)),
            sl.add(u, coef=2.0, where=sl.where.index(0, 2)),
        ),
        "ablate": (
            sl.ablate(v, where=sl.where.all()),
            sl.add(v, coef=2.0, where=sl.where.prompt()),
            sl.ablate(u, where=sl.where.generated()),
        ),
        "clamp": (
            sl.clamp(v, lo=2.0, hi=4.0, where=sl.where.generated(until=3)),
            sl.clamp(v, hi=3.0, where=~sl.where.last_prompt()),
            sl.clamp(u, lo=-0.5, where=sl.where.all()),
        ),
        "none": (sl.add(v, coef=0.0), sl.ablate(v).scaled(0), sl.clamp(u, hi=1.0).scaled(0)),
    }[kind]
    return sl.Plan(first, second, third).scaled(scale)


def both(engine, plan, way="graph", **options):
    """Completions and receipts on the fast engine and by a program."""
    options = {"policy": GREEDY, "max_new_tokens": NEW} | options
    found = {}
    for name in ("fast", way):
        out = engine.generate(PROMPTS[:3], plan=plan, engine=name, **options)
        assert out.engine == name
        found[name] = out, engine.receipts
    return found["fast"], found[way]


def check_equal(fast, compiled):
    for ours, theirs in zip(compiled[0], fast[0], strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.finish_reason == theirs.finish_reason
        assert ours.token_log_probs == pytest.approx(theirs.token_log_probs, abs=1e-3)
    for ours, theirs in zip(compiled[1], fast[1], strict=True):
        assert ours.plan_hash == theirs.plan_hash
        assert [(e.edited, e.expected, e.layer) for e in ours.edits] == [
            (e.edited, e.expected, e.layer) for e in theirs.edits
        ]
        assert [e.mean_relative_change for e in ours.edits] == pytest.approx(
            [e.mean_relative_change for e in theirs.edits], rel=1e-3, abs=1e-6, nan_ok=True
        )


@pytest.mark.filterwarnings("ignore:.*selects no token")  # one new token: nothing generated is run
@pytest.mark.parametrize("name", ["tiny_llama_engine", "tiny_gpt2_engine"])
def test_it_equals_fast_and_another_plan_needs_no_other_program(request, name, monkeypatch):
    engine = request.getfixturevalue(name)
    fast, ours = both(engine, plan_of(engine, "add"))
    check_equal(fast, ours)
    made = programs(engine)

    texts = {"add": ours[0].texts}
    for kind, scale, seed in (("ablate", 1.0, 0), ("clamp", 1.0, 0), ("add", -1.5, 7), ("clamp", 0.5, 3)):
        fast, ours = both(engine, plan_of(engine, kind, scale, seed))
        check_equal(fast, ours)
        texts[kind, scale] = ours[0].texts
    assert len({tuple(text) for text in texts.values()}) > 3

    # a zeroed plan restores the unsteered tokens, also after all those others, and the first one comes back
    unsteered = engine.generate(PROMPTS[:3], policy=GREEDY, max_new_tokens=NEW, engine="fast")
    for plan in (plan_of(engine, "none"), plan_of(engine, "clamp").scaled(0)):
        _, (out, _) = both(engine, plan)
        assert [c.token_ids for c in out] == [c.token_ids for c in unsteered]
    assert both(engine, plan_of(engine, "add"))[1][0].texts == texts["add"]

    # sampled, fewer tokens of the same capacity, and rows that end at different times
    check_equal(*both(engine, plan_of(engine, "add"), policy=sl.SamplingPolicy(temperature=1.3, top_p=0.9), seed=5))
    check_equal(*both(engine, plan_of(engine, "ablate"), max_new_tokens=2))
    check_equal(*both(engine, plan_of(engine, "ablate"), max_new_tokens=1))
    ids = [1, *range(3, 384, 7)]
    monkeypatch.setattr(engine.model.original_model.generation_config, "eos_token_id", ids)
    ended = both(engine, plan_of(engine, "clamp"), policy=sl.SamplingPolicy(temperature=1.5), seed=5)
    check_equal(*ended)
    assert {c.finish_reason for c in ended[1][0]} == {"eos", "length"}
    assert programs(engine) == made


@pytest.mark.slow
@torch._inductor.config.patch({"cpp.simdlen": 0, "aot_inductor.debug_compile": True, "compile_threads": 1})
def test_a_compiled_program_equals_fast_and_is_compiled_once(tmp_path):
    """Of one layer: each kernel takes the C++ compiler seconds, of which these settings spare a third."""
    with sl.load(build_tiny_llama(tmp_path / "llama", num_hidden_layers=1), device="cpu") as engine:
        check_equal(*both(engine, plan_of(engine, "add", layer=0), "compiled"))
        made = counters["stats"]["unique_graphs"]
        check_equal(*both(engine, plan_of(engine, "clamp", 0.5, 3, layer=0), "compiled"))
        check_equal(*both(engine, plan_of(engine, "ablate", layer=0), "compiled", max_new_tokens=2))
        assert counters["stats"]["unique_graphs"] == made


def test_no_plan_a_stream_and_interrupted_streams(tiny_llama_engine):
    """Generations that share a program share its tensors, so a stream that another one has overtaken says so."""
    engine = tiny_llama_engine
    options = {"policy": GREEDY, "max_new_tokens": 6}
    expected = {prompt: engine.generate(prompt, **options, engine="fast")[0] for prompt in ("Hi", "Once")}
    options["engine"] = "graph"
    assert engine.generate("Hi", **options)[0].token_ids == expected["Hi"].token_ids
    assert "".join(engine.stream("Hi", **options)) == expected["Hi"].text

    stream = engine.stream("Hi", **options)
    next(stream)
    assert engine.generate("Once", **options)[0].token_ids == expected["Once"].token_ids
    with pytest.raises(InputError, match="Another generation of this shape"):
        list(stream)


def test_threads_that_want_one_program_wait_for_each_other(tiny_llama_engine):
    engine = tiny_llama_engine
    plans = [plan_of(engine, "add", scale) for scale in (1.0, -1.0, 0.5, 0.0)]

    def generated(plan):
        out = engine.generate(PROMPTS[:3], plan=plan, policy=GREEDY, max_new_tokens=NEW, engine="graph")
        edits = [[edit.mean_relative_change for edit in receipt.edits] for receipt in out.receipts]
        return [row.token_ids for row in out], edits

    one_by_one = [generated(plan) for plan in plans]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(generated, plans))
    assert [tokens for tokens, _ in together] == [tokens for tokens, _ in one_by_one]
    assert str([edits for _, edits in together]) == str([edits for _, edits in one_by_one])  # NaN where none is edited


def test_a_row_may_grow_beyond_the_room_that_its_prompt_takes(tiny_llama_engine):
    """Prompts of up to 64 tokens alone would share the smallest program."""
    options = {"plan": plan_of(tiny_llama_engine, "clamp"), "policy": GREEDY, "max_new_tokens": NEW}
    prompts = [[5 + k % 300 for k in range(program_rows.CAPACITY_STEP - 4)], [7, 60, 8]]
    fast, ours = (tiny_llama_engine.generate(prompts, engine=way, **options) for way in ("fast", "graph"))
    check_equal((fast, fast.receipts), (ours, ours.receipts))


@pytest.mark.parametrize("prompts", [[[5]], [[5], [60], [7]], [[5], [12, 200, 31, 44], [90]]], ids=["1", "3", "mixed"])
def test_prompts_of_one_token(tiny_llama_engine, prompts):
    options = {"plan": plan_of(tiny_llama_engine, "ablate"), "policy": GREEDY, "max_new_tokens": NEW}
    fast, ours = (tiny_llama_engine.generate(prompts, engine=way, **options) for way in ("fast", "graph"))
    check_equal((fast, fast.receipts), (ours, ours.receipts))


def test_nothing_to_generate(tiny_llama_engine):
    out = tiny_llama_engine.generate(
        [[5, 6], [7]], plan=plan_of(tiny_llama_engine, "add"), max_new_tokens=0, engine="graph"
    )
    assert [row.token_ids for row in out] == [[], []]
    assert [receipt.edited for receipt in out.receipts] == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_torchs_default_dtype_is_not_asked(fresh_engine, dtype):
    plan = plan_of(fresh_engine, "clamp")
    torch.set_default_dtype(dtype)
    try:
        check_equal(*both(fresh_engine, plan))
    finally:
        torch.set_default_dtype(torch.float32)


def test_autocast_is_no_part_of_programs_and_comparisons(fresh_engine, monkeypatch):
    """A recording would keep its dtypes, and the first comparison found half precision on a model in float32."""
    monkeypatch.setattr(GenerationTask, "_pays", lambda self, backend: True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert fresh_engine.generate("Hi", max_new_tokens=2).engine == "fast"
        with pytest.raises(InputError, match=r"Autocast is on, .* Use engine='fast'"):
            fresh_engine.generate("Hi", max_new_tokens=2, engine="graph")
    check_equal(*both(fresh_engine, plan_of(fresh_engine, "add")))


def test_dropout_is_no_part_of_programs_and_comparisons(tiny_gpt2_path):
    """The model was taken for another one, since both ways through it had dropped other numbers out."""
    with sl.load(tiny_gpt2_path, device="cpu") as engine, sl.load(tiny_gpt2_path, device="cpu") as still:
        engine.model.original_model.train()
        plan = plan_of(engine, "clamp")
        check_equal(*both(engine, plan))
        assert both(engine, plan)[1][0].completions == both(still, plan)[1][0].completions
        assert engine.model.original_model.training


def test_what_was_found_in_one_dtype_is_not_taken_for_another(fresh_engine, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(Rounding, "explains", lambda *_: False)
        with pytest.raises(InputError, match="comparison on this model found"):
            fresh_engine.generate("Hi", max_new_tokens=2, engine="graph")
    with pytest.raises(InputError, match="comparison on this model found"):
        fresh_engine.generate("Hi", max_new_tokens=2, engine="graph")
    fresh_engine.model.original_model.to(torch.float64)
    assert fresh_engine.generate("Hi", max_new_tokens=2, engine="graph").engine == "graph"


@pytest.mark.parametrize("replaces", ["a parameter", "a buffer"])
def test_a_stream_ends_where_a_weight_was_replaced(fresh_engine, replaces):
    """A recording would read what lay where the old one was."""
    model = fresh_engine.model.original_model
    stream = fresh_engine.stream("Hi", policy=GREEDY, max_new_tokens=6, engine="graph")
    next(stream)
    if replaces == "a parameter":
        head = unwrapped(model.get_output_embeddings())
        head.weight = torch.nn.Parameter(-head.weight.detach())
    else:
        rotary = next(module for module in model.modules() if "inv_freq" in module._buffers)
        rotary.inv_freq = rotary.inv_freq / 2
    with pytest.raises(InputError, match="A weight of the model was replaced since this stream's last piece"):
        list(stream)
    check_equal(*both(fresh_engine, plan_of(fresh_engine, "add")))


def test_lengths_share_few_programs():
    capacities = {program_rows._capacity(needed, None) for needed in range(1, 4097)}
    assert len(capacities) <= 24
    assert all(
        needed <= program_rows._capacity(needed, None) <= needed + max(63, needed / 3) for needed in range(1, 4097)
    )


def test_a_program_holds_no_more_than_the_context(tmp_path):
    """MPT makes its biases for as many tokens as its context has."""
    path = build_tiny_family(tmp_path, "mpt", context=100)
    with sl.load(path, device="cpu") as engine:
        fast, ours = (
            engine.generate([[5] * 90], policy=GREEDY, max_new_tokens=10, engine=e) for e in ("fast", "graph")
        )
        check_equal((fast, fast.receipts), (ours, ours.receipts))
    assert [program_rows._capacity(needed, 100) for needed in (64, 65, 100)] == [64, 100, 100]


def test_a_replaced_weight_makes_another_program_and_a_dropped_one_frees_its_cache(tmp_path, monkeypatch):
    with sl.load(build_tiny_family(tmp_path, "llama"), device="cpu") as engine:
        options = {"policy": GREEDY, "max_new_tokens": NEW}
        engine.generate("Hi", **options, engine="graph")
        made = programs(engine)
        head = unwrapped(engine.model.original_model.get_output_embeddings())
        head.weight = torch.nn.Parameter(-head.weight.detach())
        found = engine.generate("Hi", **options, engine="graph")
        assert found[0].token_ids == engine.generate("Hi", **options, engine="fast")[0].token_ids
        key = next(key for key, program in programs(engine).items() if program is not made.get(key))
        caches = {key: weakref.ref(program.cache) for key, program in programs(engine).items()}
        del made
        monkeypatch.setattr(_program, "_KEPT_PROGRAMS", 1)
        gc.collect()
        gc.disable()
        try:
            engine.generate(["Hi", "Once", "We"], **options, engine="graph")
        finally:
            gc.enable()
        assert len(programs(engine)) == 1
        assert caches[key]() is None


def test_prompts_of_one_length_run_as_on_fast_to_the_bit(tiny_llama_engine):
    prompts = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15, 16, 17, 18]]
    found = [
        tiny_llama_engine.generate(prompts, policy=GREEDY, max_new_tokens=2, engine=name) for name in ("fast", "graph")
    ]
    first, second = ([row.token_log_probs[0] for row in out] for out in found)
    assert first == second


def test_an_edit_counts_nothing_of_a_row_that_it_does_not_reach(tiny_llama_engine):
    """Such a row may have ended because its stream is no longer finite."""
    buffers = EditBuffers([1], 2, 4, tiny_llama_engine.info.d_model, torch.tensor([[1], [-1]]))
    buffers.fill([sl.add(random_vector(tiny_llama_engine, layer=1), coef=2.0)])
    buffers.place(0, 0, torch.ones(2, 4, dtype=torch.bool), 1.0)
    h = torch.ones(2, 1, tiny_llama_engine.info.d_model)
    h[1] = torch.nan
    assert buffers(h)[1].isnan().all()
    assert buffers.edited[0].tolist() == [1, 0]
    assert buffers.changes[0, 0] > 0
    assert buffers.changes[0, 1] == 0


def test_what_a_recording_could_not_hold_is_refused_before_one(tiny_llama_engine, monkeypatch):
    x = torch.arange(4.0)
    for reads in (x.sum().item, x.nonzero, lambda: x[x > 1], lambda: x.unique(), lambda: bool(x[0] > 1)):
        with NoReadback("cpu"), pytest.raises(RuntimeError, match="waits for the device"):
            reads()
        with NoReadback("cuda"):
            reads()
    step = _program.Program.step

    def watched(program):
        with NoReadback("cpu"):
            return step(program)

    monkeypatch.setattr(_program.Program, "step", watched)
    plan = plan_of(tiny_llama_engine, "clamp")
    assert tiny_llama_engine.generate("Hi", plan=plan, max_new_tokens=4, engine="graph").engine == "graph"


class NarrowRMSNorm(torch.nn.Module):
    """A norm with a large weight for some channels, to which 1 is added, as Gemma has it, or not."""

    def __init__(self, added):
        super().__init__()
        self.added, self.variance_epsilon = added, 1e-6
        self.weight = torch.nn.Parameter(torch.linspace(0.01, 400, 64))

    def forward(self, hidden_states):
        return (self.weight + self.added) * torch.nn.functional.rms_norm(hidden_states, (64,), eps=1e-6)


@pytest.mark.parametrize("added", [0.0, 1.0])
def test_a_norm_of_another_formula_is_left_alone(monkeypatch, added):
    pytest.importorskip("triton", reason="Triton is not installed here")
    from steerlab._kernels import elementwise

    monkeypatch.setattr(elementwise, "can_normalise", lambda rows, weight: True)
    monkeypatch.setattr(
        elementwise, "rms_norm", lambda rows, weight, eps: weight * torch.nn.functional.rms_norm(rows, (64,), eps=eps)
    )
    norm = NarrowRMSNorm(added).to(torch.bfloat16)
    norm.register_forward_hook(lambda module, args, output: output[:, :, :1])  # of an edit, which takes [rows, 1, d]
    fuse_between(norm, 64)
    assert ("forward" in norm.__dict__) == (added == 0)


@pytest.mark.parametrize("activation", ["silu", "gelu_pytorch_tanh"])
def test_a_gate_of_another_activation_is_left_alone(activation):
    pytest.importorskip("triton", reason="Triton is not installed here")
    config = LlamaConfig(hidden_size=32, intermediate_size=64, hidden_act=activation)
    mlp = LlamaMLP(config).requires_grad_(False)
    mlp.gate_proj.weight.mul_(1e-3)  # where these functions are nearly the same
    fuse_between(mlp, 64)
    assert ("forward" in mlp.__dict__) == (activation == "silu")


@pytest.mark.parametrize("kind", ["default", "llama3", "dynamic"])
def test_angles_of_one_position_come_out_of_a_table(kind):
    """But where the highest position of a pass changes the frequencies."""
    pytest.importorskip("triton", reason="Triton is not installed here")
    more = {"llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16}}
    rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0, **more.get(kind, {})}
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=0, vocab_size=8, rope_parameters=rope)
    plain, model = LlamaRotaryEmbedding(config), LlamaModel(config).requires_grad_(False)
    renewals = fuse_between(model, 40)
    x, one, several = torch.empty(0), torch.tensor([[3], [39], [0]]), torch.tensor([[0, 1, 77]])
    wanted = [plain(x, one), plain(x, several)]
    for ours, right in zip([model.rotary_emb(x, position_ids=one), model.rotary_emb(x, several)], wanted, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, right, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(model.rotary_emb(x.half(), one), plain(x.half(), one), strict=True))
    for embedding in (plain, model.rotary_emb):
        embedding.inv_freq.mul_(0.5)
    assert torch.equal(model.rotary_emb(x, one)[0], wanted[0][0]) == (kind != "dynamic")
    for renew in renewals:
        renew()
    assert all(torch.equal(a, b) for a, b in zip(model.rotary_emb(x, one), plain(x, one), strict=True))


# --- what is refused ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        FalconH1Config(num_hidden_layers=2),
        Lfm2Config(num_hidden_layers=2, layer_types=["conv", "full_attention"]),
        DeepseekV4Config(num_hidden_layers=2),  # of its layers there is no cache of fixed size
    ],
)
def test_a_cache_of_more_than_keys_and_values_does_not_fit(config):
    assert not fits(config)


def test_a_model_on_which_a_program_differs_is_refused(fresh_engine, monkeypatch):
    call = _program.Program._call_model
    monkeypatch.setattr(
        _program.Program, "_call_model", lambda self, ids, places, mask: call(self, ids, places + 1, mask)
    )
    with pytest.raises(InputError, match=r"comparison on this model found other logits .* Use engine='fast'"):
        fresh_engine.generate("Hi", max_new_tokens=2, engine="graph")


@pytest.mark.parametrize(("n_rows", "n_slots"), program_rows.TRIED)
def test_a_program_that_differs_for_some_sizes_only_is_refused(fresh_engine, monkeypatch, n_rows, n_slots):
    """Kernels compute few rows, many rows and long caches each in another way."""
    monkeypatch.setattr(program_rows, "runs_kernels", lambda rows: True)
    step = _program.Program.step

    def wrong(program):
        logits = step(program)
        return logits.roll(1, dims=-1) if program.mask.shape == (n_rows, min(n_slots, 256)) else logits

    monkeypatch.setattr(_program.Program, "step", wrong)
    with pytest.raises(InputError, match="comparison on this model found other logits"):
        fresh_engine.generate("Hi", max_new_tokens=2, engine="graph")


def test_the_comparison_reaches_every_way_of_the_kernels():
    triton = pytest.importorskip("triton", reason="Triton is not installed here")
    from steerlab._kernels import attention, linear, matvec

    def lanes(n_rows):
        if n_rows <= matvec.MATVEC_ROWS:
            return 0
        return max(16, triton.next_power_of_2(n_rows)) if n_rows <= linear.MOST_ROWS else None

    assert {lanes(n_rows) for n_rows, _ in program_rows.TRIED} == {lanes(n_rows) for n_rows in range(1, 200)}
    for n_keys in (1, 8, 64):
        found = [(attention._part(n_rows, n_keys, n), n) for n_rows, n in program_rows.TRIED]
        assert {part < n for (part, _, _), n in found} == {False, True}
        assert {(block, warps) for (_, block, warps), _ in found} == {attention._SHORT, attention._LONG}


def test_the_comparison_leaves_no_program_behind(fresh_engine):
    fresh_engine.generate("Hi", max_new_tokens=2, engine="graph")
    assert len(programs(fresh_engine)) == 1


def test_the_real_model_in_bfloat16_is_no_other_model(smollm2_path):
    """It ran on the bridge, and shared no weights, since rounding at special tokens was taken for a difference."""
    with sl.load(smollm2_path, device="cpu", dtype="bfloat16") as engine:
        assert engine.generate("The new café", max_new_tokens=2, engine="graph").engine == "graph"
        assert engine.plain_model().dtype == torch.bfloat16


@pytest.mark.parametrize("way", ["graph", "auto"])
def test_a_comparison_without_memory_is_no_verdict(fresh_engine, monkeypatch, way):
    """It was remembered as if the model's outputs differed."""
    options = {"policy": GREEDY, "max_new_tokens": NEW}
    monkeypatch.setattr(GenerationTask, "_pays", lambda self, backend: True)
    update = FixedLayer.update

    def starved(layer, *args, **kwargs):
        if layer.max_cache_len > 64:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has no more.")
        return update(layer, *args, **kwargs)

    monkeypatch.setattr(FixedLayer, "update", starved)
    said = r"Memory did not suffice for the short comparison .*\(CUDA out of memory\. Tried to allocate 2\.00 GiB"
    if way == "graph":
        with pytest.raises(InputError, match=said):
            fresh_engine.generate(PROMPTS[:3], engine=way, **options)
    else:
        with pytest.warns(SteerlabWarning, match=said + ".* runs on the fast engine"):
            assert fresh_engine.generate(PROMPTS[:3], engine=way, **options).engine == "fast"
        assert fresh_engine.generate(PROMPTS[:3], engine=way, **options).engine == "fast"  # and is silent
    monkeypatch.setattr(FixedLayer, "update", update)
    assert fresh_engine.generate(PROMPTS[:3], engine=way, **options).engine == "graph"


# --- what fails though it was compared ----------------------------------------------------------------------------


def cannot_record(monkeypatch, error):
    """Lets programs be recorded, at which this error comes, as from an operation that a recording cannot hold."""

    def fails(work, *_):
        work()
        raise error

    monkeypatch.setattr(_program, "Recording", fails)
    monkeypatch.setattr(_program.Program, "is_recorded", True)
    monkeypatch.setattr(GenerationTask, "_pays", lambda self, backend: True)


NOT_CAPTURED = RuntimeError("CUDA error: operation not permitted when stream is capturing\nSearch for it in the docs.")


def test_a_pass_that_cannot_be_recorded_runs_on_fast_from_the_start(fresh_engine, monkeypatch):
    """The call raised half way."""
    fresh_engine.generate("Hi", max_new_tokens=2, engine="graph")  # the comparison is made
    options = {"plan": plan_of(fresh_engine, "clamp"), "max_new_tokens": NEW, "seed": 5, "n": 2}
    options["policy"] = sl.SamplingPolicy(temperature=1.5)
    fast = fresh_engine.generate(PROMPTS[:3], engine="fast", **options)
    cannot_record(monkeypatch, NOT_CAPTURED)
    before = torch.get_rng_state()
    with pytest.warns(SteerlabWarning) as said:
        found = fresh_engine.generate(PROMPTS[:3], **options)
    assert torch.equal(torch.get_rng_state(), before)
    assert [str(one.message) for one in said] == [
        "Recording the pass as CUDA graphs failed (RuntimeError: CUDA error: operation not permitted when stream is "
        "capturing). Generation runs on the fast engine."
    ]
    assert found.engine == "fast"
    assert [row.token_log_probs for row in found] == [row.token_log_probs for row in fast]
    assert found.receipts == fast.receipts

    # it is not tried again, and the warning is not repeated
    monkeypatch.setattr(program_rows, "program_for", None)
    again = fresh_engine.generate(PROMPTS[:3], **options)
    assert [row.token_ids for row in again] == [row.token_ids for row in fast]


def test_a_pass_that_cannot_be_recorded_is_an_error_where_it_was_asked_for(fresh_engine, monkeypatch):
    fresh_engine.generate("Hi", max_new_tokens=2, engine="graph")
    cannot_record(monkeypatch, NOT_CAPTURED)
    said = r"engine='graph' cannot run here: Recording .* failed \(RuntimeError: .* capturing\)\. Use engine='fast'"
    for _ in range(2):
        with pytest.raises(InputError, match=said):
            fresh_engine.generate("Hi", max_new_tokens=NEW, engine="graph")
    with pytest.raises(InputError, match=said):
        list(fresh_engine.stream("Once upon", max_new_tokens=NEW, engine="graph"))
    assert programs(fresh_engine) == {}


def test_what_the_compiler_raises_is_an_error_that_says_what_to_do(fresh_engine, monkeypatch):
    def compiled(function, **_):
        def fails(*_):
            raise RuntimeError("Unsupported: a call that cannot be traced")

        return fails

    monkeypatch.setattr(torch, "compile", compiled)
    said = r"engine='compiled' cannot run here: .* failed \(RuntimeError: Unsupported: .*\)\. Use engine='fast'\."
    with pytest.raises(InputError, match=said):
        fresh_engine.generate("Hi", max_new_tokens=2, engine="compiled")
    assert fresh_engine.generate("Hi", max_new_tokens=2, engine="graph").engine == "graph"


def test_the_comparison_with_the_bridge_without_memory_is_no_verdict(fresh_engine, monkeypatch):
    """The model ran on the bridge from then on."""

    def starved(*_, **__):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with monkeypatch.context() as patched:
        patched.setattr(LlamaMLP, "forward", starved)
        with pytest.raises(torch.OutOfMemoryError):
            fresh_engine.generate("Hi", max_new_tokens=2)
    assert fresh_engine.generate("Hi", max_new_tokens=2).engine == "fast"


def test_a_recording_without_memory_is_tried_again(fresh_engine, monkeypatch):
    fresh_engine.generate("Hi", max_new_tokens=2, engine="graph")
    with monkeypatch.context() as starved:
        cannot_record(starved, torch.OutOfMemoryError("CUDA out of memory."))
        with pytest.warns(SteerlabWarning, match=r"failed \(memory ran out, CUDA out of memory\)\. .* fast engine"):
            assert fresh_engine.generate("Hi", max_new_tokens=NEW).engine == "fast"
        assert programs(fresh_engine) == {}
    monkeypatch.setattr(GenerationTask, "_pays", lambda self, backend: True)
    assert fresh_engine.generate("Hi", max_new_tokens=NEW).engine == "graph"


def test_the_error_that_stops_a_recording_is_the_one_that_comes(monkeypatch):
    """Ending the void recording raised over it."""
    ended = []

    class Void:
        def capture_begin(self, **_):
            ended.append(False)

        def capture_end(self):
            ended[-1] = True
            raise RuntimeError("operation failed due to a previous error during capture")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Void)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(_recording, "_streams_on", lambda devices: nullcontext())
    transfers = _recording.RecordedTransfers({})

    def work():
        if transfers.recording is not None:
            raise ValueError("no such kernel")
        return torch.zeros(1)

    with pytest.raises(ValueError, match="no such kernel"):
        Recording(work, [torch.device("cpu")], transfers, lambda: None)
    assert ended == [True]
    assert transfers.recording is None


def test_constants_of_a_pass_are_made_once():
    """On a GPU `torch.tensor` of a number waits for the device, which a recording cannot."""
    constants, makers = _recording.KeptConstants(), []

    class Noting(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            makers.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    for _ in range(2):
        makers.clear()
        with constants, Noting():
            two = torch.tensor(2.0)
            two.add_(1)  # a pass may change its own, and begins anew the next time
            several, whole = torch.tensor([2.0, 3.0]), torch.tensor(2)
        assert float(two) == 3.0
        assert several.tolist() == [2.0, 3.0]
        assert whole.dtype == torch.int64
    assert makers == ["clone", "add_", "clone", "clone"]
    with constants:  # a list that looks the same on paper, and is not
        made = [torch.tensor([torch.tensor(value)]) for value in (1.00001, 1.00002)]
    assert made[0] != made[1]


def test_experts_in_float32_ask_the_device_nothing(tmp_path):
    """Whose kernel is for bfloat16: elsewhere Hugging Face counts the tokens of each expert on the processor."""
    with sl.load(build_family(tmp_path, "mixtral"), device="cpu") as engine:
        found = [engine.generate(PROMPTS[:3], policy=GREEDY, max_new_tokens=NEW, engine=n) for n in ("fast", "graph")]
        assert [row.token_ids for row in found[1]] == [row.token_ids for row in found[0]]
        (program,) = programs(engine).values()
        assert program.unhooked.model.config._experts_implementation == "batched_mm"
        assert engine.model.original_model.config._experts_implementation == "grouped_mm"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", ["gemma2", "gemma4_text", "gpt_oss", "mixtral", "bloom"])
def test_what_some_families_compute_otherwise_is_recorded(name, tmp_path):
    """Eager attention, whose mask is made of numbers; a rotary function of its own; experts; ALiBi."""
    with sl.load(build_family(tmp_path, name), device="cuda") as engine:
        found = [engine.generate(PROMPTS[:3], policy=GREEDY, max_new_tokens=NEW, engine=n) for n in ("fast", "graph")]
        assert [row.token_ids for row in found[1]] == [row.token_ids for row in found[0]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_void_recording_leaves_the_device_as_it_was():
    device = torch.device("cuda", 0)
    tensor, before = torch.ones(4, device=device), torch.cuda.get_rng_state(device)

    def work():
        found = tensor * 2 + torch.rand(4, device=device)
        torch.cuda.synchronize()  # which no recording can hold
        return found

    with pytest.raises(RuntimeError, match="captur"):
        Recording(work, [device], _recording.RecordedTransfers({}), lambda: None)
    assert torch.equal(torch.cuda.get_rng_state(device), before)
    assert torch.rand(4, device=device).isfinite().all()
    torch.cuda.empty_cache()
    assert float((tensor * 2).sum()) == 8


def test_a_model_that_ignores_its_mask_gets_no_program(tiny_llama_path, monkeypatch):
    """Its rows run whole on the fast engine; in a program, padded ones would get other tokens than alone."""
    forward = LlamaModel.forward
    monkeypatch.setattr(LlamaModel, "forward", lambda *args, attention_mask=None, **given: forward(*args, **given))
    with sl.load(tiny_llama_path, device="cpu") as engine:
        engine.model.original_model.config.model_type = "something_else"
        with pytest.raises(InputError, match=r"found other logits than the fast engine's\. Use engine='fast'"):
            engine.generate(PROMPTS[:3], policy=GREEDY, max_new_tokens=2, engine="graph")
        monkeypatch.setattr(GenerationTask, "_pays", lambda self, backend: True)  # as on a GPU
        with pytest.warns(SteerlabWarning, match=r"than the fast engine's\. Generation runs on the fast engine"):
            assert engine.generate(PROMPTS[:3], policy=GREEDY, max_new_tokens=2).engine == "fast"


def test_an_edit_in_the_middle_of_a_layer_is_refused(tiny_llama_engine):
    plan = sl.Plan(sl.add(random_vector(tiny_llama_engine, layer=1, site="resid_mid"), coef=1.0))
    with pytest.raises(InputError, match=r"The plan edits resid_mid\. Use engine='fast'"):
        tiny_llama_engine.generate("Hi", plan=plan, max_new_tokens=2, engine="graph")


def test_hooks_of_a_user_are_refused(tiny_llama_engine):
    with (
        tiny_llama_engine.model.hooks(fwd_hooks=[("blocks.1.hook_out", lambda value, hook: None)]),
        pytest.raises(InputError, match="hooks of yours"),
    ):
        tiny_llama_engine.generate("Hi", max_new_tokens=2, engine="graph")


def test_the_context_is_checked_all_the_same(tiny_llama_engine):
    with pytest.raises(sl.ContextLengthError):
        tiny_llama_engine.generate([[5] * 255], max_new_tokens=2, engine="graph")
    assert torch.is_grad_enabled()


# --- several devices ----------------------------------------------------------------------------------------------


def test_layers_are_spread_by_bytes_and_a_shared_head_stays_with_its_embedding():
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2, "num_hidden_layers": 6}

    def places(n_devices, **options):
        with torch.device("meta"):
            return balanced(LlamaForCausalLM(LlamaConfig(**sizes, **options)), n_devices)

    heavy_ends = places(2, vocab_size=100)
    layers = [heavy_ends[f"model.layers.{layer}"] for layer in range(6)]
    assert layers == [0, 0, 0, 1, 1, 1]
    assert (heavy_ends["model.embed_tokens"], heavy_ends["model.norm"], heavy_ends["lm_head"]) == (0, 1, 1)
    shared = places(2, vocab_size=100, tie_word_embeddings=True)
    assert shared["lm_head"] == shared["model.embed_tokens"] == shared["model.rotary_emb"] == 0
    assert sum(shared[f"model.layers.{layer}"] for layer in range(6)) > 3
    assert set(places(1, vocab_size=100).values()) == {0}
    assert sorted(set(places(4, vocab_size=4).values())) == [0, 1, 2, 3]
