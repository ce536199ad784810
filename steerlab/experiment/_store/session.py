"""A session: the engine of an experiment, its run directory, and whether the two belong together."""

import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from steerlab.core._characters import check_whole
from steerlab.core._json import json_text
from steerlab.core._numbers import shown
from steerlab.core._seeds import check_single_seed
from steerlab.core.engine import Engine, ModelInfo
from steerlab.core.errors import InputError, ModelNotFoundError, RunError, SteerlabError
from steerlab.engines.loading import BACKENDS, load
from steerlab.experiment._store.cells import Cells
from steerlab.experiment._store.fingerprint import (
    Fingerprint,
    engine_versions,
    expected_device,
    numeric_options,
)
from steerlab.experiment._store.inputs import Inputs
from steerlab.experiment._store.locking import RunLock
from steerlab.experiment._store.looks import Looks
from steerlab.experiment._store.run_folder import RUN_FILE, RunFolder, read_json, refuse_foreign
from steerlab.steering.extraction.extract import library_versions

FORMAT = 2
# What must agree for a run to be continued; each with how to say it.
_CONFIGURATION = {"weights_hash": "model weights", "backend": "backend", "seed": "seed", "dtype": "dtype"}


class Session:
    """Engine, run directory and records of one experiment.

    Nothing is written before the first measurement (`open`), and the engine loads when something must be measured.

    Attributes:
        name: of the experiment.
        backend: `lens` or `vllm`; of another engine, what it calls itself.
        seed: of the experiment.
        folder: the run directory; None for memory only.
        cells: finished measurements.
        inputs: plans and data of the measurements.
        looks: how often items were measured on.
        records: what was measured, in order: kind, key, and number within the kind.
        lazy: stands for the engine and loads it when asked for anything.
        overwrite: whether `open` removes a run that lies there.
    """

    def __init__(
        self,
        name: str,
        model: Any,
        *,
        backend: str,
        seed: int,
        path: Path | None,
        overwrite: bool,
        load_options: Mapping[str, Any],
    ) -> None:
        if not isinstance(name, str):
            raise InputError(f"name is a string, got {shown(name)}.")
        if not name or Path(name).name != name or name in (".", ".."):
            raise InputError(f"name becomes a folder name; {name!r} cannot be one.")
        check_whole(name, "The name", InputError)
        if not isinstance(model, str | Path | Engine):
            raise InputError(f"model is a name, a directory or an engine, got {type(model).__name__}.")
        self._engine: Engine | None = None if isinstance(model, str | Path) else model
        if self._engine is not None:
            _check_unloaded(self._engine, backend, load_options)
        self.owns_engine = self._engine is None
        self.name = name
        self.backend = backend if self._engine is None else self._engine.traits.backend
        self.seed = check_single_seed(seed)
        self.model, self.load_options = model, dict(load_options)
        self.folder = None if path is None else RunFolder(path)
        self.cells, self.inputs = Cells(self.folder), Inputs(self.folder)
        self.looks = Looks(self.folder, self.inputs, self.cells)
        self.records: list[dict[str, Any]] = []
        self.lazy: Any = _LazyEngine(self)
        self._fingerprint: Fingerprint | None = None
        self._lock: RunLock | None = None
        self._finalizer: Any = None
        self.overwrite = overwrite
        self._stored: dict[str, Any] = {}
        self._written: tuple[int, ...] | None = None
        if self.folder is not None and (self.folder.path / RUN_FILE).exists() and not overwrite:
            self._continue()

    # --- the engine ------------------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """The engine, loaded at first use.

        Raises:
            RunError: if its model is not the one the run directory was measured with.
        """
        if self._engine is None:
            self._engine = _load(self.model, self.backend, self.load_options)
            self._fingerprint = None
            self._check(self.fingerprint)
        return self._engine

    @property
    def loaded(self) -> bool:
        """Whether the engine is there already."""
        return self._engine is not None

    @property
    def fingerprint(self) -> Fingerprint:
        """What the numbers are computed with; known without loading the model if the run directory knows it."""
        if self._fingerprint is None and self._engine is None:
            self._fingerprint = self._known_fingerprint()
        if self._fingerprint is None:
            options = self.load_options if self.owns_engine else {}
            self._fingerprint = Fingerprint.of(self.engine, options)
        return self._fingerprint

    @property
    def info(self) -> ModelInfo:
        return self.fingerprint.info

    @property
    def engine_hash(self) -> str:
        """Hash of what the numbers are computed with."""
        return self.fingerprint.hash

    def median_norm(self, layer: int, site: str = "resid_post") -> float:
        """Median norm of the stream at a hook point; loads the engine."""
        return self.engine.median_norm(layer, site)

    def _known_fingerprint(self) -> Fingerprint | None:
        """The stored fingerprint, if the same model with the same libraries would run now."""
        if not self._stored.get("fingerprint"):
            return None
        stored = Fingerprint.from_json(self._stored["fingerprint"])
        same_libraries = dict(stored.versions) == engine_versions(self.backend)
        same_options = dict(stored.options) == numeric_options(self.load_options)
        same_device = stored.device == expected_device(self.load_options)
        same_weights = stored.info.weights_hash == self._weights_hash()
        return stored if same_libraries and same_options and same_device and same_weights else None

    def _weights_hash(self) -> str | None:
        """Hash of the weights that would be loaded; None if they cannot be had."""
        from steerlab.models import resolve, weights_hash

        try:
            return weights_hash(resolve(str(self.model), revision=self.load_options.get("revision")).path)
        except ModelNotFoundError:
            return None

    # --- the run directory -----------------------------------------------------------------------------------------

    @property
    def path(self) -> Path:
        """The run directory.

        Raises:
            RunError: if the experiment is kept in memory only.
        """
        if self.folder is None:
            raise RunError("This experiment is kept in memory only (root=None); give it a root to write it.")
        return self.folder.path

    def open(self, *, measuring: bool = True) -> None:
        """Makes the run directory this experiment's to write, and states in it what it holds.

        Args:
            measuring: the model's identity is needed, so that another model never adds to what is measured.

        Raises:
            RunError: if another process writes it, or it holds a run of another configuration.
        """
        if self.folder is None or self._lock is not None:
            return
        path = self.folder.path
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RunError(
                f"The run directory {path} cannot be made: {error.strerror or error}. Choose another root, or keep "
                "everything in memory with root=None."
            ) from error
        lock = RunLock(path)
        try:
            self._take_over(path)
            self.folder.repair()
            if measuring:
                self.fingerprint  # noqa: B018  known before anything is written
            self.write_run()
        except BaseException:
            lock.release()
            raise
        self._lock = lock
        self._finalizer = weakref.finalize(self, lock.release)

    def save(self, *, overwrite: bool) -> Path:
        """Makes sure that the run directory is there; with `overwrite` also where another configuration's run lies."""
        path = self.path
        try:
            self.open(measuring=False)
        except RunError:
            if not overwrite:
                raise
            self.overwrite = True
            self.open(measuring=False)
        return path

    def _take_over(self, path: Path) -> None:
        """What another experiment of this process has written in the meantime counts; what differs is refused."""
        assert self.folder is not None
        if not (path / RUN_FILE).exists():
            if self.overwrite:
                refuse_foreign(self.folder)
            return
        if self.overwrite:
            self.folder.clear()
            self.looks.forget()
            self.overwrite, self._stored, self.records = False, {}, []
            return
        self._continue()
        self._check(self.fingerprint)

    def _continue(self) -> None:
        stored = read_run(self.path)
        _refuse_differences(self.path, _configuration(stored), self._own_configuration())
        self._stored, self.records = stored, list(stored["records"])

    def refresh(self) -> None:
        """Takes in what another experiment of this process has recorded in the same run directory."""
        if self.folder is None or self._lock is None:
            return
        stamp = _stamp(self.folder.path / RUN_FILE)
        if stamp is not None and stamp != self._written:  # else it is as this experiment wrote it
            self.records = list(read_run(self.folder.path)["records"])

    def _check(self, found: Fingerprint) -> None:
        if self._stored:
            own = {"weights_hash": found.info.weights_hash, "dtype": found.info.dtype}
            _refuse_differences(self.path, _configuration(self._stored), own)

    def _own_configuration(self) -> dict[str, Any]:
        """What is known of this experiment's configuration without loading its model."""
        known: dict[str, Any] = {"backend": self.backend, "seed": self.seed}
        if self._engine is not None:
            return known | {"weights_hash": self._engine.info.weights_hash, "dtype": self._engine.info.dtype}
        dtype = self.load_options.get("dtype", "float32" if self.backend == "lens" else None)
        return known if dtype in (None, "auto") else known | {"dtype": str(dtype).removeprefix("torch.")}

    def stated(self) -> dict[str, Any]:
        """What the numbers are measured with, as far as it is known without loading the model."""
        known = self._fingerprint or (Fingerprint.of(self._engine, {}) if self._engine is not None else None)
        stored = _configuration(self._stored) if self._stored else {}
        configuration = {"weights_hash": None, "dtype": None} | stored | self._own_configuration()
        if known is not None:
            configuration |= {"weights_hash": known.info.weights_hash, "dtype": known.info.dtype}
        return configuration | {
            "model": str(self.model) if self.owns_engine else self.engine.info.name,
            "load_options": {key: plain_option(value) for key, value in self.load_options.items()},
            "versions": self._stored.get("versions", library_versions()),
            "engine_hash": None if known is None else known.hash,
        }

    def write_run(self) -> None:
        """Writes `run.json`: name, configuration, versions, and what was measured."""
        if self.folder is None:
            return
        info = self._fingerprint.info if self._fingerprint is not None else None
        configuration = self._own_configuration()
        if info is not None:
            configuration |= {"weights_hash": info.weights_hash, "dtype": info.dtype}
        stated = {
            "format": FORMAT,
            "name": self.name,
            "model": str(self.model) if self.owns_engine else self.engine.info.name,
            "backend": self.backend,
            "seed": self.seed,
            "load_options": {key: plain_option(value) for key, value in self.load_options.items()},
            "configuration": _configuration(self._stored) | configuration if self._stored else configuration,
            "fingerprint": self._stored.get("fingerprint") if info is None else self.fingerprint.to_json(),
            "versions": library_versions(),
            "records": self.records,
        }
        self._stored = stated
        self._written = _stamp(self.folder.write(RUN_FILE, json_text(stated)))

    def number(self, kind: str, key: str) -> tuple[int, bool]:
        """The number of a record within its kind, and whether it is new."""
        self.refresh()
        of_kind = [record["key"] for record in self.records if record["kind"] == kind]
        return (of_kind.index(key), False) if key in of_kind else (len(of_kind), True)

    def record(self, kind: str, key: str) -> None:
        """States that a record is whole; its files are written before."""
        number, new = self.number(kind, key)
        if new:
            self.records.append({"kind": kind, "key": key, "number": number})
            self.write_run()

    def close(self) -> None:
        """Gives the run directory back, and frees the engine if this experiment loaded it."""
        if self._finalizer is not None:
            self._finalizer()
        self._lock = self._finalizer = None
        if self.owns_engine and self._engine is not None:
            self._engine.close()
            self._engine = None


class _LazyEngine:
    """Stands for a session's engine; anything asked of it loads the engine first."""

    def __init__(self, session: Session) -> None:
        self._session = weakref.ref(session)

    def __getattr__(self, name: str) -> Any:
        session = self._session()
        if session is None:
            raise AttributeError(f"{name}: the experiment that this engine belonged to is gone")
        return getattr(session.engine, name)


def _stamp(path: Path) -> tuple[int, ...] | None:
    """What changes when a file is written anew; None if it is not there."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_ino, found.st_mtime_ns, found.st_size


def read_run(path: Path) -> dict[str, Any]:
    """What a run directory states about itself.

    Raises:
        RunError: if it states nothing, is damaged, or has another format.
    """
    if not (path / RUN_FILE).is_file():
        raise RunError(f"{path} is not a run directory: it has no {RUN_FILE}. An experiment writes one as it measures.")
    run = read_json(path / RUN_FILE)
    if not isinstance(run, dict) or "format" not in run:
        raise RunError(f"The run in {path} is damaged: {RUN_FILE} does not describe a run.")
    if run["format"] != FORMAT:
        raise RunError(f"{path} has run format {run['format']!r}; this version reads {FORMAT}.")
    missing = {"name", "model", "backend", "seed", "load_options", "configuration", "records"} - run.keys()
    if missing:
        raise RunError(f"The run in {path} is damaged: {RUN_FILE} lacks {', '.join(sorted(missing))}.")
    return run


def session_of(path: Path) -> Session:
    """The session of a run directory, opened again.

    Raises:
        RunError: if the directory holds no run, or a file is missing or damaged.
    """
    run = read_run(path)
    stated = {name: run[name] for name in ("backend", "seed", "load_options")}
    try:
        return Session(run["name"], run["model"], path=path, overwrite=False, **stated)
    except RunError:
        raise
    except (SteerlabError, TypeError, AttributeError) as error:
        raise RunError(f"The run in {path} is damaged: {type(error).__name__}: {error}.") from error


def _configuration(run: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in run["configuration"].items() if value is not None}


def _refuse_differences(path: Path, stored: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    differing = [
        f"{words} {stored[name]!r} there, {own[name]!r} here"
        for name, words in _CONFIGURATION.items()
        if name in stored and name in own and stored[name] != own[name]
    ]
    if differing:
        raise RunError(
            f"{path} holds a run of another configuration: {'; '.join(differing)}. Choose another name or root, use "
            "the run's own configuration (Experiment.load opens it so), or replace it with overwrite=True (on the "
            "command line --overwrite)."
        )


def check_backend(backend: str) -> str:
    """The backend itself, if `sl.load` has it.

    Raises:
        InputError: otherwise.
    """
    if backend not in BACKENDS:
        raise InputError(f"Unknown backend {backend!r}; there are: {', '.join(BACKENDS)}.")
    return backend


def _check_unloaded(engine: Engine, backend: str, options: Mapping[str, Any]) -> None:
    """Checks that nothing is stated of how to load an engine that runs already.

    Raises:
        InputError: otherwise; it would have no effect, and the run directory would state it.
    """
    if options:
        raise InputError(
            f"{', '.join(f'{name}=' for name in options)} would be for a model that the experiment loads; this engine "
            f"runs already, in {engine.info.dtype}. Leave out what does not apply, or load the engine with it."
        )
    own = engine.traits.backend
    if backend not in (BACKENDS[0], own):
        raise InputError(f"backend={backend!r}, but the engine given is one of {own!r}; leave backend= out.")


def _load(model: Any, backend: str, options: Mapping[str, Any]) -> Engine:
    if backend not in BACKENDS:  # a run of somebody's own engine, read from its folder
        raise InputError(f"This run was measured on an engine of the backend {backend!r}; pass that engine as model.")
    if backend == "vllm" and "layers" not in options:
        raise InputError(
            "vLLM wires the layers that can be steered when it starts: pass Experiment(…, backend='vllm', layers=[14])."
        )
    return load(model, backend=backend, **options)


def plain_option(value: Any) -> Any:
    """A load option as JSON; what JSON cannot hold becomes text."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, list | tuple | range):
        return [plain_option(item) for item in value]
    if isinstance(value, dict):
        return {str(key): plain_option(item) for key, item in value.items()}
    plain = value is None or isinstance(value, str | int | float | bool)
    return value if plain else str(value).removeprefix("torch.")
