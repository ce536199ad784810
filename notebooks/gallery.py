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
# # Gallery
#
# Every plot, with the code that made it, and one of each result as a notebook shows it. The whole page takes about 80
# seconds of processor time on two cores; items and draws are few, so that the figures show looks rather than findings.

# %%
# %matplotlib inline
import warnings

import numpy as np

import steerlab as sl

warnings.simplefilter("ignore")  # few draws, few items: it is the looks that matter here
folder = sl.shipped.shipped_vectors() / "sentiment"
pairs = sl.ContrastPairs.from_jsonl(folder / "pairs.jsonl", group="group", split="dev")
targets = sl.Targets.from_jsonl(folder / "targets.jsonl", split="test")
items = targets.take(np.unique(targets.groups, return_index=True)[1].tolist())
dev = sl.Targets.from_jsonl(folder / "targets.jsonl", split="dev").take([0, 3, 6, 9])
neutral = sl.shipped.neutral_text().split("\n\n")[:2]
exp = sl.Experiment("gallery", model="smollm2-135m", seed=0, root=None, dtype="float32", device="cpu")
engine = exp.engine

# %% [markdown]
# # Plots
#
# An effect first: five doses, five random directions, three vectors from flipped labels, and the vector at a wrong
# layer.

# %%
vectors = exp.extract(pairs, layers=[10, 14, 18, 22], name="sentiment")
plan = sl.Plan(sl.add(vectors[14], dose=1.0))
controls = sl.Controls(random=5, shuffled=3, wrong_layer=True)
effect = exp.effect(plan, items, [-0.4, -0.2, 0, 0.2, 0.4], controls=controls, pairs=pairs, neutral=neutral)
assert effect.slope > 0

# %% [markdown]
# ## Dose-response
#
# The mean of the metric at each dose with its interval, beside the range of the control arms.

# %%
sl.plots.plot_dose_response(effect)
sl.plots.describe_dose_response(effect)

# %% [markdown]
# ## Null distribution
#
# The slope of every control draw, beside the vector's.

# %%
sl.plots.plot_null_slopes(effect)
sl.plots.describe_null_slopes(effect)

# %% [markdown]
# ## Items
#
# Every item's own slope, sorted.

# %%
sl.plots.plot_item_slopes(effect)
sl.plots.describe_item_slopes(effect)

# %% [markdown]
# ## Cost
#
# Perplexity of neutral text at each dose, as a multiple of the unsteered model's.

# %%
sl.plots.plot_cost(effect)
sl.plots.describe_cost(effect)

# %% [markdown]
# ## Cost frontier
#
# What each dose buys against what it costs.

# %%
sl.plots.plot_cost_frontier(effect.by_dose(), bound=effect.settings.max_ppl_ratio)
sl.plots.describe_cost_frontier(effect.by_dose(), bound=effect.settings.max_ppl_ratio)

# %% [markdown]
# ## Layer × dose
#
# A search over layers and doses on development items.

# %%
best = exp.select(vectors, [0.1, 0.2, 0.4], on=dev, subject_to={"ppl_ratio": 1.3}, texts=neutral[:1])
sl.plots.plot_layer_dose(best.table, value="gain", label="gain in margin (nats)")
sl.plots.describe_layer_dose(best.table, value="gain")

# %% [markdown]
# ## Entropy over positions
#
# The same texts in both arms.

# %%
entropy = exp.entropy(plan.scaled(0.2), neutral, policy=sl.SamplingPolicy(temperature=0.7, top_p=0.9))
assert entropy.kl.min() > -1e-6
sl.plots.plot_entropy(entropy)
sl.plots.describe_entropy(entropy)

# %% [markdown]
# ## Token by token
#
# One text of them, each token on a ground that says how much likelier it became.

# %%
names = {"log_prob_base": "base", "log_prob_steered": "steered"}
first = entropy.loc[entropy.text == 0, ["token", *names]].rename(columns=names).head(80)
sl.plots.plot_token_differences(first)
sl.plots.describe_token_differences(first)

# %% [markdown]
# ## Geometry
#
# Cosines between the vectors of the layers, and their norms.

# %%
cosines = sl.plots.cosine_frame(vectors)
assert np.allclose(np.diag(cosines), 1)
sl.plots.plot_cosines(cosines)
sl.plots.describe_cosines(cosines)

# %% [markdown]
# Norms, beside the stream's:

# %%
norms = sl.plots.norm_frame(vectors)
sl.plots.plot_norms(norms)
sl.plots.describe_norms(norms)

# %% [markdown]
# ## Diagnostics
#
# How well each layer's vector separates pairs, and how reliable it is.

# %%
train = sl.ContrastPairs.from_jsonl(folder / "pairs.jsonl", group="group", split="train").take(range(12))
diagnostics = vectors.diagnostics(train)
sl.plot_diagnostics(diagnostics)
f"AUC on {diagnostics.n_pairs} pairs, by layer, and how reliable the vectors are."

# %% [markdown]
# # One of each result
#
# As notebooks show them. The effect of above:

# %%
effect

# %% [markdown]
# The search, and what held-out items say of its winner:

# %%
best

# %% [markdown]
# Confirmed:

# %%
confirmed = exp.confirm(best, on=items, controls=sl.Controls(random=4))
assert confirmed.look >= 1
confirmed

# %% [markdown]
# Two plans together:

# %%
other = sl.Plan(sl.add(vectors[18], dose=1.0))
exp.interaction(plan, other, dev, [0, 0.2], [0, 0.2])

# %% [markdown]
# The plan on other items:

# %%
exp.transfer(plan, dev, [-0.2, 0, 0.2])

# %% [markdown]
# Two engines compared:

# %%
exp.parity(plan.scaled(0.2), ["The café on the corner is"], against=engine, max_new_tokens=4)

# %% [markdown]
# The checks that an experiment makes of its engine:

# %%
exp.selfcheck()

# %% [markdown]
# The experiment itself, and all that it has found:

# %%
exp

# %% [markdown]
# Results by kind:

# %%
exp.results

# %% [markdown]
# ## Engines and what they return

# %%
engine

# %% [markdown]
# Completions, with markup in the prompt, which is text like any other:

# %%
prompts = ["The café on the corner is", "<b>My</b> & <i>your</i> room was"]
generations = engine.generate(prompts, plan=plan.scaled(0.2), n=2, max_new_tokens=12, seed=0)
generations

# %% [markdown]
# Receipts, one per row:

# %%
generations.receipts

# %% [markdown]
# Scores:

# %%
scores = engine.score(prompts, [[" lovely", " dreadful"]] * 2, plan=plan.scaled(0.2))
assert len(scores) == 4
scores

# %% [markdown]
# Activations:

# %%
engine.capture(prompts, layers=[10, 14])

# %% [markdown]
# Perplexity:

# %%
sl.perplexity(engine, neutral[0], plan=plan.scaled(0.2))

# %% [markdown]
# Divergence between the unsteered and the steered model:

# %%
sl.divergence(engine, engine, neutral[0], plan_b=plan.scaled(0.2))

# %% [markdown]
# ## Data, vectors, plans

# %%
pairs

# %% [markdown]
# Targets:

# %%
items

# %% [markdown]
# A vector:

# %%
vectors[14]

# %% [markdown]
# A set of them:

# %%
vectors

# %% [markdown]
# The tokens that a vector makes likelier:

# %%
vectors.top_tokens(engine, k=6)

# %% [markdown]
# Projections of both sides of pairs:

# %%
sl.project_pairs(engine, train, vectors[14])

# %% [markdown]
# A plan:

# %%
sl.Plan(sl.add(vectors[14], dose=0.2), sl.ablate(vectors[10], where=sl.where.last_prompt()))

# %% [markdown]
# Where it edits:

# %%
sl.explain(plan.scaled(0.2), prompts[0], engine)

# %% [markdown]
# ## Sequences under a policy

# %%
processor = sl.SequenceProcessor(engine, config=sl.GenerationConfig(top_p=0.9, max_new_tokens=8))
sequences = processor.generate_batched(prompts, G=2, seed=0)
sequences

# %% [markdown]
# Their log-probabilities under model and policy:

# %%
log_probs, steps = processor.teacher_force_logprobs_with_diagnostics(sequences)
log_probs

# %% [markdown]
# And the shape of each step's distribution:

# %%
steps

# %% [markdown]
# ## Exercises
#
# 1. Draw the dose-response on axes of your own figure (`ax=`), beside the null distribution.
# 2. Change a colour in a plot afterwards: every function returns the axes.
