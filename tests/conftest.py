"""Property tests draw the same examples every time and assert no time; the laws' assertions explain themselves.

Without a GPU Triton's kernels run in its interpreter, which must be chosen before Triton is imported.
"""

import os

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)  # fastest for small tensors, and steady beside a busy neighbour
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.register_assert_rewrite("laws")
settings.register_profile("l2lopt", deadline=None, derandomize=True, database=None)
settings.load_profile("l2lopt")
