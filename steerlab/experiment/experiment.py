"""Experiment: one model, one question, everything measured and kept together."""

from pathlib import Path
from typing import Any

from steerlab.core.errors import RunError, SteerlabError
from steerlab.experiment.kept import Kept
from steerlab.experiment.measurement_methods import Measurements
from steerlab.experiment.session import Session, read_run
from steerlab.experiment.study_methods import Studies
from steerlab.experiment.verify import Verification, verify


class Experiment(Measurements, Studies):
    """Extracts vectors, steers, and measures what changed, against nulls and with its cost.

    Whatever is measured goes to the run directory `root/name` as soon as it is finished. An experiment of the same
    name, model and seed goes on where it stopped: what was measured is read, not measured again, even after a run was
    killed. The model loads when something must be measured.

    Args:
        name: names the run directory.
        model: what `steerlab.load` takes; or an engine, which is used as it is.
        backend: `lens`, or `vllm` (then give `layers=`, those that plans edit).
        seed: of controls, bootstrap and sampling.
        root: folder of the run directory; None keeps everything in memory.
        overwrite: start anew: at the first measurement, a run that lies there is removed.
        **load_options: passed to `steerlab.load` or `steerlab.VLLMEngine`, e.g. dtype.

    Attributes:
        results: everything measured so far, by kind.

    Raises:
        InputError: for a name that is no folder name, or an unknown backend.
        RunError: if the run directory holds a run of another configuration, or a damaged one.

    Examples:
        >>> exp = sl.Experiment("first", model=engine, root="runs")
        >>> exp
        Experiment('first', 0 effects, 'runs/first')
    """

    def __init__(
        self,
        name: str,
        model: Any = "smollm2-135m",
        *,
        backend: str = "lens",
        seed: int = 0,
        root: str | Path | None = "runs",
        overwrite: bool = False,
        **load_options: Any,
    ) -> None:
        path = None if root is None else Path(root) / str(name)
        options = {"backend": backend, "seed": seed, "path": path, "overwrite": overwrite}
        super().__init__(Session(name, model, load_options=load_options, **options))

    def __enter__(self) -> "Experiment":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = "in memory" if self._session.folder is None else repr(str(self.path))
        return f"Experiment({self.name!r}, {len(self.results.effects)} effects, {place})"

    def save(self, *, overwrite: bool = False) -> Path:
        """Makes sure that the run directory is there. Measurements write themselves; this is for one without any.

        Args:
            overwrite: replace a run of another configuration.

        Returns:
            The run directory.

        Raises:
            RunError: if the directory holds another configuration's run and `overwrite` is false, or another process
                is writing it.

        Examples:
            >>> exp.save() == exp.path
            True
        """
        path = self._session.path
        try:
            self._session.open(measuring=False)
        except RunError:
            if not overwrite:
                raise
            self._session.overwrite = True
            self._session.open(measuring=False)
        return path

    @classmethod
    def load(cls, path: str | Path) -> "Experiment":
        """Opens a run directory; the model itself loads only if it is used.

        Raises:
            RunError: if the directory holds no run, or a file is missing or damaged.

        Examples:
            >>> loaded = sl.Experiment.load(exp.path)
            >>> len(loaded.effects) == len(exp.effects)
            True
        """
        path = Path(path)
        run = read_run(path)
        found = cls.__new__(cls)
        try:
            session = Session(
                run["name"],
                run["model"],
                backend=run["backend"],
                seed=run["seed"],
                path=path,
                overwrite=False,
                load_options=run["load_options"],
            )
        except RunError:
            raise
        except (SteerlabError, TypeError, AttributeError) as error:
            raise RunError(f"The run in {path} is damaged: {type(error).__name__}: {error}.") from error
        Kept.__init__(found, session)
        return found

    def verify(
        self, *, n: int = 3, seed: int = 0, tolerance: float | None = None, strict: bool = False
    ) -> Verification:
        """Checks the run: every file against the manifest, inputs and cells against their names, n cells by rerun.

        Args:
            n: cells to measure again; 0 needs no model.
            seed: of the choice of cells.
            tolerance: the largest difference a repeated figure may show, in nats; 1e-3 in float32 if None.
            strict: raise if a check fails.

        Returns:
            A `Verification`: `.ok`, `.table` and `.failures`; printed, it says what failed.

        Raises:
            RunError: with `strict`, if a check fails.

        Examples:
            >>> exp.verify(n=1).ok
            True
        """
        found = verify(self._session, n=n, seed=seed, tolerance=tolerance)
        if strict and not found.ok:
            raise RunError(str(found))
        return found

    def configuration(self) -> dict[str, Any]:
        """What this experiment is measured with.

        Returns:
            `model`, `backend`, `seed`, `weights_hash`, `dtype`, `load_options`, `versions`, `engine_hash`.

        Examples:
            >>> exp.configuration()["backend"]
            'lens'
        """
        return self._session.stated()

    def report(self, path: str | Path | None = None) -> Path:
        """Writes one self-contained HTML page: verdict, figures, tables, receipts, provenance.

        Args:
            path: where to; `report.html` in the run directory by default.

        Returns:
            The path written.

        Raises:
            RunError: if nothing has been measured yet.

        Examples:
            >>> exp.report().name
            'report.html'
        """
        from steerlab.experiment.report import write_report

        if not self.results:
            raise RunError("There is nothing to report yet; measure something first, e.g. an effect.")
        return write_report(self, self.path / "report.html" if path is None else Path(path))

    def close(self) -> None:
        """Gives the run directory to other processes, and frees the model if this experiment loaded it.

        Measuring on is possible; it takes both again.

        Examples:
            >>> exp.close()
        """
        self._session.close()
