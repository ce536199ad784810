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
# # Sequences and entropy gradients
#
# How random is the model's output under the policy that really samples it? And how would that change if its parameters
# moved? `SequenceProcessor` draws responses, scores them exactly under the sampling policy, and estimates the gradient
# of the entropy of whole sequences. It does not change the Hugging Face model that it works on. All of it takes
# about 40 seconds of processor time on two cores.

# %%
# %matplotlib inline
import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from steerlab.experiment.plots import style
from steerlab.models import resolve
from steerlab.sequences import (
    GenerationConfig,
    SequenceProcessor,
    check_entropy_gradient,
    entropy_gradient,
    importance_weights,
)

disable_progress_bar()
path = resolve("smollm2-135m").path
model = AutoModelForCausalLM.from_pretrained(path, dtype="float32")
tokenizer = AutoTokenizer.from_pretrained(path)
config = GenerationConfig(temperature=0.8, top_p=0.95, max_new_tokens=24, tf_batch_size=16)
processor = SequenceProcessor(model, tokenizer, config=config)

# %% [markdown]
# ## Draw and score
#
# Two prompts, sixteen responses each, at temperature 0.8 and top-p 0.95. One call draws them and scores every token
# again by teacher forcing: log p under the model, log q under the policy, and the entropy of the policy's distribution
# at every step, all with one nucleus.

# %%
prompts = ["The capital of France is", "The name of the girl was"]
sequences, logprobs, diagnostics = processor.generate_with_logprobs(prompts, G=16, seed=0, compute_rb=True)
tokens = logprobs.to_frame().assign(policy_surprisal=lambda frame: -frame.log_q)
assert not any(outside.any() for row in logprobs.outside_nucleus for outside in row)
assert tokens.log_q.mean() > tokens.log_prob.mean()
sequences

# %% [markdown]
# And what was measured of them:

# %%
logprobs

# %% [markdown]
# Every sampled token lies inside the nucleus that scored it, as the assert says. Many evaluations get this wrong: log p
# of the full model, or log p / T, is not the probability with which the token was drawn. Log q is. On average over
# draws it is the larger of the two (Gibbs' inequality), because the mass that the policy cuts off is distributed over
# the tokens that it keeps.
#
# ## Two estimates of one entropy
#
# The entropy of the policy's *sequences* can be estimated from samples in two ways. The naive one adds up −log q of the
# drawn tokens. The Rao-Blackwellised one adds up the entropy of the distribution at each step: it averages over the
# token exactly instead of using the one that was drawn. Both have the same mean; the second has less variance.

# %%
sums = tokens.groupby(["prompt_index", "sample_index"])[["policy_surprisal", "rb_entropy"]].sum()
sums.columns = ["naive", "RB"]
table = sums.groupby("prompt_index").agg(["mean", "std", "sem"])
spread = sums.groupby("prompt_index").std().mean()
gap = (sums.naive - sums.RB).groupby("prompt_index").agg(["mean", "sem"])
assert spread["RB"] < spread["naive"]
assert (gap["mean"].abs() < 4 * gap["sem"]).all()
table.round(2)

# %% [markdown]
# The means agree within their errors, and the spread of the RB column is smaller. The remaining spread is real:
# responses take different paths, and some paths are more open than others. Averaging over single tokens cannot remove
# that part. Sixteen responses give a standard error of the order of a nat; four times as many halve it, and the RB
# estimate needs fewer.

# %%
with style():
    fig, ax = plt.subplots(figsize=(3.5, 3.0))
    for b, marker, colour in ((0, "o", "#00457A"), (1, "^", "#D55E00")):
        part = sums.loc[b]
        ax.plot(part.naive, part.RB, marker, color=colour, label=f"“{prompts[b]} …”", alpha=0.8)
    limit = 1.08 * sums.to_numpy().max()
    ax.plot([0, limit], [0, limit], color="#222222", linewidth=0.8)
    ax.set(xlim=(0, limit), ylim=(0, limit), aspect="equal")
    ax.set_xlabel("Σ −log q, naive (nats)")
    ax.set_ylabel("Σ H, Rao-Blackwellised (nats)")
    ax.set_title("Less spread upwards than sideways")
    ax.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), borderaxespad=0.0)
    plt.show()

# %% [markdown]
# ## Diagnostics, step by step
#
# The same pass gives the shape of each step's distribution: how much mass lies in the nucleus, how many tokens it
# contains, how probable the first choice is. Means over the responses of each prompt:

# %%
steps = diagnostics.steps_frame()
names = {"rb_entropy": "entropy (nats)", "top1_prob": "largest q", "support_size": "tokens in nucleus"}
with style():
    fig, axes = plt.subplots(3, 1, figsize=(3.5, 4.6), sharex=True)
    for ax, (column, label) in zip(axes, names.items(), strict=True):
        for b, line, colour in ((0, "-", "#00457A"), (1, "--", "#D55E00")):
            mean = steps[steps.prompt_index == b].groupby("step")[column].mean()
            ax.plot(mean.index, mean, line, color=colour, label=f"“{prompts[b]} …”")
        ax.set_ylabel(label)
    axes[2].set_yscale("log")
    axes[0].set_title("Mean over 16 responses, by step")
    axes[2].set_xlabel("step of the response")
    axes[2].legend(loc="upper center", bbox_to_anchor=(0.5, -0.38), borderaxespad=0.0)
    plt.show()
first = steps[steps.step == 0].groupby("prompt_index").rb_entropy.mean()
later = steps[steps.step > 0].groupby("prompt_index").rb_entropy.mean()
assert first[0] < first[1]
assert first[1] - first[0] > abs(later[1] - later[0])
assert ((steps.head_mass >= 0.95 - 1e-5) & (steps.top1_prob <= 1 + 1e-6)).all()

# %% [markdown]
# The capital starts with near certainty, the name with a wide choice. Later both are ordinary prose, and the curves
# come closer together. Hundreds of tokens in the nucleus beside an entropy of four nats are no contradiction: the
# nucleus counts tokens, exp(entropy) weights them.
#
# ## Moving the parameters
#
# `params_override(v, η)` is the model at θ + η·v for one call. The live model is not changed. With η = 0 the importance
# weights of all sequences are 1, which checks that sampling and scoring agree. With a small step they spread, and the
# effective sample size says how far the old samples are still useful.

# %%
name = "model.layers.20.mlp.down_proj.weight"
weight = model.get_parameter(name)
before = weight.detach().clone()
direction = {name: torch.randn(weight.shape, generator=torch.Generator().manual_seed(0)) * weight.std().item()}
free = SequenceProcessor(model, tokenizer, config=GenerationConfig(max_new_tokens=8, tf_batch_size=16))
drawn = free.generate_batched(["The weather today is"], 32, seed=0)
at_zero = free.teacher_force_logprobs(drawn)
moves = []
for eta in (0.0, 0.02, 0.1):
    moved = free.teacher_force_logprobs(drawn, params_override=free.params_override(direction, eta))
    weights = importance_weights(moved, at_zero)
    size = weights.effective_sample_size
    moves.append({"η": eta, "mean weight": weights.weights.mean(), "effective sample size": size})
    if eta == 0:
        assert np.allclose(weights.weights, 1, atol=1e-4)
assert torch.equal(weight, before)
pd.DataFrame(moves).set_index("η").round(3)

# %% [markdown]
# This processor samples the model's own distribution (temperature 1, no cut). With top-p below 1, weights other than 1
# are biased, as the moved policy may reach sequences that were never drawn; the library warns about it.
#
# ## The gradient of entropy
#
# How does the entropy of sequences, H(θ) = E[Σ H_k], change with the parameters? Two things happen: each step's
# distribution changes (first term), and prefixes become more or less likely (second):
#
# ∇H = E[ Σ ∇H_k + Σ ∇log q_k · (Σ_{j>k} H_j − b_k) ]
#
# The second term is a score-function estimate and noisy; the baseline b_k, predicted from the shape of the step's
# distribution, removes some of the noise. An estimator with this many parts needs a check.
#
# **A check without noise.** With one token per response there are no later steps: the second term vanishes, and H is
# the entropy of one distribution. The gradient along v must then equal a finite difference almost to rounding.

# %%
one = SequenceProcessor(model, tokenizer, config=GenerationConfig(max_new_tokens=1, tf_batch_size=16))
single = one.generate_batched(["The weather today is"], 8, seed=0)
exact = check_entropy_gradient(one, single, entropy_gradient(one, single, names=[name]), direction, eta=0.01)
assert abs(exact.predicted - exact.measured) < 0.02 * abs(exact.predicted) + 0.01
f"predicted {exact.predicted:+.4f}, finite difference {exact.measured:+.4f} nats per unit of η"

# %% [markdown]
# **With eight tokens** both sides are estimates. The finite difference re-measures the entropy at θ ± η·v on the same
# sequences with importance weights. The two estimate one number by different terms, and should agree within a few
# standard errors.

# %%
gradient = entropy_gradient(free, drawn, names=[name])
check = check_entropy_gradient(free, drawn, gradient, direction, eta=0.01)
assert abs(check.predicted - check.measured) < 4 * check.measured_std_error
assert check.effective_sample_size > 0.9 * gradient.num_sequences
assert weight.grad is None
pd.Series(
    {
        "entropy of a response (nats)": gradient.entropy,
        "its standard error": gradient.entropy_std_error,
        "change per unit of η, predicted": check.predicted,
        "measured": check.measured,
        "standard error of the measured": check.measured_std_error,
        "effective sample size": check.effective_sample_size,
    }
).to_frame("value").round(2)

# %% [markdown]
# They agree, within an error that may be as large as the number itself: a random direction hardly changes the entropy,
# and 32 short responses cannot resolve such a small change. The check shows that the two estimates are consistent; for
# a figure to publish, draw until the standard error is small beside it. The error falls with the square root of the
# number of responses, so a tenth of it needs a hundred times as many.
#
# **A direction that matters.** Along the gradient itself the change should be large and positive. Measured on the same
# sequences from which the gradient was estimated it would be biased upwards, so we draw new ones.

# %%
size = gradient.gradient[name].norm()
uphill = {name: gradient.gradient[name] / size * before.norm() / 100}
fresh = free.generate_batched(["The weather today is"], 32, seed=1)
climbed = check_entropy_gradient(free, fresh, gradient, uphill, eta=0.5)
assert climbed.measured > 2 * climbed.measured_std_error
assert climbed.measured < climbed.predicted
f"predicted {climbed.predicted:+.2f}, fresh draws {climbed.measured:+.2f} ± {climbed.measured_std_error:.2f} nats"

# %% [markdown]
# A step of one per cent of the matrix's norm in this direction raises the entropy, on draws that the gradient has not
# seen. The prediction on the old draws is larger: the estimated gradient also points along its own noise, and ⟨g, g⟩
# counts that as gain. Choosing a layer and reporting its score on the same items has the same bias.
#
# ## Exercises
#
# 1. Set `top_p=1.0` in the first configuration. Which of the two spreads grows more, and why?
# 2. Repeat the check with 8, 32 and 128 responses. Does the standard error fall like 1/√n?
# 3. Set `baseline=False` in `entropy_gradient`. Compare its value along `direction` over five seeds with and without.
# 4. Pass a steering plan (`plan=`) to `teacher_force_logprobs` and compare the RB entropies of the same responses. Does
#    sentiment make the model more certain?
