"""Results that benchmarks/README.md is made from."""

from pathlib import Path
from typing import Final

DIRECTORY: Final = Path(__file__).parent
