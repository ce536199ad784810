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
# # First steps
#
# Load a small model, extract a direction from contrast pairs, steer with it, and measure what changed. Everything here
# runs on a CPU.

# %%
import steerlab as sl
from steerlab.core.shipped import shipped_vectors

engine = sl.load("smollm2-135m", dtype="float32", device="cpu")
print(engine.info)

# %% [markdown]
# ## A direction
#
# Contrast pairs are sentences that differ in one property. `extract` runs each once and returns one vector per layer:
# the mean difference of the residual stream at the last token.

# %%
pairs = sl.ContrastPairs.from_jsonl(shipped_vectors() / "sentiment" / "pairs.jsonl", group="group", split="train")
vectors = sl.extract(engine, pairs, method="mean_diff", layers=[6, 10, 14, 18], name="sentiment")
print(vectors[14])

# %% [markdown]
# ## A plan
#
# A plan says what is added, how much, and where. A dose of 0.2 adds a vector as long as 0.2 times the stream's median
# norm at that layer. By default the last prompt token and everything generated is edited.

# %%
plan = sl.Plan(sl.add(vectors[14], dose=0.2))
print(plan)

# %%
prompts = ["The new café on the corner is", "I have to say that the concert was"]
policy = sl.SamplingPolicy(temperature=0.7, top_p=0.9)
for dose in (-1.0, 0.0, 1.0):
    generations = engine.generate(prompts, plan=plan.scaled(dose), policy=policy, max_new_tokens=20, seed=1)
    print(f"scale {dose:+.0f}:", generations.texts)

# %% [markdown]
# The receipt of each completion counts, inside the operator, how many tokens were edited.

# %%
print(engine.receipts[0])

# %% [markdown]
# ## What changed, exactly
#
# Scores are sums of log-probabilities over every token of a target, whatever its rank.

# %%
targets = [[" lovely", " dreadful"]] * len(prompts)
for name, arm in [("unsteered", None), ("steered", plan)]:
    print(name)
    print(engine.score(prompts, targets, plan=arm).to_frame().round(3).to_string(index=False))

# %% [markdown]
# And what it costs on ordinary text:

# %%
text = "The ferry leaves the harbour at seven and reaches the island an hour later. Tickets are sold on board."
base, steered = sl.perplexity(engine, text), sl.perplexity(engine, text, plan=plan)
print(f"perplexity {base.perplexity:.1f} → {steered.perplexity:.1f} over {base.num_tokens} tokens")

# %% [markdown]
# A single direction that moves a score is not yet an effect: random directions move scores too. `sl.Experiment.effect`
# measures the slope over doses beside random directions and vectors of flipped labels; `steerlab demo` shows it on this
# vector.
