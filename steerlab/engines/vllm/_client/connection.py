"""The running vLLM behind an engine: its start with steering wired in, commands to its workers, and its shutdown."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from steerlab.core._progress import progress
from steerlab.core.errors import EngineError, InputError
from steerlab.engines.vllm._client.log_file import Log, log_of
from steerlab.engines.vllm._client.plan_cache import PlanCache
from steerlab.engines.vllm._client.processes import be_patient, descendants, end
from steerlab.engines.vllm._client.wiring_check import NOT_LOADED, check_workers
from steerlab.engines.vllm._plugin import register
from steerlab.engines.vllm._wire.config import KEY, SteeringConfig
from steerlab.engines.vllm._wire.packets import METHOD, Answer, command, unpack_answers
from steerlab.engines.vllm._wire.shutdown import GRACE

_OURS = ("logprobs_mode", "generation_config", "runner")


class Connection:
    """A running vLLM whose workers are wired.

    Args:
        llm: the `vllm.LLM`.
        config: what is wired.
        log: where it writes.
        processes: those that it started, to be ended by `close`; None leaves it running.

    Raises:
        InputError, HookPointError: if the engine cannot steer this model, or a feature is on that it cannot work with.
    """

    def __init__(self, llm: Any, config: SteeringConfig, log: Log, processes: Sequence[Any] | None) -> None:
        self.llm: Any = llm
        self.config, self.log = config, log
        self.plans = PlanCache()
        self._lock = threading.Lock()
        self._n_threads = torch.get_num_threads()
        self._is_torn = False
        self._processes = processes
        try:
            self.workers = self._check_wired()
        except BaseException:
            self.close()
            raise

    @classmethod
    def start(cls, path: str, config: SteeringConfig, arguments: Mapping[str, Any]) -> "Connection":
        """Starts vLLM.

        Args:
            path: the model directory.
            config: what to wire.
            arguments: further arguments of `vllm.LLM`.

        Raises:
            InputError, HookPointError: as above.
            EngineError: if vLLM does not start; the message names its log.
        """
        taken = [name for name in _OURS if name in arguments]
        if taken:
            raise InputError(f"{', '.join(taken)} is set by steerlab and cannot be passed to VLLMEngine.")
        log = log_of(name for name, value in arguments.items() if value is not None)
        before = set(descendants())
        with log.starting():
            llm = _start(path, config, arguments)
        return cls(llm, config, log, [process for process in descendants() if process not in before])

    @classmethod
    def adopt(cls, llm: Any, config: SteeringConfig) -> "Connection":
        """A vLLM that the user has started, and ends."""
        return cls(llm, config, Log(), None)

    def _check_wired(self) -> list[dict[str, Any]]:
        """What every worker says of itself."""
        try:
            workers = [header for header, _ in self.ask("describe")]
        except Exception as error:  # whatever crosses the process boundary
            raise InputError(f"{NOT_LOADED} {self.log}.") from error
        return check_workers(workers, self.config)

    @contextlib.contextmanager
    def one_call(self) -> Iterator[None]:
        """Lets in one thread at a time, with as many threads of torch's as there were when the engine started.

        Torch keeps that number for each thread; vLLM on a CPU, in this process, ends with an error if it differs.
        """
        with self._lock:
            own = torch.get_num_threads()
            torch.set_num_threads(self._n_threads)
            try:
                yield
            finally:
                torch.set_num_threads(own)

    def ask(self, name: str, header: Any = None, arrays: Mapping[str, np.ndarray] | None = None) -> list[Answer]:
        """Sends a command to every worker; their answers in order of rank.

        Raises:
            EngineError: if a worker has died.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        self._check_whole()
        try:
            answers = self.llm.collective_rpc(METHOD, args=command(name, header, arrays))
        except EngineDeadError as error:
            raise EngineError(f"{_DEAD} {self.log}.") from error
        return unpack_answers(answers)

    def run(
        self, prompts: Sequence[Mapping[str, Any]], params: Sequence[Any], what: str, check: Callable[[], None]
    ) -> list[Any]:
        """Runs requests; their outputs in order.

        Args:
            prompts: as vLLM takes them, requested one by one.
            params: one for each, requested likewise.
            what: names the call, on a bar that a terminal or a notebook shows once two seconds have gone by.
            check: called where the call may be interrupted.

        Raises:
            EngineError: if a worker dies on the way, or an earlier call was cut off.
            InputError: if vLLM refuses requests, as one whose generation is paused does.
        """
        from vllm.v1.engine.exceptions import EngineDeadError

        self._check_whole()
        engine = self.llm.llm_engine
        outputs: list[Any] = []
        try:
            self.llm.enqueue(prompts, params, use_tqdm=False)
            with progress(len(prompts), what) as bar:
                while engine.has_unfinished_requests():
                    self._await_output(check)
                    finished = [output for output in engine.step() if output.finished]
                    outputs += finished
                    bar.update(len(finished))
        except EngineDeadError as error:
            raise EngineError(f"{_DEAD} {self.log}.") from error
        _check_accepted(outputs)
        return sorted(outputs, key=lambda output: int(output.request_id))

    def _await_output(self, check: Callable[[], None]) -> None:
        """Waits until vLLM's own step need not: an interrupt then takes effect at once."""
        check()
        arrived = getattr(self.llm.llm_engine.engine_core, "outputs_queue", None)
        if arrived is None:  # the engine is in this process, and works within the step
            return
        with arrived.not_empty:
            while not arrived.queue:
                arrived.not_empty.wait(_PATIENCE)
                check()

    @property
    def pass_size(self) -> tuple[int, int]:
        """How many tokens, and how many requests, go through the model at once."""
        scheduler = self.vllm_config.scheduler_config
        return scheduler.max_num_batched_tokens, scheduler.max_num_seqs

    def abandon(self, rows: Sequence[str]) -> None:
        """Ends the requests that an interrupted call has left in the engine."""
        with contextlib.suppress(Exception):  # the caller must see the first error
            engine = self.llm.llm_engine
            engine.abort_request(list(engine.output_processor.request_states), internal=True)
            self.ask("forget", list(rows))
            engine.reset_prefix_cache()  # it names blocks that were to be filled, and may not have been

    def give_up(self) -> None:
        """Notes that a message to the engine may have been cut off."""
        self._is_torn = True

    def _check_whole(self) -> None:
        if self._is_torn:
            raise EngineError(_TORN)

    @property
    def vllm_config(self) -> Any:
        """The configuration that vLLM arrived at."""
        return self.llm.llm_engine.vllm_config

    def close(self) -> None:
        """Ends the workers and waits for them; one that hangs is killed. What was adopted goes on running."""
        if self._processes is None:
            self.llm = None
            return
        core = self.llm.llm_engine.engine_core
        in_process = hasattr(core, "engine_core")
        core.shutdown(timeout=GRACE)
        self.llm = None
        end(self._processes)
        if in_process:
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()


def _check_accepted(outputs: Sequence[Any]) -> None:
    """Checks that vLLM, from 0.33 on, has refused no request."""
    refused = [output.error for output in outputs if getattr(output, "error", None) is not None]
    if refused:
        raise InputError(f"vLLM refused {len(refused)} of {len(outputs)} requests: {refused[0].message}")


def _start(path: str, config: SteeringConfig, arguments: Mapping[str, Any]) -> Any:
    be_patient()
    register()
    from vllm import LLM

    return LLM(
        model=path,
        logprobs_mode="raw_logprobs",
        generation_config="vllm",
        **{**arguments, "additional_config": {**(arguments.get("additional_config") or {}), KEY: config.to_json()}},
    )


_PATIENCE = 0.2
"""Seconds after which an interrupt is looked for."""

_TORN = (
    "A call on this engine was interrupted twice, and what was cut off may have been half a message to vLLM. Close it "
    "and start a new one; a single interrupt ends a call between two messages to the engine."
)
_DEAD = (
    "vLLM's engine has died: one of its worker processes failed or was killed. The requests of this call are lost. "
    "Close this engine and start a new one."
)
