"""The command `kvrt`."""
