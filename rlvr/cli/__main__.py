"""`python -m rlvr.cli`: the command line without its script."""

from rlvr.cli.main import main

main()
