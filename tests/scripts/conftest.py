"""Scripts are imported from the repository's root, and so are they by their tests."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
