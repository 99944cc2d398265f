"""`python -m medusa`."""

from medusa.cli import main

main()
