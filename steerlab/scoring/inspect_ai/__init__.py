r"""A steerlab engine as a model of inspect_ai, so that any of its tasks can be run steered.

From Python::

    from inspect_ai import eval
    from steerlab.scoring.inspect_ai import inspect_model

    logs = eval("task.py", model=[inspect_model(engine), inspect_model(engine, plan)])

From the command line, with inspect's own options::

    inspect eval task.py --model steerlab/smollm2-135m -M plan=plan.json
"""

from typing import TYPE_CHECKING, Any

from steerlab.core.engine import Engine
from steerlab.core.errors import BackendMissingError
from steerlab.steering.plan import Plan

if TYPE_CHECKING:
    from inspect_ai.model import GenerateConfig, Model  # pyright: ignore[reportMissingImports]

__all__ = ["inspect_model"]


def inspect_model(
    engine: Engine, plan: Plan | None = None, *, chat: bool = True, config: "GenerateConfig | None" = None
) -> "Model":
    """An engine under a plan, as a model that inspect's `eval`, solvers and scorers take.

    Requests that wait at the same time and ask for the same settings run in one batch. Every output has in `metadata`
    the seed that it was drawn with, the plan's hash, and how many tokens were edited.

    Args:
        engine: any engine; it stays open when the model is closed.
        plan: what steers every request; None leaves the model as it is. The model's name in logs and caches is that of
            the engine's model, and for a plan `+` and the plan's hash.
        chat: whether messages go through the model's chat template; without, a request is one user's message, taken as
            plain text.
        config: settings of generation, as inspect's own models take them.

    Raises:
        BackendMissingError: without inspect_ai.
        InputError: by the model's `generate`, for settings that an engine does not have, tools, or content that is no
            text.

    Examples:
        >>> model = inspect_model(engine, plan)  # doctest: +SKIP
        >>> logs = inspect_ai.eval("task.py", model=model)  # doctest: +SKIP
    """
    try:
        from inspect_ai.model import GenerateConfig, Model  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise BackendMissingError('This adapter needs inspect_ai: pip install "steerlab[inspect]".') from error
    from steerlab.scoring.inspect_ai._entry import steerlab as provider
    from steerlab.scoring.inspect_ai._provider import Running

    config = config or GenerateConfig()
    make: Any = provider
    api = make(model_name=engine.info.name, config=config, running=Running(engine, plan), chat=chat)
    stated = {"running": type(engine).__name__, "chat": chat, "weights_hash": engine.info.weights_hash}
    model = Model(api, config, stated)
    api.qualified_model_name = str(model)
    return model
