"""Measures of an item's cells: parts of the kind ``measure``, named in a paper's file.

A measure returns one number of a cell, or the path of a picture; ``trains`` states whether the cell's experiment is run
first. Long work is kept in files (:meth:`~fedblend.papers.measures.base.CellRun.cached`), so that it is done once and
resumes after a stop.
"""
