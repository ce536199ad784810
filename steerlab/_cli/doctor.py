"""`steerlab doctor`: what is known of a model's family, and what works on the model itself."""

from dataclasses import asdict
from typing import Annotated, Any

import typer

from steerlab._cli.console import say, show_json, show_table
from steerlab._cli.options import DEFAULT_MODEL, JsonOption


def doctor(
    model: Annotated[str, typer.Argument(help="An alias, a model directory or a hub id.")] = DEFAULT_MODEL,
    vllm: Annotated[bool, typer.Option("--vllm", help="Start vLLM too, which takes a minute.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Say what is known of a model's family, and compare the engines on the model itself."""
    from steerlab._cli.loading import quiet_transformers
    from steerlab.engines._doctor import examine
    from steerlab.models.families import ENGINES, FEATURES, families

    name = _family(model)
    family = families().get(name)
    with quiet_transformers():
        findings = examine(model, vllm=vllm)
    if as_json:
        known: Any = None
        if family is not None:
            known = {e: {f: asdict(family.cells[e, f]) for f in FEATURES} for e in ENGINES}
        show_json({"model": model, "family": name, "table": known, "findings": [asdict(one) for one in findings]})
        return
    if family is None:
        say(f"The family {name!r} is not in the table of families; what follows is about this model.")
    else:
        say(f"{family.label} ({name})")
        show_table(["engine", *FEATURES], [[e, *(str(family.cells[e, f]) for f in FEATURES)] for e in ENGINES])
        for reason in family.reasons():
            say(f"  no on {reason}")
    say()
    rows = [[one.engine, one.what, one.state, one.detail] for one in findings]
    show_table(["engine", "compared", "result", "detail"], rows, text_columns=4)


def _family(model: str) -> str:
    """Its `model_type`.

    Raises:
        ModelNotFoundError: if there is no such model, or its configuration cannot be read.
    """
    from transformers import AutoConfig

    from steerlab.core.errors import ModelNotFoundError
    from steerlab.models import resolve

    path = resolve(model).path
    try:
        return AutoConfig.from_pretrained(str(path)).get_text_config().model_type
    except (OSError, ValueError) as error:
        raise ModelNotFoundError(f"The configuration in {path} cannot be read: {error}") from error
