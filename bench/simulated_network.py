"""Schedules of the membership protocol in a simulated network: how many a minute, which faults, which checks.

    python bench/simulated_network.py [--schedules 10000] [--first-seed 0] [--processes 2] [--rules]

Each schedule is drawn from its seed: requests, releases, rejoins, fences and weight updates, under dropped,
repeated, late and reordered messages, partitions, restarts, clock jumps, deaths and hung ranks. A violation
is printed with the shortest story that still shows it. --rules breaks each rule of the protocol on purpose
and says how many schedules it took to find. The last line is JSON.
"""

import argparse
import json
import logging
import sys
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "unit" / "simulated_network"))

from net_checks import INVARIANTS, Violation
from net_rules import RULES, broken
from net_story import drawn
from net_world import World, told, violation_of

SEEDS_AT_ONCE = 50
MAX_SCHEDULES = 10_000


@dataclass
class Tally:
    num_schedules: int = 0
    num_events: int = 0
    cpu_s: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    checked: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)

    def add(self, other: "Tally") -> None:
        self.num_schedules += other.num_schedules
        self.num_events += other.num_events
        self.cpu_s += other.cpu_s
        self.faults += other.faults
        self.checked += other.checked
        self.reached += other.reached
        self.violations += other.violations


def run(seeds: range) -> Tally:
    logging.disable(logging.CRITICAL)
    tally, started_s = Tally(), time.process_time()
    for seed in seeds:
        world = World(drawn(seed))
        try:
            world.run()
        except Violation as violation:
            tally.violations.append(f"seed {seed}: {told(world.story, violation)}")
        status = world.server.membership.status()
        tally.num_schedules += 1
        tally.num_events += world.num_events
        tally.faults += world.faults
        tally.checked += world.checks.num_checked
        tally.checked["progress"] += 1
        tally.checked["assertion"] += world.num_events
        tally.reached["recoveries"] += len(status.recoveries)
        tally.reached["changes"] += len(status.last_switches)
        tally.reached["responses"] += len(world.clients.finished)
        tally.reached["responses continued on another rank"] += world.clients.num_continued
        tally.reached["late answers ignored"] += world.clients.num_ignored
        tally.reached.update({f"group ended: {reason}": count for reason, count in world.failures.items()})
    tally.cpu_s = time.process_time() - started_s
    return tally


def schedules_until_found(rule: str) -> int | None:
    logging.disable(logging.CRITICAL)
    with broken(rule):
        for seed in range(MAX_SCHEDULES):
            if violation_of(drawn(seed)) is not None:
                return seed + 1
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--schedules", type=int, default=10_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--rules", action="store_true", help="break each rule on purpose, too")
    options = parser.parse_args()
    last = options.first_seed + options.schedules
    chunks = [
        range(first, min(first + SEEDS_AT_ONCE, last))
        for first in range(options.first_seed, last, SEEDS_AT_ONCE)
    ]
    total, started_s = Tally(), time.monotonic()
    with ProcessPoolExecutor(options.processes) as pool:
        for tally in pool.map(run, chunks):
            for text in tally.violations:
                print(text)
            total.add(tally)
        wall_s = time.monotonic() - started_s
        found = dict(zip(RULES, pool.map(schedules_until_found, RULES), strict=True)) if options.rules else {}
    figures = {
        "schedules": total.num_schedules,
        "first_seed": options.first_seed,
        "processes": options.processes,
        "schedules_per_minute": round(60 * total.num_schedules / wall_s),
        "schedules_per_cpu_minute": round(60 * total.num_schedules / total.cpu_s),
        "events": total.num_events,
        "violations": len(total.violations),
        "faults": dict(total.faults.most_common()),
        "reached": dict(total.reached.most_common()),
        "invariants": {
            name: {"means": text, "checks": total.checked[name]} for name, text in INVARIANTS.items()
        },
        "broken_rules_found_after": found,
    }
    for name in ("faults", "reached", "broken_rules_found_after"):
        print(name)
        for kind, count in figures[name].items():
            print(f"  {count!s:>10}  {kind}")
    print("invariants checked")
    for name, text in INVARIANTS.items():
        print(f"  {total.checked[name]:>10}  {name}: {text}")
    print(json.dumps(figures))
    return 1 if total.violations or None in found.values() else 0


if __name__ == "__main__":
    sys.exit(main())
