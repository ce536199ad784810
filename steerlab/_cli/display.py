"""Results of an experiment as text and tables."""

import math

import pandas as pd

import steerlab as sl
from steerlab._cli.console import say, show_table
from steerlab.experiment._wording import in_figures

STYLES = {
    "effect": "bold green",
    "no effect": "bold cyan",
    "inconclusive": "bold yellow",
    "not tested": "bold yellow",
    "collapsed": "bold red",
}
FAMILIES = {"random": "random directions", "shuffled": "label flips"}
SHOWN_PROMPTS = 2


def show_effect(effect: sl.Effect) -> None:
    """Prints an effect: its doses, its figures, and the verdict with reasons."""
    axis, metric = effect.settings.axis, _metric_name(effect)
    table = effect.by_dose()
    say()
    rows = [
        [f"{dose:+g}", in_figures(value, "+", 3), f"{ratio:.3f}", "yes" if fitted else "no"]
        for dose, value, ratio, fitted in zip(table.dose, table.value, table.ppl_ratio, table.fitted, strict=True)
    ]
    show_table([axis, metric, "perplexity ratio", "fitted"], rows, text_columns=0)
    say()
    _show_slope(effect)
    for arm in effect.nulls().to_dict(orient="records"):
        if arm["family"] in FAMILIES:
            found = f"null rank         {arm['rank']:.3f} against {arm['draws']} {FAMILIES[arm['family']]}"
            largest, own = in_figures(arm["largest_size"]), in_figures(abs(effect.rank_slope))
            say(f"{found} (largest |slope| {largest}, the vector's {own})")
        elif arm["family"] == "wrong_layer":
            say(f"wrong layer       slope {in_figures(arm['mean_slope'], '+')}, shown and not ranked")
    say(f"verdict           {effect.verdict}", style=STYLES[effect.verdict])
    for reason in effect.reasons:
        say(f"  · {reason}")


def _show_slope(effect: sl.Effect) -> None:
    if math.isnan(effect.slope):
        say("slope             none: fewer than two doses stay within the cost bound")
        return
    say(f"slope             {in_figures(effect.slope, '+')} per unit {effect.settings.axis}")
    low, high = effect.ci
    interval = (
        "none: all prompts share one group"
        if math.isnan(low)
        else f"{in_figures(low, '+')} to {in_figures(high, '+')}, by Student's t over groups of prompts"
    )
    say(f"{f'{effect.settings.level:.0%} interval':<17} {interval}")
    if not math.isnan(effect.margin):
        inner = " to ".join(in_figures(end, "+") for end in effect.equivalence_ci)
        ends = "none" if math.isnan(effect.equivalence_ci[0]) else inner
        say(f"margin            ±{in_figures(effect.margin)}; {2 * effect.settings.level - 1:.0%} interval {ends}")
    if math.isfinite(effect.detectable):
        say(f"detectable        {in_figures(effect.detectable)} in 80 % of such runs")
    say(f"anti-steerable    {effect.anti_steerable:.0%} of {len(effect.item_slopes)} prompts")


def show_entropy(frame: pd.DataFrame, *, dose: float, axis: str) -> None:
    """Prints how entropy changed."""
    base, steered = frame.base.mean(), frame.steered.mean()
    say(f"entropy           {base:.3f} → {steered:.3f} nats per token at {axis} {dose:+g} ({steered - base:+.3f})")


def show_samples(frame: pd.DataFrame) -> None:
    """Prints the first prompts' completions, dose by dose."""
    first = frame[frame.sample_index == 0]
    for _, part in list(first.groupby("prompt_index", sort=True))[:SHOWN_PROMPTS]:
        say()
        say(f"{part.prompt.iloc[0]} …", style="bold")
        for dose, text in zip(part.dose, part.text, strict=True):
            say(f"  {dose:+5g}  {' '.join(str(text).split())}")


def _metric_name(effect: sl.Effect) -> str:
    names = {"log_prob_margin": "margin (nats)", "choice_prob": "choice probability"}
    return names.get(effect.settings.metric, effect.settings.metric)
