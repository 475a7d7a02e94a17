"""`python -m taccl` is `taccl`."""

from taccl.entry import main

main()
