"""`python -m prong.lab`: the `prong` command, for torchrun."""

from prong.lab.cli import main

main()
