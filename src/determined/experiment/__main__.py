"""`python -m determined.experiment ID`: drive an experiment; what `det experiment create` and `activate` start."""

import sys

from determined.experiment.runner import main

if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
