"""Which graph runner a member set gets, and in which order sets are prepared. Runners are names here."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_patches.elastic import prepared_sets
from sglang_patches.elastic.graphs import GraphSets, capture_decode
from sglang_patches.elastic.prepared_sets import prepare_sets
from sglang_patches.elastic.topology import check_experts, check_graphs

FULL = (0, 1, 2, 3)
SETS = ((0, 1, 2), (1, 2), (2, 3))


def model_runner(
    device: str = "cuda", decode: object = "full decode", prefill: object = "full prefill"
) -> SimpleNamespace:
    return SimpleNamespace(
        device=device,
        decode_cuda_graph_runner=decode,
        prefill_cuda_graph_runner=prefill,
        eager_runner="eager",
        in_force=FULL,
    )


def graph_sets(runner: SimpleNamespace) -> GraphSets:
    return GraphSets(runner, FULL, lambda captured: f"decode of {captured.in_force}")


def executes_with(runner: SimpleNamespace) -> tuple[object, object]:
    return (runner.decode_cuda_graph_runner, runner.prefill_cuda_graph_runner)


def test_each_prepared_set_decodes_with_its_own_runner() -> None:
    runner = model_runner()
    graphs = graph_sets(runner)
    assert graphs.has_decode_graphs
    for runner.in_force in ((0, 1), (2, 3)):
        graphs.capture(runner.in_force)
        # Capturing alone changes nothing that runs.
        assert executes_with(runner) == ("full decode", "full prefill")
    for members in ((2, 3), (0, 1), (2, 3)):
        graphs.install(members)
        assert executes_with(runner) == (f"decode of {members}", "eager")
    graphs.install(FULL)
    assert executes_with(runner) == ("full decode", "full prefill")


def test_a_set_that_was_not_prepared_decodes_eagerly_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = model_runner()
    graphs = graph_sets(runner)
    with caplog.at_level(logging.WARNING):
        for members in ((0, 3), FULL, (0, 3), (1, 3)):
            graphs.install(members)
            assert executes_with(runner) == (
                ("full decode", "full prefill") if members == FULL else (None, "eager")
            )
    assert [record.args for record in caplog.records] == [((0, 3),), ((1, 3),)]


@pytest.mark.parametrize("decode", [None, "eager"])
def test_prefill_graphs_are_those_of_the_full_group_alone(
    decode: object, caplog: pytest.LogCaptureFixture
) -> None:
    runner = model_runner(decode=decode)
    graphs = graph_sets(runner)
    assert not graphs.has_decode_graphs
    graphs.install((0, 1))
    assert executes_with(runner) == (None, "eager")
    graphs.install(FULL)
    assert executes_with(runner) == (decode, "full prefill")
    assert not caplog.records


def test_on_a_cpu_nothing_changes() -> None:
    runner = model_runner("cpu")
    graphs = graph_sets(runner)
    graphs.settle()
    graphs.install((0, 1))
    assert not graphs.has_decode_graphs
    assert executes_with(runner) == ("full decode", "full prefill")
    # As the scheduler's model runner on a CPU may have neither.
    assert not GraphSets(SimpleNamespace(device="cpu"), FULL).has_decode_graphs


def test_a_runner_gets_an_attention_backend_of_its_own() -> None:
    bound: list[object] = []

    class Attention:
        is_checked = False

        def validate_elastic_cuda_graph_recapture(self) -> None:
            self.is_checked = True

    def new_backend(*, init_new_workspace: bool) -> Attention:
        runner.init_new_workspace = init_new_workspace
        return Attention()

    runner = SimpleNamespace(
        device="cpu",
        init_new_workspace=True,
        _get_attention_backend=new_backend,
        _decode_cuda_graph_runner_cls=lambda: lambda of, attn_backend: (of, attn_backend),
        kv_index_translator=SimpleNamespace(bind_and_verify_backends=bound.extend),
    )
    first, second = capture_decode(runner), capture_decode(runner)
    assert first[0] is second[0] is runner
    assert first[1] is not second[1]
    assert bound == [first[1], second[1]]
    assert all(backend.is_checked for backend in bound)  # type: ignore[attr-defined]
    assert runner.init_new_workspace is True


class Ranks:
    """One rank's view of the start: what it does, in order."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, has_decode_graphs: bool = True) -> None:
        self.journal: list[str] = []
        self.has_decode_graphs = has_decode_graphs
        self.scheduler = SimpleNamespace(tp_group=FULL)
        monkeypatch.setattr(prepared_sets, "barrier", lambda group: self.journal.append(f"barrier {group}"))
        monkeypatch.setattr(prepared_sets, "restamp", self.restamp)

    def coordinator(self, members: tuple[int, ...], membership_epoch: int) -> tuple[int, ...]:
        assert membership_epoch == 0
        self.journal.append(f"group {members}")
        return members

    def capture(self, members: tuple[int, ...]) -> None:
        assert self.scheduler.tp_group == members
        self.journal.append(f"capture {members}")

    def restamp(self, scheduler: Any, coordinator: Any) -> None:
        scheduler.tp_group = coordinator

    def prepare(self, ep_rank: int) -> list[str]:
        prepare_sets(self.scheduler, ep_rank, SETS, self, self)  # type: ignore[arg-type]
        assert self.scheduler.tp_group == FULL
        # A group that exists is given out again without any collective.
        return [step for index, step in enumerate(self.journal) if step not in self.journal[:index]]


@pytest.mark.parametrize("ep_rank", FULL)
def test_a_rank_prepares_the_sets_it_belongs_to_in_the_order_of_all(
    monkeypatch: pytest.MonkeyPatch, ep_rank: int
) -> None:
    ranks = Ranks(monkeypatch)
    own = [members for members in SETS if ep_rank in members]
    steps = ranks.prepare(ep_rank)
    assert [step for step in steps if "barrier" not in step] == [
        *(f"group {members}" for members in own),
        *(f"capture {members}" for members in own),
    ]
    # Each rank waits for all before each set, whether it belongs to it or not.
    assert ranks.journal.count(f"barrier {FULL}") == len(SETS)


def test_without_graphs_only_groups_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(monkeypatch, has_decode_graphs=False)
    assert ranks.prepare(2) == [f"group {members}" for members in SETS]
    assert ranks.journal == [f"group {members}" for members in SETS]


def scheduler_of(runner: SimpleNamespace, *layers: SimpleNamespace) -> SimpleNamespace:
    runner.model = SimpleNamespace(modules=lambda: iter(layers))
    return SimpleNamespace(tp_worker=SimpleNamespace(model_runner=runner))


def moe_layer(num_slots: int, *, skips_map: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        w13_weight=SimpleNamespace(shape=(num_slots, 4, 3)),
        dispatcher=SimpleNamespace(skip_local_expert_mapping=skips_map),
    )


def test_graphs_are_checked_again_where_sglang_has_resolved_its_flags() -> None:
    check_graphs(scheduler_of(model_runner()), "reserved")
    check_graphs(scheduler_of(model_runner("cpu")), "exact")
    check_graphs(scheduler_of(model_runner(decode=None, prefill="eager")), "exact")
    for runner in (model_runner(decode="eager"), model_runner(prefill=None)):
        with pytest.raises(SystemExit, match="exact slots move them"):
            check_graphs(scheduler_of(runner), "exact")


def test_layers_without_reserved_slots_or_with_other_expert_ids_are_refused() -> None:
    dense = SimpleNamespace()
    check_experts(scheduler_of(model_runner(), dense, moe_layer(4)), 4)
    check_experts(scheduler_of(model_runner(), dense, moe_layer(2)), 0)
    with pytest.raises(SystemExit, match="expert layers of 2 slots, not 4"):
        check_experts(scheduler_of(model_runner(), moe_layer(2)), 4)
    with pytest.raises(SystemExit, match="--moe-runner-backend triton"):
        check_experts(scheduler_of(model_runner(), moe_layer(4, skips_map=True)), 4)
