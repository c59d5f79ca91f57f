"""Property tests draw the same examples every time and assert no time; the laws' assertions explain themselves."""

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("laws")
settings.register_profile("l2lopt", deadline=None, derandomize=True, database=None)
settings.load_profile("l2lopt")
