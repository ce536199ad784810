"""Programs whose kernels Triton's interpreter runs, all forked from one process that has imported what they need.

The interpreter is chosen by an environment variable that Triton reads as it is imported, hence a process of its own.
"""

import atexit
import functools
import gc
import importlib
import multiprocessing
import os
import traceback
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.connection import Connection

IMPORTED = ("steerlab.engines.lens", "steerlab._kernels.greedy", "transformers.models.llama.modeling_llama")


def run_interpreted(program: str) -> None:
    """Runs a program's text in a process of its own.

    Raises:
        AssertionError: if the program raises, with its traceback.
    """
    _ready().send(program)
    error = _ready().recv()
    assert error is None, error


@functools.cache
def _ready() -> Connection:
    """Where the process listens that is forked; it ends with this one."""
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe()
    context.Process(target=_serve, args=(theirs,)).start()
    theirs.close()
    atexit.register(mine.close)
    return mine


def _serve(requests: Connection) -> None:
    os.environ |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    for module in IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # what was imported is searched for garbage by no child, which would copy it
    while True:
        try:
            program = requests.recv()
        except EOFError:
            os._exit(0)  # libraries call what is left at the end a leak
        error = None
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as child:
            try:
                child.submit(exec, program, {}).result()
            except Exception:
                error = traceback.format_exc()
        requests.send(error)
