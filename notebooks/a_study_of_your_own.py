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
# # A study of your own
#
# From two JSONL files to a report, in forty lines: does a vector for warmth, made from pairs of sentences, make a model
# expect warm weather? It takes about 40 seconds of processor time on two cores. Replace both files by your own.
#
# The files have one JSON object per line. Pairs have `positive`, `negative` and a `group`; targets have `prompt`,
# `target`, `label` (+1 or −1) and a `group`. Rows of one group belong together and count as one in intervals.

# %%
import json
from pathlib import Path

import steerlab as sl

places = ["lake", "house", "garden", "street", "kitchen", "beach"]
pairs = [
    {"positive": f"In July the {place} was {warm}", "negative": f"In July the {place} was {cold}", "group": place}
    for place in places
    for warm, cold in [("warm", "cold"), ("heated", "frozen"), ("boiling", "icy")]
]
targets = [
    {"prompt": f"At the {scene} the afternoon felt", "target": word, "label": label, "group": scene}
    for scene in ["station", "valley", "river", "tower", "bridge", "market"]
    for word, label in [(" hot", 1), (" sunny", 1), (" cool", -1), (" chilly", -1)]
]
for name, rows in (("pairs", pairs), ("targets", targets)):
    Path(f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

# %% [markdown]
# None of the words that are scored occurs in a pair; otherwise the study would only show that the model can repeat.
#
# ## The data

# %%
pairs = sl.ContrastPairs.from_jsonl("pairs.jsonl", group="group")
targets = sl.Targets.from_jsonl("targets.jsonl")
words = {word for item in targets for word in item.targets}
assert not any(word in text for word in words for text in [*pairs.positives, *pairs.negatives])
targets

# %% [markdown]
# ## The vector
#
# An experiment writes everything that it measures into a folder. Run again, it measures nothing twice.

# %%
exp = sl.Experiment("warmth", model="smollm2-135m", seed=0, overwrite=True, dtype="float32", device="cpu")
vectors = exp.extract(pairs, layers=[10, 14, 18])
assert list(vectors) == [10, 14, 18]
vectors

# %% [markdown]
# What does layer 14's vector make likelier, read through the model's final norm and unembedding?

# %%
vectors[14].top_tokens(exp.engine, k=8)

# %% [markdown]
# ## The effect, beside its nulls
#
# Three doses, 19 random directions and 19 vectors from flipped labels, the fewest that can reach a rank of 0.05, and
# the cost on a paragraph of neutral text.

# %%
plan = sl.Plan(sl.add(vectors[14], dose=1.0))
controls = sl.Controls(random=19, shuffled=19)
texts = sl.shipped.neutral_text().split("\n\n")[:1]
effect = exp.effect(plan, targets, [-0.2, 0, 0.2], controls=controls, pairs=pairs, neutral=texts)
assert effect.ci[0] > 0
assert effect.null_rank > 0.05
effect

# %% [markdown]
# The slope is positive and its interval excludes 0, and yet random directions of the same length move these words as
# much: the rank says so. Eighteen pairs of one form are too few to find warmth with, and without nulls nobody would
# have noticed. *An honest null* explains it; the first exercise is to do better.
#
# ## Texts, and the report

# %%
texts = exp.generate(plan, ["This morning the weather in the village is"], doses=[-0.2, 0, 0.2], max_new_tokens=20)
assert len(texts) == 3
sl.side_by_side(texts)

# %% [markdown]
# The report has all of it in one file, which opens from disk and can be sent to others.

# %%
report = exp.report()
assert report.stat().st_size > 50_000
exp.close()
report

# %% [markdown]
# ## Exercises
#
# 1. Write pairs of many forms, about warmth or a property of yours, until a slope is larger than all of its nulls. Keep
#    the words that are scored out of the pairs.
# 2. Choose layer and dose with `exp.select` on targets set aside for it, and confirm once; *Choosing layer and dose*
#    shows how.
# 3. Leave out a group of pairs at a time. How much does the slope depend on a single group?
