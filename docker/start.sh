#!/bin/sh
# Runs a command with the kernels that were compiled while the image was built. They are copied to where numba looks for
# them, because it only takes a folder that it can write to; on another CPU it compiles them there.
[ -e "${NUMBA_CACHE_DIR}" ] || cp -r /opt/skerry/numba "${NUMBA_CACHE_DIR}"
exec "$@"
