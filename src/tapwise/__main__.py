"""`python -m tapwise` is the command line."""

from tapwise.cli import app

app()
