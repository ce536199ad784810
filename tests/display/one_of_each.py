"""One of every result, measured on a model with a text of one's own in every prompt and name."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

import steerlab as sl
from steerlab.core.engine import Engine

EVIL = '<script>alert("x")</script> & <b title="y">'


def one_of_each(engine: Engine, folder: Path, text: str = EVIL) -> dict[str, Any]:
    """One of every result that has a face, by the name of its class.

    Args:
        engine: a `LensEngine`; results of other engines have the same classes.
        folder: where the runs go.
        text: stands in every prompt, target, completion's prompt and name.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # few draws, and pairs that are not held out: it is the looks that matter
        return _of_engine(engine, folder, text) | _of_experiment(engine, folder, text) | _of_sequences(engine, text)


def data(text: str) -> tuple[sl.ContrastPairs, sl.Targets, sl.Targets]:
    """Contrast pairs, targets, and held-out targets that share no prompt with them."""
    animals = ["cat", "dog", "bird", "fish"]
    pairs = sl.ContrastPairs.from_lists(
        [f"{text} the {animal} ran home" for animal in animals],
        [f"{text} the {animal} stood still" for animal in animals],
        [text, text, "other", "other"],
    )
    first, second = (
        sl.Targets.from_records(
            [
                {"prompt": f"{text} {article} {animal}", "target": f" {word} {text}", "label": label}
                for animal in animals
                for word, label in [("ran", 1), ("slept", -1)]
            ]
        )
        for article in ("the", "a")
    )
    return pairs, first, second


def _of_engine(engine: Engine, folder: Path, text: str) -> dict[str, Any]:
    pairs, targets, _ = data(text)
    vectors = _named(sl.extract(engine, pairs, layers=[0, 1]), text)
    vector = vectors[1]
    plan = sl.Plan(
        sl.add(vector, dose=0.4),
        sl.ablate(vectors[0], where=sl.where.span(text[:1], missing="skip") | sl.where.last_prompt()),
    )
    prompts = [f"{text} the cat", f"{text} a dog"]
    generations = engine.generate(prompts, plan=plan, n=2, max_new_tokens=6)
    scores = engine.score(prompts, [[f" ran {text}"], [f" sat {text}"]], plan=plan)
    shown = [
        engine,
        engine.info,
        generations,
        generations[0],
        scores,
        scores[0],
        engine.capture(prompts, layers=[0, 1], plan=plan),
        generations.receipts,
        generations.receipts[0],
        pairs,
        targets,
        vector,
        vectors,
        plan,
        sl.explain(plan, prompts[0], engine),
        vectors.diagnostics(pairs),
        sl.perplexity(engine, f"{text} the cat ran home", plan=plan),
        sl.divergence(engine, engine, f"{text} the cat ran home", plan_a=plan),
        sl.show_tokens(engine, prompts, plan=plan),
        sl.rank_heads(engine, pairs, layers=[0, 1], folds=2),
        *_features(engine, prompts, folder),
        *_judged(engine, text),
    ]
    return {type(one).__name__: one for one in shown}


def _judged(engine: Engine, text: str) -> list[Any]:
    judge = sl.judge(engine, f"{text} {{text}} Rating:")
    compared = sl.judge(engine, f"{text} {{a}} {{b}} Better:", {"1": 1, "2": 0}).compare([text], ["other"])
    return [judge, judge.rate([text, "other"]), compared, judge.agreement([text, "other"], labels=["0", "1"])]


def _features(engine: Engine, prompts: list[str], folder: Path) -> list[Any]:
    rng = np.random.default_rng(0)
    shapes = {"W_enc": (engine.info.d_model, 8), "W_dec": (8, engine.info.d_model), "b_enc": 8, "threshold": 8}
    path = folder / "params.npz"
    np.savez(path, **{name: rng.normal(size=shape) for name, shape in shapes.items()})
    sae = sl.import_sae(path, hook_point="blocks.1.hook_resid_post", model="a model")
    return [sae, sae.activations(engine, prompts, [1, 5])]


def _named(vectors: sl.VectorSet, text: str) -> sl.VectorSet:
    from dataclasses import replace

    made = tuple(replace(v, card=replace(v.card, name=text, notes=text)) for v in vectors.values())
    return replace(vectors, by_layer=made)


def _of_experiment(engine: Engine, folder: Path, text: str) -> dict[str, Any]:
    pairs, targets, held_out = data(text)
    exp = sl.Experiment("one-of-each", engine, root=folder)
    check = exp.selfcheck(allow_failure=True)
    vectors = _named(exp.extract(pairs, layers=[0, 1]), text)
    plan = sl.Plan(sl.add(vectors[1], dose=1.0))
    planned = exp.preregister(text, plan, targets, [-0.2, 0, 0.2])
    effect = exp.effect(
        plan,
        targets,
        [-0.2, 0, 0.2],
        controls=sl.Controls(random=3, shuffled=2),
        pairs=pairs,
        neutral=[f"{text} a text"],
    )
    beside = exp.baselines(effect, sl.prompting([text]), ratios=1.01)
    chosen = exp.select(vectors, [0.1, 0.2], targets, texts=[f"{text} a text"])
    confirmed = exp.confirm(chosen, held_out)
    other = sl.Plan(sl.add(vectors[0], dose=1.0))
    together = exp.interaction(plan, other, targets, [0, 0.2], [0, 0.2])
    moved = exp.transfer(plan, held_out, [0, 0.2])
    judge = sl.judge(engine, f"{text} {{text}} Rating:")
    exp.generate(plan, [f"{text} the cat"], doses=[0, 0.2], max_new_tokens=4, judge=judge)
    asked = [f"{text} {k}? (A) Yes (B) No" for k in range(6)]
    answers = {"answer_matching_behavior": " (A)", "answer_not_matching_behavior": " (B)"}
    items = sl.protocols.ChoiceItems.from_records([{"question": one, **answers} for one in asked])
    facts = [{"question": one, "mc2_targets": {f"{text} yes": 1, f"{text} no": 0}} for one in asked]
    questions = sl.protocols.TruthQuestions.from_records(facts)
    protocol = sl.protocols.caa(exp, {text: items}, layers=1, multipliers=[0, 1], held_out=0.5)
    same = exp.parity(plan, [f"{text} the cat"], against=engine, max_new_tokens=4)
    other_run = sl.Experiment("one-of-each-2", engine, root=folder, seed=1)
    other_run.effect(plan, targets, [0, 0.2], controls=sl.Controls(random=2), neutral=[f"{text} a text"])
    shown = [
        exp,
        exp.results,
        check,
        planned,
        effect,
        chosen,
        confirmed,
        together,
        moved,
        same,
        exp.results.judgements[0],
        beside,
        items,
        questions,
        protocol,
        exp.verify(n=0),
        sl.compare(exp, other_run),
    ]
    return {type(one).__name__: one for one in shown}


def _of_sequences(engine: Engine, text: str) -> dict[str, Any]:
    processor = sl.SequenceProcessor(engine, config=sl.GenerationConfig(max_new_tokens=5))
    sequences = processor.generate_batched([f"{text} the cat", f"{text} a dog"], G=2, seed=0)
    log_probs, diagnostics = processor.teacher_force_logprobs_with_diagnostics(sequences)
    pack = diagnostics.diagnostics[0][0]
    shown = [sequences, log_probs, diagnostics, pack, pack.steps, pack.sequence]
    return {type(one).__name__: one for one in shown}
