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
# # A tour of token views
#
# Ways to look at a text token by token: what the model expected, what a plan changes and where, on which side of a
# direction the stream lies, and what each layer would say next. Every view is plain HTML; pointing at a token shows the
# exact value. The tour takes about 20 seconds of processor time on two cores.

# %%
import steerlab as sl

engine = sl.load("smollm2-135m", dtype="float32", device="cpu")
vector = sl.SteeringVector.load(sl.shipped.shipped_vectors() / "sentiment" / "sentiment.safetensors")
plan = sl.Plan(sl.add(vector, dose=0.2))
text = "The room was lovely and the view was wonderful, but the breakfast was awful and the shower was broken."

# %% [markdown]
# ## What the model expected
#
# log p of each token given those before it, in nats. The first token is not predicted and has no colour.

# %%
view = sl.show_tokens(engine, text)
assert view.unit == "nats"
view

# %% [markdown]
# The entropy of the prediction is another thing: how open the next token was, whatever came.

# %%
sl.show_tokens(engine, text, value="entropy")

# %% [markdown]
# ## What a plan changes
#
# The same text under the sentiment vector: blue tokens became likelier, orange ones less likely.

# %%
change = sl.show_tokens(engine, text, plan=plan)
values = dict(zip(change.rows[0].tokens, change.rows[0].values, strict=True))
assert values[" lovely"] > values[" awful"]
change

# %% [markdown]
# How far the whole prediction moved at each token, whichever token came (KL, steered from unsteered), and which tokens
# the plan edits at all:

# %%
sl.show_tokens(engine, text, plan=plan, value="kl")

# %% [markdown]
# With a condition on position only some tokens are edited:

# %%
late = sl.Plan(sl.add(vector, dose=0.2, where=sl.where.generated(after=12)))
edits = sl.show_tokens(engine, text, plan=late, value="edited")
assert 0 < sum(edits.rows[0].values) < len(edits.rows[0].tokens)
edits

# %% [markdown]
# ## Where the stream lies along a direction
#
# The projection of the stream on the vector, at the vector's layer:

# %%
sl.show_tokens(engine, text, vector=vector)

# %% [markdown]
# The same at several layers, a row per layer:

# %%
projections = sl.project_text(engine, text, vector, layers=[6, 10, 14, 18, 22])
assert projections.values.shape[1] == 5
projections

# %% [markdown]
# ## Texts that differ in a few words
#
# Aligned, each token has a column, so that two texts can be compared word by word:

# %%
praise, blame = "The hotel was clean and the staff were kind", "The hotel was dirty and the staff were rude"
pair = sl.show_tokens(engine, [praise, blame], vector=vector, names=["praise", "blame"], aligned=True)
assert len(pair.rows) == 2
pair

# %% [markdown]
# ## What each layer would say next
#
# The stream after each layer, read through the final norm and the unembedding. At the last layer it is the model's own
# prediction.

# %%
sl.logit_lens(engine, "The capital of France is", layers=[6, 12, 18, 22, 26, 29])

# %% [markdown]
# ## Completions side by side
#
# The same prompt and the same random draws, unsteered and steered; words that the first column lacks are marked.

# %%
prompts = ["The letter from my sister arrived this morning, and it"]
arms = [engine.generate(prompts, plan=arm, n=2, max_new_tokens=20, seed=0) for arm in (None, plan)]
assert arms[0].texts != arms[1].texts
sl.side_by_side(*arms, prompts=prompts)

# %% [markdown]
# ## Numbers of your own
#
# `sl.display.tokens` colours any tokens by any numbers, e.g. by their length:

# %%
words = [" ", *(f"{word} " for word in text.split())]
own = sl.display.tokens(
    words, [float(len(word)) for word in words], label="length", unit="characters", scale="sequential"
)
assert "characters" in own._repr_html_()
own

# %% [markdown]
# ## Exercises
#
# 1. Show the change under `plan.scaled(-1)`. Do the same words move the other way?
# 2. Which layers tell praise from blame, by the projections of the last token? Is it the layer that the vector is from?
# 3. Colour a text by the log p of another model, or by the numbers of any tool of yours.
