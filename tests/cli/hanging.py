"""A device whose driver hangs: its process ignores SIGTERM. Imported by STEPMARK_TEST_HOOK."""

import signal
import sys
import time

if "check" in sys.argv and sys.argv[4].endswith("/1"):  # check FILE DEVICE PLACE
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(1000)
