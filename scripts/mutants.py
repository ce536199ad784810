"""Tests of the tests: small faults put into the package one at a time, each of which a test near it has to notice.

Usage: ``.venv/bin/python scripts/mutants.py [--list] [--only NAME …] [--jobs N] [--seconds S]``

Each fault (a mutant) is a text that occurs once in the package, what replaces it, and the tests near it. It is applied
in a temporary copy of the working tree, never in place. The outcomes:

``caught``    a test near it fails, or does not end in time; what should happen.
``survived``  the tests near it pass: write the test that is missing.
``skipped``   the tests near it need packages that are not here; ``make test-peers`` puts them into ``.venv-peers``.
``error``     the text is not found or not unique, or the tests fail without it: repair the entry in ``MUTANTS``.

Texts are searched for in all files of the package, whatever the white space between words and signs, so that an entry
outlives the moving and reformatting of code. ``inside`` names the function or class that has to hold the text.

The exit status is 0 if all are caught or skipped, else 1. All of them take about a quarter of an hour.
"""

import argparse
import ast
import itertools
import multiprocessing
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = "steerlab"
NOT_COPIED = shutil.ignore_patterns(".*", "__pycache__", "site", "dist", "build", "runs", "node_modules")
OUTPUT = "pytest-output.txt"
IMPORTED_ONCE = "torch transformers transformer_lens pandas scipy.stats sklearn.linear_model pyarrow.parquet".split()
IMPORTED_ONCE += "matplotlib.pyplot jaxtyping beartype hypothesis pytest typer pydantic yaml".split()
"""What the tests import and no mutant changes: a process that has imported it is forked for each mutant."""
WARM = multiprocessing.get_context("forkserver")
OPTIONS = [
    "-x",
    "-q",
    "-p",
    "no:cacheprovider",
    "-W",
    "ignore:Module already imported:pytest.PytestAssertRewriteWarning",
]
NO_FAILURE, SOME_FAILED = 0, 1
"""Exit statuses of pytest; others mean that it could not run the tests."""


@dataclass(frozen=True)
class Mutant:
    """One fault.

    Attributes:
        name: what is wrong with it.
        text: the text to replace, which the package holds once.
        replacement: the text put there.
        near: the tests that should notice, as arguments of pytest.
        inside: the function or class that holds the text; empty for anywhere.
    """

    name: str
    text: str
    replacement: str
    near: str
    inside: str = ""


MUTANTS = [
    # --- judges, baselines, protocols -----------------------------------------------------------------------------
    Mutant(
        "a label counts the longer ones that begin with it",
        "own[max(shorter, key=lambda k: len(ids[k]))] -= shares[longer]",
        "pass",
        "tests/measures/test_ratings.py",
    ),
    Mutant(
        "a longer label is taken from every shorter one",
        "own[max(shorter, key=lambda k: len(ids[k]))] -= shares[longer]",
        "own[shorter] -= shares[longer]",
        "tests/measures/test_ratings.py",
    ),
    Mutant(
        "the second order of a pair is read as the first",
        "shown_first, shown_second = a_first, 1 - b_first",
        "shown_first, shown_second = a_first, b_first",
        "tests/scoring/test_judging.py",
    ),
    Mutant(
        "an arm is followed beyond what it cost",
        "return Crossing(len(costs) - 1, 0.0) if len(costs) and costs[-1] == level else None",
        "return Crossing(len(costs) - 1, 0.0) if len(costs) else None",
        "tests/measures/test_equal_cost.py",
    ),
    Mutant(
        "the direction is ablated at the prompt's end only",
        "Plan(*(ablate(one, where=where.all()) for one in moved))",
        "Plan(*(ablate(one) for one in moved))",
        "tests/protocols/test_refusal.py",
    ),
    Mutant(
        "the KL filter lets everything through",
        '[f"KL above {max_kl:g}"] if kl > max_kl else []',
        "[]",
        "tests/protocols/test_refusal.py",
    ),
    Mutant(
        "MC1 asks for any true answer",
        "float(log_probs[0] > log_probs[n_true:].max())",
        "float(log_probs[:n_true].max() > log_probs[n_true:].max())",
        "tests/protocols/test_iti.py -k by_hand",
    ),
    Mutant(
        "heads are measured on the questions that ranked them",
        "for k, (fit, measured) in enumerate((halves, halves[::-1])):",
        "for k, (fit, measured) in enumerate([(half, half) for half in halves]):",
        "tests/protocols/test_iti.py",
    ),
    Mutant(
        "the condition is left out of conditional steering",
        "add(one, dose=dose, when=condition)",
        "add(one, dose=dose)",
        "tests/protocols/test_cast.py",
    ),
    Mutant(
        "a threshold may be on one side only",
        "for above in (True, False):",
        "for above in (True,):",
        "tests/protocols/test_cast.py -k threshold",
    ),
    # --- core -----------------------------------------------------------------------------------------------------
    Mutant(
        "seed ignored",
        "return (int(seed), prompt_index, sample_index)",
        "return (0, prompt_index, sample_index)",
        "tests/core/test_seeds.py",
    ),
    Mutant(
        "all samples of a prompt alike",
        "return (int(seed), prompt_index, sample_index)",
        "return (int(seed), prompt_index, 0)",
        "tests/core/test_seeds.py tests/lens/test_generation.py -k 'seeds or samples'",
    ),
    Mutant(
        "one seed per prompt also depends on the place in the list",
        "return (int(seed[prompt_index]), 0, sample_index)",
        "return (int(seed[prompt_index]), prompt_index, sample_index)",
        "tests/core/test_seeds.py",
    ),
    Mutant(
        "atomic write not atomic",
        "os.replace(temporary, path)",
        "path.write_bytes(payload[: len(payload) // 2]); os.replace(temporary, path)",
        "tests/core/test_files.py",
    ),
    Mutant(
        "a failed write leaves its temporary file",
        "Path(temporary).unlink(missing_ok=True)",
        "pass",
        "tests/core/test_files.py",
    ),
    Mutant(
        "a content hash depends on the order of keys",
        "json.dumps(value, sort_keys=True",
        "json.dumps(value, sort_keys=False",
        "tests/core/test_hashing.py",
        inside="content_hash",
    ),
    Mutant("BOS twice", "ids[:2] == (bos, bos)", "ids[:2] == (bos, -1)", "tests/core/test_text.py"),
    Mutant(
        "chat ignored",
        "if isinstance(prompt, str) and not chat:",
        "if isinstance(prompt, str):",
        "tests/core/test_text.py",
    ),
    Mutant(
        "a merged boundary called clean",
        "clean = cut == len(prompt.token_ids)",
        "clean = True",
        "tests/core/test_text.py",
    ),
    Mutant(
        "characters counted as bytes",
        'len((prefix + target).encode("utf-8"))',
        "len(prefix + target)",
        "tests/core/test_encoded_pairs.py",
    ),
    Mutant(
        "stop string left in", "return text[: find_stop(text, strings)]", "return text", "tests/core/test_stopping.py"
    ),
    Mutant(
        "the last stop string counts",
        "return min(found) if found else None",
        "return max(found) if found else None",
        "tests/core/test_stopping.py",
        inside="find_stop",
    ),
    Mutant(
        "a group on both sides of a split",
        "right = [i for i, group in enumerate(groups) if group not in first]",
        "right = [i for i, group in enumerate(groups) if group not in first or i == left[-1]]",
        "tests/core/test_splitting.py",
    ),
    Mutant(
        "held-out split leaks a text",
        "{_key(prompt) for prompt in left} & {_key(prompt) for prompt in right}",
        "set()",
        "tests/core/test_splitting.py tests/core/test_targets.py tests/core/test_contrast_pairs.py",
    ),
    Mutant(
        "a receipt unchecked",
        "if edit.edited != edit.expected:",
        "if edit.edited > edit.expected:",
        "tests/steering/test_run.py",
    ),
    Mutant(
        "a receipt's mean change unweighted",
        "math.fsum(e.mean_relative_change * e.edited for e in self.edits if e.edited) / self.edited",
        "math.fsum(e.mean_relative_change for e in self.edits if e.edited) / len(self.edits)",
        "tests/core/test_results.py",
    ),
    Mutant(
        "one layer too many",
        "if self.layer >= n_layers:",
        "if self.layer > n_layers:",
        "tests/core/test_hook_points.py",
    ),
    Mutant(
        "layers from the end count from the start",
        "return found % n_layers",
        "return abs(found) % n_layers",
        "tests/core/test_hook_points.py",
    ),
    Mutant(
        "bits called nats",
        "-self.log_prob / math.log(2) / self.num_bytes",
        "-self.log_prob / self.num_bytes",
        "tests/core/test_results.py tests/scoring/test_score_cases.py",
    ),
    # --- measures -------------------------------------------------------------------------------------------------
    Mutant("KL swapped", "p = log_p.exp()", "p = log_q.exp()", "tests/measures/test_divergence.py", inside="kl"),
    Mutant(
        "entropy to base 2",
        "return (shifted.logsumexp(dim=-1) - weighted).clamp_min(0.0)",
        "return (shifted.logsumexp(dim=-1) - weighted).clamp_min(0.0) / 0.6931471805599453",
        "tests/measures/test_entropy.py",
    ),
    Mutant(
        "temperature not applied in entropies",
        "/ scale).masked_fill(~inside, -math.inf) q =",
        ").masked_fill(~inside, -math.inf); q =",
        "tests/measures/test_entropy.py",
        inside="rb_entropy",
    ),
    Mutant(
        "temperature not applied in log q",
        "scaled = (wide - wide.amax(dim=-1, keepdim=True).detach()) / policy.temperature",
        "scaled = wide - wide.amax(dim=-1, keepdim=True).detach()",
        "tests/measures/test_log_probs.py",
    ),
    Mutant(
        "temperature not applied in the nucleus",
        "else raw / policy.temperature",
        "else raw",
        "tests/measures/test_nucleus.py",
    ),
    Mutant(
        "nucleus without its boundary token",
        "(from_below > 1 - top_p).flip(-1)",
        "(from_below - ordered.flip(-1).softmax(dim=-1) > 1 - top_p).flip(-1)",
        "tests/measures/test_nucleus.py",
    ),
    Mutant(
        "top-k off by one",
        "keep[..., policy.top_k :] = False",
        "keep[..., policy.top_k + 1 :] = False",
        "tests/measures/test_nucleus.py",
    ),
    Mutant(
        "min-p absolute",
        "keep &= mass >= policy.min_p * mass[..., :1]",
        "keep &= mass >= policy.min_p",
        "tests/measures/test_nucleus.py",
    ),
    Mutant(
        "of tokens equal to the boundary all are inside",
        "inside &= ~equal | (ids <= index)",
        "pass",
        "tests/measures/test_nucleus.py",
    ),
    Mutant(
        "repetition penalty raises negative logits",
        "logits * policy.repetition_penalty)",
        "logits / policy.repetition_penalty)",
        "tests/measures/test_nucleus.py tests/measures/test_log_probs.py tests/measures/test_draws.py",
    ),
    Mutant(
        "a token predicts itself",
        "chosen_log_probs(logits[:, :-1], tokens[:, 1:])",
        "chosen_log_probs(logits[:, 1:], tokens[:, 1:])",
        "tests/measures/test_log_probs.py",
    ),
    Mutant(
        "tokens outside the nucleus have a probability",
        "return chosen.masked_fill(~chosen_inside, -math.inf)",
        "return chosen",
        "tests/measures/test_log_probs.py",
    ),
    Mutant(
        "half precision not widened",
        "else torch.float32 return logits.to(dtype)",
        "else logits.dtype; return logits.to(dtype)",
        "tests/measures/test_log_probs.py tests/measures/test_entropy.py",
        inside="widen",
    ),
    Mutant(
        "bootstrap over items instead of groups",
        "np.unique(np.asarray(groups), return_inverse=True)",
        "np.unique(np.arange(len(values)), return_inverse=True)",
        "tests/measures/test_intervals.py",
        inside="cluster_standard_error",
    ),
    Mutant(
        "a rank can be zero",
        "(1 + np.sum(np.abs(nulls) >= abs(effect))) / (1 + nulls.size)",
        "np.sum(np.abs(nulls) >= abs(effect)) / nulls.size",
        "tests/measures/test_intervals.py",
    ),
    Mutant(
        "ranks of one side",
        "np.sum(np.abs(nulls) >= abs(effect))",
        "np.sum(nulls >= effect)",
        "tests/measures/test_intervals.py",
    ),
    Mutant(
        "ranks not adjusted for their number",
        "factors = np.arange(len(order), 0, -1)",
        "factors = np.ones(len(order))",
        "tests/measures/test_intervals.py",
    ),
    Mutant(
        "adjusted ranks not in order",
        "np.maximum.accumulate(np.minimum(1.0, values[order] * factors))",
        "np.minimum(1.0, values[order] * factors)",
        "tests/measures/test_intervals.py",
    ),
    Mutant(
        "half of a draw's key ignored",
        ".bitwise_xor_(high[:, None])",
        "",
        "tests/measures/test_draws.py",
    ),
    Mutant(
        "interaction without its baseline",
        "values - alone_a - alone_b + values[:, [zero_a], :][:, :, [zero_b]]",
        "values - alone_a - alone_b",
        "tests/measures/test_interactions.py",
    ),
    Mutant(
        "kept share of the wrong nucleus",
        "(before & after).sum(dim=-1) / before.sum(dim=-1)",
        "(before & after).sum(dim=-1) / after.sum(dim=-1)",
        "tests/measures/test_overlap.py",
    ),
    # --- steering -------------------------------------------------------------------------------------------------
    Mutant(
        "ablate does not project",
        "Gate(slope=-1.0), along.unit),)",
        "Gate(-1.0), along.unit),)",
        "tests/steering/test_operators.py",
    ),
    Mutant(
        "clamp's sign",
        "hi=self.hi * factor, slope=-1.0)",
        "hi=self.hi * factor, slope=1.0)",
        "tests/steering/test_operators.py",
    ),
    Mutant(
        "dose unit dropped",
        'return along.median_norm if unit == "dose" else 1.0',
        "return 1.0",
        "tests/steering/test_operators.py",
    ),
    Mutant(
        "a dose along a vector that is not of length one",
        "self.amount * along.median_norm * along.unit",
        "self.amount * along.median_norm * along.values",
        "tests/steering/test_operators.py",
    ),
    Mutant(
        "rotation reversed",
        "Gate(slope=math.sin(self.angle))",
        "Gate(slope=-math.sin(self.angle))",
        "tests/steering/test_operators.py",
    ),
    Mutant(
        "norm='keep' turned over",
        "torch.where(after > 0, before / after, 1.0)",
        "torch.where(after > 0, after / before, 1.0)",
        "tests/steering/test_operators.py tests/steering/test_run.py",
    ),
    Mutant(
        "a plan's hash without its strength",
        "self.where.to_json(), self.scale, self.median_norm]",
        "self.where.to_json(), self.median_norm]",
        "tests/steering/test_plan.py",
    ),
    Mutant(
        "a vector's hash without its place",
        "bytes_hash(self.hook_point.name.encode() + ",
        "bytes_hash(",
        "tests/steering/test_vectors.py",
    ),
    Mutant(
        "generated positions off by one",
        "return self.positions - self.prompt_lens[:, None]",
        "return self.positions - self.prompt_lens[:, None] + 1",
        "tests/steering/test_where.py",
    ),
    Mutant(
        "padding counted as tokens",
        "return self.positions >= 0",
        "return self.positions >= -1",
        "tests/steering/test_where.py",
        inside="is_token",
    ),
    Mutant(
        "generated(until=) inclusive",
        "inside & (rows.generated_index < self.until)",
        "inside & (rows.generated_index <= self.until)",
        "tests/steering/test_where.py",
    ),
    Mutant(
        "positions from the end off by one",
        "else rows.prompt_lens + index",
        "else rows.prompt_lens + index - 1",
        "tests/steering/test_where.py",
    ),
    Mutant(
        "a condition's side",
        "passed = passed & (reading > self.above)",
        "passed = passed & (reading < self.above)",
        "tests/steering/test_condition.py",
    ),
    Mutant(
        "missing condition check",
        "return mask & (answered & passed)[:, None]",
        "return mask",
        "tests/steering/test_condition.py",
    ),
    Mutant(
        "half-life to base e",
        "torch.exp2(-j / curve.half_life)",
        "torch.exp(-j / curve.half_life)",
        "tests/steering/test_schedule.py",
    ),
    Mutant(
        "centred axes not centred",
        "return self._top(self.mean)",
        "return self._top(torch.zeros_like(self.mean))",
        "tests/steering/test_moments.py tests/steering/test_estimators.py",
    ),
    Mutant(
        "an axis of either sign",
        "return torch.where(along < 0, -unit, unit).float()",
        "return unit.float()",
        "tests/steering/test_estimators.py",
    ),
    Mutant(
        "bipo rewards the opposite",
        "softplus(-beta * gains[0])",
        "softplus(beta * gains[0])",
        "tests/steering/test_bipo.py -k 'loss or prompt'",
    ),
    Mutant(
        "reps rewards the opposite",
        "softplus(-gain)",
        "softplus(gain)",
        "tests/steering/test_learned.py -k 'by_hand'",
    ),
    Mutant(
        "a low-rank edit that forgets the stream",
        "return self.weight - self.rotation",
        "return self.weight",
        "tests/steering/test_low_rank.py",
    ),
    Mutant(
        "one random direction for all of AxBench's concepts",
        "[run.session.seed, *concept.hash.encode()]",
        "[run.session.seed]",
        "tests/protocols/test_axbench.py -k random_directions",
    ),
    Mutant(
        "an AxBench factor chosen on what is reported",
        'rows[rows.half == "choose"].groupby',
        'rows[rows.half == "report"].groupby',
        "tests/protocols/test_axbench.py -k table",
    ),
    Mutant(
        "bipo without its bound",
        "values.mul_((bound / norm).to(values.dtype))",
        "pass",
        "tests/steering/test_bipo.py -k projection",
    ),
    Mutant(
        "the median norm of another model",
        "elsewhere = weights_hash is not None and",
        "elsewhere = False and",
        "tests/steering/test_plan.py",
    ),
    Mutant(
        "strengths that overflow let through",
        "check_finite_range(resolved.edits, info)",
        "pass",
        "tests/steering/test_finite_range.py tests/lens/test_not_finite.py",
    ),
    Mutant(
        "conflicting edits let through",
        "check_conflicts(edits)",
        "pass",
        "tests/steering/test_conflicts.py",
        inside="Plan",
    ),
    Mutant(
        "skipped receipt",
        "self._passes[index].append(Tally(self._rows.among_fresh(mask), size, norm, self._kept))",
        "pass",
        "tests/steering/test_run.py",
    ),
    Mutant(
        "edits of the last pass only are counted",
        "self._edited[index, place] += edited",
        "self._edited[index, place] = edited",
        "tests/steering/test_run.py",
    ),
    # --- a model that runs in this process ------------------------------------------------------------------------
    Mutant(
        "attention mask dropped",
        "attention_mask=None if self._mask is None else self._mask.long()",
        "attention_mask=None",
        "tests/lens/test_rows.py",
    ),
    Mutant(
        "positions off by one",
        "valid.cumsum(dim=-1) - 1",
        "valid.cumsum(dim=-1)",
        "tests/lens/test_rows.py",
        inside="Rows",
    ),
    Mutant(
        "padding is attended to",
        "[[False] * (width - len(row)) + [True] * len(row) for row in sequences]",
        "[[True] * width for row in sequences]",
        "tests/lens/test_rows.py",
    ),
    Mutant(
        "another row's cache",
        "None if other.cache is None else _select_cache(other.cache, chosen)",
        "None if other.cache is None else _select_cache(other.cache, chosen.flip(0))",
        "tests/lens/test_rows.py tests/lens/test_teacher_forcing.py",
    ),
    Mutant(
        "a stop string left in a completion",
        "text=before_stop(text, self.rules.strings)",
        "text=text",
        "tests/lens/test_generation.py -k 'stop and string'",
    ),
    Mutant(
        "a row goes on after EOS",
        "ended |= torch.isin(given, eos)",
        "pass",
        "tests/lens/test_generation.py -k eos",
    ),
    Mutant(
        "temperature not applied in draws",
        "log_q = policy_log_probs(adjusted, self.policy)",
        "log_q = policy_log_probs(adjusted, SamplingPolicy())",
        "tests/lens/test_generation.py -k 'recorded_figures or first_tokens'",
    ),
    Mutant(
        "repetitions since the prompt not penalised",
        "seen = seen.scatter(1, tokens.clamp_min(0)[:, None], True)",
        "pass",
        "tests/lens/test_generation.py -k recorded_figures",
    ),
    Mutant(
        "every step draws with the same key",
        "keys[live_rows, index]",
        "keys[live_rows, 0]",
        "tests/lens/test_generation.py -k draws_anew",
    ),
    Mutant(
        "a hook stays",
        "handle.hook.remove()",
        "pass",
        "tests/lens/test_hooking.py",
    ),
    Mutant(
        "markup in texts is shown as markup",
        "return html.escape(str(text), quote=True)",
        "return str(text)",
        "tests/display/test_faces.py",
    ),
    Mutant(
        "a plan on a model of one's own takes generated tokens for a prompt's",
        "positions = before[:, None] + valid.cumsum(dim=1) - 1",
        "positions = valid.cumsum(dim=1) - 1",
        "tests/exploring/test_applied.py",
    ),
    Mutant(
        "a hook that never ran goes unnoticed",
        "if silent:",
        "if False:",
        "tests/lens/test_hooking.py",
        inside="require_fired",
    ),
    Mutant(
        "a target's logits off by one position",
        "row * n_pos + offset, token)",
        "row * n_pos + max(0, offset - 1), token)",
        "tests/lens/test_teacher_forcing.py",
    ),
    Mutant(
        "a plan goes on from a beginning that it edits",
        "return not any(bool(edit.selects(rows)[:, :-1].any()) for edit in plan)",
        "return True",
        "tests/lens/test_shared_beginnings.py",
    ),
    Mutant(
        "targets under a condition run with the token that answers it",
        "lead = 0 if plan.conditions or not",
        "lead = 0 if not",
        "tests/lens/test_shared_beginnings.py",
    ),
    Mutant(
        "a target that follows a context's last token is measured one token late",
        "first = start + 1 - lead",
        "first = start + 1",
        "tests/lens/test_shared_beginnings.py",
    ),
    Mutant(
        "the mean of a prompt counts others' positions",
        "chosen = value.to(torch.float32).masked_fill(~mask[..., None], 0.0)",
        "chosen = value.to(torch.float32)",
        "tests/lens/test_engine.py -k positions_and_pools",
    ),
    Mutant(
        "the first position called the last",
        "masked_fill(~mask, -1).amax(dim=1)",
        "masked_fill(~mask, 10**6).amin(dim=1)",
        "tests/lens/test_capture_generated.py",
    ),
    Mutant(
        "an edit at resid_mid does not reach the layer's output",
        "return value + delta.pop().to(value.device)",
        "return value if delta.pop() is not None else value",
        "tests/lens/test_capturing.py",
    ),
    Mutant(
        "a header shared by plans that edit it differently",
        "if length >= LEAST_PREFIX and _edits_alike(plan, contexts, length) else 0",
        "if length >= LEAST_PREFIX else 0",
        "tests/lens/test_shared_prefix.py",
    ),
    Mutant(
        "a row that breaks keeps the token of that step",
        "ended |= broken",
        "pass",
        "tests/lens/test_not_finite.py -k ends_with_an_error",
    ),
    Mutant(
        "a row that breaks after others were dropped is taken for another",
        "self._failed[live_rows] = failed",
        "self._failed[: len(live_rows)] = failed",
        "tests/lens/test_not_finite.py -k were_dropped",
    ),
    Mutant(
        "padding of whole rows read as their tokens",
        "padded[len(padded) - len(row) :] = row",
        "padded[: len(row)] = row",
        "tests/lens/test_token_positions.py",
    ),
    Mutant(
        "NaN swallowed",
        "broken = rows_not_finite(logits) return broken",
        "broken = torch.zeros(len(logits), dtype=torch.bool); return broken",
        "tests/lens/test_not_finite.py",
    ),
    Mutant(
        "vLLM on a GPU hears of NaN alone",
        "failed = ~np.isfinite(bits.view(np.float32))",
        "failed = np.isnan(bits.view(np.float32))",
        "tests/vllm/test_runner_v2.py",
    ),
    Mutant(
        "a token beyond the vocabulary goes on to the next pass",
        "return tokens.clamp_(0, logits.shape[-1] - 1), drawn_from",
        "return tokens, drawn_from",
        "tests/vllm/test_runner_v2.py",
    ),
    Mutant(
        "a pass without steered requests keeps the last pass's tokens",
        "if not (self._in_slots or self._dirty):",
        "if not self._in_slots:",
        "tests/vllm/test_steering_state.py",
    ),
    Mutant(
        "positions of steered requests stand still",
        "if self._is_edited[slots].any(): self.tables.tokens",
        "if not self._is_edited[slots].any(): self.tables.tokens",
        "tests/vllm/test_steering_state.py",
    ),
    # --- programs -------------------------------------------------------------------------------------------------
    Mutant(
        "a program's edits are placed one token late",
        "RowPositions(self._lens[:, None] + after, self._lens)",
        "RowPositions(self._lens[:, None] + after + 1, self._lens)",
        "tests/lens/test_programs.py -k another_plan",
    ),
    Mutant(
        "positions that depend on drawn tokens called foreseen",
        "return next(iter(by_tokens(self.plan.sets)), None) is None",
        "return True",
        "tests/lens/test_edits_on_a_model.py -k runs_every_operator",
    ),
    Mutant(
        "an edit that looks at a drawn token is placed at the next",
        "self._place(self.run.begin(ran), self._n_steps)",
        "self._place(self.run.begin(ran), self._n_steps + 1)",
        "tests/lens/test_edits_on_a_model.py -k runs_every_operator",
    ),
    Mutant(
        "a program goes on with the cache of the rows before",
        "self.cache.clear()",
        "pass",
        "tests/lens/test_programs.py -k another_plan",
    ),
    Mutant(
        "NaN stays in a program's cache",
        "layer.keys.zero_() layer.values.zero_()",
        "pass",
        "tests/lens/test_not_finite.py -k nan_of_one_call",
    ),
    Mutant(
        "a program edits rows that have ended",
        "inputs.indices.copy_(torch.where(here < 0, -1, index)[:, None])",
        "inputs.indices.copy_(torch.where(here < -1, -1, index)[:, None])",
        "tests/lens/test_programs.py -k another_plan",
    ),
    Mutant(
        "a program has room for its prompts only",
        "_capacity(max(prompt_lens) + max_new_tokens, context_length(bridge))",
        "_capacity(max(prompt_lens), context_length(bridge))",
        "tests/lens/test_programs.py -k beyond_the_room",
    ),
    Mutant(
        "a program attends to padding",
        "program.mask[:, :width] = valid.long()",
        "pass",
        "tests/lens/test_programs.py -k another_plan",
    ),
    Mutant(
        "a program counts padding",
        "program.counts[:, 0] = valid.sum(dim=-1)",
        "program.counts[:, 0] = width",
        "tests/lens/test_programs.py -k another_plan",
    ),
    Mutant(
        "a stream goes on in a program that another has taken",
        "if self.program.user() is not self:",
        "if False:",
        "tests/lens/test_programs.py -k interrupted",
    ),
    Mutant(
        "a program is used though it gives other logits",
        "is_same = all(rounding.explains(*_both(bridge, n_rows, capacity)) for n_rows, capacity in tried)",
        "is_same = True",
        "tests/lens/test_programs.py -k differs_is_refused",
    ),
    Mutant(
        "a program is compared on few rows only",
        "TRIED = ((1, 512), (3, CAPACITY_STEP), (17, 512), (33, CAPACITY_STEP))",
        "TRIED = ((1, 512), (2, CAPACITY_STEP))",
        "tests/lens/test_programs.py -k every_way_of_the_kernels",
    ),
    Mutant(
        "lack of memory is taken for a difference",
        "if is_out_of_memory(cause):",
        "if False:",
        "tests/lens/test_programs.py -k without_memory_is_no_verdict",
    ),
    Mutant(
        "a program that failed is tried again and again",
        "_failures(self._bridge)[self._key] = error.reason",
        "pass",
        "tests/lens/test_programs.py -k from_the_start",
    ),
    Mutant(
        "a model's parameters are replaced while its copy runs",
        "share_lock(self.model, model)",
        "pass",
        "tests/lens/test_threads.py -k processor_puts",
    ),
    Mutant(
        "a stream reads where a replaced weight lay",
        "if self.program is not None and self.program.is_outdated:",
        "if False:",
        "tests/lens/test_programs.py -k stream_ends",
    ),
    Mutant(
        "a program is wider than the context",
        "return rounded if context is None else max(needed, min(rounded, context))",
        "return rounded",
        "tests/lens/test_programs.py -k no_more_than_the_context",
    ),
    Mutant(
        "one wrong row among many is taken for rounding",
        "return max(sum(shares) / len(shares) / self.allowed, max(shares) / row_limit)",
        "return sum(shares) / len(shares) / self.allowed",
        "tests/runtime/test_self_comparison.py -k one_row_among_many",
    ),
    Mutant(
        "a program is compared with rows that are wrong in the same way",
        'fresh_rows(backend.model, runs[1], lens, "step")',
        '__import__("steerlab._runtime.rows", fromlist=["Rows"]).Rows(backend.model, runs[1], lens)',
        "tests/lens/test_programs.py -k ignores_its_mask",
    ),
    Mutant(
        "states of other kinds taken for keys and values",
        "all(type(layer) in (StaticLayer, StaticSlidingWindowLayer) for layer in layers)",
        "True",
        "tests/lens/test_programs.py -k does_not_fit",
    ),
    Mutant(
        "a program writes one slot late",
        "slots = self.cumulative_length.view(1)",
        "slots = self.cumulative_length.view(1) + 1",
        "tests/lens/test_programs.py -k another_plan",
    ),
    Mutant(
        "a program leaves a plan's scale out",
        "delta = self.factors[k].gather(1, column)[..., None] * delta",
        "pass",
        "tests/lens/test_programs.py -k another_plan",
    ),
    Mutant(
        "a program goes on with the counts of the plan before",
        "self.edited.zero_()",
        "pass",
        "tests/lens/test_programs.py -k another_plan",
        inside="EditBuffers",
    ),
    Mutant(
        "a program keeps no norm",
        "delta = torch.where(self.keeps[k], norm_kept(wide, delta), delta)",
        "pass",
        "tests/lens/test_edits_on_a_model.py -k runs_every_operator",
    ),
    Mutant(
        "in a program every gate is open",
        "return torch.where(z > threshold, value, 0.0)",
        "return value",
        "tests/lens/test_edits_on_a_model.py -k runs_every_operator",
        inside="EditBuffers",
    ),
    Mutant(
        "a shared head lies apart from its embedding",
        "places[name] = places[shared]",
        "pass",
        "tests/lens/test_programs.py -k spread_by_bytes",
    ),
    Mutant(
        "a shared weight is weighed twice",
        "[t for t in (*module.parameters(), *module.buffers()) if id(t) not in seen]",
        "[*module.parameters(), *module.buffers()]",
        "tests/lens/test_programs.py -k spread_by_bytes",
    ),
    Mutant(
        "a block of the vocabulary replaces those before it in the gradient",
        "_add_product(summed, gradient, head.weight[place], is_first=place.start == 0)",
        "_add_product(summed, gradient, head.weight[place], is_first=True)",
        "tests/kernels/test_kernels.py -k heads",
    ),
    Mutant(
        "hidden slots are attended to on a GPU",
        "seen = seen & (tl.load(mask + row * mask_row + place * mask_slot, seen, 0) != 0)",
        "pass",
        "tests/kernels/test_decoding_kernels.py -k agree_with_torch",
    ),
    Mutant(
        "plain modules that give something else are taken for the bridge's",
        "rounding.excess(found[name], wanted[name]) > _SHARE",
        "False",
        "tests/lens/test_families.py -k half_precision",
    ),
    Mutant(
        "what a layer's parts put out may add up to something else",
        "_ROUNDINGS = 8",
        "_ROUNDINGS = 800",
        "tests/vllm/test_sublayers.py",
    ),
    Mutant(
        "the smallest sums in half precision are compared with those of the largest numbers",
        "* torch.stack(wide).abs().sum(dim=0)",
        "* torch.stack(wide).abs().sum(dim=0).amax()",
        "tests/vllm/test_sublayers.py",
    ),
    Mutant(
        "a program runs no kernel between its linear maps",
        "self._renewals = fuse_between(self.unhooked.model, key.capacity)",
        "pass",
        "tests/lens/test_programs_by_kernels.py",
    ),
    Mutant(
        "what is written last goes into vLLM's log",
        "_flush()\n            for number in (1, 2):",
        "for number in (1, 2):",
        "tests/vllm/test_log_file.py -k all_that",
    ),
    Mutant(
        "a recorded pass changes its constants for good",
        "return self._made[key].clone()",
        "return self._made[key]",
        "tests/lens/test_programs.py -k constants",
    ),
    Mutant(
        "experts in float32 are counted on the processor",
        'config._experts_implementation = "batched_mm"',
        "pass",
        "tests/lens/test_programs.py -k experts",
    ),
    Mutant(
        "a program's state comes back from a later device",
        "self._order.index(device) < self._order.index(here)",
        "False",
        "tests/lens/test_devices.py -k comes_along",
    ),
    Mutant(
        "a table of angles outlives its frequencies",
        "for renew in self._renewals:",
        "for renew in ():",
        "tests/lens/test_programs_by_kernels.py",
    ),
    Mutant(
        "inputs beyond a row are read on a GPU",
        "inside = inner < depth",
        "inside = inner >= 0",
        "tests/kernels/test_decoding_kernels.py -k agree_with_torch",
    ),
    Mutant(
        "NaN is no logit on a GPU",
        'x = tl.where(x != x, float("inf"), x)',
        "pass",
        "tests/kernels/test_decoding_kernels.py -k agree_with_torch",
    ),
    # --- vLLM: what needs no engine -------------------------------------------------------------------------------
    Mutant(
        "prefix cache key without plan",
        'f"{self.plan}:{inside}{counted}{self._asked}"',
        'f"{inside}{counted}{self._asked}"',
        "tests/vllm/test_request_spec.py",
    ),
    Mutant(
        "prefix cache key without positions",
        'f"{self.plan}:{inside}{counted}{self._asked}"',
        'f"{self.plan}{counted}{self._asked}"',
        "tests/vllm/test_request_spec.py",
    ),
    Mutant(
        "prefix cache takes a block edited in part for one edited everywhere",
        "if all(len(runs) == 1 and runs[0] == (start, stop) for runs in inside):",
        "if True:",
        "tests/vllm/test_request_spec.py",
    ),
    Mutant(
        "prefix cache takes the longest of several edits for all",
        "min(runs[0][1] for runs in self._acting)",
        "max(runs[0][1] for runs in self._acting)",
        "tests/vllm/test_request_spec.py",
    ),
    Mutant(
        "a module that was replaced is not noticed",
        "if original is None or _children(original) != children:",
        "if original is None:",
        "tests/lens/test_changed_model.py",
    ),
    Mutant(
        "a pass ends before the last layer that is edited",
        "max(point.layer for point in (*self.points, *run.hook_points))",
        "max(point.layer for point in self.points)",
        "tests/lens/test_capturing.py",
    ),
    Mutant(
        "a large model's last values are not sampled",
        "torch.linspace(0, len(values) - _PART, _PARTS",
        "torch.linspace(0, len(values) - 2 * _PART, _PARTS",
        "tests/lens/test_loading.py",
    ),
    Mutant(
        "the bridge drops out in training mode",
        "with alone(self.model), evaluating(self.model), torch.inference_mode(False), torch.no_grad():",
        "with alone(self.model), torch.inference_mode(False), torch.no_grad():",
        "tests/lens/test_changed_model.py",
    ),
    Mutant(
        "a request preempted loses its tally",
        "whole += stay[plan.points, plan.places]",
        "whole = stay[plan.points, plan.places]",
        "tests/vllm/test_steering_state.py",
    ),
    Mutant(
        "worker tally skipped",
        "record.tallies.append(copy)",
        "pass",
        "tests/vllm/test_steering_state.py",
    ),
    Mutant(
        "a plan at the next layer of the worker",
        "self.points.index(point) for point",
        "(self.points.index(point) + 1) % len(self.points) for point",
        "tests/vllm/test_steering_state.py",
    ),
    Mutant(
        "a step after another keeps its position",
        "self.tables.tokens[: len(slots), POSITION].add_(1)",
        "pass",
        "tests/vllm/test_steering_state.py",
    ),
    Mutant(
        "scoring's sum over shards missing",
        "total = (totals * (tops - _finite(top)).exp()).sum(dim=0)",
        "total = (totals * (tops - _finite(top)).exp())[0]",
        "tests/vllm/test_scoring_parts.py",
    ),
    Mutant(
        "another shard's token called one's own",
        "torch.where(owned, own, 0.0)",
        "own",
        "tests/vllm/test_scoring_parts.py",
    ),
    Mutant(
        "a cache hit reaches the scored position",
        "return first if first + 1 <",
        "return first + 1 if first + 1 <",
        "tests/vllm/test_scoring_parts.py",
        inside="longest_hit",
    ),
    Mutant(
        "tokens that were run again are counted twice",
        "int(counted) - beyond",
        "int(counted)",
        "tests/vllm/test_build_receipts.py",
    ),
    Mutant(
        "a position that never ran goes unnoticed",
        "if account.start < length and size(account.covered) != length - account.start:",
        "if False:",
        "tests/vllm/test_build_receipts.py",
    ),
    Mutant(
        "a shared prefix taken over from other tokens",
        "request.prompt_token_ids[: len(known.tokens)] == known.tokens",
        "True",
        "tests/vllm/test_shared_prefixes.py",
    ),
    Mutant(
        "a shared prefix taken over from another salt",
        "request.cache_salt == known.salt and",
        "True and",
        "tests/vllm/test_shared_prefixes.py",
    ),
    Mutant(
        "positions that depend on tokens to come let through",
        "if len(row.token_ids) < row.length:",
        "if False:",
        "tests/vllm/test_position_runs.py",
    ),
    Mutant(
        "a term of the operator with the wrong sign",
        "total[on] += value[:, None]",
        "total[on] -= value[:, None]",
        "tests/vllm/test_op.py",
    ),
    Mutant(
        "a run of positions one too long",
        "covered = (runs[..., 0] <= positions[:, None]) & (positions[:, None] < runs[..., 1])",
        "covered = (runs[..., 0] <= positions[:, None]) & (positions[:, None] <= runs[..., 1])",
        "tests/vllm/test_op.py",
    ),
    Mutant(
        "steering given twice goes unnoticed",
        "if data.get(FIELD) is not None and flat.get(FIELD) is not None:",
        "if False:",
        "tests/vllm/test_serving_requests.py -m 'not slow'",
    ),
    # --- scoring --------------------------------------------------------------------------------------------------
    Mutant(
        "windows without overlap",
        "stop = min(window.stop + min(stride, context_length - 1), n_tokens)",
        "stop = min(window.stop + stride, n_tokens)",
        "tests/scoring/test_windows.py",
    ),
    Mutant(
        "off-by-one window in perplexity",
        "return TextWindow(max(0, stop - context_length), window.stop, stop)",
        "return TextWindow(max(0, stop - context_length), window.stop + 1, stop)",
        "tests/scoring/test_windows.py",
    ),
    Mutant(
        "BOS counted as bytes",
        "if not self.sizes.prefix: self._unscored = self._bytes_of_first(window.ids[0])",
        "pass",
        "tests/scoring/test_sliding.py",
    ),
    Mutant(
        "journal without the text's hash",
        "or last.digest != record.digest",
        "or False",
        "tests/scoring/test_resume.py",
    ),
    Mutant(
        "resume ignores the fingerprint",
        "[name for name in sorted({*found, *wanted}) if found.get(name) != wanted.get(name)]",
        "[]",
        "tests/scoring/test_journal.py",
    ),
    Mutant(
        "damaged records read",
        "_CHECKSUM.unpack(checksum)[0] != zlib.crc32(head + body)",
        "False",
        "tests/scoring/test_journal.py",
    ),
    Mutant(
        "a resumed measurement may have another plan",
        '"plan": None if plan is None else plan.hash, "text": text,',
        '"text": text,',
        "tests/scoring/test_resume.py",
    ),
    Mutant(
        "Jensen-Shannon's middle not halved",
        "torch.logaddexp(log_a, log_b) - math.log(2)",
        "torch.logaddexp(log_a, log_b)",
        "tests/scoring/test_divergence.py",
    ),
    Mutant(
        "divergence one way twice",
        'found["reverse_kl"].append(normalised_kl(b, a))',
        'found["reverse_kl"].append(normalised_kl(a, b))',
        "tests/scoring/test_divergence.py",
    ),
    Mutant(
        "a text cut where its tokens change",
        "if plain_ids(tokenizer, text[:cut]) + plain_ids(tokenizer, text[cut:]) == whole:",
        "if True:",
        "tests/scoring/test_pieces.py",
    ),
    Mutant(
        "a plan that counts positions let through over several windows",
        "if len(windows) > 1:",
        "if len(windows) > 10**9:",
        "tests/scoring/test_sliding.py",
    ),
    # --- experiment -----------------------------------------------------------------------------------------------
    Mutant(
        "null without flip",
        "estimate(torch.where(flip, negative, positive), torch.where(flip, positive, negative))",
        "estimate(positive, negative)",
        "tests/experiment/test_controls.py",
    ),
    Mutant(
        "random directions of another length",
        'values / values.norm() * vector.norm, method="random_direction"',
        'values, method="random_direction"',
        "tests/experiment/test_controls.py",
    ),
    Mutant(
        "all random directions alike",
        "np.random.default_rng([seed, family, draw])",
        "np.random.default_rng([seed, family])",
        "tests/experiment/test_controls.py",
    ),
    Mutant(
        "cell key without engine",
        '"kind": self.kind, "engine": engine_hash, "what": self.what',
        '"kind": self.kind, "what": self.what',
        "tests/experiment/test_cells.py",
    ),
    Mutant(
        "cell key without content",
        '"kind": self.kind, "engine": engine_hash, "what": self.what',
        '"kind": self.kind, "engine": engine_hash',
        "tests/experiment/test_cells.py",
    ),
    Mutant(
        "a cell under another's name is read",
        "if stored.key != cell.key(engine_hash):",
        "if False:",
        "tests/experiment/test_cells.py",
    ),
    Mutant("look not counted", "self._count(kind, *asked(), done)", "pass", "tests/experiment/test_looks.py"),
    Mutant(
        "looks at other items are one look",
        "content_hash([kind, _contents(items), what])",
        "content_hash([kind, what])",
        "tests/experiment/test_looks.py",
    ),
    Mutant(
        "confirmed on the items of the selection",
        "if overlap and not allow_overlap:",
        "if False:",
        "tests/experiment/test_confirmation.py",
    ),
    Mutant(
        "a selection's bound on one side",
        "np.all([table[name].abs() <= bound for name, bound in subject_to.items()], axis=0)",
        "np.all([table[name] <= bound for name, bound in subject_to.items()], axis=0)",
        "tests/experiment/test_selection.py",
    ),
    Mutant(
        "the smallest gain selected",
        "ascending=[False, False, True, True]",
        "ascending=[False, True, True, True]",
        "tests/experiment/test_selection.py",
    ),
    Mutant(
        "one null passed is enough",
        "passed = excludes and all(rank <= RANK_LEVEL for rank in ranks.values())",
        "passed = excludes and any(rank <= RANK_LEVEL for rank in ranks.values())",
        "tests/experiment/test_effect.py",
    ),
    Mutant(
        "an effect without its interval",
        "passed = excludes and all(",
        "passed = all(",
        "tests/experiment/test_effect.py",
    ),
    Mutant(
        "what is not shown called no effect",
        "if small and not passed:",
        "if not passed:",
        "tests/experiment/test_effect.py",
    ),
    Mutant(
        "one of two one-sided tests is enough",
        "-figures.margin < low and high < figures.margin",
        "-figures.margin < low or high < figures.margin",
        "tests/experiment/test_effect.py",
    ),
    Mutant(
        "a margin from the mean of random directions",
        "np.quantile(np.abs(drawn), MARGIN_QUANTILE)",
        "np.mean(np.abs(drawn))",
        "tests/experiment/test_effect.py",
    ),
    Mutant(
        "a normal interval for few groups",
        "scipy.stats.t.ppf((1 + level) / 2, n_groups - 1)",
        "scipy.stats.norm.ppf((1 + level) / 2)",
        "tests/measures/test_intervals.py",
    ),
    Mutant(
        "doses that destroy the text are fitted",
        "affordable = set(cost[cost.ppl_ratio <= settings.max_ppl_ratio].dose)",
        "affordable = set(cost.dose)",
        "tests/experiment/test_effect.py",
    ),
    Mutant(
        "an engine's fingerprint without its precision",
        '"weights_hash", "weight_processing", "dtype", "context_length"',
        '"weights_hash", "weight_processing", "context_length"',
        "tests/experiment/test_fingerprint.py",
    ),
    Mutant(
        "a run's folder not locked",
        "lock.acquire(timeout=0)",
        "lock.is_locked",
        "tests/experiment/test_locking.py",
    ),
    Mutant(
        "a forked child believes that it holds the lock",
        "if shared is None or shared.pid != os.getpid():",
        "if shared is None:",
        "tests/experiment/test_locking.py",
    ),
    Mutant(
        "parity of a plan that does nothing",
        "return self.steering_size > self.tolerance",
        "return True",
        "tests/experiment/test_parity.py",
    ),
    Mutant(
        "swapped sign of the margin",
        "float(positive.mean() - negative.mean())",
        "float(negative.mean() - positive.mean())",
        "tests/experiment/test_metrics.py",
    ),
    Mutant(
        "plans tested together not adjusted",
        "adjust([effect.null_rank for effect in tested.values()])",
        "[effect.null_rank for effect in tested.values()]",
        "tests/experiment/test_comparisons.py",
    ),
    Mutant(
        "EOS counted as text",
        'ids[:-1] if reason == "eos" else ids',
        "ids",
        "tests/experiment/test_texts.py",
    ),
    Mutant(
        "a series that stands still has the slope of its rounding",
        "np.where(level, 0.0, y @ centred / (centred @ centred))",
        "y @ centred / (centred @ centred)",
        "tests/measures/test_intervals.py -k slopes",
    ),
    Mutant(
        "a plan that does nothing goes without a word",
        "if not passed and _nothing_moves(figures):",
        "if False:",
        "tests/experiment/test_effect.py -k does_nothing",
    ),
    Mutant(
        "intervals of earlier versions called Student's t",
        "else EARLIER",
        "else STUDENT_T",
        "tests/experiment/test_earlier_runs.py -k rule_of_its_intervals",
    ),
    Mutant(
        "a plan's file loses the names of further vectors",
        '_with_origins(operator_from_json(data["operator"], vector.hook_point), data.get("others", {}))',
        'operator_from_json(data["operator"], vector.hook_point)',
        "tests/experiment/test_names_and_strengths.py -k further_vectors",
    ),
    # --- sequences ------------------------------------------------------------------------------------------------
    Mutant(
        "importance weights turned over",
        "log_weights = aimed - drawn",
        "log_weights = drawn - aimed",
        "tests/sequences/test_importance.py",
    ),
    Mutant(
        "effective sample size without squares",
        "1 / np.sum(self.normalised**2)",
        "1 / np.sum(self.normalised)",
        "tests/sequences/test_importance.py",
    ),
    Mutant(
        "earlier entropies instead of later ones",
        "return wide.sum() - np.cumsum(wide)",
        "return np.cumsum(wide)",
        "tests/sequences/test_entropy_gradient.py -k later",
    ),
    Mutant(
        "a problem's answer",
        "start + found - given",
        "start + found + given",
        "tests/sequences/test_datasets.py",
    ),
    Mutant(
        "paths and steps that change together count once in a curvature",
        "second_h + 2 * first_l * first_h",
        "second_h + first_l * first_h",
        "tests/sequences/test_entropy_probe.py -k enumerated",
    ),
    Mutant(
        "padding before a prompt is run",
        "ids[b, g, starts[b][g] : end + n_response]",
        "ids[b, g, : end + n_response]",
        "tests/sequences/test_forcing.py -k padding",
    ),
    Mutant(
        "weights stay whole after a pass without gradients",
        "inner.reshard()",
        "pass",
        "tests/sequences/test_sharded.py -k whole_model",
    ),
    Mutant(
        "each process keeps its part of a hidden state's gradient",
        "gradient @ matrix if ctx.shards is None else ctx.shards.summed(gradient @ matrix)",
        "gradient @ matrix",
        "tests/sequences/test_sharded.py -k vocabulary",
    ),
    # --- models and the command line ------------------------------------------------------------------------------
    Mutant(
        "an unfinished model directory is taken",
        'whole = all((directory / name).stat().st_size == size for name, size in marker["files"].items())',
        "whole = True",
        "tests/models/test_models.py -k 'building or prepared_model_with'",
    ),
    Mutant(
        "a hash remembered of other bytes",
        'usable = known["files"] == stamp and',
        "usable =",
        "tests/models/test_models.py -k hash",
    ),
    Mutant(
        "the second of two equal keys wins",
        "if isinstance(key, str) and key in seen:",
        "if False:",
        "tests/cli/test_yaml_file.py",
    ),
    Mutant(
        "a file's paths relative to the caller", "return folder / value", "return value", "tests/cli/test_yaml_file.py"
    ),
    # --- over HTTP ------------------------------------------------------------------------------------------------
    Mutant(
        "a call sent again under another id",
        '"x-request-id": name}',
        '"x-request-id": uuid4().hex}',
        "tests/engines/test_remote.py",
    ),
    Mutant(
        "half an answer taken for a whole one",
        "raise CutOffError(",
        "return; CutOffError(",
        "tests/engines/test_http.py",
    ),
    Mutant(
        "vectors from outside taken by every server",
        "if not self.desk.allows_vectors:",
        "if self.desk is None:",
        "tests/vllm/test_calls.py",
    ),
    Mutant(
        "a call that nobody waits for runs on",
        "job.call.cancel()\n\n    def close",
        "pass\n\n    def close",
        "tests/vllm/test_call_book.py",
    ),
    # --- files and requests of others -----------------------------------------------------------------------------
    Mutant(
        "an answer that is no choice of its question is taken",
        "if letter not in offered:",
        "if False:",
        "tests/core/test_ab_questions.py",
    ),
    Mutant(
        "a site that is not wired is taken for wired",
        "if same.site not in sites:",
        "if False:",
        "tests/engines/test_remote.py -k bad_input",
    ),
    Mutant(
        "resid_pre of the first layer is looked for before it",
        'if point.site == "resid_pre" and point.layer == 0:',
        "if False:",
        "tests/scoring/test_model_arguments.py -k started_with",
    ),
    Mutant(
        "resid_pre is looked for at the layer itself",
        'HookPoint(point.layer - 1, "resid_post") if point.site == "resid_pre" else point\n    missing',
        'HookPoint(point.layer, "resid_post") if point.site == "resid_pre" else point\n    missing',
        "tests/engines/test_remote.py",
    ),
    Mutant(
        "what conditions read is not wired",
        "[*plan.hook_points, *(condition.hook_point for condition in plan.conditions)]",
        "plan.hook_points",
        "tests/scoring/test_model_arguments.py",
    ),
    Mutant(
        "requests with other settings run together",
        "one.found is None and one.settings == settings",
        "one.found is None",
        "tests/scoring/test_request_batches.py",
    ),
    Mutant(
        "one bad request takes its batch with it",
        "if len(together) == 1:\n                together[0].found = error\n                return",
        "for one in together:\n                one.found = error\n            return",
        "tests/scoring/test_request_batches.py",
    ),
    Mutant(
        "inspect's seed is dropped",
        "seed=[seed for _, seed in asked]",
        "seed=[0 for _ in asked]",
        "tests/peers/test_inspect.py -k one_batch",
    ),
    Mutant(
        "inspect is told the other reason to stop",
        '{"eos": "stop", "stop": "stop", "length": at_length}',
        '{"eos": at_length, "stop": at_length, "length": "stop"}',
        "tests/peers/test_inspect.py -k one_batch",
    ),
    Mutant(
        "the end of the context called the length asked for",
        'at_length = "max_tokens" if settings.max_new_tokens < room else "model_length"',
        'at_length = "max_tokens"',
        "tests/peers/test_inspect.py -k end_of_the_context",
    ),
    Mutant(
        "models of one engine do not wait for each other",
        "with _TURNS.setdefault(id(self.engine), Lock()):",
        "if True:",
        "tests/peers/test_inspect.py -k take_turns",
    ),
    Mutant(
        "features that a factor multiplies are set",
        'return not bool((arrays.vector("scaling_factor") == 1).all())',
        "return False",
        "tests/steering/test_sae_layouts.py",
    ),
    Mutant(
        "a BatchTopK encoder reads the stream as it is",
        '"BatchTopKSAE": ("jumprelu", True',
        '"BatchTopKSAE": ("jumprelu", False',
        "tests/steering/test_sae_layouts.py",
    ),
    Mutant(
        "TopK by norms ranks features without their biases",
        "columns, bias = columns * norms, bias * norms",
        "columns = columns * norms",
        "tests/steering/test_sae_layouts.py",
    ),
]


@dataclass(frozen=True)
class Place:
    """Where a mutant's text lies: a file relative to the tree, and the first and last character."""

    file: Path
    start: int
    stop: int


class NotOnceError(Exception):
    """A mutant's text is in the package not at all, or more than once."""


def places_of(mutant: Mutant, tree: Path) -> list[Place]:
    """All places of a mutant's text in the package."""
    pattern, found = pattern_of(mutant.text), []
    for file in sorted((tree / PACKAGE).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        hits = [(hit.start(), hit.end()) for hit in pattern.finditer(source)]
        ranges = ranges_of(source, mutant.inside) if hits and mutant.inside else [(0, len(source))]
        found += [
            Place(file.relative_to(tree), start, stop)
            for start, stop in hits
            if any(first <= start and stop <= last for first, last in ranges)
        ]
    return found


def pattern_of(text: str) -> re.Pattern[str]:
    """A text with any white space between its words and signs, and with or without a comma before what it closes."""
    parts = re.findall(r"\w+|[^\w\s]", text)
    found = re.escape(parts[0])
    for before, part in itertools.pairwise(parts):
        are_words = before[-1].isalnum() and part[0].isalnum()
        comma = "(?:,\\s*)?" if part in ")]" and before != "," else ""
        found += (r"\s+" if are_words else r"\s*") + comma + re.escape(part)
    return re.compile(found)


def ranges_of(source: str, name: str) -> list[tuple[int, int]]:
    """First and last character of each function or class of this name."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    named = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds) and node.name == name]
    return [(starts[node.lineno - 1], starts[node.end_lineno or node.lineno]) for node in named]


def place_of(mutant: Mutant, tree: Path) -> Place:
    """The one place of a mutant's text.

    Raises:
        NotOnceError: there is none, or there are several.
    """
    found = places_of(mutant, tree)
    if len(found) != 1:
        where = ", ".join(str(place.file) for place in found) or "nowhere"
        raise NotOnceError(f"the text must occur once and is {where}")
    return found[0]


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant, and in how many seconds."""

    mutant: Mutant
    outcome: str
    seconds: float
    detail: str = ""


class Tree:
    """A temporary copy of the working tree, in which one mutant at a time is applied."""

    def __init__(self, folder: Path, number: int) -> None:
        self.root = folder / f"tree-{number}"
        self._clock = 0
        self._without: dict[str, str] = {}
        shutil.copytree(ROOT, self.root, ignore=NOT_COPIED, symlinks=True)
        environment = Path(sys.prefix)  # tests look for commands beside the interpreter, and pages name .venv
        (self.root / ".venv").symlink_to(environment)

    def try_out(self, mutant: Mutant, seconds: float) -> Verdict:
        """Applies a mutant, runs the tests near it, and takes it back."""
        started = time.monotonic()
        try:
            place = place_of(mutant, self.root)
        except NotOnceError as error:
            return Verdict(mutant, "error", 0.0, str(error))
        without = self._outcome_without(mutant.near, seconds)
        if without != "passed":
            outcome = "skipped" if without == "skipped" else "error"
            return Verdict(mutant, outcome, time.monotonic() - started, f"without it these {without}: {mutant.near}")
        path = self.root / place.file
        source = path.read_text(encoding="utf-8")
        try:
            self._write(path, source[: place.start] + mutant.replacement + source[place.stop :])
            ast.parse(path.read_text(encoding="utf-8"))
            outcome, detail = self.run(mutant.near, seconds)
        except SyntaxError as error:
            outcome, detail = "error", f"the replacement is not valid Python there: {error}"
        finally:
            self._write(path, source)
        names = {"failed": "caught", "passed": "survived"}
        return Verdict(mutant, names.get(outcome, outcome), time.monotonic() - started, detail)

    def run(self, near: str, seconds: float) -> tuple[str, str]:
        """Runs tests: 'failed', 'passed', 'skipped' or 'error', and the last line that pytest wrote."""
        process = WARM.Process(target=run_pytest, args=(self.root, shlex.split(near)))
        process.start()
        process.join(seconds)
        if process.is_alive():
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return "failed", f"not finished after {seconds:g} s"
        written = (self.root / OUTPUT).read_text(encoding="utf-8").splitlines()
        last = ([line for line in written if line.startswith(("FAILED", "ERROR"))] or written or [""])[-1]
        if process.exitcode == NO_FAILURE and not any(" passed" in line for line in written):
            is_skipped = any(line.startswith("SKIPPED") for line in written)
            return "skipped" if is_skipped else "error", f"no test ran: {last}"
        outcome = {NO_FAILURE: "passed", SOME_FAILED: "failed"}.get(process.exitcode or 0, "error")
        return outcome, last[:160]

    def _outcome_without(self, near: str, seconds: float) -> str:
        """What becomes of tests while no mutant is applied; they run once."""
        if near not in self._without:
            self._without[near] = self.run(near, seconds)[0]
        return self._without[near]

    def _write(self, path: Path, source: str) -> None:
        """Writes with a time of its own: Python takes bytecode for current if time and size are the same."""
        path.write_text(source, encoding="utf-8")
        self._clock += 2
        os.utime(path, (time.time() + self._clock, time.time() + self._clock))


def run_pytest(tree: Path, arguments: Sequence[str]) -> None:
    """Runs tests of a tree in this process, which ends with pytest's exit status."""
    os.setsid()
    os.chdir(tree)
    os.environ |= {"PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(tree))
    output = os.open(tree / OUTPUT, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest

    status = int(pytest.main([*OPTIONS, *arguments]))
    sys.stdout.flush()
    os._exit(status)


def verdicts(mutants: Sequence[Mutant], jobs: int, seconds: float) -> Iterator[Verdict]:
    """Tries each mutant, several at a time in trees of their own; in the order of `mutants`."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as pool:
        trees: SimpleQueue[Tree] = SimpleQueue()
        for number in range(jobs):
            trees.put(Tree(Path(folder), number))

        def try_out(mutant: Mutant) -> Verdict:
            tree = trees.get()
            try:
                return tree.try_out(mutant, seconds)
            finally:
                trees.put(tree)

        yield from pool.map(try_out, mutants)


def main() -> int:
    """Runs the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--list", action="store_true", help="list the mutants and where each lies; run nothing")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="those whose name holds NAME")
    parser.add_argument("--jobs", type=int, default=1, help="how many are tried at a time (1)")
    parser.add_argument("--seconds", type=float, default=300.0, help="time for the tests near one mutant (300)")
    given = parser.parse_args()
    chosen = [m for m in MUTANTS if not given.only or any(part in m.name for part in given.only)]
    if given.list:
        return show(chosen)
    os.environ["OMP_NUM_THREADS"] = "1"  # a process that has started threads must not be forked
    WARM.set_forkserver_preload(IMPORTED_ONCE)
    counts: Counter[str] = Counter()
    for verdict in verdicts(chosen, max(1, given.jobs), given.seconds):
        counts[verdict.outcome] += 1
        detail = verdict.detail if verdict.outcome != "survived" else f"near: {verdict.mutant.near}"
        print(f"{verdict.outcome:9}{verdict.seconds:5.0f} s  {verdict.mutant.name}: {detail}", flush=True)
    print(f"{len(chosen)} mutants: " + ", ".join(f"{n} {outcome}" for outcome, n in counts.most_common()))
    return int(counts["caught"] + counts["skipped"] < len(chosen))


def show(mutants: Sequence[Mutant]) -> int:
    """Prints each mutant's place; the exit status says whether each has one."""
    wrong = 0
    for mutant in mutants:
        try:
            print(f"{mutant.name}: {place_of(mutant, ROOT).file}")
        except NotOnceError as error:
            wrong += 1
            print(f"{mutant.name}: ERROR, {error}")
    print(f"{len(mutants)} mutants, {wrong} without one place")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
