"""The server's own release of drained ranks, for drivers that know nothing of ranks."""
