"""Hooks on sglang.srt.arg_groups.attention_hook."""

from typing import Any


def admit_torch_native(_server_args: Any) -> None:
    """Before `handle_deterministic_inference`."""
    from sglang.srt.arg_groups import choices

    # Plain torch attention runs request by request, so a row's result does not depend on its batch.
    if "torch_native" not in choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES:
        choices.add_deterministic_attention_backend_choices(["torch_native"])
