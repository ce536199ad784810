"""What the server itself answers: errors in OpenAI's shape, and what it offers under /steerlab/."""

import json
from typing import Any

from steerlab.engines.vllm._server.gateway import Gateway
from steerlab.engines.vllm._server.positions_json import WORDS

PREFIX = "/steerlab"
_KINDS = {
    400: "BadRequestError",
    401: "AuthenticationError",
    404: "NotFoundError",
    413: "RequestEntityTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}


def error_answer(message: str, status: int, field: str | None = "steering") -> dict[str, Any]:
    """An error as OpenAI's clients read it."""
    return {"error": {"message": message, "type": _KINDS[status], "param": field, "code": status}}


async def send_json(send: Any, status: int, content: Any) -> None:
    """Sends a whole answer."""
    body = json.dumps(content, allow_nan=False).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def answer(gateway: Gateway, path: str) -> tuple[int, Any]:
    """Status and content for a path under /steerlab/."""
    what, _, name = path.removeprefix(f"{PREFIX}/").partition("/")
    if what == "receipts" and name:
        found = gateway.book.find(name)
        missing = (
            f"There is no receipt for {name[:80]!r}: no steered request of that id has ended here, or it is long ago."
        )
        return (404, error_answer(missing, 404)) if found is None else (200, found)
    if what == "vectors" and not name:
        return 200, {"vectors": _vectors(gateway)}
    if what == "info" and not name:
        return 200, _info(gateway)
    return 404, error_answer(
        f"{path} is not here; there are describe, vectors, info and receipts/ID under {PREFIX}/, and calls to POST.",
        404,
    )


def _vectors(gateway: Gateway) -> list[dict[str, Any]]:
    maker = gateway.maker
    return [] if maker is None else maker.registry.listing(maker.config, maker.info)


def _info(gateway: Gateway) -> dict[str, Any]:
    maker = gateway.maker
    if maker is None:
        return {"steers": False, "layers": []}
    config, info = maker.config, maker.info
    return {
        "steers": True,
        "model": info.name,
        "weights_hash": info.weights_hash,
        "n_layers": info.n_layers,
        "d_model": info.d_model,
        "layers": list(config.layers),
        "max_directions": config.max_directions,
        "max_runs": config.max_runs,
        "max_token_rules": config.max_token_rules,
        "operators": ["add", "ablate", "clamp", "set"],
        "where": list(WORDS),
    }


class InfoEndpoints:
    """ASGI: answers GET under /steerlab/, to whom the server's API key allows it.

    Args:
        app: what comes after.
        gateway: what is asked about.
        allows: whether a request's headers hold the key.
    """

    def __init__(self, app: Any, gateway: Gateway, allows: Any) -> None:
        self._app, self._gateway, self._allows = app, gateway, allows

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handles one connection."""
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or scope["method"] != "GET" or not path.startswith(f"{PREFIX}/"):
            await self._app(scope, receive, send)
        elif not self._allows(scope):
            await send_json(send, 401, error_answer("This server asks for an API key.", 401))
        else:
            await send_json(send, *answer(self._gateway, path))
