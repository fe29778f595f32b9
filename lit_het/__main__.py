"""``python -m lit_het``: the command ``lit-het``."""

import sys

from lit_het.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
