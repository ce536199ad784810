"""Whether calls of many clients on one server harm each other: plain, steered, conditional, scored, read, broken off.

    steerlab serve MODEL --layers 1,2 --allow-vectors --dtype float32 --port 8000
    python benchmarks/serving_load.py MODEL http://127.0.0.1:8000 --pid PID_OF_THE_SERVER

Every answer is compared with what a TransformerLens engine gives, which has seen no other request. `--poison` names
token ids whose embeddings are not finite: some calls hold one of them, and must end with an error. With `--pid` the
memory of the server's processes is measured after the first fifth and at the end.
"""

import argparse
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np
import psutil
import torch

import steerlab as sl

GREEDY = sl.SamplingPolicy.greedy()
LENGTHS = (9, 40, 99)
TARGETS = [[[11, 12], [13]], [[14, 15, 16]]]
KINDS = ("plain", "steered", "conditional", "scored", "read", "broken off", "plain over OpenAI", "poisoned")


def main() -> None:
    """Runs the check; the exit status says whether it held."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("url")
    parser.add_argument("--api-key")
    parser.add_argument("--pid", type=int)
    parser.add_argument("--poison", type=int, nargs="*", default=[])
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--clients", type=int, default=32)
    options = parser.parse_args()
    raise SystemExit(0 if Load(options).run() else 1)


class Load:
    """The requests, and what is expected of each.

    Args:
        options: of the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.first = sl.RemoteEngine(options.url, api_key=options.api_key)
        d_model, layers = self.first.info.d_model, self.first.traits.layers
        draws = torch.Generator().manual_seed(0)
        vectors = [
            sl.SteeringVector.from_tensor(torch.randn(d_model, generator=draws), layer=layer)
            for layer in (layers[0], layers[-1])
        ]
        self.steered = sl.Plan(sl.add(vectors[0], dose=1.0, where=sl.where.all()), sl.ablate(vectors[1]))
        self.never = sl.Plan(sl.add(vectors[0], dose=1.0, when=sl.when(vectors[0], above=1e9)))
        self.prompts = [[7 + (11 * i + k) % 300 for i in range(length)] for k, length in enumerate(LENGTHS)]
        with sl.load(options.model, device="cpu") as fresh:
            ask = {"policy": GREEDY, "max_new_tokens": 12}
            self.plain = [row.token_ids for row in fresh.generate(self.prompts, **ask)]
            self.edited = [row.token_ids for row in fresh.generate(self.prompts, plan=self.steered, **ask)]
            self.scores = fresh.score(self.prompts[:2], TARGETS, plan=self.steered).log_prob
            self.read = fresh.capture([self.prompts[2]], layers=layers[-1], plan=self.steered)[layers[-1]]
        self.served = self.first.described["model"]["name"]
        self.found: Counter[tuple[str, bool]] = Counter()

    def run(self) -> bool:
        """Whether every request got the answer that it should."""
        started, count = time.perf_counter(), self.options.requests
        with ThreadPoolExecutor(self.options.clients) as pool:
            answers = list(pool.map(self.ask, range(count // 5)))
            before = self.memory()
            answers += pool.map(self.ask, range(count // 5, count))
        after = self.memory()
        for kind, is_right in answers:
            self.found[kind, is_right] += 1
        print(f"{count} requests by {self.options.clients} clients in {time.perf_counter() - started:.0f} s")
        for kind in KINDS:
            right, wrong = self.found[kind, True], self.found[kind, False]
            print(f"  {kind}: {right} as expected, {wrong} not")
        if self.options.pid is not None:
            print(f"memory: {before / 2**20:.0f} MiB after a fifth, {after / 2**20:.0f} MiB at the end")
        return all(is_right for _, is_right in answers)

    def ask(self, index: int) -> tuple[str, bool]:
        """One request: its kind, and whether its answer was right."""
        kind, k = KINDS[index % len(KINDS)], index % len(self.prompts)
        if kind == "poisoned" and not self.options.poison:
            kind = "plain"
        with sl.RemoteEngine(self.options.url, api_key=self.options.api_key) as client:
            return kind, self.answered(client, kind, k, index)

    def answered(self, client: Any, kind: str, k: int, index: int) -> bool:
        """Whether the answer to one request is what it should be."""
        prompt, ask = self.prompts[k], {"policy": GREEDY, "max_new_tokens": 12}
        if kind == "plain":
            return client.generate([prompt], **ask)[0].token_ids == self.plain[k]
        if kind == "steered":
            return client.generate([prompt], plan=self.steered, **ask)[0].token_ids == self.edited[k]
        if kind == "conditional":
            made = client.generate([prompt], plan=self.never, **ask)
            return made[0].token_ids == self.plain[k] and made.receipts[0].edited == 0
        if kind == "scored":
            found = client.score(self.prompts[:2], TARGETS, plan=self.steered).log_prob
            return bool(np.allclose(found, self.scores, atol=1e-3))
        if kind == "read":
            layer = client.traits.layers[-1]
            found = client.capture([self.prompts[2]], layers=layer, plan=self.steered)[layer]
            return torch.allclose(found, self.read, atol=1e-3, rtol=1e-3)
        if kind == "poisoned":
            token = self.options.poison[index % len(self.options.poison)]
            try:
                client.score([[*prompt[:5], token, *prompt[5:]]], [[[5]]], plan=self.steered)
            except sl.NonFiniteError:
                return True
            return False
        return self.over_http(kind, prompt, self.plain[k])

    def over_http(self, kind: str, prompt: list[int], expected: list[int]) -> bool:
        """A request without a client of ours; one that is broken off has no answer."""
        headers = {"Authorization": f"Bearer {self.options.api_key}"} if self.options.api_key else {}
        if kind == "broken off":
            body = {"prompts": [prompt] * 4, "max_new_tokens": 300, "policy": {"temperature": 1.0}}
            try:
                httpx.post(f"{self.options.url}/steerlab/generate", json=body, headers=headers, timeout=0.3)
            except httpx.TimeoutException:
                return True
            return True  # a fast server was done before
        (model,) = httpx.get(f"{self.options.url}/v1/models", headers=headers, timeout=60).json()["data"]
        body = {"model": model["id"], "prompt": prompt, "temperature": 0.0, "max_tokens": 12, "return_token_ids": True}
        answer = httpx.post(f"{self.options.url}/v1/completions", json=body, headers=headers, timeout=120)
        return answer.json()["choices"][0]["token_ids"] == expected

    def memory(self) -> int:
        """Bytes that the server's processes hold for themselves."""
        if self.options.pid is None:
            return 0
        main = psutil.Process(self.options.pid)
        return sum(one.memory_full_info().uss for one in [main, *main.children(recursive=True)])


if __name__ == "__main__":
    main()
