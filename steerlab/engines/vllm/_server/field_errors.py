"""One sentence for a request whose fields vLLM does not accept."""

from typing import Any

from steerlab.engines.vllm._server.answers import error_answer

_MOST = 3


async def refuse(_: Any, error: Any) -> Any:
    """Handles FastAPI's RequestValidationError."""
    from starlette.responses import JSONResponse

    field, sentence = explain(error.errors())
    return JSONResponse(error_answer(sentence, 400, field), status_code=400)


def explain(problems: list[Any]) -> tuple[str | None, str]:
    """The first field that is wrong, and what is wrong with it; a field may be wrong in each of the ways it could be.

    Args:
        problems: as pydantic lists them, or sentences.
    """
    first = problems[0]
    if not isinstance(first, dict):
        return None, f"{first}."
    field = _field(first)
    if field is None:
        return None, "The request's body must be a JSON object; it is sent as `application/json`."
    own = [problem for problem in problems if isinstance(problem, dict) and _field(problem) == field]
    if any(problem["type"] == "missing" for problem in own):
        return field, f"{field}: the field is missing."
    wrongs = list(dict.fromkeys(_wrong(problem["msg"]) for problem in own))
    given = min(own, key=lambda problem: len(problem["loc"]))["input"]
    return field, f"{field}: {', or '.join(wrongs[:_MOST])}; got {given!r:.60}."


def _field(problem: dict[str, Any]) -> str | None:
    loc = [part for part in problem["loc"] if part != "body"]
    return str(loc[0]) if loc else None


def _wrong(message: str) -> str:
    bare = message.removeprefix("Value error, ").rstrip(".")
    return f"{bare[:1].lower()}{bare[1:]}"
