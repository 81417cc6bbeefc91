"""The tiny checkpoint and its tokenizer as transformers reads them."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from flexfloor.data.arithmetic import arithmetic_prompts, build_tokenizer, encode
from flexfloor.data.tiny_moe import create_tiny_moe

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return create_tiny_moe(tmp_path_factory.mktemp("models") / "tiny", tokenizer=build_tokenizer(), seed=1)


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    # torchvision's build does not always match a CPU build of torch. transformers imports it for models that
    # are not used here; without its operators that import fails.
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    from transformers import AutoModelForCausalLM

    model, report = AutoModelForCausalLM.from_pretrained(checkpoint, output_loading_info=True)
    # Weights under a wrong name would be left out, or replaced by random ones, without an error.
    assert {key: list(found) for key, found in report.items() if found} == {}
    return model


def weights_of(checkpoint: Path) -> dict[str, torch.Tensor]:
    with safe_open(checkpoint / "model.safetensors", "pt") as weights:
        return {name: weights.get_tensor(name) for name in weights.keys()}  # noqa: SIM118


def test_it_loads_and_gives_finite_logits(model: Any) -> None:
    token_ids = torch.tensor([encode("97%7:90,83.")])
    logits = model(token_ids).logits
    assert logits.shape == (1, 11, 32)
    assert logits.isfinite().all()
    assert model.dtype == torch.float32
    assert 1.3e6 < sum(parameter.numel() for parameter in model.parameters()) < 1.4e6


def test_what_transformers_computes_with_is_what_was_written(checkpoint: Path, model: Any) -> None:
    written, loaded = weights_of(checkpoint), model.state_dict()
    same = [name for name in written if name in loaded and torch.equal(written[name], loaded[name])]
    # Experts may be fused in memory; all the rest keeps its name.
    assert set(written) - set(same) == {name for name in written if ".experts." in name} - set(same)
    assert not torch.equal(written["model.embed_tokens.weight"], written["lm_head.weight"])


def test_embeddings_are_untied_and_the_pad_row_is_not_zero(model: Any) -> None:
    embedding = model.get_input_embeddings().weight
    assert embedding.data_ptr() != model.get_output_embeddings().weight.data_ptr()
    assert embedding[0].std().item() == pytest.approx(0.02, rel=0.4)


def test_experts_are_stored_one_by_one(checkpoint: Path) -> None:
    weights = weights_of(checkpoint)
    assert weights["model.layers.2.mlp.experts.7.gate_proj.weight"].shape == (128, 128)
    assert weights["model.layers.2.mlp.gate.weight"].shape == (8, 128)
    assert {weight.dtype for weight in weights.values()} == {torch.float32}


def test_stop_tokens_stand_in_all_places_that_engines_read(checkpoint: Path) -> None:
    for name in ("config.json", "generation_config.json"):
        values = json.loads((checkpoint / name).read_text())
        assert (values["eos_token_id"], values["pad_token_id"], values["bos_token_id"]) == (2, 0, 1)
    config = json.loads((checkpoint / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert config["tie_word_embeddings"] is False
    assert config["norm_topk_prob"] is True


def test_tokenizer_round_trips_after_saving(checkpoint: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    assert len(tokenizer) == 32
    assert (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1, 2)
    for prompt in arithmetic_prompts(100, seed=0):
        assert prompt.text is not None
        for text in (prompt.text, prompt.answer):
            token_ids = tokenizer.encode(text)
            assert token_ids == encode(text)
            assert tokenizer.decode(token_ids) == text
            assert tokenizer.decode([*token_ids, tokenizer.eos_token_id], skip_special_tokens=True) == text
    assert tokenizer.encode("Z") == [tokenizer.unk_token_id]


def test_the_seed_decides_the_weights(checkpoint: Path, tmp_path: Path) -> None:
    tokenizer = build_tokenizer()
    again = create_tiny_moe(tmp_path / "again", tokenizer=tokenizer, seed=1)
    other = create_tiny_moe(tmp_path / "other", tokenizer=tokenizer, seed=2)
    expected = (checkpoint / "model.safetensors").read_bytes()
    assert (again / "model.safetensors").read_bytes() == expected
    assert (other / "model.safetensors").read_bytes() != expected


def test_it_is_written_whole_or_not_at_all(checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(FileExistsError, match=r"exists\. Fix: remove it"):
        create_tiny_moe(checkpoint, tokenizer=build_tokenizer(), seed=1)

    class FailingTokenizer:
        pad_token_id, bos_token_id, eos_token_id = 0, 1, 2

        def __len__(self) -> int:
            return 32

        def save_pretrained(self, folder: Path) -> None:
            assert (folder / "model.safetensors").exists()
            raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        create_tiny_moe(tmp_path / "m", tokenizer=FailingTokenizer(), seed=1)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("sizes", "said"),
    [
        ({"num_heads": 4, "num_kv_heads": 3}, "num_heads=4 is no multiple of num_kv_heads=3"),
        ({"num_experts": 4, "top_k": 5}, "top_k=5 of num_experts=4"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, int], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        create_tiny_moe(tmp_path / "m", tokenizer=build_tokenizer(), seed=1, **sizes)
