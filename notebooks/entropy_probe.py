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
# # Where does a predicted change of entropy hold?
#
# A policy-gradient step changes how random a policy is, and entropy that falls too fast ends learning. Can the change
# be predicted from the batch that makes the step? `entropy_probe` predicts it to first and second order in the step's
# length, and measures what really happens at its end: with importance weights on the old responses, and with new ones.
# The whole page takes about 30 seconds of processor time.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
from transformers import AutoModelForCausalLM, AutoTokenizer

from steerlab.experiment.plots import style
from steerlab.models import resolve
from steerlab.sequences import (
    GenerationConfig,
    SequenceProcessor,
    entropy_probe,
    group_advantages,
    update_direction,
)

path = resolve("smollm2-135m").path
model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(path)
processor = SequenceProcessor(model, tokenizer, config=GenerationConfig(max_new_tokens=5, tf_batch_size=16))

# %% [markdown]
# ## A batch and its direction
#
# One prompt, 16 responses, and a reward that likes short words. Each reward less the mean of the others is an
# advantage; the direction is the gradient of the mean advantage. (With second moments of an Adam optimiser it would be
# scaled as Adam scales it; see the exercises.) To keep this page quick it moves one matrix, and we give the direction
# that matrix's own norm: η is then the size of the step relative to the matrix.

# %%
prompts = ["The weather today is"]
batch = processor.generate_batched(prompts, 16, seed=0)
rewards = [
    [-float(np.mean([len(word) for word in text.split()] or [0])) for text in row] for row in batch.responses_text
]
name = "model.layers.20.mlp.down_proj.weight"
gradient = update_direction(processor, batch, group_advantages(rewards), names=[name])
matrix = model.get_parameter(name).detach()
size = float(matrix.norm() / gradient[name].norm())
v = {name: gradient[name] * size}
assert abs(group_advantages(rewards).sum()) < 1e-9
assert abs(v[name].norm() / matrix.norm() - 1) < 1e-4
pd.DataFrame({"reward": rewards[0], "response": batch.responses_text[0]}).head(3)

# %% [markdown]
# ## Predicted and measured
#
# The probe draws responses of its own: a direction fitted to the responses that judge it would look too good.

# %%
etas = [0.003, 0.02, 0.1]
before = matrix.clone()
probe = entropy_probe(processor, prompts, v, etas, G=16, seed=1)
frame = probe.to_frame()
assert (matrix == before).all()
frame.round(2)

# %% [markdown]
# Read a row from the left: what the slope predicts, what slope and curvature predict, and the two measurements with
# their intervals. `effective_sample_size` says how many of the 16 old responses still speak for the moved policy.

# %%
with style():
    fig, ax = plt.subplots(figsize=(3.6, 3.0))
    ax.plot(frame.eta, frame.first_order, "-", color="#222222", label="first order")
    for column, marker, colour in (("weighted", "o", "#00457A"), ("fresh", "^", "#D55E00")):
        low, high = frame[f"{column}_low"], frame[f"{column}_high"]
        ax.errorbar(frame.eta, frame[column], [frame[column] - low, high - frame[column]], fmt=marker, color=colour,
                    capsize=2, label=column)  # fmt: skip
    ax.set_xscale("log")
    ax.set(xlabel="step η, relative to the matrix", ylabel="change of entropy (nats)")
    ax.set_title("The line holds for short steps")
    ax.legend(loc="lower left")
    plt.show()
assert (frame.weighted_low < frame.weighted).all()

# %% [markdown]
# ## Where the prediction holds
#
# For the shortest step all three numbers are one within their intervals, and nearly all old responses count. For the
# longest the policy is another one: the old responses have lost most of their weight, so that their estimate (and its
# interval, which knows only the responses it has) is not to be trusted, and only new responses tell. That is the rule:
# **believe the prediction as far as the effective sample size stays high; beyond that, draw anew.**

# %%
share = frame.effective_sample_size / 16
short, long = frame.iloc[0], frame.iloc[-1]
assert share.iloc[0] > 0.9
assert share.iloc[-1] < 0.5
assert share.is_monotonic_decreasing
assert short.weighted_low <= short.first_order <= short.weighted_high
assert abs(long.fresh - long.second_order) > abs(short.fresh - short.second_order)
share.round(2).rename("effective share of the old responses").to_frame()

# %% [markdown]
# The slope's own interval is wide: 16 responses do not know the direction of entropy well, whatever the formula. The
# fresh estimates use the same seeds as the draws at θ, which makes their intervals those of a change and not of two
# entropies. More responses narrow all of them by the square root of their number.

# %% [markdown]
# The policy is still the one we started from: the probe wrote to the parameters while it drew, and put them back.

# %%
again = processor.generate_batched(prompts, 16, seed=0)
assert again.responses_text == batch.responses_text

# %% [markdown]
# ## Exercises
#
# 1. Take the direction of a reward that likes *long* words. Which sign has the slope?
# 2. Give `update_direction` second moments: make an Adam optimiser, let it step a few times on the loss of this batch,
#    and pass `adam_second_moments(optimizer, model)`. How far does the prediction hold along that direction?
# 3. Raise `G` to 64. Which intervals become half as wide?
