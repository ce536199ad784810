"""Draw the README's picture, docs/demo.png, from the run that `make demo` leaves behind.

Usage: ``.venv/bin/python scripts/readme_picture.py [runs/sentiment]``
"""

import sys
from pathlib import Path

import steerlab as sl
from steerlab.experiment.plots import plot_dose_response, style

PICTURE = Path(__file__).resolve().parent.parent / "docs" / "demo.png"


def main(run: str = "runs/sentiment") -> None:
    """Draw the first effect of a run."""
    effect = sl.Experiment.load(run).effects[0]
    with style():
        plot_dose_response(effect).figure.savefig(PICTURE, dpi=160, bbox_inches="tight")
    print(f"{PICTURE}: {PICTURE.stat().st_size / 1000:.0f} kB")


if __name__ == "__main__":
    main(*sys.argv[1:])
