"""The command `kvrt batch`."""
