"""How long faces take to make, and how large they are.

    python benchmarks/faces.py [--n 1000]

Prints a row per face: what it shows, seconds (the best of five), and kilobytes of HTML.
"""

import argparse
import time
from collections.abc import Callable

import numpy as np

from steerlab.core.results import Completion, Generations, Score, Scores
from steerlab.display import TextRow, side_by_side, tokens

TEXT = 'The concert was <b>long</b>, and the end of it was a real surprise to "everybody" in the room. ' * 5


def faces(n: int) -> dict[str, Callable[[], str]]:
    """What is timed."""
    completions = tuple(
        Completion(TEXT, list(range(100)), "length", k, 0, [-1.0] * 100, [-1.0] * 100) for k in range(n)
    )
    generations = Generations(completions, ((1, 2, 3),) * n)
    scores = Scores(tuple(Score(k, 0, (1,) * 20, (-1.0,) * 20, "clean", num_bytes=40) for k in range(n)))
    view = tokens([f" token{k}" for k in range(n)], np.linspace(-5, 5, n).tolist(), label="log p", unit="nats")
    beside = side_by_side(["unsteered", "steered"], [TextRow(str(k), (TEXT, TEXT[::-1])) for k in range(n)])
    return {
        f"{n} completions": generations._repr_html_,
        f"{n} scores": scores._repr_html_,
        f"{n} tokens": view._repr_html_,
        f"{n} pairs of completions side by side": beside._repr_html_,
    }


def main() -> None:
    """Times each face and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--n", type=int, default=1000, help="rows, or tokens")
    for name, make in faces(parser.parse_args().n).items():
        seconds = []
        for _ in range(5):
            started = time.perf_counter()
            page = make()
            seconds.append(time.perf_counter() - started)
        print(f"{name:<45} {min(seconds):7.3f} s  {len(page.encode()) / 1000:7.1f} kB")


if __name__ == "__main__":
    main()
