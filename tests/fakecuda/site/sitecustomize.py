"""Python imports this at its start, where this folder is in PYTHONPATH: on_gpu.py puts it there.

FAKE_CUDA names the folder that build.py made. The fake libraries are loaded before torch: its own
ones ask for them by name, and get those that are there already.
"""

import os

if os.environ.get("FAKE_CUDA"):
    import fakecuda_loading

    fakecuda_loading.load_runtime()
