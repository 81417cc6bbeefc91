import pytest
from elastic_fakes import FusedMoE, stand_in


@pytest.fixture
def moe_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models are made of the stand-in's layers."""
    stand_in(monkeypatch, "sglang.srt.layers.moe.fused_moe_triton.layer", FusedMoE=FusedMoE)
