"""HostCells bookkeeping of the cell mode: groups, windows, recurrent states, the token history."""
