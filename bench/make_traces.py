"""Makes the length traces that bench/headline.py draws: lengths in model tokens, kept in the repository.

    python bench/make_traces.py [--folder bench/traces]

`study` is regime A of the scheduling study on 4 ranks, `predictable` has four fifths of the variance of
log-lengths between prompts and about a third of the static group's worker time idle. Each has two passes to
learn from and one that is measured. The last line is one JSON object.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from flexfloor.simulate.traces import REGIMES, Trace, generate

NUM_STEPS, NUM_PASSES, SEEDS = 8, 3, (0, 1, 2)
STUDY = replace(REGIMES["A"], num_ranks=4, num_prompts_per_step=16)
KINDS = {
    "study": STUDY,
    "predictable": replace(STUDY, median_tokens=900.0, runaway_share=0.003).with_prompt_share(0.8),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent / "traces")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    idle = {}
    for kind, regime in KINDS.items():
        for seed in SEEDS:
            trace = generate(regime, num_steps=NUM_STEPS, num_passes=NUM_PASSES, seed=seed)
            path = folder / f"{kind}-{seed}.json"
            path.write_text(json.dumps(as_json(trace), separators=(",", ":")) + "\n")
            idle[path.stem] = round(static_idle_share(trace), 3)
    print(json.dumps({"static_tail_idle_share": idle}))


def as_json(trace: Trace) -> dict[str, object]:
    return {
        "name": trace.name,
        "cap_tokens": trace.cap_tokens,
        "prompt_tokens": trace.prompt_tokens.tolist(),
        "lengths": trace.lengths.tolist(),
    }


def static_idle_share(trace: Trace) -> float:
    """Of a static group with round robin in data order, if every iteration took as long."""
    busy = total = 0
    for step in np.split(trace.lengths[-1], NUM_STEPS):
        lengths = step.reshape(-1)
        ends = [int(lengths[rank :: STUDY.num_ranks].max()) for rank in range(STUDY.num_ranks)]
        busy, total = busy + sum(ends), total + STUDY.num_ranks * max(ends)
    return 1.0 - busy / total


if __name__ == "__main__":
    main()
