"""Megatron-Core 0.16 on a machine without CUDA: import `install` before any module of megatron or mbridge.

Nothing here is used on a GPU, and no installed file is edited: what Megatron-Core takes from `torch.cuda` is
replaced in this process (`fake_cuda`), a handful of its own functions are corrected (`patches`), and modules
that exist only as CUDA kernels get a torch counterpart (`modules`).
"""
