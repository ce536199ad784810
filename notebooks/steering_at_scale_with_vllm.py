# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Steering at scale with vLLM
#
# The same plans run inside vLLM: every request of a batch can have its own plan, scores are exact there too, and no
# request's edits affect another request. This notebook runs a real vLLM engine on the CPU with a small model; on a GPU
# only the numbers of tokens per second change. It takes about 50 seconds of processor time on two cores, most of it the
# engine's start.
#
# vLLM must be installed (`pip install vllm==0.32.0` on a GPU host; the documentation's *Installation* says how on a
# CPU).

# %% [markdown]
# Some settings must be made before vLLM is imported. The first keeps the engine in this process, which starts faster
# and suits a notebook; the second keeps its cache small.

# %%
import os

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

import pandas as pd

import steerlab as sl
from steerlab.core.shipped import shipped_vectors
from steerlab.vllm import SequenceProb

# %% [markdown]
# ## An engine with two wired layers
#
# vLLM compiles the model when it starts, so the layers that plans may edit (the *wired* layers) are stated at the
# start. The shipped sentiment vector belongs to layer 14, the one for formality to layer 24. `max_model_len` must
# exceed the windows of 256 tokens on which a dose is measured.

# %%
sentiment, formality = (
    sl.SteeringVector.load(shipped_vectors() / name / f"{name}.safetensors") for name in ("sentiment", "formality")
)
engine = sl.VLLMEngine(
    "smollm2-135m",
    layers=[sentiment.layer, formality.layer],
    dtype="float32",
    max_model_len=320,
    max_num_seqs=16,
    enforce_eager=True,
)
engine

# %% [markdown]
# `enforce_eager` skips compilation, which would take longer here than it saves. On a GPU leave it out: steering then
# runs inside the CUDA graphs.
#
# ## One batch, many plans
#
# A list of plans holds one per prompt, and None is an unsteered request. All six requests below run together.

# %%
prompt = "The letter from my sister arrived this morning, and it"
plans = {
    "unsteered": None,
    "favourable": sl.Plan(sl.add(sentiment, dose=0.2)),
    "unfavourable": sl.Plan(sl.add(sentiment, dose=-0.2)),
    "formal": sl.Plan(sl.add(formality, dose=0.2)),
    "both": sl.Plan(sl.add(sentiment, dose=0.2), sl.add(formality, dose=0.2)),
    "dose 0": sl.Plan(sl.add(sentiment, dose=0.2)).scaled(0),
}
greedy = sl.SamplingPolicy.greedy()
batch = engine.generate([prompt] * len(plans), plan=list(plans.values()), policy=greedy, max_new_tokens=16)
texts = dict(zip(plans, batch.texts, strict=True))
assert texts["dose 0"] == texts["unsteered"]
assert len({texts[name] for name in ("unsteered", "favourable", "unfavourable")}) > 1
pd.Series(texts, name=prompt).to_frame()

# %% [markdown]
# Six requests with one prompt and different endings, while dose 0 gives exactly the tokens of the unsteered request. A
# plan need not change a greedy text: where it does not make another token the most probable one, the text stays the
# same (possibly so here for the favourable plan, as the letter is good news anyway). The scores further down show what
# texts hide. One batch is also a test of isolation: vLLM shares the cache of equal prompts, and a tool that edits
# activations without telling the cache would give one request's edits to the next.
#
# ## Receipts
#
# A receipt states what a plan really edited. Edits are counted inside the operator, per request, and compared with what
# the plan implies. A difference raises an error, so every result that is returned is complete.

# %%
rows = [
    {"request": name, "layer": edit.layer, "operator": edit.operator, "edited": edit.edited, "expected": edit.expected}
    for name, receipt in zip(plans, batch.receipts, strict=True)
    for edit in receipt.edits
]
assert all(row["edited"] == row["expected"] for row in rows)
assert {row["request"] for row in rows} >= {"favourable", "unfavourable", "formal", "both"}
assert not batch.receipts[0].edits
pd.DataFrame(rows)

# %% [markdown]
# Sixteen positions each: the last prompt token and fifteen sampled ones, as the last sampled token predicts nothing.
#
# ## Nothing leaks
#
# The most direct test of isolation: run the steered requests first, then the same prompt unsteered, alone, on the warm
# cache:

# %%
alone = engine.generate([prompt], policy=greedy, max_new_tokens=16)
assert alone[0].token_ids == batch[0].token_ids
alone

# %% [markdown]
# A plan for a layer that was not wired is refused with an error. With `on_error="return"` only that request fails, and
# the others of the batch continue:

# %%
astray = sl.Plan(sl.add(sl.SteeringVector.from_tensor(sentiment.values, layer=3), coef=1.0))
mixed = engine.generate([prompt] * 2, plan=[astray, None], policy=greedy, max_new_tokens=16, on_error="return")
assert mixed[0].finish_reason == "error"
assert mixed[1].token_ids == batch[0].token_ids
mixed

# %% [markdown]
# ## Exact scores
#
# Scores are sums over all tokens of a target here too. Each prompt can have its own plan, so that several doses need
# one call.

# %%
doses = [-0.2, -0.1, 0.0, 0.1, 0.2]
ladder = [sl.Plan(sl.add(sentiment, dose=1.0)).scaled(dose) for dose in doses]
question = "My honest opinion of the street market is that it was"
frame = engine.score([question] * len(doses), [[" wonderful", " terrible"]] * len(doses), plan=ladder).to_frame()
table = frame.pivot(index="prompt_index", columns="target_index", values="log_prob")
margin = pd.Series((table[0] - table[1]).to_numpy(), index=pd.Index(doses, name="dose"), name="margin (nats)")
assert margin.is_monotonic_increasing
margin.to_frame().round(2)

# %% [markdown]
# The margin rises with every step of the dose. This is one prompt; for an effect with nulls, run the whole experiment
# on this engine with `sl.Experiment(..., backend="vllm", layers=[14])`.
#
# `SequenceProb` gives the same numbers as plain dictionaries, one per prompt, sequence and variant. A sequence with and
# without a leading space is two strings, and both are reported.

# %%
found = SequenceProb(engine).get_log_prob(["The capital of France is"], ["Paris", "Rome"], variants=("", " "))
by_sequence = {row["sequence"]: row["log_prob"] for row in found}
assert by_sequence[" Paris"] > by_sequence[" Rome"]
assert by_sequence[" Paris"] > by_sequence["Paris"]
pd.DataFrame(found).assign(sequence=[repr(row["sequence"]) for row in found]).round(4)

# %% [markdown]
# ## The same answer on both engines
#
# A fast engine is useful only if its results are the same. Parity scores the same tokens under the same plan on the
# TransformerLens engine and on this one. The tolerance is measured: four times the difference of the two engines
# *without* a plan.

# %%
exp = sl.Experiment("parity", model="smollm2-135m", root=None, dtype="float32", device="cpu")
parity = exp.parity(plans["both"], prompts=[prompt, question], against=engine, max_new_tokens=12)
assert parity.passed
assert parity.max_delta < 1e-3 < parity.steering_size
parity

# %% [markdown]
# The engines sum in another order, so they differ in the last digits of float32; the plan moves the same
# log-probabilities by thousands of times more. Receipts agree as well. (In half precision the unsteered difference is
# far larger, and so is the tolerance.)
#
# ## Close
#
# An engine holds memory, on a GPU nearly all of it, until it is closed. In a script use `with sl.VLLMEngine(...)`,
# which closes it on errors too, and put the code under `if __name__ == "__main__":`, because vLLM starts processes of
# its own there.

# %%
engine.close()
exp.close()

# %% [markdown]
# ## Exercises
#
# 1. Ask for `n=8` samples per prompt with `sl.SamplingPolicy(temperature=0.8)`. Are they the same with another batch?
# 2. Let a plan edit generated positions only (`where=sl.where.generated()`). Which cache blocks can it share with
#    unsteered requests, and what does `.inherited` of the result say after a second call?
# 3. Repeat parity with `dtype="bfloat16"` on both engines. How large is the measured tolerance?
# 4. Run the effect of *First steps* with `backend="vllm"`. Compare the slopes.
