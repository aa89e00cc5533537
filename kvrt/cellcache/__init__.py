"""Bookkeeping of the cells of a Runtime: groups, windows, recurrent states, token history."""
