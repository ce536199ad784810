"""Draw the picture of README and home page, docs/demo.png, from the run of `make demo`, and print the table beside it.

Usage: ``.venv/bin/python scripts/readme_picture.py [runs/sentiment]``
"""

import sys
from pathlib import Path

import steerlab as sl
from steerlab.experiment._blocks.tables import table_of
from steerlab.experiment.plots import plot_dose_response, style

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.png"


def main(run: str = "runs/sentiment") -> None:
    """Draw the first effect of a run, and print its table."""
    effect = sl.Experiment.load(run).effects[0]
    with style():
        plot_dose_response(effect).figure.savefig(PICTURE, dpi=160, bbox_inches="tight")
    table = table_of(effect.by_dose()[["dose", "value", "ppl_ratio"]], "")
    for row in (["dose", "margin (nats)", "perplexity ratio"], ["---:"] * 3, *table.rows):
        print(f"| {' | '.join(row)} |")
    low, high = effect.ci
    print(f"\nslope {effect.slope:+.2f} [{low:+.2f}, {high:+.2f}], worst null rank {effect.null_rank:.3f}")
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
