"""A driver that knows SGLang's HTTP API and nothing of FlexFloor: rollout, pause, new weights, go on.

    python docs/examples/http_driver.py --url http://127.0.0.1:30000 --weights FOLDER [--num-steps 3]

It does what verl's and slime's rollout phases do. Against a server with `--flexfloor-release drained` ranks
that have run out of responses leave the group during each rollout, and are back before the new weights; this
program does not notice. Only the standard library is needed.
"""

import argparse
import json
import random
import time
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

REQUEST_TIMEOUT_S = 600.0


@dataclass(frozen=True, kw_only=True)
class Engine:
    """SGLang's HTTP API, as far as a rollout needs it."""

    url: str
    api_key: str = ""

    def generate(self, prompt: Sequence[int], num_tokens: int, seed: int) -> list[int]:
        """Tokens of one response; no rank is named."""
        sampling = {
            "max_new_tokens": num_tokens,
            "temperature": 1.0,
            "sampling_seed": seed,
            "ignore_eos": True,
        }
        reply = self.post("generate", input_ids=list(prompt), sampling_params=sampling)
        tokens: list[int] = reply["output_ids"]
        return tokens

    def update_weights(self, folder: str, weight_version: str) -> None:
        """Between two rollouts: everything stands still, every rank loads the new weights."""
        self.post("pause_generation", mode="retract")
        self.post("update_weights_from_disk", model_path=folder, weight_version=weight_version)
        self.post("continue_generation")

    def post(self, route: str, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        request = urllib.request.Request(f"{self.url}/{route}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as reply:
            text = reply.read()
        return json.loads(text) if text else None


def run_rollout(engine: Engine, num_responses: int, max_tokens: int, seed: int) -> list[list[int]]:
    """All responses at once; lengths as in reasoning: most are short, some run to the end."""
    draw = random.Random(seed)
    lengths = [
        min(max_tokens, int(draw.lognormvariate(0, 0.9) * max_tokens / 8) + 2) for _ in range(num_responses)
    ]
    prompts = [[4 + draw.randrange(28) for _ in range(6)] for _ in range(num_responses)]
    with ThreadPoolExecutor(num_responses) as pool:
        jobs = [
            pool.submit(engine.generate, prompt, length, seed * num_responses + index)
            for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return [job.result() for job in jobs]


def main(argv: Sequence[str] | None = None) -> list[list[list[int]]]:
    """Returns the responses of each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--weights", required=True, help="checkpoint folder that the server can read")
    parser.add_argument("--api-key", default="", help="of the server, where it has one")
    parser.add_argument("--num-steps", type=int, default=3)
    parser.add_argument("--num-responses", type=int, default=32)
    parser.add_argument("--max-tokens", type=int, default=256)
    options = parser.parse_args(argv)
    engine = Engine(url=options.url, api_key=options.api_key)
    steps = []
    for step in range(options.num_steps):
        started_s = time.monotonic()
        responses = run_rollout(engine, options.num_responses, options.max_tokens, seed=step)
        rollout_s = time.monotonic() - started_s
        # Here a trainer would learn from them and write new weights.
        engine.update_weights(options.weights, weight_version=f"http-{step + 1}")
        num_tokens = sum(map(len, responses))
        print(
            f"step={step} responses={len(responses)} tokens={num_tokens} rollout_s={rollout_s:.2f}",
            flush=True,
        )
        steps.append(responses)
    return steps


if __name__ == "__main__":
    main()
