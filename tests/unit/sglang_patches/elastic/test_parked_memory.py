"""What a parked rank gives back, and that it gets the same tensors again."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest
import torch
from elastic_fakes import NUM_EXPERTS, Model

from flexfloor.config import schema
from sglang_patches import plugin_config
from sglang_patches.elastic.expert_slots import ExpertLayers
from sglang_patches.elastic.memory import CpuMemory, DeviceMemory, dense_tensors, kv_tensors
from sglang_patches.elastic.parking import FREEABLE, ParkedMemory

KV_BYTES = 2 * 2 * 16 * 4
DENSE_BYTES = (5 * 3 + 3 + 3) * 4
EXPERT_BYTES = 2 * 2 * (12 + 6 + 3) * 4


class KvPool:
    def __init__(self) -> None:
        self.k_buffer = [torch.ones(16) for _ in range(2)]
        self.v_buffer = [torch.ones(16) for _ in range(2)]


class ParkedScheduler:
    def __init__(self, *, can_flush: bool = True) -> None:
        self.model = Model([0, 1])
        self.pool = KvPool()
        self.can_flush = can_flush
        self.tp_worker = SimpleNamespace(model_runner=SimpleNamespace(model=self.model, device="cpu"))
        self.token_to_kv_pool_allocator = SimpleNamespace(get_kvcache=lambda: self.pool)

    def flush_cache(self) -> bool:
        return self.can_flush

    def num_kv_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in kv_tensors(self))


class Saver:
    """SGLang's memory saver."""

    def __init__(self, *, enabled: bool) -> None:
        self.enabled = enabled
        self.calls: list[str] = []

    def pause(self, tag: str) -> None:
        self.calls.append(f"pause {tag}")

    def resume(self, tag: str) -> None:
        self.calls.append(f"resume {tag}")


def parked_memory(scheduler: ParkedScheduler, frees: Sequence[str]) -> ParkedMemory:
    experts = ExpertLayers(scheduler.model, (0, 1), NUM_EXPERTS)
    return ParkedMemory(scheduler, experts, frees)


def test_tensors_come_back_zeroed_at_their_old_size() -> None:
    memory, tensor = CpuMemory(), torch.arange(6.0).view(2, 3)
    view = tensor[1]
    assert memory.release("kv", iter([tensor, view])) == 24  # one storage, counted once
    assert tensor.untyped_storage().nbytes() == 0
    memory.resume("kv")
    assert tensor.tolist() == [[0.0] * 3] * 2
    tensor[1] = 7.0
    assert view.tolist() == [7.0] * 3


def test_resuming_what_was_not_released_changes_nothing() -> None:
    memory, tensor = CpuMemory(), torch.ones(3)
    memory.resume("kv")
    memory.release("kv", iter([tensor]))
    memory.resume("dense")
    assert tensor.untyped_storage().nbytes() == 0
    memory.resume("kv")
    tensor.fill_(5.0)
    memory.resume("kv")
    assert tensor.tolist() == [5.0] * 3


def test_on_a_device_the_memory_saver_pauses_and_resumes_by_tag() -> None:
    saver = Saver(enabled=True)
    memory = DeviceMemory(saver)
    assert memory.release("kv", iter([torch.ones(4), torch.ones(2)])) == 24
    memory.release("dense", iter([torch.ones(4)]))
    for _ in range(2):
        memory.resume("kv")
        memory.resume("never released")
    assert saver.calls == ["pause kv_cache", "pause weights", "resume kv_cache"]


def test_without_a_memory_saver_a_device_frees_nothing() -> None:
    saver = Saver(enabled=False)
    memory = DeviceMemory(saver)
    assert memory.release("kv", iter([torch.ones(4)])) == 0
    memory.resume("kv")
    assert saver.calls == []


@pytest.mark.usefixtures("moe_layers")
def test_dense_tensors_are_all_but_the_experts_in_one_order() -> None:
    model = Model([0, 1])
    assert [tuple(tensor.shape) for tensor in dense_tensors(model)] == [(5, 3), (3,), (3,)]
    assert sum(tensor.nbytes for tensor in dense_tensors(model)) == DENSE_BYTES


def test_a_pool_may_have_one_buffer_for_keys_and_values() -> None:
    pool = SimpleNamespace(kv_buffer=[torch.ones(2)], k_buffer=None)
    scheduler = SimpleNamespace(token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: pool))
    assert [tensor.tolist() for tensor in kv_tensors(scheduler)] == [[1.0, 1.0]]


@pytest.mark.usefixtures("moe_layers")
@pytest.mark.parametrize(
    ("frees", "num_bytes"),
    [
        ((), 0),
        (("experts",), EXPERT_BYTES),
        (("kv",), KV_BYTES),
        (("experts", "kv"), EXPERT_BYTES + KV_BYTES),
        (("experts", "kv", "dense"), EXPERT_BYTES + KV_BYTES + DENSE_BYTES),
    ],
)
def test_what_is_given_back_follows_the_configuration(frees: tuple[str, ...], num_bytes: int) -> None:
    scheduler = ParkedScheduler()
    memory = parked_memory(scheduler, frees)
    assert memory.release() == num_bytes
    assert scheduler.num_kv_bytes() == (0 if "kv" in frees else KV_BYTES)
    memory.resume()
    assert scheduler.num_kv_bytes() == KV_BYTES


@pytest.mark.usefixtures("moe_layers")
def test_a_pool_in_use_is_kept() -> None:
    scheduler = ParkedScheduler(can_flush=False)
    assert parked_memory(scheduler, ("kv",)).release() == 0
    assert scheduler.num_kv_bytes() == KV_BYTES


def test_both_configurations_know_what_can_be_freed() -> None:
    assert plugin_config.PARK_FREES == schema.PARK_FREES == FREEABLE
