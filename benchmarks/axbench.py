"""AxBench's steering task from the benchmark's own files, by small models that also serve as judges.

    python benchmarks/axbench.py FOLDER --concepts 3 --instructions 4 --out axbench.csv
    python benchmarks/axbench.py FOLDER --model DIRECTORY --judges DIRECTORY smollm2-135m --device cuda --workers 4 \
        --concepts 10 --texts 72 --instructions 20 --tokens 64 --steps 100 --factors 0.2 0.4 0.6 0.8 1 1.5 2

FOLDER holds `train_data.parquet` of AxBench (stanfordnlp/axbench, Apache-2.0). Every concept is a run of its own below
`--root`, with a directory per model, so that several processes share the work and a run that was stopped goes on. The
answers are made once, whatever the number of judges.

`--out` gets a row per judge and method, the score with its interval; a file of the same name that ends in `-rows` every
answer with its ratings; one that ends in `-pairs` the difference of every two methods, paired by concept.
"""

import argparse
import multiprocessing
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cache, partial
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import steerlab as sl
from steerlab.core._files import write_atomic
from steerlab.protocols import axbench, read_concepts, read_instructions
from steerlab.protocols.axbench import METHODS, method_differences, summary_table


def main() -> None:
    """Measures what is missing and prints the tables, which are written anew with every concept."""
    options = parse(sys.argv[1:])
    done, tables = [], {}
    for rows in measured(options):
        done.append(rows)
        tables = tables_of(pd.concat(done, ignore_index=True), options.methods)
        for name, table in tables.items() if options.out is not None else ():
            write_atomic(options.out.with_stem(f"{options.out.stem}{name}"), table.to_csv(index=False))
    for name in ("", "-pairs"):
        print(tables[name].to_string(index=False, float_format=lambda value: f"{value:.3f}"))


def tables_of(rows: pd.DataFrame, methods: Sequence[str]) -> dict[str, pd.DataFrame]:
    """What is written, by the end of the file's name."""
    by_judge = [(judge, part) for judge, part in rows.groupby("judge", sort=False)]
    tables = [summary_table(part, methods).assign(judge=judge) for judge, part in by_judge]
    pairs = [method_differences(part, methods).assign(judge=judge) for judge, part in by_judge]
    return {"": pd.concat(tables), "-rows": rows, "-pairs": pd.concat(pairs)}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m", help="what steerlab.load takes")
    parser.add_argument("--judges", nargs="+", default=[], help="models that judge; the model itself by default")
    parser.add_argument("--device", default=None, help="the first GPU by default, else the CPU")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--batch-tokens", type=int, default=None, help="tokens per forward pass")
    parser.add_argument("--workers", type=int, default=1, help="processes, each with models of its own")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads of each process; torch's own by default")
    parser.add_argument("--layer", type=int, default=None, help="7/15 of the model's layers by default")
    parser.add_argument("--concepts", type=int, default=3)
    parser.add_argument("--texts", type=int, default=12, help="texts of each side of a concept")
    parser.add_argument("--instructions", type=int, default=4, help="the first half chooses the factor")
    parser.add_argument("--factors", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=METHODS)
    parser.add_argument("--tokens", type=int, default=24, help="tokens of an answer at most")
    parser.add_argument("--steps", type=int, default=12, help="of the training of ReFT-r1")
    parser.add_argument("--batch-size", type=int, default=2, help="texts per step")
    parser.add_argument("--root", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path, default=None, help="a CSV file")
    return parser.parse_args(arguments)


def measured(options: argparse.Namespace) -> Iterator[pd.DataFrame]:
    """The rows of each concept under each judge, as they are ready."""
    work, numbers = partial(measure, options), range(options.concepts)
    if options.workers == 1:
        yield from map(work, numbers)
        return
    spawned = multiprocessing.get_context("spawn")  # a process that has used CUDA cannot be forked
    with ProcessPoolExecutor(options.workers, mp_context=spawned) as pool:
        for done in as_completed([pool.submit(work, number) for number in numbers]):
            yield done.result()


def measure(options: argparse.Namespace, number: int) -> pd.DataFrame:
    """The rows of one concept under every judge."""
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    file = options.folder / "train_data.parquet"
    concept = read_concepts(file, limit=options.concepts, texts=options.texts)[number]
    asked = read_instructions(file, limit=options.instructions)
    load = partial(engine, device=options.device, dtype=options.dtype, batch_tokens=options.batch_tokens)
    subject, found = load(options.model), []
    layer = 7 * subject.info.n_layers // 15 if options.layer is None else options.layer
    training = {"steps": options.steps, "batch_size": options.batch_size, "evaluate_every": max(1, options.steps // 10)}
    with sl.Experiment(f"concept-{number}", subject, root=options.root / f"axbench-{named(options.model)}") as exp:
        for judge in options.judges or [options.model]:
            result = axbench(
                exp,
                [concept],
                asked,
                layer=layer,
                judge=None if judge == options.model else load(judge),
                methods=options.methods,
                factors=options.factors,
                max_new_tokens=options.tokens,
                chat=True,
                training=training,
            )
            found.append(result.rows.assign(judge=named(judge)))
            print(f"concept {number}, judge {named(judge)}: {result.sentences[0]}", file=sys.stderr, flush=True)
    return pd.concat(found, ignore_index=True)


def named(model: str) -> str:
    """A model's short name."""
    return Path(model).name.removesuffix(".gguf")


@cache
def engine(model: str, **options: Any) -> Any:
    """A model, loaded once per process."""
    return sl.load(model, **{name: value for name, value in options.items() if value is not None})


if __name__ == "__main__":
    main()
