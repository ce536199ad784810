"""Registers and spills of every kernel, as the assembler reports them; needs Triton, no GPU.

    python benchmarks/kernel_registers.py
    python benchmarks/kernel_registers.py --capability 100

A row's width is an argument of the kernels, not a constant, so these figures are those of any vocabulary.
"""

import argparse
import itertools
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from steerlab._kernels import attention, editing, elementwise, feeding, greedy, linear, matvec, rotary, steps, top_p

DTYPES = ("fp32", "bf16", "fp16")
_OF_EDITS = ("reads", "writes", "gates", "factors", "changes")


def main() -> int:
    """Prints a row per compiled kernel; 1 if any spills."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, default=90)
    capability = parser.parse_args().capability
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
    spilled = 0
    print(f"{'kernel':<18} {'logits':<6} {'constants':<78} {'registers':>9} {'spilled bytes':>13}")
    for kernel, dtype, constants, warps in variants():
        registers, spills = assembled(kernel, dtype, constants, warps, capability)
        spilled += spills
        said = " ".join(name for name, value in constants.items() if value is True)
        print(f"{kernel.__name__:<18} {dtype:<6} {said:<78} {registers:>9} {spills:>13}")
    return int(spilled > 0)


def variants():
    """Kernels with the constants they are compiled with."""
    for dtype in DTYPES:
        unused = {"fp32": 0, "bf16": 16, "fp16": 13}[dtype]
        for divided in (False, True) if dtype == "fp32" else (False,):
            sizes = {"BLOCK": top_p._BLOCK, "UNUSED": unused}
            yield top_p._edge_kernel, dtype, sizes | {"IS_DIVIDED": divided}, top_p._WARPS
        for edge, warm in itertools.product((False, True), repeat=2):
            flags = {"HAS_EDGE": edge, "IS_DIVIDED": warm and dtype == "fp32"}
            sizes = {"BLOCK": steps._BLOCK, "DEPTH": steps._DEPTH}
            yield steps._measures_kernel, dtype, flags | sizes | {"IS_WARM": warm}, steps._WARPS
            wanted = {"HAS_LOG_P": True, "HAS_LOG_Q": True, "HAS_ENTROPY": True, "HAS_SOFTCAP": False}
            sizes = {"BLOCK": steps._GRADIENT_BLOCK}
            yield steps._gradient_kernel, dtype, flags | wanted | sizes, steps._GRADIENT_WARPS
    yield from decoding_variants()


def decoding_variants():
    """The same for the kernels of a pass over one token per row."""
    for dtype, has_bias in itertools.product(DTYPES[1:], (False, True)):
        for blocks, rows in itertools.product((linear._FEW, linear._MANY), (16, linear.MOST_ROWS)):
            sizes = {"ROWS": rows, "WIDTH": blocks.width, "DEPTH": blocks.depth, "STAGES": blocks.stages}
            yield linear._linear, dtype, {"HAS_BIAS": has_bias, "POLICY": blocks.policy} | sizes, blocks.warps
    for dtype, depth in itertools.product(DTYPES[1:], (512, 2048, 4096, 14336)):
        outputs, inner, warps = matvec.tile(depth)
        yield matvec._matvec, dtype, {"HAS_BIAS": True, "WIDTH": outputs, "DEPTH": inner}, warps
    for dtype, has_mask, d_head in itertools.product(DTYPES[1:], (False, True), (64, 128, 256)):
        sizes = {"GROUP": 16, "D_KEY": d_head, "D_VALUE": d_head}
        for is_whole in (False, True):
            flags = {"HAS_MASK": has_mask, "IS_WHOLE": is_whole}
            for block, warps in (attention._SHORT, attention._LONG):
                yield attention._attend, dtype, flags | sizes | {"BLOCK": block}, warps
    yield attention._join, "bf16", {"PARTS": 16, "D_VALUE": 128}, attention._JOIN_WARPS
    for dtype in DTYPES:
        yield rotary._rotate, dtype, {"HALF": 64}, rotary._WARPS
        yield greedy._parts, dtype, {"BLOCK": greedy._BLOCK}, greedy._WARPS
        yield editing._edit, dtype, {"BLOCK": 4096}, editing._WARPS
        for has_added in (False, True):
            yield elementwise._norm, dtype, {"HAS_ADDED": has_added, "BLOCK": 4096}, elementwise._NORM_WARPS
        yield elementwise._gate, dtype, {"BLOCK": elementwise._BLOCK}, elementwise._GATE_WARPS
        yield elementwise._write, dtype, {"BLOCK": 128}, elementwise._WRITE_WARPS
    yield feeding._feed, "bf16", {}, feeding._WARPS
    yield greedy._settle, "bf16", {"EOS": 4}, greedy._JOIN_WARPS


def assembled(kernel, dtype, constants, warps, capability) -> tuple[int, int]:
    """Registers per thread, and bytes spilled per thread."""
    if "OVERLAPS" in kernel.arg_names:
        constants = constants | {"OVERLAPS": capability >= 90}
    types = {name: argument_type(name, dtype) for name in kernel.arg_names if name not in constants}
    types |= {name: "constexpr" for name in constants}
    target = GPUTarget("cuda", capability, 32)
    source = ASTSource(
        kernel,
        {name: types[name] for name in kernel.arg_names},
        constexprs=constants,
        attrs={(k,): [["tt.divisibility", 16]] for k, name in enumerate(kernel.arg_names) if is_aligned(name, types)},
    )
    compiled = triton.compile(source, target=target, options={"num_warps": warps})
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "kernel.ptx"
        listing.write_text(compiled.asm["ptx"])
        folder_of_tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        newest = [folder_of_tools / name for name in ("ptxas-blackwell", "ptxas")]
        assembler = next(tool for tool in newest if tool.exists())
        architecture = f"sm_{capability}{'a' if capability >= 90 else ''}"
        command = [str(assembler), "-v", f"--gpu-name={architecture}", str(listing), "-o", str(Path(folder) / "out")]
        report = subprocess.run(command, capture_output=True, text=True, check=False)
        if report.returncode:
            raise RuntimeError(report.stderr)
    registers = int(re.findall(r"Used (\d+) registers", report.stderr)[-1])
    return registers, sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", report.stderr)))


def is_aligned(name: str, types: dict[str, str]) -> bool:
    """Whether an argument is a multiple of 16 in use, as Triton sees by itself: all pointers, and decoding's sizes."""
    return types[name].startswith("*") or name in ("depth", "first_2", "first_3", "part") or "_row" in name


def argument_type(name: str, dtype: str) -> str:
    """The type of a kernel's argument."""
    if name in ("edges", "tokens", "slot", "index", "edited", "eos", "given", "fed"):
        return "*i64"
    if name in ("counts", "filled"):
        return "*i64"
    if name in ("mask", "keeps", "selected", "broken", "ended", "failed"):
        return "*i1"
    if name == "places":
        return "*i32"
    if name in ("found", "cuts", "by_log_p", "by_log_q", "by_entropy", "parts", "tops", "sums", "masses", *_OF_EDITS):
        return "*fp32"
    if name.rstrip("_123") in (
        "logits",
        "rows",
        "stream",
        "changed",
        "added",
        "total",
        "out",
        "weight",
        "bias",
        "query",
        "key",
        "keys",
        "values",
        "value",
        "gate",
        "cos",
        "sin",
    ):
        return f"*{dtype}"
    return (
        "fp32"
        if name in ("temperature", "inverse", "factor", "scale", "softcap", "eps", "top_p", "least", "tiny")
        else "i32"
    )


if __name__ == "__main__":
    sys.exit(main())
