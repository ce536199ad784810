"""Where prompts come from: registered sets, JSON-lines files, and the Hugging Face `datasets` library."""

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from steerlab.core._numbers import check_integer
from steerlab.core._records import field, read_jsonl
from steerlab.core.errors import BackendMissingError, DataError
from steerlab.sequences._arithmetic import arithmetic_problems, plain_prompt, r1_prompt

DatasetFunction = Callable[[str], Sequence[Mapping[str, Any]]]
"""From a split's name to its rows; each has a `prompt`, and an `answer` where one is known."""

_QUESTION_FIELDS = ("prompt", "question", "problem", "text")
_ANSWER_FIELDS = ("answer", "solution", "target")
_PATIENCE = 2.0  # seconds for the hub to answer
_NO_TEXTS = (
    "Check the name and the configuration; where the hub cannot be reached, name a local folder of the data set's "
    "files, or load it once on a computer that reaches it and copy the library's cache (HF_HOME)."
)


def register_dataset(name: str, fn: DatasetFunction) -> None:
    """Makes a data set known to `sample_prompts` under a name; an earlier one of that name is replaced.

    Args:
        name: the name.
        fn: from a split's name to rows, each with a `prompt` and, where one is known, an `answer`.

    Examples:
        >>> register_dataset("greetings", lambda split: [{"prompt": "Hello,"}, {"prompt": "Good morning,"}])
        >>> load_examples("greetings", "train")[0]["prompt"]
        'Hello,'
    """
    if not callable(fn):
        raise DataError(f"register_dataset takes a function from a split to rows, got {type(fn).__name__}.")
    _REGISTRY[name] = fn


def registered_datasets() -> list[str]:
    """The names known to `sample_prompts` besides files and the `datasets` library."""
    return sorted(_REGISTRY)


def load_examples(dataset_name: str, split: str) -> list[dict[str, Any]]:
    """Every row of a split, each with its `prompt`.

    Raises:
        DataError: for a data set, a split or a row that cannot be used.
        BackendMissingError: for a name that only the `datasets` library could know, if it is not installed.
    """
    if dataset_name in _REGISTRY:
        found = _call(dataset_name, split)
    elif str(dataset_name).endswith(".jsonl"):
        found = _from_file(Path(dataset_name), split)
    else:
        found = _from_library(dataset_name, split)
    rows = [_with_prompt(dict(row), f"row {k} of {dataset_name} ({split})") for k, row in enumerate(found)]
    if not rows:
        raise DataError(f"{dataset_name} has no rows in split {split!r}.")
    return rows


def sample_examples(
    dataset_name: str, split: str, num_prompts: int, seed: int, *, at_most: bool = False
) -> list[dict[str, Any]]:
    """Rows drawn without replacement.

    Args:
        dataset_name: see `load_examples`.
        split: the split.
        num_prompts: how many.
        seed: of the draw.
        at_most: take all rows if there are fewer.

    Raises:
        DataError: if there are fewer rows, unless `at_most`.
    """
    rows = load_examples(dataset_name, split)
    num_prompts = check_integer(num_prompts, "num_prompts", least=1, error=DataError)
    if num_prompts > len(rows) and not at_most:
        raise DataError(
            f"{dataset_name} has {len(rows)} rows in split {split!r}, fewer than the {num_prompts} asked for."
        )
    chosen = np.random.default_rng(seed).permutation(len(rows))[:num_prompts]
    return [rows[i] for i in chosen]


class PoolPrompts(list[str]):
    """Prompts drawn with replacement from a pool of examples; a list, with what it was made of.

    Attributes:
        examples: the data set's row of each prompt.
        indices: which row of the pool each one is, int64.
    """

    def __init__(self, pool: Sequence[dict[str, Any]], indices: np.ndarray) -> None:
        self.examples, self.indices = [pool[i] for i in indices], indices
        super().__init__(example["prompt"] for example in self.examples)


def draw_from_pool(dataset_name: str, split: str, n_draws: int, max_prompts_pool: int | None, seed: int) -> PoolPrompts:
    """Prompts drawn uniformly and independently from a pool, with a generator of its own.

    Args:
        dataset_name: see `load_examples`.
        split: the split.
        n_draws: how many.
        max_prompts_pool: rows in the pool at most, chosen as `sample_examples` does; None takes the whole split in its
            own order.
        seed: of pool and draws.
    """
    if max_prompts_pool is None:
        pool = load_examples(dataset_name, split)
    else:
        size = check_integer(max_prompts_pool, "max_prompts_pool", least=1, error=DataError)
        pool = sample_examples(dataset_name, split, size, seed, at_most=True)
    return PoolPrompts(pool, np.random.default_rng((seed, 1)).integers(0, len(pool), size=n_draws))


def _call(name: str, split: str) -> Sequence[Mapping[str, Any]]:
    try:
        return _REGISTRY[name](split)
    except KeyError as error:
        raise DataError(f"The data set {name!r} has no split {split!r} (its function raised {error!r}).") from error


def _from_file(path: Path, split: str) -> list[dict[str, Any]]:
    """Rows of a file; those that name a split belong to it, those that name none to every split."""
    rows = []
    for place, row in read_jsonl(path):
        if row.get("split", split) == split:
            rows.append(_with_prompt(row, place))
    return rows


def load_texts(dataset_name: str, split: str, *, config: str | None = None, column: str = "text") -> Iterator[str]:
    """The texts of a split of a Hugging Face data set (or of a folder of its files), row after row.

    Args:
        dataset_name: the hub's name, or a local folder.
        split: the split.
        config: the data set's configuration, e.g. `wikitext-2-raw-v1`.
        column: the column that holds the text.

    Raises:
        BackendMissingError: without the `datasets` library.
        DataError: if the data cannot be had, or a row has no text.
    """
    options = {} if config is None else {"name": config}
    rows = _from_library(dataset_name, split, _NO_TEXTS, **options)
    return (_text_of(row, column, f"row {k} of {dataset_name} ({split})") for k, row in enumerate(rows))


def _text_of(row: Mapping[str, Any], column: str, place: str) -> str:
    if not isinstance(row.get(column), str):
        raise DataError(f"{place} has no text in a column {column!r}; its columns are {', '.join(map(str, row))}.")
    return row[column]


def _from_library(path: str, split: str, hint: str = "", **options: Any) -> Sequence[Mapping[str, Any]]:
    hint = hint or f"Registered are {', '.join(registered_datasets())}; a file ends in .jsonl."
    if importlib.util.find_spec("datasets") is None:
        raise BackendMissingError(f"There is no data set {path!r}. {hint} Others need `pip install datasets`.")
    library = importlib.import_module("datasets")
    try:
        with nullcontext() if Path(path).exists() else _offline_without_hub(library):
            return library.load_dataset(path, split=split, **options)
    except Exception as error:
        raise DataError(f"The datasets library cannot load {path!r}, split {split!r}: {error}. {hint}") from error


@contextmanager
def _offline_without_hub(library: Any) -> Iterator[None]:
    """Keeps the library from asking a hub that cannot be reached again and again; what its cache holds still loads."""
    config = getattr(library, "config", None)
    if config is None or getattr(config, "HF_HUB_OFFLINE", False) or _reachable(config.HF_ENDPOINT):
        yield
        return
    import huggingface_hub

    places = [config, huggingface_hub.constants]
    before = [place.HF_HUB_OFFLINE for place in places]
    try:
        for place in places:
            place.HF_HUB_OFFLINE = True
        yield
    finally:
        for place, value in zip(places, before, strict=True):
            place.HF_HUB_OFFLINE = value


def _reachable(endpoint: str) -> bool:
    """Whether something answers there within two seconds."""
    import httpx

    try:
        httpx.head(endpoint, timeout=_PATIENCE)
    except (httpx.HTTPError, OSError):
        return False
    return True


def _with_prompt(row: dict[str, Any], place: str) -> dict[str, Any]:
    """A row with its prompt under `prompt` and its answer, if it has one, under `answer`."""
    source = next((key for key in _QUESTION_FIELDS if row.get(key)), "prompt")
    made = row | {"prompt": field(row, source, place)}
    answer = next((row[key] for key in _ANSWER_FIELDS if row.get(key) is not None), None)
    return made if answer is None else made | {"answer": answer}


def _arithmetic(template: Callable[[str], str], split: str) -> list[dict[str, Any]]:
    return [row | {"prompt": template(row["question"])} for row in arithmetic_problems(split)]


def _gsm8k(split: str) -> list[dict[str, Any]]:
    """The grade-school problems of Cobbe et al. 2021 in the R1-style template; the answer is what follows `####`."""
    rows = _from_library("openai/gsm8k", split, name="main")
    return [
        {
            "question": row["question"],
            "prompt": r1_prompt(row["question"]),
            "answer": row["answer"].rpartition("####")[2].strip(),
        }
        for row in rows
    ]


_REGISTRY: dict[str, DatasetFunction] = {
    "arithmetic": partial(_arithmetic, plain_prompt),
    "arithmetic_r1": partial(_arithmetic, r1_prompt),
    "gsm8k_r1_template": _gsm8k,
}
