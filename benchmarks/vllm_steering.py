"""Steering inside vLLM: what it costs, and whether it is right, on a random Llama.

    python benchmarks/vllm_steering.py --check              # correctness on a small float32 model, any device
    python benchmarks/vllm_steering.py                      # throughput, 1B Llama shape, on a GPU
    python benchmarks/vllm_steering.py --shape 8b --requests 128 --one-layer
    python benchmarks/vllm_steering.py --tensor-parallel 2
    python benchmarks/vllm_steering.py --form add set rotate --site resid_post attn_out --one-layer

Three engines are alive at once on the same device: stock vLLM, one wired layer, all layers wired; with `--hotwire` (and
`pip install hotwire-vllm`) a fourth, that plugin's, which adds vectors at one layer. Every further site has an engine
of its own, on which the first of the forms runs; all forms run at the first site. Each round runs the same requests
through each of them in turn, every time with an empty prefix cache, so a slow phase of the host falls on all of them.
The table gives the median tokens a second, the median over rounds of the ratio to stock vLLM in the same round, and the
ratio of the ninth deciles, which says more on a host whose other work slows single rounds down.
`--profile` prints where the host's time goes in one steered call.
"""

import argparse
import contextlib
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from importlib.metadata import entry_points
from itertools import starmap
from pathlib import Path
from typing import Any

SHAPES = {
    "1b": {
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
    "8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
    "small": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 1024,
        "initializer_range": 0.1,
    },
}
BY_VLLM = ("8b",)
"""Shapes whose weights are not written to a disk: each engine makes its own."""

FORMS = ("add", "set", "clamp", "feature", "rotate", "keep", "schedule", "condition")
STOCK, UNSTEERED, DOSE_0 = "stock", "unsteered", "dose 0"
TIE = 0.02
"""Nats; TF32, in which vLLM's attention multiplies float32 on a GPU, moves the logits of the small model by as much."""


def main() -> None:
    """Runs the check, or the rounds."""
    options = arguments()
    # a sampler that may have to be built first, and here decodes greedily anyway
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    make_plugin_visible(Path(tempfile.mkdtemp()))
    options.model = options.model or str(build_model("small" if options.check else options.shape))
    if options.check:
        check(options)
    else:
        compare(options)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="correctness only")
    parser.add_argument("--profile", action="store_true", help="profile one steered call, all layers wired")
    parser.add_argument("--hotwire", action="store_true", help="the plugin hotwire-vllm in the same rounds")
    parser.add_argument("--one-layer", action="store_true", help="without the engine whose every layer is wired")
    parser.add_argument("--form", nargs="+", default=["add"], choices=FORMS, help="what every request's edits are")
    parser.add_argument("--site", nargs="+", default=["resid_post"], help="where they are; each has an engine")
    parser.add_argument("--conditions", type=int, default=2, help="max_conditions of the engines")
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--model", help="a model directory; by default a random one is made")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=32, help="tokens per prompt")
    parser.add_argument("--tokens", type=int, default=256, help="new tokens per request")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--eager", action="store_true", help="check without compilation and CUDA graphs")
    parser.add_argument("--kv-gib", type=int, default=0, help="cache of each engine, where others use the card too")
    parser.add_argument("--memory", type=float, default=0.25, help="share of the device's memory for each engine")
    return parser.parse_args()


def make_plugin_visible(directory: Path) -> None:
    """Lets vLLM's processes find the plugin also where steerlab is on the path but not installed."""
    if any(point.name == "steerlab" for point in entry_points(group="vllm.general_plugins")):
        return
    os.environ["PYTHONPATH"] = python_path_with_plugin(directory, "steerlab", "steerlab.engines.vllm._plugin")
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)[:2]


def python_path_with_plugin(directory: Path, name: str, module: str) -> str:
    """A PYTHONPATH on which vLLM finds a module's `register` as a plugin, stated by metadata written to a directory."""
    info = directory / f"{name}_plugin-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-plugin\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{name} = {module}:register\n")
    paths = [str(directory), str(Path(__file__).resolve().parent.parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(filter(None, paths))


def build_model(shape: str) -> Path:
    """Saves a random Llama without tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = Path(tempfile.mkdtemp()) / "model"
    torch.manual_seed(0)
    dtype = torch.float32 if shape == "small" else torch.bfloat16
    config = LlamaConfig(
        **SHAPES[shape], tie_word_embeddings=False, bos_token_id=None, eos_token_id=None, pad_token_id=None
    )
    if shape in BY_VLLM:
        config.architectures = ["LlamaForCausalLM"]
        config.save_pretrained(directory)
        save_file({}, directory / "model.safetensors")
        return directory
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = LlamaForCausalLM(config).to(dtype)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return directory


# --- throughput ---------------------------------------------------------------------------------------------------


class Arm:
    """One way to run the requests on one engine.

    Args:
        engine: what it runs on, as the table names it.
        name: how.
        run: runs all requests; returns their tokens.
        reset: empties the prefix cache.
    """

    def __init__(self, engine, name, run, reset):
        self.engine, self.name, self.run, self.reset = engine, name, run, reset
        self.rates: list[float] = []
        self.tokens: list = []

    def round(self, work: int) -> None:
        """Runs once against the clock."""
        self.reset()
        start = time.perf_counter()
        found = self.run()
        self.rates.append(work / (time.perf_counter() - start))
        self.tokens.append(found)


def compare(options: argparse.Namespace) -> None:
    """Throughput of all arms, in rounds."""
    with contextlib.ExitStack() as stack:
        arms = [stock_arm(options, stack)]
        if options.hotwire:
            arms += hotwire_arms(options, stack)
        n_layers = SHAPES[options.shape]["num_hidden_layers"]
        first, *others = options.site
        arms += steered_arms("one layer", [n_layers // 2], first, options.form, options, stack)
        for site in others:
            arms += steered_arms(f"one layer, {site}", [n_layers // 2], site, options.form[:1], options, stack)
        if not options.one_layer:
            arms += steered_arms("all layers", list(range(n_layers)), first, options.form, options, stack)
        for arm in arms:  # warm-up: kernels, host paths, and vectors on their way to the workers
            arm.reset()
            arm.run()
        for number in range(options.rounds):
            for arm in arms:
                arm.round(options.requests * options.tokens)
            rates = "; ".join(f"{arm.engine}, {arm.name} {arm.rates[-1]:,.0f}" for arm in arms)
            print(f"round {number + 1} of {options.rounds}, tokens a second: {rates}", flush=True)
        if options.profile:
            profile(arms[-1])
    report(arms, options)


def stock_arm(options: argparse.Namespace, stack: contextlib.ExitStack) -> Arm:
    """The work on vLLM as it comes."""
    llm = start_llm(options, "", stack)
    return Arm(STOCK, UNSTEERED, native(llm, options, None), llm.reset_prefix_cache)


def hotwire_arms(options: argparse.Namespace, stack: contextlib.ExitStack) -> list[Arm]:
    """The work on hotwire-vllm: a vector of its own for every request, added at the middle layer; none if it fails."""
    import torch

    directory, shape = Path(tempfile.mkdtemp()), SHAPES[options.shape]
    generator = torch.Generator().manual_seed(0)
    for row in range(options.requests):
        torch.save(torch.randn(shape["hidden_size"], generator=generator), directory / f"{row}.pt")
    os.environ |= {"HOTWIRE_VECTORS": str(directory), "HOTWIRE_SLOTS": str(options.requests)}
    try:
        llm = start_llm(options, "hotwire", stack)
    except Exception as error:
        print(f"hotwire-vllm did not start: {error}")
        return []
    layer = shape["num_hidden_layers"] // 2
    specs = [json.dumps({"id": str(row), "layer": layer, "scale": 0.5}) for row in range(options.requests)]
    return [
        Arm("hotwire, one layer", name, native(llm, options, given), llm.reset_prefix_cache)
        for name, given in ((UNSTEERED, None), ("steered", specs))
    ]


def start_llm(options: argparse.Namespace, plugin: str, stack: contextlib.ExitStack) -> Any:
    """VLLM with one plugin, or none."""
    from vllm import LLM

    os.environ["VLLM_PLUGINS"] = plugin
    llm = LLM(options.model, generation_config="vllm", **engine_arguments(options))
    stack.callback(llm.llm_engine.engine_core.shutdown)
    return llm


def native(llm: Any, options: argparse.Namespace, hotwire: list[str] | None) -> Any:
    """A function that runs the requests through vLLM's own `generate` and returns their tokens."""
    from vllm import SamplingParams

    inputs: Any = [{"prompt_token_ids": prompt} for prompt in make_prompts(options)]
    params = [
        SamplingParams(
            temperature=0.0,
            max_tokens=options.tokens,
            ignore_eos=True,
            detokenize=False,
            extra_args=None if hotwire is None else {"hotwire": hotwire[row]},
        )
        for row in range(options.requests)
    ]
    return lambda: [list(row.outputs[0].token_ids) for row in llm.generate(inputs, params, use_tqdm=False)]


def steered_arms(
    engine_name: str,
    layers: list[int],
    site: str,
    forms: list[str],
    options: argparse.Namespace,
    stack: contextlib.ExitStack,
) -> list[Arm]:
    """The work on an engine of ours: without a plan, with the first form at dose 0, and with each form."""
    from steerlab.engines.vllm import VLLMEngine

    os.environ["VLLM_PLUGINS"] = "steerlab"
    engine = stack.enter_context(
        VLLMEngine(
            options.model,
            layers=layers,
            sites=[site],
            max_conditions=options.conditions,
            capture_tokens=512,
            **engine_arguments(options),
        )
    )
    width = SHAPES[options.shape]["hidden_size"]
    plans = {form: make_plans(form, layers, site, width, options.requests) for form in forms}
    given = {UNSTEERED: None, DOSE_0: [plan.scaled(0.0) for plan in plans[forms[0]]], **plans}
    run, prompts = generator(engine, options), make_prompts(options)
    return [
        Arm(engine_name, name, lambda plan=plan: run(prompts, plan), engine.llm.reset_prefix_cache)
        for name, plan in given.items()
    ]


def generator(engine, options):
    """A function that generates and returns token ids."""
    from steerlab.core.policy import SamplingPolicy

    def run(prompts, plan):
        rows = engine.generate(
            prompts, plan=plan, policy=SamplingPolicy.greedy(), max_new_tokens=options.tokens, log_probs=False
        )
        return [row.token_ids for row in rows]

    return run


def engine_arguments(options: argparse.Namespace) -> dict:
    """What all engines are started with."""
    return {
        "dtype": "bfloat16",
        "skip_tokenizer_init": True,
        "max_model_len": options.prompt + options.tokens + 8,
        "max_num_seqs": options.requests,
        "tensor_parallel_size": options.tensor_parallel,
        "gpu_memory_utilization": options.memory,
        **({"load_format": "dummy"} if options.shape in BY_VLLM else {}),
        **({"kv_cache_memory_bytes": options.kv_gib << 30} if options.kv_gib else {}),
    }


def profile(arm: Arm) -> None:
    """Where the host's time goes in one call; the engine itself runs in processes of its own."""
    arm.reset()
    with cProfile.Profile() as profiler:
        arm.run()
    for order in ("cumulative", "tottime"):
        pstats.Stats(profiler).sort_stats(order).print_stats(30)


def make_prompts(options: argparse.Namespace) -> list[list[int]]:
    """Different prompts of one length."""
    vocabulary = SHAPES[options.shape]["vocab_size"]
    return [
        [(7919 * row + 31 * i + 5) % (vocabulary - 10) + 5 for i in range(options.prompt)]
        for row in range(options.requests)
    ]


def make_plans(form: str, layers: list[int], site: str, width: int, count: int) -> list:
    """A plan per request: an edit of one form along another vector at every layer."""
    import torch

    import steerlab as sl
    from steerlab.steering.operators import Edit

    generator = torch.Generator().manual_seed(0)

    def v(layer: int):
        return sl.SteeringVector.from_tensor(torch.randn(width, generator=generator), layer=layer, site=site)

    makers = {
        "add": lambda layer: sl.add(v(layer), coef=0.5),
        "set": lambda layer: sl.set(v(layer), 0.5),
        "clamp": lambda layer: sl.clamp(v(layer), -0.5, 0.5),
        "feature": lambda layer: Edit(feature_operator(), v(layer), sl.where.all()),
        "rotate": lambda layer: sl.rotate(v(layer), v(layer), angle=0.2),
        "keep": lambda layer: sl.add(v(layer), coef=0.5, norm="keep"),
        "schedule": lambda layer: sl.add(v(layer), coef=0.5, schedule=sl.schedule.decay(64)),
        "condition": lambda layer: sl.add(v(layer), coef=0.5, when=when),
    }
    plans = []
    for _ in range(count):
        when = sl.when(v(layers[0]), above=0.0)
        plans.append(sl.Plan(*map(makers[form], layers)))
    return plans


def feature_operator():
    """A user's own operator, of a feature's form: sets what is read along one direction by writing along another."""
    from steerlab.steering.operators import Gate, Operator, Term

    class Feature(Operator):
        """Acts where the feature is active."""

        unit = "coef"

        def terms(self, along):
            return (Term(along.unit, Gate(3.0, slope=-1.0, threshold=0.0), along.values.roll(1) / 10),)

        def to_json(self):
            return {"kind": "feature"}

    return Feature()


def fast_rate(arm: Arm) -> float:
    """The ninth decile of an arm's tokens a second."""
    return statistics.quantiles(arm.rates, n=10, method="inclusive")[-1]


def report(arms: list[Arm], options: argparse.Namespace) -> None:
    """The tables: throughput, and what became of the tokens."""
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    print(f"\n{card}, TP={options.tensor_parallel}, {options.requests} × {options.tokens} tokens, bfloat16, ", end="")
    print(f"{options.rounds} rounds\n")
    print("| engine | requests | tok/s | of stock | least | most | ninth deciles |\n|" + 7 * " --- |")
    for arm in arms:
        ratios = [rate / stock for rate, stock in zip(arm.rates, arms[0].rates, strict=True)]
        figures = [statistics.median(ratios), min(ratios), max(ratios), fast_rate(arm) / fast_rate(arms[0])]
        row = [arm.engine, arm.name, f"{statistics.median(arm.rates):,.0f}", *(f"{figure:.3f}" for figure in figures)]
        print(f"| {' | '.join(row)} |")
    print("\nRows whose tokens are all the same, round by round (another split of the same work into batches can")
    print("change tokens in bfloat16: the first line of an engine says how often it does), and after how many tokens,")
    print("in the median, the others part (steering shows at the first):\n")
    print(f"| engine | compared | rows the same of {options.requests} | the others part after |")
    print("| --- | --- | --- | --- |")
    for arm in arms[1:]:
        plain = next(other for other in arms if other.engine == arm.engine)
        name, pairs = f"{arm.name}, {plain.name}", zip(arm.tokens, plain.tokens, strict=True)
        if arm is plain:
            name, pairs = f"{arm.name}, the round before", zip(arm.tokens[1:], arm.tokens, strict=False)
        found = list(starmap(agreement, pairs))
        same, parted = ", ".join(str(n) for n, _ in found), ", ".join(after for _, after in found)
        print(f"| {arm.engine} | {name} | {same} | {parted} |")


def agreement(ours: list, theirs: list) -> tuple[int, str]:
    """How many rows have the same tokens, and after how many tokens the others part, in the median."""
    rows = list(zip(ours, theirs, strict=True))
    parted = [next(i for i, (a, b) in enumerate(zip(x, y, strict=True)) if a != b) for x, y in rows if x != y]
    return len(rows) - len(parted), f"{statistics.median(parted):g}" if parted else "–"


# --- correctness --------------------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> None:
    """Compares with plain Hugging Face hooks: tokens, activations, receipts, and what the cache hands on."""
    import torch

    from steerlab.engines.vllm import VLLMEngine

    width, layers = SHAPES["small"]["hidden_size"], [1, 2, 3]
    plans = check_plans(width)
    prompts = [[(37 * row + 11 * i) % 500 for i in range(70 + 5 * (row % 8))] for row in range(len(plans))]
    with VLLMEngine(
        options.model,
        layers=layers,
        sites=["attn_out", "resid_mid", "mlp_out", "resid_post"],
        max_conditions=3,
        dtype="float32",
        skip_tokenizer_init=True,
        max_num_seqs=len(plans),
        tensor_parallel_size=options.tensor_parallel,
        gpu_memory_utilization=0.5,
        enforce_eager=options.eager,
    ) as engine:
        print("workers:", engine._running.workers)
        run = generator(engine, argparse.Namespace(tokens=24))
        mixed = run(prompts, plans)
        receipts = [[(edit.edited, edit.expected) for edit in receipt.edits] for receipt in engine.receipts]
        passed = [edit.condition_passed for receipt in engine.receipts for edit in receipt.edits]
        passed = [answer for answer in passed if answer is not None]
        alone = [run([prompt], [plan])[0] for prompt, plan in zip(prompts, plans, strict=True)]
        again = [run([prompt], [plan])[0] for prompt, plan in reversed(list(zip(prompts, plans, strict=True)))][::-1]
        plain = run(prompts, None)
        still = run(prompts, [None if plan is None else plan.scaled(0.0) for plan in plans])
        read = engine.capture(prompts, layers=layers, plan=plans)
    expected = [reference(options.model, p, plan, 24) for p, plan in zip(prompts, plans, strict=True)]
    unsteered = [reference(options.model, p, None, 24) for p in prompts]
    deviation = max(
        float((read.of(row, layer) - expected[row][1][layer]).abs().max() / expected[row][1][layer].abs().max())
        for row in range(len(plans))
        for layer in layers
    )
    # vLLM's attention kernels multiply float32 as TF32 on a GPU, whatever the precision of other products is set to
    bound = 1e-2 if torch.cuda.is_available() else 2e-3
    outcomes = {
        "a mixed batch equals the reference": all(starmap(follows, zip(mixed, expected, strict=True))),
        "every row alone too": alone == mixed,
        "in another order, with a warm cache, too": again == mixed,
        "unsteered rows are the model's own": all(starmap(follows, zip(plain, unsteered, strict=True))),
        "dose 0 keeps every token": all(starmap(follows, zip(still, unsteered, strict=True))),
        "steering changed something": sum(a != b for a, b in zip(mixed, plain, strict=True)) >= len(plans) // 2,
        f"activations equal the reference (relative deviation {deviation:.1e})": deviation < bound,
        f"conditions passed {passed}": passed == [True, False, True, True, False],
        f"receipts {receipts}": all(edited == wanted for row in receipts for edited, wanted in row),
    }
    for name, holds in outcomes.items():
        print("ok  " if holds else "FAIL", name)
    pairs = [*zip(mixed, expected, strict=True), *zip([*plain, *still], [*unsteered, *unsteered], strict=True)]
    n_same = sum(found == tokens for found, (tokens, *_) in pairs)
    print(f"{n_same} of {len(pairs)} rows equal the reference token by token, others up to a tie")
    print(torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU")
    raise SystemExit(0 if all(outcomes.values()) else 1)


def follows(found: list[int], expected: tuple[list[int], dict, list[float]]) -> bool:
    """Whether tokens are the reference's up to where its two best logits are closer than rounding keeps apart."""
    tokens, _, margins = expected
    differing = next((i for i, (a, b) in enumerate(zip(found, tokens, strict=True)) if a != b), None)
    return differing is None or margins[differing] < TIE


def check_plans(width: int) -> list:
    """Plans of every operator, option and site, and several kinds of position; five conditions, of known answers."""
    import torch

    import steerlab as sl
    from steerlab.steering.operators import Edit

    w = sl.where

    def v(layer: int, seed: int, site: str = "resid_post"):
        values = torch.randn(width, generator=torch.Generator().manual_seed(10 * layer + seed))
        return sl.SteeringVector.from_tensor(values, layer=layer, site=site)

    passes, fails = sl.when(v(1, 8), above=-1e9), sl.when(v(1, 9, "attn_out"), above=0.999, reading="cosine")
    read = sl.when(v(1, 8), below=1e9, read=w.index(0, 20, -1))
    edits = [
        [],
        [sl.add(v(1, 0), coef=1.0)],
        [sl.add(v(2, 1), coef=1.0, where=w.all()), sl.ablate(v(3, 1), where=w.all())],
        [sl.clamp(v(1, 2), -0.5, 0.5, where=w.all()), sl.add(v(1, 3), coef=1.0), sl.add(v(1, 4), coef=-1.0)],
        [sl.add(v(2, 5), coef=2.0, where=w.generated())],
        [],
        [sl.ablate(v(1, 6), where=w.prompt()), sl.add(v(3, 6), coef=2.0, where=w.index(0, -1))],
        [sl.add(v(1, 7), coef=3.0, where=w.generated(after=3, until=9))],
        [sl.rotate(v(1, 0), v(1, 1), angle=1.0, where=w.all())],
        [sl.set(v(2, 0), 2.0, norm="keep"), sl.add(v(2, 1), coef=1.0, norm="keep", where=w.all())],
        [sl.add(v(1, 2), coef=2.0, schedule=sl.schedule.decay(4.0))],
        [sl.rotate(v(2, 2), v(2, 3), angle=0.5, norm="keep", schedule=sl.schedule.linear(1.0, -1.0, over=8))],
        [Edit(feature_operator(), v(1, 4), w.all())],
        [sl.add(v(1, 5, "attn_out"), coef=0.5), sl.ablate(v(2, 5, "mlp_out"), where=w.all())],
        [
            sl.add(v(1, 6, "resid_mid"), coef=1.0, where=w.all()),
            sl.rotate(v(1, 6, "mlp_out"), v(1, 7, "mlp_out"), angle=1.0),
        ],
        [sl.add(v(1, 7), coef=2.0, when=passes)],
        [sl.add(v(2, 7), coef=2.0, when=fails)],
        [sl.add(v(2, 8), coef=2.0, when=passes | fails, norm="keep")],
        [sl.add(v(1, 8), coef=2.0, when=read), sl.add(v(2, 9), coef=2.0, when=passes & fails)],
    ]
    return [sl.Plan(*some) if some else None for some in edits]


def reference(model_path: str, prompt: list[int], plan, count: int) -> tuple[list[int], dict, list[float]]:
    """Greedy tokens, the prompt's streams and every token's lead over the next best, in nats.

    From Hugging Face, with the plan carried out by hooks, without a cache.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from steerlab.steering._run import PlanRun
    from steerlab.steering.plan import Plan
    from steerlab.steering.positions._rows import RowPositions

    if model_path not in _MODELS:
        _MODELS[model_path] = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    model, tokens, streams, margins = _MODELS[model_path], list(prompt), {}, []
    run = PlanRun(plan or Plan(), 1)

    def change(layer, site, given):
        stream = given[0] if isinstance(given, tuple) else given
        for point in run.hook_points:
            if (point.layer, point.site) == (layer, site):
                stream.copy_(run.edit(point, stream))
        if site == "resid_post" and len(tokens) == len(prompt):
            streams[layer] = stream[0].clone()

    handles = []
    for i, block in enumerate(model.model.layers):
        middle = block.post_attention_layernorm
        handles.append(middle.register_forward_pre_hook(lambda _, given, i=i: change(i, "resid_mid", given)))
        for module, site in ((block.self_attn, "attn_out"), (block.mlp, "mlp_out"), (block, "resid_post")):
            handles.append(module.register_forward_hook(lambda _, __, output, i=i, site=site: change(i, site, output)))
    try:
        with torch.no_grad():
            for _ in range(count):
                run.begin(RowPositions.of_rows([len(tokens)], [len(prompt)]))
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
                best = logits.topk(2)
                margins.append(float(best.values[0] - best.values[1]))
                tokens.append(int(best.indices[0]))
    finally:
        for handle in handles:
            handle.remove()
    return tokens[len(prompt) :], streams, margins


_MODELS: dict = {}


if __name__ == "__main__":
    main()
