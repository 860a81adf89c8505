"""One HTML file about one or more runs, without server or network.

read.py reads a run's folder: figures, thinned to the resolution of a screen, and events. page.py
fills the template page.html. uPlot (MIT licence, uplot.LICENSE) draws the curves.
"""
