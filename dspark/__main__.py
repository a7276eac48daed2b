"""`python -m dspark` is the command `dspark`."""

import sys

from dspark.cli import main

if __name__ == "__main__":
    sys.exit(main())
