"""Patched servers: many ranks answer what one rank answers, and the counters tell who worked."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import requests
from server import Server, start_server

from flexfloor.processes import ChildProcesses

pytestmark = [pytest.mark.integration, pytest.mark.timeout(900)]

PROMPTS = ([5, 6, 7], [9, 10, 11, 12], [30, 4, 8, 20, 21], [27, 3])
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
SAMPLED = {"temperature": 1.0, "max_new_tokens": 24, "ignore_eos": True}


def _generate_all(server: Server, params: dict, dp_ranks: list[int | None]) -> list[dict]:
    """Every prompt at once, prompt i on dp_ranks[i] (modulo the ranks), each with its own seed."""

    def one(index: int) -> dict:
        dp_rank = dp_ranks[index]
        routed = None if dp_rank is None else dp_rank % server.num_ranks
        request = {"input_ids": PROMPTS[index], "return_logprob": True, "routed_dp_rank": routed}
        return server.generate(sampling_params={**params, "sampling_seed": 1000 + index}, **request)

    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(one, range(len(PROMPTS))))


def _tokens(answers: list[dict]) -> list[list[int]]:
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def one_rank_tokens(servers: dict[str, Server]) -> dict[str, list[list[int]]]:
    nowhere = [None] * len(PROMPTS)
    answers = {
        "greedy": _generate_all(servers["one"], GREEDY, nowhere),
        "sampled": _generate_all(servers["one"], SAMPLED, nowhere),
    }
    return {name: _tokens(rows) for name, rows in answers.items()}


@pytest.mark.parametrize("collectives", ["gloo", "shm"])
def test_greedy_tokens_do_not_depend_on_the_number_of_ranks(
    servers: dict[str, Server], one_rank_tokens: dict[str, list[list[int]]], collectives: str
) -> None:
    server = servers[collectives]
    answers = _generate_all(server, GREEDY, [0, 1, 2, 3])
    assert _tokens(answers) == one_rank_tokens["greedy"]
    served_by = [answer["meta_info"]["dp_rank"] for answer in answers]
    assert served_by == [rank % server.num_ranks for rank in range(4)]
    assert len(set(map(tuple, one_rank_tokens["greedy"]))) == len(PROMPTS), "the model must not be trivial"


@pytest.mark.parametrize("collectives", ["gloo", "shm"])
@pytest.mark.parametrize("dp_ranks", [[0, 1, 2, 3], [3, 3, 1, 0]])
def test_a_sampling_seed_fixes_the_tokens_on_every_rank(
    servers: dict[str, Server],
    one_rank_tokens: dict[str, list[list[int]]],
    collectives: str,
    dp_ranks: list[int | None],
) -> None:
    answers = _generate_all(servers[collectives], SAMPLED, dp_ranks)
    assert _tokens(answers) == one_rank_tokens["sampled"]
    assert one_rank_tokens["sampled"] != one_rank_tokens["greedy"]


@pytest.mark.full
def test_four_ranks_over_gloo_answer_what_one_rank_answers(
    one_rank_tokens: dict[str, list[list[int]]], shared_checkpoint: Path, tmp_path: Path
) -> None:
    with ChildProcesses() as children:
        server = start_server(children, shared_checkpoint, 4, tmp_path / "gloo4.log").wait_ready(600.0)
        assert _tokens(_generate_all(server, GREEDY, [0, 1, 2, 3])) == one_rank_tokens["greedy"]
        assert _tokens(_generate_all(server, SAMPLED, [2, 0, 3, 1])) == one_rank_tokens["sampled"]


def test_logprobs_agree_between_one_and_four_ranks(servers: dict[str, Server]) -> None:
    def logprobs(name: str, dp_rank: int | None) -> list[float]:
        params = {**SAMPLED, "sampling_seed": 3}
        answer = servers[name].generate(
            input_ids=PROMPTS[2], sampling_params=params, return_logprob=True, routed_dp_rank=dp_rank
        )
        return [row[0] for row in answer["meta_info"]["output_token_logprobs"]]

    expected = logprobs("one", None)
    for collectives in ("gloo", "shm"):
        assert logprobs(collectives, 1) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("collectives", ["gloo", "shm"])
def test_counters_tell_working_from_idle_ranks(servers: dict[str, Server], collectives: str) -> None:
    server, num_tokens = servers[collectives], 20
    before = server.counters()
    server.generate(
        input_ids=[7, 8, 9],
        sampling_params={"temperature": 0.0, "max_new_tokens": num_tokens, "ignore_eos": True},
        routed_dp_rank=1,
    )
    grown = [
        {name: new[name] - old[name] for name in new if name != "dp_rank"}
        for old, new in zip(before, server.counters(), strict=True)
    ]
    assert [row["dp_rank"] for row in before] == list(range(server.num_ranks))
    # The scheduler overlaps: it may run one pass more than there are tokens before it sees that all is done.
    assert all(num_tokens <= row["num_iterations"] <= num_tokens + 1 for row in grown)
    assert [row["num_prefill_iterations"] for row in grown] == [1] * server.num_ranks
    assert grown[1]["num_idle_iterations"] <= 1
    for rank in set(range(server.num_ranks)) - {1}:
        assert grown[rank]["num_idle_iterations"] == grown[rank]["num_iterations"]


def test_an_idle_server_counts_nothing(servers: dict[str, Server]) -> None:
    before = servers["gloo"].counters()
    assert servers["gloo"].wait_ready().counters() == before


@pytest.mark.parametrize("name", ["gloo", "shm"])
def test_weight_version_reaches_the_responses(
    servers: dict[str, Server], shared_checkpoint: Path, name: str
) -> None:
    server = servers[name]
    # Other tests of the shared server may have given it a version of theirs.
    version = requests.get(f"{server.url}/model_info", timeout=60).json()["weight_version"]
    before = server.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    server.post("begin_weight_update")
    answer = server.post("update_weights_from_disk", model_path=str(shared_checkpoint), weight_version="7")
    server.post("end_weight_update")
    after = server.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)
    assert answer["success"]
    assert version != "7"
    assert before["meta_info"]["weight_version"] == version
    assert after["meta_info"]["weight_version"] == "7"
    assert after["output_ids"] == before["output_ids"]
