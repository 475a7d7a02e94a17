"""`python -m taccl` is `taccl`."""

from taccl.cli import main

main()
