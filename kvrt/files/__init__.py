"""Files on a disk: written as a whole or not at all, locked, and read only where they are plain."""
