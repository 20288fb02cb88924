"""The report of a run: one page that explains itself, and the same plots as PNG files.

    plots.py    which plots there are, as data
    notes.py    why a plot has no data
    drawing.py  matplotlib: the only place that draws, for the page and for PNG files alike
    theme.py    colours and type
    page.py     the page around the plots
    writing.py  `write_report`, which puts it together

Only `drawing` and `writing` import matplotlib. Equal records give equal bytes.
"""
