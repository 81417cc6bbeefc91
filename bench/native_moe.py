"""MoE forward of one rank on the CPU: ours against SGLang's own fallback, same weights, same routing.

    python bench/native_moe.py [--num-repeats 30]

The last line is one JSON object; times are medians in microseconds.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

HIDDEN, INTER, NUM_EXPERTS, TOPK = 128, 128, 8, 2
BATCHES_TOKENS = {"decode_4": 4, "decode_16": 16, "prefill_256": 256}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--num-repeats", type=int, default=30)
    num_repeats = parser.parse_args().num_repeats
    enter_cpu_profile()
    result: dict[str, float] = {}
    for name, num_tokens in BATCHES_TOKENS.items():
        ours, theirs = forwards(num_tokens)
        ours_us, theirs_us = median_us(ours, theirs, num_repeats)
        result |= {
            f"{name}_tokens_ours_us": round(ours_us, 1),
            f"{name}_tokens_sglang_us": round(theirs_us, 1),
            f"{name}_tokens_speedup": round(theirs_us / ours_us, 2),
        }
    print(json.dumps({"bench": "native_moe", "num_repeats": num_repeats, **result}))


def enter_cpu_profile() -> None:
    """Start again with the variables of a CPU server: SGLang reads them when it is imported."""
    if "SGLANG_USE_CPU_ENGINE" in os.environ:
        return
    from sglang_patches.cpu import profile
    from sglang_patches.serve_args import parse

    variables = profile.environment(parse(["--device", "cpu"]), os.environ)
    os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **variables})


def forwards(num_tokens: int) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Ours and SGLang's forward of one random batch, after a check that they agree."""
    import torch
    from sglang.srt.layers.moe.fused_moe_native import moe_forward_native
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from sglang_patches.cpu.native_moe import forward_local_experts

    generator = torch.Generator().manual_seed(num_tokens)
    x = torch.randn(num_tokens, HIDDEN, generator=generator)
    weights, ids = torch.randn(num_tokens, NUM_EXPERTS, generator=generator).softmax(-1).topk(TOPK)
    layer = SimpleNamespace(
        num_experts=NUM_EXPERTS,
        w13_weight=torch.randn(NUM_EXPERTS, 2 * INTER, HIDDEN, generator=generator) * 0.1,
        w2_weight=torch.randn(NUM_EXPERTS, HIDDEN, INTER, generator=generator) * 0.1,
    )
    topk, config = StandardTopKOutput(weights, ids, weights), MoeRunnerConfig(activation="silu")

    def ours() -> Any:
        return forward_local_experts(x, weights, ids, layer.w13_weight, layer.w2_weight)

    def theirs() -> Any:
        return moe_forward_native(layer, x, topk, config)

    with torch.inference_mode():
        torch.testing.assert_close(ours(), theirs(), atol=1e-4, rtol=1e-4)
    return ours, theirs


def median_us(ours: Callable[[], Any], theirs: Callable[[], Any], num_repeats: int) -> tuple[float, float]:
    """Medians, taken in turn so that foreign load meets both alike."""
    import torch

    taken: tuple[list[float], list[float]] = ([], [])
    with torch.inference_mode():
        for _ in range(num_repeats):
            for forward, times in zip((ours, theirs), taken, strict=True):
                started_s = time.perf_counter()
                forward()
                times.append((time.perf_counter() - started_s) * 1e6)
    return statistics.median(taken[0]), statistics.median(taken[1])


if __name__ == "__main__":
    main()
