"""Every mistake named in the issue, made once through the public API: the error's class, and what its message says."""

import math

import pandas as pd
import pytest
import torch

import steerlab as sl
from steerlab.core._hook_points import HookPoint
from steerlab.sequences import importance_weights


def ones(width=64, layer=1, site="resid_post"):
    return sl.SteeringVector.from_tensor(torch.ones(width), layer=layer, site=site)


def torch_file(folder):
    torch.save({1: torch.ones(64)}, folder / "v.pt")
    return folder / "v.pt"


def sequences():
    return sl.BatchedSequences.from_ids([[5]], [[[6]]])


def plan(vector):
    return sl.Plan(sl.add(vector, coef=1.0))


CASES = {
    "unknown model": (
        lambda e, tmp: sl.load(tmp / "nowhere"),
        sl.ModelNotFoundError,
        "nowhere",
    ),
    "unknown hook point": (
        lambda e, tmp: HookPoint.parse("blocks.1.hook_resid_pots"),
        sl.HookPointError,
        "resid_post",
    ),
    "unknown layer in a plan": (
        lambda e, tmp: e.generate("Hi", plan=plan(ones(layer=4))),
        sl.HookPointError,
        "Layer 4 does not exist: the model has 4 layers, numbered 0 to 3",
    ),
    "unknown layer in a capture": (
        lambda e, tmp: e.capture("Hi", layers=[-5]),
        sl.HookPointError,
        "Layer -5 does not exist",
    ),
    "unknown layer in an extraction": (
        lambda e, tmp: sl.extract(e, sl.ContrastPairs.from_lists(["a"], ["b"]), layers=9),
        sl.HookPointError,
        "Layer 9 does not exist",
    ),
    "unknown site": (
        lambda e, tmp: e.capture("Hi", layers=1, site="resid_end"),
        sl.HookPointError,
        "the sites are resid_pre, resid_mid, resid_post, attn_out, mlp_out",
    ),
    "wrong vector width": (
        lambda e, tmp: e.score("Hi", [" a"], plan=plan(ones(32))),
        sl.VectorShapeError,
        r"shape \[32\], the residual stream of .* has \[64\]",
    ),
    "a number for a vector": (
        lambda e, tmp: sl.SteeringVector.from_tensor(torch.ones(64)[-1], layer=1),
        sl.VectorShapeError,
        r"\[d_model\], got \(\)",
    ),
    "NaN in a vector": (
        lambda e, tmp: sl.SteeringVector.from_tensor(torch.tensor([1.0, math.nan]), layer=1),
        sl.VectorValueError,
        "1 NaN or infinite",
    ),
    "a zero vector": (
        lambda e, tmp: plan(ones().scaled(0.0)),
        sl.VectorValueError,
        "no direction",
    ),
    "no targets": (lambda e, tmp: e.score(["Hi"], [[]]), sl.TargetError, "Prompt 0 has no targets"),
    "empty target": (lambda e, tmp: e.score(["Hi"], [[""]]), sl.TargetError, "empty target"),
    "empty target ids": (lambda e, tmp: e.score(["Hi"], [[[]]]), sl.TargetError, "empty target|list of ids"),
    "a string for a list of targets": (
        lambda e, tmp: e.score(["Hi"], [" a"]),
        sl.TargetError,
        r"write \[' a'\] for one target",
    ),
    "too few lists of targets": (
        lambda e, tmp: e.score(["Hi", "Ho"], [[" a"]]),
        sl.TargetError,
        "2 prompts and 1 lists",
    ),
    "no prompts": (lambda e, tmp: e.generate([]), sl.PromptError, "no prompts"),
    "an id outside the vocabulary": (
        lambda e, tmp: e.generate([[5, 384]]),
        sl.PromptError,
        "token id 384, outside the model's vocabulary of 0 to 383",
    ),
    "a prompt past the context": (
        lambda e, tmp: e.score([[5] * 300], [[" a"]]),
        sl.ContextLengthError,
        "300 tokens, 44 more than the context of 256",
    ),
    "new tokens past the context": (
        lambda e, tmp: e.generate([[5] * 200], max_new_tokens=100),
        sl.ContextLengthError,
        "300 tokens, 44 more than the context of 256",
    ),
    "a missing vector file": (
        lambda e, tmp: sl.SteeringVector.load(tmp / "none.safetensors"),
        sl.VectorFileError,
        "none.safetensors",
    ),
    "an edit for a plan": (
        lambda e, tmp: e.generate("Hi", plan=sl.add(ones(), coef=1.0)),
        sl.PlanError,
        r"wrap edits in Plan\(\)",
    ),
    "plans for other prompts": (
        lambda e, tmp: e.generate(["Hi", "Ho"], plan=[None]),
        sl.PlanError,
        "1 plans for 2 prompts",
    ),
    "two strengths": (lambda e, tmp: sl.add(ones(), coef=1.0, dose=1.0), sl.PlanError, "exactly one strength"),
    "a dose that is no number": (lambda e, tmp: sl.add(ones(), dose=math.nan), sl.PlanError, "dose is a finite"),
    "a scale that is no number": (lambda e, tmp: plan(ones()).scaled(math.inf), sl.PlanError, "finite number"),
    "a negative temperature": (
        lambda e, tmp: sl.SamplingPolicy(temperature=-1),
        sl.PolicyError,
        "temperature must be ≥ 0",
    ),
    "top_p of 0": (lambda e, tmp: sl.SamplingPolicy(top_p=0), sl.PolicyError, r"top_p must be in \(0, 1\], got 0"),
    "an unknown method": (
        lambda e, tmp: sl.extract(e, sl.ContrastPairs.from_lists(["a"], ["b"]), "magic"),
        sl.InputError,
        "Unknown extraction method 'magic'.*mean_diff.*bipo, reft_r1, reps, loreft",
    ),
    "a list for pairs": (
        lambda e, tmp: sl.extract(e, [("a", "b")]),
        sl.DataError,
        r"got list.*from_lists\(positives, negatives\)",
    ),
    "a number for a model": (lambda e, tmp: sl.load(3), sl.InputError, "a model's name or directory.*got 3"),
    "nothing for a model": (lambda e, tmp: sl.load(None), sl.InputError, "a model's name or directory.*got None"),
    "records for a frame": (
        lambda e, tmp: sl.Targets.from_frame([{"prompt": "a"}]),
        sl.DataError,
        "from_frame takes a pandas or polars frame, got list",
    ),
    "a frame for records": (
        lambda e, tmp: sl.Targets.from_records(pd.DataFrame({"prompt": ["a"]})),
        sl.DataError,
        "got DataFrame; from_frame reads it",
    ),
    "a split that is not there": (
        lambda e, tmp: sl.shipped.pairs("sentiment", "training"),
        sl.DataError,
        "with split 'training'; its splits are dev, train",
    ),
    "several rows for a vector": (
        lambda e, tmp: sl.SteeringVector.from_tensor(torch.ones(1, 64), layer=1),
        sl.VectorShapeError,
        r"got \(1, 64\). Choose one row",
    ),
    "one number for a vector": (
        lambda e, tmp: sl.SteeringVector.from_tensor(torch.ones(()), layer=1),
        sl.VectorShapeError,
        r"got \(\). \(Indexing a \[d_model\] tensor",
    ),
    "a cosine of two widths": (
        lambda e, tmp: ones().cosine(ones(width=8)),
        sl.VectorMismatchError,
        "widths 64 and 8 have no cosine",
    ),
    "a vector for a set": (lambda e, tmp: sl.VectorSet(ones()), sl.VectorShapeError, r"\(v,\) for one"),
    "another tool's file": (
        lambda e, tmp: sl.VectorSet.load(torch_file(tmp)),
        sl.VectorFileError,
        "not a steerlab vector file.*VectorSet.from_torch",
    ),
    "a list of edits": (
        lambda e, tmp: sl.Plan([sl.ablate(ones())]),
        sl.PlanError,
        r"got list; pass them one by one, sl\.Plan\(\*edits\)",
    ),
    "a model for its engine": (
        lambda e, tmp: plan(ones()).hooks(e.model),
        sl.PlanError,
        r"plan\.hooks\(engine\); got TransformerBridge",
    ),
    "an engine for its norms": (
        lambda e, tmp: plan(ones()).resolved(e),
        sl.PlanError,
        r"takes engine\.median_norm, got LensEngine",
    ),
    "a set to project on": (
        lambda e, tmp: sl.show_tokens(e, "the cat", vector=sl.VectorSet((ones(),))),
        sl.InputError,
        "vector=, the direction to project on.*got VectorSet",
    ),
    "a vector of another width to project on": (
        lambda e, tmp: sl.show_tokens(e, "the cat", vector=ones(width=8)),
        sl.VectorMismatchError,
        r"has shape \[8\], the residual stream of .* has \[64\]",
    ),
    "a text on a vector of another width": (
        lambda e, tmp: sl.project_text(e, "the cat", ones(width=8)),
        sl.VectorMismatchError,
        r"has shape \[8\]",
    ),
    "a text on a list": (lambda e, tmp: sl.project_text(e, "the cat", [ones()]), sl.InputError, "got list"),
    "pairs on a set": (
        lambda e, tmp: sl.project_pairs(e, sl.ContrastPairs.from_lists(["a"], ["b"]), sl.VectorSet((ones(),))),
        sl.InputError,
        "takes one SteeringVector.*got VectorSet",
    ),
    "responses without their list": (
        lambda e, tmp: sl.BatchedSequences.from_ids([[5]], [[6, 7]]),
        sl.InputError,
        r"\[\[\[3, 4\]\]\] for one prompt",
    ),
    "sequences for their scores": (
        lambda e, tmp: importance_weights(sequences(), sequences()),
        sl.InputError,
        "new is what processor.teacher_force_logprobs",
    ),
}


@pytest.mark.usefixtures("unchecked_types")
@pytest.mark.parametrize("case", CASES)
def test_a_mistake_gets_its_own_error_that_names_it(tiny_llama_engine, tmp_path, case):
    call, error, message = CASES[case]
    with pytest.raises(error, match=message) as caught:
        call(tiny_llama_engine, tmp_path)
    assert isinstance(caught.value, sl.SteerlabError)
    assert isinstance(caught.value, ValueError)


def test_a_target_that_tokenises_to_nothing(tiny_llama_engine, monkeypatch):
    from tokenizers.normalizers import Strip

    monkeypatch.setattr(tiny_llama_engine.tokenizer.backend_tokenizer, "normalizer", Strip())
    try:
        with pytest.raises(sl.TargetError, match="no token of its own"):
            tiny_llama_engine.score("Hi", ["  "])
    finally:
        monkeypatch.undo()


@pytest.mark.parametrize("damage", ["truncated", "not ours", "NaN"])
def test_damaged_vector_files(tmp_path, damage):
    path = ones().save(tmp_path / "v.safetensors")
    data = path.read_bytes()
    if damage == "truncated":
        path.write_bytes(data[:-10])
    elif damage == "not ours":
        path.write_bytes(b"PK\x03\x04 this is a zip")
    else:
        path.write_bytes(data[:-4] + b"\x00\x00\xc0\x7f")
    with pytest.raises(sl.VectorFileError, match=r"v\.safetensors"):
        sl.SteeringVector.load(path)
