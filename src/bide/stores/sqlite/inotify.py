"""Tidings from the Linux kernel that a file was written to."""

from __future__ import annotations

import ctypes
import os
import select
import struct

_MODIFY, _MOVED_TO, _CREATE = 0x2, 0x80, 0x100
_NONBLOCK, _CLOEXEC = os.O_NONBLOCK, os.O_CLOEXEC
_HEAD = struct.Struct("iIII")  # watch, mask, cookie, length of the name that follows
_FINE = 0.005
"""Seconds below which the time limit is left to `select`, which counts in microseconds: `poll` rounds up to 1 ms."""
_SELECTABLE = 1024
"""Descriptors from here on are beyond what `select` can take."""


class Inotify:
    """Watches one file, also when it is deleted and made again. Raises OSError where the kernel has no more watches."""

    def __init__(self, path: str) -> None:
        self._path = os.fsencode(path)
        self._name = os.path.basename(self._path)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._tidings = self._checked(self._libc.inotify_init1(_NONBLOCK | _CLOEXEC))
        self._stop_read, self._stop_write = os.pipe2(_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._tidings, select.POLLIN)
        self._poll.register(self._stop_read, select.POLLIN)
        try:
            # The folder tells when the file is made anew, which an open store does not let happen, but who knows.
            self._folder = self._watch(os.path.dirname(self._path), _CREATE | _MOVED_TO)
            self._watch_file()
        except OSError:
            self.close()
            raise

    def wait(self, timeout: float | None) -> bool:
        """Block until the file was written to (true), or so many seconds have passed, or `stop`."""
        if timeout is not None and timeout < _FINE and max(self._tidings, self._stop_read) < _SELECTABLE:
            told = self._tidings in select.select((self._tidings, self._stop_read), (), (), max(timeout, 0.0))[0]
        else:
            ready = self._poll.poll(None if timeout is None else timeout * 1000.0)
            told = any(descriptor == self._tidings for descriptor, _ in ready)
        return told and self.drain()

    def drain(self) -> bool:
        """Take what the kernel has to tell; whether it was about the file."""
        try:
            told = os.read(self._tidings, 65_536)
        except BlockingIOError:
            return False
        ours = False
        position = 0
        while position < len(told):
            watch, _, _, length = _HEAD.unpack_from(told, position)
            position += _HEAD.size + length
            if watch != self._folder:
                ours = True
            elif told[position - length : position].rstrip(b"\0") == self._name:
                self._watch_file()
                ours = True
        return ours

    def stop(self) -> None:
        """Make `wait` return, from any thread."""
        os.write(self._stop_write, b"x")

    def close(self) -> None:
        for descriptor in (self._tidings, self._stop_read, self._stop_write):
            os.close(descriptor)

    def _watch_file(self) -> None:
        try:
            self._watch(self._path, _MODIFY)
        except FileNotFoundError:
            return

    def _watch(self, path: bytes, mask: int) -> int:
        return self._checked(self._libc.inotify_add_watch(self._tidings, path, mask))

    @staticmethod
    def _checked(answer: int) -> int:
        if answer < 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number))
        return answer
