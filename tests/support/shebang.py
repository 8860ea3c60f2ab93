"""Python scripts that can be executed."""

import sys

# As pip writes it: the kernel splits the line after #! at spaces, and reads at most 255 bytes of it.
SHEBANG = f"""#!/bin/sh
'''exec' "{sys.executable}" "$0" "$@"
' '''
"""
