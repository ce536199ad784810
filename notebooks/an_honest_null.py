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
# # An honest null
#
# Take contrast pairs whose labels mean nothing, extract a vector, steer with it, and measure. The scores will move, the
# interval may well exclude 0, and yet nothing has been found. This notebook shows what such a result looks like, what
# distinguishes it from a real one, and what the report then says. It takes about 85 seconds of processor time on two
# cores.

# %%
# %matplotlib inline
import numpy as np
import pandas as pd

import steerlab as sl
from steerlab.core.contrast_pairs import balanced_flips
from steerlab.core.shipped import neutral_text, shipped_vectors
from steerlab.experiment.plots import describe_item_slopes, describe_null_slopes, plot_item_slopes, plot_null_slopes

folder = shipped_vectors() / "sentiment"
pairs = sl.ContrastPairs.from_jsonl(folder / "pairs.jsonl", group="group", split="train")
test = sl.Targets.from_jsonl(folder / "targets.jsonl", split="test")
items = test.take(np.unique(test.groups, return_index=True)[1].tolist())
exp = sl.Experiment("honest-null", model="smollm2-135m", seed=0, overwrite=True, dtype="float32", device="cpu")
items

# %% [markdown]
# One item from each of the nine groups, to be quick. Intervals are over groups, so three items per group would narrow
# them less than one might expect.
#
# ## Pairs without a signal
#
# We take the sentiment pairs and exchange positive and negative in exactly half the pairs of every group. The sentences
# do not change; only the connection between label and content is gone. *Exactly half* matters: if each pair were
# flipped at random on its own, an uneven result would keep more of the true direction. The activations of the pairs are
# enough to compare both ways over three hundred draws:

# %%
sides = [
    exp.engine.capture(list(texts), layers=[14], where=sl.where.last_prompt(), pool="mean")[14].numpy()
    for texts in (pairs.positives, pairs.negatives)
]
differences = sides[0] - sides[1]
true_direction = differences.mean(axis=0)


def similarity(flips):
    """|cos| of the mean difference after flips with the one before, and its length."""
    vector = np.where(flips, -1, 1) @ differences / len(differences)
    size = np.linalg.norm(vector)
    return abs(vector @ true_direction) / size / np.linalg.norm(true_direction), size


rng = np.random.default_rng(0)
coins = np.array([similarity(rng.random(len(pairs)) < 0.5) for _ in range(300)])
balanced = np.array([similarity(balanced_flips(pairs.groups, rng)) for _ in range(300)])
assert balanced[:, 0].mean() < 0.8 * coins[:, 0].mean()
assert balanced[:, 1].mean() < np.linalg.norm(true_direction) / 2
pd.DataFrame(
    {
        name: [*draws.mean(axis=0), np.quantile(draws[:, 0], 0.95)]
        for name, draws in (("coins", coins), ("balanced flips", balanced))
    },
    index=["mean |cos| with the true direction", "mean length", "95 % of |cos| are below"],
).round(2)

# %% [markdown]
# Random flips of single pairs keep more of the true direction. With balanced flips most of it cancels, and a short
# vector is left. A dose hides that: it rescales every vector to one length, so the remainder of 54 differences steers
# as strongly as the real vector. It is not a random direction either. It is made of the differences of these sentences,
# so it lies where such sentences differ, and by chance it contains some of the true direction, with either sign.

# %%
meaningless = pairs.flipped(balanced_flips(pairs.groups, np.random.default_rng(0)))
true, null = (exp.extract(found, layers=[14])[14] for found in (pairs, meaningless))
assert null.norm < true.norm / 2
pd.Series({"true labels": true.norm, "no labels": null.norm}, name="norm").to_frame().round(1)

# %% [markdown]
# ## Steer with it, and measure
#
# Three doses, and two null families of 19 draws, the fewest that can reach a rank of 0.05: random directions of the
# same length ("this direction rather than any"), and vectors extracted again after further balanced flips ("these
# labels rather than any").

# %%
texts = neutral_text().split("\n\n")[:1]
plan = sl.Plan(sl.add(null, dose=1.0))
settings = {"doses": [-0.2, 0, 0.2], "controls": sl.Controls(random=19, shuffled=19), "neutral": texts}
effect = exp.effect(plan, items, pairs=meaningless, **settings)
assert effect.verdict in ("no effect", "inconclusive")
assert effect.ci[1] < 0
effect

# %% [markdown]
# Look at the slope and its interval first, as in a paper that reports nothing else: several nats per unit of dose, and
# an interval that does not include 0. One could write "the vector significantly changes sentiment". Item by item the
# result looks as convincing:

# %%
plot_item_slopes(effect)
describe_item_slopes(effect)

# %% [markdown]
# Nothing in this plot is wrong. These items *were* moved, nearly all to one side, and would be moved again; that is all
# that the interval says. It does not say that the labels had anything to do with it. Any addition of this length in
# this layer shifts the balance between favourable and unfavourable words in some direction, consistently over prompts,
# because the prompts share words and form.
#
# ## The same among its nulls

# %%
plot_null_slopes(effect)
describe_null_slopes(effect)

# %% [markdown]
# In numbers:

# %%
assert effect.null_ranks["random"] <= 0.05 < effect.null_ranks["shuffled"]
effect.nulls().round(3)

# %% [markdown]
# The dashed lines show the vector's slope, with either sign; the rank is the share of arms at least as large, the
# vector itself included.
#
# Against **random directions** the meaningless vector ranks first. With this null alone, the verdict would have been
# `effect`. It is a null for "this direction rather than any", and this direction really is special: it comes from
# sentences that express a judgement. Against **label flips** it is one of many: other meaningless labels on the same
# sentences do as much and more. The claim would have been that the labels mean something, and that claim fails.
#
# The verdict needs an interval without 0 **and** a rank of at most 0.05 in *every* family, so it is no `effect`. It is
# not `no effect` either unless the slope is shown to be small; what the design could have seen stands in its reasons.
#
# How often does the interval alone mislead? We can ask the same question about each random direction:

# %%
rows = effect.rows[effect.rows.family == "random"]
table = rows.pivot_table(index=["draw", "group"], columns="dose", values="value").reset_index()
slopes = (table[0.2] - table[-0.2]) / 0.4
means = slopes.groupby(table.draw).mean()
errors = slopes.groupby(table.draw).sem()
excluding = (means.abs() > 2.31 * errors).mean()  # 2.31: Student's t for 9 groups at 95 %
assert excluding > 0.25
f"{excluding:.0%} of {len(means)} random directions have a 95 % interval that excludes 0"

# %% [markdown]
# Far more than the 5 % that the words "95 % interval" suggest. The interval is right about the items and says nothing
# about the direction. Nineteen directions give that share only roughly; two hundred would give it to a few per cent.
#
# ## The real vector, on the same items
#
# Now the vector of the true labels, against the harder of the two nulls: vectors extracted again after balanced flips
# of its own pairs.

# %%
real = exp.effect(
    sl.Plan(sl.add(true, dose=1.0)), items, pairs=pairs, **(settings | {"controls": sl.Controls(random=0, shuffled=19)})
)
assert real.verdict == "effect"
assert real.slope > 2 * abs(effect.slope)
real

# %% [markdown]
# The same picture as above, for this vector:

# %%
plot_null_slopes(real)
describe_null_slopes(real)

# %% [markdown]
# Same doses, same items, same length, and a slope larger than every vector from flipped labels. The largest flips reach
# about half of it: by chance they keep half of the true direction, which at full length has half the slope. (The flips
# of the meaningless pairs reached further: flipping labels that have been flipped before can restore most of the true
# ones.)
#
# The reasons also count plans: two have been tested on these items, and Holm's adjustment raises the rank for that.
# With 19 draws no rank is small enough to stay below 0.05 after it. To test many vectors you need more draws: m plans
# can all pass only if 1 / (1 + draws) ≤ 0.05 / m.
#
# ## What the report says
#
# The report has both, the null first and with the same prominence. It is one file; open it from the run directory.

# %%
report = exp.report()
page = report.read_text(encoding="utf-8")
assert effect.verdict in page
assert f"{max(effect.null_ranks.values()):.3f}" in page
exp.close()
report

# %% [markdown]
# A null like this one is a result. It says how large a slope must be, on these items at these doses, before it means
# anything. Report it in the paper beside the effect.
#
# ## Exercises
#
# 1. Run the null with `np.random.default_rng(1)`, 2, 3 … How do slope and interval change? In how many of twenty seeds
#    would you expect a rank of 0.05 or less in one family?
# 2. Flip each pair at random on its own (`pairs.flipped((rng.random(len(pairs)) < 0.5).tolist())`) for ten seeds, and
#    measure each. How large do the slopes get, and why is that no null for the labels?
# 3. Use `metric="choice_prob"`. Nothing is run again; does the verdict change?
# 4. Give the null a better chance: extract it at layers 10, 14 and 18, and report the best of the three. What would be
#    the honest way (see *Choosing layer and dose*)?
