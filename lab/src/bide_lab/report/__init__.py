"""A report of a results file: a page, tables in Markdown, and pictures.

    findings -> charts -> content -> document   Markdown: a file of its own, and the parts of docs/strategies.md
                                  -> page       one HTML file with all of it

The content is a list of blocks: paragraphs, tables, lists, drawings, and the pictures, which matplotlib draws. Nothing
here is measured and nothing is written by hand about a figure: whatever is said of one is computed from it.
"""
