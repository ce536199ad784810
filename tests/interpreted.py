"""Programs whose kernels Triton's interpreter runs, all forked from one process that has imported what they need.

The interpreter is chosen by an environment variable that Triton reads as it is imported, hence a process of its own.
"""

import functools
import gc
import importlib
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor

IMPORTED = ("steerlab.engines.lens", "steerlab._kernels.greedy", "transformers.models.llama.modeling_llama")


def run_interpreted(program: str) -> None:
    """Runs a program's text in a process of its own.

    Raises:
        Exception: what the program raises.
    """
    _ready().submit(_in_fork, program).result()


@functools.cache
def _ready() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_import)


def _import() -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # what was imported is searched for garbage by no child, which would copy it


def _in_fork(program: str) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
        child.submit(exec, program, {}).result()
