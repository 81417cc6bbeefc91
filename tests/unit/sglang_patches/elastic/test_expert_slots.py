"""Expert tensors and maps through changes, with exact and with reserved slots."""

import pytest
import torch
from elastic_fakes import NUM_EXPERTS, Model

from sglang_patches.elastic.expert_slots import ExpertLayers, StagedExperts, slots_in_use

pytestmark = pytest.mark.usefixtures("moe_layers")

TENSOR_NAMES = ("w13_weight", "w2_weight", "w2_bias")


def expert_layers(model: Model, num_reserved_slots: int = 0) -> ExpertLayers:
    return ExpertLayers(model, (0, 1), NUM_EXPERTS, num_reserved_slots=num_reserved_slots)


def receive(experts: ExpertLayers, staged: StagedExperts, slot: int, expert: int) -> None:
    """What a transfer does: fill a staged slot with another rank's expert."""
    donor = ExpertLayers(Model([expert]), (expert,), NUM_EXPERTS)
    for layer in range(experts.num_layers):
        sent = donor.tensors_to_send(layer, 0)
        filled = experts.tensors_to_fill(staged, layer, slot)
        for target, source in zip(filled, sent, strict=True):
            target.copy_(source)


def maps(model: Model) -> list[list[int]]:
    return [layer.dispatcher.local_expert_mapping.tolist() for layer in model.layers]


def addresses(model: Model) -> list[int]:
    tensors = [getattr(layer, name) for layer in model.layers for name in TENSOR_NAMES]
    tensors += [layer.dispatcher.local_expert_mapping for layer in model.layers]
    return [tensor.data_ptr() for tensor in tensors]


def test_the_map_of_a_new_rank_names_its_own_block() -> None:
    model = Model([0, 1])
    experts = expert_layers(model)
    assert (experts.num_layers, experts.slots) == (2, (0, 1))
    assert maps(model) == [[0, 1, -1, -1, -1, -1, -1, -1]] * 2
    assert model.first.dispatcher.local_expert_mapping.dtype == torch.int32
    # Per layer and slot 12 + 6 weights and 3 biases of 4 bytes.
    assert experts.num_bytes() == 2 * 2 * (12 + 6 + 3) * 4


def test_a_change_keeps_what_stays_and_takes_effect_at_the_switch_only() -> None:
    model = Model([0, 1])
    experts = expert_layers(model)
    staged = experts.stage((0, 1, 5))
    receive(experts, staged, slot=2, expert=5)
    assert model.held() == [0, 1]
    assert maps(model) == [[0, 1, -1, -1, -1, -1, -1, -1]] * 2
    experts.install(staged)
    assert model.held() == [0, 1, 5]
    assert maps(model) == [[0, 1, -1, -1, -1, 2, -1, -1]] * 2
    assert model.first.num_local_experts == model.second.moe_runner_config.num_local_experts == 3


def test_a_free_slot_is_zero_and_in_no_map() -> None:
    model = Model([0, 1])
    experts = expert_layers(model)
    staged = experts.stage((0, 1, None, 5))
    receive(experts, staged, slot=3, expert=5)
    experts.install(staged)
    assert model.held() == [0, 1, None, 5]
    assert maps(model) == [[0, 1, -1, -1, -1, 3, -1, -1]] * 2
    assert slots_in_use(experts.slots) == 3


def test_shrinking_gives_the_memory_of_the_extra_slot_back() -> None:
    model = Model([0, 1])
    experts = expert_layers(model)
    before = experts.num_bytes()
    grown = experts.stage((0, 1, 5))
    receive(experts, grown, slot=2, expert=5)
    experts.install(grown)
    assert experts.num_bytes() == before * 3 // 2
    experts.install(experts.stage((0, 1)))
    assert (experts.num_bytes(), model.held()) == (before, [0, 1])


def test_a_rank_that_gave_all_back_keeps_nothing_when_it_returns() -> None:
    model = Model([0, 1])
    experts = expert_layers(model)
    num_bytes = experts.num_bytes()
    assert experts.release() == num_bytes
    assert (experts.num_bytes(), experts.slots, model.held()) == (0, (), [])
    staged = experts.stage((0, 1))
    for slot in (0, 1):
        receive(experts, staged, slot, expert=slot)
    experts.install(staged)
    assert (experts.num_bytes(), model.held()) == (num_bytes, [0, 1])
    assert experts.release() == num_bytes


def test_the_map_keeps_its_address() -> None:
    model = Model([0, 1])
    experts = expert_layers(model)
    before = [layer.dispatcher.local_expert_mapping.data_ptr() for layer in model.layers]
    experts.install(experts.stage((0, 1)))
    assert [layer.dispatcher.local_expert_mapping.data_ptr() for layer in model.layers] == before


def test_reserved_slots_are_there_from_the_start_and_nothing_moves() -> None:
    model = Model([0, 1], num_slots=4)
    experts = expert_layers(model, num_reserved_slots=4)
    before, num_bytes = addresses(model), experts.num_bytes()
    staged = experts.stage((0, 1, None, 5))
    receive(experts, staged, slot=3, expert=5)
    assert maps(model) == [[0, 1, -1, -1, -1, -1, -1, -1]] * 2
    experts.install(staged)
    assert model.held() == [0, 1, None, 5]
    assert maps(model) == [[0, 1, -1, -1, -1, 3, -1, -1]] * 2
    experts.install(experts.stage((0, 1)))
    assert maps(model) == [[0, 1, -1, -1, -1, -1, -1, -1]] * 2
    assert addresses(model) == before
    assert experts.release() == 0
    assert experts.num_bytes() == num_bytes


def test_with_reserved_slots_a_layer_counts_those_in_use() -> None:
    """SGLang takes a layer with as many local experts as there are experts for one without a map."""
    model = Model([0, 1], num_slots=NUM_EXPERTS)
    experts = expert_layers(model, num_reserved_slots=NUM_EXPERTS)
    assert model.first.num_local_experts == model.second.moe_runner_config.num_local_experts == 2
    experts.install(experts.stage((0, 1, None, 5)))
    assert model.first.num_local_experts == model.second.moe_runner_config.num_local_experts == 3
