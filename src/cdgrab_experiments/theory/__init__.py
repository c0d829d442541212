"""The theory, checked: herding bounds, convergence rates, what workers, splits and step sizes do to them.

Every experiment ends in a figure, a table and verdicts, each with its margin. Sizes, grids and seeds are in
`settings.py`, all of them.
"""
