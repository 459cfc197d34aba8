"""`python -m drumline.scheduler.cli`: the `drumline` command where its script is not installed."""

from drumline.scheduler.cli import main

main()
