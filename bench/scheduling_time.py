"""How long a step's plan and a release decision take, in CPU seconds of this machine.

    python bench/scheduling_time.py

The last line is one JSON object: seconds of a plan at four sizes, milliseconds of a decision at 1,024
responses on 64 ranks.
"""

import json
import statistics
import time
from collections.abc import Callable

import numpy as np

from flexfloor.config.choices import Placement, StartingSize
from flexfloor.scheduling.clocks import GpuClock
from flexfloor.scheduling.decision import GroupView, RunningResponse
from flexfloor.scheduling.lengths import LengthPrediction
from flexfloor.scheduling.plan import PlannedResponse, plan_step
from flexfloor.scheduling.release import GUARDED, CostBasedRelease

PLANS = ((1024, 16), (4096, 64), (8192, 128), (16384, 256))
"""Responses, ranks."""


def plans_s() -> dict[str, float]:
    return {f"{responses} on {ranks}": plan_s(responses, ranks) for responses, ranks in PLANS}


def plan_s(num_responses: int, num_ranks: int) -> float:
    """CPU seconds of a plan, the median of three."""
    rng = np.random.default_rng(0)
    predictions = {
        f"p{index}": LengthPrediction(
            mean_log=float(7.5 + 0.7 * rng.standard_normal()), sd_log=0.6, cap_share=0.01, cap_tokens=16384
        )
        for index in range(num_responses // 16)
    }
    requests = [
        PlannedResponse(response_id=f"{prompt}/{sample}", prompt_id=prompt, prompt_tokens=200)
        for prompt in predictions
        for sample in range(16)
    ]

    def once() -> None:
        plan_step(
            requests,
            predictions,
            num_ranks=num_ranks,
            placement=Placement.balanced,
            clock=GpuClock(),
            kv_tokens=lambda num_members: 800_000,
            running_limit_per_rank=256,
            price=GUARDED.price,
            wall_budget=0.03,
            floor=num_ranks // 4,
            allowed_sizes=None,
            starting_size=StartingSize.full,
            seed=0,
        )

    return round(statistics.median(cpu_s(once) for _ in range(3)), 3)


def release_decision_ms(
    num_responses: int = 1024, num_ranks: int = 64, samples_per_prompt: int = 16
) -> float:
    """CPU milliseconds of a decision in mid-step, the median of 20 at growing ages.

    Samples of a prompt share its prediction, as they do live; with one each no two responses are alike.
    """
    policy = CostBasedRelease(
        clock=GpuClock(), num_ranks=num_ranks, floor=num_ranks // 4, kv_tokens=lambda num_members: 800_000
    )
    expected = _predictions(num_responses // samples_per_prompt)
    taken = []
    for age in range(20):
        view = _view(expected, num_responses, num_ranks, at_s=10.0 + age, generated_tokens=1000 + 16 * age)
        taken.append(cpu_s(lambda view=view: policy.decide(view)))
    return round(1000 * statistics.median(taken), 2)


def _predictions(num_prompts: int) -> list[LengthPrediction]:
    rng = np.random.default_rng(0)
    return [
        LengthPrediction(mean_log=7.5 + 0.1 * noise, sd_log=0.8, cap_share=0.01, cap_tokens=16384)
        for noise in rng.standard_normal(num_prompts).tolist()
    ]


def _view(
    expected: list[LengthPrediction],
    num_responses: int,
    num_ranks: int,
    *,
    at_s: float,
    generated_tokens: int,
) -> GroupView:
    """Responses dealt over the ranks one by one."""
    by_rank: list[list[RunningResponse]] = [[] for _ in range(num_ranks)]
    for index in range(num_responses):
        prompt = index * len(expected) // num_responses
        response = RunningResponse(
            response_id=str(index),
            prompt_tokens=200 + prompt,
            generated_tokens=generated_tokens,
            prediction=expected[prompt],
        )
        by_rank[index % num_ranks].append(response)
    return GroupView(
        at_s=at_s,
        num_ranks=num_ranks,
        members=tuple(range(num_ranks)),
        responses=tuple(map(tuple, by_rank)),
    )


def cpu_s(work: Callable[[], object]) -> float:
    began_s = time.process_time()
    work()
    return time.process_time() - began_s


if __name__ == "__main__":
    print(
        json.dumps(
            {"bench": "scheduling_time", "plan_s": plans_s(), "release_decision_ms": release_decision_ms()}
        )
    )
