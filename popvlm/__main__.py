"""`python -m popvlm` is the command `popvlm`."""

from popvlm.cli import app

app(prog_name="popvlm")
