#!/bin/sh
# Compiles the kernels into the image, which takes eight seconds of CPU, so that `start` has them. numba compares the
# time of their source file, of which a layer of an image may keep only the seconds.
set -e
find /opt/skerry/lib -name kernels_numba.py -exec touch -d @1 {} +
NUMBA_CACHE_DIR=/opt/skerry/numba /opt/skerry/bin/python3 -c "import skerry.wire.kernels_numba"
