"""`python -m rlvr.store URL REVISION`: take a database back to an older revision, for an older rlvr."""

import sys

from rlvr.store import StoreDown
from rlvr.store.migrate import main

try:
    print(main(sys.argv[1:]))
except (ValueError, StoreDown) as error:
    sys.exit(f"rlvr.store: {error}")
