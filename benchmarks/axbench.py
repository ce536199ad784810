"""AxBench's steering task on SmolLM2, from the benchmark's own files, with the same small model as the judge.

    python benchmarks/axbench.py FOLDER [--concepts 3] [--instructions 4] [--root runs] [--out table.csv]

FOLDER holds `train_data.parquet` of AxBench (stanfordnlp/axbench, Apache-2.0). A run that was stopped goes on.
"""

import argparse
from pathlib import Path

import steerlab as sl
from steerlab.protocols import axbench, read_concepts, read_instructions

TRAINING = {"steps": 12, "batch_size": 2, "evaluate_every": 6, "learning_rate": 0.2}


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--layer", type=int, default=14)
    parser.add_argument("--concepts", type=int, default=3)
    parser.add_argument("--texts", type=int, default=12)
    parser.add_argument("--instructions", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=24)
    parser.add_argument("--root", type=Path, default=Path("runs"))
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    file = arguments.folder / "train_data.parquet"
    concepts = read_concepts(file, limit=arguments.concepts, texts=arguments.texts)
    exp = sl.Experiment("axbench", model=arguments.model, root=arguments.root)
    result = axbench(
        exp,
        concepts,
        read_instructions(file, limit=arguments.instructions),
        layer=arguments.layer,
        factors=(0.5, 1.0, 2.0),
        max_new_tokens=arguments.tokens,
        chat=True,
        training=TRAINING,
    )
    print(result)
    if arguments.out:
        result.table.to_csv(arguments.out, index=False)


if __name__ == "__main__":
    main()
