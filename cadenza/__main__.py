"""`python -m cadenza …` is the command `cadenza`, from a checkout with nothing installed."""

import sys

from cadenza.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
