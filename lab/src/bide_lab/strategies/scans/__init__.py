"""Scans of a table.

The time stands in a column of a table, and somebody asks again and again which rows are due. It needs nothing that is
not there already. How late a row is and how often the table is read for nothing are one and the same choice.
"""
