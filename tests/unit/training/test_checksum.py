import torch

from flexfloor.training import checksum
from flexfloor.training.checksum import WeightChecksum, tensor_sum

WEIGHTS = {
    "a": torch.arange(12, dtype=torch.float32).reshape(3, 4),
    "b": torch.linspace(-1, 1, 7, dtype=torch.bfloat16),
    "c": torch.tensor(3.0),
}


def digest(weights: dict[str, torch.Tensor]) -> str:
    found = WeightChecksum()
    for name, tensor in weights.items():
        found.add(name, tensor)
    return found.hexdigest()


def test_order_and_strides_do_not_matter() -> None:
    reordered = {name: WEIGHTS[name].clone() for name in ("c", "a", "b")}
    reordered["a"] = reordered["a"].t().contiguous().t()
    assert digest(reordered) == digest(WEIGHTS)


def test_every_bit_name_dtype_and_shape_matters() -> None:
    nudged = {**WEIGHTS, "b": WEIGHTS["b"].clone()}
    nudged["b"].view(torch.int16)[-1] ^= 1
    swapped = {**WEIGHTS, "a": WEIGHTS["a"][[1, 0, 2]]}
    others = [
        nudged,
        swapped,
        {**WEIGHTS, "a": WEIGHTS["a"].reshape(4, 3)},
        {**WEIGHTS, "a": WEIGHTS["a"].view(torch.int32)},
        {"A": WEIGHTS["a"], "b": WEIGHTS["b"], "c": WEIGHTS["c"]},
        {name: WEIGHTS[name] for name in ("a", "b")},
    ]
    assert len({digest(weights) for weights in [WEIGHTS, *others]}) == 1 + len(others)


def test_chunks_add_up(monkeypatch: object) -> None:
    tensor = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    whole = tensor_sum(tensor)
    original, checksum.CHUNK_ELEMENTS = checksum.CHUNK_ELEMENTS, 7
    try:
        assert tensor_sum(tensor) == whole
    finally:
        checksum.CHUNK_ELEMENTS = original


def test_sum_by_hand() -> None:
    words = torch.tensor([5, 9], dtype=torch.int32)
    factor = checksum.PLACE_FACTOR + 1
    expected = (5 + checksum.WORD_OFFSET) + (9 + checksum.WORD_OFFSET) * factor
    assert tensor_sum(words) == expected % 2**64
