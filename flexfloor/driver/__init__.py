"""The driver: it decides, starts and watches the processes, and never imports SGLang or Megatron."""
