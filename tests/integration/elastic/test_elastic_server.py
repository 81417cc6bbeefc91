"""Ranks of a real server leave and return; what it answers does not change by it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from rollouts import Answer, Request, assert_same, compare, generate, make_requests, run_elastic, run_static
from server import Server
from shared_server import SharedServer
from sharp_model import sharp_tiny_moe

from flexfloor.membership.client import DriverClient
from flexfloor.membership.endpoint import Endpoint

pytestmark = [pytest.mark.integration, pytest.mark.timeout(600)]

SHORT, LONG = 12, 60


def lengths(order: tuple[int, ...]) -> list[list[int]]:
    """Four responses a rank, so that the ranks run out of work in this order."""
    rows: list[list[int]] = [[] for _ in order]
    for place, rank in enumerate(order):
        longest = SHORT + 24 * place
        rows[rank] = [longest, longest // 2, longest // 3, 5]
    return rows


def num_iterations(server: Server) -> list[int]:
    return [row["num_iterations"] for row in server.counters()]


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (2, 0, 3, 1), (1, 3, 0, 2)])
def test_ranks_leave_in_any_order_and_the_tokens_stay(
    server: Server, client: DriverClient, order: tuple[int, ...]
) -> None:
    for seed in (1, 2):
        requests = make_requests(lengths(order), seed=seed)
        oracle = run_static(server, requests)
        before = num_iterations(server)
        answers, results = run_elastic(server, client, requests)
        assert_same(oracle, answers)
        assert all(result.ok for result in results), results
        assert client.status().members == (order[-1],)
        assert client.rejoin().ok
        taken = [after - b for after, b in zip(num_iterations(server), before, strict=True)]
        # Who leaves earlier takes part in fewer iterations.
        assert [taken[rank] for rank in order] == sorted(taken)
        assert taken[order[0]] < taken[order[-1]]


def test_one_rank_answers_the_same(server: Server, client: DriverClient) -> None:
    requests = [replace(request, dp_rank=2) for request in make_requests(lengths((0, 1, 2, 3)), seed=3)]
    oracle = run_static(server, requests)
    assert client.release([0, 1, 3]).ok
    assert client.status().members == (2,)
    assert_same(oracle, run_static(server, requests))


def test_seeded_samples_stay(server: Server, client: DriverClient) -> None:
    requests = [
        replace(request, seed=100 + index, is_sampled=True)
        for index, request in enumerate(make_requests(lengths((1, 0, 3, 2)), seed=4))
    ]
    oracle = run_static(server, requests)
    assert_same(oracle, run_elastic(server, client, requests)[0])


@pytest.mark.parametrize("away", [(2, 3), (0, 1), (1, 3), (0, 1, 2)])
def test_requests_without_a_rank_go_to_those_who_serve(
    server: Server, client: DriverClient, away: tuple[int, ...]
) -> None:
    requests = [replace(request, dp_rank=None) for request in make_requests(lengths((0, 1, 2, 3)), seed=5)]
    oracle = run_static(server, requests)
    assert client.release(away).ok
    assert_same(oracle, run_static(server, requests))
    assert client.status().members == tuple(rank for rank in range(4) if rank not in away)


def test_a_request_for_a_parked_rank_waits_and_wakes_it(server: Server, client: DriverClient) -> None:
    requests = make_requests([[20], [20], [20], [20]], seed=6)
    oracle = run_static(server, requests)
    assert client.release([0, 3]).ok
    assert_same(oracle, run_static(server, requests))
    assert {0, 3} <= set(client.status().members)


def test_late_work_during_a_release_is_not_lost(server: Server, client: DriverClient) -> None:
    requests = make_requests([[30, 10], [30, 10], [30, 10], [30, 10]], seed=7)
    oracle = run_static(server, requests)
    for _ in range(5):
        with ThreadPoolExecutor(len(requests)) as pool:
            for rank in (1, 2):
                client.submit_release([rank])
            futures = [pool.submit(generate, server, request) for request in requests]
            answers: list[Answer] = [future.result() for future in futures]
        assert_same(oracle, answers)
        assert client.rejoin().ok


def test_the_floor_refuses_with_the_numbers(server: Server, client: DriverClient) -> None:
    result = client.release([0, 1, 2, 3])
    assert not result.ok
    assert "floor" in result.reason
    assert client.status().members == (0, 1, 2, 3)


def test_control_calls_work_at_every_size(server: Server, client: DriverClient) -> None:
    requests = [replace(request, dp_rank=None) for request in make_requests(lengths((0, 1, 2, 3)), seed=8)]
    oracle = run_static(server, requests)
    for away in ([0], [1, 2], [0, 1, 3]):
        assert client.release(away).ok
        assert server.flush_cache()
        assert len(server.counters()) == 4 - len(away)
        assert_same(oracle, run_static(server, requests))
        assert client.rejoin().ok


def test_pausing_brings_everybody_back_first(server: Server, client: DriverClient) -> None:
    requests = [replace(request, dp_rank=None) for request in make_requests(lengths((0, 1, 2, 3)), seed=9)]
    oracle = run_static(server, requests)
    assert client.release([0, 1]).ok
    server.post("pause_generation", mode="retract")
    assert client.status().members == (0, 1, 2, 3)
    server.post("continue_generation")
    assert_same(oracle, run_static(server, requests))
    assert client.release([2]).ok


def test_a_weight_update_by_a_stranger_reaches_ranks_that_were_away(
    server: Server, client: DriverClient, shared_checkpoint: Path
) -> None:
    requests = make_requests(lengths((0, 1, 2, 3)), seed=10)
    oracle = run_static(server, requests)
    assert client.release([0, 2]).ok
    server.post("update_weights_from_disk", model_path=str(shared_checkpoint), weight_version="7001")
    status = client.status()
    assert status.members == (0, 1, 2, 3)
    assert set(status.weight_versions.values()) == {"7001"}
    assert_same(oracle, run_static(server, requests))


def test_new_weights_reach_ranks_that_were_away(
    server: Server, client: DriverClient, shared_checkpoint: Path, tmp_path: Path
) -> None:
    requests = make_requests(lengths((0, 1, 2, 3)), seed=14)
    before = run_static(server, requests)
    other = sharp_tiny_moe(tmp_path / "other", seed=1)
    assert client.release([1, 3]).ok
    server.post("update_weights_from_disk", model_path=str(other), weight_version="7002")
    after = run_static(server, requests)
    assert len(compare(before, after).mismatches) > len(requests) // 2
    # The ranks that were away serve the same weights as those that stayed: moved, every prompt says the same.
    moved = [
        replace(request, dp_rank=(request.dp_rank + 1) % 4)
        for request in requests
        if request.dp_rank is not None
    ]
    assert_same(after, run_static(server, moved))
    assert_same(after, run_elastic(server, client, requests)[0])
    server.post("update_weights_from_disk", model_path=str(shared_checkpoint), weight_version="7003")
    assert_same(before, run_static(server, requests))


def test_the_only_busy_rank_may_be_asked_to_leave(server: Server, client: DriverClient) -> None:
    request = make_requests([[80]], seed=15)[0]
    oracle = generate(server, request)
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, server, request)
        result = client.release([0])
        assert result.ok
        # It drained first: nothing of its response was lost.
        assert_same([oracle], [answer.result()])
    assert client.status().members == (1, 2, 3)


def test_an_aborted_response_lets_its_rank_leave(server: Server, client: DriverClient) -> None:
    request = make_requests([[], [], [400]], seed=16)[0]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, server, request)
        started = server.counters()[2]["num_iterations"]
        wait_until(lambda: server.counters()[2]["num_iterations"] > started + 5)
        released = client.submit_release([2])
        server.post("abort_request", abort_all=True)
        assert len(answer.result().tokens) <= 400
        results = [client.rejoin()]
        results += client.poll()
    assert all(result.ok or "rejoin" in result.reason for result in results), results
    assert released in {result.operation_id for result in results}


def test_an_abort_reaches_the_first_rank_while_it_drains(server: Server, client: DriverClient) -> None:
    first = make_requests([[400], [], []], seed=17)[0]
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(generate, server, first)
        started = server.counters()[0]["num_iterations"]
        wait_until(lambda: server.counters()[0]["num_iterations"] > started + 5)
        released = client.submit_release([0])
        wait_until(lambda: client.status().states[0] == "draining")
        server.post("abort_request", abort_all=True)
        assert len(answer.result().tokens) < 400
    # Counters are asked of the members, whoever drains.
    wait_until(lambda: client.status().members == (1, 2, 3))
    assert len(server.counters()) == 3
    assert released in {result.operation_id for result in client.poll() if result.ok}


def test_a_release_goes_on_when_its_caller_is_gone(
    server: Server, client: DriverClient, shared_server: SharedServer
) -> None:
    with DriverClient(Endpoint.read(shared_server.membership_folder)) as other:
        other.status()
        other.submit_release([0])
    wait_until(lambda: client.status().members == (1, 2, 3))
    requests = [replace(request, dp_rank=None) for request in make_requests(lengths((0, 1, 2, 3)), seed=17)]
    answers = run_static(server, requests)
    assert client.rejoin().ok
    assert_same(answers, run_static(server, requests))


def test_a_parked_rank_costs_no_cpu(server: Server, client: DriverClient) -> None:
    ranks = {row["dp_rank"]: psutil.Process(row["pid"]) for row in server.counters()}
    assert client.release([1, 2]).ok
    stop = threading.Event()
    decoding = threading.Thread(target=_keep_decoding, args=(server, stop))
    decoding.start()
    try:
        before = {rank: _cpu_s(ranks[rank]) for rank in range(4)}
        threading.Event().wait(5.0)
        used = {rank: (_cpu_s(ranks[rank]) - before[rank]) / 5.0 for rank in range(4)}
    finally:
        stop.set()
        decoding.join()
    assert used[1] <= 0.02, used
    assert used[2] <= 0.02, used
    assert used[0] > 0.05, used


def wait_until(is_so: Callable[[], bool], deadline_s: float = 60.0) -> None:
    give_up_at_s = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < give_up_at_s
        threading.Event().wait(0.02)


def _cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def _keep_decoding(server: Server, stop: threading.Event) -> None:
    while not stop.is_set():
        generate(server, Request(prompt=(5, 6, 7), num_tokens=50, dp_rank=0))
