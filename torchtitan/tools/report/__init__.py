"""One HTML file about one or more runs, which opens anywhere: no server and no network.

read.py     what a run's folder tells: figures, thinned to what a screen shows, and what was done
pictures.py the layout and the pipeline's timeline, as SVG
page.py     the page, from page.html; uPlot (MIT licence, beside it) draws the curves
"""
