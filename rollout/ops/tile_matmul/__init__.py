"""The product of any number of rows with a packed weight, by a processor's matrix tiles (AMX).

It always adds in one order. oneDNN's products by tiles add in an order that depends on the number
of rows, so where there are tiles none of them is used. Where `native.supports` says no, products
are oneDNN's and `ops.panel_matmul`'s.

Legend: M rows, I input, O output features, P panels of 32 outputs, U units of a row (two numbers),
padded with zeros to a multiple of 16, L a unit of 32 rows: 64 numbers.
"""
