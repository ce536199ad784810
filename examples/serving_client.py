"""Steering by request, with the `openai` client, against a running `steerlab serve`.

steerlab serve smollm2-135m --layers 14 --vectors vectors/sentiment --port 8000
python examples/serving_client.py --url http://127.0.0.1:8000
"""

import argparse
from typing import Any

import httpx
import openai


def main() -> None:
    """Asks for one continuation unsteered, and steered both ways along the first vector that can be used."""
    parser = argparse.ArgumentParser(description="Steer by request with the openai client.")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--key", default="EMPTY", help="the server's API key")
    parser.add_argument("--prompt", default="The food at this place was")
    parser.add_argument("--strength", type=float, default=0.15, help="dose, or coef with --coef")
    parser.add_argument("--coef", action="store_true", help="take the strength as a raw coefficient")
    options = parser.parse_args()
    client = openai.OpenAI(base_url=f"{options.url}/v1", api_key=options.key)
    vector = usable_vector(options.url, options.key)
    unit = "coef" if options.coef else "dose"
    for factor in (0.0, 1.0, -1.0):
        edit = {"vector": vector["hash"], unit: factor * options.strength}
        text, receipt = complete(client, options, edit if factor else None)
        print(f"{unit} {factor * options.strength:+.2f}  {text!r}")  # noqa: T201
        if receipt:
            (edited,) = receipt["completions"][0]["edits"]
            print(f"            {edited['edited']} tokens edited at {edited['hook_point']}")  # noqa: T201


def usable_vector(url: str, key: str) -> dict[str, Any]:
    """The first vector on the server that its model and layers can use."""
    headers = {"Authorization": f"Bearer {key}"}
    offered = httpx.get(f"{url}/steerlab/vectors", headers=headers).raise_for_status().json()["vectors"]
    return next(vector for vector in offered if vector["unusable_because"] is None)


def complete(client: openai.OpenAI, options: Any, edit: dict[str, Any] | None) -> tuple[str, dict[str, Any]]:
    """A greedy continuation and, if it was steered, the receipt of what was edited."""
    body = {} if edit is None else {"steering": {"edits": [edit]}}
    model = client.models.list().data[0].id
    answer = client.completions.create(
        model=model, prompt=options.prompt, max_tokens=24, temperature=0.0, extra_body=body
    )
    if edit is None:
        return answer.choices[0].text, {}
    headers = {"Authorization": f"Bearer {options.key}"}
    receipt = httpx.get(f"{options.url}/steerlab/receipts/{answer.id}", headers=headers).raise_for_status().json()
    return answer.choices[0].text, receipt


if __name__ == "__main__":
    main()
