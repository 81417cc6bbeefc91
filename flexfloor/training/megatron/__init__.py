"""The only package that imports Megatron-Core and mbridge."""
