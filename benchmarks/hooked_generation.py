"""Generation speed, side by side in one run: TransformerLens, Hugging Face, and steerlab's engines.

    python benchmarks/hooked_generation.py --model smollm2-135m --device cpu --batch 1 8
    python benchmarks/hooked_generation.py --model random-1b --device cuda --dtype bfloat16 --batch 1 16 --compiled
    python benchmarks/hooked_generation.py --model random-1b --device cuda --dtype bfloat16 --batch 16 --n-devices 2
    python benchmarks/hooked_generation.py --model random-70b --dtype bfloat16 --batch 1 16 --only-spread 2

Every variant generates the same number of tokens greedily, without EOS. The variants take turns, once per repeat, so
that a busy moment of the machine hits them all; figures are medians over repeats, without the first call, whose seconds
stand beside them: with everything that is compared, compiled and recorded before. `random-1b`, `-8b` and `-70b` are
Llamas with random weights, made in memory; all variants share the weights. With `--only-spread` the model is on several
GPUs only, and Hugging Face's generate runs on it with Accelerate's hooks.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import steerlab as sl
from steerlab.core._files import write_atomic

PROMPT_TOKENS = 32
BASE = "HF generate, dynamic cache"
SHAPES: dict[str, dict[str, Any]] = {
    "random-tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    },
    "random-1b": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "random-8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "random-70b": {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
}


def main() -> None:
    """Runs the benchmark and prints a table."""
    options = parse(sys.argv[1:])
    if options.threads:
        torch.set_num_threads(options.threads)
    bench = Bench(options)
    rows = [row for batch in options.batch for row in bench.measure(batch)]
    result = {"machine": machine(options.device), "options": vars(options), "rows": rows}
    print_table(result)
    if options.out:
        write_atomic(options.out, json.dumps(result, indent=2) + "\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes, or random-1b")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--n-devices", type=int, default=1, help="also run steerlab's default engine on this many GPUs")
    parser.add_argument("--only-spread", type=int, default=0, help="put the model on this many GPUs, and nowhere else")
    parser.add_argument("--compiled", action="store_true", help="also run the compiled variants")
    parser.add_argument("--skip-bridge", action="store_true", help="leave out the two slow bridge variants")
    parser.add_argument("--only", nargs="+", default=[""], help="run the variants whose names have one of these words")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads; 0 leaves torch's choice")
    parser.add_argument("--out", default=None, help="write the figures here as JSON")
    return parser.parse_args(arguments)


class Bench:
    """The models under test, loaded once."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.plain = plain_model(options, max(1, options.only_spread))
        self.plain.generation_config.eos_token_id = None
        self.engine = without_eos(self.plain, options.model)
        self.spread = None
        if options.n_devices > 1:
            self.spread = without_eos(plain_model(options, options.n_devices), options.model)
        layer, width = self.engine.info.n_layers // 2, self.engine.info.d_model
        self.vector = torch.randn(width, generator=torch.Generator().manual_seed(0))
        vector = sl.SteeringVector.from_tensor(self.vector, layer=layer)
        self.plan = sl.Plan(sl.add(vector, coef=1.0, where=sl.where.all()))
        self.hook_name = vector.hook_point.name

    def measure(self, batch: int) -> list[dict[str, Any]]:
        """Tokens per second of every variant at one batch size."""
        generator = torch.Generator().manual_seed(batch)
        ids = torch.randint(100, self.engine.info.d_vocab - 100, (batch, PROMPT_TOKENS), generator=generator)
        variants = self.variants(ids)
        times: dict[str, list[float]] = {name: [] for name in variants}
        for repeat in range(self.options.repeats + 1):
            for name, run in list(variants.items()):
                try:
                    seconds = timed(run, self.options.device)
                except Exception as error:  # one variant must not take the others' figures with it
                    print(f"batch {batch}: {name} failed and is left out: {error!r:.500}", file=sys.stderr, flush=True)
                    del variants[name], times[name]
                    continue
                print(f"batch {batch} repeat {repeat} {name}: {seconds:.3f} s", file=sys.stderr, flush=True)
                times[name].append(seconds)
        tokens = batch * self.options.new_tokens
        return [
            {
                "batch": batch,
                "variant": name,
                "first_call_s": first,
                "tokens_per_second": tokens / statistics.median(found),
                "slowest": tokens / max(found),
                "fastest": tokens / min(found),
            }
            for name, (first, *found) in times.items()
        ]

    def variants(self, ids: torch.Tensor) -> dict[str, Callable[[], Any]]:
        """Name → one run."""
        prompts = ids.tolist()

        def ours(engine: sl.LensEngine, name: str, plan: sl.Plan | None) -> Callable[[], Any]:
            return lambda: engine.generate(
                prompts,
                plan=plan,
                policy=sl.SamplingPolicy(temperature=0),
                max_new_tokens=self.options.new_tokens,
                engine=name,
            )

        found: dict[str, Callable[[], Any]] = {BASE: lambda: self.hugging_face(ids, "dynamic")}
        if not self.options.skip_bridge:
            found["TransformerBridge.generate, one hook"] = lambda: self.transformer_lens(ids)
            found["steerlab bridge, steered"] = ours(self.engine, "bridge", self.plan)
        found["steerlab fast, unsteered"] = ours(self.engine, "fast", None)
        found["steerlab fast, steered"] = ours(self.engine, "fast", self.plan)
        if self.options.device == "cuda":
            found["steerlab graph, unsteered"] = ours(self.engine, "graph", None)
            found["steerlab graph, steered"] = ours(self.engine, "graph", self.plan)
        if self.spread is not None:
            found[f"steerlab fast, steered, {self.options.n_devices} devices"] = ours(self.spread, "fast", self.plan)
            found[f"steerlab graph, steered, {self.options.n_devices} devices"] = ours(self.spread, "graph", self.plan)
        if self.options.compiled:
            found["HF generate, static cache, compiled"] = lambda: self.hugging_face(ids, "static")
            found["steerlab compiled, unsteered"] = ours(self.engine, "compiled", None)
            found["steerlab compiled, steered"] = ours(self.engine, "compiled", self.plan)
        return {name: run for name, run in found.items() if any(word in name for word in self.options.only)}

    @torch.no_grad()
    def hugging_face(self, ids: torch.Tensor, cache: str) -> Any:
        """Hugging Face's own generate."""
        moved = ids.to(self.options.device)
        return self.plain.generate(
            moved,
            attention_mask=torch.ones_like(moved),
            max_new_tokens=self.options.new_tokens,
            do_sample=False,
            cache_implementation=cache,
            pad_token_id=0,
        )

    def transformer_lens(self, ids: torch.Tensor) -> Any:
        """The bridge's own generate under one residual hook."""
        moved = self.vector.to(self.options.device, getattr(torch, self.options.dtype))
        bridge = self.engine.model
        with bridge.hooks(fwd_hooks=[(self.hook_name, lambda value, hook: value + moved)]):
            return bridge.generate(
                ids.to(self.options.device),
                max_new_tokens=self.options.new_tokens,
                do_sample=False,
                stop_at_eos=False,
                prepend_bos=False,
                verbose=False,
                return_type="tokens",
            )


def timed(run: Callable[[], Any], device: str) -> float:
    """Seconds of one run, the device's work included."""
    synchronise(device)
    start = time.perf_counter()
    run()
    synchronise(device)
    return time.perf_counter() - start


def synchronise(device: str) -> None:
    """Waits for the device."""
    if device.startswith("cuda"):
        for index in range(torch.cuda.device_count()):
            torch.cuda.synchronize(index)


def without_eos(model: Any, name: str) -> sl.LensEngine:
    """An engine on a model's weights, with every EOS id taken away so that all rows run to the end."""
    engine = sl.load(model, tokenizer=word_tokenizer() if name in SHAPES else None)
    engine.tokenizer.eos_token = None
    causal = engine.model.original_model
    causal.config.eos_token_id = None
    causal.generation_config.eos_token_id = None
    return engine


def plain_model(options: argparse.Namespace, n_devices: int) -> Any:
    """The Hugging Face model: of a name that steerlab knows, or random in memory; on one device or spread."""
    if options.model in SHAPES:
        return random_llama(SHAPES[options.model], n_devices, options.device, getattr(torch, options.dtype))
    from transformers import AutoModelForCausalLM

    from steerlab.models import resolve

    path = resolve(options.model).path
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, options.dtype)).to(options.device).eval()


def random_llama(shape: dict[str, int], n_devices: int, device: str, dtype: torch.dtype) -> Any:
    """A Llama with random weights, made where they stay: the first device, or layer after layer on several."""
    from accelerate import dispatch_model
    from transformers import LlamaConfig, LlamaForCausalLM

    from steerlab.engines.lens._placement import balanced

    config = LlamaConfig(
        vocab_size=128256,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        eos_token_id=None,
        bos_token_id=None,
        **shape,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(dtype)
    places = balanced(model, n_devices)
    for name, place in places.items():
        module = model.get_submodule(name).to_empty(device=f"cuda:{place}" if device == "cuda" else device)
        for key, parameter in module.named_parameters():
            torch.nn.init.ones_(parameter) if "norm" in f"{name}.{key}" else torch.nn.init.normal_(parameter, std=0.02)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(model.model.embed_tokens.weight.device)
    if n_devices > 1:
        dispatch_model(model, {name: place for name, place in places.items()})
    return model.eval()


def word_tokenizer() -> Any:
    """A tokenizer without a model's."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")


def machine(device: str) -> dict[str, Any]:
    """What ran: card or processor, and library versions."""
    import transformers

    cards = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if device == "cuda" else []
    return {
        "cards": cards,
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def print_table(result: dict[str, Any]) -> None:
    """Tokens per second, with the ratio to Hugging Face's dynamic generate at the same batch."""
    print(json.dumps(result["machine"]))
    print(f"{'batch':>5}  {'variant':<42} {'tok/s':>9} {'min':>9} {'max':>9} {'× HF':>6} {'first call, s':>14}")
    for batch in dict.fromkeys(row["batch"] for row in result["rows"]):
        rows = [row for row in result["rows"] if row["batch"] == batch]
        base = next((row["tokens_per_second"] for row in rows if row["variant"] == BASE), float("nan"))
        for row in rows:
            print(
                f"{batch:>5}  {row['variant']:<42} {row['tokens_per_second']:>9.1f} {row['slowest']:>9.1f} "
                f"{row['fastest']:>9.1f} {row['tokens_per_second'] / base:>6.2f} "
                f"{row['first_call_s']:>14.1f}"
            )


if __name__ == "__main__":
    main()
