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
# # Exact probabilities and entropy
#
# What did an intervention do to the model's predictions? This notebook measures it without sampling anything: the
# probability of given texts, token by token, and the entropy and divergence of whole next-token distributions, with and
# without a plan, on the same text. It takes about 25 seconds of processor time on two cores.

# %%
# %matplotlib inline
import math

import numpy as np
import pandas as pd
import torch

import steerlab as sl
from steerlab.core.shipped import neutral_text, shipped_vectors
from steerlab.experiment.measurements.entropy import entropy_summary
from steerlab.experiment.plots import (
    describe_entropy,
    describe_token_differences,
    plot_entropy,
    plot_token_differences,
    token_frame,
)

exp = sl.Experiment("exact", model="smollm2-135m", seed=0, root=None, dtype="float32", device="cpu")
engine = exp.engine

# %% [markdown]
# ## The probability of a text after a prompt
#
# A score is the sum of log p over **all** tokens of the target, under the full softmax. Nothing is read from a list of
# likely tokens, so the score of an improbable target is as exact as that of a probable one.

# %%
scores = engine.score(["The capital of France is"], [[" Paris", " Rome", " a purple bicycle"]])
for score in scores:
    assert math.isclose(score.log_prob, sum(score.token_log_probs), abs_tol=1e-4)
assert scores[0].log_prob > scores[1].log_prob > scores[2].log_prob
scores

# %% [markdown]
# Use sums to compare texts; a mean per token ignores that a longer text has more to predict. The chain rule holds
# exactly: scoring " Paris." at once, or " Paris" first and "." after it, gives the same number.

# %%
whole = engine.score(["The capital of France is"], [[" Paris."]])[0].log_prob
parts = scores[0].log_prob + engine.score(["The capital of France is Paris"], [["."]])[0].log_prob
assert math.isclose(whole, parts, abs_tol=1e-3)
f"{whole:.5f} at once, {parts:.5f} in two steps"

# %% [markdown]
# ### Two strings, two probabilities
#
# "Paris" and " Paris" are different strings. You have to decide which one you mean, so `variants` scores both and
# reports both.

# %%
frame = engine.score(["The capital of France is"], [["Paris"]], variants=("", " ")).to_frame()
assert frame.log_prob[1] > frame.log_prob[0] + 5
frame[["variant", "log_prob", "boundary"]].round(2)

# %% [markdown]
# After "is" the model expects a space. Without it the same word is many nats less probable: an evaluation that forgets
# the space measures typography.
#
# ### Where the prompt ends
#
# Tokenizers join characters across the end of the prompt. "Fra" + "nce" is one token for this model, so the target has
# no tokens of its own to sum over. `joint`, the default, encodes both together, scores from the last token boundary
# that they share, and marks the row `merged`. `separate` encodes each alone, as after a chat template.

# %%
merged, separate = (engine.score(["The capital of Fra"], [["nce"]], boundary=how)[0] for how in ("joint", "separate"))
assert merged.boundary == "merged"
assert math.isfinite(merged.log_prob)
pd.DataFrame(
    [(row.log_prob, row.boundary, list(row.token_ids)) for row in (merged, separate)],
    index=["joint", "separate"],
    columns=["log p (nats)", "boundary", "tokens"],
).round(2)

# %% [markdown]
# The two numbers answer different questions: how probable is " France" after "The capital of", and how probable is the
# token "nce" after a text that a tokenizer would not have cut there. Compare merged rows only with rows merged at the
# same place; that is why they are marked.
#
# ## Perplexity
#
# The perplexity of a whole text is exp of the mean negative log-probability of all tokens but the first. The plan is
# the shipped sentiment vector; it should change neutral prose as little as possible.

# %%
vector = sl.SteeringVector.load(shipped_vectors() / "sentiment" / "sentiment.safetensors")
plan = sl.Plan(sl.add(vector, dose=0.2))
texts = neutral_text().split("\n\n")[:4]
for arm in (None, plan):
    found = sl.perplexity(engine, texts[0], plan=arm)
    first, *rest = engine.tokenizer(texts[0])["input_ids"]
    score = engine.score([[first]], [[rest]], plan=arm)[0]
    assert score.num_tokens == found.num_tokens
    assert math.isclose(found.perplexity, math.exp(-score.log_prob / score.num_tokens), rel_tol=1e-4)
found

# %% [markdown]
# The assert connects perplexity to the scores above: it is the score of the text after its own first token, per token.
# A perplexity ratio is one number for many tokens. It says that the plan costs something, but not what: two
# interventions with the same ratio can do very different things. So we look at the distributions.
#
# ## Entropy and divergence on the same text
#
# Both arms read the same four paragraphs; at every position we have two distributions over the vocabulary. `raw_…` is
# the model's own distribution; `base` and `steered` are the distributions under a sampling policy (temperature 0.7,
# top-p 0.9), all in nats. KL(steered ‖ base) measures how far apart they are.

# %%
policy = sl.SamplingPolicy(temperature=0.7, top_p=0.9)
rows = exp.entropy(plan, texts, policy=policy)
summary = entropy_summary(rows).set_index("quantity")
assert (rows.kl > -1e-6).all()
assert summary.loc["kl", "low"] > 0
summary.round(3)

# %% [markdown]
# Read `raw_change` and `kl` together. The mean entropy changes by a few hundredths of a nat out of three. Its interval
# (over texts; with four texts a wide one) may well exclude 0, but the change is small beside the divergence. So the
# plan does **not** make the model much more or less certain; it makes it expect *other words* with nearly the same
# certainty. From the entropy alone, one would conclude that this plan does almost nothing.
#
# `policy_kl` is infinite on average. The steered nucleus contains tokens that the unsteered one does not, and the
# divergence of a distribution that can draw a token from one that cannot is infinite. The share of such positions and
# the overlap of the nuclei are finite figures for the same comparison:

# %%
share = summary.loc["policy_kl_infinite", "mean"]
kept = summary.loc["kept", "mean"]
assert abs(summary.loc["raw_change", "mean"]) < summary.loc["kl", "mean"]
assert np.isinf(summary.loc["policy_kl", "mean"])
assert 0 < share < 1
assert 0 < kept < 1
f"{share:.0%} of positions have new tokens in the nucleus; of the old ones, {kept:.0%} are kept on average"

# %% [markdown]
# Position by position, averaged over the texts. Fewer texts reach the positions on the right, so the lines there are
# noisier.

# %%
plot_entropy(rows, base="raw_base", steered="raw_steered")
describe_entropy(rows, base="raw_base", steered="raw_steered")

# %% [markdown]
# The two lines follow each other: positions that are hard to predict are so in both arms. The divergence below them is
# smallest at the start and larger further on, though every position gets the same edit: later positions also read the
# edited earlier ones through attention.

# %%
assert rows[rows.position < 10].kl.mean() < rows[rows.position >= 20].kl.mean()
rows.groupby(rows.position // 20 * 20).kl.mean().to_frame("mean KL from this position on").round(3)

# %% [markdown]
# ## Which words?
#
# Divergence says *how much*; token-level differences say *what*. We score one text in both arms and subtract.

# %%
prompt = "We stayed three nights."
text = " The room was lovely and the view was wonderful, but the breakfast was awful and the shower was broken."
base, steered = (engine.score([prompt], [[text]], plan=arm)[0] for arm in (None, plan))
tokens = token_frame(base, steered, engine.tokenizer)
plot_token_differences(tokens)
describe_token_differences(tokens)

# %% [markdown]
# The words that express a judgement in numbers, log p steered minus unsteered:

# %%
change = tokens.assign(word=tokens.token.str.strip()).set_index("word").difference
assert change[["lovely", "wonderful"]].min() > change[["awful", "broken"]].max() + 1
change[["lovely", "wonderful", "awful", "broken"]].to_frame("change of log p (nats)").round(2)

# %% [markdown]
# Blue tokens became more likely, orange and underlined ones less likely. The unfavourable words lost several nats; the
# favourable ones gained a little, or lost far less. Gains are small because the unsteered model expects praise in such
# a sentence anyway, and log p is bounded above but not below. Most function words hardly moved. This is what one
# expects of a sentiment vector. One sentence is an illustration of it, not a test.
#
# ## Does a random direction do the same?
#
# Check this before you interpret any of it. A random direction of the same length, at the same layer:

# %%
noise = torch.randn(vector.d_model, generator=torch.Generator().manual_seed(0))
random_plan = sl.Plan(sl.add(sl.SteeringVector.from_tensor(noise, layer=14), dose=0.2))
noise_rows = exp.entropy(random_plan, texts, policy=policy)
noise_summary = entropy_summary(noise_rows).set_index("quantity")
both = pd.DataFrame({"sentiment": summary["mean"], "random": noise_summary["mean"]})
assert noise_summary.loc["kl", "low"] > 0
both.loc[["raw_change", "kl", "kept"]].round(3)

# %% [markdown]
# A direction that means nothing moves the distributions too, and the divergence alone does not tell the two apart in
# kind. KL measures the size of an intervention, not its meaning; for the meaning one needs targets, and nulls beside
# them (*An honest null*). One random direction is an example; a statement about the vector's KL would need twenty.

# %%
exp.close()

# %% [markdown]
# ## Exercises
#
# 1. Measure the entropy at doses 0.1 and 0.4. Does KL grow linearly with the dose, or faster?
# 2. Replace the policy by `sl.SamplingPolicy()` (temperature 1, no cut). Why is `policy_kl` finite now, and what does
#    it equal?
# 3. Score the hotel text under `plan.scaled(-1)`. Do the same words move, the other way?
# 4. Find the text among the ten shipped paragraphs on which the plan changes the entropy most, with
#    `steerlab.experiment.measurements.entropy.entropy_by_text`. Would you have expected it?
