import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Every test has a token cache of its own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KEYHOLE_CACHE", str(folder))
    return folder
