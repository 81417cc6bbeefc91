"""Packs weights for SGLang's update_weights_from_tensor: the one step that holds SGLang's types.

Runs in the trainer's process, which finds it by entry point group `flexfloor.weight_payload`.
"""

import torch
from torch import Tensor


def serialize_bucket(named_tensors: list[tuple[str, Tensor]], num_ranks: int) -> list[str]:
    """One flattened bucket as base64 text per engine rank, to be sent with load_format `flattened_bucket`.

    The texts hold handles, not bytes: shared memory for CPU tensors, CUDA IPC for CUDA ones. So the engine
    must run on the same host, and the bucket must live here until it has answered.
    """
    # Imported here: it starts SGLang's platform detection, of no use to any other part of a trainer.
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    # The default hands file descriptors to children only; to an unrelated process it fails with "authkey
    # differs" and takes the engine's rank down.
    torch.multiprocessing.set_sharing_strategy("file_system")  # type: ignore[no-untyped-call]
    bucket = FlattenedTensorBucket(named_tensors=named_tensors)
    content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
    # One per rank: each keeps the shared memory alive until its rank has opened it.
    return [MultiprocessingSerializer.serialize(content, output_str=True) for _ in range(num_ranks)]
