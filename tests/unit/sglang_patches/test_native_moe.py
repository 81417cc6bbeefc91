"""The CPU's MoE forward against sums written out token by token."""

from types import SimpleNamespace

import pytest
import torch

from sglang_patches.cpu import native_moe
from sglang_patches.cpu.native_moe import forward_local_experts, supports

NUM_EXPERTS, HIDDEN, INTER = 4, 6, 5


@pytest.fixture
def weights() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    w13 = torch.randn(NUM_EXPERTS, 2 * INTER, HIDDEN, generator=generator)
    return w13, torch.randn(NUM_EXPERTS, HIDDEN, INTER, generator=generator)


def reference(x, topk_weights, topk_ids, w13, w2) -> torch.Tensor:
    result = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, scales) in enumerate(zip(topk_ids.tolist(), topk_weights.tolist(), strict=True)):
        for expert, scale in zip(ids, scales, strict=True):
            if expert == -1:
                continue
            hidden = w13[expert].double() @ x[token].double()
            gate, up = hidden[:INTER], hidden[INTER:]
            result[token] += scale * (w2[expert].double() @ (gate * torch.sigmoid(gate) * up))
    return result


@pytest.mark.parametrize(
    "topk_ids",
    [
        [[0, 1], [1, 2], [3, 0], [2, 3], [1, 0]],
        [[-1, 1], [1, -1], [-1, -1], [2, 3], [-1, 2]],
        [[-1, -1], [-1, -1], [-1, -1], [-1, -1], [-1, -1]],
        [[2, -1], [2, -1], [2, -1], [2, -1], [2, -1]],
    ],
    ids=["all local", "some elsewhere", "all elsewhere", "one expert"],
)
@pytest.mark.parametrize("max_compiled_pairs", [-1, 1 << 30], ids=["grouped", "compiled"])
def test_sums_of_local_experts(weights, topk_ids, max_compiled_pairs, monkeypatch) -> None:
    monkeypatch.setattr(native_moe, "_MAX_COMPILED_PAIRS", max_compiled_pairs)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, HIDDEN, generator=generator)
    topk_weights = torch.rand(5, 2, generator=generator)
    ids = torch.tensor(topk_ids, dtype=torch.int32)
    got = forward_local_experts(x, topk_weights, ids, *weights)
    torch.testing.assert_close(got.double(), reference(x, topk_weights, ids, *weights), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("max_compiled_pairs", [-1, 1 << 30], ids=["grouped", "compiled"])
def test_no_tokens(weights, max_compiled_pairs, monkeypatch) -> None:
    monkeypatch.setattr(native_moe, "_MAX_COMPILED_PAIRS", max_compiled_pairs)
    got = forward_local_experts(
        torch.empty(0, HIDDEN), torch.empty(0, 2), torch.empty(0, 2, dtype=torch.int32), *weights
    )
    assert got.shape == (0, HIDDEN)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e30])
def test_rows_that_pad_a_batch_may_hold_anything(weights, value) -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(3, HIDDEN, generator=generator)
    topk_weights, ids = torch.rand(3, 2, generator=generator), torch.tensor([[0, 1], [2, 3], [1, 3]])
    expected = forward_local_experts(x, topk_weights, ids, *weights)
    x[1] = value
    got = forward_local_experts(x, topk_weights, ids, *weights)
    torch.testing.assert_close(got[[0, 2]], expected[[0, 2]], atol=1e-6, rtol=1e-6)


def test_a_token_does_not_depend_on_its_batch(weights) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(7, HIDDEN, generator=generator)
    topk_weights = torch.rand(7, 3, generator=generator)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:3] for _ in range(7)])
    together = forward_local_experts(x, topk_weights, ids, *weights)
    alone = [
        forward_local_experts(x[i : i + 1], topk_weights[i : i + 1], ids[i : i + 1], *weights)
        for i in range(7)
    ]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-6, rtol=1e-6)


def test_bfloat16_sums_in_float32(weights) -> None:
    w13, w2 = (tensor.bfloat16() for tensor in weights)
    x = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(3)).bfloat16()
    topk_weights, ids = torch.full((3, 2), 0.5), torch.tensor([[0, 1], [2, 3], [1, 3]])
    got = forward_local_experts(x, topk_weights, ids, w13, w2)
    assert got.dtype is torch.bfloat16
    torch.testing.assert_close(got.double(), reference(x, topk_weights, ids, w13, w2), atol=0.15, rtol=0.05)


def test_bfloat16_partial_sums_are_rounded_once_however_the_experts_are_split(weights) -> None:
    w13, w2 = (tensor.bfloat16() for tensor in weights)
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(64, HIDDEN, generator=generator).bfloat16()
    topk_weights = torch.rand(64, 2, generator=generator)
    ids = torch.stack([torch.randperm(NUM_EXPERTS, generator=generator)[:2] for _ in range(64)])
    whole = forward_local_experts(x, topk_weights, ids, w13, w2)
    for split in range(1, NUM_EXPERTS):
        ranks = (range(split), range(split, NUM_EXPERTS))
        parts = [_on_rank(x, topk_weights, ids, w13, w2, experts, torch.float32) for experts in ranks]
        assert all(part.dtype is torch.float32 for part in parts)
        assert torch.equal((parts[0] + parts[1]).bfloat16(), whole)
    rounded = [_on_rank(x, topk_weights, ids, w13, w2, experts, None) for experts in ranks]
    assert not torch.equal((rounded[0].float() + rounded[1].float()).bfloat16(), whole)


def _on_rank(x, topk_weights, ids, w13, w2, experts, out_dtype) -> torch.Tensor:
    """What a rank that has `experts` makes of it; the others are -1 to it."""
    local = torch.where((ids >= experts.start) & (ids < experts.stop), ids - experts.start, -1)
    part = slice(experts.start, experts.stop)
    return forward_local_experts(x, topk_weights, local, w13[part], w2[part], out_dtype)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, True),
        ({"activation": "gelu"}, False),
        ({"gemm1_alpha": 1.7}, False),
        ({"apply_router_weight_on_input": True}, False),
    ],
)
def test_what_is_left_to_sglang(change, expected) -> None:
    config = {"activation": "silu", "gemm1_alpha": None, "apply_router_weight_on_input": False, **change}
    assert supports(SimpleNamespace(), SimpleNamespace(**config)) is expected
    assert not supports(SimpleNamespace(w2_weight_bias=torch.zeros(1)), SimpleNamespace(**config))
