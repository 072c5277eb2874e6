"""`altup pretrain --precision fp8` with every linear map of the layers in 8 bits, however narrow.

    python benchmarks/pretrain_all_fp8.py --data DATA --size tiny --out RUN …      # as `altup pretrain`

Rounding pays in wide maps only, so a model of the size small computes none in 8 bits. Small models are what can be
trained to the end over seeds; this asks of them what 8 bits cost in quality.
"""

from __future__ import annotations

import sys

from altup.cli.main import main
from altup.nn import linear

if __name__ == "__main__":
    linear.PAYS = 0
    sys.argv[1:] = ["pretrain", *sys.argv[1:], "--precision", "fp8"]
    main()
