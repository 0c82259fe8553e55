"""`python -m jobs.cli`: the same as the console script, for processes that start processes."""

from jobs.cli import main

main()
