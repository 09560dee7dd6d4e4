"""`python -m tests.lab.company WORDS`: the `prong` command, with a net so small that workers spend no time on it."""

from __future__ import annotations

import sys

from prong.lab.cli import main
from prong.lab.experiments import imagenet
from tests.lab.pictures import tiny_net

if __name__ == "__main__":
    imagenet.inception = tiny_net  # type: ignore[assignment]
    main(sys.argv[1:])
