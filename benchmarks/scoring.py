"""Scoring inside vLLM: what exact log-probs cost beside vLLM's own ways, and whether they are right, on a random Llama.

    python benchmarks/scoring.py --check                    # correctness on a small float32 model, any device
    python benchmarks/scoring.py --out scores.json          # throughput and memory, 1B Llama shape, on a GPU
    python benchmarks/scoring.py --tensor-parallel-size 2 --out two.json --against scores.json
    python benchmarks/scoring.py --shape small --quick      # a dry run

One engine serves all arms, so every arm meets the same model, cache and scheduler. Each round runs the arms in turn;
every run starts with an empty prefix cache, so a shared prefix is computed once in each run and read by all others. All
figures of an arm are medians over rounds, and ratios are medians of the ratios within a round.

- *shared prefix*: 256 targets of 8 tokens after one prefix of 2048. "no log-probs" submits exactly what ours submits.
- *unshared prompts*: 256 different texts of 128 tokens, every token scored. "no log-probs" is prefill alone.
- *memory*: one prompt as long as the context, of which every token is scored.

`--against` compares the scores themselves with those of another run, e.g. at another degree of tensor parallelism.
"""

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from vllm_steering import SHAPES, make_plugin_visible

SHARED, UNSHARED = "shared prefix", "unshared prompts"
NATIVE, TOKEN_IDS, NOTHING, OURS = "native prompt_logprobs", "native token-id path", "no log-probs", "ours"


def main() -> None:
    """Runs the check, or the rounds."""
    options = arguments()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    make_plugin_visible(Path(tempfile.mkdtemp()))
    os.environ["VLLM_PLUGINS"] = "steerlab"
    context = 1024 if options.check or options.shape == "small" else options.context
    options.context = context
    options.model = options.model or str(build_model("small" if options.check else options.shape, context))
    if options.check:
        check(options)
    else:
        compare(options)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="correctness only")
    parser.add_argument("--shape", default="1b", choices=SHAPES)
    parser.add_argument("--model", help="a model directory; by default a random one is made")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--context", type=int, default=32768 + 64, help="tokens of the longest prompt, and a few")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--native-rounds", type=int, default=3, help="rounds in which slow native arms take part")
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--memory", type=float, default=0.5, help="share of the device's memory")
    parser.add_argument("--score-bytes", type=int, default=1 << 29)
    parser.add_argument("--quick", action="store_true", help="a tenth of the work")
    parser.add_argument("--out", help="a JSON file for figures and scores")
    parser.add_argument("--against", help="such a file of another run, whose scores are compared")
    return parser.parse_args()


def build_model(shape: str, context: int) -> Path:
    """Saves a random Llama without tokenizer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = Path(tempfile.mkdtemp()) / "model"
    torch.manual_seed(0)
    config = LlamaConfig(
        **{**SHAPES[shape], "max_position_embeddings": context},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = LlamaForCausalLM(config).to(torch.float32 if shape == "small" else torch.bfloat16)
    model.generation_config.eos_token_id = None
    model.save_pretrained(directory)
    del model
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return directory


def start(options: argparse.Namespace, **arguments: Any) -> Any:
    """The engine."""
    from steerlab.engines.vllm import VLLMEngine

    return VLLMEngine(
        options.model,
        skip_tokenizer_init=True,
        tensor_parallel_size=options.tensor_parallel_size,
        gpu_memory_utilization=options.memory,
        score_bytes=options.score_bytes,
        **arguments,
    )


# --- throughput ---------------------------------------------------------------------------------------------------


class Work:
    """Prefixes and targets of one kind.

    Args:
        name: of the kind.
        contexts: one per prompt.
        targets: per prompt its targets.
        unit: what is counted.
        size: how many of these.
    """

    def __init__(self, name: str, contexts: list, targets: list, unit: str, size: int) -> None:
        self.name, self.contexts, self.targets, self.unit, self.size = name, contexts, targets, unit, size

    @property
    def whole(self) -> list[tuple[list[int], int]]:
        """Per target the context and it, and how long the context is."""
        rows = zip(self.contexts, self.targets, strict=True)
        return [([*context, *target], len(context)) for context, row in rows for target in row]


class Arm:
    """One way to do some work.

    Args:
        work: what to do.
        name: how.
        run: does it; returns what came back.
        missing: how many targets have no score, from what came back.
        rounds: in how many rounds.
    """

    def __init__(self, work: Work, name: str, run: Any, missing: Any, rounds: int) -> None:
        self.work, self.name, self.run, self.count_missing, self.rounds = work, name, run, missing, rounds
        self.rates: list[float] = []
        self.missing: list[int | None] = []
        self.failed = ""

    def round(self, engine: Any) -> None:
        """Runs once against the clock, with an empty prefix cache."""
        engine.llm.reset_prefix_cache()
        begun = time.perf_counter()
        found = self.run()
        self.rates.append(self.work.size / (time.perf_counter() - begun))
        self.missing.append(self.count_missing(found))


def compare(options: argparse.Namespace) -> None:
    """Throughput of all arms, in rounds; then memory, and the scores themselves."""
    d_vocab, layers = SHAPES[options.shape]["vocab_size"], SHAPES[options.shape]["num_hidden_layers"]
    parts = works(d_vocab, options)
    dtype = "float32" if options.shape == "small" else options.dtype
    begun = time.perf_counter()
    engine = start(
        options, layers=[layers // 2], capture_tokens=0, dtype=dtype, max_model_len=options.context, max_num_seqs=256
    )
    with engine:
        workers = engine._running.workers
        print(f"started in {time.perf_counter() - begun:.0f} s; workers: {workers}", flush=True)
        arms = [arm for work in parts for arm in arms_of(work, engine, options, workers[0]["runner"] == "v2")]
        run_rounds(arms, engine, options)
        found = {
            "card": card(),
            "workers": workers,
            "options": vars(options),
            "arms": summary(arms),
            "memory": memory(engine, d_vocab, options),
            "scores": [scores_of(engine, work) for work in parts],
        }
    report(arms, found)
    if options.against:
        apart(found["scores"], json.loads(Path(options.against).read_text())["scores"])
    if options.out:
        Path(options.out).write_text(json.dumps(found))


def works(d_vocab: int, options: argparse.Namespace) -> list[Work]:
    """The two kinds of work; every token is drawn from all but the first five."""
    draw = np.random.default_rng(0)
    small = options.quick or options.shape == "small"
    count, prefix, text = (24, 256, 48) if small else (256, 2048, 128)

    def ids(n: int) -> list[int]:
        return draw.integers(5, d_vocab, n).tolist()

    texts = [ids(text + 1) for _ in range(count)]
    return [
        Work(SHARED, [ids(prefix)], [[ids(8) for _ in range(count)]], "targets", count),
        Work(UNSHARED, [row[:1] for row in texts], [[row[1:]] for row in texts], "tokens", count * text),
    ]


def arms_of(work: Work, engine: Any, options: argparse.Namespace, is_v2: bool) -> list[Arm]:
    """Every way to do some work."""
    from vllm import SamplingParams

    llm, plain = engine.llm, {"temperature": 0.0, "max_tokens": 1, "ignore_eos": True, "detokenize": False}
    submitted: Any = [{"prompt_token_ids": ids[:-1]} for ids, _ in work.whole]
    whole: Any = [{"prompt_token_ids": ids} for ids, _ in work.whole]

    def nothing() -> Any:
        return llm.generate(submitted, SamplingParams(**plain), use_tqdm=False)

    def native() -> Any:
        return llm.generate(whole, SamplingParams(**plain, prompt_logprobs=0), use_tqdm=False)

    def token_ids() -> Any:
        params = [
            SamplingParams(
                **plain,
                prompt_logprob_token_ids=[[token] for token in ids[start:]],
                prompt_logprob_start=start - 1,
                skip_reading_prefix_cache=False,
            )
            for ids, start in work.whole
        ]
        return llm.generate(whole, params, use_tqdm=False)

    def ours() -> Any:
        return engine.score(work.contexts, work.targets)

    def without(attribute: str) -> Any:
        return lambda rows: sum(getattr(row, attribute) is None for row in rows)

    def not_finite(scores: Any) -> int:
        return sum(not all(map(math.isfinite, row.token_log_probs)) for row in scores)

    arms = [
        Arm(work, NOTHING, nothing, lambda rows: None, options.rounds),
        Arm(work, OURS, ours, not_finite, options.rounds),
        Arm(work, NATIVE, native, without("prompt_logprobs"), options.native_rounds),
    ]
    if is_v2:
        arms.append(Arm(work, TOKEN_IDS, token_ids, without("prompt_token_id_logprobs"), options.native_rounds))
    return arms


def run_rounds(arms: list[Arm], engine: Any, options: argparse.Namespace) -> None:
    """A warm-up, then all arms in turn; vLLM's own ways may fail on some version, and say so."""
    for arm in arms:
        try:
            engine.llm.reset_prefix_cache()
            arm.run()
        except ValueError as error:
            arm.failed = str(error).splitlines()[0]
    for number in range(options.rounds):
        for arm in arms:
            if not arm.failed and number < arm.rounds:
                arm.round(engine)
        print(f"round {number + 1} of {options.rounds}", flush=True)


def summary(arms: list[Arm]) -> list[dict[str, Any]]:
    """Per arm its rates, and the ratios to no log-probs and to vLLM's own prompt_logprobs in the same rounds."""
    found = []
    for arm in arms:
        others = {other.name: other.rates for other in arms if other.work is arm.work}
        ratios = {
            name: statistics.median(a / b for a, b in zip(arm.rates, others[name], strict=False))
            for name in (NOTHING, NATIVE)
            if arm.rates and others.get(name)
        }
        rate = statistics.median(arm.rates) if arm.rates else math.nan
        about = {"work": arm.work.name, "arm": arm.name, "unit": arm.work.unit, "failed": arm.failed}
        found.append({**about, "rate": rate, "rates": arm.rates, "of": ratios, "missing": arm.missing[-1:]})
    return found


def memory(engine: Any, d_vocab: int, options: argparse.Namespace) -> dict[str, Any]:
    """What one prompt of the whole context takes on each rank beside what lies there already, scored and not."""
    from vllm import SamplingParams

    draw = np.random.default_rng(1)
    ids = draw.integers(5, d_vocab, options.context - 32).tolist()
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False)
    prompt: Any = {"prompt_token_ids": ids[:-1]}

    def peak(run: Any) -> list[int]:
        engine.llm.reset_prefix_cache()
        engine._running.ask("memory")
        run()
        return [header["peak"] - header["now"] for header, _ in engine._running.ask("memory")]

    scored = lambda: engine.score([ids[:1]], [[ids[1:]]])  # noqa: E731
    return {
        "tokens": len(ids),
        "prefill": peak(lambda: engine.llm.generate(prompt, params, use_tqdm=False)),
        "scored": peak(scored),
        "reserved": engine._running.ask("memory")[0][0]["reserved"],
        "whole_logits": 4 * d_vocab * len(ids),
    }


def scores_of(engine: Any, work: Work) -> list[list[float]]:
    """Log-probs of the first 32 targets."""
    engine.llm.reset_prefix_cache()
    contexts, targets = work.contexts[:32], [row[:32] for row in work.targets[:32]]
    return [list(row.token_log_probs) for row in engine.score(contexts, targets)]


def report(arms: list[Arm], found: dict[str, Any]) -> None:
    """The tables."""
    options = found["options"]
    print(f"\n{found['card']}, TP={options['tensor_parallel_size']}, {options['dtype']}, {options['rounds']} rounds\n")
    print(f"| work | arm | a second | of {NOTHING} | of {NATIVE} | targets without a score |")
    print("| --- | --- | --- | --- | --- | --- |")
    for row in found["arms"]:
        rate = row["failed"] or f"{row['rate']:,.0f} {row['unit']}"
        shares = " | ".join(f"{row['of'][name]:.2f}" if name in row["of"] else "" for name in (NOTHING, NATIVE))
        missing = next(iter(row["missing"]), None)
        print(f"| {row['work']} | {row['arm']} | {rate} | {shares} | {'' if missing is None else missing} |")
    used, mib = found["memory"], 1 << 20
    print(
        f"\nA prompt of {used['tokens']:,} tokens, MiB on each rank beside weights, cache and buffers: prefill alone "
    )
    print(
        f"{[round(b / mib) for b in used['prefill']]}, every token scored {[round(b / mib) for b in used['scored']]};"
    )
    print(f"reserved for scoring {used['reserved'] / mib:,.0f}, all logits would be {used['whole_logits'] / mib:,.0f}.")


def apart(mine: list, theirs: list) -> None:
    """How far two runs' scores are from each other."""
    for name, ours, others in zip((SHARED, UNSHARED), mine, theirs, strict=True):
        gap = np.abs(np.concatenate(ours) - np.concatenate(others))
        sums = np.abs([sum(a) - sum(b) for a, b in zip(ours, others, strict=True)])
        print(f"{name}: per token mean |Δ| {gap.mean():.2e}, max {gap.max():.2e}; per target max {sums.max():.2e} nats")


def card() -> str:
    """What it ran on."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"


# --- correctness --------------------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> None:
    """Compares with Hugging Face's full forward, with generation, and the kernel with the formula."""
    import torch
    from transformers import AutoModelForCausalLM

    from steerlab.core.policy import SamplingPolicy
    from steerlab.measures.quantities import LogDistribution, PolicyEntropy, PolicyLogQ, TokenLogProb
    from steerlab.steering.operators import add
    from steerlab.steering.plan import Plan
    from steerlab.steering.positions import where
    from steerlab.steering.vectors import SteeringVector

    policy = SamplingPolicy(temperature=0.7, top_p=0.9)
    draw = np.random.default_rng(0)
    contexts = [draw.integers(5, 512, n).tolist() for n in (1, 16, 31, 70, 200, 300)]
    targets = [[draw.integers(5, 512, n).tolist() for n in (1, 8, 8, 40)] for _ in contexts]
    vector = SteeringVector.from_tensor(torch.randn(256, generator=torch.Generator().manual_seed(0)), layer=2)
    plan = Plan(add(vector, coef=2.0), add(vector, coef=-1.0, where=where.prompt()))
    measures = {"p": TokenLogProb(), "h": PolicyEntropy(policy), "q": PolicyLogQ(policy), "all": LogDistribution()}
    options.score_bytes = min(options.score_bytes, 1 << 20)  # many chunks
    with start(options, layers=[1, 2], dtype="float32", max_num_seqs=16, max_num_batched_tokens=64) as engine:
        print("workers:", engine._running.workers)
        cold = scores(engine, contexts, targets)
        warm = scores(engine, contexts, targets)
        mixed = scores(engine, contexts[::-1], [row[::-1] for row in targets[::-1]])[::-1]
        found = engine.measure(contexts, targets, measures)
        rows = [engine.generate(contexts, plan=p, policy=policy, max_new_tokens=16, n=2, seed=1) for p in (None, plan)]
        pairs = [[[r.token_ids for r in some if r.prompt_index == i] for i in range(len(contexts))] for some in rows]
        again = [
            engine.measure(contexts, ids, {"q": PolicyLogQ(policy), "p": TokenLogProb()}, plan=p)
            for ids, p in zip(pairs, (None, plan), strict=True)
        ]
    model = AutoModelForCausalLM.from_pretrained(options.model, dtype=torch.float32).eval()
    flat = [(context, target) for context, row in zip(contexts, targets, strict=True) for target in row]
    with torch.no_grad():
        logits = [model(torch.tensor([c + t])).logits[0, len(c) - 1 : -1] for c, t in flat]
    wanted = [
        {name: m(x, torch.tensor(t)).numpy() for name, m in measures.items()}
        for x, (_, t) in zip(logits, flat, strict=True)
    ]
    # vLLM's attention kernels multiply float32 as TF32 on a GPU, whatever the precision of other products is set to
    bound = 3e-2 if torch.cuda.is_available() else 1e-3
    gaps = {
        "scores and a full forward": gap(cold, [w["p"] for w in wanted], bound),
        "a warm cache": gap(warm, cold, bound),
        "another order": gap(mixed, cold, bound),
        **{
            f"{name} and a full forward": gap([f[name] for f in found], [w[name] for w in wanted], bound)
            for name in "ph"
        },
        "distributions and a full forward": gap([f["all"] for f in found], [w["all"] for w in wanted], bound),
    }
    for name, some, forced in zip(("unsteered", "steered"), rows, again, strict=True):
        gaps[f"log q of {name} text, drawn and re-scored"] = gap(
            [r.token_log_qs for r in some], [f["q"] for f in forced], bound
        )
        gaps[f"log p of {name} text, drawn and re-scored"] = gap(
            [r.token_log_probs for r in some], [f["p"] for f in forced], bound
        )
    if torch.cuda.is_available():
        gaps["the kernel and the formula"] = (*kernel_gap(), 1e-4)
    for name, (mean, largest, limit) in gaps.items():
        print("ok  " if largest <= limit else "FAIL", f"{name}: mean |Δ| {mean:.1e}, max {largest:.1e}")
    print(card())
    raise SystemExit(0 if all(largest <= limit for _, largest, limit in gaps.values()) else 1)


def scores(engine: Any, contexts: list, targets: list) -> list:
    """Log-probs, target by target."""
    return [row.token_log_probs for row in engine.score(contexts, targets)]


def gap(ours: list, theirs: list, bound: float) -> tuple[float, float, float]:
    """Mean and maximum of |Δ|, and what is allowed; infinite where only one is outside a nucleus."""
    differences = []
    for one, other in zip(ours, theirs, strict=True):
        a, b = np.asarray(one, dtype=float).ravel(), np.asarray(other, dtype=float).ravel()
        same = (a == b) | (np.isneginf(a) & np.isneginf(b))
        differences.append(np.abs(np.where(same, 0.0, a) - np.where(same, 0.0, b)))
    whole = np.concatenate(differences)
    return float(whole.mean()), float(whole.max()), bound


def kernel_gap() -> tuple[float, float]:
    """The Triton kernel against log-softmax in float64, on logits of a large vocabulary."""
    import torch

    from steerlab.engines.vllm._worker.row_sums import log_probs_of, row_sums

    logits = 10 * torch.randn(600, 128256, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    tokens = torch.randint(128256, (600,), device="cuda")
    halves = [row_sums(logits[:, :64128], tokens, 64128, 0), row_sums(logits[:, 64128:], tokens, 64128, 64128)]
    found = log_probs_of(torch.stack(halves)).double()
    wanted = logits.double().log_softmax(-1).gather(-1, tokens[:, None])[:, 0]
    return float((found - wanted).abs().mean()), float((found - wanted).abs().max())


if __name__ == "__main__":
    main()
