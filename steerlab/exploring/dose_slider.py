"""A slider from a prompt and a dose to the steered text, in a notebook."""

from typing import Any

from steerlab.core._numbers import check_integer, check_number
from steerlab.core.engine import DEFAULT_POLICY, Engine
from steerlab.core.errors import BackendMissingError, InputError
from steerlab.core.policy import SamplingPolicy
from steerlab.display import Face
from steerlab.exploring.completions import side_by_side
from steerlab.steering.plan import Plan


def dose_slider(
    engine: Engine,
    plan: Plan,
    prompt: str = "",
    *,
    low: float = -0.5,
    high: float = 0.5,
    step: float = 0.05,
    max_new_tokens: int = 40,
    policy: SamplingPolicy = DEFAULT_POLICY,
    seed: int = 0,
    chat: bool = False,
) -> Any:
    """A text field, a slider and the completions beside each other: unsteered, and steered with `plan.scaled(dose)`.

    Needs ipywidgets, which `pip install steerlab[notebooks]` brings. The same seed is used at every dose, so that only
    the dose differs. Nothing is generated without a prompt.

    Args:
        engine: what runs the model.
        plan: the plan at scale 1; with `sl.add(v, dose=1.0)` the slider's value is the dose.
        prompt: what stands in the text field at first.
        low: the slider's lower end.
        high: its upper end.
        step: its step.
        max_new_tokens: tokens of each completion at most.
        policy: the sampling policy.
        seed: of the draws.
        chat: take the prompt as a user turn of a chat.

    Returns:
        The widget, with `.prompt`, `.dose` and `.shown`.

    Raises:
        BackendMissingError: without ipywidgets.
        InputError: for ends that are not in order.
    """
    try:
        import ipywidgets
    except ImportError as error:
        raise BackendMissingError("The slider needs ipywidgets: pip install 'steerlab[notebooks]'.") from error
    ends = check_number(low, "low"), check_number(high, "high")
    if not ends[0] < ends[1]:
        raise InputError(f"The slider's ends are in order, low < high, got {low} and {high}.")
    start = min(max(0.0, ends[0]), ends[1])
    options = {"max_new_tokens": check_integer(max_new_tokens, "max_new_tokens", least=1), "policy": policy}
    widgets: Any = ipywidgets
    wide = widgets.Layout(width="100%")
    text = widgets.Textarea(value=prompt, description="prompt", layout=wide, continuous_update=False)
    dose = widgets.FloatSlider(
        value=start, min=ends[0], max=ends[1], step=step, description="dose", layout=wide, continuous_update=False
    )
    shown = widgets.HTML()

    def complete(_: Any = None) -> None:
        if not text.value:
            shown.value = ""
            return
        plans = [None, plan.scaled(dose.value) if dose.value else None]
        made = [engine.generate([text.value], plan=one, seed=seed, chat=chat, **options) for one in plans]
        found = side_by_side(*made, names=["unsteered", f"dose {dose.value:g}"])
        shown.value = Face("", [found]).html()

    text.observe(complete, names="value")
    dose.observe(complete, names="value")
    complete()
    box = widgets.VBox([text, dose, shown])
    box.prompt, box.dose, box.shown = text, dose, shown
    return box
