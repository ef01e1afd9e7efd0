"""The console measured: what each page costs at a million tasks, an open overview over a minute, and the first view.

    python bench/console.py                          SQLite and Redis, a file and a server of their own
    python bench/console.py sqlite:                  a SQLite file alone
    python bench/console.py redis://127.0.0.1:6379/0 on that Redis, in an empty database
    python bench/console.py --tasks 100000           with fewer
    python bench/console.py --json                   one line of JSON a figure, the table on stderr

The store is filled with a million tasks of ten topics that are due within the next 24 hours, 41,000 of them in one
second, and `bide serve` is started on it, as it ships. Then

    page        each page is asked for ten times, by HTTP over one connection on this machine; the time from the request
                to the last byte: the first time, the median and the worst. A page may take 300 ms at worst, the
                timeline 500 ms
    overview    the page of the overview stays open for a minute, which asks for what is new every two seconds: the
                processor time of the service in percent of one core, less what it takes while nobody looks, and on
                Redis that of the server too, together at most 1 %
    first view  the bytes of all answers that a browser with nothing in its cache needs for the first page, with their
                headers: at most 200 kB

The exit code is 1 if a bar was not met. Linux is needed. Run it on a machine that does nothing else.
"""

from __future__ import annotations

import sys

if __name__ == "__main__":
    # in the place of this folder, in which http.py would be found as the standard library's
    sys.path[0] = __file__.rpartition("bench")[0] or "."
    from bench.console_command import main

    sys.exit(main(__doc__))
