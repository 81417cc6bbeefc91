"""The driver: it decides, starts and watches the processes, and never imports SGLang or Megatron."""

from flexfloor.driver.loop import run

__all__ = ["run"]
