"""Labels of sparse reads: which arrays have them, and which blocks wait to be labelled again.

`indexed.py` says what is refused where layers choose by an indexer, which has no labels.
"""
