"""The only package that imports Megatron-Core and mbridge.

On a GPU it uses the Transformer Engine layer spec, NCCL, and fused kernels; on a CPU the local
layer spec, gloo, and what `cpu` adds. Everything else is one code for both. Only the CPU side was run so far;
what differs on a GPU was written from Megatron-Core 0.16.1's sources.
"""
