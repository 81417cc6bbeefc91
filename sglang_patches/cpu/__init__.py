"""What SGLang lacks on a CPU without AMX. Nothing here is imported on another device."""
