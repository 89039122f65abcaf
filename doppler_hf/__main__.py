"""`python -m doppler_hf`: the command `doppler-hf`."""

import sys

from doppler_hf.cli import main

if __name__ == "__main__":
    sys.exit(main())
