"""The process around a command: devices, signals, output, what it waits for."""
