"""Linear maps of a few rows on a GPU: how fast the kernel of programs reads its weights, by the blocks it works in.

    python benchmarks/decode_linear.py
    python benchmarks/decode_linear.py --batch 1 --shape 2048x2048 --out decode_linear.json

Each figure is of a CUDA graph in which a norm and a map alternate, as in a program, each time with other weights of the
same shape, more of them than the cache holds. So a map's time holds what a launch and the first reads cost, and the
norm is in all figures alike; kernels overlap as they do there. Bandwidth is that of the weights alone, beside that of a
copy, which reads and writes. Candidates that a device cannot run are left out.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator

import torch

from steerlab._kernels.elementwise import rms_norm
from steerlab._kernels.linear import Blocks, blocks_for, mapped
from steerlab._kernels.matvec import MATVEC_ROWS, matvec
from steerlab.core._files import write_atomic

SHAPES = ("3072x2048", "2048x2048", "16384x2048", "2048x8192", "128256x2048")
"""Outputs × inputs of a Llama of 1 billion parameters: q, k and v; o; gate and up; down; head."""

ONE_BY_ONE = "row by row, weights in registers"
LEAST_BYTES, MOST_COPIES, REPLAYS = 400 << 20, 48, 15
WIDTHS, DEPTHS, STAGES, WARPS = (8, 16, 32, 64), (128, 256, 512, 1024), (3, 4, 6), (1, 2, 4)


def main() -> None:
    """Prints the fastest candidates of each shape and batch."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--shape", nargs="+", default=list(SHAPES), help="outputs x inputs, e.g. 2048x8192")
    parser.add_argument("--shown", type=int, default=6, help="candidates to print for each")
    parser.add_argument("--out", default=None, help="write all figures here as JSON")
    options = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: a copy moves {copy_rate():.2f} TB/s")
    found = [figures for shape in options.shape for figures in of_shape(shape, options.batch, options.shown)]
    if options.out:
        write_atomic(options.out, json.dumps(found, indent=1) + "\n")


def of_shape(shape: str, batches: list[int], shown: int) -> Iterator[dict[str, object]]:
    """Times of all candidates for one shape."""
    width, depth = map(int, shape.split("x"))
    n_copies = max(1, min(MOST_COPIES, -(-LEAST_BYTES // (2 * width * depth))))
    weights = [torch.randn(width, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5 for _ in range(n_copies)]
    torch.cuda.synchronize()  # they are read before the kernel before has ended
    for batch in batches:
        rows = torch.randn(batch, depth, device="cuda", dtype=torch.bfloat16)
        times: dict[str, float] = {"torch": timed(lambda x, w: torch.nn.functional.linear(x, w), rows, weights)}
        times[ONE_BY_ONE] = timed(lambda x, w: matvec(x, [w], []), rows, weights)
        in_use = ONE_BY_ONE if batch <= MATVEC_ROWS else str(blocks_for([width]))
        for blocks in dict.fromkeys([blocks_for([width]), *candidates(width, depth)]):
            try:
                times[str(blocks)] = timed(lambda x, w, blocks=blocks: mapped(x, [w], [], blocks), rows, weights)
            except Exception as error:  # of a compiler, for want of registers or shared memory
                print(f"left out {blocks}: {type(error).__name__}", file=sys.stderr)
                torch.cuda.synchronize()
        order = sorted(times, key=times.__getitem__)
        print(f"\n{shape}, batch {batch}: {len(order)} ways, {n_copies} weights")
        for name in dict.fromkeys([*order[:shown], "torch", in_use]):
            rate = 2 * width * depth / times[name] / 1e6
            note = "  (in use)" if name == in_use else ""
            print(f"{times[name]:9.2f} us {rate:6.2f} TB/s  {name}{note}", flush=True)
        yield {"shape": shape, "batch": batch, "microseconds": times}


def candidates(width: int, depth: int) -> Iterator[Blocks]:
    """Blocks that divide the weights and leave work for most processors, 8 to 32 KiB each, 4 or 8 for a warp."""
    processors = torch.cuda.get_device_properties(0).multi_processor_count
    for outputs, inputs, stages, warps in itertools.product(WIDTHS, DEPTHS, STAGES, WARPS):
        tile = 2 * outputs * inputs
        is_whole = width % outputs == 0 and depth % inputs == 0
        is_apt = 8192 <= tile <= 32768 and 4096 <= tile // warps <= 8192
        if is_whole and is_apt and 2 * (width // outputs) >= processors:
            for policy in ("", "evict_first") if (stages, warps) == (4, 2) else ("",):
                yield Blocks(outputs, inputs, stages, warps, policy)


def timed(
    linear: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], rows: torch.Tensor, weights: list[torch.Tensor]
) -> float:
    """Microseconds of a norm and a map, the median over replays of a graph of all weights."""
    gain = torch.ones(rows.shape[1], device=rows.device, dtype=rows.dtype)

    def work() -> None:
        for weight in weights:
            linear(rms_norm(rows, gain, 1e-6), weight)

    wanted = torch.nn.functional.linear(rms_norm(rows, gain, 1e-6).float(), weights[0].float())
    torch.testing.assert_close(linear(rms_norm(rows, gain, 1e-6), weights[0]).float(), wanted, atol=5e-2, rtol=5e-2)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return 1e3 * milliseconds(graph.replay) / len(weights)


def milliseconds(work: Callable[[], object]) -> float:
    """The median time of a piece of work on the device."""
    work()
    marks = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(REPLAYS)]
    for begin, end in marks:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in marks)


def copy_rate() -> float:
    """Terabytes read and written per second by a copy of 1 GiB."""
    source = torch.empty(1 << 30, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * source.numel() / milliseconds(lambda: target.copy_(source)) / 1e9


if __name__ == "__main__":
    main()
