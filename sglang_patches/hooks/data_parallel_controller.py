"""Hooks on sglang.srt.managers.data_parallel_controller."""

from typing import Any


def wait_for_requests(controller: Any) -> None:
    """Before `DataParallelController.event_loop`."""
    from sglang_patches.cpu.patience import PatientSocket

    controller.recv_from_tokenizer = PatientSocket(controller.recv_from_tokenizer)
