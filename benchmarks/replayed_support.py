"""Ratios of a scorer's log q to the sampler's in half precision: on recomputed and on replayed supports.

    python benchmarks/replayed_support.py --out replayed_support.json
    python benchmarks/replayed_support.py --device cpu --shape small --prompts 4 --samples 2 --tokens 24 --sharpness 2

A random Llama in bfloat16 draws under T = 0.7, top_p = 0.95 through a SequenceProcessor: by vLLM (in this process, with
CUDA graphs on a GPU), by the TransformerLens engine where that is installed, and by the processor itself. Every token
carries the set that the sampler really drew it from. The draws are then scored by teacher forcing: by the processor in
bfloat16, by the processor with weights widened to float32 (its default), and by vLLM's own prefill.

`--model` takes a real model instead, by its directory or alias.

Three tables. Ratios at unchanged parameters, replayed, of two passes of one scorer: every one must be 1. The health of
the ratios to the sampler's log q. And, with Model Runner V2, whether the sets that our worker noted are those that
vLLM itself reports (`return_sampling_mask`). The exit status is 1 if a ratio of the first table is not 1, a set of the
last differs, or a part failed. `--sharpness` multiplies the final norm, as a random model's distributions are flat
otherwise.
"""

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from vllm_steering import SHAPES, make_plugin_visible

PROMPT_TOKENS = 16
COLUMNS = ("num_tokens", "share_outside", "num_impossible", "max_deviation", "num_sequences", "effective_sample_size")


def main() -> None:
    """Draws, scores and prints."""
    options = arguments()
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    os.environ["VLLM_PLUGINS"] = "steerlab"
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    make_plugin_visible(Path(tempfile.mkdtemp()))
    with timed("model"):
        path = given_model(options.model) if options.model else build_model(options)
    with timed("vLLM"):
        engine = start(path, options)
    with engine:
        result = Bench(path, engine, options).run()
        show(result)
    if options.out:
        Path(options.out).write_text(json.dumps(result, indent=2) + "\n")
    sys.exit(not holds(result))


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--model", help="a model directory or alias; by default a random one is made")
    parser.add_argument("--sharpness", type=float, default=4.0, help="factor of the final norm's weight")
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--top-p", type=float, default=0.95)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--samples", type=int, default=4, help="responses per prompt")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens of each")
    parser.add_argument("--rows", type=int, default=32, help="rows per pass")
    parser.add_argument("--kv-gib", type=int, default=8, help="vLLM's cache, on a GPU")
    parser.add_argument("--out", help="write the figures here as JSON")
    return parser.parse_args()


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Says how long a stage took."""
    start = time.perf_counter()
    yield
    print(f"{what}: {time.perf_counter() - start:.1f} s", file=sys.stderr, flush=True)


def given_model(name: str) -> Path:
    """Where a model lies."""
    from steerlab.models import resolve

    return Path(resolve(name).path)


def build_model(options: argparse.Namespace) -> Path:
    """Saves a random Llama in bfloat16, made on the device, with a small tokenizer that knows some of its tokens."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny_models import build_tiny_tokenizer

    directory = Path(tempfile.mkdtemp()) / "model"
    tokenizer = build_tiny_tokenizer(chat=False, context=SHAPES[options.shape]["max_position_embeddings"])
    ids = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    torch.manual_seed(0)
    with torch.device(options.device):
        model = LlamaForCausalLM(LlamaConfig(**SHAPES[options.shape], tie_word_embeddings=False, **ids))
    model.model.norm.weight.data *= options.sharpness
    model.to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def start(path: Path, options: argparse.Namespace) -> Any:
    """The vLLM engine, which steers nothing here."""
    from steerlab.engines.vllm import VLLMEngine

    rows = options.prompts * options.samples
    more = {"max_model_len": PROMPT_TOKENS + options.tokens + 16, "max_num_seqs": rows}
    if options.device == "cpu":
        more |= {"enforce_eager": True, "block_size": 32}
    else:
        more |= {"kv_cache_memory_bytes": options.kv_gib << 30, "gpu_memory_utilization": 0.2}
    return VLLMEngine(path, layers=[], dtype="bfloat16", **more)


class Bench:
    """One model under all samplers and scorers.

    Args:
        path: where it lies.
        engine: vLLM with it.
        options: the command line's.
    """

    def __init__(self, path: Path, engine: Any, options: argparse.Namespace) -> None:
        import torch
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from steerlab.sequences import SequenceProcessor

        self.engine, self.options = engine, options
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).to(options.device).eval()
        policy = {"temperature": options.temperature, "top_p": options.top_p}
        generation = {**policy, "max_new_tokens": options.tokens, "gen_batch_size": 128, "tf_batch_size": options.rows}
        precision = {"func_override": {"cast_params": False}}
        config = {"generation": generation, "precision": precision}
        self.processor = SequenceProcessor(model, AutoTokenizer.from_pretrained(path), config=config)
        widened = self.processor.config.changed(precision={"func_override": {"cast_params": True}})
        self.configs = {"processor, bfloat16": self.processor.config, "processor, widened to float32": widened}
        self.prompts = self.text_prompts() if options.model else self.id_prompts()

    def text_prompts(self) -> list[str]:
        """Beginnings of sentences, some of them several times."""
        from tests.tiny_models import SENTENCES

        found = [" ".join(text.split()[:n]) for n in range(2, 8) for text in SENTENCES]
        return [found[row % len(found)] for row in range(self.options.prompts)]

    def id_prompts(self) -> list[list[int]]:
        """Different prompts of one length."""
        size = self.processor.parts.d_vocab - 10
        rows = range(self.options.prompts)
        return [[(7919 * row + 31 * i + 5) % size + 5 for i in range(PROMPT_TOKENS)] for row in rows]

    def run(self) -> dict[str, Any]:
        """All figures; a part that fails is named, and takes no other's with it."""
        result: dict[str, Any] = {"machine": self.machine(), "options": vars(self.options), "failed": []}
        result |= {"draws": [], "exactly_one": [], "health": [], "masks": None}
        for sampler, make_engine in self.samplers().items():
            try:
                self.run_sampler(sampler, make_engine(), result)
            except Exception:
                traceback.print_exc()
                result["failed"].append(sampler)
        return result

    def run_sampler(self, sampler: str, engine: Any, result: dict[str, Any]) -> None:
        """The figures of one sampler."""
        with timed(f"{sampler} draws"), own_masks(engine) as masks:
            drawn = self.processor.generate_batched(
                self.prompts, self.options.samples, seed=0, stop=(), engine=engine, with_support=True
            )
        with timed(f"{sampler} passes"):
            result["draws"].append({"sampler": sampler, **self.described(drawn)})
            result["exactly_one"] += self.repeated(sampler, drawn)
            result["health"] += self.health(sampler, drawn)
        if sampler == "vLLM":
            with timed("vLLM scores"):
                self.scored_by_vllm(drawn, result)
            result["masks"] = compared(masks, drawn)

    def machine(self) -> dict[str, Any]:
        """What ran."""
        import torch
        import transformers
        import vllm

        config = self.engine.llm.llm_engine.vllm_config
        return {
            "card": torch.cuda.get_device_name() if self.options.device == "cuda" else "CPU",
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "vllm": vllm.__version__,
            "model_runner": 2 if config.use_v2_model_runner else 1,
            "cuda_graphs": str(config.compilation_config.cudagraph_mode),
        }

    def samplers(self) -> dict[str, Callable[[], Any]]:
        """What makes the engine of each that is installed."""
        import steerlab as sl

        found: dict[str, Callable[[], Any]] = {"vLLM": lambda: self.engine, "lens": lambda: sl.load(self.processor)}
        if importlib.util.find_spec("transformer_lens") is None:
            print("TransformerLens is not installed: its engine is left out.", file=sys.stderr)
            del found["lens"]
        return found | {"processor": lambda: None}

    def described(self, drawn: Any) -> dict[str, Any]:
        """How many tokens were drawn, and from what."""
        _, found = self.processor.teacher_force_logprobs_with_diagnostics(drawn, support="replayed")
        masses = np.concatenate([pack.steps.head_mass for row in found.diagnostics for pack in row])
        supports = [sets for row in drawn.supports for sets in row]
        sizes = np.concatenate([sets.sizes for sets in supports])
        return {
            "tokens": len(sizes),
            "mean_kept_mass": float(masses.mean()),
            "median_support": float(np.median(sizes)),
            "largest_support": int(sizes.max()),
            "bytes_per_token": sum(sets.nbytes for sets in supports) / len(sizes),
        }

    def repeated(self, sampler: str, drawn: Any) -> list[dict[str, Any]]:
        """Ratios of two passes of the processor at unchanged parameters, replayed."""
        n_rows = min(self.options.rows, self.options.prompts * self.options.samples)
        few = drawn.select([divmod(row, self.options.samples) for row in range(n_rows)])
        found = []
        for name, sequences, with_grad in (
            ("without gradients, twice", drawn, False),
            ("without and with gradients", few, True),
        ):
            old = self.processor.teacher_force_logprobs(sequences, support="replayed")
            new = self.processor.teacher_force_logprobs(sequences, with_grad, support="replayed")
            ratios = np.exp(flat(new.token_logqs) - flat(old.token_logqs))
            found.append({"sampler": sampler, "scorer": f"processor {name}", **exactness(ratios)})
        return found

    def health(self, sampler: str, drawn: Any) -> list[dict[str, Any]]:
        """Ratios to the sampler's log q, by the processor in either precision."""
        before, found = self.processor.config, []
        for scorer, config in self.configs.items():
            self.processor.config = config
            health = self.processor.ratio_health(drawn)
            found += health_rows(sampler, scorer, health)
        self.processor.config = before
        return found

    def scored_by_vllm(self, drawn: Any, result: dict[str, Any]) -> None:
        """The same with vLLM's prefill as the scorer, whose whole distributions are read."""
        from steerlab.sequences import LogprobResults, RatioHealth

        passes = [self.vllm_pass(drawn) for _ in range(2)]
        ratios = np.exp(flat(passes[1]["replayed"]) - flat(passes[0]["replayed"]))
        result["exactly_one"].append({"sampler": "vLLM", "scorer": "vLLM's prefill, twice", **exactness(ratios)})
        template = self.processor.teacher_force_logprobs(drawn, support="replayed")

        def scored(support: str) -> LogprobResults:
            flips = passes[0]["flips"] if support == "replayed" else None
            return replace(template, token_logqs=passes[0][support], support=support, support_flips=flips)

        health = RatioHealth.of(scored("recomputed"), scored("replayed"), drawn)
        result["health"] += health_rows("vLLM", "vLLM's prefill, bfloat16", health)

    def vllm_pass(self, drawn: Any) -> dict[str, Any]:
        """Log q on both kinds of sets and where these differ, `[B][G]`."""
        from steerlab.measures.quantities import LogDistribution

        self.engine.llm.reset_prefix_cache()
        found: dict[str, Any] = {"recomputed": [], "replayed": [], "flips": []}
        for b in range(drawn.n_prompts):
            targets = [drawn.response_ids(b, g) for g in range(drawn.n_samples)]
            rows = self.engine.measure([drawn.prompt_ids(b)], [targets], {"log_p": LogDistribution()})
            parts = [
                self.on_both(row["log_p"], ids, sets)
                for row, ids, sets in zip(rows, targets, drawn.supports[b], strict=True)
            ]
            for name, values in zip(found, zip(*parts, strict=True), strict=True):
                found[name].append(list(values))
        return found

    def on_both(self, log_p: np.ndarray, ids: list[int], sets: Any) -> tuple[Any, Any, np.ndarray]:
        """Log q of some steps on the nuclei of these distributions and on given sets, and where the sets differ."""
        import torch

        from steerlab.measures._supports import masks_of, replayed_steps
        from steerlab.measures.nucleus import nucleus
        from steerlab.measures.steps import policy_steps

        policy, device = self.processor.config.generation.policy, self.options.device
        logits, tokens = torch.from_numpy(log_p).to(device), torch.tensor(ids, device=device)
        inside = masks_of(sets, device)
        flips = (nucleus(logits, policy) != inside).any(dim=-1)
        steps = policy_steps(logits, tokens, policy), replayed_steps(logits, tokens, policy, inside)
        return (*(one.log_qs.cpu() for one in steps), flips.cpu().numpy())


@contextmanager
def own_masks(engine: Any) -> Iterator[dict[int, list[list[int]]] | None]:
    """Lets vLLM itself report the sets too, as `return_sampling_mask` does: by row, the ids of each step.

    That argument asks for a top_k and for normalised log-probs, so it is switched on in the running engine.
    """
    if engine is None or not hasattr(engine, "llm"):
        yield None
        return
    from steerlab.engines.vllm._client.generating import GenerationCall

    if not engine.llm.llm_engine.vllm_config.use_v2_model_runner:
        print("vLLM runs Model Runner V1: its own masks are left out.", file=sys.stderr)
        yield None
        return
    core = engine.llm.llm_engine.engine_core.engine_core
    switched = [core.scheduler, core.model_executor.driver_worker.worker.model_runner.sampler]
    found: dict[int, list[list[int]]] = {}
    original = GenerationCall.completion

    def completion(self: Any, request: Any, outcome: Any) -> Any:
        found[request.row_index] = getattr(outcome.output.outputs[0].sampling_mask, "token_ids", [])
        return original(self, request, outcome)

    for one in switched:
        one.return_sampling_mask = True
    GenerationCall.completion = completion
    try:
        yield found
    finally:
        GenerationCall.completion = original
        for one in switched:
            one.return_sampling_mask = False


def compared(masks: dict[int, list[list[int]]] | None, drawn: Any) -> dict[str, int] | None:
    """How many of vLLM's own sets are those of our worker."""
    from steerlab.core.token_sets import TokenSets

    if masks is None:
        return None
    same = 0
    for row, sets in enumerate([sets for group in drawn.supports for sets in group]):
        if len(masks[row]) == len(sets):
            same += int((TokenSets.of(masks[row], sets.d_vocab).masks() == sets.masks()).all(axis=1).sum())
    return {"tokens": sum(map(sum, drawn.gen_lens)), "same_set": same}


def flat(nested: Any) -> np.ndarray:
    """Nested tensors one after the other, float64."""
    return np.concatenate([values.detach().cpu().double().numpy() for row in nested for values in row])


def exactness(ratios: np.ndarray) -> dict[str, Any]:
    """How many ratios are exactly 1."""
    return {"tokens": len(ratios), "not_one": int((ratios != 1).sum()), "largest": float(np.abs(ratios - 1).max())}


def health_rows(sampler: str, scorer: str, health: Any) -> list[dict[str, Any]]:
    """Two rows, recomputed and replayed."""
    return [
        {"sampler": sampler, "scorer": scorer, "num_flipped": health.num_flipped, **vars(summary)}
        for summary in (health.recomputed, health.replayed)
    ]


def holds(result: dict[str, Any]) -> bool:
    """Whether all ran, every repeated ratio is 1, and every set the one that vLLM reports."""
    masks = result["masks"]
    same = masks is None or masks["same_set"] == masks["tokens"]
    return same and not result["failed"] and not any(row["not_one"] for row in result["exactly_one"])


def show(result: dict[str, Any]) -> None:
    """Prints the tables."""
    print(json.dumps(result["machine"]))
    table("Draws", result["draws"])
    table("Two passes at unchanged parameters, replayed", result["exactly_one"])
    table("Ratios to the sampler's log q", result["health"], ["sampler", "scorer", "support", "num_flipped", *COLUMNS])
    if result["masks"] is not None:
        table("Sets of our worker, and of these the ones that vLLM reports too", [result["masks"]])
    if result["failed"]:
        print(f"\nFAILED: {', '.join(result['failed'])}")


def table(title: str, rows: list[dict[str, Any]], columns: list[str] | None = None) -> None:
    """A Markdown table."""
    if not rows:
        return
    columns = columns or list(rows[0])
    print(f"\n{title}\n\n| {' | '.join(columns)} |\n|{' --- |' * len(columns)}")
    for row in rows:
        print("| " + " | ".join(f"{row[c]:.4g}" if isinstance(row[c], float) else str(row[c]) for c in columns) + " |")


if __name__ == "__main__":
    main()
