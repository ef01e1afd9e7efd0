"""What is made of a results file: findings (`findings`), and from them a page, a Markdown table and pictures.

    results file -> findings -> markdown   a file of tables
                             -> pictures   SVG, drawn by matplotlib
                             -> page       one HTML file with all of it

Nothing here is measured and nothing is written by hand about a figure: whatever is said of one is computed from it.
"""
