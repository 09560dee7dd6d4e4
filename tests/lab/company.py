"""`python -m tests.lab.company WORDS`: the `prong` command, with a small net, slow enough to be disturbed."""

from __future__ import annotations

import sys

from prong.lab.cli import main
from prong.lab.experiments import imagenet
from tests.lab.pictures import slow_net

if __name__ == "__main__":
    imagenet.inception = slow_net  # type: ignore[assignment]
    main(sys.argv[1:])
