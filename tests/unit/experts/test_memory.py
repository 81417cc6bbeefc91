"""Memory of a rank and the least floor, with the figures of Qwen3-30B-A3B."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flexfloor.cli.compose import compose, to_train_config
from flexfloor.experts.memory import (
    KvNeed,
    MemoryBudget,
    ModelShape,
    check_floor,
    least_floor,
    plan_size,
    plan_sizes,
    slot_floor,
)
from flexfloor.model_memory import format_bytes, max_experts_per_rank

GIB = 1024**3
QWEN3_30B_A3B = {
    "model_type": "qwen3_moe",
    "num_hidden_layers": 48,
    "hidden_size": 2048,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_only_layers": [],
    "decoder_sparse_step": 1,
}
QWEN = ModelShape.from_hf(QWEN3_30B_A3B, 2)
H200 = MemoryBudget(memory_bytes=139 * GIB, usable_share=0.9)
ONE_8K = KvNeed(longest_tokens=8192)


def test_sizes_of_qwen3_30b_a3b_follow_from_its_config_json() -> None:
    assert QWEN.expert_bytes == 9 * 1024**2
    assert QWEN.expert_bytes * QWEN.num_experts * QWEN.num_layers == 54 * GIB
    assert QWEN.kv_bytes_per_token == 96 * 1024
    assert QWEN.dense_bytes == 3_082_186_752


def test_the_shipped_presets_state_the_same_sizes() -> None:
    run = "run_dir=unused"
    paths = ["model.path=unused", "data.path=unused"]
    qwen = to_train_config(compose(["experiment=qwen3_30b_a3b_8xh200", *paths, run])).model
    tiny = to_train_config(compose(["experiment=quickstart", run])).model
    # Vocabulary of the arithmetic task's own tokenizer.
    shape = ModelShape(
        num_layers=tiny.num_layers,
        num_experts=tiny.num_experts,
        hidden_size=tiny.tiny.hidden_size,
        moe_intermediate_size=tiny.tiny.moe_intermediate_size,
        num_attention_heads=tiny.tiny.num_heads,
        num_kv_heads=tiny.tiny.num_kv_heads,
        head_dim=tiny.tiny.head_dim,
        vocab_size=32,
        dtype_bytes=4,
        kv_dtype_bytes=4,
    )
    for model, follows in ((qwen, QWEN), (tiny, shape)):
        assert model.expert_bytes == follows.expert_bytes
        assert model.kv_bytes_per_token == follows.kv_bytes_per_token
        assert model.dense_bytes == follows.dense_bytes


@pytest.mark.parametrize(
    ("num_ranks", "slots", "expert_gib"),
    [(16, 8, 3.375), (8, 16, 6.75), (4, 32, 13.5), (2, 64, 27.0), (1, 128, 54.0)],
)
def test_expert_memory_of_qwen3_30b_a3b(num_ranks: int, slots: int, expert_gib: float) -> None:
    size = plan_size(QWEN, num_ranks, H200, ONE_8K)
    assert (size.num_expert_slots, size.expert_bytes) == (slots, expert_gib * GIB)
    assert size.is_feasible


def test_kv_of_qwen3_30b_a3b() -> None:
    assert 8192 * QWEN.kv_bytes_per_token == 0.75 * GIB
    assert 32768 * QWEN.kv_bytes_per_token == 3 * GIB
    size = plan_size(QWEN, 8, H200, ONE_8K)
    # 0.9 x 139 GiB less 6.75 GiB experts and 2.87 GiB dense weights.
    assert size.kv_bytes == int(139 * GIB * 0.9) - 27 * GIB // 4 - 3_082_186_752
    assert size.kv_tokens == size.kv_bytes // 98304 == 1_261_343


def test_the_floor_is_where_experts_and_kv_still_fit() -> None:
    budget = MemoryBudget(memory_bytes=40 * GIB, usable_share=0.9)
    sizes = plan_sizes(QWEN, 8, budget, ONE_8K)
    assert [size.num_ranks for size in sizes] == [8, 7, 6, 5, 4, 3, 2, 1]
    assert [size.is_feasible for size in sizes] == [True] * 7 + [False]
    # 2 ranks: 27 + 2.87 + 0.75 of 36 GiB.
    assert least_floor(QWEN, 8, budget, ONE_8K) == 2
    assert least_floor(QWEN, 8, budget, KvNeed(longest_tokens=8192, group_tokens=140_000)) == 3
    with_trainer = MemoryBudget(memory_bytes=40 * GIB, usable_share=0.9, other_bytes=20 * GIB)
    assert least_floor(QWEN, 8, with_trainer, ONE_8K) == 5


def test_an_impossible_floor_is_refused_with_the_numbers() -> None:
    budget = MemoryBudget(memory_bytes=40 * GIB, usable_share=0.9)
    check_floor(2, QWEN, 8, budget, ONE_8K)
    with pytest.raises(ValueError, match=r"at size 1 a rank needs 57.62 GiB .* and 36.00 GiB are there"):
        check_floor(1, QWEN, 8, budget, ONE_8K)
    with pytest.raises(ValueError, match="floor=9: the group has 1 to 8 ranks"):
        check_floor(9, QWEN, 8, budget, ONE_8K)
    small = MemoryBudget(memory_bytes=8 * GIB, usable_share=0.9)
    with pytest.raises(ValueError, match=r"at size 8 .*experts 6.75 GiB: 16 slots .* 7.20 GiB are there"):
        least_floor(QWEN, 8, small, ONE_8K)


def test_reserved_slots_cost_kv_memory_from_the_start() -> None:
    cost = slot_floor(QWEN, 8, 2, H200)
    assert (cost.num_expert_slots, cost.num_spare_slots) == (64, 48)
    assert cost.spare_bytes == 20.25 * GIB
    assert cost.kv_tokens_without - cost.kv_tokens == 20.25 * GIB // 98304
    assert slot_floor(QWEN, 8, 8, H200).spare_bytes == 0


def test_a_spread_over_the_ranks_is_never_shorter_than_the_longest_sequence() -> None:
    need = KvNeed(longest_tokens=100, group_tokens=301)
    assert [need.tokens_per_rank(m) for m in (1, 2, 3, 4)] == [301, 151, 101, 100]


@given(
    ep_size=st.sampled_from([1, 2, 4, 8, 16]),
    memory_gib=st.integers(1, 150),
    other_gib=st.integers(0, 40),
    group_tokens=st.integers(0, 2_000_000),
)
def test_what_fits_on_few_ranks_fits_on_more(
    ep_size: int, memory_gib: int, other_gib: int, group_tokens: int
) -> None:
    budget = MemoryBudget(memory_bytes=memory_gib * GIB, usable_share=0.9, other_bytes=other_gib * GIB)
    need = KvNeed(longest_tokens=4096, group_tokens=group_tokens)
    sizes = plan_sizes(QWEN, ep_size, budget, need)
    fits = [size.is_feasible for size in sizes]
    assert fits == sorted(fits, reverse=True)
    for size in sizes:
        assert size.is_feasible == (size.kv_tokens >= size.kv_tokens_needed)
        assert size.num_expert_slots == max_experts_per_rank(128, size.num_ranks)
    if any(fits):
        assert least_floor(QWEN, ep_size, budget, need) == fits[::-1].index(True) + 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"model_type": "deepseek_v3"}, "model_type='deepseek_v3'"),
        ({"mlp_only_layers": [0]}, "mlp_only_layers="),
        ({"quantization_config": {"bits": 4}}, "quantization_config="),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0"),
        ({"vocab_size": None}, "vocab_size is missing"),
    ],
)
def test_weights_that_are_not_counted_are_refused(change: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ModelShape.from_hf(QWEN3_30B_A3B | change, 2)


def test_head_dim_and_the_kv_dtype_have_defaults() -> None:
    shape = ModelShape.from_hf(QWEN3_30B_A3B | {"head_dim": None}, 2, kv_dtype_bytes=1)
    assert shape.head_dim == 64
    assert shape.kv_bytes_per_token == 96 * 1024 // 4


def test_bytes_are_shown_in_a_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (9 * 1024**2, 54 * GIB, 1536, 0)] == [
        "9.00 MiB",
        "54.00 GiB",
        "1.50 KiB",
        "0.00 KiB",
    ]


def test_a_group_has_experts_and_ranks() -> None:
    with pytest.raises(ValueError, match="num_ranks=0"):
        max_experts_per_rank(8, 0)
