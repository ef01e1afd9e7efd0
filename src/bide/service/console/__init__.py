"""The console: pages that show the load before it comes, and act on it. It talks to the engine's client alone.

`router` finds the page for a request and its session (`sessions`); `page_request` is one request as pages see it;
`rendering` turns templates into HTML in the viewer's language and zone (`i18n`, `words/`), and `sanitize` makes text
from outside harmless. Then one module for each page: it asks the engine, and hands the result to a template. No script
of ours stands in a page, so none of a payload's can run in one.
"""
