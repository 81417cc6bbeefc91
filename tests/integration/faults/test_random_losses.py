"""Losses at random moments of releases, returns and rollouts. Long: with --full only."""

import random
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from played_group import PlayedServer
from played_ranks import NUM_RANKS, Work

pytestmark = [pytest.mark.integration, pytest.mark.full, pytest.mark.timeout(180)]

POINTS = ("broadcast", "gather", "decode", "prefill", "idle", "prepare", "switch", "recovery", "restored")


@pytest.mark.parametrize("seed", range(30))
def test_random_losses(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    server = PlayedServer(tmp_path)
    try:
        works = {
            rank: [
                Work(f"w{rank}-{place}", 3 + 17 * rank + place, draw.randint(30, 90)) for place in range(2)
            ]
            for rank in range(NUM_RANKS)
        }
        # At least one rank stays, and it is not asked to leave.
        stays, *others = draw.sample(range(NUM_RANKS), NUM_RANKS)
        for own in works.values():
            for work in own:
                server.send(int(work.name[1]), work)
        steps: list[Callable[[], object]] = []
        for rank in others[: draw.randint(1, 2)]:
            point = draw.choice((*POINTS, "", ""))
            steps.append(lambda r=rank, p=point: server.arm("kill", r, p) if p else server.signal(r))  # type: ignore[misc]
        if draw.random() < 0.7:
            leaver = others[-1]
            steps.append(lambda: server.manager.release((leaver,)))
            if draw.random() < 0.5:
                steps.append(lambda: server.manager.rejoin(()))
        draw.shuffle(steps)
        for step in steps:
            threading.Event().wait(draw.uniform(0.0, 0.15))
            step()
        server.assert_whole(works[stays])
        server.wait(lambda: not (server.status().change or server.status().recovering), "settled")
        for rank, own in works.items():
            # An armed fault may hit at any later moment.
            server.wait(
                lambda rank=rank, own=own: (
                    rank in server.status().lost
                    or all(len(server.tokens(work.name)) >= work.length for work in own)
                ),
                f"rank {rank} done or lost",
            )
            server.assert_right_so_far(own)
        again = [Work(f"again{rank}", 5 + rank, 20) for rank in server.status().members]
        for rank, work in zip(server.status().members, again, strict=True):
            server.send(rank, work)
        server.wait(
            lambda: all(
                int(work.name[5:]) in server.status().lost or len(server.tokens(work.name)) >= work.length
                for work in again
            ),
            "the next rollout",
        )
        server.assert_right_so_far(again)
        assert not server.failed.is_set(), server.reason
    finally:
        server.close()
