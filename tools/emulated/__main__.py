"""Verify an algorithm's configs without a GPU: python -m emulated PROBLEM ALGORITHM [WORD IN CONFIG]."""

import sys

from emulated.verify import verify

sys.exit(0 if verify(*sys.argv[1:]) else 1)
