"""The product of a few rows with a weight in oneDNN's packed layout.

oneDNN takes twice the time at one to four rows, and 1.1 times at 48.
Where `native.supports` says no, products are oneDNN's.

Legend: M rows, I input, O output features, P panels of 64 outputs, U units of a row (two numbers),
L a unit of 64 rows: 128 numbers.
"""
