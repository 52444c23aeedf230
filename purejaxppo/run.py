"""`python -m purejaxppo.run`, the same as `purejaxppo train`."""

import sys

from purejaxppo.cli import train_command

if __name__ == "__main__":
    sys.exit(train_command(sys.argv[1:]))
