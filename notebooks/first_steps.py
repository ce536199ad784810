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
# Extract a vector from contrast pairs, steer a small model with it, choose a dose, use contrast pairs of your own, and
# measure an effect beside its nulls. On two cores this takes about 45 seconds of processor time.

# %%
# %matplotlib inline
import json

import numpy as np
import pandas as pd

import steerlab as sl
from steerlab.core.shipped import shipped_vectors

engine = sl.load("smollm2-135m", dtype="float32", device="cpu")
engine.info

# %% [markdown]
# ## A direction
#
# Contrast pairs are sentences that differ in one property. `extract` runs each once and gives one steering vector per
# layer: the mean difference of the residual stream at the last token. The pairs that ship with the package come in
# groups (film, hotel, concert …) and in splits; we extract from `train` only, so that the rest stays unseen.

# %%
folder = shipped_vectors() / "sentiment"
pairs = sl.ContrastPairs.from_jsonl(folder / "pairs.jsonl", group="group", split="train")
pairs

# %% [markdown]
# A vector has a card that says where it comes from:

# %%
vectors = sl.extract(engine, pairs, method="mean_diff", layers=[10, 14], name="sentiment")
vectors[14]

# %% [markdown]
# ## A plan
#
# A plan says which vector is added, how strongly, and at which tokens. The dose is the strength in units of the
# stream's median norm at that layer: a dose of 0.2 adds a vector as long as 0.2 times that norm. Doses compare between
# layers and models; raw coefficients do not. By default the last prompt token and everything generated is edited.

# %%
plan = sl.Plan(sl.add(vectors[14], dose=0.2))
plan

# %% [markdown]
# `plan.scaled(k)` multiplies the whole plan, and 0 is the unedited model. With one seed, every scale gets the same
# random draws, so texts differ by the plan and not by chance. Words that the first column lacks are marked.

# %%
prompts = ["The new café on the corner is", "I have to say that the concert was"]
policy = sl.SamplingPolicy(temperature=0.7, top_p=0.9)
sampling = {"policy": policy, "max_new_tokens": 20, "seed": 1}
unedited, down, up = (engine.generate(prompts, plan=plan.scaled(scale), **sampling) for scale in (0, -1, 1))
assert unedited.texts == engine.generate(prompts, **sampling).texts
sl.side_by_side(unedited, down, up, names=["scale 0", "scale −1", "scale +1"], prompts=prompts)

# %% [markdown]
# Samples show that something is odd, but they cannot decide whether a vector works: two prompts and one seed can show
# anything. The assert says one thing for certain: scale 0 gives exactly the text of no plan at all.
#
# A receipt states what a plan really edited, counted inside the operator; every result holds those of its rows. Below
# is the one of the first prompt at scale +1: the last prompt token and 19 of the 20 sampled ones, because the last
# sampled token predicts nothing.

# %%
receipt = up.receipts[0]
assert receipt.edits
assert all(edit.edited == edit.expected == 20 for edit in receipt.edits)
receipt

# %% [markdown]
# ## What changed, exactly
#
# A score is the sum of log-probabilities of all tokens of a target, whatever their rank. The log-prob *margin* between
# a favourable and an unfavourable word is a number that can be compared between arms (steered and unsteered).


# %%
def margins(prompts, favourable, unfavourable, plan=None):
    """Mean log p(favourable) − log p(unfavourable), in nats, per prompt."""
    frame = engine.score(prompts, [[favourable, unfavourable]] * len(prompts), plan=plan).to_frame()
    table = frame.pivot(index="prompt_index", columns="target_index", values="log_prob")
    return (table[0] - table[1]).to_numpy()


unsteered, steered = (margins(prompts, " lovely", " dreadful", plan=arm) for arm in (None, plan))
assert (steered > unsteered).all()
pd.DataFrame({"prompt": prompts, "unsteered": unsteered, "steered": steered}).round(2)

# %% [markdown]
# The margin rises on both prompts. The unsteered model has its own preference between the two words; only the
# difference between the two columns is due to the plan.
#
# ## Your turn: change the dose
#
# Set `DOSE` and run the cell again. Try 0.05, −0.2, 0.4 and 0.8. The second figure is the cost of the dose: perplexity
# of ordinary text, as a multiple of the unsteered model's.

# %%
DOSE = 0.2  # ← yours to change

own = sl.Plan(sl.add(vectors[14], dose=DOSE))
text = "The ferry leaves the harbour at seven and reaches the island an hour later. Tickets are sold on board."
gain = (margins(prompts, " lovely", " dreadful", plan=own) - unsteered).mean()
ratio = sl.perplexity(engine, text, plan=own).perplexity / sl.perplexity(engine, text).perplexity
f"dose {DOSE:g}: margin {gain:+.2f} nats, perplexity of neutral text ×{ratio:.2f}"

# %% [markdown]
# The same for several doses at once. Up to about 0.2 the margin grows while the cost stays small. Beyond that the cost
# rises steeply: a model whose perplexity has doubled is damaged, and its margin then says little about sentiment.

# %%
doses = [-0.4, -0.2, 0.0, 0.1, 0.2, 0.4, 0.8]
rows = []
base = sl.perplexity(engine, text).perplexity
for dose in doses:
    arm = sl.Plan(sl.add(vectors[14], dose=1.0)).scaled(dose)
    change = (margins(prompts, " lovely", " dreadful", plan=arm) - unsteered).mean()
    rows.append(
        {"dose": dose, "margin change": change, "ppl ratio": sl.perplexity(engine, text, plan=arm).perplexity / base}
    )
sweep = pd.DataFrame(rows).set_index("dose")
assert sweep["margin change"][0.0] == 0
assert sweep["ppl ratio"][0.0] == 1
assert sweep["margin change"][-0.2] < 0 < sweep["margin change"][0.2]
assert sweep["ppl ratio"][0.8] > sweep["ppl ratio"][0.4] > sweep["ppl ratio"][0.2]
sweep.round(2)

# %% [markdown]
# ## Your own pairs
#
# Any property works that you can express in pairs of sentences. A file of pairs has one JSON object per line, with
# `positive`, `negative` and preferably a `group`: pairs about one subject belong together, and stay together when pairs
# are split. Here we write such a file about warm and cold, and read it back.

# %%
own_pairs = [
    ("lake", "The surface of the lake was as warm as a bath", "The surface of the lake was as cold as ice"),
    ("lake", "We jumped into the lake under a blazing sun", "We skated across the lake under a freezing sky"),
    ("house", "The stove had made the whole house cosy and warm", "The wind had made the whole house icy and cold"),
    ("house", "All windows were open because of the heat", "All windows were shut because of the frost"),
    ("walk", "We walked home, sweating in the summer heat", "We walked home, shivering in the winter frost"),
    ("walk", "On the walk she carried her jumper in the sun", "On the walk she buttoned her coat in the snow"),
    ("food", "They ate the soup while it was steaming", "They ate the soup when it was chilled"),
    ("food", "He took the bread out of the oven", "He took the bread out of the freezer"),
]
with open("my_pairs.jsonl", "w", encoding="utf-8") as file:
    for group, positive, negative in own_pairs:
        file.write(json.dumps({"positive": positive, "negative": negative, "group": group}) + "\n")

mine = sl.ContrastPairs.from_jsonl("my_pairs.jsonl", group="group")
warmth = sl.extract(engine, mine, method="mean_diff", layers=[14], name="warmth")[14]
warmth

# %% [markdown]
# None of the words below occurs in a pair; otherwise the test would only show that the model can repeat. We look at
# both signs: a direction for warmth should lower the margin when it is subtracted.

# %%
weather = [
    "Outside the station the afternoon felt",
    "The air in the valley that day was",
    "To the touch, the stone was",
]
warm = sl.Plan(sl.add(warmth, dose=0.2))
table = pd.DataFrame(
    {f"scale {k:+d}": margins(weather, " hot", " cool", plan=warm.scaled(k)) for k in (-1, 0, 1)}, index=weather
)
means = table.mean()
assert means["scale -1"] < means["scale +0"] < means["scale +1"]
table.round(2)

# %% [markdown]
# Averaged over the three prompts the margin moves as the pairs say. Eight pairs and three prompts are enough to see
# that the method works on your file, and far too few to claim anything: a random direction may do as much. The next
# step tests that.
#
# ## From a change to an effect
#
# Random directions of the same length move these scores too. An **effect** is therefore the change of the metric per
# unit of dose, compared with such directions. `Experiment.effect` runs the vector at several doses on items that the
# vector has not seen, and random directions beside it as a null. We take one prompt from each of the nine groups, and
# 19 directions, the smallest number with which a rank of 0.05 can be reached.

# %%
test = sl.Targets.from_jsonl(folder / "targets.jsonl", split="test")
items = test.take(np.unique(test.groups, return_index=True)[1].tolist())
exp = sl.Experiment("first-steps", model=engine, seed=0, overwrite=True)
effect = exp.effect(
    sl.Plan(sl.add(vectors[14], dose=1.0)), items, [-0.2, 0, 0.2], controls=sl.Controls(random=19), neutral=[text]
)
assert effect.verdict == "effect"
assert effect.slope > 1.5 * effect.null_slopes.slope.abs().mean()
effect

# %% [markdown]
# The verdict needs both: an interval that excludes 0, and a slope larger than those of the random directions. The plot
# shows the second: all nineteen of them lie inside the grey band.
#
# Everything measured is already in the run directory, and the report is one file that opens from disk. With more time,
# use all test items, five doses, `Controls(random=20, shuffled=20)` and the pairs, as `steerlab demo` does; random
# directions are one null, and vectors from flipped labels are another.

# %%
report = exp.report()
assert "effect" in report.read_text(encoding="utf-8")
exp.close()
report

# %% [markdown]
# ## Exercises
#
# 1. Find the dose at which the perplexity of the ferry sentence exceeds 1.5 times the unsteered one. Is it the same for
#    both signs?
# 2. Edit every position instead (`where=sl.where.all()` in `sl.add`). How do gain and cost change at dose 0.2?
# 3. Test warmth in the same way: write targets for it (`sl.Targets.from_records`), and measure its effect with 19
#    random directions. Is it above all of them?
# 4. Replace `my_pairs.jsonl` by pairs of your own. Which layer's vector moves your targets most, and how would you
#    avoid a biased choice? The next notebook, *Choosing layer and dose*, is about that.
