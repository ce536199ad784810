"""`steerlab generate`: completions, steered or not."""

from typing import Annotated

import typer

import steerlab as sl
from steerlab._cli import options
from steerlab._cli.console import say, show_json
from steerlab._cli.loading import loaded, make_plan


def generate(
    prompt: Annotated[list[str], typer.Option(metavar="TEXT", help="Prompt; repeat for several.")],
    model: options.ModelOption = options.DEFAULT_MODEL,
    dtype: options.DtypeOption = options.Dtype.FLOAT32,
    vector: options.VectorOption = None,
    layer: options.LayerOption = None,
    dose: options.DoseOption = None,
    coef: options.CoefOption = None,
    where: options.WhereOption = options.Position.DEFAULT,
    max_new_tokens: Annotated[int, typer.Option(help="Tokens at most.")] = 64,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="1 keeps all.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 keeps all.")] = 0,
    min_p: Annotated[float, typer.Option(help="0 keeps all.")] = 0.0,
    n: Annotated[int, typer.Option("-n", help="Samples per prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the draws.")] = 0,
    chat: Annotated[bool, typer.Option("--chat", help="Take each prompt as a user's turn.")] = False,
    stop: Annotated[
        list[str] | None, typer.Option(metavar="TEXT", help="Stop before this string; repeatable.", show_default=False)
    ] = None,
    as_json: options.JsonOption = False,
) -> None:
    """Generate from prompts, steered or not."""
    policy = sl.SamplingPolicy(temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    plan = make_plan(vector, layer, dose, coef, where)
    with loaded(model, dtype) as engine:
        made = engine.generate(
            prompt,
            plan=plan,
            policy=policy,
            max_new_tokens=max_new_tokens,
            n=n,
            seed=seed,
            stop=tuple(stop or ()),
            chat=chat,
        )
    if as_json:
        show_json([{"prompt": prompt[row["prompt_index"]], **row} for row in made.to_frame().to_dict("records")])
        return
    for completion in made:
        if completion.sample_index == 0:
            say(prompt[completion.prompt_index], style="bold")
        label = f"  [{completion.sample_index + 1}, {completion.finish_reason}] " if n > 1 else "  "
        say(label + completion.text.replace("\n", "\n  "))
