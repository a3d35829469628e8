"""`python -m eval` in a checkout, `python -m popvlm_eval` where the package is installed: the same as evaluate.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import typer
from evaluate import main

typer.run(main)
