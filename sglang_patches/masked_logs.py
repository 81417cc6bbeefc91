"""Keeps keys out of SGLang's log: it tells all its arguments at the start, the API keys among them."""

import logging

from flexfloor.masking import masked_text

LOGGERS = ("sglang.srt.entrypoints.engine", "sglang.srt.entrypoints.http_server", "sglang.srt.server_args")
"""Those that log arguments."""


def install() -> None:
    """In this process. May be called again."""
    for name in LOGGERS:
        target = logging.getLogger(name)
        if _mask not in target.filters:
            target.addFilter(_mask)


def _mask(record: logging.LogRecord) -> bool:
    text = record.getMessage()
    shown = masked_text(text)
    if shown != text:
        record.msg, record.args = shown, ()
    return True
