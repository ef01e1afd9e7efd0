"""The console: pages that show coming load and act on it. It uses the engine's client alone.

`pages` takes a request to its page, with the viewer's session (see `access`); `rendering` makes text from outside
harmless, and turns templates into HTML in the viewer's language and zone (`i18n`, `words/`). Each page is a module that
queries `insight` and hands the result to a template. No page contains inline scripts, so that no script in a payload
can run.
"""
