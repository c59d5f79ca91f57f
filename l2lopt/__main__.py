"""`python -m l2lopt` is the command line."""

from l2lopt.cli import main

main()
