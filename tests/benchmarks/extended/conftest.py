"""The benchmarks are scripts that import one another from their own folder."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
