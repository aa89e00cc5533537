"""Labels of sparse reads: which arrays have them, and which blocks wait to be labelled again."""
