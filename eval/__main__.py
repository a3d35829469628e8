"""`python -m eval` in a checkout, `python -m popvlm_eval` where the package is installed: the same as evaluate.py."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import typer

try:
    from evaluate import main
except ModuleNotFoundError as missing:
    raise SystemExit(f"the evaluation needs {missing.name}; pip install 'popvlm[eval]'") from None

typer.run(main)
