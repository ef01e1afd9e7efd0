"""Logs on stderr, as JSON or as text, one line for each record. No text from outside can forge a line.

Topics, keys and errors come from callers. In JSON all non-ASCII characters are escaped, so that a line contains no
other line break; in text, every unprintable character is escaped.
"""

from __future__ import annotations

import json
import logging
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from bide.core.instants import instant_text
from bide.core.names import printable

LEVELS = ("debug", "info", "warning", "error")
AUDIT = "bide.audit"
"""The logger of the audit log, which is written at every level."""

_LONGEST = 8_192
"""The most characters of one text, so that a line stays below the 16 KiB at which container runtimes split it."""
_MOST = 100
_encode = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
_one_word = re.compile(r"[^\s\"'=]+").fullmatch
_DEEPEST = 4
_OWN = frozenset({"time", "level", "logger", "message", "exception", "trace_id", "span_id"})
_OF_A_RECORD = frozenset(vars(logging.LogRecord("", 0, "", 0, "", (), None))) | {"message", "asctime", "taskName"}


def setup(level: str = "info", *, json: bool = False, stream: TextIO | None = None) -> logging.Handler:
    """Send all logs of the program to stderr (or `stream`), replacing any earlier configuration.

    `level` is one of LEVELS. Python's warnings are logged too.
    """
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if json else Lines())
    logging.basicConfig(level=level.upper(), handlers=[handler], force=True)
    logging.getLogger(AUDIT).setLevel(logging.INFO)
    logging.captureWarnings(True)
    return handler


class JsonLines(logging.Formatter):
    """One JSON object: time, level, logger, message, the `extra` fields, and the exception if there is one."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _plain(_message(record)),
        }
        for name, value in _extra(record):
            line[f"extra_{name}" if name in _OWN else name] = _plain(value)
        line |= _trace()
        exception = _exception(self, record)
        if exception:
            line["exception"] = _cut(exception)
        return _encode(line)


class Lines(logging.Formatter):
    """`time LEVEL logger message name=value ...`, and a traceback on indented lines of its own."""

    def _head(self, record: logging.LogRecord) -> str:
        words = [_time(record), f"{record.levelname:<7}", record.name, printable(_cut(_message(record)))]
        words += [f"{printable(name)}={_shown(value)}" for name, value in _extra(record)]
        words += [f"{name}={value}" for name, value in _trace().items()]
        return " ".join(words)

    def format(self, record: logging.LogRecord) -> str:
        lines = [self._head(record)]
        exception = _exception(self, record)
        if exception:
            lines += ["    " + printable(line) for line in _cut(exception).split("\n")]
        return "\n".join(lines)


class ProcessLines(Lines):
    """The same for a process of several: `time LEVEL logger [pid] message`, in local time."""

    def _head(self, record: logging.LogRecord) -> str:
        where = f"{self.formatTime(record)} {record.levelname} {record.name} [{record.process}]"
        return f"{where} {printable(_cut(_message(record)))}"


def _time(record: logging.LogRecord) -> str:
    return instant_text(int(record.created * 1000))


def _message(record: logging.LogRecord) -> str:
    """The message; the bare format string, if its arguments do not fit it."""
    try:
        return record.getMessage()
    except Exception as error:  # noqa: BLE001 - whatever a __str__ raises
        return f"{_text(record.msg)} (its arguments do not fit: {type(error).__name__})"


def _exception(formatter: logging.Formatter, record: logging.LogRecord) -> str:
    parts: list[str] = []
    if record.exc_info:
        try:
            parts.append(formatter.formatException(record.exc_info))
        except Exception as error:  # noqa: BLE001 - whatever a __str__ raises
            parts.append(f"an exception that cannot be shown ({type(error).__name__})")
    elif record.exc_text:
        parts.append(record.exc_text)
    if record.stack_info:
        parts.append(record.stack_info)
    return "\n".join(parts)


def _extra(record: logging.LogRecord) -> Iterator[tuple[str, Any]]:
    for name, value in vars(record).items():
        if name not in _OF_A_RECORD and not name.startswith("_"):
            yield name, value


def _plain(value: Any, depth: int = 0) -> Any:
    """`value` as JSON; as text, if JSON has no such type."""
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return _cut(str(value))
    if isinstance(value, int):
        return int(value) if abs(value) < 2**53 else str(int(value))
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else str(float(value))
    if isinstance(value, bytes | bytearray):
        return _cut(bytes(value[: _LONGEST + 1]).decode("utf-8", "backslashreplace"))
    if depth < _DEEPEST:
        if isinstance(value, Mapping):
            return {_cut(_text(name)): _plain(one, depth + 1) for name, one in list(value.items())[:_MOST]}
        if isinstance(value, Sequence):
            return [_plain(one, depth + 1) for one in value[:_MOST]]
    return _cut(_text(value))


def _shown(value: Any) -> str:
    """A value as text, quoted unless it is one word."""
    if value is None:
        return "null"
    plain = _plain(value)
    text = plain if isinstance(plain, str) else json.dumps(plain, ensure_ascii=False, default=str)
    if text and _one_word(text) and text.isprintable():
        return text
    quoted = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{printable(quoted)}"'


def _text(value: Any) -> str:
    try:
        return str(value)
    except Exception as error:  # noqa: BLE001 - whatever a __str__ raises
        return f"a {type(value).__name__} that cannot be shown ({type(error).__name__})"


def _cut(text: str) -> str:
    """`text`, shortened, and without lone surrogates, which JSON parsers refuse."""
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}… ({len(text) - _LONGEST} more characters)"
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    return text


def _trace() -> dict[str, str]:
    """The ids of the current trace and span, if this program traces."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}
