"""`python run_module.py MODULE ARGUMENTS...`: `python -m MODULE`, with the working directory last in the module path.

`-m` puts it first, where a user's `token.py` or `accelerate.py` would replace the module of that name. Python 3.11's
`-P` leaves it out, but a function that is named as `module:name` may be there.
"""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[:] = [folder for folder in sys.path if folder != str(Path(__file__).parent)]
    sys.path.append(str(Path.cwd()))
    import runpy

    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
