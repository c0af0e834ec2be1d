import os

import pytest
import torch
from hypothesis import settings

# One thread: results do not depend on the machine, and tests that run side by side do not starve each other.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"  # and in processes that tests start
settings.register_profile("keyhole", deadline=None, print_blob=True)
settings.load_profile("keyhole")


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory):
    """No test reads or writes the token cache of the person who runs it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("KEYHOLE_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield
